//! What a checkpoint says (config, weights, tokenizer) and the one transformer that runs it.

pub mod tokenizer;
