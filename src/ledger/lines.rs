//! Decodes result lines, the JSON lines of `jsonl` parts: their counts, and the rows that a later
//! generation copies from them.

use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, ListBuilder, RecordBatch, StringArray, StringBuilder, new_null_array};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::Value;

use super::record::Tally;
use crate::dataset::part::{RESPONSE_OBJECT, RESPONSES_URL};
use crate::dataset::row::{CUT_OFF, RowStatus, WHOLE};

/// The fields of a result line that depend on its row.
#[derive(Debug, Deserialize)]
pub(super) struct ResultLine {
    pub id: String,
    custom_id: Value,
    response: Option<Response>,
    error: Option<LineError>,
}

#[derive(Debug, Deserialize)]
struct LineError {
    code: String,
    message: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Response {
    body: AnswerBody,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum AnyBody {
    Completion(Body),
    Response(ResponseBody),
}

/// The body of `/v1/responses`.
#[derive(Debug, Deserialize)]
struct ResponseBody {
    object: String,
    incomplete_details: Option<Value>,
    output: Vec<ResponseItem>,
    usage: ResponseUsage,
}

#[derive(Debug, Deserialize)]
struct ResponseItem {
    #[serde(rename = "type")]
    kind: String,
    content: Vec<ResponseText>,
}

#[derive(Debug, Deserialize)]
struct ResponseText {
    text: String,
}

#[derive(Debug, Deserialize)]
struct ResponseUsage {
    input_tokens: u64,
    input_tokens_details: PromptDetails,
    output_tokens: u64,
    output_tokens_details: CompletionDetails,
}

impl From<ResponseBody> for Body {
    fn from(body: ResponseBody) -> Body {
        let finish_reason = match body.incomplete_details {
            Some(_) => CUT_OFF,
            None => WHOLE,
        };
        let text_of = |kind: &str| {
            let mut items = body.output.iter();
            let item = items.find(|item| item.kind == kind)?;
            Some(item.content.first()?.text.clone())
        };
        let choice = Choice {
            finish_reason: Some(finish_reason.into()),
            message: ResponseMessage {
                content: text_of("message"),
                reasoning_content: text_of("reasoning"),
            },
            text: None,
            reasoning_content: None,
        };
        Body {
            choices: vec![choice],
            usage: Usage {
                prompt_tokens: body.usage.input_tokens,
                completion_tokens: body.usage.output_tokens,
                prompt_tokens_details: body.usage.input_tokens_details,
                completion_tokens_details: body.usage.output_tokens_details,
            },
            object: body.object,
        }
    }
}

/// A body of any endpoint, in the form of a completion.
#[derive(Debug, Deserialize)]
#[serde(from = "AnyBody")]
struct AnswerBody(Body);

impl From<AnyBody> for AnswerBody {
    fn from(body: AnyBody) -> AnswerBody {
        AnswerBody(match body {
            AnyBody::Completion(body) => body,
            AnyBody::Response(body) => body.into(),
        })
    }
}

#[derive(Debug, Deserialize)]
struct Body {
    object: String,
    choices: Vec<Choice>,
    usage: Usage,
}

#[derive(Debug, Deserialize)]
struct Choice {
    finish_reason: Option<String>,
    /// Present in chat completions.
    #[serde(default)]
    message: ResponseMessage,
    /// Present in text completions, which have no message.
    text: Option<String>,
    reasoning_content: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
struct ResponseMessage {
    content: Option<String>,
    reasoning_content: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
    prompt_tokens_details: PromptDetails,
    #[serde(default)]
    completion_tokens_details: CompletionDetails,
}

#[derive(Debug, Deserialize)]
struct PromptDetails {
    cached_tokens: u64,
}

#[derive(Debug, Default, Deserialize)]
struct CompletionDetails {
    reasoning_tokens: Option<u64>,
}

/// The lines of a part in order, each with its line number from 1.
pub(super) fn lines(bytes: &[u8]) -> Result<impl Iterator<Item = Result<(usize, ResultLine), String>>, String> {
    let text = match bytes {
        b"" => None,
        _ => Some(bytes.strip_suffix(b"\n").ok_or("its last line has no newline")?),
    };
    let split = text.into_iter().flat_map(|text| text.split(|&b| b == b'\n'));
    Ok(split.enumerate().map(|(index, line)| {
        let line = serde_json::from_slice(line);
        let line = line.map_err(|error| format!("line {} is no result of a batch: {error}", index + 1))?;
        Ok((index + 1, line))
    }))
}

impl ResultLine {
    fn status(&self) -> Result<RowStatus, String> {
        let Some(LineError { code, .. }) = &self.error else {
            return Ok(RowStatus::Succeeded);
        };
        let known = RowStatus::ALL.into_iter().find(|status| status.as_str() == code);
        known.ok_or_else(|| format!("unknown status `{code}`"))
    }

    /// Status and message of a row that did not succeed.
    pub(super) fn failure(&self) -> Option<(&str, &str)> {
        let error = self.error.as_ref()?;
        Some((&error.code, error.message.as_deref()?))
    }

    pub(super) fn tally(&self) -> Result<Tally, String> {
        let mut tally = Tally::default();
        tally.add_row(self.status()?);
        if let Some(body) = self.body() {
            tally.prompt_tokens = body.usage.prompt_tokens;
            tally.cached_tokens = body.usage.prompt_tokens_details.cached_tokens;
            tally.completion_tokens = body.usage.completion_tokens;
            let is_cut = |choice: &Choice| choice.finish_reason.as_deref() == Some(CUT_OFF);
            tally.truncated = Some(u64::from(body.choices.iter().any(is_cut)));
        }
        Ok(tally)
    }

    fn body(&self) -> Option<&Body> {
        self.response.as_ref().map(|response| &response.body.0)
    }

    /// One text per sample. `None`: the row has no completion.
    fn texts(&self, field_of: impl Fn(&Choice) -> Option<&String>) -> Option<Vec<Option<String>>> {
        let body = self.body()?;
        Some(body.choices.iter().map(|choice| field_of(choice).cloned()).collect())
    }
}

/// The columns from which rows are counted by status, with their tokens and truncated completions.
pub(super) fn tally_columns() -> SchemaRef {
    let number = |name: &str| Field::new(name, DataType::Int64, true);
    let fields = vec![
        Field::new("row", DataType::Int64, false),
        Field::new("status", DataType::Utf8, false),
        Field::new("finish_reason", DataType::new_list(DataType::Utf8, true), true),
        number("prompt_tokens"),
        number("cached_tokens"),
        number("completion_tokens"),
    ];
    Arc::new(Schema::new(fields))
}

/// The rows of a `jsonl` part whose first row is `first_row`, in the columns of `schema`. Columns
/// that result lines do not have are null. Encoding these rows as lines gives the same lines again.
pub(super) fn decode(bytes: &Bytes, first_row: u64, schema: &SchemaRef) -> Result<RecordBatch, String> {
    let lines: Vec<ResultLine> = lines(bytes)?
        .map(|line| line.map(|(_, line)| line))
        .collect::<Result<_, _>>()?;
    let columns = schema.fields().iter().map(|field| column(field, &lines, first_row));
    let columns = columns.collect::<Result<Vec<_>, _>>()?;
    RecordBatch::try_new(schema.clone(), columns).map_err(|error| error.to_string())
}

fn column(field: &Field, lines: &[ResultLine], first_row: u64) -> Result<ArrayRef, String> {
    let numbers = |field_of: &dyn Fn(&Body) -> Option<u64>| -> ArrayRef {
        let number = |line: &ResultLine| line.body().and_then(field_of).map(|n| n as i64);
        Arc::new(Int64Array::from_iter(lines.iter().map(number)))
    };
    let texts = |field_of: &dyn Fn(&ResultLine) -> Option<String>| -> Result<ArrayRef, String> {
        let texts: ArrayRef = Arc::new(StringArray::from_iter(lines.iter().map(field_of)));
        cast(&texts, field.data_type()).map_err(|error| error.to_string())
    };
    let samples = |field_of: fn(&Choice) -> Option<&String>| -> Result<ArrayRef, String> {
        match field.data_type() {
            DataType::List(_) => Ok(lists(lines.iter().map(|line| line.texts(field_of)))),
            _ => texts(&|line| line.texts(field_of)?.into_iter().next().flatten()),
        }
    };
    match field.name().as_str() {
        "row" => Ok(Arc::new(Int64Array::from_iter_values(
            (first_row..).take(lines.len()).map(|row| row as i64),
        ))),
        "status" => {
            let names = lines.iter().map(|line| line.status().map(|status| status.as_str()));
            Ok(Arc::new(StringArray::from(names.collect::<Result<Vec<_>, _>>()?)))
        }
        "completion" => samples(|choice| choice.message.content.as_ref().or(choice.text.as_ref())),
        "finish_reason" => samples(|choice| choice.finish_reason.as_ref()),
        "reasoning" => samples(|choice| {
            choice
                .message
                .reasoning_content
                .as_ref()
                .or(choice.reasoning_content.as_ref())
        }),
        "error" => texts(&|line| line.error.as_ref()?.message.clone()),
        "prompt_tokens" => Ok(numbers(&|body| Some(body.usage.prompt_tokens))),
        "cached_tokens" => Ok(numbers(&|body| Some(body.usage.prompt_tokens_details.cached_tokens))),
        "completion_tokens" => Ok(numbers(&|body| Some(body.usage.completion_tokens))),
        "reasoning_tokens" => Ok(numbers(&|body| body.usage.completion_tokens_details.reasoning_tokens)),
        "custom_id" => texts(&|line| match &line.custom_id {
            Value::Null => None,
            Value::String(id) => Some(id.clone()),
            other => Some(other.to_string()),
        }),
        "url" => texts(&|line| {
            let url = match line.body().map(|body| body.object.as_str()) {
                Some("text_completion") => "/v1/completions",
                Some(RESPONSE_OBJECT) => RESPONSES_URL,
                _ => "/v1/chat/completions",
            };
            Some(url.into())
        }),
        _ => Ok(new_null_array(field.data_type(), lines.len())),
    }
}

fn lists(rows: impl Iterator<Item = Option<Vec<Option<String>>>>) -> ArrayRef {
    let mut out = ListBuilder::new(StringBuilder::new());
    for row in rows {
        let is_valid = row.is_some();
        for text in row.into_iter().flatten() {
            out.values().append_option(text);
        }
        out.append(is_valid);
    }
    Arc::new(out.finish())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::output::{OutputColumns, OutputSchema};
    use crate::dataset::part::{OpenaiMeta, part_openai};
    use crate::dataset::row::{RowResult, SampleResult};

    const URLS: [Option<&str>; 3] = [Some("/v1/completions"), None, Some("/v1/chat/completions")];

    /// Rows 4 to 6 of a job: one succeeded, one has no answer, and one has a truncated answer.
    fn rows(samples: u32, thinking: bool, urls: [Option<&str>; 3]) -> RecordBatch {
        let text = |texts: [Option<&str>; 3]| Arc::new(StringArray::from(texts.to_vec())) as ArrayRef;
        let carry = RecordBatch::try_from_iter_with_nullable([
            ("custom_id", text([Some("a"), None, Some("c")]), true),
            ("url", text(urls), true),
        ])
        .unwrap();
        let columns = OutputColumns {
            samples,
            thinking,
            token_ids: false,
            logprobs: false,
            choices: None,
            parsed: None,
            sample_status: false,
        };
        let sample = |n: u32| SampleResult {
            status: RowStatus::Succeeded,
            error: None,
            text: format!("t{n}"),
            reasoning: (n == 0).then(|| "hm".into()),
            reasoning_tokens: n,
            parsed: None,
            finish_reason: if n == 0 { "length" } else { "stop" },
            completion_tokens: 3,
            token_ids: vec![],
            logprobs: vec![],
            choice_probabilities: vec![],
        };
        let row = |row, status, count: u32, error: Option<&str>| RowResult {
            row,
            status,
            samples: (0..count).map(sample).collect(),
            error: error.map(String::from),
            prompt_tokens: 4 * count,
            cached_tokens: 1,
        };
        let results = [
            row(4, RowStatus::Succeeded, samples, None),
            row(5, RowStatus::Errored, 0, Some("too long")),
            row(6, RowStatus::InvalidOutput, samples, None),
        ];
        OutputSchema::new(&carry.schema(), columns)
            .to_batch(&carry, 4, &results)
            .unwrap()
    }

    #[test]
    fn lines_round_trip_through_rows() {
        let meta = OpenaiMeta {
            job: "j".into(),
            model: "m".into(),
            created: 7,
        };
        let responses = [Some(RESPONSES_URL), None, Some(RESPONSES_URL)];
        for (samples, thinking, urls) in [
            (1, false, URLS),
            (1, true, URLS),
            (2, false, URLS),
            (3, true, URLS),
            (1, false, responses),
            (1, true, responses),
        ] {
            let batch = rows(samples, thinking, urls);
            let bytes = part_openai(std::slice::from_ref(&batch), &meta).unwrap();
            let back = decode(&bytes, 4, &batch.schema()).unwrap();
            assert_eq!(part_openai(&[back], &meta).unwrap(), bytes);
            let few = decode(&bytes, 4, &tally_columns()).unwrap();
            let all = super::super::RowSet::from_range(4..7);
            let counts = super::super::data::tally(&few, &all).unwrap();
            assert_eq!(counts, super::super::data::tally(&batch, &all).unwrap());
            let mut sum = Tally::default();
            lines(&bytes)
                .unwrap()
                .for_each(|line| sum.add(&line.unwrap().1.tally().unwrap()));
            assert_eq!(sum, counts);
        }
    }

    #[test]
    fn foreign_bytes_are_refused() {
        for (bad, why) in [
            (&b"x\nx\n"[..], "line 1 is no result of a batch"),
            (b"{}\n", "line 1 is no result of a batch"),
            (b"\n", "line 1 is no result of a batch"),
            (
                b"{\"id\":\"a\",\"custom_id\":1,\"response\":null,\"error\":null}",
                "its last line has no newline",
            ),
        ] {
            let read = lines(bad).and_then(|lines| lines.collect::<Result<Vec<_>, _>>());
            assert!(read.unwrap_err().starts_with(why));
        }
        assert_eq!(lines(b"").unwrap().count(), 0);
    }
}
