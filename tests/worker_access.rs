//! What a queue makes a worker touch: two tenants on one queue, records that name what is not theirs, servers that redirect.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use gristmill::dataset::plan::discover::discover;
use gristmill::dataset::store::clients::Stores;
use gristmill::dataset::store::location::Location;
use gristmill::queue::Message;
use gristmill::worker::access::{Access, AccessOptions};
use gristmill::worker::jobs::{JobLookup, Jobs};
use object_store::ObjectStoreExt;
use serde_json::Value;

use crate::commands::{queues, run};
use crate::services::S3;
use crate::support::{Run, arg, gristmill, root};
use crate::worker_jobs::model;

const ROWS: u64 = 4;
const REFUSED: &str = "is not for this worker";

fn rows(path: &Path) {
    let line = |row: u64| format!("{{\"text\": \"parcel {row}\"}}\n");
    fs::write(path, (0..ROWS).map(line).collect::<String>()).unwrap();
}

/// A job of one shard over `input`, published to `output`.
fn job(folder: &Path, name: &str, input: &str, output: &str) -> PathBuf {
    let text = format!(
        "name: {name}\nmodel: {}\nprecision: f32\ncontext: 128\ninput: {{uri: '{input}'}}\n\
         prompt: {{messages: [{{role: user, content: '{{{{ text }}}}'}}]}}\ngenerate: {{max_tokens: 2, temperature: 0}}\n\
         output: {{uri: '{output}'}}\n",
        root().join("jobs/demo/model").display()
    );
    let file = folder.join(format!("{name}.yaml"));
    fs::write(&file, text).unwrap();
    file
}

/// A worker that ends once nothing has come for some seconds.
fn worker(url: &str, options: &[&str], env: &[(String, String)]) -> Run {
    let model = root().join("jobs/demo/model");
    let fixed = ["worker", "--queue", url, "--once", "--idle-after", "8", "--quiet"];
    let model = ["--model", arg(&model), "--precision", "f32", "--context", "128"];
    let mut command = gristmill(&[&fixed[..], &model, options].concat());
    Run::of(command.envs(env.iter().cloned()))
}

fn succeeded(output: &str, env: &[(String, String)]) -> u64 {
    let mut command = gristmill(&["status", output, "--json"]);
    let seen = Run::of(command.envs(env.iter().cloned())).expect(0).json();
    seen["rows"]["succeeded"].as_u64().unwrap()
}

/// Each team has a folder. A job of `a` that names an input of `b` is what a stranger would forge: neither worker touches it.
#[test]
fn two_tenants_on_one_queue_reach_their_own_prefix_alone() {
    for url in queues("two_tenants_on_one_queue_reach_their_own_prefix_alone") {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        for tenant in ["a", "b"] {
            fs::create_dir(folder.join(tenant)).unwrap();
            rows(&folder.join(tenant).join("rows.jsonl"));
        }
        let at = |path: &str| arg(&folder.join(path)).to_string();
        let jobs = [
            ("forged", "b/rows.jsonl", "a/forged"),
            ("of-a", "a/rows.jsonl", "a/out"),
            ("of-b", "b/rows.jsonl", "b/out"),
        ];
        for (name, input, output) in jobs {
            let file = job(folder, name, &at(input), &at(output));
            run(&["submit", arg(&file), "--queue", &url]).expect(0);
        }
        let done = || jobs.map(|(_, _, output)| succeeded(&at(output), &[]));

        let of_a = worker(&url, &["--accept", &at("a")], &[]).expect(0).stderr;
        assert_eq!(done(), [0, ROWS, 0], "{url}: {of_a}");
        let refused: Vec<&str> = of_a.lines().filter(|line| line.contains(REFUSED)).collect();
        let says = |words: [&str; 2]| refused.iter().any(|line| words.iter().all(|word| line.contains(word)));
        assert!(
            says([&at("a/forged"), &format!("`--accept-inputs {}/`", at("b"))]),
            "{of_a}"
        );
        assert!(says([&at("b/out"), &format!("`--accept {}/`", at("b"))]), "{of_a}");
        // A warning a job, and another one where it takes longer than a minute.
        assert!(refused.len() <= 2 * 4, "{of_a}");

        run(&[
            "reconcile",
            &at("b/out"),
            &at("a/forged"),
            "--queue",
            &url,
            "--interval",
            "0.1",
        ])
        .expect(0);
        let of_b = worker(&url, &["--accept", &at("b")], &[]).expect(0).stderr;
        assert_eq!(done(), [0, ROWS, ROWS], "{url}: {of_b}");
        assert!(of_b.contains(&format!("`--accept {}/`", at("a"))), "{of_b}");
    }
}

