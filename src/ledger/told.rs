//! Who tells that a job is done: whoever has written its result, and, where that process ended before it could, whoever looks next. A mark
//! says that it is done with. Between the two the end may be told twice, never not at all.
//!
//! See docs/decisions/030-who-lists-an-address-is-told.md.

use std::sync::atomic::Ordering::{AcqRel, Release};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Ledger;
use super::error::Result;
use super::keys::Id;
use super::record::{Record, SMALL_BYTES, VERSION, encode};

/// `told.json`: the end of this generation was told as the job's `on_finish` has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ToldMark {
    pub v: u32,
    pub job: Id,
    pub generation: u32,
}

impl Record for ToldMark {
    const MAX_BYTES: u64 = SMALL_BYTES;
}

impl Ledger {
    pub(super) fn note_result(&self) {
        self.inner.has_result.store(true, Release);
    }

    /// Whether this process has written the generation's result since it was asked last.
    pub fn takes_result(&self) -> bool {
        self.inner.has_result.swap(false, AcqRel)
    }

    /// Whether the generation's end was told. A mark says so by being there.
    pub async fn is_told(&self) -> Result<bool> {
        Ok(self.store().object_version(&self.keys().told()).await?.is_some())
    }

    /// Marks the generation's end as told.
    pub async fn mark_told(&self) -> Result<()> {
        let mark = ToldMark {
            v: VERSION,
            job: self.job().job.clone(),
            generation: self.generation(),
        };
        // Another's mark says the same.
        self.store().create(&self.keys().told(), encode(&mark)?).await.map(drop)
    }
}
