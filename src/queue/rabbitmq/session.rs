//! One session: a channel that receives and acknowledges messages until it ends.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures::StreamExt;
use lapin::Acker;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicGetOptions, BasicNackOptions, BasicQosOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection, ErrorKind};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};

use super::declare::declare;
use super::link::{open, queue_error, with_timeout};
use super::publisher::RabbitPublisher;
use crate::queue::address::RabbitUrl;
use crate::queue::delivery_tracker::{DeliveryTracker, Disposition, PendingRecall, ReceivedMessage, Republish};
use crate::queue::foreign::{self, HOPS_HEADER, Handling};
use crate::queue::settings::ResolvedSettings;
use crate::queue::{Message, QueueError};

const TICK: Duration = Duration::from_millis(200);
/// A longer gap between two ticks means that the whole process was stopped, the worker included.
const STALL_MIN: Duration = Duration::from_secs(2);
/// A delivery is recalled after this share of the acknowledgement timeout …
const RECALL_SHARE: f64 = 0.8;
/// … and requeued after this share, even if its worker has not ended the work.
const REQUEUE_SHARE: f64 = 0.92;
/// An idle channel, with no delivery for this long and none unacknowledged, is replaced: RabbitMQ
/// may not notify a consumer that its queue was deleted and created again. The new queue then sends
/// messages to the old channel, which does not deliver them. Closing the channel requeues them.
const IDLE_MAX: Duration = Duration::from_secs(20);
/// Pause before the next request for a message beyond the prefetch, after the queue had none.
const GET_INTERVAL: Duration = Duration::from_millis(500);
/// Timeout for publishing a message that is given back; then it is requeued.
const SEND_BACK_TIMEOUT: Duration = Duration::from_secs(2);
const CLOSE_WAIT: Duration = Duration::from_secs(2);

/// A delivery tag with its session: acknowledgements of another session's tags do nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DeliveryTag {
    session: u64,
    tag: u64,
}

/// State that outlives a session.
pub(super) struct Consumer {
    pub url: RabbitUrl,
    pub resolved: ResolvedSettings,
    pub tracker: Arc<DeliveryTracker<DeliveryTag>>,
    pub dispositions: UnboundedReceiver<Disposition<DeliveryTag>>,
    /// Sends to `dispositions`, for tasks of this module such as passing a message on.
    pub own_sender: UnboundedSender<Disposition<DeliveryTag>>,
    pub publisher: RabbitPublisher,
}

/// The right to send a message again. Either the message's task or the ending session takes it.
#[derive(Clone, Default)]
struct PublishClaim(Arc<AtomicBool>);

impl PublishClaim {
    /// Returns false if the other side has taken the claim.
    fn take(&self) -> bool {
        !self.0.swap(true, Ordering::SeqCst)
    }
}

/// Why a session ended.
pub(super) enum SessionEnd {
    Closed,
    /// The worker had stopped making progress at this count.
    Stuck {
        progress_count: u64,
    },
    /// The broker closed the channel, or the queue was deleted.
    ChannelClosed {
        why: String,
    },
    /// The channel has had no delivery for `IDLE_MAX`.
    Idle,
    Broken(QueueError),
}

/// A channel that consumes.
pub(super) struct Session {
    number: u64,
    connection: Connection,
    channel: Channel,
    stream: lapin::Consumer,
    /// Time of the next request for a message beyond the prefetch.
    next_get: Instant,
    ackers: BTreeMap<u64, Acker>,
    /// Messages that are being passed on to other workers, by tag.
    republishing: BTreeMap<u64, (Republish<DeliveryTag>, PublishClaim)>,
    /// Tags of messages that were given back and are being published again.
    giving_back: BTreeSet<u64>,
    /// Whether publishing a message that was given back has failed.
    has_send_failed: Arc<AtomicBool>,
    /// Tags of deliveries recalled because of the acknowledgement timeout.
    recalled: BTreeSet<u64>,
    recalls: Vec<(PendingRecall, Instant)>,
    last_tick: Instant,
    last_delivery: Instant,
}

