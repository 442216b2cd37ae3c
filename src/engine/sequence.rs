//! One completion in the making: what it holds so far, what it asks of a row of logits, and what the token drawn makes of it.
//!
//! A completion ends
//!
//! - at an end-of-sequence id (unless `ignore_eos`) or a stop token: that token is not part of it;
//! - at a stop text, wherever in its bytes, across tokens: text before it is kept, token ids are those up to and including the
//!   token that completed it;
//! - where its shape is complete and nothing can follow, whether or not the model would end there. Under a shape an
//!   end-of-sequence id, which only a complete text allows, always ends it;
//! - at `max_tokens`, or where the model's context is full.
//!
//! Tokens that its shape leaves no choice about are not sampled: they follow the sampled one, or the prompt, at once and are
//! computed in the same step as it. In every other respect they are tokens like others; their log probability is 0.
//!
//! Where the tokenizer puts a space in front of every text (SentencePiece's `▁`), a completion mostly begins with that space,
//! which is the tokenizer's and not the answer's: exactly one is taken off the text, as transformers' decoding does. Token ids
//! keep it, stop texts are looked for with it, and a grammar's text, which has to fit, is left as it is.

use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use crate::device::draw::{Allowed, Draw, DrawError, Drawn};
use crate::engine::choice::{ChoiceState, Node};
use crate::engine::constraint::{Constraint, GrammarState};
use crate::engine::params::Params;
use crate::engine::philox::StreamKey;
use crate::engine::request::{Completion, FinishReason, Request, UnitId};
use crate::model::tokenizer::Tokenizer;

/// One completion in the making.
pub struct Unit {
    id: UnitId,
    prompt: Arc<[u32]>,
    /// The prompt's ids, ascending, each once; empty until a repetition penalty asks for them.
    prompt_ids: Vec<u32>,
    params: Arc<Params>,
    eos: Arc<[u32]>,
    key: StreamKey,
    /// Most tokens it may get: `max_tokens`, or less where the context ends before.
    max_tokens: usize,
    completion: Vec<u32>,
    logprobs: Vec<f32>,
    /// What `completion` spells.
    bytes: Vec<u8>,
    /// Prompt tokens found computed when it was first started.
    cached_tokens: Option<u32>,
    state: State,
}

enum State {
    Free,
    Grammar(Box<GrammarState>),
    Choice(ChoiceState),
}

/// Where a sequence goes on.
#[derive(Debug, PartialEq, Eq)]
pub struct Continuation {
    /// The node of a choice that its logits will be for; 0 for other shapes.
    pub node: Node,
    /// Tokens that come after those it has.
    pub tokens: SmallVec<[u32; 4]>,
}

/// What follows from a token.
pub enum Next {
    /// The sequence goes on as the first of these; each further one is a fork of it. None: it ends, others of the unit go on.
    Go(SmallVec<[Continuation; 1]>),
    /// The unit has ended; all its sequences end.
    Finished(Result<Completion, String>),
}

impl Unit {
    /// A completion with nothing in it yet, and how its first sequence continues the prompt.
    ///
    /// `max_tokens` is what the context leaves of the asked-for number. `Finished`: there is nothing to ask the model.
    pub fn new(request: Request, constraint: Constraint, max_tokens: usize, tokenizer: &Tokenizer) -> (Unit, Next) {
        let mut first = Continuation {
            node: 0,
            tokens: SmallVec::new(),
        };
        let mut nothing_to_choose = false;
        let state = match constraint {
            Constraint::Free => State::Free,
            Constraint::Grammar(grammar) => State::Grammar(Box::new(GrammarState::new(grammar))),
            Constraint::Choice { choices, probabilities } => {
                let walk = choices.walk(0);
                nothing_to_choose = walk.ended.is_some();
                first = Continuation {
                    node: walk.node,
                    tokens: walk.forced.into(),
                };
                State::Choice(ChoiceState::new(choices, probabilities))
            }
        };
        let mut unit = Unit {
            id: request.id,
            key: StreamKey::of(request.params.seed, request.id),
            prompt: request.prompt,
            prompt_ids: Vec::new(),
            params: request.params,
            eos: request.eos,
            max_tokens,
            completion: Vec::new(),
            logprobs: Vec::new(),
            bytes: Vec::new(),
            cached_tokens: None,
            state,
        };
        let next = match nothing_to_choose {
            true => unit.finish(FinishReason::Stop, tokenizer),
            false => match unit.force(&mut first.tokens, tokenizer) {
                Some(ended) => ended,
                None => Next::Go(smallvec![first]),
            },
        };
        (unit, next)
    }

