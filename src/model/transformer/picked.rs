//! The end of a step for rows whose logits are computed.
//!
//! After the last layer that stores keys, values or a state, other rows change nothing that a later
//! step reads. They are dropped there: of a prompt, one row goes on. That saves one layer in most
//! models, and more where layers read the keys and values of earlier ones.
//!
//! See docs/decisions/105-rows-without-logits-end-early.md.

use super::Buffers;
use crate::device::batch::StepBatch;
use crate::device::{Device, DeviceError};
use crate::model::build::{LayerWeights, Mixer};
use crate::model::config::Config;
use crate::model::error::ModelError;
use crate::model::kv_layout::KvLayout;

/// Where rows are dropped, and the step of those that stay.
pub(super) struct LastRows<D: Device> {
    /// Index of the last layer that stores keys and values or a state.
    pub layer: usize,
    /// [`StepBatch::logits_tokens`] on the device.
    pub step: D::Step,
}

/// Buffers for rows that stay. They change places with those of all rows.
pub(super) struct PickedBuffers<D: Device> {
    residual: D::Buffer,
    mixed: D::Buffer,
    gates: D::Buffer,
    inputs: D::Buffer,
}

impl<D: Device> LastRows<D> {
    pub(super) fn new(
        device: &D,
        config: &Config,
        layout: &KvLayout,
        context_tokens: u32,
    ) -> Result<LastRows<D>, ModelError> {
        let stores = |layer: &usize| config.is_recurrent(*layer) || config.has_kv(*layer);
        let layer = (0..config.layers.len()).rev().find(stores).unwrap_or(0);
        // Queries of this layer are rotated before its rows are dropped.
        let ropes = if layer + 1 < config.layers.len() {
            config.rope_specs(context_tokens)
        } else {
            Vec::new()
        };
        Ok(LastRows {
            layer,
            step: device.step(ropes, &layout.kinds())?,
        })
    }

    /// Whether the step has rows to drop. If so, those that stay are uploaded.
    pub(super) fn upload(
        &mut self,
        device: &D,
        batch: &StepBatch,
        workspace: &mut D::Workspace,
    ) -> Result<bool, DeviceError> {
        let drops = batch.logits_at.len() < batch.tokens.len();
        if drops && !batch.logits_at.is_empty() {
            device.upload(&batch.logits_tokens(), &mut self.step, workspace)?;
        }
        Ok(drops)
    }
}

impl<D: Device> PickedBuffers<D> {
    pub(super) fn new(device: &D) -> PickedBuffers<D> {
        PickedBuffers {
            residual: device.buffer(),
            mixed: device.buffer(),
            gates: device.buffer(),
            inputs: device.buffer(),
        }
    }
}

/// What the layer still reads when it has stored its part: a recurrent layer its output, attention its queries.
fn mixed<'a, D: Device>(
    layer: &LayerWeights<D>,
    normed: &'a mut D::Buffer,
    projected: &'a mut D::Buffer,
) -> &'a mut D::Buffer {
    match &layer.mixer {
        Some(Mixer::Recurrent { .. }) => normed,
        _ => projected,
    }
}

impl<D: Device> Buffers<D> {
    /// Drops rows without logits from all that operations read after `layer` has stored its part.
    pub(super) fn pick_logits_rows(
        &mut self,
        device: &D,
        step: &D::Step,
        layer: &LayerWeights<D>,
        has_inputs: bool,
    ) -> Result<(), DeviceError> {
        // The rows that stay take the places of all rows.
        self.swap_picked(layer);
        let all = &self.picked;
        device.pick_logits_rows(step, &all.residual, &mut self.residual)?;
        device.pick_logits_rows(step, &all.mixed, mixed(layer, &mut self.normed, &mut self.projected))?;
        if matches!(&layer.mixer, Some(Mixer::Attention(attention)) if attention.gate.is_some()) {
            device.pick_logits_rows(step, &all.gates, &mut self.gates)?;
        }
        if has_inputs {
            device.pick_logits_rows(step, &all.inputs, &mut self.inputs)?;
        }
        Ok(())
    }

    /// Exchanges buffers of all rows and those of rows that stay. At the end of a step it brings the large ones back to their
    /// places, so that no buffer grows for the sake of the other.
    pub(super) fn swap_picked(&mut self, layer: &LayerWeights<D>) {
        let picked = &mut self.picked;
        std::mem::swap(mixed(layer, &mut self.normed, &mut self.projected), &mut picked.mixed);
        std::mem::swap(&mut self.residual, &mut picked.residual);
        std::mem::swap(&mut self.gates, &mut picked.gates);
        std::mem::swap(&mut self.inputs, &mut picked.inputs);
    }
}
