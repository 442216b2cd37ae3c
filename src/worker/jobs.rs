//! The jobs that a worker has heard of: each is opened once, from its ledger alone.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicU64,
    Ordering::{AcqRel, Relaxed},
};
use std::time::Duration;

use arrow::array::RecordBatch;
use bytes::Bytes;
use tokio::sync::{Mutex, watch};

use crate::dataset::DatasetError;
use crate::dataset::output::{OutputColumns, OutputSchema};
use crate::dataset::part::{OpenaiMeta, part_openai, part_parquet};
use crate::dataset::row::RowStatus;
use crate::dataset::shard::ShardReader;
use crate::dataset::store::location::Location;
use crate::dataset::store::pinned::display_name;
use crate::dataset::store::pins::PinnedAnew;
use crate::dataset::writing::Writing;
use crate::engine::params::GenerationParams;
use crate::engine::request::{Request, UnitId};
use crate::error_line::one_line;
use crate::job::file::OutputFormat;
use crate::job::{Job, Renderer};
use crate::ledger::control::Control;
use crate::ledger::keys::JOB;
use crate::ledger::{JobCommand, JobLimits, Ledger, PinOrder, StopWhy};
use crate::queue::Message;
use crate::worker::access::Access;
use crate::worker::in_flight::ShardKey;
use crate::worker::model::{Model, Stream};
use crate::worker::retry_policy::{RetryDecision, decision};
use crate::worker::room::Room;

/// Maximum number of open jobs; beyond it, jobs without a holder are dropped.
const OPEN_MAX: usize = 64;

/// How a shard's rows become a published part.
#[derive(Debug, Clone)]
pub enum PartFormat {
    Parquet(Writing),
    /// OpenAI batch result lines.
    Openai(OpenaiMeta),
}

/// Whether a job's rows may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobState {
    Going,
    /// No further rows run; unfinished rows stay open.
    Stopped(StopWhy),
    /// No further rows run; unfinished rows are published as `cancelled` or `expired`.
    Closing(StopWhy),
    /// This gristmill cannot read its orders: other workers should continue it.
    Unreadable,
}

impl JobState {
    /// Status of unfinished rows at the close; `None`: they stay open.
    pub fn closes_as(self) -> Option<RowStatus> {
        match self {
            JobState::Closing(StopWhy::Cancelled) => Some(RowStatus::Cancelled),
            JobState::Closing(StopWhy::Budget | StopWhy::Deadline | StopWhy::InputChanged) => Some(RowStatus::Expired),
            JobState::Going | JobState::Stopped(_) | JobState::Unreadable => None,
        }
    }
}

/// A worker's spending on a job.
#[derive(Debug, Default)]
pub struct Spending {
    micros: AtomicU64,
    /// One more than the microseconds that are recorded; 0: none are recorded.
    written: AtomicU64,
}

/// A job (in one of its generations), ready to be worked on.
pub struct OpenJob {
    /// Distinguishes the job from others within this worker.
    pub number: u32,
    pub ledger: Ledger,
    pub reader: ShardReader,
    pub renderer: Renderer,
    /// Ids that end its completions.
    pub eos: Arc<[u32]>,
    /// Rows share computed prefixes with jobs of the same salt; the default salt is the job's own.
    cache_salt: Arc<str>,
    pub output: OutputSchema,
    /// The output columns besides the carried columns.
    pub columns: Arc<OutputColumns>,
    pub format: PartFormat,
    /// What this worker has spent on the job, in all its generations.
    spending: Arc<Spending>,
    /// Accounts for the carried columns of its shards.
    room: Arc<Room>,
    /// Number of its shards with rows on the device.
    running: AtomicU64,
    /// The orders to the job's workers that were read so far.
    control: Mutex<Option<Control>>,
    state: watch::Sender<JobState>,
}

impl OpenJob {
    /// The bytes of a part of these rows.
    pub fn make_part(&self, batches: &[RecordBatch], metadata: &[(String, String)]) -> Result<Bytes, DatasetError> {
        match &self.format {
            PartFormat::Parquet(writing) => part_parquet(&self.output.schema(), batches, metadata, *writing),
            PartFormat::Openai(meta) => part_openai(batches, meta),
        }
    }

