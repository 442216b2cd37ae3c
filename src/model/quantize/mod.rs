//! `gristmill quantize`: a checkpoint with weights of 8 or 4 bits, in the layout of compressed-tensors.
//!
//! INT8 is balanced as jobs in `int8` are (`balance.rs`): the factors, powers of two, end in
//! norms and weights. 4 bits are rounded by GPTQ (`gptq.rs`) where there are prompts, and otherwise to the
//! nearest number. The work goes layer by layer, and a layer's file is written before the next is begun.
//!
//! See docs/decisions/111-quantized-checkpoints-are-those-of-compressed-tensors.md.

pub mod compare;
mod folder;
mod form;
mod gptq;
mod grid;
mod matrices;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use form::Scheme;

use self::folder::{FileTensor, OutFolder};
use self::form::{GROUPS, OutTensor};
use self::gptq::{Inputs, Rounded, nearest};
use self::grid::FactorDtype;
use self::matrices::Matrix;
use crate::device::cpu::add_gram;
use crate::device::{Dtype, TensorError};
use crate::engine::ForwardError;
use crate::model::balance::{ChannelFactors, KeptForm, factors_of};
use crate::model::canonical::CanonicalWeights;
use crate::model::channels::{ActivationMaxima, Activations, observe};
use crate::model::checkpoint::Checkpoint;
use crate::model::error::ModelError;
use crate::model::names::{canonical_name, text_only_name};
use crate::model::tensors::ModelTensors;
use crate::model::transformer::{LoadOptions, Transformer};
use crate::model::weights::{WeightSource, Weights};

/// What is quantized, and how.
pub struct Quantization<'a> {
    pub checkpoint: &'a Checkpoint,
    /// The model's folder.
    pub dir: &'a Path,
    pub scheme: Scheme,
    /// Measured sizes of channels, by which INT8 is balanced.
    pub channels: Option<&'a ActivationMaxima>,
    /// Token ids of prompts, by whose activations weights of 4 bits are rounded. May be empty.
    pub prompts: &'a [Vec<u32>],
    /// How the model is loaded for the prompts, in F32.
    pub options: &'a LoadOptions,
    /// Memory for sums over activations: layers of more than that take several passes over the prompts.
    pub sums_bytes: usize,
    /// What the result depends on, for the record.
    pub identity: Value,
}

/// What rounding changed in a layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerReport {
    pub layer: usize,
    pub matrices: Vec<MatrixReport>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MatrixReport {
    pub name: String,
    /// The change of the matrix' outputs over the prompts, relative to the outputs (root of mean squares);
    /// without prompts, that of its weights.
    pub relative_error: f64,
    /// Whether outputs were compared.
    pub by_outputs: bool,
}

