//! The log of one shard: create-once records, each of which names the rows of one data object that
//! count.
//!
//! A row counts in the first record that covers it. A writer tries index n + 1 only after it has
//! read n, and drops the rows that n covers. So no row counts twice, however late a writer wakes.
//!
//! An entry at a later index may void a record whose data object is lost ([`super::damage`]). From
//! that index on, the rows of the voided record are open again. All readers see records and voids
//! in one order, so they agree on which rows count.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;

use arrow::array::RecordBatch;
use bytes::Bytes;
use chrono::{DateTime, Utc};

use super::Ledger;
use super::attempts::{AttemptPlan, AttemptView, Fate, plan_attempt};
use super::data;
use super::entry::{Damage, LogEntry, LogRecord};
use super::error::{LedgerError, Result};
use super::generation::SelectedRows;
use super::keys::{Id, Keys, is_worker_name, sha256};
use super::record::{
    AttemptEnd, AttemptRecord, AttemptWorker, Commit, DATA_BYTES_MAX, DataObject, Record, Tally, VERSION, encode, read,
};
use super::rowset::RowSet;
use super::store::{CreateOutcome, ListedObject};

/// Maximum bytes of own data objects that are cached, so that publishing need not read them back.
const CACHED_BYTES_MAX: usize = 64 << 20;
/// Maximum bytes of all decoded data objects of one shard in memory.
const DECODED_BYTES_MAX: usize = 1 << 30;
/// Maximum number of tries of one upload, each under another name.
const UPLOAD_TRIES: u32 = 3;
/// Maximum number of records in one shard; gristmill writes fewer.
const MAX_RECORDS: usize = 1_000_000;

/// The state of a shard when a worker opens it.
#[derive(Debug)]
pub enum ShardState {
    /// The shard is committed.
    Committed(Box<Commit>),
    /// Rows or the part are missing.
    Open(Box<ShardLog>),
}

/// The log of one uncommitted shard, with this worker's own attempts and writes.
#[derive(Debug)]
pub struct ShardLog {
    pub(super) ledger: Ledger,
    pub(super) shard: u32,
    /// The shard's rows.
    rows: Range<u64>,
    /// The rows to do in this generation: its log covers no other rows.
    to_do: RowSet,
    pub(super) entries: Vec<LogEntry>,
    /// Indices of records that later entries void.
    pub(super) voided: BTreeSet<u32>,
    /// By index, the records that count but whose data object was damaged in the listing at load.
    pub(super) suspected_damage: BTreeMap<u32, Damage>,
    covered: RowSet,
    attempts: Vec<AttemptView>,
    /// When the newest object found at load was written, by the store's clock.
    last_progress: Option<DateTime<Utc>>,
    /// This worker's newest attempt, after which its data objects are named.
    attempt: Id,
    data_object_count: u32,
    /// The attempt whose create has an unknown outcome: it must be tried again unchanged.
    pending_attempt: Option<AttemptRecord>,
    /// Data objects that this worker uploaded, by name.
    pub(super) cached_data: HashMap<String, Bytes>,
    /// The record whose create has an unknown outcome: it must be tried again unchanged.
    pending_record: Option<Pending>,
}

#[derive(Debug)]
struct Pending {
    record: LogRecord,
    batch: RecordBatch,
}

impl Ledger {
    /// The shard's state. Voids records whose data is lost. For a committed shard this also runs
    /// the finish check: `_SUCCESS` is missing if a worker died right after the last commit.
    pub async fn shard(&self, shard: u32) -> Result<ShardState> {
        let listing = self.store().list(&self.keys().shard_prefix(shard)).await?;
        // A shard without objects was never begun: its log records are never removed.
        if !listing.is_empty()
            && let Some(commit) = self.commit_of(shard).await?
        {
            self.finish_check(Some(shard)).await?;
            return Ok(ShardState::Committed(Box::new(commit)));
        }
        let opened = match ShardLog::load_listed(self, shard, &listing).await {
            Ok(mut log) if !log.suspected_damage.is_empty() => log.void_lost().await.map(|_| log),
            loaded => loaded,
        };
        match opened {
            Ok(log) => Ok(ShardState::Open(Box::new(log))),
            // The shard was published and cleaned while it was read.
            Err(error @ LedgerError::Damaged { .. }) => match self.commit_of(shard).await? {
                Some(commit) => Ok(ShardState::Committed(Box::new(commit))),
                None => Err(error),
            },
            Err(error) => Err(error),
        }
    }

