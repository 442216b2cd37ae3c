//! `gristmill worker`: works on the shards that a queue names, of all jobs of one model.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use serde::Serialize;

use crate::cli::args::WorkerArgs;
use crate::cli::door::{model_dir, no_job, say_warnings};
use crate::cli::enqueue::Target;
use crate::cli::exit::{Exit, Failure, one_line};
use crate::cli::limits::reached_line;
use crate::cli::outfit::{LoadedModel, pulse, render_threads, stop_on_signals};
use crate::cli::place::Place;
use crate::dataset::location::Location;
use crate::dataset::stores::Stores;
use crate::device;
use crate::job::Job;
use crate::job::spec::Precision;
use crate::ledger::keys::JOB;
use crate::ledger::{Id, JobIdentity, Ledger, LedgerError, StopWhy};
use crate::queue::Queue;
use crate::report::meter::{Meter, Reading};
use crate::report::progress;
use crate::report::summary::{RowCounts, number, rate};
use crate::worker::access::{Access, Asked};
use crate::worker::idle::IdleClock;
use crate::worker::jobs::Jobs;
use crate::worker::model::{Formats, ModelFiles};
use crate::worker::patience::{Patience, Pauses};
use crate::worker::pulse::Pulse;
use crate::worker::stop::{Stop, Why};
use crate::worker::{self, Parts, Until, Worker, liveness, spot};

/// How long to wait for the first message before looking around.
const RECEIVE_WAIT: Duration = Duration::from_secs(1);
/// Before a message that points at nothing is passed on.
const PASS_ON_PAUSE: Duration = Duration::from_secs(1);
/// How long a worker that works once waits for a store or a queue that does not answer.
const ONCE_WAITS_MAX: Duration = Duration::from_secs(600);
/// Letters of a host's name that fit into a worker's.
const NAME_MAX: usize = 40;

pub async fn worker(args: WorkerArgs) -> Result<Exit, Failure> {
    let stop = Stop::default();
    stop_on_signals(stop.clone())?;
    let access = access(&args)?;
    let pulse = pulse();
    signs_of_life(&args, &pulse).await?;
    if let Some(cloud) = args.spot {
        spot::watch(cloud, stop.clone())?;
    }
    // What it will not begin is better in another worker's hands.
    let most = args
        .max_shards
        .map_or(u32::MAX, |most| u32::try_from(most).unwrap_or(u32::MAX));
    let queue = Target::new(&args.queue, args.kafka.clone(), args.shards_in_flight.min(most.max(1)))?
        .consume()
        .await?;
    let place = args.engine.device.place()?;
    let mut watched = watched(&args, &stop).await?;
    let Some(wanted) = wanted_model(
        &args,
        place,
        Incoming {
            queue: &queue,
            access: &access,
        },
        &mut watched,
        &stop,
    )
    .await?
    else {
        return ended_early(&args, &stop);
    };
    say_warnings(&wanted.files.config.warnings);
    let hash = wanted.files.hash(wanted.formats.precision).map_err(Failure::bad_job)?;
    let loaded = LoadedModel::load(wanted.files, wanted.formats, wanted.context, hash, place, &args.engine)?;
    let meter = Arc::new(Meter::default());
    let worker = Arc::new(Worker::new(Parts {
        name: name(&args)?,
        queue,
        own_queue: None,
        jobs: Jobs::confined(loaded.model, access),
        watched,
        meter: meter.clone(),
        patience: patience(&args),
        pulse,
        render_threads: render_threads(&args.engine)?,
        options: options(&args),
    }));
    if !args.quiet {
        eprintln!(
            "worker `{}` is ready, with model `{}` in {}",
            worker.name,
            worker.jobs.model().name(),
            worker.jobs.model().formats
        );
    }
    let shown = progress::show_work(meter.clone(), args.quiet);
    let ended = worker::run(worker.clone(), loaded.engine, stop).await;
    shown.abort();
    report(&args, &worker, ended).await
}

/// Outages are waited out, however long they take; a worker that works once is waited for itself.
fn patience(args: &WorkerArgs) -> Patience {
    match args.once {
        true => Patience::within(ONCE_WAITS_MAX),
        false => Patience::new(true),
    }
}

