//! Linear layers whose weights are in four bits: see [`linear`](super::linear), which calls them.

#![expect(unsafe_code, reason = "kernels take addresses of parts of a buffer")]

use std::ops::Range;
use std::ptr::null;

use super::blocks::{PanelMemory, WorkBlock, for_blocks};
use super::int4::{self, Int4Gemm, OCTET};
use super::int4_panels::Int4Panels;
use super::int8::RowTile;
use super::linear::{Rows, Segment, gated_biases};
use super::matrix::Panels;
use super::row_tiles::RowTiles;
use super::tile::PANEL;
use crate::device::Activation;
use crate::device::cpu::quantize_groups::{GroupedRows, quantize};
use crate::device::cpu::{Buffer, ExecContext, SharedMut};

impl Int4Panels {
    fn memory(&self) -> PanelMemory {
        PanelMemory {
            start: self.data.as_ptr().cast(),
            lanes: self.depth() / OCTET,
        }
    }

    /// Kernel parameters that multiply `x` by the panels of `range` and write to `c`.
    fn gemm(
        &self,
        range: Range<usize>,
        bias: *const f32,
        x: &GroupedRows,
        (c, c_stride): (*mut f32, usize),
    ) -> Int4Gemm {
        let column = range.start * PANEL;
        Int4Gemm {
            groups: self.groups,
            octets: self.octets,
            a: x.data.as_ptr().cast(),
            row_scales: x.scales.as_ptr(),
            row_sums: x.sums.as_ptr(),
            b: self.data[column * self.depth() / 2..].as_ptr(),
            factors: self.factors[column * self.groups..].as_ptr(),
            zeros: match &self.zeros {
                Some(zeros) => zeros[column * self.groups..].as_ptr(),
                None => null(),
            },
            panels: range.len(),
            bias,
            c,
            c_stride,
        }
    }
}

