//! The folder that caches compiled kernels and measurements for later processes.
//!
//! Whoever can write to the folder controls the code that this process runs on the card. So only
//! the user may access the folder (mode 0700), and a file is read only if this user or root owns it
//! and nobody else may write to it. Each file begins with a hash of its content, so that a file
//! that was not written completely (disk error, power failure) is never loaded.

use std::ffi::OsString;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

use super::libraries;

/// Maximum file size; a kernel has some 100 kB.
const FILE_BYTES_MAX: u64 = 256 << 20;
/// Mode bits that must be unset: write access of the group and of others.
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// Each file begins with this prefix, the hash of its content in hexadecimal, and a line break.
const HASH_PREFIX: &str = "sha256:";

/// `kernels/` in `GRISTMILL_CACHE`, or in `gristmill/` of the user's cache folder. `None`: there is
/// no such folder, or these variables are ignored, because the process has more rights than the
/// user who set them, and would write to folders that this user may not write to.
pub(super) fn folder() -> Option<PathBuf> {
    folder_from(libraries::trusted_variable)
}

fn folder_from(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let variable = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let folder = variable("GRISTMILL_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|cache| cache.join("gristmill")))
        .or_else(|| variable("HOME").map(|home| home.join(".cache/gristmill")))?;
    Some(folder.join("kernels"))
}

/// Content of the file at `path`; `None`: there is no file, or it must not be loaded.
pub(super) fn read(path: &Path) -> Option<Vec<u8>> {
    match read_checked(path) {
        Ok(bytes) => Some(bytes),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => {
            warn_once(path, &error);
            None
        }
    }
}

/// Writes a file of the cache atomically. Failures only cost time, so the first is logged.
pub(super) fn store(path: &Path, bytes: &[u8]) {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let partial = path.with_extension(format!("{}-{number}.part", std::process::id()));
    let folder = path.parent().unwrap_or(Path::new("."));
    let created = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
    let checked = created.and_then(|()| check_folder(folder));
    let written = checked.and_then(|()| write(&partial, bytes).and_then(|()| std::fs::rename(&partial, path)));
    if let Err(error) = written {
        warn_once(path, &error);
        let _ = std::fs::remove_file(&partial);
    }
}

/// Warns only once: usually, the cause is the same for every file of the folder.
fn warn_once(path: &Path, error: &Error) {
    static WARNED: Once = Once::new();
    let folder = path.parent().unwrap_or(path);
    WARNED.call_once(|| {
        tracing::warn!(
            "the kernel cache `{}` cannot be used, so kernels are compiled again in each process: {error}",
            folder.display()
        );
    });
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(format!("{HASH_PREFIX}{}\n", sha256(bytes)).as_bytes())?;
    file.write_all(bytes)
}

fn read_checked(path: &Path) -> Result<Vec<u8>> {
    let folder = path.parent().unwrap_or(Path::new("."));
    if !path.exists() {
        return Err(ErrorKind::NotFound.into());
    }
    check_folder(folder)?;
    let file = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() || meta.len() > FILE_BYTES_MAX {
        return refuse(format!(
            "`{}` is not a file of gristmill's kernel cache",
            path.display()
        ));
    }
    check_owner(path, &meta)?;
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
    match content(&bytes) {
        Some(content) => Ok(content.to_vec()),
        // The caller makes the content anew and overwrites the file.
        None => Err(ErrorKind::NotFound.into()),
    }
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The content after the hash, if the hash matches.
fn content(bytes: &[u8]) -> Option<&[u8]> {
    let end = bytes.iter().position(|byte| *byte == b'\n')?;
    let content = &bytes[end + 1..];
    let hash = bytes[..end].strip_prefix(HASH_PREFIX.as_bytes())?;
    (hash == sha256(content).as_bytes()).then_some(content)
}

/// Sets the folder's mode to 0700 if this user owns it; fails if others may write to it.
fn check_folder(folder: &Path) -> Result<()> {
    let meta = std::fs::metadata(folder)?;
    if meta.uid() == user() && meta.mode() & 0o777 != 0o700 {
        // Earlier versions created the folder with the umask's mode.
        std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o700))?;
    }
    check_owner(folder, &std::fs::metadata(folder)?)
}

