// A tile of y = x W^T, where W has codes of four bits, in the registers of a thread block, with
// `mma.sync`: shared by coded_linear.cu and grouped_coded_linear.cu.
//
// A weight is (code - zero) * factor; the factor and the zero point are those of a feature's group of
// columns. x is INT8, with one scale per row and group. A group's sum of products is exact in INT32;
// groups are added up in F32, in their order, whatever the tile. So its size changes no bit.
//
// ROWS: rows of the tile: 16, 64 or 128. GROUP_STEPS: 32s of columns in a group, or 0 if all columns
// of a row are one group.
//
// W is in panels of 8 features. Each has units of 128 columns (k), in which a lane's 16 bytes are at
// once: word s has the lane's part of b in step s of the unit, as `mma.sync` takes it. Its lower half
// bytes are the codes of columns (lane % 4) * 4 to + 3 of the step, its upper half bytes those of the
// columns 16 later; the feature is lane / 4. For each panel and group there is a record: the factors of
// 8 features, then their zero points in a byte each.
#pragma once

#if ROWS == 16
#define WARP_ROWS 16
#define WARP_COLUMNS 8
#define TILE_COLUMNS 32
#define STAGES 8
#elif ROWS == 64
#define WARP_ROWS 64
#define WARP_COLUMNS 16
#define TILE_COLUMNS 64
#define STAGES 4
#else
#define WARP_ROWS 64
#define WARP_COLUMNS 32
#define TILE_COLUMNS 128
#define STAGES 3
#endif
#define TILE_ROWS ROWS
#define FORMAT 4
#define WIDE 0
#include "linear_tile.cuh"

#define PANEL 8
#define TILE_PANELS (TILE_COLUMNS / PANEL)
#define WARP_PANELS (WARP_COLUMNS / PANEL)
// Bytes of a panel's unit, which is a stage's part of the columns.
#define UNIT 512
#define RECORD_WORDS (PANEL + PANEL / 4)
// Groups of which a stage has columns, at most. A row's single group is read without stages.
#if GROUP_STEPS == 0
#define SLOTS 0
#elif GROUP_STEPS % STEPS == 0
#define SLOTS 1
#elif STEPS % GROUP_STEPS == 0
#define SLOTS (STEPS / GROUP_STEPS)
#else
#define SLOTS ((STEPS - 2 + GROUP_STEPS) / GROUP_STEPS + 1)
#endif
// Offsets in a stage, after the rows of x: codes, scales of x [SLOTS][ROWS], records [panels][SLOTS].
#define CODES_AT (ROWS * STAGE)
#define SCALES_AT (CODES_AT + TILE_PANELS * UNIT)
#define RECORDS_AT (SCALES_AT + SLOTS * ROWS * 4)
#define CODED_STAGE_BYTES ((RECORDS_AT + TILE_PANELS * SLOTS * RECORD_WORDS * 4 + 127) / 128 * 128)

// W, of which the tile has the panels from `first` to before `end`.
struct Codes {
    const u8* codes;
    const u32* records;
    int first, end, units, groups;
};

// Scales of x: [groups][rows].
struct RowScales {
    const float* from;
    int rows;
    template <class Operand> __device__ const float* at(const Operand& x, int row, int group) const {
        return from + u64(group) * rows + x.at(row);
    }
};

// A group's sum as F32. A sum that fits in 23 bits with its sign is put into the mantissa of a number,
// which takes two fast instructions in place of a slow one.
__device__ inline float group_sum(int sum) {
    const bool fits = GROUP_STEPS > 0 && GROUP_STEPS * 32 * 127 * 15 < 1 << 22;
    return fits ? bits_to_float(u32(sum) + 0x4b400000) - 12582912.0f : float(sum);
}

// Four codes, from the lower half bytes of a word, less the zero point, which is in each byte of
// `zeros`. The highest bit of each byte is set meanwhile, so that no byte borrows from the next one.
__device__ inline u32 less_zero(u32 codes, u32 zeros) {
    return (((codes & 0x0f0f0f0f) | 0x80808080) - zeros) ^ 0x80808080;
}

// The zero point of this lane's feature in each byte, of a panel's record.
__device__ inline u32 zeros_of(const u32* record) {
    return ((const u8*)(record + PANEL))[threadIdx.x % 32 / 4] * 0x01010101u;
}

template <class Operand>
__device__ inline void copy_coded_stage(u8* stage, const Operand& x, const RowScales& scales, const Codes& w, int unit, int bytes) {
    copy_stage<ROWS>(stage, x, unit * STAGE, bytes);
#pragma unroll
    for (int i = 0; i < TILE_PANELS * UNIT / 16 / THREADS; i++) {
        int task = i * THREADS + int(threadIdx.x);
        int panel = w.first + task / (UNIT / 16), part = task % (UNIT / 16);
        const u8* source = panel < w.end ? w.codes + (u64(panel) * w.units + unit) * UNIT + part * 16 : w.codes;
        copy_async(stage + CODES_AT + task * 16, source, panel < w.end ? 16 : 0);
    }
#if SLOTS > 0
    // Scales and records of rows, features and groups that are not there are zeros: their sums stay zero.
    int first_group = unit * STEPS / GROUP_STEPS;
#pragma unroll
    for (int i = 0; i < (SLOTS * ROWS + THREADS - 1) / THREADS; i++) {
        int task = i * THREADS + int(threadIdx.x), row = task % ROWS, group = first_group + task / ROWS;
        if (task >= SLOTS * ROWS) break;
        bool exists = x.exists(row) && group < w.groups;
        copy_word_async(stage + SCALES_AT + task * 4, exists ? scales.at(x, row, group) : scales.from, exists ? 4 : 0);
    }
    const int panel_words = SLOTS * RECORD_WORDS;
#pragma unroll
    for (int i = 0; i < (TILE_PANELS * panel_words + THREADS - 1) / THREADS; i++) {
        int task = i * THREADS + int(threadIdx.x), panel = w.first + task / panel_words, word = task % panel_words;
        if (task >= TILE_PANELS * panel_words) break;
        bool exists = panel < w.end && first_group + word / RECORD_WORDS < w.groups;
        const u32* source = exists ? w.records + (u64(panel) * w.groups + first_group) * RECORD_WORDS + word : w.records;
        copy_word_async(stage + RECORDS_AT + task * 4, source, exists ? 4 : 0);
    }
#endif
}

