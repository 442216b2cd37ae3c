//! `gristmill inspect`: what is said of a checkpoint, with and without its weights, and that what a job's model is refused for is
//! named here, too.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use gristmill::device::cpu::{BLOCK_TOKENS, Threads};
use gristmill::device::{Dtype, Precision};
use gristmill::job::chat::form_of;
use gristmill::model::config::Config;
use gristmill::model::{KvBudget, LoadOptions, Transformer};
use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::commands::run;
use crate::support::{arg, job_in, root};

/// Copies these files of the demo model.
fn demo(folder: &Path, names: &[&str]) {
    for name in names {
        fs::copy(root().join("jobs/demo/model").join(name), folder.join(name)).unwrap();
    }
}

/// Changes the demo model's `config.json` in `folder`.
fn change(folder: &Path, changes: &Value) {
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config
        .as_object_mut()
        .unwrap()
        .extend(changes.as_object().unwrap().clone());
    fs::write(path, config.to_string()).unwrap();
}

fn refusals(found: &Value) -> Vec<&str> {
    let refused = found["refused"].as_array().unwrap();
    refused.iter().map(|why| why.as_str().unwrap()).collect()
}

#[test]
fn sizes_follow_from_the_configuration_alone() {
    let folder = tempfile::tempdir().unwrap();
    demo(folder.path(), &["config.json"]);
    let found = run(&["inspect", arg(folder.path()), "--json"]).expect(0).json();
    assert_eq!(
        found["architecture"],
        json!({"family": "Llama", "parameters": 2_755_008, "active_parameters": 2_755_008, "format": "bf16", "layers": 6, "window_layers": 0, "vocabulary": 2048,
            "context_tokens": 1024, "context_tokens_max": 1024, "refused_on_gpu": null})
    );
    // Stored in BF16. 2,359,296 values of linear layers, 393,216 of the table, 2,496 of norms; 6 layers of 2 KV heads of 32
    // dimensions.
    let row = |device: &str, precision: &str, weights: u64, token: u64| {
        json!({"device": device, "precision": precision, "weight_bytes": weights, "kv_bytes_per_token": token,
            "kv_bytes_at_context": 1024 * token})
    };
    assert_eq!(
        found["memory"],
        json!([
            row("cpu", "f32", 5_515_008, 3072),
            row("cpu", "bf16", 5_515_008, 1536),
            row("cpu", "int8", 2_762_496, 912),
            row("gpu", "bf16", 5_515_008, 1536),
            row("gpu", "int8", 3_155_712, 864),
            row("gpu", "fp8", 3_155_712, 864),
        ])
    );
    assert_eq!(
        (&found["runs"], &found["weights"], &found["tokenizer"], &found["chat"]),
        (&true.into(), &false.into(), &false.into(), &Value::Null)
    );
    change(folder.path(), &json!({"torch_dtype": "float32", "some_new_option": 3}));
    let wider = run(&["inspect", arg(folder.path()), "--json"]).expect(0);
    assert_eq!(wider.json()["memory"][0]["weight_bytes"], 11_020_032);
    wider.one_line(&["some_new_option"]);
}

#[test]
fn the_demo_model_is_described() {
    let folder = root().join("jobs/demo/model");
    let found = run(&["inspect", arg(&folder), "--json"]).expect(0).json();
    assert_eq!(
        (&found["weights"], &found["tokenizer"], refusals(&found).len()),
        (&true.into(), &true.into(), 0)
    );
    assert_eq!(found["chat"]["templates"], json!(["default"]));
    let text = run(&["inspect", arg(&folder)]).expect(0).stdout;
    for words in [
        "family      Llama: 6 layers\n",
        "parameters  2,755,008 in bf16\n",
        "context     1,024 tokens\n",
        "weights     there, and fit\n",
        "gpu  fp8        3.2 MB     0.9 kB",
        "refused     for nothing\n",
    ] {
        assert!(text.contains(words), "`{words}` is missing:\n{text}");
    }
    // Without weights and tokenizer, no job runs.
    let folder = tempfile::tempdir().unwrap();
    demo(folder.path(), &["config.json"]);
    let lines = || run(&["inspect", arg(folder.path())]).expect(0).stdout;
    let text = lines();
    for words in [
        "tokenizer   not there\n",
        "refused     for nothing that is there; jobs need weights and a tokenizer, too\n",
    ] {
        assert!(text.contains(words), "`{words}` is missing:\n{text}");
    }
    demo(folder.path(), &["tokenizer.json", "tokenizer_config.json"]);
    assert!(lines().contains("there; jobs need weights, too\n"), "{}", lines());
    fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    demo(folder.path(), &["model.safetensors"]);
    assert!(lines().contains("there; jobs need a tokenizer, too\n"), "{}", lines());
    // What jobs in 8 bits would refuse.
    fs::write(folder.path().join("channels.safetensors"), "x").unwrap();
    let warned = run(&["inspect", arg(folder.path()), "--json"]).expect(0).json()["warnings"].to_string();
    assert!(warned.contains("jobs in int8 are refused: "), "{warned}");
}

