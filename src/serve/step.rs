//! One step of a batch: checks the input, creates the job, stops it, or counts its results.

use super::check::check_input;
use super::driver::{BatchJob, BatchJobs, Moved, StartError};
use super::expiry::ABANDONED_SECONDS;
use super::id;
use super::record::{
    BatchError, BatchRecord, CheckedInput, EndStatus, EndedBatch, FileRecord, InvalidLines, Results, ResultsFile,
    ResultsKind, ResultsOf,
};
use super::records::{BatchKey, Created, Stages};
use super::results::{ResultReader, RowEnd, Served};
use super::service::{Service, expiry, now};
use super::split::InputSplit;
use crate::ledger::{Ledger, LedgerError, StopWhy};

/// Seconds that workers have to end a job that is over, before the service ends it itself.
const WORKER_SECONDS: i64 = 20;
/// Seconds after which such a job ends although its model is not on offer here: another process may
/// offer it.
const MODEL_SECONDS: i64 = 600;
/// Seconds after which a mark of an unfinished batch without a record is dropped: whoever creates
/// the batch writes the record at once, or has died.
const RECORD_SECONDS: i64 = 3_600;
/// The purpose of files of results.
const RESULTS_PURPOSE: &str = "batch_output";

/// Does the next step of a batch, if one is due.
pub(super) async fn move_batch(service: &Service, jobs: &dyn BatchJobs, key: &BatchKey) -> anyhow::Result<Moved> {
    let records = &service.records;
    let Some(batch) = records.batch(key).await? else {
        // The process that creates the batch is between its mark and its record, or has died there.
        if id::seconds_of(&key.id).is_some_and(|at| at + RECORD_SECONDS < now()) {
            records.close_batch(key).await?;
        }
        return Ok(Moved::Waits);
    };
    let stages = records.stages(key).await?;
    if let Some(ended) = &stages.ended {
        if stages.results.is_none() {
            stop_lost_job(service, key).await?;
            // No file leads to what the batch has stored. A worker may still be at it.
            records
                .note_due(&key.tenant, ended.at + ABANDONED_SECONDS, &key.id)
                .await?;
        }
        close(service, key, ended).await?;
        return Ok(Moved::Ended);
    }
    match records.ledger(key).await? {
        Some(ledger) => move_job(service, jobs, key, &batch, &stages, &ledger).await,
        None if stages.cancel.is_some() => end_without_results(service, key, EndStatus::Cancelled, Vec::new()).await,
        None => begin(service, jobs, key, &batch, stages.checked).await,
    }
}

/// Stops the job of a batch that has ended while another process created the job.
async fn stop_lost_job(service: &Service, key: &BatchKey) -> anyhow::Result<()> {
    if let Some(ledger) = service.records.ledger(key).await? {
        ledger.stop(StopWhy::Cancelled, false).await?;
    }
    Ok(())
}

