//! Checks the lines of a batch's input before anything runs. One broken line fails the whole batch,
//! because clients correct it and submit again.

use std::collections::HashMap;

use futures::TryStreamExt;
use object_store::ObjectStoreExt;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::record::{BatchError, RefusedLines};
use super::split::InputSplit;
use crate::dataset::lines::cutter::{LINE_BYTES_MAX, LineCutter, Piece, is_blank, lines_of};
use crate::dataset::store::location::Location;
use crate::error_line::short_line;
use crate::job::whole_number;

/// Maximum number of requests in a batch. The check takes about 60 bytes of memory for each.
const REQUESTS_MAX: u64 = 1_000_000;
/// Maximum number of errors that a batch reports.
const ERRORS_MAX: usize = 100;
/// Maximum number of answers per request.
const SAMPLES_MAX: u32 = 1024;
/// What Windows programs write at the beginning of UTF-8 files.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
/// Maximum length of a `custom_id` in bytes.
const CUSTOM_ID_BYTES_MAX: usize = 512;
/// Bytes of text per token, for estimates: about right for English, and for scripts whose
/// characters have three bytes.
const BYTES_PER_TOKEN: usize = 4;
/// Fields of a body that hold what the model reads.
const PROMPT_FIELDS: [&str; 4] = ["messages", "prompt", "input", "instructions"];
/// Fields of a body with the maximum tokens of an answer. The first one that is there counts.
const ANSWER_FIELDS: [&str; 3] = ["max_completion_tokens", "max_tokens", "max_output_tokens"];

/// A checked input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct InputSummary {
    /// The model that all lines name.
    pub model: String,
    /// Lines, refused ones included.
    pub requests: u64,
    /// `n` of the first line.
    pub samples: u32,
    /// Estimated tokens of all prompts and answers.
    pub tokens: u64,
    /// Lines that are no requests, if the batch keeps the others.
    pub refused: Option<RefusedLines>,
}

/// The maximum tokens of an answer whose request states none, by the model's name. `None`: the
/// model is not on offer.
pub(super) type AnswerTokens<'a> = &'a (dyn Fn(&str) -> Option<u32> + Sync);

/// Reads an input to its end. Returns its summary, or the errors found in it. With `split`, the batch
/// keeps its good lines: only an input without any has errors.
///
/// # Errors
/// The input cannot be read, or the split cannot be written.
pub(super) async fn check_input(
    input: &Location,
    endpoint: &str,
    answer_tokens: AnswerTokens<'_>,
    split: Option<InputSplit>,
) -> anyhow::Result<Result<InputSummary, Vec<BatchError>>> {
    let mut bytes = input.store.get(&input.path).await?.into_stream();
    let mut cutter = LineCutter::new(0);
    let mut checker = Checker::new(endpoint, answer_tokens);
    checker.split = split;
    let mut pieces = Vec::new();
    while let Some(chunk) = bytes.try_next().await? {
        cutter.push(&chunk, &mut pieces);
        pieces.drain(..).for_each(|piece| checker.piece(&piece));
        if checker.is_full() {
            break;
        }
        if let Some(split) = &mut checker.split {
            split.flush().await?;
        }
        // Parsing must not keep this thread from other requests for long.
        tokio::task::yield_now().await;
    }
    cutter.finish(&mut pieces);
    pieces.iter().for_each(|piece| checker.piece(piece));
    let split = checker.split.take();
    let mut found = checker.finish(split.is_some());
    match (&mut found, split) {
        (Ok(summary), Some(split)) => summary.refused = split.finish().await?,
        (Err(_), Some(split)) => split.abort().await?,
        (_, None) => {}
    }
    Ok(found)
}

/// The check of one input. Pure.
struct Checker<'a> {
    endpoint: &'a str,
    answer_tokens: AnswerTokens<'a>,
    /// Number of lines so far.
    line: u64,
    /// The line of each `custom_id`, by its hash.
    lines_of_ids: HashMap<u128, u64>,
    /// Lines that are not blank, and those of them that are requests.
    requests: u64,
    good_lines: u64,
    first: Option<InputSummary>,
    /// The maximum tokens of an answer whose request states none.
    answer_tokens_default: u32,
    /// Estimated tokens so far.
    tokens: u64,
    /// The first errors of the input, and the first one of the current line.
    errors: Vec<BatchError>,
    line_error: Option<BatchError>,
    split: Option<InputSplit>,
    requests_max: u64,
    /// Whether the input has more requests than that.
    has_too_many: bool,
}

