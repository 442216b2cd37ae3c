//! What the commands share on the way in: a job file becomes a checked job, its model folder, and its place.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::datatypes::SchemaRef;
use sha2::{Digest, Sha256};

use crate::cli::exit::Failure;
use crate::dataset::location::Location;
use crate::dataset::output::{OutputColumns, OutputSchema};
use crate::dataset::planner::{InputPlan, InputRequest, plan_inputs};
use crate::engine::constraint::Compiler;
use crate::job::spec::{Job, OutputFormat, Precision, ShapeSpec};
use crate::job::{RenderSetup, Renderer};
use crate::ledger::{JobDraft, JobIdentity, Ledger};
use crate::model::config::Config;
use crate::model::tokenizer::Tokenizer;
use crate::model::weights::checkpoint_hash;
use crate::report::summary::{Agreement, RowCounts, Summary, TokenCounts, rate};

/// A job and everything about its model but the weights.
pub struct Opened {
    pub job: Arc<Job>,
    pub model_dir: PathBuf,
    pub config: Config,
    pub tokenizer: Arc<Tokenizer>,
    pub limit: Option<u64>,
    pub output: Location,
}

impl Opened {
    /// Reads the job file and the model's config and tokenizer.
    pub fn open(path: &Path, limit: Option<u64>) -> Result<Opened, Failure> {
        let job = Job::load(path).map_err(Failure::bad_job)?;
        let model_dir = model_dir(&job)?;
        let config = Config::load(&model_dir).map_err(Failure::bad_job)?;
        let tokenizer = Tokenizer::load(&model_dir).map_err(Failure::bad_job)?;
        let mut output = Location::parse(&job.output.uri, &job.base_dir).map_err(Failure::bad_job)?;
        if let Some(rows) = limit {
            // A job of its own: trying out must not touch the real output. Readers ignore names that begin with `_`.
            output = output.join(&format!("_limit/{rows}"));
        }
        Ok(Opened { job: Arc::new(job), model_dir, config, tokenizer: Arc::new(tokenizer), limit, output })
    }

    /// Finds, pins and cuts the inputs, and checks that they hold every column that the job names.
    pub async fn plan(&self) -> Result<InputPlan, Failure> {
        let request = InputRequest {
            uris: &self.job.input.uris,
            base_dir: &self.job.base_dir,
            format: self.job.input.format.map(Into::into),
            carry: &self.carry(),
            shard_rows: self.job.shard_rows,
            limit: self.limit,
        };
        let plan = plan_inputs(request).await.map_err(Failure::bad_job)?;
        let columns: Vec<String> = plan.columns.iter().map(|c| c.name.clone()).collect();
        self.renderer(0)?.check_columns(&columns).map_err(Failure::bad_job)?;
        Ok(plan)
    }

    /// Input columns in the output: those to carry, and the gold column that the report compares with.
    pub fn carry(&self) -> Vec<String> {
        let mut carry = self.job.output.carry.clone();
        carry.extend(self.job.gold.iter().filter(|gold| !carry.contains(gold)).cloned().collect::<Vec<_>>());
        carry
    }

    /// Prompts of this job. `seed` keys the random numbers where the job names no seed.
    pub fn renderer(&self, seed: u64) -> Result<Renderer, Failure> {
        let setup = RenderSetup {
            job: self.job.clone(),
            tokenizer: self.tokenizer.clone(),
            context_tokens: self.config.context_tokens(),
            seed,
        };
        Renderer::new(setup).map_err(Failure::bad_job)
    }

    /// Checks that what the answers must look like can be had from this tokenizer at all.
    pub fn check_shape(&self) -> Result<(), Failure> {
        let shape = self.job.generate.params(0).shape;
        let field = match &self.job.generate.shape {
            ShapeSpec::Free => return Ok(()),
            ShapeSpec::Choice { .. } => "choice",
            ShapeSpec::JsonSchema(_) => "json_schema",
            ShapeSpec::Regex(_) => "regex",
        };
        match Compiler::new(&self.eos_token_ids()).compile(&shape, &self.tokenizer) {
            Ok(_) => Ok(()),
            Err(e) => Err(Failure::bad_job(anyhow::anyhow!("{}: `generate.{field}`: {e}", self.job.file))),
        }
    }

