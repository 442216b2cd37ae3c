//! Whether the worker of an attempt without an end is dead. For processes of this machine, the
//! operating system says so. Any other process counts as dead after a long time without writes, by
//! the store's timestamps: a worker with shards of a job rewrites its spending each log interval.

use chrono::TimeDelta;

use crate::ledger::attempts::{AttemptView, Fate};
use crate::ledger::spend::Heartbeats;
use crate::worker::process::ProcessState;

/// Log intervals without a heartbeat after which a worker on another machine counts as dead, and
/// the minimum time.
const SILENT_INTERVALS: f64 = 5.0;
const SILENT_SECONDS_MIN: f64 = 60.0;
/// Assumed log interval, in seconds, of workers that do not record theirs.
const HEARTBEAT_SECONDS_DEFAULT: f64 = 60.0;

/// The fate of `attempt`, by the `heartbeats` of workers and the state of its process.
pub(super) fn fate(
    attempt: &AttemptView,
    heartbeats: &Heartbeats,
    process_state: impl Fn(&str) -> ProcessState,
) -> Fate {
    match attempt.process.as_deref().map_or(ProcessState::Unknown, process_state) {
        ProcessState::Present => Fate::Undecided,
        ProcessState::Gone => Fate::Dead,
        ProcessState::Unknown => {
            let heartbeat_seconds = attempt
                .heartbeat_seconds
                .filter(|seconds| seconds.is_finite())
                .unwrap_or(HEARTBEAT_SECONDS_DEFAULT);
            let silence_max = (SILENT_INTERVALS * heartbeat_seconds).max(SILENT_SECONDS_MIN);
            let last = attempt.begun_at.max(heartbeats.last_write(&attempt.worker));
            let silence = heartbeats
                .now
                .zip(last)
                .map_or(TimeDelta::zero(), |(now, last)| now - last);
            if silence.as_seconds_f64() > silence_max {
                Fate::Dead
            } else {
                Fate::RecentlyActive
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
            is_alone: true,
            has_ended: false,
            process: process.map(str::to_string),
            heartbeat_seconds: signs_every,
            begun_at: Some(at(1_000)),
            after: Vec::new(),
            fate: Fate::Undecided,
        }
    }

    #[test]
    fn the_operating_system_overrides_timestamps() {
        let heartbeats = Heartbeats::new(Some(at(100_000)), []);
        let of = |seen| fate(&attempt(Some("p"), None), &heartbeats, |_| seen);
        assert_eq!(
            of(ProcessState::Present),
            Fate::Undecided,
            "paused for a day, it is no death"
        );
        assert_eq!(of(ProcessState::Unknown), Fate::Dead);
        let heartbeats = Heartbeats::new(Some(at(1_000)), []);
        assert_eq!(
            fate(&attempt(Some("p"), None), &heartbeats, |_| ProcessState::Gone),
            Fate::Dead
        );
    }

    #[test]
    fn elsewhere_a_worker_is_dead_when_it_has_written_nothing_for_long() {
        let of = |every, now, sign: Option<i64>| {
            let heartbeats = Heartbeats::new(Some(at(now)), sign.map(|sign| ("w".to_string(), at(sign))));
            fate(&attempt(None, every), &heartbeats, |_| {
                unreachable!("it has no process")
            })
        };
        assert_eq!(of(Some(60.0), 1_300, None), Fate::RecentlyActive);
        assert_eq!(of(Some(60.0), 1_301, None), Fate::Dead);
        assert_eq!(
            of(Some(60.0), 1_301, Some(1_002)),
            Fate::RecentlyActive,
            "it wrote its spending since"
        );
        assert_eq!(of(Some(60.0), 1_301, Some(999)), Fate::Dead);
        assert_eq!(of(Some(0.5), 1_060, None), Fate::RecentlyActive);
        assert_eq!(of(Some(0.5), 1_061, None), Fate::Dead);
        assert_eq!(of(None, 1_300, None), Fate::RecentlyActive, "an older gristmill's");
        assert_eq!(of(Some(f64::NAN), 1_301, None), Fate::Dead);
    }
}
