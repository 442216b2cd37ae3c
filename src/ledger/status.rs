//! The progress of a job, from its ledger alone: digests of closed blocks, commits of open blocks,
//! and logs of open shards. A block is a fixed range of shards. It is closed when all of its shards
//! are committed and its digest, one record with all of these commits, is written.

use chrono::{DateTime, TimeDelta, Utc};
use futures::{Stream, StreamExt, TryStreamExt};
use serde::Serialize;

use super::Ledger;
use super::error::{LedgerError, Result};
use super::finish::READS_AT_ONCE;
use super::keys::Id;
use super::log::ShardLog;
use super::order::StopWhy;
use super::record::{Commit, Tally};
use super::spend::dollars;

/// Maximum number of blocks that are read concurrently. The commits of an open block are read
/// concurrently too.
const BLOCKS_AT_ONCE: usize = 8;

/// Minimum time without a write after which a shard with attempts that have not ended is called
/// stuck. For workers with a long log interval, the time is two log intervals.
const STUCK_AFTER_MIN: TimeDelta = TimeDelta::seconds(60);

/// The time without a write after which the shard of `log` is called stuck.
fn stuck_after(log: &ShardLog) -> TimeDelta {
    let attempts = log.attempts().iter();
    let longest_seconds = attempts
        .filter_map(|attempt| attempt.heartbeat_seconds)
        .fold(0.0, f64::max);
    // No overflow: records bound this to 1e10 s.
    TimeDelta::seconds((2.0 * longest_seconds).ceil() as i64).max(STUCK_AFTER_MIN)
}

/// A job's progress.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Status {
    pub job: Id,
    pub name: String,
    pub state: State,
    /// The note of the stop that is in force, if it has one.
    pub note: Option<String>,
    /// Rows of the whole job.
    pub rows: u64,
    /// Counts of finished rows, published or logged, by status, with their tokens.
    pub tally: Tally,
    pub shards: ShardCounts,
    /// The current generation of the job.
    pub generation: u32,
    /// Shards that some worker has begun and that have no commit, ascending.
    pub open: Vec<OpenShard>,
    /// Names of committed parts that are missing.
    pub lost_parts: Vec<String>,
    /// Device seconds of all workers.
    pub seconds: f64,
    /// Cost in dollars, if the job has a price.
    pub usd: Option<f64>,
}

/// A shard that is begun and not committed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OpenShard {
    pub shard: u32,
    /// Rows that its log covers, `rows_damaged` excluded.
    pub rows_done: u64,
    /// Rows to do in this generation.
    pub rows: u64,
    /// Finished rows whose data object is missing or damaged: the next worker of the shard computes
    /// them again.
    pub rows_damaged: u64,
    /// Rows whose record was voided because its data was damaged. They are, or were, computed
    /// again.
    pub rows_again: u64,
    /// Attempts that have not ended: running or dead.
    pub attempts: u32,
    /// Whether two attempts at its unfinished rows have not ended, and nothing was written for the
    /// longer of two times: 1 minute, and 2 log intervals.
    pub stuck: bool,
    /// Worker of the newest of these attempts.
    pub worker: Option<String>,
    /// When its newest ledger object was written, by the store's clock.
    pub last_progress: DateTime<Utc>,
}

/// State of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Rows are left, and the job is not stopped. The ledger cannot tell whether a worker is
    /// running.
    Running,
    /// Every row is published.
    Finished,
    BudgetReached,
    DeadlineReached,
    Cancelled,
    InputChanged,
}

/// Number of shards by state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct ShardCounts {
    pub total: u32,
    /// Shards with a commit.
    pub done: u32,
    /// Shards that some worker has begun and that have no commit.
    pub open: u32,
    /// Open shards that are stuck: see [`OpenShard::stuck`].
    pub stuck: u32,
}

impl Ledger {
    /// Reads the progress of the job.
    ///
    /// Requests: one per closed block, one per open block and one per commit in it, a listing of
    /// the shards' folders, and the reads of each open shard's log. They are sent concurrently.
    /// During a retry, the counts include two kinds of rows: published rows that are not retried,
    /// and retried rows that are finished.
    pub async fn status(&self) -> Result<Status> {
        self.status_at(Utc::now()).await
    }

