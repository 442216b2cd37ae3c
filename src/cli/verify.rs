//! `gristmill verify`: proves the guarantee for a finished job.

use std::fmt::Display;

use anyhow::anyhow;
use arrow::array::{Array, ArrayRef, RecordBatch};
use arrow::compute::concat_batches;
use arrow::datatypes::SchemaRef;
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use serde_json::Value;

use crate::cli::args::VerifyArgs;
use crate::cli::door::ledger_at;
use crate::cli::exit::{Exit, Failure};
use crate::dataset::part::read_parquet;
use crate::dataset::shard::ShardReader;
use crate::dataset::value::cell;
use crate::job::Job;
use crate::ledger::Ledger;
use crate::ledger::keys::JOB;
use crate::ledger::store::MAX_OBJECT_BYTES;
use crate::report::summary::number;

/// Shards whose inputs and parts are in memory at once.
const SHARDS_AT_ONCE: usize = 4;

pub async fn verify(args: VerifyArgs) -> Result<Exit, Failure> {
    let ledger = ledger_at(&args.output).await?;
    let mut verified = ledger.verify(|_| ()).await?;
    if args.inputs {
        verified.findings.extend(against_inputs(&ledger).await?);
    }
    for finding in &verified.findings {
        eprintln!("{finding}");
    }
    if args.json {
        let json = serde_json::json!({
            "job": ledger.job().name,
            "id": ledger.job().job,
            "generation": ledger.generation(),
            "holds": verified.holds(),
            "inputs": args.inputs,
            "parts": verified.parts,
            "rows": verified.tally.rows(),
            "truncated": verified.tally.truncated,
            "findings": verified.findings,
        });
        println!("{json}");
    } else if verified.holds() {
        let retries = match ledger.generation() {
            0 => String::new(),
            1 => ", after one retry".into(),
            n => format!(", after {n} retries"),
        };
        let inputs = match args.inputs {
            true => ", with the carried columns of their inputs",
            false => "",
        };
        println!(
            "the guarantee holds: {} rows as planned, each exactly once, in {} parts{retries}{inputs}; {} of them are truncated",
            number(verified.tally.rows()),
            number(verified.parts.into()),
            verified.tally.truncated.map_or("an unknown number".into(), number)
        );
    }
    Ok(if verified.holds() { Exit::Done } else { Exit::Failure })
}

/// Compares the carried columns of every published row with the job's inputs; a line for each part that differs.
async fn against_inputs(ledger: &Ledger) -> Result<Vec<String>, Failure> {
    let record = ledger.job();
    let place = ledger.store().address(JOB);
    let job = Job::of_record(&record.resolved, &place)?;
    let output = job.recorded_columns(&record.columns, &place)?;
    let reader = ShardReader::new(record.inputs.clone(), output.carry(), Some(Vec::new()));
    let found: Vec<Option<String>> = futures::stream::iter(0..record.shards.len() as u32)
        .map(|shard| part_against_inputs(ledger, &reader, shard))
        .buffered(SHARDS_AT_ONCE)
        .try_collect()
        .await?;
    Ok(found.into_iter().flatten().collect())
}

async fn part_against_inputs(ledger: &Ledger, reader: &ShardReader, shard: u32) -> Result<Option<String>, Failure> {
    let name = ledger.keys().part(shard);
    // One that is not there has been found already.
    let Some(bytes) = ledger.store().get(&name, MAX_OBJECT_BYTES).await? else {
        return Ok(None);
    };
    let planned = ledger.job().shard(shard)?;
    let read = reader.read(planned).await.map_err(anyhow::Error::from)?;
    let differs = match ledger.job().part_extension.as_str() {
        "jsonl" => lines_differ(&bytes, &read.carry, planned.first_row),
        _ => columns_differ(bytes, &read.carry, planned.first_row),
    };
    Ok(match differs {
        Ok(None) => None,
        Ok(Some(why)) => Some(format!("`{name}`: {why}")),
        Err(error) => Some(format!("`{name}` cannot be compared with its inputs: {error}")),
    })
}

/// The first row and column of a Parquet part that is not as in `carry`.
fn columns_differ(bytes: Bytes, carry: &RecordBatch, first_row: u64) -> anyhow::Result<Option<String>> {
    let part = read_parquet(bytes)?;
    let part = concat_batches(&part.schema, &part.batches)?;
    if part.num_rows() != carry.num_rows() {
        return Err(anyhow!(
            "it has {} rows, they have {}",
            part.num_rows(),
            carry.num_rows()
        ));
    }
    let schema: SchemaRef = carry.schema();
    for (field, wanted) in schema.fields().iter().zip(carry.columns()) {
        let name = field.name();
        let found = part
            .column_by_name(name)
            .ok_or_else(|| anyhow!("it has no column `{name}`"))?;
        if found != wanted {
            let same = |row: &usize| found.slice(*row, 1) == wanted.slice(*row, 1);
            let row = (0..wanted.len()).find(|row| !same(row)).unwrap_or(0) as u64 + first_row;
            return Ok(Some(format!("column `{name}` of row {row} is not its input's")));
        }
    }
    Ok(None)
}

/// The first line whose `custom_id` is not as in `carry`: of the carried columns, a result line holds this one.
fn lines_differ(bytes: &[u8], carry: &RecordBatch, first_row: u64) -> anyhow::Result<Option<String>> {
    let ids: Option<&ArrayRef> = carry.column_by_name("custom_id");
    let lines = bytes.split(|&b| b == b'\n').filter(|line| !line.is_empty());
    let mut count = 0;
    for (at, line) in lines.enumerate() {
        count += 1;
        let row = first_row + at as u64;
        if at >= carry.num_rows() {
            continue;
        }
        let line: Value = serde_json::from_slice(line)?;
        let wanted = match ids {
            Some(ids) => cell(ids, at).map_err(text_error)?,
            None => Value::String(format!("row-{row}")),
        };
        if line["custom_id"] != wanted {
            return Ok(Some(format!("`custom_id` of row {row} is not its input's")));
        }
    }
    match count == carry.num_rows() {
        true => Ok(None),
        false => Err(anyhow!("it has {count} lines, they have {} rows", carry.num_rows())),
    }
}

fn text_error(error: impl Display) -> anyhow::Error {
    anyhow!("{error}")
}
