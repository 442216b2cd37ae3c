//! The figures of a benchmark: one JSON object for machines, a few lines for people.

use std::time::Duration;

use serde::Serialize;

use crate::engine::totals::StepSize;
use crate::report::summary::{number, percent};

/// A benchmark's result. Rates are over `seconds`, which last from the first request's submission
/// to the last request's end. Loading the model and tokenizing the trace are excluded.
#[derive(Debug, Clone, Serialize)]
pub struct Figures {
    pub model: String,
    pub precision: String,
    /// Type of the KV cache.
    pub kv_cache: String,
    /// Instruction set of the CPU's kernels, or the GPU's name.
    pub isa: String,
    pub threads: usize,
    pub requests: u64,
    /// Requests that ended with an error.
    pub failed: u64,
    pub prompt_tokens: u64,
    /// Prompt tokens that were reused from another request instead of computed.
    pub cached_tokens: u64,
    pub generated_tokens: u64,
    /// Tokens that went through the model. A recomputed token counts each time.
    pub computed_tokens: u64,
    pub seconds: f64,
    pub requests_per_second: f64,
    pub prompt_tokens_per_second: f64,
    pub generated_tokens_per_second: f64,
    /// Prompt and generated tokens per second.
    pub total_tokens_per_second: f64,
    /// Peak memory of the whole process, including the weights.
    pub peak_memory_bytes: u64,
    /// Seconds per operation: `plan`, the model's operations, `sample`, and `other`.
    pub seconds_by_operation: Vec<(String, f64)>,
    pub batches: Batches,
}

/// How requests were batched.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Batches {
    pub steps: u64,
    pub prefill_tokens: u64,
    pub decode_tokens: u64,
    /// Steps with both prefill and decode.
    pub mixed_steps: u64,
    /// Steps with prefill only.
    pub prefill_steps: u64,
    /// Steps with decode only.
    pub decode_steps: u64,
    pub sequences_a_step: f64,
    pub tokens_a_step: f64,
    /// Mean share of the step's token budget.
    pub budget_used: f64,
    /// Mean share of the maximum number of running sequences.
    pub slots_used: f64,
    /// Number of preemptions: a sequence lost its KV blocks.
    pub preempted: u64,
    /// Tokens computed again after preemptions.
    pub recomputed_tokens: u64,
    /// Always 0, because batches are packed without padding.
    pub padding_tokens: u64,
    /// Share of the time during which no step ran.
    pub idle: f64,
}

/// A step that was run.
#[derive(Debug, Clone, Copy)]
pub struct StepRecord {
    /// Time since the first request.
    pub start: Duration,
    pub duration: Duration,
    pub size: StepSize,
}

impl Batches {
    /// Sums up the steps. `needed_tokens`: the number of tokens to compute if none is computed
    /// twice.
    pub fn of(
        steps: &[StepRecord],
        seconds: f64,
        needed_tokens: u64,
        step_token_limit: usize,
        sequence_limit: usize,
    ) -> Batches {
        let sum = |of: fn(&StepSize) -> usize| steps.iter().map(|step| of(&step.size) as u64).sum::<u64>();
        let count = |of: fn(&StepSize) -> bool| steps.iter().filter(|step| of(&step.size)).count() as u64;
        let (prefill_tokens, decode_tokens) = (sum(|s| s.prefill_tokens), sum(|s| s.decode_tokens));
        let per_step = |sum: u64| sum as f64 / (steps.len() as f64).max(1.0);
        let (sequences, tokens) = (per_step(sum(|s| s.sequences)), per_step(prefill_tokens + decode_tokens));
        let step_seconds: f64 = steps.iter().map(|step| step.duration.as_secs_f64()).sum();
        Batches {
            steps: steps.len() as u64,
            prefill_tokens,
            decode_tokens,
            mixed_steps: count(|s| s.prefill_tokens > 0 && s.decode_tokens > 0),
            prefill_steps: count(|s| s.prefill_tokens > 0 && s.decode_tokens == 0),
            decode_steps: count(|s| s.prefill_tokens == 0 && s.decode_tokens > 0),
            sequences_a_step: sequences,
            tokens_a_step: tokens,
            budget_used: tokens / step_token_limit as f64,
            slots_used: sequences / sequence_limit as f64,
            preempted: sum(|s| s.preempted),
            recomputed_tokens: (prefill_tokens + decode_tokens).saturating_sub(needed_tokens),
            padding_tokens: 0,
            idle: (1.0 - step_seconds / seconds.max(f64::MIN_POSITIVE)).max(0.0),
        }
    }

