// Products of each head's numbers with a matrix of its own, in BF16, with `mma.sync`: y = x W^T; for every
// card from sm_80 on. Latent attention (docs/decisions/104) multiplies queries by their head's
// projection of keys, and sums of latents by that of values.
//
// x: rows `x_row` bytes apart, heads of a row `x_head` bytes apart, all multiples of 16. W: [heads][columns][K], `bytes` of a
// row, a multiple of 16. y: rows `y_row` numbers apart, heads of a row `y_head` numbers apart; columns and both are even.
//
// FORMAT 2, WIDE 0: see linear.cuh. A thread block computes a tile of linear_tile.cuh, of one head:
// blockIdx.y counts the tiles of the first head's columns, then those of the next one's.
#define FORMAT 2
#define WIDE 0
#include "ptx.cuh"
#include "linear_tile.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    head_linear(const u8* x, const u8* w, Bf16* y, int rows, int columns, int bytes, int x_row, int x_head, int y_row, int y_head) {
    DYNAMIC_SHARED(shared);
    int tiles = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS, head = int(blockIdx.y) / tiles;
    int first_row = int(blockIdx.x) * TILE_ROWS, first_column = int(blockIdx.y) % tiles * TILE_COLUMNS;
    TileSums sums = {};
    StridedRows read = {x + u64(head) * x_head, first_row, rows, x_row};
    add_products<STEPS>(sums, read, Rows{w + u64(head) * columns * bytes, first_column, columns}, bytes, shared);
    write_tile(
        sums, [&](int row) { return first_row + row < rows ? first_row + row : -1; }, [](int) { return 1.0f; }, first_column, nullptr,
        nullptr, y + u64(head) * y_head, columns, y_row);
}
