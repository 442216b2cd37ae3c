//! Collects the finished samples of a row into the row's result.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::dataset::answer::json::Answer;
use crate::dataset::answer::types::AnswerType;
use crate::dataset::output::OutputColumns;
use crate::dataset::row::{RowResult, RowStatus, SampleResult};
use crate::engine::params::OutputConstraint;
use crate::engine::request::{Completion, FinishedSample};
use crate::worker::in_flight::ShardKey;

/// Maximum length of a row's `error` in characters: an error may quote text as long as the row.
const ERROR_CHARS_MAX: usize = 2_000;

/// Collects the samples of rows that are on the device.
#[derive(Debug, Default)]
pub struct Assembler {
    /// Key: the job's number within the worker, and the row.
    rows: HashMap<(u32, u64), PartialRow>,
}

#[derive(Debug)]
struct PartialRow {
    key: ShardKey,
    shape: ShapeKind,
    columns: Arc<OutputColumns>,
    samples: Vec<Option<Result<Completion, String>>>,
    samples_missing: u32,
}

/// What the column `parsed` holds for a row: nothing, the text, or the JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ShapeKind {
    Free,
    Text,
    Json,
}

impl From<&OutputConstraint> for ShapeKind {
    fn from(shape: &OutputConstraint) -> Self {
        match shape {
            OutputConstraint::Free => ShapeKind::Free,
            OutputConstraint::Choice { .. } | OutputConstraint::Regex(_) => ShapeKind::Text,
            OutputConstraint::JsonSchema(_) => ShapeKind::Json,
        }
    }
}

impl Assembler {
    /// Registers a row of the shard `key` before it goes to the device, which will return `samples`
    /// finished samples of it. `columns`: the job's output columns.
    pub fn expect(
        &mut self,
        key: ShardKey,
        row: u64,
        samples: u32,
        shape: &OutputConstraint,
        columns: &Arc<OutputColumns>,
    ) {
        let partial = PartialRow {
            key,
            shape: shape.into(),
            columns: columns.clone(),
            samples: vec![None; samples as usize],
            samples_missing: samples,
        };
        self.rows.insert((key.job, row), partial);
    }

    /// Adds one finished sample; returns the row's result once its last sample has come.
    pub fn add(&mut self, finished: FinishedSample) -> Option<(ShardKey, RowResult)> {
        let (job, row) = (finished.id.job, finished.id.row);
        let partial = self.rows.get_mut(&(job, row))?;
        let slot = partial.samples.get_mut(finished.id.sample as usize)?;
        if slot.replace(finished.result).is_none() {
            partial.samples_missing -= 1;
        }
        if partial.samples_missing > 0 {
            return None;
        }
        let partial = self.rows.remove(&(job, row))?;
        let samples = partial.samples.into_iter().flatten().collect();
        Some((partial.key, row_result(row, partial.shape, &partial.columns, samples)))
    }

    /// Drops a row whose samples will not come after all.
    pub fn forget(&mut self, job: u32, row: u64) {
        self.rows.remove(&(job, row));
    }

    /// Drops rows of a job whose samples will not come after all.
    pub fn forget_rows(&mut self, job: u32, rows: &Range<u64>) {
        self.rows
            .retain(|(row_job, row), _| *row_job != job || !rows.contains(row));
    }
}

/// The result of a row that never reached the device.
pub fn errored_row(row: u64, error: String) -> RowResult {
    without_completion(row, RowStatus::Errored, cut_error(error))
}

/// Cuts an error to a readable length.
fn cut_error(mut error: String) -> String {
    if let Some((end, _)) = error.char_indices().nth(ERROR_CHARS_MAX) {
        error.truncate(end);
        error.push('…');
    }
    error
}

/// The result of a row that was unfinished when its job was cancelled or reached a limit.
pub fn closed_row(row: u64, status: RowStatus) -> RowResult {
    let why = match status {
        RowStatus::Cancelled => "the job was cancelled before this row was finished",
        _ => "the job's budget or deadline was reached before this row was finished",
    };
    without_completion(row, status, why.into())
}

