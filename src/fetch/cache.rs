//! Folders of fetched models, and locks between processes.
//!
//! Models of the hub lie where Hugging Face's own programs keep them, so that both use the same
//! files: `models--ORG--NAME/` in the hub's cache, with `refs/REVISION` (the commit), `blobs/HASH`
//! (contents) and `snapshots/COMMIT/FILE` (links to the contents). The locks are theirs, too:
//! `.locks/models--ORG--NAME/HASH.lock`, held by `flock`. Our own mark beside them,
//! `.gristmill/v1/COMMIT`, lists the files of a snapshot that is whole. A program that needs further files
//! uses another folder than `v1`.

use std::ffi::OsString;
use std::fs::{File, Metadata, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest, Sha256};

/// Pause between two tries for a lock that another process holds.
const LOCK_PAUSE: Duration = Duration::from_millis(200);
/// The mode of a lock's file, with which the users of a shared cache wait for each other.
const LOCK_MODE: u32 = 0o664;

/// An environment variable that is set and not empty.
pub(super) fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// The path that an environment variable names. `~` is the user's folder, as for Hugging Face's own
/// programs: in a file of variables, no shell replaces it.
pub(super) fn path_of(name: &str) -> Option<PathBuf> {
    let path = PathBuf::from(variable(name)?);
    let in_home = |rest: &Path| Some(PathBuf::from(variable("HOME")?).join(rest));
    Some(path.strip_prefix("~").ok().and_then(in_home).unwrap_or(path))
}

fn folder_in(name: &str, rest: &str) -> Option<PathBuf> {
    path_of(name).map(|folder| folder.join(rest))
}

/// Hugging Face's folder: cache and token.
pub(super) fn hugging_face_home() -> Option<PathBuf> {
    path_of("HF_HOME")
        .or_else(|| folder_in("XDG_CACHE_HOME", "huggingface"))
        .or_else(|| folder_in("HOME", ".cache/huggingface"))
}

/// The cache of the hub's repositories.
pub(super) fn hub_cache() -> Option<PathBuf> {
    path_of("HF_HUB_CACHE")
        .or_else(|| path_of("HUGGINGFACE_HUB_CACHE"))
        .or_else(|| Some(hugging_face_home()?.join("hub")))
}

/// The cache of models from object stores.
pub(super) fn store_cache() -> Option<PathBuf> {
    let folder = path_of("GRISTMILL_CACHE")
        .or_else(|| folder_in("XDG_CACHE_HOME", "gristmill"))
        .or_else(|| folder_in("HOME", ".cache/gristmill"))?;
    Some(folder.join("models"))
}

/// The folders of one repository of the hub.
#[derive(Debug, Clone)]
pub(super) struct RepositoryCache {
    folder: PathBuf,
    locks: PathBuf,
}

impl RepositoryCache {
    pub(super) fn new(hub_cache: &Path, repository: &str) -> RepositoryCache {
        let name = format!("models--{}", repository.replace('/', "--"));
        RepositoryCache {
            folder: hub_cache.join(&name),
            locks: hub_cache.join(".locks").join(name),
        }
    }

    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    pub(super) fn blob(&self, hash: &str) -> PathBuf {
        self.folder.join("blobs").join(hash)
    }

    pub(super) fn lock(&self, hash: &str) -> PathBuf {
        self.locks.join(format!("{hash}.lock"))
    }

    /// The commit that a branch or tag had when it was last fetched.
    pub(super) fn commit_of(&self, revision: &str) -> Option<String> {
        let text = std::fs::read_to_string(self.folder.join("refs").join(revision)).ok()?;
        Some(text.trim().to_string())
    }

    pub(super) fn set_commit_of(&self, revision: &str, commit: &str) -> io::Result<()> {
        replace(&self.folder.join("refs").join(revision), commit.as_bytes())
    }

    /// Whether this program has fetched all files of a snapshot that it needs, and they are there.
    pub(super) fn is_whole(&self, commit: &str) -> bool {
        let Ok(list) = std::fs::read_to_string(self.mark(commit)) else {
            return false;
        };
        let snapshot = self.snapshot(commit);
        !list.is_empty() && list.lines().all(|name| snapshot.join(name).is_file())
    }

    pub(super) fn mark_whole(&self, commit: &str, names: &[String]) -> io::Result<()> {
        replace(&self.mark(commit), names.join("\n").as_bytes())
    }

    fn mark(&self, commit: &str) -> PathBuf {
        self.folder.join(".gristmill/v1").join(commit)
    }

    /// Makes `name` in a snapshot a link to its content.
    pub(super) fn link(&self, commit: &str, name: &str, hash: &str) -> io::Result<()> {
        let link = self.snapshot(commit).join(name);
        let up = "../".repeat(2 + name.matches('/').count());
        let content = PathBuf::from(format!("{up}blobs/{hash}"));
        if std::fs::read_link(&link).is_ok_and(|target| target == content) {
            return Ok(());
        }
        create_parent(&link)?;
        // Replaced in one step: another process may be reading the old one.
        let temporary = link.with_file_name(format!(".{hash}-{}", std::process::id()));
        match std::os::unix::fs::symlink(&content, &temporary) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        std::fs::rename(&temporary, &link)
    }
}

