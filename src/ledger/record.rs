//! The ledger's records: one serde type each, with a version, checked when read.
//!
//! See docs/decisions/002-lowest-version-that-reads-right.md.

use bytes::Bytes;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::error::{LedgerError, Result};
use super::keys::{Id, Keys, sha256};
use super::rowset::RowSet;
use super::store::Store;
use crate::dataset::row::RowStatus;
use crate::error_line::short_line;

/// Version of the records written by this gristmill.
pub const VERSION: u32 = 1;
/// Version of records that a gristmill which reads up to [`VERSION`] must refuse, because it would
/// ignore some of their fields, or read other rows.
pub const VERSION_2: u32 = 2;
/// Version of a job for which a gristmill that reads up to [`VERSION_2`] would read other rows or
/// write other parts. Such jobs have Arrow inputs, typed answers, renamed columns, or a
/// [`crate::dataset::layout::Layout`] with any setting besides CSV: for example columns from folder
/// names, or nulls for columns that a file lacks.
pub const JOB_VERSION_3: u32 = 3;
/// Version of a retry whose rows are in block records ([`RetriedRows`]).
pub const RETRY_VERSION_3: u32 = 3;
/// Default maximum size of a record. Even a log record in which every second row of the shard
/// counts is far smaller.
const MAX_RECORD_BYTES: u64 = 16 << 20;

/// Upper bound of a count: no job has so many rows or tokens.
const COUNT_MAX: u64 = 1 << 53;
/// Maximum duration in a record, in seconds (more than 300 years).
const SECONDS_MAX: f64 = 1e10;
/// Maximum size of records whose size is fixed except for texts from people and stores.
pub(super) const SMALL_RECORD_BYTES: u64 = 1 << 20;

/// Maximum size of a data object. The planned size of a part is a quarter of it.
pub(super) const DATA_BYTES_MAX: u64 = 1 << 30;

/// A record of the ledger.
pub trait Record: Serialize + DeserializeOwned {
    /// Maximum size in bytes. A larger object is refused unread.
    const MAX_BYTES: u64 = MAX_RECORD_BYTES;
    /// The newest version of the record that this gristmill reads.
    const NEWEST: u32 = VERSION;
    /// Whether the record directs workers, so that it must be signed if a key is set: see
    /// `signed.rs`.
    const SIGNED: bool = false;

    /// Checks the bytes before they are deserialized. The error is one line.
    fn check_bytes(_: &[u8]) -> Result<(), String> {
        Ok(())
    }

    /// Checks the constraints that the types do not express. The error is one line.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }
}

/// Encodes `record` as compact JSON with a newline at the end.
pub fn encode<R: Record>(record: &R) -> Result<Bytes> {
    let mut bytes =
        serde_json::to_vec(record).map_err(|error| LedgerError::stop(format!("cannot write a record: {error}")))?;
    bytes.push(b'\n');
    #[cfg(feature = "faults")]
    let bytes = crate::faults::switches::as_next_version(bytes, VERSION, R::NEWEST + 1);
    Ok(bytes.into())
}

/// The newest version of a record that this process reads, with the fault switch applied.
fn version_max<R: Record>() -> u32 {
    #[cfg(feature = "faults")]
    if crate::faults::is_switched_on("next-version") {
        return R::NEWEST + 1;
    }
    R::NEWEST
}

/// Decodes and checks the record in `bytes`, which were read from `key` of `store`.
pub fn decode<R: Record>(store: &Store, key: &str, bytes: &[u8]) -> Result<R> {
    #[derive(Deserialize)]
    struct Versioned {
        v: u64,
    }
    let damaged = |why: String| {
        let why = short_line(&why);
        LedgerError::damaged(format!("`{}` is no valid record: {why}", store.address(key)))
    };
    // Check the signature before any parsing: somebody without the key may have written the bytes.
    if R::SIGNED {
        store.check_signature(key, bytes)?;
    }
    // Check the version before the rest: a newer record may differ in all other fields.
    let Versioned { v } = serde_json::from_slice(bytes).map_err(|error| damaged(error.to_string()))?;
    let known = version_max::<R>();
    if v > u64::from(known) {
        return Err(LedgerError::Newer {
            key: store.address(key),
            found: v,
            known,
        });
    }
    R::check_bytes(bytes).map_err(damaged)?;
    let record: R = serde_json::from_slice(bytes).map_err(|error| damaged(error.to_string()))?;
    record.check().map_err(damaged)?;
    Ok(record)
}

/// Reads the record at `key`. `None`: there is no object.
pub async fn read<R: Record>(store: &Store, key: &str) -> Result<Option<R>> {
    match store.get(key, R::MAX_BYTES).await? {
        Some(bytes) => decode(store, key, &bytes).map(Some),
        None => Ok(None),
    }
}