/// Without options: what somebody's bucket names of this machine or of other buckets is left alone, until it is listed.
#[test]
fn a_record_in_a_bucket_reads_no_file_of_the_workers_machine() {
    let test = "a_record_in_a_bucket_reads_no_file_of_the_workers_machine";
    let Some(s3) = S3::need(test) else { return };
    let env = s3.variables(&s3.endpoint);
    for url in queues(test) {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        rows(&folder.join("secret.jsonl"));
        let output = s3.folder(test);
        let file = job(&folder, "job", arg(&folder.join("secret.jsonl")), &output);
        let submit = || Run::of(gristmill(&["submit", arg(&file), "--queue", &url]).envs(env.clone())).expect(0);
        // Which is why the next command has the option.
        let next = submit().stdout;
        assert!(
            next.lines().any(|line| line.contains("gristmill worker")
                && line.ends_with(&format!(" --accept-inputs {}/", folder.display()))),
            "{next}"
        );
        // The model comes from the first message that this worker takes: none.
        let mut first = gristmill(&["worker", "--queue", &url, "--once", "--idle-after", "4"]);
        let said = Run::of(first.envs(env.clone())).expect(0).stderr;
        let option = format!("--accept-inputs {}/", folder.display());
        assert!(said.contains(&option) && said.contains(" came, "), "{said}");
        submit();
        let said = worker(&url, &[], &env).expect(0).stderr;
        assert!(said.contains(REFUSED) && said.contains(&option), "{said}");
        assert_eq!(succeeded(&output, &env), 0);
        submit();
        let allowed: Vec<&str> = option.split(' ').collect();
        worker(&url, &allowed, &env).expect(0);
        assert_eq!(succeeded(&output, &env), ROWS, "{url}");
        // Whoever proves what came of it names the output as well, and no file of this machine.
        let verify = |more: &[&str]| {
            let fixed = ["verify", output.as_str(), "--inputs"];
            Run::of(gristmill(&[&fixed[..], more].concat()).envs(env.clone()))
        };
        verify(&[])
            .expect(2)
            .one_line(&["is a file of this machine, its output is not", &option]);
        verify(&allowed).expect(0);
    }
}

/// No broker is needed to see what becomes of a message.
#[tokio::test]
async fn a_record_that_others_could_have_written_is_not_opened() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().canonicalize().unwrap();
    rows(&folder.join("rows.jsonl"));
    let output = folder.join("out");
    let file = job(&folder, "job", "rows.jsonl", "out");
    run(&["submit", arg(&file), "--no-enqueue"]).expect(0);
    let record = output.join("_gristmill/job.json");
    let id = serde_json::from_slice::<Value>(&fs::read(&record).unwrap()).unwrap()["job"].clone();
    let message = Message::new(id.as_str().unwrap(), arg(&output), 0, 0);
    let hear = async |accept: &[&str]| {
        let accept: Vec<String> = accept.iter().map(|prefix| prefix.to_string()).collect();
        let options = AccessOptions {
            accept: &accept,
            ..AccessOptions::default()
        };
        let access = Access::new(&options, Path::new("/")).unwrap();
        let jobs = Jobs::with_access(model(&root().join("jobs/demo/model"), 128), access);
        match jobs.resolve(&message).await.unwrap() {
            JobLookup::Job(_) => Ok(()),
            JobLookup::NotOurs(why) | JobLookup::Stale(why) => Err(why.to_string()),
        }
    };
    assert_eq!(hear(&[]).await, Ok(()));
    let elsewhere = folder.join("elsewhere");
    assert!(hear(&[arg(&elsewhere)]).await.unwrap_err().contains("--accept"));
    fs::set_permissions(&record, fs::Permissions::from_mode(0o666)).unwrap();
    let why = hear(&[]).await.unwrap_err();
    assert!(why.contains("every user of this machine may write"), "{why}");
    assert_eq!(hear(&[arg(&folder)]).await, Ok(()));
}

