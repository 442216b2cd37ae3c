//! A row's tokens do not depend on how it was scheduled: the whole engine around a model that notices every mistake.
//!
//! The model has two layers in its KV blocks: the token ids themselves, and a hash of all tokens up to each, made of the
//! first layer as it is read back through the block table. Logits are a hash of the whole second layer, read back likewise. A
//! wrong block, a stale prefix, a block of the same tokens after another beginning, a missing copy, a skipped or repeated
//! position: each changes every later token. The model's other block tables have windows: it looks at every position within
//! them, which must hold what the first table holds.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use gristmill::device::batch::{StepBatch, StepSequence};
use gristmill::device::cpu::Threads;
use gristmill::device::cpu::sample::{Scratch, sample};
use gristmill::device::draw::{Draw, DrawError, DrawnToken, Sampling};
use gristmill::device::{DeviceError, KvSpec};
use gristmill::engine::params::{GenerationParams, OutputConstraint};
use gristmill::engine::plan::Policy;
use gristmill::engine::request::{Completion, FinishReason, FinishedSample, Request, SampleId};
use gristmill::engine::thinking::Thinking;
use gristmill::engine::totals::StepSize;
use gristmill::engine::{Engine, EngineError, EngineOptions, Forward, ForwardError, Generator};
use gristmill::tokenizer::Tokenizer;
use proptest::prelude::*;
use serde_json::json;

const UNWRITTEN: u32 = u32::MAX;
/// Prompts that begin with this token make the model return NaN.
const POISON: u32 = 7;

/// What the model saw, for tests to look at.
#[derive(Debug, Default, Clone)]
pub(crate) struct Seen {
    steps: usize,
    tokens: usize,
    largest_step: usize,
    copies: usize,
    preemptions: u64,
}

struct FakeModel {
    /// Token id and hash, `[block][token]`.
    kv: Vec<(u32, u64)>,
    /// The first one is without a window.
    tables: &'static [KvSpec],
    block_tokens: usize,
    vocabulary: usize,
    context: u32,
    logits: Vec<f32>,
    drawn: Vec<Result<DrawnToken, DrawError>>,
    /// Tokens of the last draw, which the next step may hold before anybody has seen them.
    tokens: Vec<u32>,
    ahead: bool,
    /// How far logits spread.
    spread: f32,
    fails_at_step: Option<usize>,
    /// For which steps and draws, counted together, there is no memory.
    full_at: Vec<usize>,
    calls: usize,
    seen: Arc<Mutex<Seen>>,
}

impl FakeModel {
    /// Stores what a step has computed in the tables with windows, and looks at every position that the step's tokens see
    /// there.
    fn attend_to_windows(&mut self, batch: &StepBatch) {
        let size = self.block_tokens;
        let tables = || self.tables.iter().zip(&batch.block_tables).skip(1);
        let mut written = std::collections::BTreeSet::new();
        for s in &batch.sequences {
            let first = s.first_block as usize;
            for position in s.kv_len - s.q_len..s.kv_len {
                let computed = self.kv[cell(&batch.block_tables[0][first..], position, size)];
                for (_, table) in tables() {
                    let cell = cell(&table[first..], position, size);
                    assert!(written.insert(cell), "two tables or sequences write the same place");
                    self.kv[cell] = computed;
                }
            }
        }
        for s in &batch.sequences {
            let first = s.first_block as usize;
            let read = |table: &[u32], position| self.kv[cell(&table[first..], position, size)];
            for (kind, table) in tables() {
                let first_query = s.kv_len - s.q_len;
                let seen = match *kind {
                    KvSpec::Full => 0..s.kv_len,
                    KvSpec::Window(window) => (first_query + 1).saturating_sub(window)..s.kv_len,
                };
                for position in seen {
                    let want = read(&batch.block_tables[0], position);
                    assert_eq!(read(table, position), want, "position {position} of {kind:?}");
                }
            }
        }
    }

    /// Is there no memory for what is asked for now?
    fn is_full(&mut self) -> Result<(), ForwardError> {
        self.calls += 1;
        if self.full_at.contains(&self.calls) {
            Err(DeviceError::OutOfMemory("a step takes 3 MiB, and 2 are free".into()).into())
        } else {
            Ok(())
        }
    }
}

