//! Hash maps keyed by ids that the engine counts up itself, with a cheap hash. Each step looks up
//! every sequence some ten times. SipHash protects against keys that an attacker chose to collide,
//! and nobody can choose these ids.
//!
//! See docs/decisions/058-per-token-work-uses-flat-memory.md.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map keyed by the id of a unit or a sequence.
pub type ById<V> = HashMap<u64, V, BuildHasherDefault<CounterHasher>>;

/// Spreads a counter over all bits: hash tables take the bucket from the low bits and a tag from
/// the high bits.
#[derive(Debug, Default, Clone, Copy)]
pub struct CounterHasher(u64);

impl Hasher for CounterHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write_u64(&mut self, id: u64) {
        // 2^64 divided by the golden ratio (Knuth, The Art of Computer Programming, 6.4). The shift
        // mixes the high bits into the low ones.
        let spread = id.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = spread ^ spread >> 32;
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(self.0 ^ u64::from(*byte));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counted_ids_spread() {
        let hash = |id| {
            let mut hasher = CounterHasher::default();
            hasher.write_u64(id);
            hasher.finish()
        };
        // 4,096 ids in 4,096 buckets: collisions are as rare as with random ids, and tags differ.
        let mut buckets = vec![0; 4096];
        let mut tags = [0; 128];
        for id in 1_000_000..1_004_096 {
            buckets[(hash(id) & 4095) as usize] += 1;
            tags[(hash(id) >> 57) as usize] += 1;
        }
        assert!(*buckets.iter().max().unwrap() <= 8);
        assert!(tags.iter().all(|count| (16..64).contains(count)), "{tags:?}");
    }
}
