//! The engine: requests in, completions out, one step at a time.
//!
//! A step is: plan (scheduler) → run the model, computing masks of constrained sequences meanwhile (or before, where the model
//! takes all cores) → sample. Every accepted request comes back exactly once, as a completion or as one line that says why there
//! is none.
//!
//! Greedy requests of one job with the same prompt and parameters have the same answer: those that come while the first is
//! waiting or running are not computed, but get a copy of what becomes of it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::device::batch::{StepBatch, StepSequence};
use crate::device::cpu::Threads;
use crate::engine::blocks::{BlockKey, BlockPool};
use crate::engine::choice::Node;
use crate::engine::constraint::{Compiler, Constraint, ConstraintError, GrammarState};
use crate::engine::generate::Generate;
use crate::engine::params::Params;
use crate::engine::request::{Completion, Finished, Request, UnitId};
use crate::engine::sampling::Scratch;
use crate::engine::scheduler::{Limits, Policy, Scheduler, SequenceId, StepPlan};
use crate::engine::sequence::{Continuation, Next, Unit};
use crate::engine::totals::{StepShape, StepTotals};
use crate::engine::{Forward, ForwardError};
use crate::model::tokenizer::Tokenizer;

/// [`Engine::wants_more`] until this many times `max_sequences` wait, so that packing has something to order.
const WINDOWS_WAITING: usize = 4;

/// How an engine runs.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Most tokens computed in one step, at least 1.
    pub max_step_tokens: usize,
    /// Most sequences that run at once, at least 1.
    pub max_sequences: usize,
    /// What shapes keys and values besides token ids: model, adapter, KV format. The root of prefix keys.
    pub prefix_root: String,
    pub policy: Policy,
    /// What it samples on: the model's own threads, where a step takes the cores.
    pub threads: Arc<Threads>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            max_step_tokens: 2048,
            max_sequences: 256,
            prefix_root: String::new(),
            policy: Policy::default(),
            threads: Arc::default(),
        }
    }
}

/// The engine cannot go on; what it was working on is lost and must be computed again by another engine.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error(transparent)]
    Forward(ForwardError),
    #[error("the model returned {found} logits where {expected} were asked for")]
    Logits { found: usize, expected: usize },
    #[error("the engine has stopped after an earlier failure")]
    Stopped,
}

/// A request that this engine cannot complete; fails the row.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    #[error("the prompt holds token {token}, and the model's vocabulary has {vocabulary}")]
    UnknownToken { token: u32, vocabulary: usize },
    #[error("{prompt} prompt tokens and at least {needs} to answer, more than the model's context of {context}")]
    Context {
        prompt: usize,
        needs: usize,
        context: usize,
    },
    #[error("{prompt} prompt tokens and up to {most} to answer, more than the {pool} tokens that the KV pool holds")]
    Pool { prompt: usize, most: usize, pool: usize },
    #[error(transparent)]
    Shape(#[from] ConstraintError),
}

/// A unit and the sequences that work for it.
struct Active {
    unit: Unit,
    /// Who gets the result: the unit's own request and equal ones, as far as they were not cancelled.
    ids: Vec<UnitId>,
    sequences: Vec<SequenceId>,
    computed_tokens: u64,
}

/// What greedy requests with the same answer agree in, besides their parameters.
type Question = (u32, Arc<[u32]>);

/// One unit's share of a step's logits.
struct Work {
    key: u64,
    active: Active,
    /// Which sequence, at which node, and its row among the logits.
    rows: Vec<(SequenceId, Node, usize)>,
    next: Vec<(SequenceId, Next)>,
}

/// A shape, for whom it was compiled.
struct Compiled {
    params: Arc<Params>,
    eos: Arc<[u32]>,
    result: Result<Constraint, ConstraintError>,
}

