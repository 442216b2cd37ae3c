//! Errors of the dashboard's API, in the form that OpenAI's API has:
//! `{"error": {"message", "type", "param", "code"}}`.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::error_line::one_line;
use crate::ledger::LedgerError;

/// Seconds after which a client may try again.
const RETRY_AFTER_SECONDS: u64 = 5;

/// An error response.
#[derive(Debug)]
pub struct ApiError {
    status: StatusCode,
    message: String,
    param: Option<&'static str>,
    code: Option<&'static str>,
}

impl ApiError {
    fn new(status: StatusCode, message: impl Into<String>) -> ApiError {
        ApiError {
            status,
            message: message.into(),
            param: None,
            code: None,
        }
    }

    /// 400: the request is invalid.
    pub(super) fn invalid(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, message)
    }

    /// 400: the value of `param` is invalid.
    pub fn invalid_param(param: &'static str, message: impl Into<String>) -> ApiError {
        ApiError {
            param: Some(param),
            ..ApiError::invalid(message)
        }
    }

    /// 401: no key, or an unknown one.
    pub fn unauthorized(message: impl Into<String>) -> ApiError {
        ApiError {
            code: Some("invalid_api_key"),
            ..ApiError::new(StatusCode::UNAUTHORIZED, message)
        }
    }

    /// 403: nobody may do this here.
    pub fn forbidden(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::FORBIDDEN, message)
    }

    /// 404: the viewer has no such job.
    pub(super) fn no_job(id: &str) -> ApiError {
        let shown: String = id.chars().take(80).collect();
        ApiError {
            param: Some("id"),
            ..ApiError::new(StatusCode::NOT_FOUND, format!("no such job: `{shown}`"))
        }
    }

    /// 404: there is no such endpoint.
    pub fn no_endpoint(method: &str, path: &str) -> ApiError {
        let path: String = path.chars().take(200).collect();
        ApiError::new(StatusCode::NOT_FOUND, format!("no such endpoint: {method} {path}"))
    }

    /// 405: the endpoint has other methods.
    pub fn wrong_method(method: &str, path: &str) -> ApiError {
        ApiError::new(
            StatusCode::METHOD_NOT_ALLOWED,
            format!("{path} does not support {method}"),
        )
    }

    /// 408: the client sends its request too slowly.
    pub(super) fn too_slow() -> ApiError {
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "the request's body did not arrive in time")
    }

    /// 409: the job's state does not allow this.
    pub fn conflict(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::CONFLICT, message)
    }

    /// 413: the body is too large.
    pub(super) fn too_large(limit: usize) -> ApiError {
        let message = format!("the request's body is larger than the {limit} bytes that this endpoint accepts");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    }

    /// 500: something that must not happen has happened. The reason goes to the log.
    pub fn internal(why: String) -> ApiError {
        tracing::error!("a request could not be answered: {why}");
        ApiError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the server made a mistake; its log says which",
        )
    }

    /// Whether the same request may succeed later.
    pub(super) fn is_passing(&self) -> bool {
        self.status == StatusCode::SERVICE_UNAVAILABLE
    }

    /// 503: this process serves as many listeners as it can.
    pub(super) fn busy() -> ApiError {
        ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "too many pages listen for events at once; try again",
        )
    }
}

impl From<LedgerError> for ApiError {
    /// The details go to the log: they may name buckets and paths.
    fn from(error: LedgerError) -> ApiError {
        let is_passing = is_passing(&error);
        tracing::warn!("a request could not be answered: {}", one_line(&error.into()));
        if is_passing {
            ApiError::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "the store cannot be reached at the moment; try again",
            )
        } else {
            ApiError::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "what is stored cannot be read; the log says why",
            )
        }
    }
}

/// Whether the same request may succeed later.
pub(super) fn is_passing(error: &LedgerError) -> bool {
    matches!(error, LedgerError::Retryable { .. } | LedgerError::Denied { .. })
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = self.status;
        let kind = if status.is_server_error() {
            "server_error"
        } else {
            "invalid_request_error"
        };
        let error = json!({"message": self.message, "type": kind, "param": self.param, "code": self.code});
        let mut response = (status, Json(json!({ "error": error }))).into_response();
        let headers = response.headers_mut();
        match status {
            StatusCode::SERVICE_UNAVAILABLE => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER_SECONDS));
            }
            StatusCode::UNAUTHORIZED => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            _ => {}
        }
        response
    }
}
