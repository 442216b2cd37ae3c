//! `_gristmill/job.json`: the record, created once, of the job that an output belongs to.
//!
//! See docs/decisions/005-job-record-is-checked-before-writes.md.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use super::bulk;
use super::error::{LedgerError, Result};
use super::keys::{Id, JOB, Keys, SUCCESS, sha256};
use super::record::{JOB_VERSION_3, Record, VERSION, VERSION_2, decode, encode};
use super::store::{CreateOutcome, ObjectVersion, Store};
use super::{Inner, Ledger};
use crate::dataset::layout::Layout;
use crate::dataset::plan::{Format, InputFile, Segment, Shard};
use crate::dataset::store::location::Location;
use crate::signing;

/// Maximum size of a job record: one of a million shards has about 150 MB.
const MAX_JOB_BYTES: u64 = 512 << 20;
/// Maximum number of shards: keys have six digits for a shard.
pub(super) const MAX_SHARDS: usize = 1_000_000;
/// Maximum number of input files, above the number that the patterns of one job may match.
pub(super) const MAX_INPUTS: usize = 2_000_000;
/// Maximum rows per shard, as for `shards.rows` in a job file.
const MAX_SHARD_ROWS: u64 = 1_000_000;
/// Maximum deadline in seconds (100 years). A job file allows at most ten years.
pub(super) const DEADLINE_MAX: u64 = 3_153_600_000;
/// Maximum length of a name, an address or a hash, in bytes.
const TEXT_BYTES_MAX: usize = 16 << 10;

/// What makes two runs the same job. All hashes are SHA-256 in lower-case hex.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct JobIdentity {
    /// Of the job as written.
    pub job_hash: String,
    pub model_hash: String,
    pub tokenizer_hash: String,
    /// Of the chat template, where the job uses one.
    pub template_hash: Option<String>,
    /// The precision that the model runs in, resolved (never `auto`).
    pub precision: String,
    /// The number format of keys and values, where it is not the precision's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_cache: Option<String>,
}

/// Limits of a job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct JobLimits {
    /// Dollars of device time.
    pub usd: Option<f64>,
    /// Since the job was created.
    pub deadline_seconds: Option<u64>,
    #[serde(default)]
    pub unfinished: Unfinished,
    /// Price of a device hour; without one, `usd` cannot be reached. (In `job.json` it stands beside the terms.)
    #[serde(skip)]
    pub usd_per_hour: Option<f64>,
}

/// What becomes of rows that are not finished when a limit is reached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Unfinished {
    /// They stay open: the job can go on with other limits.
    #[default]
    Keep,
    /// They end as `expired`.
    Expire,
}

/// A planned job that has no id yet.
#[derive(Debug, Clone)]
pub struct JobDraft {
    pub name: String,
    pub identity: JobIdentity,
    /// The job with every default filled in; opaque to the ledger.
    pub resolved: Value,
    pub inputs: Vec<InputFile>,
    pub layout: Layout,
    pub shards: Vec<Shard>,
    /// The columns of the output; opaque to the ledger.
    pub columns: Value,
    /// Whether workers that know records only up to version [`VERSION_2`] would write different
    /// parts.
    pub needs_newest_version: bool,
    /// `parquet` or `jsonl`.
    pub part_extension: String,
    /// Price of a device hour, where the job names one.
    pub usd_per_hour: Option<f64>,
    pub limits: JobLimits,
}

/// `job.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::signing::add_signature_field)]
pub struct JobRecord {
    pub v: u32,
    /// Random: no two jobs share one.
    pub job: Id,
    pub name: String,
    #[serde(flatten)]
    pub identity: JobIdentity,
    /// Of the gristmill that planned the job.
    pub version: String,
    pub part_extension: String,
    pub usd_per_hour: Option<f64>,
    /// All limits but the price; see [`JobRecord::limits`].
    #[serde(default)]
    pub terms: JobLimits,
    pub columns: Value,
    pub resolved: Value,
    pub inputs: Vec<InputFile>,
    #[serde(flatten)]
    pub layout: Layout,
    pub shards: Vec<Shard>,
}

impl JobRecord {
    /// Rows of the whole job.
    pub fn rows(&self) -> u64 {
        self.shards.last().map_or(0, |shard| shard.first_row + shard.rows)
    }

