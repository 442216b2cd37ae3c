//! Quantized checkpoints of which a part is missing or does not fit: each is refused by the name of the part.

use std::path::Path;

use serde_json::json;

use super::files::{assert_broken, change_bytes, change_header};

const FILE: &str = "model.safetensors";

#[test]
fn each_part_of_a_quantized_matrix_is_needed() {
    let up = "model.layers.1.mlp.up_proj";
    let of_expert = "model.layers.1.block_sparse_moe.experts.2.w3";
    for (model, stem, parts) in [
        ("llama-ct-fp8", up, &["weight_scale"][..]),
        ("qwen3-ct-fp8-blocks", up, &["weight_scale"]),
        ("qwen2-ct-int8", up, &["weight_scale"]),
        (
            "mistral-ct-w4a16-zeros",
            up,
            &["weight_packed", "weight_scale", "weight_zero_point"],
        ),
        ("mistral-ct-w4a16-zeros", "lm_head", &["weight_scale"]),
        ("llama-ct-nvfp4", up, &["weight_packed", "weight_scale"]),
        ("llama-ct-mxfp4", up, &["weight_packed", "weight_scale"]),
        ("qwen3-modelopt-nvfp4", up, &["weight_scale", "weight_scale_2"]),
        ("mixtral-awq", of_expert, &["qweight", "qzeros", "scales"]),
        ("qwen2-gptq", up, &["qweight", "qzeros", "scales", "g_idx"]),
        (
            "phi3-bnb-nf4",
            "model.layers.1.mlp.down_proj",
            &[
                "weight.absmax",
                "weight.quant_map",
                "weight.nested_absmax",
                "weight.nested_quant_map",
                "weight.quant_state.bitsandbytes__nf4",
            ],
        ),
        ("llama-bnb-int8", up, &["SCB"]),
    ] {
        for part in parts {
            let name = format!("{stem}.{part}");
            println!("{model} {name}");
            let words = [part.split_once("weight.").map_or(*part, |(_, part)| part)];
            // Without its numbers, it is the matrix that is missing; without the magnitudes of magnitudes, these have the wrong
            // format.
            let words = match *part {
                "qweight" | "weight_packed" => &[" is missing"][..],
                "weight.nested_absmax" => &["absmax"],
                _ => &words,
            };
            assert_broken(model, FILE, words, |dir| {
                change_header(&dir.join(FILE), |header| {
                    let entry = header.as_object_mut().unwrap().remove(&name).unwrap();
                    header["model.rotary_emb.inv_freq"] = entry;
                });
            });
            // The same bytes in another shape, and in another format.
            assert_broken(model, FILE, &[], |dir| {
                change_header(&dir.join(FILE), |header| {
                    let count: u64 = header[&name]["shape"]
                        .as_array()
                        .unwrap()
                        .iter()
                        .map(|n| n.as_u64().unwrap())
                        .product();
                    header[&name]["shape"] = match count {
                        1 => json!([1, 1, 1]),
                        count => json!([1, count, 1, 1]),
                    };
                });
            });
        }
    }
}

#[test]
fn formats_that_a_part_does_not_have_are_refused() {
    let up = "model.layers.1.mlp.up_proj";
    for (model, tensor, dtype, words) in [
        ("llama-ct-fp8", "weight_scale", "I32", "of I32 has shape [1]"),
        ("llama-ct-fp8", "weight", "U8", "is stored as U8"),
        (
            "mistral-ct-w4a16-zeros",
            "weight_packed",
            "U32",
            "belongs to weights in a quantized form",
        ),
        ("mistral-ct-w4a16-zeros", "weight_zero_point", "U32", "of U32 has shape"),
        ("llama-ct-nvfp4", "weight_global_scale", "I32", "of I32 has shape [1]"),
        ("qwen2-gptq", "g_idx", "U32", "of U32 has shape [32]"),
        ("qwen2-gptq", "qzeros", "U32", "of U32 has shape"),
        ("qwen2-gptq", "scales", "I16", "of I16 has shape"),
        ("llama-bnb-int8", "SCB", "I32", "of I32 has shape [48]"),
    ] {
        let name = format!("{up}.{tensor}");
        assert_broken(model, FILE, &[&name, words], |dir| {
            change_header(&dir.join(FILE), |header| header[&name]["dtype"] = dtype.into());
        });
    }
}

