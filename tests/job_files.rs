//! Job files: the schema is current, good ones are read, and each bad one gets one clear line.

use std::path::{Path, PathBuf};

use gristmill::device::{KvFormat, Precision};
use gristmill::engine::params::OutputConstraint;
use gristmill::job::file::{OutputFormat, Truncate, Unfinished};
use gristmill::job::precision::{RequestedKvFormat, RequestedPrecision};
use gristmill::job::spec::{ChatTemplateChoice, PromptKind};
use gristmill::job::{Job, JobFile, Parameters};

use crate::support::{Run, arg, demo_job, gristmill, py, root, write_tickets};

const GOOD: &str = r#"name: label-tickets
model: hf://Qwen/Qwen3-8B
input: {uri: "s3://tickets/2026-11/*.parquet"}
prompt:
  messages:
    - {role: system, content: "Answer with the one category that fits."}
    - {role: user, content: "{{ subject }}\n\n{{ body }}"}
generate: {max_tokens: 8, temperature: 0, choice: [billing, shipping, yes, no]}
output: {uri: "out/", carry: [ticket_id]}
shards: {rows: 100}
budget: {usd: 5.00, usd_per_hour: 2.60, deadline: 1h30m}
report: {gold: category}
"#;

fn check(text: &str, name: &str) -> Result<Job, String> {
    let parsed = JobFile::parse(text, name).map_err(|e| e.to_string())?;
    Job::check(parsed, name, Path::new("jobs")).map_err(|e| e.to_string())
}

/// The message for the good job with one piece replaced; it is one line and names the file.
fn message(from: &str, to: &str) -> String {
    assert!(GOOD.contains(from), "`{from}` is not in the job");
    let text = GOOD.replacen(from, to, 1);
    let error = match check(&text, "jobs/x.yaml") {
        Ok(_) => panic!("accepted: {to}"),
        Err(error) => error,
    };
    assert!(error.starts_with("jobs/x.yaml:") && !error.contains('\n'), "{error}");
    error
}

#[test]
fn a_good_job_is_read() {
    let job = check(GOOD, "jobs/x.yaml").unwrap();
    assert_eq!(
        (job.name.as_str(), job.precision, job.shard_rows),
        ("label-tickets", RequestedPrecision::Auto, 100)
    );
    assert_eq!(job.input.uris, ["s3://tickets/2026-11/*.parquet"]);
    assert_eq!(
        (job.output.uri.as_str(), job.output.format),
        ("out/", OutputFormat::Parquet)
    );
    assert_eq!(job.base_dir, PathBuf::from("jobs"));
    assert_eq!(job.budget.deadline_seconds, Some(5400));
    assert_eq!(job.gold.as_deref(), Some("category"));
    assert_eq!(job.prompt.truncate, Truncate::None);
    let PromptKind::Messages(messages) = &job.prompt.kind else {
        panic!("{:?}", job.prompt.kind)
    };
    assert_eq!(messages[1].parts, ["{{ subject }}\n\n{{ body }}"]);
    let params = job.generate.params(77, true);
    assert_eq!(
        (
            params.max_tokens,
            params.sampling.temperature,
            params.seed,
            params.samples
        ),
        (8, 0.0, 77, 1)
    );
    assert!(params.deterministic && !job.deterministic);
    // In YAML 1.2, yes and no are texts.
    let choices = ["billing", "shipping", "yes", "no"].map(String::from).to_vec();
    assert_eq!(
        params.shape,
        OutputConstraint::Choice {
            choices,
            probabilities: false
        }
    );
    assert_eq!(read_back(&job), job);
}

/// The job as a worker on another machine reads it from the ledger, its folder made relative again.
fn read_back(job: &Job) -> Job {
    let here = std::env::current_dir().unwrap();
    let read = Job::from_record(&job.resolved(), "job.json").unwrap();
    assert!(read.base_dir.is_absolute());
    assert_eq!(read.queue, None, "the queue is no part of the record");
    Job {
        base_dir: read.base_dir.strip_prefix(here).unwrap().to_path_buf(),
        queue: job.queue.clone(),
        // Nor is what the file said before it was checked.
        content: job.content.clone(),
        ..read
    }
}

#[test]
fn minimal_jobs_get_defaults() {
    let text = "name: a\nmodel: m\ninput: {uri: [x, y], format: openai_batch}\noutput: {uri: o, format: openai}\n";
    let job = check(text, "x.yaml").unwrap();
    assert_eq!(job.prompt.kind, PromptKind::Openai);
    assert_eq!(
        (job.shard_rows, job.generate.max_tokens, job.input.uris.len()),
        (4096, 256, 2)
    );
    let resolved = job.resolved();
    assert_eq!(resolved["generate"]["temperature"], 1.0);
    assert_eq!(read_back(&job), job);
    assert!(
        Job::from_record(&serde_json::json!({"name": 7}), "s3://b/_gristmill/job.json")
            .unwrap_err()
            .to_string()
            .starts_with("s3://b/_gristmill/job.json: the job in this record cannot be read")
    );
    let text = "name: a\nmodel: m\ninput: {uri: x}\nprompt: {text: 'a', chat_template: 't.jinja'}\noutput: {uri: o}\n";
    assert!(
        check(text, "x.yaml")
            .unwrap_err()
            .contains("`prompt.chat_template` is for `messages`")
    );
}

