//! Which matrices of a model are quantized, and how they are stored.

use std::collections::HashMap;
use std::ops::Range;

use rayon::prelude::*;

use crate::device::Dtype;
use crate::model::balance::ChannelFactors;
use crate::model::channels::Activations;
use crate::model::config::{Config, ExpertForm};
use crate::model::error::ModelError;
use crate::model::tensors::{
    ExpertTensors, FusedPart, GatedTensors, LayerTensors, LinearTensors, MixerTensors, MlpTensors, fused_parts,
};
use crate::model::weights::WeightSource;

/// A matrix that is quantized.
#[derive(Debug)]
pub(super) struct Matrix {
    /// Its name in the checkpoint.
    pub name: String,
    pub rows: usize,
    pub columns: usize,
    /// What it multiplies. `None`: it is not observed, as inputs of experts are not.
    pub input: Option<Activations>,
    /// The projections that it holds, with their rows.
    parts: Vec<(String, Range<usize>)>,
}

/// Why a model is refused whose experts other programs find in one tensor.
pub(super) const JOINED_EXPERTS: &str = "the experts of a layer are one tensor";

/// Why a model is refused.
pub(super) fn refusal(config: &Config) -> Option<&'static str> {
    let is_other = |other: bool, what: &'static str| other.then_some(what);
    is_other(
        config.quantization.is_some(),
        "its weights are in other numbers already: give the checkpoint that it was made of",
    )
    .or(is_other(config.latent.is_some(), "its layers keep latents"))
    .or(is_other(config.recurrent.is_some(), "it has recurrent layers"))
    .or(is_other(config.has_lone_parts(), "it has layers of one part"))
    .or(is_other(
        config.layer_inputs.is_some(),
        "its layers have inputs of their own",
    ))
    .or(is_other(config.attention_gates, "its attention has gates"))
    .or(is_other(config.expert_form() != ExpertForm::Matrices, JOINED_EXPERTS))
    .or(is_other(
        config.experts.as_ref().is_some_and(|experts| experts.beside_mlp),
        "it has experts beside an MLP",
    ))
}

/// The matrices of a layer: all projections of attention, MLP and experts. Routers and the output head stay.
pub(super) fn of_layer(config: &Config, layer: usize, tensors: &LayerTensors) -> Vec<Matrix> {
    let fused = fused_parts(config);
    let list = Lister {
        prefix: format!("model.layers.{layer}."),
        fused: &fused,
    };
    let mut found = Vec::new();
    if let Some(MixerTensors::Attention(attention)) = &tensors.mixer {
        list.add(&mut found, &attention.qkv, Some(Activations::AttentionNorm));
    }
    if let Some(output) = &tensors.o {
        list.add(&mut found, output, Some(Activations::Attended));
    }
    let mlp_input = if config.parallel_mlp {
        Activations::AttentionNorm
    } else {
        Activations::MlpNorm
    };
    let mut add = |mlp: &GatedTensors, gated: Option<Activations>| {
        list.add(&mut found, &mlp.gate_up, Some(mlp_input));
        list.add(&mut found, &mlp.down, gated);
    };
    match &tensors.mlp {
        Some(MlpTensors::Plain(mlp)) => add(mlp, Some(Activations::Gated)),
        Some(MlpTensors::Experts(experts)) => {
            let ExpertTensors { experts, shared, .. } = &**experts;
            experts.iter().chain(shared).for_each(|mlp| add(mlp, None));
        }
        Some(MlpTensors::Both(_)) | None => {}
    }
    found
}

struct Lister<'a> {
    /// What stands before the names of the layer's tensors.
    prefix: String,
    fused: &'a [FusedPart],
}

impl Lister<'_> {
    fn add(&self, found: &mut Vec<Matrix>, linear: &LinearTensors, input: Option<Activations>) {
        let matrices = linear.stored().filter_map(|spec| Some((spec, spec.rows?)));
        for (spec, rows) in matrices {
            let is_stored = linear.weights.iter().any(|weight| weight.name == spec.name);
            let parts = if is_stored {
                vec![(spec.name.clone(), 0..rows)]
            } else {
                let weights = linear.weights.iter();
                weights
                    .filter_map(|weight| self.part(&spec.name, &weight.name, weight.rows?))
                    .collect()
            };
            found.push(Matrix {
                name: spec.name.clone(),
                rows,
                columns: spec.columns,
                input,
                parts,
            });
        }
    }

    /// The rows of the tensor `stored` that are the projection `name`.
    fn part(&self, stored: &str, name: &str, rows: usize) -> Option<(String, Range<usize>)> {
        let [stored, own] = [stored, name].map(|name| name.strip_prefix(&self.prefix));
        let part = self
            .fused
            .iter()
            .find(|part| Some(part.name) == own && Some(part.stored) == stored)?;
        Some((name.to_owned(), part.first_row..part.first_row + rows))
    }
}

impl Matrix {
    /// The matrix, balanced, `[rows][columns]`, and the format in which it is stored.
    ///
    /// # Errors
    /// As [`WeightSource::tensor`]; or a number is not finite.
    pub(super) fn values(
        &self,
        weights: &dyn WeightSource,
        factors: &HashMap<String, ChannelFactors>,
    ) -> Result<(Vec<f32>, Dtype), ModelError> {
        let tensor = weights.tensor(&self.name, Some(self.rows), self.columns)?;
        let view = tensor.view();
        let mut values = vec![0.0f32; self.rows * self.columns];
        let parts: Vec<_> = self
            .parts
            .iter()
            .filter_map(|(name, rows)| Some((rows, factors.get(name)?)))
            .collect();
        values
            .par_chunks_mut(self.columns)
            .enumerate()
            .for_each(|(row, values)| {
                view.read_row(row, values);
                let of_row = parts.iter().find(|(rows, _)| rows.contains(&row));
                let Some((rows, factors)) = of_row else { return };
                if let Some(columns) = &factors.columns {
                    values.iter_mut().zip(columns).for_each(|(x, factor)| *x *= factor);
                }
                if let Some(of_rows) = &factors.rows {
                    values.iter_mut().for_each(|x| *x *= of_rows[row - rows.start]);
                }
            });
        if values.par_iter().any(|x| !x.is_finite()) {
            let why = format!("tensor `{}` has a number that is not finite", self.name);
            return Err(ModelError::broken(weights.path_of(&self.name), why));
        }
        Ok((values, tensor.dtype))
    }

    /// Names by which the balance knows what the matrix holds.
    pub(super) fn part_names(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().map(|(name, _)| &name[..])
    }
}
