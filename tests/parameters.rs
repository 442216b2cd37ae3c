//! What a job file leaves open, through the built program: `${name}`, `${env:NAME}`, texts and schemas from files, a job file on standard
//! input; and what is said of a job file that has changed since its job began.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use serde_json::Value;

use crate::commands::run;
use crate::support::{Run, arg, gristmill, py, record, root};

const JOB: &str = "name: nightly-${date}
model: MODEL
precision: f32
context: 256
input: {uri: 'rows-${date}.jsonl'}
prompt: {text: 'On ${date}: {{ text }} costs ${{ price }} $${date} ->'}
generate: {max_tokens: '${tokens}', temperature: 0}
output: {uri: 'out/${date}/${env:GRISTMILL_TEST_TEAM}', carry: [id]}
shards: {rows: 4}
";

fn job_in(folder: &Path, text: &str) -> std::path::PathBuf {
    for date in ["2026-11-23", "2026-11-24"] {
        let line = |row: usize| format!("{{\"id\": {row}, \"text\": \"ticket {row}\", \"price\": {row}}}\n");
        fs::write(
            folder.join(format!("rows-{date}.jsonl")),
            (0..8).map(line).collect::<String>(),
        )
        .unwrap();
    }
    let job = folder.join("nightly.yaml");
    fs::write(&job, text.replace("MODEL", arg(&root().join("jobs/demo/model")))).unwrap();
    job
}

fn with_team(arguments: &[&str]) -> Run {
    Run::of(gristmill(arguments).env("GRISTMILL_TEST_TEAM", "red"))
}

#[test]
fn a_nightly_job_is_one_file_for_all_nights() {
    let folder = tempfile::tempdir().unwrap();
    let job = job_in(folder.path(), JOB);
    for date in ["2026-11-23", "2026-11-24"] {
        let set = format!("date={date}");
        let asked = ["run", arg(&job), "--set", &set, "--set", "tokens=2", "--quiet"];
        with_team(&asked).expect(0);
        let output = folder.path().join(format!("out/{date}/red"));
        let resolved = record(&output)["resolved"].clone();
        assert_eq!(resolved["name"], format!("nightly-{date}"));
        assert_eq!(resolved["generate"]["max_tokens"], 2);
        let text = format!("On {date}: {{{{ text }}}} costs ${{{{ price }}}} ${{date}} ->");
        assert_eq!(resolved["prompt"]["kind"]["text"], text);
        // Again: it is done; and the preview shows what rows become.
        with_team(&asked[..6]).expect(0);
        let planned = with_team(&["plan", arg(&job), "--set", &set, "--set", "tokens=2", "--preview", "1"]).expect(0);
        assert!(
            planned.stdout.contains(&format!("On {date}: ticket ")),
            "{}",
            planned.stdout
        );
        assert!(planned.stdout.contains(" ${date} ->"), "{}", planned.stdout);
        run(&["verify", arg(&output)]).expect(0);
    }
    assert_eq!(fs::read_dir(folder.path().join("out")).unwrap().count(), 2);
}

#[test]
fn what_is_missing_wrong_or_left_over_is_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let job = job_in(folder.path(), JOB);
    let plan = |set: &[&str]| {
        let set = set.iter().flat_map(|one| ["--set", one]);
        with_team(&["plan", arg(&job)].into_iter().chain(set).collect::<Vec<_>>()).expect(2)
    };
    plan(&[]).one_line(&[
        "nightly.yaml",
        "`name`: `${date}` has no value",
        "--set date=…",
        "$${date}",
    ]);
    plan(&["date=2026-11-24"]).one_line(&["`generate.max_tokens`: `${tokens}` has no value"]);
    plan(&["date=2026-11-24", "tokens=many"]).one_line(&["nightly.yaml: `generate.max_tokens`", "many"]);
    plan(&["date=2026-11-24", "tokens=2", "tokns=3"]).one_line(&["`--set tokns=…`", "did you mean `tokens`?"]);
    plan(&["date=2026-11-24", "date=2026-11-25", "tokens=2"]).one_line(&["`--set date=…` is given twice"]);
    plan(&["da-te=1"]).one_line(&["letters, digits and `_`"]);
    let bare = Run::of(&mut gristmill(&[
        "plan",
        arg(&job),
        "--set",
        "date=2026-11-24",
        "--set",
        "tokens=2",
    ]));
    bare.expect(2)
        .one_line(&["`output.uri`", "the environment has no `GRISTMILL_TEST_TEAM`"]);
    // A value adds no field, whatever stands in it.
    plan(&["date=x', format: openai, y: '", "tokens=2"]).one_line(&["rows-x', format: openai, y: '.jsonl"]);
}

