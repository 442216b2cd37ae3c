//! `gristmill calibrate`: collects a model's activation maxima per channel on some of a job's
//! prompts, by which its weights are balanced for INT8.

use std::sync::Arc;

use anyhow::Context;
use serde_json::json;

use crate::cli::args::CalibrateArgs;
use crate::cli::device_choice::ResolvedDevice;
use crate::cli::exit::{Exit, Failure};
use crate::cli::prepare::PreparedJob;
use crate::cli::setup::load_options;
use crate::dataset::shard::ShardReader;
use crate::device::Precision;
use crate::job::precision::RequestedKvFormat;
use crate::model::{ActivationMaxima, Transformer};
use crate::replace::replace;
use crate::report::sample::{ShardSample, sample};
use crate::report::summary::counted;
use crate::worker::model::{Formats, PromptSettings};

pub(super) async fn calibrate(args: CalibrateArgs) -> Result<Exit, Failure> {
    let mut prepared = PreparedJob::prepare(&args.job, None, || Ok(ResolvedDevice::Cpu)).await?;
    ActivationMaxima::check_model(&prepared.model.config).map_err(Failure::bad_job)?;
    prepared.resolve_settings(None)?;
    let prompts = prompts(&prepared, args.rows).await?;
    let files = &prepared.model;
    let vocab_size = files.tokenizer.vocab_size();
    let formats = Formats::of(Precision::F32.into(), RequestedKvFormat::Auto, Precision::F32);
    let options = load_options(
        formats,
        prepared.job.context,
        vocab_size,
        ResolvedDevice::Cpu,
        &args.engine,
    )?;
    let maxima = tokio::task::block_in_place(|| {
        let mut model = Transformer::load(&files.dir, &options).map_err(Failure::bad_job)?;
        ActivationMaxima::measure(&mut model, prompts.iter().map(Vec::as_slice)).map_err(Failure::bad_job)
    })?;
    let path = ActivationMaxima::path(&files.dir);
    let bytes = maxima.to_bytes().context("cannot write the channels' sizes")?;
    replace(&path, &bytes).with_context(|| format!("cannot write `{}`", path.display()))?;
    let tokens: usize = prompts.iter().map(Vec::len).sum();
    if args.json {
        println!(
            "{}",
            json!({"job": prepared.job.name, "rows": prompts.len(), "tokens": tokens, "file": path.display().to_string()})
        );
    } else {
        println!(
            "measured    {}, {}",
            counted(prompts.len() as u64, "prompt"),
            counted(tokens as u64, "token")
        );
        println!("written     {}", path.display());
        println!(
            "            jobs of this model in int8 are balanced by it from now on, and count as jobs of another model"
        );
    }
    Ok(Exit::Done)
}

/// Token ids of the prompts of `row_count` rows from all over the input. Rows that cannot be
/// rendered are left out.
pub(super) async fn prompts(prepared: &PreparedJob, row_count: u64) -> Result<Vec<Vec<u32>>, Failure> {
    let inputs = prepared.plan().await?;
    let renderer = prepared.renderer(&PromptSettings::UNKNOWN)?;
    let nothing = Arc::new(arrow::datatypes::Schema::empty());
    let reader = ShardReader::new(inputs.files.clone(), nothing, renderer.columns()).with_layout(inputs.layout.clone());
    let mut prompts = Vec::new();
    let mut last_error = None;
    for ShardSample { shard, rows } in sample(&inputs.shards, row_count, prepared.job.hash()) {
        let read = reader
            .read(&inputs.shards[shard as usize])
            .await
            .map_err(Failure::bad_job)?;
        for row in read.rows.iter().filter(|row| rows.contains(&row.row)) {
            match renderer.render(row) {
                Ok(prompt) => prompts.push(prompt.tokens),
                Err(why) => last_error = Some(format!("row {}: {why}", row.row)),
            }
        }
    }
    match (prompts.is_empty(), last_error) {
        (false, _) => Ok(prompts),
        (true, Some(why)) => Err(Failure::bad_job(anyhow::anyhow!(
            "{}: no row of the sample has a prompt; {why}",
            prepared.job.file
        ))),
        (true, None) => Err(Failure::bad_job(anyhow::anyhow!(
            "{}: its input has no rows",
            prepared.job.file
        ))),
    }
}