impl Consumer {
    /// Connects, declares the queue, and starts consuming.
    pub(super) async fn open_session(&self, number: u64) -> Result<Session, QueueError> {
        let connection = open(&self.url, &self.resolved, "consuming").await?;
        // A broker that has just started may accept a request and never answer it.
        with_timeout(&self.url, self.consume(number, connection)).await
    }

    async fn consume(&self, number: u64, connection: Connection) -> Result<Session, QueueError> {
        let (channel, _) = declare(&connection, &self.url, &self.resolved).await?;
        let failed = |error: lapin::Error| queue_error(&self.url, &self.resolved, &error);
        channel
            .basic_qos(self.prefetch(), BasicQosOptions::default())
            .await
            .map_err(failed)?;
        let stream = channel
            .basic_consume(
                self.url.queue.as_str().into(),
                "".into(),
                BasicConsumeOptions::default(),
                FieldTable::default(),
            )
            .await
            .map_err(failed)?;
        Ok(Session {
            number,
            connection,
            channel,
            stream,
            next_get: Instant::now(),
            ackers: BTreeMap::new(),
            republishing: BTreeMap::new(),
            giving_back: BTreeSet::new(),
            has_send_failed: Arc::default(),
            recalled: BTreeSet::new(),
            recalls: Vec::new(),
            last_tick: Instant::now(),
            last_delivery: Instant::now(),
        })
    }

    fn prefetch(&self) -> u16 {
        u16::try_from(self.resolved.settings.in_flight).unwrap_or(u16::MAX)
    }

    /// Gets one message beyond the prefetch if the worker asks for more while the prefetch is full
    /// of deliveries that are set aside or being passed on. Messages that this worker does not ask
    /// for remain for others.
    async fn get_beyond_prefetch(&self, session: &mut Session) -> Result<(), SessionEnd> {
        let prefetch = PrefetchState {
            unacknowledged: session.ackers.len(),
            ready: self.tracker.ready_count(),
            prefetch: usize::from(self.prefetch()),
        };
        if !prefetch.wants_one_more() || Instant::now() < session.next_get {
            return Ok(());
        }
        let request = session
            .channel
            .basic_get(self.url.queue.as_str().into(), BasicGetOptions::default());
        // The request blocks this session, and a broker may accept a request and never answer it.
        let reply = with_timeout(&self.url, async { Ok(request.await) }).await;
        match reply.map_err(SessionEnd::Broken)? {
            Ok(Some(got)) => self.handle_message(session, got.delivery).await,
            Ok(None) => {
                session.next_get = Instant::now() + GET_INTERVAL;
                Ok(())
            }
            Err(error) => Err(self.session_end(session, &error)),
        }
    }

    /// Runs a session to its end. The worker keeps its deliveries then, and may finish them.
    pub(super) async fn run_session(&mut self, mut session: Session) -> SessionEnd {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let end = loop {
            let done = tokio::select! {
                biased;
                () = self.tracker.closed_notify.notified() => Err(SessionEnd::Closed),
                Some(disposition) = self.dispositions.recv() => self.apply(&mut session, disposition).await,
                _ = ticks.tick() => self.tick(&mut session).await,
                () = self.tracker.starved_notify.notified() => self.get_beyond_prefetch(&mut session).await,
                delivery = session.stream.next() => match delivery {
                    Some(Ok(delivery)) => self.handle_message(&mut session, delivery).await,
                    Some(Err(error)) => Err(self.session_end(&session, &error)),
                    None => Err(SessionEnd::ChannelClosed { why: "the queue was deleted".to_owned() }),
                },
            };
            if let Err(end) = done {
                break end;
            }
        };
        if matches!(end, SessionEnd::Closed) {
            self.settle_all(&mut session).await;
        }
        // Closing the channel requeues the messages that no worker has received.
        self.tracker.take_ready(|_| true);
        if session.connection.status().connected() {
            let closing = session.connection.close(200, "OK".into());
            if !matches!(tokio::time::timeout(CLOSE_WAIT, closing).await, Ok(Ok(()))) {
                tracing::debug!(queue = %self.url, "{}: the connection did not close properly", self.url);
            }
        }
        end
    }

