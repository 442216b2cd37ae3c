//! Tells thoughts from answers by token ids.
//!
//! A model that thinks writes its thought between two delimiters of one or more tokens each, and
//! writes its answer after the second. The prompt may already have opened the thought, may have
//! closed it, or may leave the decision to the model ([`Thinking::begin`]).
//!
//! - Inside a thought, the shape does not apply, and stop texts and stop tokens are ignored.
//!   Penalties count the thought's tokens like all others. An end-of-sequence token ends the
//!   completion without an answer.
//! - After the thought, the text that the model's chat template puts there (`gap`) is forced, and
//!   then the shape applies. So the model answers in the form that it was trained on. If the answer
//!   is free text, the model writes the gap itself, and white space in front of the answer is
//!   removed.
//! - A thought of `max_tokens` tokens is ended by force: by `end`, or, if the closing delimiter has
//!   begun, by the rest of it. `end_gap` follows.
//! - Where the model may open a thought, its first token is either the first of the opening
//!   delimiter or one that the shape may begin with. One token must be enough to distinguish a
//!   thought from an answer. So both delimiters begin with a token that tokenized text never
//!   contains.
//! - Some models also mark the answer (`header`: harmony's final channel). Under a shape, these
//!   models write a thought or the header. Free text is unrestricted.
//!
//! See docs/decisions/048-thoughts-end-by-token-ids.md.

use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::tokenizer::Tokenizer;

/// Delimiters and limits of a model's thoughts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Thinking {
    /// Opening delimiter; at least one id.
    pub open: Vec<u32>,
    /// Closing delimiter; at least one id.
    pub close: Vec<u32>,
    /// Tokens that an answer without a thought begins with; empty for most models.
    pub header: Vec<u32>,
    /// Tokens forced between a thought and an answer under a shape.
    pub gap: Vec<u32>,
    /// Maximum tokens of a thought, delimiters not counted.
    pub max_tokens: Option<u32>,
    /// Tokens that end a thought of `max_tokens` tokens; the last of them are `close`.
    pub end: Vec<u32>,
    /// Tokens forced after a thought that was ended by force.
    pub end_gap: Vec<u32>,
    /// Control tokens, ascending. A thought of the prompt before one of them belongs to an earlier
    /// turn.
    pub control: Vec<u32>,
}

/// How a completion begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// The prompt has opened a thought.
    Thought,
    /// The prompt has closed its thought, or has begun the answer with its header.
    Answer,
    /// The model may open a thought.
    Either,
}

impl Thinking {
    /// How a completion of this prompt begins.
    pub fn begin(&self, prompt: &[u32]) -> Begin {
        for end in (1..=prompt.len()).rev() {
            let sofar = &prompt[..end];
            if sofar.ends_with(&self.close) || (!self.header.is_empty() && sofar.ends_with(&self.header)) {
                return Begin::Answer;
            }
            if sofar.ends_with(&self.open) {
                return Begin::Thought;
            }
            if self.control.binary_search(&prompt[end - 1]).is_ok() {
                break;
            }
        }
        Begin::Either
    }

    /// Number of the closing delimiter's tokens that `thought` ends with, if the delimiter is
    /// incomplete.
    fn closing(&self, thought: &[u32]) -> usize {
        let most = thought.len().min(self.close.len() - 1);
        let begun = |n: &usize| thought.ends_with(&self.close[..*n]);
        (1..=most).rev().find(begun).unwrap_or(0)
    }
}

/// The thought of a completion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Thought {
    /// Decoded text, without white space at either end.
    pub text: String,
    /// Number of tokens, without the delimiters.
    pub tokens: u32,
    /// Whether the closing delimiter was reached.
    pub closed: bool,
}

/// Phase of a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The completion holds at most white space and the beginning of a delimiter or a header: a
    /// thought may still be opened.
    Start,
    Thought,
    /// Number of tokens still to be forced before the answer.
    Gap(usize),
    Answer,
}

/// Effect of a token on the answer's text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum TextEffect {
    /// The token is not part of the answer's text, so far.
    Nothing,
    /// The completion's tokens from this index on are part of the answer's text.
    From(usize),
    /// The text so far was not part of the answer: discard it.
    Cleared,
}

/// State machine that leads one completion through thought and answer.
#[derive(Debug)]
pub(super) struct ThoughtState {
    /// `None`: the model does not think.
    thinking: Option<Arc<Thinking>>,
    /// Whether the answer has a shape.
    shaped: bool,
    phase: Phase,
    /// In `Start`: index of the first token of the completion that may belong to a delimiter.
    from: usize,
    /// Range of the thought's tokens in the completion; `end` is `usize::MAX` until the thought is
    /// closed.
    thought: Option<Range<usize>>,
    /// Whether the thought was ended by force.
    forced: bool,
}

impl ThoughtState {
    pub(super) fn new(thinking: Option<Arc<Thinking>>, prompt: &[u32], shaped: bool) -> ThoughtState {
        let begin = thinking.as_ref().map_or(Begin::Answer, |t| t.begin(prompt));
        ThoughtState {
            thinking,
            shaped,
            phase: match begin {
                Begin::Thought => Phase::Thought,
                Begin::Answer => Phase::Answer,
                Begin::Either => Phase::Start,
            },
            from: 0,
            thought: (begin == Begin::Thought).then_some(0..usize::MAX),
            forced: false,
        }
    }

    /// Whether the next token belongs to the answer.
    pub(super) fn answers(&self) -> bool {
        self.phase == Phase::Answer
    }

