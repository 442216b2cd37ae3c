//! What a worker needs of an engine.

use crate::engine::request::{Finished, Request};
use crate::engine::run::{EngineError, Refused};

/// Requests in, completions out. [`Engine`](crate::engine::Engine) is the one that computes; fault tests have one whose
/// answers are known beforehand.
pub trait Generator: Send {
    /// Is there room for more requests?
    fn wants_more(&self) -> bool;

    /// Is nothing left to hand out?
    fn is_idle(&self) -> bool;

    /// Takes a request; what becomes of it comes back with a later step. A refused one does not come back; what is found to be
    /// wrong with it later (its shape is compiled meanwhile) comes back as its error.
    ///
    /// # Errors
    /// The request can never be completed here: it fails its row.
    fn submit(&mut self, request: Request) -> Result<(), Refused>;

    /// Runs one step and returns what has ended. Without work it returns at once, or after a moment in which a shape may be compiled.
    ///
    /// # Errors
    /// The device, not a row, is at fault: whatever was submitted must be computed again by another engine.
    fn step(&mut self) -> Result<Vec<Finished>, EngineError>;

    /// Tokens that the step computed whose results came last, by `UnitId::job`: how a step's time is split among jobs.
    fn step_tokens(&self) -> &[(u32, u64)];

    /// Drops the units of `job` whose row is in `rows`: they never come back.
    fn cancel(&mut self, job: u32, rows: &dyn Fn(u64) -> bool);
}
