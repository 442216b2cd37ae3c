//! The folder that a quantized checkpoint is written to: a file of weights for each layer, so that an
//! interrupted run goes on with the next one, and `config.json` last.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensorError, SafeTensors};
use serde_json::{Map, Value, json};

use super::QuantizeError;
use super::form::OutTensor;
use crate::mapped::map;
use crate::model::error::ModelError;

/// What is written, and from what: a folder is gone on with for the same alone. At the end, the report.
const RECORD: &str = "quantize.json";
const INDEX: &str = "model.safetensors.index.json";
/// The key of a file's metadata that has the report of its layer.
const REPORT: &str = "gristmill_report";

/// The folder, and which tensors its files hold.
pub(super) struct OutFolder {
    path: PathBuf,
    files: usize,
    weight_map: Map<String, Value>,
    bytes: usize,
}

/// A tensor of a file: written anew, or as it is.
pub(super) enum FileTensor<'a> {
    New(OutTensor),
    Kept {
        name: &'a str,
        dtype: Dtype,
        shape: &'a [usize],
        data: Cow<'a, [u8]>,
    },
}

impl FileTensor<'_> {
    fn name(&self) -> &str {
        match self {
            FileTensor::New(tensor) => &tensor.name,
            FileTensor::Kept { name, .. } => name,
        }
    }

    fn view(&self) -> Result<TensorView<'_>, SafeTensorError> {
        match self {
            FileTensor::New(tensor) => TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.data),
            FileTensor::Kept { dtype, shape, data, .. } => TensorView::new(*dtype, shape.to_vec(), data),
        }
    }
}

impl OutFolder {
    /// Makes the folder, or goes on with one that was begun for the same `identity`. `files`: number of
    /// weight files.
    ///
    /// # Errors
    /// The folder holds something else, is finished, or cannot be written.
    pub(super) fn open(path: &Path, identity: &Value, files: usize) -> Result<OutFolder, QuantizeError> {
        fs::create_dir_all(path).map_err(|e| QuantizeError::write(path, e))?;
        let record = path.join(RECORD);
        match fs::read(&record) {
            Ok(bytes) => {
                let found: Value = serde_json::from_slice(&bytes).unwrap_or_default();
                let refuse = |why: &str| Err(QuantizeError::Refused(format!("`{}` {why}", path.display())));
                if found.get("identity") != Some(identity) {
                    return refuse(
                        "was begun for another model, scheme or calibration: give another folder, or remove it",
                    );
                }
                if found.get("layers").is_some() {
                    return refuse("is finished already");
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let mut entries = fs::read_dir(path).map_err(|e| ModelError::read(path, e))?;
                if entries.next().is_some() {
                    let why = format!("`{}` is not empty: give a new folder", path.display());
                    return Err(QuantizeError::Refused(why));
                }
                write(&record, json!({"identity": identity}).to_string().as_bytes())?;
            }
            Err(error) => return Err(ModelError::read(&record, error).into()),
        }
        Ok(OutFolder {
            path: path.to_owned(),
            files,
            weight_map: Map::new(),
            bytes: 0,
        })
    }

    fn file_name(&self, number: usize) -> String {
        format!("model-{:05}-of-{:05}.safetensors", number + 1, self.files)
    }

    /// The report of a file that an earlier run wrote. `None`: there is no such file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn written(&mut self, number: usize) -> Result<Option<Value>, QuantizeError> {
        let name = self.file_name(number);
        let path = self.path.join(&name);
        let bytes = match map(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(ModelError::read(&path, error).into()),
        };
        let broken =
            |e: SafeTensorError| QuantizeError::Refused(format!("`{}`: {e}: remove this file", path.display()));
        let (_, metadata) = SafeTensors::read_metadata(&bytes).map_err(broken)?;
        for (tensor, info) in metadata.tensors() {
            self.bytes += info.data_offsets.1 - info.data_offsets.0;
            self.weight_map.insert(tensor, name.clone().into());
        }
        let report = metadata.metadata().as_ref().and_then(|metadata| metadata.get(REPORT));
        Ok(report.map(|report| serde_json::from_str(report).unwrap_or_default()))
    }

