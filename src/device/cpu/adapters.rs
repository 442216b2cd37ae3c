//! What adapters add to linear operations: the rows of each adapter's sequences are multiplied by its two matrices.
//!
//! The first product is computed for the rows of all adapters at once. The second one is added by the linear operation's own kernel
//! ([`Added`]), so that its result is still in the cache, and rows of the model alone go as fast as ever.
//!
//! Matrices are stored in F32 where the model computes in F32, else in BF16, whatever format the model's own weights have. Both products
//! are computed in F32.

use super::gemm::low_rank::{AdapterRows, Added, AddedRun, LowRankPanels, LowRun, multiply_down};
use super::gemm::matrix::gated_order;
use super::gemm::tile::PANEL;
use super::{Buffer, Cpu, ExecContext, Step};
use crate::device::batch::StepBatch;
use crate::device::{Dtype, Precision, Tensor, TensorError};

/// What an adapter adds to a linear operation: `y += up (down x)` (Hu et al. 2021).
pub struct LowRank {
    /// `[rank][in features]`.
    down: LowRankPanels,
    /// `[out features][rank]`.
    up: LowRankPanels,
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
        let dtype = match self.precision {
            Precision::F32 => Dtype::F32,
            _ => Dtype::Bf16,
        };
        let down = LowRankPanels::pack_rows(down, dtype)?;
        let half = up.rows / 2;
        let up = if in_pairs {
            LowRankPanels::pack(up, dtype, 2 * half.div_ceil(PANEL), |lane| gated_order(lane, half))?
        } else {
            LowRankPanels::pack_rows(up, dtype)?
        };
        Ok(LowRank { down, up })
    }
}

/// What the adapters of the step's sequences add to a linear operation of `x`. `None`: nothing. `low` is scratch memory.
pub(super) fn added<'a>(
    (ctx, round_to_bf16): (ExecContext<'_>, bool),
    adapters: &'a [Option<LowRank>],
    (step, x): (&'a Step, &Buffer),
    low: &'a mut Buffer,
) -> Option<Added<'a>> {
    let (mut lows, mut runs, mut first) = (Vec::new(), Vec::new(), 0);
    for (adapter, rows) in &step.adapter_rows {
        let Some(Some(LowRank { down, up })) = adapters.get(*adapter as usize - 1) else {
            continue;
        };
        lows.push(LowRun {
            rows: rows.rows(),
            down,
        });
        runs.push(AddedRun { rows, first, up });
        first += rows.rows().len();
    }
    if runs.is_empty() {
        return None;
    }
    multiply_down(ctx, &lows, round_to_bf16, x, low);
    Some(Added {
        runs,
        low,
        round_to_bf16,
    })
}
