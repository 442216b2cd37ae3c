//! The engine over real models: however rows are scheduled, each gets the same tokens and the same log probabilities, bit
//! for bit, in F32 and with keys and values in 8 bits.

use std::sync::Arc;

use gristmill::device::draw::Sampling;
use gristmill::device::{KvSpec, Precision};
use gristmill::engine::params::GenerationParams;
use gristmill::engine::request::{Request, SampleId};
use gristmill::engine::{Engine, EngineOptions, Forward, Generator};
use gristmill::model::{KvBudget, Transformer};
use gristmill::tokenizer::Tokenizer;

use super::harness::{Reference, folder, options};

const ROWS: u64 = 14;
const NEW_TOKENS: u32 = 24;

/// How an engine is set up; what it does to a row must not show.
struct Schedule {
    name: &'static str,
    step_tokens: usize,
    sequences: usize,
    kv_blocks: u32,
    /// As `kv_blocks`, for models with windows and without.
    kv_blocks_with_windows: u32,
    /// Rows that share the engine; the others run one after the other in engines of their own.
    together: bool,
}

const SCHEDULES: [Schedule; 5] = [
    Schedule {
        name: "alone",
        step_tokens: 2048,
        sequences: 1,
        kv_blocks: 64,
        kv_blocks_with_windows: 64,
        together: false,
    },
    Schedule {
        name: "in a batch, behind shared prefixes",
        step_tokens: 2048,
        sequences: 64,
        kv_blocks: 256,
        kv_blocks_with_windows: 256,
        together: true,
    },
    Schedule {
        name: "in chunks",
        step_tokens: 7,
        sequences: 5,
        kv_blocks: 256,
        kv_blocks_with_windows: 256,
        together: true,
    },
    Schedule {
        name: "preempted and resumed",
        step_tokens: 64,
        sequences: 8,
        kv_blocks: 12,
        kv_blocks_with_windows: 5,
        together: true,
    },
    Schedule {
        name: "one after another, prefixes cached",
        step_tokens: 33,
        sequences: 1,
        kv_blocks: 64,
        kv_blocks_with_windows: 64,
        together: true,
    },
];

