//! GGUF files that are damaged, or lie in a folder: what the models of the fixtures say of them.

use std::fs;
use std::path::{Path, PathBuf};

use gristmill::device::Precision;
use gristmill::model::config::Config;
use gristmill::model::stored_form::StoredForm;
use gristmill::model::weights::{WeightSource, Weights, checkpoint_hash};
use gristmill::model::{ActivationMaxima, Transformer};
use serde_json::json;

use super::harness::{Reference, directory, folder, options};
use crate::commands::run;
use crate::support::arg;

/// A copy of a model's files alone.
fn copy_of(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(directory(name)).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|end| end == "gguf") {
            fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    dir
}

/// Replaces a text of a file by another of its length.
fn replace(path: &Path, from: &str, to: &str) {
    assert_eq!(from.len(), to.len());
    let mut bytes = fs::read(path).unwrap();
    let at = bytes.windows(from.len()).position(|window| window == from.as_bytes());
    bytes[at.unwrap()..][..to.len()].copy_from_slice(to.as_bytes());
    fs::write(path, bytes).unwrap();
}

fn refused(name: &str, path: &Path, words: &[&str]) {
    let error = Transformer::load(path, &options(&Reference::load(name), Precision::F32));
    let error = error.map(drop).unwrap_err().to_string();
    assert!(!error.contains('\n'), "{error}");
    for word in words {
        assert!(error.contains(word), "{word} is missing in: {error}");
    }
}

#[test]
fn damaged_files_are_refused_by_what_is_wrong() {
    let name = "llama-q8_0";
    let with = |change: &dyn Fn(&Path), words: &[&str]| {
        let dir = copy_of(name);
        let path = dir.path().join("model.gguf");
        change(&path);
        refused(name, &path, words);
    };
    let missing = "tensor `blk.1.ffn_up.weight` is missing";
    with(
        &|path| replace(path, "blk.1.ffn_up.weight", "blk.1.ffn_xy.weight"),
        &[
            missing,
            "the file has `blk.1.ffn_xy.weight`, which its metadata does not mention",
        ],
    );
    with(
        &|path| {
            let length = fs::metadata(path).unwrap().len();
            fs::File::options()
                .write(true)
                .open(path)
                .unwrap()
                .set_len(length - 64)
                .unwrap();
        },
        &["model.gguf", "ends at byte", "cut off"],
    );
    with(
        &|path| replace(path, "llama.feed_forward_length", "llama.feed_forward_lengtx"),
        &["`llama.feed_forward_length` is missing"],
    );
    with(
        &|path| {
            replace(
                path,
                "llama.attention.layer_norm_rms_epsilon",
                "other.attention.layer_norm_rms_epsilon",
            );
        },
        &["`llama.attention.layer_norm_rms_epsilon` is missing"],
    );
    with(
        &|path| replace(path, "general.architecture", "general.architectury"),
        &["no `general.architecture`"],
    );
    // What a folder of safetensors would be told of: a pointer in place of the file, and no file.
    with(
        &|path| fs::write(path, "version https://git-lfs.github.com/spec/v1\noid sha256:0\n").unwrap(),
        &["does not begin as a GGUF file does"],
    );
}

/// A tokenizer beside a file counts in its place, and another model's would make answers wrong without a word.
#[test]
fn a_tokenizer_with_other_tokens_than_the_file_is_named() {
    let dir = copy_of("qwen2-q4_0-tied");
    let warned = |vocabulary: &serde_json::Value| {
        let tokenizer = json!({"version": "1.0", "model": {"type": "BPE", "vocab": vocabulary, "merges": []}});
        fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        run(&["inspect", arg(dir.path())]).stderr
    };
    let set = gristmill::gguf::GgufSet::open(dir.path()).unwrap().unwrap();
    let tokens = set.metadata().get("tokenizer.ggml.tokens").unwrap().list().unwrap();
    let own: Vec<&str> = tokens.iter().map(|token| token.text().unwrap()).collect();
    let vocabulary = |tokens: &[&str]| {
        let ids = tokens
            .iter()
            .enumerate()
            .map(|(id, token)| ((*token).to_owned(), json!(id)));
        serde_json::Value::Object(ids.collect())
    };
    let words = "counts in place of the tokenizer of";
    let same = warned(&vocabulary(&own));
    assert!(!same.contains(words), "{same}");
    let mut other = own.clone();
    other.swap(40, 41);
    let said = warned(&vocabulary(&other));
    assert!(
        said.contains(words) && said.contains("2 of its tokens are others there (the first is 40)"),
        "{said}"
    );
}

