//! The result of a job: one JSON object for machines, a few lines for people.

use serde::Serialize;

use crate::ledger::Tally;
use crate::ledger::failures::{Failures, Reason};
use crate::ledger::status::Status;
use crate::report::cost::show_dollars;
use crate::report::recheck::RecheckReport;
use crate::report::shell_word;

/// Percentage of truncated answers above which the summary warns.
const TRUNCATED_MAX_PERCENT: u64 = 1;

/// Rows by status.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct RowCounts {
    pub total: u64,
    pub succeeded: u64,
    pub invalid_output: u64,
    pub errored: u64,
    pub expired: u64,
    pub cancelled: u64,
    /// Rows with a truncated completion, whatever their status. Null if an older gristmill, which
    /// did not count them, finished some of the rows.
    pub truncated: Option<u64>,
}

impl RowCounts {
    /// Counts for a job of `total` rows.
    pub fn of(total: u64, tally: &Tally) -> RowCounts {
        RowCounts {
            total,
            succeeded: tally.succeeded,
            invalid_output: tally.invalid_output,
            errored: tally.errored,
            expired: tally.expired,
            cancelled: tally.cancelled,
            truncated: tally.truncated,
        }
    }

    /// The share of truncated rows among the answered ones, if it is above `TRUNCATED_MAX_PERCENT`.
    pub fn high_truncated_share(&self) -> Option<String> {
        let answered = self.succeeded + self.invalid_output;
        let truncated = self.truncated?;
        (truncated * 100 > answered * TRUNCATED_MAX_PERCENT).then(|| percent(truncated, answered))
    }

    /// Formats the counts for people.
    fn lines(&self) -> Vec<String> {
        let mut lines = vec![format!(
            "rows        {} of {} succeeded",
            number(self.succeeded),
            number(self.total)
        )];
        for (count, word) in [
            (self.invalid_output, "invalid_output"),
            (self.errored, "errored"),
            (self.expired, "expired"),
            (self.cancelled, "cancelled"),
            (self.total.saturating_sub(self.ended()), "not finished"),
            (self.truncated.unwrap_or(0), "truncated: cut off at their `max_tokens`"),
        ] {
            if count > 0 {
                lines.push(format!("            {} {word}", number(count)));
            }
        }
        if self.truncated.is_none() {
            lines.push(
                "            truncated: unknown, since an older gristmill did not count it; `gristmill verify` counts again"
                    .into(),
            );
        }
        lines
    }

    /// Number of rows that have a final status.
    pub fn ended(&self) -> u64 {
        self.succeeded + self.invalid_output + self.errored + self.expired + self.cancelled
    }
}

/// Tokens over all finished rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct TokenCounts {
    pub prompt: u64,
    /// Prompt tokens that were reused from another row instead of computed.
    pub cached: u64,
    pub completion: u64,
}

/// How often a completion equals the gold column.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Agreement {
    pub equal: u64,
    /// Rows with a gold value.
    pub rows: u64,
    /// Those of them without an answer, which count as different.
    pub unanswered: u64,
}

/// The summary that `--json` prints as the last line of stdout.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    pub job: String,
    pub output: String,
    pub rows: RowCounts,
    pub tokens: TokenCounts,
    /// Device seconds, over all runs of the job.
    pub seconds: f64,
    /// Prompt and completion tokens per device second.
    pub tokens_per_second: f64,
    /// Cost at the job's `usd_per_hour`; null if the job names no price.
    pub usd: Option<f64>,
    /// Files that were unreadable when the job was planned, with the reasons.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub skipped_inputs: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agreement: Option<Agreement>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recheck: Option<RecheckReport>,
    /// Why rows failed; absent if none did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failures: Option<Failures>,
}

/// Tokens per second; 0 if no time was measured.
pub fn rate(tokens: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 }
}

impl Summary {
    /// Builds the summary of a job at `output` from its ledger's status.
    pub fn of(status: &Status, output: &str) -> Summary {
        let tally = &status.tally;
        let tokens = TokenCounts {
            prompt: tally.prompt_tokens,
            cached: tally.cached_tokens,
            completion: tally.completion_tokens,
        };
        Summary {
            job: status.name.clone(),
            output: output.to_string(),
            rows: RowCounts::of(status.rows, tally),
            tokens,
            // An older gristmill wrote -0.0 for zero seconds.
            seconds: status.seconds.abs(),
            tokens_per_second: rate(tokens.prompt + tokens.completion, status.seconds),
            usd: status.usd.map(f64::abs),
            skipped_inputs: Vec::new(),
            agreement: None,
            recheck: None,
            failures: None,
        }
    }

    /// Formats the report for people, one fact per line.
    pub fn lines(&self) -> Vec<String> {
        let (rows, tokens) = (&self.rows, &self.tokens);
        let mut lines = rows.lines();
        lines.extend(self.failures.iter().flat_map(failure_lines));
        if let Some(first) = self.skipped_inputs.first() {
            let count = counted(self.skipped_inputs.len() as u64, "input");
            lines.push(format!(
                "            without {count} that cannot be read; the first is {first}"
            ));
        }
        lines.push(format!(
            "tokens      {} prompt ({} cached), {} completion",
            number(tokens.prompt),
            percent(tokens.cached, tokens.prompt),
            number(tokens.completion)
        ));
        let speed = number(self.tokens_per_second.round() as u64);
        lines.push(format!(
            "speed       {speed} tokens/s over {:.1} s of device time",
            self.seconds
        ));
        if let Some(usd) = self.usd {
            lines.push(format!("cost        {}", show_dollars(usd)));
        }
        if let Some(a) = self.agreement {
            let unanswered = match a.unanswered {
                0 => String::new(),
                rows => format!("; {} of them have no answer", number(rows)),
            };
            lines.push(format!(
                "agreement   {} of {} equal the gold column ({}){unanswered}",
                number(a.equal),
                counted(a.rows, "row"),
                percent(a.equal, a.rows)
            ));
        }
        lines.extend(self.recheck.iter().flat_map(RecheckReport::lines));
        lines.push(format!("output      {}", self.output));
        lines.extend(self.warning().map(|warning| format!("warning     {warning}")));
        lines
    }

