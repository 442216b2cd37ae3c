//! The object store under the ledger, with a put-if-absent whose result is reliable.
//!
//! An error reply does not tell the outcome of a create: a timed-out put may have taken effect, and
//! object_store reports our own success after a retried error as "already exists". So the key is
//! read back after every error: if the bytes there are identical to ours, the create succeeded.
//! Otherwise another writer won.
//!
//! Local folders (`folder.rs`): a put is staged under `_gristmill/tmp/`, where readers do not see
//! the remains of a killed process, and a hard link publishes it (`stage.rs`).

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use futures::future::{BoxFuture, join_all};
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{Error as StoreError, GetOptions, ObjectStore, ObjectStoreExt};
use url::Url;

use super::error::{LedgerError, Result};
use super::folder::Folder;
use super::keys::{Id, JOB, TMP};
use super::stage::PROBE_PREFIX;
use super::store_error_kind::{StoreErrorKind, store_error_kind};
use crate::dataset::store::error::cause;
use crate::dataset::store::location::Location;
use crate::signing::Signing;

/// Maximum size of any object of the output. (Parts are planned to have at most 256 MiB.)
pub const MAX_OBJECT_BYTES: u64 = 4 << 30;
/// Number of writers that create one key concurrently in the start-up probe.
const PROBE_WRITERS: usize = 4;
/// Result of [`Store::race_creates`] at a store that honours put-if-absent.
const ONE_WINNER: (u32, bool) = (1, false);

/// Maximum concurrent requests while a job is cleaned.
const DELETES_AT_ONCE: usize = 16;
/// The stores (local: the folders) that this process has checked.
static CHECKED_STORES: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Number of tries of a request, and the delays between them.
#[derive(Debug, Clone, Copy)]
pub struct Retry {
    pub tries: u32,
    /// Delay before the second try. It doubles with each further try.
    pub first_delay: Duration,
    pub max_delay: Duration,
}

impl Default for Retry {
    /// About 13 s in all. For remote stores, object_store also retries each request below this
    /// level.
    fn default() -> Retry {
        Retry {
            tries: 7,
            first_delay: Duration::from_millis(200),
            max_delay: Duration::from_secs(5),
        }
    }
}

/// Whose bytes are at a key after a create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CreateOutcome {
    /// Our bytes, even if another process put identical ones first.
    Ours,
    /// The bytes of another writer.
    Theirs(Bytes),
}

/// Called before each try of a put. An error cancels the put.
pub(super) type Precheck<'a> = &'a (dyn Fn() -> BoxFuture<'a, Result<()>> + Send + Sync);

/// Result of a create.
pub(super) struct CreateResult {
    pub outcome: CreateOutcome,
    /// ETag of the object at the key, if known.
    pub etag: Option<String>,
}

/// The key, size, time and ETag of an object in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedObject {
    /// Key below the output, without a leading slash.
    pub key: String,
    pub size: u64,
    /// Time of the last write, by the store's clock.
    pub modified: DateTime<Utc>,
    /// ETag, if the store lists it.
    pub etag: Option<String>,
}

/// Distinguishes two objects under the same key, and gives the write time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectVersion {
    pub size: u64,
    /// Time of the last write, by the store's clock.
    pub modified: DateTime<Utc>,
    /// ETag, if the store has one.
    pub etag: Option<String>,
    /// Version, if the store keeps versions.
    pub version: Option<String>,
}

impl ObjectVersion {
    pub(super) fn of(meta: &object_store::ObjectMeta) -> ObjectVersion {
        ObjectVersion {
            size: meta.size,
            modified: meta.last_modified,
            etag: meta.e_tag.clone(),
            version: meta.version.clone(),
        }
    }
}

/// The output folder as the ledger sees it. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Store {
    pub(super) shared: Arc<Shared>,
    /// See `signed.rs`.
    pub(super) signing: Signing,
}

pub(super) struct Shared {
    pub(super) inner: Arc<dyn ObjectStore>,
    root: Path,
    url: Url,
    /// The folder, if the store is the local file system.
    pub(super) folder: Option<Folder>,
    /// Prefix of the names of this process's stages.
    pub(super) writer: Id,
    stages: AtomicU64,
    pub(super) retry: Retry,
}

