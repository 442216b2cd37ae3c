//! Proves the guarantee for a job, from what is published: every input row exactly once, keyed by row.
//!
//! One part at a time is in memory. Findings are lines; none means that the guarantee holds.

use std::collections::{BTreeMap, BTreeSet};

use arrow::array::RecordBatch;
use bytes::Bytes;
use futures::StreamExt;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::Value;

use super::Ledger;
use super::data;
use super::error::{LedgerError, Result};
use super::finish::{PartsHash, READS_AT_ONCE};
use super::keys::{SUCCESS, sha256};
use super::publish::{lines_generation, part_origin};
use super::record::{Commit, Success, Tally};
use super::rowset::RowSet;
use super::store::MAX_OBJECT_BYTES;
use crate::dataset::row::CUT_OFF;

/// Further findings are only counted.
const FINDINGS_MAX: usize = 1000;
/// Rows decoded at once.
const BATCH_ROWS: usize = 8192;

/// What verification found.
#[derive(Debug, Clone, Default)]
pub struct Verified {
    /// One line each; empty where the guarantee holds.
    pub findings: Vec<String>,
    /// Over all parts, recounted from their rows (`jsonl`: from commits).
    pub tally: Tally,
    pub parts: u32,
}

impl Verified {
    /// Whether the guarantee holds.
    pub fn holds(&self) -> bool {
        self.findings.is_empty()
    }

    fn find(&mut self, line: String) {
        match self.findings.len().cmp(&FINDINGS_MAX) {
            std::cmp::Ordering::Less => self.findings.push(line),
            std::cmp::Ordering::Equal => self.findings.push("more findings are not listed".into()),
            std::cmp::Ordering::Greater => {}
        }
    }
}

impl Ledger {
    /// Verifies the job's output: parts against commits, rows against the shard table, counts against `_SUCCESS`,
    /// and that nothing else lies beside the parts.
    ///
    /// `progress` is called with the number of each shard that was looked at. An `Err` means that the store could not
    /// be read; whatever is wrong with the output itself is a finding. Lines of `jsonl` parts carry no row number:
    /// there, lines are counted, the truncated ones too, and bytes held against the commit.
    pub async fn verify(&self, mut progress: impl FnMut(u32)) -> Result<Verified> {
        let mut out = Verified::default();
        let mut expected = BTreeSet::new();
        let mut hash = PartsHash::default();
        let mut committed = Tally::default();
        let mut complete = true;
        let mut newest = self.newest_commits(&mut out).await?;
        for shard in 0..self.job().shards.len() as u32 {
            expected.insert(self.keys().part(shard));
            match newest.remove(&shard).flatten() {
                Some(commit) => {
                    hash.add(&commit);
                    committed.add(&commit.tally);
                    self.verify_part(&commit, &mut out).await?;
                }
                None => complete = false,
            }
            progress(shard);
        }
        self.verify_names(&expected, &mut out).await?;
        let success = as_finding(self.standing_success().await, &mut out)?.flatten();
        match success {
            Some(success) => self.verify_success(&success, hash.finish(), &mut out),
            None if complete => out.find(format!(
                "`{SUCCESS}` is missing, though every shard is committed: run the job again"
            )),
            None => out.find(format!("`{SUCCESS}` is missing: the job is not finished")),
        }
        if !committed.agrees_with(&out.tally) {
            out.find("the commits' counts differ from what their parts hold".into());
        }
        Ok(out)
    }

    /// The commit of each shard in the newest generation that holds it; none where that one is not committed yet.
    async fn newest_commits(&self, out: &mut Verified) -> Result<BTreeMap<u32, Option<Commit>>> {
        let mut newest = BTreeMap::new();
        for generation in 0..=self.generation() {
            let ledger = self.back_to(generation);
            let closed = ledger.closed_blocks().await?;
            for block in ledger.blocks() {
                let commits = ledger.commits_of(block, closed.contains(&block), out).await?;
                newest.extend(ledger.block_shards(block).into_iter().zip(commits));
            }
        }
        Ok(newest)
    }