/// They are read as F32, so a job in F32 takes four bytes a weight.
#[test]
fn quantized_weights_are_described_as_they_are_read() {
    for (name, format) in [
        ("models/qwen3-fp8", "fp8"),
        ("quantized/llama-ct-fp8", "compressed-tensors"),
        ("quantized/qwen3-modelopt-nvfp4", "modelopt"),
        ("quantized/mixtral-awq", "awq"),
        ("quantized/llama-gptq-2bit", "gptq"),
        ("quantized/phi3-bnb-nf4", "bitsandbytes"),
    ] {
        let model = root().join("tests/fixtures").join(name);
        let found = run(&["inspect", arg(&model), "--json"]).expect(0).json();
        let architecture = &found["architecture"];
        assert_eq!(architecture["format"], format);
        let parameters = architecture["parameters"].as_u64().unwrap();
        assert_eq!(found["memory"][0]["weight_bytes"], 4 * parameters, "{name}");
    }
}

/// Experts in MXFP4 are read as BF16, whatever format the other weights have.
#[test]
fn a_gpt_oss_is_described_without_a_format() {
    let folder = tempfile::tempdir().unwrap();
    let config = json!({"architectures": ["GptOssForCausalLM"], "head_dim": 64, "hidden_size": 2880,
        "intermediate_size": 2880, "num_attention_heads": 64, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201_088, "tie_word_embeddings": false,
        "quantization_config": {"quant_method": "mxfp4"}, "rope_scaling": {"rope_type": "yarn", "factor": 32.0}});
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let text = run(&["inspect", arg(folder.path())]).expect(0).stdout;
    for words in [
        "parameters  20,914,757,184, 4,193,246,784",
        " of them for a token, in mxfp4\n",
        "cpu  f32        41.8 GB ",
    ] {
        assert!(text.contains(words), "`{words}` is missing:\n{text}");
    }
    let mixtral = json!({"architectures": ["MixtralForCausalLM"], "hidden_size": 64, "intermediate_size": 64,
        "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 512,
        "num_local_experts": 4, "num_experts_per_tok": 2});
    fs::write(folder.path().join("config.json"), mixtral.to_string()).unwrap();
    let text = run(&["inspect", arg(folder.path())]).expect(0).stdout;
    assert!(text.contains(" of them for a token\n"), "{text}");
}

#[test]
fn thinking_and_sampling_are_those_of_a_job_that_sets_nothing() {
    let folder = tempfile::tempdir().unwrap();
    demo(folder.path(), &["config.json"]);
    let template = root().join("tests/fixtures/chat_templates/qwen3.jinja");
    fs::copy(template, folder.path().join("chat_template.jinja")).unwrap();
    let generation = json!({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 2});
    fs::write(folder.path().join("generation_config.json"), generation.to_string()).unwrap();
    let found = run(&["inspect", arg(folder.path()), "--json"]).expect(0).json();
    assert_eq!(found["chat"], json!({"templates": ["default"], "form": "ChatML"}));
    assert_eq!(found["thinking"], json!({"open": "<think>", "close": "</think>"}));
    let value = |name: &str| found["sampling"][name].clone();
    let of_file = |value: f64| json!({"value": value, "from": "generation_config.json"});
    assert_eq!(
        (value("temperature"), value("top_p")),
        (of_file(0.6), of_file(0.95)),
        "{found}"
    );
    assert_eq!(value("min_p")["from"], "default");
    // The demo's vocabulary has no such tokens, so its thoughts cannot be told from its answers.
    demo(folder.path(), &["tokenizer.json", "tokenizer_config.json"]);
    let found = run(&["inspect", arg(folder.path()), "--json"]).expect(0).json();
    assert_eq!(found["thinking"], Value::Null, "{found}");
}

