//! Records that nobody wrote so: each number, text and list of a good one changed, one at a time. What comes of it is a refusal
//! in one line that names the record, or something that is within the bounds of a job file.

use bytes::Bytes;
use gristmill::job::{Job, JobFile, Parameters};
use gristmill::ledger::entry::{LogEntry, LogRecord, VoidRecord};
use gristmill::ledger::keys::JOB;
use gristmill::ledger::order::ControlRecord;
use gristmill::ledger::record::{
    AttemptEnd, AttemptRecord, CleanedMark, Commit, Digest, Generation, Record, RetriedRows, Spend, Success, decode,
};
use gristmill::ledger::{JobRecord, Ledger, LedgerError, Store};
use object_store::ObjectStoreExt;
use serde_json::{Value, json};

use crate::ledger::support::{draft, eager, memory};
use crate::support::root;

/// The pointers to all values within `value`.
fn places(value: &Value, at: String, found: &mut Vec<String>) {
    match value {
        Value::Array(items) => {
            for (n, item) in items.iter().enumerate() {
                places(item, format!("{at}/{n}"), found);
            }
        }
        Value::Object(map) => {
            for (key, item) in map {
                places(
                    item,
                    format!("{at}/{}", key.replace('~', "~0").replace('/', "~1")),
                    found,
                );
            }
        }
        _ => {}
    }
    found.push(at);
}

/// What stands in the place of a value.
fn hostile(value: &Value) -> Vec<Value> {
    let huge = "x".repeat(1 << 20);
    let mut out = vec![
        Value::Null,
        json!(0),
        json!(-1),
        json!(1u64 << 31),
        json!(4_000_000_000u64),
        json!(1u64 << 36),
        json!(1u64 << 63),
        json!(u64::MAX),
        json!(1e300),
        json!(-1e300),
        json!(1e-300),
        json!(""),
        json!("\u{0}\n\u{1b}[2J"),
        json!(huge),
        json!([]),
        json!({}),
        json!(true),
        json!([[[[]]]]),
    ];
    match value {
        Value::Array(items) => {
            out.push([items.clone(), items.clone()].concat().into());
            out.push(items.iter().rev().cloned().collect());
            out.push(items.first().cloned().into_iter().cycle().take(3000).collect());
        }
        Value::String(text) => out.push(format!("{text}{text}").into()),
        Value::Object(map) => {
            let mut more = map.clone();
            more.insert("unknown".into(), json!([1, 2]));
            out.push(more.into());
        }
        _ => {}
    }
    out
}

/// Calls `each` with `good` changed at one place, for each place and each change. Returns how many there were.
fn changed(good: &Value, mut each: impl FnMut(&str, Value)) -> usize {
    let mut all = Vec::new();
    places(good, String::new(), &mut all);
    let mut count = 0;
    for at in all {
        for new in hostile(good.pointer(&at).unwrap()) {
            let mut record = good.clone();
            *record.pointer_mut(&at).unwrap() = new;
            each(&at, record);
            count += 1;
        }
    }
    count
}

fn job_of(text: &str) -> Job {
    let parsed = JobFile::parse(text, "x.yaml").unwrap();
    Job::check(parsed, "x.yaml", std::path::Path::new("/jobs")).unwrap()
}

/// Jobs that have between them every field that a job can have.
fn jobs() -> Vec<Job> {
    let mut jobs: Vec<Job> = [
        "label-tickets",
        "label-tickets-csv",
        "label-tickets-thinking",
        "write-tickets",
    ]
    .iter()
    .map(|name| Job::load(&root().join(format!("jobs/{name}.yaml")), &Parameters::default()).unwrap())
    .collect();
    let generate = [
        "{n: 3, logprobs: true, seed: 7, stop: [a, b], stop_token_ids: [1, 2], top_k: 4, top_p: 0.5, min_p: 0.1}",
        "{choice: [a, b], choice_probabilities: true, repetition_penalty: 1.1}",
        "{regex: '[a-z]+', ignore_eos: true, presence_penalty: 0.5, frequency_penalty: -0.5}",
        "{thinking: {open: '<a>', close: '</a>', max_tokens: 9, end_text: enough}, max_tokens: 100}",
    ];
    let prompts = [
        "{text: 'a {{ b }}', truncate: left}",
        "{token_ids: ids}",
        "{messages: [{role: user, content: [{type: text, text: a}, {type: text, text: b}]}], chat_template: '{{ messages }}'}",
        "{messages: [{role: assistant, content: a}], continue_final_message: true, chat_template_kwargs: {a: [1, {b: c}]}}",
    ];
    for (generate, prompt) in generate.iter().zip(prompts) {
        jobs.push(job_of(&format!(
            "name: a\nmodel: m\nkv_cache: f32\ncontext: 512\ninput: {{uri: [x, 'y/*'], format: jsonl}}\nprompt: {prompt}\n\
             generate: {generate}\noutput: {{uri: o, carry: [c, d], token_ids: true}}\nshards: {{rows: 10}}\n\
             budget: {{usd: 1, usd_per_hour: 2, deadline: 1h, unfinished: expire}}\n"
        )));
    }
    jobs
}

