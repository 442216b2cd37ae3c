//! The requests of a benchmark: lines of a trace, or random prompts of one length.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;

use crate::device::draw::Sampling;
use crate::engine::params::{GenerationParams, OutputConstraint};
use crate::engine::request::{Request, SampleId};
use crate::tokenizer::Tokenizer;

/// Upper bound on the length of a line.
const LINE_BYTES_MAX: u64 = 16 << 20;

/// A line of a trace. Unknown fields are errors, because a misspelt option would be ignored
/// silently.
#[derive(Debug, Deserialize)]
#[serde(rename = "Line", deny_unknown_fields)]
struct TraceLine {
    prompt: Option<String>,
    prompt_token_ids: Option<Vec<u32>>,
    max_tokens: u32,
    #[serde(default)]
    temperature: f32,
    #[serde(default)]
    top_k: u32,
    #[serde(default = "one")]
    top_p: f32,
    #[serde(default)]
    min_p: f32,
    choice: Option<Vec<String>>,
    json_schema: Option<serde_json::Value>,
    regex: Option<String>,
}

fn one() -> f32 {
    1.0
}

/// An error in a trace, with its line.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("cannot read the trace `{path}`: {error}")]
    Read { path: String, error: std::io::Error },
    #[error("`{path}`, line {line}: {what}")]
    Line { path: String, line: usize, what: String },
    #[error("the trace `{path}` holds no requests")]
    Empty { path: String },
}

/// Reads a trace: one JSON object per line. Empty lines are skipped.
///
/// # Errors
/// The file is unreadable, or a line is not a request (the first such line is reported).
pub fn read(
    path: &Path,
    tokenizer: &Tokenizer,
    ignore_eos: bool,
    eos: &Arc<[u32]>,
) -> Result<Vec<Request>, TraceError> {
    let name = path.display().to_string();
    let read = |error| TraceError::Read {
        path: name.clone(),
        error,
    };
    let mut file = BufReader::new(File::open(path).map_err(read)?);
    let mut requests: Vec<Request> = Vec::new();
    let mut text = String::new();
    for line in 1.. {
        text.clear();
        let bytes = file.by_ref().take(LINE_BYTES_MAX).read_line(&mut text).map_err(read)?;
        if bytes == 0 {
            break;
        }
        let line_error = |what: String| TraceError::Line {
            path: name.clone(),
            line,
            what,
        };
        if bytes as u64 == LINE_BYTES_MAX {
            return Err(line_error(format!("longer than {LINE_BYTES_MAX} bytes")));
        }
        if text.trim().is_empty() {
            continue;
        }
        let (prompt, mut params) = parse_line(&text, tokenizer).map_err(line_error)?;
        params.ignore_eos = ignore_eos;
        // Requests with equal parameters share them, as rows of a job do.
        let params = match requests.last() {
            Some(last) if *last.params == params => last.params.clone(),
            _ => Arc::new(params),
        };
        requests.push(request_of_row(requests.len(), prompt, params, eos));
    }
    if requests.is_empty() {
        return Err(TraceError::Empty { path: name });
    }
    Ok(requests)
}

fn parse_line(text: &str, tokenizer: &Tokenizer) -> Result<(Vec<u32>, GenerationParams), String> {
    let line: TraceLine = serde_json::from_str(text).map_err(|error| format!("not a request: {error}"))?;
    let prompt = match (line.prompt, line.prompt_token_ids) {
        (Some(text), None) => tokenizer.encode(&text, true)?,
        (None, Some(ids)) => ids,
        (Some(_), Some(_)) => return Err("has both `prompt` and `prompt_token_ids`".into()),
        (None, None) => return Err("has neither `prompt` nor `prompt_token_ids`".into()),
    };
    let shape = match (line.choice, line.json_schema, line.regex) {
        (None, None, None) => OutputConstraint::Free,
        (Some(choices), None, None) => OutputConstraint::Choice {
            choices,
            probabilities: false,
        },
        (None, Some(schema), None) => OutputConstraint::JsonSchema(schema),
        (None, None, Some(regex)) => OutputConstraint::Regex(regex),
        _ => return Err("has more than one of `choice`, `json_schema` and `regex`".into()),
    };
    let is_valid = line.max_tokens > 0
        && line.temperature.is_finite()
        && line.temperature >= 0.0
        && line.top_p > 0.0
        && line.top_p <= 1.0
        && (0.0..=1.0).contains(&line.min_p);
    if !is_valid {
        return Err(
            "`max_tokens` is to be at least 1, `temperature` not negative, `top_p` in (0, 1], `min_p` in [0, 1]".into(),
        );
    }
    let params = GenerationParams {
        sampling: Sampling {
            temperature: line.temperature,
            top_k: line.top_k,
            top_p: line.top_p,
            min_p: line.min_p,
            ..Sampling::default()
        },
        max_tokens: line.max_tokens,
        shape,
        ..GenerationParams::default()
    };
    Ok((prompt, params))
}