/// Rows by status, and their tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Tally {
    pub succeeded: u64,
    pub invalid_output: u64,
    pub errored: u64,
    pub expired: u64,
    pub cancelled: u64,
    pub prompt_tokens: u64,
    /// Of the prompt tokens, those whose computation was shared.
    pub cached_tokens: u64,
    pub completion_tokens: u64,
    /// Rows, of whatever status, with a completion that `max_tokens` or the context cut off (`finish_reason` is `length`).
    /// `None`: some of them were counted by a gristmill that did not look.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub truncated: Option<u64>,
}

impl Default for Tally {
    /// The counts of no rows. Their truncated count is known to be 0.
    fn default() -> Tally {
        Tally {
            succeeded: 0,
            invalid_output: 0,
            errored: 0,
            expired: 0,
            cancelled: 0,
            prompt_tokens: 0,
            cached_tokens: 0,
            completion_tokens: 0,
            truncated: Some(0),
        }
    }
}

impl Tally {
    /// All rows.
    pub fn rows(&self) -> u64 {
        RowStatus::ALL
            .iter()
            .fold(0, |sum: u64, &status| sum.saturating_add(self.rows_with(status)))
    }

    /// Checks that the counts are small enough to be summed.
    pub(super) fn check(&self) -> Result<(), String> {
        let counts = [
            self.rows(),
            self.prompt_tokens,
            self.cached_tokens,
            self.completion_tokens,
            self.truncated.unwrap_or(0),
        ];
        match counts.into_iter().find(|count| *count > COUNT_MAX) {
            Some(count) => Err(format!("it counts {count} rows or tokens, more than {COUNT_MAX}")),
            None => Ok(()),
        }
    }

    /// Rows of one status.
    pub fn rows_with(&self, status: RowStatus) -> u64 {
        match status {
            RowStatus::Succeeded => self.succeeded,
            RowStatus::InvalidOutput => self.invalid_output,
            RowStatus::Errored => self.errored,
            RowStatus::Expired => self.expired,
            RowStatus::Cancelled => self.cancelled,
        }
    }

    /// Counts one row of `status`.
    pub fn add_row(&mut self, status: RowStatus) {
        match status {
            RowStatus::Succeeded => self.succeeded += 1,
            RowStatus::InvalidOutput => self.invalid_output += 1,
            RowStatus::Errored => self.errored += 1,
            RowStatus::Expired => self.expired += 1,
            RowStatus::Cancelled => self.cancelled += 1,
        }
    }

    /// Adds `other`, saturating because it may come from foreign bytes.
    pub fn add(&mut self, other: &Tally) {
        self.combine(other, u64::saturating_add);
    }

    /// Subtracts `other`, saturating.
    pub fn subtract(&mut self, other: &Tally) {
        self.combine(other, u64::saturating_sub);
    }

    /// Replaces each count by `change` of both counts.
    fn combine(&mut self, other: &Tally, change: fn(u64, u64) -> u64) {
        for (mine, theirs) in [
            (&mut self.succeeded, other.succeeded),
            (&mut self.invalid_output, other.invalid_output),
            (&mut self.errored, other.errored),
            (&mut self.expired, other.expired),
            (&mut self.cancelled, other.cancelled),
            (&mut self.prompt_tokens, other.prompt_tokens),
            (&mut self.cached_tokens, other.cached_tokens),
            (&mut self.completion_tokens, other.completion_tokens),
        ] {
            *mine = change(*mine, theirs);
        }
        let truncated = self.truncated.zip(other.truncated);
        self.truncated = truncated.map(|(mine, theirs)| change(mine, theirs));
    }

    /// Whether both can be counts of the same rows. An unknown `truncated` agrees with any value.
    pub fn agrees_with(&self, other: &Tally) -> bool {
        let truncated = self.truncated.or(other.truncated);
        let known = |tally: &Tally| Tally {
            truncated: tally.truncated.or(truncated),
            ..*tally
        };
        known(self) == known(other)
    }
}

/// A Parquet file of finished rows below `data/`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DataObject {
    pub name: String,
    pub size: u64,
    pub sha256: String,
}

impl DataObject {
    /// Whether `bytes` have the recorded size and hash.
    pub(super) fn matches(&self, bytes: &[u8]) -> bool {
        bytes.len() as u64 == self.size && sha256(bytes) == self.sha256
    }
}

