//! Any bytes as a GGUF file: reading it never panics, and never believes a size.
#![no_main]

use gristmill::gguf::Header;
use gristmill::model::Checkpoint;
use gristmill::model::config::generation::GenerationFile;
use gristmill::model::config::{Config, ExpertForm};
use gristmill::model::weights::{WeightSource, Weights};
use gristmill::tokenizer::Tokenizer;
use libfuzzer_sys::fuzz_target;

/// Numbers of a tensor that is decoded: decoding all of a large one would take the run's time.
const NUMBERS_MAX: usize = 1 << 16;

fuzz_target!(|data: &[u8]| {
    let Ok(header) = Header::parse(data) else { return };
    for tensor in &header.tensors {
        let columns = tensor.shape[tensor.shape.len() - 1];
        let numbers: usize = tensor.shape.iter().product();
        if numbers <= NUMBERS_MAX {
            let decoded = tensor.format.to_f32(&data[tensor.bytes.clone()], columns);
            assert_eq!(decoded.len(), 4 * numbers);
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, data).unwrap();
    let _ = Tokenizer::load(&path);
    let _ = GenerationFile::load(&path).map(|file| file.check());
    if let Ok(config) = Config::load(&path) {
        let _ = Checkpoint::check(&path, config);
    }
    if let Ok(weights) = Weights::open(&path, ExpertForm::Matrices) {
        let _ = weights.tensor("model.embed_tokens.weight", Some(8), 32);
        let _ = weights.tensor("model.norm.weight", None, 32);
    }
});