    /// Adds the tokens that its grammar forces to the completion and to `tokens`. `Some`: the completion has ended.
    fn force(&mut self, tokens: &mut SmallVec<[u32; 4]>, tokenizer: &Tokenizer) -> Option<Next> {
        let forced = match &mut self.state {
            State::Grammar(state) => state.forced(),
            State::Free | State::Choice(_) => Vec::new(),
        };
        tokens.extend_from_slice(&forced);
        // What is certain has the log probability 0.
        forced.into_iter().find_map(|token| self.push(token, || 0.0, tokenizer))
    }

    pub fn id(&self) -> UnitId {
        self.id
    }

    pub fn prompt(&self) -> &Arc<[u32]> {
        &self.prompt
    }

    pub fn params(&self) -> &Params {
        &self.params
    }

    /// Does a request with the same prompt ask for the same? Only greedy ones have the same answer then.
    pub fn asks(&self, request: &Request) -> bool {
        let same_params = Arc::ptr_eq(&self.params, &request.params) || self.params == request.params;
        same_params && self.eos == request.eos
    }

    /// Its first sequence was started with this many tokens found computed.
    pub fn started(&mut self, cached: usize) {
        self.cached_tokens.get_or_insert(cached.min(self.prompt.len()) as u32);
    }

    /// May a step go on with the token that is drawn next before it is known? Not where it surely ends, or may part.
    pub fn may_go_on(&self) -> bool {
        !matches!(self.state, State::Choice(_)) && self.completion.len() + 1 < self.max_tokens
    }

    /// Its state in a grammar, whose mask is to be prepared before [`draw`](Self::draw).
    pub fn grammar(&mut self) -> Option<&mut GrammarState> {
        match &mut self.state {
            State::Grammar(state) => Some(state),
            State::Free | State::Choice(_) => None,
        }
    }

    /// Readies what [`draw`](Self::draw) needs besides a grammar's mask.
    pub fn prepare(&mut self) {
        if self.params.repetition_penalty != 1.0 && self.prompt_ids.is_empty() {
            self.prompt_ids = self.prompt.to_vec();
            self.prompt_ids.sort_unstable();
            self.prompt_ids.dedup();
        }
    }

    /// What is asked of the logits after its sequence at `node`.
    pub fn draw<'a>(&'a self, node: Node, tokenizer: &'a Tokenizer) -> Draw<'a> {
        let params = &*self.params;
        let draw = |generated: usize| Draw {
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            allowed: Allowed::AllBut(tokenizer.holes()),
            prompt: &self.prompt_ids,
            completion: &self.completion,
            uniform: self.key.uniform((self.prompt.len() + generated) as u32),
            log_sum: params.logprobs,
            logits: false,
        };
        match &self.state {
            State::Free => draw(self.completion.len()),
            State::Choice(state) => state.draw(node, draw(state.choices().depth(node))),
            State::Grammar(state) => Draw {
                // A mask that could not be computed fails the row when its token is taken.
                allowed: Allowed::Mask(state.mask().unwrap_or_default()),
                ..draw(self.completion.len())
            },
        }
    }

    /// Takes what was drawn from the logits after its sequence at `node`.
    pub fn take(&mut self, node: Node, drawn: Result<Drawn, DrawError>, tokenizer: &Tokenizer) -> Next {
        if let State::Grammar(state) = &self.state
            && let Err(why) = state.mask()
        {
            return Next::Finished(Err(why));
        }
        let drawn = match drawn {
            Ok(drawn) => drawn,
            Err(why) => return Next::Finished(Err(why.to_string())),
        };
        if let State::Choice(state) = &mut self.state {
            let next = state.take(node, &drawn, self.params.logprobs);
            return match state.is_decided() {
                true => self.finish(FinishReason::Stop, tokenizer),
                false => Next::Go(
                    next.into_iter()
                        .map(|(node, tokens)| Continuation {
                            node,
                            tokens: tokens.into(),
                        })
                        .collect(),
                ),
            };
        }
        let token = drawn.token;
        let shaped = matches!(self.state, State::Grammar(_));
        if self.eos.contains(&token) && (shaped || !self.params.ignore_eos) {
            return self.finish(FinishReason::Stop, tokenizer);
        }
        let mut tokens = smallvec![token];
        let ended = self.push(token, || drawn.log_probability(), tokenizer);
        match ended.or_else(|| self.force(&mut tokens, tokenizer)) {
            Some(ended) => ended,
            None => Next::Go(smallvec![Continuation { node: 0, tokens }]),
        }
    }

