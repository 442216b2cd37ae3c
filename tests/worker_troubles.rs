//! A worker among messages that it cannot work on: of stores that refuse, of jobs that are gone, of a queue that refuses, and of a
//! record that ended the workers before it. What it can work on is done meanwhile.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use gristmill::engine::request::{FinishedSample, Request};
use gristmill::engine::{EngineError, Generator, RequestError};
use gristmill::queue::{Delivery, LocalQueue, Message, Queue, QueueError, QueueUrl, Recall, connect};
use gristmill::report::meter::Meter;
use gristmill::worker::jobs::Jobs;
use gristmill::worker::metrics::Metrics;
use gristmill::worker::retry_policy::RetryPolicy;
use gristmill::worker::step_watchdog::StepWatchdog;
use gristmill::worker::stop::Stop;
use gristmill::worker::troubles::JobStore;
use gristmill::worker::watched::WatchedJobs;
use gristmill::worker::{self, Until, Worker, WorkerConfig, WorkerOptions};
use tempfile::NamedTempFile;

use crate::commands::{queues, run};
use crate::queue_brokers::{fill, receive, settings};
use crate::services::S3;
use crate::support::{Run, arg, gristmill, root};
use crate::worker_jobs::model;

/// A job of `shards` shards of one row each.
fn job(folder: &Path, name: &str, shards: u32, input: &str, output: &str) -> PathBuf {
    let text = format!(
        "name: {name}\nmodel: {}\nprecision: f32\ncontext: 128\ninput: {{uri: '{input}'}}\n\
         prompt: {{messages: [{{role: user, content: '{{{{ text }}}}'}}]}}\ngenerate: {{max_tokens: 2, temperature: 0}}\n\
         output: {{uri: '{output}'}}\nshards: {{rows: 1}}\n",
        root().join("jobs/demo/model").display()
    );
    let rows: String = (0..shards)
        .map(|row| format!("{{\"text\": \"parcel {row}\"}}\n"))
        .collect();
    std::fs::write(folder.join("rows.jsonl"), rows).unwrap();
    let file = folder.join(format!("{name}.yaml"));
    std::fs::write(&file, text).unwrap();
    file
}

fn succeeded(output: &str, env: &[(String, String)]) -> u64 {
    let mut command = gristmill(&["status", output, "--json"]);
    let seen = Run::of(command.envs(env.iter().cloned())).expect(0).json();
    seen["rows"]["succeeded"].as_u64().unwrap()
}

/// Waits until so many rows of the output have succeeded.
#[track_caller]
fn wait_for(output: &Path, rows: u64, most: Duration, child: &TheWorker) -> Duration {
    let began = Instant::now();
    while succeeded(arg(output), &[]) < rows {
        assert!(began.elapsed() < most, "{}", child.said());
        std::thread::sleep(Duration::from_millis(200));
    }
    began.elapsed()
}

/// A worker of the demo model.
struct TheWorker {
    child: Child,
    stderr: NamedTempFile,
}

impl TheWorker {
    fn start(url: &str, options: &[&str], env: &[(String, String)]) -> TheWorker {
        let stderr = NamedTempFile::new().unwrap();
        let fixed = [
            "worker",
            "--queue",
            url,
            "--until-idle",
            "--quiet",
            "--log-interval",
            "1",
        ];
        let child = gristmill(&[&fixed[..], options].concat())
            .envs(env.iter().cloned())
            .stdout(Stdio::null())
            .stderr(stderr.reopen().unwrap())
            .spawn()
            .unwrap();
        TheWorker { child, stderr }
    }

    fn said(&self) -> String {
        std::fs::read_to_string(self.stderr.path()).unwrap()
    }

    /// Its exit code.
    fn ends(&mut self, most: Duration) -> Option<i32> {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(began.elapsed() < most, "{}", self.said());
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for TheWorker {
    fn drop(&mut self) {
        // One that has ended is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The way to the store: answers 403 until it is opened.
struct Gate {
    open: Arc<AtomicBool>,
}

impl Gate {
    fn serve(listener: TcpListener, store: &str) -> Gate {
        let open = Arc::new(AtomicBool::new(false));
        let (opened, store) = (open.clone(), store.trim_start_matches("http://").to_string());
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (client, store) = (client.unwrap(), store.clone());
                if opened.load(Ordering::SeqCst) {
                    drop(std::thread::spawn(move || forward(client, &store)))
                } else {
                    drop(std::thread::spawn(move || refuse(client)))
                }
            }
        });
        Gate { open }
    }

    fn open(&self) {
        self.open.store(true, Ordering::SeqCst);
    }
}

fn refuse(mut client: TcpStream) {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && client.read(&mut byte).is_ok_and(|read| read == 1) {
        head.push(byte[0]);
    }
    let body = "<Error><Code>AccessDenied</Code><Message>Access Denied.</Message></Error>";
    let answer = format!(
        "HTTP/1.1 403 Forbidden\r\nContent-Type: application/xml\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    // Who has gone needs no answer.
    let _ = client.write_all(answer.as_bytes());
}

fn forward(mut client: TcpStream, store: &str) {
    let Ok(mut server) = TcpStream::connect(store) else {
        return;
    };
    let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
    let there = std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Write);
    });
    let _ = std::io::copy(&mut server, &mut client);
    let _ = client.shutdown(Shutdown::Both);
    let _ = there.join();
}

