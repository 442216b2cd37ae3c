// y = x W^T, scaled by row and column, plus bias, with `mma.sync`; for every card from sm_80 on.
//
// FORMAT, WIDE: see linear.cuh. x: [rows][K] and W: [columns][K] in the format; the bytes of a row
// (`bytes`) are a multiple of 16. y: [rows][stride], BF16 or F32, of which the first `columns`
// values are the result; stride is a multiple of 16, and the values beyond the columns may be
// overwritten. In INT8 and FP8, x and W are scaled by row: y[r][n] = sum * row_scales[r] *
// column_scales[n] + bias[n]. bias: [columns] or null.
//
// A thread block of 8 warps computes TILE x TILE values of y, a warp 64 x 32. Stages of 128 bytes
// of each row are copied ahead. The 16-byte parts of a row are swizzled by the row's number, so
// that reading 8 rows uses every bank once. FP8's accumulator keeps about 14 bits of a sum
// (DeepSeek-V3 technical report, 2024, section 3.3.2), so sums move to F32 registers after each
// stage.
#include "ptx.cuh"
#include "linear.cuh"

#define TILE 128
#define STAGE 128
#define STAGES 3
#define WARP_ROWS 64
#define WARP_COLUMNS 32
#define THREADS 256

__device__ inline void multiply_add(Sum (&c)[4], const u32 (&a)[4], const u32* b) {
#if FORMAT == 0
    multiply(c, a, b);
#elif FORMAT == 1
    multiply(E4m3{}, c, a, b);
#else
    multiply(Bf16Pairs{}, c, a, b);
#endif
}

// Offset of part `part` (16 bytes) of row `row` in a stage.
__device__ inline int place(int row, int part) {
    return row * STAGE + ((part ^ row) & 7) * 16;
}

// Begins to copy a stage: byte `at` and the following bytes of rows from `first` on, of which only
// rows below `rows` exist.
__device__ inline void copy_stage(u8* to, const u8* from, int first, int rows, int at, int bytes) {
#pragma unroll
    for (int i = 0; i < TILE * STAGE / 16 / THREADS; i++) {
        int task = i * THREADS + int(threadIdx.x);
        int row = task / (STAGE / 16), part = task % (STAGE / 16);
        bool exists = first + row < rows && at + part * 16 < bytes;
        const u8* source = exists ? from + u64(first + row) * bytes + at + part * 16 : from;
        copy_async(to + place(row, part), source, exists ? 16 : 0);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) linear(const u8* x, const u8* w, const float* row_scales,
                                                            const float* column_scales, const Bf16* bias, Result* y, int rows,
                                                            int columns, int bytes, int stride) {
    DYNAMIC_SHARED(shared);
    int first_row = int(blockIdx.x) * TILE, first_column = int(blockIdx.y) * TILE;
    int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
    int warp_row = warp % (TILE / WARP_ROWS) * WARP_ROWS, warp_column = warp / (TILE / WARP_ROWS) * WARP_COLUMNS;

    Sum sums[WARP_ROWS / 16][WARP_COLUMNS / 8][4] = {};
    int stages = (bytes + STAGE - 1) / STAGE;
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < stages) {
            u8* stage = shared + s * 2 * TILE * STAGE;
            copy_stage(stage, x, first_row, rows, s * STAGE, bytes);
            copy_stage(stage + TILE * STAGE, w, first_column, columns, s * STAGE, bytes);
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
            u8* stage = shared + ahead % STAGES * 2 * TILE * STAGE;
            copy_stage(stage, x, first_row, rows, ahead * STAGE, bytes);
            copy_stage(stage + TILE * STAGE, w, first_column, columns, ahead * STAGE, bytes);
        }
        copy_group();
        const u8* a_stage = shared + s % STAGES * 2 * TILE * STAGE;
        const u8* b_stage = a_stage + TILE * STAGE;
#if FORMAT == 1
        Sum partial[WARP_ROWS / 16][WARP_COLUMNS / 8][4] = {};
#else
        Sum(&partial)[WARP_ROWS / 16][WARP_COLUMNS / 8][4] = sums;
#endif
#pragma unroll
        for (int k = 0; k < STAGE / 32; k++) {
            u32 b[WARP_COLUMNS / 16][4];
#pragma unroll
            for (int n = 0; n < WARP_COLUMNS / 16; n++) {
                int row = warp_column + n * 16 + lane / 16 * 8 + lane % 8;
                load_matrices(b[n], b_stage + place(row, k * 2 + lane / 8 % 2));
            }
#pragma unroll
            for (int m = 0; m < WARP_ROWS / 16; m++) {
                u32 a[4];
                int row = warp_row + m * 16 + lane % 16;
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
#pragma unroll
    for (int m = 0; m < WARP_ROWS / 16; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = first_row + warp_row + m * 16 + half * 8 + lane / 4;
            if (row >= rows) continue;
            float row_scale = FORMAT == 2 ? 1.0f : row_scales[row];
#pragma unroll
            for (int n = 0; n < WARP_COLUMNS / 8; n++) {
                int column = first_column + warp_column + n * 8 + lane % 4 * 2;
                if (column >= columns) continue;
                write_pair(y + u64(row) * stride, column, columns, sums[m][n][half * 2], sums[m][n][half * 2 + 1], row_scale,
                           column_scales, bias);
            }
        }
    }
}
