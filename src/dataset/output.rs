//! Builds record batches from results, with the columns of parts.
//!
//! The carried columns come first, in the job's order, then [`COLUMNS`]. With more than one sample
//! per row, the completion's columns become lists with one entry per sample. There is still one
//! output row per input row.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use arrow::array::{
    ArrayRef, Float32Array, Float32Builder, Int32Builder, Int64Array, ListArray, ListBuilder, RecordBatch, StringArray,
    StringBuilder, StructArray, UInt64Array,
};
use arrow::buffer::{NullBuffer, OffsetBuffer};
use arrow::compute::take;
use arrow::datatypes::{DataType, Field, FieldRef, Fields, Schema, SchemaRef};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::answer::json::Answer;
use super::answer::types::AnswerType;
use super::arrow::schema_text;
use super::error::{DatasetError, output_error};
use super::row::{RowResult, SampleResult};
use super::widths::check_fixed_memory;

/// Name and description of each column, in order. The last seven exist only if the job requests
/// them or its model thinks.
pub const COLUMNS: [(&str, &str); 16] = [
    ("row", "0-based over the job's whole input"),
    (
        "status",
        "`succeeded`, `invalid_output`, `errored`, `expired` or `cancelled`",
    ),
    ("completion", "the answer's text; null where there is none"),
    (
        "parsed",
        "the answer as asked for: the choice, compact JSON (or, typed, the values of the JSON Schema), the match; null where it does not fit",
    ),
    ("finish_reason", "`stop` or `length`"),
    ("error", "one line that says why; null for `succeeded`"),
    ("prompt_tokens", "null where the row was never tokenized"),
    (
        "cached_tokens",
        "of the prompt tokens, those whose computation was shared; null where the row was never tokenized",
    ),
    (
        "completion_tokens",
        "of thoughts and answers, over all samples; null where there is none",
    ),
    ("reasoning", "the thought before the answer; null where there is none"),
    (
        "reasoning_tokens",
        "those of `completion_tokens` that are thought, without its delimiters",
    ),
    ("token_ids", "of thought and answer"),
    (
        "logprobs",
        "natural logarithm, one per entry of `token_ids`; null where the row has none",
    ),
    ("choice_probabilities", "of each choice, by its name"),
    (
        "sample_status",
        "of each sample, where there are several: `succeeded`, `invalid_output` or `errored`",
    ),
    (
        "sample_error",
        "of each sample, one line that says why; null for `succeeded`",
    ),
];

/// Which optional columns exist, and their shape.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputColumns {
    /// Completions per row, at least 1; with more than one, the completion's columns are lists.
    pub samples: u32,
    /// Whether the model thinks, and its thoughts are written.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub thinking: bool,
    pub token_ids: bool,
    pub logprobs: bool,
    /// The choices whose probabilities are written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub choices: Option<Vec<String>>,
    /// The type of `parsed`, if it holds typed values instead of text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parsed: Option<AnswerType>,
    /// Whether each of several samples has a status of its own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sample_status: bool,
}

/// The columns of a job's output; serializable, so that any process can rebuild the schema.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OutputSchema {
    /// The carried columns, by their names in the input.
    #[serde(with = "schema_text")]
    carry: SchemaRef,
    /// Output names of renamed carried columns, by their names in the input.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    renamed: BTreeMap<String, String>,
    columns: OutputColumns,
}

impl OutputSchema {
    pub fn new(carry: &Schema, columns: OutputColumns) -> OutputSchema {
        OutputSchema {
            carry: Arc::new(carry.clone()),
            renamed: BTreeMap::new(),
            columns,
        }
    }

    /// The same schema, with other names for some of the carried columns. `renamed`: new names by
    /// the names in the input.
    ///
    /// # Errors
    /// Two columns would have the same name; the line names it.
    pub fn with_renamed(self, renamed: &BTreeMap<String, String>) -> Result<OutputSchema, String> {
        let schema = OutputSchema {
            renamed: renamed.clone(),
            ..self
        };
        let mut seen: HashSet<String> = OutputSchema::own_names(&schema.columns).into_iter().collect();
        let duplicate = schema.carried_names().find(|name| !seen.insert(name.clone()));
        match duplicate {
            Some(name) => Err(format!("two columns of the output would have the name `{name}`")),
            None => Ok(schema),
        }
    }

