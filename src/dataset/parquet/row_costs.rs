//! Memory cost of each row of a Parquet file: fetches and measures the pages that hold the rows,
//! column by column.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use parquet::arrow::ProjectionMask;

use super::chunks::check_chunk_pages;
use super::cost::{LeafCost, PageClaims};
use super::measure::{Pages, add_row_costs};
use super::pages::page_headers;
use super::reader::{INDEXED_CHUNK_BYTES_MIN, ParquetFile};
use crate::dataset::error::DatasetError;
use crate::dataset::row_memory::PAGES_BYTES_MAX;

impl ParquetFile {
    /// The memory cost of each of `rows` in the named columns, measured without decoding values. If
    /// decoding a column needs more than the decompression limit, these bytes are added to the cost
    /// of each row.
    pub async fn row_costs(
        self: &Arc<Self>,
        rows: Range<u64>,
        columns: &[String],
        json_columns: &[String],
    ) -> Result<Vec<u64>, DatasetError> {
        let (this, costs, mask) = (self.clone(), self.costs(json_columns), self.mask(columns));
        let walked = tokio::spawn(async move {
            let mut row_costs = vec![0; (rows.end - rows.start) as usize];
            for group in this.groups_with_rows(std::slice::from_ref(&rows)) {
                let (start, end) = (this.group_starts[group], this.group_starts[group + 1]);
                let (from, to) = (rows.start.max(start), rows.end.min(end));
                if from < to {
                    let row_costs = &mut row_costs[(from - rows.start) as usize..(to - rows.start) as usize];
                    this.add_group_costs(group, from - start..to - start, &costs, &mask, row_costs)
                        .await?;
                }
            }
            Ok(row_costs)
        });
        // This is a separate task, so that a panic on broken pages becomes an error.
        walked
            .await
            .map_err(|e| DatasetError::unreadable(&self.pinned.name, e))
            .and_then(|r| r)
    }

    async fn add_group_costs(
        &self,
        group: usize,
        rows: Range<u64>,
        costs: &[LeafCost],
        mask: &ProjectionMask,
        row_costs: &mut [u64],
    ) -> Result<(), DatasetError> {
        // Uncompressed bytes held while decoding, by root column.
        let mut decoding_bytes: HashMap<usize, u64> = HashMap::new();
        for (leaf, cost) in costs.iter().enumerate().filter(|(leaf, _)| mask.leaf_included(*leaf)) {
            let root = self.footer.parquet_schema().get_column_root_idx(leaf);
            let chunk = self.footer.metadata().row_group(group).column(leaf);
            let pages = self.fetch_pages(group, leaf, &rows).await?;
            check_chunk_pages(&self.pinned.name, group, chunk, &pages.bytes, |_| None)?;
            let mut claims = PageClaims::default();
            page_headers(&pages.bytes).for_each(|(header, _)| claims.add(&header));
            let decoding_bytes = decoding_bytes.entry(root).or_default();
            *decoding_bytes = decoding_bytes.saturating_add(claims.decoding_bytes());
            for row_cost in row_costs.iter_mut() {
                *row_cost = row_cost.saturating_add(cost.per_row);
            }
            if *decoding_bytes > PAGES_BYTES_MAX {
                row_costs
                    .iter_mut()
                    .for_each(|row_cost| *row_cost = row_cost.saturating_add(*decoding_bytes));
            } else if cost.is_flat && !cost.is_text {
                row_costs
                    .iter_mut()
                    .for_each(|row_cost| *row_cost = row_cost.saturating_add(cost.per_value));
            } else {
                add_row_costs(&pages, chunk, cost, &rows, row_costs).map_err(|why| {
                    let why = format!("row group {group}, column `{}`: {why}", chunk.column_path().string());
                    DatasetError::unreadable(&self.pinned.name, why)
                })?;
            }
        }
        Ok(())
    }

    /// The dictionary page of a leaf column, and the data pages with these rows of a group.
    async fn fetch_pages(&self, group: usize, leaf: usize, rows: &Range<u64>) -> Result<Pages, DatasetError> {
        let chunk = self.footer.metadata().row_group(group).column(leaf);
        let (start, length) = chunk.byte_range();
        let is_part = (rows.end - rows.start).saturating_mul(2) < self.group_rows(group);
        let index = if is_part && length >= INDEXED_CHUNK_BYTES_MIN {
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