/// The folders of a model in an object store, at one state of its files.
#[derive(Debug, Clone)]
pub(super) struct StoreCache {
    folder: PathBuf,
    state: String,
}

impl StoreCache {
    /// `state`: a text that differs whenever the folder's files differ.
    pub(super) fn new(cache: &Path, url: &str, state: &str) -> StoreCache {
        StoreCache {
            folder: cache.join(short_hash(url)),
            state: short_hash(state),
        }
    }

    pub(super) fn snapshot(&self) -> PathBuf {
        self.folder.join(&self.state)
    }

    /// The lock of one file.
    pub(super) fn lock(&self, name: &str) -> PathBuf {
        self.partial(name).with_extension("lock")
    }

    /// The file's content while it is not whole.
    pub(super) fn partial(&self, name: &str) -> PathBuf {
        let name = short_hash(name);
        self.folder
            .join("partial")
            .join(format!("{}-{name}.incomplete", self.state))
    }
}

fn short_hash(text: &str) -> String {
    let mut hash = data_encoding::HEXLOWER.encode(&Sha256::digest(text.as_bytes()));
    hash.truncate(32);
    hash
}

pub(super) fn create_parent(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), std::fs::create_dir_all)
}

/// Replaces a small file in one step, in a folder that need not be there.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    create_parent(path)?;
    crate::replace::replace(path, bytes)
}

/// Waits for a lock, which ends with the returned file or with the process. `waits` is called once
/// if another process holds it.
pub(super) async fn lock(path: &Path, waits: impl FnOnce()) -> io::Result<File> {
    create_parent(path)?;
    let mut waits = Some(waits);
    loop {
        let file = File::options().create(true).append(true).mode(LOCK_MODE).open(path)?;
        match file.try_lock() {
            Ok(()) if is_at(&file, path) => return Ok(file),
            // Its last holder has removed it, and others lock the file that took its place.
            Ok(()) => continue,
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error),
        }
        if let Some(waits) = waits.take() {
            waits();
        }
        tokio::time::sleep(LOCK_PAUSE).await;
    }
}

/// Whether an open file is the one at `path`.
fn is_at(file: &File, path: &Path) -> bool {
    let id = |meta: io::Result<Metadata>| meta.ok().map(|meta| (meta.dev(), meta.ino()));
    let open = id(file.metadata());
    open.is_some() && open == id(std::fs::metadata(path))
}

/// Free bytes for this user on the disk of `path`, or of its closest folder that is there.
pub(super) fn free_bytes(path: &Path) -> Option<u64> {
    let folder = path.ancestors().find(|folder| folder.exists())?;
    let disk = rustix::fs::statvfs(folder).ok()?;
    Some(disk.f_bavail.saturating_mul(disk.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_links_to_contents_and_is_whole_while_they_are_there() {
        let home = tempfile::tempdir().unwrap();
        let cache = RepositoryCache::new(home.path(), "org/name");
        let names = [
            "config.json".to_string(),
            "additional_chat_templates/a.jinja".to_string(),
        ];
        for (hash, name) in ["1a", "2b"].into_iter().zip(&names) {
            create_parent(&cache.blob(hash)).unwrap();
            std::fs::write(cache.blob(hash), hash).unwrap();
            cache.link("c0", name, hash).unwrap();
            cache.link("c0", name, hash).unwrap();
            let found = std::fs::read_to_string(home.path().join("models--org--name/snapshots/c0").join(name));
            assert_eq!(found.unwrap(), hash);
        }
        assert!(!cache.is_whole("c0"));
        cache.mark_whole("c0", &names).unwrap();
        assert!(cache.is_whole("c0"));
        std::fs::remove_file(cache.blob("2b")).unwrap();
        assert!(!cache.is_whole("c0"), "a link without content");
        cache.set_commit_of("refs/pr/1", "c0").unwrap();
        assert_eq!(cache.commit_of("refs/pr/1").as_deref(), Some("c0"));
        assert_eq!(cache.commit_of("main"), None);
    }

    #[tokio::test]
    async fn a_lock_that_was_removed_locks_nothing() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("a.lock");
        let first = lock(&path, || ()).await.unwrap();
        let waiting = lock(&path, || {
            // The holder removes the file and lets go, as other programs do.
            std::fs::remove_file(&path).unwrap();
            drop(first);
        });
        let second = waiting.await.unwrap();
        assert!(is_at(&second, &path));
        let third = File::options().append(true).open(&path).unwrap();
        assert!(matches!(third.try_lock(), Err(TryLockError::WouldBlock)));
    }

    #[test]
    fn other_files_are_another_state() {
        let of = |url: &str, state: &str| StoreCache::new(Path::new("/c"), url, state).snapshot();
        assert_ne!(of("s3://b/m", "etag 1"), of("s3://b/m", "etag 2"));
        assert_ne!(of("s3://b/m", "etag 1"), of("s3://b/n", "etag 1"));
    }
}
