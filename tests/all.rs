//! The integration tests, one binary: its `mod` lines are the table of contents.

mod support;

mod bad_input;
mod end_to_end;
mod engine_batching;
mod kills;
mod rules;
