//! Answers that `max_tokens` cut off: counted in every report, and run again with more by `retry --truncated`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::commands::{run, small_job};
use crate::support::{Run, arg, python, root};

/// What another reader sees: of each row, whether an answer was cut off, its status and its tokens.
const SEEN: &str = r#"
import sys, json, pyarrow.dataset as ds
for row in ds.dataset(sys.argv[1], format="parquet").to_table().to_pylist():
    reasons = row["finish_reason"]
    reasons = reasons if isinstance(reasons, list) else [reasons]
    print(json.dumps([row["row"], "length" in reasons, row["status"], row["completion_tokens"], row["completion"]]))
"#;

/// A published row.
#[derive(Debug, Clone, PartialEq)]
struct Seen {
    truncated: bool,
    succeeded: bool,
    tokens: u64,
    completion: Value,
}

fn seen(output: &Path) -> Vec<Seen> {
    let said = Run::of(Command::new(python()).args(["-c", SEEN, arg(output)])).expect(0);
    let rows = said.stdout.lines().map(|line| {
        let row: Value = serde_json::from_str(line).unwrap();
        Seen {
            truncated: row[1].as_bool().unwrap(),
            succeeded: row[2] == "succeeded",
            tokens: row[3].as_u64().unwrap_or(0),
            completion: row[4].clone(),
        }
    });
    rows.collect()
}

fn count(rows: &[Seen]) -> u64 {
    rows.iter().filter(|row| row.truncated).count() as u64
}

/// A job of 40 rows in ten shards, one of them too long for its context, whose answers have `max_tokens` at most.
fn cut_job(folder: &Path, generate: &str) -> (PathBuf, PathBuf) {
    let (job, output) = small_job(folder, &[5]);
    edit(&job, "max_tokens: 1, temperature: 0", generate);
    (job, output)
}

fn edit(job: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(job).unwrap();
    assert!(text.contains(from), "{text}");
    fs::write(job, text.replace(from, to)).unwrap();
}

/// Every record of the ledger, and `_SUCCESS`.
fn records(output: &Path) -> Vec<PathBuf> {
    fn walk(folder: &Path, out: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            match entry.is_dir() {
                true => walk(&entry, out),
                false if entry.extension().is_some_and(|e| e == "json") => out.push(entry),
                false => {}
            }
        }
    }
    let mut out = vec![output.join("_SUCCESS")];
    walk(&output.join("_gristmill"), &mut out);
    out
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn write(path: &Path, record: &Value) {
    fs::write(path, format!("{record}\n")).unwrap();
}

/// Takes `truncated` out of a record, as an older gristmill would have written it.
fn forget(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.shift_remove("truncated");
            fields.values_mut().for_each(forget);
        }
        Value::Array(items) => items.iter_mut().for_each(forget),
        _ => {}
    }
}

