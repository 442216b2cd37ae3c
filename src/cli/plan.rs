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
use crate::cli::prepare::{PreparedJob, input_failure, print_warnings};
use crate::cli::trial;
use crate::dataset::DatasetError;
use crate::dataset::layout::SkippedFile;
use crate::dataset::plan::Shard;
use crate::dataset::plan::planner::InputPlan;
use crate::dataset::row::InputRow;
use crate::dataset::shard::ShardReader;
use crate::job::Renderer;
use crate::job::thinking::ModelThinking;
use crate::ledger::Ledger;
use crate::ledger::spend::dollars;
use crate::report::cost::show_dollars;
use crate::report::progress::show_duration;
use crate::report::summary::{counted, number, percent};
use crate::worker::model::PromptSettings;
use crate::worker::preflight::{Preflight, PreflightPrompt, PreflightRow, PromptPreview};

/// Shards in progress: one being rendered, one being read.
const SHARDS_AHEAD: usize = 2;
/// Rows of the trial that is suggested for measuring a job's speed.
const TRIAL_ROWS: u64 = 200;
/// Maximum number of skipped files that are named.
const SKIPPED_SHOWN_MAX: usize = 10;
/// Maximum width of a histogram bar, in characters.
const BAR_CHARS_MAX: u64 = 40;

pub(super) async fn plan(args: PlanArgs) -> Result<Exit, Failure> {
    if let Some(threads) = args.threads {
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build_global()
            .context("cannot start the threads")?;
    }
    let mut prepared = PreparedJob::prepare(&args.job, args.limit.limit, || DeviceChoice::Auto.resolve()).await?;
    let begun = open_ledger(&prepared.output).await?;
    prepared.resolve_settings(begun.as_ref())?;
    prepared.check_constraint()?;
    let inputs = prepared.plan().await?;
    let (stream, has_begun) = prepared.stream(begun.as_ref());
    let renderer = Arc::new(prepared.renderer(&stream)?);
    let refusal = prepared.output_refusal(begun.as_ref()).await?;
    let refusal = refusal.map(|why| format!("`run` will refuse this job: {why}"));
    let (changed_input_lines, skipped_file_note) = match begun.as_ref().filter(|_| has_begun) {
        Some(ledger) => (changed_input_lines(ledger).await?, skipped_file_note(ledger).await),
        None => (Vec::new(), None),
    };
    let preflight = read_all(&renderer, &inputs, args.preview).await?;
    let estimate = estimate_time(&prepared, &preflight, args.tokens_per_second).await?;
    // Another machine may run the job, so this is only a warning.
    let device_warning = prepared.check_device(None).err().map(|why| one_line(&why));
    let command_warning = on_finish::check_command(&prepared)
        .err()
        .map(|failure| one_line(&failure.error));
    prepared.warn();
    print_warnings(
        changed_input_lines
            .iter()
            .chain(&device_warning)
            .chain(&command_warning)
            .chain(&refusal)
            .chain(&skipped_file_note),
    );
    if args.json {
        let mut json = as_json(&prepared, &inputs, &preflight, estimate.as_ref());
        json["changed_inputs"] = changed_input_lines.into();
        if let Some(warnings) = json["warnings"].as_array_mut() {
            warnings.extend(
                device_warning
                    .into_iter()
                    .chain(command_warning)
                    .chain(refusal)
                    .chain(skipped_file_note)
                    .map(Into::into),
            );
        }
        println!("{json}");
    } else {
        show(&prepared, &inputs, &preflight, estimate.as_ref());
        if renderer.shows_date() && !has_begun && args.preview > 0 {
            println!(
                "\nThe chat template uses the date: this preview has today's date, the job will have the date of its creation."
            );
        }
    }
    match no_usable_row(&prepared, &preflight) {
        Some(failure) => Err(failure),
        None => Ok(Exit::Done),
    }
}

/// Renders all rows. At most two shards are in memory.
pub(super) async fn read_all(
    renderer: &Arc<Renderer>,
    inputs: &InputPlan,
    preview: usize,
) -> Result<Preflight, Failure> {
    let reader = reader(renderer, inputs);
    let mut preflight = Preflight::new(preview);
    let mut shards = futures::stream::iter(&inputs.shards)
        .map(|shard| {
            map_pieces(&reader, shard, renderer, |renderer, rows| {
                rows.par_iter().map(|row| render_row(renderer, row)).collect::<Vec<_>>()
            })
        })
        .buffered(SHARDS_AHEAD);
    while let Some(seen) = shards.try_next().await.map_err(input_failure)? {
        seen.into_iter().flatten().for_each(|row| preflight.add(row));
    }
    Ok(preflight)
}

