// Shared by attention.cu and attention_sm90.cu: items, the order of tokens among columns, the
// layout of queries for products, and how sums become results.
//
// HEADS, KV_HEADS, HEAD_DIM, BLOCK, STORE: as in those. SINKS: 1 if each query head has a score in
// `sinks`, which counts in its softmax as that of a position whose value is zero (Xiao et al. 2023). The fragments of a warp's 16 rows are those
// of `multiply` in ptx.cuh, and of `products` in hopper.cuh, in which each warp of a warpgroup has
// 16 rows of the same layout.
// ROW_HEADS, BLOCK_BYTES, BLOCK_SCALES, LATENT: see kv_blocks.cuh. VALUE_DIM: numbers of a value; HEAD_DIM, if it is not defined.
#pragma once
#include "types.cuh"
#include "kv_blocks.cuh"

#define GROUP (HEADS / KV_HEADS)
#define NONE 0xffffffffu
#ifndef VALUE_DIM
#define VALUE_DIM HEAD_DIM
#endif
#ifndef SINKS
#define SINKS 0
#endif
// Tokens of a block that are in shared memory at once.
#ifndef STAGE_TOKENS
#define STAGE_TOKENS BLOCK
#endif
// Bytes of a key's row, and of a row of values (one dimension of all tokens), in shared memory.
#define KEY_ROW (HEAD_DIM * SIZE)
#define VALUE_ROW (STAGE_TOKENS * SIZE)
#define KEY_BYTES (STAGE_TOKENS * KEY_ROW)
#define VALUE_BYTES (LATENT ? 0 : VALUE_DIM * VALUE_ROW)
// Scales of the keys, then of the values.
#define SCALE_BYTES (STORE == 2 ? 0 : 2 * STAGE_TOKENS * 4)
// Steps of a product over a key's row, 32 bytes each. If the row has an odd number of 16-byte
// parts, half of the queries of the last step are zero.
#define KEY_STEPS ((KEY_ROW + 31) / 32)
#define LOWEST (-1e30f)

// Queries that walk the same blocks; `AttentionItem` of src/device/cuda/items.rs.
struct Item {
    // An index in `queries`, the tokens of the step; and the number of queries.
    u32 first_query, queries;
    // An index in `tables`: of the block with position 0.
    u32 table;
    // Positions `from` to before `to`; `from` is the first of a block.
    u32 from, to;
    // The first row of the item's partial result, counted for one key-value head; NONE if the
    // item's result is complete.
    u32 part;
};

#if STORE == 0
typedef int Sum;
#else
typedef float Sum;
#endif

// Offset of the 16-byte part `part` of row `row`, so that reading the same part of 8 rows uses
// every bank once. Rows that begin at the same bank, 8 / turns apart, differ in how parts are
// permuted within groups of `turns`. Rows 16 apart have the same order of parts. DEALT: the 8 rows
// that are read at once are two of every four, in the order of `token_of`. Without DEALT, rows of
// 32, 64 and 128 bytes have the layout of Hopper's swizzles of that many bytes.
template <int BYTES, bool DEALT = false> __device__ inline int place(u32 row, u32 part) {
    const u32 parts = BYTES / 16, turns = parts % 8 == 0 ? 8 : parts % 4 == 0 ? 4 : parts % 2 == 0 ? 2 : 1;
    u32 order = DEALT ? row / 4 * 2 + row % 2 : row;
    return int(row * BYTES + part / turns * turns * 16 + (part % turns ^ order / (8 / turns) % turns) * 16);
}

// The token of a KV block whose score is in column `column` of tile `tile` (8 columns) of a warp's
// scores. In eight bits, tokens are dealt to columns so that a lane's scores of two tiles belong to
// the four neighbouring tokens that the lane must provide for the product with the values.
__device__ inline int token_of(int tile, int column) {
#if STORE == 2
    return tile * 8 + column;
#else
    return tile / 2 * 16 + column / 2 * 4 + tile % 2 * 2 + column % 2;
#endif
}

// Zeroes the values of tokens from `end` on, if THREADS threads copied the parts in turn: each
// thread clears the parts that it copied, before a barrier shows them to others. `at`: address of
// part `part` of row `row`.
template <int THREADS, class At> __device__ inline void clear_values(int end, const At& at) {
#pragma unroll 1
    for (u32 task = threadIdx.x; task < VALUE_BYTES / 16; task += THREADS) {
        u32 row = task / (VALUE_ROW / 16), part = task % (VALUE_ROW / 16);
        Vec16* to = (Vec16*)at(row, part);
#pragma unroll
        for (int w = 0; w < 4; w++) {
            int bits = (end * SIZE - int(part) * 16 - w * 4) * 8;
            to->words[w] &= bits >= 32 ? 0xffffffffu : bits <= 0 ? 0u : (1u << bits) - 1;
        }
    }
}

// A lane has values of two rows of a warp's product: `lane / 4` and `lane / 4` + 8. Reduces one of
// them over the four lanes that share it.
template <class Op> __device__ inline float over_row(float x, Op op) {
    x = op(x, shuffle_xor(x, 1));
    return op(x, shuffle_xor(x, 2));
}

