//! A worker with the real engine over real brokers, and two jobs in one worker: answers, bills, and the end of one of them.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::bad_input::rows_of;
use crate::commands::{queues, run};
use crate::support::{Run, arg, gristmill, root};

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
