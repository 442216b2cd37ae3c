// A row of BF16 in the registers of a thread block: a thread holds vectors of eight values, THREADS
// vectors apart.
//
// WIDTH: values per row, a multiple of 8 up to 65536. THREADS: threads per block, max(128,
// min(1024, the least power of two >= WIDTH / 32)). OUTPUT: 0 INT8, 1 FP8 (E4M3), 2 BF16: the
// format in which the row is written.
#pragma once
#include "eight_bits.cuh"

#define WARPS (THREADS / 32)
#define VECTORS ((WIDTH / 8 + THREADS - 1) / THREADS)

static_assert(WIDTH % 8 == 0 && THREADS % 32 == 0 && VECTORS <= 8, "a row of whole vectors, of which a thread's registers hold its own");

struct Row {
    Vec16 vectors[VECTORS];
};

// First column of a thread's vector `v`; at least WIDTH if the thread has no such vector.
__device__ inline int column_of(int v) {
    return (v * THREADS + int(threadIdx.x)) * 8;
}

// Loads eight F32 that are aligned to 16 bytes.
__device__ inline void load(const float* from, float* to) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        Vec16 four = *(const Vec16*)(from + i);
#pragma unroll
        for (int j = 0; j < 4; j++) to[i + j] = bits_to_float(four.words[j]);
    }
}

// Reduces over the block by `op`, whose operands may come in any order. `scratch`: [WARPS], not
// used by other calls.
template <class Op> __device__ inline float reduce(float x, float* scratch, Op op) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x = op(x, shuffle_xor(x, lanes));
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = scratch[0];
#pragma unroll
    for (int w = 1; w < WARPS; w++) x = op(x, scratch[w]);
    return x;
}

// The factor of a norm of the row, from this thread's part of the sum of squares.
__device__ inline float norm_scale(float squares, float* scratch, float eps) {
    return 1.0f / sqrtf(reduce(squares, scratch, [](float a, float b) { return a + b; }) / WIDTH + eps);
}

// Normalises eight values, without rounding the results.
__device__ inline void normalise(float* x, float scale, const float* weight) {
    float w[8];
    load(weight, w);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = x[i] * scale * w[i];
}

// Writes the row: BF16, or eight bits and its scale. A value that is not finite makes the scale NaN, so that it shows in the logits.
__device__ inline void write_row(const Row& row, void* out, float* scales, float* scratch) {
    u64 at = u64(blockIdx.x) * WIDTH;
#if OUTPUT == 2
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        if (column_of(v) < WIDTH) *(Vec16*)((Bf16*)out + at + column_of(v)) = row.vectors[v];
#else
    Magnitude seen = {};
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (column_of(v) >= WIDTH) continue;
        float x[8];
        unpack(row.vectors[v], x);
        seen.see(x);
    }
    float most = reduce(seen.bound(), scratch, [](float a, float b) { return fmaxf(a, b); });
    Steps steps = steps_of(most, OUTPUT == 0 ? 127.0f : 448.0f);
    if (threadIdx.x == 0) scales[blockIdx.x] = steps.scale;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (column_of(v) >= WIDTH) continue;
        float x[8];
        unpack(row.vectors[v], x);
#if OUTPUT == 0
        u64 bytes = to_int8(x, steps.inverse);
#else
        u32 words[2] = {};
#pragma unroll
        for (int i = 0; i < 8; i += 2)
            words[i / 4] |= u32(floats_to_e4m3(x[i] * steps.inverse, x[i + 1] * steps.inverse)) << i % 4 * 8;
        u64 bytes = u64(words[0]) | u64(words[1]) << 32;
#endif
        *(u64*)((u8*)out + at + column_of(v)) = bytes;
    }
#endif
}