/// Why a checkpoint is not quantized.
#[derive(Debug, thiserror::Error)]
pub enum QuantizeError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Forward(#[from] ForwardError),
    #[error(transparent)]
    Tensor(#[from] TensorError),
    #[error("cannot write `{}`: {source}", .path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("layer {layer}: what `{name}` reads was not observed: this is a mistake of gristmill's, please report it")]
    Unobserved { layer: usize, name: String },
    #[error("{0}")]
    Refused(String),
}

impl QuantizeError {
    fn write(path: &Path, source: io::Error) -> QuantizeError {
        QuantizeError::Write {
            path: path.to_owned(),
            source,
        }
    }
}

/// The sums over a layer's activations.
type Sums = BTreeMap<(usize, u8), Vec<f32>>;

impl Quantization<'_> {
    /// Writes the quantized checkpoint into the folder `out`, or what is missing of it there. `progress` gets the number of
    /// finished layers.
    ///
    /// # Errors
    /// The model is of a kind that is not quantized, a file cannot be read or written, or `out` holds something
    /// else.
    pub fn write(&self, out: &Path, mut progress: impl FnMut(usize)) -> Result<Vec<LayerReport>, QuantizeError> {
        let (config, weights) = (&self.checkpoint.config, &self.checkpoint.weights);
        let is_gguf = crate::gguf::paths(self.dir).map_err(ModelError::from)?.is_some();
        let in_blocks = is_gguf.then_some("it is a GGUF file: give the checkpoint that the file was made of");
        if let Some(why) = in_blocks.or(matrices::refusal(config)) {
            let why = format!("`{}` is not quantized: {why}", self.dir.display());
            return Err(QuantizeError::Refused(why));
        }
        self.check_names()?;
        let tensors = ModelTensors::of(config);
        let layers = tensors.layers.iter().enumerate();
        let layers: Vec<Vec<Matrix>> = layers.map(|(i, layer)| matrices::of_layer(config, i, layer)).collect();
        let group = self.group(&layers)?;
        // Before a folder is made, since factors may be refused; where one is begun, once it is known that work is left.
        let early = if OutFolder::is_begun(out) {
            None
        } else {
            Some(self.factors(&layers)?)
        };
        let groups = (self.scheme == Scheme::W4a16).then_some(group);
        let mut folder = OutFolder::open(out, &self.identity, groups, layers.len() + 1)?;
        let mut pending = Vec::new();
        for layer in 0..layers.len() {
            if !folder.goes_on_behind(layer) {
                pending.push(layer);
            }
        }
        if pending.is_empty() && folder.is_whole() {
            return Ok(folder.layers().to_vec());
        }
        let factors = early.map_or_else(|| self.factors(&layers), Ok)?;
        progress(folder.layers().len());
        let work = Work {
            quantization: self,
            weights,
            factors: &factors,
            group,
        };
        let mut pending = &pending[..];
        while !pending.is_empty() {
            let (now, later) = pending.split_at(self.layers_at_once(&layers, pending));
            let sums = self.sums(&layers, now)?;
            for layer in now {
                let (tensors, report) = work.layer(*layer, &layers[*layer], &sums)?;
                folder.write_layer(&tensors, report)?;
                progress(folder.layers().len());
            }
            pending = later;
        }
        folder.write_weights(0, &work.others(layers.len())?)?;
        let reports = folder.layers().to_vec();
        folder.finish(self.dir, self.scheme.description(group))?;
        Ok(reports)
    }

    /// Columns that share a factor, where groups do.
    fn group(&self, layers: &[Vec<Matrix>]) -> Result<usize, QuantizeError> {
        let fits = |group: &usize| {
            layers
                .iter()
                .flatten()
                .all(|matrix| matrix.columns.is_multiple_of(*group))
        };
        match (self.scheme, GROUPS.into_iter().find(fits)) {
            (Scheme::W4a16, None) => Err(QuantizeError::Refused(format!(
                "`{}` has matrices whose columns are no multiple of 32, the smallest group of 4 bits: use int8",
                self.dir.display()
            ))),
            (_, group) => Ok(group.unwrap_or(GROUPS[0])),
        }
    }

    /// The factors of the balance.
    fn factors(&self, layers: &[Vec<Matrix>]) -> Result<HashMap<String, ChannelFactors>, QuantizeError> {
        if self.scheme != Scheme::Int8 {
            return Ok(HashMap::new());
        }
        let config = &self.checkpoint.config;
        let weights = &self.checkpoint.weights;
        let canonical = CanonicalWeights::new(weights, config);
        let mut factors = factors_of(&canonical, config, self.channels, Some(weights))?;
        let parts: HashSet<&str> = layers.iter().flatten().flat_map(Matrix::part_names).collect();
        // The balance names what a model might have.
        let tensors = ModelTensors::of(config);
        let read: HashSet<&str> = tensors.all().map(|spec| &spec.name[..]).collect();
        factors.retain(|name, _| parts.contains(&name[..]) || read.contains(&name[..]));
        Ok(factors)
    }

    /// A model within a multimodal one has other modules than the configuration of a text model names.
    fn check_names(&self) -> Result<(), QuantizeError> {
        let files = &self.checkpoint.weights.headers().files;
        let is_other = |name: &&String| text_only_name(name).is_some();
        let why = match files.iter().flat_map(|file| file.tensors.keys()).find(is_other) {
            Some(name) => format!("`{name}` is the text part of a multimodal model"),
            None if files.iter().any(|file| !file.split.is_empty()) => matrices::JOINED_EXPERTS.to_owned(),
            None => return Ok(()),
        };
        Err(QuantizeError::Refused(format!(
            "`{}` is not quantized: {why}",
            self.dir.display()
        )))
    }

    /// Kinds of activations of a layer whose sums are needed, with their width.
    fn observed(&self, matrices: &[Matrix]) -> BTreeMap<u8, usize> {
        if self.scheme != Scheme::W4a16 || self.prompts.is_empty() {
            return BTreeMap::new();
        }
        let inputs = matrices
            .iter()
            .filter_map(|matrix| Some((matrix.input? as u8, matrix.columns)));
        inputs.collect()
    }

    /// How many of the layers `pending` have their sums in memory at once: at least one.
    fn layers_at_once(&self, layers: &[Vec<Matrix>], pending: &[usize]) -> usize {
        let mut bytes = 0;
        let fits = |layer: &&usize| {
            let squares = self
                .observed(&layers[**layer])
                .into_values()
                .map(|width| 4 * width * width);
            bytes += squares.sum::<usize>();
            bytes <= self.sums_bytes
        };
        pending.iter().take_while(fits).count().max(1)
    }

    /// Runs the prompts, and sums the products of what each of these layers' matrices read.
    fn sums(&self, layers: &[Vec<Matrix>], now: &[usize]) -> Result<Sums, QuantizeError> {
        let mut sums = Sums::new();
        let mut wanted = BTreeMap::new();
        for layer in now {
            for (kind, width) in self.observed(&layers[*layer]) {
                wanted.insert((*layer, kind), width);
            }
        }
        if wanted.is_empty() {
            return Ok(sums);
        }
        let (config, weights) = (&self.checkpoint.config, &self.checkpoint.weights);
        let mut model = Transformer::from_weights(config.clone(), weights, self.options)?;
        let mut failed = None;
        let prompts = self.prompts.iter().map(Vec::as_slice);
        observe(&mut model, prompts, |layer, activations: Activations, buffer| {
            let key = (layer, activations as u8);
            if let Some(width) = wanted.get(&key) {
                let sums = sums.entry(key).or_insert_with(|| vec![0.0; width * width]);
                let added = add_gram(&self.options.threads, buffer, sums);
                failed = failed.take().or(added.err());
            }
        })?;
        match failed {
            None => Ok(sums),
            Some(error) => Err(error.into()),
        }
    }
}

