//! Weights in the layout that the kernels read: panels of 16 output features, which are the columns
//! of the matmul: `[panel][in feature][16]`.
//!
//! Lanes past the last output feature are zero. The storage formats:
//! - F32, BF16 and F16 weights are stored unchanged and widened to F32 in registers, which is
//!   exact.
//! - BF16 weights are stored in pairs, `[panel][pair of in features][16][2]`, for dot products of
//!   pairs.
//! - INT8 weights are stored in quads, `[panel][quad of in features][16][4]`. Each output feature
//!   is quantized by its largest magnitude.
//! - Weights in four bits are described in `int4_panels.rs`.

use std::ops::Range;

use rayon::prelude::*;

use super::bf16;
use super::int4_panels::Int4Panels;
use super::int8::{Int8Gemm, K_MAX, K_STEP, OFFSET, QUAD};
use super::tile::{Bf16, Element, F16, PANEL};
use crate::device::cpu::aligned::AlignedArray;
use crate::device::cpu::math::round_bf16;
use crate::device::cpu::quantize::Quantized;
use crate::device::{Dtype, Precision, Tensor, TensorError};

/// `1.5 * 2^52`: adding and subtracting it rounds to the nearest integer, ties to even.
const ROUND: f64 = 6_755_399_441_055_744.0;

/// A matrix of `rows` output features by `columns` input features, in panels.
pub struct Matrix {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) panels: Panels,
}

pub(crate) enum Panels {
    F32(AlignedArray<f32>),
    Bf16(AlignedArray<Bf16>),
    F16(AlignedArray<F16>),
    Bf16Pairs(Bf16PairPanels),
    Int8(Int8Panels),
    Int4(Int4Panels),
}

/// BF16 weights in pairs of input features.
pub(crate) struct Bf16PairPanels {
    /// Padded with zeros to whole tiles and panels.
    pub data: AlignedArray<Bf16>,
    /// `[rows]`, rounded up to whole panels: the bias of layers that have none.
    pub zero_bias: Vec<f32>,
}

/// Quantized weights: a weight is about its byte times the scale of its row. The length of the
/// vectors is rounded up to whole panels.
pub(crate) struct Int8Panels {
    /// Padded with zeros to whole tiles and panels.
    pub data: AlignedArray<i8>,
    /// `[rows]`.
    pub scales: Vec<f32>,
    /// `[rows]`: the amount that the activations' [`OFFSET`] adds to each sum.
    pub offsets: Vec<i32>,
    /// `[rows]`: the bias of layers that have none.
    pub zero_bias: Vec<f32>,
}

/// A vector of F32, rounded to BF16 values if packed in BF16.
pub struct Vector(pub(crate) Vec<f32>);