    /// Checks that query engines with case-insensitive names (DuckDB, Spark) can read each column.
    /// Only for new jobs: older versions did not check this.
    ///
    /// # Errors
    /// Two column names differ by case alone; the line names them, and proposes a new name.
    pub fn check_case(&self) -> Result<(), String> {
        let own_names = OutputSchema::own_names(&self.columns).into_iter();
        let mut by_lowercase: BTreeMap<String, (String, bool)> =
            own_names.map(|name| (name.to_lowercase(), (name, true))).collect();
        for (field, name) in self.carry.fields().iter().zip(self.carried_names()) {
            if let Some((other, is_own)) = by_lowercase.get(&name.to_lowercase()) {
                let owner = if *is_own { ", the output's own," } else { "" };
                return Err(format!(
                    "`{name}` and `{other}`{owner} would differ by case alone, and engines that ignore case (DuckDB, Spark) would show \
                     only one of them; a mapping gives another name: `carry: {{input_{name}: {}}}`",
                    field.name()
                ));
            }
            by_lowercase.insert(name.to_lowercase(), (name, false));
        }
        Ok(())
    }

    /// The carried columns' names in the output.
    pub fn carried_names(&self) -> impl Iterator<Item = String> {
        let fields = self.carry.fields().iter().map(|field| field.name());
        fields.map(|name| self.renamed.get(name).unwrap_or(name).clone())
    }

    /// The schema in a job's record, checked against the columns `requested` by the job and its
    /// `renamed` carried columns. `may_carry`: whether the job may carry a column. Whether thoughts
    /// and sample statuses are written is taken from the record and not compared, since records of
    /// older versions have neither.
    ///
    /// # Errors
    /// One line that says what is wrong.
    pub fn of_record(
        columns: &Value,
        requested: &OutputColumns,
        renamed: &BTreeMap<String, String>,
        may_carry: impl Fn(&str) -> bool,
    ) -> Result<OutputSchema, String> {
        let read = OutputSchema::deserialize(columns);
        let schema = read.map_err(|error| format!("its columns cannot be read: {error}"))?;
        let requested = OutputColumns {
            thinking: schema.columns.thinking,
            sample_status: schema.columns.sample_status && schema.columns.samples > 1,
            ..requested.clone()
        };
        if schema.columns != requested || schema.renamed != *renamed {
            return Err("its columns are not those that its job asks for".into());
        }
        let own_names = OutputSchema::own_names(&schema.columns);
        let (mut input_names, mut output_names) = (HashSet::new(), HashSet::new());
        for (field, new) in schema.carry.fields().iter().zip(schema.carried_names()) {
            let name = field.name();
            let is_duplicate = !input_names.insert(name) || own_names.contains(&new) || !output_names.insert(new);
            if is_duplicate || !may_carry(name) {
                return Err(format!("it carries a column `{name}`, which its job cannot ask for"));
            }
        }
        check_fixed_memory(&schema.carry, 1)?;
        Ok(schema)
    }

    /// Names of the columns besides the carried ones, which a carried column cannot have.
    pub fn own_names(columns: &OutputColumns) -> Vec<String> {
        own_fields(columns).iter().map(|f| f.name().clone()).collect()
    }