    fn session_end(&self, session: &Session, error: &lapin::Error) -> SessionEnd {
        let failed = queue_error(&self.url, &self.resolved, error);
        let is_channel = error.is_amqp_soft_error() || matches!(error.kind(), ErrorKind::InvalidChannelState(..));
        match failed {
            QueueError::Unavailable { why } if is_channel && session.connection.status().connected() => {
                SessionEnd::ChannelClosed { why }
            }
            error => SessionEnd::Broken(error),
        }
    }

    async fn handle_message(&self, session: &mut Session, delivery: Delivery) -> Result<(), SessionEnd> {
        let token = DeliveryTag {
            session: session.number,
            tag: delivery.delivery_tag,
        };
        session.last_delivery = Instant::now();
        session.ackers.insert(token.tag, delivery.acker);
        let headers = delivery.properties.headers().as_ref().map(FieldTable::inner);
        let header = |name: &str| headers.and_then(|headers| headers.get(name));
        let hops = match header(HOPS_HEADER) {
            Some(AMQPValue::LongString(text)) => foreign::parse_hops(Some(text.as_bytes())),
            other => other.map_or(0, |value| u32::try_from(header_number(value)).unwrap_or(0)),
        };
        let earlier = header("x-delivery-count").map_or(0, header_number);
        let earlier = u32::try_from(earlier)
            .unwrap_or(u32::MAX - 1)
            .max(u32::from(delivery.redelivered));
        match foreign::classify(&delivery.data, hops, &self.url.to_string(), &self.resolved.signing) {
            Handling::Deliver(message) => {
                self.deliver(session, token, message, delivery.data, earlier + 1, hops);
                Ok(())
            }
            Handling::PassOn(hops) => {
                let body = delivery.data;
                self.republish_later(session, Republish { token, body, hops });
                Ok(())
            }
            Handling::Drop => self.ack(session, token).await,
        }
    }

    fn deliver(
        &self,
        session: &Session,
        token: DeliveryTag,
        message: Message,
        body: Vec<u8>,
        deliveries: u32,
        hops: u32,
    ) {
        let arrived = Instant::now();
        // The broker repeats a delivery that the worker still holds: it gets this channel's tag.
        let is_older = |token: &DeliveryTag| token.session != session.number;
        if self.tracker.replace_token(&message, arrived, token, is_older).is_some() {
            return;
        }
        self.tracker.push_ready(ReceivedMessage {
            token,
            message,
            body,
            deliveries,
            hops,
            arrived,
        });
    }

    /// Handles a disposition of the worker. It has no effect on deliveries of older channels.
    async fn apply(&self, session: &mut Session, disposition: Disposition<DeliveryTag>) -> Result<(), SessionEnd> {
        match disposition {
            Disposition::Acknowledge(token) => self.ack(session, token).await,
            Disposition::GiveBack(item) => self.send_back(session, item).await,
            Disposition::Republish(republish) => {
                self.republish_later(session, republish);
                Ok(())
            }
        }
    }

    fn acker(session: &mut Session, token: DeliveryTag) -> Option<Acker> {
        if token.session != session.number {
            return None;
        }
        session.recalled.remove(&token.tag);
        session.republishing.remove(&token.tag);
        session.giving_back.remove(&token.tag);
        session.ackers.remove(&token.tag)
    }

    async fn ack(&self, session: &mut Session, token: DeliveryTag) -> Result<(), SessionEnd> {
        let Some(acker) = Consumer::acker(session, token) else {
            return Ok(());
        };
        match acker.ack(BasicAckOptions::default()).await {
            Ok(_) => Ok(()),
            Err(error) => Err(self.session_end(session, &error)),
        }
    }

