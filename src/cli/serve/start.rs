//! What takes time at the start: hashing checkpoints, loading the model, reaching the broker.
//! Meanwhile the service answers requests, and batches wait.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow};
use tokio::task::spawn_blocking;

use crate::cli::args::ServeArgs;
use crate::cli::device_choice::ResolvedDevice;
use crate::cli::enqueue::{Enqueuer, QueueTarget, queue_failure};
use crate::cli::exit::{Failure, one_line};
use crate::cli::serve::dispatch::{BrokerQueue, Dispatch, EmbeddedQueue};
use crate::cli::serve::jobs::{Prepared, ServedJobs};
use crate::cli::serve::models::OpenModel;
use crate::cli::setup::{LoadedModel, render_threads, watchdog};
use crate::queue::{LocalQueue, QueueError};
use crate::report::meter::Meter;
use crate::serve::service::Service;
use crate::worker::jobs::Jobs;
use crate::worker::metrics::Metrics;
use crate::worker::retry_policy::RetryPolicy;
use crate::worker::stop::Stop;
use crate::worker::watched::WatchedJobs;
use crate::worker::{self, Until, Worker, WorkerConfig, WorkerOptions};

/// Shards in memory at once, with `--work`.
const SHARDS_IN_FLIGHT: u32 = 4;
/// Time between two attempts to reach a broker that is away.
const CONNECT_PAUSE: Duration = Duration::from_secs(5);

/// Who answers the requests.
pub(super) enum Answering {
    /// Workers elsewhere, through this queue.
    Workers(Box<QueueTarget>),
    /// A worker in this process, for the only model; with its metrics.
    Here { model: String, metrics: Arc<Metrics> },
}

/// What the preparation needs.
pub(super) struct Preparation {
    pub args: ServeArgs,
    pub answering: Answering,
    pub models: Arc<HashMap<String, OpenModel>>,
    pub device: ResolvedDevice,
    pub jobs: Arc<ServedJobs>,
    pub service: Arc<Service>,
}

impl Preparation {
    /// Prepares, lets batches begin, and runs the worker of this process, if it has one. Returns
    /// after the stop.
    pub(super) async fn run(self, stop: Stop) -> Result<(), Failure> {
        let prepared = tokio::select! {
            prepared = self.prepare() => prepared?,
            // A model that is being loaded does not delay the exit.
            () = stop.wait() => return Ok(()),
        };
        let (prepared, embedded) = prepared;
        self.jobs.begin(prepared);
        self.service.set_ready();
        tracing::info!("the service is ready: batches run");
        let Some(EmbeddedWorker { worker, engine }) = embedded else {
            stop.wait().await;
            return Ok(());
        };
        let ended = worker::run(worker, engine, stop).await;
        ended.map(drop).map_err(Failure::from)
    }

    async fn prepare(&self) -> Result<(Prepared, Option<EmbeddedWorker>), Failure> {
        let models = self.models.clone();
        let hashed = spawn_blocking(move || hash_all(&models));
        let hashes = hashed.await.context("hashing the checkpoints panicked")??;
        let (dispatch, embedded) = match &self.answering {
            Answering::Workers(target) => {
                let broker = BrokerQueue::new(connect(target).await?, &self.args)?;
                (Dispatch::Broker(Box::new(broker)), None)
            }
            Answering::Here { model, metrics } => {
                let queue = LocalQueue::default();
                let worker = self.embedded_worker(model, metrics, &hashes, queue.clone()).await?;
                (Dispatch::Embedded(EmbeddedQueue::new(queue)), Some(worker))
            }
        };
        Ok((Prepared { dispatch, hashes }, embedded))
    }

    /// Loads the model, and makes the worker of this process.
    async fn embedded_worker(
        &self,
        name: &str,
        metrics: &Arc<Metrics>,
        hashes: &HashMap<String, String>,
        queue: LocalQueue,
    ) -> Result<EmbeddedWorker, Failure> {
        let hash = hashes.get(name).cloned().context("the model is not open")?;
        let (models, name) = (self.models.clone(), name.to_string());
        let (device, engine) = (self.device, self.args.engine.clone());
        let loading = spawn_blocking(move || {
            let model = models.get(&name).context("the model is not open")?;
            let (files, formats) = (model.files.clone(), model.formats);
            LoadedModel::load(files, formats, model.context, hash, device, &engine)
        });
        let loaded = loading.await.context("loading the model panicked")??;
        let worker = Worker::new(WorkerConfig {
            name: format!("serve-{}", crate::ledger::Id::random()?),
            queue: Arc::new(queue),
            // The driver refills the queue.
            embedded_queue: None,
            jobs: Jobs::new(loaded.model),
            watched: WatchedJobs::default(),
            meter: Arc::new(Meter::default()),
            metrics: metrics.clone(),
            retry_policy: RetryPolicy::new(true),
            watchdog: watchdog(),
            render_threads: render_threads(&self.args.engine)?,
            options: WorkerOptions {
                log_interval: Duration::from_secs_f64(self.args.log_interval),
                shards_in_flight: SHARDS_IN_FLIGHT,
                until: Until::Stopped,
                idle_after: Duration::ZERO,
                max_shards: None,
            },
        });
        let worker = Arc::new(worker);
        metrics.attach(&worker, &device.to_string());
        Ok(EmbeddedWorker {
            worker,
            engine: loaded.engine,
        })
    }
}

/// The worker in this process, ready to run.
struct EmbeddedWorker {
    worker: Arc<Worker>,
    engine: Box<dyn crate::engine::Generator>,
}

fn hash_all(models: &HashMap<String, OpenModel>) -> Result<HashMap<String, String>, Failure> {
    let hashed = models.iter().map(|(name, model)| Ok((name.clone(), model.hash(name)?)));
    hashed.collect()
}

/// Connects to the broker, and waits for one that is away. Settings with which no broker can be
/// reached, and a broker that refuses access, end the service.
async fn connect(target: &QueueTarget) -> Result<Enqueuer, Failure> {
    let mut is_away = false;
    loop {
        match target.open().await {
            Err(error @ QueueError::Unavailable { .. }) => {
                if !is_away {
                    let why = one_line(&anyhow!(error));
                    tracing::warn!("`{}`: {why}; batches wait until it answers", target.url());
                }
                is_away = true;
                tokio::time::sleep(CONNECT_PAUSE).await;
            }
            Err(error) => return Err(queue_failure(error)),
            Ok(enqueuer) => {
                if is_away {
                    tracing::warn!("`{}` answers now", target.url());
                }
                return Ok(enqueuer);
            }
        }
    }
}