#[test]
fn everything_that_is_refused_is_named() {
    let folder = tempfile::tempdir().unwrap();
    demo(folder.path(), &["config.json"]);
    change(folder.path(), &json!({"partial_rotary_factor": 0.5}));
    let put = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    put("generation_config.json", "{\"num_beams\": 4}");
    put("tokenizer.model", "x");
    put("pytorch_model.bin", "x");
    let refused = run(&["inspect", arg(folder.path()), "--json"]).expect(2);
    let found = refused.json();
    assert_eq!((&found["runs"], &found["architecture"]), (&false.into(), &Value::Null));
    let refusals = refusals(&found);
    let words = [
        "pickle",
        "`partial_rotary_factor` 0.5",
        "tokenizer.model",
        "`num_beams` (4)",
    ];
    assert_eq!(refusals.len(), words.len(), "{refusals:#?}");
    for (why, word) in refusals.iter().zip(words) {
        assert!(why.contains(word) && !why.contains('\n'), "{word}: {why}");
    }
    let text = run(&["inspect", arg(folder.path())]).expect(2).stdout;
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("refused ")).collect();
    assert_eq!(lines.len(), 4, "{text}");
}

/// A model that `plan` refuses is refused by `inspect`, in the same words.
#[test]
fn plan_refuses_the_same() {
    let all = [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    for changes in [
        json!({"num_hidden_layers": 5}),
        json!({"architectures": ["BloomForCausalLM"]}),
        json!({"num_beams": 4}),
        json!({"quantization_config": {"bits": 4}}),
        json!({}),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("model");
        fs::create_dir(&model).unwrap();
        demo(&model, &all);
        change(&model, &changes);
        let demo = root().join("jobs/demo/model");
        let (job, _) = job_in(folder.path(), "label-tickets.yaml", |text| {
            text.replace(arg(&demo), arg(&model))
        });
        let found = run(&["inspect", arg(&model), "--json"]).json();
        let planned = run(&["plan", arg(&job), "--limit", "3"]);
        match &refusals(&found)[..] {
            [] => assert_eq!(planned.code, Some(0), "{changes}: {}", planned.stderr),
            [why] => assert!(
                planned.code == Some(2) && planned.stderr.contains(why),
                "{changes}: {why}\n{}",
                planned.stderr
            ),
            several => panic!("{changes}: {several:?}"),
        }
    }
}

#[test]
fn what_is_no_checkpoint_is_said() {
    let folder = tempfile::tempdir().unwrap();
    run(&["inspect", arg(&folder.path().join("nowhere"))])
        .expect(2)
        .one_line(&["nowhere", "there is no such folder"]);
    let file = folder.path().join("model.gguf");
    fs::write(&file, "GGUF").unwrap();
    let found = run(&["inspect", arg(&file), "--json"]).expect(2).json();
    assert!(
        refusals(&found).len() == 1 && refusals(&found)[0].contains("ends within its version"),
        "{found}"
    );
    let empty = folder.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let found = run(&["inspect", arg(&empty), "--json"]).expect(2).json();
    assert!(
        refusals(&found).len() == 1 && refusals(&found)[0].contains("config.json"),
        "{found}"
    );
}

#[test]
fn forms_of_chat_templates_are_known() {
    for (name, form) in [
        ("chatml", Some("ChatML")),
        ("command_r", Some("Command R")),
        ("deepseek", Some("DeepSeek")),
        ("gemma", Some("Gemma")),
        ("llama2", Some("Llama 2 or Mistral")),
        ("llama3", Some("Llama 3")),
        ("mistral", Some("Llama 2 or Mistral")),
        ("qwen3", Some("ChatML")),
        ("zephyr", Some("roles as tokens (Phi 3, Zephyr)")),
        ("oddities", None),
    ] {
        let path = root().join(format!("tests/fixtures/chat_templates/{name}.jinja"));
        assert_eq!(form_of(&fs::read_to_string(path).unwrap()), form, "{name}");
    }
}

/// Heads of sizes that a GPU's kernels do not take.
#[test]
fn a_gpus_refusal_is_named_and_leaves_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    demo(folder.path(), &["config.json"]);
    change(folder.path(), &json!({"head_dim": 24}));
    let found = run(&["inspect", arg(folder.path()), "--json"]).expect(0).json();
    let why = found["architecture"]["refused_on_gpu"].as_str().unwrap();
    assert!(why.contains("heads of 24 numbers"), "{why}");
    let devices = found["memory"].as_array().unwrap().iter().map(|row| &row["device"]);
    assert_eq!(devices.collect::<Vec<_>>(), ["cpu", "cpu", "cpu"]);
    let text = run(&["inspect", arg(folder.path())]).expect(0).stdout;
    assert!(text.contains(&format!("gpu         {why}\n")), "{text}");
    let gemma = root().join("tests/fixtures/models/gemma4-keys");
    let found = run(&["inspect", arg(&gemma), "--json"]).expect(0).json();
    let why = found["architecture"]["refused_on_gpu"].as_str().unwrap();
    assert!(why.contains("heads of 24 numbers over 1 key and value heads"), "{why}");
    // In F32, two layers with windows have two heads of 16 numbers. Those without have one of 24, for whose values there is
    // room for 32, and as many layers share the room of the others.
    let memory = &found["memory"];
    assert!(
        memory.as_array().unwrap().iter().all(|row| row["device"] == "cpu"),
        "{memory}"
    );
    assert_eq!(memory[0]["kv_bytes_per_token"], 2 * 2 * (32 + 32) * 4, "{memory}");
    // Two layers keep a latent of 20 numbers and a key of 8, in BF16 where keys and values would have 8 bits.
    let latents = root().join("tests/fixtures/models/deepseek2-lite");
    let found = run(&["inspect", arg(&latents), "--json"]).expect(0).json();
    let why = found["architecture"]["refused_on_gpu"].as_str().unwrap();
    assert!(
        why.contains("keeps latents of 20 numbers, with keys of 8 beside them"),
        "{why}"
    );
    let memory = found["memory"].as_array().unwrap().iter();
    let memory: Vec<_> = memory
        .map(|row| (row["precision"].as_str().unwrap(), row["kv_bytes_per_token"].as_u64()))
        .collect();
    let of = |size: u64| Some(2 * (20 + 8) * size);
    assert_eq!(memory, [("f32", of(4)), ("bf16", of(2)), ("int8", of(2))]);
}

