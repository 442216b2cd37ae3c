//! Brings one file: one process at a time, resumed where an earlier try stopped, and verified.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use bytes::Bytes;
use data_encoding::HEXLOWER;
use futures::StreamExt;
use futures::stream::BoxStream;
use sha1::{Digest as _, Sha1};
use sha2::{Digest, Sha256};

use super::cache;
use super::error::FetchError;
use super::hub::Repository;
use super::store::Folder;
use crate::report::summary::show_size;

/// Tries in a row that may bring no byte.
const TRIES_MAX: u32 = 5;
/// Pause before the second try; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// Time between two lines about progress.
const PROGRESS_EVERY: Duration = Duration::from_secs(10);

/// How a file's content is verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Check {
    /// The SHA-256 of the content, which Git LFS names a file by.
    Sha256(String),
    /// The SHA-1 of a header and the content, which Git names a file by.
    GitBlob(String),
    /// The size alone: each request asks for one version of the file, by its ETag.
    Size,
}

/// A file to bring.
#[derive(Debug, Clone)]
pub(super) struct WantedFile {
    /// Its name in the repository or folder.
    pub name: String,
    pub size: u64,
    pub check: Check,
    /// Where the whole file lies in the end.
    pub path: PathBuf,
    /// Where it lies until then.
    pub partial: PathBuf,
    pub lock: PathBuf,
}

/// Where a file comes from.
#[derive(Clone, Copy)]
pub(super) enum Source<'a> {
    Hub(&'a Repository),
    Store(&'a Folder),
}

/// A part of a file, as a server sends it.
pub(super) struct Part {
    /// The position in the file of its first byte.
    pub start: u64,
    pub bytes: BoxStream<'static, Result<Bytes, String>>,
}

/// Why a try ended.
#[derive(Debug)]
pub(super) enum Trouble {
    /// Another try may succeed. A message without a location.
    Passing(String),
    Final(FetchError),
}

impl From<FetchError> for Trouble {
    fn from(error: FetchError) -> Trouble {
        Trouble::Final(error)
    }
}

impl Source<'_> {
    fn address(&self) -> String {
        match self {
            Source::Hub(repository) => repository.address(),
            Source::Store(folder) => folder.address(),
        }
    }

    async fn open(&self, file: &WantedFile, offset: u64) -> Result<Part, Trouble> {
        match self {
            Source::Hub(repository) => repository.open_file(&file.name, offset).await,
            Source::Store(folder) => folder.open_file(&file.name, offset).await,
        }
    }
}

/// Prints how far a model's files are.
pub(super) struct Progress<'a> {
    pub say: &'a (dyn Fn(&str) + Sync),
    pub total: u64,
    state: Mutex<(u64, Instant)>,
}

impl<'a> Progress<'a> {
    pub(super) fn new(say: &'a (dyn Fn(&str) + Sync), total: u64) -> Progress<'a> {
        Progress {
            say,
            total,
            state: Mutex::new((0, Instant::now())),
        }
    }

    fn add(&self, bytes: u64) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.0 += bytes;
        if state.1.elapsed() >= PROGRESS_EVERY {
            state.1 = Instant::now();
            (self.say)(&format!("fetched {} of {}", show_size(state.0), show_size(self.total)));
        }
    }
}

/// Brings a file unless it is there already.
///
/// # Errors
/// The server refuses it or fails repeatedly, its bytes are not those that it names, or the disk
/// fails.
pub(super) async fn download(source: Source<'_>, file: &WantedFile, progress: &Progress<'_>) -> Result<(), FetchError> {
    let address = source.address();
    let cache_error = |path: &Path, error: &io::Error| FetchError::cache(&address, path, error);
    if file.path.is_file() {
        return Ok(());
    }
    let waits = || (progress.say)(&format!("waits for another process that fetches `{}`", file.name));
    let _lock = cache::lock(&file.lock, waits)
        .await
        .map_err(|error| cache_error(&file.lock, &error))?;
    if file.path.is_file() {
        return Ok(());
    }
    for path in [&file.path, &file.partial] {
        cache::create_parent(path).map_err(|error| cache_error(path, &error))?;
    }
    let (mut tries, mut began_anew) = (0, false);
    loop {
        let before = partial_bytes(file);
        let trouble = match attempt(source, file, progress).await {
            Ok(true) => break,
            Ok(false) if before > 0 && !began_anew => {
                // Bytes of an earlier process may be damaged, as after a crash of the machine.
                began_anew = true;
                continue;
            }
            Ok(false) => {
                return Err(FetchError::failed(
                    &address,
                    format!(
                        "the bytes of `{}` that came are not those that the server names by its hash; they were removed. Run it \
                         again; if it happens again, something between here and the server changes them",
                        file.name
                    ),
                ));
            }
            Err(Trouble::Final(error)) => return Err(error),
            Err(Trouble::Passing(why)) => why,
        };
        tries = if partial_bytes(file) > before { 1 } else { tries + 1 };
        if tries >= TRIES_MAX {
            return Err(FetchError::failed(
                &address,
                format!(
                    "`{}` cannot be fetched: {trouble}; run it again, it goes on where it stopped",
                    file.name
                ),
            ));
        }
        tokio::time::sleep(FIRST_PAUSE * 2u32.pow(tries - 1)).await;
    }
    std::fs::rename(&file.partial, &file.path).map_err(|error| cache_error(&file.path, &error))
}

