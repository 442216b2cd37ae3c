//! Plans files of lines and CSV files: reads every byte once to find the positions of the rows and
//! the types of the columns.
//!
//! See docs/decisions/039-a-skipped-file-leaves-nothing-behind.md.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::datatypes::{Field, Schema};
use futures::TryStreamExt;

use super::partitions::PartitionColumn;
use super::planner::{
    InputPlan, PlanRequest, SkippedFiles, SniffedFile, check_clash, check_columns_exist, input_file, missing_column,
    shard_bounds,
};
use super::{Column, Format, InputFile, RowCost, Segment, ShardBuilder};
use crate::dataset::csv::reader::SharedTable;
use crate::dataset::error::DatasetError;
use crate::dataset::kinds::{KEYS_MAX, Kinds};
use crate::dataset::layout::Layout;
use crate::dataset::lines::compression::Compressed;
use crate::dataset::lines::reader::{
    BlockScan, DuplicateIds, IdHasher, Scanner, StoredHash, TEXT_COLUMN, merge_kinds, scan,
};
use crate::dataset::lines::text_file::TextFile;
use crate::dataset::store::pinned_file::display_name;

/// Plans files of lines or CSV.
pub(crate) async fn plan_lines(
    request: &PlanRequest,
    found: Vec<SniffedFile>,
    format: Format,
    partitions: &[PartitionColumn],
    skipped: &mut SkippedFiles,
) -> Result<InputPlan, DatasetError> {
    let mut state = LinesPlanner {
        request,
        partitions,
        format,
        hasher: IdHasher::default(),
        builder: ShardBuilder::new(shard_bounds(request)),
        kinds: BTreeMap::new(),
        ids: DuplicateIds::default(),
        table: SharedTable::default(),
        file_names: Vec::new(),
    };
    let mut files = Vec::new();
    for source in found {
        let input = files.len() as u32;
        state.file_names.push(source.text.file.name.clone());
        let savepoint = state.builder.savepoint();
        match state.add_file(&source, input).await {
            Ok(file) => files.push(file),
            Err(error) => {
                skipped.skip_if_unreadable(&source.text.file, error)?;
                // The plan keeps nothing of this file.
                state.builder.roll_back(savepoint);
                state.ids.forget(input);
                state.file_names.pop();
            }
        }
        if state.builder.rows() >= request.rows_max() {
            break;
        }
    }
    state.finish(files)
}

/// State of planning lines.
struct LinesPlanner<'a> {
    request: &'a PlanRequest,
    partitions: &'a [PartitionColumn],
    format: Format,
    hasher: IdHasher,
    builder: ShardBuilder,
    kinds: BTreeMap<String, Kinds>,
    ids: DuplicateIds,
    /// The table that all CSV files share.
    table: SharedTable,
    file_names: Vec<String>,
}

