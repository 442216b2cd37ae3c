//! The brokers and the store that tests run against, started by `tests/services/services.py`, and how to kill them.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output};

use crate::support::{python, root};

/// The services of this run.
#[derive(Debug, Clone)]
pub struct Services {
    dir: PathBuf,
}

/// Variables that say where a service is.
const ADDRESSES: &[(&str, &str)] = &[
    ("kafka", "GRISTMILL_TEST_KAFKA"),
    ("rabbitmq", "GRISTMILL_TEST_RABBITMQ"),
    ("minio", "GRISTMILL_TEST_S3"),
];

impl Services {
    /// The services, if all of `names` run; else says that `test` is skipped, and why.
    pub fn of(test: &str, names: &[&str]) -> Option<Services> {
        let missing: Vec<&str> = names.iter().copied().filter(|name| address(name).is_none()).collect();
        let dir = std::env::var_os("GRISTMILL_TEST_SERVICES_DIR").map(PathBuf::from);
        match dir {
            Some(dir) if missing.is_empty() => Some(Services { dir }),
            _ => {
                skipped(test, &missing);
                None
            }
        }
    }

    /// SIGKILL.
    pub fn kill(&self, name: &str) {
        self.run(&["kill", name]);
    }

    /// Starts a killed service and waits until it answers.
    pub fn start(&self, name: &str) {
        self.run(&["start", name]);
    }

    /// RabbitMQ's own tool on this set's node.
    pub fn rabbitmqctl(&self, arguments: &[&str]) -> String {
        let mut all = vec!["rabbitmqctl", "--"];
        all.extend(arguments);
        self.run(&all)
    }

    /// RabbitMQ's log so far.
    pub fn rabbitmq_log(&self) -> String {
        std::fs::read_to_string(self.dir.join("rabbitmq/rabbitmq.log")).expect("the broker's log can be read")
    }

    fn run(&self, arguments: &[&str]) -> String {
        let (command, rest) = arguments.split_first().expect("a command");
        let output = Command::new(python())
            .arg(root().join("tests/services/services.py"))
            .arg(command)
            .arg("--dir")
            .arg(&self.dir)
            .args(rest)
            .output()
            .expect("python starts");
        let Output { status, stdout, stderr } = output;
        let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        assert!(status.success(), "services.py {arguments:?}: {stdout}{stderr}");
        stdout.into_owned()
    }
}

/// Where a service is, if it runs.
pub fn address(name: &str) -> Option<String> {
    let (_, variable) = ADDRESSES
        .iter()
        .find(|(known, _)| *known == name)
        .expect("a known service");
    std::env::var(variable).ok().filter(|text| !text.is_empty())
}

/// What a process needs to reach the store at `endpoint`.
pub fn store_env(endpoint: &str) -> Vec<(String, String)> {
    let of = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
    [
        ("AWS_ENDPOINT", endpoint.to_string()),
        ("AWS_ALLOW_HTTP", "true".into()),
        ("AWS_REGION", "us-east-1".into()),
        ("AWS_ACCESS_KEY_ID", of("GRISTMILL_TEST_S3_KEY")),
        ("AWS_SECRET_ACCESS_KEY", of("GRISTMILL_TEST_S3_SECRET")),
    ]
    .map(|(name, value)| (name.to_string(), value))
    .to_vec()
}

/// The bucket of this run's store.
pub fn bucket_name() -> String {
    std::env::var("GRISTMILL_TEST_S3_BUCKET").unwrap_or_else(|_| "gristmill".into())
}

/// Says that a test did not run: past the capture of the test's own output, and in the file that `GRISTMILL_TEST_SKIPPED`
/// names, so that the end of the run can say it again.
fn skipped(test: &str, missing: &[&str]) {
    let line = format!("skipped: {test}: no {}\n", missing.join(", no "));
    std::io::stderr()
        .write_all(line.as_bytes())
        .expect("stderr can be written to");
    if let Some(path) = std::env::var_os("GRISTMILL_TEST_SKIPPED") {
        let mut file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .unwrap();
        file.write_all(line.as_bytes()).unwrap();
    }
}
