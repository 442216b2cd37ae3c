// Products of sorted rows with a matrix per expert, in codes of four bits: y = x W^T of each row's
// expert, plus bias, with `mma.sync`; for every card from sm_80 on.
//
// ROWS, GROUP_STEPS, and the layouts of codes and records: see coded_tile.cuh. Panels are those of the first
// expert, then of the next one; columns, the features of an expert, are a multiple of 16. x, row_scales,
// bytes: see coded_linear.cu; `rows` are those of x. picked, tiles, tile_count, bias, y: see
// grouped_linear.cu. A tile has at most ROWS rows.
#include "ptx.cuh"
#include "coded_tile.cuh"
#include "experts.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    grouped_coded_linear(const u8* x, const u8* codes, const u32* records, const float* row_scales, const Bf16* bias, Bf16* y,
                         const RowTile* tiles, const u32* tile_count, const u32* picked, int rows, int columns, int bytes, int groups) {
    DYNAMIC_SHARED(shared);
    __shared__ u32 picked_rows[ROWS];
    if (blockIdx.x >= *tile_count) return;
    const RowTile tile = tiles[blockIdx.x];
    int first_column = int(blockIdx.y) * TILE_COLUMNS;
    if (threadIdx.x < ROWS) picked_rows[threadIdx.x] = row_of_x(tile, threadIdx.x, picked);
    __syncthreads();
    u64 first_feature = u64(tile.expert) * columns;
    int first_panel = int(first_feature / PANEL);
    Codes w{codes, records, first_panel + first_column / PANEL, first_panel + columns / PANEL, (bytes + STAGE - 1) / STAGE, groups};
    TileSums sums = {};
    add_coded_products(sums, PickedRows{x, picked_rows}, RowScales{row_scales, rows}, w, bytes, shared);
    write_tile(
        sums, [&](int row) { return tile.first + row < tile.end ? int(tile.first) + row : -1; }, [](int) { return 1.0f; }, first_column,
        nullptr, bias ? bias + first_feature : nullptr, y, columns, columns);
}