#[test]
fn cut_off_answers_are_counted_everywhere_and_retried_with_more() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = cut_job(folder.path(), "max_tokens: 6, temperature: 0");
    let ran = run(&["run", arg(&job), "--json"]).expect(3);
    let before = seen(&output);
    let cut = count(&before);
    assert!((1..=39).contains(&cut), "{before:?}");
    assert!(before.iter().any(|row| row.truncated && row.succeeded));
    assert_eq!(ran.json()["rows"]["truncated"], cut);
    assert!(
        ran.stderr.contains("of the answers were cut off") && ran.stderr.contains("--truncated --max-tokens N"),
        "{}",
        ran.stderr
    );
    assert_eq!(read(&output.join("_SUCCESS"))["truncated"], cut);
    for command in ["status", "verify"] {
        let json = run(&[command, arg(&output), "--json"]).expect(0).json();
        assert!(
            json["truncated"] == cut || json["rows"]["truncated"] == cut,
            "{command}: {json}"
        );
    }
    for (command, code) in [("status", 0), ("watch", 3)] {
        let said = run(&[command, arg(&output)]).expect(code).stdout;
        assert!(
            said.contains(&format!("{cut} truncated")) && said.contains("were cut off"),
            "{said}"
        );
    }

    // The same limit would cut them off again.
    run(&["retry", arg(&output), "--truncated"])
        .expect(2)
        .one_line(&["`--truncated` needs `--max-tokens N`"]);
    run(&["retry", arg(&output), "--max-tokens", "60"])
        .expect(2)
        .one_line(&["give `--truncated` as well"]);
    run(&["retry", arg(&output), "--truncated", "--max-tokens", "6"])
        .expect(2)
        .one_line(&["`max_tokens` 6", "--max-tokens"]);
    run(&["retry", arg(&output), "--truncated", "--max-tokens", "128"])
        .expect(2)
        .one_line(&["`context` of 128"]);
    let retried = run(&["retry", arg(&output), "--truncated", "--max-tokens", "60", "--json"])
        .expect(0)
        .json();
    let of = |word: &str| retried["rows"][word].as_u64().unwrap();
    assert_eq!(
        (of("succeeded") + of("invalid_output"), of("errored")),
        (cut, 0),
        "{retried}"
    );
    assert_eq!(
        (&retried["generation"], &retried["max_tokens"]),
        (&1.into(), &60.into())
    );
    // A gristmill that knows of no such thing leaves it to others.
    let home = output.join("_gristmill").join(retried["id"].as_str().unwrap());
    let record = read(&home.join("gen/001.json"));
    assert_eq!(
        (&record["v"], &record["max_tokens"]),
        (&2.into(), &60.into()),
        "{record}"
    );
    // It goes on as what it is, and as nothing else.
    let again = run(&["retry", arg(&output), "--truncated", "--max-tokens", "60", "--json"])
        .expect(0)
        .json();
    assert_eq!((&again["generation"], &again["resumed"]), (&1.into(), &true.into()));
    run(&["retry", arg(&output), "--truncated", "--max-tokens", "70"])
        .expect(2)
        .one_line(&["retry 1 has not finished"]);

    let ran = run(&["run", arg(&job), "--json", "--quiet"]).expect(3).json();
    let after = seen(&output);
    assert_eq!(ran["rows"]["truncated"], count(&after));
    assert!(count(&after) < cut, "{after:?}");
    for (row, (was, is)) in before.iter().zip(&after).enumerate() {
        if !was.truncated {
            assert_eq!(was, is, "row {row} was not to be touched")
        } else {
            assert!(is.tokens > was.tokens && is.tokens <= 60, "row {row}: {was:?} {is:?}");
            let (was, is) = (was.completion.as_str().unwrap(), is.completion.as_str().unwrap());
            assert!(
                is.starts_with(was),
                "row {row}: greedy, it goes on where it was cut: {was} {is}"
            );
        }
    }
    run(&["verify", arg(&output)]).expect(0);
    // A recheck asks as the rows were asked last.
    let checked = run(&["recheck", arg(&job), "--json", "--quiet", "--precision", "f32"]);
    assert_eq!(checked.code, Some(2), "the job runs in f32 itself: {checked:?}");
    // What failed is retried as ever, and rows keep what they were given.
    let failed = run(&["retry", arg(&output), "--json"]).expect(0).json();
    assert_eq!(
        (&failed["rows"]["errored"], &failed["max_tokens"]),
        (&1.into(), &60.into())
    );
    let record = read(&home.join("gen/002.json"));
    assert_eq!((&record["v"], record.get("max_tokens")), (&1.into(), None));
    run(&["run", arg(&job), "--quiet"]).expect(3);
    let done = run(&["retry", arg(&output), "--truncated", "--max-tokens", "60"]);
    done.expect(2).one_line(&["`max_tokens` 60"]);
}

#[test]
fn several_samples_are_truncated_where_one_is() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = cut_job(folder.path(), "max_tokens: 5, n: 3, seed: 1");
    let ran = run(&["run", arg(&job), "--json", "--quiet"]).expect(3);
    assert_eq!(ran.stderr, "", "quiet is quiet");
    let ran = ran.json();
    let cut = count(&seen(&output));
    assert!(cut > 0);
    assert_eq!(ran["rows"]["truncated"], cut);
    assert_eq!(
        run(&["verify", arg(&output), "--json"]).expect(0).json()["truncated"],
        cut
    );
    let retried = run(&["retry", arg(&output), "--truncated", "--max-tokens", "100", "--json"])
        .expect(0)
        .json();
    assert_eq!(retried["rows"]["succeeded"], cut);
}

#[test]
fn what_an_older_gristmill_did_not_count_is_unknown_and_not_zero() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = cut_job(folder.path(), "max_tokens: 6, temperature: 0");
    run(&["run", arg(&job), "--quiet"]).expect(3);
    let cut = count(&seen(&output));
    for path in records(&output) {
        let mut record = read(&path);
        // A newer worker's commit among them, of which an older one made the digest.
        if !path.ends_with("000004.json") {
            forget(&mut record);
        }
        write(&path, &record);
    }
    let status = run(&["status", arg(&output), "--json"]).expect(0).json();
    assert_eq!(status["rows"]["truncated"], Value::Null, "{status}");
    let said = run(&["status", arg(&output)]).expect(0).stdout;
    assert!(
        said.contains("truncated: unknown") && !said.contains("were cut off"),
        "{said}"
    );
    let verified = run(&["verify", arg(&output), "--json"]).expect(0).json();
    assert_eq!(
        (&verified["holds"], &verified["truncated"]),
        (&true.into(), &cut.into())
    );
    // They are found all the same.
    let retried = run(&["retry", arg(&output), "--truncated", "--max-tokens", "60", "--json"])
        .expect(0)
        .json();
    assert_eq!(retried["rows"]["succeeded"], cut);
    run(&["run", arg(&job), "--quiet"]).expect(3);
    run(&["verify", arg(&output)]).expect(0);
}

