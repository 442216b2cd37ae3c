// Attention over paged keys and values on Hopper (sm_90a): the function of attention.cu, with
// `wgmma`.
//
// HEADS, KV_HEADS, HEAD_DIM (a multiple of 16 up to 128), BLOCK (64), STORE, WINDOW, SOFT_CAP: as
// in attention.cu, as are the parameters, items and parts. ROW_WARPS: warps per thread block, each
// with 16 rows: 4, 8 or 12, but at most 8 for heads of 128 in BF16. Shared memory: SHARED_BYTES.
//
// As in attention.cu, a thread block computes an item for one key-value head. A warpgroup's product
// has 64 rows. An item of prefill fills them; an item of a single token has GROUP rows. A warp
// without rows, or eight rows of a warp that are idle, take part only in copies and products. Three
// blocks of four warps, or one of twelve, share a multiprocessor: while one warpgroup multiplies,
// others compute weights, and no warp has to do both at once. With twelve warps, keys and values
// are read once for 192 rows.
//
// A span of the softmax is a KV block of 64 tokens, at fixed positions of the sequence. Spans
// follow in order, and nothing that a row computes depends on other rows, on ROW_WARPS or on
// STAGES. So a token's result has the same bits in an item of prefill as in an item of its own.
// FP8's accumulator keeps about 14 bits. A score is summed in it over HEAD_DIM, with an error of
// some 2^-12 of the summands; rounding queries and keys to three bits has a larger error. Weights
// times values are summed in it over 64 tokens; then sums move to F32.
//
// Costs of a KV block of 64 tokens in FP8 with heads of 128, in cycles of a multiprocessor. Memory:
// 16.5 KiB at 21 bytes per cycle are 800. Products: 4 of 64 x 64 x 32 and 2 of 64 x 128 x 32 are
// 256, whether rows are idle or not. Instructions: each warp issues some 140 for copies and
// products, and 245 for each eight rows, at one per cycle and scheduler. So prefill is bound by the
// 630 of a warp with 16 rows; decode, in which the busiest scheduler issues 385 or 630 for up to 8
// or 16 heads of a group, is bound by memory. Exponentials: 4 per cycle and scheduler, 256 for 16
// rows. Shared memory, 128 bytes per cycle: written once and read once by products, 260, and the
// scales. In flight are STAGES - 1 times 16.5 KiB for each of three thread blocks; some 40 KiB keep
// memory busy.
//
// Keys and values are copied by `cp.async`, because each thread can choose where its 16 bytes go:
// rows of keys in the order of `token_of`, both swizzled as products read them. Idle warps copy
// their share. The tensor memory accelerator would need maps of five dimensions for this order, and
// each launch a map for each store; and the instructions for copies are few beside the rest.
#include "hopper.cuh"
#include "attention.cuh"

#define THREADS (ROW_WARPS * 32)
// Keys are stored in panels as wide as the widest swizzle whose multiple a row is; if the last 32
// bytes are half a panel row, the other half is zero.
#define KEY_PADDED (KEY_STEPS * 32)
#define PANEL (KEY_PADDED % 128 == 0 ? 128 : KEY_PADDED % 64 == 0 ? 64 : 32)
#define PANEL_BYTES (BLOCK * PANEL)
#define TILE_BYTES (BLOCK * KEY_PADDED + VALUE_BYTES)
// Thread blocks of four warps per multiprocessor: with BF16 and heads of 128, the registers do not
// suffice for the sums and queries of three.
#define SHARING (ROW_WARPS > 4 ? 1 : STORE == 2 && HEAD_DIM > 112 ? 2 : 3)
// KV blocks in flight and the one in use: as many as fit, but at most 6. A multiprocessor has 228
// KiB, of which each thread block takes 1 KiB more than requested, and 1 KiB for its alignment to
// 1024 bytes.
#ifndef STAGES
#define FITTING (((228 / SHARING - 2) << 10) / (TILE_BYTES + SCALE_BYTES))
#define STAGES (FITTING < 6 ? FITTING : 6)
#endif
// Threads that copy a row of keys (those beyond its end do nothing) and a row of values, and rows
// that are copied at once.
#define KEY_LANES (KEY_PADDED <= 32 ? 2 : KEY_PADDED <= 64 ? 4 : KEY_PADDED <= 128 ? 8 : 16)
#define KEY_ROWS (THREADS / KEY_LANES)
#define VALUE_LANES (VALUE_ROW / 16)
#define VALUE_ROWS (THREADS / VALUE_LANES)
// Tiles are aligned to 1024 bytes.
#define SHARED_BYTES (STAGES * (TILE_BYTES + SCALE_BYTES) + 1024)
// Steps of the product of weights and values; each has 32 bytes of tokens.
#define VALUE_STEPS (VALUE_ROW / 32)
// Tokens per step of the softmax, and how many of them a lane has in a row.
#define SPAN BLOCK
#define OWN (SPAN / 4)
// In eight bits, the product with the values is split in two, because the registers do not hold a
// second set of more than 96 sums: dimensions of the first part.
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

// The row of token `token` in a tile of keys; the inverse of `token_of`.
__device__ inline u32 row_of(u32 token) {
#if STORE == 2
    return token;
#else
    return token / 16 * 16 + token / 2 % 2 * 8 + token / 4 % 4 * 2 + token % 2;
#endif
}