    /// The limits that the job began with.
    pub fn limits(&self) -> JobLimits {
        JobLimits {
            usd_per_hour: self.usd_per_hour,
            ..self.terms
        }
    }

    /// The shard table's entry. An unknown index is an error: it may come from a message.
    pub fn shard(&self, shard: u32) -> Result<&Shard> {
        self.shards.get(shard as usize).ok_or_else(|| {
            LedgerError::damaged(format!(
                "job `{}` has {} shards, none is number {shard}",
                self.name,
                self.shards.len()
            ))
        })
    }

    fn from_draft(draft: JobDraft) -> Result<JobRecord> {
        // A gristmill that reads up to `VERSION` would read other rows of these inputs.
        let is_new_input = |input: &InputFile| input.format == Format::Csv || input.compressed.is_some();
        let needs_version_2 = draft.inputs.iter().any(is_new_input);
        let version = if needs_version_2 { VERSION_2 } else { VERSION };
        let has_arrow = draft.inputs.iter().any(|input| input.format == Format::Arrow);
        let needs_version_3 = has_arrow || draft.layout.needs_newest_version() || draft.needs_newest_version;
        let record = JobRecord {
            v: if needs_version_3 { JOB_VERSION_3 } else { version },
            job: Id::random()?,
            name: draft.name,
            identity: draft.identity,
            version: env!("CARGO_PKG_VERSION").to_string(),
            part_extension: draft.part_extension,
            usd_per_hour: draft.usd_per_hour,
            terms: draft.limits,
            columns: draft.columns,
            resolved: draft.resolved,
            inputs: draft.inputs,
            layout: draft.layout,
            shards: draft.shards,
        };
        record
            .check()
            .map_err(|why| LedgerError::stop(format!("cannot plan job `{}`: {why}", record.name)))?;
        Ok(record)
    }
}

impl Record for JobRecord {
    const MAX_BYTES: u64 = MAX_JOB_BYTES;
    const SIGNED: bool = true;
    const NEWEST: u32 = JOB_VERSION_3;

    fn check_bytes(bytes: &[u8]) -> Result<(), String> {
        bulk::check(bytes)
    }

    fn check(&self) -> Result<(), String> {
        self.check_texts()?;
        if !matches!(self.part_extension.as_str(), "parquet" | "jsonl") {
            return Err(format!(
                "`part_extension` is `{}`, not `parquet` or `jsonl`",
                self.part_extension
            ));
        }
        if self.usd_per_hour.is_some_and(|price| !price.is_finite() || price < 0.0) {
            return Err("`usd_per_hour` is not a price".into());
        }
        if self.terms.usd.is_some_and(|usd| !usd.is_finite() || usd < 0.0) {
            return Err("`terms.usd` is not an amount".into());
        }
        if let Some(seconds) = self.terms.deadline_seconds.filter(|&seconds| seconds > DEADLINE_MAX) {
            return Err(format!("`terms.deadline_seconds` is {seconds}: no job waits so long"));
        }
        if self.shards.len() > MAX_SHARDS {
            return Err(format!(
                "{} shards, more than {MAX_SHARDS}: give `shards.rows` a larger value",
                self.shards.len()
            ));
        }
        self.layout.check(&self.inputs)?;
        self.check_shard_table()
    }
}

impl JobRecord {
    /// Checks that the shards hold the rows of the inputs, each once and in order.
    fn check_shard_table(&self) -> Result<(), String> {
        // A job without rows has one empty shard (in an older gristmill, no shard at all).
        let may_be_empty = self.shards.len() == 1;
        let mut next_row = 0u64;
        let mut last = Segment {
            input: 0,
            first_row: 0,
            rows: 0,
            bytes: None,
            line: None,
            picks: None,
        };
        for (number, shard) in self.shards.iter().enumerate() {
            let rows = shard
                .segments
                .iter()
                .try_fold(0u64, |sum, segment| sum.checked_add(segment.taken_rows()));
            let is_empty = shard.rows == 0 && !may_be_empty;
            if shard.first_row != next_row || is_empty || rows != Some(shard.rows) {
                return Err(format!("shard {number} does not continue the rows before it"));
            }
            if shard.rows > MAX_SHARD_ROWS {
                return Err(format!(
                    "shard {number} has {} rows, more than {MAX_SHARD_ROWS}",
                    shard.rows
                ));
            }
            let is_outside = |segment: &Segment| match self.inputs.get(segment.input as usize) {
                Some(input) => segment
                    .first_row
                    .checked_add(segment.rows)
                    .is_none_or(|end| end > input.rows),
                None => true,
            };
            if shard.segments.iter().any(is_outside) {
                return Err(format!("shard {number} names rows that no input of the job has"));
            }
            for segment in &shard.segments {
                let picks = segment.picks.as_deref().unwrap_or_default();
                let is_sorted = picks.windows(2).all(|pair| pair[0] < pair[1]);
                if !is_sorted || picks.last().is_some_and(|last| u64::from(*last) >= segment.rows) {
                    return Err(format!(
                        "shard {number} draws rows that its inputs do not have, or one twice"
                    ));
                }
                if !follows(&last, segment) {
                    return Err(format!(
                        "shard {number} does not go on in input {} where the one before ended",
                        segment.input
                    ));
                }
                last = Segment {
                    picks: None,
                    ..*segment
                };
            }
            next_row = next_row
                .checked_add(shard.rows)
                .filter(|&end| end <= i64::MAX as u64)
                .ok_or("too many rows")?;
        }
        Ok(())
    }