impl std::fmt::Debug for Shared {
    /// Prints only the address: the client inside may hold credentials.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Store").field(&self.url.as_str()).finish()
    }
}

impl Store {
    /// The store at `output`. Sends no request.
    pub fn new(output: &Location) -> Result<Store> {
        Store::with_retry(output, Retry::default())
    }

    /// As [`Store::new`], with another retry policy.
    pub fn with_retry(output: &Location, retry: Retry) -> Result<Store> {
        Store::with_inner(output, Store::object_store(output), retry)
    }

    /// The object store of `output`; for a local folder, one that follows no links.
    pub fn object_store(output: &Location) -> Arc<dyn ObjectStore> {
        match output.local_path() {
            Some(root) => Arc::new(Folder::new(root, output.path.clone())),
            None => output.store.clone(),
        }
    }

    /// As [`Store::with_retry`], but sends its requests to `inner`, a wrapper around
    /// [`Store::object_store`].
    pub fn with_inner(output: &Location, inner: Arc<dyn ObjectStore>, retry: Retry) -> Result<Store> {
        let folder = output.local_path();
        let shared = Shared {
            inner,
            root: output.path.clone(),
            url: output.url.clone(),
            folder: folder.map(|root| Folder::new(root, output.path.clone())),
            writer: Id::random()?,
            stages: AtomicU64::new(0),
            retry,
        };
        Ok(Store {
            shared: Arc::new(shared),
            signing: Signing::of_process().map_err(LedgerError::stop)?,
        })
    }

    /// The output's address, for messages.
    pub fn url(&self) -> &Url {
        &self.shared.url
    }

    pub(super) fn path(&self, key: &str) -> Path {
        key.split('/')
            .fold(self.shared.root.clone(), |path, part| path.join(part))
    }

    /// The address of `key` for messages: a path, or a URL.
    pub fn address(&self, key: &str) -> String {
        match &self.shared.folder {
            Some(folder) => folder.root().join(key).display().to_string(),
            None => format!("{}/{key}", self.shared.url.as_str().trim_end_matches('/')),
        }
    }

    /// Reads `key`. `None`: there is no object. An object of more than `max_bytes` is refused
    /// unread.
    pub async fn get(&self, key: &str, max_bytes: u64) -> Result<Option<Bytes>> {
        Ok(self.get_versioned(key, max_bytes).await?.map(|(bytes, _)| bytes))
    }

    /// As [`Store::get`], with the object's version.
    pub async fn get_versioned(&self, key: &str, max_bytes: u64) -> Result<Option<(Bytes, ObjectVersion)>> {
        let path = self.path(key);
        self.with_retries(key, "reading", || async {
            let found = match self.shared.inner.get_opts(&path, GetOptions::default()).await {
                Ok(found) => found,
                Err(error) if matches!(store_error_kind(&error), StoreErrorKind::Missing) => return Ok(Ok(None)),
                Err(error) => return Err(error),
            };
            let (size, version) = (found.meta.size, ObjectVersion::of(&found.meta));
            if size > max_bytes {
                return Ok(Err(LedgerError::damaged(format!(
                    "`{}` has {size} bytes, more than the {max_bytes} that such an object can have: it was not \
                     written by gristmill",
                    self.address(key)
                ))));
            }
            Ok(Ok(Some((found.bytes().await?, version))))
        })
        .await?
    }

    /// The version of the object at `key`, without reading it. `None`: there is no object.
    pub async fn object_version(&self, key: &str) -> Result<Option<ObjectVersion>> {
        let path = self.path(key);
        self.with_retries(key, "reading", || async {
            match self.shared.inner.head(&path).await {
                Ok(meta) => Ok(Some(ObjectVersion::of(&meta))),
                Err(error) if matches!(store_error_kind(&error), StoreErrorKind::Missing) => Ok(None),
                Err(error) => Err(error),
            }
        })
        .await
    }

    /// Puts `bytes` at `key` if there is no object yet, and returns whose bytes are at `key` now.
    ///
    /// After an error the outcome is unknown: the bytes may still appear. Call again with the same
    /// bytes.
    pub async fn create(&self, key: &str, bytes: Bytes) -> Result<CreateOutcome> {
        let nothing: Precheck = &|| Box::pin(async { Ok(()) });
        Ok(self.create_checked(key, bytes, nothing).await?.outcome)
    }