    async fn requeue(&self, session: &mut Session, token: DeliveryTag) -> Result<(), SessionEnd> {
        let Some(acker) = Consumer::acker(session, token) else {
            return Ok(());
        };
        let options = BasicNackOptions {
            requeue: true,
            ..BasicNackOptions::default()
        };
        match acker.nack(options).await {
            Ok(_) => Ok(()),
            Err(error) => Err(self.session_end(session, &error)),
        }
    }

    /// Gives a message back by publishing it again: a requeue would raise the broker's delivery
    /// count, as a failed delivery does. Requeues it if publishing fails.
    async fn send_back(&self, session: &mut Session, item: ReceivedMessage<DeliveryTag>) -> Result<(), SessionEnd> {
        let ReceivedMessage {
            token, ref body, hops, ..
        } = item;
        if !session.has_unsettled(token) {
            // The delivery is of an older channel: the broker repeats it by itself.
            return Ok(());
        }
        if session.has_send_failed.load(Ordering::SeqCst) {
            return self.requeue(session, token).await;
        }
        session.giving_back.insert(token.tag);
        let (body, has_send_failed) = (body.clone(), session.has_send_failed.clone());
        let (publisher, own_sender) = (self.publisher.clone(), self.own_sender.clone());
        tokio::spawn(async move {
            let sent = tokio::time::timeout(SEND_BACK_TIMEOUT, publisher.send_bodies(vec![body], hops)).await;
            let disposition = match sent {
                Ok(Ok(())) => Disposition::Acknowledge(token),
                Ok(Err(_)) | Err(_) => {
                    has_send_failed.store(true, Ordering::SeqCst);
                    Disposition::GiveBack(item)
                }
            };
            // Fails only once the queue is closed; the broker then repeats the message, harmlessly.
            let _ = own_sender.send(disposition);
        });
        Ok(())
    }

    /// Before closing: acknowledges finished deliveries, and publishes all others again.
    async fn settle_all(&mut self, session: &mut Session) {
        let deadline = tokio::time::Instant::now() + SEND_BACK_TIMEOUT;
        // Otherwise this consumer would get the messages published now, and closing requeues them.
        self.stop_consuming(session, deadline).await;
        let mut to_republish: Vec<Republish<DeliveryTag>> = Vec::new();
        for (tag, (republish, claim)) in std::mem::take(&mut session.republishing) {
            if claim.take() {
                to_republish.push(republish);
                continue;
            }
            session.giving_back.insert(tag);
        }
        loop {
            let disposition = match self.dispositions.try_recv() {
                Ok(disposition) => disposition,
                Err(_) if session.giving_back.is_empty() => break,
                // Messages that are being published are confirmed soon.
                Err(_) => match tokio::time::timeout_at(deadline, self.dispositions.recv()).await {
                    Ok(Some(disposition)) => disposition,
                    Ok(None) | Err(_) => break,
                },
            };
            let settled = match disposition {
                Disposition::Acknowledge(token) => self.ack(session, token).await,
                Disposition::GiveBack(item) => {
                    session.giving_back.remove(&item.token.tag);
                    to_republish.push(item.into());
                    Ok(())
                }
                Disposition::Republish(republish) => {
                    to_republish.push(republish);
                    Ok(())
                }
            };
            if settled.is_err() {
                return;
            }
        }
        to_republish.extend(self.tracker.take_ready(|_| true).into_iter().map(Republish::from));
        to_republish.retain(|republish| session.has_unsettled(republish.token));
        for (hops, (tokens, bodies)) in group_by_hops(to_republish) {
            let sending = self.publisher.send_bodies(bodies, hops);
            let is_sent = matches!(tokio::time::timeout_at(deadline, sending).await, Ok(Ok(())));
            for token in tokens {
                let settled = if is_sent {
                    self.ack(session, token).await
                } else {
                    self.requeue(session, token).await
                };
                if settled.is_err() {
                    return;
                }
            }
        }
    }