/// Are all numbers of the job within the bounds of a job file?
fn check_bounds(job: &Job, at: &str) {
    let generate = &job.generate;
    let numbers = [
        ("n", f64::from(generate.n), 1.0, 1024.0),
        ("max_tokens", f64::from(generate.max_tokens), 1.0, f64::from(1 << 20)),
        ("temperature", generate.sampling.temperature.into(), 0.0, 100.0),
        ("top_p", generate.sampling.top_p.into(), f64::MIN_POSITIVE, 1.0),
        ("min_p", generate.sampling.min_p.into(), 0.0, 1.0),
        (
            "repetition_penalty",
            generate.sampling.repetition_penalty.into(),
            0.0099,
            100.0,
        ),
        (
            "presence_penalty",
            generate.sampling.presence_penalty.into(),
            -100.0,
            100.0,
        ),
        (
            "frequency_penalty",
            generate.sampling.frequency_penalty.into(),
            -100.0,
            100.0,
        ),
        ("context", job.context.map_or(2.0, f64::from), 2.0, f64::from(1 << 26)),
        ("shard_rows", job.shard_rows as f64, 1.0, 1e6),
        ("usd", job.budget.usd.unwrap_or(0.0), 0.0, f64::MAX),
        ("usd_per_hour", job.budget.usd_per_hour.unwrap_or(0.0), 0.0, f64::MAX),
        (
            "deadline",
            job.budget.deadline_seconds.unwrap_or(0) as f64,
            0.0,
            315_360_000.0,
        ),
    ];
    for (name, value, low, high) in numbers {
        assert!((low..=high).contains(&value), "{at}: {name} is {value}");
    }
    assert!(!job.name.is_empty() && job.name.len() <= 16 << 10, "{at}");
    assert!(!job.name.contains(char::is_control), "{at}");
    assert!(!job.input.uris.is_empty() && !job.output.uri.is_empty(), "{at}");
    assert!(generate.stop.iter().all(|text| !text.is_empty()), "{at}");
    assert!(
        generate.stop.len() <= 4096 && generate.stop_token_ids.len() <= 64,
        "{at}"
    );
    let again = Job::from_record(&job.resolved(), "again").unwrap();
    // Its folder is made absolute where it is not.
    let again = Job {
        base_dir: job.base_dir.clone(),
        ..again
    };
    assert_eq!(again, *job, "{at}: what was taken can be taken again");
}

#[test]
fn a_recorded_job_is_what_a_job_file_can_say_or_refused() {
    let (mut refused, mut count) = (0, 0);
    for job in jobs() {
        let good = job.resolved();
        check_bounds(&Job::from_record(&good, "good").unwrap(), "good");
        count += changed(&good, |at, record| match Job::from_record(&record, "s3://b/job.json") {
            Ok(job) => check_bounds(&job, at),
            Err(error) => {
                let error = error.to_string();
                assert!(
                    error.starts_with("s3://b/job.json: the job in this record cannot be "),
                    "{at}: {error}"
                );
                assert!(
                    !error.contains('\n') && error.len() < 2000,
                    "{at}: {} bytes",
                    error.len()
                );
                refused += 1;
            }
        });
    }
    assert!(count > 5000 && refused > count / 2, "{refused} of {count} are refused");
}

#[test]
fn the_refusal_names_the_field() {
    let job = &jobs()[3];
    for (at, new, words) in [
        (
            "/generate/n",
            json!(4_000_000_000u64),
            "`generate.n` is 4000000000; it must be from 1 to 1024",
        ),
        ("/generate/n", json!(0), "`generate.n` is 0"),
        ("/generate/temperature", json!(1e300), "`generate.temperature` is inf"),
        ("/generate/top_p", json!(0), "`generate.top_p` is 0"),
        (
            "/generate/max_tokens",
            json!(1u64 << 31),
            "`generate.max_tokens` is 2147483648",
        ),
        ("/generate/stop", json!([""]), "`generate.stop` holds an empty text"),
        (
            "/generate/forbidden/min_length",
            json!(u32::MAX),
            "`generate.forbidden.min_length` is 4294967295",
        ),
        ("/context", json!(0), "`context` is 0"),
        ("/shard_rows", json!(u64::MAX), "`shards.rows` is 18446744073709551615"),
        ("/input/uris", json!([]), "`input.uri` is an empty list"),
        ("/output/carry", json!(["row"]), "`output.carry` holds `row`"),
        ("/budget/usd", json!(-1), "`budget.usd` is -1"),
        ("/budget/deadline_seconds", json!(u64::MAX), "`budget.deadline` is"),
        (
            "/prompt/kind",
            json!({"messages": []}),
            "`prompt.messages` is an empty list",
        ),
        ("/name", json!("a\u{1b}[2J"), "`name` holds control characters"),
    ] {
        let mut record = job.resolved();
        *record.pointer_mut(at).unwrap() = new;
        let error = Job::from_record(&record, "job.json").unwrap_err().to_string();
        assert!(error.contains(words), "{at}: {error}");
    }
}