#[test]
fn keys_and_values_go_with_the_precision_unless_the_job_says_otherwise() {
    let job = check(GOOD, "x.yaml").unwrap();
    assert_eq!(job.kv_cache, RequestedKvFormat::Auto);
    let job = check(&GOOD.replace("model:", "kv_cache: bf16\nmodel:"), "x.yaml").unwrap();
    assert_eq!(job.kv_cache, KvFormat::Bf16.into());
    assert_eq!(read_back(&job), job);
    // A record from before there was a choice.
    let mut record = job.resolved();
    record.as_object_mut().unwrap().shift_remove("kv_cache").unwrap();
    assert_eq!(
        Job::from_record(&record, "job.json").unwrap().kv_cache,
        RequestedKvFormat::Auto
    );
}

#[test]
fn a_job_is_deterministic_where_it_says_so() {
    let job = check(&GOOD.replace("model:", "deterministic: true\nmodel:"), "x.yaml").unwrap();
    assert!(job.deterministic);
    assert_eq!(read_back(&job), job);
    let mut record = job.resolved();
    record.as_object_mut().unwrap().shift_remove("deterministic").unwrap();
    assert!(!Job::from_record(&record, "job.json").unwrap().deterministic);
    let error = check(&GOOD.replace("model:", "deterministic: 1\nmodel:"), "x.yaml").unwrap_err();
    assert!(
        error.contains("x.yaml:2: `deterministic` is `1`, not `true` or `false`"),
        "{error}"
    );
}

#[test]
fn a_queue_is_read_and_takes_no_secrets() {
    let with = |queue: &str| check(&format!("{GOOD}queue: {queue}\n"), "x.yaml");
    let job = with(
        "{url: 'kafka://h:9092,i:9092/t?group=g', kafka: {linger.ms: 5, socket.keepalive.enable: true, compression.type: zstd}}",
    );
    let queue = job.unwrap().queue.unwrap();
    assert_eq!(queue.url, "kafka://h:9092,i:9092/t?group=g");
    let kafka: Vec<(&str, &str)> = queue.kafka.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    assert_eq!(
        kafka,
        [
            ("linger.ms", "5"),
            ("socket.keepalive.enable", "true"),
            ("compression.type", "zstd")
        ]
    );
    for (queue, word) in [
        ("{url: ''}", "`queue.url` is empty"),
        ("{url: 'amqp://u:hunter2@h/v/q'}", "`queue.url` holds a password"),
        (
            "{url: 'kafka://h/t', kafka: {sasl.password: hunter2}}",
            "`queue.kafka.sasl.password` is a secret",
        ),
        (
            "{url: 'kafka://h/t', kafka: {linger.ms: [1]}}",
            "`queue.kafka.linger.ms` must be",
        ),
        (
            "{url: 'amqp://h/v/q', kafka: {linger.ms: 1}}",
            "`queue.kafka` is for a queue",
        ),
        (
            "{url: 'kafka://h/t', kafka: {plugin.library.paths: /hunter2.so}}",
            "`queue.kafka.plugin.library.paths` loads native code, which a job file may not do: whoever runs gristmill may set it, by \
             `GRISTMILL_KAFKA_PLUGIN_LIBRARY_PATHS` in the environment or `--kafka plugin.library.paths=…`",
        ),
        (
            "{url: 'kafka://h/t', kafka: {ssl.engine.location: /hunter2.so}}",
            "loads native code",
        ),
        (
            "{url: 'kafka://h/t', kafka: {linger.ms: 5, security.protocol: plaintext}}",
            "`queue.kafka.security.protocol` is a security setting (how the broker is trusted)",
        ),
        (
            "{url: 'kafka://h/t', kafka: {sasl.mechanism: PLAIN}}",
            "`queue.kafka.sasl.mechanism` is a security setting (how the broker is trusted)",
        ),
        (
            "{url: 'kafka://h/t', kafka: {ssl_ca: x}}",
            "may set it, by `--kafka ssl_ca=…`",
        ),
        (
            "{url: 'kafka://h/t', kafka: {sasl.oauthbearer.assertion.file: x}}",
            "may set it, by `--kafka sasl.oauthbearer.assertion.file=…`",
        ),
        (
            "{url: 'kafka://h/t', kafka: {linger.mss: 1}}",
            "did you mean `linger.ms`?",
        ),
        (
            "{url: 'kafka://h/t', kafka: {acks: 0}}",
            "`queue.kafka.acks` cannot be set: gristmill needs `all`",
        ),
        (
            "{url: 'kafka://h/t', kafka: {\"a\\e[2Jb\": 0}}",
            "`queue.kafka` has a name that is none of librdkafka's",
        ),
    ] {
        let error = with(queue).unwrap_err();
        assert!(error.contains(word) && !error.contains("hunter2"), "{queue}: {error}");
    }
    let with = |budget: &str| check(&GOOD.replace("deadline: 1h30m", budget), "x.yaml");
    assert_eq!(with("deadline: 1h").unwrap().budget.unfinished, Unfinished::Keep);
    assert_eq!(
        with("unfinished: expire").unwrap().budget.unfinished,
        Unfinished::Expire
    );
    assert!(with("unfinished: drop").unwrap_err().contains("`drop`"));
}

