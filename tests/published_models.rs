//! Published models: what becomes of each one's `config.json`, and a small model of each shape that is read.
//!
//! `fixtures/published_models.json` has facts alone, one model a line: the keys of its files and their values, with the
//! place where they were read (where that is a list of shapes, in the keys of the family's class in transformers).
//! `layer_types` is a pattern that repeats, a letter a layer. `refused` quotes the error and `warnings` the warnings of a
//! model; without `refused`, the model is run. When a family comes to be read, take its `refused` out.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use gristmill::device::draw::Sampling;
use gristmill::device::{Dtype, KvSpec, Precision, cpu};
use gristmill::engine::params::GenerationParams;
use gristmill::engine::{Engine, EngineOptions};
use gristmill::model::config::Config;
use gristmill::model::{KvBudget, LoadOptions, Transformer};
use gristmill::tokenizer::Tokenizer;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::model_reference::engine::{self, Answer};
use crate::support::root;

const NEW_TOKENS: u32 = 6;
/// Rows of the embedding table of a model that is run.
const VOCABULARY: usize = 320;
/// Widest model that is run as wide as it is; wider ones are narrowed to `NARROW`.
const WIDE_MAX: usize = 1024;
const NARROW: usize = 256;
/// Most heads that share a latent in a model that is narrowed.
const HEADS_OF_LATENTS_MAX: usize = 64;
/// Most experts of a layer of a model that is run.
const EXPERTS_MAX: usize = 16;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Published {
    name: String,
    source: String,
    config: Map<String, Value>,
    #[serde(default)]
    generation: Option<Value>,
    /// `hf_quant_config.json`.
    #[serde(default)]
    quantization: Option<Value>,
    #[serde(default)]
    refused: Option<String>,
    #[serde(default)]
    warnings: Vec<String>,
}

