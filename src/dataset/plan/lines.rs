//! Planning of lines and CSV: every byte is read once, to find the rows' positions and the columns'
//! kinds.
//!
//! See docs/decisions/039-a-skipped-file-leaves-nothing-behind.md.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::datatypes::{Field, Schema};
use futures::TryStreamExt;

use super::partitions::PartitionColumn;
use super::planner::{
    InputPlan, PlanRequest, Skips, Source, bounds, check_clash, check_present, input_file, missing_column,
};
use super::{Column, Format, InputFile, RowCost, Segment, ShardBuilder};
use crate::dataset::csv::reader::OneTable;
use crate::dataset::error::DatasetError;
use crate::dataset::kinds::{KEYS_MAX, Kinds};
use crate::dataset::layout::Layout;
use crate::dataset::lines::compression::Compressed;
use crate::dataset::lines::reader::{BlockScan, IdCheck, IdHasher, LinesHash, Scanner, TEXT_COLUMN, merge_kinds, scan};
use crate::dataset::lines::text_file::TextFile;
use crate::dataset::store::pinned::display_name;

/// Plans files of lines or CSV.
pub(crate) async fn plan_lines(
    request: &PlanRequest,
    found: Vec<Source>,
    format: Format,
    partitions: &[PartitionColumn],
    skips: &mut Skips,
) -> Result<InputPlan, DatasetError> {
    let mut state = LinesPlan {
        request,
        partitions,
        format,
        hasher: IdHasher::default(),
        builder: ShardBuilder::new(bounds(request)),
        kinds: BTreeMap::new(),
        ids: IdCheck::default(),
        table: OneTable::default(),
        names: Vec::new(),
    };
    let mut files = Vec::new();
    for source in found {
        let input = files.len() as u32;
        state.names.push(source.text.file.name.clone());
        let before = state.builder.mark();
        match state.add_file(&source, input).await {
            Ok(file) => files.push(file),
            Err(error) => {
                skips.set_aside(&source.text.file, error)?;
                // The file's rows are removed from the plan.
                state.builder.go_back(before);
                state.ids.forget(input);
                state.names.pop();
            }
        }
        if state.builder.rows() >= request.rows_max() {
            break;
        }
    }
    state.finish(files)
}

/// State of planning lines.
struct LinesPlan<'a> {
    request: &'a PlanRequest,
    partitions: &'a [PartitionColumn],
    format: Format,
    hasher: IdHasher,
    builder: ShardBuilder,
    kinds: BTreeMap<String, Kinds>,
    ids: IdCheck,
    /// The common table (CSV only).
    table: OneTable,
    names: Vec<String>,
}

