//! A compiled grammar, and the state of one sequence in it.
//!
//! See docs/decisions/050-grammars-share-lexer-states-in-lanes.md.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use llguidance::{Matcher, TokenParser};
use toktrie::{SimpleVob, TokEnv};

use crate::engine::constraint::MemoryCharge;
use crate::engine::constraint::lexer_memory::{Lexer, LexerMemory};
use crate::engine::constraint::text::one_line;

/// Number of sequences after which a lane gets a new lexer. This bounds the states that a lexer
/// keeps.
pub(super) const LANE_SEQUENCES_MAX: usize = 256;

/// A compiled grammar.
pub struct Grammar {
    /// Tokens that every text begins with.
    forced: Vec<u32>,
    /// Whether nothing can follow the forced tokens.
    ends_after_forced: bool,
    /// Parser at the start of the text; only cloned.
    prototype: Mutex<TokenParser>,
    /// Mask of the tokens that may follow the forced tokens.
    first_mask: SimpleVob,
    pub(super) lanes: Vec<Mutex<Lane>>,
    next_lane: AtomicUsize,
    env: TokEnv,
    lexer_memory: LexerMemory,
    _charge: MemoryCharge,
}

/// Number of lanes: several per thread, to balance the load.
pub(super) static LANE_COUNT: LazyLock<usize> =
    LazyLock::new(|| 4 * std::thread::available_parallelism().map_or(1, usize::from));

/// Matchers that share the states of their lexer.
#[derive(Default)]
pub(super) struct Lane {
    /// Matcher after the forced tokens; only cloned.
    pub(super) handle: Option<MatcherHandle>,
    /// Number of clones made of `handle`.
    pub(super) sequences: usize,
}

/// A matcher, and the lexer that it shares with its clones.
#[derive(Clone)]
pub(super) struct MatcherHandle {
    pub(super) matcher: Matcher,
    lexer: Arc<Lexer>,
}

impl MatcherHandle {
    fn query<T>(&mut self, call: impl Fn(&mut Matcher) -> anyhow::Result<T>) -> Result<T, String> {
        let answer = call(&mut self.matcher).map_err(|e| one_line(&e.to_string()))?;
        self.lexer.check().map(|()| answer)
    }
}

/// Locks a mutex even if it is poisoned: a broken matcher reports its own error.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammar")
            .field("first_tokens", &self.first_mask.num_set())
            .finish()
    }
}

impl Grammar {
    /// `parser` is at the start of the text. `matcher` shares its lexer and has consumed the tokens
    /// `forced`. `mask` is the mask of the tokens that may follow.
    pub(super) fn new(
        parser: TokenParser,
        matcher: &Matcher,
        forced: Vec<u32>,
        mask: SimpleVob,
        lexer_memory: LexerMemory,
        charge: MemoryCharge,
    ) -> Grammar {
        Grammar {
            ends_after_forced: matcher.is_stopped(),
            lanes: (0..*LANE_COUNT).map(|_| Mutex::default()).collect(),
            next_lane: AtomicUsize::new(0),
            env: parser.token_env.clone(),
            prototype: Mutex::new(parser),
            forced,
            first_mask: mask,
            lexer_memory,
            _charge: charge,
        }
    }

    /// Whether the text as a whole fits the grammar.
    pub fn accepts(&self, text: &str) -> bool {
        let trie = self.env.tok_trie();
        let Some(rest) = text.as_bytes().strip_prefix(&trie.decode(&self.forced)[..]) else {
            return false;
        };
        let mut matcher = self.fresh_matcher().matcher;
        let tokens = trie.greedy_tokenize(rest);
        // If the vocabulary lacks bytes of the text, the tokens leave these bytes out.
        if trie.decode(&tokens) != rest {
            return false;
        }
        (tokens.is_empty() || matcher.consume_tokens(&tokens).is_ok()) && is_accepting(&mut matcher)
    }

    /// A matcher with a lexer of its own, after the forced tokens.
    fn fresh_matcher(&self) -> MatcherHandle {
        let parser = lock(&self.prototype).deep_clone();
        let lexer = Arc::new(Lexer::new(&parser, self.lexer_memory.clone()));
        let mut matcher = Matcher::new(Ok(parser));
        if !self.forced.is_empty() {
            // A matcher that cannot consume the tokens reports the error at its next use.
            let _ = matcher.consume_tokens(&self.forced);
        }
        MatcherHandle { matcher, lexer }
    }

    /// A matcher that shares the lexer of this lane.
    fn lane_matcher(&self, lane: usize) -> MatcherHandle {
        let mut lane = lock(&self.lanes[lane]);
        if lane.sequences == LANE_SEQUENCES_MAX {
            *lane = Lane::default();
        }
        lane.sequences += 1;
        lane.handle.get_or_insert_with(|| self.fresh_matcher()).clone()
    }
}

/// State of one sequence in a grammar.
///
/// Until its first sampled token, the state holds no matcher of its own, so thousands of sequences
/// may wait cheaply.
pub struct GrammarState {
    grammar: Arc<Grammar>,
    /// Number of tokens of [`Grammar::forced`] that the sequence has consumed.
    forced_consumed: usize,
    lane: usize,
    /// `None` until a token was sampled.
    pub(super) handle: Option<MatcherHandle>,
    /// Whether `handle` shares its lane's lexer.
    shares_lexer: bool,
    /// Tokens that `handle` has consumed after the forced tokens.
    consumed: Vec<u32>,
    mask: Mask,
}

