//! `gristmill jobs`: lists the jobs below a prefix, each read from its own ledger.
//!
//! Each folder is first checked for a job's record. A folder with a record is an output, whose
//! subfolders hold parts; all other folders are listed. Subfolders are listed page by page, and the
//! folders of a page are processed before the next page is fetched. So memory grows with the depth
//! of the folders and not with the number of objects. Records, which may be large, are read a few at
//! a time.
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
use crate::cli::status::word;
use crate::cli::trial;
use crate::dataset::store::clients::shown;
use crate::dataset::store::error::cause;
use crate::dataset::store::folders::{Page, page};
use crate::dataset::store::location::Location;
use crate::ledger::keys::JOB;
use crate::ledger::status::State;
use crate::ledger::{Ledger, Store};
use crate::printable::printable;
use crate::report::summary::{RowCounts, counted, number};

/// Number of folders inspected concurrently.
const LOOKS_AT_ONCE: usize = 16;
/// Maximum number of jobs in memory.
const JOBS_AT_ONCE: u32 = 4;
/// A record larger than this is read while no other record is in memory.
const LARGE_BYTES: u64 = 16 << 20;
/// Maximum depth of nested folders.
const DEPTH_MAX: usize = 64;
/// Maximum length of a job's name in the table, in characters.
const NAME_CHARS_MAX: usize = 40;
/// Time between two progress lines of the search.
const SAY_EVERY: Duration = Duration::from_secs(10);

/// A job, for the table and for `--json`.
#[derive(Debug, Serialize)]
struct Job {
    output: String,
    job: String,
    id: String,
    state: State,
    note: Option<String>,
    generation: u32,
    /// Whether it is a trial of `run --limit`.
    trial: bool,
    created_at: String,
    /// Rows with a final result.
    rows_done: u64,
    rows: RowCounts,
    seconds: f64,
    usd: Option<f64>,
}

/// An output that could not be read.
#[derive(Debug, Serialize)]
struct Unread {
    output: String,
    error: String,
}

/// The result of the search.
#[derive(Debug, Default)]
struct Found {
    jobs: Vec<Job>,
    unread: Vec<Unread>,
    /// Number of inspected folders.
    folders: u64,
    /// Number of skipped folders of trials.
    trials: u64,
}

/// A folder to inspect, or a further page of its subfolders.
struct Todo {
    place: Location,
    token: Option<String>,
    depth: usize,
}

/// Result of inspecting a folder.
enum Seen {
    Job(Box<Job>),
    Unread(anyhow::Error),
    Folders(object_store::Result<Page>),
}

pub(super) async fn jobs(args: JobsArgs) -> Result<Exit, Failure> {
    let here = std::env::current_dir()?;
    let prefix = Location::parse(&args.prefix, &here).map_err(Failure::bad_job)?;
    if prefix.local_path().is_some_and(|path| !path.is_dir()) {
        return Err(Failure::bad_job(anyhow!("`{}` is no folder", args.prefix)));
    }
    let found = look_below(prefix.clone(), args.trials).await?;
    if args.json {
        let object = json!({
            "prefix": prefix.url.as_str(),
            "jobs": found.jobs,
            "unread": found.unread,
            "trial_folders": found.trials,
        });
        println!("{object}");
    } else {
        show(&found, &prefix);
    }
    Ok(if found.unread.is_empty() {
        Exit::Done
    } else {
        Exit::Failure
    })
}

async fn look_below(prefix: Location, trials: bool) -> Result<Found, Failure> {
    let (mut found, records) = (Found::default(), Semaphore::new(JOBS_AT_ONCE as usize));
    let mut said = Instant::now();
    let mut open = vec![Todo {
        place: prefix,
        token: None,
        depth: 0,
    }];
    let mut looks = FuturesUnordered::new();
    loop {
        while looks.len() < LOOKS_AT_ONCE
            && let Some(todo) = open.pop()
        {
            looks.push(look(todo, &records));
        }
        let Some((todo, seen)) = looks.next().await else { break };
        found.folders += u64::from(todo.token.is_none());
        match seen {
            Seen::Job(job) => found.jobs.push(*job),
            Seen::Unread(error) => found.add_unread(&todo.place, one_line(&error)),
            Seen::Folders(Ok(page)) => open.extend(found.add_page(todo, page, trials)),
            Seen::Folders(Err(error)) if todo.depth == 0 => return Err(unlisted(&todo.place, &error)),
            Seen::Folders(Err(error)) => found.add_unread(&todo.place, format!("listing it: {}", cause(&error))),
        }
        if said.elapsed() > SAY_EVERY {
            said = Instant::now();
            eprintln!(
                "looked at {}, {} so far",
                counted(found.folders, "folder"),
                counted(found.jobs.len() as u64, "job")
            );
        }
    }
    found.jobs.sort_by(|a, b| a.output.cmp(&b.output));
    found.unread.sort_by(|a, b| a.output.cmp(&b.output));
    Ok(found)
}

impl Found {
    fn add_unread(&mut self, place: &Location, error: String) {
        self.unread.push(Unread {
            output: place.url.to_string(),
            error,
        });
    }

