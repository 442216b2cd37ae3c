//! The trace of one receipt of a shard: from the receipt of its message to the acknowledgement.
//!
//! The first span, `shard`, ends when the last holder of a [`ShardTrace`] drops it. Within it stand
//! `open`, `read`, one span of the model's work, `log` for each write of finished rows, and
//! `publish`. Without a collector all of them are nothing.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Instant, SystemTime};

use crate::dataset::row::RowResult;
use crate::ledger::Id;
use crate::traces::{TraceSpan, names};
use crate::worker::Worker;
use crate::worker::error_counts::error_kind_name;
use crate::worker::jobs::OpenJob;

/// See the module's description. Clones belong to the same trace.
#[derive(Clone, Default)]
pub(super) struct ShardTrace(Option<Arc<ShardSpans>>);

/// Begins the span of the model's work. Does not keep the trace open.
#[derive(Default)]
pub(super) struct GenerationSpan(Weak<ShardSpans>);

struct ShardSpans {
    model: ModelCall,
    spans: Mutex<OpenSpans>,
}

/// What the model is asked for.
struct ModelCall {
    operation: &'static str,
    model: String,
}

/// The fields are dropped in this order: a child ends before its parent.
struct OpenSpans {
    generation: Option<Generation>,
    shard: TraceSpan,
    /// Rows that this try has logged.
    logged_rows: u64,
}

/// The span of the model's work, and what has come of it so far.
struct Generation {
    span: TraceSpan,
    rows: u64,
    input_tokens: u64,
    cached_tokens: u64,
    output_tokens: u64,
}

impl ShardTrace {
    /// Begins the trace of a shard that was received at `received_at` and has just been opened.
    pub(super) fn begin(worker: &Worker, job: &OpenJob, shard: u32, received_at: Instant) -> ShardTrace {
        let received_at = SystemTime::now()
            .checked_sub(received_at.elapsed())
            .unwrap_or(SystemTime::UNIX_EPOCH);
        let Some(mut span) = TraceSpan::root(names::SHARD, received_at) else {
            return ShardTrace::default();
        };
        let record = job.ledger.job();
        span.set(names::JOB, record.name.clone());
        span.set(names::JOB_ID, record.job.to_string());
        span.set_count(names::GENERATION, job.ledger.generation().into());
        span.set_count(names::SHARD_NUMBER, shard.into());
        span.set(names::WORKER, worker.name.clone());
        // The folder's own name says which model it is.
        let path = worker.jobs.model().folder_of(job.adapter);
        let folder = path.file_name().unwrap_or(path.as_os_str());
        let model = ModelCall {
            operation: names::operation(job.renderer.is_chat()),
            model: folder.to_string_lossy().into_owned(),
        };
        ShardTrace::of(span, model, received_at)
    }

    fn of(shard: TraceSpan, model: ModelCall, received_at: SystemTime) -> ShardTrace {
        drop(shard.child(names::OPEN, Some(received_at)));
        let spans = Mutex::new(OpenSpans {
            generation: None,
            shard,
            logged_rows: 0,
        });
        ShardTrace(Some(Arc::new(ShardSpans { model, spans })))
    }

    fn spans(&self) -> Option<MutexGuard<'_, OpenSpans>> {
        self.0.as_ref().map(|spans| spans.lock())
    }

    /// Does `work` in a span called `name`, which fails if the work does.
    pub(super) async fn step<T>(
        &self,
        name: &'static str,
        work: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        let mut span = self.spans().map(|spans| spans.shard.child(name, None));
        let done = work.await;
        if let (Some(span), Err(error)) = (&mut span, &done) {
            span.fail(error_kind_name(error));
        }
        done
    }

    /// For the device, which begins the span once it takes the shard's rows.
    pub(super) fn generation(&self) -> GenerationSpan {
        GenerationSpan(self.0.as_ref().map(Arc::downgrade).unwrap_or_default())
    }

    /// Counts a row that came from the device.
    pub(super) fn add_row(&self, row: &RowResult) {
        if let Some(mut spans) = self.spans()
            && let Some(generation) = &mut spans.generation
        {
            generation.rows += 1;
            generation.input_tokens += u64::from(row.prompt_tokens);
            generation.cached_tokens += u64::from(row.cached_tokens);
            let samples = row.samples.iter();
            generation.output_tokens += samples.map(|sample| u64::from(sample.completion_tokens)).sum::<u64>();
        }
    }

    /// Ends the span of the model's work: no more rows will come.
    pub(super) fn end_generation(&self) {
        let ended = self.spans().and_then(|mut spans| spans.generation.take());
        if let Some(mut generation) = ended {
            generation.span.set_count(names::ROWS, generation.rows);
            generation.span.set_count(names::INPUT_TOKENS, generation.input_tokens);
            generation
                .span
                .set_count(names::CACHED_TOKENS, generation.cached_tokens);
            generation
                .span
                .set_count(names::OUTPUT_TOKENS, generation.output_tokens);
        }
    }

    pub(super) fn note_attempt(&self, attempt: &Id) {
        if let Some(mut spans) = self.spans() {
            spans.shard.set(names::ATTEMPT, attempt.to_string());
        }
    }

    /// Counts rows that were logged.
    pub(super) fn add_logged(&self, rows: usize) {
        if let Some(mut spans) = self.spans() {
            spans.logged_rows += rows as u64;
        }
    }

    pub(super) fn note_outcome(&self, outcome: &'static str) {
        if let Some(mut spans) = self.spans() {
            spans.shard.set(names::OUTCOME, outcome);
        }
    }

    /// The work on the shard ends with an error.
    pub(super) fn fail(&self, error: &anyhow::Error) {
        if let Some(mut spans) = self.spans() {
            spans.shard.fail(error_kind_name(error));
        }
    }
}

