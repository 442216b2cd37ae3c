//! Delivers owed events: which one is tried when, by this process.
//!
//! Any number of processes deliver. A try is claimed in the store before it is made, so that usually
//! one process makes it. A process that dies after a post has sent an event that another one sends
//! again, with the same id.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use tokio::task::{JoinError, JoinSet};

use super::post::{Answer, Event, TRY_TIMEOUT};
use super::records::{Delivery, DeliveryResult, Owed, OwedKey};
use super::schedule::{Load, Schedule, webhook_of};
use crate::error_line::one_line;
use crate::ledger::LedgerError;
use crate::serve::service::{Service, now};

/// Time between two looks for events that other processes have left.
const LOOK_PAUSE: Duration = Duration::from_secs(30);
/// Maximum number of marks and tries of a tenant that are looked at.
pub(super) const OWED_MAX: usize = 10_000;
/// Age at which an event is given up whose webhook is in the file no more.
const UNKNOWN_AGE_MAX: chrono::TimeDelta = chrono::TimeDelta::days(3);

/// An owed event, and when this process tries it next.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    tries: u32,
    due: Instant,
}

/// How a try has ended.
#[derive(Debug, PartialEq, Eq)]
enum TryEnd {
    Delivered,
    /// The webhook wants the event no more.
    Gone,
    /// The webhook did not take it, for this reason; a further try follows.
    Failed(String),
    /// The webhook did not take it at the last try, for this reason.
    GivenUp(String),
    /// The event was owed no more.
    Over,
    /// Another process makes this try.
    Elsewhere,
    /// The store is away; nothing is known.
    Unknown,
}

/// The events that this process knows of.
struct Deliverer {
    service: Arc<Service>,
    schedule: Schedule,
    waiting: BTreeMap<OwedKey, Waiting>,
    running: HashSet<OwedKey>,
    load: Load,
    tries: JoinSet<(OwedKey, u32, TryEnd)>,
}

/// Delivers events until `stop` completes and the running tries have ended.
pub async fn deliver(service: Arc<Service>, schedule: Schedule, stop: impl Future<Output = ()>) {
    if service.webhooks.list.is_empty() {
        return stop.await;
    }
    let mut stop = std::pin::pin!(stop);
    let mut deliverer = Deliverer::new(service.clone(), schedule);
    let mut next_look = Instant::now();
    let mut next_due = next_look;
    loop {
        tokio::select! {
            Some(ended) = deliverer.tries.join_next() => deliverer.finish(ended),
            () = service.webhooks.has_new.notified() => next_look = Instant::now(),
            () = tokio::time::sleep_until(next_look.min(next_due).into()) => {}
            () = &mut stop => break,
        }
        if next_look <= Instant::now() {
            deliverer.look().await;
            next_look = Instant::now() + LOOK_PAUSE;
        }
        next_due = deliverer.begin_due().unwrap_or(next_look);
    }
    while let Some(ended) = deliverer.tries.join_next().await {
        deliverer.finish(ended);
    }
}

impl Deliverer {
    fn new(service: Arc<Service>, schedule: Schedule) -> Deliverer {
        Deliverer {
            service,
            schedule,
            waiting: BTreeMap::new(),
            running: HashSet::new(),
            load: Load::default(),
            tries: JoinSet::new(),
        }
    }

    /// Reads from the store which events are owed. What this process has found out about them stays.
    async fn look(&mut self) {
        let mut waiting = BTreeMap::new();
        let service = self.service.clone();
        // A tenant may have no webhook any more, and events of those that it had.
        for tenant in service.keys.tenants() {
            let owed = match service.records.owed(&tenant).await {
                Ok(owed) => owed,
                Err(error) => {
                    tracing::warn!("the owed webhooks could not be listed: {}", one_line(&error.into()));
                    return;
                }
            };
            for (key, owed) in owed {
                if service.webhooks.of(&key).is_none() {
                    self.drop_unknown(&key, &owed).await;
                } else if !self.running.contains(&key) {
                    let known = self.waiting.get(&key).filter(|known| known.tries >= owed.tries);
                    let found = known.copied().unwrap_or_else(|| self.waiting_from(&owed, Utc::now()));
                    waiting.insert(key, found);
                }
            }
        }
        self.waiting = waiting;
    }

