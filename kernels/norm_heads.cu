// Normalises all query heads, or all key heads, of each token together, in place, before rope_store.cu
// rotates them (OLMo 2, 2024); one thread block per token.
//
// WIDTH: of all these heads, THREADS, OUTPUT (2): see rows.cuh. heads: WIDTH values of each token, BF16;
// tokens are `stride` values apart, a multiple of 8. weight: [WIDTH] F32.
#include "ptx.cuh"
#include "rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) norm_heads(Bf16* heads, const float* weight, float eps, int stride) {
    __shared__ float scratch[WARPS];
    heads += u64(blockIdx.x) * stride;
    Row row;
    float squares = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (column_of(v) >= WIDTH) continue;
        row.vectors[v] = *(const Vec16*)(heads + column_of(v));
        float x[8];
        unpack(row.vectors[v], x);
#pragma unroll
        for (int i = 0; i < 8; i++) squares = fmaf(x[i], x[i], squares);
    }
    float scale = norm_scale(squares, scratch, eps);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (column_of(v) >= WIDTH) continue;
        float x[8];
        unpack(row.vectors[v], x);
        normalise(x, scale, weight + column_of(v));
        *(Vec16*)(heads + column_of(v)) = pack(x);
    }
}
