//! `gristmill recheck`: samples of finished jobs run again, agreement that falls where answers are others, and what is refused.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use gristmill::dataset::store::location::Location;
use gristmill::device::{Precision, cpu};
use gristmill::engine::plan::Policy;
use gristmill::engine::{Engine, EngineOptions};
use gristmill::job::precision::RequestedKvFormat;
use gristmill::ledger::Ledger;
use gristmill::model::{KvBudget, LoadOptions, Transformer};
use gristmill::report::meter::Meter;
use gristmill::report::recheck::RecheckReport;
use gristmill::report::sample::sample;
use gristmill::worker::jobs::OpenJob;
use gristmill::worker::model::{Formats, Model, ModelFiles};
use gristmill::worker::recheck::{self, RecheckConfig};
use gristmill::worker::stop::{Stop, StopCause};
use serde_json::Value;

use crate::commands::{run, small_job};
use crate::support::{Run, arg, job_in, python, root};

/// A job file with its precision replaced.
fn in_int8(text: String) -> String {
    text.replace("precision: f32", "precision: int8")
}

/// [`small_job`] in 8 bits.
fn small_int8_job(folder: &Path, long: &[usize]) -> (PathBuf, PathBuf) {
    let (job, output) = small_job(folder, long);
    fs::write(&job, in_int8(fs::read_to_string(&job).unwrap())).unwrap();
    (job, output)
}

/// The figures of a recheck, less the time that it took.
fn figures(mut recheck: Value) -> Value {
    assert!(recheck["seconds"].as_f64() > Some(0.0), "{recheck}");
    recheck.as_object_mut().unwrap().remove("seconds");
    recheck
}

/// The demo in 8 bits: at most half a point of agreement with the gold column below F32's 1,903 of 2,000, and 200 of its rows
/// against F32.
#[test]
fn the_demo_in_eight_bits_agrees_with_f32() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job_in(folder.path(), "label-tickets.yaml", |text| {
        in_int8(text)
            .replace("{gold: category}", "{gold: category, recheck: {rows: 200}}")
            .replace("choice:", "choice_probabilities: true\n  choice:")
    });
    let ran = run(&["run", arg(&job), "--json", "--quiet"]).expect(0).json();
    let right = ran["agreement"]["equal"].as_u64().unwrap();
    assert!(right >= 1903 - 10, "{right} of 2,000 categories are right in 8 bits");
    let found = &ran["recheck"];
    println!("{found}");
    assert_eq!((&found["precision"], &found["rows"]), (&"f32".into(), &200.into()));
    assert_eq!((&found["compared"], &found["failed"]), (&200.into(), &0.into()));
    assert!(found["same"].as_u64() >= Some(194), "{found}");
    let (share, interval) = (found["share"].as_f64().unwrap(), &found["interval"]);
    assert!(
        interval[0].as_f64() < Some(share) && Some(share) <= interval[1].as_f64(),
        "{found}"
    );
    let difference = found["probability_difference"].as_f64().unwrap();
    assert!(difference > 0.0 && difference < 0.01, "{found}");
    assert_eq!(found.get("leading_tokens"), None, "choices have none");

    // The command finds the same, from the ledger alone; more rows than there are means all.
    let again = run(&["recheck", arg(&job), "--json", "--quiet"]).expect(0).json();
    assert_eq!(
        (&again["job"], &again["precision"]),
        (&"label-tickets".into(), &"int8".into())
    );
    assert_eq!(again["output"], ran["output"]);
    assert_eq!(figures(again["recheck"].clone()), figures(found.clone()));
    let before = fs::read(output.join("part-00000.parquet")).unwrap();
    let all = run(&["recheck", arg(&job), "--rows", "5000", "--threads", "2"]).expect(0);
    assert!(
        all.stderr.contains("rechecking 2,000 of 2,000 rows in f32"),
        "{}",
        all.stderr
    );
    assert!(
        all.stdout.contains("of 2,000 answers are the same in f32 ("),
        "{}",
        all.stdout
    );
    println!("{}", all.stdout);
    assert_eq!(
        fs::read(output.join("part-00000.parquet")).unwrap(),
        before,
        "no part was touched"
    );
}

/// Gives the rows with odd numbers another answer.
const ALTER: &str = r#"
import sys, glob, pyarrow as pa, pyarrow.parquet as pq
for part in glob.glob(sys.argv[1] + "/part-*.parquet"):
    table = pq.read_table(part)
    answers = [a if row % 2 == 0 else "altered" for a, row in zip(table["completion"].to_pylist(), table["row"].to_pylist())]
    at = table.schema.get_field_index("completion")
    pq.write_table(table.set_column(at, "completion", pa.array(answers)), part)
