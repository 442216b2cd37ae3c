//! Checks that a checkpoint's files hold exactly the model that its configuration describes. A
//! checkpoint with a tensor that is neither read nor known to be harmless is refused, with an error
//! that names the tensor.
//!
//! The files' headers suffice for this check, which precedes loading. Only in one case tensor bytes
//! are read: an output head beside a tied embedding table is compared with the table.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use rayon::prelude::*;

use crate::model::adapter::Adapter;
use crate::model::adapters_apart;
use crate::model::config::Config;
use crate::model::error::ModelError;
use crate::model::names::{canonical_name, text_only_name};
use crate::model::quantized::{self, Problem, StoredMatrix};
use crate::model::stored_form::StoredForm;
use crate::model::tensors::{ModelTensors, OUTPUT_HEAD, TensorSpec};
use crate::model::weights::{Headers, StoredTensor, WeightSource, Weights, ignored_index_warning};
use crate::printable::printable_name;

/// A checked checkpoint.
pub struct Checkpoint {
    /// The configuration. Its `tied_embeddings` follows the stored tensors; if `config.json`
    /// differs from them, there is a warning.
    pub config: Config,
    pub weights: Weights,
}

impl Checkpoint {
    /// Opens the checkpoint in `dir` and checks it against `config`. `adapter`: the folder of an adapter
    /// that changes it.
    ///
    /// # Errors
    /// A file cannot be read or is broken; or a tensor is missing, has another shape or format, or
    /// is not read by any part of the model; or the adapter is of another model.
    pub fn open(dir: &Path, adapter: Option<&Path>, config: Config) -> Result<Checkpoint, ModelError> {
        let weights = Weights::open(dir, StoredForm::of(&config))?;
        let has_head = check_headers(&config, weights.headers())?;
        let mut config = config;
        config.warnings.extend(ignored_index_warning(dir)?);
        match (config.tied_embeddings, has_head) {
            (true, true) if !head_is_table(&config, &weights)? => {
                config.tied_embeddings = false;
                config.warnings.push(format!(
                    "`{}`: `{OUTPUT_HEAD}` differs from the embedding table, which `config.json` makes the output head \
                     (`tie_word_embeddings`): `{OUTPUT_HEAD}` is used, as transformers 5 does",
                    weights.path_of(OUTPUT_HEAD).display()
                ));
            }
            (false, false) => {
                config.tied_embeddings = true;
                config.warnings.push(format!(
                    "`{}`: there is no `{OUTPUT_HEAD}`, though `config.json` asks for one (`tie_word_embeddings` is false): the \
                     embedding table is used in its place, as vLLM does",
                    weights.path_of(OUTPUT_HEAD).display()
                ));
            }
            _ => {}
        }
        let weights = match adapter {
            Some(dir) => {
                let adapter = Adapter::open(dir, &config, &weights)?;
                weights.adapted(adapter)
            }
            None => weights,
        };
        Ok(Checkpoint { config, weights })
    }

    /// The checkpoint with adapters beside its weights, each for some sequences of a batch. Their numbers are those of `folders`,
    /// from 1 on.
    ///
    /// # Errors
    /// As [`open`](Self::open); or an adapter changes a matrix that is changed only where weights are read.
    pub fn beside(self, folders: &[impl AsRef<Path>]) -> Result<Checkpoint, ModelError> {
        let Checkpoint { config, weights } = self;
        let mut adapters = Vec::new();
        for folder in folders {
            let adapter = Adapter::open(folder.as_ref(), &config, &weights)?;
            adapters_apart::check(&adapter, &config)?;
            adapters.push(adapter);
        }
        let weights = weights.beside(adapters);
        Ok(Checkpoint { config, weights })
    }

    /// Checks the checkpoint in `dir` against `config` without loading it. Returns the
    /// configuration, with `tied_embeddings` as in [`Checkpoint::config`].
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn check(dir: &Path, config: Config) -> Result<Config, ModelError> {
        Ok(Checkpoint::open(dir, None, config)?.config)
    }
}

