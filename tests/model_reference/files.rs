//! Broken checkpoints, unfit options and unfit batches are refused, each in one clear line.

use std::path::Path;

use gristmill::device::Precision;
use gristmill::device::batch::{BlockCopy, StepBatch};
use gristmill::engine::{Forward, ForwardError};
use gristmill::model::config::Config;
use gristmill::model::weights::checkpoint_hash;
use gristmill::model::{KvBudget, LoadOptions, Transformer};

use super::harness::{KV_BLOCKS, Reference, Runner, Sequence, folder, load, options};

#[test]
fn unfit_batches_and_options_are_refused() {
    let reference = Reference::load("llama-padded");
    let mut model = load("llama-padded", &reference, Precision::F32);
    assert_eq!(model.vocab_size(), 101);
    let mut refused = |change: &dyn Fn(&mut StepBatch), words: &str| {
        let mut runner = Runner::new(&mut model);
        let mut sequence = Sequence::default();
        let mut batch = runner.batch(&mut [(&mut sequence, &[7, 8, 9])], vec![]);
        change(&mut batch);
        match runner.model.forward(&batch) {
            Err(ForwardError::Batch(message)) => assert!(message.contains(words), "{message}"),
            other => panic!("{words}: {other:?}"),
        }
    };
    refused(&|b| b.tokens[1] = 112, "token id 112");
    refused(&|b| b.positions[2] = 5, "positions");
    refused(&|b| b.block_tables[0][0] = KV_BLOCKS, "KV block 64");
    refused(&|b| b.block_tables.clear(), "0 block tables");
    refused(&|b| b.block_tables[0].clear(), "block table is too short");
    refused(&|b| b.logits_at = vec![3], "`logits_at` has 3");
    refused(&|b| b.logits_at = vec![1, 1], "ascend");
    refused(&|b| b.sequences.clear(), "belong to no sequence");
    refused(&|b| b.sequences[0].kv_len = 129, "more than 128");
    assert_eq!(
        model.forward(&StepBatch::default().with_tables(1)).unwrap(),
        &[] as &[f32]
    );

    let with = |change: &dyn Fn(&mut LoadOptions)| {
        let mut options = options(&reference, Precision::F32);
        change(&mut options);
        Transformer::load(&folder("llama-padded"), &options)
            .map(|_| ())
            .unwrap_err()
            .to_string()
    };
    assert!(with(&|o| o.max_context = Some(129)).contains("129 tokens is more than the model's 128"));
    assert!(with(&|o| o.kv = KvBudget::Bytes(100)).contains("holds no block"));
}

#[test]
fn slots_that_do_not_fit_are_refused() {
    let reference = Reference::load("qwen35-recurrent");
    let mut model = load("qwen35-recurrent", &reference, Precision::F32);
    let mut refused = |change: &dyn Fn(&mut StepBatch), words: &str| {
        let mut runner = Runner::new(&mut model);
        let (mut first, mut second) = (Sequence::default(), Sequence::default());
        let mut batch = runner.batch(&mut [(&mut first, &[7, 8, 9]), (&mut second, &[7])], vec![]);
        change(&mut batch);
        match runner.model.forward(&batch) {
            Err(ForwardError::Batch(message)) => assert!(message.contains(words), "{message}"),
            other => panic!("{words}: {other:?}"),
        }
    };
    refused(&|b| b.state_slots.clear(), "0 state slots, and not 2");
    refused(
        &|b| b.state_slots[1] = b.state_slots[0],
        "two sequences have state slot 63",
    );
    refused(&|b| b.state_slots[0] = KV_BLOCKS, "state slot 64 is not below 64");
    let copy = BlockCopy { from: 0, to: KV_BLOCKS };
    refused(&|b| b.state_copies.push(copy), "state slot 64 to copy");
}

