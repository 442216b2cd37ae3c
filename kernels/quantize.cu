// Quantizes rows to eight bits, with one scale per row; one thread block per row. For attention's
// results, which the output projection reads, and for weights.
//
// WIDTH, THREADS, OUTPUT: see rows.cuh. x: [rows][WIDTH] BF16.
#include "ptx.cuh"
#include "rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) quantize(const Bf16* x, void* out, float* scales) {
    __shared__ float scratch[WARPS];
    Row row;
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        if (column_of(v) < WIDTH) row.vectors[v] = *(const Vec16*)(x + u64(blockIdx.x) * WIDTH + column_of(v));
    write_row(row, out, scales, scratch);
}