    /// A warning that the user should see even if every row succeeded.
    pub fn warning(&self) -> Option<String> {
        let share = self.rows.high_truncated_share()?;
        Some(format!(
            "{share} of the answers were cut off at their `max_tokens`: raise `generate.max_tokens`; for a finished job, run \
             `gristmill retry {} --truncated --max-tokens N`",
            shell_word(&self.output)
        ))
    }
}

/// Maximum length of a failure message, in characters.
const MESSAGE_CHARS_MAX: usize = 160;

/// Formats the most frequent failure messages, one per line.
fn failure_lines(failures: &Failures) -> Vec<String> {
    let line = |(at, reason): (usize, &Reason)| {
        let word = if at == 0 { "failed" } else { "" };
        let mut message: String = reason.message.split_whitespace().collect::<Vec<_>>().join(" ");
        if let Some((end, _)) = message.char_indices().nth(MESSAGE_CHARS_MAX) {
            message.truncate(end);
            message.push('…');
        }
        let (rows, all) = (number(reason.rows), number(failures.looked_at));
        format!("{word:11} {rows} of {all} examined rows: {message}")
    };
    failures.most.iter().enumerate().map(line).collect()
}

/// Formats `part` of `whole` in percent, with one decimal.
pub fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        "0.0 %".into()
    } else {
        format!("{:.1} %", part as f64 * 100.0 / whole as f64)
    }
}

/// Formats a count with commas between thousands.
pub fn number(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Formats a count with its noun: "1 row", "2,000 rows".
pub fn counted(n: u64, noun: &str) -> String {
    format!("{} {noun}{}", number(n), if n == 1 { "" } else { "s" })
}

/// Formats a size in bytes.
pub fn show_size(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.1} GB", bytes as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        assert_eq!(show_size(1_234), "1.2 kB");
        assert_eq!(show_size(12_345_678), "12.3 MB");
        assert_eq!(show_size(2_500_000_000), "2.5 GB");
    }

    #[test]
    fn numbers_read_well() {
        assert_eq!(
            [0, 1, 2_000].map(|n| counted(n, "row")),
            ["0 rows", "1 row", "2,000 rows"]
        );
        assert_eq!(number(0), "0");
        assert_eq!(number(999), "999");
        assert_eq!(number(1_000), "1,000");
        assert_eq!(number(12_345_678), "12,345,678");
        assert_eq!(percent(1, 3), "33.3 %");
        assert_eq!(percent(0, 0), "0.0 %");
        assert_eq!(rate(10, 0.0), 0.0);
    }

    #[test]
    fn json_has_the_documented_fields() {
        let summary = Summary {
            job: "j".into(),
            output: "file:///o".into(),
            rows: RowCounts {
                total: 3,
                succeeded: 2,
                ..Default::default()
            },
            tokens: TokenCounts {
                prompt: 10,
                cached: 4,
                completion: 2,
            },
            seconds: 1.0,
            tokens_per_second: 12.0,
            usd: None,
            skipped_inputs: Vec::new(),
            agreement: None,
            recheck: None,
            failures: None,
        };
        assert_eq!(
            serde_json::to_string(&summary).unwrap(),
            r#"{"job":"j","output":"file:///o","rows":{"total":3,"succeeded":2,"invalid_output":0,"errored":0,"expired":0,"cancelled":0,"truncated":null},"tokens":{"prompt":10,"cached":4,"completion":2},"seconds":1.0,"tokens_per_second":12.0,"usd":null}"#
        );
        assert!(summary.lines().iter().any(|l| l.contains("1 not finished")));
        for rest in [
            RowCounts {
                cancelled: 1,
                ..summary.rows
            },
            RowCounts {
                expired: 1,
                ..summary.rows
            },
            RowCounts {
                errored: 1,
                ..summary.rows
            },
            RowCounts {
                invalid_output: 1,
                ..summary.rows
            },
        ] {
            assert_eq!(rest.ended(), rest.total, "{rest:?}");
        }
        let lines = summary.lines().join("\n");
        assert!(
            lines.contains("truncated: unknown") && summary.warning().is_none(),
            "{lines}"
        );
    }

    #[test]
    fn a_high_truncated_share_is_a_warning() {
        let rows = |truncated| RowCounts {
            total: 400,
            succeeded: 190,
            invalid_output: 10,
            errored: 200,
            truncated,
            ..Default::default()
        };
        // Rows that the model never answered are not counted as answers.
        assert_eq!(rows(Some(3)).high_truncated_share(), Some("1.5 %".into()));
        for few in [Some(2), Some(0), None] {
            assert_eq!(rows(few).high_truncated_share(), None, "{few:?}");
        }
        assert_eq!(
            RowCounts {
                truncated: Some(0),
                ..Default::default()
            }
            .high_truncated_share(),
            None
        );
        let lines = rows(Some(2)).lines().join("\n");
        assert!(lines.contains("2 truncated"), "{lines}");
        assert!(!rows(Some(0)).lines().join("\n").contains("truncated"));
    }
}
