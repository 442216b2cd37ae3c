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
use crate::cli::enqueue::{Enqueuer, QueueTarget};
use crate::cli::exit::{Exit, Failure, one_line};
use crate::cli::on_finish::FinishNotifier;
use crate::cli::output::ledger_at;
use crate::ledger::{JobCommand, Ledger, Progress, StopWhy};
use crate::report::summary::{RowCounts, counted, number};
use crate::worker::access::{Access, AccessOptions};

/// Maximum backoff of a shard, in scans.
const BACKOFF_SCANS_MAX: u32 = 64;

/// Number of shards whose data is read concurrently, one object each at a time.
const SHARDS_AT_ONCE: usize = 8;

/// A job that is reconciled.
pub(super) struct ReconciledJob {
    output: String,
    /// `None` until it could be opened.
    ledger: Option<Ledger>,
    /// Progress at the last scan.
    last_progress: Option<Progress>,
    backoff: Backoff,
    /// The exit code, once the job has ended.
    ended: Option<Exit>,
    /// The error of the last scan, if it failed.
    failed: Option<Failure>,
}

/// What a scan needs besides the job.
#[derive(Clone, Copy)]
pub(super) struct ScanContext<'a> {
    pub enqueuer: &'a Enqueuer,
    pub notifier: &'a FinishNotifier,
}

/// Backoffs of enqueued shards, counted in scans. Pure.
#[derive(Debug, Default)]
struct Backoff {
    /// The number of scans so far.
    scan: u32,
    shards: HashMap<u32, ShardBackoff>,
}

/// Backoff of one enqueued shard.
#[derive(Debug, Clone, Copy)]
struct ShardBackoff {
    /// The first scan at which it may be enqueued again.
    next_scan: u32,
    /// Its current length, in scans.
    scans: u32,
}

impl Backoff {
    /// Starts a scan: returns those of the `stalled` shards that may be enqueued. Shards that are
    /// not stalled lose their backoff.
    fn due(&mut self, stalled: &[u32]) -> Vec<u32> {
        self.scan += 1;
        let (scan, before) = (self.scan, std::mem::take(&mut self.shards));
        self.shards = stalled
            .iter()
            .filter_map(|shard| Some((*shard, *before.get(shard)?)))
            .collect();
        let due = |shard: &&u32| self.shards.get(shard).is_none_or(|backoff| backoff.next_scan <= scan);
        stalled.iter().filter(due).copied().collect()
    }

    /// Records that these shards were enqueued at this scan.
    fn record_sent(&mut self, shards: &[u32]) {
        for shard in shards {
            let before = self.shards.get(shard);
            let scans = before.map_or(1, |before| (before.scans * 2).min(BACKOFF_SCANS_MAX));
            let next_scan = self.scan + 1 + scans;
            self.shards.insert(*shard, ShardBackoff { next_scan, scans });
        }
    }
}

pub(super) async fn reconcile(args: ReconcileArgs) -> Result<Exit, Failure> {
    let target = QueueTarget::required(&args.queue)?;
    let requested = AccessOptions {
        accept_on_finish: &args.on_finish.accept_on_finish,
        ..AccessOptions::default()
    };
    let access = Access::new(&requested, &std::env::current_dir()?).map_err(|why| Failure::bad_job(anyhow!(why)))?;
    let notifier = FinishNotifier::new(access)?;
    let mut jobs: Vec<ReconciledJob> = args.outputs.iter().cloned().map(ReconciledJob::new).collect();
    // Errors of outputs are reported whether or not the queue responds.
    for job in &mut jobs {
        if let Err(failure) = ledger_at(&job.output).await {
            job.fail(failure);
        }
    }
    if jobs.iter().all(|job| job.failed.is_some()) && !is_loop(&args) {
        return Ok(worst_exit(&jobs));
    }
    let enqueuer = target.connect().await?;
    let is_loop = is_loop(&args);
    let pause = Duration::from_secs_f64(args.every.unwrap_or(args.interval));
    let context = ScanContext {
        enqueuer: &enqueuer,
        notifier: &notifier,
    };
    let mut enqueued = scan_all(&mut jobs, context, &args, is_loop).await;
    loop {
        let all_over = jobs.iter().all(|job| job.is_over(is_loop));
        if all_over && (args.until_finished || !is_loop) {
            break;
        }
        tokio::time::sleep(pause).await;
        enqueued += scan_all(&mut jobs, context, &args, is_loop).await;
        if !is_loop {
            break;
        }
    }
    let any_failed = jobs.iter().any(|job| job.failed.is_some());
    if enqueued == 0 && !is_loop && !any_failed {
        println!("nothing to enqueue");
    }
    Ok(worst_exit(&jobs))
}

/// Whether jobs are scanned more than twice.
fn is_loop(args: &ReconcileArgs) -> bool {
    args.every.is_some() || args.until_finished
}

/// The exit code over all jobs: the highest code of a failed scan, else the highest code of an
/// ended job.
fn worst_exit(jobs: &[ReconciledJob]) -> Exit {
    let worst_exit =
        |exit: fn(&ReconciledJob) -> Option<Exit>| jobs.iter().filter_map(exit).max_by_key(|exit| *exit as u8);
    let failed = worst_exit(|job| Some(job.failed.as_ref()?.exit));
    failed.or_else(|| worst_exit(|job| job.ended)).unwrap_or(Exit::Done)
}

