//! Jobs as the API shows them, made of what a source and a ledger say. Nothing here reads anything.

use chrono::{DateTime, Utc};
use schemars::JsonSchema;
use serde::Serialize;

use crate::ledger::status::{OpenShard, ShardCounts, State, Status};
use crate::ledger::{JobLimits, Tally};

/// Maximum number of open shards that a job lists: stuck ones first.
const OPEN_SHARDS_MAX: usize = 200;
/// Maximum number of missing parts that a job names.
const LOST_PARTS_MAX: usize = 200;

/// What a job is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A batch of `gristmill serve`.
    Batch,
    /// A job of a job file.
    Job,
}

/// What a viewer can have done to a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum Action {
    Cancel,
    Extend,
    Retry,
}

/// A job without what its ledger says.
#[derive(Debug, Clone)]
pub struct Frame {
    pub id: String,
    pub kind: Kind,
    pub name: String,
    pub model: Option<String>,
    pub output: Option<String>,
    /// The state, where the source knows better than the ledger.
    pub state: Option<String>,
    pub note: Option<String>,
    /// Seconds since 1970, like all times here.
    pub created_at: i64,
    pub ended_at: Option<i64>,
    /// Rows that ended as errors before the job was planned, and that its ledger does not know.
    pub refused: u64,
    /// Rows and tokens where there is no ledger: not yet, or no longer.
    pub without_ledger: (Rows, Tokens),
    /// Whether the job never changes again.
    pub is_final: bool,
    pub rights: Rights,
}

/// What a viewer may have done, if the job's state allows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rights {
    pub cancel: bool,
    /// To extend and retry it.
    pub change: bool,
}

/// Rows by status.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Rows {
    pub total: u64,
    pub succeeded: u64,
    pub invalid_output: u64,
    pub errored: u64,
    pub expired: u64,
    pub cancelled: u64,
}

impl Rows {
    fn of(total: u64, tally: &Tally) -> Rows {
        Rows {
            total,
            succeeded: tally.succeeded,
            invalid_output: tally.invalid_output,
            errored: tally.errored,
            expired: tally.expired,
            cancelled: tally.cancelled,
        }
    }

    /// Rows with a final status.
    pub(super) fn ended(&self) -> u64 {
        self.succeeded + self.invalid_output + self.errored + self.expired + self.cancelled
    }
}

/// Tokens of all finished rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Tokens {
    pub prompt: u64,
    pub cached: u64,
    pub completion: u64,
}

/// What a job's ledger says.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    pub status: Status,
    pub limits: JobLimits,
    /// Whether the job is stopped, and its unfinished rows are still to be published.
    pub is_closing: bool,
    pub created_at: i64,
    pub finished_at: Option<i64>,
}

/// How fast a job is.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Pace {
    pub tokens_per_second: Option<f64>,
    pub rows_per_second: Option<f64>,
}

/// A job, as the API shows it.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct JobView {
    pub(super) id: String,
    object: &'static str,
    kind: Kind,
    name: String,
    model: Option<String>,
    output: Option<String>,
    /// Of a job: `running`, `finished`, `budget_reached`, `deadline_reached`, `cancelling`, `cancelled`,
    /// `input_changed`. Of a batch: `validating`, `running`, `finishing`, `finished`, `failed`, `expired`,
    /// `cancelling`, `cancelled`. Of both: `unreadable`.
    pub(super) state: String,
    note: Option<String>,
    created_at: i64,
    ended_at: Option<i64>,
    /// 0, or the number of the retry.
    generation: u32,
    pub(super) rows: Rows,
    tokens: Tokens,
    /// Device seconds of all workers.
    seconds: f64,
    usd: Option<f64>,
    /// Estimate of what the rest costs.
    usd_to_come: Option<f64>,
    eta_seconds: Option<u64>,
    /// In the last minute.
    tokens_per_second: Option<f64>,
    /// What the viewer can have done now.
    pub(super) actions: Vec<Action>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) detail: Option<Detail>,
}

