//! Tests with headers built in memory; no file is written.

use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde_json::{Value, json};

use super::*;
use crate::model::weights::{Header, TensorEntry};

fn config(changes: Value) -> Config {
    let mut text = json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 20, "tie_word_embeddings": true
    });
    text.as_object_mut()
        .unwrap()
        .extend(changes.as_object().unwrap().clone());
    Config::parse(Path::new("config.json"), &text.to_string()).unwrap()
}

fn entry(shape: &[usize]) -> TensorEntry {
    TensorEntry {
        dtype: Dtype::BF16,
        blocks: None,
        shape: shape.to_vec(),
        bytes: 0..0,
    }
}

/// One file with the tensors of `config`.
fn headers(config: &Config) -> Headers {
    let all = ModelTensors::of(config);
    let tensors = all.all().map(|spec| {
        let shape: Vec<usize> = spec.rows.into_iter().chain([spec.columns]).collect();
        (spec.name.clone(), entry(&shape))
    });
    Headers {
        dir: PathBuf::from("m"),
        files: vec![Header {
            path: PathBuf::from("m/model.safetensors"),
            tensors: tensors.collect(),
            split: BTreeMap::new(),
            described_by: crate::model::headers::CONFIG_JSON,
            gguf: None,
        }],
        index: None,
    }
}

/// `headers` in two files with their index. Norms are in the second file.
fn sharded(headers: Headers) -> Headers {
    let mut files = [1, 2].map(|number| Header {
        path: PathBuf::from(format!("m/model-{number}.safetensors")),
        tensors: BTreeMap::new(),
        split: BTreeMap::new(),
        described_by: crate::model::headers::CONFIG_JSON,
        gguf: None,
    });
    let mut index = Vec::new();
    for (name, entry) in headers.files.into_iter().flat_map(|file| file.tensors) {
        let file = usize::from(name.contains("norm"));
        index.push((name.clone(), file));
        files[file].tensors.insert(name, entry);
    }
    Headers {
        dir: headers.dir,
        files: files.into(),
        index: Some(index),
    }
}

#[track_caller]
fn refused(config: &Config, headers: &Headers, words: &[&str]) {
    let line = check_headers(config, headers).unwrap_err().to_string();
    assert!(!line.contains('\n') && line.len() < 400, "not one clear line: {line}");
    for word in words {
        assert!(line.contains(word), "`{word}` is missing in: {line}");
    }
}

/// The valid headers with an additional vector for each of `names`.
fn with(config: &Config, names: &[&str]) -> Headers {
    let mut headers = headers(config);
    for name in names {
        headers.files[0].tensors.insert((*name).to_owned(), entry(&[8]));
    }
    headers
}

#[test]
fn models_as_described_pass() {
    for changes in [
        json!({}),
        json!({"attention_bias": true, "mlp_bias": true}),
        json!({"architectures": ["Qwen2ForCausalLM"]}),
        json!({"architectures": ["Qwen3ForCausalLM"]}),
        json!({"architectures": ["Gemma2ForCausalLM"]}),
        json!({"architectures": ["Gemma3ForCausalLM"]}),
    ] {
        let config = config(changes);
        assert!(!check_headers(&config, &headers(&config)).unwrap());
        assert!(!check_headers(&config, &sharded(headers(&config))).unwrap());
        let untied = Config {
            tied_embeddings: false,
            ..config.clone()
        };
        // The stored head decides, whatever the configuration says.
        assert!(check_headers(&untied, &headers(&untied)).unwrap());
        assert!(check_headers(&config, &headers(&untied)).unwrap());
        assert!(!check_headers(&untied, &headers(&config)).unwrap());
    }
}

