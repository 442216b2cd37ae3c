//! What each job costs and whether it may go on: writes this worker's spending, reads the orders and the others' spendings.
//!
//! Requests a job and look: its spending, the next order, the list of spendings and each other live worker's.

use std::collections::HashSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use chrono::TimeDelta;
use tokio::task::JoinSet;
use tokio::time::{Instant, Interval, MissedTickBehavior};

use crate::ledger::{Order, StopWhy, Terms, Unfinished};
use crate::worker::Worker;
use crate::worker::jobs::{JobState, OpenJob};
use crate::worker::limits::Limits;
use crate::worker::patience::Reaction;
use crate::worker::stop::Stop;

/// How often budgets are looked at with this process's own counters: no request is needed for that.
const BUDGET_EVERY: Duration = Duration::from_secs(1);

/// One job's account as of the last look.
struct Account {
    terms: Terms,
    /// What other workers have spent, and may spend until the next look.
    others_seconds: f64,
    /// The job's age at the last look, by the store's clock, and when that was.
    age: (Duration, Instant),
}

/// Keeps an account of each job that the worker hears of, until `stop` is set. Each is a task of its own: a store that does
/// not answer holds up no other job's budget.
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
                accounts.spawn(keep(worker.clone(), Arc::downgrade(&job)));
            }
        }
    }
}

/// Looks at one job each log interval, and at its limits in between, for as long as it is open.
async fn keep(worker: Arc<Worker>, job: Weak<OpenJob>) -> anyhow::Result<()> {
    let (mut looks, mut budgets) = (ticks(worker.options.log_interval), ticks(budget_every(&worker)));
    let (mut account, mut looked_at) = (None, false);
    loop {
        let due = tokio::select! {
            biased;
            _ = looks.tick() => true,
            _ = budgets.tick() => false,
        };
        // Held only while it is looked at: who else holds it decides how long it stays open.
        let Some(job) = job.upgrade() else { return Ok(()) };
        // A job is looked at as soon as it is heard of; one that nobody here works on needs no further looks.
        let busy = worker.in_flight.of_job(job.number) > 0 || job.owes();
        if !looked_at || due && busy {
            looked_at = true;
            match look(&worker, &job).await {
                Ok(seen) => account = Some(seen),
                Err(error) => bear(&worker, &job, error)?,
            }
        }
        if let Some(account) = &mut account
            && let Err(error) = enforce(&job, account).await
        {
            bear(&worker, &job, error)?;
        }
    }
}

/// Gives back what must end the worker.
fn bear(worker: &Worker, job: &OpenJob, error: anyhow::Error) -> anyhow::Result<()> {
    match worker.patience.reaction(&error) {
        Reaction::Wait => worker.patience.say(&error),
        Reaction::LeaveShard => job.leave_to_others(&error),
        Reaction::End => return Err(error),
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

/// Writes what we spent, reads the orders and what others spent.
async fn look(worker: &Worker, job: &OpenJob) -> anyhow::Result<Account> {
    // The first look writes too: others reckon with every worker that is at it.
    job.write_spend(&worker.name).await?;
    let terms = job.refresh().await?;
    let spent = job.ledger.spent().await?;
    let interval = worker.options.log_interval;
    let window = TimeDelta::from_std(2 * interval).unwrap_or(TimeDelta::MAX);
    let ahead = f64::from(spent.live_others(&worker.name, window)) * interval.as_secs_f64();
    Ok(Account {
        terms,
        others_seconds: spent.device_seconds_of_others(&worker.name) + ahead,
        age: (job.ledger.age(&spent), Instant::now()),
    })
}

/// Orders a stop where budget or deadline are reached.
async fn enforce(job: &OpenJob, account: &mut Account) -> anyhow::Result<()> {
    if job.state() != JobState::Going || reached(job, account).is_none() {
        return Ok(());
    }
    // The terms that we know may be old: an order that gives more must not be answered with a stop.
    account.terms = job.refresh().await?;
    match reached(job, account) {
        Some(why) if job.state() == JobState::Going => {
            let close = account.terms.unfinished == Unfinished::Expire;
            job.order_stop(Order::stop(why, close)).await
        }
        _ => Ok(()),
    }
}

fn reached(job: &OpenJob, account: &Account) -> Option<StopWhy> {
    let (age, at) = account.age;
    Limits::of(&account.terms).reached(account.others_seconds + job.device_seconds(), age + at.elapsed())
}
