//! Random weights, the same on every device.

/// A matrix of numbers uniform in [-scale, scale), rounded to BF16.
#[derive(Debug, Clone, Copy)]
pub struct RandomMatrix {
    pub seed: u64,
    pub rows: usize,
    pub columns: usize,
    pub scale: f32,
}

/// Number `index` of the random stream `seed`, in [-1, 1) (SplitMix64, Steele et al. 2014).
pub fn uniform(seed: u64, index: u64) -> f32 {
    let mut z = seed.wrapping_add((index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    (z >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}