#[test]
fn a_recheck_is_read_and_is_no_part_of_the_record() {
    let with = |report: &str| check(&GOOD.replace("{gold: category}", report), "x.yaml");
    let asked = |report: &str| with(report).unwrap().recheck.map(|asked| (asked.rows, asked.precision));
    assert_eq!(asked("{gold: category}"), None);
    assert_eq!(asked("{recheck: {}}"), Some((200, Precision::F32)));
    assert_eq!(
        asked("{recheck: {rows: 7, precision: bf16}}"),
        Some((7, Precision::Bf16))
    );
    assert_eq!(
        with("{recheck: {rows: 7}}").unwrap().resolved(),
        with("{recheck: {rows: 8}}").unwrap().resolved()
    );
    for (recheck, expected) in [
        ("{rows: 0}", "`report.recheck.rows` is 0; it must be at least 1"),
        ("{rows: -3}", "`report.recheck.rows` is -3"),
        ("{rows: many}", "`report.recheck.rows` is `many`, not a whole number"),
        (
            "{precision: int8}",
            "`report.recheck.precision` is `int8`; it must be `f32` or `bf16`",
        ),
        (
            "{precision: f23}",
            "`report.recheck.precision` is `f23`; did you mean `f32`?",
        ),
        (
            "{row: 9}",
            "unknown field `row` in `report.recheck`; did you mean `rows`?",
        ),
    ] {
        let error = with(&format!("{{recheck: {recheck}}}")).unwrap_err();
        assert!(error.contains(expected) && !error.contains('\n'), "{recheck}: {error}");
    }
    let lines = GOOD
        .replace("{gold: category}", "{recheck: {}}")
        .replace("\"out/\"", "o, format: openai");
    let error = check(&lines, "x.yaml").unwrap_err();
    assert!(
        error.contains("`report.recheck` needs `output.format` to be `parquet`"),
        "{error}"
    );
}

#[test]
fn a_cache_salt_is_kept_and_bounded() {
    let with = |salt: &str| {
        check(
            &GOOD.replace("model:", &format!("cache_salt: \"{salt}\"\nmodel:")),
            "x.yaml",
        )
    };
    let job = with("team-a").unwrap();
    assert_eq!(read_back(&job).cache_salt.as_deref(), Some("team-a"));
    let error = with("").unwrap_err();
    assert!(
        error.contains("`cache_salt` has 0 characters; it must have 1 to 256"),
        "{error}"
    );
    assert!(with(&"x".repeat(256)).is_ok());
    assert!(with(&"x".repeat(257)).unwrap_err().contains("has 257 characters"));
    let without = check(GOOD, "x.yaml").unwrap().resolved();
    assert_eq!(
        without.get("cache_salt"),
        None,
        "records of jobs without one are as before"
    );
}

#[test]
fn the_hash_knows_content_not_form() {
    let hash = |text: &str, name: &str| JobFile::parse(text, name).unwrap().hash;
    let yaml = "name: a\nmodel: m\ninput: {uri: x}\nprompt: {text: t}\noutput: {uri: o}\n";
    let same = "# a comment\noutput:\n  uri: o\nprompt:\n  text: t\ninput:\n  uri: x\nmodel: 'm'\nname: a\n";
    let json = r#"{"name": "a", "model": "m", "input": {"uri": "x"}, "prompt": {"text": "t"}, "output": {"uri": "o"}}"#;
    assert_eq!(hash(yaml, "a.yaml"), hash(same, "a.yaml"));
    assert_eq!(hash(yaml, "a.yaml"), hash(json, "a.json"));
    assert_eq!(hash(yaml, "a.yaml"), hash(&format!("\u{FEFF}{json}"), "a.yaml"));
    for (from, to) in [("uri: x", "uri: y"), ("text: t", "text: u")] {
        assert_ne!(hash(yaml, "a.yaml"), hash(&yaml.replace(from, to), "a.yaml"), "{to}");
    }
    // They change no answer, or are compared by themselves.
    for (from, to) in [
        ("uri: o", "uri: p"),
        ("name: a", "name: b"),
        (
            "model: m",
            "model: n\nprecision: int8\nkv_cache: bf16\nshards: {rows: 9}",
        ),
    ] {
        assert_eq!(hash(yaml, "a.yaml"), hash(&yaml.replace(from, to), "a.yaml"), "{to}");
    }
    // As older gristmills gave it, with all of these and with the price of the time.
    let job = Job::check(JobFile::parse(yaml, "a.yaml").unwrap(), "a.yaml", Path::new(".")).unwrap();
    for (content, price) in [
        (
            r#"{"input":{"uri":"x"},"model":"m","name":"a","output":{"uri":"o"},"prompt":{"text":"t"}}"#,
            None,
        ),
        (
            r#"{"budget":{"usd_per_hour":5},"input":{"uri":"x"},"model":"m","name":"a","output":{"uri":"o"},"prompt":{"text":"t"}}"#,
            Some(5.0),
        ),
    ] {
        use sha2::Digest;
        let earlier: String = sha2::Sha256::digest(content)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        assert!(job.has_hash(&earlier, price), "{content}");
        assert!(!job.has_hash(&earlier.replace('a', "b"), price));
    }
    assert_eq!(
        hash(yaml, "a.yaml"),
        hash(&format!("{yaml}budget: {{usd: 5}}\n"), "a.yaml"),
        "the same job, with money"
    );
    let limits = "budget: {deadline: 6h, unfinished: expire}\nqueue: {url: 'kafka://h:1/t', kafka: {linger.ms: 5}}\n";
    assert_eq!(
        hash(yaml, "a.yaml"),
        hash(&format!("{yaml}{limits}"), "a.yaml"),
        "the same job, with a deadline and a queue"
    );
    assert_eq!(
        hash(yaml, "a.yaml"),
        hash(&format!("{yaml}budget: {{usd_per_hour: 5}}\n"), "a.yaml"),
        "the same job, at another price"
    );
    let gold = format!("{yaml}report: {{gold: g}}\n");
    for (bare, asked) in [
        (yaml, format!("{yaml}report: {{recheck: {{rows: 9}}}}\n")),
        (&gold, format!("{yaml}report: {{gold: g, recheck: {{rows: 9}}}}\n")),
    ] {
        assert_eq!(
            hash(bare, "a.yaml"),
            hash(&asked, "a.yaml"),
            "the same job, looked at afterwards"
        );
    }
    assert_ne!(hash(yaml, "a.yaml"), hash(&gold, "a.yaml"));
    assert_eq!(hash(yaml, "a.yaml").len(), 64);
}

