//! Typed answers: parsing of an answer's JSON without loss, the Arrow type for a JSON Schema, and the
//! column that holds the answers of a part.

pub(crate) mod column;
pub mod json;
pub mod types;
