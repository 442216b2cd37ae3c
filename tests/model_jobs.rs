//! The small models of all families as a user meets them: a folder and a job file, the built program, and the answers as pyarrow
//! reads them. Their greedy tokens are those of transformers (`fixtures/make_models.py`).

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::bad_input::rows_of;
use crate::commands::{queues, run};
use crate::model_reference::adapters::beside;
use crate::model_reference::four_bits::{FOUR_BITS, OTHERS};
use crate::model_reference::harness::{
    ADAPTERS, GGUF, Reference, all_models, directory as files_of, folder as model_of,
};
use crate::support::{arg, copy_folder};

/// A tokenizer of so many tokens: prompts are token ids, so it need only exist.
pub(crate) fn tokenizer(vocabulary: usize) -> Value {
    let words: serde_json::Map<String, Value> = (0..vocabulary).map(|id| (format!("w{id}"), json!(id))).collect();
    let bytes = |add_prefix_space| json!({"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": bytes(false), "post_processor": null, "decoder": bytes(true),
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": words, "merges": []
        }
    })
}

/// The job of reference prompts of a model, with an adapter if there is one, in `folder`.
pub(crate) fn job(folder: &Path, name: &str, adapter: Option<&str>, reference: &Reference) -> std::path::PathBuf {
    let model = folder.join("model");
    copy_folder(&files_of(name), &model);
    fs::remove_file(model.join("reference.safetensors")).unwrap();
    fs::write(
        model.join("tokenizer.json"),
        tokenizer(reference.vocabulary).to_string(),
    )
    .unwrap();
    let class = json!({"tokenizer_class": "PreTrainedTokenizerFast"});
    fs::write(model.join("tokenizer_config.json"), class.to_string()).unwrap();
    let prompts = reference.prompts.iter().map(|prompt| &prompt.tokens[..prompt.length]);
    let lines = prompts.map(|ids| format!("{}\n", json!({"ids": ids})));
    fs::write(folder.join("rows.jsonl"), lines.collect::<String>()).unwrap();
    let text = format!(
        "name: small\nmodel: model\nprecision: f32\ncontext: {}\ninput: {{uri: rows.jsonl}}\nprompt: {{token_ids: ids}}\n\
         generate: {{max_tokens: 64, temperature: 0, ignore_eos: true}}\noutput: {{uri: out, token_ids: true}}\n",
        reference.context
    );
    let adapter = adapter.map(|adapter| format!("adapter: {}\n", files_of(adapter).display()));
    let path = folder.join("job.yaml");
    fs::write(&path, text + &adapter.unwrap_or_default()).unwrap();
    path
}

fn assert_answers(output: &Path, reference: &Reference, name: &str) {
    let rows = rows_of(output);
    assert_eq!(rows.len(), reference.prompts.len());
    for (row, prompt) in rows.iter().zip(&reference.prompts) {
        assert_eq!(row["token_ids"], json!(prompt.tokens[prompt.length..]), "{name}");
    }
}

#[test]
fn each_small_model_answers_a_job_as_transformers_does() {
    for name in all_models() {
        let reference = Reference::load(name);
        let folder = tempfile::tempdir().unwrap();
        let job = job(folder.path(), name, None, &reference);
        run(&["run", arg(&job), "--quiet"]).expect(0);
        assert_answers(&folder.path().join("out"), &reference, name);
    }
}

/// The job in four bits; the error names the place of the model.
#[test]
fn a_job_in_four_bits_needs_a_checkpoint_in_four_bits() {
    let in_four_bits = |name: &str, reference: &Reference| {
        let folder = tempfile::tempdir().unwrap();
        let job = job(folder.path(), name, None, reference);
        let text = fs::read_to_string(&job).unwrap();
        fs::write(&job, text.replace("precision: f32", "precision: w4a8\nkv_cache: f32")).unwrap();
        (folder, job)
    };
    for name in FOUR_BITS {
        let reference = Reference::load(name);
        let (folder, job) = in_four_bits(name, &reference);
        run(&["run", arg(&job), "--quiet"]).expect(0);
        // A rounding may decide between tokens that are nearly as likely; what follows then is another text.
        let rows = rows_of(&folder.path().join("out"));
        assert_eq!(rows.len(), reference.prompts.len());
        let first = |row: &Value| row["token_ids"][0].clone();
        let same = rows.iter().zip(&reference.prompts);
        let same = same.filter(|(row, prompt)| first(row) == json!(prompt.tokens[prompt.length]));
        let (same, all) = (same.count(), rows.len());
        println!("{name}: the first token of {same} of {all} answers is the reference's");
        assert!(same * 4 >= all * 3, "{name}: {same} of {all}");
    }
    for name in OTHERS {
        let reference = Reference::load(name);
        let (_folder, job) = in_four_bits(name, &reference);
        for command in [&["run", arg(&job), "--quiet"][..], &["plan", arg(&job)]] {
            run(command)
                .expect(2)
                .one_line(&["`precision` is w4a8", "choose `int8`"]);
        }
    }
}

