//! The commands of an operator, through the built binary: what each does, what it refuses, its exit code and its JSON.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::services::{S3, need};
use crate::support::{Run, arg, gristmill, job_in, python, record, root};

/// Runs the binary.
pub(crate) fn run(arguments: &[&str]) -> Run {
    Run::of(&mut gristmill(arguments))
}

/// The labelling job over its 2,000 tickets: eight shards, about nine seconds of work on two cores.
#[cfg(feature = "faults")]
fn label_job(folder: &Path) -> (PathBuf, PathBuf) {
    job_in(folder, "label-tickets.yaml", |text| text)
}

/// A job of 40 short rows in ten shards; the texts of `long` rows are longer than the job's context, so they fail.
pub(crate) fn small_job(folder: &Path, long: &[usize]) -> (PathBuf, PathBuf) {
    let line = |row: usize| {
        let text = if long.contains(&row) {
            "word ".repeat(600)
        } else {
            format!("ticket {row}")
        };
        format!("{{\"id\": {row}, \"text\": \"{text}\"}}\n")
    };
    fs::write(folder.join("rows.jsonl"), (0..40).map(line).collect::<String>()).unwrap();
    let text = format!(
        "name: small\nmodel: {}\nprecision: f32\ncontext: 128\ninput: {{uri: rows.jsonl}}\nprompt: {{text: '{{{{ text }}}} ->'}}\n\
         generate: {{max_tokens: 1, temperature: 0}}\noutput: {{uri: out, carry: [id]}}\nshards: {{rows: 4}}\n",
        root().join("jobs/demo/model").display()
    );
    let job = folder.join("small.yaml");
    fs::write(&job, text).unwrap();
    (job, folder.join("out"))
}

fn status(output: &Path) -> Value {
    run(&["status", arg(output), "--json"]).expect(0).json()
}

#[test]
fn wrong_arguments_are_one_line() {
    for (arguments, words) in [
        (
            &["run", "job.yaml", "--colour"][..],
            ["unexpected argument '--colour'", "gristmill run --help"],
        ),
        (&["verify"], ["<OUTPUT>", "gristmill verify --help"]),
        (
            &["quantize", "m", "--to", "int3", "--out", "x"],
            ["it is int8, fp8, w4a16", "gristmill quantize --help"],
        ),
        (
            &["run", "job.yaml", "--limit", "a\nb"],
            ["invalid value", "gristmill run --help"],
        ),
        (
            &["--log-format", "xml", "status", "x"],
            ["[possible values: text, json]", "gristmill status --help"],
        ),
        (
            &["explode"],
            ["unrecognized subcommand 'explode'", "`gristmill --help`"],
        ),
    ] {
        run(arguments).expect(2).one_line(&words);
    }
    // For a program that reads the log.
    let logged = run(&["--log-format", "json", "run", "job.yaml", "--limit", "0"]).expect(2);
    let line: Value = serde_json::from_str(logged.stderr.trim_end()).unwrap();
    assert!(line["level"] == "ERROR" && line["message"].as_str().unwrap().starts_with("invalid value '0'"));
    let help = run(&["run", "--help"]).expect(0);
    assert!(help.stdout.contains("Usage:") && help.stderr.is_empty());
}

#[test]
fn submit_writes_the_ledger_and_again_says_what_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = small_job(folder.path(), &[]);
    let first = run(&["submit", arg(&job), "--no-enqueue", "--json"]).expect(0).json();
    assert_eq!(
        (&first["rows"], &first["shards"], &first["inputs"]),
        (&40.into(), &10.into(), &1.into())
    );
    assert_eq!(
        (
            &first["resumed"],
            &first["uncommitted"],
            &first["generation"],
            &first["queue"]
        ),
        (&false.into(), &10.into(), &0.into(), &Value::Null)
    );
    let record = record(&output);
    assert_eq!(record["job"], first["id"]);
    assert!(
        Path::new(record["resolved"]["base_dir"].as_str().unwrap()).is_absolute(),
        "{record}"
    );
    let again = run(&["submit", arg(&job), "--no-enqueue", "--json"]).expect(0).json();
    assert_eq!((&again["resumed"], &again["id"]), (&true.into(), &first["id"]));
    let said = run(&["submit", arg(&job), "--no-enqueue"]).expect(0).stdout;
    for word in [
        "40 in 10 shards",
        "submitted before; 10 of its shards",
        "gristmill reconcile",
        "gristmill run",
    ] {
        assert!(said.contains(word), "`{word}` is missing in:\n{said}");
    }
    run(&["run", arg(&job), "--quiet"]).expect(0);
    let done = run(&["submit", arg(&job), "--no-enqueue", "--json"]).expect(0);
    done.one_line(&["already done"]);
    assert_eq!(done.json()["uncommitted"], 0);
    // Another job has no place there.
    let text = fs::read_to_string(&job)
        .unwrap()
        .replace("max_tokens: 1", "max_tokens: 2");
    fs::write(&job, text).unwrap();
    run(&["submit", arg(&job), "--no-enqueue"])
        .expect(2)
        .one_line(&["belongs to job `small`", "output.uri"]);
}

