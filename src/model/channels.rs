//! Maximum magnitudes of a model's activation channels over some prompts (SmoothQuant's calibration
//! set). They decide how weights are balanced for 8 bits.
//!
//! The magnitudes are stored in a safetensors file beside the model: per layer, the F32 vectors
//! `layers.N.attention_norm`, `.attended`, `.mlp_norm` and `.gated`, with one magnitude per
//! channel.
//!
//! See docs/decisions/082-calibration-lies-in-the-model-folder.md.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use data_encoding::HEXLOWER;
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensorError, SafeTensors};
use sha2::{Digest, Sha256};

use crate::device::Precision;
use crate::device::batch::StepBatch;
use crate::device::cpu::{BLOCK_TOKENS, Buffer};
use crate::engine::{Forward, ForwardError};
use crate::model::config::Config;
use crate::model::error::ModelError;
use crate::model::read_limited;
use crate::model::transformer::Transformer;

/// Maximum size of the file: enough for 100 layers of a million channels.
const FILE_BYTES_MAX: u64 = 400 << 20;
/// Maximum tokens of a prompt per step.
const STEP_TOKENS_MAX: usize = 2048;
const NO_EXPERTS: &str = "a model with experts is balanced by its weights alone, not by measured magnitudes";
const KINDS: [(Activations, &str); 4] = [
    (Activations::AttentionNorm, "attention_norm"),
    (Activations::Attended, "attended"),
    (Activations::MlpNorm, "mlp_norm"),
    (Activations::Gated, "gated"),
];

/// Activations that a layer's linear operations read, `[tokens][width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activations {
    /// Width `hidden_size`: read by the query, key and value projections.
    AttentionNorm,
    /// Width `heads * head_dim`: read by the output projection.
    Attended,
    /// Width `hidden_size`: read by the gate and up projections, or by the router and the experts.
    MlpNorm,
    /// Width `intermediate_size`: read by the down projection. Layers with experts have none.
    Gated,
}

/// Maximum magnitude per channel of the activations that a layer's linear operations read.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LayerMaxima {
    /// Indexed by [`Activations`].
    by_kind: [Vec<f32>; KINDS.len()],
}

impl LayerMaxima {
    /// The magnitudes of `activations`, `[width]`.
    pub fn of(&self, activations: Activations) -> &[f32] {
        &self.by_kind[activations as usize]
    }
}

/// Maximum magnitudes per layer; see the module's description.
#[derive(Debug, Clone, PartialEq)]
pub struct ActivationMaxima {
    pub layers: Vec<LayerMaxima>,
}

/// A prompt, cut to the model's context and the capacity of its KV pool.
pub fn cut<'a>(model: &Transformer, prompt: &'a [u32]) -> &'a [u32] {
    let in_pool = model.kv_blocks() as usize / model.kv_tables().len() * BLOCK_TOKENS;
    let tokens_max = in_pool.min(model.context_tokens() as usize);
    &prompt[..prompt.len().min(tokens_max)]
}

/// Runs prompts (token ids) through a model and shows what its linear operations read of each, [cut](cut).
///
/// # Errors
/// A token id is not below the model's vocabulary size.
pub(super) fn observe<'a>(
    model: &mut Transformer,
    prompts: impl IntoIterator<Item = &'a [u32]>,
    mut take: impl FnMut(usize, Activations, &Buffer),
) -> Result<(), ForwardError> {
    let tables = model.kv_tables().len();
    for prompt in prompts {
        let prompt = cut(model, prompt);
        for (chunk, tokens) in prompt.chunks(STEP_TOKENS_MAX).enumerate() {
            let end = chunk * STEP_TOKENS_MAX + tokens.len();
            let mut batch = StepBatch::default();
            batch.push(tokens.iter().copied(), end as u32, 0..end.div_ceil(BLOCK_TOKENS) as u32);
            model.forward_with_observer(&batch.with_tables(tables), &mut take)?;
        }
    }
    Ok(())
}

impl ActivationMaxima {
    /// Checks that magnitudes of this model can be measured and used.
    ///
    /// # Errors
    /// The model has experts, recurrent layers or latents.
    pub fn check_model(config: &Config) -> Result<(), ModelError> {
        let other = match (&config.recurrent, config.latent) {
            (Some(_), _) => Some("has recurrent layers"),
            (_, Some(_)) => Some("keeps latents"),
            _ if config.has_lone_parts() => Some("has layers of one part"),
            _ => None,
        };
        if let Some(other) = other {
            return Err(ModelError::Options(format!(
                "the model {other}: it cannot be calibrated, and needs no calibration for int8"
            )));
        }
        match config.experts {
            None => Ok(()),
            Some(_) => Err(ModelError::Options(format!(
                "{NO_EXPERTS}: it cannot be calibrated, and needs no calibration for int8"
            ))),
        }
    }