    /// As [`Store::create`], with the ETag of the object at `key`. Calls `precheck` before each
    /// try.
    pub(super) async fn create_checked(&self, key: &str, bytes: Bytes, precheck: Precheck<'_>) -> Result<CreateResult> {
        let mut last_error = None;
        for round in 0..self.shared.retry.tries {
            self.wait_before_try(round).await;
            precheck().await?;
            let error = match self.put_if_absent(key, &bytes).await {
                Ok(etag) => {
                    let outcome = CreateOutcome::Ours;
                    return Ok(CreateResult { outcome, etag });
                }
                Err(error) => error,
            };
            if exists_is_success() && matches!(error, StoreError::AlreadyExists { .. }) {
                let (outcome, etag) = (CreateOutcome::Ours, None);
                return Ok(CreateResult { outcome, etag });
            }
            // Whatever the error says, only the object that is read back decides.
            match self.get_versioned(key, MAX_OBJECT_BYTES).await? {
                Some((found, version)) => {
                    self.sync_folder_of(key).await?;
                    let outcome = if found == bytes {
                        CreateOutcome::Ours
                    } else {
                        CreateOutcome::Theirs(found)
                    };
                    let etag = version.etag;
                    return Ok(CreateResult { outcome, etag });
                }
                None => match store_error_kind(&error) {
                    StoreErrorKind::Permanent(why) => return Err(self.permanent_error(key, "writing", why, &error)),
                    StoreErrorKind::Denied(why) => return Err(self.denied_error(key, "writing", why, &error)),
                    StoreErrorKind::Missing | StoreErrorKind::Transient => last_error = Some(error),
                },
            }
        }
        Err(self.retries_exhausted(key, "writing", last_error))
    }

    /// Puts `bytes` at `key` unconditionally. Only for keys with a single writer.
    pub async fn replace(&self, key: &str, bytes: Bytes) -> Result<()> {
        let path = self.path(key);
        self.with_retries(key, "writing", || async {
            if self.shared.folder.is_none() {
                return self.shared.inner.put(&path, bytes.clone().into()).await.map(|_| ());
            }
            let stage = self.new_stage();
            self.shared.inner.put(&stage, bytes.clone().into()).await?;
            let renamed = self.shared.inner.rename(&stage, &path).await;
            if renamed.is_err() {
                // If this fails, the stage is removed later with other old stages.
                let _ = self.shared.inner.delete(&stage).await;
            }
            renamed
        })
        .await
    }

    /// Removes `keys`. Missing keys are no error.
    pub(super) async fn delete_all(&self, keys: impl Iterator<Item = String>) -> Result<()> {
        futures::stream::iter(keys)
            .map(|key| {
                let store = self.clone();
                async move { store.delete(&key).await }
            })
            .buffer_unordered(DELETES_AT_ONCE)
            .try_collect()
            .await
    }

    /// Objects and folders directly below `prefix` (`""`: the output), sorted. Listed local folders
    /// may be empty.
    pub async fn list_folder(&self, prefix: &str) -> Result<(Vec<ListedObject>, Vec<String>)> {
        let path = if prefix.is_empty() {
            self.shared.root.clone()
        } else {
            self.path(prefix)
        };
        let (mut objects, mut folders) = self
            .with_retries(prefix, "listing", || async {
                match self.shared.inner.list_with_delimiter(Some(&path)).await {
                    Ok(found) => {
                        let objects: Vec<_> = found
                            .objects
                            .iter()
                            .filter_map(|meta| self.listed_object(meta))
                            .collect();
                        let names = |path: &Path| path.filename().map(str::to_string);
                        Ok((
                            objects,
                            found.common_prefixes.iter().filter_map(names).collect::<Vec<_>>(),
                        ))
                    }
                    Err(error) if matches!(store_error_kind(&error), StoreErrorKind::Missing) => Ok(Default::default()),
                    Err(error) => Err(error),
                }
            })
            .await?;
        objects.sort_by(|a, b| a.key.cmp(&b.key));
        folders.sort();
        Ok((objects, folders))
    }

