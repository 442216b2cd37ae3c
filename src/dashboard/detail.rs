//! What only the view of a single job has: shards, workers, throughput, histograms, reasons of
//! failures. Some of it takes more requests than a status, and is read less often.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::Int64Type;
use chrono::Utc;

use super::history::{History, Point};
use super::hub::Hub;
use super::view::{
    BudgetView, Detail, ErrorCount, Histogram, Seen, ShardsView, WorkerView, lost_parts, open_shards, seconds_of,
};
use crate::ledger::published::PublishedPart;
use crate::ledger::spend::WorkerSpend;
use crate::ledger::status::Status;
use crate::ledger::{Commit, Ledger, LedgerError};

/// Shortest time between two readings of the workers' spendings.
const WORKERS_EVERY: Duration = Duration::from_secs(10);
/// Shortest time between two readings of the parts, which are read only after shards were published.
const PARTS_EVERY: Duration = Duration::from_secs(30);
/// A reading of the parts that takes long is repeated after this many times its own duration.
const PARTS_SHARE: u32 = 10;
/// Maximum number of parts that histograms are made from.
const SAMPLED_PARTS: usize = 4;
/// Maximum number of reasons of failures.
const REASONS_MAX: usize = 20;
const TOKEN_COLUMNS: [&str; 2] = ["prompt_tokens", "completion_tokens"];

/// What was read of a job's parts and workers.
#[derive(Default)]
pub(super) struct Parts {
    workers: Option<(Instant, Vec<WorkerSpend>)>,
    published: Option<Published>,
    has_past: bool,
}

struct Published {
    read_at: Instant,
    pause: Duration,
    /// The generation and the committed shards for which it was read.
    key: (u32, u32),
    /// Of the parts that can be looked into, in the order of rows.
    commits: Arc<Vec<Commit>>,
    lost: Vec<String>,
    prompt: Option<Histogram>,
    completion: Option<Histogram>,
    errors: Vec<ErrorCount>,
}

impl Parts {
    /// The commits of the parts that can be looked into, in the order of rows.
    pub(super) fn commits(&self) -> Arc<Vec<Commit>> {
        let published = self.published.as_ref();
        published.map_or_else(Arc::default, |published| published.commits.clone())
    }
}

impl Hub {
    /// The detail of a job, given what its ledger says.
    pub(super) async fn detail(
        &self,
        ledger: &Ledger,
        seen: &Seen,
        parts: &mut Parts,
        history: &mut History,
        is_running: bool,
    ) -> Result<Detail, LedgerError> {
        let status = &seen.status;
        let are_old = |(read_at, _): &(Instant, Vec<WorkerSpend>)| read_at.elapsed() >= WORKERS_EVERY;
        if parts.workers.as_ref().is_none_or(are_old) {
            parts.workers = Some((Instant::now(), ledger.spendings().await?.by_worker));
        }
        self.read_parts(ledger, seen, parts, history).await?;
        let mut detail = Detail {
            shards: ShardsView::of(&status.shards),
            open_shards: open_shards(&status.open),
            workers: workers(parts.workers.as_ref().map_or(&[], |(_, spends)| spends), status),
            queue_lag: None,
            budget: BudgetView::of(seen),
            throughput: history.throughput(seconds_of(Utc::now()), is_running),
            ..Detail::default()
        };
        if let Some(published) = &parts.published {
            detail.lost_parts = published.lost.clone();
            detail.prompt_tokens_histogram = published.prompt.clone();
            detail.completion_tokens_histogram = published.completion.clone();
            // The reasons may quote prompts.
            if self.shows_prompts {
                detail.errors = published.errors.clone();
            }
        }
        Ok(detail)
    }

