// Writes a row for each expert of each token, in the order of sorted rows: the token's row times the expert's weight
// (Llama 4, 2025); one thread block per expert of a token.
//
// x: [tokens][width] BF16; width is a multiple of 8. rows, weights: [tokens][per_token], the sorted row of each of a
// token's experts, and its weight. out: [sorted rows][width] BF16.
#include "ptx.cuh"
#include "types.cuh"

#define THREADS 128

extern "C" __global__ void __launch_bounds__(THREADS)
    scale_rows(const Bf16* x, const u32* rows, const float* weights, Bf16* out, int per_token, int width) {
    const Bf16* from = x + u64(blockIdx.x / per_token) * width;
    Bf16* to = out + u64(rows[blockIdx.x]) * width;
    float weight = weights[blockIdx.x];
    for (int column = int(threadIdx.x) * 8; column < width; column += THREADS * 8) {
        float values[8];
        unpack(*(const Vec16*)(from + column), values);
#pragma unroll
        for (int i = 0; i < 8; i++) values[i] *= weight;
        *(Vec16*)(to + column) = pack(values);
    }
}
