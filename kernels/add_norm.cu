// residual += delta; out = residual / sqrt(mean(residual^2) + eps) * weight, a block a row. (Zhang and Sennrich 2019.)
//
// WIDTH, THREADS, OUTPUT: see rows.cuh. residual, delta: [rows][WIDTH] BF16, delta may be null; weight: [WIDTH]. picked: null, or the rows of
// residual and delta that rows of out come from; then residual stays as it is.
#include "ptx.cuh"
#include "rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    add_norm(Bf16* residual, const Bf16* delta, const Bf16* weight, const u32* picked, float eps, void* out, float* scales) {
    __shared__ float scratch[2][WARPS];
    u64 from = u64(picked ? picked[blockIdx.x] : blockIdx.x) * WIDTH;
    Row row;
    float squares = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (column_of(v) >= WIDTH) continue;
        float x[8];
        row.vectors[v] = *(const Vec16*)(residual + from + column_of(v));
        unpack(row.vectors[v], x);
        if (delta) {
            float d[8];
            unpack(*(const Vec16*)(delta + from + column_of(v)), d);
#pragma unroll
            for (int i = 0; i < 8; i++) x[i] = round_bf16(x[i] + d[i]);
            row.vectors[v] = pack(x);
            if (!picked) *(Vec16*)(residual + from + column_of(v)) = row.vectors[v];
        }
#pragma unroll
        for (int i = 0; i < 8; i++) squares = fmaf(x[i], x[i], squares);
    }
    float mean = reduce(squares, scratch[0], [](float a, float b) { return a + b; }) / WIDTH;
    float scale = 1.0f / sqrtf(mean + eps);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (column_of(v) >= WIDTH) continue;
        float x[8], w[8];
        unpack(row.vectors[v], x);
        unpack(*(const Vec16*)(weight + column_of(v)), w);
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = round_bf16(x[i] * scale) * w[i];
        row.vectors[v] = pack(x);
    }
    write_row(row, out, scales, scratch[1]);
}
