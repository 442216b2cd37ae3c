//! The entries of a shard's log: records, each of which names rows that count, and voids of records
//! whose data is lost.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::error::Result;
use super::keys::{Id, Keys};
use super::record::{DATA_BYTES_MAX, DataObject, Record, Tally, VERSION_2, decode};
use super::rowset::RowSet;
use super::store::Store;

/// `log/000000.json`: what stands at an index of a shard's log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum LogEntry {
    Rows(LogRecord),
    Void(VoidRecord),
}

impl LogEntry {
    /// Decodes the entry in `bytes`, which were read from `key` of `store`.
    pub fn decode(store: &Store, key: &str, bytes: &[u8]) -> Result<LogEntry> {
        #[derive(Deserialize)]
        struct Kind {
            voids: Option<serde::de::IgnoredAny>,
        }
        // Bytes that are no JSON object are rejected by the decoder below.
        let is_void = serde_json::from_slice::<Kind>(bytes).is_ok_and(|kind| kind.voids.is_some());
        if is_void {
            decode(store, key, bytes).map(LogEntry::Void)
        } else {
            decode(store, key, bytes).map(LogEntry::Rows)
        }
    }

    /// The position that the entry names: job, shard, index.
    pub fn position(&self) -> (&Id, u32, u32) {
        match self {
            LogEntry::Rows(record) => (&record.job, record.shard, record.index),
            LogEntry::Void(record) => (&record.job, record.shard, record.index),
        }
    }
}

/// A log record of version 2: an earlier one's data object is lost, so its rows count no more and are computed again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VoidRecord {
    pub v: u32,
    pub job: Id,
    pub shard: u32,
    pub index: u32,
    /// Makes the bytes of two writers differ always.
    pub nonce: Id,
    /// The index of the record that counts no more.
    pub voids: u32,
    /// What was found of its data object.
    pub found: Damage,
}

impl Record for VoidRecord {
    const NEWEST: u32 = VERSION_2;

    fn check(&self) -> Result<(), String> {
        if self.v == VERSION_2 && self.voids < self.index {
            Ok(())
        } else {
            Err("it voids no earlier record".into())
        }
    }
}

/// How a data object is damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Damage {
    /// It is not there.
    Missing,
    /// Its size or hash is not what its record names.
    Differs,
}

impl std::fmt::Display for Damage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Damage::Missing => "is missing",
            Damage::Differs => "is not what its log record names",
        })
    }
}

/// A log record of version 1: one data object, and which of its rows count.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LogRecord {
    pub v: u32,
    pub job: Id,
    pub shard: u32,
    pub index: u32,
    /// Makes the bytes of two writers differ always.
    pub nonce: Id,
    pub data: DataObject,
    /// The rows of the data object that count: those that no earlier record covered.
    pub counts: RowSet,
    /// Over the rows that count.
    pub tally: Tally,
}

impl Record for LogRecord {
    fn check(&self) -> Result<(), String> {
        if !Keys::is_data_name(&self.data.name) {
            return Err("`data.name` is not a data object's name".into());
        }
        if self.data.size > DATA_BYTES_MAX {
            return Err(format!("`data.size` is {}, more than {DATA_BYTES_MAX}", self.data.size));
        }
        self.tally.check()?;
        if self.counts.is_empty() {
            return Err("`counts` is empty".into());
        }
        if self.tally.rows() != self.counts.len() {
            return Err(format!(
                "`tally` has {} rows, `counts` has {}",
                self.tally.rows(),
                self.counts.len()
            ));
        }
        Ok(())
    }
}
