//! The demo model that thinks: whole jobs, held against what transformers makes of the same tickets, token by token.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::commands::run;
use crate::support::{Run, arg, check_output, job_in, python, root};

fn fixture() -> Value {
    serde_json::from_str(include_str!("fixtures/thinking.json")).unwrap()
}

/// The example's job over the first 40 tickets, in a folder of its own, with `edit` applied.
fn job(folder: &Path, edit: impl Fn(String) -> String) -> (PathBuf, PathBuf) {
    const FIRST: &str = "import sys, pyarrow.parquet as pq\n\
        pq.write_table(pq.read_table(sys.argv[1]).slice(0, 40), sys.argv[2])";
    let (all, first) = (root().join("jobs/demo/tickets.parquet"), folder.join("first.parquet"));
    Run::of(Command::new(python()).args(["-c", FIRST, arg(&all), arg(&first)])).expect(0);
    job_in(folder, "label-tickets-thinking.yaml", |text| {
        let text = text.replace(arg(&all), arg(&first));
        edit(text.replace("carry: [ticket_id]}", "carry: [ticket_id], token_ids: true}"))
    })
}

/// All rows as pyarrow reads them; DuckDB reads the same.
fn rows(output: &Path) -> Vec<Value> {
    const READ: &str = r#"
import sys, json, duckdb, pyarrow.dataset as ds
rows = ds.dataset(sys.argv[1], format="parquet").to_table().to_pylist()
relation = duckdb.sql(f"select * from '{sys.argv[1]}/*.parquet' order by row")
names = [column[0] for column in relation.description]
assert [dict(zip(names, row)) for row in relation.fetchall()] == rows
print(json.dumps(rows))
"#;
    let read = Run::of(Command::new(python()).args(["-c", READ, arg(output)])).expect(0);
    serde_json::from_str(read.stdout.trim()).unwrap()
}

fn ids(value: &Value) -> Vec<u64> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap())
        .collect()
}

/// Runs a job and looks at each of its rows beside what the fixture has of the same ticket under `kind`.
#[track_caller]
fn hold(kind: &str, edit: impl Fn(String) -> String, look: impl Fn(&Value, &Value)) {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job(folder.path(), edit);
    run(&["run", arg(&job), "--quiet"]).expect(0);
    let fixture = fixture();
    let tickets = fixture["tickets"].as_array().unwrap();
    let rows = rows(&output);
    assert_eq!(rows.len(), tickets.len());
    for (row, ticket) in rows.iter().zip(tickets) {
        assert_eq!(row["ticket_id"], ticket["ticket_id"]);
        if kind != "silent" {
            assert_eq!(row["prompt_tokens"], ticket["prompt_tokens"], "{row}");
        }
        assert_eq!(row["status"], "succeeded", "{row}");
        assert_eq!(row["completion"], ticket[kind]["answer"], "{kind}: {row}");
        look(row, &ticket[kind]);
    }
}

/// Thought, tokens and answer of a shape: the tokens in front of the answer are the reference's.
fn is_shaped(row: &Value, of: &Value) {
    assert_eq!(row["reasoning"], of["thought"], "{row}");
    assert_eq!(row["parsed"], of["answer"]);
    let (found, expected) = (ids(&row["token_ids"]), ids(&of["ids"]));
    assert_eq!(found[..expected.len()], expected, "{row}");
    let close = expected.iter().position(|id| *id == 2049).unwrap();
    assert_eq!(row["reasoning_tokens"], json!(close - 1), "{row}");
}

#[test]
fn shapes_begin_behind_the_thought() {
    hold("shaped", |text| text, is_shaped);
}

/// Twelve tokens cut more than half of the thoughts.
#[test]
fn a_budget_ends_thoughts_at_the_same_token() {
    hold(
        "cut",
        |text| text.replace("max_tokens: 40", "max_tokens: 12"),
        |row, of| {
            is_shaped(row, of);
            // The line break that ends a thought counts with it.
            assert!(row["reasoning_tokens"].as_u64().unwrap() <= 13);
        },
    );
    let forced = fixture()["tickets"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|ticket| ticket["cut"]["forced"] == true)
        .count();
    assert!((10..40).contains(&forced), "{forced}");
}

#[test]
fn free_answers_are_told_apart_from_thoughts() {
    let free = |text: String| {
        let lines = text.lines().filter(|line| !line.contains("choice:"));
        lines.map(|line| format!("{line}\n")).collect()
    };
    hold("free", free, |row, of| {
        let mut expected = ids(&of["ids"]);
        // What ends a completion is no token of it.
        assert_eq!(expected.pop(), Some(2));
        assert_eq!(ids(&row["token_ids"]), expected, "{row}");
        assert_eq!(row["finish_reason"], "stop");
        assert!(!row["reasoning"].as_str().unwrap().contains("think>"));
    });
}

#[test]
fn a_template_that_closes_the_thought_asks_for_the_answer_alone() {
    let silent = |text: String| {
        text.replace(
            "generate:",
            "  chat_template_kwargs: {enable_thinking: false}\ngenerate:",
        )
    };
    hold("silent", silent, |row, _| {
        assert_eq!(
            (&row["reasoning"], &row["reasoning_tokens"]),
            (&Value::Null, &json!(0)),
            "{row}"
        );
    });
}

/// What a checkpoint forbids, a shape does not bring back: here the token that opens a thought.
#[test]
fn a_thought_that_may_not_begin_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    std::fs::create_dir(&model).unwrap();
    for entry in std::fs::read_dir(root().join("jobs/demo/thinking-model")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
    }
    let generation = json!({"eos_token_id": 2, "suppress_tokens": [2048]});
    std::fs::write(model.join("generation_config.json"), generation.to_string()).unwrap();
    let own = root().join("jobs/demo/thinking-model");
    let (job, output) = job(folder.path(), |text| text.replace(arg(&own), arg(&model)));
    run(&["run", arg(&job), "--quiet"]).expect(0);
    for row in rows(&output) {
        assert!(!ids(&row["token_ids"]).contains(&2048), "{row}");
        assert_eq!((&row["status"], &row["reasoning"]), (&json!("succeeded"), &Value::Null));
    }
}

/// How long a thinking model may write is settled by us, and is no change of its files.
#[test]
fn a_job_that_goes_on_is_not_told_of_our_own_defaults() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job(folder.path(), |text| text.replace("  max_tokens: 64\n", ""));
    run(&["submit", arg(&job), "--no-enqueue"]).expect(0);
    let ran = run(&["run", arg(&job), "--quiet"]).expect(0);
    assert_eq!(ran.stderr, "");
    assert_eq!(rows(&output).len(), 40);
}

/// The example as it stands. Without thoughts told apart, 563 of 2,000 labels were right, and all rows had succeeded.
#[test]
fn labels_all_tickets_with_a_thought() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job_in(folder.path(), "label-tickets-thinking.yaml", |text| text);
    let ran = run(&["run", arg(&job), "--json", "--quiet"]).expect(0).json();
    assert_eq!(ran["rows"]["succeeded"], 2000, "{ran}");
    let equal = ran["agreement"]["equal"].as_u64().unwrap();
    println!("{equal} of 2,000 as in the gold column; transformers: 1,906");
    assert!(equal.abs_diff(1906) <= 2, "{equal} of 2,000");
    check_output(&output, &root().join("jobs/demo/tickets.parquet"), "ticket_id");
    let rows = rows(&output);
    let mut tokens = rows.iter().map(|row| row["reasoning_tokens"].as_u64().unwrap());
    assert!(tokens.all(|tokens| (6..=32).contains(&tokens)));
    run(&["verify", arg(&output)]).expect(0);
}