"#;

#[test]
fn answers_that_were_altered_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let (job, _) = job_in(folder.path(), "label-tickets.yaml", in_int8);
    let limit = ["--limit", "400"];
    let ran = run(&[&["run", arg(&job), "--json", "--quiet"][..], &limit].concat())
        .expect(0)
        .json();
    let recheck = || {
        run(&[
            &["recheck", arg(&job), "--rows", "400", "--json", "--quiet"][..],
            &limit,
        ]
        .concat())
        .expect(0)
        .json()
    };
    let sound = recheck()["recheck"]["same"].as_u64().unwrap();
    assert!(sound >= 390, "{sound} of 400");
    let output = ran["output"].as_str().unwrap().strip_prefix("file://").unwrap();
    Run::of(Command::new(python()).args(["-c", ALTER, output])).expect(0);
    let altered = recheck();
    let same = altered["recheck"]["same"].as_u64().unwrap();
    assert!(
        (190..=200).contains(&same),
        "half the answers were altered, {same} of 400 are the same"
    );
    let differing = altered["recheck"]["differing"].as_array().unwrap();
    assert_eq!(differing.len(), 5, "{altered}");
    assert!(
        differing.iter().any(|row| row["job"] == "altered" && row["row"] == 1),
        "{altered}"
    );
}

/// Only keys and values are in 8 bits: the recheck is in the job's own precision, and something differs.
#[test]
fn keys_and_values_alone_are_rechecked() {
    let folder = tempfile::tempdir().unwrap();
    let (job, _) = job_in(folder.path(), "label-tickets.yaml", |text| {
        text.replace("precision: f32", "precision: f32\nkv_cache: int8")
            .replace("choice:", "choice_probabilities: true\n  choice:")
    });
    run(&["run", arg(&job), "--limit", "100", "--quiet"]).expect(0);
    let json = run(&["recheck", arg(&job), "--limit", "100", "--json", "--quiet"])
        .expect(0)
        .json();
    assert_eq!(json["precision"], "f32 with keys and values in int8");
    assert_eq!(
        (&json["recheck"]["precision"], &json["recheck"]["rows"]),
        (&"f32".into(), &100.into())
    );
    assert!(json["recheck"]["probability_difference"].as_f64() > Some(0.0), "{json}");
}

#[test]
fn texts_agree_up_to_some_token() {
    let folder = tempfile::tempdir().unwrap();
    let (job, _) = job_in(folder.path(), "write-tickets.yaml", |text| {
        in_int8(text).replace("seed: 7", "seed: 7\n  logprobs: true")
    });
    let ran = run(&["run", arg(&job), "--limit", "60", "--quiet"]);
    assert!(matches!(ran.code, Some(0 | 3)), "{ran:?}");
    let json = run(&[
        "recheck",
        arg(&job),
        "--limit",
        "60",
        "--rows",
        "60",
        "--json",
        "--quiet",
    ])
    .expect(0)
    .json();
    let found = &json["recheck"];
    println!("{found}");
    let leading = found["leading_tokens"].as_f64().unwrap();
    assert!(leading > found["share"].as_f64().unwrap() && leading <= 1.0, "{found}");
    assert!(leading > 0.3, "the same seeds draw the same beginnings: {found}");
    assert!(
        found["logprob_difference"].as_f64().is_some_and(|d| d > 0.0 && d < 0.1),
        "{found}"
    );
    let said = run(&["recheck", arg(&job), "--limit", "60", "--rows", "60", "--quiet"]).expect(0);
    assert!(
        said.stdout.contains("tokens come before its first difference"),
        "{}",
        said.stdout
    );
    assert_eq!(said.stderr, "");
}

