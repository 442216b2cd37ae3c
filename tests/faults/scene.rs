//! One job among faults: submitted, worked on by a workers, and held to the guarantee at the end.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::bucket::Bucket;
use super::job::{Broker, Format, Job, Plan};
use super::services::{Services, ask_kafka, delete_topic};
use super::suite::Suite;
use super::worker_set::{Ended, Start, WorkerSet};
use crate::support::{Run, arg, gristmill, python, root};

/// Longest time that a job may take after its last fault.
pub(super) const END_MAX: Duration = Duration::from_secs(240);
/// Longest time that a worker may take to see that the job is done, or to leave when told to.
pub(super) const LEAVE_MAX: Duration = Duration::from_secs(30);
/// Within which an idle worker notices by itself that its jobs are done: it looks every 30 s at least, and every log
/// interval where that is shorter.
pub(super) const IDLE_MAX: Duration = Duration::from_secs(60);
/// Between two passes of `reconcile`: what was in flight has run out by then.
const RECONCILE_EVERY: Duration = Duration::from_secs(5);
const RECONCILE_MAX: u64 = 24;
/// Between two looks at the workers.
const LOOK: Duration = Duration::from_millis(50);
/// Between two looks for `_SUCCESS`.
const LOOK_STORE: Duration = Duration::from_millis(400);

/// Plays a job so often as the scale asks for, `full` times at most, over the brokers in turn.
pub(super) fn play_each(name: &'static str, brokers: &[Broker], plan: &Plan, full: u64, play: impl Fn(Scene)) {
    let needs: Vec<&str> = brokers.iter().map(|broker| broker.name()).collect();
    let Some(services) = Services::of(name, &needs) else {
        return;
    };
    let mut suite = Suite::begin(name);
    let first = suite.seed as usize % 2;
    for time in 0..suite.count(1, full) as usize {
        let broker = brokers[(first + time) % brokers.len()];
        play(Scene::open(&mut suite, &services, broker, plan));
        suite.add("faults", 1);
    }
    suite.end();
}

/// See the module's description.
pub(super) struct Scene<'s> {
    pub suite: &'s mut Suite,
    pub services: Services,
    pub bucket: Bucket,
    pub worker_set: WorkerSet,
    pub job: Job,
    pub broker: Broker,
    pub queue: String,
    /// Ends of workers that are no finding; none unless a test says so.
    pub tolerated: fn(&Ended) -> bool,
    /// Exit codes with which workers leave a job that has ended.
    pub job_ended: Vec<i32>,
    /// Where commands and workers reach the store.
    env: Vec<(String, String)>,
    trace: PathBuf,
    looked: Instant,
    opened: Instant,
}

impl<'s> Scene<'s> {
    /// Makes a job and submits it; no worker yet.
    pub(super) fn open(suite: &'s mut Suite, services: &Services, broker: Broker, plan: &Plan) -> Scene<'s> {
        Scene::open_through(suite, services, broker, plan, &services.store.endpoint)
    }

    /// As [`Scene::open`]; commands and workers reach the store at `endpoint`.
    pub(super) fn open_through(
        suite: &'s mut Suite,
        services: &Services,
        broker: Broker,
        plan: &Plan,
        endpoint: &str,
    ) -> Scene<'s> {
        let number = suite.random.next() & 0xff_ffff;
        let name = format!("{}-{}-{number:06x}", suite.name, broker.name());
        let dir = suite.dir.join(&name);
        std::fs::create_dir_all(&dir).unwrap();
        let format = suite.next_format();
        let job = Job::make(plan, &name, format, suite.seed ^ number, &services.store, &dir);
        let (queue, trace) = (broker.url(&name), dir.join("trace"));
        let mut env = services.store.variables(endpoint);
        for (name, value) in [
            ("GRISTMILL_KNOWN_DEVICE", "1".to_string()),
            ("GRISTMILL_KNOWN_MS_PER_ROW", plan.ms_per_row.to_string()),
            ("GRISTMILL_KNOWN_TRACE", arg(&trace).to_string()),
        ] {
            env.push((name.into(), value));
        }
        let interval = plan.log_interval.to_string();
        let arguments = ["worker", "--queue", &queue, "--until-idle", "--job", &job.output]
            .into_iter()
            .chain(["--log-interval", &interval])
            .map(str::to_string)
            .chain(broker.arguments())
            .collect();
        let start = Start {
            arguments,
            env: env.clone(),
        };
        let scene = Scene {
            services: services.clone(),
            bucket: Bucket::open(&services.store),
            worker_set: WorkerSet::new(start, &dir.join("logs")),
            broker,
            queue,
            tolerated: |_| false,
            job_ended: vec![0, 3],
            env,
            trace,
            looked: Instant::now(),
            opened: Instant::now(),
            suite,
            job,
        };
        scene.submit();
        scene
    }

