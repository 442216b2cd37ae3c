//! Orders to all workers of a job, and what each worker has spent.
//!
//! Orders are create-once records of one short log; the last one holds. Spendings are cumulative, one object a worker.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};

use super::Ledger;
use super::error::{LedgerError, Result};
use super::job::Terms;
use super::keys::{Id, is_worker_name};
use super::record::{
    ControlRecord, Extension, LimitsFrom, Order, PinOrder, Price, Spend, StopWhy, VERSION, decode, encode, read,
};
use super::store::Created;

/// More orders than this are no work of people.
const MAX_ORDERS: usize = 100_000;

/// The control log of a job, as far as it was read.
#[derive(Debug, Clone)]
pub struct Control {
    ledger: Ledger,
    orders: Vec<Order>,
    /// Of each order, the generation that it was given to.
    generations: Vec<u32>,
}

/// What the workers of a job have spent.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Spent {
    pub by_worker: Vec<WorkerSpend>,
}

/// What one worker has spent.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerSpend {
    pub worker: String,
    /// Cumulative.
    pub device_seconds: f64,
    /// When it was written, by the store's clock.
    pub at: DateTime<Utc>,
}

impl Spent {
    /// Of all workers.
    pub fn device_seconds(&self) -> f64 {
        sum(self.by_worker.iter())
    }

    /// Of all workers but this one.
    pub fn device_seconds_of_others(&self, worker: &str) -> f64 {
        sum(self.by_worker.iter().filter(|spend| spend.worker != worker))
    }

    /// Workers besides this one that wrote within `window` before the newest spending: the others work no more.
    pub fn live_others(&self, worker: &str, window: TimeDelta) -> u32 {
        let Some(now) = self.store_now() else { return 0 };
        let live = |spend: &&WorkerSpend| spend.worker != worker && now - spend.at <= window;
        self.by_worker.iter().filter(live).count() as u32
    }

    /// The latest time that the store stamped on a spending: "now" for deadlines, as soon as we have written ours.
    pub fn store_now(&self) -> Option<DateTime<Utc>> {
        self.by_worker.iter().map(|spend| spend.at).max()
    }
}

/// From 0.0: `Iterator::sum` makes -0.0 of nothing.
fn sum<'a>(spends: impl Iterator<Item = &'a WorkerSpend>) -> f64 {
    spends.fold(0.0, |sum, spend| sum + spend.device_seconds)
}

impl Ledger {
    /// Reads the control log.
    pub async fn control(&self) -> Result<Control> {
        let mut control = Control {
            ledger: self.clone(),
            orders: Vec::new(),
            generations: Vec::new(),
        };
        control.refresh().await?;
        Ok(control)
    }

    /// The limits that hold: the job's own, with those of each `Extend` in their place.
    pub fn terms(&self, control: &Control) -> Terms {
        extended(self.job().terms(), control.orders())
    }

    /// The limits that hold at a store's request more: the orders are read.
    pub async fn terms_now(&self) -> Result<Terms> {
        Ok(self.terms(&self.control().await?))
    }

    /// The limits of the job file as `run` or `submit` last found them changed.
    pub fn terms_of_file(&self, control: &Control) -> Terms {
        let by_file =
            |order: &Order| matches!(order, Order::Extend(extend) if extend.from == Some(LimitsFrom::JobFile));
        let last = control.orders().iter().rposition(by_file);
        // A changed file's limits hold as a whole, so that what holds right after such an order is what the file said.
        extended(self.job().terms(), &control.orders()[..last.map_or(0, |last| last + 1)])
    }

    /// How old the job is by the store's clock alone, as of the newest spending; zero where nobody has spent yet.
    pub fn age(&self, spent: &Spent) -> Duration {
        let age = spent.store_now().map(|now| now - self.created_at());
        age.and_then(|age| age.to_std().ok()).unwrap_or_default()
    }

    /// Writes this worker's spending on the job: cumulative device seconds over all its shards.
    pub async fn write_spend(&self, worker: &str, device_seconds: f64) -> Result<()> {
        let spend = Spend {
            v: VERSION,
            worker: worker.to_string(),
            device_seconds,
        };
        if !is_worker_name(worker) || !device_seconds.is_finite() || device_seconds < 0.0 {
            return Err(LedgerError::stop(format!(
                "worker `{worker}` cannot have spent {device_seconds} seconds"
            )));
        }
        self.store().replace(&self.keys().spend(worker), encode(&spend)?).await
    }

    /// What all workers have spent on this job.
    pub async fn spent(&self) -> Result<Spent> {
        let mut spent = Spent::default();
        for object in self.store().list(&self.keys().spends()).await? {
            let Some(spend) = read::<Spend>(self.store(), &object.key).await? else {
                continue;
            };
            spent.by_worker.push(WorkerSpend {
                worker: spend.worker,
                device_seconds: spend.device_seconds,
                at: object.modified,
            });
        }
        Ok(spent)
    }
}