#[test]
fn a_parameter_becomes_what_its_field_wants() {
    let text = "name: '${one}'\nmodel: m\ninput: {uri: x}\noutput: {uri: o}\ngenerate: {max_tokens: '${one}', ignore_eos: '${yes}'}\n\
                prompt: {text: '${one}', chat_template_kwargs: {enable_thinking: '${yes}', depth: '${one}', note: 'x ${one}'}}\n";
    let set = [("one", "1"), ("yes", "true")].map(|(name, value)| (name.to_string(), value.to_string()));
    let parameters = Parameters::new(&set).unwrap();
    let file = JobFile::parse_with(text, "a.yaml", Path::new("."), &parameters)
        .unwrap()
        .file;
    let generate = file.generate.unwrap();
    assert_eq!(file.name, "1");
    assert_eq!((generate.max_tokens, generate.ignore_eos), (Some(1), Some(true)));
    let prompt = file.prompt.unwrap();
    assert_eq!(prompt.text.as_deref(), Some("1"));
    let kwargs = serde_json::json!({"enable_thinking": true, "depth": 1, "note": "x 1"});
    assert_eq!(prompt.chat_template_kwargs.map(serde_json::Value::Object), Some(kwargs));
}

#[test]
fn the_seed_is_given_or_derived() {
    let job = check(GOOD, "x.yaml").unwrap();
    assert_ne!(job.seed("one"), job.seed("two"));
    assert_eq!(job.seed("one"), job.seed("one"));
    let job = check(
        &GOOD.replace("max_tokens: 8", "max_tokens: 8, seed: 18446744073709551615"),
        "x.yaml",
    )
    .unwrap();
    assert_eq!(job.seed("one"), u64::MAX);
}

#[test]
fn unknown_fields_suggest_the_near_one() {
    assert_eq!(
        message("temperature: 0", "temperture: 0"),
        "jobs/x.yaml:8: unknown field `temperture` in `generate`; did you mean `temperature`?"
    );
    assert_eq!(
        message("shards:", "shard:"),
        "jobs/x.yaml:10: unknown field `shard`; did you mean `shards`?"
    );
    assert_eq!(
        message("{role: user, content", "{role: user, contents"),
        "jobs/x.yaml:7: unknown field `contents` in `prompt.messages[1]`; did you mean `content`?"
    );
    for (to, words) in [
        (
            "rows: 5\nshards:",
            "`rows`; it is a field of `input.sample`, `shards`, `report.recheck`",
        ),
        ("deadline: 6h\nshards:", "`deadline`; it is a field of `budget`"),
        ("temperature: 1\nshards:", "`temperature`; it is a field of `generate`"),
    ] {
        assert_eq!(message("shards:", to), format!("jobs/x.yaml:10: unknown field {words}"));
    }
    let far = message("shards:", "zzzzzz:");
    assert!(
        far.contains("unknown field `zzzzzz`; known are `") && far.contains("`budget`"),
        "{far}"
    );
    let json = "{\n \"name\": \"a\",\n \"modle\": \"m\"\n}";
    let error = check(json, "x.json").unwrap_err();
    assert!(
        error.starts_with("x.json:3: unknown field `modle`; did you mean `model`?"),
        "{error}"
    );
}

