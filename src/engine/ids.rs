//! Maps by numbers that we count up ourselves: each step looks every sequence up some ten times, and what SipHash guards against, keys that
//! somebody chose to collide, cannot be.
//!
//! See docs/decisions/058-per-token-work-uses-flat-memory.md.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map by unit or sequence.
pub type ById<V> = HashMap<u64, V, BuildHasherDefault<IdHasher>>;

/// Spreads a counter over all bits: tables take a bucket from the low ones and a tag from the high ones.
#[derive(Debug, Default, Clone, Copy)]
pub struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write_u64(&mut self, id: u64) {
        // 2^64 divided by the golden ratio (Knuth, The Art of Computer Programming, 6.4); its high bits go to the low ones, too.
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
            let mut hasher = IdHasher::default();
            hasher.write_u64(id);
            hasher.finish()
        };
        // 4,096 ids in as many buckets: as random ones would, few of them meet; and tags differ.
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