/// A web server that answers each path with a redirect to `to`, or with rows where that is empty.
fn server(to: impl Fn(&str) -> String + Send + 'static) -> (String, Arc<AtomicU32>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let asked = Arc::new(AtomicU32::new(0));
    let count = asked.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            count.fetch_add(1, Ordering::Relaxed);
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let (mut request, mut line) = (String::new(), String::new());
            reader.read_line(&mut request).unwrap();
            while reader.read_line(&mut line).unwrap() > 2 {
                line.clear();
            }
            let path = request.split(' ').nth(1).unwrap_or_default();
            let rows = "{\"text\": \"a\"}\n";
            let answer = match to(path) {
                to if to.is_empty() => format!(
                    "200 OK\r\nLast-Modified: Tue, 24 Nov 2026 08:00:00 GMT\r\nContent-Length: {}",
                    rows.len()
                ),
                to => format!("302 Found\r\nLocation: {to}\r\nContent-Length: 0"),
            };
            let body = if answer.starts_with("200") && !request.starts_with("HEAD") {
                rows
            } else {
                ""
            };
            // A client that has gone has its answer, or wants none.
            let _ = write!(stream, "HTTP/1.1 {answer}\r\nConnection: close\r\n\r\n{body}");
        }
    });
    (url, asked)
}

/// Also where a person named the server: what it redirects to, the person did not name.
#[test]
fn no_redirect_leads_to_a_link_local_address() {
    for to in [
        "http://169.254.169.254/latest/meta-data/",
        "http://2852039166/latest/",
        "http://[::ffff:169.254.169.254]/",
        "http://metadata.google.internal/computeMetadata/v1/",
    ] {
        let (url, asked) = server(move |_| to.into());
        let folder = tempfile::tempdir().unwrap();
        let file = job(folder.path(), "job", &format!("{url}/rows.jsonl"), "out");
        let said = run(&["plan", arg(&file)]).expect(2).stderr;
        assert!(
            said.contains("redirects to") && said.contains("not followed"),
            "{to}: {said}"
        );
        assert!(asked.load(Ordering::Relaxed) >= 1);
    }
}

/// As from a dataset's page to where its files lie.
#[tokio::test]
async fn other_redirects_are_followed_where_a_person_named_the_server() {
    let (files, asked) = server(|_| String::new());
    let to = format!("{files}/rows.jsonl");
    let (url, _) = server(move |_| to.clone());
    let found = discover(&[format!("{url}/rows.jsonl")], Path::new("/"), None)
        .await
        .unwrap();
    assert_eq!((found.files.len(), asked.load(Ordering::Relaxed)), (1, 1));
}

#[tokio::test]
async fn redirects_of_queued_jobs_lead_to_what_is_listed_alone() {
    let (other, asked) = server(|_| String::new());
    let to = format!("{other}/rows.jsonl");
    let (url, _) = server(move |path| {
        if path == "/rows.jsonl" {
            to.clone()
        } else {
            String::new()
        }
    });
    let read = async |listed: &[&str], path: &str| {
        let listed: Vec<String> = listed.iter().map(|prefix| prefix.to_string()).collect();
        let options = AccessOptions {
            accept_inputs: &listed,
            ..AccessOptions::default()
        };
        let access = Access::new(&options, Path::new("/")).unwrap();
        let stores = Stores::new([]);
        stores.restrict_redirects(Arc::new(move |url| access.may_follow(url)));
        let place = Location::parse_with(&format!("{url}{path}"), Path::new("/"), &stores).unwrap();
        place.store.head(&place.path).await
    };
    assert!(read(&[&url], "/plain.jsonl").await.is_ok());
    let error = read(&[&url], "/rows.jsonl").await.unwrap_err();
    let why = gristmill::dataset::store::web::refusal(&error).unwrap().to_string();
    assert!(why.contains(&format!("`--accept-inputs {other}/`")), "{why}");
    assert_eq!(
        asked.load(Ordering::Relaxed),
        0,
        "nothing was asked of the other server"
    );
    assert!(read(&[&url, &other], "/rows.jsonl").await.is_ok());
}
