//! Inputs that were planned and are something else, elsewhere or nowhere when the job goes on.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use serde_json::Value;

use crate::commands::{run, small_job};
use crate::support::{Run, arg, python, root};

/// Puts `bytes` in the place of the file, as a restored backup is: another inode, another time.
fn replace(path: &Path, bytes: &[u8]) {
    let other = path.with_extension("other");
    fs::write(&other, bytes).unwrap();
    let later = SystemTime::now() + Duration::from_secs(5);
    fs::File::options()
        .write(true)
        .open(&other)
        .unwrap()
        .set_modified(later)
        .unwrap();
    fs::rename(&other, path).unwrap();
}

/// Puts a copy of itself in the place of the file.
fn restore(path: &Path) {
    replace(path, &fs::read(path).unwrap());
}

fn status(output: &Path) -> Value {
    run(&["status", arg(output), "--json"]).expect(0).json()
}

/// The orders that were given, oldest first.
fn orders(output: &Path) -> Vec<Value> {
    let ledger = output.join("_gristmill");
    let job: Value = serde_json::from_slice(&fs::read(ledger.join("job.json")).unwrap()).unwrap();
    let control = ledger.join(job["job"].as_str().unwrap()).join("control");
    let Ok(entries) = fs::read_dir(control) else {
        return Vec::new();
    };
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let read = |path: &PathBuf| serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    paths.iter().map(read).collect()
}

/// Runs Python over the output; `look` sees `rows`, its rows in order as dictionaries.
fn look(output: &Path, script: &str) {
    let read = "import sys, pyarrow.parquet as pq\nrows = pq.read_table(sys.argv[1]).sort_by('row').to_pylist()\n";
    let script = format!("{read}{script}");
    Run::of(Command::new(python()).args(["-c", &script, arg(output)])).expect(0);
}

/// [`small_job`] over a Parquet file of the same rows.
fn parquet_job(folder: &Path) -> (PathBuf, PathBuf) {
    let (job, output) = small_job(folder, &[]);
    let script = "import sys, pyarrow.json as j, pyarrow.parquet as pq\n\
                  pq.write_table(j.read_json(sys.argv[1] + '/rows.jsonl'), sys.argv[1] + '/rows.parquet')";
    Run::of(Command::new(python()).args(["-c", script, arg(folder)])).expect(0);
    let text = fs::read_to_string(&job).unwrap().replace("rows.jsonl", "rows.parquet");
    fs::write(&job, text).unwrap();
    (job, output)
}

#[test]
fn the_same_bytes_under_another_etag_are_pinned_anew() {
    for (make, input) in [
        (small_job as fn(&Path, &[usize]) -> (PathBuf, PathBuf), "rows.jsonl"),
        (|folder, _| parquet_job(folder), "rows.parquet"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let (job, output) = make(folder.path(), &[]);
        let input = folder.path().join(input);
        run(&["submit", arg(&job), "--no-enqueue"]).expect(0);
        restore(&input);
        // Looking pins nothing.
        let planned = run(&["plan", arg(&job), "--json"]).expect(0).json();
        assert_eq!(planned["changed_inputs"], Value::Array(vec![]), "{planned}");
        assert_eq!(orders(&output), [] as [Value; 0]);
        run(&["run", arg(&job), "--quiet"]).expect(0);
        run(&["verify", arg(&output)]).expect(0);
        look(&output, "assert [r['id'] for r in rows] == list(range(40)), rows");
        let given = orders(&output);
        assert_eq!(given.len(), 1, "one order, whoever reads how many shards: {given:?}");
        assert_eq!((&given[0]["order"], &given[0]["v"]), (&"pin".into(), &3.into()));
        assert_eq!(given[0]["size"], fs::metadata(&input).unwrap().len());
        assert_eq!(status(&output)["pinned_anew"], Value::from(vec![arg(&input)]));
        let shown = run(&["status", arg(&output)]).expect(0).stdout;
        assert!(shown.contains("was pinned anew"), "{shown}");
    }
}

/// Planning reads nothing behind a limit, but the hash is that of the whole file.
#[test]
fn the_same_bytes_behind_a_limit_are_pinned_anew() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = small_job(folder.path(), &[]);
    let text = fs::read_to_string(&job).unwrap();
    fs::write(&job, text.replace("uri: rows.jsonl", "uri: rows.jsonl, limit: 3")).unwrap();
    let input = folder.path().join("rows.jsonl");
    // More than planning reads at once.
    let behind = format!("{{\"id\": 40, \"text\": \"{}\"}}\n", "word ".repeat(400)).repeat(10_000);
    let rows = fs::read_to_string(&input).unwrap() + &behind;
    fs::write(&input, rows).unwrap();
    run(&["submit", arg(&job), "--no-enqueue"]).expect(0);
    restore(&input);
    run(&["run", arg(&job), "--quiet"]).expect(0);
    run(&["verify", arg(&output)]).expect(0);
    look(&output, "assert [r['id'] for r in rows] == [0, 1, 2], rows");
    assert_eq!(orders(&output).len(), 1);
}

