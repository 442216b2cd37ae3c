//! A checkpoint's weights: one safetensors file, the safetensors files that an index lists, or GGUF files.
//! Pickle files are never read.

#![expect(unsafe_code, reason = "maps files into memory")]

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use data_encoding::HEXLOWER;
use memmap2::{Mmap, UncheckedAdvice};
use sha2::{Digest, Sha256};

use crate::device::{CodedMatrix, Dtype, Tensor};
use crate::gguf::GgufSet;
use crate::model::adapter::Adapter;
use crate::model::config::quantization_file;
use crate::model::error::ModelError;
use crate::model::gguf;
pub use crate::model::headers::{Header, Headers, TensorEntry};
use crate::model::headers::{missing, supported};
use crate::model::names::canonical_name;
use crate::model::quantized::{self, Problem, Quantization, StoredMatrix, codes_of_blocks, group_of_blocks};
use crate::model::random_weights::RandomWeights;
use crate::model::stored_form::StoredForm;
use crate::printable::printable_name;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Maximum size of the index: about 300,000 tensors.
const INDEX_BYTES_MAX: u64 = 64 << 20;
/// Pages of the files are released whenever so many bytes of tensors were handed out.
const RELEASE_BYTES: usize = 64 << 20;
/// Maximum number of files in an index.
const FILES_MAX: usize = 4096;

/// The source of a model's tensors: a checkpoint, or random numbers.
pub trait WeightSource: Sync {
    /// Reads the tensor `name`, which must have `rows` rows (`None` for a vector) of `columns`
    /// numbers.
    ///
    /// # Errors
    /// The tensor is missing, has another shape, or has an unsupported number format.
    fn tensor(&self, name: &str, rows: Option<usize>, columns: usize) -> Result<StoredTensor<'_>, ModelError>;
    /// A tensor of bytes, whose meaning its reader knows.
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor).
    fn bytes(&self, name: &str, _rows: usize, _columns: usize) -> Result<Cow<'_, [u8]>, ModelError> {
        Err(missing(self.path_of(name), name))
    }
    /// Columns of a group of the matrix `name`, if it is stored in codes of four bits that a device may keep.
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor).
    fn code_group(&self, _name: &str, _rows: usize, _columns: usize) -> Result<Option<usize>, ModelError> {
        Ok(None)
    }
    /// The codes of a matrix that has a [group](Self::code_group).
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor).
    fn codes(&self, name: &str, _rows: usize, _columns: usize) -> Result<CodedMatrix, ModelError> {
        Err(missing(self.path_of(name), name))
    }
    /// The file that holds `name`, for error messages.
    fn path_of(&self, name: &str) -> &Path;
    /// The name of the tensor `name` in its file, for error messages.
    fn shown(&self, name: &str) -> String {
        printable_name(name)
    }
    /// `Some`: the weights are random, and a device may generate them itself.
    fn random(&self) -> Option<&RandomWeights> {
        None
    }
    /// Whether matrices have INT8 numbers with a factor per row, as linear operations in INT8 have: then
    /// these numbers are the weights, and a balance would round them once more.
    fn is_int8_by_row(&self) -> bool {
        false
    }
    /// Adapters beside the weights, each for some sequences of a batch. `tensor` leaves them out.
    fn adapters_apart(&self) -> &[Adapter] {
        &[]
    }
    /// Whether the source returns tensors in the transformer's form, even for a family whose
    /// checkpoints store another.
    fn is_canonical(&self) -> bool {
        false
    }
}

/// A tensor's bytes with their shape; see [`Tensor`].
pub struct StoredTensor<'a> {
    pub dtype: Dtype,
    pub rows: usize,
    pub columns: usize,
    pub data: Cow<'a, [u8]>,
}

impl StoredTensor<'_> {
    /// The tensor in the form that the device reads.
    pub fn view(&self) -> Tensor<'_> {
        Tensor {
            dtype: self.dtype,
            rows: self.rows,
            columns: self.columns,
            data: &self.data,
        }
    }
}

