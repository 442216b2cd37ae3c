//! One session: a channel that takes messages in and acknowledges them until it ends.

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
use super::link::{failed, open, within};
use super::publisher::RabbitPublisher;
use crate::queue::address::RabbitUrl;
use crate::queue::delivery_tracker::{DeliveryTracker, Disposition, Recalling, ReceivedMessage, Republish};
use crate::queue::foreign::{self, HOPS_HEADER, Handling};
use crate::queue::settings::Resolved;
use crate::queue::{Message, QueueError};

const TICK: Duration = Duration::from_millis(200);
/// A longer gap between two ticks means that the whole process was stopped, the worker included.
const STANDSTILL: Duration = Duration::from_secs(2);
/// A delivery is recalled after this share of the acknowledgement timeout …
const RECALL_SHARE: f64 = 0.8;
/// … and requeued after this share, even if its worker has not let go.
const RETURN_SHARE: f64 = 0.92;
/// A channel with no delivery for this long, and none unacknowledged, is replaced: RabbitMQ may not
/// tell a consumer that its queue was deleted and created again. The new queue then delivers
/// messages to the old channel, and they get lost between the two. Closing the channel requeues
/// them.
const QUIET_MAX: Duration = Duration::from_secs(20);
/// Pause before the queue is asked again for a message beyond the prefetch, after it had none.
const ASK_EVERY: Duration = Duration::from_millis(500);
/// Timeout for publishing a message that is given back; on timeout it is requeued.
const SEND_BACK_MAX: Duration = Duration::from_secs(2);
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
    pub resolved: Resolved,
    pub tracker: Arc<DeliveryTracker<DeliveryTag>>,
    pub dispositions: UnboundedReceiver<Disposition<DeliveryTag>>,
    /// Sends answers to `dispositions` from tasks here, such as for messages that were passed on.
    pub to_self: UnboundedSender<Disposition<DeliveryTag>>,
    pub publisher: RabbitPublisher,
}

/// The right to send a message again: its own task or the session that ends takes it, never both.
#[derive(Clone, Default)]
struct Claim(Arc<AtomicBool>);

impl Claim {
    /// Returns false if the other side has taken the claim.
    fn take(&self) -> bool {
        !self.0.swap(true, Ordering::SeqCst)
    }
}

/// Why a session ended.
pub(super) enum End {
    Closed,
    /// The worker had stopped making progress at this count.
    Stuck {
        progress_count: u64,
    },
    /// The broker closed the channel, or the queue was deleted.
    ChannelClosed {
        why: String,
    },
    /// The channel has had no delivery for `QUIET_MAX`.
    Quiet,
    Broken(QueueError),
}

/// A channel that consumes.
pub(super) struct Session {
    number: u64,
    connection: Connection,
    channel: Channel,
    stream: lapin::Consumer,
    /// When the queue may next be asked for a message beyond the prefetch.
    next_ask: Instant,
    ackers: BTreeMap<u64, Acker>,
    /// Messages on their way to other workers, by tag.
    republishing: BTreeMap<u64, (Republish<DeliveryTag>, Claim)>,
    /// Tags of messages that were given back and are being published again.
    sending: BTreeSet<u64>,
    /// Whether publishing a message that was given back has failed.
    cannot_send: Arc<AtomicBool>,
    /// Tags of deliveries recalled because of the acknowledgement timeout.
    recalled: BTreeSet<u64>,
    recalls: Vec<(Recalling, Instant)>,
    last_tick: Instant,
    last_delivery: Instant,
}

impl Consumer {
    /// Connects, declares the queue, and starts consuming.
    pub(super) async fn begin(&self, number: u64) -> Result<Session, QueueError> {
        let connection = open(&self.url, &self.resolved, "consuming").await?;
        // A broker that has just started may accept a request and never answer it.
        within(&self.url, self.consume(number, connection)).await
    }

