//! Attention over paged keys and values: wide items, narrow ones, then the merge of parts.

use super::driver::Argument;
use super::memory::{Buffer, KvPool, Workspace, address, want};
use super::plan::Format;
use super::{Cuda, Step};
use crate::device::{DeviceError, KvSpec};

impl Cuda {
    /// What [`attention`](crate::device::Device::attention) says.
    pub(super) fn attend(
        &self,
        spec: KvSpec,
        step: &Step,
        (qkv, pool): (&Buffer, &KvPool),
        out: &mut Buffer,
        workspace: &mut Workspace,
    ) -> Result<(), DeviceError> {
        let heads = self.heads(step.shape);
        let width = step.shape.heads * step.shape.head_dim;
        out.reshape(&self.context, step.tokens, width, Format::Bf16)?;
        let Some(part) = step.attention.iter().find(|part| part.spec == spec) else {
            return Err(DeviceError::Unsupported(format!("the step was made without {spec:?}")));
        };
        // With room to grow: sequences get longer from step to step, and what is replaced waits for the card.
        let rows = (part.part_rows * step.shape.kv_heads).next_power_of_two();
        want(
            &self.context,
            &mut workspace.part_sums,
            rows * step.shape.head_dim * 4,
            "parts of attention",
        )?;
        want(
            &self.context,
            &mut workspace.part_states,
            rows * 8,
            "parts of attention",
        )?;
        let (sums, states) = (address(&workspace.part_sums), address(&workspace.part_states));
        let plan = step.plan(part);
        let window = match spec {
            KvSpec::Full => 0,
            KvSpec::Window(window) => window,
        };
        let scale = (step.shape.head_dim as f32).sqrt().recip();
        let [keys, values, key_scales, value_scales] = pool.arguments();
        for (warps, items, count) in [
            (heads.wide_warps(), plan.wide, part.wide),
            (heads.narrow_warps(), plan.narrow, part.narrow),
        ] {
            self.launch(
                &heads.attention(warps, window, count),
                &[
                    qkv.data(),
                    keys,
                    values,
                    key_scales,
                    value_scales,
                    Argument::Address(items),
                    Argument::Address(plan.queries),
                    Argument::Address(step.positions()),
                    Argument::Address(step.tables()),
                    Argument::Float(scale),
                    out.data(),
                    sums,
                    states,
                ],
            )?;
        }
        self.launch(
            &heads.merge(part.merged),
            &[
                Argument::Address(plan.merged),
                Argument::Address(plan.first),
                Argument::Address(plan.parts),
                sums,
                states,
                out.data(),
            ],
        )
    }
}
