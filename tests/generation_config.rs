//! A checkpoint's `generation_config.json`: jobs through the built program, and what transformers' logits processors make of it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use gristmill::device::cpu::sample::{Scratch, sample};
use gristmill::device::draw::{Draw, DrawnToken};
use gristmill::engine::constraint::Constraint;
use gristmill::engine::request::{Request, SampleId};
use gristmill::engine::sequence::SampleState;
use gristmill::job::{Job, JobFile};
use gristmill::model::config::generation::GenerationFile;
use gristmill::tokenizer::Tokenizer;
use serde_json::{Value, json};

use crate::commands::run;
use crate::support::{Run, arg, python, record, root};

/// The demo model with another `generation_config.json`; without one where it is null.
fn model(folder: &Path, generation: &Value) -> PathBuf {
    let model = folder.join("model");
    fs::create_dir_all(&model).unwrap();
    for name in [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        fs::copy(root().join("jobs/demo/model").join(name), model.join(name)).unwrap();
    }
    configure(folder, generation);
    model
}

fn configure(folder: &Path, generation: &Value) {
    let path = folder.join("model/generation_config.json");
    let mut whole = json!({"eos_token_id": [2, 0], "pad_token_id": 3});
    match generation {
        Value::Object(keys) => whole.as_object_mut().unwrap().extend(keys.clone()),
        _ => return drop(fs::remove_file(path)),
    }
    fs::write(path, whole.to_string()).unwrap();
}

/// The instruction that the demo model was trained with, to write tickets as JSON.
const WRITE: &str = "You write short support tickets for testing. Answer with one JSON object that has the keys subject, body and urgency.";

/// A job of eight rows over the model in `folder`, and its output.
fn job(folder: &Path, name: &str, generate: &str) -> (PathBuf, PathBuf) {
    let rows = (0..8).map(|row| format!("{{\"id\": {row}, \"text\": \"category: billing, tone: {row}\"}}\n"));
    fs::write(folder.join("rows.jsonl"), rows.collect::<String>()).unwrap();
    let text = format!(
        "name: {name}\nmodel: model\nprecision: f32\ninput: {{uri: rows.jsonl}}\nprompt:\n  messages:\n  - {{role: system, content: \
         '{WRITE}'}}\n  - {{role: user, content: '{{{{ text }}}}'}}\ngenerate: {{{generate}}}\noutput: {{uri: {name}, token_ids: true}}\n",
    );
    let path = folder.join(format!("{name}.yaml"));
    fs::write(&path, text).unwrap();
    (path, folder.join(name))
}

const READ: &str = "import json, sys, pyarrow.dataset as ds\n\
    print(json.dumps(ds.dataset(sys.argv[1], format='parquet').to_table(columns=\
    ['completion', 'token_ids', 'finish_reason', 'status', 'error']).to_pylist()))";

/// The rows of an output, as pyarrow reads them.
pub(crate) fn rows(output: &Path) -> Value {
    Run::of(Command::new(python()).args(["-c", READ, arg(output)]))
        .expect(0)
        .json()
}

/// Runs a job of the model in `folder` and reads its rows.
#[track_caller]
fn answers(folder: &Path, name: &str, generate: &str) -> Value {
    let (job, output) = job(folder, name, generate);
    run(&["run", arg(&job), "--quiet"]).expect(0);
    rows(&output)
}

