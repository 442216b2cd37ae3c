//! Continuous batching over paged KV: schedule → begin a step → draw → advance, nothing else.
//!
//! [`run`] is the loop; [`scheduler`] (with [`packing`] and [`blocks`]) says what a step computes and never sees a tensor;
//! [`sequence`] (with [`constraint`], [`choice`] and [`forbidden`]) says what is asked of the logits and what becomes of the token drawn, and never
//! sees a block.
//! The engine names no queue, ledger, dataset or store.

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
pub use run::{Engine, EngineError, Refused};

use std::time::Duration;

use crate::device::DeviceError;
use crate::device::batch::StepBatch;
use crate::device::draw::{Draw, DrawError, Drawn};

/// What the engine needs of a model. Implemented by `model::Transformer`; tests use a fake one.
///
/// Keys and values of all tokens of a step are stored (layer by layer) before any of that step's attention
/// runs, so a sequence may attend to blocks that another sequence of the same step fills.
pub trait Forward {
    /// Begins one step. Its logits are those of `batch.logits_at`.
    ///
    /// # Errors
    /// Out of memory, here or in [`draw`](Self::draw): the step is worth nothing, what was drawn before it can still be taken, and
    /// smaller steps may run. Anything else: nothing more can be asked of the model.
    fn begin(&mut self, batch: &StepBatch) -> Result<(), ForwardError>;
    /// Begins to draw a token from each row of the logits of the step last begun, as `draws` ask in the rows' order, of ids below
    /// `ids`.
    ///
    /// A row that the model cannot compute holds NaN or infinity, and the others are sound: drawing sees it.
    fn draw(&mut self, ids: usize, draws: &[Draw<'_>]) -> Result<(), ForwardError>;
    /// What was drawn last, once.
    fn drawn(&mut self) -> Result<Vec<Result<Drawn, DrawError>>, ForwardError>;
    /// May the next step begin before [`drawn`](Self::drawn) is asked for, with tokens that are not known yet
    /// ([`StepBatch::drawn`])?
    fn runs_ahead(&self) -> bool {
        false
    }
    /// Ids that may be sampled are `0..vocab_size()`: the model's vocabulary without its padding.
    fn vocab_size(&self) -> usize;
    /// Longest sequence (prompt + completion) in tokens.
    fn context_tokens(&self) -> u32;
    /// KV blocks in the pool.
    fn kv_blocks(&self) -> u32;
    /// Tokens a KV block holds.
    fn block_tokens(&self) -> u32;
    /// Most tokens of a step, where the device has memory for no more.
    fn step_tokens_max(&self) -> Option<u32> {
        None
    }
    /// Gives back the memory that steps have taken: smaller ones are to come. What was drawn has been taken.
    fn give_back(&mut self) {}
    /// Has operations timed from now on, where that costs waiting for each of them.
    fn time_operations(&mut self) {}
    /// Time spent so far by kind of operation; empty where it is not known.
    fn operation_times(&self) -> Vec<(&'static str, Duration)> {
        Vec::new()
    }
}

/// A step that could not be run: the device or the caller, not a row, is at fault.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    #[error("the model's step cannot be run: {0}")]
    Batch(String),
    #[error("the model's step failed: {0}")]
    Device(#[from] DeviceError),
}