    /// The JSON Schema of an output row of any job, as in `schemas/output.schema.json`.
    pub fn json_schema() -> Value {
        let all_fields = |samples| {
            own_fields(&OutputColumns {
                samples,
                thinking: true,
                token_ids: true,
                logprobs: true,
                choices: Some(Vec::new()),
                parsed: None,
                sample_status: true,
            })
        };
        let mut properties = Map::new();
        let fields = all_fields(1).into_iter().zip(all_fields(2)).zip(COLUMNS);
        for ((one_sample, two_samples), (name, description)) in fields {
            let mut types = vec![json_type(one_sample.data_type())];
            if one_sample.data_type() != two_samples.data_type() {
                types.push(json_type(two_samples.data_type()));
            }
            if one_sample.is_nullable() {
                types.push(json!({ "type": "null" }));
            }
            let property = match name {
                // The type of `parsed` depends on the job's JSON Schema.
                "parsed" => json!({ "description": description }),
                _ => json!({ "description": description, "anyOf": types }),
            };
            properties.insert(name.into(), property);
        }
        let required: Vec<&str> = COLUMNS[..9].iter().map(|(name, _)| *name).collect();
        json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "gristmill output row",
            "description": "The columns of a job's output besides the carried ones, as a JSON line has them. Parquet: integers are \
                            int64, `token_ids` int32, numbers float32. Columns of a completion are lists, one entry a sample, \
                            where a job asks for several samples a row.",
            "type": "object",
            "properties": properties,
            "required": required,
        })
    }

    /// The columns besides the carried ones.
    pub fn columns(&self) -> &OutputColumns {
        &self.columns
    }

    /// Whether the columns need a feature that older versions of gristmill do not know: typed
    /// answers, renamed columns or sample statuses.
    pub fn needs_newest_version(&self) -> bool {
        self.columns.parsed.is_some() || self.columns.sample_status || !self.renamed.is_empty()
    }

    /// The carried columns, by their names in the input.
    pub fn carry(&self) -> SchemaRef {
        self.carry.clone()
    }

    /// The Arrow schema of batches, data objects and parts.
    pub fn schema(&self) -> SchemaRef {
        let fields = self.carry.fields().iter().zip(self.carried_names());
        let carried = fields.map(|(field, name)| {
            if *field.name() == name {
                field.clone()
            } else {
                Arc::new(field.as_ref().clone().with_name(name))
            }
        });
        Arc::new(Schema::new(
            carried.chain(own_fields(&self.columns)).collect::<Vec<FieldRef>>(),
        ))
    }

    /// The rows of `results` as a batch, in the given order; `results` may be any subset of the
    /// shard's rows.
    ///
    /// `carry`: the carried columns of the whole shard, whose first row is `first_row`.
    pub fn to_batch(
        &self,
        carry: &RecordBatch,
        first_row: u64,
        results: &[RowResult],
    ) -> Result<RecordBatch, DatasetError> {
        if carry.schema().fields() != self.carry.fields() {
            return Err(DatasetError::Output(
                "the carried columns are not those of the plan".into(),
            ));
        }
        let mut indices = Vec::with_capacity(results.len());
        for result in results {
            match result
                .row
                .checked_sub(first_row)
                .filter(|&i| i < carry.num_rows() as u64)
            {
                Some(i) => indices.push(i),
                None => {
                    let end = first_row + carry.num_rows() as u64;
                    return Err(DatasetError::Output(format!(
                        "row {} is not of the shard with rows {first_row}..{end}",
                        result.row
                    )));
                }
            }
        }
        let indices = UInt64Array::from(indices);
        let mut columns = Vec::with_capacity(carry.num_columns() + 12);
        for column in carry.columns() {
            columns.push(take(column, &indices, None).map_err(output_error)?);
        }
        let fields = own_fields(&self.columns);
        for field in &fields {
            columns.push(self.own_column(field, results)?);
        }
        RecordBatch::try_new(self.schema(), columns).map_err(output_error)
    }

    fn own_column(&self, field: &FieldRef, results: &[RowResult]) -> Result<ArrayRef, DatasetError> {
        // A row without prompt tokens was never tokenized.
        let if_tokenized = |count: u32, r: &RowResult| (r.prompt_tokens > 0).then_some(i64::from(count));
        Ok(match field.name().as_str() {
            "row" => Arc::new(Int64Array::from_iter_values(results.iter().map(|r| r.row as i64))),
            "status" => Arc::new(StringArray::from_iter_values(results.iter().map(|r| r.status.as_str()))),
            "error" => Arc::new(StringArray::from_iter(results.iter().map(|r| r.error.as_deref()))),
            "prompt_tokens" => Arc::new(Int64Array::from_iter(
                results.iter().map(|r| if_tokenized(r.prompt_tokens, r)),
            )),
            "cached_tokens" => Arc::new(Int64Array::from_iter(
                results.iter().map(|r| if_tokenized(r.cached_tokens, r)),
            )),
            "completion_tokens" => sums_over_samples(results, |s| s.completion_tokens),
            "reasoning_tokens" => sums_over_samples(results, |s| s.reasoning_tokens),
            name => {
                let samples: Vec<Option<&SampleResult>> = match self.columns.samples {
                    0 | 1 => results.iter().map(|r| r.samples.first()).collect(),
                    _ => results.iter().flat_map(|r| r.samples.iter().map(Some)).collect(),
                };
                let values = self.sample_column(name, &samples)?;
                match field.data_type() {
                    DataType::List(item) if self.columns.samples > 1 => lists_of_samples(item, values, results)?,
                    _ => values,
                }
            }
        })
    }

    /// The values of column `name`, one per entry of `samples`; `None`: a row without samples.
    fn sample_column(&self, name: &str, samples: &[Option<&SampleResult>]) -> Result<ArrayRef, DatasetError> {
        let texts = |text_of: &dyn Fn(&SampleResult) -> Option<String>| -> ArrayRef {
            let mut out = StringBuilder::new();
            samples.iter().for_each(|s| out.append_option(s.and_then(text_of)));
            Arc::new(out.finish())
        };
        Ok(match name {
            "completion" => texts(&|s| s.has_completion().then(|| s.text.clone())),
            "reasoning" => texts(&|s| s.reasoning.clone()),
            "parsed" => match &self.columns.parsed {
                Some(answer_type) => typed_column(answer_type, samples)?,
                None => texts(&|s| s.parsed.clone()),
            },
            "finish_reason" => texts(&|s| s.has_completion().then(|| s.finish_reason.to_string())),
            "sample_status" => texts(&|s| Some(s.status.as_str().to_string())),
            "sample_error" => texts(&|s| s.error.clone()),
            "token_ids" => {
                let mut out = ListBuilder::new(Int32Builder::new());
                for sample in samples {
                    for &id in sample.iter().flat_map(|s| &s.token_ids) {
                        let id = i32::try_from(id)
                            .map_err(|_| DatasetError::Output(format!("token id {id} exceeds int32")))?;
                        out.values().append_value(id);
                    }
                    out.append(sample.is_some_and(SampleResult::has_completion));
                }
                Arc::new(out.finish())
            }
            "logprobs" => {
                let mut out = ListBuilder::new(Float32Builder::new());
                for sample in samples {
                    // A sample without requested logprobs is null; one whose completion is empty
                    // has an empty list.
                    let has_logprobs =
                        |s: &&SampleResult| s.has_completion() && (!s.logprobs.is_empty() || s.completion_tokens == 0);
                    let with_logprobs = sample.filter(has_logprobs);
                    out.values().append_slice(with_logprobs.map_or(&[], |s| &s.logprobs));
                    out.append(with_logprobs.is_some());
                }
                Arc::new(out.finish())
            }
            "choice_probabilities" => self.probabilities_column(samples)?,
            other => return Err(DatasetError::Output(format!("no such output column: `{other}`"))),
        })
    }

    fn probabilities_column(&self, samples: &[Option<&SampleResult>]) -> Result<ArrayRef, DatasetError> {
        let choices = self.columns.choices.as_deref().unwrap_or_default();
        fn probabilities<'a>(sample: &Option<&'a SampleResult>) -> Option<&'a [f32]> {
            sample.map(|s| &s.choice_probabilities[..]).filter(|p| !p.is_empty())
        }
        let mut present = samples.iter().filter_map(probabilities);
        if let Some(wrong) = present.find(|p| p.len() != choices.len()) {
            return Err(DatasetError::Output(format!(
                "{} probabilities for {} choices",
                wrong.len(),
                choices.len()
            )));
        }
        let choice_column = |choice: usize| {
            let values = samples.iter().map(|s| probabilities(s).map(|p| p[choice]));
            Arc::new(values.collect::<Float32Array>()) as ArrayRef
        };
        let columns = (0..choices.len()).map(choice_column).collect::<Vec<_>>();
        let nulls = NullBuffer::from_iter(samples.iter().map(|s| probabilities(s).is_some()));
        let column = StructArray::try_new_with_length(choice_fields(choices), columns, Some(nulls), samples.len());
        Ok(Arc::new(column.map_err(output_error)?))
    }
}

