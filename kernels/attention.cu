// Attention over paged keys and values with `mma.sync`, for every card from sm_80 on: prefill and
// its chunks, decode, and prefixes that several sequences share, by the items of a plan
// (src/device/cuda/items.rs).
//
// HEADS, KV_HEADS (divides HEADS), HEAD_DIM (a multiple of 16 up to 128, of 32 up to 512, of latents up to 576). BLOCK:
// tokens per KV block (a multiple of 32). STORE: 0 INT8, 1 FP8 (E4M3), 2 BF16, as in rope_store.cu.
// ROW_WARPS: groups of 16 rows per thread block, each with a warp, or with a TEAM of two. WINDOW:
// number of positions that a query attends to, 0: all. SOFT_CAP: if defined, the bits of a float cap:
// scores become cap tanh(score / cap) (Gemma 2, 2024). STAGE_TOKENS: tokens of a block that are loaded
// at once (a multiple of 32 that divides BLOCK). STAGES: how many times as many are in flight, 2, or 1
// if two need more shared memory than a card has. LATENT, VALUE_DIM: see kv_blocks.cuh and attention.cuh.
// Shared memory: STAGES * STAGE_BYTES + QUERY_BYTES + EXCHANGE_BYTES.
//
// A thread block computes an item for one key-value head. Its rows are queries times the GROUP
// heads that share the head: row r is query r / GROUP, head r % GROUP of the group; surplus rows
// are idle. It walks the item's positions, KV blocks in spans of SPAN, with an online softmax
// (Milakov and Gimelshein 2018). In eight bits, each query head has its own scale; the softmax
// weights, times the scales of the values, are quantized per row and span; sums move to F32 after
// each span.
//
// A position that has not been written since its block was allocated may hold anything, NaN
// included. The only such positions that an item reads are those beyond the sequence's end in its
// last block; they count as zero. There are no others: an item starts at the first block that one
// of its queries attends to, the pool takes back only whole blocks that no query of the step
// attends to, and a sequence writes its positions in order. So with a window, too, positions before
// the first visible one hold what this sequence or its prefix wrote.
#include "ptx.cuh"
#include "attention.cuh"

// Registers do not hold 16 rows' sums of more than 256 dimensions. Two warps share them then: each
// computes the scores of half of the tokens, gives them to the other by way of shared memory, and adds
// up half of the dimensions.
#if VALUE_DIM > 256
#define TEAM 2
#else
#define TEAM 1
#endif
#define OWN_DIMS (VALUE_DIM / TEAM)
#define THREADS (ROW_WARPS * TEAM * 32)
#define STAGE_BYTES (KEY_BYTES + VALUE_BYTES + SCALE_BYTES)
// The sums of large heads fill the registers. So their queries are kept in shared memory, laid out
// like keys, and `unroll` and `__syncwarp` keep the compiler from starting more products at once
// than the registers hold.
#define LARGE (HEAD_DIM > 128)
#define QUERY_BYTES (LARGE ? ROW_WARPS * 16 * KEY_ROW : 0)
// If shared memory or the sums allow only few thread blocks per multiprocessor, the compiler need
// not save registers for more.
#if LARGE || ROW_WARPS < 4
#define BOUNDS THREADS, 1
#elif HEAD_DIM <= 64
// Without this bound, the compiler aims at five blocks of 96 registers, and spills two registers.
#define BOUNDS THREADS, 4
#elif GROUP & (GROUP - 1)
// Divisions by a GROUP that is not a power of two need registers of their own.
#define BOUNDS THREADS, 2
#else
#define BOUNDS THREADS
#endif
// Tokens per step of the softmax: a warp has registers for the scores and weights of this number.
#define SPAN 32
#ifndef STAGES
#define STAGES 2
#endif
const int KEY_UNROLL = LARGE ? 2 : KEY_STEPS;

static_assert(HEAD_DIM % (LARGE ? 32 : 16) == 0 && VALUE_DIM % (TEAM * 16) == 0, "HEAD_DIM is a multiple of 16 up to 128, and of 32 beyond, VALUE_DIM of 32 beyond 256");
static_assert(VALUE_DIM <= 512 && (LATENT ? STORE == 2 && VALUE_DIM <= HEAD_DIM && HEAD_DIM <= 576 && !IS_ALONE : VALUE_DIM == HEAD_DIM), "keys of latents are in BF16, in blocks of a given size, and begin with the value");
static_assert(BLOCK % STAGE_TOKENS == 0 && STAGE_TOKENS % SPAN == 0, "a block is whole stages, and a stage whole spans");
// What a team exchanges takes the place of the span's keys, which nobody reads any more; those of latents are values, too.
#define EXCHANGED_BYTES (SPAN * 16 * 4)
#define EXCHANGE_BYTES (LATENT && TEAM > 1 ? ROW_WARPS * EXCHANGED_BYTES : 0)
static_assert(TEAM == 1 || LATENT || ROW_WARPS * EXCHANGED_BYTES <= SPAN * KEY_ROW, "scores fit where keys were");
static_assert(HEADS % KV_HEADS == 0 && GROUP <= ROW_WARPS * 16, "the heads that share a key-value head have a row each");

