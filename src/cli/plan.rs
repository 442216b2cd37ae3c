//! `gristmill plan`: reads, renders and tokenizes every row, and says what the job will ask of the model.

use std::sync::Arc;

use anyhow::Context;
use futures::{StreamExt, TryStreamExt};
use rayon::prelude::*;
use serde_json::json;

use crate::cli::args::PlanArgs;
use crate::cli::door::Opened;
use crate::cli::exit::{Exit, Failure};
use crate::cli::place::DeviceChoice;
use crate::dataset::planner::InputPlan;
use crate::dataset::shard::ShardReader;
use crate::job::Renderer;
use crate::ledger::Ledger;
use crate::report::cost::{dollars, show_dollars};
use crate::report::progress::show_duration;
use crate::report::summary::{number, percent};
use crate::worker::model::Stream;
use crate::worker::preflight::{Preflight, Seen, SeenPrompt};

/// Shards read and rendered at once: one on the cores, one being read.
const SHARDS_AHEAD: usize = 2;
/// Widest bar of the histogram, in characters.
const BAR_CHARS: u64 = 40;

pub async fn plan(args: PlanArgs) -> Result<Exit, Failure> {
    if let Some(threads) = args.threads {
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build_global()
            .context("cannot start the threads")?;
    }
    let opened = Opened::open(&args.job, args.limit.limit, || DeviceChoice::Auto.place())?;
    opened.check_shape()?;
    let inputs = opened.plan().await?;
    let preflight = read_all(&opened, &inputs, args.preview).await?;
    let seconds = expected_seconds(&opened, &preflight, args.tokens_per_second).await?;
    if args.json {
        println!("{}", as_json(&opened, &inputs, &preflight, seconds.as_ref()));
    } else {
        show(&opened, &inputs, &preflight, seconds.as_ref());
    }
    Ok(Exit::Done)
}

/// Streams all rows through the renderer. Two shards are in memory at a time, never the dataset.
pub async fn read_all(opened: &Opened, inputs: &InputPlan, preview: usize) -> Result<Preflight, Failure> {
    let renderer = Arc::new(opened.renderer(&Stream::UNKNOWN)?);
    let nothing = Arc::new(arrow::datatypes::Schema::empty());
    let reader = ShardReader::new(inputs.files.clone(), nothing, renderer.columns());
    let mut preflight = Preflight::new(preview);
    let mut shards = futures::stream::iter(&inputs.shards)
        .map(|shard| {
            let (reader, renderer) = (&reader, renderer.clone());
            async move {
                let rows = reader.read(shard).await?.rows;
                let seen = tokio::task::spawn_blocking(move || {
                    rows.par_iter().map(|row| see(&renderer, row)).collect::<Vec<_>>()
                });
                anyhow::Ok(seen.await.context("rendering panicked")?)
            }
        })
        .buffered(SHARDS_AHEAD);
    while let Some(seen) = shards.try_next().await.map_err(Failure::bad_job)? {
        seen.into_iter().for_each(|row| preflight.add(row));
    }
    Ok(preflight)
}

fn see(renderer: &Renderer, row: &crate::dataset::row::InputRow) -> Seen {
    let prompt = renderer
        .render(row)
        .map(|prompt| SeenPrompt::new(prompt.text, &prompt.tokens));
    Seen { row: row.row, prompt }
}

/// Device time that the job is expected to take, and what that rests on.
struct Expected {
    seconds: f64,
    basis: String,
}

