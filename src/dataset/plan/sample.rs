//! `input.sample`: draws rows from the whole input, reproducibly: the drawn rows depend only on the
//! seed and on the number of rows.
//!
//! Each row gets a hash of the seed and its row number in the whole input. With a fraction, rows
//! with a hash below a threshold are drawn; with a count, the rows with the smallest hashes. The
//! job's record holds the drawn rows, as picks of the planned segments.
//!
//! See docs/decisions/038-a-sample-is-picks-in-planned-segments.md.

use std::collections::BinaryHeap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Segment, Shard};

/// The column with a drawn row's number in the whole input.
pub const INPUT_ROW: &str = "input_row";

/// Maximum number of drawn rows. The job's record lists each of them.
const DRAWN_MAX: u64 = 10_000_000;

/// Maximum number of planned shards that a shard of drawn rows spans, counted from its first drawn
/// row.
const JOINED_SHARDS_MAX: usize = 64;

/// Rows to draw: a number of them or a fraction of all.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Sample {
    /// So many rows; all where there are fewer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<u64>,
    /// About this part of all rows, more than 0 and at most 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fraction: Option<f64>,
    /// Another seed draws other rows.
    #[serde(default)]
    pub seed: u64,
}

impl Sample {
    /// Checks that the sample can be drawn. The error follows the field's name in the message.
    pub fn check(&self) -> Result<(), String> {
        match (self.rows, self.fraction) {
            (Some(0), None) => Err("has `rows: 0`; it must be at least 1".into()),
            (Some(rows), None) if rows > DRAWN_MAX => Err(format!("has `rows: {rows}`, more than {DRAWN_MAX}")),
            (Some(_), None) => Ok(()),
            (None, Some(part)) if part > 0.0 && part <= 1.0 => Ok(()),
            (None, Some(part)) => Err(format!("has `fraction: {part}`; it must be more than 0 and at most 1")),
            _ => Err("needs one of `rows` and `fraction`".into()),
        }
    }

    /// The numbers of the rows that are drawn from `total` rows, in ascending order.
    fn drawn_rows(&self, total: u64) -> Result<Vec<u64>, String> {
        if let Some(part) = self.fraction {
            // The fraction as a threshold for 64-bit hashes.
            let threshold = part * 2f64.powi(64);
            let rows = (0..total).filter(|row| (row_hash(self.seed, *row) as f64) < threshold);
            let rows: Vec<u64> = rows.take(DRAWN_MAX as usize + 1).collect();
            return if rows.len() as u64 > DRAWN_MAX {
                Err(format!(
                    "`input.sample` draws more than {DRAWN_MAX} rows, and the record names each of them; draw fewer"
                ))
            } else {
                Ok(rows)
            };
        }
        let count = self.rows.unwrap_or(0).min(total) as usize;
        let mut smallest = BinaryHeap::with_capacity(count + 1);
        for row in 0..total {
            smallest.push((row_hash(self.seed, row), row));
            if smallest.len() > count {
                smallest.pop();
            }
        }
        let mut rows: Vec<u64> = smallest.into_iter().map(|(_, row)| row).collect();
        rows.sort_unstable();
        Ok(rows)
    }

    /// Shards of the first `rows_max` drawn rows, with at most `shard_rows` rows each. `shards` are
    /// the planned shards of the whole input.
    pub fn draw(&self, shards: Vec<Shard>, rows_max: u64, shard_rows: u64) -> Result<Vec<Shard>, String> {
        let total = shards.last().map_or(0, |shard| shard.first_row + shard.rows);
        let drawn = self.drawn_rows(total)?;
        let mut drawn = drawn
            .into_iter()
            .take(usize::try_from(rows_max).unwrap_or(usize::MAX))
            .peekable();
        let mut joiner = ShardJoiner::default();
        for shard in shards {
            if drawn.peek().is_none() {
                break;
            }
            let mut first_row = shard.first_row;
            let mut picked = Vec::with_capacity(shard.segments.len());
            for segment in shard.segments {
                let end = first_row + segment.rows;
                let mut picks = Vec::new();
                while let Some(row) = drawn.next_if(|row| *row < end) {
                    picks.push(u32::try_from(row - first_row).map_err(|_| "a segment of too many rows")?);
                }
                first_row = end;
                picked.push(Segment {
                    picks: Some(picks),
                    ..segment
                });
            }
            joiner.add(picked, shard_rows);
        }
        Ok(joiner.finish())
    }
}

