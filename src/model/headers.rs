//! The headers of a checkpoint's files: what tensors they say they hold.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::{SafeTensorError, SafeTensors};

use crate::device::Dtype;
use crate::gguf;
use crate::mapped::map;
use crate::model::config::ExpertForm;
use crate::model::error::ModelError;
use crate::model::expert_names;
use crate::model::gguf::{Architecture, stored_name};
use crate::printable::printable_name;

/// What describes a checkpoint of safetensors.
pub(super) const CONFIG_JSON: &str = "`config.json`";

/// The headers of a checkpoint's files, without the bytes of any tensor.
#[derive(Debug)]
pub struct Headers {
    pub dir: PathBuf,
    /// Ascending by file name.
    pub files: Vec<Header>,
    /// (tensor, index of its file in `files`). `None`: no index is used.
    pub index: Option<Vec<(String, usize)>>,
}

/// The header of one file.
#[derive(Debug)]
pub struct Header {
    pub path: PathBuf,
    /// A tensor of all experts of a layer is split into those of single experts.
    pub tensors: BTreeMap<String, TensorEntry>,
    /// For each tensor that was split, the names of its parts.
    pub(super) split: BTreeMap<String, Vec<String>>,
    /// What says which tensors a file must hold, for error messages.
    pub(super) described_by: &'static str,
    /// Of a GGUF file, whose tensors have other names, its architecture.
    pub(super) gguf: Option<Architecture>,
}

/// A tensor's entry in the header of its file.
#[derive(Debug)]
pub struct TensorEntry {
    /// Of numbers in blocks, `U8`.
    pub dtype: safetensors::Dtype,
    /// The format of numbers in blocks, which are read as F32.
    pub blocks: Option<gguf::Format>,
    pub shape: Vec<usize>,
    pub bytes: Range<usize>,
}

impl Headers {
    /// The path for an error about all files: the only file, else the folder.
    pub fn path(&self) -> &Path {
        match &self.files[..] {
            [file] => &file.path,
            _ => &self.dir,
        }
    }

    /// What says which tensors the files must hold.
    pub(super) fn described_by(&self) -> &'static str {
        self.files.first().map_or(CONFIG_JSON, |file| file.described_by)
    }

    /// The name of a tensor as it stands in the files, for error messages.
    pub(super) fn shown(&self, name: &str) -> String {
        shown(self.files.first().and_then(|file| file.gguf), name)
    }
}

fn shown(gguf: Option<Architecture>, name: &str) -> String {
    let stored = gguf.and_then(|architecture| stored_name(name, architecture));
    printable_name(stored.as_deref().unwrap_or(name))
}

impl Header {
    /// Checks the shape of the tensor `name`, which must have `rows` rows (`None` for a vector) of
    /// `columns` numbers. Returns its number format.
    ///
    /// # Errors
    /// The tensor is missing, has another shape, or has an unsupported number format.
    pub fn check_tensor(&self, name: &str, rows: Option<usize>, columns: usize) -> Result<Dtype, ModelError> {
        let dtype = self.check_shape(name, rows, columns)?;
        if self.tensors[name].blocks.is_some() {
            return Ok(Dtype::F32);
        }
        supported(dtype).ok_or_else(|| self.wrong_dtype(name, dtype, "F32, F16 and BF16 are read"))
    }

    /// As [`check_tensor`](Self::check_tensor), for a tensor of bytes.
    pub(super) fn check_bytes(&self, name: &str, rows: usize, columns: usize) -> Result<(), ModelError> {
        match self.check_shape(name, Some(rows), columns)? {
            safetensors::Dtype::U8 if self.tensors[name].blocks.is_none() => Ok(()),
            other => Err(self.wrong_dtype(name, other, "the bytes of quantized weights are U8")),
        }
    }

