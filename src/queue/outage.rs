//! Logs one line when a broker goes away and one when it is back.

use std::time::Instant;

/// The time since which a broker is away, if it is. An outage is logged once.
#[derive(Debug)]
pub(crate) struct Outage {
    /// The address, without secrets.
    address: String,
    since: Option<Instant>,
}

impl Outage {
    pub(super) fn new(address: impl ToString) -> Outage {
        Outage {
            address: address.to_string(),
            since: None,
        }
    }

    pub(super) fn is_down(&self) -> bool {
        self.since.is_some()
    }

    /// Reports that the broker does not answer; only the first call logs. Removes an address at the
    /// beginning of `why`, because the line names it already.
    pub(super) fn report_down(&mut self, why: &str) {
        if self.since.is_none() {
            self.since = Some(Instant::now());
            let why = why.strip_prefix(&format!("{}: ", self.address)).unwrap_or(why);
            tracing::warn!(queue = %self.address, "{} does not answer ({why}); trying again", self.address);
        }
    }

    /// Reports that the broker answers.
    pub(super) fn report_up(&mut self) {
        if let Some(since) = self.since.take() {
            tracing::warn!(queue = %self.address, "{} is back after {} s", self.address, since.elapsed().as_secs());
        }
    }
}