#[test]
fn a_wrong_count_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = cut_job(folder.path(), "max_tokens: 6, temperature: 0");
    run(&["run", arg(&job), "--quiet"]).expect(3);
    let commits = records(&output)
        .into_iter()
        .find(|path| arg(path).contains("/commits/"))
        .expect("a commit");
    let mut record = read(&commits);
    let count = record["tally"]["truncated"].as_u64().unwrap();
    record["tally"]["truncated"] = (count + 1).into();
    write(&commits, &record);
    let found = run(&["verify", arg(&output)]).expect(1);
    assert!(found.stderr.contains("not as committed"), "{}", found.stderr);
}

/// OpenAI lines: their own limits count, and a retry raises these, too.
#[test]
fn lines_with_limits_of_their_own_are_raised_too() {
    let folder = tempfile::tempdir().unwrap();
    let line = |row: usize| {
        let mut body = json!({"model": "m", "prompt": format!("ticket {row} ->"), "temperature": 0});
        if row % 2 == 1 {
            body["max_tokens"] = 2.into();
        }
        json!({"custom_id": format!("r{row}"), "method": "POST", "url": "/v1/completions", "body": body})
    };
    let lines: Vec<String> = (0..6).map(|row| format!("{}\n", line(row))).collect();
    fs::write(folder.path().join("in.jsonl"), lines.concat()).unwrap();
    let job = folder.path().join("batch.yaml");
    let model = root().join("jobs/demo/model");
    let text = format!(
        "name: batch\nmodel: {}\nprecision: f32\ncontext: 128\ninput: {{uri: in.jsonl}}\n\
         generate: {{max_tokens: 4, ignore_eos: true}}\noutput: {{uri: out, format: openai}}\n",
        model.display()
    );
    fs::write(&job, text).unwrap();
    let output = folder.path().join("out");
    let tokens = || -> Vec<u64> {
        let part = fs::read_to_string(output.join("part-00000.jsonl")).unwrap();
        let lines = part.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines
            .map(|line| line["response"]["body"]["usage"]["completion_tokens"].as_u64().unwrap())
            .collect()
    };
    let ran = run(&["run", arg(&job), "--json", "--quiet"]).expect(0).json();
    assert_eq!(
        (ran["rows"]["truncated"].as_u64(), tokens()),
        (Some(6), vec![4, 2, 4, 2, 4, 2])
    );
    assert_eq!(
        run(&["verify", arg(&output), "--json"]).expect(0).json()["truncated"],
        6
    );
    // Less than the job gives is more than some lines had, and takes nothing from the others.
    run(&["retry", arg(&output), "--truncated", "--max-tokens", "3"]).expect(0);
    run(&["run", arg(&job), "--quiet"]).expect(0);
    assert_eq!(tokens(), [4, 3, 4, 3, 4, 3]);
    run(&["retry", arg(&output), "--truncated", "--max-tokens", "9"]).expect(0);
    run(&["run", arg(&job), "--quiet"]).expect(0);
    assert_eq!(tokens(), [9; 6]);
    assert_eq!(
        run(&["verify", arg(&output), "--json"]).expect(0).json()["truncated"],
        6
    );
}

/// Whatever ends a retry, rows that it did not come to keep the answers that they had.
#[test]
fn a_retry_that_is_ended_takes_no_answer_away() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = cut_job(folder.path(), "max_tokens: 6, temperature: 0");
    run(&["run", arg(&job), "--quiet"]).expect(3);
    let before = seen(&output);
    let said = read(&output.join("_SUCCESS"));
    for more in [60, 70] {
        run(&["retry", arg(&output), "--truncated", "--max-tokens", &more.to_string()]).expect(0);
        run(&["cancel", arg(&output), "--finish"]).expect(0);
        run(&["run", arg(&job), "--quiet"]);
        assert_eq!(seen(&output), before, "{more}");
        let now = read(&output.join("_SUCCESS"));
        assert_eq!(
            (&now["truncated"], &now["succeeded"], &now["cancelled"]),
            (&said["truncated"], &said["succeeded"], &said["cancelled"]),
            "{now}"
        );
        run(&["verify", arg(&output)]).expect(0);
    }
}

