//! A job's limits: their use so far, and their changes when the job file is read again.

use std::time::Duration;

use crate::cli::exit::Failure;
use crate::ledger::spend::dollars;
use crate::ledger::{JobCommand, JobLimits, Ledger, LimitsFrom, StopWhy, Unfinished};
use crate::report::cost::show_dollars;
use crate::report::progress::show_duration;
use crate::worker::WorkerLimits;

/// A job's use of its limits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Used {
    /// Device seconds of all workers together.
    pub device_seconds: f64,
    /// Time since the job was created.
    pub age: Duration,
}

impl Used {
    /// Current use.
    pub(super) async fn of(ledger: &Ledger) -> Result<Used, Failure> {
        Ok(Used::with(ledger, ledger.spent().await?.device_seconds()))
    }

    /// Current use, given the device seconds. The age is by this machine's clock, since the
    /// ledger's last write may be old.
    pub(super) fn with(ledger: &Ledger, device_seconds: f64) -> Used {
        Used {
            device_seconds,
            age: (chrono::Utc::now() - ledger.created_at()).to_std().unwrap_or_default(),
        }
    }

    /// The total cost at the current price; `None` without a price.
    pub(super) fn usd(&self, terms: &JobLimits) -> Option<f64> {
        dollars(self.device_seconds, terms.usd_per_hour)
    }

    /// The first of these limits that is reached, if any.
    pub(super) fn reached(&self, terms: &JobLimits) -> Option<StopWhy> {
        WorkerLimits::of(terms).reached(self.device_seconds, self.age)
    }
}

/// Why a begun job does not continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Held {
    pub why: StopWhy,
    /// Whether its unfinished rows still become rows of the output.
    pub closes: bool,
}

/// Applies the limits `file` of a begun job's file. If they differ from those that `run` or
/// `submit` last read, they replace all current limits, including those of `extend`. A reached
/// limit stops the job; a stopped job continues if no limit is reached. Prints the orders that it
/// gives, and returns what still holds the job.
pub(super) async fn follow_file(ledger: &Ledger, file: &JobLimits, quiet: bool) -> Result<Option<Held>, Failure> {
    let used = Used::of(ledger).await?;
    let mut control = ledger.control().await?;
    // Each iteration gives one order; orders written by others in the meantime are read like all
    // others.
    loop {
        let held = control.stopped().map(|why| Held {
            why,
            closes: control.closes(),
        });
        if held.is_some_and(|held| held.why == StopWhy::Cancelled) {
            return Ok(held);
        }
        let holds = ledger.limits(&control);
        let is_changed = *file != ledger.limits_of_file(&control);
        let (order, said) = match (held, used.reached(&holds)) {
            _ if is_changed => {
                let order = control.extend_to(file, Some(LimitsFrom::JobFile));
                (
                    order,
                    changes(&holds, file).map(|changes| format!("its limits are now those of the job file: {changes}")),
                )
            }
            (None, None) => return Ok(None),
            (Some(held), Some(why)) => return Ok(Some(Held { why, ..held })),
            (None, Some(why)) => (JobCommand::stop(why, holds.unfinished == Unfinished::Expire), None),
            (Some(held), None) => {
                let mended = (held.why == StopWhy::InputChanged)
                    .then(|| "it goes on: it was stopped since an input had changed".to_string());
                (control.extend_to(&holds, control.limits_from()), mended)
            }
        };
        if control.give(order).await?
            && let Some(said) = said.filter(|_| !quiet)
        {
            eprintln!("job `{}`: {said}", ledger.job().name);
        }
    }
}

/// The differences of `file` from the limits in force, in words; `None` if there are none.
fn changes(holds: &JobLimits, file: &JobLimits) -> Option<String> {
    let usd = |usd: Option<f64>| usd.map_or("none".into(), show_dollars);
    let time = |seconds: Option<u64>| seconds.map_or("none".into(), |seconds| show_duration(seconds as f64));
    let pairs = [
        ("budget", usd(file.usd), usd(holds.usd), file.usd != holds.usd),
        (
            "price of an hour",
            usd(file.usd_per_hour),
            usd(holds.usd_per_hour),
            file.usd_per_hour != holds.usd_per_hour,
        ),
        (
            "deadline",
            time(file.deadline_seconds),
            time(holds.deadline_seconds),
            file.deadline_seconds != holds.deadline_seconds,
        ),
        (
            "unfinished rows",
            unfinished(file).into(),
            unfinished(holds).into(),
            file.unfinished != holds.unfinished,
        ),
    ];
    let changed = pairs.into_iter().filter(|(_, _, _, is_other)| *is_other);
    let words: Vec<String> = changed
        .map(|(what, is, was, _)| format!("{what} {is} (was {was})"))
        .collect();
    (!words.is_empty()).then(|| words.join(", "))
}

fn unfinished(terms: &JobLimits) -> &'static str {
    match terms.unfinished {
        Unfinished::Keep => "keep",
        Unfinished::Expire => "expire",
    }
}