/// See the module's description.
pub struct Engine {
    forward: Box<dyn Forward + Send>,
    tokenizer: Arc<Tokenizer>,
    options: EngineOptions,
    scheduler: Scheduler,
    /// By end-of-sequence ids: jobs of one model may differ in theirs.
    compilers: HashMap<Arc<[u32]>, Compiler>,
    /// The shape compiled last: rows of a job share their parameters.
    compiled: Option<Compiled>,
    units: HashMap<u64, Active>,
    /// The unit that works at a greedy request.
    questions: HashMap<Question, u64>,
    /// Requests that wait for another's result.
    copies: usize,
    /// The unit of each sequence, and the node of a choice that it works at.
    sequences: HashMap<SequenceId, (u64, Node)>,
    /// Ended without a step; handed out by the next one.
    finished: Vec<Finished>,
    /// Tokens of the last step by job.
    step_tokens: Vec<(u32, u64)>,
    totals: StepTotals,
    /// Counts units and sequences.
    next_key: u64,
    stopped: bool,
}

impl Engine {
    /// An engine around a model whose KV pool is empty.
    pub fn new(forward: Box<dyn Forward + Send>, tokenizer: Arc<Tokenizer>, options: EngineOptions) -> Engine {
        let limits = Limits {
            max_step_tokens: match forward.step_tokens_max() {
                Some(most) => options.max_step_tokens.clamp(1, most as usize),
                None => options.max_step_tokens.max(1),
            },
            max_sequences: options.max_sequences.max(1),
            policy: options.policy,
        };
        let pool = BlockPool::new(forward.kv_blocks(), forward.block_tokens().max(1));
        Engine {
            scheduler: Scheduler::new(limits, pool, BlockKey::root(&options.prefix_root)),
            compilers: HashMap::new(),
            forward,
            tokenizer,
            options,
            compiled: None,
            units: HashMap::new(),
            questions: HashMap::new(),
            copies: 0,
            sequences: HashMap::new(),
            finished: Vec::new(),
            step_tokens: Vec::new(),
            totals: StepTotals::default(),
            next_key: 0,
            stopped: false,
        }
    }

    /// Sequences that run.
    pub fn running(&self) -> usize {
        self.scheduler.running()
    }

    /// What its steps held so far, and where their time went.
    pub fn totals(&self) -> &StepTotals {
        &self.totals
    }

    /// Time spent in the model so far by kind of operation; empty where it is not known.
    pub fn operation_times(&self) -> Vec<(&'static str, Duration)> {
        self.forward.operation_times()
    }

    /// Sequences that wait for room.
    pub fn waiting(&self) -> usize {
        self.scheduler.waiting()
    }

    /// Hands a new unit's first sequence to the scheduler.
    fn start(&mut self, unit: Unit, first: Vec<Continuation>, max_tokens: u32) {
        let key = self.new_key();
        let mut sequences = Vec::new();
        for Continuation { node, tokens } in first {
            let sequence = self.new_key();
            self.scheduler
                .submit(sequence, unit.prompt().clone(), tokens, max_tokens);
            self.sequences.insert(sequence, (key, node));
            sequences.push(sequence);
        }
        if unit.params().temperature == 0.0 {
            self.questions.insert((unit.id().job, unit.prompt().clone()), key);
        }
        let active = Active {
            ids: vec![unit.id()],
            unit,
            sequences,
            computed_tokens: 0,
        };
        self.units.insert(key, active);
    }

    /// Lets a request wait for the result of an equal one, where there is one.
    fn is_copy(&mut self, request: &Request) -> bool {
        if request.params.temperature != 0.0 {
            return false;
        }
        let question = (request.id.job, request.prompt.clone());
        let key = self.questions.get(&question);
        let Some(active) = key.and_then(|key| self.units.get_mut(key)) else {
            return false;
        };
        let is_equal = active.unit.asks(request);
        if is_equal {
            active.ids.push(request.id);
            self.copies += 1;
        }
        is_equal
    }

    /// Nobody is to wait for this unit any more.
    fn forget(questions: &mut HashMap<Question, u64>, key: u64, unit: &Unit) {
        let question = (unit.id().job, unit.prompt().clone());
        if questions.get(&question) == Some(&key) {
            questions.remove(&question);
        }
    }

