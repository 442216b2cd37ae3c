//! Recognises a model's folder by its file names and first bytes, before anything is parsed.
//!
//! A folder or file that is no checkpoint in the Hugging Face layout gets an error that names its
//! format and says what to do.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::read_limited;
use crate::gguf;
use crate::model::error::ModelError;
use crate::model::gguf as model_gguf;
use crate::regular::{self, first_bytes};

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// What `gristmill quantize` writes first: from what the folder is made, and what is done. `config.json` is written last.
pub(super) const QUANTIZE_RECORD: &str = "quantize.json";
const TOKENIZER: &str = "tokenizer.json";
const OTHER_TOKENIZERS: [&str; 3] = ["tekken.json", "tokenizer.model", "tiktoken.model"];
/// Maximum size of the small JSON files that are parsed here.
const SMALL_BYTES_MAX: u64 = 1 << 20;
/// Maximum size of a Git LFS pointer file.
const LFS_POINTER_BYTES_MAX: u64 = 1024;
const LFS_POINTER_PREFIX: &[u8] = b"version https://git-lfs.github.com/spec/";

/// Checks that `path` is a folder that may hold a checkpoint, or a GGUF model, and that its files are
/// complete: no Git LFS pointers, no broken links.
///
/// # Errors
/// `path` holds something else, which the error names, or its files are incomplete.
pub fn check(path: &Path) -> Result<(), ModelError> {
    if !path.exists() {
        return Err(ModelError::unsupported(
            path,
            missing_folder_message(&path.to_string_lossy()),
        ));
    }
    if let Some(files) = gguf::paths(path)? {
        files.iter().try_for_each(|file| check_file(file))?;
        return model_gguf::open(path).map(drop);
    }
    if !path.is_dir() {
        return Err(ModelError::unsupported(path, file_message(path)));
    }
    let folder = ModelFolder::list(path)?;
    match folder.unusable_message() {
        Some(message) => Err(ModelError::unsupported(path, message)),
        None => folder.check_files(),
    }
}

/// Checks that weights in a supported format exist, without opening them.
///
/// # Errors
/// There are no weights, or only weights in another format, which the error names.
pub fn check_weights(dir: &Path) -> Result<(), ModelError> {
    if has_weights(dir)? {
        return Ok(());
    }
    let message = format!("there is neither `{WEIGHTS}` nor `{INDEX}`");
    Err(ModelError::broken(dir, message))
}

/// Whether a folder holds weights in a supported format.
///
/// # Errors
/// There are only weights in another format, which the error names.
pub fn has_weights(dir: &Path) -> Result<bool, ModelError> {
    if gguf::paths(dir)?.is_some() {
        return Ok(true);
    }
    let folder = ModelFolder::list(dir)?;
    if folder.has_weights() {
        return Ok(true);
    }
    folder.other_weights_error().map_or(Ok(false), Err)
}

/// The error message for a model folder that does not exist. If it looks like a name on the Hugging
/// Face hub, the message says how to have it fetched.
pub fn missing_folder_message(model: &str) -> String {
    match hub_name(model) {
        _ if model.ends_with(".gguf") => "there is no such file".into(),
        Some(name) => format!(
            "there is no such folder; if `{name}` is a model on the Hugging Face hub, write `hf://{name}`, and it is fetched"
        ),
        None => "there is no such folder".into(),
    }
}

/// The `organisation/name` of a model on the hub; `None` if `model` has another form.
fn hub_name(model: &str) -> Option<&str> {
    let name = model.trim_end_matches('/');
    let is_word = |word: &str| {
        let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        word.starts_with(|c: char| c.is_ascii_alphanumeric()) && word.chars().all(fits)
    };
    let (organisation, model) = name.split_once('/')?;
    (is_word(organisation) && is_word(model)).then_some(name)
}

/// The error message for a file that was given as a model.
fn file_message(path: &Path) -> String {
    let extension = path
        .extension()
        .map(|extension| extension.to_string_lossy().to_lowercase())
        .unwrap_or_default();
    let what = match extension.as_str() {
        "safetensors" => "a file of weights",
        "bin" | "pt" | "pth" | "ckpt" => "a file of pickled weights, which can run code when it is read",
        "onnx" => "a model in ONNX's format",
        "json" => "a file of a model",
        _ => "a file",
    };
    format!("it is {what}: give the folder that holds `{CONFIG}`, `{WEIGHTS}` and `{TOKENIZER}`, or a GGUF file")
}