/// A copy of a model's folder to break.
pub(super) fn copy_of(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(folder(name)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    dir
}

fn load_error(dir: &Path) -> String {
    let options = options(&Reference::load("llama-plain"), Precision::F32);
    let error = Transformer::load(
        dir,
        &LoadOptions {
            max_context: None,
            ..options
        },
    )
    .map(|_| ())
    .unwrap_err();
    let line = error.to_string();
    assert!(!line.contains('\n') && line.len() < 600, "not one clear line: {line}");
    line
}

/// Changes the header of a safetensors file.
pub(super) fn change_header(path: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let bytes = std::fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    change(&mut header);
    let header = serde_json::to_vec(&header).unwrap();
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(&header);
    out.extend_from_slice(&bytes[8 + length..]);
    std::fs::write(path, out).unwrap();
}

/// Changes the bytes of a tensor in a safetensors file.
pub(super) fn change_bytes(path: &Path, tensor: &str, change: impl FnOnce(&mut [u8])) {
    let mut bytes = std::fs::read(path).unwrap();
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..start]).unwrap();
    let offsets = &header[tensor]["data_offsets"];
    let [first, end] = [0, 1].map(|i| start + offsets[i].as_u64().unwrap() as usize);
    change(&mut bytes[first..end]);
    std::fs::write(path, bytes).unwrap();
}

pub(super) fn assert_broken(model: &str, file: &str, words: &[&str], break_it: impl FnOnce(&Path)) {
    let dir = copy_of(model);
    break_it(dir.path());
    let line = load_error(dir.path());
    for word in words.iter().chain([&file]) {
        assert!(line.contains(word), "{line:?} does not say {word:?}");
    }
}

#[test]
fn broken_safetensors_are_refused_in_one_line() {
    let file = "model.safetensors";
    let lie = |bytes: &'static [u8]| {
        move |dir: &Path| {
            let path = dir.join(file);
            let mut all = std::fs::read(&path).unwrap();
            all[..8].copy_from_slice(bytes);
            std::fs::write(path, all).unwrap();
        }
    };
    assert_broken("llama-plain", file, &["not a sound safetensors file"], lie(&[0xff; 8]));
    assert_broken(
        "llama-plain",
        file,
        &["not a sound safetensors file"],
        lie(&[0, 0, 0, 4, 0, 0, 0, 0]),
    );
    assert_broken(
        "llama-plain",
        file,
        &["not a sound safetensors file"],
        lie(&[1, 0, 0, 0, 0, 0, 0, 0]),
    );
    assert_broken("llama-plain", file, &["not a sound safetensors file"], |dir| {
        let bytes = std::fs::read(dir.join(file)).unwrap();
        std::fs::write(dir.join(file), &bytes[..bytes.len() - 4]).unwrap();
    });
    assert_broken("llama-plain", file, &["not a sound safetensors file"], |dir| {
        std::fs::write(dir.join(file), b"").unwrap();
    });
    assert_broken("llama-plain", file, &["not a sound safetensors file"], |dir| {
        change_header(&dir.join(file), |h| {
            h["model.norm.weight"]["data_offsets"] = serde_json::json!([0, 1u64 << 60])
        });
    });
    assert_broken("llama-plain", file, &["not a sound safetensors file"], |dir| {
        change_header(&dir.join(file), |h| {
            h["model.norm.weight"]["shape"] = serde_json::json!([u64::MAX, 4])
        });
    });
}