/// What of the job in trouble lies in the store.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Lies {
    Output,
    Input,
}

/// Stands for the output of the job in trouble.
const BAD_OUTPUT: &str = "BAD_OUTPUT";

/// The job in trouble comes first, with more shards than a worker has in flight.
fn another_job_goes_on(test: &str, refuses: bool, lies: Lies, options: &[&str]) {
    let Some(s3) = S3::need(test) else { return };
    for url in queues(test) {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        let there = s3.folder(test);
        let direct = s3.variables(&s3.endpoint);
        let (input, output) = match lies {
            Lies::Output => ("rows.jsonl".to_string(), there.clone()),
            Lies::Input => (format!("{there}/rows.jsonl"), folder.join("bad").display().to_string()),
        };
        let bad = job(&folder, "bad", 8, &input, &output);
        if lies == Lies::Input {
            put(&folder.join("rows.jsonl"), &input, &direct);
        }
        Run::of(gristmill(&["submit", arg(&bad), "--queue", &url]).envs(direct.clone())).expect(0);
        let healthy = folder.join("healthy");
        let good = job(&folder, "good", 8, "rows.jsonl", arg(&healthy));
        run(&["submit", arg(&good), "--queue", &url]).expect(0);

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut gate = refuses.then(|| Gate::serve(listener.try_clone().unwrap(), &s3.endpoint));
        drop(listener);
        let env = s3.variables(&format!("http://{address}"));
        let accept = format!("{}/", folder.display());
        let accepted = ["--accept", "s3://", "--accept", &accept];
        let options: Vec<&str> = options
            .iter()
            .map(|option| {
                if *option == BAD_OUTPUT {
                    output.as_str()
                } else {
                    *option
                }
            })
            .collect();
        let mut worker = TheWorker::start(&url, &[&accepted, &options[..]].concat(), &env);
        let took = wait_for(&healthy, 8, Duration::from_secs(60), &worker);
        println!("{url} {refuses} {lies:?}: the healthy job took {took:?}");
        assert_eq!(succeeded(&output, &direct), 0, "{}", worker.said());
        std::thread::sleep(Duration::from_secs(5));
        assert!(
            worker.child.try_wait().unwrap().is_none(),
            "it waits: {}",
            worker.said()
        );
        // A refusal is known at once; who does not answer is asked for a minute first.
        assert!(
            !refuses || worker.said().contains("set aside") || options.len() < 3,
            "{}",
            worker.said()
        );
        gate.get_or_insert_with(|| Gate::serve(TcpListener::bind(address).unwrap(), &s3.endpoint))
            .open();
        assert_eq!(worker.ends(Duration::from_secs(150)), Some(0), "{}", worker.said());
        assert_eq!(succeeded(&output, &direct), 8, "{}", worker.said());
        assert!(
            !worker.said().contains("(at hop"),
            "a hop was counted: {}",
            worker.said()
        );
        for output in [arg(&healthy), &output] {
            Run::of(gristmill(&["verify", output]).envs(direct.clone())).expect(0);
        }
    }
}

/// Copies a file into the store.
fn put(file: &Path, to: &str, env: &[(String, String)]) {
    let of = |name: &str| env.iter().find(|(n, _)| n == name).unwrap().1.clone();
    let (bucket, key) = to.trim_start_matches("s3://").split_once('/').unwrap();
    let store = object_store::aws::AmazonS3Builder::new()
        .with_endpoint(of("AWS_ENDPOINT_URL"))
        .with_allow_http(true)
        .with_region("us-east-1")
        .with_access_key_id(of("AWS_ACCESS_KEY_ID"))
        .with_secret_access_key(of("AWS_SECRET_ACCESS_KEY"))
        .with_bucket_name(bucket)
        .build()
        .unwrap();
    let bytes = std::fs::read(file).unwrap();
    let put = async { object_store::ObjectStoreExt::put(&store, &key.into(), bytes.into()).await };
    tokio::runtime::Runtime::new().unwrap().block_on(put).unwrap();
}

const GIVEN: [&str; 6] = ["--precision", "f32", "--context", "128", "--shards-in-flight", "4"];