/// Lines for the terminal: budget and deadline, the rest of each, and who set them.
pub(super) fn limit_lines(terms: &JobLimits, from: Option<LimitsFrom>, used: &Used) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some((most, spent)) = terms.usd.zip(used.usd(terms)) {
        lines.push(format!(
            "budget      {}, {} left",
            show_dollars(most),
            show_dollars((most - spent).max(0.0))
        ));
    }
    if let Some(seconds) = terms.deadline_seconds {
        let left = seconds as f64 - used.age.as_secs_f64();
        let left = if left > 0.0 {
            format!("{} left", show_duration(left))
        } else {
            format!("passed {} ago", show_duration(-left))
        };
        lines.push(format!(
            "deadline    {} after the job's start, {left}",
            show_duration(seconds as f64)
        ));
    }
    let none = if lines.is_empty() { "none, " } else { "" };
    lines.push(format!("limits      {none}{}", set_by(from)));
    lines
}

fn set_by(from: Option<LimitsFrom>) -> &'static str {
    match from {
        Some(LimitsFrom::JobFile) => "by the job file",
        Some(LimitsFrom::Extend) => "by `gristmill extend`",
        None => "by an order of an older gristmill",
    }
}

/// A line for the terminal: the limit that stopped the job, who set it, and its use.
pub(super) async fn reached_line(ledger: &Ledger, why: StopWhy) -> Result<String, Failure> {
    let control = ledger.control().await?;
    let used = Used::of(ledger).await?;
    Ok(said_reached(
        why,
        &ledger.limits(&control),
        control.limits_from(),
        control.note(),
        &used,
    ))
}

/// The same line, with the job file's field to raise.
pub(super) async fn what_to_raise(ledger: &Ledger, why: StopWhy) -> Result<String, Failure> {
    let field = match why {
        StopWhy::Deadline => "deadline",
        _ => "usd",
    };
    Ok(format!("{}; raise `budget.{field}`", reached_line(ledger, why).await?))
}

/// Pure: builds the line. `note` is the finding of the worker that stopped the job.
fn said_reached(why: StopWhy, terms: &JobLimits, from: Option<LimitsFrom>, note: Option<&str>, used: &Used) -> String {
    let from = set_by(from);
    match why {
        StopWhy::Deadline => {
            let most = show_duration(terms.deadline_seconds.unwrap_or_default() as f64);
            let age = show_duration(used.age.as_secs_f64());
            format!("the deadline is reached, {most} after the job's start (set {from}): it began {age} ago")
        }
        _ => {
            let most = show_dollars(terms.usd.unwrap_or_default());
            let spent = format!("{} are spent", show_dollars(used.usd(terms).unwrap_or_default()));
            format!(
                "the budget of {most} (set {from}) is reached: {}",
                note.unwrap_or(&spent)
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(usd: Option<f64>, deadline_seconds: Option<u64>) -> JobLimits {
        JobLimits {
            usd,
            deadline_seconds,
            unfinished: Unfinished::Keep,
            usd_per_hour: Some(3600.0),
        }
    }

    #[test]
    fn limits_say_what_is_left_and_who_set_them() {
        let used = Used {
            device_seconds: 1.5,
            age: Duration::from_secs(90),
        };
        assert_eq!(
            limit_lines(&terms(Some(5.0), Some(60)), Some(LimitsFrom::Extend), &used),
            [
                "budget      $5.00, $3.50 left",
                "deadline    1m 0s after the job's start, passed 30s ago",
                "limits      by `gristmill extend`"
            ]
        );
        assert_eq!(
            limit_lines(&terms(None, None), Some(LimitsFrom::JobFile), &used),
            ["limits      none, by the job file"]
        );
    }

    #[test]
    fn a_limit_that_is_reached_is_named_with_who_set_it() {
        let used = Used {
            device_seconds: 0.5,
            age: Duration::from_secs(90),
        };
        let line = |why, note| said_reached(why, &terms(Some(1.5), Some(60)), Some(LimitsFrom::Extend), note, &used);
        assert_eq!(
            line(StopWhy::Budget, None),
            "the budget of $1.50 (set by `gristmill extend`) is reached: $0.5000 are spent"
        );
        assert!(line(StopWhy::Budget, Some("$1 held")).ends_with("reached: $1 held"));
        assert_eq!(
            line(StopWhy::Deadline, None),
            "the deadline is reached, 1m 0s after the job's start (set by `gristmill extend`): it began 1m 30s ago"
        );
    }

    #[test]
    fn changes_name_what_is_other_and_nothing_else() {
        let (holds, file) = (terms(None, Some(60)), terms(Some(0.3), Some(60)));
        assert_eq!(changes(&holds, &file).as_deref(), Some("budget $0.3000 (was none)"));
        let file = JobLimits {
            unfinished: Unfinished::Expire,
            usd_per_hour: None,
            deadline_seconds: None,
            ..holds
        };
        assert_eq!(
            changes(&holds, &file).as_deref(),
            Some("price of an hour none (was $3600.00), deadline none (was 1m 0s), unfinished rows expire (was keep)")
        );
        assert_eq!(changes(&holds, &holds), None);
    }
}