#[test]
fn what_nothing_reads_is_refused_by_name_and_reason() {
    let c = config(json!({}));
    for (name, words) in [
        (
            "model.layers.1.self_attn.q_proj.bias",
            "is a bias of `q_proj`, and `config.json` describes none",
        ),
        ("lm_head.bias", "is a bias of `lm_head`"),
        ("model.layers.0.self_attn.q_norm.weight", "norm of queries or keys"),
        ("model.layers.0.self_attn.k_norm.weight", "norm of queries or keys"),
        ("model.layers.2.input_layernorm.weight", "a layer above the 2"),
        ("model.layers.61.eh_proj.weight", "a layer above the 2"),
        ("score.weight", "scores or classifies"),
        ("v_head.summary.weight", "scores or classifies"),
        ("model.layers.0.self_attn.q_proj.weight_scale", "quantized"),
        ("model.layers.0.self_attn.k_scale", "quantized"),
        ("model.layers.0.mlp.up_proj.g_idx", "quantized"),
        ("model.layers.0.mlp.up_proj.input_scale", "quantized"),
        (
            "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4",
            "quantized",
        ),
        ("model.layers.0.mlp.up_proj.lora_A.weight", "LoRA"),
        ("model.layers.0.mlp.experts.0.up_proj.weight", "read by no part"),
        ("model.layers.0.mlp.gate_proj.weight.2", "read by no part"),
        ("vision_tower.patch.weight", "read by no part"),
        ("model.layers.0.self_attn.xrotary_emb.inv_freq", "read by no part"),
        ("model.rotary_emb.inv_freq.weight", "read by no part"),
    ] {
        refused(&c, &with(&c, &[name]), &[name, words, "m/model.safetensors"]);
    }
    let two = [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.self_attn.q_proj.bias",
    ];
    refused(&c, &with(&c, &two), &[two[0], "and 1 more that nothing reads"]);
    // A bias that the configuration describes is read.
    let biased = config(json!({"attention_bias": true}));
    check_headers(&biased, &headers(&biased)).unwrap();
    refused(&c, &headers(&biased), &["k_proj.bias", "and 7 more"]);
}

#[test]
fn foreign_names_are_cut_and_stay_in_their_line() {
    let c = config(json!({}));
    let name = format!("a\nb{}", "x".repeat(100_000));
    refused(&c, &with(&c, &[&name]), &["a\\nb", "…"]);
}

#[test]
fn harmless_tensors_pass() {
    let c = config(json!({}));
    for name in [
        "model.rotary_emb.inv_freq",
        "rotary_emb.inv_freq",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.1.self_attn.rotary_emb.cos_cached",
        "model.layers.1.self_attn.rotary_emb.sin_cached",
    ] {
        assert!(!check_headers(&c, &with(&c, &[name])).unwrap(), "{name}");
        // An index may omit harmless tensors, or list them in the wrong file.
        let mut headers = sharded(headers(&c));
        headers.files[1].tensors.insert(name.to_owned(), entry(&[8]));
        check_headers(&c, &headers).unwrap();
        headers.index.as_mut().unwrap().push((name.to_owned(), 0));
        check_headers(&c, &headers).unwrap();
    }
}

#[test]
fn of_a_model_that_sees_images_the_text_part_is_held_against_the_configuration() {
    let c = config(json!({"architectures": ["Gemma3ForCausalLM"]}));
    for (prefix, parts) in [
        ("language_model.model.", ["vision_tower.a", "multi_modal_projector.b"]),
        (
            "model.language_model.",
            ["model.vision_tower.a", "model.multi_modal_projector.b"],
        ),
    ] {
        let renamed = |more: &[&str]| {
            let mut headers = headers(&c);
            let tensors = std::mem::take(&mut headers.files[0].tensors);
            headers.files[0].tensors = tensors
                .into_iter()
                .map(|(name, entry)| (name.replacen("model.", prefix, 1), entry))
                .chain(more.iter().map(|name| ((*name).to_owned(), entry(&[8]))))
                .collect();
            headers
        };
        check_headers(&c, &renamed(&parts)).unwrap();
        let bias = format!("{prefix}layers.0.self_attn.q_proj.bias");
        refused(&c, &renamed(&[parts[0], &bias]), &[&bias, "bias of `q_proj`"]);
        refused(&c, &renamed(&["audio_tower.a"]), &["audio_tower.a", "read by no part"]);
        let twice = ["model.norm.weight"];
        refused(
            &c,
            &renamed(&twice),
            &["model.norm.weight", prefix, "remove the wrong one"],
        );
    }
    let head = "language_model.lm_head.weight";
    let mut headers = headers(&c);
    headers.files[0].tensors.insert(head.to_owned(), entry(&[20, 8]));
    assert!(check_headers(&c, &headers).unwrap());
}