    /// Reads the parts, unless what is known is new enough.
    pub(super) async fn read_parts(
        &self,
        ledger: &Ledger,
        seen: &Seen,
        parts: &mut Parts,
        history: &mut History,
    ) -> Result<(), LedgerError> {
        let key = (seen.status.generation, seen.status.shards.done);
        let is_new = |published: &Published| published.key == key || published.read_at.elapsed() < published.pause;
        if parts.published.as_ref().is_some_and(is_new) {
            return Ok(());
        }
        let begun = Instant::now();
        let found = ledger.published_parts().await?;
        if !std::mem::replace(&mut parts.has_past, true) {
            history.put_before(seconds_of(ledger.created_at()), points(&found));
        }
        let mut published = self.read_published(ledger, found, key).await?;
        published.pause = PARTS_EVERY.max(begun.elapsed() * PARTS_SHARE);
        parts.published = Some(published);
        Ok(())
    }

    async fn read_published(
        &self,
        ledger: &Ledger,
        found: Vec<PublishedPart>,
        key: (u32, u32),
    ) -> Result<Published, LedgerError> {
        let lost = found.iter().filter(|part| part.written_at.is_none());
        let lost = lost_parts(lost.map(|part| part.commit.part.name.clone()).collect());
        let readable: Vec<Commit> = found
            .into_iter()
            .filter(PublishedPart::is_readable)
            .map(|part| part.commit)
            .collect();
        // The semaphore is never closed.
        let _permit = self.part_reads.acquire().await;
        let mut tokens = TokenCounts::default();
        for commit in spread(&readable, SAMPLED_PARTS) {
            let scanned = ledger.scan_part(commit, &TOKEN_COLUMNS, TokenCounts::default(), TokenCounts::add);
            // Damaged parts are left out: `verify` reports them.
            if let Ok(counts) = scanned.await? {
                tokens.prompt.extend(counts.prompt);
                tokens.completion.extend(counts.completion);
            }
        }
        let failures = ledger.failures_in(readable.iter().cloned(), REASONS_MAX).await?;
        let errors = failures.most.into_iter().map(|reason| ErrorCount {
            reason: reason.message,
            rows: reason.rows,
        });
        Ok(Published {
            read_at: Instant::now(),
            pause: PARTS_EVERY,
            key,
            commits: Arc::new(readable),
            lost,
            prompt: Histogram::of(&tokens.prompt),
            completion: Histogram::of(&tokens.completion),
            errors: errors.collect(),
        })
    }
}

/// When each part was written, with its rows and tokens.
fn points(parts: &[PublishedPart]) -> Vec<Point> {
    let point = |part: &PublishedPart| {
        let tally = &part.commit.tally;
        Some(Point {
            at: seconds_of(part.written_at?),
            tokens: tally.prompt_tokens.saturating_add(tally.completion_tokens),
            rows: tally.rows(),
        })
    };
    parts.iter().filter_map(point).collect()
}

/// Up to `count` of `all`, from its beginning to its end.
fn spread<T>(all: &[T], count: usize) -> impl Iterator<Item = &T> {
    let count = count.min(all.len());
    (0..count).map(move |n| &all[n * all.len() / count])
}

/// The workers that have not left, with the shards that they work on.
fn workers(spends: &[WorkerSpend], status: &Status) -> Vec<WorkerView> {
    let mut workers: BTreeMap<&str, WorkerView> = BTreeMap::new();
    let view = |name: &str, last_seen: i64| WorkerView {
        name: name.to_string(),
        shards: Vec::new(),
        last_seen,
    };
    for spend in spends.iter().filter(|spend| !spend.ended) {
        let name = spend.worker.as_str();
        workers.insert(name, view(name, spend.written_at.timestamp()));
    }
    let left = |name: &str| spends.iter().any(|spend| spend.ended && spend.worker == name);
    for shard in &status.open {
        let Some(name) = shard.worker.as_deref().filter(|name| !left(name)) else {
            continue;
        };
        let seen = shard.last_progress.timestamp();
        let worker = workers.entry(name).or_insert_with(|| view(name, seen));
        worker.shards.push(shard.shard);
        worker.last_seen = worker.last_seen.max(seen);
    }
    workers.into_values().collect()
}

