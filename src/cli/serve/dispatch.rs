//! Hands the shards of batches to workers: through a broker, or in this process.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use crate::cli::args::ServeArgs;
use crate::cli::enqueue::Enqueuer;
use crate::cli::exit::Failure;
use crate::cli::on_finish::FinishNotifier;
use crate::cli::reconcile::{ReconciledJob, ScanContext};
use crate::ledger::Ledger;
use crate::queue::LocalQueue;
use crate::worker;
use crate::worker::access::Access;

/// Time after which a job that is not looked at any more is forgotten.
const FORGET_AFTER: Duration = Duration::from_secs(86_400);

/// Who gets the shards.
pub(super) enum Dispatch {
    Broker(Box<BrokerQueue>),
    Embedded(EmbeddedQueue),
}

/// A broker, whose workers are elsewhere.
pub(super) struct BrokerQueue {
    enqueuer: Enqueuer,
    notifier: FinishNotifier,
    scan_every: Duration,
    /// The jobs that are reconciled, by output, with the time of their next scan.
    scans: Mutex<HashMap<String, (Instant, ReconciledJob)>>,
}

impl BrokerQueue {
    pub(super) fn new(enqueuer: Enqueuer, args: &ServeArgs) -> Result<BrokerQueue, Failure> {
        Ok(BrokerQueue {
            enqueuer,
            notifier: FinishNotifier::new(Access::default())?,
            scan_every: Duration::from_secs_f64(args.reconcile_every),
            scans: Mutex::default(),
        })
    }

    pub(super) async fn enqueue(&self, ledger: &Ledger) -> Result<(), Failure> {
        let shards = ledger.unfinished_shards().await?;
        self.enqueuer.send(ledger, &shards).await.map(drop)
    }

    /// Compares the progress of a job with that of the scan before, if its scan is due.
    pub(super) async fn reconcile(&self, ledger: &Ledger) -> Result<(), Failure> {
        let output = ledger.store().url().to_string();
        let mut scans = self.scans.lock().await;
        let now = Instant::now();
        // Jobs that were not looked at for so long have ended.
        scans.retain(|_, (due, _)| *due + FORGET_AFTER > now);
        if scans.get(&output).is_some_and(|(due, _)| *due > now) {
            return Ok(());
        }
        let scanned_before = scans.remove(&output).map(|(_, job)| job);
        // A scan takes long, and other jobs need not wait for it.
        drop(scans);
        let mut job = scanned_before.unwrap_or_else(|| ReconciledJob::new(output.clone()));
        let context = ScanContext {
            enqueuer: &self.enqueuer,
            notifier: &self.notifier,
        };
        let scanned = job.scan(context, false).await;
        self.scans.lock().await.insert(output, (now + self.scan_every, job));
        scanned.map(drop)
    }
}

/// The queue of the worker in this process. It is lost with the process.
pub(super) struct EmbeddedQueue {
    queue: LocalQueue,
}

impl EmbeddedQueue {
    pub(super) fn new(queue: LocalQueue) -> EmbeddedQueue {
        EmbeddedQueue { queue }
    }

    pub(super) async fn enqueue(&self, ledger: &Ledger) -> Result<(), Failure> {
        let shards = ledger.unfinished_shards().await?;
        self.queue.send(worker::messages(ledger, &shards));
        Ok(())
    }

    /// Enqueues the shards of a job of which the queue has none: this process does not know it yet,
    /// or the worker has set its shards aside.
    pub(super) async fn reconcile(&self, ledger: &Ledger) -> Result<(), Failure> {
        if self.queue.has_any_of(ledger.store().url().as_str()) {
            return Ok(());
        }
        self.enqueue(ledger).await
    }
}
