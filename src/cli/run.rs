//! `gristmill run`: runs the whole job on this machine: plans, works and publishes. A second run
//! continues where the first stopped.

use std::sync::Arc;
use std::time::Duration;

use chrono::{TimeDelta, Utc};

use crate::cli::args::RunArgs;
use crate::cli::exit::{Exit, Failure, one_line};
use crate::cli::inputs;
use crate::cli::limits::{follow_file, what_to_raise};
use crate::cli::on_finish;
use crate::cli::output::open_ledger;
use crate::cli::plan::check_any;
use crate::cli::prepare::PreparedJob;
use crate::cli::recheck;
use crate::cli::setup::{LoadedModel, render_threads, stop_on_signals, watchdog};
use crate::cli::summary::summary;
use crate::dataset::DatasetError;
use crate::ledger::{Ledger, LedgerError, StopWhy};
use crate::queue::{LocalQueue, Message};
use crate::report::agreement;
use crate::report::meter::Meter;
use crate::report::progress::show_duration;
use crate::report::progress::{self, Goal};
use crate::report::summary::Summary;
use crate::worker::jobs::{JobLookup, JobState, Jobs};
use crate::worker::retry_policy::RetryPolicy;
use crate::worker::stop::{Stop, Why};
use crate::worker::watched::Watched;
use crate::worker::{self, Until, Worker, WorkerConfig};

pub(super) async fn run(args: RunArgs) -> Result<Exit, Failure> {
    let mut prepared = PreparedJob::prepare(&args.job, args.limit.limit, || args.engine.device.resolve()).await?;
    on_finish::check_keys(&prepared)?;
    on_finish::check_command(&prepared)?;
    let begun = open_ledger(&prepared.output).await.map_err(refusal)?;
    prepared.settle(begun.as_ref())?;
    prepared.check_shape()?;
    let identity = prepared.identity()?;
    let (ledger, resumed) = match begun {
        Some(ledger) => {
            prepared.check_same(&ledger, &identity).map_err(Failure::bad_job)?;
            ledger.store().clean_stages().await?;
            (ledger, true)
        }
        None => {
            // A job that this machine cannot compute must not occupy the output.
            prepared.check_place().map_err(Failure::bad_job)?;
            let mut plan = prepared.plan().await?;
            check_any(&prepared, &plan).await?;
            prepared.hash_inputs(&mut plan).await?;
            let draft = prepared.draft(plan, identity)?;
            Ledger::create_or_resume(&prepared.output, draft)
                .await
                .map_err(refusal)?
        }
    };
    let stop = Stop::default();
    if ledger.finish_check(None).await?.is_some() {
        inputs::check_done(&prepared, &ledger).await?;
        if !args.quiet {
            eprintln!("job `{}` is already done: nothing to do", prepared.job.name);
        }
        if prepared.recheck.is_some() {
            stop_on_signals(stop.clone())?;
        }
        return finished(&prepared, &ledger, &args, &stop).await;
    }
    prepared.warn();
    if resumed && let Some(line) = inputs::left_out(&ledger).await {
        eprintln!("gristmill: warning: {line}");
    }
    if !args.quiet {
        if let Some(line) = on_finish::line(&prepared) {
            eprintln!("when it is done: {line}");
        }
        if let Some(line) = &prepared.sampling.line {
            eprintln!("sampling: {line}");
        }
        if let Some(line) = prepared.thinking_line() {
            eprintln!("thinking: {line}");
        }
        for line in prepared.untyped_lines() {
            eprintln!("parsed: {line}");
        }
    }
    // A closing job continues until its unfinished rows are rows of the output.
    let held = follow_file(&ledger, &prepared.limits(), args.quiet).await?;
    let why = match held.filter(|held| !held.closes) {
        Some(held) => Some(Why::from(held.why)),
        None => {
            stop_on_signals(stop.clone())?;
            work(&prepared, &ledger, &args, resumed, stop.clone()).await?
        }
    };
    // The last part may have been published between the stop and this check.
    if why.is_none() || ledger.success().await?.is_some() {
        return finished(&prepared, &ledger, &args, &stop).await;
    }
    if let Err(failure) = report(&prepared, &ledger, &args, &stop).await {
        eprintln!("gristmill: no report: {}", one_line(&failure.error));
    }
    say_stopped(&ledger, why).await
}

