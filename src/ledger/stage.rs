//! Stages, the temporary files of local puts: a put writes a stage below `_gristmill/tmp/`, and a
//! hard link gives the file its final name. Below `tmp/`, only files with names of the forms made
//! here are ever removed.

use std::time::Duration;

use bytes::Bytes;
use object_store::path::Path;
use object_store::{ObjectStoreExt, PutMode, PutOptions};

use super::error::Result;
use super::folder::OwnerOnly;
use super::keys::{Id, JOB, TMP};
use super::store::Store;
use super::store_error_kind::{StoreErrorKind, store_error_kind};

/// Age above which a stage belongs to no live process: a put takes seconds.
pub(super) const STAGE_AGE_MAX: Duration = Duration::from_secs(3600);

/// Whether a name below `tmp/` is a stage's (`ID-NUMBER`) or the start-up probe's (`probe-ID`).
/// Earlier versions appended `#NUMBER` to either.
pub(super) fn is_stage_name(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_id = |text: &str| Id::try_from(text.to_string()).is_ok();
    let name = match name.split_once('#') {
        Some((name, number)) if is_number(number) => name,
        Some(_) => return false,
        None => name,
    };
    if let Some(probe) = name.strip_prefix(PROBE_PREFIX) {
        let suffixes = ["-again", ".link"];
        return is_id(suffixes.iter().find_map(|end| probe.strip_suffix(end)).unwrap_or(probe));
    }
    name.split_once('-')
        .is_some_and(|(writer, number)| is_id(writer) && is_number(number))
}

/// Prefix of the names that the start-up probe uses.
pub(super) const PROBE_PREFIX: &str = "probe-";

impl Store {
    /// The path of a new stage.
    pub(super) fn new_stage(&self) -> Path {
        self.path(&format!("{TMP}/{}-{}", self.shared.writer, self.next_stage_number()))
    }

    /// Puts `bytes` at `key` unless an object exists there. Returns the ETag, if the store gives
    /// one.
    pub(super) async fn put_if_absent(&self, key: &str, bytes: &Bytes) -> Result<Option<String>, object_store::Error> {
        let (store, path) = (&self.shared.inner, self.path(key));
        let mut options = PutOptions::default();
        if self.shared.folder.is_none() {
            options.mode = if self.is_unconditional() {
                PutMode::Overwrite
            } else {
                PutMode::Create
            };
            let put = store.put_opts(&path, bytes.clone().into(), options).await?;
            return Ok(put.e_tag);
        }
        if key == JOB {
            // The job record holds the job's prompts, with any secrets that its author wrote into
            // them.
            options.extensions.insert(OwnerOnly);
        }
        let stage = self.new_stage();
        let linked = match store.put_opts(&stage, bytes.clone().into(), options).await {
            Ok(_) => store.copy_if_not_exists(&stage, &path).await,
            Err(error) => Err(error),
        };
        if let Err(error) = store.delete(&stage).await
            && linked.is_ok()
        {
            tracing::warn!("the temporary file `{stage}` could not be removed; a later run removes it: {error}");
        }
        linked.map(|()| None)
    }

    /// Syncs the folder of `key`. A name linked by another process may not be on disk yet, and the
    /// objects written after it must not outlive it.
    pub(super) async fn sync_folder_of(&self, key: &str) -> Result<()> {
        let Some(folder) = &self.shared.folder else {
            return Ok(());
        };
        let synced = folder.sync_folder_of(&self.path(key)).await;
        synced.map_err(|source| self.retries_exhausted(key, "syncing the folder of", Some(source)))
    }

    /// Removes stages that dead runs left, recognized by their age: a live writer needs its stage
    /// for seconds. If a stage in use is removed nevertheless, its put fails and is tried again.
    pub async fn remove_old_stages(&self) -> Result<()> {
        let Some(folder) = &self.shared.folder else {
            return Ok(());
        };
        let cleaned = folder.remove_old(&self.path(TMP), STAGE_AGE_MAX, is_stage_name).await;
        cleaned.map_err(|error| match store_error_kind(&error) {
            StoreErrorKind::Permanent(why) => self.permanent_error(TMP, "cleaning", why, &error),
            StoreErrorKind::Denied(why) => self.denied_error(TMP, "cleaning", why, &error),
            StoreErrorKind::Missing | StoreErrorKind::Transient => {
                self.permanent_error(TMP, "cleaning", "it cannot be read", &error)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_stages_and_probes_are_accepted() {
        let id = "0123456789abcdef0123";
        for name in [
            "ID-0",
            "ID-17",
            "ID-0#1",
            "probe-ID",
            "probe-ID-again",
            "probe-ID.link",
            "probe-ID#2",
        ] {
            assert!(is_stage_name(&name.replace("ID", id)), "{name}");
        }
        for name in [
            "",
            "lock",
            "ID",
            "ID-",
            "ID-x",
            "ID-0#",
            "ID-0#x",
            "ID-0.parquet",
            "xID-0",
            "probe-",
            "probe-ID-more",
            "Probe-ID",
            "thesis.tex",
            "2026-11",
        ] {
            assert!(!is_stage_name(&name.replace("ID", id)), "{name}");
        }
    }
}
