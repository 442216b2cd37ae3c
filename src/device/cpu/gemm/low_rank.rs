//! What adapters add to the result of a linear operation, for the rows of their sequences.

use std::ops::Range;

use super::low_rank_float::FloatAdded;
use super::low_rank_int8::Int8Added;
use super::tile::PANEL;
use crate::device::cpu::isa::Isa;
use crate::device::cpu::quantize::Quantized;
use crate::device::{Tensor, TensorError};

/// The rows of a step that belong to one adapter's sequences.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct AdapterRows {
    /// Ascending.
    rows: Vec<u32>,
    /// For each row of the step, and for their number: how many of these rows are before it.
    before: Vec<u32>,
}

impl AdapterRows {
    /// `rows`: ascending, below `count`, the number of the step's rows.
    pub(crate) fn new(rows: Vec<u32>, count: usize) -> AdapterRows {
        let mut before = Vec::with_capacity(count + 1);
        for (i, row) in rows.iter().enumerate() {
            before.resize(*row as usize + 1, i as u32);
        }
        before.resize(count + 1, rows.len() as u32);
        AdapterRows { rows, before }
    }

    pub(crate) fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// The places in [`rows`](Self::rows) of those that are in `range`.
    pub(super) fn places(&self, range: &Range<usize>) -> Range<usize> {
        self.before[range.start] as usize..self.before[range.end] as usize
    }
}

/// The rows of a step that an adapter changes, and its two matrices for the operation.
pub(crate) struct LowRankRun<'a, M> {
    pub rows: &'a AdapterRows,
    /// The place of the first of them among the rows of all runs, one run after the other: that of its first product.
    pub first: usize,
    pub matrices: &'a M,
}

/// Reads a panel of an adapter's matrix: `rows` becomes 16 rows, with zeros behind the columns of the matrix. `row_of(lane)` is the row of
/// the matrix in this lane, or `None` for zeros.
///
/// # Errors
/// If a number is not one of those that can be stored.
pub(super) fn read_panel(
    matrix: &Tensor<'_>,
    row_of: impl Fn(usize) -> Option<usize>,
    is_stored: impl Fn(&f32) -> bool,
    rows: &mut [f32],
) -> Result<(), TensorError> {
    rows.fill(0.0);
    let width = rows.len() / PANEL;
    for (lane, values) in rows.chunks_exact_mut(width.max(1)).enumerate() {
        let Some(row) = row_of(lane) else {
            continue;
        };
        let values = &mut values[..matrix.columns];
        matrix.read_row(row, values);
        if !values.iter().all(&is_stored) {
            return Err(TensorError::NotFinite { part: 0, row });
        }
    }
    Ok(())
}

/// What adapters add to the result of a linear operation.
pub(crate) enum Added<'a> {
    Float(FloatAdded<'a>),
    /// For models that compute in INT8.
    Int8(Int8Added<'a>),
}

impl Added<'_> {
    /// Adds to a part of the result.
    ///
    /// # Safety
    /// The memory of the part's rows and columns is valid, and no other code reads or writes it during the call.
    #[expect(unsafe_code, reason = "writes a part of a buffer that the caller has for itself")]
    pub(super) unsafe fn add(&self, isa: Isa, part: &Part) {
        // SAFETY: the caller upholds the same contract.
        unsafe {
            match self {
                Added::Float(added) => added.add(isa, part),
                Added::Int8(added) => added.add(isa, part),
            }
        }
    }

    /// The rows that the operation multiplies, if they are quantized for the adapters already.
    pub(super) fn quantized(&self) -> Option<&Quantized> {
        match self {
            Added::Float(_) => None,
            Added::Int8(added) => Some(added.x),
        }
    }
}

/// A part of a result: rows, panels and the columns of the last one.
pub(super) struct Part {
    pub rows: Range<usize>,
    pub panels: Range<usize>,
    /// Columns of the result from the first panel on; those behind them are left alone.
    pub columns: usize,
    /// Row 0 of the result, at the first panel's first column. Only the part's rows need valid memory.
    pub c: *mut f32,
    pub c_stride: usize,
}

impl Part {
    /// All columns of these panels.
    pub(super) fn whole(rows: Range<usize>, panels: Range<usize>, (c, c_stride): (*mut f32, usize)) -> Part {
        Part {
            columns: panels.len() * PANEL,
            rows,
            panels,
            c,
            c_stride,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_an_adapter_are_found_by_their_place() {
        let rows = AdapterRows::new(vec![1, 2, 5], 7);
        let found = [0..1, 0..2, 1..3, 2..5, 3..5, 5..7, 6..7].map(|range| rows.places(&range));
        assert_eq!(found, [0..0, 0..1, 0..2, 1..2, 2..2, 2..3, 3..3]);
        assert_eq!(AdapterRows::new(Vec::new(), 2).places(&(0..2)), 0..0);
    }
}
