//! Declares the queue: an existing one is used unchanged, a missing one is created.

use lapin::options::QueueDeclareOptions;
use lapin::types::{AMQPValue, FieldTable, LongString};
use lapin::{Channel, Connection};

use super::link::{ACCESS_REFUSED, NOT_FOUND, PRECONDITION_FAILED, code, failed};
use crate::queue::QueueError;
use crate::queue::address::RabbitUrl;
use crate::queue::settings::Resolved;

/// Effectively no delivery limit: killed workers must not dead-letter healthy shards. RabbitMQ 4
/// defaults to a limit of 20. Its value -1 for "none" is accepted by 3.10 too, which then drops
/// every redelivered message at once.
const DELIVERY_LIMIT: (&str, i32) = ("x-delivery-limit", i32::MAX);

/// Returns a channel on which the queue is known to exist, and whether this call created the queue.
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
        // Another process has just created the queue with other arguments.
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

/// Declares the queue on a new channel, because a refusal closes the channel.
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
