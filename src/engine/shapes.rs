//! The output shapes of requests: compiled shapes, and requests whose shape is still being
//! compiled.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::engine::constraint::compiler::{ShapeKey, ShapeState};
use crate::engine::constraint::{Compiler, Constraint, ConstraintError};
use crate::engine::params::GenerationParams;
use crate::engine::request::{Request, UnitId};
use crate::tokenizer::Tokenizer;

/// Time that an otherwise idle engine waits for a shape per call.
const WAIT: Duration = Duration::from_millis(10);

/// The shape requested last. Rows of a job share their parameters.
struct Last {
    params: Arc<GenerationParams>,
    eos: Arc<[u32]>,
    found: ShapeState,
}

/// See the module's description.
#[derive(Default)]
pub(super) struct Shapes {
    compiler: Compiler,
    last: Option<Last>,
    /// In order of arrival.
    waiting: VecDeque<(ShapeKey, Request)>,
}

impl Shapes {
    /// The shape of a request, or the key under which it is being compiled.
    pub(super) fn find(&mut self, request: &Request, tokenizer: &Arc<Tokenizer>) -> ShapeState {
        let Request { params, eos, .. } = request;
        match &self.last {
            Some(last) if Arc::ptr_eq(&last.params, params) && last.eos == *eos => last.found.clone(),
            // The compiler knows the same shape again.
            _ => {
                let found = match self.compiler.find(&params.shape, tokenizer, eos) {
                    ShapeState::Ready(compiled) => ShapeState::Ready(allowed(compiled, params)),
                    underway => underway,
                };
                self.last = Some(Last {
                    params: params.clone(),
                    eos: eos.clone(),
                    found: found.clone(),
                });
                found
            }
        }
    }

    /// Keeps a request whose shape is being compiled.
    pub(super) fn wait(&mut self, key: ShapeKey, request: Request) {
        self.waiting.push_back((key, request));
    }

    /// Number of requests that wait for their shape.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Requests whose shapes have been compiled since the last call. An idle engine waits a moment
    /// for them.
    pub(super) fn compiled(&mut self, is_idle: bool) -> Vec<(Request, Result<Constraint, ConstraintError>)> {
        if self.waiting.is_empty() {
            return Vec::new();
        }
        let done = self.compiler.collect(if is_idle { WAIT } else { Duration::ZERO });
        if done.is_empty() {
            return Vec::new();
        }
        self.last = None;
        let (ready, waiting) = std::mem::take(&mut self.waiting)
            .into_iter()
            .partition(|(key, _)| done.contains_key(key));
        self.waiting = waiting;
        let ready: VecDeque<(ShapeKey, Request)> = ready;
        let with_shape = |(key, request): (ShapeKey, Request)| {
            let compiled = allowed(done[&key].clone(), &request.params);
            (request, compiled)
        };
        ready.into_iter().map(with_shape).collect()
    }

    /// Drops requests that wait.
    pub(super) fn cancel(&mut self, dropped: impl Fn(UnitId) -> bool) {
        self.waiting.retain(|(_, request)| !dropped(request.id));
    }
}

/// The compiled shape, or an error where it needs a token that the parameters forbid.
fn allowed(
    compiled: Result<Constraint, ConstraintError>,
    params: &GenerationParams,
) -> Result<Constraint, ConstraintError> {
    compiled.and_then(|constraint| params.forbidden.check_choices(&constraint).map(|()| constraint))
}