/// A hash for a row: a counter mixed until each bit depends on all bits (the finalizer of
/// SplitMix64, applied once for the seed and once for the row).
fn row_hash(seed: u64, row: u64) -> u64 {
    fn mix(mut x: u64) -> u64 {
        x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }
    mix(mix(seed) ^ mix(row).rotate_left(32))
}

/// Planned shards with few drawn rows, joined into larger ones.
#[derive(Default)]
struct ShardJoiner {
    shards: Vec<Shard>,
    open: Vec<Segment>,
    /// Drawn rows in the open shard.
    rows: u64,
    /// Number of planned shards that the open shard spans, from its first drawn row on.
    planned_shards: usize,
    next_first_row: u64,
}

impl ShardJoiner {
    fn add(&mut self, segments: Vec<Segment>, shard_rows: u64) {
        let rows: u64 = segments.iter().map(Segment::taken_rows).sum();
        if self.rows > 0 && (self.rows + rows > shard_rows || self.planned_shards >= JOINED_SHARDS_MAX) {
            self.close();
        }
        self.rows += rows;
        // Shards before the first drawn row are not counted, since they are not opened.
        self.planned_shards += usize::from(self.rows > 0);
        for segment in segments {
            let is_continued = |last: &&mut Segment| {
                last.input == segment.input
                    && u32::try_from(last.rows + segment.rows).is_ok()
                    && (last.taken_rows() > 0 || segment.taken_rows() == 0)
            };
            match self.open.last_mut().filter(is_continued) {
                Some(last) => {
                    let before = last.rows as u32;
                    let picks = segment.picks.into_iter().flatten().map(|pick| before + pick);
                    last.picks.get_or_insert_default().extend(picks);
                    last.rows += segment.rows;
                    if let (Some(last), Some(added)) = (&mut last.bytes, segment.bytes) {
                        last.1 = added.1;
                    }
                }
                None => self.open.push(segment),
            }
        }
    }

    fn close(&mut self) {
        let shard = Shard {
            first_row: self.next_first_row,
            rows: self.rows,
            segments: std::mem::take(&mut self.open),
        };
        self.next_first_row += self.rows;
        (self.rows, self.planned_shards) = (0, 0);
        self.shards.push(shard);
    }

