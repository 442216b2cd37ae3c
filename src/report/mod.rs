//! Reports for people and machines: progress of a running job, its summary, and its cost.

pub mod agreement;
pub mod answers;
pub mod cost;
pub mod meter;
pub mod progress;
pub mod recheck;
pub mod sample;
mod shell;
pub mod summary;

pub use shell::shell_word;
