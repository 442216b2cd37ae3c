//! The order in which waiting prompts are started.
//!
//! Prompts that begin with the same blocks are adjacent, so that their shared blocks are computed
//! once and are not evicted in between. The group with the longest row comes first, so that a
//! window (the waiting prompts that are ordered together) does not end with one long row running
//! alone. The window is treated as a tree, in which prompts with the same first blocks form a
//! branch, and is walked depth first. At each node the branch or prompt with the longest row goes
//! first; among equal ones, the one with the earliest prompt.
//!
//! The scheduler fills each step up to its token budget in this order, cutting prompts into chunks.

use std::cmp::Reverse;

/// The properties of a waiting prompt that determine its position in the order.
#[derive(Debug, Clone, Copy)]
pub struct WaitingPrompt<'a> {
    pub prompt: &'a [u32],
    /// Maximum tokens of its completion.
    pub max_tokens: u32,
}

impl WaitingPrompt<'_> {
    /// Maximum tokens of prompt and completion together.
    fn length(&self) -> usize {
        self.prompt.len() + self.max_tokens as usize
    }
}

/// Adjacent prompts in sorted order.
struct Branch {
    from: usize,
    to: usize,
}

/// The order in which to start the prompts of `window`: a permutation of its indices. Only whole
/// blocks count as shared.
///
/// A pure function of its inputs.
pub fn order(window: &[WaitingPrompt], block_tokens: usize) -> Vec<usize> {
    let mut sorted: Vec<usize> = (0..window.len()).collect();
    sorted.sort_unstable_by(|a, b| window[*a].prompt.cmp(window[*b].prompt).then(a.cmp(b)));
    // Whole blocks that each prompt shares with the one before it in sorted order.
    let shared: Vec<usize> = (0..sorted.len())
        .map(|i| match i {
            0 => 0,
            i => common_prefix(window[sorted[i - 1]].prompt, window[sorted[i]].prompt) / block_tokens,
        })
        .collect();
    let mut ordered = Vec::with_capacity(window.len());
    let mut stack = vec![Branch {
        from: 0,
        to: sorted.len(),
    }];
    while let Some(Branch { from, to }) = stack.pop() {
        if to - from <= 1 {
            ordered.extend(&sorted[from..to]);
            continue;
        }
        // Splitting where neighbours share the fewest blocks cuts at least once, and never inside a
        // group that shares more.
        let fewest = shared[from + 1..to].iter().copied().min().unwrap_or(0);
        let mut parts = split(&shared, from, to, fewest);
        parts.sort_by_key(|part| {
            let rows = &sorted[part.from..part.to];
            let longest = rows.iter().map(|i| window[*i].length()).max();
            (Reverse(longest), rows.iter().min().copied())
        });
        stack.extend(parts.into_iter().rev());
    }
    ordered
}

/// Cuts a branch where neighbours share at most `max_shared` blocks.
fn split(shared: &[usize], from: usize, to: usize, max_shared: usize) -> Vec<Branch> {
    let mut parts = Vec::new();
    let mut start = from;
    for (cut, _) in shared[..to]
        .iter()
        .enumerate()
        .skip(from + 1)
        .filter(|(_, shared)| **shared <= max_shared)
    {
        parts.push(Branch { from: start, to: cut });
        start = cut;
    }
    parts.push(Branch { from: start, to });
    parts
}

/// Number of tokens with which both begin.
pub fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(x, y)| x == y).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn order_of(prompts: &[&[u32]], block_tokens: usize) -> Vec<usize> {
        let window: Vec<WaitingPrompt> = prompts
            .iter()
            .map(|p| WaitingPrompt {
                prompt: p,
                max_tokens: 1,
            })
            .collect();
        order(&window, block_tokens)
    }

    #[test]
    fn groups_stay_together_and_long_rows_lead() {
        let prompts: [&[u32]; 6] = [
            &[1, 1, 5],
            &[2, 2, 5, 5, 5],
            &[1, 1, 6, 6],
            &[9],
            &[2, 2, 6],
            &[1, 1, 7, 7, 7, 7],
        ];
        assert_eq!(order_of(&prompts, 2), [5, 2, 0, 1, 4, 3]);
    }

    #[test]
    fn a_row_is_as_long_as_its_prompt_and_its_longest_answer() {
        let waiting = |prompt: &'static [u32], max_tokens| WaitingPrompt { prompt, max_tokens };
        let window = [waiting(&[1, 2, 3], 5), waiting(&[4], 8), waiting(&[5, 6], 2)];
        assert_eq!(order(&window, 16), [1, 0, 2]);
    }

    #[test]
    fn less_than_a_block_is_not_a_group() {
        assert_eq!(order_of(&[&[1, 1, 5], &[2, 2, 5, 5], &[1, 1, 6, 6, 6]], 16), [2, 1, 0]);
    }

    #[test]
    fn identical_prompts_keep_their_order() {
        assert_eq!(order_of(&[&[1, 2], &[1, 2], &[1, 2]], 1), [0, 1, 2]);
        assert_eq!(order_of(&[], 16), Vec::<usize>::new());
    }

    #[test]
    fn ever_deeper_prefixes_do_not_recurse() {
        let long: Vec<u32> = (0..5000).collect();
        let prompts: Vec<&[u32]> = (1..5000).map(|n| &long[..n]).collect();
        let ordered = order_of(&prompts, 1);
        assert_eq!(ordered[0], 4998, "the longest leads");
    }

    proptest! {
        #[test]
        fn every_prompt_once_and_groups_contiguous(
            prompts in prop::collection::vec(prop::collection::vec(0u32..3, 1..12), 0..40),
            block in 1usize..4,
        ) {
            let window: Vec<WaitingPrompt> =
                prompts.iter().enumerate().map(|(i, p)| WaitingPrompt { prompt: p, max_tokens: (i % 5) as u32 }).collect();
            let ordered = order(&window, block);
            let mut once = ordered.clone();
            once.sort_unstable();
            prop_assert_eq!(once, (0..prompts.len()).collect::<Vec<_>>());
            prop_assert_eq!(&ordered, &order(&window, block), "same input, same answer");
            // For every depth: prompts with the same first blocks are neighbours.
            for depth in 1..4 {
                let heads: Vec<Option<&[u32]>> = ordered.iter().map(|i| prompts[*i].get(..depth * block)).collect();
                let mut seen = std::collections::HashSet::new();
                for (i, head) in heads.iter().enumerate() {
                    if let Some(head) = head && (i == 0 || heads[i - 1] != Some(head)) {
                        prop_assert!(seen.insert(*head), "group {:?} is torn apart", head);
                    }
                }
            }
        }
    }
}
