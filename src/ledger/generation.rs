//! Generations: a retry runs only the failed (or the truncated) rows of a finished job again.
//!
//! `gen/001.json` names these rows. It is created once, and only after the previous generation is
//! published completely. The logs and commits of the retry have keys below `gen/001/`. The part of
//! a shard keeps its key: it is replaced on the condition that the previous part is still there.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use futures::{StreamExt, TryStreamExt};

use super::data;
use super::error::{LedgerError, Result};
use super::finish::READS_AT_ONCE;
use super::keys::{Id, sha256};
use super::lines;
use super::log::{CountedData, ShardLog};
use super::record::{CleanedMark, Commit, Generation, RetriedShard, Tally, VERSION, VERSION_2, decode, read};
use super::rowset::RowSet;
use super::store::{CreateOutcome, MAX_OBJECT_BYTES};
use super::{Inner, Ledger};

/// Maximum number of shards whose rows are in memory while a retry is planned.
const SHARDS_AT_ONCE: usize = 4;
/// Maximum number of retries: keys have three digits for a generation.
const GENERATIONS_MAX: u32 = 999;

/// Batches, each with the set of its selected rows.
pub(super) type SelectedRows = Vec<(RecordBatch, RowSet)>;

impl Ledger {
    /// 0 for the first run, else the number of the retry.
    pub fn generation(&self) -> u32 {
        self.inner.generations.len() as u32
    }

    /// The ledger of the same job at another generation. An unknown generation is an error: its
    /// number may come from a message.
    pub async fn open_generation(&self, generation: u32) -> Result<Ledger> {
        let mut ledger = self.up_to_generation(generation.min(self.generation()));
        while ledger.generation() < generation {
            ledger = ledger.next_generation().await?.ok_or_else(|| {
                let name = &self.job().name;
                LedgerError::damaged(format!("job `{name}` has no generation {generation}"))
            })?;
        }
        Ok(ledger)
    }

    /// The ledger of the same job at its newest generation. One request if this is the newest.
    pub async fn newest_generation(&self) -> Result<Ledger> {
        let mut ledger = self.clone();
        while let Some(next) = ledger.next_generation().await? {
            ledger = next;
        }
        Ok(ledger)
    }

    /// Shards with rows to do in this generation, ascending.
    pub fn shard_numbers(&self) -> Vec<u32> {
        match self.inner.generations.last() {
            None => (0..self.job().shards.len() as u32).collect(),
            Some(retry) => retry.shards.iter().map(|retried| retried.shard).collect(),
        }
    }

    /// The rows of a shard to do in this generation.
    pub fn rows_to_do(&self, shard: u32) -> RowSet {
        match self.inner.generations.last() {
            None => self.all_rows(shard),
            Some(_) => self
                .retried_shard(shard)
                .map_or_else(RowSet::new, |retried| retried.rows.clone()),
        }
    }

    /// The minimum `max_tokens` for rows of this generation, if this or an earlier retry raised it.
    pub fn max_tokens(&self) -> Option<u32> {
        self.inner.generations.iter().filter_map(|retry| retry.max_tokens).max()
    }

    /// The minimum `max_tokens` that this generation set, if it retries truncated rows.
    pub fn raised_max_tokens(&self) -> Option<u32> {
        self.inner.generations.last().and_then(|retry| retry.max_tokens)
    }

    /// Begins the next generation with all published rows that did not succeed. `None`: there are
    /// no such rows. If a retry is not finished, returns that retry. Fails if the first generation
    /// is not finished.
    pub async fn retry(&self) -> Result<Option<Ledger>> {
        self.retry_rows(None).await
    }

    /// As [`Ledger::retry`], for all rows with a truncated completion, whatever their status. They
    /// run with at least `max_tokens`. Fails with `Conflict` if an unfinished retry is for failed
    /// rows or has another `max_tokens`.
    pub async fn retry_truncated(&self, max_tokens: u32) -> Result<Option<Ledger>> {
        self.retry_rows(Some(max_tokens)).await
    }