fn without_completion(row: u64, status: RowStatus, error: String) -> RowResult {
    RowResult {
        row,
        status,
        samples: Vec::new(),
        error: Some(error),
        prompt_tokens: 0,
        cached_tokens: 0,
    }
}

fn row_result(
    row: u64,
    shape: ShapeKind,
    columns: &OutputColumns,
    results: Vec<Result<Completion, String>>,
) -> RowResult {
    let mut samples = Vec::with_capacity(results.len());
    let (mut prompt_tokens, mut cached_tokens) = (0, 0);
    let mut failed: Option<String> = None;
    // Other samples of the row are kept only if the sample columns show which sample failed.
    let keeps_samples = columns.sample_status && results.iter().any(Result::is_ok);
    for (result, number) in results.into_iter().zip(1..) {
        let completion = match result {
            Ok(completion) => completion,
            Err(error) if keeps_samples => {
                let error = cut_error(error);
                failed = failed.or_else(|| Some(cut_error(format!("sample {number}: {error}"))));
                samples.push(SampleResult::failed(error));
                continue;
            }
            Err(error) => return errored_row(row, error),
        };
        if prompt_tokens == 0 {
            prompt_tokens = completion.prompt_tokens;
            cached_tokens = completion.cached_tokens;
        }
        samples.push(sample_result(shape, columns.parsed.as_ref(), completion));
    }
    let misfit = || samples.iter().find_map(|sample| sample.error.clone());
    let (status, error) = match failed {
        Some(why) => (RowStatus::Errored, Some(why)),
        None => match misfit() {
            Some(why) => (RowStatus::InvalidOutput, Some(why)),
            None => (RowStatus::Succeeded, None),
        },
    };
    RowResult {
        row,
        status,
        samples,
        error,
        prompt_tokens,
        cached_tokens,
    }
}

/// Why a completion with a thought lacks an answer.
fn missing_answer(completion: &Completion) -> Option<&'static str> {
    let thought = completion.thought.as_ref().filter(|_| !completion.fits_shape)?;
    match thought.is_closed {
        false => Some("there is no answer: the completion ended inside its thought"),
        true if completion.text.is_empty() => Some("there is no answer: the completion ended with its thought"),
        true => None,
    }
}

/// The result of one sample. If its text lacks the requested shape, its `error` says why.
fn sample_result(shape: ShapeKind, parsed: Option<&AnswerType>, completion: Completion) -> SampleResult {
    let (fits_shape, no_answer) = (completion.fits_shape, missing_answer(&completion));
    let mut sample = SampleResult {
        status: RowStatus::Succeeded,
        error: None,
        reasoning_tokens: completion.thought.as_ref().map_or(0, |thought| thought.tokens),
        reasoning: completion.thought.map(|thought| thought.text),
        parsed: None,
        finish_reason: completion.finish_reason.as_str(),
        completion_tokens: completion.token_ids.len() as u32,
        token_ids: completion.token_ids,
        logprobs: completion.logprobs.unwrap_or_default(),
        choice_probabilities: completion.choice_probabilities.unwrap_or_default(),
        text: completion.text,
    };
    let (reason, tokens) = (sample.finish_reason, sample.completion_tokens);
    let answer = match (no_answer, fits_shape, shape) {
        (Some(why), ..) => Err(format!("{why} (it ended by {reason} after {tokens} tokens)")),
        (None, false, _) => Err(format!(
            "the completion does not have the shape asked for: it ended ({reason}) after {tokens} tokens"
        )),
        (None, true, ShapeKind::Free) => Ok(None),
        (None, true, ShapeKind::Text) => Ok(Some(sample.text.clone())),
        (None, true, ShapeKind::Json) => compact_json(&sample.text, parsed).map(Some),
    };
    match answer {
        Ok(answer) => sample.parsed = answer,
        Err(why) => {
            sample.status = RowStatus::InvalidOutput;
            sample.error = Some(why);
        }
    }
    sample
}

