//! `/v1/files`: uploads, and the results of batches.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{FutureExt, Stream, StreamExt, TryStreamExt};
use object_store::{GetOptions, GetRange, GetResult, ObjectStore, ObjectStoreExt};

use super::content::{FILE_BYTES_MAX, discard, store_error};
use super::error::{ApiError, ApiResult};
use super::expiry::{ABANDONED_SECONDS, reader_of, remove_file};
use super::form::Form;
use super::id;
use super::keys::Tenant;
use super::range::{Wanted, wanted, window};
use super::record::{FileRecord, Results, ResultsKind, ResultsOf};
use super::records::BatchKey;
use super::request::{ExpiresAfter, PageSize, PathId, RawQuery};
use super::results::{ResultReader, Served, read_error};
use super::service::{Service, expiry, now, without_damaged};
use super::view::{DeletedView, FileView, ListView};
use crate::dataset::store::location::Location;
use crate::ledger::{Ledger, LedgerError};

/// Maximum length of a file's name in characters.
pub(super) const FILENAME_CHARS_MAX: usize = 256;
/// The purpose of uploads.
pub(super) const PURPOSE: &str = "batch";
/// Number of records that are read concurrently.
const READS_AT_ONCE: usize = 16;
pub(super) const PAGE: PageSize = PageSize {
    default: 10_000,
    max: 10_000,
};

/// `POST /v1/files`
pub(super) async fn upload(
    State(service): State<Arc<Service>>,
    Extension(tenant): Extension<Tenant>,
    mut form: Form,
) -> ApiResult<Json<FileView>> {
    let _slot = service.upload_slot().ok_or_else(ApiError::busy)?;
    let id = id::new_id(id::FILE)?;
    let content = service.records.content(&tenant, &id);
    // A process that dies while it receives leaves content that only this mark knows.
    service
        .records
        .note_due(&tenant, now() + ABANDONED_SECONDS, &id)
        .await?;
    let fields = match receive(&mut form, &content).await {
        Ok(fields) => fields,
        Err(error) => {
            discard(&content).await;
            return Err(error);
        }
    };
    service.metrics.add_uploaded(fields.bytes);
    let created_at = now();
    let record = FileRecord {
        id,
        created_at,
        expires_at: expiry(created_at, fields.expires_after),
        bytes: fields.bytes,
        filename: fields.filename,
        purpose: PURPOSE.into(),
        results: None,
    };
    Ok(Json(FileView::new(service.create_file(&tenant, record).await?)))
}

/// The fields of an upload, whose content the store has.
struct UploadFields {
    filename: String,
    bytes: u64,
    expires_after: Option<u64>,
}

/// Reads the form, and writes the file to the store.
async fn receive(form: &mut Form, content: &Location) -> ApiResult<UploadFields> {
    let (mut purpose, mut file) = (None, None);
    let (mut anchor, mut seconds) = (None, None);
    while let Some(field) = form.next_field().await? {
        match field.name().as_str() {
            "file" if file.is_some() => return Err(ApiError::invalid_param("file", "the form has two files")),
            "file" => {
                let filename = field.file_name().unwrap_or("file.jsonl").to_string();
                check_filename(&filename)?;
                file = Some((filename, field.store(content, FILE_BYTES_MAX).await?));
            }
            "purpose" => purpose = Some(field.text().await?),
            "expires_after[anchor]" => anchor = Some(field.text().await?),
            "expires_after[seconds]" => seconds = Some(field.text().await?),
            _ => return Err(field.unknown()),
        }
    }
    check_purpose(purpose.as_deref().unwrap_or_default())?;
    let (filename, bytes) = file.ok_or_else(|| ApiError::invalid_param("file", "`file` is missing"))?;
    let expires_after = match (anchor, seconds) {
        (None, None) => None,
        (anchor, seconds) => Some(ExpiresAfter {
            anchor: anchor.unwrap_or_default(),
            seconds: seconds.and_then(|text| text.parse().ok()).unwrap_or_default(),
        }),
    };
    Ok(UploadFields {
        filename,
        bytes,
        expires_after: ExpiresAfter::checked(expires_after.as_ref())?,
    })
}

pub(super) fn check_purpose(purpose: &str) -> ApiResult<()> {
    if purpose == PURPOSE {
        Ok(())
    } else {
        Err(ApiError::invalid_param(
            "purpose",
            format!("`purpose` must be `{PURPOSE}`"),
        ))
    }
}

