//! The keys of `config.json`. Each key is used, known not to change answers, refused, or reported
//! as unknown.
//!
//! Keys that a family's own class in transformers never reads have no effect here, either; a
//! warning names those that are set. Options that come with their own tensors (biases, norms,
//! experts) need no entry, because unread tensors are refused by name.
//!
//! See docs/decisions/086-config-keys-stand-in-one-table.md.

use serde_json::{Map, Value};

use super::quantization::{self, TAKE_UNQUANTIZED};
use super::reader::{Reader, short};
use super::{Family, generation};
use crate::model::error::ModelError;

/// The values with which a key has no effect. Null and empty values always are neutral.
enum Neutral {
    /// False and 0 are neutral, too.
    Unset,
    /// False and this number are neutral, too; 0 is not.
    Only(f64),
    /// True and 0 are neutral, too; false is not.
    True,
}

use Neutral::{Only, True, Unset};

/// Keys that every family reads.
const USED: [&str; 19] = [
    "architectures",
    "eos_token_id",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
    "vocab_size",
];

/// Keys of quantized weights: of MLX, of compressed-tensors, and of all other formats.
const QUANTIZATION_KEYS: [&str; 3] = ["quantization", "compression_config", "quantization_config"];

/// Options of other models that change results.
const REFUSED: [(&str, Neutral); 63] = [
    (QUANTIZATION_KEYS[0], Unset),
    (QUANTIZATION_KEYS[1], Unset),
    (QUANTIZATION_KEYS[2], Unset),
    // Experts.
    ("moe_num_experts", Unset),
    ("n_routed_experts", Unset),
    ("num_experts", Unset),
    ("num_local_experts", Unset),
    ("routed_scaling_factor", Only(1.0)),
    // Scaling factors of Falcon-H1, Granite, MiniCPM, Cohere and others.
    ("attention_in_multiplier", Only(1.0)),
    ("attention_multiplier", Unset),
    ("attention_out_multiplier", Only(1.0)),
    ("attention_value_scale", Only(1.0)),
    ("dim_model_base", Unset),
    ("embedding_multiplier", Only(1.0)),
    ("embedding_scale", Only(1.0)),
    ("key_multiplier", Only(1.0)),
    ("lm_head_multiplier", Only(1.0)),
    ("logit_scale", Only(1.0)),
    ("logits_mup_width_multiplier", Only(1.0)),
    ("logits_scaling", Only(1.0)),
    ("mlp_multipliers", Unset),
    ("mup_enabled", Unset),
    ("residual_multiplier", Only(1.0)),
    ("scale_depth", Unset),
    ("scale_emb", Only(1.0)),
    ("scale_embedding", Unset),
    // Attention masks and forms of attention.
    ("add_cross_attention", Unset),
    ("alibi", Unset),
    ("attention_chunk_size", Unset),
    ("attn_temperature_tuning", Unset),
    ("attn_type", Unset),
    ("clip_qkv", Unset),
    ("cross_attention_layers", Unset),
    ("is_causal", True),
    ("is_encoder_decoder", Unset),
    ("kv_lora_rank", Unset),
    ("num_kv_shared_layers", Unset),
    ("prefix_lm", Unset),
    ("use_bidirectional_attention", Unset),
    ("use_mla", True),
    // Positions.
    ("layer_rope_theta", Unset),
    ("no_rope_layer_interval", Unset),
    ("no_rope_layers", Unset),
    ("rope_interleave", Unset),
    ("rope_interleaved", Unset),
    ("rope_ratio", Only(1.0)),
    ("rotary_dim", Unset),
    ("rotary_pct", Only(1.0)),
    ("use_mrope", Unset),
    ("use_rope", True),
    // The structure of a layer.
    ("hybrid_override_pattern", Unset),
    ("layers_block_type", Unset),
    ("logits_soft_cap", Unset),
    ("parallel_attn", Unset),
    ("per_layer_config", Unset),
    ("swiglu_alpha", Unset),
    ("swiglu_limit", Unset),
    ("use_bias", Unset),
    ("use_parallel_residual", Unset),
    ("use_qk_norm", Unset),
    // Keys that only Gemma 2 and 3 read.
    ("attn_logit_softcapping", Unset),
    ("final_logit_softcapping", Unset),
    ("query_pre_attn_scalar", Unset),
];

