//! Chooses the rows of a job for a recheck: deterministic, and spread over the whole job.

use std::collections::BTreeSet;

use sha2::{Digest, Sha256};

use crate::dataset::plan::Shard;

/// Rows of one shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardSample {
    pub shard: u32,
    /// Row numbers in the job's whole input; at least one.
    pub rows: BTreeSet<u64>,
}

/// Draws `wanted` rows of a job, or all if there are fewer, grouped by shard. `job_hash`: the hash
/// of the job file.
///
/// Each shard gives its proportional share of rows, to within one. If there are more shards than
/// rows, the shards that give a row are evenly spaced. A hash of `job_hash` and the row's number
/// selects the rows within a shard, so a sorted input does not bias the sample.
pub fn sample(shards: &[Shard], wanted: u64, job_hash: &str) -> Vec<ShardSample> {
    let all: u128 = shards.iter().map(|shard| u128::from(shard.rows)).sum();
    let wanted = u128::from(wanted).min(all);
    // The offset of the running count depends on the job. Were it 0, rounding would always give the
    // extra row to the last shard, and never to the first.
    let offset = match all {
        0 => 0,
        _ => u128::from(rank_key(job_hash, u64::MAX)) % all,
    };
    let sampled_before = |row: u64| (u128::from(row) * wanted + offset).checked_div(all).unwrap_or(0);
    let sample_shard = |(number, shard): (usize, &Shard)| {
        let rows = shard.first_row..shard.first_row + shard.rows;
        let count = (sampled_before(rows.end) - sampled_before(rows.start)) as usize;
        let mut ranked_rows: Vec<(u64, u64)> = match count {
            0 => return None,
            _ => rows.map(|row| (rank_key(job_hash, row), row)).collect(),
        };
        if count < ranked_rows.len() {
            ranked_rows.select_nth_unstable(count);
            ranked_rows.truncate(count);
        }
        Some(ShardSample {
            shard: number as u32,
            rows: ranked_rows.into_iter().map(|(_, row)| row).collect(),
        })
    };
    shards.iter().enumerate().filter_map(sample_shard).collect()
}

/// The row's rank in its shard: the rows with the lowest keys are drawn.
fn rank_key(job_hash: &str, row: u64) -> u64 {
    let digest = Sha256::new_with_prefix(b"gristmill-recheck\0")
        .chain_update(job_hash)
        .chain_update(row.to_le_bytes())
        .finalize();
    digest.iter().take(8).fold(0, |key, byte| key << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shards(rows: &[u64]) -> Vec<Shard> {
        let mut first_row = 0;
        let shard = |&rows: &u64| {
            first_row += rows;
            Shard {
                first_row: first_row - rows,
                rows,
                segments: Vec::new(),
            }
        };
        rows.iter().map(shard).collect()
    }

    fn rows_of(sample: &[ShardSample]) -> Vec<u64> {
        sample.iter().flat_map(|shard| shard.rows.iter().copied()).collect()
    }

    #[test]
    fn the_same_job_has_the_same_sample_and_another_job_another() {
        let shards = shards(&[256; 8]);
        let one = sample(&shards, 200, "one");
        assert_eq!(one, sample(&shards, 200, "one"));
        assert_ne!(rows_of(&one), rows_of(&sample(&shards, 200, "other")));
        assert_ne!(rows_of(&one), (0..200).collect::<Vec<_>>(), "not the first rows");
    }

    #[test]
    fn few_rows_of_many_shards_are_spread_evenly() {
        let found = sample(&shards(&[10; 1000]), 5, "job");
        let numbers: Vec<u32> = found.iter().map(|shard| shard.shard).collect();
        assert_eq!(found.iter().map(|shard| shard.rows.len()).collect::<Vec<_>>(), [1; 5]);
        assert!(
            numbers
                .windows(2)
                .all(|pair| (199..=201).contains(&(pair[1] - pair[0]))),
            "{numbers:?}"
        );
    }

    /// Each position in a shard is drawn equally often: over 400 jobs, each of ten about 160 times.
    #[test]
    fn every_position_in_a_shard_is_drawn_equally_often() {
        let shards = shards(&[10; 4]);
        let mut drawn = [0_u32; 10];
        for job in 0..400 {
            for row in rows_of(&sample(&shards, 4, &job.to_string())) {
                drawn[row as usize % 10] += 1;
            }
        }
        let chi: f64 = drawn.iter().map(|n| (f64::from(*n) - 160.0).powi(2) / 160.0).sum();
        assert!(
            chi < 27.9,
            "chi-square {chi} with 9 degrees of freedom, 0.999 quantile 27.9"
        );
    }

    proptest! {
        #[test]
        fn the_requested_number_of_rows_is_drawn_or_all(rows in prop::collection::vec(1_u64..40, 0..30), wanted in 1_u64..700) {
            let shards = shards(&rows);
            let all: u64 = rows.iter().sum();
            let found = sample(&shards, wanted, "job");
            prop_assert_eq!(rows_of(&found).len() as u64, wanted.min(all));
            for shard_sample in &found {
                let shard = &shards[shard_sample.shard as usize];
                let share = wanted.min(all) as f64 * shard.rows as f64 / all as f64;
                prop_assert!((shard_sample.rows.len() as f64 - share).abs() < 1.0 + 1e-9);
                prop_assert!(shard_sample.rows.iter().all(|row| (shard.first_row..shard.first_row + shard.rows).contains(row)));
            }
        }
    }
}
