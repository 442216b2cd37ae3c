// Attention over paged keys and values by `mma.sync`, for every card from sm_80 on: prefill, chunks of it, decode and prefixes that
// several sequences share, as the items of a plan say.
//
// HEADS, KV_HEADS (divides HEADS), HEAD_DIM (a multiple of 32), BLOCK: tokens of a block (64); STORE: 0 INT8, 1 FP8 (E4M3), 2 BF16,
// as in rope_store.cu; ROW_WARPS: warps of a block, each with 16 rows; WINDOW: 0, or how many positions a query sees.
//
// A block takes an item with one key-value head. Its rows are queries times the GROUP heads that share the head: row r is query
// r / GROUP, head r % GROUP of the group. It walks the item's positions, blocks in spans of SPAN, with an online softmax (Milakov and
// Gimelshein 2018). In eight bits a query's head has a scale of its own, and weights, times the scales of the values, are quantized
// row by row of a span; sums move to F32 after each span.
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
// Tokens of a step of the softmax: what a warp's scores and weights have registers for.
#define SPAN 32
// Blocks on their way at once.
#define STAGES 2
#define LOWEST (-1e30f)

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

// Where part `part` (of 16 bytes) of row `row` lies, so that the same part of 8 rows meets every bank once.
template <int BYTES> __device__ inline int place(int row, int part) {
    static_assert(BYTES % 128 == 0 || BYTES == 64 || BYTES == 32, "rows of whole bank lines, a half or a quarter");
    int turn = BYTES >= 128 ? row & 7 : BYTES == 64 ? row >> 1 & 3 : row >> 2 & 1;
    return row * BYTES + (part ^ turn) * 16;
}

