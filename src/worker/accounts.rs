//! What each job costs and whether it may go on: writes this worker's spending, reads the orders and the others' spendings.
//!
//! Requests a job and look: its spending, the next order, the list of spendings and each other live worker's.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use chrono::TimeDelta;
use tokio::time::{Instant, MissedTickBehavior};

use crate::ledger::{Terms, Unfinished};
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
    /// Of our own spending, what is written down.
    written_seconds: f64,
}

/// Looks at the jobs that are worked on each log interval, until `stop` is set.
pub(super) async fn run(worker: Arc<Worker>, stop: Stop) -> anyhow::Result<()> {
    let mut accounts: HashMap<u32, Account> = HashMap::new();
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
            let known = accounts.get(&job.number);
            // A job is looked at as soon as it is heard of; one that nobody here works on needs no further looks.
            let busy = worker.in_flight.of_job(job.number) > 0
                || known.is_some_and(|account| job.device_seconds() > account.written_seconds);
            let looked = match known {
                Some(account) if !due || !busy => enforce(&job, account).await,
                known => match look(&worker, &job, known).await {
                    Ok(account) => {
                        let enforced = enforce(&job, &account).await;
                        accounts.insert(job.number, account);
                        enforced
                    }
                    Err(error) => Err(error),
                },
            };
            match looked.map_err(|error| (worker.patience.reaction(&error), error)) {
                Ok(()) => {}
                Err((Reaction::Wait, error)) => worker.patience.say(&error),
                Err((Reaction::LeaveShard, error)) => {
                    tracing::warn!("{}: {}", job.title(), crate::report::one_line(&error));
                }
                Err((Reaction::End, error)) => return Err(error),
            }
        }
    }
}

/// Writes what was spent on a job since the last time.
pub(super) async fn write_spend(worker: &Worker, job: &OpenJob) -> anyhow::Result<()> {
    let seconds = job.device_seconds();
    job.ledger.write_spend(&worker.name, seconds).await?;
    Ok(())
}

/// Writes what we spent, reads the orders and what others spent.
async fn look(worker: &Worker, job: &OpenJob, known: Option<&Account>) -> anyhow::Result<Account> {
    let seconds = job.device_seconds();
    // The first look writes too: others reckon with every worker that is at it.
    if known.is_none_or(|account| seconds > account.written_seconds) {
        job.ledger.write_spend(&worker.name, seconds).await?;
    }
    let terms = job.refresh().await?;
    let spent = job.ledger.spent().await?;
    let interval = worker.options.log_interval;
    let window = TimeDelta::from_std(2 * interval).unwrap_or(TimeDelta::MAX);
    let ahead = f64::from(spent.live_others(&worker.name, window)) * interval.as_secs_f64();
    Ok(Account {
        terms,
        others_seconds: spent.device_seconds_of_others(&worker.name) + ahead,
        age: (job.ledger.age(&spent), Instant::now()),
        written_seconds: seconds,
    })
}

/// Orders a stop where budget or deadline are reached.
async fn enforce(job: &OpenJob, account: &Account) -> anyhow::Result<()> {
    if job.state() != JobState::Going {
        return Ok(());
    }
    let (age, at) = account.age;
    let limits = Limits::of(&account.terms, job.ledger.job().usd_per_hour);
    match limits.reached(account.others_seconds + job.device_seconds(), age + at.elapsed()) {
        Some(why) => {
            job.order_stop(why, account.terms.unfinished == Unfinished::Expire)
                .await
        }
        None => Ok(()),
    }
}
