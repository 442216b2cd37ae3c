// inputs = (inputs + projected / sqrt(mean(projected^2) + eps) * weight) * scale, where the mean is of
// each layer's part of a row by itself (Gemma 4, 2026); one warp per part.
//
// projected, inputs: [parts][width] BF16; width is a multiple of 8. weight: [width] F32. Sums and
// products are rounded to BF16, as on the CPU.
#include "ptx.cuh"
#include "types.cuh"

#define WARPS 4

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    add_inputs(const Bf16* projected, const float* weight, Bf16* inputs, int parts, int width, float eps, float scale) {
    int part = int(blockIdx.x) * WARPS + int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
    if (part >= parts) return;
    const Vec16* from = (const Vec16*)(projected + u64(part) * width);
    Vec16* to = (Vec16*)(inputs + u64(part) * width);
    float squares = 0;
    for (int v = lane; v < width / 8; v += 32) {
        float x[8];
        unpack(from[v], x);
#pragma unroll
        for (int i = 0; i < 8; i++) squares = fmaf(x[i], x[i], squares);
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) squares += shuffle_xor(squares, lanes);
    float norm = 1.0f / sqrtf(squares / float(width) + eps);
    for (int v = lane; v < width / 8; v += 32) {
        float x[8], sum[8];
        unpack(from[v], x);
        unpack(to[v], sum);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float normed = round_bf16(x[i] * norm * weight[v * 8 + i]);
            sum[i] = round_bf16(sum[i] + normed) * scale;
        }
        to[v] = pack(sum);
    }
}
