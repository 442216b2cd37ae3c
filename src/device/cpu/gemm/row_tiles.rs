//! Division of a matmul's rows into tiles.

/// Rows divided into tiles, each small enough for one kernel call.
pub(crate) struct RowTiles {
    pub rows: usize,
    pub count: usize,
}

impl RowTiles {
    /// Tiles of at most `tile_rows_max` rows.
    pub(crate) fn new(rows: usize, tile_rows_max: usize) -> RowTiles {
        RowTiles {
            rows,
            count: rows.div_ceil(tile_rows_max),
        }
    }

    /// First row of tile `i`. The sizes of tiles differ by at most one row.
    pub(crate) fn start(&self, i: usize) -> usize {
        i * self.rows / self.count
    }

    /// Splits `data`, which has `width` elements per row, by tiles. Yields each tile's first row
    /// and its part of `data`.
    pub(crate) fn split<'a, E>(&self, data: &'a mut [E], width: usize) -> impl Iterator<Item = (usize, &'a mut [E])> {
        let mut rest = data;
        (0..self.count).map(move |i| {
            let (first_row, end) = (self.start(i), self.start(i + 1));
            let (part, tail) = std::mem::take(&mut rest).split_at_mut((end - first_row) * width);
            rest = tail;
            (first_row, part)
        })
    }
}
