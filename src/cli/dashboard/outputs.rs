//! The jobs at and below the outputs of a command line, as a dashboard's source.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use anyhow::anyhow;
use async_trait::async_trait;
use chrono::DateTime;
use serde_json::Value;

use crate::cli::args::DashboardArgs;
use crate::cli::exit::{Exit, Failure, one_line};
use crate::cli::extend::{ExtendRefusal, raise_limits};
use crate::cli::jobs::{ListedJob, UnreadableOutput, prefix_of, search};
use crate::cli::output::is_job_of_batch;
use crate::cli::retry::next_generation;
use crate::dashboard::{ApiError, Command, Frame, JobIds, JobSource, Kind, Rights, Viewer};
use crate::dataset::store::location::Location;
use crate::ledger::control::StopOutcome;
use crate::ledger::{Id, Ledger, LedgerError, StopWhy};
use crate::report::summary::counted;
use crate::worker::access::{Access, AccessOptions};

/// Shortest time between two searches for jobs.
const SEARCH_EVERY: Duration = Duration::from_secs(30);
/// A search that takes long is repeated after this many times its own duration.
const SEARCH_SHARE: u32 = 20;

/// See the module.
pub(super) struct OutputSource {
    prefixes: Vec<Location>,
    access: Access,
    is_read_only: bool,
    /// Held by the request that searches. Others show what is known meanwhile.
    searching: tokio::sync::Mutex<()>,
    found: tokio::sync::Mutex<Found>,
}

/// The result of the last search.
#[derive(Default)]
struct Found {
    searched: Option<(Instant, Duration)>,
    /// Newest first.
    jobs: Vec<FoundJob>,
    /// By the job's id.
    ledgers: HashMap<String, Ledger>,
}

/// A job that the search has found.
#[derive(Debug, Clone, PartialEq, Eq)]
struct FoundJob {
    id: String,
    output: String,
    created_at: i64,
}

impl OutputSource {
    /// Searches once, so that mistakes in the arguments are told at once.
    pub(super) async fn open(args: &DashboardArgs) -> Result<OutputSource, Failure> {
        let here = std::env::current_dir()?;
        let options = AccessOptions {
            accept_inputs: &args.accept_inputs,
            ..AccessOptions::default()
        };
        let access = Access::new(&options, &here).map_err(|why| Failure::bad_job(anyhow!(why)))?;
        access.confine_redirects();
        let prefixes = args.outputs.iter().map(|output| prefix_of(output));
        let source = OutputSource {
            prefixes: prefixes.collect::<Result<_, _>>()?,
            access,
            is_read_only: args.read_only,
            searching: tokio::sync::Mutex::default(),
            found: tokio::sync::Mutex::default(),
        };
        source.search().await?;
        let jobs = source.found.lock().await.jobs.len();
        eprintln!("gristmill found {}", counted(jobs as u64, "job"));
        Ok(source)
    }

    async fn search(&self) -> Result<(), Failure> {
        let begun = Instant::now();
        let mut jobs = Vec::new();
        for prefix in &self.prefixes {
            let result = search(prefix.clone(), false).await?;
            for UnreadableOutput { output, error } in &result.unreadable {
                tracing::warn!("`{output}` cannot be read: {error}");
            }
            jobs.extend(result.jobs.into_iter().map(FoundJob::of));
        }
        let mut found = self.found.lock().await;
        found.jobs = newest_first(jobs);
        let known: HashSet<String> = found.jobs.iter().map(|job| job.id.clone()).collect();
        found.ledgers.retain(|id, _| known.contains(id));
        let took = begun.elapsed();
        found.searched = Some((Instant::now(), SEARCH_EVERY.max(took * SEARCH_SHARE)));
        Ok(())
    }

    /// The jobs, searched anew if the last search is old.
    async fn jobs(&self) -> Vec<FoundJob> {
        let is_new = |(at, pause): (Instant, Duration)| at.elapsed() < pause;
        let is_old = !self.found.lock().await.searched.is_some_and(is_new);
        if is_old
            && let Ok(_searching) = self.searching.try_lock()
            && let Err(failure) = self.search().await
        {
            // The jobs that are known are shown all the same.
            tracing::warn!("the search for jobs failed: {}", one_line(&failure.error));
            self.found.lock().await.searched = Some((Instant::now(), SEARCH_EVERY));
        }
        self.found.lock().await.jobs.clone()
    }

