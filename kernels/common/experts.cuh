// How rows that are sorted by expert become tiles of a grouped product: sort_rows.cu makes the list
// that grouped_linear.cu and grouped_coded_linear.cu read.
#pragma once
#include "types.cuh"

// Sorted rows of one expert, `first` to before `end`, at most as many as a tile has.
struct RowTile {
    u32 expert, first, end;
};

#define NONE 0xffffffffu

// The row of x for row `row` of a tile: one of `picked`, or, if that is null, the sorted row itself.
// NONE: the tile has no such row.
__device__ inline u32 row_of_x(const RowTile& tile, u32 row, const u32* picked) {
    u32 sorted = tile.first + row;
    return sorted >= tile.end ? NONE : picked ? picked[sorted] : sorted;
}

// Rows of x in the order of sorted rows.
struct PickedRows {
    const u8* from;
    // For each row of the tile, the row of x, or NONE.
    const u32* rows;
    __device__ bool exists(int row) const { return rows[row] != NONE; }
    __device__ u64 at(int row) const { return rows[row]; }
};
