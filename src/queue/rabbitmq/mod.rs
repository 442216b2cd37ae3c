//! RabbitMQ: a durable quorum queue without a delivery limit.
//!
//! All I/O runs on one thread. `session.rs` runs one channel from opening to its end, and
//! `supervisor.rs` opens the next. Messages are published over a second connection
//! (`publisher.rs`), so that a memory alarm, which blocks publishing connections, never delays
//! acknowledgements.

mod declare;
mod link;
mod publisher;
mod session;
mod supervisor;

use std::sync::Arc;

pub(crate) use publisher::RabbitPublisher;

use super::address::RabbitUrl;
use super::delivery_tracker::{Brokered, DeliveryTracker};
use super::io::IoThread;
use super::settings::Resolved;
use super::{Queue, QueueError};

/// Begins to consume. If the broker does not answer within about 10 s, the queue is returned and
/// keeps trying.
pub(crate) async fn connect(url: &RabbitUrl, resolved: &Resolved) -> Result<Arc<dyn Queue>, QueueError> {
    let (dispositions, heard) = tokio::sync::mpsc::unbounded_channel();
    let tracker = Arc::new(DeliveryTracker::new(dispositions.clone(), &resolved.settings));
    let io = Arc::new(IoThread::start("gristmill-amqp")?);
    let (opened, open) = tokio::sync::oneshot::channel();
    let (ended, has_ended) = std::sync::mpsc::channel();
    let consumer = session::Consumer {
        url: url.clone(),
        resolved: resolved.clone(),
        tracker: tracker.clone(),
        dispositions: heard,
        to_self: dispositions,
        publisher: RabbitPublisher::new(url, resolved, io.clone()),
    };
    let keeps_thread = io.clone();
    io.spawn(async move {
        supervisor::run(consumer, opened).await;
        drop(ended);
        drop(keeps_thread);
    });
    open.await.map_err(|_| QueueError::Unavailable {
        why: "the thread that talks to RabbitMQ ended".to_owned(),
    })??;
    Ok(Arc::new(Brokered::new(tracker, has_ended)))
}