/// Numbers in the files of a checkpoint, in its first `layers` layers and outside of layers.
fn numbers_stored(model: &Path, layers: u64) -> u64 {
    let files = fs::read_dir(model).unwrap().map(|entry| entry.unwrap().path());
    let config: Value = serde_json::from_slice(&fs::read(model.join("config.json")).unwrap()).unwrap();
    let own_keys = layers - config["num_kv_shared_layers"].as_u64().unwrap_or(0);
    let is_weights = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.starts_with("model") && name.ends_with(".safetensors")
    };
    let numbers = |path: PathBuf| {
        let bytes = fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let tensors = header.tensors();
        // A byte of MXFP4 holds two numbers; factors are no parameters.
        // Parts that see, hear or predict further tokens are not read.
        let others = [
            "mtp.",
            "model.visual.",
            "model.vision_tower.",
            "model.embed_",
            "model.audio_tower.",
            "vision_model.",
            "multi_modal_projector.",
        ];
        let is_table = |name: &str| name.starts_with("model.embed_tokens");
        let is_other = |name: &str| others.iter().any(|other| name.starts_with(other)) && !is_table(name);
        let read = tensors.iter().filter(|(name, _)| !is_other(name)).filter(|(name, _)| {
            let layer = name
                .strip_prefix("model.layers.")
                .and_then(|rest| rest.split('.').next());
            // Layers that read keys and values of others have unread ones of their own.
            let is_key = ["k_proj", "v_proj", "k_norm"].iter().any(|part| name.contains(part));
            let count = if is_key { own_keys } else { layers };
            layer.is_none_or(|layer| layer.parse::<u64>().unwrap() < count)
        });
        let numbers = read.map(|(name, info)| {
            let stored = info.shape.iter().product::<usize>() as u64;
            match name.rsplit('_').next() {
                Some("blocks") => 2 * stored,
                Some("scales" | "inv") => 0,
                _ => stored,
            }
        });
        numbers.sum::<u64>()
    };
    files.filter(is_weights).map(numbers).sum()
}

/// With weights and without them, of the models that are held against transformers.
#[test]
fn every_family_is_described_by_its_configuration_alone() {
    let mut families = BTreeSet::new();
    for entry in fs::read_dir(root().join("tests/fixtures/models")).unwrap() {
        let model = entry.unwrap().path();
        let found = run(&["inspect", arg(&model), "--json"]).expect(0).json();
        let architecture = &found["architecture"];
        let layers = architecture["layers"].as_u64().unwrap();
        families.insert(architecture["family"].as_str().unwrap().to_owned());
        assert_eq!(
            (&architecture["parameters"], &found["weights"]),
            (&numbers_stored(&model, layers).into(), &true.into()),
            "{}",
            model.display()
        );
        let folder = tempfile::tempdir().unwrap();
        fs::copy(model.join("config.json"), folder.path().join("config.json")).unwrap();
        let alone = run(&["inspect", arg(folder.path()), "--json"]).expect(0).json();
        assert_eq!(alone["weights"], false);
        let declares_format = !alone["architecture"]["format"].is_null();
        if declares_format {
            assert_eq!(
                (&alone["architecture"], &alone["memory"]),
                (architecture, &found["memory"]),
                "{}",
                model.display()
            );
        }
    }
    assert_eq!(families.len(), 41, "{families:?}");
}

