//! One completion while it is generated: its tokens so far, its sampling settings, and the effect
//! of each drawn token.
//!
//! A completion ends
//!
//! - at an end-of-sequence id (unless `ignore_eos`) or a stop token, which the completion does not
//!   include;
//! - at a stop text, which may begin inside a token and span several. The text before it is kept;
//!   token ids are kept up to and including the token that completed it;
//! - where its shape is complete and nothing can follow, even if the model would go on. Under a
//!   shape, an end-of-sequence id always ends it, since only a complete text allows one;
//! - at `max_tokens`, or where the model's context is full.
//!
//! Tokens that the shape forces are not sampled: they are appended to the sampled token, or to the
//! prompt, and computed in the same step. Otherwise they are like sampled tokens; their log
//! probability is 0.
//!
//! Where the model thinks, the thought comes first ([`thinking`](crate::engine::thinking) says
//! where it ends). All rules above except `max_tokens` then apply to the answer alone.
//!
//! Where the tokenizer puts a space in front of every text (SentencePiece's `▁`), a completion
//! usually begins with that space. It comes from the tokenizer, so exactly one space is removed
//! from the text, as transformers' decoding does. Token ids keep it, stop texts are searched with
//! it, and a grammar's text keeps it, because it has to fit the grammar.

use std::collections::HashMap;
use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use crate::device::draw::{Allowed, Draw, DrawError, Drawn};
use crate::engine::choice::{ChoiceState, Chosen, NodeId};
use crate::engine::constraint::{Constraint, GrammarState};
use crate::engine::forbidden::BannedTokens;
use crate::engine::params::GenerationParams;
use crate::engine::philox::StreamKey;
use crate::engine::request::{Completion, FinishReason, Request, UnitId};
use crate::engine::thinking::{TextEffect, ThoughtState};
use crate::tokenizer::Tokenizer;

/// One completion while it is generated.
pub struct SampleState {
    id: UnitId,
    prompt: Arc<[u32]>,
    /// The prompt's distinct ids, ascending; empty until a repetition penalty needs them.
    prompt_ids: Vec<u32>,
    params: Arc<GenerationParams>,
    eos: Arc<[u32]>,
    cache_salt: Arc<str>,
    key: StreamKey,
    /// Maximum tokens of the completion: `max_tokens`, or fewer where the context ends earlier.
    max_tokens: usize,
    /// Tokens of thought and answer, except the tokens of a choice.
    completion: Vec<u32>,
    logprobs: Vec<f32>,
    /// Bytes of the answer's tokens.
    bytes: Vec<u8>,
    thought_state: ThoughtState,
    /// Tokens that may be drawn where a thought or the answer may begin.
    start: StartsWith,
    /// Per node of a choice: the tokens that penalties count there, if a thought precedes them.
    histories: HashMap<NodeId, Vec<u32>>,
    /// Tokens that are forbidden at the current position, if any.
    banned: BannedTokens,
    /// Prompt tokens that were found in the prefix cache when it first started.
    cached_tokens: Option<u32>,
    state: OutputState,
}

enum OutputState {
    Free,
    Grammar(Box<GrammarState>),
    Choice(ChoiceState),
}

/// Tokens that may be drawn where a thought, or an answer with a shape, may begin.
#[derive(Default)]
struct StartsWith {
    ids: Vec<u32>,
    mask: Vec<u32>,
}

/// How a sequence goes on.
#[derive(Debug, PartialEq, Eq)]
pub struct Continuation {
    /// The node of a choice whose logits the sequence computes next; 0 for other shapes.
    pub node: NodeId,
    /// Tokens to append to the sequence.
    pub tokens: SmallVec<[u32; 4]>,
}

/// The effect of a token.
pub enum Next {
    /// The sequence goes on as the first entry; each further entry is a fork of it. If there is
    /// none, the sequence ends and the unit's other sequences go on.
    Go(SmallVec<[Continuation; 1]>),
    /// The unit has ended; all its sequences end.
    Finished(Result<Completion, String>),
}

