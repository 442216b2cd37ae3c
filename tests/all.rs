//! The integration tests, one binary: its `mod` lines are the table of contents.

mod support;

mod bad_input;
mod chat_templates;
mod commands;
mod dataset_lines;
mod dataset_parquet;
mod end_to_end;
mod engine_batching;
mod job_files;
mod kills;
mod ledger;
mod model_reference;
mod queue_contract;
mod rules;
