//! Plans which tokens of which sequences the next step computes.
//!
//! Plain data in, plain data out, without clock, channel or model; the same calls give the same
//! plans.
//!
//! - Sequences run in order of age. A step is filled oldest first up to its token budget. A prompt
//!   that exceeds the budget is cut and goes on in the next step, mixed with the single tokens of
//!   decoding sequences.
//! - New requests gather while a window of earlier ones is being started. When the window is empty,
//!   [`packing`] orders the gathered requests, and they become the next window. So no request waits
//!   for ever behind later ones.
//! - A sequence is started when the pool can hold all its tokens so far, with one spare block for
//!   each running sequence. Its first blocks are taken from the prefix index where they are known,
//!   including blocks that older sequences compute *in the same step*. It always computes its last
//!   token itself. Deterministic sequences share blocks only with deterministic ones.
//! - Where steps run ahead, a sequence's next token may be [guessed](Scheduler::guess): it is
//!   planned before it is known. Its block is indexed once it is known.
//! - Where no block is available, the youngest running sequence is preempted: its blocks are
//!   released (and may still be found when it resumes), and its tokens are kept. A sequence without
//!   a younger one waits for the next step. The oldest always gets its blocks, because only
//!   sequences that fit the pool alone are accepted.
//!
//! See docs/decisions/056-prefixes-are-shared-within-a-step.md.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::engine::blocks::{BlockKey, BlockPool};
use crate::engine::ids::ById;
use crate::engine::packing::{self, WaitingPrompt};

/// Identifies a sequence for as long as the scheduler knows it.
pub type SequenceId = u64;

/// Limits of a step.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Maximum tokens computed in one step.
    pub max_step_tokens: usize,
    /// Maximum sequences in one step. Sequences whose tokens are being drawn while the next step is
    /// planned do not count.
    pub max_sequences: usize,
    pub policy: Policy,
}

/// The techniques by which the scheduler fills steps. All are on, except in measurements of a
/// single technique.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Orders the window; otherwise sequences start in order of arrival.
    pub sort: bool,
    /// Shares computed blocks that prompts begin with.
    pub share: bool,
    /// Mixes prefill and decode in one step; otherwise prefill runs first, in steps of its own.
    pub mix: bool,
    /// Starts sequences as others end; otherwise only when all have ended.
    pub refill: bool,
}

impl Default for Policy {
    fn default() -> Policy {
        Policy {
            sort: true,
            share: true,
            mix: true,
            refill: true,
        }
    }
}

/// Order of sequences, oldest first: the position in the order of starting, then the order of
/// forks.
type Age = (u64, u64);

/// Which sequences a sequence may share blocks with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sharing {
    /// Whether its results must be bitwise independent of other sequences.
    pub deterministic: bool,
    /// The parent key of its first block.
    pub root: BlockKey,
}

/// The scheduler's state of a sequence.
#[derive(Debug, Clone)]
struct Sequence {
    id: SequenceId,
    age: Age,
    /// The prompt, until the sequence is started for the first time: samples of one row share it
    /// while they wait.
    prompt: Option<Arc<[u32]>>,
    /// Prompt (unless it is in `prompt`) and completion so far.
    tokens: Vec<u32>,
    /// The last of `tokens` is not known yet: it is drawn from this row of the step's logits.
    guessed: Option<u32>,
    /// Maximum tokens still to come; only used to order the window.
    max_tokens: u32,
    sharing: Sharing,
    /// Tokens whose keys and values are in `blocks` once the planned step has run.
    computed: usize,
    blocks: Vec<u32>,
    /// Keys of its first full blocks, as far as they have been needed.
    keys: Vec<BlockKey>,
    /// Whether it has been started before (and preempted since).
    started: bool,
}

impl Sequence {
    /// Moves the prompt into `tokens`.
    fn unfold(&mut self) {
        if let Some(prompt) = self.prompt.take() {
            self.tokens.splice(0..0, prompt.iter().copied());
        }
    }

