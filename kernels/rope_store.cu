// Rotary embedding (Su et al. 2021) of query and key heads after their normalisation where asked for, and keys and values into
// their blocks: a warp a head of a token.
//
// HEADS, KV_HEADS, HEAD_DIM (even), BLOCK: tokens of a block. STORE: 0 INT8, 1 FP8 (E4M3), 2 BF16.
// qkv: [tokens][HEADS q, KV_HEADS k, KV_HEADS v][HEAD_DIM] BF16, queries are rotated in place. rotations: [positions][cosines,
// sines: HEAD_DIM]. slots: [tokens], block * BLOCK + place in it. q_norm, k_norm: [HEAD_DIM] F32, or null.
// keys: [block][kv head][place][HEAD_DIM]; values: [block][kv head][HEAD_DIM][place], since eight-bit products want both operands
// with what is summed over side by side, and values are summed over tokens. scales: [block][kv head][place].
//
// Dimension d is paired with d + HEAD_DIM / 2: (a, b) -> (a cos - b sin, b cos + a sin).
#include "ptx.cuh"
#include "types.cuh"

#define WARPS 4
#define HALF (HEAD_DIM / 2)
#define PAIRS ((HALF + 31) / 32)
#define LEAST 1e-30f

template <class Op> __device__ inline float reduce(float x, Op op) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x = op(x, shuffle_xor(x, lanes));
    return x;
}

// A head in the registers of a warp: pairs of dimensions.
struct Head {
    float low[PAIRS], high[PAIRS];
};

#define FOR_PAIRS(p, d)                                                                                                          \
    for (int p = 0, d = int(threadIdx.x) % 32; p < PAIRS; p++, d += 32)                                                          \
        if (d < HALF)

__device__ inline void normalise(Head& head, const float* weight, float eps) {
    float squares = 0;
#pragma unroll
    FOR_PAIRS(p, d) squares = fmaf(head.low[p], head.low[p], fmaf(head.high[p], head.high[p], squares));
    float scale = 1.0f / sqrtf(reduce(squares, [](float a, float b) { return a + b; }) / HEAD_DIM + eps);
#pragma unroll
    FOR_PAIRS(p, d) {
        head.low[p] = round_bf16(head.low[p] * scale * weight[d]);
        head.high[p] = round_bf16(head.high[p] * scale * weight[HALF + d]);
    }
}

#if STORE != 2
__device__ inline u8 to_byte(float x) {
#if STORE == 0
    return u8(float_to_bits(x + 12582912.0f));
#else
    return u8(floats_to_e4m3(x, 0.0f));
#endif
}
#endif

// Writes a head to its place, dimension d at `d * stride`; eight bits with a scale.
__device__ inline void store(const Head& head, void* to, u64 at, int stride, float* scale) {
#if STORE == 2
#pragma unroll
    FOR_PAIRS(p, d) {
        ((Bf16*)to)[at + u64(d) * stride] = to_bf16(head.low[p]);
        ((Bf16*)to)[at + u64(HALF + d) * stride] = to_bf16(head.high[p]);
    }
#else
    const float top = STORE == 0 ? 127.0f : 448.0f;
    float most = 0, not_finite = 0;
#pragma unroll
    FOR_PAIRS(p, d) {
        most = fmaxf(most, fmaxf(fabsf(head.low[p]), fabsf(head.high[p])));
        not_finite = fmaf(head.low[p], 0.0f, fmaf(head.high[p], 0.0f, not_finite));
    }
    most = reduce(not_finite == 0 ? most : bits_to_float(0x7f800000), [](float a, float b) { return fmaxf(a, b); });
    bool finite = most < bits_to_float(0x7f800000);
    float inverse = most < LEAST || !finite ? 0.0f : top / most;
    if (threadIdx.x % 32 == 0) *scale = !finite ? bits_to_float(0x7fc00000) : most < LEAST ? 0.0f : most / top;
#pragma unroll
    FOR_PAIRS(p, d) {
        // Of a head that is not finite the scale alone tells: a byte that is not a number would outlive the block's use.
        ((u8*)to)[at + u64(d) * stride] = to_byte(finite ? head.low[p] * inverse : 0.0f);
        ((u8*)to)[at + u64(HALF + d) * stride] = to_byte(finite ? head.high[p] * inverse : 0.0f);
    }
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 4)
    rope_store(Bf16* qkv, const float* rotations, const u32* positions, const u32* slots, const float* q_norm, const float* k_norm,
               float eps, void* keys, void* values, float* key_scales, float* value_scales) {
    int token = int(blockIdx.x), at = int(blockIdx.y) * WARPS + int(threadIdx.x) / 32;
    if (at >= HEADS + 2 * KV_HEADS) return;
    Bf16* from = qkv + (u64(token) * (HEADS + 2 * KV_HEADS) + at) * HEAD_DIM;
    Head head;
#pragma unroll
    FOR_PAIRS(p, d) {
        head.low[p] = widen(from[d]);
        head.high[p] = widen(from[HALF + d]);
    }
    if (at < HEADS + KV_HEADS) {
        const float* norm = at < HEADS ? q_norm : k_norm;
        if (norm) normalise(head, norm, eps);
        const float* rotation = rotations + u64(positions[token]) * HEAD_DIM;
#pragma unroll
        FOR_PAIRS(p, d) {
            float a = head.low[p], b = head.high[p], cos = rotation[d], sin = rotation[HALF + d];
            head.low[p] = round_bf16(a * cos - b * sin);
            head.high[p] = round_bf16(b * cos + a * sin);
        }
    }
    if (at < HEADS) {
#pragma unroll
        FOR_PAIRS(p, d) {
            from[d] = to_bf16(head.low[p]);
            from[HALF + d] = to_bf16(head.high[p]);
        }
        return;
    }
    u32 block = slots[token] / BLOCK, place = slots[token] % BLOCK;
    if (at < HEADS + KV_HEADS) {
        u64 row = (u64(block) * KV_HEADS + at - HEADS) * BLOCK + place;
        store(head, keys, row * HEAD_DIM, 1, key_scales + row);
    } else {
        u64 first = u64(block) * KV_HEADS + at - HEADS - KV_HEADS;
        store(head, values, first * HEAD_DIM * BLOCK + place, BLOCK, value_scales + first * BLOCK + place);
    }
}
