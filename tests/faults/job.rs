//! A job of the fault suite: its input, its job file, where it is published, and over which broker.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::services::address;
use crate::services::S3;
use crate::support::{Run, arg, python, root};

/// A broker that shards travel over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Broker {
    Kafka,
    Rabbitmq,
}

impl Broker {
    pub(super) const ALL: [Broker; 2] = [Broker::Kafka, Broker::Rabbitmq];

    /// As `services.py` calls it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Broker::Kafka => "kafka",
            Broker::Rabbitmq => "rabbitmq",
        }
    }

    /// The address of a topic or queue.
    pub(super) fn url(self, topic: &str) -> String {
        let address = address(self.name());
        match self {
            Broker::Kafka => format!("kafka://{address}/{topic}?group={topic}"),
            Broker::Rabbitmq => format!("{address}/%2F/{topic}"),
        }
    }

    /// Arguments of every command that consumes: a dead member is noticed after 2 s.
    pub(super) fn arguments(self) -> Vec<String> {
        let properties: &[&str] = match self {
            Broker::Kafka => &["session.timeout.ms=2000", "heartbeat.interval.ms=500"],
            Broker::Rabbitmq => &[],
        };
        properties
            .iter()
            .flat_map(|property| ["--kafka".to_string(), property.to_string()])
            .collect()
    }
}

/// What a job's parts are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Parquet,
    /// OpenAI batch result lines.
    Lines,
}

/// What a job is like.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub rows: u64,
    pub shard_rows: u64,
    /// Rows that have no answer, in percent.
    pub bad_percent: f64,
    /// Rows that end the process.
    pub abort_rows: u64,
    /// What a row takes on the device, in milliseconds.
    pub ms_per_row: f64,
    /// Set in the job file besides what every job has.
    pub fields: Value,
    /// Seconds between writes to the log.
    pub log_interval: f64,
}

impl Default for Plan {
    fn default() -> Plan {
        Plan {
            rows: 20_000,
            shard_rows: 250,
            bad_percent: 0.5,
            abort_rows: 0,
            ms_per_row: 2.0,
            fields: json!({}),
            log_interval: 1.0,
        }
    }
}

/// A job that is ready to be submitted.
#[derive(Debug, Clone)]
pub(super) struct Job {
    pub name: String,
    /// The input's files, as the checker reads them.
    pub data: PathBuf,
    pub file: PathBuf,
    /// Below the bucket.
    pub key: String,
    /// The published output.
    pub output: String,
    pub format: Format,
    pub rows: u64,
}

impl Job {
    /// Makes the input and the job file in `dir`; rows are given by `seed`.
    pub(super) fn make(plan: &Plan, name: &str, format: Format, seed: u64, store: &S3, dir: &Path) -> Job {
        let bucket = &store.bucket;
        let key = format!("faults/{name}");
        let job = Job {
            name: name.to_string(),
            data: dir.join("input"),
            file: dir.join("job.json"),
            output: format!("s3://{bucket}/{key}/out"),
            key,
            format,
            rows: plan.rows,
        };
        let mut command = Command::new(python());
        command
            .arg(root().join("tests/faults/make_rows.py"))
            .arg(&job.data)
            .args(["--rows", &plan.rows.to_string(), "--seed", &seed.to_string()])
            .args(["--bad-percent", &plan.bad_percent.to_string()])
            .args(["--abort", &plan.abort_rows.to_string()])
            .args(["--upload", &format!("s3://{bucket}/{}/in", job.key)])
            .args(["--endpoint", &store.endpoint])
            .envs(store.variables(&store.endpoint));
        Run::of(&mut command).expect(0);
        let output = match format {
            Format::Parquet => json!({"uri": job.output, "carry": ["id", "note", "number", "tags"], "token_ids": true}),
            Format::Lines => json!({"uri": job.output, "carry": ["custom_id"], "format": "openai"}),
        };
        let mut text = json!({
            "name": name,
            "model": arg(&root().join("jobs/demo/model")),
            "precision": "f32",
            "input": {"uri": format!("s3://{bucket}/{}/in/*.parquet", job.key)},
            "prompt": {"token_ids": "token_ids"},
            "generate": {"max_tokens": 8, "temperature": 0},
            "output": output,
            "shards": {"rows": plan.shard_rows},
        });
        for (field, value) in plan.fields.as_object().expect("fields are an object") {
            text[field] = value.clone();
        }
        std::fs::write(&job.file, text.to_string()).unwrap();
        job
    }
}
