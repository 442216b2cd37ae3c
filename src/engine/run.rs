//! The engine: requests in, completions out, one step at a time.
//!
//! A step is: plan (scheduler) → begin it → prepare masks of constrained sequences → draw tokens →
//! apply them to the sequences. Where the model runs ahead, the next step begins before the tokens
//! of this one are taken. The scheduler then guesses that each sequence goes on, and the model
//! reads the drawn tokens from the device. If a sequence has ended after all, its part of the next
//! step is discarded. Every accepted request gets exactly one result, unless it is cancelled: a
//! completion, or one line that says why there is none.
//!
//! Greedy requests of one job with the same prompt and parameters have the same answer. Requests
//! that arrive while an equal one waits or runs are not computed; they get a copy of its result.
//!
//! See docs/decisions/055-equal-greedy-rows-are-computed-once.md and
//! docs/decisions/057-a-gpu-step-begins-before-the-last-tokens-are-taken.md.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::{SmallVec, smallvec};

use crate::device::DeviceError;
use crate::device::draw::{Draw, DrawError};
use crate::engine::blocks::{BlockKey, BlockPool};
use crate::engine::choice::NodeId;
use crate::engine::constraint::compiler::ShapeState;
use crate::engine::constraint::{Constraint, ConstraintError};
use crate::engine::generate::Generator;
use crate::engine::ids::ById;
use crate::engine::request::{Finished, Request, UnitId};
use crate::engine::scheduler::{Limits, Scheduler, SequenceId, StepPlan};
use crate::engine::sequence::{Continuation, Next, SampleState};
use crate::engine::shapes::Shapes;
use crate::engine::thinking::Begin;
use crate::engine::totals::{StepShape, StepTotals};
use crate::engine::work::{self, ActiveUnit, LogitsRow, PendingStep, UnitWork};
use crate::engine::{EngineOptions, Forward, ForwardError};
use crate::tokenizer::Tokenizer;

/// Cost of a unit that takes its token, in elements as [`Threads::parts`] counts them: a
/// microsecond or more per unit.
const TAKE_ELEMENTS: usize = 256;
/// [`Engine::wants_more`] until this many times `max_sequences` requests wait, so that packing has
/// a window to order.
const WINDOWS_WAITING: usize = 4;

/// The engine cannot go on. Another engine must compute its pending requests again.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error(transparent)]
    Forward(ForwardError),
    #[error("the model returned {found} sampled tokens in place of {expected}")]
    Drawn { found: usize, expected: usize },
    #[error("the engine has stopped after an earlier failure")]
    Stopped,
}

/// A request that this engine cannot complete; fails the row.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
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
    OutputConstraint(#[from] ConstraintError),
}

/// Job and prompt of a greedy request. Requests that agree in these and in their parameters have
/// the same answer.
type Question = (u32, Arc<[u32]>);

/// See the module's description.
pub struct Engine {
    forward: Box<dyn Forward + Send>,
    tokenizer: Arc<Tokenizer>,
    options: EngineOptions,
    scheduler: Scheduler,
    shapes: Shapes,
    units: ById<Box<ActiveUnit>>,
    /// The unit that computes each greedy request.
    questions: HashMap<Question, u64>,
    /// Requests that wait for the result of an equal one.
    copies: usize,
    /// The unit of each sequence, and the node of a choice that the sequence has reached.
    sequences: ById<(u64, NodeId)>,
    /// Requests that ended without a step; the next step returns them.
    finished: Vec<Finished>,
    /// The step whose tokens have not been taken.
    pending: Option<PendingStep>,
    /// Tokens per job of the step whose tokens were taken last.
    step_tokens: Vec<(u32, u64)>,
    totals: StepTotals,
    /// The last key given to a unit or sequence.
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
            shapes: Shapes::default(),
            forward,
            tokenizer,
            options,
            units: ById::default(),
            questions: HashMap::new(),
            copies: 0,
            sequences: ById::default(),
            finished: Vec::new(),
            pending: None,
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

    /// Sizes of the steps so far, and time spent in each phase.
    pub fn totals(&self) -> &StepTotals {
        &self.totals
    }

    /// Time spent in the model so far by kind of operation; empty where it is unknown.
    pub fn operation_times(&self) -> Vec<(&'static str, Duration)> {
        self.forward.operation_times()
    }

    /// Sequences that wait to be started or resumed.
    pub fn waiting(&self) -> usize {
        self.scheduler.waiting()
    }

