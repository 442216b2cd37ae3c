//! One life of a channel: messages in, acknowledgements out, until it breaks or is closed.

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
/// No tick for so long: the process was stopped, and the worker with it.
const STANDSTILL: Duration = Duration::from_secs(2);
/// A delivery is recalled after this share of the acknowledgement timeout …
const RECALL_SHARE: f64 = 0.8;
/// … and given back after this share, whether its worker has let go or not.
const RETURN_SHARE: f64 = 0.92;
/// RabbitMQ does not tell every consumer that its queue was deleted: where it is made anew at once, the new queue hands
/// its messages to the old channel, and they get lost between the two. So a channel on which nothing has come for so
/// long, and that owes no answer, is given up for another; what it was handed goes back.
const QUIET_MAX: Duration = Duration::from_secs(20);
/// Until the queue is asked again for a message beyond the prefetch, where it had none.
const ASK_EVERY: Duration = Duration::from_millis(500);
/// How long the broker may take to confirm what is given back; then it is requeued.
const SEND_BACK_MAX: Duration = Duration::from_secs(2);
/// How long closing the connection may take.
const CLOSE_WAIT: Duration = Duration::from_secs(2);

/// A delivery of one channel: acknowledgements of another's do nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DeliveryTag {
    session: u64,
    tag: u64,
}

/// What outlives a session.
pub(super) struct Consumer {
    pub url: RabbitUrl,
    pub resolved: Resolved,
    pub tracker: Arc<DeliveryTracker<DeliveryTag>>,
    pub dispositions: UnboundedReceiver<Disposition<DeliveryTag>>,
    /// Reports messages that were passed on.
    pub to_self: UnboundedSender<Disposition<DeliveryTag>>,
    pub publisher: RabbitPublisher,
}

/// Who sends a message, its task or the session that ends, takes its claim first: else both would.
#[derive(Clone, Default)]
struct Claim(Arc<AtomicBool>);

impl Claim {
    /// False: the other one has it.
    fn take(&self) -> bool {
        !self.0.swap(true, Ordering::SeqCst)
    }
}

/// Why a session ended.
pub(super) enum End {
    /// The queue is closed.
    Closed,
    /// The worker has stopped making progress when it had given so many signs of life.
    Stuck {
        progress_count: u64,
    },
    /// The broker closed the channel, or the queue was deleted.
    ChannelClosed {
        why: String,
    },
    /// Nothing has come for long.
    Quiet,
    Broken(QueueError),
}

/// A channel that consumes.
pub(super) struct Session {
    number: u64,
    connection: Connection,
    channel: Channel,
    stream: lapin::Consumer,
    /// When the queue may be asked for a message beyond the prefetch.
    next_ask: Instant,
    ackers: BTreeMap<u64, Acker>,
    /// Messages on their way to other workers, by tag.
    republishing: BTreeMap<u64, (Republish<DeliveryTag>, Claim)>,
    /// Given back, and being sent, by tag.
    sending: BTreeSet<u64>,
    /// The broker did not take what was given back.
    cannot_send: Arc<AtomicBool>,
    /// Recalled for the acknowledgement timeout, by tag.
    recalled: BTreeSet<u64>,
    recalls: Vec<(Recalling, Instant)>,
    last_tick: Instant,
    last_delivery: Instant,
}