#[test]
fn what_a_job_leaves_unset_comes_from_the_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(
        folder,
        &json!({"do_sample": true, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}),
    );
    let (path, output) = job(folder, "unset", "max_tokens: 24, seed: 3");
    let line =
        "temperature 0.7, top_p 0.8, top_k 20, repetition_penalty 1.05 (generation_config.json); max_tokens 24 (job)";
    let plan = run(&["plan", arg(&path)]).expect(0);
    assert!(
        plan.stdout.contains(&format!("\nsampling    {line}\n")),
        "{}",
        plan.stdout
    );
    let plan = run(&["plan", arg(&path), "--json"]).expect(0).json();
    let of = |name: &str| {
        (
            plan["sampling"][name]["value"].clone(),
            plan["sampling"][name]["from"].clone(),
        )
    };
    assert_eq!(of("temperature"), (json!(0.7), json!("generation_config.json")));
    assert_eq!(of("max_tokens"), (json!(24), json!("job")));
    assert_eq!(of("min_p"), (json!(0.0), json!("default")));
    let ran = run(&["run", arg(&path)]).expect(0);
    assert!(ran.stderr.contains(&format!("sampling: {line}\n")), "{}", ran.stderr);

    let generate = record(&output)["resolved"]["generate"].clone();
    let close = |name: &str, value: f64| assert!((generate[name].as_f64().unwrap() - value).abs() < 1e-6, "{generate}");
    close("temperature", 0.7);
    close("top_p", 0.8);
    close("repetition_penalty", 1.05);
    assert_eq!(
        (&generate["top_k"], &generate["from"]["top_k"]),
        (&json!(20), &json!("generation_config.json"))
    );
    assert_eq!(
        (&generate["from"]["max_tokens"], &generate["from"]["min_p"]),
        (&json!("job"), &json!("default"))
    );

    let written = "max_tokens: 24, seed: 3, temperature: 0.7, top_p: 0.8, top_k: 20, repetition_penalty: 1.05";
    let same = answers(folder, "written", &format!("{written}, defaults: neutral"));
    assert_eq!(rows(&output), same, "as if the job had said it");
    let neutral = answers(folder, "neutral", "max_tokens: 24, seed: 3, defaults: neutral");
    assert_ne!(neutral, same);
    configure(folder, &Value::Null);
    assert_eq!(
        neutral,
        answers(folder, "plain", "max_tokens: 24, seed: 3"),
        "as if there were no file"
    );
    let old = format!(
        "{}, \"temperature\": 0.7, \"top_p\": 0.8, \"top_k\": 20, \"repetition_penalty\": 1.05}}",
        fs::read_to_string(folder.join("model/config.json"))
            .unwrap()
            .trim_end()
            .trim_end_matches('}')
            .trim_end()
    );
    fs::write(folder.join("model/config.json"), old).unwrap();
    let (path, output) = job(folder, "old", "max_tokens: 24, seed: 3");
    let ran = run(&["run", arg(&path)]).expect(0);
    assert!(
        ran.stderr
            .contains("repetition_penalty 1.05 (config.json); max_tokens 24 (job)"),
        "{}",
        ran.stderr
    );
    assert_eq!(rows(&output), same, "old checkpoints have it in config.json");
}

#[test]
fn a_penalty_of_the_checkpoint_holds_for_greedy_answers_and_the_jobs_own_value_wins() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(
        folder,
        &json!({"repetition_penalty": 1.3, "temperature": 0.7, "top_k": 20}),
    );
    let penalised = answers(folder, "greedy", "max_tokens: 32, temperature: 0");
    let plain = answers(folder, "own", "max_tokens: 32, temperature: 0, repetition_penalty: 1.0");
    assert_ne!(penalised, plain);
    let (path, _) = job(folder, "choice", "temperature: 0, choice: [billing, other]");
    let plan = run(&["plan", arg(&path)]).expect(0);
    assert!(
        plan.stderr
            .contains("the repetition penalty of generation_config.json makes choices less likely"),
        "{}",
        plan.stderr
    );
    configure(folder, &json!({}));
    assert_eq!(plain, answers(folder, "before", "max_tokens: 32, temperature: 0"));
    let written = "max_tokens: 32, temperature: 0, repetition_penalty: 1.3";
    assert_eq!(penalised, answers(folder, "written", written));
    let (path, _) = job(folder, "quiet", "temperature: 0, choice: [billing, other]");
    let plan = run(&["plan", arg(&path)]).expect(0);
    assert!(
        !plan.stdout.contains("sampling ") && plan.stderr.is_empty(),
        "nothing to say: {plan:?}"
    );
}

