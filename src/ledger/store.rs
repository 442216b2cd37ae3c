//! The object store under the ledger, with a put-if-absent whose result is reliable.
//!
//! The reply of the store does not settle a create. A timed-out put may have taken effect, and
//! object_store reports our own success after a retried error as "already exists". So every error
//! is settled by reading the key back: if the bytes there are identical to ours, the create
//! succeeded. Otherwise another writer won.
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
use object_store::{GetOptions, ObjectStore, ObjectStoreExt};
use url::Url;

use super::error::{LedgerError, Result};
use super::folder::Folder;
use super::keys::{Id, JOB, TMP};
use super::stage::PROBE;
use super::store_error_kind::{StoreErrorKind, store_error_kind};
use crate::dataset::store::error::cause;
use crate::dataset::store::location::Location;
use crate::signing::Signing;

/// Maximum size of any ledger object. (A part is a single put of at most 256 MB by plan.)
pub const MAX_OBJECT_BYTES: u64 = 4 << 30;
/// Number of concurrent creates of one key by the start-up probe.
const PROBE_WRITERS: usize = 4;
/// Result of [`Store::race`] at a store that honours put-if-absent.
const ONE_WINNER: (u32, bool) = (1, false);

/// Maximum concurrent requests while a job is cleaned.
const DELETES_AT_ONCE: usize = 16;
/// The stores (local: the folders) that this process has checked.
static CHECKED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

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
pub enum Created {
    /// Our bytes, even if another process put identical ones first.
    Ours,
    /// The bytes of another writer.
    Theirs(Bytes),
}