    /// Cancels the consumer, and receives the messages that the broker had sent before.
    async fn stop_consuming(&self, session: &mut Session, deadline: tokio::time::Instant) {
        let consumer = session.stream.tag();
        let ending = async {
            session
                .channel
                .basic_cancel(consumer, BasicCancelOptions::default())
                .await?;
            let mut rest = Vec::new();
            // The stream ends because the broker has confirmed the cancellation.
            while let Some(delivery) = session.stream.next().await {
                rest.push(delivery?);
            }
            Ok::<_, lapin::Error>(rest)
        };
        let Ok(Ok(rest)) = tokio::time::timeout_at(deadline, ending).await else {
            tracing::debug!(queue = %self.url, "{}: the broker did not confirm that this consumer ends", self.url);
            return;
        };
        for delivery in rest {
            if self.handle_message(session, delivery).await.is_err() {
                return;
            }
        }
    }

    /// Sends the message again after the delay, then acknowledges its delivery.
    fn republish_later(&self, session: &mut Session, republish: Republish<DeliveryTag>) {
        let claim = PublishClaim::default();
        if session.has_unsettled(republish.token) {
            let entry = (republish.clone(), claim.clone());
            session.republishing.insert(republish.token.tag, entry);
        }
        let Republish { token, body, hops } = republish;
        let (publisher, own_sender, tracker) = (self.publisher.clone(), self.own_sender.clone(), self.tracker.clone());
        let delay = self.resolved.settings.pass_on_delay;
        let url = self.url.to_string();
        tracker.republishing.fetch_add(1, Ordering::SeqCst);
        tokio::spawn(async move {
            tokio::time::sleep(delay).await;
            let is_ours = claim.take();
            let mut is_due = is_ours;
            while is_due {
                match publisher.send_bodies(vec![body.clone()], hops).await {
                    Ok(()) => is_due = false,
                    Err(error) => {
                        tracing::warn!(queue = url, "cannot pass a message on, trying again: {error}");
                        tokio::time::sleep(delay).await;
                    }
                }
            }
            tracker.republishing.fetch_sub(1, Ordering::SeqCst);
            // Fails only once the queue is closed; the broker then repeats the message, harmlessly.
            if is_ours {
                let _ = own_sender.send(Disposition::Acknowledge(token));
            }
        });
    }

    /// Checks the worker's progress and the acknowledgement timeout.
    async fn tick(&self, session: &mut Session) -> Result<(), SessionEnd> {
        let now = Instant::now();
        let gap = now - session.last_tick;
        session.last_tick = now;
        if gap > STALL_MIN {
            self.tracker.extend_leases(gap);
        }
        if self.tracker.is_stuck(now) {
            let progress_count = self.tracker.progress_count();
            tracing::warn!(
                queue = %self.url,
                "{}: the worker has stopped making progress; cancelling its consumer until it makes progress again",
                self.url
            );
            self.tracker.recall("its worker has stopped making progress", |_| true);
            self.tracker.forget(|_| true);
            // Before the broker requeues: an empty queue must not look like the end of the work.
            self.tracker.set_attached(false);
            return Err(SessionEnd::Stuck { progress_count });
        }
        let recall_after = self.url.ack_timeout.mul_f64(RECALL_SHARE);
        for item in self.tracker.take_ready(|item| now - item.arrived >= recall_after) {
            // The worker has not received this message, so giving it back is no failed delivery.
            self.send_back(session, item).await?;
        }
        self.recall_overdue(session, now, recall_after);
        self.requeue_recalled(session, now).await?;
        if session.ackers.is_empty() && now - session.last_delivery >= IDLE_MAX {
            return Err(SessionEnd::Idle);
        }
        Ok(())
    }

    fn recall_overdue(&self, session: &mut Session, now: Instant, recall_after: Duration) {
        let mut found = Vec::new();
        let recalled = &session.recalled;
        let overdue = std::cell::RefCell::new(&mut found);
        let recalling = self
            .tracker
            .recall("the broker's acknowledgement timeout is near", |item| {
                let DeliveryTag { session: number, tag } = item.token;
                let is_due = number == session.number && now - item.arrived >= recall_after && !recalled.contains(&tag);
                if is_due {
                    overdue.borrow_mut().push(tag);
                }
                is_due
            });
        session.recalled.extend(found);
        if !recalling.receipts().is_empty() {
            let grace = self.url.ack_timeout.mul_f64(REQUEUE_SHARE - RECALL_SHARE);
            session.recalls.push((recalling, now + grace));
        }
    }

