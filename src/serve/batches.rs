//! `/v1/batches`: creating, showing, listing and cancelling batches.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::HeaderMap;
use data_encoding::HEXLOWER;
use futures::{StreamExt, TryStreamExt};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::error::{ApiError, ApiResult};
use super::id;
use super::keys::Tenant;
use super::record::{BatchRecord, CancelRequest, Creation, InvalidLines};
use super::records::BatchKey;
use super::request::{ExpiresAfter, PageSize, PathId, RawQuery, parse_json, read_body};
use super::service::{Service, now, without_damaged};
use super::view::{BatchView, ListView};
use crate::dataset::part::RESPONSES_URL;
use crate::job::spec::duration_seconds;
use crate::ledger::LedgerError;

/// Endpoints that a batch may be for.
const ENDPOINTS: [&str; 3] = ["/v1/chat/completions", "/v1/completions", RESPONSES_URL];
/// Maximum completion window: 30 days.
const WINDOW_SECONDS_MAX: u64 = 30 * 86_400;
/// Limits of `metadata`, as OpenAI has them.
const METADATA_PAIRS_MAX: usize = 16;
const METADATA_KEY_CHARS_MAX: usize = 64;
const METADATA_VALUE_CHARS_MAX: usize = 512;
/// How long a repeated request without an `Idempotency-Key` is recognized.
const RETRY_SECONDS_MAX: i64 = 600;
/// Maximum length of an `Idempotency-Key` in bytes.
const KEY_BYTES_MAX: usize = 255;
/// Number of batches that are read concurrently.
const READS_AT_ONCE: usize = 8;
pub(super) const PAGE: PageSize = PageSize { default: 20, max: 100 };

/// The body of a request to create a batch.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct BatchRequest {
    #[schemars(regex(pattern = "^file-[0-9a-v]{26}$"))]
    input_file_id: String,
    #[schemars(extend("enum" = ENDPOINTS))]
    endpoint: String,
    /// A time up to 30 days, such as `24h` or `1h30m`.
    #[schemars(regex(pattern = "^([1-9][0-9]{0,6}[smhd])+$"))]
    completion_window: String,
    metadata: Option<Map<String, Value>>,
    output_expires_after: Option<ExpiresAfter>,
    /// What becomes of lines that are no requests: without it, the batch fails.
    #[serde(default)]
    invalid_lines: InvalidLines,
    /// Whether the files of results exist while the batch runs.
    #[serde(default)]
    early_output: bool,
}

/// `POST /v1/batches`
pub(super) async fn create(
    State(service): State<Arc<Service>>,
    Extension(tenant): Extension<Tenant>,
    headers: HeaderMap,
    body: Body,
) -> ApiResult<Json<BatchView>> {
    let body = read_body(body).await?;
    let request: BatchRequest = parse_json(&body, "request for a batch")?;
    let window_seconds = check_request(&request)?;
    let id = batch_id(&service, &tenant, &headers, &body).await?;
    let key = BatchKey::new(&tenant, id);
    // A repeated request is answered even if its input is gone by now.
    if service.records.batch(&key).await?.is_none() {
        check_input_file(&service, &tenant, &request.input_file_id).await?;
        let record = BatchRecord {
            id: key.id.clone(),
            created_at: now(),
            endpoint: request.endpoint,
            input_file_id: request.input_file_id,
            completion_window: request.completion_window,
            window_seconds,
            output_expires_after: ExpiresAfter::checked(request.output_expires_after.as_ref())?,
            metadata: request.metadata,
            invalid_lines: request.invalid_lines,
            early_output: request.early_output,
        };
        service.open_batch(&key, record).await?;
        service.note_change(key.clone());
    }
    view_of(&service, &tenant, &key.id).await.map(Json)
}

/// Checks that the input is an upload of this tenant.
async fn check_input_file(service: &Service, tenant: &Tenant, id: &str) -> ApiResult<()> {
    let input = if id::is_id(id::FILE, id) {
        service.records.file(tenant, id).await?
    } else {
        None
    };
    match input {
        Some(input) if input.results.is_none() && !input.has_expired(now()) => Ok(()),
        Some(input) if input.results.is_some() => {
            let message = "`input_file_id` is a file of results; upload it again as an input";
            Err(ApiError::invalid_param("input_file_id", message))
        }
        // The client must not take this for a missing batch, so it is no 404.
        Some(_) | None => {
            let shown: String = id.chars().take(80).collect();
            Err(ApiError::invalid_param(
                "input_file_id",
                format!("there is no file `{shown}`"),
            ))
        }
    }
}

