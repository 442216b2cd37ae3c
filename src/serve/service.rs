//! What all requests share: the records, the models, the keys, and the views of batches.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use chrono::Utc;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use super::keys::{Keys, Tenant};
use super::metrics::ServeMetrics;
use super::models::ServedModel;
use super::quota::QuotaLocks;
use super::record::FileRecord;
use super::records::{BatchKey, Records};
use super::view::BatchView;
use super::webhooks::Webhooks;
use crate::dataset::store::location::Location;
use crate::ledger::LedgerError;

/// How long the view of an unfinished batch is reused.
const VIEW_AGE_MAX: Duration = Duration::from_secs(2);
/// Maximum number of concurrent uploads; each takes up to 32 MiB.
const UPLOADS_MAX: usize = 32;
/// Maximum number of views in memory.
const VIEWS_MAX: usize = 10_000;

/// The state that all requests share.
pub struct Service {
    pub(super) records: Records,
    pub(super) models: Vec<ServedModel>,
    pub(super) keys: Keys,
    pub(super) webhooks: Webhooks,
    pub(super) metrics: ServeMetrics,
    /// When the service started, in seconds since 1970.
    pub(super) started_at: i64,
    /// Batches that a client has created or cancelled, which the driver looks at next.
    changed: Mutex<BTreeSet<BatchKey>>,
    /// Notified when a batch is added to `changed`.
    pub(super) has_changed: Notify,
    /// Whether batches can begin.
    is_ready: AtomicBool,
    /// Bounds the memory of concurrent uploads.
    uploads: Arc<Semaphore>,
    pub(super) quota_locks: QuotaLocks,
    views: Mutex<HashMap<BatchKey, CachedView>>,
}

/// A view, and when it was made; `None`: the batch has ended, and the view stays true.
struct CachedView {
    view: BatchView,
    made: Option<Instant>,
}

impl Service {
    /// Opens the store below `root`, and checks that it can keep the guarantee.
    ///
    /// # Errors
    /// The store does not respond, or does not honour put-if-absent.
    pub async fn open(
        root: Location,
        models: Vec<ServedModel>,
        keys: Keys,
        webhooks: Webhooks,
        metrics: ServeMetrics,
    ) -> Result<Service, LedgerError> {
        Ok(Service {
            records: Records::open(root).await?,
            models,
            keys,
            webhooks,
            metrics,
            started_at: now(),
            changed: Mutex::default(),
            has_changed: Notify::new(),
            is_ready: AtomicBool::new(false),
            uploads: Arc::new(Semaphore::new(UPLOADS_MAX)),
            quota_locks: QuotaLocks::default(),
            views: Mutex::default(),
        })
    }

    /// A service without models and keys.
    #[cfg(test)]
    pub(super) async fn for_test(root: Location) -> Service {
        let metrics = ServeMetrics::new(None).unwrap();
        let service = Service::open(root, Vec::new(), Keys::Open, Webhooks::default(), metrics);
        service.await.unwrap()
    }

    /// Lets batches begin: models are hashed, and a queue takes shards.
    pub fn set_ready(&self) {
        self.is_ready.store(true, Ordering::Relaxed);
        self.has_changed.notify_one();
    }

    pub(super) fn is_ready(&self) -> bool {
        self.is_ready.load(Ordering::Relaxed)
    }

    pub(super) fn model(&self, name: &str) -> Option<&ServedModel> {
        self.models.iter().find(|model| model.name == name)
    }

    /// The right to write a file to the store; `None`: too many are being written.
    pub(super) fn upload_slot(&self) -> Option<OwnedSemaphorePermit> {
        self.uploads.clone().try_acquire_owned().ok()
    }

    /// Creates the record of a file whose content is complete.
    pub(super) async fn create_file(&self, tenant: &Tenant, record: FileRecord) -> Result<FileRecord, LedgerError> {
        if let Some(at) = record.expires_at {
            self.records.note_due(tenant, at, &record.id).await?;
        }
        self.records.create_file(tenant, record).await
    }

    /// The batch as the API shows it; `None`: there is no such batch.
    pub(super) async fn view(&self, tenant: &Tenant, id: &str) -> Result<Option<BatchView>, LedgerError> {
        let key = BatchKey::new(tenant, id);
        if let Some(view) = self.cached_view(&key) {
            return Ok(Some(view));
        }
        let Some(record) = self.records.batch(&key).await? else {
            return Ok(None);
        };
        let stages = self.records.stages(&key).await?;
        let has_job = stages.ended.is_none() && stages.checked.is_some();
        let status = match has_job.then(|| self.records.ledger(&key)) {
            Some(ledger) => match ledger.await? {
                Some(ledger) => Some((ledger.created_at().timestamp(), ledger.quick_status().await?)),
                None => None,
            },
            None => None,
        };
        let view = BatchView::new(&record, &stages, status.as_ref());
        let has_ended = view.has_ended();
        self.keep_view(key, &view, has_ended);
        Ok(Some(view))
    }

    fn cached_view(&self, key: &BatchKey) -> Option<BatchView> {
        let views = self.views.lock().unwrap_or_else(PoisonError::into_inner);
        let cached = views.get(key)?;
        let is_fresh = cached.made.is_none_or(|made| made.elapsed() <= VIEW_AGE_MAX);
        is_fresh.then(|| cached.view.clone())
    }

    fn keep_view(&self, key: BatchKey, view: &BatchView, has_ended: bool) {
        let mut views = self.views.lock().unwrap_or_else(PoisonError::into_inner);
        if views.len() >= VIEWS_MAX {
            views.clear();
        }
        let cached = CachedView {
            view: view.clone(),
            made: (!has_ended).then(Instant::now),
        };
        views.insert(key, cached);
    }

    /// Has the driver look at a batch at once.
    pub(super) fn note_change(&self, key: BatchKey) {
        self.forget_view(&key);
        self.changed.lock().unwrap_or_else(PoisonError::into_inner).insert(key);
        self.has_changed.notify_one();
    }

    /// The batches that were noted since the last call.
    pub(super) fn take_changed(&self) -> BTreeSet<BatchKey> {
        std::mem::take(&mut *self.changed.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Forgets the view of a batch that this process has changed.
    pub(super) fn forget_view(&self, key: &BatchKey) {
        let mut views = self.views.lock().unwrap_or_else(PoisonError::into_inner);
        views.remove(key);
    }
}

/// Leaves a damaged record out of a list, so that it does not hide the others.
pub(super) fn without_damaged<T>(found: Result<Option<T>, LedgerError>) -> Result<Option<T>, LedgerError> {
    match found {
        Err(LedgerError::Damaged { message }) => {
            tracing::error!("{message}");
            Ok(None)
        }
        found => found,
    }
}

/// The time in seconds since 1970.
pub(super) fn now() -> i64 {
    Utc::now().timestamp()
}

/// When something expires that lives for `seconds`, if they are given.
pub(super) fn expiry(created_at: i64, seconds: Option<u64>) -> Option<i64> {
    seconds.map(|seconds| created_at.saturating_add_unsigned(seconds))
}
