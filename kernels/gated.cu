// silu(gate) * up, or gelu(gate) * up (Shazeer 2020, SwiGLU and GEGLU), in BF16 or quantized by
// row; one thread block per row.
//
// WIDTH, THREADS, OUTPUT: see rows.cuh. GELU: 0 SiLU, 1 GELU as approximated by tanh (Hendrycks and Gimpel 2016).
// gate_up: [rows][gate: WIDTH, up: WIDTH] BF16.
#include "ptx.cuh"
#include "rows.cuh"

__device__ inline float activation(float x) {
#if GELU
    // Equal to x (1 + tanh u) / 2, but accurate where tanh u is near -1. A finite x is at worst
    // divided by infinity, which gives no NaN.
    float u = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (1.0f + expf(-2.0f * u));
#else
    return x / (1.0f + expf(-x));
#endif
}

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
        for (int i = 0; i < 8; i++) up[i] *= round_bf16(activation(gate[i]));
        row.vectors[v] = pack(up);
    }
    write_row(row, out, scales, scratch);
}
