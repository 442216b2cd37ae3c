//! What workers have spent: cumulative, one object a worker, which that worker alone rewrites.
//!
//! A worker that must keep a budget lists them at each look, and reads one only where what it may hold could matter: the
//! listing says when each was written, and nobody spends more than a device second a second.
//!
//! See docs/decisions/012-spendings-are-read-where-they-matter.md.

use std::collections::BTreeMap;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use futures::{StreamExt, TryStreamExt};

use super::Ledger;
use super::error::{LedgerError, Result};
use super::finish::READS_AT_ONCE;
use super::keys::is_worker_name;
use super::record::{Record, Spend, VERSION, decode, encode};
use super::store::Listed;

/// A worker at a job has written its spending within this, were it only that it is there.
const FIRST_WRITE: TimeDelta = TimeDelta::seconds(2);

/// What the workers of a job have spent.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Spent {
    pub by_worker: Vec<WorkerSpend>,
}

/// What one worker has spent.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerSpend {
    pub worker: String,
    /// Cumulative.
    pub device_seconds: f64,
    /// When it was written, by the store's clock.
    pub at: DateTime<Utc>,
    /// The worker has left: it spends no more.
    pub ended: bool,
}

impl Spent {
    /// Of all workers.
    pub fn device_seconds(&self) -> f64 {
        // From 0.0: `Iterator::sum` makes -0.0 of nothing.
        self.by_worker.iter().fold(0.0, |sum, spend| sum + spend.device_seconds)
    }
}

/// What one worker knows of the spendings of all others: as much as it needs for its budget.
#[derive(Debug, Clone, Default)]
pub struct Others {
    by_worker: BTreeMap<String, Known>,
    /// The newest time that the store had stamped at the last listing.
    now: Option<DateTime<Utc>>,
}

/// One worker's spending: as it was known last, and as it is listed now.
#[derive(Debug, Clone)]
struct Known {
    device_seconds: f64,
    /// When that was all that it had spent.
    at: DateTime<Utc>,
    ended: bool,
    /// What was read; `None`: nothing yet.
    read: Option<Listed>,
    listed: Listed,
}

impl Known {
    fn is_changed(&self) -> bool {
        self.read.as_ref() != Some(&self.listed)
    }
}

impl Others {
    /// Takes a listing of all spendings in, that of `me` aside, of a job that was created at `created`.
    fn list(&mut self, me: &str, created: DateTime<Utc>, found: Vec<(String, Listed)>) {
        let before = self.now;
        self.now = found.iter().map(|(_, listed)| listed.modified).max();
        for (worker, listed) in found.into_iter().filter(|(worker, _)| worker != me) {
            let known = self.by_worker.entry(worker).or_insert_with(|| Known {
                device_seconds: 0.0,
                // It had spent next to nothing when it was not listed yet.
                at: before.map_or(created, |before| before - FIRST_WRITE),
                ended: false,
                read: None,
                listed: listed.clone(),
            });
            known.listed = listed;
        }
    }

    /// What all others together are known to have spent, in device seconds.
    pub fn known_seconds(&self) -> f64 {
        self.by_worker
            .values()
            .fold(0.0, |sum, known| sum + known.device_seconds)
    }

    /// The most that they can have spent by now, `since` the last listing: nobody spends more than a device second a second.
    /// Those that are not [live](Others::live) have spent nothing since they wrote last.
    pub fn most_seconds(&self, window: Duration, since: Duration) -> f64 {
        let more = |known: &Known| match (self.now, self.is_live(known, window), known.is_changed()) {
            (Some(now), true, _) => seconds(now - known.at) + since.as_secs_f64(),
            (_, _, true) => seconds(known.listed.modified - known.at),
            (_, _, false) => 0.0,
        };
        self.by_worker
            .values()
            .fold(self.known_seconds(), |sum, known| sum + more(known))
    }

    /// Whether all spendings were read as they were listed last.
    pub fn is_exact(&self) -> bool {
        !self.by_worker.values().any(Known::is_changed)
    }

    /// Workers that wrote within `window` before the newest spending and have not left. The others work no more.
    pub fn live(&self, window: Duration) -> u32 {
        let live = self.by_worker.values().filter(|known| self.is_live(known, window));
        live.count() as u32
    }

    fn is_live(&self, known: &Known, window: Duration) -> bool {
        let window = TimeDelta::from_std(window).unwrap_or(TimeDelta::MAX);
        let wrote = self.now.is_some_and(|now| now - known.listed.modified <= window);
        wrote && (!known.ended || known.is_changed())
    }

    /// The newest time that the store had stamped on a spending, our own included.
    pub fn store_now(&self) -> Option<DateTime<Utc>> {
        self.now
    }
}

/// When each worker wrote its spending last, by the store's clock.
#[derive(Debug, Clone, Default)]
pub struct Signs {
    /// The newest of them: "now", right after one of them was written.
    pub now: Option<DateTime<Utc>>,
    by_worker: BTreeMap<String, DateTime<Utc>>,
}

