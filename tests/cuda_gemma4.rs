//! Gemma 4 on an emulated card (tests/emulator): layers with heads of two sizes in shared blocks, experts beside MLPs, inputs of
//! layers, and layers that read what others have stored. However rows are scheduled, each gets the same bits.

use std::path::Path;

use gristmill::device::{KvFormat, Precision};
use gristmill::model::config::Config;
use serde_json::{Value, json};

use crate::cuda_recurrent::{VOCABULARY, check, is_on_card};

fn config(own: Value) -> Config {
    let mut map = json!({
        "architectures": ["Gemma4ForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5, "sliding_window": 20,
        "max_position_embeddings": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0,
    });
    map.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    Config::parse(Path::new("config.json"), &map.to_string()).unwrap()
}

const KINDS: [&str; 2] = ["sliding_attention", "full_attention"];

/// As the 31B: two layers without windows take the room of one with a window.
fn dense() -> Config {
    config(
        json!({"num_hidden_layers": 4, "layer_types": [KINDS[0], KINDS[1], KINDS[0], KINDS[1]],
        "attention_k_eq_v": true, "num_global_key_value_heads": 1, "global_head_dim": 16}),
    )
}

fn experts() -> Config {
    config(
        json!({"num_hidden_layers": 2, "layer_types": KINDS, "global_head_dim": 32, "enable_moe_block": true,
        "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}),
    )
}

/// As the E2B, with heads that two warps share.
fn inputs() -> Config {
    config(
        json!({"num_hidden_layers": 4, "layer_types": [KINDS[0], KINDS[1], KINDS[0], KINDS[1]],
        "num_kv_shared_layers": 2, "use_double_wide_mlp": true, "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY, "num_key_value_heads": 1, "global_head_dim": 288}),
    )
}

#[test]
fn schedules_change_no_bit_of_gemma_4() {
    if is_on_card("cuda_gemma4::schedules_change_no_bit_of_gemma_4", "8.9") {
        check("31B", &dense(), Precision::Bf16, KvFormat::Bf16);
        check("26B-A4B", &experts(), Precision::Int8, KvFormat::Int8);
        check("E2B", &inputs(), Precision::Fp8, KvFormat::Fp8);
    }
}

#[test]
fn schedules_change_no_bit_of_gemma_4_on_hopper() {
    if is_on_card("cuda_gemma4::schedules_change_no_bit_of_gemma_4_on_hopper", "9.0") {
        check("31B", &dense(), Precision::Int8, KvFormat::Int8);
        check("E2B", &inputs(), Precision::Bf16, KvFormat::Bf16);
    }
}
