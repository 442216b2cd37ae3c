//! `gristmill doctor JOB.yaml`: checks a job's model, store and queue before the job is begun. Uses
//! no GPU, reads no rows, and creates neither job nor topic.

use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::json;

use crate::cli::args::{DoctorArgs, JobArgs};
use crate::cli::device_choice::ResolvedDevice;
use crate::cli::enqueue::{QueueTarget, capacity_text};
use crate::cli::exit::{Exit, Failure, one_line};
use crate::cli::output::output_of;
use crate::cli::prepare::PreparedJob;
use crate::cli::same_job::check_empty;
use crate::dataset::store::clients::redacted;
use crate::dataset::store::location::Location;
use crate::job::{Job, Parameters};
use crate::ledger::keys::TMP;
use crate::ledger::{Ledger, Store};
use crate::report::summary::number;

/// A check and its result.
#[derive(Debug, Serialize)]
struct Check {
    what: &'static str,
    right: bool,
    /// What was found, or why the check failed.
    said: String,
}

pub(super) async fn checkup(args: &DoctorArgs, path: &Path) -> Result<Exit, Failure> {
    let job_args = JobArgs {
        path: path.to_path_buf(),
        set: args.set.clone(),
    };
    let parameters = Parameters::new(&job_args.set).map_err(|why| Failure::bad_job(anyhow::anyhow!(why)))?;
    let job = Job::load(path, &parameters).map_err(Failure::bad_job)?;
    let mut checks = Vec::new();
    let begun = begun_ledger(&job).await;
    let (model, prepared) = check_model(&job_args, begun.as_ref().ok().and_then(Option::as_ref)).await;
    for check in [
        model,
        check_store(&job, begun, prepared.as_ref()).await,
        check_queue(args, &job).await,
    ] {
        if !args.json {
            println!("{}", check.line());
        }
        checks.push(check);
    }
    let right = checks.iter().all(|check| check.right);
    if args.json {
        println!("{}", json!({"job": job.name, "checks": checks, "right": right}));
    }
    Ok(if right { Exit::Done } else { Exit::Failure })
}

impl Check {
    fn of(what: &'static str, found: Result<String, Failure>) -> Check {
        let right = found.is_ok();
        let said = found.unwrap_or_else(|failure| one_line(&failure.error));
        Check { what, right, said }
    }

    fn line(&self) -> String {
        let word = if self.right { "right" } else { "WRONG" };
        format!("{:<11} {word}  {}", self.what, self.said)
    }
}

/// The ledger in the job's output, if any.
async fn begun_ledger(job: &Job) -> Result<Option<Ledger>, Failure> {
    Ok(Ledger::open(&output_of(job)?).await?)
}

/// Checks config, tokenizer, templates, weight headers, and whether the answers' output constraint
/// is possible. Returns the job, too, if they are right.
async fn check_model(args: &JobArgs, begun: Option<&Ledger>) -> (Check, Option<PreparedJob>) {
    let checked = async {
        // Any device will do, since it does not affect the check of the model's files.
        let mut prepared = PreparedJob::prepare(args, None, || Ok(ResolvedDevice::Cpu)).await?;
        prepared.resolve_settings(begun)?;
        prepared.check_constraint()?;
        prepared.warn();
        let context = prepared.model.context_tokens(&prepared.job).map_err(Failure::bad_job)?;
        Ok::<_, Failure>((prepared, context))
    };
    match checked.await {
        Err(failure) => (Check::of("model", Err(failure)), None),
        Ok((prepared, context)) => {
            let said = format!(
                "`{}`: config, tokenizer and weights fit; {} tokens of context",
                prepared.model.dir.display(),
                number(context.into())
            );
            (Check::of("model", Ok(said)), Some(prepared))
        }
    }
}

/// Checks that the store supports a job's writes, by the same trial writes as `run` and `submit` do
/// before they write a record, and that the output holds no other job.
async fn check_store(job: &Job, begun: Result<Option<Ledger>, Failure>, prepared: Option<&PreparedJob>) -> Check {
    let checked = async {
        let output = output_of(job)?;
        let url = redacted(&output.url);
        let begun = begun?;
        let missing = missing_folders(&output);
        let trial = Store::new(&output)?.check().await;
        for folder in missing {
            // `remove_dir` keeps a folder that is no longer empty.
            let _ = std::fs::remove_dir(folder);
        }
        trial?;
        if let Some(ledger) = begun {
            if let Some(prepared) = prepared {
                prepared.check_same_file(&ledger)?;
            }
            return Ok(format!(
                "`{url}`: conditional create and read work (tried below `_gristmill/tmp/`); it holds job `{}`, and only that job's file can continue it",
                ledger.job().name
            ));
        }
        check_empty(&output).await?;
        Ok(format!(
            "`{url}`: conditional create and read work (tried below `_gristmill/tmp/`)"
        ))
    };
    Check::of("store", checked.await)
}

/// Local folders that the trial writes will create and leave empty, innermost first.
fn missing_folders(output: &Location) -> Vec<PathBuf> {
    let innermost = output.local_path().map(|path| path.join(TMP)).unwrap_or_default();
    let missing = innermost.ancestors().take_while(|folder| !folder.exists());
    missing.map(Path::to_path_buf).collect()
}

/// Checks that the broker responds, and reports its topic or queue.
async fn check_queue(args: &DoctorArgs, job: &Job) -> Check {
    let checked = async {
        let Some(target) = QueueTarget::find(&args.queue, job.queue.as_ref())? else {
            return Ok("none is named; `gristmill run` needs none, `submit` and workers get `--queue URL`".to_string());
        };
        Ok(match target.probe().await? {
            Some(found) => format!("{} is there{}", target.url(), capacity_text(&found)),
            None => format!(
                "{} answers; the topic or queue is not there yet: `gristmill submit` makes it",
                target.url()
            ),
        })
    };
    Check::of("queue", checked.await)
}
