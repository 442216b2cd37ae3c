//! The two files of a batch's results, computed from the parts of its job: requests with an answer,
//! and requests without one.
//!
//! Parts hold one line per row, with gristmill's own row status in `error`. The API knows four
//! cases: an answer, an error of the request (`response` with a status code of 400), and the codes
//! `batch_expired` and `batch_cancelled`.
//!
//! A file's size is recorded when its batch ends, and its lines are made anew for each download. So
//! whoever changes the form of a line has to record which form a batch's files have.

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use futures::stream::BoxStream;
use futures::{Stream, TryStreamExt};
use object_store::{ObjectStore, ObjectStoreExt};
use serde_json::{Value, json};

use super::record::{ResultsKind, Usage};
use crate::dataset::lines::cutter::{LineCutter, Piece, lines_of};
use crate::dataset::part::RESPONSES_URL;
use crate::dataset::store::location::Location;
use crate::job::row_error::RowError;
use crate::ledger::{Ledger, LedgerError, Store};

/// The end of one request of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowEnd {
    Completed,
    Failed,
    Expired,
    Cancelled,
}

impl RowEnd {
    pub(super) fn kind(self) -> ResultsKind {
        match self {
            RowEnd::Completed => ResultsKind::Output,
            RowEnd::Failed | RowEnd::Expired | RowEnd::Cancelled => ResultsKind::Errors,
        }
    }
}

/// A line of a part in the API's form.
#[derive(Debug)]
pub(super) struct ResultLine {
    pub end: RowEnd,
    pub usage: Usage,
    /// The line as JSON, without its line end.
    pub json: Vec<u8>,
}

impl ResultLine {
    /// Converts a line of a part for the clients of `served`.
    ///
    /// # Errors
    /// The line was not written by gristmill.
    pub(super) fn of_part(line: &[u8], served: &Served) -> Result<ResultLine, String> {
        let mut line: Value = serde_json::from_slice(line).map_err(|error| error.to_string())?;
        let id = line["id"].as_str().unwrap_or_default();
        let request_id = format!("req_{}", id.strip_prefix("batch_req_").unwrap_or(id));
        let code = line["error"]["code"].as_str();
        let has_answer = line["response"].is_object();
        let end = match code {
            None | Some("succeeded" | "invalid_output") if has_answer => RowEnd::Completed,
            Some("errored" | "invalid_output") => RowEnd::Failed,
            Some("expired") => RowEnd::Expired,
            Some("cancelled") => RowEnd::Cancelled,
            other => return Err(format!("unknown status {other:?}")),
        };
        let message = line["error"]["message"]
            .as_str()
            .unwrap_or("the request failed")
            .to_string();
        let (response, error) = match end {
            RowEnd::Completed => {
                let mut response = line["response"].take();
                let body = &mut response["body"];
                body["model"] = served.model.as_str().into();
                // Clients read it without asking whether the model thinks.
                if let Some(usage) = body["usage"]
                    .as_object_mut()
                    .filter(|usage| usage.contains_key("completion_tokens"))
                {
                    let details = usage.entry("completion_tokens_details");
                    details.or_insert_with(|| json!({"reasoning_tokens": 0}));
                }
                (response, Value::Null)
            }
            RowEnd::Failed => {
                let error = RowError::of(&message, served.prompt_field());
                let (status, kind) = if error.is_internal {
                    (500, "server_error")
                } else {
                    (400, "invalid_request_error")
                };
                let error = json!({"message": error.message, "type": kind, "param": error.param, "code": error.code});
                let response = json!({"status_code": status, "request_id": request_id, "body": {"error": error}});
                (response, Value::Null)
            }
            RowEnd::Expired => (
                Value::Null,
                json!({"code": "batch_expired", "message": "the request did not run before the batch expired"}),
            ),
            RowEnd::Cancelled => (
                Value::Null,
                json!({"code": "batch_cancelled", "message": "the request did not run before the batch was cancelled"}),
            ),
        };
        let usage = usage_of(&response["body"]["usage"]);
        line["response"] = response;
        line["error"] = error;
        Ok(ResultLine {
            end,
            usage,
            json: line.to_string().into_bytes(),
        })
    }
}

/// The usage of a completion or of a response, which have other names for it.
fn usage_of(usage: &Value) -> Usage {
    let count = |[completion, response]: [&str; 2]| {
        let found = usage.pointer(completion).or_else(|| usage.pointer(response));
        found.and_then(Value::as_u64).unwrap_or(0)
    };
    Usage {
        input_tokens: count(["/prompt_tokens", "/input_tokens"]),
        cached_tokens: count([
            "/prompt_tokens_details/cached_tokens",
            "/input_tokens_details/cached_tokens",
        ]),
        output_tokens: count(["/completion_tokens", "/output_tokens"]),
        reasoning_tokens: count([
            "/completion_tokens_details/reasoning_tokens",
            "/output_tokens_details/reasoning_tokens",
        ]),
    }
}

