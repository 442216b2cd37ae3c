//! Declares the queue: an existing one is used unchanged, a missing one is created.

use lapin::options::QueueDeclareOptions;
use lapin::types::{AMQPValue, FieldTable, LongString};
use lapin::{Channel, Connection};

use super::link::{ACCESS_REFUSED, NOT_FOUND, PRECONDITION_FAILED, queue_error, reply_code};
use crate::queue::QueueError;
use crate::queue::address::RabbitUrl;
use crate::queue::settings::ResolvedSettings;

/// Effectively no delivery limit: kills of workers must not dead-letter healthy shards. RabbitMQ 4
/// defaults to a limit of 20. Its value -1 for "no limit" is dangerous: RabbitMQ 3.10 accepts it,
/// but then drops every redelivered message.
const DELIVERY_LIMIT: (&str, i32) = ("x-delivery-limit", i32::MAX);

/// Returns a channel on which the queue is known to exist, and whether this call created the queue.
pub(super) async fn declare(
    connection: &Connection,
    url: &RabbitUrl,
    resolved: &ResolvedSettings,
) -> Result<(Channel, bool), QueueError> {
    let to_queue_error = |error: &lapin::Error| queue_error(url, resolved, error);
    match attempt(connection, url, true, FieldTable::default()).await {
        Ok(channel) => return Ok((channel, false)),
        Err(error) if reply_code(&error) == Some(NOT_FOUND) => {}
        Err(error) => return Err(to_queue_error(&error)),
    }
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString(LongString::from("quorum")));
    let (name, limit) = DELIVERY_LIMIT;
    arguments.insert(name.into(), AMQPValue::LongInt(limit));
    let created = attempt(connection, url, false, arguments).await;
    match created {
        Ok(channel) => Ok((channel, true)),
        // Another process has just created the queue with other arguments.
        Err(error) if reply_code(&error) == Some(PRECONDITION_FAILED) => {
            let found = attempt(connection, url, true, FieldTable::default()).await;
            found
                .map(|channel| (channel, false))
                .map_err(|error| to_queue_error(&error))
        }
        Err(error) if reply_code(&error) == Some(ACCESS_REFUSED) => Err(QueueError::Denied {
            why: format!(
                "{url}: the queue does not exist and there is no right to create it: have a durable quorum queue made, or grant `configure`"
            ),
        }),
        Err(error) => Err(to_queue_error(&error)),
    }
}

/// Whether the queue exists.
pub(super) async fn queue_exists(
    connection: &Connection,
    url: &RabbitUrl,
    resolved: &ResolvedSettings,
) -> Result<bool, QueueError> {
    match attempt(connection, url, true, FieldTable::default()).await {
        Ok(_) => Ok(true),
        Err(error) if reply_code(&error) == Some(NOT_FOUND) => Ok(false),
        Err(error) => Err(queue_error(url, resolved, &error)),
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