    /// The commits of a block, read one by one: its digest is only a copy of them.
    async fn commits_of(&self, block: u32, closed: bool, out: &mut Verified) -> Result<Vec<Option<Commit>>> {
        let read = futures::stream::iter(self.block_shards(block))
            .map(|shard| async move { (shard, self.commit_of(shard).await) })
            .buffered(READS_AT_ONCE)
            .collect::<Vec<_>>();
        let mut commits = Vec::new();
        for (shard, commit) in read.await {
            let commit = as_finding(commit, out)?;
            if let Some(None) = commit {
                out.find(format!("shard {shard} has no commit"));
            }
            commits.push(commit.flatten());
        }
        if closed
            && let Some(digest) = as_finding(self.digest(block).await, out)?
            && !is_copy(&digest.commits, &commits)
        {
            out.find(format!("the digest of block {block} differs from its commits"));
        }
        Ok(commits)
    }

    async fn verify_part(&self, commit: &Commit, out: &mut Verified) -> Result<()> {
        let name = &commit.part.name;
        let Some(bytes) = as_finding(self.store().get(name, MAX_OBJECT_BYTES).await, out)? else {
            return Ok(());
        };
        let Some(bytes) = bytes else {
            out.find(format!(
                "`{name}` is missing, though shard {} is committed",
                commit.shard
            ));
            return Ok(());
        };
        out.parts += 1;
        if bytes.len() as u64 != commit.part.size || sha256(&bytes) != commit.part.sha256 {
            out.find(format!(
                "`{name}` is not the part that was committed: its size or hash differs"
            ));
        }
        if self.job().part_extension == "jsonl" {
            let lines = bytes.split(|&b| b == b'\n').filter(|line| !line.is_empty()).count() as u64;
            if lines != commit.tally.rows() {
                out.find(format!(
                    "`{name}` has {lines} lines, its shard {} rows",
                    commit.tally.rows()
                ));
            }
            if lines_generation(&bytes) != commit.generation {
                out.find(format!("`{name}` is not of generation {}", commit.generation));
            }
            match truncated_lines(&bytes) {
                Err(why) => out.find(format!("`{name}`: {why}")),
                Ok(count) => {
                    if commit.tally.truncated.is_some_and(|claimed| claimed != count) {
                        out.find(format!("`{name}` has {count} truncated rows, not as many as committed"));
                    }
                    out.tally.add(&Tally {
                        truncated: Some(count),
                        ..commit.tally
                    });
                }
            }
            return Ok(());
        }
        match part_origin(&bytes) {
            Err(why) => out.find(format!("`{name}` cannot be read: {why}")),
            Ok(origin) => {
                let ours = origin.job.as_deref() == Some(self.job().job.as_str());
                if !ours || origin.shard != Some(commit.shard.to_string()) {
                    let (job, shard) = (
                        origin.job.unwrap_or("none".into()),
                        origin.shard.unwrap_or("none".into()),
                    );
                    out.find(format!("`{name}` is foreign: it names job {job}, shard {shard}"));
                }
                let (found, committed) = (origin.generation.unwrap_or("0".into()), commit.generation);
                if found != committed.to_string() {
                    out.find(format!(
                        "`{name}` is of generation {found}, generation {committed} was committed"
                    ));
                }
                if let Err(why) = self.verify_rows(commit, bytes, out) {
                    out.find(format!("`{name}`: {why}"));
                }
            }
        }
        Ok(())
    }

    /// Every row of the shard, once, in order; statuses as committed.
    fn verify_rows(&self, commit: &Commit, bytes: Bytes, out: &mut Verified) -> Result<(), String> {
        let shard = self.job().shard(commit.shard).map_err(|error| error.to_string())?;
        let builder = ParquetRecordBatchReaderBuilder::try_new(bytes).map_err(|error| error.to_string())?;
        let reader = builder
            .with_batch_size(BATCH_ROWS)
            .build()
            .map_err(|error| error.to_string())?;
        let mut next = shard.first_row;
        let end = shard.first_row + shard.rows;
        let mut tally = Tally::default();
        for batch in reader {
            let batch: RecordBatch = batch.map_err(|error| error.to_string())?;
            let rows = data::rows_of(&batch)?;
            tally.add(&data::tally(&batch, &RowSet::from_range(0..u64::MAX))?);
            for row in rows {
                if row != next || row >= end {
                    out.tally.add(&tally);
                    return Err(format!("row {row} stands where row {next} belongs"));
                }
                next += 1;
            }
        }
        out.tally.add(&tally);
        if next != end {
            return Err(format!("ends before row {next}, its shard before row {end}"));
        }
        if !tally.agrees_with(&commit.tally) {
            return Err("its rows by status, or their tokens, are not as committed".into());
        }
        Ok(())
    }

