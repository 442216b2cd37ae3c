//! Plans Parquet and Arrow files: cuts their rows into shards, and reads only the footers.
//!
//! Files may differ in their columns. If a file lacks a column that the job needs, the job is
//! refused; with `input.missing_columns: nulls`, the column is null in that file. A column has one
//! type in all files: the widest one, if the conversion loses nothing.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use futures::{StreamExt, stream};

use super::partitions::PartitionColumn;
use super::planner::{
    InputPlan, PlanRequest, SkippedFiles, SniffedFile, check_clash, check_columns_exist, folder_columns, input_file,
    shard_bounds,
};
use super::{Column, Format, RowCost, ShardBuilder};
use crate::dataset::arrow::reader::BlockCache;
use crate::dataset::error::DatasetError;
use crate::dataset::options::MissingColumns;
use crate::dataset::store::pinned_file::PinnedFile;
use crate::dataset::table::TableFile;

/// Number of footers read concurrently. The footer of a file with many columns may take 50 MB while
/// it is decoded.
const FOOTERS_AT_ONCE: usize = 16;

/// The contents of a footer that planning needs. The decoded footer may be a thousand times larger,
/// and is dropped at once.
struct TablePlan {
    pinned: PinnedFile,
    schema: SchemaRef,
    groups: Vec<GroupPlan>,
}

struct GroupPlan {
    rows: u64,
    /// Cost per row.
    cost: RowCost,
}

/// Plans files of Parquet or Arrow.
pub(crate) async fn plan_tables(
    request: &PlanRequest,
    found: Vec<SniffedFile>,
    format: Format,
    partitions: &[PartitionColumn],
    skipped: &mut SkippedFiles,
) -> Result<InputPlan, DatasetError> {
    let mut builder = ShardBuilder::new(shard_bounds(request));
    let mut files = Vec::new();
    let mut columns = MergedSchema::default();
    let limit = request.rows_max();
    let mut footers = stream::iter(found.into_iter().map(|SniffedFile { text, partition }| async move {
        let planned = plan_file(request, text.file.clone(), format, partitions).await;
        (planned, text.file, partition)
    }))
    .buffered(FOOTERS_AT_ONCE);
    while let Some((planned, file, partition)) = footers.next().await {
        let planned = match planned {
            Ok(planned) => planned,
            Err(error) => {
                skipped.skip_if_unreadable(&file, error)?;
                continue;
            }
        };
        columns.add(&planned, |name| is_used(request, name))?;
        let before = builder.rows();
        push_row_groups(&planned.groups, limit - before, files.len() as u32, &mut builder);
        let rows = builder.rows() - before;
        files.push(input_file(&planned.pinned, partition, format, rows));
        if builder.rows() >= limit {
            break;
        }
    }
    drop(footers);
    let available: Vec<String> = columns
        .fields
        .iter()
        .map(|field| field.name().clone())
        .chain(partitions.iter().map(|column| column.name.clone()))
        .collect();
    if !files.is_empty() {
        check_columns_exist(request, &available, "no input has")?;
    }
    let field = |name: &String| match partitions.iter().find(|column| column.name == *name) {
        Some(column) => Some(column.field()),
        // A file may lack the column, and its cells are null in unreadable rows.
        None => columns.field(name).map(|field| field.clone().with_nullable(true)),
    };
    let carry: Vec<Field> = request.carry.iter().filter_map(field).collect();
    let named = columns.fields.iter().map(|field| Column {
        name: field.name().clone(),
        kind: field.data_type().to_string(),
    });
    let mut plan = InputPlan {
        files,
        carry_schema: Arc::new(Schema::new(carry)),
        columns: named.chain(folder_columns(partitions)).collect(),
        total_rows: builder.rows(),
        shards: builder.finish(),
        missing_in: columns.missing_in,
        notes: columns.notes,
        layout: Default::default(),
    };
    if request.options.missing_columns == MissingColumns::Nulls {
        let missing_in = std::mem::take(&mut plan.missing_in);
        let read = missing_in.iter().filter(|(column, _)| is_used(request, column));
        let note = |(column, file): (&String, &String)| {
            format!("column `{column}` is not in `{file}`: it is null in such files")
        };
        plan.notes.extend(read.map(note));
        plan.layout.absent = missing_in.into_keys().collect();
    }
    Ok(plan)
}

