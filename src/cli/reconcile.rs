//! `gristmill reconcile`: enqueues shards that nobody moves, and finishes jobs whose last step was lost.
//!
//! Two looks at a job's ledger: a shard without commit that saw no new object in between has lost its message or its
//! worker, or waits in a long queue. One message too many costs a worker one look at the ledger; a loop sends a shard
//! again only after twice as many looks each time.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::anyhow;
use futures::{StreamExt, TryStreamExt};

use crate::cli::args::ReconcileArgs;
use crate::cli::enqueue::{Enqueuer, Target};
use crate::cli::exit::{Exit, Failure, one_line};
use crate::cli::on_finish::Teller;
use crate::cli::prepare::ledger_at;
use crate::ledger::{JobCommand, Ledger, Progress, StopWhy};
use crate::report::summary::{RowCounts, counted, number};
use crate::worker::access::{Access, Asked};

/// A shard that was enqueued again and again without effect is enqueued at every so many looks.
const LOOKS_MAX: u32 = 64;

/// Shards whose data is read at once, an object of each at a time.
const SHARDS_AT_ONCE: usize = 8;

/// One job under watch.
struct Watched {
    output: String,
    /// Once it could be opened.
    ledger: Option<Ledger>,
    /// At the last look.
    seen: Option<Progress>,
    sent: Backoff,
    /// How it ended, where it has.
    ended: Option<Exit>,
    /// Why the last look came to nothing.
    failed: Option<Failure>,
}

/// What a look may need.
#[derive(Clone, Copy)]
struct Means<'a> {
    enqueuer: &'a Enqueuer,
    teller: &'a Teller,
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
    let asked = Asked {
        accept_on_finish: &args.on_finish.accept_on_finish,
        ..Asked::default()
    };
    let access = Access::new(&asked, &std::env::current_dir()?).map_err(|why| Failure::bad_job(anyhow!(why)))?;
    let teller = Teller::new(access)?;
    let watched = |output: &String| Watched {
        output: output.clone(),
        ledger: None,
        seen: None,
        sent: Backoff::default(),
        ended: None,
        failed: None,
    };
    let mut jobs: Vec<Watched> = args.outputs.iter().map(watched).collect();
    // What is wrong with an output is said whether the queue answers or not.
    for job in &mut jobs {
        if let Err(failure) = ledger_at(&job.output).await {
            job.fail(failure);
        }
    }
    if jobs.iter().all(|job| job.failed.is_some()) && !loops(&args) {
        return Ok(worst(&jobs));
    }
    let enqueuer = target.connect().await?;
    let loops = loops(&args);
    let pause = Duration::from_secs_f64(args.every.unwrap_or(args.interval));
    let means = Means {
        enqueuer: &enqueuer,
        teller: &teller,
    };
    let mut enqueued = look_at_all(&mut jobs, means, &args, loops).await;
    loop {
        let over = jobs.iter().all(|job| job.is_over(loops));
        if over && (args.until_finished || !loops) {
            break;
        }
        tokio::time::sleep(pause).await;
        enqueued += look_at_all(&mut jobs, means, &args, loops).await;
        if !loops {
            break;
        }
    }
    let any_failed = jobs.iter().any(|job| job.failed.is_some());
    if enqueued == 0 && !loops && !any_failed {
        println!("nothing to enqueue");
    }
    Ok(worst(&jobs))
}

/// Whether jobs are looked at again and again.
fn loops(args: &ReconcileArgs) -> bool {
    args.every.is_some() || args.until_finished
}

/// The exit code over all jobs. A job that goes on is no failure; of the others, the worst tells.
fn worst(jobs: &[Watched]) -> Exit {
    let worst = |exit: fn(&Watched) -> Option<Exit>| jobs.iter().filter_map(exit).max_by_key(|exit| *exit as u8);
    let failed = worst(|job| Some(job.failed.as_ref()?.exit));
    failed.or_else(|| worst(|job| job.ended)).unwrap_or(Exit::Done)
}