/// What only the view of a single job has.
#[derive(Debug, Clone, Default, PartialEq, Serialize, JsonSchema)]
pub(super) struct Detail {
    pub shards: ShardsView,
    /// Shards that are begun and not committed: stuck ones first, at most 200.
    pub open_shards: Vec<OpenShardView>,
    /// Workers that have not left.
    pub workers: Vec<WorkerView>,
    /// Messages that wait in the queue, if the service knows it.
    pub queue_lag: Option<u64>,
    pub budget: BudgetView,
    /// Names of parts that are missing, at most 200.
    pub lost_parts: Vec<String>,
    /// Pairs of a time and the tokens per second up to it, oldest first, at most 300.
    pub throughput: Vec<(i64, f64)>,
    /// Of a sample of published rows.
    pub prompt_tokens_histogram: Option<Histogram>,
    pub completion_tokens_histogram: Option<Histogram>,
    /// Reasons of failed rows, most frequent first, at most 20; of the parts with most of them.
    pub errors: Vec<ErrorCount>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub(super) struct ShardsView {
    pub total: u32,
    pub open: u32,
    pub committed: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub(super) struct OpenShardView {
    shard: u32,
    rows_done: u64,
    rows: u64,
    worker: Option<String>,
    attempts: u32,
    last_progress: i64,
    stuck: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub(super) struct WorkerView {
    pub name: String,
    pub shards: Vec<u32>,
    pub last_seen: i64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, JsonSchema)]
pub(super) struct BudgetView {
    usd: Option<f64>,
    usd_per_hour: Option<f64>,
    deadline_at: Option<i64>,
}

/// Counts of rows; `counts[i]` are those from `edges[i]` to below `edges[i + 1]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub(super) struct Histogram {
    pub edges: Vec<u64>,
    pub counts: Vec<u64>,
    pub sampled_rows: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub(super) struct ErrorCount {
    pub reason: String,
    pub rows: u64,
}

/// A page of jobs.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct JobList {
    object: &'static str,
    data: Vec<JobView>,
    has_more: bool,
    first_id: Option<String>,
    last_id: Option<String>,
}

impl JobList {
    pub(super) fn new(data: Vec<JobView>, has_more: bool) -> JobList {
        JobList {
            object: "list",
            first_id: data.first().map(|job| job.id.clone()),
            last_id: data.last().map(|job| job.id.clone()),
            data,
            has_more,
        }
    }

    pub(super) fn jobs(&self) -> &[JobView] {
        &self.data
    }
}

/// A row, as the API shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub(super) struct RowView {
    /// 0-based over the job's input.
    pub(super) row: u64,
    pub(super) custom_id: Option<String>,
    pub(super) status: String,
    pub(super) reason: Option<String>,
    /// Cut at 4,000 characters; null if the input cannot be read any more.
    pub(super) prompt: Option<String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[schemars(default)]
    pub(super) prompt_cut: bool,
    /// Cut at 4,000 characters.
    pub(super) answer: Option<String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[schemars(default)]
    pub(super) answer_cut: bool,
    pub(super) finish_reason: Option<String>,
    /// Whether the server shows neither prompts nor answers.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[schemars(default)]
    pub(super) hidden: bool,
}

/// A page of rows.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct RowList {
    pub(super) object: &'static str,
    pub(super) data: Vec<RowView>,
    pub(super) has_more: bool,
}

impl JobView {
    /// The job of `frame`; `seen` is what its ledger says, if it has one.
    pub(super) fn new(frame: &Frame, seen: Option<&Seen>, pace: Pace) -> JobView {
        let state = state_name(frame, seen);
        let (rows, tokens) = match seen {
            Some(seen) => with_refused(frame, &seen.status),
            None => frame.without_ledger,
        };
        let is_running = state == "running";
        let left = rows.total.saturating_sub(rows.ended());
        let usd = seen.and_then(|seen| seen.status.usd).map(f64::abs);
        let done = rows.ended().saturating_sub(frame.refused);
        let usd_to_come = usd.filter(|_| is_running && done > 0);
        let eta = pace.rows_per_second.filter(|rate| is_running && *rate > 0.0);
        JobView {
            id: frame.id.clone(),
            object: "job",
            kind: frame.kind,
            name: frame.name.clone(),
            model: frame.model.clone(),
            output: frame.output.clone(),
            note: frame.note.clone().or_else(|| seen?.status.note.clone()),
            created_at: frame.created_at,
            ended_at: frame.ended_at.or_else(|| seen?.finished_at),
            generation: seen.map_or(0, |seen| seen.status.generation),
            rows,
            tokens,
            seconds: seen.map_or(0.0, |seen| seen.status.seconds.abs()),
            usd,
            usd_to_come: usd_to_come.map(|usd| usd / done as f64 * left as f64),
            eta_seconds: eta.map(|rate| (left as f64 / rate).ceil() as u64),
            tokens_per_second: pace.tokens_per_second.filter(|_| is_running),
            actions: allowed_actions(frame, seen, &rows),
            state,
            detail: None,
        }
    }