fn partial_bytes(file: &WantedFile) -> u64 {
    std::fs::metadata(&file.partial).map_or(0, |meta| meta.len())
}

/// Goes on with the partial file until it has its size. Returns whether its content is right; a
/// wrong one is removed.
async fn attempt(source: Source<'_>, wanted: &WantedFile, progress: &Progress<'_>) -> Result<bool, Trouble> {
    let failed = |error: io::Error| Trouble::Final(FetchError::cache(&source.address(), &wanted.partial, &error));
    let mut file = File::options()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(&wanted.partial)
        .map_err(failed)?;
    let mut hasher = Hasher::new(&wanted.check, wanted.size);
    let mut at = tokio::task::block_in_place(|| hasher.read(&mut file)).map_err(failed)?;
    if at > wanted.size {
        at = restart(&mut file, &mut hasher, wanted).map_err(failed)?;
    }
    if at < wanted.size {
        let mut part = source.open(wanted, at).await?;
        if part.start == 0 && at > 0 {
            // The server sends the whole file in place of the rest.
            at = restart(&mut file, &mut hasher, wanted).map_err(failed)?;
        }
        if part.start != at {
            return Err(Trouble::Passing(format!(
                "the server sends bytes from {} on, and those from {at} on were asked for",
                part.start
            )));
        }
        while let Some(bytes) = part.bytes.next().await {
            let bytes = bytes.map_err(Trouble::Passing)?;
            if bytes.len() as u64 > wanted.size - at {
                // More than the whole file: the content is another one.
                at = wanted.size + 1;
                break;
            }
            file.write_all(&bytes).map_err(failed)?;
            hasher.update(&bytes);
            at += bytes.len() as u64;
            progress.add(bytes.len() as u64);
        }
        if at < wanted.size {
            return Err(Trouble::Passing("the connection ended early".into()));
        }
    }
    // The length is that of the disk: where locks have no effect, another process may have cut it.
    let length = file.metadata().map_err(failed)?.len();
    if at == wanted.size && at == length && hasher.confirms(&wanted.check) {
        file.sync_all().map_err(failed)?;
        return Ok(true);
    }
    std::fs::remove_file(&wanted.partial).map_err(failed)?;
    Ok(false)
}

fn restart(file: &mut File, hasher: &mut Hasher, wanted: &WantedFile) -> io::Result<u64> {
    file.set_len(0)?;
    file.seek(SeekFrom::Start(0))?;
    *hasher = Hasher::new(&wanted.check, wanted.size);
    Ok(0)
}

/// The hash of the bytes so far.
enum Hasher {
    Sha256(Sha256),
    Sha1(Sha1),
    None,
}

impl Hasher {
    fn new(check: &Check, size: u64) -> Hasher {
        match check {
            Check::Sha256(_) => Hasher::Sha256(Sha256::new()),
            Check::GitBlob(_) => Hasher::Sha1(Sha1::new_with_prefix(format!("blob {size}\0"))),
            Check::Size => Hasher::None,
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Sha256(hash) => hash.update(bytes),
            Hasher::Sha1(hash) => hash.update(bytes),
            Hasher::None => {}
        }
    }

    /// Adds a file's bytes; returns their number. Afterwards the file is at its end.
    fn read(&mut self, file: &mut File) -> io::Result<u64> {
        if matches!(self, Hasher::None) {
            return file.seek(SeekFrom::End(0));
        }
        let (mut buffer, mut total) = (vec![0; 1 << 20], 0);
        loop {
            match file.read(&mut buffer)? {
                0 => return Ok(total),
                n => {
                    self.update(&buffer[..n]);
                    total += n as u64;
                }
            }
        }
    }

    fn confirms(self, check: &Check) -> bool {
        match (self, check) {
            (Hasher::Sha256(hash), Check::Sha256(expected)) => HEXLOWER.encode(&hash.finalize()) == *expected,
            (Hasher::Sha1(hash), Check::GitBlob(expected)) => HEXLOWER.encode(&hash.finalize()) == *expected,
            (Hasher::None, Check::Size) => true,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The hashes are those of `git hash-object` and `sha256sum`.
    #[test]
    fn hashes_are_those_of_git_and_of_git_lfs() {
        let content = b"hello\n";
        let git = Check::GitBlob("ce013625030ba8dba906f756967f9e9ca394464a".into());
        let lfs = Check::Sha256("5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03".into());
        for check in [git, lfs] {
            let hash = |bytes: &[u8]| {
                let mut hasher = Hasher::new(&check, 6);
                hasher.update(bytes);
                hasher.confirms(&check)
            };
            assert!(hash(content) && !hash(b"hellO\n"), "{check:?}");
        }
    }
}
