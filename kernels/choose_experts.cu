// Chooses each row's experts, those with the largest scores, among equal ones those with the lowest
// numbers; one warp per row.
//
// logits: [rows][stride], of which the first `experts` are the experts'. Scores are the softmax over
// all experts or, with `sigmoid`, the logits' sigmoids. correction: [experts], added to the scores by
// which experts are chosen, or null. chosen: [rows][per_token], ascending. weights: [rows][per_token],
// the chosen experts' scores, with `renormalized` divided by their sum, times `scale`, times the
// expert's number of `scales`: [experts], or null. All weights of a row are NaN if one of its logits is.
#include "ptx.cuh"
#include "types.cuh"

#define WARPS 4

template <class T, class Op> __device__ inline T reduce(T x, Op op) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x = op(x, shuffle_xor(x, lanes));
    return x;
}

// The score of a logit; of a softmax, its numerator.
__device__ inline float numerator(float logit, float largest, int sigmoid) {
    return sigmoid ? 1.0f / (1.0f + expf(-logit)) : expf(logit - largest);
}

// A number that is larger the earlier an expert is chosen, from 1 to less than 2^64 - 1, if `order` is
// larger for a lower number. A NaN is beyond infinity, on the side of its sign. `correction`: the
// expert's, or null: then scores are in the order of their logits. There is one copy of this function,
// so that an expert has the same bits each time.
__device__ NOINLINE u64 rank_of(float logit, const float* correction, u32 order, float largest, float denominator, int sigmoid) {
    float score = correction ? numerator(logit, largest, sigmoid) / denominator + *correction : logit;
    u32 bits = float_to_bits(score);
    bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
    return u64(bits) << 32 | order;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    choose_experts(const float* logits, const float* correction, u32* chosen, float* weights, int rows, int experts, int stride,
                   int per_token, int sigmoid, int renormalized, float scale, const float* scales) {
    int row = int(blockIdx.x) * WARPS + int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
    if (row >= rows) return;
    logits += u64(row) * stride;
    chosen += u64(row) * per_token;
    weights += u64(row) * per_token;
    auto add = [](float a, float b) { return a + b; };

    float largest = bits_to_float(0xff800000);
    for (int e = lane; e < experts; e += 32) largest = fmaxf(largest, logits[e]);
    largest = reduce(largest, [](float a, float b) { return fmaxf(a, b); });
    auto score = [&](int e) { return numerator(logits[e], largest, sigmoid); };
    float all = 0;
    for (int e = lane; e < experts; e += 32) all += score(e);
    all = reduce(all, add);
    float denominator = sigmoid ? 1.0f : all;
    auto rank = [&](int e) {
        return rank_of(logits[e], correction ? correction + e : nullptr, u32(experts - e), largest, denominator, sigmoid);
    };

    // The rank of the last expert that is chosen.
    u64 least = ~u64(0);
    for (int i = 0; i < per_token; i++) {
        u64 next = 0;
        for (int e = lane; e < experts; e += 32) {
            u64 other = rank(e);
            if (other < least && other > next) next = other;
        }
        least = reduce(next, [](u64 a, u64 b) { return a > b ? a : b; });
    }
    float sum = 0;
    for (int e = lane; e < experts; e += 32)
        if (rank(e) >= least) sum += score(e);
    sum = reduce(sum, add);
    // One NaN among all logits must show, though it may not be among the chosen ones'. The sum of
    // sigmoids may be nearly zero; the CPU adds the same to it.
    float divisor = all != all ? all : renormalized ? sum + 1e-20f : denominator;

    int before = 0;
    for (int first = 0; first < experts; first += 32) {
        int e = first + lane;
        bool is_chosen = e < experts && rank(e) >= least;
        u32 votes = vote(is_chosen);
        if (is_chosen) {
            int at = before + bits_set(votes & ((1u << lane) - 1));
            chosen[at] = u32(e);
            float weight = score(e) / divisor * scale;
            weights[at] = scales ? weight * scales[e] : weight;
        }
        before += bits_set(votes);
    }
}
