//! OPEN FIRST: shards from receipt to acknowledgement, all stages of it in one place.
//!
//! ```text
//!            ┌───────────── opened shard: its log, carried columns, delivery ────────────┐
//!            │                                                                           ▼
//! queue ─▶ intake ──(1 shard)──▶ device thread ──(FINISHED_ROWS rows)──▶ keeper ─▶ log ▸ part ▸ commit
//!          read, render,         submit ▸ step ▸ assemble                        ▸ finish check ▸ acknowledge
//!          tokenize
//! ```
//!
//! Each arrow is a bounded channel of owned values. A row's result names the row it covers, and the ledger takes nothing
//! else. The stages live in one `JoinSet`; an error of any of them comes back through it and ends the others. Stopping
//! means: intake ends, the device drops what is unfinished, the keeper logs what is finished and gives the rest back.

pub mod assemble;
mod device;
mod intake;
mod keeper;
mod limits;
pub mod preflight;
pub mod stop;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::dataset::output::OutputSchema;
use crate::dataset::part::OpenaiMeta;
use crate::dataset::row::RowResult;
use crate::dataset::shard::ShardReader;
use crate::engine::Engine;
use crate::engine::params::Params;
use crate::job::Renderer;
use crate::ledger::Ledger;
use crate::queue::Queue;
use crate::report::meter::Meter;
pub use crate::worker::limits::Limits;
use crate::worker::stop::{Stop, Why};

/// Shards read and tokenized ahead of the device: one, so that the next is ready when this one's tail runs.
const READY_SHARDS: usize = 1;
/// Finished rows on their way to the log: enough that a slow store does not hold up the device for seconds.
const FINISHED_ROWS: usize = 16_384;

/// What a worker needs, built at the door.
pub struct Worker {
    /// Tells this process from others in attempts and spendings.
    pub name: String,
    pub ledger: Ledger,
    pub queue: Arc<dyn Queue>,
    pub reader: ShardReader,
    pub renderer: Arc<Renderer>,
    pub output: OutputSchema,
    pub format: PartFormat,
    pub meter: Arc<Meter>,
    /// Rendering and tokenizing have threads of their own: the device's sampling must not wait for them.
    pub render_threads: rayon::ThreadPool,
    pub options: Options,
}

/// How a shard's rows become a published part.
#[derive(Debug, Clone)]
pub enum PartFormat {
    Parquet,
    /// OpenAI batch result lines.
    Openai(OpenaiMeta),
}

/// When to write, and when to stop.
#[derive(Debug, Clone)]
pub struct Options {
    /// Time between writes of finished rows to the log: the most work that a kill can cost.
    pub log_interval: Duration,
    pub limits: Limits,
    /// Shards (or narrowed tries) between intake and acknowledgement, at least 1: one running, one whose tail runs, one
    /// ready, one being published, and more where shards are small.
    pub shards_in_flight: u32,
}

/// A shard whose prompts are ready for the device.
struct ReadyShard {
    rows: Vec<ReadyRow>,
}

/// A row that can go to the device as it is.
struct ReadyRow {
    row: u64,
    prompt: Arc<[u32]>,
    params: Arc<Params>,
}

/// What the keeper hears of.
enum Kept {
    /// Always before any row of that shard.
    Opened(Box<keeper::OpenShard>),
    Row(RowResult),
    /// The device's last word, unless it failed.
    DeviceLeft,
}

/// Longest time that a stop may take; what is not written by then is computed again.
const DRAIN_MAX: Duration = Duration::from_secs(25);

/// Works until the queue is empty or `stop` is set. `Ok(None)`: the queue was emptied.
pub async fn run(worker: Arc<Worker>, engine: Engine, stop: Stop) -> anyhow::Result<Option<Why>> {
    let (ready_tx, ready_rx) = mpsc::channel::<ReadyShard>(READY_SHARDS);
    let (kept_tx, kept_rx) = mpsc::channel::<Kept>(FINISHED_ROWS);

    let mut stages: JoinSet<anyhow::Result<()>> = JoinSet::new();
    stages.spawn(intake::run(worker.clone(), ready_tx, kept_tx.clone(), stop.clone()));
    stages.spawn(device::run(worker.clone(), engine, ready_rx, kept_tx, stop.clone()));
    stages.spawn(keeper::run(worker.clone(), kept_rx, stop.clone()));

    let mut first_error = None;
    let drained = async {
        stop.wait().await;
        tokio::time::sleep(DRAIN_MAX).await;
    };
    tokio::pin!(drained);
    loop {
        let joined = tokio::select! {
            joined = stages.join_next() => joined,
            () = &mut drained => {
                tracing::warn!("stopping took more than {} s: what is not written yet is left", DRAIN_MAX.as_secs());
                stages.abort_all();
                return first_error.map_or(Ok(stop.why()), Err);
            }
        };
        let Some(joined) = joined else { break };
        let result = joined.unwrap_or_else(|e| Err(anyhow::anyhow!("a stage of the worker panicked: {e}")));
        if let Err(error) = result {
            // The others end by themselves: they see the stop, or their channel closes. Only the first error is the cause.
            stop.set(Why::Failed);
            first_error.get_or_insert(error);
        }
    }
    match first_error {
        Some(error) => Err(error),
        None => Ok(stop.why()),
    }
}
