//! Publishing: a complete log becomes a part, and the part gets a commit.
//!
//! See docs/decisions/004-a-part-gives-way-by-conditional-update.md.

use std::cmp::Ordering;
use std::fmt::Display;

use arrow::array::RecordBatch;
use bytes::Bytes;
use futures::FutureExt;

use super::Ledger;
use super::data;
use super::error::{LedgerError, Result};
use super::keys::sha256;
use super::lines;
use super::log::{CountedData, ShardLog};
use super::part::{PartContents, mark_generation};
use super::record::{Commit, DataObject, Tally, VERSION, decode, encode, read};
use super::rowset::RowSet;
use super::store::{CreateOutcome, MAX_OBJECT_BYTES};

/// Metadata key of the job id in a part.
pub const META_JOB: &str = "gristmill.job";
/// Metadata key of the generation in a part of a retry.
pub const META_GENERATION: &str = "gristmill.generation";
/// Metadata key of the shard number in a part.
pub const META_SHARD: &str = "gristmill.shard";
/// Planned maximum size of a part in bytes: a part is written by a single put. A larger part gives
/// a warning.
const PLANNED_PART_BYTES_MAX: usize = 256 << 20;

impl Ledger {
    /// The origin of a part, as key/value metadata.
    pub fn provenance(&self, shard: u32) -> Vec<(String, String)> {
        let (job, id) = (self.job(), &self.job().identity);
        let mut out = vec![
            (META_JOB, job.job.to_string()),
            (META_SHARD, shard.to_string()),
            ("gristmill.name", job.name.clone()),
            ("gristmill.job_hash", id.job_hash.clone()),
            ("gristmill.model_hash", id.model_hash.clone()),
            ("gristmill.tokenizer_hash", id.tokenizer_hash.clone()),
            ("gristmill.precision", id.precision.clone()),
            // The version that planned the job instead of the worker's: workers of two versions
            // must make identical parts.
            ("gristmill.version", job.version.clone()),
        ];
        if self.generation() > 0 {
            out.push((META_GENERATION, self.generation().to_string()));
        }
        if let Some(format) = &id.kv_cache {
            out.push(("gristmill.kv_cache", format.clone()));
        }
        if let Some(hash) = &id.template_hash {
            out.push(("gristmill.template_hash", hash.clone()));
        }
        out.into_iter().map(|(key, value)| (key.to_string(), value)).collect()
    }

    pub(super) async fn commit_of(&self, shard: u32) -> Result<Option<Commit>> {
        self.job().shard(shard)?;
        let key = self.keys().commit(shard);
        let Some(commit) = read::<Commit>(self.store(), &key).await? else {
            return Ok(None);
        };
        self.check_commit(&commit, shard).map_err(|why| {
            LedgerError::damaged(format!(
                "`{}` is no commit of shard {shard}: {why}",
                self.store().address(&key)
            ))
        })?;
        Ok(Some(commit))
    }

    /// Checks that `commit` can be the commit of `shard`.
    pub(super) fn check_commit(&self, commit: &Commit, shard: u32) -> Result<(), String> {
        let rows = self.job().shards.get(shard as usize).map_or(0, |shard| shard.rows);
        if commit.job != self.job().job || commit.shard != shard {
            return Err(format!("it names job {}, shard {}", commit.job, commit.shard));
        }
        if commit.generation != self.generation() || commit.retried.is_some() != (self.generation() > 0) {
            return Err(format!("it names generation {}", commit.generation));
        }
        if commit.part.name != self.keys().part(shard) {
            return Err(format!("it names part `{}`", commit.part.name));
        }
        if commit.tally.rows() != rows {
            return Err(format!("it has {} rows, the shard {rows}", commit.tally.rows()));
        }
        Ok(())
    }
}

impl ShardLog {
    /// Publishes the shard: its part, its commit, and `_SUCCESS` if it was the last shard.
    ///
    /// `make_part` makes the bytes of the part from the rows that count, in row order, and the
    /// key/value metadata to embed. It must be deterministic, so that two publishers make the same
    /// part. If their parts differ (for example, because of two versions of gristmill), the part
    /// that was put first is committed. Acknowledge the message only after this has returned.
    pub async fn publish<E: Display>(
        &self,
        make_part: impl Fn(&[RecordBatch], &[(String, String)]) -> Result<Bytes, E>,
    ) -> Result<Commit> {
        match self.publish_part(make_part).await {
            Ok(commit) => {
                crate::failpoint!("keeper.between-commit-and-finish");
                self.ledger.finish_check(Some(self.shard)).await?;
                Ok(commit)
            }
            // A worker that wakes late may find a part of a newer generation, or a log whose data
            // `clean` has removed. Neither is an error if this generation is published and the
            // shard has a commit.
            Err(error @ (LedgerError::Damaged { .. } | LedgerError::Conflict { .. })) => {
                match self.ledger.commit_of(self.shard).await {
                    Ok(Some(commit)) if self.is_superseded().await? => Ok(commit),
                    _ => Err(error),
                }
            }
            Err(error) => Err(error),
        }
    }

