//! The engine as the worker sees it.

use crate::engine::request::{Finished, Request};
use crate::engine::run::{EngineError, RequestError};

/// Requests in, completions out. [`Engine`](crate::engine::Engine) computes them; fault tests use a
/// generator whose answers are known beforehand.
pub trait Generator: Send {
    /// Whether there is room for more requests.
    fn wants_more(&self) -> bool;

    /// Whether no request is pending and no result is left to hand out.
    fn is_idle(&self) -> bool;

    /// Accepts a request, whose result comes with a later step. A refused request gets no result.
    /// An error found later (its shape is compiled meanwhile) comes back as its result.
    ///
    /// # Errors
    /// This engine can never complete the request: its row fails.
    fn submit(&mut self, request: Request) -> Result<(), RequestError>;

    /// Runs one step and returns the requests that have ended. Without work it returns at once, or
    /// waits a moment for a shape that is being compiled.
    ///
    /// # Errors
    /// The device has failed, and no row is at fault: another engine must compute all submitted
    /// requests again.
    fn step(&mut self) -> Result<Vec<Finished>, EngineError>;

    /// Tokens computed, by `UnitId::job`, in the step whose results came last; the step's time is
    /// split among jobs by them.
    fn step_tokens(&self) -> &[(u32, u64)];

    /// Drops the units of `job` whose row is in `rows`. They get no result.
    fn cancel(&mut self, job: u32, rows: &dyn Fn(u64) -> bool);
}
