//! What happens when a job is done: a command that `run` runs, an address that is told, and what neither may do.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use crate::commands::{queues, run, small_job};
use crate::support::{Run, arg, gristmill, python, record};

const KEY: &str = "0123456789abcdef0123456789abcdef";

/// A request that somebody posted.
#[derive(Debug, Clone)]
struct Post {
    head: String,
    body: String,
}

/// A server on this machine that takes what is posted to it.
struct Receiver {
    url: String,
    posts: Arc<Mutex<Vec<Post>>>,
}

impl Receiver {
    /// Answers with `first`, then always with 200.
    fn start(first: &'static str) -> Receiver {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://127.0.0.1:{}", listener.local_addr().unwrap().port());
        let posts = Arc::new(Mutex::new(Vec::new()));
        let heard = posts.clone();
        std::thread::spawn(move || {
            let mut answer = first;
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut reader = BufReader::new(stream.try_clone().unwrap());
                let (mut head, mut line) = (String::new(), String::new());
                while reader.read_line(&mut line).unwrap() > 2 {
                    head.push_str(&line.to_lowercase());
                    line.clear();
                }
                let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
                let mut body = vec![0; length.unwrap().trim().parse().unwrap()];
                reader.read_exact(&mut body).unwrap();
                let body = String::from_utf8(body).unwrap();
                heard.lock().unwrap().push(Post { head, body });
                let end = "\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
                stream.write_all(format!("HTTP/1.1 {answer}{end}").as_bytes()).unwrap();
                answer = "200 OK";
            }
        });
        Receiver { url, posts }
    }

    fn posts(&self) -> Vec<Post> {
        self.posts.lock().unwrap().clone()
    }
}

/// The small job with these lines more.
fn job_with(folder: &Path, on_finish: &str) -> (PathBuf, PathBuf) {
    let (job, output) = small_job(folder, &[]);
    let text = fs::read_to_string(&job).unwrap();
    fs::write(&job, format!("{text}on_finish: {on_finish}\n")).unwrap();
    (job, output)
}

/// The check that a receiver would make, in another language.
const CHECK: &str = r#"
import sys, json, hmac, hashlib, base64
head, body, key = sys.argv[1:4]
fields = dict(line.split(": ", 1) for line in head.splitlines()[1:])
signed = f"{fields['webhook-id']}.{fields['webhook-timestamp']}.{body}".encode()
tag = base64.b64encode(hmac.new(key.encode(), signed, hashlib.sha256).digest()).decode()
assert f"v1,{tag}".lower() in fields["webhook-signature"].split(), fields
result = json.loads(body)
assert result["finish_id"] == fields["webhook-id"] and result["state"] == "finished", result
assert result["rows"]["succeeded"] == 40, result
"#;

#[test]
fn run_tells_an_address_once_with_a_signature() {
    let folder = tempfile::tempdir().unwrap();
    let receiver = Receiver::start("503 Busy");
    let (job, output) = job_with(folder.path(), &format!("{{url: '{}/done'}}", receiver.url));
    let with_key = |arguments: &[&str]| Run::of(gristmill(arguments).env("GRISTMILL_ON_FINISH_KEY", KEY));
    let said = with_key(&["run", arg(&job)]).expect(0).stderr;
    assert!(
        said.contains(&format!("when it is done: posts to `{}/done`", receiver.url)),
        "{said}"
    );
    // The first one was not taken.
    let posts = receiver.posts();
    assert_eq!(posts.len(), 2, "{posts:?}");
    assert!(posts[1].head.starts_with("post /done http/1.1"), "{posts:?}");
    let Post { head, body } = &posts[1];
    Run::of(Command::new(python()).args(["-c", CHECK, head, body, KEY])).expect(0);
    // Told is told.
    with_key(&["run", arg(&job), "--quiet"]).expect(0);
    assert_eq!(receiver.posts().len(), 2);
    // A process that ended before it could tell leaves no mark: the next one tells the same end.
    let id = record(&output)["job"].as_str().unwrap().to_string();
    fs::remove_file(output.join(format!("_gristmill/{id}/told.json"))).unwrap();
    with_key(&["run", arg(&job), "--quiet"]).expect(0);
    let last = receiver.posts().pop().unwrap();
    assert!(last.head.contains(&format!("webhook-id: {id}-0")), "{last:?}");
    assert_eq!(last.body, *body, "the same end");
    // A retry's end is another one.
    let bad = Run::of(gristmill(&["run", arg(&job)]).env("GRISTMILL_ON_FINISH_KEY", "short")).expect(2);
    bad.one_line(&["GRISTMILL_ON_FINISH_KEY", "32"]);
}