/// Prints the job's report, then performs `on_finish`.
async fn finished(prepared: &PreparedJob, ledger: &Ledger, args: &RunArgs, stop: &Stop) -> Result<Exit, Failure> {
    let reported = report(prepared, ledger, args, stop).await;
    on_finish::of_run(prepared, ledger, stop).await;
    reported
}

/// Reports why there is no result, and what to do.
async fn say_stopped(ledger: &Ledger, why: Option<Why>) -> Result<Exit, Failure> {
    let (raise, note);
    let (exit, said) = match why {
        Some(limit @ (Why::Budget | Why::Deadline)) => {
            let why = match limit {
                Why::Deadline => StopWhy::Deadline,
                _ => StopWhy::Budget,
            };
            raise = format!("{} and run again to go on", what_to_raise(ledger, why).await?);
            (Exit::Stopped, raise.as_str())
        }
        Some(Why::Cancelled) => (Exit::Cancelled, "the job was cancelled"),
        Some(Why::InputChanged) => {
            let control = ledger.control().await?;
            let found = control
                .note()
                .unwrap_or("an input is not what it was when the job was planned");
            note = format!("{found} (restored, the job goes on when it is run again)");
            (Exit::BadJob, note.as_str())
        }
        Some(Why::Interrupted | Why::Preempted) => {
            (Exit::Interrupted, "interrupted; run the same command again to go on")
        }
        Some(Why::Failed) | None => (
            Exit::Failure,
            "the worker stopped without finishing; run the same command again",
        ),
    };
    eprintln!("gristmill: {said}");
    Ok(exit)
}

/// The exit code for a ledger's error: a conflict means that the output belongs to something else.
fn refusal(error: LedgerError) -> Failure {
    match error {
        LedgerError::Conflict { .. } => Failure::bad_job(error),
        _ => Failure::from(error),
    }
}

/// Builds the worker and runs it; returns why it ended before the job was done.
async fn work(
    prepared: &PreparedJob,
    ledger: &Ledger,
    args: &RunArgs,
    resumed: bool,
    stop: Stop,
) -> Result<Option<Why>, Failure> {
    let hash = ledger.job().identity.model_hash.clone();
    let loaded = LoadedModel::load(
        prepared.model.clone(),
        prepared.formats(),
        prepared.job.context,
        hash,
        prepared.place,
        &args.engine,
    )?;
    let jobs = Jobs::new(loaded.model);
    let job = match jobs.add(ledger.clone()).await {
        JobLookup::Job(job) => job,
        JobLookup::NotOurs(why) => return Err(Failure::bad_job(anyhow::anyhow!("{}: {why}", prepared.job.file))),
        JobLookup::Stale(why) => return Err(Failure::from(anyhow::anyhow!(why))),
    };
    let before = ledger.status().await?;
    if resumed && !args.quiet {
        say_company(ledger, TimeDelta::seconds(2 * args.log_interval.ceil() as i64)).await?;
    }
    let meter = Arc::new(Meter::default());
    let queue = LocalQueue::new(messages(ledger, resumed).await?);
    let worker = Worker::new(WorkerConfig {
        name: format!("run-{}", crate::ledger::Id::random()?),
        queue: Arc::new(queue.clone()),
        own_queue: Some(queue),
        jobs,
        watched: Watched::default(),
        meter: meter.clone(),
        retry_policy: RetryPolicy::new(false),
        watchdog: watchdog(),
        render_threads: render_threads(&args.engine)?,
        options: worker::Options {
            log_interval: Duration::from_secs_f64(args.log_interval),
            shards_in_flight: shards_in_flight(
                prepared.job.shard_rows,
                args.engine.step_limits(prepared.place).sequences,
            ),
            until: Until::Idle,
            idle_after: Duration::ZERO,
            max_shards: None,
        },
    });
    let goal = Goal {
        rows: before.rows,
        rows_before: before.tally.rows(),
        seconds_before: before.seconds,
        usd_per_hour: ledger.terms_now().await?.usd_per_hour,
    };
    let shown = progress::show(meter, goal, args.quiet);
    let ended = worker::run(Arc::new(worker), loaded.engine, stop).await;
    shown.abort();
    let why = ended.map_err(|error| match error.downcast_ref::<DatasetError>() {
        // The inputs have changed or cannot be decoded, which is the job's fault.
        Some(
            DatasetError::InputChanged { .. } | DatasetError::InputMissing { .. } | DatasetError::Unreadable { .. },
        ) => Failure::bad_job(error),
        _ => Failure::from(error),
    })?;
    Ok(why.or(match job.state() {
        JobState::Stopped(why) | JobState::Closing(why) => Some(why.into()),
        JobState::Going | JobState::Unreadable => None,
    }))
}