impl SampleState {
    /// An empty completion, and how its first sequence continues the prompt.
    ///
    /// `max_tokens` is already cut to the model's context. `Finished`: there is nothing to compute.
    pub fn new(
        request: Request,
        constraint: Constraint,
        max_tokens: usize,
        tokenizer: &Tokenizer,
    ) -> (SampleState, Next) {
        let state = match constraint {
            Constraint::Free => OutputState::Free,
            Constraint::Grammar(grammar) => OutputState::Grammar(Box::new(GrammarState::new(grammar))),
            Constraint::Choice { choices, probabilities } => {
                OutputState::Choice(ChoiceState::new(choices, probabilities))
            }
        };
        let thinking = request.params.thinking.clone();
        let mut unit = SampleState {
            id: request.id,
            key: StreamKey::of(request.params.seed, request.id),
            thought_state: ThoughtState::new(thinking, &request.prompt, !matches!(state, OutputState::Free)),
            prompt: request.prompt,
            prompt_ids: Vec::new(),
            params: request.params,
            eos: request.eos,
            cache_salt: request.cache_salt,
            max_tokens,
            completion: Vec::new(),
            logprobs: Vec::new(),
            bytes: Vec::new(),
            start: StartsWith::default(),
            histories: HashMap::new(),
            banned: BannedTokens::default(),
            cached_tokens: None,
            state,
        };
        let next = unit.go_on(SmallVec::new(), tokenizer);
        (unit, next)
    }

    /// How the sequence goes on after `tokens`, with the tokens that are certain to follow them.
    fn go_on(&mut self, mut tokens: SmallVec<[u32; 4]>, tokenizer: &Tokenizer) -> Next {
        if let Some(ended) = self.force(&mut tokens, tokenizer) {
            return ended;
        }
        let mut node = 0;
        if let (OutputState::Choice(state), true) = (&self.state, self.thought_state.answers()) {
            let walk = state.choices().follow_forced(0);
            if walk.ended.is_some() {
                return self.finish(FinishReason::Stop, tokenizer);
            }
            if self.thought_state.thought()
                && self.completion.len() + state.choices().deepest_choice() > self.max_tokens
            {
                // The thought has left too little room for a choice.
                return self.finish_at(FinishReason::Length, true, tokenizer);
            }
            tokens.extend(walk.forced);
            node = walk.node;
            self.keep_history(node);
        }
        Next::Go(smallvec![Continuation { node, tokens }])
    }

    /// Appends forced tokens to the completion and to `tokens`. `Some`: the completion has ended.
    fn force(&mut self, tokens: &mut SmallVec<[u32; 4]>, tokenizer: &Tokenizer) -> Option<Next> {
        loop {
            let mut forced = self.thought_state.certain(&self.completion);
            if let (OutputState::Grammar(state), true) = (&mut self.state, self.thought_state.answers()) {
                forced = state.forced();
            }
            if forced.is_empty() {
                return None;
            }
            tokens.extend_from_slice(&forced);
            // Forced tokens have the log probability 0.
            let ended = forced.into_iter().find_map(|token| self.push(token, || 0.0, tokenizer));
            if ended.is_some() {
                return ended;
            }
        }
    }

    /// Stores the tokens that penalties count at a node of a choice, if they include more than the
    /// node's path.
    fn keep_history(&mut self, node: NodeId) {
        let params = &self.params;
        let penalises = params.sampling.penalises();
        if let (OutputState::Choice(state), true) = (&self.state, penalises && !self.completion.is_empty()) {
            let history = [self.completion.as_slice(), state.choices().path_to(node)].concat();
            self.histories.insert(node, history);
        }
    }

    pub fn id(&self) -> UnitId {
        self.id
    }

    pub fn prompt(&self) -> &Arc<[u32]> {
        &self.prompt
    }

    pub fn params(&self) -> &GenerationParams {
        &self.params
    }

    pub fn cache_salt(&self) -> &str {
        &self.cache_salt
    }

    /// Whether a request with the same prompt also has the same parameters and end ids. Only greedy
    /// requests then have the same answer.
    pub fn asks(&self, request: &Request) -> bool {
        let same_params = Arc::ptr_eq(&self.params, &request.params) || self.params == request.params;
        same_params && self.eos == request.eos
    }

