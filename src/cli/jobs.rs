//! `gristmill jobs`: lists the jobs below a prefix, each read from its own ledger.
//!
//! Each folder is first checked for a job's record. A folder with a record is an output, whose
//! subfolders hold parts; all other folders are listed. Subfolders are listed page by page, and the
//! folders of a page are processed before the next page is fetched. So memory grows with the depth
//! of the folders and not with the number of objects. Records, which may be large, are read a few
//! at a time.
//!
//! See docs/decisions/015-jobs-asks-a-folder-before-it-lists.md.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use serde::Serialize;
use serde_json::json;
use tokio::sync::Semaphore;

use crate::cli::args::JobsArgs;
use crate::cli::exit::{Exit, Failure, one_line};
use crate::cli::status::state_text;
use crate::cli::trial;
use crate::dataset::store::clients::redacted;
use crate::dataset::store::error::cause;
use crate::dataset::store::folders::{Page, list_page};
use crate::dataset::store::location::Location;
use crate::ledger::keys::JOB;
use crate::ledger::status::State;
use crate::ledger::{Ledger, Store};
use crate::printable::printable;
use crate::report::summary::{RowCounts, counted, number};

/// Number of folders inspected concurrently.
const FOLDERS_AT_ONCE: usize = 16;
/// Maximum number of jobs' records in memory.
const JOBS_AT_ONCE: u32 = 4;
/// A record larger than this is read while no other record is in memory.
const LARGE_BYTES: u64 = 16 << 20;
/// Maximum depth of nested folders.
const DEPTH_MAX: usize = 64;
/// Maximum length of a job's name in the table, in characters.
const NAME_CHARS_MAX: usize = 40;
/// Time between two progress lines of the search.
const PROGRESS_EVERY: Duration = Duration::from_secs(10);

/// A job, for the table and for `--json`.
#[derive(Debug, Serialize)]
pub(super) struct ListedJob {
    pub output: String,
    job: String,
    pub id: String,
    state: State,
    note: Option<String>,
    generation: u32,
    /// Whether it is a trial of `run --limit`.
    trial: bool,
    /// As RFC 3339 has it, in UTC.
    pub created_at: String,
    /// Rows with a final result.
    rows_done: u64,
    rows: RowCounts,
    seconds: f64,
    usd: Option<f64>,
}

/// An output or folder that could not be read.
#[derive(Debug, Serialize)]
pub(super) struct UnreadableOutput {
    pub output: String,
    pub error: String,
}

/// The result of a search below a prefix.
#[derive(Debug, Default)]
pub(super) struct SearchResult {
    pub jobs: Vec<ListedJob>,
    pub unreadable: Vec<UnreadableOutput>,
    /// Number of inspected folders.
    folders: u64,
    /// Number of skipped folders of trials.
    trials: u64,
}

/// A folder to inspect, or one whose next page of subfolders is to be listed.
struct PendingFolder {
    location: Location,
    page_token: Option<String>,
    depth: usize,
}

/// Result of inspecting a folder.
enum Inspection {
    Job(Box<ListedJob>),
    Unreadable(anyhow::Error),
    Folders(object_store::Result<Page>),
}

pub(super) async fn jobs(args: JobsArgs) -> Result<Exit, Failure> {
    let prefix = prefix_of(&args.prefix)?;
    let result = search(prefix.clone(), args.trials).await?;
    if args.json {
        let object = json!({
            "prefix": prefix.url.as_str(),
            "jobs": result.jobs,
            "unread": result.unreadable,
            "trial_folders": result.trials,
        });
        println!("{object}");
    } else {
        print_result(&result, &prefix);
    }
    Ok(if result.unreadable.is_empty() {
        Exit::Done
    } else {
        Exit::Failure
    })
}

/// The prefix that somebody names.
pub(super) fn prefix_of(text: &str) -> Result<Location, Failure> {
    let here = std::env::current_dir()?;
    let prefix = Location::parse(text, &here).map_err(Failure::bad_job)?;
    if prefix.local_path().is_some_and(|path| !path.is_dir()) {
        return Err(Failure::bad_job(anyhow!("`{text}` is no folder")));
    }
    Ok(prefix)
}

