//! The one model that a worker serves: its files, its identity, and the settings of a job's
//! prompts.

use std::fmt::{self, Display, Formatter};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use chrono::{DateTime, NaiveDateTime, Utc};

use crate::device::{Dtype, KvFormat, Precision};
use crate::job::precision::{RequestedKvFormat, RequestedPrecision};
use crate::job::spec::Job;
use crate::job::{JobError, RenderSetup, Renderer};
use crate::ledger::keys::sha256;
use crate::ledger::{JobIdentity, Ledger};
use crate::model::adapter::adapter_hash;
use crate::model::config::Config;
use crate::model::error::ModelError;
use crate::model::folder;
use crate::model::size::{CodedSize, read_as};
use crate::model::weights::checkpoint_hash;
use crate::model::{ActivationMaxima, Checkpoint};
use crate::tokenizer::Tokenizer;

/// The settings of a job's prompts that its job file does not give: the seed of its random numbers,
/// the date for its templates, and the `max_tokens` of its retries.
#[derive(Debug, Clone, Copy)]
pub struct PromptSettings {
    pub seed: u64,
    /// Creation time of the job, so that a row that is tried again gets the same prompt.
    pub now: NaiveDateTime,
    /// Minimum `max_tokens` of each row; `None`: no retry has raised it.
    pub max_tokens: Option<u32>,
}

impl PromptSettings {
    /// For checks of a job that may have no id yet.
    pub const UNKNOWN: PromptSettings = PromptSettings {
        seed: 0,
        now: DateTime::UNIX_EPOCH.naive_utc(),
        max_tokens: None,
    };

    /// For prompts of a job that is not created yet, as if it were created now.
    pub fn now() -> PromptSettings {
        PromptSettings {
            now: Utc::now().naive_utc(),
            ..PromptSettings::UNKNOWN
        }
    }

    /// The settings of a job with a ledger.
    pub fn of(job: &Job, ledger: &Ledger) -> PromptSettings {
        PromptSettings {
            seed: job.seed(&ledger.job().job.to_string()),
            now: ledger.created_at().naive_utc(),
            max_tokens: ledger.max_tokens(),
        }
    }
}

/// Hashes by which jobs name a model.
#[derive(Debug, Clone)]
pub struct ModelHashes {
    pub own: String,
    /// Of the model with each adapter beside it.
    pub apart: Vec<String>,
}

impl ModelHashes {
    /// 0 for a job of the model itself, the number of the adapter for a job with one. `None`: the job is for another model.
    fn number_of(&self, identity: &JobIdentity) -> Option<u32> {
        let mut all = std::iter::once(&self.own).chain(&self.apart);
        all.position(|hash| *hash == identity.model_hash)
            .map(|number| number as u32)
    }
}

impl From<String> for ModelHashes {
    fn from(own: String) -> ModelHashes {
        ModelHashes { own, apart: Vec::new() }
    }
}

/// Everything about a model except its weights.
#[derive(Clone)]
pub struct ModelFiles {
    pub dir: PathBuf,
    /// The folder of the adapter that changes the model.
    pub adapter: Option<PathBuf>,
    /// The folders of adapters beside the model, each of which changes it for jobs of its own.
    pub apart: Vec<PathBuf>,
    pub config: Config,
    /// The number format in which most weights are read.
    pub stored: Dtype,
    /// The weights that are stored in codes of four bits.
    pub coded: CodedSize,
    pub tokenizer: Arc<Tokenizer>,
}

impl ModelFiles {
    /// As [`open_with`](Self::open_with), without adapters.
    pub fn open(dir: PathBuf) -> anyhow::Result<ModelFiles> {
        ModelFiles::open_with(dir, None, Vec::new())
    }

    /// Reads config and tokenizer of the checkpoint in `dir`, and checks the headers of its weights
    /// against its config. `adapter`: the folder of the adapter that changes the model. `apart`: the folders of adapters beside it.
    pub fn open_with(dir: PathBuf, adapter: Option<PathBuf>, apart: Vec<PathBuf>) -> anyhow::Result<ModelFiles> {
        folder::check(&dir)?;
        // A model that is refused is not worth a search for its weights.
        let config = Config::load(&dir)?;
        folder::check_weights(&dir)?;
        let tokenizer = Arc::new(Tokenizer::load(&dir)?);
        let Checkpoint { mut config, weights } = Checkpoint::open(&dir, adapter.as_deref(), config)?.beside(&apart)?;
        config.warnings.extend(tokenizer.warnings(&dir, config.vocab_size));
        Ok(ModelFiles {
            dir,
            adapter,
            apart,
            stored: read_as(&config, weights.main_dtype()),
            coded: CodedSize::of(&weights, &config)?,
            config,
            tokenizer,
        })
    }

