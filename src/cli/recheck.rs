//! `gristmill recheck`: compares a sample of a finished job's answers with those of a higher
//! precision.

use std::sync::Arc;

use serde_json::json;

use crate::cli::args::{EngineArgs, RecheckArgs};
use crate::cli::device_choice::ResolvedDevice;
use crate::cli::exit::{Exit, Failure};
use crate::cli::output::{no_job_failure, open_ledger};
use crate::cli::prepare::PreparedJob;
use crate::cli::setup::{LoadedModel, render_threads, stop_on_signals};
use crate::dataset::DatasetError;
use crate::device::Precision;
use crate::job::file::OutputFormat;
use crate::job::generate::ConstraintSpec;
use crate::job::precision::RequestedKvFormat;
use crate::job::recheck::Recheck as JobRecheck;
use crate::job::spec::Job;
use crate::ledger::Ledger;
use crate::report::meter::Meter;
use crate::report::progress::{self, Goal};
use crate::report::recheck::RecheckReport;
use crate::report::sample::sample;
use crate::report::summary::{counted, number};
use crate::worker::jobs::OpenJob;
use crate::worker::model::Formats;
use crate::worker::recheck::{self, RecheckConfig};
use crate::worker::stop::Stop;

pub(super) async fn recheck(args: RecheckArgs) -> Result<Exit, Failure> {
    let mut prepared = PreparedJob::prepare(&args.job, args.limit, || args.engine.device.resolve()).await?;
    let sample = requested_sample(&prepared, &args)?;
    let ledger = open_ledger(&prepared.output).await?;
    let ledger = ledger.ok_or_else(|| no_job_failure(&prepared.output))?;
    prepared.resolve_settings(Some(&ledger))?;
    prepared
        .check_same_job(&ledger, &prepared.identity()?)
        .map_err(Failure::bad_job)?;
    if ledger.success().await?.is_none() {
        let status = ledger.status().await?;
        return Err(Failure::bad_job(anyhow::anyhow!(
            "job `{}` is not finished, with {} of {}: recheck it when it is",
            status.name,
            number(status.tally.rows()),
            counted(status.rows, "row")
        )));
    }
    let stop = Stop::default();
    stop_on_signals(stop.clone())?;
    let found = recheck_job(&prepared, &ledger, &sample, &args.engine, args.quiet, &stop).await?;
    if args.json {
        let json = json!({
            "job": prepared.job.name,
            "output": prepared.output.url.as_str(),
            "precision": prepared.formats().to_string(),
            "recheck": found,
        });
        println!("{json}");
    } else {
        for line in found.lines() {
            println!("{line}");
        }
    }
    Ok(Exit::Done)
}

/// The sample to run again, checked against the job.
pub(super) struct RecheckSample {
    /// At least 1; if the job has fewer rows, all of them are rechecked.
    pub rows: u64,
    /// Higher than the job's own formats.
    pub formats: Formats,
}

impl RecheckSample {
    /// The sample for `settings`. `precision_source` names the option or field that set its
    /// precision, for errors.
    pub(super) fn new(
        job: &Job,
        job_formats: Formats,
        settings: &JobRecheck,
        precision_source: &str,
    ) -> Result<RecheckSample, Failure> {
        if let Some(formats) = job_formats.for_recheck(settings.precision) {
            let rows = settings.rows;
            return Ok(RecheckSample { rows, formats });
        }
        let advice = match job_formats.for_recheck(Precision::F32) {
            None => "nothing is higher, leave the recheck out",
            Some(_) => "choose a higher one",
        };
        Err(Failure::bad_job(anyhow::anyhow!(
            "{}: {precision_source} is `{}`, and the job runs in `{job_formats}` itself: {advice}",
            job.file,
            Formats::of(
                settings.precision.into(),
                RequestedKvFormat::Auto,
                job_formats.precision
            )
        )))
    }
}

/// The sample that the arguments ask for, else the job file, else the defaults.
fn requested_sample(prepared: &PreparedJob, args: &RecheckArgs) -> Result<RecheckSample, Failure> {
    let job = &prepared.job;
    if job.output.format != OutputFormat::Parquet {
        return Err(Failure::bad_job(anyhow::anyhow!(
            "{}: a recheck reads answers from Parquet parts, and `output.format` is another",
            job.file
        )));
    }
    let mut settings = job.recheck.clone().unwrap_or_default();
    settings.rows = args.rows.unwrap_or(settings.rows);
    settings.precision = args.precision.unwrap_or(settings.precision);
    RecheckSample::new(job, prepared.formats(), &settings, "`--precision`")
}

/// Rechecks a finished job. It loads the model again, so the caller must have unloaded it.
pub(super) async fn recheck_job(
    prepared: &PreparedJob,
    ledger: &Ledger,
    requested: &RecheckSample,
    args: &EngineArgs,
    quiet: bool,
    stop: &Stop,
) -> Result<RecheckReport, Failure> {
    let (job, identity) = (&prepared.job, &ledger.job().identity);
    let sample = sample(&ledger.job().shards, requested.rows, &identity.job_hash);
    let goal = Goal {
        rows: sample.iter().map(|shard| shard.rows.len() as u64).sum(),
        rows_before: 0,
        seconds_before: 0.0,
        usd_per_hour: None,
    };
    if !quiet {
        let (rows, all) = (number(goal.rows), counted(ledger.job().rows(), "row"));
        eprintln!("rechecking {rows} of {all} in {}", requested.formats);
    }
    let hash = identity.model_hash.clone();
    // No GPU computes in F32, so F32 runs on the CPU.
    let device = match requested.formats.precision {
        Precision::F32 => ResolvedDevice::Cpu,
        _ => prepared.device,
    };
    let loaded = LoadedModel::load(
        prepared.model.clone(),
        requested.formats,
        job.context,
        hash,
        device,
        args,
    )?;
    let meter = Arc::new(Meter::default());
    let config = RecheckConfig {
        job: OpenJob::new(0, ledger.clone(), &loaded.model, Arc::default(), Arc::default())?,
        engine: loaded.engine,
        precision: requested.formats.to_string(),
        tokenizer: match job.generate.shape {
            ConstraintSpec::Choice { .. } => None,
            _ => Some(prepared.model.tokenizer.clone()),
        },
        render_threads: render_threads(args)?,
        meter: meter.clone(),
    };
    let progress_task = progress::show(meter, goal, quiet);
    let ended = recheck::run(config, &sample, stop).await;
    progress_task.abort();
    let found = ended.map_err(|error| match error.downcast_ref::<DatasetError>() {
        Some(DatasetError::InputChanged { .. } | DatasetError::InputMissing { .. }) => Failure::bad_job(error),
        _ => Failure::from(error),
    })?;
    found.ok_or_else(|| Failure {
        exit: Exit::Interrupted,
        error: anyhow::anyhow!("interrupted before all rows were compared; run the same command again"),
    })
}
