// Attention over paged keys and values on Hopper (sm_90a): what attention.cu says, by products of warpgroups.
//
// HEADS, KV_HEADS, HEAD_DIM (a multiple of 16 up to 128), BLOCK (64), STORE, WINDOW, SOFT_CAP: as in attention.cu, and so are the
// parameters, items and parts. ROW_WARPS: warps of a block, each with 16 rows: 4, 8 or 12, but 8 at most for heads of 128 in BF16. Shared
// memory: SHARED_BYTES.
//
// A block takes an item with one key-value head, as attention.cu's does. A warpgroup's product has 64 rows: a prompt's item fills
// them; one of a single token has GROUP of them, and where a warp, or eight rows of it, has none, it takes part in copies and products
// and leaves out the rest. Three blocks of four warps, or one of twelve, share a multiprocessor: while one multiplies, others make
// weights, and no warp has to do both at once. Twelve warps read keys and values once for 192 rows.
//
// A span of the softmax is a block of 64 tokens, at its place in the sequence; spans follow in order, and nothing that a row computes
// depends on other rows, on ROW_WARPS or on STAGES: so a token's result has the same bits in a prompt's item as in one of its own.
// FP8's accumulator keeps about 14 bits: a score is summed in it over HEAD_DIM, which puts it off by some 2^-12 of what it is summed
// from, where rounding queries and keys to three bits puts it off by more; weights times values over 64 tokens, then sums move to F32.
//
// What a block of 64 tokens in FP8 with heads of 128 costs a multiprocessor, in cycles. Memory: 16.5 KiB at 21 bytes a cycle are 800.
// Products: 4 of 64 x 64 x 32 and 2 of 64 x 128 x 32 are 256, whether rows are idle or not. Instructions: each warp issues some 140 for
// copies and products, and 245 for each eight rows, one a cycle and scheduler; so prompts are bound by the 630 of a warp with 16 rows,
// and decode, of which the busiest scheduler issues 385 or 630 for up to 8 or 16 heads of a group, by memory. Exponentials: 4 a cycle
// and scheduler, 256 for 16 rows. Shared memory, 128 bytes a cycle: written once and read once by products, 260, and scales. Under way
// are STAGES - 1 of 16.5 KiB for each of three blocks, where some 40 KiB keep memory busy.
//
// Keys and values are brought by `cp.async`, whose 16 bytes lie wherever their thread says: rows of keys in the order that `token_of`
// deals them, both swizzled as products read them. Idle warps bring their share. The tensor memory accelerator would need maps of five
// dimensions to deal rows, and the launch a map for each store; and a thread's instructions for copies are few beside the rest.
#include "hopper.cuh"
#include "attention.cuh"

#define THREADS (ROW_WARPS * 32)
// Keys lie in panels, the widest swizzle that a row is whole ones of; where its last 32 bytes are half a row's, the other half is zero.
#define KEY_PADDED (KEY_STEPS * 32)
#define PANEL (KEY_PADDED % 128 == 0 ? 128 : KEY_PADDED % 64 == 0 ? 64 : 32)
#define PANEL_BYTES (BLOCK * PANEL)
#define TILE_BYTES (BLOCK * KEY_PADDED + VALUE_BYTES)
// Blocks of four warps that share a multiprocessor's registers: sums and queries of BF16 in heads of 128 are too many for three.
#define SHARING (ROW_WARPS > 4 ? 1 : STORE == 2 && HEAD_DIM > 112 ? 2 : 3)
// Blocks of keys and values on their way at once and the one at work: as many as fit, but no more than 6. A multiprocessor has 228 KiB,
// of which each block takes one more than it asks for, and one to start on 1024 bytes.
#ifndef STAGES
#define FITTING (((228 / SHARING - 2) << 10) / (TILE_BYTES + SCALE_BYTES))
#define STAGES (FITTING < 6 ? FITTING : 6)
#endif
// Threads that copy a row of keys, of which those that find none of it left do nothing, and of values; and rows copied at once.
#define KEY_LANES (KEY_PADDED <= 32 ? 2 : KEY_PADDED <= 64 ? 4 : KEY_PADDED <= 128 ? 8 : 16)
#define KEY_ROWS (THREADS / KEY_LANES)
#define VALUE_LANES (VALUE_ROW / 16)
#define VALUE_ROWS (THREADS / VALUE_LANES)
// Tiles start on 1024 bytes.
#define SHARED_BYTES (STAGES * (TILE_BYTES + SCALE_BYTES) + 1024)
// Steps of the product of weights and values, 32 bytes of tokens each.
#define VALUE_STEPS (VALUE_ROW / 32)
// Tokens of a step of the softmax, and how many of them a lane has in a row.
#define SPAN BLOCK
#define OWN (SPAN / 4)
// Dimensions of the first of two products with the values in eight bits: registers hold no second set of more than 96.
#define FIRST_COLUMNS (HEAD_DIM > 96 ? 64 : HEAD_DIM)
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 128, "HEAD_DIM is a multiple of 16 up to 128");
static_assert(BLOCK == 64 && ROW_WARPS % 4 == 0, "a product of a warpgroup has 64 rows and a block's 64 tokens");
static_assert(HEADS % KV_HEADS == 0 && GROUP <= ROW_WARPS * 16, "the heads that share a key-value head have a row each");
static_assert(KEY_ROWS % (STORE == 2 ? 8 : 16) == 0 && VALUE_ROWS % 8 == 0, "rows copied by one thread lie the same way");
static_assert(STORE != 2 || HEAD_DIM <= 112 || ROW_WARPS <= 8, "registers hold no rows of twelve warps of such heads");
static_assert(STAGES >= 2 && TILE_BYTES % 1024 == 0, "tiles start on 1024 bytes");

