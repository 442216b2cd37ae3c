//! Signed jobs over real brokers: who has the key works on them, and what somebody without it wrote is passed on.
//!
//! Jobs of few shards: RabbitMQ hands out no more while messages wait to be passed on.

use std::fs;
use std::path::{Path, PathBuf};

use lapin::BasicProperties;
use lapin::options::{BasicAckOptions, BasicGetOptions, BasicPublishOptions};

use crate::commands::{queues, small_job};
use crate::queue_rabbitmq::channel;
use crate::services::need;
use crate::support::{Run, arg, gristmill, root};

const KEY: &str = "the-key-of-these-tests-0123456789-abcdef";
const OTHER: &str = "another-key-of-these-tests-0123456789-abc";
const ROWS: u64 = 40;

/// A command with signing keys, one a line; `""`: without.
fn with(key: &str, arguments: &[&str]) -> Run {
    let mut command = gristmill(arguments);
    if !key.is_empty() {
        command.env("GRISTMILL_SIGNING_KEY", key);
    }
    let run = Run::of(&mut command);
    for text in [&run.stdout, &run.stderr] {
        assert!(!text.contains(KEY) && !text.contains(OTHER), "a key is shown: {text}");
    }
    run
}

/// What a worker says that ends once nothing has come for some seconds.
fn worker(url: &str, key: &str) -> String {
    let model = root().join("jobs/demo/model");
    let fixed = ["worker", "--queue", url, "--once", "--idle-after", "8"];
    let model = ["--model", arg(&model), "--precision", "f32", "--context", "128"];
    with(key, &[&fixed[..], &model].concat()).expect(0).stderr
}

fn succeeded(output: &Path, key: &str) -> u64 {
    let seen = with(key, &["status", arg(output), "--json"]).expect(0).json();
    seen["rows"]["succeeded"].as_u64().unwrap()
}

/// A job of so many shards, submitted with `key`.
fn submitted(folder: &Path, name: &str, url: &str, key: &str, shards: u64) -> (PathBuf, PathBuf) {
    let folder = folder.join(name);
    fs::create_dir(&folder).unwrap();
    let (job, output) = small_job(&folder, &[]);
    let text = fs::read_to_string(&job).unwrap();
    let rows = ROWS / shards;
    fs::write(
        &job,
        text.replace("shards: {rows: 4}", &format!("shards: {{rows: {rows}}}")),
    )
    .unwrap();
    with(key, &["submit", arg(&job), "--queue", url]).expect(0);
    (job, output)
}

#[test]
fn who_has_the_key_works_on_signed_jobs_alone() {
    for url in queues("who_has_the_key_works_on_signed_jobs_alone") {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let (_, signed) = submitted(folder, "signed", &url, KEY, 2);
        let (_, unsigned) = submitted(folder, "unsigned", &url, "", 2);
        let (_, others) = submitted(folder, "others", &url, OTHER, 2);
        let (_, stripped) = submitted(folder, "stripped", &url, KEY, 2);
        let record = stripped.join("_gristmill/job.json");
        let text = fs::read_to_string(&record).unwrap();
        let end = text.rfind(",\"signature\":").expect("it is signed");
        fs::write(&record, format!("{}}}\n", &text[..end])).unwrap();

        let said = worker(&url, KEY);
        assert!(said.contains("signing is on"), "{said}");
        assert_eq!(succeeded(&signed, KEY), ROWS, "{url}: {said}");
        let says = |words: &[&str]| said.lines().any(|line| words.iter().all(|word| line.contains(word)));
        let message = |output: &Path| format!("of `file://{}`", output.display());
        assert!(
            says(&[
                "the message for shard",
                &message(&unsigned),
                "is not signed",
                "passed on"
            ]),
            "{said}"
        );
        assert!(
            says(&[
                "the message for shard",
                &message(&others),
                "matches no signing key set here"
            ]),
            "{said}"
        );
        assert!(
            says(&["is not for this worker", arg(&record), "is not signed"]),
            "{said}"
        );
        for output in [&unsigned, &others, &stripped] {
            assert_eq!(succeeded(output, ""), 0, "{said}");
        }

        // A worker without a key reads them all.
        for output in [&unsigned, &others, &stripped] {
            with("", &["reconcile", arg(output), "--queue", &url, "--interval", "0.1"]).expect(0);
        }
        let said = worker(&url, "");
        assert!(!said.contains("signing is on"), "{said}");
        for output in [&unsigned, &others, &stripped] {
            assert_eq!(succeeded(output, ""), ROWS, "{url}: {said}");
        }
    }
}

#[test]
fn a_key_can_be_exchanged_while_jobs_are_on_their_way() {
    for url in queues("a_key_can_be_exchanged_while_jobs_are_on_their_way") {
        let folder = tempfile::tempdir().unwrap();
        let (_, before) = submitted(folder.path(), "before", &url, KEY, 2);
        let both = format!("{OTHER}\n{KEY}");
        let (_, after) = submitted(folder.path(), "after", &url, &both, 2);
        let said = worker(&url, &both);
        assert!(said.contains("signing is on, with 2 keys"), "{said}");
        assert_eq!(
            [succeeded(&before, KEY), succeeded(&after, OTHER)],
            [ROWS, ROWS],
            "{url}: {said}"
        );
        with(KEY, &["status", arg(&after)])
            .expect(1)
            .one_line(&["job.json", "matches no signing key set here"]);
    }
}

/// What somebody makes of a signed message: another shard, an earlier generation, another output.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_altered_message_is_passed_on() {
    let test = "an_altered_message_is_passed_on";
    let Some(address) = need(test, "GRISTMILL_TEST_RABBITMQ") else {
        return;
    };
    let name = format!("{test}-{}", std::process::id());
    let url = format!("{address}/{name}");
    let folder = tempfile::tempdir().unwrap();
    let (_, output) = submitted(folder.path(), "job", &url, KEY, 10);
    let (_connection, channel) = channel(&address).await;
    let mut bodies = Vec::new();
    while let Some(found) = channel
        .basic_get(name.as_str().into(), BasicGetOptions::default())
        .await
        .unwrap()
    {
        bodies.push(String::from_utf8(found.delivery.data.clone()).unwrap());
        found.delivery.acker.ack(BasicAckOptions::default()).await.unwrap();
    }
    assert_eq!(bodies.len(), 10);
    let shard = |body: &String| body.contains("\"shard\":3,");
    let whole = bodies.iter().find(|body| shard(body)).unwrap();
    let signature = whole.find(",\"signature\":").unwrap();
    for body in [
        whole.replace("\"shard\":3,", "\"shard\":4,"),
        whole.replace("\"generation\":0,", "\"generation\":1,"),
        whole.replace("/out\"", "/other\""),
        format!("{}}}", &whole[..signature]),
        whole.clone(),
    ] {
        let sent = channel.basic_publish(
            "".into(),
            name.as_str().into(),
            BasicPublishOptions::default(),
            body.as_bytes(),
            BasicProperties::default(),
        );
        sent.await.unwrap().await.unwrap();
    }
    let command = (url.clone(), KEY);
    let said = tokio::task::spawn_blocking(move || worker(&command.0, command.1))
        .await
        .unwrap();
    // The one that nobody touched is worked on: a shard of four rows.
    assert_eq!(succeeded(&output, KEY), 4, "{said}");
    let count = |words: &str| said.lines().filter(|line| line.contains(words)).count();
    assert!(
        count("shard 4 of") >= 1 && count("matches no signing key set here") >= 3,
        "{said}"
    );
    assert!(count("shard 3 of") >= 1 && count("is not signed") >= 1, "{said}");
}
