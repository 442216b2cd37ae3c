// Chooses each row's experts, those with the largest scores, among equal ones those with the lowest
// numbers; one warp per row.
//
// logits: [rows][stride], of which the first `experts` are the experts'. Scores are the softmax over
// all experts or, with `sigmoid`, the logits' sigmoids. correction: [experts], added to the scores by
// which experts are chosen, or null. chosen: [rows][per_token], ascending. weights: [rows][per_token],
// the chosen experts' scores, with `renormalized` divided by their sum, times `scale`, times the
// expert's number of `scales`: [experts], or null. All weights of a row are NaN if one of its logits is.
//
// Experts are in `groups` groups of equal size (DeepSeek-V3, 2024). If there are several, a row uses those of
// `chosen_groups` groups alone, which have the largest sums of their `best` largest scores, corrections included,
// among equal ones those that come first; together they have `per_token` experts or more. Shared memory: 4 bytes per
// group and warp.
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

// A number that is larger the earlier what has this score is chosen, from 1 to less than 2^64 - 1, if `order` is
// larger for what comes first. A NaN is beyond infinity, on the side of its sign.
__device__ inline u64 rank_of(float score, u32 order) {
    u32 bits = float_to_bits(score);
    bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
    return u64(bits) << 32 | order;
}

// The score of a rank.
__device__ inline float score_of(u64 rank) {
    u32 bits = u32(rank >> 32);
    return bits_to_float(bits ^ (bits >> 31 ? 0x80000000u : 0xffffffffu));
}

// The number by which an expert is chosen: its score, with its correction unless that is null. There is one copy of
// this function, so that an expert has the same bits each time.
__device__ NOINLINE float chosen_by(float logit, const float* correction, float largest, float denominator, int sigmoid) {
    float score = numerator(logit, largest, sigmoid) / denominator;
    return correction ? score + *correction : score;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    choose_experts(const float* logits, const float* correction, u32* chosen, float* weights, int rows, int experts, int stride,
                   int per_token, int sigmoid, int renormalized, float scale, const float* scales, int groups, int chosen_groups, int best) {
    DYNAMIC_SHARED(shared);
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
    // Without corrections and groups, experts are chosen in the order of their logits.
    bool by_logits = !correction && groups == 1;
    auto rank_of_expert = [&](int e) {
        const float* own = correction ? correction + e : nullptr;
        float by = by_logits ? logits[e] : chosen_by(logits[e], own, largest, denominator, sigmoid);
        return rank_of(by, u32(experts - e));
    };
    // The largest of the ranks from `from` to before `to` that are below `bound`.
    auto next_below = [&](u64 bound, int from, int to, auto rank) {
        u64 next = 0;
        for (int i = from + lane; i < to; i += 32) {
            u64 other = rank(i);
            if (other < bound && other > next) next = other;
        }
        return reduce(next, [](u64 a, u64 b) { return a > b ? a : b; });
    };

    // The rank of the last group that is chosen.
    float* group_scores = (float*)shared + int(threadIdx.x) / 32 * groups;
    int group_size = experts / groups;
    u64 least_group = 0;
    auto rank_of_group = [&](int g) { return rank_of(group_scores[g], u32(groups - g)); };
    if (groups > 1) {
        for (int g = 0; g < groups; g++) {
            u64 rank = ~u64(0);
            float sum = 0;
            for (int i = 0; i < best; i++) {
                rank = next_below(rank, g * group_size, (g + 1) * group_size, rank_of_expert);
                sum += score_of(rank);
            }
            if (lane == 0) group_scores[g] = sum;
        }
        __syncwarp();
        least_group = ~u64(0);
        for (int i = 0; i < chosen_groups; i++) least_group = next_below(least_group, 0, groups, rank_of_group);
    }
    // 0: the expert's group is not chosen.
    auto rank = [&](int e) {
        bool is_usable = groups == 1 || rank_of_group(e / group_size) >= least_group;
        return is_usable ? rank_of_expert(e) : u64(0);
    };

    // The rank of the last expert that is chosen.
    u64 least = ~u64(0);
    for (int i = 0; i < per_token; i++) least = next_below(least, 0, experts, rank);
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
