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
use super::log::{Counted, ShardLog};
use super::record::{CleanedMark, Commit, Generation, RetriedShard, Tally, VERSION, VERSION_MORE, decode, read};
use super::rowset::RowSet;
use super::store::{Created, MAX_OBJECT_BYTES};
use super::{Inner, Ledger};

/// Maximum number of shards whose rows are in memory while a retry is planned.
const SHARDS_AT_ONCE: usize = 4;
/// Maximum number of retries: keys have three digits for a generation.
const GENERATIONS_MAX: u32 = 999;

/// Batches, each with the subset of its rows that is selected.
pub(super) type Rows = Vec<(RecordBatch, RowSet)>;

impl Ledger {
    /// 0 for the first run, else the number of the retry.
    pub fn generation(&self) -> u32 {
        self.inner.generations.len() as u32
    }

    /// The ledger of the same job at another generation. An unknown generation is an error, because
    /// the number may come from a message.
    pub async fn at(&self, generation: u32) -> Result<Ledger> {
        let mut ledger = self.at_generation(generation.min(self.generation()));
        while ledger.generation() < generation {
            ledger = ledger.next().await?.ok_or_else(|| {
                let name = &self.job().name;
                LedgerError::damaged(format!("job `{name}` has no generation {generation}"))
            })?;
        }
        Ok(ledger)
    }

    /// The ledger of the same job at its newest generation: one request if there is no newer one.
    pub async fn newest(&self) -> Result<Ledger> {
        let mut ledger = self.clone();
        while let Some(next) = ledger.next().await? {
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
                .retried(shard)
                .map_or_else(RowSet::new, |retried| retried.rows.clone()),
        }
    }

    /// The minimum `max_tokens` for rows of this generation, if this or an earlier retry raised it.
    pub fn max_tokens(&self) -> Option<u32> {
        self.inner.generations.iter().filter_map(|retry| retry.max_tokens).max()
    }

    /// The minimum `max_tokens` that this very generation set, if it retries truncated rows.
    pub fn raises_to(&self) -> Option<u32> {
        self.inner.generations.last().and_then(|retry| retry.max_tokens)
    }

    /// Begins the next generation with all published rows that did not succeed. `None`: there are
    /// no such rows. If a retry is under way, returns that retry. It is an error if the first
    /// generation is not finished.
    pub async fn retry(&self) -> Result<Option<Ledger>> {
        self.retry_rows(None).await
    }

    /// As [`Ledger::retry`], for all rows with a truncated completion, whatever their status. They
    /// run with at least `max_tokens`. If a retry of failed rows or with another `max_tokens` is
    /// under way, returns a `Conflict`.
    pub async fn retry_truncated(&self, max_tokens: u32) -> Result<Option<Ledger>> {
        self.retry_rows(Some(max_tokens)).await
    }

