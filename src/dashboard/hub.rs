//! What all requests of a dashboard share: the jobs that somebody looks at, each read from its
//! ledger at most every two seconds, however many look.
//!
//! Nobody reads in the background. A request that finds what is known too old reads the ledger, and
//! requests that come meanwhile wait for it and take what it has read.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use chrono::Utc;
use futures::StreamExt;
use tokio::sync::{Semaphore, watch};

use super::detail::Parts;
use super::error::{ApiError, is_passing};
use super::history::{History, Point};
use super::source::{JobSource, Viewer};
use super::view::{Frame, JobList, JobView, Pace, Seen, seconds_of};
use crate::error_line::one_line;
use crate::ledger::keys::SUCCESS;
use crate::ledger::status::State;
use crate::ledger::{Commit, Ledger, LedgerError};

/// Shortest time between two readings of a job.
const POLL_MIN: Duration = Duration::from_secs(2);
/// Shortest time between two readings of a job that has ended, and that a person may continue.
const ENDED_POLL_MIN: Duration = Duration::from_secs(6);
/// A reading that takes long is repeated after this many times its own duration.
const POLL_SHARE: u32 = 5;
/// Time after which a list goes on without a job whose store does not answer.
const LISTED_WITHIN: Duration = Duration::from_secs(10);
/// Maximum number of readings at once.
const POLLS_AT_ONCE: usize = 8;
/// Maximum number of parts that are read at once: each takes up to 64 MiB.
const PARTS_AT_ONCE: usize = 2;
/// Maximum number of listeners to events.
pub(super) const LISTENERS_MAX: usize = 64;
/// Number of known jobs from which those that nobody looks at are forgotten.
const JOBS_MAX: usize = 512;
/// Jobs of the first page, which listeners get.
pub(super) const FIRST_PAGE: usize = 20;

/// See the module.
pub struct Hub {
    pub(super) source: Arc<dyn JobSource>,
    pub(super) shows_prompts: bool,
    jobs: Mutex<HashMap<(Viewer, String), Arc<Job>>>,
    lists: Mutex<HashMap<Viewer, Arc<tokio::sync::Mutex<Option<KnownList>>>>>,
    pub(super) listeners: Arc<Semaphore>,
    polls: Semaphore,
    pub(super) part_reads: Semaphore,
    closed: watch::Sender<bool>,
}

/// A job that somebody looks at.
pub(super) struct Job {
    viewer: Viewer,
    id: String,
    known: tokio::sync::Mutex<Known>,
}

/// What is known of a job.
#[derive(Default)]
pub(super) struct Known {
    ledger: Option<Ledger>,
    history: History,
    reading: Option<Reading>,
    parts: Parts,
}

/// The last reading of a job.
#[derive(Clone)]
struct Reading {
    at: Instant,
    pause: Duration,
    frame: Frame,
    seen: Option<Seen>,
    view: JobView,
}

/// The first page of a viewer's list, for listeners.
struct KnownList {
    at: Instant,
    pause: Duration,
    list: Arc<JobList>,
}

impl Hub {
    /// `shows_prompts`: whether viewers see prompts and answers of their jobs.
    pub fn new(source: Arc<dyn JobSource>, shows_prompts: bool) -> Hub {
        Hub {
            source,
            shows_prompts,
            jobs: Mutex::default(),
            lists: Mutex::default(),
            listeners: Arc::new(Semaphore::new(LISTENERS_MAX)),
            polls: Semaphore::new(POLLS_AT_ONCE),
            part_reads: Semaphore::new(PARTS_AT_ONCE),
            closed: watch::Sender::new(false),
        }
    }

    /// Ends the streams of all listeners, so that they do not delay the end of the server.
    pub fn close(&self) {
        self.closed.send_replace(true);
    }

    pub(super) async fn wait_for_close(&self) {
        let mut closed = self.closed.subscribe();
        // The sender lives as long as the hub.
        let _ = closed.wait_for(|is_closed| *is_closed).await;
    }

    /// A job with its detail.
    pub(super) async fn job(&self, viewer: &Viewer, id: &str) -> Result<JobView, ApiError> {
        let job = self.entry(viewer, id)?;
        let mut known = job.known.lock().await;
        let reading = self.reading(&job, &mut known).await?;
        let mut view = reading.view;
        if let (Some(ledger), Some(seen)) = (known.ledger.clone(), &reading.seen) {
            let Known { parts, history, .. } = &mut *known;
            match self.detail(&ledger, seen, parts, history, !view.has_ended()).await {
                Ok(detail) => view.detail = Some(detail),
                Err(error) if is_passing(&error) => return Err(error.into()),
                Err(error) => view.set_unreadable(&readable_reason(error)),
            }
        } else {
            view.detail = Some(Default::default());
        }
        Ok(view)
    }

