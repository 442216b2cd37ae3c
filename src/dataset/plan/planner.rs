//! Plans a job's inputs: finds the files, cuts their rows into shards, and makes all checks that
//! are possible before the start. At no time does it hold a whole input in memory.
//!
//! See docs/decisions/042-a-job-without-rows-has-one-shard.md.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path as FsPath;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, FieldRef, Schema, SchemaRef};
use futures::{StreamExt, TryStreamExt, stream};
use serde::{Deserialize, Serialize};

use super::inputs::{Input, Inputs, find_inputs};
use super::lines::plan_lines;
use super::partitions::PartitionColumn;
use super::sample::INPUT_ROW;
use super::tables::plan_tables;
use super::{Column, Format, InputFile, Shard, ShardBounds};
use crate::dataset::arrow::schema_text;
use crate::dataset::csv::layout::CsvOptions;
use crate::dataset::error::DatasetError;
use crate::dataset::layout::{Layout, SkippedFile};
use crate::dataset::lines::text_file::TextFile;
use crate::dataset::options::InputOptions;
use crate::dataset::sniff::sniff;
use crate::dataset::store::location::Location;
use crate::dataset::store::pinned_file::{PinnedFile, display_name};

/// Maximum estimated size of a part before compression. A part is written with a single put.
const PART_BYTES_MAX: u64 = 256 << 20;

/// Maximum uncompressed input of one shard, which is held in memory while the shard is processed.
const SHARD_INPUT_BYTES_MAX: u64 = 64 << 20;

/// Number of files whose heads are read concurrently; each read is one small request.
const HEADS_AT_ONCE: usize = 32;

/// Number of files hashed concurrently. Each one holds at most 1 MiB or one network chunk.
const HASHES_AT_ONCE: usize = 4;

/// Parameters of planning.
#[derive(Debug, Clone)]
pub struct PlanRequest {
    /// Files, folders and globs.
    pub uris: Vec<String>,
    /// The format that the job names; `None`: detected by content.
    pub format: Option<Format>,
    /// The CSV settings of the job.
    pub csv: CsvOptions,
    pub options: InputOptions,
    /// The columns that the prompt requires. `None`: the caller checks that they exist.
    pub columns: Option<Vec<String>>,
    /// All columns that the prompt uses, required or optional. `None`: all.
    pub used_columns: Option<Vec<String>>,
    /// The columns that are copied to the output; each must exist.
    pub carry: Vec<String>,
    /// Names of output columns, which a carried column cannot have (see `OutputSchema::own_names`).
    pub reserved: Vec<String>,
    /// Maximum rows per shard.
    pub shard_rows: u64,
    /// Estimated bytes per row of a part, without carried columns: about 12 for each token that the
    /// row may generate.
    pub output_row_bytes: u64,
    /// Row limit of a trial.
    pub limit: Option<u64>,
    /// The job's output. An input in it is refused.
    pub output: Option<Location>,
}

impl PlanRequest {
    /// Maximum rows of the plan.
    pub(crate) fn rows_max(&self) -> u64 {
        // A sample is drawn from all rows, even in a trial.
        let limits = match self.options.sample {
            Some(_) => [None, None],
            None => [self.limit, self.options.limit],
        };
        limits.into_iter().flatten().min().unwrap_or(u64::MAX)
    }
}

/// A planned input: plain data for the ledger.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InputPlan {
    /// The files that rows are taken from, in order.
    pub files: Vec<InputFile>,
    pub shards: Vec<Shard>,
    /// The carried columns, in the job's order, with their exact types.
    #[serde(with = "schema_text")]
    pub carry_schema: SchemaRef,
    /// All columns of the inputs. For JSON lines, these are the keys of all lines, up to 4,096.
    pub columns: Vec<Column>,
    #[serde(flatten)]
    pub layout: Layout,
    pub total_rows: u64,
    /// Columns that some file lacks, with the first such file.
    #[serde(skip)]
    pub missing_in: BTreeMap<String, String>,
    /// Notes for the person who starts the job, a line each.
    #[serde(skip)]
    pub notes: Vec<String>,
}

/// A file whose first bytes were read to detect its format and compression.
pub(crate) struct SniffedFile {
    pub(crate) text: TextFile,
    /// The partition texts from its folders.
    pub(crate) partition: Vec<Option<String>>,
}

/// The files that were skipped as unreadable, and whether the job allows that.
pub(crate) struct SkippedFiles {
    is_allowed: bool,
    files: Vec<SkippedFile>,
}

impl SkippedFiles {
    /// Skips `file` if `error` says that it is unreadable and the job allows skipping; returns
    /// `error` otherwise.
    pub(crate) fn skip_if_unreadable(&mut self, file: &PinnedFile, error: DatasetError) -> Result<(), DatasetError> {
        match error {
            DatasetError::Unreadable { why, .. } if self.is_allowed => {
                self.files.push(SkippedFile::new(file, &why));
                Ok(())
            }
            error => Err(error),
        }
    }
}