    /// `max_tokens`: retry truncated rows with this minimum. `None`: retry failed rows with
    /// unchanged limits.
    async fn retry_rows(&self, max_tokens: Option<u32>) -> Result<Option<Ledger>> {
        let newest = self.newest_generation().await?;
        if newest.success().await?.is_none() {
            if newest.generation() > 0 {
                newest.check_same_retry(max_tokens)?;
                return Ok(Some(newest));
            }
            return Err(LedgerError::conflict(format!(
                "job `{}` is not finished: only rows of a finished job can be retried",
                self.job().name
            )));
        }
        let generation = newest.generation() + 1;
        if generation > GENERATIONS_MAX {
            return Err(LedgerError::stop(format!(
                "a job is retried {GENERATIONS_MAX} times at most"
            )));
        }
        let shards = match newest.rows_to_retry(max_tokens.is_some()).await {
            Ok(shards) => shards,
            // Another retry may have begun and replaced parts during these reads.
            Err(error @ LedgerError::Damaged { .. }) => {
                let next = newest.next_generation().await?.ok_or(error)?;
                next.check_same_retry(max_tokens)?;
                return Ok(Some(next));
            }
            Err(error) => return Err(error),
        };
        if shards.is_empty() {
            return Ok(None);
        }
        let record = Generation {
            // A gristmill that does not know `max_tokens` would truncate the rows again, so it must
            // refuse the record.
            v: max_tokens.map_or(VERSION, |_| VERSION_2),
            job: self.job().job.clone(),
            generation,
            nonce: Id::random()?,
            max_tokens,
            shards,
            blocks: Vec::new(),
        };
        let key = self.keys().generation(generation);
        let bytes = self.encode_retry(&record, &key).await?;
        let record = match self.store().create(&key, bytes).await? {
            CreateOutcome::Ours => record,
            // Another process began a retry, most likely of the same rows.
            CreateOutcome::Theirs(bytes) => self.with_block_rows(decode(self.store(), &key, &bytes)?).await?,
        };
        let next = newest.with_next_generation(record, &key)?;
        next.check_same_retry(max_tokens)?;
        Ok(Some(next))
    }

    /// If `max_tokens` is set, checks that this generation, which another process may have begun,
    /// is a retry of truncated rows with the same value.
    fn check_same_retry(&self, max_tokens: Option<u32>) -> Result<()> {
        if max_tokens.is_none() || self.raised_max_tokens() == max_tokens {
            return Ok(());
        }
        Err(LedgerError::conflict(format!(
            "job `{}`: retry {} has not finished, and it retries other rows or uses another `max_tokens`: finish it first",
            self.job().name,
            self.generation()
        )))
    }

    /// This ledger at this or an earlier generation.
    pub(super) fn up_to_generation(&self, generation: u32) -> Ledger {
        self.with_generations(self.inner.generations[..generation as usize].to_vec())
    }

    async fn next_generation(&self) -> Result<Option<Ledger>> {
        let key = self.keys().generation(self.generation() + 1);
        match read::<Generation>(self.store(), &key).await? {
            Some(record) => self
                .with_next_generation(self.with_block_rows(record).await?, &key)
                .map(Some),
            None => Ok(None),
        }
    }

    fn with_next_generation(&self, record: Generation, key: &str) -> Result<Ledger> {
        let is_foreign = |retried: &RetriedShard| !retried.rows.difference(&self.all_rows(retried.shard)).is_empty();
        if record.job != self.job().job
            || record.generation != self.generation() + 1
            || record.generation > GENERATIONS_MAX
            || record.shards.iter().any(is_foreign)
        {
            let address = self.store().address(key);
            return Err(LedgerError::damaged(format!("`{address}` is no retry of this job")));
        }
        let mut generations = self.inner.generations.clone();
        generations.push(Arc::new(record));
        Ok(self.with_generations(generations))
    }

    fn with_generations(&self, generations: Vec<Arc<Generation>>) -> Ledger {
        let old = &self.inner;
        let inner = Inner {
            store: old.store.clone(),
            keys: old.keys.at_generation(generations.len() as u32),
            job: old.job.clone(),
            generations,
            job_sha256: old.job_sha256.clone(),
            job_is_signed: old.job_is_signed,
            job_version: old.job_version.clone(),
            commit_cache: Mutex::default(),
            is_result_written: AtomicBool::default(),
        };
        Ledger { inner: Arc::new(inner) }
    }

