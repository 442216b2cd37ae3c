//! Reads a shard's rows piece by piece, renders and tokenizes them; or ends them, where their job
//! is closing.
//!
//! See docs/decisions/027-closing-asks-little-of-inputs.md.

use std::sync::Arc;

use anyhow::Context;
use arrow::array::RecordBatch;
use rayon::prelude::*;

use crate::dataset::DatasetError;
use crate::dataset::carried::memory;
use crate::dataset::plan::Shard;
use crate::dataset::row::{InputRow, RowResult, RowStatus, WITHOUT_COLUMNS};
use crate::job::RenderedRow;
use crate::ledger::RowSet;
use crate::ledger::attempts::Narrowing;
use crate::ledger::log::ShardLog;
use crate::worker::assemble::{closed, errored};
use crate::worker::jobs::OpenJob;
use crate::worker::read_time::ReadTime;
use crate::worker::{ReadyRow, Worker, one_line};

/// A shard's rows: ready for the device, or with a result already.
pub(super) struct Prepared {
    /// Carried columns of the whole shard; null where a row was not read.
    pub carry: RecordBatch,
    pub ready: Vec<ReadyRow>,
    pub results: Vec<RowResult>,
}

/// Reads the shard; renders and tokenizes the rows to try.
pub(super) async fn prepare(
    worker: &Arc<Worker>,
    job: &Arc<OpenJob>,
    shard: &Shard,
    log: &ShardLog,
    plan: &Narrowing,
    mut time: ReadTime,
) -> anyhow::Result<Prepared> {
    // Read only the rows of this try: another row may be the unreadable one.
    let reads = plan.reads();
    let wanted = (reads != RowSet::from_range(log.rows())).then(|| reads.ranges().collect());
    let mut pieces = job.reader.pieces(shard, wanted)?;
    let (mut carries, mut carried, mut ready) = (Vec::new(), 0, Vec::new());
    let mut results: Vec<RowResult> = plan.accused.iter().map(accused).collect();
    while let Some(piece) = time.count(pieces.next(), || job.reader.decompressed()).await? {
        #[cfg(feature = "faults")]
        crate::faults::abort_at_reading(|row| piece.rows.iter().any(|read| read.row == row && read.fields.is_ok()));
        carried += memory(&piece.carry);
        carries.push(piece.carry);
        job.hold_carried(log.shard(), carried).await;
        for (row, prompt) in render(worker, job, piece.rows, &plan.next).await? {
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
                Err(why) => results.push(errored(row, why)),
            }
        }
    }
    time.count(job.write_pins(), || 0).await?;
    Ok(Prepared {
        carry: job.reader.joined(&carries, shard.rows as usize)?,
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

/// Ends the rows that no record covers. Rows whose input cannot be read any more have no carried
/// columns, and their error says why.
pub(super) async fn close(
    job: &OpenJob,
    shard: &Shard,
    log: &ShardLog,
    status: RowStatus,
    plan: &Narrowing,
    time: ReadTime,
) -> anyhow::Result<Prepared> {
    let (carry, why) = match carry_of(job, shard, log, plan, time).await {
        Ok(carry) => (carry, None),
        Err(
            error @ (DatasetError::InputChanged { .. }
            | DatasetError::InputMissing { .. }
            | DatasetError::Unreadable { .. }),
        ) => (job.reader.no_carry(shard)?, Some(one_line(&error.into()))),
        Err(error) => return Err(error.into()),
    };
    let end = |row: u64| {
        let mut row = closed(row, status);
        if let (Some(error), Some(why)) = (&mut row.error, &why) {
            error.push_str(&format!("; {WITHOUT_COLUMNS}{why}"));
        }
        row
    };
    Ok(Prepared {
        carry,
        ready: Vec::new(),
        results: log.uncovered().iter().map(end).collect(),
    })
}

/// A shard's carried columns. Where its rows are tried in parts, any one of them may end the
/// process that reads it.
async fn carry_of(
    job: &OpenJob,
    shard: &Shard,
    log: &ShardLog,
    plan: &Narrowing,
    mut time: ReadTime,
) -> Result<RecordBatch, DatasetError> {
    if plan.alone() {
        return Err(DatasetError::unreadable(
            "its shard",
            "attempts at its rows ended no process cleanly",
        ));
    }
    let (mut carries, mut carried) = (Vec::new(), 0);
    let mut pieces = job.reader.pieces(shard, None)?;
    while let Some(piece) = time.count(pieces.next(), || job.reader.decompressed()).await? {
        carried += memory(&piece.carry);
        carries.push(piece.carry);
        job.hold_carried(log.shard(), carried).await;
    }
    job.reader.joined(&carries, shard.rows as usize)
}

fn accused(row: u64) -> RowResult {
    errored(
        row,
        "the process died three times while this row was alone on the device".into(),
    )
}