#[test]
fn a_job_with_an_adapter_answers_as_peft_does() {
    for (adapter, name) in ADAPTERS {
        let reference = Reference::load(adapter);
        let folder = tempfile::tempdir().unwrap();
        let job = job(folder.path(), name, Some(adapter), &reference);
        run(&["run", arg(&job), "--quiet"]).expect(0);
        assert_answers(&folder.path().join("out"), &reference, adapter);
        // Without it, it is another model.
        let text = fs::read_to_string(&job).unwrap();
        let (plain, _) = text.split_once("adapter: ").unwrap();
        fs::write(&job, plain).unwrap();
        run(&["run", arg(&job), "--quiet"])
            .expect(2)
            .one_line(&["began with another model"]);
    }
}

/// A worker loads the adapter of its first job, or that which its operator names.
#[test]
fn a_worker_has_the_adapter_of_its_job() {
    let (adapter, name) = ADAPTERS[0];
    let reference = Reference::load(adapter);
    for url in queues("a_worker_has_the_adapter_of_its_job") {
        for is_named in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let job = job(folder.path(), name, Some(adapter), &reference);
            let (output, model) = (folder.path().join("out"), folder.path().join("model"));
            run(&["submit", arg(&job), "--queue", &url]).expect(0);
            let files = files_of(adapter);
            let named = ["--model", arg(&model), "--adapter", arg(&files), "--precision", "f32"];
            let worker = [
                "worker",
                "--queue",
                &url,
                "--until-idle",
                "--context",
                "128",
                "--job",
                arg(&output),
            ];
            run(&[&worker[..], if is_named { &named } else { &[] }].concat()).expect(0);
            assert_answers(&output, &reference, adapter);
        }
    }
}

/// One worker has a model alone and with each of its adapters: jobs with any of them and with none share its batches.
#[test]
fn a_worker_with_adapters_beside_its_model_answers_as_peft_does() {
    for url in queues("a_worker_with_adapters_beside_its_model_answers_as_peft_does") {
        for (name, adapters) in beside() {
            let folder = tempfile::tempdir().unwrap();
            let names: Vec<Option<&str>> = [None].into_iter().chain(adapters.iter().copied().map(Some)).collect();
            let jobs: Vec<_> = names
                .iter()
                .enumerate()
                .map(|(i, adapter)| {
                    let reference = Reference::load(adapter.unwrap_or(name));
                    let folder = folder.path().join(i.to_string());
                    fs::create_dir(&folder).unwrap();
                    let job = job(&folder, name, *adapter, &reference);
                    // Prefixes are shared by rows of one adapter alone, even where the jobs name one salt.
                    let text = fs::read_to_string(&job).unwrap();
                    fs::write(&job, format!("cache_salt: ours\n{text}")).unwrap();
                    run(&["submit", arg(&job), "--queue", &url]).expect(0);
                    (folder.join("out"), reference)
                })
                .collect();
            let model = folder.path().join("0/model");
            let folders: Vec<_> = adapters.iter().map(|adapter| files_of(adapter)).collect();
            let mut worker = vec!["worker", "--queue", &url, "--until-idle", "--context", "128"];
            worker.extend(["--model", arg(&model), "--precision", "f32"]);
            for (output, _) in &jobs {
                worker.extend(["--job", arg(output)]);
            }
            for folder in &folders {
                worker.extend(["--mix-adapter", arg(folder)]);
            }
            run(&worker).expect(0);
            for ((output, reference), adapter) in jobs.iter().zip(&names) {
                assert_answers(output, reference, adapter.unwrap_or(name));
                run(&["verify", arg(output)]).expect(0);
            }
        }
    }
}