    /// Whether this generation is published completely, so that its logs may be gone and its parts
    /// replaced.
    async fn is_superseded(&self) -> Result<bool> {
        Ok(self.ledger.success().await?.is_some())
    }

    async fn publish_part<E: Display>(
        &self,
        make_part: impl Fn(&[RecordBatch], &[(String, String)]) -> Result<Bytes, E>,
    ) -> Result<Commit> {
        match self.assemble(make_part).await? {
            AssembleResult::Part(bytes, contents) => self.commit(bytes, contents).await,
            AssembleResult::Damaged(indices) => self.void_after_failed_publish(indices).await,
        }
    }

    /// Builds the shard's part from its log, and from earlier generations in a retry.
    pub(super) async fn assemble<E: Display>(
        &self,
        make_part: impl Fn(&[RecordBatch], &[(String, String)]) -> Result<Bytes, E>,
    ) -> Result<AssembleResult> {
        let (ledger, shard) = (&self.ledger, self.shard);
        if !self.is_complete() {
            return Err(LedgerError::damaged(format!(
                "shard {shard}: rows {} are not logged yet",
                self.uncovered()
            )));
        }
        let damaged = |why: &dyn Display| LedgerError::damaged(format!("shard {shard}: {why}"));
        let mut sources = match self.read_counted_data().await? {
            CountedData::Intact(sources) => sources,
            CountedData::Damaged(indices) => return Ok(AssembleResult::Damaged(indices)),
        };
        if let Some(earlier) = ledger.earlier_generation_with(shard) {
            let mut earlier_rows = ledger.all_rows(shard);
            // A row that the retry did not finish keeps its earlier result: a truncated completion
            // is better than none.
            for (batch, counts) in &mut sources {
                *counts = data::finished_rows(batch, counts).map_err(|why| damaged(&why))?;
                earlier_rows = earlier_rows.difference(counts);
            }
            let schema = sources
                .first()
                .map_or_else(lines::tally_columns, |(batch, _)| batch.schema());
            sources.extend(earlier.current_rows(shard, earlier_rows, &schema).await?);
        }
        let batches = data::merge(&sources, self.rows()).map_err(|why| damaged(&why))?;
        drop(sources);
        let count = |rows: &RowSet| {
            let sum = batches.iter().try_fold(Tally::default(), |mut sum, batch| {
                sum.add(&data::tally(batch, rows)?);
                Ok::<_, String>(sum)
            });
            sum.map_err(|why| damaged(&why))
        };
        let contents = PartContents {
            generation: ledger.generation(),
            tally: count(&ledger.all_rows(shard))?,
            generation_tally: count(self.rows_to_do())?,
        };
        let mut bytes = make_part(&batches, &ledger.provenance(shard)).map_err(|why| damaged(&why))?;
        drop(batches);
        if ledger.job().part_extension == "jsonl" {
            bytes = mark_generation(bytes, ledger.generation());
        }
        if bytes.len() > PLANNED_PART_BYTES_MAX {
            tracing::warn!(
                shard,
                output = %ledger.store().url(),
                "shard {shard}: its part has {} MB; give `shards.rows` a smaller value",
                bytes.len() >> 20
            );
        }
        Ok(AssembleResult::Part(bytes, contents))
    }

    /// Puts the part, then creates the commit that names it. `contents`: generation and counts of
    /// `bytes`.
    async fn commit(&self, bytes: Bytes, contents: PartContents) -> Result<Commit> {
        let (ledger, shard) = (&self.ledger, self.shard);
        let is_commit_first = part_after_commit();
        let ours = CurrentPart {
            part: self.part_object(&bytes),
            etag: None,
            contents,
        };
        let current = if is_commit_first {
            Some(ours)
        } else {
            self.put_part(bytes.clone(), ours).await?
        };
        let Some(current) = current else {
            let missing = || LedgerError::damaged(format!("shard {shard} was retried before it was committed"));
            return ledger.commit_of(shard).await?.ok_or_else(missing);
        };
        if !is_commit_first {
            between_part_and_commit().await?;
        }
        let commit = Commit {
            v: VERSION,
            job: ledger.job().job.clone(),
            shard,
            part: current.part.clone(),
            tally: current.contents.tally,
            generation: ledger.generation(),
            part_etag: current.etag.clone(),
            retried: (ledger.generation() > 0).then_some(current.contents.generation_tally),
        };
        let key = ledger.keys().commit(shard);
        let bytes_of_commit = encode(&commit)?;
        let precheck = || ledger.check_job_unchanged().boxed();
        let put = ledger
            .store()
            .create_checked(&key, bytes_of_commit.clone(), &precheck)
            .await?;
        let found = match put.outcome {
            CreateOutcome::Ours => bytes_of_commit,
            CreateOutcome::Theirs(bytes) => bytes,
        };
        // Decode the commit as all readers will.
        let commit: Commit = decode(ledger.store(), &key, &found)?;
        let damaged = |why: String| LedgerError::damaged(format!("shard {shard}: {why}"));
        ledger.check_commit(&commit, shard).map_err(damaged)?;
        if is_commit_first {
            between_part_and_commit().await?;
            self.put_part(bytes, current.clone()).await?;
        }
        ledger.cache_commit(&commit);
        if commit.part != current.part {
            return Err(LedgerError::damaged(format!(
                "`{}` was changed after it was committed",
                ledger.store().address(&current.part.name)
            )));
        }
        Ok(commit)
    }

