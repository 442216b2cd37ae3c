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
use crate::notice::{Notice, webhook_error};
use crate::signing::Signing;
use crate::worker::Worker;
use crate::worker::access::Access;
use crate::worker::stop::Stop;

/// Maximum runtime of the command.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(600);
/// Interval of polling whether the command has exited.
const POLL_EVERY: Duration = Duration::from_millis(20);
/// Interval at which a worker checks whether it has finished a job.
const CHECK_EVERY: Duration = Duration::from_secs(1);
/// Timeout of the last posts of a worker that was told to leave.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(4);

/// Describes the configured actions; `None` if there are none.
pub(super) fn description(prepared: &PreparedJob) -> Option<String> {
    let OnFinish { command, url } = actions_of(prepared)?;
    let words: Vec<String> = command.iter().map(|word| shell_word(word)).collect();
    let runs = (!words.is_empty()).then(|| format!("runs `{}`", words.join(" ")));
    let posts = url.as_ref().map(|url| format!("posts to `{url}`"));
    let all: Vec<String> = runs.into_iter().chain(posts).collect();
    (!all.is_empty()).then(|| all.join(" and "))
}

/// The job's actions; `None` for a trial, which notifies nobody.
fn actions_of(prepared: &PreparedJob) -> Option<&OnFinish> {
    prepared.limit.is_none().then_some(&prepared.job.on_finish)
}

/// Checks the keys for posts before the job begins instead of at its end.
pub(super) fn check_keys(prepared: &PreparedJob) -> Result<(), Failure> {
    match actions_of(prepared).and_then(OnFinish::address) {
        Some(_) => Signing::for_webhooks()
            .map(drop)
            .map_err(|why| Failure::bad_job(anyhow!(why))),
        None => Ok(()),
    }
}