    /// Checks that the texts are short enough, and that the name has no control characters.
    fn check_texts(&self) -> Result<(), String> {
        let JobIdentity {
            job_hash,
            model_hash,
            tokenizer_hash,
            template_hash,
            precision,
            kv_cache,
        } = &self.identity;
        let job_texts = [
            &self.name,
            &self.version,
            job_hash,
            model_hash,
            tokenizer_hash,
            precision,
        ];
        fn of_input(input: &InputFile) -> [Option<&String>; 4] {
            let InputFile {
                url,
                etag,
                version,
                sha256,
                ..
            } = input;
            [Some(url), etag.as_ref(), version.as_ref(), sha256.as_ref()]
        }
        let mut texts = job_texts
            .into_iter()
            .chain(template_hash)
            .chain(kv_cache)
            .chain(self.inputs.iter().flat_map(of_input).flatten());
        match texts.find(|text| text.len() > TEXT_BYTES_MAX) {
            Some(long) => Err(format!(
                "it has a name, an address or a hash of {} bytes, more than {TEXT_BYTES_MAX}",
                long.len()
            )),
            None if self.name.chars().any(char::is_control) => Err("`name` holds control characters".into()),
            None => Ok(()),
        }
    }
}

/// Whether `next` begins where `last` ended, or at the first row of a later input.
fn follows(last: &Segment, next: &Segment) -> bool {
    if next.input == last.input {
        last.first_row.checked_add(last.rows) == Some(next.first_row)
    } else {
        next.input > last.input && next.first_row == 0
    }
}

impl Ledger {
    /// The ledger of the job that `output` belongs to, at its newest generation. `None`: the output
    /// has no job yet.
    pub async fn open(output: &Location) -> Result<Option<Ledger>> {
        Ledger::open_in(Store::new(output)?).await
    }

    /// As [`Ledger::open`], with the retry policy of `store`.
    pub async fn open_in(store: Store) -> Result<Option<Ledger>> {
        match store.get_versioned(JOB, MAX_JOB_BYTES).await? {
            Some((bytes, version)) => Ledger::from_bytes(store, &bytes, version)?
                .newest_generation()
                .await
                .map(Some),
            None => Ok(None),
        }
    }

    fn from_bytes(store: Store, bytes: &[u8], job_version: ObjectVersion) -> Result<Ledger> {
        let job: JobRecord = decode(&store, JOB, bytes)?;
        let keys = Keys::new(&job.job, job.shards.len() as u32, &job.part_extension);
        let inner = Inner {
            store,
            keys,
            job: Arc::new(job),
            generations: Vec::new(),
            job_sha256: sha256(bytes),
            job_is_signed: signing::is_signed(bytes),
            job_version,
            commit_cache: Mutex::default(),
            is_result_written: AtomicBool::default(),
        };
        Ok(Ledger { inner: Arc::new(inner) })
    }

    /// Creates the job at `output`, or opens it if it exists. The returned flag tells whether the
    /// job existed before.
    ///
    /// Fails with `Conflict` if the output belongs to another job, or is a folder with other files.
    /// Fails with `Stop` if the same job has another model, tokenizer, template or number format,
    /// or if the store cannot keep the guarantee.
    pub async fn create_or_resume(output: &Location, draft: JobDraft) -> Result<(Ledger, bool)> {
        Ledger::create_or_resume_in(Store::new(output)?, draft).await
    }