/// Plans the inputs of a job.
pub async fn plan_inputs(request: &PlanRequest, base_dir: &FsPath) -> Result<InputPlan, DatasetError> {
    let Some(sample) = request.options.sample else {
        return plan_all(request, base_dir).await;
    };
    // No file holds `input_row`, so planning must not look for it.
    let mut full_request = request.clone();
    full_request.carry.retain(|name| name != INPUT_ROW);
    let mut plan = plan_all(&full_request, base_dir).await?;
    if plan.columns.iter().any(|column| column.name == INPUT_ROW) {
        return Err(DatasetError::Refused(format!(
            "the inputs have a column `{INPUT_ROW}`, and so has the output of a sample; rename it"
        )));
    }
    let rows_max = request.limit.unwrap_or(u64::MAX);
    let drawn = sample.draw(std::mem::take(&mut plan.shards), rows_max, request.shard_rows);
    plan.shards = drawn.map_err(DatasetError::Refused)?;
    let total_before = std::mem::replace(&mut plan.total_rows, plan.shards.iter().map(|shard| shard.rows).sum());
    if plan.total_rows == 0 && total_before > 0 {
        plan.notes.push(format!(
            "`input.sample` draws none of {total_before} rows: the job has no row"
        ));
    }
    let row_field = Arc::new(Field::new(INPUT_ROW, DataType::Int64, true));
    let fields = plan.carry_schema.fields().iter().cloned().chain([row_field]);
    plan.carry_schema = Arc::new(Schema::new(fields.collect::<Vec<FieldRef>>()));
    plan.layout.sample = Some(sample);
    Ok(plan)
}

async fn plan_all(request: &PlanRequest, base_dir: &FsPath) -> Result<InputPlan, DatasetError> {
    check_carried_names(request)?;
    let Inputs {
        files,
        partitions,
        notes,
    } = find_inputs(&request.uris, &request.options, base_dir, request.output.as_ref()).await?;
    let mut skipped = SkippedFiles {
        is_allowed: request.options.skip_unreadable,
        files: Vec::new(),
    };
    let mut sniffed = Vec::with_capacity(files.len());
    let mut heads = stream::iter(files.into_iter().map(|input| {
        let requested = request.format;
        async move { (sniff(&input.file, requested).await, input) }
    }))
    .buffered(HEADS_AT_ONCE);
    while let Some((found, Input { file, partition })) = heads.next().await {
        match found {
            Ok((text, format)) => sniffed.push((SniffedFile { text, partition }, format)),
            Err(error) => skipped.skip_if_unreadable(&file, error)?,
        }
    }
    let format = common_format(&sniffed)?;
    let is_known = sniffed.iter().any(|(_, format)| format.is_some());
    if is_known && format != Format::Csv && !request.csv.is_default() {
        return Err(DatasetError::Refused(format!(
            "`input.delimiter`, `input.columns` and `input.types` are for CSV, and the inputs are {}",
            format.as_str()
        )));
    }
    let found = sniffed.into_iter().map(|(source, _)| source).collect();
    let mut plan = match format {
        format if format.is_table() => plan_tables(request, found, format, &partitions, &mut skipped).await?,
        _ => plan_lines(request, found, format, &partitions, &mut skipped).await?,
    };
    if let (true, Some(first)) = (plan.files.is_empty(), skipped.files.first()) {
        let which = match skipped.files.len() {
            1 => "the only input cannot be read:".to_string(),
            count => format!("none of the {count} inputs can be read; the first is"),
        };
        return Err(DatasetError::Refused(format!("{which} {}", first.name_and_reason())));
    }
    plan.notes.splice(0..0, notes);
    plan.notes.extend(SkippedFile::summary(&skipped.files));
    plan.notes.extend(no_rows_note(&plan));
    plan.layout.skipped = skipped.files;
    plan.layout.skip_unreadable = request.options.skip_unreadable && format.is_table();
    plan.layout.partitions = partitions;
    plan.layout.limit = request.options.limit;
    Ok(plan)
}

/// The note about a job without rows, which would otherwise succeed silently.
fn no_rows_note(plan: &InputPlan) -> Option<String> {
    let what = match &plan.files[..] {
        [one] => format!("`{}` has no row", display_name(&one.url)),
        [first, ..] => format!(
            "none of {} inputs has a row, such as `{}`",
            plan.files.len(),
            display_name(&first.url)
        ),
        [] => "the inputs have no row".to_string(),
    };
    (plan.total_rows == 0).then(|| format!("{what}: the job writes one part without rows"))
}