    /// Writes a file of weights: whole, or not at all.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn write_weights(
        &mut self,
        number: usize,
        tensors: &[FileTensor<'_>],
        report: &Value,
    ) -> Result<(), QuantizeError> {
        let name = self.file_name(number);
        let path = self.path.join(&name);
        let unwritable = |e: SafeTensorError| QuantizeError::Refused(format!("cannot write `{}`: {e}", path.display()));
        let mut views = Vec::new();
        for tensor in tensors {
            let view = tensor.view().map_err(unwritable)?;
            self.bytes += view.data().len();
            self.weight_map.insert(tensor.name().to_owned(), name.clone().into());
            views.push((tensor.name(), view));
        }
        let metadata = HashMap::from([
            ("format".to_owned(), "pt".to_owned()),
            (REPORT.to_owned(), report.to_string()),
        ]);
        let temporary = path.with_extension("tmp");
        // Like any file that this user makes; the library alone would hide it from others.
        let file = fs::File::create(&temporary).map_err(|e| QuantizeError::write(&temporary, e))?;
        let permissions = file
            .metadata()
            .map_err(|e| QuantizeError::write(&temporary, e))?
            .permissions();
        safetensors::serialize_to_file(views, Some(metadata), &temporary).map_err(unwritable)?;
        fs::set_permissions(&temporary, permissions).map_err(|e| QuantizeError::write(&temporary, e))?;
        fs::rename(&temporary, &path).map_err(|e| QuantizeError::write(&path, e))
    }

    /// Writes the index, copies what is no weight from the folder `model`, and writes `config.json` and the
    /// report, which end the folder.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub(super) fn finish(self, model: &Path, description: Value, record: &Value) -> Result<(), QuantizeError> {
        let index = json!({"metadata": {"total_size": self.bytes}, "weight_map": self.weight_map});
        write(&self.path.join(INDEX), pretty(&index).as_bytes())?;
        let entries = fs::read_dir(model).map_err(|e| ModelError::read(model, e))?;
        for entry in entries {
            let entry = entry.map_err(|e| ModelError::read(model, e))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if is_copied(&name) && entry.path().is_file() {
                let target = self.path.join(&name);
                fs::copy(entry.path(), &target).map_err(|e| QuantizeError::write(&target, e))?;
            }
        }
        let source = model.join("config.json");
        let text = fs::read(&source).map_err(|e| ModelError::read(&source, e))?;
        let mut config: Map<String, Value> = serde_json::from_slice(&text)
            .map_err(|e| QuantizeError::Refused(format!("`{}`: {e}", source.display())))?;
        config.insert("quantization_config".into(), description);
        write(
            &self.path.join("config.json"),
            pretty(&Value::Object(config)).as_bytes(),
        )?;
        write(&self.path.join(RECORD), pretty(record).as_bytes())
    }
}

/// Whether a file of a model's folder is copied: tokenizers, templates, sampling values, licences.
fn is_copied(name: &str) -> bool {
    let ends = [".json", ".jinja", ".txt", ".model", ".tiktoken", ".md"];
    let stays = ["config.json", INDEX, RECORD, "README.md"];
    let is_licence = ["LICENSE", "LICENCE", "NOTICE"]
        .iter()
        .any(|start| name.starts_with(start));
    (ends.iter().any(|end| name.ends_with(end)) || is_licence) && !name.starts_with('.') && !stays.contains(&name)
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

/// Writes a file: whole, or not at all.
fn write(path: &Path, bytes: &[u8]) -> Result<(), QuantizeError> {
    let temporary = path.with_extension("tmp");
    fs::write(&temporary, bytes)
        .and_then(|()| fs::rename(&temporary, path))
        .map_err(|e| QuantizeError::write(path, e))
}