    /// All rows of a shard; empty if the job has no such shard.
    pub(super) fn all_rows(&self, shard: u32) -> RowSet {
        self.job()
            .shards
            .get(shard as usize)
            .map_or_else(RowSet::new, |planned| {
                RowSet::from_range(planned.first_row..planned.first_row + planned.rows)
            })
    }

    /// The rows of a shard that this generation retries.
    pub(super) fn retried_shard(&self, shard: u32) -> Option<&RetriedShard> {
        let shards = &self.inner.generations.last()?.shards;
        let index = shards.binary_search_by_key(&shard, |retried| retried.shard).ok()?;
        Some(&shards[index])
    }

    /// Counts of the rows that this generation retries, as published by earlier generations.
    pub fn retried_tally(&self) -> Tally {
        let mut sum = Tally::default();
        for retried in self.inner.generations.last().iter().flat_map(|retry| &retry.shards) {
            sum.add(&retried.tally);
        }
        sum
    }

    /// The newest earlier generation that has rows of the shard.
    pub(super) fn earlier_generation_with(&self, shard: u32) -> Option<Ledger> {
        let earlier = (0..self.generation())
            .rev()
            .map(|generation| self.up_to_generation(generation));
        earlier.into_iter().find(|ledger| !ledger.rows_to_do(shard).is_empty())
    }

    /// The rows to retry, by shard: failed rows, or with `truncated` those with a truncated
    /// completion. This generation must be published completely.
    async fn rows_to_retry(&self, truncated: bool) -> Result<Vec<RetriedShard>> {
        // Number of such rows in a commit. `None`: the commit does not record it.
        let count = move |tally: &Tally| {
            if truncated {
                tally.truncated
            } else {
                Some(tally.rows() - tally.succeeded)
            }
        };
        let commits = self.current_commits().await?;
        let candidates = commits.into_iter().filter(|commit| count(&commit.tally) != Some(0));
        let schema = lines::tally_columns();
        let mut shards: Vec<RetriedShard> = futures::stream::iter(candidates.collect::<Vec<_>>())
            .map(|commit| {
                let (ledger, schema) = (self.clone(), schema.clone());
                async move {
                    let shard = commit.shard;
                    let (mut rows, mut tally) = (RowSet::new(), Tally::default());
                    let damaged = |why: String| LedgerError::damaged(format!("shard {shard}: {why}"));
                    for (batch, counts) in ledger.current_rows(shard, ledger.all_rows(shard), &schema).await? {
                        let selected = if truncated {
                            data::truncated_rows(&batch, &counts).map_err(damaged)?
                        } else {
                            data::failed_rows(&batch, &counts).map_err(damaged)?
                        };
                        tally.add(&data::tally(&batch, &selected).map_err(damaged)?);
                        rows = rows.union(&selected);
                    }
                    if count(&commit.tally).is_some_and(|count| count != rows.len()) {
                        return Err(damaged("its rows are not as committed".into()));
                    }
                    Ok(RetriedShard { shard, rows, tally })
                }
            })
            .buffered(SHARDS_AT_ONCE)
            .try_collect()
            .await?;
        // A shard whose commit has no count may turn out to have no such rows.
        shards.retain(|retried| !retried.rows.is_empty());
        Ok(shards)
    }

