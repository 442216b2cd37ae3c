//! What adapters add to linear operations: the rows of each adapter's sequences are multiplied by its two matrices.
//!
//! The first product is computed for the rows of all adapters at once. The second one is added by the linear operation's own kernel
//! ([`Added`]), so that its result is still in the cache, and rows of the model alone go as fast as ever.
//!
//! Models that compute in INT8 have adapters in INT8. Others store their matrices in F32 where they compute in F32, else in BF16, and
//! compute both products in F32.

use super::gemm::linear::Rows;
use super::gemm::low_rank::{AdapterRows, Added, LowRankRun};
use super::gemm::low_rank_float::{self, FloatAdded, FloatLowRank, LowRankPanels};
use super::gemm::low_rank_int8::{self, Int8Added, Int8LowRank, Int8Lows, Int8Ups};
use super::gemm::matrix::{Matrix, gated_order};
use super::gemm::tile::PANEL;
use super::quantize::{Quantized, int8_tiles, quantize};
use super::{Buffer, Cpu, ExecContext, Step};
use crate::device::batch::StepBatch;
use crate::device::{Dtype, Precision, Tensor, TensorError};

/// What an adapter adds to a linear operation: `y += up (down x)` (Hu et al. 2021).
pub struct LowRank(Matrices);

enum Matrices {
    Float(FloatLowRank),
    /// For models that compute in INT8.
    Int8(Int8LowRank),
}

/// Scratch memory: what the linear operation and the second product read.
#[derive(Default)]
pub(super) struct LowRows {
    /// Rows after the first matrix.
    float: Buffer,
    int8: Int8Lows,
    /// The rows before it, where they come in F32.
    x: Quantized,
}

/// The rows of each adapter that the batch's sequences have. Adapters are numbered as in
/// [`StepSequence`](crate::device::batch::StepSequence), from 1 on.
pub(super) fn rows_of(batch: &StepBatch) -> Vec<(u32, AdapterRows)> {
    let mut found: Vec<(u32, Vec<u32>)> = Vec::new();
    for s in batch.sequences.iter().filter(|s| s.adapter > 0) {
        let rows = s.first_token..s.first_token + s.q_len;
        match found.iter_mut().find(|(adapter, _)| *adapter == s.adapter) {
            Some((_, found)) => found.extend(rows),
            None => found.push((s.adapter, rows.collect())),
        }
    }
    let count = batch.tokens.len();
    let of_adapter = |(adapter, rows)| (adapter, AdapterRows::new(rows, count));
    found.into_iter().map(of_adapter).collect()
}

impl Cpu {
    /// The matrices of an adapter. `in_pairs`: for a matrix of `Matrix::pack_gated` or `Matrix::pack_gated_codes`.
    pub(super) fn pack_low_rank(
        &self,
        down: Tensor<'_>,
        up: Tensor<'_>,
        in_pairs: bool,
    ) -> Result<LowRank, TensorError> {
        let half = up.rows / 2;
        let in_order = |lane| (lane < up.rows).then_some(lane);
        let (panels, row_of): (usize, &dyn Fn(usize) -> Option<usize>) = if in_pairs {
            (2 * half.div_ceil(PANEL), &|lane| gated_order(lane, half))
        } else {
            (up.rows.div_ceil(PANEL), &in_order)
        };
        if self.precision == Precision::Int8 {
            return Ok(LowRank(Matrices::Int8(Int8LowRank {
                down: Matrix::pack(&[down], Precision::Int8)?,
                up: Int8Ups::pack(up, panels, row_of)?,
            })));
        }
        let dtype = match self.precision {
            Precision::F32 => Dtype::F32,
            _ => Dtype::Bf16,
        };
        Ok(LowRank(Matrices::Float(FloatLowRank {
            down: LowRankPanels::pack_rows(down, dtype)?,
            up: LowRankPanels::pack(up, dtype, panels, row_of)?,
        })))
    }
}

/// The runs of the step's rows that adapters with matrices of one kind change in a linear operation.
fn runs<'a, M>(
    step: &'a Step,
    adapters: &'a [Option<LowRank>],
    matrices: impl Fn(&'a Matrices) -> Option<&'a M>,
) -> Vec<LowRankRun<'a, M>> {
    let mut first = 0;
    let of_adapter = |(adapter, rows): &'a (u32, AdapterRows)| {
        let LowRank(changed) = adapters.get(*adapter as usize - 1)?.as_ref()?;
        let matrices = matrices(changed)?;
        let run = LowRankRun { rows, first, matrices };
        first += rows.rows().len();
        Some(run)
    };
    step.adapter_rows.iter().filter_map(of_adapter).collect()
}

/// What the adapters of the step's sequences add to a linear operation of `x`. `None`: nothing.
pub(super) fn added<'a>(
    (ctx, round_to_bf16): (ExecContext<'_>, bool),
    adapters: &'a [Option<LowRank>],
    (step, x): (&'a Step, &'a Buffer),
    low: &'a mut LowRows,
) -> Option<Added<'a>> {
    let float = runs(step, adapters, |matrices| match matrices {
        Matrices::Float(matrices) => Some(matrices),
        Matrices::Int8(_) => None,
    });
    if !float.is_empty() {
        low_rank_float::multiply_down(ctx, &float, round_to_bf16, x, &mut low.float);
        return Some(Added::Float(FloatAdded {
            runs: float,
            low: &low.float,
            round_to_bf16,
        }));
    }
    let int8 = runs(step, adapters, |matrices| match matrices {
        Matrices::Int8(matrices) => Some(matrices),
        Matrices::Float(_) => None,
    });
    if int8.is_empty() {
        return None;
    }
    let quantized = match x.quantized() {
        Some(quantized) => quantized,
        None => {
            quantize(
                ctx,
                Rows { x, picked: None },
                &[int8_tiles(ctx.isa, 0..x.rows)],
                &mut low.x,
            );
            &low.x
        }
    };
    low_rank_int8::multiply_down(ctx, &int8, (quantized, x.rows), &mut low.int8);
    Some(Added::Int8(Int8Added {
        runs: int8,
        low: &low.int8,
        x: quantized,
    }))
}
