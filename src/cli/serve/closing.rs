//! Publishes the unfinished rows of a job that was told to close, if no worker does: a batch must end
//! after its cancellation or its window, whether workers run or not. Workers that do run may be busy
//! with other jobs for hours before they get these shards.

use std::sync::Arc;
use std::time::Duration;

use crate::engine::request::{FinishedSample, Request, RequestError};
use crate::engine::{EngineError, Generator};
use crate::ledger::Ledger;
use crate::queue::LocalQueue;
use crate::report::meter::Meter;
use crate::worker::jobs::Jobs;
use crate::worker::metrics::Metrics;
use crate::worker::model::Model;
use crate::worker::retry_policy::RetryPolicy;
use crate::worker::step_watchdog::StepWatchdog;
use crate::worker::stop::{Stop, StopCause};
use crate::worker::watched::WatchedJobs;
use crate::worker::{self, Until, Worker, WorkerConfig, WorkerOptions};

/// Maximum time for one try. The rest follows with the next one.
const CLOSE_MAX: Duration = Duration::from_secs(120);
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// A worker without a device, for a job that closes: its rows end without running.
pub(super) async fn close(model: Model, ledger: &Ledger) -> anyhow::Result<()> {
    let shards = ledger.unfinished_shards().await?;
    let worker = Arc::new(Worker::new(WorkerConfig {
        name: format!("serve-{}", crate::ledger::Id::random()?),
        queue: Arc::new(LocalQueue::new(worker::messages(ledger, &shards))),
        embedded_queue: None,
        jobs: Jobs::new(model),
        watched: WatchedJobs::default(),
        meter: Arc::new(Meter::default()),
        metrics: Arc::new(Metrics::new()?),
        retry_policy: RetryPolicy::new(false),
        watchdog: Arc::new(StepWatchdog::new(CLOSE_MAX)),
        render_threads: rayon::ThreadPoolBuilder::new().num_threads(1).build()?,
        options: WorkerOptions {
            log_interval: LOG_INTERVAL,
            shards_in_flight: 1,
            until: Until::Idle,
            idle_after: Duration::ZERO,
            max_shards: None,
        },
    }));
    let stop = Stop::default();
    let timeout = tokio::spawn({
        let stop = stop.clone();
        async move {
            tokio::time::sleep(CLOSE_MAX).await;
            stop.set(StopCause::Interrupted);
        }
    });
    let ended = worker::run(worker, Box::new(NoDevice::default()), stop).await;
    timeout.abort();
    ended.map(drop)
}

/// A generator that answers nothing. If somebody extends the job meanwhile, its first row ends this
/// worker, and the rows wait for workers with a device.
#[derive(Default)]
struct NoDevice {
    has_request: bool,
}

impl Generator for NoDevice {
    fn wants_more(&self) -> bool {
        !self.has_request
    }

    fn is_idle(&self) -> bool {
        !self.has_request
    }

    fn submit(&mut self, _: Request) -> Result<(), RequestError> {
        // A refusal would be the row's answer.
        self.has_request = true;
        Ok(())
    }

    fn step(&mut self) -> Result<Vec<FinishedSample>, EngineError> {
        if self.has_request {
            Err(EngineError::Stopped)
        } else {
            Ok(Vec::new())
        }
    }

    fn step_tokens(&self) -> &[(u32, u64)] {
        &[]
    }

    fn cancel(&mut self, _: u32, _: &dyn Fn(u64) -> bool) {}
}