/// The safetensors files of a checkpoint folder, or GGUF files. Tensors of a multimodal model's text part get the
/// names that they would have in a text-only model, and experts those of `expert_names.rs`.
///
/// Opening the files does not check that they hold the tensors of a model; see
/// [`Checkpoint`](super::Checkpoint).
pub struct Weights {
    headers: Headers,
    /// One mapping per file.
    maps: Vec<Mmap>,
    /// How matrices are quantized; see [`StoredForm`].
    quantization: Option<Quantization>,
    /// Changes of matrices.
    adapter: Option<Adapter>,
    /// Adapters that change the model for some sequences of a batch.
    apart: Vec<Adapter>,
    /// Bytes of tensors that were handed out so far.
    handed_out: AtomicUsize,
    /// Key: the tensor's canonical name.
    tensors: HashMap<String, TensorLocation>,
}

/// The location of a tensor.
pub(super) struct TensorLocation {
    file: usize,
    /// The name of the tensor in its file.
    pub(super) name: String,
}

impl Weights {
    /// Opens the weights in `dir`: `model.safetensors`, or else the files that
    /// `model.safetensors.index.json` lists.
    ///
    /// # Errors
    /// There are no weights, a header does not fit its file, or the index names something other
    /// than files of `dir`.
    pub fn open(dir: &Path, form: impl Into<StoredForm>) -> Result<Weights, ModelError> {
        if let Some(set) = gguf::open(dir)? {
            return Weights::of_gguf(set);
        }
        let form = form.into();
        let (names, index) = weight_files(dir)?;
        let mut files = Vec::new();
        let mut maps = Vec::new();
        for name in &names {
            let (file, map) = Header::open(dir.join(name), form.experts)?;
            files.push(file);
            maps.push(map);
        }
        let file_index: HashMap<&str, usize> = names.iter().enumerate().map(|(i, n)| (n.as_str(), i)).collect();
        let in_index = |(tensor, file): (String, String)| {
            let file = file_index[file.as_str()];
            let parts = files[file].split.get(&tensor).cloned();
            let names = parts.unwrap_or_else(|| vec![tensor]);
            names.into_iter().map(move |name| (name, file))
        };
        let index: Option<Vec<_>> = index.map(|index| index.into_iter().flat_map(in_index).collect());
        let mut stored: Vec<(&String, usize)> = match &index {
            Some(index) => index.iter().map(|(tensor, file)| (tensor, *file)).collect(),
            None => files[0].tensors.keys().map(|tensor| (tensor, 0)).collect(),
        };
        // If two tensors get one canonical name, the one that is stored by this name wins.
        stored.sort_by_key(|(name, _)| (canonical_name(name).is_none(), *name));
        let tensors = stored
            .into_iter()
            .map(|(name, file)| {
                let canonical = canonical_name(name).unwrap_or_else(|| name.clone());
                let name = name.clone();
                (canonical, TensorLocation { file, name })
            })
            .collect();
        let dir = dir.to_owned();
        Ok(Weights {
            headers: Headers { dir, files, index },
            maps,
            quantization: form.quantization,
            adapter: None,
            apart: Vec::new(),
            handed_out: AtomicUsize::new(0),
            tensors,
        })
    }

    fn of_gguf(set: GgufSet) -> Result<Weights, ModelError> {
        let architecture = gguf::Architecture::of(&set)?;
        let dir = set.path().to_owned();
        let (mut files, mut maps, mut tensors) = (Vec::new(), Vec::new(), HashMap::new());
        for (index, file) in set.files.into_iter().enumerate() {
            let header = gguf::header(&file, architecture)?;
            for name in header.tensors.keys() {
                let location = TensorLocation {
                    file: index,
                    name: name.clone(),
                };
                if tensors.insert(name.clone(), location).is_some() {
                    let why = format!("tensor `{}` is in another file of the set, too", printable_name(name));
                    return Err(ModelError::broken(&file.path, why));
                }
            }
            files.push(header);
            maps.push(file.map);
        }
        Ok(Weights {
            headers: Headers {
                dir,
                files,
                index: None,
            },
            maps,
            quantization: None,
            adapter: None,
            apart: Vec::new(),
            handed_out: AtomicUsize::new(0),
            tensors,
        })
    }

    pub fn headers(&self) -> &Headers {
        &self.headers
    }

    /// The weights with the changes of an adapter that was opened for this model.
    #[must_use]
    pub fn adapted(self, adapter: Adapter) -> Weights {
        Weights {
            adapter: Some(adapter),
            ..self
        }
    }

    /// The weights with adapters beside them, which were opened for this model.
    #[must_use]
    pub fn beside(self, apart: Vec<Adapter>) -> Weights {
        Weights { apart, ..self }
    }

