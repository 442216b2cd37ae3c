//! A complete log becomes a part, the part a commit.

use std::fmt::Display;

use arrow::array::RecordBatch;
use bytes::Bytes;
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::Ledger;
use super::data;
use super::error::{LedgerError, Result};
use super::keys::sha256;
use super::log::ShardLog;
use super::record::{Commit, DataObject, VERSION, decode, encode, read};
use super::store::Created;

/// Metadata key of the job id in a part.
pub const META_JOB: &str = "gristmill.job";
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
        if commit.part.name != self.keys().part(shard) {
            return Err(format!("it names part `{}`", commit.part.name));
        }
        if commit.tally.rows() != rows {
            return Err(format!("it has {} rows, the shard {rows}", commit.tally.rows()));
        }
        Ok(())
    }

    /// Whether `bytes` can be the part of `shard`: only what stands at its key and is not byte for byte ours comes here.
    fn check_part(&self, shard: u32, bytes: &Bytes) -> Result<(), String> {
        let rows = self.job().shard(shard).map_err(|error| error.to_string())?.rows;
        if self.job().part_extension == "jsonl" {
            let lines = bytes.split(|&b| b == b'\n').filter(|line| !line.is_empty()).count() as u64;
            return if lines == rows {
                Ok(())
            } else {
                Err(format!("it has {lines} lines, the shard {rows} rows"))
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
        if origin.rows == rows {
            Ok(())
        } else {
            Err(format!("it has {} rows, the shard {rows}", origin.rows))
        }
    }
}

/// What a Parquet part says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PartOrigin {
    pub job: Option<String>,
    pub shard: Option<String>,
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
        let (ledger, shard) = (&self.ledger, self.shard);
        if !self.is_complete() {
            return Err(LedgerError::damaged(format!(
                "shard {shard}: rows {} are not logged yet",
                self.uncovered()
            )));
        }
        let sources = self.counted().await?;
        let damaged = |why: &dyn Display| LedgerError::damaged(format!("shard {shard}: {why}"));
        let batches = data::merge(&sources, self.rows()).map_err(|why| damaged(&why))?;
        drop(sources);
        let bytes = make_part(&batches, &ledger.provenance(shard)).map_err(|why| damaged(&why))?;
        drop(batches);
        if bytes.len() > PART_BYTES_PLANNED {
            tracing::warn!(
                "shard {shard}: its part has {} MB; give `shards.rows` a smaller value",
                bytes.len() >> 20
            );
        }
        #[cfg(feature = "faults")]
        if crate::faults::switch("part-after-commit") {
            return self.publish_commit_first(bytes).await;
        }
        let part = self.put_part(bytes).await?;
        crate::failpoint!("keeper.between-part-and-commit");
        let commit = Commit {
            v: VERSION,
            job: ledger.job().job.clone(),
            shard,
            part: part.clone(),
            tally: self.tally(),
        };
        let key = ledger.keys().commit(shard);
        let commit = match ledger.store().create(&key, encode(&commit)?).await? {
            Created::Ours => commit,
            Created::Theirs(bytes) => decode(ledger.store(), &key, &bytes)?,
        };
        ledger.check_commit(&commit, shard).map_err(|why| damaged(&why))?;
        if commit.part != part {
            return Err(LedgerError::damaged(format!(
                "`{}` was changed after it was committed",
                ledger.store().address(&part.name)
            )));
        }
        ledger.finish_check(Some(shard)).await?;
        Ok(commit)
    }

    /// The wrong way round: a kill in between leaves a commit without its part.
    #[cfg(feature = "faults")]
    async fn publish_commit_first(&self, bytes: Bytes) -> Result<Commit> {
        let ledger = &self.ledger;
        let commit = Commit {
            v: VERSION,
            job: ledger.job().job.clone(),
            shard: self.shard,
            part: DataObject {
                name: ledger.keys().part(self.shard),
                size: bytes.len() as u64,
                sha256: sha256(&bytes),
            },
            tally: self.tally(),
        };
        let key = ledger.keys().commit(self.shard);
        ledger.store().create(&key, encode(&commit)?).await?;
        crate::faults::point("keeper.between-part-and-commit").await?;
        self.put_part(bytes).await?;
        ledger.finish_check(Some(self.shard)).await?;
        Ok(commit)
    }

    /// Puts the part, unless one stands there, and says which one stands.
    async fn put_part(&self, bytes: Bytes) -> Result<DataObject> {
        let (ledger, name) = (&self.ledger, self.ledger.keys().part(self.shard));
        ledger.check_still_ours().await?;
        let bytes = match ledger.store().create(&name, bytes.clone()).await? {
            Created::Ours => bytes,
            Created::Theirs(standing) => {
                ledger.check_part(self.shard, &standing).map_err(|why| {
                    let address = ledger.store().address(&name);
                    LedgerError::conflict(format!(
                        "`{address}` is not of job `{}`: {why}; move it away, nothing is overwritten",
                        ledger.job().name
                    ))
                })?;
                standing
            }
        };
        Ok(DataObject {
            name,
            size: bytes.len() as u64,
            sha256: sha256(&bytes),
        })
    }
}