#[test]
fn submit_says_at_once_what_is_wrong_with_the_queue() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = small_job(folder.path(), &[]);
    let submit = |more: &[&str]| run(&[&["submit", arg(&job)], more].concat());
    submit(&[])
        .expect(2)
        .one_line(&["no queue", "--queue URL", "queue.url", "--no-enqueue"]);
    submit(&["--queue", "redis://h/q"])
        .expect(2)
        .one_line(&["kafka://", "amqp://"]);
    let secret = submit(&["--queue", "kafka://127.0.0.1:1/t", "--kafka", "sasl.password=hunter2"]).expect(2);
    secret.one_line(&["sasl.password", "GRISTMILL_KAFKA_SASL_PASSWORD"]);
    assert!(!secret.stderr.contains("hunter2"));
    let queue = ["--queue", "kafka://127.0.0.1:1/t", "--kafka", "sasl.password=hunter2"];
    let secret = run(&[&["worker"][..], &queue].concat()).expect(2);
    secret.one_line(&["sasl.password", "GRISTMILL_KAFKA_SASL_PASSWORD"]);
    assert!(!secret.stderr.contains("hunter2"));
    assert!(
        submit(&["--queue", "kafka://h/t", "--no-enqueue"])
            .expect(2)
            .stderr
            .contains("cannot be used with")
    );
    assert!(
        submit(&["--queue", "kafka://h/t", "--kafka", "linger.ms"])
            .expect(2)
            .stderr
            .contains("PROPERTY=VALUE")
    );
    let text = fs::read_to_string(&job).unwrap();
    fs::write(&job, format!("{text}queue: {{url: 'amqp://u:hunter2@h/q'}}\n")).unwrap();
    let secret = submit(&[]).expect(2);
    secret.one_line(&["small.yaml", "queue.url", "GRISTMILL_QUEUE_PASSWORD"]);
    assert!(!secret.stderr.contains("hunter2"));
    // Nobody listens there: a failure of the broker, not of the job, and nothing is written.
    fs::write(&job, format!("{text}queue: {{url: 'amqp://u@127.0.0.1:1/q'}}\n")).unwrap();
    submit(&[]).expect(1).one_line(&["the queue"]);
    assert!(!output.exists(), "nothing is written before the broker has answered");
}

#[test]
fn preflight_reads_the_rows_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = small_job(folder.path(), &(0..40).collect::<Vec<_>>());
    let refused = run(&["submit", arg(&job), "--no-enqueue", "--preflight"]).expect(2);
    refused.one_line(&["none of the 40 rows", "row 0", "128"]);
    assert!(!output.exists());
    let (job, _) = small_job(folder.path(), &[7]);
    let seen = run(&["submit", arg(&job), "--no-enqueue", "--preflight", "--json"]).expect(0);
    assert!(
        seen.stderr.contains("40 rows, 1 of them broken") && seen.stderr.contains("row 7"),
        "{}",
        seen.stderr
    );
}

#[test]
fn a_limited_submission_is_a_job_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = small_job(folder.path(), &[]);
    let part = run(&["submit", arg(&job), "--no-enqueue", "--limit", "6", "--json"])
        .expect(0)
        .json();
    assert_eq!((&part["rows"], &part["shards"]), (&6.into(), &2.into()));
    assert!(part["output"].as_str().unwrap().contains("/_limit/out-6-"), "{part}");
    assert!(!output.exists());
}

#[test]
fn a_cancelled_job_starts_nothing_more() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = small_job(folder.path(), &[]);
    run(&["cancel", arg(&output)])
        .expect(2)
        .one_line(&["holds no job", "job.json"]);
    run(&["submit", arg(&job), "--no-enqueue"]).expect(0);
    let cancelled = run(&["cancel", arg(&output), "--json"]).expect(0).json();
    assert_eq!(
        (&cancelled["cancelled"], &cancelled["already"]),
        (&true.into(), &false.into())
    );
    assert!(
        run(&["cancel", arg(&output)])
            .expect(0)
            .stdout
            .contains("was cancelled before")
    );
    assert_eq!(status(&output)["state"], "cancelled");
    run(&["watch", arg(&output)]).expect(5);
    run(&["submit", arg(&job), "--no-enqueue"])
        .expect(5)
        .one_line(&["was cancelled", "output.uri"]);
    run(&["extend", arg(&output), "--deadline", "6h"])
        .expect(5)
        .one_line(&["was cancelled"]);
    run(&["run", arg(&job), "--quiet"]).expect(5);
    assert!(!output.join("part-00000.parquet").exists());
    // Closing it is a further order.
    let closed = run(&["cancel", arg(&output), "--finish", "--json"]).expect(0).json();
    assert_eq!((&closed["finish"], &closed["already"]), (&true.into(), &false.into()));
    assert!(
        run(&["cancel", arg(&output)])
            .expect(0)
            .stdout
            .contains("was cancelled before")
    );
}

