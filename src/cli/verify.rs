//! `gristmill verify`: proves for a finished job that its output holds every row exactly once.

use std::fmt::Display;

use anyhow::anyhow;
use arrow::array::{Array, ArrayRef, RecordBatch};
use arrow::compute::concat_batches;
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use serde_json::Value;

use crate::cli::args::VerifyArgs;
use crate::cli::exit::{Exit, Failure};
use crate::cli::output::ledger_at;
use crate::dataset::part::read_parquet;
use crate::dataset::row::{RowStatus, WITHOUT_COLUMNS};
use crate::dataset::shard::ShardReader;
use crate::dataset::store::location::Location;
use crate::dataset::value::cell;
use crate::job::Job;
use crate::ledger::Ledger;
use crate::ledger::keys::JOB;
use crate::ledger::store::MAX_OBJECT_BYTES;
use crate::report::summary::{counted, number};
use crate::worker::access::{Access, AccessOptions};

/// Number of shards whose inputs and parts are in memory concurrently.
const SHARDS_AT_ONCE: usize = 4;

pub(super) async fn verify(args: VerifyArgs) -> Result<Exit, Failure> {
    let ledger = ledger_at(&args.output).await?;
    if args.inputs {
        check_access(&args, &ledger)?;
    }
    let mut verified = ledger.verify(|_| ()).await?;
    let (mut rows_without_columns, mut has_carried_columns) = (0, false);
    if args.inputs {
        let (all, names) = compare_with_inputs(&ledger).await?;
        has_carried_columns = !names.is_empty();
        for compared in all {
            verified.findings.extend(compared.difference);
            rows_without_columns += compared.rows_without_columns;
        }
    }
    for finding in &verified.findings {
        eprintln!("{finding}");
    }
    if args.json {
        let json = serde_json::json!({
            "job": ledger.job().name,
            "id": ledger.job().job,
            "generation": ledger.generation(),
            "holds": verified.guarantee_holds(),
            "inputs": args.inputs,
            "rows_without_columns": rows_without_columns,
            "parts": verified.parts,
            "rows": verified.tally.rows(),
            "truncated": verified.tally.truncated,
            "findings": verified.findings,
        });
        println!("{json}");
    } else if verified.guarantee_holds() {
        let retries = match ledger.generation() {
            0 => String::new(),
            1 => ", after one retry".into(),
            n => format!(", after {n} retries"),
        };
        let inputs = match (args.inputs, rows_without_columns) {
            (false, _) => String::new(),
            (true, _) if !has_carried_columns => " (no column is carried, so none was compared with the inputs)".into(),
            (true, 0) => ", with the carried columns of their inputs".into(),
            (true, rows) => format!(
                ", with the carried columns of their inputs but for {}, closed when nobody could read these",
                number(rows)
            ),
        };
        println!(
            "the guarantee holds: {} as planned, each exactly once, in {}{retries}{inputs}; {} of them are truncated",
            counted(verified.tally.rows(), "row"),
            counted(verified.parts.into(), "part"),
            verified.tally.truncated.map_or("an unknown number".into(), number)
        );
    }
    Ok(if verified.guarantee_holds() {
        Exit::Done
    } else {
        Exit::Failure
    })
}

/// Refuses inputs that a worker could not read: the command line names the output, but its record
/// names the inputs, and another person may have written that record.
fn check_access(args: &VerifyArgs, ledger: &Ledger) -> Result<(), Failure> {
    let here = std::env::current_dir()?;
    let requested = AccessOptions {
        accept_inputs: &args.accept_inputs,
        ..AccessOptions::default()
    };
    let refused = |why: String| Failure::bad_job(anyhow!(why));
    let access = Access::new(&requested, &here).map_err(refused)?;
    let output = Location::parse(&args.output, &here).map_err(Failure::bad_job)?;
    let inputs = ledger.job().inputs.iter().map(|input| input.url.as_str());
    if let Some(why) = access.inputs_refusal(&output, inputs) {
        return Err(refused(why));
    }
    access.confine_redirects();
    Ok(())
}

/// Result of comparing a part with its inputs.
#[derive(Debug, Default, PartialEq, Eq)]
struct PartComparison {
    /// The first difference, as one line.
    difference: Option<String>,
    /// Rows that were closed when their inputs were unreadable.
    rows_without_columns: u64,
}

impl PartComparison {
    fn different(why: String) -> PartComparison {
        PartComparison {
            difference: Some(why),
            rows_without_columns: 0,
        }
    }
}

/// Compares the carried columns of every published row with the job's inputs, part by part. Also
/// returns these columns' names in the output.
async fn compare_with_inputs(ledger: &Ledger) -> Result<(Vec<PartComparison>, Vec<String>), Failure> {
    let record = ledger.job();
    let record_address = ledger.store().address(JOB);
    let job = Job::from_record(&record.resolved, &record_address)?;
    let output = job.recorded_columns(&record.columns, &record_address)?;
    let reader =
        ShardReader::new(record.inputs.clone(), output.carry(), Some(Vec::new())).with_layout(record.layout.clone());
    let names: Vec<String> = output.carried_names().collect();
    let compared = futures::stream::iter(0..record.shards.len() as u32)
        .map(|shard| compare_part(ledger, &reader, &names, shard))
        .buffered(SHARDS_AT_ONCE)
        .try_collect()
        .await?;
    Ok((compared, names))
}