/// Checks the input and starts the job.
async fn begin(
    service: &Service,
    jobs: &dyn BatchJobs,
    key: &BatchKey,
    batch: &BatchRecord,
    checked: Option<CheckedInput>,
) -> anyhow::Result<Moved> {
    let checked = match checked {
        Some(checked) => checked,
        None => match check(service, jobs, key, batch).await? {
            Ok(checked) => checked,
            Err(errors) => return fail(service, key, errors).await,
        },
    };
    let Some(model) = service.model(&checked.model) else {
        let message = format!("there is no model `{}`", checked.model);
        return fail(service, key, vec![refusal("model_not_found", message)]).await;
    };
    let left = batch.expires_at() - now();
    let Some(deadline_seconds) = u64::try_from(left).ok().filter(|&left| left > 0) else {
        return end_without_results(service, key, EndStatus::Expired, Vec::new()).await;
    };
    let job = BatchJob {
        name: batch.id.clone(),
        model: model.clone(),
        input: match checked.refused {
            Some(_) => service.records.good_lines(key),
            None => service.records.content(&key.tenant, &batch.input_file_id),
        },
        output: service.records.output(key),
        deadline_seconds,
        samples: checked.samples,
    };
    if batch.early_output {
        create_early_files(service, key).await?;
    }
    match jobs.start(&job).await {
        Ok(ledger) => {
            // Another process may have ended the batch meanwhile.
            let stages = service.records.stages(key).await?;
            if stages.ended.is_some() && stages.results.is_none() {
                ledger.stop(StopWhy::Cancelled, false).await?;
            }
            tracing::info!(batch = key.id, model = checked.model, "batch {} has begun", key.id);
            Ok(Moved::Changed)
        }
        Err(StartError::Refused(why)) => {
            // The reason may name paths and addresses, which are not for clients.
            tracing::error!(batch = key.id, "batch {} is refused: {why}", key.id);
            let message = "the service cannot run the batch with its settings; its log says why";
            fail(service, key, vec![refusal("server_error", message.into())]).await
        }
        Err(StartError::Later(error)) => Err(error),
        Err(StartError::NotReady) => Ok(Moved::Waits),
    }
}

async fn check(
    service: &Service,
    jobs: &dyn BatchJobs,
    key: &BatchKey,
    batch: &BatchRecord,
) -> anyhow::Result<Result<CheckedInput, Vec<BatchError>>> {
    let input = service.records.content(&key.tenant, &batch.input_file_id);
    let answer_tokens = |name: &str| service.model(name).map(|model| jobs.answer_tokens(model));
    let records = &service.records;
    let split = match batch.invalid_lines {
        InvalidLines::Fail => None,
        InvalidLines::Error => Some(InputSplit::new(
            &key.id,
            &records.good_lines(key),
            &records.refused_lines(key),
        )),
    };
    let found = match check_input(&input, &batch.endpoint, &answer_tokens, split).await {
        Ok(found) => found,
        Err(error) if matches!(error.downcast_ref(), Some(object_store::Error::NotFound { .. })) => Err(vec![refusal(
            "input_file_missing",
            format!("the content of file `{}` is gone", batch.input_file_id),
        )]),
        Err(error) => return Err(error),
    };
    let summary = match found {
        Ok(summary) => summary,
        Err(errors) => return Ok(Err(errors)),
    };
    let record = CheckedInput {
        at: now(),
        model: summary.model,
        requests: summary.requests,
        samples: summary.samples,
        tokens: summary.tokens,
        refused: summary.refused,
    };
    service.enter_queue(key, record).await.map_err(Into::into)
}

fn refusal(code: &str, message: String) -> BatchError {
    BatchError {
        code: code.into(),
        line: None,
        message,
        param: None,
    }
}

/// Ends a batch that is refused. The next look stops a job that another process has created.
async fn fail(service: &Service, key: &BatchKey, errors: Vec<BatchError>) -> anyhow::Result<Moved> {
    end_without_results(service, key, EndStatus::Failed, errors).await
}

/// Ends a batch that has no files of results.
async fn end_without_results(
    service: &Service,
    key: &BatchKey,
    status: EndStatus,
    errors: Vec<BatchError>,
) -> anyhow::Result<Moved> {
    delete_early_files(service, key).await?;
    end(service, key, status, errors).await?;
    Ok(Moved::Changed)
}

async fn end(
    service: &Service,
    key: &BatchKey,
    status: EndStatus,
    errors: Vec<BatchError>,
) -> Result<EndedBatch, LedgerError> {
    let record = EndedBatch {
        at: now(),
        status,
        errors,
    };
    match service.records.ended(key, record).await? {
        Created::Ours(ended) => {
            service.metrics.count_end(ended.status.name());
            tracing::info!(batch = key.id, "batch {} is {}", key.id, ended.status.name());
            Ok(ended)
        }
        Created::Theirs(ended) => Ok(ended),
    }
}

