//! The ledger in object storage: the single source of truth about a job.
//!
//! Every row of a job is published exactly once, under any number of kills, pauses and
//! redeliveries. The store must be strongly consistent and honour put-if-absent. The ledger uses
//! neither locks nor clocks nor a database for this:
//!
//! - `job.json` is created once and names the job that the output belongs to ([`job`]);
//! - each shard has a log of create-once records; a row counts in the first record that covers it
//!   ([`log`]);
//! - a record whose data object is lost is voided, and its rows are computed again ([`damage`]);
//! - a complete log becomes a part, then a commit ([`publish`]); when every shard has its commit,
//!   `_SUCCESS` is written ([`finish`]).
//!
//! The calls of a worker, in order: [`Ledger::open`] or [`Ledger::create_or_resume`] →
//! [`Ledger::shard`] → [`log::ShardLog::begin`] → [`log::ShardLog::append`] … →
//! [`log::ShardLog::publish`] → acknowledge the queue's message.

mod conditional_put;
pub mod entry;
pub mod error;
pub mod job;
pub mod keys;
pub mod order;
pub mod record;
pub mod rowset;
pub mod store;
mod store_error_kind;

pub mod attempts;
mod bulk;
pub mod clean;
pub mod control;
pub mod damage;
mod data;
pub mod failures;
pub mod finish;
mod folder;
pub mod generation;
mod lines;
mod listing;
pub mod log;
mod part;
pub mod progress;
pub mod publish;
pub mod published;
pub mod restore;
mod retried;
pub mod schema;
mod signed;
pub mod spend;
mod stage;
pub mod status;
mod told;
pub mod verify;

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use chrono::{DateTime, Utc};

pub use clean::RemovedObjects;
pub use error::{LedgerError, Result};
pub use job::{JobDraft, JobIdentity, JobLimits, JobRecord, Unfinished};
pub use keys::{Id, Keys};
pub use order::{Extension, JobCommand, LimitsFrom, PinOrder, Price, StopWhy};
pub use progress::Progress;
pub use record::{AttemptWorker, Commit, Generation, Success, Tally};
pub use rowset::RowSet;
use store::ObjectVersion;
pub use store::{Retry, Store};

/// The ledger of one job at one generation. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Ledger {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    store: Store,
    keys: Keys,
    job: Arc<JobRecord>,
    /// The retries up to this generation, the first retry first.
    generations: Vec<Arc<Generation>>,
    /// SHA-256 of `job.json` when the ledger was opened.
    job_sha256: String,
    job_is_signed: bool,
    job_version: ObjectVersion,
    /// By shard, the commits that this process wrote or found when it published. A commit stays
    /// here until its block is closed.
    commit_cache: Mutex<BTreeMap<u32, Commit>>,
    /// Whether this process has written the result of this generation and `take_result_written` has
    /// not been called since: see `told.rs`.
    is_result_written: AtomicBool,
}

impl Ledger {
    /// The job that the output belongs to.
    pub fn job(&self) -> &JobRecord {
        &self.inner.job
    }

    pub fn store(&self) -> &Store {
        &self.inner.store
    }

    pub fn keys(&self) -> &Keys {
        &self.inner.keys
    }

    /// When the job was created, by the store's clock. Deadlines count from this time.
    pub fn created_at(&self) -> DateTime<Utc> {
        self.inner.job_version.modified
    }
}
