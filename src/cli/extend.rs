//! `gristmill extend`: raises the budget or deadline of a job, stopped or not.

use std::time::Duration;

use anyhow::anyhow;
use serde_json::json;

use crate::cli::args::{ExtendArgs, shell_word};
use crate::cli::exit::{Exit, Failure};
use crate::cli::limits::{Used, limit_lines};
use crate::cli::output::ledger_at;
use crate::ledger::spend::OtherSpendings;
use crate::ledger::spend::dollars;
use crate::ledger::{JobLimits, Ledger, LimitsFrom, StopWhy};
use crate::report::cost::show_dollars;
use crate::report::progress::show_duration;

/// The workers' default log interval.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

pub(super) async fn extend(args: ExtendArgs) -> Result<Exit, Failure> {
    if args.usd.is_none() && args.deadline.is_none() {
        return Err(Failure::bad_job(anyhow!(
            "neither `--usd` nor `--deadline` is given: name the limit to raise, or both"
        )));
    }
    let ledger = ledger_at(&args.output).await?;
    let name = &ledger.job().name;
    let is_finished = ledger.finish_check(None).await?.is_some();
    let mut control = ledger.control().await?;
    let terms = loop {
        let stopped = control.stopped();
        if stopped == Some(StopWhy::Cancelled) {
            eprintln!("gristmill: job `{name}` was cancelled: more money or time does not bring it back");
            return Ok(Exit::Cancelled);
        }
        let holds = ledger.limits(&control);
        let wanted = JobLimits {
            usd: args.usd.or(holds.usd),
            deadline_seconds: args.deadline.or(holds.deadline_seconds),
            ..holds
        };
        let used = Used::of(&ledger).await?;
        check(&used, &holds, &wanted).map_err(|why| Failure::bad_job(anyhow!("job `{name}`: {why}")))?;
        let order = control.extend_to(&wanted, Some(LimitsFrom::Extend));
        if control.give(order).await? {
            break wanted;
        }
    };
    let used = Used::of(&ledger).await?;
    if args.json {
        let json = json!({
            "job": name,
            "id": ledger.job().job,
            "output": ledger.store().url().as_str(),
            "budget": {"usd": terms.usd, "deadline_seconds": terms.deadline_seconds, "unfinished": terms.unfinished},
            "used": {"usd": used.usd(&terms), "seconds": used.age.as_secs()},
        });
        println!("{json}");
        return Ok(Exit::Done);
    }
    println!("job         {name}");
    for line in limit_lines(&terms, control.limits_from(), &used) {
        println!("{line}");
    }
    for line in lacking(&ledger, &terms, &used).await? {
        println!("{line}");
    }
    let url = shell_word(ledger.store().url().as_str());
    if is_finished {
        println!("next        it is finished: the limits hold for what `gristmill retry {url}` begins");
    } else {
        println!("next        a job of `gristmill run`: run its job file again");
        println!("            a job of workers: those at it go on; gristmill reconcile {url} --queue URL");
        println!("            enqueues what they have given up");
    }
    Ok(Exit::Done)
}

/// Warns if the new limits still stop the workers at once: each worker reserves what the others may
/// spend before they learn of a stop.
async fn lacking(ledger: &Ledger, terms: &JobLimits, used: &Used) -> Result<Vec<String>, Failure> {
    let mut at_it = OtherSpendings::default();
    ledger.list_spends("", &mut at_it).await?;
    ledger.read_changed_spends(&mut at_it).await?;
    let workers = at_it.live(2 * LOG_INTERVAL);
    Ok(said_lacking(terms, used, workers).into_iter().collect())
}

/// Pure: the warning for `workers` workers; `None` if the job can continue.
fn said_lacking(terms: &JobLimits, used: &Used, workers: u32) -> Option<String> {
    let held = dollars(
        f64::from(workers.saturating_sub(1)) * LOG_INTERVAL.as_secs_f64(),
        terms.usd_per_hour,
    )?;
    let (most, spent) = terms.usd.zip(used.usd(terms))?;
    (spent + held >= most).then(|| {
        format!(
            "reserve     {workers} workers were at it last, and each holds {} back for the others (a log interval of {} s each): they stop at \
             once, unless `--usd` is more than {}",
            show_dollars(held),
            LOG_INTERVAL.as_secs(),
            show_dollars(spent + held)
        )
    })
}

/// Pure: checks that these limits may replace those in force.
fn check(used: &Used, holds: &JobLimits, wanted: &JobLimits) -> Result<(), String> {
    if wanted.usd.is_some() && wanted.usd != holds.usd && wanted.usd_per_hour.is_none_or(|price| price == 0.0) {
        return Err("it has no price: `--usd` needs `budget.usd_per_hour` in the job file".into());
    }
    match used.reached(wanted) {
        Some(StopWhy::Budget) => Err(format!(
            "{} are spent already: give `--usd` a larger value than that",
            show_dollars(used.usd(wanted).unwrap_or_default())
        )),
        Some(_) => Err(format!(
            "it began {} ago: give `--deadline` a larger value than that",
            show_duration(used.age.as_secs_f64())
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Unfinished;

    fn limits(usd: Option<f64>, deadline_seconds: Option<u64>) -> JobLimits {
        JobLimits {
            usd,
            deadline_seconds,
            unfinished: Unfinished::Keep,
            usd_per_hour: Some(3600.0),
        }
    }

    fn used(device_seconds: f64, age_seconds: u64) -> Used {
        Used {
            device_seconds,
            age: Duration::from_secs(age_seconds),
        }
    }

    #[test]
    fn what_workers_hold_back_for_each_other_is_told() {
        // At a dollar a second, each of three workers reserves a minute for each of the two others.
        let (terms, at) = (limits(Some(125.0), None), used(5.0, 30));
        let line = said_lacking(&terms, &at, 3).unwrap();
        for words in ["3 workers", "holds $120.00 back", "more than $125.00"] {
            assert!(line.contains(words), "{words}: {line}");
        }
        assert_eq!(said_lacking(&terms, &at, 2), None);
        assert_eq!(said_lacking(&terms, &at, 1), None);
        let priceless = JobLimits {
            usd_per_hour: None,
            ..terms
        };
        assert_eq!(said_lacking(&priceless, &at, 9), None);
    }

    #[test]
    fn what_is_reached_already_is_refused() {
        let holds = limits(Some(5.0), Some(60));
        let at = used(5.0, 30);
        assert_eq!(check(&at, &holds, &limits(Some(6.0), Some(60))), Ok(()));
        assert!(
            check(&at, &holds, &limits(Some(4.0), Some(60)))
                .unwrap_err()
                .contains("$5.00 are spent")
        );
        let late = used(1.0, 90);
        assert!(
            check(&late, &holds, &limits(Some(6.0), Some(60)))
                .unwrap_err()
                .contains("1m 30s ago")
        );
        assert_eq!(check(&late, &holds, &limits(Some(6.0), Some(120))), Ok(()));
        let priceless = |usd| JobLimits {
            usd_per_hour: None,
            ..limits(usd, None)
        };
        assert!(
            check(&at, &priceless(None), &priceless(Some(1.0)))
                .unwrap_err()
                .contains("no price")
        );
    }
}