impl<'a> Checker<'a> {
    fn new(endpoint: &'a str, answer_tokens: AnswerTokens<'a>) -> Checker<'a> {
        Checker {
            endpoint,
            answer_tokens,
            line: 0,
            lines_of_ids: HashMap::new(),
            requests: 0,
            good_lines: 0,
            first: None,
            answer_tokens_default: 0,
            tokens: 0,
            errors: Vec::new(),
            line_error: None,
            split: None,
            requests_max: REQUESTS_MAX,
            has_too_many: false,
        }
    }

    /// Whether further lines would not change the result.
    fn is_full(&self) -> bool {
        self.has_too_many || (self.split.is_none() && self.errors.len() >= ERRORS_MAX)
    }

    fn piece(&mut self, piece: &Piece) {
        match piece {
            Piece::Lines { bytes, .. } => {
                for (_, line) in lines_of(bytes) {
                    self.line += 1;
                    if !is_blank(line) && !self.is_full() && self.has_room() {
                        let custom_id = self.request(line);
                        self.end_line(line, custom_id);
                    }
                }
            }
            Piece::TooLong { lines, .. } => {
                self.line += lines;
                if self.is_full() || !self.has_room() {
                    return;
                }
                let message = format!("the line is longer than {LINE_BYTES_MAX} bytes");
                self.error("invalid_json_line", message, None);
                self.end_line(&[], None);
            }
        }
    }

    /// Whether the batch may have a further line. Broken lines count: each makes a line of results.
    fn has_room(&mut self) -> bool {
        self.has_too_many = self.requests >= self.requests_max;
        if self.has_too_many {
            let message = format!(
                "the file has more than the {} requests that a batch may have",
                self.requests_max
            );
            if self.split.is_some() {
                // The errors before it are of lines that the batch may have.
                self.errors.clear();
            }
            self.error("too_many_tasks", message, None);
        }
        !self.has_too_many
    }

    /// Notes an error of the current line.
    fn error(&mut self, code: &str, message: impl Into<String>, param: Option<&str>) {
        let error = BatchError {
            code: code.into(),
            line: Some(self.line),
            message: message.into(),
            param: param.map(str::to_string),
        };
        if self.errors.len() < ERRORS_MAX {
            self.errors.push(error.clone());
        }
        self.line_error.get_or_insert(error);
    }

    /// Counts a line, and puts it where it belongs.
    fn end_line(&mut self, line: &[u8], custom_id: Option<String>) {
        let error = self.line_error.take();
        self.requests += 1;
        self.good_lines += u64::from(error.is_none());
        match (&mut self.split, error) {
            (Some(split), None) => split.keep(line),
            (Some(split), Some(error)) => split.refuse(custom_id.as_deref(), &error),
            (None, _) => {}
        }
    }

    /// Checks a line, and returns its `custom_id` if that is a text.
    fn request(&mut self, line: &[u8]) -> Option<String> {
        let mut fields = self.fields(line)?;
        self.custom_id(&fields);
        self.method_and_url(&fields);
        match fields.get("body") {
            Some(Value::Object(body)) => self.body(body),
            Some(_) => self.error("invalid_request", "`body` is no object", Some("body")),
            None => self.error("missing_required_parameter", "the line has no `body`", Some("body")),
        }
        match fields.remove("custom_id") {
            Some(Value::String(id)) if id.len() <= CUSTOM_ID_BYTES_MAX => Some(id),
            _ => None,
        }
    }

    fn fields(&mut self, line: &[u8]) -> Option<Map<String, Value>> {
        let message = match serde_json::from_slice(line) {
            Ok(Value::Object(fields)) => return Some(fields),
            Ok(_) => "the line is no JSON object".to_string(),
            Err(_) if line.starts_with(BYTE_ORDER_MARK) => {
                "the file begins with a byte order mark: save it as UTF-8 without one".into()
            }
            Err(error) => format!("the line is no valid JSON: {}", short_line(&error.to_string())),
        };
        self.error("invalid_json_line", message, None);
        None
    }

    fn custom_id(&mut self, fields: &Map<String, Value>) {
        let id = match fields.get("custom_id") {
            Some(Value::String(id)) if !id.is_empty() && id.len() <= CUSTOM_ID_BYTES_MAX => id,
            Some(Value::String(_)) => {
                let message = format!("`custom_id` needs 1 to {CUSTOM_ID_BYTES_MAX} bytes");
                return self.error("invalid_request", message, Some("custom_id"));
            }
            Some(Value::Null) | None => {
                let message = "the line has no `custom_id`";
                return self.error("missing_required_parameter", message, Some("custom_id"));
            }
            Some(_) => return self.error("invalid_request", "`custom_id` is no text", Some("custom_id")),
        };
        let hash = Sha256::digest(id.as_bytes());
        let mut key = [0; 16];
        key.copy_from_slice(&hash[..16]);
        if let Some(first) = self.lines_of_ids.insert(u128::from_le_bytes(key), self.line) {
            let message = format!("the line has the `custom_id` of line {first}; each must be unique");
            self.error("duplicate_custom_id", message, Some("custom_id"));
        }
    }

    fn method_and_url(&mut self, fields: &Map<String, Value>) {
        match fields.get("method") {
            Some(Value::String(method)) if method == "POST" => {}
            None | Some(Value::Null) => {
                self.error("missing_required_parameter", "the line has no `method`", Some("method"));
            }
            Some(_) => self.error("invalid_method", "`method` is not \"POST\"", Some("method")),
        }
        match fields.get("url") {
            Some(Value::String(url)) if url == self.endpoint => {}
            None | Some(Value::Null) => {
                self.error("missing_required_parameter", "the line has no `url`", Some("url"));
            }
            Some(url) => {
                let found = short_line(&url.to_string());
                let message = format!("`url` is {found}, and the batch is for {}", self.endpoint);
                self.error("url_mismatch", message, Some("url"));
            }
        }
    }

    fn body(&mut self, body: &Map<String, Value>) {
        let Some(model) = body.get("model").and_then(Value::as_str) else {
            return self.error(
                "missing_required_parameter",
                "`body.model` is no text",
                Some("body.model"),
            );
        };
        // A number that no batch can have is the error of its rows.
        let samples = match body.get("n") {
            None | Some(Value::Null) => 1,
            Some(n) => whole_number(n)
                .and_then(|n| u32::try_from(n).ok())
                .unwrap_or(1)
                .clamp(1, SAMPLES_MAX),
        };
        match &self.first {
            Some(first) if first.model != model => {
                let message = format!(
                    "`body.model` is `{}`, and the first line has `{}`; a batch has one model",
                    short_line(model),
                    first.model
                );
                self.error("model_mismatch", message, Some("body.model"));
            }
            Some(first) if first.samples != samples => {
                let message = format!(
                    "`body.n` is {samples} (1 if it is left out), and the first line has {}; all requests of a batch have the same `n`",
                    first.samples
                );
                self.error("invalid_request", message, Some("body.n"));
            }
            Some(_) => {}
            // A broken line decides nothing for the others.
            None if self.line_error.is_some() => {}
            None => match (self.answer_tokens)(model) {
                Some(answer_tokens) => {
                    self.answer_tokens_default = answer_tokens;
                    self.first = Some(InputSummary {
                        model: model.to_string(),
                        requests: 0,
                        samples,
                        tokens: 0,
                        refused: None,
                    });
                }
                None => {
                    let message = format!("there is no model `{}`; GET /v1/models lists them", short_line(model));
                    self.error("model_not_found", message, Some("body.model"));
                }
            },
        }
        // The body is what is checked last of a line.
        if self.line_error.is_none() {
            let tokens = request_tokens(body, self.answer_tokens_default, samples);
            self.tokens = self.tokens.saturating_add(tokens);
        }
    }

    /// `keeps_good`: broken lines are no errors of the batch.
    fn finish(mut self, keeps_good: bool) -> Result<InputSummary, Vec<BatchError>> {
        let has_failed = self.has_too_many || !keeps_good || self.good_lines == 0;
        if has_failed && !self.errors.is_empty() {
            return Err(self.errors);
        }
        match self.first.take() {
            Some(first) => Ok(InputSummary {
                requests: self.requests,
                tokens: self.tokens,
                ..first
            }),
            None => Err(vec![BatchError {
                code: "empty_file".into(),
                line: None,
                message: "the input file has no request".into(),
                param: Some("input_file_id".into()),
            }]),
        }
    }
}

