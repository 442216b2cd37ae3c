//! Lost or damaged data objects: the record that counts their rows is voided, and the rows are
//! computed again.
//!
//! A void is an entry of the log, created once at the next index, so that all readers agree on
//! which rows count. A record is voided only if two reads found its data damaged, and only while
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
use super::record::{Commit, VERSION_2, encode};
use super::rowset::RowSet;
use super::store::{CreateOutcome, ListedObject, MAX_OBJECT_BYTES};

/// Finished rows whose data is lost: their record is voided, and they are computed again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VoidedRows {
    pub shard: u32,
    pub rows: u64,
    /// The data object's address.
    pub object: String,
    pub damage: Damage,
}

impl std::fmt::Display for VoidedRows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "shard {} is damaged: `{}` {}; its {} rows are computed again",
            self.shard, self.object, self.damage, self.rows
        )
    }
}

impl Ledger {
    /// Reads all data objects of an uncommitted shard, and voids the records of lost objects, so
    /// that their rows are computed again.
    pub async fn void_lost(&self, shard: u32) -> Result<Vec<VoidedRows>> {
        match self.void_damaged_records(shard).await {
            // The shard may have been published and cleaned while it was read.
            Err(LedgerError::Damaged { .. }) if self.is_committed(shard).await? => Ok(Vec::new()),
            voided => voided,
        }
    }

    async fn void_damaged_records(&self, shard: u32) -> Result<Vec<VoidedRows>> {
        let mut log = ShardLog::load(self, shard).await?;
        for index in log.records().map(|record| record.index).collect::<Vec<_>>() {
            if let Some(damage) = log.damage_at(index).await? {
                log.suspected_damage.insert(index, damage);
            }
        }
        log.void_lost().await
    }
}

impl ShardLog {
    /// Rows of voided records. Some may have been finished again since.
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
            .filter(|record| self.suspected_damage.contains_key(&record.index));
        damaged.fold(RowSet::new(), |all, record| all.union(&record.counts))
    }

    /// The records that count, but whose data object is missing from `listing`, the listing of the
    /// shard, or has another size there.
    pub(super) fn suspected_damage_in(&self, listing: &[ListedObject]) -> BTreeMap<u32, Damage> {
        let damage_of = |record: &LogRecord| {
            let key = self.ledger.keys().data(self.shard, &record.data.name);
            match listing.binary_search_by(|listed| listed.key.as_str().cmp(&key)) {
                Err(_) => Some((record.index, Damage::Missing)),
                Ok(i) => (listing[i].size != record.data.size).then_some((record.index, Damage::Differs)),
            }
        };
        self.records().filter_map(damage_of).collect()
    }

    /// Reads the suspected data objects again.
    pub(super) async fn confirm_damage(&mut self) -> Result<()> {
        for index in self.suspected_damage.keys().copied().collect::<Vec<_>>() {
            match self.damage_at(index).await? {
                Some(found) => self.suspected_damage.insert(index, found),
                None => self.suspected_damage.remove(&index),
            };
        }
        Ok(())
    }

    /// Reads the suspected data objects again, and voids the records whose data is lost.
    pub(super) async fn void_lost(&mut self) -> Result<Vec<VoidedRows>> {
        self.settle_pending().await?;
        self.confirm_damage().await?;
        // The data objects of a committed shard may have been cleaned away.
        if !self.suspected_damage.is_empty() && self.ledger.is_committed(self.shard).await? {
            let shard = self.shard;
            return Err(LedgerError::damaged(format!(
                "shard {shard} is committed, and its data is gone"
            )));
        }
        let mut out = Vec::new();
        while let Some((&index, &damage)) = self.suspected_damage.first_key_value() {
            out.extend(self.void(index, damage).await?);
            self.suspected_damage.remove(&index);
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
            Some(bytes) => (!record.data.matches(&bytes)).then_some(Damage::Differs),
        })
    }

    /// The record at `index`, if it counts.
    fn record_at(&self, index: u32) -> Option<&LogRecord> {
        self.records().find(|record| record.index == index)
    }

    /// Voids the record at `index`, unless another process does so first.
    async fn void(&mut self, index: u32, damage: Damage) -> Result<Option<VoidedRows>> {
        while let Some(record) = self.record_at(index) {
            let (shard, rows) = (self.shard, record.counts.len());
            let object = self.ledger.keys().data(shard, &record.data.name);
            let void = VoidRecord {
                v: VERSION_2,
                job: self.ledger.job().job.clone(),
                shard,
                index: self.next_index(),
                nonce: Id::random()?,
                voids: index,
                found: damage,
            };
            let key = self.ledger.keys().log(shard, void.index);
            match self.ledger.store().create(&key, encode(&void)?).await? {
                CreateOutcome::Theirs(bytes) => self.apply(LogEntry::decode(self.ledger.store(), &key, &bytes)?)?,
                CreateOutcome::Ours => {
                    self.apply(LogEntry::Void(void))?;
                    let object = self.ledger.store().address(&object);
                    let voided = VoidedRows {
                        shard,
                        rows,
                        object,
                        damage,
                    };
                    tracing::warn!(shard, output = %self.ledger.store().url(), "{voided}");
                    return Ok(Some(voided));
                }
            }
        }
        Ok(None)
    }

    /// Called when a publish found the data of the records at `indices` damaged. Returns the commit
    /// if the shard is committed by now, otherwise voids the records and returns an error.
    pub(super) async fn void_after_failed_publish(&self, indices: Vec<u32>) -> Result<Commit> {
        if let Some(commit) = self.ledger.commit_of(self.shard).await? {
            return Ok(commit);
        }
        let voided = match ShardLog::load(&self.ledger, self.shard).await {
            Ok(mut log) => {
                let damaged = indices.into_iter().map(|index| (index, Damage::Differs));
                log.suspected_damage.extend(damaged);
                log.void_lost().await
            }
            Err(error) => Err(error),
        };
        let message = match voided {
            // The shard was published and cleaned while its log was read.
            Err(error @ LedgerError::Damaged { .. }) => return self.ledger.commit_of(self.shard).await?.ok_or(error),
            voided => match &voided?[..] {
                [] => format!("shard {} is damaged: its log is to be read anew", self.shard),
                list => list.iter().map(VoidedRows::to_string).collect::<Vec<_>>().join("; "),
            },
        };
        Err(LedgerError::Lost { message })
    }
}
