//! Webhooks: tells other servers that a batch has ended, by signed posts in the form that OpenAI's
//! client verifies.
//!
//! A batch that ends owes an event to each webhook of its tenant that wants it. The mark of the
//! owed event is written before the batch leaves the unfinished ones, and stays until the webhook
//! took the event or the last try has failed.
//!
//! * `config`: the file of webhooks; `records`: marks, tries and results in the store.
//! * `deliver`: which event is tried when; `schedule`: pauses and turns; `post`: one try.

mod config;
pub mod deliver;
mod post;
mod records;
pub mod schedule;

use std::sync::Arc;

use tokio::sync::Notify;

use self::config::Webhook;
use self::records::OwedKey;
use super::record::EndStatus;
use super::records::{BatchKey, Records};
use crate::ledger::LedgerError;

/// The webhooks of all tenants.
#[derive(Debug, Default)]
pub struct Webhooks {
    list: Vec<Arc<Webhook>>,
    /// Notified when this process has marked an event as owed.
    has_new: Notify,
}

impl Webhooks {
    /// Marks the events that the end of a batch owes. Marking them again changes nothing.
    pub(super) async fn owe(&self, records: &Records, batch: &BatchKey, status: EndStatus) -> Result<(), LedgerError> {
        let wanted = |webhook: &&Arc<Webhook>| webhook.tenant == batch.tenant && webhook.statuses.contains(&status);
        for webhook in self.list.iter().filter(wanted) {
            records.owe(&OwedKey::new(batch, &webhook.id)).await?;
            self.has_new.notify_one();
        }
        Ok(())
    }

    /// The webhook that an event is for; `None`: it was taken out of the file.
    fn of(&self, key: &OwedKey) -> Option<&Arc<Webhook>> {
        let mut list = self.list.iter();
        list.find(|webhook| webhook.tenant == key.batch.tenant && webhook.id == key.webhook)
    }
}