#[test]
fn rows_without_an_answer_are_counted_apart() {
    let folder = tempfile::tempdir().unwrap();
    let (job, _) = small_int8_job(folder.path(), &[3, 17]);
    let text = fs::read_to_string(&job).unwrap();
    fs::write(&job, format!("{text}report: {{recheck: {{rows: 100}}}}\n")).unwrap();
    let ran = run(&["run", arg(&job), "--quiet", "--json"]).expect(3).json();
    let found = &ran["recheck"];
    assert_eq!(
        (
            &found["rows"],
            &found["compared"],
            &found["unanswered"],
            &found["failed"]
        ),
        (&40.into(), &38.into(), &2.into(), &0.into())
    );
    // A job that is done is rechecked, too; and asked for in the file or not, it is the same job.
    let again = run(&["run", arg(&job), "--json"]).expect(3);
    assert!(
        again.stderr.contains("already done") && again.stderr.contains("rechecking 40 of 40 rows"),
        "{again:?}"
    );
    assert_eq!(figures(again.json()["recheck"].clone()), figures(found.clone()));
    fs::write(&job, &text).unwrap();
    let ran = run(&["run", arg(&job), "--quiet", "--json"]).expect(3).json();
    assert_eq!(ran.get("recheck"), None);
}

#[test]
fn what_cannot_be_rechecked_is_said_in_a_line() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = small_int8_job(folder.path(), &[]);
    let recheck = |more: &[&str]| run(&[&["recheck", arg(&job), "--quiet"], more].concat());
    recheck(&[]).expect(2).one_line(&["holds no job", arg(&output)]);
    run(&["submit", arg(&job), "--no-enqueue"]).expect(0);
    recheck(&[])
        .expect(2)
        .one_line(&["job `small` is not finished", "with 0 of 40 rows"]);
    run(&["run", arg(&job), "--quiet"]).expect(0);
    recheck(&["--precision", "bf16"]).expect(0);
    assert!(
        recheck(&["--precision", "int8"])
            .expect(2)
            .stderr
            .contains("possible values: f32, bf16")
    );
    assert!(recheck(&["--rows", "0"]).expect(2).stderr.contains("--rows"));
    // Another job file, another job.
    let text = fs::read_to_string(&job).unwrap();
    fs::write(&job, text.replace("max_tokens: 1", "max_tokens: 2")).unwrap();
    recheck(&[]).expect(2).one_line(&["belongs to job `small`"]);
    fs::write(&job, &text).unwrap();
    // A part that is gone is no wish of the user's.
    let part = output.join("part-00004.parquet");
    let bytes = fs::read(&part).unwrap();
    fs::remove_file(&part).unwrap();
    recheck(&["--rows", "40"])
        .expect(1)
        .one_line(&["part-00004.parquet", "missing", "gristmill verify"]);
    fs::write(&part, &bytes[..bytes.len() / 2]).unwrap();
    recheck(&["--rows", "40"])
        .expect(1)
        .one_line(&["part-00004.parquet", "cannot be read"]);
    fs::write(&part, bytes).unwrap();
    let rows = folder.path().join("rows.jsonl");
    fs::write(
        &rows,
        fs::read_to_string(&rows).unwrap().replace("ticket 7", "changed 7"),
    )
    .unwrap();
    recheck(&[])
        .expect(2)
        .one_line(&["rows.jsonl", "not what it was when the job was planned"]);
}

#[test]
fn a_precision_that_is_not_higher_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = small_job(folder.path(), &[]);
    run(&["recheck", arg(&job)]).expect(2).one_line(&[
        "small.yaml: `--precision` is `f32`",
        "runs in `f32` itself",
        "leave the recheck out",
    ]);
    let text = fs::read_to_string(&job).unwrap();
    for (precision, recheck, words) in [
        (
            "f32",
            "{}",
            ["`report.recheck.precision` is `f32`", "leave the recheck out"],
        ),
        (
            "bf16",
            "{precision: bf16}",
            ["`report.recheck.precision` is `bf16`", "choose a higher one"],
        ),
    ] {
        let text = text.replace("precision: f32", &format!("precision: {precision}"));
        fs::write(&job, format!("{text}report: {{recheck: {recheck}}}\n")).unwrap();
        for command in ["run", "plan", "recheck"] {
            run(&[command, arg(&job)]).expect(2).one_line(&words);
        }
    }
    assert!(!output.exists(), "nothing was started");
    // Keys and values count, too: what the job already has is no recheck, what it has not is one.
    let with = |precision: &str, kv_cache: &str, recheck: &str| {
        let formats = format!("precision: {precision}\nkv_cache: {kv_cache}");
        let text = text.replace("precision: f32", &formats);
        fs::write(&job, format!("{text}report: {{recheck: {{precision: {recheck}}}}}\n")).unwrap();
        run(&["plan", arg(&job)])
    };
    with("bf16", "f32", "bf16").expect(2).one_line(&[
        "the job runs in `bf16 with keys and values in f32` itself",
        "choose a higher one",
    ]);
    with("f32", "int8", "f32").expect(0);
    // Lines in OpenAI's form hold no answers by row.
    fs::write(
        &job,
        text.replace("carry: [id]", "format: openai").replace("f32", "int8"),
    )
    .unwrap();
    run(&["recheck", arg(&job)])
        .expect(2)
        .one_line(&["small.yaml", "`output.format`"]);
}

