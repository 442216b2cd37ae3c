//! Compares a sample of a job's answers with answers computed in a higher precision.

use std::sync::Arc;

use serde::Serialize;

use crate::report::answers::RowAnswer;
use crate::report::summary::{counted, number};
use crate::tokenizer::Tokenizer;

/// Maximum number of differing rows that are listed.
const DIFFERING_SHOWN_MAX: usize = 5;
/// Maximum length of a listed answer, in characters.
const SHOWN_CHARS_MAX: usize = 60;
/// Maximum number of characters that are shown before the first difference.
const COMMON_CHARS_SHOWN: usize = 20;
/// The 97.5 % quantile of the normal distribution: 95 % of it lie within this many standard
/// deviations of the mean.
const Z_95: f64 = 1.959_964;

/// The result of a recheck, as `--json` prints it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RecheckReport {
    /// The precision that the rows were run again in.
    pub precision: String,
    /// Rows of the sample.
    pub rows: u64,
    /// Rows that have an answer in both runs.
    pub compared: u64,
    /// Rows whose text (or choice) is the same in each sample.
    pub same: u64,
    /// `same / compared`; null if no row was compared.
    pub share: Option<f64>,
    /// 95 % confidence interval of the share over all rows of the job (Wilson's score interval).
    pub interval: Option<[f64; 2]>,
    /// Mean share of an answer's tokens before its first difference; absent for choices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leading_tokens: Option<f64>,
    /// Mean absolute difference of the choices' probabilities, if the job writes them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probability_difference: Option<f64>,
    /// Mean absolute difference of a token's log probability over the answers that are the same, if
    /// the job writes log probabilities.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprob_difference: Option<f64>,
    /// Rows that failed in the job, so there is no answer to compare.
    pub unanswered: u64,
    /// Rows that failed in the recheck.
    pub failed: u64,
    /// Device seconds of the recheck; the job's seconds exclude them.
    pub seconds: f64,
    /// The first rows whose answers differ.
    pub differing: Vec<Differing>,
}

/// A row whose answers differ, both shortened around their first difference.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Differing {
    pub row: u64,
    /// The answer in the job's output.
    pub job: String,
    /// The answer in the higher precision.
    pub recheck: String,
}

/// Counts the rows of a recheck.
pub struct RecheckTally {
    /// Tokenizes answers; `None` if answers are choices, which are compared only as a whole.
    tokenizer: Option<Arc<Tokenizer>>,
    compared: u64,
    same: u64,
    unanswered: u64,
    failed: u64,
    leading: Mean,
    probability: Mean,
    logprob: Mean,
    differing: Vec<Differing>,
}

#[derive(Debug, Default)]
struct Mean {
    sum: f64,
    count: u64,
}

impl Mean {
    fn add(&mut self, value: f64) {
        self.sum += value;
        self.count += 1;
    }

    fn value(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }
}

impl RecheckTally {
    /// `tokenizer` tokenizes answers; it is `None` if answers are choices.
    pub fn new(tokenizer: Option<Arc<Tokenizer>>) -> RecheckTally {
        RecheckTally {
            tokenizer,
            compared: 0,
            same: 0,
            unanswered: 0,
            failed: 0,
            leading: Mean::default(),
            probability: Mean::default(),
            logprob: Mean::default(),
            differing: Vec::new(),
        }
    }

    /// Counts a row without an answer in the job's output.
    pub fn add_unanswered(&mut self) {
        self.unanswered += 1;
    }

    /// Counts a row that was run again; `recheck` is `None` if it failed. Rows may come in any
    /// order.
    pub fn add(&mut self, row: u64, job: &RowAnswer, recheck: Option<&RowAnswer>) {
        let Some(recheck) = recheck else {
            self.failed += 1;
            return;
        };
        self.compared += 1;
        let pairs = || job.texts.iter().zip(&recheck.texts);
        if let Some(tokenizer) = &self.tokenizer {
            let tokens = |text: &String| tokenizer.encode_plain(text);
            let shares: f64 = pairs().map(|(a, b)| leading_share(&tokens(a), &tokens(b))).sum();
            self.leading.add(shares / job.texts.len() as f64);
        }
        for (a, b) in job.probabilities.iter().zip(&recheck.probabilities) {
            self.probability.add(f64::from(a - b).abs());
        }
        if job.texts == recheck.texts {
            self.same += 1;
            for (a, b) in job.logprobs.iter().zip(&recheck.logprobs) {
                // The same text may consist of other tokens, whose log probabilities are not
                // comparable.
                if a.len() == b.len() {
                    a.iter()
                        .zip(b)
                        .for_each(|(a, b)| self.logprob.add(f64::from(a - b).abs()));
                }
            }
        } else {
            let (a, b) = pairs()
                .find(|(a, b)| a != b)
                .unwrap_or((&job.texts[0], &recheck.texts[0]));
            let (job, recheck) = shortened(a, b);
            let position = self.differing.partition_point(|differing| differing.row < row);
            self.differing.insert(position, Differing { row, job, recheck });
            self.differing.truncate(DIFFERING_SHOWN_MAX);
        }
    }