/// Compares one part. `names`: the carried columns' names in the output.
async fn compare_part(
    ledger: &Ledger,
    reader: &ShardReader,
    names: &[String],
    shard: u32,
) -> Result<PartComparison, Failure> {
    let name = ledger.keys().part(shard);
    // A missing part was reported already.
    let Some(bytes) = ledger.store().get(&name, MAX_OBJECT_BYTES).await? else {
        return Ok(PartComparison::default());
    };
    let planned = ledger.job().shard(shard)?;
    let read = reader.read(planned).await.map_err(anyhow::Error::from)?;
    let compared = match ledger.job().part_extension.as_str() {
        "jsonl" => compare_lines(&bytes, &read.carry, names, planned.first_row),
        _ => compare_columns(bytes, &read.carry, names, planned.first_row),
    };
    Ok(match compared {
        Ok(compared) => PartComparison {
            difference: compared.difference.map(|why| format!("`{name}`: {why}")),
            ..compared
        },
        Err(error) => PartComparison::different(format!("`{name}` cannot be compared with its inputs: {error}")),
    })
}

/// Whether status and error of a row say that it was closed without its carried columns.
fn is_closed_without_columns(status: &str, error: &str) -> bool {
    let is_closed = [RowStatus::Expired, RowStatus::Cancelled]
        .map(RowStatus::as_str)
        .contains(&status);
    is_closed && error.contains(WITHOUT_COLUMNS)
}

/// Compares a Parquet part with `carry`; reports the first row and column that differ.
fn compare_columns(
    bytes: Bytes,
    carry: &RecordBatch,
    names: &[String],
    first_row: u64,
) -> anyhow::Result<PartComparison> {
    let part = read_parquet(bytes)?;
    let part = concat_batches(&part.schema, &part.batches)?;
    if part.num_rows() != carry.num_rows() {
        return Err(anyhow!(
            "it has {} rows, they have {}",
            part.num_rows(),
            carry.num_rows()
        ));
    }
    let column = |name: &str| {
        part.column_by_name(name)
            .ok_or_else(|| anyhow!("it has no column `{name}`"))
    };
    let found = names
        .iter()
        .map(|name| column(name))
        .collect::<anyhow::Result<Vec<_>>>()?;
    if found
        .iter()
        .zip(carry.columns())
        .all(|(found, wanted)| *found == wanted)
    {
        return Ok(PartComparison::default());
    }
    let (status, error) = (column("status")?, column("error")?);
    let text = |of: &ArrayRef, row: usize| cell(of, row).map(|value| value.as_str().unwrap_or_default().to_string());
    let mut rows_without_columns = 0;
    for row in 0..carry.num_rows() {
        let same = |index: &usize| found[*index].slice(row, 1) == carry.column(*index).slice(row, 1);
        let Some(differing) = (0..names.len()).find(|index| !same(index)) else {
            continue;
        };
        let message = (
            text(status, row).map_err(to_anyhow)?,
            text(error, row).map_err(to_anyhow)?,
        );
        if !found.iter().all(|column| column.is_null(row)) || !is_closed_without_columns(&message.0, &message.1) {
            let (name, row) = (&names[differing], first_row + row as u64);
            return Ok(PartComparison::different(format!(
                "column `{name}` of row {row} is not its input's"
            )));
        }
        rows_without_columns += 1;
    }
    Ok(PartComparison {
        difference: None,
        rows_without_columns,
    })
}

/// Compares result lines with `carry`; `custom_id` is the only carried column that a line holds.
fn compare_lines(
    bytes: &[u8],
    carry: &RecordBatch,
    names: &[String],
    first_row: u64,
) -> anyhow::Result<PartComparison> {
    let ids: Option<&ArrayRef> = names
        .iter()
        .position(|name| name == "custom_id")
        .map(|index| carry.column(index));
    let lines = bytes.split(|&b| b == b'\n').filter(|line| !line.is_empty());
    let (mut count, mut rows_without_columns) = (0, 0);
    for (index, line) in lines.enumerate() {
        count += 1;
        let row = first_row + index as u64;
        if index >= carry.num_rows() {
            continue;
        }
        let line: Value = serde_json::from_slice(line)?;
        let wanted = match ids {
            Some(ids) => cell(ids, index).map_err(to_anyhow)?,
            None => Value::String(format!("row-{row}")),
        };
        if line["custom_id"] == wanted {
            continue;
        }
        let message = |key: &str| line["error"][key].as_str().unwrap_or_default();
        if !line["custom_id"].is_null() || !is_closed_without_columns(message("code"), message("message")) {
            return Ok(PartComparison::different(format!(
                "`custom_id` of row {row} is not its input's"
            )));
        }
        rows_without_columns += 1;
    }
    if count == carry.num_rows() {
        Ok(PartComparison {
            difference: None,
            rows_without_columns,
        })
    } else {
        Err(anyhow!("it has {count} lines, they have {} rows", carry.num_rows()))
    }
}

fn to_anyhow(error: impl Display) -> anyhow::Error {
    anyhow!("{error}")
}
