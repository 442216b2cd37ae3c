//! `gristmill reconcile`: enqueues shards without progress, and finishes jobs whose last step was
//! lost.
//!
//! It compares two scans of a job's ledger. An uncommitted shard without a new object in between
//! has lost its message or its worker, or waits in a long queue. A redundant message costs a worker
//! only one read of the ledger. In a loop, the number of scans before a shard is sent again doubles
//! each time.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::anyhow;
use futures::{StreamExt, TryStreamExt};

use crate::cli::args::ReconcileArgs;
use crate::cli::enqueue::{Enqueuer, Target};
use crate::cli::exit::{Exit, Failure, one_line};
use crate::cli::on_finish::Teller;
use crate::cli::output::ledger_at;
use crate::ledger::{JobCommand, Ledger, Progress, StopWhy};
use crate::report::summary::{RowCounts, counted, number};
use crate::worker::access::{Access, Asked};

/// Maximum backoff of a shard, in scans.
const LOOKS_MAX: u32 = 64;

/// Number of shards whose data is read concurrently, one object each at a time.
const SHARDS_AT_ONCE: usize = 8;

/// A job under watch.
struct Watched {
    output: String,
    /// `None` until it could be opened.
    ledger: Option<Ledger>,
    /// Progress at the last scan.
    seen: Option<Progress>,
    sent: Backoff,
    /// The exit code, once the job has ended.
    ended: Option<Exit>,
    /// The error of the last scan, if it failed.
    failed: Option<Failure>,
}

/// Resources of a scan.
#[derive(Clone, Copy)]
struct Means<'a> {
    enqueuer: &'a Enqueuer,
    teller: &'a Teller,
}

/// Backoff of enqueued shards, counted in scans. Pure.
#[derive(Debug, Default)]
struct Backoff {
    look: u32,
    /// Shard → (the first scan at which it may be enqueued again, its current backoff in scans).
    shards: HashMap<u32, (u32, u32)>,
}

impl Backoff {
    /// Starts a scan: returns the shards in `still`, which have no progress, that are due. All
    /// other shards are dropped from the backoff.
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

    /// Records that these shards were enqueued at this scan.
    fn sent(&mut self, shards: &[u32]) {
        for shard in shards {
            let wait = self.shards.get(shard).map_or(1, |(_, wait)| (wait * 2).min(LOOKS_MAX));
            self.shards.insert(*shard, (self.look + 1 + wait, wait));
        }
    }
}

pub(super) async fn reconcile(args: ReconcileArgs) -> Result<Exit, Failure> {
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
    // Errors of outputs are reported whether or not the queue responds.
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

/// Whether jobs are scanned repeatedly.
fn loops(args: &ReconcileArgs) -> bool {
    args.every.is_some() || args.until_finished
}

/// The exit code over all jobs. A running job is no failure; of the other jobs, the worst code
/// counts.
fn worst(jobs: &[Watched]) -> Exit {
    let worst = |exit: fn(&Watched) -> Option<Exit>| jobs.iter().filter_map(exit).max_by_key(|exit| *exit as u8);
    let failed = worst(|job| Some(job.failed.as_ref()?.exit));
    failed.or_else(|| worst(|job| job.ended)).unwrap_or(Exit::Done)
}

/// Scans each job once; returns how many shards were enqueued. An error is reported and does not
/// affect other jobs; in a loop, the job is scanned again in the next iteration.
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
    /// Reports an error.
    fn fail(&mut self, failure: Failure) {
        crate::say::error(format_args!("{}: {}", self.output, one_line(&failure.error)));
        self.failed = Some(failure);
    }

    /// Whether no further scan is needed: the job has ended, or its scan failed. In a loop, only a
    /// failure that cannot go away counts.
    fn is_over(&self, loops: bool) -> bool {
        let is_hopeless = |failure: &Failure| !loops || failure.exit == Exit::BadJob;
        self.ended.is_some() || self.failed.as_ref().is_some_and(is_hopeless)
    }

    async fn look(&mut self, means: Means<'_>, args: &ReconcileArgs) -> Result<u64, Failure> {
        if self.ended.is_some() && args.until_finished {
            return Ok(0);
        }
        // A retry may have started another generation since the last scan.
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
            // The process that wrote the result may have died before it could post it.
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
        void_lost(ledger, due.iter().copied().filter(begun).collect()).await?;
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

/// Reopens finished rows of these shards whose data is lost, since the worker that gets the shard
/// could not publish it.
async fn void_lost(ledger: &Ledger, shards: Vec<u32>) -> Result<(), Failure> {
    let mut mended = futures::stream::iter(shards)
        .map(|shard| ledger.void_lost(shard))
        .buffered(SHARDS_AT_ONCE);
    while let Some(voided) = mended.try_next().await? {
        for voided in voided {
            println!("job `{}`: {voided}", ledger.job().name);
        }
    }
    Ok(())
}

/// The exit code of an ended job; writes the final objects if all shards are committed.
async fn how_ended(ledger: &Ledger) -> Result<Option<Exit>, Failure> {
    if let Some(success) = ledger.finish_check(None).await? {
        return Ok(Some(Exit::of_rows(&RowCounts::of(success.rows, &success.tally))));
    }
    Ok(match ledger.control().await?.holds() {
        // Workers must still publish the remaining rows.
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