    /// Records the prompt tokens found in the prefix cache when its first sequence started.
    pub fn started(&mut self, cached: usize) {
        self.cached_tokens.get_or_insert(cached.min(self.prompt.len()) as u32);
    }

    /// Whether a step may be planned with the next token before it is known. False where the
    /// completion surely ends, or where a choice may fork.
    pub fn may_go_on(&self) -> bool {
        let parts = matches!(self.state, OutputState::Choice(_)) && !self.thought_state.thinks();
        !parts && self.completion.len() + 1 < self.max_tokens
    }

    /// Its grammar's state, whose mask must be prepared before [`draw`](Self::draw).
    pub fn grammar(&mut self) -> Option<&mut GrammarState> {
        match &mut self.state {
            OutputState::Grammar(state) if !self.thought_state.thinks() => Some(state),
            _ => None,
        }
    }

    /// Prepares the data for [`draw`](Self::draw); the grammar's mask must be prepared before.
    pub fn prepare(&mut self, tokenizer: &Tokenizer) {
        if self.params.sampling.repetition_penalty != 1.0 && self.prompt_ids.is_empty() {
            self.prompt_ids = self.prompt.to_vec();
            self.prompt_ids.sort_unstable();
            self.prompt_ids.dedup();
        }
        if self.thought_state.may_answer() {
            self.prepare_start();
        }
        let (params, generated) = (&*self.params, self.completion.len());
        match &self.state {
            _ if params.forbidden.is_empty() => {}
            _ if self.is_free() => {
                let ends = self.eos.iter().chain(&params.stop_token_ids);
                let at = (self.prompt.len(), generated);
                self.banned.prepare(&params.forbidden, at, tokenizer.unused_ids(), ends);
            }
            OutputState::Grammar(state) => {
                let mask = if self.thought_state.may_answer() {
                    &self.start.mask[..]
                } else {
                    state.mask().unwrap_or_default()
                };
                self.banned.prepare_mask(&params.forbidden, generated, mask, &self.eos);
            }
            OutputState::Free | OutputState::Choice(_) => {}
        }
    }

    /// Whether the next token is unconstrained.
    fn is_free(&self) -> bool {
        matches!(self.state, OutputState::Free) || self.thought_state.thinks()
    }

    /// Computes the tokens that may be drawn where a thought or the answer may begin: the shape's
    /// first tokens, and tokens that open a thought.
    fn prepare_start(&mut self) {
        let (opening, answers) = self.thought_state.openings(&self.completion);
        let StartsWith { ids, mask } = &mut self.start;
        ids.clear();
        mask.clear();
        match &self.state {
            OutputState::Choice(state) if answers => state.first_ids(ids),
            OutputState::Grammar(state) if answers => state.first_mask(mask),
            _ => {}
        }
        let (forbidden, is_first) = (&self.params.forbidden, self.completion.is_empty());
        let is_out = |id: &u32| forbidden.tokens.contains(id) || (is_first && forbidden.first.contains(id));
        // Opening tokens that are the only way to go on stay allowed even if they are forbidden.
        for id in opening.into_iter().filter(|id| !answers || !is_out(id)) {
            if !ids.contains(&id) {
                ids.push(id);
            }
            let word = id as usize / 32;
            mask.resize(mask.len().max(word + 1), 0);
            mask[word] |= 1 << (id % 32);
        }
    }