/// Refuses a job if none of its rows can be rendered. Stops reading at the first row that can.
pub(super) async fn check_any_row(prepared: &PreparedJob, inputs: &InputPlan) -> Result<(), Failure> {
    let renderer = Arc::new(prepared.renderer(&PromptSettings::now())?);
    let reader = reader(&renderer, inputs);
    let mut broken = Preflight::new(0);
    for shard in &inputs.shards {
        let seen = map_pieces(&reader, shard, &renderer, |renderer, rows| {
            let broken = rows.par_iter().map(|row| match render_row(renderer, row) {
                PreflightRow { prompt: Ok(_), .. } => None,
                broken => Some(broken),
            });
            // Ends at the first row with a prompt.
            broken.collect::<Option<Vec<_>>>()
        });
        for seen in seen.await.map_err(input_failure)? {
            match seen {
                None => return Ok(()),
                Some(seen) => seen.into_iter().for_each(|row| broken.add(row)),
            }
        }
    }
    no_usable_row(prepared, &broken).map_or(Ok(()), Err)
}

/// A row's number and error. An error of reading already begins with the row's number within its
/// file, so it is returned unchanged.
fn row_line(row: u64, why: &str) -> String {
    if why.starts_with(&format!("row {row} of ")) {
        why.to_string()
    } else {
        format!("row {row}: {why}")
    }
}

/// The failure if there are rows, but none of them can be rendered.
pub(super) fn no_usable_row(prepared: &PreparedJob, seen: &Preflight) -> Option<Failure> {
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

/// For a begun, unfinished job: a line per changed input, because of which `run` would refuse to
/// continue.
async fn changed_input_lines(ledger: &Ledger) -> Result<Vec<String>, Failure> {
    if ledger.success().await?.is_some() {
        return Ok(Vec::new());
    }
    let found = inputs::changed_inputs(ledger)
        .await?
        .into_iter()
        .map(|error| match error {
            DatasetError::Store { .. } => Err(input_failure(error.into())),
            error => Ok(format!("`run` will not go on with this job: {error}")),
        });
    found.collect()
}

/// A note about a skipped file that has changed since the job was planned; the job continues
/// without its rows.
async fn skipped_file_note(ledger: &Ledger) -> Option<String> {
    let which = inputs::describe_changed_skipped_file(ledger).await?;
    Some(format!("{which}: the job has begun, and stays without its rows"))
}

fn reader(renderer: &Renderer, inputs: &InputPlan) -> ShardReader {
    let nothing = Arc::new(arrow::datatypes::Schema::empty());
    ShardReader::new(inputs.files.clone(), nothing, renderer.columns()).with_layout(inputs.layout.clone())
}

/// Reads a shard piece by piece, and calls `inspect` for the rows of each piece on a blocking
/// thread.
async fn map_pieces<T: Send + 'static>(
    reader: &ShardReader,
    shard: &Shard,
    renderer: &Arc<Renderer>,
    inspect: impl Fn(&Renderer, &[InputRow]) -> T + Clone + Send + 'static,
) -> anyhow::Result<Vec<T>> {
    let (mut pieces, mut seen) = (reader.pieces(shard, None)?, Vec::new());
    while let Some(piece) = pieces.next().await? {
        let (renderer, inspect) = (renderer.clone(), inspect.clone());
        let inspected = tokio::task::spawn_blocking(move || inspect(&renderer, &piece.rows));
        seen.push(inspected.await.context("rendering panicked")?);
    }
    Ok(seen)
}

fn render_row(renderer: &Renderer, row: &InputRow) -> PreflightRow {
    let prompt = renderer
        .render(row)
        .map(|prompt| PreflightPrompt::new(prompt.text, &prompt.tokens));
    PreflightRow { row: row.row, prompt }
}

/// Expected device time of the job, and the basis of the estimate.
struct TimeEstimate {
    seconds: f64,
    basis: String,
}

/// Estimates the time from the given rate, or else from the finished trial (`run --limit`) with the
/// most rows; `None` if there is neither.
async fn estimate_time(
    prepared: &PreparedJob,
    preflight: &Preflight,
    tokens_per_second: Option<f64>,
) -> Result<Option<TimeEstimate>, Failure> {
    let rows = preflight.rows - preflight.broken_rows;
    if let Some(rate) = tokens_per_second.filter(|rate| *rate > 0.0) {
        let generate = &prepared.job.generate;
        let completion = rows * u64::from(generate.max_tokens) * u64::from(generate.n);
        let basis = format!("{rate} tokens/s and every completion of `max_tokens`");
        return Ok(Some(TimeEstimate {
            seconds: (preflight.prompt_tokens + completion) as f64 / rate,
            basis,
        }));
    }
    let mut best: Option<(u64, f64)> = None;
    for ledger in trial::ledgers(&prepared.job, &output_of(&prepared.job)?).await? {
        if let Some(done) = ledger.success().await?
            && best.is_none_or(|(rows, _)| done.rows > rows)
            && done.rows > 0
        {
            best = Some((done.rows, done.seconds));
        }
    }
    Ok(best.map(|(trial_rows, seconds)| TimeEstimate {
        seconds: seconds / trial_rows as f64 * rows as f64,
        basis: format!("the run of the first {}", counted(trial_rows, "row")),
    }))
}

