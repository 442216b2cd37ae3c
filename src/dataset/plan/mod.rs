//! The inputs of a job as they were planned, and its shards: plain data that goes into the ledger.

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
    /// Whether files of this format state their columns.
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
    /// Number of rows that the job takes.
    pub fn taken(&self) -> u64 {
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

/// Limits of one shard. The first limit that is reached closes a shard; a single row always fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardBounds {
    pub rows: u64,
    /// Uncompressed bytes that are read and held to process the shard.
    pub input_bytes: u64,
    /// Estimated bytes of the published part (uncompressed).
    pub output_bytes: u64,
}

/// Cost per row of a run; see [`ShardBuilder::push`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RowCost {
    pub input_bytes: u64,
    pub output_bytes: u64,
}

/// Builds shards from rows in order: plain data in, plain data out.
#[derive(Debug)]
pub struct ShardBuilder {
    bounds: ShardBounds,
    shards: Vec<Shard>,
    open: Shard,
    cost: RowCost,
}

/// A saved state of a [`ShardBuilder`].
#[derive(Debug)]
pub struct Mark {
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

    /// Number of rows at this cost per row that fit into the open shard, at least 1 if it is empty.
    pub fn room(&self, cost: RowCost) -> u64 {
        let fits = |bound: u64, used: u64, each: u64| bound.saturating_sub(used).checked_div(each).unwrap_or(u64::MAX);
        let room = (self.bounds.rows - self.open.rows)
            .min(fits(self.bounds.input_bytes, self.cost.input_bytes, cost.input_bytes))
            .min(fits(
                self.bounds.output_bytes,
                self.cost.output_bytes,
                cost.output_bytes,
            ));
        if self.open.rows == 0 { room.max(1) } else { room }
    }

    /// Whether the open shard is at least three quarters full by rows. Then it should end at the
    /// next boundary of the input.
    pub fn nearly_full(&self) -> bool {
        self.open.rows >= self.bounds.rows - self.bounds.rows / 4
    }

    /// Adds rows of one input, each at `cost`; the caller must stay within [`ShardBuilder::room`].
    pub fn push(&mut self, more: Segment, cost: RowCost) {
        let rows = more.rows;
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
            Some(last) if last.input == more.input && last.first_row + last.rows == more.first_row => {
                last.rows += rows;
                if let (Some(have), Some(more)) = (&mut last.bytes, more.bytes) {
                    have.1 = more.1;
                }
            }
            _ => self.open.segments.push(more),
        }
        if self.open.rows >= self.bounds.rows {
            self.close();
        }
    }

    /// Saves the current state for [`ShardBuilder::go_back`].
    pub fn mark(&self) -> Mark {
        Mark {
            shards: self.shards.len(),
            open: self.open.clone(),
            cost: self.cost,
        }
    }

    /// Drops all rows added since `mark`.
    pub fn go_back(&mut self, mark: Mark) {
        self.shards.truncate(mark.shards);
        (self.open, self.cost) = (mark.open, mark.cost);
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

    /// All shards. Without any rows there is one empty shard: its part holds the columns, which
    /// readers of the folder need.
    pub fn finish(mut self) -> Vec<Shard> {
        self.close();
        if self.shards.is_empty() {
            self.shards.push(self.open);
        }
        self.shards
    }

    /// Adds a run of rows of one input (a row group) that all have the same cost, closing shards
    /// where they are full. A nearly full shard is closed before the run, so that it does not read
    /// a group for a few rows only.
    pub fn push_run(&mut self, input: u32, first_row: u64, rows: u64, cost: RowCost) {
        if self.nearly_full() && self.room(cost) < rows {
            self.close();
        }
        let (mut at, end) = (first_row, first_row + rows);
        while at < end {
            let take = self.room(cost).min(end - at);
            if take == 0 {
                self.close();
                continue;
            }
            let segment = Segment {
                input,
                first_row: at,
                rows: take,
                bytes: None,
                line: None,
                picks: None,
            };
            self.push(segment, cost);
            at += take;
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
    fn whole_row_groups_where_they_nearly_fill_a_shard() {
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