    /// As [`Ledger::status`], with `now` in place of the local clock.
    pub async fn status_at(&self, now: DateTime<Utc>) -> Result<Status> {
        let without_part = self.shards_without_part().await?;
        self.status_with_missing_parts(without_part, now).await
    }

    /// As [`Ledger::status`], but without listing the parts: all parts are assumed to exist.
    pub async fn quick_status(&self) -> Result<Status> {
        self.status_with_missing_parts(Vec::new(), Utc::now()).await
    }

    /// The progress of the job. `without_part`: the shards whose parts are missing.
    async fn status_with_missing_parts(&self, without_part: Vec<u32>, now: DateTime<Utc>) -> Result<Status> {
        let job = self.job();
        let numbers = self.shard_numbers();
        let mut status = Status {
            job: job.job.clone(),
            name: job.name.clone(),
            state: State::Finished,
            note: None,
            rows: job.rows(),
            tally: Tally::default(),
            shards: ShardCounts {
                total: numbers.len() as u32,
                ..ShardCounts::default()
            },
            generation: self.generation(),
            open: Vec::new(),
            lost_parts: Vec::new(),
            seconds: 0.0,
            usd: None,
        };
        let current = self.current_success().await?;
        if let Some(success) = &current {
            status.tally = success.tally;
            (status.seconds, status.usd) = (success.seconds, success.usd);
            if success.generation >= self.generation() {
                if without_part.is_empty() {
                    status.shards.done = status.shards.total;
                    self.update_spending(&mut status).await?;
                    return Ok(status);
                }
                status.tally = Tally::default();
            } else {
                status.tally.subtract(&self.retried_tally());
            }
        }
        let control = self.control().await?;
        status.note = control.stop_note().map(str::to_string);
        status.state = match control.stop_reason() {
            None => State::Running,
            Some(StopWhy::Budget) => State::BudgetReached,
            Some(StopWhy::Deadline) => State::DeadlineReached,
            Some(StopWhy::Cancelled) => State::Cancelled,
            Some(StopWhy::InputChanged) => State::InputChanged,
        };
        status.seconds = self.spendings().await?.device_seconds();
        status.usd = dollars(status.seconds, self.limits(&control).usd_per_hour);
        let uncommitted = self.add_committed(&mut status).await?;
        let lost_parts = without_part
            .into_iter()
            .filter(|shard| uncommitted.binary_search(shard).is_err());
        status.lost_parts = lost_parts.map(|shard| self.keys().part(shard)).collect();
        self.add_open(&mut status, uncommitted, now).await?;
        Ok(status)
    }

    /// Updates the device seconds, which workers may have raised after `_SUCCESS` was written.
    async fn update_spending(&self, status: &mut Status) -> Result<()> {
        let seconds = self.spendings().await?.device_seconds();
        if seconds > status.seconds {
            status.seconds = seconds;
            status.usd = dollars(seconds, self.current_limits().await?.usd_per_hour);
        }
        Ok(())
    }

    /// Shards to do in this generation, ascending: shards without a commit, and shards whose part
    /// is missing. Requests: one per open block, one for the digests, and one per thousand parts.
    pub async fn unfinished_shards(&self) -> Result<Vec<u32>> {
        let missing_parts = self
            .shards_without_part()
            .await?
            .into_iter()
            .filter(|&shard| !self.rows_to_do(shard).is_empty());
        let mut shards = self.uncommitted().await?;
        shards.extend(missing_parts);
        shards.sort_unstable();
        shards.dedup();
        Ok(shards)
    }

    /// Shards without a commit in this generation, ascending. Requests: one for the digests, and
    /// one per open block.
    async fn uncommitted(&self) -> Result<Vec<u32>> {
        let closed = self.closed_blocks().await?;
        let open = self.blocks().into_iter().filter(|block| !closed.contains(block));
        let blocks: Vec<Vec<u32>> = futures::stream::iter(open.collect::<Vec<_>>())
            .map(|block| {
                let ledger = self.clone();
                async move {
                    let committed = ledger.committed_shards(block).await?;
                    let shards = ledger.block_shards(block).into_iter();
                    Ok::<_, LedgerError>(shards.filter(|shard| !committed.contains(shard)).collect())
                }
            })
            .buffered(READS_AT_ONCE)
            .try_collect()
            .await?;
        Ok(blocks.concat())
    }

