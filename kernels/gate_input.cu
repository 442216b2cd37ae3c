// gelu(gate) * input, of which a row has a part for each layer, in BF16 or quantized by row; one thread
// block per row.
//
// WIDTH, THREADS, OUTPUT: see rows.cuh. gate: [rows][WIDTH] BF16. inputs: rows of `stride` numbers in
// BF16, from the layer's part on. GELU is approximated by tanh, as in gated.cu.
#include "ptx.cuh"
#include "rows.cuh"

__device__ inline float gelu_tanh(float x) {
    float u = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (1.0f + expf(-2.0f * u));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gate_input(const Bf16* gate, const Bf16* inputs, int stride, void* out, float* scales) {
    __shared__ float scratch[WARPS];
    Row row;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (column_of(v) >= WIDTH) continue;
        float x[8], input[8];
        unpack(*(const Vec16*)(gate + u64(blockIdx.x) * WIDTH + column_of(v)), x);
        unpack(*(const Vec16*)(inputs + u64(blockIdx.x) * stride + column_of(v)), input);
#pragma unroll
        for (int i = 0; i < 8; i++) input[i] *= round_bf16(gelu_tanh(x[i]));
        row.vectors[v] = pack(input);
    }
    write_row(row, out, scales, scratch);
}
