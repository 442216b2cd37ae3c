//! Owed events in the store.
//!
//! `owed/TENANT/BATCH.WEBHOOK.0` marks an event as owed, `….1` and so on its tries: each is created
//! once, by the process that makes the try, so that several processes share the work without a
//! leader. The batch's record `webhook-WEBHOOK` says how the delivery has ended. It is created
//! before the marks are removed, and read after a try was claimed: so a process that looks late
//! sends nothing twice.

use std::collections::BTreeMap;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use super::deliver::OWED_MAX;
use crate::ledger::LedgerError;
use crate::serve::id;
use crate::serve::keys::Tenant;
use crate::serve::records::{BatchKey, Records};

/// Names an event and the webhook that it is for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct OwedKey {
    pub batch: BatchKey,
    pub webhook: String,
}

impl OwedKey {
    pub(super) fn new(batch: &BatchKey, webhook: &str) -> OwedKey {
        OwedKey {
            batch: batch.clone(),
            webhook: webhook.to_string(),
        }
    }

    /// The key of the mark (0) or of a try (from 1).
    fn entry(&self, number: u32) -> String {
        let BatchKey { tenant, id } = &self.batch;
        format!("{}/{id}.{}.{number}", owed(tenant), self.webhook)
    }

    /// Reads what [`OwedKey::entry`] returns.
    fn parse(tenant: &Tenant, entry: &str) -> Option<(OwedKey, u32)> {
        let mut parts = entry.rsplit('/').next()?.splitn(3, '.');
        let batch = parts.next().filter(|text| id::is_id(id::BATCH, text))?;
        let webhook = parts.next()?;
        let number = parts.next()?.parse().ok()?;
        Some((OwedKey::new(&BatchKey::new(tenant, batch), webhook), number))
    }

    /// The record of how the delivery has ended.
    fn delivery(&self) -> String {
        self.batch.stage(&format!("webhook-{}", self.webhook))
    }
}

fn owed(tenant: &Tenant) -> String {
    format!("owed/{}", tenant.as_str())
}

/// An owed event, as a listing shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Owed {
    /// Number of its tries so far.
    pub tries: u32,
    /// When the event was marked, by the store's clock.
    pub since: DateTime<Utc>,
    /// When the last try began; `since` if there was none.
    pub last: DateTime<Utc>,
}

/// A try to deliver an event.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Try {
    at: i64,
    /// Tells the tries of processes apart.
    id: String,
}

/// How a delivery has ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Delivery {
    pub at: i64,
    pub result: DeliveryResult,
    pub tries: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum DeliveryResult {
    Delivered,
    /// The webhook answered that it wants this event no more.
    Gone,
    /// The last try has failed.
    GivenUp,
}

impl Records {
    /// Marks an event as owed.
    pub(super) async fn owe(&self, key: &OwedKey) -> Result<(), LedgerError> {
        self.store.create(&key.entry(0), Bytes::from_static(b"{}")).await?;
        Ok(())
    }

    /// The owed events of a tenant, of at most so many marks and tries.
    pub(super) async fn owed(&self, tenant: &Tenant) -> Result<BTreeMap<OwedKey, Owed>, LedgerError> {
        let listed = self.store.list_page(&owed(tenant), None, OWED_MAX).await?;
        let mut found: BTreeMap<OwedKey, Owed> = BTreeMap::new();
        for object in listed {
            let Some((key, number)) = OwedKey::parse(tenant, &object.key) else {
                continue;
            };
            let one = found.entry(key).or_insert(Owed {
                tries: number,
                since: object.modified,
                last: object.modified,
            });
            one.since = one.since.min(object.modified);
            if number >= one.tries {
                one.tries = number;
                one.last = object.modified;
            }
        }
        Ok(found)
    }

    /// Claims a try for this process. `false`: another one makes it.
    pub(super) async fn claim_try(&self, key: &OwedKey, number: u32, now: i64) -> Result<bool, LedgerError> {
        let own = Try {
            at: now,
            id: id::new_id("try_")?,
        };
        let own_id = own.id.clone();
        Ok(self.create(&key.entry(number), own).await?.id == own_id)
    }

    /// How the delivery has ended; `None`: it has not.
    pub(super) async fn delivery(&self, key: &OwedKey) -> Result<Option<Delivery>, LedgerError> {
        self.read(&key.delivery()).await
    }

    /// Records how a delivery has ended, and removes its mark and tries.
    pub(super) async fn settle(&self, key: &OwedKey, delivery: Delivery) -> Result<(), LedgerError> {
        let tries = delivery.tries;
        self.create(&key.delivery(), delivery).await?;
        self.remove_owed(key, tries).await
    }

    /// Removes the mark and the tries of a delivery that has ended.
    pub(super) async fn remove_owed(&self, key: &OwedKey, tries: u32) -> Result<(), LedgerError> {
        for number in (0..=tries).rev() {
            self.store.delete(&key.entry(number)).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::records::tests::root;

    fn key(webhook: &str) -> OwedKey {
        let batch = BatchKey::new(&Tenant::new("a").unwrap(), id::new_id(id::BATCH).unwrap());
        OwedKey::new(&batch, webhook)
    }

    #[test]
    fn entries_are_read_as_they_are_written() {
        let key = key("0123456789abcdef");
        let tenant = &key.batch.tenant;
        for number in [0, 1, 12] {
            assert_eq!(OwedKey::parse(tenant, &key.entry(number)), Some((key.clone(), number)));
        }
        for broken in ["owed/a/x", "owed/a/batch_x.y.0", "", &key.entry(0).replace(".0", ".z")] {
            assert_eq!(OwedKey::parse(tenant, broken), None, "{broken}");
        }
    }

    #[tokio::test]
    async fn one_process_makes_a_try_and_a_settled_event_is_owed_no_more() {
        let records = Records::open(root()).await.unwrap();
        let key = key("ab");
        let tenant = key.batch.tenant.clone();
        let tries = async || {
            let owed = records.owed(&tenant).await.unwrap();
            owed.get(&key).map(|owed| owed.tries)
        };
        assert_eq!(tries().await, None);
        records.owe(&key).await.unwrap();
        records.owe(&key).await.unwrap();
        assert_eq!(tries().await, Some(0));
        for number in [1, 2] {
            assert!(records.claim_try(&key, number, 5).await.unwrap());
            assert!(!records.claim_try(&key, number, 5).await.unwrap());
            assert_eq!(tries().await, Some(number));
        }
        assert_eq!(records.owed(&Tenant::new("b").unwrap()).await.unwrap().len(), 0);
        assert_eq!(records.delivery(&key).await.unwrap(), None);
        let delivery = Delivery {
            at: 7,
            result: DeliveryResult::Delivered,
            tries: 2,
        };
        records.settle(&key, delivery.clone()).await.unwrap();
        assert_eq!(records.delivery(&key).await.unwrap(), Some(delivery));
        assert_eq!(tries().await, None);
    }
}
