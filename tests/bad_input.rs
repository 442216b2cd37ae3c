//! Bad input, as a user meets it: one clear line that names file, row or field; a bad job never starts.

use std::fs;
use std::path::Path;

use crate::support::{Run, arg, copy_folder, gristmill, job_in, python, root};

/// Runs `job`, which must be refused with code 2 and one line on stderr that holds all of `words`.
#[track_caller]
fn refused(job: &Path, output: &Path, words: &[&str]) {
    let run = Run::of(&mut gristmill(&["run", arg(job), "--quiet"])).expect(2);
    run.one_line(words);
    let parts = fs::read_dir(output).map(|d| d.filter(is_part).count()).unwrap_or(0);
    assert_eq!(parts, 0, "a refused job publishes nothing");
}

fn is_part(entry: &std::io::Result<fs::DirEntry>) -> bool {
    entry
        .as_ref()
        .is_ok_and(|e| e.file_name().to_string_lossy().starts_with("part-"))
}

/// The labelling job with its text edited is refused with these words.
#[track_caller]
fn label_job_refused(edit: impl Fn(String) -> String, words: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job_in(folder.path(), "label-tickets.yaml", |text| {
        let edited = edit(text.clone());
        assert_ne!(edited, text, "the edit must hit");
        edited
    });
    refused(&job, &output, words);
}

#[test]
fn job_file_fields() {
    label_job_refused(
        |t| t.replace("temperature:", "temperture:"),
        &["label-tickets.yaml", "temperture", "temperature"],
    );
    label_job_refused(|t| t.replace("{{ body }}", "{{ bdy }}"), &["bdy", "body"]);
    label_job_refused(
        |t| t.replace("carry: [ticket_id]", "carry: [tiket_id]"),
        &["tiket_id", "ticket_id"],
    );
    label_job_refused(|t| t.replace("gold: category", "gold: categry"), &["categry"]);
    label_job_refused(|t| t.replace("max_tokens: 8", "max_tokens: 0"), &["max_tokens"]);
    label_job_refused(
        |t| t.replace("max_tokens: 8", "max_tokens: 99999999999"),
        &["max_tokens"],
    );
    label_job_refused(|t| t.replace("temperature: 0", "temperature: .nan"), &["temperature"]);
    label_job_refused(
        |t| t.replace("tickets.parquet", "no-such-*.parquet"),
        &["no-such-*.parquet"],
    );
    label_job_refused(|t| t.replace("demo/model", "demo/no-model"), &["no-model"]);
    label_job_refused(|t| t.replace("precision: f32", "precision: f31"), &["precision", "f32"]);
    label_job_refused(|t| t.replace("rows: 256", "rows: 0"), &["rows"]);
}

#[test]
fn what_does_not_fit_together() {
    label_job_refused(
        |t| t.replace("precision: f32", "precision: f32\ncontext: 4096"),
        &["context", "4096", "1024"],
    );
    label_job_refused(
        |t| t.replace("precision: f32", "precision: f32\ncontext: 0"),
        &["context"],
    );
    let folder = tempfile::tempdir().unwrap();
    let job = text_job(
        folder.path(),
        &root().join("jobs/demo/tickets.parquet"),
        "",
        "max_tokens: 1",
    );
    let text = fs::read_to_string(&job).unwrap();
    fs::write(&job, text.replace("text: ''", "token_ids: subject")).unwrap();
    refused(
        &job,
        &folder.path().join("out"),
        &["subject", "prompt.token_ids", "Utf8"],
    );
    // No prompt, and an input that is no batch file: the prompt is what is missing.
    fs::write(&job, text.replace("prompt: {text: ''}\n", "")).unwrap();
    refused(
        &job,
        &folder.path().join("out"),
        &["prompt", "messages", "tickets.parquet"],
    );
}

#[test]
fn shapes_that_cannot_be() {
    let shape = |with: &str| {
        let with = with.to_string();
        move |text: String| {
            let start = text.find("choice:").unwrap();
            let end = start + text[start..].find(']').unwrap() + 1;
            format!("{}{with}{}", &text[..start], &text[end..])
        }
    };
    label_job_refused(shape("json_schema: {type: nonsense}"), &["json_schema"]);
    label_job_refused(shape("regex: '(['"), &["regex"]);
    label_job_refused(shape("choice: []"), &["choice"]);
    label_job_refused(shape("choice: [a, a]"), &["choice", "a"]);
    label_job_refused(
        shape("json_schema: {type: integer, minimum: 5, maximum: 4}"),
        &["json_schema"],
    );
}