/// What queued jobs may touch; from here on, web servers' redirects keep to it, too.
fn access(args: &WorkerArgs) -> Result<Access, Failure> {
    let asked = Asked {
        accept: &args.accept,
        accept_inputs: &args.accept_inputs,
        accept_models: &args.accept_models,
        jobs: &args.job,
    };
    let access =
        Access::new(&asked, &std::env::current_dir()?).map_err(|why| Failure::bad_job(anyhow::anyhow!(why)))?;
    let follows = access.clone();
    Stores::of_process().confine(Arc::new(move |url| follows.may_follow(url)));
    Ok(access)
}

/// Messages, and what they may name.
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

async fn signs_of_life(args: &WorkerArgs, pulse: &Arc<Pulse>) -> Result<(), Failure> {
    if let Some(path) = &args.liveness_file {
        liveness::touch(path.clone(), pulse.clone())
            .with_context(|| format!("`--liveness-file`: cannot write `{}`", path.display()))
            .map_err(Failure::bad_job)?;
    }
    if let Some(address) = args.liveness_port {
        liveness::listen(address, pulse.clone())
            .await
            .with_context(|| format!("`--liveness-port`: cannot listen at {address}"))
            .map_err(Failure::bad_job)?;
    }
    Ok(())
}

/// The model that the arguments name, or that of the first job; `None`: told to stop, or nothing came.
async fn wanted_model(
    args: &WorkerArgs,
    place: Place,
    incoming: Incoming<'_>,
    watched: &mut Vec<Ledger>,
    stop: &Stop,
) -> Result<Option<Wanted>, Failure> {
    if let Some(dir) = &args.model {
        return Ok(Some(Wanted {
            files: ModelFiles::open(dir.clone()).map_err(Failure::bad_job)?,
            formats: Formats::of(
                asked_precision(&args.precision),
                asked_precision(&args.kv_cache),
                place.precision(),
            ),
            context: args.context,
        }));
    }
    if watched.is_empty() {
        // Heard of is heard of: another worker may have its shards, but it must be done before this one is idle.
        watched.extend(first_job(args, incoming, stop).await?);
    }
    let Some(ledger) = watched.first() else {
        return Ok(None);
    };
    if let Some(why) = refused_model(ledger, incoming.access) {
        return Err(Failure::bad_job(anyhow::anyhow!(why)));
    }
    let job = Job::of_record(&ledger.job().resolved, &ledger.store().address(JOB))?;
    Ok(Some(Wanted {
        files: ModelFiles::open(model_dir(&job)?).map_err(Failure::bad_job)?,
        formats: recorded(&ledger.job().identity),
        context: args.context.or(job.context),
    }))
}

/// The formats that a job was submitted with.
fn recorded(identity: &JobIdentity) -> Formats {
    let precision = asked_precision(&identity.precision);
    let kv = identity.kv_cache.as_deref().map_or(Precision::Auto, asked_precision);
    Formats::of(precision, kv, device::Precision::F32)
}

pub fn asked_precision(word: &str) -> Precision {
    match word {
        "f32" => Precision::F32,
        "bf16" => Precision::Bf16,
        "int8" => Precision::Int8,
        "fp8" => Precision::Fp8,
        // clap lets nothing else through.
        _ => Precision::Auto,
    }
}

/// The ledgers of `--job`.
async fn watched(args: &WorkerArgs, stop: &Stop) -> Result<Vec<Ledger>, Failure> {
    let here = std::env::current_dir()?;
    let mut ledgers = Vec::new();
    for output in &args.job {
        let location = Location::parse(output, &here).map_err(Failure::bad_job)?;
        let ledger = open_patiently(&location, &patience(args), stop).await?;
        ledgers.push(ledger.ok_or_else(|| no_job(&location))?);
    }
    Ok(ledgers)
}

/// The ledger of the job at `output`, however long the store is away; `None`: there is none.
async fn open_patiently(output: &Location, patience: &Patience, stop: &Stop) -> Result<Option<Ledger>, Failure> {
    let mut pauses = Pauses::default();
    loop {
        match Ledger::open(output).await {
            Ok(opened) => return Ok(opened),
            Err(error) => patience.bear(error.into(), &mut pauses, stop).await?,
        }
    }
}

