//! The endpoints below `/v1/jobs`. Whoever serves them has checked the key, and says who looks by a
//! [`Viewer`] among the request's extensions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{Extension, FromRequestParts, Path, Query, State};
use axum::http::request::Parts;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::error::ApiError;
use super::hub::{FIRST_PAGE, Hub};
use super::rows::{RowKind, RowQuery};
use super::source::{Command, Viewer};
use super::view::{JobList, JobView, RowList};

/// Maximum number of jobs of a page.
pub const PAGE_MAX: usize = 100;
/// Maximum number of rows of a page.
pub const ROWS_MAX: usize = 100;
/// Rows of a page whose size nobody gives.
const ROWS_DEFAULT: usize = 20;
/// Maximum size of a body.
const BODY_BYTES_MAX: usize = 16 << 10;
/// Maximum time in which a body arrives.
const BODY_WITHIN: Duration = Duration::from_secs(10);
/// Longest deadline: ten years, as in a job file.
const DEADLINE_SECONDS_MAX: u64 = 315_360_000;

/// The endpoints, for a router of any state.
pub fn routes<S: Clone + Send + Sync + 'static>(hub: Arc<Hub>) -> Router<S> {
    Router::new()
        .route("/v1/jobs", get(list))
        .route("/v1/jobs/events", get(list_events))
        .route("/v1/jobs/{id}", get(job))
        .route("/v1/jobs/{id}/rows", get(rows))
        .route("/v1/jobs/{id}/events", get(job_events))
        .route("/v1/jobs/{id}/cancel", post(cancel))
        .route("/v1/jobs/{id}/extend", post(extend))
        .route("/v1/jobs/{id}/retry", post(retry))
        .with_state(hub)
}

/// The body of a request to raise limits.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExtendRequest {
    /// Dollars that the whole job may cost, those already spent among them.
    #[serde(default)]
    #[schemars(extend("exclusiveMinimum" = 0))]
    usd: Option<f64>,
    /// Seconds that the job may take from its start.
    #[serde(default)]
    #[schemars(range(min = 1, max = 315_360_000))]
    deadline_seconds: Option<u64>,
}

/// A body without fields.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NoFields {}

impl ExtendRequest {
    fn checked(self) -> Result<Command, ApiError> {
        let ExtendRequest { usd, deadline_seconds } = self;
        if usd.is_none() && deadline_seconds.is_none() {
            return Err(ApiError::invalid(
                "give `usd` or `deadline_seconds`: the limit to raise",
            ));
        }
        if usd.is_some_and(|usd| !usd.is_finite() || usd <= 0.0) {
            return Err(ApiError::invalid_param(
                "usd",
                "`usd` must be a number of dollars above 0",
            ));
        }
        if deadline_seconds.is_some_and(|seconds| !(1..=DEADLINE_SECONDS_MAX).contains(&seconds)) {
            return Err(ApiError::invalid_param(
                "deadline_seconds",
                format!("`deadline_seconds` must be from 1 to {DEADLINE_SECONDS_MAX}"),
            ));
        }
        Ok(Command::Extend { usd, deadline_seconds })
    }
}

/// The id in a request's path.
struct JobId(String);

impl<S: Send + Sync> FromRequestParts<S> for JobId {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<JobId, ApiError> {
        match Path::<String>::from_request_parts(parts, state).await {
            Ok(Path(id)) => Ok(JobId(id)),
            Err(_) => Err(ApiError::no_job("")),
        }
    }
}

/// The query parameters of a request.
struct Parameters(BTreeMap<String, String>);

impl<S: Send + Sync> FromRequestParts<S> for Parameters {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Parameters, ApiError> {
        match Query::from_request_parts(parts, state).await {
            Ok(Query(parameters)) => Ok(Parameters(parameters)),
            Err(error) => Err(ApiError::invalid(format!("the query is invalid: {error}"))),
        }
    }
}

impl Parameters {
    /// Takes `limit`, a number from 1 to `max`.
    fn limit(&mut self, default: usize, max: usize) -> Result<usize, ApiError> {
        let Some(text) = self.0.remove("limit") else {
            return Ok(default);
        };
        let limit = text.parse().ok().filter(|limit| (1..=max).contains(limit));
        limit.ok_or_else(|| ApiError::invalid_param("limit", format!("`limit` must be a number from 1 to {max}")))
    }

    /// Refuses what nobody has taken.
    fn none_left(self) -> Result<(), ApiError> {
        match self.0.into_keys().next() {
            Some(name) => {
                let shown: String = name.chars().take(40).collect();
                Err(ApiError::invalid(format!("the parameter `{shown}` is not supported")))
            }
            None => Ok(()),
        }
    }
}

async fn list(
    State(hub): State<Arc<Hub>>,
    Extension(viewer): Extension<Viewer>,
    mut parameters: Parameters,
) -> Result<Json<JobList>, ApiError> {
    let limit = parameters.limit(FIRST_PAGE, PAGE_MAX)?;
    let after = parameters.0.remove("after");
    parameters.none_left()?;
    if after.as_ref().is_some_and(|after| !hub.source.is_id(after)) {
        return Err(ApiError::invalid_param("after", "`after` is no id of this list"));
    }
    hub.list(&viewer, after.as_deref(), limit).await.map(Json)
}

async fn job(
    State(hub): State<Arc<Hub>>,
    Extension(viewer): Extension<Viewer>,
    JobId(id): JobId,
) -> Result<Json<JobView>, ApiError> {
    hub.job(&viewer, &id).await.map(Json)
}

