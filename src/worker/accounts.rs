//! What each job costs and whether it may go on: writes this worker's spending, reads the orders and the others' spendings.
//!
//! Requests a job and look: its spending, the next order, the list of spendings and each other live worker's.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use chrono::TimeDelta;
use tokio::time::{Instant, MissedTickBehavior};

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

/// Looks at the jobs that are worked on each log interval, until `stop` is set.
pub(super) async fn run(worker: Arc<Worker>, stop: Stop) -> anyhow::Result<()> {
    let mut accounts: HashMap<u32, Option<Account>> = HashMap::new();
    let mut looks = tokio::time::interval(worker.options.log_interval);
    let mut budgets = tokio::time::interval(BUDGET_EVERY.min(worker.options.log_interval));
    for ticks in [&mut looks, &mut budgets] {
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    }
    loop {
        let due = tokio::select! {
            biased;
            () = stop.wait() => return Ok(()),
            _ = looks.tick() => true,
            _ = budgets.tick() => false,
        };
        let jobs = worker.jobs.open().await;
        accounts.retain(|number, _| jobs.iter().any(|job| job.number == *number));
        for job in jobs {
            // A job is looked at as soon as it is heard of; one that nobody here works on needs no further looks.
            let busy = worker.in_flight.of_job(job.number) > 0 || job.owes();
            let looked = match accounts.get_mut(&job.number) {
                Some(known) if !due || !busy => match known {
                    Some(account) => enforce(&job, account).await,
                    None => Ok(()),
                },
                _ => match look(&worker, &job).await {
                    Ok(mut account) => {
                        let enforced = enforce(&job, &mut account).await;
                        accounts.insert(job.number, Some(account));
                        enforced
                    }
                    Err(error) => {
                        accounts.entry(job.number).or_insert(None);
                        Err(error)
                    }
                },
            };
            match looked.map_err(|error| (worker.patience.reaction(&error), error)) {
                Ok(()) => {}
                Err((Reaction::Wait, error)) => worker.patience.say(&error),
                Err((Reaction::LeaveShard, error)) => {
                    tracing::warn!("{} is left to others: {}", job.title(), crate::report::one_line(&error));
                    job.set_unreadable();
                }
                Err((Reaction::End, error)) => return Err(error),
            }
        }
    }
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
    Limits::of(&account.terms, job.ledger.job().usd_per_hour)
        .reached(account.others_seconds + job.device_seconds(), age + at.elapsed())
}
