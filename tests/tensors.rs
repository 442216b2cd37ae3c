//! Checkpoints whose tensors are other than their `config.json` says, through the built program: each is refused by a tensor's name
//! before anything is loaded, or answers as it should.

use std::fs;
use std::path::{Path, PathBuf};

use gristmill::device::Precision;
use gristmill::model::weights::checkpoint_hash;
use gristmill::worker::model::ModelFiles;
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};
use serde_json::{Value, json};

use crate::commands::run;
use crate::generation_config::rows;
use crate::support::{arg, root};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const TABLE: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

#[derive(Clone)]
pub(crate) struct Stored {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

/// A vector of so many ones.
pub(crate) fn ones(name: &str, length: usize) -> Stored {
    Stored {
        name: name.into(),
        dtype: Dtype::BF16,
        shape: vec![length],
        data: [0x80, 0x3F].repeat(length),
    }
}

/// The demo model's tensors.
pub(crate) fn demo() -> Vec<Stored> {
    let bytes = fs::read(root().join("jobs/demo/model").join(SINGLE)).unwrap();
    let stored = |(name, view): (String, TensorView)| Stored {
        name,
        dtype: view.dtype(),
        shape: view.shape().to_vec(),
        data: view.data().to_vec(),
    };
    SafeTensors::deserialize(&bytes)
        .unwrap()
        .tensors()
        .into_iter()
        .map(stored)
        .collect()
}

/// The demo model's with one more.
fn with(tensor: Stored) -> Vec<Stored> {
    [demo(), vec![tensor]].concat()
}

/// An output head: the embedding table with its rows turned by so many.
fn head(turned: usize) -> Stored {
    let table = demo().into_iter().find(|tensor| tensor.name == TABLE).unwrap();
    let mut data = table.data.clone();
    data.rotate_left(turned * table.shape[1] * 2);
    Stored {
        name: HEAD.into(),
        data,
        ..table
    }
}

fn write(path: &Path, tensors: &[Stored]) {
    let views = tensors.iter().map(|tensor| {
        let view = TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.data).unwrap();
        (tensor.name.as_str(), view)
    });
    fs::write(path, serialize(views, None).unwrap()).unwrap();
}

/// The demo model in `folder` with these tensors, which `config.json` ties or not.
pub(crate) fn model(folder: &Path, tensors: &[Stored], tied: bool) -> PathBuf {
    let model = folder.join("model");
    fs::create_dir_all(&model).unwrap();
    let demo = root().join("jobs/demo/model");
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        fs::copy(demo.join(name), model.join(name)).unwrap();
    }
    let text = fs::read_to_string(demo.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["tie_word_embeddings"] = json!(tied);
    fs::write(model.join("config.json"), config.to_string()).unwrap();
    write(&model.join(SINGLE), tensors);
    model
}

/// The same in two files with an index, norms in the second. `change` may change what the files hold and the index's entries.
fn sharded(folder: &Path, change: impl FnOnce(&mut [Vec<Stored>; 2], &mut Value)) -> PathBuf {
    let model = model(folder, &demo(), true);
    fs::remove_file(model.join(SINGLE)).unwrap();
    let mut files = [Vec::new(), Vec::new()];
    let mut map = json!({});
    for tensor in demo() {
        let file = usize::from(tensor.name.contains("norm"));
        map[&tensor.name] = json!(shard(file));
        files[file].push(tensor);
    }
    change(&mut files, &mut map);
    for (at, tensors) in files.iter().enumerate() {
        write(&model.join(shard(at)), tensors);
    }
    fs::write(model.join(INDEX), json!({"weight_map": map}).to_string()).unwrap();
    model
}

fn shard(number: usize) -> String {
    format!("model-{number}.safetensors")
}

/// A job of six rows over the model in `folder`, and its output.
pub(crate) fn job(folder: &Path) -> (PathBuf, PathBuf) {
    let rows = (0..6).map(|row| format!("{{\"id\": {row}, \"text\": \"ticket {row}: my parcel\"}}\n"));
    fs::write(folder.join("rows.jsonl"), rows.collect::<String>()).unwrap();
    let text = "name: t\nmodel: model\nprecision: f32\ncontext: 128\ninput: {uri: rows.jsonl}\n\
                prompt: {messages: [{role: user, content: '{{ text }}'}]}\n\
                generate: {max_tokens: 8, temperature: 0, ignore_eos: true}\noutput: {uri: out, token_ids: true}\n";
    let path = folder.join("t.yaml");
    fs::write(&path, text).unwrap();
    (path, folder.join("out"))
}