impl Signs {
    pub fn new(now: Option<DateTime<Utc>>, signs: impl IntoIterator<Item = (String, DateTime<Utc>)>) -> Signs {
        Signs {
            now,
            by_worker: signs.into_iter().collect(),
        }
    }

    pub fn of(&self, worker: &str) -> Option<DateTime<Utc>> {
        self.by_worker.get(worker).copied()
    }
}

fn seconds(time: TimeDelta) -> f64 {
    time.to_std().unwrap_or_default().as_secs_f64()
}

impl Ledger {
    /// Writes this worker's spending on the job: cumulative device seconds over all its shards. `ended`: the worker leaves,
    /// and nobody need reckon with it any more.
    pub async fn write_spend(&self, worker: &str, device_seconds: f64, ended: bool) -> Result<()> {
        let spend = Spend {
            v: VERSION,
            worker: worker.to_string(),
            device_seconds,
            ended,
        };
        if !is_worker_name(worker) || !device_seconds.is_finite() || device_seconds < 0.0 {
            return Err(LedgerError::stop(format!(
                "worker `{worker}` cannot have spent {device_seconds} seconds"
            )));
        }
        self.store().replace(&self.keys().spend(worker), encode(&spend)?).await
    }

    /// What all workers have spent on this job: a listing, and a read each.
    pub async fn spent(&self) -> Result<Spent> {
        let listed = self.listed_spends().await?;
        let read = self.read_spends(listed.into_iter().map(|(worker, _)| worker));
        let mut by_worker: Vec<WorkerSpend> = read.await?;
        by_worker.sort_by(|a, b| a.worker.cmp(&b.worker));
        Ok(Spent { by_worker })
    }

    /// One listing: which workers have spent something new since the last one.
    pub async fn list_spends(&self, me: &str, others: &mut Others) -> Result<()> {
        let found = self.listed_spends().await?;
        others.list(me, self.created_at(), found);
        Ok(())
    }

    /// Reads what has changed, many at once.
    pub async fn read_changed_spends(&self, others: &mut Others) -> Result<()> {
        let changed = others.by_worker.iter().filter(|(_, known)| known.is_changed());
        let changed: Vec<String> = changed.map(|(worker, _)| worker.clone()).collect();
        for spend in self.read_spends(changed.into_iter()).await? {
            if let Some(known) = others.by_worker.get_mut(&spend.worker) {
                // Written again since it was listed, it holds more, never less: the next listing says so.
                known.device_seconds = spend.device_seconds;
                known.at = known.listed.modified;
                known.ended = spend.ended;
                known.read = Some(known.listed.clone());
            }
        }
        Ok(())
    }

    /// One listing: which workers have shown when that they live.
    pub async fn signs_of_life(&self) -> Result<Signs> {
        let found = self.listed_spends().await?;
        let now = found.iter().map(|(_, listed)| listed.modified).max();
        Ok(Signs::new(
            now,
            found.into_iter().map(|(worker, listed)| (worker, listed.modified)),
        ))
    }

    /// When this worker wrote its spending, by the store's clock: "now", right after it did.
    pub async fn spend_time(&self, worker: &str) -> Result<Option<DateTime<Utc>>> {
        let version = self.store().object_version(&self.keys().spend(worker)).await?;
        Ok(version.map(|version| version.modified))
    }

    /// How old the job was at `now`, both by the store's clock.
    pub fn age_at(&self, now: Option<DateTime<Utc>>) -> Duration {
        let age = now.map(|now| now - self.created_at());
        age.and_then(|age| age.to_std().ok()).unwrap_or_default()
    }

    /// Names of workers, each with its spending as it is listed; what else lies there is none of ours.
    async fn listed_spends(&self) -> Result<Vec<(String, Listed)>> {
        let found = self.store().list(&self.keys().spends()).await?;
        let of_worker = |object: Listed| {
            let worker = self.keys().worker_of_spend(&object.key)?.to_string();
            Some((worker, object))
        };
        Ok(found.into_iter().filter_map(of_worker).collect())
    }

    async fn read_spends(&self, workers: impl Iterator<Item = String>) -> Result<Vec<WorkerSpend>> {
        let read_one = |worker: String| async move {
            let key = self.keys().spend(&worker);
            let Some((bytes, version)) = self.store().get_versioned(&key, Spend::MAX_BYTES).await? else {
                return Ok(None);
            };
            let spend: Spend = decode(self.store(), &key, &bytes)?;
            Ok::<_, LedgerError>(Some(WorkerSpend {
                worker,
                device_seconds: spend.device_seconds,
                at: version.modified,
                ended: spend.ended,
            }))
        };
        let found: Vec<Option<WorkerSpend>> = futures::stream::iter(workers)
            .map(read_one)
            .buffer_unordered(READS_AT_ONCE)
            .try_collect()
            .await?;
        Ok(found.into_iter().flatten().collect())
    }
}