    /// The activation maxima per channel for INT8 smoothing: see [`ActivationMaxima::of_model`].
    pub fn activation_maxima(&self, precision: Precision) -> Result<Option<ActivationMaxima>, ModelError> {
        ActivationMaxima::of_model(&self.dir, &self.config, precision)
    }

    /// SHA-256 in hex of the whole checkpoint and its adapter, and of the measured activation maxima if
    /// the precision uses them. Reads every byte of the checkpoint.
    pub fn hash(&self, precision: Precision) -> Result<String, ModelError> {
        Ok(self.hashes(precision)?.own)
    }

    /// The [hash](Self::hash), and those of jobs with the adapters beside the model.
    pub fn hashes(&self, precision: Precision) -> Result<ModelHashes, ModelError> {
        let mut checkpoint = checkpoint_hash(&self.dir)?;
        // For a checkpoint with its own output head and `tied_embeddings` in its config, older
        // versions used the embedding table as the head. The changed hash keeps one job from
        // mixing both.
        if Config::load(&self.dir)?.tied_embeddings && !self.config.tied_embeddings {
            checkpoint = sha256(format!("{checkpoint} with its own head").as_bytes());
        }
        let channels = self.activation_maxima(precision)?;
        let with = |adapter: Option<&PathBuf>| -> Result<String, ModelError> {
            let adapted = match adapter {
                Some(adapter) => sha256(format!("{checkpoint} adapted by {}", adapter_hash(adapter)?).as_bytes()),
                None => checkpoint.clone(),
            };
            Ok(match &channels {
                None => adapted,
                Some(channels) => sha256(format!("{adapted} balanced by {}", channels.hash()).as_bytes()),
            })
        };
        Ok(ModelHashes {
            own: with(self.adapter.as_ref())?,
            apart: self
                .apart
                .iter()
                .map(|adapter| with(Some(adapter)))
                .collect::<Result<_, _>>()?,
        })
    }

    /// Maximum sequence length of a job in tokens: the job's own value, within the limit of the
    /// checkpoint, or the length that the checkpoint declares.
    pub fn context_tokens(&self, job: &Job) -> Result<u32, JobError> {
        let tokens_max = self.config.context_limit();
        match job.context {
            Some(tokens) if tokens > tokens_max => Err(JobError::Invalid {
                location: job.file.clone(),
                message: format!("`context` is {tokens} tokens, more than the {tokens_max} that this model can do"),
            }),
            Some(tokens) => Ok(tokens),
            None => Ok(self.config.max_position_embeddings),
        }
    }

    /// The renderer of a job's prompts.
    pub fn renderer(&self, job: &Job, settings: &PromptSettings) -> Result<Renderer, JobError> {
        let setup = RenderSetup {
            tokenizer: self.tokenizer.clone(),
            model_vocabulary: self.config.vocab_size,
            context_tokens: self.context_tokens(job)?,
            seed: settings.seed,
            now: settings.now,
            retry_max_tokens: settings.max_tokens,
        };
        Renderer::new(job, setup)
    }

    /// Ids that end a job's completions: the union of the ids in config, generation config and
    /// tokenizer config, and the chat template's end of turn.
    pub fn eos_token_ids(&self, renderer: &Renderer) -> Arc<[u32]> {
        // `generation_config.json` is outside the model's hash and may have changed, so the ids
        // that were recorded when the job was planned are used.
        let mut ids = renderer.model_ends().unwrap_or(&self.config.eos_token_ids).to_vec();
        ids.extend(self.tokenizer.eos_id());
        ids.extend(renderer.end_of_turn());
        ids.sort_unstable();
        ids.dedup();
        ids.into()
    }
}

/// The number formats that a model computes in; `auto` is resolved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Formats {
    pub precision: Precision,
    /// Format of keys and values.
    pub kv: KvFormat,
}

impl Formats {
    /// The requested formats; `auto` is the device's default precision.
    pub fn of(precision: RequestedPrecision, kv_cache: RequestedKvFormat, auto: Precision) -> Formats {
        let precision = precision.or(auto);
        let kv = kv_cache.or(precision.kv_format());
        Formats { precision, kv }
    }

