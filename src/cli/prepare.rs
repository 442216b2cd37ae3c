//! Shared preparation of the commands: turns a job file into a checked job with its model folder
//! and device.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;

use crate::cli::args::JobArgs;
use crate::cli::device_choice::ResolvedDevice;
use crate::cli::exit::Failure;
use crate::cli::memory;
use crate::cli::model_source::{open_job_model, output_location};
use crate::cli::output::output_of;
use crate::cli::recheck::RecheckSample;
use crate::cli::sampling::SamplingReport;
use crate::cli::setup::check_formats;
use crate::dataset::DatasetError;
use crate::dataset::output::{OutputColumns, OutputSchema};
use crate::dataset::plan::Format;
use crate::dataset::plan::planner::{InputPlan, PlanRequest, hash_inputs, plan_inputs};
use crate::dataset::store::location::Location;
use crate::device::{KvFormat, Precision};
use crate::engine::constraint::Constraint;
use crate::job::file::{self, OutputFormat};
use crate::job::generate::ConstraintSpec;
use crate::job::on_finish::OnFinish;
use crate::job::sampling::Source;
use crate::job::spec::{Job, PromptKind};
use crate::job::thinking::ModelThinking;
use crate::job::{JobError, Parameters, Renderer};
use crate::ledger::keys::sha256;
use crate::ledger::{JobDraft, JobIdentity, JobLimits, Ledger, Unfinished};
use crate::model::config::Config;
use crate::model::size::{CodedSize, ModelSize};
use crate::report::summary::{counted, number};
use crate::signing::Signing;
use crate::worker::model::{Formats, ModelFiles, PromptSettings};

/// Estimated output bytes per generated token: its text, id and log probability.
const BYTES_PER_TOKEN: u64 = 12;
/// Estimated bytes per value of a typed answer, including nulls.
const BYTES_PER_VALUE: u64 = 16;

/// Minimum size of the inputs for which a notice about hashing is printed.
const HASHING_NOTICE_BYTES: u64 = 4 << 30;

/// A job, and everything about its model except the weights.
pub(super) struct PreparedJob {
    pub job: Arc<Job>,
    /// The command-line arguments that name the job.
    pub args: JobArgs,
    pub model: ModelFiles,
    pub limit: Option<u64>,
    pub output: Location,
    /// The sample of the report's recheck, if the job asks for one.
    pub recheck: Option<RecheckSample>,
    /// The device that runs the job.
    pub device: ResolvedDevice,
    /// Sources of its sampling values, once [resolved](Self::resolve_settings).
    pub sampling: SamplingReport,
    /// How its model thinks, once resolved; `None`: the model's whole output is its answer.
    pub thinking: Option<ModelThinking>,
    /// A warning about prompts that use no column.
    same_prompt_warning: Option<String>,
}

impl PreparedJob {
    /// Reads the job file and the model's config and tokenizer; `device` is called once the job
    /// file is known to be valid.
    pub(super) async fn prepare(
        args: &JobArgs,
        limit: Option<u64>,
        device: impl FnOnce() -> Result<ResolvedDevice, Failure>,
    ) -> Result<PreparedJob, Failure> {
        let parameters = Parameters::new(&args.set).map_err(|why| Failure::bad_job(anyhow::anyhow!(why)))?;
        let mut job = Job::load(&args.path, &parameters).map_err(Failure::bad_job)?;
        let device = device()?;
        let job_formats = Formats::of_job(&job, device.precision());
        let recheck = job.recheck.as_ref();
        let recheck =
            recheck.map(|settings| RecheckSample::new(&job, job_formats, settings, "`report.recheck.precision`"));
        let recheck = recheck.transpose()?;
        let model = open_job_model(&mut job, limit).await?;
        refuse_fp8_without_gpu(&job, job_formats, &model.config)?;
        refuse_w4a8_without_codes(&job, job_formats, &model)?;
        let output = output_location(&job, limit).await?;
        Ok(PreparedJob {
            job: Arc::new(job),
            args: args.clone(),
            model,
            limit,
            output,
            recheck,
            device,
            sampling: SamplingReport::default(),
            thinking: None,
            same_prompt_warning: None,
        })
    }

    /// A job that was made from a request instead of a file, for a model that is open already.
    pub(super) fn of_request(job: Job, model: ModelFiles, device: ResolvedDevice) -> Result<PreparedJob, Failure> {
        Ok(PreparedJob {
            args: JobArgs {
                path: PathBuf::from(&job.file),
                set: Vec::new(),
            },
            output: output_of(&job)?,
            job: Arc::new(job),
            model,
            limit: None,
            recheck: None,
            device,
            sampling: SamplingReport::default(),
            thinking: None,
            same_prompt_warning: None,
        })
    }