    /// A job whose ledger cannot be read.
    pub(super) fn unreadable(frame: &Frame, why: &str) -> JobView {
        let mut view = JobView::new(frame, None, Pace::default());
        view.set_unreadable(why);
        view
    }

    /// A job of a list whose store does not answer in time.
    pub(super) fn without_answer(id: &str) -> JobView {
        let frame = Frame {
            id: id.to_string(),
            kind: Kind::Job,
            name: id.to_string(),
            model: None,
            output: None,
            state: None,
            note: None,
            created_at: 0,
            ended_at: None,
            refused: 0,
            without_ledger: Default::default(),
            is_final: false,
            rights: Rights {
                cancel: false,
                change: false,
            },
        };
        JobView::unreadable(&frame, "its store does not answer at the moment")
    }

    /// Shows that what is stored of the job cannot be read.
    pub(super) fn set_unreadable(&mut self, why: &str) {
        self.state = "unreadable".into();
        self.note = Some(why.into());
        self.actions.clear();
    }

    /// Whether nothing happens any more until a person acts.
    pub(super) fn has_ended(&self) -> bool {
        !matches!(
            self.state.as_str(),
            "validating" | "running" | "finishing" | "cancelling" | "closing"
        )
    }
}

/// The rows of the ledger, and those that it does not know.
fn with_refused(frame: &Frame, status: &Status) -> (Rows, Tokens) {
    let mut rows = Rows::of(status.rows, &status.tally);
    rows.total += frame.refused;
    rows.errored += frame.refused;
    let tokens = Tokens {
        prompt: status.tally.prompt_tokens,
        cached: status.tally.cached_tokens,
        completion: status.tally.completion_tokens,
    };
    (rows, tokens)
}

fn state_name(frame: &Frame, seen: Option<&Seen>) -> String {
    if let Some(state) = &frame.state {
        return state.clone();
    }
    if frame.kind == Kind::Batch {
        let state = match seen.map(|seen| seen.status.state) {
            None => "validating",
            Some(State::Running) => "running",
            Some(State::Cancelled) => "cancelling",
            // Its files of results are still to be recorded.
            Some(State::Finished | State::BudgetReached | State::DeadlineReached | State::InputChanged) => "finishing",
        };
        return state.into();
    }
    let state = match seen.map(|seen| (seen.status.state, seen.is_closing)) {
        Some((State::Finished, _)) => "finished",
        Some((State::Cancelled, true)) => "cancelling",
        // Unfinished rows are still to be published, as `expired`.
        Some((State::BudgetReached | State::DeadlineReached | State::InputChanged, true)) => "closing",
        Some((State::Cancelled, false)) => "cancelled",
        Some((State::BudgetReached, false)) => "budget_reached",
        Some((State::DeadlineReached, false)) => "deadline_reached",
        Some((State::InputChanged, false)) => "input_changed",
        Some((State::Running, _)) | None => "running",
    };
    state.into()
}

fn allowed_actions(frame: &Frame, seen: Option<&Seen>, rows: &Rows) -> Vec<Action> {
    let state = seen.map(|seen| seen.status.state);
    let mut actions = Vec::new();
    let is_open = !matches!(state, Some(State::Finished | State::Cancelled));
    if frame.rights.cancel && is_open {
        actions.push(Action::Cancel);
    }
    if frame.rights.change && state.is_some() && is_open {
        actions.push(Action::Extend);
    }
    if frame.rights.change && state == Some(State::Finished) && rows.succeeded < rows.total {
        actions.push(Action::Retry);
    }
    actions
}

impl ShardsView {
    pub(super) fn of(counts: &ShardCounts) -> ShardsView {
        ShardsView {
            total: counts.total,
            open: counts.open,
            committed: counts.done,
        }
    }
}