fn as_json(
    prepared: &PreparedJob,
    inputs: &InputPlan,
    preflight: &Preflight,
    estimate: Option<&TimeEstimate>,
) -> serde_json::Value {
    let seconds = estimate.map(|e| e.seconds);
    json!({
        "job": prepared.job.name,
        "inputs": inputs.files.len(),
        "shards": inputs.shards.len(),
        "rows": preflight.rows,
        "broken_rows": preflight.broken_rows,
        "prompt_tokens": preflight.prompt_tokens,
        "shared_prefix_tokens": preflight.shared_tokens,
        "tokens_per_row": {
            "p50": preflight.quantile(0.5),
            "p90": preflight.quantile(0.9),
            "p99": preflight.quantile(0.99),
            "max": preflight.longest(),
        },
        "histogram": preflight.histogram().iter().map(|(upper, rows)| json!({"tokens_max": upper, "rows": rows})).collect::<Vec<_>>(),
        "seconds": seconds,
        "sampling": prepared.job.generate.sampling_json(),
        "thinking": prepared.thinking.as_ref().map(ModelThinking::to_json),
        "parsed": prepared.parsed_json(),
        "skipped_inputs": inputs.layout.skipped.iter().map(SkippedFile::name_and_reason).collect::<Vec<_>>(),
        "warnings": prepared.warnings().into_iter().chain(&inputs.notes).collect::<Vec<_>>(),
        "usd": seconds.and_then(|s| dollars(s, prepared.job.budget.usd_per_hour)),
        "preview": preflight.preview().into_iter().map(preview).collect::<Vec<_>>(),
    })
}

/// A prompt for the preview; a long prompt is cut.
fn preview((row, shown): &(u64, PromptPreview)) -> serde_json::Value {
    json!({"row": row, "prompt_tokens": shown.tokens, "text": shown.text, "token_ids": shown.token_ids})
}

fn show(prepared: &PreparedJob, inputs: &InputPlan, preflight: &Preflight, estimate: Option<&TimeEstimate>) {
    println!("job         {}", prepared.job.name);
    println!(
        "inputs      {}, {}",
        counted(inputs.files.len() as u64, "file"),
        counted(inputs.shards.len() as u64, "shard")
    );
    for skipped in inputs.layout.skipped.iter().take(SKIPPED_SHOWN_MAX) {
        println!("            left out: {}", skipped.name_and_reason());
    }
    println!(
        "rows        {}, {} of them broken",
        number(preflight.rows),
        number(preflight.broken_rows)
    );
    for (row, why) in &preflight.broken {
        println!("            {}", row_line(*row, why));
    }
    println!(
        "prompts     {}, {} in prefixes that rows share",
        counted(preflight.prompt_tokens, "token"),
        percent(preflight.shared_tokens, preflight.prompt_tokens)
    );
    println!(
        "lengths     half of the rows up to {} tokens, 90 % up to {}, 99 % up to {}, the longest {}",
        preflight.quantile(0.5),
        preflight.quantile(0.9),
        preflight.quantile(0.99),
        preflight.longest()
    );
    let histogram = preflight.histogram();
    let rows_max = histogram.iter().map(|b| b.1).max().unwrap_or(0).max(1);
    for (upper, rows) in histogram {
        let bar = "#".repeat((rows * BAR_CHARS_MAX).div_ceil(rows_max) as usize);
        println!("            up to {upper:>7} tokens  {:>12}  {bar}", number(rows));
    }
    if let Some(line) = &prepared.sampling.line {
        println!("sampling    {line}");
    }
    if let Some(line) = prepared.thinking_line() {
        println!("thinking    {line}");
    }
    for (index, line) in prepared.parsed_lines().iter().enumerate() {
        println!("{:<12}{line}", if index == 0 { "parsed" } else { "" });
    }
    match estimate {
        None if preflight.rows <= TRIAL_ROWS => {
            println!("time        unknown: give --tokens-per-second to have it estimated")
        }
        None => println!(
            "time        unknown: measure with `gristmill run {} --limit {TRIAL_ROWS}`, or give --tokens-per-second",
            prepared.args.shell_arguments()
        ),
        Some(TimeEstimate { seconds, basis }) => {
            let usd = dollars(*seconds, prepared.job.budget.usd_per_hour);
            let usd = usd.map(|usd| format!(", {}", show_dollars(usd))).unwrap_or_default();
            println!(
                "time        {} of device time{usd}, from {basis}",
                show_duration(*seconds)
            );
        }
    }
    for (row, shown) in preflight.preview() {
        let cut = if shown.is_cut { ", cut" } else { "" };
        println!(
            "\n--- row {row}, {}{cut} ---\n{}",
            counted(shown.tokens as u64, "token"),
            shown.text
        );
    }
}
