//! Spendings of workers: cumulative device seconds, one object per worker, which only that worker
//! rewrites.
//!
//! A worker that must keep a budget lists the spendings at each check. It reads a spending only if
//! its new value could matter: the listing gives the time of each write, and a worker spends at
//! most one device second per second.
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
use super::store::ListedObject;

/// Time within which a new worker writes its first spending, even if it is 0.
const FIRST_WRITE_WITHIN: TimeDelta = TimeDelta::seconds(2);

/// Cost in dollars of `seconds` of device time. `None`: the job has no price.
pub fn dollars(seconds: f64, usd_per_hour: Option<f64>) -> Option<f64> {
    usd_per_hour.map(|price| seconds / 3600.0 * price)
}

/// The spendings of all workers of a job.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Spendings {
    pub by_worker: Vec<WorkerSpend>,
}

/// The spending of one worker.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerSpend {
    pub worker: String,
    /// Cumulative.
    pub device_seconds: f64,
    /// When it was written, by the store's clock.
    pub written_at: DateTime<Utc>,
    /// Whether the worker has left, so that it spends no more.
    pub ended: bool,
}

impl Spendings {
    /// Device seconds of all workers.
    pub fn device_seconds(&self) -> f64 {
        // Starts at 0.0, because `Iterator::sum` of no values is -0.0.
        self.by_worker.iter().fold(0.0, |sum, spend| sum + spend.device_seconds)
    }
}

/// The spendings of all other workers, as far as one worker needs them for its budget.
#[derive(Debug, Clone, Default)]
pub struct OtherSpendings {
    by_worker: BTreeMap<String, KnownSpend>,
    /// The newest time that the store has stamped on a spending, as of the last listing.
    now: Option<DateTime<Utc>>,
}

/// The spending of one worker: the value read last, and the entry of the last listing.
#[derive(Debug, Clone)]
struct KnownSpend {
    device_seconds: f64,
    /// The time for which `device_seconds` holds, by the store's clock.
    as_of: DateTime<Utc>,
    ended: bool,
    /// The listed entry of the value read last. `None`: nothing was read yet.
    read: Option<ListedObject>,
    listed: ListedObject,
}

impl KnownSpend {
    fn is_changed(&self) -> bool {
        self.read.as_ref() != Some(&self.listed)
    }
}

impl OtherSpendings {
    /// Updates from a listing of all spendings, leaving out that of the worker `own`. The job was
    /// created at `created`.
    fn update(&mut self, own: &str, created: DateTime<Utc>, found: Vec<(String, ListedObject)>) {
        let previous_now = self.now;
        self.now = found.iter().map(|(_, listed)| listed.modified).max();
        for (worker, listed) in found.into_iter().filter(|(worker, _)| worker != own) {
            let known = self.by_worker.entry(worker).or_insert_with(|| KnownSpend {
                device_seconds: 0.0,
                // The worker was absent from the previous listing, so it had spent almost nothing
                // by then.
                as_of: previous_now.map_or(created, |time| time - FIRST_WRITE_WITHIN),
                ended: false,
                read: None,
                listed: listed.clone(),
            });
            known.listed = listed;
        }
    }

    /// Device seconds of all other workers, as read last.
    pub fn known_seconds(&self) -> f64 {
        self.by_worker
            .values()
            .fold(0.0, |sum, known| sum + known.device_seconds)
    }

    /// Upper bound of the device seconds of all other workers now, `since_listing` after the last
    /// listing: a worker spends at most one device second per second. Workers that are not
    /// [live](OtherSpendings::live_workers) have spent nothing since their last write.
    pub fn max_device_seconds(&self, window: Duration, since_listing: Duration) -> f64 {
        let unread_seconds = |known: &KnownSpend| match (self.now, self.is_live(known, window), known.is_changed()) {
            (Some(now), true, _) => seconds(now - known.as_of) + since_listing.as_secs_f64(),
            (_, _, true) => seconds(known.listed.modified - known.as_of),
            (_, _, false) => 0.0,
        };
        self.by_worker
            .values()
            .fold(self.known_seconds(), |sum, known| sum + unread_seconds(known))
    }

    /// Whether every spending that the last listing shows has been read since its last change.
    pub fn is_exact(&self) -> bool {
        !self.by_worker.values().any(KnownSpend::is_changed)
    }

    /// Number of live workers: other workers that wrote within `window` before the newest spending
    /// and have not left.
    pub fn live_workers(&self, window: Duration) -> u32 {
        let live = self.by_worker.values().filter(|known| self.is_live(known, window));
        live.count() as u32
    }

