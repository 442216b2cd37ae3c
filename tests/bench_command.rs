//! `gristmill bench`, as a user runs it.

use std::fs;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use crate::support::{Run, arg, gristmill, root};

/// Runs it on the demo model; the object that it prints last.
#[track_caller]
fn figures(options: &[&str]) -> Value {
    figures_of(&root().join("jobs/demo/model"), options)
}

/// As [`figures`], of another model.
#[track_caller]
fn figures_of(model: &Path, options: &[&str]) -> Value {
    let args = [&["bench", "--model", arg(model), "--json"], options].concat();
    let run = Run::of(&mut gristmill(&args)).expect(0);
    serde_json::from_str(run.stdout.lines().last().unwrap()).unwrap()
}

#[test]
fn says_what_was_run_and_where_the_time_went() {
    let folder = tempfile::tempdir().unwrap();
    let picture = folder.path().join("steps.svg");
    for precision in ["f32", "bf16", "int8"] {
        let size = ["--requests", "6", "--input-len", "40", "--output-len", "9"];
        let found = figures(&[&size[..], &["--precision", precision, "--svg", arg(&picture)]].concat());
        assert_eq!(found["precision"], precision);
        assert_eq!((&found["requests"], &found["failed"]), (&6.into(), &0.into()));
        assert_eq!(
            (&found["prompt_tokens"], &found["generated_tokens"]),
            (&240.into(), &54.into())
        );
        // Random prompts share nothing, and the last token of each is never computed.
        assert_eq!(
            (&found["cached_tokens"], &found["computed_tokens"]),
            (&0.into(), &288.into())
        );
        let seconds = found["seconds"].as_f64().unwrap();
        let total = found["total_tokens_per_second"].as_f64().unwrap();
        assert!((total * seconds - 294.0).abs() < 1.0, "{found}");
        let parts = found["seconds_by_operation"].as_array().unwrap();
        let sum: f64 = parts.iter().map(|part| part[1].as_f64().unwrap()).sum();
        assert!((sum - seconds).abs() < 0.05 * seconds + 1e-3, "{found}");
        assert!(found["peak_memory_bytes"].as_u64().unwrap() > 10 << 20);
        assert!(fs::read_to_string(&picture).unwrap().starts_with("<svg"));
    }
}

#[test]
fn steps_have_as_many_tokens_as_suit_the_model() {
    let size = [
        "--load-format",
        "dummy",
        "--requests",
        "2",
        "--input-len",
        "8",
        "--output-len",
        "2",
    ];
    let most = |model: &str, more: &[&str]| {
        let found = figures_of(&root().join(model), &[&size[..], more].concat());
        let batches = &found["batches"];
        (batches["tokens_a_step"].as_f64().unwrap() / batches["budget_used"].as_f64().unwrap()).round()
    };
    assert_eq!(most("jobs/demo/model", &[]), 512.0);
    assert_eq!(most("tests/fixtures/models/qwen3moe-tied", &[]), 1024.0);
    assert_eq!(most("jobs/demo/model", &["--step-tokens", "100"]), 100.0);
}

#[test]
fn a_trace_is_run_as_it_says() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.jsonl");
    let line = |i: u32| {
        let ids: Vec<u32> = (0..80).map(|t| 10 + t).chain([10 + i]).collect();
        format!("{{\"prompt_token_ids\": {ids:?}, \"max_tokens\": {}}}\n", 2 + i)
    };
    fs::write(&trace, (0..8).map(line).collect::<String>()).unwrap();
    let trace = ["--trace", arg(&trace), "--ignore-eos"];
    let all = figures(&trace);
    assert_eq!(all["generated_tokens"], (2..10).sum::<u32>());
    assert_eq!(all["cached_tokens"], 7 * 80);
    assert_eq!(all["batches"]["steps"], 9);
    // What is left out, and what was run before the clock started.
    let apart = figures(&[&trace[..], &["--without", "sharing,mixing"]].concat());
    assert_eq!(
        (&apart["cached_tokens"], &apart["batches"]["mixed_steps"]),
        (&0.into(), &0.into())
    );
    let warm = figures(&[&trace[..], &["--warm-up", "1"]].concat());
    assert_eq!(warm["cached_tokens"], 8 * 80);
    let lower = figures(&[&trace[..], &["--instructions", "portable", "--kv-cache", "int8"]].concat());
    assert_eq!(lower["isa"], "portable");
}