/// A record of version 1 of another kind is no harm either: all of them read all of these.
fn read_as_any(store: &Store, bytes: &[u8]) -> Vec<Option<LedgerError>> {
    fn read<R: Record>(store: &Store, bytes: &[u8]) -> Option<LedgerError> {
        decode::<R>(store, "some/key.json", bytes).err()
    }
    vec![
        read::<JobRecord>(store, bytes),
        read::<LogRecord>(store, bytes),
        read::<VoidRecord>(store, bytes),
        read::<AttemptRecord>(store, bytes),
        read::<AttemptEnd>(store, bytes),
        read::<Commit>(store, bytes),
        read::<Digest>(store, bytes),
        read::<Success>(store, bytes),
        read::<Generation>(store, bytes),
        read::<RetriedRows>(store, bytes),
        read::<CleanedMark>(store, bytes),
        read::<Spend>(store, bytes),
        read::<ControlRecord>(store, bytes),
        LogEntry::decode(store, "some/key.json", bytes).err(),
    ]
}

#[test]
fn every_record_changed_at_any_place_is_read_or_refused_by_its_key() {
    let id = "0123456789abcdef0123";
    let tally = json!({"succeeded": 2, "invalid_output": 0, "errored": 1, "expired": 0, "cancelled": 0, "prompt_tokens": 9,
        "cached_tokens": 1, "completion_tokens": 5, "truncated": 1});
    let data = json!({"name": format!("{id}-0.rows"), "size": 10, "sha256": "ab"});
    let commit = json!({"v": 1, "job": id, "shard": 3, "part": data, "tally": tally, "generation": 1, "part_etag": "e", "retried": tally});
    let digested = commit.clone();
    let retried = json!([{"shard": 3, "rows": [[5, 8]], "tally": tally}]);
    let mut success = json!({"v": 1, "job": id, "name": "n", "rows": 3, "parts": 1, "seconds": 1.5, "usd": 2.0, "job_hash": "a",
        "model_hash": "b", "tokenizer_hash": "c", "template_hash": null, "parts_sha256": "d", "generation": 1});
    success
        .as_object_mut()
        .unwrap()
        .extend(tally.as_object().unwrap().clone());
    let records = [
        json!({"v": 1, "job": id, "shard": 3, "index": 4, "nonce": id, "data": data, "counts": [[5, 7], [9, 10]], "tally": tally}),
        json!({"v": 2, "job": id, "shard": 3, "index": 4, "nonce": id, "voids": 2, "found": "missing"}),
        json!({"v": 1, "job": id, "shard": 3, "attempt": id, "worker": "w", "rows": [[5, 7]], "alone": true, "after": [id],
            "process": "p", "signs_every": 10.0}),
        json!({"v": 1, "attempt": id}),
        commit,
        json!({"v": 1, "job": id, "block": 0, "commits": [digested], "tally": tally}),
        success,
        json!({"v": 2, "job": id, "generation": 1, "nonce": id, "max_tokens": 7, "shards": retried}),
        json!({"v": 3, "job": id, "generation": 1, "nonce": id, "shards": [], "blocks": [{"block": 0, "size": 1, "sha256": "a"}]}),
        json!({"v": 1, "job": id, "generation": 1, "block": 0, "shards": retried}),
        json!({"v": 1, "job": id}),
        json!({"v": 1, "worker": "w", "device_seconds": 1.5, "ended": true}),
        json!({"v": 1, "job": id, "index": 0, "nonce": id, "order": "stop", "why": "budget", "note": "n", "close": true}),
        json!({"v": 2, "job": id, "index": 0, "nonce": id, "order": "extend", "budget_usd": 1.0, "deadline_seconds": 60,
            "unfinished": "keep", "price": {"usd_per_hour": 2.0}, "from": "extend"}),
        json!({"v": 3, "job": id, "index": 0, "nonce": id, "order": "pin", "input": 0, "size": 1, "etag": "e", "version": "v"}),
    ];
    let store = eager(&memory());
    let check = |record: &Value| {
        let found = read_as_any(&store, record.to_string().as_bytes());
        let readers = found.iter().filter(|error| error.is_none()).count();
        for error in found.into_iter().flatten() {
            assert!(
                matches!(error, LedgerError::Damaged { .. } | LedgerError::Newer { .. }),
                "{error:?}"
            );
            let line = error.to_string();
            assert!(
                line.contains("some/key.json") && !line.contains('\n') && line.len() < 2000,
                "{line}"
            );
        }
        readers
    };
    for good in &records {
        assert!(check(good) > 0, "nobody reads {good}");
        changed(good, |_, record| {
            check(&record);
        });
    }
    for (index, at, new) in [
        (0, "/tally/prompt_tokens", json!(u64::MAX)),
        (2, "/signs_every", json!(1e300)),
        (4, "/tally/cached_tokens", json!(1u64 << 60)),
        (6, "/seconds", json!(-1)),
        (11, "/device_seconds", json!(1e300)),
        (13, "/deadline_seconds", json!(u64::MAX)),
    ] {
        let mut record: Value = records[index].clone();
        *record.pointer_mut(at).unwrap() = new;
        let readers = check(&record);
        // Marks and ends of attempts have no such field, and read what is left.
        assert!(readers < check(&records[index]), "{record}");
    }
}