    /// As [`Ledger::create_or_resume`], with the retry policy of `store`.
    pub async fn create_or_resume_in(store: Store, draft: JobDraft) -> Result<(Ledger, bool)> {
        let identity = draft.identity.clone();
        let name = draft.name.clone();
        if let Some(ledger) = Ledger::open_in(store.clone()).await? {
            ledger.check_same_job(&name, &identity)?;
            store.check().await?;
            return Ok((ledger, true));
        }
        let record = JobRecord::from_draft(draft)?;
        let success = store.object_version(SUCCESS).await?.map(|_| SUCCESS.to_string());
        if let Some(found) = store.first_visible().await?.or(success) {
            // Another run may have created the job in between.
            if let Some(ledger) = Ledger::open_in(store.clone()).await? {
                ledger.check_same_job(&name, &identity)?;
                return Ok((ledger, true));
            }
            return Err(LedgerError::conflict(format!(
                "output `{}` holds `{found}`, which no job of gristmill put there: choose an empty folder",
                store.url()
            )));
        }
        store.check().await?;
        let created = store.create(JOB, store.sign(JOB, encode(&record)?)).await?;
        let ledger = Ledger::open_in(store.clone())
            .await?
            .ok_or_else(|| LedgerError::stop(format!("`{}` was removed while in use", store.address(JOB))))?;
        ledger.check_same_job(&name, &identity)?;
        Ok((ledger, created != CreateOutcome::Ours))
    }

    /// Checks that the output belongs to the job with this `name` and `identity`.
    pub fn check_same_job(&self, name: &str, identity: &JobIdentity) -> Result<()> {
        let (job, url) = (self.job(), self.store().url());
        if job.identity.job_hash != identity.job_hash {
            return Err(LedgerError::conflict(format!(
                "output `{url}` belongs to job `{}` ({}, job hash {}), not to job `{name}` (job hash {}): choose \
                 another `output.uri`",
                job.name,
                job.job,
                hash_prefix(&job.identity.job_hash),
                hash_prefix(&identity.job_hash)
            )));
        }
        let pairs = [
            (
                // What `calibrate` measures counts as part of a model in INT8.
                if identity.precision == "int8" {
                    "model, or another `channels.safetensors` beside it"
                } else {
                    "model"
                },
                Some(&job.identity.model_hash),
                Some(&identity.model_hash),
            ),
            (
                "tokenizer",
                Some(&job.identity.tokenizer_hash),
                Some(&identity.tokenizer_hash),
            ),
            (
                "chat template",
                job.identity.template_hash.as_ref(),
                identity.template_hash.as_ref(),
            ),
            ("precision", Some(&job.identity.precision), Some(&identity.precision)),
            (
                "format of keys and values",
                job.identity.kv_cache.as_ref(),
                identity.kv_cache.as_ref(),
            ),
        ];
        match pairs.into_iter().find(|(_, was, is)| was != is) {
            None => Ok(()),
            Some((what, was, is)) => Err(LedgerError::stop(format!(
                "job `{name}` began with another {what} ({}, now {}): use the original one, or choose another \
                 `output.uri`",
                was.map_or("none", |hash| hash_prefix(hash)),
                is.map_or("none", |hash| hash_prefix(hash))
            ))),
        }
    }

    /// Checks that `job.json` is unchanged, so that no part is published to an output that belongs
    /// to another job by now. Reads its bytes only if the store has no ETag for it or the ETag has
    /// changed: the record of a large job has 150 MB.
    pub(super) async fn check_job_unchanged(&self) -> Result<()> {
        let expected = &self.inner.job_version;
        if expected.etag.is_some() && self.store().object_version(JOB).await?.as_ref() == Some(expected) {
            return Ok(());
        }
        let found = self.store().get(JOB, MAX_JOB_BYTES).await?;
        if found.is_some_and(|bytes| sha256(&bytes) == self.inner.job_sha256) {
            return Ok(());
        }
        Err(LedgerError::conflict(format!(
            "`{}` has changed since this worker began job `{}`: this worker publishes nothing more",
            self.store().address(JOB),
            self.job().name
        )))
    }
}

/// The first 12 digits of a hash, for messages.
fn hash_prefix(hash: &str) -> &str {
    hash.get(..12).unwrap_or(hash)
}
