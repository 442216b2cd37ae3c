//! The shapes (output constraints) of requests: compiled shapes, and requests whose shape is still
//! being compiled.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::engine::constraint::compiler::{ShapeKey, ShapeState};
use crate::engine::constraint::{Compiler, Constraint, ConstraintError};
use crate::engine::params::GenerationParams;
use crate::engine::request::{Request, SampleId};
use crate::tokenizer::Tokenizer;

/// Maximum time per call that an otherwise idle engine waits for a shape.
const IDLE_WAIT: Duration = Duration::from_millis(10);

/// The shape that was requested last, kept because the rows of a job share their parameters.
struct LastShape {
    params: Arc<GenerationParams>,
    eos: Arc<[u32]>,
    state: ShapeState,
}

/// See the module's description.
#[derive(Default)]
pub(super) struct Shapes {
    compiler: Compiler,
    last: Option<LastShape>,
    /// Requests whose shape is being compiled, in order of arrival.
    waiting: VecDeque<(ShapeKey, Request)>,
}

impl Shapes {
    /// The shape of a request, or the key under which it is being compiled.
    pub(super) fn find(&mut self, request: &Request, tokenizer: &Arc<Tokenizer>) -> ShapeState {
        let Request { params, eos, .. } = request;
        match &self.last {
            Some(last) if Arc::ptr_eq(&last.params, params) && last.eos == *eos => last.state.clone(),
            // The compiler caches shapes, too.
            _ => {
                let state = match self.compiler.find(&params.shape, tokenizer, eos) {
                    ShapeState::Ready(compiled) => ShapeState::Ready(check_forbidden(compiled, params)),
                    compiling => compiling,
                };
                self.last = Some(LastShape {
                    params: params.clone(),
                    eos: eos.clone(),
                    state: state.clone(),
                });
                state
            }
        }
    }

    /// Keeps a request whose shape is being compiled.
    pub(super) fn enqueue(&mut self, key: ShapeKey, request: Request) {
        self.waiting.push_back((key, request));
    }

    /// Number of requests that wait for their shape.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Takes the requests whose shapes have been compiled since the last call. Waits a moment for
    /// them if the engine is idle.
    pub(super) fn take_compiled(&mut self, is_idle: bool) -> Vec<(Request, Result<Constraint, ConstraintError>)> {
        if self.waiting.is_empty() {
            return Vec::new();
        }
        let results = self.compiler.collect(if is_idle { IDLE_WAIT } else { Duration::ZERO });
        if results.is_empty() {
            return Vec::new();
        }
        self.last = None;
        let (ready, waiting) = std::mem::take(&mut self.waiting)
            .into_iter()
            .partition(|(key, _)| results.contains_key(key));
        self.waiting = waiting;
        let ready: VecDeque<(ShapeKey, Request)> = ready;
        let with_shape = |(key, request): (ShapeKey, Request)| {
            let compiled = check_forbidden(results[&key].clone(), &request.params);
            (request, compiled)
        };
        ready.into_iter().map(with_shape).collect()
    }

    /// Drops waiting requests.
    pub(super) fn cancel(&mut self, is_dropped: impl Fn(SampleId) -> bool) {
        self.waiting.retain(|(_, request)| !is_dropped(request.id));
    }
}

/// The compiled shape, or an error if it needs a token that the parameters forbid.
fn check_forbidden(
    compiled: Result<Constraint, ConstraintError>,
    params: &GenerationParams,
) -> Result<Constraint, ConstraintError> {
    compiled.and_then(|constraint| params.forbidden.check_choices(&constraint).map(|()| constraint))
}