#[test]
fn commands_that_come_too_late_or_too_early_say_so() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = small_job(folder.path(), &[]);
    run(&["submit", arg(&job), "--no-enqueue"]).expect(0);
    run(&["retry", arg(&output)])
        .expect(2)
        .one_line(&["is not finished", "status"]);
    run(&["clean", arg(&output), "--yes"])
        .expect(2)
        .one_line(&["is not finished"]);
    run(&["reconcile", arg(&output)]).expect(2).one_line(&["no queue"]);
    run(&["run", arg(&job), "--quiet"]).expect(0);
    assert!(
        run(&["cancel", arg(&output)])
            .expect(0)
            .stdout
            .contains("already finished")
    );
    assert!(
        run(&["extend", arg(&output), "--deadline", "6h"])
            .expect(0)
            .stdout
            .contains("the job is finished: the new limits apply only to a later `gristmill retry")
    );
    assert!(
        run(&["retry", arg(&output)])
            .expect(0)
            .stdout
            .contains("no failed rows")
    );
    let nothing = run(&["retry", arg(&output), "--json"]).expect(0).json();
    assert_eq!((&nothing["shards"], &nothing["generation"]), (&0.into(), &0.into()));
}

/// What is printed to be typed next means the same to a shell, whatever the output is called.
#[test]
fn printed_commands_are_quoted_for_a_shell() {
    let folder = tempfile::tempdir().unwrap();
    let own = folder.path().join("it's (one) & two");
    fs::create_dir(&own).unwrap();
    let (job, output) = small_job(&own, &[3]);
    let words = |line: &str| -> Vec<String> {
        let script = "import shlex, sys, json; print(json.dumps(shlex.split(sys.argv[1])))";
        let split = Run::of(Command::new(python()).args(["-c", script, line])).expect(0);
        serde_json::from_value(split.json()).unwrap()
    };
    let named = |text: &str, command: &str| {
        let line = text
            .lines()
            .find(|line| line.contains(command))
            .unwrap_or_else(|| panic!("{text}"));
        words(&line[line.find("gristmill").unwrap()..])[2].clone()
    };
    let submitted = run(&["submit", arg(&job), "--no-enqueue"]).expect(0).stdout;
    let url = record_url(&output);
    assert_eq!(named(&submitted, "gristmill reconcile"), url);
    let extended = run(&["extend", arg(&output), "--deadline", "6h"]).expect(0).stdout;
    assert_eq!(named(&extended, "gristmill reconcile"), url);
    run(&["run", arg(&job), "--quiet"]).expect(3);
    let retried = run(&["retry", arg(&output)]).expect(0).stdout;
    assert_eq!(named(&retried, "gristmill retry"), url);
    run(&["status", &url]).expect(0);
}

/// The address of an output, as commands print it.
fn record_url(output: &Path) -> String {
    let listed = run(&["jobs", arg(output), "--json"]).expect(0).json();
    listed["jobs"][0]["output"].as_str().unwrap().to_string()
}

