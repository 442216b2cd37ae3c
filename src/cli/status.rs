//! `gristmill status` and `watch`: report a job's progress from its output alone.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use serde_json::{Value, json};

use crate::cli::args::{OutputArgs, WatchArgs};
use crate::cli::exit::{Exit, Failure};
use crate::cli::limits::{LimitUse, limit_lines};
use crate::cli::output::ledger_at;
use crate::cli::summary::{summary, without_failures};
use crate::dataset::store::pinned_file::display_name;
use crate::ledger::Ledger;
use crate::ledger::control::ControlLog;
use crate::ledger::failures::Failures;
use crate::ledger::status::{OpenShard, State, Status};
use crate::report::progress::show_duration;
use crate::report::summary::{RowCounts, Summary, counted, number};
use crate::say;
use crate::worker::retry_policy::{RetryDecision, RetryPolicy};

/// Maximum number of shards that are listed; `--json` has all of them.
const SHARDS_SHOWN_MAX: usize = 20;

pub(super) async fn status(args: OutputArgs) -> Result<Exit, Failure> {
    let ledger = ledger_at(&args.output).await?;
    let status = ledger.status().await?;
    let control = ledger.control().await?;
    let summary = summary(&ledger, &status, &args.output).await;
    if args.json {
        println!("{}", as_json(&ledger, &status, &summary, &control)?);
        return Ok(Exit::Done);
    }
    let generation = match ledger.generation() {
        0 => String::new(),
        n => format!(", retry {n}"),
    };
    println!("job         {} ({}){generation}", status.name, state_text(status.state));
    if let Some(note) = &status.note {
        println!("why         {note}");
    }
    println!("shards      {}", shard_counts(&status));
    for line in shard_lines(&status, Utc::now()) {
        println!("            {line}");
    }
    for name in status.lost_parts.iter().take(SHARDS_SHOWN_MAX) {
        println!(
            "damaged     `{name}` is missing: `gristmill run` builds it again, or workers after `gristmill reconcile`"
        );
    }
    for name in reverified_inputs(&ledger, &control) {
        println!("input       `{name}` has another ETag and the planned bytes: it was pinned anew");
    }
    for line in summary.lines() {
        println!("{line}");
    }
    if status.state != State::Finished {
        let (limits, used) = (
            ledger.limits(&control),
            LimitUse::of_device_seconds(&ledger, status.seconds),
        );
        for line in limit_lines(&limits, control.limits_source(), &used) {
            println!("{line}");
        }
    }
    Ok(Exit::Done)
}

/// The `--json` object of a job.
fn as_json(
    ledger: &Ledger,
    status: &Status,
    summary: &Summary,
    control: &ControlLog,
) -> Result<Value, serde_json::Error> {
    let (limits, used) = (
        ledger.limits(control),
        LimitUse::of_device_seconds(ledger, status.seconds),
    );
    let mut json = serde_json::to_value(summary)?;
    json["id"] = serde_json::to_value(&status.job)?;
    json["state"] = serde_json::to_value(status.state)?;
    json["note"] = serde_json::to_value(&status.note)?;
    json["generation"] = ledger.generation().into();
    json["created_at"] = ledger.created_at().to_rfc3339().into();
    json["shards"] = serde_json::to_value(status.shards)?;
    json["open_shards"] = serde_json::to_value(&status.open)?;
    json["lost_parts"] = serde_json::to_value(&status.lost_parts)?;
    json["budget"] = json!({
        "usd": limits.usd,
        "usd_per_hour": limits.usd_per_hour,
        "deadline_seconds": limits.deadline_seconds,
        "unfinished": limits.unfinished,
        "from": control.limits_source(),
        "used_usd": used.usd(&limits),
        "used_seconds": used.age.as_secs(),
    });
    json["pinned_anew"] = reverified_inputs(ledger, control).into_iter().collect();
    Ok(json)
}

/// Names of the inputs whose ETag changed while their bytes did not, without duplicates.
fn reverified_inputs(ledger: &Ledger, control: &ControlLog) -> BTreeSet<String> {
    let inputs = &ledger.job().inputs;
    let named = control.pins().filter_map(|pin| inputs.get(pin.input as usize));
    named.map(|input| display_name(&input.url)).collect()
}

/// A line per shard that is begun and unfinished: stuck shards first, then by the time of their
/// last progress.
fn shard_lines(status: &Status, now: DateTime<Utc>) -> Vec<String> {
    let mut open: Vec<&OpenShard> = status.open.iter().collect();
    open.sort_by_key(|shard| (!shard.stuck, shard.last_progress, shard.shard));
    let mut lines: Vec<String> = open
        .iter()
        .take(SHARDS_SHOWN_MAX)
        .map(|shard| {
            let ago = (now - shard.last_progress).to_std().unwrap_or_default();
            let mut line = format!(
                "shard {}: {} of {}, last progress {} ago",
                shard.shard,
                number(shard.rows_done),
                counted(shard.rows, "row"),
                show_duration(ago.as_secs_f64())
            );
            if let Some(worker) = &shard.worker {
                line.push_str(&format!(", worker {worker}"));
            }
            if shard.rows_damaged > 0 {
                let rows = counted(shard.rows_damaged, "finished row");
                line.push_str(&format!(", damaged: the data of {rows} is lost, to be computed again"));
            }
            if shard.rows_again > 0 {
                let rows = counted(shard.rows_again, "row");
                line.push_str(&format!(", damaged: data was lost, and {rows} computed again"));
            }
            match shard.attempts {
                0 | 1 if !shard.stuck => {}
                n => line.push_str(&format!(", {n} attempts that have not ended")),
            }
            if shard.stuck {
                line.push_str(": stuck, its rows are tried in smaller groups");
            }
            line
        })
        .collect();
    if open.len() > lines.len() {
        lines.push(format!(
            "and {} more (--json has all)",
            number((open.len() - lines.len()) as u64)
        ));
    }
    lines
}

