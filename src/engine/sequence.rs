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
//!   shape, an end-of-sequence id always ends the completion, since the mask allows such an id only
//!   where the text is complete;
//! - at `max_tokens`, or where the model's context is full.
//!
//! Tokens that the shape forces are not sampled: they are appended to the sampled token, or to the
//! prompt, and computed in the same step. Their log probability is 0. In all other respects they
//! are like sampled tokens.
//!
//! Where the model thinks, the thought comes first (for its end, see
//! [`thinking`](crate::engine::thinking)). All rules above except `max_tokens` then apply to the
//! answer alone.
//!
//! Where the tokenizer puts a space in front of every text (SentencePiece's `▁`), a completion
//! usually begins with that space. Exactly one space is removed from the text, as transformers'
//! decoding does. The space stays in the token ids, in the text that is searched for stop texts,
//! and in the text of a grammar, because the whole text must fit the grammar.

use std::collections::HashMap;
use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use crate::device::draw::{Allowed, Draw, DrawError, DrawnToken};
use crate::engine::choice::{ChoiceResult, ChoiceState, NodeId};
use crate::engine::constraint::{Constraint, GrammarState};
use crate::engine::forbidden::BannedTokens;
use crate::engine::params::GenerationParams;
use crate::engine::philox::StreamKey;
use crate::engine::request::{Completion, FinishReason, Request, SampleId};
use crate::engine::thinking::{TextEffect, ThoughtState};
use crate::tokenizer::Tokenizer;

/// One completion while it is generated.
pub struct SampleState {
    id: SampleId,
    prompt: Arc<[u32]>,
    /// The prompt's distinct ids, ascending; empty until a repetition penalty needs them.
    prompt_ids: Vec<u32>,
    params: Arc<GenerationParams>,
    eos: Arc<[u32]>,
    cache_salt: Arc<str>,
    adapter: u32,
    stream_key: StreamKey,
    /// Maximum tokens of the completion: `max_tokens`, or fewer where the context ends earlier.
    max_tokens: usize,
    /// Tokens of thought and answer, except the tokens of a choice.
    completion: Vec<u32>,
    logprobs: Vec<f32>,
    /// Bytes of the answer's tokens.
    bytes: Vec<u8>,
    thought_state: ThoughtState,
    /// Tokens that may be drawn where a thought or the answer may begin.
    first_tokens: FirstTokens,
    /// Per node of a choice: the tokens that penalties count at the node, if a thought precedes
    /// them.
    histories: HashMap<NodeId, Vec<u32>>,
    /// Tokens that are forbidden at the current position.
    banned: BannedTokens,
    /// Number of prompt tokens that the prefix cache held when the first sequence started.
    cached_tokens: Option<u32>,
    output: OutputState,
}

enum OutputState {
    Free,
    Grammar(Box<GrammarState>),
    Choice(ChoiceState),
}

/// Tokens that may be drawn where a thought, or an answer with a shape, may begin.
#[derive(Default)]
struct FirstTokens {
    ids: Vec<u32>,
    mask: Vec<u32>,
}

/// How a sequence goes on.
#[derive(Debug, PartialEq, Eq)]
pub struct Continuation {
    /// Node of a choice whose logits the sequence computes next; 0 for other shapes.
    pub node: NodeId,
    /// Tokens to append to the sequence.
    pub tokens: SmallVec<[u32; 4]>,
}

/// The effect of a drawn token on its sequence and sample.
pub enum TokenOutcome {
    /// The sequence goes on as the first entry; each further entry is a fork of it. Without
    /// entries, the sequence ends and the sample's other sequences go on.
    Continue(SmallVec<[Continuation; 1]>),
    /// The sample has ended; all its sequences end.
    Finished(Result<Completion, String>),
}

