//! `gristmill worker`: works on the shards in a queue, for all jobs of one model.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use serde::Serialize;

use crate::cli::args::WorkerArgs;
use crate::cli::device_choice::ResolvedDevice;
use crate::cli::enqueue::QueueTarget;
use crate::cli::exit::{Exit, Failure, one_line};
use crate::cli::first_job::{FirstJobSearch, FoundJob, SearchOutcome, watch_failure, watched_job};
use crate::cli::limits::reached_line;
use crate::cli::model_source::{open_model, open_recorded_model};
use crate::cli::on_finish::{FinishNotifier, FinishNotifierTask};
use crate::cli::prepare::{print_signing, print_warnings};
use crate::cli::setup::{LoadedModel, render_threads, stop_on_signals, watchdog};
use crate::dataset::store::location::Location;
use crate::device::Precision;
use crate::ledger::{Id, JobIdentity, LedgerError, StopWhy};
use crate::queue::Queue;
use crate::report::meter::{Meter, MeterReading};
use crate::report::progress;
use crate::report::summary::{RowCounts, counted, number, rate};
use crate::worker::access::{Access, AccessOptions};
use crate::worker::jobs::Jobs;
use crate::worker::metrics::Metrics;
use crate::worker::model::{Formats, ModelFiles};
use crate::worker::retry_policy::RetryPolicy;
use crate::worker::step_watchdog::StepWatchdog;
use crate::worker::stop::{Stop, StopCause};
use crate::worker::troubles::JobStore;
use crate::worker::watched::WatchedJobs;
use crate::worker::{self, Until, Worker, WorkerConfig, liveness, spot};

/// Maximum wait of a `--once` worker for an unavailable store or queue.
const ONCE_WAIT_MAX: Duration = Duration::from_secs(600);
/// Maximum number of characters of a worker's name before its random suffix.
const HOST_CHARS_MAX: usize = 40;

pub(super) async fn worker(args: WorkerArgs) -> Result<Exit, Failure> {
    let stop = Stop::default();
    stop_on_signals(stop.clone())?;
    let access = access(&args)?;
    let notifier = FinishNotifier::new(access.clone())?;
    print_signing(args.quiet)?;
    let (watchdog, metrics) = (watchdog(), Arc::new(Metrics::new()?));
    start_liveness(&args, &watchdog, &metrics).await?;
    if let Some(cloud) = args.spot {
        spot::watch(cloud, stop.clone())?;
    }
    let target = QueueTarget::new(&args.queue, args.kafka.clone(), prefetch(&args))?;
    if args.once && is_missing(&target).await {
        return report_early_end(&args, None, &stop);
    }
    let queue = target.consume().await?;
    let device = args.engine.device.resolve()?;
    let watched = open_watched_jobs(&args).await?;
    let queue_access = QueueAccess {
        queue: &queue,
        access: &access,
    };
    let search_result = find_model(&args, device, queue_access, &watched, &stop).await?;
    let wanted = match search_result {
        ModelSearch::Model(wanted) => *wanted,
        ModelSearch::Nothing { refused } => return report_early_end(&args, Some(refused), &stop),
    };
    print_warnings(&wanted.files.config.warnings);
    let loaded = load(&wanted, device, &args)?;
    let meter = Arc::new(Meter::default());
    let worker = Arc::new(Worker::new(WorkerConfig {
        name: worker_name(&args)?,
        queue,
        embedded_queue: None,
        jobs: Jobs::with_access(loaded.model, access),
        watched,
        meter: meter.clone(),
        metrics,
        retry_policy: retry_policy(&args),
        watchdog,
        render_threads: render_threads(&args.engine)?,
        options: options(&args),
    }));
    worker.metrics.attach(&worker, &device.to_string());
    for (output, error) in &wanted.failing_outputs {
        // Messages of these outputs will be delivered again, so until then this worker is not idle.
        worker.troubles.note_failure(JobStore::Output, output, error);
    }
    if !args.quiet {
        eprintln!(
            "worker `{}` is ready, with model {} in {}",
            worker.name,
            worker.jobs.model().name(),
            worker.jobs.model().formats
        );
    }
    let (progress_task, notifier_task) = worker.span().in_scope(|| {
        let progress_task = progress::show_worker(meter.clone(), args.quiet);
        (progress_task, FinishNotifierTask::start(notifier, worker.clone()))
    });
    let ended = worker::run(worker.clone(), loaded.engine, stop.clone()).await;
    progress_task.abort();
    notifier_task.end(stop.is_set()).await;
    report(&args, &worker, ended).await
}

