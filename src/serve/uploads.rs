//! `/v1/uploads`: a file in parts, for files too large for one request.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Extension, State};
use data_encoding::HEXLOWER;
use futures::TryStreamExt;
use md5::Md5;
use object_store::ObjectStoreExt;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::Digest;

use super::content::{ContentWriter, FILE_BYTES_MAX, discard, store_error};
use super::error::{ApiError, ApiResult};
use super::expiry::ABANDONED_SECONDS;
use super::files::{FILENAME_CHARS_MAX, PURPOSE, check_filename, check_purpose};
use super::form::Form;
use super::id;
use super::keys::Tenant;
use super::record::{FileRecord, UploadEnd, UploadRecord, UploadedFile};
use super::request::{ExpiresAfter, PathId, parse_json, read_body};
use super::service::{Service, expiry, now};
use super::view::FileView;

/// Maximum size of a part: OpenAI's 64 MB, generously.
const PART_BYTES_MAX: u64 = 64 << 20;
/// Maximum number of parts.
const PARTS_MAX: usize = 10_000;
/// Seconds after its creation at which an upload expires.
const UPLOAD_SECONDS_MAX: i64 = 3_600;

/// The body of a request to create an upload.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct UploadRequest {
    #[schemars(range(min = 1, max = FILE_BYTES_MAX))]
    bytes: u64,
    #[schemars(length(max = FILENAME_CHARS_MAX))]
    filename: String,
    #[schemars(extend("enum" = [PURPOSE]))]
    purpose: String,
    /// Required by OpenAI; of no effect, since every file is JSON lines.
    #[serde(rename = "mime_type")]
    _mime_type: String,
    expires_after: Option<ExpiresAfter>,
}

/// The body of a request to complete an upload.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct CompleteRequest {
    part_ids: Vec<String>,
    /// MD5 of the whole file, in hex.
    md5: Option<String>,
}

/// An upload, in OpenAI's form.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct UploadView {
    id: String,
    object: &'static str,
    bytes: u64,
    created_at: i64,
    expires_at: i64,
    filename: String,
    purpose: String,
    status: &'static str,
    file: Option<FileView>,
}

/// A part, in OpenAI's form.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct PartView {
    id: String,
    object: &'static str,
    created_at: i64,
    upload_id: String,
}

impl UploadView {
    fn new(record: UploadRecord, status: &'static str, file: Option<FileRecord>) -> UploadView {
        UploadView {
            expires_at: record.created_at + UPLOAD_SECONDS_MAX,
            id: record.id,
            object: "upload",
            bytes: record.bytes,
            created_at: record.created_at,
            filename: record.filename,
            purpose: record.purpose,
            status,
            file: file.map(FileView::new),
        }
    }
}

/// `POST /v1/uploads`
pub(super) async fn create(
    State(service): State<Arc<Service>>,
    Extension(tenant): Extension<Tenant>,
    body: Body,
) -> ApiResult<Json<UploadView>> {
    let request: UploadRequest = parse_json(&read_body(body).await?, "request for an upload")?;
    check_purpose(&request.purpose)?;
    check_filename(&request.filename)?;
    if request.bytes == 0 || request.bytes > FILE_BYTES_MAX {
        return Err(ApiError::invalid_param(
            "bytes",
            format!("`bytes` must be from 1 to {FILE_BYTES_MAX}"),
        ));
    }
    let record = UploadRecord {
        id: id::new_id(id::UPLOAD)?,
        created_at: now(),
        bytes: request.bytes,
        filename: request.filename,
        purpose: request.purpose,
        expires_after: ExpiresAfter::checked(request.expires_after.as_ref())?,
    };
    let given_up_at = record.created_at + ABANDONED_SECONDS;
    service.records.note_due(&tenant, given_up_at, &record.id).await?;
    let record = service.records.create_upload(&tenant, record).await?;
    Ok(Json(UploadView::new(record, "pending", None)))
}