/// Bytes of each table per task of a thread.
const COMPARE_TASK_BYTES: usize = 1 << 20;

/// Whether the stored output head is a copy of the embedding table.
fn head_is_table(config: &Config, weights: &Weights) -> Result<bool, ModelError> {
    let tensors = ModelTensors::of(&Config {
        tied_embeddings: false,
        layers: Vec::new(),
        ..config.clone()
    });
    let stored = |spec: &TensorSpec| weights.tensor(&spec.name, spec.rows, spec.columns);
    let table = stored(&tensors.embedding)?;
    tensors
        .head
        .map_or(Ok(true), |head| Ok(same_numbers(&table, &stored(&head)?)))
}

/// Whether two tensors of one shape hold the same numbers. Stops at the first difference.
fn same_numbers(a: &StoredTensor<'_>, b: &StoredTensor<'_>) -> bool {
    if a.dtype == b.dtype {
        let parts = a.data.par_chunks(COMPARE_TASK_BYTES);
        return parts.zip(b.data.par_chunks(COMPARE_TASK_BYTES)).all(|(a, b)| a == b);
    }
    let (a, b) = (a.view(), b.view());
    (0..a.rows).into_par_iter().all(|row| {
        let mut values = [vec![0.0f32; a.columns], vec![0.0f32; a.columns]];
        a.read_row(row, &mut values[0]);
        b.read_row(row, &mut values[1]);
        values[0] == values[1]
    })
}

/// Suffixes of names of tensors that no supported model reads and no answer depends on.
const HARMLESS: [&str; 3] = [
    // RoPE frequencies and precomputed cosines and sines, which older versions of transformers
    // stored. They follow from `config.json`, and transformers and vLLM skip them, too.
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
];

/// Name prefixes of the image and audio parts of multimodal models, in older and newer checkpoints.
/// Prompts contain no images and no sounds, so these parts are unused.
const IMAGE_PARTS: [&str; 9] = [
    "vision_model.",
    "model.visual.",
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "model.embed_vision.",
    "model.audio_tower.",
    "model.embed_audio.",
];

/// Name prefix of the layers of models with recurrent layers that predict further tokens.
const MTP_PART: &str = "mtp.";

/// The number of the layer that a tensor belongs to, and the rest of its name.
fn layer_of(name: &str) -> Option<(usize, &str)> {
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    Some((layer.parse().ok()?, rest))
}

/// Whether a tensor belongs to a layer behind the last that predicts further tokens.
fn is_of_mtp_layer(config: &Config, name: &str) -> bool {
    if config.recurrent.is_some() && name.starts_with(MTP_PART) {
        return true;
    }
    let count = config.layers.len();
    layer_of(name).is_some_and(|(layer, _)| (count..count + config.mtp_layers).contains(&layer))
}

/// Whether a tensor makes keys and values of a layer that reads those of an earlier one. Published
/// models have them, and transformers skips them, too.
fn is_of_unread_kv(config: &Config, name: &str) -> bool {
    let text_only = text_only_name(name);
    let name = text_only.as_deref().unwrap_or(name);
    layer_of(name).is_some_and(|(layer, rest)| {
        let source = config.kv_sources.get(layer).copied().flatten();
        let parts = ["k_proj", "v_proj", "k_norm", "v_norm"];
        let part = rest.strip_prefix("self_attn.").and_then(|part| part.split_once('.'));
        source.is_some() && part.is_some_and(|(part, _)| parts.contains(&part))
    })
}

