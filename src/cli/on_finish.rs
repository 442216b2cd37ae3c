//! `on_finish`: who is notified of a job's end, and by which process.
//!
//! Only `run` executes the command of a job file, since a person named that file. Workers and
//! `reconcile` read the address from a job's record, which anyone with write access to the output
//! may have written. So they post only to addresses that their operator listed. The outcome never
//! changes the job's result.

use std::collections::HashSet;
use std::io::Write;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::anyhow;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tracing::Instrument;

use crate::cli::args::shell_word;
use crate::cli::exit::{Failure, one_line};
use crate::cli::prepare::PreparedJob;
use crate::job::on_finish::OnFinish;
use crate::ledger::Ledger;
use crate::notice::{Notice, webhook_failed};
use crate::signing::Signing;
use crate::worker::Worker;
use crate::worker::access::Access;
use crate::worker::stop::Stop;

/// Maximum runtime of the command.
const COMMAND_MAX: Duration = Duration::from_secs(600);
/// Interval of polling whether the command has exited.
const POLL_EVERY: Duration = Duration::from_millis(20);
/// Interval at which a worker checks whether it has finished a job.
const WATCH_EVERY: Duration = Duration::from_secs(1);
/// Maximum wait of a worker that was told to leave.
const LEAVING_MAX: Duration = Duration::from_secs(4);

/// The configured actions in words; `None` if there are none.
pub(super) fn line(prepared: &PreparedJob) -> Option<String> {
    let OnFinish { command, url } = of_whole_job(prepared)?;
    let words: Vec<String> = command.iter().map(|word| shell_word(word)).collect();
    let runs = (!words.is_empty()).then(|| format!("runs `{}`", words.join(" ")));
    let posts = url.as_ref().map(|url| format!("posts to `{url}`"));
    let all: Vec<String> = runs.into_iter().chain(posts).collect();
    (!all.is_empty()).then(|| all.join(" and "))
}

/// The settings, except for a trial, which notifies nobody.
fn of_whole_job(prepared: &PreparedJob) -> Option<&OnFinish> {
    prepared.limit.is_none().then_some(&prepared.job.on_finish)
}

/// Unusable keys are reported before the job begins instead of at its end.
pub(super) fn check_keys(prepared: &PreparedJob) -> Result<(), Failure> {
    match of_whole_job(prepared).and_then(OnFinish::address) {
        Some(_) => Signing::for_webhooks()
            .map(drop)
            .map_err(|why| Failure::bad_job(anyhow!(why))),
        None => Ok(()),
    }
}

/// A missing command is reported before the job begins instead of at its end.
pub(super) fn check_command(prepared: &PreparedJob) -> Result<(), Failure> {
    let asked = of_whole_job(prepared).and_then(|asked| asked.command.first());
    match asked.map(|program| (program, is_there(program, &prepared.job.base_dir))) {
        Some((program, false)) => Err(Failure::bad_job(anyhow!(
            "{}: `on_finish.command`: there is no program `{program}`{}",
            prepared.job.file,
            if program.contains('/') {
                " (a path is relative to the job file)"
            } else {
                " in `PATH`"
            }
        ))),
        _ => Ok(()),
    }
}

/// Whether there is a file that [`run_command`] would start.
fn is_there(program: &str, folder: &Path) -> bool {
    if program.contains('/') {
        folder.join(program).is_file()
    } else {
        let folders = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&folders).any(|folder| folder.join(program).is_file())
    }
}

/// Performs the actions of a person's own job file after the job's end.
pub(super) async fn of_run(prepared: &PreparedJob, ledger: &Ledger, stop: &Stop) {
    let Some(asked) = of_whole_job(prepared) else { return };
    let is_any = !asked.command.is_empty() || asked.url.is_some();
    if !is_any {
        return;
    }
    if let Err(why) = tell_of_run(asked, prepared, ledger, stop).await {
        eprintln!("gristmill: warning: {}", one_line(&why));
    }
}

async fn tell_of_run(asked: &OnFinish, prepared: &PreparedJob, ledger: &Ledger, stop: &Stop) -> anyhow::Result<()> {
    if ledger.success().await?.is_none() || ledger.is_told().await? {
        return Ok(());
    }
    let notice = Notice::of(ledger).await?;
    let mut is_told = true;
    if !asked.command.is_empty() {
        let (command, folder) = (asked.command.clone(), prepared.job.base_dir.clone());
        let (object, stop) = (format!("{}\n", notice.body), stop.clone());
        let ran = tokio::task::spawn_blocking(move || run_command(&command, &folder, &object, &stop)).await?;
        if let Err(why) = ran {
            is_told = false;
            eprintln!("gristmill: warning: `on_finish.command` {why}; the job's result is unaffected");
        }
    }
    if let Some(url) = asked.address() {
        let keys = Signing::for_webhooks().map_err(anyhow::Error::msg)?;
        if let Err(why) = notice.post(&url, &keys).await {
            is_told = false;
            eprintln!("gristmill: warning: {}", webhook_failed(&url, &why));
        }
    }
    if is_told {
        ledger.mark_told().await?;
    }
    Ok(())
}

/// Runs a program without a shell, with `object` on its standard input. Its output goes to stderr,
/// since stdout is for the report.
fn run_command(command: &[String], folder: &Path, object: &str, stop: &Stop) -> Result<(), String> {
    let Some((program, arguments)) = command.split_first() else {
        return Ok(());
    };
    // A path is relative to the job file; a bare name is looked up in PATH.
    let program = if program.contains('/') {
        folder.join(program)
    } else {
        PathBuf::from(program)
    };
    let stderr = std::io::stderr()
        .as_fd()
        .try_clone_to_owned()
        .map_err(|error| error.to_string())?;
    let mut child = Command::new(&program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::from(stderr))
        .spawn()
        .map_err(|error| format!("cannot start `{}`: {error}", program.display()))?;
    if let Some(mut input) = child.stdin.take() {
        // The write fails if the program has exited without reading its input.
        let _ = input.write_all(object.as_bytes());
    }
    wait(&mut child, stop)
}