impl BudgetView {
    pub(super) fn of(seen: &Seen) -> BudgetView {
        let limits = &seen.limits;
        let deadline_at = |seconds| seen.created_at.saturating_add_unsigned(seconds);
        BudgetView {
            usd: limits.usd,
            usd_per_hour: limits.usd_per_hour,
            deadline_at: limits.deadline_seconds.map(deadline_at),
        }
    }
}

/// The begun shards, stuck ones first, then by the time of their last progress.
pub(super) fn open_shards(open: &[OpenShard]) -> Vec<OpenShardView> {
    let mut sorted: Vec<&OpenShard> = open.iter().collect();
    sorted.sort_by_key(|shard| (!shard.stuck, shard.last_progress, shard.shard));
    let views = sorted.into_iter().take(OPEN_SHARDS_MAX).map(|shard| OpenShardView {
        shard: shard.shard,
        rows_done: shard.rows_done,
        rows: shard.rows,
        worker: shard.worker.clone(),
        attempts: shard.attempts,
        last_progress: shard.last_progress.timestamp(),
        stuck: shard.stuck,
    });
    views.collect()
}

/// Cuts the list of missing parts.
pub(super) fn lost_parts(mut names: Vec<String>) -> Vec<String> {
    names.truncate(LOST_PARTS_MAX);
    names
}

/// A time in seconds since 1970.
pub(super) fn seconds_of(time: DateTime<Utc>) -> f64 {
    time.timestamp_millis() as f64 / 1000.0
}

impl Histogram {
    /// Smallest width of an interval.
    const FIRST_EDGE: u64 = 16;

