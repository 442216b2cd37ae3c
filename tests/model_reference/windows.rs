//! Layers with a window keep a window's KV blocks: memory, long prompts and answers of a model with and without them.

use std::path::Path;
use std::sync::Arc;

use gristmill::device::draw::Sampling;
use gristmill::device::{Dtype, Precision, cpu};
use gristmill::engine::params::GenerationParams;
use gristmill::engine::request::{Request, SampleId};
use gristmill::engine::{Engine, EngineOptions, Generator};
use gristmill::model::config::Config;
use gristmill::model::{KvBudget, LoadOptions, Transformer};
use gristmill::tokenizer::Tokenizer;

const WINDOW: usize = 512;
const BLOCK: usize = 16;
/// Blocks that a window takes at most: those of the 511 positions before a token, and one more.
const WINDOW_BLOCKS: usize = (WINDOW - 1).div_ceil(BLOCK) + 1;
/// Bytes of keys and values of one layer's block: one head of 16 numbers in F32.
const LAYER_BLOCK_BYTES: u64 = 2 * (BLOCK * 16 * 4) as u64;
const NEW_TOKENS: u32 = 40;

/// A model with one layer per letter of `layers`: `f` without a window, `w` with one.
fn model(layers: &str, kv_bytes: u64, context: usize) -> Transformer {
    let types: Vec<&str> = layers
        .chars()
        .map(|kind| {
            if kind == 'w' {
                "sliding_attention"
            } else {
                "full_attention"
            }
        })
        .collect();
    let text = serde_json::json!({
        "architectures": ["MinistralForCausalLM"], "model_type": "ministral", "vocab_size": 96, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": layers.len(), "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "max_position_embeddings": context, "sliding_window": WINDOW, "layer_types": types,
        "rms_norm_eps": 0.001, "rope_theta": 10000.0, "tie_word_embeddings": false, "hidden_act": "silu",
    });
    let config = Config::parse(Path::new("config.json"), &text.to_string()).unwrap();
    let options = LoadOptions {
        precision: Precision::F32,
        kv_format: Precision::F32.kv_format(),
        channels: None,
        isa: None,
        kv: KvBudget::Bytes(kv_bytes),
        threads: Arc::new(cpu::Threads::new(2).unwrap()),
        max_context: None,
        vocabulary: None,
    };
    Transformer::random(config, 3, Dtype::F32, &options).unwrap()
}

/// Bytes that a sequence of `tokens` tokens takes in a model with these layers.
fn bytes_of(layers: &str, tokens: usize) -> u64 {
    let all = tokens.div_ceil(BLOCK);
    let blocks: usize = layers
        .chars()
        .map(|kind| if kind == 'w' { all.min(WINDOW_BLOCKS) } else { all })
        .sum();
    blocks as u64 * LAYER_BLOCK_BYTES
}

fn engine(layers: &str, kv_bytes: u64, context: usize, step_tokens: usize) -> Engine {
    let tokenizer = Arc::new(Tokenizer::from_words(&[], &["<end>"]).unwrap());
    let options = EngineOptions {
        max_step_tokens: step_tokens,
        max_sequences: 64,
        ..EngineOptions::default()
    };
    Engine::new(Box::new(model(layers, kv_bytes, context)), tokenizer, options)
}

