//! Opens connections and classifies lapin's errors.

use std::time::Duration;

use lapin::tcp::OwnedTLSConfig;
use lapin::uri::{AMQPAuthority, AMQPQueryString, AMQPScheme, AMQPUri, AMQPUserInfo};
use lapin::{Connection, ConnectionProperties, ErrorKind};

use crate::queue::QueueError;
use crate::queue::address::{RabbitUrl, Secret};
use crate::queue::settings::ResolvedSettings;

/// Timeout for connecting, handshakes included, and for each request after it.
const OPEN_WAIT: Duration = Duration::from_secs(10);
/// RabbitMQ drops a client that has been silent for two of these intervals.
const HEARTBEAT_SECONDS: u16 = 20;

/// AMQP reply codes that we act on.
pub(super) const ACCESS_REFUSED: u16 = 403;
pub(super) const NOT_FOUND: u16 = 404;
pub(super) const PRECONDITION_FAILED: u16 = 406;
const NOT_ALLOWED: u16 = 530;

/// Opens a connection; `purpose` is part of its name in RabbitMQ's management interface.
pub(super) async fn open(
    url: &RabbitUrl,
    resolved: &ResolvedSettings,
    purpose: &str,
) -> Result<Connection, QueueError> {
    let uri = AMQPUri {
        scheme: if url.tls { AMQPScheme::AMQPS } else { AMQPScheme::AMQP },
        authority: AMQPAuthority {
            userinfo: AMQPUserInfo {
                username: resolved.user.clone().unwrap_or_else(|| "guest".to_owned()),
                password: resolved.password.as_ref().map_or("guest", Secret::reveal).to_owned(),
            },
            host: url.host.clone(),
            port: url.port,
        },
        vhost: url.vhost.clone(),
        query: AMQPQueryString {
            heartbeat: Some(HEARTBEAT_SECONDS),
            ..AMQPQueryString::default()
        },
    };
    let properties = ConnectionProperties::default().with_connection_name(format!("gristmill, {purpose}").into());
    let runtime = lapin::runtime::default_runtime().map_err(|error| queue_error(url, resolved, &error))?;
    let tls = OwnedTLSConfig {
        identity: None,
        cert_chain: certificates(resolved)?,
    };
    let connecting = Connection::connect_uri_with_config(uri, properties, tls, runtime);
    let connecting = async { connecting.await.map_err(|error| queue_error(url, resolved, &error)) };
    with_timeout(url, connecting).await
}

/// Runs a request, and fails if the broker takes longer than `OPEN_WAIT`.
pub(super) async fn with_timeout<T>(
    url: &RabbitUrl,
    asking: impl Future<Output = Result<T, QueueError>>,
) -> Result<T, QueueError> {
    tokio::time::timeout(OPEN_WAIT, asking).await.unwrap_or_else(|_| {
        Err(QueueError::Unavailable {
            why: format!("{url}: no answer within {} s", OPEN_WAIT.as_secs()),
        })
    })
}

/// Maximum size of a file of certificates; a system's bundle has about 200 kB.
const CERTIFICATES_BYTES_MAX: u64 = 16 << 20;

fn certificates(resolved: &ResolvedSettings) -> Result<Option<String>, QueueError> {
    let Some(file) = &resolved.ca_file else {
        return Ok(None);
    };
    match crate::regular::read_text(file, CERTIFICATES_BYTES_MAX) {
        Ok(text) => Ok(Some(text)),
        Err(error) => Err(QueueError::Settings {
            why: format!("cannot read the certificates in `{}`: {error}", file.display()),
        }),
    }
}

/// The broker's reply code, if the broker refused the request.
pub(super) fn reply_code(error: &lapin::Error) -> Option<u16> {
    match error.kind() {
        ErrorKind::ProtocolError(error) => Some(error.get_id()),
        _ => None,
    }
}

/// Converts the error to a [`QueueError`] whose text is one line without secrets.
pub(super) fn queue_error(url: &RabbitUrl, resolved: &ResolvedSettings, error: &lapin::Error) -> QueueError {
    let text = resolved.scrub.clean_line(&error.to_string());
    let text = [
        "protocol error: ",
        "AMQP soft error: ",
        "AMQP hard error: ",
        "IO error: ",
    ]
    .iter()
    .fold(text, |text, noise| text.replacen(noise, "", 1));
    let line = format!("{url}: {text}");
    if let Some(ACCESS_REFUSED | NOT_ALLOWED) = reply_code(error) {
        return QueueError::Denied { why: line };
    }
    // rustls and the resolver report through io::Error without specific kinds, so the text decides.
    let is_io = error.is_io_error();
    if is_io && (text.contains("certificate") || text.contains("TLS") || text.contains("handshake")) {
        return QueueError::Denied { why: line };
    }
    if is_io && text.contains("failed to lookup address") {
        return QueueError::UnknownHost {
            why: format!("{url}: no such host: {text}"),
        };
    }
    QueueError::Unavailable { why: line }
}
