//! Removes what nobody can reach any more: expired files, uploads that were never completed, old
//! notes on repeated requests.
//!
//! Nothing is searched: each object that ends some day has a mark named by that time, so a sweep
//! lists marks and reads what is due. Several processes may sweep at once.

use chrono::{DateTime, TimeDelta, Utc};

use super::id;
use super::keys::Tenant;
use super::record::FileRecord;
use super::records::{BatchKey, DueMark};
use super::service::{Service, now};
use crate::error_line::one_line;
use crate::ledger::LedgerError;

/// Seconds after which an upload that has no record is given up. No request takes this long.
pub(super) const ABANDONED_SECONDS: i64 = 2 * 86_400;
/// How long a repeated request with an `Idempotency-Key` is recognized.
const CREATION_AGE_MAX: TimeDelta = TimeDelta::days(1);
/// Number of marks that are listed at once.
const MARKS_PAGE: usize = 1_000;

type Result<T, E = LedgerError> = std::result::Result<T, E>;

/// Removes what is due at `now`. What cannot be read is logged, and stays.
pub(super) async fn sweep(service: &Service, now: DateTime<Utc>) -> Result<()> {
    for tenant in service.keys.tenants() {
        let mut last: Option<DueMark> = None;
        loop {
            let marks = service.records.due(&tenant, now.timestamp(), last.as_ref(), MARKS_PAGE);
            let marks = marks.await?;
            let is_last_page = marks.len() < MARKS_PAGE;
            for mark in &marks {
                sweep_mark(service, &tenant, mark, now.timestamp()).await?;
            }
            last = marks.into_iter().next_back();
            if is_last_page {
                break;
            }
        }
        service
            .records
            .delete_creations(&tenant, now - CREATION_AGE_MAX)
            .await?;
    }
    Ok(())
}

async fn sweep_mark(service: &Service, tenant: &Tenant, mark: &DueMark, now: i64) -> Result<()> {
    match sweep_one(service, tenant, mark, now).await {
        Ok(true) => service.records.forget_due(mark).await?,
        Ok(false) => {}
        Err(error @ LedgerError::Retryable { .. }) => return Err(error),
        Err(error) => tracing::error!("`{}` cannot be removed: {}", mark.id, one_line(&error.into())),
    }
    Ok(())
}

/// Returns whether the mark is done with.
async fn sweep_one(service: &Service, tenant: &Tenant, mark: &DueMark, now: i64) -> Result<bool> {
    if id::is_id(id::UPLOAD, &mark.id) {
        service.records.delete_upload(tenant, &mark.id).await?;
        return Ok(true);
    }
    if id::is_id(id::BATCH, &mark.id) {
        remove_job(service, &BatchKey::new(tenant, mark.id.as_str())).await?;
        return Ok(true);
    }
    match service.records.file(tenant, &mark.id).await? {
        // The request broke off, or the file was deleted.
        None => service.records.delete_content(tenant, &mark.id).await?,
        Some(file) if file.has_expired(now) => {
            if reader_of(service, tenant, &mark.id).await?.is_some() {
                return Ok(false);
            }
            remove_file(service, tenant, &file).await?;
        }
        // The mark of a request that has ended well.
        Some(_) => {}
    }
    Ok(true)
}

/// Removes a file. When both files of results of a batch are gone, its job goes, too.
pub(super) async fn remove_file(service: &Service, tenant: &Tenant, file: &FileRecord) -> Result<()> {
    // Without its record, only this mark knows of what the process leaves if it dies here.
    let left = file.results.as_ref().map_or(&file.id, |results| &results.batch);
    let mark = service.records.note_due(tenant, now(), left).await?;
    // The record first, so that no client sees a file without content.
    service.records.delete_file_record(tenant, &file.id).await?;
    match &file.results {
        None => service.records.delete_content(tenant, &file.id).await?,
        Some(results) => remove_job(service, &BatchKey::new(tenant, results.batch.as_str())).await?,
    }
    service.records.forget_due(&mark).await
}

/// Removes the job of a batch that has ended, unless it has a file of results left.
async fn remove_job(service: &Service, key: &BatchKey) -> Result<()> {
    let stages = service.records.stages(key).await?;
    if stages.ended.is_none() {
        return Ok(());
    }
    let files = stages.results.map(|counted| [counted.output, counted.errors]);
    for file in files.into_iter().flatten().flatten() {
        if service.records.file(&key.tenant, &file.id).await?.is_some() {
            return Ok(());
        }
    }
    service.records.delete_work(key).await
}