    fn pending(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Number of leading tokens that are known.
    fn known(&self) -> usize {
        self.tokens.len() - usize::from(self.guessed.is_some())
    }

    /// The key of its full block at index `at`.
    fn key(&mut self, at: usize, block_tokens: usize) -> BlockKey {
        while self.keys.len() <= at {
            let parent = self.keys.last().unwrap_or(&self.sharing.root);
            let from = self.keys.len() * block_tokens;
            self.keys.push(parent.child(&self.tokens[from..from + block_tokens]));
        }
        self.keys[at]
    }
}

/// One sequence's share of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Planned {
    pub id: SequenceId,
    /// Position of the first token computed.
    pub start: usize,
    /// The tokens computed.
    pub tokens: SmallVec<[u32; 4]>,
    /// Range in [`StepPlan::blocks`] of the blocks that hold all tokens up to the last one
    /// computed.
    pub blocks: Range<usize>,
    /// Whether the last token computed is the sequence's last, so that the next token can be
    /// sampled.
    pub samples: bool,
    /// The last token computed is not known yet: it is drawn from this row of the previous step's
    /// logits.
    pub guessed: Option<u32>,
    /// Whether its results must be bitwise independent of other sequences.
    pub deterministic: bool,
}

/// A step to run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepPlan {
    pub sequences: Vec<Planned>,
    /// Blocks of all sequences, one sequence after the other.
    pub blocks: Vec<u32>,
    /// Blocks to copy before anything is computed: (from, to).
    pub copies: Vec<(u32, u32)>,
    /// Sequences started for the first time, and how many of their tokens the prefix index held.
    pub started: Vec<(SequenceId, usize)>,
    /// Sequences that lost their blocks.
    pub preempted: Vec<SequenceId>,
}

/// Running and waiting sequences and the blocks they hold. See the module's description.
#[derive(Debug, Clone)]
pub struct Scheduler {
    limits: Limits,
    pool: BlockPool,
    root: BlockKey,
    /// Sequences that arrived after the window was ordered.
    incoming: Vec<Sequence>,
    /// The window: ordered sequences that are not started, and preempted ones.
    waiting: BTreeMap<Age, Sequence>,
    /// Oldest first.
    running: Vec<Sequence>,
    /// The age of each waiting or running sequence; sequences in `incoming` have none yet.
    ages: ById<Age>,
    next_place: u64,
    next_fork: u64,
}

impl Scheduler {
    /// An empty scheduler. All [roots](Scheduler::sharing) are derived from `root`.
    pub fn new(limits: Limits, pool: BlockPool, root: BlockKey) -> Scheduler {
        assert!(
            limits.max_step_tokens > 0 && limits.max_sequences > 0,
            "a step must hold a token and a sequence"
        );
        Scheduler {
            limits,
            pool,
            root,
            incoming: Vec::new(),
            waiting: BTreeMap::new(),
            running: Vec::new(),
            ages: ById::default(),
            next_place: 0,
            next_fork: 0,
        }
    }

    /// The sharing of sequences with this salt. Deterministic sequences share blocks only with each
    /// other.
    pub fn sharing(&self, salt: &str, deterministic: bool) -> Sharing {
        let root = self.root.salted(salt);
        Sharing {
            deterministic,
            root: if deterministic { root.child(&[]) } else { root },
        }
    }

    /// Sequences that hold blocks.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Sequences that wait to be started or resumed.
    pub fn waiting(&self) -> usize {
        self.waiting.len() + self.incoming.len()
    }

    /// Whether a sequence of this many tokens can run alone.
    pub fn fits_pool(&self, tokens: usize) -> bool {
        tokens.div_ceil(self.pool.block_tokens()) <= self.pool.total()
    }

    /// Tokens that the whole pool can hold.
    pub fn pool_tokens(&self) -> usize {
        self.pool.total() * self.pool.block_tokens()
    }

    /// Adds a sequence: a prompt of at least one token, and `tokens` that are certain to follow it.
    /// At most `max_tokens` will be added later; all together must fit the pool.
    pub fn submit(&mut self, id: SequenceId, prompt: Arc<[u32]>, tokens: Vec<u32>, max_tokens: u32, sharing: Sharing) {
        assert!(!prompt.is_empty(), "sequence {id} has no tokens");
        let (blocks, keys) = (Vec::new(), Vec::new());
        self.incoming.push(Sequence {
            id,
            age: (0, 0),
            prompt: Some(prompt),
            tokens,
            guessed: None,
            max_tokens,
            sharing,
            computed: 0,
            blocks,
            keys,
            started: false,
        });
    }

    /// Guesses that a running sequence goes on with the token drawn from this row of the logits of
    /// the last planned step. [`extend`](Self::extend) later provides the token, or
    /// [`remove`](Self::remove) ends the sequence.
    pub fn guess(&mut self, id: SequenceId, row: u32) {
        if let Some(at) = self.place(id) {
            let sequence = &mut self.running[at];
            sequence.tokens.push(0);
            sequence.guessed = Some(row);
        }
    }

