//! Converts record batches to the bytes of parts, and back. Data objects (Parquet objects with rows
//! that log records name) have the same format. Equal batches always give equal bytes.

use arrow::array::{ArrayRef, AsArray, RecordBatch};
use arrow::datatypes::{Int64Type, SchemaRef};
use bytes::Bytes;
use parquet::arrow::ArrowWriter;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use serde_json::{Value, json};

use super::error::{DatasetError, output_error};
use super::part_in;
use super::row::CUT_OFF;
use super::value::cell;
use super::writing::WriteOptions;

/// Approximate maximum size of a part's row group, in bytes.
const GROUP_BYTES_MAX: usize = 64 << 20;

/// Rows per batch on reading.
const BATCH_ROWS: usize = 8192;

/// Key of the Arrow schema in Parquet metadata, which is hidden from callers.
const ARROW_SCHEMA_KEY: &str = "ARROW:schema";

/// Writes `batches` as a Parquet file with `metadata` as its key-value metadata.
pub fn part_parquet(
    schema: &SchemaRef,
    batches: &[RecordBatch],
    metadata: &[(String, String)],
    options: WriteOptions,
) -> Result<Bytes, DatasetError> {
    let pairs = metadata
        .iter()
        .map(|(key, value)| KeyValue::new(key.clone(), value.clone()))
        .collect();
    let properties = WriterProperties::builder()
        .set_created_by(format!("gristmill version {}", env!("CARGO_PKG_VERSION")))
        .set_compression(options.compression().map_err(output_error)?)
        .set_max_row_group_row_count(Some(options.group_rows as usize))
        .set_max_row_group_bytes(Some(GROUP_BYTES_MAX))
        .set_key_value_metadata(Some(pairs))
        .build();
    let mut bytes = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut bytes, schema.clone(), Some(properties)).map_err(output_error)?;
    for batch in batches {
        writer.write(batch).map_err(output_error)?;
    }
    writer.close().map_err(output_error)?;
    Ok(bytes.into())
}

/// The content of a file that [`part_parquet`] wrote.
#[derive(Debug, Clone)]
pub struct ParquetContent {
    pub schema: SchemaRef,
    pub batches: Vec<RecordBatch>,
    pub metadata: Vec<(String, String)>,
}

/// Reads a part or data object. The caller must have checked the hash of `bytes` against the commit
/// or log record that names it.
pub fn read_parquet(bytes: Bytes) -> Result<ParquetContent, DatasetError> {
    part_in::catch_panics(|| read_all(&bytes)).map_err(output_error)
}

fn read_all(bytes: &Bytes) -> Result<ParquetContent, String> {
    let builder = part_in::open(bytes)?;
    let pairs = builder
        .metadata()
        .file_metadata()
        .key_value_metadata()
        .cloned()
        .unwrap_or_default();
    let metadata = pairs
        .into_iter()
        .filter(|kv| kv.key != ARROW_SCHEMA_KEY)
        .map(|kv| (kv.key, kv.value.unwrap_or_default()))
        .collect();
    let schema = arrow::datatypes::Schema::new(builder.schema().fields().clone());
    let reader = builder.with_batch_size(BATCH_ROWS).build().map_err(|e| e.to_string())?;
    let mut batches = Vec::new();
    for batch in reader {
        batches.push(batch.map_err(|e| e.to_string())?);
    }
    Ok(ParquetContent {
        schema: schema.into(),
        batches,
        metadata,
    })
}

/// Fields of OpenAI batch result lines that do not come from their rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenaiMeta {
    /// The job's id; line ids consist of it and the row number.
    pub job: String,
    /// The model's name as the job gives it.
    pub model: String,
    /// Creation time of the job in seconds since 1970. The row's completion time is not used, so
    /// that equal rows give equal bytes.
    pub created: i64,
}

/// The endpoint whose answers are responses.
pub const RESPONSES_URL: &str = "/v1/responses";
/// The `object` of a response.
pub const RESPONSE_OBJECT: &str = "response";

