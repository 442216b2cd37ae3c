//! What tenants may have at a time: unfinished batches, and requests and tokens of these. The counts
//! come from the records of unfinished batches, so that they hold for all processes.
//!
//! In one process, counting and the record that it permits are one step. Two processes that count
//! at the same moment may exceed a limit by what both permit.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use futures::{StreamExt, TryStreamExt};
use tokio::sync::OwnedMutexGuard;

use super::error::{ApiError, ApiResult};
use super::keys::{Limits, Tenant};
use super::record::{BatchError, BatchRecord, CheckedInput};
use super::records::{BatchKey, Records};
use super::service::Service;
use crate::ledger::LedgerError;

/// Number of batches whose records are read concurrently.
const READS_AT_ONCE: usize = 8;

/// A lock per tenant that has limits.
#[derive(Debug, Default)]
pub(super) struct QuotaLocks(Mutex<HashMap<Tenant, Arc<tokio::sync::Mutex<()>>>>);

impl QuotaLocks {
    async fn lock(&self, tenant: &Tenant) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            locks.entry(tenant.clone()).or_default().clone()
        };
        lock.lock_owned().await
    }
}

/// Requests and tokens that wait for answers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Queue {
    requests: u64,
    tokens: u64,
}

impl Queue {
    /// What a batch has until it ends.
    fn of(batch: &CheckedInput) -> Queue {
        let refused = batch.refused.map_or(0, |refused| refused.lines);
        Queue {
            requests: batch.requests.saturating_sub(refused),
            tokens: batch.tokens,
        }
    }

    fn add(self, other: Queue) -> Queue {
        Queue {
            requests: self.requests.saturating_add(other.requests),
            tokens: self.tokens.saturating_add(other.tokens),
        }
    }
}

impl Service {
    /// Creates a batch, if its tenant may have one more.
    pub(super) async fn open_batch(&self, key: &BatchKey, record: BatchRecord) -> ApiResult<()> {
        let Some(limit) = self.keys.limits(&key.tenant).open_batches else {
            self.records.create_batch(key, record).await?;
            return Ok(());
        };
        let _lock = self.quota_locks.lock(&key.tenant).await;
        let open = self.records.count_open(&key.tenant, limit).await?;
        if open >= limit {
            return Err(ApiError::over_limit(format!(
                "there are {open} unfinished batches, of at most {limit}: try again once one of them has ended"
            )));
        }
        self.records.create_batch(key, record).await?;
        Ok(())
    }

    /// Records that the input of a batch was checked, if its tenant may have that many requests and
    /// tokens. Otherwise returns why the batch fails.
    pub(super) async fn enter_queue(
        &self,
        key: &BatchKey,
        checked: CheckedInput,
    ) -> Result<Result<CheckedInput, Vec<BatchError>>, LedgerError> {
        let limits = self.keys.limits(&key.tenant);
        if !limits.has_queue() {
            return Ok(Ok(self.records.checked(key, checked).await?));
        }
        let _lock = self.quota_locks.lock(&key.tenant).await;
        let others = self.records.queue_without(key).await?;
        if let Some(error) = refusal(&limits, others, Queue::of(&checked)) {
            // Another process may have counted before, and have begun.
            return Ok(match self.records.checked_input(key).await? {
                Some(begun) => Ok(begun),
                None => Err(vec![error]),
            });
        }
        Ok(Ok(self.records.checked(key, checked).await?))
    }
}

/// Why a batch may not join the tenant's others.
fn refusal(limits: &Limits, others: Queue, batch: Queue) -> Option<BatchError> {
    let over = |what: &str, limit: Option<u64>, own: u64, others: u64| {
        let limit = limit.filter(|limit| own.saturating_add(others) > *limit)?;
        let advice = if own > limit {
            "divide it into smaller batches"
        } else {
            "submit it again once they have ended"
        };
        Some(BatchError {
            // OpenAI has no other code for full queues, and clients know this one.
            code: "token_limit_exceeded".into(),
            line: None,
            message: format!(
                "Enqueued {what} limit reached: this batch has {own} {what}s, and unfinished batches have {others}, of at \
                 most {limit} in all; {advice}"
            ),
            param: None,
        })
    };
    let requests = over("request", limits.queued_requests, batch.requests, others.requests);
    requests.or_else(|| over("token", limits.queued_tokens, batch.tokens, others.tokens))
}

impl Records {
    /// The number of a tenant's unfinished batches. It is exact from `limit` on: below, it may count
    /// a batch that has just ended, or that was never created.
    async fn count_open(&self, tenant: &Tenant, limit: u64) -> Result<u64, LedgerError> {
        let marked = self.open_batches_of(tenant).await?;
        if (marked.len() as u64) < limit {
            return Ok(marked.len() as u64);
        }
        let unfinished = futures::stream::iter(marked)
            .map(|key| async move {
                let is_unfinished = self.end_of(&key).await?.is_none() && self.batch(&key).await?.is_some();
                Ok::<_, LedgerError>(is_unfinished)
            })
            .buffer_unordered(READS_AT_ONCE);
        let unfinished: Vec<bool> = unfinished.try_collect().await?;
        Ok(unfinished.into_iter().map(u64::from).sum())
    }

    /// Requests and tokens of a tenant's unfinished batches, without those of `own`.
    async fn queue_without(&self, own: &BatchKey) -> Result<Queue, LedgerError> {
        let others = self.open_batches_of(&own.tenant).await?;
        let others = others.into_iter().filter(|key| key != own);
        let checked = futures::stream::iter(others)
            .map(|key| async move {
                let checked = self.checked_input(&key).await?;
                Ok::<_, LedgerError>(match self.end_of(&key).await? {
                    None => checked,
                    Some(_) => None,
                })
            })
            .buffer_unordered(READS_AT_ONCE);
        let checked: Vec<Option<CheckedInput>> = checked.try_collect().await?;
        let queues = checked.iter().flatten().map(Queue::of);
        Ok(queues.fold(Queue::default(), Queue::add))
    }
}