#[test]
fn bad_values_name_their_field() {
    let generate = "max_tokens: 8, temperature: 0, choice: [billing, shipping, yes, no]";
    for (text, expected) in [
        (
            "max_tokens: 0",
            "`generate.max_tokens` is 0; it must be from 1 to 1048576",
        ),
        ("max_tokens: -1", "`generate.max_tokens` is -1"),
        ("max_tokens: 99999999999", "`generate.max_tokens` is 99999999999"),
        (
            "temperature: .nan",
            "`generate.temperature` is NaN; it must be from 0 to 100",
        ),
        ("temperature: -0.1", "`generate.temperature` is -0.1"),
        ("temperature: .inf", "`generate.temperature` is inf"),
        ("top_p: 1.5", "`generate.top_p` is 1.5"),
        ("top_p: 0", "`generate.top_p` is 0"),
        ("top_k: -1", "`generate.top_k` is -1"),
        ("min_p: 2", "`generate.min_p` is 2"),
        ("repetition_penalty: 0", "`generate.repetition_penalty` is 0"),
        ("presence_penalty: .nan", "`generate.presence_penalty` is NaN"),
        ("frequency_penalty: 1000", "`generate.frequency_penalty` is 1000"),
        ("n: 0", "`generate.n` is 0; it must be from 1 to 1024"),
        ("choice: []", "`generate.choice` has 0 texts"),
        ("choice: [a, b, a]", "`generate.choice` holds `a` twice"),
        ("choice: ['']", "`generate.choice` holds an empty text"),
        (
            "choice: [a], regex: a",
            "`generate.regex` cannot stand beside `choice`: an answer has one shape",
        ),
        (
            "json_schema: {}, regex: a",
            "`generate.regex` cannot stand beside `json_schema`",
        ),
        ("json_schema: 3", "`generate.json_schema` is no JSON Schema"),
        ("regex: ''", "`generate.regex` is empty"),
        ("stop: ['']", "`generate.stop` holds an empty text"),
        (
            "choice: [a], stop: b",
            "`generate.stop` cannot stand beside `choice`: an answer ends where its choice is whole",
        ),
        (
            "choice: [a], stop_token_ids: [1]",
            "`generate.stop_token_ids` cannot stand beside `choice`",
        ),
        (
            "choice: [a], ignore_eos: true",
            "`generate.ignore_eos` cannot stand beside `choice`",
        ),
        (
            "n: 2",
            "`report.gold` needs `generate.n` to be 1: it compares one answer a row",
        ),
        (
            "choice_probabilities: true",
            "`generate.choice_probabilities` needs `choice`",
        ),
        (
            "choice: [a], choice_probabilities: true, n: 2",
            "`generate.choice_probabilities` needs `n` to be 1",
        ),
    ] {
        let error = message(generate, text);
        assert!(error.contains(expected), "{error}");
    }
    for (from, to, expected) in [
        ("name: label-tickets", "name: ''", "`name` is empty"),
        (
            "name: label-tickets",
            "name: \"a\\nb\"",
            "`name` holds control characters",
        ),
        ("hf://Qwen/Qwen3-8B", "' '", "`model` is empty"),
        (
            "\"s3://tickets/2026-11/*.parquet\"",
            "[]",
            "`input.uri` is an empty list",
        ),
        (
            "model:",
            "precision: f16\nmodel:",
            "`precision` is `f16`; this build does not support it",
        ),
        (
            "model:",
            "precision: int4\nmodel:",
            "`precision` is `int4`; `w4a8` keeps weights in the 4 bits of a checkpoint",
        ),
        (
            "model:",
            "kv_cache: w4a8\nmodel:",
            "`kv_cache` is `w4a8`; it is a format of weights; take `int4` or `int8`",
        ),
        (
            "model:",
            "kv_cache: f16\nmodel:",
            "`kv_cache` is `f16`; this build does not support it; it has `f32`, `bf16`, `int8`, `fp8`, `int4`",
        ),
        (
            "model:",
            "kv_cache: int9\nmodel:",
            "`kv_cache` is `int9`; did you mean `int8`?",
        ),
        (
            "model:",
            "precision: bf61\nmodel:",
            "`precision` is `bf61`; did you mean `bf16`?",
        ),
        ("rows: 100", "rows: 0", "`shards.rows` is 0"),
        ("usd: 5.00", "usd: -1", "`budget.usd` is -1"),
        ("usd: 5.00", "usd: .nan", "`budget.usd` is NaN"),
        (", usd_per_hour: 2.60", "", "`budget.usd` needs `budget.usd_per_hour`"),
        ("1h30m", "soon", "`budget.deadline` is `soon`: a time looks like `6h`"),
        ("1h30m", "0h", "`budget.deadline` is `0h`: it is no time at all"),
        ("1h30m", "99999999999999999999h", "`budget.deadline` is"),
        ("1h30m", "9000d", "longer than ten years"),
        (
            "1h30m",
            "6",
            "`budget.deadline` is `6`: `6` has no unit: write `6h` for hours, or `6s`, `6m`, `6d`",
        ),
        ("[ticket_id]", "[a, a]", "`output.carry` holds `a` twice"),
        (
            "[ticket_id]",
            "[status]",
            "`output.carry` holds `status`, which is the name of a result column",
        ),
        ("\"out/\"", "''", "`output.uri` is empty"),
        (
            "\"out/\"",
            "\"out/\", format: openai",
            "`report.gold` needs `output.format` to be `parquet`",
        ),
        (
            "prompt:\n",
            "prompt:\n  text: a\n",
            "`prompt` says more than one of `messages`, `text` and `token_ids`",
        ),
        (
            "prompt:\n",
            "prompt:\n  chat_template: no.jinja\n",
            "`prompt.chat_template` names `no.jinja`: ",
        ),
        (
            "prompt:\n",
            "prompt:\n  chat_template_kwargs: {messages: []}\n",
            "cannot set `messages`",
        ),
        (
            "content: \"Answer with the one category that fits.\"",
            "content: []",
            "`prompt.messages[0].content` is an empty list",
        ),
    ] {
        let error = message(from, to);
        assert!(error.contains(expected), "{error}");
    }
    let messages = &GOOD[GOOD.find("  messages").unwrap()..GOOD.find("generate").unwrap()];
    assert!(message(messages, "  messages: []\n").contains("`prompt.messages` is an empty list"));
    assert!(message(messages, "  text: ''\n").contains("`prompt.text` is empty"));
}

