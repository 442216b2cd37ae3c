//! LoRA adapters: their models compute what PEFT does, and what is not understood of them is refused by name.

use std::path::Path;

use gristmill::device::Precision;
use gristmill::model::config::Config;
use gristmill::model::{Checkpoint, ModelError, Transformer};
use serde_json::{Value, json};

use super::answers::{RELATIVE_MAX, compare};
use super::files::{change_bytes, change_header, copy_of};
use super::harness::{ADAPTERS, Reference, folder, options};

const WEIGHTS: &str = "adapter_model.safetensors";
const CONFIG: &str = "adapter_config.json";

fn open(model: &str, adapter: &Path) -> Result<Checkpoint, ModelError> {
    let dir = folder(model);
    let config = Config::load(&dir)?;
    Checkpoint::open(&dir, Some(adapter), config)
}

#[test]
fn adapted_models_compute_what_peft_does() {
    for (adapter, model) in ADAPTERS {
        let reference = Reference::load(adapter);
        let Checkpoint { config, weights } = open(model, &folder(adapter)).unwrap();
        let options = options(&reference, Precision::F32);
        let mut adapted = Transformer::from_weights(config, &weights, &options).unwrap();
        let (worst, differ) = compare(&mut adapted, &reference);
        println!("{adapter}: {worst:.1e}");
        assert!(
            worst <= RELATIVE_MAX,
            "{adapter}: logits differ by {worst:.1e} relative"
        );
        assert_eq!(differ, 0, "{adapter}: greedy tokens of {differ} prompts differ");
    }
}

/// The adapter of `llama-plain` for all matrices, broken, is refused for `model` in one line with these words.
fn refused(model: &str, words: &[&str], break_it: impl FnOnce(&Path)) {
    let dir = copy_of("llama-plain-all");
    break_it(dir.path());
    let line = open(model, dir.path()).err().expect("a refusal").to_string();
    assert!(!line.contains('\n') && line.len() < 600, "not one clear line: {line}");
    for word in words {
        assert!(line.contains(word), "{line:?} does not say {word:?}");
    }
}

fn change_config(key: &'static str, value: Value) -> impl FnOnce(&Path) {
    move |dir| {
        let path = dir.join(CONFIG);
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        config[key] = value;
        std::fs::write(path, config.to_string()).unwrap();
    }
}

fn change_tensors(change: impl FnOnce(&mut Value)) -> impl FnOnce(&Path) {
    move |dir| change_header(&dir.join(WEIGHTS), change)
}

/// The entry of a tensor of a layer gets another name.
fn renamed(from: &str, to: &str) -> impl FnOnce(&Path) {
    let [from, to] = [from, to].map(|name| format!("base_model.model.model.layers.1.{name}"));
    change_tensors(move |header| {
        let entry = header.as_object_mut().unwrap().remove(&from).unwrap();
        header[to] = entry;
    })
}

#[test]
fn what_is_not_understood_of_an_adapter_is_refused() {
    let [a, b] = ["A", "B"].map(|part| format!("mlp.up_proj.lora_{part}.weight"));
    refused(
        "llama-plain",
        &[CONFIG, "`use_dora` (true)"],
        change_config("use_dora", true.into()),
    );
    let ranks = ["lora_A.weight` has shape [4, ", "gives it 3 rows"];
    refused("llama-plain", &ranks, change_config("r", 3.into()));
    for file in [CONFIG, WEIGHTS] {
        refused("llama-plain", &[file], |dir| {
            std::fs::remove_file(dir.join(file)).unwrap()
        });
    }
    for (to, words) in [
        (
            "mlp.up_proj.lora_magnitude_vector.weight",
            "is not known of LoRA adapters",
        ),
        ("mlp.up_proj.lora_A.bias", "is not known of LoRA adapters"),
        (
            "mlp.other_proj.lora_A.weight",
            "`lora_B` of `model.layers.1.mlp.other_proj` is missing",
        ),
    ] {
        refused("llama-plain", &[WEIGHTS, words], renamed(&a, to));
    }
    // Other sizes and formats.
    let change = |name: &str, key: &'static str, value: Value| {
        let name = format!("base_model.model.model.layers.1.{name}");
        change_tensors(move |header| header[name][key] = value)
    };
    refused(
        "llama-plain",
        &["lora_B.weight` has shape [4, 48]"],
        change(&b, "shape", json!([4, 48])),
    );
    refused(
        "llama-plain",
        &["lora_A.weight` has shape [32, 4]"],
        change(&a, "shape", json!([32, 4])),
    );
    refused(
        "llama-plain",
        &["lora_B.weight` is stored as I32"],
        change(&b, "dtype", json!("I32")),
    );
    // Of another model: matrices that it has not, and matrices of other sizes.
    refused("phi3-window", &["is no matrix of this model", "another one"], |_| ());
    refused("llama-padded", &["has shape", "`config.json` makes it"], |_| ());
    // A copy of the output head that is another one.
    let dir = copy_of("llama-plain-head");
    change_bytes(
        &dir.path().join(WEIGHTS),
        "base_model.model.lm_head.base_layer.weight",
        |bytes| bytes[1] ^= 0x40,
    );
    let line = open("llama-plain", dir.path()).err().expect("a refusal").to_string();
    assert!(
        line.contains("lm_head.base_layer.weight` differs from the model's own"),
        "{line}"
    );
    // A head that is the embedding table.
    let head = folder("llama-plain-head");
    let line = open("llama-llama3-tied", &head).err().expect("a refusal").to_string();
    assert!(line.contains("lm_head") && line.contains(WEIGHTS), "{line}");
}