/// Whether the job reads this column.
fn is_used(request: &PlanRequest, name: &str) -> bool {
    let used = request.used_columns.as_ref().or(request.columns.as_ref());
    used.is_none_or(|used| used.iter().any(|used| used == name)) || request.carry.iter().any(|carried| carried == name)
}

async fn plan_file(
    request: &PlanRequest,
    pinned: PinnedFile,
    format: Format,
    partitions: &[PartitionColumn],
) -> Result<TablePlan, DatasetError> {
    let file = TableFile::open(pinned.clone(), format, BlockCache::default()).await?;
    let available: Vec<String> = file.schema().fields().iter().map(|f| f.name().clone()).collect();
    let used = check_columns(request, &available, file.name(), partitions)?;
    file.check_columns(&used)?;
    let group = |group: usize| {
        let rows = file.group_rows(group);
        let per_row = |bytes: u64| bytes / rows.max(1);
        GroupPlan {
            rows,
            cost: RowCost {
                input_bytes: per_row(file.group_bytes(group, &used)),
                output_bytes: per_row(file.group_bytes(group, &request.carry)).saturating_add(request.output_row_bytes),
            },
        }
    };
    Ok(TablePlan {
        groups: (0..file.group_count()).map(group).collect(),
        schema: file.schema().clone(),
        pinned,
    })
}

/// Checks the columns of the file `name`, and returns those that the job uses. `available`: all
/// columns of the file.
fn check_columns(
    request: &PlanRequest,
    available: &[String],
    name: &str,
    partitions: &[PartitionColumn],
) -> Result<Vec<String>, DatasetError> {
    check_clash(name, partitions, available.iter().map(String::as_str))?;
    if request.options.missing_columns == MissingColumns::Error {
        let of_folders = partitions.iter().map(|column| column.name.clone());
        let all: Vec<String> = available.iter().cloned().chain(of_folders).collect();
        check_columns_exist(request, &all, &format!("`{name}` does not have"))?;
    }
    let mut used: Vec<String> = available
        .iter()
        .filter(|name| is_used(request, name))
        .cloned()
        .collect();
    used.sort();
    if let Some(twice) = used.windows(2).find(|two| two[0] == two[1]).map(|two| &two[0]) {
        return Err(DatasetError::Refused(format!(
            "`{name}` has two columns `{twice}`; rename one"
        )));
    }
    Ok(used)
}

/// Adds the first `rows` rows of a file.
fn push_row_groups(groups: &[GroupPlan], rows: u64, input: u32, builder: &mut ShardBuilder) {
    let mut first_row = 0;
    for group in groups {
        let group_rows = group.rows.min(rows - first_row);
        if group_rows == 0 {
            continue;
        }
        builder.push_run(input, first_row, group_rows, group.cost);
        first_row += group_rows;
    }
}

/// The union of all files' columns.
#[derive(Default)]
struct MergedSchema {
    /// In order of first appearance.
    fields: Vec<Field>,
    by_name: HashMap<String, FieldOrigin>,
    /// Name of the first file.
    first_file: Option<String>,
    /// The previous file's schema.
    last_schema: Option<SchemaRef>,
    /// Columns that some file lacks, with the name of the first such file.
    missing_in: BTreeMap<String, String>,
    notes: Vec<String>,
}

struct FieldOrigin {
    /// Index into [`MergedSchema::fields`].
    index: usize,
    /// Name of the file that determined the type.
    file: String,
}

impl MergedSchema {
    fn field(&self, name: &str) -> Option<&Field> {
        let origin = self.by_name.get(name)?;
        self.fields.get(origin.index)
    }

