//! What adapters add to linear operations: the rows of each adapter's sequences are multiplied by its two matrices.
//!
//! Adapters compute in F32 where the model does, else in BF16, whatever format the model's own weights have.

use super::gemm::bf16;
use super::gemm::linear::{Epilogue, PackedRows, Rows, Segment, grouped_linear, linear};
use super::gemm::matrix::{Matrix, gated_order};
use super::gemm::tile::PANEL;
use super::math::round_bf16;
use super::{Buffer, Cpu, ExecContext, Step};
use crate::device::batch::StepBatch;
use crate::device::{AdapterParts, Dtype, LowRank, Precision, Tensor, TensorError};

/// The rows of a step that belong to one adapter's sequences, ascending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AdapterRows {
    /// As in [`StepSequence`](crate::device::batch::StepSequence); at least 1.
    pub adapter: u32,
    pub rows: Vec<u32>,
}

impl AdapterRows {
    /// The rows of all adapters that the batch's sequences have.
    pub(super) fn of(batch: &StepBatch) -> Vec<AdapterRows> {
        let mut found: Vec<AdapterRows> = Vec::new();
        for s in batch.sequences.iter().filter(|s| s.adapter > 0) {
            let rows = s.first_token..s.first_token + s.q_len;
            match found.iter_mut().find(|run| run.adapter == s.adapter) {
                Some(run) => run.rows.extend(rows),
                None => found.push(AdapterRows {
                    adapter: s.adapter,
                    rows: rows.collect(),
                }),
            }
        }
        found
    }
}

/// Scratch memory: rows after the first matrix, and after the second.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    down: Buffer,
    up: Buffer,
}

impl Cpu {
    fn adapter_matrix(&self, tensor: Tensor<'_>) -> Result<Matrix, TensorError> {
        match self.precision {
            Precision::F32 => Matrix::pack(&[tensor], Precision::F32),
            _ if bf16::is_available(self.isa) => Matrix::pack_bf16_pairs(&[tensor]),
            _ => Matrix::pack(&[tensor], Precision::Bf16),
        }
    }

    /// The matrices of an adapter. `in_pairs`: for [`gated_sums`](super::gemm::linear::gated_sums), whose columns have the order
    /// of panels.
    pub(super) fn pack_low_rank(
        &self,
        down: Tensor<'_>,
        up: Tensor<'_>,
        in_pairs: bool,
    ) -> Result<LowRank<Matrix>, TensorError> {
        let down = self.adapter_matrix(down)?;
        if !in_pairs {
            let up = self.adapter_matrix(up)?;
            return Ok(LowRank { down, up });
        }
        let width = up.rows / 2;
        let lanes = 2 * width.next_multiple_of(PANEL);
        let mut data = vec![0u8; lanes * up.columns * Dtype::F32.bytes()];
        let mut values = vec![0.0; up.columns];
        for (lane, bytes) in data.chunks_exact_mut(up.columns * Dtype::F32.bytes()).enumerate() {
            let Some(row) = gated_order(lane, width) else { continue };
            up.read_row(row, &mut values);
            for (bytes, x) in bytes.as_chunks_mut().0.iter_mut().zip(&values) {
                *bytes = x.to_le_bytes();
            }
        }
        let up = self.adapter_matrix(Tensor {
            dtype: Dtype::F32,
            rows: lanes,
            columns: up.columns,
            data: &data,
        })?;
        Ok(LowRank { down, up })
    }
}

/// Adds what the adapters of the step's sequences add to `out`, the result of a linear operation of `x`.
pub(super) fn add(
    (ctx, round_to_bf16): (ExecContext<'_>, bool),
    adapters: &AdapterParts<Matrix>,
    (step, x): (&Step, &Buffer),
    out: &mut Buffer,
    (scratch, packed): (&mut Scratch, &mut PackedRows),
) {
    for run in &step.adapter_rows {
        let Some(Some(LowRank { down, up })) = adapters.get(run.adapter as usize - 1) else {
            continue;
        };
        let rows = Rows {
            x,
            picked: Some(&run.rows),
        };
        let all = Segment {
            rows: 0..run.rows.len(),
            matrix: down,
            bias: None,
        };
        grouped_linear(ctx, &[all], down.rows, round_to_bf16, rows, &mut scratch.down, packed);
        let epilogue = Epilogue {
            bias: None,
            round_to_bf16: false,
        };
        linear(ctx, up, up.rows, epilogue, &scratch.down, &mut scratch.up, packed);
        add_rows((ctx, round_to_bf16), &run.rows, &scratch.up, out);
    }
}

/// Adds the rows of `x` to the rows of `out` that `to` names, in order.
fn add_rows((ctx, round_to_bf16): (ExecContext<'_>, bool), to: &[u32], x: &Buffer, out: &mut Buffer) {
    assert_eq!(x.width, out.width);
    let mut next = to.iter().zip(x.rows()).peekable();
    let picked = out.data.chunks_exact_mut(x.width).enumerate().filter_map(|(i, out)| {
        let (_, x) = next.next_if(|(row, _)| **row as usize == i)?;
        Some((out, x))
    });
    let mut picked: Vec<_> = picked.collect();
    ctx.threads
        .parallel_for_each(to.len() * x.width, &mut picked, |_, picked| {
            for (out, x) in picked {
                out.iter_mut().zip(*x).for_each(|(out, x)| *out += x);
                if round_to_bf16 {
                    out.iter_mut().for_each(|x| *x = round_bf16(*x));
                }
            }
        });
}
