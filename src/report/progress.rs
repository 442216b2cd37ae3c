//! Progress of a running job: a bar on a terminal, otherwise one plain line every few seconds.

use std::io::IsTerminal;
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use tracing::Instrument;

use crate::ledger::spend::dollars;
use crate::report::cost::show_dollars;
use crate::report::meter::{Meter, Reading};
use crate::report::summary::{counted, number, rate};
use crate::say;

const BAR_EVERY: Duration = Duration::from_millis(500);
const LINE_EVERY: Duration = Duration::from_secs(5);
const WORK_EVERY: Duration = Duration::from_secs(10);

/// The job's size, and what was done before this process began.
#[derive(Debug, Clone)]
pub struct Goal {
    /// Rows of the job.
    pub rows: u64,
    /// Rows that were finished before this process began.
    pub rows_before: u64,
    /// Device seconds spent before this process began.
    pub seconds_before: f64,
    pub usd_per_hour: Option<f64>,
}

/// Shows progress until the returned task is aborted. `quiet` shows nothing.
pub fn show(meter: Arc<Meter>, goal: Goal, quiet: bool) -> tokio::task::JoinHandle<()> {
    tokio::spawn(async move {
        if quiet {
            return;
        }
        let started = Instant::now();
        if std::io::stderr().is_terminal() && !say::are_events() {
            let bar = ProgressBar::new(goal.rows).with_style(bar_style());
            loop {
                let read = meter.read();
                bar.set_position(goal.rows_before + read.rows);
                bar.set_message(status(&read, &goal, started.elapsed()));
                tokio::time::sleep(BAR_EVERY).await;
            }
        }
        loop {
            tokio::time::sleep(LINE_EVERY).await;
            let read = meter.read();
            let rows = goal.rows_before + read.rows;
            let line = format!(
                "{} of {}, {}",
                number(rows),
                counted(goal.rows, "row"),
                status(&read, &goal, started.elapsed())
            );
            tell(&line, &read, rows, Some(goal.rows));
        }
    })
}

/// Shows a worker's progress until the returned task is aborted: a line every ten seconds if rows
/// were finished in that time.
pub fn show_work(meter: Arc<Meter>, quiet: bool) -> tokio::task::JoinHandle<()> {
    let showing = async move {
        if quiet {
            return;
        }
        let mut shown = 0;
        loop {
            tokio::time::sleep(WORK_EVERY).await;
            let read = meter.read();
            if read.rows > shown {
                shown = read.rows;
                let line = format!(
                    "{}, {} failed, {} truncated, {} tokens/s",
                    counted(read.rows, "row"),
                    number(read.failed_rows),
                    number(read.truncated_rows),
                    number(tokens_per_second(&read))
                );
                tell(&line, &read, read.rows, None);
            }
        }
    };
    tokio::spawn(showing.in_current_span())
}

/// Prints a line of progress, with its figures as fields where the log is JSON. `rows_total`: the job's rows.
fn tell(line: &str, read: &Reading, rows: u64, rows_total: Option<u64>) {
    if say::are_events() {
        tracing::info!(
            target: say::TARGET,
            rows,
            rows_total,
            failed_rows = read.failed_rows,
            truncated_rows = read.truncated_rows,
            tokens_per_second = tokens_per_second(read),
            "{line}"
        );
    } else {
        eprintln!("{line}");
    }
}

fn tokens_per_second(read: &Reading) -> u64 {
    rate(read.prompt_tokens + read.completion_tokens, read.device_seconds).round() as u64
}

/// The text is shown whole; the bar takes the rest of the terminal's width.
fn bar_style() -> ProgressStyle {
    ProgressStyle::with_template("{wide_bar} {human_pos}/{human_len} rows, {msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// Formats progress, as in "1,234 tokens/s, 2m 10s left, $0.0123 so far".
fn status(read: &Reading, goal: &Goal, elapsed: Duration) -> String {
    let mut parts = vec![format!("{} tokens/s", number(tokens_per_second(read)))];
    let left = goal.rows.saturating_sub(goal.rows_before + read.rows);
    if read.rows > 0 && left > 0 {
        let seconds = elapsed.as_secs_f64() / read.rows as f64 * left as f64;
        parts.push(format!("{} left", show_duration(seconds)));
    }
    if read.failed_rows > 0 {
        parts.push(counted(read.failed_rows, "failed row"));
    }
    if read.truncated_rows > 0 {
        parts.push(counted(read.truncated_rows, "truncated row"));
    }
    if let Some(usd) = dollars(goal.seconds_before + read.device_seconds, goal.usd_per_hour) {
        parts.push(format!("{} so far", show_dollars(usd)));
    }
    parts.join(", ")
}

/// Formats a duration for people, in at most two units.
pub fn show_duration(seconds: f64) -> String {
    let s = seconds.round() as u64;
    match s {
        0..60 => format!("{s}s"),
        60..3600 => format!("{}m {}s", s / 60, s % 60),
        _ => format!("{}h {}m", s / 3600, s % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_and_status_read_well() {
        assert_eq!(show_duration(4.4), "4s");
        assert_eq!(show_duration(130.0), "2m 10s");
        assert_eq!(show_duration(7_260.0), "2h 1m");
        let read = Reading {
            rows: 10,
            failed_rows: 1,
            truncated_rows: 2,
            prompt_tokens: 900,
            completion_tokens: 100,
            device_seconds: 2.0,
            ..Default::default()
        };
        let goal = Goal {
            rows: 30,
            rows_before: 10,
            seconds_before: 1.0,
            usd_per_hour: Some(3.6),
        };
        assert_eq!(
            status(&read, &goal, Duration::from_secs(20)),
            "500 tokens/s, 20s left, 1 failed row, 2 truncated rows, $0.0030 so far"
        );
    }
}