/// Keys of a multimodal model that hold the configurations of its parts. A text-only model must
/// have none of them.
const MULTIMODAL_PARTS: [&str; 3] = ["text_config", "vision_config", "audio_config"];
/// Other keys that only a multimodal model has at its top level.
const IMAGE_KEYS: [&str; 19] = [
    "audio_token_id",
    "boa_token_id",
    "boi_token_id",
    "boi_token_index",
    "eoa_token_id",
    "eoa_token_index",
    "eoi_token_id",
    "eoi_token_index",
    "image_token_id",
    "image_token_index",
    "mm_tokens_per_image",
    "multimodal_projector_bias",
    "projector_hidden_act",
    "spatial_merge_size",
    "video_token_id",
    "vision_end_token_id",
    "vision_feature_layer",
    "vision_soft_tokens_per_image",
    "vision_start_token_id",
];

/// Keys that change no answer: names, dates and versions, number formats (each tensor declares its
/// own), training, caches, outputs that are not requested, labels of other tasks. Keys of
/// `generation_config.json` are accepted, too, and checked with that file.
const HARMLESS: [&str; 67] = [
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "_commit_hash",
    "_flash_attn_2_enabled",
    "_name_or_path",
    // Written beside `layer_types`, and never read.
    "_sliding_window_pattern",
    "attention_dropout",
    "attn_implementation",
    "attn_pdrop",
    // Reported by its own warning.
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "dtype",
    "embd_pdrop",
    "embedding_dropout",
    "finetuning_task",
    "gradient_checkpointing",
    "hidden_dropout",
    "hidden_dropout_prob",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    // The format of recurrent states, which is F32 here in any case.
    "mamba_ssm_dtype",
    "max_sequence_length",
    "mlp_dropout",
    "model_max_length",
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
    "neftune_noise_alpha",
    "num_labels",
    "num_logits_to_keep",
    // Multi-token prediction layers. The model's own answers do not depend on them.
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "prefix",
    // Splits a matrix product, which changes only its rounding.
    "pretraining_tp",
    "problem_type",
    "pruned_heads",
    "resid_pdrop",
    "residual_dropout",
    "return_dict",
    // Training of routers.
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sep_token_id",
    "task_specific_params",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
    "use_return_dict",
];

/// Keys of a RoPE object. Its `rope_type` decides which of them apply.
const ROPE_KEYS: [&str; 19] = [
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    // Notes that training continued with this RoPE.
    "finetuned",
    "full_attention",
    "high_freq_factor",
    "long_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "short_factor",
    "sliding_attention",
    "truncate",
    "type",
];

/// Other keys of Ministral 3's RoPE object, whose second copies the key of the same name.
const MINISTRAL3_ROPE_KEYS: [&str; 2] = ["llama_4_scaling_beta", "max_position_embeddings"];

/// How the three positions of a token share the pairs of a head: those of a text's token are equal.
const TEXT_POSITION_KEYS: [&str; 2] = ["mrope_interleaved", "mrope_section"];

/// Keys of RoPE types that are not supported.
const OTHER_ROPE_KEYS: [(&str, Neutral); 6] = [
    ("alpha", Only(1.0)),
    ("attn_factor", Only(1.0)),
    ("extrapolation_factor", Only(1.0)),
    ("mrope_interleaved", Unset),
    ("mrope_section", Unset),
    ("scale", Only(1.0)),
];

impl Neutral {
    fn includes(&self, value: &Value) -> bool {
        match value {
            Value::Null => true,
            Value::Bool(flag) => *flag == matches!(self, True),
            Value::Number(x) => {
                let neutral = if let Only(number) = self { *number } else { 0.0 };
                x.as_f64() == Some(neutral)
            }
            Value::String(text) => text.is_empty(),
            Value::Array(items) => items.is_empty(),
            Value::Object(map) => map.is_empty(),
        }
    }
}

/// Unknown keys, each with its value.
#[derive(Default)]
pub(super) struct UnknownKeys(Vec<String>);

impl UnknownKeys {
    fn add(&mut self, prefix: &str, key: &str, value: &Value) {
        self.0.push(format!("`{prefix}{key}` ({})", short(value)));
    }
}