    fn is_live(&self, known: &KnownSpend, window: Duration) -> bool {
        let window = TimeDelta::from_std(window).unwrap_or(TimeDelta::MAX);
        let wrote_lately = self.now.is_some_and(|now| now - known.listed.modified <= window);
        wrote_lately && (!known.ended || known.is_changed())
    }

    /// The newest time that the store has stamped on a spending, including this worker's own.
    pub fn store_now(&self) -> Option<DateTime<Utc>> {
        self.now
    }
}

/// When each worker wrote its spending last, by the store's clock.
#[derive(Debug, Clone, Default)]
pub struct Heartbeats {
    /// The newest write time. Right after a spending was written, this is the current time.
    pub now: Option<DateTime<Utc>>,
    by_worker: BTreeMap<String, DateTime<Utc>>,
}

impl Heartbeats {
    pub fn new(now: Option<DateTime<Utc>>, writes: impl IntoIterator<Item = (String, DateTime<Utc>)>) -> Heartbeats {
        Heartbeats {
            now,
            by_worker: writes.into_iter().collect(),
        }
    }

    pub fn last_write(&self, worker: &str) -> Option<DateTime<Utc>> {
        self.by_worker.get(worker).copied()
    }
}

fn seconds(time: TimeDelta) -> f64 {
    time.to_std().unwrap_or_default().as_secs_f64()
}

impl Ledger {
    /// Writes this worker's spending on the job: cumulative device seconds over all its shards.
    /// `ended`: the worker leaves and spends no more.
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

    /// The spendings of all workers on this job: one listing, and one read per worker.
    pub async fn spendings(&self) -> Result<Spendings> {
        let listed = self.listed_spends().await?;
        let read = self.read_spends(listed.into_iter().map(|(worker, _)| worker));
        let mut by_worker: Vec<WorkerSpend> = read.await?;
        by_worker.sort_by(|a, b| a.worker.cmp(&b.worker));
        Ok(Spendings { by_worker })
    }

    /// Lists the spendings of all workers except `own`, to find those that have changed. One
    /// listing.
    pub async fn list_spends(&self, own: &str, others: &mut OtherSpendings) -> Result<()> {
        let found = self.listed_spends().await?;
        others.update(own, self.created_at(), found);
        Ok(())
    }

    /// Reads the spendings that have changed, concurrently.
    pub async fn read_changed_spends(&self, others: &mut OtherSpendings) -> Result<()> {
        let changed = others.by_worker.iter().filter(|(_, known)| known.is_changed());
        let changed: Vec<String> = changed.map(|(worker, _)| worker.clone()).collect();
        for spend in self.read_spends(changed.into_iter()).await? {
            if let Some(known) = others.by_worker.get_mut(&spend.worker) {
                // If the spending was written again since the listing, its value is higher, and the
                // next listing shows the change.
                known.device_seconds = spend.device_seconds;
                known.as_of = known.listed.modified;
                known.ended = spend.ended;
                known.read = Some(known.listed.clone());
            }
        }
        Ok(())
    }

    /// The write times of all spendings, which show whether their workers are alive. One listing.
    pub async fn heartbeats(&self) -> Result<Heartbeats> {
        let found = self.listed_spends().await?;
        let now = found.iter().map(|(_, listed)| listed.modified).max();
        Ok(Heartbeats::new(
            now,
            found.into_iter().map(|(worker, listed)| (worker, listed.modified)),
        ))
    }

    /// When this worker wrote its spending, by the store's clock. Right after a write, this is the
    /// current time.
    pub async fn spend_time(&self, worker: &str) -> Result<Option<DateTime<Utc>>> {
        let version = self.store().object_version(&self.keys().spend(worker)).await?;
        Ok(version.map(|version| version.modified))
    }

    /// The age of the job at `now`, a time by the store's clock.
    pub fn age_at(&self, now: Option<DateTime<Utc>>) -> Duration {
        let age = now.map(|now| now - self.created_at());
        age.and_then(|age| age.to_std().ok()).unwrap_or_default()
    }

    /// Names of workers, each with the listing's entry of its spending. Skips other objects.
    async fn listed_spends(&self) -> Result<Vec<(String, ListedObject)>> {
        let found = self.store().list(&self.keys().spends_prefix()).await?;
        let of_worker = |object: ListedObject| {
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
                written_at: version.modified,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_hour_costs_the_hourly_price() {
        assert_eq!(dollars(3600.0, Some(2.6)), Some(2.6));
        assert_eq!(dollars(3600.0, None), None);
    }
}