#[test]
fn a_template_that_loops_for_ever() {
    label_job_refused(
        |t| {
            t.replace(
                "{{ body }}",
                "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
            )
        },
        &["template"],
    );
}

#[test]
fn a_job_file_that_is_not_there_or_not_yaml() {
    let folder = tempfile::tempdir().unwrap();
    let job = folder.path().join("gone.yaml");
    refused(&job, folder.path(), &["gone.yaml"]);
    fs::write(&job, "name: [").unwrap();
    refused(&job, folder.path(), &["gone.yaml"]);
}

#[test]
fn an_output_of_another_job() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job_in(folder.path(), "label-tickets.yaml", |t| {
        t.replace("name: label-tickets", "name: first")
    });
    Run::of(&mut gristmill(&["run", arg(&job), "--quiet"])).expect(0);
    let before = fs::read(output.join("part-00000.parquet")).unwrap();
    let (job, _) = job_in(folder.path(), "label-tickets.yaml", |t| {
        t.replace("max_tokens: 8", "max_tokens: 9")
    });
    let run = Run::of(&mut gristmill(&["run", arg(&job), "--quiet"])).expect(2);
    run.one_line(&["first", arg(&output)]);
    assert_eq!(
        fs::read(output.join("part-00000.parquet")).unwrap(),
        before,
        "nothing was overwritten"
    );
}

#[test]
fn an_output_folder_with_foreign_parquet() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job_in(folder.path(), "label-tickets.yaml", |t| t);
    fs::create_dir_all(&output).unwrap();
    fs::write(output.join("part-00000.parquet"), "mine").unwrap();
    let run = Run::of(&mut gristmill(&["run", arg(&job), "--quiet"])).expect(2);
    run.one_line(&["part-00000.parquet"]);
    assert_eq!(fs::read_to_string(output.join("part-00000.parquet")).unwrap(), "mine");
}

#[test]
fn an_input_that_changed_since_it_was_planned() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.jsonl");
    let lines: String = (0..400).map(|i| format!("{{\"t\": \"ticket {i}\"}}\n")).collect();
    fs::write(&input, &lines).unwrap();
    let job = text_job(
        folder.path(),
        &input,
        "{{ t }}",
        "max_tokens: 40, ignore_eos: true, temperature: 0",
    );
    // Stop it half way: SIGINT keeps what was finished.
    let mut child = gristmill(&["run", arg(&job), "--quiet", "--log-interval", "0.05"])
        .spawn()
        .unwrap();
    let ledger = folder.path().join("out/_gristmill/job.json");
    while !ledger.exists() && child.try_wait().unwrap().is_none() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    fs::write(&input, lines.replace("ticket 3", "changed 3")).unwrap();
    let run = Run::of(&mut gristmill(&["run", arg(&job), "--quiet"])).expect(2);
    run.one_line(&["in.jsonl", "not what it was"]);
}

/// A small job over `input` with the demo model; the output is `folder/out`.
fn text_job(folder: &Path, input: &Path, template: &str, generate: &str) -> std::path::PathBuf {
    let job = folder.join("job.yaml");
    let text = format!(
        "name: small\nmodel: {}\nprecision: f32\ninput: {{uri: {}}}\nprompt: {{text: '{template}'}}\ngenerate: {{{generate}}}\noutput: {{uri: {}}}\n",
        root().join("jobs/demo/model").display(),
        input.display(),
        folder.join("out").display()
    );
    fs::write(&job, text).unwrap();
    job
}

/// Writes bytes as an input and expects the job over it to be refused.
#[track_caller]
fn input_refused(name: &str, bytes: &[u8], words: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join(name);
    fs::write(&input, bytes).unwrap();
    let job = text_job(folder.path(), &input, "{{ t }}", "max_tokens: 1");
    refused(&job, &folder.path().join("out"), words);
}

