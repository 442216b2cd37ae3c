//! The inputs of a job, and the versions of each input that are known to hold the planned bytes.
//!
//! An ETag may change although the bytes are the same: when a file is touched, restored or copied,
//! or an object is uploaded in other pieces. If an input's ETag is unknown, its bytes are hashed,
//! once per ETag and process, and compared with the hash of the plan. A version whose hash matches
//! is known from then on, and an order in the ledger reports it to other workers
//! ([`JobInputs::unreported`]).
//!
//! See docs/decisions/026-a-changed-input-stops-its-job.md.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::pinned_file::{FileVersion, PinnedFile};
use crate::dataset::error::DatasetError;
use crate::dataset::plan::InputFile;

/// A version of an input with the planned bytes, but with another ETag than the planned one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifiedVersion {
    /// Index into the job's inputs.
    pub input: u32,
    pub version: FileVersion,
}

/// The inputs of a job, and their known versions.
#[derive(Debug)]
pub struct JobInputs {
    files: Vec<InputFile>,
    known: Mutex<KnownVersions>,
    /// Held while an input is hashed, so that other readers of the same change wait for the result.
    hashing: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct KnownVersions {
    /// The version of each input that readers open.
    current: Vec<FileVersion>,
    /// Versions that hold the planned bytes.
    verified: HashSet<(u32, FileVersion)>,
    /// Versions that hold other bytes.
    mismatched: HashSet<(u32, FileVersion)>,
    /// Versions verified by this process that are not yet in the ledger.
    unreported: Vec<VerifiedVersion>,
}

impl JobInputs {
    pub fn new(files: Vec<InputFile>) -> JobInputs {
        let planned = |file: &InputFile| FileVersion {
            etag: file.etag.clone(),
            version: file.version.clone(),
        };
        let current: Vec<FileVersion> = files.iter().map(planned).collect();
        // If the plan has neither ETag nor version id, a change shows only in the hash.
        let is_verified = |version: &FileVersion, file: &InputFile| !version.is_blank() || file.sha256.is_none();
        let verified = current.iter().zip(&files).zip(0..);
        let verified = verified
            .filter(|((version, file), _)| is_verified(version, file))
            .map(|((version, _), input)| (input, version.clone()));
        JobInputs {
            known: Mutex::new(KnownVersions {
                verified: verified.collect(),
                current,
                mismatched: HashSet::new(),
                unreported: Vec::new(),
            }),
            files,
            hashing: tokio::sync::Mutex::default(),
        }
    }

    pub fn files(&self) -> &[InputFile] {
        &self.files
    }

    /// Adds versions that another process has verified by hash.
    pub fn add_verified(&self, versions: impl IntoIterator<Item = VerifiedVersion>) {
        let mut known = self.lock();
        for VerifiedVersion { input, version } in versions {
            known.verified.insert((input, version));
        }
    }

    /// Versions verified by this process that are not yet in the ledger.
    pub fn unreported(&self) -> Vec<VerifiedVersion> {
        self.lock().unreported.clone()
    }

    /// Removes an entry of [`JobInputs::unreported`] that is now in the ledger.
    pub fn mark_reported(&self, reported: &VerifiedVersion) {
        self.lock().unreported.retain(|unreported| unreported != reported);
    }

    /// A verified version of the input. If the store gives neither ETag nor version id, the bytes
    /// are hashed first.
    pub async fn open(&self, input: u32) -> Result<PinnedFile, DatasetError> {
        let file = self.file(input)?;
        let version = self.lock().current[input as usize].clone();
        let pinned = PinnedFile::open(file)?.with_version(version.clone());
        let is_known = self.lock().verified.contains(&(input, version));
        if is_known {
            return Ok(pinned);
        }
        self.verify_current(input, &pinned).await?;
        self.current(input)
    }

    /// Verifies the current version of `input` after a read has found another version than
    /// `opened`. On `Ok`, the current version holds the planned bytes, and [`JobInputs::open`]
    /// returns it from then on.
    pub async fn verify_current(&self, input: u32, opened: &PinnedFile) -> Result<(), DatasetError> {
        let file = self.file(input)?;
        let _lock = self.hashing.lock().await;
        let found = opened.current_version().await?;
        let key = (input, found.clone());
        {
            let mut known = self.lock();
            if known.verified.contains(&key) {
                known.current[input as usize] = found;
                return Ok(());
            }
            if known.mismatched.contains(&key) && !found.is_blank() {
                return Err(opened.changed("its bytes have changed".into()));
            }
        }
        let was = opened.etag.as_deref().unwrap_or("unknown");
        let is = found.etag.as_deref().unwrap_or("unknown");
        let Some(planned) = &file.sha256 else {
            return Err(opened.changed(format!(
                "its ETag was {was} and is {is}, and the plan has no hash of its bytes"
            )));
        };
        let hash = opened.with_version(found.clone()).sha256().await?;
        let mut known = self.lock();
        if hash != *planned {
            known.mismatched.insert(key);
            return Err(opened.changed(format!("its SHA-256 was {planned} and is {hash}")));
        }
        // Other processes cannot recognise a version without ETag and version id.
        if !found.is_blank() {
            known.unreported.push(VerifiedVersion {
                input,
                version: found.clone(),
            });
        }
        known.current[input as usize] = found;
        known.verified.insert(key);
        Ok(())
    }

    /// Checks that the input still holds the planned bytes, without decoding rows.
    pub async fn check(&self, input: u32) -> Result<(), DatasetError> {
        let opened = self.current(input)?;
        self.verify_current(input, &opened).await
    }

    fn current(&self, input: u32) -> Result<PinnedFile, DatasetError> {
        let file = self.file(input)?;
        let version = self.lock().current[input as usize].clone();
        Ok(PinnedFile::open(file)?.with_version(version))
    }

    fn file(&self, input: u32) -> Result<&InputFile, DatasetError> {
        self.files.get(input as usize).ok_or_else(|| {
            DatasetError::Refused(format!(
                "the plan has {} inputs, its shard names {input}",
                self.files.len()
            ))
        })
    }

    fn lock(&self) -> MutexGuard<'_, KnownVersions> {
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
    use crate::dataset::store::pinned_file::hex;

    /// A file of ten bytes, planned from a store without ETags, with this hash.
    fn blank_plan(path: &Path, sha256: Option<String>) -> JobInputs {
        let location = Location::parse(path.to_str().unwrap(), Path::new("/")).unwrap();
        JobInputs::new(vec![InputFile {
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
    async fn an_input_without_an_etag_is_compared_with_the_hash_of_the_plan() {
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