#[test]
fn parts_that_hold_something_else_are_refused() {
    let up = "model.layers.1.mlp.up_proj";
    assert_broken(
        "qwen2-gptq",
        FILE,
        &["g_idx", "names a group 2, and there are 2"],
        |dir| {
            change_bytes(&dir.join(FILE), &format!("{up}.g_idx"), |bytes| {
                bytes[4..8].copy_from_slice(&2u32.to_le_bytes())
            });
        },
    );
    assert_broken("llama-bnb-int8", FILE, &["weight_format", "an order of a GPU"], |dir| {
        change_bytes(&dir.join(FILE), &format!("{up}.weight_format"), |bytes| bytes[0] = 1);
    });
    let state = |from: &'static str, to: &'static str| {
        move |dir: &Path| {
            change_bytes(
                &dir.join(FILE),
                "model.layers.1.mlp.down_proj.weight.quant_state.bitsandbytes__nf4",
                |bytes| {
                    let text = String::from_utf8(bytes.to_vec()).unwrap();
                    assert!(text.contains(from), "{text}");
                    bytes.copy_from_slice(text.replace(from, to).as_bytes());
                },
            );
        }
    };
    for (from, to, words) in [
        ("\"blocksize\": 64", "\"blocksize\": 32", "in runs of 32"),
        ("\"blocksize\": 64", "\"blocksize\": 00", "is no state"),
        ("\"blocksize\": 64", "\"blocksize\": -1", "is no state"),
        (
            "\"nested_blocksize\": 256",
            "\"nested_blocksize\":   2",
            "has runs of 2 magnitudes",
        ),
        (
            "\"nested_blocksize\": 256",
            "\"nested_blocksize\":   0",
            "has runs of 0 magnitudes",
        ),
        (
            "\"nested_offset\"",
            "\"nested_OFFSET\"",
            "does not describe the magnitudes",
        ),
        ("[36, 40]", "[40, 36]", "a matrix of [40, 36]"),
    ] {
        assert_broken(
            "phi3-bnb-nf4",
            FILE,
            &["down_proj.weight.quant_state", words],
            state(from, to),
        );
    }
    // No number.
    assert_broken("llama-ct-mxfp4", FILE, &["up_proj.weight", "not finite"], |dir| {
        change_bytes(&dir.join(FILE), &format!("{up}.weight_scale"), |bytes| bytes[0] = 255);
    });
}

/// A file beside `config.json` speaks in its place, and is a part of what the checkpoint is.
#[test]
fn a_description_beside_the_configuration_counts() {
    assert_broken(
        "llama-modelopt-fp8",
        "hf_quant_config.json",
        &["in a form that is not read"],
        |dir| {
            std::fs::write(dir.join("hf_quant_config.json"), "{\"quantization\": 8}").unwrap();
        },
    );
    assert_broken(
        "llama-gptq-2bit",
        "config.json",
        &["`quantization_config.bits` (3)"],
        |dir| {
            let path = dir.join("quantize_config.json");
            let text = std::fs::read_to_string(&path).unwrap();
            std::fs::write(path, text.replace("\"bits\": 2", "\"bits\": 3")).unwrap();
        },
    );
    // Without it, nothing says what its tensors are.
    assert_broken("llama-gptq-2bit", FILE, &["quantized"], |dir| {
        std::fs::remove_file(dir.join("quantize_config.json")).unwrap();
    });
    let dir = super::files::copy_of("llama-gptq-2bit");
    let hash = || gristmill::model::weights::checkpoint_hash(dir.path()).unwrap();
    let before = hash();
    let path = dir.path().join("quantize_config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(path, text.replace("0.01", "0.02")).unwrap();
    assert_ne!(hash(), before);
}