/// Number of messages to prefetch. Messages that this worker would never start with are left to
/// other workers.
fn prefetch(args: &WorkerArgs) -> u32 {
    let shards_max = args
        .max_shards
        .map_or(u32::MAX, |shards| u32::try_from(shards).unwrap_or(u32::MAX));
    args.shards_in_flight.min(shards_max.max(1))
}

/// Whether the topic or queue does not exist. If so, it warns: other workers wait for it, but a
/// `--once` worker ends. If the check itself fails, the following receive reports the error.
async fn is_missing(target: &QueueTarget) -> bool {
    let is_missing = matches!(target.probe().await, Ok(None));
    if is_missing {
        eprintln!(
            "gristmill: warning: {} is not there, so there is nothing to do: `gristmill submit` makes it",
            target.url()
        );
    }
    is_missing
}

/// Outages are waited out without a limit, except with `--once`, where the caller waits for the
/// worker.
fn retry_policy(args: &WorkerArgs) -> RetryPolicy {
    if args.once {
        RetryPolicy::with_wait_max(ONCE_WAIT_MAX)
    } else {
        RetryPolicy::new(true)
    }
}

/// What queued jobs may access. From here on, redirects of web servers are restricted, too.
fn access(args: &WorkerArgs) -> Result<Access, Failure> {
    let requested = AccessOptions {
        accept: &args.accept,
        accept_inputs: &args.accept_inputs,
        accept_models: &args.accept_models,
        accept_on_finish: &args.on_finish.accept_on_finish,
        jobs: &args.job,
    };
    let access =
        Access::new(&requested, &std::env::current_dir()?).map_err(|why| Failure::bad_job(anyhow::anyhow!(why)))?;
    access.confine_redirects();
    Ok(access)
}

/// The queue, and what its jobs may access.
#[derive(Clone, Copy)]
struct QueueAccess<'a> {
    queue: &'a Arc<dyn Queue>,
    access: &'a Access,
}

/// The model that is to be loaded.
struct WantedModel {
    files: ModelFiles,
    formats: Formats,
    context: Option<u32>,
    /// Outputs whose stores failed during the search for a model, with their errors.
    failing_outputs: Vec<(String, anyhow::Error)>,
}

fn load(wanted: &WantedModel, device: ResolvedDevice, args: &WorkerArgs) -> Result<LoadedModel, Failure> {
    let WantedModel {
        files,
        formats,
        context,
        ..
    } = wanted;
    let hashes = files.hashes(formats.precision).map_err(Failure::bad_job)?;
    LoadedModel::load(files.clone(), *formats, *context, hashes, device, &args.engine)
}

/// Result of the search for a model.
enum ModelSearch {
    Model(Box<WantedModel>),
    /// The worker was told to stop, or no usable message arrived. `refused` counts messages for
    /// other workers.
    Nothing {
        refused: usize,
    },
}

fn options(args: &WorkerArgs) -> worker::WorkerOptions {
    worker::WorkerOptions {
        log_interval: Duration::from_secs_f64(args.log_interval),
        shards_in_flight: args.shards_in_flight,
        until: match (args.until_idle, args.once) {
            (true, _) => Until::Idle,
            (_, true) => Until::Once,
            _ => Until::Stopped,
        },
        idle_after: Duration::from_secs_f64(args.idle_after),
        max_shards: args.max_shards,
    }
}

