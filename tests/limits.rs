//! Budget, price and deadline of a begun job, edited in its file: what the file says holds from the next `run` or `submit` on.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::commands::{run, small_job};
use crate::support::{Run, arg, gristmill, job_in};

fn status(output: &Path) -> Value {
    run(&["status", arg(output), "--json"]).expect(0).json()
}

/// The orders of a job, oldest first.
fn orders(output: &Path) -> Vec<Value> {
    let job: Value = serde_json::from_slice(&fs::read(output.join("_gristmill/job.json")).unwrap()).unwrap();
    let control = output
        .join("_gristmill")
        .join(job["job"].as_str().unwrap())
        .join("control");
    let order = |n: usize| fs::read(control.join(format!("{n:03}.json"))).ok();
    let read = (0..).map_while(order);
    read.map(|bytes| serde_json::from_slice(&bytes).unwrap()).collect()
}

/// [`small_job`] with this budget, submitted.
fn submitted(folder: &Path, budget: &str) -> (PathBuf, PathBuf) {
    let (job, output) = small_job(folder, &[]);
    let text = fs::read_to_string(&job).unwrap();
    fs::write(&job, format!("{text}{budget}\n")).unwrap();
    run(&["submit", arg(&job), "--no-enqueue"]).expect(0);
    (job, output)
}

/// Writes another budget into the job file, and submits it again.
fn again(job: &Path, budget: &str) -> Run {
    let text = fs::read_to_string(job).unwrap();
    let start = text.find("budget:").expect("a budget");
    let end = start + text[start..].find('\n').expect("a line");
    fs::write(job, format!("{}{budget}{}", &text[..start], &text[end..])).unwrap();
    run(&["submit", arg(job), "--no-enqueue", "--json"])
}

/// Begun without limits and interrupted; then a budget that is spent already, a later deadline, and neither again.
#[test]
fn a_budget_that_is_added_to_a_begun_job_holds() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job_in(folder.path(), "label-tickets.yaml", |text| text);
    let mut child = gristmill(&["run", arg(&job), "--quiet", "--log-interval", "0.2"])
        .spawn()
        .unwrap();
    while !output.join("part-00000.parquet").exists() {
        assert!(child.try_wait().unwrap().is_none(), "it ended before its first part");
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let spent = status(&output)["seconds"].as_f64().unwrap();
    assert!(spent > 0.0);
    let text = fs::read_to_string(&job).unwrap();
    let with =
        |limits: &str| fs::write(&job, text.replace("{usd_per_hour", &format!("{{{limits}usd_per_hour"))).unwrap();

    with("usd: 0.000001, deadline: 6h, ");
    let stopped = run(&["run", arg(&job), "--json"]).expect(4);
    assert!(
        stopped.stderr.contains("limits are now those of the job file") && stopped.stderr.contains("(was none)"),
        "{}",
        stopped.stderr
    );
    let seen = status(&output);
    assert_eq!(seen["seconds"].as_f64(), Some(spent), "not a second more was spent");
    assert_eq!(seen["state"], "budget_reached");
    let budget = &seen["budget"];
    assert_eq!(
        (&budget["usd"], &budget["deadline_seconds"], &budget["from"]),
        (&0.000001.into(), &21_600.into(), &"job_file".into())
    );
    let said = run(&["status", arg(&output)]).expect(0).stdout;
    assert!(
        said.contains("budget      $0.0000, $0.0000 left") && said.contains("limits      by the job file"),
        "{said}"
    );
    let given = orders(&output);
    assert_eq!(
        (&given[0]["order"], &given[0]["from"]),
        (&"extend".into(), &"job_file".into())
    );
    assert_eq!(
        (&given[1]["order"], &given[1]["why"]),
        (&"stop".into(), &"budget".into())
    );
    // The same again changes nothing.
    run(&["run", arg(&job), "--quiet"]).expect(4);
    assert_eq!(orders(&output).len(), 2);

    with("");
    run(&["run", arg(&job), "--quiet"]).expect(0);
    let end = orders(&output);
    assert_eq!(
        (&end[2]["order"], &end[2]["budget_usd"], &end[2]["deadline_seconds"]),
        (&"extend".into(), &Value::Null, &Value::Null)
    );
    assert_eq!(end.len(), 3);
}

