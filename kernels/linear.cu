// y = x W^T, scaled by row and column, plus bias, with `mma.sync`; for every card from sm_80 on.
//
// FORMAT, WIDE: see linear.cuh. x: [rows][K] and W: [columns][K] in the format; the bytes of a row
// (`bytes`) are a multiple of 16. y: [rows][stride], BF16 or F32, of which the first `columns`
// values are the result; stride is a multiple of 16, and the values beyond the columns may be
// overwritten. In INT8 and FP8, x and W are scaled by row: y[r][n] = sum * row_scales[r] *
// column_scales[n] + bias[n]. bias: [columns] or null.
//
// A thread block computes a tile of linear_tile.cuh.
#include "ptx.cuh"
#include "linear_tile.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) linear(const u8* x, const u8* w, const float* row_scales,
                                                            const float* column_scales, const Bf16* bias, Result* y, int rows,
                                                            int columns, int bytes, int stride) {
    DYNAMIC_SHARED(shared);
    int first_row = int(blockIdx.x) * TILE_ROWS, first_column = int(blockIdx.y) * TILE_COLUMNS;
    TileSums sums = {};
    add_products<STEPS>(sums, Rows{x, first_row, rows}, Rows{w, first_column, columns}, bytes, shared);
    write_tile(
        sums, [&](int row) { return first_row + row < rows ? first_row + row : -1; },
        [&](int row) { return row_scales[first_row + row]; }, first_column, column_scales, bias, y, columns, stride);
}