#[test]
fn extend_gives_more_and_refuses_what_is_reached() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job_in(folder.path(), "label-tickets.yaml", |text| {
        text.replace("usd_per_hour: 0.10", "usd: 0.00001, usd_per_hour: 0.10")
    });
    run(&["run", arg(&job), "--quiet", "--log-interval", "0.05"]).expect(4);
    run(&["watch", arg(&output)]).expect(4);
    let stopped = status(&output);
    assert_eq!(
        (&stopped["state"], &stopped["budget"]["usd"]),
        (&"budget_reached".into(), &0.00001.into())
    );
    run(&["submit", arg(&job), "--no-enqueue"])
        .expect(4)
        .one_line(&["budget", "gristmill extend"]);
    let no_limit = "neither `--usd` nor `--deadline` is given";
    run(&["extend", arg(&output)]).expect(2).one_line(&[no_limit]);
    run(&["extend", arg(&output), "--usd", "0.000001"])
        .expect(2)
        .one_line(&["spent already", "--usd"]);
    run(&["extend", arg(&output), "--deadline", "6h"])
        .expect(2)
        .one_line(&["spent already"]);
    // On a fast machine the job is younger than a second still.
    std::thread::sleep(std::time::Duration::from_millis(1_500));
    run(&["extend", arg(&output), "--usd", "1", "--deadline", "1s"])
        .expect(2)
        .one_line(&["ago", "--deadline"]);
    assert_eq!(
        status(&output)["state"],
        "budget_reached",
        "what was refused left nothing behind"
    );
    let extended = run(&["extend", arg(&output), "--usd", "1", "--json"]).expect(0).json();
    assert_eq!(
        (&extended["budget"]["usd"], &extended["budget"]["deadline_seconds"]),
        (&1.0.into(), &Value::Null)
    );
    assert!(extended["used"]["usd"].as_f64() > Some(0.0), "{extended}");
    run(&["extend", arg(&output)]).expect(2).one_line(&[no_limit]);
    let said = run(&["extend", arg(&output), "--deadline", "6h"]).expect(0).stdout;
    assert!(
        said.contains("$1.00, ") && said.contains("6h 0m after the job's start"),
        "{said}"
    );
    let resumed = status(&output);
    assert_eq!(
        (&resumed["state"], &resumed["budget"]["deadline_seconds"]),
        (&"running".into(), &21_600.into())
    );
    let left = run(&["submit", arg(&job), "--no-enqueue", "--json"]).expect(0).json();
    assert!(left["uncommitted"].as_u64() > Some(0), "{left}");
}

/// Rows that expired with their budget are given more before they are tried again.
#[test]
fn a_finished_job_is_extended_for_its_retry() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job_in(folder.path(), "label-tickets.yaml", |text| {
        text.replace(
            "usd_per_hour: 0.10",
            "usd: 0.00001, usd_per_hour: 0.10, unfinished: expire",
        )
    });
    run(&["run", arg(&job), "--quiet", "--log-interval", "0.05"]).expect(3);
    assert!(status(&output)["rows"]["expired"].as_u64() > Some(0));
    run(&["extend", arg(&output), "--usd", "1"]).expect(0);
    let said = run(&["retry", arg(&output)]).expect(0);
    assert!(
        !said.stdout.contains("first") && !said.stderr.contains("first"),
        "{said:?}"
    );
    run(&["run", arg(&job), "--quiet"]).expect(0);
    assert_eq!(status(&output)["rows"]["succeeded"], 2000);
    run(&["verify", arg(&output)]).expect(0);
}

#[test]
fn an_edited_budget_extends_a_job_that_is_submitted_again() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job_in(folder.path(), "label-tickets.yaml", |text| {
        text.replace("usd_per_hour: 0.10", "usd: 0.00001, usd_per_hour: 0.10")
    });
    run(&["run", arg(&job), "--quiet", "--log-interval", "0.05"]).expect(4);
    let text = fs::read_to_string(&job).unwrap().replace("usd: 0.00001", "usd: 2");
    fs::write(&job, text).unwrap();
    let again = run(&["submit", arg(&job), "--no-enqueue", "--json"]).expect(0);
    again.one_line(&["now those of the job file"]);
    assert_eq!(
        (&again.json()["resumed"], &status(&output)["budget"]["usd"]),
        (&true.into(), &2.0.into())
    );
}

#[test]
fn failed_rows_run_again_and_each_row_stands_once() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = small_job(folder.path(), &[3, 5, 21]);
    run(&["run", arg(&job), "--quiet"]).expect(3);
    let retried = run(&["retry", arg(&output), "--json"]).expect(0).json();
    assert_eq!(
        (
            &retried["generation"],
            &retried["rows"]["errored"],
            &retried["shards"],
            &retried["resumed"]
        ),
        (&1.into(), &3.into(), &3.into(), &false.into())
    );
    // Again, before it is done: the same generation.
    let again = run(&["retry", arg(&output), "--json"]).expect(0).json();
    assert_eq!(
        (&again["generation"], &again["shards"], &again["resumed"]),
        (&1.into(), &3.into(), &true.into())
    );
    assert_eq!(
        (&status(&output)["generation"], &status(&output)["state"]),
        (&1.into(), &"running".into())
    );
    assert!(run(&["retry", arg(&output)]).expect(0).stdout.contains("generation 1"));
    // The cause is not mended: they fail again, and each row stands once still.
    run(&["run", arg(&job), "--quiet"]).expect(3);
    let verified = run(&["verify", arg(&output), "--json"]).expect(0).json();
    assert_eq!(
        (&verified["generation"], &verified["rows"], &verified["holds"]),
        (&1.into(), &40.into(), &true.into())
    );
    assert!(
        run(&["verify", arg(&output)])
            .expect(0)
            .stdout
            .contains("after one retry")
    );
}