/// A column of typed answers.
fn typed_column(answer_type: &AnswerType, samples: &[Option<&SampleResult>]) -> Result<ArrayRef, DatasetError> {
    let parse = |sample: &Option<&SampleResult>| {
        let text = sample.and_then(|s| s.parsed.as_deref());
        text.map(Answer::parse).transpose().map_err(DatasetError::Output)
    };
    let answers = samples.iter().map(parse).collect::<Result<Vec<_>, _>>()?;
    answer_type.column(&answers.iter().map(Option::as_ref).collect::<Vec<_>>())
}

/// The sum of `count` over each row's samples; null for a row without samples.
fn sums_over_samples(results: &[RowResult], count: impl Fn(&SampleResult) -> u32) -> ArrayRef {
    let sum = |r: &RowResult| {
        let counts = r.samples.iter().map(|s| i64::from(count(s)));
        (!r.samples.is_empty()).then(|| counts.sum::<i64>())
    };
    Arc::new(Int64Array::from_iter(results.iter().map(sum)))
}

/// One list per row with the values of the row's samples; null for a row without samples.
fn lists_of_samples(item: &FieldRef, values: ArrayRef, results: &[RowResult]) -> Result<ArrayRef, DatasetError> {
    let offsets = OffsetBuffer::from_lengths(results.iter().map(|r| r.samples.len()));
    let nulls = NullBuffer::from_iter(results.iter().map(|r| !r.samples.is_empty()));
    Ok(Arc::new(
        ListArray::try_new(item.clone(), offsets, values, Some(nulls)).map_err(output_error)?,
    ))
}

