//! Slips of somebody's first job, through the built program: each is answered by one line that says what to write instead.

use std::fs;
use std::net::TcpListener;
use std::path::Path;

use crate::commands::run;
use crate::services::S3;
use crate::support::{Run, arg, demo_job, gristmill, py};

/// A job in `folder` over two rows with the columns `id` and `subject`, with `rest` as its last lines.
fn job(folder: &Path, rest: &str) -> std::path::PathBuf {
    fs::write(folder.join("rows.csv"), "id,subject\n1,a\n2,b\n").unwrap();
    demo_job(folder, "slips", rest).0
}

/// What every job here says besides its slip.
const INPUT: &str = "input: {uri: rows.csv}\n";
const OUTPUT: &str = "output: {uri: out}\n";
const PROMPT: &str = "prompt: {text: '{{ subject }}'}\n";
const GENERATE: &str = "generate: {max_tokens: 2}\n";

/// `plan` and `run` refuse the job with one line that holds all of `words`, and write nothing.
#[track_caller]
fn refused(rest: &str, words: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let path = job(folder.path(), rest);
    for command in ["plan", "run"] {
        run(&[command, arg(&path)]).expect(2).one_line(words);
    }
    assert!(!folder.path().join("out").exists());
}

#[test]
fn addresses_that_cannot_be_outputs() {
    for (uri, words) in [
        ("http://127.0.0.1:9/out", ["`output.uri`", "web server", "s3://"]),
        ("https://example.com/out", ["`output.uri`", "web server", "s3://"]),
        ("rows.csv", ["`output.uri`", "rows.csv` is a file", "give a folder"]),
        (
            "ftp://host/out",
            ["`output.uri`", "`ftp` is no scheme of a store", "s3://"],
        ),
        ("~/out", ["`output.uri`", "`~` is not expanded", "${env:HOME}"]),
        (
            "az://container/out",
            ["`output.uri`", "AZURE_STORAGE_ACCOUNT_NAME", "abfss://"],
        ),
    ] {
        refused(&format!("{INPUT}output: {{uri: '{uri}'}}\n{PROMPT}{GENERATE}"), &words);
    }
}

#[test]
fn templates_and_values_without_quotes() {
    let job = |prompt: &str| format!("{INPUT}{OUTPUT}{GENERATE}{prompt}\n");
    for (prompt, words) in [
        (
            "prompt:\n  text: {{ subject }}",
            "put the template in quotes, as in `text: \"{{ column }}\"`",
        ),
        (
            "prompt: {text: {{ subject }}}",
            "put the template in quotes, as in `text: \"{{ column }}\"`",
        ),
        (
            "prompt: {messages: [{role: user, content: {{ subject }}}]}",
            "put the template in quotes",
        ),
        ("prompt:\n\ttext: x", "use spaces"),
        ("prompt: {text: ${date}}", "put a value that contains `${…}` in quotes"),
        (
            "prompt:\n  text: a: b",
            "put a text that contains `: ` in quotes: `text: \"…\"`",
        ),
        (
            "prompt: {messages: [{role: {}, content: x}]}",
            "`prompt.messages[0].role` is a mapping, not `system`",
        ),
        (
            "prompt: {text: '{{ two words }}'}",
            "is written `{{ row[\"two words\"] }}`",
        ),
    ] {
        refused(&job(prompt), &["job.yaml", words]);
    }
}

#[test]
fn shapes_that_are_misspelt() {
    let job = |shape: &str| format!("{INPUT}{OUTPUT}{PROMPT}generate: {{max_tokens: 2, {shape}}}\n");
    for (shape, words) in [
        (
            "json_schema: schema.json",
            "`generate.json_schema` is a text; a schema in a file is `json_schema: {file: schema.json}`",
        ),
        (
            "json_schema: {type: string, minlength: 3}",
            "`generate.json_schema` has `minlength` at its root, which is no keyword of JSON Schema; did you mean `minLength`?",
        ),
        (
            "json_schema: {type: integer, minimum: 5, maximum: 1}",
            "cannot be compiled: no answer fits it: minimum (5) is greater than maximum (1)",
        ),
        (
            "regex: '(a'",
            "cannot be compiled: in a regular expression, unclosed group",
        ),
        (
            "regex: '(?=x)'",
            "in a regular expression, look-around, including look-ahead and look-behind, is not supported",
        ),
    ] {
        refused(&job(shape), &[words]);
    }
}

