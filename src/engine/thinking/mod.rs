//! Separates thoughts from answers by token ids.
//!
//! A model that thinks writes its thought between two delimiters of one or more tokens each, and
//! writes its answer after the second. The prompt may already have opened the thought, may have
//! closed it, or may leave the decision to the model ([`Thinking::completion_start`]).
//!
//! - Inside a thought, the shape (output constraint) does not apply, and stop texts and stop tokens
//!   are ignored. Penalties count the thought's tokens like all others. An end-of-sequence token
//!   ends the completion without an answer.
//! - After the thought, the text that the model's chat template puts there (`gap`) is forced, and
//!   then the shape applies. So the model answers in the form that it was trained on. If the answer
//!   is free text, the model writes the gap itself, and white space in front of the answer is
//!   removed.
//! - A thought of `max_tokens` tokens is ended by force: with `forced_close`, or, if the closing
//!   delimiter has begun, with the rest of the delimiter. `forced_gap` follows.
//! - Where the model may open a thought, its first token is the first token of the opening
//!   delimiter or a token that the shape may begin with. One token must be enough to distinguish a
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
    /// Maximum tokens of a thought, without its delimiters.
    pub max_tokens: Option<u32>,
    /// Tokens that end a thought of `max_tokens` tokens. The last of them are `close`.
    pub forced_close: Vec<u32>,
    /// Tokens forced after a thought that was ended by force.
    pub forced_gap: Vec<u32>,
    /// Control tokens, ascending. A thought that stands before a control token in the prompt
    /// belongs to an earlier turn.
    pub control_ids: Vec<u32>,
}

/// How a completion begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompletionStart {
    /// The prompt has opened a thought.
    Thought,
    /// The prompt has closed its thought, or has begun the answer with its header.
    Answer,
    /// The model may open a thought.
    Either,
}

impl Thinking {
    /// How a completion of `prompt` begins.
    pub fn completion_start(&self, prompt: &[u32]) -> CompletionStart {
        for end in (1..=prompt.len()).rev() {
            let prefix = &prompt[..end];
            if prefix.ends_with(&self.close) || (!self.header.is_empty() && prefix.ends_with(&self.header)) {
                return CompletionStart::Answer;
            }
            if prefix.ends_with(&self.open) {
                return CompletionStart::Thought;
            }
            if self.control_ids.binary_search(&prompt[end - 1]).is_ok() {
                break;
            }
        }
        CompletionStart::Either
    }

    /// Number of tokens of an incomplete closing delimiter at the end of `thought`.
    fn begun_closing_tokens(&self, thought: &[u32]) -> usize {
        let max = thought.len().min(self.close.len() - 1);
        let is_begun = |count: &usize| thought.ends_with(&self.close[..*count]);
        (1..=max).rev().find(is_begun).unwrap_or(0)
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
    pub is_closed: bool,
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
    /// So far, the token is not part of the answer's text.
    Nothing,
    /// The completion's tokens from this index on are part of the answer's text.
    From(usize),
    /// The text so far was not part of the answer and must be discarded.
    Cleared,
}

/// State machine that leads one completion through thought and answer.
#[derive(Debug)]
pub(super) struct ThoughtState {
    /// `None`: the model does not think.
    thinking: Option<Arc<Thinking>>,
    /// Whether the answer has a shape.
    has_shape: bool,
    phase: Phase,
    /// In `Start`: index in the completion of the first token that may belong to a delimiter.
    delimiter_start: usize,
    /// Range of the thought's tokens in the completion; `end` is `usize::MAX` until the thought is
    /// closed.
    thought_range: Option<Range<usize>>,
    /// Whether the thought was ended by force.
    was_ended_by_force: bool,
}

impl ThoughtState {
    pub(super) fn new(thinking: Option<Arc<Thinking>>, prompt: &[u32], has_shape: bool) -> ThoughtState {
        let start = thinking
            .as_ref()
            .map_or(CompletionStart::Answer, |t| t.completion_start(prompt));
        ThoughtState {
            thinking,
            has_shape,
            phase: match start {
                CompletionStart::Thought => Phase::Thought,
                CompletionStart::Answer => Phase::Answer,
                CompletionStart::Either => Phase::Start,
            },
            delimiter_start: 0,
            thought_range: (start == CompletionStart::Thought).then_some(0..usize::MAX),
            was_ended_by_force: false,
        }
    }

    /// Whether the next token belongs to the answer.
    pub(super) fn is_answering(&self) -> bool {
        self.phase == Phase::Answer
    }

    /// Whether the next token may be the answer's first, or may open a thought instead.
    pub(super) fn is_at_start(&self) -> bool {
        self.phase == Phase::Start
    }

    /// Whether the completion is inside a thought, or between thought and answer.
    pub(super) fn is_thinking(&self) -> bool {
        matches!(self.phase, Phase::Thought | Phase::Gap(_))
    }

    /// Whether a thought has begun; it may have ended since.
    pub(super) fn has_thought(&self) -> bool {
        self.thought_range.is_some()
    }

    /// Makes the next token the first token of the answer.
    pub(super) fn begin_answer(&mut self) {
        self.phase = Phase::Answer;
    }

