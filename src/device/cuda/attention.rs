//! Attention over paged keys and values: a launch of the plan's wide thread blocks, one of its
//! narrow blocks, and one that merges partial results.
//!
//! See docs/decisions/076-hopper-attention-has-its-own-kernel.md and
//! docs/decisions/077-attention-parts-take-only-their-rows.md.

use super::attention_plan::{self, AttentionShape};
use super::driver::Argument;
use super::memory::{Buffer, KvPool, Workspace, address, ensure_capacity};
use super::plan::KernelFormat;
use super::step::AttentionStep;
use super::{Cuda, Step, Vector};
use crate::device::{Attention, AttentionInput, DeviceError, HeadShape};

/// Refuses heads that the kernels of attention do not compute.
///
/// # Errors
/// The size of the heads or their number is not supported.
pub fn check_heads(heads: HeadShape) -> Result<(), DeviceError> {
    if let Some(rank) = heads.value_in_key {
        return check_latents(heads, rank);
    }
    let multiple = if heads.head_dim <= 128 { 16 } else { 32 };
    // Those of a query fit in a wide thread block in every format.
    let group_max = if heads.head_dim <= 256 { 64 } else { 32 };
    if !heads.head_dim.is_multiple_of(multiple) || heads.head_dim > 512 || heads.heads / heads.kv_heads > group_max {
        return Err(DeviceError::Unsupported(format!(
            "the model has {} heads of {} numbers over {} key and value heads; the GPU's kernels take heads of multiples of 16 up to 128 and of 32 up to 512, up to 64 of them to a key and value head, or up to 32 where they have more than 256 numbers: compute with `--device cpu`",
            heads.heads, heads.head_dim, heads.kv_heads
        )));
    }
    Ok(())
}

/// As [`check_heads`], of heads whose keys begin with their value.
fn check_latents(heads: HeadShape, rank: usize) -> Result<(), DeviceError> {
    let multiple = if heads.head_dim <= 128 { 16 } else { 32 };
    let value_multiple = if rank <= 256 { 16 } else { 32 };
    if !heads.head_dim.is_multiple_of(multiple)
        || !rank.is_multiple_of(value_multiple)
        || heads.head_dim > 576
        || rank > 512
    {
        return Err(DeviceError::Unsupported(format!(
            "the model keeps latents of {rank} numbers, with keys of {} beside them; the GPU's kernels take latents of multiples of 16 up to 256 and of 32 up to 512, and of both together multiples of 16 up to 128 and of 32 up to 576: compute with `--device cpu`",
            heads.head_dim - rank
        )));
    }
    Ok(())
}

impl Cuda {
    /// The shape of a layer's attention, whose keys and values are in `pool`.
    pub(super) fn layer_shape(&self, heads: HeadShape, pool: &KvPool, queries_alone: bool) -> AttentionShape {
        AttentionShape {
            queries_alone,
            block: pool.block_sizes(),
            ..self.attention_shape(heads)
        }
    }

    /// Reserves memory for partial results of a kind's layers.
    fn reserve_parts(&self, layer: &AttentionStep, workspace: &mut Workspace) -> Result<(), DeviceError> {
        // Rounded up for fewer reallocations: sequences grow from step to step, and freeing the old
        // memory waits for the card.
        let rows = layer.plans.iter().map(|plan| plan.part_rows).max().unwrap_or(0);
        let rows = (rows * self.attention_shape(layer.heads).kv_heads as usize).next_power_of_two();
        let sums = rows * layer.heads.value_dim() * 4;
        let what = "parts of attention";
        ensure_capacity(&self.context, &mut workspace.part_sums, sums, what)?;
        ensure_capacity(&self.context, &mut workspace.part_states, rows * 8, what)
    }

    /// Implements [`attention`](crate::device::Device::attention).
    pub(super) fn attend(
        &self,
        op: Attention,
        input: &AttentionInput<'_, Buffer, Vector>,
        (step, pool): (&Step, &KvPool),
        out: &mut Buffer,
        workspace: &mut Workspace,
    ) -> Result<(), DeviceError> {
        let heads = op.place.heads;
        // A layer that reads what an earlier one has stored has rows of queries alone.
        let queries_alone = input.qkv.width == heads.q_width();
        assert!(queries_alone || input.qkv.width == heads.qkv_width());
        let shape = self.layer_shape(heads, pool, queries_alone);
        let width = heads.heads * heads.value_dim();
        out.reshape(&self.context, step.tokens, width, KernelFormat::Bf16)?;
        let of_kind = |layer: &&AttentionStep| (layer.spec, layer.heads) == (op.spec, heads);
        let Some(layer) = step.attention.iter().find(of_kind) else {
            return Err(DeviceError::Unsupported(format!(
                "the step was created without attention of kind {:?} with {heads:?}",
                op.spec
            )));
        };
        self.reserve_parts(layer, workspace)?;
        let (sums, states) = (address(&workspace.part_sums), address(&workspace.part_states));
        let window = attention_plan::window(op.spec);
        let sinks = Argument::Address(input.sinks.map_or(0, |sinks| sinks.0.address()));
        let [keys, values, key_scales, value_scales] = pool.arguments(op.place);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_that_no_kernel_has_are_refused_with_the_sizes_that_there_are() {
        let check = |heads: usize, kv_heads: usize, head_dim: usize| {
            check_heads(HeadShape {
                heads,
                kv_heads,
                head_dim,
                value_in_key: None,
            })
        };
        for (heads, kv_heads, head_dim) in [(64, 1, 16), (64, 1, 256), (32, 1, 288), (32, 4, 512), (8, 8, 192)] {
            check(heads, kv_heads, head_dim).unwrap();
        }
        for (heads, kv_heads, head_dim) in [
            (4, 2, 24),
            (4, 2, 144),
            (4, 2, 544),
            (65, 1, 64),
            (33, 1, 288),
            (64, 1, 512),
        ] {
            let why = check(heads, kv_heads, head_dim).unwrap_err().to_string();
            let words = format!("{heads} heads of {head_dim} numbers over {kv_heads} key and value heads");
            assert!(why.contains(&words) && why.contains("of 32 up to 512"), "{why}");
        }
    }
}