#[test]
fn a_pointer_in_place_of_a_file_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    fs::write(&path, "version https://git-lfs.github.com/spec/v1\noid sha256:0\n").unwrap();
    for model in [&path, &dir.path().to_path_buf()] {
        run(&["inspect", arg(model)])
            .expect(2)
            .stdout
            .contains("git lfs pull")
            .then_some(())
            .unwrap();
    }
}

#[test]
fn a_set_that_is_not_whole_is_refused() {
    let name = "qwen3-q4_k_m-split";
    let dir = copy_of(name);
    let files: Vec<PathBuf> = fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    assert!(files.len() > 1);
    let last = files.iter().max().unwrap();
    // Any file stands for the set.
    let of = |path: &Path| Config::load(path).unwrap();
    assert_eq!(of(last), of(files.iter().min().unwrap()));
    assert_eq!(of(dir.path()).hidden_size, 256);
    let bytes = fs::read(last).unwrap();
    fs::remove_file(last).unwrap();
    let last_name = last.file_name().unwrap().to_str().unwrap();
    refused(
        name,
        files.iter().min().unwrap(),
        &[last_name, "it is not there", "fetch it"],
    );
    // Another file of the set in its place.
    fs::copy(files.iter().min().unwrap(), last).unwrap();
    refused(name, dir.path(), &[last_name, "its metadata makes it file 1 of"]);
    fs::write(last, bytes).unwrap();
    Transformer::load(dir.path(), &options(&Reference::load(name), Precision::F32)).unwrap();
}

#[test]
fn a_file_is_the_model_that_its_folder_is() {
    let dir = copy_of("qwen2-q4_0-tied");
    let path = dir.path().join("model.gguf");
    let hash = checkpoint_hash(&path).unwrap();
    assert_eq!(checkpoint_hash(dir.path()).unwrap(), hash);
    assert_eq!(Config::load(dir.path()).unwrap(), Config::load(&path).unwrap());
    assert_eq!(
        ActivationMaxima::path(&path),
        dir.path().join("model.gguf.channels.safetensors")
    );
    assert_eq!(
        ActivationMaxima::path(dir.path()),
        dir.path().join("channels.safetensors")
    );
    // What calibration writes makes no other model of the folder.
    for name in ["channels.safetensors", "model.gguf.channels.safetensors"] {
        fs::write(dir.path().join(name), "").unwrap();
        assert_eq!(checkpoint_hash(dir.path()).unwrap(), hash);
    }
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    assert_ne!(checkpoint_hash(&path).unwrap(), hash);
}

#[test]
fn inspect_shows_a_gguf_file() {
    // Numbers in blocks are F32 once they are decoded; those of F16 stay.
    for (name, format, bytes) in [
        ("qwen3-q4_k_m-split", "Q4_K", 4),
        ("gemma2-q8_0", "Q8_0", 4),
        ("llama-linear-f16", "f16", 2),
    ] {
        let found = run(&["inspect", arg(&folder(name)), "--json"]).expect(0).json();
        assert_eq!(found["architecture"]["format"], json!(format), "{found}");
        assert_eq!(
            (
                &found["weights"],
                &found["tokenizer"],
                &found["runs"],
                &found["refused"]
            ),
            (&json!(true), &json!(true), &json!(true), &json!([])),
            "{found}"
        );
        let memory = found["memory"].as_array().unwrap();
        let cpu = memory
            .iter()
            .find(|of| of["device"] == "cpu" && of["precision"] == "f32")
            .unwrap();
        let parameters = found["architecture"]["parameters"].as_u64().unwrap();
        assert!(cpu["weight_bytes"].as_u64().unwrap() >= bytes * parameters, "{found}");
    }
}

/// Every tensor that the format has in blocks is read as F32, also an expert of a layer's.
#[test]
fn experts_are_read_by_themselves() {
    let name = "qwen3moe-iq4_nl";
    let config = Config::load(&folder(name)).unwrap();
    let weights = Weights::open(&folder(name), StoredForm::of(&config)).unwrap();
    let of = |expert: usize| {
        let name = format!("model.layers.1.mlp.experts.{expert}.up_proj.weight");
        weights.tensor(&name, Some(32), 32).unwrap().data.into_owned()
    };
    assert_eq!(of(0).len(), 32 * 32 * 4);
    assert!(of(0) != of(1) && of(1) != of(3));
    assert!(
        weights
            .tensor("model.layers.1.mlp.experts.4.up_proj.weight", Some(32), 32)
            .is_err()
    );
}
