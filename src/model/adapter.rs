//! A LoRA adapter in PEFT's layout, added to a checkpoint's matrices where they are read.
//!
//! For a matrix W of a module, the adapter holds `lora_A` of `[rank][in]` and `lora_B` of `[out][rank]`. The
//! matrix becomes W + factor · B · A, in F32, as PEFT's `merge_and_unload` makes it.
//!
//! See docs/decisions/108-an-adapter-is-merged-while-weights-are-read.md.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use half::{bf16, f16};
use memmap2::Mmap;
use rayon::prelude::*;

use crate::device::Dtype;
use crate::model::config::{ADAPTER_CONFIG, AdapterConfig, Config, ExpertForm};
use crate::model::error::ModelError;
use crate::model::headers::missing;
use crate::model::names::canonical_name;
use crate::model::tensors::{ModelTensors, OUTPUT_HEAD, TensorSpec};
use crate::model::weights::{Header, StoredTensor, WeightSource, Weights, hash_files};
use crate::printable::printable_name;

const WEIGHTS: &str = "adapter_model.safetensors";
/// What stands before the names of a model's modules.
const PREFIX: &str = "base_model.model.";
const EMBEDDING: &str = "model.embed_tokens.weight";

/// The tensors of a model by their names.
type Matrices<'a> = HashMap<&'a str, &'a TensorSpec>;

/// The changes of a checkpoint's matrices.
#[derive(Debug)]
pub struct Adapter {
    header: Header,
    map: Mmap,
    /// By the name of the matrix in models that are built.
    changes: BTreeMap<String, Change>,
}

/// The change of a matrix.
#[derive(Debug)]
struct Change {
    /// The names of `lora_A` and `lora_B`.
    down: String,
    up: String,
    rank: usize,
    factor: f32,
}

impl Adapter {
    /// Opens the adapter in `dir` and checks it against the model that `config` describes, with the weights
    /// `base`.
    ///
    /// # Errors
    /// A file cannot be read or is broken; the adapter is of another kind or of another model.
    pub fn open(dir: &Path, config: &Config, base: &Weights) -> Result<Adapter, ModelError> {
        let described = AdapterConfig::load(dir)?;
        let path = dir.join(WEIGHTS);
        let (header, map) = Header::open(path, ExpertForm::Matrices)?;
        let mut found: BTreeMap<&str, [Option<&String>; 2]> = BTreeMap::new();
        let mut copies = Vec::new();
        for name in header.tensors.keys() {
            if let Some(module) = copy_of(name) {
                copies.push((name.clone(), module.to_owned()));
                continue;
            }
            let (module, part) = module_of(name).ok_or_else(|| {
                let name = printable_name(name);
                let why = format!(
                    "tensor `{name}` is not known of LoRA adapters: `lora_A` and `lora_B` of matrices are read"
                );
                ModelError::unsupported(&header.path, why)
            })?;
            found.entry(module).or_default()[part] = Some(name);
        }
        let tensors = ModelTensors::of(config);
        let matrices: Matrices<'_> = tensors.all().map(|spec| (spec.name.as_str(), spec)).collect();
        let mut changes = BTreeMap::new();
        for (module, parts) in found {
            let [Some(down), Some(up)] = parts else {
                let what = if parts[0].is_none() { "lora_A" } else { "lora_B" };
                let why = format!("tensor `{what}` of `{}` is missing", printable_name(module));
                return Err(ModelError::broken(&header.path, why));
            };
            let name = matrix_of(module);
            let change = Change {
                down: down.clone(),
                up: up.clone(),
                rank: check(&header, (config, &matrices), &described, (module, &name), [down, up])?,
                factor: described.factor(module),
            };
            if changes.insert(name, change).is_some() {
                let why = format!("`{}` is changed twice, under two names", printable_name(module));
                return Err(ModelError::broken(&header.path, why));
            }
        }
        if changes.is_empty() {
            return Err(ModelError::broken(&header.path, "the adapter changes no matrix"));
        }
        let adapter = Adapter { header, map, changes };
        for (copy, module) in copies {
            adapter.check_copy(&copy, &matrix_of(&module), &matrices, base)?;
        }
        Ok(adapter)
    }