#[test]
fn run_runs_a_command_without_a_shell() {
    let folder = tempfile::tempdir().unwrap();
    let told = folder.path().join("told; touch oops");
    let command = format!("{{command: [tee, '{}']}}", told.display());
    let (job, output) = job_with(folder.path(), &command);
    let ran = run(&["run", arg(&job), "--json"]).expect(0);
    let result: Value = serde_json::from_str(&fs::read_to_string(&told).unwrap()).unwrap();
    assert_eq!(
        (&result["rows"]["succeeded"], &result["job"]),
        (&40.into(), &"small".into())
    );
    assert_eq!(
        ran.json()["rows"]["succeeded"],
        40,
        "what the command prints is not on stdout"
    );
    assert!(
        ran.stdout.lines().count() == 1 && ran.stderr.contains("when it is done: runs `tee "),
        "{ran:?}"
    );
    // It is in no record, so that no worker could ever run it.
    let recorded = fs::read_to_string(output.join("_gristmill/job.json")).unwrap();
    assert!(
        !recorded.contains("tee") && !recorded.contains("on_finish"),
        "{recorded}"
    );
    fs::remove_file(&told).unwrap();
    run(&["run", arg(&job), "--quiet"]).expect(0);
    assert!(!told.exists(), "told is told");
}

#[test]
fn a_failure_is_a_warning_and_the_result_stands() {
    let folder = tempfile::tempdir().unwrap();
    let receiver = Receiver::start("302 Found\r\nLocation: http://127.0.0.1:1/");
    let (job, output) = job_with(
        folder.path(),
        &format!("{{command: ['false'], url: '{}/x'}}", receiver.url),
    );
    let ran = run(&["run", arg(&job), "--quiet"]).expect(0);
    let lines: Vec<&str> = ran.stderr.lines().collect();
    assert_eq!(lines.len(), 2, "{}", ran.stderr);
    assert!(
        lines[0].contains("`on_finish.command` ended with exit status: 1"),
        "{}",
        lines[0]
    );
    assert!(
        lines[1].contains("could not notify") && lines[1].contains("redirects are not followed"),
        "{}",
        lines[1]
    );
    assert!(output.join("_SUCCESS").exists());
    assert_eq!(receiver.posts().len(), 1);
    // What was not told is told by the next run.
    let again = run(&["run", arg(&job), "--quiet"]).expect(0);
    assert_eq!(
        (receiver.posts().len(), again.stderr.lines().count()),
        (2, 1),
        "{}",
        again.stderr
    );
    let missing = tempfile::tempdir().unwrap();
    // It is there, but nobody may execute it.
    fs::write(missing.path().join("notify.sh"), "#!/bin/sh\n").unwrap();
    let (job, _) = job_with(missing.path(), "{command: [./notify.sh]}");
    let ran = run(&["run", arg(&job), "--quiet"]).expect(0);
    ran.one_line(&["cannot start `", "notify.sh`", "the job's result is unaffected"]);
}

