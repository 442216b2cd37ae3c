//! `gristmill recheck`: compares a sample of a finished job's answers with those of a higher
//! precision.

use std::sync::Arc;

use serde_json::json;

use crate::cli::args::{EngineArgs, RecheckArgs};
use crate::cli::device_choice::ResolvedDevice;
use crate::cli::exit::{Exit, Failure};
use crate::cli::output::{no_job, open_ledger};
use crate::cli::prepare::PreparedJob;
use crate::cli::setup::{LoadedModel, render_threads, stop_on_signals};
use crate::dataset::DatasetError;
use crate::device::Precision;
use crate::job::file::OutputFormat;
use crate::job::generate::ShapeSpec;
use crate::job::precision::RequestedPrecision;
use crate::job::recheck::Recheck as Asked;
use crate::job::spec::Job;
use crate::ledger::Ledger;
use crate::report::meter::Meter;
use crate::report::progress::{self, Goal};
use crate::report::recheck::Recheck;
use crate::report::sample::sample;
use crate::report::summary::{counted, number};
use crate::worker::jobs::OpenJob;
use crate::worker::model::Formats;
use crate::worker::recheck::{self, RecheckConfig};
use crate::worker::stop::Stop;

pub(super) async fn recheck(args: RecheckArgs) -> Result<Exit, Failure> {
    let mut prepared = PreparedJob::prepare(&args.job, args.limit, || args.engine.device.resolve()).await?;
    let sample = asked_sample(&prepared, &args)?;
    let ledger = open_ledger(&prepared.output).await?;
    let ledger = ledger.ok_or_else(|| no_job(&prepared.output))?;
    prepared.settle(Some(&ledger))?;
    prepared
        .check_same(&ledger, &prepared.identity()?)
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
    let found = of_job(&prepared, &ledger, &sample, &args.engine, args.quiet, &stop).await?;
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
pub(super) struct Sample {
    /// At least 1; a job with fewer rows is rechecked completely.
    pub rows: u64,
    /// Higher than the job's own formats.
    pub formats: Formats,
}

impl Sample {
    /// The sample for `asked`; `place` names the setting that gave its precision, for errors.
    /// `own`: the job's formats.
    pub(super) fn new(job: &Job, own: Formats, asked: &Asked, place: &str) -> Result<Sample, Failure> {
        if let Some(formats) = own.rechecked_in(asked.precision) {
            let rows = asked.rows;
            return Ok(Sample { rows, formats });
        }
        let advice = match own.rechecked_in(Precision::F32) {
            None => "nothing is higher, leave the recheck out",
            Some(_) => "choose a higher one",
        };
        Err(Failure::bad_job(anyhow::anyhow!(
            "{}: {place} is `{}`, and the job runs in `{own}` itself: {advice}",
            job.file,
            Formats::of(asked.precision.into(), RequestedPrecision::Auto, own.precision)
        )))
    }
}

/// The sample by the arguments, else the job file, else the defaults.
fn asked_sample(prepared: &PreparedJob, args: &RecheckArgs) -> Result<Sample, Failure> {
    let job = &prepared.job;
    if job.output.format != OutputFormat::Parquet {
        return Err(Failure::bad_job(anyhow::anyhow!(
            "{}: a recheck reads answers from Parquet parts, and `output.format` is another",
            job.file
        )));
    }
    let mut asked = job.recheck.clone().unwrap_or_default();
    asked.rows = args.rows.unwrap_or(asked.rows);
    asked.precision = args.precision.unwrap_or(asked.precision);
    Sample::new(job, prepared.formats(), &asked, "`--precision`")
}

/// Rechecks a finished job. The job's own model must be unloaded first, since this loads it again.
pub(super) async fn of_job(
    prepared: &PreparedJob,
    ledger: &Ledger,
    wanted: &Sample,
    args: &EngineArgs,
    quiet: bool,
    stop: &Stop,
) -> Result<Recheck, Failure> {
    let (job, identity) = (&prepared.job, &ledger.job().identity);
    let sample = sample(&ledger.job().shards, wanted.rows, &identity.job_hash);
    let goal = Goal {
        rows: sample.iter().map(|shard| shard.rows.len() as u64).sum(),
        rows_before: 0,
        seconds_before: 0.0,
        usd_per_hour: None,
    };
    if !quiet {
        let (rows, all) = (number(goal.rows), counted(ledger.job().rows(), "row"));
        eprintln!("rechecking {rows} of {all} in {}", wanted.formats);
    }
    let hash = identity.model_hash.clone();
    // No GPU computes in F32, so F32 runs on the CPU.
    let place = match wanted.formats.precision {
        Precision::F32 => ResolvedDevice::Cpu,
        _ => prepared.place,
    };
    let loaded = LoadedModel::load(prepared.model.clone(), wanted.formats, job.context, hash, place, args)?;
    let meter = Arc::new(Meter::default());
    let config = RecheckConfig {
        job: OpenJob::new(0, ledger.clone(), &loaded.model, Arc::default(), Arc::default())?,
        engine: loaded.engine,
        precision: wanted.formats.to_string(),
        tokenizer: match job.generate.shape {
            ShapeSpec::Choice { .. } => None,
            _ => Some(prepared.model.tokenizer.clone()),
        },
        render_threads: render_threads(args)?,
        meter: meter.clone(),
    };
    let shown = progress::show(meter, goal, quiet);
    let ended = recheck::run(config, &sample, stop).await;
    shown.abort();
    let found = ended.map_err(|error| match error.downcast_ref::<DatasetError>() {
        Some(DatasetError::InputChanged { .. } | DatasetError::InputMissing { .. }) => Failure::bad_job(error),
        _ => Failure::from(error),
    })?;
    found.ok_or_else(|| Failure {
        exit: Exit::Interrupted,
        error: anyhow::anyhow!("interrupted before all rows were compared; run the same command again"),
    })
}