    /// PEFT stores a copy of the output head with its changes. It must be the model's own, rounded to the
    /// adapter's number format.
    fn check_copy(&self, copy: &str, matrix: &str, matrices: &Matrices<'_>, base: &Weights) -> Result<(), ModelError> {
        let spec = matrices.get(matrix);
        let size = spec.and_then(|spec| Some((spec.rows?, spec.columns)));
        let is_same = match size {
            None => false,
            Some((rows, columns)) => {
                let copied = self.numbers(copy, rows, columns)?;
                let round: fn(f32) -> f32 = match self.header.check_tensor(copy, Some(rows), columns)? {
                    Dtype::Bf16 => |x| bf16::from_f32(x).to_f32(),
                    Dtype::F16 => |x| f16::from_f32(x).to_f32(),
                    _ => |x| x,
                };
                let own = base.tensor(matrix, Some(rows), columns)?;
                let mut values = vec![0.0; columns];
                copied.chunks_exact(columns).enumerate().all(|(row, copied)| {
                    own.view().read_row(row, &mut values);
                    values.iter().zip(copied).all(|(own, copied)| round(*own) == *copied)
                })
            }
        };
        if is_same {
            return Ok(());
        }
        let copy = printable_name(copy);
        let why = format!(
            "tensor `{copy}` differs from the model's own: the adapter was trained for another one, or with it"
        );
        Err(ModelError::unsupported(&self.header.path, why))
    }

    /// The file that holds its matrices.
    pub(super) fn path(&self) -> &Path {
        &self.header.path
    }

    /// The names of the matrices that it changes.
    pub(super) fn changed(&self) -> impl Iterator<Item = &str> {
        self.changes.keys().map(String::as_str)
    }

    /// The rank of the change of the matrix `name`. `None`: it is not changed.
    pub(super) fn rank(&self, name: &str) -> Option<usize> {
        self.changes.get(name).map(|change| change.rank)
    }

    /// The first matrix of the change of `name`, `[rank][columns]`.
    pub(super) fn down(&self, name: &str, columns: usize) -> Result<Vec<f32>, ModelError> {
        let change = self.change(name)?;
        self.numbers(&change.down, change.rank, columns)
    }

    /// The second matrix of the change of `name`, `[rows][rank]`, times the change's factor.
    pub(super) fn up(&self, name: &str, rows: usize) -> Result<Vec<f32>, ModelError> {
        let change = self.change(name)?;
        let mut values = self.numbers(&change.up, rows, change.rank)?;
        values.iter_mut().for_each(|x| *x *= change.factor);
        Ok(values)
    }

    fn change(&self, name: &str) -> Result<&Change, ModelError> {
        self.changes.get(name).ok_or_else(|| missing(self.path(), name))
    }

    /// Whether the adapter changes the matrix `name`.
    pub(super) fn changes(&self, name: &str) -> bool {
        self.changes.contains_key(name)
    }

