//! The files in `schemas/` are current, and what a real job writes conforms to them.

use std::path::Path;
use std::process::Command;

use gristmill::dataset::output::OutputSchema;
use gristmill::job::JobFile;
use gristmill::ledger;
use gristmill::queue::Message;

use crate::commands::{run, small_job};
use crate::support::{Run, arg, python, root};

/// `GRISTMILL_WRITE_SCHEMAS=1 cargo test --profile checked --features faults --test all schemas` writes them anew.
#[test]
fn the_schemas_are_current() {
    for (name, schema) in [
        ("job", JobFile::schema()),
        ("message", Message::schema()),
        ("ledger", ledger::schema::schema()),
        ("output", OutputSchema::json_schema()),
    ] {
        let path = root().join(format!("schemas/{name}.schema.json"));
        let current = format!("{}\n", serde_json::to_string_pretty(&schema).unwrap());
        if std::env::var_os("GRISTMILL_WRITE_SCHEMAS").is_some() {
            std::fs::write(&path, &current).unwrap();
        }
        let written = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            written == current,
            "{} is out of date: run this test with GRISTMILL_WRITE_SCHEMAS=1",
            path.display()
        );
    }
}

#[test]
fn every_field_of_a_job_file_is_described() {
    let schema = JobFile::schema();
    let definitions = schema["$defs"].as_object().unwrap().values();
    for (name, field) in definitions
        .chain([&schema])
        .filter_map(|d| d["properties"].as_object())
        .flatten()
    {
        let described =
            field.get("description").is_some() || field.get("$ref").is_some() || name == "text" || name == "type";
        assert!(described, "`{name}` has no description");
    }
}

#[test]
fn what_a_job_writes_conforms() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = small_job(folder.path(), &[3, 17]);
    let job_text = std::fs::read_to_string(&job).unwrap();
    std::fs::write(&job, format!("{job_text}budget: {{usd: 9, usd_per_hour: 1}}\n")).unwrap();
    run(&["submit", arg(&job), "--no-enqueue"]).expect(0);
    run(&["extend", arg(&output), "--usd", "10"]).expect(0);
    run(&["extend", arg(&output), "--deadline", "9h"]).expect(0);
    run(&["run", arg(&job), "--quiet"]).expect(3);
    let conforms = |minimum: usize| {
        let checker = root().join("tests/check_schemas.py");
        let said = Run::of(Command::new(python()).arg(checker).arg(&output))
            .expect(0)
            .stdout;
        let records: usize = said.split_whitespace().next().unwrap().parse().unwrap();
        assert!(records >= minimum, "{said}");
    };
    // 10 shards with an attempt, a log record and a commit each; a digest, two orders, a spending, job and success.
    conforms(36);
    run(&["retry", arg(&output)]).expect(0);
    run(&["run", arg(&job), "--quiet"]).expect(3);
    // Two shards whose rows never reach the device; the retry, a digest, another worker's spending.
    conforms(36 + 2 * 2 + 3);
    let message = Message::new("0123456789abcdef0123", "s3://bucket/out", 1, 7)
        .encode()
        .unwrap();
    let text = folder.path().join("message.json");
    std::fs::write(&text, message).unwrap();
    let checker = root().join("tests/check_schemas.py");
    Run::of(Command::new(python()).arg(&checker).arg("--message").arg(&text)).expect(0);
    // It does find what does not conform.
    std::fs::write(Path::new(&output).join("_gristmill/other.json"), "{\"v\": 1}\n").unwrap();
    let found = Run::of(Command::new(python()).arg(&checker).arg(&output)).expect(1);
    assert!(found.stdout.contains("other.json"), "{}", found.stdout);
}
