//! Sends spans to a collector, and says once when it takes none, and once when it takes them again.
//!
//! The library calls the exporter on a thread of its own, with a bounded queue before it: what does
//! not fit is dropped, so that a slow collector slows nothing else.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use opentelemetry_http::{HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{Protocol, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{SpanData, SpanExporter};
use tokio::runtime::Handle;
use url::Url;

use crate::dataset::store::clients::redacted;
use crate::dataset::store::error::cause;

/// Timeout of one post, and of all tries of a batch together.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of a response: a collector has little to say.
const RESPONSE_BYTES_MAX: usize = 64 << 10;

/// The exporter of spans, posting to `endpoint`. To be called within the runtime that posts.
///
/// # Errors
/// The client cannot be built; the error is one line.
pub(super) fn exporter(endpoint: &Url, health: Arc<Health>) -> Result<CollectorExporter, String> {
    let client =
        client(endpoint, health.clone()).map_err(|error| format!("traces cannot be sent: {}", cause(&error)))?;
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_http()
        .with_http_client(client)
        .with_endpoint(endpoint.as_str())
        .with_protocol(Protocol::HttpBinary)
        .with_timeout(TIMEOUT)
        .build();
    let exporter = exporter.map_err(|error| format!("traces cannot be sent: {error}"))?;
    Ok(CollectorExporter { exporter, health })
}

fn client(endpoint: &Url, health: Arc<Health>) -> reqwest::Result<CollectorClient> {
    let client = reqwest::Client::builder()
        .user_agent(concat!("gristmill/", env!("CARGO_PKG_VERSION")))
        .timeout(TIMEOUT)
        .http1_only()
        .https_only(endpoint.scheme() != "http")
        // Headers may hold a key, which is for this address alone.
        .redirect(reqwest::redirect::Policy::none())
        .build()?;
    Ok(CollectorClient {
        client,
        runtime: Handle::current(),
        health,
    })
}

/// The library's exporter, watched for failures.
#[derive(Debug)]
pub(super) struct CollectorExporter {
    exporter: opentelemetry_otlp::SpanExporter,
    health: Arc<Health>,
}

impl SpanExporter for CollectorExporter {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len() as u64;
        let sent = self.exporter.export(batch).await;
        match &sent {
            Ok(()) => self.health.note_sent(),
            Err(error) => self.health.note_lost(spans, &error.to_string()),
        }
        sent
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn shutdown(&self) -> OTelSdkResult {
        self.exporter.shutdown()
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

/// Posts on the program's runtime, since the exporter's thread has none.
#[derive(Debug)]
struct CollectorClient {
    client: reqwest::Client,
    runtime: Handle,
    health: Arc<Health>,
}

#[async_trait]
impl HttpClient for CollectorClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let client = self.client.clone();
        let posting = self.runtime.spawn(async move { post(&client, request).await });
        let posted = posting.await.map_err(HttpError::from).and_then(|posted| posted);
        match &posted {
            Ok(response) if response.status().is_success() => {}
            Ok(response) => self.health.note_cause(format!("it answered {}", response.status())),
            Err(error) => self.health.note_cause(cause(error.as_ref())),
        }
        posted
    }
}

async fn post(client: &reqwest::Client, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
    let mut response = client.execute(reqwest::Request::try_from(request)?).await?;
    let mut body = BytesMut::new();
    while let Some(chunk) = response.chunk().await? {
        if body.len() + chunk.len() > RESPONSE_BYTES_MAX {
            return Err(format!("its response has more than {RESPONSE_BYTES_MAX} bytes").into());
        }
        body.extend_from_slice(&chunk);
    }
    let mut answer = Response::new(body.freeze());
    *answer.status_mut() = response.status();
    *answer.headers_mut() = response.headers().clone();
    Ok(answer)
}

/// Whether the collector takes spans. Tells the user when that changes.
#[derive(Debug)]
pub(super) struct Health {
    /// The collector's address without secrets.
    address: String,
    state: Mutex<HealthState>,
}

#[derive(Debug, Default)]
struct HealthState {
    is_away: bool,
    /// Number of spans of failed posts since then.
    lost: u64,
    /// Why the last post failed.
    cause: Option<String>,
}

impl Health {
    pub(super) fn new(endpoint: &Url) -> Health {
        Health {
            address: redacted(endpoint),
            state: Mutex::default(),
        }
    }

    /// Whether the last batch of spans was lost.
    pub(super) fn is_away(&self) -> bool {
        self.state().is_away
    }

    fn note_cause(&self, cause: String) {
        self.state().cause = Some(cause);
    }

