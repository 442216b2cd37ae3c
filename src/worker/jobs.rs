//! The jobs that a worker has heard of: each is opened once, from its ledger alone.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::time::Duration;

use arrow::array::RecordBatch;
use bytes::Bytes;
use tokio::sync::{Mutex, watch};

use crate::dataset::DatasetError;
use crate::dataset::output::{OutputColumns, OutputSchema};
use crate::dataset::part::{OpenaiMeta, part_openai, part_parquet};
use crate::dataset::shard::ShardReader;
use crate::dataset::store::job_inputs::VerifiedVersion;
use crate::dataset::store::location::Location;
use crate::dataset::store::pinned_file::display_name;
use crate::dataset::writing::WriteOptions;
use crate::engine::params::GenerationParams;
use crate::engine::request::{Request, SampleId};
use crate::error_line::one_line;
use crate::job::file::OutputFormat;
use crate::job::{Job, Renderer};
use crate::ledger::control::ControlLog;
use crate::ledger::keys::JOB;
use crate::ledger::{JobCommand, JobLimits, Ledger, PinOrder};
use crate::queue::Message;
use crate::worker::access::Access;
use crate::worker::in_flight::ShardKey;
use crate::worker::job_state::JobState;
use crate::worker::model::{Model, PromptSettings};
use crate::worker::retry_policy::{RetryDecision, decision};
use crate::worker::room::CarriedMemory;

/// Number of known jobs from which those without another holder are dropped.
const OPEN_MAX: usize = 64;

/// The file format of a job's parts, with its options.
#[derive(Debug, Clone)]
pub enum PartFormat {
    Parquet(WriteOptions),
    /// OpenAI batch result lines.
    Openai(OpenaiMeta),
}

/// A worker's spending on a job.
#[derive(Debug, Default)]
pub struct Spending {
    micros: AtomicU64,
    /// Recorded microseconds plus one; 0: there is no record.
    recorded_plus_one: AtomicU64,
}

/// A job (in one of its generations), ready to be worked on.
pub struct OpenJob {
    /// Identifies the job within this worker.
    pub number: u32,
    pub ledger: Ledger,
    pub reader: ShardReader,
    pub renderer: Renderer,
    /// Token ids that end its completions.
    pub eos: Arc<[u32]>,
    /// Jobs with the same salt share computed prefixes; the default is unique to the job.
    cache_salt: Arc<str>,
    /// The number of the adapter that changes the worker's model for it; 0: none does.
    pub adapter: u32,
    pub output: OutputSchema,
    /// The output columns besides the carried columns.
    pub columns: Arc<OutputColumns>,
    pub format: PartFormat,
    /// What this worker has spent on the job, in all its generations.
    spending: Arc<Spending>,
    /// Accounts for the carried columns of its shards.
    carried_memory: Arc<CarriedMemory>,
    /// Number of its shards with rows on the device.
    running: AtomicU64,
    /// The commands to the job's workers that were read so far.
    control: Mutex<Option<ControlLog>>,
    state: watch::Sender<JobState>,
}

impl OpenJob {
    /// Encodes a part of these rows.
    pub fn make_part(&self, batches: &[RecordBatch], metadata: &[(String, String)]) -> Result<Bytes, DatasetError> {
        match &self.format {
            PartFormat::Parquet(options) => part_parquet(&self.output.schema(), batches, metadata, *options),
            PartFormat::Openai(meta) => part_openai(batches, meta),
        }
    }