#[test]
fn what_one_worker_pinned_no_other_has_to_hash() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = small_job(folder.path(), &[]);
    let input = folder.path().join("rows.jsonl");
    run(&["submit", arg(&job), "--no-enqueue"]).expect(0);
    restore(&input);
    let record = output.join("_gristmill/job.json");
    let text = fs::read_to_string(&record).unwrap();
    let id: Value = serde_json::from_str(&text).unwrap();
    let id = id["job"].as_str().unwrap().to_string();
    let etag = {
        // As another worker found it: planned once more, elsewhere.
        let other = folder.path().join("other.yaml");
        fs::write(
            &other,
            fs::read_to_string(&job).unwrap().replace("uri: out", "uri: other"),
        )
        .unwrap();
        run(&["submit", arg(&other), "--no-enqueue"]).expect(0);
        let record = fs::read(folder.path().join("other/_gristmill/job.json")).unwrap();
        let record: Value = serde_json::from_slice(&record).unwrap();
        record["inputs"][0]["etag"].as_str().unwrap().to_string()
    };
    // A hash that no bytes have: whoever hashes refuses.
    let planned: Value = serde_json::from_str(&text).unwrap();
    let hash = planned["inputs"][0]["sha256"].as_str().unwrap();
    fs::write(&record, text.replace(hash, &"0".repeat(64))).unwrap();
    let control = output.join("_gristmill").join(&id).join("control");
    fs::create_dir_all(&control).unwrap();
    let pin = serde_json::json!({"v": 3, "job": id, "index": 0, "nonce": id, "order": "pin", "input": 0,
        "size": fs::metadata(&input).unwrap().len(), "etag": etag});
    fs::write(control.join("000.json"), pin.to_string()).unwrap();
    run(&["run", arg(&job), "--quiet"]).expect(0);
    assert_eq!(orders(&output).len(), 1);
}

#[test]
fn other_bytes_and_plans_without_a_hash_stop_the_job() {
    for has_hash in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let (job, output) = small_job(folder.path(), &[]);
        let input = folder.path().join("rows.jsonl");
        run(&["submit", arg(&job), "--no-enqueue"]).expect(0);
        let good = fs::read(&input).unwrap();
        if has_hash {
            let other = String::from_utf8(good.clone()).unwrap().replace("ticket 7", "ticket 8");
            assert_eq!(other.len(), good.len());
            replace(&input, other.as_bytes());
        } else {
            let record = output.join("_gristmill/job.json");
            let mut job: Value = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
            job["inputs"][0].as_object_mut().unwrap().remove("sha256").unwrap();
            fs::write(&record, job.to_string()).unwrap();
            restore(&input);
        }
        let why = if has_hash { "its SHA-256 was" } else { "has no hash" };
        let planned = run(&["plan", arg(&job)]).expect(0);
        planned.one_line(&["warning", "`run` will not go on", "rows.jsonl", why]);
        run(&["run", arg(&job), "--quiet"])
            .expect(2)
            .one_line(&["rows.jsonl", "is not what it was", why]);
        assert!(!output.join("part-00000.parquet").exists());
        if has_hash {
            // Its bytes again, under yet another ETag: it goes on.
            replace(&input, &good);
            run(&["run", arg(&job), "--quiet"]).expect(0);
            run(&["verify", arg(&output)]).expect(0);
            assert_eq!(run(&["plan", arg(&job)]).expect(0).stderr, "");
        }
    }
}

#[test]
fn a_trial_hashes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (job, _) = small_job(folder.path(), &[]);
    let tried = run(&["submit", arg(&job), "--no-enqueue", "--limit", "3", "--json"])
        .expect(0)
        .json();
    let output = tried["output"].as_str().unwrap().trim_start_matches("file://");
    let record: Value =
        serde_json::from_slice(&fs::read(Path::new(output).join("_gristmill/job.json")).unwrap()).unwrap();
    assert!(record["inputs"][0].get("sha256").is_none(), "{}", record["inputs"]);
}

/// `verify --inputs` holds, and says that so many rows have none of their input's columns.
fn verified_without_columns(output: &Path, rows: u64) {
    let said = run(&["verify", arg(output), "--inputs"]).expect(0).stdout;
    let words = format!("but for {rows}, closed when nobody could read these");
    assert!(said.contains(&words), "{said}");
    let json = run(&["verify", arg(output), "--inputs", "--json"]).expect(0).json();
    assert_eq!(json["rows_without_columns"], rows, "{json}");
}

