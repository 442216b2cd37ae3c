//! The planned inputs of a job and its shards: plain data for the ledger.

pub mod discover;
pub mod filter;
pub mod inputs;
pub(crate) mod lines;
pub mod outputs;
pub mod partitions;
pub mod planner;
pub mod sample;
pub(crate) mod tables;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::lines::compression::Compressed;

/// How an input's bytes are read; told apart by content, not by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// Apache Parquet.
    Parquet,
    /// An Arrow IPC file, which Feather V2 is another name of.
    Arrow,
    /// One JSON object a line; its keys are the columns. Blank lines are no rows.
    Jsonl,
    /// JSON lines with `custom_id`, `method`, `url` and `body`. Blank lines are no rows.
    OpenaiBatch,
    /// Every line is a row with the one column `text` (blank lines too, so that row = line number − 1).
    Text,
    /// Cells between delimiters, a record a row; the first one names the columns unless the job does. Told by the names
    /// `.csv`, `.tsv` and `.tab`.
    Csv,
}

impl Format {
    /// Whether files of this format hold a schema of their columns.
    pub fn is_table(self) -> bool {
        matches!(self, Format::Parquet | Format::Arrow)
    }

    /// The format's name in messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Format::Parquet => "Parquet",
            Format::Arrow => "Arrow",
            Format::Jsonl => "JSON lines",
            Format::OpenaiBatch => "OpenAI batch lines",
            Format::Text => "plain text",
            Format::Csv => "CSV",
        }
    }
}

/// One input object, pinned to what it was when the job was planned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct InputFile {
    /// Full URL (`file:///…`, `s3://…`).
    pub url: String,
    pub format: Format,
    pub size: u64,
    /// ETag where the store has one (the local one is made of inode, size and modification time; of a web server that
    /// gives none it is a weak one, made of `Last-Modified`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// SHA-256 of all its bytes, which decides where the ETag differs. `None`: the job is a trial, or was planned by a
    /// gristmill that kept none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// Of a file of lines that is compressed as a whole. `size` and the hash are those of its stored bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compressed: Option<Compressed>,
    /// Values of the columns that the job's inputs have by their folders, as the folders' names have them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub partition: Vec<Option<String>>,
    /// Rows that the job takes from it (fewer than it has where the job is limited to the first N rows).
    pub rows: u64,
}

/// A shard: a run of consecutive rows over the job's whole input; without a row only in a job that has none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Shard {
    /// First row, 0-based over the job's whole input.
    pub first_row: u64,
    pub rows: u64,
    pub segments: Vec<Segment>,
}

/// The part of a shard that lies in one input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Segment {
    /// Index into the job's inputs.
    pub input: u32,
    /// First row, 0-based in that input.
    pub first_row: u64,
    pub rows: u64,
    /// Lines only: the byte range that holds exactly these rows, of a compressed file in its decompressed bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<(u64, u64)>,
    /// CSV only: the line that the first row begins on, from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<u64>,
    /// Of a sample: which of its rows are drawn, counted from the first one. `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub picks: Option<Vec<u32>>,
}

impl Segment {
    /// Number of rows of the segment that the job processes.
    pub fn taken_rows(&self) -> u64 {
        self.picks.as_ref().map_or(self.rows, |picks| picks.len() as u64)
    }
}

/// A column of the inputs, for messages and checks before the start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Column {
    pub name: String,
    /// The Arrow type's name; for JSON lines the inferred one.
    pub kind: String,
}

/// Limits of one shard. The first limit that is reached closes the shard, but a shard always has
/// room for one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardBounds {
    pub rows: u64,
    /// Uncompressed input bytes that a worker holds in memory while it processes the shard.
    pub input_bytes: u64,
    /// Estimated bytes of the published part (uncompressed).
    pub output_bytes: u64,
}

/// Cost of rows, measured against [`ShardBounds`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RowCost {
    pub input_bytes: u64,
    pub output_bytes: u64,
}

/// Cuts rows, which are added in order, into shards.
#[derive(Debug)]
pub struct ShardBuilder {
    bounds: ShardBounds,
    shards: Vec<Shard>,
    open: Shard,
    /// Cost of all rows of the open shard.
    cost: RowCost,
}

/// A saved state of a [`ShardBuilder`].
#[derive(Debug)]
pub struct Savepoint {
    shards: usize,
    open: Shard,
    cost: RowCost,
}

impl ShardBuilder {
    pub fn new(bounds: ShardBounds) -> ShardBuilder {
        let bounds = ShardBounds {
            rows: bounds.rows.max(1),
            ..bounds
        };
        ShardBuilder {
            bounds,
            shards: Vec::new(),
            open: Shard {
                first_row: 0,
                rows: 0,
                segments: Vec::new(),
            },
            cost: RowCost::default(),
        }
    }

    /// Number of rows added so far.
    pub fn rows(&self) -> u64 {
        self.open.first_row + self.open.rows
    }

    /// Number of further rows that fit into the open shard, if each one costs `cost`; at least 1 if
    /// the shard is empty.
    pub fn rows_that_fit(&self, cost: RowCost) -> u64 {
        let fits =
            |bound: u64, used: u64, per_row: u64| bound.saturating_sub(used).checked_div(per_row).unwrap_or(u64::MAX);
        let rows = (self.bounds.rows - self.open.rows)
            .min(fits(self.bounds.input_bytes, self.cost.input_bytes, cost.input_bytes))
            .min(fits(
                self.bounds.output_bytes,
                self.cost.output_bytes,
                cost.output_bytes,
            ));
        if self.open.rows == 0 { rows.max(1) } else { rows }
    }

    /// Whether the open shard has at least three quarters of the maximum number of rows. Then it
    /// should end at the next row group.
    pub fn is_nearly_full(&self) -> bool {
        self.open.rows >= self.bounds.rows - self.bounds.rows / 4
    }