#[test]
fn tokens_that_the_checkpoint_forbids_are_not_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder, &json!({}));
    let greedy = "max_tokens: 40, temperature: 0";
    let plain = answers(folder, "plain", greedy);
    let ids = |rows: &Value| -> Vec<Vec<u64>> {
        let ids = |row: &Value| {
            row["token_ids"]
                .as_array()
                .unwrap()
                .iter()
                .map(|id| id.as_u64().unwrap())
                .collect()
        };
        rows.as_array().unwrap().iter().map(ids).collect()
    };
    let (first, later) = (ids(&plain)[0][0], ids(&plain)[0][3]);
    assert!(ids(&plain).iter().all(|row| row.contains(&later)) && first != later);
    for (n, keys) in [json!({"suppress_tokens": [later]}), json!({"bad_words_ids": [[later]]})]
        .into_iter()
        .enumerate()
    {
        configure(folder, &keys);
        let without = ids(&answers(folder, &format!("without-{n}"), greedy));
        assert!(without.iter().flatten().all(|id| *id != later), "{keys}");
    }
    configure(folder, &json!({"begin_suppress_tokens": [first]}));
    let begun = ids(&answers(folder, "begun", greedy));
    assert!(begun.iter().all(|row| row[0] != first));
    // Under a shape, too.
    let shape = "max_tokens: 40, temperature: 0, regex: '(\\{| \\{|x)+'";
    configure(folder, &json!({}));
    let free = ids(&answers(folder, "shape-free", shape));
    configure(folder, &json!({"suppress_tokens": [free[0][0]]}));
    let held = ids(&answers(folder, "shape-held", shape));
    assert!(
        held.iter().flatten().all(|id| *id != free[0][0]) && !held[0].is_empty(),
        "{held:?}"
    );

    // The demo's categories have one token or two.
    let lengths = |name: &str, keys: Value| -> Vec<usize> {
        configure(folder, &keys);
        let (path, output) = job(folder, name, "max_tokens: 20, temperature: 0");
        let label = fs::read_to_string(root().join("jobs/label-tickets.yaml")).unwrap();
        let label = label.split("content: \"").nth(1).unwrap().split('"').next().unwrap();
        let text = fs::read_to_string(&path).unwrap().replace(WRITE, label);
        fs::write(&path, text).unwrap();
        run(&["run", arg(&path), "--quiet"]).expect(0);
        ids(&rows(&output)).iter().map(Vec::len).collect()
    };
    assert!(lengths("short", json!({})).iter().all(|n| *n < 8));
    assert!(lengths("long", json!({"min_new_tokens": 12})).iter().all(|n| *n >= 12));
    // A prompt has more than a hundred tokens, so these are fewer new ones.
    assert!(lengths("whole", json!({"min_length": 50})).iter().all(|n| *n < 8));
    assert!(
        lengths("whole-long", json!({"min_length": 1000}))
            .iter()
            .all(|n| *n == 20)
    );
    configure(folder, &json!({"stop_strings": ["subject"], "max_new_tokens": 30}));
    let stopped = answers(folder, "stopped", "temperature: 0");
    for row in stopped.as_array().unwrap() {
        let text = row["completion"].as_str().unwrap();
        assert!(row["finish_reason"] == "stop" && !text.contains("subject"), "{row}");
    }
    let own = answers(folder, "own-stop", "temperature: 0, stop: body");
    assert!(
        own[0]["completion"].as_str().unwrap().contains("subject"),
        "the job's own stop wins: {own}"
    );
    let generate = record(&folder.join("own-stop"))["resolved"]["generate"].clone();
    assert_eq!(
        (&generate["max_tokens"], &generate["from"]["stop"]),
        (&json!(30), &json!("job"))
    );
}

