//! gristmill grinds whole datasets through a language model: one job file in, one Parquet part a shard out.
//!
//! Modules in reading order: [`worker`] shows one shard from receipt to acknowledgement; the others are what it calls.

#[macro_use]
mod say;

mod failpoint;
mod notice;
mod printable;
mod regular;
mod signing;

pub mod worker;

pub mod bench;
pub mod dataset;
pub mod device;
pub mod doctor;
pub mod engine;
#[cfg(feature = "faults")]
pub mod faults;
pub mod job;
pub mod ledger;
pub mod model;
pub mod queue;
pub mod report;

pub mod cli;