impl Reader<'_> {
    /// Checks every key of a text-only model, or of the text part of a multimodal model. `prefix`
    /// stands before the keys in messages.
    ///
    /// # Errors
    /// An option changes results and is not implemented.
    pub(super) fn check_keys(&self, family: Family, prefix: &str, unknown: &mut UnknownKeys) -> Result<(), ModelError> {
        let is_quantized = self.quantization()?.is_some();
        let known = |key: &str| {
            USED.contains(&key)
                || family.has_key(key)
                || HARMLESS.contains(&key)
                || generation::is_key(key)
                || (is_quantized && key == quantization::KEY)
        };
        for (key, value) in self.map {
            if known(key) {
                continue;
            }
            if MULTIMODAL_PARTS.contains(&key.as_str()) && !Unset.includes(value) {
                return Err(self.option(prefix, key, value));
            }
            self.check_key(prefix, (key, value), &REFUSED, unknown)?;
        }
        for name in ["rope_scaling", "rope_parameters"] {
            if let Some(Value::Object(map)) = self.get(name) {
                self.check_rope_keys(family, &format!("{prefix}{name}."), map, unknown)?;
            }
        }
        Ok(())
    }

    /// Checks every key at the top level of a multimodal model, except its parts.
    ///
    /// # Errors
    /// As [`check_keys`](Self::check_keys).
    pub(super) fn check_multimodal_keys(&self, unknown: &mut UnknownKeys) -> Result<(), ModelError> {
        let is_quantized = self.quantization()?.is_some();
        let known = |key: &str| {
            let own = ["architectures", "model_type", "eos_token_id", "tie_word_embeddings"];
            own.contains(&key)
                || MULTIMODAL_PARTS.contains(&key)
                || IMAGE_KEYS.contains(&key)
                || HARMLESS.contains(&key)
                || generation::is_key(key)
                || (is_quantized && key == quantization::KEY)
        };
        let rest = self.map.iter().filter(|(key, _)| !known(key));
        rest.into_iter()
            .try_for_each(|(key, value)| self.check_key("", (key, value), &REFUSED, unknown))
    }

    fn check_rope_keys(
        &self,
        family: Family,
        prefix: &str,
        map: &Map<String, Value>,
        unknown: &mut UnknownKeys,
    ) -> Result<(), ModelError> {
        for (key, value) in map {
            match value {
                Value::Object(inner) if ["full_attention", "sliding_attention"].contains(&key.as_str()) => {
                    self.check_rope_keys(family, &format!("{prefix}{key}."), inner, unknown)?;
                }
                _ if ROPE_KEYS.contains(&key.as_str()) => (),
                _ if family == Family::Ministral3 && MINISTRAL3_ROPE_KEYS.contains(&key.as_str()) => (),
                _ if family.has_delta_layers() && TEXT_POSITION_KEYS.contains(&key.as_str()) => (),
                value => self.check_key(prefix, (key, value), &OTHER_ROPE_KEYS, unknown)?,
            }
        }
        Ok(())
    }

    /// Checks a key that is neither used nor harmless.
    fn check_key(
        &self,
        prefix: &str,
        (key, value): (&String, &Value),
        refused: &[(&str, Neutral)],
        unknown: &mut UnknownKeys,
    ) -> Result<(), ModelError> {
        match refused.iter().find(|(name, _)| name == key) {
            Some((_, neutral)) if !neutral.includes(value) => Err(self.option(prefix, key, value)),
            None if !Unset.includes(value) => {
                unknown.add(prefix, key, value);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    pub(super) fn option(&self, prefix: &str, key: &str, value: &Value) -> ModelError {
        let remedy = if QUANTIZATION_KEYS.contains(&key) || prefix.starts_with(quantization::KEY) {
            format!("; {TAKE_UNQUANTIZED}")
        } else {
            String::new()
        };
        self.unsupported(format!(
            "option `{prefix}{key}` ({}) is not supported{remedy}",
            short(value)
        ))
    }

    /// Warnings about keys that have no effect.
    pub(super) fn key_warnings(&self, family: Family, unknown: UnknownKeys) -> Vec<String> {
        let (file, name) = (self.path.display(), family.name());
        let mut warnings = Vec::new();
        if !unknown.0.is_empty() {
            let keys = unknown.0.join(", ");
            warnings.push(format!("{file}: not known for {name}, and without effect: {keys}"));
        }
        if self.get("auto_map").is_some_and(|value| !Unset.includes(value)) {
            warnings.push(format!(
                "{file}: `auto_map` names code that comes with the checkpoint; it is not run, the model is computed as {name}"
            ));
        }
        warnings
    }
}