#[test]
fn what_is_not_done_is_refused_and_neutral_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder, &json!({"num_beams": 4, "temperature": 0.7}));
    let (path, output) = job(folder, "beams", "max_tokens: 4");
    for command in [vec!["plan"], vec!["run"], vec!["submit", "--no-enqueue"]] {
        let refused = run(&[&command[..], &[arg(&path)]].concat()).expect(2);
        refused.one_line(&[
            "generation_config.json`: `num_beams` (4) is not supported",
            "`generate.defaults: neutral`",
        ]);
    }
    assert!(!output.exists());
    let (path, output) = job(folder, "neutral", "max_tokens: 4, defaults: neutral");
    let line = "neutral (job); generation_config.json sets temperature 0.7, num_beams 4, which has no effect";
    let ran = run(&["run", arg(&path)]).expect(0);
    assert!(ran.stderr.contains(&format!("sampling: {line}")), "{}", ran.stderr);
    assert_eq!(record(&output)["resolved"]["generate"]["temperature"], 1.0);

    configure(folder, &json!({"temperature": "hot"}));
    let (path, _) = job(folder, "hot", "max_tokens: 4");
    run(&["plan", arg(&path)])
        .expect(2)
        .one_line(&["`temperature` is \"hot\", not a number"]);
    configure(
        folder,
        &json!({"suppress_tokens": [0, 1, 2047], "max_new_tokens": 1024}),
    );
    let (path, _) = job(folder, "room", "seed: 1");
    run(&["plan", arg(&path)]).expect(2).one_line(&[
        "`generate.max_tokens` is 1,024 (the checkpoint's `max_new_tokens`)",
        "no room for a prompt",
    ]);
    configure(folder, &json!({"chat_format": "chatml", "do_sample": false}));
    let (path, _) = job(folder, "unknown", "max_tokens: 4");
    let plan = run(&["plan", arg(&path), "--json"]).expect(0);
    assert!(
        plan.stderr
            .contains("`chat_format` in generation_config.json: not known"),
        "{}",
        plan.stderr
    );
    assert!(
        plan.stderr
            .contains("`do_sample: false` in generation_config.json has no effect"),
        "{}",
        plan.stderr
    );
    assert_eq!(plan.json()["warnings"].as_array().unwrap().len(), 2);
    let same = "the 3 answers of a row (`generate.n`) are all the same at temperature 0";
    for (name, temperature, is_said) in [("same", 0.0, true), ("drawn", 0.5, false)] {
        let (path, _) = job(
            folder,
            name,
            &format!("max_tokens: 4, n: 3, temperature: {temperature}"),
        );
        let plan = run(&["plan", arg(&path), "--json"]).expect(0).json();
        assert_eq!(plan["warnings"].to_string().contains(same), is_said, "{plan}");
    }
}

#[test]
fn a_choice_that_needs_a_forbidden_token_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder, &json!({}));
    let tokenizer = Tokenizer::load(&root().join("jobs/demo/model")).unwrap();
    let token = tokenizer.encode_plain("billing")[0];
    for key in ["suppress_tokens", "begin_suppress_tokens"] {
        configure(folder, &json!({key: [token]}));
        let (path, _) = job(folder, key, "choice: [other, billing]");
        run(&["plan", arg(&path)])
            .expect(2)
            .one_line(&["the choice `billing` needs token", "`generate.defaults: neutral`"]);
        let (path, _) = job(
            folder,
            &format!("{key}-free"),
            "choice: [other, billing], temperature: 0, defaults: neutral",
        );
        run(&["run", arg(&path)]).expect(0);
    }
}

/// The record holds: what the checkpoint's files say later changes nothing, and is said.
#[test]
fn a_begun_job_keeps_its_values() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let first = json!({"temperature": 0.7, "top_k": 20, "suppress_tokens": [77]});
    model(folder, &first);
    let generate = "max_tokens: 24, seed: 3";
    let expected = answers(folder, "whole", generate);
    let (path, output) = job(folder, "begun", generate);
    run(&["submit", arg(&path), "--no-enqueue"]).expect(0);
    // Another end would be a silent change, too.
    let end = expected[0]["token_ids"][5].as_u64().unwrap();
    configure(
        folder,
        &json!({"temperature": 0.1, "top_k": 20, "eos_token_id": [2, 0, end]}),
    );
    let ran = run(&["run", arg(&path), "--quiet"]).expect(0);
    ran.one_line(&[
        "warning: job `begun` began with temperature 0.7, 1 tokens never drawn, the ends [0, 2] and goes on so",
        &format!("now say: temperature 0.1, nothing forbidden, the ends [0, 2, {end}]"),
    ]);
    assert_eq!(rows(&output), expected);
}

