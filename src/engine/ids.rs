//! Hash maps with a cheap hash, keyed by ids that the engine counts up itself. Each step looks up
//! every sequence about ten times. SipHash would protect against keys that an attacker chooses to
//! collide, but these ids cannot be chosen.
//!
//! See docs/decisions/058-per-token-work-uses-flat-memory.md.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map keyed by the key of a sample or a sequence.
pub type ById<V> = HashMap<u64, V, BuildHasherDefault<CounterHasher>>;

/// Hashes a counter so that all bits vary: hash tables take the bucket from the low bits and a tag
/// from the high bits.
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
