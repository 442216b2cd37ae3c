//! The ledger from outside: simulated workers with faults, local folders, foreign bytes, what a job's end looks like.

pub(crate) mod support;

mod simulation;

mod seeds;

mod damage;

mod generations;

mod local;

mod refusals;

mod spendings;

mod whole_jobs;