pub(super) fn check_filename(filename: &str) -> ApiResult<()> {
    if filename.chars().count() > FILENAME_CHARS_MAX {
        let message = format!("the file's name is longer than {FILENAME_CHARS_MAX} characters");
        return Err(ApiError::invalid_param("filename", message));
    }
    Ok(())
}

/// The record of the file that a path names.
async fn file_of(service: &Service, tenant: &Tenant, id: &str) -> ApiResult<FileRecord> {
    let not_found = || ApiError::not_found("file", id);
    if !id::is_id(id::FILE, id) {
        return Err(not_found());
    }
    let file = service.records.file(tenant, id).await?.ok_or_else(not_found)?;
    if !file.has_expired(now()) {
        return Ok(file);
    }
    // Nobody sees the file any more. Its content goes with the first request that notices.
    if reader_of(service, tenant, id).await?.is_none() {
        remove_file(service, tenant, &file).await?;
    }
    Err(not_found())
}

/// `GET /v1/files/{id}`
pub(super) async fn get(
    State(service): State<Arc<Service>>,
    Extension(tenant): Extension<Tenant>,
    PathId(id): PathId,
) -> ApiResult<Json<FileView>> {
    Ok(Json(FileView::new(file_of(&service, &tenant, &id).await?)))
}

/// `GET /v1/files/{id}/content`
pub(super) async fn content(
    State(service): State<Arc<Service>>,
    Extension(tenant): Extension<Tenant>,
    PathId(id): PathId,
    headers: HeaderMap,
) -> ApiResult<Response> {
    let file = file_of(&service, &tenant, &id).await?;
    let range = headers.get(header::RANGE).and_then(|value| value.to_str().ok());
    let Some(results) = &file.results else {
        let location = service.records.content(&tenant, &id);
        let range = wanted(range, file.bytes);
        let options = GetOptions {
            range: match range {
                Wanted::Bytes(start, end) => Some(GetRange::Bounded(start..end)),
                Wanted::Whole | Wanted::Nothing => None,
            },
            ..GetOptions::default()
        };
        let found = location.store.get_opts(&location.path, options).await;
        let body = Body::from_stream(found.map_err(store_error)?.into_stream());
        return Ok(download(range, file.bytes, body));
    };
    let Some(reading) = ResultsFile::open(&service, &tenant, &file, results).await? else {
        return Ok(download(wanted(range, 0), 0, Body::empty()));
    };
    let bytes = reading.bytes().await?;
    let range = wanted(range, bytes);
    let (start, end) = match range {
        Wanted::Bytes(start, end) => (start, end),
        Wanted::Whole | Wanted::Nothing => (0, bytes),
    };
    let logged = window(reading.chunks(), start, end).inspect_err(move |error| {
        tracing::warn!("file `{id}` could not be sent: {error}");
    });
    Ok(download(range, bytes, Body::from_stream(logged)))
}

/// The response for a file of this size. `body`: the part of it that is wanted.
fn download(range: Wanted, bytes: u64, body: Body) -> Response {
    let kind = (header::CONTENT_TYPE, "application/jsonl".to_string());
    let accepts = (header::ACCEPT_RANGES, "bytes".to_string());
    let length = |bytes: u64| (header::CONTENT_LENGTH, bytes.to_string());
    match range {
        Wanted::Whole => ([kind, accepts, length(bytes)], body).into_response(),
        Wanted::Bytes(start, end) => {
            let range = (header::CONTENT_RANGE, format!("bytes {start}-{}/{bytes}", end - 1));
            let headers = [kind, accepts, length(end - start), range];
            (StatusCode::PARTIAL_CONTENT, headers, body).into_response()
        }
        Wanted::Nothing => {
            let range = (header::CONTENT_RANGE, format!("bytes */{bytes}"));
            let error = ApiError::invalid(format!("the file has {bytes} bytes, and none in this range"));
            (StatusCode::RANGE_NOT_SATISFIABLE, [range], error.body()).into_response()
        }
    }
}

/// A file of results, whose lines are computed from the parts of its batch's job.
struct ResultsFile {
    kind: ResultsKind,
    ledger: Ledger,
    output: Location,
    /// The lines of the input that are no requests, if they belong to the file.
    refused: Option<Location>,
    served: Served,
    /// `None`: the batch still runs, and the file grows.
    counted: Option<Results>,
}

