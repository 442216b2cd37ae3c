//! `gristmill extend`: more money or time for a job, stopped or not.

use anyhow::anyhow;
use serde_json::json;

use crate::cli::args::ExtendArgs;
use crate::cli::exit::{Exit, Failure};
use crate::cli::limits::{Used, limit_lines};
use crate::cli::prepare::ledger_at;
use crate::ledger::{JobLimits, LimitsFrom, StopWhy};
use crate::report::cost::show_dollars;
use crate::report::progress::show_duration;

pub async fn extend(args: ExtendArgs) -> Result<Exit, Failure> {
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
        let holds = ledger.terms(&control);
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
    let url = ledger.store().url();
    if is_finished {
        println!("next        it is finished: the limits hold for what `gristmill retry {url}` begins");
    } else {
        println!("next        workers that are at it go on; gristmill reconcile {url} --queue URL");
        println!("            enqueues what they have given up");
    }
    Ok(Exit::Done)
}

/// Pure: may these limits take the place of those that hold?
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
    use std::time::Duration;

    use super::*;
    use crate::ledger::Unfinished;

    fn terms(usd: Option<f64>, deadline_seconds: Option<u64>) -> JobLimits {
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
    fn what_is_reached_already_is_refused() {
        let holds = terms(Some(5.0), Some(60));
        let at = used(5.0, 30);
        assert_eq!(check(&at, &holds, &terms(Some(6.0), Some(60))), Ok(()));
        assert!(
            check(&at, &holds, &terms(Some(4.0), Some(60)))
                .unwrap_err()
                .contains("$5.00 are spent")
        );
        let late = used(1.0, 90);
        assert!(
            check(&late, &holds, &terms(Some(6.0), Some(60)))
                .unwrap_err()
                .contains("1m 30s ago")
        );
        assert_eq!(check(&late, &holds, &terms(Some(6.0), Some(120))), Ok(()));
        let priceless = |usd| JobLimits {
            usd_per_hour: None,
            ..terms(usd, None)
        };
        assert!(
            check(&at, &priceless(None), &priceless(Some(1.0)))
                .unwrap_err()
                .contains("no price")
        );
    }
}