// Sums of codes' products in the group that is being added up.
typedef int GroupSums[WARP_ROWS / 16][WARP_PANELS][4];

// Adds a group's sums times the scales of rows and the factors of features. `scale_of(row)`: the scale
// of a row of the tile; `factors_of(panel)`: the factors of a panel of the warp.
template <class ScaleOf, class FactorsOf>
__device__ inline void add_group(TileSums& sums, const GroupSums& group, const ScaleOf& scale_of, const FactorsOf& factors_of) {
    int lane = int(threadIdx.x) % 32;
    float factors[WARP_PANELS][2];
#pragma unroll
    for (int n = 0; n < WARP_PANELS; n++) {
        const float* of = factors_of(n) + lane % 4 * 2;
        factors[n][0] = of[0];
        factors[n][1] = of[1];
    }
#pragma unroll
    for (int m = 0; m < WARP_ROWS / 16; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float scale = scale_of(warp_row() + m * 16 + half * 8 + lane / 4);
#pragma unroll
            for (int n = 0; n < WARP_PANELS; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float& sum = sums[m][n][half * 2 + i];
                    sum = fmaf(group_sum(group[m][n][half * 2 + i]), factors[n][i] * scale, sum);
                }
        }
}

// Adds up the tile's products of rows of x, `bytes` long, and features of W. `sums` is zero before.
// `shared`: STAGES * CODED_STAGE_BYTES.
template <class Operand>
__device__ inline void add_coded_products(TileSums& sums, const Operand& x, const RowScales& scales, const Codes& w, int bytes, u8* shared) {
    int lane = int(threadIdx.x) % 32, first_panel = warp_column() / PANEL;
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < w.units) copy_coded_stage(shared + s * CODED_STAGE_BYTES, x, scales, w, s, bytes);
        copy_group();
    }
    GroupSums group = {};
    u32 zeros[WARP_PANELS];
#if GROUP_STEPS == 0
    // A panel that is not there is read as the last one: its results are not written.
    const u32* records[WARP_PANELS];
#pragma unroll
    for (int n = 0; n < WARP_PANELS; n++) {
        int panel = w.first + first_panel + n;
        records[n] = w.records + u64(panel < w.end ? panel : w.end - 1) * RECORD_WORDS;
        zeros[n] = zeros_of(records[n]);
    }
#endif
    for (int s = 0; s < w.units; s++) {
        copy_wait<STAGES - 2>();
        // As in linear_tile.cuh: all threads can read this stage, and have read the one that is
        // overwritten next.
        __syncthreads();
        int ahead = s + STAGES - 1;
        if (ahead < w.units) copy_coded_stage(shared + ahead % STAGES * CODED_STAGE_BYTES, x, scales, w, ahead, bytes);
        copy_group();
        const u8* stage = shared + s % STAGES * CODED_STAGE_BYTES;
        Vec16 codes[WARP_PANELS];
#pragma unroll
        for (int n = 0; n < WARP_PANELS; n++) codes[n] = *(const Vec16*)(stage + CODES_AT + (first_panel + n) * UNIT + lane * 16);
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
#if GROUP_STEPS > 0
            int step = s * STEPS + k, slot = step / GROUP_STEPS - s * STEPS / GROUP_STEPS;
            const u32* records = (const u32*)(stage + RECORDS_AT) + (first_panel * SLOTS + slot) * RECORD_WORDS;
            if (k == 0 || (GROUP_STEPS % STEPS != 0 && step % GROUP_STEPS == 0))
#pragma unroll
                for (int n = 0; n < WARP_PANELS; n++) zeros[n] = zeros_of(records + n * SLOTS * RECORD_WORDS);
#endif
            u32 b[WARP_PANELS][2];
#pragma unroll
            for (int n = 0; n < WARP_PANELS; n++) {
                b[n][0] = less_zero(codes[n].words[k], zeros[n]);
                b[n][1] = less_zero(codes[n].words[k] >> 4, zeros[n]);
            }
#pragma unroll
            for (int m = 0; m < WARP_ROWS / 16; m++) {
                u32 a[4];
                int row = warp_row() + m * 16 + lane % 16;
                load_matrices(a, stage + place(row, k * 2 + lane / 16));
#pragma unroll
                for (int n = 0; n < WARP_PANELS; n++) multiply(group[m][n], a, b[n]);
            }
#if GROUP_STEPS > 0
            if ((step + 1) % GROUP_STEPS == 0) {
                const float* row_scales = (const float*)(stage + SCALES_AT) + slot * ROWS;
                add_group(
                    sums, group, [&](int row) { return row_scales[row]; },
                    [&](int n) { return (const float*)(records + n * SLOTS * RECORD_WORDS); });
#pragma unroll
                for (int m = 0; m < WARP_ROWS / 16; m++)
#pragma unroll
                    for (int n = 0; n < WARP_PANELS; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++) group[m][n][i] = 0;
            }
#endif
        }
    }
#if GROUP_STEPS == 0
    add_group(
        sums, group, [&](int row) { return x.exists(row) ? *scales.at(x, row, 0) : 0.0f; }, [&](int n) { return (const float*)records[n]; });
#endif
}
