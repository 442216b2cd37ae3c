//! Memory cost of a Parquet file's rows: the pages that hold the rows are fetched and walked column
//! by column.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use parquet::arrow::ProjectionMask;

use super::chunks::check_chunk_pages;
use super::cost::{Claims, LeafCost};
use super::measure::{Pages, add_row_costs};
use super::pages::pages_of;
use super::reader::{INDEX_BYTES_MIN, ParquetFile};
use crate::dataset::error::DatasetError;
use crate::dataset::row_memory::PAGES_BYTES_MAX;

impl ParquetFile {
    /// The cost of each of `rows` in the named columns, found without decoding. If a column's pages
    /// exceed the decompression limit together, their whole size is added to the cost of each row.
    pub async fn row_costs(
        self: &Arc<Self>,
        rows: Range<u64>,
        columns: &[String],
        shown: &[String],
    ) -> Result<Vec<u64>, DatasetError> {
        let (this, costs, mask) = (self.clone(), self.costs(shown), self.mask(columns));
        let walked = tokio::spawn(async move {
            let mut sums = vec![0; (rows.end - rows.start) as usize];
            for group in this.groups_of(std::slice::from_ref(&rows)) {
                let (start, end) = (this.starts[group], this.starts[group + 1]);
                let (from, to) = (rows.start.max(start), rows.end.min(end));
                if from < to {
                    let sums = &mut sums[(from - rows.start) as usize..(to - rows.start) as usize];
                    this.group_costs(group, from - start..to - start, (&costs, &mask), sums)
                        .await?;
                }
            }
            Ok(sums)
        });
        // As on reading, a panic on broken pages becomes an error.
        walked
            .await
            .map_err(|e| DatasetError::unreadable(&self.pinned.name, e))
            .and_then(|r| r)
    }

    async fn group_costs(
        &self,
        group: usize,
        rows: Range<u64>,
        (costs, mask): (&[LeafCost], &ProjectionMask),
        sums: &mut [u64],
    ) -> Result<(), DatasetError> {
        // Bytes held while decoding, by root column.
        let mut held: HashMap<usize, u64> = HashMap::new();
        for (leaf, cost) in costs.iter().enumerate().filter(|(leaf, _)| mask.leaf_included(*leaf)) {
            let root = self.footer.parquet_schema().get_column_root_idx(leaf);
            let chunk = self.footer.metadata().row_group(group).column(leaf);
            let pages = self.pages_at(group, leaf, &rows).await?;
            check_chunk_pages(&self.pinned.name, group, chunk, &pages.bytes, |_| None)?;
            let mut claims = Claims::default();
            pages_of(&pages.bytes).for_each(|(header, _)| claims.add(&header));
            let held = held.entry(root).or_default();
            *held = held.saturating_add(claims.held());
            for sum in sums.iter_mut() {
                *sum = sum.saturating_add(cost.row);
            }
            if *held > PAGES_BYTES_MAX {
                sums.iter_mut().for_each(|sum| *sum = sum.saturating_add(*held));
            } else if cost.is_flat && !cost.is_text {
                sums.iter_mut().for_each(|sum| *sum = sum.saturating_add(cost.value));
            } else {
                add_row_costs(&pages, chunk, cost, &rows, sums).map_err(|why| {
                    let why = format!("row group {group}, column `{}`: {why}", chunk.column_path().string());
                    DatasetError::unreadable(&self.pinned.name, why)
                })?;
            }
        }
        Ok(())
    }

    /// The pages of a leaf column that hold these rows of a group, with the dictionary.
    async fn pages_at(&self, group: usize, leaf: usize, rows: &Range<u64>) -> Result<Pages, DatasetError> {
        let chunk = self.footer.metadata().row_group(group).column(leaf);
        let (start, length) = chunk.byte_range();
        let is_part = (rows.end - rows.start).saturating_mul(2) < self.group_rows(group);
        let index = if is_part && length >= INDEX_BYTES_MIN {
            self.page_index(group, leaf, chunk, start..start + length).await?
        } else {
            None
        };
        let Some(index) = index else {
            let bytes = self.pinned.bytes(start..start + length).await?;
            return Ok(Pages { bytes, first_row: 0 });
        };
        let pages = index.page_locations();
        let first_row = |n: usize| pages[n].first_row_index.max(0) as u64;
        let from = (0..pages.len()).rfind(|n| first_row(*n) <= rows.start).unwrap_or(0);
        let to = (from..pages.len()).rfind(|n| first_row(*n) < rows.end).unwrap_or(from);
        let data = pages[from].offset as u64..pages[to].offset as u64 + pages[to].compressed_page_size.max(0) as u64;
        let dictionary = start..pages[0].offset as u64;
        let bytes = if dictionary.is_empty() || from == 0 {
            self.pinned.bytes(start..data.end).await?
        } else {
            self.pinned.ranges(&[dictionary, data]).await?.concat().into()
        };
        Ok(Pages {
            bytes,
            first_row: first_row(from),
        })
    }
}
