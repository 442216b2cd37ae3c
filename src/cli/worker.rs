//! `gristmill worker`: works on the shards in a queue, for all jobs of one model.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use serde::Serialize;

use crate::cli::args::WorkerArgs;
use crate::cli::device_choice::ResolvedDevice;
use crate::cli::enqueue::Target;
use crate::cli::exit::{Exit, Failure, one_line};
use crate::cli::first_job::{First, FirstJob, Search, cannot_watch, watched_job};
use crate::cli::limits::reached_line;
use crate::cli::on_finish::{Teller, Telling};
use crate::cli::prepare::{model_dir, say_signing, say_warnings};
use crate::cli::setup::{LoadedModel, render_threads, stop_on_signals, watchdog};
use crate::dataset::store::location::Location;
use crate::device::Precision;
use crate::ledger::{Id, JobIdentity, LedgerError, StopWhy};
use crate::queue::Queue;
use crate::report::meter::{Meter, Reading};
use crate::report::progress;
use crate::report::summary::{RowCounts, counted, number, rate};
use crate::worker::access::{Access, Asked};
use crate::worker::jobs::Jobs;
use crate::worker::model::{Formats, ModelFiles};
use crate::worker::retry_policy::RetryPolicy;
use crate::worker::step_watchdog::StepWatchdog;
use crate::worker::stop::{Stop, Why};
use crate::worker::troubles::Where;
use crate::worker::watched::Watched;
use crate::worker::{self, Until, Worker, WorkerConfig, liveness, spot};

/// Maximum wait of a `--once` worker for an unavailable store or queue.
const ONCE_WAITS_MAX: Duration = Duration::from_secs(600);
/// Maximum number of characters of a host's name in a worker's name.
const NAME_MAX: usize = 40;

pub(super) async fn worker(args: WorkerArgs) -> Result<Exit, Failure> {
    let stop = Stop::default();
    stop_on_signals(stop.clone())?;
    let access = access(&args)?;
    let teller = Teller::new(access.clone())?;
    say_signing(args.quiet)?;
    let watchdog = watchdog();
    signs_of_life(&args, &watchdog).await?;
    if let Some(cloud) = args.spot {
        spot::watch(cloud, stop.clone())?;
    }
    let target = Target::new(&args.queue, args.kafka.clone(), prefetch(&args))?;
    if args.once && is_missing(&target).await {
        return ended_early(&args, None, &stop);
    }
    let queue = target.consume().await?;
    let place = args.engine.device.resolve()?;
    let watched = watched(&args).await?;
    let sought = wanted_model(
        &args,
        place,
        Incoming {
            queue: &queue,
            access: &access,
        },
        &watched,
        &stop,
    )
    .await?;
    let wanted = match sought {
        Sought::Model(wanted) => *wanted,
        Sought::Nothing { refused } => return ended_early(&args, Some(refused), &stop),
    };
    say_warnings(&wanted.files.config.warnings);
    let hash = wanted.files.hash(wanted.formats.precision).map_err(Failure::bad_job)?;
    let loaded = LoadedModel::load(wanted.files, wanted.formats, wanted.context, hash, place, &args.engine)?;
    let meter = Arc::new(Meter::default());
    let worker = Arc::new(Worker::new(WorkerConfig {
        name: name(&args)?,
        queue,
        own_queue: None,
        jobs: Jobs::confined(loaded.model, access),
        watched,
        meter: meter.clone(),
        retry_policy: retry_policy(&args),
        watchdog,
        render_threads: render_threads(&args.engine)?,
        options: options(&args),
    }));
    for (output, error) in &wanted.failing {
        // Their messages will be delivered again, so until then this worker is not idle.
        worker.troubles.note(Where::Output, output, error);
    }
    if !args.quiet {
        eprintln!(
            "worker `{}` is ready, with model `{}` in {}",
            worker.name,
            worker.jobs.model().name(),
            worker.jobs.model().formats
        );
    }
    let (shown, telling) = worker.span().in_scope(|| {
        let shown = progress::show_work(meter.clone(), args.quiet);
        (shown, Telling::start(teller, worker.clone()))
    });
    let ended = worker::run(worker.clone(), loaded.engine, stop.clone()).await;
    shown.abort();
    telling.end(stop.is_set()).await;
    report(&args, &worker, ended).await
}