    /// The first object that readers of the output folder see. Readers skip keys with a component
    /// that starts with `_` or `.`.
    pub async fn first_visible(&self) -> Result<Option<String>> {
        let is_hidden = |name: &str| name.starts_with('_') || name.starts_with('.');
        let (objects, folders) = self.list_folder("").await?;
        if let Some(found) = objects.into_iter().find(|found| !is_hidden(&found.key)) {
            return Ok(Some(found.key));
        }
        for folder in folders.iter().filter(|folder| !is_hidden(folder)) {
            let inside = self.list(folder).await?;
            if let Some(found) = inside.into_iter().find(|found| !found.key.split('/').any(is_hidden)) {
                return Ok(Some(found.key));
            }
        }
        Ok(None)
    }

    /// Checks, before the job writes, that the store can keep the guarantee: it is writable,
    /// several creates of one key have exactly one winner, and a local file system has hard links.
    /// Also removes stages that dead runs left.
    ///
    /// After the probe has passed, later calls in this process skip it for the same store.
    pub async fn check(&self) -> Result<()> {
        self.remove_old_stages().await?;
        if self.is_unconditional() || exists_is_success() {
            // The probe would detect the control experiments of the fault build.
            return Ok(());
        }
        let checked = || CHECKED_STORES.lock().unwrap_or_else(PoisonError::into_inner);
        // Two stores in memory may have the same address.
        let has_unique_address = self.shared.url.scheme() != "memory";
        // All folders of a bucket are in one store, but local folders may be on different file
        // systems.
        let store = match &self.shared.folder {
            Some(_) => self.shared.url.to_string(),
            None => format!("{}://{}", self.shared.url.scheme(), self.shared.url.authority()),
        };
        if has_unique_address && checked().contains(&store) {
            return Ok(());
        }
        self.probe().await?;
        if has_unique_address {
            checked().insert(store);
        }
        Ok(())
    }

    async fn probe(&self) -> Result<()> {
        // One name per process: without the permission to delete, only one key remains.
        let key = format!("{TMP}/{PROBE_PREFIX}{}", self.shared.writer);
        if self.shared.folder.is_some() {
            self.check_hard_links(&key).await?;
        }
        if self.race_creates(&key).await? == ONE_WINNER {
            return Ok(());
        }
        // An earlier probe that failed may have left the key, and its late delete may have taken
        // effect only now. So a second race, on an unused key, decides.
        match self.race_creates(&format!("{key}-again")).await? {
            ONE_WINNER => Ok(()),
            (winners, late_won) => Err(LedgerError::stop(format!(
                "the store of `{}` does not honour put-if-absent ({winners} of {PROBE_WRITERS} writers of one key won, \
                 a late one {}): rows could be published twice, so choose another store",
                self.shared.url,
                if late_won { "too" } else { "did not" }
            ))),
        }
    }

    /// Lets several writers create one key concurrently, then one late writer, and removes the key.
    /// Returns the number of concurrent writers that won, and whether the late writer won.
    async fn race_creates(&self, key: &str) -> Result<(u32, bool)> {
        let writers =
            (0..PROBE_WRITERS).map(|n| async move { self.create(key, Bytes::from(format!("writer {n}"))).await });
        let mut winners = 0;
        for outcome in join_all(writers).await {
            winners += u32::from(outcome? == CreateOutcome::Ours);
        }
        let late_won = self.create(key, Bytes::from_static(b"late")).await? == CreateOutcome::Ours;
        self.delete_if_permitted(key).await?;
        Ok((winners, late_won))
    }

    async fn check_hard_links(&self, probe: &str) -> Result<()> {
        let (stage, link) = (self.new_stage(), self.path(&format!("{probe}.link")));
        self.with_retries(TMP, "writing", || async {
            self.shared.inner.put(&stage, Bytes::new().into()).await.map(|_| ())
        })
        .await?;
        let linked = self.shared.inner.copy_if_not_exists(&stage, &link).await;
        self.shared
            .inner
            .delete(&stage)
            .await
            .map_err(|e| self.retries_exhausted(TMP, "cleaning", Some(e)))?;
        match linked {
            Ok(()) => self
                .shared
                .inner
                .delete(&link)
                .await
                .map_err(|e| self.retries_exhausted(TMP, "cleaning", Some(e))),
            Err(error) => Err(LedgerError::stop(format!(
                "the file system of `{}` cannot make hard links, which publishing without overwriting needs ({}): \
                 choose a folder on another file system, or an object store",
                self.address(""),
                cause(&error)
            ))),
        }
    }