#[test]
fn what_is_missing_or_does_not_fit_is_refused() {
    let c = config(json!({}));
    let name = "model.layers.1.mlp.up_proj.weight";
    let changed = |change: &dyn Fn(&mut BTreeMap<String, TensorEntry>)| {
        let mut headers = headers(&c);
        change(&mut headers.files[0].tensors);
        headers
    };
    let gone = |tensors: &mut BTreeMap<String, TensorEntry>| {
        tensors.remove(name);
    };
    refused(&c, &changed(&gone), &[name, "is missing", "m/model.safetensors"]);
    let more = |tensors: &mut BTreeMap<String, TensorEntry>| {
        tensors.retain(|name, _| !name.contains("q_proj"));
        tensors.insert("model.layers.0.self_attn.qkv_proj.weight".to_owned(), entry(&[24, 8]));
    };
    refused(
        &c,
        &changed(&more),
        &[
            "layers.0.self_attn.q_proj.weight",
            "is missing and 1 more",
            "the file has `model.layers.0.self_attn.qkv_proj.weight`",
        ],
    );
    // Quantized weights are reported in preference to missing ones.
    let quantized = |tensors: &mut BTreeMap<String, TensorEntry>| {
        tensors.remove(name);
        tensors.insert(name.replace("weight", "qweight"), entry(&[8]));
    };
    refused(&c, &changed(&quantized), &["qweight", "quantized"]);
    let shape = |tensors: &mut BTreeMap<String, TensorEntry>| tensors.get_mut(name).unwrap().shape = vec![8, 12];
    refused(&c, &changed(&shape), &[name, "has shape [8, 12]", "[12, 8]"]);
    let dtype = |tensors: &mut BTreeMap<String, TensorEntry>| tensors.get_mut(name).unwrap().dtype = Dtype::F8_E4M3;
    refused(&c, &changed(&dtype), &[name, "F8_E4M3", "F32, F16 and BF16"]);
    let head = |tensors: &mut BTreeMap<String, TensorEntry>| {
        tensors.insert(OUTPUT_HEAD.to_owned(), entry(&[19, 8]));
    };
    refused(&c, &changed(&head), &[OUTPUT_HEAD, "has shape [19, 8]", "[20, 8]"]);
}

#[test]
fn index_and_files_must_agree() {
    let c = config(json!({}));
    let sound = || sharded(headers(&c));
    let (norm, table) = ("model.norm.weight", "model.embed_tokens.weight");

    let mut gone = sound();
    gone.files[1].tensors.remove(norm);
    refused(
        &c,
        &gone,
        &["m/model-2.safetensors", norm, "is missing", "the index lists it here"],
    );

    let mut twice = sound();
    twice.files[1].tensors.insert(table.to_owned(), entry(&[20, 8]));
    refused(
        &c,
        &twice,
        &[
            "m/model-2.safetensors",
            table,
            "is in this file and in `m/model-1.safetensors`",
        ],
    );

    // The model needs this tensor, but either the index or the file may be wrong.
    let mut unlisted = sound();
    unlisted.index.as_mut().unwrap().retain(|(name, _)| name != norm);
    refused(
        &c,
        &unlisted,
        &["m/model-2.safetensors", norm, "the index does not list it"],
    );

    let mut missing = unlisted;
    missing.files[1].tensors.remove(norm);
    refused(&c, &missing, &["`m`", norm, "is missing"]);
}

#[test]
fn numbers_are_compared_to_the_last() {
    let stored = |dtype, data: Vec<u8>| StoredTensor {
        dtype,
        rows: 3,
        columns: 2,
        data: data.into(),
    };
    let f32s = |last: f32| {
        let values = [1.0, 2.0, 3.0, 4.0, 5.0, last];
        stored(
            crate::device::Dtype::F32,
            values.iter().flat_map(|x: &f32| x.to_le_bytes()).collect(),
        )
    };
    let bf16s = |last: f32| {
        let values = [1.0, 2.0, 3.0, 4.0, 5.0, last];
        let bytes = values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes());
        stored(crate::device::Dtype::Bf16, bytes.collect())
    };
    assert!(same_numbers(&f32s(6.0), &f32s(6.0)) && same_numbers(&f32s(6.0), &bf16s(6.0)));
    assert!(!same_numbers(&f32s(6.0), &f32s(7.0)) && !same_numbers(&bf16s(7.0), &f32s(6.0)));
    // A number that only F32 can hold is not a copy.
    assert!(!same_numbers(&f32s(1.001), &bf16s(1.001)));
}

#[test]
fn layers_that_predict_further_tokens_are_passed_over() {
    let one = config(json!({"num_nextn_predict_layers": 1}));
    let behind = ["model.layers.2.enorm.weight", "model.layers.2.mlp.gate_proj.weight"];
    check_headers(&one, &with(&one, &behind)).unwrap();
    let words = ["`model.layers.3.enorm.weight`", "belongs to a layer above the 2"];
    refused(&one, &with(&one, &["model.layers.3.enorm.weight"]), &words);
    for none in [json!({}), json!({"num_nextn_predict_layers": 0})] {
        let none = config(none);
        refused(
            &none,
            &with(&none, &behind[..1]),
            &["`model.layers.2.enorm.weight`", "belongs to a layer above"],
        );
    }
}