    /// Adds the rows of `segment`, each of which costs `cost`. They must fit into the open shard:
    /// see [`ShardBuilder::rows_that_fit`].
    pub fn push(&mut self, segment: Segment, cost: RowCost) {
        let rows = segment.rows;
        self.open.rows += rows;
        self.cost.input_bytes = self
            .cost
            .input_bytes
            .saturating_add(cost.input_bytes.saturating_mul(rows));
        self.cost.output_bytes = self
            .cost
            .output_bytes
            .saturating_add(cost.output_bytes.saturating_mul(rows));
        match self.open.segments.last_mut() {
            Some(last) if last.input == segment.input && last.first_row + last.rows == segment.first_row => {
                last.rows += rows;
                if let (Some(last), Some(added)) = (&mut last.bytes, segment.bytes) {
                    last.1 = added.1;
                }
            }
            _ => self.open.segments.push(segment),
        }
        if self.open.rows >= self.bounds.rows {
            self.close();
        }
    }

    /// Saves the current state for [`ShardBuilder::roll_back`].
    pub fn savepoint(&self) -> Savepoint {
        Savepoint {
            shards: self.shards.len(),
            open: self.open.clone(),
            cost: self.cost,
        }
    }

    /// Drops all rows added since `savepoint`.
    pub fn roll_back(&mut self, savepoint: Savepoint) {
        self.shards.truncate(savepoint.shards);
        (self.open, self.cost) = (savepoint.open, savepoint.cost);
    }

    /// Closes the open shard if it has rows.
    pub fn close(&mut self) {
        if self.open.rows > 0 {
            let next = Shard {
                first_row: self.rows(),
                rows: 0,
                segments: Vec::new(),
            };
            self.shards.push(std::mem::replace(&mut self.open, next));
            self.cost = RowCost::default();
        }
    }

    /// All shards. Without any rows there is one empty shard, since readers of the output need the
    /// columns of a part.
    pub fn finish(mut self) -> Vec<Shard> {
        self.close();
        if self.shards.is_empty() {
            self.shards.push(self.open);
        }
        self.shards
    }

    /// Adds consecutive rows of one input (a row group), each of which costs `cost`, and closes
    /// shards that are full. If the open shard is nearly full and the run does not fit, it is
    /// closed first: otherwise its worker would read a row group for only a few rows.
    pub fn push_run(&mut self, input: u32, first_row: u64, rows: u64, cost: RowCost) {
        if self.is_nearly_full() && self.rows_that_fit(cost) < rows {
            self.close();
        }
        let (mut row, end) = (first_row, first_row + rows);
        while row < end {
            let take = self.rows_that_fit(cost).min(end - row);
            if take == 0 {
                self.close();
                continue;
            }
            let segment = Segment {
                input,
                first_row: row,
                rows: take,
                bytes: None,
                line: None,
                picks: None,
            };
            self.push(segment, cost);
            row += take;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bounds(rows: u64) -> ShardBounds {
        ShardBounds {
            rows,
            input_bytes: u64::MAX,
            output_bytes: u64::MAX,
        }
    }

    #[test]
    fn a_nearly_full_shard_ends_at_a_row_group() {
        let mut builder = ShardBuilder::new(bounds(4096));
        for group in 0..4 {
            builder.push_run(0, group * 1000, 1000, RowCost::default());
        }
        builder.push_run(0, 4000, 1000, RowCost::default());
        let rows: Vec<u64> = builder.finish().iter().map(|s| s.rows).collect();
        assert_eq!(rows, [4000, 1000]);
    }

    #[test]
    fn bytes_close_a_shard_but_one_row_always_fits() {
        let mut builder = ShardBuilder::new(ShardBounds {
            rows: 100,
            input_bytes: 10,
            output_bytes: 1000,
        });
        builder.push_run(
            0,
            0,
            3,
            RowCost {
                input_bytes: 25,
                output_bytes: 1,
            },
        );
        builder.push_run(
            0,
            3,
            7,
            RowCost {
                input_bytes: 3,
                output_bytes: 1,
            },
        );
        let rows: Vec<u64> = builder.finish().iter().map(|s| s.rows).collect();
        assert_eq!(rows, [1, 1, 1, 3, 3, 1]);
    }

    proptest! {
        #[test]
        fn shards_cover_every_row_once(
            shard_rows in 1u64..50,
            files in prop::collection::vec(prop::collection::vec((0u64..120, 0u64..40, 0u64..40), 0..6), 0..5),
        ) {
            let bounds = ShardBounds { rows: shard_rows, input_bytes: 300, output_bytes: 200 };
            let mut builder = ShardBuilder::new(bounds);
            let mut expected = Vec::new();
            for (input, groups) in files.iter().enumerate() {
                let mut at = 0;
                for &(rows, input_bytes, output_bytes) in groups {
                    builder.push_run(input as u32, at, rows, RowCost { input_bytes, output_bytes });
                    expected.extend((at..at + rows).map(|row| (input as u32, row)));
                    at += rows;
                }
            }
            let shards = builder.finish();
            prop_assert!(!shards.is_empty());
            let mut next = 0;
            let mut covered = Vec::new();
            for shard in &shards {
                prop_assert_eq!(shard.first_row, next);
                prop_assert!((shard.rows >= 1 || expected.is_empty()) && shard.rows <= shard_rows);
                prop_assert_eq!(shard.rows, shard.segments.iter().map(|s| s.rows).sum::<u64>());
                next += shard.rows;
                for s in &shard.segments {
                    covered.extend((s.first_row..s.first_row + s.rows).map(|row| (s.input, row)));
                }
            }
            prop_assert_eq!(covered, expected);
        }
    }
}
