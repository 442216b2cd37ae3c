//! Jobs of a model that thinks, through the built program: what it says, what it writes, and what others read.
//!
//! The model is the demo's with two of its control tokens renamed: it never learned to think, so what it thinks is nonsense, and
//! thoughts are ended by force.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::commands::run;
use crate::support::{Run, arg, gristmill, python, root};

const TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\
    {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}\
    {% if thought == 'open' %}{{ '<think>\\n' }}{% elif thought == 'closed' %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}";

/// The demo model as one that thinks.
fn model(folder: &Path) -> PathBuf {
    let (demo, model) = (root().join("jobs/demo/model"), folder.join("model"));
    fs::create_dir(&model).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(demo.join(name), model.join(name)).unwrap();
    }
    let tokenizer = fs::read_to_string(demo.join("tokenizer.json")).unwrap();
    let tokenizer = tokenizer
        .replace("<|endoftext|>", "<think>")
        .replace("<|pad|>", "</think>");
    fs::write(model.join("tokenizer.json"), tokenizer).unwrap();
    let config = json!({"eos_token": "<|im_end|>", "chat_template": TEMPLATE});
    fs::write(model.join("tokenizer_config.json"), config.to_string()).unwrap();
    fs::write(model.join("generation_config.json"), "{\"eos_token_id\": 2}").unwrap();
    model
}

/// A job over twelve rows; `generate` and `more` are YAML.
fn job(folder: &Path, thought: &str, generate: &str, more: &str) -> (PathBuf, PathBuf) {
    let model = folder.join("model");
    if !model.exists() {
        self::model(folder);
    }
    let lines = (0..12).map(|row| format!("{{\"id\": {row}, \"text\": \"My parcel number {row} is late.\"}}\n"));
    fs::write(folder.join("rows.jsonl"), lines.collect::<String>()).unwrap();
    let text = format!(
        "name: thinks\nmodel: model\nprecision: f32\ninput: {{uri: rows.jsonl}}\nprompt:\n  messages: [{{role: user, content: '{{{{ text }}}}'}}]\n  \
         chat_template_kwargs: {{thought: {thought}}}\ngenerate: {generate}\nshards: {{rows: 4}}\n{more}\n"
    );
    let path = folder.join("job.yaml");
    fs::write(&path, text).unwrap();
    (path, folder.join("out"))
}

const OUTPUT: &str = "output: {uri: out, carry: [id], token_ids: true}";

/// All rows, read by pyarrow; DuckDB sees the same.
fn rows(output: &Path) -> Vec<Value> {
    const READ: &str = r#"
import sys, json, duckdb, pyarrow.dataset as ds
table = ds.dataset(sys.argv[1], format="parquet").to_table()
rows = table.to_pylist()
relation = duckdb.sql(f"select * from '{sys.argv[1]}/*.parquet' order by row")
names = [column[0] for column in relation.description]
assert names == table.column_names, (names, table.column_names)
assert [dict(zip(names, row)) for row in relation.fetchall()] == rows
if "reasoning" in names:
    kinds = {field.name: str(field.type) for field in table.schema}
    assert kinds["reasoning_tokens"] == "int64" and kinds["reasoning"] in ("string", "list<item: string>", "list<element: string>"), kinds
    at = names.index("completion_tokens")
    assert names[at + 1:at + 3] == ["reasoning", "reasoning_tokens"], names
print(json.dumps(rows))
"#;
    let read = Run::of(Command::new(python()).args(["-c", READ, arg(output)])).expect(0);
    serde_json::from_str(read.stdout.trim()).unwrap()
}