/// What a gristmill wrote that knew of no checkpoint's sampling: its values hold, whatever the file says, and be it refused.
#[test]
fn a_job_of_an_older_gristmill_keeps_its_values() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder, &json!({}));
    let generate = "seed: 3, stop: ':'";
    let neutral = answers(folder, "neutral", generate);
    for (name, keys, words) in [
        (
            "sampled",
            json!({"temperature": 0.7, "top_k": 20}),
            "now say: temperature 0.7, top_k 20",
        ),
        ("beams", json!({"num_beams": 4}), "`num_beams` (4) is not supported"),
        ("long", json!({"max_new_tokens": 1024}), "now say: max_tokens 1024"),
    ] {
        configure(folder, &json!({}));
        let (path, output) = job(folder, name, generate);
        run(&["submit", arg(&path), "--no-enqueue"]).expect(0);
        let mut older = record(&output);
        for field in ["from", "defaults", "forbidden", "model_ends"] {
            let fields = older["resolved"]["generate"].as_object_mut().unwrap();
            assert!(fields.shift_remove(field).is_some(), "{field}");
        }
        fs::write(output.join("_gristmill/job.json"), older.to_string()).unwrap();
        configure(folder, &keys);
        let ran = run(&["run", arg(&path), "--quiet"]).expect(0);
        ran.one_line(&[&format!("warning: job `{name}` began with "), words]);
        assert_eq!(rows(&output), neutral, "{name}");
    }
}

#[test]
fn a_lines_value_wins_over_the_jobs_and_that_over_the_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder, &json!({}));
    let line = |id: usize, more: &str| {
        format!(
            "{{\"custom_id\": \"{id}\", \"method\": \"POST\", \"url\": \"/v1/chat/completions\", \"body\": {{\"messages\": \
             [{{\"role\": \"system\", \"content\": \"{WRITE}\"}}, {{\"role\": \"user\", \"content\": \"category: billing, tone: 1\"}}]{more}}}}}\n"
        )
    };
    let lines = [
        line(0, ""),
        line(1, ", \"repetition_penalty\": 1.0"),
        line(2, ", \"max_tokens\": 3"),
    ];
    fs::write(folder.join("batch.jsonl"), lines.concat()).unwrap();
    let answers = |name: &str, generate: &str| -> Vec<Vec<u64>> {
        let text = format!(
            "name: b\nmodel: model\nprecision: f32\ninput: {{uri: batch.jsonl}}\ngenerate: {{{generate}}}\n\
             output: {{uri: {name}, token_ids: true}}\n"
        );
        let path = folder.join(format!("{name}.yaml"));
        fs::write(&path, text).unwrap();
        run(&["run", arg(&path), "--quiet"]).expect(0);
        let rows = rows(&folder.join(name));
        let ids = |row: &Value| serde_json::from_value(row["token_ids"].clone()).unwrap();
        rows.as_array().unwrap().iter().map(ids).collect()
    };
    let written = "seed: 1, temperature: 0, repetition_penalty: 1.3, max_tokens: 24";
    let plain = answers("plain", written);
    configure(
        folder,
        &json!({"repetition_penalty": 1.3, "temperature": 0.0, "max_new_tokens": 24}),
    );
    assert_eq!(answers("of-model", "seed: 1"), plain);
    assert_eq!((plain[0].len(), plain[2].len()), (24, 3));
    let of_job = answers("of-job", "seed: 1, repetition_penalty: 1.0, max_tokens: 16");
    assert_eq!(of_job[0].len(), 16);
    assert_eq!(of_job[0], of_job[1], "the job's own penalty is the line's");
    assert_ne!(of_job[0], plain[0][..16], "and not the checkpoint's");
    // What no line can say holds for all of them.
    configure(folder, &json!({"temperature": 0.0, "suppress_tokens": plain[2]}));
    let held = answers("held", "seed: 1, max_tokens: 5");
    assert!(held.iter().flatten().all(|id| !plain[2].contains(id)), "{held:?}");
}

/// Draws as a job would, from the logits of a case of `tests/fixtures/make_generation.py`.
struct Reference {
    state: SampleState,
    tokenizer: Arc<Tokenizer>,
    logits: Vec<f32>,
}

