//! gristmill grinds whole datasets through a language model: one job file in, one Parquet part per
//! shard out.
//!
//! Start reading at [`worker`], which processes a shard from receipt to acknowledgement and calls
//! the other modules.

#![cfg_attr(test, expect(clippy::too_many_lines, reason = "tests hold tables of cases"))]

#[macro_use]
mod say;

mod error_line;
mod failpoint;
mod http;
mod mapped;
mod notice;
mod printable;
mod python_json;
mod regular;
mod replace;
mod signing;
mod traces;

pub mod worker;

pub mod bench;
pub mod dashboard;
pub mod dataset;
pub mod device;
pub mod doctor;
pub mod engine;
#[cfg(feature = "faults")]
pub mod faults;
pub mod fetch;
pub mod gguf;
pub mod job;
pub mod ledger;
pub mod model;
pub mod queue;
pub mod report;
pub mod serve;
pub mod tokenizer;

pub mod cli;
