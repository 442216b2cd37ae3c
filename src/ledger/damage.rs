//! Data objects that are lost or damaged: the record that counts their rows is voided, and the rows are computed again.
//!
//! A void is an entry of the log like any other, created once at the next index, so that all readers agree on what counts.
//! Nothing is voided that was not found damaged twice, nor anything of a shard that is committed: its rows are in its part,
//! and `clean` may have removed the rest. A worker that read an object before it was lost may publish its rows all the
//! same: then its part stands, and the one that voided commits it.
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

/// Finished rows that were lost, and are open again.
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
    /// Looks at the data of an uncommitted shard's finished rows, all of it, and opens again what is lost.
    pub async fn mend(&self, shard: u32) -> Result<Vec<Voided>> {
        match self.mend_log(shard).await {
            // It may have been published and cleaned away while we read.
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
        log.mend().await
    }
}

impl ShardLog {
    /// Rows that were finished, and whose data was found lost: finished again since, or open.
    pub fn voided_rows(&self) -> RowSet {
        let voided = self.entries.iter().filter_map(|entry| match entry {
            LogEntry::Rows(record) if self.voided.contains(&record.index) => Some(&record.counts),
            _ => None,
        });
        voided.fold(RowSet::new(), |all, rows| all.union(rows))
    }

    /// Rows that count and whose data object was not there, or of another size, when the log was loaded.
    pub fn damaged_rows(&self) -> RowSet {
        let damaged = self
            .records()
            .filter(|record| self.suspects.contains_key(&record.index));
        damaged.fold(RowSet::new(), |all, record| all.union(&record.counts))
    }

    /// The records that count and whose data object `found`, a listing of the shard, lacks or has in another size.
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

    /// Looks again at what is suspected of damage.
    pub(super) async fn confirm_suspects(&mut self) -> Result<()> {
        for index in self.suspects.keys().copied().collect::<Vec<_>>() {
            match self.damage_at(index).await? {
                Some(found) => self.suspects.insert(index, found),
                None => self.suspects.remove(&index),
            };
        }
        Ok(())
    }

    /// Looks again at what is suspected of damage, and voids the records whose data is lost.
    pub(super) async fn mend(&mut self) -> Result<Vec<Voided>> {
        self.settle().await?;
        self.confirm_suspects().await?;
        // Of a shard that is committed, the data may be cleaned away.
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

    /// How the data object of the record at `index` is damaged; `None` where it is whole, or the record counts no more.
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

    /// Voids the record at `index`, unless somebody else does so first.
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
                    tracing::warn!("{voided}");
                    return Ok(Some(voided));
                }
            }
        }
        Ok(None)
    }

    /// The end of a publishing that found the data of the records at `indices` damaged: they are voided, unless the shard
    /// is committed by now.
    pub(super) async fn lost(&self, indices: Vec<u32>) -> Result<Commit> {
        if let Some(commit) = self.ledger.commit_of(self.shard).await? {
            return Ok(commit);
        }
        let mended = match ShardLog::load(&self.ledger, self.shard).await {
            Ok(mut log) => {
                let counting = indices.into_iter().map(|index| (index, Damage::Differs));
                log.suspects.extend(counting);
                log.mend().await
            }
            Err(error) => Err(error),
        };
        let what = match mended {
            // Published and cleaned away while we looked.
            Err(error @ LedgerError::Damaged { .. }) => return self.ledger.commit_of(self.shard).await?.ok_or(error),
            mended => match &mended?[..] {
                [] => format!("shard {} is damaged: its log is to be read anew", self.shard),
                voided => voided.iter().map(Voided::to_string).collect::<Vec<_>>().join("; "),
            },
        };
        Err(LedgerError::Lost { what })
    }
}