    /// Removes `key` if that is permitted: only `clean` requires the permission to delete.
    async fn delete_if_permitted(&self, key: &str) -> Result<()> {
        match self.delete(key).await {
            Err(LedgerError::Denied { .. }) => Ok(()),
            other => other,
        }
    }

    pub async fn delete(&self, key: &str) -> Result<()> {
        let path = self.path(key);
        self.with_retries(key, "removing", || async {
            match self.shared.inner.delete(&path).await {
                Err(error) if matches!(store_error_kind(&error), StoreErrorKind::Missing) => Ok(()),
                other => other,
            }
        })
        .await
    }

    /// A number that is unique among the stages of this store.
    pub(super) fn next_stage_number(&self) -> u64 {
        self.shared.stages.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn listed_object(&self, meta: &object_store::ObjectMeta) -> Option<ListedObject> {
        let parts = meta.location.prefix_match(&self.shared.root)?;
        let names: Vec<String> = parts.map(|part| part.as_ref().to_string()).collect();
        // An object without a name is the output itself: S3 consoles create such empty objects for
        // folders.
        (!names.is_empty()).then(|| ListedObject {
            key: names.join("/"),
            size: meta.size,
            modified: meta.last_modified,
            etag: meta.e_tag.clone(),
        })
    }

    /// Runs `request` until it succeeds, fails with a permanent error, or has used up its tries.
    pub(super) async fn with_retries<T, Request>(
        &self,
        key: &str,
        operation: &str,
        request: impl Fn() -> Request,
    ) -> Result<T>
    where
        Request: Future<Output = Result<T, StoreError>> + Send,
    {
        let mut last_error = None;
        for round in 0..self.shared.retry.tries {
            self.wait_before_try(round).await;
            match request().await {
                Ok(done) => return Ok(done),
                Err(error) => match store_error_kind(&error) {
                    StoreErrorKind::Permanent(why) => return Err(self.permanent_error(key, operation, why, &error)),
                    StoreErrorKind::Denied(why) => return Err(self.denied_error(key, operation, why, &error)),
                    StoreErrorKind::Missing | StoreErrorKind::Transient => last_error = Some(error),
                },
            }
        }
        Err(self.retries_exhausted(key, operation, last_error))
    }

    pub(super) async fn wait_before_try(&self, round: u32) {
        let Retry {
            first_delay, max_delay, ..
        } = self.shared.retry;
        let delay = first_delay
            .saturating_mul(1 << round.saturating_sub(1).min(16))
            .min(max_delay);
        // Use a random delay from half of `delay` to all of it, so that workers which failed
        // together retry at different times.
        let mut random = [0u8; 1];
        let share = getrandom::fill(&mut random).map_or(0.0, |()| f64::from(random[0]) / 256.0);
        let delay = delay.mul_f64(0.5 + share / 2.0);
        if round > 0 && !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
    }

    pub(super) fn permanent_error(&self, key: &str, operation: &str, why: &str, error: &StoreError) -> LedgerError {
        LedgerError::stop(format!("{operation} `{}`: {why} ({})", self.address(key), cause(error)))
    }

    pub(super) fn denied_error(&self, key: &str, operation: &str, why: &str, error: &StoreError) -> LedgerError {
        let hint = if self.shared.folder.is_some() && key == JOB {
            "; only its owner may read a local `job.json`, and may let others read it with `chmod`"
        } else {
            ""
        };
        LedgerError::denied(format!(
            "{operation} `{}`: {why} ({}){hint}",
            self.address(key),
            cause(error)
        ))
    }

    pub(super) fn retries_exhausted(&self, key: &str, operation: &str, last_error: Option<StoreError>) -> LedgerError {
        let operation = format!("{operation} `{}`", self.address(key));
        match last_error {
            Some(source) => LedgerError::Retryable {
                operation,
                tries: self.shared.retry.tries,
                source,
            },
            None => LedgerError::stop(format!("{operation}: no try is allowed")),
        }
    }
}

/// Whether "already exists" counts as success: a control experiment of the fault build.
#[cfg(feature = "faults")]
fn exists_is_success() -> bool {
    crate::faults::is_switched_on("exists-is-success")
}

#[cfg(not(feature = "faults"))]
fn exists_is_success() -> bool {
    false
}