    pub fn of_job(job: &Job, auto: Precision) -> Formats {
        Formats::of(job.precision, job.kv_cache, auto)
    }

    /// Formats for a recheck in `precision` of a job in these formats. Keys and values get at
    /// least as many bits as in the job. `None`: the formats would not be more precise.
    pub fn for_recheck(self, precision: Precision) -> Option<Formats> {
        let mut to = Formats {
            precision,
            kv: precision.kv_format(),
        };
        if self.kv.bits() > to.kv.bits() {
            to.kv = self.kv;
        }
        (to.precision.bits() >= self.precision.bits() && to != self).then_some(to)
    }

    /// The name of the precision in records.
    pub fn precision_name(self) -> &'static str {
        self.precision.name()
    }

    /// The name of the format of keys and values.
    pub fn kv_name(self) -> &'static str {
        self.kv.name()
    }

    /// The name of the format of keys and values in records. `None`: the precision's default, as in
    /// older records.
    pub fn recorded_kv(self) -> Option<String> {
        (self.kv != self.precision.kv_format()).then(|| self.kv_name().into())
    }
}

impl Display for Formats {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&describe(self.precision_name(), self.recorded_kv().as_deref()))
    }
}

/// Recorded formats for messages.
fn describe(precision: &str, kv: Option<&str>) -> String {
    match kv {
        None => precision.into(),
        Some(kv) => format!("{precision} with keys and values in {kv}"),
    }
}

/// The model that a worker has on its device.
#[derive(Clone)]
pub struct Model {
    pub files: ModelFiles,
    pub formats: Formats,
    /// Maximum sequence length of the loaded model, in tokens.
    pub context_tokens: u32,
    hashes: ModelHashes,
}

impl Model {
    /// `hashes`: see [`ModelFiles::hashes`].
    pub fn new(files: ModelFiles, formats: Formats, context_tokens: u32, hashes: impl Into<ModelHashes>) -> Model {
        Model {
            files,
            formats,
            context_tokens,
            hashes: hashes.into(),
        }
    }

    /// Why a job with this identity cannot run on this model; `None`: it can.
    pub fn refusal(&self, identity: &JobIdentity) -> Option<String> {
        let short = |hash: &str| hash.get(..12).unwrap_or(hash).to_string();
        if self.hashes.number_of(identity).is_none() {
            return Some(format!(
                "it is for model {}, this worker has {} ({})",
                short(&identity.model_hash),
                short(&self.hashes.own),
                self.name()
            ));
        }
        if identity.tokenizer_hash != self.files.tokenizer.hash() {
            return Some("it is for another tokenizer than this worker's".into());
        }
        let ours = self.formats.to_string();
        let its = describe(&identity.precision, identity.kv_cache.as_deref());
        (its != ours).then(|| format!("it runs in {its}, this worker in {ours}"))
    }

    /// The number of the adapter that changes the model for a job with this identity; 0: none does.
    ///
    /// # Errors
    /// The job is for another model.
    pub fn adapter_of(&self, identity: &JobIdentity) -> anyhow::Result<u32> {
        // A recheck has the job's model in another precision, and with that another hash.
        if self.hashes.apart.is_empty() {
            return Ok(0);
        }
        let number = self.hashes.number_of(identity);
        number.ok_or_else(|| anyhow::anyhow!("the job is for another model"))
    }

    /// The folder that tells this model from others for a job with this adapter: the adapter's, or the checkpoint's.
    pub fn folder_of(&self, adapter: u32) -> &Path {
        let apart = (adapter as usize)
            .checked_sub(1)
            .and_then(|index| self.files.apart.get(index));
        apart.or(self.files.adapter.as_ref()).unwrap_or(&self.files.dir)
    }

    /// The checkpoint's folder and those of its adapters, for messages.
    pub fn name(&self) -> String {
        let dir = self.dir().display();
        if let Some(adapter) = &self.files.adapter {
            return format!("`{dir}` with `{}`", adapter.display());
        }
        match &self.files.apart[..] {
            [] => format!("`{dir}`"),
            apart => {
                let names: Vec<String> = apart.iter().map(|adapter| format!("`{}`", adapter.display())).collect();
                format!("`{dir}`, alone and with {}", names.join(" or "))
            }
        }
    }

