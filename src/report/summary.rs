//! The result of a job: one JSON object for machines, a few lines for people.

use serde::Serialize;

use crate::ledger::Tally;
use crate::ledger::status::Status;
use crate::report::cost::show_dollars;
use crate::report::recheck::Recheck;

/// Rows by status.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct RowCounts {
    pub total: u64,
    pub succeeded: u64,
    pub invalid_output: u64,
    pub errored: u64,
    pub expired: u64,
    pub cancelled: u64,
}

impl RowCounts {
    /// Of a job of `total` rows.
    pub fn of(total: u64, tally: &Tally) -> RowCounts {
        RowCounts {
            total,
            succeeded: tally.succeeded,
            invalid_output: tally.invalid_output,
            errored: tally.errored,
            expired: tally.expired,
            cancelled: tally.cancelled,
        }
    }

    /// Rows that have ended, one way or another.
    pub fn ended(&self) -> u64 {
        self.succeeded + self.invalid_output + self.errored + self.expired + self.cancelled
    }
}

/// Tokens over all finished rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct TokenCounts {
    pub prompt: u64,
    /// Prompt tokens that were not computed because another row had computed them.
    pub cached: u64,
    pub completion: u64,
}

/// How often a completion equals the gold column.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Agreement {
    pub equal: u64,
    /// Rows with a gold value.
    pub rows: u64,
}

/// What `--json` prints as the last line of stdout.
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
    /// At the job's `usd_per_hour`; null where it names none.
    pub usd: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agreement: Option<Agreement>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recheck: Option<Recheck>,
}

/// Tokens per second, 0 where no time was measured.
pub fn rate(tokens: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 }
}

impl Summary {
    /// Of a job at `output`, as its ledger tells it.
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
            seconds: status.seconds,
            tokens_per_second: rate(tokens.prompt + tokens.completion, status.seconds),
            usd: status.usd,
            agreement: None,
            recheck: None,
        }
    }

    /// The report for people, one fact a line.
    pub fn lines(&self) -> Vec<String> {
        let (rows, tokens) = (&self.rows, &self.tokens);
        let mut lines = vec![format!(
            "rows        {} of {} succeeded",
            number(rows.succeeded),
            number(rows.total)
        )];
        for (count, word) in [
            (rows.invalid_output, "invalid_output"),
            (rows.errored, "errored"),
            (rows.expired, "expired"),
            (rows.cancelled, "cancelled"),
        ] {
            if count > 0 {
                lines.push(format!("            {} {word}", number(count)));
            }
        }
        let unfinished = rows.total.saturating_sub(rows.ended());
        if unfinished > 0 {
            lines.push(format!("            {} not finished", number(unfinished)));
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
            lines.push(format!(
                "agreement   {} of {} rows equal the gold column ({})",
                number(a.equal),
                number(a.rows),
                percent(a.equal, a.rows)
            ));
        }
        lines.extend(self.recheck.iter().flat_map(Recheck::lines));
        lines.push(format!("output      {}", self.output));
        lines
    }
}

/// `part` of `whole` in percent, one decimal.
pub fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        "0.0 %".into()
    } else {
        format!("{:.1} %", part as f64 * 100.0 / whole as f64)
    }
}

/// A count with commas between thousands.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(number(0), "0");
        assert_eq!(number(999), "999");
        assert_eq!(number(1_000), "1,000");
        assert_eq!(number(12_345_678), "12,345,678");
        assert_eq!(percent(1, 3), "33.3 %");
        assert_eq!(percent(0, 0), "0.0 %");
        assert_eq!(rate(10, 0.0), 0.0);
    }

    #[test]
    fn the_json_has_the_documented_fields() {
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
            agreement: None,
            recheck: None,
        };
        assert_eq!(
            serde_json::to_string(&summary).unwrap(),
            r#"{"job":"j","output":"file:///o","rows":{"total":3,"succeeded":2,"invalid_output":0,"errored":0,"expired":0,"cancelled":0},"tokens":{"prompt":10,"cached":4,"completion":2},"seconds":1.0,"tokens_per_second":12.0,"usd":null}"#
        );
        assert!(summary.lines().iter().any(|l| l.contains("1 not finished")));
    }
}