    /// Fills in settings that the job leaves to its checkpoint. If the job has begun, they come
    /// from its record.
    ///
    /// # Errors
    /// The checkpoint's settings are invalid or unsupported.
    pub(super) fn resolve_settings(&mut self, begun: Option<&Ledger>) -> Result<(), Failure> {
        let begun = begun.filter(|ledger| self.is_record_of_job(ledger));
        let job = Arc::make_mut(&mut self.job);
        self.sampling = match begun {
            Some(ledger) => SamplingReport::of_begun(job, &self.model, ledger)?,
            None => SamplingReport::of_new(job, &self.model)?,
        };
        self.resolve_thinking(begun.is_none())
    }

    /// Determines how the model thinks and, for a new job, the default `max_tokens`.
    fn resolve_thinking(&mut self, is_new: bool) -> Result<(), Failure> {
        let renderer = self.renderer(&PromptSettings::UNKNOWN)?;
        self.thinking = renderer.thinking().cloned();
        self.same_prompt_warning = renderer.columns().filter(Vec::is_empty).map(|_| {
            "`prompt` uses no column, so all rows have the same prompt; a column is written `{{ name }}`".to_string()
        });
        let max_tokens = self
            .thinking
            .as_ref()
            .and_then(|thinking| thinking.default_max_tokens(renderer.context_tokens()));
        let generate = &mut Arc::make_mut(&mut self.job).generate;
        if let Some(max_tokens) =
            max_tokens.filter(|_| is_new && generate.source("max_tokens") == Some(Source::Default))
        {
            generate.max_tokens = max_tokens;
            // This fails if the context has no tokens left for a prompt.
            self.renderer(&PromptSettings::UNKNOWN)?;
        }
        Ok(())
    }

    /// Warnings about the model's files and settings.
    pub(super) fn warnings(&self) -> Vec<&String> {
        self.model
            .config
            .warnings
            .iter()
            .chain(&self.sampling.warnings)
            .chain(&self.same_prompt_warning)
            .collect()
    }

    /// Prints the warnings to stderr.
    pub(super) fn warn(&self) {
        print_warnings(self.warnings());
    }

    /// A line about how the model thinks and the token limit of thought and answer; `None` if it
    /// does not think.
    pub(super) fn thinking_line(&self) -> Option<String> {
        let generate = &self.job.generate;
        let set_by = match generate.source("max_tokens") {
            Some(Source::Default) => "unless `generate.max_tokens` says otherwise",
            Some(Source::Job) => "by the job",
            _ => "by the checkpoint",
        };
        let max_tokens = number(generate.max_tokens.into());
        let thinks = self.thinking.as_ref()?.describe();
        Some(format!(
            "{thinks}; up to {max_tokens} tokens for thought and answer, {set_by}"
        ))
    }

    /// Finds the inputs, records their versions, cuts them into shards, and checks that they have
    /// every column that the job names.
    pub(super) async fn plan(&self) -> Result<InputPlan, Failure> {
        let generate = &self.job.generate;
        let renderer = self.renderer(&PromptSettings::UNKNOWN)?;
        let mut request = PlanRequest {
            uris: self.job.input.uris.clone(),
            format: self.job.input.format,
            csv: self.job.input.csv.clone(),
            options: self.job.input.options.clone(),
            used_columns: renderer.columns(),
            // The renderer checks the columns below, since it knows the field that names each
            // column.
            columns: None,
            carry: self.job.carried_columns(),
            reserved: self.reserved_names(),
            shard_rows: self.job.shard_rows,
            output_row_bytes: self.answer_bytes() * u64::from(generate.n),
            limit: self.limit,
            output: Some(output_of(&self.job)?),
        };
        if self.job.output.carry_all {
            self.carry_all_columns(&mut request).await?;
        }
        let planned = plan_inputs(&request, &self.job.base_dir).await;
        let bad_input = |error: DatasetError| self.bad_input(error);
        let plan = match planned {
            Err(_) if matches!(self.job.prompt.kind, PromptKind::Openai) || self.job.gold.is_some() => {
                // The plan may have failed because a column is missing that an OpenAI batch or
                // `gold` adds to the carried ones. `check_columns` has a better error for these.
                let basic_request = PlanRequest {
                    carry: self.job.output.carry.clone(),
                    ..request
                };
                let plan = plan_inputs(&basic_request, &self.job.base_dir)
                    .await
                    .map_err(bad_input)?;
                self.check_columns(&renderer, &plan)?;
                planned.map_err(bad_input)?
            }
            planned => planned.map_err(bad_input)?,
        };
        self.check_columns(&renderer, &plan)?;
        renderer.check_templates().map_err(Failure::bad_job)?;
        for warning in renderer.warnings() {
            eprintln!("gristmill: warning: {}: {warning}", self.job.file);
        }
        for note in &plan.notes {
            eprintln!("gristmill: warning: {}: {note}", self.job.file);
        }
        if let PromptKind::TokenIds(name) = &self.job.prompt.kind {
            self.check_token_ids(&plan, name)?;
        }
        self.output_schema(&plan)?;
        Ok(plan)
    }