fn published() -> Vec<Published> {
    let text = fs::read_to_string(root().join("tests/fixtures/published_models.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Writes out what the facts shorten: a pattern of layers for the list of all layers.
fn written_out(mut config: Map<String, Value>) -> Map<String, Value> {
    if let Some(Value::Object(text)) = config.get_mut("text_config") {
        *text = written_out(std::mem::take(text));
    }
    if let Some(Value::String(pattern)) = config.get("layer_types") {
        let name = |letter| match letter {
            's' => "sliding_attention",
            'f' => "full_attention",
            'l' => "linear_attention",
            'c' => "chunked_attention",
            'm' => "mamba",
            'a' => "attention",
            other => panic!("layer type {other}"),
        };
        let layers = config["num_hidden_layers"].as_u64().unwrap() as usize;
        let types: Vec<&str> = pattern.chars().cycle().take(layers).map(name).collect();
        config.insert("layer_types".into(), json!(types));
    }
    config
}

/// The model's files in a folder, as a checkpoint has them.
fn write_files(folder: &Path, model: &Published) {
    let config = written_out(model.config.clone());
    fs::write(folder.join("config.json"), json!(config).to_string()).unwrap();
    for (name, value) in [
        ("generation_config.json", &model.generation),
        ("hf_quant_config.json", &model.quantization),
    ] {
        if let Some(value) = value {
            fs::write(folder.join(name), value.to_string()).unwrap();
        }
    }
}

/// The fewest layers, two at least, that have each kind of layer of the model.
fn depth(config: &Config) -> usize {
    let kind = |layer: usize| -> (KvSpec, [bool; 5]) {
        let has_experts = config.experts_of(layer).is_some();
        let flags = [
            config.rotates[layer],
            has_experts,
            config.is_recurrent(layer),
            config.kv_sources[layer].is_some(),
            config.has_mlp(layer),
        ];
        (config.layers[layer], flags)
    };
    let kinds: Vec<_> = (0..config.layers.len()).map(kind).collect();
    let last = kinds.iter().map(|kind| kinds.iter().position(|k| k == kind).unwrap());
    (last.max().unwrap() + 1).max(2)
}

/// The model with few layers and a small vocabulary and, where it is wide, fewer heads and a narrower stream: as many query
/// heads to a KV head as before, and an MLP, or some experts, in proportion.
fn reduced(full: &Config) -> Config {
    let mut config = full.clone();
    let depth = depth(full);
    config.layers.truncate(depth);
    config.rotates.truncate(depth);
    config.kv_sources.truncate(depth);
    config.parts.truncate(depth);
    if let Some(inputs) = &mut config.layer_inputs {
        inputs.vocab_size = VOCABULARY;
    }
    if let Some(global) = &mut config.global {
        global.layers.truncate(depth);
    }
    config.vocab_size = VOCABULARY;
    config.eos_token_ids = Vec::new();
    let narrowed = |width: usize| (width * NARROW / full.hidden_size).next_multiple_of(32);
    if let Some(experts) = &mut config.experts {
        experts.layers.truncate(depth);
        experts.count = experts.count.min(EXPERTS_MAX);
        if let Some(groups) = &mut experts.routing.groups {
            // Two experts to a group, and as many groups as are chosen have at least as many as a token uses.
            groups.count = groups.count.min(EXPERTS_MAX / 2);
            groups.chosen = groups.chosen.min(groups.count);
            experts.routing.per_token = experts.routing.per_token.min(2 * groups.chosen);
        }
        if full.hidden_size > WIDE_MAX {
            experts.intermediate_size = narrowed(experts.intermediate_size);
            if let Some(shared) = &mut experts.shared {
                shared.intermediate_size = narrowed(shared.intermediate_size);
            }
        }
    }
    if let Some(recurrent) = &mut config.recurrent {
        recurrent.layers.truncate(depth);
        if full.hidden_size > WIDE_MAX {
            let group = recurrent.shape.value_heads / recurrent.shape.key_heads;
            recurrent.shape.key_heads = recurrent.shape.key_heads.min(2);
            recurrent.shape.value_heads = group * recurrent.shape.key_heads;
        }
    }
    if full.hidden_size > WIDE_MAX {
        let group = full.heads.heads / full.heads.kv_heads;
        config.heads.kv_heads = full.heads.kv_heads.min(2);
        config.heads.heads = group * config.heads.kv_heads;
        if config.latent.is_some() {
            config.heads.heads = full.heads.heads.min(HEADS_OF_LATENTS_MAX);
        }
        if let Some(global) = &mut config.global {
            global.heads.heads = config.heads.heads;
            global.heads.kv_heads = 1;
        }
        config.intermediate_size = narrowed(full.intermediate_size);
        config.hidden_size = NARROW;
    }
    config
}

/// Greedy answers to prompts of several lengths, in one engine.
fn answers(config: &Config, threads: &Arc<cpu::Threads>, rows: &[u64]) -> Vec<(u64, Answer)> {
    let options = LoadOptions {
        precision: Precision::F32,
        kv_format: Precision::F32.kv_format(),
        channels: None,
        isa: None,
        kv: KvBudget::Blocks(24),
        threads: Arc::clone(threads),
        max_context: Some(64),
        vocabulary: Some(VOCABULARY),
    };
    let model = Transformer::random(config.clone(), 7, Dtype::Bf16, &options).unwrap();
    let tokenizer = Arc::new(Tokenizer::with_vocab_size(VOCABULARY).unwrap());
    let engine = Engine::new(Box::new(model), tokenizer, EngineOptions::default());
    let params = GenerationParams {
        sampling: Sampling {
            temperature: 0.0,
            ..Sampling::default()
        },
        max_tokens: NEW_TOKENS,
        logprobs: true,
        ..GenerationParams::default()
    };
    let prompt = |row: u64| {
        let token = |i: u64| ((i * 37 + row * 11) % VOCABULARY as u64) as u32;
        (0..3 + 13 * row).map(token).collect()
    };
    let prompts = rows.iter().map(|row| (*row, prompt(*row)));
    let answers = engine::answers(engine, params, prompts).rows;
    for (_, (_, logprobs)) in &answers {
        let logprobs: Vec<f32> = logprobs.iter().map(|bits| f32::from_bits(*bits)).collect();
        assert!(logprobs.iter().all(|p| p.is_finite() && *p <= 0.0), "{logprobs:?}");
    }
    answers
}

/// Runs the reduced model: a row has the same answer alone as in a batch.
fn run(name: &str, config: &Config, threads: &Arc<cpu::Threads>) {
    let together = answers(config, threads, &[0, 1, 2]);
    assert_eq!(together.len(), 3, "{name}");
    for (_, (tokens, _)) in &together {
        assert_eq!(tokens.len(), NEW_TOKENS as usize, "{name}");
    }
    assert_eq!(answers(config, threads, &[1])[0], together[1], "{name}");
}

fn thousands(n: usize) -> String {
    let digits = n.to_string();
    let groups: Vec<&str> = digits
        .as_bytes()
        .rchunks(3)
        .rev()
        .map(|g| std::str::from_utf8(g).unwrap())
        .collect();
    groups.join(",")
}

/// A model's line of the table.
fn line(model: &Published, config: Option<&Config>) -> String {
    let Published { name, .. } = model;
    let Some(config) = config else {
        let words = model.refused.as_deref().unwrap();
        return format!("| {name} | – | refused: {words} |");
    };
    let small = reduced(config);
    let width = if small.hidden_size == config.hidden_size {
        "full width".to_owned()
    } else {
        format!("narrowed to {}", small.hidden_size)
    };
    let notes: String = model.warnings.iter().map(|words| format!("; warns: {words}")).collect();
    let experts = match &config.experts {
        Some(experts) => {
            let shared = experts.shared.map_or("", |_| " and a shared one");
            format!(", {} of {} experts{shared}", experts.routing.per_token, experts.count)
        }
        None => String::new(),
    };
    let heads = match config.latent {
        Some(latent) => format!("{} heads over latents of {}", config.heads.heads, latent.shape.rank),
        None => format!("{}/{} heads", config.heads.heads, config.heads.kv_heads),
    };
    format!(
        "| {name} | {} × {}, {heads}{experts} | runs; tried with {} layers, {width}{notes} |",
        thousands(config.hidden_size),
        config.layers.len(),
        small.layers.len(),
    )
}

/// `GRISTMILL_WRITE_MODELS=1 cargo test --profile checked --features faults --test all published_models` writes the table of
/// docs/models.md anew.
#[test]
fn each_is_run_or_refused_for_its_reason() {
    let threads = Arc::new(cpu::Threads::new(2).unwrap());
    let models = published();
    let mut wrong = Vec::new();
    let mut table = String::from("| model | width × layers | what becomes of it |\n|---|---|---|\n");
    for model in &models {
        let Published { name, .. } = model;
        assert!(!model.source.is_empty(), "{name}");
        let folder = tempfile::tempdir().unwrap();
        write_files(folder.path(), model);
        let config = match (Config::load(folder.path()), &model.refused) {
            (Err(error), Some(words)) => {
                let error = error.to_string();
                if !error.contains(words) || error.contains('\n') {
                    wrong.push(format!("{name}: {error}"));
                }
                None
            }
            (Ok(config), None) => {
                let said = config.warnings.iter().zip(&model.warnings);
                let fits = config.warnings.len() == model.warnings.len();
                if !fits || said.into_iter().any(|(warning, words)| !warning.contains(words)) {
                    wrong.push(format!("{name} warns: {:?}", config.warnings));
                }
                run(name, &reduced(&config), &threads);
                Some(config)
            }
            (Err(error), None) => {
                wrong.push(format!("{name} is refused: {error}"));
                continue;
            }
            (Ok(_), Some(words)) => {
                wrong.push(format!("{name} is read, and should be refused: {words}"));
                continue;
            }
        };
        table.push_str(&line(model, config.as_ref()));
        table.push('\n');
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(models.len() >= 60, "{}", models.len());
    check_table(&table);
}

fn check_table(table: &str) {
    let path = root().join("docs/models.md");
    let text = fs::read_to_string(&path).unwrap();
    let (begin, end) = ("<!-- published models: begin -->\n", "<!-- published models: end -->");
    let (before, rest) = text.split_once(begin).unwrap();
    let (_, after) = rest.split_once(end).unwrap();
    let current = format!("{before}{begin}{table}{end}{after}");
    if std::env::var_os("GRISTMILL_WRITE_MODELS").is_some() {
        fs::write(&path, &current).unwrap();
        return;
    }
    assert!(
        text == current,
        "the table of published models in docs/models.md is out of date: run this test with GRISTMILL_WRITE_MODELS=1"
    );
}