    /// The sampling settings for the logits of its sequence at `node`.
    pub fn draw<'a>(&'a self, node: NodeId, tokenizer: &'a Tokenizer) -> Draw<'a> {
        let params = &*self.params;
        let forbids = !params.forbidden.is_empty();
        let draw = |generated: usize| Draw {
            sampling: params.sampling,
            allowed: Allowed::AllBut(if forbids {
                self.banned.ids()
            } else {
                tokenizer.unused_ids()
            }),
            prompt: &self.prompt_ids,
            completion: &self.completion,
            uniform: self.key.uniform((self.prompt.len() + generated) as u32),
            log_sum: params.logprobs,
            logits: false,
        };
        let generated = self.completion.len();
        match &self.state {
            _ if self.is_free() => draw(generated),
            OutputState::Free => draw(generated),
            OutputState::Choice(state) => {
                let mut asked = state.draw(node, draw(generated + state.choices().depth(node)));
                if let Some(history) = self.histories.get(&node) {
                    asked.completion = history;
                }
                if self.thought_state.may_answer() {
                    (asked.allowed, asked.completion) = (Allowed::Ids(&self.start.ids), &self.completion);
                }
                asked
            }
            OutputState::Grammar(state) => Draw {
                // If the mask could not be computed, the row fails when its token is taken.
                allowed: Allowed::Mask(if forbids {
                    self.banned.mask()
                } else if self.thought_state.may_answer() {
                    &self.start.mask
                } else {
                    state.mask().unwrap_or_default()
                }),
                ..draw(generated)
            },
        }
    }

    /// Takes the token drawn from the logits of its sequence at `node`.
    pub fn take(&mut self, node: NodeId, drawn: Result<Drawn, DrawError>, tokenizer: &Tokenizer) -> Next {
        if let Some(state) = self.grammar()
            && let Err(why) = state.mask()
        {
            return Next::Finished(Err(why));
        }
        let drawn = match drawn {
            Ok(drawn) => drawn,
            Err(why) => return Next::Finished(Err(why.to_string())),
        };
        let token = drawn.token;
        let begins = self.thought_state.may_answer() && !self.thought_state.opens(&self.completion, token);
        if begins && !matches!(self.state, OutputState::Free) {
            self.thought_state.answer();
        }
        if self.thought_state.answers() && matches!(self.state, OutputState::Choice(_)) {
            return self.take_choice(node, &drawn, begins, tokenizer);
        }
        let shaped = matches!(self.state, OutputState::Grammar(_)) && self.thought_state.answers();
        if self.eos.contains(&token)
            && (shaped || !self.params.ignore_eos)
            && !self.thought_state.closes(&self.completion, token)
            && !self.thought_state.opens(&self.completion, token)
        {
            return self.finish(FinishReason::Stop, tokenizer);
        }
        match self.push(token, || drawn.log_probability(), tokenizer) {
            Some(ended) => ended,
            None => self.go_on(smallvec![token], tokenizer),
        }
    }

    /// Takes the token drawn at a node of a choice. `begins`: the token is the answer's first,
    /// where a thought could have begun instead.
    fn take_choice(&mut self, node: NodeId, drawn: &Drawn, begins: bool, tokenizer: &Tokenizer) -> Next {
        let OutputState::Choice(state) = &mut self.state else {
            return Next::Finished(Err("the completion has no choice to make".into()));
        };
        if begins && state.take_certain(drawn, self.params.logprobs) {
            return self.go_on(SmallVec::new(), tokenizer);
        }
        let next = state.take(node, drawn, self.params.logprobs);
        if state.is_decided() {
            return self.finish(FinishReason::Stop, tokenizer);
        }
        next.iter().for_each(|(node, _)| self.keep_history(*node));
        let continuation = |(node, tokens): (NodeId, Vec<u32>)| Continuation {
            node,
            tokens: tokens.into(),
        };
        Next::Go(next.into_iter().map(continuation).collect())
    }

    /// Appends a token to the completion. `Some`: the completion has ended.
    fn push(&mut self, token: u32, log_probability: impl FnOnce() -> f32, tokenizer: &Tokenizer) -> Option<Next> {
        let stops = !self.thought_state.thinks() && !self.thought_state.opens(&self.completion, token);
        if stops && self.params.stop_token_ids.contains(&token) && !self.is_before(token, tokenizer) {
            return Some(self.finish(FinishReason::Stop, tokenizer));
        }
        self.completion.push(token);
        if self.params.logprobs {
            self.logprobs.push(log_probability());
        }
        match self.thought_state.take(&self.completion, tokenizer) {
            TextEffect::Nothing => {}
            TextEffect::Cleared => self.bytes.clear(),
            TextEffect::From(from) => {
                if let Some(ended) = self.spell(from, tokenizer) {
                    return Some(ended);
                }
            }
        }
        (self.completion.len() >= self.max_tokens).then(|| self.finish(FinishReason::Length, tokenizer))
    }