    /// The commits of this generation and the shards without a commit, block by block.
    pub(super) async fn commits_by_block(&self) -> Result<impl Stream<Item = Result<(Vec<Commit>, Vec<u32>)>>> {
        let closed = self.closed_blocks().await?;
        let blocks = self
            .blocks()
            .into_iter()
            .map(move |block| (block, closed.contains(&block)));
        Ok(futures::stream::iter(blocks.collect::<Vec<_>>())
            .map(|(block, is_closed)| {
                let ledger = self.clone();
                async move {
                    if is_closed {
                        return Ok((ledger.digest(block).await?.commits, Vec::new()));
                    }
                    let committed = ledger.committed_shards(block).await?;
                    let shards = ledger.block_shards(block).into_iter();
                    let open: Vec<u32> = shards.filter(|shard| !committed.contains(shard)).collect();
                    Ok((ledger.read_commits(committed).await?, open))
                }
            })
            .buffered(BLOCKS_AT_ONCE))
    }

    /// Adds the counts of the commits. Returns the shards without a commit.
    async fn add_committed(&self, status: &mut Status) -> Result<Vec<u32>> {
        let mut blocks = std::pin::pin!(self.commits_by_block().await?);
        let mut uncommitted = Vec::new();
        while let Some((commits, open)) = blocks.try_next().await? {
            uncommitted.extend(open);
            status.shards.done += commits.len() as u32;
            for commit in commits {
                status.tally.add(&commit.retried.unwrap_or(commit.tally));
            }
        }
        Ok(uncommitted)
    }

    /// Adds the rows that the logs of begun shards cover.
    async fn add_open(&self, status: &mut Status, uncommitted: Vec<u32>, now: DateTime<Utc>) -> Result<()> {
        let (_, mut begun) = self.store().list_folder(&self.keys().shards_prefix()).await?;
        begun.sort();
        let open = uncommitted
            .into_iter()
            .filter(|shard| begun.binary_search(&format!("{shard:06}")).is_ok());
        let mut logs = futures::stream::iter(open)
            .map(|shard| async move {
                let mut log = ShardLog::load(self, shard).await?;
                log.confirm_damage().await?;
                // The shard may have been published and cleaned while its log was read.
                let committed = if log.damaged_rows().is_empty() {
                    None
                } else {
                    self.commit_of(shard).await?
                };
                Ok::<_, LedgerError>((log, committed))
            })
            .buffered(READS_AT_ONCE);
        while let Some((log, committed)) = logs.try_next().await? {
            if let Some(commit) = committed {
                status.shards.done += 1;
                status.tally.add(&commit.retried.unwrap_or(commit.tally));
                continue;
            }
            let damaged = log.damaged_rows().len();
            let plan = log.plan_attempt();
            let last_progress = log.last_progress().unwrap_or_else(|| self.created_at());
            // Two open attempts alone are no sign of trouble: two workers may be running the shard
            // side by side. So a time without writes is required, too.
            let is_silent = now - last_progress > stuck_after(&log);
            let is_stuck = is_silent && (plan.is_alone() || !plan.accused.is_empty());
            // Attempts are listed by their ids, which are random.
            let newest = log.attempts().iter().max_by_key(|attempt| attempt.begun_at);
            status.tally.add(&log.tally());
            status.shards.open += 1;
            status.shards.stuck += u32::from(is_stuck);
            status.open.push(OpenShard {
                shard: log.shard(),
                rows_done: log.covered().len() - damaged,
                rows_damaged: damaged,
                rows_again: log.voided_rows().len(),
                rows: log.rows_to_do().len(),
                attempts: log.attempts().len() as u32,
                stuck: is_stuck,
                worker: newest.map(|attempt| attempt.worker.clone()),
                last_progress,
            });
        }
        Ok(())
    }
}