    async fn open_ledger(&self, id: &str) -> Result<Option<Ledger>, LedgerError> {
        let mut found = self.found.lock().await;
        if let Some(ledger) = found.ledgers.get(id) {
            return Ok(Some(ledger.clone()));
        }
        let Some(job) = found.jobs.iter().find(|job| job.id == id) else {
            return Ok(None);
        };
        let here = std::env::current_dir().unwrap_or_default();
        let location = Location::parse(&job.output, &here).map_err(|error| LedgerError::stop(error.to_string()))?;
        let ledger = Ledger::open(&location).await?;
        if let Some(ledger) = &ledger {
            found.ledgers.insert(id.to_string(), ledger.clone());
        }
        Ok(ledger)
    }

    /// The ledger of a job that is to be changed, at its newest generation.
    async fn own_ledger(&self, id: &str) -> Result<Ledger, ApiError> {
        let ledger = self.open_ledger(id).await?;
        let ledger = ledger.ok_or_else(|| ApiError::conflict("the job is gone"))?;
        Ok(ledger.newest_generation().await?)
    }
}

impl FoundJob {
    fn of(job: ListedJob) -> FoundJob {
        let created = DateTime::parse_from_rfc3339(&job.created_at);
        FoundJob {
            created_at: created.map_or(0, |time| time.timestamp()),
            id: job.id,
            output: job.output,
        }
    }
}

/// Sorts jobs, and leaves out those that were found twice, or whose output is a copy of another one.
fn newest_first(mut jobs: Vec<FoundJob>) -> Vec<FoundJob> {
    jobs.sort_by(|a, b| (b.created_at, &a.id, &a.output).cmp(&(a.created_at, &b.id, &b.output)));
    let mut known: HashMap<String, String> = HashMap::new();
    jobs.retain(|job| match known.get(&job.id) {
        None => known.insert(job.id.clone(), job.output.clone()).is_none(),
        Some(first) => {
            if *first != job.output {
                tracing::warn!("`{}` is a copy of `{first}`, and is left out", job.output);
            }
            false
        }
    });
    jobs
}

/// The page of `jobs` after the job `after`.
fn page(jobs: &[FoundJob], after: Option<&str>, limit: usize) -> JobIds {
    let start = match after {
        None => 0,
        // A job that is gone ends the list.
        Some(after) => jobs
            .iter()
            .position(|job| job.id == after)
            .map_or(jobs.len(), |at| at + 1),
    };
    let rest = &jobs[start..];
    JobIds {
        ids: rest.iter().take(limit).map(|job| job.id.clone()).collect(),
        has_more: rest.len() > limit,
    }
}

#[async_trait]
impl JobSource for OutputSource {
    fn is_id(&self, text: &str) -> bool {
        Id::try_from(text.to_string()).is_ok()
    }

    async fn list(&self, _: &Viewer, after: Option<&str>, limit: usize) -> Result<JobIds, LedgerError> {
        Ok(page(&self.jobs().await, after, limit))
    }

    async fn frame(&self, _: &Viewer, id: &str) -> Result<Option<Frame>, LedgerError> {
        let jobs = self.jobs().await;
        let Some(job) = jobs.into_iter().find(|job| job.id == id) else {
            return Ok(None);
        };
        let ledger = self.open_ledger(id).await?;
        let record = ledger.as_ref().map(Ledger::job);
        let model = record.and_then(|record| record.resolved.get("model"));
        let model = model.and_then(Value::as_str).map(|folder| {
            let name = folder.trim_end_matches('/').rsplit('/').next();
            name.unwrap_or(folder).to_string()
        });
        let name = record.map_or(job.id.as_str(), |record| record.name.as_str());
        let may_change = !self.is_read_only;
        Ok(Some(Frame {
            name: name.to_string(),
            kind: Kind::Job,
            model,
            state: None,
            note: None,
            created_at: job.created_at,
            ended_at: None,
            refused: 0,
            without_ledger: Default::default(),
            is_final: false,
            rights: Rights {
                cancel: may_change,
                change: may_change && !is_job_of_batch(name, &job.output),
            },
            id: job.id,
            output: Some(job.output),
        }))
    }

