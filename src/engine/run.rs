//! The engine: requests in, completions out, one step at a time.
//!
//! A step is: plan (scheduler) → begin the step → compute masks of constrained sequences → draw tokens → apply the tokens to the
//! sequences. Where the model runs ahead, the next step begins before the drawn tokens are known to the CPU. The scheduler then
//! plans placeholders for the drawn tokens, and the model reads the tokens from the device. If a sequence has ended after all,
//! its part of the next step is discarded. Every accepted request gets exactly one result, unless it is cancelled: a completion,
//! or one line that says why there is no completion.
//!
//! Greedy requests of one job with the same prompt and parameters have the same answer. A request that arrives while an equal
//! request waits or runs is not computed. It gets a copy of the result.
//!
//! See docs/decisions/055-equal-greedy-rows-are-computed-once.md and
//! docs/decisions/057-a-gpu-step-begins-before-the-last-tokens-are-taken.md.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::{SmallVec, smallvec};

use crate::device::DeviceError;
use crate::device::draw::{Draw, DrawError};
use crate::engine::blocks::BlockKey;
use crate::engine::choice::NodeId;
use crate::engine::constraint::{Constraint, compiler::ShapeState};
use crate::engine::generate::{EngineError, Generator};
use crate::engine::ids::ById;
use crate::engine::plan::{SequenceId, StepLimits, StepPlan};
use crate::engine::request::{FinishedSample, Request, RequestError, SampleId};
use crate::engine::scheduler::Scheduler;
use crate::engine::sequence::{Continuation, SampleState, TokenOutcome};
use crate::engine::shapes::Shapes;
use crate::engine::states::StateSlots;
use crate::engine::thinking::CompletionStart;
use crate::engine::totals::{EngineLoad, StepSize, StepTotals};
use crate::engine::work::{self, ActiveSample, LogitsRow, PendingStep, SampleWork};
use crate::engine::{EngineOptions, Forward, ForwardError};
use crate::tokenizer::Tokenizer;

/// Cost of applying one sample's drawn token, in elements as [`Threads::parts`] counts them: a
/// microsecond or more per sample.
const CONSUME_ELEMENTS: usize = 256;
/// [`Engine::wants_more`] is true until this many times `max_sequences` requests wait, so that
/// packing has a window to order.
const WAITING_WINDOWS_MAX: usize = 4;

/// Job and prompt of a greedy request. Requests with the same key and parameters have the same
/// answer.
type GreedyKey = (u32, Arc<[u32]>);

/// See the module's description.
pub struct Engine {
    forward: Box<dyn Forward + Send>,
    tokenizer: Arc<Tokenizer>,
    options: EngineOptions,
    scheduler: Scheduler,
    shapes: Shapes,
    samples: ById<Box<ActiveSample>>,
    /// Key in `samples` of the sample that computes each greedy request.
    greedy_samples: HashMap<GreedyKey, u64>,
    /// Number of requests that wait for the result of an equal request.
    duplicate_requests: usize,
    /// The key of each sequence's sample, and the node of a choice that the sequence has reached.
    sequences: ById<(u64, NodeId)>,
    /// Requests that ended without a step; the next step returns them.
    finished: Vec<FinishedSample>,
    /// The step whose drawn tokens have not been applied.
    pending: Option<PendingStep>,
    /// Computed tokens per job of the step that was applied last.
    step_tokens: Vec<(u32, u64)>,
    totals: StepTotals,
    /// The last key given to a sample or sequence.
    last_key: u64,
    has_stopped: bool,
}

impl Engine {
    /// An engine around a model whose KV pool is empty.
    pub fn new(forward: Box<dyn Forward + Send>, tokenizer: Arc<Tokenizer>, options: EngineOptions) -> Engine {
        let limits = StepLimits {
            max_step_tokens: match forward.step_tokens_max() {
                Some(max) => options.max_step_tokens.clamp(1, max as usize),
                None => options.max_step_tokens.max(1),
            },
            max_sequences: options.max_sequences.max(1),
            policy: options.policy,
        };
        let (kv, states) = (work::kv_cache(&*forward), StateSlots::new(forward.state_slots()));
        Engine {
            scheduler: Scheduler::new(limits, kv, states, BlockKey::root(&options.prefix_root)),
            shapes: Shapes::default(),
            forward,
            tokenizer,
            options,
            samples: ById::default(),
            greedy_samples: HashMap::new(),
            duplicate_requests: 0,
            sequences: ById::default(),
            finished: Vec::new(),
            pending: None,
            step_tokens: Vec::new(),
            totals: StepTotals::default(),
            last_key: 0,
            has_stopped: false,
        }
    }