/// Checks the files' headers against the model that `config` describes. Returns whether an output
/// head is stored beside the embedding table.
///
/// # Errors
/// As [`Checkpoint::open`].
pub fn check_headers(config: &Config, headers: &Headers) -> Result<bool, ModelError> {
    let names = || headers.files.iter().flat_map(|file| file.tensors.keys());
    // Prefixed names of a text part show that the model is multimodal, so image parts may be
    // present.
    let is_multimodal = names().any(|name| text_only_name(name).is_some());
    let is_harmless = |name: &str| {
        let ends = |end: &&str| {
            name.strip_suffix(*end)
                .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        };
        HARMLESS.iter().any(ends)
            || (is_multimodal && IMAGE_PARTS.iter().any(|part| name.starts_with(part)))
            || is_of_mtp_layer(config, name)
            || is_of_unread_kv(config, name)
            || (config.quantization.is_some() && quantized::is_unread(name))
    };
    check_index(headers, &is_harmless)?;

    let stored = stored(headers, &is_harmless)?;
    let tensors = ModelTensors::of(&Config {
        tied_embeddings: false,
        ..config.clone()
    });
    let mut unread = stored.clone();
    let (mut missing, mut plain) = (Vec::new(), Vec::new());
    for spec in tensors.all() {
        if unread.remove(spec.name.as_str()).is_none() && spec.name != OUTPUT_HEAD {
            missing.push(spec.name.clone());
        }
        match quantized_matrix(config, headers, &stored, spec) {
            Ok(Some(matrix)) => {
                for name in matrix.beside() {
                    unread.remove(name);
                }
            }
            Err(Problem::Missing(name)) => missing.push(name),
            Err(Problem::Wrong(why)) => return Err(ModelError::broken(path_of(headers, &stored, &spec.name), why)),
            Ok(None) => plain.push(spec),
        }
    }
    let known: HashSet<&str> = tensors.all().map(|spec| spec.name.as_str()).collect();
    let unexpected: Vec<_> = unread
        .into_iter()
        .map(|(name, location)| (UnexpectedTensor::of(&name, config.layers.len(), &known), location))
        .collect();
    // Checkpoints with quantized weights of a form that is not read, or with adapters, lack tensors, too.
    // Their form is reported first, because it is the cause.
    let other_form = unexpected.iter().find(|(reason, _)| reason.is_other_form(config));
    if let Some((reason, location)) = other_form {
        return Err(reason.error(headers, *location, unexpected.len()));
    }
    if let [name, others @ ..] = &missing[..] {
        let instead = unexpected.first().map(|(_, location)| {
            format!(
                "; the file has `{}`, which {} does not mention",
                headers.shown(location.1),
                headers.described_by()
            )
        });
        return Err(ModelError::broken(
            headers.path(),
            format!(
                "tensor `{}` is missing{}{}",
                headers.shown(name),
                and_more(others.len()),
                instead.unwrap_or_default()
            ),
        ));
    }
    for spec in plain {
        check_plain(headers, &stored, spec)?;
    }
    match unexpected.first() {
        Some((reason, location)) => Err(reason.error(headers, *location, unexpected.len())),
        None => Ok(stored.contains_key(OUTPUT_HEAD)),
    }
}

/// The location of a tensor: the index of its file, and its name in that file.
type FileAndName<'a> = (usize, &'a str);

/// The file of a stored tensor.
fn path_of<'a>(headers: &'a Headers, stored: &BTreeMap<String, FileAndName<'_>>, name: &str) -> &'a Path {
    stored
        .get(name)
        .map_or(headers.path(), |(file, _)| &headers.files[*file].path)
}

/// How a matrix is quantized. `None`: it is stored plainly, or not at all.
fn quantized_matrix(
    config: &Config,
    headers: &Headers,
    stored: &BTreeMap<String, FileAndName<'_>>,
    spec: &TensorSpec,
) -> Result<Option<StoredMatrix>, Problem> {
    let (Some(quantization), Some(rows)) = (config.quantization, spec.rows) else {
        return Ok(None);
    };
    let lookup = |name: &str| {
        let (file, name) = stored.get(name)?;
        Some((*name, &headers.files[*file].tensors[*name]))
    };
    StoredMatrix::find(quantization, &spec.name, (rows, spec.columns), &lookup)
}