    /// The histogram of these values, in intervals that double; `None` without a value.
    pub(super) fn of(values: &[u64]) -> Option<Histogram> {
        let max = values.iter().max()?;
        let mut edges = vec![0, Histogram::FIRST_EDGE];
        while let Some(&last) = edges.last()
            && last <= *max
            && last < 1 << 62
        {
            edges.push(last * 2);
        }
        let mut counts = vec![0; edges.len() - 1];
        for value in values {
            let interval = edges.partition_point(|edge| edge <= value).max(1) - 1;
            let last = counts.len() - 1;
            counts[interval.min(last)] += 1;
        }
        Some(Histogram {
            edges,
            counts,
            sampled_rows: values.len() as u64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Id;

    fn frame() -> Frame {
        Frame {
            id: "0".into(),
            kind: Kind::Job,
            name: "j".into(),
            model: None,
            output: None,
            state: None,
            note: None,
            created_at: 100,
            ended_at: None,
            refused: 0,
            without_ledger: Default::default(),
            is_final: false,
            rights: Rights {
                cancel: true,
                change: true,
            },
        }
    }

    fn seen(state: State, succeeded: u64, is_closing: bool) -> Seen {
        let status = Status {
            job: Id::random().unwrap(),
            name: "j".into(),
            state,
            note: None,
            rows: 10,
            tally: Tally {
                succeeded,
                ..Tally::default()
            },
            shards: ShardCounts::default(),
            generation: 0,
            open: Vec::new(),
            lost_parts: Vec::new(),
            seconds: -0.0,
            usd: Some(2.0),
        };
        Seen {
            status,
            limits: JobLimits {
                deadline_seconds: Some(50),
                ..JobLimits::default()
            },
            is_closing,
            created_at: 100,
            finished_at: (state == State::Finished).then_some(170),
        }
    }

    #[test]
    fn the_ledger_gives_state_and_actions() {
        use Action::{Cancel, Extend, Retry};
        let cases: [(State, u64, bool, &str, &[Action]); 8] = [
            (State::Running, 4, false, "running", &[Cancel, Extend]),
            (State::Finished, 10, false, "finished", &[]),
            (State::Finished, 9, false, "finished", &[Retry]),
            (State::BudgetReached, 4, false, "budget_reached", &[Cancel, Extend]),
            (State::DeadlineReached, 4, true, "closing", &[Cancel, Extend]),
            (State::InputChanged, 4, false, "input_changed", &[Cancel, Extend]),
            (State::Cancelled, 4, true, "cancelling", &[]),
            (State::Cancelled, 4, false, "cancelled", &[]),
        ];
        for (state, succeeded, is_closing, name, actions) in cases {
            let view = JobView::new(&frame(), Some(&seen(state, succeeded, is_closing)), Pace::default());
            assert_eq!((view.state.as_str(), view.actions.as_slice()), (name, actions));
            assert_eq!(
                view.has_ended(),
                !["running", "closing", "cancelling"].contains(&name),
                "{name}"
            );
        }
        let mut reader = frame();
        reader.rights = Rights {
            cancel: false,
            change: false,
        };
        let view = JobView::new(&reader, Some(&seen(State::Running, 4, false)), Pace::default());
        assert!(view.actions.is_empty());
    }

    #[test]
    fn the_rest_is_estimated_from_what_is_done() {
        let pace = Pace {
            tokens_per_second: Some(50.0),
            rows_per_second: Some(0.5),
        };
        let view = JobView::new(&frame(), Some(&seen(State::Running, 4, false)), pace);
        assert_eq!(
            (view.usd, view.usd_to_come, view.eta_seconds),
            (Some(2.0), Some(3.0), Some(12))
        );
        assert_eq!(
            (view.tokens_per_second, view.seconds.is_sign_negative()),
            (Some(50.0), false)
        );
        let view = JobView::new(&frame(), Some(&seen(State::Running, 0, false)), Pace::default());
        assert_eq!((view.usd_to_come, view.eta_seconds), (None, None));
        let view = JobView::new(&frame(), Some(&seen(State::Finished, 4, false)), pace);
        assert_eq!(
            (view.eta_seconds, view.tokens_per_second, view.ended_at),
            (None, None, Some(170))
        );
    }

    #[test]
    fn batches_have_states_of_their_own() {
        let mut batch = Frame {
            kind: Kind::Batch,
            ..frame()
        };
        let state = |batch: &Frame, seen: Option<Seen>| JobView::new(batch, seen.as_ref(), Pace::default()).state;
        assert_eq!(state(&batch, None), "validating");
        assert_eq!(state(&batch, Some(seen(State::Running, 1, false))), "running");
        assert_eq!(state(&batch, Some(seen(State::Finished, 10, false))), "finishing");
        assert_eq!(state(&batch, Some(seen(State::DeadlineReached, 1, true))), "finishing");
        batch.state = Some("expired".into());
        assert_eq!(state(&batch, Some(seen(State::Finished, 1, false))), "expired");
    }

    #[test]
    fn refused_lines_are_rows_too() {
        let batch = Frame {
            refused: 3,
            kind: Kind::Batch,
            ..frame()
        };
        let view = JobView::new(&batch, Some(&seen(State::Running, 4, false)), Pace::default());
        assert_eq!((view.rows.total, view.rows.errored, view.rows.succeeded), (13, 3, 4));
        assert_eq!(view.usd_to_come, Some(3.0));
    }

    #[test]
    fn a_deadline_counts_from_the_jobs_start() {
        assert_eq!(BudgetView::of(&seen(State::Running, 0, false)).deadline_at, Some(150));
    }

    #[test]
    fn every_value_has_its_interval() {
        assert_eq!(Histogram::of(&[]), None);
        let histogram = Histogram::of(&[0, 15, 16, 31, 32, 100]).unwrap();
        assert_eq!(histogram.edges, [0, 16, 32, 64, 128]);
        assert_eq!(histogram.counts, [2, 2, 1, 1]);
        assert_eq!(histogram.sampled_rows, 6);
        assert_eq!(Histogram::of(&[0]).unwrap().counts, [1]);
        let large = Histogram::of(&[u64::MAX, 16]).unwrap();
        assert_eq!(large.counts.iter().sum::<u64>(), 2);
    }

    #[test]
    fn stuck_shards_come_first() {
        let shard = |shard: u32, stuck: bool, at: i64| OpenShard {
            shard,
            rows_done: 0,
            rows: 1,
            rows_damaged: 0,
            rows_again: 0,
            attempts: 1,
            stuck,
            worker: None,
            last_progress: DateTime::from_timestamp(at, 0).unwrap(),
        };
        let mut open: Vec<OpenShard> = (0..300).map(|n| shard(n, n == 299, 1_000 - i64::from(n))).collect();
        open.push(shard(300, true, 5_000));
        let shown: Vec<u32> = open_shards(&open).iter().map(|shard| shard.shard).collect();
        assert_eq!((shown.len(), &shown[..3]), (200, &[299, 300, 298][..]));
    }
}
