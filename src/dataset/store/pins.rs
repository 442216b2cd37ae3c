//! Tracks the states of each input that are known to hold the planned bytes.
//!
//! An ETag may change although the bytes are the same: when a file is touched, restored or copied,
//! or an object is uploaded in other pieces. If an input's ETag is unknown, its bytes are hashed,
//! once per ETag and process, and compared with the hash of the plan. A matching state is known
//! from then on, and is told to other workers by an order in the ledger ([`Pins::news`]).
//!
//! See docs/decisions/026-a-changed-input-stops-its-job.md.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::pinned::{Pin, PinnedFile};
use crate::dataset::error::DatasetError;
use crate::dataset::plan::InputFile;

/// An input that holds the planned bytes under another ETag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PinnedAnew {
    /// Index into the job's inputs.
    pub input: u32,
    pub pin: Pin,
}

/// The inputs of a job, and their known states.
#[derive(Debug)]
pub struct Pins {
    files: Vec<InputFile>,
    known: Mutex<Known>,
    /// Held while an input is hashed, so that other readers of the same change wait for the result.
    hashing: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct Known {
    /// The current pin of each input.
    current: Vec<Pin>,
    /// States that hold the planned bytes.
    good: HashSet<(u32, Pin)>,
    /// States that do not.
    bad: HashSet<(u32, Pin)>,
    news: Vec<PinnedAnew>,
}

impl Pins {
    pub fn new(files: Vec<InputFile>) -> Pins {
        let planned = |file: &InputFile| Pin {
            etag: file.etag.clone(),
            version: file.version.clone(),
        };
        let current: Vec<Pin> = files.iter().map(planned).collect();
        // If the plan has no ETag and no version, only the hash can tell.
        let vouched = |pin: &Pin, file: &InputFile| !pin.is_blank() || file.sha256.is_none();
        let good = current.iter().zip(&files).zip(0..);
        let good = good
            .filter(|((pin, file), _)| vouched(pin, file))
            .map(|((pin, _), input)| (input, pin.clone()));
        Pins {
            known: Mutex::new(Known {
                good: good.collect(),
                current,
                bad: HashSet::new(),
                news: Vec::new(),
            }),
            files,
            hashing: tokio::sync::Mutex::default(),
        }
    }

    pub fn files(&self) -> &[InputFile] {
        &self.files
    }

    /// Adds states that another process has verified by hash.
    pub fn know(&self, pins: impl IntoIterator<Item = PinnedAnew>) {
        let mut known = self.lock();
        for PinnedAnew { input, pin } in pins {
            known.good.insert((input, pin));
        }
    }

    /// States verified here that are not yet in the ledger.
    pub fn news(&self) -> Vec<PinnedAnew> {
        self.lock().news.clone()
    }

    /// Removes an entry of [`Pins::news`] that is now in the ledger.
    pub fn told(&self, anew: &PinnedAnew) {
        self.lock().news.retain(|news| news != anew);
    }

    /// The input, pinned to a verified state. If its states cannot be told apart, its bytes are
    /// hashed first.
    pub async fn open(&self, input: u32) -> Result<PinnedFile, DatasetError> {
        let file = self.file(input)?;
        let pin = self.lock().current[input as usize].clone();
        let pinned = PinnedFile::open(file)?.at(pin.clone());
        let is_known = self.lock().good.contains(&(input, pin));
        if is_known {
            return Ok(pinned);
        }
        self.settle(input, &pinned).await?;
        self.current(input)
    }

    /// Handles a read of `input` that found another state than the opened one. On `Ok`, the current
    /// state holds the planned bytes, and [`Pins::open`] uses it from here on.
    pub async fn settle(&self, input: u32, opened: &PinnedFile) -> Result<(), DatasetError> {
        let file = self.file(input)?;
        let _one = self.hashing.lock().await;
        let found = opened.look().await?;
        let key = (input, found.clone());
        {
            let mut known = self.lock();
            if known.good.contains(&key) {
                known.current[input as usize] = found;
                return Ok(());
            }
            if known.bad.contains(&key) && !found.is_blank() {
                return Err(opened.changed("its bytes are others".into()));
            }
        }
        let was = opened.etag.as_deref().unwrap_or("unknown");
        let is = found.etag.as_deref().unwrap_or("unknown");
        let Some(planned) = &file.sha256 else {
            return Err(opened.changed(format!(
                "its ETag was {was} and is {is}, and the plan has no hash of its bytes"
            )));
        };
        let hash = opened.at(found.clone()).sha256().await?;
        let mut known = self.lock();
        if hash != *planned {
            known.bad.insert(key);
            return Err(opened.changed(format!("its SHA-256 was {planned} and is {hash}")));
        }
        // A state without ETag and version is verified for this process only.
        if !found.is_blank() {
            known.news.push(PinnedAnew {
                input,
                pin: found.clone(),
            });
        }
        known.current[input as usize] = found;
        known.good.insert(key);
        Ok(())
    }

    /// Compares an input with the plan without reading rows.
    pub async fn check(&self, input: u32) -> Result<(), DatasetError> {
        let opened = self.current(input)?;
        self.settle(input, &opened).await
    }

    fn current(&self, input: u32) -> Result<PinnedFile, DatasetError> {
        let file = self.file(input)?;
        let pin = self.lock().current[input as usize].clone();
        Ok(PinnedFile::open(file)?.at(pin))
    }

    fn file(&self, input: u32) -> Result<&InputFile, DatasetError> {
        self.files.get(input as usize).ok_or_else(|| {
            DatasetError::Refused(format!(
                "the plan has {} inputs, its shard names {input}",
                self.files.len()
            ))
        })
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use sha2::{Digest, Sha256};

    use super::*;
    use crate::dataset::plan::Format;
    use crate::dataset::store::location::Location;
    use crate::dataset::store::pinned::hex;

    /// A file of ten bytes, planned from a store without ETags, with this hash.
    fn blank_plan(path: &Path, sha256: Option<String>) -> Pins {
        let location = Location::parse(path.to_str().unwrap(), Path::new("/")).unwrap();
        Pins::new(vec![InputFile {
            url: location.url.to_string(),
            format: Format::Jsonl,
            size: 10,
            etag: None,
            version: None,
            sha256,
            compressed: None,
            partition: Vec::new(),
            rows: 1,
        }])
    }

    #[tokio::test]
    async fn an_input_without_an_etag_is_held_against_the_hash_of_the_plan() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        let planned = Some(hex(Sha256::new_with_prefix(b"0123456789")));
        std::fs::write(&path, b"0123456789").unwrap();
        assert!(blank_plan(&path, planned.clone()).open(0).await.is_ok());
        std::fs::write(&path, b"0123456780").unwrap();
        let error = blank_plan(&path, planned).open(0).await.unwrap_err();
        assert!(matches!(error, DatasetError::InputChanged { .. }), "{error}");
        // A trial has no hash, so a change goes unnoticed.
        assert!(blank_plan(&path, None).open(0).await.is_ok());
    }
}
