//! The models that the service offers, by the names that clients use.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::regular;

/// Maximum size of a file of models.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// Maximum characters of a model's name.
const NAME_CHARS_MAX: usize = 256;

/// A model that the service offers.
#[derive(Debug, Clone)]
pub struct ServedModel {
    /// As clients name it in `model`.
    pub name: String,
    /// The address of its checkpoint: a folder's full path, `hf://…`, or a folder in a bucket.
    pub address: String,
    /// The job fields `precision`, `kv_cache`, `context`, `generate`, `shards` and `budget` that its
    /// batches have, as a job file would hold them.
    pub job: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelsFile {
    models: Vec<ModelFile>,
}

/// One entry of the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelFile {
    name: String,
    /// A path is relative to the file.
    model: String,
    precision: Option<Value>,
    kv_cache: Option<Value>,
    context: Option<Value>,
    generate: Option<Value>,
    shards: Option<Value>,
    budget: Option<Value>,
}

/// Reads a file of models (YAML).
///
/// # Errors
/// The file cannot be read, or holds something else than models.
pub fn load_models(path: &Path) -> Result<Vec<ServedModel>, String> {
    let at = |why: String| format!("`--models`: `{}`: {why}", path.display());
    let text = regular::read_text(path, FILE_BYTES_MAX).map_err(|error| at(error.to_string()))?;
    let here = std::env::current_dir().map_err(|error| at(error.to_string()))?;
    let folder = here.join(path.parent().unwrap_or(Path::new("")));
    parse(&text, &folder).map_err(at)
}

fn parse(text: &str, folder: &Path) -> Result<Vec<ServedModel>, String> {
    let file: ModelsFile = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
    if file.models.is_empty() {
        return Err("it lists no model".into());
    }
    let mut models: Vec<ServedModel> = Vec::new();
    for (n, entry) in file.models.into_iter().enumerate() {
        let at = |why: &str| format!("`models[{n}]`: {why}");
        if entry.name.is_empty() || entry.name.len() > NAME_CHARS_MAX {
            return Err(at(&format!("`name` needs 1 to {NAME_CHARS_MAX} characters")));
        }
        if models.iter().any(|model| model.name == entry.name) {
            return Err(at(&format!("there are two models named `{}`", entry.name)));
        }
        let fields = [
            ("precision", entry.precision),
            ("kv_cache", entry.kv_cache),
            ("context", entry.context),
            ("generate", entry.generate),
            ("shards", entry.shards),
            ("budget", entry.budget),
        ];
        let given = fields
            .into_iter()
            .filter_map(|(name, value)| Some((name.to_string(), value?)));
        models.push(ServedModel {
            name: entry.name,
            address: if entry.model.contains("://") {
                entry.model
            } else {
                folder.join(entry.model).display().to_string()
            },
            job: given.collect(),
        });
    }
    Ok(models)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_model_has_a_folder_beside_the_file_and_fields_of_a_job() {
        let text = "models:\n- name: demo\n  model: demo/model\n  precision: f32\n  generate: {max_tokens: 8}\n";
        let models = parse(text, Path::new("/srv")).unwrap();
        assert_eq!(models[0].address, "/srv/demo/model");
        let job = json!({"precision": "f32", "generate": {"max_tokens": 8}});
        assert_eq!(Value::from(models[0].job.clone()), job);
    }

    #[test]
    fn unusable_files_of_models_are_refused() {
        for (text, why) in [
            ("models: []", "no model"),
            (
                "models:\n- {name: a, model: x}\n- {name: a, model: y}",
                "two models named `a`",
            ),
            ("models:\n- {name: '', model: x}", "`name`"),
            ("models:\n- {name: a, model: x, prompt: y}", "prompt"),
            ("models:\n- {name: a}", "model"),
        ] {
            let error = parse(text, Path::new("/")).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
