//! The library's tokenizer with a model that its copies share.
//!
//! A tokenizer is kept in several forms: with added tokens and without, with a prefix and without.
//! All have the same model, whose vocabulary takes tens of megabytes.

use std::collections::HashMap;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Deserializer};
use tokenizers::models::TrainerWrapper;
use tokenizers::{
    DecoderWrapper, Model, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, Result, Token,
    TokenizerImpl,
};

/// A tokenizer of the library. Its copies share its model.
pub(super) type HfTokenizer =
    TokenizerImpl<SharedModel, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// A model of any kind.
#[derive(Clone)]
pub(super) struct SharedModel(Arc<ModelWrapper>);

impl<'de> Deserialize<'de> for SharedModel {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<SharedModel, D::Error> {
        ModelWrapper::deserialize(deserializer).map(|model| SharedModel(Arc::new(model)))
    }
}

impl Deref for SharedModel {
    type Target = ModelWrapper;
    fn deref(&self) -> &ModelWrapper {
        &self.0
    }
}

impl Model for SharedModel {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, sequence: &str) -> Result<Vec<Token>> {
        self.0.tokenize(sequence)
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.0.token_to_id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.0.id_to_token(id)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.0.get_vocab()
    }

    fn get_vocab_size(&self) -> usize {
        self.0.get_vocab_size()
    }

    fn save(&self, folder: &Path, prefix: Option<&str>) -> Result<Vec<PathBuf>> {
        self.0.save(folder, prefix)
    }

    fn get_trainer(&self) -> TrainerWrapper {
        self.0.get_trainer()
    }
}