    /// The number format in which most bytes of the weights are read. `None`: it is none that is
    /// supported.
    pub fn main_dtype(&self) -> Option<Dtype> {
        // What an adapter changes is read as F32, and it changes most matrices.
        if self.adapter.is_some() {
            return Some(Dtype::F32);
        }
        let entries = || self.headers.files.iter().flat_map(|file| file.tensors.values());
        let bytes = |dtype| -> usize {
            // Numbers of quantized matrices are read as F32, of 4 bytes each.
            let is_quantized = |entry: &TensorEntry| self.quantization.is_some() && supported(entry.dtype).is_none();
            let read = entries().map(|entry| {
                if is_quantized(entry) {
                    (Some(Dtype::F32), entry.bytes.len().saturating_mul(4))
                } else if entry.blocks.is_some() {
                    (Some(Dtype::F32), 4 * entry.shape.iter().product::<usize>())
                } else {
                    (supported(entry.dtype), entry.bytes.len())
                }
            });
            let of_dtype = read.filter(|(read_as, _)| *read_as == Some(dtype));
            of_dtype.map(|(_, bytes)| bytes).fold(0, usize::saturating_add)
        };
        let (most, dtype) = [Dtype::F32, Dtype::F16, Dtype::Bf16]
            .map(|dtype| (bytes(dtype), dtype))
            .into_iter()
            .max_by_key(|(bytes, _)| *bytes)?;
        (most > 0).then_some(dtype)
    }
}

impl Weights {
    /// The format of most numbers that are stored in blocks.
    pub fn main_blocks(&self) -> Option<crate::gguf::Format> {
        let mut numbers = BTreeMap::new();
        for entry in self.headers.files.iter().flat_map(|file| file.tensors.values()) {
            if let Some(format) = entry.blocks {
                *numbers.entry(format).or_insert(0usize) += entry.shape.iter().product::<usize>();
            }
        }
        numbers
            .into_iter()
            .max_by_key(|(_, count)| *count)
            .map(|(format, _)| format)
    }

    /// The header of the file that holds a tensor, and the tensor's location.
    pub(super) fn locate(&self, name: &str) -> Result<(&Header, &TensorLocation), ModelError> {
        let location = self.tensors.get(name);
        let location = location.ok_or_else(|| missing(self.path_of(name), name))?;
        Ok((&self.headers.files[location.file], location))
    }

    pub(super) fn data(&self, header: &Header, location: &TensorLocation) -> Cow<'_, [u8]> {
        let data = &self.maps[location.file][header.tensors[&location.name].bytes.clone()];
        let before = self.handed_out.fetch_add(data.len(), Ordering::Relaxed);
        if before / RELEASE_BYTES < (before + data.len()) / RELEASE_BYTES {
            self.release_pages();
        }
        Cow::Borrowed(data)
    }

    /// How the matrix `name` is quantized. `None`: it is stored plainly, or not at all.
    fn quantized_matrix(
        &self,
        name: &str,
        rows: Option<usize>,
        columns: usize,
    ) -> Result<Option<StoredMatrix>, ModelError> {
        let (Some(quantization), Some(rows)) = (self.quantization, rows) else {
            return Ok(None);
        };
        let lookup = |name: &str| {
            let (header, location) = self.locate(name).ok()?;
            Some((location.name.as_str(), &header.tensors[&location.name]))
        };
        let found = StoredMatrix::find(quantization, name, (rows, columns), &lookup);
        found.map_err(|problem| match problem {
            Problem::Missing(name) => missing(self.path_of(&name), &name),
            Problem::Wrong(why) => ModelError::broken(self.path_of(name), why),
        })
    }

    /// Unmaps the pages that were read, which the process would hold beside the loaded model until the
    /// files are closed.
    fn release_pages(&self) {
        for map in &self.maps {
            // SAFETY: the mapping is of a file and read-only, so a page that is needed still is read
            // from the file again.
            let advised = unsafe { map.unchecked_advise(UncheckedAdvice::DontNeed) };
            // Without it, loading takes more memory, and nothing else changes.
            advised.unwrap_or_else(|error| tracing::debug!("pages of the weights stay mapped: {error}"));
        }
    }
}