    /// A batch was taken.
    fn note_sent(&self) {
        let ended = std::mem::take(&mut *self.state());
        if ended.is_away {
            tracing::warn!(
                "traces: `{}` takes spans again; at least {} were lost",
                self.address,
                ended.lost
            );
        }
    }

    /// A batch of `spans` was lost. `why`: what the library says, if no post says more.
    fn note_lost(&self, spans: u64, why: &str) {
        let (is_news, cause) = {
            let mut state = self.state();
            state.lost += spans;
            let is_news = !std::mem::replace(&mut state.is_away, true);
            (is_news, state.cause.take())
        };
        if is_news {
            tracing::warn!(
                "traces: `{}` takes no spans: {}; the work goes on without them",
                self.address,
                cause.as_deref().unwrap_or(why)
            );
        }
    }

    /// The process ends, and spans wait after `wait`.
    pub(super) fn note_unended(&self, wait: Duration) {
        self.note_lost(0, &format!("no answer within {} s", wait.as_secs()));
    }

    fn state(&self) -> MutexGuard<'_, HealthState> {
        // Every change is a single step, so the state is consistent even after a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::time::SystemTime;

    use opentelemetry::trace::TracerProvider;
    use opentelemetry_sdk::trace::SdkTracerProvider;

    use super::*;
    use crate::traces::testing::root;

    /// A collector that answers one request after another with these.
    fn collector(answers: &'static [&'static str]) -> Url {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!(
            "http://127.0.0.1:{}/v1/traces?key=hunter2",
            listener.local_addr().unwrap().port()
        );
        std::thread::spawn(move || {
            for (answer, stream) in answers.iter().zip(listener.incoming()) {
                let mut stream = stream.unwrap();
                let mut bytes = vec![0; 64 << 10];
                let _ = stream.read(&mut bytes).unwrap();
                let head = format!("HTTP/1.1 {answer}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
                stream.write_all(head.as_bytes()).unwrap();
            }
        });
        Url::parse(&url).unwrap()
    }

    /// Ends a span and has it sent, by the thread that the library makes.
    async fn send_one(provider: &SdkTracerProvider) -> OTelSdkResult {
        drop(root(&provider.tracer("test"), SystemTime::now()));
        let provider = provider.clone();
        tokio::task::spawn_blocking(move || provider.force_flush())
            .await
            .unwrap()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn a_collector_that_refuses_is_away_until_it_takes_spans() {
        let url = collector(&["400 Bad Request", "400 Bad Request", "200 OK"]);
        let health = Arc::new(Health::new(&url));
        assert!(!health.address.contains("hunter2"), "{}", health.address);
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter(&url, health.clone()).unwrap())
            .build();
        for lost in 1..=2 {
            assert!(send_one(&provider).await.is_err());
            assert!(health.is_away());
            assert_eq!(health.state().lost, lost);
        }
        send_one(&provider).await.unwrap();
        assert!(!health.is_away());
        assert_eq!(health.state().lost, 0);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn a_cause_is_what_the_post_says() {
        let url = collector(&["302 Found\r\nLocation: http://127.0.0.1:1/"]);
        let health = Arc::new(Health::new(&url));
        let posts = client(&url, health.clone()).unwrap();
        let request = || Request::post(url.as_str()).body(Bytes::new()).unwrap();
        assert_eq!(posts.send_bytes(request()).await.unwrap().status(), 302);
        assert_eq!(health.state().cause.as_deref(), Some("it answered 302 Found"));
        // Nobody listens any more.
        assert!(posts.send_bytes(request()).await.is_err());
        let refused = health.state().cause.clone().unwrap();
        assert!(refused.contains("refused"), "{refused}");
    }

    #[test]
    fn each_change_is_one_line() {
        use std::sync::atomic::{AtomicUsize, Ordering};
        use tracing_subscriber::layer::SubscriberExt;

        #[derive(Clone, Default)]
        struct Lines(Arc<AtomicUsize>);
        impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Lines {
            fn on_event(&self, _: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }

        let lines = Lines::default();
        let health = Health::new(&Url::parse("http://collector:4318").unwrap());
        tracing::subscriber::with_default(tracing_subscriber::registry().with(lines.clone()), || {
            let said = |expected| assert_eq!(lines.0.load(Ordering::Relaxed), expected);
            health.note_sent();
            said(0);
            for _ in 0..3 {
                health.note_lost(5, "x");
                said(1);
            }
            health.note_unended(END);
            said(1);
            health.note_sent();
            health.note_sent();
            said(2);
            health.note_unended(END);
            said(3);
        });
    }

    const END: Duration = Duration::from_secs(5);
}