    /// Whether the shard is done.
    pub async fn is_committed(&self, shard: u32) -> Result<bool> {
        Ok(self.commit_of(shard).await?.is_some())
    }

    /// The attempts at a shard that have not ended, as far as the ledger shows them.
    pub async fn shard_attempts(&self, shard: u32) -> Result<Vec<AttemptView>> {
        Ok(ShardLog::load(self, shard).await?.attempts)
    }
}

/// An attempt that has not ended.
fn attempt_view(record: AttemptRecord, begun_at: Option<DateTime<Utc>>) -> AttemptView {
    AttemptView {
        attempt: record.attempt,
        worker: record.worker,
        rows: record.rows,
        is_alone: record.alone,
        has_ended: false,
        process: record.process,
        heartbeat_seconds: record.signs_every,
        begun_at,
        after: record.after,
        fate: Fate::default(),
    }
}

impl ShardLog {
    /// Reads a shard's log and attempts: one listing, one read per log entry and unended attempt.
    pub async fn load(ledger: &Ledger, shard: u32) -> Result<ShardLog> {
        let listing = ledger.store().list(&ledger.keys().shard_prefix(shard)).await?;
        ShardLog::load_listed(ledger, shard, &listing).await
    }

    /// As [`ShardLog::load`], with the listing of the shard.
    async fn load_listed(ledger: &Ledger, shard: u32, listing: &[ListedObject]) -> Result<ShardLog> {
        let planned = ledger.job().shard(shard)?;
        let mut log = ShardLog {
            ledger: ledger.clone(),
            shard,
            rows: planned.first_row..planned.first_row + planned.rows,
            to_do: ledger.rows_to_do(shard),
            entries: Vec::new(),
            voided: BTreeSet::new(),
            suspected_damage: BTreeMap::new(),
            covered: RowSet::new(),
            attempts: Vec::new(),
            last_progress: None,
            attempt: Id::random()?,
            data_object_count: 0,
            pending_attempt: None,
            cached_data: HashMap::new(),
            pending_record: None,
        };
        let prefix = ledger.keys().shard_prefix(shard);
        log.last_progress = listing.iter().map(|object| object.modified).max();
        let names_below = |folder: &str| -> Vec<String> {
            let start = format!("{prefix}/{folder}/");
            listing
                .iter()
                .filter_map(|object| object.key.strip_prefix(&start))
                .map(str::to_string)
                .collect()
        };
        // The listing only gives the number of entries. A missing index is an error.
        let entry_count = names_below("log").iter().filter(|name| Keys::is_log_name(name)).count();
        if entry_count > MAX_RECORDS {
            return Err(LedgerError::damaged(format!(
                "shard {shard} has {entry_count} log records, more than {MAX_RECORDS}"
            )));
        }
        while log.entries.len() < entry_count {
            let key = ledger.keys().log(shard, log.next_index());
            match ledger.store().get(&key, LogRecord::MAX_BYTES).await? {
                Some(bytes) => log.apply(LogEntry::decode(ledger.store(), &key, &bytes)?)?,
                None => {
                    return Err(LedgerError::damaged(format!(
                        "`{}` is missing",
                        ledger.store().address(&key)
                    )));
                }
            }
        }
        let attempts = listing.iter().filter_map(|object| {
            let name = object.key.strip_prefix(&format!("{prefix}/attempts/"))?;
            Some((name.to_string(), object.modified))
        });
        log.attempts = log.read_attempts(attempts.collect()).await?;
        log.suspected_damage = log.suspected_damage_in(listing);
        Ok(log)
    }