    /// Opens the job of `ledger` for `model`.
    ///
    /// # Errors
    /// This gristmill cannot read the record. The caller has asked [`Model::refuses`] before.
    pub fn new(
        number: u32,
        ledger: Ledger,
        model: &Model,
        spending: Arc<Spending>,
        room: Arc<Room>,
    ) -> anyhow::Result<OpenJob> {
        let record = ledger.job();
        let place = ledger.store().address(JOB);
        let job = Job::of_record(&record.resolved, &place)?;
        let output = job.recorded_columns(&record.columns, &place)?;
        let extension = match job.output.format {
            OutputFormat::Parquet => "parquet",
            OutputFormat::Openai => "jsonl",
        };
        if record.part_extension != extension {
            anyhow::bail!(
                "{place}: its parts end in `{}`, and its job writes `{extension}`",
                record.part_extension
            );
        }
        let renderer = model.files.renderer(&job, &Stream::of(&job, &ledger))?;
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
                .of_layout(record.layout.clone()),
            eos: model.files.eos_token_ids(&renderer),
            cache_salt: match &job.cache_salt {
                Some(salt) => format!("salt {salt}").into(),
                None => format!("job {}", record.job).into(),
            },
            renderer,
            columns: Arc::new(output.columns().clone()),
            output,
            format,
            ledger,
            spending,
            room,
            running: AtomicU64::new(0),
            control: Mutex::new(None),
            state: watch::Sender::new(JobState::Going),
        })
    }

    pub fn state(&self) -> JobState {
        *self.state.borrow()
    }

    /// Reads the orders since the last call (one request if there are none) and notifies the job's
    /// shards. Returns the current terms.
    pub async fn refresh(&self) -> anyhow::Result<JobLimits> {
        let mut control = self.control.lock().await;
        match control.as_mut() {
            Some(control) => {
                control.refresh().await?;
            }
            None => *control = Some(self.ledger.control().await?),
        }
        Ok(self.obey(control.as_ref()))
    }

    /// Orders a stop, unless the job is finished or another order came first: that order holds.
    pub async fn order_stop(&self, order: JobCommand) -> anyhow::Result<()> {
        let mut control = self.control.lock().await;
        if let Some(control) = control.as_mut()
            && self.ledger.success().await?.is_none()
        {
            control.give(order).await?;
        }
        self.obey(control.as_ref());
        Ok(())
    }

    /// Records inputs with the planned bytes under another ETag, to save other workers the check.
    pub async fn write_pins(&self) -> anyhow::Result<()> {
        for anew in self.reader.pins().news() {
            let planned = &self.ledger.job().inputs[anew.input as usize];
            let order = PinOrder {
                input: anew.input,
                size: planned.size,
                etag: anew.pin.etag.clone(),
                version: anew.pin.version.clone(),
            };
            let mut control = self.control.lock().await;
            if let Some(control) = control.as_mut() {
                control.pin(order).await?;
            }
            self.obey(control.as_ref());
            self.reader.pins().told(&anew);
            let name = display_name(&planned.url);
            tracing::warn!(
                "{}: `{name}` has another ETag and the planned bytes: pinned anew",
                self.title()
            );
        }
        Ok(())
    }

    /// Leaves the job to other workers, because this gristmill cannot continue it. Logs the error.
    pub fn leave_to_others(&self, error: &anyhow::Error) {
        tracing::warn!("{} is left to others: {}", self.title(), one_line(error));
        self.set_unreadable();
    }

    /// Marks the job's orders as unreadable.
    pub fn set_unreadable(&self) {
        self.state.send_replace(JobState::Unreadable);
    }

    fn obey(&self, control: Option<&Control>) -> JobLimits {
        if let Some(control) = control {
            self.reader.pins().know(control.pins().map(PinnedAnew::from));
        }
        let state = match control.and_then(Control::holds) {
            Some(JobCommand::Stop { why, close: true, .. }) => JobState::Closing(*why),
            Some(JobCommand::Stop { why, close: false, .. }) => JobState::Stopped(*why),
            Some(JobCommand::Extend(_) | JobCommand::Pin(_)) | None => JobState::Going,
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

    /// A row's requests to the engine, one per sample. `attempt`: the row's generation.
    pub fn requests(
        &self,
        row: u64,
        prompt: Arc<[u32]>,
        params: Arc<GenerationParams>,
        attempt: u32,
    ) -> impl Iterator<Item = Request> {
        let (job, eos, cache_salt) = (self.number, self.eos.clone(), self.cache_salt.clone());
        (0..params.samples).map(move |sample| Request {
            id: UnitId {
                job,
                row,
                sample,
                attempt,
            },
            prompt: prompt.clone(),
            params: params.clone(),
            eos: eos.clone(),
            cache_salt: cache_salt.clone(),
        })
    }

    /// The first row of a shard, over the job's whole input.
    pub fn first_row(&self, shard: u32) -> anyhow::Result<u64> {
        Ok(self.ledger.job().shard(shard)?.first_row)
    }

    /// Waits until the shard's carried columns, `bytes` so far, fit beside the other shards'.
    pub async fn hold_carried(&self, shard: u32, bytes: usize) {
        let job = self.number;
        self.room.hold(ShardKey { job, shard }, bytes).await;
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
        if self.spending.written.load(Relaxed) > micros {
            return Ok(());
        }
        self.sign(worker).await
    }

    /// As [`OpenJob::write_spend`], but always writes: the record is also a sign of life.
    pub async fn sign(&self, worker: &str) -> anyhow::Result<()> {
        let micros = self.spending.micros.load(Relaxed);
        self.ledger.write_spend(worker, micros as f64 / 1e6, false).await?;
        self.spending.written.store(micros + 1, Relaxed);
        Ok(())
    }

    /// As [`OpenJob::write_spend`], for the last time: others stop counting this worker as live.
    pub async fn end_spend(&self, worker: &str) -> anyhow::Result<()> {
        if self.spending.written.load(Relaxed) == 0 && !self.owes() {
            return Ok(());
        }
        Ok(self.ledger.write_spend(worker, self.device_seconds(), true).await?)
    }

    /// Whether some spending is not recorded yet.
    pub fn owes(&self) -> bool {
        let micros = self.spending.micros.load(Relaxed);
        micros > 0 && self.spending.written.load(Relaxed) <= micros
    }

    /// Name and output, for messages.
    pub fn title(&self) -> String {
        format!("job `{}` ({})", self.ledger.job().name, self.ledger.store().url())
    }
}

/// A shard of a job while it has rows on the device.
pub struct Running {
    job: Option<Arc<OpenJob>>,
}

impl Running {
    pub fn of(job: Arc<OpenJob>) -> Running {
        job.running.fetch_add(1, AcqRel);
        Running { job: Some(job) }
    }

    /// Ends it: all rows have come. True: no other shard of the job has rows on the device.
    pub fn end(mut self) -> bool {
        self.job.take().is_some_and(|job| job.running.fetch_sub(1, AcqRel) == 1)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(job) = self.job.take() {
            job.running.fetch_sub(1, AcqRel);
        }
    }
}

/// The target of a message.
pub enum JobLookup {
    Job(Arc<OpenJob>),
    /// The job needs a worker with another model, or a newer gristmill; holds the reason.
    NotOurs(Arc<str>),
    /// This worker finds no such job (any more); holds the reason.
    Stale(Arc<str>),
}

/// The jobs that this worker has heard of. See the module's description.
pub struct Jobs {
    model: Arc<Model>,
    access: Access,
    room: Arc<Room>,
    known: Mutex<Known>,
}

/// A job in one of its generations: its output, its id, the generation.
type Key = (String, String, u32);

#[derive(Default)]
struct Known {
    jobs: HashMap<Key, Entry>,
    next_number: u32,
    /// By job id, over generations and re-openings.
    spendings: HashMap<String, Arc<Spending>>,
}

enum Entry {
    Open(Arc<OpenJob>),
    NotOurs(Arc<str>),
}

impl Entry {
    fn lookup(&self) -> JobLookup {
        match self {
            Entry::Open(job) => JobLookup::Job(job.clone()),
            Entry::NotOurs(why) => JobLookup::NotOurs(why.clone()),
        }
    }
}

impl Jobs {
    /// For a worker that accepts every job: a person named them in this process.
    pub fn new(model: Model) -> Jobs {
        Jobs::confined(model, Access::everything())
    }

    /// For a worker that is confined to what `access` accepts.
    pub fn confined(model: Model, access: Access) -> Jobs {
        Jobs {
            model: Arc::new(model),
            access,
            room: Arc::default(),
            known: Mutex::default(),
        }
    }

    /// The model of all these jobs.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Accounts for the carried columns of all shards.
    pub fn room(&self) -> &Arc<Room> {
        &self.room
    }

    /// Adds a job whose ledger is open already.
    pub async fn add(&self, ledger: Ledger) -> JobLookup {
        let (output, job) = (ledger.store().url().to_string(), ledger.job().job.to_string());
        let key = (output, job, ledger.generation());
        self.take(key, ledger).await
    }

    /// Opens the job of a ledger, and remembers the result.
    async fn take(&self, key: Key, ledger: Ledger) -> JobLookup {
        let opened = match self.model.refuses(&ledger.job().identity) {
            Some(why) => Err(why),
            None => {
                let (number, spending) = self.known.lock().await.begin(&key.1);
                let (model, room) = (self.model.clone(), self.room.clone());
                // A thread of its own: templates are slow, and it contains a panic over a record.
                let opened = tokio::task::spawn_blocking(move || open(number, ledger, &model, spending, room)).await;
                opened.unwrap_or_else(|error| Err(format!("this gristmill cannot open it: {error}")))
            }
        };
        let entry = match opened {
            Ok(job) => Entry::Open(Arc::new(job)),
            Err(why) => Entry::NotOurs(why.into()),
        };
        let lookup = entry.lookup();
        self.known.lock().await.remember(key, entry);
        lookup
    }

    /// The job that a message points at, with its orders, from memory or from its ledger.
    ///
    /// # Errors
    /// The store does not answer, or the record cannot be one of a job.
    pub async fn resolve(&self, message: &Message) -> anyhow::Result<JobLookup> {
        let lookup = self.find(message).await?;
        if let JobLookup::Job(job) = &lookup
            && job.control.lock().await.is_none()
            && let Err(error) = job.refresh().await
        {
            return match decision(&error) {
                // Read orders before running rows; the job may be cancelled.
                RetryDecision::LeaveShard => Ok(JobLookup::NotOurs(one_line(&error).into())),
                _ => Err(error),
            };
        }
        Ok(lookup)
    }

    /// Whether this process has opened the job that a message points at.
    pub async fn knows(&self, message: &Message) -> bool {
        let key = (message.output.clone(), message.job.clone(), message.generation);
        self.known.lock().await.lookup(&key).is_some()
    }

    async fn find(&self, message: &Message) -> anyhow::Result<JobLookup> {
        let key = (message.output.clone(), message.job.clone(), message.generation);
        // Release the lock before the record is read: a slow store must not hold up other jobs.
        if let Some(lookup) = self.known.lock().await.lookup(&key) {
            return Ok(lookup);
        }
        let output = match Location::parse(&message.output, Path::new("/")) {
            Ok(output) => output,
            Err(error) => return Ok(JobLookup::Stale(one_line(&error.into()).into())),
        };
        if let Some(why) = self.access.refuses_output(&output) {
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
        if let Some(why) = self.access.refuses_inputs(&output, inputs) {
            let entry = Entry::NotOurs(why.into());
            let lookup = entry.lookup();
            self.known.lock().await.remember(key, entry);
            return Ok(lookup);
        }
        let ledger = if ledger.generation() == message.generation {
            ledger
        } else {
            ledger.at(message.generation).await?
        };
        // This process may reach the store by another route than the process that made the job.
        ledger.store().check().await?;
        Ok(self.take(key, ledger).await)
    }

    /// All open jobs.
    pub async fn open(&self) -> Vec<Arc<OpenJob>> {
        let known = self.known.lock().await;
        known.open().cloned().collect()
    }
}

impl Known {
    fn open(&self) -> impl Iterator<Item = &Arc<OpenJob>> {
        self.jobs.values().filter_map(|entry| match entry {
            Entry::Open(job) => Some(job),
            Entry::NotOurs(_) => None,
        })
    }

    fn lookup(&self, key: &Key) -> Option<JobLookup> {
        self.jobs.get(key).map(Entry::lookup)
    }

    /// A number for another job, and the spending on it so far.
    fn begin(&mut self, job: &str) -> (u32, Arc<Spending>) {
        let number = self.next_number;
        self.next_number += 1;
        (number, self.spendings.entry(job.to_string()).or_default().clone())
    }

    fn remember(&mut self, key: Key, entry: Entry) {
        if self.jobs.len() >= OPEN_MAX {
            // Jobs without another holder can be opened again.
            self.jobs
                .retain(|_, entry| matches!(entry, Entry::Open(job) if Arc::strong_count(job) > 1));
        }
        self.jobs.insert(key, entry);
    }
}

/// Opens a job; the error says why this worker must leave it.
fn open(
    number: u32,
    ledger: Ledger,
    model: &Model,
    spending: Arc<Spending>,
    room: Arc<Room>,
) -> Result<OpenJob, String> {
    // The record was most likely written by another version of gristmill.
    let job = OpenJob::new(number, ledger, model, spending, room)
        .map_err(|error| format!("this gristmill cannot open it: {}", one_line(&error)))?;
    match misfit(&job, model) {
        Some(why) => Err(why),
        None => Ok(job),
    }
}

/// Why an opened job does not suit this model after all.
fn misfit(job: &OpenJob, model: &Model) -> Option<String> {
    let planned = job.ledger.job().identity.template_hash.as_deref();
    if planned != Some(job.renderer.template_hash()) {
        return Some("its prompts go through another chat template than this worker's model has".into());
    }
    let needs = job.renderer.context_tokens();
    (needs > model.context_tokens).then(|| {
        format!(
            "it needs a context of {needs} tokens, this worker's model was loaded for {}",
            model.context_tokens
        )
    })
}
