//! LoRA adapters: their models compute what PEFT does, and what is not understood of them is refused by name.

use std::collections::BTreeMap;
use std::path::Path;

use gristmill::device::Precision;
use gristmill::model::config::Config;
use gristmill::model::{Checkpoint, KvBudget, LoadOptions, ModelError, Transformer};
use serde_json::{Value, json};

use super::answers::{RELATIVE_MAX, compare, compare_together};
use super::bits::assert_same_bits;
use super::files::{change_bytes, change_header, copy_of};
use super::harness::{ADAPTERS, KV_BLOCKS, Reference, Runner, Sequence, folder, load, options};

const WEIGHTS: &str = "adapter_model.safetensors";
const CONFIG: &str = "adapter_config.json";
/// It changes the output head.
const HEAD: &str = "llama-plain-head";
/// Largest relative difference of logits in lower precisions.
const LOW_PRECISION_MAX: f32 = 0.2;

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

/// The adapters of each model that may stand beside it, with the model.
pub(crate) fn beside() -> BTreeMap<&'static str, Vec<&'static str>> {
    let mut of_model = BTreeMap::<_, Vec<_>>::new();
    for (adapter, model) in ADAPTERS.into_iter().filter(|(adapter, _)| *adapter != HEAD) {
        of_model.entry(model).or_default().push(adapter);
    }
    of_model
}

/// The model with these adapters beside it.
fn open_beside(model: &str, adapters: &[&str]) -> Result<Checkpoint, ModelError> {
    let dir = folder(model);
    let config = Config::load(&dir)?;
    let folders: Vec<_> = adapters.iter().map(|adapter| folder(adapter)).collect();
    Checkpoint::open(&dir, None, config)?.beside(&folders)
}

/// The model alone and all its adapters in the same batches.
#[test]
fn adapters_beside_a_model_compute_what_peft_does() {
    for (model, adapters) in beside() {
        let names: Vec<&str> = [model].into_iter().chain(adapters.iter().copied()).collect();
        let references: Vec<Reference> = names.iter().map(|name| Reference::load(name)).collect();
        let Checkpoint { config, weights } = open_beside(model, &adapters).unwrap();
        let options = LoadOptions {
            kv: KvBudget::Blocks(4 * KV_BLOCKS),
            ..options(&references[0], Precision::F32)
        };
        let mut transformer = Transformer::from_weights(config, &weights, &options).unwrap();
        let together: Vec<_> = references.iter().enumerate().map(|(i, r)| (i as u32, r)).collect();
        for (name, (worst, differ)) in names.iter().zip(compare_together(&mut transformer, &together)) {
            println!("{name} beside {model}: {worst:.1e}");
            assert!(worst <= RELATIVE_MAX, "{name}: logits differ by {worst:.1e} relative");
            assert_eq!(differ, 0, "{name}: greedy tokens of {differ} prompts differ");
        }
    }
}

/// The logits of the first prompts of the model with these adapters (0: alone), in one step and one by one.
fn logits_of(model: &mut Transformer, adapters: &[u32], prompt: &[u32]) -> Vec<Vec<f32>> {
    let mut runner = Runner::new(model);
    let sequence = |adapter: &u32| Sequence {
        adapter: *adapter,
        ..Sequence::default()
    };
    let mut sequences: Vec<Sequence> = adapters.iter().map(sequence).collect();
    let mut work: Vec<(&mut Sequence, &[u32])> = sequences.iter_mut().map(|s| (s, prompt)).collect();
    let rows = runner.step(&mut work);
    rows.chunks(prompt.len()).map(<[Vec<f32>]>::concat).collect()
}

