//! `gristmill reconcile`: enqueues shards that nobody moves, and finishes jobs whose last step was lost.
//!
//! Two looks at a job's ledger: a shard without commit that saw no new object in between has lost its message or its
//! worker, or waits in a long queue. One message too many costs a worker one look at the ledger; a loop sends a shard
//! again only after twice as many looks each time.

use std::collections::HashMap;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt};

use crate::cli::args::ReconcileArgs;
use crate::cli::door::ledger_at;
use crate::cli::enqueue::{Enqueuer, Target};
use crate::cli::exit::{Exit, Failure, one_line};
use crate::ledger::{Ledger, Order, Progress, StopWhy};
use crate::report::summary::{RowCounts, number};

/// A shard that was enqueued again and again without effect is enqueued at every so many looks.
const LOOKS_MAX: u32 = 64;

/// Shards whose data is read at once, an object of each at a time.
const SHARDS_AT_ONCE: usize = 8;

/// One job under watch.
struct Watched {
    output: String,
    ledger: Ledger,
    /// At the last look.
    seen: Option<Progress>,
    sent: Backoff,
    /// How it ended, where it has.
    ended: Option<Exit>,
}

/// Which shards were enqueued at which look, and when they may be again. Pure.
#[derive(Debug, Default)]
struct Backoff {
    look: u32,
    /// Shard → (the next look at which it may be enqueued, looks to wait after that).
    shards: HashMap<u32, (u32, u32)>,
}

impl Backoff {
    /// Begins another look: of the shards that are `still`, those that are due. All others have moved.
    fn due(&mut self, still: &[u32]) -> Vec<u32> {
        self.look += 1;
        let (look, before) = (self.look, std::mem::take(&mut self.shards));
        self.shards = still
            .iter()
            .filter_map(|shard| Some((*shard, *before.get(shard)?)))
            .collect();
        let due = |shard: &&u32| self.shards.get(shard).is_none_or(|(next, _)| *next <= look);
        still.iter().filter(due).copied().collect()
    }

    /// These were enqueued at this look.
    fn sent(&mut self, shards: &[u32]) {
        for shard in shards {
            let wait = self.shards.get(shard).map_or(1, |(_, wait)| (wait * 2).min(LOOKS_MAX));
            self.shards.insert(*shard, (self.look + 1 + wait, wait));
        }
    }
}

pub async fn reconcile(args: ReconcileArgs) -> Result<Exit, Failure> {
    let target = Target::required(&args.queue)?;
    let mut jobs = Vec::new();
    for output in &args.outputs {
        jobs.push(Watched {
            output: output.clone(),
            ledger: ledger_at(output).await?,
            seen: None,
            sent: Backoff::default(),
            ended: None,
        });
    }
    let enqueuer = target.connect().await?;
    let loops = args.every.is_some() || args.until_finished;
    let pause = Duration::from_secs_f64(args.every.unwrap_or(args.interval));
    let mut enqueued = look_at_all(&mut jobs, &enqueuer, &args, loops).await?;
    loop {
        let over = jobs.iter().all(|job| job.ended.is_some());
        if over && (args.until_finished || !loops) {
            break;
        }
        tokio::time::sleep(pause).await;
        enqueued += look_at_all(&mut jobs, &enqueuer, &args, loops).await?;
        if !loops {
            break;
        }
    }
    if enqueued == 0 && !loops {
        println!("nothing to enqueue");
    }
    // A job that goes on is no failure; of those that ended, the worst tells.
    let worst = jobs.iter().filter_map(|job| job.ended).max_by_key(|exit| *exit as u8);
    Ok(worst.unwrap_or(Exit::Done))
}

/// One look at each job; returns how many shards were enqueued. In a loop, what fails is said and tried again at the next
/// look.
async fn look_at_all(
    jobs: &mut [Watched],
    enqueuer: &Enqueuer,
    args: &ReconcileArgs,
    loops: bool,
) -> Result<u64, Failure> {
    let mut enqueued = 0;
    for job in jobs {
        match job.look(enqueuer, args).await {
            Ok(sent) => enqueued += sent,
            Err(failure) if loops => eprintln!("gristmill: {}: {}", job.output, one_line(&failure.error)),
            Err(failure) => return Err(failure),
        }
    }
    Ok(enqueued)
}