    /// Name, size and hash of this shard's part with these bytes.
    pub(super) fn part_object(&self, bytes: &Bytes) -> DataObject {
        DataObject {
            name: self.ledger.keys().part(self.shard),
            size: bytes.len() as u64,
            sha256: sha256(bytes),
        }
    }

    /// Puts the part unless a part of this generation exists, and returns the part at the key.
    /// `None`: the key has a part of a later generation, so this shard was committed long ago.
    /// `ours` describes `bytes`.
    async fn put_part(&self, bytes: Bytes, ours: CurrentPart) -> Result<Option<CurrentPart>> {
        let (ledger, name) = (&self.ledger, &ours.part.name);
        // Checked before each try: the folder may belong to another job by now if this worker was
        // paused.
        let precheck = || ledger.check_job_unchanged().boxed();
        let previous = match ledger.earlier_generation_with(self.shard) {
            Some(earlier) => earlier.commit_of(self.shard).await?,
            None => None,
        };
        let mut may_create = previous.is_none();
        loop {
            if may_create {
                let put = ledger.store().create_checked(name, bytes.clone(), &precheck).await?;
                if put.outcome == CreateOutcome::Ours {
                    let etag = put.etag;
                    return Ok(Some(CurrentPart { etag, ..ours }));
                }
            }
            let Some((found, version)) = ledger.store().get_versioned(name, MAX_OBJECT_BYTES).await? else {
                // The part of the earlier generation is gone, but the new part has all of its rows.
                may_create = true;
                continue;
            };
            if found == bytes {
                return Ok(Some(CurrentPart {
                    etag: version.etag,
                    ..ours
                }));
            }
            let part = self.part_object(&found);
            if previous.as_ref().is_none_or(|previous| previous.part != part) {
                let contents = ledger
                    .read_part(self.shard, &found)
                    .map_err(|why| self.foreign_part_error(name, &why))?;
                match contents.generation.cmp(&ledger.generation()) {
                    Ordering::Greater => return Ok(None),
                    // The commit gets the counts of the existing part: another worker may have
                    // computed other rows.
                    Ordering::Equal => {
                        let etag = version.etag;
                        return Ok(Some(CurrentPart { part, etag, contents }));
                    }
                    Ordering::Less => {
                        return Err(LedgerError::damaged(format!(
                            "`{}` is not the part that was committed",
                            ledger.store().address(name)
                        )));
                    }
                }
            }
            // Whatever the outcome, the next round reads the key, which also gives the part's ETag.
            ledger
                .store()
                .conditional_put(name, &version, bytes.clone(), &precheck)
                .await?;
        }
    }

    fn foreign_part_error(&self, name: &str, why: &str) -> LedgerError {
        LedgerError::conflict(format!(
            "`{}` is not a part of job `{}` ({why}), and is not overwritten: move it away",
            self.ledger.store().address(name),
            self.ledger.job().name
        ))
    }
}

/// Result of assembling a part.
pub(super) enum AssembleResult {
    /// The bytes of the part, with its generation and counts.
    Part(Bytes, PartContents),
    /// Indices of the records whose data is lost.
    Damaged(Vec<u32>),
}

/// The part at a shard's key. It is of the generation that is being published.
#[derive(Debug, Clone)]
struct CurrentPart {
    part: DataObject,
    etag: Option<String>,
    contents: PartContents,
}

/// A failpoint between the puts of part and commit, in either order.
async fn between_part_and_commit() -> Result<()> {
    crate::failpoint!("keeper.between-part-and-commit");
    Ok(())
}

/// Whether the commit is created before its part: a control experiment of the fault build.
#[cfg(feature = "faults")]
fn part_after_commit() -> bool {
    crate::faults::is_switched_on("part-after-commit")
}

#[cfg(not(feature = "faults"))]
fn part_after_commit() -> bool {
    false
}
