//! gristmill grinds whole datasets through a language model: one job file in, one Parquet part a shard out.
//!
//! Modules in reading order: [`worker`] shows one shard from receipt to acknowledgement; the others are what it calls.

pub mod worker;

pub mod dataset;
pub mod device;
pub mod engine;
pub mod job;
pub mod ledger;
pub mod model;
pub mod queue;
pub mod report;

#[cfg(feature = "faults")]
pub mod faults;

pub mod cli;