/// The unfinished batch that reads this file, if any.
pub(super) async fn reader_of(service: &Service, tenant: &Tenant, id: &str) -> Result<Option<BatchKey>> {
    for key in service.records.open_batches_of(tenant).await? {
        if let Some(batch) = service.records.batch(&key).await?
            && batch.input_file_id == id
        {
            return Ok(Some(key));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use object_store::ObjectStoreExt;
    use object_store::memory::InMemory;
    use object_store::path::Path;
    use url::Url;

    use super::super::record::{
        BatchRecord, Creation, EndStatus, EndedBatch, InvalidLines, Results, ResultsFile, ResultsKind, ResultsOf,
        UploadRecord, Usage,
    };
    use super::*;
    use crate::dataset::store::location::Location;

    /// A service over a store in memory, whose tenant is `default`.
    async fn service() -> (Service, Location, Tenant) {
        let root = Location {
            store: Arc::new(InMemory::new()),
            path: Path::from("root"),
            url: Url::parse("memory:///root").unwrap(),
        };
        let service = Service::for_test(root.clone()).await;
        (service, root, Tenant::new("default").unwrap())
    }

    async fn put(place: &Location) {
        place.store.put(&place.path, "x".into()).await.unwrap();
    }

    async fn exists(place: &Location) -> bool {
        place.store.head(&place.path).await.is_ok()
    }

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(seconds, 0).unwrap()
    }

    fn file(id: &str, expires_at: Option<i64>, results: Option<ResultsOf>) -> FileRecord {
        FileRecord {
            id: id.into(),
            created_at: 1,
            expires_at,
            bytes: 1,
            filename: "x".into(),
            purpose: "batch".into(),
            results,
        }
    }

    async fn marks(service: &Service, tenant: &Tenant) -> usize {
        service.records.due(tenant, i64::MAX, None, 99).await.unwrap().len()
    }

    #[tokio::test]
    async fn an_expired_file_goes_with_its_content() {
        let (service, _, tenant) = service().await;
        let ids = [0, 1].map(|_| id::new_id(id::FILE).unwrap());
        for (id, expires_at) in ids.iter().zip([Some(100), Some(200)]) {
            put(&service.records.content(&tenant, id)).await;
            service.create_file(&tenant, file(id, expires_at, None)).await.unwrap();
        }
        sweep(&service, at(99)).await.unwrap();
        assert_eq!(marks(&service, &tenant).await, 2);
        sweep(&service, at(100)).await.unwrap();
        assert!(!exists(&service.records.content(&tenant, &ids[0])).await);
        assert!(service.records.file(&tenant, &ids[0]).await.unwrap().is_none());
        assert!(exists(&service.records.content(&tenant, &ids[1])).await);
        assert_eq!(marks(&service, &tenant).await, 1);
    }

    #[tokio::test]
    async fn an_expired_input_stays_while_a_batch_reads_it() {
        let (service, _, tenant) = service().await;
        let id = id::new_id(id::FILE).unwrap();
        put(&service.records.content(&tenant, &id)).await;
        service.create_file(&tenant, file(&id, Some(100), None)).await.unwrap();
        let key = BatchKey::new(&tenant, id::new_id(id::BATCH).unwrap());
        let batch = BatchRecord {
            id: key.id.clone(),
            created_at: 1,
            endpoint: "/v1/completions".into(),
            input_file_id: id.clone(),
            completion_window: "1h".into(),
            window_seconds: 3_600,
            output_expires_after: None,
            metadata: None,
            invalid_lines: InvalidLines::Fail,
            early_output: false,
        };
        service.records.create_batch(&key, batch).await.unwrap();
        sweep(&service, at(101)).await.unwrap();
        assert!(exists(&service.records.content(&tenant, &id)).await);
        service.records.close_batch(&key).await.unwrap();
        sweep(&service, at(101)).await.unwrap();
        assert!(!exists(&service.records.content(&tenant, &id)).await);
    }

    #[tokio::test]
    async fn broken_off_uploads_are_removed() {
        let (service, _, tenant) = service().await;
        // A request that died while it received, and one that ended well.
        let ids = [0, 1].map(|_| id::new_id(id::FILE).unwrap());
        for id in &ids {
            service.records.note_due(&tenant, 100, id).await.unwrap();
            put(&service.records.content(&tenant, id)).await;
        }
        service.create_file(&tenant, file(&ids[1], None, None)).await.unwrap();
        let upload = id::new_id(id::UPLOAD).unwrap();
        service.records.note_due(&tenant, 100, &upload).await.unwrap();
        let record = UploadRecord {
            id: upload.clone(),
            created_at: 1,
            bytes: 1,
            filename: "x".into(),
            purpose: "batch".into(),
            expires_after: None,
        };
        service.records.create_upload(&tenant, record).await.unwrap();
        let part = service.records.part(&tenant, &upload, "part_x");
        put(&part).await;
        sweep(&service, at(100)).await.unwrap();
        assert!(!exists(&service.records.content(&tenant, &ids[0])).await);
        assert!(exists(&service.records.content(&tenant, &ids[1])).await);
        assert!(!exists(&part).await);
        assert!(service.records.upload(&tenant, &upload).await.unwrap().is_none());
        assert_eq!(marks(&service, &tenant).await, 0);
    }

    #[tokio::test]
    async fn a_job_goes_with_the_last_of_its_files() {
        let (service, _, tenant) = service().await;
        let key = BatchKey::new(&tenant, id::new_id(id::BATCH).unwrap());
        let part = service.records.output(&key).join("part-0");
        put(&part).await;
        let ids = [0, 1].map(|_| id::new_id(id::FILE).unwrap());
        let counted = |id: &str| {
            Some(ResultsFile {
                id: id.into(),
                bytes: 1,
            })
        };
        let results = Results {
            at: 1,
            generation: 0,
            output: counted(&ids[0]),
            errors: counted(&ids[1]),
            completed: 1,
            failed: 1,
            expired: 0,
            cancelled: 0,
            usage: Usage::default(),
        };
        service.records.results(&key, results).await.unwrap();
        let ended = EndedBatch {
            at: 1,
            status: EndStatus::Completed,
            errors: Vec::new(),
        };
        service.records.ended(&key, ended).await.unwrap();
        let of = |kind| {
            let batch = key.id.clone();
            Some(ResultsOf { batch, kind })
        };
        let files = [
            file(&ids[0], None, of(ResultsKind::Output)),
            file(&ids[1], Some(100), of(ResultsKind::Errors)),
        ];
        for file in &files {
            service.create_file(&tenant, file.clone()).await.unwrap();
        }
        remove_file(&service, &tenant, &files[0]).await.unwrap();
        assert!(exists(&part).await, "the other file needs it");
        // A sweep that broke off after it removed the record: the batch has a mark.
        service.records.note_due(&tenant, 99, &key.id).await.unwrap();
        sweep(&service, at(99)).await.unwrap();
        assert!(exists(&part).await, "the other file still needs it");
        service.records.note_due(&tenant, 99, &key.id).await.unwrap();
        service.records.delete_file_record(&tenant, &ids[1]).await.unwrap();
        sweep(&service, at(99)).await.unwrap();
        assert!(!exists(&part).await);
        assert!(service.records.stages(&key).await.unwrap().ended.is_some());
    }

    #[tokio::test]
    async fn what_a_broken_off_removal_leaves_is_removed_later() {
        let folder = tempfile::tempdir().unwrap();
        let root = Location::parse(&folder.path().display().to_string(), std::path::Path::new("/")).unwrap();
        let service = Service::for_test(root).await;
        let tenant = Tenant::new("default").unwrap();
        let id = id::new_id(id::FILE).unwrap();
        let file = service.create_file(&tenant, file(&id, None, None)).await.unwrap();
        // A folder in the place of the content: it cannot be deleted.
        let place = folder
            .path()
            .join("tenants/default/content")
            .join(format!("{id}.jsonl"));
        std::fs::create_dir_all(place.join("x")).unwrap();
        remove_file(&service, &tenant, &file).await.unwrap_err();
        assert!(service.records.file(&tenant, &id).await.unwrap().is_none());
        std::fs::remove_dir_all(&place).unwrap();
        std::fs::write(&place, "x").unwrap();
        sweep(&service, Utc::now()).await.unwrap();
        assert!(!place.exists());
        assert_eq!(marks(&service, &tenant).await, 0);
    }

    #[tokio::test]
    async fn more_marks_than_a_page_are_handled_in_one_sweep() {
        let (service, _, tenant) = service().await;
        for number in 0..=MARKS_PAGE {
            let id = id::new_id(id::FILE).unwrap();
            // The first ones stay: their records are damaged.
            if number < MARKS_PAGE {
                let place = format!("tenants/default/files/{id}.json");
                service.records.store.create(&place, "x".into()).await.unwrap();
            }
            service.records.note_due(&tenant, number as i64, &id).await.unwrap();
        }
        sweep(&service, at(2_000)).await.unwrap();
        let left = service.records.due(&tenant, i64::MAX, None, 9_999).await.unwrap();
        assert_eq!(left.len(), MARKS_PAGE);
    }

    #[tokio::test]
    async fn notes_on_repeated_requests_are_kept_for_a_day() {
        let (service, _, tenant) = service().await;
        let creation = Creation {
            at: 1,
            batch: "batch_x".into(),
            body: "x".into(),
        };
        service.records.create_creation(&tenant, "h", creation).await.unwrap();
        sweep(&service, Utc::now() + TimeDelta::hours(23)).await.unwrap();
        assert!(service.records.creation(&tenant, "h").await.unwrap().is_some());
        sweep(&service, Utc::now() + TimeDelta::hours(25)).await.unwrap();
        assert!(service.records.creation(&tenant, "h").await.unwrap().is_none());
    }
}
