//! The log of one shard: create-once records, each of which names the rows of one data object that
//! count.
//!
//! A row counts in the first record that covers it. A writer tries index n + 1 only after it has
//! read n, and drops the rows that n covers. So no row counts twice, however late a writer wakes.
//!
//! A record at a later index may void one whose data object is lost ([`super::damage`]). From that
//! index on, the rows of the voided record are open again. All readers see records and voids in one
//! order, so they agree on which rows count.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;

use arrow::array::RecordBatch;
use bytes::Bytes;
use chrono::{DateTime, Utc};

use super::Ledger;
use super::attempts::{AttemptView, Fate, Narrowing, narrowing};
use super::data;
use super::entry::{Damage, LogEntry, LogRecord};
use super::error::{LedgerError, Result};
use super::generation::Rows;
use super::keys::{Id, Keys, is_worker_name, sha256};
use super::record::{
    AttemptEnd, AttemptRecord, Commit, DATA_BYTES_MAX, DataObject, Record, Runner, Tally, VERSION, encode, read,
};
use super::rowset::RowSet;
use super::store::{Created, Listed};

/// Maximum bytes of own data objects kept in memory, so that publishing need not read them back.
const KEPT_BYTES_MAX: usize = 64 << 20;
/// Maximum bytes of all decoded data objects of one shard in memory.
const ROWS_BYTES_MAX: usize = 1 << 30;
/// Maximum number of names tried for one upload.
const UPLOADS_MAX: u32 = 3;
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

/// The log of one uncommitted shard, with this worker's position in it.
#[derive(Debug)]
pub struct ShardLog {
    pub(super) ledger: Ledger,
    pub(super) shard: u32,
    /// The shard's rows.
    rows: Range<u64>,
    /// The rows that this generation does: its log covers no other rows.
    to_do: RowSet,
    pub(super) entries: Vec<LogEntry>,
    /// Indices of records that later entries void.
    pub(super) voided: BTreeSet<u32>,
    /// Damaged data objects of records that count, as listed at load, by index of the record.
    pub(super) suspects: BTreeMap<u32, Damage>,
    covered: RowSet,
    attempts: Vec<AttemptView>,
    /// When the newest object found at load was written, by the store's clock.
    last_progress: Option<DateTime<Utc>>,
    /// The attempt begun last. Data objects of this worker are named after it.
    attempt: Id,
    data_objects: u32,
    /// The attempt whose create has an unknown outcome, to be tried again.
    beginning: Option<AttemptRecord>,
    /// Data objects that this worker uploaded, by name.
    pub(super) kept: HashMap<String, Bytes>,
    /// The record whose create has an unknown outcome: it must be tried again unchanged.
    pending: Option<Pending>,
}

#[derive(Debug)]
struct Pending {
    record: LogRecord,
    batch: RecordBatch,
}