/// A row with a prompt of its own.
fn request(row: u64, prompt_tokens: usize, max_tokens: u32) -> Request {
    let token = |i: usize| 3 + ((((row << 32) | i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) % 93) as u32;
    Request {
        id: SampleId {
            job: 0,
            row,
            sample: 0,
            attempt: 0,
        },
        prompt: (0..prompt_tokens).map(token).collect(),
        params: Arc::new(GenerationParams {
            sampling: Sampling {
                temperature: 1.0,
                ..Sampling::default()
            },
            max_tokens,
            logprobs: true,
            seed: 5,
            ..GenerationParams::default()
        }),
        eos: [].into(),
        cache_salt: Arc::default(),
        adapter: 0,
    }
}

/// What a run came to: by row, the tokens and the bits of their log probabilities.
struct Outcome {
    answers: Vec<(u64, Vec<u32>, Vec<u32>)>,
    preemptions: u64,
    /// Maximum number of sequences that ran at once.
    most: usize,
}

/// Runs requests, each submitted before the step it names.
fn run(mut engine: Engine, requests: &[(usize, Request)]) -> Outcome {
    let (mut answers, mut most) = (Vec::new(), 0);
    for step in 0.. {
        for (_, request) in requests.iter().filter(|(at, _)| *at == step) {
            engine.submit(request.clone()).unwrap();
        }
        for finished in engine.step().unwrap() {
            let done = finished.result.unwrap();
            let bits = done.logprobs.unwrap().iter().map(|p| p.to_bits()).collect();
            answers.push((finished.id.row, done.token_ids, bits));
        }
        most = most.max(engine.running());
        if engine.is_idle() && requests.iter().all(|(at, _)| *at < step) {
            break;
        }
    }
    answers.sort();
    Outcome {
        answers,
        preemptions: engine.load().preemptions,
        most,
    }
}

#[test]
fn equal_memory_holds_several_times_the_rows() {
    let tokens = 1500 + NEW_TOKENS as usize;
    let requests: Vec<_> = (0..24).map(|row| (0, request(row, 1500, NEW_TOKENS))).collect();
    // Of three rows without windows: 97 blocks in each of six layers.
    let bytes = 3 * bytes_of("ffffff", tokens);
    let full = run(engine("ffffff", bytes, 2048, 1024), &requests);
    assert_eq!(full.most, 3);
    // With them, a row takes 33 blocks in five layers: 262 instead of 582, and in all layers 198.
    for (layers, most) in [("wwwwwf", 3 * 582 / 262), ("wwwwww", 3 * 582 / 198)] {
        let held = run(engine(layers, bytes, 2048, 1024), &requests);
        // All layers' spare block for each row that runs counts when a row is started.
        assert!(
            (most - 1..=most).contains(&held.most),
            "{layers}: {} rows, not {most}",
            held.most
        );
        assert_eq!(held.preemptions, 0);
        let roomy = run(engine(layers, 64 << 20, 2048, 1024), &requests);
        assert_eq!(roomy.most, 24);
        assert!(held.answers == roomy.answers, "{layers}: answers depend on the memory");
    }
}

/// A prompt of `tokens` tokens in exactly the memory that is computed beforehand: alone, and preempted in its middle by
/// an older row that grows.
fn long_prompt(layers: &str, tokens: usize) {
    let context = tokens + NEW_TOKENS as usize;
    let bytes = bytes_of(layers, context);
    let long = request(0, tokens, NEW_TOKENS);
    let step_tokens = 256;
    let engine = |bytes| engine(layers, bytes, context, step_tokens);
    let roomy = run(
        engine(2 * layers.len() as u64 * bytes_of("f", context)),
        &[(0, long.clone())],
    );
    let exact = run(engine(bytes), &[(0, long.clone())]);
    assert!(exact.answers == roomy.answers && exact.preemptions == 0);
    let refused = engine(bytes - LAYER_BLOCK_BYTES).submit(long.clone()).unwrap_err();
    assert!(refused.to_string().contains("KV pool"), "{refused}");
    if !layers.contains('f') {
        return;
    }
    // The older row fits beside the long one when that starts: two blocks per layer. While the long prompt is computed, it
    // needs more, and it runs until that has ended.
    let older = request(1, 4, (tokens / step_tokens) as u32 + 350);
    let older_alone = run(engine(64 << 20), &[(0, older.clone())]);
    let tight = bytes + 2 * layers.len() as u64 * LAYER_BLOCK_BYTES;
    let both = run(engine(tight), &[(0, older), (3, long)]);
    assert!(both.preemptions > 0, "the long row never lost its blocks");
    assert!(both.answers == [roomy.answers, older_alone.answers].concat());
}

#[test]
fn a_long_prompt_runs_in_the_memory_computed_beforehand() {
    long_prompt("wwwf", 12_000);
    long_prompt("ww", 40_000);
}

/// As above, at the length that models with windows are trained for; run by hand with `--ignored`.
#[test]
#[ignore = "takes more than a minute"]
fn a_prompt_of_128_thousand_tokens_runs_in_the_memory_computed_beforehand() {
    long_prompt("wwwf", 128_000);
    long_prompt("ww", 128_000);
}