/// `attempts/{attempt}.json`: written before these rows go to the device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct AttemptRecord {
    pub v: u32,
    pub job: Id,
    pub shard: u32,
    pub attempt: Id,
    pub worker: String,
    /// The rows about to run.
    pub rows: RowSet,
    /// Nothing else is on the device while they run.
    pub alone: bool,
    /// Attempts that were alone with these rows, and were known to be dead when this one began.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<Id>,
    /// Which process the worker is, in words that only programs on its machine understand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<String>,
    /// How often the worker writes its spending at least while it lives, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signs_every: Option<f64>,
}

/// The worker that makes an attempt.
#[derive(Debug, Clone, PartialEq)]
pub struct AttemptWorker {
    /// 1 to 64 letters, digits, `-` and `_`.
    pub worker: String,
    /// See [`AttemptRecord::process`].
    pub process: Option<String>,
    /// Maximum time in seconds between two writes of the worker's spending.
    pub heartbeat_seconds: Option<f64>,
}

impl From<&str> for AttemptWorker {
    /// A worker with a name only.
    fn from(worker: &str) -> AttemptWorker {
        AttemptWorker {
            worker: worker.into(),
            process: None,
            heartbeat_seconds: None,
        }
    }
}

impl Record for AttemptRecord {
    fn check(&self) -> Result<(), String> {
        if !super::keys::is_worker_name(&self.worker) {
            return Err("`worker` is not a worker's name".into());
        }
        match self.signs_every {
            Some(seconds) if !(0.0..=SECONDS_MAX).contains(&seconds) => Err("`signs_every` is not a duration".into()),
            _ => Ok(()),
        }
    }
}

/// `attempts/{attempt}.end.json`: the attempt ended cleanly.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AttemptEnd {
    pub v: u32,
    pub attempt: Id,
}

impl Record for AttemptEnd {
    const MAX_BYTES: u64 = SMALL_RECORD_BYTES;
}

/// `commits/{block}/000042.json`: the shard is done, and this is its part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Commit {
    pub v: u32,
    pub job: Id,
    pub shard: u32,
    pub part: DataObject,
    /// Over the whole part.
    pub tally: Tally,
    /// The generation that published the part.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub generation: u32,
    /// The part's ETag as the store gave it, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part_etag: Option<String>,
    /// Over the rows that this generation did anew; none in the first generation, which does all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retried: Option<Tally>,
}

impl Record for Commit {
    const MAX_BYTES: u64 = SMALL_RECORD_BYTES;

    fn check(&self) -> Result<(), String> {
        self.tally.check()?;
        self.retried.iter().try_for_each(Tally::check)
    }
}

/// `digests/{block}.json`: all commits of a full block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Digest {
    pub v: u32,
    pub job: Id,
    pub block: u32,
    /// In the order of shards.
    pub commits: Vec<Commit>,
    pub tally: Tally,
}

impl Record for Digest {
    fn check(&self) -> Result<(), String> {
        self.tally.check()?;
        self.commits.iter().try_for_each(Record::check)
    }
}

/// `_SUCCESS`: every row is published.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Success {
    pub v: u32,
    pub job: Id,
    pub name: String,
    pub rows: u64,
    pub parts: u32,
    #[serde(flatten)]
    pub tally: Tally,
    /// Device seconds of all workers.
    pub seconds: f64,
    /// Where the job has a price.
    pub usd: Option<f64>,
    pub job_hash: String,
    pub model_hash: String,
    pub tokenizer_hash: String,
    pub template_hash: Option<String>,
    /// SHA-256 over the lines `NAME SIZE SHA256` of all parts, in order.
    pub parts_sha256: String,
    /// The newest generation that is published.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub generation: u32,
}

impl Record for Success {
    const MAX_BYTES: u64 = SMALL_RECORD_BYTES;

    fn check(&self) -> Result<(), String> {
        if self.tally.rows() != self.rows {
            return Err("the statuses do not add up to `rows`".into());
        }
        if !is_amount(self.seconds) || !self.usd.is_none_or(is_amount) {
            return Err("`seconds` or `usd` is not an amount".into());
        }
        self.tally.check()
    }
}

/// `gen/001.json`: a retry, and the rows that it does anew.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::signing::add_signature_field)]
pub struct Generation {
    pub v: u32,
    pub job: Id,
    /// 1 for the first retry.
    pub generation: u32,
    pub nonce: Id,
    /// The least `max_tokens` of its rows, and of those of later generations, where the retry raised it (`v` is 2 then).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u32>,
    /// Shards with rows to do, ascending; none where `blocks` name the records that hold them.
    pub shards: Vec<RetriedShard>,
    /// Of a retry of very many rows (`v` is 3 then): the records of its shards, a block of 100 each, ascending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<RetriedBlock>,
}

/// Which record holds the rows of one block of shards that a retry does anew.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RetriedBlock {
    pub block: u32,
    pub size: u64,
    pub sha256: String,
}

