//! Replaces an object if it is still the version that was read. Used for the parts and `_SUCCESS`
//! of a retry.
//!
//! See docs/decisions/001-records-are-created-never-changed.md.

use bytes::Bytes;
use object_store::{ObjectStoreExt, PutMode, PutOptions, UpdateVersion};

use super::error::{LedgerError, Result};
use super::keys::TMP;
use super::store::{CreateOutcome, MAX_OBJECT_BYTES, ObjectVersion, Precheck, Store};
use super::store_error_kind::{StoreErrorKind, store_error_kind};

/// The file below `tmp/` that is locked around check and rename in a local folder. It is never
/// removed: a lock on an unlinked file would exclude nobody.
const LOCK_NAME: &str = "lock";

impl Store {
    /// Puts `bytes` at `key` if the object there still has the version `expected`, and returns
    /// whose bytes are at `key` now. Calls `precheck` before each try.
    ///
    /// As with creates, no error reply is trusted: after an error, the key is read back. `Theirs`
    /// may hold the very object that `expected` describes, if the store reports another version for
    /// it by now: the caller must inspect the object and decide anew. Two writers must never put
    /// equal bytes with different meanings under one key. After an `Err` the outcome is unknown.
    pub(super) async fn conditional_put(
        &self,
        key: &str,
        expected: &ObjectVersion,
        bytes: Bytes,
        precheck: Precheck<'_>,
    ) -> Result<CreateOutcome> {
        let mut last_error = None;
        for round in 0..self.shared.retry.tries {
            self.wait_before_try(round).await;
            precheck().await?;
            let error = match self.put_if_version(key, expected, &bytes).await {
                Ok(()) => return Ok(CreateOutcome::Ours),
                Err(error) => error,
            };
            let Some((found, version)) = self.get_versioned(key, MAX_OBJECT_BYTES).await? else {
                return Err(LedgerError::damaged(format!(
                    "`{}` was removed while in use",
                    self.address(key)
                )));
            };
            self.sync_folder_of(key).await?;
            if found == bytes {
                return Ok(CreateOutcome::Ours);
            }
            if version != *expected {
                return Ok(CreateOutcome::Theirs(found));
            }
            match store_error_kind(&error) {
                StoreErrorKind::Permanent(why) => return Err(self.permanent_error(key, "replacing", why, &error)),
                StoreErrorKind::Denied(why) => return Err(self.denied_error(key, "replacing", why, &error)),
                StoreErrorKind::Missing | StoreErrorKind::Transient => last_error = Some(error),
            }
        }
        Err(self.retries_exhausted(key, "replacing", last_error))
    }

    async fn put_if_version(
        &self,
        key: &str,
        expected: &ObjectVersion,
        bytes: &Bytes,
    ) -> Result<(), object_store::Error> {
        if self.shared.folder.is_some() {
            return self.rename_if_version(key, expected, bytes).await;
        }
        let mode = if self.is_unconditional() {
            PutMode::Overwrite
        } else {
            PutMode::Update(UpdateVersion {
                e_tag: expected.etag.clone(),
                version: expected.version.clone(),
            })
        };
        let options = PutOptions {
            mode,
            ..PutOptions::default()
        };
        let path = self.path(key);
        self.shared
            .inner
            .put_opts(&path, bytes.clone().into(), options)
            .await
            .map(|_| ())
    }

    /// Local folders have no conditional update, so check and rename happen under a lock that all
    /// processes share.
    async fn rename_if_version(
        &self,
        key: &str,
        expected: &ObjectVersion,
        bytes: &Bytes,
    ) -> Result<(), object_store::Error> {
        let (path, stage) = (self.path(key), self.new_stage());
        self.shared.inner.put(&stage, bytes.clone().into()).await?;
        let renamed = async {
            let _lock = self.lock_folder().await?;
            let found = ObjectVersion::of(&self.shared.inner.head(&path).await?);
            if found != *expected {
                return Err(object_store::Error::Precondition {
                    path: path.to_string(),
                    source: "another writer has changed the object".into(),
                });
            }
            self.shared.inner.rename(&stage, &path).await
        };
        let renamed = renamed.await;
        if renamed.is_err()
            && let Err(error) = self.shared.inner.delete(&stage).await
        {
            tracing::warn!("the temporary file `{stage}` could not be removed; a later run removes it: {error}");
        }
        renamed
    }

    /// Locks the folder's lock file until the returned file is dropped. Fails if another process
    /// holds the lock during all tries.
    async fn lock_folder(&self) -> Result<std::fs::File, object_store::Error> {
        let generic = |source: std::io::Error| object_store::Error::Generic {
            store: "LocalFileSystem",
            source: Box::new(source),
        };
        let Some(folder) = &self.shared.folder else {
            return Err(generic(std::io::Error::other("only a local folder has a lock")));
        };
        let file = folder.lock_file(&self.path(&format!("{TMP}/{LOCK_NAME}"))).await?;
        for _ in 0..LOCK_TRIES {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(std::fs::TryLockError::WouldBlock) => tokio::time::sleep(LOCK_PAUSE).await,
                Err(std::fs::TryLockError::Error(error)) => return Err(generic(error)),
            }
        }
        Err(generic(std::io::Error::other(
            "another process has held the lock for 2 s",
        )))
    }

    /// A control experiment of the fault build: puts without their precondition.
    #[cfg(feature = "faults")]
    pub(super) fn is_unconditional(&self) -> bool {
        crate::faults::is_switched_on("put-unconditional")
    }

    #[cfg(not(feature = "faults"))]
    pub(super) fn is_unconditional(&self) -> bool {
        false
    }
}

/// Number of tries to take the lock, and the pause between two tries: 2 s in all.
const LOCK_TRIES: u32 = 40;
const LOCK_PAUSE: std::time::Duration = std::time::Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use std::path::Path as FsPath;
    use std::sync::Arc;

    use object_store::memory::InMemory;

    use super::*;
    use crate::dataset::store::location::Location;

    /// A writer whose version is out of date leaves the object unchanged.
    #[tokio::test]
    async fn a_put_with_an_outdated_version_replaces_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let local = Location::parse(folder.path().to_str().unwrap(), FsPath::new("/")).unwrap();
        let memory = Location {
            store: Arc::new(InMemory::new()),
            url: "memory:///exchange".parse().unwrap(),
            ..local.clone()
        };
        for location in [local, memory] {
            let store = Store::new(&location).unwrap();
            let precheck: Precheck = &|| Box::pin(async { Ok(()) });
            store.create("part", Bytes::from("first")).await.unwrap();
            let (_, read) = store.get_versioned("part", MAX_OBJECT_BYTES).await.unwrap().unwrap();
            let put = async |bytes: &'static str| {
                store
                    .conditional_put("part", &read, bytes.into(), precheck)
                    .await
                    .unwrap()
            };
            assert_eq!(put("second, longer").await, CreateOutcome::Ours, "{}", location.url);
            assert_eq!(
                put("third").await,
                CreateOutcome::Theirs("second, longer".into()),
                "{}",
                location.url
            );
            let (found, _) = store.get_versioned("part", MAX_OBJECT_BYTES).await.unwrap().unwrap();
            assert_eq!(found, "second, longer", "{}", location.url);
        }
    }
}