/// OpenAI batch result lines, one per row, in the order of `batches`.
///
/// `custom_id` is the carried column of that name, or `row-N` if there is no such column. It is
/// null if the row's line has none or can no longer be read, since a made-up id could belong to
/// another row. With a carried `url` that ends in `/completions` but not in `/chat/completions`,
/// the body is a text completion, and with [`RESPONSES_URL`] a response. A row without a completion
/// has `"response": null` and an `error`; a row with invalid output has both a response and an error.
pub fn part_openai(batches: &[RecordBatch], meta: &OpenaiMeta) -> Result<Bytes, DatasetError> {
    let mut out = Vec::new();
    for batch in batches {
        let columns = OpenaiColumns::of(batch)?;
        for i in 0..batch.num_rows() {
            serde_json::to_writer(&mut out, &columns.line(i, meta)?).map_err(output_error)?;
            out.push(b'\n');
        }
    }
    Ok(out.into())
}

/// The `id` of a row's line. It has the job's id, so that a JSONL part identifies its job.
pub fn line_id(job: &str, row: u64) -> String {
    format!("batch_req_{job}_{row}")
}

/// A batch that has the columns that a line needs.
struct OpenaiColumns<'a> {
    batch: &'a RecordBatch,
}

impl<'a> OpenaiColumns<'a> {
    fn of(batch: &'a RecordBatch) -> Result<Self, DatasetError> {
        for name in [
            "row",
            "status",
            "completion",
            "finish_reason",
            "error",
            "prompt_tokens",
            "cached_tokens",
            "completion_tokens",
        ] {
            if batch.column_by_name(name).is_none() {
                return Err(DatasetError::Output(format!("a batch without column `{name}`")));
            }
        }
        Ok(OpenaiColumns { batch })
    }

    /// The value of column `name` in the batch's row `i`; null if there is no such column.
    fn value(&self, name: &str, i: usize) -> Result<Value, DatasetError> {
        self.batch
            .column_by_name(name)
            .map_or(Ok(Value::Null), |column: &ArrayRef| {
                cell(column, i).map_err(DatasetError::Output)
            })
    }

    fn count(&self, name: &str, i: usize) -> Result<i64, DatasetError> {
        Ok(self.value(name, i)?.as_i64().unwrap_or(0))
    }

    fn line(&self, i: usize, meta: &OpenaiMeta) -> Result<Value, DatasetError> {
        let row = self
            .batch
            .column_by_name("row")
            .and_then(|c| c.as_primitive_opt::<Int64Type>())
            .map(|c| c.value(i));
        let row = row.ok_or_else(|| DatasetError::Output("column `row` is not int64".into()))?;
        let status = self.value("status", i)?;
        let custom_id = match self.batch.column_by_name("custom_id") {
            Some(_) => self.value("custom_id", i)?,
            None => format!("row-{row}").into(),
        };
        let error = match self.value("error", i)? {
            Value::Null if status == "succeeded" => Value::Null,
            message => json!({"code": status, "message": message}),
        };
        let response = match self.value("completion", i)? {
            Value::Null => Value::Null,
            Value::Array(texts) if texts.is_empty() => Value::Null,
            completion => {
                let body = self.body(i, row, completion, meta)?;
                json!({"status_code": 200, "request_id": format!("req_{}_{row}", meta.job), "body": body})
            }
        };
        Ok(json!({
            "id": line_id(&meta.job, row.cast_unsigned()),
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }))
    }