/// Matrices in FP8 come with factors of their blocks, and are read only where `config.json` describes them.
#[test]
fn matrices_in_fp8_without_their_factors_are_refused_by_name() {
    let file = "model.safetensors";
    let matrix = "model.layers.1.mlp.up_proj.weight";
    let scales = format!("{matrix}_scale_inv");
    let header = |change: &'static dyn Fn(&mut serde_json::Value, &str)| {
        let scales = scales.clone();
        move |dir: &Path| change_header(&dir.join(file), |header| change(header, &scales))
    };
    assert_broken(
        "qwen3-fp8",
        file,
        &["`model.layers.1.mlp.up_proj.weight_scale_inv` is missing"],
        header(&|header, scales| {
            let entry = header.as_object_mut().unwrap().remove(scales).unwrap();
            header["model.layers.1.mlp.up_proj.factors"] = entry;
        }),
    );
    assert_broken(
        "qwen3-fp8",
        file,
        &[&scales, "has shape [2, 6]", "the factors of a matrix of 48 × 32"],
        header(&|header, scales| header[scales]["shape"] = serde_json::json!([2, 6])),
    );
    assert_broken(
        "qwen3-fp8",
        file,
        &[&scales, "of I16 has shape [6, 2]"],
        header(&|header, scales| header[scales]["dtype"] = "I16".into()),
    );
    assert_broken("qwen3-fp8", file, &[matrix, "shape [32, 48]"], |dir| {
        change_header(&dir.join(file), |header| {
            header[matrix]["shape"] = serde_json::json!([32, 48]);
        });
    });
    // Another FP8, and the same in a file whose configuration does not mention it.
    assert_broken("qwen3-fp8", file, &[], |dir| {
        change_header(&dir.join(file), |header| header[matrix]["dtype"] = "F8_E5M2".into());
    });
    assert_broken("qwen3-fp8", file, &["quantized"], |dir| {
        let path = dir.join("config.json");
        let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        config.as_object_mut().unwrap().remove("quantization_config").unwrap();
        std::fs::write(path, config.to_string()).unwrap();
    });
    // No number.
    assert_broken("qwen3-fp8", file, &[matrix, "not finite"], |dir| {
        change_bytes(&dir.join(file), matrix, |bytes| bytes[0] = 0x7f);
    });
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    let file = "model.safetensors";
    let tensor = "model.layers.1.mlp.up_proj.weight";
    let rename = |dir: &Path| {
        change_header(&dir.join(file), |h| {
            let entry = h.as_object_mut().unwrap().remove(tensor).unwrap();
            h["model.layers.1.other"] = entry;
        });
    };
    assert_broken("llama-plain", file, &[tensor, "is missing"], rename);
    assert_broken("llama-plain", file, &[tensor, "shape [32, 48]", "[48, 32]"], |dir| {
        change_header(&dir.join(file), |h| h[tensor]["shape"] = serde_json::json!([32, 48]));
    });
    assert_broken("llama-plain", file, &[tensor, "I32"], |dir| {
        change_header(&dir.join(file), |h| h[tensor]["dtype"] = serde_json::json!("I32"));
    });
    let bias = "model.layers.0.self_attn.q_proj.bias";
    assert_broken("llama-plain", file, &[bias, "describes none"], |dir| {
        change_header(&dir.join(file), |h| {
            let tensors = h.as_object().unwrap().values();
            let end = tensors.filter_map(|t| t["data_offsets"][1].as_u64()).max();
            h[bias] = serde_json::json!({"dtype": "F32", "shape": [0], "data_offsets": [end, end]});
        });
    });
    let overwrite = |dir: &Path, tensor: &str, index: usize, element: &[u8]| {
        let mut bytes = std::fs::read(dir.join(file)).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let first = header[tensor]["data_offsets"][0].as_u64().unwrap() as usize;
        let at = 8 + length + first + index * element.len();
        bytes[at..at + element.len()].copy_from_slice(element);
        std::fs::write(dir.join(file), bytes).unwrap();
    };
    let scalar = "model.layers.1.layer_scalar";
    assert_broken("gemma4-keys", file, &[scalar, "NaN", "not finite"], |dir| {
        overwrite(dir, scalar, 0, &half::bf16::NAN.to_le_bytes());
    });
    for (model, element) in [
        ("llama-plain", f32::NAN.to_le_bytes().to_vec()),
        ("llama-llama3-tied", half::bf16::INFINITY.to_le_bytes().to_vec()),
        ("llama-yarn", half::f16::NEG_INFINITY.to_le_bytes().to_vec()),
    ] {
        assert_broken(model, file, &[tensor, "row 0", "not finite"], |dir| {
            overwrite(dir, tensor, 3, &element);
        });
    }
}

