//! Worker processes: started, killed, paused, told to leave, and started again.

#![expect(unsafe_code, reason = "`kill` is a call of C")]

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::gristmill;

/// Lines of a log that a failure shows.
const TAIL_LINES: usize = 15;

/// How each worker is started.
#[derive(Debug, Clone, Default)]
pub(super) struct Start {
    pub arguments: Vec<String>,
    pub env: Vec<(String, String)>,
}

/// A place for one worker at a time; its lives follow one another.
#[derive(Debug)]
struct Seat {
    child: Option<Child>,
    arguments: Vec<String>,
    lives: u32,
    log: PathBuf,
    /// Arms the next life only.
    next_env: Vec<(String, String)>,
    /// It ended by itself because the job is done.
    done: bool,
    paused: bool,
}

/// What ended a worker, and the log of its life.
#[derive(Debug)]
pub(super) struct Ended {
    pub status: ExitStatus,
    pub log: String,
}

impl Ended {
    /// The process ended itself with SIGABRT.
    pub(super) fn aborted(&self) -> bool {
        self.status.signal() == Some(libc::SIGABRT)
    }

    /// What a worker with `--json` says last.
    #[track_caller]
    pub(super) fn report(&self) -> Value {
        let line = self.log.lines().rfind(|line| line.starts_with('{'));
        let line = line.unwrap_or_else(|| panic!("no report:\n{}", self.log));
        serde_json::from_str(line).unwrap_or_else(|e| panic!("the report is not JSON ({e}): {line}"))
    }

    /// It left as it was told to, or since the job ended in that moment.
    #[track_caller]
    pub(super) fn assert_left(&self) {
        let code = self.status.code();
        assert!(
            matches!(code, Some(0 | 3 | 6)),
            "the worker ended with {code:?}:\n{}",
            self.log
        );
    }

    /// The worker left because there is nothing left to do, with or without failed rows.
    pub(super) fn job_is_over(&self) -> bool {
        matches!(self.status.code(), Some(0 | 3))
    }
}

/// The workers of a job. Dropped, it kills all of them.
pub(super) struct WorkerSet {
    start: Start,
    logs: PathBuf,
    seats: Vec<Seat>,
}

impl WorkerSet {
    pub(super) fn new(start: Start, logs: &Path) -> WorkerSet {
        std::fs::create_dir_all(logs).unwrap();
        WorkerSet {
            start,
            logs: logs.to_path_buf(),
            seats: Vec::new(),
        }
    }

    /// Sets a variable of every worker to come.
    pub(super) fn set_env(&mut self, name: &str, value: &str) {
        self.start.env.push((name.into(), value.into()));
    }

    /// A new seat with a worker that has `env` besides what all have; its number.
    pub(super) fn hire(&mut self, env: &[(&str, &str)]) -> usize {
        self.hire_with(env, |_| ())
    }

    /// As [`WorkerSet::hire`], with arguments of its own: `edit` gets those that all have.
    pub(super) fn hire_with(&mut self, env: &[(&str, &str)], edit: impl FnOnce(&mut Vec<String>)) -> usize {
        let mut arguments = self.start.arguments.clone();
        edit(&mut arguments);
        self.seats.push(Seat {
            child: None,
            arguments,
            lives: 0,
            log: PathBuf::new(),
            next_env: Vec::new(),
            done: false,
            paused: false,
        });
        let seat = self.seats.len() - 1;
        self.arm(seat, env);
        self.begin(seat);
        seat
    }

    /// `env` holds for the seat's next life.
    pub(super) fn arm(&mut self, seat: usize, env: &[(&str, &str)]) {
        self.seats[seat].next_env = env.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    }

    /// The seat's next life, where none is left.
    pub(super) fn begin(&mut self, seat: usize) {
        let place = &mut self.seats[seat];
        assert!(place.child.is_none(), "seat {seat} has a worker already");
        place.lives += 1;
        place.log = self.logs.join(format!("worker-{seat}.{}.log", place.lives));
        let log = File::create(&place.log).unwrap();
        let arguments: Vec<&str> = place.arguments.iter().map(String::as_str).collect();
        let child = gristmill(&arguments)
            .envs(self.start.env.iter().cloned())
            .envs(std::mem::take(&mut place.next_env))
            .env("RUST_LOG", "gristmill=info,warn")
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .expect("a worker starts");
        place.child = Some(child);
        place.done = false;
        place.paused = false;
    }

