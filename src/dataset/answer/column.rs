//! Builds the Arrow column that holds answers of a type.

use std::sync::Arc;

use arrow::array::{ArrayRef, BooleanArray, Float64Array, Int64Array, ListArray, MapArray, StringArray, StructArray};
use arrow::buffer::{NullBuffer, OffsetBuffer};
use arrow::datatypes::{DataType, Field, Fields};

use super::json::Answer;
use super::types::{AnswerType, OTHERS_FIELD};
use crate::dataset::error::{DatasetError, output_error};

impl AnswerType {
    /// The Arrow type of a column.
    pub fn data_type(&self) -> DataType {
        match self {
            AnswerType::Json | AnswerType::Text => DataType::Utf8,
            AnswerType::Boolean => DataType::Boolean,
            AnswerType::Int64 => DataType::Int64,
            AnswerType::Float64 => DataType::Float64,
            AnswerType::List(item) => DataType::new_list(item.data_type(), true),
            AnswerType::Map(value) => {
                let entries = DataType::Struct(entry_fields(value));
                DataType::Map(Arc::new(Field::new("key_value", entries, false)), false)
            }
            AnswerType::Struct { fields, others } => DataType::Struct(struct_fields(fields, *others)),
        }
    }

    /// A column of these answers; `None` is null.
    ///
    /// # Errors
    /// An answer does not fit the type. Callers check each answer with [`AnswerType::check`]
    /// before.
    pub fn column(&self, answers: &[Option<&Answer>]) -> Result<ArrayRef, DatasetError> {
        let count = answers.len();
        Ok(match self {
            AnswerType::Json => Arc::new(StringArray::from(convert_each(answers, |answer| {
                Some(answer.compact())
            })?)),
            AnswerType::Text => Arc::new(StringArray::from(convert_each(answers, |answer| match answer {
                Answer::Text(text) => Some(text.as_str()),
                _ => None,
            })?)),
            AnswerType::Boolean => Arc::new(BooleanArray::from(convert_each(answers, |answer| match answer {
                Answer::Bool(value) => Some(*value),
                _ => None,
            })?)),
            AnswerType::Int64 => Arc::new(Int64Array::from(convert_each(answers, Answer::as_int64)?)),
            AnswerType::Float64 => Arc::new(Float64Array::from(convert_each(answers, Answer::as_float64)?)),
            AnswerType::List(item) => {
                let lists = convert_each(answers, |answer| match answer {
                    Answer::List(items) => Some(items.as_slice()),
                    _ => None,
                })?;
                let items: Vec<Option<&Answer>> =
                    lists.iter().flatten().flat_map(|list| list.iter().map(Some)).collect();
                let field = Arc::new(Field::new_list_field(item.data_type(), true));
                let offsets = OffsetBuffer::from_lengths(lists.iter().map(|list| list.map_or(0, <[Answer]>::len)));
                let column = ListArray::try_new(field, offsets, item.column(&items)?, nulls(&lists));
                Arc::new(column.map_err(output_error)?)
            }
            AnswerType::Map(value) => {
                let maps = convert_each(answers, members)?;
                let entries = || maps.iter().flatten().flat_map(|members| members.iter());
                let keys = StringArray::from_iter_values(entries().map(|(key, _)| key));
                let values: Vec<Option<&Answer>> = entries().map(|(_, value)| Some(value)).collect();
                let fields = entry_fields(value);
                let columns: Vec<ArrayRef> = vec![Arc::new(keys), value.column(&values)?];
                let entries = StructArray::try_new(fields.clone(), columns, None).map_err(output_error)?;
                let field = Arc::new(Field::new("key_value", DataType::Struct(fields), false));
                let offsets = OffsetBuffer::from_lengths(maps.iter().map(|members| members.map_or(0, <[_]>::len)));
                let column = MapArray::try_new(field, offsets, entries, nulls(&maps), false);
                Arc::new(column.map_err(output_error)?)
            }
            AnswerType::Struct { fields, others } => {
                let objects = convert_each(answers, members)?;
                let mut columns = Vec::with_capacity(fields.len() + 1);
                for (name, field_type) in fields {
                    let values: Vec<Option<&Answer>> = objects
                        .iter()
                        .map(|members| members.and_then(|members| member(members, name)))
                        .collect();
                    columns.push(field_type.column(&values)?);
                }
                let other_members = |members: &[(String, Answer)]| {
                    let is_named = |key: &String| fields.iter().any(|(name, _)| name == key);
                    let other = members.iter().filter(|(key, _)| !is_named(key)).cloned();
                    let other: Vec<(String, Answer)> = other.collect();
                    (!other.is_empty()).then(|| Answer::Object(other).compact())
                };
                let other_texts = objects.iter().map(|members| members.and_then(other_members));
                let other_texts: Vec<Option<String>> = other_texts.collect();
                match others {
                    true => columns.push(Arc::new(StringArray::from(other_texts))),
                    false if other_texts.iter().all(Option::is_none) => {}
                    false => return Err(type_error()),
                }
                let fields = struct_fields(fields, *others);
                let column = StructArray::try_new_with_length(fields, columns, nulls(&objects), count);
                Arc::new(column.map_err(output_error)?)
            }
        })
    }
}

