//! A complete log becomes a part, the part a commit.

use std::cmp::Ordering;
use std::fmt::Display;

use arrow::array::RecordBatch;
use bytes::Bytes;
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::Ledger;
use super::data;
use super::error::{LedgerError, Result};
use super::keys::sha256;
use super::log::ShardLog;
use super::record::{Commit, DataObject, Tally, VERSION, decode, encode, read};
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

    /// Which generation made the part `bytes`: only what is not byte for byte ours comes here. An error where it cannot be a
    /// part of `shard` at all.
    fn generation_of(&self, shard: u32, bytes: &Bytes) -> Result<u32, String> {
        let rows = self.job().shard(shard).map_err(|error| error.to_string())?.rows;
        if self.job().part_extension == "jsonl" {
            let lines = bytes.split(|&b| b == b'\n').filter(|line| !line.is_empty()).count() as u64;
            return match lines == rows {
                true => Ok(lines_generation(bytes)),
                false => Err(format!("it has {lines} lines, the shard {rows} rows")),
            };
        }
        let origin = part_origin(bytes)?;
        if origin.job.as_deref() != Some(self.job().job.as_str()) || origin.shard.as_deref() != Some(&shard.to_string())
        {
            return Err(match (origin.job, origin.shard) {
                (Some(job), Some(shard)) => format!("it is shard {shard} of job {job}"),
                _ => "gristmill did not write it".into(),
            });
        }
        if origin.rows != rows {
            return Err(format!("it has {} rows, the shard {rows}", origin.rows));
        }
        let generation = origin.generation.unwrap_or_else(|| "0".into());
        generation
            .parse()
            .map_err(|_| format!("its generation is `{generation}`"))
    }
}

/// Lines carry no metadata: a part of generation g has g spaces before its last line end, which no JSON reader minds. So
/// parts of two generations are never equal, and tell which they are.
fn mark_lines(bytes: Bytes, generation: u32) -> Bytes {
    if generation == 0 || bytes.is_empty() {
        return bytes;
    }
    let mut marked = bytes.strip_suffix(b"\n").unwrap_or(&bytes).to_vec();
    marked.resize(marked.len() + generation as usize, b' ');
    marked.push(b'\n');
    marked.into()
}

/// The generation that [`mark_lines`] wrote.
pub(super) fn lines_generation(bytes: &[u8]) -> u32 {
    let text = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    text.iter().rev().take_while(|&&b| b == b' ').count() as u32
}

/// What a Parquet part says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PartOrigin {
    pub job: Option<String>,
    pub shard: Option<String>,
    /// `None` in the first generation.
    pub generation: Option<String>,
    pub rows: u64,
}

