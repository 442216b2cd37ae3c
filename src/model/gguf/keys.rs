//! The metadata of a model's architecture. A key that was not asked for and is set is refused.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;

use crate::gguf::{GgufSet, Header, StoredTensor, Value};
use crate::model::error::ModelError;
use crate::printable::printable_name;

/// Namespaces of keys that describe the file, or are read elsewhere.
const OTHER_NAMESPACES: [&str; 4] = ["general", "split", "tokenizer", "quantize"];

/// Keys of any architecture that change no answer: sizes that tensors say, too, and how the model was
/// trained.
const HARMLESS: [&str; 4] = [
    "vocab_size",
    "rope.scaling.finetuned",
    "embedding_length_out",
    "n_ctx_orig",
];

/// A model's metadata.
pub(super) struct Keys<'a> {
    set: &'a GgufSet,
    /// The namespace of the architecture's keys.
    architecture: &'a str,
    /// Keys that were asked for.
    asked: RefCell<BTreeSet<String>>,
}

impl<'a> Keys<'a> {
    pub(super) fn new(set: &'a GgufSet, architecture: &'a str) -> Keys<'a> {
        Keys {
            set,
            architecture,
            asked: RefCell::default(),
        }
    }

    pub(super) fn path(&self) -> &Path {
        self.set.path()
    }

    pub(super) fn metadata(&self) -> &'a Header {
        self.set.metadata()
    }

    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        let full = self.full(key);
        let value = self.set.metadata().get(&full);
        self.asked.borrow_mut().insert(full);
        value
    }

    pub(super) fn broken(&self, key: &str, why: &str) -> ModelError {
        ModelError::broken(self.path(), format!("`{}` {why}", self.full(key)))
    }

    pub(super) fn unsupported(&self, key: &str, why: &str) -> ModelError {
        ModelError::unsupported(self.path(), format!("`{}` {why}", self.full(key)))
    }

    /// A whole number, which may be given for each layer, if it is the same for all.
    pub(super) fn whole(&self, key: &str) -> Result<Option<u64>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let value = match value.list() {
            None => value,
            Some([first, others @ ..]) if others.iter().all(|other| other == first) => first,
            Some(_) => return Err(self.unsupported(key, "differs by layer, which is not supported")),
        };
        let whole = value.whole();
        whole.map(Some).ok_or_else(|| self.broken(key, "is no whole number"))
    }

    pub(super) fn required(&self, key: &str) -> Result<u64, ModelError> {
        self.whole(key)?.ok_or_else(|| self.broken(key, "is missing"))
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.number().filter(|number| number.is_finite());
        number.map(Some).ok_or_else(|| self.broken(key, "is no number"))
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.text().map(Some).ok_or_else(|| self.broken(key, "is no text"))
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value
            .flag()
            .map(Some)
            .ok_or_else(|| self.broken(key, "is neither true nor false"))
    }

    /// Whether each layer has a window: given for each, or as the number of layers of which one has none.
    pub(super) fn pattern(&self, key: &str, layers: u64) -> Result<Option<Vec<bool>>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let list: Option<Vec<bool>> = match value.list() {
            Some(list) => list
                .iter()
                .map(|item| item.flag().or_else(|| Some(item.whole()? != 0)))
                .collect(),
            None => value.whole().map(|period| {
                (1..=layers)
                    .map(|layer| period == 0 || !layer.is_multiple_of(period))
                    .collect()
            }),
        };
        // Lists may be longer than the model has layers.
        let list = list.filter(|list| list.len() as u64 >= layers);
        let list = list.ok_or_else(|| self.broken(key, "says of no layer whether it has a window"))?;
        Ok(Some(list.into_iter().take(layers as usize).collect()))
    }

    /// The tensor of this name in any of the files, with its bytes.
    pub(super) fn tensor(&self, name: &str) -> Option<(&'a StoredTensor, &'a [u8])> {
        let mut files = self.set.files.iter();
        files.find_map(|file| {
            let tensor = file.header.tensor(name)?;
            Some((tensor, &file.map[tensor.bytes.clone()]))
        })
    }

    pub(super) fn has_tensor(&self, name: &str) -> bool {
        self.tensor(name).is_some()
    }

    /// Refuses keys of the architecture that nothing asked for, if they are set. Returns the keys of
    /// namespaces that are not known.
    ///
    /// # Errors
    /// A key is set that may change answers.
    pub(super) fn check(&self) -> Result<Vec<String>, ModelError> {
        let asked = self.asked.borrow();
        let mut unknown = Vec::new();
        for (key, value) in self.set.metadata().keys() {
            let (namespace, rest) = key.split_once('.').unwrap_or((key, ""));
            if namespace != self.architecture {
                if !OTHER_NAMESPACES.contains(&namespace) {
                    unknown.push(format!("`{}`", printable_name(key)));
                }
            } else if !asked.contains(key) && !HARMLESS.contains(&rest) && !is_neutral(value) {
                return Err(ModelError::unsupported(
                    self.path(),
                    format!(
                        "`{}` ({}) is not supported for this architecture",
                        printable_name(key),
                        shown(value)
                    ),
                ));
            }
        }
        Ok(unknown)
    }
}

/// Whether a value is that of an option which is not set.
fn is_neutral(value: &Value) -> bool {
    match value {
        Value::Bool(flag) => !flag,
        Value::Text(text) => text.is_empty(),
        Value::List(list) => list.iter().all(is_neutral),
        value => value.number() == Some(0.0),
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Bool(flag) => flag.to_string(),
        Value::Text(text) => printable_name(text),
        Value::List(list) => format!("{} values", list.len()),
        value => value.number().map(|number| number.to_string()).unwrap_or_default(),
    }
}