    fn bad_input(&self, error: DatasetError) -> Failure {
        Failure::bad_job(error).context(self.job.file.clone())
    }

    /// Input columns whose names collide with the output's own columns and that are not renamed.
    fn reserved_names(&self) -> Vec<String> {
        let mut reserved = OutputSchema::own_names(&self.output_columns());
        reserved.retain(|name| !self.job.output.renamed.contains_key(name));
        reserved
    }

    /// Adds all input columns to the carried ones, which requires planning the inputs first.
    async fn carry_all_columns(&self, request: &mut PlanRequest) -> Result<(), Failure> {
        let basic_request = PlanRequest {
            carry: Vec::new(),
            ..request.clone()
        };
        let plan = plan_inputs(&basic_request, &self.job.base_dir).await;
        let plan = plan.map_err(|error| self.bad_input(error))?;
        for name in plan.columns.into_iter().map(|column| column.name) {
            if request.carry.contains(&name) {
                continue;
            }
            match request
                .reserved
                .iter()
                .find(|result_column| result_column.to_lowercase() == name.to_lowercase())
            {
                Some(result_column) => eprintln!(
                    "gristmill: warning: {}: `output.carry` leaves `{name}` out: `{result_column}` is the name of a result column; \
                     `{{\"*\": \"*\", input_{name}: {name}}}` gives it another",
                    self.job.file
                ),
                None => request.carry.push(name),
            }
        }
        Ok(())
    }

    /// Estimated bytes of an answer in the output.
    fn answer_bytes(&self) -> u64 {
        let tokens = u64::from(self.job.generate.max_tokens);
        let columns = self.output_columns();
        let values = columns.parsed.map_or(0, |answer_type| answer_type.max_values(tokens));
        BYTES_PER_TOKEN * tokens + BYTES_PER_VALUE * values
    }

    /// Hashes each input, so that after a change of its ETag its bytes can be compared. Parquet
    /// files are read once more for this. A trial does without, since it should be fast.
    pub(super) async fn hash_inputs(&self, plan: &mut InputPlan) -> Result<(), Failure> {
        if self.limit.is_some() {
            return Ok(());
        }
        let bytes: u64 = plan.files.iter().filter(|f| f.sha256.is_none()).map(|f| f.size).sum();
        if bytes >= HASHING_NOTICE_BYTES {
            eprintln!(
                "gristmill: reads {} MB of input once, for the hashes of the plan",
                number(bytes >> 20)
            );
        }
        hash_inputs(plan).await.map_err(|error| input_failure(error.into()))
    }

    /// Checks that a column of token ids holds lists of whole numbers. (Lines are untyped, so each
    /// row is checked later.)
    fn check_token_ids(&self, plan: &InputPlan, name: &str) -> Result<(), Failure> {
        let typed = plan
            .files
            .iter()
            .any(|file| file.format.is_table() || file.format == Format::Csv);
        let kind = plan
            .columns
            .iter()
            .find(|column| column.name == name)
            .map(|column| column.kind.as_str());
        match kind {
            Some(kind) if typed && !(kind.contains("List") && kind.contains("Int")) => {
                Err(Failure::bad_job(anyhow::anyhow!(
                    "{}: column `{name}`, used in `prompt.token_ids`, is of type {kind}; it must be a list of whole numbers",
                    self.job.file
                )))
            }
            _ => Ok(()),
        }
    }

    /// The seed, date and `max_tokens` of this job's prompts, and whether the job has begun. If
    /// `begun` is the ledger of another job, they are those of a job created now.
    pub(super) fn stream(&self, begun: Option<&Ledger>) -> (PromptSettings, bool) {
        match begun {
            Some(ledger) if self.is_record_of_job(ledger) => (PromptSettings::of(&self.job, ledger), true),
            _ => (PromptSettings::now(), false),
        }
    }

    /// The renderer of this job's prompts.
    pub(super) fn renderer(&self, stream: &PromptSettings) -> Result<Renderer, Failure> {
        self.model.renderer(&self.job, stream).map_err(Failure::bad_job)
    }

