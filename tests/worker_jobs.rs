//! A worker with the real engine over real brokers, and two jobs in one worker: answers, bills, and the end of one of them.
//! Without a broker: which jobs a worker opens, and what it has spent on one that it opens again.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use gristmill::dataset::store::location::Location;
use gristmill::device;
use gristmill::engine::params::GenerationParams;
use gristmill::job::precision::RequestedKvFormat;
use gristmill::ledger::Ledger;
use gristmill::worker::jobs::{JobLookup, Jobs, OpenJob};
use gristmill::worker::model::{Formats, Model, ModelFiles};
use serde_json::Value;

use crate::bad_input::rows_of;
use crate::commands::{queues, run};
use crate::engine_batching::{self, ROOMY};
use crate::support::{Run, arg, copy_folder, gristmill, root};

const ROWS: u64 = 24;

/// A job of the demo model in shards of six rows, its prompts of these words, published to `folder/name`.
fn job(folder: &Path, name: &str, prompt: &str, max_tokens: u32) -> (PathBuf, PathBuf) {
    let line = |row: u64| format!("{{\"id\": {row}, \"text\": \"my parcel {row} is late\"}}\n");
    fs::write(folder.join("rows.jsonl"), (0..ROWS).map(line).collect::<String>()).unwrap();
    let text = format!(
        "name: {name}\nmodel: {}\nprecision: f32\ncontext: 256\ninput: {{uri: rows.jsonl}}\nprompt: {prompt}\n\
         generate: {{max_tokens: {max_tokens}, temperature: 0}}\noutput: {{uri: {name}, carry: [id]}}\nshards: {{rows: 6}}\n",
        root().join("jobs/demo/model").display()
    );
    let file = folder.join(format!("{name}.yaml"));
    fs::write(&file, text).unwrap();
    (file, folder.join(name))
}

const CHAT: &str = "{messages: [{role: user, content: '{{ text }}'}]}";
/// The same words through a template of the job's own.
const OWN_TEMPLATE: &str = "{messages: [{role: user, content: '{{ text }}'}], chat_template: '{% for m in messages %}Q: {{ m.content }} A:{% endfor %}'}";

/// What each row got, whoever computed it.
fn answers(output: &Path) -> Vec<Value> {
    let mut rows = rows_of(output);
    rows.sort_by_key(|row| row["row"].as_i64());
    let of = |row: &Value| serde_json::json!([row["id"], row["status"], row["prompt_tokens"], row["completion"]]);
    rows.iter().map(of).collect()
}

/// The answers of `run` for the same job.
fn alone(folder: &Path, name: &str, prompt: &str, max_tokens: u32) -> Vec<Value> {
    let (file, output) = job(folder, &format!("{name}-alone"), prompt, max_tokens);
    run(&["run", arg(&file), "--quiet"]).expect(0);
    answers(&output)
}

fn submit(file: &Path, url: &str) {
    run(&["submit", arg(file), "--queue", url]).expect(0);
}

/// A worker until these jobs are done.
fn work(url: &str, outputs: &[&Path]) -> Run {
    let mut arguments = vec![
        "worker",
        "--queue",
        url,
        "--until-idle",
        "--json",
        "--log-interval",
        "1",
    ];
    arguments.extend(outputs.iter().flat_map(|output| ["--job", arg(output)]));
    Run::of(&mut gristmill(&arguments))
}

