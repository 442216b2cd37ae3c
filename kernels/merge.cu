// Merges partial attention results: a part's sums are weighted by exp(its largest score - the
// largest score of all parts), and added in the order of the list.
//
// HEADS, KV_HEADS, HEAD_DIM: as in attention.cu and attention_sm90.cu, which write the parts, with
// any number of warps. sinks: a score per query head, as in those, or null. A thread block merges one
// token: the i-th token's parts are `parts[first[i]]` to before `parts[first[i + 1]]`.
#include "ptx.cuh"
#include "types.cuh"

#define GROUP (HEADS / KV_HEADS)
#define THREADS 128

struct Part {
    // The first row of the item's partial result; the token's index among the item's queries; the
    // item's rows: queries times query heads per key-value head.
    u32 part, query, rows;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    merge(const u32* tokens, const u32* first, const Part* parts, const float* part_sums, const float* part_states, const Bf16* sinks,
          Bf16* out) {
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
        // The same operations as for a complete result, so that a part without any visible position
        // changes no bit.
        total += sinks ? expf(widen(sinks[head]) - largest) : 0.0f;
        to[at] = to_bf16(sum * (1.0f / total));
    }
}
