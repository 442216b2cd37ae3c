//! The jobs of batches: creates them, has their shards enqueued, and ends them.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use anyhow::{Context, anyhow};
use async_trait::async_trait;
use tokio::runtime::Handle;
use tokio::task::spawn_blocking;

use crate::cli::device_choice::ResolvedDevice;
use crate::cli::exit::{Exit, Failure, one_line};
use crate::cli::prepare::PreparedJob;
use crate::cli::serve::closing;
use crate::cli::serve::dispatch::Dispatch;
use crate::cli::serve::models::{OpenModel, job_of};
use crate::dataset::DatasetError;
use crate::ledger::Ledger;
use crate::serve::driver::{BatchJob, BatchJobs, StartError};
use crate::serve::models::ServedModel;

/// What jobs need besides the models' files, and what takes time at the start.
pub(super) struct Prepared {
    pub dispatch: Dispatch,
    /// The hash of each checkpoint, by the model's name.
    pub hashes: HashMap<String, String>,
}

/// Creates the jobs of batches, and hands their shards to workers.
pub(super) struct ServedJobs {
    models: Arc<HashMap<String, OpenModel>>,
    device: ResolvedDevice,
    /// Empty until the service is ready. Batches wait for it.
    prepared: OnceLock<Prepared>,
}

impl ServedJobs {
    pub(super) fn new(models: Arc<HashMap<String, OpenModel>>, device: ResolvedDevice) -> ServedJobs {
        ServedJobs {
            models,
            device,
            prepared: OnceLock::new(),
        }
    }

    /// Lets batches begin.
    pub(super) fn begin(&self, prepared: Prepared) {
        // Called once, at the end of the preparation.
        let _ = self.prepared.set(prepared);
    }
}

#[async_trait]
impl BatchJobs for ServedJobs {
    async fn start(&self, batch: &BatchJob) -> Result<Ledger, StartError> {
        let prepared = self.prepared.get().ok_or(StartError::NotReady)?;
        let hash = prepared.hashes.get(&batch.model.name).cloned();
        let (models, batch, device) = (self.models.clone(), batch.clone(), self.device);
        let runtime = Handle::current();
        // Planning tokenizes and reads files, which would hold up other requests.
        let created = spawn_blocking(move || runtime.block_on(create(&models, hash, &batch, device)));
        let created = created.await.map_err(|error| StartError::Later(error.into()))?;
        // The command line's exit code for a store that is away is that of a bad job.
        let is_away = |error: &anyhow::Error| {
            let mut causes = error.chain();
            causes.any(|cause| matches!(cause.downcast_ref(), Some(DatasetError::Store { .. })))
        };
        let ledger = created.map_err(|failure| match failure.exit {
            Exit::BadJob if !is_away(&failure.error) => StartError::Refused(one_line(&failure.error)),
            _ => StartError::Later(failure.error),
        })?;
        let enqueued = match &prepared.dispatch {
            Dispatch::Broker(broker) => broker.enqueue(&ledger).await,
            Dispatch::Embedded(queue) => queue.enqueue(&ledger).await,
        };
        enqueued.map_err(|failure| StartError::Later(failure.error))?;
        Ok(ledger)
    }

    fn answer_tokens(&self, model: &ServedModel) -> u32 {
        // All models on offer are open.
        self.models.get(&model.name).map_or(0, |model| model.answer_tokens)
    }

    async fn reconcile(&self, ledger: &Ledger) -> anyhow::Result<()> {
        let Some(prepared) = self.prepared.get() else {
            return Ok(());
        };
        let reconciled = match &prepared.dispatch {
            Dispatch::Broker(broker) => broker.reconcile(ledger).await,
            Dispatch::Embedded(queue) => queue.reconcile(ledger).await,
        };
        reconciled.map_err(|failure| failure.error)
    }

    async fn close(&self, model: &ServedModel, ledger: &Ledger) -> anyhow::Result<()> {
        let Some(prepared) = self.prepared.get() else {
            return Ok(());
        };
        let opened = self.models.get(&model.name);
        let hash = prepared.hashes.get(&model.name);
        let (opened, hash) = opened.zip(hash).context("the model is not open")?;
        closing::close(opened.for_worker(hash.clone()), ledger).await
    }
}

/// Creates the job of a batch, or finds the one that another process has created.
async fn create(
    models: &HashMap<String, OpenModel>,
    hash: Option<String>,
    batch: &BatchJob,
    device: ResolvedDevice,
) -> Result<Ledger, Failure> {
    let name = &batch.model.name;
    let (model, hash) = models
        .get(name)
        .zip(hash)
        .ok_or_else(|| Failure::bad_job(anyhow!("there is no model `{name}`")))?;
    let mut prepared = PreparedJob::of_request(job_of(batch)?, model.files.clone(), device)?;
    prepared.resolve_settings(None)?;
    let identity = prepared.identity_with(hash)?;
    let mut plan = prepared.plan().await?;
    prepared.hash_inputs(&mut plan).await?;
    let draft = prepared.draft(plan, identity)?;
    let (ledger, _) = Ledger::create_or_resume(&prepared.output, draft).await?;
    Ok(ledger)
}
