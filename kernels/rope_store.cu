// Normalises (if there is a norm) and rotates query and key heads (rotary embedding, Su et al.
// 2021), and stores keys and values in their KV blocks; one warp per head of a token.
//
// HEADS, KV_HEADS, HEAD_DIM (even), BLOCK: tokens of a block. STORE: 0 INT8, 1 FP8 (E4M3), 2 BF16.
// VALUE_NORM: 1 if values are normalised, too, by a norm without weights (Gemma 4, 2026). ROW_HEADS,
// BLOCK_BYTES, BLOCK_SCALES: see kv_blocks.cuh.
// qkv: [tokens][HEADS q, KV_HEADS k, KV_HEADS v][HEAD_DIM] BF16; queries are rotated in place. Rows
// may be of queries alone; then nothing is stored.
// rotations: [positions][cosines, sines: HEAD_DIM]. slots: [tokens], block * BLOCK + offset in the
// block. q_norm, k_norm: [HEAD_DIM] F32, or null.
// keys: [block][kv head][offset][HEAD_DIM]. values: [block][kv head][HEAD_DIM][offset], because
// eight-bit products need the dimension that is summed over contiguous in both operands, and values
// are summed over tokens. scales: [block][kv head][offset].
//
// The grid is tokens x groups of four heads. If tokens fill 16 bytes of each dimension, the warp of
// the first token writes all their values; values of other tokens are written one by one.
//
// Dimension d is paired with d + HEAD_DIM / 2: (a, b) -> (a cos - b sin, b cos + a sin).
#include "ptx.cuh"
#include "types.cuh"
#include "kv_blocks.cuh"

#ifndef VALUE_NORM
#define VALUE_NORM 0
#endif
#define WARPS 4
#define HALF (HEAD_DIM / 2)
#define PAIRS ((HALF + 31) / 32)
#define LEAST 1e-30f

template <class Op> __device__ inline float reduce(float x, Op op) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x = op(x, shuffle_xor(x, lanes));
    return x;
}

// A head in the registers of a warp, as pairs of dimensions.
struct Head {
    float low[PAIRS], high[PAIRS];
};

#define FOR_PAIRS(p, d)                                                                                                          \
    for (int p = 0, d = int(threadIdx.x) % 32; p < PAIRS; p++, d += 32)                                                          \
        if (d < HALF)

// Normalises a head. WEIGHTED: whether `weight` is there.
template <bool WEIGHTED> __device__ inline void normalise(Head& head, const float* weight, float eps) {
    float squares = 0;
#pragma unroll
    FOR_PAIRS(p, d) squares = fmaf(head.low[p], head.low[p], fmaf(head.high[p], head.high[p], squares));
    float scale = 1.0f / sqrtf(reduce(squares, [](float a, float b) { return a + b; }) / HEAD_DIM + eps);
#pragma unroll
    FOR_PAIRS(p, d) {
        head.low[p] = round_bf16(WEIGHTED ? head.low[p] * scale * weight[d] : head.low[p] * scale);
        head.high[p] = round_bf16(WEIGHTED ? head.high[p] * scale * weight[HALF + d] : head.high[p] * scale);
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

#if STORE == 2
typedef u16 Stored;
__device__ inline Stored stored(float x) {
    return to_bf16(x).bits;
}
#else
typedef u8 Stored;
__device__ inline Stored stored(float x) {
    return to_byte(x);
}
#endif

// Number of tokens whose values fill 16 bytes of one dimension.
#define RUN (16 / int(sizeof(Stored)))

__device__ inline Head load(const Bf16* from) {
    Head head;
#pragma unroll
    FOR_PAIRS(p, d) {
        head.low[p] = widen(from[d]);
        head.high[p] = widen(from[HALF + d]);
    }
    return head;
}

// Values of a head as they are stored; in eight bits, after division by the scale.
__device__ inline void scale_down(Head& head, float* scale) {
#if STORE != 2
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
        // Only the scale shows that a head is not finite: a NaN byte would outlive the block's use.
        head.low[p] = finite ? head.low[p] * inverse : 0.0f;
        head.high[p] = finite ? head.high[p] * inverse : 0.0f;
    }
#endif
}

// Whether the warp's token is one of RUN tokens that are neighbours in the block and in the step,
// the first of them at a multiple of 16 bytes. The warps of all these tokens get the same answer.
__device__ inline bool in_a_run(const u32* slots, int token, int tokens) {
    int lane = int(threadIdx.x) % 32;
    u32 slot = slots[token];
    int at = token - int(slot % RUN) + lane;
    bool follows = lane >= RUN || (at >= 0 && at < tokens && slots[at] == slot - slot % RUN + lane);
    return reduce(follows ? 1.0f : 0.0f, [](float a, float b) { return fminf(a, b); }) > 0;
}

// Writes the values of RUN tokens from `from` on, 16 bytes per dimension at once.
__device__ inline void store_run(const Bf16* from, Stored* to, float* scales, float eps) {
    Vec16 low[PAIRS] = {}, high[PAIRS] = {};
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        Head head = load(from + u64(i) * ROW_HEADS * HEAD_DIM);
        if (VALUE_NORM) normalise<false>(head, nullptr, eps);
        scale_down(head, scales + i);
        const int word = i * int(sizeof(Stored)) / 4, shift = i * int(sizeof(Stored)) % 4 * 8;
#pragma unroll
        FOR_PAIRS(p, d) {
            low[p].words[word] |= u32(stored(head.low[p])) << shift;
            high[p].words[word] |= u32(stored(head.high[p])) << shift;
        }
    }
#pragma unroll
    FOR_PAIRS(p, d) {
        *(Vec16*)(to + d * BLOCK) = low[p];
        *(Vec16*)(to + (HALF + d) * BLOCK) = high[p];
    }
}