#[test]
fn inputs_that_are_said_to_be_others() {
    let format = |format: &str| format!("input: {{uri: rows.csv, format: {format}}}\n{OUTPUT}{PROMPT}{GENERATE}");
    for name in ["jsonl", "openai_batch"] {
        refused(
            &format(name),
            &["`input.format`", "no row of 1 file can be read so", "leave it out"],
        );
    }
    refused(
        &format!("input: {{uri: 'https://127.0.0.1:1/x.csv'}}\n{OUTPUT}{PROMPT}{GENERATE}"),
        &["cannot read `https://127.0.0.1:1/x.csv`"],
    );
}

#[test]
fn queues_and_receivers_that_cannot_be() {
    let job = |rest: &str| format!("{INPUT}{OUTPUT}{PROMPT}{GENERATE}{rest}\n");
    for (rest, words) in [
        (
            "queue: {url: redis://host/q}",
            "`queue.url` cannot be used: a queue address begins with `kafka://`",
        ),
        (
            "queue: {url: kafka://host}",
            "`queue.url` cannot be used: the queue address names no topic",
        ),
        (
            "queue: {url: 'kafka://host/t', kafka: {compression.type: zst}}",
            "`queue.kafka.compression.type` is `zst`, which librdkafka does not accept",
        ),
        (
            "on_finish: {url: hooks.example}",
            "`on_finish.url` is `hooks.example`, which is no web address: write it as `https://host/path`",
        ),
    ] {
        refused(&job(rest), &[words]);
    }
    // `plan` may run elsewhere than the job, so a command that is missing here is a warning of its.
    let folder = tempfile::tempdir().unwrap();
    for (command, words) in [
        (
            "[no-such-program, x]",
            "`on_finish.command`: there is no program `no-such-program` in `PATH`",
        ),
        (
            "[./no-such.sh]",
            "there is no program `./no-such.sh` (a path is relative to the job file)",
        ),
    ] {
        let path = self::job(folder.path(), &job(&format!("on_finish: {{command: {command}}}")));
        run(&["run", arg(&path)]).expect(2).one_line(&[words]);
        run(&["plan", arg(&path)]).expect(0).one_line(&["warning", words]);
    }
    assert!(!folder.path().join("out").exists());
}

#[test]
fn prompts_that_use_no_column() {
    let folder = tempfile::tempdir().unwrap();
    for (prompt, warned) in [
        ("{text: 'Label {subject}'}", true),
        ("{messages: [{role: user, content: hello}]}", true),
        ("{text: '{{ subject }}'}", false),
        ("{text: '{{ row }}'}", false),
    ] {
        let path = job(folder.path(), &format!("{INPUT}{OUTPUT}prompt: {prompt}\n{GENERATE}"));
        let plan = run(&["plan", arg(&path), "--json"]).expect(0);
        let words = "`prompt` uses no column, so all rows have the same prompt; a column is written `{{ name }}`";
        assert_eq!(plan.stderr.contains(words), warned, "{prompt}: {}", plan.stderr);
        let listed = plan.json()["warnings"].to_string().contains("uses no column");
        assert_eq!(listed, warned, "{prompt}");
    }
}

#[test]
fn columns_that_some_files_lack_are_told() {
    let folder = tempfile::tempdir().unwrap();
    py(
        folder.path(),
        "import pyarrow as pa, pyarrow.parquet as pq\n\
         pq.write_table(pa.table({'subject': ['a'], 'note': ['n']}), 'a.parquet')\n\
         pq.write_table(pa.table({'subject': ['b'], 'other': [1]}), 'b.parquet')",
    );
    let rest = "input: {uri: '*.parquet', missing_columns: nulls}\noutput: {uri: out, carry: [note]}\n";
    let path = job(folder.path(), &format!("{rest}{PROMPT}{GENERATE}"));
    run(&["plan", arg(&path)]).expect(0).one_line(&[
        "warning",
        "column `note` is not in `",
        "b.parquet`: it is null in such files",
    ]);
}

#[test]
fn rows_in_another_encoding_say_how_to_convert_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = job(folder.path(), &format!("{INPUT}{OUTPUT}{PROMPT}{GENERATE}"));
    fs::write(folder.path().join("rows.csv"), b"id,subject\n1,M\xfcller\n").unwrap();
    let plan = run(&["plan", arg(&path)]).expect(2);
    plan.one_line(&["(row 0 of `", "iconv -f LATIN1 -t UTF-8"]);
}

#[test]
fn a_folder_of_outputs_leads_to_the_list_of_jobs() {
    let folder = tempfile::tempdir().unwrap();
    run(&["status", arg(folder.path())])
        .expect(2)
        .one_line(&["holds no job", "`gristmill jobs` lists the jobs"]);
}