fn given() -> Vec<String> {
    let model = root().join("jobs/demo/model");
    let mut options = vec!["--model".to_string(), model.display().to_string()];
    options.extend(GIVEN.map(str::to_string));
    options
}

fn another_goes_on(test: &str, refuses: bool, lies: Lies) {
    let options = given();
    another_job_goes_on(
        test,
        refuses,
        lies,
        &options.iter().map(String::as_str).collect::<Vec<_>>(),
    );
}

#[test]
fn a_job_whose_store_is_away_holds_up_no_other() {
    another_goes_on("a_job_whose_store_is_away_holds_up_no_other", false, Lies::Output);
}

#[test]
fn a_job_whose_store_refuses_holds_up_no_other() {
    another_goes_on("a_job_whose_store_refuses_holds_up_no_other", true, Lies::Output);
}

#[test]
fn a_job_whose_inputs_are_refused_holds_up_no_other() {
    another_goes_on("a_job_whose_inputs_are_refused_holds_up_no_other", true, Lies::Input);
}

/// A person named the job in trouble: the worker begins without it, and is not done before it is.
#[test]
fn a_watched_job_whose_store_refuses_holds_up_no_other() {
    let options = given();
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    another_job_goes_on(
        "a_watched_job_whose_store_refuses_holds_up_no_other",
        true,
        Lies::Output,
        &[&options[..], &["--job", BAD_OUTPUT]].concat(),
    );
}

/// The model comes from the first job that can be opened.
#[test]
fn a_worker_without_a_model_finds_the_job_behind_one_whose_store_refuses() {
    let test = "a_worker_without_a_model_finds_the_job_behind_one_whose_store_refuses";
    let models = root().join("jobs");
    another_job_goes_on(test, true, Lies::Output, &["--accept-models", arg(&models)]);
}

/// Jobs that are gone left thousands of messages: what lies behind them begins soon, and none of them is dropped at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stale_messages_hold_up_no_shard() {
    let test = "stale_messages_hold_up_no_shard";
    for url in queues(test) {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        let gone = folder.join("gone").display().to_string();
        let stale: Vec<Message> = (0..2000)
            .map(|shard| Message::new("gone", gone.clone(), 0, shard))
            .collect();
        fill(&url.parse().unwrap(), &stale).await;
        tokio::task::spawn_blocking(move || {
            let output = folder.join("out");
            let file = job(&folder, "good", 4, "rows.jsonl", arg(&output));
            run(&["submit", arg(&file), "--queue", &url]).expect(0);
            let options = given();
            let options: Vec<&str> = options.iter().map(String::as_str).collect();
            let worker = TheWorker::start(&url, &[&options[..], &["--job", arg(&output)]].concat(), &[]);
            let took = wait_for(&output, 4, Duration::from_secs(30), &worker);
            println!("{url}: behind 2,000 stale messages, the job was done after {took:?}");
            assert!(!worker.said().contains("is left to `gristmill reconcile`"));
        })
        .await
        .unwrap();
    }
}

/// It came to five workers, and nothing else is known of it: others come first, then it is tried again. Kafka counts no deliveries.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_may_have_ended_workers_is_passed_on_first() {
    for url in queues("a_message_that_may_have_ended_workers_is_passed_on_first") {
        if url.starts_with("kafka") {
            continue;
        }
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        let output = folder.join("out");
        let file = job(&folder, "job", 1, "rows.jsonl", arg(&output));
        let submitted = url.clone();
        tokio::task::spawn_blocking(move || run(&["submit", arg(&file), "--queue", &submitted]).expect(0))
            .await
            .unwrap();
        let address: QueueUrl = url.parse().unwrap();
        for deliveries in 1..=5 {
            // Each ends with the message in its hands, without an answer.
            let queue = connect(&address, &settings()).await.unwrap();
            let delivery = receive(&*queue).await;
            // The broker may count more than one a death.
            assert!(delivery.deliveries >= deliveries, "{url}: {delivery:?}");
            std::mem::forget(delivery);
            drop(queue);
        }
        tokio::task::spawn_blocking(move || {
            let options = given();
            let options: Vec<&str> = options.iter().map(String::as_str).collect();
            let worker = TheWorker::start(&url, &[&options[..], &["--job", arg(&output)]].concat(), &[]);
            wait_for(&output, 1, Duration::from_secs(60), &worker);
            let said = worker.said();
            assert_eq!(said.matches("was delivered").count(), 1, "{said}");
            assert!(said.contains("(at hop 1): it was delivered "), "{said}");
        })
        .await
        .unwrap();
    }
}

/// Refuses access, or is away.
struct NoQueue {
    denied: bool,
}

