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