/// The making of files.
struct Work<'a> {
    quantization: &'a Quantization<'a>,
    weights: &'a Weights,
    factors: &'a HashMap<String, ChannelFactors>,
    group: usize,
}

impl<'a> Work<'a> {
    /// The tensors of a layer's file, and what rounding changed.
    fn layer(
        &self,
        layer: usize,
        matrices: &[Matrix],
        sums: &Sums,
    ) -> Result<(Vec<FileTensor<'a>>, LayerReport), QuantizeError> {
        let mut inputs = BTreeMap::new();
        for (kind, width) in self.quantization.observed(matrices) {
            let Some(sums) = sums.get(&(layer, kind)) else {
                let reader = matrices
                    .iter()
                    .find(|matrix| matrix.input.map(|input| input as u8) == Some(kind));
                let name = reader.map(|matrix| matrix.name.clone()).unwrap_or_default();
                return Err(QuantizeError::Unobserved { layer, name });
            };
            let found = Inputs::of(sums, width);
            let found = found.map_err(|why| QuantizeError::Refused(format!("layer {layer}: {why}")))?;
            inputs.extend(found.map(|found| (kind, found)));
        }
        let prefix = format!("model.layers.{layer}.");
        let quantized: HashSet<&str> = matrices.iter().map(|matrix| &matrix.name[..]).collect();
        let mut tensors = self.kept(|name| name.starts_with(&prefix) && !quantized.contains(name))?;
        let mut report = LayerReport {
            layer,
            matrices: Vec::new(),
        };
        for matrix in matrices {
            let of_matrix = matrix.input.and_then(|input| inputs.get(&(input as u8)));
            let (new, of_matrix) = self.matrix(matrix, of_matrix)?;
            tensors.extend(new.into_iter().map(FileTensor::New));
            report.matrices.push(of_matrix);
        }
        Ok((tensors, report))
    }