/// Takes a batch that has ended from the unfinished ones. Its webhooks are owed from before, so
/// that a crash in between forgets none.
async fn close(service: &Service, key: &BatchKey, ended: &EndedBatch) -> Result<(), LedgerError> {
    service.webhooks.owe(&service.records, key, ended.status).await?;
    service.records.close_batch(key).await
}

/// Looks at a job: passes a cancellation on, enqueues stalled shards, or counts the results.
async fn move_job(
    service: &Service,
    jobs: &dyn BatchJobs,
    key: &BatchKey,
    batch: &BatchRecord,
    stages: &Stages,
    ledger: &Ledger,
) -> anyhow::Result<Moved> {
    let Some(checked) = &stages.checked else {
        // Another process is ahead of what was read here.
        return Ok(Moved::Waits);
    };
    if ledger.finish_check(None).await?.is_none() {
        return move_unfinished(service, jobs, key, batch, stages, checked, ledger).await;
    }
    let results = match &stages.results {
        Some(results) => results.clone(),
        None => {
            let results = count_results(service, key, batch, checked, ledger).await?;
            service.records.results(key, results).await?
        }
    };
    if service.records.end_of(key).await?.is_some() {
        // Another process was faster, and a client may have deleted the files already.
        return Ok(Moved::Changed);
    }
    create_files(service, key, batch, &results).await?;
    let status = if results.cancelled > 0 {
        EndStatus::Cancelled
    } else if results.expired > 0 {
        EndStatus::Expired
    } else {
        EndStatus::Completed
    };
    let ended = end(service, key, status, Vec::new()).await?;
    close(service, key, &ended).await?;
    Ok(Moved::Ended)
}

/// Looks at a job with open rows: makes it close if it is over, and enqueues stalled shards.
async fn move_unfinished(
    service: &Service,
    jobs: &dyn BatchJobs,
    key: &BatchKey,
    batch: &BatchRecord,
    stages: &Stages,
    checked: &CheckedInput,
    ledger: &Ledger,
) -> anyhow::Result<Moved> {
    let window_end = batch.expires_at() + WORKER_SECONDS;
    let over_since = match &stages.cancel {
        Some(cancel) => {
            ledger.stop(StopWhy::Cancelled, true).await?;
            Some(cancel.at)
        }
        None => {
            let control = ledger.control().await?;
            // For example, its input has changed: no worker goes on with it.
            let is_stuck = control.stop_reason().is_some() && !control.is_closing();
            let is_over = now() >= window_end;
            if (is_over || is_stuck) && !control.is_closing() {
                ledger.stop(StopWhy::Deadline, true).await?;
            }
            is_over.then_some(window_end)
        }
    };
    let waited = over_since.map_or(0, |since| now() - since);
    match service.model(&checked.model) {
        Some(_) if waited < WORKER_SECONDS => jobs.reconcile(ledger).await?,
        Some(model) => jobs.close(model, ledger).await?,
        None if waited < MODEL_SECONDS => {
            tracing::warn!(
                batch = key.id,
                "batch {} is for model `{}`, which is not on offer",
                key.id,
                checked.model
            );
        }
        // Nobody here can read the rows that are left: the batch ends without files.
        None => {
            let is_cancelled = stages.cancel.is_some();
            let status = if is_cancelled {
                EndStatus::Cancelled
            } else {
                EndStatus::Expired
            };
            tracing::error!(
                batch = key.id,
                "batch {} ends without results: its model is not on offer any more",
                key.id
            );
            return end_without_results(service, key, status, Vec::new()).await;
        }
    }
    Ok(Moved::Waits)
}