#[test]
fn thoughts_have_columns_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let generate = "{temperature: 0, ignore_eos: false, thinking: {max_tokens: 1, end_text: ' Enough.'}, choice: [billing, shipping_delay]}";
    let (job, output) = job(folder.path(), "open", generate, OUTPUT);
    let planned = run(&["plan", arg(&job)]).expect(0).stdout;
    let line = planned
        .lines()
        .find(|line| line.starts_with("thinking"))
        .expect("a line says it");
    for words in [
        "`<think>` … `</think>`",
        "the prompt opens the thought",
        "of 1 token at most",
    ] {
        assert!(line.contains(words), "{line}");
    }
    let planned = run(&["plan", arg(&job), "--json"]).expect(0).json();
    assert_eq!(planned["thinking"]["begins"], "opened by the prompt");
    let most = planned["sampling"]["max_tokens"]["value"].as_u64().unwrap();
    assert!(
        line.contains(&format!("up to {most} tokens for thought and answer")),
        "{line}"
    );
    let ran = Run::of(&mut gristmill(&["run", arg(&job)])).expect(0);
    assert!(
        ran.stderr.contains("thinking: `<think>` … `</think>`"),
        "{}",
        ran.stderr
    );
    let rows = rows(&output);
    assert_eq!(rows.len(), 12);
    for row in &rows {
        let answer = row["completion"].as_str().unwrap();
        assert!(["billing", "shipping_delay"].contains(&answer), "{row}");
        assert_eq!((&row["status"], &row["parsed"]), (&"succeeded".into(), &answer.into()));
        assert!(row["reasoning"].as_str().unwrap().ends_with("Enough."), "{row}");
        let tokens: Vec<u64> = row["token_ids"]
            .as_array()
            .unwrap()
            .iter()
            .map(|id| id.as_u64().unwrap())
            .collect();
        assert_eq!(row["completion_tokens"], tokens.len() as u64);
        let close = tokens.iter().position(|id| *id == 3).expect("the closing delimiter");
        assert_eq!(row["reasoning_tokens"], close as u64, "{row}");
    }
    // The same rows again: a job that goes on, and a recheck, find what there is.
    Run::of(&mut gristmill(&["verify", arg(&output)])).expect(0);
    let again = run(&["run", arg(&job), "--quiet"]).expect(0);
    assert!(!again.stderr.contains("thinking"), "{}", again.stderr);
}

#[test]
fn a_closed_thought_is_none_and_a_thought_without_end_is_no_answer() {
    let folder = tempfile::tempdir().unwrap();
    let (closed, output) = job(
        folder.path(),
        "closed",
        "{temperature: 0, choice: [billing, shipping_delay]}",
        OUTPUT,
    );
    run(&["run", arg(&closed), "--quiet"]).expect(0);
    for row in rows(&output) {
        assert_eq!(
            (&row["reasoning"], &row["reasoning_tokens"]),
            (&Value::Null, &json!(0)),
            "{row}"
        );
        assert_eq!(row["status"], "succeeded");
    }
    let generate = "{temperature: 0, max_tokens: 6, ignore_eos: true}";
    let (endless, output) = job(folder.path(), "open", generate, "output: {uri: endless}");
    let output = output.with_file_name("endless");
    run(&["run", arg(&endless), "--quiet"]).expect(3);
    for row in rows(&output) {
        assert_eq!(
            (&row["status"], &row["finish_reason"]),
            (&"invalid_output".into(), &"length".into())
        );
        assert_eq!((&row["completion"], &row["reasoning_tokens"]), (&"".into(), &json!(6)));
        assert!(
            row["error"].as_str().unwrap().contains("ended inside its thought"),
            "{row}"
        );
    }
    // Several samples a row are lists.
    let generate = "{n: 2, seed: 3, max_tokens: 20, thinking: {max_tokens: 2}}";
    let (many, output) = job(folder.path(), "open", generate, "output: {uri: many}");
    let output = output.with_file_name("many");
    let code = run(&["run", arg(&many), "--quiet"]).code;
    assert!(matches!(code, Some(0 | 3)), "samples may end inside their thoughts");
    for row in rows(&output) {
        assert_eq!(row["reasoning"].as_array().unwrap().len(), 2, "{row}");
        assert!(row["reasoning_tokens"].is_u64(), "{row}");
    }
}