/// `plan` sees it, and `run`.
#[track_caller]
pub(crate) fn refused(folder: &Path, words: &[&str]) {
    let (job, output) = job(folder);
    for command in ["plan", "run"] {
        run(&[command, arg(&job)]).expect(2).one_line(words);
    }
    assert!(!output.exists(), "a refused job publishes nothing");
}

#[track_caller]
pub(crate) fn answers(folder: &Path) -> Value {
    let (job, output) = job(folder);
    run(&["plan", arg(&job)]).expect(0);
    run(&["run", arg(&job), "--quiet"]).expect(0);
    rows(&output)
}

/// Answers of a model with these tensors, and what its user is warned of.
#[track_caller]
fn answered(tensors: &[Stored], tied: bool) -> (Value, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path(), tensors, tied);
    (answers(folder.path()), ModelFiles::open(model).unwrap().config.warnings)
}

#[test]
fn a_tensor_that_nothing_reads_is_refused_by_name() {
    for (tensor, words) in [
        (ones("model.layers.3.self_attn.q_proj.bias", 192), "describes none"),
        (
            ones("model.layers.0.self_attn.q_norm.weight", 32),
            "norm of queries or keys",
        ),
        (
            ones("model.layers.6.input_layernorm.weight", 192),
            "a layer above the 6",
        ),
        (
            ones("model.layers.0.mlp.up_proj.weight_scale", 1),
            "weights in a quantized form",
        ),
        (ones("score.weight", 192), "scores or classifies"),
        (ones("model.something", 2), "read by no part"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        model(folder.path(), &with(tensor.clone()), true);
        refused(folder.path(), &[&tensor.name, words, SINGLE]);
    }
}

#[test]
fn what_is_missing_or_has_another_shape_is_seen_at_plan() {
    let name = "model.layers.5.mlp.down_proj.weight";
    let folder = tempfile::tempdir().unwrap();
    let mut tensors = demo();
    tensors.retain(|tensor| tensor.name != name);
    model(folder.path(), &tensors, true);
    refused(folder.path(), &[name, "is missing"]);
    tensors.push(ones(name, 192));
    model(folder.path(), &tensors, true);
    refused(folder.path(), &[name, "has shape [192]", "[192, 512]"]);
}

#[test]
fn harmless_tensors_change_nothing() {
    let (want, _) = answered(&demo(), true);
    let frequencies = ones("model.layers.0.self_attn.rotary_emb.inv_freq", 16);
    assert_eq!(answered(&with(frequencies), true), (want, vec![]));
}

#[test]
fn the_output_head_is_what_the_files_say() {
    let (tied, warnings) = answered(&demo(), true);
    assert!(warnings.is_empty(), "{warnings:?}");
    let (own, warnings) = answered(&with(head(3)), false);
    assert!(warnings.is_empty(), "{warnings:?}");
    assert_ne!(own, tied, "the other head has a say");

    // A copy of the table, in its format and in another.
    assert_eq!(answered(&with(head(0)), true), (tied.clone(), vec![]));
    let wide = |tensor: Stored| Stored {
        dtype: Dtype::F32,
        data: tensor
            .data
            .chunks_exact(2)
            .flat_map(|number| [0, 0, number[0], number[1]])
            .collect(),
        ..tensor
    };
    assert_eq!(answered(&with(wide(head(0))), true), (tied.clone(), vec![]));

    let (found, warnings) = answered(&with(head(3)), true);
    assert_eq!(found, own, "the head that is there is used");
    let [warning] = &warnings[..] else {
        panic!("{warnings:?}")
    };
    assert!(
        warning.contains("`lm_head.weight` differs from the embedding table"),
        "{warning}"
    );

    let (found, warnings) = answered(&demo(), false);
    assert_eq!(found, tied, "without a head, the table is it");
    let [warning] = &warnings[..] else {
        panic!("{warnings:?}")
    };
    assert!(warning.contains("there is no `lm_head.weight`"), "{warning}");

    // What only the last number of the last row tells.
    let mut last = head(0);
    *last.data.last_mut().unwrap() ^= 1;
    let (_, warnings) = answered(&with(last), true);
    assert_eq!(warnings.len(), 1, "{warnings:?}");
}

#[test]
fn memory_is_planned_for_the_head_that_is_used() {
    for (tensors, tied, settled) in [
        (with(head(3)), true, false),
        (with(head(0)), true, true),
        (demo(), false, true),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let model = model(folder.path(), &tensors, tied);
        assert_eq!(ModelFiles::open(model).unwrap().config.tied_embeddings, settled);
    }
}

#[test]
fn an_index_and_its_files_must_agree() {
    let (norm, table) = ("model.norm.weight", TABLE);
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    sharded(folder, |files, _| files[1].retain(|tensor| tensor.name != norm));
    refused(
        folder,
        &["model-1.safetensors", norm, "is missing", "the index lists it here"],
    );

    sharded(folder, |_, map| {
        map.as_object_mut().unwrap().remove(norm);
    });
    refused(folder, &["model-1.safetensors", norm, "the index does not list it"]);

    sharded(folder, |files, _| {
        let twice = files[0].iter().find(|tensor| tensor.name == table).unwrap().clone();
        files[1].push(twice);
    });
    refused(folder, &["model-1.safetensors", table, "model-0.safetensors"]);

    let model = sharded(folder, |_, _| {});
    let hash = checkpoint_hash(&model).unwrap();
    assert!(ModelFiles::open(model.clone()).unwrap().config.warnings.is_empty());
    let want = answered(&demo(), true).0;
    assert_eq!(answers(folder), want);
    // What no index lists counts for nothing.
    write(&model.join("consolidated.safetensors"), &with(ones("other", 1)));
    assert!(ModelFiles::open(model.clone()).unwrap().config.warnings.is_empty());
    assert_eq!(checkpoint_hash(&model).unwrap(), hash);
}

#[test]
fn one_file_goes_before_an_index() {
    let folder = tempfile::tempdir().unwrap();
    let model = sharded(folder.path(), |files, _| files[1].clear());
    write(&model.join(SINGLE), &demo());
    let warnings = ModelFiles::open(model.clone()).unwrap().config.warnings;
    assert!(
        matches!(&warnings[..], [warning] if warning.contains(INDEX) && warning.contains("the first alone is read")),
        "{warnings:?}"
    );
    assert_eq!(answers(folder.path()), answered(&demo(), true).0);
    // An index of the one file says the same.
    let map: serde_json::Map<String, Value> = demo().into_iter().map(|tensor| (tensor.name, json!(SINGLE))).collect();
    fs::write(model.join(INDEX), json!({"weight_map": map}).to_string()).unwrap();
    assert!(ModelFiles::open(model).unwrap().config.warnings.is_empty());
}

#[test]
fn a_benchmark_of_a_checkpoint_holds_it_against_its_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path(), &with(ones("model.something", 2)), true);
    let size = ["--requests", "2", "--input-len", "8", "--output-len", "2", "--json"];
    let bench = [&["bench", "--model", arg(&model)], &size[..]].concat();
    run(&bench).expect(2).one_line(&["model.something", "read by no part"]);
    run(&[&bench[..], &["--load-format", "dummy"]].concat()).expect(0);
}

/// An older gristmill used the table where `config.json` asked for it: one job must not have answers of both heads.
#[test]
fn a_head_beside_a_tied_table_makes_it_another_model() {
    for (tensors, tied, is_other) in [
        (with(head(3)), true, true),
        (with(head(0)), true, false),
        (with(head(3)), false, false),
        (demo(), false, false),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let model = model(folder.path(), &tensors, tied);
        let hash = ModelFiles::open(model.clone()).unwrap().hash(Precision::F32).unwrap();
        assert_eq!(hash != checkpoint_hash(&model).unwrap(), is_other, "tied {tied}");
    }
}