impl SampleState {
    /// An empty completion, and the continuation of the prompt by its first sequence. `Finished` if
    /// nothing needs to be computed.
    ///
    /// `max_tokens` must already be cut to the model's context.
    pub fn new(
        request: Request,
        constraint: Constraint,
        max_tokens: usize,
        tokenizer: &Tokenizer,
    ) -> (SampleState, TokenOutcome) {
        let output = match constraint {
            Constraint::Free => OutputState::Free,
            Constraint::Grammar(grammar) => OutputState::Grammar(Box::new(GrammarState::new(grammar))),
            Constraint::Choice { choices, probabilities } => {
                OutputState::Choice(ChoiceState::new(choices, probabilities))
            }
        };
        let thinking = request.params.thinking.clone();
        let mut state = SampleState {
            id: request.id,
            stream_key: StreamKey::of(request.params.seed, request.id),
            thought_state: ThoughtState::new(thinking, &request.prompt, !matches!(output, OutputState::Free)),
            prompt: request.prompt,
            prompt_ids: Vec::new(),
            params: request.params,
            eos: request.eos,
            cache_salt: request.cache_salt,
            adapter: request.adapter,
            max_tokens,
            completion: Vec::new(),
            logprobs: Vec::new(),
            bytes: Vec::new(),
            first_tokens: FirstTokens::default(),
            histories: HashMap::new(),
            banned: BannedTokens::default(),
            cached_tokens: None,
            output,
        };
        let outcome = state.continue_with(SmallVec::new(), tokenizer);
        (state, outcome)
    }

    /// Continues the sequence with `tokens` and the tokens that are forced to follow them.
    fn continue_with(&mut self, mut tokens: SmallVec<[u32; 4]>, tokenizer: &Tokenizer) -> TokenOutcome {
        if let Some(ended) = self.append_forced(&mut tokens, tokenizer) {
            return ended;
        }
        let mut node = 0;
        if let (OutputState::Choice(state), true) = (&self.output, self.thought_state.is_answering()) {
            let walk = state.choices().follow_forced(0);
            if walk.ended_choice.is_some() {
                return self.finish(FinishReason::Stop, tokenizer);
            }
            if self.thought_state.has_thought()
                && self.completion.len() + state.choices().deepest_branching() > self.max_tokens
            {
                // The thought has left too few tokens for a choice.
                return self.finish_text(FinishReason::Length, true, tokenizer);
            }
            tokens.extend(walk.forced);
            node = walk.node;
            self.store_history(node);
        }
        TokenOutcome::Continue(smallvec![Continuation { node, tokens }])
    }

    /// Appends forced tokens to the completion and to `tokens`. `Some` if the completion has ended.
    fn append_forced(&mut self, tokens: &mut SmallVec<[u32; 4]>, tokenizer: &Tokenizer) -> Option<TokenOutcome> {
        loop {
            let mut forced = self.thought_state.forced_tokens(&self.completion);
            if let (OutputState::Grammar(state), true) = (&mut self.output, self.thought_state.is_answering()) {
                forced = state.forced_tokens();
            }
            if forced.is_empty() {
                return None;
            }
            tokens.extend_from_slice(&forced);
            // The log probability of forced tokens is 0.
            let ended = forced
                .into_iter()
                .find_map(|token| self.append(token, || 0.0, tokenizer));
            if ended.is_some() {
                return ended;
            }
        }
    }

    /// Stores the tokens that penalties count at `node` of a choice, if the node's path is not all
    /// of them.
    fn store_history(&mut self, node: NodeId) {
        let params = &self.params;
        let penalises = params.sampling.penalises();
        if let (OutputState::Choice(state), true) = (&self.output, penalises && !self.completion.is_empty()) {
            let history = [self.completion.as_slice(), state.choices().path_to(node)].concat();
            self.histories.insert(node, history);
        }
    }

