// Attention over paged keys and values by `mma.sync`, for every card from sm_80 on: prefill, chunks of it, decode and prefixes that
// several sequences share, as the items of a plan say.
//
// HEADS, KV_HEADS (divides HEADS), HEAD_DIM (a multiple of 16 up to 128, of 32 up to 256), BLOCK: tokens of a block (a multiple of
// 32); STORE: 0 INT8, 1 FP8 (E4M3), 2 BF16, as in rope_store.cu; ROW_WARPS: warps of a block, each with 16 rows; WINDOW: 0, or how many
// positions a query sees; SOFT_CAP: where defined, scores become SOFT_CAP tanh(score / SOFT_CAP) (Gemma 2, 2024); STAGES: blocks on
// their way at once, 2, or 1 where two are more shared memory than a card has. Shared memory: STAGES * STAGE_BYTES + QUERY_BYTES.
//
// A block takes an item with one key-value head. Its rows are queries times the GROUP heads that share the head: row r is query
// r / GROUP, head r % GROUP of the group; rows left over are idle. It walks the item's positions, blocks in spans of SPAN, with an
// online softmax (Milakov and Gimelshein 2018). In eight bits a query's head has a scale of its own, and weights, times the scales of
// the values, are quantized row by row of a span; sums move to F32 after each span.
//
// Places that nobody has written since their block was handed out may hold anything, NaN as well. Those are the places from the
// sequence's end on, in its last block, which count as zero. There are no others: an item starts at the first block that one of its
// queries sees, a pool takes whole blocks back, none that a query of the step sees, and a sequence writes its positions in order; so
// with a window, too, places before the first that is seen hold what this sequence or its prefix wrote.
#include "ptx.cuh"
#include "types.cuh"

#define GROUP (HEADS / KV_HEADS)
#define THREADS (ROW_WARPS * 32)
#define NONE 0xffffffffu
#define SIZE (STORE == 2 ? 2 : 1)
// Bytes of a key's row, and of a row of values: one dimension of all the block's tokens.
#define KEY_ROW (HEAD_DIM * SIZE)
#define VALUE_ROW (BLOCK * SIZE)
#define KEY_BYTES (BLOCK * KEY_ROW)
#define VALUE_BYTES (HEAD_DIM * VALUE_ROW)
// Scales of the keys, then of the values.
#define SCALE_BYTES (STORE == 2 ? 0 : 2 * BLOCK * 4)
#define STAGE_BYTES (KEY_BYTES + VALUE_BYTES + SCALE_BYTES)
// Sums of large heads fill the registers. So their queries wait in shared memory, in rows like those of keys, and `unroll` and
// `__syncwarp` keep the compiler from beginning more products at once than there are registers for.
#define LARGE (HEAD_DIM > 128)
#define QUERY_BYTES (LARGE ? ROW_WARPS * 16 * KEY_ROW : 0)
// Where shared memory or sums leave room for few blocks, the compiler need not save registers for more of them.
#if LARGE || ROW_WARPS < 4
#define BOUNDS THREADS, 1
#elif HEAD_DIM <= 64
// Left alone it aims at five blocks of 96 registers, and spills two of them.
#define BOUNDS THREADS, 4
#elif GROUP & (GROUP - 1)
// Divisions by what is no power of two take registers of their own.
#define BOUNDS THREADS, 2
#else
#define BOUNDS THREADS
#endif
// Tokens of a step of the softmax: what a warp's scores and weights have registers for.
#define SPAN 32
#ifndef STAGES
#define STAGES 2
#endif
// Steps of a product over a key's row, 32 bytes each. Where the parts of 16 bytes are an odd number, the last step has half of the
// queries zero, and takes any part of the keys for it.
#define KEY_STEPS ((KEY_ROW + 31) / 32)
const int KEY_UNROLL = LARGE ? 2 : KEY_STEPS;
#define LOWEST (-1e30f)

static_assert(HEAD_DIM % (LARGE ? 32 : 16) == 0 && HEAD_DIM <= 256, "HEAD_DIM is a multiple of 16 up to 128, and of 32 up to 256");
static_assert(BLOCK % SPAN == 0, "a block is whole spans");
static_assert(HEADS % KV_HEADS == 0 && GROUP <= ROW_WARPS * 16, "the heads that share a key-value head have a row each");

// Queries that walk the same blocks.
struct Item {
    // Into `queries`: tokens of the step.
    u32 first_query, queries;
    // Into `tables`: the block of position 0.
    u32 table;
    // Positions: from the first of a block to before `to`.
    u32 from, to;
    // Where its part of the result goes, or NONE where it is all of it.
    u32 part;
};

#if STORE == 0
typedef int Sum;
#else
typedef float Sum;
#endif