template <int N> __device__ inline void multiply_add(Sum (&d)[N], const u32 (&a)[4], u64 b, int add) {
#if STORE == 0
    products(d, a, b, add);
#elif STORE == 1
    products(E4m3{}, d, a, b, add);
#else
    products(Bf16Pairs{}, d, a, b, add);
#endif
}

// The row of a tile of keys that token `token` of a block has: where `token_of` finds it.
__device__ inline u32 row_of(u32 token) {
#if STORE == 2
    return token;
#else
    return token / 16 * 16 + token / 2 % 2 * 8 + token / 4 % 4 * 2 + token % 2;
#endif
}

// One of a lane's numbers of a row: four at a time, then these.
template <class Op> __device__ inline float fold(const float (&x)[OWN], Op op) {
    float y[4] = {x[0], x[1], x[2], x[3]};
#pragma unroll
    for (int i = 4; i < OWN; i++) y[i % 4] = op(y[i % 4], x[i]);
    return op(op(y[0], y[1]), op(y[2], y[3]));
}

#if STORE != 2
// A lane's numbers of a row times the scales of their tokens, of which four lie side by side.
__device__ inline void scale_own(float (&x)[OWN], const u8* scales, int lane) {
#pragma unroll
    for (int i = 0; i < OWN; i += 4) {
        Vec16 four = ((const Vec16*)scales)[i + lane % 4];
#pragma unroll
        for (int j = 0; j < 4; j++) x[i + j] *= bits_to_float(four.words[j]);
    }
}

