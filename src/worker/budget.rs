//! How much of a job's limits is used, as one of its workers knows it: by its own counter at once,
//! by the records of other workers, and by what they may have spent since. `docs/job-file.md` says
//! where each of them stops, and how far all together may exceed the budget.

use std::time::Duration;

use tokio::time::Instant;

use crate::ledger::spend::OtherSpendings;
use crate::ledger::spend::dollars;
use crate::ledger::{JobLimits, Ledger, Result, StopWhy};
use crate::report::cost::show_dollars;
use crate::worker::limits::WorkerLimits;

/// A worker on a job has written its spending within this many log intervals.
const LIVE_INTERVALS: u32 = 2;

/// One worker's knowledge of one job, as of its last look.
pub struct Budget {
    me: String,
    interval: Duration,
    terms: JobLimits,
    /// Spendings of other workers. Kept between looks, so that unchanged records are not read
    /// again.
    others: OtherSpendings,
    /// The job's age at the last look, by the store's clock, and the instant of that look.
    looked: Option<(Duration, Instant)>,
}

impl Budget {
    /// The budget as worker `me` sees it; all workers of the job look once per `interval`.
    pub fn new(me: &str, interval: Duration) -> Budget {
        Budget {
            me: me.to_string(),
            interval,
            terms: JobLimits::default(),
            others: OtherSpendings::default(),
            looked: None,
        }
    }

    pub fn limits(&self) -> &JobLimits {
        &self.terms
    }

    /// Replaces the terms by the current ones.
    pub fn set_terms(&mut self, terms: JobLimits) {
        self.terms = terms;
    }

    /// Looks at the records of other workers as far as a limit needs them: one listing for a
    /// budget, the timestamp of this worker's last write for a deadline alone, and nothing without
    /// a limit.
    pub async fn look(&mut self, ledger: &Ledger) -> Result<()> {
        let limits = WorkerLimits::of(&self.terms);
        let now = if limits.count_money() {
            ledger.list_spends(&self.me, &mut self.others).await?;
            self.others.store_now()
        } else if limits.deadline.is_some() {
            ledger.spend_time(&self.me).await?
        } else {
            None
        };
        self.looked = Some((ledger.age_at(now), Instant::now()));
        Ok(())
    }

    /// Reads the records of other workers that have changed since they were last read.
    pub async fn read(&mut self, ledger: &Ledger) -> Result<()> {
        ledger.read_changed_spends(&mut self.others).await
    }

    /// Whether others may have written since the last look.
    pub fn is_old(&self) -> bool {
        self.since() > self.interval
    }

    /// Whether every record that the last look found was read.
    pub fn is_exact(&self) -> bool {
        self.others.is_exact()
    }

    /// Which limit is reached, where this worker has spent `own_seconds`.
    pub fn reached(&self, own_seconds: f64) -> Option<StopWhy> {
        // Without a look, no limit is known to be reached.
        let (age, _) = self.looked?;
        let (spent, held) = self.seconds(own_seconds);
        WorkerLimits::of(&self.terms).reached(spent + held, age + self.since())
    }

    /// Device seconds: first the known spending of all workers, then an allowance for other live
    /// workers. The allowance covers what they may have spent since their last records and may
    /// spend until they hear of a stop.
    fn seconds(&self, own_seconds: f64) -> (f64, f64) {
        let window = LIVE_INTERVALS * self.interval;
        let known = self.others.known_seconds();
        let not_written = self.others.max_device_seconds(window, self.since()) - known;
        let to_come = f64::from(self.others.live(window)) * self.interval.as_secs_f64();
        (known + own_seconds, not_written + to_come)
    }

    fn since(&self) -> Duration {
        self.looked.map_or(Duration::ZERO, |(_, at)| at.elapsed())
    }

    /// Explains to people why a budget ends work where it does.
    pub fn bill(&self, own_seconds: f64) -> String {
        let (spent, held) = self.seconds(own_seconds);
        let usd = |seconds| show_dollars(dollars(seconds, self.terms.usd_per_hour).unwrap_or_default());
        let most = show_dollars(self.terms.usd.unwrap_or_default());
        let mut bill = format!("{} of {most} are spent", usd(spent));
        let others = self.others.live(LIVE_INTERVALS * self.interval);
        if others > 0 {
            let plural = if others == 1 { "" } else { "s" };
            bill.push_str(&format!(
                ", and {} are held for {others} other worker{plural} at it, until each has heard of a stop",
                usd(held)
            ));
        }
        bill
    }
}