__device__ inline void multiply_add(Sum (&c)[4], const u32 (&a)[4], const u32* b) {
#if STORE == 0
    multiply(c, a, b);
#elif STORE == 1
    multiply(E4m3{}, c, a, b);
#else
    multiply(Bf16Pairs{}, c, a, b);
#endif
}

// Where part `part` (of 16 bytes) of row `row` lies, so that the same part of 8 rows meets every bank once: rows that begin at the same
// bank, 8 / turns apart, differ in how parts are swapped within groups of `turns`. Rows 16 apart have parts at the same places. DEALT:
// the 8 rows that are read at once are two of every four, as `token_of` deals them.
template <int BYTES, bool DEALT = false> __device__ inline int place(u32 row, u32 part) {
    const u32 parts = BYTES / 16, turns = parts % 8 == 0 ? 8 : parts % 4 == 0 ? 4 : parts % 2 == 0 ? 2 : 1;
    u32 order = DEALT ? row / 4 * 2 + row % 2 : row;
    return int(row * BYTES + part / turns * turns * 16 + (part % turns ^ order / (8 / turns) % turns) * 16);
}

template <int BYTES, int ROWS, bool DEALT = false> __device__ inline void copy_rows(u8* to, const u8* from) {
    for (u32 task = threadIdx.x; task < ROWS * BYTES / 16; task += THREADS) {
        u32 row = task / (BYTES / 16), part = task % (BYTES / 16);
        copy_async(to + place<BYTES, DEALT>(row, part), from + task * 16, 16);
    }
}

// Zeros in a stage of values for tokens from `end` on. A thread clears what `copy_rows` had it copy, before others see it.
__device__ inline void clear_values(u8* stage, int end) {
#pragma unroll 1
    for (u32 task = threadIdx.x; task < VALUE_BYTES / 16; task += THREADS) {
        u32 row = task / (VALUE_ROW / 16), part = task % (VALUE_ROW / 16);
        Vec16* at = (Vec16*)(stage + place<VALUE_ROW>(row, part));
#pragma unroll
        for (int w = 0; w < 4; w++) {
            int bits = (end * SIZE - int(part) * 16 - w * 4) * 8;
            at->words[w] &= bits >= 32 ? 0xffffffffu : bits <= 0 ? 0u : (1u << bits) - 1;
        }
    }
}

// Two rows of a warp's product belong to a lane: `lane / 4` and 8 further. Reduces each over the four lanes that share them.
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

// The token of a block that column `column` of a warp's scores, tile `tile` of 8 columns, stands for. In eight bits they are dealt so
// that the scores a lane has of two tiles are the four tokens side by side that it must bring to the product with the values.
__device__ inline int token_of(int tile, int column) {
#if STORE == 2
    return tile * 8 + column;
#else
    return tile / 2 * 16 + column / 2 * 4 + tile % 2 * 2 + column % 2;
#endif
}