// Adds to sums what weights times values are, of COLUMNS dimensions from COLUMN on.
template <int COLUMN, int COLUMNS>
__device__ inline void add_values(float (&sums)[HEAD_DIM / 2], u32 (&weights)[VALUE_STEPS][4], const u8* value_tile,
                                  const bool (&busy)[2], const float (&shrink)[2], const float (&back)[2]) {
    if constexpr (COLUMNS > 0) {
        Sum partial[COLUMNS / 2];
        products_begin(partial, weights);
#pragma unroll
        for (int k = 0; k < VALUE_STEPS; k++)
            multiply_add(partial, weights[k], tile_descriptor<VALUE_ROW>(value_tile + COLUMN * VALUE_ROW) + k * 2, k > 0);
        products_end();
        products_done(partial, weights);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (!busy[half]) continue;
#pragma unroll
            for (int t = 0; t < COLUMNS / 8; t++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float& sum = sums[COLUMN / 2 + t * 4 + half * 2 + i];
                    sum = fmaf(sum, shrink[half], float(partial[t * 4 + half * 2 + i]) * back[half]);
                }
        }
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, SHARING)
    attention_sm90(const Bf16* qkv, const u8* keys, const u8* values, const float* key_scales, const float* value_scales,
                   const Item* items, const u32* queries, const u32* positions, const u32* tables, float scale, Bf16* out,
                   float* part_sums, float* part_states) {
    DYNAMIC_SHARED(dynamic);
    u8* shared = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
#if STORE != 2
    u8* shared_scales = shared + STAGES * TILE_BYTES;
#endif
    const Item& item = items[blockIdx.x];
    int to = int(item.to), head = int(blockIdx.y), lane = int(threadIdx.x % 32);
    // An item of few rows keeps one warp of four busy: not the same one in all blocks, since a scheduler has every fourth warp.
    u32 turn = (blockIdx.x + blockIdx.y * gridDim.x) * 0x9e3779b9u >> 30;
    int first_row = int(threadIdx.x / 128 * 64 + (threadIdx.x / 32 + turn) % 4 * 16);
    const u32* table = tables + item.table;
    int first_block = int(item.from) / BLOCK, blocks = (to + BLOCK - 1) / BLOCK;

    // What this thread copies: a part of 16 bytes of every so many rows, which lie the same way each time.
    u32 key_row = threadIdx.x / KEY_LANES, key_part = threadIdx.x % KEY_LANES, value_row = threadIdx.x / VALUE_LANES;
    bool has_key = key_part < KEY_ROW / 16;
    u32 key_from = key_row * KEY_ROW + (has_key ? key_part : 0) * 16;
    u32 key_to = key_part / (PANEL / 16) * PANEL_BYTES + place<PANEL>(row_of(key_row), key_part % (PANEL / 16));
    u32 value_to = BLOCK * KEY_PADDED + place<VALUE_ROW>(value_row, threadIdx.x % VALUE_LANES);
    // Begins to copy a block to a stage.
    auto fetch = [&](int block, int at) {
        if (block < blocks) {
            u64 from = u64(table[block]) * KV_HEADS + head;
            u8* stage = shared + at * TILE_BYTES;
            const u8* block_keys = keys + from * KEY_BYTES + key_from;
            const u8* block_values = values + from * VALUE_BYTES + threadIdx.x * 16;
            if (key_part < KEY_PADDED / 16)
#pragma unroll
                for (u32 row = 0; row < BLOCK; row += KEY_ROWS)
                    if (BLOCK % KEY_ROWS == 0 || row + key_row < BLOCK)
                        copy_async(stage + key_to + row * PANEL, block_keys + row * KEY_ROW, has_key ? 16 : 0);
#pragma unroll
            for (u32 row = 0; row < HEAD_DIM; row += VALUE_ROWS)
                if (HEAD_DIM % VALUE_ROWS == 0 || row + value_row < HEAD_DIM)
                    copy_async(stage + value_to + row * VALUE_ROW, block_values + row * VALUE_ROW, 16);
#if STORE != 2
            if (threadIdx.x < BLOCK / 2) {
                const float* scales = threadIdx.x < BLOCK / 4 ? key_scales : value_scales;
                copy_async(shared_scales + at * SCALE_BYTES + threadIdx.x * 16, scales + from * BLOCK + threadIdx.x % (BLOCK / 4) * 4, 16);
            }
#endif
        }
        copy_group();
    };
    for (int s = 0; s < STAGES - 1; s++) fetch(first_block + s, s);

    int limits[2];
    float row_scales[2];
    u32 q[KEY_STEPS][4];
    load_queries<true>(item, qkv, queries, positions, scale, head, first_row, lane, limits, row_scales,
                 [&](int k, int side, int half, u32 word) { q[k][side * 2 + half] = word; });
    // A row that is idle among busy ones sees all, since what it computes goes nowhere. `first`: the first position that each sees.
    // `busy`: of eight rows that a warp has side by side, that there is one.
    int first[2];
    bool busy[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        busy[half] = first_row + half * 8 < int(item.queries) * GROUP;
        first[half] = limits[half] - WINDOW + 1;
        if (limits[half] < 0 || limits[half] >= to) limits[half] = to - 1;
#ifndef SOFT_CAP
        // Weights are powers of two. A query of zeros has no scale, but what it does not see is infinitely far all the same.
        row_scales[half] *= LOG2_E;
        row_scales[half] = row_scales[half] < 1e-30f ? 1e-30f : row_scales[half];
#endif
    }

    float sums[HEAD_DIM / 2] = {};
    float largest[2] = {LOWEST, LOWEST}, totals[2] = {0, 0};
    for (int block = first_block, at = 0; block < blocks; block++, at = at + 1 < STAGES ? at + 1 : 0) {
        copy_wait<STAGES - 2>();
        u8* key_tile = shared + at * TILE_BYTES;
        u8* value_tile = key_tile + BLOCK * KEY_PADDED;
#if STORE != 0
        // No weight makes zero of what is not a number; a byte of INT8 always is one.
        int end = to - block * BLOCK;
        if (end < BLOCK) clear_values<THREADS>(end, [&](u32 row, u32 part) { return value_tile + place<VALUE_ROW>(row, part); });
#endif
        stores_before_products();
        // All have brought their share of this block, and are done with the one before, whose stage is filled next.
        __syncthreads();
        Sum scores[BLOCK / 2];
        products_begin(scores, q);
#pragma unroll
        for (int k = 0; k < KEY_STEPS; k++) {
            const u8* panel = key_tile + k * 32 / PANEL * PANEL_BYTES;
            multiply_add(scores, q[k], tile_descriptor<PANEL>(panel) + k * 32 % PANEL / 16, k > 0);
        }
        products_end();
        // While they are computed.
        fetch(block + STAGES - 1, at > 0 ? at - 1 : STAGES - 1);
        products_done(scores, q);

        // Weights, as the product with the values takes them; sums of the spans before shrink. In eight bits weights times the scales of
        // the values are quantized, and products are scaled `back`.
        u32 weights[VALUE_STEPS][4];
        float shrink[2] = {1, 1};
#if STORE != 2
        float back[2] = {0, 0};
#endif
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int k = 0; k < VALUE_STEPS; k++) weights[k][half] = weights[k][2 + half] = 0;
            if (!busy[half]) continue;
            // Number i of a lane's is of tile i / 2.
            float x[OWN];
#pragma unroll
            for (int i = 0; i < OWN; i++) x[i] = float(scores[i / 2 * 4 + half * 2 + i % 2]);
#if STORE != 2
            scale_own(x, shared_scales + at * SCALE_BYTES, lane);
#endif
#ifdef SOFT_CAP
            const float cap = bits_to_float(SOFT_CAP), unit = LOG2_E;
#pragma unroll
            for (int i = 0; i < OWN; i++) x[i] = cap * tanhf(x[i] * (row_scales[half] * (1.0f / cap)));
#else
            float unit = row_scales[half];
#endif
            int from = first[half] - block * BLOCK, before = limits[half] + 1 - block * BLOCK;
            auto seen = [&](int i) {
                int token = token_of(i / 2, lane % 4 * 2 + i % 2);
                return (WINDOW == 0 || token >= from) && token < before;
            };
            bool whole = (WINDOW == 0 || from <= 0) && before >= BLOCK;
            if (!whole)
#pragma unroll
                for (int i = 0; i < OWN; i++) x[i] = seen(i) ? x[i] : bits_to_float(0xff800000);
            // A score that is not a number shows in the result.
            auto larger = [](float a, float b) { return fmaxf(a, b); };
            float most = fmaxf(largest[half], over_row(fold(x, larger), larger) * unit);
            shrink[half] = power_of_two(largest[half] - most);
            largest[half] = most;
#pragma unroll
            for (int i = 0; i < OWN; i++) x[i] = power_of_two(fmaf(x[i], unit, -most));
            totals[half] = fmaf(totals[half], shrink[half], fold(x, [](float a, float b) { return a + b; }));
#if STORE == 2
#pragma unroll
            for (int k = 0; k < VALUE_STEPS; k++) {
                weights[k][half] = to_bf16_pair(x[k * 4], x[k * 4 + 1]);
                weights[k][2 + half] = to_bf16_pair(x[k * 4 + 2], x[k * 4 + 3]);
            }
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 4; i++) sums[i / 2 * 4 + half * 2 + i % 2] *= shrink[half];
#else
            scale_own(x, shared_scales + at * SCALE_BYTES + BLOCK * 4, lane);
            // The scale of what nobody wrote may be anything.
            if (!whole)
