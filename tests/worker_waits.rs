//! A worker before its first message: it ends where the queue is empty, and waits where the queue does not answer.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::NamedTempFile;

use crate::queue_brokers::{fill, need};
use crate::support::{Run, gristmill};

const ONCE: [&str; 5] = ["--once", "--idle-after", "1", "--json", "--quiet"];
const AWAY: &str = "does not answer";
/// Within which a worker says so: connecting takes 10 s.
const AWAY_MAX: Duration = Duration::from_secs(60);
/// From then on: a worker that took an absence for an empty queue has ended by then, `--idle-after` being a second.
const NOTICED: Duration = Duration::from_secs(5);

/// A worker, and what it writes to stderr.
struct Worker {
    child: Child,
    stderr: NamedTempFile,
}

impl Worker {
    fn start(url: &str) -> Worker {
        let stderr = NamedTempFile::new().unwrap();
        let child = gristmill(&[&["worker", "--queue", url][..], &ONCE].concat())
            .stdout(Stdio::piped())
            .stderr(stderr.reopen().unwrap())
            .spawn()
            .unwrap();
        Worker { child, stderr }
    }

    fn said(&self) -> String {
        std::fs::read_to_string(self.stderr.path()).unwrap()
    }
}

/// The report of a worker that had nothing to do.
#[track_caller]
fn has_done_nothing(report: &serde_json::Value) {
    assert!(report["worker"].is_string(), "{report}");
    for count in [
        "shards",
        "rows",
        "failed_rows",
        "prompt_tokens",
        "completion_tokens",
        "device_seconds",
    ] {
        assert_eq!(report[count].as_f64(), Some(0.0), "{count}: {report}");
    }
}

/// Runs a worker for each address; all wait, and end when they are told to. What each wrote to stderr.
fn all_wait(urls: &[String]) -> Vec<String> {
    let mut workers: Vec<Worker> = urls.iter().map(|url| Worker::start(url)).collect();
    let began = Instant::now();
    // Who never says so is found by the caller, when all have ended.
    while began.elapsed() < AWAY_MAX && !workers.iter().all(|worker| worker.said().contains(AWAY)) {
        std::thread::sleep(Duration::from_millis(50));
    }
    std::thread::sleep(NOTICED);
    let waiting: Vec<bool> = workers
        .iter_mut()
        .map(|worker| worker.child.try_wait().unwrap().is_none())
        .collect();
    let mut said = Vec::new();
    for worker in workers {
        // One that has ended cannot be told to.
        Command::new("kill")
            .args(["-TERM", &worker.child.id().to_string()])
            .status()
            .unwrap();
        let Worker { child, stderr } = worker;
        let output = child.wait_with_output().unwrap();
        let run = Run {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: std::fs::read_to_string(stderr.path()).unwrap(),
        };
        let run = run.expect(6);
        has_done_nothing(&run.json());
        said.push(run.stderr);
    }
    assert!(waiting.iter().all(|waits| *waits), "{waiting:?}");
    said
}

#[test]
fn a_worker_waits_for_a_broker_that_is_away() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let urls = ["kafka", "amqp"].map(|scheme| format!("{scheme}://127.0.0.1:{port}/q"));
    for said in all_wait(&urls) {
        assert!(said.contains(AWAY), "{said}");
    }
}

#[test]
fn a_worker_waits_for_a_host_that_is_unknown() {
    let urls = ["kafka", "amqp"].map(|scheme| format!("{scheme}://no-such-host.invalid/q"));
    for said in all_wait(&urls) {
        let line = said.lines().find(|line| line.contains(AWAY)).unwrap_or_default();
        assert!(
            line.contains("no-such-host.invalid") && line.contains("no such host"),
            "{said}"
        );
        assert_eq!(line.matches("://no-such-host.invalid").count(), 1, "{line}");
        assert!(!said.contains("refuses access"), "{said}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_ends_where_the_queue_is_empty() {
    let test = "a_worker_ends_where_the_queue_is_empty";
    let name = format!("empty-worker-{}", std::process::id());
    let kafka = need(test, "GRISTMILL_TEST_KAFKA").map(|address| format!("kafka://{address}/{name}"));
    let rabbit = need(test, "GRISTMILL_TEST_RABBITMQ").map(|address| format!("{address}/%2f/{name}"));
    for url in [kafka, rabbit].into_iter().flatten() {
        fill(&url.parse().unwrap(), &[]).await;
        let ended = tokio::task::spawn_blocking(move || {
            Run::of(&mut gristmill(&[&["worker", "--queue", &url][..], &ONCE].concat()))
        });
        has_done_nothing(&ended.await.unwrap().expect(0).json());
    }
}