template <int BYTES, int ROWS> __device__ inline void copy_rows(u8* to, const u8* from) {
    for (int task = int(threadIdx.x); task < ROWS * BYTES / 16; task += THREADS) {
        int row = task / (BYTES / 16), part = task % (BYTES / 16);
        copy_async(to + place<BYTES>(row, part), from + task * 16, 16);
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

extern "C" __global__ void __launch_bounds__(THREADS)
    attention(const Bf16* qkv, const u8* keys, const u8* values, const float* key_scales, const float* value_scales,
              const Item* items, const u32* queries, const u32* positions, const u32* tables, float scale, Bf16* out,
              float* part_sums, float* part_states) {
    DYNAMIC_SHARED(shared);
    Item item = items[blockIdx.x];
    int head = int(blockIdx.y);
    int lane = int(threadIdx.x) % 32, first_row = int(threadIdx.x) / 32 * 16;
    const u32* table = tables + item.table;
    int first_block = int(item.from) / BLOCK, blocks = (int(item.to) + BLOCK - 1) / BLOCK;

    auto fetch = [&](int block) {
        if (block < blocks) {
            u64 from = u64(table[block]) * KV_HEADS + head;
            u8* stage = shared + block % STAGES * STAGE_BYTES;
            copy_rows<KEY_ROW, BLOCK>(stage, keys + from * KEY_BYTES);
            copy_rows<VALUE_ROW, HEAD_DIM>(stage + KEY_BYTES, values + from * VALUE_BYTES);
#if STORE != 2
            if (threadIdx.x < BLOCK / 2) {
                const float* scales = threadIdx.x < BLOCK / 4 ? key_scales : value_scales;
                copy_async(stage + KEY_BYTES + VALUE_BYTES + threadIdx.x * 16, scales + from * BLOCK + threadIdx.x % (BLOCK / 4) * 4, 16);
            }
#endif
        }
        copy_group();
    };
    for (int block = first_block; block < first_block + STAGES - 1; block++) fetch(block);

    // The lane's two rows: token, head and position, and their queries, as the product wants them.
    u32 tokens[2];
    int limits[2];
    float row_scales[2];
    u32 q[KEY_ROW / 32][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = first_row + half * 8 + lane / 4;
        bool exists = row / GROUP < int(item.queries);
        tokens[half] = exists ? queries[item.first_query + row / GROUP] : NONE;
        limits[half] = exists ? int(positions[tokens[half]]) : -1;
        const Bf16* from = qkv + (u64(exists ? tokens[half] : 0) * (HEADS + 2 * KV_HEADS) + head * GROUP + row % GROUP) * HEAD_DIM;
#if STORE == 2
        row_scales[half] = scale;
#pragma unroll
        for (int k = 0; k < KEY_ROW / 32; k++)
#pragma unroll
            for (int side = 0; side < 2; side++) {
                u32 pair = *(const u32*)(from + k * 16 + side * 8 + lane % 4 * 2);
                q[k][side * 2 + half] = exists ? pair : 0;
            }
#else
        float most = 0;
#pragma unroll
        for (int k = 0; k < KEY_ROW / 16; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) most = fmaxf(most, fabsf(widen(from[k * 16 + lane % 4 * 4 + i])));
        most = over_row(most, [](float a, float b) { return fmaxf(a, b); });
        float inverse = most > 1e-30f && exists ? TOP / most : 0.0f;
        row_scales[half] = most / TOP * scale;
#pragma unroll
        for (int k = 0; k < KEY_ROW / 32; k++)
#pragma unroll
            for (int side = 0; side < 2; side++) {
                const Bf16* x = from + k * 32 + side * 16 + lane % 4 * 4;
                q[k][side * 2 + half] =
                    to_bytes(widen(x[0]) * inverse, widen(x[1]) * inverse, widen(x[2]) * inverse, widen(x[3]) * inverse);
            }
#endif
    }

    float sums[HEAD_DIM / 8][4] = {};
    float largest[2] = {LOWEST, LOWEST}, totals[2] = {0, 0};
    for (int block = first_block; block < blocks; block++) {
        fetch(block + STAGES - 1);
        copy_wait<STAGES - 1>();
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
#pragma unroll
                for (int k = 0; k < KEY_ROW / 32; k++) {
                    u32 b[4];
                    int row = span + token_of(pair * 2 + lane / 16, lane % 8);
                    load_matrices(b, key_stage + place<KEY_ROW>(row, k * 2 + lane / 8 % 2));
                    multiply_add(scores[0], q[k], b);
                    multiply_add(scores[1], q[k], b + 2);
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
                        bool seen = position <= limits[half] && position < int(item.to);
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
                    // What nobody wrote may be anything.
                    weight = x == LOWEST ? 0.0f : weight;
                    inverse[half] = fmaxf(inverse[half], weight);
#endif
                    weights[t][i] = weight;
                }
#if STORE != 2
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float top = over_row(inverse[half], [](float a, float b) { return fmaxf(a, b); });
                inverse[half] = top > 1e-30f ? TOP / top : 0.0f;
                back[half] = top / TOP;
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
                Sum products[2][4] = {};
#pragma unroll
                for (int k = 0; k < SPAN * SIZE / 32; k++) {
                    u32 b[4];
                    int row = pair * 16 + lane / 16 * 8 + lane % 8;
                    load_matrices(b, value_stage + place<VALUE_ROW>(row, span * SIZE / 16 + k * 2 + lane / 8 % 2));
                    multiply_add(products[0], a[k], b);
                    multiply_add(products[1], a[k], b + 2);
                }
#pragma unroll
                for (int t = 0; t < 2; t++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float& sum = sums[pair * 2 + t][i];
#if STORE == 2
                        sum = fmaf(sum, shrink[i / 2], products[t][i]);
#else
                        sum = fmaf(sum, shrink[i / 2], float(products[t][i]) * back[i / 2]);
#endif
                    }
            }
        }
        // All have read the stage that is filled next.
        __syncthreads();
    }
#pragma unroll
    for (int half = 0; half < 2; half++) totals[half] = over_row(totals[half], [](float a, float b) { return a + b; });
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (tokens[half] == NONE) continue;
        int row = first_row + half * 8 + lane / 4;
        if (item.part == NONE) {
            Bf16* to = out + (u64(tokens[half]) * HEADS + head * GROUP + row % GROUP) * HEAD_DIM;
#pragma unroll
            for (int t = 0; t < HEAD_DIM / 8; t++)
                *(u32*)(to + t * 8 + lane % 4 * 2) =
                    to_bf16_pair(sums[t][half * 2] / totals[half], sums[t][half * 2 + 1] / totals[half]);
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
