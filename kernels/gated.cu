// silu(gate) * up (Shazeer 2020, SwiGLU), in BF16 or quantized by row, a block a row.
//
// WIDTH, THREADS, OUTPUT: see rows.cuh. gate_up: [rows][gate: WIDTH, up: WIDTH] BF16.
#include "ptx.cuh"
#include "rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) gated(const Bf16* gate_up, void* out, float* scales) {
    __shared__ float scratch[WARPS];
    const Bf16* from = gate_up + u64(blockIdx.x) * 2 * WIDTH;
    Row row;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (column_of(v) >= WIDTH) continue;
        float gate[8], up[8];
        unpack(*(const Vec16*)(from + column_of(v)), gate);
        unpack(*(const Vec16*)(from + WIDTH + column_of(v)), up);
#pragma unroll
        for (int i = 0; i < 8; i++) up[i] *= round_bf16(gate[i] / (1.0f + expf(-gate[i])));
        row.vectors[v] = pack(up);
    }
    write_row(row, out, scales, scratch);
}