/// Tokens of rows.
#[derive(Default)]
struct TokenCounts {
    prompt: Vec<u64>,
    completion: Vec<u64>,
}

impl TokenCounts {
    /// Adds the rows of a batch; goes on to the next one.
    fn add(&mut self, batch: &RecordBatch) -> Result<bool, String> {
        for (name, counts) in [
            (TOKEN_COLUMNS[0], &mut self.prompt),
            (TOKEN_COLUMNS[1], &mut self.completion),
        ] {
            let column = batch.column_by_name(name);
            let column = column.and_then(|column| column.as_primitive_opt::<Int64Type>());
            let column = column.ok_or_else(|| format!("it has no column `{name}` of whole numbers"))?;
            let valid = (0..column.len()).filter(|&row| column.is_valid(row));
            counts.extend(valid.map(|row| column.value(row).max(0) as u64));
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, Int64Array};
    use chrono::DateTime;

    use super::*;
    use crate::ledger::status::{OpenShard, ShardCounts, State};
    use crate::ledger::{Id, Tally};

    #[test]
    fn samples_are_spread_over_all_parts() {
        let all: Vec<u32> = (0..10).collect();
        assert_eq!(spread(&all, 4).copied().collect::<Vec<_>>(), [0, 2, 5, 7]);
        assert_eq!(spread(&all[..2], 4).copied().collect::<Vec<_>>(), [0, 1]);
        assert_eq!(spread(&all[..0], 4).count(), 0);
    }

    #[test]
    fn workers_are_those_that_have_not_left() {
        let at = |seconds| DateTime::from_timestamp(seconds, 0).unwrap();
        let spend = |worker: &str, written: i64, ended: bool| WorkerSpend {
            worker: worker.into(),
            device_seconds: 1.0,
            written_at: at(written),
            ended,
        };
        let open = |shard: u32, worker: &str, progress: i64| OpenShard {
            shard,
            rows_done: 0,
            rows: 1,
            rows_damaged: 0,
            rows_again: 0,
            attempts: 1,
            stuck: false,
            worker: Some(worker.into()),
            last_progress: at(progress),
        };
        let status = Status {
            job: Id::random().unwrap(),
            name: "j".into(),
            state: State::Running,
            note: None,
            rows: 9,
            tally: Tally::default(),
            shards: ShardCounts::default(),
            generation: 0,
            open: vec![
                open(3, "a", 50),
                open(4, "a", 10),
                open(5, "gone", 20),
                open(6, "new", 30),
            ],
            lost_parts: Vec::new(),
            seconds: 0.0,
            usd: None,
        };
        let found = workers(
            &[spend("a", 40, false), spend("gone", 45, true), spend("idle", 5, false)],
            &status,
        );
        let shown: Vec<(&str, &[u32], i64)> = found
            .iter()
            .map(|worker| (worker.name.as_str(), worker.shards.as_slice(), worker.last_seen))
            .collect();
        assert_eq!(shown, [("a", &[3, 4][..], 50), ("idle", &[], 5), ("new", &[6], 30)]);
    }

    #[test]
    fn rows_without_tokens_are_left_out() {
        let numbers = |values: [Option<i64>; 3]| Arc::new(Int64Array::from(values.to_vec())) as ArrayRef;
        let batch = RecordBatch::try_from_iter_with_nullable([
            ("prompt_tokens", numbers([Some(4), None, Some(-1)]), true),
            ("completion_tokens", numbers([None, None, Some(7)]), true),
        ])
        .unwrap();
        let mut counts = TokenCounts::default();
        assert_eq!(counts.add(&batch), Ok(true));
        assert_eq!((counts.prompt, counts.completion), (vec![4, 0], vec![7]));
        let other = batch.project(&[0]).unwrap();
        assert!(
            TokenCounts::default()
                .add(&other)
                .unwrap_err()
                .contains("completion_tokens")
        );
    }
}
