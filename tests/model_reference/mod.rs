//! The transformer against Hugging Face transformers, over tiny models of all families (`fixtures/make_models.py`).

mod answers;
mod bits;
mod files;
mod harness;