impl Consumer {
    /// Connects, declares, consumes.
    pub async fn begin(&self, number: u64) -> Result<Session, QueueError> {
        let connection = open(&self.url, &self.resolved, "consuming").await?;
        // A broker that has just started may take a question and never answer it.
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

    /// The worker asks for more, and what it has set aside, or is on its way to others, takes up the prefetch: one more is fetched. So
    /// the broker holds none back for what is set aside, and other workers get what this one does not ask for.
    async fn feed(&self, session: &mut Session) -> Result<(), End> {
        let asks = Asks {
            held: session.ackers.len(),
            ready: self.tracker.ready(),
            prefetch: usize::from(self.prefetch()),
        };
        if !asks.for_one_more() || Instant::now() < session.next_ask {
            return Ok(());
        }
        let asking = session
            .channel
            .basic_get(self.url.queue.as_str().into(), BasicGetOptions::default());
        // Nothing else is done on this channel meanwhile, and a broker may take a question and never answer it.
        let asked = within(&self.url, async { Ok(asking.await) }).await;
        match asked.map_err(End::Broken)? {
            Ok(Some(got)) => self.take_in(session, got.delivery).await,
            Ok(None) => {
                session.next_ask = Instant::now() + ASK_EVERY;
                Ok(())
            }
            Err(error) => Err(self.broken(session, &error)),
        }
    }

    /// Runs a session to its end. What the worker holds stays with it: it may finish while the broker is away.
    pub async fn live(&mut self, mut session: Session) -> End {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let end = loop {
            let done = tokio::select! {
                biased;
                () = self.tracker.closed_notify.notified() => Err(End::Closed),
                Some(answer) = self.dispositions.recv() => self.settle(&mut session, answer).await,
                _ = ticks.tick() => self.tick(&mut session).await,
                () = self.tracker.starved_notify.notified() => self.feed(&mut session).await,
                delivery = session.stream.next() => match delivery {
                    Some(Ok(delivery)) => self.take_in(&mut session, delivery).await,
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
        // Messages that no worker has go back to the broker with the channel.
        self.tracker.take_ready(|_| true);
        if session.connection.status().connected() {
            let closing = session.connection.close(200, "OK".into());
            if !matches!(tokio::time::timeout(CLOSE_WAIT, closing).await, Ok(Ok(()))) {
                tracing::debug!("{}: the connection did not close properly", self.url);
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

    async fn take_in(&self, session: &mut Session, delivery: Delivery) -> Result<(), End> {
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
        match foreign::handling(&delivery.data, hops, &self.url.to_string(), &self.resolved.signing) {
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
        // After a break the broker repeats what the worker still holds: it goes on with it, now of this channel.
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

    /// Acts on what the worker said; of older channels there is nothing to say.
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

    /// Given back in good order: sent again, for the broker counts what it requeues as a delivery that came to nothing. Requeued
    /// where it cannot be sent.
    async fn send_back(&self, session: &mut Session, item: ReceivedMessage<DeliveryTag>) -> Result<(), End> {
        let ReceivedMessage {
            token, ref body, hops, ..
        } = item;
        if !session.owes(token) {
            // The broker repeats it by itself.
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
            // Nobody listens once the queue is closed: then the broker repeats the message, which is harmless.
            let _ = to_self.send(answer);
        });
        Ok(())
    }

    /// The queue is closed: what the worker has answered is done, and all else goes to other workers, as far as there is time.
    async fn leave(&mut self, session: &mut Session) {
        let deadline = tokio::time::Instant::now() + SEND_BACK_MAX;
        // Else what is sent would come here again, and be requeued as the channel closes.
        self.stop_consuming(session, deadline).await;
        let mut left: Vec<Republish<DeliveryTag>> = Vec::new();
        for (tag, (republish, claim)) in std::mem::take(&mut session.republishing) {
            match claim.take() {
                true => left.push(republish),
                false => _ = session.sending.insert(tag),
            }
        }
        let republish = |item: ReceivedMessage<DeliveryTag>| {
            let ReceivedMessage { token, body, hops, .. } = item;
            Republish { token, body, hops }
        };
        loop {
            let answer = match self.dispositions.try_recv() {
                Ok(answer) => answer,
                Err(_) if session.sending.is_empty() => break,
                // What is being sent is confirmed soon.
                Err(_) => match tokio::time::timeout_at(deadline, self.dispositions.recv()).await {
                    Ok(Some(answer)) => answer,
                    Ok(None) | Err(_) => break,
                },
            };
            let settled = match answer {
                Disposition::Acknowledge(token) => self.ack(session, token).await,
                Disposition::GiveBack(item) => {
                    session.sending.remove(&item.token.tag);
                    left.push(republish(item));
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
        left.extend(self.tracker.take_ready(|_| true).into_iter().map(republish));
        left.retain(|republish| session.owes(republish.token));
        for (hops, (tokens, bodies)) in by_hops(left) {
            let sending = self.publisher.send_bodies(bodies, hops);
            let is_sent = matches!(tokio::time::timeout_at(deadline, sending).await, Ok(Ok(())));
            for token in tokens {
                let settled = match is_sent {
                    true => self.ack(session, token).await,
                    false => self.requeue(session, token).await,
                };
                if settled.is_err() {
                    return;
                }
            }
        }
    }

    /// Ends the consumer; what it was sent until then is taken in.
    async fn stop_consuming(&self, session: &mut Session, deadline: tokio::time::Instant) {
        let consumer = session.stream.tag();
        let ending = async {
            session
                .channel
                .basic_cancel(consumer, BasicCancelOptions::default())
                .await?;
            let mut rest = Vec::new();
            // It ends, now that the broker has confirmed.
            while let Some(delivery) = session.stream.next().await {
                rest.push(delivery?);
            }
            Ok::<_, lapin::Error>(rest)
        };
        let Ok(Ok(rest)) = tokio::time::timeout_at(deadline, ending).await else {
            tracing::debug!("{}: the broker did not confirm that this consumer ends", self.url);
            return;
        };
        for delivery in rest {
            if self.take_in(session, delivery).await.is_err() {
                return;
            }
        }
    }

    /// Sends the message again after a while, then acknowledges this delivery of it.
    fn republish_later(&self, session: &mut Session, republish: Republish<DeliveryTag>) {
        let claim = Claim::default();
        if session.owes(republish.token) {
            let kept = (republish.clone(), claim.clone());
            session.republishing.insert(republish.token.tag, kept);
        }
        let Republish { token, body, hops } = republish;
        let (publisher, to_self, tracker) = (self.publisher.clone(), self.to_self.clone(), self.tracker.clone());
        let delay = self.resolved.settings.pass_on_delay;
        tracker.republishing.fetch_add(1, Ordering::SeqCst);
        tokio::spawn(async move {
            tokio::time::sleep(delay).await;
            let is_ours = claim.take();
            let mut is_due = is_ours;
            while is_due {
                match publisher.send_bodies(vec![body.clone()], hops).await {
                    Ok(()) => is_due = false,
                    Err(error) => {
                        tracing::warn!("cannot pass a message on, trying again: {error}");
                        tokio::time::sleep(delay).await;
                    }
                }
            }
            tracker.republishing.fetch_sub(1, Ordering::SeqCst);
            // Nobody listens once the queue is closed: then the broker repeats the message, which is harmless.
            if is_ours {
                let _ = to_self.send(Disposition::Acknowledge(token));
            }
        });
    }

    /// The watchdog, and the acknowledgement timeout.
    async fn tick(&self, session: &mut Session) -> Result<(), End> {
        let now = Instant::now();
        let stood = now - session.last_tick;
        session.last_tick = now;
        if stood > STANDSTILL {
            self.tracker.grant(stood);
        }
        if self.tracker.is_stuck(now) {
            let progress_count = self.tracker.progress_count();
            tracing::warn!(
                "{}: the worker has stopped making progress; leaving the queue until it moves on",
                self.url
            );
            self.tracker.recall("its worker has stopped making progress", |_| true);
            self.tracker.forget(|_| true);
            // Before the broker gives its messages to others: who asks meanwhile must not take an empty queue for the end.
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
            // Whoever has let go of a shard may be about to answer, once a store has: what comes in time is the answer.
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
    /// Whether this channel has a delivery that waits for its answer.
    fn owes(&self, token: DeliveryTag) -> bool {
        token.session == self.number && self.ackers.contains_key(&token.tag)
    }
}

/// The deliveries and the bodies of messages to be sent with so many hops.
fn by_hops(republishing: Vec<Republish<DeliveryTag>>) -> BTreeMap<u32, (Vec<DeliveryTag>, Vec<Vec<u8>>)> {
    let mut sorted: BTreeMap<u32, (Vec<DeliveryTag>, Vec<Vec<u8>>)> = BTreeMap::new();
    for Republish { token, body, hops } in republishing {
        let (tokens, bodies) = sorted.entry(hops).or_default();
        tokens.push(token);
        bodies.push(body);
    }
    sorted
}

/// What decides whether the queue is asked for a message beyond the prefetch.
struct Asks {
    /// Messages of this channel without an answer.
    held: usize,
    /// Those of them that nobody has received yet.
    ready: usize,
    prefetch: usize,
}

impl Asks {
    /// The broker sends nothing by itself, and the worker has taken all that came.
    fn for_one_more(&self) -> bool {
        self.held >= self.prefetch && self.ready == 0
    }
}

/// A header's number, of whatever width; 0 where it is none.
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
        let asks = |held, ready| {
            let asks = Asks {
                held,
                ready,
                prefetch: 4,
            };
            asks.for_one_more()
        };
        assert!(asks(4, 0) && asks(9, 0));
        assert!(!asks(3, 0), "the broker sends it by itself");
        assert!(
            !asks(4, 1) && !asks(9, 2),
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