    /// Submits the job, again where it was before.
    pub(super) fn submit(&self) {
        self.run(&["submit", arg(&self.job.file), "--queue", &self.queue])
            .expect(0);
    }

    /// Enqueues what nobody moves, by a single pass whose looks are `seconds` apart.
    pub(super) fn reconcile(&self, seconds: f64) {
        let seconds = seconds.to_string();
        let run = self.run(&[
            "reconcile",
            &self.job.output,
            "--queue",
            &self.queue,
            "--interval",
            &seconds,
        ]);
        // 3: the job has ended meanwhile, with failed rows.
        assert!(matches!(run.code, Some(0 | 3)), "reconcile: {run:?}");
    }

    /// Waits for `_SUCCESS` as an operator would who finds that the queue has lost messages; returns the passes it took.
    pub(super) fn reconcile_until_finished(&mut self) -> u64 {
        let mut passes = 0;
        while !self.comes_true(RECONCILE_EVERY, Self::finished) {
            assert!(
                passes < RECONCILE_MAX,
                "not complete after {passes} passes of reconcile\n{}",
                self.worker_set.tails()
            );
            self.reconcile(3.0);
            passes += 1;
        }
        passes
    }

    /// Since the job was submitted.
    pub(super) fn age(&self) -> Duration {
        self.opened.elapsed()
    }

    /// Sets a variable of all commands to come; workers that are hired already keep theirs.
    pub(super) fn set_env(&mut self, name: &str, value: &str) {
        self.env.push((name.into(), value.into()));
    }