    /// The matrix `name` with the adapter's change.
    ///
    /// # Errors
    /// The change is stored in an unsupported number format.
    pub(super) fn applied<'a>(&self, name: &str, tensor: StoredTensor<'a>) -> Result<StoredTensor<'a>, ModelError> {
        let Some(change) = self.changes.get(name) else {
            return Ok(tensor);
        };
        let (rows, columns, rank) = (tensor.rows, tensor.columns, change.rank);
        let down = self.numbers(&change.down, rank, columns)?;
        let up = self.numbers(&change.up, rows, rank)?;
        let mut data = vec![0u8; rows * columns * 4];
        let view = tensor.view();
        let changed = data.par_chunks_mut(columns * 4).zip(up.par_chunks(rank)).enumerate();
        changed.for_each(|(row, (out, up))| {
            let mut sums = vec![0.0f32; columns];
            for (weight, down) in up.iter().zip(down.chunks_exact(columns)) {
                sums.iter_mut().zip(down).for_each(|(sum, x)| *sum += weight * x);
            }
            let mut values = vec![0.0f32; columns];
            view.read_row(row, &mut values);
            let changed = values.iter().zip(&sums).map(|(value, sum)| value + change.factor * sum);
            for (out, value) in out.as_chunks_mut().0.iter_mut().zip(changed) {
                *out = value.to_le_bytes();
            }
        });
        Ok(StoredTensor {
            dtype: Dtype::F32,
            rows,
            columns,
            data: Cow::Owned(data),
        })
    }

    fn numbers(&self, name: &str, rows: usize, columns: usize) -> Result<Vec<f32>, ModelError> {
        let dtype = self.header.check_tensor(name, Some(rows), columns)?;
        let tensor = StoredTensor {
            dtype,
            rows,
            columns,
            data: Cow::Borrowed(&self.map[self.header.tensors[name].bytes.clone()]),
        };
        let mut values = vec![0.0; rows * columns];
        for (row, values) in values.chunks_exact_mut(columns).enumerate() {
            tensor.view().read_row(row, values);
        }
        Ok(values)
    }
}

/// The module that a tensor belongs to, and whether it is `lora_A` (0) or `lora_B` (1).
fn module_of(name: &str) -> Option<(&str, usize)> {
    let inner = name.strip_prefix(PREFIX)?;
    let ends = [".lora_A.weight", ".lora_B.weight"];
    ends.iter()
        .enumerate()
        .find_map(|(part, end)| Some((inner.strip_suffix(end)?, part)))
}

/// The name of a module's matrix in models that are built.
fn matrix_of(module: &str) -> String {
    let stored = format!("{module}.weight");
    canonical_name(&stored).unwrap_or(stored)
}

/// The module whose own weights a tensor is a copy of.
fn copy_of(name: &str) -> Option<&str> {
    name.strip_prefix(PREFIX)?.strip_suffix(".base_layer.weight")
}

/// Checks the change of a matrix of the model. Returns its rank.
fn check(
    header: &Header,
    (config, matrices): (&Config, &Matrices<'_>),
    described: &AdapterConfig,
    (module, name): (&str, &str),
    [down, up]: [&String; 2],
) -> Result<usize, ModelError> {
    let module_name = printable_name(module);
    let spec = matrices.get(name).filter(|spec| !spec.is_bytes);
    let Some((spec, rows)) = spec.and_then(|spec| Some((spec, spec.rows?))) else {
        let why = format!(
            "the adapter changes `{module_name}`, which is no matrix of this model: it was trained for another one"
        );
        return Err(ModelError::unsupported(&header.path, why));
    };
    if config.tied_embeddings && [OUTPUT_HEAD, EMBEDDING].contains(&name) {
        let why = format!("the adapter changes `{module_name}`, which is embedding table and output head in one");
        return Err(ModelError::unsupported(&header.path, why));
    }
    let rank = described.rank(module);
    let shape = &header.tensors[down].shape;
    match shape[..] {
        [count, _] if count as f64 == rank => {
            header.check_tensor(down, Some(count), spec.columns)?;
            header.check_tensor(up, Some(rows), count)?;
            Ok(count)
        }
        _ => {
            let (name, shape) = (printable_name(down), printable_name(&format!("{shape:?}")));
            let why = format!("tensor `{name}` has shape {shape}; `{ADAPTER_CONFIG}` gives it {rank} rows");
            Err(ModelError::broken(&header.path, why))
        }
    }
}

/// The hash (`hash_files`) of the two files of an adapter.
///
/// # Errors
/// A file cannot be read.
pub fn adapter_hash(dir: &Path) -> Result<String, ModelError> {
    hash_files(&[ADAPTER_CONFIG, WEIGHTS].map(|name| dir.join(name)))
}