async fn count_results(
    service: &Service,
    key: &BatchKey,
    batch: &BatchRecord,
    checked: &CheckedInput,
    ledger: &Ledger,
) -> Result<Results, LedgerError> {
    let mut results = Results {
        at: now(),
        generation: ledger.generation(),
        output: None,
        errors: None,
        completed: 0,
        failed: checked.refused.map_or(0, |refused| refused.lines),
        expired: 0,
        cancelled: 0,
        usage: Default::default(),
    };
    let (mut output_bytes, mut error_bytes) = (0, checked.refused.map_or(0, |refused| refused.bytes));
    let output = service.records.output(key);
    let served = Served {
        model: checked.model.clone(),
        endpoint: batch.endpoint.clone(),
    };
    let mut reader = ResultReader::new(ledger.clone(), output, served, false);
    while let Some(lines) = reader.next_lines().await? {
        for line in lines {
            let bytes = line.json.len() as u64 + 1;
            match line.end {
                RowEnd::Completed => results.completed += 1,
                RowEnd::Failed => results.failed += 1,
                RowEnd::Expired => results.expired += 1,
                RowEnd::Cancelled => results.cancelled += 1,
            }
            match line.end.kind() {
                ResultsKind::Output => output_bytes += bytes,
                ResultsKind::Errors => error_bytes += bytes,
            }
            results.usage.add(line.usage);
        }
    }
    let file = |bytes: u64, kind: ResultsKind| {
        let id = if batch.early_output {
            Ok(id::file_of_batch(&key.id, kind.name()))
        } else {
            id::new_id(id::FILE)
        };
        (bytes > 0).then(|| id.map(|id| ResultsFile { id, bytes })).transpose()
    };
    results.output = file(output_bytes, ResultsKind::Output)?;
    results.errors = file(error_bytes, ResultsKind::Errors)?;
    Ok(results)
}

/// Creates the records of files that grow while the batch runs.
async fn create_early_files(service: &Service, key: &BatchKey) -> Result<(), LedgerError> {
    for kind in ResultsKind::ALL {
        let record = results_record(key, kind, id::file_of_batch(&key.id, kind.name()), now());
        service.records.create_file(&key.tenant, record).await?;
    }
    Ok(())
}

async fn delete_early_files(service: &Service, key: &BatchKey) -> Result<(), LedgerError> {
    for kind in ResultsKind::ALL {
        let id = id::file_of_batch(&key.id, kind.name());
        service.records.delete_file_record(&key.tenant, &id).await?;
    }
    Ok(())
}

fn results_record(key: &BatchKey, kind: ResultsKind, id: String, created_at: i64) -> FileRecord {
    FileRecord {
        id,
        created_at,
        expires_at: None,
        bytes: 0,
        filename: format!("{}_{}.jsonl", key.id, kind.name()),
        purpose: RESULTS_PURPOSE.into(),
        results: Some(ResultsOf {
            batch: key.id.clone(),
            kind,
        }),
    }
}