impl GenerationSpan {
    pub(super) fn begin(&self) {
        let Some(shard) = self.0.upgrade() else { return };
        let mut spans = shard.lock();
        let ModelCall { operation, model } = &shard.model;
        let mut span = spans.shard.child(format!("{operation} {model}"), None);
        span.set(names::OPERATION_NAME, *operation);
        span.set(names::PROVIDER_NAME, names::PROVIDER);
        span.set(names::REQUEST_MODEL, model.clone());
        spans.generation = Some(Generation {
            span,
            rows: 0,
            input_tokens: 0,
            cached_tokens: 0,
            output_tokens: 0,
        });
    }
}

impl Drop for OpenSpans {
    // Once at the end, since an attribute that is set again is there twice.
    fn drop(&mut self) {
        self.shard.set_count(names::ROWS, self.logged_rows);
    }
}

impl ShardSpans {
    fn lock(&self) -> MutexGuard<'_, OpenSpans> {
        // Spans of a panicked holder are ended all the same.
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::trace::Status;

    use super::*;
    use crate::dataset::row::{RowStatus, SampleResult};
    use crate::ledger::LedgerError;
    use crate::traces::testing::{Ended, root, tracer, value};

    fn trace(ended: &Ended) -> ShardTrace {
        let began = SystemTime::now();
        let model = ModelCall {
            operation: "chat",
            model: "demo".into(),
        };
        ShardTrace::of(root(&tracer(ended), began), model, began)
    }

    fn row(completions: &[u32]) -> RowResult {
        let sample = |&completion_tokens| SampleResult {
            status: RowStatus::Succeeded,
            error: None,
            text: "secret".into(),
            reasoning: None,
            reasoning_tokens: 0,
            parsed: None,
            finish_reason: "stop",
            completion_tokens,
            token_ids: Vec::new(),
            logprobs: Vec::new(),
            choice_probabilities: Vec::new(),
        };
        RowResult {
            row: 3,
            status: RowStatus::Succeeded,
            samples: completions.iter().map(sample).collect(),
            error: None,
            prompt_tokens: 30,
            cached_tokens: 20,
        }
    }

    #[tokio::test]
    async fn a_shards_spans_tell_rows_and_tokens() {
        let ended = Ended::default();
        let shard = trace(&ended);
        let generation = shard.generation();
        shard.step(names::READ, async { Ok(()) }).await.unwrap();
        generation.begin();
        shard.add_row(&row(&[2, 5]));
        shard.add_row(&row(&[1]));
        shard.add_logged(1);
        shard.end_generation();
        // A late row changes nothing.
        shard.add_row(&row(&[100]));
        shard.end_generation();
        shard.add_logged(2);
        shard.note_outcome("committed");
        let other = shard.clone();
        drop(shard);
        assert_eq!(ended.spans().len(), 3, "another holder keeps the trace open");
        drop(other);
        let (shard, chat) = (ended.one("shard"), ended.one("chat demo"));
        for (name, expected) in [
            ("gen_ai.operation.name", "chat"),
            ("gen_ai.provider.name", "gristmill"),
            ("gen_ai.request.model", "demo"),
            ("gen_ai.usage.input_tokens", "60"),
            ("gen_ai.usage.cache_read.input_tokens", "40"),
            ("gen_ai.usage.output_tokens", "8"),
            ("gristmill.rows", "2"),
        ] {
            assert_eq!(value(&chat, name), expected, "{name}");
        }
        assert_eq!(
            (value(&shard, "gristmill.rows"), value(&shard, "gristmill.outcome")),
            ("3".into(), "committed".into())
        );
        for child in [chat, ended.one("open"), ended.one("read")] {
            assert_eq!(child.parent_span_id, shard.span_context.span_id());
            assert!(shard.start_time <= child.start_time && child.end_time <= shard.end_time);
        }
        // The device may hold this longer than the shard lives.
        generation.begin();
        assert_eq!(ended.spans().len(), 4);
        assert!(!format!("{:?}", ended.spans()).contains("secret"));
    }

    #[tokio::test]
    async fn an_error_is_a_status_without_its_text() {
        let ended = Ended::default();
        let shard = trace(&ended);
        shard.generation().begin();
        let failed = || anyhow::Error::from(LedgerError::damaged("secret"));
        let stepped: anyhow::Result<()> = shard.step(names::PUBLISH, async { Err(failed()) }).await;
        shard.fail(&stepped.unwrap_err());
        drop(shard);
        for name in ["publish", "shard"] {
            let span = ended.one(name);
            assert_eq!(span.status, Status::error("record"), "{name}");
            assert_eq!(value(&span, "error.type"), "record", "{name}");
        }
        // It ended with its parent.
        assert_eq!(ended.one("chat demo").status, Status::Unset);
        assert!(!format!("{:?}", ended.spans()).contains("secret"));
    }

    #[tokio::test]
    async fn without_a_collector_the_work_is_done_all_the_same() {
        let shard = ShardTrace::default();
        assert_eq!(shard.step(names::READ, async { Ok(7) }).await.unwrap(), 7);
        shard.generation().begin();
        shard.add_row(&row(&[1]));
        shard.end_generation();
        shard.note_outcome("committed");
    }
}
