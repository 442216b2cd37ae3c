//! One account per job: records this worker's spending, reads the job's commands and the other
//! workers' spendings, and stops the job at its budget or deadline.
//!
//! Requests per job and update: a write of this worker's spending, and a read of the next command.
//! For a deadline, a third request reads the store's time of that write. For a budget, the third
//! request lists all spendings instead; close to the budget, each changed spending is read, too.
//!
//! See docs/decisions/024-each-job-has-an-account.md.

use std::collections::HashSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Interval, MissedTickBehavior};
use tracing::Instrument;

use crate::ledger::spend::dollars;
use crate::ledger::{JobCommand, StopWhy, Unfinished};
use crate::worker::budget::Budget;
use crate::worker::job_state::JobState;
use crate::worker::jobs::OpenJob;
use crate::worker::retry_policy::RetryDecision;
use crate::worker::stop::Stop;
use crate::worker::{Worker, spans};

/// Time between two checks of budgets with this process's own counters, which need no request.
const BUDGET_EVERY: Duration = Duration::from_secs(1);

/// Keeps an account of each job that the worker hears of, until `stop` is set. Each account is a
/// task of its own, so that a store that does not answer holds up no other job's budget.
pub(super) async fn run(worker: Arc<Worker>, stop: Stop) -> anyhow::Result<()> {
    let mut accounts = JoinSet::new();
    let mut known = HashSet::new();
    let mut update_ticks = ticks(budget_every(&worker));
    loop {
        tokio::select! {
            biased;
            () = stop.wait() => return Ok(()),
            Some(ended) = accounts.join_next() => ended??,
            _ = update_ticks.tick() => {}
        }
        for job in worker.jobs.open().await {
            if known.insert(job.number) {
                let account = keep_account(worker.clone(), Arc::downgrade(&job));
                accounts.spawn(account.instrument(spans::of_job(&job)));
            }
        }
    }
}

/// Updates one job's account each log interval, and checks its limits in between, while the job is
/// open.
async fn keep_account(worker: Arc<Worker>, job: Weak<OpenJob>) -> anyhow::Result<()> {
    let (mut update_ticks, mut budget_ticks) = (ticks(worker.options.log_interval), ticks(budget_every(&worker)));
    let mut budget = Budget::new(&worker.name, worker.options.log_interval);
    // `was_idle`: an update was due while the worker had no work on the job.
    let (mut has_updated, mut was_idle) = (false, false);
    // Device seconds that earlier accounts of the job have billed.
    let mut billed_seconds = job.upgrade().map_or(0.0, |job| job.device_seconds());
    loop {
        let is_due = tokio::select! {
            biased;
            _ = update_ticks.tick() => true,
            _ = budget_ticks.tick() => false,
        };
        // Hold the job only during an update: its other holders decide how long it stays open.
        let Some(job) = job.upgrade() else { return Ok(()) };
        // Update as soon as the worker hears of the job, and as soon as work on it resumes: other
        // workers reserve a part of the budget only for workers that have written lately. A job
        // without work here needs no more updates.
        let is_busy = worker.in_flight.count_of_job(job.number) > 0 || job.has_unwritten_spend();
        if !has_updated || is_busy && (is_due || was_idle) {
            (has_updated, was_idle) = (true, false);
            if let Err(error) = update(&worker, &job, &mut budget, false).await {
                handle_error(&worker, &job, error)?;
            }
        }
        was_idle |= is_due && !is_busy;
        if let Err(error) = enforce(&worker, &job, &mut budget).await {
            handle_error(&worker, &job, error)?;
        }
        bill(&worker, &job, &budget, &mut billed_seconds);
    }
}

/// Adds the price of the device time since the last call to the metrics, if the job has a price.
fn bill(worker: &Worker, job: &OpenJob, budget: &Budget, billed_seconds: &mut f64) {
    let seconds = job.device_seconds();
    if let Some(usd) = dollars(seconds - *billed_seconds, budget.limits().usd_per_hour) {
        worker.metrics.add_dollars(usd);
        *billed_seconds = seconds;
    }
}

/// Reports an outage, and leaves to other workers a job that this worker cannot continue. Returns
/// any other error, which must end the worker.
fn handle_error(worker: &Worker, job: &OpenJob, error: anyhow::Error) -> anyhow::Result<()> {
    match worker.retry_policy.decision(&error) {
        RetryDecision::Wait => worker.retry_policy.report(&error),
        RetryDecision::LeaveShard => job.leave_to_others(&error),
        RetryDecision::End => return Err(error),
    }
    Ok(())
}

fn budget_every(worker: &Worker) -> Duration {
    BUDGET_EVERY.min(worker.options.log_interval)
}

/// A ticker whose first tick comes at once.
fn ticks(every: Duration) -> Interval {
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Records this worker's spending, and reads the commands and, as far as a limit needs them, the
/// other workers' spendings. `force_write`: write even if nothing was spent, because the timestamp
/// of the write is the store's current time.
async fn update(worker: &Worker, job: &OpenJob, budget: &mut Budget, force_write: bool) -> anyhow::Result<()> {
    // `write_spend` writes at the first update in any case: other workers reserve a part of the
    // budget only for workers that have written. A worker with shards of the job writes each time,
    // as a heartbeat.
    let is_working = worker.in_flight.count_of_job(job.number) > 0 && worker.watchdog.is_alive();
    if force_write || is_working {
        job.write_heartbeat(&worker.name).await?
    } else {
        job.write_spend(&worker.name).await?
    }
    budget.set_limits(job.refresh().await?);
    Ok(budget.update(&job.ledger).await?)
}

/// Orders a stop if the budget or the deadline is reached.
async fn enforce(worker: &Worker, job: &OpenJob, budget: &mut Budget) -> anyhow::Result<()> {
    if job.state() != JobState::Running || budget.reached(job.device_seconds()).is_none() {
        return Ok(());
    }
    // The known spendings may be stale, and a job whose limits were just extended must not be
    // stopped.
    if budget.is_stale() {
        update(worker, job, budget, true).await?
    } else {
        budget.set_limits(job.refresh().await?)
    }
    if !budget.is_exact() {
        budget.read_changed(&job.ledger).await?;
    }
    match budget.reached(job.device_seconds()) {
        Some(why) if job.state() == JobState::Running => {
            let order = JobCommand::Stop {
                why,
                close: budget.limits().unfinished == Unfinished::Expire,
                note: (why == StopWhy::Budget).then(|| budget.explain(job.device_seconds())),
            };
            job.order_stop(order).await
        }
        _ => Ok(()),
    }
}