/// Quantizes the rows, then calls `run` for each block of tiles and panels of a segment, as
/// [`for_int8_blocks`](super::linear) does.
fn for_int4_blocks(
    ctx: ExecContext<'_>,
    segments: &[Segment<'_>],
    width: usize,
    rows: Rows<'_>,
    quantized: &mut GroupedRows,
    run: impl Fn(usize, &Int4Panels, WorkBlock<'_>, &GroupedRows) + Sync,
) {
    let panels_of = |segment: usize| match &segments[segment].matrix.panels {
        Panels::Int4(panels) => panels,
        _ => unreachable!("the matrices of one product are for one kernel"),
    };
    let tiles: Vec<_> = segments
        .iter()
        .map(|segment| RowTiles::new(segment.rows.clone(), int4::max_rows(ctx.isa)))
        .collect();
    let (groups, depth) = (panels_of(0).groups, panels_of(0).depth());
    assert!(rows.x.quantized().is_none());
    quantize(ctx, rows, &tiles, rows.x.width / groups.max(1), quantized);
    let (x, count) = (&*quantized, rows.count());
    assert!(x.data.len() >= count * depth && x.scales.len() >= count * groups && x.sums.len() >= count * groups);
    let columns = width.next_multiple_of(PANEL);
    for_blocks(
        ctx.threads,
        &tiles,
        |rows| int4::panels_at_once(ctx.isa, rows).max(2),
        (depth, width),
        |segment, block| {
            let panels = panels_of(segment);
            assert!((panels.groups, panels.depth()) == (groups, depth) && panels.data.len() >= columns * depth / 2);
            let factors = columns * groups;
            assert!(panels.factors.len() >= factors && panels.zeros.as_ref().is_none_or(|z| z.len() >= factors));
            run(segment, panels, block, x);
        },
    );
}

/// Multiplies the rows of each segment by a matrix in four bits.
pub(super) fn multiply(
    ctx: ExecContext<'_>,
    segments: &[Segment<'_>],
    rows: Rows<'_>,
    out: &mut Buffer,
    quantized: &mut GroupedRows,
) {
    let width = out.width;
    let columns = width.next_multiple_of(PANEL);
    let target = SharedMut::new(&mut out.data);
    for_int4_blocks(ctx, segments, width, rows, quantized, |segment, panels, block, x| {
        assert!(panels.zero_bias.len() >= columns);
        let run = |range, bias, c, tile: RowTile| {
            // SAFETY: the block guarantees output and bias; sizes were asserted.
            unsafe { int4::matmul(ctx.isa, &panels.gemm(range, bias, x, c), tile) };
        };
        let Segment { bias, added, .. } = segments[segment];
        // SAFETY: blocks own disjoint (rows, columns) of the output.
        unsafe { block.run_with_epilogue(ctx.isa, (bias, &panels.zero_bias, added), panels.memory(), &target, run) };
    });
}

/// Multiplies the rows of each segment by a matrix of gate and up panels and writes `activation(gate) * up` to `out`.
pub(super) fn gated(
    ctx: ExecContext<'_>,
    segments: &[Segment<'_>],
    (width, activation): (usize, Activation),
    rows: Rows<'_>,
    out: &mut Buffer,
    quantized: &mut GroupedRows,
) {
    let panel_columns = width.next_multiple_of(PANEL) * 2;
    let biases = gated_biases(segments, width, panel_columns);
    let target = SharedMut::new(&mut out.data);
    for_int4_blocks(
        ctx,
        segments,
        panel_columns,
        rows,
        quantized,
        |segment, panels, block, x| {
            let run = |range, bias, c, tile: RowTile| {
                // SAFETY: the block guarantees its memory; sizes were asserted.
                unsafe { int4::matmul(ctx.isa, &panels.gemm(range, bias, x, c), tile) };
            };
            let (bias, added): (&[f32], _) = (&biases[segment], segments[segment].added);
            // SAFETY: blocks own disjoint (rows, columns) of the output; sizes were asserted.
            unsafe {
                block.run_gated(
                    ctx.isa,
                    activation,
                    (bias, added, panels.memory()),
                    (&target, width),
                    run,
                )
            };
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::CodedMatrix;
    use crate::device::cpu::Isa;
    use crate::device::cpu::gemm::linear::{Epilogue, PackedRows, gated_panels, grouped_linear, linear};
    use crate::device::cpu::gemm::matrix::Matrix;
    use crate::device::cpu::math::silu;
    use crate::device::cpu::testing::{buffer, ctx_with_threads, numbers};

    fn coded(seed: u64, rows: usize, columns: usize, group: usize, has_zeros: bool) -> CodedMatrix {
        let below = |seed: u64, n: usize| numbers(seed, n).into_iter().map(|x| ((x + 1.0) * 7.99) as u8).collect();
        let count = rows * columns / group;
        CodedMatrix {
            rows,
            columns,
            group,
            codes: below(seed, rows * columns),
            factors: numbers(seed + 1, count).into_iter().map(|x| x / 8.0).collect(),
            zeros: has_zeros.then(|| below(seed + 2, count)),
        }
    }

    /// A row of a matrix: `(code - zero) * factor`, in doubles.
    fn weights(matrix: &CodedMatrix, row: usize) -> Vec<f64> {
        let weight = |k: usize| {
            let group = row * matrix.groups() + k / matrix.group;
            let zero = matrix.zeros.as_ref().map_or(8, |zeros| zeros[group]);
            let code = matrix.codes[row * matrix.columns + k];
            f64::from(i32::from(code) - i32::from(zero)) * f64::from(matrix.factors[group])
        };
        (0..matrix.columns).map(weight).collect()
    }

    /// The values of a row, each group rounded to multiples of 1/127 of its largest.
    fn rounded(row: &[f32], group: usize) -> Vec<f64> {
        let groups = row.chunks(group);
        let round = |group: &[f32]| {
            let max = group.iter().fold(0.0f32, |max, x| max.max(x.abs()));
            let step = f64::from(max / 127.0);
            let inverse = 127.0 / max;
            group
                .iter()
                .map(|x| f64::from((x * inverse).round_ties_even()) * step)
                .collect::<Vec<_>>()
        };
        groups.flat_map(round).collect()
    }

    fn dot(a: &[f64], b: &[f64]) -> f64 {
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    }

    /// Every set, thread count and batch gives the same bits, near sums in doubles over the same rounded activations.
    #[test]
    fn sums_match_f64_and_are_bit_identical_on_all_sets() {
        for (m, n, k, group, has_zeros) in [
            (1, 1, 1, 1, false),
            (2, 16, 17, 17, true),
            (5, 33, 96, 32, true),
            (13, 129, 40, 8, false),
            (25, 300, 256, 128, true),
            (64, 33, 512, 64, false),
        ] {
            // Two parts, of which one has zero points.
            let parts = [coded(1, n, k, group, has_zeros), coded(7, 3, k, group, false)];
            let matrix = Matrix::pack_codes(&parts).unwrap();
            let (values, bias) = (numbers(2, m * k), numbers(3, n + 3));
            let x = buffer(&values, m, k);
            let mut first: Option<Vec<f32>> = None;
            for isa in Isa::available() {
                for (threads, width, rows) in [(1, n + 3, m), (2, n + 3, m), (2, n.div_ceil(2), m), (2, n + 3, 1)] {
                    let epilogue = Epilogue {
                        bias: Some(&bias),
                        added: None,
                        round_to_bf16: false,
                    };
                    let x = buffer(&values[..rows * k], rows, k);
                    let mut out = Buffer::default();
                    let ctx = ctx_with_threads(isa, threads);
                    linear(ctx, &matrix, width, epilogue, &x, &mut out, &mut PackedRows::default());
                    let all = first.get_or_insert_with(|| out.data.to_vec());
                    for i in 0..rows {
                        assert_eq!(out.row(i), &all[i * (n + 3)..][..width], "{isa:?} {m}x{n}x{k} row {i}");
                    }
                }
            }
            for (i, got) in first.unwrap().into_iter().enumerate() {
                let (row, column) = (i / (n + 3), i % (n + 3));
                let (part, at) = if column < n { (0, column) } else { (1, column - n) };
                let want = dot(&rounded(x.row(row), group), &weights(&parts[part], at)) + f64::from(bias[column]);
                assert!(
                    (f64::from(got) - want).abs() <= 2e-5,
                    "{m}x{n}x{k} at {i}: {got} not {want}"
                );
            }
            let mut row = vec![0.0; k];
            for at in [0, n - 1] {
                matrix.read_row(at, &mut row);
                let want: Vec<f32> = weights(&parts[0], at).into_iter().map(|x| x as f32).collect();
                assert_eq!(row, want, "{m}x{n}x{k}");
            }
        }
    }

    fn segments<'a>(runs: &[Range<usize>], matrices: &'a [Matrix], bias: &'a [f32]) -> Vec<Segment<'a>> {
        let segment = |(rows, matrix): (&Range<usize>, &'a Matrix)| Segment {
            rows: rows.clone(),
            matrix,
            bias: Some(bias),
            added: None,
        };
        runs.iter().zip(matrices).map(segment).collect()
    }

    /// The rows of each segment are multiplied by its own matrix; gate and up panels lie in turn.
    #[test]
    fn segments_and_gates_have_their_own_matrices() {
        let (n, k, group) = (20, 64, 32);
        let pair = |i: u64| {
            [
                coded(10 * i, n, k, group, i != 1),
                coded(10 * i + 5, n, k, group, false),
            ]
        };
        let parts = [0, 1, 2].map(pair);
        let stacked = [0, 1, 2].map(|i| Matrix::pack_codes(&parts[i]).unwrap());
        let in_turn = [0, 1, 2].map(|i| Matrix::pack_gated_codes(&parts[i]).unwrap());
        let (values, bias) = (numbers(2, 9 * k), numbers(3, 2 * n));
        let picked: Vec<u32> = vec![3, 8, 0, 3, 5, 1, 7, 2];
        let (x, runs) = (buffer(&values, 9, k), [0..1, 1..6, 6..8]);
        let rows = Rows {
            x: &x,
            picked: Some(&picked),
        };
        let mut first: Option<(Vec<f32>, Vec<f32>)> = None;
        for isa in Isa::available() {
            let ctx = ctx_with_threads(isa, 2);
            let (mut plain, mut gated, mut packed) = (Buffer::default(), Buffer::default(), PackedRows::default());
            let both = segments(&runs, &stacked, &bias);
            grouped_linear(ctx, &both, 2 * n, false, rows, &mut plain, &mut packed);
            let gates = segments(&runs, &in_turn, &bias);
            gated_panels(ctx, &gates, (n, Activation::Silu), rows, &mut gated, &mut packed);
            for (i, row) in picked.iter().enumerate() {
                let segment = runs.iter().position(|run| run.contains(&i)).unwrap();
                let x = rounded(x.row(*row as usize), group);
                for j in 0..n {
                    let sum = |part: usize| dot(&x, &weights(&parts[segment][part], j)) + f64::from(bias[part * n + j]);
                    let (gate, up) = (plain.row(i)[j], plain.row(i)[n + j]);
                    assert!((f64::from(gate) - sum(0)).abs() < 2e-5, "{isa:?} {i} {j}");
                    assert!((f64::from(up) - sum(1)).abs() < 2e-5, "{isa:?} {i} {j}");
                    assert_eq!(gated.row(i)[j], silu(gate) * up, "{isa:?} {i} {j}");
                }
            }
            let found = (plain.data.to_vec(), gated.data.to_vec());
            assert!(*first.get_or_insert_with(|| found.clone()) == found, "{isa:?}");
        }
    }

    #[test]
    fn a_factor_that_is_not_finite_is_reported() {
        let mut parts = [coded(1, 3, 16, 8, false), coded(2, 20, 16, 8, false)];
        parts[1].factors[2 * 17 + 1] = f32::INFINITY;
        let error = Matrix::pack_codes(&parts).err();
        assert_eq!(error, Some(crate::device::TensorError::NotFinite { part: 1, row: 17 }));
    }
}