async fn start_liveness(
    args: &WorkerArgs,
    watchdog: &Arc<StepWatchdog>,
    metrics: &Arc<Metrics>,
) -> Result<(), Failure> {
    if let Some(path) = &args.liveness_file {
        liveness::touch(path.clone(), watchdog.clone())
            .with_context(|| format!("`--liveness-file`: cannot write `{}`", path.display()))
            .map_err(Failure::bad_job)?;
    }
    if let Some(address) = args.liveness_port {
        liveness::listen(address, watchdog.clone(), metrics.clone())
            .await
            .with_context(|| format!("`--liveness-port`: cannot listen at {address}"))
            .map_err(Failure::bad_job)?;
    }
    Ok(())
}

/// The model that the arguments name, or the model of the first job.
async fn find_model(
    args: &WorkerArgs,
    device: ResolvedDevice,
    queue_access: QueueAccess<'_>,
    watched: &WatchedJobs,
    stop: &Stop,
) -> Result<ModelSearch, Failure> {
    if let Some(model) = &args.model {
        return Ok(ModelSearch::Model(Box::new(WantedModel {
            files: open_model(model, args.adapter.as_deref(), &args.mix_adapter).await?,
            formats: Formats::of(args.precision, args.kv_cache, device.precision()),
            context: args.context,
            failing_outputs: Vec::new(),
        })));
    }
    let first = match watched.ledgers().into_iter().next() {
        Some(ledger) => FoundJob {
            job: watched_job(&ledger, queue_access.access)?,
            ledger,
            is_watched: true,
            failing_outputs: Vec::new(),
        },
        None => {
            let ends_when_idle = args.until_idle || args.once;
            let search = FirstJobSearch {
                queue: queue_access.queue,
                access: queue_access.access,
                retry_policy: retry_policy(args),
                watched,
                ends_after: ends_when_idle.then(|| Duration::from_secs_f64(args.idle_after)),
                stop,
            };
            match search.find().await? {
                SearchOutcome::Found(first) => *first,
                SearchOutcome::Nothing { refused } => return Ok(ModelSearch::Nothing { refused }),
            }
        }
    };
    let formats = recorded_formats(&first.ledger.job().identity);
    if !first.is_watched {
        // This job is watched, too: even if another worker has its shards, it must be done before
        // this worker is idle.
        watched.push(first.ledger);
    }
    Ok(ModelSearch::Model(Box::new(WantedModel {
        files: open_recorded_model(&first.job).await?,
        formats,
        context: args.context.or(first.job.context),
        failing_outputs: first.failing_outputs,
    })))
}

/// The formats that a job was submitted with.
fn recorded_formats(identity: &JobIdentity) -> Formats {
    // A format that only a newer gristmill knows is read as `auto`. The job is then refused, since
    // its precision is another.
    let precision = identity.precision.parse().unwrap_or_default();
    let kv = identity.kv_cache.as_ref().and_then(|word| word.parse().ok());
    Formats::of(precision, kv.unwrap_or_default(), Precision::F32)
}

/// The jobs of `--job`. A job whose store does not respond, or refuses access, is tried again
/// later.
async fn open_watched_jobs(args: &WorkerArgs) -> Result<WatchedJobs, Failure> {
    let here = std::env::current_dir()?;
    let outputs = args.job.iter().map(|output| Location::parse(output, &here));
    let watched = WatchedJobs::new(outputs.collect::<Result<_, _>>().map_err(Failure::bad_job)?);
    if let Some(error) = watched.open(&retry_policy(args)).await.map_err(watch_failure)? {
        tracing::warn!(
            "`--job`: {}; the worker begins without it, and looks again later",
            one_line(&error)
        );
    }
    Ok(watched)
}

/// Reports that the worker ended before it had a model. `refused`: the number of messages for other
/// workers; `None` if the reason was reported already.
fn report_early_end(args: &WorkerArgs, refused: Option<usize>, stop: &Stop) -> Result<Exit, Failure> {
    if args.json {
        let report = WorkerReport {
            worker: worker_name(args)?,
            shards: 0,
            read: MeterReading::default(),
        };
        println!("{}", serde_json::to_string(&report)?);
    }
    if stop.is_set() {
        return Ok(Exit::Interrupted);
    }
    if !args.quiet {
        match refused {
            None => {}
            Some(0) => eprintln!("nothing came: there is nothing to do"),
            Some(1) => eprintln!("1 message came, and it is not for this worker: a warning above says why"),
            Some(refused) => eprintln!("{refused} messages came, none for this worker: warnings above say why"),
        }
    }
    Ok(Exit::Done)
}