    /// Number of sequences that run.
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

    /// Number of sequences that wait to be started or resumed.
    pub fn waiting(&self) -> usize {
        self.scheduler.waiting()
    }

    /// Hands a new sample's first sequence to the scheduler.
    fn start_sample(&mut self, state: SampleState, first: SmallVec<[Continuation; 1]>, max_tokens: u32) {
        let key = self.new_key();
        let (salt, deterministic) = (state.cache_salt(), state.params().deterministic);
        let sharing = self.scheduler.sharing(salt, state.adapter(), deterministic);
        let mut sequences = SmallVec::new();
        for Continuation { node, tokens } in first {
            let sequence = self.new_key();
            self.scheduler
                .submit(sequence, state.prompt().clone(), tokens.into_vec(), max_tokens, sharing);
            self.sequences.insert(sequence, (key, node));
            sequences.push(sequence);
        }
        if state.params().sampling.temperature == 0.0 {
            self.greedy_samples
                .insert((state.id().job, state.prompt().clone()), key);
        }
        let sample = ActiveSample {
            ids: vec![state.id()],
            state,
            sequences,
            computed_tokens: 0,
        };
        self.samples.insert(key, Box::new(sample));
    }

    /// If an equal request is waiting or running, adds this request to those that get its result.
    /// Returns whether there is one.
    fn join_equal(&mut self, request: &Request) -> bool {
        if request.params.sampling.temperature != 0.0 {
            return false;
        }
        let greedy_key = (request.id.job, request.prompt.clone());
        let key = self.greedy_samples.get(&greedy_key);
        let Some(sample) = key.and_then(|key| self.samples.get_mut(key)) else {
            return false;
        };
        let is_equal = sample.state.has_params_of(request);
        if is_equal {
            sample.ids.push(request.id);
            self.duplicate_requests += 1;
        }
        is_equal
    }

    /// Ends the matching of new requests to this sample.
    fn stop_matching(greedy_samples: &mut HashMap<GreedyKey, u64>, key: u64, state: &SampleState) {
        let greedy_key = (state.id().job, state.prompt().clone());
        if greedy_samples.get(&greedy_key) == Some(&key) {
            greedy_samples.remove(&greedy_key);
        }
    }

    fn new_key(&mut self) -> u64 {
        self.last_key += 1;
        self.last_key
    }

