//! The transformer against Hugging Face transformers, over tiny models of all families (`fixtures/make_models.py`).

pub(crate) mod adapters;
mod answers;
mod bits;
pub(crate) mod engine;
mod files;
pub(crate) mod four_bits;
mod gguf;
pub(crate) mod harness;
mod perplexity;
mod precision;
mod quantized;
mod windows;
