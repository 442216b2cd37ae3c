//! Where a thought ends and the answer begins, told by token ids.
//!
//! A model that thinks writes its thought between two delimiters, each one token or several, and answers behind the second. A
//! prompt may have opened the thought already, may have closed it, or leave it to the model ([`Thinking::begin`]).
//!
//! - Inside a thought there is no shape, and neither stop texts nor stop tokens are looked for; penalties count its tokens as they
//!   do all others. An end of sequence ends the completion, without an answer.
//! - Behind it the shape begins, after the text that the model's chat template puts there (`gap`), which is forced: so the model
//!   answers in the form that it was trained in. Free text is left to the model, and the white space in front of it is taken off.
//! - A thought of `max_tokens` tokens is ended by force: by `end`, or by the rest of the closing delimiter where that has begun.
//! - Where the model may open a thought, its first token may be the delimiter's first or one that the shape begins with. Nothing
//!   else can be told apart by one token, so both delimiters begin with a token that no text is cut into.
//! - Some models name the part that is the answer as well (`header`: harmony's final channel). Under a shape, these write a thought
//!   or the header; free text may be anything.
//!
//! See docs/decisions/048-thoughts-end-by-token-ids.md.

use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::model::tokenizer::Tokenizer;

/// How a model's thoughts are told from its answers, and how long they may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Thinking {
    /// At least one id.
    pub open: Vec<u32>,
    /// At least one id.
    pub close: Vec<u32>,
    /// What an answer without a thought begins with; mostly nothing.
    pub header: Vec<u32>,
    /// What stands between a thought and an answer of a certain shape.
    pub gap: Vec<u32>,
    /// Most tokens of a thought, delimiters not counted.
    pub max_tokens: Option<u32>,
    /// What ends a longer thought: `close` is its end.
    pub end: Vec<u32>,
    /// What follows `end`.
    pub end_gap: Vec<u32>,
    /// Control tokens, ascending: behind one of them a thought of the prompt is no longer the last word.
    pub control: Vec<u32>,
}

/// How a completion begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// The prompt has opened a thought.
    Thought,
    /// The prompt has closed its thought.
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

    /// How many of the closing delimiter's tokens a thought ends with, short of all.
    fn closing(&self, thought: &[u32]) -> usize {
        let most = thought.len().min(self.close.len() - 1);
        let begun = |n: &usize| thought.ends_with(&self.close[..*n]);
        (1..=most).rev().find(begun).unwrap_or(0)
    }
}

/// What a completion's thought was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Thought {
    /// Without the white space around it.
    pub text: String,
    /// Without its delimiters.
    pub tokens: u32,
    /// Did it come to its end?
    pub closed: bool,
}

/// Where a completion stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// It holds white space at most and tokens that a thought or an answer is opened with: it may think.
    Start,
    Thought,
    /// So many tokens are to be forced before the answer.
    Gap(usize),
    Answer,
}

/// What a token has done to the answer's text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Spelled {
    /// It is no part of it, so far.
    Nothing,
    /// The completion's tokens from here on are.
    From(usize),
    /// What there was is none.
    Cleared,
}

/// The way of one completion through thought and answer. The default has no thought.
#[derive(Debug)]
pub(super) struct Course {
    /// `None`: the model does not think.
    thinking: Option<Arc<Thinking>>,
    /// Has the answer a shape?
    shaped: bool,
    phase: Phase,
    /// While in `Start`: the completion's first token that may belong to a delimiter.
    from: usize,
    /// The thought's tokens in the completion; its end is known once it is closed.
    thought: Option<Range<usize>>,
    /// Was it ended by force?
    forced: bool,
}

impl Course {
    pub fn new(thinking: Option<Arc<Thinking>>, prompt: &[u32], shaped: bool) -> Course {
        let begin = thinking.as_ref().map_or(Begin::Answer, |t| t.begin(prompt));
        Course {
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

    /// Is what comes next the answer, whatever it is?
    pub fn answers(&self) -> bool {
        self.phase == Phase::Answer
    }

    /// May the next token, but need not, be the answer's first?
    pub fn may_answer(&self) -> bool {
        self.phase == Phase::Start
    }

    /// Is it inside a thought, or between it and the answer?
    pub fn thinks(&self) -> bool {
        matches!(self.phase, Phase::Thought | Phase::Gap(_))
    }

    /// Has there been a thought, or is there one?
    pub fn thought(&self) -> bool {
        self.thought.is_some()
    }

    /// The answer begins with the token that comes next.
    pub fn answer(&mut self) {
        self.phase = Phase::Answer;
    }

    /// At the start of a completion with a shape: the tokens that delimiters go on with, and may the answer itself begin instead?
    pub fn openings(&self, completion: &[u32]) -> (SmallVec<[u32; 2]>, bool) {
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

    /// Does this token go on with what opens a thought or an answer?
    pub fn opens(&self, completion: &[u32], token: u32) -> bool {
        self.phase == Phase::Start && self.openings(completion).0.contains(&token)
    }

    /// Does this token go on with what ends the thought?
    pub fn closes(&self, completion: &[u32], token: u32) -> bool {
        let (Phase::Thought, Some(thinking), Some(thought)) = (self.phase, &self.thinking, &self.thought) else {
            return false;
        };
        thinking.close[thinking.closing(&completion[thought.start..])] == token
    }

    /// Tokens that are certain to come next; none where the model has a say, or the answer has begun.
    pub fn certain(&mut self, completion: &[u32]) -> Vec<u32> {
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

    /// What stands between thought and answer for certain.
    fn gap(&self) -> &[u32] {
        match &self.thinking {
            Some(thinking) if self.forced => &thinking.end_gap,
            Some(thinking) if self.shaped => &thinking.gap,
            _ => &[],
        }
    }

    /// Takes the last token of `completion`, which has come before the answer or at its beginning.
    pub fn take(&mut self, completion: &[u32], tokenizer: &Tokenizer) -> Spelled {
        let last = completion.len() - 1;
        let Some(thinking) = &self.thinking else {
            return Spelled::From(last);
        };
        match self.phase {
            Phase::Answer => return Spelled::From(last),
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
                    return Spelled::Cleared;
                }
                if begun == thinking.header {
                    self.phase = Phase::Answer;
                    return Spelled::Cleared;
                }
                if !thinking.open.starts_with(begun) && !thinking.header.starts_with(begun) {
                    let held = self.from;
                    let is_space = |token: &u32| {
                        let bytes = tokenizer.token_bytes(*token);
                        !bytes.is_empty() && bytes.iter().all(u8::is_ascii_whitespace)
                    };
                    match begun.iter().all(is_space) {
                        true => self.from = completion.len(),
                        false => self.phase = Phase::Answer,
                    }
                    return Spelled::From(held);
                }
            }
        }
        Spelled::Nothing
    }

    /// The thought of a completion that has ended; `None`: it had none.
    pub fn finish(&self, completion: &[u32], tokenizer: &Tokenizer) -> Option<Thought> {
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
