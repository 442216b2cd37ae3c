//! Options of an engine.

use std::sync::Arc;

use crate::device::cpu::Threads;
use crate::engine::plan::Policy;

/// Options of an engine.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Maximum tokens computed in one step, at least 1.
    pub max_step_tokens: usize,
    /// Maximum sequences that run at once, at least 1.
    pub max_sequences: usize,
    /// Description of everything besides token ids that determines keys and values: model, adapter,
    /// KV format. Prefix keys are derived from it.
    pub prefix_root: String,
    pub policy: Policy,
    /// Threads that compute masks and process sampled tokens. On the CPU, these are the model's own
    /// threads.
    pub threads: Arc<Threads>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            max_step_tokens: 2048,
            max_sequences: 256,
            prefix_root: String::new(),
            policy: Policy::default(),
            threads: Arc::default(),
        }
    }
}
