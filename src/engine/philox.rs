//! Philox4x32-10, the counter-based random number generator of Salmon et al., "Parallel Random
//! Numbers: As Easy as 1, 2, 3" (SC11).
//!
//! A number is a pure function of key and counter, so a draw is independent of earlier draws, of
//! its batch slot and of the machine.

use sha2::{Digest, Sha256};

use crate::engine::request::SampleId;

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Added to the key before each round except the first: the fractional part of the golden ratio,
/// and √3 − 1, as 32-bit fractions.
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// A random stream's key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamKey([u32; 2]);

impl StreamKey {
    /// The key of one sample's stream: the first eight bytes of SHA-256 over seed, row, sample and
    /// attempt.
    pub fn of(seed: u64, id: SampleId) -> StreamKey {
        let hash = Sha256::new_with_prefix(b"gristmill-draw\0")
            .chain_update(seed.to_le_bytes())
            .chain_update(id.row.to_le_bytes())
            .chain_update(id.sample.to_le_bytes())
            .chain_update(id.attempt.to_le_bytes())
            .finalize();
        let word =
            |offset: usize| u32::from_le_bytes([hash[offset], hash[offset + 1], hash[offset + 2], hash[offset + 3]]);
        StreamKey([word(0), word(4)])
    }

    /// A number in [0, 1) with 53 random bits, for the token at this position of the sample's
    /// sequence.
    pub fn uniform(self, position: u32) -> f64 {
        let [a, b, ..] = philox4x32(self.0, [position, 0, 0, 0]);
        let bits = (u64::from(a) << 32 | u64::from(b)) >> 11;
        bits as f64 / (1u64 << 53) as f64
    }
}

/// Four random words for a key and a counter.
pub fn philox4x32(mut key: [u32; 2], mut counter: [u32; 4]) -> [u32; 4] {
    for round in 0..ROUNDS {
        if round > 0 {
            key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
        }
        let product_0 = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
        let product_2 = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
        counter = [
            (product_2 >> 32) as u32 ^ counter[1] ^ key[0],
            product_2 as u32,
            (product_0 >> 32) as u32 ^ counter[3] ^ key[1],
            product_0 as u32,
        ];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers published with Random123 (`kat_vectors`, philox4x32, 10 rounds).
    #[test]
    fn known_answers() {
        let cases = [
            ([0; 2], [0; 4], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            (
                [u32::MAX; 2],
                [u32::MAX; 4],
                [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
            ),
            (
                [0xa409_3822, 0x299f_31d0],
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (key, counter, expected) in cases {
            assert_eq!(philox4x32(key, counter), expected);
        }
    }

    #[test]
    fn streams_differ_by_seed_and_id() {
        let id = SampleId {
            job: 0,
            row: 7,
            sample: 0,
            attempt: 0,
        };
        let key = StreamKey::of(1, id);
        assert_eq!(key, StreamKey::of(1, id));
        for other in [
            StreamKey::of(2, id),
            StreamKey::of(1, SampleId { row: 8, ..id }),
            StreamKey::of(1, SampleId { sample: 1, ..id }),
            StreamKey::of(1, SampleId { attempt: 1, ..id }),
        ] {
            assert_ne!(key, other);
        }
        assert_ne!(key.uniform(0), key.uniform(1));
    }

    #[test]
    fn numbers_are_uniform() {
        let key = StreamKey::of(
            3,
            SampleId {
                job: 0,
                row: 0,
                sample: 0,
                attempt: 0,
            },
        );
        let mut bins = [0u32; 20];
        for position in 0..20_000 {
            let x = key.uniform(position);
            assert!((0.0..1.0).contains(&x));
            bins[(x * 20.0) as usize] += 1;
        }
        let chi: f64 = bins.iter().map(|n| (f64::from(*n) - 1000.0).powi(2) / 1000.0).sum();
        assert!(
            chi < 43.8,
            "chi-square {chi} with 19 degrees of freedom, 0.999 quantile 43.8"
        );
    }
}