    /// The next life of every seat without a worker.
    pub(super) fn begin_all(&mut self) {
        for seat in 0..self.seats.len() {
            if self.seats[seat].child.is_none() {
                self.begin(seat);
            }
        }
    }

    /// Seats whose worker runs and is not paused.
    pub(super) fn awake(&self) -> Vec<usize> {
        let awake = |seat: &&usize| self.seats[**seat].child.is_some() && !self.seats[**seat].paused;
        (0..self.seats.len())
            .collect::<Vec<_>>()
            .iter()
            .filter(awake)
            .copied()
            .collect()
    }

    /// A seat whose worker has left.
    pub(super) fn vacant(&self) -> Option<usize> {
        self.seats.iter().position(|seat| seat.child.is_none() && !seat.done)
    }

    /// Lives that were begun, over all seats.
    pub(super) fn lives(&self) -> u64 {
        self.seats.iter().map(|seat| u64::from(seat.lives)).sum()
    }

    /// SIGKILL; false where the worker has ended already.
    pub(super) fn kill(&mut self, seat: usize) -> bool {
        let Some(mut child) = self.seats[seat].child.take() else {
            return false;
        };
        let alive = child.try_wait().unwrap().is_none();
        child.kill().unwrap();
        child.wait().unwrap();
        alive
    }

    /// SIGSTOP.
    pub(super) fn pause(&mut self, seat: usize) {
        self.seats[seat].paused = true;
        self.signal(seat, libc::SIGSTOP);
    }

    /// SIGCONT.
    pub(super) fn wake(&mut self, seat: usize) {
        self.signal(seat, libc::SIGCONT);
        self.seats[seat].paused = false;
    }

    /// SIGTERM; waits until the worker has left, at most `limit`, and says how.
    pub(super) fn dismiss(&mut self, seat: usize, limit: Duration) -> Ended {
        self.signal(seat, libc::SIGTERM);
        self.wait(seat, limit)
    }

    /// Waits until the seat's worker ends, at most `limit`, and says how.
    pub(super) fn wait(&mut self, seat: usize, limit: Duration) -> Ended {
        let began = Instant::now();
        loop {
            if let Some(ended) = self.ended(seat) {
                return ended;
            }
            assert!(
                began.elapsed() < limit,
                "worker {seat} did not end within {limit:?}:\n{}",
                self.tail(seat)
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// How the seat's worker ended, if it did.
    pub(super) fn ended(&mut self, seat: usize) -> Option<Ended> {
        let status = self.seats[seat].child.as_mut()?.try_wait().unwrap()?;
        self.seats[seat].child = None;
        let log = self.log(seat);
        Some(Ended { status, log })
    }

    /// Looks who has ended by himself. With one of the exit codes `job_ended` the seat is done; what is `tolerated` begins
    /// its next life; anything else fails the test: workers wait for what is away, they do not end.
    pub(super) fn keep(&mut self, job_ended: &[i32], tolerated: fn(&Ended) -> bool) {
        for seat in 0..self.seats.len() {
            let Some(ended) = self.ended(seat) else { continue };
            if ended.status.code().is_some_and(|code| job_ended.contains(&code)) {
                self.seats[seat].done = true;
            } else if tolerated(&ended) {
                self.begin(seat);
            } else {
                panic!(
                    "worker {seat} ended by itself ({}):\n{}",
                    ended.status,
                    tail(&ended.log)
                );
            }
        }
    }

    /// Whether every worker has ended by itself because the job is done.
    pub(super) fn all_done(&self) -> bool {
        self.seats.iter().all(|seat| seat.child.is_none())
    }

    /// The log of the seat's life, so far.
    pub(super) fn log(&self, seat: usize) -> String {
        let bytes = std::fs::read(&self.seats[seat].log).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The last lines of every worker, for a failure.
    pub(super) fn tails(&self) -> String {
        (0..self.seats.len())
            .map(|seat| format!("worker {seat}:\n{}\n", self.tail(seat)))
            .collect()
    }

    fn tail(&self, seat: usize) -> String {
        tail(&self.log(seat))
    }

    fn signal(&self, seat: usize, number: i32) {
        if let Some(child) = &self.seats[seat].child {
            // SAFETY: a child that was not waited for keeps its process id.
            let sent = unsafe { libc::kill(child.id() as i32, number) };
            assert_eq!(sent, 0, "signal {number} to worker {seat}");
        }
    }
}

impl Drop for WorkerSet {
    fn drop(&mut self) {
        for seat in &mut self.seats {
            if let Some(mut child) = seat.child.take() {
                // A process that has ended meanwhile is as good.
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}

fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}