#[test]
fn an_index_reads_what_it_lists_and_nothing_else() {
    let model = "qwen3-layers-sharded";
    let index = "model.safetensors.index.json";
    let change_index = |dir: &Path, file: &str| {
        let mut value: serde_json::Value = serde_json::from_slice(&std::fs::read(dir.join(index)).unwrap()).unwrap();
        value["weight_map"]["model.norm.weight"] = serde_json::json!(file);
        std::fs::write(dir.join(index), value.to_string()).unwrap();
    };
    // The unlisted file beside the shards holds NaN; that the model loads shows that it is not read.
    assert!(folder(model).join("unlisted.safetensors").exists());
    for file in [
        "../model.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "pytorch_model.bin",
        ".safetensors",
        "",
    ] {
        assert_broken(
            model,
            index,
            &["model.norm.weight", "not a safetensors file of this folder"],
            |dir| {
                change_index(dir, file);
            },
        );
    }
    assert_broken(model, "gone.safetensors", &["cannot read"], |dir| {
        change_index(dir, "gone.safetensors")
    });
    assert_broken(
        model,
        "unlisted.safetensors",
        &["model.norm.weight", "is missing"],
        |dir| {
            change_index(dir, "unlisted.safetensors");
        },
    );
    assert_broken(model, index, &["not valid JSON"], |dir| {
        std::fs::write(dir.join(index), "{").unwrap()
    });
    assert_broken(model, index, &["no `weight_map`"], |dir| {
        std::fs::write(dir.join(index), "{}").unwrap()
    });
}

#[test]
fn folders_that_are_no_checkpoint_are_refused() {
    let weights = "model.safetensors";
    assert_broken(
        "llama-plain",
        "pytorch_model.bin",
        &["the only weights are pickle files", "convert"],
        |dir| {
            std::fs::rename(dir.join(weights), dir.join("pytorch_model.bin")).unwrap();
        },
    );
    assert_broken("llama-plain", "neither `model.safetensors`", &[], |dir| {
        std::fs::remove_file(dir.join(weights)).unwrap();
    });
    assert_broken(
        "llama-plain",
        "config.json",
        &["`FalconForCausalLM` is not supported"],
        |dir| {
            let text = std::fs::read_to_string(dir.join("config.json")).unwrap();
            std::fs::write(
                dir.join("config.json"),
                text.replace("LlamaForCausalLM", "FalconForCausalLM"),
            )
            .unwrap();
        },
    );
    assert_broken("llama-plain", "config.json", &["cannot read"], |dir| {
        std::fs::remove_file(dir.join("config.json")).unwrap();
    });
    assert_broken("llama-plain", "generation_config.json", &["not valid JSON"], |dir| {
        std::fs::write(dir.join("generation_config.json"), "nope").unwrap();
    });
}

#[test]
fn end_of_sequence_ids_are_united_and_hashes_tell_checkpoints_apart() {
    assert_eq!(Config::load(&folder("llama-plain")).unwrap().eos_token_ids, [2, 5]);
    let dir = copy_of("qwen3-layers-sharded");
    let before = checkpoint_hash(dir.path()).unwrap();
    assert_eq!(before.len(), 64);
    assert_eq!(before, checkpoint_hash(&folder("qwen3-layers-sharded")).unwrap());
    std::fs::write(dir.path().join("unlisted.safetensors"), b"anything").unwrap();
    assert_eq!(
        before,
        checkpoint_hash(dir.path()).unwrap(),
        "an unlisted file does not count"
    );
    let shard = dir.path().join("model-00002-of-00005.safetensors");
    let mut bytes = std::fs::read(&shard).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&shard, bytes).unwrap();
    assert_ne!(before, checkpoint_hash(dir.path()).unwrap());
}
