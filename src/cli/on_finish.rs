//! `on_finish`: who hears of a job's end, and from whom.
//!
//! The command of a job file is run by `run` alone, whose file a person named. Workers and `reconcile` read an address from a job's record,
//! which whoever can write to its output has written: they post only to what their operator listed. Neither changes the job's result.

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

use crate::cli::args::shell_word;
use crate::cli::exit::{Failure, one_line};
use crate::cli::prepare::PreparedJob;
use crate::job::on_finish::OnFinish;
use crate::ledger::Ledger;
use crate::notice::{Notice, not_told};
use crate::signing::Signing;
use crate::worker::Worker;
use crate::worker::access::Access;
use crate::worker::stop::Stop;

/// How long a command may take.
const COMMAND_MAX: Duration = Duration::from_secs(600);
/// Between two looks at whether it has ended.
const POLL_EVERY: Duration = Duration::from_millis(20);
/// Between two looks of a worker at whether it has finished a job.
const WATCH_EVERY: Duration = Duration::from_secs(1);
/// What a worker that was told to leave still waits.
const LEAVING_MAX: Duration = Duration::from_secs(4);

/// What will happen at the end, for people; `None`: nothing.
pub fn line(prepared: &PreparedJob) -> Option<String> {
    let OnFinish { command, url } = of_whole_job(prepared)?;
    let words: Vec<String> = command.iter().map(|word| shell_word(word)).collect();
    let runs = (!words.is_empty()).then(|| format!("runs `{}`", words.join(" ")));
    let posts = url.as_ref().map(|url| format!("posts to `{url}`"));
    let all: Vec<String> = runs.into_iter().chain(posts).collect();
    (!all.is_empty()).then(|| all.join(" and "))
}

/// Nobody waits for a trial.
fn of_whole_job(prepared: &PreparedJob) -> Option<&OnFinish> {
    prepared.limit.is_none().then_some(&prepared.job.on_finish)
}

/// Keys that cannot be used are said before the job begins, not at its end.
pub fn check_keys(prepared: &PreparedJob) -> Result<(), Failure> {
    match of_whole_job(prepared).and_then(OnFinish::address) {
        Some(_) => Signing::of_posts()
            .map(drop)
            .map_err(|why| Failure::bad_job(anyhow!(why))),
        None => Ok(()),
    }
}

/// What a person's own job file asks for, once the job is done.
pub async fn of_run(prepared: &PreparedJob, ledger: &Ledger, stop: &Stop) {
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
            eprintln!("gristmill: warning: `on_finish.command` {why}; the job's result stands");
        }
    }
    if let Some(url) = asked.address() {
        let keys = Signing::of_posts().map_err(anyhow::Error::msg)?;
        if let Err(why) = notice.post(&url, &keys).await {
            is_told = false;
            eprintln!("gristmill: warning: {}", not_told(&url, &why));
        }
    }
    if is_told {
        ledger.mark_told().await?;
    }
    Ok(())
}

/// Runs a program without a shell, `object` on its standard input. What it prints goes to stderr: stdout is the report's.
fn run_command(command: &[String], folder: &Path, object: &str, stop: &Stop) -> Result<(), String> {
    let Some((program, arguments)) = command.split_first() else {
        return Ok(());
    };
    // As other paths of a job file; a name alone is looked up in PATH.
    let program = match program.contains('/') {
        true => folder.join(program),
        false => PathBuf::from(program),
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
        // One that does not read it may have ended already.
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
        // It may end in this moment by itself.
        let _ = child.kill();
        let _ = child.wait();
        return Err(why);
    }
}

/// The option that a worker needs to tell this job's end.
pub fn accepting(ledger: &Ledger) -> String {
    match recorded(ledger).and_then(|asked| asked.address()) {
        Some(url) => format!(
            " --accept-on-finish {}",
            shell_word(&format!("{}/", url.origin().ascii_serialization()))
        ),
        None => String::new(),
    }
}

/// Says what of a job file's `on_finish` does not reach the workers.
pub fn warn_submitted(prepared: &PreparedJob, ledger: &Ledger) {
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

/// What a job's record says, where it can be read and may be.
fn recorded(ledger: &Ledger) -> Option<OnFinish> {
    let resolved = &ledger.job().resolved;
    let job = crate::job::Job::of_record(resolved, &ledger.store().address(crate::ledger::keys::JOB)).ok()?;
    Some(job.on_finish)
}

/// Tells the ends of queued jobs, as far as it may.
pub struct Teller {
    access: Access,
    keys: Signing,
    /// Of these it has told the end, or said why not.
    done: Mutex<HashSet<String>>,
}

/// A task that tells the end of each job whose result a worker writes.
pub struct Telling {
    task: JoinHandle<()>,
    /// Dropped, it ends after a last look.
    going: oneshot::Sender<()>,
}

impl Telling {
    pub fn start(teller: Teller, worker: Arc<Worker>) -> Telling {
        let (going, mut over) = oneshot::channel();
        let task = tokio::spawn(async move {
            loop {
                let pause = tokio::time::timeout(WATCH_EVERY, &mut over);
                let is_over = pause.await.is_ok();
                teller.tell_finished(&worker).await;
                if is_over {
                    break;
                }
            }
        });
        Telling { task, going }
    }

    /// After a last look; one that was told to `leave` does not wait for slow receivers: `reconcile` tells what was not told.
    pub async fn end(self, leave: bool) {
        drop(self.going);
        let most = if leave { LEAVING_MAX } else { Duration::MAX };
        // A panic in it was said already.
        let _ = tokio::time::timeout(most, self.task).await;
    }
}

impl Teller {
    /// # Errors
    /// The keys that posts are signed with cannot be used.
    pub fn new(access: Access) -> Result<Teller, Failure> {
        Ok(Teller {
            access,
            keys: Signing::of_posts().map_err(|why| Failure::bad_job(anyhow!(why)))?,
            done: Mutex::default(),
        })
    }

    /// Tells the ends of the jobs whose result this worker has written.
    async fn tell_finished(&self, worker: &Worker) {
        let jobs = worker.jobs.open().await;
        let watched = worker.watched.ledgers();
        for ledger in jobs.iter().map(|job| &job.ledger).chain(&watched) {
            if ledger.takes_result() {
                self.tell(ledger).await;
            }
        }
    }

    /// Tells the end of a finished job, unless that was done. What keeps it from that is one line, once a process.
    pub async fn tell(&self, ledger: &Ledger) {
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
                .map_err(|why| anyhow!(not_told(&url, &why)))?;
            Ok::<_, anyhow::Error>(ledger.mark_told().await?)
        };
        if let Err(error) = told.await {
            eprintln!("gristmill: warning: job `{}`: {}", ledger.job().name, one_line(&error));
        }
    }
}