/// A number of `/proc/self/status`, in bytes.
fn status_bytes(name: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    1024 * line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
}

/// Variable with the model, the precision and the KV blocks that [`prints_the_memory_of_a_load`] loads.
const LOADED: &str = "GRISTMILL_TEST_LOADED";

/// The process of `memory_is_what_a_load_takes`; in other processes it does nothing.
#[test]
fn prints_the_memory_of_a_load() {
    let Ok(loaded) = std::env::var(LOADED) else { return };
    let [dir, name, blocks] = loaded.split('=').collect::<Vec<_>>()[..] else {
        panic!("{loaded}")
    };
    let precision = Precision::ON_CPU.into_iter().find(|one| one.name() == name).unwrap();
    let options = LoadOptions {
        precision,
        kv_format: precision.kv_format(),
        channels: None,
        isa: None,
        kv: KvBudget::Blocks(blocks.parse().unwrap()),
        threads: Arc::new(Threads::new(1).unwrap()),
        max_context: None,
        vocabulary: None,
    };
    let config = Config::load(Path::new(dir)).unwrap();
    let now = || [status_bytes("RssAnon:"), status_bytes("VmData:")];
    let before = now();
    let model = Transformer::random(config, 1, Dtype::Bf16, &options).unwrap();
    let after = now();
    println!("memory: {} {}", after[0] - before[0], after[1] - before[1]);
    drop(model);
}

/// Bytes that are in use after a load in a process of its own, and bytes that it has reserved.
fn taken(dir: &Path, precision: &str, blocks: u32) -> [u64; 2] {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "inspect::prints_the_memory_of_a_load", "--nocapture"])
        .env(LOADED, format!("{}={precision}={blocks}", dir.display()))
        // What is freed goes back, so that only what the model keeps is counted.
        .envs([
            ("MALLOC_ARENA_MAX", "1"),
            ("MALLOC_MMAP_THRESHOLD_", "65536"),
            ("MALLOC_TRIM_THRESHOLD_", "65536"),
        ])
        .output()
        .unwrap();
    let told = String::from_utf8(child.stdout).unwrap();
    let numbers = told.split_once("memory: ").unwrap_or_else(|| panic!("{told}")).1;
    let numbers = numbers.lines().next().unwrap().split(' ');
    let numbers: Vec<u64> = numbers.map(|number| number.parse().unwrap()).collect();
    [numbers[0], numbers[1]]
}

#[test]
fn memory_is_what_a_load_takes() {
    let folder = tempfile::tempdir().unwrap();
    demo(folder.path(), &["config.json"]);
    let size = json!({"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64,
        "intermediate_size": 2048, "vocab_size": 16384, "max_position_embeddings": 4096});
    change(folder.path(), &size);
    let found = run(&["inspect", arg(folder.path()), "--json"]).expect(0).json();
    let rows = found["memory"].as_array().unwrap().iter();
    for row in rows.filter(|row| row["device"] == "cpu") {
        let precision = row["precision"].as_str().unwrap();
        // Pools so large that each part is mapped by itself: small ones share what was reserved before.
        let blocks = 8 * 4096 / BLOCK_TOKENS as u32;
        let (small, large) = (
            taken(folder.path(), precision, blocks),
            taken(folder.path(), precision, 2 * blocks),
        );
        let said = |name: &str| row[name].as_u64().unwrap();
        let (weights, kv) = (said("weight_bytes"), said("kv_bytes_at_context"));
        println!("{precision}: {weights} and {kv} said, {small:?} and {large:?} taken");
        // Scales, padding and RoPE come on top.
        assert!(
            (weights..weights + weights / 10).contains(&small[0]),
            "{precision}: {weights}, {small:?}"
        );
        // Memory is reserved in large pages.
        let reserved = (large[1] - small[1]) / 8;
        assert!(
            reserved.abs_diff(kv) < kv / 8,
            "{precision}: {kv}, {small:?}, {large:?}"
        );
    }
}