/// Called before each try of a put. An error cancels the put.
pub(super) type Precheck<'a> = &'a (dyn Fn() -> BoxFuture<'a, Result<()>> + Send + Sync);

/// Result of a create.
pub(super) struct CreateResult {
    pub created: Created,
    /// ETag of the object at the key, if known.
    pub etag: Option<String>,
}

/// The key, size, time and ETag of an object in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
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
        Store::through(output, Store::objects(output), retry)
    }

    /// The object store of `output`; for a local folder, one that follows no links.
    pub fn objects(output: &Location) -> Arc<dyn ObjectStore> {
        match output.local_path() {
            Some(root) => Arc::new(Folder::new(root, output.path.clone())),
            None => output.store.clone(),
        }
    }

    /// As [`Store::with_retry`], with requests going to `inner`, a wrapper around
    /// [`Store::objects`].
    pub fn through(output: &Location, inner: Arc<dyn ObjectStore>, retry: Retry) -> Result<Store> {
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
        self.retried(key, "reading", || async {
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
        self.retried(key, "reading", || async {
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
    pub async fn create(&self, key: &str, bytes: Bytes) -> Result<Created> {
        let nothing: Precheck = &|| Box::pin(async { Ok(()) });
        Ok(self.create_after(key, bytes, nothing).await?.created)
    }

    /// As [`Store::create`], with the ETag of the object at `key`. Calls `look` before each try.
    pub(super) async fn create_after(&self, key: &str, bytes: Bytes, look: Precheck<'_>) -> Result<CreateResult> {
        let mut last = None;
        for round in 0..self.shared.retry.tries {
            self.pause(round).await;
            look().await?;
            let error = match self.put_if_absent(key, &bytes).await {
                Ok(etag) => {
                    let created = Created::Ours;
                    return Ok(CreateResult { created, etag });
                }
                Err(error) => error,
            };
            if exists_is_success() && matches!(error, object_store::Error::AlreadyExists { .. }) {
                let (created, etag) = (Created::Ours, None);
                return Ok(CreateResult { created, etag });
            }
            // The read-back alone decides, whatever the error says.
            match self.get_versioned(key, MAX_OBJECT_BYTES).await? {
                Some((found, version)) => {
                    self.sync_folder_of(key).await?;
                    let created = if found == bytes {
                        Created::Ours
                    } else {
                        Created::Theirs(found)
                    };
                    let etag = version.etag;
                    return Ok(CreateResult { created, etag });
                }
                None => match store_error_kind(&error) {
                    StoreErrorKind::Lasting(why) => return Err(self.lasting(key, "writing", why, &error)),
                    StoreErrorKind::Denied(why) => return Err(self.denied(key, "writing", why, &error)),
                    StoreErrorKind::Missing | StoreErrorKind::Transient => last = Some(error),
                },
            }
        }
        Err(self.gave_up(key, "writing", last))
    }

    /// Puts `bytes` at `key` unconditionally. Only for keys with a single writer.
    pub async fn replace(&self, key: &str, bytes: Bytes) -> Result<()> {
        let path = self.path(key);
        self.retried(key, "writing", || async {
            if self.shared.folder.is_none() {
                return self.shared.inner.put(&path, bytes.clone().into()).await.map(|_| ());
            }
            let stage = self.stage();
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

    /// All objects below `prefix`, sorted by key.
    pub async fn list(&self, prefix: &str) -> Result<Vec<Listed>> {
        let path = self.path(prefix);
        let mut found: Vec<Listed> = self
            .retried(prefix, "listing", || async {
                match self.shared.inner.list(Some(&path)).try_collect::<Vec<_>>().await {
                    Ok(all) => Ok(all.into_iter().filter_map(|meta| self.listed(&meta)).collect()),
                    Err(error) if matches!(store_error_kind(&error), StoreErrorKind::Missing) => Ok(Vec::new()),
                    Err(error) => Err(error),
                }
            })
            .await?;
        found.sort_by(|a, b| a.key.cmp(&b.key));
        Ok(found)
    }

    /// Objects and folders directly below `prefix` (`""`: the output), sorted. A local folder that
    /// is listed may be empty.
    pub async fn list_folder(&self, prefix: &str) -> Result<(Vec<Listed>, Vec<String>)> {
        let path = if prefix.is_empty() {
            self.shared.root.clone()
        } else {
            self.path(prefix)
        };
        let (mut objects, mut folders) = self
            .retried(prefix, "listing", || async {
                match self.shared.inner.list_with_delimiter(Some(&path)).await {
                    Ok(found) => {
                        let objects: Vec<_> = found.objects.iter().filter_map(|meta| self.listed(meta)).collect();
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

    /// The first object of the output that readers of the folder see: no component of its key
    /// starts with `_` or `.`.
    pub async fn first_visible(&self) -> Result<Option<String>> {
        let hidden = |name: &str| name.starts_with('_') || name.starts_with('.');
        let (objects, folders) = self.list_folder("").await?;
        if let Some(found) = objects.into_iter().find(|found| !hidden(&found.key)) {
            return Ok(Some(found.key));
        }
        for folder in folders.iter().filter(|folder| !hidden(folder)) {
            let inside = self.list(folder).await?;
            if let Some(found) = inside.into_iter().find(|found| !found.key.split('/').any(hidden)) {
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
        self.clean_stages().await?;
        if self.unconditional() || exists_is_success() {
            // Control experiments must pass this check, which would detect them first.
            return Ok(());
        }
        let passed = || CHECKED.lock().unwrap_or_else(PoisonError::into_inner);
        // Two stores in memory can have one address.
        let lasting = self.shared.url.scheme() != "memory";
        // All folders of a bucket are in one store, but local folders may be on different file
        // systems.
        let store = match &self.shared.folder {
            Some(_) => self.shared.url.to_string(),
            None => format!("{}://{}", self.shared.url.scheme(), self.shared.url.authority()),
        };
        if lasting && passed().contains(&store) {
            return Ok(());
        }
        self.probe().await?;
        if lasting {
            passed().insert(store);
        }
        Ok(())
    }

    async fn probe(&self) -> Result<()> {
        // One name per process: without the permission to delete, only one key remains.
        let key = format!("{TMP}/{PROBE}{}", self.shared.writer);
        if self.shared.folder.is_some() {
            self.check_hard_links(&key).await?;
        }
        if self.race(&key).await? == ONE_WINNER {
            return Ok(());
        }
        // An earlier check that failed may have left the key, and its late delete may have taken
        // effect only now. So a second race, on an unused key, decides.
        match self.race(&format!("{key}-again")).await? {
            ONE_WINNER => Ok(()),
            (winners, late_won) => Err(LedgerError::stop(format!(
                "the store of `{}` does not honour put-if-absent ({winners} of {PROBE_WRITERS} writers of one key won, \
                 a late one {}): rows could be published twice, so choose another store",
                self.shared.url,
                if late_won { "too" } else { "did not" }
            ))),
        }
    }

    /// Lets several writers create one key concurrently, then one more, and removes the key.
    /// Returns the number of concurrent winners, and whether the late writer won.
    async fn race(&self, key: &str) -> Result<(u32, bool)> {
        let writers =
            (0..PROBE_WRITERS).map(|n| async move { self.create(key, Bytes::from(format!("writer {n}"))).await });
        let mut winners = 0;
        for outcome in join_all(writers).await {
            winners += u32::from(outcome? == Created::Ours);
        }
        let late_won = self.create(key, Bytes::from_static(b"late")).await? == Created::Ours;
        self.forget(key).await?;
        Ok((winners, late_won))
    }

    async fn check_hard_links(&self, probe: &str) -> Result<()> {
        let (stage, link) = (self.stage(), self.path(&format!("{probe}.link")));
        self.retried(TMP, "writing", || async {
            self.shared.inner.put(&stage, Bytes::new().into()).await.map(|_| ())
        })
        .await?;
        let linked = self.shared.inner.copy_if_not_exists(&stage, &link).await;
        self.shared
            .inner
            .delete(&stage)
            .await
            .map_err(|e| self.gave_up(TMP, "cleaning", Some(e)))?;
        match linked {
            Ok(()) => self
                .shared
                .inner
                .delete(&link)
                .await
                .map_err(|e| self.gave_up(TMP, "cleaning", Some(e))),
            Err(error) => Err(LedgerError::stop(format!(
                "the file system of `{}` cannot make hard links, which publishing without overwriting needs ({}): \
                 choose a folder on another file system, or an object store",
                self.address(""),
                cause(&error)
            ))),
        }
    }

    /// Removes `key` if permitted: only `clean` requires the permission to delete.
    async fn forget(&self, key: &str) -> Result<()> {
        match self.delete(key).await {
            Err(LedgerError::Denied { .. }) => Ok(()),
            other => other,
        }
    }

    async fn delete(&self, key: &str) -> Result<()> {
        let path = self.path(key);
        self.retried(key, "removing", || async {
            match self.shared.inner.delete(&path).await {
                Err(error) if matches!(store_error_kind(&error), StoreErrorKind::Missing) => Ok(()),
                other => other,
            }
        })
        .await
    }

    /// A number that is unique among the stages of this store.
    pub(super) fn next_stage(&self) -> u64 {
        self.shared.stages.fetch_add(1, Ordering::Relaxed)
    }

    fn listed(&self, meta: &object_store::ObjectMeta) -> Option<Listed> {
        let parts = meta.location.prefix_match(&self.shared.root)?;
        let names: Vec<String> = parts.map(|part| part.as_ref().to_string()).collect();
        // An object without a name is the output itself: S3 consoles create such empty objects for
        // folders.
        (!names.is_empty()).then(|| Listed {
            key: names.join("/"),
            size: meta.size,
            modified: meta.last_modified,
            etag: meta.e_tag.clone(),
        })
    }

    /// Runs `request` until it succeeds, fails with a lasting error, or has used up its tries.
    async fn retried<T, Request>(&self, key: &str, doing: &str, request: impl Fn() -> Request) -> Result<T>
    where
        Request: Future<Output = Result<T, object_store::Error>> + Send,
    {
        let mut last = None;
        for round in 0..self.shared.retry.tries {
            self.pause(round).await;
            match request().await {
                Ok(done) => return Ok(done),
                Err(error) => match store_error_kind(&error) {
                    StoreErrorKind::Lasting(why) => return Err(self.lasting(key, doing, why, &error)),
                    StoreErrorKind::Denied(why) => return Err(self.denied(key, doing, why, &error)),
                    StoreErrorKind::Missing | StoreErrorKind::Transient => last = Some(error),
                },
            }
        }
        Err(self.gave_up(key, doing, last))
    }

    pub(super) async fn pause(&self, round: u32) {
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

    pub(super) fn lasting(&self, key: &str, doing: &str, why: &str, error: &object_store::Error) -> LedgerError {
        LedgerError::stop(format!("{doing} `{}`: {why} ({})", self.address(key), cause(error)))
    }

    pub(super) fn denied(&self, key: &str, doing: &str, why: &str, error: &object_store::Error) -> LedgerError {
        let whose = if self.shared.folder.is_some() && key == JOB {
            "; a local `job.json` is its owner's alone, who may give it to others with `chmod`"
        } else {
            ""
        };
        LedgerError::denied(format!(
            "{doing} `{}`: {why} ({}){whose}",
            self.address(key),
            cause(error)
        ))
    }

    pub(super) fn gave_up(&self, key: &str, doing: &str, last: Option<object_store::Error>) -> LedgerError {
        let what = format!("{doing} `{}`", self.address(key));
        match last {
            Some(source) => LedgerError::Retryable {
                what,
                tries: self.shared.retry.tries,
                source,
            },
            None => LedgerError::stop(format!("{what}: no try is allowed")),
        }
    }
}

/// A control experiment of the fault build: treats "already exists" as success.
#[cfg(feature = "faults")]
fn exists_is_success() -> bool {
    crate::faults::switch("exists-is-success")
}

#[cfg(not(feature = "faults"))]
fn exists_is_success() -> bool {
    false
}
