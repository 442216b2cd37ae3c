//! `gristmill extend`: more money or time for a job, stopped or not.

use std::time::Duration;

use anyhow::anyhow;
use serde_json::json;

use crate::cli::args::ExtendArgs;
use crate::cli::door::ledger_at;
use crate::cli::exit::{Exit, Failure};
use crate::job::spec::Budget;
use crate::ledger::{Ledger, Order, StopWhy, Terms};
use crate::report::cost::{dollars, show_dollars};
use crate::report::progress::show_duration;
use crate::worker::Limits;

/// What a job has used of its limits.
#[derive(Debug, Clone, Copy)]
pub struct Used {
    /// Device seconds of all workers.
    pub device_seconds: f64,
    pub usd_per_hour: Option<f64>,
    /// Since the job was created.
    pub age: Duration,
}

impl Used {
    /// By now.
    pub async fn of(ledger: &Ledger) -> Result<Used, Failure> {
        Ok(Used::with(ledger, ledger.spent().await?.device_seconds()))
    }

    /// By now, where what was spent is known.
    pub fn with(ledger: &Ledger, device_seconds: f64) -> Used {
        Used {
            device_seconds,
            usd_per_hour: ledger.job().usd_per_hour,
            age: (chrono::Utc::now() - ledger.created_at()).to_std().unwrap_or_default(),
        }
    }

    /// `None` where the job has no price.
    pub fn usd(&self) -> Option<f64> {
        dollars(self.device_seconds, self.usd_per_hour)
    }

    /// Which of these limits is reached, if any.
    pub fn reached(&self, terms: &Terms) -> Option<StopWhy> {
        Limits::of(terms, self.usd_per_hour).reached(self.device_seconds, self.age)
    }
}

pub async fn extend(args: ExtendArgs) -> Result<Exit, Failure> {
    let ledger = ledger_at(&args.output).await?;
    let name = &ledger.job().name;
    if ledger.finish_check(None).await?.is_some() {
        println!("job `{name}` is already finished: nothing to extend");
        return Ok(Exit::Done);
    }
    let mut control = ledger.control().await?;
    let terms = loop {
        let stopped = control.stopped();
        if stopped == Some(StopWhy::Cancelled) {
            eprintln!("gristmill: job `{name}` was cancelled: more money or time does not bring it back");
            return Ok(Exit::Cancelled);
        }
        let holds = ledger.terms(&control);
        let wanted = Terms {
            usd: args.usd.or(holds.usd),
            deadline_seconds: args.deadline.or(holds.deadline_seconds),
            ..holds
        };
        let used = Used::of(&ledger).await?;
        check(&used, &holds, &wanted).map_err(|why| Failure::bad_job(anyhow!("job `{name}`: {why}")))?;
        let order = Order::Extend {
            budget_usd: wanted.usd,
            deadline_seconds: wanted.deadline_seconds,
        };
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
            "used": {"usd": used.usd(), "seconds": used.age.as_secs()},
        });
        println!("{json}");
        return Ok(Exit::Done);
    }
    println!("job         {name}");
    for line in limit_lines(&terms, &used) {
        println!("{line}");
    }
    println!(
        "next        workers that are at it go on; gristmill reconcile {} --queue URL",
        ledger.store().url()
    );
    println!("            enqueues what they have given up");
    Ok(Exit::Done)
}

/// Pure: may these limits take the place of those that hold?
fn check(used: &Used, holds: &Terms, wanted: &Terms) -> Result<(), String> {
    if wanted.usd.is_some() && wanted.usd != holds.usd && used.usd_per_hour.is_none_or(|price| price == 0.0) {
        return Err("it has no price: `--usd` needs `budget.usd_per_hour` in the job file".into());
    }
    match used.reached(wanted) {
        Some(StopWhy::Budget) => Err(format!(
            "{} are spent already: give `--usd` a larger value than that",
            show_dollars(used.usd().unwrap_or_default())
        )),
        Some(_) => Err(format!(
            "it began {} ago: give `--deadline` a larger value than that",
            show_duration(used.age.as_secs_f64())
        )),
        None => Ok(()),
    }
}

