// Quantizes rows to INT8 in groups of columns, with one scale per row and group: what the products of
// codes of four bits read (see coded_tile.cuh).
//
// GROUP: columns of a group, a multiple of 8. x: [rows][groups][GROUP] BF16. out: [rows][groups]
// [PADDED], whose values beyond a group are zeros. scales: [groups][rows].
//
// As many lanes as a group has vectors of eight values take a group, at most a warp.
#include "ptx.cuh"
#include "eight_bits.cuh"

#define THREADS 128
#define PADDED ((GROUP + 31) / 32 * 32)
#define VECTORS (PADDED / 8)
#define LANES (VECTORS > 16 ? 32 : VECTORS > 8 ? 16 : VECTORS > 4 ? 8 : 4)

static_assert(GROUP % 8 == 0 && GROUP > 0, "a group of whole vectors");

// Eight values of a group, or zeros beyond it.
__device__ inline void load_vector(const Bf16* group, int vector, float* x) {
    Vec16 packed = {};
    if (vector * 8 < GROUP) packed = *(const Vec16*)(group + vector * 8);
    unpack(packed, x);
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize_groups(const Bf16* x, u8* out, float* scales, int rows, int groups) {
    u64 index = u64(blockIdx.x) * (THREADS / LANES) + threadIdx.x / LANES;
    bool exists = index < u64(rows) * groups;
    // Lanes without a group of their own read another one, so that all take part in the exchange.
    if (!exists) index = 0;
    const Bf16* from = x + index * GROUP;
    int lane = int(threadIdx.x) % LANES;
    Magnitude seen = {};
    float values[8];
    for (int vector = lane; vector < VECTORS; vector += LANES) {
        load_vector(from, vector, values);
        seen.see(values);
    }
    float most = seen.bound();
#pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) most = fmaxf(most, shuffle_xor(most, lanes));
    if (!exists) return;
    Steps steps = steps_of(most, 127.0f);
    if (lane == 0) scales[index % groups * rows + index / groups] = steps.scale;
    for (int vector = lane; vector < VECTORS; vector += LANES) {
        load_vector(from, vector, values);
        *(u64*)(out + index * PADDED + vector * 8) = to_int8(values, steps.inverse);
    }
}
