//! What adapters add to linear operations: the rows of each adapter's sequences are multiplied by its two matrices.
//!
//! The first product is computed for the rows of all adapters at once. The second one is added by the linear operation's own kernel
//! ([`Added`]), so that its result is still in the cache, and rows of the model alone go as fast as ever.
//!
//! Adapters compute in F32 where the model does, else in BF16, whatever format the model's own weights have.

use super::gemm::bf16;
use super::gemm::linear::{PackedRows, Rows, Segment, grouped_linear};
use super::gemm::low_rank::{AdapterRows, Added, AddedRun, UpPanels};
use super::gemm::matrix::{Matrix, gated_order};
use super::gemm::tile::PANEL;
use super::{Buffer, Cpu, ExecContext, Step};
use crate::device::batch::StepBatch;
use crate::device::{Dtype, Precision, Tensor, TensorError};

/// What an adapter adds to a linear operation: `y += up (down x)` (Hu et al. 2021).
pub struct LowRank {
    /// `[rank][in features]`.
    down: Matrix,
    /// `[out features][rank]`.
    up: UpPanels,
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

/// Scratch memory.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// The rows of all adapters, one adapter after the other.
    picked: Vec<u32>,
    /// The same rows after the first matrix.
    low: Buffer,
}

impl Cpu {
    /// The matrices of an adapter. `in_pairs`: for a matrix of [`Matrix::pack_gated`] or [`Matrix::pack_gated_codes`].
    pub(super) fn pack_low_rank(
        &self,
        down: Tensor<'_>,
        up: Tensor<'_>,
        in_pairs: bool,
    ) -> Result<LowRank, TensorError> {
        let (down, dtype) = match self.precision {
            Precision::F32 => (Matrix::pack(&[down], Precision::F32)?, Dtype::F32),
            _ if bf16::is_available(self.isa) => (Matrix::pack_bf16_pairs(&[down])?, Dtype::Bf16),
            _ => (Matrix::pack(&[down], Precision::Bf16)?, Dtype::Bf16),
        };
        let half = up.rows / 2;
        let up = if in_pairs {
            UpPanels::pack(up, dtype, 2 * half.div_ceil(PANEL), |lane| gated_order(lane, half))?
        } else {
            UpPanels::pack(up, dtype, up.rows.div_ceil(PANEL), |lane| {
                (lane < up.rows).then_some(lane)
            })?
        };
        Ok(LowRank { down, up })
    }
}

/// What the adapters of the step's sequences add to a linear operation of `x`. `None`: nothing.
pub(super) fn added<'a>(
    (ctx, round_to_bf16): (ExecContext<'_>, bool),
    adapters: &'a [Option<LowRank>],
    (step, x): (&'a Step, &Buffer),
    scratch: &'a mut Scratch,
    packed: &mut PackedRows,
) -> Option<Added<'a>> {
    let Scratch { picked, low } = scratch;
    picked.clear();
    let (mut segments, mut runs) = (Vec::new(), Vec::new());
    for (adapter, rows) in &step.adapter_rows {
        let Some(Some(LowRank { down, up })) = adapters.get(*adapter as usize - 1) else {
            continue;
        };
        let first = picked.len();
        picked.extend(rows.rows());
        segments.push(Segment {
            rows: first..picked.len(),
            matrix: down,
            bias: None,
            added: None,
        });
        runs.push(AddedRun { rows, first, up });
    }
    let rank = segments.first()?.matrix.rows;
    let rows = Rows {
        x,
        picked: Some(picked),
    };
    grouped_linear(ctx, &segments, rank, round_to_bf16, rows, low, packed);
    Some(Added {
        runs,
        low,
        round_to_bf16,
    })
}
