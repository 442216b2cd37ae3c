//! Planning: addresses → pinned files → shards, streaming, with everything checked that can be checked before the start.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path as FsPath;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use futures::{StreamExt, TryStreamExt, stream};
use serde::{Deserialize, Serialize};

use super::discover::discover;
use super::error::DatasetError;
use super::kinds::{KEYS_MAX, Kinds};
use super::lines_in::{BlockScan, IdCheck, IdHasher, LinesHash, TEXT_COLUMN, merge_kinds, scan, scan_piece};
use super::parquet_in::ParquetFile;
use super::pinned::PinnedFile;
use super::plan::{Column, Format, InputFile, RowCost, Shard, ShardBounds, ShardBuilder};
use super::schema_text;
use super::sniff::sniff;

/// Largest part, estimated before compression: parts are single puts.
const PART_BYTES_MAX: u64 = 256 << 20;

/// Most uncompressed input of one shard, which is held in memory while it is worked on.
const SHARD_INPUT_BYTES_MAX: u64 = 64 << 20;

/// Files whose first bytes are read at once: each is one small request.
const HEADS_AT_ONCE: usize = 32;

/// Footers read at once. A wide file's footer may take 50 MB while it is decoded.
const FOOTERS_AT_ONCE: usize = 16;

/// Files hashed at once: each holds a step of its bytes.
const HASHES_AT_ONCE: usize = 4;

/// What is to be planned.
#[derive(Debug, Clone)]
pub struct PlanRequest {
    /// Files, folders and globs.
    pub uris: Vec<String>,
    /// The format that the job names; `None`: told by content.
    pub format: Option<Format>,
    /// The columns that the prompt uses; each must be there. `None`: all.
    pub columns: Option<Vec<String>>,
    /// The columns that are copied to the output; each must be there.
    pub carry: Vec<String>,
    /// Names of output columns, which a carried column cannot have (see `OutputSchema::names`).
    pub reserved: Vec<String>,
    /// Most rows of a shard.
    pub shard_rows: u64,
    /// Estimated bytes that a row adds to its part, besides what it carries: about 12 for each token it may generate.
    pub output_row_bytes: u64,
    /// Only the first so many rows.
    pub limit: Option<u64>,
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
    /// All columns of the inputs (of lines: every key seen, up to 4,096).
    pub columns: Vec<Column>,
    pub total_rows: u64,
}

/// Plans the inputs of a job.
pub async fn plan_inputs(request: &PlanRequest, base_dir: &FsPath) -> Result<InputPlan, DatasetError> {
    check_names(request)?;
    let found = discover(&request.uris, base_dir).await?;
    let formats: Vec<Option<Format>> = stream::iter(found.iter().cloned().map(|file| {
        let told = request.format;
        async move { sniff(&file, told).await }
    }))
    .buffered(HEADS_AT_ONCE)
    .try_collect()
    .await?;
    let format = one_format(&found, &formats)?;
    match format {
        Format::Parquet => plan_parquet(request, found).await,
        _ => plan_lines(request, found, format).await,
    }
}

fn check_names(request: &PlanRequest) -> Result<(), DatasetError> {
    let mut seen = BTreeSet::new();
    for name in &request.carry {
        if request.reserved.contains(name) {
            let why = format!(
                "carried column `{name}` has the name of an output column; rename it in the input or do not carry it"
            );
            return Err(DatasetError::Refused(why));
        }
        if !seen.insert(name) {
            return Err(DatasetError::Refused(format!("column `{name}` is carried twice")));
        }
    }
    Ok(())
}

