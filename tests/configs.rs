//! `config.json`: what its keys do to a job is said before it starts.

use std::fs;
use std::path::{Path, PathBuf};

use gristmill::model::config::Config;
use serde_json::{Value, json};

use crate::commands::run;
use crate::support::{arg, copy_folder, root};

/// The demo model with more keys in its `config.json`; a key whose value is null is taken out.
fn model(folder: &Path, changes: &Value) -> PathBuf {
    let model = folder.join("model");
    copy_folder(&root().join("jobs/demo/model"), &model);
    let path = model.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let keys = config.as_object_mut().unwrap();
    keys.extend(changes.as_object().unwrap().clone());
    keys.retain(|_, value| !value.is_null());
    fs::write(path, config.to_string()).unwrap();
    model
}

fn job(folder: &Path) -> PathBuf {
    fs::write(
        folder.join("rows.jsonl"),
        "{\"text\": \"The card was charged twice.\"}\n",
    )
    .unwrap();
    let text = "name: small\nmodel: model\nprecision: f32\ninput: {uri: rows.jsonl}\nprompt: {text: '{{ text }}'}\n\
                generate: {max_tokens: 2}\noutput: {uri: out}\n";
    let path = folder.join("job.yaml");
    fs::write(&path, text).unwrap();
    path
}

/// Files of all families as two releases of transformers save them: every key of theirs is known.
#[test]
fn what_transformers_saves_is_known() {
    let all: Value = serde_json::from_str(include_str!("fixtures/configs.json")).unwrap();
    let mut seen = 0;
    for (release, configs) in all.as_object().unwrap() {
        for (name, config) in configs.as_object().unwrap() {
            let parsed = Config::parse(Path::new("config.json"), &config.to_string());
            let parsed = parsed.unwrap_or_else(|error| panic!("{release}, {name}: {error}"));
            assert_eq!(parsed.warnings, [] as [&str; 0], "{release}, {name}");
            seen += 1;
        }
    }
    assert_eq!(seen, 70);
}

#[test]
fn unknown_keys_are_named_by_every_command() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let model = model(
        folder,
        &json!({"grouped_heads": 3, "sliding_windows": false, "auto_map": {"AutoModelForCausalLM": "modeling.Own"}}),
    );
    let job = job(folder);
    let line = "config.json: not known for Llama, and without effect: `grouped_heads` (3)\n";
    let code = "`auto_map` names code that comes with the checkpoint; it is not run, the model is computed as Llama\n";
    let plan = run(&["plan", arg(&job), "--json"]).expect(0);
    let said = plan.json()["warnings"].to_string();
    assert!(
        said.contains(line.trim_end()) && said.contains(code.trim_end()),
        "{said}"
    );
    for command in [
        &["plan", arg(&job)][..],
        &["submit", arg(&job), "--no-enqueue"],
        &["run", arg(&job), "--quiet"],
        &[
            "bench",
            "--model",
            arg(&model),
            "--requests",
            "2",
            "--input-len",
            "4",
            "--output-len",
            "2",
            "--warm-up",
            "0",
        ],
    ] {
        let ran = run(command).expect(0);
        for line in [line, code] {
            assert_eq!(ran.stderr.matches(line).count(), 1, "{command:?}: {}", ran.stderr);
        }
        assert!(!ran.stderr.contains("sliding_windows"), "{}", ran.stderr);
    }
}

#[test]
fn options_of_other_models_stop_a_job_before_it_starts() {
    for (changes, words) in [
        (json!({"alibi": true}), "option `alibi` (true) is not supported"),
        (json!({"is_causal": false}), "option `is_causal` (false)"),
        (json!({"scale_emb": 12}), "option `scale_emb` (12)"),
        (json!({"logits_scaling": 0}), "option `logits_scaling` (0)"),
        (
            json!({"attn_logit_softcapping": 50.0}),
            "option `attn_logit_softcapping`",
        ),
        (json!({"vision_config": {"a": 1}}), "option `vision_config`"),
        (
            json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}}),
            "option `rope_scaling.alpha` (1000.0)",
        ),
        (
            json!({"rms_norm_eps": "Infinity"}),
            "`rms_norm_eps` is \"Infinity\", not a number",
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        model(folder.path(), &changes);
        let job = job(folder.path());
        for command in ["plan", "run"] {
            run(&[command, arg(&job)]).expect(2).one_line(&["config.json", words]);
        }
        assert!(!folder.path().join("out").exists());
    }
}

#[test]
fn options_at_their_neutral_values_are_taken() {
    let folder = tempfile::tempdir().unwrap();
    let neutral = json!({"alibi": false, "is_causal": true, "scale_emb": 1, "num_local_experts": 0, "no_rope_layers": [],
        "quantization_config": {}, "rope_scaling": {"rope_type": "linear", "factor": 1.0, "attn_factor": 1.0}});
    model(folder.path(), &neutral);
    let plan = run(&["plan", arg(&job(folder.path()))]).expect(0);
    assert_eq!(plan.stderr, "");
}

/// What says so may stand beside `config.json` alone. Forms that are read are tried by `model_reference`.
#[test]
fn quantized_checkpoints_are_refused_by_their_side_files() {
    for (name, says) in [
        ("hf_quant_config.json", json!({"quant_algo": "FP8"})),
        ("quantize_config.json", json!({"bits": 4, "quant_method": "other"})),
        ("quant_config.json", json!({"quant_method": "other"})),
        ("quantization_config.json", json!({"bits": 4})),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let model = model(folder.path(), &json!({}));
        fs::write(model.join(name), says.to_string()).unwrap();
        let words = [name, "the weights of this checkpoint are quantized ({\""];
        run(&["plan", arg(&job(folder.path()))]).expect(2).one_line(&words);
    }
}

/// Python writes `Infinity`; labels of a classifier that a model once was may take some MB.
#[test]
fn files_are_read_as_python_writes_them() {
    let folder = tempfile::tempdir().unwrap();
    let labels: serde_json::Map<String, Value> = (0..100_000)
        .map(|id| (id.to_string(), json!(format!("LABEL_{id}"))))
        .collect();
    let model = model(
        folder.path(),
        &json!({"id2label": labels, "time_step_limit": [0.0, 1.5]}),
    );
    let path = model.join("config.json");
    let text = fs::read_to_string(&path).unwrap().replace("1.5]", "Infinity]");
    assert!(text.len() > 2 << 20);
    fs::write(&path, text).unwrap();
    let plan = run(&["plan", arg(&job(folder.path()))]).expect(0);
    assert!(
        plan.stderr.contains("`time_step_limit` ([0.0,\"Infinity\"])"),
        "{}",
        plan.stderr
    );
}