/// Two jobs whose prompts go through other chat templates: each has the answers that it has alone, and is billed for its own
/// share of the worker's time.
#[test]
fn two_jobs_in_one_worker_have_the_answers_of_run_and_share_its_bill() {
    for url in queues("two_jobs_in_one_worker_have_the_answers_of_run_and_share_its_bill") {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let (first, to_first) = job(folder, "first", CHAT, 4);
        let (second, to_second) = job(folder, "second", OWN_TEMPLATE, 12);
        submit(&first, &url);
        submit(&second, &url);
        let worked = work(&url, &[&to_first, &to_second]).expect(0).json();
        let (of_first, of_second) = (answers(&to_first), answers(&to_second));
        assert_eq!(of_first, alone(folder, "first", CHAT, 4), "{url}");
        assert_eq!(of_second, alone(folder, "second", OWN_TEMPLATE, 12), "{url}");
        assert_ne!(of_first, of_second, "the templates differ");
        let seconds = |output: &Path| {
            run(&["verify", arg(output)]).expect(0);
            run(&["status", arg(output), "--json"]).expect(0).json()["seconds"]
                .as_f64()
                .unwrap()
        };
        let (mine, other, all) = (
            seconds(&to_first),
            seconds(&to_second),
            worked["device_seconds"].as_f64().unwrap(),
        );
        assert!(mine > 0.0 && other > 0.0, "{mine} {other}");
        assert!(
            (mine + other - all).abs() < 0.02 * all,
            "{mine} and {other} of {all} seconds"
        );
    }
}

#[test]
fn one_of_two_jobs_is_cancelled_and_the_other_is_none_the_worse() {
    for url in queues("one_of_two_jobs_is_cancelled_and_the_other_is_none_the_worse") {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let (first, to_first) = job(folder, "first", CHAT, 4);
        let (second, to_second) = job(folder, "second", OWN_TEMPLATE, 12);
        submit(&second, &url);
        submit(&first, &url);
        run(&["cancel", arg(&to_second)]).expect(0);
        work(&url, &[&to_first, &to_second]).expect(5);
        assert_eq!(answers(&to_first), alone(folder, "first", CHAT, 4), "{url}");
        run(&["verify", arg(&to_first)]).expect(0);
        let seen = run(&["status", arg(&to_second), "--json"]).expect(0).json();
        assert_eq!(
            (&seen["state"], &seen["rows"]["succeeded"]),
            (&"cancelled".into(), &0.into()),
            "{seen}"
        );
    }
}

/// The model in `dir` as a worker has it that was started for contexts of so many tokens.
pub(crate) fn model(dir: &Path, context_tokens: u32) -> Model {
    let files = ModelFiles::open(dir.to_path_buf()).unwrap();
    let formats = Formats::of(
        device::Precision::F32.into(),
        RequestedKvFormat::Auto,
        device::Precision::F32,
    );
    let hash = files.hash(formats.precision).unwrap();
    Model::new(files, formats, context_tokens, hash)
}

/// The ledger of the job in `output`, as another process finds it.
async fn ledger(output: &Path) -> Ledger {
    let output = Location::parse(arg(output), Path::new("/")).unwrap();
    Ledger::open(&output).await.unwrap().unwrap()
}

/// The job, or why it is not for this worker.
fn opened(heard: JobLookup) -> Result<Arc<OpenJob>, String> {
    match heard {
        JobLookup::Job(job) => Ok(job),
        JobLookup::NotOurs(why) | JobLookup::Stale(why) => Err(why.to_string()),
    }
}

/// Weights and tokenizer are the job's, but the prompts would be others, or the longest of them would not fit.
#[tokio::test]
async fn a_job_of_another_chat_template_or_a_longer_context_is_not_opened() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (file, output) = job(folder, "job", CHAT, 4);
    run(&["submit", arg(&file), "--no-enqueue"]).expect(0);
    let ours = root().join("jobs/demo/model");
    let other = folder.join("model");
    copy_folder(&ours, &other);
    let config = other.join("tokenizer_config.json");
    let text = fs::read_to_string(&config).unwrap();
    assert_eq!(text.matches(">assistant").count(), 1, "{text}");
    fs::write(&config, text.replace(">assistant", ">helper")).unwrap();

    let hear = async |model: Model| opened(Jobs::new(model).add(ledger(&output).await).await).map(|_| ());
    assert_eq!(hear(model(&ours, 256)).await, Ok(()));
    let why = hear(model(&other, 256)).await.unwrap_err();
    assert!(why.contains("another chat template"), "{why}");
    let why = hear(model(&ours, 255)).await.unwrap_err();
    assert!(why.contains("it needs a context of 256 tokens"), "{why}");
}

