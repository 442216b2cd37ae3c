//! Logging to stderr: filtered by `RUST_LOG`, escaped, without crates that log passwords, as text
//! for people or as JSON for machines.
//!
//! A message is a whole sentence that names its job and shard, so the text form leaves out spans
//! and the fields that repeat them; the JSON form has both.
//!
//! See docs/decisions/089-a-log-line-is-a-sentence-and-its-fields.md.

use std::fmt::{self, Debug};
use std::io::IsTerminal;

use clap::ValueEnum;
use serde_json::{Map, Value};
use tracing::field::Field;
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::fmt::format::{JsonFields, Writer, debug_fn};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, FormattedFields, MakeWriter};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

use crate::printable::{Log, printable};
use crate::say;

/// Crates that log data sent to RabbitMQ and data that a broker returns, both of which may contain
/// the password as text or bytes. `queue/rabbitmq/` reports their errors.
const PASSWORD_CRATES: &[&str] = &["lapin", "amq_protocol", "async_rs"];

/// Fields whose values are part of the messages.
const FIELDS_IN_MESSAGES: &[&str] = &[
    "job", "job_id", "shard", "worker", "attempt", "output", "queue", "place",
];

/// The form of lines on stderr.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum LogFormat {
    /// Sentences for people
    Text,
    /// One JSON object per line
    Json,
}

/// Initializes the program's log. `default`: the filter without `RUST_LOG`.
pub(super) fn init(format: LogFormat, default: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    match format {
        LogFormat::Text => {
            let colours = std::io::stderr().is_terminal();
            text_subscriber(filter, move || Log { colours }, colours).init();
        }
        LogFormat::Json => {
            // Lines for stderr are printed in both forms, whatever `RUST_LOG` says.
            let filter = match format!("{}=info", say::LOG_TARGET).parse() {
                Ok(directive) => filter.add_directive(directive),
                Err(_) => filter,
            };
            json_subscriber(filter, || Log { colours: false }).init();
            say::log_stderr();
            std::panic::set_hook(Box::new(|panic| say::error(format_args!("{panic}"))));
        }
    }
}

fn text_subscriber<W>(filter: EnvFilter, writer: W, ansi: bool) -> impl Subscriber + Send + Sync + 'static
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    tracing_subscriber::fmt()
        .fmt_fields(debug_fn(text_field))
        .with_env_filter(filter)
        .with_writer(writer)
        .with_ansi(ansi)
        .finish()
        .with(filter_fn(|metadata| {
            metadata.is_event() && is_free_of_passwords(metadata)
        }))
}

fn json_subscriber<W>(filter: EnvFilter, writer: W) -> impl Subscriber + Send + Sync + 'static
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    tracing_subscriber::fmt()
        .fmt_fields(JsonFields::new())
        .with_ansi(false)
        .event_format(JsonLine)
        .with_env_filter(filter)
        .with_writer(writer)
        .finish()
        .with(filter_fn(is_free_of_passwords))
}

/// Whether the event cannot show a password. Other events are dropped even if `RUST_LOG` enables
/// them.
fn is_free_of_passwords(metadata: &Metadata<'_>) -> bool {
    // The prefix match also covers crates like `amq_protocol_tcp`.
    !PASSWORD_CRATES.iter().any(|name| metadata.target().starts_with(name))
}

/// Writes one field of a text line. Its value is escaped here, because the writer keeps colour
/// sequences.
fn text_field(writer: &mut Writer<'_>, field: &Field, value: &dyn Debug) -> fmt::Result {
    let value = printable(format_args!("{value:?}"));
    match field.name() {
        "message" => write!(writer, "{value}"),
        name if FIELDS_IN_MESSAGES.contains(&name) => Ok(()),
        name => write!(writer, " {name}={value}"),
    }
}

/// Formats an event as one JSON object: its message, its own fields, and the fields of its spans.
/// If a name occurs twice, the innermost value is used.
struct JsonLine;