/// Estimated tokens of a request: those of its prompt, and the most that its answers may have.
/// `answer_tokens`: the maximum per answer if the request states none.
fn request_tokens(body: &Map<String, Value>, answer_tokens: u32, samples: u32) -> u64 {
    let prompt = PROMPT_FIELDS
        .iter()
        .filter_map(|name| body.get(*name))
        .map(prompt_tokens);
    let stated = ANSWER_FIELDS.iter().find_map(|name| tokens_stated(body.get(*name)?));
    let answer = stated.unwrap_or(answer_tokens.into());
    prompt
        .sum::<u64>()
        .saturating_add(answer.saturating_mul(samples.into()))
}

fn tokens_stated(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| u64::try_from(whole_number(value)?).ok())
}

/// Estimated tokens of what a model reads. A number is a token's id.
fn prompt_tokens(value: &Value) -> u64 {
    match value {
        Value::String(text) => text.len().div_ceil(BYTES_PER_TOKEN) as u64,
        Value::Number(_) => 1,
        Value::Array(items) => items.iter().map(prompt_tokens).sum(),
        Value::Object(fields) => fields.values().map(prompt_tokens).sum(),
        Value::Null | Value::Bool(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use object_store::memory::InMemory;
    use object_store::path::Path;
    use serde_json::json;
    use url::Url;

    use super::*;

    const CHAT: &str = "/v1/chat/completions";

    fn line(id: &str, model: &str) -> Value {
        json!({"custom_id": id, "method": "POST", "url": CHAT, "body": {"model": model, "messages": []}})
    }

    fn check(text: &str) -> Result<InputSummary, Vec<BatchError>> {
        check_limited(text, REQUESTS_MAX)
    }

    fn check_limited(text: &str, requests_max: u64) -> Result<InputSummary, Vec<BatchError>> {
        let answer_tokens = |model: &str| (model == "demo").then_some(100);
        let mut checker = Checker::new(CHAT, &answer_tokens);
        checker.requests_max = requests_max;
        let (mut cutter, mut pieces) = (LineCutter::new(0), Vec::new());
        cutter.push(text.as_bytes(), &mut pieces);
        cutter.finish(&mut pieces);
        pieces.iter().for_each(|piece| checker.piece(piece));
        checker.finish(false)
    }

    fn codes(text: &str) -> Vec<(String, Option<u64>)> {
        let errors = check(text).unwrap_err();
        errors.into_iter().map(|error| (error.code, error.line)).collect()
    }

    #[test]
    fn good_lines_are_counted() {
        let mut first = line("a", "demo");
        first["body"]["n"] = json!(3);
        let mut second = line("b", "demo");
        second["body"]["n"] = json!(3);
        let mut third = line("c", "demo");
        third["body"]["n"] = json!(3);
        let text = format!("{first}\n\r\n{second}\r\n  \n{third}");
        let found = check(&text).unwrap();
        assert_eq!((found.model.as_str(), found.requests, found.samples), ("demo", 3, 3));
    }

    #[test]
    fn tokens_are_estimated_from_texts_and_maxima() {
        let tokens = |fields: Value| {
            let mut line = line("a", "demo");
            for (name, value) in fields.as_object().unwrap() {
                line["body"][name] = value.clone();
            }
            check(&line.to_string()).unwrap().tokens
        };
        // The default of the model.
        assert_eq!(tokens(json!({})), 100);
        // 9 bytes of text are 3 tokens, and the role is 1.
        let messages = json!([{"role": "user", "content": "123456789"}]);
        assert_eq!(tokens(json!({"messages": messages, "max_tokens": 7})), 11);
        assert_eq!(
            tokens(json!({"max_completion_tokens": 5000.0, "max_tokens": 1, "n": 2.0})),
            10_000
        );
        let parts = json!([{"role": "user", "content": [{"type": "text", "text": "12345"}]}]);
        assert_eq!(tokens(json!({"messages": parts, "max_tokens": 0})), 4);
        let both = json!({"prompt": [5, 6, 7], "max_tokens": 9, "max_completion_tokens": 2, "n": 10});
        assert_eq!(tokens(both), 23);
        assert_eq!(tokens(json!({"max_tokens": u64::MAX, "n": 2, "prompt": "x"})), u64::MAX);
        let two = format!("{}\n{}", line("a", "demo"), line("b", "demo"));
        assert_eq!(check(&two).unwrap().tokens, 200);
    }

    #[test]
    fn broken_lines_count_as_requests() {
        let text = format!("{}\nx\n\n{}\nx\n", line("a", "demo"), line("b", "demo"));
        assert_eq!(check_limited(&text, 5).unwrap_err().len(), 2);
        let errors = check_limited(&text, 3).unwrap_err();
        let last = errors.last().unwrap();
        assert_eq!((last.code.as_str(), last.line), ("too_many_tasks", Some(5)));
        assert_eq!(check_limited(&format!("{text}x\nx\n"), 3).unwrap_err(), errors);
    }

    #[test]
    fn each_broken_line_is_named() {
        let good = line("a", "demo").to_string();
        let with = |field: &str, value: Value| {
            let mut broken = line("b", "demo");
            broken[field] = value;
            broken.to_string()
        };
        for (broken, code) in [
            ("{".to_string(), "invalid_json_line"),
            ("[1]".into(), "invalid_json_line"),
            ("\u{feff}{}".into(), "invalid_json_line"),
            (good.clone(), "duplicate_custom_id"),
            (with("custom_id", json!("")), "invalid_request"),
            (with("custom_id", json!("x".repeat(513))), "invalid_request"),
            (with("custom_id", json!(7)), "invalid_request"),
            (with("custom_id", Value::Null), "missing_required_parameter"),
            (with("method", json!("GET")), "invalid_method"),
            (with("url", json!("/v1/completions")), "url_mismatch"),
            (with("body", json!("x")), "invalid_request"),
            (with("body", json!({})), "missing_required_parameter"),
            (line("b", "other").to_string(), "model_mismatch"),
            (with("body", json!({"model": "demo", "n": 2})), "invalid_request"),
        ] {
            assert_eq!(
                codes(&format!("{good}\n{broken}\n")),
                [(code.to_string(), Some(2))],
                "{broken}"
            );
        }
        assert_eq!(
            codes(&line("a", "other").to_string()),
            [("model_not_found".into(), Some(1))]
        );
        assert_eq!(codes("\n \n"), [("empty_file".into(), None)]);
    }

    #[tokio::test]
    async fn good_lines_are_kept_beside_broken_ones() {
        let root = Location {
            store: Arc::new(InMemory::new()),
            path: Path::from("root"),
            url: Url::parse("memory:///root").unwrap(),
        };
        let places = ["input", "good", "refused"].map(|name| root.join(name));
        let text = async |place: &Location| {
            let found = place.store.get(&place.path).await.unwrap().bytes().await.unwrap();
            String::from_utf8(found.to_vec()).unwrap()
        };
        let mut elsewhere = line("b", "other");
        elsewhere["url"] = json!("/v1/embeddings");
        let good = [line("a", "demo").to_string(), line("d", "demo").to_string()];
        let broken = [elsewhere.to_string(), "{".into(), line("a", "demo").to_string()];
        let input = format!(
            "{}\n{}\n\n{}\n{}\n{}\n",
            broken[0], good[0], broken[1], broken[2], good[1]
        );
        let check = async |input: String| {
            places[0].store.put(&places[0].path, input.into()).await.unwrap();
            let split = InputSplit::new("batch_x", &places[1], &places[2]);
            let answer_tokens = |model: &str| (model == "demo").then_some(100);
            check_input(&places[0], CHAT, &answer_tokens, Some(split))
                .await
                .unwrap()
        };
        let summary = check(input).await.unwrap();
        assert_eq!((summary.model.as_str(), summary.requests), ("demo", 5));
        assert_eq!(summary.tokens, 200, "broken lines are not answered");
        assert_eq!(text(&places[1]).await, format!("{}\n{}\n", good[0], good[1]));
        let refused = text(&places[2]).await;
        let counted = RefusedLines {
            lines: 3,
            bytes: refused.len() as u64,
        };
        assert_eq!(summary.refused, Some(counted));
        let lines: Vec<Value> = refused
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let codes: Vec<_> = lines
            .iter()
            .map(|line| &line["response"]["body"]["error"]["code"])
            .collect();
        assert_eq!(codes, ["url_mismatch", "invalid_json_line", "duplicate_custom_id"]);
        let ids: Vec<_> = lines.iter().map(|line| &line["custom_id"]).collect();
        assert_eq!(ids, [&json!("b"), &Value::Null, &json!("a")]);
        // Without one good line, the batch fails; without a broken one, there is nothing to split.
        assert_eq!(check("{\n[\n".into()).await.unwrap_err().len(), 2);
        assert_eq!(check(good.join("\n")).await.unwrap().refused, None);
    }

    #[test]
    fn errors_are_bounded() {
        let text = "x\n".repeat(1000);
        assert_eq!(check(&text).unwrap_err().len(), ERRORS_MAX);
    }

    #[test]
    fn a_line_that_is_too_long_is_named() {
        let good = line("a", "demo");
        let long = "x".repeat(LINE_BYTES_MAX + 1);
        assert_eq!(
            codes(&format!("{good}\n{long}\n{good}")),
            [
                ("invalid_json_line".to_string(), Some(2)),
                ("duplicate_custom_id".into(), Some(3)),
            ]
        );
    }
}
