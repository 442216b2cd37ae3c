// A tile of y = x W^T in the registers of a thread block, with `mma.sync`: shared by linear.cu and
// grouped_linear.cu, and parts of it by coded_tile.cuh, which has tiles of other sizes.
//
// FORMAT, WIDE: see linear.cuh. A thread block of 8 warps computes 128 x 128 values of y, a warp
// 64 x 32. Stages of 128 bytes of each row are copied ahead. The 16-byte parts of a row are swizzled
// by the row's number, so that reading 8 rows uses every bank once. FP8's accumulator keeps about 14
// bits of a sum (DeepSeek-V3 technical report, 2024, section 3.3.2), so sums move to F32 registers
// after each stage.
#pragma once
#include "linear.cuh"

#ifndef TILE_ROWS
#define TILE_ROWS 128
#define TILE_COLUMNS 128
#define WARP_ROWS 64
#define WARP_COLUMNS 32
#define STAGES 3
#endif
#define THREADS (TILE_ROWS / WARP_ROWS * (TILE_COLUMNS / WARP_COLUMNS) * 32)
#define STAGE 128
// Steps of a product over a stage.
#define STEPS (STAGE / 32)
#define STAGE_BYTES ((TILE_ROWS + TILE_COLUMNS) * STAGE)
#define TILE_SHARED_BYTES (STAGES * STAGE_BYTES)

// A thread's part of the tile.
typedef Sum TileSums[WARP_ROWS / 16][WARP_COLUMNS / 8][4];

// The first row and the first column of a warp's part of the tile.
__device__ inline int warp_row() {
    return int(threadIdx.x) / 32 % (TILE_ROWS / WARP_ROWS) * WARP_ROWS;
}

__device__ inline int warp_column() {
    return int(threadIdx.x) / 32 / (TILE_ROWS / WARP_ROWS) * WARP_COLUMNS;
}

#if FORMAT < 3
__device__ inline void multiply_add(Sum (&c)[4], const u32 (&a)[4], const u32* b) {
#if FORMAT == 0
    multiply(c, a, b);
#elif FORMAT == 1
    multiply(E4m3{}, c, a, b);
#else
    multiply(Bf16Pairs{}, c, a, b);
#endif
}
#endif

// Offset of part `part` (16 bytes) of row `row` in a stage.
__device__ inline int place(int row, int part) {
    return row * STAGE + ((part ^ row) & 7) * 16;
}

// An operand's rows, of which the tile has those from `first` to before `end`.
struct Rows {
    const u8* from;
    int first, end;
    __device__ bool exists(int row) const { return first + row < end; }
    __device__ u64 at(int row) const { return u64(first + row); }
};

// Where a row begins, in bytes from the operand's start.
template <class Operand> __device__ inline u64 start_of(const Operand& operand, int row, int bytes) {
    return operand.at(row) * bytes;
}

// Rows with other numbers between them.
struct StridedRows {
    const u8* from;
    int first, end, stride;
    __device__ bool exists(int row) const { return first + row < end; }
};

__device__ inline u64 start_of(const StridedRows& operand, int row, int) {
    return u64(operand.first + row) * operand.stride;
}

// Begins to copy a stage of COUNT rows: byte `at` and the following bytes of the operand's rows, of
// which only some exist.
template <int COUNT, class Operand> __device__ inline void copy_stage(u8* to, const Operand& operand, int at, int bytes) {
#pragma unroll
    for (int i = 0; i < COUNT * STAGE / 16 / THREADS; i++) {
        int task = i * THREADS + int(threadIdx.x);
        int row = task / (STAGE / 16), part = task % (STAGE / 16);
        bool exists = operand.exists(row) && at + part * 16 < bytes;
        const u8* source = exists ? operand.from + start_of(operand, row, bytes) + at + part * 16 : operand.from;
        copy_async(to + place(row, part), source, exists ? 16 : 0);
    }
}

