//! A complete log becomes a part, the part a commit.
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
use super::log::{Counted, ShardLog};
use super::part::{Held, mark_lines};
use super::record::{Commit, DataObject, Tally, VERSION, decode, encode, read};
use super::rowset::RowSet;
use super::store::{Created, MAX_OBJECT_BYTES};

/// Metadata key of the job id in a part.
pub const META_JOB: &str = "gristmill.job";
/// Metadata key of the generation in a part of a retry.
pub const META_GENERATION: &str = "gristmill.generation";
/// Metadata key of the shard number in a part.
pub const META_SHARD: &str = "gristmill.shard";
/// Parts are planned to stay below this: they are single puts.
const PART_BYTES_PLANNED: usize = 256 << 20;

impl Ledger {
    /// What every part says of its origin, as key/value metadata.
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
            // Of the version that planned the job: workers of two versions must make identical parts.
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

    /// Whether `commit` can be the one of `shard`.
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
    /// Publishes the shard: its part, its commit, and (where it was the last one) `_SUCCESS`.
    ///
    /// `make_part` turns the rows that count, in row order, and the key/value metadata to embed into the part's bytes.
    /// It must be deterministic, so that two publishers make the same part; where they do not (say, two versions of
    /// gristmill), the part that stands is the one that is committed. Acknowledge only after this has returned.
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
            // Whoever wakes late may find a newer generation's part, or the log cleaned away. Our commit says that all is well.
            Err(error @ (LedgerError::Damaged { .. } | LedgerError::Conflict { .. })) => {
                match self.ledger.commit_of(self.shard).await {
                    Ok(Some(commit)) if self.is_superseded().await? => Ok(commit),
                    _ => Err(error),
                }
            }
            Err(error) => Err(error),
        }
    }

    /// Whether this generation is over: published whole, so that its log and its part may be gone.
    async fn is_superseded(&self) -> Result<bool> {
        Ok(self.ledger.success().await?.is_some())
    }

    async fn publish_part<E: Display>(
        &self,
        make_part: impl Fn(&[RecordBatch], &[(String, String)]) -> Result<Bytes, E>,
    ) -> Result<Commit> {
        match self.assemble(make_part).await? {
            Assembled::Part(bytes, held) => self.commit(bytes, held).await,
            Assembled::Damaged(indices) => self.lost(indices).await,
        }
    }

    /// The shard's part, as its log gives it.
    pub(super) async fn assemble<E: Display>(
        &self,
        make_part: impl Fn(&[RecordBatch], &[(String, String)]) -> Result<Bytes, E>,
    ) -> Result<Assembled> {
        let (ledger, shard) = (&self.ledger, self.shard);
        if !self.is_complete() {
            return Err(LedgerError::damaged(format!(
                "shard {shard}: rows {} are not logged yet",
                self.uncovered()
            )));
        }
        let damaged = |why: &dyn Display| LedgerError::damaged(format!("shard {shard}: {why}"));
        let mut sources = match self.counted().await? {
            Counted::Whole(sources) => sources,
            Counted::Damaged(indices) => return Ok(Assembled::Damaged(indices)),
        };
        if let Some(before) = ledger.before(shard) {
            let mut others = ledger.all_rows(shard);
            // A row that the retry did not come to stays what it was: a completion that was cut off is more than none.
            for (batch, counts) in &mut sources {
                *counts = data::done(batch, counts).map_err(|why| damaged(&why))?;
                others = others.difference(counts);
            }
            let like = sources
                .first()
                .map_or_else(lines::counted_columns, |(batch, _)| batch.schema());
            sources.extend(before.rows_until_now(shard, others, &like).await?);
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
        let held = Held {
            generation: ledger.generation(),
            tally: count(&ledger.all_rows(shard))?,
            to_do: count(self.rows_to_do())?,
        };
        let mut bytes = make_part(&batches, &ledger.provenance(shard)).map_err(|why| damaged(&why))?;
        drop(batches);
        if ledger.job().part_extension == "jsonl" {
            bytes = mark_lines(bytes, ledger.generation());
        }
        if bytes.len() > PART_BYTES_PLANNED {
            tracing::warn!(
                "shard {shard}: its part has {} MB; give `shards.rows` a smaller value",
                bytes.len() >> 20
            );
        }
        Ok(Assembled::Part(bytes, held))
    }

    /// The part, then the commit that names it. `held`: what is in `bytes`.
    async fn commit(&self, bytes: Bytes, held: Held) -> Result<Commit> {
        let (ledger, shard) = (&self.ledger, self.shard);
        let late = part_after_commit();
        let ours = Standing {
            part: self.described(&bytes),
            etag: None,
            held,
        };
        let standing = match late {
            true => Some(ours),
            false => self.put_part(bytes.clone(), ours).await?,
        };
        let Some(standing) = standing else {
            let missing = || LedgerError::damaged(format!("shard {shard} was retried before it was committed"));
            return ledger.commit_of(shard).await?.ok_or_else(missing);
        };
        if !late {
            between_part_and_commit().await?;
        }
        let commit = Commit {
            v: VERSION,
            job: ledger.job().job.clone(),
            shard,
            part: standing.part.clone(),
            tally: standing.held.tally,
            generation: ledger.generation(),
            part_etag: standing.etag.clone(),
            retried: (ledger.generation() > 0).then_some(standing.held.to_do),
        };
        let key = ledger.keys().commit(shard);
        let bytes_of_commit = encode(&commit)?;
        let look = || ledger.check_still_ours().boxed();
        let put = ledger
            .store()
            .create_after(&key, bytes_of_commit.clone(), &look)
            .await?;
        let found = match put.created {
            Created::Ours => bytes_of_commit,
            Created::Theirs(bytes) => bytes,
        };
        // As everybody will read it.
        let commit: Commit = decode(ledger.store(), &key, &found)?;
        let damaged = |why: String| LedgerError::damaged(format!("shard {shard}: {why}"));
        ledger.check_commit(&commit, shard).map_err(damaged)?;
        if late {
            between_part_and_commit().await?;
            self.put_part(bytes, standing.clone()).await?;
        }
        ledger.keep_commit(&commit);
        if commit.part != standing.part {
            return Err(LedgerError::damaged(format!(
                "`{}` was changed after it was committed",
                ledger.store().address(&standing.part.name)
            )));
        }
        Ok(commit)
    }

    pub(super) fn described(&self, bytes: &Bytes) -> DataObject {
        DataObject {
            name: self.ledger.keys().part(self.shard),
            size: bytes.len() as u64,
            sha256: sha256(bytes),
        }
    }

    /// Puts the part, unless one of this generation stands there, and says which one stands; `None` where a later
    /// generation's does, so that ours was committed long ago. `ours`: what `bytes` are.
    async fn put_part(&self, bytes: Bytes, ours: Standing) -> Result<Option<Standing>> {
        let (ledger, name) = (&self.ledger, &ours.part.name);
        // Before each try: whoever slept meanwhile may find another job's folder.
        let look = || ledger.check_still_ours().boxed();
        let previous = match ledger.before(self.shard) {
            Some(before) => before.commit_of(self.shard).await?,
            None => None,
        };
        let mut is_free = previous.is_none();
        loop {
            if is_free {
                let put = ledger.store().create_after(name, bytes.clone(), &look).await?;
                if put.created == Created::Ours {
                    let etag = put.etag;
                    return Ok(Some(Standing { etag, ..ours }));
                }
            }
            let Some((found, version)) = ledger.store().get_versioned(name, MAX_OBJECT_BYTES).await? else {
                // The part of an earlier generation is gone: this one has all of its rows.
                is_free = true;
                continue;
            };
            if found == bytes {
                return Ok(Some(Standing {
                    etag: version.etag,
                    ..ours
                }));
            }
            let part = self.described(&found);
            if previous.as_ref().is_none_or(|previous| previous.part != part) {
                let held = ledger
                    .held(self.shard, &found)
                    .map_err(|why| self.foreign(name, &why))?;
                match held.generation.cmp(&ledger.generation()) {
                    Ordering::Greater => return Ok(None),
                    // What is committed is counted in what stands: the rows of another worker may differ from ours.
                    Ordering::Equal => {
                        let etag = version.etag;
                        return Ok(Some(Standing { part, etag, held }));
                    }
                    Ordering::Less => {
                        return Err(LedgerError::damaged(format!(
                            "`{}` is not the part that was committed",
                            ledger.store().address(name)
                        )));
                    }
                }
            }
            // Whoever stands there after it is looked at once more, which also tells the part's ETag.
            ledger
                .store()
                .conditional_put(name, &version, bytes.clone(), &look)
                .await?;
        }
    }

    fn foreign(&self, name: &str, why: &str) -> LedgerError {
        LedgerError::conflict(format!(
            "`{}` is no part of job `{}` ({why}): move it away, nothing is overwritten",
            self.ledger.store().address(name),
            self.ledger.job().name
        ))
    }
}

/// What a log gives.
pub(super) enum Assembled {
    /// A part, and what is in it.
    Part(Bytes, Held),
    /// The records whose data is lost.
    Damaged(Vec<u32>),
}

/// The part that stands at a shard's key, of the generation that publishes.
#[derive(Debug, Clone)]
struct Standing {
    part: DataObject,
    etag: Option<String>,
    held: Held,
}

/// Where a fault test may end the process, whichever of the two comes first.
async fn between_part_and_commit() -> Result<()> {
    crate::failpoint!("keeper.between-part-and-commit");
    Ok(())
}

/// A control experiment of the fault build: the commit goes before its part.
#[cfg(feature = "faults")]
fn part_after_commit() -> bool {
    crate::faults::switch("part-after-commit")
}

#[cfg(not(feature = "faults"))]
fn part_after_commit() -> bool {
    false
}