    fn wrong_dtype(&self, name: &str, dtype: safetensors::Dtype, read: &str) -> ModelError {
        let name = shown(self.gguf, name);
        ModelError::unsupported(&self.path, format!("tensor `{name}` is stored as {dtype:?}; {read}"))
    }

    pub(super) fn check_shape(
        &self,
        name: &str,
        rows: Option<usize>,
        columns: usize,
    ) -> Result<safetensors::Dtype, ModelError> {
        let Some(entry) = self.tensors.get(name) else {
            return Err(missing(&self.path, &shown(self.gguf, name)));
        };
        let expected: Vec<usize> = rows.into_iter().chain([columns]).collect();
        // A convolution of each channel by itself has a dimension of 1 between its two.
        let is_conv = name.ends_with(".conv1d.weight")
            && matches!(entry.shape[..], [first, 1, last] if expected == [first, last]);
        if entry.shape != expected && !is_conv {
            let shape = printable_name(&format!("{:?}", entry.shape));
            return Err(ModelError::broken(
                &self.path,
                format!(
                    "tensor `{}` has shape {shape}; {} makes it {expected:?}",
                    shown(self.gguf, name),
                    self.described_by
                ),
            ));
        }
        Ok(entry.dtype)
    }
}

/// The number format, if weights are read in it.
pub(super) fn supported(dtype: safetensors::Dtype) -> Option<Dtype> {
    match dtype {
        safetensors::Dtype::F32 => Some(Dtype::F32),
        safetensors::Dtype::F16 => Some(Dtype::F16),
        safetensors::Dtype::BF16 => Some(Dtype::Bf16),
        _ => None,
    }
}

pub(super) fn missing(path: &Path, name: &str) -> ModelError {
    ModelError::broken(path, format!("tensor `{}` is missing", printable_name(name)))
}

impl Header {
    pub(super) fn open(path: PathBuf, experts: ExpertForm) -> Result<(Header, Mmap), ModelError> {
        let map = map(&path).map_err(|e| ModelError::read(&path, e))?;
        let broken = |message: String| ModelError::broken(&path, format!("not a sound safetensors file: {message}"));
        let (header_bytes, metadata) = SafeTensors::read_metadata(&map).map_err(|error| {
            use SafeTensorError::{HeaderTooSmall, InvalidHeaderLength, MetadataIncompleteBuffer};
            let is_short = matches!(error, HeaderTooSmall | InvalidHeaderLength | MetadataIncompleteBuffer);
            let hint = if is_short {
                format!(
                    "; it has {} bytes: if its copy or download was cut off, fetch it again",
                    map.len()
                )
            } else {
                String::new()
            };
            broken(format!("{error}{hint}"))
        })?;
        // Eight bytes with the header's length precede the header.
        let start = 8 + header_bytes;
        let mut tensors = BTreeMap::new();
        let mut split = BTreeMap::new();
        for (name, info) in metadata.tensors() {
            let bytes = start.saturating_add(info.data_offsets.0)..start.saturating_add(info.data_offsets.1);
            if bytes.start > bytes.end || bytes.end > map.len() {
                return Err(broken(format!(
                    "tensor `{}` lies outside the file",
                    printable_name(&name)
                )));
            }
            let (dtype, shape) = (info.dtype, info.shape.clone());
            let entry = TensorEntry {
                dtype,
                blocks: None,
                shape,
                bytes,
            };
            let parts = match expert_names::split(experts, &name, &entry) {
                None => vec![(name, entry)],
                Some(parts) => {
                    split.insert(name, parts.iter().map(|(name, _)| name.clone()).collect());
                    parts
                }
            };
            for (name, entry) in parts {
                let what = printable_name(&name);
                if tensors.insert(name, entry).is_some() {
                    return Err(broken(format!(
                        "tensor `{what}` is stored twice, alone and with all experts"
                    )));
                }
            }
        }
        Ok((
            Header {
                path,
                tensors,
                split,
                described_by: CONFIG_JSON,
                gguf: None,
            },
            map,
        ))
    }
}
