//! Published parts as people look into them: which there are, when each was written, and the rows of
//! one part.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use bytes::Bytes;
use chrono::{DateTime, Utc};
use futures::TryStreamExt;
use parquet::arrow::ProjectionMask;

use super::Ledger;
use super::error::{LedgerError, Result};
use super::lines;
use super::record::Commit;
use crate::dataset::part_in;

/// Maximum size of a part that is read to be looked into.
pub(super) const PART_BYTES_MAX: u64 = 64 << 20;

/// A shard's newest commit, and when its part was written.
#[derive(Debug, Clone, PartialEq)]
pub struct PublishedPart {
    pub commit: Commit,
    /// By the store's clock; `None`: the part is missing.
    pub written_at: Option<DateTime<Utc>>,
}

impl PublishedPart {
    /// Whether the part exists and is small enough to be looked into.
    pub fn is_readable(&self) -> bool {
        self.written_at.is_some() && self.commit.part.size <= PART_BYTES_MAX
    }
}

impl Ledger {
    /// The newest commit of each published shard.
    pub(super) async fn published_commits(&self) -> Result<BTreeMap<u32, Commit>> {
        let mut newest: BTreeMap<u32, Commit> = BTreeMap::new();
        for generation in 0..=self.generation() {
            let ledger = self.up_to_generation(generation);
            let mut blocks = std::pin::pin!(ledger.commits_by_block().await?);
            while let Some((commits, _)) = blocks.try_next().await? {
                newest.extend(commits.into_iter().map(|commit| (commit.shard, commit)));
            }
        }
        Ok(newest)
    }

    /// All published parts, in the order of shards. Requests: those for the commits, and a listing
    /// of the parts.
    pub async fn published_parts(&self) -> Result<Vec<PublishedPart>> {
        let commits = self.published_commits().await?;
        let (objects, _) = self.store().list_folder("").await?;
        let times: HashMap<String, DateTime<Utc>> = objects
            .into_iter()
            .map(|object| (object.key, object.modified))
            .collect();
        let with_time = |commit: Commit| PublishedPart {
            written_at: times.get(&commit.part.name).copied(),
            commit,
        };
        Ok(commits.into_values().map(with_time).collect())
    }

    /// Calls `visit` with batches of a part's rows until it returns false, on a thread for slow
    /// work. Of `columns`, a batch has those that the part has. Returns `state` as `visit` has
    /// changed it; `Err` of the inner result: why the part cannot be read.
    pub async fn scan_part<T: Send + 'static>(
        &self,
        commit: &Commit,
        columns: &'static [&'static str],
        mut state: T,
        mut visit: impl FnMut(&mut T, &RecordBatch) -> Result<bool, String> + Send + 'static,
    ) -> Result<Result<T, String>> {
        let Some(bytes) = self.store().get(&commit.part.name, PART_BYTES_MAX).await? else {
            return Ok(Err(format!("`{}` is missing", commit.part.name)));
        };
        let first_row = self.job().shard(commit.shard)?.first_row;
        let is_lines = self.job().part_extension == "jsonl";
        let scanning = tokio::task::spawn_blocking(move || {
            part_in::catch_panics(|| {
                let mut visit = |batch: &RecordBatch| visit(&mut state, batch);
                if is_lines {
                    visit(&lines::decode(&bytes, first_row, &lines_schema(columns))?).map(drop)
                } else {
                    scan_parquet(&bytes, columns, visit)
                }
            })
            .map(|()| state)
        });
        scanning
            .await
            .map_err(|error| LedgerError::stop(format!("reading a part ended early: {error}")))
    }
}

/// The types in which the columns of result lines are shown.
fn lines_schema(columns: &[&str]) -> SchemaRef {
    let field = |name: &&str| {
        let kind = match *name {
            "row" | "prompt_tokens" | "completion_tokens" => DataType::Int64,
            "completion" | "finish_reason" => DataType::new_list(DataType::Utf8, true),
            _ => DataType::Utf8,
        };
        Field::new(*name, kind, true)
    };
    Arc::new(Schema::new(columns.iter().map(field).collect::<Vec<_>>()))
}

fn scan_parquet(
    bytes: &Bytes,
    columns: &[&str],
    mut visit: impl FnMut(&RecordBatch) -> Result<bool, String>,
) -> Result<(), String> {
    let builder = part_in::open(bytes)?;
    let mask = ProjectionMask::columns(builder.parquet_schema(), columns.iter().copied());
    let reader = builder.with_projection(mask).build();
    for batch in reader.map_err(|error| error.to_string())? {
        if !visit(&batch.map_err(|error| error.to_string())?)? {
            break;
        }
    }
    Ok(())
}