impl Watched {
    async fn look(&mut self, enqueuer: &Enqueuer, args: &ReconcileArgs) -> Result<u64, Failure> {
        if self.ended.is_some() && args.until_finished {
            return Ok(0);
        }
        // A retry may have begun another generation since.
        let ledger = ledger_at(&self.output).await?;
        if ledger.generation() != self.ledger.generation() || ledger.job().job != self.ledger.job().job {
            (self.seen, self.sent) = (None, Backoff::default());
        }
        self.ledger = ledger;
        let ended = self.ended().await?;
        if ended != self.ended {
            if let Some(exit) = ended {
                println!("job `{}` {}", self.ledger.job().name, word(exit));
            }
            self.ended = ended;
        }
        if ended.is_some() {
            self.seen = None;
            return Ok(0);
        }
        let now = self.ledger.progress().await?;
        let open = now.open().len();
        let Some(before) = self.seen.replace(now) else {
            return Ok(0);
        };
        let still = self
            .seen
            .as_ref()
            .map(|now| now.still_since(&before))
            .unwrap_or_default();
        let due = self.sent.due(&still);
        let (Some(first), Some(last)) = (due.first(), due.last()) else {
            return Ok(0);
        };
        let which = if due.len() == 1 {
            format!("{first}")
        } else {
            format!("{first} to {last}")
        };
        self.mend(&due).await?;
        enqueuer.send(&self.ledger, &due).await?;
        self.sent.sent(&due);
        println!(
            "job `{}`: enqueued {} shards that nobody moved ({which}), of {} that are not done",
            self.ledger.job().name,
            number(due.len() as u64),
            number(open as u64)
        );
        Ok(due.len() as u64)
    }

    /// Opens finished rows of these shards again whose data is lost: whoever gets the shard would find that it cannot publish.
    async fn mend(&self, shards: &[u32]) -> Result<(), Failure> {
        let begun = |shard: &u32| self.seen.as_ref().is_some_and(|seen| seen.is_begun(*shard));
        let mut mended = futures::stream::iter(shards.iter().copied().filter(begun).collect::<Vec<_>>())
            .map(|shard| self.ledger.mend(shard))
            .buffered(SHARDS_AT_ONCE);
        while let Some(voided) = mended.try_next().await? {
            for voided in voided {
                println!("job `{}`: {voided}", self.ledger.job().name);
            }
        }
        Ok(())
    }

    /// How the job has ended; writes what is due where all shards are committed.
    async fn ended(&self) -> Result<Option<Exit>, Failure> {
        if let Some(success) = self.ledger.finish_check(None).await? {
            return Ok(Some(Exit::of_rows(&RowCounts::of(success.rows, &success.tally))));
        }
        Ok(match self.ledger.control().await?.holds() {
            // The rows that are left are to be published still: that takes workers.
            Some(Order::Stop { close: true, .. }) => None,
            Some(Order::Stop {
                why: StopWhy::Cancelled,
                ..
            }) => Some(Exit::Cancelled),
            Some(Order::Stop {
                why: StopWhy::InputChanged,
                ..
            }) => Some(Exit::BadJob),
            Some(Order::Stop { .. }) => Some(Exit::Stopped),
            _ => None,
        })
    }
}

fn word(exit: Exit) -> &'static str {
    match exit {
        Exit::Done => "is finished",
        Exit::FailedRows => "is finished; some rows did not succeed",
        Exit::Cancelled => "was cancelled: nothing to enqueue",
        Exit::BadJob => "is stopped, since an input is not what it was: restore it and submit the job again",
        _ => "has reached its budget or deadline: nothing to enqueue until it is extended",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_that_stays_still_is_enqueued_ever_more_seldom() {
        let mut backoff = Backoff::default();
        let mut looks = Vec::new();
        for look in 1..=40 {
            let due = backoff.due(&[7]);
            if !due.is_empty() {
                looks.push(look);
            }
            backoff.sent(&due);
        }
        assert_eq!(looks, [1, 3, 6, 11, 20, 37]);
    }

    #[test]
    fn a_shard_that_moved_begins_anew() {
        let mut backoff = Backoff::default();
        for _ in 0..2 {
            let due = backoff.due(&[1, 2]);
            assert_eq!(due, [1, 2]);
            backoff.sent(&due);
            assert!(backoff.due(&[1, 2]).is_empty());
            assert!(backoff.due(&[]).is_empty());
        }
    }
}