    fn explanation(&self) -> Vec<(&'static str, String)> {
        let all = self.prefill_tokens + self.decode_tokens;
        let share = |part: f64| format!("{:.1} %", part * 100.0);
        vec![
            (
                "steps",
                format!(
                    "{} ({} prefill, {} decode, {} both)",
                    number(self.steps),
                    number(self.prefill_steps),
                    number(self.decode_steps),
                    number(self.mixed_steps)
                ),
            ),
            (
                "tokens a step",
                format!("{:.1}, {} of the budget", self.tokens_a_step, share(self.budget_used)),
            ),
            (
                "sequences a step",
                format!(
                    "{:.1}, {} of those allowed",
                    self.sequences_a_step,
                    share(self.slots_used)
                ),
            ),
            (
                "prefill",
                format!(
                    "{} tokens, {}",
                    number(self.prefill_tokens),
                    percent(self.prefill_tokens, all)
                ),
            ),
            (
                "decode",
                format!(
                    "{} tokens, {}",
                    number(self.decode_tokens),
                    percent(self.decode_tokens, all)
                ),
            ),
            (
                "computed again",
                format!(
                    "{} tokens, {}, after {} preemptions",
                    number(self.recomputed_tokens),
                    percent(self.recomputed_tokens, all),
                    number(self.preempted)
                ),
            ),
            ("padding", format!("{} tokens", number(self.padding_tokens))),
            ("idle", share(self.idle)),
        ]
    }
}

impl Figures {
    /// Formats the figures for people; `explain` adds how requests were batched.
    pub fn lines(&self, explain: bool) -> String {
        let rate = |value: f64| number(value.round() as u64);
        let mut rows = vec![
            (
                "model",
                format!(
                    "{}, {}, {} with {} threads",
                    self.model, self.precision, self.isa, self.threads
                ),
            ),
            (
                "requests",
                format!(
                    "{} in {:.2} s, {:.2} a second",
                    number(self.requests),
                    self.seconds,
                    self.requests_per_second
                ),
            ),
            (
                "prompt tokens",
                format!(
                    "{} ({} cached), {} a second",
                    number(self.prompt_tokens),
                    percent(self.cached_tokens, self.prompt_tokens),
                    rate(self.prompt_tokens_per_second)
                ),
            ),
            (
                "generated tokens",
                format!(
                    "{}, {} a second",
                    number(self.generated_tokens),
                    rate(self.generated_tokens_per_second)
                ),
            ),
            ("all tokens", format!("{} a second", rate(self.total_tokens_per_second))),
            (
                "peak memory",
                format!("{} MB", number(self.peak_memory_bytes / 1_000_000)),
            ),
        ];
        if self.failed > 0 {
            rows.push(("failed requests", number(self.failed)));
        }
        if explain {
            rows.extend(self.batches.explanation());
        }
        let mut text = table(rows.iter().map(|(name, value)| (*name, value.clone())));
        text.push_str("seconds by operation\n");
        text.push_str(&table(self.seconds_by_operation.iter().map(|(name, seconds)| {
            let share = seconds * 100.0 / self.seconds.max(f64::MIN_POSITIVE);
            (name.as_str(), format!("{seconds:8.2} {share:5.1} %"))
        })));
        text
    }
}

fn table<'a>(rows: impl Iterator<Item = (&'a str, String)>) -> String {
    rows.map(|(name, value)| format!("  {name:18}{value}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(start: u64, duration: u64, prefill: usize, decode: usize) -> StepRecord {
        StepRecord {
            start: Duration::from_millis(start),
            duration: Duration::from_millis(duration),
            size: StepSize {
                prefill_tokens: prefill,
                decode_tokens: decode,
                sequences: decode + usize::from(prefill > 0),
                preempted: 0,
            },
        }
    }

    #[test]
    fn steps_are_summed_by_kind() {
        let steps = [step(0, 40, 100, 0), step(40, 40, 60, 2), step(90, 10, 0, 2)];
        let batches = Batches::of(&steps, 0.1, 150, 100, 4);
        assert_eq!(
            (batches.steps, batches.prefill_tokens, batches.decode_tokens),
            (3, 160, 4)
        );
        assert_eq!(
            (batches.prefill_steps, batches.mixed_steps, batches.decode_steps),
            (1, 1, 1)
        );
        assert_eq!(batches.recomputed_tokens, 14);
        assert!((batches.idle - 0.1).abs() < 1e-9);
        assert!((batches.sequences_a_step - 2.0).abs() < 1e-9 && (batches.slots_used - 0.5).abs() < 1e-9);
        assert_eq!(Batches::of(&[], 0.0, 0, 1, 1).steps, 0);
    }
}