/// Number of messages to prefetch. Those that this worker would never start are better left to
/// other workers.
fn prefetch(args: &WorkerArgs) -> u32 {
    let shards_max = args
        .max_shards
        .map_or(u32::MAX, |shards| u32::try_from(shards).unwrap_or(u32::MAX));
    args.shards_in_flight.min(shards_max.max(1))
}

/// Warns that the topic or queue does not exist: other workers wait for it, but a `--once` worker
/// ends. If the check itself fails, the following receive reports the error.
async fn is_missing(target: &Target) -> bool {
    let is_missing = matches!(target.look().await, Ok(None));
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
        RetryPolicy::within(ONCE_WAITS_MAX)
    } else {
        RetryPolicy::new(true)
    }
}

/// The permissions of queued jobs; from here on, web servers' redirects are restricted by them too.
fn access(args: &WorkerArgs) -> Result<Access, Failure> {
    let asked = Asked {
        accept: &args.accept,
        accept_inputs: &args.accept_inputs,
        accept_models: &args.accept_models,
        accept_on_finish: &args.on_finish.accept_on_finish,
        jobs: &args.job,
    };
    let access =
        Access::new(&asked, &std::env::current_dir()?).map_err(|why| Failure::bad_job(anyhow::anyhow!(why)))?;
    access.confine_redirects();
    Ok(access)
}

/// The queue of messages, and their permissions.
#[derive(Clone, Copy)]
struct Incoming<'a> {
    queue: &'a Arc<dyn Queue>,
    access: &'a Access,
}

/// The model to load, before anything is loaded.
struct Wanted {
    files: ModelFiles,
    formats: Formats,
    context: Option<u32>,
    /// Outputs of jobs whose stores failed during the search for a model.
    failing: Vec<(String, anyhow::Error)>,
}

/// Result of the search for a model.
enum Sought {
    Model(Box<Wanted>),
    /// The worker was told to stop, or no usable message arrived. `refused` counts messages for
    /// other workers.
    Nothing {
        refused: usize,
    },
}

