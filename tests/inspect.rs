//! `gristmill inspect`: what is said of a checkpoint, with and without its weights, and that what a job's model is refused for is
//! named here, too.

use std::fs;
use std::path::Path;

use gristmill::job::chat::form_of;
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
        json!({"family": "Llama", "parameters": 2_755_008, "layers": 6, "window_layers": 0, "vocabulary": 2048,
            "context_tokens": 1024, "context_tokens_max": 1024})
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
        "parameters  2,755,008\n",
        "context     1,024 tokens\n",
        "weights     there, and fit\n",
        "gpu  fp8        3.2 MB     0.9 kB",
        "refused     for nothing\n",
    ] {
        assert!(text.contains(words), "`{words}` is missing:\n{text}");
    }
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
    assert!(refusals(&found)[0].contains("GGUF"), "{found}");
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