async fn rows(
    State(hub): State<Arc<Hub>>,
    Extension(viewer): Extension<Viewer>,
    JobId(id): JobId,
    mut parameters: Parameters,
) -> Result<Json<RowList>, ApiError> {
    let kind = match parameters.0.remove("kind").as_deref() {
        None | Some("failed") => RowKind::Failed,
        Some("answers") => RowKind::Answers,
        Some(_) => {
            return Err(ApiError::invalid_param("kind", "`kind` must be `failed` or `answers`"));
        }
    };
    let limit = parameters.limit(ROWS_DEFAULT, ROWS_MAX)?;
    let after = parameters.0.remove("after").map(|after| after.parse());
    let bad_row = |_| ApiError::invalid_param("after", "`after` must be the number of a row");
    let after = after.transpose().map_err(bad_row)?;
    parameters.none_left()?;
    hub.rows(&viewer, &id, RowQuery { kind, limit, after }).await.map(Json)
}

async fn job_events(
    State(hub): State<Arc<Hub>>,
    Extension(viewer): Extension<Viewer>,
    JobId(id): JobId,
) -> Result<Response, ApiError> {
    hub.job_events(viewer, id).await
}

async fn list_events(State(hub): State<Arc<Hub>>, Extension(viewer): Extension<Viewer>) -> Result<Response, ApiError> {
    hub.list_events(viewer).await
}

async fn cancel(
    State(hub): State<Arc<Hub>>,
    Extension(viewer): Extension<Viewer>,
    JobId(id): JobId,
    body: Body,
) -> Result<Json<JobView>, ApiError> {
    read_body::<NoFields>(body).await?;
    command(&hub, &viewer, &id, Command::Cancel).await
}

async fn extend(
    State(hub): State<Arc<Hub>>,
    Extension(viewer): Extension<Viewer>,
    JobId(id): JobId,
    body: Body,
) -> Result<Json<JobView>, ApiError> {
    let wanted = read_body::<ExtendRequest>(body).await?.checked()?;
    command(&hub, &viewer, &id, wanted).await
}

async fn retry(
    State(hub): State<Arc<Hub>>,
    Extension(viewer): Extension<Viewer>,
    JobId(id): JobId,
    body: Body,
) -> Result<Json<JobView>, ApiError> {
    read_body::<NoFields>(body).await?;
    command(&hub, &viewer, &id, Command::Retry).await
}

/// Does what a viewer asks for, and returns the job as it is then.
async fn command(hub: &Hub, viewer: &Viewer, id: &str, command: Command) -> Result<Json<JobView>, ApiError> {
    // Whether the viewer has the job.
    hub.check_job(viewer, id).await?;
    let done = hub.source.command(viewer, id, command).await;
    // Even a command that failed may have been done.
    hub.note_change(viewer, id).await;
    done?;
    hub.job(viewer, id).await.map(Json)
}

/// Reads a JSON body; an empty one has no field.
async fn read_body<T: DeserializeOwned>(body: Body) -> Result<T, ApiError> {
    let read = tokio::time::timeout(BODY_WITHIN, to_bytes(body, BODY_BYTES_MAX)).await;
    let bytes = read
        .map_err(|_| ApiError::too_slow())?
        .map_err(|_| ApiError::too_large(BODY_BYTES_MAX))?;
    let text: &[u8] = if bytes.is_empty() { b"{}" } else { &bytes };
    serde_json::from_slice(text).map_err(|error| ApiError::invalid(format!("the body is not as it should be: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn limits_to_raise_are_checked() {
        let read = async |text: &str| {
            let request = read_body::<ExtendRequest>(Body::from(text.to_string())).await;
            request
                .and_then(ExtendRequest::checked)
                .map_err(|error| format!("{error:?}"))
        };
        let raised = Command::Extend {
            usd: Some(12.5),
            deadline_seconds: None,
        };
        assert_eq!(read(r#"{"usd":12.5}"#).await, Ok(raised));
        for (text, why) in [
            ("{}", "give `usd`"),
            ("", "give `usd`"),
            (r#"{"usd":0}"#, "above 0"),
            (r#"{"usd":-1}"#, "above 0"),
            (r#"{"usd":1e999}"#, "the body"),
            (r#"{"usd":"1"}"#, "the body"),
            (r#"{"deadline_seconds":0}"#, "from 1 to"),
            (r#"{"deadline_seconds":315360001}"#, "from 1 to"),
            (r#"{"dollars":1}"#, "unknown field"),
            ("[", "the body"),
        ] {
            let error = read(text).await.unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
        let long = format!("{{\"usd\":1{}}}", " ".repeat(BODY_BYTES_MAX));
        assert!(read(&long).await.unwrap_err().contains("larger"));
    }

    #[test]
    fn page_sizes_are_limited() {
        let limit = |text: &str| Parameters(BTreeMap::from([("limit".into(), text.into())])).limit(20, 100);
        assert_eq!(limit("100").ok(), Some(100));
        for text in ["0", "101", "-1", "x", ""] {
            assert!(limit(text).is_err(), "{text}");
        }
        assert_eq!(Parameters(BTreeMap::new()).limit(20, 100).ok(), Some(20));
        assert!(
            Parameters(BTreeMap::from([("order".into(), "asc".into())]))
                .none_left()
                .is_err()
        );
    }
}
