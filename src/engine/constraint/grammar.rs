//! A compiled grammar, and where a sequence stands in it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use llguidance::Matcher;
use toktrie::{SimpleVob, TokEnv};

use crate::engine::constraint::Weight;
use crate::engine::constraint::text::one_line;

/// Sequences that share their lexer's states one after the other before a lane begins anew: what is kept stays bounded.
pub(super) const LANE_SEQUENCES: usize = 256;

/// A compiled grammar.
pub struct Grammar {
    /// Tokens that every text begins with.
    forced: Vec<u32>,
    /// Can nothing follow them?
    ended: bool,
    /// Stands after them and is only cloned.
    prototype: Mutex<Matcher>,
    /// What may follow them.
    first_mask: SimpleVob,
    pub(super) lanes: Vec<Mutex<Lane>>,
    next_lane: AtomicUsize,
    env: TokEnv,
    _weight: Weight,
}

/// Some more than there are threads, so that they balance.
static LANES: LazyLock<usize> = LazyLock::new(|| 4 * std::thread::available_parallelism().map_or(1, usize::from));

/// Matchers that share the states of their lexer.
#[derive(Default)]
pub(super) struct Lane {
    /// Stands where the prototype does and is only cloned.
    pub(super) matcher: Option<Matcher>,
    /// How many have been cloned.
    pub(super) sequences: usize,
}

/// A broken matcher says so itself.
pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
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
    /// `matcher` stands after the tokens that are `forced`, and `mask` is what may follow.
    pub(super) fn new(matcher: Matcher, forced: Vec<u32>, mask: SimpleVob, env: TokEnv, weight: Weight) -> Grammar {
        Grammar {
            ended: matcher.is_stopped(),
            lanes: (0..*LANES).map(|_| Mutex::default()).collect(),
            next_lane: AtomicUsize::new(0),
            prototype: Mutex::new(matcher),
            forced,
            first_mask: mask,
            env,
            _weight: weight,
        }
    }

    /// Does the whole text fit?
    pub fn accepts(&self, text: &str) -> bool {
        let trie = self.env.tok_trie();
        let Some(rest) = text.as_bytes().strip_prefix(&trie.decode(&self.forced)[..]) else {
            return false;
        };
        let mut matcher = self.matcher();
        let tokens = trie.greedy_tokenize(rest);
        // The vocabulary may lack bytes of the text, which the tokens then leave out.
        if trie.decode(&tokens) != rest {
            return false;
        }
        (tokens.is_empty() || matcher.consume_tokens(&tokens).is_ok()) && accepting(&mut matcher)
    }

    /// A matcher that shares with none.
    fn matcher(&self) -> Matcher {
        locked(&self.prototype).deep_clone()
    }

    /// A matcher that shares with others of this lane.
    fn matcher_of(&self, lane: usize) -> Matcher {
        let mut lane = locked(&self.lanes[lane]);
        if lane.sequences == LANE_SEQUENCES {
            *lane = Lane::default();
        }
        lane.sequences += 1;
        lane.matcher.get_or_insert_with(|| self.matcher()).clone()
    }
}

/// Where one sequence stands in a grammar.
///
/// While it has nothing but the tokens that every text begins with, it is the shared grammar and nothing else, so thousands may
/// wait.
pub struct GrammarState {
    grammar: Arc<Grammar>,
    /// How many of [`Grammar::forced`] it has taken.
    begun: usize,
    lane: usize,
    /// `None` until a token was sampled.
    pub(super) matcher: Option<Matcher>,
    /// Does it share with others of its lane?
    shares: bool,
    /// What `matcher` has taken.
    taken: Vec<u32>,
    mask: Mask,
}

/// What may come next.
enum Mask {
    /// The grammar's first mask.
    First,
    Unknown,
    Computed(Result<SimpleVob, String>),
}

impl GrammarState {
    /// Stands at the start.
    pub fn new(grammar: Arc<Grammar>) -> GrammarState {
        GrammarState {
            lane: grammar.next_lane.fetch_add(1, Ordering::Relaxed) % grammar.lanes.len(),
            begun: 0,
            matcher: None,
            shares: true,
            taken: Vec::new(),
            grammar,
            mask: Mask::First,
        }
    }