/// Converts each answer that is not null; `convert` returns `None` for an answer of another type.
fn convert_each<'a, T>(
    answers: &[Option<&'a Answer>],
    convert: impl Fn(&'a Answer) -> Option<T>,
) -> Result<Vec<Option<T>>, DatasetError> {
    let convert_one = |answer: &Option<&'a Answer>| match answer {
        None | Some(Answer::Null) => Ok(None),
        Some(answer) => convert(answer).map(Some).ok_or_else(type_error),
    };
    answers.iter().map(convert_one).collect()
}

fn type_error() -> DatasetError {
    DatasetError::Output("an answer does not fit the type of its column".into())
}

fn nulls<T>(values: &[Option<T>]) -> Option<NullBuffer> {
    Some(values.iter().map(Option::is_some).collect())
}

fn members(answer: &Answer) -> Option<&[(String, Answer)]> {
    match answer {
        Answer::Object(members) => Some(members),
        _ => None,
    }
}

fn member<'a>(members: &'a [(String, Answer)], name: &str) -> Option<&'a Answer> {
    members.iter().find(|(key, _)| key == name).map(|(_, value)| value)
}

/// The fields of a map's entries.
fn entry_fields(value: &AnswerType) -> Fields {
    let fields = [
        Field::new("key", DataType::Utf8, false),
        Field::new("value", value.data_type(), true),
    ];
    fields.into_iter().collect()
}

fn struct_fields(fields: &[(String, AnswerType)], others: bool) -> Fields {
    let named = fields
        .iter()
        .map(|(name, field_type)| Field::new(name, field_type.data_type(), true));
    let others = others.then(|| Field::new(OTHERS_FIELD, DataType::Utf8, true));
    named.chain(others).collect()
}

#[cfg(test)]
mod tests {
    use arrow::array::{Array, RecordBatch};
    use serde_json::{Value, json};

    use super::*;
    use crate::dataset::part::{part_parquet, read_parquet};
    use crate::dataset::value::cell;
    use crate::dataset::writing::WriteOptions;

    /// The cells of the answers' column after a round trip through a Parquet file.
    fn column(schema: &Value, answers: &[Option<&str>]) -> Vec<Value> {
        let (answer_type, _) = AnswerType::of(schema);
        let read: Vec<Option<Answer>> = answers
            .iter()
            .map(|text| text.map(|text| Answer::parse(text).unwrap()))
            .collect();
        assert!(read.iter().flatten().all(|answer| answer_type.check(answer).is_ok()));
        let column = answer_type
            .column(&read.iter().map(Option::as_ref).collect::<Vec<_>>())
            .unwrap();
        assert_eq!(*column.data_type(), answer_type.data_type());
        let batch = RecordBatch::try_from_iter_with_nullable([("parsed", column, true)]).unwrap();
        let bytes = part_parquet(
            &batch.schema(),
            std::slice::from_ref(&batch),
            &[],
            WriteOptions::default(),
        )
        .unwrap();
        let back = read_parquet(bytes).unwrap();
        assert_eq!(
            arrow::compute::concat_batches(&back.schema, &back.batches).unwrap(),
            batch
        );
        (0..batch.num_rows())
            .map(|row| cell(batch.column(0), row).unwrap())
            .collect()
    }