impl ResultsFile {
    /// `None`: the batch has not begun, so there is nothing in the file yet.
    async fn open(
        service: &Service,
        tenant: &Tenant,
        file: &FileRecord,
        results: &ResultsOf,
    ) -> ApiResult<Option<ResultsFile>> {
        let key = BatchKey::new(tenant, results.batch.as_str());
        let stages = service.records.stages(&key).await?;
        let batch = service.records.batch(&key).await?.ok_or_else(ApiError::internal)?;
        let Some(ledger) = service.records.ledger(&key).await? else {
            return match stages.ended {
                None => Ok(None),
                // Somebody has removed the job's output to free the space.
                Some(_) => Err(ApiError::not_found("file", &file.id)),
            };
        };
        let checked = stages.checked.ok_or_else(ApiError::internal)?;
        if let Some(counted) = &stages.results
            && counted.generation != ledger.generation()
        {
            tracing::error!(
                batch = key.id,
                "the job of batch {} was retried after the batch had ended",
                key.id
            );
            return Err(ApiError::internal());
        }
        let has_refused = results.kind == ResultsKind::Errors && checked.refused.is_some();
        Ok(Some(ResultsFile {
            kind: results.kind,
            ledger,
            output: service.records.output(&key),
            refused: has_refused.then(|| service.records.refused_lines(&key)),
            served: Served {
                model: checked.model,
                endpoint: batch.endpoint,
            },
            counted: stages.results,
        }))
    }

    /// The size. That of a file that still grows is counted.
    async fn bytes(&self) -> ApiResult<u64> {
        match &self.counted {
            Some(counted) => Ok(counted.file(self.kind).map_or(0, |file| file.bytes)),
            None => {
                let sizes = self.chunks().map_ok(|chunk| chunk.len() as u64);
                Ok(sizes.try_fold(0, |sum, bytes| async move { Ok(sum + bytes) }).await?)
            }
        }
    }

    fn chunks(&self) -> BoxStream<'static, Result<Bytes, LedgerError>> {
        let (ledger, output) = (self.ledger.clone(), self.output.clone());
        let reader = ResultReader::new(ledger, output, self.served.clone(), self.counted.is_none());
        let answers = reader.content(self.kind);
        match self.refused.clone() {
            Some(refused) => refused_chunks(refused).chain(answers).boxed(),
            None => answers.boxed(),
        }
    }
}

/// The content of an object that holds lines of an error file.
fn refused_chunks(place: Location) -> impl Stream<Item = Result<Bytes, LedgerError>> + Send + 'static {
    let address = place.url.to_string();
    let opened = async move { place.store.get(&place.path).await.map(GetResult::into_stream) };
    let chunks = opened.into_stream().try_flatten();
    chunks.map_err(move |error| read_error(&address, error))
}

/// `GET /v1/files`
pub(super) async fn list(
    State(service): State<Arc<Service>>,
    Extension(tenant): Extension<Tenant>,
    query: RawQuery,
) -> ApiResult<Json<ListView<FileView>>> {
    let query = query.list(PAGE, |text| id::is_id(id::FILE, text))?;
    let after = query.after.as_deref().filter(|_| !query.is_ascending);
    let mut ids = service.records.list_files(&tenant, after).await?;
    if query.is_ascending {
        ids.reverse();
        // Ids of later files are smaller.
        ids.retain(|id| query.after.as_ref().is_none_or(|after| id < after));
    }
    let records = futures::stream::iter(ids)
        .map(|id| {
            let (service, tenant) = (&service, &tenant);
            async move { without_damaged(service.records.file(tenant, &id).await) }
        })
        .buffered(READS_AT_ONCE);
    // A file that was deleted since the listing is left out.
    let wanted = records.try_filter_map(|file| {
        let has_purpose = |file: &FileRecord| query.purpose.as_ref().is_none_or(|purpose| *purpose == file.purpose);
        let file = file.filter(|file| has_purpose(file) && !file.has_expired(now()));
        async move { Ok(file) }
    });
    let mut found: Vec<FileRecord> = wanted.take(query.limit + 1).try_collect().await?;
    let has_more = found.len() > query.limit;
    found.truncate(query.limit);
    let views = found.into_iter().map(FileView::new).collect();
    Ok(Json(ListView::new(views, |file| &file.id, has_more)))
}