extern "C" __global__ void __launch_bounds__(BOUNDS)
    attention(const Bf16* qkv, const u8* keys, const u8* values, const float* key_scales, const float* value_scales,
              const Item* items, const u32* queries, const u32* positions, const u32* tables, float scale, Bf16* out,
              float* part_sums, float* part_states) {
    DYNAMIC_SHARED(shared);
    const Item& item = items[blockIdx.x];
    int to = int(item.to), head = int(blockIdx.y);
    int lane = int(threadIdx.x % 32), first_row = int(threadIdx.x / 32 * 16);
    const u32* table = tables + item.table;
    int first_block = int(item.from) / BLOCK, blocks = (to + BLOCK - 1) / BLOCK;

    auto fetch = [&](int block) {
        if (block < blocks) {
            u64 from = u64(table[block]) * KV_HEADS + head;
            u8* stage = shared + block % STAGES * STAGE_BYTES;
            copy_rows<KEY_ROW, BLOCK, STORE != 2>(stage, keys + from * KEY_BYTES);
            copy_rows<VALUE_ROW, HEAD_DIM>(stage + KEY_BYTES, values + from * VALUE_BYTES);
#if STORE != 2
            for (u32 part = threadIdx.x; part < BLOCK / 2; part += THREADS) {
                const float* scales = part < BLOCK / 4 ? key_scales : value_scales;
                copy_async(stage + KEY_BYTES + VALUE_BYTES + part * 16, scales + from * BLOCK + part % (BLOCK / 4) * 4, 16);
            }
#endif
        }
        copy_group();
    };
    for (int block = first_block; block < first_block + STAGES - 1; block++) fetch(block);

    // The lane's two rows: the last position each sees, -1 where it is idle, and their queries, as the product wants them.
    int limits[2];
    float row_scales[2];
#if LARGE
    u8* query_rows = shared + STAGES * STAGE_BYTES;
    auto set_query = [&](int k, int side, int half, u32 word) {
        *(u32*)(query_rows + place<KEY_ROW>(first_row + half * 8 + lane / 4, k * 2 + side) + lane % 4 * 4) = word;
    };
#else
    u32 q[KEY_STEPS][4];
    auto set_query = [&](int k, int side, int half, u32 word) { q[k][side * 2 + half] = word; };
#endif
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = first_row + half * 8 + lane / 4;
        bool exists = row / GROUP < int(item.queries);
        u32 token = exists ? queries[item.first_query + row / GROUP] : 0;
        limits[half] = exists ? int(positions[token]) : -1;
        const Bf16* from = qkv + (u64(token) * (HEADS + 2 * KV_HEADS) + head * GROUP + row % GROUP) * HEAD_DIM;
#if STORE == 2
        row_scales[half] = scale;
#pragma unroll
        for (int k = 0; k < KEY_STEPS; k++)
#pragma unroll
            for (int side = 0; side < 2; side++) {
                u32 pair = *(const u32*)(from + k * 16 + side * 8 + lane % 4 * 2);
                set_query(k, side, half, exists ? pair : 0);
            }
#else
        float most = 0;
#pragma unroll
        for (int part = 0; part < KEY_ROW / 16; part++)
#pragma unroll
            for (int i = 0; i < 4; i++) most = larger_or_nan(most, fabsf(widen(from[part * 16 + lane % 4 * 4 + i])));
        most = over_row(most, larger_or_nan);
        float inverse = most > 1e-30f && exists ? TOP / most : 0.0f;
        // Bytes may lose what is not a number; the scale keeps it.
        row_scales[half] = most / TOP * scale;
#pragma unroll
        for (int k = 0; k < KEY_STEPS; k++)
#pragma unroll
            for (int side = 0; side < 2; side++) {
                u32 bytes = 0;
                if (k * 2 + side < KEY_ROW / 16) {
                    const Bf16* x = from + k * 32 + side * 16 + lane % 4 * 4;
                    bytes = to_bytes(widen(x[0]) * inverse, widen(x[1]) * inverse, widen(x[2]) * inverse, widen(x[3]) * inverse);
                }
                set_query(k, side, half, bytes);
            }
#endif
    }

    float sums[HEAD_DIM / 8][4] = {};
    float largest[2] = {LOWEST, LOWEST}, totals[2] = {0, 0};
    for (int block = first_block; block < blocks; block++) {
        fetch(block + STAGES - 1);
        copy_wait<STAGES - 1>();
#if STORE != 0
        // No weight makes zero of what is not a number; a byte of INT8 always is one.
        int end = to - block * BLOCK;
        if (end < BLOCK) clear_values(shared + block % STAGES * STAGE_BYTES + KEY_BYTES, end);
#endif
        __syncthreads();
        const u8* key_stage = shared + block % STAGES * STAGE_BYTES;
        const u8* value_stage = key_stage + KEY_BYTES;
#if STORE != 2
        const float* block_scales = (const float*)(value_stage + VALUE_BYTES);
#endif

#pragma unroll 1
        for (int span = 0; span < BLOCK; span += SPAN) {
            // Scores of 16 rows and the span's tokens.
            float weights[SPAN / 8][4];
            float most[2] = {largest[0], largest[1]};
#pragma unroll
            for (int pair = 0; pair < SPAN / 16; pair++) {
                Sum scores[2][4] = {};
#pragma unroll KEY_UNROLL
                for (int k = 0; k < KEY_STEPS; k++) {
                    u32 b[4];
                    bool half_step = KEY_ROW / 16 % 2 == 1 && k == KEY_STEPS - 1;
                    int part = k * 2 + (half_step ? 0 : lane / 8 % 2);
                    load_matrices(b, key_stage + (span + pair * 16) * KEY_ROW + place<KEY_ROW, STORE != 2>(token_of(lane / 16, lane % 8), part));
#if LARGE
                    u32 a[4];
                    load_matrices(a, query_rows + place<KEY_ROW>(first_row + lane % 16, k * 2 + lane / 16));
#else
                    const u32(&a)[4] = q[k];
#endif
                    multiply_add(scores[0], a, b);
                    multiply_add(scores[1], a, b + 2);
                }
#pragma unroll
                for (int t = 0; t < 2; t++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int token = span + token_of(pair * 2 + t, lane % 4 * 2 + i % 2), position = block * BLOCK + token, half = i / 2;
                        float score = float(scores[t][i]) * row_scales[half];
#if STORE != 2
                        score *= block_scales[token];
#endif
#ifdef SOFT_CAP
                        const float cap = SOFT_CAP;
                        score = cap * tanhf(score * (1.0f / cap));
#endif
                        bool seen = position <= limits[half] && position < to;
#if WINDOW > 0
                        seen = seen && limits[half] - position < WINDOW;
#endif
                        // A score that is not a number shows in the result.
                        weights[pair * 2 + t][i] = seen ? score : LOWEST;
                        most[half] = fmaxf(most[half], weights[pair * 2 + t][i]);
                    }
            }
            float shrink[2];
#if STORE != 2
            // Weights are quantized by `inverse`, and their sums scaled `back`.
            float inverse[2] = {0, 0}, back[2];
#endif
#pragma unroll
            for (int half = 0; half < 2; half++) {
                most[half] = over_row(most[half], [](float a, float b) { return fmaxf(a, b); });
                shrink[half] = expf(largest[half] - most[half]);
                largest[half] = most[half];
                totals[half] *= shrink[half];
            }
#pragma unroll
            for (int t = 0; t < SPAN / 8; t++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int half = i / 2;
                    float x = weights[t][i];
                    float weight = x == LOWEST ? 0.0f : expf(x - largest[half]);
                    totals[half] += weight;
#if STORE != 2
                    weight *= block_scales[BLOCK + span + token_of(t, lane % 4 * 2 + i % 2)];
                    // The scale of what nobody wrote may be anything.
                    weight = x == LOWEST ? 0.0f : weight;
                    inverse[half] = larger_or_nan(inverse[half], weight);
#endif
                    weights[t][i] = weight;
                }
#if STORE != 2
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float top = over_row(inverse[half], larger_or_nan);
                inverse[half] = top > 1e-30f ? TOP / top : 0.0f;
                back[half] = top * (1.0f / TOP);
            }
#endif
            // Weights times values.
            u32 a[SPAN * SIZE / 32][4];
#pragma unroll
            for (int k = 0; k < SPAN * SIZE / 32; k++)
#pragma unroll
                for (int side = 0; side < 2; side++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
#if STORE == 2
                        const float* w = weights[k * 2 + side] + half * 2;
                        a[k][side * 2 + half] = to_bf16_pair(w[0], w[1]);
#else
                        const float* w = weights[k * 4 + side * 2] + half * 2;
                        const float* next = weights[k * 4 + side * 2 + 1] + half * 2;
                        a[k][side * 2 + half] = to_bytes(w[0] * inverse[half], w[1] * inverse[half], next[0] * inverse[half],
                                                         next[1] * inverse[half]);
#endif
                    }
#pragma unroll
            for (int pair = 0; pair < HEAD_DIM / 16; pair++) {
                if (LARGE && pair % 2 == 0) __syncwarp();
#if STORE == 2
#pragma unroll
                for (int i = 0; i < 8; i++) sums[pair * 2 + i / 4][i % 4] *= shrink[i % 4 / 2];
                Sum(*products)[4] = sums + pair * 2;
#else
                Sum products[2][4] = {};
#endif
#pragma unroll
                for (int k = 0; k < SPAN * SIZE / 32; k++) {
                    u32 b[4];
                    int row = lane / 16 * 8 + lane % 8, part = span * SIZE / 16 + k * 2 + lane / 8 % 2;
                    load_matrices(b, value_stage + pair * 16 * VALUE_ROW + place<VALUE_ROW>(row, part));
                    multiply_add(products[0], a[k], b);
                    multiply_add(products[1], a[k], b + 2);
                }
#if STORE != 2
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float& sum = sums[pair * 2 + i / 4][i % 4];
                    sum = fmaf(sum, shrink[i % 4 / 2], float(products[i / 4][i % 4]) * back[i % 4 / 2]);
                }
#endif
            }
        }
        // All have read the stage that is filled next.
        __syncthreads();
    }
