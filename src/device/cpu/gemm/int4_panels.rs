//! Weights in four bits, in the layout that their kernel reads: `[panel][octet of in features][16][4]`, two codes in a byte, with
//! a factor and a zero point for each group of a panel's columns. Codes, factors and zero points are those of the checkpoint.

use rayon::prelude::*;

use super::int4::{K_MAX, OCTET, OCTET_BYTES};
use super::int8::QUAD;
use super::matrix::{Matrix, Panels, gated_order, locate};
use super::tile::PANEL;
use crate::device::codes::MIDDLE;
use crate::device::cpu::aligned::AlignedArray;
use crate::device::{CodedMatrix, TensorError};

/// Weights in four bits. Lanes past the last output feature have factors of zero.
pub(crate) struct Int4Panels {
    pub data: AlignedArray<u8>,
    /// Groups of a row, and octets of each.
    pub groups: usize,
    pub octets: usize,
    /// `[panel][groups][16]`.
    pub factors: AlignedArray<f32>,
    /// As `factors`. `None`: all are in the middle.
    pub zeros: Option<AlignedArray<u8>>,
    /// `[rows]`, rounded up to whole panels: the bias of layers that have none.
    pub zero_bias: Vec<f32>,
}

impl Matrix {
    /// Stacks `parts`, of equal width and with groups of equal size, by rows.
    pub(crate) fn pack_codes(parts: &[CodedMatrix]) -> Result<Matrix, TensorError> {
        let rows: usize = parts.iter().map(|part| part.rows).sum();
        let row_of = |lane: usize| (lane < rows).then_some(lane);
        Matrix::of_codes(parts, rows.div_ceil(PANEL), row_of)
    }

    /// As [`pack_codes`](Self::pack_codes), with gate and up panels in turn: see [`pack_gated`](Self::pack_gated).
    pub(crate) fn pack_gated_codes(parts: &[CodedMatrix]) -> Result<Matrix, TensorError> {
        let half = parts.iter().map(|part| part.rows).sum::<usize>() / 2;
        Matrix::of_codes(parts, 2 * half.div_ceil(PANEL), |lane| gated_order(lane, half))
    }

    fn of_codes(
        parts: &[CodedMatrix],
        count: usize,
        row_of: impl Fn(usize) -> Option<usize> + Sync,
    ) -> Result<Matrix, TensorError> {
        Ok(Matrix {
            rows: parts.iter().map(|part| part.rows).sum(),
            columns: parts.first().map_or(0, |part| part.columns),
            panels: Panels::Int4(Int4Panels::pack(parts, count, row_of)?),
        })
    }
}

/// A panel to be filled.
struct Panel<'a> {
    data: &'a mut [u8],
    factors: &'a mut [f32],
    zeros: Option<&'a mut [u8]>,
}

impl Panel<'_> {
    fn set_lane(&mut self, lane: usize, part: &CodedMatrix, row: usize) {
        for (k, code) in part.codes[row * part.columns..][..part.columns].iter().enumerate() {
            let byte = &mut self.data[k / OCTET * OCTET_BYTES + lane * QUAD + k % QUAD];
            *byte |= code << (k / QUAD % 2 * 4);
        }
        let groups = part.groups();
        let of_row = row * groups..(row + 1) * groups;
        for (group, factor) in part.factors[of_row.clone()].iter().enumerate() {
            self.factors[group * PANEL + lane] = *factor;
        }
        if let Some(all) = &mut self.zeros {
            for (group, index) in of_row.enumerate() {
                all[group * PANEL + lane] = part.zeros.as_ref().map_or(MIDDLE, |zeros| zeros[index]);
            }
        }
    }
}

impl Int4Panels {
    /// `row_of(panel * 16 + lane)` is the row of the stack that is stored in this lane, or `None` for zeros. `count` is the
    /// number of panels.
    fn pack(
        parts: &[CodedMatrix],
        count: usize,
        row_of: impl Fn(usize) -> Option<usize> + Sync,
    ) -> Result<Int4Panels, TensorError> {
        let (columns, group) = parts.first().map_or((0, 1), |part| (part.columns, part.group));
        assert!(parts.iter().all(|part| (part.columns, part.group) == (columns, group)));
        assert!(columns == 0 || CodedMatrix::has_groups_of(columns, group));
        assert!(columns <= K_MAX, "sums over {columns} products do not fit in 32 bits");
        let (groups, octets) = (columns / group, group.div_ceil(OCTET));
        let (bytes, factors) = (groups * octets * OCTET_BYTES, groups * PANEL);
        let has_zeros = parts.iter().any(|part| part.zeros.is_some());
        let mut panels = Int4Panels {
            data: AlignedArray::new(count * bytes),
            groups,
            octets,
            factors: AlignedArray::new(count * factors),
            zeros: has_zeros.then(|| AlignedArray::new(count * factors)),
            zero_bias: vec![0.0; count * PANEL],
        };
        if panels.data.is_empty() {
            return Ok(panels);
        }
        let mut zeros: Vec<Option<&mut [u8]>> = match &mut panels.zeros {
            Some(zeros) => zeros.chunks_mut(factors).map(Some).collect(),
            None => (0..count).map(|_| None).collect(),
        };
        let data = panels.data.par_chunks_mut(bytes);
        let all = data.zip(panels.factors.par_chunks_mut(factors)).zip(&mut zeros);
        all.enumerate().try_for_each(|(index, ((data, factors), zeros))| {
            let mut panel = Panel {
                data,
                factors,
                zeros: zeros.as_deref_mut(),
            };
            for lane in 0..PANEL {
                let Some(row) = row_of(index * PANEL + lane) else {
                    continue;
                };
                let (part, row) = locate(parts.iter().map(|part| part.rows), row);
                let of_row = row * groups..(row + 1) * groups;
                if !parts[part].factors[of_row].iter().all(|factor| factor.is_finite()) {
                    return Err(TensorError::NotFinite { part, row });
                }
                panel.set_lane(lane, &parts[part], row);
            }
            Ok(())
        })?;
        Ok(panels)
    }

    /// Values of k of a row, padded with zeros.
    pub(crate) fn depth(&self) -> usize {
        self.groups * self.octets * OCTET
    }

    pub(crate) fn read_row(&self, row: usize, out: &mut [f32]) {
        let (panel, lane) = (row / PANEL, row % PANEL);
        let data = &self.data[panel * self.depth() / OCTET * OCTET_BYTES..];
        let group = self.octets * OCTET;
        for (k, x) in out.iter_mut().enumerate() {
            let at = (panel * self.groups + k / group) * PANEL + lane;
            let zero = self.zeros.as_ref().map_or(MIDDLE, |zeros| zeros[at]);
            let code = data[k / OCTET * OCTET_BYTES + lane * QUAD + k % QUAD] >> (k / QUAD % 2 * 4) & 15;
            *x = (f32::from(code) - f32::from(zero)) * self.factors[at];
        }
    }
}