    async fn requeue_recalled(&self, session: &mut Session, now: Instant) -> Result<(), SessionEnd> {
        let mut waiting = Vec::new();
        for (recalling, deadline) in std::mem::take(&mut session.recalls) {
            // A worker that has ended the work may still acknowledge in time, once its writes
            // return.
            if !recalling.is_settled(&self.tracker) && now < deadline {
                waiting.push((recalling, deadline));
                continue;
            }
            for &receipt in recalling.receipts() {
                if let Some(item) = self.tracker.take_outstanding(receipt) {
                    self.requeue(session, item.token).await?;
                }
            }
        }
        session.recalls = waiting;
        Ok(())
    }
}

impl Session {
    /// Whether this channel has an unacknowledged delivery with this tag.
    fn has_unsettled(&self, token: DeliveryTag) -> bool {
        token.session == self.number && self.ackers.contains_key(&token.tag)
    }
}

/// Groups messages by hops: their delivery tags and bodies.
fn group_by_hops(republishing: Vec<Republish<DeliveryTag>>) -> BTreeMap<u32, (Vec<DeliveryTag>, Vec<Vec<u8>>)> {
    let mut sorted: BTreeMap<u32, (Vec<DeliveryTag>, Vec<Vec<u8>>)> = BTreeMap::new();
    for Republish { token, body, hops } in republishing {
        let (tokens, bodies) = sorted.entry(hops).or_default();
        tokens.push(token);
        bodies.push(body);
    }
    sorted
}

/// Input of the decision whether to request a message beyond the prefetch.
struct PrefetchState {
    /// Unacknowledged messages of this channel.
    unacknowledged: usize,
    /// Messages among them that the worker has not received yet.
    ready: usize,
    prefetch: usize,
}

impl PrefetchState {
    /// Whether the prefetch is full and the worker has received every message.
    fn wants_one_more(&self) -> bool {
        self.unacknowledged >= self.prefetch && self.ready == 0
    }
}

/// The integer in a header of any width; 0 for other types.
fn header_number(value: &AMQPValue) -> i64 {
    match *value {
        AMQPValue::ShortShortInt(n) => n.into(),
        AMQPValue::ShortShortUInt(n) => n.into(),
        AMQPValue::ShortInt(n) => n.into(),
        AMQPValue::ShortUInt(n) => n.into(),
        AMQPValue::LongInt(n) => n.into(),
        AMQPValue::LongUInt(n) => n.into(),
        AMQPValue::LongLongInt(n) => n,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_beyond_the_prefetch_is_requested_only_if_the_prefetch_is_full() {
        let prefetch = |unacknowledged, ready| {
            let prefetch = PrefetchState {
                unacknowledged,
                ready,
                prefetch: 4,
            };
            prefetch.wants_one_more()
        };
        assert!(prefetch(4, 0) && prefetch(9, 0));
        assert!(!prefetch(3, 0), "the broker sends it by itself");
        assert!(
            !prefetch(4, 1) && !prefetch(9, 2),
            "what lies here comes first: others may have the rest"
        );
    }

    #[test]
    fn messages_that_are_sent_again_keep_their_hops() {
        let republish = |tag, hops| Republish {
            token: DeliveryTag { session: 0, tag },
            body: vec![tag as u8],
            hops,
        };
        let sorted = group_by_hops(vec![republish(1, 0), republish(2, 3), republish(3, 0)]);
        let tags = |hops: u32| sorted[&hops].0.iter().map(|token| token.tag).collect::<Vec<_>>();
        assert_eq!((tags(0), tags(3)), (vec![1, 3], vec![2]));
        assert_eq!(
            (&sorted[&0].1, &sorted[&3].1),
            (&vec![vec![1], vec![3]], &vec![vec![2]])
        );
        assert_eq!(sorted.len(), 2);
    }
}