fn choice_fields(choices: &[String]) -> Fields {
    choices
        .iter()
        .map(|choice| Field::new(choice, DataType::Float32, true))
        .collect()
}

fn json_type(data_type: &DataType) -> Value {
    match data_type {
        DataType::Utf8 => json!({ "type": "string" }),
        DataType::Float32 => json!({ "type": "number" }),
        DataType::List(item) => json!({ "type": "array", "items": json_type(item.data_type()) }),
        DataType::Struct(_) => json!({ "type": "object", "additionalProperties": { "type": "number" } }),
        _ => json!({ "type": "integer" }),
    }
}

/// The fields of the columns besides the carried ones.
fn own_fields(columns: &OutputColumns) -> Vec<FieldRef> {
    let list = |item: DataType| DataType::new_list(item, true);
    let per_sample = |item: DataType| if columns.samples > 1 { list(item) } else { item };
    let parsed = columns.parsed.as_ref().map_or(DataType::Utf8, AnswerType::data_type);
    let mut fields = vec![
        Field::new("row", DataType::Int64, false),
        Field::new("status", DataType::Utf8, false),
        Field::new("completion", per_sample(DataType::Utf8), true),
        Field::new("parsed", per_sample(parsed), true),
        Field::new("finish_reason", per_sample(DataType::Utf8), true),
        Field::new("error", DataType::Utf8, true),
        Field::new("prompt_tokens", DataType::Int64, true),
        Field::new("cached_tokens", DataType::Int64, true),
        Field::new("completion_tokens", DataType::Int64, true),
    ];
    if columns.thinking {
        fields.push(Field::new("reasoning", per_sample(DataType::Utf8), true));
        fields.push(Field::new("reasoning_tokens", DataType::Int64, true));
    }
    if columns.token_ids {
        fields.push(Field::new("token_ids", per_sample(list(DataType::Int32)), true));
    }
    if columns.logprobs {
        fields.push(Field::new("logprobs", per_sample(list(DataType::Float32)), true));
    }
    if let Some(choices) = &columns.choices {
        fields.push(Field::new(
            "choice_probabilities",
            per_sample(DataType::Struct(choice_fields(choices))),
            true,
        ));
    }
    if columns.sample_status {
        fields.push(Field::new("sample_status", list(DataType::Utf8), true));
        fields.push(Field::new("sample_error", list(DataType::Utf8), true));
    }
    fields.into_iter().map(Arc::new).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::row::RowStatus;
    use crate::dataset::value::rows_of;

    fn sample(text: &str) -> SampleResult {
        SampleResult {
            status: RowStatus::Succeeded,
            error: None,
            text: text.into(),
            reasoning: Some("hm".into()),
            reasoning_tokens: 1,
            parsed: Some(text.to_uppercase()),
            finish_reason: "stop",
            completion_tokens: 2,
            token_ids: vec![7, 8],
            logprobs: vec![-0.5, -0.25],
            choice_probabilities: vec![0.75, 0.25],
        }
    }

    fn result(row: u64, samples: Vec<SampleResult>) -> RowResult {
        let fine = !samples.is_empty();
        RowResult {
            row,
            status: if fine { RowStatus::Succeeded } else { RowStatus::Errored },
            samples,
            error: (!fine).then(|| "broken".to_string()),
            prompt_tokens: if fine { 5 } else { 0 },
            cached_tokens: 0,
        }
    }

    fn carry() -> RecordBatch {
        let ids: ArrayRef = Arc::new(StringArray::from(vec![Some("a"), Some("b"), None]));
        RecordBatch::try_from_iter_with_nullable([("id", ids, true)]).unwrap()
    }

    fn all(samples: u32) -> OutputSchema {
        let columns = OutputColumns {
            samples,
            thinking: true,
            token_ids: true,
            logprobs: true,
            choices: Some(vec!["A".into(), "B.c".into()]),
            parsed: None,
            sample_status: samples > 1,
        };
        OutputSchema::new(&carry().schema(), columns)
    }

    fn json_rows(batch: &RecordBatch) -> Vec<Value> {
        rows_of(batch)
            .into_iter()
            .map(|row| Value::Object(row.unwrap()))
            .collect()
    }

    #[test]
    fn every_column_is_described() {
        let names = OutputSchema::own_names(&all(2).columns);
        assert_eq!(names, COLUMNS.map(|(name, _)| name));
    }

    #[test]
    fn names_that_differ_by_case_alone_are_refused() {
        let check = |columns: &[&str], renamed: &[(&str, &str)]| {
            let fields: Vec<Field> = columns
                .iter()
                .map(|name| Field::new(*name, DataType::Utf8, true))
                .collect();
            let renamed = renamed
                .iter()
                .map(|(column, new)| (column.to_string(), new.to_string()));
            let schema = OutputSchema::new(&Schema::new(fields), OutputColumns::default());
            schema.with_renamed(&renamed.collect()).unwrap().check_case()
        };
        for (columns, renamed, phrases) in [
            (
                &["Status"][..],
                &[][..],
                ["`Status` and `status`, the output's own,", "{input_Status: Status}"],
            ),
            (
                &["id"],
                &[("id", "ROW")],
                ["`ROW` and `row`, the output's own,", "{input_ROW: id}"],
            ),
            (
                &["Id", "x", "iD"],
                &[],
                ["`iD` and `Id` would differ", "{input_iD: iD}"],
            ),
            (&["É", "é"], &[], ["`é` and `É` would differ", "{input_é: é}"]),
        ] {
            let why = check(columns, renamed).unwrap_err();
            assert!(phrases.iter().all(|phrase| why.contains(phrase)), "{why}");
        }
        assert_eq!(check(&["Status", "x"], &[("Status", "input_Status")]), Ok(()));
        // Only existing columns count.
        assert_eq!(check(&["Reasoning"], &[]), Ok(()));
        // Jobs that an older gristmill began keep their columns.
        let begun = OutputSchema::new(
            &Schema::new(vec![Field::new("Status", DataType::Utf8, true)]),
            OutputColumns::default(),
        );
        let record = serde_json::to_value(&begun).unwrap();
        let nothing = BTreeMap::new();
        assert_eq!(
            OutputSchema::of_record(&record, &OutputColumns::default(), &nothing, |_| true),
            Ok(begun)
        );
    }

    #[test]
    fn a_batch_of_some_rows_has_their_carried_columns() {
        let batch = all(1)
            .to_batch(&carry(), 10, &[result(12, vec![sample("x")]), result(10, vec![])])
            .unwrap();
        assert_eq!(batch.schema(), all(1).schema());
        assert_eq!(
            json_rows(&batch),
            [
                json!({"id": null, "row": 12, "status": "succeeded", "completion": "x", "parsed": "X", "finish_reason": "stop",
                "error": null, "prompt_tokens": 5, "cached_tokens": 0, "completion_tokens": 2, "reasoning": "hm", "reasoning_tokens": 1, "token_ids": [7, 8],
                "logprobs": [-0.5, -0.25], "choice_probabilities": {"A": 0.75, "B.c": 0.25}}),
                json!({"id": "a", "row": 10, "status": "errored", "completion": null, "parsed": null, "finish_reason": null,
                "error": "broken", "prompt_tokens": null, "cached_tokens": null, "completion_tokens": null,
                "reasoning": null, "reasoning_tokens": null, "token_ids": null, "logprobs": null, "choice_probabilities": null}),
            ]
        );
    }

    #[test]
    fn a_completion_without_log_probabilities_has_null() {
        let without = |samples: u32, completion_tokens: u32| {
            let one = SampleResult {
                logprobs: vec![],
                completion_tokens,
                ..sample("x")
            };
            let all_samples = vec![one; samples as usize];
            let batch = all(samples).to_batch(&carry(), 0, &[result(0, all_samples)]).unwrap();
            json_rows(&batch)[0]["logprobs"].clone()
        };
        assert_eq!(without(1, 2), json!(null));
        assert_eq!(without(1, 0), json!([]));
        assert_eq!(without(2, 2), json!([null, null]));
    }

    #[test]
    fn several_samples_are_lists() {
        let batch = all(2)
            .to_batch(
                &carry(),
                0,
                &[result(0, vec![]), result(1, vec![sample("x"), sample("y")])],
            )
            .unwrap();
        let rows = json_rows(&batch);
        assert_eq!(rows[0]["completion"], json!(null));
        assert_eq!(rows[1]["completion"], json!(["x", "y"]));
        assert_eq!(rows[1]["token_ids"], json!([[7, 8], [7, 8]]));
        assert_eq!(rows[1]["completion_tokens"], json!(4));
        assert_eq!(
            (&rows[1]["reasoning"], &rows[1]["reasoning_tokens"]),
            (&json!(["hm", "hm"]), &json!(2))
        );
        assert_eq!(rows[1]["choice_probabilities"][1], json!({"A": 0.75, "B.c": 0.25}));
    }

    #[test]
    fn each_sample_has_a_status_of_its_own() {
        let failed = SampleResult::failed("logits".into());
        let results = [result(0, vec![]), result(1, vec![sample("x"), failed])];
        let rows = json_rows(&all(2).to_batch(&carry(), 0, &results).unwrap());
        assert_eq!(
            (&rows[0]["sample_status"], &rows[0]["sample_error"]),
            (&json!(null), &json!(null))
        );
        for (column, values) in [
            ("sample_status", json!(["succeeded", "errored"])),
            ("sample_error", json!([null, "logits"])),
            ("completion", json!(["x", null])),
            ("parsed", json!(["X", null])),
            ("finish_reason", json!(["stop", null])),
            ("token_ids", json!([[7, 8], null])),
            ("logprobs", json!([[-0.5, -0.25], null])),
            ("choice_probabilities", json!([{"A": 0.75, "B.c": 0.25}, null])),
        ] {
            assert_eq!(rows[1][column], values, "{column}");
        }
    }

    /// Records of an older gristmill have no sample statuses, and the columns of their parts stay
    /// unchanged.
    #[test]
    fn records_of_older_versions_have_no_sample_status_columns() {
        let requested = all(2).columns;
        for (has_statuses, columns) in [(true, 16), (false, 14)] {
            let schema = OutputSchema {
                columns: OutputColumns {
                    sample_status: has_statuses,
                    ..requested.clone()
                },
                ..all(2)
            };
            let record = serde_json::to_value(&schema).unwrap();
            let read = OutputSchema::of_record(&record, &requested, &BTreeMap::new(), |_| true).unwrap();
            assert_eq!(read.schema().fields().len(), columns + 1);
            assert_eq!(read.needs_newest_version(), has_statuses);
        }
    }

    #[test]
    fn foreign_rows_and_columns_are_refused() {
        for row in [9, 13] {
            let error = all(1).to_batch(&carry(), 10, &[result(row, vec![])]).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!("output: row {row} is not of the shard with rows 10..13")
            );
        }
        let other = carry().project(&[]).unwrap();
        assert!(all(1).to_batch(&other, 10, &[]).is_err());
    }

    #[test]
    fn the_schema_is_rebuilt_from_its_record() {
        let text = serde_json::to_string(&all(2)).unwrap();
        let again: OutputSchema = serde_json::from_str(&text).unwrap();
        assert_eq!(again, all(2));
        assert_eq!(again.schema(), all(2).schema());
        assert_eq!(
            OutputSchema::own_names(&again.columns).len(),
            again.schema().fields().len() - 1
        );
    }
}
