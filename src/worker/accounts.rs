//! What each job costs and whether it may go on: records this worker's spending, reads the orders
//! and the other workers' spendings.
//!
//! Requests per job and look: this worker's spending and the next order. A deadline adds the
//! timestamp of the spending. A budget adds the list of spendings instead and, close to the budget,
//! each changed spending.
//!
//! See docs/decisions/024-each-job-has-an-account.md.

use std::collections::HashSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Interval, MissedTickBehavior};
use tracing::Instrument;

use crate::ledger::{JobCommand, StopWhy, Unfinished};
use crate::worker::budget::Budget;
use crate::worker::jobs::{JobState, OpenJob};
use crate::worker::retry_policy::RetryDecision;
use crate::worker::stop::Stop;
use crate::worker::{Worker, spans};

/// How often budgets are checked with this process's own counters, which needs no request.
const BUDGET_EVERY: Duration = Duration::from_secs(1);

/// Keeps an account of each job that the worker hears of, until `stop` is set. Each account is a
/// task of its own: a store that does not answer holds up no other job's budget.
pub(super) async fn run(worker: Arc<Worker>, stop: Stop) -> anyhow::Result<()> {
    let mut accounts = JoinSet::new();
    let mut known = HashSet::new();
    let mut looks = ticks(budget_every(&worker));
    loop {
        tokio::select! {
            biased;
            () = stop.wait() => return Ok(()),
            Some(ended) = accounts.join_next() => ended??,
            _ = looks.tick() => {}
        }
        for job in worker.jobs.open().await {
            if known.insert(job.number) {
                let account = keep(worker.clone(), Arc::downgrade(&job));
                accounts.spawn(account.instrument(spans::of_job(&job)));
            }
        }
    }
}

/// Looks at one job each log interval, and at its limits in between, for as long as the job is
/// open.
async fn keep(worker: Arc<Worker>, job: Weak<OpenJob>) -> anyhow::Result<()> {
    let (mut looks, mut budgets) = (ticks(worker.options.log_interval), ticks(budget_every(&worker)));
    let mut budget = Budget::new(&worker.name, worker.options.log_interval);
    let (mut looked_at, mut rested) = (false, false);
    loop {
        let due = tokio::select! {
            biased;
            _ = looks.tick() => true,
            _ = budgets.tick() => false,
        };
        // Hold the job only during a look: its other holders decide how long it stays open.
        let Some(job) = job.upgrade() else { return Ok(()) };
        // Look at a job as soon as it is heard of, and as soon as work on it resumes: other workers
        // must reckon with this one. A job without work here needs no further looks.
        let busy = worker.in_flight.of_job(job.number) > 0 || job.owes();
        if !looked_at || busy && (due || rested) {
            (looked_at, rested) = (true, false);
            if let Err(error) = look(&worker, &job, &mut budget, false).await {
                backoff(&worker, &job, error)?;
            }
        }
        rested |= due && !busy;
        if let Err(error) = enforce(&worker, &job, &mut budget).await {
            backoff(&worker, &job, error)?;
        }
    }
}

/// Waits out or logs the error; returns an error that must end the worker.
fn backoff(worker: &Worker, job: &OpenJob, error: anyhow::Error) -> anyhow::Result<()> {
    match worker.retry_policy.decision(&error) {
        RetryDecision::Wait => worker.retry_policy.say(&error),
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

/// Records this worker's spending and reads the orders and, as far as a limit needs them, the other
/// workers' spendings. `anew`: write even if nothing was spent, since the store's timestamp tells
/// the current time.
async fn look(worker: &Worker, job: &OpenJob, budget: &mut Budget, anew: bool) -> anyhow::Result<()> {
    // The first look writes too: others reckon with every worker on the job. A worker at work shows
    // that it lives.
    let is_at_it = worker.in_flight.of_job(job.number) > 0 && worker.watchdog.is_alive();
    if anew || is_at_it {
        job.sign(&worker.name).await?
    } else {
        job.write_spend(&worker.name).await?
    }
    budget.set_terms(job.refresh().await?);
    Ok(budget.look(&job.ledger).await?)
}

/// Orders a stop where budget or deadline are reached.
async fn enforce(worker: &Worker, job: &OpenJob, budget: &mut Budget) -> anyhow::Result<()> {
    if job.state() != JobState::Going || budget.reached(job.device_seconds()).is_none() {
        return Ok(());
    }
    // The known spendings may be old, and an order that extends the limits must not be answered
    // with a stop.
    if budget.is_old() {
        look(worker, job, budget, true).await?
    } else {
        budget.set_terms(job.refresh().await?)
    }
    if !budget.is_exact() {
        budget.read(&job.ledger).await?;
    }
    match budget.reached(job.device_seconds()) {
        Some(why) if job.state() == JobState::Going => {
            let order = JobCommand::Stop {
                why,
                close: budget.limits().unfinished == Unfinished::Expire,
                note: (why == StopWhy::Budget).then(|| budget.bill(job.device_seconds())),
            };
            job.order_stop(order).await
        }
        _ => Ok(()),
    }
}