#if STORE != 2
// Four numbers as bytes.
__device__ inline u32 to_bytes(float a, float b, float c, float d) {
#if STORE == 0
    return (float_to_bits(a + 12582912.0f) & 0xff) | (float_to_bits(b + 12582912.0f) & 0xff) << 8 |
           (float_to_bits(c + 12582912.0f) & 0xff) << 16 | float_to_bits(d + 12582912.0f) << 24;
#else
    return u32(floats_to_e4m3(a, b)) | u32(floats_to_e4m3(c, d)) << 16;
#endif
}
#define TOP (STORE == 0 ? 127.0f : 448.0f)

// The larger of two numbers that are not negative, or NaN where one is: its bits are larger than any number's.
__device__ inline float larger_or_nan(float a, float b) {
    return float_to_bits(a) > float_to_bits(b) ? a : b;
}
#endif

// Loads the lane's two rows of an item, from `first_row` on: in `limits` the last position that
// each attends to (-1: idle row), in `row_scales` the factor of its scores, and the query itself by
// `set(k, side, half, word)`: for row `half`, the word that step `k` of the product reads for bytes
// `side` * 16 on. AT_ONCE: in eight bits, four numbers are loaded at once, and stay in registers
// until their scale is known.
template <bool AT_ONCE, class Set>
__device__ inline void load_queries(const Item& item, const Bf16* qkv, const u32* queries, const u32* positions, float scale, int head,
                                    int first_row, int lane, int (&limits)[2], float (&row_scales)[2], const Set& set) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = first_row + half * 8 + lane / 4;
        bool exists = row / GROUP < int(item.queries);
        u32 token = exists ? queries[item.first_query + row / GROUP] : 0;
        limits[half] = exists ? int(positions[token]) : -1;
        const Bf16* from = qkv + (u64(token) * ROW_HEADS + head * GROUP + row % GROUP) * HEAD_DIM;
#if STORE == 2
        row_scales[half] = scale;
#pragma unroll
        for (int k = 0; k < KEY_STEPS; k++)
#pragma unroll
            for (int side = 0; side < 2; side++) {
                u32 pair = *(const u32*)(from + k * 16 + side * 8 + lane % 4 * 2);
                set(k, side, half, exists ? pair : 0);
            }
#else
        // The lane provides four neighbours of each 16 numbers.
        u64 fours[AT_ONCE ? KEY_ROW / 16 : 1];
        if (AT_ONCE)
#pragma unroll
            for (int part = 0; part < KEY_ROW / 16; part++) fours[part] = *(const u64*)(from + part * 16 + lane % 4 * 4);
        auto number = [&](int part, int i) {
            return AT_ONCE ? widen(Bf16{u16(fours[part] >> i * 16)}) : widen(from[part * 16 + lane % 4 * 4 + i]);
        };
        float most = 0;
#pragma unroll
        for (int part = 0; part < KEY_ROW / 16; part++)
#pragma unroll
            for (int i = 0; i < 4; i++) most = larger_or_nan(most, fabsf(number(part, i)));
        most = over_row(most, larger_or_nan);
        float inverse = most > 1e-30f && exists ? TOP / most : 0.0f;
        // Rounding to bytes may lose NaN; the scale keeps it.
        row_scales[half] = most / TOP * scale;
#pragma unroll
        for (int k = 0; k < KEY_STEPS; k++)
#pragma unroll
            for (int side = 0; side < 2; side++) {
                u32 bytes = 0;
                int part = k * 2 + side;
                if (part < KEY_ROW / 16)
                    bytes = to_bytes(number(part, 0) * inverse, number(part, 1) * inverse, number(part, 2) * inverse,
                                     number(part, 3) * inverse);
                set(k, side, half, bytes);
            }
#endif
    }
}

// Writes row `row` of an item: its result, or, if it is partial, its sums, largest score and total,
// without the sink's weight.
// `sum(t, i)`: the lane's sum of dimension `first` + 8 t + 2 (lane % 4) + i, of DIMS dimensions. The
// rows of a partial result are those of its first key-value head, then of the next.
template <int DIMS, class SumOf>
__device__ inline void write_row(const Item& item, const u32* queries, int head, int row, int lane, int first, const SumOf& sum,
                                 float largest, float total, const Bf16* sinks, Bf16* out, float* part_sums, float* part_states) {
    if (item.part == NONE) {
#if SINKS
        total += expf(widen(sinks[head * GROUP + row % GROUP]) - largest);
#endif
        float inverse = 1.0f / total;
        u32 token = queries[item.first_query + row / GROUP];
        Bf16* result = out + (u64(token) * HEADS + head * GROUP + row % GROUP) * VALUE_DIM + first;
#pragma unroll
        for (int t = 0; t < DIMS / 8; t++)
            *(u32*)(result + t * 8 + lane % 4 * 2) = to_bf16_pair(sum(t, 0) * inverse, sum(t, 1) * inverse);
    } else {
        u64 at = item.part * KV_HEADS + head * item.queries * GROUP + row;
#pragma unroll
        for (int t = 0; t < DIMS / 8; t++) {
            part_sums[at * VALUE_DIM + first + t * 8 + lane % 4 * 2] = sum(t, 0);
            part_sums[at * VALUE_DIM + first + t * 8 + lane % 4 * 2 + 1] = sum(t, 1);
        }
        if (lane % 4 == 0 && first == 0) {
            part_states[at * 2] = largest;
            part_states[at * 2 + 1] = total;
        }
    }
}
