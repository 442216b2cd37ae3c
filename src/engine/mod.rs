//! Continuous batching over paged KV: schedule → begin a step → draw → advance.
//!
//! [`run`] is the loop. [`scheduler`] (with [`packing`], [`kv`] and [`blocks`]) plans the tokens that a
//! step computes, and never sees a tensor. [`sequence`] (with [`constraint`], [`choice`] and
//! [`forbidden`]) turns a completion's state into sampling settings and processes the drawn token;
//! it never sees a block. The engine names no queue, ledger, dataset or store.

pub mod blocks;
pub mod choice;
pub mod constraint;
pub mod forbidden;
pub mod generate;
pub mod ids;
pub mod kv;
mod options;
pub mod packing;
pub mod params;
pub mod philox;
pub mod plan;
pub mod request;
pub mod run;
mod scheduled;
pub mod scheduler;
pub mod sequence;
mod shapes;
pub mod states;
pub mod thinking;
pub mod totals;
pub mod vocabulary;
mod work;

pub use generate::{EngineError, Generator};
pub use options::EngineOptions;
pub use request::RequestError;
pub use run::Engine;

use std::time::Duration;

use crate::device::batch::StepBatch;
use crate::device::draw::{Draw, DrawError, DrawnToken};
use crate::device::{DeviceError, KvSpec};

/// The interface of the model to the engine. Implemented by `model::Transformer`; tests use a fake
/// model.
///
/// In each layer, keys and values of all tokens of a step are stored before the attention of that
/// layer runs, so a sequence may attend to blocks that another sequence of the same step fills.
pub trait Forward {
    /// Begins one step. Its logits are those of `batch.logits_at`.
    ///
    /// # Errors
    /// After out of memory, here or in [`draw`](Self::draw), the step's results are lost. Tokens
    /// drawn from the step before can still be taken, and smaller steps may run. After any other
    /// error the model is unusable.
    fn begin(&mut self, batch: &StepBatch) -> Result<(), ForwardError>;
    /// Begins to draw one token from each row of the last step's logits. `draws` holds the sampling
    /// settings in the order of the rows; only ids below `id_limit` are drawn.
    ///
    /// If the model cannot compute a row, the row holds NaN or infinity, and drawing reports that.
    /// The other rows are valid.
    fn draw(&mut self, id_limit: usize, draws: &[Draw<'_>]) -> Result<(), ForwardError>;
    /// Takes the tokens of the last [`draw`](Self::draw). May be called once per draw.
    fn take_drawn(&mut self) -> Result<Vec<Result<DrawnToken, DrawError>>, ForwardError>;
    /// Whether the next step may begin before [`take_drawn`](Self::take_drawn) is called, with
    /// tokens that are still unknown ([`StepBatch::pending_tokens`]).
    fn runs_ahead(&self) -> bool {
        false
    }
    /// Number of ids that may be sampled, `0..vocab_size()`: the model's vocabulary without its
    /// padding.
    fn vocab_size(&self) -> usize;
    /// Maximum length of a sequence (prompt + completion) in tokens.
    fn context_tokens(&self) -> u32;
    /// Number of KV blocks in the pool.
    fn kv_blocks(&self) -> u32;
    /// The block tables of a sequence: for each, which keys its layers see. A block belongs to one
    /// table at a time.
    fn kv_tables(&self) -> &[KvSpec] {
        &[KvSpec::Full]
    }
    /// Number of slots for the states of recurrent layers: so many sequences can run at once. `None`:
    /// the model has no such layers.
    fn state_slots(&self) -> Option<u32> {
        None
    }
    /// Tokens per KV block.
    fn block_tokens(&self) -> u32;
    /// Maximum tokens per step, if the device's memory limits them.
    fn step_tokens_max(&self) -> Option<u32> {
        None
    }
    /// Frees the memory that earlier steps allocated, because smaller steps follow. All drawn
    /// tokens must have been taken.
    fn free_step_memory(&mut self) {}
    /// Measures the time of each operation from now on. If that needs waiting for each operation,
    /// the model waits.
    fn time_operations(&mut self) {}
    /// Time spent so far by kind of operation; empty where it is unknown.
    fn operation_times(&self) -> Vec<(&'static str, Duration)> {
        Vec::new()
    }
}

/// The reason why a step could not run: the device or the caller, but never a single row.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    #[error("the model's step cannot be run: {0}")]
    Batch(String),
    #[error("the model's step failed: {0}")]
    Device(#[from] DeviceError),
}