    /// Checks that the answers' output constraint is possible with this tokenizer.
    pub(super) fn check_constraint(&self) -> Result<(), Failure> {
        let shape = self.job.generate.params(0, false).shape;
        let eos = self.model.eos_token_ids(&self.renderer(&PromptSettings::UNKNOWN)?);
        let field = match &self.job.generate.shape {
            ConstraintSpec::Free => return Ok(()),
            ConstraintSpec::Choice { .. } => "choice",
            ConstraintSpec::JsonSchema(_) => "json_schema",
            ConstraintSpec::Regex(_) => "regex",
        };
        let compiled = Constraint::compile(&shape, &self.model.tokenizer, &eos);
        match compiled.and_then(|constraint| self.job.generate.forbidden.check_choices(&constraint)) {
            Ok(()) => Ok(()),
            Err(e) => Err(Failure::bad_job(anyhow::anyhow!(
                "{}: `generate.{field}`: {e}",
                self.job.file
            ))),
        }
    }

    /// Checks that the device supports the job's model and number formats, and that a CPU has the
    /// memory. `kv_memory`: the value of `--kv-memory`.
    pub(super) fn check_device(&self, kv_memory: Option<u64>) -> anyhow::Result<()> {
        let (config, formats) = (&self.model.config, self.formats());
        if let ResolvedDevice::Cuda(_) = self.device {
            config.refuse_on_gpu()?;
        }
        let checked = check_formats(formats, self.device).and_then(|()| match self.device {
            ResolvedDevice::Cpu => {
                let size = ModelSize::of(config).with_codes(self.model.coded);
                memory::check(size, self.model.stored, formats.precision, kv_memory)
            }
            ResolvedDevice::Cuda(_) => Ok(()),
        });
        checked.with_context(|| format!("{}: in {formats}, it cannot run here", self.job.file))
    }

    /// The number formats to compute in, resolved.
    pub(super) fn formats(&self) -> Formats {
        Formats::of_job(&self.job, self.device.precision())
    }

    /// Hash of the job file and of a trial's row limit.
    pub(super) fn job_hash(&self) -> String {
        match self.limit {
            None => self.job.hash().to_string(),
            Some(rows) => sha256(format!("{} limit {rows}", self.job.hash()).as_bytes()),
        }
    }

    /// The identity that two runs of the same job share. Reads the whole checkpoint once.
    pub(super) fn identity(&self) -> Result<JobIdentity, Failure> {
        self.identity_with(self.model.hash(self.formats().precision).map_err(Failure::bad_job)?)
    }

    /// As [`PreparedJob::identity`], for a checkpoint whose hash is known.
    pub(super) fn identity_with(&self, model_hash: String) -> Result<JobIdentity, Failure> {
        Ok(JobIdentity {
            job_hash: self.job_hash(),
            model_hash,
            tokenizer_hash: self.model.tokenizer.hash().to_string(),
            template_hash: Some(self.renderer(&PromptSettings::UNKNOWN)?.template_hash().to_string()),
            precision: self.formats().precision_name().into(),
            kv_cache: self.formats().recorded_kv(),
        })
    }

    /// Columns of the output besides the carried ones.
    pub(super) fn output_columns(&self) -> OutputColumns {
        self.job.output_columns(self.thinking.is_some())
    }

    /// All columns of the output.
    fn output_schema(&self, plan: &InputPlan) -> Result<OutputSchema, Failure> {
        let columns = OutputSchema::new(&plan.carry_schema, self.output_columns());
        let named = columns.with_renamed(&self.job.output.renamed).and_then(|named| {
            // Result lines have no columns, so names that differ only by case are no problem there.
            match self.job.output.format {
                OutputFormat::Parquet => named.check_case().map(|()| named),
                OutputFormat::Openai => Ok(named),
            }
        });
        named.map_err(|why| Failure::bad_job(anyhow::anyhow!("{}: `output.carry`: {why}", self.job.file)))
    }

    /// The job's limits as its file states them.
    pub(super) fn limits(&self) -> JobLimits {
        let budget = &self.job.budget;
        JobLimits {
            usd: budget.usd,
            deadline_seconds: budget.deadline_seconds,
            usd_per_hour: budget.usd_per_hour,
            unfinished: match budget.unfinished {
                file::Unfinished::Keep => Unfinished::Keep,
                file::Unfinished::Expire => Unfinished::Expire,
            },
        }
    }