    /// Whether this token is white space between a thought and free text.
    fn is_before(&self, token: u32, tokenizer: &Tokenizer) -> bool {
        let bytes = tokenizer.token_bytes(token);
        let is_space = !bytes.is_empty() && bytes.iter().all(u8::is_ascii_whitespace);
        is_space && self.bytes.is_empty() && self.thought_state.thought() && matches!(self.state, OutputState::Free)
    }

    /// Appends the text of the tokens from index `from` to the answer; only the last of them is new
    /// to the shape. `Some`: the completion has ended.
    fn spell(&mut self, from: usize, tokenizer: &Tokenizer) -> Option<Next> {
        let known = self.bytes.len();
        for token in &self.completion[from..] {
            let mut bytes = tokenizer.token_bytes(*token);
            if self.bytes.is_empty() && self.thought_state.thought() && matches!(self.state, OutputState::Free) {
                bytes = bytes.trim_ascii_start();
            }
            self.bytes.extend_from_slice(bytes);
        }
        let shape_ended = match (&mut self.state, self.completion.last()) {
            (OutputState::Grammar(state), Some(token)) => match state.take(*token) {
                Ok(ended) => ended,
                Err(why) => return Some(Next::Finished(Err(format!("the shape's matcher failed: {why}")))),
            },
            _ => false,
        };
        if let Some(at) = find_stop(&self.bytes, known, &self.params.stop) {
            self.bytes.truncate(at);
            return Some(self.finish_at(FinishReason::Stop, true, tokenizer));
        }
        shape_ended.then(|| self.finish(FinishReason::Stop, tokenizer))
    }

    fn finish(&mut self, reason: FinishReason, tokenizer: &Tokenizer) -> Next {
        match &self.state {
            OutputState::Choice(state) if self.thought_state.answers() => {
                let chosen = state.chosen(self.params.sampling.temperature == 0.0);
                self.finish_choice(chosen, reason, tokenizer)
            }
            _ => self.finish_at(reason, false, tokenizer),
        }
    }

    /// Ends with the chosen text, cut to the remaining tokens.
    fn finish_choice(&mut self, mut chosen: Chosen, reason: FinishReason, tokenizer: &Tokenizer) -> Next {
        let room = self.max_tokens.saturating_sub(self.completion.len());
        let cut = chosen.tokens.len() > room;
        chosen.tokens.truncate(room);
        chosen.logprobs.truncate(room);
        let mut completion = self.completion(if cut { FinishReason::Length } else { reason }, !cut, tokenizer);
        completion.text = if cut {
            without_prefix(&tokenizer.decode(&chosen.tokens), tokenizer).to_string()
        } else {
            chosen.text
        };
        completion.choice_probabilities = chosen.probabilities;
        completion.token_ids = std::mem::take(&mut self.completion);
        completion.token_ids.extend(chosen.tokens);
        if let Some(logprobs) = &mut completion.logprobs {
            *logprobs = std::mem::take(&mut self.logprobs);
            logprobs.extend(chosen.logprobs);
        }
        Next::Finished(Ok(completion))
    }

    /// Ends with the text of `bytes`. `cut`: a stop text was removed, so `bytes` lacks text that
    /// the shape's matcher has seen.
    fn finish_at(&mut self, reason: FinishReason, cut: bool, tokenizer: &Tokenizer) -> Next {
        let text = String::from_utf8_lossy(&self.bytes);
        let text = match self.state {
            OutputState::Free if !self.thought_state.thought() => without_prefix(&text, tokenizer).to_string(),
            _ => text.into_owned(),
        };
        // A thought that used up `max_tokens` has left no answer.
        let no_answer = self.thought_state.thinks()
            || (self.thought_state.thought() && text.is_empty() && reason == FinishReason::Length);
        let fits = !no_answer
            && match &mut self.state {
                OutputState::Free => true,
                OutputState::Grammar(state) if cut => state.grammar().accepts(&text),
                OutputState::Grammar(state) => state.is_complete(),
                OutputState::Choice(_) => false,
            };
        let mut completion = self.completion(reason, fits, tokenizer);
        completion.text = text;
        completion.token_ids = std::mem::take(&mut self.completion);
        if let Some(logprobs) = &mut completion.logprobs {
            *logprobs = std::mem::take(&mut self.logprobs);
        }
        Next::Finished(Ok(completion))
    }