    fn finish(mut self) -> Vec<Shard> {
        // Segments after the last drawn row are dropped. If no row is drawn, there is one empty
        // shard.
        if self.rows > 0 || self.shards.is_empty() {
            if self.rows == 0 {
                self.open.clear();
            }
            self.close();
        }
        self.shards
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn new_sample(rows: Option<u64>, fraction: Option<f64>, seed: u64) -> Sample {
        Sample { rows, fraction, seed }
    }

    #[test]
    fn samples_are_drawn_evenly_and_reproducibly() {
        let thousand = new_sample(Some(1000), None, 7).drawn_rows(100_000).unwrap();
        assert_eq!(thousand.len(), 1000);
        assert_eq!(thousand, new_sample(Some(1000), None, 7).drawn_rows(100_000).unwrap());
        assert_ne!(thousand, new_sample(Some(1000), None, 8).drawn_rows(100_000).unwrap());
        let tenth = new_sample(None, Some(0.1), 7).drawn_rows(100_000).unwrap();
        assert!((9_500..10_500).contains(&tenth.len()), "{}", tenth.len());
        // Each tenth of the input has about a tenth of the drawn rows.
        for part in 0..10 {
            let of_part = tenth.iter().filter(|row| **row / 10_000 == part).count();
            assert!((850..1_150).contains(&of_part), "{part}: {of_part}");
        }
        assert_eq!(new_sample(None, Some(1.0), 1).drawn_rows(1000).unwrap().len(), 1000);
        assert_eq!(new_sample(Some(10), None, 1).drawn_rows(3).unwrap(), [0, 1, 2]);
        // Records hold these rows, so the function must not change.
        assert_eq!(
            new_sample(Some(6), None, 3).drawn_rows(20).unwrap(),
            [0, 4, 6, 10, 14, 15]
        );
        assert!(new_sample(Some(DRAWN_MAX), None, 0).check().is_ok());
        for bad in [
            new_sample(Some(DRAWN_MAX + 1), None, 0),
            new_sample(None, None, 0),
            new_sample(Some(1), Some(0.5), 0),
            new_sample(Some(0), None, 0),
            new_sample(None, Some(0.0), 0),
            new_sample(None, Some(f64::NAN), 0),
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_number_of_drawn_rows_is_bounded() {
        let most = DRAWN_MAX as usize;
        let drawn = |total: u64| new_sample(None, Some(1.0), 5).drawn_rows(total).map(|rows| rows.len());
        assert_eq!(drawn(DRAWN_MAX), Ok(most));
        assert!(
            drawn(DRAWN_MAX + 1)
                .unwrap_err()
                .contains("draws more than 10000000 rows")
        );
    }

    /// Draws a few rows from thousands of shards: the number of files that a worker opens for one
    /// shard is bounded.
    #[test]
    fn a_shard_of_few_drawn_rows_spans_few_planned_shards() {
        let planned = |n: u64| Shard {
            first_row: n * 10,
            rows: 10,
            segments: vec![Segment {
                input: 0,
                first_row: n * 10,
                rows: 10,
                bytes: Some((n * 100, (n + 1) * 100)),
                line: None,
                picks: None,
            }],
        };
        for seed in 0..20 {
            let sample = new_sample(Some(5), None, seed);
            let shards = sample.draw((0..2000).map(planned).collect(), u64::MAX, 1000).unwrap();
            assert_eq!(shards.iter().map(|shard| shard.rows).sum::<u64>(), 5);
            let (mut found, mut next) = (Vec::new(), 0);
            for segment in shards.iter().flat_map(|shard| &shard.segments) {
                assert_eq!(segment.first_row, next, "the input's rows follow one another");
                next += segment.rows;
                let picks = segment.picks.iter().flatten();
                found.extend(picks.map(|pick| segment.first_row + u64::from(*pick)));
            }
            assert_eq!(found, sample.drawn_rows(20_000).unwrap());
            for shard in &shards {
                let opened = shard.segments.iter().filter(|segment| segment.taken_rows() > 0);
                let rows: u64 = opened.map(|segment| segment.rows).sum();
                assert!(
                    rows <= 10 * JOINED_SHARDS_MAX as u64,
                    "seed {seed}: {rows} rows are read over"
                );
            }
        }
    }

    proptest! {
        #[test]
        fn shards_hold_the_drawn_rows_in_order(
            sizes in prop::collection::vec(1u64..40, 1..60), count in 1u64..200, shard_rows in 1u64..30, most in 1u64..200, seed: u64,
        ) {
            // Every third shard begins another input.
            let (mut shards, mut at, mut in_input) = (Vec::new(), 0, 0);
            for (n, rows) in sizes.iter().enumerate() {
                if n % 3 == 0 {
                    in_input = 0;
                }
                let segment = Segment { input: (n / 3) as u32, first_row: in_input, rows: *rows, bytes: Some((in_input, in_input + rows)), line: None, picks: None };
                shards.push(Shard { first_row: at, rows: *rows, segments: vec![segment] });
                (at, in_input) = (at + rows, in_input + rows);
            }
            let sample = new_sample(Some(count), None, seed);
            let expected: Vec<u64> = sample.drawn_rows(at).unwrap().into_iter().take(most as usize).collect();
            let starts: Vec<u64> = shards.iter().filter(|s| s.segments[0].first_row == 0).map(|s| s.first_row).collect();
            let drawn = sample.draw(shards, most, shard_rows.max(40)).unwrap();
            let (mut next, mut found) = (0, Vec::new());
            for shard in &drawn {
                prop_assert_eq!(shard.first_row, next);
                next += shard.rows;
                prop_assert!(shard.rows > 0 && shard.rows <= shard_rows.max(40));
                for segment in &shard.segments {
                    prop_assert_eq!(segment.bytes.unwrap(), (segment.first_row, segment.first_row + segment.rows));
                    let picks = segment.picks.as_ref().unwrap();
                    prop_assert!(picks.iter().all(|pick| u64::from(*pick) < segment.rows));
                    found.extend(picks.iter().map(|pick| starts[segment.input as usize] + segment.first_row + u64::from(*pick)));
                }
            }
            prop_assert_eq!(found, expected);
        }
    }
}
