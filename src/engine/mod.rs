//! Continuous batching over paged KV: schedule → begin a step → draw → advance.
//!
//! [`run`] is the loop. [`scheduler`] (with [`packing`] and [`blocks`]) plans which tokens a step
//! computes and never sees a tensor. [`sequence`] (with [`constraint`], [`choice`] and
//! [`forbidden`]) turns a completion's state into sampling settings and takes the drawn token; it
//! never sees a block. The engine names no queue, ledger, dataset or store.

pub mod blocks;
pub mod choice;
pub mod constraint;
pub mod forbidden;
pub mod generate;
pub mod ids;
mod options;
pub mod packing;
pub mod params;
pub mod philox;
pub mod request;
pub mod run;
pub mod scheduler;
pub mod sequence;
mod shapes;
pub mod thinking;
pub mod totals;
pub mod vocabulary;
mod work;

pub use generate::Generator;
pub use options::EngineOptions;
pub use run::{Engine, EngineError, RequestError};

use std::time::Duration;

use crate::device::DeviceError;
use crate::device::batch::StepBatch;
use crate::device::draw::{Draw, DrawError, Drawn};

/// The model as the engine sees it. Implemented by `model::Transformer`; tests use a fake one.
///
/// Keys and values of all tokens of a step are stored (layer by layer) before any of that step's attention
/// runs, so a sequence may attend to blocks that another sequence of the same step fills.
pub trait Forward {
    /// Begins one step. Its logits are those of `batch.logits_at`.
    ///
    /// # Errors
    /// After out of memory, here or in [`draw`](Self::draw), the step's results are lost. Tokens
    /// drawn before it can still be taken, and smaller steps may run. After any other error the
    /// model is unusable.
    fn begin(&mut self, batch: &StepBatch) -> Result<(), ForwardError>;
    /// Begins to draw one token from each row of the last step's logits. `draws` holds the sampling
    /// settings in the order of the rows; only ids below `ids` are drawn.
    ///
    /// A row that the model cannot compute holds NaN or infinity, which drawing reports; the other
    /// rows are sound.
    fn draw(&mut self, ids: usize, draws: &[Draw<'_>]) -> Result<(), ForwardError>;
    /// The tokens drawn last. They can be taken once.
    fn drawn(&mut self) -> Result<Vec<Result<Drawn, DrawError>>, ForwardError>;
    /// Whether the next step may begin before [`drawn`](Self::drawn) is called, with tokens that
    /// are still unknown ([`StepBatch::drawn`]).
    fn runs_ahead(&self) -> bool {
        false
    }
    /// Ids that may be sampled are `0..vocab_size()`: the model's vocabulary without its padding.
    fn vocab_size(&self) -> usize;
    /// Longest sequence (prompt + completion) in tokens.
    fn context_tokens(&self) -> u32;
    /// KV blocks in the pool.
    fn kv_blocks(&self) -> u32;
    /// Tokens per KV block.
    fn block_tokens(&self) -> u32;
    /// Maximum tokens per step, where the device's memory limits them.
    fn step_tokens_max(&self) -> Option<u32> {
        None
    }
    /// Frees the memory that earlier steps allocated, because smaller steps follow. All drawn
    /// tokens have been taken by then.
    fn give_back(&mut self) {}
    /// Times each operation from now on. Where timing needs it, the model waits for each operation.
    fn time_operations(&mut self) {}
    /// Time spent so far by kind of operation; empty where it is unknown.
    fn operation_times(&self) -> Vec<(&'static str, Duration)> {
        Vec::new()
    }
}

/// A step that could not be run, because of the device or the caller; single rows never cause it.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    #[error("the model's step cannot be run: {0}")]
    Batch(String),
    #[error("the model's step failed: {0}")]
    Device(#[from] DeviceError),
}