/// The logits of the first prompt for the model in `dir` alone, with each of the adapters, and some of these again, all in one
/// step. They are the same to the bit as those that each has by itself; those of the model alone are the model's without adapters.
fn logits_together(dir: &Path, adapters: &[&str], reference: &Reference, precision: Precision) -> Vec<Vec<f32>> {
    let prompt = &reference.prompts[1].tokens[..reference.prompts[1].length];
    let all: Vec<u32> = (0..=adapters.len() as u32).chain([1, 0]).collect();
    let folders: Vec<_> = adapters.iter().map(|adapter| folder(adapter)).collect();
    let options = options(reference, precision);
    let checkpoint = Checkpoint::open(dir, None, Config::load(dir).unwrap()).unwrap();
    let Checkpoint { config, weights } = checkpoint.beside(&folders).unwrap();
    let mut beside = Transformer::from_weights(config, &weights, &options).unwrap();
    let mut plain = Transformer::load(dir, &options).unwrap();
    let together = logits_of(&mut beside, &all, prompt);
    for (adapter, logits) in all.iter().zip(&together) {
        let what = format!("{}, adapter {adapter}, {precision:?}", dir.display());
        let alone = logits_of(&mut beside, &[*adapter], prompt);
        assert_same_bits(&alone, std::slice::from_ref(logits), &what);
        if *adapter == 0 {
            assert_same_bits(&logits_of(&mut plain, &[0], prompt), &alone, &what);
        }
    }
    together
}

/// In each precision an adapter's logits are near those of F32, whatever else is in the batch.
#[test]
fn sequences_of_other_adapters_change_nothing() {
    for (model, adapters) in beside() {
        // Its matrices have the sizes of the plain model's.
        let in_four_bits = (model == "llama-plain").then_some(("mistral-ct-w4a16-zeros", Precision::W4a8));
        let tried = [(model, Precision::Bf16), (model, Precision::Int8)];
        for (model, precision) in tried.into_iter().chain(in_four_bits) {
            let (reference, dir) = (Reference::load(model), folder(model));
            let exact = logits_together(&dir, &adapters, &reference, Precision::F32);
            let logits = logits_together(&dir, &adapters, &reference, precision);
            for (index, logits) in logits.iter().enumerate() {
                let worst = difference(&exact[index], logits);
                let of_adapter = difference(&exact[index], &exact[0]);
                println!("{model}, sequence {index}, {precision:?}: {worst:.1e}, the adapter's {of_adapter:.1e}");
                // Another expert may be chosen.
                let bound = if model.contains("moe") { 1.0 } else { LOW_PRECISION_MAX };
                assert!(worst < bound, "{model}, sequence {index}, {precision:?}: {worst:.1e}");
                assert!(
                    of_adapter == 0.0 || of_adapter > worst,
                    "{model}, sequence {index}, {precision:?}"
                );
            }
        }
    }
}

/// The largest difference from `exact`, by its largest number.
fn difference(exact: &[f32], other: &[f32]) -> f32 {
    let largest = exact.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    let differ = exact.iter().zip(other).map(|(a, b)| (a - b).abs());
    differ.fold(0.0f32, f32::max) / largest
}

/// What changes more than projections has a worker of its own.
#[test]
fn an_adapter_of_the_output_head_is_refused_beside_a_model() {
    let line = open_beside("llama-plain", &["llama-plain-all", HEAD])
        .err()
        .expect("a refusal");
    let line = line.to_string();
    for word in ["`lm_head.weight`", "--adapter", WEIGHTS] {
        assert!(line.contains(word), "{line:?} does not say {word:?}");
    }
    assert!(!line.contains('\n'), "{line}");
    // A batch that names an adapter which is not there is the caller's mistake.
    let reference = Reference::load("llama-plain");
    let mut plain = load("llama-plain", &reference, Precision::F32);
    let mut runner = Runner::new(&mut plain);
    let mut sequence = Sequence {
        adapter: 1,
        ..Sequence::default()
    };
    let batch = runner.batch(&mut [(&mut sequence, &[1, 2, 3])], vec![]);
    let error = plain.forward(&batch).unwrap_err().to_string();
    assert!(error.contains("is for adapter 1, and the model has 0"), "{error}");
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
