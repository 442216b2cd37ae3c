//! The ledger from outside: simulated workers with faults, local folders, foreign bytes, what a job's end looks like.

#[path = "ledger/support.rs"]
mod support;

#[path = "ledger/simulation.rs"]
mod simulation;

#[path = "ledger/local.rs"]
mod local;

#[path = "ledger/refusals.rs"]
mod refusals;

#[path = "ledger/whole_jobs.rs"]
mod whole_jobs;
