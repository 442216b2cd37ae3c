// y = x W^T plus bias, where W has codes of four bits, with `mma.sync`; for every card from sm_80 on.
//
// ROWS, GROUP_STEPS, and the layouts of codes and records: see coded_tile.cuh. x: [rows][bytes] INT8, where
// bytes are a multiple of 16; row_scales: [groups][rows]. y: [rows][stride] BF16, of which the first
// `columns` values are the result; see linear.cu. bias: [columns] or null.
#include "ptx.cuh"
#include "coded_tile.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    coded_linear(const u8* x, const u8* codes, const u32* records, const float* row_scales, const Bf16* bias, Bf16* y, int rows,
                 int columns, int bytes, int groups, int stride) {
    DYNAMIC_SHARED(shared);
    int first_row = int(blockIdx.x) * ROWS, first_column = int(blockIdx.y) * TILE_COLUMNS;
    Codes w{codes, records, first_column / PANEL, (columns + PANEL - 1) / PANEL, (bytes + STAGE - 1) / STAGE, groups};
    TileSums sums = {};
    add_coded_products(sums, Rows{x, first_row, rows}, RowScales{row_scales, rows}, w, bytes, shared);
    write_tile(
        sums, [&](int row) { return first_row + row < rows ? first_row + row : -1; }, [](int) { return 1.0f; }, first_column, nullptr, bias,
        y, columns, stride);
}