#[test]
fn limits_are_raised_lowered_and_removed_by_the_file_and_extend_stands_until_then() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = submitted(folder.path(), "budget: {usd: 5, usd_per_hour: 2.60}");
    let holds = || {
        let budget = status(&output)["budget"].clone();
        let number = |field: &str| budget[field].as_f64();
        (
            number("usd"),
            number("usd_per_hour"),
            number("deadline_seconds"),
            budget["unfinished"].as_str().unwrap().to_string(),
            budget["from"].as_str().unwrap().to_string(),
        )
    };
    let is = |usd, price, deadline, unfinished: &str, from: &str| {
        (usd, price, deadline, unfinished.to_string(), from.to_string())
    };
    assert_eq!(holds(), is(Some(5.0), Some(2.6), None, "keep", "job_file"));
    run(&["extend", arg(&output), "--usd", "20"]).expect(0);
    assert_eq!(holds(), is(Some(20.0), Some(2.6), None, "keep", "extend"));
    // The file is as it was: what `extend` gave stands.
    let same = again(&job, "budget: {usd: 5, usd_per_hour: 2.60}").expect(0);
    assert_eq!(same.stderr, "");
    assert_eq!(holds(), is(Some(20.0), Some(2.6), None, "keep", "extend"));
    // It has changed: all that it says holds.
    again(&job, "budget: {usd: 5, usd_per_hour: 2.60, deadline: 6h}")
        .expect(0)
        .one_line(&["budget $5.00 (was $20.00)", "deadline 6h 0m (was none)"]);
    assert_eq!(holds(), is(Some(5.0), Some(2.6), Some(21_600.0), "keep", "job_file"));
    again(&job, "budget: {usd: 3, usd_per_hour: 1, unfinished: expire}")
        .expect(0)
        .one_line(&[
            "budget $3.00 (was $5.00)",
            "price of an hour $1.00 (was $2.60)",
            "expire (was keep)",
        ]);
    assert_eq!(holds(), is(Some(3.0), Some(1.0), None, "expire", "job_file"));
    // Price and what becomes of unfinished rows stay in orders that speak of neither.
    run(&["extend", arg(&output), "--usd", "7"]).expect(0);
    assert_eq!(holds(), is(Some(7.0), Some(1.0), None, "expire", "extend"));
    again(&job, "budget: {}")
        .expect(0)
        .one_line(&["price of an hour none (was $1.00)"]);
    assert_eq!(holds(), is(None, None, None, "keep", "job_file"));
    let orders = orders(&output);
    // What a gristmill of before would leave out, it must not read.
    let versions: Vec<u64> = orders.iter().map(|order| order["v"].as_u64().unwrap()).collect();
    assert_eq!(versions, [1, 1, 2, 1, 2], "{orders:?}");
    // Money without a price is refused before anything is changed.
    run(&["extend", arg(&output), "--usd", "9"])
        .expect(2)
        .one_line(&["no price"]);
    run(&["run", arg(&job), "--quiet"]).expect(0);
}

#[test]
fn a_deadline_that_has_passed_stops_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = submitted(folder.path(), "budget: {usd_per_hour: 2}");
    std::thread::sleep(Duration::from_millis(1_100));
    again(&job, "budget: {usd_per_hour: 2, deadline: 1s}").expect(4);
    let stopped = status(&output);
    assert_eq!(
        (&stopped["state"], &stopped["budget"]["deadline_seconds"]),
        (&"deadline_reached".into(), &1.into())
    );
    run(&["run", arg(&job), "--quiet"]).expect(4);
    assert!(!output.join("part-00000.parquet").exists());
    // Its rows become rows of the output where the file says so.
    again(&job, "budget: {usd_per_hour: 2, deadline: 1s, unfinished: expire}").expect(4);
    let ended = run(&["run", arg(&job), "--json", "--quiet"]).expect(3).json();
    assert_eq!(
        (&ended["rows"]["expired"], &ended["rows"]["truncated"]),
        (&40.into(), &0.into())
    );
    run(&["verify", arg(&output)]).expect(0);
}

