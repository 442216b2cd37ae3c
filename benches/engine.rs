//! What the engine costs besides the model: planning steps, masks, and what becomes of the tokens drawn, around a model that computes nothing
//! and runs ahead as a GPU does.
//!
//! `cargo bench --bench engine` prints the table of benches/README.md; words after `--bench engine --` leave only rows of it that have all of
//! them in their first columns, as `json_schema 512`. Tokens are drawn at random among those that are allowed.

use std::path::Path;
use std::sync::Arc;

use gristmill::device::batch::StepBatch;
use gristmill::device::cpu::Threads;
use gristmill::device::draw::{Allowed, Draw, DrawError, DrawnToken};
use gristmill::engine::params::{GenerationParams, OutputConstraint};
use gristmill::engine::request::{Request, SampleId};
use gristmill::engine::{Engine, EngineOptions, Forward, ForwardError, Generator};
use gristmill::job::{Job, Parameters};
use gristmill::tokenizer::Tokenizer;

/// As a GPU has them.
const BLOCK_TOKENS: u32 = 64;
const STEP_TOKENS: usize = 8192;

/// Draws at random.
struct Nothing {
    vocabulary: usize,
    blocks: u32,
    random: u64,
    drawn: Vec<Result<DrawnToken, DrawError>>,
}

impl Nothing {
    fn below(&mut self, end: usize) -> usize {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.random >> 33) as usize * end) >> 31
    }

    fn token(&mut self, ids: usize, allowed: Allowed<'_>) -> u32 {
        match allowed {
            Allowed::AllBut(_) => self.below(ids) as u32,
            Allowed::Ids(list) => list[self.below(list.len())],
            Allowed::Mask(words) => {
                let count: u32 = words.iter().map(|word| word.count_ones()).sum();
                let mut left = self.below(count as usize) as u32;
                for (at, word) in words.iter().enumerate() {
                    let ones = word.count_ones();
                    if left < ones {
                        let mut word = *word;
                        (0..left).for_each(|_| word &= word - 1);
                        return at as u32 * 32 + word.trailing_zeros();
                    }
                    left -= ones;
                }
                unreachable!("a mask allows something")
            }
        }
    }
}

impl Forward for Nothing {
    fn begin(&mut self, _: &StepBatch) -> Result<(), ForwardError> {
        Ok(())
    }

    fn draw(&mut self, ids: usize, draws: &[Draw<'_>]) -> Result<(), ForwardError> {
        self.drawn = draws
            .iter()
            .map(|draw| {
                let logits = match draw.allowed {
                    Allowed::Ids(ids) if draw.wants_logits => vec![0.0; ids.len()],
                    _ => Vec::new(),
                };
                let token = self.token(ids, draw.allowed);
                Ok(DrawnToken {
                    token,
                    logit: 0.0,
                    log_sum_exp: 1.0,
                    logits,
                })
            })
            .collect();
        Ok(())
    }

    fn take_drawn(&mut self) -> Result<Vec<Result<DrawnToken, DrawError>>, ForwardError> {
        Ok(std::mem::take(&mut self.drawn))
    }

    fn runs_ahead(&self) -> bool {
        true
    }

    fn vocab_size(&self) -> usize {
        self.vocabulary
    }

    fn context_tokens(&self) -> u32 {
        8192
    }

    fn kv_blocks(&self) -> u32 {
        self.blocks
    }

    fn block_tokens(&self) -> u32 {
        BLOCK_TOKENS
    }
}

/// A kind of request: what is asked of it, and how long prompts are.
struct Kind {
    name: &'static str,
    prompt: usize,
    params: GenerationParams,
}

fn kinds() -> Vec<Kind> {
    let plain = |max_tokens| GenerationParams {
        max_tokens,
        ignore_eos: true,
        ..GenerationParams::default()
    };
    let tickets = Job::load(Path::new("jobs/write-tickets.yaml"), &Parameters::default()).expect("the example job");
    let choices = (0..10).map(|i| format!("category {i}")).collect();
    vec![
        Kind {
            name: "free, 128 in, 128 out",
            prompt: 128,
            params: plain(128),
        },
        Kind {
            name: "free, 1,000 in, 1,000 out",
            prompt: 1000,
            params: plain(1000),
        },
        Kind {
            name: "`choice` of 10, 128 in",
            prompt: 128,
            params: GenerationParams {
                shape: OutputConstraint::Choice {
                    choices,
                    probabilities: false,
                },
                ..GenerationParams::default()
            },
        },
        Kind {
            name: "`json_schema`, 128 in, up to 160 out",
            prompt: 128,
            params: tickets.generate.params(0, false),
        },
    ]
}

fn main() {
    let tokenizer = Arc::new(Tokenizer::load(Path::new("jobs/demo/model")).expect("the demo model"));
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    println!("| | sequences | steps | microseconds a step, planning | the rest | nanoseconds a token computed |");
    println!("|---|---|---|---|---|---|");
    for Kind { name, prompt, params } in kinds() {
        let params = Arc::new(params);
        for sequences in [64, 512, 2048] {
            let row = format!("{name} | {sequences}");
            if !words.iter().all(|word| row.contains(word)) {
                continue;
            }
            let model = Nothing {
                vocabulary: tokenizer.vocab_size(),
                blocks: (sequences * (prompt + 1024) / BLOCK_TOKENS as usize) as u32,
                random: 1,
                drawn: Vec::new(),
            };
            let options = EngineOptions {
                max_step_tokens: STEP_TOKENS,
                max_sequences: sequences,
                threads: Arc::new(Threads::new(threads).expect("threads")),
                ..EngineOptions::default()
            };
            let mut engine = Engine::new(Box::new(model), Arc::clone(&tokenizer), options);
            let mut tokens = 0;
            let mut next = 0;
            let rows = 4 * sequences as u64;
            while next < rows || !engine.is_idle() {
                while next < rows && engine.wants_more() {
                    let id = SampleId {
                        job: 0,
                        row: next,
                        sample: 0,
                        attempt: 0,
                    };
                    // No two begin alike.
                    let token = |at| match at {
                        0 => next / 2000,
                        at => (next * 7919 + at * (next + 31)) % 2000,
                    };
                    let prompt = (0..prompt as u64).map(|at| token(at) as u32);
                    engine
                        .submit(Request {
                            id,
                            prompt: prompt.collect(),
                            params: Arc::clone(&params),
                            eos: Arc::new([]),
                            cache_salt: Arc::default(),
                            adapter: 0,
                        })
                        .expect("it fits");
                    next += 1;
                }
                engine.step().expect("a model that never fails");
                tokens += engine.step_tokens().iter().map(|(_, tokens)| tokens).sum::<u64>();
            }
            let totals = engine.totals();
            let a_step = |seconds: f64| seconds * 1e6 / totals.steps as f64;
            let (planning, rest) = (totals.planning.as_secs_f64(), totals.advance.as_secs_f64());
            println!(
                "| {row} | {} | {:.0} | {:.0} | {:.0} |",
                totals.steps,
                a_step(planning),
                a_step(rest),
                (planning + rest) * 1e9 / tokens as f64
            );
        }
    }
}
