//! Whether an attempt that never ended is dead. The operating system tells this of processes on
//! this machine. Any other process counts as dead after a long time without writes, by the store's
//! timestamps; a worker at work rewrites its spending each log interval.

use chrono::TimeDelta;

use crate::ledger::attempts::{AttemptView, Fate};
use crate::ledger::spend::Heartbeats;
use crate::worker::process::Seen;

/// Log intervals without a sign of life after which a worker on another machine counts as dead, and
/// the minimum time.
const STILL_INTERVALS: f64 = 5.0;
const STILL_SECONDS_MIN: f64 = 60.0;
/// Assumed interval, in seconds, of workers that do not record their log interval.
const SIGNS_EVERY: f64 = 60.0;

/// The fate of `attempt`, whose worker showed `signs` of life; `see` looks for its process.
pub(super) fn fate(attempt: &AttemptView, signs: &Heartbeats, see: impl Fn(&str) -> Seen) -> Fate {
    match attempt.process.as_deref().map_or(Seen::Elsewhere, see) {
        Seen::Here => Fate::Open,
        Seen::Gone => Fate::Dead,
        Seen::Elsewhere => {
            let every = attempt
                .signs_every
                .filter(|every| every.is_finite())
                .unwrap_or(SIGNS_EVERY);
            let still = (STILL_INTERVALS * every).max(STILL_SECONDS_MIN);
            let last = attempt.begun_at.max(signs.of(&attempt.worker));
            let quiet = signs.now.zip(last).map_or(TimeDelta::zero(), |(now, last)| now - last);
            if quiet.as_seconds_f64() > still {
                Fate::Dead
            } else {
                Fate::Fresh
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use chrono::{DateTime, Utc};

    use super::*;
    use crate::ledger::{Id, RowSet};

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(seconds, 0).unwrap()
    }

    fn attempt(process: Option<&str>, signs_every: Option<f64>) -> AttemptView {
        AttemptView {
            attempt: Id::random().unwrap(),
            worker: "w".into(),
            rows: RowSet::from_range(0..1),
            alone: true,
            ended: false,
            process: process.map(str::to_string),
            signs_every,
            begun_at: Some(at(1_000)),
            after: Vec::new(),
            fate: Fate::Open,
        }
    }

    #[test]
    fn what_the_operating_system_says_beats_all_timestamps() {
        let signs = Heartbeats::new(Some(at(100_000)), []);
        let of = |seen| fate(&attempt(Some("p"), None), &signs, |_| seen);
        assert_eq!(of(Seen::Here), Fate::Open, "paused for a day, it is no death");
        assert_eq!(of(Seen::Elsewhere), Fate::Dead);
        let signs = Heartbeats::new(Some(at(1_000)), []);
        assert_eq!(fate(&attempt(Some("p"), None), &signs, |_| Seen::Gone), Fate::Dead);
    }

    #[test]
    fn elsewhere_a_worker_is_dead_when_it_has_written_nothing_for_long() {
        let of = |every, now, sign: Option<i64>| {
            let signs = Heartbeats::new(Some(at(now)), sign.map(|sign| ("w".to_string(), at(sign))));
            fate(&attempt(None, every), &signs, |_| unreachable!("it has no process"))
        };
        assert_eq!(of(Some(60.0), 1_300, None), Fate::Fresh);
        assert_eq!(of(Some(60.0), 1_301, None), Fate::Dead);
        assert_eq!(
            of(Some(60.0), 1_301, Some(1_002)),
            Fate::Fresh,
            "it wrote its spending since"
        );
        assert_eq!(of(Some(60.0), 1_301, Some(999)), Fate::Dead);
        assert_eq!(of(Some(0.5), 1_060, None), Fate::Fresh);
        assert_eq!(of(Some(0.5), 1_061, None), Fate::Dead);
        assert_eq!(of(None, 1_300, None), Fate::Fresh, "an older gristmill's");
        assert_eq!(of(Some(f64::NAN), 1_301, None), Fate::Dead);
    }
}