/// Rows that a retry answered, several samples, drawn at random: computed again in the job's own precision they are the same to
/// the last bit. So prompts, seeds and parameters are the job's, and what a recheck finds is the precision's doing.
#[tokio::test(flavor = "multi_thread")]
async fn in_its_own_precision_a_job_says_the_same_again() {
    let folder = tempfile::tempdir().unwrap();
    let long = |row: usize| {
        if row % 5 == 3 {
            "word ".repeat(400)
        } else {
            format!("ticket {row}")
        }
    };
    let line = |row: usize| format!("{{\"text\": \"{}\"}}\n", long(row));
    fs::write(folder.path().join("rows.jsonl"), (0..24).map(line).collect::<String>()).unwrap();
    let model = root().join("jobs/demo/model");
    let text = format!(
        "name: drawn\nmodel: {}\nprecision: f32\ninput: {{uri: rows.jsonl}}\nprompt: {{text: '{{{{ text }}}} ->'}}\n\
         generate: {{max_tokens: 12, temperature: 1, n: 2, logprobs: true, ignore_eos: true}}\noutput: {{uri: out}}\nshards: {{rows: 4}}\n",
        model.display()
    );
    let job = folder.path().join("job.yaml");
    fs::write(&job, text).unwrap();
    let output = folder.path().join("out");
    // The pool of a megabyte has no room for the long rows: they fail at first.
    let failed = run(&["run", arg(&job), "--quiet", "--json", "--kv-memory", "1"])
        .expect(3)
        .json();
    assert_eq!(failed["rows"]["errored"], 5, "{failed}");
    run(&["retry", arg(&output)]).expect(0);
    run(&["run", arg(&job), "--quiet"]).expect(0);

    let found = again(&output, &model, 24, &Stop::default()).await.unwrap();
    assert_eq!((found.rows, found.compared, found.same), (24, 24, 24), "{found:#?}");
    assert_eq!((found.leading_tokens, found.logprob_difference), (Some(1.0), Some(0.0)));
    assert_eq!(found.interval.map(|[_, high]| high), Some(1.0));
    let stop = Stop::default();
    stop.set(StopCause::Interrupted);
    assert_eq!(again(&output, &model, 24, &stop).await, None, "told to stop");
}

/// Rows of a job in F32, run again in F32.
async fn again(output: &Path, model: &Path, rows: u64, stop: &Stop) -> Option<RecheckReport> {
    let ledger = Ledger::open(&Location::parse(arg(output), Path::new("/")).unwrap())
        .await
        .unwrap()
        .unwrap();
    let files = ModelFiles::open(model.to_path_buf()).unwrap();
    let options = LoadOptions {
        precision: Precision::F32,
        kv_format: Precision::F32.kv_format(),
        channels: None,
        isa: None,
        kv: KvBudget::Blocks(256),
        threads: Arc::new(cpu::Threads::new(2).unwrap()),
        max_context: None,
        vocabulary: Some(files.tokenizer.vocab_size()),
    };
    let options_of_engine = EngineOptions {
        max_step_tokens: 512,
        max_sequences: 7,
        prefix_root: "F32".into(),
        policy: Policy::default(),
        threads: options.threads.clone(),
    };
    let transformer = Transformer::load(model, &options).unwrap();
    let engine = Engine::new(Box::new(transformer), files.tokenizer.clone(), options_of_engine);
    let hash = ledger.job().identity.model_hash.clone();
    let context = files.config.max_position_embeddings;
    let loaded = Model::new(
        files.clone(),
        Formats::of(Precision::F32.into(), RequestedKvFormat::Auto, Precision::F32),
        context,
        hash,
    );
    let sample = sample(&ledger.job().shards, rows, &ledger.job().identity.job_hash);
    let parts = RecheckConfig {
        job: OpenJob::new(0, ledger, &loaded, Arc::default(), Arc::default()).unwrap(),
        engine: Box::new(engine),
        precision: "f32".into(),
        tokenizer: Some(files.tokenizer.clone()),
        render_threads: rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap(),
        meter: Arc::new(Meter::default()),
    };
    recheck::run(parts, &sample, stop).await.unwrap()
}
