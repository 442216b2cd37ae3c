//! `gristmill submit`: plans a job, writes its ledger and enqueues its shards. A second submit
//! enqueues the unfinished shards.

use std::sync::Arc;

use anyhow::anyhow;
use serde_json::{Value, json};

use crate::cli::args::{SubmitArgs, shell_word};
use crate::cli::enqueue::{Enqueued, QueueTarget};
use crate::cli::exit::{Exit, Failure};
use crate::cli::inputs;
use crate::cli::limits::{apply_job_file, reached_line_with_advice};
use crate::cli::on_finish;
use crate::cli::output::open_ledger;
use crate::cli::plan::{check_any_row, no_usable_row, read_all};
use crate::cli::prepare::PreparedJob;
use crate::dataset::plan::planner::InputPlan;
use crate::job::Job;
use crate::ledger::{Ledger, LedgerError, StopWhy};
use crate::report::summary::{RowCounts, counted, number};
use crate::worker::access::Access;
use crate::worker::model::PromptSettings;

/// Maximum number of input prefixes that the suggested worker command names.
const PREFIXES_SHOWN_MAX: usize = 4;

/// A job whose ledger exists.
struct WrittenJob {
    ledger: Ledger,
    /// Whether an earlier command had written it.
    resumed: bool,
}

/// Why there is nothing to enqueue.
enum EndedJob {
    Finished(Exit),
    Stopped(StopWhy),
}

pub(super) async fn submit(args: SubmitArgs) -> Result<Exit, Failure> {
    let mut prepared = PreparedJob::prepare(&args.job, args.limit.limit, || args.device.resolve_for_workers()).await?;
    let target = target(&args, &prepared.job)?;
    let begun = open_ledger(&prepared.output).await.map_err(ledger_failure)?;
    prepared.resolve_settings(begun.as_ref())?;
    prepared.check_constraint()?;
    // An unreachable broker must be noticed before anything is written.
    let enqueuer = match &target {
        Some(target) => Some(target.connect().await?),
        None => None,
    };
    let written = write_ledger(&prepared, begun, args.preflight).await?;
    prepared.warn();
    let ledger = &written.ledger;
    on_finish::warn_submitted(&prepared, ledger);
    if let Some(ended) = ended_job(ledger, &prepared).await? {
        return report_ended_job(&args, &written, ended).await;
    }
    if written.resumed
        && let Some(line) = inputs::skipped_files_note(ledger).await
    {
        eprintln!("gristmill: warning: {line}");
    }
    let shards = if written.resumed {
        ledger.unfinished_shards().await?
    } else {
        ledger.shard_numbers()
    };
    let sent = match &enqueuer {
        Some(enqueuer) => Some(enqueuer.send(ledger, &shards).await.map_err(|failure| {
            failure.context(format!(
                "job `{}` is written to `{}` but not enqueued; submit it again",
                prepared.job.name, prepared.output.url
            ))
        })?),
        None => None,
    };
    if args.json {
        println!("{}", as_json(&written, shards.len(), sent.as_ref()));
    } else {
        show(&args, &prepared, &written, shards.len(), sent.as_ref());
    }
    Ok(Exit::Done)
}

/// The queue; one must be named unless `--no-enqueue` is given.
fn target(args: &SubmitArgs, job: &Job) -> Result<Option<QueueTarget>, Failure> {
    if args.no_enqueue {
        return Ok(None);
    }
    let target = QueueTarget::find(&args.queue, job.queue.as_ref())?;
    match target {
        Some(target) => Ok(Some(target)),
        None => Err(Failure::bad_job(anyhow!(
            "no queue: give `--queue URL` or `queue.url` in the job file, or `--no-enqueue` to write the ledger only"
        ))),
    }
}

/// The job's ledger, new or existing.
async fn write_ledger(prepared: &PreparedJob, begun: Option<Ledger>, preflight: bool) -> Result<WrittenJob, Failure> {
    let identity = prepared.identity()?;
    if let Some(ledger) = begun {
        prepared.check_same_job(&ledger, &identity).map_err(ledger_failure)?;
        return Ok(WrittenJob { ledger, resumed: true });
    }
    let mut plan = prepared.plan().await?;
    if preflight {
        preflight_rows(prepared, &plan).await?
    } else {
        check_any_row(prepared, &plan).await?
    }
    prepared.hash_inputs(&mut plan).await?;
    let draft = prepared.draft(plan, identity)?;
    let (ledger, resumed) = Ledger::create_or_resume(&prepared.output, draft)
        .await
        .map_err(ledger_failure)?;
    Ok(WrittenJob { ledger, resumed })
}

/// The exit code for a ledger's error. A conflict (the output belongs to something else, or the job
/// has changed) is the caller's error; other errors are failures.
fn ledger_failure(error: LedgerError) -> Failure {
    match error {
        LedgerError::Conflict { .. } => Failure::bad_job(error),
        _ => Failure::from(error),
    }
}

