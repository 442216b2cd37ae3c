//! Prompts of single rows, read from the job's inputs.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow};
use arrow::datatypes::Schema;

use super::view::RowView;
use crate::dataset::row::InputRow;
use crate::dataset::shard::ShardReader;
use crate::error_line::one_line;
use crate::job::{Job, PromptPreview};
use crate::ledger::Ledger;
use crate::ledger::keys::JOB;

/// Maximum time for the prompts of a page: compressed inputs are read from their beginning.
const READ_WITHIN: Duration = Duration::from_secs(20);

/// Adds the prompts of these rows, which are in the order of the input. Rows whose input cannot be
/// read any more stay without one.
pub(super) async fn add_prompts(ledger: &Ledger, rows: &mut [RowView]) {
    let mut prompts = BTreeMap::new();
    let wanted: Vec<u64> = rows.iter().map(|row| row.row).collect();
    let reading = read_prompts(ledger, &wanted, &mut prompts);
    let read = tokio::time::timeout(READ_WITHIN, reading).await;
    match read {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!("prompts cannot be shown: {}", one_line(&error)),
        Err(_) => tracing::warn!("prompts cannot be shown: reading them took more than {READ_WITHIN:?}"),
    }
    for row in rows {
        if let Some(prompt) = prompts.remove(&row.row) {
            row.set_prompt(prompt);
        }
    }
}

async fn read_prompts(ledger: &Ledger, wanted: &[u64], prompts: &mut BTreeMap<u64, String>) -> anyhow::Result<()> {
    let record = ledger.job();
    let job = Job::from_record(&record.resolved, &ledger.store().address(JOB))?;
    let preview = Arc::new(PromptPreview::new(&job).map_err(|why| anyhow!(why))?);
    let reader = ShardReader::new(record.inputs.clone(), Arc::new(Schema::empty()), preview.columns())
        .with_layout(record.layout.clone());
    for (shard, wanted) in by_shard(wanted, |row| {
        let after = record.shards.partition_point(|shard| shard.first_row <= row);
        after.saturating_sub(1)
    }) {
        let planned = record.shards.get(shard).context("the job has no such shard")?;
        let mut pieces = reader.pieces(planned, Some(ranges(&wanted)))?;
        let mut found: Vec<InputRow> = Vec::new();
        while found.len() < wanted.len()
            && let Some(piece) = pieces.next().await?
        {
            found.extend(
                piece
                    .rows
                    .into_iter()
                    .filter(|row| wanted.binary_search(&row.row).is_ok()),
            );
        }
        // Templates may compute for a while.
        let preview = preview.clone();
        let texts = tokio::task::spawn_blocking(move || {
            let text = |row: InputRow| preview.text(&row).ok().map(|text| (row.row, text));
            found.into_iter().filter_map(text).collect::<Vec<_>>()
        });
        prompts.extend(texts.await.context("rendering prompts ended early")?);
    }
    Ok(())
}

/// Ascending rows by their shards.
fn by_shard(rows: &[u64], shard_of: impl Fn(u64) -> usize) -> BTreeMap<usize, Vec<u64>> {
    let mut shards: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
    for &row in rows {
        shards.entry(shard_of(row)).or_default().push(row);
    }
    shards
}

/// Ascending rows as ranges.
fn ranges(rows: &[u64]) -> Vec<Range<u64>> {
    let runs = rows.chunk_by(|a, b| *b == a + 1);
    runs.map(|run| run[0]..run[run.len() - 1] + 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_become_ranges_of_shards() {
        assert_eq!(ranges(&[1, 2, 3, 7, 9, 10]), [1..4, 7..8, 9..11]);
        assert_eq!(ranges(&[]), []);
        let shards = by_shard(&[1, 9, 10, 25], |row| row as usize / 10);
        assert_eq!(
            shards.into_iter().collect::<Vec<_>>(),
            [(0, vec![1, 9]), (1, vec![10]), (2, vec![25])]
        );
    }
}
