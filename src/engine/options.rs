//! How an engine runs.

use std::sync::Arc;

use crate::device::cpu::Threads;
use crate::engine::scheduler::Policy;

/// How an engine runs.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Most tokens computed in one step, at least 1.
    pub max_step_tokens: usize,
    /// Most sequences that run at once, at least 1.
    pub max_sequences: usize,
    /// What shapes keys and values besides token ids: model, adapter, KV format. The root of prefix keys.
    pub prefix_root: String,
    pub policy: Policy,
    /// What masks are computed and tokens taken on: the model's own threads, where a step takes the cores.
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