    /// The planned job, ready to be recorded.
    pub(super) fn draft(&self, plan: InputPlan, identity: JobIdentity) -> Result<JobDraft, Failure> {
        let columns = self.output_schema(&plan)?;
        let mut job = (*self.job).clone();
        if self.limit.is_some() {
            // A trial notifies nobody.
            job.on_finish = OnFinish::default();
        }
        Ok(JobDraft {
            name: self.job.name.clone(),
            identity,
            resolved: job.resolved(),
            inputs: plan.files,
            layout: plan.layout,
            shards: plan.shards,
            columns: serde_json::to_value(&columns)?,
            needs_newest_version: columns.needs_newest_version()
                || self.job.output.carry_all
                || !self.job.output.writing.is_default(),
            part_extension: match self.job.output.format {
                OutputFormat::Parquet => "parquet".into(),
                OutputFormat::Openai => "jsonl".into(),
            },
            usd_per_hour: self.job.budget.usd_per_hour,
            limits: self.limits(),
        })
    }

    /// Checks that the inputs have every column that the job names.
    fn check_columns(&self, renderer: &Renderer, plan: &InputPlan) -> Result<(), Failure> {
        if plan.total_rows == 0 && plan.columns.is_empty() {
            // Files of lines without rows have unknown columns.
            return Ok(());
        }
        if let (true, Some(format)) = (plan.columns.is_empty(), self.job.input.format) {
            return Err(Failure::bad_job(anyhow::anyhow!(
                "{}: `input.format` is `{}`, and no row of {} can be read so: leave it out to have the format found",
                self.job.file,
                format.as_str(),
                counted(plan.files.len() as u64, "file")
            )));
        }
        let columns: Vec<String> = plan.columns.iter().map(|c| c.name.clone()).collect();
        renderer.check_columns(&columns).map_err(Failure::bad_job)?;
        // If the column `row` is a struct or map, `row.NAME` in a template may be one of its
        // fields.
        let has_fields = |kind: &str| kind.starts_with("Struct") || kind.starts_with("Map");
        if plan.columns.iter().any(|c| c.name == "row" && !has_fields(&c.kind)) {
            renderer.check_row(&columns).map_err(Failure::bad_job)?;
        }
        let in_all_files: Vec<String> = columns
            .into_iter()
            .filter(|name| !plan.missing_in.contains_key(name))
            .collect();
        match renderer.check_columns(&in_all_files) {
            Err(JobError::Column {
                location,
                column,
                field,
                ..
            }) => {
                let input = plan.missing_in.get(&column).cloned().unwrap_or_default();
                let hint = ", and does in others; `input.missing_columns: nulls` makes it null there".into();
                Err(Failure::bad_job(JobError::Column {
                    location,
                    column,
                    field,
                    input,
                    hint,
                }))
            }
            checked => checked.map_err(Failure::bad_job),
        }
    }
}

/// Refuses a job that no device computes: only GPUs compute in FP8, and they do not run each model.
fn refuse_fp8_without_gpu(job: &Job, formats: Formats, config: &Config) -> Result<(), Failure> {
    let is_fp8 = formats.precision == Precision::Fp8 || formats.kv == KvFormat::Fp8;
    match config.refuse_on_gpu() {
        Err(why) if is_fp8 => Err(Failure::bad_job(anyhow::anyhow!(
            "{}: no device computes this model in {formats}: a CPU does not compute in fp8, and {why}, and another precision",
            job.file
        ))),
        _ => Ok(()),
    }
}

/// Refuses a job that asks for weights in four bits, of a model that has none.
fn refuse_w4a8_without_codes(job: &Job, formats: Formats, model: &ModelFiles) -> Result<(), Failure> {
    if formats.precision == Precision::W4a8 && model.coded.values == 0 {
        let why = CodedSize::refusal(&model.dir);
        return Err(Failure::bad_job(anyhow::anyhow!("{}: {why}", job.file)));
    }
    Ok(())
}

/// Prints warnings to stderr.
pub(super) fn print_warnings<'a>(warnings: impl IntoIterator<Item = &'a String>) {
    for warning in warnings {
        eprintln!("gristmill: warning: {warning}");
    }
}

/// Prints at the start whether records and messages must be signed.
pub(super) fn print_signing(quiet: bool) -> Result<(), Failure> {
    let signing = Signing::of_process().map_err(|why| Failure::bad_job(anyhow::anyhow!(why)))?;
    if let Some(line) = signing.startup_line().filter(|_| !quiet) {
        eprintln!("gristmill: {line}");
    }
    Ok(())
}

/// An unreadable input is the job's fault; a failing store is not.
pub(super) fn input_failure(error: anyhow::Error) -> Failure {
    match error.downcast_ref::<DatasetError>() {
        None | Some(DatasetError::Store { .. }) => Failure::from(error),
        Some(_) => Failure::bad_job(error),
    }
}