/// Prints the state until the job ends. The exit code says how it ended.
pub(super) async fn watch(args: WatchArgs) -> Result<Exit, Failure> {
    let ledger = ledger_at(&args.output).await?;
    let mut state = WatchState::default();
    // An outage of the store does not end the watch, since workers wait for it too.
    let retry_policy = RetryPolicy::new(true);
    loop {
        let seen = async {
            let (status, closes) = read_state(&ledger).await?;
            if args.json {
                state.print_json(&ledger, &status, &args.output).await?;
            }
            Ok::<_, anyhow::Error>((status, closes))
        };
        let (status, closes) = match seen.await {
            Ok(seen) => {
                retry_policy.note_success();
                seen
            }
            Err(error) if retry_policy.decision(&error) == RetryDecision::Wait => {
                retry_policy.report(&error);
                tokio::time::sleep(Duration::from_secs_f64(args.every)).await;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        if !args.json {
            state.print_line(&status);
        }
        let end = match status.state {
            State::Running => None,
            State::Finished => Some(Exit::of_rows(&RowCounts::of(status.rows, &status.tally))),
            State::BudgetReached | State::DeadlineReached => Some(Exit::Stopped),
            State::Cancelled => Some(Exit::Cancelled),
            State::InputChanged => Some(Exit::BadJob),
        };
        match end {
            Some(exit) if !closes => {
                if let Some(warning) = Summary::of(&status, &args.output).warning().filter(|_| !args.json) {
                    println!("warning: {warning}");
                }
                return Ok(exit);
            }
            // The reader has closed stdout.
            _ if say::stdout_error().is_some() => return Ok(Exit::Done),
            _ => tokio::time::sleep(Duration::from_secs_f64(args.every)).await,
        }
    }
}

/// State of a watch.
#[derive(Default)]
struct WatchState {
    line: String,
    /// Time of the first line, and the number of finished rows at that time.
    start: Option<(Instant, u64)>,
    /// The object that was printed last, without the elapsed time.
    json: Value,
    /// The failures of rows, and a key of the state for which they were read. They are cached
    /// because reading them means reading parts.
    failures: Option<(Value, Option<Failures>)>,
}

impl WatchState {
    /// For the terminal: prints a line if it has changed.
    fn print_line(&mut self, status: &Status) {
        let rows = status.tally.rows();
        let truncated = status.tally.truncated.filter(|count| *count > 0);
        let truncated = truncated.map_or(String::new(), |count| format!(", {} truncated", number(count)));
        let line = format!(
            "{}: {} of {}{truncated}, shards {}",
            state_text(status.state),
            number(rows),
            counted(status.rows, "row"),
            shard_counts(status)
        );
        let (start, rows_at_start) = *self.start.get_or_insert((Instant::now(), rows));
        if line == self.line {
            return;
        }
        let left = match status.state {
            State::Running => estimate_time_left(
                start.elapsed(),
                rows - rows_at_start.min(rows),
                status.rows - rows.min(status.rows),
            ),
            _ => None,
        };
        let left = left.map_or(String::new(), |left| format!(", {left} left"));
        println!("{line}{left}");
        self.line = line;
    }

    /// For `--json`: prints an object if it has changed.
    async fn print_json(&mut self, ledger: &Ledger, status: &Status, output: &str) -> anyhow::Result<()> {
        let control = ledger.control().await?;
        let state_key = json!([status.shards.done, status.tally, status.lost_parts]);
        let summary = match &self.failures {
            Some((known, failures)) if *known == state_key => Summary {
                failures: failures.clone(),
                ..without_failures(ledger, status, output)
            },
            _ => summary(ledger, status, output).await,
        };
        self.failures = Some((state_key, summary.failures.clone()));
        let object = as_json(ledger, status, &summary, &control)?;
        let mut compared = object.clone();
        compared["budget"]["used_seconds"] = Value::Null;
        if compared != self.json {
            println!("{object}");
            self.json = compared;
        }
        Ok(())
    }
}

/// The job's status, and whether it is a stopped job whose unfinished rows are still to be
/// published.
async fn read_state(ledger: &Ledger) -> anyhow::Result<(Status, bool)> {
    let status = ledger.status().await?;
    let closes = match status.state {
        State::Running | State::Finished => false,
        _ => ledger.control().await?.is_closing(),
    };
    Ok((status, closes))
}

/// Estimates the time left from the pace during the watch; `None` before a row was finished in it.
fn estimate_time_left(watched_for: Duration, rows_seen: u64, rows_left: u64) -> Option<String> {
    (rows_seen > 0 && rows_left > 0)
        .then(|| show_duration(watched_for.as_secs_f64() / rows_seen as f64 * rows_left as f64))
}

fn shard_counts(status: &Status) -> String {
    let shards = &status.shards;
    let mut text = format!("{} of {} done", number(shards.done.into()), number(shards.total.into()));
    for (count, name) in [(shards.open, "begun"), (shards.stuck, "stuck")] {
        if count > 0 {
            text.push_str(&format!(", {} {name}", number(count.into())));
        }
    }
    text
}

pub(super) fn state_text(state: State) -> &'static str {
    match state {
        State::Running => "unfinished",
        State::Finished => "finished",
        State::BudgetReached => "stopped: budget reached",
        State::DeadlineReached => "stopped: deadline reached",
        State::Cancelled => "cancelled",
        State::InputChanged => "stopped: an input is not what it was",
    }
}