#[test]
fn texts_and_schemas_come_from_files() {
    let folder = tempfile::tempdir().unwrap();
    let text = "name: files
model: MODEL
precision: f32
input: {uri: rows-2026-11-24.jsonl}
prompt:
  messages:
    - role: system
      content: {file: 'prompts/${lang}.txt'}
    - role: user
      content: [{type: text, text: {file: user.txt}}]
generate: {max_tokens: 40, temperature: 0, json_schema: {file: schema.json}}
output: {uri: out}
";
    let job = job_in(folder.path(), text);
    fs::create_dir(folder.path().join("prompts")).unwrap();
    fs::write(folder.path().join("prompts/en.txt"), "\u{FEFF}Sort in ${lang}.\n\n").unwrap();
    fs::write(folder.path().join("user.txt"), "{{ text }}\r\n").unwrap();
    let schema = r#"{"type": "object", "properties": {"id": {"type": "integer", "maximum": 9}}, "required": ["id"], "additionalProperties": false}"#;
    fs::write(folder.path().join("schema.json"), format!("\u{FEFF}{schema}\n")).unwrap();
    let asked = ["run", arg(&job), "--set", "lang=en", "--quiet"];
    run(&asked).expect(0);
    let output = folder.path().join("out");
    let resolved = record(&output)["resolved"].clone();
    let messages = &resolved["prompt"]["kind"]["messages"];
    assert_eq!(
        messages[0]["parts"][0], "Sort in en.\n",
        "one line break at the end is the editor's"
    );
    assert_eq!(messages[1]["parts"][0], "{{ text }}");
    let want: Value = serde_json::from_str(schema).unwrap();
    assert!(
        resolved["generate"].to_string().contains(&want.to_string()),
        "{resolved}"
    );
    // Another text is another job.
    fs::write(folder.path().join("prompts/en.txt"), "Sort all in ${lang}.\n").unwrap();
    run(&asked).expect(2).one_line(&[
        "belongs to job `files`",
        "`prompt.messages[0].content[0]` was \"Sort in en.\\n\" and is \"Sort all in en.\"",
        "output.uri",
    ]);
    fs::write(folder.path().join("schema.json"), "{").unwrap();
    run(&asked)
        .expect(2)
        .one_line(&["nightly.yaml", "`generate.json_schema.file`: `schema.json` is no JSON"]);
    fs::remove_file(folder.path().join("user.txt")).unwrap();
    run(&asked)
        .expect(2)
        .one_line(&["`prompt.messages[1].content[0].text.file`: cannot read `", "user.txt"]);
}

#[test]
fn a_job_file_comes_on_standard_input() {
    let folder = tempfile::tempdir().unwrap();
    let job = job_in(folder.path(), &JOB.replace("'${tokens}'", "1"));
    let mut child = gristmill(&["run", "-", "--set", "date=2026-11-24", "--quiet", "--json"]);
    child.current_dir(folder.path()).env("GRISTMILL_TEST_TEAM", "red");
    let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&fs::read(&job).unwrap()).unwrap();
    let done = child.wait_with_output().unwrap();
    assert!(done.status.success());
    let found: Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(found["rows"]["succeeded"], 8);
    assert!(folder.path().join("out/2026-11-24/red/_SUCCESS").exists());
    // The file beside it is the same job.
    with_team(&["run", arg(&job), "--set", "date=2026-11-24", "--quiet"]).expect(0);
}

