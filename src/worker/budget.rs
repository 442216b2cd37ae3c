//! One worker's estimate of how much of a job's limits is used: its own counter, the records of
//! other workers, and an allowance for their spending since those records. `docs/job-file.md` says
//! where each worker stops, and by how much all together may exceed the budget.

use std::time::Duration;

use tokio::time::Instant;

use crate::ledger::spend::OtherSpendings;
use crate::ledger::spend::dollars;
use crate::ledger::{JobLimits, Ledger, Result, StopWhy};
use crate::report::cost::show_dollars;
use crate::worker::limits::WorkerLimits;

/// A worker counts as live on a job if it has written its spending within this many log intervals.
const LIVE_INTERVALS: u32 = 2;

/// One worker's knowledge of one job, as of its last update.
pub struct Budget {
    worker: String,
    log_interval: Duration,
    limits: JobLimits,
    /// Spendings of other workers. Kept between updates, so that unchanged records are not read
    /// again.
    other_spendings: OtherSpendings,
    /// The job's age at the last update, by the store's clock, and the instant of that update.
    last_update: Option<(Duration, Instant)>,
}

impl Budget {
    /// The budget as `worker` sees it; all workers of the job update once per `log_interval`.
    pub fn new(worker: &str, log_interval: Duration) -> Budget {
        Budget {
            worker: worker.to_string(),
            log_interval,
            limits: JobLimits::default(),
            other_spendings: OtherSpendings::default(),
            last_update: None,
        }
    }

    pub fn limits(&self) -> &JobLimits {
        &self.limits
    }

    /// Replaces the limits; `gristmill extend` may have changed them.
    pub fn set_limits(&mut self, limits: JobLimits) {
        self.limits = limits;
    }

    /// Reads of the other workers' records only what a limit needs: one listing for a budget, the
    /// timestamp of this worker's last write for a deadline alone, and nothing without a limit.
    pub async fn update(&mut self, ledger: &Ledger) -> Result<()> {
        let limits = WorkerLimits::of(&self.limits);
        let now = if limits.has_budget() {
            ledger.list_spends(&self.worker, &mut self.other_spendings).await?;
            self.other_spendings.store_now()
        } else if limits.deadline.is_some() {
            ledger.spend_time(&self.worker).await?
        } else {
            None
        };
        self.last_update = Some((ledger.age_at(now), Instant::now()));
        Ok(())
    }

    /// Reads those records of other workers that have changed since their last read.
    pub async fn read_changed(&mut self, ledger: &Ledger) -> Result<()> {
        ledger.read_changed_spends(&mut self.other_spendings).await
    }

    /// Whether other workers may have written since the last update.
    pub fn is_stale(&self) -> bool {
        self.since_update() > self.log_interval
    }

    /// Whether every record that the last update found has been read.
    pub fn is_exact(&self) -> bool {
        self.other_spendings.is_exact()
    }

    /// The limit that is reached if this worker has spent `own_seconds`.
    pub fn reached(&self, own_seconds: f64) -> Option<StopWhy> {
        // Before the first update, no limit is known to be reached.
        let (age, _) = self.last_update?;
        let (spent, reserved) = self.spent_and_reserved(own_seconds);
        WorkerLimits::of(&self.limits).reached(spent + reserved, age + self.since_update())
    }

    /// Device seconds: the known spending of all workers, and an allowance for other live workers.
    /// The allowance covers their possible spending since their last records and until they read
    /// a stop.
    fn spent_and_reserved(&self, own_seconds: f64) -> (f64, f64) {
        let window = LIVE_INTERVALS * self.log_interval;
        let known = self.other_spendings.known_seconds();
        let not_written = self.other_spendings.max_device_seconds(window, self.since_update()) - known;
        let to_come = f64::from(self.other_spendings.live_workers(window)) * self.log_interval.as_secs_f64();
        (known + own_seconds, not_written + to_come)
    }

    fn since_update(&self) -> Duration {
        self.last_update.map_or(Duration::ZERO, |(_, at)| at.elapsed())
    }

    /// The calculation by which the budget is reached, for messages.
    pub fn explain(&self, own_seconds: f64) -> String {
        let (spent, reserved) = self.spent_and_reserved(own_seconds);
        let usd = |seconds| show_dollars(dollars(seconds, self.limits.usd_per_hour).unwrap_or_default());
        let max = show_dollars(self.limits.usd.unwrap_or_default());
        let mut bill = format!("{} of {max} are spent", usd(spent));
        let others = self.other_spendings.live_workers(LIVE_INTERVALS * self.log_interval);
        if others > 0 {
            let plural = if others == 1 { "" } else { "s" };
            bill.push_str(&format!(
                ", and {} are reserved for {others} other worker{plural}, until each has read a stop",
                usd(reserved)
            ));
        }
        bill
    }
}