    /// When an event is due that this process has not tried last.
    fn waiting_from(&self, owed: &Owed, now: DateTime<Utc>) -> Waiting {
        let pause = match owed.tries {
            0 => Duration::ZERO,
            // The try may still run, in the process that has claimed it.
            tries => TRY_TIMEOUT + self.schedule.pause(tries).unwrap_or_default(),
        };
        let passed = (now - owed.last).to_std().unwrap_or_default();
        Waiting {
            tries: owed.tries,
            due: Instant::now() + pause.saturating_sub(passed),
        }
    }

    /// Gives an old event up whose webhook is in the file no more.
    async fn drop_unknown(&self, key: &OwedKey, owed: &Owed) {
        if Utc::now() - owed.since < UNKNOWN_AGE_MAX {
            return;
        }
        let id = &key.batch.id;
        tracing::error!(
            batch = id,
            "the end of batch {id} is told to nobody: the webhook of tenant `{}` that was to know is not in the file any more",
            key.batch.tenant.as_str()
        );
        let settled = settle(&self.service, key, owed.tries, DeliveryResult::GivenUp).await;
        if let Err(error) = settled {
            tracing::warn!(
                batch = id,
                "an old webhook could not be removed: {}",
                one_line(&error.into())
            );
        }
    }

    /// Begins the tries that are due, and returns when the next ones are.
    fn begin_due(&mut self) -> Option<Instant> {
        let now = Instant::now();
        let due = self.waiting.iter().filter(|(_, waiting)| waiting.due <= now);
        for key in self.load.choose(due.map(|(key, waiting)| (key.clone(), waiting.due))) {
            let Some(waiting) = self.waiting.remove(&key) else {
                continue;
            };
            self.running.insert(key.clone());
            // `tries` may be all that there are, if a process died within the last one.
            let number = waiting.tries + 1;
            let (service, schedule) = (self.service.clone(), self.schedule);
            self.tries.spawn(async move {
                let ended = match try_once(&service, schedule, &key, number).await {
                    Ok(ended) => ended,
                    Err(error) => {
                        let id = &key.batch.id;
                        let why = one_line(&error.into());
                        tracing::warn!(batch = id, "the webhook of batch {id} was not tried: {why}");
                        TryEnd::Unknown
                    }
                };
                (key, number, ended)
            });
        }
        // What is due and was not chosen waits for the end of a try.
        self.waiting
            .values()
            .map(|waiting| waiting.due)
            .filter(|due| *due > now)
            .min()
    }

    /// Notes the end of a try.
    fn finish(&mut self, ended: Result<(OwedKey, u32, TryEnd), JoinError>) {
        let Ok((key, number, ended)) = ended else {
            // A try has panicked; which one is not known. The next look finds its event again.
            self.running.clear();
            self.load.running.clear();
            return;
        };
        self.running.remove(&key);
        let webhook = webhook_of(&key);
        self.load.end(&webhook);
        let pause = self.schedule.pause(number).unwrap_or_default();
        self.account(&key, number, &ended);
        let next = match ended {
            TryEnd::Delivered | TryEnd::Gone => {
                if self.load.failing.remove(&webhook) {
                    let (tenant, _) = &webhook;
                    tracing::info!("a webhook of tenant `{}` takes events again", tenant.as_str());
                }
                None
            }
            TryEnd::GivenUp(_) | TryEnd::Over => None,
            TryEnd::Failed(why) => {
                let (tenant, id) = (webhook.0.as_str().to_string(), &key.batch.id);
                if self.load.failing.insert(webhook) {
                    tracing::warn!(
                        batch = id,
                        "a webhook of tenant `{tenant}` did not take the end of batch {id}: {why}; it is tried again in {} s",
                        pause.as_secs()
                    );
                }
                Some((number, pause))
            }
            TryEnd::Elsewhere => Some((number, TRY_TIMEOUT + pause)),
            TryEnd::Unknown => Some((number - 1, LOOK_PAUSE)),
        };
        if let Some((tries, pause)) = next {
            let due = Instant::now() + pause;
            self.waiting.insert(key, Waiting { tries, due });
        }
    }

