//! Names of tensors: those in a checkpoint's files, and those by which models are built.

use super::{block_names, expert_names, quantized};

/// Name prefixes of a multimodal model's text part, each with the prefix in a text-only model.
const TEXT_PARTS: [(&str, &str); 3] = [
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
];

/// The name that a tensor of a multimodal model's text part would have in a text-only model.
/// `None`: the tensor has that name already, or belongs to another part.
pub(super) fn text_only_name(name: &str) -> Option<String> {
    TEXT_PARTS
        .iter()
        .find_map(|(prefix, text_only)| Some(format!("{text_only}{}", name.strip_prefix(prefix)?)))
}

/// The name by which the model reads a tensor. `None`: the name by which it is stored.
pub(super) fn canonical_name(name: &str) -> Option<String> {
    let text_only = text_only_name(name);
    let inner = text_only.as_deref().unwrap_or(name);
    let general = expert_names::general_name(inner).or_else(|| block_names::general_name(inner));
    let general = general.or(text_only);
    quantized::matrix_name(general.as_deref().unwrap_or(name)).or(general)
}

/// Maximum length of a tensor's name in an error message, in characters.
const NAME_CHARS_MAX: usize = 120;

/// A tensor's name or other text from a file, escaped and cut so that it fits on one line.
pub(super) fn printable_name(text: &str) -> String {
    let text: String = text
        .chars()
        .take(NAME_CHARS_MAX + 1)
        .flat_map(char::escape_debug)
        .collect();
    match text.char_indices().nth(NAME_CHARS_MAX) {
        None => text,
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}
