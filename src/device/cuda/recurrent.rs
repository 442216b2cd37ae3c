//! Recurrent layers: pools of states, and the kernels that read and write them.
//!
//! See docs/decisions/116-a-gpu-walks-recurrent-layers-token-by-token.md.

use super::driver::{Argument, Memory};
use super::memory::Buffer;
use super::plan::{self, KernelFormat};
use super::{Cuda, Matrix, Step, Vector, recurrent_plan};
use crate::device::batch::{BlockCopy, StepBatch};
use crate::device::{DeviceError, RecurrentKind, RecurrentShape, RecurrentWeights};

/// States of one recurrent layer, one per slot.
pub struct StatePool {
    shape: RecurrentShape,
    /// `[slots][state_len]` in F32. `kernels/recurrent.cu` describes a slot; it keeps each input of a
    /// convolution once, so in Mamba-2 it does not use all of it.
    states: Memory,
}

impl Cuda {
    /// Implements [`state_pool`](crate::device::Device::state_pool).
    pub(super) fn allocate_states(&self, shape: RecurrentShape, slots: usize) -> Result<StatePool, DeviceError> {
        recurrent_plan::check_recurrent(shape)?;
        let bytes = slots * shape.state_bytes();
        Ok(StatePool {
            shape,
            states: self.context.allocate(bytes, "a layer's recurrent states")?,
        })
    }

    /// Implements [`copy_states`](crate::device::Device::copy_states): the stream runs the copies in order.
    pub(super) fn copy_slots(&self, copies: &[BlockCopy], pool: &StatePool) -> Result<(), DeviceError> {
        let bytes = pool.shape.state_bytes();
        copies.iter().try_for_each(|copy| {
            let [from, to] = [copy.from, copy.to].map(|slot| slot as usize * bytes);
            self.context.copy_within(&pool.states, from, to, bytes)
        })
    }

    /// Implements [`recurrent`](crate::device::Device::recurrent).
    pub(super) fn run_recurrent(
        &self,
        weights: &RecurrentWeights<Matrix, Vector>,
        input: &Buffer,
        step: &Step,
        pool: &StatePool,
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let shape = weights.shape;
        assert_eq!((shape, shape.input_width()), (pool.shape, input.width));
        out.reshape(&self.context, input.rows, shape.value_width(), KernelFormat::Bf16)?;
        let address = |vector: &Vector| Argument::Address(vector.0.address());
        let optional = |vector: &Option<Vector>| vector.as_ref().map_or(Argument::Address(0), address);
        let sequences = Argument::Address(step.state_sequences());
        let states = Argument::Address(pool.states.address());
        let stride = Argument::Int(shape.state_len() as i32);
        self.launch(
            &recurrent_plan::recurrent(&shape, step.states),
            &[
                input.data(),
                sequences,
                address(&weights.conv),
                optional(&weights.conv_bias),
                address(&weights.decay),
                address(&weights.decay_bias),
                optional(&weights.skip),
                address(&weights.norm),
                Argument::Float(weights.norm_eps),
                states,
                stride,
                out.data(),
            ],
        )?;
        self.launch(
            &recurrent_plan::keep_inputs(&shape, step.states),
            &[
                input.data(),
                sequences,
                states,
                Argument::Int(input.width as i32),
                Argument::Int(shape.row().conv() as i32),
                Argument::Int(shape.conv_channels() as i32),
                stride,
            ],
        )?;
        match shape.kind {
            RecurrentKind::DeltaNet => Ok(()),
            RecurrentKind::Mamba2 => self.normalise_groups(weights, out),
        }
    }

    /// Normalises the outputs of the heads that share a key together, in place.
    fn normalise_groups(&self, weights: &RecurrentWeights<Matrix, Vector>, out: &Buffer) -> Result<(), DeviceError> {
        let width = out.width / weights.shape.key_heads;
        let start = out.data.as_ref().map_or(0, Memory::address);
        (0..weights.shape.key_heads).try_for_each(|group| {
            let first = (group * width) as u64;
            self.launch(
                &plan::norm_heads(width, out.rows),
                &[
                    Argument::Address(start + first * 2),
                    Argument::Address(weights.norm.0.address() + first * 4),
                    Argument::Float(weights.norm_eps),
                    Argument::Int(out.width as i32),
                ],
            )
        })
    }

    /// Implements [`gate`](crate::device::Device::gate).
    pub(super) fn gate_rows(&self, gates: &Buffer, out: &Buffer) -> Result<(), DeviceError> {
        assert_eq!((gates.rows, gates.width), (out.rows, out.width));
        let count = out.rows * out.width;
        assert!(count.is_multiple_of(8), "gates are read in vectors of eight");
        self.launch(
            &recurrent_plan::gate(count),
            &[gates.data(), out.data(), Argument::Int((count / 8) as i32)],
        )
    }
}

/// The sequences of a step whose states it updates: `Sequence` in `kernels/common/recurrent.cuh`. None in
/// a model without states.
pub(super) fn sequences(batch: &StepBatch) -> Vec<u32> {
    let sequences = batch.sequences.iter().zip(&batch.state_slots);
    sequences
        .flat_map(|(s, slot)| [s.first_token, s.q_len, *slot, u32::from(s.q_len == s.kv_len)])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sequences_without_earlier_tokens_begin() {
        let mut batch = StepBatch::default();
        batch.push([1, 2, 3], 3, [0]);
        batch.push([4], 20, [1]);
        assert_eq!(sequences(&batch), [0; 0]);
        batch.state_slots = vec![7, 2];
        assert_eq!(sequences(&batch), [0, 3, 7, 1, 3, 1, 2, 0]);
    }
}
