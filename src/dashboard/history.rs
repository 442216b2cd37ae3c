//! The tokens and rows of a job over time, as this process saw them or as the times of parts tell.

use std::collections::VecDeque;

use super::view::Pace;

/// Maximum number of points, which is also the maximum that is shown.
const POINTS_MAX: usize = 300;
/// Seconds over which tokens per second are measured.
const TOKENS_WINDOW: f64 = 60.0;
/// Seconds over which rows per second are measured, for the time left: longer than a log interval
/// of the workers, in which no finished row may show.
const ROWS_WINDOW: f64 = 300.0;
/// Shortest time over which a rate is measured, in seconds.
const MEASURED_MIN: f64 = 1.0;
/// Seconds without new tokens after which the throughput is shown as 0.
const SILENT_AFTER: f64 = 120.0;

/// Tokens and rows that were finished at a time (seconds since 1970).
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Point {
    pub at: f64,
    pub tokens: u64,
    pub rows: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct History {
    /// One for each change of the tokens, oldest first.
    changes: Vec<Point>,
    /// All looks within [`ROWS_WINDOW`].
    recent: VecDeque<Point>,
}

impl History {
    /// Adds what was seen now.
    pub(super) fn note(&mut self, point: Point) {
        if self.recent.back().is_some_and(|last| is_earlier(&point, last)) {
            // A retry has begun, which takes rows away.
            self.recent.clear();
            self.changes.clear();
        }
        self.recent.push_back(point);
        while self.recent.len() > 2 && self.recent[1].at <= point.at - ROWS_WINDOW {
            self.recent.pop_front();
        }
        if self.changes.last().is_none_or(|last| last.tokens < point.tokens) {
            self.changes.push(point);
            self.thin();
        }
    }

    /// Puts the times at which parts were written before what was seen. `parts`: the rows and tokens
    /// of each.
    pub(super) fn put_before(&mut self, created_at: f64, mut parts: Vec<Point>) {
        parts.sort_by(|a, b| a.at.total_cmp(&b.at));
        let first = self.changes.first().copied();
        let mut sum = Point {
            at: created_at,
            tokens: 0,
            rows: 0,
        };
        let mut before = vec![sum];
        for part in parts {
            sum.at = part.at.max(sum.at);
            sum.tokens = sum.tokens.saturating_add(part.tokens);
            sum.rows = sum.rows.saturating_add(part.rows);
            if first.is_some_and(|first| sum.at >= first.at || sum.tokens >= first.tokens) {
                break;
            }
            // Parts that are written at the same moment are one point, which keeps its time: else
            // parts that follow each other closely would all be one.
            match before.last_mut() {
                Some(last) if sum.at - last.at < MEASURED_MIN && last.tokens > 0 => {
                    *last = Point { at: last.at, ..sum }
                }
                _ => before.push(sum),
            }
        }
        // With nothing seen before the last part, its time is when the job got there.
        if let Some(first) = self.changes.first_mut()
            && sum.tokens == first.tokens
        {
            first.at = first.at.min(sum.at);
        }
        before.append(&mut self.changes);
        self.changes = before;
        self.thin();
    }

    /// Leaves out every second point when there are too many. The first and the last one stay.
    fn thin(&mut self) {
        while self.changes.len() > POINTS_MAX {
            let last = self.changes.len() - 1;
            let mut index = 0;
            self.changes.retain(|_| {
                index += 1;
                (index - 1) % 2 == 0 || index - 1 == last
            });
        }
    }

    /// Pairs of a time and the tokens per second since the time before.
    pub(super) fn throughput(&self, now: f64, is_running: bool) -> Vec<(i64, f64)> {
        let pairs = self.changes.windows(2).map(|pair| {
            let seconds = (pair[1].at - pair[0].at).max(MEASURED_MIN);
            let tokens = pair[1].tokens.saturating_sub(pair[0].tokens);
            (pair[1].at as i64, tokens as f64 / seconds)
        });
        let mut shown: Vec<(i64, f64)> = pairs.collect();
        let is_silent = |last: &Point| now - last.at > SILENT_AFTER;
        if is_running && self.changes.last().is_some_and(is_silent) {
            shown.push((now as i64, 0.0));
        }
        shown
    }

    /// How fast the job is now.
    pub(super) fn pace(&self) -> Pace {
        Pace {
            tokens_per_second: self.rate(TOKENS_WINDOW, |point| point.tokens),
            rows_per_second: self.rate(ROWS_WINDOW, |point| point.rows),
        }
    }

    /// The growth per second since the newest point that is at least `window` old, or else since the
    /// oldest one.
    fn rate(&self, window: f64, value: impl Fn(&Point) -> u64) -> Option<f64> {
        let last = self.recent.back()?;
        let old = self.recent.iter().rev().find(|point| last.at - point.at >= window);
        let from = old.or(self.recent.front())?;
        let seconds = last.at - from.at;
        (seconds >= MEASURED_MIN).then(|| value(last).saturating_sub(value(from)) as f64 / seconds)
    }
}

/// Whether `point` has fewer tokens or rows than `last`.
fn is_earlier(point: &Point, last: &Point) -> bool {
    point.tokens < last.tokens || point.rows < last.rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(at: f64, tokens: u64) -> Point {
        let rows = tokens / 10;
        Point { at, tokens, rows }
    }

    #[test]
    fn rates_are_those_of_the_last_minute() {
        let mut history = History::default();
        assert_eq!(history.pace(), Pace::default());
        history.note(point(1_000.0, 0));
        assert_eq!(history.pace(), Pace::default(), "one look is no rate");
        for n in 1..=100 {
            // Faster from the middle on.
            let tokens = if n <= 50 { n * 20 } else { 1_000 + (n - 50) * 200 };
            history.note(point(1_000.0 + 2.0 * n as f64, tokens));
        }
        assert_eq!(history.pace().tokens_per_second, Some(100.0));
        assert_eq!(history.pace().rows_per_second, Some(1_100.0 / 200.0));
        let bounded = (0..10_000).map(|n| point(2_000.0 + n as f64, 20_000 + n));
        bounded.for_each(|point| history.note(point));
        assert!(history.recent.len() < 310 && history.changes.len() <= POINTS_MAX);
        assert_eq!(history.changes[0], point(1_000.0, 0));
    }

    #[test]
    fn throughput_spreads_tokens_over_the_time_since_the_last_change() {
        let mut history = History::default();
        for (at, tokens) in [(100.0, 0), (102.0, 0), (104.0, 0), (110.0, 100), (112.0, 100)] {
            history.note(point(at, tokens));
        }
        assert_eq!(history.throughput(112.0, true), [(110, 10.0)]);
        assert_eq!(history.throughput(300.0, true), [(110, 10.0), (300, 0.0)]);
        assert_eq!(history.throughput(300.0, false), [(110, 10.0)]);
        // A retry begins with fewer rows.
        history.note(point(310.0, 90));
        assert_eq!(history.throughput(311.0, true), []);
    }

    #[test]
    fn parts_tell_what_came_before() {
        let mut history = History::default();
        history.note(point(500.0, 300));
        history.note(point(510.0, 400));
        history.put_before(100.0, vec![point(300.0, 100), point(200.0, 100), point(505.0, 120)]);
        assert_eq!(
            history.throughput(510.0, true),
            [(200, 1.0), (300, 1.0), (500, 0.5), (510, 10.0)]
        );
        // Parts that follow each other closely are a point a second.
        let mut history = History::default();
        let parts: Vec<Point> = (0..20).map(|n| point(200.0 + f64::from(n) / 4.0, 10)).collect();
        history.put_before(199.0, parts);
        let times = history.throughput(205.0, false).into_iter().map(|(at, _)| at);
        assert_eq!(times.collect::<Vec<_>>(), [200, 201, 202, 203, 204]);
        // A finished job: the last part's time is its end, however late somebody looks.
        let mut history = History::default();
        history.note(point(9_000.0, 200));
        history.put_before(100.0, vec![point(200.0, 100), point(300.0, 100)]);
        assert_eq!(history.throughput(9_000.0, false), [(200, 1.0), (300, 1.0)]);
    }
}