#[test]
fn openai_results_refuse_what_they_have_no_place_for() {
    let job = |generate: &str, output: &str| {
        let text = format!(
            "name: a\nmodel: m\ninput: {{uri: x}}\ngenerate: {{{generate}}}\noutput: {{uri: o, format: openai{output}}}\n"
        );
        check(&text, "x.yaml")
    };
    assert!(
        job(
            "logprobs: false, choice: [a], choice_probabilities: false",
            ", token_ids: false"
        )
        .is_ok()
    );
    for (generate, output, field) in [
        ("logprobs: true", "", "generate.logprobs"),
        (
            "choice: [a], choice_probabilities: true",
            "",
            "generate.choice_probabilities",
        ),
        ("", ", token_ids: true", "output.token_ids"),
    ] {
        let error = job(generate, output).unwrap_err();
        let expected = format!("x.yaml: `{field}` needs `output.format` to be `parquet`");
        assert!(error.starts_with(&expected), "{error}");
    }
}

/// A batch through the built binary: each result has its line's `custom_id`, and the form that its `url` asks for.
#[test]
fn batch_results_are_those_of_their_lines() {
    let folder = tempfile::tempdir().unwrap();
    let line = |id: &str, url: &str, prompt: serde_json::Value| {
        let mut body = serde_json::json!({"max_tokens": 2, "temperature": 0});
        body.as_object_mut()
            .unwrap()
            .extend(prompt.as_object().unwrap().clone());
        serde_json::json!({"custom_id": id, "method": "POST", "url": url, "body": body}).to_string() + "\n"
    };
    let messages = serde_json::json!({"messages": [{"role": "user", "content": "hi"}]});
    let lines = [
        line("first", "/v1/chat/completions", messages.clone()),
        line("second", "/v1/completions", serde_json::json!({"prompt": "hi"})),
        line(
            "third",
            "/v1/chat/completions",
            serde_json::json!({"messages": [], "n": 1}),
        ),
    ];
    std::fs::write(folder.path().join("in.jsonl"), lines.concat()).unwrap();
    let model = root().join("jobs/demo/model");
    let run = |format: &str| {
        let job = folder.path().join(format!("{format}.yaml"));
        let text = format!(
            "name: batch\nmodel: {}\ninput: {{uri: in.jsonl}}\noutput: {{uri: {format}, format: {format}}}\n",
            model.display()
        );
        std::fs::write(&job, text).unwrap();
        let run = Run::of(&mut gristmill(&["run", arg(&job), "--json"]));
        assert_eq!(run.json()["rows"]["succeeded"], 2, "{}", run.stderr);
    };
    run("openai");
    let part = std::fs::read_to_string(folder.path().join("openai/part-00000.jsonl")).unwrap();
    let results: Vec<serde_json::Value> = part.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let seen = |i: usize| (&results[i]["custom_id"], &results[i]["response"]["body"]["object"]);
    assert_eq!(seen(0), (&"first".into(), &"chat.completion".into()));
    assert_eq!(seen(1), (&"second".into(), &"text_completion".into()));
    assert_eq!(seen(2), (&"third".into(), &serde_json::Value::Null));
    assert_eq!(results[2]["error"]["code"], "errored");

    run("parquet");
    let part = std::fs::read(folder.path().join("parquet/part-00000.parquet")).unwrap();
    let part = gristmill::dataset::part::read_parquet(part.into()).unwrap();
    let names: Vec<&String> = part.schema.fields().iter().map(|f| f.name()).collect();
    assert_eq!(names[..2], ["custom_id", "row"]);
}

#[test]
fn bad_form_names_the_line() {
    for (from, to, line, expected) in [
        (
            "role: user",
            "role: usr",
            7,
            "`prompt.messages[1].role` is `usr`, not `system`",
        ),
        (
            "max_tokens: 8",
            "max_tokens: many",
            8,
            "`generate.max_tokens` is `many`, not a whole number",
        ),
        (
            "{max_tokens: 8,",
            "{max_tokens: 8, max_tokens: 9,",
            8,
            "`max_tokens` is given twice",
        ),
        (
            "temperature: 0",
            "temperature: [0]",
            8,
            "`generate.temperature` is a list, not a number",
        ),
        ("name: label-tickets\n", "", 11, "missing field `name`"),
        (
            "content: \"{{ subject",
            "content: {{ subject",
            9,
            "double-quoted scalar",
        ),
        ("model: hf", "\tmodel: hf", 1, "found a tab"),
    ] {
        let error = message(from, to);
        assert!(
            error.starts_with(&format!("jobs/x.yaml:{line}: ")) && error.contains(expected),
            "{error}"
        );
    }
    for text in ["", "- a\n", "just text", "3", "{", "a: &a [*a]", "\u{0}"] {
        let error = check(text, "x.yaml").unwrap_err();
        assert!(error.starts_with("x.yaml") && !error.contains('\n'), "{error}");
    }
    let error = check("{\"name\": ", "x.json").unwrap_err();
    assert!(error.starts_with("x.json:1: ") && !error.contains('\n'), "{error}");
}

