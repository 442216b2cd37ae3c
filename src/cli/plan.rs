//! `gristmill plan`: reads, renders and tokenizes every row, and reports the expected work of the
//! model.

use std::sync::Arc;

use anyhow::Context;
use futures::{StreamExt, TryStreamExt};
use rayon::prelude::*;
use serde_json::json;

use crate::cli::args::PlanArgs;
use crate::cli::device_choice::DeviceChoice;
use crate::cli::exit::{Exit, Failure, one_line};
use crate::cli::inputs;
use crate::cli::on_finish;
use crate::cli::output::{open_ledger, output_of};
use crate::cli::prepare::{PreparedJob, say_warnings, unread};
use crate::cli::trial;
use crate::dataset::DatasetError;
use crate::dataset::layout::SkippedFile;
use crate::dataset::plan::Shard;
use crate::dataset::plan::planner::InputPlan;
use crate::dataset::row::InputRow;
use crate::dataset::shard::ShardReader;
use crate::job::Renderer;
use crate::job::thinking::Thinks;
use crate::ledger::Ledger;
use crate::ledger::spend::dollars;
use crate::report::cost::show_dollars;
use crate::report::progress::show_duration;
use crate::report::summary::{counted, number, percent};
use crate::worker::model::Stream;
use crate::worker::preflight::{Preflight, Seen, SeenPrompt, Shown};

/// Shards in progress: one being rendered, one being read.
const SHARDS_AHEAD: usize = 2;
/// Rows of the trial that measures a job's speed.
const TRIAL_ROWS: u64 = 200;
/// Maximum number of skipped files that are named.
const SKIPPED_SHOWN: usize = 10;
/// Maximum width of a histogram bar, in characters.
const BAR_CHARS: u64 = 40;

pub(super) async fn plan(args: PlanArgs) -> Result<Exit, Failure> {
    if let Some(threads) = args.threads {
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build_global()
            .context("cannot start the threads")?;
    }
    let mut prepared = PreparedJob::prepare(&args.job, args.limit.limit, || DeviceChoice::Auto.resolve()).await?;
    let begun = open_ledger(&prepared.output).await?;
    prepared.settle(begun.as_ref())?;
    prepared.check_shape()?;
    let inputs = prepared.plan().await?;
    let (stream, has_begun) = prepared.stream(begun.as_ref());
    let renderer = Arc::new(prepared.renderer(&stream)?);
    let (refusals, stays_out) = match begun.as_ref().filter(|_| has_begun) {
        Some(ledger) => (refusals(ledger).await?, stays_out(ledger).await),
        None => (Vec::new(), None),
    };
    let preflight = read_all(&renderer, &inputs, args.preview).await?;
    let seconds = expected_seconds(&prepared, &preflight, args.tokens_per_second).await?;
    // Another machine may run the job, so this is only a warning.
    let misplaced = prepared.check_place().err().map(|why| one_line(&why));
    let no_command = on_finish::check_command(&prepared)
        .err()
        .map(|failure| one_line(&failure.error));
    prepared.warn();
    say_warnings(refusals.iter().chain(&misplaced).chain(&no_command).chain(&stays_out));
    if args.json {
        let mut json = as_json(&prepared, &inputs, &preflight, seconds.as_ref());
        json["changed_inputs"] = refusals.into();
        if let Some(warnings) = json["warnings"].as_array_mut() {
            warnings.extend(misplaced.into_iter().chain(no_command).chain(stays_out).map(Into::into));
        }
        println!("{json}");
    } else {
        show(&prepared, &inputs, &preflight, seconds.as_ref());
        if renderer.tells_time() && !has_begun && args.preview > 0 {
            println!("\nThe chat template tells the date: here it is today's, in the job that of its creation.");
        }
    }
    match none_to_ask(&prepared, &preflight) {
        Some(failure) => Err(failure),
        None => Ok(Exit::Done),
    }
}

/// Streams all rows through the renderer. At most two shards are in memory.
pub(super) async fn read_all(
    renderer: &Arc<Renderer>,
    inputs: &InputPlan,
    preview: usize,
) -> Result<Preflight, Failure> {
    let reader = reader(renderer, inputs);
    let mut preflight = Preflight::new(preview);
    let mut shards = futures::stream::iter(&inputs.shards)
        .map(|shard| {
            look_at(&reader, shard, renderer, |renderer, rows| {
                rows.par_iter().map(|row| see(renderer, row)).collect::<Vec<_>>()
            })
        })
        .buffered(SHARDS_AHEAD);
    while let Some(seen) = shards.try_next().await.map_err(unread)? {
        seen.into_iter().flatten().for_each(|row| preflight.add(row));
    }
    Ok(preflight)
}

