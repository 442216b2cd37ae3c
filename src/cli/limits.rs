//! A job's limits: their use so far, and the commands that follow from a changed job file.

use std::time::Duration;

use crate::cli::exit::Failure;
use crate::ledger::spend::dollars;
use crate::ledger::{JobCommand, JobLimits, Ledger, LimitsFrom, StopWhy, Unfinished};
use crate::report::cost::show_dollars;
use crate::report::progress::show_duration;
use crate::worker::WorkerLimits;

/// The part of a job's limits that is used up.
#[derive(Debug, Clone, Copy)]
pub(super) struct LimitUse {
    /// Device seconds of all workers together.
    pub device_seconds: f64,
    /// Time since the job was created.
    pub age: Duration,
}

impl LimitUse {
    /// Current use.
    pub(super) async fn of(ledger: &Ledger) -> Result<LimitUse, Failure> {
        Ok(LimitUse::of_device_seconds(
            ledger,
            ledger.spendings().await?.device_seconds(),
        ))
    }

    /// Current use, given the device seconds. The age is by this machine's clock, since the
    /// ledger's last write may be old.
    pub(super) fn of_device_seconds(ledger: &Ledger, device_seconds: f64) -> LimitUse {
        LimitUse {
            device_seconds,
            age: (chrono::Utc::now() - ledger.created_at()).to_std().unwrap_or_default(),
        }
    }

    /// The total cost at the current price; `None` without a price.
    pub(super) fn usd(&self, limits: &JobLimits) -> Option<f64> {
        dollars(self.device_seconds, limits.usd_per_hour)
    }

    /// The first of these limits that is reached, if any.
    pub(super) fn reached_limit(&self, limits: &JobLimits) -> Option<StopWhy> {
        WorkerLimits::of(limits).reached(self.device_seconds, self.age)
    }
}

/// The stop that keeps a begun job from continuing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ActiveStop {
    pub why: StopWhy,
    /// Whether its unfinished rows are still published, as `expired` or `cancelled`.
    pub closes: bool,
}

/// Applies the limits `file` of a begun job's file. If they differ from those that `run` or
/// `submit` last read, they replace all current limits, including those of `extend`. A reached
/// limit stops the job; a stopped job continues if no limit is reached. Prints changed limits, and
/// returns the stop that is in force afterwards.
pub(super) async fn apply_job_file(
    ledger: &Ledger,
    file: &JobLimits,
    quiet: bool,
) -> Result<Option<ActiveStop>, Failure> {
    let used = LimitUse::of(ledger).await?;
    let mut control = ledger.control().await?;
    // Each iteration writes one command, and the next one reads it back, together with commands
    // that other processes have written in the meantime.
    loop {
        let stop = control.stop_reason().map(|why| ActiveStop {
            why,
            closes: control.is_closing(),
        });
        if stop.is_some_and(|stop| stop.why == StopWhy::Cancelled) {
            return Ok(stop);
        }
        let current = ledger.limits(&control);
        let is_changed = *file != ledger.job_file_limits(&control);
        let (command, message) = match (stop, used.reached_limit(&current)) {
            _ if is_changed => {
                let command = control.extend_command(file, Some(LimitsFrom::JobFile));
                (
                    command,
                    changes(&current, file)
                        .map(|changes| format!("its limits are now those of the job file: {changes}")),
                )
            }
            (None, None) => return Ok(None),
            (Some(stop), Some(why)) => return Ok(Some(ActiveStop { why, ..stop })),
            (None, Some(why)) => (JobCommand::stop(why, current.unfinished == Unfinished::Expire), None),
            (Some(stop), None) => {
                let message = (stop.why == StopWhy::InputChanged)
                    .then(|| "it goes on: it was stopped since an input had changed".to_string());
                (control.extend_command(&current, control.limits_source()), message)
            }
        };
        if control.try_append(command).await?
            && let Some(message) = message.filter(|_| !quiet)
        {
            eprintln!("job `{}`: {message}", ledger.job().name);
        }
    }
}

/// Describes how `file` differs from the limits in force; `None` if it does not.
fn changes(current: &JobLimits, file: &JobLimits) -> Option<String> {
    let usd = |usd: Option<f64>| usd.map_or("none".into(), show_dollars);
    let time = |seconds: Option<u64>| seconds.map_or("none".into(), |seconds| show_duration(seconds as f64));
    let pairs = [
        ("budget", usd(file.usd), usd(current.usd), file.usd != current.usd),
        (
            "price of an hour",
            usd(file.usd_per_hour),
            usd(current.usd_per_hour),
            file.usd_per_hour != current.usd_per_hour,
        ),
        (
            "deadline",
            time(file.deadline_seconds),
            time(current.deadline_seconds),
            file.deadline_seconds != current.deadline_seconds,
        ),
        (
            "unfinished rows",
            unfinished_text(file).into(),
            unfinished_text(current).into(),
            file.unfinished != current.unfinished,
        ),
    ];
    let changed = pairs.into_iter().filter(|(_, _, _, is_changed)| *is_changed);
    let words: Vec<String> = changed
        .map(|(what, is, was, _)| format!("{what} {is} (was {was})"))
        .collect();
    (!words.is_empty()).then(|| words.join(", "))
}