/// Mask of the tokens that may come next.
enum Mask {
    /// The grammar's first mask.
    First,
    Unknown,
    Computed(Result<SimpleVob, String>),
}

impl GrammarState {
    /// The state before the first token.
    pub fn new(grammar: Arc<Grammar>) -> GrammarState {
        GrammarState {
            lane: grammar.next_lane.fetch_add(1, Ordering::Relaxed) % grammar.lanes.len(),
            forced_consumed: 0,
            handle: None,
            shares_lexer: true,
            consumed: Vec::new(),
            grammar,
            mask: Mask::First,
        }
    }

    pub fn grammar(&self) -> &Grammar {
        &self.grammar
    }

    /// The sequence's lane, below [`GrammarState::lane_count`]. Sequences of different lanes do not
    /// wait for each other.
    pub fn lane(&self) -> usize {
        self.lane
    }

    pub fn lane_count() -> usize {
        *LANE_COUNT
    }

    /// Computes the mask of the next token, unless it is known already. This takes microseconds to
    /// milliseconds.
    pub fn prepare(&mut self) {
        if matches!(self.mask, Mask::Unknown) {
            let mask = self.query(Matcher::compute_mask_or_eos);
            self.mask = Mask::Computed(mask.map_err(|e| format!("no token can follow under the constraint: {e}")));
        }
    }

    /// Calls the sequence's matcher. If the call fails and the matcher shares its lane's lexer, a
    /// matcher with a lexer of its own replaces it and repeats the call.
    fn query<T>(&mut self, call: impl Fn(&mut Matcher) -> anyhow::Result<T>) -> Result<T, String> {
        let handle = self.handle.get_or_insert_with(|| self.grammar.lane_matcher(self.lane));
        match handle.query(&call) {
            Err(_) if std::mem::take(&mut self.shares_lexer) => {
                // Later sequences of the lane start with a new lexer.
                *lock(&self.grammar.lanes[self.lane]) = Lane::default();
                let fresh_matcher = self.handle.insert(self.grammar.fresh_matcher());
                fresh_matcher.query(|matcher| {
                    matcher.consume_tokens(&self.consumed)?;
                    call(matcher)
                })
            }
            result => result,
        }
    }

    /// Tokens that may come next, one bit per id, once [prepared](Self::prepare). End-of-sequence
    /// ids are included where the text is complete.
    pub fn mask(&self) -> Result<&[u32], String> {
        match &self.mask {
            Mask::First => Ok(self.grammar.first_mask.as_slice()),
            Mask::Computed(mask) => mask.as_ref().map(SimpleVob::as_slice).map_err(String::clone),
            Mask::Unknown => Err("no mask was computed".into()),
        }
    }

    /// Writes the tokens that a text may begin with, one bit per id: the first forced token, or the
    /// grammar's first mask.
    pub fn write_first_mask(&self, mask: &mut Vec<u32>) {
        match self.grammar.forced.first() {
            Some(first) => {
                mask.resize(*first as usize / 32 + 1, 0);
                mask[*first as usize / 32] |= 1 << (first % 32);
            }
            None => mask.extend_from_slice(self.grammar.first_mask.as_slice()),
        }
    }

    /// Tokens that must come next, to be consumed one by one. Empty where the model has a choice.
    pub fn forced_tokens(&mut self) -> Vec<u32> {
        match &mut self.handle {
            Some(handle) => handle.matcher.compute_ff_tokens(),
            None => self.grammar.forced[self.forced_consumed..].to_vec(),
        }
    }

    /// Advances by a token that the mask allowed, or by the next forced token. Returns whether the
    /// text is complete and nothing can follow.
    pub fn consume(&mut self, token: u32) -> Result<bool, String> {
        if self.forced_consumed < self.grammar.forced.len() {
            self.forced_consumed += 1;
            return Ok(self.forced_consumed == self.grammar.forced.len() && self.grammar.ends_after_forced);
        }
        self.mask = Mask::Unknown;
        let ended = self.query(|matcher| {
            matcher.consume_token(token)?;
            Ok(matcher.is_stopped())
        })?;
        self.consumed.push(token);
        Ok(ended)
    }

    /// Whether the text is complete. More text may still be allowed to follow.
    pub fn is_complete(&mut self) -> bool {
        // A text that lacks forced tokens is incomplete.
        self.forced_consumed == self.grammar.forced.len()
            && is_accepting(
                &mut self
                    .handle
                    .get_or_insert_with(|| self.grammar.lane_matcher(self.lane))
                    .matcher,
            )
    }
}

impl Drop for GrammarState {
    /// If memory is tight, a lane's lexer is dropped with the last sequence that uses it.
    fn drop(&mut self) {
        let Some(handle) = self.handle.take().filter(|handle| handle.lexer.under_pressure()) else {
            return;
        };
        let mut lane = lock(&self.grammar.lanes[self.lane]);
        drop(handle);
        if lane
            .handle
            .as_ref()
            .is_some_and(|handle| Arc::strong_count(&handle.lexer) == 1)
        {
            *lane = Lane::default();
        }
    }
}

fn is_accepting(matcher: &mut Matcher) -> bool {
    if matcher.is_stopped() {
        matcher.stop_reason().is_ok()
    } else {
        matcher.is_accepting().unwrap_or(false)
    }
}