/// Reads every row, and reports the expected work.
async fn preflight_rows(prepared: &PreparedJob, plan: &InputPlan) -> Result<(), Failure> {
    let renderer = Arc::new(prepared.renderer(&PromptSettings::now())?);
    let seen = read_all(&renderer, plan, 0).await?;
    if let Some(failure) = no_usable_row(prepared, &seen) {
        return Err(failure);
    }
    eprintln!(
        "preflight: {}, {} of them broken, {}",
        counted(seen.rows, "row"),
        number(seen.broken_rows),
        counted(seen.prompt_tokens, "prompt token")
    );
    for (row, why) in &seen.broken {
        eprintln!("preflight: row {row}: {why}");
    }
    Ok(())
}

/// How the job has ended; `None` if it has not. A job that reached its budget or deadline continues
/// if the job file now allows more.
async fn ended_job(ledger: &Ledger, prepared: &PreparedJob) -> Result<Option<EndedJob>, Failure> {
    if let Some(success) = ledger.finish_check(None).await? {
        inputs::check_inputs_unchanged(prepared, ledger).await?;
        let rows = RowCounts::of(success.rows, &success.tally);
        return Ok(Some(EndedJob::Finished(Exit::of_rows(&rows))));
    }
    let active_stop = apply_job_file(ledger, &prepared.limits(), false).await?;
    Ok(active_stop.map(|active_stop| EndedJob::Stopped(active_stop.why)))
}

/// Reports that there is nothing to enqueue, and why.
async fn report_ended_job(args: &SubmitArgs, written: &WrittenJob, ended: EndedJob) -> Result<Exit, Failure> {
    let name = &written.ledger.job().name;
    let limit_text;
    let (exit, why) = match ended {
        EndedJob::Stopped(why @ (StopWhy::Budget | StopWhy::Deadline)) => {
            let line = reached_line_with_advice(&written.ledger, why).await?;
            limit_text = format!("is stopped, {line} and submit again, or use `gristmill extend`");
            (Exit::Stopped, limit_text.as_str())
        }
        EndedJob::Finished(exit) => (exit, "is already done: nothing to enqueue"),
        EndedJob::Stopped(StopWhy::InputChanged) => (
            Exit::BadJob,
            "is stopped, since an input is not what it was: restore it and submit again",
        ),
        EndedJob::Stopped(StopWhy::Cancelled) => (
            Exit::Cancelled,
            "was cancelled: for another try, choose another `output.uri`",
        ),
    };
    eprintln!("gristmill: job `{name}` {why}");
    if args.json {
        println!("{}", as_json(written, 0, None));
    }
    Ok(exit)
}

fn as_json(written: &WrittenJob, shards: usize, sent: Option<&Enqueued>) -> Value {
    let job = written.ledger.job();
    json!({
        "job": job.name,
        "id": job.job,
        "output": written.ledger.store().url().as_str(),
        "rows": job.rows(),
        "inputs": job.inputs.len(),
        "shards": job.shards.len(),
        "generation": written.ledger.generation(),
        "resumed": written.resumed,
        "uncommitted": shards,
        "queue": sent.map(Enqueued::json),
    })
}

/// The option that permits a worker to read `inputs`: by default, a worker reads inputs of queued
/// jobs only from the bucket of their output.
fn accept_inputs_option<'a>(prepared: &PreparedJob, inputs: impl IntoIterator<Item = &'a str>) -> String {
    let prefixes = Access::default().prefixes_to_accept(&prepared.output, inputs);
    if prefixes.is_empty() {
        return String::new();
    }
    let shown: Vec<&str> = prefixes.iter().map(String::as_str).take(PREFIXES_SHOWN_MAX).collect();
    let option = format!(" --accept-inputs {}", shell_word(&shown.join(",")));
    match prefixes.len() - shown.len() {
        0 => option,
        unnamed => format!("{option} (and {unnamed} more places of inputs)"),
    }
}

fn show(args: &SubmitArgs, prepared: &PreparedJob, written: &WrittenJob, shards: usize, sent: Option<&Enqueued>) {
    let (job, output) = (written.ledger.job(), written.ledger.store().url());
    println!("job         {} ({})", job.name, job.job);
    println!(
        "rows        {} in {}, from {}",
        number(job.rows()),
        counted(job.shards.len() as u64, "shard"),
        counted(job.inputs.len() as u64, "file")
    );
    if let Some(line) = &prepared.sampling.line {
        println!("sampling    {line}");
    }
    if let Some(line) = prepared.thinking_line() {
        println!("thinking    {line}");
    }
    for line in prepared.untyped_lines() {
        println!("parsed      {line}");
    }
    println!("output      {output}");
    if written.resumed {
        println!(
            "resumed     this job was submitted before; {} of its shards are not done",
            number(shards as u64)
        );
    }
    match sent {
        Some(sent) => {
            println!("enqueued    {}", sent.line());
            println!(
                "next        gristmill worker --queue {}{}{}",
                shell_word(&sent.url.to_string()),
                accept_inputs_option(prepared, job.inputs.iter().map(|input| input.url.as_str())),
                on_finish::accept_option(&written.ledger)
            );
            println!("            gristmill watch {}", shell_word(output.as_str()));
        }
        None => {
            println!(
                "next        gristmill reconcile {} --queue URL",
                shell_word(output.as_str())
            );
            println!(
                "            or, on this machine: gristmill run {}",
                args.job.shell_arguments()
            );
        }
    }
}
