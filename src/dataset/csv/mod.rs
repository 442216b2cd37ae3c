//! CSV tables: their layout, whole records with their offsets, and rows.

pub mod layout;
pub mod reader;
pub mod records;