// Reduces a lane's values of a row to one: four at a time, then these four.
template <class Op> __device__ inline float fold(const float (&x)[OWN], Op op) {
    float y[4] = {x[0], x[1], x[2], x[3]};
#pragma unroll
    for (int i = 4; i < OWN; i++) y[i % 4] = op(y[i % 4], x[i]);
    return op(op(y[0], y[1]), op(y[2], y[3]));
}

#if STORE != 2
// Multiplies a lane's values of a row by the scales of their tokens, of which four are neighbours.
__device__ inline void scale_own(float (&x)[OWN], const u8* scales, int lane) {
#pragma unroll
    for (int i = 0; i < OWN; i += 4) {
        Vec16 four = ((const Vec16*)scales)[i + lane % 4];
#pragma unroll
        for (int j = 0; j < 4; j++) x[i + j] *= bits_to_float(four.words[j]);
    }
}

// Adds weights times values to the sums of COLUMNS dimensions from COLUMN on.
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
                   const Item* items, const u32* queries, const u32* positions, const u32* tables, float scale, const Bf16* sinks, Bf16* out,
                   float* part_sums, float* part_states) {
    DYNAMIC_SHARED(dynamic);
    u8* shared = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
#if STORE != 2
    u8* shared_scales = shared + STAGES * TILE_BYTES;
#endif
    const Item& item = items[blockIdx.x];
    int to = int(item.to), head = int(blockIdx.y), lane = int(threadIdx.x % 32);
    // An item with few rows keeps only one warp of four busy. Blocks choose different warps,
    // because a scheduler has every fourth warp.
    u32 turn = (blockIdx.x + blockIdx.y * gridDim.x) * 0x9e3779b9u >> 30;
    int first_row = int(threadIdx.x / 128 * 64 + (threadIdx.x / 32 + turn) % 4 * 16);
    const u32* table = tables + item.table;
    int first_block = int(item.from) / BLOCK, blocks = (to + BLOCK - 1) / BLOCK;

    // This thread copies one 16-byte part of every so many rows, at the same swizzled offset each
    // time.
    u32 key_row = threadIdx.x / KEY_LANES, key_part = threadIdx.x % KEY_LANES, value_row = threadIdx.x / VALUE_LANES;
    bool has_key = key_part < KEY_ROW / 16;
    u32 key_from = key_row * KEY_ROW + (has_key ? key_part : 0) * 16;
    u32 key_to = key_part / (PANEL / 16) * PANEL_BYTES + place<PANEL>(row_of(key_row), key_part % (PANEL / 16));
    u32 value_to = BLOCK * KEY_PADDED + place<VALUE_ROW>(value_row, threadIdx.x % VALUE_LANES);
    // Begins to copy a KV block to a stage.
    auto fetch = [&](int block, int at) {
        if (block < blocks) {
            u64 from = head_at(table[block], head);
            u8* stage = shared + at * TILE_BYTES;
            const u8* block_keys = keys + from + key_from;
            const u8* block_values = values + from + threadIdx.x * 16;
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
                copy_async(shared_scales + at * SCALE_BYTES + threadIdx.x * 16, scales + scales_at(table[block], head) + threadIdx.x % (BLOCK / 4) * 4, 16);
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
    // `first`: the first position that each row attends to. An idle row among busy ones attends to
    // all positions, because its result is discarded. `busy`: whether any of the warp's eight
    // neighbouring rows is in use.
    int first[2];
    bool busy[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        busy[half] = first_row + half * 8 < int(item.queries) * GROUP;
        first[half] = limits[half] - WINDOW + 1;
        if (limits[half] < 0 || limits[half] >= to) limits[half] = to - 1;
#ifndef SOFT_CAP
        // Weights are computed as powers of two. A query of zeros has a scale of 0, which is raised
        // a little: masked positions must still be infinitely far.
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
        // A weight of zero times NaN is NaN, so values beyond the end must be zeroed. A byte of
        // INT8 always is a number.
        int end = to - block * BLOCK;
        if (end < BLOCK) clear_values<THREADS>(end, [&](u32 row, u32 part) { return value_tile + place<VALUE_ROW>(row, part); });
#endif
        stores_before_products();
        // After the barrier, all threads have copied their share of this block and no longer read
        // the previous block, whose stage is filled next.
        __syncthreads();
        Sum scores[BLOCK / 2];
        products_begin(scores, q);
#pragma unroll
        for (int k = 0; k < KEY_STEPS; k++) {
            const u8* panel = key_tile + k * 32 / PANEL * PANEL_BYTES;
            multiply_add(scores, q[k], tile_descriptor<PANEL>(panel) + k * 32 % PANEL / 16, k > 0);
        }
        products_end();
        // Meanwhile, the products are computed.
        fetch(block + STAGES - 1, at > 0 ? at - 1 : STAGES - 1);
        products_done(scores, q);

        // Weights in the layout of the product with the values; sums of the previous spans shrink.
        // In eight bits, weights times the scales of the values are quantized, and products are
        // multiplied by `back`.
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
            // A lane's value i is in tile i / 2.
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
            // A NaN score makes the result NaN, too.
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
            // The scale of a position that was never written may be anything.
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
        // Computed again: the results of the divisions by GROUP at the beginning would have to be
        // kept in registers.
        int row = anew(first_row + half * 8 + lane / 4);
        if (row >= int(item.queries) * GROUP) continue;
        auto sum = [&](int t, int i) { return sums[t * 4 + half * 2 + i]; };
        write_row<HEAD_DIM>(item, queries, head, row, lane, 0, sum, largest[half] * LN_2, totals[half], sinks, out, part_sums, part_states);
    }
}
