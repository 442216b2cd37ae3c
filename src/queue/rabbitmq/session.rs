//! One life of a channel: messages in, acknowledgements out, until it breaks or is closed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures::StreamExt;
use lapin::Acker;
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Connection, ErrorKind};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};

use super::declare::declare;
use super::link::{failed, open, within};
use super::publisher::RabbitPublisher;
use crate::queue::address::RabbitUrl;
use crate::queue::desk::{Answer, Desk, Item, Parcel, Recalling};
use crate::queue::foreign::{self, Fate, HOPS_HEADER};
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
/// How long closing the connection may take.
const CLOSE_WAIT: Duration = Duration::from_secs(2);

/// A delivery of one channel: acknowledgements of another's do nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tag {
    session: u64,
    tag: u64,
}

/// What outlives a session.
pub(super) struct Consumer {
    pub url: RabbitUrl,
    pub resolved: Resolved,
    pub desk: Arc<Desk<Tag>>,
    pub answers: UnboundedReceiver<Answer<Tag>>,
    /// Reports messages that were passed on.
    pub to_self: UnboundedSender<Answer<Tag>>,
    pub publisher: RabbitPublisher,
}

/// Why a session ended.
pub(super) enum End {
    /// The queue is closed.
    Closed,
    /// The worker has stopped making progress when it had given so many signs of life.
    Stuck {
        signs: u64,
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
    stream: lapin::Consumer,
    ackers: BTreeMap<u64, Acker>,
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
        let prefetch = u16::try_from(self.resolved.settings.in_flight).unwrap_or(u16::MAX);
        channel
            .basic_qos(prefetch, BasicQosOptions::default())
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
            stream,
            ackers: BTreeMap::new(),
            recalled: BTreeSet::new(),
            recalls: Vec::new(),
            last_tick: Instant::now(),
            last_delivery: Instant::now(),
        })
    }

    /// Runs a session to its end. What the worker holds stays with it: it may finish while the broker is away.
    pub async fn live(&mut self, mut session: Session) -> End {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let end = loop {
            let done = tokio::select! {
                biased;
                () = self.desk.closed_bell.notified() => Err(End::Closed),
                Some(answer) = self.answers.recv() => self.settle(&mut session, answer).await,
                _ = ticks.tick() => self.tick(&mut session).await,
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
            while let Ok(answer) = self.answers.try_recv() {
                if self.settle(&mut session, answer).await.is_err() {
                    break;
                }
            }
        }
        // Messages that no worker has go back to the broker with the channel.
        self.desk.take_ready(|_| true);
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
        let token = Tag {
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
        match foreign::fate(&delivery.data, hops, &self.url.to_string()) {
            Fate::Deliver(message) => {
                self.deliver(session, token, message, delivery.data, before + 1, hops);
                Ok(())
            }
            Fate::PassOn(hops) => {
                self.carry(Parcel {
                    token,
                    body: delivery.data,
                    hops,
                });
                Ok(())
            }
            Fate::Drop => self.ack(session, token).await,
        }
    }

    fn deliver(&self, session: &Session, token: Tag, message: Message, body: Vec<u8>, deliveries: u32, hops: u32) {
        let arrived = Instant::now();
        // After a break the broker repeats what the worker still holds: it goes on with it, now of this channel.
        let of_old = |held: &Tag| held.session != session.number;
        if self.desk.adopt(&message, arrived, token, of_old).is_some() {
            return;
        }
        self.desk.put(Item {
            token,
            message,
            body,
            deliveries,
            hops,
            arrived,
        });
    }

    /// Acts on what the worker said; of older channels there is nothing to say.
    async fn settle(&self, session: &mut Session, answer: Answer<Tag>) -> Result<(), End> {
        match answer {
            Answer::Done(token) => self.ack(session, token).await,
            Answer::Back(item) => self.requeue(session, item.token).await,
            Answer::PassOn(parcel) => {
                self.carry(parcel);
                Ok(())
            }
        }
    }

    fn acker(session: &mut Session, token: Tag) -> Option<Acker> {
        if token.session != session.number {
            return None;
        }
        session.recalled.remove(&token.tag);
        session.ackers.remove(&token.tag)
    }

    async fn ack(&self, session: &mut Session, token: Tag) -> Result<(), End> {
        let Some(acker) = Consumer::acker(session, token) else {
            return Ok(());
        };
        match acker.ack(BasicAckOptions::default()).await {
            Ok(_) => Ok(()),
            Err(error) => Err(self.broken(session, &error)),
        }
    }

    async fn requeue(&self, session: &mut Session, token: Tag) -> Result<(), End> {
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

    /// Sends the message again after a while, then acknowledges this delivery of it.
    fn carry(&self, parcel: Parcel<Tag>) {
        let Parcel { token, body, hops } = parcel;
        let (publisher, to_self, desk) = (self.publisher.clone(), self.to_self.clone(), self.desk.clone());
        let delay = self.resolved.settings.pass_on_delay;
        desk.parcels.fetch_add(1, Ordering::SeqCst);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(delay).await;
                match publisher.send_body(body.clone(), hops).await {
                    Ok(()) => break,
                    Err(error) => tracing::warn!("cannot pass a message on, trying again: {error}"),
                }
            }
            desk.parcels.fetch_sub(1, Ordering::SeqCst);
            // Nobody listens once the queue is closed: then the broker repeats the message, which is harmless.
            let _ = to_self.send(Answer::Done(token));
        });
    }

    /// The watchdog, and the acknowledgement timeout.
    async fn tick(&self, session: &mut Session) -> Result<(), End> {
        let now = Instant::now();
        let stood = now - session.last_tick;
        session.last_tick = now;
        if stood > STANDSTILL {
            self.desk.grant(stood);
        }
        if self.desk.is_stuck(now) {
            let signs = self.desk.signs();
            tracing::warn!(
                "{}: the worker has stopped making progress; leaving the queue until it moves on",
                self.url
            );
            self.desk.recall("its worker has stopped making progress", |_| true);
            self.desk.forget(|_| true);
            return Err(End::Stuck { signs });
        }
        let recall_after = self.url.ack_timeout.mul_f64(RECALL_SHARE);
        for item in self.desk.take_ready(|item| now - item.arrived >= recall_after) {
            self.requeue(session, item.token).await?;
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
            .desk
            .recall("the broker's acknowledgement timeout is near", |item| {
                let Tag { session: number, tag } = item.token;
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
        for (mut recalling, deadline) in std::mem::take(&mut session.recalls) {
            if !recalling.has_ended(&self.desk) && now < deadline {
                waiting.push((recalling, deadline));
                continue;
            }
            for &receipt in recalling.receipts() {
                if let Some(item) = self.desk.take_out(receipt) {
                    self.requeue(session, item.token).await?;
                }
            }
        }
        session.recalls = waiting;
        Ok(())
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