    async fn read_attempts(&self, found: Vec<(String, DateTime<Utc>)>) -> Result<Vec<AttemptView>> {
        let names = found.iter().map(|(name, _)| name);
        let ended: HashSet<&str> = names.filter_map(|name| name.strip_suffix(".end.json")).collect();
        let mut out = Vec::new();
        for (name, begun_at) in &found {
            // An attempt that ended cleanly is no evidence of poison rows: skip the request.
            let id = name
                .strip_suffix(".json")
                .and_then(|id| Id::try_from(id.to_string()).ok());
            let Some(id) = id.filter(|id| !ended.contains(id.as_str())) else {
                continue;
            };
            let key = self.ledger.keys().attempt(self.shard, &id);
            if let Some(record) = read::<AttemptRecord>(self.ledger.store(), &key).await? {
                out.push(attempt_view(record, Some(*begun_at)));
            }
        }
        // An attempt that a later one names as dead is dead.
        let dead: HashSet<Id> = out.iter().flat_map(|attempt| attempt.after.clone()).collect();
        for attempt in out.iter_mut().filter(|attempt| dead.contains(&attempt.attempt)) {
            attempt.fate = Fate::Dead;
        }
        Ok(out)
    }

    pub fn shard(&self) -> u32 {
        self.shard
    }

    /// The shard's rows.
    pub fn rows(&self) -> Range<u64> {
        self.rows.clone()
    }

    /// Rows that records cover. They are finished, unless their record is voided later.
    pub fn covered(&self) -> &RowSet {
        &self.covered
    }

    /// The rows to do in this generation; all rows in the first one.
    pub fn rows_to_do(&self) -> &RowSet {
        &self.to_do
    }

    /// Rows still to do.
    pub fn uncovered(&self) -> RowSet {
        self.to_do.difference(&self.covered)
    }

    /// Whether every row is covered, so that the shard can be published.
    pub fn is_complete(&self) -> bool {
        self.uncovered().is_empty()
    }

    /// The records that count, in order.
    pub(super) fn records(&self) -> impl Iterator<Item = &LogRecord> {
        self.entries.iter().filter_map(|entry| match entry {
            LogEntry::Rows(record) if !self.voided.contains(&record.index) => Some(record),
            _ => None,
        })
    }

    /// Counts over the rows that count so far, except rows of records with suspected damage.
    pub fn tally(&self) -> Tally {
        let undamaged = self
            .records()
            .filter(|record| !self.suspected_damage.contains_key(&record.index));
        undamaged.fold(Tally::default(), |mut sum, record| {
            sum.add(&record.tally);
            sum
        })
    }

    /// When the newest object that was found at load was written, by the store's clock.
    pub fn last_progress(&self) -> Option<DateTime<Utc>> {
        self.last_progress
    }

    /// Attempts that had not ended at load, and all attempts that this value has begun.
    pub fn attempts(&self) -> &[AttemptView] {
        &self.attempts
    }

    /// Whether an attempt with one row, alone on the device, may still be running.
    pub fn has_suspect_attempts(&self) -> bool {
        self.suspect_attempts().any(|attempt| attempt.fate != Fate::Dead)
    }

    fn suspect_attempts(&self) -> impl Iterator<Item = &AttemptView> {
        let is_open = |attempt: &&AttemptView| attempt.rows.difference(&self.covered) == attempt.rows;
        self.attempts
            .iter()
            .filter(|attempt| attempt.is_suspect())
            .filter(is_open)
    }

    /// Sets the fate of each attempt that [`ShardLog::has_suspect_attempts`] looks for.
    pub fn set_fates(&mut self, fate: impl Fn(&AttemptView) -> Fate) {
        for attempt in self
            .attempts
            .iter_mut()
            .filter(|a| a.is_suspect() && a.fate != Fate::Dead)
        {
            attempt.fate = fate(attempt);
        }
    }

