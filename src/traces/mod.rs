//! Traces for OpenTelemetry: spans that are sent to a collector in the background, if one is named.
//!
//! A span holds names, numbers and kinds of errors; texts of prompts, answers and errors are never
//! among them. Without a collector there is no thread, and each call ends at a look at a cell. Spans
//! of the log (`tracing`) are others: neither depends on the other's filter.
//!
//! * `names`: the names of spans and attributes; `settings`: where spans go, by option and
//!   environment; `collector`: sends them, and says when nobody takes them.
//!
//! See docs/decisions/095-traces-are-spans-of-their-own.md.

mod collector;
pub(crate) mod names;
mod settings;

use std::borrow::Cow;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use axum::http::HeaderMap;
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{Span as _, SpanBuilder, SpanKind, Status, TraceContextExt, Tracer, TracerProvider};
use opentelemetry::{Context, KeyValue, Value};
use opentelemetry_http::HeaderExtractor;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider, Span};

use collector::Health;
use settings::Settings;

/// Maximum time at the end for spans that are not sent yet, and the same if the collector took
/// none lately.
const END_WAIT: Duration = Duration::from_secs(5);
const END_WAIT_AWAY: Duration = Duration::from_secs(1);

/// Set once, if this process sends spans.
static PIPELINE: OnceLock<Pipeline> = OnceLock::new();

struct Pipeline {
    tracer: SdkTracer,
    provider: SdkTracerProvider,
    health: Arc<Health>,
}

/// Starts to send spans, if `endpoint` (the command's option) or the environment names a collector.
///
/// # Errors
/// The settings are invalid; the error is one line.
pub(crate) fn start(endpoint: Option<&str>) -> Result<(), String> {
    let variable = |name: &str| std::env::var(name).ok();
    let Some(settings) = Settings::read(endpoint, &variable)? else {
        return Ok(());
    };
    if let Some(warning) = &settings.warning {
        eprintln!("gristmill: warning: {warning}");
    }
    let health = Arc::new(Health::new(&settings.endpoint));
    let exporter = collector::exporter(&settings.endpoint, health.clone())?;
    let provider = SdkTracerProvider::builder()
        .with_batch_exporter(exporter)
        .with_resource(resource())
        .build();
    let pipeline = Pipeline {
        tracer: provider.tracer("gristmill"),
        provider,
        health,
    };
    PIPELINE
        .set(pipeline)
        .map_err(|_| "traces were started twice".to_string())
}

/// Sends what is left, for a few seconds at most. Spans that end later are dropped.
pub(crate) fn end() {
    let Some(pipeline) = PIPELINE.get() else { return };
    let wait = if pipeline.health.is_away() {
        END_WAIT_AWAY
    } else {
        END_WAIT
    };
    // A failed export is reported by the exporter; an error here says that it has not ended yet.
    if pipeline.provider.shutdown_with_timeout(wait).is_err() {
        pipeline.health.note_unended(wait);
    }
}

/// What all spans of this process have in common: the variables `OTEL_SERVICE_NAME` and
/// `OTEL_RESOURCE_ATTRIBUTES`, and the program's name and version where these leave them open.
fn resource() -> Resource {
    let given = Resource::builder().build();
    let own = [
        ("service.name", env!("CARGO_PKG_NAME")),
        ("service.version", env!("CARGO_PKG_VERSION")),
    ];
    let is_open = |name: &'static str| match given.get(&name.into()) {
        None => true,
        // The library's own default.
        Some(value) => name == "service.name" && value.as_str().starts_with("unknown_service"),
    };
    let missing = own.into_iter().filter(|(name, _)| is_open(name));
    // OpenTelemetry has this variable come before the attributes of the other one, the library does not.
    let service = std::env::var("OTEL_SERVICE_NAME")
        .ok()
        .filter(|name| !name.trim().is_empty());
    Resource::builder()
        .with_attributes(missing.map(|(name, value)| KeyValue::new(name, value)))
        .with_attributes(service.map(|name| KeyValue::new("service.name", name)))
        .build()
}

