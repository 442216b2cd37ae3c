//! The control log: orders to all workers of a job, as create-once records. The last order holds.

use super::Ledger;
use super::error::{LedgerError, Result};
use super::job::JobLimits;
use super::keys::Id;
use super::order::{ControlRecord, Extension, JobCommand, LimitsFrom, PinOrder, Price, StopWhy};
use super::record::{decode, read};
use super::store::Created;

/// Maximum number of orders: people do not give more.
const MAX_ORDERS: usize = 100_000;

/// Maximum bytes of notes and other texts in all orders together.
const MAX_ORDER_BYTES: usize = 64 << 20;

/// The control log of a job, as far as it was read.
#[derive(Debug, Clone)]
pub struct Control {
    ledger: Ledger,
    orders: Vec<JobCommand>,
    /// The generation that each order was given to.
    generations: Vec<u32>,
    /// Bytes of text in all orders together, as bounded by [`MAX_ORDER_BYTES`].
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

    /// The limits that hold: those of the job, overridden by each `Extend` in turn.
    pub fn limits(&self, control: &Control) -> JobLimits {
        extended(self.job().limits(), control.orders())
    }

    /// The limits that hold now. Reads all orders again: one request per order and one more.
    pub async fn terms_now(&self) -> Result<JobLimits> {
        Ok(self.limits(&self.control().await?))
    }

    /// The limits of the job file, as of the last time `run` or `submit` found them changed.
    pub fn limits_of_file(&self, control: &Control) -> JobLimits {
        let by_file = |order: &JobCommand| matches!(order, JobCommand::Extend(extend) if extend.from == Some(LimitsFrom::JobFile));
        let last = control.orders().iter().rposition(by_file);
        // The limits of a changed file hold as a whole, so the limits right after that order are
        // the file's.
        extended(
            self.job().limits(),
            &control.orders()[..last.map_or(0, |last| last + 1)],
        )
    }
}

/// `terms` overridden by these orders.
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
    /// Reads the orders given since the last reading: one request if there are none. Returns the
    /// order that holds.
    pub async fn refresh(&mut self) -> Result<Option<&JobCommand>> {
        loop {
            let key = self.ledger.keys().control(self.orders.len() as u32);
            match read::<ControlRecord>(self.ledger.store(), &key).await? {
                Some(record) => self.take(record, &key)?,
                None => return Ok(self.holds()),
            }
        }
    }

    /// The order that holds, as of the last reading: the last one, skipping stops that were meant
    /// for an earlier generation and orders that only pin an input.
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

    /// Whether the order that holds is a stop that closes the job: unfinished rows become expired
    /// or cancelled.
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

    /// The note of the stop that holds, if it has one.
    pub fn note(&self) -> Option<&str> {
        match self.holds() {
            Some(JobCommand::Stop { note, .. }) => note.as_deref(),
            _ => None,
        }
    }

    /// Inputs that were pinned to a new ETag, oldest first.
    pub fn pins(&self) -> impl Iterator<Item = &PinOrder> {
        self.orders.iter().filter_map(|order| match order {
            JobCommand::Pin(pin) => Some(pin),
            JobCommand::Stop { .. } | JobCommand::Extend(_) => None,
        })
    }

    /// Records that an input holds the planned bytes under another ETag, unless that is recorded
    /// already.
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

    /// The source of the limits that hold. `None`: the last `Extend` names none.
    pub fn limits_from(&self) -> Option<LimitsFrom> {
        let last = self.orders.iter().rev().find_map(|order| match order {
            JobCommand::Extend(extend) => Some(extend.from),
            JobCommand::Stop { .. } | JobCommand::Pin(_) => None,
        });
        // A job begins with the limits of its file.
        last.unwrap_or(Some(LimitsFrom::JobFile))
    }

    /// The order that replaces the limits that hold by `wanted`.
    pub fn extend_to(&self, wanted: &JobLimits, from: Option<LimitsFrom>) -> JobCommand {
        let holds = self.ledger.limits(self);
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

    /// Appends an order. Returns false if another process appended one first: the caller must then
    /// decide anew from the order that holds now (the budget may have been extended in between).
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
            return Err(LedgerError::damaged(format!(
                "`{}` is not an order for this job",
                address()
            )));
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
