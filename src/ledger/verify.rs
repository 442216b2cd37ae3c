//! Verifies the guarantee for a job from its published parts: every input row exactly once,
//! identified by row number.
//!
//! Parts are read concurrently within a memory bound. Each finding is a line, and no findings mean
//! that the guarantee holds.

use std::collections::{BTreeMap, BTreeSet};

use futures::{StreamExt, TryStreamExt};
use tokio::sync::Semaphore;

use super::Ledger;
use super::error::{LedgerError, Result};
use super::finish::{PartsHash, READS_AT_ONCE};
use super::keys::SUCCESS;
use super::part::jsonl_generation;
use super::record::{Commit, Success, Tally, read};
use super::store::MAX_OBJECT_BYTES;

/// Maximum number of blocks whose commits are read concurrently.
const BLOCKS_AT_ONCE: usize = 8;
/// Maximum total size of the parts that are read concurrently, in MiB. A larger part is read alone.
const PARTS_MEMORY_MIB: u32 = 1024;
/// Maximum number of shards without a commit that a finding lists.
const LISTED_SHARDS_MAX: usize = 10;
/// Maximum number of findings. Further ones are dropped, and one last line says so.
const FINDINGS_MAX: usize = 1000;

/// The result of a verification.
#[derive(Debug, Clone, Default)]
pub struct Verification {
    /// One line per finding. Empty if the guarantee holds.
    pub findings: Vec<String>,
    /// Counts over all parts, recounted from their rows.
    pub tally: Tally,
    pub parts: u32,
}

impl Verification {
    /// Whether the guarantee holds.
    pub fn guarantee_holds(&self) -> bool {
        self.findings.is_empty()
    }

    /// Adds the result for a piece of the job.
    fn add(&mut self, other: Verification) {
        self.tally.add(&other.tally);
        self.parts += other.parts;
        other.findings.into_iter().for_each(|line| self.add_finding(line));
    }

    fn add_finding(&mut self, line: String) {
        match self.findings.len().cmp(&FINDINGS_MAX) {
            std::cmp::Ordering::Less => self.findings.push(line),
            std::cmp::Ordering::Equal => self.findings.push("more findings are not listed".into()),
            std::cmp::Ordering::Greater => {}
        }
    }
}

/// What becomes of a part that is not there.
const BUILT_AGAIN: &str = "`gristmill run` builds it again, or, after `clean`, restore it from a backup";

impl Ledger {
    /// Verifies the job's output: parts against commits, rows against the shard table, counts
    /// against `_SUCCESS`. Other visible objects beside the parts are findings too.
    ///
    /// Calls `progress` with the number of each shard that was verified. An `Err` means that the
    /// store could not be read. Any fault of the output itself is a finding.
    pub async fn verify(&self, mut progress: impl FnMut(u32)) -> Result<Verification> {
        let mut out = Verification::default();
        let mut expected = BTreeSet::new();
        let mut hash = PartsHash::default();
        let mut committed = Tally::default();
        let mut complete = true;
        let newest = self.newest_commits(&mut out).await?;
        let memory = Semaphore::new(PARTS_MEMORY_MIB as usize);
        let mut parts = futures::stream::iter(0..self.job().shards.len() as u32)
            .map(|shard| {
                let (commit, memory) = (newest.get(&shard).and_then(Option::as_ref), &memory);
                async move {
                    match commit {
                        Some(commit) => Ok((shard, Some((commit, self.verify_part(commit, memory).await?)))),
                        None => Ok::<_, LedgerError>((shard, None)),
                    }
                }
            })
            .buffered(READS_AT_ONCE);
        while let Some((shard, verified)) = parts.try_next().await? {
            expected.insert(self.keys().part(shard));
            match verified {
                Some((commit, verified)) => {
                    hash.add(commit);
                    committed.add(&commit.tally);
                    out.add(verified);
                }
                None => complete = false,
            }
            progress(shard);
        }
        drop(parts);
        self.find_foreign_objects(&expected, &mut out).await?;
        let success = as_finding(read::<Success>(self.store(), SUCCESS).await, &mut out)?.flatten();
        match success {
            Some(success) if success.job != self.job().job => out.add_finding(format!(
                "`{SUCCESS}` is of job {}, which had this folder before: run the job again",
                success.job
            )),
            Some(success) => self.verify_success(&success, hash.finish(), &mut out),
            None if complete => out.add_finding(format!(
                "`{SUCCESS}` is missing, though every shard is committed: run the job again"
            )),
            None => out.add_finding(format!("`{SUCCESS}` is missing: the job is not finished")),
        }
        if !committed.agrees_with(&out.tally) {
            out.add_finding("the commits' counts differ from what their parts hold".into());
        }
        Ok(out)
    }