/// Of each field a value of another type: one line with the file, the field, and what it may be.
#[test]
fn each_field_of_another_type_says_what_it_may_be() {
    let of = |fields: &[(&str, &str)]| -> Vec<(String, String)> {
        fields
            .iter()
            .map(|(field, may)| (field.to_string(), may.to_string()))
            .collect()
    };
    let text = "a text";
    let flag = "`true` or `false`";
    for (block, fields) in [
        (
            "",
            of(&[
                ("deterministic", flag),
                ("shards", "a mapping of `rows`: write `shards: {rows: 7}`"),
                ("budget", "a mapping of `usd`, `usd_per_hour`, `deadline`, `unfinished`"),
                ("queue", "a mapping of `url`, `kafka`"),
                ("report", "a mapping of `gold`, `recheck`"),
                ("generate", "a mapping"),
            ]),
        ),
        (
            "input",
            of(&[
                ("uri", "expected a text or a list of texts"),
                ("format", "`parquet`"),
                ("columns", "a list"),
                ("types", "a mapping"),
                ("hive", flag),
                ("where", "a mapping"),
                ("missing_columns", "`error` or `nulls`"),
                ("skip_unreadable", flag),
                ("sample", "a mapping of `rows`, `fraction`, `seed`"),
            ]),
        ),
        (
            "prompt",
            of(&[
                ("messages", "a list"),
                ("chat_template_kwargs", "a mapping"),
                ("add_generation_prompt", flag),
                ("continue_final_message", flag),
                ("truncate", "`none`, `left` or `right`"),
            ]),
        ),
        (
            "generate",
            of(&[
                ("defaults", "`model` or `neutral`"),
                ("stop", "expected a text or a list of texts"),
                ("stop_token_ids", "a list"),
                ("ignore_eos", flag),
                ("logprobs", flag),
                (
                    "thinking",
                    "expected `false`, or a mapping of `open`, `close`, `max_tokens` and `end_text`",
                ),
                ("choice", "a list"),
                ("choice_probabilities", flag),
            ]),
        ),
        (
            "output",
            of(&[
                (
                    "carry",
                    "expected a list of columns, `\"*\"`, or a mapping of new names to columns",
                ),
                ("format", "`parquet` or `openai`"),
                ("compression", "`zstd`, `snappy`, `gzip` or `none`"),
                ("parsed", "`text` or `typed`"),
                ("token_ids", flag),
            ]),
        ),
        ("budget", of(&[("unfinished", "`keep` or `expire`")])),
        ("report", of(&[("recheck", "a mapping of `rows`, `precision`")])),
    ] {
        for (field, may) in fields {
            for name in ["x.yaml", "x.json"] {
                let mut job = serde_json::json!({"name": "a", "model": "m", "input": {"uri": "x"}, "prompt": {"text": "t"}, "output": {"uri": "o"}});
                let (path, at) = match block {
                    "" => (field.clone(), &mut job[&field]),
                    block => (format!("{block}.{field}"), &mut job[block][&field]),
                };
                *at = 7.into();
                let error = check(&job.to_string(), name).unwrap_err();
                let begin = format!("{name}:1: `{path}` is `7`");
                assert!(
                    error.starts_with(&begin) && error.contains(&may) && !error.contains('\n'),
                    "{path}: {error}"
                );
            }
        }
    }
    // Numbers, by a text and by one that is out of range; and where a text must be.
    for (path, may) in [
        ("context", "a whole number"),
        ("generate.seed", "a whole number from 0 to 18446744073709551615"),
        ("generate.max_tokens", "a whole number from 1 to 1048576"),
        ("generate.temperature", "a number from 0 to 100"),
        ("generate.n", "a whole number from 1 to 1024"),
        ("output.compression_level", "a whole number from 1 to 22"),
        ("output.row_group_rows", "a whole number from 100 to 1000000"),
        ("shards.rows", "a whole number from 1 to 1000000"),
        ("report.recheck.rows", "a whole number from 1 on"),
        ("budget.usd", "a number"),
        ("input.limit", "a whole number from 1 on"),
        ("input.sample.rows", "a whole number from 0 to 18446744073709551615"),
        ("name", text),
        ("output.uri", text),
        ("prompt.text", "a text or a mapping of `file`"),
        ("queue.url", text),
    ] {
        let mut job = serde_json::json!({"name": "a", "model": "m", "input": {"uri": "x"}, "prompt": {"text": "t"}, "output": {"uri": "o"}});
        let at = path.split('.').fold(&mut job, |at, field| &mut at[field]);
        *at = serde_json::json!({"a": 1});
        for name in ["x.yaml", "x.json"] {
            let error = check(&job.to_string(), name).unwrap_err();
            assert_eq!(error, format!("{name}:1: `{path}` is a mapping, not {may}"));
        }
    }
    for (from, to, line) in [
        (
            "max_tokens: 8",
            "seed: -1",
            "`generate.seed` is `-1`, not a whole number from 0 to 18446744073709551615",
        ),
        (
            "[ticket_id]",
            "true",
            "`output.carry` is `true`: expected a list of columns",
        ),
        ("[ticket_id]", "[a, 5]", "`output.carry[1]` is `5`, not a text"),
        (
            "max_tokens: 8",
            "thinking: {max_tokens: a}",
            "`generate.thinking.max_tokens` is `a`, not a whole number from 0 to 1048576",
        ),
        (
            "{rows: 100}",
            "100",
            "`shards` is `100`, not a mapping of `rows`: write `shards: {rows: 100}`",
        ),
    ] {
        let error = message(from, to);
        assert!(error.contains(line), "{error}");
    }
}

