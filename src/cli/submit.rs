//! `gristmill submit`: plans a job, writes its ledger and enqueues its shards. A second submit
//! enqueues the unfinished shards.

use std::sync::Arc;

use anyhow::anyhow;
use serde_json::{Value, json};

use crate::cli::args::{SubmitArgs, shell_word};
use crate::cli::enqueue::{Sent, Target};
use crate::cli::exit::{Exit, Failure};
use crate::cli::inputs;
use crate::cli::limits::{follow_file, what_to_raise};
use crate::cli::on_finish;
use crate::cli::output::open_ledger;
use crate::cli::plan::{check_any, none_to_ask, read_all};
use crate::cli::prepare::PreparedJob;
use crate::dataset::plan::planner::InputPlan;
use crate::job::Job;
use crate::ledger::{Ledger, LedgerError, StopWhy};
use crate::report::summary::{RowCounts, counted, number};
use crate::worker::access::Access;
use crate::worker::model::Stream;

/// Maximum number of input prefixes in the suggested next command.
const PREFIXES_SHOWN: usize = 4;

/// A job whose ledger is written.
struct Written {
    ledger: Ledger,
    /// Whether it was written before.
    resumed: bool,
}

/// Why there is nothing to enqueue.
enum Ended {
    Finished(Exit),
    Stopped(StopWhy),
}

pub(super) async fn submit(args: SubmitArgs) -> Result<Exit, Failure> {
    let mut prepared = PreparedJob::prepare(&args.job, args.limit.limit, || args.device.of_others()).await?;
    let target = target(&args, &prepared.job)?;
    let begun = open_ledger(&prepared.output).await.map_err(refusal)?;
    prepared.settle(begun.as_ref())?;
    prepared.check_shape()?;
    // An unreachable broker must be noticed before anything is written.
    let enqueuer = match &target {
        Some(target) => Some(target.connect().await?),
        None => None,
    };
    let written = write(&prepared, begun, args.preflight).await?;
    prepared.warn();
    let ledger = &written.ledger;
    on_finish::warn_submitted(&prepared, ledger);
    if let Some(ended) = ended(ledger, &prepared).await? {
        return said(&args, &written, ended).await;
    }
    if written.resumed
        && let Some(line) = inputs::left_out(ledger).await
    {
        eprintln!("gristmill: warning: {line}");
    }
    let shards = if written.resumed {
        ledger.unfinished().await?
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
fn target(args: &SubmitArgs, job: &Job) -> Result<Option<Target>, Failure> {
    if args.no_enqueue {
        return Ok(None);
    }
    let target = Target::find(&args.queue, job.queue.as_ref())?;
    match target {
        Some(target) => Ok(Some(target)),
        None => Err(Failure::bad_job(anyhow!(
            "no queue: give `--queue URL` or `queue.url` in the job file, or `--no-enqueue` to write the ledger only"
        ))),
    }
}

/// The job's ledger, new or existing.
async fn write(prepared: &PreparedJob, begun: Option<Ledger>, preflight: bool) -> Result<Written, Failure> {
    let identity = prepared.identity()?;
    if let Some(ledger) = begun {
        prepared.check_same(&ledger, &identity).map_err(refusal)?;
        return Ok(Written { ledger, resumed: true });
    }
    let mut plan = prepared.plan().await?;
    if preflight {
        look_at_rows(prepared, &plan).await?
    } else {
        check_any(prepared, &plan).await?
    }
    prepared.hash_inputs(&mut plan).await?;
    let draft = prepared.draft(plan, identity)?;
    let (ledger, resumed) = Ledger::create_or_resume(&prepared.output, draft)
        .await
        .map_err(refusal)?;
    Ok(Written { ledger, resumed })
}

/// The exit code for a ledger's error. A conflict (the output belongs to something else, or the job
/// has changed) is the caller's error; other errors are failures.
fn refusal(error: LedgerError) -> Failure {
    match error {
        LedgerError::Conflict { .. } => Failure::bad_job(error),
        _ => Failure::from(error),
    }
}

/// Reads every row, and reports the expected work.
async fn look_at_rows(prepared: &PreparedJob, plan: &InputPlan) -> Result<(), Failure> {
    let renderer = Arc::new(prepared.renderer(&Stream::now())?);
    let seen = read_all(&renderer, plan, 0).await?;
    if let Some(failure) = none_to_ask(prepared, &seen) {
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

/// Whether the job has ended; a job that reached its budget or deadline continues if the job file
/// now allows more.
async fn ended(ledger: &Ledger, prepared: &PreparedJob) -> Result<Option<Ended>, Failure> {
    if let Some(success) = ledger.finish_check(None).await? {
        inputs::check_done(prepared, ledger).await?;
        let rows = RowCounts::of(success.rows, &success.tally);
        return Ok(Some(Ended::Finished(Exit::of_rows(&rows))));
    }
    let held = follow_file(ledger, &prepared.limits(), false).await?;
    Ok(held.map(|held| Ended::Stopped(held.why)))
}

/// Reports that there is nothing to enqueue, and why.
async fn said(args: &SubmitArgs, written: &Written, ended: Ended) -> Result<Exit, Failure> {
    let name = &written.ledger.job().name;
    let raise;
    let (exit, why) = match ended {
        Ended::Stopped(why @ (StopWhy::Budget | StopWhy::Deadline)) => {
            let line = what_to_raise(&written.ledger, why).await?;
            raise = format!("is stopped, {line} and submit again, or use `gristmill extend`");
            (Exit::Stopped, raise.as_str())
        }
        Ended::Finished(exit) => (exit, "is already done: nothing to enqueue"),
        Ended::Stopped(StopWhy::InputChanged) => (
            Exit::BadJob,
            "is stopped, since an input is not what it was: restore it and submit again",
        ),
        Ended::Stopped(StopWhy::Cancelled) => (
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

fn as_json(written: &Written, shards: usize, sent: Option<&Sent>) -> Value {
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
        "queue": sent.map(Sent::json),
    })
}

/// The option that a worker needs to read `inputs`: by default, a worker reads inputs of queued
/// jobs only where their output is stored.
fn accepting<'a>(prepared: &PreparedJob, inputs: impl IntoIterator<Item = &'a str>) -> String {
    let prefixes = Access::default().to_accept(&prepared.output, inputs);
    if prefixes.is_empty() {
        return String::new();
    }
    let named: Vec<&str> = prefixes.iter().map(String::as_str).take(PREFIXES_SHOWN).collect();
    let option = format!(" --accept-inputs {}", shell_word(&named.join(",")));
    match prefixes.len() - named.len() {
        0 => option,
        more => format!("{option} (and {more} more places of inputs)"),
    }
}

fn show(args: &SubmitArgs, prepared: &PreparedJob, written: &Written, shards: usize, sent: Option<&Sent>) {
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
                accepting(prepared, job.inputs.iter().map(|input| input.url.as_str())),
                on_finish::accepting(&written.ledger)
            );
            println!("            gristmill watch {}", shell_word(output.as_str()));
        }
        None => {
            println!(
                "next        gristmill reconcile {} --queue URL",
                shell_word(output.as_str())
            );
            println!("            or, on this machine: gristmill run {}", args.job.again());
        }
    }
}