/// Refuses a job if none of its rows can be rendered. Reads up to the shard of the first row that
/// can.
pub(super) async fn check_any(prepared: &PreparedJob, inputs: &InputPlan) -> Result<(), Failure> {
    let renderer = Arc::new(prepared.renderer(&Stream::now())?);
    let reader = reader(&renderer, inputs);
    let mut broken = Preflight::new(0);
    for shard in &inputs.shards {
        let seen = look_at(&reader, shard, &renderer, |renderer, rows| {
            let broken = rows.par_iter().map(|row| match see(renderer, row) {
                Seen { prompt: Ok(_), .. } => None,
                broken => Some(broken),
            });
            // Ends at the first row with a prompt.
            broken.collect::<Option<Vec<_>>>()
        });
        for seen in seen.await.map_err(unread)? {
            match seen {
                None => return Ok(()),
                Some(seen) => seen.into_iter().for_each(|row| broken.add(row)),
            }
        }
    }
    none_to_ask(prepared, &broken).map_or(Ok(()), Err)
}

/// A row's number and error. Errors of reading begin with the row's number within its file.
fn row_line(row: u64, why: &str) -> String {
    if why.starts_with(&format!("row {row} of ")) {
        why.to_string()
    } else {
        format!("row {row}: {why}")
    }
}

/// The failure if there are rows, but none of them can be rendered.
pub(super) fn none_to_ask(prepared: &PreparedJob, seen: &Preflight) -> Option<Failure> {
    let none = seen.rows > 0 && seen.broken_rows == seen.rows;
    none.then(|| {
        let why = seen
            .broken
            .first()
            .map(|(row, why)| format!(" ({})", row_line(*row, why)));
        Failure::bad_job(anyhow::anyhow!(
            "{}: {} be asked about{}; nothing was written",
            prepared.job.file,
            match seen.rows {
                1 => "the one row there is cannot".to_string(),
                rows => format!("none of the {} rows can", number(rows)),
            },
            why.unwrap_or_default()
        ))
    })
}

/// Changed inputs because of which `run` will refuse to continue a begun job, a line each.
async fn refusals(ledger: &Ledger) -> Result<Vec<String>, Failure> {
    if ledger.success().await?.is_some() {
        return Ok(Vec::new());
    }
    let found = inputs::differences(ledger).await?.into_iter().map(|error| match error {
        DatasetError::Store { .. } => Err(unread(error.into())),
        error => Ok(format!("`run` will not go on with this job: {error}")),
    });
    found.collect()
}

/// The note about a skipped file that has changed since. A begun job continues without its rows.
async fn stays_out(ledger: &Ledger) -> Option<String> {
    let which = inputs::mended(ledger).await?;
    Some(format!("{which}: the job has begun, and stays without its rows"))
}

fn reader(renderer: &Renderer, inputs: &InputPlan) -> ShardReader {
    let nothing = Arc::new(arrow::datatypes::Schema::empty());
    ShardReader::new(inputs.files.clone(), nothing, renderer.columns()).of_layout(inputs.layout.clone())
}

/// Reads a shard and processes its rows piece by piece, outside of the threads that read.
async fn look_at<T: Send + 'static>(
    reader: &ShardReader,
    shard: &Shard,
    renderer: &Arc<Renderer>,
    look: impl Fn(&Renderer, &[InputRow]) -> T + Clone + Send + 'static,
) -> anyhow::Result<Vec<T>> {
    let (mut pieces, mut seen) = (reader.pieces(shard, None)?, Vec::new());
    while let Some(piece) = pieces.next().await? {
        let (renderer, look) = (renderer.clone(), look.clone());
        let looked = tokio::task::spawn_blocking(move || look(&renderer, &piece.rows));
        seen.push(looked.await.context("rendering panicked")?);
    }
    Ok(seen)
}

fn see(renderer: &Renderer, row: &InputRow) -> Seen {
    let prompt = renderer
        .render(row)
        .map(|prompt| SeenPrompt::new(prompt.text, &prompt.tokens));
    Seen { row: row.row, prompt }
}

/// Expected device time of the job, and the basis of the estimate.
struct Expected {
    seconds: f64,
    basis: String,
}