    /// Whether the next token may be the answer's first, or may open a thought instead.
    pub(super) fn may_answer(&self) -> bool {
        self.phase == Phase::Start
    }

    /// Whether the completion is inside a thought, or between thought and answer.
    pub(super) fn thinks(&self) -> bool {
        matches!(self.phase, Phase::Thought | Phase::Gap(_))
    }

    /// Whether a thought has begun; it may have ended since.
    pub(super) fn thought(&self) -> bool {
        self.thought.is_some()
    }

    /// Lets the answer begin with the next token.
    pub(super) fn answer(&mut self) {
        self.phase = Phase::Answer;
    }

    /// At the start of a completion with a shape: the tokens that continue a delimiter or the
    /// header, and whether the answer itself may begin instead.
    pub(super) fn openings(&self, completion: &[u32]) -> (SmallVec<[u32; 2]>, bool) {
        let mut next = SmallVec::new();
        let Some(thinking) = &self.thinking else {
            return (next, true);
        };
        let begun = &completion[self.from..];
        for way in [&thinking.open, &thinking.header] {
            if let Some(token) = way.strip_prefix(begun).and_then(|rest| rest.first())
                && !next.contains(token)
            {
                next.push(*token);
            }
        }
        (next, begun.is_empty() && thinking.header.is_empty())
    }

    /// Whether this token continues an opening delimiter or a header.
    pub(super) fn opens(&self, completion: &[u32], token: u32) -> bool {
        self.phase == Phase::Start && self.openings(completion).0.contains(&token)
    }

    /// Whether this token continues the closing delimiter.
    pub(super) fn closes(&self, completion: &[u32], token: u32) -> bool {
        let (Phase::Thought, Some(thinking), Some(thought)) = (self.phase, &self.thinking, &self.thought) else {
            return false;
        };
        thinking.close[thinking.closing(&completion[thought.start..])] == token
    }

    /// Tokens that are certain to come next; empty where the model decides, or once the answer has
    /// begun.
    pub(super) fn certain(&mut self, completion: &[u32]) -> Vec<u32> {
        let Some(thinking) = &self.thinking else {
            return Vec::new();
        };
        match (self.phase, &self.thought) {
            (Phase::Start, _) if self.shaped => match self.openings(completion) {
                (one, false) if one.len() == 1 => one.to_vec(),
                _ => Vec::new(),
            },
            (Phase::Thought, Some(thought)) => {
                let tokens = &completion[thought.start..];
                if thinking.max_tokens.is_none_or(|most| tokens.len() < most as usize) {
                    return Vec::new();
                }
                self.forced = true;
                match thinking.closing(tokens) {
                    0 => thinking.end.clone(),
                    begun => thinking.close[begun..].to_vec(),
                }
            }
            (Phase::Gap(left), _) => {
                let gap = self.gap();
                gap[gap.len() - left..].to_vec()
            }
            _ => Vec::new(),
        }
    }

    /// Tokens that are forced between thought and answer.
    fn gap(&self) -> &[u32] {
        match &self.thinking {
            Some(thinking) if self.forced => &thinking.end_gap,
            Some(thinking) if self.shaped => &thinking.gap,
            _ => &[],
        }
    }

    /// Advances by the last token of `completion`, which came before the answer or begins it.
    pub(super) fn take(&mut self, completion: &[u32], tokenizer: &Tokenizer) -> TextEffect {
        let last = completion.len() - 1;
        let Some(thinking) = &self.thinking else {
            return TextEffect::From(last);
        };
        match self.phase {
            Phase::Answer => return TextEffect::From(last),
            Phase::Gap(left) => {
                self.phase = if left > 1 { Phase::Gap(left - 1) } else { Phase::Answer };
            }
            Phase::Thought => {
                let start = self.thought.as_ref().map_or(0, |thought| thought.start);
                if completion[start..].ends_with(&thinking.close) {
                    self.thought = Some(start..completion.len() - thinking.close.len());
                    self.phase = match self.gap().len() {
                        0 => Phase::Answer,
                        left => Phase::Gap(left),
                    };
                }
            }
            Phase::Start => {
                let begun = &completion[self.from..];
                if begun == thinking.open {
                    self.thought = Some(completion.len()..usize::MAX);
                    self.phase = Phase::Thought;
                    return TextEffect::Cleared;
                }
                if begun == thinking.header {
                    self.phase = Phase::Answer;
                    return TextEffect::Cleared;
                }
                if !thinking.open.starts_with(begun) && !thinking.header.starts_with(begun) {
                    let held = self.from;
                    let is_space = |token: &u32| {
                        let bytes = tokenizer.token_bytes(*token);
                        !bytes.is_empty() && bytes.iter().all(u8::is_ascii_whitespace)
                    };
                    if begun.iter().all(is_space) {
                        self.from = completion.len()
                    } else {
                        self.phase = Phase::Answer
                    }
                    return TextEffect::From(held);
                }
            }
        }
        TextEffect::Nothing
    }

    /// The thought of a completion that has ended; `None`: the completion had no thought.
    pub(super) fn finish(&self, completion: &[u32], tokenizer: &Tokenizer) -> Option<Thought> {
        let Range { start, end } = self.thought.clone()?;
        let closed = end <= completion.len();
        let tokens = &completion[start..end.min(completion.len())];
        Some(Thought {
            text: tokenizer.decode(tokens).trim().to_string(),
            tokens: tokens.len() as u32,
            closed,
        })
    }
}

#[cfg(test)]
mod tests;