    /// Adds a token to the completion. `Some`: that has ended.
    fn push(&mut self, token: u32, log_probability: impl FnOnce() -> f32, tokenizer: &Tokenizer) -> Option<Next> {
        if self.params.stop_token_ids.contains(&token) {
            return Some(self.finish(FinishReason::Stop, tokenizer));
        }
        self.completion.push(token);
        if self.params.logprobs {
            self.logprobs.push(log_probability());
        }
        let known = self.bytes.len();
        self.bytes.extend_from_slice(tokenizer.token_bytes(token));
        let shape_ended = match &mut self.state {
            State::Grammar(state) => match state.take(token) {
                Ok(ended) => ended,
                Err(why) => return Some(Next::Finished(Err(format!("the shape's matcher failed: {why}")))),
            },
            State::Free | State::Choice(_) => false,
        };
        if let Some(at) = find_stop(&self.bytes, known, &self.params.stop) {
            self.bytes.truncate(at);
            return Some(self.finish_at(FinishReason::Stop, true, tokenizer));
        }
        if shape_ended {
            return Some(self.finish(FinishReason::Stop, tokenizer));
        }
        (self.completion.len() >= self.max_tokens).then(|| self.finish(FinishReason::Length, tokenizer))
    }

    fn finish(&mut self, reason: FinishReason, tokenizer: &Tokenizer) -> Next {
        if let State::Choice(state) = &self.state {
            let chosen = state.chosen(self.params.temperature == 0.0);
            let cut = chosen.tokens.len() > self.max_tokens;
            let mut completion = self.completion(if cut { FinishReason::Length } else { reason }, !cut);
            completion.token_ids = chosen.tokens;
            completion.token_ids.truncate(self.max_tokens);
            completion.text = if cut {
                without_prefix(&tokenizer.decode(&completion.token_ids), tokenizer).to_string()
            } else {
                chosen.text
            };
            completion.choice_probabilities = chosen.probabilities;
            if let Some(logprobs) = &mut completion.logprobs {
                *logprobs = chosen.logprobs;
                logprobs.truncate(self.max_tokens);
            }
            return Next::Finished(Ok(completion));
        }
        self.finish_at(reason, false, tokenizer)
    }

    /// Ends with the text that `bytes` spells. `cut`: bytes are missing from what the shape has seen.
    fn finish_at(&mut self, reason: FinishReason, cut: bool, tokenizer: &Tokenizer) -> Next {
        let text = String::from_utf8_lossy(&self.bytes);
        let text = match self.state {
            State::Free => without_prefix(&text, tokenizer).to_string(),
            State::Grammar(_) | State::Choice(_) => text.into_owned(),
        };
        let fits = match &mut self.state {
            State::Grammar(state) if cut => state.grammar().accepts(&text),
            State::Grammar(state) => state.is_complete(),
            State::Free | State::Choice(_) => true,
        };
        let mut completion = self.completion(reason, fits);
        completion.text = text;
        completion.token_ids = std::mem::take(&mut self.completion);
        if let Some(logprobs) = &mut completion.logprobs {
            *logprobs = std::mem::take(&mut self.logprobs);
        }
        Next::Finished(Ok(completion))
    }

    /// A completion without text and tokens.
    fn completion(&self, finish_reason: FinishReason, fits_shape: bool) -> Completion {
        Completion {
            id: self.id,
            token_ids: Vec::new(),
            text: String::new(),
            finish_reason,
            fits_shape,
            logprobs: self.params.logprobs.then(Vec::new),
            choice_probabilities: None,
            prompt_tokens: self.prompt.len() as u32,
            cached_tokens: self.cached_tokens.unwrap_or(0),
        }
    }
}

/// A completion's text without the one space that the tokenizer puts in front of texts.
fn without_prefix<'a>(text: &'a str, tokenizer: &Tokenizer) -> &'a str {
    match tokenizer.prefixes_space() {
        true => text.strip_prefix(' ').unwrap_or(text),
        false => text,
    }
}

