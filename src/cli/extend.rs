//! `gristmill extend`: raises the budget or deadline of a job, stopped or not.

use std::time::Duration;

use anyhow::anyhow;
use serde_json::json;

use crate::cli::args::{ExtendArgs, shell_word};
use crate::cli::exit::{Exit, Failure};
use crate::cli::limits::{LimitUse, limit_lines};
use crate::cli::output::own_ledger_at;
use crate::ledger::control::ControlLog;
use crate::ledger::spend::OtherSpendings;
use crate::ledger::spend::dollars;
use crate::ledger::{JobLimits, Ledger, LimitsFrom, StopWhy};
use crate::report::cost::show_dollars;
use crate::report::progress::show_duration;

/// The workers' log interval, assumed to be the default.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

pub(super) async fn extend(args: ExtendArgs) -> Result<Exit, Failure> {
    if args.usd.is_none() && args.deadline.is_none() {
        return Err(Failure::bad_job(anyhow!(
            "neither `--usd` nor `--deadline` is given: name the limit to raise, or both"
        )));
    }
    let ledger = own_ledger_at(&args.output).await?;
    let name = &ledger.job().name;
    let is_finished = ledger.finish_check(None).await?.is_some();
    let mut control = ledger.control().await?;
    let limits = match raise_limits(&ledger, &mut control, args.usd, args.deadline).await? {
        Ok(limits) => limits,
        Err(ExtendRefusal::Cancelled) => {
            eprintln!("gristmill: job `{name}` {}", ExtendRefusal::Cancelled);
            return Ok(Exit::Cancelled);
        }
        Err(refusal) => return Err(Failure::bad_job(anyhow!("job `{name}`: {refusal}"))),
    };
    let used = LimitUse::of(&ledger).await?;
    if args.json {
        let json = json!({
            "job": name,
            "id": ledger.job().job,
            "output": ledger.store().url().as_str(),
            "budget": {"usd": limits.usd, "deadline_seconds": limits.deadline_seconds, "unfinished": limits.unfinished},
            "used": {"usd": used.usd(&limits), "seconds": used.age.as_secs()},
        });
        println!("{json}");
        return Ok(Exit::Done);
    }
    println!("job         {name}");
    for line in limit_lines(&limits, control.limits_source(), &used) {
        println!("{line}");
    }
    for line in reserve_warning(&ledger, &limits, &used).await? {
        println!("{line}");
    }
    let url = shell_word(ledger.store().url().as_str());
    if is_finished {
        println!("next        the job is finished: the new limits apply only to a later `gristmill retry {url}`");
    } else {
        println!("next        a job of `gristmill run`: run its job file again");
        println!("            if workers run the job, they continue; gristmill reconcile {url} --queue URL");
        println!("            enqueues the shards whose workers have stopped");
    }
    Ok(Exit::Done)
}

/// Why limits are not raised.
#[derive(Debug, thiserror::Error)]
pub(super) enum ExtendRefusal {
    #[error("was cancelled: more money or time does not bring it back")]
    Cancelled,
    #[error("{0}")]
    Limits(String),
}

/// Replaces these limits of a job, and returns those that are then in force.
pub(super) async fn raise_limits(
    ledger: &Ledger,
    control: &mut ControlLog,
    usd: Option<f64>,
    deadline_seconds: Option<u64>,
) -> Result<Result<JobLimits, ExtendRefusal>, Failure> {
    loop {
        if control.stop_reason() == Some(StopWhy::Cancelled) {
            return Ok(Err(ExtendRefusal::Cancelled));
        }
        let current = ledger.limits(control);
        let wanted = JobLimits {
            usd: usd.or(current.usd),
            deadline_seconds: deadline_seconds.or(current.deadline_seconds),
            ..current
        };
        let used = LimitUse::of(ledger).await?;
        if let Err(why) = check_limits(&used, &current, &wanted) {
            return Ok(Err(ExtendRefusal::Limits(why)));
        }
        let command = control.extend_command(&wanted, Some(LimitsFrom::Extend));
        if control.try_append(command).await? {
            return Ok(Ok(wanted));
        }
    }
}