    /// `max_tokens`: retry truncated rows with this minimum. `None`: retry failed rows with
    /// unchanged limits.
    async fn retry_rows(&self, max_tokens: Option<u32>) -> Result<Option<Ledger>> {
        let newest = self.newest().await?;
        if newest.success().await?.is_none() {
            if newest.generation() > 0 {
                newest.check_raises_to(max_tokens)?;
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
                let next = newest.next().await?.ok_or(error)?;
                next.check_raises_to(max_tokens)?;
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
            v: max_tokens.map_or(VERSION, |_| VERSION_MORE),
            job: self.job().job.clone(),
            generation,
            nonce: Id::random()?,
            max_tokens,
            shards,
            blocks: Vec::new(),
        };
        let key = self.keys().generation(generation);
        let bytes = self.written(&record, &key).await?;
        let record = match self.store().create(&key, bytes).await? {
            Created::Ours => record,
            // Another process began a retry, most likely of the same rows.
            Created::Theirs(bytes) => self.whole(decode(self.store(), &key, &bytes)?).await?,
        };
        let next = newest.with_next_generation(record, &key)?;
        next.check_raises_to(max_tokens)?;
        Ok(Some(next))
    }

    /// With `max_tokens`, checks that this generation, perhaps begun by another process, is a retry
    /// of truncated rows with the same value.
    fn check_raises_to(&self, max_tokens: Option<u32>) -> Result<()> {
        if max_tokens.is_none() || self.raises_to() == max_tokens {
            return Ok(());
        }
        Err(LedgerError::conflict(format!(
            "job `{}`: retry {} is under way and was made for other rows or another `max_tokens`: finish it first",
            self.job().name,
            self.generation()
        )))
    }

    /// This ledger at an earlier generation.
    pub(super) fn at_generation(&self, generation: u32) -> Ledger {
        self.with(self.inner.generations[..generation as usize].to_vec())
    }

    async fn next(&self) -> Result<Option<Ledger>> {
        let key = self.keys().generation(self.generation() + 1);
        match read::<Generation>(self.store(), &key).await? {
            Some(record) => self.with_next_generation(self.whole(record).await?, &key).map(Some),
            None => Ok(None),
        }
    }

    fn with_next_generation(&self, record: Generation, key: &str) -> Result<Ledger> {
        let foreign = |retried: &RetriedShard| !retried.rows.difference(&self.all_rows(retried.shard)).is_empty();
        if record.job != self.job().job
            || record.generation != self.generation() + 1
            || record.generation > GENERATIONS_MAX
            || record.shards.iter().any(foreign)
        {
            let address = self.store().address(key);
            return Err(LedgerError::damaged(format!("`{address}` is no retry of this job")));
        }
        let mut generations = self.inner.generations.clone();
        generations.push(Arc::new(record));
        Ok(self.with(generations))
    }

    fn with(&self, generations: Vec<Arc<Generation>>) -> Ledger {
        let was = &self.inner;
        let inner = Inner {
            store: was.store.clone(),
            keys: was.keys.of_generation(generations.len() as u32),
            job: was.job.clone(),
            generations,
            job_sha256: was.job_sha256.clone(),
            job_is_signed: was.job_is_signed,
            job_version: was.job_version.clone(),
            commits: Mutex::default(),
            has_result: AtomicBool::default(),
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
    pub(super) fn retried(&self, shard: u32) -> Option<&RetriedShard> {
        let shards = &self.inner.generations.last()?.shards;
        let at = shards.binary_search_by_key(&shard, |retried| retried.shard).ok()?;
        Some(&shards[at])
    }

    /// Counts of the rows that this generation retries, as they were published before.
    pub fn retried_tally(&self) -> Tally {
        let mut sum = Tally::default();
        for retried in self.inner.generations.last().iter().flat_map(|retry| &retry.shards) {
            sum.add(&retried.tally);
        }
        sum
    }

    /// The newest earlier generation that has rows of the shard.
    pub(super) fn before(&self, shard: u32) -> Option<Ledger> {
        let earlier = (0..self.generation())
            .rev()
            .map(|generation| self.at_generation(generation));
        earlier.into_iter().find(|ledger| !ledger.rows_to_do(shard).is_empty())
    }

    /// The rows to retry, by shard: failed rows, or with `truncated` those with a truncated
    /// completion. This generation must be published completely.
    async fn rows_to_retry(&self, truncated: bool) -> Result<Vec<RetriedShard>> {
        // Number of such rows by the commit. `None`: the commit does not record it.
        let count = move |tally: &Tally| {
            if truncated {
                tally.truncated
            } else {
                Some(tally.rows() - tally.succeeded)
            }
        };
        let commits = self.standing_commits().await?;
        let meant = commits.into_iter().filter(|commit| count(&commit.tally) != Some(0));
        let like = lines::counted_columns();
        let mut shards: Vec<RetriedShard> = futures::stream::iter(meant.collect::<Vec<_>>())
            .map(|commit| {
                let (ledger, like) = (self.clone(), like.clone());
                async move {
                    let shard = commit.shard;
                    let (mut rows, mut tally) = (RowSet::new(), Tally::default());
                    let damaged = |why: String| LedgerError::damaged(format!("shard {shard}: {why}"));
                    for (batch, counts) in ledger.rows_until_now(shard, ledger.all_rows(shard), &like).await? {
                        let meant = if truncated {
                            data::truncated(&batch, &counts).map_err(damaged)?
                        } else {
                            data::failed(&batch, &counts).map_err(damaged)?
                        };
                        tally.add(&data::tally(&batch, &meant).map_err(damaged)?);
                        rows = rows.union(&meant);
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

    /// The rows `want` of a shard as of this generation. Each row comes from the log of the newest
    /// generation that finished it, or from the published part if that log is incomplete. A row
    /// that a retry left unfinished keeps its earlier result. Rows read from JSON lines get the
    /// columns of `like`.
    pub(super) async fn rows_until_now(&self, shard: u32, want: RowSet, like: &SchemaRef) -> Result<Rows> {
        let mut left = want;
        let mut out = Rows::new();
        for generation in (0..=self.generation()).rev() {
            let ledger = self.at_generation(generation);
            let mine = ledger.rows_to_do(shard).intersection(&left);
            if mine.is_empty() {
                continue;
            }
            let logged = ledger.logged_rows(shard).await?;
            // Read the mark after the log: `clean` writes it before it removes anything, so without
            // the mark the log was complete. With the mark, even a log that looks complete may have
            // been begun anew by a worker that woke late.
            let cleaned = read::<CleanedMark>(self.store(), &ledger.keys().cleaned()).await?;
            let Some(logged) = logged.filter(|_| cleaned.is_none()) else {
                out.push((self.standing_rows(shard, like).await?, left));
                return Ok(out);
            };
            for (batch, rows) in logged {
                let mut rows = rows.intersection(&mine);
                if generation > 0 {
                    rows = data::done(&batch, &rows)
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

    /// The rows of a committed shard from this generation's own log. `None`: only the part has
    /// them, because the log has voids or has lost data. After a void the part may hold the rows of
    /// either computation.
    async fn logged_rows(&self, shard: u32) -> Result<Option<Rows>> {
        let log = match ShardLog::load(self, shard).await {
            Err(LedgerError::Damaged { .. }) => return Ok(None),
            log => log?,
        };
        if !log.is_complete() || !log.voided.is_empty() {
            return Ok(None);
        }
        match log.counted().await? {
            Counted::Whole(rows) => Ok(Some(rows)),
            Counted::Damaged(_) => Ok(None),
        }
    }

    /// The rows of the published part, which must be the one committed last, or one of a later
    /// generation.
    async fn standing_rows(&self, shard: u32, like: &SchemaRef) -> Result<RecordBatch> {
        let commit = self.standing_commit(shard).await?;
        let address = self.store().address(&commit.part.name);
        let damaged = |why: &str| LedgerError::damaged(format!("`{address}` {why}"));
        let bytes = self.store().get(&commit.part.name, MAX_OBJECT_BYTES).await?;
        let bytes = bytes.ok_or_else(|| damaged("is missing, though it was committed"))?;
        let is_next = || {
            self.read_part(shard, &bytes)
                .is_ok_and(|held| held.generation > self.generation())
        };
        if sha256(&bytes) != commit.part.sha256 && !is_next() {
            return Err(damaged("is not the part that was committed"));
        }
        let rows = match self.job().part_extension.as_str() {
            "jsonl" => lines::decode(&bytes, self.job().shard(shard)?.first_row, like),
            _ => data::decode(bytes.clone()),
        };
        rows.map_err(|why| damaged(&why))
    }

    /// The commit of the part that readers see: from the newest generation that has rows of the
    /// shard.
    async fn standing_commit(&self, shard: u32) -> Result<Commit> {
        let missing = || LedgerError::damaged(format!("the commit of shard {shard} has gone"));
        let ledger = if self.rows_to_do(shard).is_empty() {
            self.before(shard).ok_or_else(missing)?
        } else {
            self.clone()
        };
        ledger.commit_of(shard).await?.ok_or_else(missing)
    }

    /// The newest commit of every shard, in order: one request per closed block of each generation.
    pub(super) async fn standing_commits(&self) -> Result<Vec<Commit>> {
        let mut newest: Vec<Option<Commit>> = vec![None; self.job().shards.len()];
        for generation in 0..=self.generation() {
            let ledger = self.at_generation(generation);
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