    pub fn id(&self) -> SampleId {
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

    /// The number of the adapter that changes the model for it; 0: none does.
    pub fn adapter(&self) -> u32 {
        self.adapter
    }

    /// Whether `request`, which has the same prompt, also has the same parameters, end ids and adapter. If
    /// so, greedy requests have the same answer.
    pub fn has_params_of(&self, request: &Request) -> bool {
        let same_params = Arc::ptr_eq(&self.params, &request.params) || self.params == request.params;
        same_params && self.eos == request.eos && self.adapter == request.adapter
    }

    /// Records the number of prompt tokens that the prefix cache held when the first sequence
    /// started.
    pub fn record_cached_tokens(&mut self, tokens: usize) {
        self.cached_tokens.get_or_insert(tokens.min(self.prompt.len()) as u32);
    }

    /// Whether a step may be planned with a placeholder for the next token, before the token is
    /// known. False where the completion certainly ends, or where a choice may fork.
    pub fn may_plan_ahead(&self) -> bool {
        let may_fork = matches!(self.output, OutputState::Choice(_)) && !self.thought_state.is_thinking();
        !may_fork && self.completion.len() + 1 < self.max_tokens
    }

    /// The state of the sample's grammar, whose mask must be prepared before [`draw`](Self::draw).
    pub fn grammar(&mut self) -> Option<&mut GrammarState> {
        match &mut self.output {
            OutputState::Grammar(state) if !self.thought_state.is_thinking() => Some(state),
            _ => None,
        }
    }

    /// Prepares the data for [`draw`](Self::draw). The grammar's mask must be prepared first.
    pub fn prepare(&mut self, tokenizer: &Tokenizer) {
        if self.params.sampling.repetition_penalty != 1.0 && self.prompt_ids.is_empty() {
            self.prompt_ids = self.prompt.to_vec();
            self.prompt_ids.sort_unstable();
            self.prompt_ids.dedup();
        }
        if self.thought_state.is_at_start() {
            self.compute_first_tokens();
        }
        let (params, generated) = (&*self.params, self.completion.len());
        match &self.output {
            _ if params.forbidden.is_empty() => {}
            _ if self.is_unconstrained() => {
                let ends = self.eos.iter().chain(&params.stop_token_ids);
                let (prompt_tokens, unused_ids) = (self.prompt.len(), tokenizer.unused_ids());
                self.banned
                    .prepare(&params.forbidden, prompt_tokens, generated, unused_ids, ends);
            }
            OutputState::Grammar(state) => {
                let mask = if self.thought_state.is_at_start() {
                    &self.first_tokens.mask[..]
                } else {
                    state.mask().unwrap_or_default()
                };
                self.banned.prepare_mask(&params.forbidden, generated, mask, &self.eos);
            }
            OutputState::Free | OutputState::Choice(_) => {}
        }
    }

    /// Whether the next token is unconstrained.
    fn is_unconstrained(&self) -> bool {
        matches!(self.output, OutputState::Free) || self.thought_state.is_thinking()
    }

    /// Computes the tokens that may be drawn where a thought or the answer may begin: the shape's
    /// first tokens, and tokens that open a thought.
    fn compute_first_tokens(&mut self) {
        let (opening, may_answer) = self.thought_state.opening_tokens(&self.completion);
        let FirstTokens { ids, mask } = &mut self.first_tokens;
        ids.clear();
        mask.clear();
        match &self.output {
            OutputState::Choice(state) if may_answer => state.first_ids(ids),
            OutputState::Grammar(state) if may_answer => state.write_first_mask(mask),
            _ => {}
        }
        let (forbidden, is_first) = (&self.params.forbidden, self.completion.is_empty());
        let is_forbidden = |id: &u32| forbidden.tokens.contains(id) || (is_first && forbidden.first.contains(id));
        // Opening tokens that are the only way to go on stay allowed even if they are forbidden.
        for id in opening.into_iter().filter(|id| !may_answer || !is_forbidden(id)) {
            if !ids.contains(&id) {
                ids.push(id);
            }
            let word = id as usize / 32;
            mask.resize(mask.len().max(word + 1), 0);
            mask[word] |= 1 << (id % 32);
        }
    }

    /// The sampling settings for the logits of the sequence at `node`.
    pub fn draw<'a>(&'a self, node: NodeId, tokenizer: &'a Tokenizer) -> Draw<'a> {
        let params = &*self.params;
        let has_forbidden = !params.forbidden.is_empty();
        let draw = |generated: usize| Draw {
            sampling: params.sampling,
            allowed: Allowed::AllBut(if has_forbidden {
                self.banned.ids()
            } else {
                tokenizer.unused_ids()
            }),
            prompt: &self.prompt_ids,
            completion: &self.completion,
            uniform: self.stream_key.uniform((self.prompt.len() + generated) as u32),
            wants_log_sum_exp: params.logprobs,
            wants_logits: false,
        };
        let generated = self.completion.len();
        match &self.output {
            _ if self.is_unconstrained() => draw(generated),
            OutputState::Free => draw(generated),
            OutputState::Choice(state) => {
                let mut choice_draw = state.draw(node, draw(generated + state.choices().depth(node)));
                if let Some(history) = self.histories.get(&node) {
                    choice_draw.completion = history;
                }
                if self.thought_state.is_at_start() {
                    (choice_draw.allowed, choice_draw.completion) =
                        (Allowed::Ids(&self.first_tokens.ids), &self.completion);
                }
                choice_draw
            }
            OutputState::Grammar(state) => Draw {
                // If the mask could not be computed, the row fails when its token is processed.
                allowed: Allowed::Mask(if has_forbidden {
                    self.banned.mask()
                } else if self.thought_state.is_at_start() {
                    &self.first_tokens.mask
                } else {
                    state.mask().unwrap_or_default()
                }),
                ..draw(generated)
            },
        }
    }

    /// Processes the token drawn from the logits of the sequence at `node`.
    pub fn consume(
        &mut self,
        node: NodeId,
        drawn: Result<DrawnToken, DrawError>,
        tokenizer: &Tokenizer,
    ) -> TokenOutcome {
        if let Some(state) = self.grammar()
            && let Err(why) = state.mask()
        {
            return TokenOutcome::Finished(Err(why));
        }
        let drawn = match drawn {
            Ok(drawn) => drawn,
            Err(why) => return TokenOutcome::Finished(Err(why.to_string())),
        };
        let token = drawn.token;
        let begins_answer =
            self.thought_state.is_at_start() && !self.thought_state.continues_opening(&self.completion, token);
        if begins_answer && !matches!(self.output, OutputState::Free) {
            self.thought_state.begin_answer();
        }
        if self.thought_state.is_answering() && matches!(self.output, OutputState::Choice(_)) {
            return self.consume_choice(node, &drawn, begins_answer, tokenizer);
        }
        let in_grammar = matches!(self.output, OutputState::Grammar(_)) && self.thought_state.is_answering();
        if self.eos.contains(&token)
            && (in_grammar || !self.params.ignore_eos)
            && !self.thought_state.continues_closing(&self.completion, token)
            && !self.thought_state.continues_opening(&self.completion, token)
        {
            return self.finish(FinishReason::Stop, tokenizer);
        }
        match self.append(token, || drawn.log_probability(), tokenizer) {
            Some(ended) => ended,
            None => self.continue_with(smallvec![token], tokenizer),
        }
    }

    /// Processes the token drawn at a node of a choice. `begins_answer`: the token is the first of
    /// the answer, where a thought could have begun instead.
    fn consume_choice(
        &mut self,
        node: NodeId,
        drawn: &DrawnToken,
        begins_answer: bool,
        tokenizer: &Tokenizer,
    ) -> TokenOutcome {
        let OutputState::Choice(state) = &mut self.output else {
            return TokenOutcome::Finished(Err("the completion has no choice to make".into()));
        };
        if begins_answer && state.consume_forced_first(drawn, self.params.logprobs) {
            return self.continue_with(SmallVec::new(), tokenizer);
        }
        let next = state.consume(node, drawn, self.params.logprobs);
        if state.is_decided() {
            return self.finish(FinishReason::Stop, tokenizer);
        }
        next.iter().for_each(|(node, _)| self.store_history(*node));
        let continuation = |(node, tokens): (NodeId, Vec<u32>)| Continuation {
            node,
            tokens: tokens.into(),
        };
        TokenOutcome::Continue(next.into_iter().map(continuation).collect())
    }

    /// Appends a token to the completion. `Some` if the completion has ended.
    fn append(
        &mut self,
        token: u32,
        log_probability: impl FnOnce() -> f32,
        tokenizer: &Tokenizer,
    ) -> Option<TokenOutcome> {
        let may_stop =
            !self.thought_state.is_thinking() && !self.thought_state.continues_opening(&self.completion, token);
        if may_stop && self.params.stop_token_ids.contains(&token) && !self.is_leading_space(token, tokenizer) {
            return Some(self.finish(FinishReason::Stop, tokenizer));
        }
        self.completion.push(token);
        if self.params.logprobs {
            self.logprobs.push(log_probability());
        }
        match self.thought_state.consume(&self.completion, tokenizer) {
            TextEffect::Nothing => {}
            TextEffect::Cleared => self.bytes.clear(),
            TextEffect::From(from) => {
                if let Some(ended) = self.append_text(from, tokenizer) {
                    return Some(ended);
                }
            }
        }
        (self.completion.len() >= self.max_tokens).then(|| self.finish(FinishReason::Length, tokenizer))
    }

    /// Whether `token` is white space between a thought and free text.
    fn is_leading_space(&self, token: u32, tokenizer: &Tokenizer) -> bool {
        let bytes = tokenizer.token_bytes(token);
        let is_space = !bytes.is_empty() && bytes.iter().all(u8::is_ascii_whitespace);
        is_space
            && self.bytes.is_empty()
            && self.thought_state.has_thought()
            && matches!(self.output, OutputState::Free)
    }

    /// Appends the text of the completion's tokens from index `from` to the answer. The grammar
    /// consumes the last of them only. `Some` if the completion has ended.
    fn append_text(&mut self, from: usize, tokenizer: &Tokenizer) -> Option<TokenOutcome> {
        let searched = self.bytes.len();
        for token in &self.completion[from..] {
            let mut bytes = tokenizer.token_bytes(*token);
            if self.bytes.is_empty() && self.thought_state.has_thought() && matches!(self.output, OutputState::Free) {
                bytes = bytes.trim_ascii_start();
            }
            self.bytes.extend_from_slice(bytes);
        }
        let shape_ended = match (&mut self.output, self.completion.last()) {
            (OutputState::Grammar(state), Some(token)) => match state.consume(*token) {
                Ok(ended) => ended,
                Err(why) => {
                    return Some(TokenOutcome::Finished(Err(format!(
                        "the shape's matcher failed: {why}"
                    ))));
                }
            },
            _ => false,
        };
        if let Some(at) = find_stop(&self.bytes, searched, &self.params.stop) {
            self.bytes.truncate(at);
            return Some(self.finish_text(FinishReason::Stop, true, tokenizer));
        }
        shape_ended.then(|| self.finish(FinishReason::Stop, tokenizer))
    }

    fn finish(&mut self, reason: FinishReason, tokenizer: &Tokenizer) -> TokenOutcome {
        match &self.output {
            OutputState::Choice(state) if self.thought_state.is_answering() => {
                let chosen = state.chosen(self.params.sampling.temperature == 0.0);
                self.finish_choice(chosen, reason, tokenizer)
            }
            _ => self.finish_text(reason, false, tokenizer),
        }
    }

    /// Ends the completion with the chosen text, cut to the remaining tokens.
    fn finish_choice(&mut self, mut chosen: ChoiceResult, reason: FinishReason, tokenizer: &Tokenizer) -> TokenOutcome {
        let remaining = self.max_tokens.saturating_sub(self.completion.len());
        let is_cut = chosen.tokens.len() > remaining;
        chosen.tokens.truncate(remaining);
        chosen.logprobs.truncate(remaining);
        let mut completion =
            self.empty_completion(if is_cut { FinishReason::Length } else { reason }, !is_cut, tokenizer);
        completion.text = if is_cut {
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
        TokenOutcome::Finished(Ok(completion))
    }

    /// Ends the completion with the text of `bytes`. `is_cut`: a stop text was removed, so `bytes`
    /// lacks text that the grammar's matcher has consumed.
    fn finish_text(&mut self, reason: FinishReason, is_cut: bool, tokenizer: &Tokenizer) -> TokenOutcome {
        let text = String::from_utf8_lossy(&self.bytes);
        let text = match self.output {
            OutputState::Free if !self.thought_state.has_thought() => without_prefix(&text, tokenizer).to_string(),
            _ => text.into_owned(),
        };
        // A thought that used up `max_tokens` has left no answer.
        let has_no_answer = self.thought_state.is_thinking()
            || (self.thought_state.has_thought() && text.is_empty() && reason == FinishReason::Length);
        let fits_shape = !has_no_answer
            && match &mut self.output {
                OutputState::Free => true,
                OutputState::Grammar(state) if is_cut => state.grammar().accepts(&text),
                OutputState::Grammar(state) => state.is_complete(),
                OutputState::Choice(_) => false,
            };
        let mut completion = self.empty_completion(reason, fits_shape, tokenizer);
        completion.text = text;
        completion.token_ids = std::mem::take(&mut self.completion);
        if let Some(logprobs) = &mut completion.logprobs {
            *logprobs = std::mem::take(&mut self.logprobs);
        }
        TokenOutcome::Finished(Ok(completion))
    }

    /// A completion without text and tokens.
    fn empty_completion(&self, finish_reason: FinishReason, fits_shape: bool, tokenizer: &Tokenizer) -> Completion {
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

/// Start of the first stop text that ends after `searched` bytes. The first `searched` bytes must
/// contain no stop text.
fn find_stop(bytes: &[u8], searched: usize, stops: &[String]) -> Option<usize> {
    let starts = stops.iter().filter(|s| !s.is_empty()).filter_map(|stop| {
        let from = searched.saturating_sub(stop.len() - 1);
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

    /// The completion under a shape by a model that prefers these tokens, one after the other.
    fn complete(tokenizer: &Arc<Tokenizer>, shape: OutputConstraint, preferred: &[u32], max_tokens: u32) -> Completion {
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
        complete_with(tokenizer, params, preferred)
    }

    fn complete_with(tokenizer: &Arc<Tokenizer>, params: GenerationParams, preferred: &[u32]) -> Completion {
        let max_tokens = params.max_tokens;
        let constraint = Constraint::compile(&params.shape, tokenizer, &[2]).unwrap();
        let request = Request {
            id: SampleId {
                job: 0,
                row: 0,
                sample: 0,
                attempt: 0,
            },
            prompt: [5, 4, 5].into(),
            params: Arc::new(params),
            eos: [2].into(),
            cache_salt: Arc::default(),
            adapter: 0,
        };
        let (mut state, mut outcome) = SampleState::new(request, constraint, max_tokens as usize, tokenizer);
        for token in preferred {
            let mut logits = vec![0.0; tokenizer.vocab_size()];
            logits[*token as usize] = 1.0;
            outcome = match outcome {
                TokenOutcome::Continue(continuations) => {
                    let node = continuations[0].node;
                    state.grammar().into_iter().for_each(GrammarState::prepare);
                    state.prepare(tokenizer);
                    let drawn = sample(&logits, state.draw(node, tokenizer), &mut Scratch::default());
                    state.consume(node, drawn, tokenizer)
                }
                ended => ended,
            };
        }
        match outcome {
            TokenOutcome::Finished(result) => result.unwrap(),
            TokenOutcome::Continue(_) => panic!("it goes on"),
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
    fn forced_tokens_are_cut_like_sampled_tokens() {
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
        /// same offset as in a search over all bytes.
        #[test]
        fn stops_are_found_across_pieces(
            pieces in prop::collection::vec(prop::collection::vec(97u8..100, 0..4), 1..12),
            stops in prop::collection::vec("[a-c]{0,5}", 0..4),
        ) {
            let mut bytes = Vec::new();
            for piece in pieces {
                let searched = bytes.len();
                bytes.extend(piece);
                let whole = stops.iter().filter(|s| !s.is_empty())
                    .filter_map(|s| bytes.windows(s.len()).position(|w| w == s.as_bytes())).min();
                let found = find_stop(&bytes, searched, &stops);
                prop_assert_eq!(found, whole);
                if found.is_some() {
                    break;
                }
            }
        }
    }
}
