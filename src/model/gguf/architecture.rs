//! The architectures of GGUF files that are read.

use crate::gguf::GgufSet;
use crate::model::error::ModelError;
use crate::printable::printable_name;

/// What `general.architecture` names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::model) enum Architecture {
    Llama,
    Qwen2,
    Qwen2Moe,
    Qwen3,
    Qwen3Moe,
    Gemma,
    Gemma2,
    Gemma3,
    Phi3,
    Olmo2,
    Olmoe,
    Granite,
    GraniteMoe,
    SmolLm3,
    CommandR,
    Cohere2,
    Glm4,
    GptOss,
    SeedOss,
    Exaone4,
    Ernie4_5,
    Glm4Moe,
}

use Architecture::{
    Cohere2, CommandR, Ernie4_5, Exaone4, Gemma, Gemma2, Gemma3, Glm4, Glm4Moe, GptOss, Granite, GraniteMoe, Llama,
    Olmo2, Olmoe, Phi3, Qwen2, Qwen2Moe, Qwen3, Qwen3Moe, SeedOss, SmolLm3,
};

const NAMES: [(Architecture, &str); 22] = [
    (Llama, "llama"),
    (Qwen2, "qwen2"),
    (Qwen2Moe, "qwen2moe"),
    (Qwen3, "qwen3"),
    (Qwen3Moe, "qwen3moe"),
    (Gemma, "gemma"),
    (Gemma2, "gemma2"),
    (Gemma3, "gemma3"),
    (Phi3, "phi3"),
    (Olmo2, "olmo2"),
    (Olmoe, "olmoe"),
    (Granite, "granite"),
    (GraniteMoe, "granitemoe"),
    (SmolLm3, "smollm3"),
    (CommandR, "command-r"),
    (Cohere2, "cohere2"),
    (Glm4, "glm4"),
    (GptOss, "gpt-oss"),
    (SeedOss, "seed_oss"),
    (Exaone4, "exaone4"),
    (Ernie4_5, "ernie4_5"),
    (Glm4Moe, "glm4moe"),
];

impl Architecture {
    /// The architecture of a model.
    ///
    /// # Errors
    /// The files hold something else than a model, or one of an architecture that is not read.
    pub(in crate::model) fn of(set: &GgufSet) -> Result<Architecture, ModelError> {
        let text = |key: &str| set.metadata().get(key).and_then(|value| value.text());
        if let Some(kind) = text("general.type").filter(|kind| *kind != "model") {
            return Err(ModelError::unsupported(
                set.path(),
                format!(
                    "it holds no model, but what `general.type` calls `{}`",
                    printable_name(kind)
                ),
            ));
        }
        let Some(name) = text("general.architecture") else {
            return Err(ModelError::broken(set.path(), "it has no `general.architecture`"));
        };
        let found = NAMES.iter().find(|(_, known)| name == *known);
        found.map(|(architecture, _)| *architecture).ok_or_else(|| {
            let known: Vec<&str> = NAMES.iter().map(|(_, known)| *known).collect();
            ModelError::unsupported(
                set.path(),
                format!(
                    "GGUF files of the architecture `{}` are not read; {} are: if the safetensors checkpoint that the file was made \
                     of is supported, give that",
                    printable_name(name),
                    known.join(", ")
                ),
            )
        })
    }

    pub(super) fn name(self) -> &'static str {
        NAMES
            .iter()
            .find(|(other, _)| *other == self)
            .map_or("", |(_, name)| name)
    }

    /// Whether rows of queries and keys were reordered when the file was made, so that neighbours
    /// rotate as pairs.
    pub(super) fn has_reordered_heads(self) -> bool {
        matches!(self, Llama | Granite | GraniteMoe | SmolLm3)
    }

    /// Whether `ffn_up` holds the rows of the gate before its own.
    pub(super) fn fuses_gate(self) -> bool {
        matches!(self, Phi3 | Glm4)
    }

    /// Whether the norm before the MLP is called so, and not for its place behind attention.
    pub(super) fn has_norms_around_mlp(self) -> bool {
        matches!(self, Gemma2 | Gemma3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_architecture_has_one_name() {
        for (index, (architecture, name)) in NAMES.iter().enumerate() {
            assert_eq!(architecture.name(), *name);
            assert_eq!(*architecture as usize, index);
        }
    }
}
