//! The queue itself: used as it is where it exists, made where it does not.

use lapin::options::QueueDeclareOptions;
use lapin::types::{AMQPValue, FieldTable, LongString};
use lapin::{Channel, Connection};

use super::link::{ACCESS_REFUSED, NOT_FOUND, PRECONDITION_FAILED, code, failed};
use crate::queue::QueueError;
use crate::queue::address::RabbitUrl;
use crate::queue::settings::Resolved;

/// As good as no delivery limit: kills must not dead-letter healthy shards. RabbitMQ 4 has a limit of 20 unless told
/// otherwise; its -1 for "none" is taken by 3.10 too, but there every message that comes back is dropped at once.
const DELIVERY_LIMIT: (&str, i32) = ("x-delivery-limit", i32::MAX);

/// A channel on which the queue is known to exist, and whether it was made now.
pub(super) async fn declare(
    connection: &Connection,
    url: &RabbitUrl,
    resolved: &Resolved,
) -> Result<(Channel, bool), QueueError> {
    let asked = |error: &lapin::Error| failed(url, resolved, error);
    match attempt(connection, url, true, FieldTable::default()).await {
        Ok(channel) => return Ok((channel, false)),
        Err(error) if code(&error) == Some(NOT_FOUND) => {}
        Err(error) => return Err(asked(&error)),
    }
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString(LongString::from("quorum")));
    let (name, limit) = DELIVERY_LIMIT;
    arguments.insert(name.into(), AMQPValue::LongInt(limit));
    let made = attempt(connection, url, false, arguments).await;
    match made {
        Ok(channel) => Ok((channel, true)),
        // Another made it otherwise in this moment.
        Err(error) if code(&error) == Some(PRECONDITION_FAILED) => {
            let found = attempt(connection, url, true, FieldTable::default()).await;
            found.map(|channel| (channel, false)).map_err(|error| asked(&error))
        }
        Err(error) if code(&error) == Some(ACCESS_REFUSED) => Err(QueueError::Denied {
            why: format!(
                "{url}: the queue does not exist and there is no right to create it: have a durable quorum queue made, or grant `configure`"
            ),
        }),
        Err(error) => Err(asked(&error)),
    }
}

/// Whether the queue exists.
pub(super) async fn is_there(
    connection: &Connection,
    url: &RabbitUrl,
    resolved: &Resolved,
) -> Result<bool, QueueError> {
    match attempt(connection, url, true, FieldTable::default()).await {
        Ok(_) => Ok(true),
        Err(error) if code(&error) == Some(NOT_FOUND) => Ok(false),
        Err(error) => Err(failed(url, resolved, &error)),
    }
}

/// A refusal closes the channel: each attempt has its own.
async fn attempt(
    connection: &Connection,
    url: &RabbitUrl,
    passive: bool,
    arguments: FieldTable,
) -> lapin::Result<Channel> {
    let channel = connection.create_channel().await?;
    let options = QueueDeclareOptions {
        passive,
        durable: true,
        ..QueueDeclareOptions::default()
    };
    channel
        .queue_declare(url.queue.as_str().into(), options, arguments)
        .await?;
    Ok(channel)
}