#[test]
fn a_configuration_alone_is_enough_for_random_weights() {
    let folder = tempfile::tempdir().unwrap();
    let from = root().join("jobs/demo/model/config.json");
    fs::copy(from, folder.path().join("config.json")).unwrap();
    let run = |more: &[&str], code| {
        let size = ["--requests", "3", "--input-len", "20", "--output-len", "4", "--json"];
        let args = [&["bench", "--model", arg(folder.path())], &size[..], more].concat();
        Run::of(&mut gristmill(&args)).expect(code)
    };
    let refused = run(&[], 2);
    assert!(refused.stderr.contains("tokenizer.json"), "{}", refused.stderr);
    let found = run(&["--load-format", "dummy"], 0).stdout;
    let found: Value = serde_json::from_str(found.lines().last().unwrap()).unwrap();
    assert_eq!((&found["generated_tokens"], &found["failed"]), (&12.into(), &0.into()));
    // No speed is told of requests that all failed.
    let failed = run(&["--load-format", "dummy", "--context", "10"], 1);
    assert_eq!(failed.stdout, "");
    assert!(
        failed.stderr.contains("all requests failed: no speed was measured"),
        "{}",
        failed.stderr
    );
    // A model that no machine's memory holds is refused before it is made.
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (key, value) in [
        ("num_hidden_layers", 1024),
        ("hidden_size", 16_384),
        ("head_dim", 64),
        ("intermediate_size", 1_000_000),
    ] {
        config[key] = value.into();
    }
    fs::write(&path, config.to_string()).unwrap();
    for (precision, smaller) in [("f32", "choose `precision: int8`"), ("int8", "choose a smaller model")] {
        let large = run(&["--load-format", "dummy", "--precision", precision], 2);
        for words in ["the model's weights take ", " of memory", smaller] {
            assert!(
                large.stderr.contains(words),
                "`{words}` is missing in: {}",
                large.stderr
            );
        }
    }
}

#[test]
fn what_cannot_be_run_is_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.jsonl");
    fs::write(
        &trace,
        "{\"prompt_token_ids\": [5], \"max_tokens\": 2}\n{\"max_tokens\": 2}\n",
    )
    .unwrap();
    let model = root().join("jobs/demo/model");
    for (args, code, words) in [
        (vec!["--model", "lama-8b"], 2, vec!["lama-8b", "llama-3.1-8b"]),
        (
            vec!["--model", arg(&model), "--trace", arg(&trace)],
            2,
            vec!["trace.jsonl", "2", "prompt"],
        ),
        (
            vec!["--model", arg(&model), "--instructions", "avx1024"],
            2,
            vec!["avx1024", "portable"],
        ),
        (
            vec!["--model", arg(&model), "--kv-memory", "1073741824"],
            2,
            vec!["keys and values get 1125899.9 GB", "`--kv-memory MIB`"],
        ),
    ] {
        let run = Run::of(&mut gristmill(&[&["bench"], &args[..]].concat())).expect(code);
        for word in words {
            assert!(run.stderr.contains(word), "`{word}` is missing in: {}", run.stderr);
        }
    }
}

/// Pages of the files that were read do not add to the memory that the loaded model takes.
#[test]
fn loading_holds_few_pages_of_the_files() {
    let (hidden, inner, layers, vocabulary) = (512, 4096, 12, 2048);
    let folder = tempfile::tempdir().unwrap();
    let config = json!({"architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": layers, "vocab_size": vocabulary,
        "max_position_embeddings": 512, "tie_word_embeddings": true});
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    fs::copy(
        root().join("jobs/demo/model/tokenizer.json"),
        folder.path().join("tokenizer.json"),
    )
    .unwrap();
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_string(), vec![vocabulary, hidden]),
        ("model.norm.weight".to_string(), vec![hidden]),
    ];
    for layer in 0..layers {
        for (name, shape) in [
            ("self_attn.q_proj", vec![hidden, hidden]),
            ("self_attn.k_proj", vec![hidden, hidden]),
            ("self_attn.v_proj", vec![hidden, hidden]),
            ("self_attn.o_proj", vec![hidden, hidden]),
            ("mlp.gate_proj", vec![inner, hidden]),
            ("mlp.up_proj", vec![inner, hidden]),
            ("mlp.down_proj", vec![hidden, inner]),
            ("input_layernorm", vec![hidden]),
            ("post_attention_layernorm", vec![hidden]),
        ] {
            shapes.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    let numbers: Vec<u8> = (0..inner * hidden)
        .flat_map(|i| ((i * 7 % 101) as f32 / 1000.0 - 0.05).to_le_bytes())
        .collect();
    let views = shapes.iter().map(|(name, shape)| {
        let bytes = &numbers[..4 * shape.iter().product::<usize>()];
        (name, TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap())
    });
    let file = folder.path().join("model.safetensors");
    safetensors::serialize_to_file(views, None, &file).unwrap();
    let file_bytes = fs::metadata(&file).unwrap().len();
    let size = ["--requests", "2", "--input-len", "20", "--output-len", "2", "--json"];
    let args = [
        &[
            "bench",
            "--model",
            arg(folder.path()),
            "--precision",
            "int8",
            "--kv-memory",
            "32",
        ],
        &size[..],
    ]
    .concat();
    let found = Run::of(&mut gristmill(&args)).expect(0).json();
    let peak = found["peak_memory_bytes"].as_u64().unwrap();
    // A quarter of the file for the model in 8 bits, 64 MiB of pages, 32 of keys and values, and the program itself.
    assert!(
        file_bytes > 300 << 20 && peak < file_bytes * 3 / 4,
        "{peak} of {file_bytes} bytes"
    );
}