    #[test]
    fn answers_become_values_of_their_types() {
        let schema = json!({"type": "object", "properties": {
            "n": {"type": "integer"}, "f": {"type": ["number", "null"]}, "b": {"type": "boolean"}, "s": {"type": "string"},
            "l": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": false}},
            "m": {"type": "object", "additionalProperties": {"type": "integer"}}, "j": {"type": ["string", "integer"]}}});
        let rows = column(
            &schema,
            &[
                Some(
                    r#"{"n": 9223372036854775807, "f": -0.0, "b": false, "s": "\u00e9", "l": [{"x": 1}, null, {}], "m": {"k": 2, "": null}, "j": "t"}"#,
                ),
                None,
                Some("{}"),
                Some("null"),
                Some(
                    r#"{"f": null, "l": [], "m": {}, "j": 12345678901234567890123, "extra": [1, {"y": 1e2}], "n": 1.0}"#,
                ),
            ],
        );
        let nothing = json!({"n": null, "f": null, "b": null, "s": null, "l": null, "m": null, "j": null, "additionalProperties": null});
        assert_eq!(
            rows,
            [
                json!({"n": i64::MAX, "f": -0.0, "b": false, "s": "é", "l": [{"x": 1}, null, {"x": null}], "m": {"k": 2, "": null},
                    "j": "\"t\"", "additionalProperties": null}),
                json!(null),
                nothing,
                json!(null),
                json!({"n": 1, "f": null, "b": null, "s": null, "l": [], "m": {}, "j": "12345678901234567890123",
                    "additionalProperties": "{\"extra\":[1,{\"y\":100.0}]}"}),
            ]
        );
    }

    #[test]
    fn single_values_and_lists_are_columns_too() {
        assert_eq!(
            column(&json!({"type": "integer"}), &[Some("7"), None]),
            [json!(7), json!(null)]
        );
        assert_eq!(column(&json!({"enum": ["a", "b"]}), &[Some("\"b\"")]), [json!("b")]);
        assert_eq!(
            column(
                &json!({"type": "array", "items": {"type": "array", "items": {"type": "string"}}}),
                &[Some("[[],[\"a\"]]"), None]
            ),
            [json!([[], ["a"]]), json!(null)]
        );
        assert_eq!(
            column(&json!({"type": "object"}), &[Some("{\"a\": [1 ]}")]),
            [json!("{\"a\":[1]}")]
        );
        assert!(
            column(
                &json!({"type": "object", "additionalProperties": {"type": "string"}}),
                &[]
            )
            .is_empty()
        );
    }

    #[test]
    fn answers_of_other_types_are_refused() {
        let closed = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": false});
        for (schema, answer) in [
            (json!({"type": "integer"}), "9223372036854775808"),
            (json!({"type": "integer"}), "\"1\""),
            (json!({"type": "number"}), "9007199254740993"),
            (json!({"type": "string"}), "1"),
            (json!({"type": "boolean"}), "0"),
            (json!({"type": "array", "items": {"type": "string"}}), "{}"),
            (closed.clone(), "{\"b\":1}"),
            (closed, "[]"),
        ] {
            let answer = Answer::parse(answer).unwrap();
            let (answer_type, _) = AnswerType::of(&schema);
            assert!(
                answer_type.check(&answer).is_err() && answer_type.column(&[Some(&answer)]).is_err(),
                "{schema}"
            );
        }
    }
}