#[async_trait]
impl Queue for NoQueue {
    async fn receive(&self, wait: Duration) -> Result<Option<Delivery>, QueueError> {
        tokio::time::sleep(wait / 10).await;
        if self.denied {
            Err(QueueError::Denied {
                why: "a wrong password".into(),
            })
        } else {
            Ok(None)
        }
    }
    async fn extend(&self, _: &Delivery, _: Duration) -> Result<(), QueueError> {
        Ok(())
    }
    async fn acknowledge(&self, _: &Delivery) -> Result<(), QueueError> {
        Ok(())
    }
    async fn give_back(&self, _: &Delivery) -> Result<(), QueueError> {
        Ok(())
    }
    async fn forward(&self, _: &Delivery) -> Result<bool, QueueError> {
        Ok(false)
    }
    async fn requeue_last(&self, _: &Delivery) -> Result<(), QueueError> {
        Ok(())
    }
    async fn next_recall(&self) -> Recall {
        std::future::pending().await
    }
    fn is_attached(&self) -> bool {
        false
    }
}

/// A device for a worker to which nothing comes.
struct Unused;

impl Generator for Unused {
    fn wants_more(&self) -> bool {
        true
    }
    fn is_idle(&self) -> bool {
        true
    }
    fn submit(&mut self, _: Request) -> Result<(), RequestError> {
        unreachable!("nothing comes")
    }
    fn step(&mut self) -> Result<Vec<FinishedSample>, EngineError> {
        Ok(Vec::new())
    }
    fn step_tokens(&self) -> &[(u32, u64)] {
        &[]
    }
    fn cancel(&mut self, _: u32, _: &dyn Fn(u64) -> bool) {}
}

/// A worker that works once is waited for itself: it ends, with an error, where the queue refuses it or does not answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_works_once_does_not_wait_for_a_queue_without_end() {
    for (denied, says) in [(true, "waited for "), (false, "the queue has not answered for ")] {
        let began = Instant::now();
        let worker = once(Arc::new(NoQueue { denied }));
        let ended = worker::run(worker, Box::new(Unused), Stop::default()).await;
        let error = format!("{:#}", ended.unwrap_err());
        assert!(error.starts_with(says), "{error}");
        assert!(began.elapsed() >= Duration::from_secs(2), "{:?}", began.elapsed());
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    }
}

/// A worker that works once, with a patience of two seconds.
fn once(queue: Arc<dyn Queue>) -> Arc<Worker> {
    Arc::new(Worker::new(WorkerConfig {
        name: "once".into(),
        queue,
        embedded_queue: None,
        jobs: Jobs::new(model(&root().join("jobs/demo/model"), 128)),
        watched: WatchedJobs::default(),
        meter: Arc::new(Meter::default()),
        metrics: Arc::new(Metrics::new().unwrap()),
        retry_policy: RetryPolicy::with_wait_max(Duration::from_secs(2)),
        watchdog: Arc::new(StepWatchdog::new(Duration::from_secs(60))),
        render_threads: rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap(),
        options: WorkerOptions {
            log_interval: Duration::from_secs(1),
            shards_in_flight: 4,
            until: Until::Once,
            idle_after: Duration::from_millis(100),
            max_shards: None,
        },
    }))
}

/// What a worker's parts count is in its metrics, each time that somebody asks.
#[tokio::test]
async fn the_metrics_of_a_worker_are_its_own_totals() {
    let worker = once(Arc::new(LocalQueue::default()));
    let has = |line: &str| worker.metrics.render().lines().any(|rendered| rendered == line);
    worker.meter.add_device_time(Duration::from_millis(1500));
    assert!(has("gristmill_ready 0") && has("gristmill_device_seconds_total 0"));
    worker.metrics.attach(&worker, "cpu");
    assert!(has("gristmill_ready 1") && has("gristmill_device_seconds_total 1.5"));
    let build = "gristmill_build_info{device=\"cpu\",precision=\"f32\"";
    assert!(worker.metrics.render().contains(build));
    let away = QueueError::Unavailable {
        why: "it is away".into(),
    };
    worker.retry_policy.report(&away.into());
    assert!(has("gristmill_queue_errors_total{kind=\"unavailable\"} 1"));
    assert!(has("gristmill_queue_outage 0") && has("gristmill_shards_in_flight 0"));
}

/// A queue that has nothing is not the end where a store has failed: its messages come again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_is_not_idle_while_a_store_fails() {
    let worker = once(Arc::new(LocalQueue::default()));
    let away = anyhow::anyhow!("refused");
    worker.troubles.note_failure(JobStore::Output, "s3://a/out", &away);
    let running = tokio::spawn(worker::run(worker.clone(), Box::new(Unused), Stop::default()));
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(!running.is_finished());
    worker.troubles.note_recovery(JobStore::Output, "s3://a/out");
    let ended = tokio::time::timeout(Duration::from_secs(20), running).await;
    assert_eq!(ended.unwrap().unwrap().unwrap(), None);
}