    fn new_key(&mut self) -> u64 {
        self.next_key += 1;
        self.next_key
    }

    fn constraint(&mut self, request: &Request) -> Result<Constraint, ConstraintError> {
        let Request { params, eos, .. } = request;
        match &self.compiled {
            Some(last) if Arc::ptr_eq(&last.params, params) && last.eos == *eos => last.result.clone(),
            // The compiler knows the same shape again.
            _ => {
                let compiler = self.compilers.entry(eos.clone()).or_insert_with(|| Compiler::new(eos));
                let result = compiler.compile(&params.shape, &self.tokenizer);
                self.compiled = Some(Compiled {
                    params: params.clone(),
                    eos: eos.clone(),
                    result: result.clone(),
                });
                result
            }
        }
    }

    /// Runs the model and samples. The units that got logits come back with what follows.
    fn run(&mut self, plan: &StepPlan) -> Result<Vec<Work>, EngineError> {
        let batch = batch(plan);
        let mut work = self.collect(plan);
        let stride = self.forward.vocab_size();
        let (forward, threads) = (&mut self.forward, &*self.options.threads);
        let mut lanes = lanes(&mut work);
        if forward.shares_cores() {
            prepare(threads, &mut lanes);
            lanes.clear();
        }
        let (result, took) = std::thread::scope(|scope| {
            if !lanes.is_empty() {
                scope.spawn(|| prepare(threads, &mut lanes));
            }
            let began = Instant::now();
            (forward.forward(&batch), began.elapsed())
        });
        self.totals.forward += took;
        let logits = result.map_err(EngineError::Forward)?;
        if logits.len() != batch.logits_at.len() * stride {
            return Err(EngineError::Logits {
                found: logits.len(),
                expected: batch.logits_at.len() * stride,
            });
        }
        // Ids that only one of model and tokenizer knows are padding and are never sampled.
        let vocabulary = stride.min(self.tokenizer.vocab_size());
        let tokenizer = &*self.tokenizer;
        threads.share_mut(logits.len(), &mut work, |_, work| {
            let mut scratch = Scratch::default();
            for w in work {
                for (sequence, node, row) in &w.rows {
                    let logits = &logits[row * stride..][..vocabulary];
                    let next = w.active.unit.observe(*node, logits, tokenizer, &mut scratch);
                    let ended = matches!(next, Next::Finished(_));
                    w.next.push((*sequence, next));
                    if ended {
                        break;
                    }
                }
            }
        });
        Ok(work)
    }

    /// Takes the units that get logits in this step, with the rows of their sequences.
    fn collect(&mut self, plan: &StepPlan) -> Vec<Work> {
        let mut work: Vec<Work> = Vec::new();
        let mut place: HashMap<u64, usize> = HashMap::new();
        for (row, planned) in plan.sequences.iter().filter(|p| p.samples).enumerate() {
            let Some((key, node)) = self.sequences.get(&planned.id).copied() else {
                continue;
            };
            let at = match place.get(&key) {
                Some(at) => *at,
                None => {
                    let Some(active) = self.units.remove(&key) else {
                        continue;
                    };
                    work.push(Work {
                        key,
                        active,
                        rows: Vec::new(),
                        next: Vec::new(),
                    });
                    place.insert(key, work.len() - 1);
                    work.len() - 1
                }
            };
            work[at].rows.push((planned.id, node, row));
        }
        work
    }