#[cfg(test)]
mod tests {
    use super::super::id;
    use super::super::keys::Keys;
    use super::super::metrics::ServeMetrics;
    use super::super::record::{EndStatus, EndedBatch, RefusedLines};
    use super::super::records::tests::{batch, root};
    use super::*;
    use object_store::ObjectStoreExt;

    fn checked(requests: u64, tokens: u64) -> CheckedInput {
        CheckedInput {
            at: 1,
            model: "demo".into(),
            requests,
            samples: 1,
            tokens,
            refused: None,
        }
    }

    fn new_key(tenant: &str) -> BatchKey {
        BatchKey::new(&Tenant::new(tenant).unwrap(), id::new_id(id::BATCH).unwrap())
    }

    #[tokio::test]
    async fn unfinished_batches_of_the_tenant_count() {
        let root = root();
        let records = Records::open(root.clone()).await.unwrap();
        let keys = [new_key("a"), new_key("a"), new_key("a"), new_key("b")];
        for key in &keys {
            records.create_batch(key, batch(&key.id)).await.unwrap();
            records.checked(key, checked(10, 100)).await.unwrap();
        }
        let count = async |limit| records.count_open(&keys[0].tenant, limit).await.unwrap();
        assert_eq!(count(3).await, 3);
        let two = Queue {
            requests: 20,
            tokens: 200,
        };
        assert_eq!(records.queue_without(&keys[0]).await.unwrap(), two);
        assert_eq!(records.queue_without(&keys[3]).await.unwrap(), Queue::default());
        // One that has ended counts no more, even while it has its mark.
        let ended = EndedBatch {
            at: 2,
            status: EndStatus::Completed,
            errors: Vec::new(),
        };
        records.ended(&keys[1], ended).await.unwrap();
        assert_eq!(count(3).await, 2);
        assert_eq!(records.queue_without(&keys[0]).await.unwrap().tokens, 100);
        // Nor does the mark of a creator that died.
        records.close_batch(&keys[1]).await.unwrap();
        let lost = new_key("a");
        records.create_batch(&lost, batch(&lost.id)).await.unwrap();
        let record = root.join(&format!("tenants/a/batches/{}.json", lost.id));
        root.store.delete(&record.path).await.unwrap();
        assert_eq!((count(3).await, count(9).await), (2, 3));
    }

    #[tokio::test]
    async fn requests_at_once_stay_within_the_limits() {
        let text = "keys:\n- {tenant: a, sha256: 2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae, max_open_batches: 3, max_queued_requests: 25}\n";
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let keys = Keys::load(file.path()).unwrap();
        let metrics = ServeMetrics::new(None).unwrap();
        let service = Service::open(root(), Vec::new(), keys, Default::default(), metrics);
        let service = service.await.unwrap();
        let new: Vec<BatchKey> = (0..10).map(|_| new_key("a")).collect();
        let opened = futures::future::join_all(new.iter().map(|key| service.open_batch(key, batch(&key.id)))).await;
        assert_eq!(opened.iter().filter(|opened| opened.is_ok()).count(), 3);
        let open = service.records.open_batches().await.unwrap();
        let entered = futures::future::join_all(open.iter().map(|key| service.enter_queue(key, checked(10, 1)))).await;
        let allowed = entered.into_iter().filter(|entered| matches!(entered, Ok(Ok(_))));
        assert_eq!(allowed.count(), 2);
    }

    #[test]
    fn refused_lines_wait_for_no_answer() {
        let refused = Some(RefusedLines { lines: 4, bytes: 9 });
        let batch = CheckedInput {
            refused,
            ..checked(10, 100)
        };
        assert_eq!(Queue::of(&batch).requests, 6);
    }

    #[test]
    fn records_of_older_versions_have_no_tokens() {
        let record = r#"{"v":1,"at":1,"model":"demo","requests":4,"samples":1}"#;
        let older: CheckedInput = serde_json::from_str(record).unwrap();
        assert_eq!((older.requests, older.tokens), (4, 0));
    }

    #[test]
    fn a_batch_over_a_limit_is_refused() {
        let limits = |requests, tokens| Limits {
            open_batches: None,
            queued_requests: requests,
            queued_tokens: tokens,
        };
        let queue = Queue {
            requests: 10,
            tokens: 100,
        };
        let why = |limits: Limits, requests, tokens| {
            let batch = Queue::of(&checked(requests, tokens));
            refusal(&limits, queue, batch).map(|error| error.message)
        };
        assert_eq!(why(limits(Some(15), Some(150)), 5, 50), None);
        assert_eq!(why(limits(None, None), u64::MAX, u64::MAX), None);
        for (limits, requests, tokens, expected) in [
            (
                limits(Some(15), None),
                6,
                1,
                "6 requests, and unfinished batches have 10, of at most 15",
            ),
            (
                limits(None, Some(150)),
                1,
                51,
                "51 tokens, and unfinished batches have 100, of at most 150",
            ),
            (limits(None, Some(150)), 1, 51, "submit it again"),
            (limits(None, Some(150)), 1, 151, "divide it"),
            (limits(None, Some(150)), 1, u64::MAX, "Enqueued token limit reached"),
        ] {
            let message = why(limits, requests, tokens).unwrap_or_default();
            assert!(message.contains(expected), "{message}");
        }
    }
}
