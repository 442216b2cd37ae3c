//! One line when a broker goes, one when it is back.

use std::time::Instant;

/// Whether a broker is away, since when, and that it was said.
#[derive(Debug)]
pub(crate) struct Outage {
    /// The address, without secrets.
    address: String,
    since: Option<Instant>,
}

impl Outage {
    pub fn new(address: impl ToString) -> Outage {
        Outage {
            address: address.to_string(),
            since: None,
        }
    }

    pub fn is_down(&self) -> bool {
        self.since.is_some()
    }

    /// The broker does not answer; said once. The address is said once in that line, where `why` begins with it too.
    pub fn down(&mut self, why: &str) {
        if self.since.is_none() {
            self.since = Some(Instant::now());
            let why = why.strip_prefix(&format!("{}: ", self.address)).unwrap_or(why);
            tracing::warn!("{} does not answer ({why}); trying again until it does", self.address);
        }
    }

    /// The broker answers.
    pub fn up(&mut self) {
        if let Some(since) = self.since.take() {
            tracing::warn!("{} is back after {} s", self.address, since.elapsed().as_secs());
        }
    }
}