impl Reference {
    fn new(case: &Value, generate: &str, tokenizer: &Arc<Tokenizer>) -> Reference {
        let folder = tempfile::tempdir().unwrap();
        fs::write(
            folder.path().join("generation_config.json"),
            case["generation_config"].to_string(),
        )
        .unwrap();
        let text = format!(
            "name: r\nmodel: m\ninput: {{uri: i}}\nprompt: {{text: x}}\noutput: {{uri: o}}\ngenerate: {{{generate}}}\n"
        );
        let mut job = Job::check(JobFile::parse(&text, "r.yaml").unwrap(), "r.yaml", Path::new(".")).unwrap();
        let file = GenerationFile::load(folder.path()).unwrap();
        job.generate.take_defaults(&file.check().unwrap());
        let ids = |name: &str| -> Vec<u32> { serde_json::from_value(case[name].clone()).unwrap() };
        let request = Request {
            id: SampleId {
                job: 0,
                row: 0,
                sample: 0,
                attempt: 0,
            },
            prompt: ids("prompt").into(),
            params: Arc::new(job.generate.params(1, false)),
            eos: vec![2, 5].into(),
            cache_salt: Arc::default(),
            adapter: 0,
        };
        let (mut state, _) = SampleState::new(request, Constraint::Free, 256, tokenizer);
        for token in ids("completion") {
            let drawn = DrawnToken {
                token,
                logit: 0.0,
                log_sum_exp: 0.0,
                logits: Vec::new(),
            };
            state.consume(0, Ok(drawn), tokenizer);
        }
        state.prepare(tokenizer);
        let logits = serde_json::from_value(case["logits"].clone()).unwrap();
        Reference {
            state,
            tokenizer: tokenizer.clone(),
            logits,
        }
    }

    fn token(&self, uniform: f64, scratch: &mut Scratch) -> u32 {
        let draw = Draw {
            uniform,
            ..self.state.draw(0, &self.tokenizer)
        };
        sample(&self.logits, draw, scratch).unwrap().token
    }

    /// Tokens come in the order of ids as the random number grows, so halving finds where each begins.
    fn probabilities(&self) -> Vec<(u32, f64)> {
        let mut scratch = Scratch::default();
        let last = self.token(1.0 - f64::EPSILON, &mut scratch);
        let mut found = Vec::new();
        let mut from = 0.0;
        loop {
            let token = self.token(from, &mut scratch);
            if token == last {
                found.push((token, 1.0 - from));
                return found;
            }
            let (mut below, mut above) = (from, 1.0);
            while above - below > 1e-10 {
                let middle = (below + above) / 2.0;
                if self.token(middle, &mut scratch) == token {
                    below = middle
                } else {
                    above = middle
                }
            }
            found.push((token, above - from));
            from = above;
        }
    }
}

#[test]
fn draws_are_those_of_transformers_logits_processors() {
    let cases = fs::read(root().join("tests/fixtures/generation.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_slice(&cases).unwrap();
    assert!(cases.len() > 60);
    let tokenizer = Arc::new(Tokenizer::load(&root().join("jobs/demo/model")).unwrap());
    for case in &cases {
        let keys = &case["generation_config"];
        let greedy = Reference::new(case, "temperature: 0", &tokenizer);
        assert_eq!(greedy.token(0.5, &mut Scratch::default()), case["greedy"], "{keys}");
        let found = Reference::new(case, "seed: 1", &tokenizer).probabilities();
        let expected: Vec<(u32, f64)> = case["probabilities"]
            .as_object()
            .unwrap()
            .iter()
            .map(|(id, p)| (id.parse().unwrap(), p.as_f64().unwrap()))
            .collect();
        let ids = |list: &[(u32, f64)]| list.iter().map(|(id, _)| *id).collect::<Vec<_>>();
        assert_eq!(ids(&found), ids(&expected), "{keys}: the tokens that may be drawn");
        for ((id, found), (_, expected)) in found.iter().zip(&expected) {
            assert!(
                (found - expected).abs() < 1e-5,
                "{keys}: token {id} has {found}, not {expected}"
            );
        }
    }
}

/// Warnings are of what the checkpoint has a say in and the job did not say itself.
#[test]
fn what_the_job_says_itself_is_no_surprise() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(
        folder,
        &json!({"do_sample": false, "repetition_penalty": 1.3, "top_k": 20}),
    );
    let (path, _) = job(
        folder,
        "said",
        "max_tokens: 4, temperature: 0.5, repetition_penalty: 1.2, choice: [billing, other]",
    );
    assert_eq!(run(&["plan", arg(&path)]).expect(0).stderr, "");
}

/// A choice ends where it is whole, whatever texts end other completions; no `max_new_tokens` is no limit of 0.
#[test]
fn what_has_no_say_is_not_taken() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder, &json!({"stop_strings": ["bill"], "max_new_tokens": 0}));
    let (path, _) = job(folder, "choice", "temperature: 0, choice: [billing, other]");
    let sampling = run(&["plan", arg(&path), "--json"]).expect(0).json()["sampling"].clone();
    assert_eq!(sampling["stop"], json!({"value": [], "from": "default"}));
    assert_eq!(sampling["max_tokens"]["from"], "default");
}

