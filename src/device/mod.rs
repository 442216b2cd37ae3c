//! A device runs fused operations over one flat packed batch.

pub mod batch;
