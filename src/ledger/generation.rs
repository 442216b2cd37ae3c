//! Generations: a retry does the failed rows of a finished job anew, and only those.
//!
//! `gen/001.json` names them, created once and only when the previous generation is published whole. Its logs and commits
//! lie below it; a shard's part is replaced under its own key, on the condition that it is the previous one.

use std::sync::{Arc, Mutex};

use arrow::array::RecordBatch;
use futures::{StreamExt, TryStreamExt};

use super::data;
use super::error::{LedgerError, Result};
use super::finish::READS_AT_ONCE;
use super::keys::{Id, sha256};
use super::log::ShardLog;
use super::publish::part_origin;
use super::record::{CleanedMark, Commit, Generation, RetriedShard, Tally, VERSION, decode, encode, read};
use super::rowset::RowSet;
use super::store::{Created, MAX_OBJECT_BYTES};
use super::{Inner, Ledger};

/// Shards whose rows are in memory while a retry is planned.
const SHARDS_AT_ONCE: usize = 4;
/// Keys have three digits for a generation.
const GENERATIONS_MAX: u32 = 999;

/// Rows, and which of them are meant.
pub(super) type Rows = Vec<(RecordBatch, RowSet)>;

impl Ledger {
    /// 0, or the number of the retry that this ledger is about.
    pub fn generation(&self) -> u32 {
        self.inner.generations.len() as u32
    }

    /// The same job at another generation. One that the job does not have is an error: it may come from a message.
    pub async fn at(&self, generation: u32) -> Result<Ledger> {
        let mut ledger = self.back_to(generation.min(self.generation()));
        while ledger.generation() < generation {
            ledger = ledger.next().await?.ok_or_else(|| {
                let name = &self.job().name;
                LedgerError::damaged(format!("job `{name}` has no generation {generation}"))
            })?;
        }
        Ok(ledger)
    }

    /// The same job at its newest generation: one request where there is no newer one.
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