impl<S, N> FormatEvent<S, N> for JsonLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, ctx: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut fields = Map::new();
        for span in ctx.event_scope().into_iter().flat_map(|scope| scope.from_root()) {
            if let Some(span_fields) = span.extensions().get::<FormattedFields<N>>() {
                fields.extend(parse_fields(&span_fields.fields));
            }
        }
        let mut event_fields = String::new();
        ctx.format_fields(Writer::new(&mut event_fields), event)?;
        fields.extend(parse_fields(&event_fields));
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let metadata = event.metadata();
        let message = fields.remove("message").unwrap_or_else(|| "".into());
        let mut line = Map::from_iter([
            ("timestamp".to_string(), time.into()),
            ("level".to_string(), metadata.level().as_str().into()),
            ("message".to_string(), message),
            ("target".to_string(), metadata.target().into()),
        ]);
        for (name, value) in fields {
            line.entry(name).or_insert(value);
        }
        writeln!(writer, "{}", Value::Object(line))
    }
}

/// The fields that [`JsonFields`] wrote; a span without fields has an empty text.
fn parse_fields(fields: &str) -> Map<String, Value> {
    serde_json::from_str(fields).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Text(Arc<Mutex<Vec<u8>>>);

    impl Text {
        fn read(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl Write for Text {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn no_filter_shows_data_sent_to_rabbitmq() {
        for filter in [
            "trace",
            "warn,lapin=trace,amq_protocol_tcp=trace",
            "lapin::io_loop=trace,warn",
        ] {
            let said = Text::default();
            let writer = said.clone();
            let subscriber = text_subscriber(EnvFilter::new(filter), move || writer.clone(), false);
            tracing::subscriber::with_default(subscriber, || {
                tracing::trace!(target: "lapin::io_loop", "will write [104, 117, 110]");
                tracing::debug!(target: "lapin", "hunter2");
                tracing::trace!(target: "amq_protocol_tcp", "Connecting to amqp://u:hunter2@h");
                tracing::error!(target: "lapin::channel", "method=StartOk, hunter2");
                tracing::warn!(target: "gristmill::queue", "still said");
            });
            let said = said.read();
            assert!(!said.contains("hunter2") && !said.contains("[104"), "{filter}: {said}");
            assert!(said.contains("still said"), "{filter}: {said}");
        }
    }

    /// What both forms make of an event in two spans.
    fn said(json_form: bool) -> String {
        let said = Text::default();
        let writer = said.clone();
        let emit = || {
            let _worker = tracing::error_span!("worker", worker = "w-1", shard = 1).entered();
            let shard = tracing::error_span!("shard", job = tracing::field::Empty, shard = 7).entered();
            shard.record("job", "a\u{1b}[31m\u{202e}\"\n");
            tracing::warn!(output = %"s3://b/o", tries = 3, "shard 7 waits\u{1b}[31m");
        };
        if json_form {
            tracing::subscriber::with_default(json_subscriber(EnvFilter::new("warn"), move || writer.clone()), emit);
        } else {
            tracing::subscriber::with_default(
                text_subscriber(EnvFilter::new("warn"), move || writer.clone(), true),
                emit,
            );
        }
        said.read()
    }

    #[test]
    fn a_json_line_has_the_fields_of_its_spans_beside_the_message() {
        let said = said(true);
        assert_eq!(said.lines().count(), 1, "{said}");
        let line: Value = serde_json::from_str(&printable(&said)).unwrap();
        let fields = line.as_object().unwrap();
        let mut names: Vec<&str> = fields.keys().map(String::as_str).collect();
        assert_eq!(names[..4], ["timestamp", "level", "message", "target"]);
        names.sort_unstable();
        let expected = [
            "job",
            "level",
            "message",
            "output",
            "shard",
            "target",
            "timestamp",
            "tries",
            "worker",
        ];
        assert_eq!(names, expected);
        assert_eq!(line["message"], "shard 7 waits\u{1b}[31m");
        assert_eq!((&line["level"], &line["worker"]), (&"WARN".into(), &"w-1".into()));
        assert_eq!((&line["shard"], &line["tries"]), (&7.into(), &3.into()));
        assert_eq!(line["job"], "a\u{1b}[31m\u{202e}\"\n");
    }

    #[test]
    fn a_text_line_repeats_no_field_of_its_sentence() {
        let said = said(false);
        let sentence = "shard 7 waits\\u001b[31m tries=3\n";
        assert!(
            said.ends_with(sentence) && !said.contains("w-1") && !said.contains("s3:"),
            "{said}"
        );
    }
}