    fn body(&self, i: usize, row: i64, completion: Value, meta: &OpenaiMeta) -> Result<Value, DatasetError> {
        let url = self.value("url", i)?;
        if url == RESPONSES_URL {
            return self.response(i, row, completion, meta);
        }
        // A column of a completion holds a list only if the job asks for several samples per row.
        let per_sample = |value: Value| match value {
            Value::Array(values) => values,
            value => vec![value],
        };
        let is_text = match url {
            Value::String(url) => url.ends_with("/completions") && !url.ends_with("/chat/completions"),
            _ => false,
        };
        let reasons = per_sample(self.value("finish_reason", i)?);
        let thinks = self.batch.column_by_name("reasoning_tokens").is_some();
        let thoughts = per_sample(self.value("reasoning", i)?);
        let choices = per_sample(completion).into_iter().enumerate().map(|(n, text)| {
            let reason = reasons.get(n).cloned().unwrap_or(Value::Null);
            let mut choice = if is_text {
                json!({"index": n, "text": text})
            } else {
                json!({"index": n, "message": {"role": "assistant", "content": text, "refusal": null}})
            };
            if thinks {
                // A text completion has no message to hold the thought.
                let thought = thoughts.get(n).cloned().unwrap_or(Value::Null);
                let holder = if is_text { &mut choice } else { &mut choice["message"] };
                holder["reasoning_content"] = thought;
            }
            choice["logprobs"] = Value::Null;
            choice["finish_reason"] = reason;
            choice
        });
        let count = |name: &str| self.count(name, i);
        let (prompt, completion) = (count("prompt_tokens")?, count("completion_tokens")?);
        let (object, prefix) = if is_text {
            ("text_completion", "cmpl")
        } else {
            ("chat.completion", "chatcmpl")
        };
        let mut usage = json!({
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": count("cached_tokens")?},
        });
        if thinks {
            usage["completion_tokens_details"] = json!({"reasoning_tokens": count("reasoning_tokens")?});
        }
        Ok(json!({
            "id": format!("{prefix}-{}-{row}", meta.job),
            "object": object,
            "created": meta.created,
            "model": meta.model,
            "choices": choices.collect::<Vec<_>>(),
            "usage": usage,
        }))
    }