/// A span that is under way. It ends when it is dropped.
pub(crate) struct TraceSpan {
    span: Span,
    tracer: SdkTracer,
}

impl TraceSpan {
    /// The first span of a new trace, begun at `began`. `None`: no spans are sent, or the sampler
    /// leaves this trace out.
    pub(crate) fn root(name: &'static str, began: SystemTime) -> Option<TraceSpan> {
        let pipeline = PIPELINE.get()?;
        TraceSpan::begin(
            &pipeline.tracer,
            SpanBuilder::from_name(name).with_start_time(began),
            &Context::new(),
        )
    }

    /// The span of a request that was just received. It belongs to the trace that the request's
    /// headers name, if they do.
    pub(crate) fn of_request(name: impl Into<Cow<'static, str>>, headers: &HeaderMap) -> Option<TraceSpan> {
        let pipeline = PIPELINE.get()?;
        let parent = TraceContextPropagator::new().extract_with_context(&Context::new(), &HeaderExtractor(headers));
        let builder = SpanBuilder::from_name(name).with_kind(SpanKind::Server);
        TraceSpan::begin(&pipeline.tracer, builder, &parent)
    }

    fn begin(tracer: &SdkTracer, builder: SpanBuilder, parent: &Context) -> Option<TraceSpan> {
        let span = tracer.build_with_context(builder, parent);
        span.is_recording().then(|| TraceSpan {
            span,
            tracer: tracer.clone(),
        })
    }

    /// Begins a span within this one. `began`: if it began earlier than now.
    pub(crate) fn child(&self, name: impl Into<Cow<'static, str>>, began: Option<SystemTime>) -> TraceSpan {
        let mut builder = SpanBuilder::from_name(name);
        builder.start_time = began;
        let parent = Context::new().with_remote_span_context(self.span.span_context().clone());
        TraceSpan {
            span: self.tracer.build_with_context(builder, &parent),
            tracer: self.tracer.clone(),
        }
    }

    pub(crate) fn set(&mut self, name: &'static str, value: impl Into<Value>) {
        self.span.set_attribute(KeyValue::new(name, value));
    }

    /// Sets a number that is never negative.
    pub(crate) fn set_count(&mut self, name: &'static str, count: u64) {
        self.set(name, i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// Marks what the span stands for as failed. `kind`: a word for the kind of the error, never its
    /// text, which may quote a row.
    pub(crate) fn fail(&mut self, kind: impl Into<Cow<'static, str>>) {
        let kind = kind.into();
        self.set(names::ERROR_TYPE, kind.clone());
        self.span.set_status(Status::error(kind));
    }
}

#[cfg(test)]
pub(crate) mod testing {
    //! Spans that stay in memory.

    use std::sync::{Mutex, PoisonError};

    use opentelemetry_sdk::error::OTelSdkResult;
    use opentelemetry_sdk::trace::{SpanData, SpanExporter};

    use super::*;

    /// The spans that have ended.
    #[derive(Debug, Clone, Default)]
    pub(crate) struct Ended(Arc<Mutex<Vec<SpanData>>>);

    impl SpanExporter for Ended {
        async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(batch);
            Ok(())
        }
    }

    impl Ended {
        pub(crate) fn spans(&self) -> Vec<SpanData> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
        }

        /// The ended span of this name, which must be the only one.
        #[track_caller]
        pub(crate) fn one(&self, name: &str) -> SpanData {
            let mut found = self.spans();
            found.retain(|span| span.name == name);
            assert_eq!(found.len(), 1, "spans called {name}");
            found.remove(0)
        }
    }

    /// An attribute's value as text; empty if it is missing.
    pub(crate) fn value(span: &SpanData, name: &str) -> String {
        let mut attributes = span.attributes.iter();
        let found = attributes.find(|attribute| attribute.key.as_str() == name);
        found.map(|attribute| attribute.value.to_string()).unwrap_or_default()
    }

