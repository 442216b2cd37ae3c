//! What a person or a machine is told: progress while a job runs, its summary at the end, and what it costs.

pub mod agreement;
pub mod answers;
pub mod cost;
mod error_line;
pub mod meter;
pub mod progress;
pub mod recheck;
pub mod sample;
mod shell;
pub mod summary;

pub use error_line::{in_short, one_line};
pub use shell::shell_word;