    /// Counts a try, and says if it was the last one.
    fn account(&self, key: &OwedKey, number: u32, ended: &TryEnd) {
        let result = match ended {
            TryEnd::Delivered => "delivered",
            TryEnd::Gone => "gone",
            TryEnd::Failed(_) => "failed",
            TryEnd::GivenUp(why) => {
                let (tenant, id) = (key.batch.tenant.as_str(), &key.batch.id);
                tracing::error!(
                    batch = id,
                    "a webhook of tenant `{tenant}` did not take the end of batch {id} in {number} tries, and gets it no more: {why}"
                );
                "given_up"
            }
            TryEnd::Over | TryEnd::Elsewhere | TryEnd::Unknown => return,
        };
        self.service.metrics.count_webhook(result);
    }
}

/// Makes one try, unless another process makes it, or the event is owed no more.
async fn try_once(service: &Service, schedule: Schedule, key: &OwedKey, number: u32) -> Result<TryEnd, LedgerError> {
    let records = &service.records;
    if !records.claim_try(key, number, now()).await? {
        return Ok(TryEnd::Elsewhere);
    }
    if records.delivery(key).await?.is_some() {
        records.remove_owed(key, number).await?;
        return Ok(TryEnd::Over);
    }
    let (Some(webhook), Some(ended)) = (service.webhooks.of(key), records.end_of(&key.batch).await?) else {
        settle(service, key, number, DeliveryResult::GivenUp).await?;
        return Ok(TryEnd::GivenUp("the batch's records are gone".into()));
    };
    let event = Event::new(&key.batch.id, &ended);
    let (result, end) = match event.post(webhook, now().unsigned_abs()).await {
        Answer::Taken => (DeliveryResult::Delivered, TryEnd::Delivered),
        Answer::Gone => (DeliveryResult::Gone, TryEnd::Gone),
        Answer::Failed(why) => {
            let why = format!("{}: {why}", webhook.server);
            if schedule.pause(number).is_some() {
                return Ok(TryEnd::Failed(why));
            }
            (DeliveryResult::GivenUp, TryEnd::GivenUp(why))
        }
    };
    settle(service, key, number, result).await?;
    Ok(end)
}

