//! `gristmill run`: runs the whole job on this machine: plans, works and publishes. A second run
//! continues where the first stopped.

use std::sync::Arc;
use std::time::Duration;

use chrono::{TimeDelta, Utc};

use crate::cli::args::RunArgs;
use crate::cli::exit::{Exit, Failure, one_line};
use crate::cli::inputs;
use crate::cli::limits::{apply_job_file, reached_line_with_advice};
use crate::cli::on_finish;
use crate::cli::output::{open_ledger, output_of};
use crate::cli::plan::check_any_row;
use crate::cli::prepare::PreparedJob;
use crate::cli::recheck;
use crate::cli::setup::{LoadedModel, render_threads, stop_on_signals, watchdog};
use crate::cli::summary::summary;
use crate::dataset::DatasetError;
use crate::dataset::store::clients::redacted;
use crate::ledger::{Ledger, LedgerError, StopWhy};
use crate::queue::{LocalQueue, Message};
use crate::report::agreement;
use crate::report::meter::Meter;
use crate::report::progress::show_duration;
use crate::report::progress::{self, Goal};
use crate::report::summary::Summary;
use crate::worker::job_state::JobState;
use crate::worker::jobs::{JobLookup, Jobs};
use crate::worker::metrics::Metrics;
use crate::worker::retry_policy::RetryPolicy;
use crate::worker::stop::{Stop, StopCause};
use crate::worker::watched::WatchedJobs;
use crate::worker::{self, Until, Worker, WorkerConfig};