    /// Whether it runs and the planned step has computed all its tokens.
    pub fn is_computed(&self, id: SequenceId) -> bool {
        self.place(id).is_some_and(|at| self.running[at].pending() == 0)
    }

    /// Adds tokens, sampled or forced, to a sequence that has been running; the next steps compute
    /// them. If a token was guessed, the first of them replaces it.
    pub fn extend(&mut self, id: SequenceId, tokens: &[u32]) {
        let at = self.place(id);
        let sequence = match at {
            Some(at) => Some(&mut self.running[at]),
            None => self.ages.get(&id).and_then(|age| self.waiting.get_mut(age)),
        };
        let Some(sequence) = sequence else {
            return;
        };
        if sequence.guessed.take().is_some() {
            sequence.tokens.pop();
        }
        let known = sequence.tokens.len();
        sequence.tokens.extend_from_slice(tokens);
        let computed = sequence.computed;
        if let Some(at) = at
            && computed > known
        {
            self.index(at, known, computed);
        }
    }

    /// Index of a sequence in `running`, which is in order of age.
    fn place(&self, id: SequenceId) -> Option<usize> {
        let age = self.ages.get(&id)?;
        self.running.binary_search_by_key(age, |s| s.age).ok()
    }

    /// Adds a sequence that continues the tokens of `parent`, which has been running, with
    /// `tokens`. It shares the parent's blocks. If no more sequences may run or the parent has been
    /// preempted, it waits without blocks.
    pub fn fork(&mut self, parent: SequenceId, id: SequenceId, tokens: &[u32]) {
        let running = self.place(parent).map(|at| &self.running[at]);
        let runs = running.is_some();
        let Some(parent) = running.or_else(|| self.waiting.get(self.ages.get(&parent)?)) else {
            return;
        };
        self.next_fork += 1;
        let mut sequence = Sequence {
            id,
            age: (parent.age.0, self.next_fork),
            ..parent.clone()
        };
        sequence.tokens.extend_from_slice(tokens);
        self.ages.insert(id, sequence.age);
        if runs && self.running.len() < self.limits.max_sequences {
            sequence.blocks.iter().for_each(|b| self.pool.acquire(*b));
            self.start(sequence);
        } else {
            sequence.blocks.clear();
            sequence.computed = 0;
            self.waiting.insert(sequence.age, sequence);
        }
    }

    /// Ends a sequence, whether it runs or waits.
    pub fn remove(&mut self, id: SequenceId) {
        if let Some(at) = self.place(id) {
            let mut sequence = self.running.remove(at);
            release_all(&mut self.pool, &mut sequence);
        }
        match self.ages.remove(&id) {
            Some(age) => {
                self.waiting.remove(&age);
            }
            None => self.incoming.retain(|s| s.id != id),
        }
    }

    /// Plans the next step and treats it as done. The plan is empty if there is nothing to compute.
    pub fn plan(&mut self) -> StepPlan {
        let mut plan = StepPlan::default();
        if self.limits.policy.mix {
            self.fill(&mut plan, |_| true, true);
        } else {
            self.fill(&mut plan, |sequence| sequence.pending() > 1, true);
            if plan.sequences.is_empty() {
                self.fill(&mut plan, |_| true, false);
            }
        }
        self.pool.end_plan();
        plan
    }

    /// Undoes a planned step that did not run: the contents of all blocks are discarded, and all
    /// running sequences wait to be computed from their beginning. From now on, steps have half as
    /// many tokens and sequences. `None`: a step is limited to one token already; nothing changed.
    pub fn start_over(&mut self) -> Option<Limits> {
        if self.limits.max_step_tokens == 1 {
            return None;
        }
        for mut sequence in std::mem::take(&mut self.running) {
            release_all(&mut self.pool, &mut sequence);
            self.waiting.insert(sequence.age, sequence);
        }
        self.pool.forget_all();
        self.limits.max_step_tokens /= 2;
        self.limits.max_sequences = (self.limits.max_sequences / 2).max(1);
        Some(self.limits)
    }