/// Creates the records of the files of results. The batch names them only afterwards, unless it names
/// them early.
async fn create_files(
    service: &Service,
    key: &BatchKey,
    batch: &BatchRecord,
    results: &Results,
) -> Result<(), LedgerError> {
    for kind in ResultsKind::ALL {
        let Some(file) = results.file(kind) else {
            if batch.early_output {
                let id = id::file_of_batch(&key.id, kind.name());
                service.records.delete_file_record(&key.tenant, &id).await?;
            }
            continue;
        };
        let record = FileRecord {
            expires_at: expiry(results.at, batch.output_expires_after),
            bytes: file.bytes,
            ..results_record(key, kind, file.id.clone(), results.at)
        };
        if batch.early_output {
            service.records.replace_file(&key.tenant, &record).await?;
        }
        service.create_file(&key.tenant, record).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::keys::{Keys, Tenant};
    use super::super::metrics::ServeMetrics;
    use super::super::records::tests::{batch, root};
    use super::super::webhooks::Webhooks;
    use super::*;
    use crate::dataset::store::location::Location;

    struct NoJobs;

    #[async_trait::async_trait]
    impl BatchJobs for NoJobs {
        async fn start(&self, _: &BatchJob) -> Result<Ledger, StartError> {
            Err(StartError::NotReady)
        }

        fn answer_tokens(&self, _: &crate::serve::models::ServedModel) -> u32 {
            1
        }

        async fn reconcile(&self, _: &Ledger) -> anyhow::Result<()> {
            Ok(())
        }

        async fn close(&self, _: &crate::serve::models::ServedModel, _: &Ledger) -> anyhow::Result<()> {
            Ok(())
        }
    }

    async fn service() -> Service {
        Service::for_test(root()).await
    }

    fn new_key() -> BatchKey {
        BatchKey::new(&Tenant::new("default").unwrap(), id::new_id(id::BATCH).unwrap())
    }

    #[tokio::test]
    async fn a_batch_without_files_keeps_nothing_for_long() {
        let (service, key) = (service().await, new_key());
        service.records.create_batch(&key, batch(&key.id)).await.unwrap();
        let refused = service.records.refused_lines(&key);
        object_store::ObjectStoreExt::put(&refused.store, &refused.path, "x".into())
            .await
            .unwrap();
        // Its window ended in 1970, and its input was never there.
        while move_batch(&service, &NoJobs, &key).await.unwrap() != Moved::Ended {}
        assert!(service.records.open_batches().await.unwrap().is_empty());
        let sweep = async |seconds| {
            let time = chrono::Utc::now() + chrono::TimeDelta::seconds(seconds);
            super::super::expiry::sweep(&service, time).await.unwrap();
            refused.read().await.is_ok()
        };
        assert!(sweep(ABANDONED_SECONDS - 60).await, "a worker may still be at it");
        assert!(!sweep(ABANDONED_SECONDS).await);
        assert_eq!(
            service.records.end_of(&key).await.unwrap().unwrap().status,
            EndStatus::Failed
        );
    }

    #[tokio::test]
    async fn a_mark_whose_creator_died_is_dropped_after_an_hour() {
        let service = service().await;
        let new = new_key();
        let old = BatchKey::new(&new.tenant, "batch_vvvvvvvvv00000000000000000");
        for key in [&new, &old] {
            service.records.create_batch(key, batch(&key.id)).await.unwrap();
            let record = format!("tenants/default/batches/{}.json", key.id);
            service.records.store.delete(&record).await.unwrap();
            assert_eq!(move_batch(&service, &NoJobs, key).await.unwrap(), Moved::Waits);
        }
        assert_eq!(service.records.open_batches().await.unwrap(), [new]);
    }

    #[tokio::test]
    async fn webhooks_are_owed_before_a_batch_is_closed() {
        let folder = tempfile::tempdir().unwrap();
        let root = Location::parse(&folder.path().display().to_string(), Path::new("/")).unwrap();
        let webhooks = Webhooks::for_test("http://127.0.0.1:9/");
        let metrics = ServeMetrics::new(None).unwrap();
        let service = Service::open(root, Vec::new(), Keys::Open, webhooks, metrics);
        let service = service.await.unwrap();
        let key = BatchKey::new(&Tenant::new("default").unwrap(), id::new_id(id::BATCH).unwrap());
        service.records.create_batch(&key, batch(&key.id)).await.unwrap();
        let ended = end(&service, &key, EndStatus::Failed, Vec::new()).await.unwrap();
        // A file where marks of owed events would lie: they cannot be written.
        let blocked = folder.path().join("owed");
        std::fs::write(&blocked, "").unwrap();
        close(&service, &key, &ended).await.unwrap_err();
        assert_eq!(
            service.records.open_batches().await.unwrap(),
            std::slice::from_ref(&key)
        );
        std::fs::remove_file(&blocked).unwrap();
        close(&service, &key, &ended).await.unwrap();
        assert!(service.records.open_batches().await.unwrap().is_empty());
        assert_eq!(std::fs::read_dir(blocked.join("default")).unwrap().count(), 1);
    }
}
