//! What each job costs and whether it may go on: writes this worker's spending, reads the orders and the others' spendings.
//!
//! Requests a job and look: its spending and the next order; where there is a deadline, the time of what it wrote; where there
//! is a budget, the list of spendings instead, and close to the budget each of those that have changed.

use std::collections::HashSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, Interval, MissedTickBehavior};

use crate::ledger::spend::Others;
use crate::ledger::{Order, StopWhy, Terms, Unfinished};
use crate::report::cost::{dollars, show_dollars};
use crate::report::progress::show_duration;
use crate::worker::Worker;
use crate::worker::jobs::{JobState, OpenJob};
use crate::worker::limits::Limits;
use crate::worker::patience::Reaction;
use crate::worker::stop::Stop;

/// How often budgets are looked at with this process's own counters: no request is needed for that.
const BUDGET_EVERY: Duration = Duration::from_secs(1);
/// Log intervals within which a worker that is at a job has written its spending.
const LIVE_INTERVALS: u32 = 2;

/// One job's account as of the last look.
#[derive(Default)]
struct Account {
    terms: Terms,
    /// What other workers have spent. Kept over looks: what has not changed is not read again.
    others: Others,
    /// The job's age at the last look, by the store's clock, and when that was.
    age: Option<(Duration, Instant)>,
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
    let (mut account, mut looked_at) = (Account::default(), false);
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
            if let Err(error) = account.look(&worker, &job).await {
                bear(&worker, &job, error)?;
            }
        }
        if let Err(error) = account.enforce(&worker, &job).await {
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

impl Account {
    /// Writes what we spent, reads the orders and, as far as a limit asks for it, what others spent.
    async fn look(&mut self, worker: &Worker, job: &OpenJob) -> anyhow::Result<()> {
        // The first look writes too: others reckon with every worker that is at it. One that works shows that it lives.
        match worker.in_flight.of_job(job.number) > 0 && worker.pulse.is_alive() {
            true => job.sign(&worker.name).await?,
            false => job.write_spend(&worker.name).await?,
        }
        self.terms = job.refresh().await?;
        let (limits, ledger) = (Limits::of(&self.terms), &job.ledger);
        let now = if limits.count_money() {
            ledger.list_spends(&worker.name, &mut self.others).await?;
            self.others.store_now()
        } else if limits.deadline.is_some() {
            ledger.spend_time(&worker.name).await?
        } else {
            None
        };
        self.age = Some((ledger.age_at(now), Instant::now()));
        Ok(())
    }

    /// Orders a stop where budget or deadline are reached.
    async fn enforce(&mut self, worker: &Worker, job: &OpenJob) -> anyhow::Result<()> {
        if job.state() != JobState::Going || self.reached(worker, job).is_none() {
            return Ok(());
        }
        if !self.others.is_exact() {
            job.ledger.read_changed_spends(&mut self.others).await?;
        }
        // The terms that we know may be old: an order that gives more must not be answered with a stop.
        self.terms = job.refresh().await?;
        match self.reached(worker, job) {
            Some(why) if job.state() == JobState::Going => {
                let order = Order::Stop {
                    why,
                    close: self.terms.unfinished == Unfinished::Expire,
                    note: (why == StopWhy::Budget).then(|| self.bill(worker, job)),
                };
                job.order_stop(order).await
            }
            _ => Ok(()),
        }
    }

    fn reached(&self, worker: &Worker, job: &OpenJob) -> Option<StopWhy> {
        // Never looked: nothing is known that could be reached.
        let (age, at) = self.age?;
        let (spent, held) = self.seconds(worker, job);
        Limits::of(&self.terms).reached(spent + held, age + at.elapsed())
    }

    /// What is spent, by all that we know, and what the other live workers may spend until they look next.
    fn seconds(&self, worker: &Worker, job: &OpenJob) -> (f64, f64) {
        let interval = worker.options.log_interval;
        let held = f64::from(self.others.live(LIVE_INTERVALS * interval)) * interval.as_secs_f64();
        (self.others.most_seconds() + job.device_seconds(), held)
    }

    /// For people: why a budget ends work where it does.
    fn bill(&self, worker: &Worker, job: &OpenJob) -> String {
        let (spent, held) = self.seconds(worker, job);
        let usd = |seconds| show_dollars(dollars(seconds, self.terms.usd_per_hour).unwrap_or_default());
        let mut bill = format!(
            "{} of {} are spent",
            usd(spent),
            show_dollars(self.terms.usd.unwrap_or_default())
        );
        let others = self.others.live(LIVE_INTERVALS * worker.options.log_interval);
        if others > 0 {
            let (plural, seconds) = (if others == 1 { "" } else { "s" }, worker.options.log_interval);
            bill.push_str(&format!(
                ", and {} are held for {others} other worker{plural} at it, for the {} until each looks again",
                usd(held),
                show_duration(seconds.as_secs_f64())
            ));
        }
        bill
    }
}