    /// Gives the step's tokens to running sequences that are `wanted`, then to new ones if `start`
    /// is set and they may start.
    fn fill(&mut self, plan: &mut StepPlan, wanted: impl Fn(&Sequence) -> bool, start: bool) {
        let mut budget = self.limits.max_step_tokens;
        // Sequences whose last token is being drawn: it is unknown whether they go on, and most
        // have ended. They take no part in this step.
        let awaited = self.running.iter().filter(|sequence| sequence.pending() == 0).count();
        let mut at = 0;
        while at < self.running.len() && budget > 0 && plan.sequences.len() < self.limits.max_sequences {
            if self.running[at].pending() == 0 || !wanted(&self.running[at]) {
                at += 1;
                continue;
            }
            let planned = loop {
                let planned = self.grant(at, budget, plan);
                if planned.is_some() || self.running.len() <= at + 1 {
                    break planned;
                }
                self.preempt_youngest(plan);
            };
            if let Some(planned) = planned {
                budget -= planned.tokens.len();
                plan.sequences.push(planned);
            }
            at += 1;
        }
        if start && plan.preempted.is_empty() && (self.limits.policy.refill || self.running.is_empty()) {
            self.start_waiting(plan, budget, awaited);
        }
    }

    /// Starts sequences of the window, in its order, while there is room. The `awaited` sequences
    /// take no room.
    fn start_waiting(&mut self, plan: &mut StepPlan, mut budget: usize, awaited: usize) {
        let most = self.limits.max_sequences;
        while budget > 0 && self.running.len() - awaited < most && plan.sequences.len() < most {
            if self.waiting.is_empty() {
                self.order_incoming();
            }
            let Some((_, mut sequence)) = self.waiting.pop_first() else {
                return;
            };
            sequence.unfold();
            if !self.take_prefix(&mut sequence) {
                self.waiting.insert(sequence.age, sequence);
                return;
            }
            if !std::mem::replace(&mut sequence.started, true) {
                plan.started.push((sequence.id, sequence.computed));
            }
            let at = self.start(sequence);
            if let Some(planned) = self.grant(at, budget, plan) {
                budget -= planned.tokens.len();
                plan.sequences.push(planned);
            }
        }
    }

    /// Orders the requests that have arrived into the next window.
    fn order_incoming(&mut self) {
        let window: Vec<WaitingPrompt> = self
            .incoming
            .iter()
            .map(|s| WaitingPrompt {
                prompt: s.prompt.as_deref().unwrap_or(&s.tokens),
                max_tokens: s.max_tokens,
            })
            .collect();
        let order = if self.limits.policy.sort {
            packing::order(&window, self.pool.block_tokens())
        } else {
            (0..window.len()).collect()
        };
        let mut sequences: Vec<Option<Sequence>> = std::mem::take(&mut self.incoming).into_iter().map(Some).collect();
        for i in order {
            if let Some(mut sequence) = sequences[i].take() {
                sequence.age = (self.next_place, 0);
                self.next_place += 1;
                self.ages.insert(sequence.id, sequence.age);
                self.waiting.insert(sequence.age, sequence);
            }
        }
    }

    /// Shares the indexed blocks that a sequence begins with. `false`: the pool has no room to
    /// start it; nothing changed.
    fn take_prefix(&mut self, sequence: &mut Sequence) -> bool {
        let block_tokens = self.pool.block_tokens();
        let most = if self.limits.policy.share {
            sequence.tokens.len() - 1
        } else {
            0
        };
        for at in 0..most / block_tokens {
            let key = sequence.key(at, block_tokens);
            let Some(block) = self
                .pool
                .lookup(key, &sequence.tokens[at * block_tokens..][..block_tokens])
            else {
                break;
            };
            self.pool.acquire(block);
            sequence.blocks.push(block);
        }
        let missing = sequence.tokens.len().div_ceil(block_tokens) - sequence.blocks.len();
        if self.pool.available() < missing + self.running.len() {
            release_all(&mut self.pool, sequence);
            return false;
        }
        sequence.computed = sequence.blocks.len() * block_tokens;
        true
    }

    /// Inserts a sequence among the running ones, by age.
    fn start(&mut self, sequence: Sequence) -> usize {
        let at = self.running.partition_point(|s| s.age < sequence.age);
        self.running.insert(at, sequence);
        at
    }

