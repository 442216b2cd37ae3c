//! A worker before its first message: it ends where the queue is empty, and waits where the queue does not answer.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::queue_brokers::{fill, need};
use crate::support::{Run, gristmill};

const ONCE: [&str; 5] = ["--once", "--idle-after", "1", "--json", "--quiet"];
/// By then, a worker that took an absence for an empty queue has ended: connecting takes 10 s, and `--idle-after` one.
const NOTICED: Duration = Duration::from_secs(15);

fn start(url: &str) -> Child {
    gristmill(&[&["worker", "--queue", url][..], &ONCE].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
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
    let mut workers: Vec<Child> = urls.iter().map(|url| start(url)).collect();
    std::thread::sleep(NOTICED);
    let waiting: Vec<bool> = workers
        .iter_mut()
        .map(|worker| worker.try_wait().unwrap().is_none())
        .collect();
    let mut said = Vec::new();
    for worker in workers {
        // One that has ended cannot be told to.
        Command::new("kill")
            .args(["-TERM", &worker.id().to_string()])
            .status()
            .unwrap();
        let output = worker.wait_with_output().unwrap();
        let run = Run {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
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
        assert!(said.contains("does not answer"), "{said}");
    }
}

#[test]
fn a_worker_waits_for_a_host_that_is_unknown() {
    let urls = ["kafka", "amqp"].map(|scheme| format!("{scheme}://no-such-host.invalid/q"));
    for said in all_wait(&urls) {
        let line = said
            .lines()
            .find(|line| line.contains("does not answer"))
            .unwrap_or_default();
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