/// The upload that a path names.
async fn upload_of(service: &Service, tenant: &Tenant, id: &str) -> ApiResult<UploadRecord> {
    let not_found = || ApiError::not_found("upload", id);
    if !id::is_id(id::UPLOAD, id) {
        return Err(not_found());
    }
    service.records.upload(tenant, id).await?.ok_or_else(not_found)
}

/// Refuses an upload that has expired.
fn check_time(upload: &UploadRecord) -> ApiResult<()> {
    if now() < upload.created_at + UPLOAD_SECONDS_MAX {
        return Ok(());
    }
    Err(ApiError::conflict(format!(
        "upload `{}` has expired after an hour: begin a new one",
        upload.id
    )))
}

/// `POST /v1/uploads/{id}/parts`
pub(super) async fn add_part(
    State(service): State<Arc<Service>>,
    Extension(tenant): Extension<Tenant>,
    PathId(upload): PathId,
    mut form: Form,
) -> ApiResult<Json<PartView>> {
    let upload = upload_of(&service, &tenant, &upload).await?;
    check_time(&upload)?;
    if service.records.upload_end(&tenant, &upload.id).await?.is_some() {
        return Err(ApiError::conflict(format!(
            "upload `{}` has ended: it takes no more parts",
            upload.id
        )));
    }
    let _slot = service.upload_slot().ok_or_else(ApiError::busy)?;
    let part = id::new_id(id::PART)?;
    let content = service.records.part(&tenant, &upload.id, &part);
    let received = async {
        let mut data = None;
        while let Some(field) = form.next_field().await? {
            match field.name().as_str() {
                "data" if data.is_some() => return Err(ApiError::invalid_param("data", "the form has two parts")),
                "data" => data = Some(field.store(&content, PART_BYTES_MAX).await?),
                _ => return Err(field.unknown()),
            }
        }
        data.ok_or_else(|| ApiError::invalid_param("data", "`data` is missing"))
    };
    match received.await {
        Ok(bytes) => service.metrics.add_uploaded(bytes),
        Err(error) => {
            discard(&content).await;
            return Err(error);
        }
    }
    Ok(Json(PartView {
        id: part,
        object: "upload.part",
        created_at: now(),
        upload_id: upload.id,
    }))
}

/// `POST /v1/uploads/{id}/complete`. A repeated request gets the same file.
pub(super) async fn complete(
    State(service): State<Arc<Service>>,
    Extension(tenant): Extension<Tenant>,
    PathId(upload): PathId,
    body: Body,
) -> ApiResult<Json<UploadView>> {
    let upload = upload_of(&service, &tenant, &upload).await?;
    let request: CompleteRequest = parse_json(&read_body(body).await?, "request to complete an upload")?;
    if request.part_ids.len() > PARTS_MAX || request.part_ids.iter().any(|part| !id::is_id(id::PART, part)) {
        let message = format!("`part_ids` holds up to {PARTS_MAX} ids of parts");
        return Err(ApiError::invalid_param("part_ids", message));
    }
    let slot = service.upload_slot().ok_or_else(ApiError::busy)?;
    let end = match service.records.upload_end(&tenant, &upload.id).await? {
        Some(end) => end,
        None => {
            check_time(&upload)?;
            check_parts(&service, &tenant, &upload, &request).await?;
            let file = UploadedFile {
                id: id::new_id(id::FILE)?,
                parts: request.part_ids.clone(),
            };
            let end = UploadEnd {
                at: now(),
                file: Some(file),
            };
            service.records.end_upload(&tenant, &upload.id, end).await?
        }
    };
    let Some(file) = end.file.filter(|file| file.parts == request.part_ids) else {
        let message = format!("upload `{}` was cancelled, or completed with other parts", upload.id);
        return Err(ApiError::conflict(message));
    };
    let record = match service.records.file(&tenant, &file.id).await? {
        Some(record) => record,
        None => {
            // It goes on if the client disconnects, so that a repeated request finds the file.
            let assembling = assemble(service, tenant, upload.clone(), file, end.at);
            let assembling = tokio::spawn(async move {
                let _slot = slot;
                assembling.await
            });
            assembling.await.map_err(|_| ApiError::internal())??
        }
    };
    Ok(Json(UploadView::new(upload, "completed", Some(record))))
}