#pragma unroll
    for (int half = 0; half < 2; half++) totals[half] = over_row(totals[half], [](float a, float b) { return a + b; });
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (limits[half] < 0) continue;
        int row = first_row + half * 8 + lane / 4;
        if (item.part == NONE) {
            float inverse = 1.0f / totals[half];
            u32 token = queries[item.first_query + row / GROUP];
            Bf16* result = out + (u64(token) * HEADS + head * GROUP + row % GROUP) * HEAD_DIM;
#pragma unroll
            for (int t = 0; t < HEAD_DIM / 8; t++)
                *(u32*)(result + t * 8 + lane % 4 * 2) = to_bf16_pair(sums[t][half * 2] * inverse, sums[t][half * 2 + 1] * inverse);
        } else {
            u64 at = (u64(item.part) * KV_HEADS + head) * (ROW_WARPS * 16) + row;
#pragma unroll
            for (int t = 0; t < HEAD_DIM / 8; t++) {
                part_sums[at * HEAD_DIM + t * 8 + lane % 4 * 2] = sums[t][half * 2];
                part_sums[at * HEAD_DIM + t * 8 + lane % 4 * 2 + 1] = sums[t][half * 2 + 1];
            }
            if (lane % 4 == 0) {
                part_states[at * 2] = largest[half];
                part_states[at * 2 + 1] = totals[half];
            }
        }
    }
}