    /// The rows to try next, and the rows to try no more (see [`plan_attempt`]).
    ///
    /// Call this between attempts: a running attempt would count as one that has not ended.
    pub fn plan_attempt(&self) -> AttemptPlan {
        let open = self.uncovered();
        // Rows whose data was lost were finished once, so they are not poison.
        let harmless = self.voided_rows().intersection(&open);
        let mut plan = plan_attempt(&self.attempts, &open.difference(&harmless));
        if !harmless.is_empty() && plan.accused_to_read.is_empty() {
            plan.next_rows = match plan.rows_per_try.take() {
                None => plan.next_rows.union(&harmless),
                Some(_) => harmless,
            };
        }
        plan
    }

    /// Records that `rows` are about to be read and run. Call this before any of them is read.
    /// `is_alone`: no other rows are on the device during the attempt.
    pub async fn begin(&mut self, worker: impl Into<AttemptWorker>, rows: &RowSet, is_alone: bool) -> Result<Id> {
        let AttemptWorker {
            worker,
            process,
            heartbeat_seconds,
        } = worker.into();
        if !is_worker_name(&worker) {
            return Err(LedgerError::stop(format!(
                "`{worker}` cannot be a worker's name: letters, digits, `-`, `_`"
            )));
        }
        // After an error the record may exist, so the same record is tried again. Otherwise one
        // outage would look like several attempts that never ended.
        let is_same = |record: &AttemptRecord| record.rows == *rows && record.alone == is_alone;
        let unsettled = self.pending_attempt.take().filter(is_same);
        let is_dead = |a: &&AttemptView| a.fate == Fate::Dead && a.rows == *rows;
        let dead = self.suspect_attempts().filter(is_dead);
        let after = dead.map(|attempt| attempt.attempt.clone()).collect();
        let record = match unsettled {
            Some(record) => record,
            None => AttemptRecord {
                v: VERSION,
                job: self.ledger.job().job.clone(),
                shard: self.shard,
                attempt: Id::random()?,
                worker,
                rows: rows.clone(),
                alone: is_alone,
                after,
                process,
                signs_every: heartbeat_seconds,
            },
        };
        let attempt = record.attempt.clone();
        let key = self.ledger.keys().attempt(self.shard, &attempt);
        let bytes = encode(&record)?;
        self.pending_attempt = Some(record.clone());
        self.create_unique(&key, bytes).await?;
        self.pending_attempt = None;
        self.attempts.push(attempt_view(record, None));
        self.attempt = attempt.clone();
        self.data_object_count = 0;
        Ok(attempt)
    }

    /// Records that the attempt ended cleanly, whether its rows are finished or not.
    pub async fn end(&mut self, attempt: &Id) -> Result<()> {
        let record = AttemptEnd {
            v: VERSION,
            attempt: attempt.clone(),
        };
        let key = self.ledger.keys().attempt_end(self.shard, attempt);
        self.ledger.store().create(&key, encode(&record)?).await?;
        for view in self.attempts.iter_mut().filter(|view| view.attempt == *attempt) {
            view.has_ended = true;
        }
        Ok(())
    }