/// Where the first stop text begins that ends after `known` bytes, which held none.
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
    use crate::engine::params::Shape;
    use proptest::prelude::*;

    /// The completion of a shape where the model wants these tokens.
    fn complete(tokenizer: &Arc<Tokenizer>, shape: Shape, order: &[u32], max_tokens: u32) -> Completion {
        let params = Params {
            max_tokens,
            temperature: 0.0,
            repetition_penalty: 1.1,
            shape,
            ..Params::default()
        };
        complete_with(tokenizer, params, order)
    }

    fn complete_with(tokenizer: &Arc<Tokenizer>, params: Params, order: &[u32]) -> Completion {
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
        };
        let (mut unit, mut next) = Unit::new(request, constraint, max_tokens as usize, tokenizer);
        for token in order {
            let mut logits = vec![0.0; tokenizer.vocab_size()];
            logits[*token as usize] = 1.0;
            next = match next {
                Next::Go(at) => {
                    unit.prepare();
                    unit.grammar().into_iter().for_each(GrammarState::prepare);
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
        let sentencepiece = crate::model::tokenizer::tests::sentencepiece;
        let tokenizer = Arc::new(sentencepiece(Some("always")));
        let id = |token: &str| tokenizer.id_of(token).unwrap();
        let order = [id("▁"), id("▁a"), id("b"), 2];
        let free = complete(&tokenizer, Shape::Free, &order, 9);
        assert_eq!(
            (free.text.as_str(), &free.token_ids[..]),
            (" ab", &order[..3]),
            "exactly one"
        );
        assert_eq!(complete(&tokenizer, Shape::Free, &order[2..], 9).text, "b");
        let shaped = complete(&tokenizer, Shape::Regex(" ab?".into()), &order[1..], 9);
        assert_eq!((shaped.text.as_str(), shaped.fits_shape), (" ab", true));
        let choices = ["ab", "bc"].map(String::from).to_vec();
        let choice = |max_tokens| {
            let choices = choices.clone();
            let shape = Shape::Choice {
                choices,
                probabilities: false,
            };
            complete(&tokenizer, shape, &order[1..2], max_tokens)
        };
        assert_eq!((choice(9).text.as_str(), choice(9).token_ids.len()), ("ab", 2));
        assert_eq!((choice(1).text.as_str(), choice(1).fits_shape), ("a", false));
        let never = Arc::new(sentencepiece(Some("never")));
        assert_eq!(complete(&never, Shape::Free, &order[1..], 9).text, " ab");
    }

    #[test]
    fn what_a_shape_forces_is_cut_like_other_tokens() {
        let tokenizer = Arc::new(Tokenizer::from_words(&["shipping", "delay"], &["<pad>", "<unk>", "<eos>"]).unwrap());
        let shape = || Shape::Regex("shipping delay x?".into());
        let whole = complete(&tokenizer, shape(), &[2], 9);
        assert_eq!((whole.text.as_str(), whole.fits_shape), ("shipping delay ", true));
        let (count, reason) = (whole.token_ids.len(), whole.finish_reason);
        assert_eq!((count, reason), (4, FinishReason::Stop), "two words, two spaces");
        for max_tokens in 1..4 {
            let cut = complete(&tokenizer, shape(), &[], max_tokens);
            assert_eq!(cut.token_ids[..], whole.token_ids[..max_tokens as usize]);
            assert_eq!((cut.finish_reason, cut.fits_shape), (FinishReason::Length, false));
        }
        let forced = Shape::Regex("shipping delay".into());
        let all = complete(&tokenizer, forced, &[], 3);
        assert_eq!((all.text.as_str(), all.fits_shape), ("shipping delay", true));
        assert_eq!(
            all.finish_reason,
            FinishReason::Stop,
            "no step, and the last token ends it"
        );
        let stopped = |stop: &str, stop_token_ids: Vec<u32>| {
            let params = Params {
                max_tokens: 9,
                temperature: 0.0,
                stop: vec![stop.into()],
                stop_token_ids,
                shape: shape(),
                ..Params::default()
            };
            complete_with(&tokenizer, params, &[])
        };
        assert_eq!(stopped("g d", Vec::new()).text, "shippin");
        assert_eq!(stopped("", whole.token_ids[1..2].to_vec()).text, "shipping");
    }

    proptest! {
        /// Bytes come in pieces; the stop is found with the piece that completes it, where searching all would find it.
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