/// Adapters that cannot stand beside a model are refused before it is loaded.
#[test]
fn adapters_that_cannot_stand_beside_a_model_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let reference = Reference::load("llama-plain");
    job(folder.path(), "llama-plain", None, &reference);
    let model = folder.path().join("model");
    let [all, head] = ["llama-plain-all", "llama-plain-head"].map(files_of);
    let bench = |model: &str, adapters: &[&Path]| {
        let mut command = vec![
            "bench",
            "--model",
            model,
            "--requests",
            "8",
            "--input-len",
            "9",
            "--output-len",
            "4",
        ];
        adapters
            .iter()
            .for_each(|adapter| command.extend(["--mix-adapter", arg(adapter)]));
        run(&command)
    };
    bench(arg(&model), &[&all, &all]).expect(0);
    bench(arg(&model), &[&all, &head])
        .expect(2)
        .one_line(&["`lm_head.weight`", "`--adapter`"]);
    bench(arg(&model), &[&model])
        .expect(2)
        .one_line(&["adapter_config.json"]);
    bench("qwen2.5-0.5b", &[&all])
        .expect(2)
        .one_line(&["--mix-adapter", "random"]);
    let both = ["--model", "m", "--mix-adapter", "a", "--adapter", "a"];
    let both = run(&[&["worker", "--queue", "amqp://localhost/q"], &both[..]].concat()).expect(2);
    assert!(both.stderr.contains("cannot be used with"), "{}", both.stderr);
}

/// A GGUF file by itself: configuration, tokenizer and weights are its own.
#[test]
fn each_gguf_file_answers_a_job_as_transformers_does() {
    for name in GGUF {
        let reference = Reference::load(name);
        let folder = tempfile::tempdir().unwrap();
        let job = job(folder.path(), name, None, &reference);
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            fs::remove_file(folder.path().join("model").join(file)).unwrap();
        }
        let file = model_of(name).file_name().unwrap().to_string_lossy().into_owned();
        let text = fs::read_to_string(&job).unwrap();
        fs::write(&job, text.replace("model: model", &format!("model: model/{file}"))).unwrap();
        run(&["plan", arg(&job)]).expect(0);
        run(&["run", arg(&job), "--quiet"]).expect(0);
        let rows = rows_of(&folder.path().join("out"));
        assert_eq!(rows.len(), reference.prompts.len());
        for (row, prompt) in rows.iter().zip(&reference.prompts) {
            assert_eq!(row["token_ids"], json!(prompt.tokens[prompt.length..]), "{name}");
        }
    }
}

/// GPUs alone compute in FP8, and they do not run each model: no command takes a job that nothing could run.
#[test]
fn a_job_in_fp8_of_a_model_without_gpu_is_refused_everywhere() {
    for (name, why) in [
        ("deepseek3-groups", "latents"),
        ("nemotronh-dense", "recurrent layers with 6 heads of 9 x 10 numbers"),
    ] {
        let reference = Reference::load(name);
        let folder = tempfile::tempdir().unwrap();
        let job = job(folder.path(), name, None, &reference);
        let text = fs::read_to_string(&job).unwrap();
        for formats in ["precision: fp8", "precision: int8\nkv_cache: fp8"] {
            fs::write(&job, text.replace("precision: f32", formats)).unwrap();
            for command in [&["plan"][..], &["run"], &["submit", "--no-enqueue"]] {
                run(&[command, &[arg(&job)]].concat()).expect(2).one_line(&[
                    "no device computes this model in ",
                    "a CPU does not compute in fp8",
                    why,
                    "`--device cpu`",
                    ", and another precision",
                ]);
            }
            let doctor = run(&["doctor", arg(&job)]).expect(1).stdout;
            assert!(doctor.contains("no device computes"), "{doctor}");
        }
        assert!(!folder.path().join("out").exists());
    }
}

/// A tokenizer of far fewer tokens than the model has is another one's: answers would be wrong without a word.
#[test]
fn a_tokenizer_of_another_model_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let reference = Reference::load("llama-plain");
    let job = job(folder.path(), "llama-plain", None, &reference);
    let model = folder.path().join("model");
    let own = reference.vocabulary;
    for (tokens, is_named) in [(own, false), (own * 3 / 4, false), (own / 2, true)] {
        fs::write(model.join("tokenizer.json"), tokenizer(tokens).to_string()).unwrap();
        for command in [&["inspect", arg(&model)][..], &["plan", arg(&job)]] {
            let said = run(command).stderr;
            let words = format!("the tokenizer has {tokens} tokens, and the model {own}");
            assert_eq!(said.contains(&words), is_named, "{command:?}: {said}");
        }
    }
}