    fn matrix(
        &self,
        matrix: &Matrix,
        inputs: Option<&Inputs>,
    ) -> Result<(Vec<OutTensor>, MatrixReport), QuantizeError> {
        let scheme = self.quantization.scheme;
        let (grid, columns) = (scheme.grid(), matrix.columns);
        let group = if scheme == Scheme::W4a16 { self.group } else { columns };
        let (values, stored) = matrix.values(self.weights, self.factors)?;
        let dtype = match stored {
            Dtype::Bf16 => FactorDtype::Bf16,
            // The factors of small weights would lose bits in F16.
            Dtype::F32 | Dtype::F16 => FactorDtype::F32,
        };
        let groups = values.chunks(group).enumerate();
        let factors: Vec<f32> = groups
            .map(|(i, numbers)| {
                let first = i * group % columns;
                let weights = inputs.map(|inputs| &inputs.squares[first..first + group]);
                grid.factor(numbers, weights, dtype)
            })
            .collect();
        let Rounded { codes, error, total } = match inputs {
            Some(inputs) => inputs.round(grid, &values, &factors, group),
            None => nearest(grid, &values, &factors, group),
        };
        let report = MatrixReport {
            name: matrix.name.clone(),
            relative_error: if total > 0.0 { (error / total).sqrt() } else { 0.0 },
            by_outputs: inputs.is_some(),
        };
        // The checkpoint's own name, by which other programs look for it.
        let (_, location) = self.weights.locate(&matrix.name)?;
        let tensors = scheme.tensors(&location.name, [matrix.rows, columns], codes, (&factors, dtype));
        Ok((tensors, report))
    }

    /// The tensors that belong to none of the model's layers.
    fn others(&self, layers: usize) -> Result<Vec<FileTensor<'a>>, QuantizeError> {
        self.kept(|name| {
            let rest = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
            let layer = rest.and_then(|(layer, _)| layer.parse::<usize>().ok());
            layer.is_none_or(|layer| layer >= layers)
        })
    }

    /// Stored tensors that are not quantized, with what the balance changes.
    fn kept(&self, is_wanted: impl Fn(&str) -> bool) -> Result<Vec<FileTensor<'a>>, QuantizeError> {
        let mut kept = Vec::new();
        for file in &self.weights.headers().files {
            for (name, entry) in &file.tensors {
                let read_as = canonical_name(name).unwrap_or_else(|| name.clone());
                if !is_wanted(&read_as) {
                    continue;
                }
                let data = match self.factors.get(&read_as) {
                    Some(factors) => Cow::Owned(self.scaled(&read_as, &entry.shape, factors)?),
                    None => {
                        let (header, location) = self.weights.locate(&read_as)?;
                        self.weights.data(header, location)
                    }
                };
                kept.push(FileTensor::Kept {
                    name,
                    dtype: entry.dtype,
                    shape: &entry.shape,
                    data,
                });
            }
        }
        Ok(kept)
    }

    /// A norm, bias or router whose channels the balance rescales, in its own format.
    fn scaled(&self, name: &str, shape: &[usize], factors: &ChannelFactors) -> Result<Vec<u8>, QuantizeError> {
        let (rows, columns) = match *shape {
            [columns] => (None, columns),
            [rows, columns] => (Some(rows), columns),
            _ => {
                return Err(QuantizeError::Refused(format!(
                    "tensor `{name}` has the shape {shape:?}"
                )));
            }
        };
        let tensor = self.weights.tensor(name, rows, columns)?;
        let form = KeptForm::of(&self.quantization.checkpoint.config, name, tensor.dtype);
        let mut values = vec![0.0f32; columns];
        let mut bytes = Vec::with_capacity(tensor.data.len());
        for row in 0..tensor.rows {
            tensor.view().read_row(row, &mut values);
            for (i, x) in values.iter().enumerate() {
                let of_row = factors
                    .rows
                    .as_ref()
                    .map_or(1.0, |of| of[if rows.is_none() { i } else { row }]);
                let factor = of_row * factors.columns.as_ref().map_or(1.0, |of| of[i]);
                let scaled = form.scaled(*x, factor);
                // The factors were chosen for the format.
                if !scaled.is_finite() || !tensor.dtype.append(scaled, &mut bytes) {
                    let why = format!("tensor `{name}` has a number that is not finite");
                    return Err(ModelError::broken(self.weights.path_of(name), why).into());
                }
            }
        }
        Ok(bytes)
    }
}