/// An end is out before a completion is long enough, be it the model's or the job's.
#[test]
fn the_jobs_own_stop_tokens_wait_as_well() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder, &json!({}));
    let ids = |rows: &Value| -> Vec<Vec<u64>> {
        let ids = |row: &Value| serde_json::from_value(row["token_ids"].clone()).unwrap();
        rows.as_array().unwrap().iter().map(ids).collect()
    };
    let plain = ids(&answers(folder, "plain", "max_tokens: 20, temperature: 0"));
    let stops = format!("max_tokens: 20, temperature: 0, stop_token_ids: [{}]", plain[0][3]);
    assert!(ids(&answers(folder, "short", &stops))[0].len() <= 3);
    configure(folder, &json!({"min_new_tokens": 12}));
    let long = ids(&answers(folder, "long", &stops));
    assert!(long.iter().all(|row| row.len() >= 12), "{long:?}");
}

/// Choices of a line are held against what is forbidden as those of a job are.
#[test]
fn a_line_whose_choice_needs_a_forbidden_token_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let tokenizer = Tokenizer::load(&root().join("jobs/demo/model")).unwrap();
    let token = tokenizer.encode_plain("billing")[0];
    model(folder, &json!({"suppress_tokens": [token]}));
    let line = |choices: Value| {
        let body = json!({"messages": [{"role": "user", "content": "x"}], "guided_choice": choices});
        let line = json!({"custom_id": choices[0], "method": "POST", "url": "/v1/chat/completions", "body": body});
        format!("{line}\n")
    };
    let lines = [line(json!(["billing", "other"])), line(json!(["login", "other"]))];
    fs::write(folder.join("batch.jsonl"), lines.concat()).unwrap();
    let path = folder.join("batch.yaml");
    let text = "name: b\nmodel: model\nprecision: f32\ninput: {uri: batch.jsonl}\ngenerate: {max_tokens: 8}\n\
                output: {uri: out, token_ids: true}\n";
    fs::write(&path, text).unwrap();
    run(&["run", arg(&path), "--quiet"]).expect(3);
    let rows = rows(&folder.join("out"));
    assert!(
        rows[0]["error"]
            .as_str()
            .unwrap()
            .contains("the choice `billing` needs token"),
        "{rows}"
    );
    assert_eq!(rows[1]["status"], "succeeded");
}

/// A key that the whole of `config.json` leaves unset is its text part's to set.
#[test]
fn null_is_unset() {
    let folder = tempfile::tempdir().unwrap();
    let config = json!({"temperature": null, "top_k": 7, "text_config": {"temperature": 0.5, "top_k": 3}});
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let defaults = GenerationFile::load(folder.path()).unwrap().check().unwrap();
    assert_eq!((defaults.temperature, defaults.top_k), (Some(0.5), Some(7)));
}

/// A recheck and a calibration ask as the job does, whose `max_tokens` is the checkpoint's.
#[test]
fn a_recheck_knows_the_checkpoints_max_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder, &json!({"max_new_tokens": 4, "temperature": 0.0}));
    let (path, _) = job(folder, "checked", "seed: 1");
    // Less than what holds where nobody says how many.
    let text = fs::read_to_string(&path)
        .unwrap()
        .replace("precision: f32", "precision: bf16\ncontext: 200");
    fs::write(&path, text).unwrap();
    run(&["run", arg(&path), "--quiet"]).expect(0);
    run(&["recheck", arg(&path), "--precision", "f32", "--quiet"]).expect(0);
    run(&["calibrate", arg(&path), "--rows", "4"]).expect(0);
}