/// What clients of a batch call its model and its endpoint.
#[derive(Debug, Clone)]
pub(super) struct Served {
    pub model: String,
    pub endpoint: String,
}

impl Served {
    /// The field of a body with the prompt.
    fn prompt_field(&self) -> &'static str {
        match self.endpoint.as_str() {
            "/v1/completions" => "prompt",
            RESPONSES_URL => "input",
            _ => "messages",
        }
    }
}

/// Reads the lines of all parts of a finished job, in the order of the input.
pub(super) struct ResultReader {
    ledger: Ledger,
    output: Location,
    served: Served,
    store: Arc<dyn ObjectStore>,
    next_shard: u32,
    part: Option<OpenPart>,
    /// Whether the job still runs: a part that is missing is the end of what there is.
    is_running: bool,
}

/// A part that is being read.
struct OpenPart {
    address: String,
    bytes: BoxStream<'static, object_store::Result<Bytes>>,
    cutter: LineCutter,
}

impl ResultReader {
    /// `is_running`: the first missing part ends the reading; else it is an error.
    pub(super) fn new(ledger: Ledger, output: Location, served: Served, is_running: bool) -> ResultReader {
        ResultReader {
            store: Store::object_store(&output),
            ledger,
            output,
            served,
            next_shard: 0,
            part: None,
            is_running,
        }
    }

    /// The next lines; `None` at the end. There may be none at a time.
    ///
    /// # Errors
    /// A part cannot be read, or was not written by gristmill.
    pub(super) async fn next_lines(&mut self) -> Result<Option<Vec<ResultLine>>, LedgerError> {
        let Some(mut part) = self.part.take() else {
            if self.next_shard >= self.ledger.job().shards.len() as u32 {
                return Ok(None);
            }
            let location = self.output.join(&self.ledger.keys().part(self.next_shard));
            self.part = open_part(self.store.clone(), location).await?;
            if self.part.is_none() {
                let part = self.ledger.keys().part(self.next_shard);
                let missing = LedgerError::damaged(format!("the part `{part}` is missing"));
                return if self.is_running { Ok(None) } else { Err(missing) };
            }
            self.next_shard += 1;
            return Ok(Some(Vec::new()));
        };
        let mut pieces = Vec::new();
        let chunk = part
            .bytes
            .try_next()
            .await
            .map_err(|error| read_error(&part.address, error))?;
        let address = part.address.clone();
        let damaged = |why: String| LedgerError::damaged(format!("`{address}`: {why}"));
        match chunk {
            Some(chunk) => {
                part.cutter.push(&chunk, &mut pieces);
                self.part = Some(part);
            }
            None => part.cutter.finish(&mut pieces),
        }
        let mut lines = Vec::new();
        for piece in pieces {
            let Piece::Lines { bytes, .. } = piece else {
                return Err(damaged("a line is too long".into()));
            };
            for (_, line) in lines_of(&bytes) {
                lines.push(ResultLine::of_part(line, &self.served).map_err(damaged)?);
            }
        }
        Ok(Some(lines))
    }

    /// The content of one file of results, in chunks. The stream ends with an error if the parts
    /// cannot be read to their end, so that the client does not take a beginning for the whole.
    pub(super) fn content(self, kind: ResultsKind) -> impl Stream<Item = Result<Bytes, LedgerError>> + Send + 'static {
        let chunks = futures::stream::try_unfold(self, move |mut reader| async move {
            let Some(lines) = reader.next_lines().await? else {
                return Ok(None);
            };
            let mut chunk = BytesMut::new();
            for line in lines.iter().filter(|line| line.end.kind() == kind) {
                chunk.put_slice(&line.json);
                chunk.put_u8(b'\n');
            }
            Ok(Some((chunk.freeze(), reader)))
        });
        // An empty chunk would end the response early.
        chunks.try_filter(|chunk| std::future::ready(!chunk.is_empty()))
    }
}

/// `None`: there is no such part.
async fn open_part(store: Arc<dyn ObjectStore>, location: Location) -> Result<Option<OpenPart>, LedgerError> {
    let address = location.url.to_string();
    let found = match store.get(&location.path).await {
        Err(object_store::Error::NotFound { .. }) => return Ok(None),
        found => found.map_err(|error| read_error(&address, error))?,
    };
    Ok(Some(OpenPart {
        bytes: found.into_stream(),
        address,
        cutter: LineCutter::new(0),
    }))
}

