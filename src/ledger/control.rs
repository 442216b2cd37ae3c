//! Orders to all workers of a job: create-once records of one short log; the last one holds.

use super::Ledger;
use super::error::{LedgerError, Result};
use super::job::JobLimits;
use super::keys::Id;
use super::order::{ControlRecord, Extension, JobCommand, LimitsFrom, PinOrder, Price, StopWhy};
use super::record::{decode, read};
use super::store::Created;

/// More orders than this are no work of people.
const MAX_ORDERS: usize = 100_000;

/// Most bytes of notes and the like in all orders together.
const MAX_ORDER_BYTES: usize = 64 << 20;

/// The control log of a job, as far as it was read.
#[derive(Debug, Clone)]
pub struct Control {
    ledger: Ledger,
    orders: Vec<JobCommand>,
    /// Of each order, the generation that it was given to.
    generations: Vec<u32>,
    /// Of all orders together, about.
    bytes: usize,
}

impl Ledger {
    /// Reads the control log.
    pub async fn control(&self) -> Result<Control> {
        let mut control = Control {
            ledger: self.clone(),
            orders: Vec::new(),
            generations: Vec::new(),
            bytes: 0,
        };
        control.refresh().await?;
        Ok(control)
    }

    /// The limits that hold: the job's own, with those of each `Extend` in their place.
    pub fn terms(&self, control: &Control) -> JobLimits {
        extended(self.job().terms(), control.orders())
    }

    /// The limits that hold at a store's request more: the orders are read.
    pub async fn terms_now(&self) -> Result<JobLimits> {
        Ok(self.terms(&self.control().await?))
    }

    /// The limits of the job file as `run` or `submit` last found them changed.
    pub fn terms_of_file(&self, control: &Control) -> JobLimits {
        let by_file = |order: &JobCommand| matches!(order, JobCommand::Extend(extend) if extend.from == Some(LimitsFrom::JobFile));
        let last = control.orders().iter().rposition(by_file);
        // A changed file's limits hold as a whole, so that what holds right after such an order is what the file said.
        extended(self.job().terms(), &control.orders()[..last.map_or(0, |last| last + 1)])
    }
}

/// `terms` as these orders leave them.
fn extended(mut terms: JobLimits, orders: &[JobCommand]) -> JobLimits {
    for order in orders {
        if let JobCommand::Extend(extend) = order {
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
    pub async fn refresh(&mut self) -> Result<Option<&JobCommand>> {
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
    pub fn holds(&self) -> Option<&JobCommand> {
        let mine = self.ledger.generation();
        let mut given = self.orders.iter().zip(&self.generations).rev();
        given
            .find(|(order, generation)| match order {
                JobCommand::Extend(_) => true,
                JobCommand::Stop { .. } => **generation >= mine,
                JobCommand::Pin(_) => false,
            })
            .map(|(order, _)| order)
    }

    /// Whether unfinished rows are to be closed: the job is stopped, and not to be gone on with.
    pub fn closes(&self) -> bool {
        matches!(self.holds(), Some(JobCommand::Stop { close: true, .. }))
    }

    /// Why the job is stopped, if it is.
    pub fn stopped(&self) -> Option<StopWhy> {
        match self.holds() {
            Some(JobCommand::Stop { why, .. }) => Some(*why),
            _ => None,
        }
    }

    /// What was found, where the job is stopped and somebody said so.
    pub fn note(&self) -> Option<&str> {
        match self.holds() {
            Some(JobCommand::Stop { note, .. }) => note.as_deref(),
            _ => None,
        }
    }

    /// Inputs that were pinned anew, oldest first.
    pub fn pins(&self) -> impl Iterator<Item = &PinOrder> {
        self.orders.iter().filter_map(|order| match order {
            JobCommand::Pin(pin) => Some(pin),
            JobCommand::Stop { .. } | JobCommand::Extend(_) => None,
        })
    }

    /// Writes down that an input holds the planned bytes under another ETag, unless that stands there already.
    pub async fn pin(&mut self, pin: PinOrder) -> Result<()> {
        while !self.pins().any(|known| *known == pin) {
            self.give(JobCommand::Pin(pin.clone())).await?;
        }
        Ok(())
    }

    /// All orders, oldest first.
    pub fn orders(&self) -> &[JobCommand] {
        &self.orders
    }

    /// Where the limits that hold come from; `None`: an `Extend` that does not say.
    pub fn limits_from(&self) -> Option<LimitsFrom> {
        let last = self.orders.iter().rev().find_map(|order| match order {
            JobCommand::Extend(extend) => Some(extend.from),
            JobCommand::Stop { .. } | JobCommand::Pin(_) => None,
        });
        // A job begins with the limits of its file.
        last.unwrap_or(Some(LimitsFrom::JobFile))
    }

    /// The order that puts `wanted` in the place of what holds.
    pub fn extend_to(&self, wanted: &JobLimits, from: Option<LimitsFrom>) -> JobCommand {
        let holds = self.ledger.terms(self);
        let price = Price {
            usd_per_hour: wanted.usd_per_hour,
        };
        JobCommand::Extend(Extension {
            budget_usd: wanted.usd,
            deadline_seconds: wanted.deadline_seconds,
            unfinished: (wanted.unfinished != holds.unfinished).then_some(wanted.unfinished),
            price: (wanted.usd_per_hour != holds.usd_per_hour).then_some(price),
            from,
        })
    }

    /// Gives an order, unless somebody else gave one first: then returns false, and the caller decides anew on what
    /// holds now (a budget that was extended in between is not reached).
    pub async fn give(&mut self, order: JobCommand) -> Result<bool> {
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
        let bytes = self.ledger.encode_signed(&key, &record)?;
        match self.ledger.store().create(&key, bytes).await? {
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
        let address = || self.ledger.store().address(key);
        if !expected {
            return Err(LedgerError::damaged(format!("`{}` is no order to this job", address())));
        }
        self.bytes += record.order.text_bytes();
        if self.orders.len() >= MAX_ORDERS || self.bytes > MAX_ORDER_BYTES {
            return Err(LedgerError::damaged(format!(
                "`{}` is one order too many: {} have {} bytes",
                address(),
                self.orders.len() + 1,
                self.bytes
            )));
        }
        self.generations.push(record.generation);
        self.orders.push(record.order);
        Ok(())
    }
}
