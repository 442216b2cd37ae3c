//! Reads Arrow IPC files (Feather V2): the footer with limits on its claims, the memory that rows
//! will take, and rows by range.

pub(crate) mod cost;
pub(crate) mod flatbuffer;
pub mod footer;
pub mod reader;
pub mod schema_text;
