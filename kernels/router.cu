// Logits of a router: x W^T + bias, with W in F32 and sums in F32. A rounded logit may choose another
// expert.
//
// x: [rows][width] BF16; width is a multiple of 4. w: [experts][width]. bias: [experts] BF16, or null.
// logits: [rows][experts].
//
// A warp computes ROWS x COLUMNS logits. Its lanes add up every 32nd four products each, and then
// their sums, so that the order of additions does not depend on the other rows.
#include "ptx.cuh"
#include "types.cuh"

#define WARPS 4
#define ROWS 8
#define COLUMNS 4

static_assert(ROWS * COLUMNS == 32, "each lane writes a logit");

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    router(const Bf16* x, const float* w, const Bf16* bias, float* logits, int rows, int experts, int width) {
    int lane = int(threadIdx.x) % 32, first_row = int(blockIdx.x) * ROWS;
    int first_expert = (int(blockIdx.y) * WARPS + int(threadIdx.x) / 32) * COLUMNS;
    if (first_expert >= experts) return;
    // Rows and experts that do not exist are computed as the last one, and not written.
    auto row_at = [&](int i) { return x + u64(first_row + i < rows ? first_row + i : rows - 1) * width; };
    auto expert_at = [&](int i) { return w + u64(first_expert + i < experts ? first_expert + i : experts - 1) * width; };
    float sums[ROWS][COLUMNS] = {};
#pragma unroll 1
    for (int at = lane * 4; at < width; at += 128) {
        float weights[COLUMNS][4];
#pragma unroll
        for (int e = 0; e < COLUMNS; e++) {
            Vec16 four = *(const Vec16*)(expert_at(e) + at);
#pragma unroll
            for (int i = 0; i < 4; i++) weights[e][i] = bits_to_float(four.words[i]);
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            u64 four = *(const u64*)(row_at(r) + at);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float value = widen(Bf16{u16(four >> i * 16)});
#pragma unroll
                for (int e = 0; e < COLUMNS; e++) sums[r][e] = fmaf(value, weights[e][i], sums[r][e]);
            }
        }
    }
    // The lane's own logit.
    float own = 0;
#pragma unroll
    for (int i = 0; i < ROWS * COLUMNS; i++) {
        float sum = sums[i / COLUMNS][i % COLUMNS];
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) sum += shuffle_xor(sum, lanes);
        if (lane == i) own = sum;
    }
    int row = first_row + lane / COLUMNS, expert = first_expert + lane % COLUMNS;
    if (row < rows && expert < experts) logits[u64(row) * experts + expert] = bias ? own + widen(bias[expert]) : own;
}