pub(super) fn read_error(address: &str, error: object_store::Error) -> LedgerError {
    match error {
        object_store::Error::NotFound { .. } => LedgerError::damaged(format!("`{address}`: the part is missing")),
        source => LedgerError::Retryable {
            operation: format!("reading `{address}`"),
            tries: 1,
            source,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part_line(response: Value, error: Value) -> Vec<u8> {
        let line = json!({"id": "batch_req_j1_7", "custom_id": "c", "response": response, "error": error});
        line.to_string().into_bytes()
    }

    fn answer() -> Value {
        json!({"status_code": 200, "request_id": "req_j1_7", "body": {
            "model": "/srv/models/demo",
            "choices": [],
            "usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
        }})
    }

    fn served(endpoint: &str) -> Served {
        Served {
            model: "demo".into(),
            endpoint: endpoint.into(),
        }
    }

    fn converted(response: Value, error: Value) -> (RowEnd, Usage, Value) {
        let line = ResultLine::of_part(&part_line(response, error), &served("/v1/chat/completions")).unwrap();
        (line.end, line.usage, serde_json::from_slice(&line.json).unwrap())
    }

    #[test]
    fn answers_have_the_name_that_the_client_knows() {
        for error in [Value::Null, json!({"code": "invalid_output", "message": "no JSON"})] {
            let (end, usage, line) = converted(answer(), error);
            assert_eq!(end, RowEnd::Completed);
            assert_eq!(line["response"]["body"]["model"], "demo");
            assert_eq!(
                line["response"]["body"]["usage"]["completion_tokens_details"],
                json!({"reasoning_tokens": 0})
            );
            assert_eq!(
                (line["error"].clone(), line["custom_id"].clone()),
                (Value::Null, json!("c"))
            );
            assert_eq!(
                (usage.input_tokens, usage.cached_tokens, usage.output_tokens),
                (5, 4, 2)
            );
        }
    }

    #[test]
    fn rows_without_an_answer_say_why() {
        let (end, _, line) = converted(Value::Null, json!({"code": "errored", "message": "prompt too long"}));
        assert_eq!(end, RowEnd::Failed);
        assert_eq!(line["response"]["status_code"], 400);
        assert_eq!(line["response"]["request_id"], "req_j1_7");
        assert_eq!(line["response"]["body"]["error"]["message"], "prompt too long");
        assert_eq!(line["error"], Value::Null);
        for (status, end, code) in [
            ("expired", RowEnd::Expired, "batch_expired"),
            ("cancelled", RowEnd::Cancelled, "batch_cancelled"),
        ] {
            let (found, _, line) = converted(Value::Null, json!({"code": status, "message": "x"}));
            assert_eq!(found, end);
            assert_eq!(
                (line["response"].clone(), line["error"]["code"].clone()),
                (Value::Null, json!(code))
            );
        }
    }

    #[test]
    fn errors_have_the_code_and_the_field_of_the_request() {
        for (reason, endpoint, status, code, param) in [
            (
                "`frequency` in `body` is not supported",
                "/v1/completions",
                400,
                Value::Null,
                Value::Null,
            ),
            (
                "unknown field `frequency` in `body`",
                "/v1/completions",
                400,
                json!("unknown_parameter"),
                json!("frequency"),
            ),
            (
                "`tools` in `body` is not supported",
                "/v1/responses",
                400,
                json!("unsupported_parameter"),
                json!("tools"),
            ),
            (
                "the prompt has 9 tokens, and the model's context of 8 must hold it",
                "/v1/responses",
                400,
                json!("context_length_exceeded"),
                json!("input"),
            ),
            (
                "the process died three times",
                "/v1/completions",
                500,
                json!("server_error"),
                Value::Null,
            ),
        ] {
            let line = part_line(Value::Null, json!({"code": "errored", "message": reason}));
            let line = ResultLine::of_part(&line, &served(endpoint)).unwrap();
            let line: Value = serde_json::from_slice(&line.json).unwrap();
            let response = &line["response"];
            assert_eq!(response["status_code"], status);
            let error = &response["body"]["error"];
            assert_eq!((&error["code"], &error["param"]), (&code, &param), "{reason}");
        }
    }

    #[test]
    fn the_usage_of_a_response_has_other_names() {
        let body = json!({"object": "response", "model": "x", "usage": {
            "input_tokens": 5, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 2,
            "output_tokens_details": {"reasoning_tokens": 1}, "total_tokens": 7,
        }});
        let (_, usage, line) = converted(json!({"status_code": 200, "body": body}), Value::Null);
        let counts = [
            usage.input_tokens,
            usage.cached_tokens,
            usage.output_tokens,
            usage.reasoning_tokens,
        ];
        assert_eq!(counts, [5, 4, 2, 1]);
        assert!(
            line["response"]["body"]["usage"]
                .get("completion_tokens_details")
                .is_none()
        );
    }

    #[test]
    fn foreign_lines_are_refused() {
        for line in [
            b"x".to_vec(),
            b"{}".to_vec(),
            part_line(Value::Null, json!({"code": "other"})),
        ] {
            assert!(ResultLine::of_part(&line, &served("/v1/completions")).is_err());
        }
    }
}
