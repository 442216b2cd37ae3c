//! The proxy itself: a thread with a runtime of its own, so that tests with and without one can use it.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use futures::stream;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, IF_MATCH, IF_NONE_MATCH};
use hyper::service::service_fn;
use hyper::{StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use super::counters::{Counters, Kind};
use super::plan::{Fault, Plan, Request};

type Body = BoxBody<Bytes, io::Error>;
type Response = hyper::Response<Body>;

/// A running proxy; it ends when dropped, and delayed puts that did not happen by then never do.
pub(crate) struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    /// `host:port` of the store.
    upstream: String,
    client: Client<HttpConnector, Full<Bytes>>,
    plan: Mutex<Plan>,
    counters: Mutex<Counters>,
}

impl Proxy {
    /// Starts a proxy before `upstream` (`http://host:port`) on a free port of this machine.
    pub(crate) fn start(upstream: &str, plan: Plan) -> Proxy {
        let upstream = upstream.trim_start_matches("http://").trim_end_matches('/').to_string();
        let shared = Arc::new(Shared {
            upstream,
            // No idle connections: after the store was killed they would be dead ones, and the fault not the plan's.
            client: Client::builder(TokioExecutor::new())
                .pool_max_idle_per_host(0)
                .build(HttpConnector::new()),
            plan: Mutex::new(plan),
            counters: Mutex::default(),
        });
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        listener.set_nonblocking(true).expect("a socket that does not block");
        let address = listener.local_addr().expect("a bound socket has an address");
        let (stop, stopped) = oneshot::channel();
        let serving = shared.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async move {
                let listener = TcpListener::from_std(listener).expect("a listening socket");
                tokio::select! {
                    () = accept(listener, serving) => {}
                    _ = stopped => {}
                }
            });
        });
        Proxy {
            address,
            shared,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    /// `http://host:port`, for `AWS_ENDPOINT_URL`.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// From the next request on, this plan holds.
    pub(crate) fn set_plan(&self, plan: Plan) {
        *locked(&self.shared.plan) = plan;
    }

    /// The sums up to now.
    pub(crate) fn counters(&self) -> Counters {
        locked(&self.shared.counters).clone()
    }

    /// The sums up to now; counting starts anew.
    pub(crate) fn take_counters(&self) -> Counters {
        std::mem::take(&mut *locked(&self.shared.counters))
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            // The thread may have ended by a panic of its own, which the join below shows.
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
            && !std::thread::panicking()
        {
            panic!("the proxy's thread panicked");
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no holder panics")
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    loop {
        let (stream, _) = listener.accept().await.expect("connections can be accepted");
        let shared = shared.clone();
        tokio::spawn(async move {
            if let Err(error) = serve(stream, shared).await {
                eprintln!("proxy: {error}");
            }
        });
    }
}

async fn serve(stream: TcpStream, shared: Arc<Shared>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    // A second handle on the socket: set to linger for nothing, its close becomes a reset.
    let stream = stream.into_std()?;
    let handle = Arc::new(TcpStream::from_std(stream.try_clone()?)?);
    let stream = TcpStream::from_std(stream)?;
    let service = service_fn(|request| {
        let (shared, handle) = (shared.clone(), handle.clone());
        async move {
            let answer = answer(request, shared).await;
            if answer.is_err() {
                handle.set_zero_linger()?;
            }
            answer
        }
    });
    // Ends with an error whenever a fault, or the client, breaks the connection: nothing that a test would want to know.
    let _ = hyper::server::conn::http1::Builder::new()
        .serve_connection(TokioIo::new(stream), service)
        .await;
    Ok(())
}

/// The answer to one request; an error resets the connection.
async fn answer(request: hyper::Request<Incoming>, shared: Arc<Shared>) -> io::Result<Response> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    let target = head
        .uri
        .path_and_query()
        .map_or("/", |found| found.as_str())
        .to_string();
    let seen = Request {
        method: head.method.to_string(),
        conditional: head.headers.contains_key(IF_MATCH) || head.headers.contains_key(IF_NONE_MATCH),
        target,
    };
    let fault = locked(&shared.plan).decide(&seen);
    {
        let mut counters = locked(&shared.counters);
        let kind = Kind::of(&seen.target);
        *counters.requests.entry((seen.method.clone(), kind)).or_default() += 1;
        if let Some(fault) = &fault {
            *counters.faults.entry(fault.name()).or_default() += 1;
        }
        let signed = head.headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        if let Some(key) = signed.and_then(access_key) {
            *counters.access_keys.entry(key.to_string()).or_default() += 1;
        }
    }
    // A task of its own: once sent, a request is applied even when the client leaves.
    let forward = async || match tokio::spawn(forward(shared.clone(), head.clone(), body.clone())).await {
        Ok(answered) => answered,
        Err(panicked) => Err(io::Error::other(panicked)),
    };
    match fault {
        None => whole(forward().await?),
        Some(Fault::ErrorBefore(status)) => error(status, "InternalError"),
        Some(Fault::Conflict) => error(409, "ConditionalRequestConflict"),
        Some(Fault::SlowDown) => error(429, "SlowDown"),
        Some(Fault::ResetBefore) => Err(io::Error::other("reset by plan")),
        Some(Fault::ErrorAfter(status)) => {
            forward().await?;
            error(status, "InternalError")
        }
        Some(Fault::ResetAfter) => {
            forward().await?;
            Err(io::Error::other("reset by plan"))
        }
        Some(Fault::Truncate) => half(forward().await?),
        Some(Fault::StallBefore(time)) => {
            tokio::time::sleep(time).await;
            whole(forward().await?)
        }
        Some(Fault::StallAfter(time)) => {
            let answered = forward().await?;
            tokio::time::sleep(time).await;
            whole(answered)
        }
        Some(Fault::Delayed(time)) => {
            tokio::spawn(late(time, shared.clone(), head, body));
            error(500, "InternalError")
        }
    }
}

/// Sends a request that its client believes lost.
async fn late(time: Duration, shared: Arc<Shared>, head: hyper::http::request::Parts, body: Bytes) {
    tokio::time::sleep(time).await;
    if let Err(error) = forward(shared, head, body).await {
        eprintln!("proxy: a delayed put did not arrive: {error}");
    }
}

/// The store's own answer, its body complete.
async fn forward(
    shared: Arc<Shared>,
    head: hyper::http::request::Parts,
    body: Bytes,
) -> io::Result<hyper::Response<Bytes>> {
    let target = head.uri.path_and_query().map_or("/", |found| found.as_str());
    let uri = format!("http://{}{target}", shared.upstream);
    let mut request = hyper::Request::new(Full::new(body));
    *request.method_mut() = head.method.clone();
    *request.uri_mut() = uri.parse::<Uri>().map_err(io::Error::other)?;
    *request.headers_mut() = head.headers.clone();
    let (answered, body) = shared
        .client
        .request(request)
        .await
        .map_err(io::Error::other)?
        .into_parts();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    Ok(hyper::Response::from_parts(answered, body))
}

fn whole(answered: hyper::Response<Bytes>) -> io::Result<Response> {
    Ok(answered.map(full))
}

fn full(bytes: Bytes) -> Body {
    Full::new(bytes).map_err(|never: Infallible| match never {}).boxed()
}

/// The answer with half of its body, and then the end of the connection.
fn half(answered: hyper::Response<Bytes>) -> io::Result<Response> {
    let length = answered.body().len();
    if length == 0 {
        return Err(io::Error::other("reset by plan: no body to cut"));
    }
    let mut answered = answered.map(|body| {
        let first = Ok(Frame::data(body.slice(..length / 2)));
        let cut = Err(io::Error::other("cut by plan"));
        BodyExt::boxed(StreamBody::new(stream::iter([first, cut])))
    });
    // Without it the body would go out in chunks: the client must know what is missing.
    answered.headers_mut().insert("content-length", length.into());
    Ok(answered)
}

fn error(status: u16, code: &str) -> io::Result<Response> {
    let text = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?><Error><Code>{code}</Code><Message>by plan</Message></Error>"
    );
    let status = StatusCode::from_u16(status).map_err(io::Error::other)?;
    let response = hyper::Response::builder()
        .status(status)
        .header(CONTENT_TYPE, "application/xml");
    response.body(full(text.into())).map_err(io::Error::other)
}

/// The access key that signed a request.
fn access_key(authorization: &str) -> Option<&str> {
    authorization.split_once("Credential=")?.1.split('/').next()
}
