//! Reads a shard's rows piece by piece, and renders and tokenizes them; if the job is closing, ends
//! them instead.
//!
//! See docs/decisions/027-closing-asks-little-of-inputs.md.

use std::sync::Arc;

use anyhow::Context;
use arrow::array::RecordBatch;
use rayon::prelude::*;

use crate::dataset::DatasetError;
use crate::dataset::carried::memory_bytes;
use crate::dataset::plan::Shard;
use crate::dataset::row::{InputRow, RowResult, RowStatus, WITHOUT_COLUMNS};
use crate::job::RenderedRow;
use crate::job::row_error::DEADLY_ROW;
use crate::ledger::RowSet;
use crate::ledger::attempts::AttemptPlan;
use crate::ledger::log::ShardLog;
use crate::worker::assemble::{closed_row, errored_row};
use crate::worker::jobs::OpenJob;
use crate::worker::read_time::ReadTime;
use crate::worker::{ReadyRow, Worker, one_line};

/// A shard's rows: ready for the device, or with a result that needed no device.
pub(super) struct PreparedShard {
    /// Carried columns of the whole shard; null in rows that were not read.
    pub carry: RecordBatch,
    pub ready: Vec<ReadyRow>,
    pub results: Vec<RowResult>,
}

/// Reads the shard, and renders and tokenizes the rows of the planned attempt.
pub(super) async fn prepare(
    worker: &Arc<Worker>,
    job: &Arc<OpenJob>,
    shard: &Shard,
    log: &ShardLog,
    plan: &AttemptPlan,
    mut time: ReadTime,
) -> anyhow::Result<PreparedShard> {
    // Read only the rows of this attempt, because another row may be unreadable.
    let rows_to_read = plan.rows_to_read();
    let wanted = (rows_to_read != RowSet::from_range(log.rows())).then(|| rows_to_read.ranges().collect());
    let mut pieces = job.reader.pieces(shard, wanted)?;
    let (mut carry_pieces, mut carried_bytes, mut ready) = (Vec::new(), 0, Vec::new());
    let mut results: Vec<RowResult> = plan.accused.iter().map(accused_row).collect();
    while let Some(piece) = time.wait_for(pieces.next(), || job.reader.decompressed_bytes()).await? {
        #[cfg(feature = "faults")]
        crate::faults::abort_at_reading(|row| piece.rows.iter().any(|read| read.row == row && read.fields.is_ok()));
        carried_bytes += memory_bytes(&piece.carry);
        carry_pieces.push(piece.carry);
        job.reserve_carried(log.shard(), carried_bytes).await;
        for (row, prompt) in render(worker, job, piece.rows, &plan.next_rows).await? {
            match prompt {
                Ok(RenderedRow {
                    tokens,
                    params,
                    text: _,
                }) => {
                    ready.push(ReadyRow {
                        row,
                        prompt: tokens.into(),
                        params,
                    });
                }
                Err(why) => results.push(errored_row(row, why)),
            }
        }
    }
    time.wait_for(job.write_pins(), || 0).await?;
    Ok(PreparedShard {
        carry: job.reader.concat_carry(&carry_pieces, shard.rows as usize)?,
        ready,
        results,
    })
}

async fn render(
    worker: &Arc<Worker>,
    job: &Arc<OpenJob>,
    rows: Vec<InputRow>,
    wanted: &RowSet,
) -> anyhow::Result<Vec<(u64, Result<RenderedRow, String>)>> {
    let rows: Vec<InputRow> = rows.into_iter().filter(|row| wanted.contains(row.row)).collect();
    let (worker, job) = (worker.clone(), job.clone());
    let rendered = tokio::task::spawn_blocking(move || {
        let render = |row: &InputRow| (row.row, job.renderer.render(row));
        worker
            .render_threads
            .install(|| rows.par_iter().map(render).collect::<Vec<_>>())
    });
    rendered.await.context("rendering panicked")
}

/// Ends the rows that no record covers with `status`. If their input can no longer be read, they
/// get no carried columns, and their error says why.
pub(super) async fn close(
    job: &OpenJob,
    shard: &Shard,
    log: &ShardLog,
    status: RowStatus,
    plan: &AttemptPlan,
    time: ReadTime,
) -> anyhow::Result<PreparedShard> {
    let (carry, why) = match read_carry(job, shard, log, plan, time).await {
        Ok(carry) => (carry, None),
        Err(
            error @ (DatasetError::InputChanged { .. }
            | DatasetError::InputMissing { .. }
            | DatasetError::Unreadable { .. }),
        ) => (job.reader.null_carry(shard)?, Some(one_line(&error.into()))),
        Err(error) => return Err(error.into()),
    };
    let end = |row: u64| {
        let mut row = closed_row(row, status);
        if let (Some(error), Some(why)) = (&mut row.error, &why) {
            error.push_str(&format!("; {WITHOUT_COLUMNS}{why}"));
        }
        row
    };
    Ok(PreparedShard {
        carry,
        ready: Vec::new(),
        results: log.uncovered().iter().map(end).collect(),
    })
}

/// Reads a shard's carried columns. An error if its rows are tried in narrowed parts, because
/// reading any of them may crash the process.
async fn read_carry(
    job: &OpenJob,
    shard: &Shard,
    log: &ShardLog,
    plan: &AttemptPlan,
    mut time: ReadTime,
) -> Result<RecordBatch, DatasetError> {
    if plan.is_alone() {
        return Err(DatasetError::unreadable(
            "its shard",
            "attempts at its rows ended no process cleanly",
        ));
    }
    let (mut carry_pieces, mut carried_bytes) = (Vec::new(), 0);
    let mut pieces = job.reader.pieces(shard, None)?;
    while let Some(piece) = time.wait_for(pieces.next(), || job.reader.decompressed_bytes()).await? {
        carried_bytes += memory_bytes(&piece.carry);
        carry_pieces.push(piece.carry);
        job.reserve_carried(log.shard(), carried_bytes).await;
    }
    job.reader.concat_carry(&carry_pieces, shard.rows as usize)
}

fn accused_row(row: u64) -> RowResult {
    errored_row(
        row,
        format!("{DEADLY_ROW} three times while this row was alone on the device"),
    )
}