/// `DELETE /v1/files/{id}`
pub(super) async fn delete(
    State(service): State<Arc<Service>>,
    Extension(tenant): Extension<Tenant>,
    PathId(id): PathId,
) -> ApiResult<Json<DeletedView>> {
    let file = file_of(&service, &tenant, &id).await?;
    if let Some(key) = reader_of(&service, &tenant, &id).await? {
        let message = format!(
            "batch `{}` still reads the file: cancel it first, or wait for its end",
            key.id
        );
        return Err(ApiError::conflict(message));
    }
    if let Some(results) = &file.results
        && service
            .records
            .end_of(&BatchKey::new(&tenant, results.batch.as_str()))
            .await?
            .is_none()
    {
        let message = format!(
            "batch `{}` still writes the file: cancel it first, or wait for its end",
            results.batch
        );
        return Err(ApiError::conflict(message));
    }
    remove_file(&service, &tenant, &file).await?;
    Ok(Json(DeletedView::file(id)))
}

#[cfg(test)]
mod tests {
    use super::super::records::tests::{batch, root};
    use super::*;

    async fn service() -> (State<Arc<Service>>, Extension<Tenant>) {
        (
            State(Arc::new(Service::for_test(root()).await)),
            Extension(Tenant::new("default").unwrap()),
        )
    }

    fn file(expires_at: Option<i64>, results: Option<ResultsOf>) -> FileRecord {
        FileRecord {
            id: id::new_id(id::FILE).unwrap(),
            created_at: 1,
            expires_at,
            bytes: 1,
            filename: "x".into(),
            purpose: "batch".into(),
            results,
        }
    }

    fn status<T>(answer: ApiResult<T>) -> u16 {
        answer.map_or_else(|error| error.into_response().status().as_u16(), |_| 200)
    }

    #[tokio::test]
    async fn an_expired_file_is_gone_for_clients() {
        let (service, tenant) = service().await;
        let (old, new) = (file(Some(100), None), file(Some(now() + 100), None));
        for file in [&old, &new] {
            service.create_file(&tenant, file.clone()).await.unwrap();
            let place = service.records.content(&tenant, &file.id);
            place.store.put(&place.path, "x".into()).await.unwrap();
        }
        let Json(listed) = list(service.clone(), tenant.clone(), RawQuery::default())
            .await
            .unwrap();
        let listed = serde_json::to_value(listed).unwrap();
        assert_eq!(listed["data"].as_array().unwrap().len(), 1, "{listed}");
        assert_eq!(listed["data"][0]["id"], new.id.as_str());
        let read =
            async |id: &String| content(service.clone(), tenant.clone(), PathId(id.clone()), HeaderMap::new()).await;
        assert_eq!((status(read(&old.id).await), status(read(&new.id).await)), (404, 200));
        let (old, new) = (file(Some(100), None), new);
        service.create_file(&tenant, old.clone()).await.unwrap();
        let seen = async |id: &String| get(service.clone(), tenant.clone(), PathId(id.clone())).await;
        assert_eq!((status(seen(&old.id).await), status(seen(&new.id).await)), (404, 200));
        assert!(service.records.file(&tenant, &old.id).await.unwrap().is_none());
    }

    #[tokio::test]
    async fn the_files_of_a_batch_that_waits_are_empty_and_stay() {
        let (service, tenant) = service().await;
        let key = BatchKey::new(&tenant, id::new_id(id::BATCH).unwrap());
        service.records.create_batch(&key, batch(&key.id)).await.unwrap();
        let kind = ResultsKind::Output;
        let early = file(
            None,
            Some(ResultsOf {
                batch: key.id.clone(),
                kind,
            }),
        );
        service.create_file(&tenant, early.clone()).await.unwrap();
        let answer = content(
            service.clone(),
            tenant.clone(),
            PathId(early.id.clone()),
            HeaderMap::new(),
        );
        assert_eq!(answer.await.unwrap().headers()[header::CONTENT_LENGTH], "0");
        let deleted = delete(service.clone(), tenant.clone(), PathId(early.id.clone())).await;
        assert_eq!(status(deleted), 409);
    }
}
