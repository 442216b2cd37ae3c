//! Answers that look right and are not, through the built program: one of several samples that was cut off, a key that stands twice.

use std::fs;
use std::path::{Path, PathBuf};

use crate::commands::run;
use crate::support::{arg, demo_job, py, record, write_tickets};

/// A job over twelve rows.
fn job(folder: &Path, generate: &str, output: &str) -> (PathBuf, PathBuf) {
    write_tickets(folder, 12);
    let rest = format!(
        "context: 128\ninput: {{uri: rows.jsonl}}\nprompt: {{text: '{{{{ text }}}} ->'}}\n\
         generate: {{{generate}}}\noutput: {{uri: out{output}}}\nshards: {{rows: 4}}\n"
    );
    demo_job(folder, "samples", &rest)
}

const EACH_SAMPLE: &str = r#"
import duckdb, pyarrow.parquet as pq
seen, mixed = set(), 0
for row in pq.read_table("out").to_pylist():
    fits = [parsed is not None for parsed in row["parsed"]]
    assert len(row["sample_status"]) == len(row["sample_error"]) == len(fits) == 4, row
    assert row["sample_status"] == ["succeeded" if fit else "invalid_output" for fit in fits], row
    assert [error is None for error in row["sample_error"]] == fits, row
    assert all(fit or reason == "length" for fit, reason in zip(fits, row["finish_reason"])), row
    assert row["status"] == ("succeeded" if all(fits) else "invalid_output"), row
    seen.update(row["sample_status"])
    mixed += len(set(fits)) > 1
assert seen == {"succeeded", "invalid_output"} and mixed, (seen, mixed)
good = duckdb.sql("select count(*) from (select unnest(sample_status) s from 'out/*.parquet') where s = 'succeeded'").fetchall()[0][0]
assert 0 < good < 48, good
"#;

#[test]
fn a_sample_that_was_cut_off_is_told_from_its_neighbours() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    // Half of the answers are too long for two tokens.
    let shape =
        "regex: \"A|(BCDEFGHIJKLMNOPQRSTUVWXYZ){3}\", max_tokens: 2, temperature: 2, n: 4, seed: 1, logprobs: true";
    let (path, output) = job(folder, shape, ", token_ids: true");
    run(&["run", arg(&path), "--quiet"]).expect(3);
    py(folder, EACH_SAMPLE);
    assert_eq!(record(&output)["v"], 3);
    run(&["verify", arg(&output), "--inputs"]).expect(0);
    run(&["retry", arg(&output)]).expect(0);
    let _ = run(&["run", arg(&path), "--quiet"]);
    run(&["verify", arg(&output)]).expect(0);
    // Result lines have no place for it and stay what they were.
    fs::remove_dir_all(&output).unwrap();
    let (path, output) = job(folder, &shape.replace(", logprobs: true", ""), ", format: openai");
    run(&["run", arg(&path), "--quiet"]).expect(3);
    assert_eq!(record(&output)["v"], 1);
}

#[test]
fn an_answer_that_repeats_a_key_does_not_count_as_one() {
    for output in ["", ", parsed: typed"] {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        // The schema allows the key once more, as any schema does that names no keys.
        let schema = "{type: object, patternProperties: {\"^a$\": {const: 1}}, additionalProperties: false, minProperties: 2, maxProperties: 2}";
        let (path, out) = job(
            folder,
            &format!("max_tokens: 40, temperature: 0, json_schema: {schema}"),
            output,
        );
        run(&["run", arg(&path), "--quiet"]).expect(3);
        py(
            folder,
            "import pyarrow.parquet as pq\nfor row in pq.read_table('out').to_pylist():\n    assert row['completion'].replace(' ', '') == \
             '{\"a\":1,\"a\":1}', row\n    assert (row['status'], row['parsed']) == ('invalid_output', None), row\n    assert row['error'] == \
             'the answer has the key `a` twice in one object', row",
        );
        run(&["verify", arg(&out)]).expect(0);
    }
}