/// Reads the footer of a Parquet part.
pub(super) fn part_origin(bytes: &Bytes) -> Result<PartOrigin, String> {
    let reader = SerializedFileReader::new(bytes.clone()).map_err(|error| error.to_string())?;
    let meta = reader.metadata().file_metadata();
    let value = |key: &str| {
        let pairs = meta.key_value_metadata().map_or(&[][..], Vec::as_slice);
        pairs
            .iter()
            .find(|pair| pair.key == key)
            .and_then(|pair| pair.value.clone())
    };
    Ok(PartOrigin {
        job: value(META_JOB),
        shard: value(META_SHARD),
        generation: value(META_GENERATION),
        rows: meta.num_rows().max(0) as u64,
    })
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
        let (ledger, shard) = (&self.ledger, self.shard);
        if !self.is_complete() {
            return Err(LedgerError::damaged(format!(
                "shard {shard}: rows {} are not logged yet",
                self.uncovered()
            )));
        }
        let damaged = |why: &dyn Display| LedgerError::damaged(format!("shard {shard}: {why}"));
        let mut sources = self.counted().await?;
        if let Some(before) = ledger.before(shard) {
            let mut others = ledger.all_rows(shard);
            // A row that the retry did not come to stays what it was: a completion that was cut off is more than none.
            for (batch, counts) in &mut sources {
                *counts = data::done(batch, counts).map_err(|why| damaged(&why))?;
                others = others.difference(counts);
            }
            sources.extend(before.rows_until_now(shard, others).await?);
        }
        let batches = data::merge(&sources, self.rows()).map_err(|why| damaged(&why))?;
        drop(sources);
        let all = ledger.all_rows(shard);
        let tally = batches.iter().try_fold(Tally::default(), |mut sum, batch| {
            sum.add(&data::tally(batch, &all)?);
            Ok::<_, String>(sum)
        });
        let tally = tally.map_err(|why| damaged(&why))?;
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
        self.commit(bytes, tally).await
    }

    /// The part, then the commit that names it.
    async fn commit(&self, bytes: Bytes, tally: Tally) -> Result<Commit> {
        let (ledger, shard) = (&self.ledger, self.shard);
        let late = part_after_commit();
        let Some((part, part_etag)) = self.put_part(bytes.clone(), late).await? else {
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
            part: part.clone(),
            tally,
            generation: ledger.generation(),
            part_etag,
            retried: (ledger.generation() > 0).then(|| self.tally()),
        };
        let key = ledger.keys().commit(shard);
        let ours = encode(&commit)?;
        let standing = match ledger.store().create(&key, ours.clone()).await? {
            Created::Ours => ours,
            Created::Theirs(bytes) => bytes,
        };
        // As everybody will read it.
        let commit: Commit = decode(ledger.store(), &key, &standing)?;
        let damaged = |why: String| LedgerError::damaged(format!("shard {shard}: {why}"));
        ledger.check_commit(&commit, shard).map_err(damaged)?;
        if late {
            between_part_and_commit().await?;
            self.put_part(bytes, false).await?;
        }
        ledger.keep_commit(&commit);
        if commit.part != part {
            return Err(LedgerError::damaged(format!(
                "`{}` was changed after it was committed",
                ledger.store().address(&part.name)
            )));
        }
        Ok(commit)
    }

    /// Puts the part, unless one of this generation stands there, and says which one stands, with its ETag; `None` where a
    /// later generation's does, so that ours was committed long ago. `pretend`: a control experiment; puts nothing.
    async fn put_part(&self, bytes: Bytes, pretend: bool) -> Result<Option<(DataObject, Option<String>)>> {
        let (ledger, name) = (&self.ledger, self.ledger.keys().part(self.shard));
        let described = |bytes: &Bytes| DataObject {
            name: name.clone(),
            size: bytes.len() as u64,
            sha256: sha256(bytes),
        };
        if pretend {
            return Ok(Some((described(&bytes), None)));
        }
        ledger.check_still_ours().await?;
        let previous = match ledger.before(self.shard) {
            Some(before) => before.commit_of(self.shard).await?,
            None => None,
        };
        if previous.is_none() {
            let put = ledger.store().create_stamped(&name, bytes.clone()).await?;
            if put.created == Created::Ours {
                return Ok(Some((described(&bytes), put.etag)));
            }
        }
        loop {
            let Some((standing, stamp)) = ledger.store().get_stamped(&name, MAX_OBJECT_BYTES).await? else {
                return Err(LedgerError::damaged(format!(
                    "`{}` is missing, though it was published",
                    ledger.store().address(&name)
                )));
            };
            if standing == bytes {
                return Ok(Some((described(&bytes), stamp.etag)));
            }
            let generation = ledger.generation_of(self.shard, &standing).map_err(|why| {
                let address = ledger.store().address(&name);
                LedgerError::conflict(format!(
                    "`{address}` is not of job `{}`: {why}; move it away, nothing is overwritten",
                    ledger.job().name
                ))
            })?;
            match (generation.cmp(&ledger.generation()), &previous) {
                (Ordering::Greater, _) => return Ok(None),
                (Ordering::Equal, _) => return Ok(Some((described(&standing), stamp.etag))),
                (Ordering::Less, Some(previous)) if described(&standing) == previous.part => {}
                (Ordering::Less, _) => {
                    return Err(LedgerError::damaged(format!(
                        "`{}` is not the part that was committed",
                        ledger.store().address(&name)
                    )));
                }
            }
            // Whoever stands there after it is looked at once more, which also tells the part's ETag.
            ledger.store().exchange(&name, &stamp, bytes.clone()).await?;
        }
    }
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
