//! Resolves a job's sampling values before the job is planned, and reports their sources.

use std::path::Path;

use crate::cli::exit::{Failure, one_line};
use crate::job::generate::{ConstraintSpec, Generate};
use crate::job::sampling::{Defaults, Source};
use crate::job::spec::Job;
use crate::ledger::Ledger;
use crate::ledger::keys::JOB;
use crate::model::config::generation::{GenerationDefaults, GenerationFile};
use crate::worker::model::ModelFiles;

/// Messages about a job's sampling.
#[derive(Debug, Default)]
pub(super) struct SamplingReport {
    /// The sources of the values; `None` if the checkpoint's files set none.
    pub line: Option<String>,
    pub warnings: Vec<String>,
}

impl SamplingReport {
    /// Fills in unset values of the job from its checkpoint.
    ///
    /// # Errors
    /// The checkpoint's file has invalid or unsupported settings.
    pub(super) fn of_new(job: &mut Job, model: &ModelFiles) -> Result<SamplingReport, Failure> {
        let file = GenerationFile::load(&model.dir).map_err(Failure::bad_job)?;
        job.generate.model_ends = Some(model.config.eos_token_ids.clone());
        if job.generate.defaults == Defaults::Neutral {
            let file_values = file.settings();
            let line = format!(
                "neutral (job); {} sets {}, which has no effect",
                file.name(),
                file_values.join(", ")
            );
            return Ok(SamplingReport {
                line: (!file_values.is_empty()).then_some(line),
                warnings: Vec::new(),
            });
        }
        let defaults = check(&file)?;
        job.generate.take_defaults(&defaults);
        Ok(SamplingReport {
            line: job.generate.sampling_line(),
            warnings: warnings(&job.generate, &defaults, file.name()),
        })
    }

    /// Takes all values from the record of the begun job.
    pub(super) fn of_begun(job: &mut Job, model: &ModelFiles, ledger: &Ledger) -> Result<SamplingReport, Failure> {
        let record =
            Job::from_record(&ledger.job().resolved, &ledger.store().address(JOB)).map_err(Failure::bad_job)?;
        let mut current = job.clone();
        let current = match SamplingReport::of_new(&mut current, model) {
            Ok(_) => record.generate.sampling_differences(&current.generate),
            Err(failure) => Some((record.generate.describe_sampling(), one_line(&failure.error))),
        };
        let warnings = current.map(|(began, current)| {
            format!(
                "job `{}` began with {began} and goes on so; its model's files now say: {current}",
                job.name
            )
        });
        job.generate = record.generate;
        Ok(SamplingReport {
            line: job.generate.sampling_line(),
            warnings: warnings.into_iter().collect(),
        })
    }
}

/// The sampling values of a job of the checkpoint in `dir` that sets none, and warnings about them.
///
/// # Errors
/// The checkpoint's file has invalid or unsupported settings.
pub(super) fn default_sampling(dir: &Path) -> Result<(Generate, Vec<String>), Failure> {
    let file = GenerationFile::load(dir).map_err(Failure::bad_job)?;
    let defaults = check(&file)?;
    let mut generate = Generate::unset().map_err(|why| anyhow::anyhow!(why))?;
    generate.take_defaults(&defaults);
    let warnings = warnings(&generate, &defaults, file.name());
    Ok((generate, warnings))
}

fn check(file: &GenerationFile) -> Result<GenerationDefaults, Failure> {
    file.check().map_err(|error| {
        Failure::bad_job(anyhow::anyhow!(
            "{error}; `generate.defaults: neutral` goes on without what this file says of sampling"
        ))
    })
}

fn warnings(generate: &Generate, defaults: &GenerationDefaults, file: &str) -> Vec<String> {
    let mut warnings = Vec::new();
    if !defaults.unknown.is_empty() {
        warnings.push(format!(
            "`{}` in {file}: not known, and without effect",
            defaults.unknown.join("`, `")
        ));
    }
    if defaults.is_greedy && generate.source("temperature") != Some(Source::Job) && generate.sampling.temperature > 0.0
    {
        warnings.push(format!(
            "`do_sample: false` in {file} has no effect: the temperature is {}; `generate.sampling.temperature: 0` is greedy",
            generate.sampling.temperature
        ));
    }
    if generate.n > 1 && generate.sampling.temperature == 0.0 {
        warnings.push(format!(
            "the {} answers of a row (`generate.n`) are all the same at temperature 0: `generate.sampling.temperature` above 0 draws them",
            generate.n
        ));
    }
    if generate.is_from_checkpoint("repetition_penalty")
        && generate.sampling.repetition_penalty != 1.0
        && matches!(generate.shape, ConstraintSpec::Choice { .. })
    {
        warnings.push(format!(
            "the repetition penalty of {file} makes choices less likely whose tokens stand in the prompt; \
             `generate.sampling.repetition_penalty: 1` turns it off"
        ));
    }
    warnings
}