/// Finds the jobs at and below `prefix`.
pub(super) async fn search(prefix: Location, include_trials: bool) -> Result<SearchResult, Failure> {
    let (mut result, records) = (SearchResult::default(), Semaphore::new(JOBS_AT_ONCE as usize));
    let mut last_progress = Instant::now();
    let mut pending = vec![PendingFolder {
        location: prefix,
        page_token: None,
        depth: 0,
    }];
    let mut inspections = FuturesUnordered::new();
    loop {
        while inspections.len() < FOLDERS_AT_ONCE
            && let Some(folder) = pending.pop()
        {
            inspections.push(inspect(folder, &records));
        }
        let Some((folder, inspection)) = inspections.next().await else {
            break;
        };
        result.folders += u64::from(folder.page_token.is_none());
        match inspection {
            Inspection::Job(job) => result.jobs.push(*job),
            Inspection::Unreadable(error) => result.add_unreadable(&folder.location, one_line(&error)),
            Inspection::Folders(Ok(page)) => pending.extend(result.add_page(folder, page, include_trials)),
            Inspection::Folders(Err(error)) if folder.depth == 0 => {
                return Err(listing_failure(&folder.location, &error));
            }
            Inspection::Folders(Err(error)) => {
                result.add_unreadable(&folder.location, format!("listing it: {}", cause(&error)))
            }
        }
        if last_progress.elapsed() > PROGRESS_EVERY {
            last_progress = Instant::now();
            eprintln!(
                "looked at {}, {} so far",
                counted(result.folders, "folder"),
                counted(result.jobs.len() as u64, "job")
            );
        }
    }
    result.jobs.sort_by(|a, b| a.output.cmp(&b.output));
    result.unreadable.sort_by(|a, b| a.output.cmp(&b.output));
    Ok(result)
}

impl SearchResult {
    fn add_unreadable(&mut self, location: &Location, error: String) {
        self.unreadable.push(UnreadableOutput {
            output: location.url.to_string(),
            error,
        });
    }

    /// Counts the trials of a page of `folder`, and returns the folders to inspect. The next page
    /// comes first, since the stack is processed from its end.
    fn add_page(&mut self, folder: PendingFolder, page: Page, include_trials: bool) -> Vec<PendingFolder> {
        if page.unaddressable > 0 {
            let error = format!(
                "{} in it cannot be named by an address",
                counted(page.unaddressable, "folder")
            );
            self.add_unreadable(&folder.location, error);
        }
        let depth = folder.depth + 1;
        let mut next = Vec::with_capacity(page.folders.len() + 1);
        if depth > DEPTH_MAX && !page.folders.is_empty() {
            self.add_unreadable(
                &folder.location,
                format!("folders more than {DEPTH_MAX} deep are not looked into"),
            );
            return next;
        }
        next.extend(page.next_token.map(|page_token| PendingFolder {
            page_token: Some(page_token),
            ..folder
        }));
        for location in page.folders {
            let page_token = None;
            match location.path.filename().unwrap_or_default() {
                trial::FOLDER if !include_trials => self.trials += 1,
                trial::FOLDER => next.push(PendingFolder {
                    location,
                    page_token,
                    depth,
                }),
                hidden if hidden.starts_with(['_', '.']) => {}
                _ => next.push(PendingFolder {
                    location,
                    page_token,
                    depth,
                }),
            }
        }
        next
    }
}

/// Reads the job in a folder, or else lists its subfolders.
async fn inspect(folder: PendingFolder, records: &Semaphore) -> (PendingFolder, Inspection) {
    let inspection = match &folder.page_token {
        Some(page_token) => Inspection::Folders(list_page(&folder.location, Some(page_token.clone())).await),
        None => match job_at(&folder.location, records).await {
            Ok(Some(job)) => Inspection::Job(Box::new(job)),
            Ok(None) => Inspection::Folders(list_page(&folder.location, None).await),
            Err(error) => Inspection::Unreadable(error),
        },
    };
    (folder, inspection)
}

/// The job whose output is at `location`; `None` if there is none.
async fn job_at(location: &Location, records: &Semaphore) -> anyhow::Result<Option<ListedJob>> {
    let store = Store::new(location)?;
    let Some(version) = store.object_version(JOB).await? else {
        return Ok(None);
    };
    let permits = if version.size > LARGE_BYTES { JOBS_AT_ONCE } else { 1 };
    let _permit = records.acquire_many(permits).await?;
    let Some(ledger) = Ledger::open_in(store).await? else {
        return Ok(None);
    };
    let status = ledger.quick_status().await?;
    let rows = RowCounts::of(status.rows, &status.tally);
    Ok(Some(ListedJob {
        output: location.url.to_string(),
        trial: location.path.parts().any(|part| part.as_ref() == trial::FOLDER),
        created_at: ledger.created_at().to_rfc3339(),
        job: status.name,
        id: status.job.to_string(),
        state: status.state,
        note: status.note,
        generation: status.generation,
        rows_done: rows.ended(),
        rows,
        seconds: status.seconds.abs(),
        usd: status.usd.map(f64::abs),
    }))
}

