//! A sequence as the [scheduler](crate::engine::scheduler) sees it.

use std::sync::Arc;

use crate::engine::blocks::BlockKey;
use crate::engine::kv::BlockTables;
use crate::engine::plan::SequenceId;

/// Orders sequences, oldest first: number in the order of starting, then number of the fork.
pub(super) type Age = (u64, u64);

/// Determines the sequences with which a sequence may share blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sharing {
    /// Whether its results must be bitwise independent of other sequences.
    pub deterministic: bool,
    /// The number of the adapter that changes the model for it; 0: none does.
    pub adapter: u32,
    /// The parent key of its first block.
    pub root: BlockKey,
}

/// The scheduler's state of a sequence.
#[derive(Debug, Clone)]
pub(super) struct Sequence {
    pub(super) id: SequenceId,
    pub(super) age: Age,
    /// The prompt, until the sequence is started for the first time: samples of one row share it
    /// while they wait.
    pub(super) prompt: Option<Arc<[u32]>>,
    /// Prompt (unless it is in `prompt`) and completion so far.
    pub(super) tokens: Vec<u32>,
    /// If the last of `tokens` is a placeholder: the row of the step's logits from which the token
    /// is drawn.
    pub(super) placeholder_row: Option<u32>,
    /// Maximum tokens that will be added; used only to order the window.
    pub(super) max_tokens: u32,
    pub(super) sharing: Sharing,
    /// Number of tokens whose keys and values are computed once the planned step has run; they are
    /// in `tables`, except for those behind a window.
    pub(super) computed_tokens: usize,
    pub(super) tables: BlockTables,
    /// The slot of its recurrent state, while it runs. The state is that of `computed_tokens` tokens
    /// once the planned step has run.
    pub(super) state: Option<u32>,
    /// Number of tokens, more than `computed_tokens`, after which its state is to be kept for others.
    /// Always whole blocks.
    pub(super) keep_state_at: Option<usize>,
    /// Keys of its first full blocks, computed when needed.
    pub(super) keys: Vec<BlockKey>,
    /// Whether it has been started before (and preempted since).
    pub(super) was_started: bool,
}

impl Sequence {
    /// Moves the prompt into `tokens`.
    pub(super) fn merge_prompt(&mut self) {
        if let Some(prompt) = self.prompt.take() {
            self.tokens.splice(0..0, prompt.iter().copied());
        }
    }

    /// The tokens that it begins with: its prompt, or all of them once these are in `tokens`.
    pub(super) fn first_tokens(&self) -> &[u32] {
        self.prompt.as_deref().unwrap_or(&self.tokens)
    }

    /// Number of tokens that are not yet computed.
    pub(super) fn pending_tokens(&self) -> usize {
        self.tokens.len() - self.computed_tokens
    }

    /// Number of leading tokens that are known.
    pub(super) fn known_tokens(&self) -> usize {
        self.tokens.len() - usize::from(self.placeholder_row.is_some())
    }

    /// Whether it begins with the first `tokens` tokens of `other` and may share them.
    pub(super) fn shares(&self, other: &Sequence, tokens: usize) -> bool {
        let own = self.first_tokens();
        self.sharing == other.sharing && own.len() > tokens && own[..tokens] == other.tokens[..tokens]
    }

    /// Computes the keys of its first `blocks` blocks, which must be full.
    pub(super) fn compute_keys(&mut self, blocks: usize, block_tokens: usize) {
        while self.keys.len() < blocks {
            let parent = self.keys.last().unwrap_or(&self.sharing.root);
            let from = self.keys.len() * block_tokens;
            self.keys.push(parent.child(&self.tokens[from..from + block_tokens]));
        }
    }
}