    /// Opens the job of `ledger` for `model`.
    ///
    /// # Errors
    /// This version cannot read the record. The caller must have checked [`Model::refusal`].
    pub fn new(
        number: u32,
        ledger: Ledger,
        model: &Model,
        spending: Arc<Spending>,
        carried_memory: Arc<CarriedMemory>,
    ) -> anyhow::Result<OpenJob> {
        let record = ledger.job();
        let record_address = ledger.store().address(JOB);
        let job = Job::from_record(&record.resolved, &record_address)?;
        let output = job.recorded_columns(&record.columns, &record_address)?;
        let extension = match job.output.format {
            OutputFormat::Parquet => "parquet",
            OutputFormat::Openai => "jsonl",
        };
        if record.part_extension != extension {
            anyhow::bail!(
                "{record_address}: its parts end in `{}`, and its job writes `{extension}`",
                record.part_extension
            );
        }
        let renderer = model.files.renderer(&job, &PromptSettings::of(&job, &ledger))?;
        let format = match job.output.format {
            OutputFormat::Parquet => PartFormat::Parquet(job.output.writing),
            OutputFormat::Openai => PartFormat::Openai(OpenaiMeta {
                job: record.job.to_string(),
                model: job.model.clone(),
                created: ledger.created_at().timestamp(),
            }),
        };
        Ok(OpenJob {
            number,
            reader: ShardReader::new(record.inputs.clone(), output.carry(), renderer.columns())
                .with_layout(record.layout.clone()),
            eos: model.files.eos_token_ids(&renderer),
            cache_salt: match &job.cache_salt {
                Some(salt) => format!("salt {salt}").into(),
                None => format!("job {}", record.job).into(),
            },
            adapter: model.adapter_of(&record.identity)?,
            renderer,
            columns: Arc::new(output.columns().clone()),
            output,
            format,
            ledger,
            spending,
            carried_memory,
            running: AtomicU64::new(0),
            control: Mutex::new(None),
            state: watch::Sender::new(JobState::Running),
        })
    }

    pub fn state(&self) -> JobState {
        *self.state.borrow()
    }

    /// Reads the commands since the last call (one request if there are none) and notifies the
    /// job's shards. Returns the current limits.
    pub async fn refresh(&self) -> anyhow::Result<JobLimits> {
        let mut control = self.control.lock().await;
        match control.as_mut() {
            Some(control) => {
                control.refresh().await?;
            }
            None => *control = Some(self.ledger.control().await?),
        }
        Ok(self.apply_control(control.as_ref()))
    }

    /// Orders a stop, unless the job is finished or another command came first, which then applies.
    pub async fn order_stop(&self, order: JobCommand) -> anyhow::Result<()> {
        let mut control = self.control.lock().await;
        if let Some(control) = control.as_mut()
            && self.ledger.success().await?.is_none()
        {
            control.try_append(order).await?;
        }
        self.apply_control(control.as_ref());
        Ok(())
    }

    /// Records inputs with another ETag but the planned bytes, to save other workers the check.
    pub async fn write_pins(&self) -> anyhow::Result<()> {
        for verified in self.reader.inputs().unreported() {
            let planned = &self.ledger.job().inputs[verified.input as usize];
            let order = PinOrder {
                input: verified.input,
                size: planned.size,
                etag: verified.version.etag.clone(),
                version: verified.version.version.clone(),
            };
            let mut control = self.control.lock().await;
            if let Some(control) = control.as_mut() {
                control.record_pin(order).await?;
            }
            self.apply_control(control.as_ref());
            self.reader.inputs().mark_reported(&verified);
            let name = display_name(&planned.url);
            tracing::warn!(
                "{}: `{name}` has another ETag but the planned bytes: the new ETag is recorded",
                self.title()
            );
        }
        Ok(())
    }

    /// Leaves the job to other workers, because this version cannot continue it. Logs the error.
    pub fn leave_to_others(&self, error: &anyhow::Error) {
        tracing::warn!("{} is left to others: {}", self.title(), one_line(error));
        self.set_unreadable();
    }

    /// Marks the job's commands as unreadable.
    pub fn set_unreadable(&self) {
        self.state.send_replace(JobState::Unreadable);
    }

    fn apply_control(&self, control: Option<&ControlLog>) -> JobLimits {
        if let Some(control) = control {
            self.reader
                .inputs()
                .add_verified(control.pins().map(VerifiedVersion::from));
        }
        let state = match control.and_then(ControlLog::current_command) {
            Some(JobCommand::Stop { why, close: true, .. }) => JobState::Closing(*why),
            Some(JobCommand::Stop { why, close: false, .. }) => JobState::Stopped(*why),
            Some(JobCommand::Extend(_) | JobCommand::Pin(_)) | None => JobState::Running,
        };
        self.state.send_if_modified(|now| {
            let changed = *now != state;
            *now = state;
            changed
        });
        match control {
            Some(control) => self.ledger.limits(control),
            None => self.ledger.job().limits(),
        }
    }

