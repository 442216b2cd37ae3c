//! The service's spans: one per request of a client, and one per step of a batch.

use std::time::SystemTime;

use axum::extract::MatchedPath;
use axum::http::{Method, StatusCode};

use super::driver::Moved;
use super::records::BatchKey;
use crate::traces::{TraceSpan, names};
use crate::worker::error_counts::error_kind_name;

/// Endpoints that probes ask every few seconds.
const PROBES: [&str; 2] = ["/healthz", "/readyz"];

/// The span of a request. It shows the route, never the path or the query, which hold ids and
/// whatever a client makes up.
pub(super) struct RequestSpan(Option<TraceSpan>);

impl RequestSpan {
    /// Begins the span of a request that was just received.
    pub(super) fn begin(request: &axum::extract::Request) -> RequestSpan {
        let route = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
        if route.is_some_and(|route| PROBES.contains(&route)) {
            return RequestSpan(None);
        }
        let method = known_method(request.method());
        let name = match route {
            Some(route) => format!("{method} {route}"),
            None => method.to_string(),
        };
        RequestSpan(TraceSpan::of_request(name, request.headers()).map(|mut span| {
            span.set(names::REQUEST_METHOD, method);
            if let Some(route) = route {
                span.set(names::ROUTE, route.to_string());
            }
            span
        }))
    }

    /// Ends the span: the response begins.
    pub(super) fn end(self, status: StatusCode) {
        if let Some(mut span) = self.0 {
            span.set_count(names::STATUS_CODE, status.as_u16().into());
            // A client's own errors are no failures of the service.
            if status.is_server_error() {
                span.fail(status.as_str().to_string());
            }
        }
    }
}

/// The method if HTTP defines it: a client may make up others.
fn known_method(method: &Method) -> &'static str {
    match method.as_str() {
        "GET" => "GET",
        "HEAD" => "HEAD",
        "POST" => "POST",
        "PUT" => "PUT",
        "DELETE" => "DELETE",
        "OPTIONS" => "OPTIONS",
        "PATCH" => "PATCH",
        "CONNECT" => "CONNECT",
        "TRACE" => "TRACE",
        _ => names::OTHER_METHOD,
    }
}

/// Traces a step of a batch, begun at `began`, unless it was only a look.
pub(super) fn note_step(key: &BatchKey, began: SystemTime, moved: &anyhow::Result<Moved>) {
    let outcome = match moved {
        Ok(Moved::Waits) => return,
        Ok(Moved::Changed) => "changed",
        Ok(Moved::Ended) => "ended",
        Err(_) => "failed",
    };
    let Some(mut span) = TraceSpan::root(names::BATCH_STEP, began) else {
        return;
    };
    span.set(names::BATCH, key.id.clone());
    span.set(names::OUTCOME, outcome);
    if let Err(error) = moved {
        span.fail(error_kind_name(error));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_made_up_method_is_no_name() {
        assert_eq!(known_method(&Method::DELETE), "DELETE");
        assert_eq!(known_method(&Method::from_bytes(b"SECRET").unwrap()), "_OTHER");
        for method in [
            Method::GET,
            Method::HEAD,
            Method::POST,
            Method::PUT,
            Method::OPTIONS,
            Method::PATCH,
            Method::CONNECT,
            Method::TRACE,
        ] {
            assert_eq!(known_method(&method), method.as_str());
        }
    }
}