    /// Runs prompts (token ids) through a model and records the maximum magnitudes. A prompt is cut
    /// to the model's context and the capacity of its KV pool.
    ///
    /// # Errors
    /// A token id is not below the model's vocabulary size.
    pub fn measure<'a>(
        model: &mut Transformer,
        prompts: impl IntoIterator<Item = &'a [u32]>,
    ) -> Result<ActivationMaxima, ForwardError> {
        let mut layers = vec![LayerMaxima::default(); model.config().layers.len()];
        observe(model, prompts, |layer, activations, buffer| {
            let maxima = &mut layers[layer].by_kind[activations as usize];
            for row in buffer.rows() {
                maxima.resize(row.len(), 0.0);
                maxima.iter_mut().zip(row).for_each(|(max, x)| *max = max.max(x.abs()));
            }
        })?;
        Ok(ActivationMaxima { layers })
    }

    /// Serializes the magnitudes as safetensors.
    ///
    /// # Errors
    /// The vectors cannot be serialized.
    pub fn to_bytes(&self) -> Result<Vec<u8>, SafeTensorError> {
        let mut tensors = Vec::new();
        for (number, layer) in self.layers.iter().enumerate() {
            for (values, (_, kind)) in layer.by_kind.iter().zip(KINDS) {
                let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
                tensors.push((format!("layers.{number}.{kind}"), vec![values.len()], bytes));
            }
        }
        let views: Result<Vec<_>, SafeTensorError> = tensors
            .iter()
            .map(|(name, shape, bytes)| Ok((name, TensorView::new(Dtype::F32, shape.clone(), bytes)?)))
            .collect();
        let metadata = HashMap::from([("format".to_owned(), "gristmill channels".to_owned())]);
        safetensors::serialize(views?, Some(metadata))
    }

    /// The file that `gristmill calibrate` writes for the checkpoint in `dir`, or for a GGUF file beside it.
    pub fn path(dir: &Path) -> PathBuf {
        match dir.file_name() {
            Some(file) if dir.is_file() => {
                dir.with_file_name(format!("{}.channels.safetensors", file.to_string_lossy()))
            }
            _ => dir.join("channels.safetensors"),
        }
    }

    /// Loads the magnitudes of the checkpoint in `dir`. `None`: there is no such file, or
    /// `precision` does not use it.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn of_model(dir: &Path, config: &Config, precision: Precision) -> Result<Option<ActivationMaxima>, ModelError> {
        let path = ActivationMaxima::path(dir);
        match (precision, path.try_exists()) {
            (Precision::F32 | Precision::Bf16 | Precision::Fp8 | Precision::W4a8, _) | (_, Ok(false)) => Ok(None),
            (Precision::Int8, Ok(true)) => ActivationMaxima::load(&path, config).map(Some),
            (_, Err(e)) => Err(ModelError::read(&path, e)),
        }
    }

    /// SHA-256 of all magnitudes in order, in hex.
    pub fn hash(&self) -> String {
        let mut hash = Sha256::new();
        for values in self.layers.iter().flat_map(|layer| &layer.by_kind) {
            values.iter().for_each(|x| hash.update(x.to_le_bytes()));
        }
        HEXLOWER.encode(&hash.finalize())
    }

    /// Reads a file of magnitudes and checks that it fits the model.
    ///
    /// # Errors
    /// The file cannot be read, is not a file of magnitudes, or was made for a model of another
    /// shape.
    pub fn load(path: &Path, config: &Config) -> Result<ActivationMaxima, ModelError> {
        if config.experts.is_some() {
            return Err(ModelError::unsupported(path, format!("{NO_EXPERTS}: remove this file")));
        }
        let bytes = read_limited(path, FILE_BYTES_MAX)?;
        let broken = |what: String| ModelError::broken(path, what);
        let file = SafeTensors::deserialize(&bytes).map_err(|e| broken(e.to_string()))?;
        let mut layers = vec![LayerMaxima::default(); config.layers.len()];
        for (number, layer) in layers.iter_mut().enumerate() {
            let widths = [
                config.hidden_size,
                config.heads_of(number).q_width(),
                config.hidden_size,
                config.mlp_width(number),
            ];
            for ((values, (_, kind)), width) in layer.by_kind.iter_mut().zip(KINDS).zip(widths) {
                let name = format!("layers.{number}.{kind}");
                let tensor = file
                    .tensor(&name)
                    .map_err(|_| broken(format!("it has no `{name}`: was it made for another model?")))?;
                if tensor.dtype() != Dtype::F32 || tensor.shape() != [width] {
                    return Err(broken(format!(
                        "`{name}` is {:?} {:?} in place of F32 [{width}]: the file was made for another model",
                        tensor.dtype(),
                        tensor.shape()
                    )));
                }
                values.extend(tensor.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)));
                if values.iter().any(|x| !x.is_finite() || *x < 0.0) {
                    return Err(broken(format!("`{name}` holds a value that is negative or not finite")));
                }
            }
        }
        if file.len() != layers.len() * KINDS.len() {
            return Err(broken(format!("it has more than this model's {} layers", layers.len())));
        }
        Ok(ActivationMaxima { layers })
    }
}
