//! Models that keep latents (DeepSeek-V2, DeepSeek-V3) on an emulated card (tests/emulator). However rows are scheduled, each gets
//! the same bits.

use gristmill::device::{KvFormat, Precision};
use gristmill::model::config::Config;
use serde_json::json;

use crate::cuda_recurrent::{check, config, is_on_card};

fn small() -> Config {
    config(
        "DeepseekV2ForCausalLM",
        json!({"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": null, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": null, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "first_k_dense_replace": 1}),
    )
}

/// Latents that two warps share, read by groups of heads, and groups of experts.
fn large() -> Config {
    config(
        "DeepseekV3ForCausalLM",
        json!({"num_hidden_layers": 2, "num_attention_heads": 18, "num_key_value_heads": 18, "head_dim": null, "kv_lora_rank": 288,
            "qk_nope_head_dim": 16, "qk_rope_head_dim": 32, "v_head_dim": 16, "q_lora_rank": 48, "n_routed_experts": 8,
            "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 16,
            "first_k_dense_replace": 1}),
    )
}

#[test]
fn schedules_change_no_bit_of_latents() {
    if is_on_card("cuda_latents::schedules_change_no_bit_of_latents", "8.0") {
        check("V2", &small(), Precision::Bf16, KvFormat::Bf16);
        check("V2", &small(), Precision::Int8, KvFormat::Int8);
    }
}

#[test]
fn schedules_change_no_bit_of_latents_on_hopper() {
    if is_on_card("cuda_latents::schedules_change_no_bit_of_latents_on_hopper", "9.0") {
        check("V2", &small(), Precision::Fp8, KvFormat::Fp8);
        check("V3", &large(), Precision::Bf16, KvFormat::Bf16);
    }
}
