//! Reports for people and machines: progress of a running job, its summary, and its cost.

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