    fn dir(&self) -> &Path {
        &self.files.dir
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_values_have_the_precisions_format_unless_another_is_asked_for() {
        let [int8, f32] = [Precision::Int8, Precision::F32].map(RequestedPrecision::from);
        let kv = RequestedKvFormat::from;
        let auto = RequestedKvFormat::Auto;
        for (precision, kv_cache, words, recorded) in [
            (RequestedPrecision::Auto, auto, "f32", None),
            (int8, auto, "int8", None),
            (int8, kv(KvFormat::Int8), "int8", None),
            (
                int8,
                kv(KvFormat::Bf16),
                "int8 with keys and values in bf16",
                Some("bf16".to_string()),
            ),
            (
                f32,
                kv(KvFormat::Int4),
                "f32 with keys and values in int4",
                Some("int4".to_string()),
            ),
        ] {
            let formats = Formats::of(precision, kv_cache, Precision::F32);
            assert_eq!((formats.to_string().as_str(), formats.recorded_kv()), (words, recorded));
        }
    }

    #[test]
    fn a_recheck_is_higher_in_something_and_lower_in_nothing() {
        use Precision::{Bf16, F32, Int8};
        for (precision, kv_cache, asked, rechecked) in [
            (Int8, None, F32, Some("f32")),
            (Int8, None, Bf16, Some("bf16")),
            (
                Int8,
                Some(KvFormat::F32),
                Bf16,
                Some("bf16 with keys and values in f32"),
            ),
            (Bf16, None, F32, Some("f32")),
            (F32, Some(KvFormat::Int4), F32, Some("f32")),
            (F32, Some(KvFormat::Int8), F32, Some("f32")),
            (F32, Some(KvFormat::Int8), Bf16, None),
            (F32, None, F32, None),
            (Bf16, None, Bf16, None),
            (Bf16, Some(KvFormat::F32), Bf16, None),
        ] {
            let kv_cache = kv_cache.map_or(RequestedKvFormat::Auto, RequestedKvFormat::from);
            let found = Formats::of(precision.into(), kv_cache, F32).for_recheck(asked);
            assert_eq!(found.map(|formats| formats.to_string()).as_deref(), rechecked);
        }
    }

    /// The demo model, and the identity of an INT8 job of it. Its hash is `m`.
    fn demo() -> (ModelFiles, JobIdentity) {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("jobs/demo/model");
        let files = ModelFiles::open(dir).unwrap();
        let identity = serde_json::from_value(serde_json::json!({
            "job_hash": "j", "model_hash": "m", "template_hash": null, "precision": "int8",
            "tokenizer_hash": files.tokenizer.hash(),
        }))
        .unwrap();
        (files, identity)
    }

    #[test]
    fn a_job_of_another_model_or_tokenizer_is_refused() {
        let (files, identity) = demo();
        let formats = Formats::of(Precision::Int8.into(), RequestedKvFormat::Auto, Precision::F32);
        let model = Model::new(files, formats, 128, "m".to_owned());
        assert_eq!(model.refusal(&identity), None);
        let other_model = JobIdentity {
            model_hash: "n".into(),
            ..identity.clone()
        };
        let why = model.refusal(&other_model).unwrap();
        assert!(why.starts_with("it is for model n, this worker has m ("), "{why}");
        let other_tokenizer = JobIdentity {
            tokenizer_hash: "t".into(),
            ..identity
        };
        assert_eq!(
            model.refusal(&other_tokenizer).unwrap(),
            "it is for another tokenizer than this worker's"
        );
    }

    /// Records without a format of keys and values mean the precision's default.
    #[test]
    fn a_job_in_other_formats_is_refused() {
        let (files, identity) = demo();
        let refusal = |kv_cache, recorded: Option<&str>| {
            let identity = JobIdentity {
                kv_cache: recorded.map(String::from),
                ..identity.clone()
            };
            let formats = Formats::of(Precision::Int8.into(), kv_cache, Precision::F32);
            Model::new(files.clone(), formats, 128, "m".to_owned()).refusal(&identity)
        };
        assert_eq!(refusal(RequestedKvFormat::Auto, None), None);
        assert_eq!(refusal(KvFormat::Int8.into(), None), None);
        assert_eq!(refusal(KvFormat::Bf16.into(), Some("bf16")), None);
        assert_eq!(
            refusal(RequestedKvFormat::Auto, Some("bf16")).unwrap(),
            "it runs in int8 with keys and values in bf16, this worker in int8"
        );
        assert_eq!(
            refusal(KvFormat::F32.into(), None).unwrap(),
            "it runs in int8, this worker in int8 with keys and values in f32"
        );
    }
}