/// `gen/001/rows/{nonce}-000000.json`: one block of a retry, under a name that no other retry can have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RetriedRows {
    pub v: u32,
    pub job: Id,
    pub generation: u32,
    pub block: u32,
    /// As in the retry's own record.
    pub shards: Vec<RetriedShard>,
}

/// Unsigned, because the signed record of the retry names its hash.
impl Record for RetriedRows {
    const MAX_BYTES: u64 = 512 << 20;

    fn check(&self) -> Result<(), String> {
        if self
            .shards
            .iter()
            .all(|retried| Keys::block_of(retried.shard) == self.block)
        {
            check_shards(&self.shards)
        } else {
            Err(format!("it names shards that are not of block {}", self.block))
        }
    }
}

/// Checks that these can be the shards of a retry.
pub(super) fn check_shards(shards: &[RetriedShard]) -> Result<(), String> {
    if shards.is_empty() {
        return Err("it retries nothing".into());
    }
    if !shards.is_sorted_by(|a, b| a.shard < b.shard) {
        return Err("its shards are not in ascending order".into());
    }
    shards.iter().try_for_each(|retried| retried.tally.check())?;
    match shards
        .iter()
        .find(|s| s.rows.is_empty() || s.tally.rows() != s.rows.len())
    {
        Some(wrong) => Err(format!("the counts of shard {} do not match its rows", wrong.shard)),
        None => Ok(()),
    }
}

/// The rows of one shard that a retry does anew.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RetriedShard {
    pub shard: u32,
    pub rows: RowSet,
    /// Over these rows as they were published when the retry began.
    pub tally: Tally,
}

impl Record for Generation {
    const MAX_BYTES: u64 = 512 << 20;
    const NEWEST: u32 = RETRY_VERSION_3;
    const SIGNED: bool = true;

    fn check(&self) -> Result<(), String> {
        if self.generation == 0 {
            return Err("it retries nothing".into());
        }
        match self.blocks.is_empty() {
            true => check_shards(&self.shards),
            false if self.v < RETRY_VERSION_3 || !self.shards.is_empty() => {
                Err("it must name either shards or, from version 3 on, blocks".into())
            }
            false if !self.blocks.is_sorted_by(|a, b| a.block < b.block) => {
                Err("its blocks are not in ascending order".into())
            }
            false => Ok(()),
        }
    }
}

/// `cleaned.json`: the generation's logs, data and attempts may be gone; its rows are in the parts alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CleanedMark {
    pub v: u32,
    pub job: Id,
}

impl Record for CleanedMark {
    const MAX_BYTES: u64 = SMALL_RECORD_BYTES;
}

/// Whether `value` is a finite amount of money or time, at least 0, that can be summed.
fn is_amount(value: f64) -> bool {
    value.is_finite() && value >= 0.0
}

pub(super) fn is_zero(number: &u32) -> bool {
    *number == 0
}

pub(super) fn is_false(flag: &bool) -> bool {
    !*flag
}

/// `spend/{worker}.json`: cumulative, rewritten by that worker alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Spend {
    pub v: u32,
    pub worker: String,
    /// Seconds of device time that this job is charged with.
    pub device_seconds: f64,
    /// The worker has left.
    #[serde(default, skip_serializing_if = "is_false")]
    pub ended: bool,
}

impl Record for Spend {
    const MAX_BYTES: u64 = SMALL_RECORD_BYTES;

    fn check(&self) -> Result<(), String> {
        if (0.0..=SECONDS_MAX).contains(&self.device_seconds) {
            Ok(())
        } else {
            Err("`device_seconds` is not a duration".into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_truncated_count_makes_the_sum_unknown() {
        let of = |truncated| Tally {
            succeeded: 3,
            truncated,
            ..Tally::default()
        };
        let mut sum = Tally::default();
        sum.add(&of(Some(2)));
        sum.add(&of(Some(1)));
        assert_eq!((sum.succeeded, sum.truncated), (6, Some(3)));
        sum.subtract(&of(Some(1)));
        assert_eq!(sum.truncated, Some(2));
        sum.add(&of(None));
        assert_eq!((sum.succeeded, sum.truncated), (6, None));
        let older: Tally = serde_json::from_value(serde_json::json!({
            "succeeded": 3, "invalid_output": 0, "errored": 0, "expired": 0, "cancelled": 0,
            "prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0,
        }))
        .unwrap();
        assert_eq!(older, of(None));
        assert!(of(None).agrees_with(&of(Some(2))) && of(Some(2)).agrees_with(&of(Some(2))));
        assert!(!of(Some(1)).agrees_with(&of(Some(2))));
        assert!(!of(None).agrees_with(&Tally::default()));
    }
}
