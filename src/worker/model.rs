//! The one model that a worker serves: its files, what identifies it, and what a job's prompts need of it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use chrono::{DateTime, NaiveDateTime};

use crate::device;
use crate::job::spec::{Job, Precision};
use crate::job::{JobError, RenderSetup, Renderer};
use crate::ledger::keys::sha256;
use crate::ledger::{JobIdentity, Ledger};
use crate::model::Channels;
use crate::model::config::Config;
use crate::model::error::ModelError;
use crate::model::tokenizer::Tokenizer;
use crate::model::weights::checkpoint_hash;

/// What random numbers and templates' dates of a job are keyed by.
#[derive(Debug, Clone, Copy)]
pub struct Stream {
    pub seed: u64,
    /// When the job was created: a row that is tried again gets the same prompt.
    pub now: NaiveDateTime,
}

impl Stream {
    /// For checks and previews of a job that has no id yet.
    pub const UNKNOWN: Stream = Stream {
        seed: 0,
        now: DateTime::UNIX_EPOCH.naive_utc(),
    };

    /// Of a job that is written down.
    pub fn of(job: &Job, ledger: &Ledger) -> Stream {
        Stream {
            seed: job.seed(&ledger.job().job.to_string()),
            now: ledger.created_at().naive_utc(),
        }
    }
}

/// Everything about a model but its weights.
#[derive(Clone)]
pub struct ModelFiles {
    pub dir: PathBuf,
    pub config: Config,
    pub tokenizer: Arc<Tokenizer>,
}

impl ModelFiles {
    /// Reads config and tokenizer of the checkpoint in `dir`.
    pub fn open(dir: PathBuf) -> anyhow::Result<ModelFiles> {
        Ok(ModelFiles {
            config: Config::load(&dir)?,
            tokenizer: Arc::new(Tokenizer::load(&dir)?),
            dir,
        })
    }

    /// See [`Channels::of_model`].
    pub fn channels(&self, precision: device::Precision) -> Result<Option<Channels>, ModelError> {
        Channels::of_model(&self.dir, &self.config, precision)
    }

    /// SHA-256 of the whole checkpoint, in hex, and of the measured channels where the precision has a use for them. Reads every
    /// byte of it.
    pub fn hash(&self, precision: device::Precision) -> Result<String, ModelError> {
        let checkpoint = checkpoint_hash(&self.dir)?;
        Ok(match self.channels(precision)? {
            None => checkpoint,
            Some(channels) => sha256(format!("{checkpoint} balanced by {}", channels.hash()).as_bytes()),
        })
    }

    /// Longest sequence of a job in tokens: what it says, within what the checkpoint can do, or what the checkpoint
    /// declares.
    pub fn context_tokens(&self, job: &Job) -> Result<u32, JobError> {
        let most = self.config.context_limit();
        match job.context {
            Some(tokens) if tokens > most => Err(JobError::Invalid {
                place: job.file.clone(),
                message: format!("`context` is {tokens} tokens, more than the {most} that this model can do"),
            }),
            Some(tokens) => Ok(tokens),
            None => Ok(self.config.max_position_embeddings),
        }
    }

    /// Prompts of a job.
    pub fn renderer(&self, job: &Job, stream: &Stream) -> Result<Renderer, JobError> {
        let setup = RenderSetup {
            tokenizer: self.tokenizer.clone(),
            context_tokens: self.context_tokens(job)?,
            seed: stream.seed,
            now: stream.now,
        };
        Renderer::new(job, setup)
    }

    /// Ids that end a job's completions: the union of what config, generation config, tokenizer config and the chat
    /// template's end of turn name.
    pub fn eos_token_ids(&self, renderer: &Renderer) -> Arc<[u32]> {
        let mut ids = self.config.eos_token_ids.clone();
        ids.extend(self.tokenizer.eos_id());
        ids.extend(renderer.end_of_turn());
        ids.sort_unstable();
        ids.dedup();
        ids.into()
    }
}

/// The precision to compute in, resolved. On a CPU, F32 costs no more than BF16 and rows do not depend on their batch.
pub fn precision(asked: Precision) -> device::Precision {
    match asked {
        Precision::F32 | Precision::Auto => device::Precision::F32,
        Precision::Bf16 => device::Precision::Bf16,
        Precision::Int8 => device::Precision::Int8,
    }
}

/// The word for a precision in records.
pub fn precision_word(precision: device::Precision) -> &'static str {
    match precision {
        device::Precision::F32 => "f32",
        device::Precision::Bf16 => "bf16",
        device::Precision::Int8 => "int8",
    }
}

/// The model that a worker has on its device.
#[derive(Clone)]
pub struct Model {
    pub files: ModelFiles,
    pub precision: device::Precision,
    /// Longest sequence that the loaded model takes, in tokens.
    pub context_tokens: u32,
    hash: String,
}

impl Model {
    /// `hash` is the checkpoint's (see [`ModelFiles::hash`]).
    pub fn new(files: ModelFiles, precision: device::Precision, context_tokens: u32, hash: String) -> Model {
        Model {
            files,
            precision,
            context_tokens,
            hash,
        }
    }

    /// Why a job with this identity cannot be worked on here; `None`: it can.
    pub fn refuses(&self, identity: &JobIdentity) -> Option<String> {
        let short = |hash: &str| hash.get(..12).unwrap_or(hash).to_string();
        if identity.model_hash != self.hash {
            return Some(format!(
                "it is for model {}, this worker has {} (`{}`)",
                short(&identity.model_hash),
                short(&self.hash),
                self.name()
            ));
        }
        if identity.tokenizer_hash != self.files.tokenizer.hash() {
            return Some("it is for another tokenizer than this worker's".into());
        }
        let precision = precision_word(self.precision);
        (identity.precision != precision)
            .then(|| format!("it runs in {}, this worker in {precision}", identity.precision))
    }

    /// The checkpoint's folder, for messages.
    pub fn name(&self) -> String {
        self.dir().display().to_string()
    }

    fn dir(&self) -> &Path {
        &self.files.dir
    }
}