    /// Gives a running sequence as many of its pending tokens as budget and blocks allow. `None`:
    /// none at all.
    fn grant(&mut self, at: usize, budget: usize, plan: &mut StepPlan) -> Option<Planned> {
        let block_tokens = self.pool.block_tokens();
        let sequence = &mut self.running[at];
        let wanted = sequence.computed + sequence.pending().min(budget);
        // Shared blocks are copied before they are written to.
        for i in sequence.computed / block_tokens..sequence.blocks.len().min(wanted.div_ceil(block_tokens)) {
            if self.pool.is_shared(sequence.blocks[i]) {
                let copy = self.pool.copy_on_write(sequence.blocks[i])?;
                plan.copies.push((sequence.blocks[i], copy));
                sequence.blocks[i] = copy;
            }
        }
        while sequence.blocks.len() * block_tokens < wanted {
            let Some(block) = self.pool.allocate() else { break };
            sequence.blocks.push(block);
        }
        let end = wanted.min(sequence.blocks.len() * block_tokens);
        if end == sequence.computed {
            return None;
        }
        let start = std::mem::replace(&mut sequence.computed, end);
        let first_block = plan.blocks.len();
        plan.blocks
            .extend_from_slice(&sequence.blocks[..end.div_ceil(block_tokens)]);
        let planned = Planned {
            id: sequence.id,
            start,
            tokens: SmallVec::from_slice(&sequence.tokens[start..end]),
            blocks: first_block..plan.blocks.len(),
            samples: end == sequence.tokens.len(),
            guessed: sequence.guessed.filter(|_| end == sequence.tokens.len()),
            deterministic: sequence.sharing.deterministic,
        };
        let known = sequence.known();
        self.index(at, start, end.min(known));
        Some(planned)
    }

    /// Indexes the blocks that a running sequence's tokens from `start` to `end` have filled.
    fn index(&mut self, at: usize, start: usize, end: usize) {
        let block_tokens = self.pool.block_tokens();
        let sequence = &mut self.running[at];
        for i in start / block_tokens..end / block_tokens {
            let key = sequence.key(i, block_tokens);
            self.pool.register(
                sequence.blocks[i],
                key,
                &sequence.tokens[i * block_tokens..][..block_tokens],
            );
        }
    }

    fn preempt_youngest(&mut self, plan: &mut StepPlan) {
        if let Some(mut sequence) = self.running.pop() {
            release_all(&mut self.pool, &mut sequence);
            plan.preempted.push(sequence.id);
            self.waiting.insert(sequence.age, sequence);
        }
    }
}