#[test]
fn clean_shows_first_and_removes_when_told() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = small_job(folder.path(), &[]);
    run(&["run", arg(&job), "--quiet"]).expect(0);
    let shown = run(&["clean", arg(&output), "--json"]).expect(0).json();
    assert_eq!(shown["removed"], false);
    assert!(
        shown["objects"].as_u64() >= Some(20),
        "a data object and a record a shard: {shown}"
    );
    assert!(run(&["clean", arg(&output)]).expect(0).stdout.contains("--yes"));
    let removed = run(&["clean", arg(&output), "--yes", "--json"]).expect(0).json();
    assert_eq!(
        (&removed["removed"], &removed["objects"], &removed["bytes"]),
        (&true.into(), &shown["objects"], &shown["bytes"])
    );
    assert_eq!(run(&["clean", arg(&output), "--json"]).expect(0).json()["objects"], 0);
    run(&["verify", arg(&output)]).expect(0);
    assert_eq!(status(&output)["rows"]["succeeded"], 40);
    assert!(
        run(&["submit", arg(&job), "--no-enqueue"])
            .expect(0)
            .stderr
            .contains("already done")
    );
}

#[cfg(feature = "faults")]
#[test]
fn status_names_the_shards_that_a_dead_worker_left() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = label_job(folder.path());
    begin_and_abort(&job, "keeper.before-part=abort@1");
    let seen = status(&output);
    let open = seen["open_shards"].as_array().unwrap();
    assert!(
        !open.is_empty() && open.len() as u64 == seen["shards"]["open"].as_u64().unwrap(),
        "{seen}"
    );
    for shard in open {
        assert!(shard["worker"].as_str().unwrap().starts_with("run-"), "{shard}");
        assert!(shard["rows_done"].as_u64() <= shard["rows"].as_u64(), "{shard}");
        assert!(shard["attempts"].as_u64() >= Some(1), "{shard}");
        chrono::DateTime::parse_from_rfc3339(shard["last_progress"].as_str().unwrap()).unwrap();
    }
    assert!(seen["created_at"].is_string() && seen["generation"] == 0, "{seen}");
    let said = run(&["status", arg(&output)]).expect(0).stdout;
    assert!(said.contains("last progress") && said.contains("worker run-"), "{said}");
}

#[cfg(feature = "faults")]
/// Begins a job and ends the process at the failpoint.
fn begin_and_abort(job: &Path, failpoint: &str) {
    let mut command = gristmill(&["run", arg(job), "--quiet"]);
    let ended = Run::of(command.env("GRISTMILL_FAILPOINTS", failpoint));
    assert_ne!(ended.code, Some(0), "{}", ended.stderr);
}

#[cfg(feature = "faults")]
/// All data objects of the job's ledger.
fn data_objects(output: &Path) -> Vec<PathBuf> {
    let folders = |path: &Path| -> Vec<PathBuf> {
        let found = fs::read_dir(path).into_iter().flatten();
        found.map(|entry| entry.unwrap().path()).collect()
    };
    let homes = folders(&output.join("_gristmill"));
    let shards = homes.iter().flat_map(|home| folders(&home.join("shards")));
    shards.flat_map(|shard| folders(&shard.join("data"))).collect()
}

#[cfg(feature = "faults")]
#[test]
fn finished_rows_whose_data_is_lost_are_computed_again() {
    for format in ["carry: [id]", "format: openai"] {
        for same_size in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let (job, output) = small_job(folder.path(), &[]);
            let text = fs::read_to_string(&job).unwrap();
            fs::write(&job, text.replace("carry: [id]", format)).unwrap();
            begin_and_abort(&job, "keeper.before-part=abort@1");
            let lost = data_objects(&output);
            assert!(!lost.is_empty());
            for path in &lost {
                if same_size {
                    fs::write(path, vec![b'x'; fs::metadata(path).unwrap().len() as usize]).unwrap()
                } else {
                    fs::remove_file(path).unwrap()
                }
            }
            let seen = status(&output);
            let damaged: u64 = seen["open_shards"]
                .as_array()
                .unwrap()
                .iter()
                .map(|s| s["rows_damaged"].as_u64().unwrap())
                .sum();
            assert_eq!(damaged > 0, !same_size, "{seen}");
            assert_eq!(seen["rows"]["succeeded"] == 0, !same_size, "{seen}");
            if !same_size {
                let said = run(&["status", arg(&output)]).expect(0).stdout;
                assert!(said.contains("damaged: the data of 4 finished rows is lost"), "{said}");
            }
            let again = run(&["run", arg(&job), "--json"]).expect(0);
            assert!(again.stderr.contains("rows are computed again"), "{}", again.stderr);
            assert_eq!(again.json()["rows"]["succeeded"], 40);
            let said = run(&["verify", arg(&output), "--inputs"]).expect(0).stdout;
            let compared = match format {
                "carry: [id]" => ", with the carried columns",
                _ => " (no column is carried",
            };
            let holds = format!("40 rows as planned, each exactly once, in 10 parts{compared}");
            assert!(said.contains(&holds), "{said}");
        }
    }
}