/// Prompts of mixed lengths; two of three begin with the same 37 tokens.
fn prompt(row: u64, vocabulary: u32) -> Arc<[u32]> {
    let token = |seed: u64, i: u64| {
        let x = (seed * 1_000 + i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        3 + ((x >> 40) as u32) % (vocabulary - 3)
    };
    let shared = if row % 3 == 2 { 0 } else { 37 };
    let own = 1 + (row * 7) % 23;
    (0..shared)
        .map(|i| token(999, i))
        .chain((0..own).map(|i| token(row, i)))
        .collect()
}

/// Tokens, and the bits of their log probabilities.
pub(crate) type Answer = (Vec<u32>, Vec<u32>);

/// An engine whose steps have at most so many tokens and sequences.
pub(crate) fn engine(model: Box<dyn Forward + Send>, max_step_tokens: usize, max_sequences: usize) -> Engine {
    let options = EngineOptions {
        max_step_tokens,
        max_sequences,
        ..EngineOptions::default()
    };
    let tokenizer = Arc::new(Tokenizer::from_words(&[], &["<end>"]).unwrap());
    Engine::new(model, tokenizer, options)
}

/// What an engine answered.
pub(crate) struct Answers {
    /// By row, in order.
    pub rows: Vec<(u64, Answer)>,
    /// Tokens of prompts that were shared.
    pub cached_tokens: u32,
    pub preemptions: u64,
}

/// Runs rows with these prompts.
pub(crate) fn answers(
    mut engine: Engine,
    params: GenerationParams,
    prompts: impl IntoIterator<Item = (u64, Arc<[u32]>)>,
) -> Answers {
    let params = Arc::new(params);
    for (row, prompt) in prompts {
        let id = SampleId {
            job: 0,
            row,
            sample: 0,
            attempt: 0,
        };
        let request = Request {
            id,
            prompt,
            params: Arc::clone(&params),
            eos: [].into(),
            cache_salt: Arc::default(),
            adapter: 0,
        };
        engine.submit(request).unwrap();
    }
    let (mut rows, mut cached_tokens) = (Vec::new(), 0);
    while !engine.is_idle() {
        for finished in engine.step().unwrap() {
            let done = finished.result.unwrap();
            let bits = done.logprobs.unwrap().iter().map(|p| p.to_bits()).collect();
            cached_tokens += done.cached_tokens;
            rows.push((finished.id.row, (done.token_ids, bits)));
        }
    }
    rows.sort();
    Answers {
        rows,
        cached_tokens,
        preemptions: engine.load().preemptions,
    }
}

/// Runs rows in one engine: by row, the tokens and the bits of their log probabilities.
fn run(
    name: &str,
    reference: &Reference,
    (schedule, precision): (&Schedule, Precision),
    rows: &[u64],
    temperature: f32,
) -> Vec<(u64, Answer)> {
    let mut load = options(reference, precision);
    load.kv = KvBudget::Blocks(schedule.kv_blocks);
    let mut model = Transformer::load(&folder(name), &load).unwrap();
    let layers = &model.config().layers;
    let has_windows = layers.iter().any(|layer| *layer != KvSpec::Full);
    let grows = layers.contains(&KvSpec::Full);
    if has_windows && schedule.kv_blocks_with_windows != schedule.kv_blocks {
        load.kv = KvBudget::Blocks(schedule.kv_blocks_with_windows);
        model = Transformer::load(&folder(name), &load).unwrap();
    }
    let params = GenerationParams {
        sampling: Sampling {
            temperature,
            ..Sampling::default()
        },
        max_tokens: NEW_TOKENS,
        logprobs: true,
        seed: 5,
        ..GenerationParams::default()
    };
    let prompts = rows.iter().map(|row| (*row, prompt(*row, reference.vocabulary as u32)));
    let engine = engine(Box::new(model), schedule.step_tokens, schedule.sequences);
    let found = answers(engine, params, prompts);
    assert!(
        found.preemptions > 0 || !schedule.name.starts_with("preempted") || !grows,
        "{name}: nothing was preempted"
    );
    found.rows
}

#[test]
fn schedules_change_no_bit() {
    for name in [
        "llama-plain",
        "mistral-window",
        "qwen2-window",
        "qwen3-layers-sharded",
        "gemma2-capped",
        "gemma3-types",
        "ministral-types",
        "phi3-window",
        "exaone4-windows",
        "olmo3-windows",
        "cohere2-windows",
        "qwen35-recurrent",
    ] {
        let reference = Reference::load(name);
        for (temperature, precision) in [(0.0, Precision::F32), (1.0, Precision::F32), (1.0, Precision::Int8)] {
            let mut expected: Option<Vec<(u64, Answer)>> = None;
            for schedule in &SCHEDULES {
                let all: Vec<u64> = (0..ROWS).collect();
                let mut answers: Vec<_> = if schedule.together {
                    run(name, &reference, (schedule, precision), &all, temperature)
                } else {
                    all.iter()
                        .flat_map(|row| run(name, &reference, (schedule, precision), &[*row], temperature))
                        .collect()
                };
                answers.sort();
                assert_eq!(answers.len() as u64, ROWS);
                match &expected {
                    None => expected = Some(answers),
                    Some(expected) => {
                        for (alone, other) in expected.iter().zip(&answers) {
                            assert_eq!(
                                alone, other,
                                "{name}, {}, {precision:?}, temperature {temperature}",
                                schedule.name
                            );
                        }
                    }
                }
            }
            let different = expected.unwrap().windows(2).filter(|w| w[0].1 != w[1].1).count();
            assert!(
                different as u64 >= ROWS / 2,
                "the rows' answers differ, or the test shows nothing"
            );
        }
    }
}
