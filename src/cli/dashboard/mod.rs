//! `gristmill dashboard`: shows jobs on a page in the browser, from their outputs alone. `outputs` finds
//! them.

mod outputs;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow};
use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;

use crate::cli::args::DashboardArgs;
use crate::cli::dashboard::outputs::OutputSource;
use crate::cli::exit::{Exit, Failure};
use crate::cli::setup::stop_on_signals;
use crate::dashboard::{self, ApiError, Hub, Viewer, check_local_request, show_page};
use crate::http::{self, HttpLimits};
use crate::serve::keys::Keys;
use crate::worker::stop::Stop;

const HTTP_LIMITS: HttpLimits = HttpLimits {
    connections: 256,
    header_timeout: Duration::from_secs(30),
    drain_timeout: Duration::from_secs(5),
};

pub(super) async fn dashboard(args: DashboardArgs) -> Result<Exit, Failure> {
    let stop = Stop::default();
    stop_on_signals(stop.clone())?;
    let keys = keys(&args)?;
    let source = OutputSource::open(&args).await?;
    let hub = Arc::new(Hub::new(Arc::new(source), args.prompts));
    let listener = bind(args.listen).await?;
    eprintln!("gristmill shows its jobs at http://{}/", listener.local_addr()?);
    let closing = {
        let (stop, hub) = (stop.clone(), hub.clone());
        async move {
            stop.wait().await;
            hub.close();
        }
    };
    http::serve(listener, router(hub, Arc::new(keys)), HTTP_LIMITS, closing).await;
    Ok(Exit::Interrupted)
}

async fn bind(address: SocketAddr) -> Result<TcpListener, Failure> {
    let bound = TcpListener::bind(address).await;
    bound
        .with_context(|| format!("`--listen`: cannot listen at {address}"))
        .map_err(Failure::bad_job)
}

/// The accepted keys. Without keys, only this machine may reach the port.
fn keys(args: &DashboardArgs) -> Result<Keys, Failure> {
    let bad = |why: String| Failure::bad_job(anyhow!(why));
    match &args.keys {
        Some(path) => Keys::load(path).map_err(bad),
        None if args.listen.ip().is_loopback() => Ok(Keys::Open),
        None => Err(bad(format!(
            "`--listen {}` shows the jobs to everybody who reaches it: give `--keys FILE`, or listen at a port of this \
             machine alone",
            args.listen
        ))),
    }
}

fn router(hub: Arc<Hub>, keys: Arc<Keys>) -> Router {
    let api = dashboard::routes(hub).layer(middleware::from_fn_with_state(keys, admit));
    Router::new()
        .route("/", get(show_page))
        .merge(api)
        .fallback(no_endpoint)
        .method_not_allowed_fallback(wrong_method)
}

/// Refuses requests without a known key, or without keys those that may come from pages of other
/// sites. Each key sees all jobs.
async fn admit(State(keys): State<Arc<Keys>>, mut request: Request, next: Next) -> Response {
    let authorization = request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
    let admitted = match (&*keys, keys.tenant(authorization)) {
        (Keys::Open, _) => check_local_request(request.method(), request.headers()),
        (Keys::Listed(_), Some(_)) => Ok(()),
        (Keys::Listed(_), None) => Err(ApiError::unauthorized(match authorization {
            None => "no key: send `Authorization: Bearer KEY`",
            Some(_) => "the key is unknown",
        })),
    };
    if let Err(refusal) = admitted {
        return refusal.into_response();
    }
    request.extensions_mut().insert(Viewer("everybody".into()));
    next.run(request).await
}

async fn no_endpoint(request: Request) -> ApiError {
    ApiError::no_endpoint(request.method().as_str(), request.uri().path())
}

async fn wrong_method(request: Request) -> ApiError {
    ApiError::wrong_method(request.method().as_str(), request.uri().path())
}