/// `verify --inputs` says what it compared.
#[test]
fn a_job_that_carries_nothing_has_nothing_to_compare() {
    let folder = tempfile::tempdir().unwrap();
    for (carry, says) in [
        ("", "(no column is carried"),
        (", carry: [id]", "with the carried columns of their inputs"),
    ] {
        let rest = format!("{INPUT}output: {{uri: out{}{carry}}}\n{PROMPT}{GENERATE}", carry.len());
        let path = job(folder.path(), &rest);
        let plan = run(&["plan", arg(&path)]).expect(0).stdout;
        assert!(!plan.contains("--limit"), "two rows need no trial: {plan}");
        run(&["run", arg(&path), "--quiet"]).expect(0);
        let output = folder.path().join(format!("out{}", carry.len()));
        let verified = run(&["verify", arg(&output), "--inputs"]).expect(0);
        assert!(verified.stdout.contains(says), "{verified:?}");
    }
}

/// The program without any cloud's variables, and with a metadata service that refuses connections.
fn without_credentials(arguments: &[&str], folder: &Path) -> Run {
    let mut command = gristmill(arguments);
    for (name, _) in std::env::vars() {
        if ["AWS_", "AZURE_", "GOOGLE_"]
            .iter()
            .any(|cloud| name.starts_with(cloud))
        {
            command.env_remove(name);
        }
    }
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let metadata = format!("http://127.0.0.1:{port}");
    Run::of(
        command
            .env("HOME", folder)
            .env("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata),
    )
}

#[test]
fn missing_credentials_name_the_variables() {
    let folder = tempfile::tempdir().unwrap();
    let words = [
        "no AWS credentials",
        "`AWS_ACCESS_KEY_ID`",
        "`AWS_PROFILE`",
        "metadata service gives none",
    ];
    for (input, output) in [("s3://bucket/rows.csv", "out"), ("rows.csv", "s3://bucket/out")] {
        let rest = format!("input: {{uri: '{input}'}}\noutput: {{uri: '{output}'}}\n{PROMPT}{GENERATE}");
        let path = job(folder.path(), &rest);
        for command in ["plan", "run"] {
            let refused = without_credentials(&[command, arg(&path)], folder.path());
            assert_ne!(refused.code, Some(0));
            let last = refused.stderr.lines().last().unwrap_or_default();
            assert!(
                words.iter().all(|word| last.contains(word)),
                "{command} {input}: {}",
                refused.stderr
            );
            assert!(!refused.stderr.contains("/latest/api/token"), "{}", refused.stderr);
        }
    }
}

/// Answers in a bucket become no prompts because a prefix holds both.
#[test]
fn an_output_below_its_inputs_in_a_bucket_is_none_of_them() {
    let Some(s3) = S3::need("an_output_below_its_inputs_in_a_bucket_is_none_of_them") else {
        return;
    };
    let bucket = s3.folder("among");
    let folder = tempfile::tempdir().unwrap();
    let there = |arguments: &[&str]| Run::of(gristmill(arguments).envs(s3.variables(&s3.endpoint)));
    let write = format!(
        "import pyarrow as pa, pyarrow.parquet as pq, os\nfrom pyarrow import fs\n\
         s3 = fs.S3FileSystem(access_key='{}', secret_key='{}', endpoint_override='{}', scheme='http')\n\
         for day in (1, 2):\n    pq.write_table(pa.table({{'id': [day], 'subject': ['x']}}), '{}/data/day=%d/rows.parquet' % day, filesystem=s3)",
        s3.key,
        s3.secret,
        s3.endpoint.trim_start_matches("http://"),
        bucket.trim_start_matches("s3://")
    );
    py(folder.path(), &write);
    for (input, output) in [("data", "data/out"), ("data/*/*.parquet", "data/out2")] {
        let rest = format!(
            "input: {{uri: '{bucket}/{input}'}}\noutput: {{uri: '{bucket}/{output}', carry: [id, subject]}}\n{PROMPT}{GENERATE}"
        );
        let path = job(folder.path(), &rest);
        for _ in 0..2 {
            there(&["run", arg(&path), "--quiet"]).expect(0);
            assert_eq!(
                there(&["plan", arg(&path), "--json"]).expect(0).json()["rows"],
                2,
                "{input}"
            );
        }
        let place = format!("{bucket}/{output}");
        there(&["verify", &place, "--inputs"]).expect(0);
    }
    let rest = format!("input: {{uri: '{bucket}/data'}}\noutput: {{uri: '{bucket}/data/day=1'}}\n{PROMPT}{GENERATE}");
    let path = job(folder.path(), &rest);
    there(&["run", arg(&path)])
        .expect(2)
        .one_line(&["is in the job's own output (`output.uri`)"]);
}