    pub fn grammar(&self) -> &Grammar {
        &self.grammar
    }

    /// Sequences of different lanes do not wait for each other; there are as many as [`GrammarState::lanes`] says.
    pub fn lane(&self) -> usize {
        self.lane
    }

    pub fn lanes() -> usize {
        *LANES
    }

    /// Computes the mask of the next token, where that has not been done. Takes from microseconds to milliseconds.
    pub fn prepare(&mut self) {
        if matches!(self.mask, Mask::Unknown) {
            let mask = self.ask(Matcher::compute_mask_or_eos);
            self.mask = Mask::Computed(mask.map_err(|e| format!("no token can follow in the asked-for shape: {e}")));
        }
    }

    /// Asks its matcher; where that fails and shares with others, one that does not.
    fn ask<T>(&mut self, what: impl Fn(&mut Matcher) -> anyhow::Result<T>) -> Result<T, String> {
        let matcher = self.matcher.get_or_insert_with(|| self.grammar.matcher_of(self.lane));
        match what(matcher) {
            Err(_) if std::mem::take(&mut self.shares) => {
                // Those that come after it begin with sound states.
                *locked(&self.grammar.lanes[self.lane]) = Lane::default();
                let alone = self.matcher.insert(self.grammar.matcher());
                alone.consume_tokens(&self.taken).and_then(|()| what(alone))
            }
            result => result,
        }
        .map_err(|e| one_line(&e.to_string()))
    }

    /// Tokens that may come next, a bit an id, once [prepared](Self::prepare); end-of-sequence ids among them where the text is
    /// complete.
    pub fn mask(&self) -> Result<&[u32], String> {
        match &self.mask {
            Mask::First => Ok(self.grammar.first_mask.as_slice()),
            Mask::Computed(mask) => mask.as_ref().map(SimpleVob::as_slice).map_err(String::clone),
            Mask::Unknown => Err("no mask was computed".into()),
        }
    }

    /// Writes down which tokens a text may begin with, a bit an id: the one that is certain, or the grammar's first mask.
    pub fn first_mask(&self, mask: &mut Vec<u32>) {
        match self.grammar.forced.first() {
            Some(first) => {
                mask.resize(*first as usize / 32 + 1, 0);
                mask[*first as usize / 32] |= 1 << (first % 32);
            }
            None => mask.extend_from_slice(self.grammar.first_mask.as_slice()),
        }
    }

    /// Tokens that are certain to come next, whatever the model says; to be taken one by one. Empty where it has a choice.
    pub fn forced(&mut self) -> Vec<u32> {
        match &mut self.matcher {
            Some(matcher) => matcher.compute_ff_tokens(),
            None => self.grammar.forced[self.begun..].to_vec(),
        }
    }

    /// Takes a token that the mask allowed, or the next forced one. `true`: the text is complete and nothing can follow.
    pub fn take(&mut self, token: u32) -> Result<bool, String> {
        if self.begun < self.grammar.forced.len() {
            self.begun += 1;
            return Ok(self.begun == self.grammar.forced.len() && self.grammar.ended);
        }
        self.mask = Mask::Unknown;
        let ended = self.ask(|matcher| {
            matcher.consume_token(token)?;
            Ok(matcher.is_stopped())
        })?;
        self.taken.push(token);
        Ok(ended)
    }

    /// Is the text complete (though more may be allowed to follow)?
    pub fn is_complete(&mut self) -> bool {
        // What is forced is not the end.
        self.begun == self.grammar.forced.len()
            && accepting(self.matcher.get_or_insert_with(|| self.grammar.matcher_of(self.lane)))
    }
}

fn accepting(matcher: &mut Matcher) -> bool {
    match matcher.is_stopped() {
        true => matcher.stop_reason().is_ok(),
        false => matcher.is_accepting().unwrap_or(false),
    }
}