/// A line with a limit of its own below the job's is raised to what the retry says, be that less than the job's.
#[test]
fn lines_with_smaller_limits_are_raised_too() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let line = |id: usize, tokens: &str| {
        let body = format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"My parcel is late.\"}}]{tokens}}}");
        format!(
            "{{\"custom_id\": \"{id}\", \"method\": \"POST\", \"url\": \"/v1/chat/completions\", \"body\": {body}}}\n"
        )
    };
    let lines = [
        line(0, ", \"max_tokens\": 2"),
        line(1, ", \"max_tokens\": 3"),
        line(2, ""),
    ];
    fs::write(folder.join("batch.jsonl"), lines.concat()).unwrap();
    let (job, output) = (folder.join("job.yaml"), folder.join("out"));
    let text = format!(
        "name: lines\nmodel: {}\nprecision: f32\ninput: {{uri: batch.jsonl}}\n\
         generate: {{max_tokens: 64, temperature: 0, ignore_eos: true}}\noutput: {{uri: out}}\n",
        root().join("jobs/demo/model").display()
    );
    fs::write(&job, text).unwrap();
    run(&["run", arg(&job), "--quiet"]).expect(0);
    let tokens = || seen(&output).iter().map(|row| row.tokens).collect::<Vec<_>>();
    assert_eq!(tokens(), [2, 3, 64]);
    run(&["retry", arg(&output), "--truncated", "--max-tokens", "40"]).expect(0);
    run(&["run", arg(&job), "--quiet"]).expect(0);
    assert_eq!(tokens(), [40, 40, 64]);
}

#[test]
fn lines_of_several_choices_are_truncated_where_one_is() {
    let folder = tempfile::tempdir().unwrap();
    let line = |row: usize| {
        let body = json!({"model": "m", "prompt": format!("ticket {row} ->")});
        json!({"custom_id": format!("r{row}"), "method": "POST", "url": "/v1/completions", "body": body})
    };
    let lines: Vec<String> = (0..40).map(|row| format!("{}\n", line(row))).collect();
    fs::write(folder.path().join("in.jsonl"), lines.concat()).unwrap();
    let job = folder.path().join("batch.yaml");
    let model = root().join("jobs/demo/model");
    let text = format!(
        "name: batch\nmodel: {}\nprecision: f32\ncontext: 128\ninput: {{uri: in.jsonl}}\n\
         generate: {{max_tokens: 5, n: 3, seed: 1}}\noutput: {{uri: out, format: openai}}\n",
        model.display()
    );
    fs::write(&job, text).unwrap();
    let output = folder.path().join("out");
    run(&["run", arg(&job), "--quiet"]).expect(0);
    let part = fs::read_to_string(output.join("part-00000.jsonl")).unwrap();
    let cut = |line: &str| -> Vec<bool> {
        let line: Value = serde_json::from_str(line).unwrap();
        let choices = line["response"]["body"]["choices"].as_array().unwrap();
        choices
            .iter()
            .map(|choice| choice["finish_reason"] == "length")
            .collect()
    };
    let cut: Vec<Vec<bool>> = part.lines().map(cut).collect();
    assert!(cut.iter().any(|row| !row[0] && row.contains(&true)), "{cut:?}");
    let rows = cut.iter().filter(|row| row.contains(&true)).count();
    let verified = run(&["verify", arg(&output), "--json"]).expect(0).json();
    assert_eq!(
        (&verified["holds"], &verified["truncated"]),
        (&true.into(), &rows.into())
    );
}

/// A retry of a job whose limits are reached is stopped at once: whoever begins it is told.
#[test]
fn a_retry_beyond_the_limits_is_warned_of() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = cut_job(folder.path(), "max_tokens: 6, temperature: 0");
    run(&["run", arg(&job), "--quiet"]).expect(3);
    let path = output.join("_gristmill/job.json");
    let mut record = read(&path);
    record["terms"]["deadline_seconds"] = 0.into();
    write(&path, &record);
    run(&["retry", arg(&output), "--truncated", "--max-tokens", "60"])
        .expect(0)
        .one_line(&["budget or deadline of job `small` is reached", "gristmill extend"]);
}

/// What an older gristmill did not count is looked at, and there may be nothing to do.
#[test]
fn a_retry_of_unknown_counts_may_find_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = cut_job(folder.path(), "max_tokens: 8, temperature: 0, choice: [a, b]");
    run(&["run", arg(&job), "--quiet"]).expect(3);
    for path in records(&output) {
        let mut record = read(&path);
        forget(&mut record);
        write(&path, &record);
    }
    let said = run(&["retry", arg(&output), "--truncated", "--max-tokens", "60"])
        .expect(0)
        .stdout;
    assert!(said.contains("has no truncated rows"), "{said}");
    assert!(!records(&output).iter().any(|path| arg(path).contains("/gen/")));
}