#[test]
fn a_job_whose_input_is_gone_can_be_ended() {
    for make in [
        (|folder: &Path| small_job(folder, &[])) as fn(&Path) -> (PathBuf, PathBuf),
        parquet_job,
    ] {
        let folder = tempfile::tempdir().unwrap();
        let (job, output) = make(folder.path());
        run(&["submit", arg(&job), "--no-enqueue"]).expect(0);
        for name in ["rows.jsonl", "rows.parquet"] {
            let _ = fs::remove_file(folder.path().join(name));
        }
        run(&["run", arg(&job), "--quiet"])
            .expect(2)
            .one_line(&["is not there"]);
        run(&["cancel", arg(&output), "--finish"]).expect(0);
        run(&["run", arg(&job), "--quiet"]).expect(3);
        run(&["verify", arg(&output)]).expect(0);
        look(
            &output,
            "assert [r['row'] for r in rows] == list(range(40))\n\
             assert all(r['id'] is None and r['status'] == 'cancelled' for r in rows), rows\n\
             assert all('is not there' in r['error'] for r in rows), rows[0]",
        );
        // With inputs that are there again, null is no difference to them: the rows say why.
        make(folder.path());
        verified_without_columns(&output, 40);
    }
}

#[test]
fn a_deadline_ends_a_job_whose_input_changed() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = small_job(folder.path(), &[]);
    let text = fs::read_to_string(&job).unwrap();
    fs::write(&job, format!("{text}budget: {{deadline: 1s, unfinished: expire}}\n")).unwrap();
    run(&["submit", arg(&job), "--no-enqueue"]).expect(0);
    replace(&folder.path().join("rows.jsonl"), b"{}\n");
    std::thread::sleep(Duration::from_millis(1100));
    run(&["run", arg(&job), "--quiet"]).expect(3);
    run(&["verify", arg(&output)]).expect(0);
    look(
        &output,
        "assert {(r['id'], r['status']) for r in rows} == {(None, 'expired')}, rows",
    );
}

#[test]
fn lines_of_rows_nobody_can_read_have_no_made_up_id() {
    let folder = tempfile::tempdir().unwrap();
    // Their ids are of the form that rows without one would get.
    let line = |row: usize| {
        let body = r#"{"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}"#;
        format!(
            "{{\"custom_id\": \"row-{}\", \"method\": \"POST\", \"url\": \"/v1/chat/completions\", \"body\": {body}}}\n",
            row + 1
        )
    };
    let input = folder.path().join("in.jsonl");
    fs::write(&input, (0..3).map(line).collect::<String>()).unwrap();
    let job = folder.path().join("batch.yaml");
    let text = format!(
        "name: batch\nmodel: {}\nprecision: f32\ninput: {{uri: in.jsonl}}\noutput: {{uri: out, format: openai}}\n",
        root().join("jobs/demo/model").display()
    );
    fs::write(&job, text).unwrap();
    let output = folder.path().join("out");
    run(&["submit", arg(&job), "--no-enqueue"]).expect(0);
    fs::remove_file(&input).unwrap();
    run(&["cancel", arg(&output), "--finish"]).expect(0);
    run(&["run", arg(&job), "--quiet"]).expect(3);
    run(&["verify", arg(&output)]).expect(0);
    let lines = fs::read_to_string(output.join("part-00000.jsonl")).unwrap();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 3);
    for (row, line) in lines.iter().enumerate() {
        assert_eq!(line["custom_id"], Value::Null, "{line}");
        assert!(
            line.as_object().unwrap().contains_key("custom_id"),
            "readers index by it"
        );
        assert!(line["id"].as_str().unwrap().ends_with(&format!("_{row}")), "{line}");
        assert_eq!(line["error"]["code"], "cancelled", "{line}");
    }
    fs::write(&input, (0..3).map(line).collect::<String>()).unwrap();
    verified_without_columns(&output, 3);
    // Null alone says nothing.
    let part = output.join("part-00000.jsonl");
    let text = fs::read_to_string(&part).unwrap();
    fs::write(
        &part,
        text.replacen("its columns are not there", "its columns are there", 1),
    )
    .unwrap();
    let said = run(&["verify", arg(&output), "--inputs"]).expect(1).stderr;
    assert!(said.contains("`custom_id` of row 0 is not its input's"), "{said}");
}

