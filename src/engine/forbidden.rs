//! Tokens that a completion must not contain: anywhere, as its first token, or (tokens that would
//! end it) before it reaches a minimum length.
//!
//! Checkpoints ask for them by `suppress_tokens`, `begin_suppress_tokens`, `bad_words_ids`,
//! `min_new_tokens` and `min_length`. They are masked out before any other processing of the
//! logits. Two kinds stay allowed under a grammar: tokens that end the text, since the grammar
//! decides where it may end, and forced tokens. A choice is never masked; one that would need a
//! forbidden token is refused ([`Forbidden::check_choices`]).
//!
//! See docs/decisions/053-forbidden-tokens-are-a-mask.md.

use serde::{Deserialize, Serialize};

use crate::engine::constraint::{Constraint, ConstraintError};

/// Tokens that must not be drawn. The default forbids nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forbidden {
    /// Forbidden everywhere.
    pub tokens: Vec<u32>,
    /// Forbidden as the first token of a completion.
    pub first: Vec<u32>,
    /// Minimum tokens of a completion before it may end.
    pub min_new_tokens: u32,
    /// Minimum tokens of prompt and completion together before the completion may end.
    pub min_length: u32,
}

impl Forbidden {
    /// Whether nothing is forbidden.
    pub fn is_empty(&self) -> bool {
        *self == Forbidden::default()
    }

    /// Whether a completion of this length must go on.
    fn must_continue(&self, prompt: usize, completion: usize) -> bool {
        completion < self.min_new_tokens as usize || prompt + completion < self.min_length as usize
    }

    /// Checks that each choice can be spelled without tokens that are forbidden at their position.
    ///
    /// # Errors
    /// The first choice that needs a forbidden token, and that token.
    pub fn check_choices(&self, constraint: &Constraint) -> Result<(), ConstraintError> {
        let Constraint::Choice { choices, .. } = constraint else {
            return Ok(());
        };
        for (text, path) in choices.spelled() {
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

/// The tokens that are masked out at a completion's current position.
#[derive(Debug, Default)]
pub(super) struct BannedTokens {
    /// The position that `ids` was computed for: whether it is the first token, whether tokens that
    /// end the completion are masked out, and whether a grammar applies (whose mask omits ids
    /// without a token).
    at: Option<(bool, bool, bool)>,
    /// Ascending. Without a grammar, ids without a token are included.
    ids: Vec<u32>,
    /// The grammar's mask without `ids`.
    mask: Vec<u32>,
}

impl BannedTokens {
    /// Computes [`ids`](Self::ids) for a completion without a grammar. `unused_ids`: ids without a
    /// token. `ends`: tokens that end the completion.
    pub(super) fn prepare<'a>(
        &mut self,
        forbidden: &Forbidden,
        (prompt, completion): (usize, usize),
        unused_ids: &[u32],
        ends: impl Iterator<Item = &'a u32>,
    ) {
        let must_continue = forbidden.must_continue(prompt, completion);
        self.gather(forbidden, (completion == 0, must_continue, false), unused_ids, ends);
    }

    /// Computes [`mask`](Self::mask) for a completion whose grammar allows `mask`; `eos` stays in
    /// it.
    pub(super) fn prepare_mask(&mut self, forbidden: &Forbidden, completion: usize, mask: &[u32], eos: &[u32]) {
        self.gather(forbidden, (completion == 0, false, true), &[], std::iter::empty());
        self.mask.clear();
        self.mask.extend(mask);
        for id in self.ids.iter().filter(|id| !eos.contains(id)) {
            if let Some(word) = self.mask.get_mut(*id as usize / 32) {
                *word &= !(1 << (id % 32));
            }
        }
    }

    fn gather<'a>(
        &mut self,
        forbidden: &Forbidden,
        at: (bool, bool, bool),
        unused_ids: &[u32],
        ends: impl Iterator<Item = &'a u32>,
    ) {
        // The ids change only after the first token and where the completion becomes long enough.
        if self.at.replace(at) == Some(at) {
            return;
        }
        self.ids.clear();
        self.ids.extend(unused_ids.iter().chain(&forbidden.tokens));
        if at.0 {
            self.ids.extend(&forbidden.first);
        }
        if at.1 {
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
    fn ids_that_no_token_has_are_out_without_a_grammar() {
        let forbidden = Forbidden {
            tokens: vec![2, 5],
            ..Forbidden::default()
        };
        let mut banned = BannedTokens::default();
        banned.prepare_mask(&forbidden, 1, &[u32::MAX], &[2]);
        banned.prepare(&forbidden, (4, 1), &[90], std::iter::empty());
        assert_eq!(banned.ids(), [2, 5, 90]);
        banned.prepare_mask(&forbidden, 1, &[u32::MAX], &[2]);
        // The grammar decides where a text may end: token 2 ends it and stays allowed.
        assert_eq!((banned.ids(), banned.mask()), (&[2, 5][..], &[!(1 << 5)][..]));
    }

    #[test]
    fn what_is_out_depends_on_the_place() {
        let forbidden = Forbidden {
            tokens: vec![5],
            first: vec![7],
            min_new_tokens: 2,
            min_length: 6,
        };
        let out_at = |prompt, completion| {
            let mut banned = BannedTokens::default();
            banned.prepare(&forbidden, (prompt, completion), &[90], [1, 2].iter());
            banned.ids().to_vec()
        };
        assert_eq!(out_at(9, 0), [1, 2, 5, 7, 90]);
        assert_eq!(out_at(9, 1), [1, 2, 5, 90]);
        assert_eq!(out_at(9, 2), [5, 90]);
        assert_eq!(
            out_at(1, 4),
            [1, 2, 5, 90],
            "prompt and completion have five tokens of six"
        );
        assert_eq!(out_at(1, 5), [5, 90]);
    }

    #[test]
    fn one_place_after_the_other() {
        let forbidden = Forbidden {
            first: vec![7],
            min_new_tokens: 2,
            ..Forbidden::default()
        };
        let mut banned = BannedTokens::default();
        for (completion, ids) in [(0, vec![1, 7]), (1, vec![1]), (2, vec![]), (3, vec![])] {
            banned.prepare(&forbidden, (4, completion), &[], [1].iter());
            assert_eq!(banned.ids(), ids, "{completion}");
        }
    }

    #[test]
    fn a_grammar_keeps_its_ends() {
        let forbidden = Forbidden {
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