    async fn ledger(&self, _: &Viewer, id: &str) -> Result<Option<Ledger>, LedgerError> {
        self.open_ledger(id).await
    }

    fn may_read_inputs(&self, _: &Viewer, ledger: &Ledger) -> bool {
        let here = std::env::current_dir().unwrap_or_default();
        let Ok(output) = Location::parse(ledger.store().url().as_str(), &here) else {
            return false;
        };
        let inputs = ledger.job().inputs.iter().map(|input| input.url.as_str());
        match self.access.inputs_refusal(&output, inputs) {
            None => true,
            Some(why) => {
                tracing::warn!("prompts are not shown: {why}");
                false
            }
        }
    }

    async fn command(&self, _: &Viewer, id: &str, command: Command) -> Result<(), ApiError> {
        if self.is_read_only {
            return Err(ApiError::forbidden("this dashboard only shows jobs (`--read-only`)"));
        }
        let ledger = self.own_ledger(id).await?;
        let name = &ledger.job().name;
        if command != Command::Cancel && is_job_of_batch(name, ledger.store().url().as_str()) {
            return Err(ApiError::conflict(
                "a batch's files are recorded when it ends: submit the requests again as a new batch",
            ));
        }
        match command {
            Command::Cancel => match ledger.stop(StopWhy::Cancelled, false).await? {
                StopOutcome::AlreadyFinished => Err(ApiError::conflict("the job is finished: nothing to cancel")),
                StopOutcome::Stopped | StopOutcome::AlreadyStopped => Ok(()),
            },
            Command::Extend { usd, deadline_seconds } => {
                let mut control = ledger.control().await?;
                let raised = raise_limits(&ledger, &mut control, usd, deadline_seconds).await;
                match raised.map_err(failed)? {
                    Ok(_) => Ok(()),
                    Err(refusal @ ExtendRefusal::Cancelled) => Err(ApiError::conflict(format!("the job {refusal}"))),
                    Err(refusal) => Err(ApiError::conflict(refusal.to_string())),
                }
            }
            Command::Retry => match next_generation(&ledger, None).await.map_err(failed)? {
                Some(_) => Ok(()),
                None => Err(ApiError::conflict("the job has no failed rows: nothing to retry")),
            },
        }
    }
}

/// The refusal of a command that failed: what a person can mend is told, the rest goes to the log.
fn failed(failure: Failure) -> ApiError {
    let why = one_line(&failure.error);
    match failure.error.downcast::<LedgerError>() {
        Ok(error) if failure.exit != Exit::BadJob => ApiError::from(error),
        _ if failure.exit == Exit::BadJob => ApiError::conflict(why),
        _ => ApiError::internal(why),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(id: &str, output: &str, created_at: i64) -> FoundJob {
        FoundJob {
            id: id.into(),
            output: output.into(),
            created_at,
        }
    }

    #[test]
    fn jobs_are_listed_newest_first_and_once() {
        let jobs = newest_first(vec![
            job("a", "/1", 5),
            job("b", "/2", 9),
            job("a", "/1", 5),
            job("b", "/copy", 9),
        ]);
        assert_eq!(jobs, [job("b", "/2", 9), job("a", "/1", 5)]);
    }

    #[test]
    fn pages_follow_each_other() {
        let jobs: Vec<FoundJob> = ["a", "b", "c"].map(|id| job(id, "/", 0)).to_vec();
        let ids = |after, limit| {
            let page = page(&jobs, after, limit);
            (page.ids.concat(), page.has_more)
        };
        assert_eq!(ids(None, 2), ("ab".into(), true));
        assert_eq!(ids(Some("b"), 2), ("c".into(), false));
        assert_eq!(ids(None, 3), ("abc".into(), false));
        assert_eq!(ids(Some("gone"), 3), (String::new(), false));
    }

    #[test]
    fn a_failure_that_a_person_can_mend_is_told() {
        let shown = |failure: Failure| format!("{:?}", failed(failure));
        let refused = shown(Failure::bad_job(anyhow!("it is not finished")));
        assert!(
            refused.contains("409") && refused.contains("it is not finished"),
            "{refused}"
        );
        let broken = shown(Failure::from(anyhow!("/secret/path is broken")));
        assert!(broken.contains("500") && !broken.contains("secret"), "{broken}");
    }
}