#[test]
fn parquet_that_is_broken_or_lies() {
    let good = fs::read(root().join("jobs/demo/tickets.parquet")).unwrap();
    input_refused("cut.parquet", &good[..good.len() / 2], &["cut.parquet"]);
    let mut lying = good.clone();
    let at = lying.len() - 8;
    lying[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    input_refused("lying.parquet", &lying, &["lying.parquet"]);
}

/// Each bad line ends as an errored row; its neighbours live.
#[test]
fn jsonl_with_everything_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.jsonl");
    let mut bytes = b"\xEF\xBB\xBF{\"t\": \"zero\"}\n".to_vec();
    bytes.extend(b"{\"t\": \"\xFF\xFE\"}\n");
    bytes.extend(b"{\"t\": \"");
    bytes.resize(bytes.len() + 100_000_000, b'x');
    bytes.extend(b"\"}\n{\"t\": \n{\"t\": \"four\"}\n[1]\n{\"other\": 1}\n{\"t\": \"last\"}");
    fs::write(&input, bytes).unwrap();
    let job = text_job(folder.path(), &input, "{{ t }}", "max_tokens: 1, ignore_eos: true");
    Run::of(&mut gristmill(&["run", arg(&job), "--quiet"])).expect(3);
    let rows = rows_of(&folder.path().join("out"));
    let statuses: Vec<&str> = rows.iter().map(|r| r["status"].as_str().unwrap()).collect();
    let e = "errored";
    assert_eq!(
        statuses,
        ["succeeded", e, e, e, "succeeded", e, e, "succeeded"],
        "{rows:#?}"
    );
    for row in rows.iter().filter(|r| r["status"] == e) {
        let error = row["error"].as_str().unwrap();
        assert!(!error.is_empty() && error.lines().count() == 1, "{error}");
    }
}

#[test]
fn a_prompt_longer_than_the_context() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.jsonl");
    let long = "refund please ".repeat(5_000);
    fs::write(&input, format!("{{\"t\": \"short\"}}\n{{\"t\": \"{long}\"}}\n")).unwrap();
    let job = text_job(folder.path(), &input, "{{ t }}", "max_tokens: 2, ignore_eos: true");
    Run::of(&mut gristmill(&["run", arg(&job), "--quiet"])).expect(3);
    let rows = rows_of(&folder.path().join("out"));
    assert_eq!(rows[0]["status"], "succeeded");
    assert_eq!(rows[1]["status"], "errored");
    assert!(rows[1]["error"].as_str().unwrap().contains("tokens"), "{}", rows[1]);

    let cut = fs::read_to_string(&job).unwrap();
    let cut = cut
        .replace("prompt: {", "prompt: {truncate: left, ")
        .replace("/out}", "/out2}");
    fs::write(&job, cut).unwrap();
    Run::of(&mut gristmill(&["run", arg(&job), "--quiet"])).expect(0);
    assert_eq!(rows_of(&folder.path().join("out2"))[1]["status"], "succeeded");
}

#[test]
fn duplicate_custom_ids() {
    let line = r#"{"custom_id": "same", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}}"#;
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.jsonl");
    fs::write(&input, format!("{line}\n{line}\n")).unwrap();
    let job = text_job(folder.path(), &input, "", "max_tokens: 1");
    let text = fs::read_to_string(&job).unwrap().replace("prompt: {text: ''}\n", "");
    fs::write(&job, text).unwrap();
    refused(&job, &folder.path().join("out"), &["line 2", "in.jsonl", "custom_id"]);
}

#[test]
fn broken_checkpoints() {
    let model = root().join("jobs/demo/model");
    let case = |name: &str, change: &dyn Fn(&Path), words: &[&str]| {
        let folder = tempfile::tempdir().unwrap();
        let copy = folder.path().join("model");
        copy_folder(&model, &copy);
        change(&copy);
        let (job, output) = job_in(folder.path(), "label-tickets.yaml", |t| {
            t.replace(arg(&model), arg(&copy))
        });
        println!("{name}");
        refused(&job, &output, words);
    };
    let weights = |f: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = fs::read(model.join("model.safetensors")).unwrap();
        f(&mut bytes);
        bytes
    };
    let lying = weights(&|b| b[..8].copy_from_slice(&u64::MAX.to_le_bytes()));
    case(
        "lying header",
        &|c| fs::write(c.join("model.safetensors"), &lying).unwrap(),
        &["model.safetensors"],
    );
    let short = weights(&|b| b.truncate(b.len() / 2));
    case(
        "truncated",
        &|c| fs::write(c.join("model.safetensors"), &short).unwrap(),
        &["model.safetensors"],
    );
    let nan = weights(&|b| {
        let end = b.len();
        b[end - 4..].copy_from_slice(&[0xC0, 0x7F, 0xC0, 0x7F]);
    });
    case(
        "NaN weights",
        &|c| fs::write(c.join("model.safetensors"), &nan).unwrap(),
        &["model.safetensors"],
    );
    let config = fs::read_to_string(model.join("config.json")).unwrap();
    let other = config.replace("LlamaForCausalLM", "MambaForCausalLM");
    case(
        "architecture",
        &|c| fs::write(c.join("config.json"), &other).unwrap(),
        &["MambaForCausalLM"],
    );
    case(
        "tokenizer",
        &|c| fs::write(c.join("tokenizer.json"), "{").unwrap(),
        &["tokenizer.json"],
    );
    case(
        "sentencepiece only",
        &|c| {
            fs::remove_file(c.join("tokenizer.json")).unwrap();
            fs::write(c.join("tokenizer.model"), "x").unwrap();
        },
        &["tokenizer.model", "not a model of SentencePiece"],
    );
    case(
        "no weights",
        &|c| fs::remove_file(c.join("model.safetensors")).unwrap(),
        &["model.safetensors"],
    );
}