/// Checks that the command exists before the job begins instead of at its end.
pub(super) fn check_command(prepared: &PreparedJob) -> Result<(), Failure> {
    let program = actions_of(prepared).and_then(|actions| actions.command.first());
    match program.map(|program| (program, program_exists(program, &prepared.job.base_dir))) {
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
fn program_exists(program: &str, folder: &Path) -> bool {
    if program.contains('/') {
        folder.join(program).is_file()
    } else {
        let folders = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&folders).any(|folder| folder.join(program).is_file())
    }
}

/// Performs the actions of a job file that `run` was given, after the job's end. A failure is only
/// a warning.
pub(super) async fn perform_after_run(prepared: &PreparedJob, ledger: &Ledger, stop: &Stop) {
    let Some(actions) = actions_of(prepared) else { return };
    let has_action = !actions.command.is_empty() || actions.url.is_some();
    if !has_action {
        return;
    }
    if let Err(why) = perform_actions(actions, prepared, ledger, stop).await {
        eprintln!("gristmill: warning: {}", one_line(&why));
    }
}

async fn perform_actions(
    actions: &OnFinish,
    prepared: &PreparedJob,
    ledger: &Ledger,
    stop: &Stop,
) -> anyhow::Result<()> {
    if ledger.success().await?.is_none() || ledger.is_end_announced().await? {
        return Ok(());
    }
    let notice = Notice::of(ledger).await?;
    let mut is_notified = true;
    if !actions.command.is_empty() {
        let (command, folder) = (actions.command.clone(), prepared.job.base_dir.clone());
        let (object, stop) = (format!("{}\n", notice.body), stop.clone());
        let result = tokio::task::spawn_blocking(move || run_command(&command, &folder, &object, &stop)).await?;
        if let Err(why) = result {
            is_notified = false;
            eprintln!("gristmill: warning: `on_finish.command` {why}; the job's result is unaffected");
        }
    }
    if let Some(url) = actions.address() {
        let keys = Signing::for_webhooks().map_err(anyhow::Error::msg)?;
        if let Err(why) = notice.post(&url, &keys).await {
            is_notified = false;
            eprintln!("gristmill: warning: {}", webhook_error(&url, &why));
        }
    }
    if is_notified {
        ledger.mark_end_announced().await?;
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
        let why = match (stop.is_set(), began.elapsed() > COMMAND_TIMEOUT) {
            (true, _) => "was ended: gristmill was told to stop".to_string(),
            (_, true) => format!("was ended: it took more than {} s", COMMAND_TIMEOUT.as_secs()),
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

/// The option that permits a worker to post to this job's `on_finish.url`.
pub(super) fn accept_option(ledger: &Ledger) -> String {
    match recorded_actions(ledger).and_then(|actions| actions.address()) {
        Some(url) => format!(
            " --accept-on-finish {}",
            shell_word(&format!("{}/", url.origin().ascii_serialization()))
        ),
        None => String::new(),
    }
}

/// Warns about `on_finish` settings of a submitted job that its workers will not apply.
pub(super) fn warn_submitted(prepared: &PreparedJob, ledger: &Ledger) {
    let Some(actions) = actions_of(prepared) else { return };
    let file = &prepared.job.file;
    if !actions.command.is_empty() {
        eprintln!(
            "gristmill: warning: {file}: `on_finish.command` is run by `gristmill run` alone: workers post to `on_finish.url`, and run nothing"
        );
    }
    let began_with = recorded_actions(ledger).and_then(|actions| actions.url);
    if began_with != actions.url {
        let shown = |url: &Option<String>| url.as_ref().map_or("none".to_string(), |url| format!("`{url}`"));
        eprintln!(
            "gristmill: warning: {file}: workers post to the `on_finish.url` that the job began with: it was {} and is now {}",
            shown(&began_with),
            shown(&actions.url)
        );
    }
}

/// The actions in a job's record, if the record is readable and valid.
fn recorded_actions(ledger: &Ledger) -> Option<OnFinish> {
    let resolved = &ledger.job().resolved;
    let job = crate::job::Job::from_record(resolved, &ledger.store().address(crate::ledger::keys::JOB)).ok()?;
    Some(job.on_finish)
}

/// Posts the notices of finished queued jobs to addresses that the operator allows.
pub(super) struct FinishNotifier {
    access: Access,
    keys: Signing,
    /// Jobs whose notice was posted, or was refused with a warning.
    handled: Mutex<HashSet<String>>,
}

/// A task that posts a notice for each job whose result this worker writes.
pub(super) struct FinishNotifierTask {
    task: JoinHandle<()>,
    /// Dropping this sender ends the task after a last check.
    dropped_at_end: oneshot::Sender<()>,
}

impl FinishNotifierTask {
    pub(super) fn start(notifier: FinishNotifier, worker: Arc<Worker>) -> FinishNotifierTask {
        let (dropped_at_end, mut ended) = oneshot::channel();
        let notifier_task = async move {
            loop {
                let pause = tokio::time::timeout(CHECK_EVERY, &mut ended);
                let has_ended = pause.await.is_ok();
                notifier.notify_finished(&worker).await;
                if has_ended {
                    break;
                }
            }
        };
        let task = tokio::spawn(notifier_task.in_current_span());
        FinishNotifierTask { task, dropped_at_end }
    }

    /// Ends the task after a last check. A worker that is leaving does not wait for slow receivers;
    /// `reconcile` notifies those.
    pub(super) async fn end(self, is_leaving: bool) {
        drop(self.dropped_at_end);
        let timeout = if is_leaving { LEAVE_TIMEOUT } else { Duration::MAX };
        // A panic in the task was reported already.
        let _ = tokio::time::timeout(timeout, self.task).await;
    }
}

impl FinishNotifier {
    /// # Errors
    /// The keys that sign posts are unusable.
    pub(super) fn new(access: Access) -> Result<FinishNotifier, Failure> {
        Ok(FinishNotifier {
            access,
            keys: Signing::for_webhooks().map_err(|why| Failure::bad_job(anyhow!(why)))?,
            handled: Mutex::default(),
        })
    }

    /// Posts the notices of the jobs whose result this worker has written.
    async fn notify_finished(&self, worker: &Worker) {
        let jobs = worker.jobs.open().await;
        let watched = worker.watched.ledgers();
        for ledger in jobs.iter().map(|job| &job.ledger).chain(&watched) {
            if ledger.take_result_written() {
                self.notify(ledger).await;
            }
        }
    }

    /// Posts the notice of a finished job, unless it was posted before. A failure or refusal is
    /// reported once per process.
    pub(super) async fn notify(&self, ledger: &Ledger) {
        let Some(url) = recorded_actions(ledger).and_then(|actions| actions.address()) else {
            return;
        };
        let key = format!("{}-{}", ledger.job().job, ledger.generation());
        let is_new = self.handled.lock().unwrap_or_else(PoisonError::into_inner).insert(key);
        if !is_new {
            return;
        }
        let notified = async {
            if ledger.is_end_announced().await? {
                return Ok(());
            }
            if let Some(why) = self.access.on_finish_refusal(&url) {
                return Err(anyhow!(why));
            }
            let notice = Notice::of(ledger).await?;
            notice
                .post(&url, &self.keys)
                .await
                .map_err(|why| anyhow!(webhook_error(&url, &why)))?;
            Ok::<_, anyhow::Error>(ledger.mark_end_announced().await?)
        };
        if let Err(error) = notified.await {
            eprintln!("gristmill: warning: job `{}`: {}", ledger.job().name, one_line(&error));
        }
    }
}