/// As [`open_patiently`], of a job that a message names: nothing of it is read where its output is not accepted, and it is an error
/// where its record names what is not.
async fn open_accepted(
    output: &Location,
    access: &Access,
    patience: &Patience,
    stop: &Stop,
) -> Result<Option<Ledger>, Failure> {
    let refused = |why: String| Failure::bad_job(anyhow::anyhow!(why));
    if let Some(why) = access.refuses_output(output) {
        return Err(refused(why));
    }
    let Some(ledger) = open_patiently(output, patience, stop).await? else {
        return Ok(None);
    };
    let inputs = ledger.job().inputs.iter().map(|input| input.url.as_str());
    let why = access
        .refuses_inputs(output, inputs)
        .or_else(|| refused_model(&ledger, access));
    match why {
        Some(why) => Err(refused(why)),
        None => Ok(Some(ledger)),
    }
}

/// Why the model that a record names must not be loaded. What else is wrong with it is said where it is opened.
fn refused_model(ledger: &Ledger, access: &Access) -> Option<String> {
    let job: Job = serde_json::from_value(ledger.job().resolved.clone()).ok()?;
    access.refuses_model(&model_dir(&job).ok()?)
}

/// The job of the first message that points at one.
async fn first_job(args: &WorkerArgs, incoming: Incoming<'_>, stop: &Stop) -> Result<Option<Ledger>, Failure> {
    let Incoming { queue, access } = incoming;
    let patience = patience(args);
    let mut idle = IdleClock::default();
    while !stop.is_set() {
        let received = match queue.receive(RECEIVE_WAIT).await {
            Ok(received) => received,
            Err(error) => {
                patience.bear(error.into(), &mut Pauses::default(), stop).await?;
                None
            }
        };
        let Some(delivery) = received else {
            idle.look(queue.is_attached());
            let ends = args.until_idle || args.once;
            if ends && idle.has_run(Duration::from_secs_f64(args.idle_after)) {
                break;
            }
            continue;
        };
        idle = IdleClock::default();
        let opened = match Location::parse(&delivery.message.output, Path::new("/")) {
            Ok(output) => open_accepted(&output, access, &patience, stop).await,
            Err(error) => Err(Failure::from(error)),
        };
        let why = match opened {
            Ok(Some(ledger)) => match Job::of_record(&ledger.job().resolved, &ledger.store().address(JOB)) {
                Ok(_) => {
                    queue.give_back(&delivery).await?;
                    return Ok(Some(ledger));
                }
                Err(error) => error.to_string(),
            },
            Ok(None) => "it holds no job".to_string(),
            Err(failure) => one_line(&failure.error),
        };
        if !stop.is_set() {
            tracing::warn!("a message is passed on: `{}`: {why}", delivery.message.output);
            tokio::time::sleep(PASS_ON_PAUSE).await;
            queue.pass_on(&delivery).await?;
        }
    }
    Ok(None)
}

/// It ended before it had a model.
fn ended_early(args: &WorkerArgs, stop: &Stop) -> Result<Exit, Failure> {
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
        eprintln!("nothing came: there is nothing to do");
    }
    Ok(Exit::Done)
}

/// Unique among workers, and telling people where it runs.
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

/// What `--json` prints as the last line of stdout.
#[derive(Debug, Serialize)]
struct Report {
    worker: String,
    /// Shards committed.
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
            "{} rows in {} shards, {} failed rows, {} truncated rows, {} tokens/s, {:.1} device seconds, {:.1} of them lost",
            number(report.read.rows),
            number(report.shards),
            number(report.read.failed_rows),
            number(report.read.truncated_rows),
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

/// The exit code that the jobs give together: a stopped one first, then failed rows.
async fn of_jobs(worker: &Worker) -> Result<Exit, Failure> {
    let jobs = worker.jobs.open().await;
    let ledgers = jobs.iter().map(|job| &job.ledger).chain(&worker.watched);
    let mut exit = Exit::Done;
    let mut said = HashSet::new();
    for ledger in ledgers {
        let success = match ledger.success().await {
            // A newer gristmill has finished it.
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
                // A job that is watched has been heard of, too.
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