pub(super) async fn run(args: RunArgs) -> Result<Exit, Failure> {
    let mut prepared = PreparedJob::prepare(&args.job, args.limit.limit, || args.engine.device.resolve()).await?;
    on_finish::check_keys(&prepared)?;
    on_finish::check_command(&prepared)?;
    let begun = open_ledger(&prepared.output).await.map_err(ledger_failure)?;
    prepared.resolve_settings(begun.as_ref())?;
    prepared.check_constraint()?;
    let identity = prepared.identity()?;
    let (ledger, resumed) = match begun {
        Some(ledger) => {
            prepared.check_same_job(&ledger, &identity).map_err(Failure::bad_job)?;
            ledger.store().remove_old_stages().await?;
            (ledger, true)
        }
        None => {
            // A job that this machine cannot compute must not occupy the output.
            prepared.check_device(args.engine.kv_memory).map_err(Failure::bad_job)?;
            let mut plan = prepared.plan().await?;
            check_any_row(&prepared, &plan).await?;
            prepared.hash_inputs(&mut plan).await?;
            let draft = prepared.draft(plan, identity)?;
            Ledger::create_or_resume(&prepared.output, draft)
                .await
                .map_err(ledger_failure)?
        }
    };
    let stop = Stop::default();
    if ledger.finish_check(None).await?.is_some() {
        inputs::check_inputs_unchanged(&prepared, &ledger).await?;
        if !args.quiet {
            eprintln!("job `{}` is already done: nothing to do", prepared.job.name);
        }
        if prepared.recheck.is_some() {
            stop_on_signals(stop.clone())?;
        }
        return report_finished(&prepared, &ledger, &args, &stop).await;
    }
    prepared.warn();
    if resumed && let Some(line) = inputs::skipped_files_note(&ledger).await {
        eprintln!("gristmill: warning: {line}");
    }
    if !args.quiet {
        if let Some(line) = on_finish::description(&prepared) {
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
    // A stopped job that closes continues until its unfinished rows are published.
    let active_stop = apply_job_file(&ledger, &prepared.limits(), args.quiet).await?;
    let why = match active_stop.filter(|active_stop| !active_stop.closes) {
        Some(active_stop) => Some(StopCause::from(active_stop.why)),
        None => {
            stop_on_signals(stop.clone())?;
            work(&prepared, &ledger, &args, resumed, stop.clone()).await?
        }
    };
    // The last part may have been published between the stop and this check.
    if why.is_none() || ledger.success().await?.is_some() {
        return report_finished(&prepared, &ledger, &args, &stop).await;
    }
    if let Err(failure) = report(&prepared, &ledger, &args, &stop).await {
        eprintln!("gristmill: no report: {}", one_line(&failure.error));
    }
    report_stop(&ledger, why).await
}

/// Prints the job's report, then performs `on_finish`.
async fn report_finished(
    prepared: &PreparedJob,
    ledger: &Ledger,
    args: &RunArgs,
    stop: &Stop,
) -> Result<Exit, Failure> {
    let reported = report(prepared, ledger, args, stop).await;
    on_finish::perform_after_run(prepared, ledger, stop).await;
    reported
}

/// Reports why the job has no result yet, and what to do.
async fn report_stop(ledger: &Ledger, why: Option<StopCause>) -> Result<Exit, Failure> {
    let (limit_text, note);
    let (exit, message) = match why {
        Some(limit @ (StopCause::Budget | StopCause::Deadline)) => {
            let why = match limit {
                StopCause::Deadline => StopWhy::Deadline,
                _ => StopWhy::Budget,
            };
            limit_text = format!(
                "{} and run again to go on",
                reached_line_with_advice(ledger, why).await?
            );
            (Exit::Stopped, limit_text.as_str())
        }
        Some(StopCause::Cancelled) => (Exit::Cancelled, "the job was cancelled"),
        Some(StopCause::InputChanged) => {
            let control = ledger.control().await?;
            let found = control
                .stop_note()
                .unwrap_or("an input is not what it was when the job was planned");
            note = format!("{found} (restored, the job goes on when it is run again)");
            (Exit::BadJob, note.as_str())
        }
        Some(StopCause::Interrupted | StopCause::Preempted) => {
            (Exit::Interrupted, "interrupted; run the same command again to go on")
        }
        Some(StopCause::Failed) | None => (
            Exit::Failure,
            "the worker stopped without finishing; run the same command again",
        ),
    };
    eprintln!("gristmill: {message}");
    Ok(exit)
}

/// The exit code for a ledger's error: a conflict means that the output belongs to something else.
fn ledger_failure(error: LedgerError) -> Failure {
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
) -> Result<Option<StopCause>, Failure> {
    let hash = ledger.job().identity.model_hash.clone();
    let loaded = LoadedModel::load(
        prepared.model.clone(),
        prepared.formats(),
        prepared.job.context,
        hash,
        prepared.device,
        &args.engine,
    )?;
    let jobs = Jobs::new(loaded.model);
    let job = match jobs.add(ledger.clone()).await {
        JobLookup::Job(job) => job,
        JobLookup::NotOurs(why) => return Err(Failure::bad_job(anyhow::anyhow!("{}: {why}", prepared.job.file))),
        JobLookup::Stale(why) => return Err(Failure::from(anyhow::anyhow!(why))),
    };
    let status_before = ledger.status().await?;
    if resumed && !args.quiet {
        warn_of_other_run(ledger, TimeDelta::seconds(2 * args.log_interval.ceil() as i64)).await?;
    }
    let meter = Arc::new(Meter::default());
    let queue = LocalQueue::new(messages(ledger, resumed).await?);
    let worker = Worker::new(WorkerConfig {
        name: format!("run-{}", crate::ledger::Id::random()?),
        queue: Arc::new(queue.clone()),
        embedded_queue: Some(queue),
        jobs,
        watched: WatchedJobs::default(),
        meter: meter.clone(),
        metrics: Arc::new(Metrics::new()?),
        retry_policy: RetryPolicy::new(false),
        watchdog: watchdog(),
        render_threads: render_threads(&args.engine)?,
        options: worker::WorkerOptions {
            log_interval: Duration::from_secs_f64(args.log_interval),
            shards_in_flight: shards_in_flight(prepared.job.shard_rows, args.engine.max_sequences(prepared.device)),
            until: Until::Idle,
            idle_after: Duration::ZERO,
            max_shards: None,
        },
    });
    let goal = Goal {
        rows: status_before.rows,
        rows_before: status_before.tally.rows(),
        seconds_before: status_before.seconds,
        usd_per_hour: ledger.current_limits().await?.usd_per_hour,
    };
    let progress_task = progress::show(meter, goal, args.quiet);
    let ended = worker::run(Arc::new(worker), loaded.engine, stop).await;
    progress_task.abort();
    let why = ended.map_err(|error| match error.downcast_ref::<DatasetError>() {
        // Inputs that have changed or cannot be decoded are the job's fault.
        Some(
            DatasetError::InputChanged { .. } | DatasetError::InputMissing { .. } | DatasetError::Unreadable { .. },
        ) => Failure::bad_job(error),
        _ => Failure::from(error),
    })?;
    Ok(why.or(match job.state() {
        JobState::Stopped(why) | JobState::Closing(why) => Some(why.into()),
        JobState::Running | JobState::Unreadable => None,
    }))
}

/// Warns if another process wrote to this job less than `active_within` ago: it may be an
/// unintended second run.
async fn warn_of_other_run(ledger: &Ledger, active_within: TimeDelta) -> Result<(), Failure> {
    let now = Utc::now();
    let spent = ledger.spendings().await?.by_worker.into_iter();
    let newest = spent.filter(|other| !other.ended).max_by_key(|other| other.written_at);
    if let Some(other) = newest.filter(|other| now - other.written_at <= active_within) {
        eprintln!(
            "gristmill: worker {} wrote to this job {} ago: if it still runs, the two share the job, each row is published once, and \
             what both spend is added up",
            other.worker,
            show_duration((now - other.written_at).as_seconds_f64().max(0.0))
        );
    }
    Ok(())
}

/// Messages for the unfinished shards, with which the embedded queue begins.
async fn messages(ledger: &Ledger, resumed: bool) -> Result<Vec<Message>, Failure> {
    let mut shards = ledger.unfinished_shards().await?;
    if resumed && !shards.is_empty() {
        // Another run may work on the same job. With random first shards, the two meet late.
        let mut bytes = [0; 8];
        getrandom::fill(&mut bytes).map_err(|e| anyhow::anyhow!("no random numbers: {e}"))?;
        let start = u64::from_le_bytes(bytes) % shards.len() as u64;
        shards.rotate_left(start as usize);
    }
    Ok(worker::messages(ledger, &shards))
}

/// At least four, and enough that small shards can fill two batches.
fn shards_in_flight(shard_rows: u64, sequences: u32) -> u32 {
    let shards_to_fill = (2 * u64::from(sequences)).div_ceil(shard_rows.max(1));
    shards_to_fill.saturating_add(2).clamp(4, 64) as u32
}

/// Prints the report. The exit code depends only on the rows, unless a stop interrupts the recheck.
async fn report(prepared: &PreparedJob, ledger: &Ledger, args: &RunArgs, stop: &Stop) -> Result<Exit, Failure> {
    let mut summary: Summary = summary(ledger, &ledger.status().await?, prepared.output.url.as_str()).await;
    let mut exit = Exit::of_rows(&summary.rows);
    let is_done = ledger.success().await?.is_some();
    if let Some(gold) = prepared.job.gold.as_ref().filter(|_| is_done) {
        match agreement::of_parts(ledger, prepared.job.output.output_name(gold)).await {
            Ok(agreement) => summary.agreement = Some(agreement),
            Err(error) => eprintln!("gristmill: no agreement: {}", one_line(&error.into())),
        }
    }
    if let Some(sample) = prepared.recheck.as_ref().filter(|_| is_done) {
        match recheck::recheck_job(prepared, ledger, sample, &args.engine, args.quiet, stop).await {
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
                "            a trial: the job's own output is {}",
                redacted(&output_of(&prepared.job)?.url)
            );
        }
    }
    Ok(exit)
}
