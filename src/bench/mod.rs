//! `gristmill bench`: requests of a trace through the engine, and what that says.

pub mod figures;
pub mod picture;
pub mod trace;
