//! The fault suite: whole jobs over real brokers and a real store while processes, brokers and the store are being killed.
//!
//! Built with feature `faults`; run with `--test-threads=1`. `tests/README.md` says how, and what was measured.

#[path = "faults/mod.rs"]
mod faults;
mod proxy;
mod services;
#[allow(dead_code, reason = "shared with the other test binary")]
mod skips;
#[allow(dead_code, reason = "shared with the other test binary")]
mod support;