/// A folder and the names in it.
struct ModelFolder<'a> {
    dir: &'a Path,
    names: BTreeSet<String>,
}

impl ModelFolder<'_> {
    fn list(dir: &Path) -> Result<ModelFolder<'_>, ModelError> {
        let names = regular::entry_names(dir).map_err(|e| ModelError::read(dir, e))?;
        Ok(ModelFolder { dir, names })
    }

    /// Whether the folder holds a file, or a link to a file, of this name.
    fn has(&self, name: &str) -> bool {
        self.names.contains(name) && self.dir.join(name).is_file()
    }

    fn has_folder(&self, name: &str) -> bool {
        self.names.contains(name) && self.dir.join(name).is_dir()
    }

    /// A small JSON file's content; `null` if the file is missing or is not JSON.
    fn json(&self, name: &str) -> Value {
        let bytes = read_limited(&self.dir.join(name), SMALL_BYTES_MAX).unwrap_or_default();
        serde_json::from_slice(&bytes).unwrap_or_default()
    }

    fn find(&self, matches: impl Fn(&str) -> bool) -> Option<&str> {
        self.names.iter().map(String::as_str).find(|name| matches(name))
    }

    fn has_weights(&self) -> bool {
        self.has(WEIGHTS) || self.has(INDEX)
    }

    /// The error message if the folder is not a checkpoint of a text-generating model.
    fn unusable_message(&self) -> Option<String> {
        if !self.has(CONFIG) && self.has_folder("snapshots") {
            return Some(self.hub_cache_message());
        }
        if !self.has(CONFIG)
            && let Some(name) = self.find(|name| name.starts_with("models--"))
        {
            return Some(format!(
                "it is a hub cache: give a model's snapshot in it, such as `{name}/snapshots/…`"
            ));
        }
        if self.has("model_index.json") {
            return Some(
                "it is a pipeline of diffusers, which makes images: give the folder of a language model".into(),
            );
        }
        if self.has("adapter_config.json") {
            return Some(self.adapter_message());
        }
        let modules = self.json("modules.json");
        let mut types = modules
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|module| module["type"].as_str());
        if types.any(|kind| kind.starts_with("sentence_transformers.") && kind.ends_with("Pooling")) {
            return Some(
                "it is an embedding model of sentence-transformers, which writes no text: give one that generates"
                    .into(),
            );
        }
        if self.has(CONFIG) {
            return None;
        }
        if self.has(QUANTIZE_RECORD) {
            return Some(self.unfinished_message());
        }
        if let Some(message) = self.gguf_message() {
            return Some(message);
        }
        if let Some(message) = self.native_layout_message() {
            return Some(message);
        }
        if let Some(name) = self.find(|name| name.ends_with(".onnx")) {
            return Some(format!(
                "it holds a model in ONNX's format (`{name}`): give the folder of its safetensors checkpoint"
            ));
        }
        if self.has("tekken.json") {
            return Some(format!(
                "it holds Mistral's own tokenizer (`tekken.json`) and no `{CONFIG}`: give the checkpoint in the Hugging Face layout"
            ));
        }
        let inner = self
            .names
            .iter()
            .filter(|name| self.dir.join(name).join(CONFIG).is_file())
            .take(2);
        match inner.collect::<Vec<_>>()[..] {
            [inner] => Some(format!(
                "it holds no `{CONFIG}`, but the folder `{inner}` in it does: give that one"
            )),
            [_, _] => Some(format!(
                "it holds no `{CONFIG}`, but several folders in it do: give one of them"
            )),
            _ => None,
        }
    }

    /// The error message for a folder that `gristmill quantize` was writing when it ended.
    fn unfinished_message(&self) -> String {
        let record = self.json(QUANTIZE_RECORD);
        let layers = record["layers"].as_array().map_or(0, Vec::len);
        let to = record["identity"]["to"].as_str().unwrap_or("SCHEME");
        let to: String = to.chars().take(20).filter(|c| !c.is_control()).collect();
        format!(
            "`gristmill quantize` was interrupted while it wrote this folder ({layers} layers are done): run the same command once more, which finishes it (`gristmill quantize MODEL --to {to} --out {}`, with the options that it had)",
            self.dir.display()
        )
    }

    /// The error message for a GGUF file beside safetensors, where neither counts as the folder's model.
    fn gguf_message(&self) -> Option<String> {
        let gguf = *gguf::models(self.names.iter().map(String::as_str)).first()?;
        let other = self.find(|name| name.ends_with(".safetensors"))?;
        Some(format!(
            "it holds no `{CONFIG}`, and a GGUF file beside `{other}`: to run the GGUF file, name it (`{}`) in place of the folder",
            self.dir.join(gguf).display()
        ))
    }

    fn hub_cache_message(&self) -> String {
        let snapshots = self.dir.join("snapshots");
        let main = first_bytes(&self.dir.join("refs/main"));
        let main = String::from_utf8_lossy(&main).trim().to_string();
        let is_hash = !main.is_empty() && main.chars().all(|c| c.is_ascii_alphanumeric());
        let snapshot: Option<PathBuf> = if is_hash && snapshots.join(&main).is_dir() {
            Some(snapshots.join(main))
        } else {
            let mut all = std::fs::read_dir(&snapshots).into_iter().flatten().flatten();
            all.next().filter(|_| all.next().is_none()).map(|one| one.path())
        };
        match snapshot {
            Some(snapshot) => format!(
                "it is the hub cache's folder of a model: give the snapshot in it, `{}`",
                snapshot.display()
            ),
            None => "it is the hub cache's folder of a model: give one of the folders in its `snapshots`".into(),
        }
    }

    fn adapter_message(&self) -> String {
        let base = self.json("adapter_config.json")["base_model_name_or_path"]
            .as_str()
            .map(|base| {
                format!(
                    " `{}`",
                    base.chars().take(200).filter(|c| !c.is_control()).collect::<String>()
                )
            })
            .unwrap_or_default();
        if self.has(CONFIG) && self.has_weights() {
            format!(
                "it holds an adapter (`adapter_config.json`, of{base}) beside a model, and transformers would run the two together: put the \
             adapter's files into a folder of their own, and name it as the job's `adapter`"
            )
        } else {
            format!(
                "it is an adapter (`adapter_config.json`), which is no model without its base{base}: name that as the job's `model`, and \
             this as its `adapter`"
            )
        }
    }

    /// The error message for a checkpoint in the format of Meta's or Mistral's own code.
    fn native_layout_message(&self) -> Option<String> {
        let name = self.find(is_consolidated);
        let inner = self.has_folder("original").then_some("original");
        let name = name.or(inner)?;
        Some(format!(
            "it holds a checkpoint in the form of its maker's own code (`{name}`): give the one in the Hugging Face layout, with `{CONFIG}` and \
             `{WEIGHTS}` or its index"
        ))
    }

    /// The error for a folder with weights only in an unsupported format, which it names. `None`:
    /// there are no weights.
    fn other_weights_error(&self) -> Option<ModelError> {
        let unsupported = |message: String| Some(ModelError::unsupported(self.dir, message));
        if let Some(name) = self.find(is_shard) {
            return Some(ModelError::broken(
                self.dir,
                format!("`{INDEX}` is missing, which says what is in `{name}` and the others: fetch it"),
            ));
        }
        if self.find(is_consolidated).is_some()
            && let Some(message) = self.native_layout_message()
        {
            return unsupported(message);
        }
        if let Some(name) = self.find(|name| name.ends_with(".safetensors")) {
            return unsupported(format!(
                "there is neither `{WEIGHTS}` nor `{INDEX}`, only `{name}`: where that is the whole model, call it `{WEIGHTS}`"
            ));
        }
        // Files that a trainer writes beside the weights contain no weights.
        let is_trainer_file = |name: &str| {
            ["training_args", "optimizer", "scheduler", "rng_state"]
                .iter()
                .any(|s| name.starts_with(s))
        };
        let is_pickle = |name: &str| [".bin", ".pt", ".pth", ".ckpt"].iter().any(|end| name.ends_with(end));
        if let Some(name) = self.find(|name| is_pickle(name) && !is_trainer_file(name)) {
            return unsupported(format!(
                "the only weights are pickle files (`{name}`), which can run code when it is read; convert them to safetensors"
            ));
        }
        let is_other_framework = |name: &str| {
            [".onnx", ".h5", ".msgpack", ".npz", ".mlpackage", ".engine"]
                .iter()
                .any(|end| name.ends_with(end))
        };
        if let Some(name) = self.find(is_other_framework) {
            return unsupported(format!(
                "weights are there only for another framework (`{name}`): fetch or save them as safetensors"
            ));
        }
        None
    }

    /// Refuses Git LFS pointers in place of files, and links whose target is missing.
    fn check_files(&self) -> Result<(), ModelError> {
        let fixed_names = [
            CONFIG,
            TOKENIZER,
            "tokenizer_config.json",
            "generation_config.json",
            "special_tokens_map.json",
            "chat_template.jinja",
            WEIGHTS,
            INDEX,
        ];
        let shards = self.names.iter().map(String::as_str).filter(|name| is_shard(name));
        // A single weight file takes precedence over an index and its shards.
        let shards = shards.filter(|_| !self.has(WEIGHTS));
        // Other tokenizers are read where `tokenizer.json` is not there.
        let tokenizers = OTHER_TOKENIZERS.into_iter().filter(|_| !self.names.contains(TOKENIZER));
        for name in fixed_names
            .into_iter()
            .chain(shards)
            .chain(tokenizers)
            .filter(|name| self.names.contains(*name))
        {
            check_file(&self.dir.join(name))?;
        }
        Ok(())
    }
}