fn unfinished_text(limits: &JobLimits) -> &'static str {
    match limits.unfinished {
        Unfinished::Keep => "keep",
        Unfinished::Expire => "expire",
    }
}

/// Lines for the terminal: budget and deadline, how much of each is left, and who set them.
pub(super) fn limit_lines(limits: &JobLimits, source: Option<LimitsFrom>, used: &LimitUse) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some((budget, spent)) = limits.usd.zip(used.usd(limits)) {
        lines.push(format!(
            "budget      {}, {} left",
            show_dollars(budget),
            show_dollars((budget - spent).max(0.0))
        ));
    }
    if let Some(seconds) = limits.deadline_seconds {
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
    lines.push(format!("limits      {none}{}", setter_text(source)));
    lines
}

fn setter_text(source: Option<LimitsFrom>) -> &'static str {
    match source {
        Some(LimitsFrom::JobFile) => "by the job file",
        Some(LimitsFrom::Extend) => "by `gristmill extend`",
        None => "by a command of an older gristmill",
    }
}

/// A line for the terminal: the limit that stopped the job, who set it, and its use.
pub(super) async fn reached_line(ledger: &Ledger, why: StopWhy) -> Result<String, Failure> {
    let control = ledger.control().await?;
    let used = LimitUse::of(ledger).await?;
    Ok(reached_text(
        why,
        &ledger.limits(&control),
        control.limits_source(),
        control.stop_note(),
        &used,
    ))
}

/// As [`reached_line`], with the field of the job file to raise.
pub(super) async fn reached_line_with_advice(ledger: &Ledger, why: StopWhy) -> Result<String, Failure> {
    let field = match why {
        StopWhy::Deadline => "deadline",
        _ => "usd",
    };
    Ok(format!("{}; raise `budget.{field}`", reached_line(ledger, why).await?))
}

/// Pure: builds the line. `note`: the reason that the worker which stopped the job has recorded.
fn reached_text(
    why: StopWhy,
    limits: &JobLimits,
    source: Option<LimitsFrom>,
    note: Option<&str>,
    used: &LimitUse,
) -> String {
    let source = setter_text(source);
    match why {
        StopWhy::Deadline => {
            let deadline = show_duration(limits.deadline_seconds.unwrap_or_default() as f64);
            let age = show_duration(used.age.as_secs_f64());
            format!("the deadline is reached, {deadline} after the job's start (set {source}): it began {age} ago")
        }
        _ => {
            let budget = show_dollars(limits.usd.unwrap_or_default());
            let spent = format!("{} are spent", show_dollars(used.usd(limits).unwrap_or_default()));
            format!(
                "the budget of {budget} (set {source}) is reached: {}",
                note.unwrap_or(&spent)
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job_limits(usd: Option<f64>, deadline_seconds: Option<u64>) -> JobLimits {
        JobLimits {
            usd,
            deadline_seconds,
            unfinished: Unfinished::Keep,
            usd_per_hour: Some(3600.0),
        }
    }

    #[test]
    fn limit_lines_name_the_rest_and_the_setter() {
        let used = LimitUse {
            device_seconds: 1.5,
            age: Duration::from_secs(90),
        };
        assert_eq!(
            limit_lines(&job_limits(Some(5.0), Some(60)), Some(LimitsFrom::Extend), &used),
            [
                "budget      $5.00, $3.50 left",
                "deadline    1m 0s after the job's start, passed 30s ago",
                "limits      by `gristmill extend`"
            ]
        );
        assert_eq!(
            limit_lines(&job_limits(None, None), Some(LimitsFrom::JobFile), &used),
            ["limits      none, by the job file"]
        );
    }

    #[test]
    fn a_reached_limit_is_named_with_its_setter() {
        let used = LimitUse {
            device_seconds: 0.5,
            age: Duration::from_secs(90),
        };
        let line = |why, note| {
            reached_text(
                why,
                &job_limits(Some(1.5), Some(60)),
                Some(LimitsFrom::Extend),
                note,
                &used,
            )
        };
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
    fn only_changed_limits_are_named() {
        let (current, file) = (job_limits(None, Some(60)), job_limits(Some(0.3), Some(60)));
        assert_eq!(changes(&current, &file).as_deref(), Some("budget $0.3000 (was none)"));
        let file = JobLimits {
            unfinished: Unfinished::Expire,
            usd_per_hour: None,
            deadline_seconds: None,
            ..current
        };
        assert_eq!(
            changes(&current, &file).as_deref(),
            Some("price of an hour none (was $3600.00), deadline none (was 1m 0s), unfinished rows expire (was keep)")
        );
        assert_eq!(changes(&current, &current), None);
    }
}