/// The price is what all device seconds of the job are counted at, and no part of what makes a job another one.
#[test]
fn a_price_may_change_in_jobs_of_older_gristmills_too() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = submitted(folder.path(), "budget: {usd_per_hour: 5}");
    let record = output.join("_gristmill/job.json");
    let mut job_record: Value = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
    // As hashes were made while the price was part of them: the file's content with sorted keys.
    let model = job_record["resolved"]["model"].as_str().unwrap();
    let content = format!(
        r#"{{"budget":{{"usd_per_hour":5}},"context":128,"generate":{{"max_tokens":1,"temperature":0}},"input":{{"uri":"rows.jsonl"}},"model":"{model}","name":"small","output":{{"carry":["id"],"uri":"out"}},"precision":"f32","prompt":{{"text":"{{{{ text }}}} ->"}},"shards":{{"rows":4}}}}"#
    );
    let digest = Sha256::digest(content.as_bytes());
    let hash: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_ne!(job_record["job_hash"], hash);
    job_record["job_hash"] = hash.into();
    fs::write(&record, format!("{job_record}\n")).unwrap();
    again(&job, "budget: {usd_per_hour: 5}").expect(0);
    again(&job, "budget: {usd_per_hour: 7.5}")
        .expect(0)
        .one_line(&["price of an hour $7.50 (was $5.00)"]);
    let ran = run(&["run", arg(&job), "--json", "--quiet"]).expect(0).json();
    let (usd, seconds) = (ran["usd"].as_f64().unwrap(), ran["seconds"].as_f64().unwrap());
    assert!((usd - seconds / 3600.0 * 7.5).abs() < 1e-12, "{ran}");
    let success: Value = serde_json::from_slice(&fs::read(output.join("_SUCCESS")).unwrap()).unwrap();
    let (usd, seconds) = (success["usd"].as_f64().unwrap(), success["seconds"].as_f64().unwrap());
    assert!((usd - seconds / 3600.0 * 7.5).abs() < 1e-12, "{success}");
    // All else makes it another job, as ever.
    let text = fs::read_to_string(&job)
        .unwrap()
        .replace("max_tokens: 1", "max_tokens: 2");
    fs::write(&job, text).unwrap();
    run(&["run", arg(&job), "--quiet"])
        .expect(2)
        .one_line(&["belongs to job `small`"]);
}

/// Other limits in its file do not bring a cancelled job back.
#[test]
fn a_cancelled_job_stays_cancelled_whatever_its_file_says() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = submitted(folder.path(), "budget: {usd_per_hour: 2}");
    run(&["cancel", arg(&output)]).expect(0);
    again(&job, "budget: {usd_per_hour: 2, deadline: 6h}").expect(5);
    run(&["run", arg(&job), "--quiet"]).expect(5);
    assert_eq!(
        (status(&output)["state"].as_str(), orders(&output).len()),
        (Some("cancelled"), 1)
    );
    assert!(!output.join("part-00000.parquet").exists());
}

/// A job that an older gristmill began under a hash with its price has its sampling from its record, as any begun job.
#[test]
fn a_begun_job_of_an_older_hash_keeps_its_sampling() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    fs::create_dir(&model).unwrap();
    for entry in fs::read_dir(crate::support::root().join("jobs/demo/model")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
    }
    let (job, output) = small_job(folder.path(), &[]);
    let text = fs::read_to_string(&job).unwrap();
    let demo = crate::support::root().join("jobs/demo/model").display().to_string();
    let text = text.replace(&demo, arg(&model)) + "budget: {usd_per_hour: 5}\n";
    fs::write(&job, text).unwrap();
    run(&["submit", arg(&job), "--no-enqueue"]).expect(0);
    let record = output.join("_gristmill/job.json");
    let mut job_record: Value = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
    let content = format!(
        r#"{{"budget":{{"usd_per_hour":5}},"context":128,"generate":{{"max_tokens":1,"temperature":0}},"input":{{"uri":"rows.jsonl"}},"model":"{}","name":"small","output":{{"carry":["id"],"uri":"out"}},"precision":"f32","prompt":{{"text":"{{{{ text }}}} ->"}},"shards":{{"rows":4}}}}"#,
        model.display()
    );
    let hash: String = Sha256::digest(content.as_bytes())
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    job_record["job_hash"] = hash.into();
    fs::write(&record, format!("{job_record}\n")).unwrap();
    fs::write(
        model.join("generation_config.json"),
        r#"{"eos_token_id": [2, 0], "num_beams": 4}"#,
    )
    .unwrap();
    let ran = run(&["run", arg(&job), "--quiet"]).expect(0);
    assert!(ran.stderr.contains("warning: job `small` began with"), "{}", ran.stderr);
}
