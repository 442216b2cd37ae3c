//! Reads CSV tables: their layout, complete records with their offsets, and rows.

pub mod layout;
pub mod reader;
pub mod records;