#[cfg(feature = "faults")]
#[test]
fn lines_of_somebody_else_stay_what_they_are_and_are_not_counted() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = small_job(folder.path(), &[]);
    let text = fs::read_to_string(&job).unwrap();
    fs::write(&job, text.replace("carry: [id]", "format: openai")).unwrap();
    begin_and_abort(&job, "intake.before-read=abort@1");
    let part = output.join("part-00001.jsonl");
    fs::write(&part, "x\n".repeat(4)).unwrap();
    let refused = run(&["run", arg(&job), "--quiet"]);
    assert_ne!(refused.code, Some(0));
    refused.one_line(&["part-00001.jsonl", "is not a part of job `small`", "move it away"]);
    assert_eq!(fs::read_to_string(&part).unwrap(), "x\n".repeat(4));
    run(&["verify", arg(&output)]).expect(1);
    fs::remove_file(&part).unwrap();
    run(&["run", arg(&job), "--quiet"]).expect(0);
    run(&["verify", arg(&output), "--inputs"]).expect(0);
    // Another job's part, of the same rows: the folder's name is all that they share.
    let good = fs::read_to_string(&part).unwrap();
    let job_id = record(&output)["job"].as_str().unwrap().to_string();
    fs::write(&part, good.replace(&job_id, "00000000000000000000")).unwrap();
    let said = run(&["verify", arg(&output)]).expect(1).stderr;
    assert!(
        said.contains("line 1 has id `batch_req_00000000000000000000_4` where"),
        "{said}"
    );
}

/// Parts are held against the inputs row by row, also where rows were done by a retry.
#[test]
fn carried_columns_are_those_of_the_inputs() {
    use arrow::array::{ArrayRef, Int64Array, RecordBatch};
    use gristmill::dataset::part::{part_parquet, read_parquet};
    use gristmill::dataset::writing::WriteOptions;

    let folder = tempfile::tempdir().unwrap();
    let (job, output) = small_job(folder.path(), &[5, 6]);
    run(&["run", arg(&job), "--quiet"]).expect(3);
    run(&["retry", arg(&output)]).expect(0);
    run(&["run", arg(&job), "--quiet"]).expect(3);
    let said = run(&["verify", arg(&output), "--inputs"]).expect(0).stdout;
    assert!(
        said.contains("after one retry, with the carried columns of their inputs"),
        "{said}"
    );
    let plain = run(&["verify", arg(&output)]).expect(0).stdout;
    assert!(
        plain.contains("40 rows as planned, each exactly once, in 10 parts") && !plain.contains("inputs"),
        "{plain}"
    );
    let path = output.join("part-00001.parquet");
    let part = read_parquet(fs::read(&path).unwrap().into()).unwrap();
    let batch = &part.batches[0];
    let mut columns = batch.columns().to_vec();
    columns[0] = std::sync::Arc::new(Int64Array::from(vec![4, 5, 7, 6])) as ArrayRef;
    let swapped = RecordBatch::try_new(batch.schema(), columns).unwrap();
    fs::write(
        &path,
        part_parquet(&part.schema, &[swapped], &part.metadata, WriteOptions::default()).unwrap(),
    )
    .unwrap();
    let said = run(&["verify", arg(&output), "--inputs"]).expect(1).stderr;
    assert!(
        said.contains("`part-00001.parquet`: column `id` of row 6 is not its input's"),
        "{said}"
    );
    assert!(!run(&["verify", arg(&output)]).expect(1).stderr.contains("input's"));

    // Lines carry their `custom_id`.
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = small_job(folder.path(), &[5]);
    let text = fs::read_to_string(&job).unwrap();
    let rows = fs::read_to_string(folder.path().join("rows.jsonl")).unwrap();
    fs::write(
        folder.path().join("rows.jsonl"),
        rows.replace("\"id\": ", "\"custom_id\": "),
    )
    .unwrap();
    fs::write(&job, text.replace("carry: [id]", "format: openai, carry: [custom_id]")).unwrap();
    run(&["run", arg(&job), "--quiet"]).expect(3);
    run(&["retry", arg(&output)]).expect(0);
    run(&["run", arg(&job), "--quiet"]).expect(3);
    run(&["verify", arg(&output), "--inputs"]).expect(0);
    let path = output.join("part-00001.jsonl");
    let good = fs::read_to_string(&path).unwrap();
    fs::write(&path, good.replace("\"custom_id\":6", "\"custom_id\":66")).unwrap();
    let said = run(&["verify", arg(&output), "--inputs"]).expect(1).stderr;
    assert!(
        said.contains("`part-00001.jsonl`: `custom_id` of row 6 is not its input's"),
        "{said}"
    );
}