/// A job's prompts are found by rows of the same job alone, unless both jobs name the same salt.
#[tokio::test]
async fn jobs_share_computed_prefixes_where_they_name_the_same_salt() {
    let folder = tempfile::tempdir().unwrap();
    let jobs = Jobs::new(model(&root().join("jobs/demo/model"), 256));
    let mut salts = Vec::new();
    for (name, salt) in [
        ("plain", ""),
        ("other", ""),
        ("a", "cache_salt: ours\n"),
        ("b", "cache_salt: ours\n"),
        ("c", "cache_salt: theirs\n"),
    ] {
        let (file, output) = job(folder.path(), name, CHAT, 4);
        let text = fs::read_to_string(&file).unwrap();
        fs::write(&file, format!("{salt}{text}")).unwrap();
        run(&["submit", arg(&file), "--no-enqueue"]).expect(0);
        let job = opened(jobs.add(ledger(&output).await).await).unwrap();
        let request = job
            .requests(0, [1].into(), Arc::new(GenerationParams::default()), 0)
            .next()
            .unwrap();
        salts.push(request.cache_salt);
    }
    assert_eq!(salts[2], salts[3]);
    salts.remove(3);
    let distinct: BTreeSet<_> = salts.iter().collect();
    assert_eq!(distinct.len(), 4, "{salts:?}");
}

/// What a row is said to have found computed tells nothing of another job's prompts, unless both name the same salt; of deterministic
/// rows likewise, which share among themselves alone.
#[tokio::test]
async fn cached_tokens_tell_nothing_of_another_jobs_prompts() {
    let folder = tempfile::tempdir().unwrap();
    let jobs = Jobs::new(model(&root().join("jobs/demo/model"), 256));
    let mut requests = Vec::new();
    // A job's name, its salt, and whether its row is deterministic; each comes when the one before has ended.
    let rows = [
        ("victim", "", false),
        ("guesses", "", false),
        ("a", "ours", false),
        ("b", "ours", false),
        ("c", "theirs", false),
        ("b-exact", "ours", true),
        ("guesses-exact", "", true),
        ("c-exact", "theirs", true),
        ("a-exact", "ours", true),
    ];
    for (at, (name, salt, deterministic)) in rows.into_iter().enumerate() {
        let (file, output) = job(folder.path(), name, CHAT, 4);
        if !salt.is_empty() {
            let text = fs::read_to_string(&file).unwrap();
            fs::write(&file, format!("cache_salt: {salt}\n{text}")).unwrap();
        }
        run(&["submit", arg(&file), "--no-enqueue"]).expect(0);
        let job = opened(jobs.add(ledger(&output).await).await).unwrap();
        let params = GenerationParams {
            deterministic,
            max_tokens: 1,
            ..GenerationParams::default()
        };
        let prompt: Arc<[u32]> = (10..60).collect();
        let request = job.requests(at as u64, prompt, Arc::new(params), 0).next().unwrap();
        requests.push((4 * at, request));
    }
    let (done, _) = engine_batching::run(&ROOMY, &requests);
    let cached: Vec<u32> = done.values().map(|row| row.as_ref().unwrap().cached_tokens).collect();
    // Three blocks of 16 tokens, for those that name the salt of one before.
    assert_eq!(cached, [0, 0, 0, 48, 0, 0, 0, 0, 48]);
}

/// As after a retry, or when it had made room for others: the worker's record of what it spent must never say less than before.
#[tokio::test]
async fn a_job_that_is_opened_again_keeps_what_was_spent_on_it() {
    let folder = tempfile::tempdir().unwrap();
    let (file, output) = job(folder.path(), "job", CHAT, 4);
    run(&["submit", arg(&file), "--no-enqueue"]).expect(0);
    let jobs = Jobs::new(model(&root().join("jobs/demo/model"), 256));
    for seconds in [1.0, 2.0] {
        let job = opened(jobs.add(ledger(&output).await).await).unwrap();
        job.add_device_time(Duration::from_secs(1));
        assert_eq!(job.device_seconds(), seconds);
    }
}