fn one_format(found: &[PinnedFile], formats: &[Option<Format>]) -> Result<Format, DatasetError> {
    let mut known = found
        .iter()
        .zip(formats)
        .filter_map(|(file, format)| format.map(|f| (file, f)));
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

fn input_file(file: &PinnedFile, format: Format, rows: u64) -> InputFile {
    InputFile {
        url: file.location.url.to_string(),
        format,
        size: file.size,
        etag: file.etag.clone(),
        version: file.version.clone(),
        sha256: None,
        rows,
    }
}

/// Reads the inputs that have no hash yet once, and gives them one: what a change of ETag is judged by later on.
pub async fn hash_inputs(plan: &mut InputPlan) -> Result<(), DatasetError> {
    let unhashed = plan.files.iter_mut().filter(|file| file.sha256.is_none());
    let hashes = unhashed.map(|file| async move {
        let pinned = PinnedFile::open(file)?;
        let name = pinned.name.clone();
        // A task of its own: hashing keeps a core busy.
        let hash = tokio::spawn(async move { pinned.sha256().await }).await;
        file.sha256 = Some(hash.map_err(|e| DatasetError::unreadable(&name, e))??);
        Ok(())
    });
    stream::iter(hashes)
        .buffer_unordered(HASHES_AT_ONCE)
        .try_collect()
        .await
}

fn bounds(request: &PlanRequest) -> ShardBounds {
    ShardBounds {
        rows: request.shard_rows,
        input_bytes: SHARD_INPUT_BYTES_MAX,
        output_bytes: PART_BYTES_MAX,
    }
}

/// The error for a column that no input has, with the nearest name; `place` goes on "which …".
fn missing_column(name: &str, wanted_by: &str, place: &str, have: &[String]) -> DatasetError {
    let distance = |other: &&String| strsim::damerau_levenshtein(&name.to_lowercase(), &other.to_lowercase());
    let near = have
        .iter()
        .min_by_key(distance)
        .filter(|other| distance(other) <= 1 + name.len() / 3);
    let hint = match near {
        Some(near) => format!("; did you mean `{near}`?"),
        None if have.is_empty() => String::new(),
        None => {
            let mut names: Vec<String> = have.iter().take(12).map(|n| format!("`{n}`")).collect();
            if have.len() > names.len() {
                names.push("…".into());
            }
            format!("; it has {}", names.join(", "))
        }
    };
    DatasetError::Refused(format!("{wanted_by} column `{name}`, which {place}{hint}"))
}

fn check_present(request: &PlanRequest, have: &[String], place: &str) -> Result<(), DatasetError> {
    for name in request.columns.iter().flatten() {
        if !have.contains(name) {
            return Err(missing_column(name, "the prompt uses", place, have));
        }
    }
    match request.carry.iter().find(|name| !have.contains(name)) {
        Some(name) => Err(missing_column(name, "`output.carry` names", place, have)),
        None => Ok(()),
    }
}

/// What planning needs of a Parquet file; its decoded footer, which may be a thousand times larger, is dropped at once.
struct ParquetPlan {
    pinned: PinnedFile,
    schema: SchemaRef,
    /// The columns that this job uses.
    used: Vec<String>,
    groups: Vec<GroupPlan>,
}

struct GroupPlan {
    rows: u64,
    /// Of each row.
    cost: RowCost,
}

async fn plan_parquet(request: &PlanRequest, found: Vec<PinnedFile>) -> Result<InputPlan, DatasetError> {
    let mut builder = ShardBuilder::new(bounds(request));
    let mut files = Vec::new();
    let mut first: Option<(String, SchemaRef)> = None;
    let limit = request.limit.unwrap_or(u64::MAX);
    let mut footers =
        stream::iter(found.into_iter().map(|file| read_parquet_plan(request, file))).buffered(FOOTERS_AT_ONCE);
    while let Some(file) = footers.try_next().await? {
        match &first {
            None => first = Some((file.pinned.name.clone(), file.schema.clone())),
            Some((name, schema)) => check_same_types(schema, name, &file)?,
        }
        let before = builder.rows();
        push_parquet_file(&file.groups, limit - before, files.len() as u32, &mut builder);
        files.push(input_file(&file.pinned, Format::Parquet, builder.rows() - before));
        if builder.rows() >= limit {
            break;
        }
    }
    let schema = first.map_or_else(|| Arc::new(Schema::empty()), |(_, schema)| schema);
    let columns = schema.fields().iter().map(|f| Column {
        name: f.name().clone(),
        kind: f.data_type().to_string(),
    });
    let columns = columns.collect();
    let carry: Vec<Field> = request
        .carry
        .iter()
        .filter_map(|name| schema.field_with_name(name).ok())
        .map(carried)
        .collect();
    let total_rows = builder.rows();
    Ok(InputPlan {
        files,
        shards: builder.finish(),
        carry_schema: Arc::new(Schema::new(carry)),
        columns,
        total_rows,
    })
}

async fn read_parquet_plan(request: &PlanRequest, pinned: PinnedFile) -> Result<ParquetPlan, DatasetError> {
    let file = ParquetFile::open(pinned).await?;
    let used = check_parquet_columns(request, &file)?;
    let group = |group: usize| {
        let rows = file.group_rows(group);
        let each = |bytes: u64| bytes / rows.max(1);
        GroupPlan {
            rows,
            cost: RowCost {
                input_bytes: each(file.group_bytes(group, &used)),
                output_bytes: each(file.group_bytes(group, &request.carry)).saturating_add(request.output_row_bytes),
            },
        }
    };
    Ok(ParquetPlan {
        groups: (0..file.group_count()).map(group).collect(),
        schema: file.schema().clone(),
        pinned: file.pinned().clone(),
        used,
    })
}

/// A carried column may be null in another file than the first, and where its row cannot be read.
fn carried(field: &Field) -> Field {
    field.clone().with_nullable(true)
}

/// The columns of `file` that this job uses, checked.
fn check_parquet_columns(request: &PlanRequest, file: &ParquetFile) -> Result<Vec<String>, DatasetError> {
    let have: Vec<String> = file.schema().fields().iter().map(|f| f.name().clone()).collect();
    check_present(request, &have, &format!("`{}` does not have", file.name()))?;
    let mut used = request.columns.clone().unwrap_or_else(|| have.clone());
    used.extend(request.carry.iter().cloned());
    used.sort();
    used.dedup();
    if let Some(name) = used.iter().find(|name| have.iter().filter(|h| h == name).count() > 1) {
        return Err(DatasetError::Refused(format!(
            "`{}` has two columns `{name}`; rename one",
            file.name()
        )));
    }
    file.check_columns(&used)?;
    Ok(used)
}

/// Columns in use have one type over all files; texts may differ in how long they may be.
fn check_same_types(schema: &Schema, name: &str, file: &ParquetPlan) -> Result<(), DatasetError> {
    for column in &file.used {
        let (Ok(here), Ok(there)) = (file.schema.field_with_name(column), schema.field_with_name(column)) else {
            continue;
        };
        if !same_type(here.data_type(), there.data_type()) {
            return Err(DatasetError::Refused(format!(
                "column `{column}` is {} in `{name}` and {} in `{}`; make them one type, or run the files as separate jobs",
                there.data_type(),
                here.data_type(),
                file.pinned.name
            )));
        }
    }
    Ok(())
}

/// Do the types hold the same values? Then a cast of one to the other loses nothing.
pub fn same_type(a: &DataType, b: &DataType) -> bool {
    let is_text = |t: &DataType| matches!(t, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View);
    let is_binary = |t: &DataType| matches!(t, DataType::Binary | DataType::LargeBinary | DataType::BinaryView);
    a.equals_datatype(b) || (is_text(a) && is_text(b)) || (is_binary(a) && is_binary(b))
}

/// Adds the first `rows` rows of a file.
fn push_parquet_file(groups: &[GroupPlan], rows: u64, input: u32, builder: &mut ShardBuilder) {
    let mut at = 0;
    for group in groups {
        let take = group.rows.min(rows - at);
        if take == 0 {
            continue;
        }
        builder.push_run(input, at, take, group.cost);
        at += take;
    }
}

async fn plan_lines(request: &PlanRequest, found: Vec<PinnedFile>, format: Format) -> Result<InputPlan, DatasetError> {
    let mut state = LinesPlan {
        request,
        builder: ShardBuilder::new(bounds(request)),
        kinds: BTreeMap::new(),
        ids: IdCheck::default(),
        names: Vec::new(),
    };
    let hasher = IdHasher::default();
    let limit = request.limit.unwrap_or(u64::MAX);
    let mut files = Vec::new();
    for file in found {
        let input = files.len() as u32;
        state.names.push(file.name.clone());
        let (mut rows, mut lines) = (0, 0);
        let hash = LinesHash::default();
        let mut blocks = Box::pin(scan(&file, format, hasher.clone(), &hash));
        while state.builder.rows() < limit
            && let Some((piece, mut block)) = blocks.try_next().await?
        {
            let wanted = usize::try_from(limit - state.builder.rows()).unwrap_or(usize::MAX);
            if let Some(last) = wanted.checked_sub(1).and_then(|n| block.rows.get(n))
                && block.rows.len() > wanted
            {
                // What lies behind the limit must not decide the columns' types.
                block = scan_piece(piece.until(last.end), format, &hasher);
            }
            let block_lines = block.lines;
            rows = state.add_block(block, input, rows, lines)?;
            lines += block_lines;
        }
        drop(blocks);
        files.push(InputFile {
            // A trial reads no further than its last row.
            sha256: request.limit.is_none().then(|| hash.finish()),
            ..input_file(&file, format, rows)
        });
        if state.builder.rows() >= limit {
            break;
        }
    }
    state.finish(files, format)
}

/// Lines planned so far.
struct LinesPlan<'a> {
    request: &'a PlanRequest,
    builder: ShardBuilder,
    kinds: BTreeMap<String, Kinds>,
    ids: IdCheck,
    names: Vec<String>,
}

