//! Lost or damaged data objects: the record that counts their rows is voided, and the rows are
//! computed again.
//!
//! A void is an entry of the log, created once at the next index, so that all readers agree on
//! which rows count. A record is voided only if its data was found damaged twice, and only while
//! its shard has no commit: a committed shard has its rows in its part, and `clean` may have
//! removed its data objects. A worker that read an object before it was lost may still publish the
//! rows. Its part then stays, and the worker that voided the record commits that part.
//!
//! See docs/decisions/003-lost-data-is-voided-in-the-log.md.

use std::collections::BTreeMap;

use super::Ledger;
use super::entry::{Damage, LogEntry, LogRecord, VoidRecord};
use super::error::{LedgerError, Result};
use super::keys::Id;
use super::log::ShardLog;
use super::record::{Commit, VERSION_MORE, encode};
use super::rowset::RowSet;
use super::store::{Created, Listed, MAX_OBJECT_BYTES};

/// Finished rows whose data was lost, and which are open again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Voided {
    pub shard: u32,
    pub rows: u64,
    /// The data object's address.
    pub object: String,
    pub found: Damage,
}

impl std::fmt::Display for Voided {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "shard {} is damaged: `{}` {}; its {} rows are computed again",
            self.shard, self.object, self.found, self.rows
        )
    }
}

impl Ledger {
    /// Reads all data objects of an uncommitted shard, and opens the rows of lost objects again.
    pub async fn void_lost(&self, shard: u32) -> Result<Vec<Voided>> {
        match self.mend_log(shard).await {
            // The shard may have been published and cleaned while it was read.
            Err(LedgerError::Damaged { .. }) if self.is_committed(shard).await? => Ok(Vec::new()),
            mended => mended,
        }
    }

    async fn mend_log(&self, shard: u32) -> Result<Vec<Voided>> {
        let mut log = ShardLog::load(self, shard).await?;
        for index in log.records().map(|record| record.index).collect::<Vec<_>>() {
            if let Some(damage) = log.damage_at(index).await? {
                log.suspects.insert(index, damage);
            }
        }
        log.void_lost().await
    }
}

impl ShardLog {
    /// Rows of voided records, whether finished again since or still open.
    pub fn voided_rows(&self) -> RowSet {
        let voided = self.entries.iter().filter_map(|entry| match entry {
            LogEntry::Rows(record) if self.voided.contains(&record.index) => Some(&record.counts),
            _ => None,
        });
        voided.fold(RowSet::new(), |all, rows| all.union(rows))
    }

    /// Rows that count, but whose data object was missing or had another size when the log was
    /// loaded.
    pub fn damaged_rows(&self) -> RowSet {
        let damaged = self
            .records()
            .filter(|record| self.suspects.contains_key(&record.index));
        damaged.fold(RowSet::new(), |all, record| all.union(&record.counts))
    }

    /// The records that count, but whose data object is missing from `found`, a listing of the
    /// shard, or has another size there.
    pub(super) fn suspects_in(&self, found: &[Listed]) -> BTreeMap<u32, Damage> {
        let suspect = |record: &LogRecord| {
            let key = self.ledger.keys().data(self.shard, &record.data.name);
            match found.binary_search_by(|listed| listed.key.as_str().cmp(&key)) {
                Err(_) => Some((record.index, Damage::Missing)),
                Ok(at) => (found[at].size != record.data.size).then_some((record.index, Damage::Differs)),
            }
        };
        self.records().filter_map(suspect).collect()
    }

    /// Reads the suspected data objects again.
    pub(super) async fn confirm_suspects(&mut self) -> Result<()> {
        for index in self.suspects.keys().copied().collect::<Vec<_>>() {
            match self.damage_at(index).await? {
                Some(found) => self.suspects.insert(index, found),
                None => self.suspects.remove(&index),
            };
        }
        Ok(())
    }

    /// Reads the suspected data objects again, and voids the records whose data is lost.
    pub(super) async fn void_lost(&mut self) -> Result<Vec<Voided>> {
        self.settle().await?;
        self.confirm_suspects().await?;
        // The data objects of a committed shard may have been cleaned away.
        if !self.suspects.is_empty() && self.ledger.is_committed(self.shard).await? {
            let shard = self.shard;
            return Err(LedgerError::damaged(format!(
                "shard {shard} is committed, and its data is gone"
            )));
        }
        let mut out = Vec::new();
        while let Some((&index, &found)) = self.suspects.first_key_value() {
            out.extend(self.void(index, found).await?);
            self.suspects.remove(&index);
        }
        Ok(out)
    }

    /// How the data object of the record at `index` is damaged. `None`: the object is whole, or the
    /// record no longer counts.
    async fn damage_at(&self, index: u32) -> Result<Option<Damage>> {
        let Some(record) = self.record_at(index) else {
            return Ok(None);
        };
        let key = self.ledger.keys().data(self.shard, &record.data.name);
        Ok(match self.ledger.store().get(&key, MAX_OBJECT_BYTES).await? {
            None => Some(Damage::Missing),
            Some(bytes) => (!record.data.is(&bytes)).then_some(Damage::Differs),
        })
    }

    /// The record at `index`, if it counts.
    fn record_at(&self, index: u32) -> Option<&LogRecord> {
        self.records().find(|record| record.index == index)
    }

    /// Voids the record at `index`, unless another process does so first.
    async fn void(&mut self, index: u32, found: Damage) -> Result<Option<Voided>> {
        while let Some(record) = self.record_at(index) {
            let (shard, rows) = (self.shard, record.counts.len());
            let object = self.ledger.keys().data(shard, &record.data.name);
            let void = VoidRecord {
                v: VERSION_MORE,
                job: self.ledger.job().job.clone(),
                shard,
                index: self.next_index(),
                nonce: Id::random()?,
                voids: index,
                found,
            };
            let key = self.ledger.keys().log(shard, void.index);
            match self.ledger.store().create(&key, encode(&void)?).await? {
                Created::Theirs(bytes) => self.take(LogEntry::decode(self.ledger.store(), &key, &bytes)?)?,
                Created::Ours => {
                    self.take(LogEntry::Void(void))?;
                    let object = self.ledger.store().address(&object);
                    let voided = Voided {
                        shard,
                        rows,
                        object,
                        found,
                    };
                    tracing::warn!(shard, output = %self.ledger.store().url(), "{voided}");
                    return Ok(Some(voided));
                }
            }
        }
        Ok(None)
    }

    /// Handles a publish that found the data of the records at `indices` damaged. Returns the
    /// commit if the shard is committed by now, otherwise voids the records and returns an error.
    pub(super) async fn lost(&self, indices: Vec<u32>) -> Result<Commit> {
        if let Some(commit) = self.ledger.commit_of(self.shard).await? {
            return Ok(commit);
        }
        let mended = match ShardLog::load(&self.ledger, self.shard).await {
            Ok(mut log) => {
                let counting = indices.into_iter().map(|index| (index, Damage::Differs));
                log.suspects.extend(counting);
                log.void_lost().await
            }
            Err(error) => Err(error),
        };
        let what = match mended {
            // The shard was published and cleaned while its log was read.
            Err(error @ LedgerError::Damaged { .. }) => return self.ledger.commit_of(self.shard).await?.ok_or(error),
            mended => match &mended?[..] {
                [] => format!("shard {} is damaged: its log is to be read anew", self.shard),
                voided => voided.iter().map(Voided::to_string).collect::<Vec<_>>().join("; "),
            },
        };
        Err(LedgerError::Lost { what })
    }
}