    /// A completion without text and tokens.
    fn completion(&self, finish_reason: FinishReason, fits_shape: bool, tokenizer: &Tokenizer) -> Completion {
        Completion {
            id: self.id,
            token_ids: Vec::new(),
            text: String::new(),
            finish_reason,
            fits_shape,
            logprobs: self.params.logprobs.then(Vec::new),
            choice_probabilities: None,
            thought: self.thought_state.finish(&self.completion, tokenizer),
            prompt_tokens: self.prompt.len() as u32,
            cached_tokens: self.cached_tokens.unwrap_or(0),
        }
    }
}

/// A completion's text without the one space that the tokenizer puts in front of texts.
fn without_prefix<'a>(text: &'a str, tokenizer: &Tokenizer) -> &'a str {
    if tokenizer.prefixes_space() {
        text.strip_prefix(' ').unwrap_or(text)
    } else {
        text
    }
}

/// Start of the first stop text that ends after `known` bytes; the first `known` bytes contain
/// none.
fn find_stop(bytes: &[u8], known: usize, stops: &[String]) -> Option<usize> {
    let starts = stops.iter().filter(|s| !s.is_empty()).filter_map(|stop| {
        let from = known.saturating_sub(stop.len() - 1);
        bytes[from..]
            .windows(stop.len())
            .position(|window| window == stop.as_bytes())
            .map(|at| from + at)
    });
    starts.min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::sample::{Scratch, sample};
    use crate::device::draw::Sampling;
    use crate::engine::params::OutputConstraint;
    use proptest::prelude::*;

    /// The completion of a shape where the model wants these tokens.
    fn complete(tokenizer: &Arc<Tokenizer>, shape: OutputConstraint, order: &[u32], max_tokens: u32) -> Completion {
        let params = GenerationParams {
            sampling: Sampling {
                temperature: 0.0,
                repetition_penalty: 1.1,
                ..Sampling::default()
            },
            max_tokens,
            shape,
            ..GenerationParams::default()
        };
        complete_with(tokenizer, params, order)
    }

    fn complete_with(tokenizer: &Arc<Tokenizer>, params: GenerationParams, order: &[u32]) -> Completion {
        let max_tokens = params.max_tokens;
        let constraint = Constraint::compile(&params.shape, tokenizer, &[2]).unwrap();
        let request = Request {
            id: UnitId {
                job: 0,
                row: 0,
                sample: 0,
                attempt: 0,
            },
            prompt: [5, 4, 5].into(),
            params: Arc::new(params),
            eos: [2].into(),
            cache_salt: Arc::default(),
        };
        let (mut unit, mut next) = SampleState::new(request, constraint, max_tokens as usize, tokenizer);
        for token in order {
            let mut logits = vec![0.0; tokenizer.vocab_size()];
            logits[*token as usize] = 1.0;
            next = match next {
                Next::Go(at) => {
                    unit.grammar().into_iter().for_each(GrammarState::prepare);
                    unit.prepare(tokenizer);
                    let drawn = sample(&logits, unit.draw(at[0].node, tokenizer), &mut Scratch::default());
                    unit.take(at[0].node, drawn, tokenizer)
                }
                ended => ended,
            };
        }
        match next {
            Next::Finished(result) => result.unwrap(),
            Next::Go(_) => panic!("it goes on"),
        }
    }

    #[test]
    fn the_tokenizers_space_is_not_part_of_the_text() {
        let sentencepiece = crate::tokenizer::tests::sentencepiece;
        let tokenizer = Arc::new(sentencepiece(Some("always")));
        let id = |token: &str| tokenizer.id_of(token).unwrap();
        let order = [id("▁"), id("▁a"), id("b"), 2];
        let free = complete(&tokenizer, OutputConstraint::Free, &order, 9);
        assert_eq!(
            (free.text.as_str(), &free.token_ids[..]),
            (" ab", &order[..3]),
            "exactly one"
        );
        assert_eq!(complete(&tokenizer, OutputConstraint::Free, &order[2..], 9).text, "b");
        let shaped = complete(&tokenizer, OutputConstraint::Regex(" ab?".into()), &order[1..], 9);
        assert_eq!((shaped.text.as_str(), shaped.fits_shape), (" ab", true));
        let choices = ["ab", "bc"].map(String::from).to_vec();
        let choice = |max_tokens| {
            let choices = choices.clone();
            let shape = OutputConstraint::Choice {
                choices,
                probabilities: false,
            };
            complete(&tokenizer, shape, &order[1..2], max_tokens)
        };
        assert_eq!((choice(9).text.as_str(), choice(9).token_ids.len()), ("ab", 2));
        assert_eq!((choice(1).text.as_str(), choice(1).fits_shape), ("a", false));
        let never = Arc::new(sentencepiece(Some("never")));
        assert_eq!(complete(&never, OutputConstraint::Free, &order[1..], 9).text, " ab");
    }

    #[test]
    fn what_a_shape_forces_is_cut_like_other_tokens() {
        let tokenizer = Arc::new(Tokenizer::from_words(&["shipping", "delay"], &["<pad>", "<unk>", "<eos>"]).unwrap());
        let shape = || OutputConstraint::Regex("shipping delay x?".into());
        let whole = complete(&tokenizer, shape(), &[2], 9);
        assert_eq!((whole.text.as_str(), whole.fits_shape), ("shipping delay ", true));
        let (count, reason) = (whole.token_ids.len(), whole.finish_reason);
        assert_eq!((count, reason), (4, FinishReason::Stop), "two words, two spaces");
        for max_tokens in 1..4 {
            let cut = complete(&tokenizer, shape(), &[], max_tokens);
            assert_eq!(cut.token_ids[..], whole.token_ids[..max_tokens as usize]);
            assert_eq!((cut.finish_reason, cut.fits_shape), (FinishReason::Length, false));
        }
        let forced = OutputConstraint::Regex("shipping delay".into());
        let all = complete(&tokenizer, forced, &[], 3);
        assert_eq!((all.text.as_str(), all.fits_shape), ("shipping delay", true));
        assert_eq!(
            all.finish_reason,
            FinishReason::Stop,
            "no step, and the last token ends it"
        );
        let stopped = |stop: &str, stop_token_ids: Vec<u32>| {
            let params = GenerationParams {
                sampling: Sampling {
                    temperature: 0.0,
                    ..Sampling::default()
                },
                max_tokens: 9,
                stop: vec![stop.into()],
                stop_token_ids,
                shape: shape(),
                ..GenerationParams::default()
            };
            complete_with(&tokenizer, params, &[])
        };
        assert_eq!(stopped("g d", Vec::new()).text, "shippin");
        assert_eq!(stopped("", whole.token_ids[1..2].to_vec()).text, "shipping");
    }

    proptest! {
        /// Bytes come in pieces. The stop text is found with the piece that completes it, at the
        /// same place as in a search over all bytes.
        #[test]
        fn stops_are_found_across_pieces(
            pieces in prop::collection::vec(prop::collection::vec(97u8..100, 0..4), 1..12),
            stops in prop::collection::vec("[a-c]{0,5}", 0..4),
        ) {
            let mut bytes = Vec::new();
            for piece in pieces {
                let known = bytes.len();
                bytes.extend(piece);
                let whole = stops.iter().filter(|s| !s.is_empty())
                    .filter_map(|s| bytes.windows(s.len()).position(|w| w == s.as_bytes())).min();
                let found = find_stop(&bytes, known, &stops);
                prop_assert_eq!(found, whole);
                if found.is_some() {
                    break;
                }
            }
        }
    }
}