fn mix(mut x: u64) -> u64 {
    // The finalizer of SplitMix64.
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The second layer at a token, given that of the token before.
fn second_layer(before: u64, token: u32) -> u64 {
    mix(before ^ u64::from(token).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// Logits, given the second layer of all tokens.
fn logits_of(layer: impl Iterator<Item = u64>, vocabulary: usize, spread: f32) -> Vec<f32> {
    let hash = layer.fold(1, |hash, value| mix(hash ^ value));
    let logit = |id: u64| (mix(hash ^ mix(id + 1)) >> 40) as f32 / (1u64 << 24) as f32 * spread;
    (0..vocabulary as u64).map(logit).collect()
}

/// What the model should say after a history.
fn logits_after(history: &[u32], vocabulary: usize, spread: f32) -> Vec<f32> {
    let layer = history.iter().scan(0, |hash, token| {
        *hash = second_layer(*hash, *token);
        Some(*hash)
    });
    logits_of(layer, vocabulary, spread)
}

impl Forward for FakeModel {
    fn begin(&mut self, batch: &StepBatch) -> Result<(), ForwardError> {
        let mut batch = batch.clone();
        for (token, row) in batch.pending_tokens.drain(..) {
            batch.tokens[token as usize] = self.tokens[row as usize];
        }
        let mut seen = self.seen.lock().unwrap();
        seen.steps += 1;
        seen.tokens += batch.tokens.len();
        seen.largest_step = seen.largest_step.max(batch.tokens.len());
        seen.copies += batch.block_copies.len();
        drop(seen);
        // Nobody is to read what a step without memory was to write.
        let full = self.is_full();
        if full.is_err() {
            for s in &batch.sequences {
                for table in &batch.block_tables {
                    let table = &table[s.first_block as usize..];
                    (s.kv_len - s.q_len..s.kv_len)
                        .for_each(|p| self.kv[cell(table, p, self.block_tokens)] = (UNWRITTEN, 0));
                }
            }
            return full;
        }
        if self.fails_at_step == Some(self.seen.lock().unwrap().steps) {
            return Err(DeviceError::Lost("the plug was pulled".into()).into());
        }
        let size = self.block_tokens;
        let blocks = self.kv.len() / size;
        // In reverse, because copies of one step may run in any order.
        for copy in batch.block_copies.iter().rev() {
            let from = copy.from as usize * size;
            self.kv.copy_within(from..from + size, copy.to as usize * size);
        }
        let mut written = std::collections::BTreeSet::new();
        for s in &batch.sequences {
            assert!(s.q_len >= 1 && s.q_len <= s.kv_len && s.kv_len <= self.context);
            let table = &batch.block_tables[0][s.first_block as usize..][..(s.kv_len as usize).div_ceil(size)];
            assert!(table.iter().all(|b| (*b as usize) < blocks));
            for i in 0..s.q_len {
                let token = (s.first_token + i) as usize;
                let position = s.kv_len - s.q_len + i;
                assert_eq!(batch.positions[token], position);
                let cell = cell(table, position, size);
                assert!(written.insert(cell), "two sequences write the same place");
                self.kv[cell].0 = batch.tokens[token];
            }
        }
        for s in &batch.sequences {
            let table = &batch.block_tables[0][s.first_block as usize..];
            // Each adapter makes another model.
            let mut hash = u64::from(s.adapter);
            for position in 0..s.kv_len {
                let cell = cell(table, position, size);
                assert_ne!(self.kv[cell].0, UNWRITTEN, "it attends to what was never written");
                hash = second_layer(hash, self.kv[cell].0);
                if position >= s.kv_len - s.q_len {
                    self.kv[cell].1 = hash;
                }
            }
        }
        self.attend_to_windows(&batch);
        self.logits = Vec::new();
        for at in &batch.logits_at {
            let has = |s: &&StepSequence| (s.first_token..s.first_token + s.q_len).contains(at);
            let s = batch.sequences.iter().find(has).unwrap();
            let table = &batch.block_tables[0][s.first_block as usize..];
            let layer = (0..=batch.positions[*at as usize]).map(|p| self.kv[cell(table, p, size)].1);
            let mut logits = logits_of(layer, self.vocabulary, self.spread);
            if self.kv[cell(table, 0, size)].0 == POISON {
                logits[3] = f32::NAN;
            }
            self.logits.extend(logits);
        }
        Ok(())
    }
    fn draw(&mut self, ids: usize, draws: &[Draw<'_>]) -> Result<(), ForwardError> {
        assert!(self.drawn.is_empty(), "what was drawn has not been taken");
        self.is_full()?;
        assert_eq!(
            (ids, draws.len()),
            (self.vocabulary, self.logits.len() / self.vocabulary)
        );
        let rows = self.logits.chunks_exact(self.vocabulary).zip(draws);
        let mut scratch = Scratch::default();
        self.drawn = rows.map(|(row, draw)| sample(row, *draw, &mut scratch)).collect();
        let token = |drawn: &Result<DrawnToken, DrawError>| drawn.as_ref().map_or(0, |drawn| drawn.token);
        self.tokens = self.drawn.iter().map(token).collect();
        Ok(())
    }
    fn take_drawn(&mut self) -> Result<Vec<Result<DrawnToken, DrawError>>, ForwardError> {
        Ok(std::mem::take(&mut self.drawn))
    }
    fn runs_ahead(&self) -> bool {
        self.ahead
    }
    fn vocab_size(&self) -> usize {
        self.vocabulary
    }
    fn context_tokens(&self) -> u32 {
        self.context
    }
    fn kv_blocks(&self) -> u32 {
        (self.kv.len() / self.block_tokens) as u32
    }
    fn kv_tables(&self) -> &[KvSpec] {
        self.tables
    }
    fn block_tokens(&self) -> u32 {
        self.block_tokens as u32
    }
}

/// Where a position's values stand.
fn cell(table: &[u32], position: u32, size: usize) -> usize {
    table[position as usize / size] as usize * size + position as usize % size
}

/// How to run the engine.
#[derive(Debug, Clone)]
pub(crate) struct Setup {
    blocks: usize,
    tables: &'static [KvSpec],
    block_tokens: usize,
    budget: usize,
    max_sequences: usize,
    context: u32,
    spread: f32,
    fails_at_step: Option<usize>,
    full_at: Vec<usize>,
    /// Does the model run ahead?
    ahead: bool,
    policy: Policy,
}

/// Block tables of models with windows: shorter than a block, of blocks of four, and of others.
const WINDOWS: [&[KvSpec]; 5] = [
    &[KvSpec::Full],
    &[KvSpec::Full, KvSpec::Window(1)],
    &[KvSpec::Full, KvSpec::Window(5)],
    &[KvSpec::Full, KvSpec::Window(8), KvSpec::Window(8)],
    &[KvSpec::Full, KvSpec::Window(3), KvSpec::Window(21)],
];

/// Room for everything.
pub(crate) const ROOMY: Setup = Setup {
    blocks: 512,
    tables: &[KvSpec::Full],
    block_tokens: 16,
    budget: 4096,
    max_sequences: 64,
    context: 4096,
    spread: 8.0,
    fails_at_step: None,
    full_at: Vec::new(),
    ahead: false,
    policy: Policy {
        sort_window: true,
        share_prefixes: true,
        mix_phases: true,
        refill: true,
    },
};

static EOS: std::sync::LazyLock<Arc<[u32]>> = std::sync::LazyLock::new(|| [tokenizer().eos_id().unwrap()].into());

fn tokenizer() -> Arc<Tokenizer> {
    let words = [
        "billing", "shipping", "defect", "other", "ship", "{\"", "\":", " the", "ab", "abc",
    ];
    Arc::new(Tokenizer::from_words(&words, &["<pad>", "<eos>"]).unwrap())
}

fn engine(setup: &Setup) -> (Engine, Arc<Mutex<Seen>>) {
    let tokenizer = tokenizer();
    let seen = Arc::new(Mutex::new(Seen::default()));
    let model = FakeModel {
        kv: vec![(UNWRITTEN, 0); setup.blocks * setup.block_tokens],
        tables: setup.tables,
        block_tokens: setup.block_tokens,
        vocabulary: tokenizer.vocab_size(),
        context: setup.context,
        logits: Vec::new(),
        drawn: Vec::new(),
        tokens: Vec::new(),
        ahead: setup.ahead,
        spread: setup.spread,
        fails_at_step: setup.fails_at_step,
        full_at: setup.full_at.clone(),
        calls: 0,
        seen: seen.clone(),
    };
    let options = EngineOptions {
        max_step_tokens: setup.budget,
        max_sequences: setup.max_sequences,
        prefix_root: "fake".into(),
        policy: setup.policy,
        threads: Arc::new(Threads::new(2).unwrap()),
    };
    (Engine::new(Box::new(model), tokenizer, options), seen)
}

fn request(row: u64, prompt: &[u32], params: &GenerationParams) -> Request {
    Request {
        id: SampleId {
            job: 0,
            row,
            sample: 0,
            attempt: 0,
        },
        prompt: prompt.into(),
        params: Arc::new(params.clone()),
        eos: EOS.clone(),
        cache_salt: Arc::default(),
        adapter: 0,
    }
}

/// Runs requests, each submitted at the step it names, and returns what came back, by row.
pub(crate) fn run(setup: &Setup, requests: &[(usize, Request)]) -> (BTreeMap<u64, Result<Completion, String>>, Seen) {
    let (mut engine, seen) = engine(setup);
    let mut done = BTreeMap::new();
    let (mut computed, mut finished) = (0, 0);
    for step in 0.. {
        assert!(step < 50_000, "it does not come to an end");
        for (_, request) in requests.iter().filter(|(at, _)| *at == step) {
            if let Err(refused) = engine.submit(request.clone()) {
                done.insert(request.id.row, Err(refused.to_string()));
            }
        }
        for unit in engine.step().unwrap() {
            let FinishedSample {
                id,
                result,
                computed_tokens,
            } = unit;
            assert!(done.insert(id.row, result).is_none(), "row {} came back twice", id.row);
            finished += computed_tokens;
        }
        computed += engine.step_tokens().iter().map(|(_, tokens)| tokens).sum::<u64>();
        // A step that runs ahead is counted when its tokens are taken.
        assert!(finished <= computed || setup.ahead);
        if engine.is_idle() && requests.iter().all(|(at, _)| *at <= step) {
            break;
        }
    }
    assert_eq!(done.len(), requests.len());
    assert_eq!(finished, computed, "tokens that belong to no row");
    let load = engine.load();
    assert_eq!((engine.running(), engine.waiting()), (0, 0));
    assert_eq!((load.running, load.waiting, load.kv_blocks_held), (0, 0, 0));
    let mut seen = seen.lock().unwrap().clone();
    seen.preemptions = load.preemptions;
    assert!(seen.largest_step <= setup.budget);
    (done, seen)
}

fn run_one(prompt: &[u32], params: &GenerationParams) -> Completion {
    run(&ROOMY, &[(0, request(0, prompt, params))])
        .0
        .remove(&0)
        .unwrap()
        .unwrap()
}

/// What must not depend on the schedule.
fn essence(result: &Result<Completion, String>) -> String {
    match result {
        Ok(c) => format!(
            "{:?} {:?} {:?} {:?} {} {:?} {:?} {}",
            c.thought,
            c.token_ids,
            c.text,
            c.finish_reason,
            c.fits_shape,
            c.logprobs,
            c.choice_probabilities,
            c.prompt_tokens
        ),
        Err(why) => format!("error {why}"),
    }
}

/// Choices that part at several places, some of them beginnings of others.
const CHOICES: [&str; 10] = [
    "ship",
    "ship it",
    "ship me",
    "shipping",
    "d",
    "deliver",
    "other one",
    "other two",
    "other",
    "abx",
];

fn shapes() -> Vec<OutputConstraint> {
    let choices = CHOICES.map(String::from).to_vec();
    vec![
        OutputConstraint::Free,
        OutputConstraint::Free,
        OutputConstraint::Choice {
            choices: choices.clone(),
            probabilities: false,
        },
        OutputConstraint::Choice {
            choices,
            probabilities: true,
        },
        OutputConstraint::Regex("[a-c]{3,9}(?:xy|z)".into()),
        OutputConstraint::JsonSchema(
            json!({"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yy"]}},
            "required": ["a", "b"], "additionalProperties": false}),
        ),
    ]
}

/// Thoughts that are ended after so many tokens, since the model hardly ever ends one.
fn thinking(max_tokens: u32) -> Thinking {
    Thinking {
        open: vec![tokenizer().id_of("<pad>").unwrap()],
        close: vec![120, 121],
        header: Vec::new(),
        gap: vec![10],
        max_tokens: Some(max_tokens),
        forced_close: vec![33, 120, 121],
        forced_gap: vec![10, 10],
        control_ids: Vec::new(),
    }
}

/// One row of the property test: shared head, own tail, kind of parameters, arrival.
type Row = (usize, usize, usize, usize);

fn to_request(i: usize, (head, tail, kind, _): Row) -> Request {
    let own = (0..tail as u32).map(|t| 20 + (mix(i as u64 * 64 + u64::from(t)) % 60) as u32);
    let mut prompt: Vec<u32> = (0..head as u32).map(|t| 100 + t % 4).chain(own).collect();
    let thinking = (kind % 5 == 1).then(|| Arc::new(thinking(kind as u32 % 4)));
    if let Some(thinking) = thinking.as_ref().filter(|_| kind % 2 == 0) {
        prompt.extend(&thinking.open);
    }
    let shape = shapes()[kind % shapes().len()].clone();
    let params = GenerationParams {
        sampling: Sampling {
            temperature: if kind % 3 == 0 { 0.0 } else { 0.9 },
            top_p: if kind % 4 == 1 { 0.8 } else { 1.0 },
            repetition_penalty: if kind % 5 == 2 { 1.2 } else { 1.0 },
            ..Sampling::default()
        },
        max_tokens: 3 + (kind as u32 * 7) % 17,
        logprobs: kind % 2 == 0,
        seed: 5,
        shape,
        thinking,
        ..GenerationParams::default()
    };
    request(i as u64, &prompt, &params)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// Alone, in a batch, chunked by tiny budgets, preempted in a tiny pool, behind a shared prefix, under any policy, where steps find
    /// no memory: identical.
    #[test]
    fn schedules_change_nothing(
        rows in prop::collection::vec((0usize..40, 1usize..20, 0usize..60, 0usize..8), 1..12),
        // The longest row: 39 + 19 prompt tokens and 19 more, which is 20 blocks of four; and at most 8 more with windows.
        blocks in 20usize..50,
        tables in 0..WINDOWS.len(),
        budget in 1usize..70,
        max_sequences in 1usize..9,
        (sort_window, share_prefixes, mix_phases, refill) in any::<(bool, bool, bool, bool)>(),
        ahead in any::<bool>(),
        full_at in prop::collection::vec(1usize..40, 0..3),
    ) {
        let requests: Vec<(usize, Request)> =
            rows.iter().enumerate().map(|(i, row)| (row.3, to_request(i, *row))).collect();
        let policy = Policy { sort_window, share_prefixes, mix_phases, refill };
        // Each time steps become half as large, and those of one token do not.
        let full_at = if budget < 4 { vec![] } else { full_at };
        let blocks = if tables == 0 { blocks } else { blocks + 8 };
        let setup = Setup { blocks, tables: WINDOWS[tables], block_tokens: 4, budget, max_sequences, policy, ahead, full_at, ..ROOMY };
        let (batched, _) = run(&setup, &requests);
        for (_, request) in &requests {
            let (alone, _) = run(&ROOMY, &[(0, request.clone())]);
            prop_assert_eq!(essence(&batched[&request.id.row]), essence(&alone[&request.id.row]));
        }
    }
}

/// Steps that run ahead are no more than others, but for tokens after an end that nobody could know of.
#[test]
fn running_ahead_costs_a_token_a_row_at_most() {
    let ahead = Setup { ahead: true, ..ROOMY };
    for ignore_eos in [true, false] {
        let params = GenerationParams {
            max_tokens: 30,
            ignore_eos,
            stop_token_ids: (0..if ignore_eos { 0 } else { 20 }).collect(),
            ..GenerationParams::default()
        };
        let requests: Vec<_> = (0..30)
            .map(|i| (0, request(i, &[40 + i as u32; 12], &params)))
            .collect();
        let (want, one_by_one) = run(&ROOMY, &requests);
        let (got, overlapped) = run(&ahead, &requests);
        for (row, want) in &want {
            assert_eq!(essence(&got[row]), essence(want));
        }
        let early = want
            .values()
            .filter(|r| r.as_ref().unwrap().finish_reason == FinishReason::Stop)
            .count();
        assert_eq!(early > 0, !ignore_eos);
        let more = overlapped.tokens - one_by_one.tokens;
        assert!(
            more <= early && (more > 0) == (early > 0),
            "{more} tokens for {early} rows"
        );
        assert!(overlapped.steps <= one_by_one.steps + 1);
    }
}

/// Everything but the two values follows from the schema: one step for the prompt and what begins each object, one for each
/// choice.
#[test]
fn forced_tokens_cost_no_step() {
    let schema = json!({"type": "object", "required": ["billing", "shipping"], "additionalProperties": false,
        "x-guidance": {"key_separator": ":", "item_separator": ","},
        "properties": {"billing": {"enum": [1, 2]}, "shipping": {"enum": ["defect", "other"]}}});
    let params = GenerationParams {
        sampling: Sampling {
            temperature: 0.9,
            ..Sampling::default()
        },
        max_tokens: 100,
        logprobs: true,
        shape: OutputConstraint::JsonSchema(schema),
        ..GenerationParams::default()
    };
    let requests: Vec<_> = (0..20)
        .map(|i| (0, request(i, &[40 + i as u32; 12], &params)))
        .collect();
    let (results, seen) = run(&ROOMY, &requests);
    let mut texts = std::collections::BTreeSet::new();
    for result in results.values() {
        let c = result.as_ref().unwrap();
        assert!(c.fits_shape && c.finish_reason == FinishReason::Stop);
        let value: serde_json::Value = serde_json::from_str(&c.text).unwrap();
        assert!([1, 2].contains(&value["billing"].as_i64().unwrap()));
        let logprobs = c.logprobs.as_ref().unwrap();
        assert_eq!(logprobs.len(), c.token_ids.len());
        let asked = logprobs.iter().filter(|l| **l != 0.0).count();
        assert!(
            c.token_ids.len() >= 9 && asked <= 4,
            "{asked} of {:?} were asked for",
            c.token_ids
        );
        texts.insert(c.text.clone());
    }
    assert_eq!(texts.len(), 4, "{texts:?}");
    assert!(seen.steps <= 5, "{} steps", seen.steps);
    let only = GenerationParams {
        shape: OutputConstraint::JsonSchema(json!({"const": "billing"})),
        ..params
    };
    let (results, seen) = run(&ROOMY, &[(0, request(0, &[41, 42], &only))]);
    let only = results[&0].as_ref().unwrap();
    assert_eq!(
        (only.text.as_str(), only.fits_shape, seen.steps),
        ("\"billing\"", true, 0)
    );
}

#[test]
fn a_tiny_pool_preempts_and_recomputes() {
    let params = GenerationParams {
        sampling: Sampling {
            temperature: 0.7,
            ..Sampling::default()
        },
        max_tokens: 40,
        ignore_eos: true,
        ..GenerationParams::default()
    };
    let requests: Vec<_> = (0..6).map(|i| (0, request(i, &[i as u32 + 20; 10], &params))).collect();
    let tiny = Setup {
        blocks: 16,
        block_tokens: 4,
        max_sequences: 6,
        ..ROOMY
    };
    let (results, seen) = run(&tiny, &requests);
    assert!(
        seen.tokens > 6 * 49,
        "{} tokens: nothing was recomputed, so nothing was preempted",
        seen.tokens
    );
    assert!(seen.preemptions > 0);
    for (_, request) in &requests {
        let alone = run(&ROOMY, &[(0, request.clone())]).0;
        assert_eq!(essence(&results[&request.id.row]), essence(&alone[&request.id.row]));
        assert_eq!(results[&request.id.row].as_ref().unwrap().token_ids.len(), 40);
    }
}

/// A model with windows runs many more rows at once in the same memory, as many as computed beforehand.
#[test]
fn windows_leave_room_for_more_rows() {
    let params = GenerationParams {
        max_tokens: 32,
        ignore_eos: true,
        ..GenerationParams::default()
    };
    let requests: Vec<_> = (0..40)
        .map(|i| (0, request(i, &[i as u32 + 20; 480], &params)))
        .collect();
    // A row of 512 tokens takes 32 blocks of 16 in a table without a window; in one with a window of 32 tokens, three.
    const WINDOW: KvSpec = KvSpec::Window(32);
    let setup = |tables| Setup {
        blocks: 8 * 4 * 32,
        tables,
        budget: 512,
        ..ROOMY
    };
    let most = |setup: &Setup| {
        let (mut engine, _) = engine(setup);
        requests
            .iter()
            .for_each(|(_, request)| engine.submit(request.clone()).unwrap());
        let mut most = 0;
        while !engine.is_idle() {
            engine.step().unwrap();
            most = most.max(engine.running());
        }
        assert_eq!(engine.load().preemptions, 0, "each row was computed once");
        most
    };
    assert_eq!(most(&setup(&[KvSpec::Full; 4])), 8 * 32 / 32);
    let with_windows = most(&setup(&[KvSpec::Full, WINDOW, WINDOW, WINDOW]));
    // 1,024 blocks, 32 + 3 * 3 per row, and four spare ones per row that runs while others start.
    assert!((22..=1024 / 41).contains(&with_windows), "{with_windows} rows");
}

/// A prompt that is far longer than its windows needs only their blocks, also when it is preempted in its middle.
#[test]
fn a_long_prompt_needs_the_blocks_of_its_windows() {
    let params = GenerationParams {
        max_tokens: 4,
        ignore_eos: true,
        ..GenerationParams::default()
    };
    let prompt =
        |row: u64, tokens: u64| -> Vec<u32> { (0..tokens).map(|t| 20 + (mix((row << 32) | t) % 60) as u32).collect() };
    // 8,000 + 4 tokens: 501 blocks of 16, and four of each window.
    let windows = &[KvSpec::Full, KvSpec::Window(40), KvSpec::Window(40), KvSpec::Window(40)];
    let setup = |blocks| Setup {
        blocks,
        tables: windows,
        budget: 100,
        max_sequences: 4,
        context: 9000,
        ..ROOMY
    };
    let long = request(0, &prompt(0, 8000), &params);
    let (alone, seen) = run(&setup(501 + 3 * 4), &[(0, long.clone())]);
    assert_eq!((alone[&0].as_ref().unwrap().token_ids.len(), seen.preemptions), (4, 0));
    let refused = run(&setup(501 + 3 * 4 - 1), &[(0, long.clone())]).0[&0]
        .clone()
        .unwrap_err();
    assert!(refused.contains("more than the 8000 tokens"), "{refused}");
    // An older row grows meanwhile, and takes the blocks of the long one.
    let growing = GenerationParams {
        max_tokens: 400,
        ..params.clone()
    };
    let older = request(1, &prompt(1, 20), &growing);
    let tight = setup(501 + 3 * 4 + 15);
    let (both, seen) = run(&tight, &[(0, older.clone()), (3, long.clone())]);
    assert!(seen.preemptions > 0, "the long prompt never lost its blocks");
    assert_eq!(essence(&both[&0]), essence(&alone[&0]));
    let (older_alone, _) = run(&ROOMY, &[(0, older)]);
    assert_eq!(essence(&both[&1]), essence(&older_alone[&1]));
}

#[test]
fn a_shared_prefix_is_computed_once_even_when_rows_start_together() {
    let params = GenerationParams {
        max_tokens: 1,
        ..GenerationParams::default()
    };
    let head: Vec<u32> = (0..160).map(|t| 30 + t % 50).collect();
    let prompt = |i: u32| head.iter().copied().chain([i + 1, i + 2]).collect::<Vec<u32>>();
    let requests: Vec<_> = (0..20)
        .map(|i| (0, request(i, &prompt(i as u32 + 10), &params)))
        .collect();
    let (results, seen) = run(&ROOMY, &requests);
    assert_eq!((seen.steps, seen.tokens), (1, 160 + 20 * 2));
    let cached: Vec<u32> = results.values().map(|r| r.as_ref().unwrap().cached_tokens).collect();
    assert_eq!(
        (cached.iter().filter(|c| **c == 160).count(), cached.iter().sum::<u32>()),
        (19, 19 * 160)
    );
}

/// Greedy, of six tokens.
fn greedy() -> GenerationParams {
    GenerationParams {
        sampling: Sampling {
            temperature: 0.0,
            ..Sampling::default()
        },
        max_tokens: 6,
        ..GenerationParams::default()
    }
}

/// Requests with one prompt and one salt: neither blocks nor answers go from one adapter to another.
#[test]
fn requests_of_different_adapters_share_nothing() {
    let greedy = greedy();
    let prompt: Vec<u32> = (0..100).map(|t| 30 + t % 50).collect();
    let of_adapter = |row: u64| Request {
        adapter: row as u32 % 3,
        ..request(row, &prompt, &greedy)
    };
    let requests: Vec<_> = (0..12)
        .map(|row| ([0, 0, 3, 40][row as usize / 3], of_adapter(row)))
        .collect();
    let (results, seen) = run(&ROOMY, &requests);
    let answers: Vec<_> = results
        .values()
        .map(|result| &result.as_ref().unwrap().token_ids)
        .collect();
    for row in 0..3 {
        let alone = run(&ROOMY, &[(0, of_adapter(row as u64))]).0;
        let alone = &alone[&(row as u64)].as_ref().unwrap().token_ids;
        assert!(
            answers.iter().skip(row).step_by(3).all(|answer| *answer == alone),
            "adapter {row}"
        );
        assert_ne!(answers[row], answers[(row + 1) % 3]);
    }
    // Of each adapter one prompt is computed, and those that come later find it.
    assert!((300..400).contains(&seen.tokens), "{seen:?}");
}

#[test]
fn equal_greedy_requests_are_computed_once() {
    let greedy = greedy();
    let longer = GenerationParams {
        max_tokens: 9,
        ..greedy.clone()
    };
    let warm = GenerationParams {
        sampling: Sampling {
            temperature: 1.0,
            ..greedy.sampling
        },
        ..greedy.clone()
    };
    let prompt: Vec<u32> = (0..50).map(|t| 30 + t).collect();
    let alone = run(&ROOMY, &[(0, request(0, &prompt, &greedy))]);
    let requests: Vec<_> = (0..20)
        .map(|row| {
            // Some come when the first is under way, some when it has ended.
            let at = [0, 0, 2, 40][row as usize % 4];
            (at, request(row, &prompt, &greedy))
        })
        .collect();
    let (results, seen) = run(&ROOMY, &requests);
    assert_eq!(results.len(), 20);
    let want = alone.0[&0].as_ref().unwrap();
    for (row, result) in &results {
        let result = result.as_ref().unwrap();
        assert_eq!((result.id.row, &result.token_ids), (*row, &want.token_ids));
    }
    // The last five find the prompt's whole blocks, 48 tokens, and are computed once more together.
    assert_eq!(seen.tokens, alone.1.tokens + (alone.1.tokens - 48));
    // Other parameters, other jobs and drawn answers are not the same.
    let mut others: Vec<_> = [&greedy, &longer, &warm, &warm]
        .into_iter()
        .zip(0..)
        .map(|(params, row)| (0, request(row, &prompt, params)))
        .collect();
    others[0].1.id.job = 1;
    let (results, _) = run(&ROOMY, &others);
    assert!(results.values().all(|r| r.as_ref().unwrap().token_ids.len() <= 9));
    let cached = |row: u64| results[&row].as_ref().unwrap().cached_tokens;
    assert!((0..4).all(|row| cached(row) < 50), "each was computed by itself");
    // Nor are those that other tokens end: jobs of one model may differ in that.
    let mut others: Vec<_> = (0..2).map(|row| (0, request(row, &prompt, &greedy))).collect();
    others[1].1.eos = vec![want.token_ids[0]].into();
    let (results, _) = run(&ROOMY, &others);
    let of = |row: u64| results[&row].as_ref().unwrap();
    assert_eq!(of(0).token_ids, want.token_ids);
    assert_eq!(
        (of(1).token_ids.as_slice(), of(1).finish_reason),
        (&[][..], FinishReason::Stop)
    );
}

#[test]
fn a_cancelled_row_leaves_its_equals() {
    let params = greedy();
    let (mut engine, _) = engine(&ROOMY);
    for row in 0..3 {
        engine.submit(request(row, &[30, 31, 32], &params)).unwrap();
    }
    assert!(engine.step().unwrap().is_empty());
    engine.cancel(0, &|row| row == 0);
    let mut finished = Vec::new();
    while !engine.is_idle() {
        finished.extend(
            engine
                .step()
                .unwrap()
                .into_iter()
                .map(|f| (f.id.row, f.computed_tokens > 0)),
        );
    }
    assert_eq!(finished, [(1, true), (2, false)]);
    for row in 3..5 {
        engine.submit(request(row, &[30, 31, 32], &params)).unwrap();
    }
    engine.cancel(0, &|_| true);
    assert!(engine.is_idle() && engine.wants_more());
}

/// What each part of the policy is for, seen in the steps that are run without it.
#[test]
fn a_policy_leaves_out_what_it_says() {
    let head: Vec<u32> = (0..64).map(|t| 30 + t % 50).collect();
    let steps = |policy: Policy| {
        let (mut engine, _) = engine(&Setup {
            max_sequences: 2,
            budget: 80,
            policy,
            ..ROOMY
        });
        for i in 0..6u32 {
            let params = GenerationParams {
                max_tokens: 1 + 2 * i,
                ignore_eos: true,
                ..GenerationParams::default()
            };
            let prompt: Vec<u32> = head.iter().copied().chain([i + 1]).collect();
            engine.submit(request(u64::from(i), &prompt, &params)).unwrap();
        }
        let (mut steps, mut finished) = (Vec::new(), Vec::new());
        while !engine.is_idle() {
            finished.extend(engine.step().unwrap().into_iter().map(|f| f.id.row));
            steps.push(engine.totals().last_step);
        }
        (steps, finished)
    };
    let prefill = |steps: &[StepSize]| steps.iter().map(|s| s.prefill_tokens).sum::<usize>();
    let mixed = |steps: &[StepSize]| steps.iter().any(|s| s.prefill_tokens > 0 && s.decode_tokens > 0);
    let all = Policy::default();
    let (with_all, order) = steps(all);
    // Of a prompt that is known but for its last token, that one counts as decode.
    assert_eq!(prefill(&with_all), 65);
    assert_eq!(order[0], 4, "the longest two run first");
    let apart = Policy {
        share_prefixes: false,
        ..all
    };
    assert_eq!(prefill(&steps(apart).0), 6 * 65);
    assert!(mixed(&steps(apart).0));
    assert!(!mixed(
        &steps(Policy {
            mix_phases: false,
            ..apart
        })
        .0
    ));
    assert_eq!(
        steps(Policy {
            sort_window: false,
            ..all
        })
        .1[0],
        0
    );
    // Two by two, sorted: 11, 7 and 3 steps.
    assert_eq!(steps(Policy { refill: false, ..all }).0.len(), 11 + 7 + 3);
    assert!(with_all.len() < 21);
}

#[test]
fn labels_with_distinct_first_tokens_cost_one_pass() {
    let choices = ["billing", "shipping", "defect", "other"].map(String::from).to_vec();
    let params = GenerationParams {
        shape: OutputConstraint::Choice {
            choices: choices.clone(),
            probabilities: false,
        },
        ..GenerationParams::default()
    };
    let requests: Vec<_> = (0..30)
        .map(|i| (0, request(i, &[i as u32 + 20, 3, 4], &params)))
        .collect();
    let (results, seen) = run(&ROOMY, &requests);
    assert_eq!((seen.steps, seen.tokens), (1, 90));
    let tokenizer = tokenizer();
    let mut answers = std::collections::BTreeSet::new();
    for result in results.values() {
        let c = result.as_ref().unwrap();
        assert!(choices.contains(&c.text) && c.fits_shape && c.finish_reason == FinishReason::Stop);
        assert_eq!(c.token_ids, tokenizer.encode_plain(&c.text));
        answers.insert(c.text.clone());
    }
    assert_eq!(answers.len(), 4, "30 draws from four labels");
}

/// Probabilities of choices by brute force: softmax over the ways at each step of each choice.
fn brute_force(prompt: &[u32], choices: &[&str], spread: f32) -> Vec<f64> {
    let t = tokenizer();
    let (vocabulary, eos) = (t.vocab_size(), t.eos_id().unwrap());
    let paths: Vec<Vec<u32>> = choices
        .iter()
        .map(|c| t.encode_plain(c).into_iter().chain([eos]).collect())
        .collect();
    paths
        .iter()
        .map(|path| {
            let mut probability = 1.0;
            for at in 0..path.len() {
                let mut ways: Vec<u32> = paths
                    .iter()
                    .filter(|p| p.len() > at && p[..at] == path[..at])
                    .map(|p| p[at])
                    .collect();
                ways.sort_unstable();
                ways.dedup();
                let history: Vec<u32> = prompt.iter().chain(&path[..at]).copied().collect();
                let logits = logits_after(&history, vocabulary, spread);
                let total: f64 = ways.iter().map(|w| f64::from(logits[*w as usize]).exp()).sum();
                probability *= f64::from(logits[path[at] as usize]).exp() / total;
            }
            probability
        })
        .collect()
}

#[test]
fn choice_probabilities_are_those_of_brute_force() {
    let choices = CHOICES;
    let shape = OutputConstraint::Choice {
        choices: choices.map(String::from).to_vec(),
        probabilities: true,
    };
    for row in 0..20u32 {
        let prompt: Vec<u32> = (0..6 + row / 4).map(|t| 40 + t + row).collect();
        let greedy = GenerationParams {
            sampling: Sampling {
                temperature: 0.0,
                ..Sampling::default()
            },
            shape: shape.clone(),
            logprobs: true,
            ..GenerationParams::default()
        };
        let setup = Setup {
            spread: 4.0,
            max_sequences: 1 + row as usize % 4,
            block_tokens: 4,
            ..ROOMY
        };
        let (results, seen) = run(&setup, &[(0, request(0, &prompt, &greedy))]);
        let c = results[&0].as_ref().unwrap();
        let expected = brute_force(&prompt, &choices, 4.0);
        let found = c.choice_probabilities.as_ref().unwrap();
        assert!((found.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        for (f, e) in found.iter().zip(&expected) {
            assert!((f64::from(*f) - e).abs() < 1e-5, "{found:?} instead of {expected:?}");
        }
        let best = (0..choices.len())
            .max_by(|a, b| expected[*a].total_cmp(&expected[*b]))
            .unwrap();
        assert_eq!(c.text, choices[best], "temperature 0 takes the most probable choice");
        assert_eq!(c.logprobs.as_ref().unwrap().len(), c.token_ids.len());
        if setup.max_sequences > 1 && !prompt.len().is_multiple_of(4) {
            assert!(
                seen.copies > 0,
                "forks share the prompt's last block until they write to it"
            );
        }
    }
}

#[test]
fn sampled_choices_follow_their_probabilities() {
    let choices = CHOICES;
    let prompt = [60, 61, 62];
    let expected = brute_force(&prompt, &choices, 2.0);
    assert!(
        expected.iter().all(|p| p * 2000.0 > 5.0),
        "too rare to count: {expected:?}"
    );
    let shape = |probabilities| OutputConstraint::Choice {
        choices: choices.map(String::from).to_vec(),
        probabilities,
    };
    let setup = Setup { spread: 2.0, ..ROOMY };
    let requests = |probabilities| -> Vec<_> {
        let params = GenerationParams {
            sampling: Sampling {
                temperature: 1.0,
                ..Sampling::default()
            },
            shape: shape(probabilities),
            ..GenerationParams::default()
        };
        (0..2000).map(|i| (0, request(i, &prompt, &params))).collect()
    };
    let (with, _) = run(&setup, &requests(true));
    let (without, _) = run(&setup, &requests(false));
    let mut counts = [0f64; 10];
    for (row, result) in &without {
        let text = &result.as_ref().unwrap().text;
        assert_eq!(
            text,
            &with[row].as_ref().unwrap().text,
            "asking for probabilities changes no sampled answer"
        );
        counts[choices.iter().position(|c| c == text).unwrap()] += 1.0;
    }
    let chi: f64 = counts
        .iter()
        .zip(&expected)
        .map(|(n, p)| (n - p * 2000.0).powi(2) / (p * 2000.0))
        .sum();
    assert!(
        chi < 27.9,
        "chi-square {chi} with 9 degrees of freedom, 0.999 quantile 27.9: {counts:?} {expected:?}"
    );
}

#[test]
fn max_tokens_and_context_cut() {
    let free = GenerationParams {
        sampling: Sampling {
            temperature: 0.0,
            ..Sampling::default()
        },
        max_tokens: 5,
        ignore_eos: true,
        logprobs: true,
        ..GenerationParams::default()
    };
    let c = run_one(&[20, 21], &free);
    assert_eq!(
        (c.token_ids.len(), c.finish_reason, c.fits_shape),
        (5, FinishReason::Length, true)
    );
    assert_eq!(c.logprobs.map(|l| l.len()), Some(5));
    let small = Setup { context: 12, ..ROOMY };
    let ask = |prompt: usize, max_tokens| {
        let params = GenerationParams {
            max_tokens,
            ..free.clone()
        };
        run(&small, &[(0, request(0, &vec![20; prompt], &params))])
            .0
            .remove(&0)
            .unwrap()
    };
    let c = ask(10, u32::MAX).unwrap();
    assert_eq!(
        (c.token_ids.len(), c.finish_reason),
        (2, FinishReason::Length),
        "max_tokens is cut to what fits"
    );
    assert_eq!(ask(11, 5).unwrap().token_ids.len(), 1);
    let error = ask(12, 1).unwrap_err();
    assert!(
        error.contains("the prompt has 12 tokens") && !error.contains('\n'),
        "{error}"
    );
    for shape in &shapes()[4..] {
        let params = GenerationParams {
            sampling: Sampling {
                temperature: 0.0,
                ..Sampling::default()
            },
            max_tokens: 2,
            shape: shape.clone(),
            ..GenerationParams::default()
        };
        let c = run_one(&[20, 21], &params);
        assert_eq!(
            (c.finish_reason, c.fits_shape),
            (FinishReason::Length, false),
            "{:?}",
            c.text
        );
    }
    let choices = vec!["zzzz".to_string(), "yyyy".to_string()];
    let shape = OutputConstraint::Choice {
        choices,
        probabilities: false,
    };
    let c = run_one(
        &[20],
        &GenerationParams {
            max_tokens: 2,
            shape,
            ..GenerationParams::default()
        },
    );
    assert_eq!(
        (c.token_ids.len(), c.finish_reason, c.fits_shape),
        (2, FinishReason::Length, false)
    );
}

#[test]
fn what_does_not_fit_is_refused_and_the_rest_goes_on() {
    let params = GenerationParams {
        max_tokens: 30,
        ignore_eos: true,
        ..GenerationParams::default()
    };
    let bad_shape = GenerationParams {
        shape: OutputConstraint::Regex("(".into()),
        ..GenerationParams::default()
    };
    let tiny = Setup {
        blocks: 10,
        block_tokens: 4,
        ..ROOMY
    };
    let requests = [
        (0, request(0, &[20; 10], &params)),
        (0, request(1, &[20; 11], &params)),
        (0, request(2, &[], &params)),
        (0, request(3, &[20, 99_999], &params)),
        (0, request(4, &[20], &bad_shape)),
        (
            0,
            request(
                5,
                &[20],
                &GenerationParams {
                    max_tokens: u32::MAX,
                    ..params.clone()
                },
            ),
        ),
    ];
    let (results, _) = run(&tiny, &requests);
    assert_eq!(results[&0].as_ref().unwrap().token_ids.len(), 30);
    let why = |row: u64| results[&row].clone().unwrap_err();
    assert!(why(1).contains("KV pool") && why(5).contains("KV pool"));
    assert!(why(2).contains("no tokens") && why(3).contains("99999") && why(4).contains("`regex`"));
    assert!((1..=5).all(|row| !why(row).contains('\n')));
}

#[test]
fn shapes_hold_whatever_the_model_says() {
    for row in 0..40u32 {
        let params = |shape: &OutputConstraint, temperature| GenerationParams {
            sampling: Sampling {
                temperature,
                ..Sampling::default()
            },
            max_tokens: 400,
            shape: shape.clone(),
            ..GenerationParams::default()
        };
        let shapes = shapes();
        let c = run_one(&[row + 20], &params(&shapes[4], 1.0));
        assert!(c.fits_shape && c.finish_reason == FinishReason::Stop);
        let body = c.text.strip_suffix("xy").or(c.text.strip_suffix("z")).unwrap();
        assert!(
            (3..=9).contains(&body.len()) && body.bytes().all(|b| (b'a'..=b'c').contains(&b)),
            "{}",
            c.text
        );
        let c = run_one(&[row + 20], &params(&shapes[5], (row % 2) as f32));
        let json: serde_json::Value = serde_json::from_str(&c.text).unwrap();
        assert!(json["a"].is_boolean() && (json["b"] == "x" || json["b"] == "yy") && c.fits_shape);
        let without_single_spaces = c.text.replace(": ", ":").replace(", ", ",");
        assert_eq!(
            json.to_string(),
            without_single_spaces,
            "compact but for a space after a separator"
        );
    }
}

/// Half a second of compiling, which comes to nothing.
#[test]
fn a_shape_that_takes_long_holds_up_no_other_row() {
    let (mut engine, _) = engine(&ROOMY);
    let shaped = |row: u64, shape: OutputConstraint| {
        let params = GenerationParams {
            max_tokens: 4,
            shape,
            ..GenerationParams::default()
        };
        request(row, &[20, 21, 22], &params)
    };
    let hard = |tail: &str| OutputConstraint::Regex(format!("{}{tail}", r"\w?".repeat(1000)));
    engine.submit(shaped(0, hard("a"))).unwrap();
    assert!(!engine.is_idle() && engine.wants_more());
    engine.submit(shaped(1, OutputConstraint::Free)).unwrap();
    let mut order = Vec::new();
    while !engine.is_idle() {
        let ended = engine.step().unwrap();
        order.extend(ended.into_iter().map(|unit| (unit.id.row, unit.result.map(|_| ()))));
    }
    assert_eq!(order.iter().map(|(row, _)| *row).collect::<Vec<_>>(), [1, 0]);
    let why = order[1].1.as_ref().unwrap_err();
    assert!(why.contains("`regex` cannot be compiled"), "{why}");
    // Nobody waits for what was cancelled.
    engine.submit(shaped(2, hard("b"))).unwrap();
    engine.cancel(0, &|row| row == 2);
    assert!(engine.is_idle());
}

#[test]
fn stop_texts_cut_across_tokens() {
    let params = GenerationParams {
        sampling: Sampling {
            temperature: 1.0,
            ..Sampling::default()
        },
        max_tokens: 200,
        ignore_eos: true,
        seed: 3,
        ..GenerationParams::default()
    };
    let whole = run_one(&[33, 34], &params);
    let tokenizer = tokenizer();
    // A text that no single token spells: the end of one and the start of the next.
    let spelled = |n: usize| tokenizer.decode(&whole.token_ids[..n]);
    let at = (20..190).find(|n| {
        spelled(n + 2).is_char_boundary(spelled(*n).len()) && {
            let stop = &spelled(n + 2)[spelled(*n).len()..];
            stop.chars().count() >= 2 && stop.is_ascii() && spelled(n + 2).find(stop) == Some(spelled(*n).len())
        }
    });
    let at = at.expect("no stop text in 200 random tokens");
    let stop = spelled(at + 2)[spelled(at).len()..].to_string();
    let c = run_one(
        &[33, 34],
        &GenerationParams {
            stop: vec!["never".into(), stop],
            ..params.clone()
        },
    );
    assert_eq!((c.text, c.finish_reason), (spelled(at), FinishReason::Stop));
    assert_eq!(
        c.token_ids,
        whole.token_ids[..at + 2],
        "up to the token that completed it"
    );

    let id = whole.token_ids[50];
    let first = whole.token_ids.iter().position(|t| *t == id).unwrap();
    let c = run_one(
        &[33, 34],
        &GenerationParams {
            stop_token_ids: vec![id],
            ..params
        },
    );
    assert_eq!(
        (c.token_ids, c.finish_reason),
        (whole.token_ids[..first].to_vec(), FinishReason::Stop)
    );
}

#[test]
fn the_end_of_sequence_ends_unless_ignored() {
    let eos = tokenizer().eos_id().unwrap();
    // A small spread makes every token about as likely: one in some three hundred is the end.
    let setup = Setup { spread: 0.1, ..ROOMY };
    let mut ended = 0;
    for row in 0..20 {
        let params = |ignore_eos| GenerationParams {
            max_tokens: 400,
            ignore_eos,
            seed: 9,
            ..GenerationParams::default()
        };
        let ask = |ignore| {
            run(&setup, &[(0, request(row, &[25], &params(ignore)))])
                .0
                .remove(&row)
                .unwrap()
                .unwrap()
        };
        let (with, without) = (ask(false), ask(true));
        assert_eq!(
            (without.token_ids.len(), without.finish_reason),
            (400, FinishReason::Length)
        );
        assert_eq!(without.token_ids[..with.token_ids.len()], with.token_ids);
        if with.finish_reason == FinishReason::Stop {
            assert_eq!(without.token_ids[with.token_ids.len()], eos);
            ended += 1;
        }
    }
    assert!(ended > 5);
}

#[test]
fn seeds_samples_and_rows_draw_their_own() {
    let params = GenerationParams {
        sampling: Sampling {
            temperature: 1.0,
            ..Sampling::default()
        },
        max_tokens: 12,
        ignore_eos: true,
        ..GenerationParams::default()
    };
    let ask = |id: SampleId, params: &GenerationParams| {
        let request = Request {
            id,
            ..request(id.row, &[20, 21], params)
        };
        run(&ROOMY, &[(0, request)])
            .0
            .remove(&id.row)
            .unwrap()
            .unwrap()
            .token_ids
    };
    let id = SampleId {
        job: 0,
        row: 1,
        sample: 0,
        attempt: 0,
    };
    let base = ask(id, &params);
    assert_eq!(base, ask(id, &params));
    assert_ne!(base, ask(SampleId { sample: 1, ..id }, &params));
    assert_ne!(base, ask(SampleId { row: 2, ..id }, &params));
    assert_ne!(base, ask(SampleId { attempt: 1, ..id }, &params));
    assert_ne!(
        base,
        ask(
            id,
            &GenerationParams {
                seed: 1,
                ..params.clone()
            }
        )
    );
}

#[test]
fn broken_rows_fail_alone() {
    let params = GenerationParams {
        sampling: Sampling {
            temperature: 0.8,
            ..Sampling::default()
        },
        max_tokens: 6,
        ignore_eos: true,
        ..GenerationParams::default()
    };
    let setup = Setup {
        block_tokens: 4,
        ..ROOMY
    };
    let requests: Vec<_> = (0..8u64)
        .map(|i| {
            let first = if i % 3 == 1 { POISON } else { 20 + i as u32 };
            (0, request(i, &[first, 30, 31, 32, 33], &params))
        })
        .collect();
    let (results, _) = run(&setup, &requests);
    for (_, request) in &requests {
        let row = request.id.row;
        if row % 3 == 1 {
            assert!(results[&row].as_ref().unwrap_err().contains("not finite"));
        } else {
            let alone = run(&ROOMY, &[(0, request.clone())]).0;
            assert_eq!(essence(&results[&row]), essence(&alone[&row]));
        }
    }
}

/// Steps become smaller until they find memory; where one token finds none, the engine stops.
#[test]
fn steps_without_memory_become_smaller() {
    let params = GenerationParams {
        max_tokens: 8,
        ignore_eos: true,
        ..GenerationParams::default()
    };
    let requests: Vec<_> = (0..9).map(|i| (0, request(i, &[40 + i as u32; 12], &params))).collect();
    let (want, roomy) = run(&ROOMY, &requests);
    for ahead in [false, true] {
        let full = Setup {
            budget: 64,
            full_at: vec![5, 6, 9],
            ahead,
            ..ROOMY
        };
        let (got, seen) = run(&full, &requests);
        assert!(seen.steps > roomy.steps + 3, "{seen:?}");
        want.iter()
            .for_each(|(row, want)| assert_eq!(essence(&got[row]), essence(want)));
        let (mut engine, _) = engine(&Setup {
            budget: 4,
            full_at: (1..9).collect(),
            ahead,
            ..ROOMY
        });
        engine.submit(requests[0].1.clone()).unwrap();
        assert!(engine.step().unwrap().is_empty() && engine.step().unwrap().is_empty());
        assert!(engine.step().unwrap_err().to_string().contains("2 are free"));
        assert!(matches!(engine.step(), Err(EngineError::Stopped)));
    }
}

#[test]
fn a_failed_device_stops_the_engine() {
    let (mut engine, _) = engine(&Setup {
        fails_at_step: Some(2),
        ..ROOMY
    });
    engine
        .submit(request(
            0,
            &[20],
            &GenerationParams {
                ignore_eos: true,
                ..GenerationParams::default()
            },
        ))
        .unwrap();
    assert!(engine.step().unwrap().is_empty());
    assert!(matches!(
        engine.step(),
        Err(EngineError::Forward(ForwardError::Device(_)))
    ));
    assert!(matches!(engine.step(), Err(EngineError::Stopped)));
}