    /// The commit of each shard in the newest generation that has rows of it; `None` if that
    /// generation has not committed it yet.
    async fn newest_commits(&self, out: &mut Verification) -> Result<BTreeMap<u32, Option<Commit>>> {
        let mut newest = BTreeMap::new();
        for generation in 0..=self.generation() {
            let ledger = self.up_to_generation(generation);
            let closed = ledger.closed_blocks().await?;
            let mut blocks = futures::stream::iter(ledger.blocks())
                .map(|block| {
                    let (ledger, is_closed) = (&ledger, closed.contains(&block));
                    async move {
                        let mut found = Verification::default();
                        let commits = ledger.block_commits(block, is_closed, &mut found).await?;
                        Ok::<_, LedgerError>((block, commits, found))
                    }
                })
                .buffered(BLOCKS_AT_ONCE);
            let mut open = Vec::new();
            while let Some((block, commits, found)) = blocks.try_next().await? {
                out.add(found);
                for (shard, commit) in ledger.block_shards(block).into_iter().zip(commits) {
                    if commit.is_none() {
                        open.push(shard);
                    }
                    newest.insert(shard, commit);
                }
            }
            drop(blocks);
            if !open.is_empty() {
                out.add_finding(format!(
                    "{} is not finished: {} of its {} shards have no readable commit, and were not verified: {}",
                    match generation {
                        0 => "the job".to_string(),
                        n => format!("retry {n}"),
                    },
                    open.len(),
                    ledger.shard_numbers().len(),
                    list_first(&open),
                ));
            }
        }
        Ok(newest)
    }

    /// The commits of a block, read one by one, because its digest is only a copy of them.
    async fn block_commits(&self, block: u32, is_closed: bool, out: &mut Verification) -> Result<Vec<Option<Commit>>> {
        let read = futures::stream::iter(self.block_shards(block))
            .map(|shard| self.commit_of(shard))
            .buffered(READS_AT_ONCE)
            .collect::<Vec<_>>();
        let mut commits = Vec::new();
        for commit in read.await {
            commits.push(as_finding(commit, out)?.flatten());
        }
        if is_closed
            && let Some(digest) = as_finding(self.digest(block).await, out)?
            && !is_copy(&digest.commits, &commits)
        {
            out.add_finding(format!("the digest of block {block} differs from its commits"));
        }
        Ok(commits)
    }

    /// Verifies one part. `memory` limits the total size of the parts that are read concurrently.
    async fn verify_part(&self, commit: &Commit, memory: &Semaphore) -> Result<Verification> {
        let (name, mut out) = (&commit.part.name, Verification::default());
        let mib = u32::try_from(commit.part.size >> 20).unwrap_or(PARTS_MEMORY_MIB);
        // The semaphore is never closed, so this always acquires.
        let _permit = memory
            .acquire_many(mib.saturating_add(1).min(PARTS_MEMORY_MIB))
            .await
            .ok();
        let bytes = as_finding(self.store().get(name, MAX_OBJECT_BYTES).await, &mut out)?;
        let Some(Some(bytes)) = bytes else {
            if let Some(None) = bytes {
                let shard = commit.shard;
                out.add_finding(format!(
                    "`{name}` is missing, though shard {shard} is committed: {BUILT_AGAIN}"
                ));
            }
            return Ok(out);
        };
        out.parts += 1;
        if !commit.part.matches(&bytes) {
            out.add_finding(format!(
                "`{name}` is not the part that was committed, its size or hash differs: move it away, then {BUILT_AGAIN}"
            ));
        }
        let generation = match self.job().part_extension.as_str() {
            "jsonl" => Ok(jsonl_generation(&bytes)),
            _ => self.parquet_generation(commit.shard, &bytes),
        };
        match generation {
            Err(why) => out.add_finding(format!("`{name}` {why}")),
            Ok(found) if found != commit.generation => out.add_finding(format!(
                "`{name}` is of generation {found}, generation {} was committed",
                commit.generation
            )),
            Ok(_) => {}
        }
        match self.count_part_rows(commit.shard, &bytes) {
            Err(why) => out.add_finding(format!("`{name}`: {why}")),
            Ok((tally, _)) => {
                out.tally.add(&tally);
                if !tally.agrees_with(&commit.tally) {
                    out.add_finding(format!(
                        "`{name}`: its rows by status, or their tokens, are not as committed"
                    ));
                }
            }
        }
        Ok(out)
    }