#[test]
#[cfg(unix)]
fn an_output_folder_that_cannot_be_written() {
    // Root may write anywhere, so the folder is made unusable in a way that binds root too: its parent is a file.
    let folder = tempfile::tempdir().unwrap();
    let blocker = folder.path().join("out");
    fs::write(&blocker, "a file").unwrap();
    let (job, _) = job_in(folder.path(), "label-tickets.yaml", |t| t);
    let run = Run::of(&mut gristmill(&["run", arg(&job), "--quiet"]));
    assert!(matches!(run.code, Some(1 | 2)), "{run:?}");
    run.one_line(&[arg(&blocker)]);
}

/// A device without room fails with one line and loses nothing: with room again, the job ends well.
#[test]
#[cfg(target_os = "linux")]
fn a_full_disk() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job_in(folder.path(), "label-tickets.yaml", |t| t);
    fs::create_dir_all(&output).unwrap();
    // A file size limit of the process acts as a disk without room for anything larger.
    let mut limited = std::process::Command::new("sh");
    limited.args([
        "-c",
        "ulimit -f 8; trap '' XFSZ; exec \"$0\" \"$@\"",
        env!("CARGO_BIN_EXE_gristmill"),
    ]);
    limited.args(["run", arg(&job), "--quiet"]);
    let run = Run::of(&mut limited).expect(1);
    run.one_line(&[]);
    Run::of(&mut gristmill(&["run", arg(&job), "--quiet"])).expect(0);
}

pub(crate) fn rows_of(output: &Path) -> Vec<serde_json::Value> {
    let script = "import sys, json, pyarrow.dataset as ds\n\
                  print(json.dumps(ds.dataset(sys.argv[1], format='parquet').to_table().to_pylist()))";
    let run = Run::of(std::process::Command::new(python()).args(["-c", script, arg(output)])).expect(0);
    serde_json::from_str(run.stdout.trim()).unwrap()
}

/// A job file may come by a pipe; and while one is waited for, the process's own limits can be looked at.
#[cfg(target_os = "linux")]
#[test]
fn a_job_comes_by_a_pipe_and_no_core_dump_would_hold_it() {
    use std::io::Write;
    use std::process::Stdio;
    let own = fs::read_to_string("/proc/self/limits").unwrap();
    let own = own.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    let (soft, hard) = (own.split_whitespace().nth(4), own.split_whitespace().nth(5));
    let lowered = if hard == Some("0") { "0" } else { "1" };
    for allowed in ["", "1"] {
        let folder = tempfile::tempdir().unwrap();
        let (job, output) = job_in(folder.path(), "label-tickets.yaml", |text| text);
        let mut command = gristmill(&["run", "/dev/stdin", "--quiet", "--limit", "2"]);
        command
            .env("GRISTMILL_CORE_DUMPS", allowed)
            .stdin(Stdio::piped())
            .stdout(Stdio::null());
        let mut child = command.spawn().unwrap();
        let core_size = || {
            let limits = fs::read_to_string(format!("/proc/{}/limits", child.id())).unwrap();
            let line = limits
                .lines()
                .find(|line| line.starts_with("Max core file size"))
                .unwrap();
            line.split_whitespace().nth(4).unwrap().to_string()
        };
        if allowed.is_empty() {
            // The limit is lowered some time after the process began.
            let began = std::time::Instant::now();
            while core_size() != lowered {
                assert!(began.elapsed().as_secs() < 20, "{}", core_size());
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
        } else {
            std::thread::sleep(std::time::Duration::from_millis(500));
            assert_eq!(Some(core_size().as_str()), soft);
        }
        child.stdin.take().unwrap().write_all(&fs::read(&job).unwrap()).unwrap();
        assert!(child.wait().unwrap().success());
        let trials = output.parent().unwrap().join("_limit");
        assert_eq!(fs::read_dir(trials).unwrap().count(), 1);
    }
}