#if FORMAT < 3
// Adds up the tile's products of rows of x and rows of W, `bytes` long. `sums` is zero before.
// `shared`: TILE_SHARED_BYTES. UNROLL: steps that the compiler may take at once, up to STEPS: fewer
// take fewer registers.
template <int UNROLL, class Operand>
__device__ inline void add_products(TileSums& sums, const Operand& x, const Rows& w, int bytes, u8* shared) {
    int lane = int(threadIdx.x) % 32, stages = (bytes + STAGE - 1) / STAGE;
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < stages) {
            u8* stage = shared + s * STAGE_BYTES;
            copy_stage<TILE_ROWS>(stage, x, s * STAGE, bytes);
            copy_stage<TILE_COLUMNS>(stage + TILE_ROWS * STAGE, w, s * STAGE, bytes);
        }
        copy_group();
    }
    for (int s = 0; s < stages; s++) {
        copy_wait<STAGES - 2>();
        // After the barrier, all threads can read this stage, and all have read the stage that is
        // overwritten next.
        __syncthreads();
        int ahead = s + STAGES - 1;
        if (ahead < stages) {
            u8* stage = shared + ahead % STAGES * STAGE_BYTES;
            copy_stage<TILE_ROWS>(stage, x, ahead * STAGE, bytes);
            copy_stage<TILE_COLUMNS>(stage + TILE_ROWS * STAGE, w, ahead * STAGE, bytes);
        }
        copy_group();
        const u8* a_stage = shared + s % STAGES * STAGE_BYTES;
        const u8* b_stage = a_stage + TILE_ROWS * STAGE;
#if FORMAT == 1
        TileSums partial = {};
#else
        TileSums& partial = sums;
#endif
#pragma unroll UNROLL
        for (int k = 0; k < STEPS; k++) {
            u32 b[WARP_COLUMNS / 16][4];
#pragma unroll
            for (int n = 0; n < WARP_COLUMNS / 16; n++) {
                int row = warp_column() + n * 16 + lane / 16 * 8 + lane % 8;
                load_matrices(b[n], b_stage + place(row, k * 2 + lane / 8 % 2));
            }
#pragma unroll
            for (int m = 0; m < WARP_ROWS / 16; m++) {
                u32 a[4];
                int row = warp_row() + m * 16 + lane % 16;
                load_matrices(a, a_stage + place(row, k * 2 + lane / 16));
#pragma unroll
                for (int n = 0; n < WARP_COLUMNS / 8; n++) multiply_add(partial[m][n], a, b[n / 2] + n % 2 * 2);
            }
        }
#if FORMAT == 1
#pragma unroll
        for (int m = 0; m < WARP_ROWS / 16; m++)
#pragma unroll
            for (int n = 0; n < WARP_COLUMNS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) sums[m][n][i] += partial[m][n][i];
#endif
    }
}
#endif

// Writes the thread's part of the tile, whose first column is `first_column`. `row_of(row)`: the row
// of y for a row of the tile, or -1 if there is none; `scale_of(row)`: the scale of a row of the
// tile.
template <class RowOf, class ScaleOf>
__device__ inline void write_tile(const TileSums& sums, const RowOf& row_of, const ScaleOf& scale_of, int first_column,
                                  const float* column_scales, const Bf16* bias, Result* y, int columns, int stride) {
    int lane = int(threadIdx.x) % 32;
#pragma unroll
    for (int m = 0; m < WARP_ROWS / 16; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int in_tile = warp_row() + m * 16 + half * 8 + lane / 4, row = row_of(in_tile);
            if (row < 0) continue;
            float row_scale = SCALED ? scale_of(in_tile) : 1.0f;
#pragma unroll
            for (int n = 0; n < WARP_COLUMNS / 8; n++) {
                int column = first_column + warp_column() + n * 8 + lane % 4 * 2;
                if (column >= columns) continue;
                write_pair(y + u64(row) * stride, column, columns, sums[m][n][half * 2], sums[m][n][half * 2 + 1], row_scale,
                           column_scales, bias);
            }
        }
    }
}