/// Checks the values of a request, and returns the completion window in seconds.
fn check_request(request: &BatchRequest) -> ApiResult<u64> {
    if !ENDPOINTS.contains(&request.endpoint.as_str()) {
        let message = format!("`endpoint` must be `{}`", ENDPOINTS.join("` or `"));
        return Err(ApiError::invalid_param("endpoint", message));
    }
    if let Some(metadata) = &request.metadata {
        check_metadata(metadata)?;
    }
    ExpiresAfter::checked(request.output_expires_after.as_ref())?;
    let bad_window = |why: String| ApiError::invalid_param("completion_window", format!("`completion_window`: {why}"));
    let seconds = duration_seconds(&request.completion_window).map_err(bad_window)?;
    if seconds > WINDOW_SECONDS_MAX {
        return Err(bad_window(format!("at most {} days", WINDOW_SECONDS_MAX / 86_400)));
    }
    Ok(seconds)
}

fn check_metadata(metadata: &Map<String, Value>) -> ApiResult<()> {
    let bad = |why: String| Err(ApiError::invalid_param("metadata", why));
    if metadata.len() > METADATA_PAIRS_MAX {
        return bad(format!("`metadata` has at most {METADATA_PAIRS_MAX} pairs"));
    }
    for (name, value) in metadata {
        if name.chars().count() > METADATA_KEY_CHARS_MAX {
            return bad(format!(
                "a key of `metadata` has at most {METADATA_KEY_CHARS_MAX} characters"
            ));
        }
        match value.as_str() {
            Some(text) if text.chars().count() <= METADATA_VALUE_CHARS_MAX => {}
            _ => {
                return bad(format!(
                    "a value of `metadata` is a text of at most {METADATA_VALUE_CHARS_MAX} characters"
                ));
            }
        }
    }
    Ok(())
}

/// The id of the batch that a request creates. A repeated request gets the id of the first one: by
/// its `Idempotency-Key`, or because OpenAI's SDK says that it repeats a request (it does so after a
/// lost response, without a key).
async fn batch_id(service: &Service, tenant: &Tenant, headers: &HeaderMap, body: &[u8]) -> ApiResult<String> {
    let body = HEXLOWER.encode(&Sha256::digest(body));
    let creation = Creation {
        at: now(),
        batch: id::new_id(id::BATCH)?,
        body: body.clone(),
    };
    if let Some(key) = headers.get("idempotency-key") {
        let key = key.as_bytes();
        if key.is_empty() || key.len() > KEY_BYTES_MAX {
            return Err(ApiError::invalid(format!(
                "`Idempotency-Key` needs 1 to {KEY_BYTES_MAX} bytes"
            )));
        }
        let hash = HEXLOWER.encode(&Sha256::digest([b"key\0", key].concat()));
        let first = service.records.create_creation(tenant, &hash, creation).await?;
        if first.body != body {
            return Err(ApiError::conflict(
                "the `Idempotency-Key` was used for a request with another body",
            ));
        }
        return Ok(first.batch);
    }
    let retries = headers.get("x-stainless-retry-count");
    let is_retry = retries.is_some_and(|count| !matches!(count.as_bytes(), b"" | b"0"));
    let hash = HEXLOWER.encode(&Sha256::digest(format!("body\0{body}")));
    if is_retry
        && let Some(first) = service.records.creation(tenant, &hash).await?
        && now() - first.at <= RETRY_SECONDS_MAX
    {
        return Ok(first.batch);
    }
    service.records.replace_creation(tenant, &hash, &creation).await?;
    Ok(creation.batch)
}

/// The batch that a path names.
async fn view_of(service: &Service, tenant: &Tenant, id: &str) -> ApiResult<BatchView> {
    let not_found = || ApiError::not_found("batch", id);
    if !id::is_id(id::BATCH, id) {
        return Err(not_found());
    }
    service.view(tenant, id).await?.ok_or_else(not_found)
}

