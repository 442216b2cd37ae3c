//! A model with experts through the built program: a Mixtral that is made of the demo model, and stored in different ways.

use std::fs;
use std::path::{Path, PathBuf};

use gristmill::worker::model::ModelFiles;
use serde_json::{Value, json};

use crate::commands::run;
use crate::support::arg;
use crate::tensors::{Stored, answers, demo, job, model, ones, refused};

const EXPERTS: usize = 3;
const HIDDEN: usize = 192;
const WIDTH: usize = 512;

/// How a checkpoint stores its experts.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    /// One by one, by Mixtral's names.
    Mixtral,
    /// One by one, by the names of other models.
    General,
    /// All of a layer in two tensors.
    Together,
}

fn stored(name: String, shape: &[usize], data: Vec<u8>) -> Stored {
    let shape = shape.to_vec();
    Stored {
        name,
        shape,
        data,
        ..ones("", 1)
    }
}

/// The demo model's tensors, with its MLP as every expert: their weights sum to 1, so answers stay the same.
fn tensors(form: Form) -> Vec<Stored> {
    let (mlps, mut all): (Vec<_>, Vec<_>) = demo().into_iter().partition(|tensor| tensor.name.contains(".mlp."));
    for layer in 0..6 {
        let part = |part: &str| -> Vec<u8> {
            let name = format!("model.layers.{layer}.mlp.{part}.weight");
            mlps.iter().find(|tensor| tensor.name == name).unwrap().data.clone()
        };
        let (gate, up, down) = (part("gate_proj"), part("up_proj"), part("down_proj"));
        let mlp = match form {
            Form::Mixtral => format!("model.layers.{layer}.block_sparse_moe"),
            _ => format!("model.layers.{layer}.mlp"),
        };
        // Any router does.
        let router = gate[..EXPERTS * HIDDEN * 2].to_vec();
        all.push(stored(format!("{mlp}.gate.weight"), &[EXPERTS, HIDDEN], router));
        if form == Form::Together {
            let gate_up = [&gate[..], &up[..]].concat().repeat(EXPERTS);
            let shape = [EXPERTS, 2 * WIDTH, HIDDEN];
            all.push(stored(format!("{mlp}.experts.gate_up_proj"), &shape, gate_up));
            let shape = [EXPERTS, HIDDEN, WIDTH];
            all.push(stored(format!("{mlp}.experts.down_proj"), &shape, down.repeat(EXPERTS)));
            continue;
        }
        let names = match form {
            Form::Mixtral => ["w1", "w3", "w2"],
            _ => ["gate_proj", "up_proj", "down_proj"],
        };
        for expert in 0..EXPERTS {
            let parts = [
                (&gate, [WIDTH, HIDDEN]),
                (&up, [WIDTH, HIDDEN]),
                (&down, [HIDDEN, WIDTH]),
            ];
            for (name, (data, shape)) in names.iter().zip(parts) {
                all.push(stored(
                    format!("{mlp}.experts.{expert}.{name}.weight"),
                    &shape,
                    data.clone(),
                ));
            }
        }
    }
    all
}

/// The model in `folder` with these tensors.
fn mixtral(folder: &Path, tensors: &[Stored]) -> PathBuf {
    let model = model(folder, tensors, true);
    let path = model.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let map = config.as_object_mut().unwrap();
    map.insert("architectures".into(), json!(["MixtralForCausalLM"]));
    map.insert("model_type".into(), json!("mixtral"));
    map.insert("num_local_experts".into(), json!(EXPERTS));
    map.retain(|key, _| !["attention_bias", "mlp_bias"].contains(&key.as_str()));
    fs::write(path, config.to_string()).unwrap();
    model
}

#[test]
fn experts_are_read_however_they_are_stored() {
    let folder = tempfile::tempdir().unwrap();
    model(folder.path(), &demo(), true);
    let want = answers(folder.path());
    for form in [Form::Mixtral, Form::General, Form::Together] {
        let folder = tempfile::tempdir().unwrap();
        let model = mixtral(folder.path(), &tensors(form));
        assert_eq!(ModelFiles::open(model).unwrap().config.warnings, [] as [&str; 0]);
        assert_eq!(answers(folder.path()), want, "{form:?}");
    }
}

#[test]
fn an_expert_that_is_missing_or_has_too_much_is_named() {
    let name = "model.layers.4.block_sparse_moe.experts.2.w2.weight";
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut some = tensors(Form::Mixtral);
    some.retain(|tensor| tensor.name != name);
    mixtral(folder, &some);
    refused(folder, &["model.layers.4.mlp.experts.2.down_proj.weight", "is missing"]);

    let bias = "model.layers.4.block_sparse_moe.experts.2.w2.bias";
    mixtral(folder, &[tensors(Form::Mixtral), vec![ones(bias, HIDDEN)]].concat());
    refused(folder, &[bias, "read by no part"]);

    let fourth = "model.layers.0.mlp.experts.3.gate_proj.weight";
    mixtral(folder, &[tensors(Form::General), vec![ones(fourth, HIDDEN)]].concat());
    refused(folder, &[fourth, "read by no part"]);

    let twice = "model.layers.0.mlp.experts.1.down_proj.weight";
    mixtral(folder, &[tensors(Form::Together), vec![ones(twice, HIDDEN)]].concat());
    refused(folder, &[twice, "is stored twice"]);

    // The other way round, as another family stores it.
    let mut turned = tensors(Form::Together);
    for tensor in &mut turned {
        if tensor.name.ends_with("experts.gate_up_proj") {
            tensor.shape.swap(1, 2);
        }
    }
    mixtral(folder, &turned);
    refused(folder, &["mlp.experts.0.gate_proj.weight", "has shape [96, 1024]"]);
}

#[test]
fn experts_are_not_calibrated() {
    let folder = tempfile::tempdir().unwrap();
    let model = mixtral(folder.path(), &tensors(Form::General));
    let (job, output) = job(folder.path());
    run(&["calibrate", arg(&job)])
        .expect(2)
        .one_line(&["a model with experts", "cannot be calibrated"]);
    // A file that was put there is not used, nor passed over.
    fs::write(model.join("channels.safetensors"), "x").unwrap();
    let text = fs::read_to_string(&job).unwrap().replace("f32", "int8");
    fs::write(&job, text).unwrap();
    run(&["run", arg(&job)])
        .expect(2)
        .one_line(&["channels.safetensors", "remove this file"]);
    fs::remove_file(model.join("channels.safetensors")).unwrap();
    run(&["run", arg(&job), "--quiet"]).expect(0);
    assert!(output.join("_SUCCESS").exists());
}
