//! Tokens that a completion must not contain: anywhere, as its first token, or (tokens that would
//! end it) before it reaches a minimum length.
//!
//! Checkpoints request them by `suppress_tokens`, `begin_suppress_tokens`, `bad_words_ids`,
//! `min_new_tokens` and `min_length`. Such tokens are masked out before any other processing of the
//! logits. Two kinds stay allowed under a grammar: tokens that end the text, since the grammar
//! decides where the text may end, and forced tokens. Choices are not masked: a choice that needs a
//! forbidden token is refused ([`ForbiddenTokens::check_choices`]).
//!
//! See docs/decisions/053-forbidden-tokens-are-a-mask.md.

use serde::{Deserialize, Serialize};

use crate::engine::constraint::{Constraint, ConstraintError};

/// Tokens that must not be drawn. The default forbids nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForbiddenTokens {
    /// Tokens that are forbidden everywhere.
    pub tokens: Vec<u32>,
    /// Tokens that are forbidden as the first token of a completion.
    pub first: Vec<u32>,
    /// Minimum tokens of a completion before it may end.
    pub min_new_tokens: u32,
    /// Minimum tokens of prompt and completion together before the completion may end.
    pub min_length: u32,
}

impl ForbiddenTokens {
    /// Whether nothing is forbidden.
    pub fn is_empty(&self) -> bool {
        *self == ForbiddenTokens::default()
    }

    /// Whether a completion of this length must not end yet.
    fn must_continue(&self, prompt_tokens: usize, completion_tokens: usize) -> bool {
        completion_tokens < self.min_new_tokens as usize || prompt_tokens + completion_tokens < self.min_length as usize
    }

    /// Checks that no choice needs a token that is forbidden at its position.
    ///
    /// # Errors
    /// A choice needs a forbidden token. The error names the first such choice and the token.
    pub fn check_choices(&self, constraint: &Constraint) -> Result<(), ConstraintError> {
        let Constraint::Choice { choices, .. } = constraint else {
            return Ok(());
        };
        for (text, path) in choices.texts_and_tokens() {
            let first = path.first().filter(|token| self.first.contains(token));
            if let Some(&token) = path.iter().find(|token| self.tokens.contains(token)).or(first) {
                return Err(ConstraintError::Forbidden {
                    text: text.to_owned(),
                    token,
                });
            }
        }
        Ok(())
    }
}

/// The properties of a position in a completion that determine its forbidden tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Position {
    is_first: bool,
    /// Whether tokens that end the completion are masked out.
    must_continue: bool,
    /// Whether a grammar applies, whose mask omits ids without a token.
    has_grammar: bool,
}

/// The tokens that are masked out at a completion's current position.
#[derive(Debug, Default)]
pub(super) struct BannedTokens {
    /// The position for which `ids` was computed.
    position: Option<Position>,
    /// Banned ids, ascending. Without a grammar, they include ids without a token.
    ids: Vec<u32>,
    /// The grammar's mask without `ids`.
    mask: Vec<u32>,
}