/// Generates `count` greedy requests, each with `input_tokens` random prompt tokens and
/// `output_tokens` generated tokens.
pub fn random_requests(
    count: u32,
    input_tokens: u32,
    output_tokens: u32,
    vocab_size: u32,
    seed: u64,
    eos: &Arc<[u32]>,
) -> Vec<Request> {
    let params = Arc::new(GenerationParams {
        sampling: Sampling {
            temperature: 0.0,
            ..Sampling::default()
        },
        max_tokens: output_tokens,
        ignore_eos: true,
        ..GenerationParams::default()
    });
    let draw = |row: u32, index: u32| {
        let drawn = crate::engine::philox::philox4x32([seed as u32, (seed >> 32) as u32], [row, index, 0, 0]);
        drawn[0] % vocab_size
    };
    (0..count)
        .map(|row| {
            let prompt = (0..input_tokens).map(|index| draw(row, index)).collect();
            request_of_row(row as usize, prompt, params.clone(), eos)
        })
        .collect()
}

fn request_of_row(row: usize, prompt: Vec<u32>, params: Arc<GenerationParams>, eos: &Arc<[u32]>) -> Request {
    let id = SampleId {
        job: 0,
        row: row as u64,
        sample: 0,
        attempt: 0,
    };
    Request {
        id,
        prompt: prompt.into(),
        params,
        eos: eos.clone(),
        cache_salt: Arc::default(),
        adapter: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer() -> Tokenizer {
        Tokenizer::from_words(&["ab"], &["<end>"]).unwrap()
    }

    fn read_text(text: &str) -> Result<Vec<Request>, TraceError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace.jsonl");
        std::fs::write(&path, text).unwrap();
        read(&path, &tokenizer(), true, &Arc::from([257u32]))
    }

    #[test]
    fn lines_become_requests_in_order() {
        let found = read_text(
            "{\"prompt\": \"ab\", \"max_tokens\": 3}\n\n{\"prompt_token_ids\": [1, 2], \"max_tokens\": 3}\n\
             {\"prompt_token_ids\": [7], \"max_tokens\": 4, \"temperature\": 0.8, \"top_p\": 0.95, \"choice\": [\"a\", \"b\"]}",
        )
        .unwrap();
        assert_eq!(found.iter().map(|r| r.id.row).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!((&*found[0].prompt, &*found[1].prompt), (&[256][..], &[1, 2][..]));
        assert!(Arc::ptr_eq(&found[0].params, &found[1].params) && found[0].params.ignore_eos);
        assert_eq!(
            (found[2].params.sampling.temperature, found[2].params.sampling.top_p),
            (0.8, 0.95)
        );
        assert!(matches!(&found[2].params.shape, OutputConstraint::Choice { choices, .. } if choices.len() == 2));
    }

    #[test]
    fn errors_name_their_line() {
        let good = "{\"prompt\": \"ab\", \"max_tokens\": 3}\n";
        for (bad, what) in [
            (
                "{\"prompt\": \"ab\"}",
                "line 2: not a request: missing field `max_tokens`",
            ),
            (
                "{\"prompt\": \"ab\", \"max_tokens\": 0}",
                "line 2: `max_tokens` is to be",
            ),
            (
                "{\"prompt\": \"ab\", \"max_tokens\": 1, \"temprature\": 1}",
                "unknown field `temprature`",
            ),
            ("{\"max_tokens\": 1}", "has neither `prompt` nor"),
            (
                "{\"prompt\": \"a\", \"prompt_token_ids\": [], \"max_tokens\": 1}",
                "has both",
            ),
            (
                "{\"prompt\": \"a\", \"max_tokens\": 1, \"regex\": \"a\", \"choice\": []}",
                "more than one of",
            ),
            ("nonsense", "line 2: not a request"),
        ] {
            let error = read_text(&format!("{good}{bad}")).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
        assert!(read_text("\n").unwrap_err().to_string().contains("holds no requests"));
    }

    #[test]
    fn random_prompts_follow_from_the_seed() {
        let eos = Arc::from([0u32]);
        let prompts = |seed| {
            random_requests(3, 5, 7, 100, seed, &eos)
                .into_iter()
                .map(|r| r.prompt)
                .collect::<Vec<_>>()
        };
        assert_eq!(prompts(1), prompts(1));
        assert_ne!(prompts(1), prompts(2));
        assert!(prompts(1).iter().all(|p| p.len() == 5 && p.iter().all(|id| *id < 100)));
        assert_ne!(prompts(1)[0], prompts(1)[1]);
    }
}