/// `GET /v1/batches/{id}`
pub(super) async fn get(
    State(service): State<Arc<Service>>,
    Extension(tenant): Extension<Tenant>,
    PathId(id): PathId,
) -> ApiResult<Json<BatchView>> {
    view_of(&service, &tenant, &id).await.map(Json)
}

/// `GET /v1/batches`
pub(super) async fn list(
    State(service): State<Arc<Service>>,
    Extension(tenant): Extension<Tenant>,
    query: RawQuery,
) -> ApiResult<Json<ListView<BatchView>>> {
    let query = query.list(PAGE, |text| id::is_id(id::BATCH, text))?;
    if query.is_ascending || query.purpose.is_some() {
        return Err(ApiError::invalid(
            "batches are listed newest first; `purpose` is for files",
        ));
    }
    let mut ids = service
        .records
        .list_batches(&tenant, query.after.as_deref(), query.limit + 1)
        .await?;
    let has_more = ids.len() > query.limit;
    ids.truncate(query.limit);
    let views = futures::stream::iter(ids)
        .map(|id| {
            let (service, tenant) = (&service, &tenant);
            async move { without_damaged(service.view(tenant, &id).await) }
        })
        .buffered(READS_AT_ONCE);
    let found: Vec<BatchView> = views
        .try_filter_map(|view| async move { Ok(view) })
        .try_collect()
        .await?;
    Ok(Json(ListView::new(found, |batch| &batch.id, has_more)))
}

/// `POST /v1/batches/{id}/cancel`
pub(super) async fn cancel(
    State(service): State<Arc<Service>>,
    Extension(tenant): Extension<Tenant>,
    PathId(id): PathId,
) -> ApiResult<Json<BatchView>> {
    let before = view_of(&service, &tenant, &id).await?;
    let requested = request_cancel(&service, &tenant, &before).await?;
    requested.map_err(ApiError::conflict)?;
    view_of(&service, &tenant, &id).await.map(Json)
}

/// Has a batch cancelled. `Err` of the inner result: why it cannot be.
pub(super) async fn request_cancel(
    service: &Service,
    tenant: &Tenant,
    batch: &BatchView,
) -> Result<Result<(), String>, LedgerError> {
    if batch.has_ended() {
        let status = batch.status_name();
        return Ok(Err(format!("batch `{}` is {status}: it cannot be cancelled", batch.id)));
    }
    if batch.can_be_cancelled() {
        let key = BatchKey::new(tenant, batch.id.as_str());
        service.records.cancel(&key, CancelRequest { at: now() }).await?;
        service.note_change(key);
    }
    Ok(Ok(()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn request(change: impl FnOnce(&mut Value)) -> Result<u64, String> {
        let mut body = json!({
            "input_file_id": "file-x", "endpoint": "/v1/chat/completions", "completion_window": "24h",
        });
        change(&mut body);
        let request: BatchRequest = serde_json::from_value(body).map_err(|error| error.to_string())?;
        check_request(&request).map_err(|error| format!("{error:?}"))
    }

    #[test]
    fn values_are_checked() {
        assert_eq!(request(|_| {}), Ok(86_400));
        assert_eq!(request(|body| body["completion_window"] = json!("90m")), Ok(5_400));
        let pairs = |count: usize| -> Map<String, Value> { (0..count).map(|n| (n.to_string(), json!("v"))).collect() };
        assert!(request(|body| body["metadata"] = pairs(16).into()).is_ok());
        for (field, value) in [
            ("completion_window", json!("31d")),
            ("completion_window", json!("soon")),
            ("endpoint", json!("/v1/embeddings")),
            ("metadata", pairs(17).into()),
            ("metadata", json!({"k": 1})),
            ("metadata", json!({"k": "v".repeat(513)})),
            ("metadata", json!({"k".repeat(65): "v"})),
            ("expires_after", json!({"anchor": "created_at", "seconds": 3600})),
        ] {
            let error = request(|body| body[field] = value.clone()).unwrap_err();
            assert!(error.contains(field), "{field} {value}: {error}");
        }
    }
}