#[test]
fn openai_results_hold_thoughts_apart() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    let line = |id: &str, more: Value| {
        let mut body = json!({"model": "any", "messages": [{"role": "user", "content": "My parcel is late"}],
            "chat_template_kwargs": {"thought": "open"}, "temperature": 0, "guided_choice": ["billing", "other"]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let line = json!({"custom_id": id, "method": "POST", "url": "/v1/chat/completions", "body": body});
        format!("{line}\n")
    };
    let lines = [
        line("one", json!({"thinking_token_budget": 1})),
        line("none", json!({"chat_template_kwargs": {"thought": "closed"}})),
        line("tight", json!({"thinking_token_budget": 30, "max_tokens": 20})),
    ];
    fs::write(folder.path().join("in.jsonl"), lines.concat()).unwrap();
    let job = folder.path().join("job.yaml");
    let text = format!(
        "name: batch\nmodel: {}\ninput: {{uri: in.jsonl}}\noutput: {{uri: out, format: openai}}\n",
        model.display()
    );
    fs::write(&job, text).unwrap();
    let ran = Run::of(&mut gristmill(&["run", arg(&job)])).expect(3);
    assert!(
        ran.stderr.contains("each prompt says whether it opens the thought"),
        "{}",
        ran.stderr
    );
    let results = fs::read_to_string(folder.path().join("out/part-00000.jsonl")).unwrap();
    let results: Vec<Value> = results
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let body = |at: usize| &results[at]["response"]["body"];
    let message = |at: usize| &body(at)["choices"][0]["message"];
    assert!(
        ["billing", "other"].contains(&message(0)["content"].as_str().unwrap()),
        "{}",
        results[0]
    );
    assert!(message(0)["reasoning_content"].is_string(), "{}", results[0]);
    let tokens = body(0)["usage"]["completion_tokens_details"]["reasoning_tokens"]
        .as_u64()
        .unwrap();
    assert!(
        (1..=2).contains(&tokens),
        "a token, and the line break of the end: {}",
        results[0]
    );
    assert_eq!(message(1)["reasoning_content"], Value::Null);
    assert_eq!(body(1)["usage"]["completion_tokens_details"]["reasoning_tokens"], 0);
    let why = results[2]["error"]["message"].as_str().unwrap();
    assert!(
        why.contains("leaves no room for an answer in `max_tokens` of 20"),
        "{why}"
    );
}

/// A job that was written down before there were thoughts goes on without them.
#[test]
fn a_job_of_an_older_record_goes_on_as_it_began() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job(
        folder.path(),
        "open",
        "{temperature: 0, choice: [billing, shipping_delay]}",
        OUTPUT,
    );
    run(&["submit", arg(&job), "--no-enqueue"]).expect(0);
    let path = output.join("_gristmill/job.json");
    let mut record: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    assert_eq!(record["columns"]["columns"]["thinking"], true, "{record}");
    record["resolved"]["generate"]
        .as_object_mut()
        .unwrap()
        .remove("thinking")
        .expect("the record says it");
    record["resolved"]["generate"]["max_tokens"] = 8.into();
    record["columns"]["columns"].as_object_mut().unwrap().remove("thinking");
    fs::write(&path, serde_json::to_vec(&record).unwrap()).unwrap();
    let ran = Run::of(&mut gristmill(&["run", arg(&job)])).expect(0);
    assert!(!ran.stderr.contains("thinking:"), "{}", ran.stderr);
    for row in rows(&output) {
        assert!(row.get("reasoning").is_none(), "{row}");
        assert_eq!(row["status"], "succeeded");
    }
}

#[test]
fn a_carried_column_cannot_have_a_thoughts_name() {
    let folder = tempfile::tempdir().unwrap();
    let (job, _) = job(
        folder.path(),
        "open",
        "{temperature: 0}",
        "output: {uri: out, carry: [reasoning]}",
    );
    let text = fs::read_to_string(folder.path().join("rows.jsonl")).unwrap();
    fs::write(
        folder.path().join("rows.jsonl"),
        text.replace("\"id\"", "\"reasoning\""),
    )
    .unwrap();
    run(&["plan", arg(&job)])
        .expect(2)
        .one_line(&["reasoning", "the name of an output column"]);
    let without = fs::read_to_string(&job)
        .unwrap()
        .replace("{temperature: 0}", "{temperature: 0, max_tokens: 2, thinking: false}");
    fs::write(&job, without).unwrap();
    run(&["plan", arg(&job)]).expect(0);
}

/// The line that says how many tokens thought and answer may have says whose number it is.
#[test]
fn the_number_of_tokens_is_said_with_whose_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let said = |generate: &str| {
        let (job, _) = job(folder.path(), "open", generate, OUTPUT);
        let plan = run(&["plan", arg(&job)]).expect(0).stdout;
        let line = plan
            .lines()
            .find(|line| line.starts_with("thinking"))
            .expect("a line says it");
        line.split("up to ").nth(1).unwrap().to_string()
    };
    let unset = said("{temperature: 0}");
    assert!(
        unset.ends_with("answer, unless `generate.max_tokens` says otherwise"),
        "{unset}"
    );
    assert_eq!(said("{max_tokens: 30}"), "30 tokens for thought and answer, by the job");
    let config = "{\"eos_token_id\": 2, \"max_new_tokens\": 40}";
    fs::write(folder.path().join("model/generation_config.json"), config).unwrap();
    assert_eq!(
        said("{temperature: 0}"),
        "40 tokens for thought and answer, by the checkpoint"
    );
}

/// A job that goes on says nothing of files that are as they were.
#[test]
fn a_begun_job_whose_files_are_as_they_were_is_not_warned_of() {
    let folder = tempfile::tempdir().unwrap();
    let (job, _) = job(
        folder.path(),
        "open",
        "{temperature: 0, choice: [billing, other]}",
        OUTPUT,
    );
    run(&["submit", arg(&job), "--no-enqueue"]).expect(0);
    assert_eq!(run(&["plan", arg(&job)]).expect(0).stderr, "");
    let ran = run(&["run", arg(&job), "--quiet"]);
    assert!(!ran.stderr.contains("warning: job"), "{}", ran.stderr);
}