/// Checks the shape and the number format of a tensor that is not quantized, if it is stored.
fn check_plain(
    headers: &Headers,
    stored: &BTreeMap<String, FileAndName<'_>>,
    spec: &TensorSpec,
) -> Result<(), ModelError> {
    let Some((file, name)) = stored.get(&spec.name) else {
        return Ok(());
    };
    let header = &headers.files[*file];
    if quantized::matrix_name(name).is_some() {
        return Err(UnexpectedTensor::Quantized.error(headers, (*file, name), 1));
    }
    match spec.rows {
        Some(rows) if spec.is_bytes => header.check_bytes(name, rows, spec.columns),
        rows => header.check_tensor(name, rows, spec.columns).map(drop),
    }
}

/// All tensors except harmless ones, by their canonical names.
fn stored<'a>(
    headers: &'a Headers,
    is_harmless: &impl Fn(&str) -> bool,
) -> Result<BTreeMap<String, FileAndName<'a>>, ModelError> {
    let mut stored: BTreeMap<String, FileAndName<'a>> = BTreeMap::new();
    for (index, file) in headers.files.iter().enumerate() {
        for name in file.tensors.keys().filter(|name| !is_harmless(name)) {
            let canonical = canonical_name(name).unwrap_or_else(|| name.clone());
            if let Some((_, other)) = stored.insert(canonical, (index, name.as_str())) {
                return Err(ModelError::broken(
                    &file.path,
                    format!(
                        "tensors `{}` and `{}` are two names of one weight: remove the wrong one",
                        printable_name(other),
                        printable_name(name)
                    ),
                ));
            }
        }
    }
    Ok(stored)
}

/// Checks that the files hold exactly the tensors that the index lists, each in the file that the
/// index names for it.
///
/// Other programs read all tensors of the listed files, whatever the index says, and take the last
/// file's copy of a duplicate. An index that differs from its files means that files of different
/// checkpoints are mixed, and either copy could be wrong.
fn check_index(headers: &Headers, is_harmless: &impl Fn(&str) -> bool) -> Result<(), ModelError> {
    let Some(index) = &headers.index else { return Ok(()) };
    let missing: Vec<_> = index
        .iter()
        .filter(|(name, file)| !headers.files[*file].tensors.contains_key(name) && !is_harmless(name))
        .collect();
    if let [(name, file), others @ ..] = &missing[..] {
        return Err(ModelError::broken(
            &headers.files[*file].path,
            format!(
                "tensor `{}` is missing{}, and the index lists it here: fetch index and files again",
                printable_name(name),
                and_more(others.len())
            ),
        ));
    }
    let listed: BTreeMap<&str, usize> = index.iter().map(|(name, file)| (name.as_str(), *file)).collect();
    for (number, file) in headers.files.iter().enumerate() {
        for name in file.tensors.keys().filter(|name| !is_harmless(name)) {
            let why = match listed.get(name.as_str()) {
                Some(listed_file) if *listed_file == number => continue,
                Some(listed_file) => format!(
                    "is in this file and in `{}`, where the index lists it",
                    headers.files[*listed_file].path.display()
                ),
                None => "is in this file, and the index does not list it".to_owned(),
            };
            return Err(ModelError::broken(
                &file.path,
                format!("tensor `{}` {why}: fetch index and files again", printable_name(name)),
            ));
        }
    }
    Ok(())
}

fn and_more(others: usize) -> String {
    match others {
        0 => String::new(),
        n => format!(" and {n} more"),
    }
}

/// Why the model does not read a stored tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
enum UnexpectedTensor {
    Quantized,
    Adapter,
    /// The tensor belongs to a layer beyond the last. The value is the model's number of layers.
    Layer(usize),
    /// A bias of a projection (the value) that has none in this model.
    Bias(String),
    /// A norm of queries or keys, in a model without such norms.
    HeadNorm,
    /// The head of a model that scores or classifies texts.
    OtherHead,
    Unknown,
}

