//! The queue itself: used as it is where it exists, made where it does not.

use lapin::options::QueueDeclareOptions;
use lapin::types::{AMQPValue, FieldTable, LongString};
use lapin::{Channel, Connection};

use super::link::{ACCESS_REFUSED, NOT_FOUND, PRECONDITION_FAILED, code, failed};
use crate::queue::QueueError;
use crate::queue::address::RabbitUrl;
use crate::queue::settings::Resolved;

/// What makes a quorum queue never drop a message for being delivered often: kills must not dead-letter healthy shards.
/// RabbitMQ 4 has a limit of 20 that -1 turns off; 3.x has none and takes no negative one.
const NO_DELIVERY_LIMIT: (&str, i32) = ("x-delivery-limit", -1);

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
    let mut unlimited = arguments.clone();
    let (name, limit) = NO_DELIVERY_LIMIT;
    unlimited.insert(name.into(), AMQPValue::LongInt(limit));
    let made = match attempt(connection, url, false, unlimited).await {
        // An older broker does not know the argument's value, or another made the queue in this moment.
        Err(error) if code(&error) == Some(PRECONDITION_FAILED) => attempt(connection, url, false, arguments).await,
        made => made,
    };
    match made {
        Ok(channel) => Ok((channel, true)),
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