/// `terms` as these orders leave them.
fn extended(mut terms: Terms, orders: &[Order]) -> Terms {
    for order in orders {
        if let Order::Extend(extend) = order {
            terms.usd = extend.budget_usd;
            terms.deadline_seconds = extend.deadline_seconds;
            terms.unfinished = extend.unfinished.unwrap_or(terms.unfinished);
            terms.usd_per_hour = extend.price.map_or(terms.usd_per_hour, |price| price.usd_per_hour);
        }
    }
    terms
}

impl Control {
    /// Reads what was ordered since: one request where there is nothing new. Returns the order that holds.
    pub async fn refresh(&mut self) -> Result<Option<&Order>> {
        loop {
            let key = self.ledger.keys().control(self.orders.len() as u32);
            match read::<ControlRecord>(self.ledger.store(), &key).await? {
                Some(record) => self.take(record, &key)?,
                None => return Ok(self.holds()),
            }
        }
    }

    /// The order that holds, as of the last reading: the last one, less stops that were meant for an earlier generation and
    /// what only says how inputs are pinned.
    pub fn holds(&self) -> Option<&Order> {
        let mine = self.ledger.generation();
        let mut given = self.orders.iter().zip(&self.generations).rev();
        given
            .find(|(order, generation)| match order {
                Order::Extend(_) => true,
                Order::Stop { .. } => **generation >= mine,
                Order::Pin(_) => false,
            })
            .map(|(order, _)| order)
    }

    /// Whether unfinished rows are to be closed: the job is stopped, and not to be gone on with.
    pub fn closes(&self) -> bool {
        matches!(self.holds(), Some(Order::Stop { close: true, .. }))
    }

    /// Why the job is stopped, if it is.
    pub fn stopped(&self) -> Option<StopWhy> {
        match self.holds() {
            Some(Order::Stop { why, .. }) => Some(*why),
            _ => None,
        }
    }

    /// What was found, where the job is stopped and somebody said so.
    pub fn note(&self) -> Option<&str> {
        match self.holds() {
            Some(Order::Stop { note, .. }) => note.as_deref(),
            _ => None,
        }
    }

    /// Inputs that were pinned anew, oldest first.
    pub fn pins(&self) -> impl Iterator<Item = &PinOrder> {
        self.orders.iter().filter_map(|order| match order {
            Order::Pin(pin) => Some(pin),
            Order::Stop { .. } | Order::Extend(_) => None,
        })
    }

    /// Writes down that an input holds the planned bytes under another ETag, unless that stands there already.
    pub async fn pin(&mut self, pin: PinOrder) -> Result<()> {
        while !self.pins().any(|known| *known == pin) {
            self.give(Order::Pin(pin.clone())).await?;
        }
        Ok(())
    }

    /// All orders, oldest first.
    pub fn orders(&self) -> &[Order] {
        &self.orders
    }

    /// Where the limits that hold come from; `None`: an `Extend` that does not say.
    pub fn limits_from(&self) -> Option<LimitsFrom> {
        let last = self.orders.iter().rev().find_map(|order| match order {
            Order::Extend(extend) => Some(extend.from),
            Order::Stop { .. } | Order::Pin(_) => None,
        });
        // A job begins with the limits of its file.
        last.unwrap_or(Some(LimitsFrom::JobFile))
    }

    /// The order that puts `wanted` in the place of what holds.
    pub fn extend_to(&self, wanted: &Terms, from: Option<LimitsFrom>) -> Order {
        let holds = self.ledger.terms(self);
        let price = Price {
            usd_per_hour: wanted.usd_per_hour,
        };
        Order::Extend(Extension {
            budget_usd: wanted.usd,
            deadline_seconds: wanted.deadline_seconds,
            unfinished: (wanted.unfinished != holds.unfinished).then_some(wanted.unfinished),
            price: (wanted.usd_per_hour != holds.usd_per_hour).then_some(price),
            from,
        })
    }

    /// Gives an order, unless somebody else gave one first: then returns false, and the caller decides anew on what
    /// holds now (a budget that was extended in between is not reached).
    pub async fn give(&mut self, order: Order) -> Result<bool> {
        let index = self.orders.len() as u32;
        let key = self.ledger.keys().control(index);
        let record = ControlRecord {
            v: order.version(),
            job: self.ledger.job().job.clone(),
            index,
            nonce: Id::random()?,
            generation: self.ledger.generation(),
            order,
        };
        match self.ledger.store().create(&key, encode(&record)?).await? {
            Created::Ours => {
                self.generations.push(record.generation);
                self.orders.push(record.order);
                Ok(true)
            }
            Created::Theirs(bytes) => {
                self.take(decode(self.ledger.store(), &key, &bytes)?, &key)?;
                self.refresh().await?;
                Ok(false)
            }
        }
    }

    fn take(&mut self, record: ControlRecord, key: &str) -> Result<()> {
        let expected = record.job == self.ledger.job().job && record.index as usize == self.orders.len();
        if !expected || self.orders.len() >= MAX_ORDERS {
            let address = self.ledger.store().address(key);
            return Err(LedgerError::damaged(format!("`{address}` is no order to this job")));
        }
        self.generations.push(record.generation);
        self.orders.push(record.order);
        Ok(())
    }
}