    /// Returns the result; `precision` names the recheck's precision, and `seconds` are device
    /// seconds.
    pub fn finish(self, precision: String, seconds: f64) -> RecheckReport {
        let (same, compared) = (self.same, self.compared);
        RecheckReport {
            precision,
            rows: compared + self.unanswered + self.failed,
            compared,
            same,
            share: (compared > 0).then(|| same as f64 / compared as f64),
            interval: wilson_interval(same, compared),
            leading_tokens: self.leading.value(),
            probability_difference: self.probability.value(),
            logprob_difference: self.logprob.value(),
            unanswered: self.unanswered,
            failed: self.failed,
            seconds,
            differing: self.differing,
        }
    }
}

impl RecheckReport {
    /// Formats the report for people, in the layout of summaries.
    pub fn lines(&self) -> Vec<String> {
        let to = &self.precision;
        let mut lines = vec![match self.interval {
            Some([low, high]) => format!(
                "recheck     {} of {} answers are the same in {to} ({:.2} %; 95 % interval {:.2} to {:.2} %)",
                number(self.same),
                number(self.compared),
                self.share.unwrap_or_default() * 100.0,
                low * 100.0,
                high * 100.0
            ),
            None => format!(
                "recheck     none of {} could be compared with {to}",
                counted(self.rows, "row")
            ),
        }];
        let mut add_line = |line: String| lines.push(format!("            {line}"));
        if let Some(share) = self.leading_tokens {
            add_line(format!(
                "{:.1} % of an answer's tokens come before its first difference",
                share * 100.0
            ));
        }
        if let Some(difference) = self.probability_difference {
            add_line(format!("a choice's probability differs by {difference:.4} on average"));
        }
        if let Some(difference) = self.logprob_difference {
            add_line(format!(
                "a token's log probability differs by {difference:.4} on average"
            ));
        }
        if self.unanswered > 0 {
            add_line(format!(
                "no answer in the output for {}",
                counted(self.unanswered, "more row")
            ));
        }
        if self.failed > 0 {
            add_line(format!("{} failed in {to}", counted(self.failed, "more row")));
        }
        for differing in &self.differing {
            add_line(format!(
                "row {}: `{}`, in {to} `{}`",
                differing.row, differing.job, differing.recheck
            ));
        }
        let unshown = (self.compared - self.same).saturating_sub(self.differing.len() as u64);
        if unshown > 0 {
            add_line(format!("and {} more with another answer", number(unshown)));
        }
        lines
    }
}

/// Wilson's 95 % score interval for the share of `hits` in `all`; `None` if `all` is 0.
///
/// E. B. Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", Journal of
/// the American Statistical Association 22 (1927), 209–212. Unlike the normal approximation, the
/// interval stays within 0 and 1, and has a positive width at shares of 0 and 1.
fn wilson_interval(hits: u64, all: u64) -> Option<[f64; 2]> {
    if all == 0 {
        return None;
    }
    let n = all as f64;
    let share = hits as f64 / n;
    let z2 = Z_95 * Z_95;
    let middle = (share + z2 / (2.0 * n)) / (1.0 + z2 / n);
    let half = Z_95 / (1.0 + z2 / n) * (share * (1.0 - share) / n + z2 / (4.0 * n * n)).sqrt();
    // At these ends the interval reaches 0 or 1 exactly, which rounding may miss.
    let low = if hits == 0 { 0.0 } else { middle - half };
    let high = if hits == all { 1.0 } else { middle + half };
    Some([low, high])
}

/// The length of the common prefix as a share of the longer answer's tokens; 1 for two empty
/// answers.
fn leading_share(a: &[u32], b: &[u32]) -> f64 {
    let leading = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    match a.len().max(b.len()) {
        0 => 1.0,
        longer => leading as f64 / longer as f64,
    }
}