    /// Logs finished rows, in any order. Returns the rows that count by this call.
    ///
    /// After an error the outcome is unknown: call [`ShardLog::settle_pending`] or `append` again,
    /// or load the log again.
    pub async fn append(&mut self, batch: &RecordBatch) -> Result<RowSet> {
        let mut counted = self.settle_pending().await?;
        let rows = data::row_numbers(batch).map_err(|why| self.bad_batch_error(&why))?;
        let offered = RowSet::from_rows(rows.iter().copied());
        if offered.len() != rows.len() as u64 || !offered.difference(&self.to_do).is_empty() {
            return Err(self.bad_batch_error(&format!(
                "rows {offered} are not rows to do of the shard, each at most once"
            )));
        }
        let uncovered = offered.difference(&self.covered);
        if uncovered.is_empty() {
            return Ok(counted);
        }
        let batch = data::select(batch, &uncovered).map_err(|why| self.bad_batch_error(&why))?;
        // Count before the upload: a batch that no record can describe must be rejected first.
        let tally = data::tally(&batch, &uncovered).map_err(|why| self.bad_batch_error(&why))?;
        let data = self.upload(&batch).await?;
        crate::failpoint!("keeper.between-data-and-record");
        let record = LogRecord {
            v: VERSION,
            job: self.ledger.job().job.clone(),
            shard: self.shard,
            index: self.next_index(),
            nonce: Id::random()?,
            data,
            counts: uncovered,
            tally,
        };
        self.pending_record = Some(Pending { record, batch });
        counted = counted.union(&self.settle_pending().await?);
        Ok(counted)
    }

    /// Writes the pending record, if any. Returns the rows that now count by it.
    pub async fn settle_pending(&mut self) -> Result<RowSet> {
        while let Some(Pending { record, batch }) = self.pending_record.take() {
            let key = self.ledger.keys().log(self.shard, record.index);
            let created = match encode(&record) {
                Ok(bytes) => self.ledger.store().create(&key, bytes).await,
                Err(error) => Err(error),
            };
            match created {
                Ok(CreateOutcome::Ours) => {
                    let counts = record.counts.clone();
                    self.apply(LogEntry::Rows(record))?;
                    return Ok(counts);
                }
                Ok(CreateOutcome::Theirs(bytes)) => {
                    let winner = LogEntry::decode(self.ledger.store(), &key, &bytes)?;
                    self.apply(winner)?;
                    self.pending_record = self.rebase_record(record, batch)?;
                }
                Err(error) => {
                    // The record may exist, so the same bytes must be tried again.
                    self.pending_record = Some(Pending { record, batch });
                    return Err(error);
                }
            }
        }
        Ok(RowSet::new())
    }

    /// The record for the next index, without rows that were covered meanwhile.
    fn rebase_record(&self, lost: LogRecord, batch: RecordBatch) -> Result<Option<Pending>> {
        let counts = lost.counts.difference(&self.covered);
        if counts.is_empty() {
            return Ok(None);
        }
        let tally = data::tally(&batch, &counts).map_err(|why| self.bad_batch_error(&why))?;
        let record = LogRecord {
            index: self.next_index(),
            nonce: Id::random()?,
            counts,
            tally,
            ..lost
        };
        Ok(Some(Pending { record, batch }))
    }

    async fn upload(&mut self, batch: &RecordBatch) -> Result<DataObject> {
        let bytes = data::encode(batch).map_err(|why| self.bad_batch_error(&why))?;
        let mut last_error = None;
        for _ in 0..UPLOAD_TRIES {
            let name = Keys::data_name(&self.attempt, self.data_object_count);
            // Increment even if the upload fails: a late put of these bytes must not meet other
            // bytes under the same name.
            self.data_object_count += 1;
            let key = self.ledger.keys().data(self.shard, &name);
            if let Err(error) = self.create_unique(&key, bytes.clone()).await {
                if !matches!(error, LedgerError::Damaged { .. }) {
                    return Err(error);
                }
                // The object was damaged before it was read back. No record names it yet, so the
                // bytes are uploaded under another name.
                last_error = Some(error);
                continue;
            }
            let object = DataObject {
                name: name.clone(),
                size: bytes.len() as u64,
                sha256: sha256(&bytes),
            };
            if self.cached_data.values().map(Bytes::len).sum::<usize>() + bytes.len() <= CACHED_BYTES_MAX {
                self.cached_data.insert(name, bytes);
            }
            return Ok(object);
        }
        Err(last_error.unwrap_or_else(|| self.bad_batch_error("no upload is allowed")))
    }

