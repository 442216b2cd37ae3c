//! Any bytes as one of a checkpoint's files: opening it never panics, and never believes a size.
#![no_main]

use gristmill::model::config::Config;
use gristmill::model::tokenizer::Tokenizer;
use gristmill::model::weights::{WeightSource, Weights};
use libfuzzer_sys::fuzz_target;

const FILES: [&str; 5] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
];

fuzz_target!(|data: &[u8]| {
    let Some((&which, bytes)) = data.split_first() else { return };
    let name = FILES[which as usize % FILES.len()];
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(name), bytes).unwrap();
    let _ = Config::load(folder.path());
    let _ = Tokenizer::load(folder.path());
    if let Ok(weights) = Weights::open(folder.path()) {
        // `a`: of seeds, and soon found.
        for name in ["a", "model.norm.weight"] {
            let _ = weights.tensor(name, Some(2), 3);
            let _ = weights.tensor(name, None, 2);
        }
    }
});
