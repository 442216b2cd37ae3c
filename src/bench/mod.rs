//! `gristmill bench`: runs the requests of a trace through the engine and reports figures.

pub mod figures;
pub mod picture;
pub mod trace;