#[test]
fn help_shows_no_value_of_the_environment() {
    for flag in ["--help", "-h"] {
        let mut command = gristmill(&["worker", flag]);
        let said = Run::of(command.env("GRISTMILL_QUEUE", "amqp://u:hunter2@h/q")).expect(0);
        assert!(said.stdout.contains("GRISTMILL_QUEUE"), "{}", said.stdout);
        assert!(
            !said.stdout.contains("hunter2") && !said.stderr.contains("hunter2"),
            "{said:?}"
        );
    }
}

/// Addresses of queues for this test, one for each broker that runs.
pub(crate) fn queues(test: &str) -> Vec<String> {
    let name = format!("{test}-{}", std::process::id());
    [("GRISTMILL_TEST_KAFKA", "kafka://"), ("GRISTMILL_TEST_RABBITMQ", "")]
        .iter()
        .filter_map(|(variable, scheme)| Some(format!("{scheme}{}/{name}", need(test, variable)?)))
        .collect()
}

/// The messages of failed rows are counted, as `run` ends and by `status`; those that differ in numbers are one.
#[test]
fn why_rows_failed_is_said_with_how_many() {
    for format in ["carry: [id]", "format: openai"] {
        let folder = tempfile::tempdir().unwrap();
        let (job, output) = small_job(folder.path(), &[3, 5, 30]);
        let text = fs::read_to_string(&job).unwrap();
        fs::write(&job, text.replace("carry: [id]", format)).unwrap();
        let rows = folder.path().join("rows.jsonl");
        let text = fs::read_to_string(&rows).unwrap();
        let text = text.replace("{\"id\": 7, \"text\": \"ticket 7\"}", "{\"id\": 7, \"text\"");
        fs::write(&rows, text.replacen("word ", "wordy ", 3)).unwrap();
        let ran = run(&["run", arg(&job), "--quiet"]).expect(3).stdout;
        let line = |text: &str, count: &str| text.lines().any(|line| line.contains(count));
        assert!(line(&ran, "failed      3 of 4 examined rows: "), "{format}: {ran}");
        assert!(line(&ran, "            1 of 4 examined rows: "), "{format}: {ran}");
        assert_eq!(
            run(&["status", arg(&output)])
                .expect(0)
                .stdout
                .matches(" of 4 examined rows")
                .count(),
            2
        );
        let failures = &status(&output)["failures"];
        let most = failures["most"].as_array().unwrap();
        assert_eq!(
            (most[0]["rows"].as_u64(), failures["looked_at"].as_u64()),
            (Some(3), Some(4)),
            "{failures}"
        );
        assert!(most[0]["message"].as_str().unwrap().contains("tokens"), "{failures}");
    }
}

/// Shards whose carried columns do not fit beside each other are read one after the other, and all of them are.
#[cfg(feature = "faults")]
#[test]
fn carried_columns_of_all_shards_share_a_bound() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = small_job(folder.path(), &[]);
    let text = fs::read_to_string(&job).unwrap();
    fs::write(&job, text.replace("carry: [id]", "carry: [id, text]")).unwrap();
    let waits = "waits: the carried columns";
    let mut command = gristmill(&["run", arg(&job), "--quiet"]);
    let said = Run::of(command.env("RUST_LOG", "info").env("GRISTMILL_ROOM_BYTES", "1")).expect(0);
    // The first of ten never waits.
    assert!(said.stderr.matches(waits).count() >= 4, "{}", said.stderr);
    assert_eq!(status(&output)["rows"]["succeeded"], 40);
}

/// A store that takes connections and answers nothing: that one waits for it is said long before one gives up.
#[test]
fn a_store_that_does_not_answer_is_named() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", silent.local_addr().unwrap());
    let mut status = gristmill(&["status", "s3://labels/out"])
        .env("AWS_ENDPOINT", &address)
        .env("AWS_ALLOW_HTTP", "true")
        .env("AWS_SKIP_SIGNATURE", "true")
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = String::new();
    let stderr = status.stderr.take().unwrap();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(stderr), &mut first).unwrap();
    status.kill().unwrap();
    status.wait().unwrap();
    assert_eq!(
        first,
        "gristmill: `s3://labels/out` does not answer yet, trying again for a while\n"
    );
}