impl Matrix {
    /// Stacks `parts` (of equal width) by rows. At F32 precision, the matrix keeps the format of
    /// the parts if it is the same for all.
    pub(crate) fn pack(parts: &[Tensor<'_>], precision: Precision) -> Result<Matrix, TensorError> {
        let columns = parts.first().map_or(0, |p| p.columns);
        assert!(
            parts
                .iter()
                .all(|p| p.columns == columns && p.data.len() == p.rows * p.columns * p.dtype.bytes())
        );
        let rows = parts.iter().map(|p| p.rows).sum();
        let first = parts.first().map_or(Dtype::F32, |p| p.dtype);
        if matches!(precision, Precision::Int8 | Precision::W4a8) {
            let row_of = |lane: usize| (lane < rows).then_some(lane);
            let panels = Panels::Int8(Int8Panels::pack(parts, rows.div_ceil(PANEL), columns, row_of)?);
            return Ok(Matrix { rows, columns, panels });
        }
        let storage = match precision {
            Precision::Bf16 => Dtype::Bf16,
            _ if parts.iter().all(|p| p.dtype == first) => first,
            _ => Dtype::F32,
        };
        let panels = match storage {
            Dtype::F32 => Panels::F32(pack_as(parts, (rows, columns), 1, columns)?),
            Dtype::Bf16 => Panels::Bf16(pack_as(parts, (rows, columns), 1, columns)?),
            Dtype::F16 => Panels::F16(pack_as(parts, (rows, columns), 1, columns)?),
        };
        Ok(Matrix { rows, columns, panels })
    }

    /// As [`pack`](Self::pack), in BF16 for dot products of pairs.
    pub(crate) fn pack_bf16_pairs(parts: &[Tensor<'_>]) -> Result<Matrix, TensorError> {
        let columns = parts.first().map_or(0, |p| p.columns);
        let rows: usize = parts.iter().map(|p| p.rows).sum();
        let depth = columns.next_multiple_of(bf16::K_STEP);
        let panels = Panels::Bf16Pairs(Bf16PairPanels {
            data: pack_as(parts, (rows, columns), bf16::PAIR, depth)?,
            zero_bias: vec![0.0; rows.next_multiple_of(PANEL)],
        });
        Ok(Matrix { rows, columns, panels })
    }

    /// Stacks the rows of a gate projection and as many rows of an up projection, in INT8. Gate and
    /// up panels alternate, so that one thread computes both factors of a gated activation. The
    /// matrix is for the gated operation only.
    pub(crate) fn pack_gated(parts: &[Tensor<'_>]) -> Result<Matrix, TensorError> {
        let columns = parts.first().map_or(0, |p| p.columns);
        let rows: usize = parts.iter().map(|p| p.rows).sum();
        let half = rows / 2;
        let row_of = |lane: usize| gated_order(lane, half);
        let panels = Panels::Int8(Int8Panels::pack(parts, 2 * half.div_ceil(PANEL), columns, row_of)?);
        Ok(Matrix { rows, columns, panels })
    }

    /// The bias of a layer that has none, for kernels that add one; empty for other kernels.
    pub(crate) fn zero_bias(&self) -> &[f32] {
        match &self.panels {
            Panels::Int8(panels) => &panels.zero_bias,
            Panels::Int4(panels) => &panels.zero_bias,
            Panels::Bf16Pairs(panels) => &panels.zero_bias,
            Panels::F32(_) | Panels::Bf16(_) | Panels::F16(_) => &[],
        }
    }

    /// Writes row `row` to `out`, widened.
    pub(crate) fn read_row(&self, row: usize, out: &mut [f32]) {
        let at = (row / PANEL) * self.columns * PANEL + row % PANEL;
        match &self.panels {
            Panels::F32(p) => gather(&p[at..], 1, out),
            Panels::Bf16(p) => gather(&p[at..], 1, out),
            Panels::F16(p) => gather(&p[at..], 1, out),
            Panels::Bf16Pairs(p) => {
                let depth = self.columns.next_multiple_of(bf16::K_STEP);
                let at = (row / PANEL) * depth * PANEL + row % PANEL * bf16::PAIR;
                gather(&p.data[at..], bf16::PAIR, out);
            }
            Panels::Int8(p) => p.read_row(row, out),
            Panels::Int4(p) => p.read_row(row, out),
        }
    }
}

impl Int8Panels {
    /// `row_of(panel * 16 + lane)` is the row of the stack that is stored in this lane, or `None`
    /// for zeros. `count` is the number of panels.
    fn pack(
        parts: &[Tensor<'_>],
        count: usize,
        columns: usize,
        row_of: impl Fn(usize) -> Option<usize> + Sync,
    ) -> Result<Int8Panels, TensorError> {
        assert!(columns <= K_MAX, "sums over {columns} products do not fit in 32 bits");
        let (depth, padded) = (columns.next_multiple_of(K_STEP), count * PANEL);
        let mut panels = Int8Panels {
            data: AlignedArray::new(padded * depth),
            scales: vec![0.0; padded],
            offsets: vec![0; padded],
            zero_bias: vec![0.0; padded],
        };
        if panels.data.is_empty() {
            return Ok(panels);
        }
        let data = panels.data.par_chunks_mut(PANEL * depth);
        let scales = panels.scales.par_chunks_mut(PANEL);
        let offsets = panels.offsets.par_chunks_mut(PANEL);
        data.zip(scales).zip(offsets).enumerate().try_for_each_init(
            || vec![0.0f32; columns],
            |values, (panel, ((data, scales), offsets))| {
                for lane in 0..PANEL {
                    let Some(row) = row_of(panel * PANEL + lane) else {
                        continue;
                    };
                    let (part, row) = locate(parts.iter().map(|part| part.rows), row);
                    parts[part].read_row(row, values);
                    if !values.iter().all(|x| x.is_finite()) {
                        return Err(TensorError::NotFinite { part, row });
                    }
                    (scales[lane], offsets[lane]) = pack_lane(values, lane, data);
                }
                Ok(())
            },
        )?;
        Ok(panels)
    }

    /// Kernel parameters that multiply `x` by the panels of `range` and write to `c`. `bias`: `[panels * 16]`.
    pub(super) fn gemm(
        &self,
        range: Range<usize>,
        bias: *const f32,
        x: &Quantized,
        (c, c_stride): (*mut f32, usize),
    ) -> Int8Gemm {
        let column = range.start * PANEL;
        Int8Gemm {
            quads: x.stride / QUAD,
            a: x.data.as_ptr(),
            b: self.data[column * x.stride..].as_ptr(),
            panel_stride: x.stride * PANEL,
            panels: range.len(),
            row_scales: x.scales.as_ptr(),
            column_scales: self.scales[column..].as_ptr(),
            offsets: self.offsets[column..].as_ptr(),
            bias,
            c,
            c_stride,
        }
    }

    fn read_row(&self, row: usize, out: &mut [f32]) {
        let at = (row / PANEL) * out.len().next_multiple_of(K_STEP) * PANEL + row % PANEL * QUAD;
        let scale = self.scales[row];
        for (x, quad) in out.chunks_mut(QUAD).zip(self.data[at..].chunks(PANEL * QUAD)) {
            for (x, q) in x.iter_mut().zip(quad) {
                *x = f32::from(*q) * scale;
            }
        }
    }
}

/// Quantizes weights of one output feature by their largest magnitude, and writes them to a lane of `data`, `[quad][16][4]`. Returns their
/// scale, and the amount that the activations' [`OFFSET`] adds to their sum.
pub(super) fn pack_lane(values: &[f32], lane: usize, data: &mut [i8]) -> (f32, i32) {
    let max_abs = values.iter().fold(0.0f32, |max_abs, x| max_abs.max(x.abs()));
    let inverse = if max_abs > 0.0 { 127.0 / f64::from(max_abs) } else { 0.0 };
    let mut sum = 0;
    for (k, x) in values.iter().enumerate() {
        // Rounds to the nearest integer, ties to even: adding ROUND leaves no bits for a fraction.
        let q = ((f64::from(*x) * inverse + ROUND) - ROUND) as i8;
        data[(k / QUAD * PANEL + lane) * QUAD + k % QUAD] = q;
        sum += i32::from(q);
    }
    (max_abs / 127.0, sum * OFFSET)
}

impl Vector {
    pub(crate) fn pack(parts: &[Tensor<'_>], precision: Precision) -> Result<Vector, TensorError> {
        let mut values = Vec::new();
        for (part, tensor) in parts.iter().enumerate() {
            for row in 0..tensor.rows {
                let from = values.len();
                values.resize(from + tensor.columns, 0.0);
                tensor.read_row(row, &mut values[from..]);
                if precision == Precision::Bf16 {
                    values[from..].iter_mut().for_each(|x| *x = round_bf16(*x));
                }
                if !values[from..].iter().all(|x| x.is_finite()) {
                    return Err(TensorError::NotFinite { part, row });
                }
            }
        }
        Ok(Vector(values))
    }
}

/// Copies a row from a panel that begins at the row's first value. `interleave` consecutive values
/// of a row are adjacent.
fn gather<E: Element>(panel: &[E], interleave: usize, out: &mut [f32]) {
    for (x, w) in out.chunks_mut(interleave).zip(panel.chunks(interleave * PANEL)) {
        for (x, w) in x.iter_mut().zip(w) {
            *x = w.widen();
        }
    }
}

/// Packs `parts` into panels of `depth` values of k. `interleave` consecutive values of a row are
/// adjacent.
fn pack_as<E: Element>(
    parts: &[Tensor<'_>],
    (rows, columns): (usize, usize),
    interleave: usize,
    depth: usize,
) -> Result<AlignedArray<E>, TensorError> {
    let mut packed = AlignedArray::new(rows.div_ceil(PANEL) * depth * PANEL);
    if packed.is_empty() {
        return Ok(packed);
    }
    packed.par_chunks_mut(depth * PANEL).enumerate().try_for_each_init(
        || vec![0.0f32; columns],
        |row_values, (panel, out)| {
            for lane in 0..PANEL.min(rows - panel * PANEL) {
                let (part, row) = locate(parts.iter().map(|part| part.rows), panel * PANEL + lane);
                parts[part].read_row(row, row_values);
                let mut is_finite = true;
                for (k, &x) in row_values.iter().enumerate() {
                    let stored = E::narrow(x);
                    is_finite &= stored.widen().is_finite();
                    out[(k / interleave * PANEL + lane) * interleave + k % interleave] = stored;
                }
                if !is_finite {
                    return Err(TensorError::NotFinite { part, row });
                }
            }
            Ok(())
        },
    )?;
    Ok(packed)
}

/// The row that lane `lane` holds of a gate projection with `half` rows and an up projection below it, where their panels are in
/// turn. `None`: it holds zeros.
pub(crate) fn gated_order(lane: usize, half: usize) -> Option<usize> {
    let pair_of_panels = lane / (2 * PANEL);
    let row = pair_of_panels * PANEL + lane % PANEL;
    let is_up = lane / PANEL % 2 == 1;
    (row < half).then_some(if is_up { half + row } else { row })
}

/// The index of the part that holds row `row` of the stack, and the row's index within this part. `parts`: the rows of each.
pub(super) fn locate(parts: impl Iterator<Item = usize>, mut row: usize) -> (usize, usize) {
    for (i, rows) in parts.enumerate() {
        if row < rows {
            return (i, row);
        }
        row -= rows;
    }
    unreachable!("row lies within the stack")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::{bytes_of, numbers};

    #[test]
    fn rows_of_a_stack_are_read_back() {
        let (a, b) = (numbers(1, 17 * 5), numbers(2, 3 * 5));
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            let (da, db) = (bytes_of(&a, dtype), bytes_of(&b, dtype));
            let parts = [
                Tensor {
                    dtype,
                    rows: 17,
                    columns: 5,
                    data: &da,
                },
                Tensor {
                    dtype,
                    rows: 3,
                    columns: 5,
                    data: &db,
                },
            ];
            let matrix = Matrix::pack(&parts, Precision::F32).unwrap();
            let pairs = Matrix::pack_bf16_pairs(&parts).unwrap();
            let mut got = [0.0; 5];
            let mut want = [0.0; 5];
            for row in 0..20 {
                matrix.read_row(row, &mut got);
                let (part, r) = locate(parts.iter().map(|part| part.rows), row);
                parts[part].read_row(r, &mut want);
                assert_eq!(got, want, "{dtype:?} row {row}");
                pairs.read_row(row, &mut got);
                assert_eq!(got, want.map(round_bf16), "{dtype:?} row {row} in pairs");
            }
        }
    }

    #[test]
    fn values_that_are_not_finite_are_reported() {
        let mut a = numbers(1, 4 * 3);
        a[7] = f32::NAN;
        let data = bytes_of(&a, Dtype::F32);
        let good = bytes_of(&numbers(2, 6), Dtype::F32);
        let parts = [
            Tensor {
                dtype: Dtype::F32,
                rows: 2,
                columns: 3,
                data: &good,
            },
            Tensor {
                dtype: Dtype::F32,
                rows: 4,
                columns: 3,
                data: &data,
            },
        ];
        assert_eq!(
            Matrix::pack(&parts, Precision::F32).err(),
            Some(TensorError::NotFinite { part: 1, row: 2 })
        );
        a[7] = f32::MAX; // finite in F32, infinite in BF16
        let data = bytes_of(&a, Dtype::F32);
        let parts = [Tensor {
            dtype: Dtype::F32,
            rows: 4,
            columns: 3,
            data: &data,
        }];
        assert!(Matrix::pack(&parts, Precision::F32).is_ok());
        assert_eq!(
            Matrix::pack(&parts, Precision::Bf16).err(),
            Some(TensorError::NotFinite { part: 0, row: 2 })
        );
        assert_eq!(
            Vector::pack(&parts, Precision::Bf16).err(),
            Some(TensorError::NotFinite { part: 0, row: 2 })
        );
    }
}