impl WeightSource for Weights {
    fn bytes(&self, name: &str, rows: usize, columns: usize) -> Result<Cow<'_, [u8]>, ModelError> {
        let (header, location) = self.locate(name)?;
        header.check_bytes(&location.name, rows, columns)?;
        Ok(self.data(header, location))
    }

    fn tensor(&self, name: &str, rows: Option<usize>, columns: usize) -> Result<StoredTensor<'_>, ModelError> {
        let tensor = self.plain_tensor(name, rows, columns)?;
        match &self.adapter {
            Some(adapter) => adapter.applied(name, tensor),
            None => Ok(tensor),
        }
    }

    fn adapters_apart(&self) -> &[Adapter] {
        &self.apart
    }

    fn is_int8_by_row(&self) -> bool {
        self.adapter.is_none() && quantized::is_int8_by_row(self.quantization, &self.headers)
    }

    fn code_group(&self, name: &str, rows: usize, columns: usize) -> Result<Option<usize>, ModelError> {
        if self.adapter.as_ref().is_some_and(|adapter| adapter.changes(name)) {
            return Ok(None);
        }
        if let Some(matrix) = self.quantized_matrix(name, Some(rows), columns)? {
            return self.group_of(&matrix);
        }
        let (header, location) = self.locate(name)?;
        let blocks = header.tensors[&location.name].blocks;
        Ok(blocks.and_then(|format| group_of_blocks(format, columns)))
    }

    fn codes(&self, name: &str, rows: usize, columns: usize) -> Result<CodedMatrix, ModelError> {
        if let Some(matrix) = self.quantized_matrix(name, Some(rows), columns)? {
            let group = self.group_of(&matrix)?;
            let group = group.ok_or_else(|| missing(self.path_of(name), name))?;
            return self.codes_of(&matrix, group);
        }
        let (header, location) = self.locate(name)?;
        header.check_tensor(&location.name, Some(rows), columns)?;
        Ok(codes_of_blocks(&self.data(header, location), rows, columns))
    }

    fn shown(&self, name: &str) -> String {
        self.headers.shown(name)
    }

    fn path_of(&self, name: &str) -> &Path {
        match self.tensors.get(name) {
            Some(location) => &self.headers.files[location.file].path,
            None => self.headers.path(),
        }
    }
}

impl Weights {
    /// A tensor as the checkpoint has it.
    fn plain_tensor(&self, name: &str, rows: Option<usize>, columns: usize) -> Result<StoredTensor<'_>, ModelError> {
        if let Some(matrix) = self.quantized_matrix(name, rows, columns)? {
            return self.quantized(&matrix);
        }
        let (header, location) = self.locate(name)?;
        let dtype = header.check_tensor(&location.name, rows, columns)?;
        let data = self.data(header, location);
        Ok(StoredTensor {
            dtype,
            rows: rows.unwrap_or(1),
            columns,
            data: match header.tensors[&location.name].blocks {
                Some(format) => Cow::Owned(format.to_f32(&data, columns)),
                None => data,
            },
        })
    }
}

/// A warning that the index beside `model.safetensors` is ignored. `None`: one of the two files
/// does not exist, or the index lists only `model.safetensors`, or the model is a GGUF file.
///
/// # Errors
/// The folder cannot be read.
pub fn ignored_index_warning(dir: &Path) -> Result<Option<String>, ModelError> {
    if !dir.is_dir() {
        return Ok(None);
    }
    let (single, index) = (dir.join(SINGLE), dir.join(INDEX));
    for path in [&single, &index] {
        if !path.try_exists().map_err(|e| ModelError::read(path, e))? {
            return Ok(None);
        }
    }
    if index_of(dir).is_ok_and(|(files, _)| files == [SINGLE]) {
        return Ok(None);
    }
    Ok(Some(format!(
        "`{}`: both `{SINGLE}` and `{INDEX}` are there: the first alone is read, as transformers does",
        dir.display()
    )))
}

/// (tensor, name of its file).
type IndexEntries = Vec<(String, String)>;

/// Names of the weight files, ascending, and the (tensor, file) entries of the index if it is used.
fn weight_files(dir: &Path) -> Result<(Vec<String>, Option<IndexEntries>), ModelError> {
    let exists = |name: &str| {
        let path = dir.join(name);
        path.try_exists().map_err(|e| ModelError::read(&path, e))
    };
    if exists(SINGLE)? {
        return Ok((vec![SINGLE.to_owned()], None));
    }
    if !exists(INDEX)? {
        return Err(no_weights_error(dir)?);
    }
    let (files, index) = index_of(dir)?;
    Ok((files, Some(index)))
}