/// Estimated from the given rate, or from the largest `run --limit` of this output.
async fn expected_seconds(
    prepared: &PreparedJob,
    preflight: &Preflight,
    tokens_per_second: Option<f64>,
) -> Result<Option<Expected>, Failure> {
    let rows = preflight.rows - preflight.broken_rows;
    if let Some(rate) = tokens_per_second.filter(|rate| *rate > 0.0) {
        let generate = &prepared.job.generate;
        let completion = rows * u64::from(generate.max_tokens) * u64::from(generate.n);
        let basis = format!("{rate} tokens/s and every completion of `max_tokens`");
        return Ok(Some(Expected {
            seconds: (preflight.prompt_tokens + completion) as f64 / rate,
            basis,
        }));
    }
    let mut best: Option<(u64, f64)> = None;
    for ledger in trial::all(&prepared.job, &output_of(&prepared.job)?).await? {
        if let Some(done) = ledger.success().await?
            && best.is_none_or(|(rows, _)| done.rows > rows)
            && done.rows > 0
        {
            best = Some((done.rows, done.seconds));
        }
    }
    Ok(best.map(|(tried, seconds)| Expected {
        seconds: seconds / tried as f64 * rows as f64,
        basis: format!("the run of the first {}", counted(tried, "row")),
    }))
}

fn as_json(
    prepared: &PreparedJob,
    inputs: &InputPlan,
    p: &Preflight,
    expected: Option<&Expected>,
) -> serde_json::Value {
    let seconds = expected.map(|e| e.seconds);
    json!({
        "job": prepared.job.name,
        "inputs": inputs.files.len(),
        "shards": inputs.shards.len(),
        "rows": p.rows,
        "broken_rows": p.broken_rows,
        "prompt_tokens": p.prompt_tokens,
        "shared_prefix_tokens": p.shared_tokens,
        "tokens_per_row": {"p50": p.quantile(0.5), "p90": p.quantile(0.9), "p99": p.quantile(0.99), "max": p.longest()},
        "histogram": p.histogram().iter().map(|(upper, rows)| json!({"tokens_max": upper, "rows": rows})).collect::<Vec<_>>(),
        "seconds": seconds,
        "sampling": prepared.job.generate.sampling_json(),
        "thinking": prepared.thinking.as_ref().map(Thinks::json),
        "parsed": prepared.parsed_json(),
        "skipped_inputs": inputs.layout.skipped.iter().map(SkippedFile::line).collect::<Vec<_>>(),
        "warnings": prepared.warnings().into_iter().chain(&inputs.notes).collect::<Vec<_>>(),
        "usd": seconds.and_then(|s| dollars(s, prepared.job.budget.usd_per_hour)),
        "preview": p.preview().into_iter().map(preview).collect::<Vec<_>>(),
    })
}

/// A prompt for the preview; a long prompt is cut.
fn preview((row, shown): &(u64, Shown)) -> serde_json::Value {
    json!({"row": row, "prompt_tokens": shown.tokens, "text": shown.text, "token_ids": shown.token_ids})
}

fn show(prepared: &PreparedJob, inputs: &InputPlan, p: &Preflight, expected: Option<&Expected>) {
    println!("job         {}", prepared.job.name);
    println!(
        "inputs      {}, {}",
        counted(inputs.files.len() as u64, "file"),
        counted(inputs.shards.len() as u64, "shard")
    );
    for skipped in inputs.layout.skipped.iter().take(SKIPPED_SHOWN) {
        println!("            left out: {}", skipped.line());
    }
    println!(
        "rows        {}, {} of them broken",
        number(p.rows),
        number(p.broken_rows)
    );
    for (row, why) in &p.broken {
        println!("            {}", row_line(*row, why));
    }
    println!(
        "prompts     {}, {} in prefixes that rows share",
        counted(p.prompt_tokens, "token"),
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
    if let Some(line) = &prepared.sampling.line {
        println!("sampling    {line}");
    }
    if let Some(line) = prepared.thinking_line() {
        println!("thinking    {line}");
    }
    for (at, line) in prepared.parsed_lines().iter().enumerate() {
        println!("{:<12}{line}", if at == 0 { "parsed" } else { "" });
    }
    match expected {
        None if p.rows <= TRIAL_ROWS => println!("time        unknown: give --tokens-per-second to have it estimated"),
        None => println!(
            "time        unknown: measure with `gristmill run {} --limit {TRIAL_ROWS}`, or give --tokens-per-second",
            prepared.args.again()
        ),
        Some(Expected { seconds, basis }) => {
            let usd = dollars(*seconds, prepared.job.budget.usd_per_hour);
            let usd = usd.map(|usd| format!(", {}", show_dollars(usd))).unwrap_or_default();
            println!(
                "time        {} of device time{usd}, from {basis}",
                show_duration(*seconds)
            );
        }
    }
    for (row, shown) in p.preview() {
        let cut = if shown.is_cut { ", cut" } else { "" };
        println!(
            "\n--- row {row}, {}{cut} ---\n{}",
            counted(shown.tokens as u64, "token"),
            shown.text
        );
    }
}
