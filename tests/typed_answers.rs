//! `output.parsed: typed` through the built program: what pyarrow, DuckDB and pandas read of answers to a JSON Schema.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::commands::run;
use crate::support::{arg, demo_job, job_in, py, record, write_tickets};

/// A job over twelve rows in three shards, whose answers fit `schema`; `generate` and `output` say more.
fn job(folder: &Path, schema: &str, generate: &str, output: &str) -> (PathBuf, PathBuf) {
    write_tickets(folder, 12);
    let rest = format!(
        "context: 512\ninput: {{uri: rows.jsonl}}\nprompt: {{text: '{{{{ text }}}} ->'}}\n\
         generate: {{{generate}, json_schema: {schema}}}\noutput: {{uri: out, carry: [id]{output}}}\nshards: {{rows: 4}}\n"
    );
    demo_job(folder, "typed", &rest)
}

/// Of everything that has a type, and of what has none.
const SCHEMA: &str = r#"{type: object, additionalProperties: false, required: [label, n, f, tags, detail, any, when, extra], properties: {
  label: {type: string, enum: [billing, shipping, other]}, n: {type: integer, minimum: 9100000000000000, maximum: 9200000000000000}, f: {enum: [0.5, 3]},
  tags: {type: array, items: {enum: [a, b]}, minItems: 1, maxItems: 3}, maybe: {anyOf: [{type: "null"}, {type: boolean}]},
  detail: {type: object, properties: {ok: {type: boolean}}, required: [ok], additionalProperties: false},
  any: {enum: [x, 1]}, when: {const: "2026-11-24", format: date},
  extra: {type: object, additionalProperties: {enum: [7]}, maxProperties: 0}}}"#;

/// Each typed value is the one that the answer's text has.
const SAME_AS_TEXT: &str = r#"
import json, duckdb, pandas, pyarrow as pa, pyarrow.parquet as pq
table = pq.read_table("out")
text = pa.string()
types = dict(label=text, n=pa.int64(), f=pa.float64(), tags=pa.list_(text), maybe=pa.bool_(), detail=pa.struct([("ok", pa.bool_())]),
             any=text, when=text, extra=pa.map_(text, pa.int64()))
found = table.schema.field("parsed").type
assert [found.field(i).name for i in range(found.num_fields)] == list(types), found
for name, of in types.items():
    here = found.field(found.get_field_index(name)).type
    assert here.equals(of) or (pa.types.is_list(here) and here.value_type == text) or pa.types.is_map(here), (name, here)
assert table.num_rows == 12
counts = {}
for row in table.to_pylist():
    assert row["status"] == "succeeded", row
    answer, typed = json.loads(row["completion"]), row["parsed"]
    expected = {name: answer.get(name) for name in types}
    expected["any"] = json.dumps(answer["any"])
    expected["extra"] = list(answer["extra"].items())
    assert typed == expected, (typed, expected)
    assert typed["n"] > 2**53
    counts[answer["label"]] = counts.get(answer["label"], 0) + 1
by_duckdb = duckdb.sql("select parsed.label, count(*) from 'out/*.parquet' group by all").fetchall()
assert dict(by_duckdb) == counts and len(counts) > 1, (by_duckdb, counts)
assert duckdb.sql("select distinct parsed.detail.ok is null, parsed.extra from 'out/*.parquet'").fetchall() == [(False, {})]
by_duckdb = duckdb.sql("select parsed.n from 'out/*.parquet' order by row").fetchall()
assert [n for (n,) in by_duckdb] == [json.loads(row["completion"])["n"] for row in sorted(table.to_pylist(), key=lambda row: row["row"])]
assert duckdb.sql("select sum(len(parsed.tags)) from 'out/*.parquet'").fetchall()[0][0] == sum(len(row["parsed"]["tags"]) for row in table.to_pylist())
frame = pandas.read_parquet("out")
assert sorted(one["label"] for one in frame["parsed"]) == sorted(label for label, n in counts.items() for _ in range(n))
"#;