/// Names of the files that the index lists, ascending, and the entries of the index.
fn index_of(dir: &Path) -> Result<(Vec<String>, IndexEntries), ModelError> {
    let path = dir.join(INDEX);
    let broken = |message: String| ModelError::broken(&path, message);
    let bytes = super::read_limited(&path, INDEX_BYTES_MAX)?;
    let index: serde_json::Value =
        serde_json::from_slice(&bytes).map_err(|e| broken(format!("not valid JSON: {e}")))?;
    let map = index
        .get("weight_map")
        .and_then(|m| m.as_object())
        .filter(|m| !m.is_empty());
    let mut entries = Vec::new();
    for (tensor, file) in map.ok_or_else(|| broken("has no `weight_map`".to_owned()))? {
        let name = file
            .as_str()
            .ok_or_else(|| broken(format!("tensor `{}` names no file", printable_name(tensor))))?;
        // Only plain names in this folder are allowed, so that an index cannot make gristmill read
        // other files.
        let is_plain = name.ends_with(".safetensors") && !name.contains(['/', '\\', '\0']) && !name.starts_with('.');
        if !is_plain {
            return Err(broken(format!(
                "tensor `{}` names `{}`, not a safetensors file of this folder",
                printable_name(tensor),
                printable_name(name)
            )));
        }
        entries.push((tensor.clone(), name.to_owned()));
    }
    let files: BTreeSet<String> = entries.iter().map(|(_, file)| file.clone()).collect();
    if files.len() > FILES_MAX {
        return Err(broken(format!("lists {} files, more than {FILES_MAX}", files.len())));
    }
    Ok((files.into_iter().collect(), entries))
}

/// The error for a folder without safetensors. It names pickled weights if there are any.
fn no_weights_error(dir: &Path) -> Result<ModelError, ModelError> {
    let mut pickles = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(|e| ModelError::read(dir, e))? {
        let name = entry
            .map_err(|e| ModelError::read(dir, e))?
            .file_name()
            .to_string_lossy()
            .into_owned();
        if [".bin", ".pt", ".pth", ".ckpt"].iter().any(|end| name.ends_with(end)) {
            pickles.push(name);
        }
    }
    pickles.sort();
    Ok(match pickles.first() {
        Some(pickle) => ModelError::unsupported(
            dir,
            format!(
                "the only weights are pickle files (`{pickle}` is one), which can run code when they are read: convert them to \
                 safetensors"
            ),
        ),
        None => ModelError::broken(dir, format!("there is neither `{SINGLE}` nor `{INDEX}`")),
    })
}

/// The hash (`hash_files`) of the files that determine a model's logits: `config.json`, then the file that
/// describes quantized weights in its place, if there is one, then the index if it is used, then the
/// weight files in the order of their names; or the files of a GGUF model.
///
/// # Errors
/// As [`Weights::open`], or a file cannot be read.
pub fn checkpoint_hash(dir: &Path) -> Result<String, ModelError> {
    if let Some(paths) = crate::gguf::paths(dir)? {
        return hash_files(&paths);
    }
    let (files, index) = weight_files(dir)?;
    let mut names = vec!["config.json".to_owned()];
    let described = quantization_file(dir)?;
    let described = described.as_deref().and_then(Path::file_name);
    names.extend(described.map(|name| name.to_string_lossy().into_owned()));
    names.extend(index.is_some().then(|| INDEX.to_owned()));
    names.extend(files);
    hash_files(&names.iter().map(|name| dir.join(name)).collect::<Vec<_>>())
}

/// SHA-256 over files. For each file the hash covers the name's length and the name (without its folder),
/// the file's size and its bytes (lengths in 8 bytes, little-endian). Lower-case hex.
///
/// # Errors
/// A file cannot be read.
pub(super) fn hash_files(paths: &[PathBuf]) -> Result<String, ModelError> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0u8; 1 << 20];
    for path in paths {
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        let (mut file, size) = crate::regular::open(path).map_err(|e| ModelError::read(path, e))?;
        hash.update((name.len() as u64).to_le_bytes());
        hash.update(name);
        hash.update(size.to_le_bytes());
        let mut left = size;
        loop {
            let n = file.read(&mut buffer).map_err(|e| ModelError::read(path, e))?;
            if n == 0 {
                break;
            }
            left = left.saturating_sub(n as u64);
            hash.update(&buffer[..n]);
        }
        if left > 0 {
            return Err(ModelError::broken(path, "the file shrank while it was read"));
        }
    }
    Ok(HEXLOWER.encode(&hash.finalize()))
}