impl Ledger {
    /// The shard's state. Voids records whose data is lost. For a committed shard this also runs
    /// the finish check: if a worker died between the last commit and `_SUCCESS`, the next worker
    /// thus writes `_SUCCESS`.
    pub async fn shard(&self, shard: u32) -> Result<ShardState> {
        let found = self.store().list(&self.keys().shard(shard)).await?;
        // A shard without objects was never begun: its log records are never removed.
        if !found.is_empty()
            && let Some(commit) = self.commit_of(shard).await?
        {
            self.finish_check(Some(shard)).await?;
            return Ok(ShardState::Committed(Box::new(commit)));
        }
        let opened = match ShardLog::load_listed(self, shard, &found).await {
            Ok(mut log) if !log.suspects.is_empty() => log.void_lost().await.map(|_| log),
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
fn view_of(record: AttemptRecord, begun_at: Option<DateTime<Utc>>) -> AttemptView {
    AttemptView {
        attempt: record.attempt,
        worker: record.worker,
        rows: record.rows,
        alone: record.alone,
        ended: false,
        process: record.process,
        signs_every: record.signs_every,
        begun_at,
        after: record.after,
        fate: Fate::default(),
    }
}

impl ShardLog {
    /// Reads a shard's log and attempts: one listing, one read per log record and unended attempt.
    pub async fn load(ledger: &Ledger, shard: u32) -> Result<ShardLog> {
        let found = ledger.store().list(&ledger.keys().shard(shard)).await?;
        ShardLog::load_listed(ledger, shard, &found).await
    }

    /// As [`ShardLog::load`], with a listing `found` of the shard.
    async fn load_listed(ledger: &Ledger, shard: u32, found: &[Listed]) -> Result<ShardLog> {
        let planned = ledger.job().shard(shard)?;
        let mut log = ShardLog {
            ledger: ledger.clone(),
            shard,
            rows: planned.first_row..planned.first_row + planned.rows,
            to_do: ledger.rows_to_do(shard),
            entries: Vec::new(),
            voided: BTreeSet::new(),
            suspects: BTreeMap::new(),
            covered: RowSet::new(),
            attempts: Vec::new(),
            last_progress: None,
            attempt: Id::random()?,
            data_objects: 0,
            beginning: None,
            kept: HashMap::new(),
            pending: None,
        };
        let prefix = ledger.keys().shard(shard);
        log.last_progress = found.iter().map(|object| object.modified).max();
        let below = |folder: &str| -> Vec<String> {
            let start = format!("{prefix}/{folder}/");
            found
                .iter()
                .filter_map(|object| object.key.strip_prefix(&start))
                .map(str::to_string)
                .collect()
        };
        // The listing only gives the number of records. A missing index is an error.
        let listed = below("log").iter().filter(|name| Keys::is_log_name(name)).count();
        if listed > MAX_RECORDS {
            return Err(LedgerError::damaged(format!(
                "shard {shard} has {listed} log records, more than {MAX_RECORDS}"
            )));
        }
        while log.entries.len() < listed {
            let key = ledger.keys().log(shard, log.next_index());
            match ledger.store().get(&key, LogRecord::MAX_BYTES).await? {
                Some(bytes) => log.take(LogEntry::decode(ledger.store(), &key, &bytes)?)?,
                None => {
                    return Err(LedgerError::damaged(format!(
                        "`{}` is missing",
                        ledger.store().address(&key)
                    )));
                }
            }
        }
        let attempts = found.iter().filter_map(|object| {
            let name = object.key.strip_prefix(&format!("{prefix}/attempts/"))?;
            Some((name.to_string(), object.modified))
        });
        log.attempts = log.read_attempts(attempts.collect()).await?;
        log.suspects = log.suspects_in(found);
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
                out.push(view_of(record, Some(*begun_at)));
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

    /// The rows that this generation does; all rows in the first generation.
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

    /// Counts over the rows that count so far, without records suspected of damage.
    pub fn tally(&self) -> Tally {
        let sound = self
            .records()
            .filter(|record| !self.suspects.contains_key(&record.index));
        sound.fold(Tally::default(), |mut sum, record| {
            sum.add(&record.tally);
            sum
        })
    }

    /// When the newest object that was found at load was written, by the store's clock.
    pub fn last_progress(&self) -> Option<DateTime<Utc>> {
        self.last_progress
    }

    /// Attempts that had not ended at load, and all attempts begun since through this log.
    pub fn attempts(&self) -> &[AttemptView] {
        &self.attempts
    }

    /// Whether an attempt with one row alone on the device is neither ended nor known to be dead.
    pub fn has_suspects(&self) -> bool {
        self.suspects().any(|attempt| attempt.fate != Fate::Dead)
    }

    fn suspects(&self) -> impl Iterator<Item = &AttemptView> {
        let is_open = |attempt: &&AttemptView| attempt.rows.difference(&self.covered) == attempt.rows;
        self.attempts
            .iter()
            .filter(|attempt| attempt.is_suspect())
            .filter(is_open)
    }

    /// Sets the fate of each such attempt (see [`ShardLog::has_suspects`]).
    pub fn judge(&mut self, fate: impl Fn(&AttemptView) -> Fate) {
        for attempt in self
            .attempts
            .iter_mut()
            .filter(|a| a.is_suspect() && a.fate != Fate::Dead)
        {
            attempt.fate = fate(attempt);
        }
    }

    /// The rows to try next, and the rows to try no more (see [`narrowing`]).
    ///
    /// Call this between attempts: a running attempt counts as one that has not ended.
    pub fn narrowing(&self) -> Narrowing {
        let open = self.uncovered();
        // Rows whose data was lost were finished once, so they are not poison.
        let harmless = self.voided_rows().intersection(&open);
        let mut plan = narrowing(&self.attempts, &open.difference(&harmless));
        if !harmless.is_empty() && plan.read.is_empty() {
            plan.next = match plan.rows_per_try.take() {
                None => plan.next.union(&harmless),
                Some(_) => harmless,
            };
        }
        plan
    }

    /// Records that `rows` are about to be read and run. Call this before any of them is read.
    ///
    /// `alone`: no other rows are on the device during the attempt.
    pub async fn begin(&mut self, runner: impl Into<Runner>, rows: &RowSet, alone: bool) -> Result<Id> {
        let Runner {
            worker,
            process,
            signs_every,
        } = runner.into();
        if !is_worker_name(&worker) {
            return Err(LedgerError::stop(format!(
                "`{worker}` cannot be a worker's name: letters, digits, `-`, `_`"
            )));
        }
        // After an error the record may exist, so the same record is tried again. Otherwise one
        // outage would look like several attempts that never ended.
        let unsettled = self.beginning.take().filter(|r| r.rows == *rows && r.alone == alone);
        let dead = self.suspects().filter(|a| a.fate == Fate::Dead && a.rows == *rows);
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
                alone,
                after,
                process,
                signs_every,
            },
        };
        let attempt = record.attempt.clone();
        let key = self.ledger.keys().attempt(self.shard, &attempt);
        let bytes = encode(&record)?;
        self.beginning = Some(record.clone());
        self.create_own(&key, bytes).await?;
        self.beginning = None;
        self.attempts.push(view_of(record, None));
        self.attempt = attempt.clone();
        self.data_objects = 0;
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
            view.ended = true;
        }
        Ok(())
    }

    /// Logs finished rows, in any order. Returns the rows that count by this call.
    ///
    /// After an error the rows may or may not be covered: call [`ShardLog::settle`] or `append`
    /// again, or load the log again.
    pub async fn append(&mut self, batch: &RecordBatch) -> Result<RowSet> {
        let mut counted = self.settle().await?;
        let rows = data::rows_of(batch).map_err(|why| self.bad_batch(&why))?;
        let offered = RowSet::from_rows(rows.iter().copied());
        if offered.len() != rows.len() as u64 || !offered.difference(&self.to_do).is_empty() {
            return Err(self.bad_batch(&format!(
                "rows {offered} are not rows to do of the shard, each at most once"
            )));
        }
        let fresh = offered.difference(&self.covered);
        if fresh.is_empty() {
            return Ok(counted);
        }
        let batch = data::select(batch, &fresh).map_err(|why| self.bad_batch(&why))?;
        // Count before the upload: a batch that no record can describe must be rejected first.
        let tally = data::tally(&batch, &fresh).map_err(|why| self.bad_batch(&why))?;
        let data = self.upload(&batch).await?;
        crate::failpoint!("keeper.between-data-and-record");
        let record = LogRecord {
            v: VERSION,
            job: self.ledger.job().job.clone(),
            shard: self.shard,
            index: self.next_index(),
            nonce: Id::random()?,
            data,
            counts: fresh,
            tally,
        };
        self.pending = Some(Pending { record, batch });
        counted = counted.union(&self.settle().await?);
        Ok(counted)
    }

    /// Completes the pending record, if any. Returns the rows that now count by it.
    pub async fn settle(&mut self) -> Result<RowSet> {
        while let Some(Pending { record, batch }) = self.pending.take() {
            let key = self.ledger.keys().log(self.shard, record.index);
            let created = match encode(&record) {
                Ok(bytes) => self.ledger.store().create(&key, bytes).await,
                Err(error) => Err(error),
            };
            match created {
                Ok(Created::Ours) => {
                    let counts = record.counts.clone();
                    self.take(LogEntry::Rows(record))?;
                    return Ok(counts);
                }
                Ok(Created::Theirs(bytes)) => {
                    let winner = LogEntry::decode(self.ledger.store(), &key, &bytes)?;
                    self.take(winner)?;
                    self.pending = self.next_try(record, batch)?;
                }
                Err(error) => {
                    // The record may exist, so the same bytes must be tried again.
                    self.pending = Some(Pending { record, batch });
                    return Err(error);
                }
            }
        }
        Ok(RowSet::new())
    }

    /// The record for the next index, without rows that were covered meanwhile.
    fn next_try(&self, lost: LogRecord, batch: RecordBatch) -> Result<Option<Pending>> {
        let counts = lost.counts.difference(&self.covered);
        if counts.is_empty() {
            return Ok(None);
        }
        let tally = data::tally(&batch, &counts).map_err(|why| self.bad_batch(&why))?;
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
        let bytes = data::encode(batch).map_err(|why| self.bad_batch(&why))?;
        let mut last = None;
        for _ in 0..UPLOADS_MAX {
            let name = Keys::data_name(&self.attempt, self.data_objects);
            // Increment even if the upload fails: a late put of these bytes must not meet other
            // bytes under the same name.
            self.data_objects += 1;
            let key = self.ledger.keys().data(self.shard, &name);
            if let Err(error) = self.create_own(&key, bytes.clone()).await {
                if !matches!(error, LedgerError::Damaged { .. }) {
                    return Err(error);
                }
                // The object was damaged before it was read back. No record names it yet, so the
                // bytes are uploaded under another name.
                last = Some(error);
                continue;
            }
            let object = DataObject {
                name: name.clone(),
                size: bytes.len() as u64,
                sha256: sha256(&bytes),
            };
            if self.kept.values().map(Bytes::len).sum::<usize>() + bytes.len() <= KEPT_BYTES_MAX {
                self.kept.insert(name, bytes);
            }
            return Ok(object);
        }
        Err(last.unwrap_or_else(|| self.bad_batch("no upload is allowed")))
    }

    /// Creates an object under a name that only this worker knows.
    async fn create_own(&self, key: &str, bytes: Bytes) -> Result<()> {
        match self.ledger.store().create(key, bytes).await? {
            Created::Ours => Ok(()),
            Created::Theirs(_) => Err(LedgerError::damaged(format!(
                "`{}` holds other bytes than this worker wrote, although only this worker knows the name",
                self.ledger.store().address(key)
            ))),
        }
    }

    /// Appends the entry that was read or created at the next index, after checking it.
    pub(super) fn take(&mut self, entry: LogEntry) -> Result<()> {
        let key = self.ledger.keys().log(self.shard, self.next_index());
        let wrong = |why: String| {
            LedgerError::damaged(format!(
                "`{}` is no record of this log: {why}",
                self.ledger.store().address(&key)
            ))
        };
        let (job, shard, index) = entry.place();
        if *job != self.ledger.job().job || shard != self.shard || index != self.next_index() {
            return Err(wrong(format!("it names job {job}, shard {shard}, index {index}")));
        }
        match &entry {
            LogEntry::Rows(record) => {
                let outside = record.counts.difference(&self.to_do);
                let twice = record.counts.intersection(&self.covered);
                if !outside.is_empty() || !twice.is_empty() {
                    return Err(wrong(format!("rows {} are not open", outside.union(&twice))));
                }
                self.covered = self.covered.union(&record.counts);
            }
            LogEntry::Void(void) => {
                let voided = self.records().find(|record| record.index == void.voids);
                let voided = voided.ok_or_else(|| wrong(format!("no record counts at index {}", void.voids)))?;
                self.covered = self.covered.difference(&voided.counts);
                self.voided.insert(void.voids);
                self.suspects.remove(&void.voids);
            }
        }
        self.entries.push(entry);
        Ok(())
    }

    pub(super) fn next_index(&self) -> u32 {
        self.entries.len() as u32
    }

    fn bad_batch(&self, why: &str) -> LedgerError {
        LedgerError::damaged(format!(
            "shard {}: a batch of finished rows cannot be logged: {why}",
            self.shard
        ))
    }

    /// The data objects of the log with their rows that count, verified against the records.
    pub(super) async fn counted(&self) -> Result<Counted> {
        let (mut whole, mut damaged) = (Vec::new(), Vec::new());
        let mut bytes_in_memory = 0;
        for record in self.records() {
            let key = self.ledger.keys().data(self.shard, &record.data.name);
            let bytes = match self.kept.get(&record.data.name) {
                Some(bytes) => Some(bytes.clone()),
                None => self.ledger.store().get(&key, DATA_BYTES_MAX).await?,
            };
            match bytes.filter(|bytes| record.data.is(bytes)) {
                None => damaged.push(record.index),
                Some(bytes) => {
                    let batch = data::decode(bytes).map_err(|why| {
                        LedgerError::damaged(format!("`{}`: {why}", self.ledger.store().address(&key)))
                    })?;
                    bytes_in_memory += batch.get_array_memory_size();
                    if bytes_in_memory > ROWS_BYTES_MAX {
                        return Err(LedgerError::damaged(format!(
                            "`{}`: the data objects of shard {} take more than {ROWS_BYTES_MAX} bytes in memory, which no work of \
                             gristmill does",
                            self.ledger.store().address(&key),
                            self.shard
                        )));
                    }
                    whole.push((batch, record.counts.clone()));
                }
            }
        }
        Ok(if damaged.is_empty() {
            Counted::Whole(whole)
        } else {
            Counted::Damaged(damaged)
        })
    }
}

/// The data of the rows that a log counts.
pub(super) enum Counted {
    Whole(Rows),
    /// The data objects of the records at these indices are missing or have other bytes.
    Damaged(Vec<u32>),
}
