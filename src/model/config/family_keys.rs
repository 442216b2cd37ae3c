//! The keys of `config.json` that only some families read.

use super::{Family, minimax};

/// Keys that all families read whose experts are routed as DeepSeek's.
const ROUTING_KEYS: [&str; 11] = [
    "attention_bias",
    "hidden_act",
    "moe_intermediate_size",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "num_local_experts",
    "routed_scaling_factor",
    "topk_group",
];

/// Keys that all families with latents read besides those.
const LATENT_KEYS: [&str; 7] = [
    "kv_lora_rank",
    "q_lora_rank",
    // The sum of its two parts. The classes of transformers compute it anew.
    "qk_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "topk_method",
    "v_head_dim",
];

/// Keys that all families with delta networks read.
const DELTA_KEYS: [&str; 9] = [
    "attention_bias",
    "attn_output_gate",
    "full_attention_interval",
    "hidden_act",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
];

impl Family {
    /// Whether this family reads `key`, which not every family reads.
    pub(super) fn has_key(self, key: &str) -> bool {
        self.keys().contains(&key)
            || self.has_delta_layers() && DELTA_KEYS.contains(&key)
            || self.routes_as_deepseek() && ROUTING_KEYS.contains(&key)
            || self.has_latents() && LATENT_KEYS.contains(&key)
            || self == Family::MiniMaxM2 && minimax::FACTORS.contains(&key)
    }