/// Last components of names that only quantized weights have; `UnexpectedTensor::of` also
/// recognises scales, zero points and packed weights.
const QUANTIZED: [&str; 10] = [
    // GPTQ and AWQ.
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    // MLX, beside its `scales`.
    "biases",
    // bitsandbytes.
    "SCB",
    "absmax",
    "quant_map",
    "nested_absmax",
    "nested_quant_map",
];

/// First components of names of heads for other tasks.
const OTHER_HEADS: [&str; 6] = [
    "score",
    "v_head",
    "value_head",
    "reward_head",
    "classifier",
    "regression_head",
];

impl UnexpectedTensor {
    /// Classifies a tensor by its text-only name. `known`: the names that the model with `layers`
    /// layers reads.
    fn of(canonical: &str, layers: usize, known: &HashSet<&str>) -> UnexpectedTensor {
        let words: Vec<&str> = canonical.split('.').collect();
        let (first, last) = (words[0], words[words.len() - 1]);
        let is_scale = last.contains("_scale") || last.contains("zero_point") || last.ends_with("_packed");
        if is_scale || QUANTIZED.contains(&last) || words.contains(&"quant_state") {
            return UnexpectedTensor::Quantized;
        }
        if first == "base_model" || words.iter().any(|word| word.starts_with("lora_")) {
            return UnexpectedTensor::Adapter;
        }
        if let ["model", "layers", layer, ..] = words[..]
            && layer.parse().is_ok_and(|layer: u64| layer >= layers as u64)
        {
            return UnexpectedTensor::Layer(layers);
        }
        if let ["model", "layers", _, "self_attn", "q_norm" | "k_norm", _] = words[..] {
            return UnexpectedTensor::HeadNorm;
        }
        let weight = canonical.strip_suffix("bias").map(|rest| format!("{rest}weight"));
        if weight.is_some_and(|weight| known.contains(weight.as_str())) {
            return UnexpectedTensor::Bias(words[words.len().saturating_sub(2)].to_owned());
        }
        if OTHER_HEADS.contains(&first) {
            UnexpectedTensor::OtherHead
        } else {
            UnexpectedTensor::Unknown
        }
    }

    /// Whether the tensor shows that all weights are stored in a form that is not read.
    fn is_other_form(&self, config: &Config) -> bool {
        match self {
            UnexpectedTensor::Quantized => config.quantization.is_none(),
            UnexpectedTensor::Adapter => true,
            _ => false,
        }
    }

    /// The error that names this tensor; `unread_count` includes it.
    fn error(&self, headers: &Headers, (file, name): FileAndName<'_>, unread_count: usize) -> ModelError {
        let description = headers.described_by();
        let unread = format!("answers without it would be wrong: fetch weights and {description} of one model");
        let why = match self {
            UnexpectedTensor::Quantized => {
                "belongs to weights in a quantized form that is not read: take the model in F32, F16 or BF16".to_owned()
            }
            UnexpectedTensor::Adapter => {
                "belongs to a LoRA adapter, which is no part of a checkpoint: name the adapter's folder as the job's `adapter`".to_owned()
            }
            UnexpectedTensor::Layer(count) => format!("belongs to a layer above the {count} that {description} describes; {unread}"),
            UnexpectedTensor::Bias(part) => format!("is a bias of `{part}`, and {description} describes none; {unread}"),
            UnexpectedTensor::HeadNorm => {
                format!("is a norm of queries or keys, and the model in {description} has none; {unread}")
            }
            UnexpectedTensor::OtherHead => {
                "is the head of a model that scores or classifies texts, which is not supported: take a model that writes".to_owned()
            }
            UnexpectedTensor::Unknown => format!("is read by no part of the model in {description}; {unread}"),
        };
        ModelError::unsupported(
            &headers.files[file].path,
            format!(
                "tensor `{}`{} {why}",
                headers.shown(name),
                in_brackets(unread_count - 1)
            ),
        )
    }
}

fn in_brackets(others: usize) -> String {
    match others {
        0 => String::new(),
        n => format!(" (and {n} more that nothing reads)"),
    }
}

#[cfg(test)]
mod tests;
