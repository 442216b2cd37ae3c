//! Division of a matmul's rows into tiles.

use std::ops::Range;

/// Consecutive rows divided into tiles, each small enough for one kernel call.
pub(crate) struct RowTiles {
    first_row: usize,
    pub rows: usize,
    pub count: usize,
}

impl RowTiles {
    /// Tiles of at most `tile_rows_max` rows.
    pub(crate) fn new(rows: Range<usize>, tile_rows_max: usize) -> RowTiles {
        RowTiles {
            first_row: rows.start,
            rows: rows.len(),
            count: rows.len().div_ceil(tile_rows_max),
        }
    }

    /// First row of tile `i`. The sizes of tiles differ by at most one row.
    pub(crate) fn start(&self, i: usize) -> usize {
        self.first_row + i * self.rows / self.count
    }

    /// Maximum rows of a tile.
    pub(crate) fn rows_max(&self) -> usize {
        self.rows.div_ceil(self.count)
    }
}

/// Splits `data`, which has `width` elements per row, by the tiles of all segments, which follow
/// each other. Yields each tile's first row and its part of `data`.
pub(crate) fn split_by_tiles<'a, E>(
    segments: &[RowTiles],
    data: &'a mut [E],
    width: usize,
) -> impl Iterator<Item = (usize, &'a mut [E])> {
    let mut rest = data;
    let tiles = segments
        .iter()
        .flat_map(|tiles| (0..tiles.count).map(|i| (tiles.start(i), tiles.start(i + 1))));
    tiles.map(move |(first_row, end)| {
        let (part, tail) = std::mem::take(&mut rest).split_at_mut((end - first_row) * width);
        rest = tail;
        (first_row, part)
    })
}
