//! Reads a published part, Parquet or JSON lines: its origin and its counts. Used to commit a part
//! that another worker put, and to verify parts.
//!
//! A part belongs to a shard of this job if it names the job and holds exactly the shard's rows, in
//! order. A Parquet part names job and shard in its metadata and the rows in a column. Each line of
//! a `jsonl` part names job and row in its `id`.

use arrow::array::RecordBatch;
use bytes::Bytes;
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::Ledger;
use super::data;
use super::lines::lines;
use super::publish::{META_GENERATION, META_JOB, META_SHARD};
use super::record::Tally;
use super::rowset::RowSet;
use crate::dataset::part::line_id;
use crate::dataset::part_in;

/// Rows per decoded batch.
const BATCH_ROWS: usize = 8192;

/// Generation and counts of a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PartContents {
    pub generation: u32,
    /// Counts over the whole part.
    pub tally: Tally,
    /// Counts over those rows that the ledger's generation runs: all rows in the first generation,
    /// only the retried rows in a later one.
    pub generation_tally: Tally,
}

impl Ledger {
    /// Reads `bytes` as the part of `shard`. The text of an error continues a sentence that begins
    /// with the name of the part.
    pub(super) fn read_part(&self, shard: u32, bytes: &Bytes) -> Result<PartContents, String> {
        let generation = match self.job().part_extension.as_str() {
            "jsonl" => jsonl_generation(bytes),
            _ => self.parquet_generation(shard, bytes)?,
        };
        let (tally, generation_tally) = self.count_part_rows(shard, bytes)?;
        Ok(PartContents {
            generation,
            tally,
            generation_tally,
        })
    }

    /// The generation that a Parquet part names. The part must name this job and `shard`.
    pub(super) fn parquet_generation(&self, shard: u32, bytes: &Bytes) -> Result<u32, String> {
        let origin = part_origin(bytes)?;
        if origin.job.as_deref() != Some(self.job().job.as_str()) || origin.shard != Some(shard.to_string()) {
            return Err(match (origin.job, origin.shard) {
                (Some(job), Some(shard)) => format!("is foreign: it names job {job}, shard {shard}"),
                _ => "is foreign: gristmill did not write it".into(),
            });
        }
        let generation = origin.generation.unwrap_or_else(|| "0".into());
        generation
            .parse()
            .map_err(|_| format!("its metadata has an invalid generation: `{generation}`"))
    }

    /// Counts the rows of `bytes`, which must be the shard's rows, each once and in order. Returns
    /// the counts of all rows, and of those that the ledger's generation runs.
    pub(super) fn count_part_rows(&self, shard: u32, bytes: &Bytes) -> Result<(Tally, Tally), String> {
        let planned = self.job().shard(shard).map_err(|error| error.to_string())?;
        let mut count = PartCounter {
            next: planned.first_row,
            end: planned.first_row + planned.rows,
            rows_to_do: self.rows_to_do(shard),
            tally: Tally::default(),
            generation_tally: Tally::default(),
        };
        match self.job().part_extension.as_str() {
            "jsonl" => count.lines(bytes, self.job().job.as_str())?,
            _ => part_in::catch_panics(|| count.parquet(bytes))?,
        }
        if count.next == count.end {
            Ok((count.tally, count.generation_tally))
        } else {
            Err(format!(
                "ends before row {}; its shard ends before row {}",
                count.next, count.end
            ))
        }
    }
}

/// Checks and counts the rows of a part while it is read.
struct PartCounter {
    /// The row that must come next.
    next: u64,
    /// The row after the shard's last.
    end: u64,
    rows_to_do: RowSet,
    tally: Tally,
    generation_tally: Tally,
}

impl PartCounter {
    fn parquet(&mut self, bytes: &Bytes) -> Result<(), String> {
        let builder = part_in::open(bytes).map_err(unreadable)?;
        for batch in builder.with_batch_size(BATCH_ROWS).build().map_err(unreadable)? {
            let batch: RecordBatch = batch.map_err(unreadable)?;
            let rows = data::row_numbers(&batch)?;
            rows.iter().try_for_each(|&row| self.expect_row(row))?;
            self.tally.add(&data::tally(&batch, &RowSet::from_range(0..u64::MAX))?);
            self.generation_tally.add(&data::tally(&batch, &self.rows_to_do)?);
        }
        Ok(())
    }

    fn lines(&mut self, bytes: &[u8], job: &str) -> Result<(), String> {
        for line in lines(bytes)? {
            let (number, line) = line?;
            if self.next < self.end && line.id != line_id(job, self.next) {
                let (id, want) = (line.id, line_id(job, self.next));
                return Err(format!("line {number} has id `{id}` where `{want}` belongs"));
            }
            let row = self.next;
            self.expect_row(row)?;
            let tally = line.tally().map_err(|why| format!("line {number}: {why}"))?;
            self.tally.add(&tally);
            if self.rows_to_do.contains(row) {
                self.generation_tally.add(&tally);
            }
        }
        Ok(())
    }

    /// Checks that `row` is the next row of the shard.
    fn expect_row(&mut self, row: u64) -> Result<(), String> {
        if self.next == self.end {
            return Err(format!(
                "goes on after row {}, the last of its shard",
                self.end.saturating_sub(1)
            ));
        }
        if row != self.next {
            return Err(format!("has row {row} in place of row {}", self.next));
        }
        self.next += 1;
        Ok(())
    }
}

fn unreadable(error: impl std::fmt::Display) -> String {
    format!("cannot be read: {error}")
}

/// Marks the generation in a `jsonl` part, which has no metadata: generation g has g spaces before
/// the last line end, which JSON readers ignore. So parts of two generations always differ.
pub(super) fn mark_generation(bytes: Bytes, generation: u32) -> Bytes {
    if generation == 0 || bytes.is_empty() {
        return bytes;
    }
    let mut marked = bytes.strip_suffix(b"\n").unwrap_or(&bytes).to_vec();
    marked.resize(marked.len() + generation as usize, b' ');
    marked.push(b'\n');
    marked.into()
}

/// The generation that [`mark_generation`] wrote.
pub(super) fn jsonl_generation(bytes: &[u8]) -> u32 {
    let text = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    text.iter().rev().take_while(|&&b| b == b' ').count() as u32
}

/// The origin that a Parquet part names in its metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
struct PartOrigin {
    job: Option<String>,
    shard: Option<String>,
    /// `None` in the first generation.
    generation: Option<String>,
}

/// Reads the footer of a Parquet part.
fn part_origin(bytes: &Bytes) -> Result<PartOrigin, String> {
    let reader = SerializedFileReader::new(bytes.clone()).map_err(unreadable)?;
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
    })
}