/// The answer as compact JSON; an error if it is no JSON or its column cannot hold it.
fn compact_json(text: &str, parsed: Option<&AnswerType>) -> Result<String, String> {
    let answer = Answer::parse(text)?;
    if let Some(answer_type) = parsed {
        answer_type
            .check(&answer)
            .map_err(|why| format!("the answer does not fit its column: {why}"))?;
    }
    Ok(answer.compact())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::request::{FinishReason, SampleId};
    use crate::engine::thinking::Thought;

    const KEY: ShardKey = ShardKey { job: 0, shard: 3 };

    fn finished(row: u64, sample: u32, text: &str, fits: bool) -> FinishedSample {
        let id = SampleId {
            job: 0,
            row,
            sample,
            attempt: 0,
        };
        let completion = Completion {
            id,
            token_ids: vec![1, 2],
            text: text.into(),
            finish_reason: FinishReason::Stop,
            fits_shape: fits,
            logprobs: None,
            choice_probabilities: None,
            thought: None,
            prompt_tokens: 7,
            cached_tokens: 3 * sample,
        };
        FinishedSample {
            id,
            result: Ok(completion),
            computed_tokens: 9,
        }
    }

    #[test]
    fn a_row_is_finished_by_its_last_sample_in_any_order() {
        let mut assembler = Assembler::default();
        assembler.expect(KEY, 4, 2, &OutputConstraint::Free, &Arc::default());
        assert_eq!(assembler.add(finished(4, 1, "b", true)), None);
        let (key, row) = assembler.add(finished(4, 0, "a", true)).unwrap();
        assert_eq!(key, KEY);
        assert_eq!(row.status, RowStatus::Succeeded);
        assert_eq!(
            row.samples.iter().map(|s| s.text.as_str()).collect::<Vec<_>>(),
            ["a", "b"]
        );
        assert_eq!((row.prompt_tokens, row.cached_tokens), (7, 0));
        assert!(assembler.rows.is_empty());
    }

    #[test]
    fn a_thought_without_an_answer_says_where_it_ended() {
        for (closed, words) in [(false, "ended inside its thought"), (true, "ended with its thought")] {
            let mut assembler = Assembler::default();
            assembler.expect(KEY, 4, 1, &OutputConstraint::Free, &Arc::default());
            let mut finished = finished(4, 0, "", false);
            finished.result.as_mut().unwrap().thought = Some(Thought {
                text: "hm".into(),
                tokens: 1,
                is_closed: closed,
            });
            let (_, row) = assembler.add(finished).unwrap();
            assert_eq!(
                (row.status, row.samples[0].reasoning_tokens),
                (RowStatus::InvalidOutput, 1)
            );
            assert!(row.error.as_deref().unwrap().contains(words), "{row:?}");
        }
    }

    #[test]
    fn what_was_asked_decides_what_is_parsed() {
        let json = OutputConstraint::JsonSchema(serde_json::json!({}));
        for (shape, text, fits, status, parsed) in [
            (OutputConstraint::Free, "x", true, RowStatus::Succeeded, None),
            (
                OutputConstraint::Regex("x".into()),
                "x",
                true,
                RowStatus::Succeeded,
                Some("x"),
            ),
            (
                OutputConstraint::Regex("x".into()),
                "y",
                false,
                RowStatus::InvalidOutput,
                None,
            ),
            (
                json.clone(),
                "{ \"a\": 1}",
                true,
                RowStatus::Succeeded,
                Some("{\"a\":1}"),
            ),
            (json, "{\"a", false, RowStatus::InvalidOutput, None),
        ] {
            let mut assembler = Assembler::default();
            assembler.expect(KEY, 0, 1, &shape, &Arc::default());
            let (_, row) = assembler.add(finished(0, 0, text, fits)).unwrap();
            assert_eq!(
                (row.status, row.samples[0].parsed.as_deref()),
                (status, parsed),
                "{shape:?} {text}"
            );
            assert_eq!(row.error.is_some(), status != RowStatus::Succeeded);
            assert_eq!(row.samples[0].text, text, "the raw text is kept");
        }
    }

    #[test]
    fn a_json_answer_is_never_another_than_it_says() {
        let (integer, text) = (serde_json::json!({"type": "integer"}), serde_json::json!({}));
        for (schema, typed, answer, parsed, why) in [
            (&integer, true, "9007199254740993", Some("9007199254740993"), ""),
            (
                &integer,
                true,
                "9223372036854775808",
                None,
                "does not fit its column: `9223372036854775808`",
            ),
            (
                &integer,
                false,
                "92233720368547758080",
                Some("92233720368547758080"),
                "",
            ),
            (&text, false, "{\"a\": 1, \"a\": 2}", None, "has the key `a` twice"),
            (&text, true, "1e400", None, "is not JSON: number out of range"),
            (&text, false, "\"\\ud800\"", None, "is not JSON"),
        ] {
            let mut assembler = Assembler::default();
            let columns = OutputColumns {
                parsed: typed.then(|| AnswerType::of(schema).0),
                ..OutputColumns::default()
            };
            assembler.expect(
                KEY,
                0,
                1,
                &OutputConstraint::JsonSchema(schema.clone()),
                &Arc::new(columns),
            );
            let (_, row) = assembler.add(finished(0, 0, answer, true)).unwrap();
            assert_eq!(row.samples[0].parsed.as_deref(), parsed, "{answer}");
            let is_fine = row.status == RowStatus::Succeeded;
            assert!(
                is_fine == parsed.is_some() && row.error.unwrap_or_default().contains(why),
                "{answer}"
            );
        }
    }

    #[test]
    fn an_error_is_no_longer_than_a_person_reads() {
        let error = |text: String| errored_row(0, text).error.unwrap();
        assert_eq!(error("é".repeat(ERROR_CHARS_MAX)).chars().count(), ERROR_CHARS_MAX);
        let long = error("é".repeat(1 << 20));
        assert!(long.chars().count() == ERROR_CHARS_MAX + 1 && long.ends_with('…'));
    }

    #[test]
    fn a_failed_sample_is_told_from_its_neighbours_where_columns_tell_it() {
        for told in [true, false] {
            let mut assembler = Assembler::default();
            let columns = OutputColumns {
                samples: 3,
                sample_status: told,
                ..OutputColumns::default()
            };
            assembler.expect(KEY, 0, 3, &OutputConstraint::Regex("x".into()), &Arc::new(columns));
            let mut bad = finished(0, 1, "", true);
            bad.result = Err("logits".into());
            assert_eq!(assembler.add(bad), None);
            assert_eq!(assembler.add(finished(0, 0, "x", true)), None);
            let (_, row) = assembler.add(finished(0, 2, "y", false)).unwrap();
            if !told {
                assert_eq!(row, errored_row(0, "logits".into()));
                continue;
            }
            assert_eq!(
                (row.status, row.error.as_deref()),
                (RowStatus::Errored, Some("sample 2: logits"))
            );
            let statuses: Vec<RowStatus> = row.samples.iter().map(|sample| sample.status).collect();
            assert_eq!(
                statuses,
                [RowStatus::Succeeded, RowStatus::Errored, RowStatus::InvalidOutput]
            );
            let errors: Vec<bool> = row.samples.iter().map(|sample| sample.error.is_some()).collect();
            assert_eq!(errors, [false, true, true]);
            assert_eq!((row.prompt_tokens, row.samples[0].parsed.as_deref()), (7, Some("x")));
        }
    }

    #[test]
    fn one_failed_sample_fails_its_row_alone() {
        let mut assembler = Assembler::default();
        assembler.expect(KEY, 0, 1, &OutputConstraint::Free, &Arc::default());
        assembler.expect(KEY, 1, 1, &OutputConstraint::Free, &Arc::default());
        let bad = FinishedSample {
            id: SampleId {
                job: 0,
                row: 0,
                sample: 0,
                attempt: 0,
            },
            result: Err("logits".into()),
            computed_tokens: 7,
        };
        assert_eq!(assembler.add(bad).unwrap().1, errored_row(0, "logits".into()));
        assert_eq!(
            assembler.add(finished(1, 0, "x", true)).unwrap().1.status,
            RowStatus::Succeeded
        );
    }
}