    /// A command that reaches the store as the workers do.
    pub(super) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = gristmill(arguments);
        command.envs(self.env.iter().cloned());
        command
    }

    pub(super) fn run(&self, arguments: &[&str]) -> Run {
        Run::of(&mut self.command(arguments))
    }

    /// The job's status.
    pub(super) fn status(&self) -> Value {
        self.run(&["status", &self.job.output, "--json"]).expect(0).json()
    }

    /// Hires `workers` and waits until one of them computes.
    pub(super) fn begin(&mut self, workers: usize) {
        for _ in 0..workers {
            self.worker_set.hire(&[]);
        }
        self.until("the first row", END_MAX, |scene| scene.computed() > 0);
    }

    /// Rows that workers have computed, the same one as often as it was.
    pub(super) fn computed(&self) -> u64 {
        let bytes = std::fs::read(&self.trace).unwrap_or_default();
        bytes.iter().filter(|byte| **byte == b'\n').count() as u64
    }

    /// Lets time pass, and looks after the workers meanwhile.
    pub(super) fn live(&mut self, time: Duration) {
        let end = Instant::now() + time;
        loop {
            self.worker_set.keep(&self.job_ended, self.tolerated);
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            std::thread::sleep(left.min(LOOK));
        }
    }

    /// Waits until `done`, looking after the workers. Fails after `limit`, saying `what` did not come.
    pub(super) fn until(&mut self, what: &str, limit: Duration, mut done: impl FnMut(&mut Self) -> bool) {
        assert!(
            self.comes_true(limit, &mut done),
            "{what}: not within {limit:?}\n{}",
            self.worker_set.tails()
        );
    }

    /// Whether `done` becomes true within `limit`.
    pub(super) fn comes_true(&mut self, limit: Duration, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        let end = Instant::now() + limit;
        loop {
            if done(self) {
                return true;
            }
            if Instant::now() > end {
                return false;
            }
            self.live(LOOK);
        }
    }

    /// Whether `_SUCCESS` lies there; looked up now and then only.
    pub(super) fn finished(&mut self) -> bool {
        if self.looked.elapsed() < LOOK_STORE {
            return false;
        }
        self.looked = Instant::now();
        self.bucket.has(&format!("{}/out/_SUCCESS", self.job.key))
    }

    /// A second job on the same queue, ready to be submitted, that is published in the other format.
    pub(super) fn second_job(&mut self, plan: &Plan) -> Job {
        let name = format!("{}-second", self.job.name);
        let dir = self.suite.dir.join(&name);
        std::fs::create_dir_all(&dir).unwrap();
        let format = self.suite.next_format();
        Job::make(plan, &name, format, self.suite.seed, &self.services.store, &dir)
    }

    /// Waits for the job's end and for the workers to leave by themselves, then holds the output to the guarantee.
    pub(super) fn conclude(mut self) {
        self.until("`_SUCCESS`", END_MAX, Scene::finished);
        self.until("that all workers leave a finished job", IDLE_MAX, |scene| {
            scene.worker_set.all_done()
        });
        self.hold(&[]);
        // Thousands of partitions that nobody needs would make each restart of the broker last longer.
        if self.broker == Broker::Kafka {
            ask_kafka(async |admin| delete_topic(admin, &self.job.name).await);
        }
    }

    /// The guarantee, by `gristmill verify` and by the checker, with its `extra` arguments; counts what was done.
    pub(super) fn hold(&mut self, extra: &[&str]) {
        self.hold_so_far(extra);
        let (computed, lives) = (self.computed(), self.worker_set.lives());
        self.suite.add("jobs", 1);
        self.suite.add("rows", self.job.rows);
        if self.job.format == Format::Lines {
            self.suite.add("rows_as_lines", self.job.rows);
        }
        self.suite.add("rows_computed", computed);
        self.suite.add("worker_lives", lives);
    }

    /// The same of a job that goes on: it is counted at its end.
    pub(super) fn hold_so_far(&self, extra: &[&str]) {
        if let Err(found) = self.inspect(extra) {
            panic!(
                "seed {}: the guarantee does not hold:\n{found}\n{}",
                self.suite.seed,
                self.worker_set.tails()
            );
        }
    }

    /// What `gristmill verify` and the checker find wrong with the output.
    pub(super) fn inspect(&self, extra: &[&str]) -> Result<(), String> {
        let verified = self.run(&["verify", &self.job.output, "--json"]);
        let mut command = Command::new(python());
        command
            .arg(root().join("tests/faults/check.py"))
            .arg(&self.job.output)
            .arg(&self.job.data)
            .args(["--endpoint", &self.services.store.endpoint])
            .args(extra)
            .envs(self.env.iter().cloned());
        let checked = Run::of(&mut command);
        if verified.code == Some(0) && checked.code == Some(0) {
            return Ok(());
        }
        Err(format!(
            "verify: {:?} {}{}\nchecker: {:?} {}{}",
            verified.code, verified.stdout, verified.stderr, checked.code, checked.stdout, checked.stderr
        ))
    }
}

/// Faults at random moments over one job after the other, until there were enough of them.
pub(super) struct Storm {
    pub faults: u64,
    pub workers: usize,
    /// Between two faults, in milliseconds.
    pub gap_ms: std::ops::Range<u64>,
    pub plan: Plan,
}

impl Storm {
    /// `fault` does one or more and says how many; each job runs over the next of `brokers`.
    pub(super) fn rage(
        &self,
        suite: &mut Suite,
        services: &Services,
        brokers: &[Broker],
        mut fault: impl FnMut(&mut Scene) -> u64,
    ) {
        let mut done = 0;
        for broker in brokers.iter().cycle() {
            let mut scene = Scene::open(suite, services, *broker, &self.plan);
            scene.begin(self.workers);
            while done < self.faults {
                let gap = scene.suite.random.ms(self.gap_ms.clone());
                scene.live(gap);
                if scene.finished() || scene.worker_set.awake().is_empty() {
                    break;
                }
                done += fault(&mut scene);
            }
            scene.conclude();
            if done >= self.faults {
                break;
            }
        }
        suite.add("faults", done);
    }
}