/// From the given rate, or from the largest `run --limit` of this output.
async fn expected_seconds(
    opened: &Opened,
    preflight: &Preflight,
    tokens_per_second: Option<f64>,
) -> Result<Option<Expected>, Failure> {
    let rows = preflight.rows - preflight.broken_rows;
    if let Some(rate) = tokens_per_second.filter(|rate| *rate > 0.0) {
        let generate = &opened.job.generate;
        let completion = rows * u64::from(generate.max_tokens) * u64::from(generate.n);
        let basis = format!("{rate} tokens/s and every completion of `max_tokens`");
        return Ok(Some(Expected {
            seconds: (preflight.prompt_tokens + completion) as f64 / rate,
            basis,
        }));
    }
    let trials = opened.output.join("_limit");
    let mut best: Option<(u64, f64)> = None;
    let listed = match trials.store.list_with_delimiter(Some(&trials.path)).await {
        Ok(listed) => listed.common_prefixes,
        Err(object_store::Error::NotFound { .. }) => Vec::new(),
        Err(e) => {
            return Err(anyhow::Error::new(e)
                .context(format!("cannot list `{}`", trials.url))
                .into());
        }
    };
    for prefix in listed {
        let Some(name) = prefix.filename().filter(|name| name.ends_with(&opened.job.hash()[..8])) else {
            continue;
        };
        let Some(ledger) = Ledger::open(&trials.join(name)).await? else {
            continue;
        };
        if let Some(done) = ledger.success().await?
            && best.is_none_or(|(rows, _)| done.rows > rows)
            && done.rows > 0
        {
            best = Some((done.rows, done.seconds));
        }
    }
    Ok(best.map(|(tried, seconds)| Expected {
        seconds: seconds / tried as f64 * rows as f64,
        basis: format!("the run of the first {} rows", number(tried)),
    }))
}

fn as_json(opened: &Opened, inputs: &InputPlan, p: &Preflight, expected: Option<&Expected>) -> serde_json::Value {
    let seconds = expected.map(|e| e.seconds);
    json!({
        "job": opened.job.name,
        "inputs": inputs.files.len(),
        "shards": inputs.shards.len(),
        "rows": p.rows,
        "broken_rows": p.broken_rows,
        "prompt_tokens": p.prompt_tokens,
        "shared_prefix_tokens": p.shared_tokens,
        "tokens_per_row": {"p50": p.quantile(0.5), "p90": p.quantile(0.9), "p99": p.quantile(0.99), "max": p.longest()},
        "histogram": p.histogram().iter().map(|(upper, rows)| json!({"tokens_max": upper, "rows": rows})).collect::<Vec<_>>(),
        "seconds": seconds,
        "usd": seconds.and_then(|s| dollars(s, opened.job.budget.usd_per_hour)),
    })
}

fn show(opened: &Opened, inputs: &InputPlan, p: &Preflight, expected: Option<&Expected>) {
    println!("job         {}", opened.job.name);
    println!(
        "inputs      {} files, {} shards",
        number(inputs.files.len() as u64),
        number(inputs.shards.len() as u64)
    );
    println!(
        "rows        {}, {} of them broken",
        number(p.rows),
        number(p.broken_rows)
    );
    for (row, why) in &p.broken {
        println!("            row {row}: {why}");
    }
    println!(
        "prompts     {} tokens, {} in prefixes that rows share",
        number(p.prompt_tokens),
        percent(p.shared_tokens, p.prompt_tokens)
    );
    println!(
        "lengths     half of the rows up to {} tokens, 90 % up to {}, 99 % up to {}, the longest {}",
        p.quantile(0.5),
        p.quantile(0.9),
        p.quantile(0.99),
        p.longest()
    );
    let histogram = p.histogram();
    let most = histogram.iter().map(|b| b.1).max().unwrap_or(0).max(1);
    for (upper, rows) in histogram {
        let bar = "#".repeat((rows * BAR_CHARS).div_ceil(most) as usize);
        println!("            up to {upper:>7} tokens  {:>12}  {bar}", number(rows));
    }
    match expected {
        None => println!(
            "time        unknown: measure with `gristmill run {} --limit 200`, or give --tokens-per-second",
            opened.job.file
        ),
        Some(Expected { seconds, basis }) => {
            let usd = dollars(*seconds, opened.job.budget.usd_per_hour);
            let usd = usd.map(|usd| format!(", {}", show_dollars(usd))).unwrap_or_default();
            println!(
                "time        {} of device time{usd}, from {basis}",
                show_duration(*seconds)
            );
        }
    }
    for (row, text) in p.preview() {
        println!("\n--- row {row} ---\n{text}");
    }
}