/// Scans each job once; returns how many shards were enqueued. An error is reported and does not
/// affect other jobs; in a loop, the job is scanned again in the next iteration.
async fn scan_all(jobs: &mut [ReconciledJob], context: ScanContext<'_>, args: &ReconcileArgs, is_loop: bool) -> u64 {
    let mut enqueued = 0;
    for job in jobs.iter_mut().filter(|job| is_loop || job.failed.is_none()) {
        match job.scan(context, args.until_finished).await {
            Ok(sent) => {
                enqueued += sent;
                job.failed = None;
            }
            Err(failure) => job.fail(failure),
        }
    }
    enqueued
}

impl ReconciledJob {
    pub(super) fn new(output: String) -> ReconciledJob {
        ReconciledJob {
            output,
            ledger: None,
            last_progress: None,
            backoff: Backoff::default(),
            ended: None,
            failed: None,
        }
    }

    /// Reports and records the error of a scan.
    fn fail(&mut self, failure: Failure) {
        crate::say::error(format_args!("{}: {}", self.output, one_line(&failure.error)));
        self.failed = Some(failure);
    }

    /// Whether no further scan is needed: the job has ended, or its scan failed. In a loop, only a
    /// failure that cannot go away counts.
    fn is_over(&self, is_loop: bool) -> bool {
        let is_hopeless = |failure: &Failure| !is_loop || failure.exit == Exit::BadJob;
        self.ended.is_some() || self.failed.as_ref().is_some_and(is_hopeless)
    }

    /// Enqueues the shards without progress since the last scan, and returns their number.
    /// `until_finished`: a job that has ended is not looked at again.
    pub(super) async fn scan(&mut self, context: ScanContext<'_>, until_finished: bool) -> Result<u64, Failure> {
        if self.ended.is_some() && until_finished {
            return Ok(0);
        }
        // A retry may have started another generation since the last scan.
        let ledger = ledger_at(&self.output).await?;
        let which = |ledger: &Ledger| (ledger.generation(), ledger.job().job.clone());
        if self.ledger.as_ref().map(which) != Some(which(&ledger)) {
            (self.last_progress, self.backoff) = (None, Backoff::default());
        }
        let ledger = &*self.ledger.insert(ledger);
        let name = &ledger.job().name;
        let ended = ended_exit(ledger).await?;
        if ended != self.ended {
            if let Some(exit) = ended {
                println!("job `{name}` {}", exit_text(exit));
            }
            self.ended = ended;
        }
        if ended.is_some() {
            // The process that wrote the result may have died before it could post it.
            if matches!(ended, Some(Exit::Done | Exit::FailedRows)) {
                context.notifier.notify(ledger).await;
            }
            self.last_progress = None;
            return Ok(0);
        }
        let now = ledger.progress().await?;
        let open_shards = now.uncommitted().len();
        let Some(before) = self.last_progress.replace(now) else {
            return Ok(0);
        };
        let stalled = self
            .last_progress
            .as_ref()
            .map(|now| now.stalled_since(&before))
            .unwrap_or_default();
        let due = self.backoff.due(&stalled);
        let (Some(first), Some(last)) = (due.first(), due.last()) else {
            return Ok(0);
        };
        let which = if due.len() == 1 {
            format!("{first}")
        } else {
            format!("{first} to {last}")
        };
        let begun = |shard: &u32| {
            self.last_progress
                .as_ref()
                .is_some_and(|progress| progress.is_begun(*shard))
        };
        void_lost(ledger, due.iter().copied().filter(begun).collect()).await?;
        context.enqueuer.send(ledger, &due).await?;
        self.backoff.record_sent(&due);
        println!(
            "job `{name}`: enqueued {} that nobody moved ({which}), of {} not done",
            counted(due.len() as u64, "shard"),
            number(open_shards as u64)
        );
        Ok(due.len() as u64)
    }
}

/// Voids finished rows of these shards whose data is lost, so that they are computed again: the
/// worker that gets the shard could not publish it without their data.
async fn void_lost(ledger: &Ledger, shards: Vec<u32>) -> Result<(), Failure> {
    let mut voidings = futures::stream::iter(shards)
        .map(|shard| ledger.void_lost(shard))
        .buffered(SHARDS_AT_ONCE);
    while let Some(voided) = voidings.try_next().await? {
        for voided in voided {
            println!("job `{}`: {voided}", ledger.job().name);
        }
    }
    Ok(())
}

/// The exit code of an ended job; writes the final objects if all shards are committed.
async fn ended_exit(ledger: &Ledger) -> Result<Option<Exit>, Failure> {
    if let Some(success) = ledger.finish_check(None).await? {
        return Ok(Some(Exit::of_rows(&RowCounts::of(success.rows, &success.tally))));
    }
    Ok(match ledger.control().await?.current_command() {
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

fn exit_text(exit: Exit) -> &'static str {
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
        let mut scans = Vec::new();
        for scan in 1..=40 {
            let due = backoff.due(&[7]);
            if !due.is_empty() {
                scans.push(scan);
            }
            backoff.record_sent(&due);
        }
        assert_eq!(scans, [1, 3, 6, 11, 20, 37]);
    }

    #[test]
    fn a_shard_that_moved_begins_anew() {
        let mut backoff = Backoff::default();
        for _ in 0..2 {
            let due = backoff.due(&[1, 2]);
            assert_eq!(due, [1, 2]);
            backoff.record_sent(&due);
            assert!(backoff.due(&[1, 2]).is_empty());
            assert!(backoff.due(&[]).is_empty());
        }
    }
}