    /// The union of what config, generation config and chat template end a sequence with.
    pub fn eos_token_ids(&self) -> Vec<u32> {
        let mut ids = self.config.eos_token_ids.clone();
        ids.extend(self.tokenizer.end_of_turn_ids());
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// The precision to compute in, resolved.
    pub fn precision(&self) -> crate::device::Precision {
        use crate::device::Precision as Device;
        match self.job.precision {
            Precision::F32 => Device::F32,
            Precision::Bf16 => Device::Bf16,
            Precision::Auto => self.config.natural_precision(),
        }
    }

    /// What makes two runs the same job. Reads the whole checkpoint once.
    pub fn identity(&self) -> Result<JobIdentity, Failure> {
        let job_hash = match self.limit {
            None => self.job.hash().to_string(),
            Some(rows) => hex(&Sha256::digest(format!("{} limit {rows}", self.job.hash()))),
        };
        Ok(JobIdentity {
            job_hash,
            model_hash: checkpoint_hash(&self.model_dir).map_err(Failure::bad_job)?,
            tokenizer_hash: self.tokenizer.hash().to_string(),
            template_hash: self.renderer(0)?.template_hash(),
            precision: self.precision().as_str().to_string(),
        })
    }

    /// Columns of the output besides the carried ones.
    pub fn output_schema(&self, carry: &SchemaRef) -> Result<OutputSchema, Failure> {
        let generate = &self.job.generate;
        let columns = OutputColumns {
            samples: generate.n,
            token_ids: self.job.output.token_ids,
            logprobs: generate.logprobs,
            choices: match &generate.shape {
                ShapeSpec::Choice { choices, probabilities: true } => Some(choices.clone()),
                _ => None,
            },
        };
        OutputSchema::new(carry, columns).map_err(Failure::bad_job)
    }

    /// The planned job, ready to be written down.
    pub fn draft(&self, plan: &InputPlan, schema: &OutputSchema, identity: JobIdentity) -> Result<JobDraft, Failure> {
        Ok(JobDraft {
            name: self.job.name.clone(),
            identity,
            resolved: self.job.resolved(),
            inputs: plan.files.clone(),
            shards: plan.shards.clone(),
            columns: schema.to_json()?,
            part_extension: match self.job.output.format {
                OutputFormat::Parquet => "parquet".into(),
                OutputFormat::Openai => "jsonl".into(),
            },
            usd_per_hour: self.job.budget.usd_per_hour,
        })
    }
}

/// The model's folder: local, for now.
fn model_dir(job: &Job) -> Result<PathBuf, Failure> {
    let bad = |why: &str| Failure::bad_job(anyhow::anyhow!("{}: `model`: {why}", job.file));
    if job.model.contains("://") && !job.model.starts_with("file://") {
        return Err(bad(&format!(
            "`{}` cannot be loaded by this build: download the model and name its folder",
            job.model
        )));
    }
    let location = Location::parse(&job.model, &job.base_dir).map_err(Failure::bad_job)?;
    let dir = location.local_path().ok_or_else(|| bad("is not a local folder"))?;
    if !dir.is_dir() {
        return Err(bad(&format!("`{}` is not a folder", dir.display())));
    }
    Ok(dir)
}

/// A job's ledger from its output, or one line that says that there is none.
pub async fn ledger_at(output: &str) -> Result<Ledger, Failure> {
    let here = std::env::current_dir()?;
    let location = Location::parse(output, &here).map_err(Failure::bad_job)?;
    let found = Ledger::open(&location).await?;
    found.ok_or_else(|| Failure::bad_job(anyhow::anyhow!("`{}` holds no job: there is no `_gristmill/job.json`", location.url)))
}

/// The report of a job as its ledger tells it.
pub async fn summary(ledger: &Ledger, output: &str) -> Result<Summary, Failure> {
    let status = ledger.status().await?;
    let tally = &status.tally;
    let tokens =
        TokenCounts { prompt: tally.prompt_tokens, cached: tally.cached_tokens, completion: tally.completion_tokens };
    Ok(Summary {
        job: status.name.clone(),
        output: output.to_string(),
        rows: RowCounts {
            total: status.rows,
            succeeded: tally.succeeded,
            invalid_output: tally.invalid_output,
            errored: tally.errored,
            expired: tally.expired,
            cancelled: tally.cancelled,
        },
        tokens,
        seconds: status.seconds,
        tokens_per_second: rate(tokens.prompt + tokens.completion, status.seconds),
        usd: status.usd,
        agreement: None::<Agreement>,
    })
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