// A multiprocessor has registers for this number of thread blocks at least.
#define BLOCKS_MIN (HEAD_DIM > 256 ? 2 : 4)

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS_MIN)
    rope_store(Bf16* qkv, const float* rotations, const u32* positions, const u32* slots, const float* q_norm, const float* k_norm,
               float eps, float value_eps, void* keys, void* values, float* key_scales, float* value_scales) {
    int token = int(blockIdx.x), at = int(blockIdx.y) * WARPS + int(threadIdx.x) / 32;
    if (at >= ROW_HEADS) return;
    Bf16* from = qkv + (u64(token) * ROW_HEADS + at) * HEAD_DIM;
    u32 block = slots[token] / BLOCK, place = slots[token] % BLOCK;
    if (at >= HEADS + KV_HEADS) {
        int kv = at - HEADS - KV_HEADS;
        Stored* to = (Stored*)((u8*)values + head_at(block, kv)) + place;
        float* scales = value_scales + scales_at(block, kv) + place;
        if (in_a_run(slots, token, int(gridDim.x))) {
            if (place % RUN == 0) store_run(from, to, scales, value_eps);
            return;
        }
        Head head = load(from);
        if (VALUE_NORM) normalise<false>(head, nullptr, value_eps);
        scale_down(head, scales);
#pragma unroll
        FOR_PAIRS(p, d) {
            to[d * BLOCK] = stored(head.low[p]);
            to[(HALF + d) * BLOCK] = stored(head.high[p]);
        }
        return;
    }
    Head head = load(from);
    const float* norm = at < HEADS ? q_norm : k_norm;
    if (norm) normalise<true>(head, norm, eps);
    const float* rotation = rotations + u64(positions[token]) * HEAD_DIM;
#pragma unroll
    FOR_PAIRS(p, d) {
        float a = head.low[p], b = head.high[p], cos = rotation[d], sin = rotation[HALF + d];
        head.low[p] = round_bf16(a * cos - b * sin);
        head.high[p] = round_bf16(b * cos + a * sin);
    }
    if (at < HEADS) {
#pragma unroll
        FOR_PAIRS(p, d) {
            from[d] = to_bf16(head.low[p]);
            from[HALF + d] = to_bf16(head.high[p]);
        }
        return;
    }
    scale_down(head, key_scales + scales_at(block, at - HEADS) + place);
    Stored* to = (Stored*)((u8*)keys + head_at(block, at - HEADS)) + place * HEAD_DIM;
#pragma unroll
    FOR_PAIRS(p, d) {
        to[d] = stored(head.low[p]);
        to[HALF + d] = stored(head.high[p]);
    }
}