fn options(args: &WorkerArgs) -> worker::Options {
    worker::Options {
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

async fn signs_of_life(args: &WorkerArgs, watchdog: &Arc<StepWatchdog>) -> Result<(), Failure> {
    if let Some(path) = &args.liveness_file {
        liveness::touch(path.clone(), watchdog.clone())
            .with_context(|| format!("`--liveness-file`: cannot write `{}`", path.display()))
            .map_err(Failure::bad_job)?;
    }
    if let Some(address) = args.liveness_port {
        liveness::listen(address, watchdog.clone())
            .await
            .with_context(|| format!("`--liveness-port`: cannot listen at {address}"))
            .map_err(Failure::bad_job)?;
    }
    Ok(())
}

/// The model that the arguments name, or the model of the first job.
async fn wanted_model(
    args: &WorkerArgs,
    place: ResolvedDevice,
    incoming: Incoming<'_>,
    watched: &Watched,
    stop: &Stop,
) -> Result<Sought, Failure> {
    if let Some(dir) = &args.model {
        return Ok(Sought::Model(Box::new(Wanted {
            files: ModelFiles::open(dir.clone()).map_err(Failure::bad_job)?,
            formats: Formats::of(args.precision, args.kv_cache, place.precision()),
            context: args.context,
            failing: Vec::new(),
        })));
    }
    let first = match watched.ledgers().into_iter().next() {
        Some(ledger) => First {
            job: watched_job(&ledger, incoming.access)?,
            ledger,
            is_watched: true,
            failing: Vec::new(),
        },
        None => {
            let ends = args.until_idle || args.once;
            let search = FirstJob {
                queue: incoming.queue,
                access: incoming.access,
                retry_policy: retry_policy(args),
                watched,
                ends_after: ends.then(|| Duration::from_secs_f64(args.idle_after)),
                stop,
            };
            match search.find().await? {
                Search::Found(first) => *first,
                Search::Nothing { refused } => return Ok(Sought::Nothing { refused }),
            }
        }
    };
    let formats = recorded(&first.ledger.job().identity);
    if !first.is_watched {
        // The job counts as heard of: even if another worker has its shards, it must be done before
        // this worker is idle.
        watched.push(first.ledger);
    }
    Ok(Sought::Model(Box::new(Wanted {
        files: ModelFiles::open(model_dir(&first.job)?).map_err(Failure::bad_job)?,
        formats,
        context: args.context.or(first.job.context),
        failing: first.failing,
    })))
}

/// The formats that a job was submitted with.
fn recorded(identity: &JobIdentity) -> Formats {
    // A format that only a newer gristmill knows gives `auto`; the job is then refused as one in
    // another precision.
    let requested = |word: &str| word.parse().unwrap_or_default();
    let kv = identity.kv_cache.as_deref().map(requested).unwrap_or_default();
    Formats::of(requested(&identity.precision), kv, Precision::F32)
}

/// The jobs of `--job`. A job whose store does not respond, or refuses access, is tried again
/// later.
async fn watched(args: &WorkerArgs) -> Result<Watched, Failure> {
    let here = std::env::current_dir()?;
    let outputs = args.job.iter().map(|output| Location::parse(output, &here));
    let watched = Watched::new(outputs.collect::<Result<_, _>>().map_err(Failure::bad_job)?);
    if let Some(error) = watched.open(&retry_policy(args)).await.map_err(cannot_watch)? {
        tracing::warn!(
            "`--job`: {}; the worker begins without it, and looks again later",
            one_line(&error)
        );
    }
    Ok(watched)
}

/// Reports that the worker ended before it had a model; `refused`: the number of messages for other
/// workers. `None` if the reason was reported already.
fn ended_early(args: &WorkerArgs, refused: Option<usize>, stop: &Stop) -> Result<Exit, Failure> {
    if args.json {
        let report = Report {
            worker: name(args)?,
            shards: 0,
            read: Reading::default(),
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

/// A unique worker name that tells people where the worker runs.
fn name(args: &WorkerArgs) -> Result<String, Failure> {
    let host = || std::fs::read_to_string("/etc/hostname").ok();
    let given = args
        .name
        .clone()
        .or_else(|| std::env::var("HOSTNAME").ok())
        .or_else(host);
    let word: String = given
        .unwrap_or_else(|| "worker".into())
        .trim()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .take(NAME_MAX)
        .collect();
    Ok(format!("{word}-{}", Id::random()?))
}

/// The object that `--json` prints as the last line of stdout.
#[derive(Debug, Serialize)]
struct Report {
    worker: String,
    /// Number of committed shards.
    shards: u64,
    #[serde(flatten)]
    read: Reading,
}

async fn report(args: &WorkerArgs, worker: &Worker, ended: anyhow::Result<Option<Why>>) -> Result<Exit, Failure> {
    let report = Report {
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
        Some(Why::Interrupted | Why::Preempted) => Ok(Exit::Interrupted),
        Some(_) => Ok(Exit::Failure),
        None => of_jobs(worker).await,
    }
}

/// The common exit code of the jobs: a stopped job takes precedence over failed rows.
async fn of_jobs(worker: &Worker) -> Result<Exit, Failure> {
    let jobs = worker.jobs.open().await;
    if let Some(error) = worker.watched.open(&worker.retry_policy).await.map_err(cannot_watch)? {
        return Err(error.context("a job of `--job` could not be looked at").into());
    }
    let watched = worker.watched.ledgers();
    let ledgers = jobs.iter().map(|job| &job.ledger).chain(&watched);
    let mut exit = Exit::Done;
    let mut said = HashSet::new();
    for ledger in ledgers {
        let success = match ledger.success().await {
            // The job was finished by a newer gristmill.
            Err(LedgerError::Newer { .. }) => continue,
            success => success?,
        };
        let stopped = match &success {
            Some(_) => None,
            None => ledger.control().await?.stopped(),
        };
        let of_job = match (success, stopped) {
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
                if said.insert(ledger.job().job.clone()) {
                    eprintln!("job `{}`: {}", ledger.job().name, reached_line(ledger, why).await?);
                }
                Exit::Stopped
            }
            (None, Some(StopWhy::InputChanged)) => Exit::BadJob,
            (None, None) => Exit::Done,
        };
        let weight = |exit: Exit| match exit {
            Exit::BadJob => 4,
            Exit::Stopped => 3,
            Exit::Cancelled => 2,
            Exit::FailedRows => 1,
            _ => 0,
        };
        if weight(of_job) > weight(exit) {
            exit = of_job;
        }
    }
    Ok(exit)
}