/// Refuses a Git LFS pointer in place of a file, and a link whose target is missing.
fn check_file(path: &Path) -> Result<(), ModelError> {
    if let Ok(link) = std::fs::read_link(path)
        && !path.exists()
    {
        let message = format!(
            "a link to `{}`, which is not there: copy the folder with the files that its links name (`cp -rL`), or fetch it again",
            link.display()
        );
        return Err(ModelError::broken(path, message));
    }
    let is_small = path
        .metadata()
        .is_ok_and(|file| file.is_file() && file.len() <= LFS_POINTER_BYTES_MAX);
    if is_small && first_bytes(path).starts_with(LFS_POINTER_PREFIX) {
        return Err(ModelError::broken(
            path,
            "a pointer of Git LFS in place of the file: run `git lfs pull` in its repository, or fetch the model again",
        ));
    }
    Ok(())
}

/// Whether a file is in Meta's or Mistral's own format (`consolidated.00.pth`,
/// `consolidated.safetensors`).
fn is_consolidated(name: &str) -> bool {
    name.starts_with("consolidated") && [".pth", ".pt", ".safetensors"].iter().any(|end| name.ends_with(end))
}

/// Whether a name has the form `model-00001-of-00002.safetensors`.
fn is_shard(name: &str) -> bool {
    let numbers = name
        .strip_prefix("model-")
        .and_then(|rest| rest.strip_suffix(".safetensors"));
    let numbers = numbers.and_then(|numbers| numbers.split_once("-of-"));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    numbers.is_some_and(|(number, count)| is_number(number) && is_number(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_names_are_distinguished_from_paths() {
        for (model, name) in [
            ("Qwen/Qwen3-8B", Some("Qwen/Qwen3-8B")),
            ("meta-llama/Llama-3.2-1B/", Some("meta-llama/Llama-3.2-1B")),
            ("models/a/b", None),
            ("./models", None),
            ("../models", None),
            ("~/models", None),
            ("/models/a", None),
            ("model", None),
            ("s3://bucket/model", None),
        ] {
            assert_eq!(hub_name(model), name, "{model}");
        }
    }

    #[test]
    fn shards_are_distinguished_from_other_files() {
        assert!(is_shard("model-00001-of-00002.safetensors"));
        for name in [
            "model.safetensors",
            "model-of-1.safetensors",
            "model-1-of-x.safetensors",
            "model-1-of-2.bin",
        ] {
            assert!(!is_shard(name), "{name}");
        }
    }
}
