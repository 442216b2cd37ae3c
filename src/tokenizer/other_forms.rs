//! Tokenizers in forms that are not read, recognised by file names.

use std::path::Path;

use crate::regular;

/// Describes the tokenizer of a folder without one in a form that is read. `None` if the folder has no known tokenizer.
pub(super) fn describe_other_format(dir: &Path) -> Option<String> {
    let names = regular::entry_names(dir).ok()?;
    let has = |name: &str| names.contains(name) && dir.join(name).is_file();
    let convert = "if transformers supports the model, it can write a `tokenizer.json`: \
                   `AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`";
    let is_code = |name: &&String| name.starts_with("tokenization_") && name.ends_with(".py");
    if let Some(name) = names.iter().find(is_code) {
        return Some(format!(
            "has its tokenizer only as Python code (`{name}`), which gristmill does not run: it needs a `tokenizer.json`"
        ));
    }
    (has("vocab.json") && has("merges.txt")).then(|| {
        format!(
            "has its tokenizer only as `vocab.json` and `merges.txt`, and gristmill reads `tokenizer.json`: {convert}"
        )
    })
}
