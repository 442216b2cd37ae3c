// Parts of attention's results to whole ones: sums weigh by exp(their largest score - the largest of all), in the order of the list.
//
// HEADS, KV_HEADS, HEAD_DIM: as in attention.cu, whose parts these are, of items of any number of warps. A block takes a token: its
// parts are `parts[first[i]]` to before `parts[first[i + 1]]`.
#include "ptx.cuh"
#include "types.cuh"

#define GROUP (HEADS / KV_HEADS)
#define THREADS 128

struct Part {
    // The item's first row, which of its queries the token is, and its rows: queries times the heads of a group.
    u32 part, query, rows;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    merge(const u32* tokens, const u32* first, const Part* parts, const float* part_sums, const float* part_states, Bf16* out) {
    u32 begin = first[blockIdx.x], end = first[blockIdx.x + 1];
    Bf16* to = out + u64(tokens[blockIdx.x]) * HEADS * HEAD_DIM;
    for (int at = int(threadIdx.x); at < HEADS * HEAD_DIM; at += THREADS) {
        int head = at / HEAD_DIM, dim = at % HEAD_DIM;
        auto row = [&](u32 i) {
            return u64(parts[i].part) * KV_HEADS + head / GROUP * parts[i].rows + parts[i].query * GROUP + head % GROUP;
        };
        float largest = part_states[row(begin) * 2];
        for (u32 i = begin + 1; i < end; i++) largest = fmaxf(largest, part_states[row(i) * 2]);
        float sum = 0, total = 0;
        for (u32 i = begin; i < end; i++) {
            float weight = expf(part_states[row(i) * 2] - largest);
            sum = fmaf(weight, part_sums[row(i) * HEAD_DIM + dim], sum);
            total = fmaf(weight, part_states[row(i) * 2 + 1], total);
        }
        // As a whole result is made of its sum, so that a part with nothing of a row in it changes no bit.
        to[at] = to_bf16(sum * (1.0f / total));
    }
}
