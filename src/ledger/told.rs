//! Announces the end of a job (`on_finish`). The process that wrote the result announces it. If
//! that process died first, the next process that checks for a mark does. The mark, `told.json`,
//! records the announcement. If a process dies between announcement and mark, the end is announced
//! again, so it is announced at least once.
//!
//! See docs/decisions/030-who-lists-an-address-is-told.md.

use std::sync::atomic::Ordering::{AcqRel, Release};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Ledger;
use super::error::Result;
use super::keys::Id;
use super::record::{Record, SMALL_RECORD_BYTES, VERSION, encode};

/// `told.json`: the end of this generation was told as the job's `on_finish` has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(super) struct ToldMark {
    pub v: u32,
    pub job: Id,
    pub generation: u32,
}

impl Record for ToldMark {
    const MAX_BYTES: u64 = SMALL_RECORD_BYTES;
}

impl Ledger {
    pub(super) fn mark_result_written(&self) {
        self.inner.is_result_written.store(true, Release);
    }

    /// Whether this process has written the result of the generation since the last call.
    pub fn take_result_written(&self) -> bool {
        self.inner.is_result_written.swap(false, AcqRel)
    }

    /// Whether the generation's end was announced, so that its mark exists.
    pub async fn is_end_announced(&self) -> Result<bool> {
        Ok(self.store().object_version(&self.keys().told_mark()).await?.is_some())
    }

    /// Marks the generation's end as announced.
    pub async fn mark_end_announced(&self) -> Result<()> {
        let mark = ToldMark {
            v: VERSION,
            job: self.job().job.clone(),
            generation: self.generation(),
        };
        // The mark of another process has the same content.
        self.store()
            .create(&self.keys().told_mark(), encode(&mark)?)
            .await
            .map(drop)
    }
}