#[test]
fn what_it_says_makes_no_other_job() {
    let folder = tempfile::tempdir().unwrap();
    let (job, _) = job_with(folder.path(), "{url: 'http://127.0.0.1:1/a'}");
    let first = run(&["submit", arg(&job), "--no-enqueue", "--json"]).expect(0).json();
    let text = fs::read_to_string(&job).unwrap();
    fs::write(&job, text.replace("1/a", "1/b")).unwrap();
    let again = run(&["submit", arg(&job), "--no-enqueue", "--json"]).expect(0);
    assert_eq!(again.json()["id"], first["id"]);
    again.one_line(&[
        "workers post to the `on_finish.url` that the job began with",
        "1/a",
        "1/b",
    ]);
    let none = text.split("on_finish").next().unwrap();
    fs::write(&job, format!("{none}on_finish: {{command: ['true']}}\n")).unwrap();
    let command = run(&["submit", arg(&job), "--no-enqueue", "--json"]).expect(0);
    assert_eq!(command.json()["id"], first["id"]);
    assert!(
        command
            .stderr
            .contains("`on_finish.command` is run by `gristmill run` alone"),
        "{}",
        command.stderr
    );
    // A trial tells nobody.
    let receiver = Receiver::start("200 OK");
    fs::write(&job, format!("{none}on_finish: {{url: '{}'}}\n", receiver.url)).unwrap();
    run(&["run", arg(&job), "--limit", "4", "--quiet"]).expect(0);
    assert!(receiver.posts().is_empty());
    for (bad, says) in [
        ("{url: 'http://169.254.169.254/latest'}", "metadata service"),
        ("{url: 'ftp://h/x'}", "no web address"),
        ("{command: []}", "empty list"),
        ("{shell: x}", "in `on_finish`"),
    ] {
        fs::write(&job, format!("{none}on_finish: {bad}\n")).unwrap();
        let refused = run(&["plan", arg(&job)]).expect(2);
        refused.one_line(&["small.yaml", says]);
    }
}

/// A stranger's record: a worker runs nothing of it, and posts only where its operator said.
#[test]
fn a_worker_posts_where_it_was_told_to_and_runs_nothing() {
    for url in queues("a_worker_posts_where_it_was_told_to_and_runs_nothing") {
        let folder = tempfile::tempdir().unwrap();
        let receiver = Receiver::start("200 OK");
        let (job, output) = job_with(folder.path(), &format!("{{url: '{}/hook'}}", receiver.url));
        let sent = run(&["submit", arg(&job), "--queue", &url]).expect(0).stdout;
        assert!(
            sent.contains(&format!("--accept-on-finish {}/", receiver.url)),
            "{sent}"
        );
        // As somebody would write it who can write to the output.
        let mut forged = record(&output);
        let proof = folder.path().join("proof");
        forged["resolved"]["on_finish"]["command"] = json!(["touch", arg(&proof)]);
        fs::write(output.join("_gristmill/job.json"), forged.to_string()).unwrap();
        let worker = ["worker", "--queue", &url, "--until-idle", "--quiet"];
        let silent = run(&worker).expect(0);
        let warned = silent
            .stderr
            .lines()
            .filter(|line| line.contains("is not listed, so nothing is posted to it"));
        assert_eq!(warned.count(), 1, "{}", silent.stderr);
        assert!(
            silent
                .stderr
                .contains(&format!("`--accept-on-finish {}/`", receiver.url)),
            "{}",
            silent.stderr
        );
        assert!(receiver.posts().is_empty() && !proof.exists());
        // Whoever may, tells what nobody has told.
        let accept = ["--accept-on-finish", &receiver.url];
        let reconcile = ["reconcile", arg(&output), "--queue", &url, "--interval", "0.1"];
        run(&[&reconcile[..], &accept].concat()).expect(0);
        assert_eq!(receiver.posts().len(), 1);
        run(&[&reconcile[..], &accept].concat()).expect(0);
        assert_eq!(receiver.posts().len(), 1, "told is told");
        // And a worker that may, itself.
        let other = tempfile::tempdir().unwrap();
        let (job, output) = job_with(other.path(), &format!("{{url: '{}/hook'}}", receiver.url));
        run(&["submit", arg(&job), "--queue", &url]).expect(0);
        run(&[&worker[..], &accept, &["--job", arg(&output)]].concat()).expect(0);
        assert_eq!(receiver.posts().len(), 2);
        assert!(!proof.exists());
        let bad = run(&[&worker[..], &["--accept-on-finish", "s3://b/"]].concat()).expect(2);
        bad.one_line(&["--accept-on-finish", "web addresses"]);
    }
}