/// Warns if another process wrote to this job within the last `live`: it may be an unintended
/// second run.
async fn say_company(ledger: &Ledger, live: TimeDelta) -> Result<(), Failure> {
    let now = Utc::now();
    let spent = ledger.spent().await?.by_worker.into_iter();
    let newest = spent.filter(|other| !other.ended).max_by_key(|other| other.at);
    if let Some(other) = newest.filter(|other| now - other.at <= live) {
        eprintln!(
            "gristmill: worker {} wrote to this job {} ago: if it still runs, the two share the job, each row is published once, and \
             what both spend is added up",
            other.worker,
            show_duration((now - other.at).as_seconds_f64().max(0.0))
        );
    }
    Ok(())
}

/// Messages for the unfinished shards, which are the embedded queue's content.
async fn messages(ledger: &Ledger, resumed: bool) -> Result<Vec<Message>, Failure> {
    let mut shards = ledger.unfinished().await?;
    if resumed && !shards.is_empty() {
        // Another run may work on the same job: with random starting points the two overlap late.
        let mut bytes = [0; 8];
        getrandom::fill(&mut bytes).map_err(|e| anyhow::anyhow!("no random numbers: {e}"))?;
        let start = u64::from_le_bytes(bytes) % shards.len() as u64;
        shards.rotate_left(start as usize);
    }
    Ok(worker::messages(ledger, &shards))
}

/// At least four, and enough that two batches can be filled with small shards.
fn shards_in_flight(shard_rows: u64, sequences: u32) -> u32 {
    let to_fill = (2 * u64::from(sequences)).div_ceil(shard_rows.max(1));
    to_fill.saturating_add(2).clamp(4, 64) as u32
}

/// Prints the report; returns the exit code by the rows alone, unless a stop cuts the recheck
/// short.
async fn report(prepared: &PreparedJob, ledger: &Ledger, args: &RunArgs, stop: &Stop) -> Result<Exit, Failure> {
    let mut summary: Summary = summary(ledger, &ledger.status().await?, prepared.output.url.as_str()).await;
    let mut exit = Exit::of_rows(&summary.rows);
    let is_done = ledger.success().await?.is_some();
    if let Some(gold) = prepared.job.gold.as_ref().filter(|_| is_done) {
        match agreement::of_parts(ledger, prepared.job.output.name_of(gold)).await {
            Ok(agreement) => summary.agreement = Some(agreement),
            Err(error) => eprintln!("gristmill: no agreement: {}", one_line(&error.into())),
        }
    }
    if let Some(sample) = prepared.recheck.as_ref().filter(|_| is_done) {
        match recheck::of_job(prepared, ledger, sample, &args.engine, args.quiet, stop).await {
            Ok(found) => summary.recheck = Some(found),
            Err(failure) => {
                eprintln!("gristmill: no recheck: {}", one_line(&failure.error));
                if failure.exit == Exit::Interrupted {
                    exit = failure.exit;
                }
            }
        }
    }
    if args.json {
        println!("{}", serde_json::to_string(&summary)?);
        if let Some(warning) = summary.warning().filter(|_| !args.quiet) {
            eprintln!("gristmill: {warning}");
        }
    } else {
        for line in summary.lines() {
            println!("{line}");
        }
        if prepared.limit.is_some() {
            println!(
                "            a trial: the job's own output is `{}`",
                prepared.job.output.uri
            );
        }
    }
    Ok(exit)
}