    /// A tracer whose spans go to `ended`.
    pub(crate) fn tracer(ended: &Ended) -> SdkTracer {
        let provider = SdkTracerProvider::builder().with_simple_exporter(ended.clone()).build();
        provider.tracer("test")
    }

    /// The first span of a trace, begun at `began`.
    pub(crate) fn root(tracer: &SdkTracer, began: SystemTime) -> TraceSpan {
        let builder = SpanBuilder::from_name(names::SHARD).with_start_time(began);
        TraceSpan::begin(tracer, builder, &Context::new()).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{Ended, root, tracer, value};
    use super::*;

    #[test]
    fn without_a_collector_there_is_no_span() {
        assert!(TraceSpan::root(names::SHARD, SystemTime::now()).is_none());
        assert!(TraceSpan::of_request("GET", &HeaderMap::new()).is_none());
        end();
    }

    #[test]
    fn a_child_belongs_to_its_parents_trace() {
        let ended = Ended::default();
        let began = SystemTime::now() - Duration::from_secs(3);
        let parent = root(&tracer(&ended), began);
        let mut child = parent.child(names::OPEN, Some(began));
        child.set_count(names::ROWS, u64::MAX);
        child.fail("unavailable");
        drop(child);
        drop(parent.child(names::READ, None));
        drop(parent);
        let (parent, open, read) = (ended.one("shard"), ended.one("open"), ended.one("read"));
        for child in [&open, &read] {
            assert_eq!(child.span_context.trace_id(), parent.span_context.trace_id());
            assert_eq!(child.parent_span_id, parent.span_context.span_id());
            assert!(!child.parent_span_is_remote);
            assert!(parent.start_time <= child.start_time && child.end_time <= parent.end_time);
        }
        assert_eq!((parent.start_time, open.start_time), (began, began));
        assert!(read.start_time > began);
        assert_eq!(value(&open, "gristmill.rows"), i64::MAX.to_string());
        assert_eq!(value(&open, "error.type"), "unavailable");
        assert_eq!(open.status, Status::error("unavailable"));
        assert_eq!(read.status, Status::Unset);
    }

    #[test]
    fn a_trace_that_the_sampler_leaves_out_costs_no_spans() {
        use opentelemetry_sdk::trace::Sampler;
        let ended = Ended::default();
        let provider = SdkTracerProvider::builder()
            .with_simple_exporter(ended.clone())
            .with_sampler(Sampler::AlwaysOff)
            .build();
        let begun = TraceSpan::begin(
            &provider.tracer("test"),
            SpanBuilder::from_name(names::SHARD),
            &Context::new(),
        );
        assert!(begun.is_none());
        assert!(ended.spans().is_empty());
    }

    #[test]
    fn a_request_continues_the_trace_that_it_names() {
        let ended = Ended::default();
        let mut headers = HeaderMap::new();
        let trace = "0af7651916cd43dd8448eb211c80319c";
        headers.insert(
            "traceparent",
            format!("00-{trace}-b7ad6b7169203331-01").parse().unwrap(),
        );
        let parent = TraceContextPropagator::new().extract_with_context(&Context::new(), &HeaderExtractor(&headers));
        drop(TraceSpan::begin(
            &tracer(&ended),
            SpanBuilder::from_name("GET /v1/models"),
            &parent,
        ));
        let span = ended.one("GET /v1/models");
        assert_eq!(span.span_context.trace_id().to_string(), trace);
        assert_eq!(span.parent_span_id.to_string(), "b7ad6b7169203331");
    }

    #[test]
    fn the_resource_names_program_and_version() {
        let resource = resource();
        let of = |name: &'static str| resource.get(&name.into()).map(|value| value.to_string());
        assert_eq!(of("service.version").as_deref(), Some(env!("CARGO_PKG_VERSION")));
        // Unless whoever runs the tests has named the service.
        if std::env::var_os("OTEL_SERVICE_NAME").is_none() && std::env::var_os("OTEL_RESOURCE_ATTRIBUTES").is_none() {
            assert_eq!(of("service.name").as_deref(), Some("gristmill"));
        }
    }
}
