//! Answers as values: the JSON text as it was written, the Arrow type for a JSON Schema, and the
//! column that holds the answers of a part.

pub(crate) mod column;
pub mod json;
pub mod types;