/// One look at each job; returns how many shards were enqueued. What fails is said and keeps no other job waiting; in a loop, it is
/// tried again at the next look.
async fn look_at_all(jobs: &mut [Watched], means: Means<'_>, args: &ReconcileArgs, loops: bool) -> u64 {
    let mut enqueued = 0;
    for job in jobs.iter_mut().filter(|job| loops || job.failed.is_none()) {
        match job.look(means, args).await {
            Ok(sent) => {
                enqueued += sent;
                job.failed = None;
            }
            Err(failure) => job.fail(failure),
        }
    }
    enqueued
}

impl Watched {
    /// Says what is wrong.
    fn fail(&mut self, failure: Failure) {
        eprintln!("gristmill: {}: {}", self.output, one_line(&failure.error));
        self.failed = Some(failure);
    }

    /// Whether nothing more is to come of it: it has ended, or it cannot be looked at: not now, or, in a loop, not ever.
    fn is_over(&self, loops: bool) -> bool {
        let is_hopeless = |failure: &Failure| !loops || failure.exit == Exit::BadJob;
        self.ended.is_some() || self.failed.as_ref().is_some_and(is_hopeless)
    }

    async fn look(&mut self, means: Means<'_>, args: &ReconcileArgs) -> Result<u64, Failure> {
        if self.ended.is_some() && args.until_finished {
            return Ok(0);
        }
        // A retry may have begun another generation since.
        let ledger = ledger_at(&self.output).await?;
        let which = |ledger: &Ledger| (ledger.generation(), ledger.job().job.clone());
        if self.ledger.as_ref().map(which) != Some(which(&ledger)) {
            (self.seen, self.sent) = (None, Backoff::default());
        }
        let ledger = &*self.ledger.insert(ledger);
        let name = &ledger.job().name;
        let ended = how_ended(ledger).await?;
        if ended != self.ended {
            if let Some(exit) = ended {
                println!("job `{name}` {}", word(exit));
            }
            self.ended = ended;
        }
        if ended.is_some() {
            // Whoever wrote the result may have died before it could tell.
            if matches!(ended, Some(Exit::Done | Exit::FailedRows)) {
                means.teller.tell(ledger).await;
            }
            self.seen = None;
            return Ok(0);
        }
        let now = ledger.progress().await?;
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
        let begun = |shard: &u32| self.seen.as_ref().is_some_and(|seen| seen.is_begun(*shard));
        mend(ledger, due.iter().copied().filter(begun).collect()).await?;
        means.enqueuer.send(ledger, &due).await?;
        self.sent.sent(&due);
        println!(
            "job `{name}`: enqueued {} that nobody moved ({which}), of {} not done",
            counted(due.len() as u64, "shard"),
            number(open as u64)
        );
        Ok(due.len() as u64)
    }
}

/// Opens finished rows of these shards again whose data is lost: whoever gets the shard would find that it cannot publish.
async fn mend(ledger: &Ledger, shards: Vec<u32>) -> Result<(), Failure> {
    let mut mended = futures::stream::iter(shards)
        .map(|shard| ledger.mend(shard))
        .buffered(SHARDS_AT_ONCE);
    while let Some(voided) = mended.try_next().await? {
        for voided in voided {
            println!("job `{}`: {voided}", ledger.job().name);
        }
    }
    Ok(())
}

/// How the job has ended; writes what is due where all shards are committed.
async fn how_ended(ledger: &Ledger) -> Result<Option<Exit>, Failure> {
    if let Some(success) = ledger.finish_check(None).await? {
        return Ok(Some(Exit::of_rows(&RowCounts::of(success.rows, &success.tally))));
    }
    Ok(match ledger.control().await?.holds() {
        // The rows that are left are to be published still: that takes workers.
        Some(JobCommand::Stop { close: true, .. }) => None,
        Some(JobCommand::Stop {
            why: StopWhy::Cancelled,
            ..
        }) => Some(Exit::Cancelled),
        Some(JobCommand::Stop {
            why: StopWhy::InputChanged,
            ..
        }) => Some(Exit::BadJob),
        Some(JobCommand::Stop { .. }) => Some(Exit::Stopped),
        _ => None,
    })
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