#[test]
fn typed_answers_are_columns_for_other_tools() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (path, output) = job(
        folder,
        SCHEMA,
        "max_tokens: 300, temperature: 1.5, seed: 3",
        ", parsed: typed",
    );
    let plan = run(&["plan", arg(&path)]).expect(0).stdout;
    assert!(
        plan.contains("struct<label: string, n: int64, f: float64, tags: list<string>,"),
        "{plan}"
    );
    assert!(
        plan.contains("JSON text: `parsed.any` has values of different types"),
        "{plan}"
    );
    let plan = run(&["plan", arg(&path), "--json"]).expect(0).json();
    assert_eq!(
        plan["parsed"]["json_text"],
        json!([{"column": "parsed.any", "why": "has values of different types"}])
    );
    run(&["run", arg(&path), "--quiet"]).expect(0);
    py(folder, SAME_AS_TEXT);
    // One that knows of no typed answers must say that the record is newer.
    assert_eq!(record(&output)["v"], 3);
    run(&["verify", arg(&output), "--inputs"]).expect(0);
    // The rows of another precision are run again as they were.
    let lower = tempfile::tempdir().unwrap();
    let (path, _) = job(
        lower.path(),
        SCHEMA,
        "max_tokens: 300, temperature: 0",
        ", parsed: typed",
    );
    let text = fs::read_to_string(&path)
        .unwrap()
        .replace("precision: f32", "precision: bf16");
    fs::write(&path, text).unwrap();
    run(&["run", arg(&path), "--quiet"]).expect(0);
    let again = run(&["recheck", arg(&path), "--json"]).expect(0).json();
    assert_eq!(again["recheck"]["rows"], 12, "{again}");

    // Without a row, the same columns.
    let none = tempfile::tempdir().unwrap();
    let (path, _) = job(none.path(), SCHEMA, "max_tokens: 300", ", parsed: typed");
    fs::write(none.path().join("rows.jsonl"), "").unwrap();
    run(&["run", arg(&path), "--quiet"]).expect(0);
    let same = format!(
        "import pyarrow.parquet as pq, duckdb\nhere, there = (pq.read_schema(f + '/out/part-00000.parquet').field('parsed') for f in ('.', {:?}))\n\
         assert here.equals(there), (here, there)\nassert duckdb.sql(\"select parsed.label from 'out/*.parquet'\").fetchall() == []",
        arg(folder)
    );
    py(none.path(), &same);
}

/// What has no answer is null as a whole, and not an object of nulls.
const CLOSED: &str = r#"
import duckdb, pyarrow.parquet as pq
rows = pq.read_table("out").to_pylist()
assert len(rows) == 12 and all(row["parsed"] is None and row["status"] == STATUS and row["error"] for row in rows), rows
assert duckdb.sql("select count(*) from 'out/*.parquet' where parsed is null").fetchall() == [(12,)]
"#;

#[test]
fn rows_without_an_answer_are_nulls_and_are_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    // Cut off: the text is kept.
    let (path, output) = job(folder, SCHEMA, "max_tokens: 5, temperature: 0", ", parsed: typed");
    run(&["run", arg(&path), "--quiet"]).expect(3);
    py(
        folder,
        &format!("STATUS = 'invalid_output'\n{CLOSED}\nassert all(row['completion'] for row in rows)"),
    );
    run(&["retry", arg(&output), "--truncated", "--max-tokens", "300"]).expect(0);
    run(&["run", arg(&path), "--quiet"]).expect(0);
    py(
        folder,
        "import duckdb\nassert duckdb.sql(\"select distinct status, parsed.n > 0 from 'out/*.parquet'\").fetchall() == \
         [('succeeded', True)]",
    );
    run(&["verify", arg(&output), "--inputs"]).expect(0);

    // Closed by an order, and at a deadline.
    let cancelled = tempfile::tempdir().unwrap();
    let (path, output) = job(cancelled.path(), SCHEMA, "max_tokens: 5", ", parsed: typed");
    run(&["submit", arg(&path), "--no-enqueue"]).expect(0);
    run(&["cancel", arg(&output), "--finish"]).expect(0);
    run(&["run", arg(&path), "--quiet"]).expect(3);
    py(cancelled.path(), &format!("STATUS = 'cancelled'\n{CLOSED}"));
    run(&["verify", arg(&output)]).expect(0);

    let expired = tempfile::tempdir().unwrap();
    let (path, output) = job(expired.path(), SCHEMA, "max_tokens: 5", ", parsed: typed");
    let text = fs::read_to_string(&path).unwrap() + "budget: {deadline: 1s, unfinished: expire}\n";
    fs::write(&path, text).unwrap();
    run(&["submit", arg(&path), "--no-enqueue"]).expect(0);
    std::thread::sleep(std::time::Duration::from_secs(2));
    let _ = run(&["run", arg(&path), "--quiet"]);
    py(expired.path(), &format!("STATUS = 'expired'\n{CLOSED}"));
    run(&["verify", arg(&output)]).expect(0);
}

/// Answers beyond int64 are there as text alone, and all others are what their text says.
const BEYOND: &str = r#"
import json, pyarrow.parquet as pq
beyond = 0
for row in pq.read_table("out").to_pylist():
    try:
        answer = json.loads(row["completion"])["x"]
    except ValueError:
        assert row["status"] == "invalid_output" and row["parsed"] is None, row
        continue
    if answer < 2**63:
        assert (row["status"], row["parsed"]) == ("succeeded", {"x": answer}), row
    else:
        beyond += 1
        assert (row["status"], row["parsed"]) == ("invalid_output", None), row
        assert row["error"] == f"the answer does not fit its column: `x` is `{answer}`, and its column holds int64", row
assert beyond, "none was beyond"
"#;

