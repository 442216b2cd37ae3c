//! Reading requests: bodies within limits of size and time, ids of paths, query parameters. Every
//! refusal has the API's own form.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequestParts, Path, Query};
use axum::http::request::Parts;
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::error::{ApiError, ApiResult};

/// Maximum time between two pieces of a request's body.
pub(super) const BODY_PAUSE_MAX: Duration = Duration::from_secs(30);
/// Maximum size of a body that is not a file.
const JSON_BYTES_MAX: usize = 512 << 10;

/// Limits of the time after which a file expires: an hour and 30 days.
pub(super) const EXPIRY_SECONDS_MIN: u64 = 3_600;
pub(super) const EXPIRY_SECONDS_MAX: u64 = 2_592_000;

/// Reads a body that is not a file.
pub(super) async fn read_body(body: Body) -> ApiResult<Bytes> {
    let mut pieces = body.into_data_stream();
    let mut bytes = BytesMut::new();
    loop {
        match tokio::time::timeout(BODY_PAUSE_MAX, pieces.next()).await {
            Err(_) => return Err(ApiError::too_slow()),
            Ok(None) => return Ok(bytes.freeze()),
            Ok(Some(Err(_))) => return Err(ApiError::invalid("the request's body ended early")),
            Ok(Some(Ok(piece))) if bytes.len() + piece.len() > JSON_BYTES_MAX => {
                return Err(ApiError::too_large(JSON_BYTES_MAX as u64));
            }
            Ok(Some(Ok(piece))) => bytes.extend_from_slice(&piece),
        }
    }
}

/// Reads a JSON body. `what`: what it describes, for messages.
pub(super) fn parse_json<T: DeserializeOwned>(bytes: &[u8], what: &str) -> ApiResult<T> {
    serde_json::from_slice(bytes).map_err(|error| ApiError::invalid(format!("the body is no {what}: {error}")))
}

/// When a file expires, as a client gives it.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ExpiresAfter {
    #[schemars(extend("enum" = ["created_at"]))]
    pub anchor: String,
    #[schemars(range(min = 3_600, max = 2_592_000))]
    pub seconds: u64,
}

impl ExpiresAfter {
    /// The seconds after the file's creation, checked against OpenAI's limits.
    pub(super) fn checked(given: Option<&ExpiresAfter>) -> ApiResult<Option<u64>> {
        let Some(given) = given else { return Ok(None) };
        let bad = |why: String| {
            Err(ApiError::invalid_param(
                "expires_after",
                format!("`expires_after` {why}"),
            ))
        };
        if given.anchor != "created_at" {
            return bad("has the anchor `created_at`".into());
        }
        if !(EXPIRY_SECONDS_MIN..=EXPIRY_SECONDS_MAX).contains(&given.seconds) {
            return bad(format!(
                "is a time from {EXPIRY_SECONDS_MIN} to {EXPIRY_SECONDS_MAX} seconds"
            ));
        }
        Ok(Some(given.seconds))
    }
}

/// The id in a request's path, as the client sent it.
pub(super) struct PathId(pub String);

impl<S: Send + Sync> FromRequestParts<S> for PathId {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> ApiResult<PathId> {
        match Path::<String>::from_request_parts(parts, state).await {
            Ok(Path(id)) => Ok(PathId(id)),
            Err(_) => Err(ApiError::not_found("object", "")),
        }
    }
}

/// The query parameters of a list.
pub(super) struct ListQuery {
    pub after: Option<String>,
    pub limit: usize,
    pub is_ascending: bool,
    pub purpose: Option<String>,
}

/// The limits of a list's `limit`.
#[derive(Clone, Copy)]
pub(super) struct PageSize {
    pub default: usize,
    pub max: usize,
}

/// The query parameters of a request, unread.
#[cfg_attr(test, derive(Default))]
pub(super) struct RawQuery(BTreeMap<String, String>);

impl<S: Send + Sync> FromRequestParts<S> for RawQuery {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> ApiResult<RawQuery> {
        match Query::from_request_parts(parts, state).await {
            Ok(Query(parameters)) => Ok(RawQuery(parameters)),
            Err(error) => Err(ApiError::invalid(format!("the query is invalid: {error}"))),
        }
    }
}

impl RawQuery {
    /// Reads the parameters of a list. `is_id`: whether a text has the form of an id of the list.
    pub(super) fn list(self, page: PageSize, is_id: impl Fn(&str) -> bool) -> ApiResult<ListQuery> {
        let mut query = ListQuery {
            after: None,
            limit: page.default,
            is_ascending: false,
            purpose: None,
        };
        for (name, value) in self.0 {
            let bad = |why: String| Err(ApiError::invalid_param(&name, format!("`{name}` {why}")));
            match name.as_str() {
                "after" if is_id(&value) => query.after = Some(value),
                "after" => return bad("is no id of this list".into()),
                "limit" => match value.parse() {
                    Ok(limit) if (1..=page.max).contains(&limit) => query.limit = limit,
                    _ => return bad(format!("must be a number from 1 to {}", page.max)),
                },
                "order" if value == "asc" || value == "desc" => query.is_ascending = value == "asc",
                "order" => return bad("must be `asc` or `desc`".into()),
                "purpose" => query.purpose = Some(value),
                _ => return bad("is not supported".into()),
            }
        }
        Ok(query)
    }
}