#[test]
fn a_job_that_has_begun_goes_on_under_another_name() {
    let folder = tempfile::tempdir().unwrap();
    let text = JOB.replace("${env:GRISTMILL_TEST_TEAM}", "red");
    let job = job_in(folder.path(), &text);
    let set = ["--set", "date=2026-11-24", "--set", "tokens=1"];
    let submit = || run(&[&["submit", arg(&job), "--no-enqueue"][..], &set].concat());
    submit().expect(0);
    job_in(
        folder.path(),
        &text
            .replace("nightly-", "daily-")
            .replace("rows: 4", "rows: 2")
            .replace("out/", "./out/"),
    );
    let said = submit().expect(0);
    assert!(said.stderr.contains("the job goes on as it began"), "{}", said.stderr);
    assert!(
        said.stderr
            .contains("`name` was \"nightly-2026-11-24\" and is \"daily-2026-11-24\""),
        "{}",
        said.stderr
    );
    assert!(said.stderr.contains("`shards.rows` was 4 and is 2"), "{}", said.stderr);
    let output = folder.path().join("out/2026-11-24/red");
    assert_eq!(
        run(&["status", arg(&output), "--json"]).expect(0).json()["shards"]["total"],
        2
    );
    job_in(
        folder.path(),
        &text.replace("temperature: 0", "temperature: 0.5, seed: 3"),
    );
    submit().expect(2).one_line(&[
        "belongs to job `nightly-2026-11-24`",
        "`generate.seed` was left out and is 3",
        "`generate.temperature` was 0.0 and is 0.5",
    ]);
}

#[test]
fn what_is_to_be_run_next_is_written_for_a_shell() {
    let folder = tempfile::tempdir().unwrap();
    let text = JOB.replace("${env:GRISTMILL_TEST_TEAM}", "red team");
    let job = job_in(folder.path(), &text);
    let strange = folder.path().join("it's.yaml");
    fs::rename(&job, &strange).unwrap();
    let said = run(&[
        "submit",
        arg(&strange),
        "--no-enqueue",
        "--set",
        "date=2026-11-24",
        "--set",
        "tokens=1",
    ])
    .expect(0);
    let next = said
        .stdout
        .lines()
        .find_map(|line| line.split_once("on this machine: gristmill "))
        .unwrap()
        .1;
    let line = format!("{} {next} --quiet", env!("CARGO_BIN_EXE_gristmill"));
    let done = std::process::Command::new("sh").args(["-c", &line]).status().unwrap();
    assert!(done.success(), "{line}");
    assert!(folder.path().join("out/2026-11-24/red team/_SUCCESS").exists());
}

/// Typed answers of all nights by DuckDB, beside the column that is the folder's name.
const NIGHTS: &str = r#"
import duckdb
answers = duckdb.sql("from 'out/*/*.parquet'")
types = dict(zip(answers.columns, map(str, answers.types)))
assert types["date"] == "VARCHAR" and types["brief_id"] == "BIGINT", types
assert types["parsed"] == "STRUCT(subject VARCHAR, body VARCHAR, urgency VARCHAR)", types
found = duckdb.sql("select date, brief_id, parsed.urgency, parsed.subject, filename from read_parquet('out/*/*.parquet', filename = true) order by 1, 2").fetchall()
assert [r[:2] for r in found] == [(f"2026-11-{23 + n // 24}", n + 1) for n in range(48)], found
assert all(r[2] in ("low", "normal", "high") and r[3] is not None and f"/{r[0]}/" in r[4] for r in found), found
"#;

#[test]
fn the_nightly_example_runs_for_two_nights() {
    let folder = tempfile::tempdir().unwrap();
    let demo = format!("{}/", root().join("jobs/demo").display());
    let text = fs::read_to_string(root().join("jobs/nightly.yaml")).unwrap();
    let text = text.replace("demo/", &demo).replace("../out/nightly/", "out/");
    let job = folder.path().join("nightly.yaml");
    fs::write(&job, text).unwrap();
    let night = |command: &str, date: &str| run(&[command, arg(&job), "--set", &format!("date={date}"), "--json"]);
    for date in ["2026-11-23", "2026-11-24"] {
        let found = night("run", date).expect(0).json();
        assert_eq!(found["rows"]["succeeded"], 24, "{found}");
        assert_eq!(found["job"], format!("nightly-{date}"));
        assert!(
            found["output"].as_str().unwrap().ends_with(&format!("/out/{date}")),
            "{found}"
        );
        let planned = night("plan", date).expect(0).json();
        assert!(
            planned["parsed"]["type"].as_str().unwrap().contains("urgency"),
            "{planned}"
        );
        run(&["verify", arg(&folder.path().join("out").join(date)), "--inputs"]).expect(0);
        // As a scheduler does that tries again.
        assert!(night("run", date).expect(0).stderr.contains("already done"));
    }
    py(folder.path(), NIGHTS);
    // A night without a folder is no night without tickets.
    night("run", "2026-11-25")
        .expect(2)
        .one_line(&["date=2026-11-25/`: the folder is missing"]);
    night("run", "2026-11-2/4").expect(2);
    assert_eq!(fs::read_dir(folder.path().join("out")).unwrap().count(), 2);
}