/// Releases all blocks of a sequence, the last one first.
fn release_all(pool: &mut BlockPool, sequence: &mut Sequence) {
    sequence.blocks.drain(..).rev().for_each(|b| pool.release(b));
    sequence.computed = 0;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn scheduler(blocks: u32, max_step_tokens: usize, max_sequences: usize) -> Scheduler {
        let limits = Limits {
            max_step_tokens,
            max_sequences,
            policy: Policy::default(),
        };
        Scheduler::new(limits, BlockPool::new(blocks, 4), BlockKey::root("test"))
    }

    fn shares(plan: &StepPlan) -> Vec<(SequenceId, usize, usize, bool)> {
        plan.sequences
            .iter()
            .map(|p| (p.id, p.start, p.tokens.len(), p.samples))
            .collect()
    }

    #[test]
    fn a_prefix_computed_in_the_same_step_is_shared() {
        let mut s = scheduler(32, 64, 8);
        let prompt = |last: u32| (0..9).chain([last]).collect::<Vec<u32>>();
        (0..3).for_each(|i| submit(&mut s, i, prompt(100 + i as u32), 4));
        let plan = s.plan();
        assert_eq!(shares(&plan), [(0, 0, 10, true), (1, 8, 2, true), (2, 8, 2, true)]);
        assert_eq!(plan.started, [(0, 0), (1, 8), (2, 8)]);
        let [first, second] = [0, 1].map(|i| &plan.blocks[plan.sequences[i].blocks.clone()]);
        assert_eq!(first[..2], second[..2]);
    }

    fn submit(s: &mut Scheduler, id: SequenceId, prompt: Vec<u32>, max_tokens: u32) {
        let sharing = s.sharing("", false);
        s.submit(id, prompt.into(), Vec::new(), max_tokens, sharing);
    }

    /// Blocks of an ordinary sequence may depend on other sequences, so a deterministic sequence
    /// computes its own.
    #[test]
    fn deterministic_sequences_share_among_themselves() {
        let mut s = scheduler(64, 64, 8);
        let prompt: Arc<[u32]> = (0..10).collect();
        for (id, deterministic) in [(0, false), (1, true), (2, true), (3, false)] {
            let sharing = s.sharing("", deterministic);
            s.submit(id, prompt.clone(), Vec::new(), 1, sharing);
        }
        let mut plan = s.plan();
        plan.sequences.sort_by_key(|planned| planned.id);
        assert_eq!(
            shares(&plan),
            [(0, 0, 10, true), (1, 0, 10, true), (2, 8, 2, true), (3, 8, 2, true)]
        );
        assert_eq!(
            plan.sequences.iter().map(|p| p.deterministic).collect::<Vec<_>>(),
            [false, true, true, false]
        );
    }

    /// A sequence with another salt finds no cached prefix, which would reveal that a guessed
    /// prompt is right.
    #[test]
    fn sequences_share_with_those_of_their_salt() {
        let mut s = scheduler(64, 64, 8);
        let prompt: Arc<[u32]> = (0..10).collect();
        for (id, salt) in [(0, "a"), (1, "b"), (2, "a"), (3, "")] {
            let sharing = s.sharing(salt, false);
            s.submit(id, prompt.clone(), Vec::new(), 1, sharing);
        }
        let mut plan = s.plan();
        plan.started.sort_unstable();
        assert_eq!(plan.started, [(0, 0), (1, 0), (2, 8), (3, 0)]);
    }

    /// Samples of a row wait with one copy of its prompt. When they start, the tokens that must
    /// follow the prompt come after it.
    #[test]
    fn waiting_sequences_share_their_prompt() {
        let mut s = scheduler(64, 64, 1);
        let prompt: Arc<[u32]> = (0..10).collect();
        let sharing = s.sharing("", false);
        (0..5).for_each(|i| s.submit(i, prompt.clone(), vec![70], 4, sharing));
        let plan = s.plan();
        assert_eq!(plan.sequences[0].tokens[..], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 70]);
        assert_eq!((s.running(), s.waiting()), (1, 4));
        assert_eq!(Arc::strong_count(&prompt), 5, "the running one has its own");
        s.remove(3);
        s.remove(0);
        assert_eq!(s.plan().started, [(1, 8)]);
        assert_eq!((s.running(), s.waiting(), s.ages.len()), (1, 2, 3));
        (0..5).for_each(|i| s.remove(i));
        assert!(s.ages.is_empty() && s.waiting() == 0 && s.running() == 0);
    }

    #[test]
    fn the_last_token_is_always_computed() {
        let mut s = scheduler(32, 64, 8);
        (0..2).for_each(|i| submit(&mut s, i, (0..8).collect(), 4));
        assert_eq!(shares(&s.plan()), [(0, 0, 8, true), (1, 4, 4, true)]);
    }

    #[test]
    fn long_prompts_are_cut_and_mixed_with_decoding() {
        let mut s = scheduler(32, 6, 8);
        submit(&mut s, 0, vec![1, 2], 20);
        assert_eq!(shares(&s.plan()), [(0, 0, 2, true)]);
        s.extend(0, &[3]);
        submit(&mut s, 1, (50..60).collect(), 1);
        assert_eq!(shares(&s.plan()), [(0, 2, 1, true), (1, 0, 5, false)]);
        s.extend(0, &[4, 5]);
        assert_eq!(shares(&s.plan()), [(0, 3, 2, true), (1, 5, 4, false)]);
        assert_eq!(shares(&s.plan()), [(1, 9, 1, true)]);
    }

    #[test]
    fn the_youngest_makes_room_and_comes_back() {
        let mut s = scheduler(4, 64, 8);
        submit(&mut s, 0, (0..7).collect(), 9);
        assert_eq!(s.plan().sequences.len(), 1);
        submit(&mut s, 1, vec![90, 91, 92], 9);
        assert_eq!(shares(&s.plan()), [(1, 0, 3, true)]);
        s.extend(1, &[93, 94]);
        assert_eq!(
            shares(&s.plan()),
            [(1, 3, 2, true)],
            "the last block goes to sequence 1"
        );
        s.extend(0, &[7, 8]);
        assert_eq!(
            shares(&s.plan()),
            [(0, 7, 1, false)],
            "what fits goes on without preemption"
        );
        let plan = s.plan();
        assert_eq!(plan.preempted, [1]);
        assert_eq!(shares(&plan), [(0, 8, 1, true)]);
        s.remove(0);
        assert_eq!(shares(&s.plan()), [(1, 4, 1, true)], "its first block was still there");
    }

    #[test]
    fn forks_share_and_copy_on_write() {
        let mut s = scheduler(8, 64, 8);
        submit(&mut s, 0, (0..6).collect(), 4);
        s.plan();
        s.fork(0, 1, &[70]);
        s.extend(0, &[60]);
        let plan = s.plan();
        assert_eq!(shares(&plan), [(0, 6, 1, true), (1, 6, 1, true)]);
        assert_eq!(plan.copies.len(), 1, "the last holder keeps the block");
        let [first, second] = [0, 1].map(|i| &plan.blocks[plan.sequences[i].blocks.clone()]);
        assert_eq!(first[0], second[0]);
        assert_ne!(first[1], second[1]);
        s.remove(0);
        s.remove(1);
        s.pool.check(std::iter::empty());
        assert_eq!(s.pool.available(), 8);
    }

    /// Starting a sequence that the running ones would soon preempt wastes its computation.
    #[test]
    fn who_starts_leaves_a_block_to_each_that_runs() {
        let mut s = scheduler(4, 64, 8);
        submit(&mut s, 0, vec![1, 2, 3], 9);
        s.plan();
        s.extend(0, &[4]);
        submit(&mut s, 1, (50..62).collect(), 9);
        assert_eq!(
            shares(&s.plan()),
            [(0, 3, 1, true)],
            "three blocks are free, and one of them is spoken for"
        );
        s.extend(0, &[5]);
        let plan = s.plan();
        assert_eq!((shares(&plan), plan.preempted), (vec![(0, 4, 1, true)], vec![]));
        s.remove(0);
        assert_eq!(s.plan().started, [(1, 0)]);
    }

    #[test]
    fn a_guessed_token_is_planned_before_it_is_known() {
        let mut s = scheduler(32, 64, 8);
        submit(&mut s, 0, vec![1, 2, 3], 9);
        s.plan();
        s.guess(0, 5);
        let plan = s.plan();
        let planned = &plan.sequences[0];
        assert_eq!((planned.start, planned.tokens.len(), planned.guessed), (3, 1, Some(5)));
        assert!(planned.samples && s.is_computed(0));
        // Its block is full, but is not indexed before its last token is known: until then, 0
        // stands there.
        submit(&mut s, 1, vec![1, 2, 3, 0, 5], 9);
        assert_eq!(s.plan().started, [(1, 0)]);
        s.extend(0, &[4]);
        assert!(s.is_computed(0));
        submit(&mut s, 2, vec![1, 2, 3, 4, 6], 9);
        assert_eq!(s.plan().started, [(2, 4)]);
        // More tokens than guessed follow: the guessed one is computed already.
        s.guess(0, 1);
        s.plan();
        s.extend(0, &[70, 71]);
        assert!(!s.is_computed(0));
        assert_eq!(s.plan().sequences[0].tokens[..], [71]);
        (0..3).for_each(|id| s.remove(id));
        s.pool.check(std::iter::empty());
        assert_eq!(s.pool.available(), 32);
    }

    /// Sequences that have most likely ended leave room for others to start. If they go on after
    /// all, a step still takes no more sequences than its limit.
    #[test]
    fn awaited_sequences_leave_room_for_others() {
        let mut s = scheduler(32, 64, 2);
        (0..6).for_each(|i| submit(&mut s, i, vec![10 * i as u32, 1, 2], 1));
        let ids = |plan: StepPlan| plan.sequences.iter().map(|p| p.id).collect::<Vec<_>>();
        assert_eq!(ids(s.plan()), [0, 1]);
        assert_eq!(ids(s.plan()), [2, 3], "beside two that are awaited");
        s.remove(0);
        s.extend(1, &[7, 8]);
        assert_eq!(ids(s.plan()), [1, 4], "2 and 3 are awaited");
        s.extend(2, &[7]);
        s.extend(3, &[7]);
        s.extend(1, &[9]);
        assert_eq!(ids(s.plan()), [1, 2], "a step takes two");
        assert_eq!(ids(s.plan()), [3, 5]);
        assert!(s.plan().sequences.is_empty());
        (0..6).for_each(|id| s.remove(id));
        assert_eq!(s.pool.available(), 32);
    }

    /// The next step has been planned before a sequence's token becomes known, and may have
    /// preempted the sequence.
    #[test]
    fn what_was_preempted_meanwhile_keeps_its_tokens() {
        let mut s = scheduler(4, 64, 8);
        submit(&mut s, 0, (0..8).collect(), 9);
        submit(&mut s, 1, vec![90, 91, 92, 93], 9);
        s.plan();
        s.extend(0, &[8, 9, 10, 11]);
        s.plan();
        s.guess(0, 0);
        s.guess(1, 1);
        assert_eq!(s.plan().preempted, [1]);
        s.extend(1, &[94]);
        s.fork(1, 2, &[95]);
        s.remove(0);
        let plan = s.plan();
        let tokens: Vec<_> = plan
            .sequences
            .iter()
            .map(|p| (p.id, p.guessed, p.tokens.to_vec()))
            .collect();
        // The parent's own block was given away; the fork shares the block that the parent computes
        // in this step.
        assert_eq!(tokens, [(1, None, vec![90, 91, 92, 93, 94]), (2, None, vec![94, 95])]);
        (1..3).for_each(|id| s.remove(id));
        s.pool.check(std::iter::empty());
    }

    /// A step that did not run leaves nothing behind, not even a guessed token.
    #[test]
    fn a_step_that_did_not_run_is_planned_again_in_halves() {
        let mut s = scheduler(8, 9, 2);
        submit(&mut s, 0, (0..6).collect(), 9);
        submit(&mut s, 1, vec![50, 51], 9);
        assert_eq!(shares(&s.plan()), [(0, 0, 6, true), (1, 0, 2, true)]);
        s.guess(0, 0);
        s.guess(1, 1);
        s.plan();
        let limits = s.start_over().unwrap();
        assert_eq!((limits.max_step_tokens, limits.max_sequences), (4, 1));
        s.pool.check(std::iter::empty());
        s.extend(0, &[6]);
        s.remove(1);
        assert_eq!((s.running(), s.waiting()), (0, 1));
        assert_eq!(shares(&s.plan()), [(0, 0, 4, false)], "no block is found");
        assert_eq!(shares(&s.plan()), [(0, 4, 3, true)]);
        assert!(s.start_over().is_some_and(|limits| limits.max_step_tokens == 2));
        assert!(s.start_over().is_some_and(|limits| limits.max_step_tokens == 1));
        assert!(s.start_over().is_none());
        s.remove(0);
        assert_eq!(s.pool.available(), 8);
    }

    /// A sequence to simulate: length of a shared head, length of its own tail, tokens to generate,
    /// tokens per extension, step of arrival.
    type Case = (usize, usize, usize, usize, usize);

    /// Runs all sequences to their end and returns the plans.
    fn simulate(cases: &[Case], blocks: u32, budget: usize, max_sequences: usize) -> Vec<StepPlan> {
        let mut s = scheduler(blocks, budget, max_sequences);
        let mut left: BTreeMap<SequenceId, usize> = BTreeMap::new();
        let mut plans = Vec::new();
        for step in 0.. {
            assert!(step < 20_000, "it does not come to an end");
            for (i, (head, tail, generate, _, arrives)) in cases.iter().enumerate() {
                if *arrives == step {
                    let id = i as SequenceId;
                    let own = 1000 * (id as u32 + 1);
                    submit(
                        &mut s,
                        id,
                        (0..*head as u32).chain(own..own + *tail as u32).collect(),
                        *generate as u32,
                    );
                    left.insert(id, *generate);
                }
            }
            let oldest = s.running.first().map(|o| (o.id, o.computed));
            let plan = s.plan();
            s.pool.check(s.running.iter().map(|r| &r.blocks[..]));
            assert!(s.running.is_sorted_by_key(|r| r.age));
            assert!(s.running.len() <= max_sequences);
            if let Some((id, computed)) = oldest {
                let share = plan.sequences.iter().find(|p| p.id == id);
                assert!(share.is_some_and(|p| p.start == computed), "the oldest stands still");
            }
            assert!(plan.sequences.iter().map(|p| p.tokens.len()).sum::<usize>() <= budget);
            assert!(
                !plan.sequences.is_empty() || left.is_empty(),
                "nothing is planned while there is work"
            );
            for planned in plan.sequences.iter().filter(|p| p.samples) {
                let rest = left.get_mut(&planned.id).expect("a sequence that has ended is planned");
                *rest = rest.saturating_sub(cases[planned.id as usize].3);
                if *rest == 0 {
                    left.remove(&planned.id);
                    s.remove(planned.id);
                } else {
                    s.extend(
                        planned.id,
                        &vec![planned.id as u32; cases[planned.id as usize].3.min(*rest)],
                    );
                }
            }
            plans.push(plan);
            if left.is_empty() && cases.iter().all(|c| c.4 <= step) {
                break;
            }
        }
        s.pool.check(std::iter::empty());
        assert_eq!(s.pool.available(), blocks as usize, "a block leaked");
        assert_eq!((s.running(), s.waiting()), (0, 0));
        plans
    }

    proptest! {
        #[test]
        fn everything_ends_within_budget_without_a_leak(
            cases in prop::collection::vec((0usize..12, 1usize..14, 1usize..12, 1usize..4, 0usize..6), 1..14),
            // The largest sequence has 12 + 13 + 11 tokens and needs nine blocks of four.
            blocks in 10u32..24,
            budget in 1usize..40,
            max_sequences in 1usize..8,
        ) {
            let plans = simulate(&cases, blocks, budget, max_sequences);
            prop_assert_eq!(plans, simulate(&cases, blocks, budget, max_sequences), "same input, same plan");
        }
    }
}