    /// A job's ledger, and the commits of its parts that can be looked into; `None`: it has no
    /// ledger.
    pub(super) async fn job_parts(
        &self,
        viewer: &Viewer,
        id: &str,
    ) -> Result<Option<(Ledger, Arc<Vec<Commit>>)>, ApiError> {
        let job = self.entry(viewer, id)?;
        let mut known = job.known.lock().await;
        let reading = self.reading(&job, &mut known).await?;
        let (Some(ledger), Some(seen)) = (known.ledger.clone(), reading.seen) else {
            return Ok(None);
        };
        let Known { parts, history, .. } = &mut *known;
        self.read_parts(&ledger, &seen, parts, history).await?;
        Ok(Some((ledger, parts.commits())))
    }

    /// Checks that the viewer has this job.
    pub(super) async fn check_job(&self, viewer: &Viewer, id: &str) -> Result<(), ApiError> {
        let job = self.entry(viewer, id)?;
        let mut known = job.known.lock().await;
        self.reading(&job, &mut known).await.map(|_| ())
    }

    /// What a job was when it was read last, which is new enough.
    async fn reading(&self, job: &Job, known: &mut Known) -> Result<Reading, ApiError> {
        self.read_job(job, known).await?;
        known.reading.clone().ok_or_else(|| {
            self.forget(&job.viewer, &job.id);
            ApiError::no_job(&job.id)
        })
    }

    /// A page of the viewer's jobs, without details.
    pub(super) async fn list(&self, viewer: &Viewer, after: Option<&str>, limit: usize) -> Result<JobList, ApiError> {
        let page = self.source.list(viewer, after, limit).await?;
        let views = futures::stream::iter(page.ids)
            .map(|id| async move { self.listed(viewer, &id).await })
            .buffered(POLLS_AT_ONCE);
        let found: Vec<Option<JobView>> = views.collect().await;
        Ok(JobList::new(found.into_iter().flatten().collect(), page.has_more))
    }

    /// A job of a list. One that cannot be read is shown as such, so that it does not hide others.
    async fn listed(&self, viewer: &Viewer, id: &str) -> Option<JobView> {
        let job = self.entry(viewer, id).ok()?;
        let reading = async {
            let mut known = job.known.lock().await;
            let read = self.read_job(&job, &mut known).await;
            read.map(|()| known.reading.as_ref().map(|reading| reading.view.clone()))
        };
        match tokio::time::timeout(LISTED_WITHIN, reading).await {
            Ok(Ok(view)) => view,
            Ok(Err(error)) => {
                tracing::warn!("job `{id}` cannot be listed: {}", one_line(&error.into()));
                Some(JobView::without_answer(id))
            }
            Err(_) => Some(JobView::without_answer(id)),
        }
    }

    /// The first page of the viewer's list, as of a short time ago.
    pub(super) async fn first_page(&self, viewer: &Viewer) -> Result<Arc<JobList>, ApiError> {
        let slot = {
            let mut lists = self.lists.lock().unwrap_or_else(PoisonError::into_inner);
            lists.retain(|known, slot| known == viewer || Arc::strong_count(slot) > 1);
            lists.entry(viewer.clone()).or_default().clone()
        };
        let mut known = slot.lock().await;
        if let Some(list) = known.as_ref().filter(|list| list.at.elapsed() < list.pause) {
            return Ok(list.list.clone());
        }
        let begun = Instant::now();
        let list = Arc::new(self.list(viewer, None, FIRST_PAGE).await?);
        *known = Some(KnownList {
            at: Instant::now(),
            pause: pause_after(POLL_MIN, begun.elapsed()),
            list: list.clone(),
        });
        Ok(list)
    }

    /// Has a job read anew by the next request, since it was changed.
    pub(super) async fn note_change(&self, viewer: &Viewer, id: &str) {
        if let Ok(job) = self.entry(viewer, id) {
            job.known.lock().await.reading = None;
        }
    }

    fn entry(&self, viewer: &Viewer, id: &str) -> Result<Arc<Job>, ApiError> {
        if !self.source.is_id(id) {
            return Err(ApiError::no_job(id));
        }
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        if jobs.len() >= JOBS_MAX {
            jobs.retain(|_, job| Arc::strong_count(job) > 1);
        }
        let key = (viewer.clone(), id.to_string());
        let job = jobs.entry(key).or_insert_with(|| {
            Arc::new(Job {
                viewer: viewer.clone(),
                id: id.to_string(),
                known: tokio::sync::Mutex::default(),
            })
        });
        Ok(job.clone())
    }