    /// Admits requests whose shapes have been compiled since the last step.
    fn admit_compiled(&mut self) {
        let is_idle = self.samples.is_empty() && self.finished.is_empty() && self.pending.is_none();
        for (request, shape) in self.shapes.take_compiled(is_idle) {
            let id = request.id;
            let admitted = shape
                .map_err(RequestError::from)
                .and_then(|shape| self.admit(request, shape));
            if let Err(refused) = admitted {
                self.finished.push(FinishedSample {
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
        let available = context.saturating_sub(prompt);
        let requested = request.params.max_tokens as usize;
        let thinking = request.params.thinking.as_ref();
        let thinks =
            thinking.is_some_and(|thinking| thinking.completion_start(&request.prompt) != CompletionStart::Answer);
        // A choice needs no tokens beyond its deepest branching; thoughts and other completions
        // grow up to `max_tokens`.
        let (min_tokens, max_computed, max_tokens) = match &constraint {
            Constraint::Choice { choices, .. } if thinks => {
                let deepest = choices.deepest_branching();
                (
                    deepest.max(1),
                    requested.max(deepest).min(available),
                    requested.min(available),
                )
            }
            Constraint::Choice { choices, .. } => {
                let deepest = choices.deepest_branching();
                (deepest.max(1), deepest, requested)
            }
            Constraint::Free | Constraint::Grammar(_) => (1, requested.min(available), requested.min(available)),
        };
        if min_tokens > available {
            return Err(RequestError::Context {
                prompt,
                min_tokens,
                context,
            });
        }
        if !self.scheduler.fits_pool(prompt + max_computed) {
            return Err(RequestError::Pool {
                prompt,
                max_tokens: max_computed,
                pool: self.scheduler.longest_sequence(),
            });
        }
        if self.join_equal(&request) {
            return Ok(());
        }
        let id = request.id;
        let (state, outcome) = SampleState::new(request, constraint, max_tokens, &self.tokenizer);
        match outcome {
            TokenOutcome::Finished(result) => self.finished.push(FinishedSample {
                id,
                result,
                computed_tokens: 0,
            }),
            TokenOutcome::Continue(first) => self.start_sample(state, first, max_computed as u32),
        }
        Ok(())
    }

    /// Calls the model and adds the time to the totals.
    fn call_model<T>(
        &mut self,
        call: impl FnOnce(&mut dyn Forward) -> Result<T, ForwardError>,
    ) -> Result<T, EngineError> {
        let began = Instant::now();
        let result = call(&mut *self.forward);
        self.totals.forward += began.elapsed();
        result.map_err(EngineError::Forward)
    }

    /// Begins a planned step, applies the tokens of the step before, and begins to draw this step's
    /// tokens.
    fn run_plan(&mut self, plan: &mut StepPlan, finished: &mut Vec<FinishedSample>) -> Result<(), EngineError> {
        self.step_tokens.clear();
        let tokens = self.count_tokens(plan);
        if !plan.sequences.is_empty() {
            let batch = work::batch(plan);
            if let Err(error) = self.call_model(|model| model.begin(&batch)) {
                return self.start_over(error, tokens, finished);
            }
        }
        self.finish_pending(finished)?;
        if plan.sequences.is_empty() {
            return Ok(());
        }
        match self.begin_draw(plan) {
            Ok((rows, logits_rows)) => {
                self.pending = Some(PendingStep {
                    rows,
                    logits_rows,
                    tokens,
                })
            }
            Err(error) => return self.start_over(error, tokens, finished),
        }
        if self.forward.runs_ahead() {
            Ok(())
        } else {
            self.finish_pending(finished)
        }
    }

    /// Handles a step that did not fit the device's memory: its results are discarded, and all
    /// running sequences are computed again in smaller steps.
    fn start_over(
        &mut self,
        error: EngineError,
        tokens: Vec<(u32, u64)>,
        finished: &mut Vec<FinishedSample>,
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
        self.finish_pending(finished)?;
        self.step_tokens.extend(tokens);
        self.forward.free_step_memory();
        Ok(())
    }

    /// Begins to draw a token for each sequence whose tokens are all computed. Returns these
    /// sequences with their rows of the logits, and the number of all rows.
    fn begin_draw(&mut self, plan: &StepPlan) -> Result<(Vec<(SequenceId, usize)>, usize), EngineError> {
        let sampled = plan.sequences.iter().filter(|planned| planned.needs_logits);
        let logits_rows = sampled.clone().count();
        // Since the step was planned, sequences may have ended or got more tokens than planned.
        let rows: Vec<(SequenceId, usize)> = sampled
            .enumerate()
            .filter(|(_, planned)| self.scheduler.is_computed(planned.id))
            .map(|(row, planned)| (planned.id, row))
            .collect();
        let mut work = self.gather_work(&rows);
        work::compute_masks(&self.options.threads, &mut work);
        let tokenizer = Arc::clone(&self.tokenizer);
        work.iter_mut().for_each(|item| item.sample.state.prepare(&tokenizer));
        let mut draws = vec![Draw::GREEDY; logits_rows];
        for item in &work {
            for row in &item.rows {
                draws[row.index] = item.sample.state.draw(row.node, &tokenizer);
            }
        }
        // Ids that only one of model and tokenizer knows are padding and are never drawn.
        let id_limit = self.forward.vocab_size().min(tokenizer.vocab_size());
        let drawing = self.call_model(|model| model.draw(id_limit, &draws));
        let may_plan_ahead = drawing.is_ok() && self.forward.runs_ahead();
        for item in work {
            if may_plan_ahead && item.sample.state.may_plan_ahead() {
                for row in &item.rows {
                    self.scheduler.add_placeholder(row.sequence, row.index as u32);
                }
            }
            self.samples.insert(item.sample_key, item.sample);
        }
        drawing.map(|()| (rows, logits_rows))
    }

    /// Applies the drawn tokens of the pending step.
    fn finish_pending(&mut self, finished: &mut Vec<FinishedSample>) -> Result<(), EngineError> {
        let Some(pending) = self.pending.take() else {
            return Ok(());
        };
        let mut drawn = self.call_model(|model| model.take_drawn())?;
        if drawn.len() != pending.logits_rows {
            return Err(EngineError::Drawn {
                found: drawn.len(),
                expected: pending.logits_rows,
            });
        }
        let mut work = self.gather_work(&pending.rows);
        for item in &mut work {
            let taken = |row: &LogitsRow| std::mem::replace(&mut drawn[row.index], Err(DrawError::NothingAllowed));
            item.drawn = item.rows.iter().map(taken).collect();
        }
        let tokenizer = &*self.tokenizer;
        let elements = if work.iter_mut().any(|item| item.sample.state.grammar().is_some()) {
            usize::MAX
        } else {
            work.len() * CONSUME_ELEMENTS
        };
        self.options.threads.parallel_for_each(elements, &mut work, |_, work| {
            for item in work {
                for (row, drawn) in item.rows.iter().zip(item.drawn.drain(..)) {
                    let outcome = item.sample.state.consume(row.node, drawn, tokenizer);
                    let is_finished = matches!(outcome, TokenOutcome::Finished(_));
                    item.outcomes.push(outcome);
                    if is_finished {
                        break;
                    }
                }
            }
        });
        for work in work {
            self.apply_outcomes(work, finished);
        }
        self.step_tokens.extend(pending.tokens);
        Ok(())
    }

    /// Takes the samples of the sequences that still exist out of `samples`, with their rows.
    fn gather_work(&mut self, rows: &[(SequenceId, usize)]) -> Vec<SampleWork> {
        let mut work: Vec<SampleWork> = Vec::with_capacity(rows.len());
        // Index in `work`, for samples with several sequences.
        let mut work_index: ById<usize> = ById::default();
        for &(sequence, index) in rows {
            let Some((key, node)) = self.sequences.get(&sequence).copied() else {
                continue;
            };
            let row = LogitsRow { sequence, node, index };
            if let Some(sample) = self.samples.remove(&key) {
                if sample.sequences.len() > 1 {
                    work_index.insert(key, work.len());
                }
                work.push(SampleWork {
                    sample_key: key,
                    sample,
                    rows: smallvec![row],
                    drawn: SmallVec::new(),
                    outcomes: SmallVec::new(),
                });
            } else if let Some(index) = work_index.get(&key) {
                work[*index].rows.push(row);
            }
        }
        work
    }

    /// Applies the outcomes of a sample's drawn tokens: its sequences go on, fork or end.
    fn apply_outcomes(&mut self, work: SampleWork, finished: &mut Vec<FinishedSample>) {
        let SampleWork {
            sample_key: key,
            mut sample,
            rows,
            outcomes,
            ..
        } = work;
        for (LogitsRow { sequence, node, .. }, outcome) in rows.into_iter().zip(outcomes) {
            match outcome {
                TokenOutcome::Finished(result) => {
                    for sequence in sample.sequences {
                        self.end_sequence(sequence);
                    }
                    Self::stop_matching(&mut self.greedy_samples, key, &sample.state);
                    self.duplicate_requests -= sample.ids.len() - 1;
                    finished.extend(work::results(sample.ids, result, sample.computed_tokens));
                    return;
                }
                TokenOutcome::Continue(continuations) => {
                    let mut continuations = continuations.into_iter();
                    let Some(own) = continuations.next() else {
                        self.end_sequence(sequence);
                        sample.sequences.retain(|s| *s != sequence);
                        continue;
                    };
                    for Continuation { node, tokens } in continuations {
                        let fork = self.new_key();
                        self.scheduler.fork(sequence, fork, &tokens);
                        self.sequences.insert(fork, (key, node));
                        sample.sequences.push(fork);
                    }
                    self.scheduler.extend(sequence, &own.tokens);
                    if own.node != node {
                        self.sequences.insert(sequence, (key, own.node));
                    }
                }
            }
        }
        self.samples.insert(key, sample);
    }

    fn end_sequence(&mut self, sequence: SequenceId) {
        self.scheduler.remove(sequence);
        self.sequences.remove(&sequence);
    }

    /// Tokens that a step computes, by job. Also adds them to their samples.
    fn count_tokens(&mut self, plan: &StepPlan) -> Vec<(u32, u64)> {
        let mut by_job: Vec<(u32, u64)> = Vec::new();
        for planned in &plan.sequences {
            let sequence = self.sequences.get(&planned.id);
            let Some(sample) = sequence.and_then(|(key, _)| self.samples.get_mut(key)) else {
                continue;
            };
            let job = sample.state.id().job;
            let tokens = planned.tokens.len() as u64;
            sample.computed_tokens += tokens;
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
        self.samples.is_empty() && self.finished.is_empty() && self.pending.is_none() && self.shapes.waiting() == 0
    }

    /// True until enough requests wait for each refill of the batch to have a window to order.
    fn wants_more(&self) -> bool {
        self.scheduler.waiting() + self.duplicate_requests + self.shapes.waiting()
            < WAITING_WINDOWS_MAX * self.options.max_sequences.max(1)
    }

    /// A `max_tokens` beyond the model's context is cut to the tokens that fit. A prompt that fills
    /// the context is refused, and so is a prompt that together with its `max_tokens` exceeds the
    /// whole KV pool.
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
            ShapeState::Compiling(key) => {
                self.shapes.enqueue(key, request);
                Ok(())
            }
        }
    }

    fn step(&mut self) -> Result<Vec<FinishedSample>, EngineError> {
        if self.has_stopped {
            return Err(EngineError::Stopped);
        }
        self.admit_compiled();
        let began = Instant::now();
        let mut plan = self.scheduler.plan();
        self.totals.last_step = StepSize::of(&plan);
        self.totals.preemptions += plan.preempted.len() as u64;
        for (sequence, cached) in &plan.started {
            let sample = self
                .sequences
                .get(sequence)
                .and_then(|(key, _)| self.samples.get_mut(key));
            if let Some(sample) = sample {
                sample.state.record_cached_tokens(*cached);
            }
        }
        let mut finished = std::mem::take(&mut self.finished);
        let (planned, forward_before) = (Instant::now(), self.totals.forward);
        self.run_plan(&mut plan, &mut finished)
            .inspect_err(|_| self.has_stopped = true)?;
        let totals = &mut self.totals;
        totals.steps += u64::from(!plan.sequences.is_empty());
        totals.planning += planned - began;
        totals.advance += planned.elapsed().saturating_sub(totals.forward - forward_before);
        Ok(finished)
    }

    fn step_tokens(&self) -> &[(u32, u64)] {
        &self.step_tokens
    }

    fn load(&self) -> EngineLoad {
        EngineLoad {
            running: self.scheduler.running(),
            waiting: self.scheduler.waiting() + self.shapes.waiting(),
            kv_blocks_held: self.scheduler.held_blocks(),
            kv_blocks: self.scheduler.blocks(),
            preemptions: self.totals.preemptions,
        }
    }

    fn cancel(&mut self, job: u32, rows: &dyn Fn(u64) -> bool) {
        let is_dropped = |id: SampleId| id.job == job && rows(id.row);
        let scheduler = &mut self.scheduler;
        let (sequences, greedy_samples, duplicate_requests) = (
            &mut self.sequences,
            &mut self.greedy_samples,
            &mut self.duplicate_requests,
        );
        self.samples.retain(|key, sample| {
            let ids_before = sample.ids.len();
            sample.ids.retain(|id| !is_dropped(*id));
            *duplicate_requests -= (ids_before - 1) - sample.ids.len().saturating_sub(1);
            if sample.ids.is_empty() {
                for sequence in &sample.sequences {
                    scheduler.remove(*sequence);
                    sequences.remove(sequence);
                }
                Self::stop_matching(greedy_samples, *key, &sample.state);
            }
            !sample.ids.is_empty()
        });
        self.finished.retain(|finished| !is_dropped(finished.id));
        self.shapes.cancel(is_dropped);
    }
}
