//! Published model shapes by name, for benchmarks without a checkpoint. Only sizes are real;
//! weights are random.
//!
//! Sizes are those of each model's published `config.json`.

use std::path::Path;

use serde_json::json;

use crate::model::config::Config;
use crate::model::error::ModelError;

/// The fields of a shape's `config.json`.
struct ModelShape {
    name: &'static str,
    architecture: &'static str,
    hidden: u32,
    layers: u32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    intermediate: u32,
    vocabulary: u32,
    rope_theta: f64,
    norm_eps: f64,
    tied: bool,
    context: u32,
    /// Attention window in tokens. `None`: the family's default.
    window: Option<u32>,
}

const LLAMA: &str = "LlamaForCausalLM";
const QWEN2: &str = "Qwen2ForCausalLM";
const QWEN3: &str = "Qwen3ForCausalLM";
const MISTRAL: &str = "MistralForCausalLM";
const GEMMA2: &str = "Gemma2ForCausalLM";
const GEMMA3: &str = "Gemma3ForCausalLM";

#[rustfmt::skip]
const SHAPES: [ModelShape; 10] = [
    // A small model of our own, for machines where the others take too long.
    ModelShape { name: "l30m", architecture: LLAMA, hidden: 384, layers: 8, heads: 6, kv_heads: 2, head_dim: 64, intermediate: 1024, vocabulary: 32_000, rope_theta: 10_000.0, norm_eps: 1e-5, tied: true, context: 4096, window: None },
    ModelShape { name: "qwen2.5-0.5b", architecture: QWEN2, hidden: 896, layers: 24, heads: 14, kv_heads: 2, head_dim: 64, intermediate: 4864, vocabulary: 151_936, rope_theta: 1e6, norm_eps: 1e-6, tied: true, context: 32_768, window: None },
    ModelShape { name: "llama-3.1-8b", architecture: LLAMA, hidden: 4096, layers: 32, heads: 32, kv_heads: 8, head_dim: 128, intermediate: 14_336, vocabulary: 128_256, rope_theta: 5e5, norm_eps: 1e-5, tied: false, context: 131_072, window: None },
    ModelShape { name: "llama-3.1-70b", architecture: LLAMA, hidden: 8192, layers: 80, heads: 64, kv_heads: 8, head_dim: 128, intermediate: 28_672, vocabulary: 128_256, rope_theta: 5e5, norm_eps: 1e-5, tied: false, context: 131_072, window: None },
    ModelShape { name: "qwen3-8b", architecture: QWEN3, hidden: 4096, layers: 36, heads: 32, kv_heads: 8, head_dim: 128, intermediate: 12_288, vocabulary: 151_936, rope_theta: 1e6, norm_eps: 1e-6, tied: false, context: 40_960, window: None },
    ModelShape { name: "qwen3-32b", architecture: QWEN3, hidden: 5120, layers: 64, heads: 64, kv_heads: 8, head_dim: 128, intermediate: 25_600, vocabulary: 151_936, rope_theta: 1e6, norm_eps: 1e-6, tied: false, context: 40_960, window: None },
    ModelShape { name: "mistral-7b", architecture: MISTRAL, hidden: 4096, layers: 32, heads: 32, kv_heads: 8, head_dim: 128, intermediate: 14_336, vocabulary: 32_768, rope_theta: 1e6, norm_eps: 1e-5, tied: false, context: 32_768, window: None },
    ModelShape { name: "qwen3-0.6b", architecture: QWEN3, hidden: 1024, layers: 28, heads: 16, kv_heads: 8, head_dim: 128, intermediate: 3072, vocabulary: 151_936, rope_theta: 1e6, norm_eps: 1e-6, tied: true, context: 40_960, window: None },
    ModelShape { name: "gemma-2-9b", architecture: GEMMA2, hidden: 3584, layers: 42, heads: 16, kv_heads: 8, head_dim: 256, intermediate: 14_336, vocabulary: 256_000, rope_theta: 1e4, norm_eps: 1e-6, tied: true, context: 8192, window: None },
    ModelShape { name: "gemma-3-4b", architecture: GEMMA3, hidden: 2560, layers: 34, heads: 8, kv_heads: 4, head_dim: 256, intermediate: 10_240, vocabulary: 262_208, rope_theta: 1e6, norm_eps: 1e-6, tied: true, context: 131_072, window: Some(1024) },
];

/// Names that [`named`] knows.
pub fn names() -> impl Iterator<Item = &'static str> {
    SHAPES.iter().map(|shape| shape.name)
}

/// The configuration of a published model. `None`: the name is unknown.
///
/// # Errors
/// Names from [`names`] cause no error, because their sizes are a valid configuration.
pub fn named(name: &str) -> Result<Option<Config>, ModelError> {
    let Some(shape) = SHAPES.iter().find(|shape| shape.name == name) else {
        return Ok(None);
    };
    let mut text = json!({
        "architectures": [shape.architecture],
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": shape.context,
    });
    if let Some(window) = shape.window {
        text["sliding_window"] = window.into();
    }
    Config::parse(Path::new(shape.name), &text.to_string()).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::size::ModelSize;

    #[test]
    fn every_shape_has_the_size_that_its_name_says() {
        for (name, millions) in [
            ("l30m", 25),
            ("qwen2.5-0.5b", 494),
            ("llama-3.1-8b", 8_030),
            ("llama-3.1-70b", 70_554),
            ("qwen3-8b", 8_191),
            ("qwen3-32b", 32_762),
            ("mistral-7b", 7_248),
            ("qwen3-0.6b", 596),
            ("gemma-2-9b", 9_241),
            ("gemma-3-4b", 3_880),
        ] {
            let config = named(name).unwrap().unwrap();
            let found = ModelSize::of(&config).parameters() as f64 / 1e6;
            assert!(
                (found / f64::from(millions) - 1.0).abs() < 0.01,
                "{name}: {found:.0} million"
            );
        }
        assert_eq!(names().count(), 10);
        assert!(named("llama").unwrap().is_none());
    }
}
