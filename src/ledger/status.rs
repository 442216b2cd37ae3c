//! How far a job is, by its ledger alone: digests of closed blocks, commits of open ones, logs of open shards.

use futures::{StreamExt, TryStreamExt};
use serde::Serialize;

use super::Ledger;
use super::error::Result;
use super::finish::READS_AT_ONCE;
use super::keys::Id;
use super::log::ShardLog;
use super::record::{StopWhy, Tally};

/// A job's progress.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Status {
    pub job: Id,
    pub name: String,
    pub state: State,
    /// Rows of the whole job.
    pub rows: u64,
    /// Rows that are finished for good, published or not, by status, with their tokens.
    pub tally: Tally,
    pub shards: ShardCounts,
    pub open: Vec<OpenShard>,
    /// Device seconds of all workers.
    pub seconds: f64,
    /// Where the job has a price.
    pub usd: Option<f64>,
}

/// Where a job stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Rows are left and nothing forbids to run them. (Whether a worker is at it, the ledger cannot know.)
    Running,
    /// Every row is published.
    Finished,
    BudgetReached,
    DeadlineReached,
    Cancelled,
}

/// Shards by what has become of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct ShardCounts {
    pub total: u32,
    /// Committed.
    pub done: u32,
    /// Some worker has begun it.
    pub open: u32,
    /// Of the open ones: two attempts at its unfinished rows never ended.
    pub stuck: u32,
}

impl Ledger {
    /// Reads how far the job is.
    ///
    /// Requests: one a closed block, one and one a commit for each open block, a listing of the shards' folders, and for
    /// each open shard its log.
    pub async fn status(&self) -> Result<Status> {
        let job = self.job();
        let total = job.shards.len() as u32;
        let mut status = Status {
            job: job.job.clone(),
            name: job.name.clone(),
            state: State::Finished,
            rows: job.rows(),
            tally: Tally::default(),
            shards: ShardCounts {
                total,
                ..ShardCounts::default()
            },
            open: Vec::new(),
            seconds: 0.0,
            usd: None,
        };
        if let Some(success) = self.success().await? {
            status.tally = success.tally;
            status.shards.done = total;
            (status.seconds, status.usd) = (success.seconds, success.usd);
            return Ok(status);
        }
        status.state = match self.control().await?.stopped() {
            None => State::Running,
            Some(StopWhy::Budget) => State::BudgetReached,
            Some(StopWhy::Deadline) => State::DeadlineReached,
            Some(StopWhy::Cancelled) => State::Cancelled,
        };
        status.seconds = self.spent().await?.device_seconds();
        status.usd = job.usd_per_hour.map(|price| status.seconds / 3600.0 * price);
        let uncommitted = self.add_committed(&mut status).await?;
        self.add_open(&mut status, uncommitted).await?;
        Ok(status)
    }

    /// Shards without a commit, ascending: two requests, and one a block that is not closed.
    pub async fn uncommitted(&self) -> Result<Vec<u32>> {
        let closed = self.closed_blocks().await?;
        let mut uncommitted = Vec::new();
        for block in (0..self.blocks()).filter(|block| !closed.contains(block)) {
            let done = self.committed_shards(block).await?;
            uncommitted.extend(self.block_shards(block).filter(|shard| !done.contains(shard)));
        }
        Ok(uncommitted)
    }

    /// Adds what is committed; returns the shards that are not.
    async fn add_committed(&self, status: &mut Status) -> Result<Vec<u32>> {
        let closed = self.closed_blocks().await?;
        let mut uncommitted = Vec::new();
        for block in 0..self.blocks() {
            if closed.contains(&block) {
                status.tally.add(&self.digest(block).await?.tally);
                status.shards.done += self.block_shards(block).len() as u32;
                continue;
            }
            let done = self.committed_shards(block).await?;
            status.shards.done += done.len() as u32;
            uncommitted.extend(self.block_shards(block).filter(|shard| !done.contains(shard)));
            for commit in self.read_commits(done).await? {
                status.tally.add(&commit.tally);
            }
        }
        Ok(uncommitted)
    }

    /// Adds what the logs of begun shards cover.
    async fn add_open(&self, status: &mut Status, uncommitted: Vec<u32>) -> Result<()> {
        let (_, mut begun) = self.store().list_folder(&self.keys().shards()).await?;
        begun.sort();
        let open = uncommitted
            .into_iter()
            .filter(|shard| begun.binary_search(&format!("{shard:06}")).is_ok());
        let mut logs = futures::stream::iter(open)
            .map(|shard| async move { ShardLog::load(self, shard).await })
            .buffer_unordered(READS_AT_ONCE);
        while let Some(log) = logs.try_next().await? {
            status.tally.add(&log.tally());
            status.shards.open += 1;
            status.shards.stuck += u32::from(log.narrowing().alone() || !log.narrowing().accused.is_empty());
        }
        Ok(())
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OpenShard {
    pub shard: u32,
    pub rows_done: u64,
    pub rows: u64,
    pub attempts: u32,
    pub worker: Option<String>,
    pub last_progress: chrono::DateTime<chrono::Utc>,
    pub stuck: bool,
}