async fn settle(service: &Service, key: &OwedKey, tries: u32, result: DeliveryResult) -> Result<(), LedgerError> {
    let delivery = Delivery {
        at: now(),
        result,
        tries,
    };
    service.records.settle(key, delivery).await
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::serve::id;
    use crate::serve::keys::{Keys, Tenant};
    use crate::serve::metrics::ServeMetrics;
    use crate::serve::record::{EndStatus, EndedBatch};
    use crate::serve::records::BatchKey;
    use crate::serve::records::tests::root;
    use crate::serve::webhooks::Webhooks;

    /// A server that answers all requests with `status`: its address, and the number of requests.
    fn server(status: &'static str) -> (String, Arc<AtomicUsize>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let seen = Arc::new(AtomicUsize::new(0));
        let counted = seen.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let length = stream.read(&mut vec![0; 64 << 10]).unwrap();
                assert!(length > 0);
                counted.fetch_add(1, Ordering::SeqCst);
                let head = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
                stream.write_all(head.as_bytes()).unwrap();
            }
        });
        (url, seen)
    }

    /// A service whose tenant has one webhook, and a batch that has ended and owes it an event.
    async fn owing(url: &str) -> (Arc<Service>, OwedKey) {
        let metrics = ServeMetrics::new(None).unwrap();
        let service = Service::open(root(), Vec::new(), Keys::Open, Webhooks::for_test(url), metrics);
        let service = Arc::new(service.await.unwrap());
        let batch = BatchKey::new(&Tenant::new("default").unwrap(), id::new_id(id::BATCH).unwrap());
        let ended = EndedBatch {
            at: 5,
            status: EndStatus::Completed,
            errors: Vec::new(),
        };
        service.records.ended(&batch, ended).await.unwrap();
        let webhooks = &service.webhooks;
        webhooks
            .owe(&service.records, &batch, EndStatus::Completed)
            .await
            .unwrap();
        let key = OwedKey::new(&batch, &webhooks.list[0].id);
        (service, key)
    }

    async fn tries(service: &Service, key: &OwedKey) -> Option<u32> {
        let owed = service.records.owed(&key.batch.tenant).await.unwrap();
        owed.get(key).map(|owed| owed.tries)
    }

    const SCHEDULE: Duration = Duration::from_secs(1);

    async fn try_number(service: &Service, key: &OwedKey, number: u32) -> TryEnd {
        try_once(service, Schedule::new(SCHEDULE), key, number).await.unwrap()
    }

    #[tokio::test]
    async fn what_was_delivered_is_not_sent_again() {
        let (url, seen) = server("204 Taken");
        let (service, key) = owing(&url).await;
        assert_eq!(tries(&service, &key).await, Some(0));
        assert_eq!(try_number(&service, &key, 1).await, TryEnd::Delivered);
        assert_eq!(tries(&service, &key).await, None);
        // A process that looked at the batch before comes late.
        service.records.owe(&key).await.unwrap();
        assert_eq!(try_number(&service, &key, 1).await, TryEnd::Over);
        assert_eq!(tries(&service, &key).await, None);
        assert_eq!(seen.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn a_try_of_another_process_is_left_to_it() {
        let (url, seen) = server("204 Taken");
        let (service, key) = owing(&url).await;
        assert!(service.records.claim_try(&key, 1, 5).await.unwrap());
        assert_eq!(try_number(&service, &key, 1).await, TryEnd::Elsewhere);
        assert_eq!((tries(&service, &key).await, seen.load(Ordering::SeqCst)), (Some(1), 0));
    }

    #[tokio::test]
    async fn failures_are_tried_again_until_the_last_one() {
        let (url, _) = server("500 Oh");
        let (service, key) = owing(&url).await;
        assert!(matches!(try_number(&service, &key, 1).await, TryEnd::Failed(why) if why.contains("500")));
        assert_eq!(tries(&service, &key).await, Some(1));
        assert!(matches!(try_number(&service, &key, 11).await, TryEnd::GivenUp(why) if why.contains("500")));
        assert_eq!(
            service.records.delivery(&key).await.unwrap().unwrap().result,
            DeliveryResult::GivenUp
        );
        let (url, _) = server("410 Gone");
        let (service, key) = owing(&url).await;
        assert_eq!(try_number(&service, &key, 1).await, TryEnd::Gone);
        assert_eq!(tries(&service, &key).await, None);
    }

    #[tokio::test]
    async fn an_event_without_a_webhook_waits_for_days() {
        let (service, key) = owing("http://127.0.0.1:9/").await;
        let unknown = OwedKey::new(&key.batch, "0000000000000000");
        let tenant = &key.batch.tenant;
        service.records.owe(&unknown).await.unwrap();
        let deliverer = Deliverer::new(service.clone(), Schedule::new(SCHEDULE));
        let mut owed = service.records.owed(tenant).await.unwrap()[&unknown].clone();
        deliverer.drop_unknown(&unknown, &owed).await;
        assert_eq!(service.records.owed(tenant).await.unwrap().len(), 2);
        owed.since -= chrono::TimeDelta::days(4);
        deliverer.drop_unknown(&unknown, &owed).await;
        assert_eq!(service.records.owed(tenant).await.unwrap().len(), 1);
    }

    #[tokio::test]
    async fn the_try_of_a_dead_process_is_repeated_after_its_time() {
        let (service, _) = owing("http://127.0.0.1:9/").await;
        let deliverer = Deliverer::new(service, Schedule::new(SCHEDULE));
        let now = Utc::now();
        let due_after = |tries: u32, seconds_ago: i64| {
            let at = now - chrono::TimeDelta::seconds(seconds_ago);
            let owed = Owed {
                tries,
                since: at,
                last: at,
            };
            let before = Instant::now();
            let waiting = deliverer.waiting_from(&owed, now);
            waiting.due.saturating_duration_since(before).as_secs_f64().round()
        };
        assert_eq!(due_after(0, 0), 0.0);
        // The first try may take 10 s, and the pause after it is 1 s, after the second one 6 s.
        assert_eq!(due_after(1, 0), 11.0);
        assert_eq!(due_after(2, 4), 12.0);
        assert_eq!(due_after(2, 400), 0.0);
        // The store's clock may be ahead.
        assert_eq!(due_after(1, -50), 11.0);
    }
}