    /// The items to push on the stack: the next page first, since it is processed last.
    fn add_page(&mut self, of: Todo, page: Page, trials: bool) -> Vec<Todo> {
        if page.unnamed > 0 {
            let error = format!(
                "{} in it cannot be named by an address",
                counted(page.unnamed, "folder")
            );
            self.add_unread(&of.place, error);
        }
        let depth = of.depth + 1;
        let mut next = Vec::with_capacity(page.folders.len() + 1);
        if depth > DEPTH_MAX && !page.folders.is_empty() {
            self.add_unread(
                &of.place,
                format!("folders more than {DEPTH_MAX} deep are not looked into"),
            );
            return next;
        }
        next.extend(page.next.map(|token| Todo {
            token: Some(token),
            ..of
        }));
        for place in page.folders {
            let token = None;
            match place.path.filename().unwrap_or_default() {
                trial::FOLDER if !trials => self.trials += 1,
                trial::FOLDER => next.push(Todo { place, token, depth }),
                hidden if hidden.starts_with(['_', '.']) => {}
                _ => next.push(Todo { place, token, depth }),
            }
        }
        next
    }
}

/// The job in a folder, or its subfolders.
async fn look(todo: Todo, records: &Semaphore) -> (Todo, Seen) {
    let seen = match &todo.token {
        Some(token) => Seen::Folders(page(&todo.place, Some(token.clone())).await),
        None => match job_at(&todo.place, records).await {
            Ok(Some(job)) => Seen::Job(Box::new(job)),
            Ok(None) => Seen::Folders(page(&todo.place, None).await),
            Err(error) => Seen::Unread(error),
        },
    };
    (todo, seen)
}

/// The job whose output is `place`.
async fn job_at(place: &Location, records: &Semaphore) -> anyhow::Result<Option<Job>> {
    let store = Store::new(place)?;
    let Some(version) = store.object_version(JOB).await? else {
        return Ok(None);
    };
    let share = if version.size > LARGE_BYTES { JOBS_AT_ONCE } else { 1 };
    let _held = records.acquire_many(share).await?;
    let Some(ledger) = Ledger::open_in(store).await? else {
        return Ok(None);
    };
    let status = ledger.quick_status().await?;
    let rows = RowCounts::of(status.rows, &status.tally);
    Ok(Some(Job {
        output: place.url.to_string(),
        trial: place.path.parts().any(|part| part.as_ref() == trial::FOLDER),
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
fn unlisted(place: &Location, error: &object_store::Error) -> Failure {
    let why = cause(error);
    let failed = anyhow!("cannot list `{}`: {why}", shown(&place.url));
    // An existing bucket gives an empty listing for a prefix without objects, so a 404 means that
    // there is no bucket.
    if why.contains("answered 404") {
        Failure::bad_job(failed)
    } else {
        failed.into()
    }
}

fn show(found: &Found, prefix: &Location) {
    if found.jobs.is_empty() && found.unread.is_empty() {
        println!(
            "no job below `{}`: none of {} holds `{JOB}`",
            prefix.url,
            counted(found.folders, "folder")
        );
    } else {
        table(found).iter().for_each(|line| println!("{line}"));
    }
    if found.trials > 0 {
        println!("trials of `--limit` are left out: --trials lists them, too");
    }
}

/// The table: a heading line, then a line per job or unreadable output.
fn table(found: &Found) -> Vec<String> {
    let heading = ["output", "job", "state", "rows done", "created"].map(String::from);
    let jobs = found.jobs.iter().map(|job| {
        let cells = [
            printable(&job.output),
            cut(&printable(&job.job)),
            word(job.state).to_string(),
            format!("{} of {}", number(job.rows_done), number(job.rows.total)),
            // The time is cut to minutes.
            job.created_at.chars().take(16).collect::<String>().replace('T', " "),
        ];
        (job.output.as_str(), cells)
    });
    let unread = found.unread.iter().map(|unread| {
        let why = format!("cannot be read: {}", printable(&unread.error));
        let cells = [
            printable(&unread.output),
            why,
            String::new(),
            String::new(),
            String::new(),
        ];
        (unread.output.as_str(), cells)
    });
    let mut rows: Vec<(&str, [String; 5])> = jobs.chain(unread).collect();
    rows.sort_by_key(|(output, _)| *output);
    let unread: HashSet<&str> = found.unread.iter().map(|unread| unread.output.as_str()).collect();
    let width = |column: usize| {
        // The error of an unreadable output extends to the end of its line.
        let counts = |output: &str| column == 0 || !unread.contains(output);
        let cells = rows.iter().filter(|(output, _)| counts(output));
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
fn cut(name: &str) -> String {
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
        let job = |output: &str, job: &str, state: State| Job {
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
        let found = Found {
            jobs: vec![
                job("s3://b/a", "one\u{202e}", State::Running),
                job("s3://b/longer", &"x".repeat(100), State::BudgetReached),
            ],
            unread: vec![Unread {
                output: "s3://b/b".into(),
                error: "`job.json` is no valid record".into(),
            }],
            ..Found::default()
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
        assert_eq!(table(&found), expected);
    }
}