fn check_owner(path: &Path, meta: &std::fs::Metadata) -> Result<()> {
    if meta.uid() != user() && meta.uid() != 0 {
        return refuse(format!(
            "`{}` belongs to user {}, and this process is user {}: name another folder with `GRISTMILL_CACHE`",
            path.display(),
            meta.uid(),
            user()
        ));
    }
    if meta.mode() & WRITABLE_BY_OTHERS != 0 {
        return refuse(format!(
            "others than its owner may write to `{}` (mode {:o}): `chmod go-w` it",
            path.display(),
            meta.mode() & 0o7777
        ));
    }
    Ok(())
}

fn refuse<T>(why: String) -> Result<T> {
    Err(Error::new(ErrorKind::PermissionDenied, why))
}

fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().mode() & 0o777
    }

    fn chmod(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn stored_files_are_private_and_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cache/kernels/embed-1.cubin");
        assert_eq!(read(&path), None);
        store(&path, b"image");
        assert_eq!(read(&path).as_deref(), Some(&b"image"[..]));
        let folder = path.parent().unwrap();
        assert_eq!((mode(folder), mode(&path)), (0o700, 0o600));
        // The mode that an earlier version set.
        chmod(folder, 0o755);
        assert_eq!(read(&path).as_deref(), Some(&b"image"[..]));
        assert_eq!(mode(folder), 0o700);
    }

    #[test]
    fn the_folder_is_named_by_trusted_variables() {
        let folder_with = |set: &[(&str, &str)]| {
            folder_from(|name| {
                let found = set.iter().find(|(variable, _)| *variable == name);
                found.map(|(_, value)| OsString::from(value))
            })
        };
        let (own, cache, home) = (("GRISTMILL_CACHE", "/g"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h"));
        assert_eq!(folder_with(&[own, cache, home]), Some("/g/kernels".into()));
        assert_eq!(
            folder_with(&[("GRISTMILL_CACHE", ""), cache, home]),
            Some("/x/gristmill/kernels".into())
        );
        assert_eq!(folder_with(&[home]), Some("/h/.cache/gristmill/kernels".into()));
        // A process with more rights than the user who started it ignores all these variables.
        assert_eq!(folder_with(&[]), None);
    }

    #[test]
    fn changed_or_untrusted_files_are_not_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kernels/embed-1.cubin");
        store(&path, b"image");
        let complete = std::fs::read(&path).unwrap();
        for bytes in [&b""[..], b"image", b"sha256:\nimage", &complete[..complete.len() - 1]] {
            std::fs::write(&path, bytes).unwrap();
            assert_eq!(read(&path), None);
        }
        store(&path, b"image");
        assert!(read(&path).is_some());
        chmod(&path, 0o666);
        assert_eq!(read(&path), None, "others may write to it");
        chmod(&path, 0o600);
        assert!(read(&path).is_some());
        let moved = dir.path().join("moved");
        std::fs::rename(&path, &moved).unwrap();
        std::os::unix::fs::symlink(&moved, &path).unwrap();
        assert_eq!(read(&path), None, "a link");
        std::fs::remove_file(&path).unwrap();
        crate::regular::make_pipe(&path);
        assert_eq!(read(&path), None, "a pipe");
    }

    /// Only root can change the owner; for other users, the test checks nothing.
    #[test]
    fn a_folder_of_another_user_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kernels/embed-1.cubin");
        store(&path, b"image");
        let folder = path.parent().unwrap();
        if std::os::unix::fs::chown(folder, Some(12_345), None).is_ok() {
            assert_eq!(read(&path), None);
            let other = folder.join("embed-2.cubin");
            store(&other, b"image");
            assert!(!other.exists());
        }
    }
}