    /// Creates an object under a name that only this worker knows.
    async fn create_unique(&self, key: &str, bytes: Bytes) -> Result<()> {
        match self.ledger.store().create(key, bytes).await? {
            CreateOutcome::Ours => Ok(()),
            CreateOutcome::Theirs(_) => Err(LedgerError::damaged(format!(
                "`{}` holds other bytes than this worker wrote, although only this worker knows the name",
                self.ledger.store().address(key)
            ))),
        }
    }

    /// Checks the entry that was read or created at the next index, and appends it.
    pub(super) fn apply(&mut self, entry: LogEntry) -> Result<()> {
        let key = self.ledger.keys().log(self.shard, self.next_index());
        let bad_entry = |why: String| {
            LedgerError::damaged(format!(
                "`{}` is no record of this log: {why}",
                self.ledger.store().address(&key)
            ))
        };
        let (job, shard, index) = entry.position();
        if *job != self.ledger.job().job || shard != self.shard || index != self.next_index() {
            return Err(bad_entry(format!("it names job {job}, shard {shard}, index {index}")));
        }
        match &entry {
            LogEntry::Rows(record) => {
                let outside = record.counts.difference(&self.to_do);
                let twice = record.counts.intersection(&self.covered);
                if !outside.is_empty() || !twice.is_empty() {
                    return Err(bad_entry(format!("rows {} are not open", outside.union(&twice))));
                }
                self.covered = self.covered.union(&record.counts);
            }
            LogEntry::Void(void) => {
                let voided = self.records().find(|record| record.index == void.voids);
                let voided = voided.ok_or_else(|| bad_entry(format!("no record counts at index {}", void.voids)))?;
                self.covered = self.covered.difference(&voided.counts);
                self.voided.insert(void.voids);
                self.suspected_damage.remove(&void.voids);
            }
        }
        self.entries.push(entry);
        Ok(())
    }

    pub(super) fn next_index(&self) -> u32 {
        self.entries.len() as u32
    }

    fn bad_batch_error(&self, why: &str) -> LedgerError {
        LedgerError::damaged(format!(
            "shard {}: a batch of finished rows cannot be logged: {why}",
            self.shard
        ))
    }

    /// Reads the data objects of the records that count, checked by size and hash.
    pub(super) async fn read_counted_data(&self) -> Result<CountedData> {
        let (mut intact, mut damaged) = (Vec::new(), Vec::new());
        let mut bytes_in_memory = 0;
        for record in self.records() {
            let key = self.ledger.keys().data(self.shard, &record.data.name);
            let bytes = match self.cached_data.get(&record.data.name) {
                Some(bytes) => Some(bytes.clone()),
                None => self.ledger.store().get(&key, DATA_BYTES_MAX).await?,
            };
            match bytes.filter(|bytes| record.data.matches(bytes)) {
                None => damaged.push(record.index),
                Some(bytes) => {
                    let batch = data::decode(bytes).map_err(|why| {
                        LedgerError::damaged(format!("`{}`: {why}", self.ledger.store().address(&key)))
                    })?;
                    bytes_in_memory += batch.get_array_memory_size();
                    if bytes_in_memory > DECODED_BYTES_MAX {
                        return Err(LedgerError::damaged(format!(
                            "`{}`: the data objects of shard {} take more than {DECODED_BYTES_MAX} bytes in memory, which no work of \
                             gristmill does",
                            self.ledger.store().address(&key),
                            self.shard
                        )));
                    }
                    intact.push((batch, record.counts.clone()));
                }
            }
        }
        Ok(if damaged.is_empty() {
            CountedData::Intact(intact)
        } else {
            CountedData::Damaged(damaged)
        })
    }
}

/// The data of the rows that a log counts.
pub(super) enum CountedData {
    Intact(SelectedRows),
    /// The data objects of the records at these indices are missing or have other bytes.
    Damaged(Vec<u32>),
}
