//! The folder that a quantized checkpoint is written to: a file of weights for each layer, so that an
//! interrupted run goes on with the next one, and `config.json` last.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use data_encoding::HEXLOWER;
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensorError, SafeTensors};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::form::OutTensor;
use super::{LayerReport, QuantizeError};
use crate::mapped::map;
use crate::model::error::ModelError;
use crate::model::folder::QUANTIZE_RECORD;
use crate::replace::{replace, sync_folder_of};

const INDEX: &str = "model.safetensors.index.json";

/// The folder, and which tensors its files hold.
pub(super) struct OutFolder {
    path: PathBuf,
    files: usize,
    record: Record,
    weight_map: BTreeMap<String, String>,
    bytes: usize,
    /// Locked as long as this is open.
    _locked: File,
}

#[derive(Serialize, Deserialize)]
struct Record {
    identity: Value,
    /// Columns that share a factor, where groups do.
    group: Option<usize>,
    finished: bool,
    /// What rounding changed in the layers that are done.
    layers: Vec<LayerReport>,
    /// SHA-256 in hex of the files of weights that are done, by their names.
    #[serde(default)]
    files: BTreeMap<String, String>,
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
    /// Whether a run of this command has begun the folder.
    pub(super) fn is_begun(path: &Path) -> bool {
        path.join(QUANTIZE_RECORD).exists()
    }

    /// Makes the folder, or goes on with one that was begun for the same `identity`. `files`: number of
    /// weight files.
    ///
    /// # Errors
    /// Another process writes the folder, or it holds something else, or cannot be written.
    pub(super) fn open(
        path: &Path,
        identity: &Value,
        group: Option<usize>,
        files: usize,
    ) -> Result<OutFolder, QuantizeError> {
        fs::create_dir_all(path).map_err(|e| QuantizeError::write(path, e))?;
        let refuse = |why: String| QuantizeError::Refused(format!("`{}` {why}", path.display()));
        let mut folder = OutFolder {
            path: path.to_owned(),
            files,
            record: Record {
                identity: identity.clone(),
                group,
                finished: false,
                layers: Vec::new(),
                files: BTreeMap::new(),
            },
            weight_map: BTreeMap::new(),
            bytes: 0,
            _locked: locked(path)?,
        };
        match fs::read(path.join(QUANTIZE_RECORD)) {
            Ok(bytes) => {
                let begun: Record = serde_json::from_slice(&bytes).map_err(|e| {
                    refuse(format!(
                        "has a `{QUANTIZE_RECORD}` that is none of this command's ({e}): give a new folder"
                    ))
                })?;
                if begun.identity != *identity {
                    let why = "was begun for another model, scheme or calibration: give another folder, or remove it";
                    return Err(refuse(why.to_owned()));
                }
                folder.record = begun;
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let mut entries = fs::read_dir(path).map_err(|e| ModelError::read(path, e))?;
                if entries.next().is_some() {
                    return Err(refuse("is not empty: give a new folder".to_owned()));
                }
                folder.write_record()?;
            }
            Err(error) => return Err(ModelError::read(&path.join(QUANTIZE_RECORD), error).into()),
        }
        Ok(folder)
    }

    fn write_record(&self) -> Result<(), QuantizeError> {
        let record = serde_json::to_value(&self.record).map_err(|e| QuantizeError::Refused(e.to_string()))?;
        write(&self.path.join(QUANTIZE_RECORD), pretty(&record).as_bytes())
    }

    /// What rounding changed in the layers that are done, ascending.
    pub(super) fn layers(&self) -> &[LayerReport] {
        &self.record.layers
    }

    fn file_name(&self, number: usize) -> String {
        format!("model-{:05}-of-{:05}.safetensors", number + 1, self.files)
    }

    /// Reads which tensors the file of a layer that is done holds. `false`: the layer is not done, or its file is not whole.
    pub(super) fn goes_on_behind(&mut self, layer: usize) -> bool {
        if self.record.layers.iter().all(|report| report.layer != layer) {
            return false;
        }
        let is_whole = self.note_tensors(layer + 1);
        if !is_whole {
            let path = self.path.join(self.file_name(layer + 1));
            tracing::warn!(
                "`{}` is missing, or is not what was written: it is written again",
                path.display()
            );
            self.record.layers.retain(|report| report.layer != layer);
        }
        is_whole
    }

    /// Whether a run before this one has written everything, and all of it is there.
    pub(super) fn is_whole(&mut self) -> bool {
        let are_there = ["config.json", INDEX].iter().all(|name| self.path.join(name).exists());
        self.record.finished && are_there && self.record.layers.len() + 1 == self.files && self.note_tensors(0)
    }

