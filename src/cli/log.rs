//! Logging to stderr: filtered by `RUST_LOG`, escaped, without crates that log passwords.

use std::io::IsTerminal;

use tracing::{Metadata, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::printable::Log;

/// Crates that log data sent to RabbitMQ and data that a broker returns, both of which may contain
/// the password as text or bytes. `queue/rabbitmq/` reports their errors.
const SHOW_PASSWORDS: &[&str] = &["lapin", "amq_protocol", "async_rs"];

/// Initializes the program's log.
pub(super) fn init() {
    let wanted = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    let colours = std::io::stderr().is_terminal();
    subscriber(wanted, move || Log { colours }, colours).init();
}

fn subscriber<W>(wanted: EnvFilter, writer: W, ansi: bool) -> impl Subscriber + Send + Sync + 'static
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    tracing_subscriber::fmt()
        .with_env_filter(wanted)
        .with_writer(writer)
        .with_ansi(ansi)
        .finish()
        .with(filter_fn(keeps_secrets))
}

/// Whether the event cannot show a password; this applies whatever the log's filter enables.
fn keeps_secrets(metadata: &Metadata<'_>) -> bool {
    // The prefix match also covers crates like `amq_protocol_tcp`.
    !SHOW_PASSWORDS.iter().any(|name| metadata.target().starts_with(name))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Text(Arc<Mutex<Vec<u8>>>);

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
    fn no_filter_shows_what_is_sent_to_rabbitmq() {
        for filter in [
            "trace",
            "warn,lapin=trace,amq_protocol_tcp=trace",
            "lapin::io_loop=trace,warn",
        ] {
            let text = Text::default();
            let writer = text.clone();
            let subscriber = subscriber(EnvFilter::new(filter), move || writer.clone(), false);
            tracing::subscriber::with_default(subscriber, || {
                tracing::trace!(target: "lapin::io_loop", "will write [104, 117, 110]");
                tracing::debug!(target: "lapin", "hunter2");
                tracing::trace!(target: "amq_protocol_tcp", "Connecting to amqp://u:hunter2@h");
                tracing::error!(target: "lapin::channel", "method=StartOk, hunter2");
                tracing::warn!(target: "gristmill::queue", "still said");
            });
            let said = String::from_utf8(text.0.lock().unwrap().clone()).unwrap();
            assert!(!said.contains("hunter2") && !said.contains("104"), "{filter}: {said}");
            assert!(said.contains("still said"), "{filter}: {said}");
        }
    }
}