/// For people: budget and deadline, and what is left of each.
pub fn limit_lines(terms: &Terms, used: &Used) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some((most, spent)) = terms.usd.zip(used.usd()) {
        lines.push(format!(
            "budget      {}, {} left",
            show_dollars(most),
            show_dollars((most - spent).max(0.0))
        ));
    }
    if let Some(seconds) = terms.deadline_seconds {
        let left = seconds as f64 - used.age.as_secs_f64();
        let left = match left > 0.0 {
            true => format!("{} left", show_duration(left)),
            false => format!("passed {} ago", show_duration(-left)),
        };
        lines.push(format!(
            "deadline    {} after the job's start, {left}",
            show_duration(seconds as f64)
        ));
    }
    lines
}

/// The limits that a job file asks for now, where somebody has edited them since the job was created, they allow more
/// than what holds, and they are not reached.
pub async fn more(ledger: &Ledger, holds: &Terms, budget: &Budget) -> Result<Option<Terms>, Failure> {
    let wanted = wider(&ledger.job().terms, holds, budget);
    if wanted == *holds {
        return Ok(None);
    }
    Ok(Used::of(ledger).await?.reached(&wanted).is_none().then_some(wanted))
}

/// Pure: `holds`, with each limit that was edited in the job file since and is wider there.
fn wider(created: &Terms, holds: &Terms, budget: &Budget) -> Terms {
    fn pick<T: PartialOrd + Copy>(created: Option<T>, holds: Option<T>, wanted: Option<T>) -> Option<T> {
        match (holds, wanted) {
            _ if wanted == created => holds,
            (None, _) | (_, None) => None,
            (Some(now), Some(most)) if most > now => Some(most),
            (now, _) => now,
        }
    }
    Terms {
        usd: pick(created.usd, holds.usd, budget.usd),
        deadline_seconds: pick(
            created.deadline_seconds,
            holds.deadline_seconds,
            budget.deadline_seconds,
        ),
        ..*holds
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Unfinished;

    fn terms(usd: Option<f64>, deadline_seconds: Option<u64>) -> Terms {
        Terms {
            usd,
            deadline_seconds,
            unfinished: Unfinished::Keep,
        }
    }

    fn used(device_seconds: f64, age_seconds: u64) -> Used {
        Used {
            device_seconds,
            usd_per_hour: Some(3600.0),
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
        let priceless = Used {
            usd_per_hour: None,
            ..at
        };
        assert!(
            check(&priceless, &terms(None, None), &terms(Some(1.0), None))
                .unwrap_err()
                .contains("no price")
        );
    }

    #[test]
    fn an_edited_job_file_only_ever_gives_more() {
        let file = |usd: Option<f64>, deadline_seconds| Budget {
            usd,
            deadline_seconds,
            ..Budget::default()
        };
        let (created, holds) = (terms(Some(5.0), None), terms(Some(8.0), Some(60)));
        assert_eq!(wider(&created, &holds, &file(Some(5.0), None)), holds, "not edited");
        assert_eq!(
            wider(&created, &holds, &file(Some(7.0), None)),
            holds,
            "less than was given since"
        );
        assert_eq!(
            wider(&created, &holds, &file(Some(9.0), None)),
            terms(Some(9.0), Some(60))
        );
        assert_eq!(wider(&created, &holds, &file(None, Some(90))), terms(None, Some(90)));
    }

    #[test]
    fn limits_say_what_is_left() {
        let lines = limit_lines(&terms(Some(5.0), Some(60)), &used(1.5, 90));
        assert_eq!(
            lines,
            [
                "budget      $5.00, $3.50 left",
                "deadline    1m 0s after the job's start, passed 30s ago"
            ]
        );
        assert!(limit_lines(&terms(None, None), &used(1.0, 1)).is_empty());
    }
}