    /// The results of these rows of a shard, as of this generation. Each row comes from the log of
    /// the newest generation that finished it, or from the published part if that log is
    /// incomplete. A row that a retry did not finish keeps its earlier result. Rows read from JSON
    /// lines get the columns of `schema`.
    pub(super) async fn current_rows(&self, shard: u32, rows: RowSet, schema: &SchemaRef) -> Result<SelectedRows> {
        let mut left = rows;
        let mut out = SelectedRows::new();
        for generation in (0..=self.generation()).rev() {
            let ledger = self.up_to_generation(generation);
            let wanted = ledger.rows_to_do(shard).intersection(&left);
            if wanted.is_empty() {
                continue;
            }
            let logged = ledger.logged_rows(shard).await?;
            // Read the mark after the log: `clean` writes it before it removes anything, so the log
            // was complete if there is no mark. If there is one, even a log that looks complete may
            // have been begun anew by a worker that woke late.
            let cleaned = read::<CleanedMark>(self.store(), &ledger.keys().cleaned_mark()).await?;
            let Some(logged) = logged.filter(|_| cleaned.is_none()) else {
                out.push((self.part_rows(shard, schema).await?, left));
                return Ok(out);
            };
            for (batch, rows) in logged {
                let mut rows = rows.intersection(&wanted);
                if generation > 0 {
                    rows = data::finished_rows(&batch, &rows)
                        .map_err(|why| LedgerError::damaged(format!("shard {shard}: {why}")))?;
                }
                left = left.difference(&rows);
                if !rows.is_empty() {
                    out.push((batch, rows));
                }
            }
        }
        Ok(out)
    }

    /// The rows of a committed shard from this generation's own log. `None`: they must come from
    /// the part, because the log has voids or has lost data. After a void the part may hold the
    /// rows of either computation.
    async fn logged_rows(&self, shard: u32) -> Result<Option<SelectedRows>> {
        let log = match ShardLog::load(self, shard).await {
            Err(LedgerError::Damaged { .. }) => return Ok(None),
            log => log?,
        };
        if !log.is_complete() || !log.voided.is_empty() {
            return Ok(None);
        }
        match log.read_counted_data().await? {
            CountedData::Intact(rows) => Ok(Some(rows)),
            CountedData::Damaged(_) => Ok(None),
        }
    }

    /// The rows of the published part, which must be the part of the newest commit, or a part of a
    /// later generation.
    async fn part_rows(&self, shard: u32, schema: &SchemaRef) -> Result<RecordBatch> {
        let commit = self.current_commit(shard).await?;
        let address = self.store().address(&commit.part.name);
        let damaged = |why: &str| LedgerError::damaged(format!("`{address}` {why}"));
        let bytes = self.store().get(&commit.part.name, MAX_OBJECT_BYTES).await?;
        let bytes = bytes.ok_or_else(|| damaged("is missing, though it was committed"))?;
        let is_of_later_generation = || {
            self.read_part(shard, &bytes)
                .is_ok_and(|contents| contents.generation > self.generation())
        };
        if sha256(&bytes) != commit.part.sha256 && !is_of_later_generation() {
            return Err(damaged("is not the part that was committed"));
        }
        let rows = match self.job().part_extension.as_str() {
            "jsonl" => lines::decode(&bytes, self.job().shard(shard)?.first_row, schema),
            _ => data::decode(bytes.clone()),
        };
        rows.map_err(|why| damaged(&why))
    }

    /// The commit of the part that readers see. It is of the newest generation that has rows of the
    /// shard.
    async fn current_commit(&self, shard: u32) -> Result<Commit> {
        let missing = || LedgerError::damaged(format!("the commit of shard {shard} has gone"));
        let ledger = if self.rows_to_do(shard).is_empty() {
            self.earlier_generation_with(shard).ok_or_else(missing)?
        } else {
            self.clone()
        };
        ledger.commit_of(shard).await?.ok_or_else(missing)
    }

    /// The newest commit of every shard, in order: one request per closed block of each generation.
    pub(super) async fn current_commits(&self) -> Result<Vec<Commit>> {
        let mut newest: Vec<Option<Commit>> = vec![None; self.job().shards.len()];
        for generation in 0..=self.generation() {
            let ledger = self.up_to_generation(generation);
            let mut digests = futures::stream::iter(ledger.blocks())
                .map(|block| {
                    let ledger = ledger.clone();
                    async move { ledger.digest(block).await }
                })
                .buffered(READS_AT_ONCE);
            while let Some(digest) = digests.try_next().await? {
                for commit in digest.commits {
                    let shard = commit.shard as usize;
                    newest[shard] = Some(commit);
                }
            }
        }
        let missing = || LedgerError::damaged("a shard is in no digest");
        newest.into_iter().map(|commit| commit.ok_or_else(missing)).collect()
    }
}
