// Adds up the outputs of each token's experts, times their weights, in the order of the experts'
// numbers, and then that of the shared expert; one thread block per token.
//
// outputs: [sorted rows][width] BF16; width is a multiple of 8. rows, weights: [tokens][per_token],
// the sorted rows of a token's experts, ascending, and their weights, or null if these are 1. shared: [tokens][width] BF16, the
// shared expert's outputs, or null. shared_logits: the first token's logit, whose sigmoid is the
// weight of its row of `shared`, or null if that is 1; those of further tokens follow `stride` values
// apart. out: [tokens][width].
#include "ptx.cuh"
#include "types.cuh"

#define THREADS 128

extern "C" __global__ void __launch_bounds__(THREADS)
    combine_experts(const Bf16* outputs, const u32* rows, const float* weights, const Bf16* shared, const float* shared_logits,
                    Bf16* out, int per_token, int width, int stride) {
    rows += u64(blockIdx.x) * per_token;
    if (weights) weights += u64(blockIdx.x) * per_token;
    float shared_weight = shared_logits ? 1.0f / (1.0f + expf(-shared_logits[u64(blockIdx.x) * stride])) : 1.0f;
    for (int column = int(threadIdx.x) * 8; column < width; column += THREADS * 8) {
        float sums[8] = {};
        for (int i = 0; i < per_token; i++) {
            float values[8], weight = weights ? weights[i] : 1.0f;
            unpack(*(const Vec16*)(outputs + u64(rows[i]) * width + column), values);
#pragma unroll
            for (int j = 0; j < 8; j++) sums[j] = fmaf(values[j], weight, sums[j]);
        }
        if (shared) {
            float values[8];
            unpack(*(const Vec16*)(shared + u64(blockIdx.x) * width + column), values);
#pragma unroll
            for (int j = 0; j < 8; j++) sums[j] = fmaf(values[j], shared_weight, sums[j]);
        }
        *(Vec16*)(out + u64(blockIdx.x) * width + column) = pack(sums);
    }
}
