// Random weights, for benchmarks: numbers `first` to `first + count - 1` of a stream, in BF16,
// eight per thread.
//
// Number `at` is `scale` times `uniform` of src/device/random.rs (SplitMix64), rounded:
// bit-identical to the host's numbers.
// count: a multiple of 8.
#include "ptx.cuh"
#include "types.cuh"

#define AT_ONCE 8

// In [-1, 1).
__device__ inline float uniform(u64 seed, u64 at) {
    u64 z = seed + (at + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    // The value has 24 bits, so both steps are exact.
    return float(u32(z >> 40)) / 8388608.0f - 1.0f;
}

extern "C" __global__ void __launch_bounds__(256) random_weights(Bf16* out, u64 seed, u64 first, u64 count, float scale) {
    u64 from = (u64(blockIdx.x) * 256 + threadIdx.x) * AT_ONCE;
    if (from >= count) return;
    Vec16 numbers;
#pragma unroll
    for (int i = 0; i < AT_ONCE / 2; i++) {
        u64 at = first + from + i * 2;
        numbers.words[i] = to_bf16_pair(scale * uniform(seed, at), scale * uniform(seed, at + 1));
    }
    *(Vec16*)(out + from) = numbers;
}