fn check_carried_names(request: &PlanRequest) -> Result<(), DatasetError> {
    let mut seen = BTreeSet::new();
    for name in &request.carry {
        if request.reserved.contains(name) {
            let why = format!(
                "carried column `{name}` has the name of an output column; carry it under another name: `output.carry: {{input_{name}: {name}}}`"
            );
            return Err(DatasetError::Refused(why));
        }
        if !seen.insert(name) {
            return Err(DatasetError::Refused(format!("column `{name}` is carried twice")));
        }
    }
    Ok(())
}

fn common_format(sniffed: &[(SniffedFile, Option<Format>)]) -> Result<Format, DatasetError> {
    let mut known = sniffed
        .iter()
        .filter_map(|(source, format)| format.map(|f| (&source.text.file, f)));
    let Some((first, format)) = known.next() else {
        return Ok(Format::Jsonl);
    };
    match known.find(|(_, other)| *other != format) {
        None => Ok(format),
        Some((file, other)) => Err(DatasetError::Refused(format!(
            "the inputs mix formats: `{}` is {}, `{}` is {}; run them as separate jobs",
            first.name,
            format.as_str(),
            file.name,
            other.as_str()
        ))),
    }
}

pub(crate) fn input_file(file: &PinnedFile, partition: Vec<Option<String>>, format: Format, rows: u64) -> InputFile {
    InputFile {
        url: file.location.url.to_string(),
        format,
        size: file.size,
        etag: file.etag.clone(),
        version: file.version.clone(),
        sha256: None,
        compressed: None,
        partition,
        rows,
    }
}

/// Refuses a column of the file `name` that its folders give, too.
pub(crate) fn check_clash<'a>(
    name: &str,
    partitions: &[PartitionColumn],
    mut columns: impl Iterator<Item = &'a str>,
) -> Result<(), DatasetError> {
    match columns.find(|column| partitions.iter().any(|partition| partition.name == *column)) {
        None => Ok(()),
        Some(column) => Err(DatasetError::Refused(format!(
            "`{name}` has a column `{column}`, and so has its folder `{column}=…`; rename one, or set `input.hive: false` to ignore the names \
             of folders"
        ))),
    }
}

/// The partition columns, for messages.
pub(crate) fn folder_columns(partitions: &[PartitionColumn]) -> impl Iterator<Item = Column> {
    partitions.iter().map(|column| Column {
        name: column.name.clone(),
        kind: column.field().data_type().to_string(),
    })
}

/// Adds the hash of each input that has none, which reads the whole input. If an ETag changes
/// later, the hash decides whether the bytes have changed.
pub async fn hash_inputs(plan: &mut InputPlan) -> Result<(), DatasetError> {
    let unhashed = plan.files.iter_mut().filter(|file| file.sha256.is_none());
    let hashes = unhashed.map(|file| async move {
        let pinned = PinnedFile::open(file)?;
        let name = pinned.name.clone();
        // This is a separate task, since hashing keeps a core busy.
        let hash = tokio::spawn(async move { pinned.sha256().await }).await;
        file.sha256 = Some(hash.map_err(|e| DatasetError::unreadable(&name, e))??);
        Ok(())
    });
    stream::iter(hashes)
        .buffer_unordered(HASHES_AT_ONCE)
        .try_collect()
        .await
}

pub(crate) fn shard_bounds(request: &PlanRequest) -> ShardBounds {
    ShardBounds {
        rows: request.shard_rows,
        input_bytes: SHARD_INPUT_BYTES_MAX,
        output_bytes: PART_BYTES_MAX,
    }
}

/// The error for a missing column, with the most similar name. `missing_where` follows the word
/// "which" in the message.
pub(crate) fn missing_column(name: &str, wanted_by: &str, missing_where: &str, available: &[String]) -> DatasetError {
    let distance = |other: &&String| strsim::damerau_levenshtein(&name.to_lowercase(), &other.to_lowercase());
    let nearest = available
        .iter()
        .min_by_key(distance)
        .filter(|other| distance(other) <= 1 + name.len() / 3);
    let hint = match nearest {
        Some(nearest) => format!("; did you mean `{nearest}`?"),
        None if available.is_empty() => String::new(),
        None => {
            let mut names: Vec<String> = available.iter().take(12).map(|n| format!("`{n}`")).collect();
            if available.len() > names.len() {
                names.push("…".into());
            }
            format!("; it has {}", names.join(", "))
        }
    };
    DatasetError::Refused(format!("{wanted_by} column `{name}`, which {missing_where}{hint}"))
}

pub(crate) fn check_columns_exist(
    request: &PlanRequest,
    available: &[String],
    missing_where: &str,
) -> Result<(), DatasetError> {
    for name in request.columns.iter().flatten() {
        if !available.contains(name) {
            return Err(missing_column(name, "the prompt uses", missing_where, available));
        }
    }
    match request.carry.iter().find(|name| !available.contains(name)) {
        Some(name) => Err(missing_column(name, "`output.carry` names", missing_where, available)),
        None => Ok(()),
    }
}