    /// A row's requests to the engine, one per sample. `attempt`: the generation that runs the row.
    pub fn requests(
        &self,
        row: u64,
        prompt: Arc<[u32]>,
        params: Arc<GenerationParams>,
        attempt: u32,
    ) -> impl Iterator<Item = Request> {
        let (job, eos, cache_salt) = (self.number, self.eos.clone(), self.cache_salt.clone());
        let adapter = self.adapter;
        (0..params.samples).map(move |sample| Request {
            id: SampleId {
                job,
                row,
                sample,
                attempt,
            },
            prompt: prompt.clone(),
            params: params.clone(),
            eos: eos.clone(),
            cache_salt: cache_salt.clone(),
            adapter,
        })
    }

    /// The first row of a shard, over the job's whole input.
    pub fn first_row(&self, shard: u32) -> anyhow::Result<u64> {
        Ok(self.ledger.job().shard(shard)?.first_row)
    }

    /// Waits until the shard's carried columns (`bytes` so far) fit in memory beside the others'.
    pub async fn reserve_carried(&self, shard: u32, bytes: usize) {
        let job = self.number;
        self.carried_memory.reserve(ShardKey { job, shard }, bytes).await;
    }

    /// Notifies of changes of [`OpenJob::state`].
    pub fn watch_state(&self) -> watch::Receiver<JobState> {
        self.state.subscribe()
    }

    /// Counts device time that was spent on this job's rows.
    pub fn add_device_time(&self, time: Duration) {
        self.spending.micros.fetch_add(time.as_micros() as u64, Relaxed);
    }

    /// Device seconds that this worker has spent on the job.
    pub fn device_seconds(&self) -> f64 {
        self.spending.micros.load(Relaxed) as f64 / 1e6
    }

    /// Records this worker's spending on the job if it changed, and at the first call in any case.
    pub async fn write_spend(&self, worker: &str) -> anyhow::Result<()> {
        let micros = self.spending.micros.load(Relaxed);
        if self.spending.recorded_plus_one.load(Relaxed) > micros {
            return Ok(());
        }
        self.write_heartbeat(worker).await
    }

    /// As [`OpenJob::write_spend`], but always writes: the record is also a heartbeat.
    pub async fn write_heartbeat(&self, worker: &str) -> anyhow::Result<()> {
        let micros = self.spending.micros.load(Relaxed);
        self.ledger.write_spend(worker, micros as f64 / 1e6, false).await?;
        self.spending.recorded_plus_one.store(micros + 1, Relaxed);
        Ok(())
    }

    /// Records the spending for the last time, so that others stop counting this worker as live.
    pub async fn write_final_spend(&self, worker: &str) -> anyhow::Result<()> {
        if self.spending.recorded_plus_one.load(Relaxed) == 0 && !self.has_unwritten_spend() {
            return Ok(());
        }
        Ok(self.ledger.write_spend(worker, self.device_seconds(), true).await?)
    }

    /// Whether some spending is not recorded yet.
    pub fn has_unwritten_spend(&self) -> bool {
        let micros = self.spending.micros.load(Relaxed);
        micros > 0 && self.spending.recorded_plus_one.load(Relaxed) <= micros
    }

    /// Name and output, for messages.
    pub fn title(&self) -> String {
        format!("job `{}` ({})", self.ledger.job().name, self.ledger.store().url())
    }
}

/// Counts a shard of a job among those with rows on the device, until it is dropped.
pub struct RunningShardGuard {
    job: Option<Arc<OpenJob>>,
}

impl RunningShardGuard {
    pub fn of(job: Arc<OpenJob>) -> RunningShardGuard {
        job.running.fetch_add(1, AcqRel);
        RunningShardGuard { job: Some(job) }
    }

    /// All rows have come. Returns true if no other shard of the job has rows on the device.
    pub fn end(mut self) -> bool {
        self.job.take().is_some_and(|job| job.running.fetch_sub(1, AcqRel) == 1)
    }
}