    /// For the start of a completion with a shape: the tokens that continue the opening delimiter
    /// or the header, and whether the answer may begin instead.
    pub(super) fn opening_tokens(&self, completion: &[u32]) -> (SmallVec<[u32; 2]>, bool) {
        let mut next = SmallVec::new();
        let Some(thinking) = &self.thinking else {
            return (next, true);
        };
        let begun = &completion[self.delimiter_start..];
        for delimiter in [&thinking.open, &thinking.header] {
            if let Some(token) = delimiter.strip_prefix(begun).and_then(|rest| rest.first())
                && !next.contains(token)
            {
                next.push(*token);
            }
        }
        (next, begun.is_empty() && thinking.header.is_empty())
    }

    /// Whether `token` continues the opening delimiter or the header.
    pub(super) fn continues_opening(&self, completion: &[u32], token: u32) -> bool {
        self.phase == Phase::Start && self.opening_tokens(completion).0.contains(&token)
    }

    /// Whether `token` continues the closing delimiter.
    pub(super) fn continues_closing(&self, completion: &[u32], token: u32) -> bool {
        let (Phase::Thought, Some(thinking), Some(thought)) = (self.phase, &self.thinking, &self.thought_range) else {
            return false;
        };
        thinking.close[thinking.begun_closing_tokens(&completion[thought.start..])] == token
    }

    /// Tokens that must come next. Empty where the model decides, or once the answer has begun.
    pub(super) fn forced_tokens(&mut self, completion: &[u32]) -> Vec<u32> {
        let Some(thinking) = &self.thinking else {
            return Vec::new();
        };
        match (self.phase, &self.thought_range) {
            (Phase::Start, _) if self.has_shape => match self.opening_tokens(completion) {
                (tokens, false) if tokens.len() == 1 => tokens.to_vec(),
                _ => Vec::new(),
            },
            (Phase::Thought, Some(thought)) => {
                let tokens = &completion[thought.start..];
                if thinking.max_tokens.is_none_or(|max| tokens.len() < max as usize) {
                    return Vec::new();
                }
                self.was_ended_by_force = true;
                match thinking.begun_closing_tokens(tokens) {
                    0 => thinking.forced_close.clone(),
                    begun => thinking.close[begun..].to_vec(),
                }
            }
            (Phase::Gap(remaining), _) => {
                let gap = self.forced_gap();
                gap[gap.len() - remaining..].to_vec()
            }
            _ => Vec::new(),
        }
    }

    /// Tokens that are forced between thought and answer.
    fn forced_gap(&self) -> &[u32] {
        match &self.thinking {
            Some(thinking) if self.was_ended_by_force => &thinking.forced_gap,
            Some(thinking) if self.has_shape => &thinking.gap,
            _ => &[],
        }
    }

    /// Advances by the last token of `completion`.
    pub(super) fn consume(&mut self, completion: &[u32], tokenizer: &Tokenizer) -> TextEffect {
        let last = completion.len() - 1;
        let Some(thinking) = &self.thinking else {
            return TextEffect::From(last);
        };
        match self.phase {
            Phase::Answer => return TextEffect::From(last),
            Phase::Gap(remaining) => {
                self.phase = if remaining > 1 {
                    Phase::Gap(remaining - 1)
                } else {
                    Phase::Answer
                };
            }
            Phase::Thought => {
                let start = self.thought_range.as_ref().map_or(0, |thought| thought.start);
                if completion[start..].ends_with(&thinking.close) {
                    self.thought_range = Some(start..completion.len() - thinking.close.len());
                    self.phase = match self.forced_gap().len() {
                        0 => Phase::Answer,
                        remaining => Phase::Gap(remaining),
                    };
                }
            }
            Phase::Start => {
                let begun = &completion[self.delimiter_start..];
                if begun == thinking.open {
                    self.thought_range = Some(completion.len()..usize::MAX);
                    self.phase = Phase::Thought;
                    return TextEffect::Cleared;
                }
                if begun == thinking.header {
                    self.phase = Phase::Answer;
                    return TextEffect::Cleared;
                }
                if !thinking.open.starts_with(begun) && !thinking.header.starts_with(begun) {
                    let text_start = self.delimiter_start;
                    let is_space = |token: &u32| {
                        let bytes = tokenizer.token_bytes(*token);
                        !bytes.is_empty() && bytes.iter().all(u8::is_ascii_whitespace)
                    };
                    if begun.iter().all(is_space) {
                        self.delimiter_start = completion.len()
                    } else {
                        self.phase = Phase::Answer
                    }
                    return TextEffect::From(text_start);
                }
            }
        }
        TextEffect::Nothing
    }

    /// The thought of a completion that has ended; `None` if it had no thought.
    pub(super) fn finish(&self, completion: &[u32], tokenizer: &Tokenizer) -> Option<Thought> {
        let Range { start, end } = self.thought_range.clone()?;
        let is_closed = end <= completion.len();
        let tokens = &completion[start..end.min(completion.len())];
        Some(Thought {
            text: tokenizer.decode(tokens).trim().to_string(),
            tokens: tokens.len() as u32,
            is_closed,
        })
    }
}

#[cfg(test)]
mod tests;
