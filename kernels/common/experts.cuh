// How rows that are sorted by expert become tiles of a grouped product: sort_rows.cu makes the list
// that grouped_linear.cu reads.
#pragma once
#include "types.cuh"

// Sorted rows of one expert, `first` to before `end`, at most as many as a tile has.
struct RowTile {
    u32 expert, first, end;
};