impl Drop for RunningShardGuard {
    fn drop(&mut self) {
        if let Some(job) = self.job.take() {
            job.running.fetch_sub(1, AcqRel);
        }
    }
}

/// The job of a message.
pub enum JobLookup {
    Job(Arc<OpenJob>),
    /// The job needs another worker (other model, access or version); holds the reason.
    NotOurs(Arc<str>),
    /// There is no such job (any more); holds the reason.
    Stale(Arc<str>),
}

/// The jobs that this worker has heard of. See the module's description.
pub struct Jobs {
    model: Arc<Model>,
    access: Access,
    carried_memory: Arc<CarriedMemory>,
    known: Mutex<KnownJobs>,
}

/// A job in one of its generations: output, job id, generation.
pub(super) type JobKey = (String, String, u32);

#[derive(Default)]
struct KnownJobs {
    jobs: HashMap<JobKey, KnownJob>,
    next_number: u32,
    /// By job id, over generations and re-openings.
    spendings: HashMap<String, Arc<Spending>>,
}

enum KnownJob {
    Open(Arc<OpenJob>),
    NotOurs(Arc<str>),
}

impl KnownJob {
    fn lookup(&self) -> JobLookup {
        match self {
            KnownJob::Open(job) => JobLookup::Job(job.clone()),
            KnownJob::NotOurs(why) => JobLookup::NotOurs(why.clone()),
        }
    }
}

impl Jobs {
    /// For a worker that accepts every job, because a person gave them to this process.
    pub fn new(model: Model) -> Jobs {
        Jobs::with_access(model, Access::everything())
    }

    /// For a worker that takes only jobs that `access` accepts.
    pub fn with_access(model: Model, access: Access) -> Jobs {
        Jobs {
            model: Arc::new(model),
            access,
            carried_memory: Arc::default(),
            known: Mutex::default(),
        }
    }

    /// The model of all these jobs.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Accounts for the carried columns of all shards.
    pub fn carried_memory(&self) -> &Arc<CarriedMemory> {
        &self.carried_memory
    }

    /// Adds a job whose ledger is open already.
    pub async fn add(&self, ledger: Ledger) -> JobLookup {
        let (output, job) = (ledger.store().url().to_string(), ledger.job().job.to_string());
        let key = (output, job, ledger.generation());
        self.open_and_remember(key, ledger).await
    }

    /// Opens the job of a ledger, and remembers the result.
    async fn open_and_remember(&self, key: JobKey, ledger: Ledger) -> JobLookup {
        let opened = match self.model.refusal(&ledger.job().identity) {
            Some(why) => Err(why),
            None => {
                let (number, spending) = self.known.lock().await.assign_number(&key.1);
                let (model, memory) = (self.model.clone(), self.carried_memory.clone());
                // On a thread of its own: templates are slow, and a record may cause a panic.
                let opened = tokio::task::spawn_blocking(move || open(number, ledger, &model, spending, memory)).await;
                opened.unwrap_or_else(|error| Err(format!("this gristmill cannot open it: {error}")))
            }
        };
        let entry = match opened {
            Ok(job) => KnownJob::Open(Arc::new(job)),
            Err(why) => KnownJob::NotOurs(why.into()),
        };
        let lookup = entry.lookup();
        self.known.lock().await.remember(key, entry);
        lookup
    }

    /// The job that a message points at, with its commands, from memory or from its ledger.
    ///
    /// # Errors
    /// The store does not answer, or the record is not one of a job.
    pub async fn resolve(&self, message: &Message) -> anyhow::Result<JobLookup> {
        let lookup = self.look_up(message).await?;
        if let JobLookup::Job(job) = &lookup
            && job.control.lock().await.is_none()
            && let Err(error) = job.refresh().await
        {
            return match decision(&error) {
                // Without its commands, the job must not run: it may be cancelled.
                RetryDecision::LeaveShard => Ok(JobLookup::NotOurs(one_line(&error).into())),
                _ => Err(error),
            };
        }
        Ok(lookup)
    }

    /// Whether this process has already opened, or refused, the job that a message points at.
    pub async fn is_known(&self, message: &Message) -> bool {
        let key = (message.output.clone(), message.job.clone(), message.generation);
        self.known.lock().await.lookup(&key).is_some()
    }

