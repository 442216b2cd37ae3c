//! Attention over paged keys and values: a launch of the plan's wide thread blocks, one of its
//! narrow blocks, and one that merges partial results.
//!
//! See docs/decisions/076-hopper-attention-has-its-own-kernel.md and
//! docs/decisions/077-attention-parts-take-only-their-rows.md.

use super::driver::Argument;
use super::memory::{Buffer, KvPool, Workspace, address, ensure_capacity};
use super::plan::{self, KernelFormat};
use super::{Cuda, Step, Vector};
use crate::device::{Attention, AttentionInput, DeviceError, HeadShape};

/// Refuses heads that the kernels of attention do not compute.
///
/// # Errors
/// The size of the heads or their number is not supported.
pub fn check_heads(heads: HeadShape) -> Result<(), DeviceError> {
    let multiple = if heads.head_dim <= 128 { 16 } else { 32 };
    if !heads.head_dim.is_multiple_of(multiple) || heads.head_dim > 256 || heads.heads / heads.kv_heads > 64 {
        return Err(DeviceError::Unsupported(format!(
            "the model has {} heads of {} numbers over {} key and value heads; the GPU's kernels take heads of multiples of 16 up to 128 and of 32 up to 256, up to 64 of them to a key and value head: compute with `--device cpu`",
            heads.heads, heads.head_dim, heads.kv_heads
        )));
    }
    Ok(())
}

impl Cuda {
    /// Implements [`attention`](crate::device::Device::attention).
    pub(super) fn attend(
        &self,
        op: Attention,
        input: &AttentionInput<'_, Buffer, Vector>,
        (step, pool): (&Step, &KvPool),
        out: &mut Buffer,
        workspace: &mut Workspace,
    ) -> Result<(), DeviceError> {
        let shape = self.attention_shape(step.shape);
        let width = step.shape.heads * step.shape.head_dim;
        out.reshape(&self.context, step.tokens, width, KernelFormat::Bf16)?;
        let Some(layer) = step.attention.iter().find(|layer| layer.spec == op.spec) else {
            return Err(DeviceError::Unsupported(format!(
                "the step was created without attention of kind {:?}",
                op.spec
            )));
        };
        // Rounded up for fewer reallocations: sequences grow from step to step, and freeing the old
        // memory waits for the card.
        let rows = layer.plans.iter().map(|plan| plan.part_rows).max().unwrap_or(0);
        let rows = (rows * step.shape.kv_heads).next_power_of_two();
        ensure_capacity(
            &self.context,
            &mut workspace.part_sums,
            rows * step.shape.head_dim * 4,
            "parts of attention",
        )?;
        ensure_capacity(
            &self.context,
            &mut workspace.part_states,
            rows * 8,
            "parts of attention",
        )?;
        let (sums, states) = (address(&workspace.part_sums), address(&workspace.part_states));
        let window = plan::window(op.spec);
        let sinks = Argument::Address(input.sinks.map_or(0, |sinks| sinks.0.address()));
        let [keys, values, key_scales, value_scales] = pool.arguments();
        for plan in &layer.plans {
            let addresses = step.plan_addresses(plan);
            for (warps, items, count) in [
                (shape.wide_block_warps(), addresses.wide, plan.wide_items),
                (shape.narrow_block_warps(), addresses.narrow, plan.narrow_items),
            ] {
                self.launch(
                    &shape.attention(warps, (window, op.soft_cap, input.sinks.is_some()), count),
                    &[
                        input.qkv.data(),
                        keys,
                        values,
                        key_scales,
                        value_scales,
                        Argument::Address(items),
                        Argument::Address(addresses.query_tokens),
                        Argument::Address(step.positions()),
                        Argument::Address(step.tables(op.place.table)),
                        Argument::Float(op.scale),
                        sinks,
                        out.data(),
                        sums,
                        states,
                    ],
                )?;
            }
            self.launch(
                &shape.merge_partial_attention(plan.merged_tokens),
                &[
                    Argument::Address(addresses.merged_tokens),
                    Argument::Address(addresses.first_parts),
                    Argument::Address(addresses.parts),
                    sums,
                    states,
                    sinks,
                    out.data(),
                ],
            )?;
        }
        Ok(())
    }
}