/// A unique worker name that begins with the given name or the host's.
fn worker_name(args: &WorkerArgs) -> Result<String, Failure> {
    let host = || std::fs::read_to_string("/etc/hostname").ok();
    let host_name = args
        .name
        .clone()
        .or_else(|| std::env::var("HOSTNAME").ok())
        .or_else(host);
    let prefix: String = host_name
        .unwrap_or_else(|| "worker".into())
        .trim()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .take(HOST_CHARS_MAX)
        .collect();
    Ok(format!("{prefix}-{}", Id::random()?))
}

/// The object that `--json` prints as the last line of stdout.
#[derive(Debug, Serialize)]
struct WorkerReport {
    worker: String,
    /// Number of committed shards.
    shards: u64,
    #[serde(flatten)]
    read: MeterReading,
}

async fn report(args: &WorkerArgs, worker: &Worker, ended: anyhow::Result<Option<StopCause>>) -> Result<Exit, Failure> {
    let report = WorkerReport {
        worker: worker.name.clone(),
        shards: worker.shards_done(),
        read: worker.meter.read(),
    };
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        println!(
            "{} in {}, {}, {}, {} tokens/s, {:.1} device seconds, {:.1} of them lost",
            counted(report.read.rows, "row"),
            counted(report.shards, "shard"),
            counted(report.read.failed_rows, "failed row"),
            counted(report.read.truncated_rows, "truncated row"),
            number(
                rate(
                    report.read.prompt_tokens + report.read.completion_tokens,
                    report.read.device_seconds
                )
                .round() as u64
            ),
            report.read.device_seconds,
            report.read.lost_seconds
        );
    }
    match ended? {
        Some(StopCause::Interrupted | StopCause::Preempted) => Ok(Exit::Interrupted),
        Some(_) => Ok(Exit::Failure),
        None => exit_of_jobs(worker).await,
    }
}

/// The exit code over all jobs: a stopped job takes precedence over failed rows.
async fn exit_of_jobs(worker: &Worker) -> Result<Exit, Failure> {
    let jobs = worker.jobs.open().await;
    if let Some(error) = worker.watched.open(&worker.retry_policy).await.map_err(watch_failure)? {
        return Err(error.context("a job of `--job` could not be looked at").into());
    }
    let watched = worker.watched.ledgers();
    let ledgers = jobs.iter().map(|job| &job.ledger).chain(&watched);
    let mut exit = Exit::Done;
    let mut reported = HashSet::new();
    for ledger in ledgers {
        let success = match ledger.success().await {
            // The job was finished by a newer gristmill.
            Err(LedgerError::Newer { .. }) => continue,
            success => success?,
        };
        let stopped = match &success {
            Some(_) => None,
            None => ledger.control().await?.stop_reason(),
        };
        let job_exit = match (success, stopped) {
            (Some(success), _) => {
                let rows = RowCounts {
                    total: success.rows,
                    succeeded: success.tally.succeeded,
                    ..RowCounts::default()
                };
                Exit::of_rows(&rows)
            }
            (None, Some(StopWhy::Cancelled)) => Exit::Cancelled,
            (None, Some(why @ (StopWhy::Budget | StopWhy::Deadline))) => {
                // A watched job may also be among the jobs heard of, so it is reported once.
                if reported.insert(ledger.job().job.clone()) {
                    eprintln!("job `{}`: {}", ledger.job().name, reached_line(ledger, why).await?);
                }
                Exit::Stopped
            }
            (None, Some(StopWhy::InputChanged)) => Exit::BadJob,
            (None, None) => Exit::Done,
        };
        let severity = |exit: Exit| match exit {
            Exit::BadJob => 4,
            Exit::Stopped => 3,
            Exit::Cancelled => 2,
            Exit::FailedRows => 1,
            _ => 0,
        };
        if severity(job_exit) > severity(exit) {
            exit = job_exit;
        }
    }
    Ok(exit)
}
