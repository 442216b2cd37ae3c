//! Folders that are no checkpoint in the Hugging Face layout, as a user gives them: one line says what they are and what to do.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::{Value, json};

use crate::support::{Run, arg, gristmill, job_in, root};

/// What Git LFS leaves in place of a file that was not fetched.
const POINTER: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:\
    4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n";

/// This command of the labelling job with this model.
fn with_model(folder: &Path, command: &str, model: &str) -> Run {
    let demo = root().join("jobs/demo/model");
    let (job, output) = job_in(folder, "label-tickets.yaml", |text| text.replace(arg(&demo), model));
    let run = Run::of(&mut gristmill(&[command, arg(&job)]));
    assert!(!output.exists(), "nothing is written");
    run
}

/// The model is refused with code 2 and one line that holds all of `words`.
#[track_caller]
fn refused(model: &str, words: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    with_model(folder.path(), "plan", model).expect(2).one_line(words);
}

/// The demo model without the files of `without`, and with `files`.
fn demo(folder: &Path, without: &[&str], files: &[(&str, &str)]) {
    for entry in fs::read_dir(root().join("jobs/demo/model")).unwrap() {
        let entry = entry.unwrap();
        if !without.contains(&entry.file_name().to_str().unwrap()) {
            fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
        }
    }
    put(folder, files);
}