    /// Hands a new unit's first sequence to the scheduler.
    fn start(&mut self, unit: SampleState, first: SmallVec<[Continuation; 1]>, max_tokens: u32) {
        let key = self.new_key();
        let sharing = self.scheduler.sharing(unit.cache_salt(), unit.params().deterministic);
        let mut sequences = SmallVec::new();
        for Continuation { node, tokens } in first {
            let sequence = self.new_key();
            self.scheduler
                .submit(sequence, unit.prompt().clone(), tokens.into_vec(), max_tokens, sharing);
            self.sequences.insert(sequence, (key, node));
            sequences.push(sequence);
        }
        if unit.params().sampling.temperature == 0.0 {
            self.questions.insert((unit.id().job, unit.prompt().clone()), key);
        }
        let active = ActiveUnit {
            ids: vec![unit.id()],
            unit,
            sequences,
            computed_tokens: 0,
        };
        self.units.insert(key, Box::new(active));
    }

    /// Whether an equal request is waiting or running; if so, this request gets a copy of its
    /// result.
    fn is_copy(&mut self, request: &Request) -> bool {
        if request.params.sampling.temperature != 0.0 {
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

    /// Ends the matching of new requests to this unit.
    fn forget(questions: &mut HashMap<Question, u64>, key: u64, unit: &SampleState) {
        let question = (unit.id().job, unit.prompt().clone());
        if questions.get(&question) == Some(&key) {
            questions.remove(&question);
        }
    }

    fn new_key(&mut self) -> u64 {
        self.next_key += 1;
        self.next_key
    }

    /// Admits requests whose shapes have been compiled since the last step.
    fn admit_compiled(&mut self) {
        let is_idle = self.units.is_empty() && self.finished.is_empty() && self.pending.is_none();
        for (request, shape) in self.shapes.compiled(is_idle) {
            let id = request.id;
            let admitted = shape
                .map_err(RequestError::from)
                .and_then(|shape| self.admit(request, shape));
            if let Err(refused) = admitted {
                self.finished.push(Finished {
                    id,
                    result: Err(refused.to_string()),
                    computed_tokens: 0,
                });
            }
        }
    }

    /// Admits a request whose shape is compiled.
    fn admit(&mut self, request: Request, constraint: Constraint) -> Result<(), RequestError> {
        let prompt = request.prompt.len();
        let context = self.forward.context_tokens() as usize;
        let room = context.saturating_sub(prompt);
        let asked = request.params.max_tokens as usize;
        let thinking = request.params.thinking.as_ref();
        let thinks = thinking.is_some_and(|thinking| thinking.begin(&request.prompt) != Begin::Answer);
        // A choice needs no tokens beyond its deepest branching; thoughts and other completions
        // grow up to `max_tokens`.
        let (needs, most, max_tokens) = match &constraint {
            Constraint::Choice { choices, .. } if thinks => {
                let deepest = choices.deepest_choice();
                (deepest.max(1), asked.max(deepest).min(room), asked.min(room))
            }
            Constraint::Choice { choices, .. } => (choices.deepest_choice().max(1), choices.deepest_choice(), asked),
            Constraint::Free | Constraint::Grammar(_) => (1, asked.min(room), asked.min(room)),
        };
        if needs > room {
            return Err(RequestError::Context { prompt, needs, context });
        }
        if !self.scheduler.fits_pool(prompt + most) {
            return Err(RequestError::Pool {
                prompt,
                most,
                pool: self.scheduler.pool_tokens(),
            });
        }
        if self.is_copy(&request) {
            return Ok(());
        }
        let id = request.id;
        let (unit, next) = SampleState::new(request, constraint, max_tokens, &self.tokenizer);
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

    /// Calls the model and adds the time to the totals.
    fn forward<T>(&mut self, what: impl FnOnce(&mut dyn Forward) -> Result<T, ForwardError>) -> Result<T, EngineError> {
        let began = Instant::now();
        let result = what(&mut *self.forward);
        self.totals.forward += began.elapsed();
        result.map_err(EngineError::Forward)
    }

    /// Begins a planned step, takes the tokens of the step before, and starts drawing this step's
    /// tokens.
    fn advance(&mut self, plan: &StepPlan, finished: &mut Vec<Finished>) -> Result<(), EngineError> {
        self.step_tokens.clear();
        let tokens = self.count_tokens(plan);
        if !plan.sequences.is_empty() {
            let batch = work::batch(plan);
            if let Err(error) = self.forward(|model| model.begin(&batch)) {
                return self.start_over(error, tokens, finished);
            }
        }
        self.collect_pending(finished)?;
        if plan.sequences.is_empty() {
            return Ok(());
        }
        match self.draw(plan) {
            Ok((rows, count)) => self.pending = Some(PendingStep { rows, count, tokens }),
            Err(error) => return self.start_over(error, tokens, finished),
        }
        if self.forward.runs_ahead() {
            Ok(())
        } else {
            self.collect_pending(finished)
        }
    }

    /// Handles a step that did not fit the device's memory: its results are discarded, and all
    /// running sequences are computed again in smaller steps.
    fn start_over(
        &mut self,
        error: EngineError,
        tokens: Vec<(u32, u64)>,
        finished: &mut Vec<Finished>,
    ) -> Result<(), EngineError> {
        let EngineError::Forward(ForwardError::Device(DeviceError::OutOfMemory(why))) = &error else {
            return Err(error);
        };
        let Some(limits) = self.scheduler.start_over() else {
            return Err(error);
        };
        tracing::warn!(
            "a step does not fit in memory, {why}: steps now have at most {} tokens and {} sequences",
            limits.max_step_tokens,
            limits.max_sequences
        );
        self.collect_pending(finished)?;
        self.step_tokens.extend(tokens);
        self.forward.give_back();
        Ok(())
    }

    /// Starts drawing a token for each sequence whose tokens the step has all computed. Returns
    /// these sequences with their rows of the logits, and the number of all rows.
    fn draw(&mut self, plan: &StepPlan) -> Result<(Vec<(SequenceId, usize)>, usize), EngineError> {
        let sampled = plan.sequences.iter().filter(|planned| planned.samples);
        let count = sampled.clone().count();
        // Since the step was planned, sequences have ended, or gone on with more tokens than
        // guessed.
        let rows: Vec<(SequenceId, usize)> = sampled
            .enumerate()
            .filter(|(_, planned)| self.scheduler.is_computed(planned.id))
            .map(|(row, planned)| (planned.id, row))
            .collect();
        let mut work = self.collect(&rows);
        work::prepare(&self.options.threads, &mut work);
        let tokenizer = Arc::clone(&self.tokenizer);
        work.iter_mut().for_each(|w| w.active.unit.prepare(&tokenizer));
        let mut draws = vec![Draw::GREEDY; count];
        for w in &work {
            for row in &w.rows {
                draws[row.at] = w.active.unit.draw(row.node, &tokenizer);
            }
        }
        // Ids that only one of model and tokenizer knows are padding and are never drawn.
        let ids = self.forward.vocab_size().min(tokenizer.vocab_size());
        let drawing = self.forward(|model| model.draw(ids, &draws));
        let guesses = drawing.is_ok() && self.forward.runs_ahead();
        for w in work {
            if guesses && w.active.unit.may_go_on() {
                for row in &w.rows {
                    self.scheduler.guess(row.sequence, row.at as u32);
                }
            }
            self.units.insert(w.key, w.active);
        }
        drawing.map(|()| (rows, count))
    }

    /// Takes the tokens of the pending step.
    fn collect_pending(&mut self, finished: &mut Vec<Finished>) -> Result<(), EngineError> {
        let Some(pending) = self.pending.take() else {
            return Ok(());
        };
        let mut drawn = self.forward(|model| model.drawn())?;
        if drawn.len() != pending.count {
            return Err(EngineError::Drawn {
                found: drawn.len(),
                expected: pending.count,
            });
        }
        let mut work = self.collect(&pending.rows);
        for w in &mut work {
            let taken = |row: &LogitsRow| std::mem::replace(&mut drawn[row.at], Err(DrawError::NothingAllowed));
            w.drawn = w.rows.iter().map(taken).collect();
        }
        let tokenizer = &*self.tokenizer;
        let elements = if work.iter_mut().any(|w| w.active.unit.grammar().is_some()) {
            usize::MAX
        } else {
            work.len() * TAKE_ELEMENTS
        };
        self.options.threads.share_mut(elements, &mut work, |_, work| {
            for w in work {
                for (row, drawn) in w.rows.iter().zip(w.drawn.drain(..)) {
                    let next = w.active.unit.take(row.node, drawn, tokenizer);
                    let ended = matches!(next, Next::Finished(_));
                    w.next.push(next);
                    if ended {
                        break;
                    }
                }
            }
        });
        for work in work {
            self.apply(work, finished);
        }
        self.step_tokens.extend(pending.tokens);
        Ok(())
    }

    /// Takes the units of the sequences that still exist, with their rows.
    fn collect(&mut self, rows: &[(SequenceId, usize)]) -> Vec<UnitWork> {
        let mut work: Vec<UnitWork> = Vec::with_capacity(rows.len());
        // Index in `work`, for units with several sequences.
        let mut place: ById<usize> = ById::default();
        for &(sequence, at) in rows {
            let Some((key, node)) = self.sequences.get(&sequence).copied() else {
                continue;
            };
            let row = LogitsRow { sequence, node, at };
            if let Some(active) = self.units.remove(&key) {
                if active.sequences.len() > 1 {
                    place.insert(key, work.len());
                }
                work.push(UnitWork {
                    key,
                    active,
                    rows: smallvec![row],
                    drawn: SmallVec::new(),
                    next: SmallVec::new(),
                });
            } else if let Some(at) = place.get(&key) {
                work[*at].rows.push(row);
            }
        }
        work
    }

    /// Applies a unit's drawn tokens: its sequences go on, fork or end.
    fn apply(&mut self, work: UnitWork, finished: &mut Vec<Finished>) {
        let UnitWork {
            key,
            mut active,
            rows,
            next,
            ..
        } = work;
        for (LogitsRow { sequence, node, .. }, next) in rows.into_iter().zip(next) {
            match next {
                Next::Finished(result) => {
                    for sequence in active.sequences {
                        self.end(sequence);
                    }
                    Self::forget(&mut self.questions, key, &active.unit);
                    self.copies -= active.ids.len() - 1;
                    finished.extend(work::results(active.ids, result, active.computed_tokens));
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
                    if own.node != node {
                        self.sequences.insert(sequence, (key, own.node));
                    }
                }
            }
        }
        self.units.insert(key, active);
    }

    fn end(&mut self, sequence: SequenceId) {
        self.scheduler.remove(sequence);
        self.sequences.remove(&sequence);
    }

    /// Tokens that a step computes, by job; also adds them to their units.
    fn count_tokens(&mut self, plan: &StepPlan) -> Vec<(u32, u64)> {
        let mut by_job: Vec<(u32, u64)> = Vec::new();
        for planned in &plan.sequences {
            let sequence = self.sequences.get(&planned.id);
            let Some(active) = sequence.and_then(|(unit, _)| self.units.get_mut(unit)) else {
                continue;
            };
            let job = active.unit.id().job;
            let tokens = planned.tokens.len() as u64;
            active.computed_tokens += tokens;
            match by_job.iter_mut().find(|(known, _)| *known == job) {
                Some((_, sum)) => *sum += tokens,
                None => by_job.push((job, tokens)),
            }
        }
        by_job
    }
}

impl Generator for Engine {
    fn is_idle(&self) -> bool {
        self.units.is_empty() && self.finished.is_empty() && self.pending.is_none() && self.shapes.waiting() == 0
    }

    /// True until enough requests wait that each refill of the batch has a window to choose from.
    fn wants_more(&self) -> bool {
        self.scheduler.waiting() + self.copies + self.shapes.waiting()
            < WINDOWS_WAITING * self.options.max_sequences.max(1)
    }

    /// A `max_tokens` beyond the model's context is cut to the tokens that fit. A prompt that
    /// leaves no room for a single token is refused, and so is a prompt that together with its
    /// `max_tokens` exceeds the whole KV pool.
    fn submit(&mut self, request: Request) -> Result<(), RequestError> {
        let vocabulary = self.forward.vocab_size();
        if request.prompt.is_empty() {
            return Err(RequestError::EmptyPrompt);
        }
        if let Some(&token) = request.prompt.iter().find(|t| **t as usize >= vocabulary) {
            return Err(RequestError::UnknownToken { token, vocabulary });
        }
        match self.shapes.find(&request, &self.tokenizer) {
            ShapeState::Ready(constraint) => self.admit(request, constraint?),
            ShapeState::Underway(key) => {
                self.shapes.wait(key, request);
                Ok(())
            }
        }
    }

    fn step(&mut self) -> Result<Vec<Finished>, EngineError> {
        if self.stopped {
            return Err(EngineError::Stopped);
        }
        self.admit_compiled();
        let began = Instant::now();
        let plan = self.scheduler.plan();
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
        let (planned, before) = (Instant::now(), self.totals.forward);
        self.advance(&plan, &mut finished)
            .inspect_err(|_| self.stopped = true)?;
        let totals = &mut self.totals;
        totals.steps += u64::from(!plan.sequences.is_empty());
        totals.planning += planned - began;
        totals.advance += planned.elapsed().saturating_sub(totals.forward - before);
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
        self.shapes.cancel(dropped);
    }
}