impl LinesPlan<'_> {
    /// Plans the lines of the next file, whose index is `input`.
    async fn add_file(&mut self, source: &Source, input: u32) -> Result<InputFile, DatasetError> {
        let Source { text, partition } = source;
        let limit = self.request.rows_max();
        let (mut rows, mut lines, mut bytes) = (0, 0, 0);
        let mut kinds = BTreeMap::new();
        let hash = LinesHash::default();
        let scanner = match self.format {
            Format::Csv => self.csv_scanner(text).await?,
            format => Scanner::Lines(format, self.hasher.clone()),
        };
        if self.format == Format::Text {
            check_clash(&text.file.name, self.partitions, [TEXT_COLUMN].into_iter())?;
        }
        let mut blocks = Box::pin(scan(text, scanner.clone(), &hash));
        let mut is_cut = self.builder.rows() >= limit;
        while !is_cut && let Some((piece, mut block)) = blocks.try_next().await? {
            bytes = piece.end();
            let wanted = usize::try_from(limit - self.builder.rows()).unwrap_or(usize::MAX);
            if let Some(last) = wanted.checked_sub(1).and_then(|n| block.rows.get(n))
                && block.rows.len() > wanted
            {
                // Rows beyond the limit must not affect the columns' types.
                block = scanner.scan(piece.until(last.bytes.end));
            }
            let block_lines = block.lines;
            check_clash(&text.file.name, self.partitions, block.kinds.keys().map(String::as_str))?;
            merge_kinds(&mut kinds, std::mem::take(&mut block.kinds));
            rows = self.add_block(block, input, rows, lines)?;
            lines += block_lines;
            is_cut = self.builder.rows() >= limit;
        }
        drop(blocks);
        merge_kinds(&mut self.kinds, kinds);
        Ok(InputFile {
            // With a limit the file is not read to its end, so there is no hash.
            sha256: (limit == u64::MAX).then(|| hash.finish()),
            compressed: text.codec.map(|codec| Compressed { codec, bytes }),
            ..input_file(&text.file, partition.clone(), self.format, rows)
        })
    }

    async fn csv_scanner(&mut self, text: &TextFile) -> Result<Scanner, DatasetError> {
        let options = &self.request.csv;
        let table = self.table.of(text, options).await?;
        let Some(table) = table else {
            // The file is empty.
            return Ok(Scanner::Lines(Format::Text, IdHasher::default()));
        };
        let have: Vec<String> = table.columns.iter().map(|column| column.name.clone()).collect();
        let place = format!("`{}` does not have", text.file.name);
        check_clash(&text.file.name, self.partitions, have.iter().map(String::as_str))?;
        if let Some(name) = options.types.keys().find(|name| !have.contains(name)) {
            return Err(missing_column(name, "`input.types` names", &place, &have));
        }
        let of_folders = self.partitions.iter().map(|column| column.name.clone());
        let all: Vec<String> = have.into_iter().chain(of_folders).collect();
        check_present(self.request, &all, &place)?;
        Ok(Scanner::Csv {
            table,
            has_header: options.columns.is_none(),
        })
    }

    /// Adds a block's rows after `rows` rows and `lines` lines of this file; returns the new row
    /// count.
    fn add_block(&mut self, block: BlockScan, input: u32, mut rows: u64, lines: u64) -> Result<u64, DatasetError> {
        for (hash, line) in block.custom_ids {
            if let Some((before, at)) = self.ids.add(hash, input, lines + line) {
                let (here, there) = (&self.names[input as usize], &self.names[before as usize]);
                let place = if before == input {
                    String::new()
                } else {
                    format!(" of `{there}`")
                };
                let why = format!(
                    "line {} of `{here}` has the `custom_id` of line {}{place}; each must be there once",
                    lines + line + 1,
                    at + 1
                );
                return Err(DatasetError::Refused(why));
            }
        }
        let is_csv = self.table.is_found();
        for place in block.rows {
            let bytes = place.bytes.end - place.bytes.start;
            let carried = if self.request.carry.is_empty() { 0 } else { bytes };
            let cost = RowCost {
                input_bytes: bytes,
                output_bytes: carried.saturating_add(self.request.output_row_bytes),
            };
            if self.builder.room(cost) == 0 {
                self.builder.close();
            }
            let segment = Segment {
                input,
                first_row: rows,
                rows: 1,
                bytes: Some((place.bytes.start, place.bytes.end)),
                line: is_csv.then_some(lines + place.line + 1),
                picks: None,
            };
            self.builder.push(segment, cost);
            rows += 1;
        }
        Ok(rows)
    }

    fn finish(self, files: Vec<InputFile>) -> Result<InputPlan, DatasetError> {
        let (request, format) = (self.request, self.format);
        let csv = self.table.typed(&request.csv, &self.kinds);
        let fields: Vec<Field> = match (&csv, format) {
            (Some(table), _) => table
                .columns
                .iter()
                .map(|column| column.kind.field(&column.name))
                .collect(),
            (None, Format::Text) => vec![Kinds::TEXT.field(TEXT_COLUMN)],
            (None, _) => self.kinds.iter().map(|(name, kinds)| kinds.field(name)).collect(),
        };
        let fields: Vec<Field> = fields
            .into_iter()
            .chain(self.partitions.iter().map(PartitionColumn::field))
            .collect();
        let have: Vec<String> = fields.iter().map(|field| field.name().clone()).collect();
        let total_rows = self.builder.rows();
        // Inputs without rows have no columns, so nothing is required of them.
        if total_rows > 0 {
            let place = match &files[..] {
                [one] => format!("no line of `{}` has", display_name(&one.url)),
                _ => "no line of the inputs has".to_string(),
            };
            let missing = |name: &&String| !have.contains(name);
            let wanted = request
                .columns
                .iter()
                .flatten()
                .find(missing)
                .map(|name| (name, "the prompt uses"));
            let carry = || {
                request
                    .carry
                    .iter()
                    .find(missing)
                    .map(|name| (name, "`output.carry` names"))
            };
            if let Some((name, wanted_by)) = wanted.or_else(carry) {
                return Err(missing_key(name, wanted_by, &place, &have));
            }
        }
        let carried = |name: &String| match fields.iter().find(|field| field.name() == name) {
            Some(field) => field.clone(),
            // This is for inputs without rows.
            None => Kinds::default().field(name),
        };
        let carry_schema = Arc::new(Schema::new(request.carry.iter().map(carried).collect::<Vec<_>>()));
        let columns = fields.iter().map(|field| Column {
            name: field.name().clone(),
            kind: field.data_type().to_string(),
        });
        let mixed = |name: &String| {
            let words = self.kinds.get(name)?.mixed()?;
            let line = format!(
                "column `{name}` holds {words}: it is carried as texts of JSON, in which `1` and `\"1\"` stay apart"
            );
            csv.is_none().then_some(line)
        };
        let notes = request.carry.iter().filter_map(mixed).collect();
        Ok(InputPlan {
            files,
            shards: self.builder.finish(),
            carry_schema,
            columns: columns.collect(),
            layout: Layout {
                csv,
                ..Layout::default()
            },
            total_rows,
            lacking: BTreeMap::new(),
            notes,
        })
    }
}

fn missing_key(name: &str, wanted_by: &str, place: &str, have: &[String]) -> DatasetError {
    if have.len() >= KEYS_MAX {
        let why =
            format!("{wanted_by} column `{name}`, which is not among the first {KEYS_MAX} different keys of the lines");
        return DatasetError::Refused(why);
    }
    missing_column(name, wanted_by, place, have)
}