fn put(folder: &Path, files: &[(&str, &str)]) {
    for (name, text) in files {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

/// A folder of these files alone is refused.
#[track_caller]
fn folder_refused(files: &[(&str, &str)], words: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    put(folder.path(), files);
    refused(arg(folder.path()), &[&[arg(folder.path())], words].concat());
}

/// The demo model, changed so, is refused.
#[track_caller]
fn demo_refused(without: &[&str], files: &[(&str, &str)], words: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    demo(folder.path(), without, files);
    refused(arg(folder.path()), &[&[arg(folder.path())], words].concat());
}

/// The demo model with more files is what it is.
#[track_caller]
fn demo_taken(files: &[(&str, &str)]) {
    let folder = tempfile::tempdir().unwrap();
    demo(folder.path(), &[], files);
    let jobs = tempfile::tempdir().unwrap();
    with_model(jobs.path(), "plan", arg(folder.path())).expect(0);
}

#[test]
fn pointers_of_git_lfs() {
    for name in [
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "tokenizer_config.json",
    ] {
        demo_refused(&[], &[(name, POINTER)], &[name, "Git LFS", "git lfs pull"]);
    }
    demo_refused(
        &["model.safetensors"],
        &[
            (
                "model.safetensors.index.json",
                "{\"weight_map\": {\"a\": \"model-00001-of-00001.safetensors\"}}",
            ),
            ("model-00001-of-00001.safetensors", POINTER),
        ],
        &["model-00001-of-00001.safetensors", "git lfs pull"],
    );
    for name in ["tekken.json", "tokenizer.model", "tiktoken.model"] {
        demo_refused(&["tokenizer.json"], &[(name, POINTER)], &[name, "git lfs pull"]);
        demo_taken(&[(name, POINTER)]);
    }
}

#[test]
fn tokenizers_in_other_forms() {
    let tokenizer_is = |files: &[(&str, &str)], words: &[&str]| demo_refused(&["tokenizer.json"], files, words);
    tokenizer_is(&[("tekken.json", "{}")], &["tekken.json", "missing field `config`"]);
    for name in ["qwen.tiktoken", "tokenizer.model", "tiktoken.model"] {
        tokenizer_is(
            &[(name, "IQ== 0\nIg== 1\n")],
            &[name, "2 ranks of tiktoken's", "Llama 3"],
        );
    }
    tokenizer_is(
        &[("tokenizer.model", "\u{a}\u{e}\u{a}\u{5}<unk>")],
        &["tokenizer.model", "not a model of SentencePiece"],
    );
    tokenizer_is(
        &[("tokenization_own.py", "")],
        &["tokenization_own.py", "tokenizer.json"],
    );
    tokenizer_is(
        &[("vocab.json", "{}"), ("merges.txt", "")],
        &["vocab.json", "save_pretrained"],
    );
    tokenizer_is(&[], &["holds no tokenizer: neither `tokenizer.json` nor"]);
    folder_refused(&[("tekken.json", "{}")], &["tekken.json", "config.json"]);
}

#[test]
fn weights_in_other_forms() {
    let weights_are = |file: &str, words: &[&str]| demo_refused(&["model.safetensors"], &[(file, "")], words);
    weights_are(
        "demo.Q4_K_M.gguf",
        &["demo.Q4_K_M.gguf", "ends within its first four bytes"],
    );
    weights_are("pytorch_model.bin", &["pickle", "pytorch_model.bin", "convert"]);
    weights_are("consolidated.00.pth", &["consolidated.00.pth", "Hugging Face layout"]);
    weights_are(
        "consolidated.safetensors",
        &["consolidated.safetensors", "Hugging Face layout"],
    );
    weights_are(
        "model-00001-of-00002.safetensors",
        &["model.safetensors.index.json", "model-00001-of-00002"],
    );
    weights_are("weights.safetensors", &["weights.safetensors", "model.safetensors"]);
    weights_are("flax_model.msgpack", &["flax_model.msgpack", "safetensors"]);
    // A trainer's, and no weights.
    weights_are("training_args.bin", &["neither `model.safetensors` nor"]);
    folder_refused(
        &[("params.json", "{}"), ("consolidated.00.pth", "")],
        &["consolidated.00.pth", "Hugging Face layout"],
    );
    folder_refused(&[("original/params.json", "{}")], &["original", "Hugging Face layout"]);
    folder_refused(&[("a.gguf", "GGUF")], &["a.gguf", "ends within its version"]);
    folder_refused(
        &[("a.gguf", "GGUF"), ("other.safetensors", "")],
        &["a GGUF file beside `other.safetensors`", "name it (`", "a.gguf`)"],
    );
    folder_refused(
        &[("a.gguf", "GGUF"), ("b.gguf", "GGUF")],
        &["several models as GGUF (`a.gguf`, `b.gguf`)", "give the file of one"],
    );
    folder_refused(&[("model.onnx", "")], &["ONNX", "safetensors"]);
}

#[test]
fn files_in_place_of_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    put(
        folder.path(),
        &[
            ("a.gguf", ""),
            ("weights", "GGUF\u{3}"),
            ("model.safetensors", ""),
            ("b.bin", ""),
        ],
    );
    let path = |name: &str| folder.path().join(name);
    refused(arg(&path("a.gguf")), &["a.gguf", "ends within its first four bytes"]);
    refused(arg(&path("weights")), &["weights", "ends within its version"]);
    refused(arg(&path("c.gguf")), &["c.gguf", "there is no such file"]);
    refused(
        arg(&path("model.safetensors")),
        &["model.safetensors", "give the folder"],
    );
    refused(arg(&path("b.bin")), &["pickled", "give the folder"]);
}

#[test]
fn adapters() {
    let config = "{\"base_model_name_or_path\": \"Qwen/Qwen3-8B\"}";
    let files = [("adapter_config.json", config), ("adapter_model.safetensors", "")];
    folder_refused(&files, &["adapter", "`Qwen/Qwen3-8B`", "the job's `model`"]);
    folder_refused(&[("adapter_config.json", "{")], &["adapter", "as its `adapter`"]);
    // Without weights of its own it is no model, whatever a trainer put beside it.
    demo_refused(
        &["model.safetensors"],
        &files,
        &["no model without its base `Qwen/Qwen3-8B`"],
    );
    demo_refused(
        &[],
        &files,
        &["beside a model", "Qwen/Qwen3-8B", "as the job's `adapter`"],
    );
}

#[test]
fn models_that_write_no_text() {
    folder_refused(&[("model_index.json", "{}")], &["diffusers"]);
    let module = |kind: &str| json!([{"idx": 1, "type": format!("sentence_transformers.models.{kind}")}]).to_string();
    demo_refused(
        &[],
        &[("modules.json", &module("Pooling"))],
        &["sentence-transformers", "embedding"],
    );
    let folder = tempfile::tempdir().unwrap();
    demo(folder.path(), &[], &[("modules.json", &module("Transformer"))]);
    with_model(folder.path(), "plan", arg(folder.path())).expect(0);
}

/// The layout of `~/.cache/huggingface/hub`: a folder a model, and in it snapshots of links to blobs.
#[test]
fn the_hub_cache() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("models--org--name");
    let (blobs, snapshot) = (cache.join("blobs"), cache.join("snapshots/abc123"));
    fs::create_dir_all(&blobs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    demo(&blobs, &[], &[]);
    for entry in fs::read_dir(&blobs).unwrap() {
        let name = entry.unwrap().file_name();
        symlink(Path::new("../../blobs").join(&name), snapshot.join(&name)).unwrap();
    }
    refused(arg(&cache), &["hub cache", "snapshots/abc123"]);
    refused(arg(folder.path()), &["hub cache", "models--org--name/snapshots/"]);
    with_model(folder.path(), "plan", arg(&snapshot)).expect(0);
    // Several snapshots: the one that `main` is.
    fs::create_dir(cache.join("snapshots/def456")).unwrap();
    refused(arg(&cache), &["hub cache", "one of the folders"]);
    put(&cache, &[("refs/main", "def456")]);
    refused(arg(&cache), &["hub cache", "snapshots/def456"]);
    // Copied without what the links name.
    fs::remove_file(blobs.join("model.safetensors")).unwrap();
    refused(arg(&snapshot), &["model.safetensors", "blobs", "is not there"]);
}

#[test]
fn a_folder_of_models() {
    folder_refused(&[("a/config.json", "{}")], &["config.json", "`a`"]);
    folder_refused(
        &[("a/config.json", "{}"), ("b/config.json", "{}")],
        &["config.json", "one of them"],
    );
}

#[test]
fn names_on_the_hub() {
    refused(
        "org/name-8B",
        &["`model`", "there is no such folder", "write `hf://org/name-8B`"],
    );
    refused(
        "https://huggingface.co/org/name-8B",
        &["`model`", "`hf://organisation/name`"],
    );
    refused("/no/such/folder", &["`model`", "/no/such/folder", "no such folder"]);
}

/// As some releases of transformers 5 save byte-level vocabularies: SentencePiece's pre-tokenizer and decoder.
#[test]
fn a_tokenizer_that_does_not_fit_its_vocabulary() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    fs::create_dir(&model).unwrap();
    demo(&model, &[], &[]);
    let path = model.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    tokenizer["pre_tokenizer"] =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": false});
    tokenizer["decoder"] = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
    fs::write(&path, tokenizer.to_string()).unwrap();
    for command in ["plan", "run"] {
        let run = with_model(folder.path(), command, arg(&model)).expect(2);
        run.one_line(&[
            arg(&path),
            "`Ġ` (byte-level)",
            "`▁` (SentencePiece)",
            "transformers 5",
            "original checkpoint",
        ]);
    }
}

#[test]
fn other_commands_say_the_same() {
    let folder = tempfile::tempdir().unwrap();
    put(folder.path(), &[("adapter_config.json", "{}")]);
    let run = Run::of(&mut gristmill(&["bench", "--model", arg(folder.path())])).expect(2);
    run.one_line(&["adapter", "as its `adapter`"]);
}