    /// The body of a response. It has one answer, since no other number is accepted for its
    /// endpoint.
    fn response(&self, i: usize, row: i64, completion: Value, meta: &OpenaiMeta) -> Result<Value, DatasetError> {
        let first = |value: Value| match value {
            Value::Array(values) => values.into_iter().next().unwrap_or(Value::Null),
            value => value,
        };
        let is_cut = first(self.value("finish_reason", i)?) == CUT_OFF;
        let status = if is_cut { "incomplete" } else { "completed" };
        let id = |prefix: &str| format!("{prefix}_{}_{row}", meta.job);
        let mut output = Vec::new();
        if let thought @ Value::String(_) = first(self.value("reasoning", i)?) {
            output.push(json!({
                "id": id("rs"),
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": thought}],
            }));
        }
        let text = json!({"type": "output_text", "text": first(completion), "annotations": [], "logprobs": []});
        output.push(json!({
            "id": id("msg"), "type": "message", "role": "assistant", "status": status, "content": [text],
        }));
        let [prompt, cached] = [self.count("prompt_tokens", i)?, self.count("cached_tokens", i)?];
        let [completion, reasoning] = [self.count("completion_tokens", i)?, self.count("reasoning_tokens", i)?];
        Ok(json!({
            "id": id("resp"),
            "object": RESPONSE_OBJECT,
            "created_at": meta.created,
            "status": status,
            "incomplete_details": if is_cut { json!({"reason": "max_output_tokens"}) } else { Value::Null },
            "error": null,
            "model": meta.model,
            "output": output,
            "instructions": null,
            "metadata": {},
            "parallel_tool_calls": true,
            "temperature": null,
            "tool_choice": "auto",
            "tools": [],
            "top_p": null,
            "usage": {
                "input_tokens": prompt,
                // Clients' types need both; nothing is kept beyond the job that others would pay for.
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens": completion,
                "output_tokens_details": {"reasoning_tokens": reasoning},
                "total_tokens": prompt + completion,
            },
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::output::{OutputColumns, OutputSchema};
    use crate::dataset::row::{RowResult, RowStatus, SampleResult};
    use crate::dataset::writing::PartCodec;
    use arrow::array::StringArray;
    use std::sync::Arc;

    fn sample(text: &str) -> SampleResult {
        SampleResult {
            status: RowStatus::Succeeded,
            error: None,
            text: text.into(),
            reasoning: Some(format!("about {text}")),
            reasoning_tokens: 2,
            parsed: None,
            finish_reason: "length",
            completion_tokens: 3,
            token_ids: vec![],
            logprobs: vec![],
            choice_probabilities: vec![],
        }
    }

    fn batch(samples: u32) -> (OutputSchema, RecordBatch) {
        batch_of(samples, false)
    }

    fn batch_of(samples: u32, thinking: bool) -> (OutputSchema, RecordBatch) {
        let ids: ArrayRef = Arc::new(StringArray::from(vec![Some("first"), None, Some("third")]));
        let carry = RecordBatch::try_from_iter_with_nullable([("custom_id", ids, true)]).unwrap();
        let schema = OutputSchema::new(
            &carry.schema(),
            OutputColumns {
                samples,
                thinking,
                token_ids: false,
                logprobs: false,
                choices: None,
                parsed: None,
                sample_status: false,
            },
        );
        let row = |row, status, count: u32, error: Option<&str>| RowResult {
            row,
            status,
            samples: (0..count).map(|n| sample(&format!("t{n}"))).collect(),
            error: error.map(String::from),
            prompt_tokens: 4,
            cached_tokens: 1,
        };
        let results = [
            row(0, RowStatus::Succeeded, samples, None),
            row(1, RowStatus::Errored, 0, Some("too long")),
            row(2, RowStatus::InvalidOutput, samples, Some("no JSON")),
        ];
        let batch = schema.to_batch(&carry, 0, &results).unwrap();
        (schema, batch)
    }

    #[test]
    fn parquet_comes_back_with_its_metadata_and_the_same_bytes() {
        for samples in [1, 2] {
            let (schema, batch) = batch(samples);
            let metadata = [
                ("gristmill.job".to_string(), "j1".to_string()),
                ("b".to_string(), "2".to_string()),
            ];
            let bytes = part_parquet(
                &schema.schema(),
                std::slice::from_ref(&batch),
                &metadata,
                WriteOptions::default(),
            )
            .unwrap();
            assert_eq!(
                bytes,
                part_parquet(
                    &schema.schema(),
                    std::slice::from_ref(&batch),
                    &metadata,
                    WriteOptions::default()
                )
                .unwrap()
            );
            let back = read_parquet(bytes).unwrap();
            assert_eq!(back.schema, schema.schema());
            assert_eq!(back.metadata, metadata);
            assert_eq!(back.batches, [batch]);
        }
        let (schema, _) = batch(1);
        let empty = read_parquet(part_parquet(&schema.schema(), &[], &[], WriteOptions::default()).unwrap()).unwrap();
        assert_eq!((empty.schema, empty.batches.len()), (schema.schema(), 0));
        assert!(read_parquet(Bytes::from_static(b"PAR1PAR1")).is_err());
    }

    #[test]
    fn parts_come_back_from_every_codec() {
        let (schema, batch) = batch(1);
        let mut sizes = Vec::new();
        for (codec, level) in [
            (PartCodec::Zstd, None),
            (PartCodec::Zstd, Some(3)),
            (PartCodec::Zstd, Some(22)),
            (PartCodec::Snappy, None),
            (PartCodec::Gzip, None),
            (PartCodec::Gzip, Some(9)),
            (PartCodec::None, None),
        ] {
            let options = WriteOptions {
                codec,
                level,
                group_rows: 2,
            };
            let bytes = part_parquet(&schema.schema(), std::slice::from_ref(&batch), &[], options).unwrap();
            sizes.push(bytes.len());
            let read = read_parquet(bytes).unwrap();
            let rows = arrow::compute::concat_batches(&read.schema, &read.batches).unwrap();
            assert_eq!(rows, batch, "{codec:?}");
        }
        assert_eq!(sizes[0], sizes[1], "the usual level");
    }

    #[test]
    fn lines_of_responses_have_their_own_form() {
        let (_, batch) = batch_of(1, true);
        let urls: ArrayRef = Arc::new(StringArray::from(vec![Some(RESPONSES_URL); 3]));
        let schema = batch.schema();
        let names = schema.fields().iter().map(|field| field.name().as_str());
        let all = names.zip(batch.columns().to_vec()).chain([("url", urls)]);
        let batch = RecordBatch::try_from_iter(all).unwrap();
        let meta = OpenaiMeta {
            job: "j1".into(),
            model: "m".into(),
            created: 7,
        };
        let bytes = part_openai(&[batch], &meta).unwrap();
        let first = bytes.split(|&b| b == b'\n').next().unwrap();
        let body = serde_json::from_slice::<Value>(first).unwrap()["response"]["body"].take();
        assert_eq!(
            (&body["id"], &body["object"]),
            (&json!("resp_j1_0"), &json!("response"))
        );
        assert_eq!(body["status"], "incomplete");
        assert_eq!(body["incomplete_details"], json!({"reason": "max_output_tokens"}));
        assert_eq!(body["output"][0]["content"][0]["text"], "about t0");
        assert_eq!(
            body["output"][1],
            json!({
                "id": "msg_j1_0", "type": "message", "role": "assistant", "status": "incomplete",
                "content": [{"type": "output_text", "text": "t0", "annotations": [], "logprobs": []}],
            })
        );
        assert_eq!(
            body["usage"],
            json!({
                "input_tokens": 4, "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
                "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 7,
            })
        );
    }

    #[test]
    fn openai_lines_have_a_response_an_error_or_both() {
        let (_, batch) = batch(1);
        let meta = OpenaiMeta {
            job: "j1".into(),
            model: "m".into(),
            created: 7,
        };
        let mut unnamed = batch.clone();
        unnamed.remove_column(batch.schema().index_of("custom_id").unwrap());
        let unnamed = part_openai(&[unnamed], &meta).unwrap();
        assert!(String::from_utf8_lossy(&unnamed).contains(r#""custom_id":"row-2""#));
        let bytes = part_openai(&[batch], &meta).unwrap();
        let lines: Vec<Value> = bytes
            .split(|&b| b == b'\n')
            .filter(|l| !l.is_empty())
            .map(|l| serde_json::from_slice(l).unwrap())
            .collect();
        assert_eq!(lines.len(), 3);
        assert_eq!(
            lines[0],
            json!({
                "id": "batch_req_j1_0", "custom_id": "first", "error": null,
                "response": {"status_code": 200, "request_id": "req_j1_0", "body": {
                    "id": "chatcmpl-j1-0", "object": "chat.completion", "created": 7, "model": "m",
                    "choices": [{"index": 0, "message": {"role": "assistant", "content": "t0", "refusal": null},
                        "logprobs": null, "finish_reason": "length"}],
                    "usage": {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7,
                        "prompt_tokens_details": {"cached_tokens": 1}},
                }},
            })
        );
        assert_eq!(lines[1]["custom_id"], Value::Null, "its row has none");
        assert_eq!(lines[1]["response"], Value::Null);
        assert_eq!(lines[1]["error"], json!({"code": "errored", "message": "too long"}));
        assert_eq!(lines[2]["error"]["code"], "invalid_output");
        assert_eq!(lines[2]["response"]["body"]["choices"][0]["message"]["content"], "t0");
    }

    #[test]
    fn thoughts_are_in_the_message_of_their_answer() {
        let meta = OpenaiMeta {
            job: "j1".into(),
            model: "m".into(),
            created: 7,
        };
        let bytes = part_openai(&[batch_of(2, true).1], &meta).unwrap();
        let first: Value = serde_json::from_slice(bytes.split(|&b| b == b'\n').next().unwrap()).unwrap();
        let body = &first["response"]["body"];
        assert_eq!(
            body["choices"][1],
            json!({"index": 1, "message": {"role": "assistant", "content": "t1", "refusal": null,
                "reasoning_content": "about t1"}, "logprobs": null, "finish_reason": "length"})
        );
        assert_eq!(
            body["usage"]["completion_tokens_details"],
            json!({"reasoning_tokens": 4})
        );
    }

    #[test]
    fn several_samples_are_choices() {
        let (_, batch) = batch(2);
        let meta = OpenaiMeta {
            job: "j1".into(),
            model: "m".into(),
            created: 7,
        };
        let bytes = part_openai(&[batch], &meta).unwrap();
        let first: Value = serde_json::from_slice(bytes.split(|&b| b == b'\n').next().unwrap()).unwrap();
        assert_eq!(first["response"]["body"]["choices"][1]["message"]["content"], "t1");
    }
}