    /// Notes the tensors of a file of weights. `false`: it is missing, or other bytes than were written.
    fn note_tensors(&mut self, number: usize) -> bool {
        let name = self.file_name(number);
        let Ok(bytes) = map(&self.path.join(&name)) else {
            return false;
        };
        if self.record.files.get(&name) != Some(&sha256(&bytes)) {
            return false;
        }
        let Ok(tensors) = SafeTensors::deserialize(&bytes) else {
            return false;
        };
        for (tensor, view) in tensors.tensors() {
            self.bytes += view.data().len();
            self.weight_map.insert(tensor, name.clone());
        }
        true
    }

    /// Writes the file of a layer, and that it is done.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn write_layer(&mut self, tensors: &[FileTensor<'_>], report: LayerReport) -> Result<(), QuantizeError> {
        self.write_weights(report.layer + 1, tensors)?;
        self.record.layers.push(report);
        self.record.layers.sort_by_key(|report| report.layer);
        self.write_record()
    }

    /// Writes a file of weights: whole, or not at all.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn write_weights(&mut self, number: usize, tensors: &[FileTensor<'_>]) -> Result<(), QuantizeError> {
        let name = self.file_name(number);
        let path = self.path.join(&name);
        let unwritable = |e: SafeTensorError| match e {
            SafeTensorError::IoError(e) => QuantizeError::write(&path, e),
            other => QuantizeError::Refused(format!("cannot write `{}`: {other}", path.display())),
        };
        let mut views = Vec::new();
        for tensor in tensors {
            let view = tensor.view().map_err(unwritable)?;
            self.bytes += view.data().len();
            self.weight_map.insert(tensor.name().to_owned(), name.clone());
            views.push((tensor.name(), view));
        }
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let temporary = path.with_extension("tmp");
        // Like any file that this user makes; the library alone would hide it from others.
        let file = File::create(&temporary).map_err(|e| QuantizeError::write(&temporary, e))?;
        let permissions = file
            .metadata()
            .map_err(|e| QuantizeError::write(&temporary, e))?
            .permissions();
        safetensors::serialize_to_file(views, Some(metadata), &temporary).map_err(unwritable)?;
        fs::set_permissions(&temporary, permissions).map_err(|e| QuantizeError::write(&temporary, e))?;
        // On the disk before the record names it: the library gives the file its whole length first.
        sync(&temporary)?;
        let hash = map(&temporary).map(|bytes| sha256(&bytes));
        let hash = hash.map_err(|e| ModelError::read(&temporary, e))?;
        self.record.files.insert(name, hash);
        fs::rename(&temporary, &path).map_err(|e| QuantizeError::write(&path, e))?;
        sync_folder_of(&path).map_err(|e| QuantizeError::write(&path, e))
    }

    /// Writes the index, copies what is no weight from the folder `model`, and writes `config.json` and the
    /// report, which end the folder.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub(super) fn finish(mut self, model: &Path, description: Value) -> Result<(), QuantizeError> {
        let index = json!({"metadata": {"total_size": self.bytes}, "weight_map": self.weight_map});
        write(&self.path.join(INDEX), pretty(&index).as_bytes())?;
        let entries = fs::read_dir(model).map_err(|e| ModelError::read(model, e))?;
        for entry in entries {
            let entry = entry.map_err(|e| ModelError::read(model, e))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if is_copied(&name) && entry.path().is_file() {
                let target = self.path.join(&name);
                fs::copy(entry.path(), &target).map_err(|e| QuantizeError::write(&target, e))?;
                sync(&target)?;
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
        self.record.finished = true;
        self.write_record()
    }
}

/// Whether a file of a model's folder is copied: tokenizers, templates, sampling values, licences.
fn is_copied(name: &str) -> bool {
    let ends = [".json", ".jinja", ".txt", ".model", ".tiktoken", ".md"];
    let stays = ["config.json", INDEX, QUANTIZE_RECORD, "README.md"];
    let is_licence = ["LICENSE", "LICENCE", "NOTICE"]
        .iter()
        .any(|start| name.starts_with(start));
    (ends.iter().any(|end| name.ends_with(end)) || is_licence) && !name.starts_with('.') && !stays.contains(&name)
}

fn sha256(bytes: &[u8]) -> String {
    HEXLOWER.encode(&Sha256::digest(bytes))
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

/// Locks the folder until the returned file is closed, with the process at the latest.
fn locked(folder: &Path) -> Result<File, QuantizeError> {
    let file = File::open(folder).map_err(|e| ModelError::read(folder, e))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(QuantizeError::Refused(format!(
            "another process quantizes into `{}`: wait for it, or give another folder",
            folder.display()
        ))),
        Err(TryLockError::Error(e)) => Err(QuantizeError::write(folder, e)),
    }
}

/// Waits until a file is on the disk.
fn sync(path: &Path) -> Result<(), QuantizeError> {
    let synced = File::open(path).and_then(|file| file.sync_all());
    synced.map_err(|e| QuantizeError::write(path, e))
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), QuantizeError> {
    let written = replace(path, bytes).and_then(|()| sync_folder_of(path));
    written.map_err(|e| QuantizeError::write(path, e))
}