/// Checks, before the upload ends, that the parts exist and make the announced file.
async fn check_parts(
    service: &Service,
    tenant: &Tenant,
    upload: &UploadRecord,
    request: &CompleteRequest,
) -> ApiResult<()> {
    let (mut bytes, mut md5) = (0, Md5::new());
    for part in &request.part_ids {
        let location = service.records.part(tenant, &upload.id, part);
        let found = match location.store.get(&location.path).await {
            Ok(found) => found,
            Err(object_store::Error::NotFound { .. }) => {
                let message = format!("upload `{}` has no part `{part}`", upload.id);
                return Err(ApiError::invalid_param("part_ids", message));
            }
            Err(error) => return Err(store_error(error)),
        };
        bytes += found.meta.size;
        if request.md5.is_some() {
            let mut chunks = found.into_stream();
            while let Some(chunk) = chunks.try_next().await.map_err(store_error)? {
                md5.update(&chunk);
            }
        }
    }
    if bytes != upload.bytes {
        let message = format!(
            "the parts have {bytes} bytes together, and the upload announced {}",
            upload.bytes
        );
        return Err(ApiError::invalid_param("part_ids", message));
    }
    let is_equal = |given: &String| HEXLOWER.encode(&md5.finalize()) == given.to_ascii_lowercase();
    if request.md5.as_ref().is_none_or(is_equal) {
        Ok(())
    } else {
        Err(ApiError::invalid_param("md5", "the parts have another MD5 than `md5`"))
    }
}

/// Joins the parts. Two requests that do so at the same time write the same bytes.
async fn assemble(
    service: Arc<Service>,
    tenant: Tenant,
    upload: UploadRecord,
    file: UploadedFile,
    created_at: i64,
) -> ApiResult<FileRecord> {
    // A process that dies before the file has a record leaves content that only this mark knows.
    let given_up_at = now() + ABANDONED_SECONDS;
    service.records.note_due(&tenant, given_up_at, &file.id).await?;
    let mut writer = ContentWriter::begin(&service.records.content(&tenant, &file.id), FILE_BYTES_MAX).await?;
    for part in &file.parts {
        let location = service.records.part(&tenant, &upload.id, part);
        let copied = async {
            let found = match location.store.get(&location.path).await {
                // The file was made of it before, and was deleted since.
                Err(object_store::Error::NotFound { .. }) => return Err(ApiError::not_found("file", &file.id)),
                found => found.map_err(store_error)?,
            };
            let mut chunks = found.into_stream();
            while let Some(chunk) = chunks.try_next().await.map_err(store_error)? {
                writer.write(chunk).await?;
            }
            Ok(())
        };
        if let Err(error) = copied.await {
            writer.abort().await;
            // Another request may have finished meanwhile, and removed the parts.
            return service.records.file(&tenant, &file.id).await?.ok_or(error);
        }
    }
    let bytes = writer.finish().await?;
    let record = FileRecord {
        id: file.id,
        created_at,
        expires_at: expiry(created_at, upload.expires_after),
        bytes,
        filename: upload.filename.clone(),
        purpose: upload.purpose.clone(),
        results: None,
    };
    let record = service.create_file(&tenant, record).await?;
    service.records.delete_parts(&tenant, &upload.id).await?;
    Ok(record)
}

/// `POST /v1/uploads/{id}/cancel`
pub(super) async fn cancel(
    State(service): State<Arc<Service>>,
    Extension(tenant): Extension<Tenant>,
    PathId(upload): PathId,
) -> ApiResult<Json<UploadView>> {
    let upload = upload_of(&service, &tenant, &upload).await?;
    let end = UploadEnd { at: now(), file: None };
    let end = service.records.end_upload(&tenant, &upload.id, end).await?;
    if end.file.is_some() {
        return Err(ApiError::conflict(format!(
            "upload `{}` is completed: it cannot be cancelled",
            upload.id
        )));
    }
    service.records.delete_parts(&tenant, &upload.id).await?;
    Ok(Json(UploadView::new(upload, "cancelled", None)))
}
