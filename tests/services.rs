//! The services that tests run against, as `tests/services/services.py` starts them: addresses, and kill and start.

// Each test binary uses a part of it.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Lines};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};

use crate::skips::skip;
use crate::support::{Run, root};

/// The value of `variable`, one of those that `services.py env` prints; where it is missing, `test` is noted as skipped.
pub(crate) fn need(test: &str, variable: &str) -> Option<String> {
    let found = std::env::var(variable).ok().filter(|value| !value.is_empty());
    if found.is_none() {
        skip(test, &format!("`{variable}` is not set: the service does not run"));
    }
    found
}

/// An S3 store with a bucket.
#[derive(Debug, Clone)]
pub(crate) struct S3 {
    /// `http://host:port`.
    pub endpoint: String,
    pub key: String,
    pub secret: String,
    pub bucket: String,
}

impl S3 {
    /// The store of this run, or `None`, with `test` noted as skipped.
    pub(crate) fn need(test: &str) -> Option<S3> {
        Some(S3 {
            endpoint: need(test, "GRISTMILL_TEST_S3")?,
            key: need(test, "GRISTMILL_TEST_S3_KEY")?,
            secret: need(test, "GRISTMILL_TEST_S3_SECRET")?,
            bucket: need(test, "GRISTMILL_TEST_S3_BUCKET")?,
        })
    }

    /// What the `AWS_` variables of a process must say to use this store through `endpoint` (the store's own, or a proxy's).
    pub(crate) fn variables(&self, endpoint: &str) -> Vec<(String, String)> {
        [
            ("AWS_ENDPOINT_URL", endpoint),
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ACCESS_KEY_ID", &self.key),
            ("AWS_SECRET_ACCESS_KEY", &self.secret),
        ]
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .into()
    }

    /// An address that no other test uses.
    pub(crate) fn folder(&self, test: &str) -> String {
        use std::sync::atomic::{AtomicU64, Ordering};
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        format!("s3://{}/{test}-{}-{number}", self.bucket, std::process::id())
    }
}

/// What can be done to a running service.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Action {
    /// SIGKILL.
    Kill,
    /// SIGTERM, and waits for the end.
    End,
    /// Starts it again with its ports and data, and waits until it answers.
    Start,
    /// SIGSTOP.
    Stop,
    /// SIGCONT.
    Cont,
}

/// Does `action` to `kafka`, `rabbitmq` or `minio`.
#[track_caller]
pub(crate) fn control(name: &str, action: Action) {
    let action = match action {
        Action::Kill => "kill",
        Action::End => "end",
        Action::Start => "start",
        Action::Stop => "stop",
        Action::Cont => "cont",
    };
    Run::of(script().args([action, name, "--dir"]).arg(folder())).expect(0);
}

/// Runs `rabbitmqctl` on the test node.
#[track_caller]
pub(crate) fn rabbitmqctl(arguments: &[&str]) -> Run {
    try_rabbitmqctl(arguments).expect(0)
}

fn try_rabbitmqctl(arguments: &[&str]) -> Run {
    Run::of(
        script()
            .args(["rabbitmqctl", "--dir"])
            .arg(folder())
            .arg("--")
            .args(arguments),
    )
}

const WATERMARK: &str = "set_vm_memory_high_watermark";

/// RabbitMQ's memory alarm: it blocks whoever publishes. It is lifted with this, also where a test fails: the tests behind it share the broker.
pub(crate) struct MemoryAlarm(());

impl MemoryAlarm {
    #[track_caller]
    pub(crate) fn raise() -> MemoryAlarm {
        rabbitmqctl(&[WATERMARK, "0.00001"]);
        MemoryAlarm(())
    }
}

impl Drop for MemoryAlarm {
    fn drop(&mut self) {
        let lifted = try_rabbitmqctl(&[WATERMARK, "0.4"]);
        // A second panic would end the test program.
        if !std::thread::panicking() {
            lifted.expect(0);
        }
    }
}

/// Temporary credentials of the test store, as AWS's metadata services would give them out.
#[track_caller]
pub(crate) fn session() -> serde_json::Value {
    Run::of(script().args(["session", "--dir"]).arg(folder()))
        .expect(0)
        .json()
}

/// A token service for web identities, as EKS pods have it; ends when dropped.
pub(crate) struct TokenService {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    /// `https://localhost:port`, by a certificate of the test CA.
    pub url: String,
}

impl TokenService {
    pub(crate) fn start() -> TokenService {
        let mut command = script();
        command.args(["sts", "--dir"]).arg(folder()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the token service starts");
        let mut lines = BufReader::new(child.stdout.take().expect("a piped stdout")).lines();
        let url = lines.next().expect("the service says its address").expect("text");
        TokenService { child, lines, url }
    }

    /// The next request that was served: its token, and the access key given for it.
    pub(crate) fn served(&mut self) -> (String, String) {
        let line = self.lines.next().expect("the service runs").expect("text");
        let (token, key) = line.split_once(' ').expect("token and key");
        (token.to_string(), key.to_string())
    }
}

impl Drop for TokenService {
    fn drop(&mut self) {
        self.child.kill().expect("the token service runs");
        self.child.wait().expect("it ends");
    }
}

fn script() -> Command {
    let mut command = Command::new("python3");
    command.arg(root().join("tests/services/services.py"));
    command
}

/// Where the services keep their files.
pub(crate) fn folder() -> PathBuf {
    std::env::var_os("GRISTMILL_TEST_SERVICES_DIR")
        .expect("`services.py env` sets GRISTMILL_TEST_SERVICES_DIR")
        .into()
}