/// A nightly job whose file and addresses stay the same must not seem to have run.
#[test]
fn a_job_that_is_done_is_not_done_with_other_inputs() {
    for through_glob in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let (job, output) = small_job(folder.path(), &[]);
        let input = folder.path().join("rows.jsonl");
        if through_glob {
            let text = fs::read_to_string(&job).unwrap().replace("rows.jsonl", "'rows*.jsonl'");
            fs::write(&job, text).unwrap();
        }
        run(&["run", arg(&job), "--quiet"]).expect(0);
        let bytes = fs::read(&input).unwrap();
        let published = fs::read(output.join("_SUCCESS")).unwrap();
        let commands = [&["run", arg(&job)][..], &["submit", arg(&job), "--no-enqueue"]];
        let done = || {
            for command in commands {
                let said = run(command).expect(0).stderr;
                assert!(said.contains("is already done"), "{said}");
            }
        };
        let planned = || run(&["plan", arg(&job), "--json"]).expect(0).json()["warnings"].to_string();
        let refused = |why: &str| {
            for command in commands {
                let said = run(command).expect(2).stderr;
                assert!(
                    said.contains("is done, but not of its inputs as they are now"),
                    "{said}"
                );
                assert!(said.contains(why) && said.contains("another `output.uri`"), "{said}");
            }
            let said = planned();
            assert!(
                said.contains("`run` will refuse this job: ") && said.contains(why),
                "{said}"
            );
        };
        restore(&input);
        done();
        assert_eq!(planned(), "[]");
        let mut other = bytes.clone();
        let at = other.iter().position(|byte| byte.is_ascii_digit()).unwrap();
        other[at] = b'7';
        replace(&input, &other);
        refused("its SHA-256 was ");
        replace(&input, &bytes[..bytes.len() / 2]);
        refused(&format!("it had {} bytes", bytes.len()));
        replace(&input, &bytes);
        done();
        let more = folder.path().join("rows-2.jsonl");
        fs::write(&more, &bytes).unwrap();
        if through_glob {
            refused("rows-2.jsonl` has come since")
        } else {
            done()
        }
        // Inputs are often removed when they are done with.
        fs::remove_file(&more).unwrap();
        fs::remove_file(&input).unwrap();
        done();
        assert_eq!(fs::read(output.join("_SUCCESS")).unwrap(), published);
    }
}

/// `run` alone tells as much as workers do: the job is stopped, and whoever watches it hears why.
#[test]
fn run_stops_a_job_whose_input_changed() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = small_job(folder.path(), &[]);
    let input = folder.path().join("rows.jsonl");
    run(&["submit", arg(&job), "--no-enqueue"]).expect(0);
    let bytes = fs::read(&input).unwrap();
    let other = String::from_utf8(bytes.clone())
        .unwrap()
        .replace("ticket 7", "ticket x");
    replace(&input, other.as_bytes());
    let said = run(&["run", arg(&job), "--quiet"]).expect(2).stderr;
    assert!(
        said.contains("its SHA-256 was ") && said.contains("restore it"),
        "{said}"
    );
    let seen = status(&output);
    assert_eq!(seen["state"], "input_changed", "{seen}");
    assert!(seen["note"].as_str().unwrap().contains("rows.jsonl"), "{seen}");
    run(&["watch", arg(&output)]).expect(2);
    replace(&input, &bytes);
    run(&["run", arg(&job), "--quiet"]).expect(0);
    run(&["verify", arg(&output), "--inputs"]).expect(0);
}

/// A made-up id could be that of another row.
#[test]
fn lines_without_an_id_get_none() {
    let folder = tempfile::tempdir().unwrap();
    let body = r#"{"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}"#;
    let line =
        |id: &str| format!("{{{id}\"method\": \"POST\", \"url\": \"/v1/chat/completions\", \"body\": {body}}}\n");
    let lines = [line("\"custom_id\": \"row-1\", "), line(""), "no line\n".to_string()];
    fs::write(folder.path().join("in.jsonl"), lines.concat()).unwrap();
    let job = folder.path().join("batch.yaml");
    let text = format!(
        "name: batch\nmodel: {}\nprecision: f32\ninput: {{uri: in.jsonl, format: openai_batch}}\noutput: {{uri: out, format: openai}}\n",
        root().join("jobs/demo/model").display()
    );
    fs::write(&job, text).unwrap();
    run(&["run", arg(&job), "--quiet"]).expect(3);
    let output = folder.path().join("out");
    run(&["verify", arg(&output), "--inputs"]).expect(0);
    let lines = fs::read_to_string(output.join("part-00000.jsonl")).unwrap();
    let ids: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["custom_id"].clone())
        .collect();
    assert_eq!(ids, ["row-1".into(), Value::Null, Value::Null]);
}