/// Warns if the workers would still stop at once under the new limits: each worker reserves what
/// the others may spend before they learn of a stop.
async fn reserve_warning(ledger: &Ledger, limits: &JobLimits, used: &LimitUse) -> Result<Vec<String>, Failure> {
    let mut spendings = OtherSpendings::default();
    ledger.list_spends("", &mut spendings).await?;
    ledger.read_changed_spends(&mut spendings).await?;
    let workers = spendings.live_workers(2 * LOG_INTERVAL);
    Ok(reserve_warning_line(limits, used, workers).into_iter().collect())
}

/// Pure: the warning for a job with this many workers; `None` if the job can continue.
fn reserve_warning_line(limits: &JobLimits, used: &LimitUse, workers: u32) -> Option<String> {
    let reserve = dollars(
        f64::from(workers.saturating_sub(1)) * LOG_INTERVAL.as_secs_f64(),
        limits.usd_per_hour,
    )?;
    let (budget, spent) = limits.usd.zip(used.usd(limits))?;
    (spent + reserve >= budget).then(|| {
        format!(
            "reserve     {workers} workers were active, and each reserves {} for the others (a log interval of {} s each): they stop at \
             once, unless `--usd` is more than {}",
            show_dollars(reserve),
            LOG_INTERVAL.as_secs(),
            show_dollars(spent + reserve)
        )
    })
}

/// Pure: checks that these limits may replace those in force.
fn check_limits(used: &LimitUse, current: &JobLimits, wanted: &JobLimits) -> Result<(), String> {
    if wanted.usd.is_some() && wanted.usd != current.usd && wanted.usd_per_hour.is_none_or(|price| price == 0.0) {
        return Err("it has no price: `--usd` needs `budget.usd_per_hour` in the job file".into());
    }
    match used.reached_limit(wanted) {
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

    fn used(device_seconds: f64, age_seconds: u64) -> LimitUse {
        LimitUse {
            device_seconds,
            age: Duration::from_secs(age_seconds),
        }
    }

    #[test]
    fn a_reserve_that_stops_the_workers_is_a_warning() {
        // The price is a dollar a second, and the log interval is a minute. So each of three
        // workers reserves $120 for the two others.
        let (raised, use_so_far) = (limits(Some(125.0), None), used(5.0, 30));
        let line = reserve_warning_line(&raised, &use_so_far, 3).unwrap();
        for words in ["3 workers", "reserves $120.00", "more than $125.00"] {
            assert!(line.contains(words), "{words}: {line}");
        }
        assert_eq!(reserve_warning_line(&raised, &use_so_far, 2), None);
        assert_eq!(reserve_warning_line(&raised, &use_so_far, 1), None);
        let priceless = JobLimits {
            usd_per_hour: None,
            ..raised
        };
        assert_eq!(reserve_warning_line(&priceless, &use_so_far, 9), None);
    }

    #[test]
    fn limits_already_reached_are_refused() {
        let current = limits(Some(5.0), Some(60));
        let use_so_far = used(5.0, 30);
        assert_eq!(
            check_limits(&use_so_far, &current, &limits(Some(6.0), Some(60))),
            Ok(())
        );
        assert!(
            check_limits(&use_so_far, &current, &limits(Some(4.0), Some(60)))
                .unwrap_err()
                .contains("$5.00 are spent")
        );
        let late = used(1.0, 90);
        assert!(
            check_limits(&late, &current, &limits(Some(6.0), Some(60)))
                .unwrap_err()
                .contains("1m 30s ago")
        );
        assert_eq!(check_limits(&late, &current, &limits(Some(6.0), Some(120))), Ok(()));
        let priceless = |usd| JobLimits {
            usd_per_hour: None,
            ..limits(usd, None)
        };
        assert!(
            check_limits(&use_so_far, &priceless(None), &priceless(Some(1.0)))
                .unwrap_err()
                .contains("no price")
        );
    }
}
