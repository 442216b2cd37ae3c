//! Counters that a worker's stages update, and that progress, budget and summary read.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use serde::Serialize;

use crate::dataset::row::{RowResult, RowStatus};

/// Counters of one process. No decision depends on the order of updates, so relaxed atomics
/// suffice.
#[derive(Debug, Default)]
pub struct Meter {
    rows: [AtomicU64; RowStatus::ALL.len()],
    truncated_rows: AtomicU64,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    completion_tokens: AtomicU64,
    /// Tokens that were computed for finished rows that are logged.
    logged_tokens: AtomicU64,
    device_micros: AtomicU64,
    lost_micros: AtomicU64,
}

/// A snapshot of a [`Meter`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct MeterReading {
    pub rows: u64,
    pub failed_rows: u64,
    /// Rows with a truncated completion, whatever their status.
    pub truncated_rows: u64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub completion_tokens: u64,
    pub device_seconds: f64,
    /// Device seconds spent on rows that this process did not finish, or finished without logging.
    pub lost_seconds: f64,
}

impl Meter {
    /// Counts a finished row.
    pub fn add_row(&self, row: &RowResult) {
        self.rows[row.status as usize].fetch_add(1, Relaxed);
        self.truncated_rows.fetch_add(row.is_truncated().into(), Relaxed);
        self.prompt_tokens.fetch_add(u64::from(row.prompt_tokens), Relaxed);
        self.cached_tokens.fetch_add(u64::from(row.cached_tokens), Relaxed);
        self.completion_tokens.fetch_add(completion_tokens(row), Relaxed);
    }

    /// Counts finished rows that are logged, so they are never computed again.
    pub fn add_logged(&self, rows: &[RowResult]) {
        let computed =
            |row: &RowResult| u64::from(row.prompt_tokens.saturating_sub(row.cached_tokens)) + completion_tokens(row);
        self.logged_tokens.fetch_add(rows.iter().map(computed).sum(), Relaxed);
    }

    /// Counts the device time of finished, unlogged rows as lost: this process ends without logging
    /// them.
    pub fn add_unlogged_to_lost(&self) {
        let reading = self.read();
        let finished = reading.prompt_tokens.saturating_sub(reading.cached_tokens) + reading.completion_tokens;
        let unlogged = finished.saturating_sub(self.logged_tokens.load(Relaxed));
        if unlogged > 0 {
            let share = unlogged as f64 / finished as f64;
            self.set_lost_seconds(reading.lost_seconds + (reading.device_seconds - reading.lost_seconds) * share);
        }
    }

    /// Adds time during which the device worked.
    pub fn add_device_time(&self, time: Duration) {
        self.device_micros.fetch_add(time.as_micros() as u64, Relaxed);
    }

    /// Sets the device time that was spent on rows that this process did not finish.
    pub fn set_lost_seconds(&self, seconds: f64) {
        self.lost_micros.store((seconds * 1e6) as u64, Relaxed);
    }

    /// Number of finished rows by status.
    pub fn rows_by_status(&self) -> [(RowStatus, u64); RowStatus::ALL.len()] {
        RowStatus::ALL.map(|status| (status, self.rows[status as usize].load(Relaxed)))
    }

    pub fn read(&self) -> MeterReading {
        let rows: Vec<u64> = self.rows.iter().map(|count| count.load(Relaxed)).collect();
        let total: u64 = rows.iter().sum();
        MeterReading {
            rows: total,
            failed_rows: total - rows[RowStatus::Succeeded as usize],
            truncated_rows: self.truncated_rows.load(Relaxed),
            prompt_tokens: self.prompt_tokens.load(Relaxed),
            cached_tokens: self.cached_tokens.load(Relaxed),
            completion_tokens: self.completion_tokens.load(Relaxed),
            device_seconds: self.device_micros.load(Relaxed) as f64 / 1e6,
            lost_seconds: self.lost_micros.load(Relaxed) as f64 / 1e6,
        }
    }
}

fn completion_tokens(row: &RowResult) -> u64 {
    row.samples
        .iter()
        .map(|sample| u64::from(sample.completion_tokens))
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::row::SampleResult;

    #[test]
    fn time_of_rows_that_are_not_logged_is_lost() {
        let meter = Meter::default();
        let row = RowResult {
            row: 3,
            status: RowStatus::Succeeded,
            samples: Vec::new(),
            error: None,
            prompt_tokens: 30,
            cached_tokens: 20,
        };
        let rows = [
            row.clone(),
            RowResult {
                cached_tokens: 0,
                ..row
            },
        ];
        rows.iter().for_each(|row| meter.add_row(row));
        meter.add_device_time(Duration::from_secs(6));
        meter.set_lost_seconds(2.0);
        meter.add_logged(&rows[..1]);
        meter.add_unlogged_to_lost();
        // Unlogged rows have three quarters of the computed tokens, and so 3 s of the 4 s left.
        assert_eq!(meter.read().lost_seconds, 5.0);
        meter.add_logged(&rows[1..]);
        meter.add_unlogged_to_lost();
        assert_eq!(meter.read().lost_seconds, 5.0);
    }

    #[test]
    fn a_row_counts_once_under_its_status() {
        let meter = Meter::default();
        let row = RowResult {
            row: 3,
            status: RowStatus::Errored,
            samples: Vec::new(),
            error: Some("no".into()),
            prompt_tokens: 5,
            cached_tokens: 2,
        };
        meter.add_row(&row);
        meter.add_row(&RowResult {
            status: RowStatus::Succeeded,
            error: None,
            ..row
        });
        meter.add_device_time(Duration::from_millis(1500));
        let reading = meter.read();
        assert_eq!((reading.rows, reading.failed_rows), (2, 1));
        assert_eq!(meter.rows_by_status().map(|(_, rows)| rows), [1, 0, 1, 0, 0]);
        assert_eq!(
            (reading.prompt_tokens, reading.cached_tokens, reading.completion_tokens),
            (10, 4, 0)
        );
        assert_eq!(reading.device_seconds, 1.5);
    }

    #[test]
    fn a_row_is_truncated_once_however_many_of_its_samples_are() {
        let meter = Meter::default();
        let sample = |finish_reason| SampleResult {
            status: RowStatus::Succeeded,
            error: None,
            text: "x".into(),
            reasoning: None,
            reasoning_tokens: 0,
            parsed: None,
            finish_reason,
            completion_tokens: 2,
            token_ids: Vec::new(),
            logprobs: Vec::new(),
            choice_probabilities: Vec::new(),
        };
        for reasons in [["length", "length"], ["stop", "length"], ["stop", "stop"]] {
            meter.add_row(&RowResult {
                row: 3,
                status: RowStatus::Succeeded,
                samples: reasons.map(sample).to_vec(),
                error: None,
                prompt_tokens: 5,
                cached_tokens: 2,
            });
        }
        assert_eq!(meter.read().truncated_rows, 2);
    }
}
