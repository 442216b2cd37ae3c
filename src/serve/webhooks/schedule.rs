//! When an event is tried, and whose turn it is. Pure.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use super::records::OwedKey;
use crate::serve::keys::Tenant;

/// Pauses after failed tries, in multiples of the first one. With 5 s: 5 s, 30 s, 2 min, 10 min,
/// 1 h, 3 h, 6 h, 12 h, 24 h and 24 h, almost three days together.
const PAUSES: [u32; 10] = [1, 6, 24, 120, 720, 2_160, 4_320, 8_640, 17_280, 17_280];
/// Maximum number of concurrent tries.
pub(super) const TRIES_AT_ONCE: usize = 16;
/// Maximum number of concurrent tries at one webhook; one if its last try has failed.
const TRIES_PER_WEBHOOK: usize = 4;
/// Maximum number of concurrent tries at all webhooks whose last try has failed: they may hang, and
/// the others must not wait for them.
const FAILING_TRIES: usize = 8;

/// The pauses between tries.
#[derive(Debug, Clone, Copy)]
pub struct Schedule {
    first_pause: Duration,
}

impl Schedule {
    pub fn new(first_pause: Duration) -> Schedule {
        Schedule { first_pause }
    }

    /// The pause after a failed try, by its number; `None`: it was the last one.
    pub(super) fn pause(self, tries: u32) -> Option<Duration> {
        let index = usize::try_from(tries.checked_sub(1)?).ok()?;
        Some(self.first_pause * *PAUSES.get(index)?)
    }
}

/// Names a webhook among all tenants.
pub(super) type WebhookKey = (Tenant, String);

pub(super) fn webhook_of(key: &OwedKey) -> WebhookKey {
    (key.batch.tenant.clone(), key.webhook.clone())
}

/// The tries that run, by webhook, and the webhooks whose last try has failed.
#[derive(Debug, Default)]
pub(super) struct Load {
    pub running: HashMap<WebhookKey, usize>,
    pub failing: HashSet<WebhookKey>,
}

impl Load {
    /// Chooses the due events that are tried now, and counts them as running. Webhooks with few
    /// tries come first, then what has been due for longest.
    pub(super) fn choose(&mut self, due: impl IntoIterator<Item = (OwedKey, Instant)>) -> Vec<OwedKey> {
        let count = |load: &Load, webhook: &WebhookKey| load.running.get(webhook).copied().unwrap_or(0);
        let mut due: Vec<_> = due
            .into_iter()
            .map(|(key, at)| {
                let webhook = webhook_of(&key);
                let is_failing = self.failing.contains(&webhook);
                (is_failing, count(self, &webhook), at, webhook, key)
            })
            .collect();
        due.sort_unstable();
        let mut all: usize = self.running.values().sum();
        let is_failing = |(webhook, _): &(&WebhookKey, &usize)| self.failing.contains(*webhook);
        let mut failing: usize = self.running.iter().filter(is_failing).map(|(_, count)| count).sum();
        let mut chosen = Vec::new();
        for (is_failing, _, _, webhook, key) in due {
            let most = if is_failing { 1 } else { TRIES_PER_WEBHOOK };
            let is_full = all >= TRIES_AT_ONCE || (is_failing && failing >= FAILING_TRIES);
            if is_full || count(self, &webhook) >= most {
                continue;
            }
            *self.running.entry(webhook).or_default() += 1;
            all += 1;
            failing += usize::from(is_failing);
            chosen.push(key);
        }
        chosen
    }

    /// Notes the end of a try.
    pub(super) fn end(&mut self, webhook: &WebhookKey) {
        if let Some(count) = self.running.get_mut(webhook) {
            *count -= 1;
            if *count == 0 {
                self.running.remove(webhook);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::id;
    use crate::serve::records::BatchKey;

    fn events(tenant: &str, count: usize) -> Vec<OwedKey> {
        let tenant = Tenant::new(tenant).unwrap();
        let new = || OwedKey::new(&BatchKey::new(&tenant, id::new_id(id::BATCH).unwrap()), "w");
        (0..count).map(|_| new()).collect()
    }

    fn webhook(tenant: &str) -> WebhookKey {
        (Tenant::new(tenant).unwrap(), "w".into())
    }

    #[test]
    fn pauses_grow_for_almost_three_days() {
        let schedule = Schedule::new(Duration::from_secs(5));
        let pauses: Vec<u64> = (1..)
            .map_while(|tries| schedule.pause(tries))
            .map(|pause| pause.as_secs())
            .collect();
        assert_eq!(pauses[..5], [5, 30, 120, 600, 3_600]);
        assert!(pauses.windows(2).all(|pair| pair[0] <= pair[1]), "{pauses:?}");
        let days = pauses.iter().sum::<u64>() as f64 / 86_400.0;
        assert!((2.9..=3.0).contains(&days), "{days}");
        assert_eq!(schedule.pause(pauses.len() as u32 + 1), None);
        assert_eq!(schedule.pause(0), None);
    }

    #[test]
    fn no_webhook_takes_all_turns() {
        let now = Instant::now();
        let later = now + Duration::from_secs(1);
        let mut load = Load::default();
        let many = events("a", 100);
        let one = events("b", 1);
        let due = || many.iter().map(|key| (key.clone(), now));
        let chosen = load.choose(due().chain([(one[0].clone(), later)]));
        assert_eq!(chosen.len(), TRIES_PER_WEBHOOK + 1);
        assert!(chosen.contains(&one[0]));
        assert!(load.choose(due()).is_empty());
        load.end(&webhook("a"));
        assert_eq!(load.choose(due()).len(), 1);
    }

    #[test]
    fn all_tries_together_have_a_bound() {
        let now = Instant::now();
        let mut load = Load::default();
        let due = (0..30).flat_map(|n| events(&format!("t{n}"), 3)).map(|key| (key, now));
        assert_eq!(load.choose(due).len(), TRIES_AT_ONCE);
        assert_eq!(load.running.values().sum::<usize>(), TRIES_AT_ONCE);
    }

    #[test]
    fn failing_webhooks_leave_room_for_others() {
        let now = Instant::now();
        let mut load = Load {
            failing: (0..20).map(|n| webhook(&format!("f{n}"))).collect(),
            ..Load::default()
        };
        let failing = (0..20).flat_map(|n| events(&format!("f{n}"), 5)).map(|key| (key, now));
        assert_eq!(load.choose(failing).len(), FAILING_TRIES);
        assert!(load.running.values().all(|count| *count == 1));
        let others = (0..20).flat_map(|n| events(&format!("o{n}"), 1)).map(|key| (key, now));
        assert_eq!(load.choose(others).len(), TRIES_AT_ONCE - FAILING_TRIES);
    }
}
