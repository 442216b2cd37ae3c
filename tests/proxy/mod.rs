//! A fault proxy before an S3 store: forwards requests as they are, counts them, and breaks some by a plan.
//!
//! ```text
//! client ──▶ Proxy (counts, asks the plan) ──▶ store
//!               └─ error, reset, truncation, stall, delayed put
//! ```
//!
//! The `Host` header travels unchanged, so that signatures made for the proxy's address hold at the store.

// Each test binary uses a part of it.
#![allow(dead_code, unused_imports)]

mod counters;
mod plan;
mod server;

pub(crate) use counters::{Counters, Kind};
pub(crate) use plan::{Fault, Plan, Request, Rule};
pub(crate) use server::Proxy;