#[test]
fn numbers_that_a_column_cannot_hold_are_named_and_never_rounded() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let schema = "{type: object, additionalProperties: false, required: [x], properties: {x: {type: integer, minimum: 100000000000000000}}}";
    let generate = "max_tokens: 60, temperature: 3, seed: 1";
    let (path, output) = job(folder, schema, generate, ", parsed: typed");
    run(&["run", arg(&path), "--quiet"]).expect(3);
    py(folder, BEYOND);
    run(&["verify", arg(&output)]).expect(0);
    // As text nothing is lost.
    fs::remove_dir_all(&output).unwrap();
    let (path, output) = job(folder, schema, generate, "");
    let _ = run(&["run", arg(&path), "--quiet"]);
    py(
        folder,
        "import json, pyarrow.parquet as pq\nrows = [row for row in pq.read_table('out').to_pylist() if row['status'] == 'succeeded']\n\
         assert all(json.loads(row['parsed']) == json.loads(row['completion']) for row in rows)\n\
         assert any(json.loads(row['parsed'])['x'] >= 2**64 for row in rows)",
    );
    assert_eq!(record(&output)["v"], 1, "an older gristmill works on it as ever");
    // A number that the grammar would make another of.
    let (path, _) = job(folder, "{const: 9007199254740993}", "max_tokens: 60", ", parsed: typed");
    run(&["plan", arg(&path)])
        .expect(2)
        .one_line(&["9007199254740993 has no exact 64-bit floating-point form"]);
}

#[test]
fn several_samples_are_lists_of_typed_answers() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (path, _) = job(
        folder,
        SCHEMA,
        "max_tokens: 300, temperature: 1.5, n: 2",
        ", parsed: typed",
    );
    run(&["run", arg(&path), "--quiet"]).expect(0);
    py(
        folder,
        "import json, pyarrow.parquet as pq\nfor row in pq.read_table('out').to_pylist():\n    assert [one['label'] for one in row['parsed']] == \
         [json.loads(text)['label'] for text in row['completion']], row\n    assert len(row['parsed']) == 2",
    );
}

#[test]
fn typed_answers_need_a_schema_and_columns() {
    for (edit, words) in [
        (("json_schema:", "regex: a, stop:"), "needs `generate.json_schema`"),
        (
            ("parsed: typed", "parsed: typed, format: openai"),
            "needs `output.format` to be `parquet`",
        ),
        (
            ("prompt: {text: '{{ text }} ->'}\n", ""),
            "a line of a batch file can ask for a schema of its own",
        ),
        (
            ("parsed: typed", "parsed: struct"),
            "`output.parsed` is `struct`, not `text` or `typed`",
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let (path, output) = job(folder.path(), "{type: object}", "max_tokens: 5", ", parsed: typed");
        let text = fs::read_to_string(&path).unwrap();
        let text = match edit.0 {
            "json_schema:" => text.replace(", json_schema: {type: object}", ", regex: a"),
            from => text.replace(from, edit.1),
        };
        fs::write(&path, text).unwrap();
        run(&["run", arg(&path)]).expect(2).one_line(&[words]);
        assert!(!output.exists());
    }
    // What a job was begun with holds: another form is another job.
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = job(folder.path(), SCHEMA, "max_tokens: 300", "");
    run(&["submit", arg(&path), "--no-enqueue"]).expect(0);
    let (path, _) = job(folder.path(), SCHEMA, "max_tokens: 300", ", parsed: typed");
    run(&["run", arg(&path), "--quiet"])
        .expect(2)
        .one_line(&["`output.parsed` was left out and is \"typed\""]);
}

/// The example of the documents: tickets that are written, as columns.
#[test]
fn written_tickets_are_columns() {
    let folder = tempfile::tempdir().unwrap();
    let (path, output) = job_in(folder.path(), "write-tickets.yaml", |text| text);
    let _ = run(&["run", arg(&path), "--quiet", "--limit", "64"]);
    assert!(!output.exists());
    let trial = fs::read_dir(folder.path().join("_limit"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    let script = format!(
        "import duckdb\nfound = duckdb.sql(\"select parsed.urgency, count(*) from '{}/*.parquet' where status = 'succeeded' group by all\").fetchall()\n\
         assert sum(n for _, n in found) >= 58 and {{u for u, _ in found}} <= {{'low', 'normal', 'high'}}, found",
        trial.display()
    );
    py(folder.path(), &script);
}

/// What asks for types and stays text is said by all that start a job, with the properties' names.
#[test]
fn properties_that_differ_by_case_alone_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let schema =
        "{type: object, additionalProperties: false, required: [id, Id], properties: {id: {const: 1}, Id: {const: 2}}}";
    let (path, output) = job(
        folder.path(),
        schema,
        "max_tokens: 40, temperature: 0",
        ", parsed: typed",
    );
    let words = "JSON text: `parsed` has the properties `id` and `Id`, which engines cannot tell apart: they differ by case alone";
    let plan = run(&["plan", arg(&path)]).expect(0).stdout;
    assert!(plan.contains(words), "{plan}");
    let submitted = run(&["submit", arg(&path), "--no-enqueue"]).expect(0).stdout;
    assert!(submitted.contains(&format!("parsed      {words}")), "{submitted}");
    let ran = run(&["run", arg(&path)]).expect(0).stderr;
    assert!(ran.contains(&format!("parsed: {words}")), "{ran}");
    py(
        folder.path(),
        "import json, pyarrow.parquet as pq\nassert all(json.loads(row['parsed']) == {'id': 1, 'Id': 2} for row in pq.read_table('out').to_pylist())",
    );
    run(&["verify", arg(&output)]).expect(0);
}
