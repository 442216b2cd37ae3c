//! Errors of the API in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::view::{ErrorBody, ErrorView};
use crate::error_line::one_line;
use crate::ledger::LedgerError;

/// Seconds after which a client may try again when the store is away.
const RETRY_AFTER_SECONDS: u64 = 5;
/// Seconds after which a client may try again when its tenant has too many batches. OpenAI's client
/// waits for up to a minute.
const LIMIT_RETRY_AFTER_SECONDS: u64 = 30;

/// An error response.
#[derive(Debug)]
pub(super) struct ApiError {
    status: StatusCode,
    /// OpenAI's `type`.
    kind: &'static str,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
    retry_after: Option<u64>,
}

pub(super) type ApiResult<T> = Result<T, ApiError>;

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> ApiError {
        ApiError {
            status,
            kind,
            message: message.into(),
            param: None,
            code: None,
            retry_after: None,
        }
    }

    /// 400: the request is invalid.
    pub(super) fn invalid(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 400: the value of `param` is invalid.
    pub(super) fn invalid_param(param: &str, message: impl Into<String>) -> ApiError {
        ApiError {
            param: Some(param.into()),
            ..ApiError::invalid(message)
        }
    }

    /// 401: no key, or an unknown one.
    pub(super) fn unauthorized(message: impl Into<String>) -> ApiError {
        ApiError {
            code: Some("invalid_api_key"),
            ..ApiError::new(StatusCode::UNAUTHORIZED, "invalid_request_error", message)
        }
    }

    /// 404: there is no such object. Only for objects that never were, or were deleted: a client
    /// may submit again after it.
    pub(super) fn not_found(what: &str, id: &str) -> ApiError {
        let shown: String = id.chars().take(80).collect();
        ApiError {
            param: Some("id".into()),
            ..ApiError::new(
                StatusCode::NOT_FOUND,
                "invalid_request_error",
                format!("no such {what}: `{shown}`"),
            )
        }
    }

    /// 404: there is no such endpoint.
    pub(super) fn no_endpoint(method: &str, path: &str) -> ApiError {
        let path: String = path.chars().take(200).collect();
        let hint = match path.as_str() {
            "/v1/chat/completions" | "/v1/completions" | "/v1/responses" => {
                "; requests come in batches: POST /v1/files, then POST /v1/batches"
            }
            _ => "",
        };
        let message = format!("no such endpoint: {method} {path}{hint}");
        ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
    }

    /// 405: the endpoint has other methods.
    pub(super) fn wrong_method(method: &str, path: &str) -> ApiError {
        let message = format!("{path} does not support {method}");
        ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
    }

    /// 408: the client sends its request too slowly.
    pub(super) fn too_slow() -> ApiError {
        let message = "the request's body did not arrive in time";
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message)
    }

    /// 409: the object's state does not allow the request.
    pub(super) fn conflict(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::CONFLICT, "invalid_request_error", message)
    }

    /// 413: the body is larger than `limit` bytes.
    pub(super) fn too_large(limit: u64) -> ApiError {
        let message = format!("the request's body is larger than the {limit} bytes that this endpoint accepts");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
    }

    /// 429: the tenant has as much as it may have.
    pub(super) fn over_limit(message: impl Into<String>) -> ApiError {
        ApiError {
            code: Some("rate_limit_exceeded"),
            retry_after: Some(LIMIT_RETRY_AFTER_SECONDS),
            ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, "requests", message)
        }
    }

    /// 500: what the service has stored is damaged; trying again does not help.
    pub(super) fn internal() -> ApiError {
        let message = "the service cannot read what it has stored; its log says why";
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// 503: this process does as much as it can.
    pub(super) fn busy() -> ApiError {
        ApiError {
            retry_after: Some(RETRY_AFTER_SECONDS),
            ..ApiError::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "server_error",
                "too many uploads at once; try again",
            )
        }
    }

    /// 503: the store is away; nothing is wrong with the request.
    pub(super) fn unavailable() -> ApiError {
        ApiError {
            retry_after: Some(RETRY_AFTER_SECONDS),
            ..ApiError::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "server_error",
                "the service cannot reach its storage at the moment; try again",
            )
        }
    }
}

impl From<LedgerError> for ApiError {
    /// The details go to the log: they may name buckets and paths.
    fn from(error: LedgerError) -> ApiError {
        let is_passing = matches!(error, LedgerError::Retryable { .. } | LedgerError::Denied { .. });
        tracing::warn!("a request could not be answered: {}", one_line(&error.into()));
        if is_passing {
            ApiError::unavailable()
        } else {
            ApiError::internal()
        }
    }
}

impl ApiError {
    /// The body of the response.
    pub(super) fn body(self) -> Json<ErrorView> {
        Json(ErrorView {
            error: ErrorBody {
                message: self.message,
                kind: self.kind,
                param: self.param,
                code: self.code,
            },
        })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let (status, retry_after) = (self.status, self.retry_after);
        let mut response = (status, self.body()).into_response();
        if let Some(seconds) = retry_after {
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if status == StatusCode::UNAUTHORIZED {
            let bearer = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, bearer);
        }
        response
    }
}