__device__ inline void multiply_add(Sum (&c)[4], const u32 (&a)[4], const u32* b) {
#if STORE == 0
    multiply(c, a, b);
#elif STORE == 1
    multiply(E4m3{}, c, a, b);
#else
    multiply(Bf16Pairs{}, c, a, b);
#endif
}

// Copies ROWS rows of BYTES bytes, which are FROM_BYTES apart.
template <int BYTES, int ROWS, int FROM_BYTES, bool DEALT = false> __device__ inline void copy_rows(u8* to, const u8* from) {
    for (u32 task = threadIdx.x; task < ROWS * BYTES / 16; task += THREADS) {
        u32 row = task / (BYTES / 16), part = task % (BYTES / 16);
        copy_async(to + place<BYTES, DEALT>(row, part), from + (FROM_BYTES == BYTES ? task * 16 : row * FROM_BYTES + part * 16), 16);
    }
}

#if TEAM > 1
// Completes the weights of a span, of which a member of a team has computed its own, at the front. A
// lane has the same rows in both warps.
__device__ inline void exchange(u8* at, int member, int lane, float (&weights)[SPAN / 8][4]) {
    const int OWN = SPAN / 8 / TEAM;
    Vec16* vectors = (Vec16*)at;
    // Before this barrier, keys are read; after the next one, all scores are there.
    __syncthreads();
#pragma unroll
    for (int t = 0; t < OWN; t++) {
        Vec16 own;
#pragma unroll
        for (int i = 0; i < 4; i++) own.words[i] = float_to_bits(weights[t][i]);
        vectors[(member * OWN + t) * 32 + lane] = own;
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < SPAN / 8; t++) {
        Vec16 four = vectors[t * 32 + lane];
#pragma unroll
        for (int i = 0; i < 4; i++) weights[t][i] = bits_to_float(four.words[i]);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(BOUNDS)
    attention(const Bf16* qkv, const u8* keys, const u8* values, const float* key_scales, const float* value_scales,
              const Item* items, const u32* queries, const u32* positions, const u32* tables, float scale, const Bf16* sinks, Bf16* out,
              float* part_sums, float* part_states) {
    DYNAMIC_SHARED(shared);
    const Item& item = items[blockIdx.x];
    int to = int(item.to), head = int(blockIdx.y);
    int lane = int(threadIdx.x % 32), first_row = int(threadIdx.x / (TEAM * 32) * 16), member = int(threadIdx.x / 32 % TEAM);
    const u32* table = tables + item.table;
    const int PER_BLOCK = BLOCK / STAGE_TOKENS;
    int first_stage = int(item.from) / STAGE_TOKENS, stages = (to + STAGE_TOKENS - 1) / STAGE_TOKENS;

    auto fetch = [&](int at) {
        if (at < stages) {
            u32 block = table[at / PER_BLOCK], inner = at % PER_BLOCK;
            u64 from = head_at(block, head);
            u8* stage = shared + at % STAGES * STAGE_BYTES;
            copy_rows<KEY_ROW, STAGE_TOKENS, KEY_ROW, STORE != 2>(stage, keys + from + inner * KEY_BYTES);
#if !LATENT
            copy_rows<VALUE_ROW, VALUE_DIM, BLOCK * SIZE>(stage + KEY_BYTES, values + from + inner * VALUE_ROW);
#endif
#if STORE != 2
            u64 from_scale = scales_at(block, head) + inner * STAGE_TOKENS;
            for (u32 part = threadIdx.x; part < STAGE_TOKENS / 2; part += THREADS) {
                const float* scales = part < STAGE_TOKENS / 4 ? key_scales : value_scales;
                copy_async(stage + KEY_BYTES + VALUE_BYTES + part * 16, scales + from_scale + part % (STAGE_TOKENS / 4) * 4, 16);
            }
#endif
        }
        copy_group();
    };
    for (int at = first_stage; at < first_stage + STAGES - 1; at++) fetch(at);

    // The lane's two rows.
    int limits[2];
    float row_scales[2];
#if LARGE
    u8* query_rows = shared + STAGES * STAGE_BYTES;
    auto set_query = [&](int k, int side, int half, u32 word) {
        if (member > 0) return;
        *(u32*)(query_rows + place<KEY_ROW>(first_row + half * 8 + lane / 4, k * 2 + side) + lane % 4 * 4) = word;
    };
#else
    u32 q[KEY_STEPS][4];
    auto set_query = [&](int k, int side, int half, u32 word) { q[k][side * 2 + half] = word; };
#endif
    load_queries<false>(item, qkv, queries, positions, scale, head, first_row, lane, limits, row_scales, set_query);

    float sums[OWN_DIMS / 8][4] = {};
    float largest[2] = {LOWEST, LOWEST}, totals[2] = {0, 0};
    for (int at = first_stage; at < stages; at++) {
        fetch(at + STAGES - 1);
        copy_wait<STAGES - 1>();
#if STORE != 0
        // A weight of zero times NaN is NaN, so values beyond the end must be zeroed. A byte of
        // INT8 always is a number.
        int end = to - at * STAGE_TOKENS;
        if (end < STAGE_TOKENS) {
#if LATENT
            u8* keys_at = shared + at % STAGES * STAGE_BYTES;
#pragma unroll 1
            for (u32 task = threadIdx.x; task < KEY_BYTES / 16; task += THREADS)
                if (int(task / (KEY_ROW / 16)) >= end) *(Vec16*)(keys_at + place<KEY_ROW>(task / (KEY_ROW / 16), task % (KEY_ROW / 16))) = Vec16{};
#else
            u8* values_at = shared + at % STAGES * STAGE_BYTES + KEY_BYTES;
            clear_values<THREADS>(end, [&](u32 row, u32 part) { return values_at + place<VALUE_ROW>(row, part); });
#endif
        }
#endif
        __syncthreads();
        u8* key_stage = shared + at % STAGES * STAGE_BYTES;
        const u8* value_stage = key_stage + KEY_BYTES;
#if STORE != 2
        const float* block_scales = (const float*)(value_stage + VALUE_BYTES);
#endif

#pragma unroll 1
        for (int span = 0; span < STAGE_TOKENS; span += SPAN) {
            // Scores of 16 rows and the span's tokens, of which a member of a team computes its own first.
            float weights[SPAN / 8][4];
            const int OWN_PAIRS = SPAN / 16 / TEAM;
#pragma unroll
            for (int pair = 0; pair < OWN_PAIRS; pair++) {
                int first_token = span + (member * OWN_PAIRS + pair) * 16;
                Sum scores[2][4] = {};
#pragma unroll KEY_UNROLL
                for (int k = 0; k < KEY_STEPS; k++) {
                    u32 b[4];
                    // In the half step, the queries are zero, so any keys may be read.
                    bool half_step = KEY_ROW / 16 % 2 == 1 && k == KEY_STEPS - 1;
                    int part = k * 2 + (half_step ? 0 : lane / 8 % 2);
                    load_matrices(b, key_stage + first_token * KEY_ROW + place<KEY_ROW, STORE != 2>(token_of(lane / 16, lane % 8), part));
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
                        int token = first_token + token_of(t, lane % 4 * 2 + i % 2), position = at * STAGE_TOKENS + token, half = i / 2;
                        float score = float(scores[t][i]) * row_scales[half];
#if STORE != 2
                        score *= block_scales[token];
#endif
#ifdef SOFT_CAP
                        const float cap = bits_to_float(SOFT_CAP);
                        score = cap * tanhf(score * (1.0f / cap));
#endif
#if WINDOW > 0
                        // Of a later position, the distance is less than 0, and so larger than any window.
                        bool seen = u32(limits[half] - position) < WINDOW && position < to;
#else
                        bool seen = position <= limits[half] && position < to;
#endif
                        // A NaN score makes the result NaN, too.
                        weights[pair * 2 + t][i] = seen ? score : LOWEST;
                    }
            }
#if TEAM > 1
            u8* exchanged = LATENT ? shared + STAGES * STAGE_BYTES + QUERY_BYTES : key_stage + span * KEY_ROW;
            exchange(exchanged + first_row / 16 * EXCHANGED_BYTES, member, lane, weights);
#endif
            float most[2] = {largest[0], largest[1]};
#pragma unroll
            for (int t = 0; t < SPAN / 8; t++)
#pragma unroll
                for (int i = 0; i < 4; i++) most[i / 2] = fmaxf(most[i / 2], weights[t][i]);
            float shrink[2];
#if STORE != 2
            // Weights are multiplied by `inverse` before rounding, and their sums by `back`.
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
                    weight *= block_scales[STAGE_TOKENS + span + token_of(t, lane % 4 * 2 + i % 2)];
                    // The scale of a position that was never written may be anything.
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
            for (int pair = 0; pair < OWN_DIMS / 16; pair++) {
                if (LARGE) __syncwarp();
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
#if LATENT
                    int row = lane % 16, part = (member * OWN_DIMS + pair * 16) / 8 + lane / 16;
                    load_transposed(b, key_stage + (span + k * 16) * KEY_ROW + place<KEY_ROW>(row, part));
#else
                    int row = lane / 16 * 8 + lane % 8, part = span * SIZE / 16 + k * 2 + lane / 8 % 2;
                    load_matrices(b, value_stage + (member * OWN_DIMS + pair * 16) * VALUE_ROW + place<VALUE_ROW>(row, part));
#endif
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
        // After the barrier, all threads have read the stage that is filled next.
        __syncthreads();
    }
#pragma unroll
    for (int half = 0; half < 2; half++) totals[half] = over_row(totals[half], [](float a, float b) { return a + b; });
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (limits[half] < 0) continue;
        int row = first_row + half * 8 + lane / 4;
        auto sum = [&](int t, int i) { return sums[t][half * 2 + i]; };
        write_row<OWN_DIMS>(item, queries, head, row, lane, member * OWN_DIMS, sum, largest[half], totals[half], sinks, out, part_sums, part_states);
    }
}