/// The error if the prefix itself cannot be listed.
fn listing_failure(location: &Location, error: &object_store::Error) -> Failure {
    let why = cause(error);
    let failed = anyhow!("cannot list `{}`: {why}", redacted(&location.url));
    // An existing bucket gives an empty listing for a prefix without objects, so a 404 means that
    // there is no bucket.
    if why.contains("answered 404") {
        Failure::bad_job(failed)
    } else {
        failed.into()
    }
}

fn print_result(result: &SearchResult, prefix: &Location) {
    if result.jobs.is_empty() && result.unreadable.is_empty() {
        println!(
            "no job below `{}`: none of {} holds `{JOB}`",
            prefix.url,
            counted(result.folders, "folder")
        );
    } else {
        table(result).iter().for_each(|line| println!("{line}"));
    }
    if result.trials > 0 {
        println!("trials of `--limit` are left out: --trials lists them, too");
    }
}

/// The table: a heading line, then a line per job or unreadable output.
fn table(result: &SearchResult) -> Vec<String> {
    let heading = ["output", "job", "state", "rows done", "created"].map(String::from);
    let jobs = result.jobs.iter().map(|job| {
        let cells = [
            printable(&job.output),
            cut_name(&printable(&job.job)),
            state_text(job.state).to_string(),
            format!("{} of {}", number(job.rows_done), number(job.rows.total)),
            // The time is cut to minutes.
            job.created_at.chars().take(16).collect::<String>().replace('T', " "),
        ];
        (job.output.as_str(), cells)
    });
    let unreadable = result.unreadable.iter().map(|unreadable| {
        let why = format!("cannot be read: {}", printable(&unreadable.error));
        let cells = [
            printable(&unreadable.output),
            why,
            String::new(),
            String::new(),
            String::new(),
        ];
        (unreadable.output.as_str(), cells)
    });
    let mut rows: Vec<(&str, [String; 5])> = jobs.chain(unreadable).collect();
    rows.sort_by_key(|(output, _)| *output);
    let unreadable: HashSet<&str> = result
        .unreadable
        .iter()
        .map(|unreadable| unreadable.output.as_str())
        .collect();
    let width = |column: usize| {
        // The error of an unreadable output extends to the end of its line.
        let is_aligned = |output: &str| column == 0 || !unreadable.contains(output);
        let cells = rows.iter().filter(|(output, _)| is_aligned(output));
        let widest = cells.map(|(_, cells)| cells[column].chars().count()).max();
        widest.unwrap_or(0).max(heading[column].len())
    };
    let widths: [usize; 5] = std::array::from_fn(width);
    let line = |cells: &[String; 5]| {
        let padded = cells.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        padded.collect::<Vec<_>>().join("  ").trim_end().to_string()
    };
    let lines = rows.iter().map(|(_, cells)| line(cells));
    std::iter::once(line(&heading)).chain(lines).collect()
}

/// A name cut to [`NAME_CHARS_MAX`] characters.
fn cut_name(name: &str) -> String {
    match name.char_indices().nth(NAME_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &name[..end]),
        None => name.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_aligned_and_names_what_cannot_be_read() {
        let job = |output: &str, job: &str, state: State| ListedJob {
            output: output.into(),
            job: job.into(),
            id: "0".into(),
            state,
            note: None,
            generation: 0,
            trial: false,
            created_at: "2026-11-24T10:20:30+00:00".into(),
            rows_done: 1_000,
            rows: RowCounts {
                total: 2_000,
                ..RowCounts::default()
            },
            seconds: 0.0,
            usd: None,
        };
        let result = SearchResult {
            jobs: vec![
                job("s3://b/a", "one\u{202e}", State::Running),
                job("s3://b/longer", &"x".repeat(100), State::BudgetReached),
            ],
            unreadable: vec![UnreadableOutput {
                output: "s3://b/b".into(),
                error: "`job.json` is no valid record".into(),
            }],
            ..SearchResult::default()
        };
        let name = format!("{}…", "x".repeat(40));
        let expected = [
            format!(
                "{:13}  {:41}  {:23}  {:14}  created",
                "output", "job", "state", "rows done"
            ),
            format!(
                "{:13}  {:41}  {:23}  1,000 of 2,000  2026-11-24 10:20",
                "s3://b/a", "one\\u202e", "unfinished"
            ),
            "s3://b/b       cannot be read: `job.json` is no valid record".to_string(),
            format!("s3://b/longer  {name}  stopped: budget reached  1,000 of 2,000  2026-11-24 10:20"),
        ];
        assert_eq!(table(&result), expected);
    }
}
