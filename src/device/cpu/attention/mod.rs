//! Attention over paged keys and values, in floating point and in INT8.

pub(crate) mod float;
pub(crate) mod int8;
mod int8_products;
pub(crate) mod softmax_int8;
