//! RabbitMQ: a durable quorum queue without a delivery limit.
//!
//! All I/O runs on one thread. `session.rs` runs one channel from opening to its end, and
//! `supervisor.rs` opens the next channel. Messages are published over a second connection
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
use super::delivery_tracker::{BrokeredQueue, DeliveryTracker};
use super::io::IoThread;
use super::settings::ResolvedSettings;
use super::{Queue, QueueError};

/// Begins to consume. If the broker does not answer within about 10 s, the queue is returned and
/// keeps trying.
pub(crate) async fn connect(url: &RabbitUrl, resolved: &ResolvedSettings) -> Result<Arc<dyn Queue>, QueueError> {
    let (dispositions, disposition_receiver) = tokio::sync::mpsc::unbounded_channel();
    let tracker = Arc::new(DeliveryTracker::new(dispositions.clone(), &resolved.settings));
    let io = Arc::new(IoThread::start("gristmill-amqp")?);
    let (open_sender, open_result) = tokio::sync::oneshot::channel();
    let (end_sender, end_receiver) = std::sync::mpsc::channel();
    let consumer = session::Consumer {
        url: url.clone(),
        resolved: resolved.clone(),
        tracker: tracker.clone(),
        dispositions: disposition_receiver,
        own_sender: dispositions,
        publisher: RabbitPublisher::new(url, resolved, io.clone()),
    };
    let io_thread = io.clone();
    io.spawn(async move {
        supervisor::run(consumer, open_sender).await;
        drop(end_sender);
        drop(io_thread);
    });
    open_result.await.map_err(|_| QueueError::Unavailable {
        why: "the thread that talks to RabbitMQ ended".to_owned(),
    })??;
    Ok(Arc::new(BrokeredQueue::new(tracker, end_receiver)))
}
