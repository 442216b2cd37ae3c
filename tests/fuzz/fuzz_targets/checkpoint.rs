//! Any bytes as one of a checkpoint's files: opening it never panics, and never believes a size.
#![no_main]

use gristmill::model::{Adapter, Checkpoint};
use gristmill::model::config::{Config, ExpertForm};
use gristmill::model::quantized::{Blocks, Method, Quantization};
use gristmill::model::stored_form::StoredForm;
use gristmill::tokenizer::Tokenizer;
use gristmill::model::weights::{WeightSource, Weights};
use libfuzzer_sys::fuzz_target;

const FILES: [&str; 7] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "adapter_config.json",
    "adapter_model.safetensors",
];

/// Of a model that weights are held against.
const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 2, "intermediate_size": 2, "num_hidden_layers": 1,
    "num_attention_heads": 1, "vocab_size": 2, "tie_word_embeddings": true}"#;

/// An adapter's two files, and a checkpoint without tensors.
const RANK: &[u8] = br#"{"peft_type": "LORA", "r": 1}"#;
const ADAPTER: &[u8] = b"\x02\0\0\0\0\0\0\0{}";
const EMPTY: &[u8] = ADAPTER;

fuzz_target!(|data: &[u8]| {
    let Some((&which, bytes)) = data.split_first() else { return };
    let name = FILES[which as usize % FILES.len()];
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(name), bytes).unwrap();
    let _ = Config::load(folder.path());
    let _ = Tokenizer::load(folder.path());
    let config = Config::parse(folder.path(), CONFIG).unwrap();
    let _ = Checkpoint::check(folder.path(), config.clone());
    // The other file of an adapter, and a checkpoint that it changes.
    if name.starts_with("adapter") {
        let other = if name == "adapter_config.json" { ("adapter_model.safetensors", ADAPTER) } else { ("adapter_config.json", RANK) };
        std::fs::write(folder.path().join(other.0), other.1).unwrap();
        std::fs::write(folder.path().join("model.safetensors"), EMPTY).unwrap();
        if let Ok(weights) = Weights::open(folder.path(), ExpertForm::Matrices) {
            let _ = Adapter::open(folder.path(), &config, &weights);
        }
    }
    let _ = Weights::open(folder.path(), ExpertForm::Transposed);
    let _ = Weights::open(folder.path(), ExpertForm::Mxfp4);
    let methods = [
        Method::Fp8,
        Method::CompressedTensors,
        Method::ModelOpt,
        Method::Awq,
        Method::Gptq { zeros_less_one: true },
        Method::BitsAndBytes,
    ];
    let blocks = Some(Blocks { rows: 1, columns: 2 });
    let quantized = methods.map(|method| {
        Some(Quantization {
            blocks,
            ..method.into()
        })
    });
    for quantization in [None].into_iter().chain(quantized) {
        let form = StoredForm {
            quantization,
            ..StoredForm::from(ExpertForm::Matrices)
        };
        let Ok(weights) = Weights::open(folder.path(), form) else { continue };
        // `a`: of seeds, and soon found.
        for name in ["a", "a.weight", "model.norm.weight"] {
            let _ = weights.tensor(name, Some(2), 3);
            let _ = weights.tensor(name, Some(8), 8);
            let _ = weights.tensor(name, None, 2);
        }
    }
});
