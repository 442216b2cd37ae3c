//! Progress of a running job: a bar on a terminal, otherwise one plain line every few seconds.

use std::io::IsTerminal;
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use tracing::Instrument;

use crate::ledger::spend::dollars;
use crate::report::cost::show_dollars;
use crate::report::meter::{Meter, MeterReading};
use crate::report::summary::{counted, number, rate};
use crate::say;

const BAR_INTERVAL: Duration = Duration::from_millis(500);
const LINE_INTERVAL: Duration = Duration::from_secs(5);
const WORKER_LINE_INTERVAL: Duration = Duration::from_secs(10);

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
        let start = Instant::now();
        if std::io::stderr().is_terminal() && !say::stderr_is_logged() {
            let bar = ProgressBar::new(goal.rows).with_style(bar_style());
            loop {
                let reading = meter.read();
                bar.set_position(goal.rows_before + reading.rows);
                bar.set_message(status(&reading, &goal, start.elapsed()));
                tokio::time::sleep(BAR_INTERVAL).await;
            }
        }
        loop {
            tokio::time::sleep(LINE_INTERVAL).await;
            let reading = meter.read();
            let rows = goal.rows_before + reading.rows;
            let line = format!(
                "{} of {}, {}",
                number(rows),
                counted(goal.rows, "row"),
                status(&reading, &goal, start.elapsed())
            );
            print_line(&line, &reading, rows, Some(goal.rows));
        }
    })
}

/// Shows a worker's progress until the returned task is aborted: a line every ten seconds if rows
/// were finished in that time.
pub fn show_worker(meter: Arc<Meter>, quiet: bool) -> tokio::task::JoinHandle<()> {
    let show_lines = async move {
        if quiet {
            return;
        }
        let mut rows_shown = 0;
        loop {
            tokio::time::sleep(WORKER_LINE_INTERVAL).await;
            let reading = meter.read();
            if reading.rows > rows_shown {
                rows_shown = reading.rows;
                let line = format!(
                    "{}, {} failed, {} truncated, {} tokens/s",
                    counted(reading.rows, "row"),
                    number(reading.failed_rows),
                    number(reading.truncated_rows),
                    number(tokens_per_second(&reading))
                );
                print_line(&line, &reading, reading.rows, None);
            }
        }
    };
    tokio::spawn(show_lines.in_current_span())
}

/// Prints a line of progress, with its figures as fields where the log is JSON. `rows_total`: the
/// job's rows.
fn print_line(line: &str, reading: &MeterReading, rows: u64, rows_total: Option<u64>) {
    if say::stderr_is_logged() {
        tracing::info!(
            target: say::LOG_TARGET,
            rows,
            rows_total,
            failed_rows = reading.failed_rows,
            truncated_rows = reading.truncated_rows,
            tokens_per_second = tokens_per_second(reading),
            "{line}"
        );
    } else {
        eprintln!("{line}");
    }
}

fn tokens_per_second(reading: &MeterReading) -> u64 {
    rate(
        reading.prompt_tokens + reading.completion_tokens,
        reading.device_seconds,
    )
    .round() as u64
}

/// The text is shown whole; the bar takes the rest of the terminal's width.
fn bar_style() -> ProgressStyle {
    ProgressStyle::with_template("{wide_bar} {human_pos}/{human_len} rows, {msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// Formats progress, as in "1,234 tokens/s, 2m 10s left, $0.0123 so far".
fn status(reading: &MeterReading, goal: &Goal, elapsed: Duration) -> String {
    let mut parts = vec![format!("{} tokens/s", number(tokens_per_second(reading)))];
    let left = goal.rows.saturating_sub(goal.rows_before + reading.rows);
    if reading.rows > 0 && left > 0 {
        let seconds = elapsed.as_secs_f64() / reading.rows as f64 * left as f64;
        parts.push(format!("{} left", show_duration(seconds)));
    }
    if reading.failed_rows > 0 {
        parts.push(counted(reading.failed_rows, "failed row"));
    }
    if reading.truncated_rows > 0 {
        parts.push(counted(reading.truncated_rows, "truncated row"));
    }
    if let Some(usd) = dollars(goal.seconds_before + reading.device_seconds, goal.usd_per_hour) {
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
        let reading = MeterReading {
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
            status(&reading, &goal, Duration::from_secs(20)),
            "500 tokens/s, 20s left, 1 failed row, 2 truncated rows, $0.0030 so far"
        );
    }
}
