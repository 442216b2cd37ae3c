//! `gristmill retry`: runs the failed or truncated rows of a finished job again, as its next
//! generation.

use anyhow::anyhow;
use serde_json::json;

use crate::cli::args::{RetryArgs, shell_word};
use crate::cli::enqueue::{Enqueued, QueueTarget};
use crate::cli::exit::{Exit, Failure};
use crate::cli::limits::LimitUse;
use crate::cli::output::own_ledger_at;
use crate::job::Job;
use crate::job::spec::PromptKind;
use crate::ledger::keys::JOB;
use crate::ledger::{Ledger, LedgerError, Tally};
use crate::report::summary::number;

/// The generation that a retry has created or resumed.
pub(super) struct RetryGeneration {
    ledger: Ledger,
    /// Its rows, counted by the status that they had before.
    rows: Tally,
    shards: Vec<u32>,
    /// Whether it had been created by an earlier `retry` and is unfinished.
    resumed: bool,
}

pub(super) async fn retry(args: RetryArgs) -> Result<Exit, Failure> {
    if let Some(why) = option_error(&args) {
        return Err(Failure::bad_job(anyhow!(why)));
    }
    let target = QueueTarget::find(&args.queue, None)?;
    let ledger = own_ledger_at(&args.output).await?;
    let Some(generation) = next_generation(&ledger, args.max_tokens).await? else {
        if args.json {
            println!("{}", as_json(&ledger, None, None));
        } else {
            let which = if args.truncated { "truncated" } else { "failed" };
            println!("job `{}` has no {which} rows: nothing to retry", ledger.job().name);
        }
        return Ok(Exit::Done);
    };
    let sent = match &target {
        Some(target) => {
            let enqueuer = target.connect().await?;
            Some(enqueuer.send(&generation.ledger, &generation.shards).await?)
        }
        None => None,
    };
    if args.json {
        println!("{}", as_json(&generation.ledger, Some(&generation), sent.as_ref()));
    } else {
        show(&generation, sent.as_ref());
    }
    Ok(Exit::Done)
}

/// The error if only one of `--truncated` and `--max-tokens` is given.
fn option_error(args: &RetryArgs) -> Option<&'static str> {
    match (args.truncated, args.max_tokens) {
        (true, None) => Some(
            "`--truncated` needs `--max-tokens N`, more tokens for each answer than it had: the same limit would cut it off again",
        ),
        (false, Some(_)) => Some("`--max-tokens` is for rows that were cut off: give `--truncated` as well"),
        _ => None,
    }
}

/// Checks that `max_tokens` exceeds the job's own limit and that of an earlier retry.
fn check_max_tokens(ledger: &Ledger, max_tokens: u32) -> anyhow::Result<()> {
    let job = Job::from_record(&ledger.job().resolved, &ledger.store().address(JOB))?;
    // A line of an OpenAI batch may have a smaller limit than the job's default.
    let job_max_tokens = match job.prompt.kind {
        PromptKind::Openai => 1,
        _ => job.generate.max_tokens,
    };
    let earlier_max_tokens = ledger.max_tokens().unwrap_or(0).max(job_max_tokens);
    if max_tokens <= earlier_max_tokens {
        return Err(anyhow!(
            "job `{}`: its rows were generated with `max_tokens` {}, which would cut them off again: give a larger `--max-tokens`",
            ledger.job().name,
            number(earlier_max_tokens.into())
        ));
    }
    match job.context {
        Some(context) if max_tokens >= context => Err(anyhow!(
            "job `{}`: `--max-tokens {max_tokens}` leaves no room for a prompt in its `context` of {} tokens",
            ledger.job().name,
            number(context.into())
        )),
        _ => Ok(()),
    }
}