fn wait(child: &mut Child, stop: &Stop) -> Result<(), String> {
    let began = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => return Err(format!("ended with {status}")),
            Ok(None) => {}
            Err(error) => return Err(format!("cannot be waited for: {error}")),
        }
        let why = match (stop.is_set(), began.elapsed() > COMMAND_MAX) {
            (true, _) => "was ended: gristmill was told to stop".to_string(),
            (_, true) => format!("was ended: it took more than {} s", COMMAND_MAX.as_secs()),
            _ => {
                std::thread::sleep(POLL_EVERY);
                continue;
            }
        };
        // The program may have exited in the meantime.
        let _ = child.kill();
        let _ = child.wait();
        return Err(why);
    }
}

/// The option that a worker needs to post this job's end.
pub(super) fn accepting(ledger: &Ledger) -> String {
    match recorded(ledger).and_then(|asked| asked.address()) {
        Some(url) => format!(
            " --accept-on-finish {}",
            shell_word(&format!("{}/", url.origin().ascii_serialization()))
        ),
        None => String::new(),
    }
}

/// Warns about parts of `on_finish` that workers will not perform.
pub(super) fn warn_submitted(prepared: &PreparedJob, ledger: &Ledger) {
    let Some(asked) = of_whole_job(prepared) else { return };
    let file = &prepared.job.file;
    if !asked.command.is_empty() {
        eprintln!(
            "gristmill: warning: {file}: `on_finish.command` is run by `gristmill run` alone: workers post to `on_finish.url`, and run nothing"
        );
    }
    let began_with = recorded(ledger).and_then(|asked| asked.url);
    if began_with != asked.url {
        let shown = |url: &Option<String>| url.as_ref().map_or("none".to_string(), |url| format!("`{url}`"));
        eprintln!(
            "gristmill: warning: {file}: workers tell what the job began with: `on_finish.url` was {} and is {}",
            shown(&began_with),
            shown(&asked.url)
        );
    }
}

/// The settings in a job's record, if the record is readable and valid.
fn recorded(ledger: &Ledger) -> Option<OnFinish> {
    let resolved = &ledger.job().resolved;
    let job = crate::job::Job::of_record(resolved, &ledger.store().address(crate::ledger::keys::JOB)).ok()?;
    Some(job.on_finish)
}

/// Posts the ends of queued jobs, within the operator's permissions.
pub(super) struct Teller {
    access: Access,
    keys: Signing,
    /// Jobs whose end was posted, or whose refusal was reported.
    done: Mutex<HashSet<String>>,
}

/// A task that posts the end of each job whose result this worker writes.
pub(super) struct Telling {
    task: JoinHandle<()>,
    /// Dropping it ends the task after a last check.
    going: oneshot::Sender<()>,
}

impl Telling {
    pub(super) fn start(teller: Teller, worker: Arc<Worker>) -> Telling {
        let (going, mut over) = oneshot::channel();
        let telling = async move {
            loop {
                let pause = tokio::time::timeout(WATCH_EVERY, &mut over);
                let is_over = pause.await.is_ok();
                teller.tell_finished(&worker).await;
                if is_over {
                    break;
                }
            }
        };
        let task = tokio::spawn(telling.in_current_span());
        Telling { task, going }
    }

    /// Ends after a last check. A worker that was told to `leave` does not wait for slow receivers;
    /// `reconcile` posts the rest.
    pub(super) async fn end(self, leave: bool) {
        drop(self.going);
        let most = if leave { LEAVING_MAX } else { Duration::MAX };
        // A panic in the task was reported already.
        let _ = tokio::time::timeout(most, self.task).await;
    }
}

impl Teller {
    /// # Errors
    /// The keys that sign posts are unusable.
    pub(super) fn new(access: Access) -> Result<Teller, Failure> {
        Ok(Teller {
            access,
            keys: Signing::for_webhooks().map_err(|why| Failure::bad_job(anyhow!(why)))?,
            done: Mutex::default(),
        })
    }

    /// Posts the ends of the jobs whose result this worker has written.
    async fn tell_finished(&self, worker: &Worker) {
        let jobs = worker.jobs.open().await;
        let watched = worker.watched.ledgers();
        for ledger in jobs.iter().map(|job| &job.ledger).chain(&watched) {
            if ledger.take_wrote_result() {
                self.tell(ledger).await;
            }
        }
    }

    /// Posts the end of a finished job, unless that was done. A reason against posting is reported
    /// once per process.
    pub(super) async fn tell(&self, ledger: &Ledger) {
        let Some(url) = recorded(ledger).and_then(|asked| asked.address()) else {
            return;
        };
        let key = format!("{}-{}", ledger.job().job, ledger.generation());
        let is_new = self.done.lock().unwrap_or_else(PoisonError::into_inner).insert(key);
        if !is_new {
            return;
        }
        let told = async {
            if ledger.is_told().await? {
                return Ok(());
            }
            if let Some(why) = self.access.refuses_told(&url) {
                return Err(anyhow!(why));
            }
            let notice = Notice::of(ledger).await?;
            notice
                .post(&url, &self.keys)
                .await
                .map_err(|why| anyhow!(webhook_failed(&url, &why)))?;
            Ok::<_, anyhow::Error>(ledger.mark_told().await?)
        };
        if let Err(error) = told.await {
            eprintln!("gristmill: warning: job `{}`: {}", ledger.job().name, one_line(&error));
        }
    }
}
