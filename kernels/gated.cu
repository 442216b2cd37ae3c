// silu(gate) * up, or gelu(gate) * up (Shazeer 2020, SwiGLU and GEGLU), or the square of a positive up, in BF16 or
// quantized by row; one thread block per row.
//
// WIDTH, THREADS, OUTPUT: see rows.cuh. ACTIVATION: 0 SiLU, 1 GELU as approximated by tanh (Hendrycks
// and Gimpel 2016), 2 clamped: gate / (1 + exp(-alpha gate)) (up + 1), with the gate bounded above and
// up on both sides by `limit` (gpt-oss, 2025), 3 squared ReLU (So et al. 2021), which has no gate: up is its own.
// gate_up: [rows][gate: WIDTH, up: WIDTH] BF16, or [rows][up: WIDTH].
#include "ptx.cuh"
#include "rows.cuh"

// Values of a row before its up projection.
#define GATES (ACTIVATION == 3 ? 0 : WIDTH)

__device__ inline float activation(float x, float alpha, float limit) {
#if ACTIVATION == 1
    // Equal to x (1 + tanh u) / 2, but accurate where tanh u is near -1. A finite x is at worst
    // divided by infinity, which gives no NaN.
    float u = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (1.0f + expf(-2.0f * u));
#elif ACTIVATION == 2
    // A comparison keeps NaN, which a minimum would lose.
    x = x > limit ? limit : x;
    return x / (1.0f + expf(-alpha * x));
#elif ACTIVATION == 3
    // A comparison keeps NaN here, too.
    return x < 0.0f ? 0.0f : x;
#else
    return x / (1.0f + expf(-x));
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) gated(const Bf16* gate_up, void* out, float* scales, float alpha,
                                                           float limit) {
    __shared__ float scratch[WARPS];
    const Bf16* from = gate_up + u64(blockIdx.x) * (GATES + WIDTH);
    Row row;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (column_of(v) >= WIDTH) continue;
        float gate[8], up[8];
        unpack(*(const Vec16*)(from + column_of(v)), gate);
        unpack(*(const Vec16*)(from + GATES + column_of(v)), up);
#pragma unroll
        for (int i = 0; i < 8; i++) {
#if ACTIVATION == 2
            float bounded = up[i] > limit ? limit : up[i] < -limit ? -limit : up[i];
            up[i] = round_bf16(bounded + 1.0f);
#endif
            up[i] *= round_bf16(activation(gate[i], alpha, limit));
        }
        row.vectors[v] = pack(up);
    }
    write_row(row, out, scales, scratch);
}
