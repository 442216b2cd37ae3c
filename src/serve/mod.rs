//! The batch service: OpenAI's `/v1/files`, `/v1/batches` and `/v1/models` over object storage, and the
//! dashboard of its batches.
//!
//! A batch becomes a job, whose ledger sees to it that each request is answered once. The service
//! itself keeps nothing in memory that matters: any number of processes may serve one store.
//!
//! * `records`: files and batches in the store, each record created once; `id`: their names.
//! * `driver`: moves batches on, one `step` after another; `check` reads their inputs, `split` keeps
//!   good lines beside broken ones, `results` reads the parts of jobs.
//! * `expiry`: removes what nobody can reach any more.
//! * `files`, `uploads`, `batches`: the endpoints; `request` and `form` read requests, `content`
//!   stores files, `range` cuts downloads, `view` writes responses, `error` refuses.
//! * `jobs`: the batches as the dashboard's jobs.
//! * `webhooks`: tells other servers that batches have ended.
//! * `openapi`: what the service says of itself; `keys`: tenants; `quota`: what they may have;
//!   `models`: the models that are offered; `service`: what all requests share.

mod batches;
mod check;
mod content;
pub mod driver;
mod error;
mod expiry;
mod files;
mod form;
mod id;
mod jobs;
pub mod keys;
pub mod metrics;
pub mod models;
mod openapi;
mod quota;
mod range;
mod record;
mod records;
mod request;
mod results;
pub mod service;
mod split;
mod step;
mod traces;
mod uploads;
mod view;
pub mod webhooks;

use std::sync::Arc;

use axum::extract::{DefaultBodyLimit, MatchedPath, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};

use error::{ApiError, ApiResult};
use keys::Keys;
use request::PathId;
use service::Service;
use traces::RequestSpan;
use view::{ListView, ModelView};

use crate::dashboard::{self, Hub, check_local_request, check_site, show_page};
use crate::worker::metrics::text_response;

/// Whether `text` has the form of a batch's id.
pub(crate) fn is_batch_id(text: &str) -> bool {
    id::is_id(id::BATCH, text)
}

/// The dashboard of the service's batches. `shows_prompts`: whether tenants see prompts and answers
/// on it.
pub fn dashboard_hub(service: Arc<Service>, shows_prompts: bool) -> Arc<Hub> {
    let source = jobs::BatchSource { service };
    Arc::new(Hub::new(Arc::new(source), shows_prompts))
}

/// The service's endpoints.
pub fn router(service: Arc<Service>, dashboard: Arc<Hub>) -> Router {
    let jobs = dashboard::routes(dashboard).layer(middleware::from_fn_with_state(service.clone(), protect_jobs));
    let api = Router::new()
        .route("/v1/files", get(files::list).post(files::upload))
        .route("/v1/files/{id}", get(files::get).delete(files::delete))
        .route("/v1/files/{id}/content", get(files::content))
        .route("/v1/batches", get(batches::list).post(batches::create))
        .route("/v1/batches/{id}", get(batches::get))
        .route("/v1/batches/{id}/cancel", post(batches::cancel))
        .route("/v1/uploads", post(uploads::create))
        .route("/v1/uploads/{id}/parts", post(uploads::add_part))
        .route("/v1/uploads/{id}/complete", post(uploads::complete))
        .route("/v1/uploads/{id}/cancel", post(uploads::cancel))
        .route("/v1/models", get(list_models))
        .route("/v1/models/{id}", get(get_model))
        .merge(jobs)
        // The handlers limit their bodies themselves.
        .layer(DefaultBodyLimit::disable())
        .layer(middleware::from_fn_with_state(service.clone(), protect))
        .layer(middleware::from_fn_with_state(service.clone(), authenticate));
    Router::new()
        .route("/", get(show_page))
        .route("/healthz", get(|| async { "alive\n" }))
        .route("/readyz", get(readiness))
        .route("/openapi.json", get(|| async { Json(openapi::document()) }))
        .merge(api)
        .fallback(no_endpoint)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(service.clone(), account_request))
        .with_state(service)
}

/// The endpoint for the service's metrics, on a port of its own: they are not for clients.
pub fn metrics_router(service: Arc<Service>) -> Router {
    let metrics = move || async move { text_response(service.metrics.render()) };
    Router::new().route("/metrics", get(metrics)).fallback(no_endpoint)
}

/// Refuses requests without a known key, and says which tenant the others are of.
async fn authenticate(State(service): State<Arc<Service>>, mut request: Request, next: Next) -> Response {
    let authorization = request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
    let Some(tenant) = service.keys.tenant(authorization) else {
        let message = match authorization {
            None => "no API key: send `Authorization: Bearer KEY`",
            Some(_) => "the API key is unknown",
        };
        return ApiError::unauthorized(message).into_response();
    };
    request.extensions_mut().insert(jobs::viewer_of(&tenant));
    request.extensions_mut().insert(tenant);
    next.run(request).await
}

/// Without keys, keeps pages of other sites in a browser on this machine from the API.
async fn protect(State(service): State<Arc<Service>>, request: Request, next: Next) -> Response {
    if matches!(service.keys, Keys::Open)
        && let Err(refusal) = check_site(request.method(), request.headers())
    {
        return refusal.into_response();
    }
    next.run(request).await
}

/// As [`protect`], for the dashboard's part of the API.
async fn protect_jobs(State(service): State<Arc<Service>>, request: Request, next: Next) -> Response {
    if matches!(service.keys, Keys::Open)
        && let Err(refusal) = check_local_request(request.method(), request.headers())
    {
        return refusal.into_response();
    }
    next.run(request).await
}

/// Gives each response an id that a client can report, counts it and traces it.
async fn account_request(State(service): State<Arc<Service>>, request: Request, next: Next) -> Response {
    let endpoint = request.extensions().get::<MatchedPath>().cloned();
    let span = RequestSpan::begin(&request);
    let mut response = next.run(request).await;
    span.end(response.status());
    let endpoint = endpoint.as_ref().map_or("other", MatchedPath::as_str);
    service.metrics.count_request(endpoint, response.status().as_u16());
    if let Ok(id) = id::new_id("req_")
        && let Ok(value) = HeaderValue::try_from(id)
    {
        response.headers_mut().insert("x-request-id", value);
    }
    response
}

/// Whether batches can begin. The store is not asked: while it is away, clients get a 503 with
/// `Retry-After`, which says more than a refused connection.
async fn readiness(State(service): State<Arc<Service>>) -> (StatusCode, &'static str) {
    if service.is_ready() {
        (StatusCode::OK, "ready\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "starting: batches wait\n")
    }
}

async fn no_endpoint(request: Request) -> ApiError {
    ApiError::no_endpoint(request.method().as_str(), request.uri().path())
}

async fn wrong_method(request: Request) -> ApiError {
    ApiError::wrong_method(request.method().as_str(), request.uri().path())
}

async fn list_models(State(service): State<Arc<Service>>) -> Json<ListView<ModelView>> {
    let models = service
        .models
        .iter()
        .map(|model| ModelView::new(&model.name, service.started_at));
    Json(ListView::new(models.collect(), |model| &model.id, false))
}

async fn get_model(State(service): State<Arc<Service>>, PathId(name): PathId) -> ApiResult<Json<ModelView>> {
    match service.model(&name) {
        Some(model) => Ok(Json(ModelView::new(&model.name, service.started_at))),
        None => Err(ApiError::not_found("model", &name)),
    }
}
