//! Tokens that a completion must not hold: everywhere, at its beginning, or (those that would end it) before it is long enough.
//!
//! They are what checkpoints ask for in `suppress_tokens`, `begin_suppress_tokens`, `bad_words_ids`, `min_new_tokens` and
//! `min_length`. They are out before anything else happens to the logits. Under a grammar the ends stay allowed, since the grammar
//! says where a text may end, and so do tokens that it leaves no choice about. A choice is left as it is: one that would need
//! a forbidden token is refused ([`Forbidden::clash`]).
//!
//! See docs/decisions/053-forbidden-tokens-are-a-mask.md.

use serde::{Deserialize, Serialize};

use crate::engine::constraint::{Constraint, ConstraintError};

/// What must not be drawn. The default forbids nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forbidden {
    /// Nowhere.
    pub tokens: Vec<u32>,
    /// Not as the first token of a completion.
    pub first: Vec<u32>,
    /// No end before the completion has so many tokens.
    pub min_new_tokens: u32,
    /// No end before prompt and completion have so many tokens together.
    pub min_length: u32,
}

impl Forbidden {
    /// Is nothing forbidden?
    pub fn is_empty(&self) -> bool {
        *self == Forbidden::default()
    }

    /// May a completion of so many tokens not end yet?
    fn keeps_on(&self, prompt: usize, completion: usize) -> bool {
        completion < self.min_new_tokens as usize || prompt + completion < self.min_length as usize
    }

    /// Does one of the choices need a token that is forbidden where it stands?
    ///
    /// # Errors
    /// The choice, and the token.
    pub fn clash(&self, constraint: &Constraint) -> Result<(), ConstraintError> {
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

/// What is out at the place that a completion has come to.
#[derive(Debug, Default)]
pub(super) struct Out {
    /// Is it the first token, may it not be an end, and is a grammar's mask without ids that no token has? `ids` is for this.
    at: Option<(bool, bool, bool)>,
    /// Ascending; without a grammar, ids that no token has are among them.
    ids: Vec<u32>,
    /// What a grammar allows without them.
    mask: Vec<u32>,
}

impl Out {
    /// Readies [`ids`](Self::ids) for a completion without a grammar. `holes`: ids that no token has; `ends`: those that end it.
    pub fn prepare<'a>(
        &mut self,
        forbidden: &Forbidden,
        (prompt, completion): (usize, usize),
        holes: &[u32],
        ends: impl Iterator<Item = &'a u32>,
    ) {
        let keeps_on = forbidden.keeps_on(prompt, completion);
        self.gather(forbidden, (completion == 0, keeps_on, false), holes, ends);
    }

    /// Readies [`mask`](Self::mask) for a completion whose grammar allows `mask`; `eos` stays in it.
    pub fn prepare_mask(&mut self, forbidden: &Forbidden, completion: usize, mask: &[u32], eos: &[u32]) {
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
        holes: &[u32],
        ends: impl Iterator<Item = &'a u32>,
    ) {
        // It changes after the first token and where the completion is long enough, and at no other place.
        if self.at.replace(at) == Some(at) {
            return;
        }
        self.ids.clear();
        self.ids.extend(holes.iter().chain(&forbidden.tokens));
        if at.0 {
            self.ids.extend(&forbidden.first);
        }
        if at.1 {
            self.ids.extend(ends);
        }
        self.ids.sort_unstable();
        self.ids.dedup();
    }

    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    pub fn mask(&self) -> &[u32] {
        &self.mask
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The answer of a grammar may be followed by a thought, and the other way round.
    #[test]
    fn ids_that_no_token_has_are_out_without_a_grammar() {
        let forbidden = Forbidden {
            tokens: vec![2, 5],
            ..Forbidden::default()
        };
        let mut out = Out::default();
        out.prepare_mask(&forbidden, 1, &[u32::MAX], &[2]);
        out.prepare(&forbidden, (4, 1), &[90], std::iter::empty());
        assert_eq!(out.ids(), [2, 5, 90]);
        out.prepare_mask(&forbidden, 1, &[u32::MAX], &[2]);
        // A grammar says itself where a text may end: 2 ends it, and stays.
        assert_eq!((out.ids(), out.mask()), (&[2, 5][..], &[!(1 << 5)][..]));
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
            let mut out = Out::default();
            out.prepare(&forbidden, (prompt, completion), &[90], [1, 2].iter());
            out.ids().to_vec()
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
        let mut out = Out::default();
        for (completion, ids) in [(0, vec![1, 7]), (1, vec![1]), (2, vec![]), (3, vec![])] {
            out.prepare(&forbidden, (4, completion), &[], [1].iter());
            assert_eq!(out.ids(), ids, "{completion}");
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
        let mut out = Out::default();
        out.prepare_mask(&forbidden, 0, &[0b1111, 0, u32::MAX], &[2]);
        assert_eq!(out.mask(), [0b0101, 0, !(1 << 6)]);
        out.prepare_mask(&forbidden, 1, &[0b1111, 0, 0], &[2]);
        assert_eq!(out.mask(), [0b1101, 0, 0]);
    }
}
