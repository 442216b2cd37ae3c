//! Matmuls: packed weights, kernels for each number format and instruction set, and linear layers.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
pub(crate) mod bf16;
mod blocks;
pub(crate) mod int4;
pub(crate) mod int4_panels;
pub(crate) mod int8;
pub(crate) mod linear;
mod linear_int4;
pub(crate) mod low_rank;
pub(crate) mod low_rank_float;
pub(crate) mod low_rank_int8;
pub(crate) mod matrix;
pub(crate) mod row_tiles;
pub(crate) mod tile;
