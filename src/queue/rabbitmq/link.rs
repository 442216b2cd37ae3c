//! Connecting, and what lapin's errors mean for us.

use std::time::Duration;

use lapin::tcp::OwnedTLSConfig;
use lapin::uri::{AMQPAuthority, AMQPQueryString, AMQPScheme, AMQPUri, AMQPUserInfo};
use lapin::{Connection, ConnectionProperties, ErrorKind};

use crate::queue::QueueError;
use crate::queue::address::{RabbitUrl, Secret};
use crate::queue::settings::Resolved;

/// How long connecting may take, handshakes included; and a question after it.
const OPEN_WAIT: Duration = Duration::from_secs(10);
/// RabbitMQ gives a silent client up after two of these.
const HEARTBEAT_SECONDS: u16 = 20;

/// AMQP's reply codes that we act on.
pub(super) const ACCESS_REFUSED: u16 = 403;
pub(super) const NOT_FOUND: u16 = 404;
pub(super) const PRECONDITION_FAILED: u16 = 406;
const NOT_ALLOWED: u16 = 530;

/// Opens a connection; `purpose` names it in the management interface.
pub(super) async fn open(url: &RabbitUrl, resolved: &Resolved, purpose: &str) -> Result<Connection, QueueError> {
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
    let runtime = lapin::runtime::default_runtime().map_err(|error| failed(url, resolved, &error))?;
    let tls = OwnedTLSConfig {
        identity: None,
        cert_chain: certificates(resolved)?,
    };
    let connecting = Connection::connect_uri_with_config(uri, properties, tls, runtime);
    let connecting = async { connecting.await.map_err(|error| failed(url, resolved, &error)) };
    within(url, connecting).await
}

/// Gives a broker up that takes too long to answer.
pub(super) async fn within<T>(
    url: &RabbitUrl,
    asking: impl Future<Output = Result<T, QueueError>>,
) -> Result<T, QueueError> {
    tokio::time::timeout(OPEN_WAIT, asking).await.unwrap_or_else(|_| {
        Err(QueueError::Unavailable {
            why: format!("{url}: no answer within {} s", OPEN_WAIT.as_secs()),
        })
    })
}

/// Largest file of certificates: a system's bundle has some 200 kB.
const CERTIFICATES_BYTES_MAX: u64 = 16 << 20;

fn certificates(resolved: &Resolved) -> Result<Option<String>, QueueError> {
    let Some(file) = &resolved.ca_file else {
        return Ok(None);
    };
    match crate::regular::read_text(file, CERTIFICATES_BYTES_MAX) {
        Ok(text) => Ok(Some(text)),
        Err(error) => Err(QueueError::Settings {
            what: format!("cannot read the certificates in `{}`: {error}", file.display()),
        }),
    }
}

/// The reply code of the broker, where it was the broker that refused.
pub(super) fn code(error: &lapin::Error) -> Option<u16> {
    match error.kind() {
        ErrorKind::ProtocolError(error) => Some(error.get_id()),
        _ => None,
    }
}

/// Splits by reaction; one line, without secrets.
pub(super) fn failed(url: &RabbitUrl, resolved: &Resolved, error: &lapin::Error) -> QueueError {
    let text = resolved.scrub.line(&error.to_string());
    let text = [
        "protocol error: ",
        "AMQP soft error: ",
        "AMQP hard error: ",
        "IO error: ",
    ]
    .iter()
    .fold(text, |text, noise| text.replacen(noise, "", 1));
    let line = format!("{url}: {text}");
    if let Some(ACCESS_REFUSED | NOT_ALLOWED) = code(error) {
        return QueueError::Denied { why: line };
    }
    // rustls and the resolver report through io::Error without kinds of their own.
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