impl LinesPlan<'_> {
    /// Adds a block's rows after `rows` rows and `lines` lines of this file; answers the rows now.
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
        merge_kinds(&mut self.kinds, block.kinds);
        for place in block.rows {
            let bytes = place.end - place.start;
            let carried = if self.request.carry.is_empty() { 0 } else { bytes };
            let cost = RowCost {
                input_bytes: bytes,
                output_bytes: carried.saturating_add(self.request.output_row_bytes),
            };
            if self.builder.room(cost) == 0 {
                self.builder.close();
            }
            self.builder.push(input, rows, 1, cost, Some((place.start, place.end)));
            rows += 1;
        }
        Ok(rows)
    }

    fn finish(self, files: Vec<InputFile>, format: Format) -> Result<InputPlan, DatasetError> {
        let request = self.request;
        let kinds = match format {
            Format::Text => [(TEXT_COLUMN.to_string(), Kinds::TEXT)].into(),
            _ => self.kinds,
        };
        let have: Vec<String> = kinds.keys().cloned().collect();
        let total_rows = self.builder.rows();
        // Without a row there is nothing to tell the columns from, and nothing to ask of them.
        if total_rows > 0 {
            let place = match &files[..] {
                [one] => format!("no line of `{}` has", super::pinned::display_name(&one.url)),
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
        let field = |name: &String| kinds.get(name).copied().unwrap_or_default().field(name);
        let carry_schema = Arc::new(Schema::new(request.carry.iter().map(field).collect::<Vec<_>>()));
        let columns = have.iter().map(|name| Column {
            name: name.clone(),
            kind: field(name).data_type().to_string(),
        });
        let columns = columns.collect();
        Ok(InputPlan {
            files,
            shards: self.builder.finish(),
            carry_schema,
            columns,
            total_rows,
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