#pragma unroll
                for (int i = 0; i < OWN; i++) x[i] = seen(i) ? x[i] : 0.0f;
            float top = over_row(fold(x, larger_or_nan), larger_or_nan);
            float inverse = top > 1e-30f ? TOP / top : 0.0f;
            back[half] = top * (1.0f / TOP);
#pragma unroll
            for (int k = 0; k < VALUE_STEPS; k++)
#pragma unroll
                for (int side = 0; side < 2; side++) {
                    const float* w = x + k * 8 + side * 4;
                    weights[k][side * 2 + half] = to_bytes(w[0] * inverse, w[1] * inverse, w[2] * inverse, w[3] * inverse);
                }
#endif
        }

#if STORE == 2
        products_begin(sums, weights);
#pragma unroll
        for (int k = 0; k < VALUE_STEPS; k++) multiply_add(sums, weights[k], tile_descriptor<VALUE_ROW>(value_tile) + k * 2, 1);
        products_end();
        products_done(sums, weights);
#else
        add_values<0, FIRST_COLUMNS>(sums, weights, value_tile, busy, shrink, back);
        add_values<FIRST_COLUMNS, HEAD_DIM - FIRST_COLUMNS>(sums, weights, value_tile, busy, shrink, back);
#endif
    }
#pragma unroll
    for (int half = 0; half < 2; half++) totals[half] = over_row(totals[half], [](float a, float b) { return a + b; });
#pragma unroll
    for (int half = 0; half < 2; half++) {
        // Anew: what divisions by GROUP made of it at the beginning would have to wait in registers.
        int row = anew(first_row + half * 8 + lane / 4);
        if (row >= int(item.queries) * GROUP) continue;
        auto sum = [&](int t, int i) { return sums[t * 4 + half * 2 + i]; };
        write_row(item, queries, head, row, lane, sum, largest[half] * LN_2, totals[half], out, part_sums, part_states);
    }
}