#[test]
fn submit_and_reconcile_enqueue_at_real_brokers() {
    for queue in queues("submit_and_reconcile_enqueue_at_real_brokers") {
        let folder = tempfile::tempdir().unwrap();
        let (job, output) = small_job(folder.path(), &[3]);
        let sent = run(&["submit", arg(&job), "--queue", &queue, "--json"])
            .expect(0)
            .json();
        assert_eq!(
            (&sent["queue"]["messages"], &sent["queue"]["created"]),
            (&10.into(), &true.into()),
            "{sent}"
        );
        if queue.starts_with("kafka:") {
            assert_eq!(sent["queue"]["partitions"], 10, "a partition a shard: {sent}");
        }
        let url = sent["queue"]["url"].as_str().unwrap();
        let user = queue.split_once("://").and_then(|(_, rest)| rest.split_once('@'));
        if let Some((_, password)) = user.and_then(|(user, _)| user.split_once(':')) {
            assert!(!url.contains(password), "the password is shown");
        }
        let again = run(&["submit", arg(&job), "--queue", &queue, "--json"])
            .expect(0)
            .json();
        assert_eq!(
            (&again["queue"]["messages"], &again["queue"]["created"]),
            (&10.into(), &false.into())
        );
        let said = run(&["submit", arg(&job), "--queue", &queue]).expect(0).stdout;
        assert!(
            said.contains("enqueued    10 shards to") && said.contains("gristmill worker --queue"),
            "{said}"
        );
        // An output without a job is named, and keeps none waiting that stands after it.
        let none = folder.path().join("none");
        let outputs = [
            "reconcile",
            arg(&none),
            arg(&output),
            "--queue",
            &queue,
            "--interval",
            "0.5",
        ];
        let looked = run(&outputs).expect(2);
        assert_eq!(looked.stderr.matches("holds no job").count(), 1, "{}", looked.stderr);
        assert!(
            looked
                .stdout
                .contains("enqueued 10 shards that nobody moved (0 to 9), of 10"),
            "{}",
            looked.stdout
        );
        run(&["run", arg(&job), "--quiet"]).expect(3);
        fs::remove_file(output.join("_SUCCESS")).unwrap();
        let until = [
            "reconcile",
            arg(&none),
            arg(&output),
            "--queue",
            &queue,
            "--until-finished",
        ];
        run(&until).expect(2);
        fs::remove_file(output.join("_SUCCESS")).unwrap();
        let finished = run(&["reconcile", arg(&output), "--queue", &queue, "--until-finished"]).expect(3);
        assert!(
            finished.stdout.contains("is finished; some rows did not succeed"),
            "{}",
            finished.stdout
        );
        assert!(output.join("_SUCCESS").exists());
        let retried = run(&["retry", arg(&output), "--queue", &queue, "--json"])
            .expect(0)
            .json();
        assert_eq!(
            (&retried["generation"], &retried["queue"]["messages"]),
            (&1.into(), &1.into()),
            "{retried}"
        );
    }
}

#[test]
fn the_commands_work_on_an_s3_store() {
    let Some(store) = S3::need("the_commands_work_on_an_s3_store") else {
        return;
    };
    let s3 = |arguments: &[&str]| Run::of(gristmill(arguments).envs(store.variables(&store.endpoint)));
    let folder = tempfile::tempdir().unwrap();
    let (job, _) = small_job(folder.path(), &[3]);
    let output = store.folder("commands");
    let text = fs::read_to_string(&job)
        .unwrap()
        .replace("uri: out", &format!("uri: '{output}'"));
    fs::write(&job, text).unwrap();
    let first = s3(&["submit", arg(&job), "--no-enqueue", "--json"]).expect(0).json();
    assert_eq!(
        (&first["shards"], &first["output"]),
        (&10.into(), &output.clone().into())
    );
    s3(&["run", arg(&job), "--quiet"]).expect(3);
    let retried = s3(&["retry", &output, "--json"]).expect(0).json();
    assert_eq!(
        (&retried["generation"], &retried["shards"]),
        (&1.into(), &1.into()),
        "{retried}"
    );
    s3(&["run", arg(&job), "--quiet"]).expect(3);
    // An object of no bytes that stands for the folder, as consoles and pyarrow make it.
    let script = "import sys; sys.path.append('tests/faults'); import known\n\
                  store, path = known.filesystem(sys.argv[1], sys.argv[2]); store.create_dir(path)";
    let mut marker = Command::new(python());
    marker
        .args(["-c", script, &output, &store.endpoint])
        .current_dir(root());
    Run::of(marker.envs(store.variables(&store.endpoint))).expect(0);
    assert_eq!(s3(&["verify", &output, "--json"]).expect(0).json()["rows"], 40);
    assert!(s3(&["clean", &output, "--yes", "--json"]).expect(0).json()["objects"].as_u64() > Some(0));
    s3(&["verify", &output]).expect(0);
    assert!(s3(&["cancel", &output]).expect(0).stdout.contains("already finished"));
}