    /// Keys that this family reads besides those that every family reads.
    #[expect(clippy::too_many_lines, reason = "a table")]
    fn keys(self) -> &'static [&'static str] {
        match self {
            Family::Llama => &["attention_bias", "hidden_act", "mlp_bias"],
            Family::Mistral | Family::Ministral | Family::Ministral3 | Family::Phi3 => {
                &["hidden_act", "sliding_window"]
            }
            Family::Mixtral => &[
                "hidden_act",
                "num_experts",
                "num_experts_per_tok",
                "num_local_experts",
                "sliding_window",
            ],
            Family::Qwen3Moe => &[
                "attention_bias",
                "decoder_sparse_step",
                "hidden_act",
                // Windows are refused by `use_sliding_window`; these keys would only shape them.
                "max_window_layers",
                "sliding_window",
                "mlp_only_layers",
                "moe_intermediate_size",
                "norm_topk_prob",
                "num_experts",
                "num_experts_per_tok",
                "num_local_experts",
                "use_qk_norm",
                "use_sliding_window",
            ],
            Family::Qwen2Moe => &[
                "decoder_sparse_step",
                "hidden_act",
                // As for Qwen 3 MoE.
                "max_window_layers",
                "sliding_window",
                "mlp_only_layers",
                "moe_intermediate_size",
                "norm_topk_prob",
                "num_experts",
                "num_experts_per_tok",
                "qkv_bias",
                "shared_expert_intermediate_size",
                "use_sliding_window",
            ],
            Family::Qwen3_5Moe => &[
                "moe_intermediate_size",
                "num_experts",
                "num_experts_per_tok",
                "shared_expert_intermediate_size",
            ],
            Family::Qwen3Next => &[
                "decoder_sparse_step",
                "mlp_only_layers",
                "moe_intermediate_size",
                "norm_topk_prob",
                "num_experts",
                "num_experts_per_tok",
                "shared_expert_intermediate_size",
            ],
            Family::Glm4Moe => &["first_k_dense_replace", "use_qk_norm"],
            Family::DeepseekV2 => &[
                // Training of routers, and how experts were divided among devices.
                "aux_loss_alpha",
                "ep_size",
                "first_k_dense_replace",
                "mlp_bias",
                "moe_layer_freq",
                "num_experts",
                "scoring_func",
                "seq_aux",
            ],
            Family::DeepseekV3 => &[
                "aux_loss_alpha",
                "ep_size",
                "first_k_dense_replace",
                "moe_layer_freq",
                "rope_interleave",
                "scoring_func",
                "seq_aux",
            ],
            Family::Glm4MoeLite => &[
                "first_k_dense_replace",
                "mlp_layer_types",
                "moe_layer_freq",
                "rope_interleave",
                "scoring_func",
            ],
            Family::MiniMaxM2 => &[
                "attn_type_list",
                "hidden_act",
                // The width of an earlier model's plain MLP.
                "mlp_intermediate_size",
                // Layers that predict further tokens, and how each is made.
                "mtp_transformer_layers",
                "num_mtp_modules",
                "use_mtp",
                "num_experts",
                "num_experts_per_tok",
                "num_local_experts",
                "qk_norm_type",
                "rotary_dim",
                "scoring_func",
                "shared_intermediate_size",
                // How a shared expert would be weighted. There is none.
                "shared_moe_mode",
                "use_qk_norm",
                "use_routing_bias",
            ],
            Family::NemotronH => &[
                "attention_head_dim",
                // How the reference divides sequences into pieces, which changes only its rounding.
                "chunk_size",
                "conv_kernel",
                // The number and size of heads say how wide a recurrent layer is.
                "expand",
                "hybrid_override_pattern",
                "layer_norm_epsilon",
                "layers_block_type",
                "mamba_head_dim",
                "mamba_hidden_act",
                "mamba_num_groups",
                "mamba_num_heads",
                "mamba_proj_bias",
                // The format of recurrent states, which is F32 here in any case.
                "mamba_ssm_cache_dtype",
                "mamba_state_dim",
                "mlp_bias",
                "mlp_hidden_act",
                "moe_latent_size",
                "moe_shared_expert_intermediate_size",
                // Whether devices compute the shared expert beside the others.
                "moe_shared_expert_overlap",
                // The layers that predict further tokens.
                "mtp_hybrid_override_pattern",
                "mtp_layers_block_type",
                "n_groups",
                "norm_eps",
                // How weights were made at first.
                "rescale_prenorm_residual",
                "time_step_floor",
                "time_step_max",
                "time_step_min",
                "time_step_rank",
                // The stream is in F32 between layers, or in BF16 as everything else is.
                "residual_in_fp32",
                "ssm_state_size",
                "time_step_limit",
                "use_bias",
                "use_conv_bias",
                // Which program computes a layer.
                "use_mamba_kernels",
            ],
            Family::Llama4 => &[
                "attention_bias",
                "attention_chunk_size",
                "attn_scale",
                "attn_temperature_tuning",
                "cache_implementation",
                "floor_scale",
                // Whether experts were unfolded to be quantized.
                "for_llm_compressor",
                "hidden_act",
                "interleave_moe_layer_step",
                "intermediate_size_mlp",
                "moe_layers",
                "no_rope_layer_interval",
                "no_rope_layers",
                "num_experts",
                "num_experts_per_tok",
                "num_local_experts",
                "use_qk_norm",
            ],
            Family::Ernie4_5 | Family::Qwen3_5 => &["hidden_act"],
            Family::Ernie4_5Moe => &[
                "hidden_act",
                "moe_intermediate_size",
                "moe_k",
                "moe_layer_end_index",
                "moe_layer_interval",
                "moe_layer_start_index",
                "moe_norm_min",
                "moe_num_experts",
                "moe_num_shared_experts",
                "num_experts",
                "num_experts_per_tok",
            ],
            Family::Olmoe => &[
                "attention_bias",
                "hidden_act",
                "norm_topk_prob",
                "num_experts",
                "num_experts_per_tok",
            ],
            Family::GptOss => &[
                "attention_bias",
                "experts_per_token",
                "hidden_act",
                // The length before YaRN, which the RoPE object says, too.
                "initial_context_length",
                "num_experts",
                "num_experts_per_tok",
                "num_local_experts",
                "quantization_config",
                "sliding_window",
                "swiglu_alpha",
                "swiglu_limit",
            ],
            Family::SmolLm3 => &[
                "attention_bias",
                "hidden_act",
                // Published models have it from Qwen's configuration; the family's class does not read it.
                "max_window_layers",
                "mlp_bias",
                "no_rope_layer_interval",
                "no_rope_layers",
                "sliding_window",
                "use_sliding_window",
            ],
            Family::Granite => &[
                "attention_bias",
                "attention_multiplier",
                "embedding_multiplier",
                "hidden_act",
                "logits_scaling",
                "mlp_bias",
                "residual_multiplier",
            ],
            Family::GraniteMoe | Family::GraniteMoeShared => &[
                "attention_bias",
                "attention_multiplier",
                "embedding_multiplier",
                "hidden_act",
                "logits_scaling",
                "num_experts_per_tok",
                "num_local_experts",
                "residual_multiplier",
                "shared_intermediate_size",
            ],
            Family::GraniteMoeHybrid => &[
                "attention_bias",
                "attention_multiplier",
                "embedding_multiplier",
                "hidden_act",
                // How the reference divides sequences into pieces, which changes only its rounding.
                "mamba_chunk_size",
                "mamba_conv_bias",
                "mamba_d_conv",
                "mamba_d_head",
                "mamba_d_state",
                "mamba_expand",
                "mamba_n_groups",
                "mamba_n_heads",
                "mamba_proj_bias",
                // The class has RMS norms, whatever this key says.
                "normalization_function",
                "num_experts_per_tok",
                "num_local_experts",
                "logits_scaling",
                "position_embedding_type",
                "residual_multiplier",
                "shared_intermediate_size",
                "time_step_limit",
            ],
            Family::SeedOss => &["attention_bias", "attention_out_bias", "hidden_act", "mlp_bias"],
            Family::Glm | Family::Glm4 | Family::Olmo2 => &["attention_bias", "hidden_act"],
            Family::Olmo3 => &["attention_bias", "hidden_act", "sliding_window"],
            Family::Cohere => &["attention_bias", "hidden_act", "layer_norm_eps", "logit_scale"],
            Family::Cohere2 => &[
                "attention_bias",
                "hidden_act",
                "layer_norm_eps",
                "logit_scale",
                "sliding_window",
                "sliding_window_pattern",
            ],
            Family::Exaone4 => &["hidden_act", "sliding_window", "sliding_window_pattern"],
            // Qwen 2 has biases of queries, keys and values, whatever its configuration says.
            Family::Qwen2 | Family::Qwen3 => &[
                "attention_bias",
                "hidden_act",
                "max_window_layers",
                "sliding_window",
                "use_sliding_window",
            ],
            Family::Gemma => &["attention_bias", "hidden_act", "hidden_activation"],
            Family::Gemma2 => &[
                "attention_bias",
                "attn_logit_softcapping",
                "final_logit_softcapping",
                // The first release's names, which the family's class no longer reads.
                "hidden_act",
                "sliding_window_size",
                "hidden_activation",
                "query_pre_attn_scalar",
                "sliding_window",
            ],
            Family::Gemma3 => &[
                "attention_bias",
                // Gemma 3's attention has no soft cap, whatever this key says.
                "attn_logit_softcapping",
                "final_logit_softcapping",
                "hidden_act",
                "hidden_activation",
                "query_pre_attn_scalar",
                "rope_local_base_freq",
                "sliding_window",
                "sliding_window_pattern",
            ],
            Family::Gemma4 => &[
                "attention_bias",
                "attention_k_eq_v",
                "enable_moe_block",
                "final_logit_softcapping",
                "global_head_dim",
                "hidden_activation",
                "hidden_size_per_layer_input",
                "moe_intermediate_size",
                "num_experts",
                "num_global_key_value_heads",
                "num_kv_shared_layers",
                "per_layer_config",
                "sliding_window",
                "top_k_experts",
                "use_bidirectional_attention",
                "use_double_wide_mlp",
                "vocab_size_per_layer_input",
            ],
        }
    }
}