/// What this machine cannot compute must not hold the output against the job file once it is mended.
#[test]
fn formats_that_cannot_be_computed_here_are_refused_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    write_tickets(folder.path(), 3);
    let rest = "context: 128\ninput: {uri: rows.jsonl}\nprompt: {text: '{{ text }} ->'}\ngenerate: {max_tokens: 1}\noutput: {uri: out}\n";
    for formats in ["precision: fp8", "precision: int8\nkv_cache: fp8"] {
        let (path, output) = demo_job(folder.path(), "formats", rest);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("precision: f32", formats)).unwrap();
        let words = [
            "job.yaml: in ",
            "fp8, it cannot run here: a CPU does not compute in fp8: ask for `int8`",
        ];
        Run::of(&mut gristmill(&["run", arg(&path), "--device", "cpu"]))
            .expect(2)
            .one_line(&words);
        assert!(!output.exists());
        // Others may compute it: `plan` warns, here where it finds no card.
        let planned =
            Run::of(gristmill(&["plan", arg(&path), "--json"]).env("GRISTMILL_CUDA_LIBRARIES", folder.path()))
                .expect(0);
        let warnings = planned.json()["warnings"].to_string();
        assert!(
            words
                .iter()
                .all(|words| planned.stderr.contains(words) && warnings.contains(words)),
            "{planned:?}"
        );
        std::fs::write(&path, text).unwrap();
        Run::of(&mut gristmill(&["run", arg(&path), "--device", "cpu", "--quiet"])).expect(0);
        // A part is no output.
        let part = output.join("part-00000.parquet");
        Run::of(&mut gristmill(&["verify", arg(&part)])).expect(2).one_line(&[
            arg(&part),
            "is a file: name the folder of the job's output, such as `",
            "/out`",
        ]);
        std::fs::remove_dir_all(&output).unwrap();
    }
}

/// A column `row` takes the name that templates have for all columns.
#[test]
fn a_column_called_row_is_not_taken_for_all_columns() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(
        folder.join("rows.jsonl"),
        "{\"row\": 7, \"text\": \"hi\", \"two words\": \"x\"}\n",
    )
    .unwrap();
    py(
        folder,
        "import pyarrow as pa, pyarrow.parquet as pq\npq.write_table(pa.table({'row': [{'text': 'inner'}], 'text': ['outer']}), 'rows.parquet')",
    );
    let plan = |input: &str, template: &str| {
        let rest = format!(
            "context: 128\ninput: {{uri: {input}}}\nprompt: {{text: \"{template}\"}}\ngenerate: {{max_tokens: 1}}\noutput: {{uri: out}}\n"
        );
        let (path, _) = demo_job(folder, "row", &rest);
        Run::of(&mut gristmill(&["plan", arg(&path), "--json"]))
    };
    for (template, words) in [
        ("{{ row.text }}", "its `text` is not the column `text`: write `text`"),
        ("{{ row.text | default('') }}", "its `text` is not the column `text`"),
        (
            "{% if 'text' in row %}a{% endif %}b",
            "its `text` is not the column `text`",
        ),
        (
            "{{ row['two words'] }}",
            "its `two words` is not the column `two words`: call that column otherwise",
        ),
    ] {
        plan("rows.jsonl", template).expect(2).one_line(&[
            "job.yaml: template `prompt.text`: the input has a column `row`, so `row` means that one",
            words,
        ]);
    }
    for (input, template, prompt) in [
        ("rows.jsonl", "{{ row }} {{ text }}", "7 hi"),
        ("rows.parquet", "{{ row.text }} {{ text }}", "inner outer"),
    ] {
        let planned = plan(input, template).expect(0).json();
        assert_eq!(planned["preview"][0]["text"], prompt, "{planned}");
    }
}

#[test]
fn hostile_files_are_refused() {
    let deep = format!("name: {}{}", "[".repeat(5_000), "]".repeat(5_000));
    assert!(check(&deep, "x.yaml").is_err());
    assert!(check(&format!("{{\"name\": {}", "[".repeat(5_000)), "x.json").is_err());
    let laughs = (1..12).fold(String::from("a0: &a0 [x, x, x, x, x, x, x, x]\n"), |text, i| {
        let before = i - 1;
        text + &format!("a{i}: &a{i} [{}]\n", vec![format!("*a{before}"); 9].join(", "))
    });
    assert!(check(&laughs, "x.yaml").is_err());
}

#[test]
fn files_are_read_from_disk() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("job.yaml");
    let error = Job::load(&path, &Parameters::default()).unwrap_err().to_string();
    assert!(error.contains("cannot read `") && error.contains("job.yaml"), "{error}");
    std::fs::write(dir.path().join("my.jinja"), "{{ messages }}").unwrap();
    std::fs::write(&path, GOOD.replace("prompt:\n", "prompt:\n  chat_template: my.jinja\n")).unwrap();
    let job = Job::load(&path, &Parameters::default()).unwrap();
    assert_eq!(job.base_dir, dir.path());
    assert_eq!(
        job.prompt.chat_template,
        Some(ChatTemplateChoice::Source("{{ messages }}".into()))
    );
    std::fs::write(&path, [0xFF, 0xFE]).unwrap();
    assert!(
        Job::load(&path, &Parameters::default())
            .unwrap_err()
            .to_string()
            .contains("not UTF-8")
    );
    std::fs::write(&path, " ".repeat(5 << 20)).unwrap();
    assert!(
        Job::load(&path, &Parameters::default())
            .unwrap_err()
            .to_string()
            .contains("more than")
    );
}