    /// Nothing but the parts may be seen by readers of the folder.
    async fn verify_names(&self, expected: &BTreeSet<String>, out: &mut Verified) -> Result<()> {
        let hidden = |name: &str| name.starts_with('_') || name.starts_with('.');
        let (objects, folders) = self.store().list_folder("").await?;
        for object in objects
            .iter()
            .filter(|object| !hidden(&object.key) && !expected.contains(&object.key))
        {
            out.find(format!(
                "`{}` lies beside the parts and is none of this job",
                object.key
            ));
        }
        for folder in folders.iter().filter(|folder| !hidden(folder)) {
            let inside = self.store().list(folder).await?;
            for object in inside.iter().filter(|object| !object.key.split('/').any(hidden)) {
                out.find(format!(
                    "`{}` lies beside the parts and is none of this job",
                    object.key
                ));
            }
        }
        Ok(())
    }

    fn verify_success(&self, success: &Success, parts_sha256: String, out: &mut Verified) {
        let job = self.job();
        if success.generation != self.generation() {
            out.find(format!(
                "`{SUCCESS}` is of generation {}, the newest is {}: the retry is not finished",
                success.generation,
                self.generation()
            ));
        }
        if success.rows != job.rows() {
            out.find(format!(
                "`{SUCCESS}` counts {} rows, the inputs have {}",
                success.rows,
                job.rows()
            ));
        }
        if !success.tally.agrees_with(&out.tally) {
            out.find(format!("the counts of `{SUCCESS}` differ from what the parts hold"));
        }
        if success.parts as usize != job.shards.len() || success.parts_sha256 != parts_sha256 {
            out.find(format!("the parts named by `{SUCCESS}` are not the committed ones"));
        }
    }
}

/// Whether a digest's commits are these. (A gristmill that did not count truncated rows copied all but that.)
fn is_copy(copies: &[Commit], commits: &[Option<Commit>]) -> bool {
    let same = |(copy, commit): (&Commit, &Option<Commit>)| {
        let Some(commit) = commit else { return false };
        let retried = match (&copy.retried, &commit.retried) {
            (Some(copied), Some(retried)) => copied.agrees_with(retried),
            (copied, retried) => copied == retried,
        };
        let rest = Commit {
            tally: commit.tally,
            retried: commit.retried,
            ..copy.clone()
        };
        retried && copy.tally.agrees_with(&commit.tally) && rest == *commit
    };
    copies.len() == commits.len() && copies.iter().zip(commits).all(same)
}

/// How many result lines have a completion that was cut off.
fn truncated_lines(bytes: &[u8]) -> Result<u64, String> {
    let mut count = 0;
    for (number, line) in bytes.split(|&b| b == b'\n').filter(|line| !line.is_empty()).enumerate() {
        let line: Value =
            serde_json::from_slice(line).map_err(|error| format!("line {number} is not JSON: {error}"))?;
        let choices = line["response"]["body"]["choices"].as_array();
        let cut_off = |choice: &Value| choice["finish_reason"] == CUT_OFF;
        count += u64::from(choices.is_some_and(|choices| choices.iter().any(cut_off)));
    }
    Ok(count)
}

/// Turns what is wrong with an object into a finding; what is wrong with the store stays an error.
fn as_finding<T>(read: Result<T>, out: &mut Verified) -> Result<Option<T>> {
    match read {
        Ok(found) => Ok(Some(found)),
        Err(error @ (LedgerError::Damaged { .. } | LedgerError::Conflict { .. })) => {
            out.find(error.to_string());
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
