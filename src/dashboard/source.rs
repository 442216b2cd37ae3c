//! Where jobs come from: the seam between the API and the outputs of a command line, or the batches
//! of a service.

use async_trait::async_trait;

use super::error::ApiError;
use super::view::Frame;
use crate::ledger::{Ledger, LedgerError};

/// Who looks: of a service, the tenant's name. Requests carry it as an extension.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Viewer(pub String);

/// Ids of a page of a list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JobIds {
    pub ids: Vec<String>,
    pub has_more: bool,
}

/// A change that a viewer asks for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Command {
    Cancel,
    /// Raises one limit or both.
    Extend {
        usd: Option<f64>,
        deadline_seconds: Option<u64>,
    },
    Retry,
}

/// A source of jobs. Nothing of a viewer's jobs is shown to another one.
#[async_trait]
pub trait JobSource: Send + Sync {
    /// Whether a text has the form of an id. No other text reaches the source.
    fn is_id(&self, text: &str) -> bool;

    /// Up to `limit` of the viewer's jobs, newest first, after the job `after`.
    async fn list(&self, viewer: &Viewer, after: Option<&str>, limit: usize) -> Result<JobIds, LedgerError>;

    /// A job; `None`: the viewer has none with this id.
    async fn frame(&self, viewer: &Viewer, id: &str) -> Result<Option<Frame>, LedgerError>;

    /// The ledger of a job that exists; `None`: it has none yet, or no longer. The caller keeps it.
    async fn ledger(&self, viewer: &Viewer, id: &str) -> Result<Option<Ledger>, LedgerError>;

    /// Whether the inputs that a job's record names may be read: somebody else may have written the
    /// record.
    fn may_read_inputs(&self, viewer: &Viewer, ledger: &Ledger) -> bool;

    /// Does what a viewer asks for.
    async fn command(&self, viewer: &Viewer, id: &str, command: Command) -> Result<(), ApiError>;
}