    async fn look_up(&self, message: &Message) -> anyhow::Result<JobLookup> {
        let key = (message.output.clone(), message.job.clone(), message.generation);
        // Release the lock before the record is read: a slow store must not hold up other jobs.
        if let Some(lookup) = self.known.lock().await.lookup(&key) {
            return Ok(lookup);
        }
        let output = match Location::parse(&message.output, Path::new("/")) {
            Ok(output) => output,
            Err(error) => return Ok(JobLookup::Stale(one_line(&error.into()).into())),
        };
        if let Some(why) = self.access.output_refusal(&output) {
            return Ok(JobLookup::NotOurs(why.into()));
        }
        let Some(ledger) = Ledger::open(&output).await? else {
            return Ok(JobLookup::Stale(format!("`{}` holds no job", message.output).into()));
        };
        if ledger.job().job.as_str() != message.job {
            return Ok(JobLookup::Stale(
                format!(
                    "`{}` belongs to job {} now, not to {}",
                    message.output,
                    ledger.job().job,
                    message.job
                )
                .into(),
            ));
        }
        let inputs = ledger.job().inputs.iter().map(|input| input.url.as_str());
        if let Some(why) = self.access.inputs_refusal(&output, inputs) {
            let entry = KnownJob::NotOurs(why.into());
            let lookup = entry.lookup();
            self.known.lock().await.remember(key, entry);
            return Ok(lookup);
        }
        let ledger = if ledger.generation() == message.generation {
            ledger
        } else {
            ledger.open_generation(message.generation).await?
        };
        // The process that made the job may have reached the store by another route.
        ledger.store().check().await?;
        Ok(self.open_and_remember(key, ledger).await)
    }

    /// All open jobs.
    pub async fn open(&self) -> Vec<Arc<OpenJob>> {
        let known = self.known.lock().await;
        known.open().cloned().collect()
    }
}

impl KnownJobs {
    fn open(&self) -> impl Iterator<Item = &Arc<OpenJob>> {
        self.jobs.values().filter_map(|entry| match entry {
            KnownJob::Open(job) => Some(job),
            KnownJob::NotOurs(_) => None,
        })
    }

    fn lookup(&self, key: &JobKey) -> Option<JobLookup> {
        self.jobs.get(key).map(KnownJob::lookup)
    }

    /// A number for a job that is being opened, and the spending on it so far.
    fn assign_number(&mut self, job: &str) -> (u32, Arc<Spending>) {
        let number = self.next_number;
        self.next_number += 1;
        (number, self.spendings.entry(job.to_string()).or_default().clone())
    }

    fn remember(&mut self, key: JobKey, entry: KnownJob) {
        if self.jobs.len() >= OPEN_MAX {
            // A job without another holder can be opened again.
            self.jobs
                .retain(|_, entry| matches!(entry, KnownJob::Open(job) if Arc::strong_count(job) > 1));
        }
        self.jobs.insert(key, entry);
    }
}

/// Opens a job; the error says why this worker must leave it to others.
fn open(
    number: u32,
    ledger: Ledger,
    model: &Model,
    spending: Arc<Spending>,
    carried_memory: Arc<CarriedMemory>,
) -> Result<OpenJob, String> {
    // If this fails, most likely another version wrote the record.
    let job = OpenJob::new(number, ledger, model, spending, carried_memory)
        .map_err(|error| format!("this gristmill cannot open it: {}", one_line(&error)))?;
    match mismatch(&job, model) {
        Some(why) => Err(why),
        None => Ok(job),
    }
}

/// Why an opened job does not fit this model after all.
fn mismatch(job: &OpenJob, model: &Model) -> Option<String> {
    let planned_hash = job.ledger.job().identity.template_hash.as_deref();
    if planned_hash != Some(job.renderer.template_hash()) {
        return Some("its prompts go through another chat template than this worker's model has".into());
    }
    let context_needed = job.renderer.context_tokens();
    (context_needed > model.context_tokens).then(|| {
        format!(
            "it needs a context of {context_needed} tokens, this worker's model was loaded for {}",
            model.context_tokens
        )
    })
}