    /// Begins the next generation with all rows that are published and did not succeed; `None`: there are none. Where one
    /// has begun and is not published whole, that one. A first generation that is not finished cannot be retried.
    pub async fn retry(&self) -> Result<Option<Ledger>> {
        let newest = self.newest().await?;
        if newest.success().await?.is_none() {
            if newest.generation() > 0 {
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
        let shards = match newest.failed_rows().await {
            Ok(shards) => shards,
            // Another retry may have begun, and replaced parts while we read them.
            Err(error @ LedgerError::Damaged { .. }) => return newest.next().await?.map(Some).ok_or(error),
            Err(error) => return Err(error),
        };
        if shards.is_empty() {
            return Ok(None);
        }
        let record = Generation {
            v: VERSION,
            job: self.job().job.clone(),
            generation,
            nonce: Id::random()?,
            shards,
        };
        let key = self.keys().generation(generation);
        let record = match self.store().create(&key, encode(&record)?).await? {
            Created::Ours => record,
            // Another retry of the same rows.
            Created::Theirs(bytes) => decode(self.store(), &key, &bytes)?,
        };
        newest.followed_by(record, &key).map(Some)
    }

    /// This ledger at an earlier generation.
    pub(super) fn back_to(&self, generation: u32) -> Ledger {
        self.with(self.inner.generations[..generation as usize].to_vec())
    }

    async fn next(&self) -> Result<Option<Ledger>> {
        let key = self.keys().generation(self.generation() + 1);
        match read::<Generation>(self.store(), &key).await? {
            Some(record) => self.followed_by(record, &key).map(Some),
            None => Ok(None),
        }
    }

    fn followed_by(&self, record: Generation, key: &str) -> Result<Ledger> {
        let foreign = |retried: &RetriedShard| !retried.rows.difference(&self.all_rows(retried.shard)).is_empty();
        if record.job != self.job().job
            || record.generation != self.generation() + 1
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
            job_stamp: was.job_stamp.clone(),
            commits: Mutex::default(),
        };
        Ledger { inner: Arc::new(inner) }
    }

    /// All rows of a shard; none of one that the job lacks.
    pub(super) fn all_rows(&self, shard: u32) -> RowSet {
        self.job()
            .shards
            .get(shard as usize)
            .map_or_else(RowSet::new, |planned| {
                RowSet::from_range(planned.first_row..planned.first_row + planned.rows)
            })
    }

    /// What this generation retries of a shard.
    pub(super) fn retried(&self, shard: u32) -> Option<&RetriedShard> {
        let shards = &self.inner.generations.last()?.shards;
        let at = shards.binary_search_by_key(&shard, |retried| retried.shard).ok()?;
        Some(&shards[at])
    }

    /// What this generation retries, as it was published before.
    pub(super) fn retried_tally(&self) -> Tally {
        let mut sum = Tally::default();
        for retried in self.inner.generations.last().iter().flat_map(|retry| &retry.shards) {
            sum.add(&retried.tally);
        }
        sum
    }

    /// The newest generation before this one that holds the shard.
    pub(super) fn before(&self, shard: u32) -> Option<Ledger> {
        let earlier = (0..self.generation()).rev().map(|generation| self.back_to(generation));
        earlier.into_iter().find(|ledger| !ledger.rows_to_do(shard).is_empty())
    }

    /// The rows that did not succeed, of a job whose generation is published whole.
    async fn failed_rows(&self) -> Result<Vec<RetriedShard>> {
        let commits = self.standing_commits().await?;
        let failed = commits
            .into_iter()
            .filter(|commit| commit.tally.rows() > commit.tally.succeeded);
        futures::stream::iter(failed.collect::<Vec<_>>())
            .map(|commit| {
                let ledger = self.clone();
                async move {
                    let shard = commit.shard;
                    let (mut rows, mut tally) = (RowSet::new(), Tally::default());
                    let damaged = |why: String| LedgerError::damaged(format!("shard {shard}: {why}"));
                    for (batch, counts) in ledger.rows_until_now(shard, ledger.all_rows(shard)).await? {
                        let failed = data::failed(&batch, &counts).map_err(damaged)?;
                        tally.add(&data::tally(&batch, &failed).map_err(damaged)?);
                        rows = rows.union(&failed);
                    }
                    if rows.len() != commit.tally.rows() - commit.tally.succeeded {
                        return Err(damaged("its rows are not as committed".into()));
                    }
                    Ok(RetriedShard { shard, rows, tally })
                }
            })
            .buffered(SHARDS_AT_ONCE)
            .try_collect()
            .await
    }

    /// `want` of a shard as of this generation: each row from the log of the newest generation that did it, or, where the
    /// logs were cleaned, from the part that stands.
    pub(super) async fn rows_until_now(&self, shard: u32, want: RowSet) -> Result<Rows> {
        let mut left = want;
        let mut out = Rows::new();
        for generation in (0..=self.generation()).rev() {
            let ledger = self.back_to(generation);
            let mine = ledger.rows_to_do(shard).intersection(&left);
            if mine.is_empty() {
                continue;
            }
            let logged = match ledger.logged_rows(shard).await {
                Err(error) if !matches!(error, LedgerError::Damaged { .. }) => return Err(error),
                logged => logged,
            };
            // Asked after the log was read, and written before anything is removed: without it, the log was whole. With it,
            // even a log that looks whole may have been begun anew by a worker that woke late.
            let cleaned = read::<CleanedMark>(self.store(), &ledger.keys().cleaned()).await?;
            if cleaned.is_some() {
                out.push((self.standing_rows(shard).await?, left));
                return Ok(out);
            }
            let meant = logged?
                .into_iter()
                .map(|(batch, rows)| (batch, rows.intersection(&mine)));
            out.extend(meant.filter(|(_, rows)| !rows.is_empty()));
            left = left.difference(&mine);
        }
        Ok(out)
    }

    /// The rows of this generation's own log, which is complete.
    async fn logged_rows(&self, shard: u32) -> Result<Rows> {
        let log = ShardLog::load(self, shard).await?;
        if !log.is_complete() {
            let rows = log.uncovered();
            return Err(LedgerError::damaged(format!(
                "shard {shard}: rows {rows} are in no log"
            )));
        }
        log.counted().await
    }

    /// The rows of the part that stands, which must be the one last committed, or already a later generation's.
    async fn standing_rows(&self, shard: u32) -> Result<RecordBatch> {
        let commit = self.standing_commit(shard).await?;
        let address = self.store().address(&commit.part.name);
        if self.job().part_extension != "parquet" {
            return Err(LedgerError::stop(format!(
                "`{address}` cannot be retried: its ledger data was cleaned, and lines do not tell their rows"
            )));
        }
        let damaged = |why: &str| LedgerError::damaged(format!("`{address}` {why}"));
        let bytes = self.store().get(&commit.part.name, MAX_OBJECT_BYTES).await?;
        let bytes = bytes.ok_or_else(|| damaged("is missing, though it was committed"))?;
        let later = |text: &str| text.parse::<u32>().is_ok_and(|found| found > self.generation());
        let is_next = || {
            part_origin(&bytes).is_ok_and(|origin| {
                origin.job.as_deref() == Some(self.job().job.as_str())
                    && origin.shard == Some(shard.to_string())
                    && origin.generation.as_deref().is_some_and(later)
            })
        };
        if sha256(&bytes) != commit.part.sha256 && !is_next() {
            return Err(damaged("is not the part that was committed"));
        }
        data::decode(bytes.clone()).map_err(|why| damaged(&why))
    }

    /// The commit that names the part which readers see: the newest generation's that holds the shard.
    async fn standing_commit(&self, shard: u32) -> Result<Commit> {
        let missing = || LedgerError::damaged(format!("the commit of shard {shard} has gone"));
        let ledger = match self.rows_to_do(shard).is_empty() {
            true => self.before(shard).ok_or_else(missing)?,
            false => self.clone(),
        };
        ledger.commit_of(shard).await?.ok_or_else(missing)
    }

    /// The newest commit of every shard, in order: one request a closed block of each generation.
    pub(super) async fn standing_commits(&self) -> Result<Vec<Commit>> {
        let mut newest: Vec<Option<Commit>> = vec![None; self.job().shards.len()];
        for generation in 0..=self.generation() {
            let ledger = self.back_to(generation);
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