    fn add(&mut self, file: &TablePlan, is_used: impl Fn(&str) -> bool) -> Result<(), DatasetError> {
        if self.last_schema.as_ref() == Some(&file.schema) {
            return Ok(());
        }
        let name = &file.pinned.name;
        for (column, _) in self
            .by_name
            .iter()
            .filter(|(column, _)| file.schema.field_with_name(column).is_err())
        {
            self.missing_in.entry(column.clone()).or_insert_with(|| name.clone());
        }
        for field in file.schema.fields() {
            match self.by_name.get_mut(field.name()) {
                Some(origin) if is_used(field.name()) => {
                    let known = &mut self.fields[origin.index];
                    let before = known.data_type().clone();
                    let wide = common_type(&before, field.data_type()).ok_or_else(|| {
                        DatasetError::Refused(format!(
                            "column `{}` is {before} in `{}` and {} in `{name}`; make them one type, or run the files as separate jobs",
                            field.name(),
                            origin.file,
                            field.data_type(),
                        ))
                    })?;
                    if !same_type(&before, &wide) || !same_type(field.data_type(), &wide) {
                        self.notes.push(format!(
                            "column `{}` is {before} in `{}` and {} in `{name}`: it is read as {wide}",
                            field.name(),
                            origin.file,
                            field.data_type()
                        ));
                    }
                    if !same_type(&before, &wide) {
                        *known = known.clone().with_data_type(wide);
                        origin.file = name.clone();
                    }
                }
                Some(_) => {}
                None => {
                    if let Some(first) = &self.first_file {
                        self.missing_in.insert(field.name().clone(), first.clone());
                    }
                    let origin = FieldOrigin {
                        index: self.fields.len(),
                        file: name.clone(),
                    };
                    self.by_name.insert(field.name().clone(), origin);
                    self.fields.push(Field::clone(field));
                }
            }
        }
        self.first_file.get_or_insert_with(|| name.clone());
        self.last_schema = Some(file.schema.clone());
        Ok(())
    }
}

/// Whether the types differ at most in the layout of texts or of byte strings: a cast between them
/// loses nothing.
pub(crate) fn same_type(a: &DataType, b: &DataType) -> bool {
    let is_text = |t: &DataType| matches!(t, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View);
    let is_binary = |t: &DataType| matches!(t, DataType::Binary | DataType::LargeBinary | DataType::BinaryView);
    a.equals_datatype(b) || (is_text(a) && is_text(b)) || (is_binary(a) && is_binary(b))
}

/// The type that holds the values of both types unchanged: an integer type for two integer types,
/// or the other type if one type is null. `None` if there is no such type.
pub(crate) fn common_type(a: &DataType, b: &DataType) -> Option<DataType> {
    /// Whether an integer type is signed, and its number of bits.
    fn integer_type(t: &DataType) -> Option<(bool, u32)> {
        match t {
            DataType::Int8 => Some((true, 8)),
            DataType::Int16 => Some((true, 16)),
            DataType::Int32 => Some((true, 32)),
            DataType::Int64 => Some((true, 64)),
            DataType::UInt8 => Some((false, 8)),
            DataType::UInt16 => Some((false, 16)),
            DataType::UInt32 => Some((false, 32)),
            DataType::UInt64 => Some((false, 64)),
            _ => None,
        }
    }
    match (a, b) {
        (a, b) if same_type(a, b) => return Some(a.clone()),
        (DataType::Null, other) | (other, DataType::Null) => return Some(other.clone()),
        _ => {}
    }
    let ((a_signed, a_bits), (b_signed, b_bits)) = (integer_type(a)?, integer_type(b)?);
    if a_signed == b_signed {
        return Some(if a_bits >= b_bits { a.clone() } else { b.clone() });
    }
    let (signed, unsigned) = if a_signed { (a_bits, b_bits) } else { (b_bits, a_bits) };
    match signed.max(unsigned * 2) {
        16 => Some(DataType::Int16),
        32 => Some(DataType::Int32),
        64 => Some(DataType::Int64),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wider_type_holds_the_values_of_both() {
        use DataType::*;
        let all = [
            (Int32, Int64, Some(Int64)),
            (UInt8, Int8, Some(Int16)),
            (UInt32, Int8, Some(Int64)),
            (UInt64, Int64, None),
            (UInt16, UInt64, Some(UInt64)),
            (Null, Date32, Some(Date32)),
            (Utf8, LargeUtf8, Some(Utf8)),
            (Int64, Float64, None),
            (Float32, Float64, None),
            (Utf8, Int64, None),
        ];
        for (a, b, expected) in all {
            assert_eq!(common_type(&a, &b), expected, "{a} and {b}");
            assert_eq!(common_type(&b, &a).is_some(), expected.is_some(), "{b} and {a}");
        }
    }
}