    async fn consume(&self, number: u64, connection: Connection) -> Result<Session, QueueError> {
        let (channel, _) = declare(&connection, &self.url, &self.resolved).await?;
        let failed = |error: lapin::Error| failed(&self.url, &self.resolved, &error);
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
            next_ask: Instant::now(),
            ackers: BTreeMap::new(),
            republishing: BTreeMap::new(),
            sending: BTreeSet::new(),
            cannot_send: Arc::default(),
            recalled: BTreeSet::new(),
            recalls: Vec::new(),
            last_tick: Instant::now(),
            last_delivery: Instant::now(),
        })
    }

    fn prefetch(&self) -> u16 {
        u16::try_from(self.resolved.settings.in_flight).unwrap_or(u16::MAX)
    }

    /// Gets one message beyond the prefetch if the worker asks for more while deliveries set aside,
    /// or on their way to other workers, fill the prefetch. Messages that this worker does not ask
    /// for remain for others.
    async fn get_beyond_prefetch(&self, session: &mut Session) -> Result<(), End> {
        let prefetch = PrefetchState {
            held: session.ackers.len(),
            ready: self.tracker.ready(),
            prefetch: usize::from(self.prefetch()),
        };
        if !prefetch.for_one_more() || Instant::now() < session.next_ask {
            return Ok(());
        }
        let asking = session
            .channel
            .basic_get(self.url.queue.as_str().into(), BasicGetOptions::default());
        // The request blocks this session, and a broker may accept a request and never answer it.
        let asked = within(&self.url, async { Ok(asking.await) }).await;
        match asked.map_err(End::Broken)? {
            Ok(Some(got)) => self.handle_message(session, got.delivery).await,
            Ok(None) => {
                session.next_ask = Instant::now() + ASK_EVERY;
                Ok(())
            }
            Err(error) => Err(self.broken(session, &error)),
        }
    }

    /// Runs a session to its end. The worker keeps its deliveries beyond that, and may finish them.
    pub(super) async fn live(&mut self, mut session: Session) -> End {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let end = loop {
            let done = tokio::select! {
                biased;
                () = self.tracker.closed_notify.notified() => Err(End::Closed),
                Some(answer) = self.dispositions.recv() => self.settle(&mut session, answer).await,
                _ = ticks.tick() => self.tick(&mut session).await,
                () = self.tracker.starved_notify.notified() => self.get_beyond_prefetch(&mut session).await,
                delivery = session.stream.next() => match delivery {
                    Some(Ok(delivery)) => self.handle_message(&mut session, delivery).await,
                    Some(Err(error)) => Err(self.broken(&session, &error)),
                    None => Err(End::ChannelClosed { why: "the queue was deleted".to_owned() }),
                },
            };
            if let Err(end) = done {
                break end;
            }
        };
        if matches!(end, End::Closed) {
            self.leave(&mut session).await;
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

    fn broken(&self, session: &Session, error: &lapin::Error) -> End {
        let failed = failed(&self.url, &self.resolved, error);
        let is_channel = error.is_amqp_soft_error() || matches!(error.kind(), ErrorKind::InvalidChannelState(..));
        match failed {
            QueueError::Unavailable { why } if is_channel && session.connection.status().connected() => {
                End::ChannelClosed { why }
            }
            error => End::Broken(error),
        }
    }

    async fn handle_message(&self, session: &mut Session, delivery: Delivery) -> Result<(), End> {
        let token = DeliveryTag {
            session: session.number,
            tag: delivery.delivery_tag,
        };
        session.last_delivery = Instant::now();
        session.ackers.insert(token.tag, delivery.acker);
        let headers = delivery.properties.headers().as_ref().map(FieldTable::inner);
        let header = |name: &str| headers.and_then(|headers| headers.get(name));
        let hops = match header(HOPS_HEADER) {
            Some(AMQPValue::LongString(text)) => foreign::hops(Some(text.as_bytes())),
            other => other.map_or(0, |value| u32::try_from(number(value)).unwrap_or(0)),
        };
        let before = header("x-delivery-count").map_or(0, number);
        let before = u32::try_from(before)
            .unwrap_or(u32::MAX - 1)
            .max(u32::from(delivery.redelivered));
        match foreign::classify(&delivery.data, hops, &self.url.to_string(), &self.resolved.signing) {
            Handling::Deliver(message) => {
                self.deliver(session, token, message, delivery.data, before + 1, hops);
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
        let of_old = |held: &DeliveryTag| held.session != session.number;
        if self.tracker.adopt(&message, arrived, token, of_old).is_some() {
            return;
        }
        self.tracker.put(ReceivedMessage {
            token,
            message,
            body,
            deliveries,
            hops,
            arrived,
        });
    }

    /// Handles an answer of the worker. Answers to deliveries of older channels do nothing.
    async fn settle(&self, session: &mut Session, answer: Disposition<DeliveryTag>) -> Result<(), End> {
        match answer {
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
        session.sending.remove(&token.tag);
        session.ackers.remove(&token.tag)
    }

    async fn ack(&self, session: &mut Session, token: DeliveryTag) -> Result<(), End> {
        let Some(acker) = Consumer::acker(session, token) else {
            return Ok(());
        };
        match acker.ack(BasicAckOptions::default()).await {
            Ok(_) => Ok(()),
            Err(error) => Err(self.broken(session, &error)),
        }
    }

    async fn requeue(&self, session: &mut Session, token: DeliveryTag) -> Result<(), End> {
        let Some(acker) = Consumer::acker(session, token) else {
            return Ok(());
        };
        let options = BasicNackOptions {
            requeue: true,
            ..BasicNackOptions::default()
        };
        match acker.nack(options).await {
            Ok(_) => Ok(()),
            Err(error) => Err(self.broken(session, &error)),
        }
    }

    /// Gives a message back by publishing it again: a requeue would raise the broker's delivery
    /// count, as a failed delivery does. Requeues it if publishing fails.
    async fn send_back(&self, session: &mut Session, item: ReceivedMessage<DeliveryTag>) -> Result<(), End> {
        let ReceivedMessage {
            token, ref body, hops, ..
        } = item;
        if !session.owes(token) {
            // The delivery is of an older channel: the broker repeats it by itself.
            return Ok(());
        }
        if session.cannot_send.load(Ordering::SeqCst) {
            return self.requeue(session, token).await;
        }
        session.sending.insert(token.tag);
        let (body, cannot_send) = (body.clone(), session.cannot_send.clone());
        let (publisher, to_self) = (self.publisher.clone(), self.to_self.clone());
        tokio::spawn(async move {
            let sent = tokio::time::timeout(SEND_BACK_MAX, publisher.send_bodies(vec![body], hops)).await;
            let answer = match sent {
                Ok(Ok(())) => Disposition::Acknowledge(token),
                Ok(Err(_)) | Err(_) => {
                    cannot_send.store(true, Ordering::SeqCst);
                    Disposition::GiveBack(item)
                }
            };
            // Fails only once the queue is closed; the broker then repeats the message, harmlessly.
            let _ = to_self.send(answer);
        });
        Ok(())
    }

    /// Acknowledges answered deliveries and sends the others to other workers, before closing.
    async fn leave(&mut self, session: &mut Session) {
        let deadline = tokio::time::Instant::now() + SEND_BACK_MAX;
        // Otherwise messages sent now would come back here and be requeued on closing.
        self.stop_consuming(session, deadline).await;
        let mut left: Vec<Republish<DeliveryTag>> = Vec::new();
        for (tag, (republish, claim)) in std::mem::take(&mut session.republishing) {
            if claim.take() {
                left.push(republish);
                continue;
            }
            session.sending.insert(tag);
        }
        loop {
            let answer = match self.dispositions.try_recv() {
                Ok(answer) => answer,
                Err(_) if session.sending.is_empty() => break,
                // Messages that are being published are confirmed soon.
                Err(_) => match tokio::time::timeout_at(deadline, self.dispositions.recv()).await {
                    Ok(Some(answer)) => answer,
                    Ok(None) | Err(_) => break,
                },
            };
            let settled = match answer {
                Disposition::Acknowledge(token) => self.ack(session, token).await,
                Disposition::GiveBack(item) => {
                    session.sending.remove(&item.token.tag);
                    left.push(item.into());
                    Ok(())
                }
                Disposition::Republish(republish) => {
                    left.push(republish);
                    Ok(())
                }
            };
            if settled.is_err() {
                return;
            }
        }
        left.extend(self.tracker.take_ready(|_| true).into_iter().map(Republish::from));
        left.retain(|republish| session.owes(republish.token));
        for (hops, (tokens, bodies)) in by_hops(left) {
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

    /// Cancels the consumer, and takes in the messages that the broker had sent before.
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
        let claim = Claim::default();
        if session.owes(republish.token) {
            let kept = (republish.clone(), claim.clone());
            session.republishing.insert(republish.token.tag, kept);
        }
        let Republish { token, body, hops } = republish;
        let (publisher, to_self, tracker) = (self.publisher.clone(), self.to_self.clone(), self.tracker.clone());
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
                let _ = to_self.send(Disposition::Acknowledge(token));
            }
        });
    }

    /// Checks the worker's progress and the acknowledgement timeout.
    async fn tick(&self, session: &mut Session) -> Result<(), End> {
        let now = Instant::now();
        let stalled = now - session.last_tick;
        session.last_tick = now;
        if stalled > STANDSTILL {
            self.tracker.extend_leases(stalled);
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
            // Before the broker requeues: an observer must not take an empty queue for the end.
            self.tracker.set_attached(false);
            return Err(End::Stuck { progress_count });
        }
        let recall_after = self.url.ack_timeout.mul_f64(RECALL_SHARE);
        for item in self.tracker.take_ready(|item| now - item.arrived >= recall_after) {
            // No worker has had it: it is given back in good order.
            self.send_back(session, item).await?;
        }
        self.recall_overdue(session, now, recall_after);
        self.return_recalled(session, now).await?;
        if session.ackers.is_empty() && now - session.last_delivery >= QUIET_MAX {
            return Err(End::Quiet);
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
            let grace = self.url.ack_timeout.mul_f64(RETURN_SHARE - RECALL_SHARE);
            session.recalls.push((recalling, now + grace));
        }
    }

    async fn return_recalled(&self, session: &mut Session, now: Instant) -> Result<(), End> {
        let mut waiting = Vec::new();
        for (recalling, deadline) in std::mem::take(&mut session.recalls) {
            // A worker that has let go may still answer in time, once its writes return.
            if !recalling.is_answered(&self.tracker) && now < deadline {
                waiting.push((recalling, deadline));
                continue;
            }
            for &receipt in recalling.receipts() {
                if let Some(item) = self.tracker.take_out(receipt) {
                    self.requeue(session, item.token).await?;
                }
            }
        }
        session.recalls = waiting;
        Ok(())
    }
}

impl Session {
    /// Whether this channel has an unacknowledged delivery of this tag.
    fn owes(&self, token: DeliveryTag) -> bool {
        token.session == self.number && self.ackers.contains_key(&token.tag)
    }
}

/// Groups messages by hops: their delivery tags and bodies.
fn by_hops(republishing: Vec<Republish<DeliveryTag>>) -> BTreeMap<u32, (Vec<DeliveryTag>, Vec<Vec<u8>>)> {
    let mut sorted: BTreeMap<u32, (Vec<DeliveryTag>, Vec<Vec<u8>>)> = BTreeMap::new();
    for Republish { token, body, hops } in republishing {
        let (tokens, bodies) = sorted.entry(hops).or_default();
        tokens.push(token);
        bodies.push(body);
    }
    sorted
}

/// Decides whether the queue is asked for a message beyond the prefetch.
struct PrefetchState {
    /// Unacknowledged messages of this channel.
    held: usize,
    /// Messages among them that the worker has not received yet.
    ready: usize,
    prefetch: usize,
}

impl PrefetchState {
    /// Whether the prefetch is full and the worker has received every message.
    fn for_one_more(&self) -> bool {
        self.held >= self.prefetch && self.ready == 0
    }
}

/// The integer in a header of any width; 0 for other types.
fn number(value: &AMQPValue) -> i64 {
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
    fn a_message_beyond_the_prefetch_is_asked_for_where_none_comes_by_itself() {
        let prefetch = |held, ready| {
            let prefetch = PrefetchState {
                held,
                ready,
                prefetch: 4,
            };
            prefetch.for_one_more()
        };
        assert!(prefetch(4, 0) && prefetch(9, 0));
        assert!(!prefetch(3, 0), "the broker sends it by itself");
        assert!(
            !prefetch(4, 1) && !prefetch(9, 2),
            "what lies here comes first: others may have the rest"
        );
    }

    #[test]
    fn what_is_sent_again_keeps_its_hops() {
        let republish = |tag, hops| Republish {
            token: DeliveryTag { session: 0, tag },
            body: vec![tag as u8],
            hops,
        };
        let sorted = by_hops(vec![republish(1, 0), republish(2, 3), republish(3, 0)]);
        let tags = |hops: u32| sorted[&hops].0.iter().map(|token| token.tag).collect::<Vec<_>>();
        assert_eq!((tags(0), tags(3)), (vec![1, 3], vec![2]));
        assert_eq!(
            (&sorted[&0].1, &sorted[&3].1),
            (&vec![vec![1], vec![3]], &vec![vec![2]])
        );
        assert_eq!(sorted.len(), 2);
    }
}