/// Formats two texts on one line each, cut so that their first difference is visible.
fn shortened(a: &str, b: &str) -> (String, String) {
    let common = a.chars().zip(b.chars()).take_while(|(a, b)| a == b).count();
    let start = match common {
        0..=COMMON_CHARS_SHOWN => 0,
        _ => common - COMMON_CHARS_SHOWN,
    };
    let cut = |text: &str| {
        let mut chars = text.chars().skip(start);
        let shown: String = chars.by_ref().take(SHOWN_CHARS_MAX).collect();
        let shown = shown
            .escape_debug()
            .to_string()
            .replace("\\\"", "\"")
            .replace("\\'", "'");
        let (before, after) = (start > 0, chars.next().is_some());
        format!(
            "{}{shown}{}",
            if before { "…" } else { "" },
            if after { "…" } else { "" }
        )
    };
    (cut(a), cut(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(text: &str) -> RowAnswer {
        RowAnswer {
            texts: vec![text.into()],
            ..RowAnswer::default()
        }
    }

    fn assert_near(found: Option<[f64; 2]>, expected: [f64; 2]) {
        let found = found.unwrap();
        assert!(
            found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 5e-4),
            "{found:?}, not {expected:?}"
        );
    }

    /// Compares with Newcombe, "Two-Sided Confidence Intervals for the Single Proportion",
    /// Statistics in Medicine 17 (1998), table I, method 3. The last case mirrors the third.
    #[test]
    fn intervals_equal_published_ones() {
        assert_near(wilson_interval(81, 263), [0.2553, 0.3662]);
        assert_near(wilson_interval(15, 148), [0.0624, 0.1605]);
        assert_near(wilson_interval(0, 20), [0.0, 0.1611]);
        assert_near(wilson_interval(1, 29), [0.0061, 0.1718]);
        assert_near(wilson_interval(20, 20), [0.8389, 1.0]);
        assert_eq!(wilson_interval(0, 0), None);
    }

    #[test]
    fn leading_tokens_are_a_share_of_the_longer_answer() {
        for (a, b, share) in [
            (&[][..], &[][..], 1.0),
            (&[1, 2], &[1, 2], 1.0),
            (&[1, 2, 3, 4], &[1, 2, 9, 4], 0.5),
            (&[1, 2], &[1, 2, 3, 4], 0.5),
            (&[1], &[2], 0.0),
            (&[1], &[], 0.0),
        ] {
            assert_eq!(leading_share(a, b), share, "{a:?} {b:?}");
        }
    }

    #[test]
    fn shortened_texts_show_their_first_difference() {
        let long = "The same beginning of a long text, and then ";
        let (a, b) = shortened(&format!("{long}this{}", "x".repeat(100)), &format!("{long}that\n"));
        assert!(a.starts_with('…') && a.ends_with('…') && a.contains(" this"), "{a}");
        assert!(b.starts_with('…') && b.ends_with("that\\n"), "{b}");
        assert!(a.chars().count() <= SHOWN_CHARS_MAX + 2, "{a}");
        assert_eq!(shortened("billing", "refund"), ("billing".into(), "refund".into()));
        assert_eq!(shortened("", "it's"), (String::new(), "it's".into()));
    }

    #[test]
    fn rows_are_counted_once_each_and_the_first_differing_are_shown() {
        let mut tally = RecheckTally::new(None);
        tally.add_unanswered();
        tally.add(9, &answer("a"), None);
        for row in (0..8).rev() {
            tally.add(row, &answer("a"), Some(&answer("b")));
        }
        for row in 10..12 {
            let with = |p: f32, l: f32| RowAnswer {
                probabilities: vec![p, 1.0 - p],
                logprobs: vec![vec![l]],
                ..answer("a")
            };
            tally.add(row, &with(0.75, -1.0), Some(&with(0.5, -1.5)));
        }
        let found = tally.finish("f32".into(), 1.0);
        assert_eq!((found.rows, found.compared, found.same), (12, 10, 2));
        assert_eq!((found.unanswered, found.failed, found.share), (1, 1, Some(0.2)));
        assert_eq!(
            (found.probability_difference, found.logprob_difference),
            (Some(0.25), Some(0.5))
        );
        assert_eq!(found.leading_tokens, None, "choices have no leading tokens");
        let shown: Vec<u64> = found.differing.iter().map(|differing| differing.row).collect();
        assert_eq!(shown, [0, 1, 2, 3, 4]);
        let lines = found.lines();
        for line in [
            "2 of 10 answers are the same in f32 (20.00 %; 95 % interval 5.67 to 50.98 %)",
            "probability differs by 0.2500",
            "1 more row failed in f32",
            "row 0: `a`, in f32 `b`",
            "and 3 more",
        ] {
            assert!(
                lines.iter().any(|found| found.contains(line)),
                "`{line}` is not in {lines:#?}"
            );
        }
    }

    #[test]
    fn texts_are_compared_token_by_token_over_all_samples() {
        let tokenizer = Tokenizer::from_words(&["one", "two", "three", " "], &[]).unwrap();
        let mut tally = RecheckTally::new(Some(Arc::new(tokenizer)));
        let many = |texts: [&str; 2]| RowAnswer {
            texts: texts.map(String::from).to_vec(),
            ..RowAnswer::default()
        };
        tally.add(0, &many(["one two", "one"]), Some(&many(["one two", "two"])));
        tally.add(1, &many(["one", "two"]), Some(&many(["one", "two"])));
        let found = tally.finish("bf16".into(), 0.0);
        assert_eq!((found.same, found.compared), (1, 2));
        // In the first row, one sample is the same and the other shares no token.
        assert_eq!(found.leading_tokens, Some(0.75));
        assert_eq!(
            (found.differing[0].job.as_str(), found.differing[0].recheck.as_str()),
            ("one", "two")
        );
    }

    #[test]
    fn a_recheck_without_compared_rows_says_so() {
        let mut tally = RecheckTally::new(None);
        tally.add_unanswered();
        let found = tally.finish("f32".into(), 0.0);
        assert_eq!((found.share, found.interval), (None, None));
        assert!(found.lines()[0].contains("none of 1 row could be compared"));
    }
}