    /// Does what follows from a unit's logits: its sequences go on, part or end.
    fn apply(&mut self, work: Work, finished: &mut Vec<Finished>) {
        let Work {
            key, mut active, next, ..
        } = work;
        for (sequence, next) in next {
            match next {
                Next::Finished(result) => {
                    for sequence in active.sequences {
                        self.end(sequence);
                    }
                    Self::forget(&mut self.questions, key, &active.unit);
                    self.copies -= active.ids.len() - 1;
                    finished.extend(results(active.ids, result, active.computed_tokens));
                    return;
                }
                Next::Go(continuations) => {
                    let mut continuations = continuations.into_iter();
                    let Some(own) = continuations.next() else {
                        self.end(sequence);
                        active.sequences.retain(|s| *s != sequence);
                        continue;
                    };
                    for Continuation { node, tokens } in continuations {
                        let fork = self.new_key();
                        self.scheduler.fork(sequence, fork, &tokens);
                        self.sequences.insert(fork, (key, node));
                        active.sequences.push(fork);
                    }
                    self.scheduler.extend(sequence, &own.tokens);
                    self.sequences.insert(sequence, (key, own.node));
                }
            }
        }
        self.units.insert(key, active);
    }

    fn end(&mut self, sequence: SequenceId) {
        self.scheduler.remove(sequence);
        self.sequences.remove(&sequence);
    }

    fn count_tokens(&mut self, plan: &StepPlan) {
        self.step_tokens.clear();
        for planned in &plan.sequences {
            let sequence = self.sequences.get(&planned.id);
            let Some(active) = sequence.and_then(|(unit, _)| self.units.get_mut(unit)) else {
                continue;
            };
            let job = active.unit.id().job;
            let tokens = planned.tokens.len() as u64;
            active.computed_tokens += tokens;
            match self.step_tokens.iter_mut().find(|(known, _)| *known == job) {
                Some((_, sum)) => *sum += tokens,
                None => self.step_tokens.push((job, tokens)),
            }
        }
    }
}

impl Generate for Engine {
    fn is_idle(&self) -> bool {
        self.units.is_empty() && self.finished.is_empty()
    }

    /// While there is room, each fill of the batch finds a window to choose from.
    fn wants_more(&self) -> bool {
        self.scheduler.waiting() + self.copies < WINDOWS_WAITING * self.options.max_sequences.max(1)
    }

    /// A `max_tokens` beyond the model's context is cut to what fits; a prompt that leaves no room for a single token is
    /// refused, and so is one that with its `max_tokens` is more than the whole KV pool holds.
    fn submit(&mut self, request: Request) -> Result<(), Refused> {
        let vocabulary = self.forward.vocab_size();
        if request.prompt.is_empty() {
            return Err(Refused::EmptyPrompt);
        }
        if let Some(&token) = request.prompt.iter().find(|t| **t as usize >= vocabulary) {
            return Err(Refused::UnknownToken { token, vocabulary });
        }
        let constraint = self.constraint(&request)?;
        let prompt = request.prompt.len();
        let context = self.forward.context_tokens() as usize;
        let room = context.saturating_sub(prompt);
        let asked = request.params.max_tokens as usize;
        // A choice computes nothing beyond its last branching; other completions grow up to `max_tokens`.
        let (needs, most, max_tokens) = match &constraint {
            Constraint::Choice { choices, .. } => (choices.deepest_choice().max(1), choices.deepest_choice(), asked),
            Constraint::Free | Constraint::Grammar(_) => (1, asked.min(room), asked.min(room)),
        };
        if needs > room {
            return Err(Refused::Context { prompt, needs, context });
        }
        if !self.scheduler.fits_pool(prompt + most) {
            return Err(Refused::Pool {
                prompt,
                most,
                pool: self.scheduler.pool_tokens(),
            });
        }
        if self.is_copy(&request) {
            return Ok(());
        }
        let id = request.id;
        let (unit, next) = Unit::new(request, constraint, max_tokens, &self.tokenizer);
        match next {
            Next::Finished(result) => self.finished.push(Finished {
                id,
                result,
                computed_tokens: 0,
            }),
            Next::Go(first) => self.start(unit, first, most as u32),
        }
        Ok(())
    }