async fn forge(change: impl FnOnce(&mut Value)) -> Result<Option<Ledger>, LedgerError> {
    let output = memory();
    let (ledger, _) = Ledger::create_or_resume_in(eager(&output), draft("forged", 3, 4))
        .await
        .unwrap();
    let mut record = serde_json::to_value(ledger.job()).unwrap();
    change(&mut record);
    let path = JOB.split('/').fold(output.path.clone(), |path, part| path.join(part));
    let bytes = Bytes::from(record.to_string());
    output.store.put(&path, bytes.into()).await.unwrap();
    Ledger::open_in(eager(&output)).await
}

#[tokio::test]
async fn a_shard_table_is_whole_and_in_order_or_refused() {
    assert!(forge(|_| {}).await.unwrap().is_some());
    let shard = |first_row: u64, rows: u64, from: u64| json!({"first_row": first_row, "rows": rows, "segments": [{"input": 0, "first_row": from, "rows": rows}]});
    let tables = [
        (
            json!([shard(0, 4, 0), shard(4, 4, 0), shard(8, 4, 8)]),
            "shard 1 does not go on in input 0",
        ),
        (
            json!([shard(0, 4, 4), shard(4, 4, 0), shard(8, 4, 8)]),
            "shard 0 does not go on in input 0",
        ),
        (
            json!([shard(0, 4, 0), shard(8, 4, 8), shard(4, 4, 4)]),
            "shard 1 does not continue",
        ),
        (
            json!([shard(0, 4, 0), shard(2, 4, 4), shard(8, 4, 8)]),
            "shard 1 does not continue",
        ),
        (
            json!([shard(0, 1 << 60, 0)]),
            "shard 0 has 1152921504606846976 rows, more than 1000000",
        ),
        (json!([shard(0, 5, 0), shard(5, 0, 5)]), "shard 1 does not continue"),
        (
            json!([shard(0, 12, 0), shard(12, 1, 12)]),
            "shard 1 names rows that no input",
        ),
        (
            json!([{"first_row": 0, "rows": 4, "segments": [{"input": 7, "first_row": 0, "rows": 4}]}]),
            "no input",
        ),
        (
            json!([{"first_row": 0, "rows": 5, "segments": [{"input": 0, "first_row": 0, "rows": 4}]}]),
            "shard 0 does not continue",
        ),
    ];
    for (table, words) in tables {
        let error = forge(|record| record["shards"] = table.clone()).await.unwrap_err();
        let line = error.to_string();
        assert!(matches!(error, LedgerError::Damaged { .. }), "{line}");
        assert!(line.contains("job.json") && line.contains(words), "{table}: {line}");
    }
    for (field, value, words) in [
        ("name", json!("a\nb"), "`name` holds control characters"),
        ("version", json!("x".repeat(1 << 20)), "1048576 bytes"),
        ("job_hash", json!("x".repeat(1 << 20)), "1048576 bytes"),
        ("usd_per_hour", json!(-1), "`usd_per_hour`"),
        (
            "terms",
            json!({"usd": null, "deadline_seconds": u64::MAX}),
            "`terms.deadline_seconds`",
        ),
        ("part_extension", json!("../x"), "`part_extension`"),
    ] {
        let line = forge(|record| record[field] = value).await.unwrap_err().to_string();
        assert!(line.contains("job.json") && line.contains(words), "{line}");
    }
    let inputs = json!([{"url": "x".repeat(1 << 20), "format": "text", "size": 1, "rows": 12}]);
    let line = forge(|record| record["inputs"] = inputs).await.unwrap_err().to_string();
    assert!(line.contains("1048576 bytes"), "{line}");
}
