//! The interface of the engine to the worker.

use crate::engine::ForwardError;
use crate::engine::request::{FinishedSample, Request, RequestError};
use crate::engine::totals::EngineLoad;

/// Turns requests into completions. [`Engine`](crate::engine::Engine) computes them with a model;
/// fault tests use a generator whose answers are known beforehand.
pub trait Generator: Send {
    /// Whether the caller should submit more requests.
    fn wants_more(&self) -> bool;

    /// Whether no request is pending and no result is left to hand out.
    fn is_idle(&self) -> bool;

    /// Accepts a request. A later step returns its result. A refused request gets no result. An
    /// error that is found after acceptance, since the shape is compiled meanwhile, is returned as
    /// result.
    ///
    /// # Errors
    /// This engine can never complete the request. The row fails.
    fn submit(&mut self, request: Request) -> Result<(), RequestError>;

    /// Runs one step and returns the results of the requests that have ended. Without work it
    /// returns at once, or waits a moment for a shape that is being compiled.
    ///
    /// # Errors
    /// The device has failed, and not because of a row: another engine must compute all submitted
    /// requests again.
    fn step(&mut self) -> Result<Vec<FinishedSample>, EngineError>;

    /// Tokens computed for each `SampleId::job` in the step that gave the last results. The worker
    /// splits the step's time among jobs in proportion.
    fn step_tokens(&self) -> &[(u32, u64)];

    /// What the engine holds now.
    fn load(&self) -> EngineLoad {
        EngineLoad::default()
    }

    /// Drops the samples of `job` for whose row `rows` returns true. They get no result.
    fn cancel(&mut self, job: u32, rows: &dyn Fn(u64) -> bool);
}

/// A failure after which the engine cannot go on. Another engine must compute its pending requests
/// again.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error(transparent)]
    Forward(ForwardError),
    #[error("the model returned {found} sampled tokens, but {expected} were expected")]
    Drawn { found: usize, expected: usize },
    #[error("the engine has stopped after an earlier failure")]
    Stopped,
}