/// Creates the next generation, or finds the one in progress; `None` if there are no rows to retry.
/// With `max_tokens`, truncated rows are retried instead of failed ones.
pub(super) async fn next_generation(
    ledger: &Ledger,
    max_tokens: Option<u32>,
) -> Result<Option<RetryGeneration>, Failure> {
    if ledger.finish_check(None).await?.is_none() {
        if ledger.generation() == 0 {
            return Err(Failure::bad_job(anyhow!(
                "job `{}` is not finished: `retry` is for the failed rows of a finished job; `gristmill status {}` says what \
                 is left",
                ledger.job().name,
                shell_word(ledger.store().url().as_str())
            )));
        }
        if max_tokens.is_some() && ledger.raised_max_tokens() != max_tokens {
            return Err(Failure::bad_job(anyhow!(
                "job `{}`: retry {} has not finished, and it retries other rows or uses another `max_tokens`: finish it first",
                ledger.job().name,
                ledger.generation()
            )));
        }
        return Ok(Some(RetryGeneration {
            rows: ledger.retried_tally(),
            shards: ledger.unfinished_shards().await?,
            ledger: ledger.clone(),
            resumed: true,
        }));
    }
    let next = match max_tokens {
        Some(max_tokens) => {
            check_max_tokens(ledger, max_tokens).map_err(Failure::bad_job)?;
            ledger.retry_truncated(max_tokens).await
        }
        None => ledger.retry().await,
    };
    let next = next.map_err(|error| match error {
        LedgerError::Conflict { .. } => Failure::bad_job(error),
        _ => Failure::from(error),
    })?;
    let Some(next) = next else {
        return Ok(None);
    };
    warn_of_limits(&next).await?;
    Ok(Some(RetryGeneration {
        rows: next.retried_tally(),
        shards: next.shard_numbers(),
        ledger: next,
        resumed: false,
    }))
}

/// Warns if the budget or deadline is already reached: the new generation ignores earlier stop
/// records, but its workers would stop at once.
async fn warn_of_limits(ledger: &Ledger) -> Result<(), Failure> {
    let limits = ledger.limits(&ledger.control().await?);
    if LimitUse::of(ledger).await?.reached_limit(&limits).is_some() {
        eprintln!(
            "gristmill: budget or deadline of job `{}` is reached: `gristmill extend {}` first, or its workers stop again",
            ledger.job().name,
            shell_word(ledger.store().url().as_str())
        );
    }
    Ok(())
}

/// Rows by status; succeeded rows are included if they were truncated.
fn by_status(tally: &Tally) -> [(&'static str, u64); 5] {
    [
        ("succeeded", tally.succeeded),
        ("invalid_output", tally.invalid_output),
        ("errored", tally.errored),
        ("expired", tally.expired),
        ("cancelled", tally.cancelled),
    ]
}

fn as_json(ledger: &Ledger, generation: Option<&RetryGeneration>, sent: Option<&Enqueued>) -> serde_json::Value {
    let counts = generation.map(|g| by_status(&g.rows));
    let rows: serde_json::Map<String, serde_json::Value> = counts
        .into_iter()
        .flatten()
        .map(|(word, count)| (word.to_string(), count.into()))
        .collect();
    json!({
        "job": ledger.job().name,
        "id": ledger.job().job,
        "output": ledger.store().url().as_str(),
        "generation": ledger.generation(),
        "resumed": generation.is_some_and(|g| g.resumed),
        "rows": rows,
        "max_tokens": ledger.max_tokens(),
        "shards": generation.map_or(0, |g| g.shards.len()),
        "queue": sent.map(Enqueued::json),
    })
}

fn show(generation: &RetryGeneration, sent: Option<&Enqueued>) {
    let RetryGeneration {
        ledger,
        rows,
        shards,
        resumed,
    } = generation;
    let output = shell_word(ledger.store().url().as_str());
    println!("job         {}, generation {}", ledger.job().name, ledger.generation());
    let counts: Vec<String> = by_status(rows)
        .into_iter()
        .filter(|(_, count)| *count > 0)
        .map(|(word, count)| format!("{} {word}", number(count)))
        .collect();
    println!("rows        {}", counts.join(", "));
    if let Some(max_tokens) = ledger.max_tokens() {
        println!("max_tokens  {} at least", number(max_tokens.into()));
    }
    match resumed {
        true => println!(
            "resumed     this retry is under way; {} of its shards are not done",
            number(shards.len() as u64)
        ),
        false => println!("shards      {}", number(shards.len() as u64)),
    }
    match sent {
        Some(sent) => {
            println!("enqueued    {}", sent.line());
            println!("next        gristmill watch {output}");
        }
        None => {
            println!("next        gristmill retry {output} --queue URL");
            println!("            or, on this machine: gristmill run JOB.yaml");
        }
    }
}