impl LinesPlanner<'_> {
    /// Plans the lines of the next file, whose index is `input`.
    async fn add_file(&mut self, source: &SniffedFile, input: u32) -> Result<InputFile, DatasetError> {
        let SniffedFile { text, partition } = source;
        let limit = self.request.rows_max();
        let (mut rows, mut lines, mut bytes) = (0, 0, 0);
        let mut kinds = BTreeMap::new();
        let hash = StoredHash::default();
        let scanner = match self.format {
            Format::Csv => self.csv_scanner(text).await?,
            format => Scanner::Lines(format, self.hasher.clone()),
        };
        if self.format == Format::Text {
            check_clash(&text.file.name, self.partitions, [TEXT_COLUMN].into_iter())?;
        }
        let mut blocks = Box::pin(scan(text, scanner.clone(), &hash));
        let mut is_limit_reached = self.builder.rows() >= limit;
        while !is_limit_reached && let Some((piece, mut block)) = blocks.try_next().await? {
            bytes = piece.end();
            let rows_left = usize::try_from(limit - self.builder.rows()).unwrap_or(usize::MAX);
            if let Some(last) = rows_left.checked_sub(1).and_then(|n| block.rows.get(n))
                && block.rows.len() > rows_left
            {
                // Rows beyond the limit must not affect the columns' types.
                block = scanner.scan(piece.until(last.bytes.end));
            }
            let block_lines = block.lines;
            check_clash(&text.file.name, self.partitions, block.kinds.keys().map(String::as_str))?;
            merge_kinds(&mut kinds, std::mem::take(&mut block.kinds));
            rows = self.add_block(block, input, rows, lines)?;
            lines += block_lines;
            is_limit_reached = self.builder.rows() >= limit;
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
        let table = self.table.add_file(text, options).await?;
        let Some(table) = table else {
            // The file is empty.
            return Ok(Scanner::Lines(Format::Text, IdHasher::default()));
        };
        let available: Vec<String> = table.columns.iter().map(|column| column.name.clone()).collect();
        let missing_where = format!("`{}` does not have", text.file.name);
        check_clash(&text.file.name, self.partitions, available.iter().map(String::as_str))?;
        if let Some(name) = options.types.keys().find(|name| !available.contains(name)) {
            return Err(missing_column(name, "`input.types` names", &missing_where, &available));
        }
        let of_folders = self.partitions.iter().map(|column| column.name.clone());
        let all: Vec<String> = available.into_iter().chain(of_folders).collect();
        check_columns_exist(self.request, &all, &missing_where)?;
        Ok(Scanner::Csv {
            table,
            has_header: options.columns.is_none(),
        })
    }

    /// Adds the rows of a block that follows `rows` rows and `lines` lines of the same file.
    /// Returns the file's number of rows so far.
    fn add_block(&mut self, block: BlockScan, input: u32, mut rows: u64, lines: u64) -> Result<u64, DatasetError> {
        for (hash, line) in block.custom_ids {
            if let Some((first_input, first_line)) = self.ids.add(hash, input, lines + line) {
                let file = &self.file_names[input as usize];
                let of_first_file = if first_input == input {
                    String::new()
                } else {
                    format!(" of `{}`", self.file_names[first_input as usize])
                };
                let why = format!(
                    "line {} of `{file}` has the `custom_id` of line {}{of_first_file}; each must be there once",
                    lines + line + 1,
                    first_line + 1
                );
                return Err(DatasetError::Refused(why));
            }
        }
        let is_csv = self.table.is_known();
        for row in block.rows {
            let bytes = row.bytes.end - row.bytes.start;
            let carried = if self.request.carry.is_empty() { 0 } else { bytes };
            let cost = RowCost {
                input_bytes: bytes,
                output_bytes: carried.saturating_add(self.request.output_row_bytes),
            };
            if self.builder.rows_that_fit(cost) == 0 {
                self.builder.close();
            }
            let segment = Segment {
                input,
                first_row: rows,
                rows: 1,
                bytes: Some((row.bytes.start, row.bytes.end)),
                line: is_csv.then_some(lines + row.line + 1),
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
        let available: Vec<String> = fields.iter().map(|field| field.name().clone()).collect();
        let total_rows = self.builder.rows();
        // Inputs without rows have no columns, so none can be required.
        if total_rows > 0 {
            let missing_where = match &files[..] {
                [one] => format!("no line of `{}` has", display_name(&one.url)),
                _ => "no line of the inputs has".to_string(),
            };
            let missing = |name: &&String| !available.contains(name);
            let by_prompt = request
                .columns
                .iter()
                .flatten()
                .find(missing)
                .map(|name| (name, "the prompt uses"));
            let by_carry = || {
                request
                    .carry
                    .iter()
                    .find(missing)
                    .map(|name| (name, "`output.carry` names"))
            };
            if let Some((name, wanted_by)) = by_prompt.or_else(by_carry) {
                return Err(missing_key(name, wanted_by, &missing_where, &available));
            }
        }
        let carried = |name: &String| match fields.iter().find(|field| field.name() == name) {
            Some(field) => field.clone(),
            // Without rows, a carried column may be missing.
            None => Kinds::default().field(name),
        };
        let carry_schema = Arc::new(Schema::new(request.carry.iter().map(carried).collect::<Vec<_>>()));
        let columns = fields.iter().map(|field| Column {
            name: field.name().clone(),
            kind: field.data_type().to_string(),
        });
        let mixed = |name: &String| {
            let words = self.kinds.get(name)?.mixed_names()?;
            let line = format!(
                "column `{name}` holds {words}: it is carried as JSON text, in which `1` and `\"1\"` stay different"
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
            missing_in: BTreeMap::new(),
            notes,
        })
    }
}

fn missing_key(name: &str, wanted_by: &str, missing_where: &str, available: &[String]) -> DatasetError {
    if available.len() >= KEYS_MAX {
        let why =
            format!("{wanted_by} column `{name}`, which is not among the first {KEYS_MAX} different keys of the lines");
        return DatasetError::Refused(why);
    }
    missing_column(name, wanted_by, missing_where, available)
}