    fn forget(&self, viewer: &Viewer, id: &str) {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.remove(&(viewer.clone(), id.to_string()));
    }

    /// Reads a job, unless what is known is new enough. Afterwards there is a reading if there is a
    /// job.
    async fn read_job(&self, job: &Job, known: &mut Known) -> Result<(), LedgerError> {
        let is_new = |reading: &Reading| reading.frame.is_final || reading.at.elapsed() < reading.pause;
        if known.reading.as_ref().is_some_and(is_new) {
            return Ok(());
        }
        // The semaphore is never closed.
        let _permit = self.polls.acquire().await;
        let begun = Instant::now();
        known.reading = None;
        let Some(mut frame) = self.source.frame(&job.viewer, &job.id).await? else {
            return Ok(());
        };
        let (view, seen) = match self.seen(job, known).await {
            Ok(seen) => {
                let pace = seen
                    .as_ref()
                    .map_or(Pace::default(), |seen| note(&mut known.history, seen));
                (JobView::new(&frame, seen.as_ref(), pace), seen)
            }
            Err(error) if is_passing(&error) => return Err(error),
            Err(error) => {
                // Somebody may mend it.
                frame.is_final = false;
                (JobView::unreadable(&frame, &readable_reason(error)), None)
            }
        };
        let least = if view.has_ended() { ENDED_POLL_MIN } else { POLL_MIN };
        known.reading = Some(Reading {
            at: Instant::now(),
            pause: pause_after(least, begun.elapsed()),
            frame,
            seen,
            view,
        });
        Ok(())
    }

    /// What the job's ledger says now; `None`: there is none.
    async fn seen(&self, job: &Job, known: &mut Known) -> Result<Option<Seen>, LedgerError> {
        let ledger = match known.ledger.take() {
            Some(ledger) => Some(ledger),
            None => self.source.ledger(&job.viewer, &job.id).await?,
        };
        let Some(ledger) = ledger else { return Ok(None) };
        let ledger = ledger.newest_generation().await?;
        let (status, control) = futures::try_join!(ledger.quick_status(), ledger.control())?;
        let finished_at = match status.state {
            State::Finished => ledger.store().object_version(SUCCESS).await?,
            _ => None,
        };
        let seen = Seen {
            limits: ledger.limits(&control),
            is_closing: control.is_closing(),
            created_at: ledger.created_at().timestamp(),
            finished_at: finished_at.map(|version| version.modified.timestamp()),
            status,
        };
        known.ledger = Some(ledger);
        Ok(Some(seen))
    }
}

impl Known {
    /// Time until the job may be read again.
    fn due_in(&self) -> Duration {
        let left = |reading: &Reading| reading.pause.saturating_sub(reading.at.elapsed());
        self.reading.as_ref().map_or(POLL_MIN, left)
    }
}

impl Hub {
    /// Time until a job may be read again.
    pub(super) async fn job_due_in(&self, viewer: &Viewer, id: &str) -> Duration {
        match self.entry(viewer, id) {
            Ok(job) => job.known.lock().await.due_in(),
            Err(_) => POLL_MIN,
        }
    }

    /// Time until a viewer's list may be read again.
    pub(super) async fn list_due_in(&self, viewer: &Viewer) -> Duration {
        let slot = {
            let lists = self.lists.lock().unwrap_or_else(PoisonError::into_inner);
            lists.get(viewer).cloned()
        };
        let Some(slot) = slot else { return POLL_MIN };
        let known = slot.lock().await;
        known
            .as_ref()
            .map_or(POLL_MIN, |list| list.pause.saturating_sub(list.at.elapsed()))
    }
}

/// The time after which something is read again that took this long.
fn pause_after(least: Duration, took: Duration) -> Duration {
    least.max(took * POLL_SHARE)
}

fn note(history: &mut History, seen: &Seen) -> Pace {
    let tally = &seen.status.tally;
    history.note(Point {
        at: seconds_of(Utc::now()),
        tokens: tally.prompt_tokens.saturating_add(tally.completion_tokens),
        rows: tally.rows(),
    });
    history.pace()
}

/// The reason for viewers; the details go to the log, since they may name buckets and paths.
fn readable_reason(error: LedgerError) -> String {
    tracing::warn!("a job cannot be shown: {}", one_line(&error.into()));
    "what is stored of it cannot be read; the log of the server says why".into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_readings_are_repeated_later() {
        let seconds = Duration::from_secs;
        assert_eq!(pause_after(POLL_MIN, Duration::ZERO), seconds(2));
        assert_eq!(pause_after(POLL_MIN, seconds(3)), seconds(15));
    }
}
