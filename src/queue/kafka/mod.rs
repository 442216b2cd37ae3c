//! Kafka: a topic that workers share as one consumer group.
//!
//! One thread polls (`consumer.rs`) and librdkafka's threads do the I/O. For each partition, the
//! contiguous prefix of finished messages is committed (`offsets.rs`). A message that is given back
//! stays uncommitted and is delivered again by this process, until its partition moves to another
//! worker.

mod config;
mod consumer;
mod group;
mod offsets;
mod publisher;
mod trouble;

use std::sync::Arc;

pub(crate) use publisher::KafkaPublisher;
use publisher::Republisher;

use super::address::KafkaUrl;
use super::delivery_tracker::{BrokeredQueue, DeliveryTracker};
use super::settings::ResolvedSettings;
use super::{Queue, QueueError};

/// Joins the topic's consumer group. If no broker answers within about 10 s, the queue is returned
/// and keeps trying.
pub(crate) async fn connect(url: &KafkaUrl, resolved: &ResolvedSettings) -> Result<Arc<dyn Queue>, QueueError> {
    let (dispositions, disposition_receiver) = tokio::sync::mpsc::unbounded_channel();
    let tracker = Arc::new(DeliveryTracker::new(dispositions, &resolved.settings));
    let publisher = KafkaPublisher::new(url, resolved)?;
    let republisher = Republisher::new(publisher, resolved.settings.pass_on_delay)?;
    let group = group::Group::new(url, resolved, tracker.clone(), disposition_receiver, republisher);
    let (open_sender, open_result) = tokio::sync::oneshot::channel();
    let (end_sender, end_receiver) = std::sync::mpsc::channel();
    let (url, resolved) = (url.clone(), resolved.clone());
    std::thread::Builder::new()
        .name("gristmill-poll".to_owned())
        .spawn(move || {
            consumer::run(&url, &resolved, group, open_sender);
            drop(end_sender);
        })
        .map_err(|error| QueueError::Unavailable {
            why: format!("cannot start a thread for Kafka: {error}"),
        })?;
    open_result.await.map_err(|_| QueueError::Unavailable {
        why: "the thread that polls Kafka ended".to_owned(),
    })??;
    Ok(Arc::new(BrokeredQueue::new(tracker, end_receiver)))
}
