//! `gristmill retry`: the failed rows of a finished job once more, as its next generation.

use anyhow::anyhow;
use serde_json::json;

use crate::cli::args::RetryArgs;
use crate::cli::door::ledger_at;
use crate::cli::enqueue::{Sent, Target};
use crate::cli::exit::{Exit, Failure};
use crate::cli::extend::Used;
use crate::ledger::{Ledger, Tally};
use crate::report::summary::number;

/// The generation that a retry works on.
struct Generation {
    ledger: Ledger,
    /// The failed rows as they stood before, where they were counted just now.
    failed: Option<Tally>,
    shards: Vec<u32>,
    /// It was made before, and is not finished yet.
    resumed: bool,
}

pub async fn retry(args: RetryArgs) -> Result<Exit, Failure> {
    let target = Target::find(&args.queue, None)?;
    let ledger = ledger_at(&args.output).await?;
    let Some(generation) = next(&ledger).await? else {
        if args.json {
            println!("{}", as_json(&ledger, None, None));
        } else {
            println!("job `{}` has no failed rows: nothing to retry", ledger.job().name);
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

/// Makes the next generation, or finds the one that is under way; `None` where no row has failed.
async fn next(ledger: &Ledger) -> Result<Option<Generation>, Failure> {
    let Some(success) = ledger.finish_check(None).await? else {
        if ledger.generation() == 0 {
            return Err(Failure::bad_job(anyhow!(
                "job `{}` is not finished: `retry` is for the failed rows of a finished job; `gristmill status {}` says what \
                 is left",
                ledger.job().name,
                ledger.store().url()
            )));
        }
        return Ok(Some(Generation {
            failed: None,
            shards: ledger.uncommitted().await?,
            ledger: ledger.clone(),
            resumed: true,
        }));
    };
    let Some(next) = ledger.retry().await? else {
        return Ok(None);
    };
    warn_of_limits(&next).await?;
    Ok(Some(Generation {
        failed: Some(success.tally),
        shards: next.shard_numbers(),
        ledger: next,
        resumed: false,
    }))
}

/// A stop of the generation before does not hold this one, but a limit that is reached stops its workers anew.
async fn warn_of_limits(ledger: &Ledger) -> Result<(), Failure> {
    let terms = ledger.terms(&ledger.control().await?);
    if Used::of(ledger).await?.reached(&terms).is_some() {
        eprintln!(
            "gristmill: budget or deadline of job `{}` is reached: `gristmill extend {}` first, or its workers stop again",
            ledger.job().name,
            ledger.store().url()
        );
    }
    Ok(())
}

/// Failed rows by status.
fn failed(tally: &Tally) -> [(&'static str, u64); 4] {
    [
        ("invalid_output", tally.invalid_output),
        ("errored", tally.errored),
        ("expired", tally.expired),
        ("cancelled", tally.cancelled),
    ]
}

fn as_json(ledger: &Ledger, generation: Option<&Generation>, sent: Option<&Sent>) -> serde_json::Value {
    let counts = generation.and_then(|g| g.failed.as_ref()).map(failed);
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
        "shards": generation.map_or(0, |g| g.shards.len()),
        "queue": sent.map(Sent::json),
    })
}

fn show(generation: &Generation, sent: Option<&Sent>) {
    let Generation {
        ledger,
        failed: tally,
        shards,
        resumed: _,
    } = generation;
    let output = ledger.store().url();
    println!("job         {}, generation {}", ledger.job().name, ledger.generation());
    match tally {
        None => println!(
            "resumed     this retry is under way; {} of its shards are not done",
            number(shards.len() as u64)
        ),
        Some(tally) => {
            let counts: Vec<String> = failed(tally)
                .into_iter()
                .filter(|(_, count)| *count > 0)
                .map(|(word, count)| format!("{} {word}", number(count)))
                .collect();
            println!("rows        {}", counts.join(", "));
            println!("shards      {}", number(shards.len() as u64));
        }
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
