// Products of sorted rows with a matrix per expert: y = x W^T of each row's expert, scaled by row and
// column, plus bias, with `mma.sync`; for every card from sm_80 on.
//
// FORMAT, WIDE, bytes: see linear.cu. x: rows in the format; picked: the row of x for each sorted
// row, or null if x has sorted rows. W: [experts][columns][K]. row_scales: of rows of x;
// column_scales, bias: [experts][columns], bias may be null. y: [sorted rows][columns]; columns are a
// multiple of 16.
//
// A thread block computes a tile of linear_tile.cuh, with rows of one expert: its rows are
// tiles[blockIdx.x]. The host does not know how rows spread over experts. It launches as many blocks
// as there may be tiles, and those beyond *tile_count end at once.
#include "ptx.cuh"
#include "linear_tile.cuh"
#include "experts.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    grouped_linear(const u8* x, const u8* w, const float* row_scales, const float* column_scales, const Bf16* bias, Result* y,
                   const RowTile* tiles, const u32* tile_count, const u32* picked, int columns, int bytes) {
    DYNAMIC_SHARED(shared);
    __shared__ u32 rows[TILE_ROWS];
    if (blockIdx.x >= *tile_count) return;
    const RowTile tile = tiles[blockIdx.x];
    int first_column = int(blockIdx.y) * TILE_COLUMNS;
    if (threadIdx.x < TILE_ROWS) rows[threadIdx.x] = row_of_x(tile, threadIdx.x, picked);
    __syncthreads();
    u64 first_feature = u64(tile.expert) * columns;
    TileSums sums = {};
    // Hopper multiplies FP8 as pairs of F16, for which registers suffice in one step only.
    add_products<FORMAT == 1 ? 1 : STEPS>(sums, PickedRows{x, rows}, Rows{w + first_feature * bytes, first_column, columns}, bytes, shared);
    write_tile(
        sums, [&](int row) { return tile.first + row < tile.end ? int(tile.first) + row : -1; },
        [&](int row) { return row_scales[rows[row]]; }, first_column, FORMAT == 2 ? nullptr : column_scales + first_feature,
        bias ? bias + first_feature : nullptr, y, columns, columns);
}
