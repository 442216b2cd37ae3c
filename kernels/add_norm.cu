// residual += delta; out = residual / sqrt(mean(residual^2) + eps) * weight; one thread block per
// row. (Zhang and Sennrich 2019.)
//
// WIDTH, THREADS, OUTPUT: see rows.cuh. DELTA_NORM: 1 if delta is normalised first (Gemma 2, 2024),
// else 0. CENTERED: 1 if the mean is subtracted from the sum before it is normalised (Ba et al. 2016),
// else 0. SCALED: 1 if the sum is multiplied by `factor` (Gemma 4, 2026), else 0. residual, delta: [rows][WIDTH] BF16; without DELTA_NORM, delta may be null. weight,
// delta_weight (read with DELTA_NORM): [WIDTH] F32. picked: null, or for each row of out the row of
// residual and delta that it comes from; residual is then not written.
#include "ptx.cuh"
#include "rows.cuh"

#ifndef CENTERED
#define CENTERED 0
#endif
#ifndef SCALED
#define SCALED 0
#endif
// Without this bound, the compiler saves registers for two blocks of 1024 threads, and spills some.
#if THREADS == 1024
#define BOUNDS THREADS, 1
#else
#define BOUNDS THREADS
#endif

extern "C" __global__ void __launch_bounds__(BOUNDS)
    add_norm(Bf16* residual, const Bf16* delta, const float* delta_weight, const float* weight, const u32* picked, float eps,
             float factor, void* out, float* scales) {
    __shared__ float scratch[2 + DELTA_NORM + CENTERED][WARPS];
    u64 from = u64(picked ? picked[blockIdx.x] : blockIdx.x) * WIDTH;
    Row row;
#if DELTA_NORM
    // The registers do not hold two of the widest rows. So delta is read again, from the cache, and
    // the residual stays in registers.
    float delta_squares = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (column_of(v) >= WIDTH) continue;
        float d[8];
        row.vectors[v] = *(const Vec16*)(residual + from + column_of(v));
        unpack(*(const Vec16*)(delta + from + column_of(v)), d);
#pragma unroll
        for (int i = 0; i < 8; i++) delta_squares = fmaf(d[i], d[i], delta_squares);
    }
    float delta_scale = norm_scale(delta_squares, scratch[2], eps);
#endif
#if CENTERED
    float total = 0;
#endif
    float squares = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (column_of(v) >= WIDTH) continue;
        float x[8];
#if !DELTA_NORM
        row.vectors[v] = *(const Vec16*)(residual + from + column_of(v));
#endif
        unpack(row.vectors[v], x);
        if (DELTA_NORM || delta) {
            float d[8];
            unpack(*(const Vec16*)(delta + from + column_of(v)), d);
#if DELTA_NORM
            normalise(d, delta_scale, delta_weight + column_of(v));
#pragma unroll
            for (int i = 0; i < 8; i++) d[i] = round_bf16(d[i]);
#endif
#pragma unroll
            for (int i = 0; i < 8; i++) {
                x[i] = round_bf16(x[i] + d[i]);
#if SCALED
                x[i] = round_bf16(x[i] * factor);
#endif
            }
            row.vectors[v] = pack(x);
            if (!picked) *(Vec16*)(residual + from + column_of(v)) = row.vectors[v];
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
#if CENTERED
            total += x[i];
#else
            squares = fmaf(x[i], x[i], squares);
#endif
        }
    }
#if CENTERED
    float mean = reduce(total, scratch[2 + DELTA_NORM], [](float a, float b) { return a + b; }) / WIDTH;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (column_of(v) >= WIDTH) continue;
        float x[8];
        unpack(row.vectors[v], x);
#pragma unroll
        for (int i = 0; i < 8; i++) squares = fmaf(x[i] - mean, x[i] - mean, squares);
    }
#endif
    float scale = norm_scale(squares, scratch[0], eps);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (column_of(v) >= WIDTH) continue;
        float x[8];
        unpack(row.vectors[v], x);
#if CENTERED
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] -= mean;
#endif
        normalise(x, scale, weight + column_of(v));
        row.vectors[v] = pack(x);
    }
    write_row(row, out, scales, scratch[1]);
}