    /// Finds visible objects of the output that are not its parts.
    async fn find_foreign_objects(&self, expected: &BTreeSet<String>, out: &mut Verification) -> Result<()> {
        let is_hidden = |name: &str| name.starts_with('_') || name.starts_with('.');
        let (objects, folders) = self.store().list_folder("").await?;
        for object in objects
            .iter()
            .filter(|object| !is_hidden(&object.key) && !expected.contains(&object.key))
        {
            out.add_finding(format!(
                "`{}` is beside the parts, and does not belong to this job",
                object.key
            ));
        }
        for folder in folders.iter().filter(|folder| !is_hidden(folder)) {
            let inside = self.store().list(folder).await?;
            for object in inside.iter().filter(|object| !object.key.split('/').any(is_hidden)) {
                out.add_finding(format!(
                    "`{}` is beside the parts, and does not belong to this job",
                    object.key
                ));
            }
        }
        Ok(())
    }

    fn verify_success(&self, success: &Success, parts_sha256: String, out: &mut Verification) {
        let job = self.job();
        if success.generation != self.generation() {
            // Its counts are those of an earlier generation, so they are not compared.
            return out.add_finding(format!(
                "`{SUCCESS}` is of generation {}, the newest is {}: the retry is not finished",
                success.generation,
                self.generation()
            ));
        }
        if success.rows != job.rows() {
            out.add_finding(format!(
                "`{SUCCESS}` counts {} rows, the inputs have {}",
                success.rows,
                job.rows()
            ));
        }
        if !success.tally.agrees_with(&out.tally) {
            out.add_finding(format!("the counts of `{SUCCESS}` differ from what the parts hold"));
        }
        if success.parts as usize != job.shards.len() || success.parts_sha256 != parts_sha256 {
            out.add_finding(format!("the parts named by `{SUCCESS}` are not the committed ones"));
        }
    }
}

/// The first of `shards`, and the number of the others, for a finding.
fn list_first(shards: &[u32]) -> String {
    let shown: Vec<String> = shards.iter().take(LISTED_SHARDS_MAX).map(u32::to_string).collect();
    match shards.len() - shown.len() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// Whether `copies`, those of a digest, are equal to the commits. An older gristmill copied commits
/// without the count of truncated rows.
fn is_copy(copies: &[Commit], commits: &[Option<Commit>]) -> bool {
    let is_same = |(copy, commit): (&Commit, &Option<Commit>)| {
        let Some(commit) = commit else { return false };
        let same_retried = match (&copy.retried, &commit.retried) {
            (Some(copied), Some(retried)) => copied.agrees_with(retried),
            (copied, retried) => copied == retried,
        };
        let rest = Commit {
            tally: commit.tally,
            retried: commit.retried,
            ..copy.clone()
        };
        same_retried && copy.tally.agrees_with(&commit.tally) && rest == *commit
    };
    copies.len() == commits.len() && copies.iter().zip(commits).all(is_same)
}

/// Turns an error about an object into a finding. Errors of the store stay errors.
fn as_finding<T>(read: Result<T>, out: &mut Verification) -> Result<Option<T>> {
    match read {
        Ok(found) => Ok(Some(found)),
        Err(error @ (LedgerError::Damaged { .. } | LedgerError::Conflict { .. })) => {
            out.add_finding(error.to_string());
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
