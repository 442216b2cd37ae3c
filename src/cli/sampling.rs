//! Settles and reports the sources of a job's sampling values, before the job is planned.

use crate::cli::exit::{Failure, one_line};
use crate::job::generate::{Generate, ShapeSpec};
use crate::job::sampling::{Defaults, Source};
use crate::job::spec::Job;
use crate::ledger::Ledger;
use crate::ledger::keys::JOB;
use crate::model::config::generation::{GenerationDefaults, GenerationFile};
use crate::worker::model::ModelFiles;

/// Messages about a job's sampling.
#[derive(Debug, Default)]
pub(super) struct Sampling {
    /// The sources of the values, if the checkpoint provides some or would provide some.
    pub line: Option<String>,
    pub warnings: Vec<String>,
}

impl Sampling {
    /// Fills unset values of the job from its checkpoint.
    ///
    /// # Errors
    /// The checkpoint's file has invalid or unsupported settings.
    pub(super) fn of_new(job: &mut Job, model: &ModelFiles) -> Result<Sampling, Failure> {
        let file = GenerationFile::load(&model.dir).map_err(Failure::bad_job)?;
        job.generate.model_ends = Some(model.config.eos_token_ids.clone());
        if job.generate.defaults == Defaults::Neutral {
            let says = file.says();
            let line = format!(
                "neutral (job); {} says {}, which have no say",
                file.name(),
                says.join(", ")
            );
            return Ok(Sampling {
                line: (!says.is_empty()).then_some(line),
                warnings: Vec::new(),
            });
        }
        let defaults = file.check().map_err(|error| {
            Failure::bad_job(anyhow::anyhow!(
                "{error}; `generate.defaults: neutral` goes on without what this file says of sampling"
            ))
        })?;
        job.generate.take_defaults(&defaults);
        Ok(Sampling {
            line: job.generate.sampling_line(),
            warnings: warnings(&job.generate, &defaults, file.name()),
        })
    }

    /// Takes all values from the record of the begun job.
    pub(super) fn of_begun(job: &mut Job, model: &ModelFiles, ledger: &Ledger) -> Result<Sampling, Failure> {
        let record = Job::of_record(&ledger.job().resolved, &ledger.store().address(JOB)).map_err(Failure::bad_job)?;
        let mut now = job.clone();
        let now = match Sampling::of_new(&mut now, model) {
            Ok(_) => record.generate.differences(&now.generate),
            Err(failure) => Some((record.generate.words(), one_line(&failure.error))),
        };
        let warnings = now.map(|(began, now)| {
            format!(
                "job `{}` began with {began} and goes on so; its model's files now say: {now}",
                job.name
            )
        });
        job.generate = record.generate;
        Ok(Sampling {
            line: job.generate.sampling_line(),
            warnings: warnings.into_iter().collect(),
        })
    }
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
            "`do_sample` in {file} is false and has no say: the temperature is {}; `generate.sampling.temperature: 0` is greedy",
            generate.sampling.temperature
        ));
    }
    if generate.is_of_model("repetition_penalty")
        && generate.sampling.repetition_penalty != 1.0
        && matches!(generate.shape, ShapeSpec::Choice { .. })
    {
        warnings.push(format!(
            "the repetition penalty of {file} makes choices less likely whose tokens stand in the prompt; \
             `generate.sampling.repetition_penalty: 1` turns it off"
        ));
    }
    warnings
}