impl BannedTokens {
    /// Computes [`ids`](Self::ids) for a completion without a grammar. `unused_ids`: ids without a
    /// token. `ends`: tokens that end the completion.
    pub(super) fn prepare<'a>(
        &mut self,
        forbidden: &ForbiddenTokens,
        prompt_tokens: usize,
        completion_tokens: usize,
        unused_ids: &[u32],
        ends: impl Iterator<Item = &'a u32>,
    ) {
        let position = Position {
            is_first: completion_tokens == 0,
            must_continue: forbidden.must_continue(prompt_tokens, completion_tokens),
            has_grammar: false,
        };
        self.update_ids(forbidden, position, unused_ids, ends);
    }

    /// Computes [`mask`](Self::mask) for a completion whose grammar allows `mask`. Ids of `eos`
    /// stay allowed.
    pub(super) fn prepare_mask(
        &mut self,
        forbidden: &ForbiddenTokens,
        completion_tokens: usize,
        mask: &[u32],
        eos: &[u32],
    ) {
        let position = Position {
            is_first: completion_tokens == 0,
            must_continue: false,
            has_grammar: true,
        };
        self.update_ids(forbidden, position, &[], std::iter::empty());
        self.mask.clear();
        self.mask.extend(mask);
        for id in self.ids.iter().filter(|id| !eos.contains(id)) {
            if let Some(word) = self.mask.get_mut(*id as usize / 32) {
                *word &= !(1 << (id % 32));
            }
        }
    }

    fn update_ids<'a>(
        &mut self,
        forbidden: &ForbiddenTokens,
        position: Position,
        unused_ids: &[u32],
        ends: impl Iterator<Item = &'a u32>,
    ) {
        // The ids change only after the first token and once the completion is long enough.
        if self.position.replace(position) == Some(position) {
            return;
        }
        self.ids.clear();
        self.ids.extend(unused_ids.iter().chain(&forbidden.tokens));
        if position.is_first {
            self.ids.extend(&forbidden.first);
        }
        if position.must_continue {
            self.ids.extend(ends);
        }
        self.ids.sort_unstable();
        self.ids.dedup();
    }

    pub(super) fn ids(&self) -> &[u32] {
        &self.ids
    }

    pub(super) fn mask(&self) -> &[u32] {
        &self.mask
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mask is reused between a grammar's answer and a thought, in either order.
    #[test]
    fn unused_ids_are_banned_without_a_grammar() {
        let forbidden = ForbiddenTokens {
            tokens: vec![2, 5],
            ..ForbiddenTokens::default()
        };
        let mut banned = BannedTokens::default();
        banned.prepare_mask(&forbidden, 1, &[u32::MAX], &[2]);
        banned.prepare(&forbidden, 4, 1, &[90], std::iter::empty());
        assert_eq!(banned.ids(), [2, 5, 90]);
        banned.prepare_mask(&forbidden, 1, &[u32::MAX], &[2]);
        // The grammar decides where a text may end: token 2 ends it and stays allowed.
        assert_eq!((banned.ids(), banned.mask()), (&[2, 5][..], &[!(1 << 5)][..]));
    }

    #[test]
    fn banned_ids_depend_on_the_position() {
        let forbidden = ForbiddenTokens {
            tokens: vec![5],
            first: vec![7],
            min_new_tokens: 2,
            min_length: 6,
        };
        let banned_at = |prompt, completion| {
            let mut banned = BannedTokens::default();
            banned.prepare(&forbidden, prompt, completion, &[90], [1, 2].iter());
            banned.ids().to_vec()
        };
        assert_eq!(banned_at(9, 0), [1, 2, 5, 7, 90]);
        assert_eq!(banned_at(9, 1), [1, 2, 5, 90]);
        assert_eq!(banned_at(9, 2), [5, 90]);
        assert_eq!(
            banned_at(1, 4),
            [1, 2, 5, 90],
            "prompt and completion have five tokens together, and need six"
        );
        assert_eq!(banned_at(1, 5), [5, 90]);
    }

    #[test]
    fn banned_ids_follow_the_position() {
        let forbidden = ForbiddenTokens {
            first: vec![7],
            min_new_tokens: 2,
            ..ForbiddenTokens::default()
        };
        let mut banned = BannedTokens::default();
        for (completion, ids) in [(0, vec![1, 7]), (1, vec![1]), (2, vec![]), (3, vec![])] {
            banned.prepare(&forbidden, 4, completion, &[], [1].iter());
            assert_eq!(banned.ids(), ids, "{completion}");
        }
    }

    #[test]
    fn a_grammar_keeps_its_end_of_sequence_ids() {
        let forbidden = ForbiddenTokens {
            tokens: vec![1, 2, 70, 900],
            first: vec![3],
            min_new_tokens: 9,
            min_length: 0,
        };
        let mut banned = BannedTokens::default();
        banned.prepare_mask(&forbidden, 0, &[0b1111, 0, u32::MAX], &[2]);
        assert_eq!(banned.mask(), [0b0101, 0, !(1 << 6)]);
        banned.prepare_mask(&forbidden, 1, &[0b1111, 0, 0], &[2]);
        assert_eq!(banned.mask(), [0b1101, 0, 0]);
    }
}