    fn step(&mut self) -> Result<Vec<Finished>, EngineError> {
        if self.stopped {
            return Err(EngineError::Stopped);
        }
        let began = Instant::now();
        let plan = self.scheduler.plan();
        self.count_tokens(&plan);
        self.totals.last = StepShape::of(&plan);
        for (sequence, cached) in &plan.started {
            let active = self
                .sequences
                .get(sequence)
                .and_then(|(unit, _)| self.units.get_mut(unit));
            if let Some(active) = active {
                active.unit.started(*cached);
            }
        }
        let mut finished = std::mem::take(&mut self.finished);
        if !plan.sequences.is_empty() {
            let before = self.totals.forward;
            let planned = Instant::now();
            let work = self.run(&plan).inspect_err(|_| self.stopped = true)?;
            for work in work {
                self.apply(work, &mut finished);
            }
            let totals = &mut self.totals;
            totals.steps += 1;
            totals.planning += planned - began;
            totals.sampling += planned.elapsed().saturating_sub(totals.forward - before);
        }
        Ok(finished)
    }

    fn step_tokens(&self) -> &[(u32, u64)] {
        &self.step_tokens
    }

    fn cancel(&mut self, job: u32, rows: &dyn Fn(u64) -> bool) {
        let dropped = |id: UnitId| id.job == job && rows(id.row);
        let scheduler = &mut self.scheduler;
        let (sequences, questions, copies) = (&mut self.sequences, &mut self.questions, &mut self.copies);
        self.units.retain(|key, active| {
            let before = active.ids.len();
            active.ids.retain(|id| !dropped(*id));
            *copies -= (before - 1) - active.ids.len().saturating_sub(1);
            if active.ids.is_empty() {
                for sequence in &active.sequences {
                    scheduler.remove(*sequence);
                    sequences.remove(sequence);
                }
                Self::forget(questions, *key, &active.unit);
            }
            !active.ids.is_empty()
        });
        self.finished.retain(|finished| !dropped(finished.id));
    }
}

/// The units' states in grammars, those together that take turns.
fn lanes(work: &mut [Work]) -> Vec<Vec<&mut GrammarState>> {
    let mut lanes: Vec<Vec<&mut GrammarState>> = Vec::new();
    for state in work.iter_mut().filter_map(|w| w.active.unit.grammar()) {
        lanes.resize_with(GrammarState::lanes(), Vec::new);
        lanes[state.lane()].push(state);
    }
    lanes
}

/// Readies the grammars for their masks. Those of a lane take turns.
fn prepare(threads: &Threads, lanes: &mut [Vec<&mut GrammarState>]) {
    threads.share_mut(usize::MAX, lanes, |_, lanes| {
        lanes.flatten().for_each(|state| state.prepare());
    });
}

/// One result for all who wait for it. The first of them is said to have cost what it did.
fn results(
    ids: Vec<UnitId>,
    result: Result<Completion, String>,
    computed_tokens: u64,
) -> impl Iterator<Item = Finished> {
    ids.into_iter().enumerate().map(move |(at, id)| Finished {
        id,
        result: result.clone().map(|completion| Completion {
            id,
            cached_tokens: if at == 0 {
                completion.cached_tokens
            } else {
                completion.prompt_tokens
            },
            ..completion
        }),
        computed_tokens: if at == 0 { computed_tokens } else { 0 },
    })
}

/// Flattens a plan into what a device takes.
fn batch(plan: &StepPlan) -> StepBatch {
    let mut batch = StepBatch {
        block_copies: plan.copies.clone(),
        ..StepBatch::default()
    };
    for planned in &plan.sequences {
        let end = planned.start + planned.tokens.len();
        batch.sequences.push(StepSequence {
            first_token: batch.tokens.len() as u32,
            q_len: planned.tokens.len() as u32,
            kv_len: end as u32,
            first_block: batch.block_tables.len() as u32,
        });
        batch.tokens.extend_from_slice(&planned.tokens);
        batch.positions.extend(planned.start as u32..end as u32);
        batch.block_tables.extend_from_slice(&planned.blocks);
        if planned.samples {
            batch.logits_at.push(batch.tokens.len() as u32 - 1);
        }
    }
    batch
}
