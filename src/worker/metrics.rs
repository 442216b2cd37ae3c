//! Metrics of a worker in the text format of Prometheus, version 0.0.4.
//!
//! Most values are counted elsewhere, and read when somebody asks for the metrics. Only what no
//! other part counts is counted here: tokens per step, seconds per shard, dollars, and the load of
//! the engine after each step. Labels hold no job and no tenant, so the number of series is fixed.
//!
//! See docs/metrics.md and docs/decisions/091-metrics-are-read-when-they-are-asked-for.md.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use axum::http::header;
use axum::response::{IntoResponse, Response};
use prometheus::core::Collector;
use prometheus::{Counter, Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};
use prometheus::{Opts, Registry, Result, TextEncoder};

use crate::dataset::row::RowStatus;
use crate::engine::totals::EngineLoad;
use crate::report::meter::Meter;
use crate::worker::Worker;
use crate::worker::error_counts::{ErrorCounts, QueueErrorKind, StoreErrorKind};
use crate::worker::step_watchdog::StepWatchdog;

/// The content type of metrics.
const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Prefix of all names, without the underscore.
const PREFIX: &str = "gristmill";
/// Bucket bounds of tokens per step: those of vLLM.
const STEP_TOKENS: [f64; 13] = [
    1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0,
];
/// Bucket bounds of seconds per shard, up to four hours.
const SHARD_SECONDS: [f64; 14] = [
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0, 14400.0,
];

/// See the module's description.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Held while values are read and rendered, so that two requests raise no counter twice.
    sampling: Mutex<()>,
    /// The worker whose totals are read; none before the model is loaded.
    worker: OnceLock<Weak<Worker>>,
    process: ProcessMetrics,
    engine: EngineMetrics,
    work: WorkMetrics,
    trouble: TroubleMetrics,
}

/// What is known from the start.
#[derive(Debug)]
struct ProcessMetrics {
    build_info: IntGaugeVec,
    ready: IntGauge,
}

#[derive(Debug)]
struct EngineMetrics {
    num_requests_running: IntGauge,
    num_requests_waiting: IntGauge,
    kv_cache_usage_ratio: Gauge,
    num_preemptions: IntCounter,
    iteration_tokens: Histogram,
}

#[derive(Debug)]
struct WorkMetrics {
    prompt_tokens: IntCounter,
    generation_tokens: IntCounter,
    prefix_cache_queries: IntCounter,
    prefix_cache_hits: IntCounter,
    rows: IntCounterVec,
    truncated_rows: IntCounter,
    shards_in_flight: IntGauge,
    shards_committed: IntCounter,
    shard_seconds: Histogram,
    device_seconds: Counter,
    lost_seconds: Counter,
    cost_dollars: Counter,
}

#[derive(Debug)]
struct TroubleMetrics {
    store_errors: IntCounterVec,
    queue_errors: IntCounterVec,
    queue_outage: IntGauge,
    last_step_age_seconds: Gauge,
    device_hangs: IntGauge,
}

/// A response with metrics as text.
pub(crate) fn text_response(text: String) -> Response {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response()
}

impl Metrics {
    /// Metrics of a process that has no worker yet.
    ///
    /// # Errors
    /// A name is invalid, or stands twice.
    pub fn new() -> Result<Metrics> {
        let registry = Registry::new_custom(Some(PREFIX.into()), None)?;
        Ok(Metrics {
            process: ProcessMetrics::new(&registry)?,
            engine: EngineMetrics::new(&registry)?,
            work: WorkMetrics::new(&registry)?,
            trouble: TroubleMetrics::new(&registry)?,
            registry,
            sampling: Mutex::new(()),
            worker: OnceLock::new(),
        })
    }

    /// From now on, the totals of `worker`, which computes on `device`, are read for each request.
    pub fn attach(&self, worker: &Arc<Worker>, device: &str) {
        let precision = worker.jobs.model().formats.precision_name();
        self.set_ready(precision, device);
        // A process has one worker, so the cell is empty.
        let _ = self.worker.set(Arc::downgrade(worker));
    }

    /// Sets what the engine holds after a step. Called by the device thread alone.
    pub fn set_load(&self, load: &EngineLoad) {
        self.engine.num_requests_running.set(load.running as i64);
        self.engine.num_requests_waiting.set(load.waiting as i64);
        let usage = load.kv_blocks_held as f64 / load.kv_blocks.max(1) as f64;
        self.engine.kv_cache_usage_ratio.set(usage);
        raise(&self.engine.num_preemptions, load.preemptions);
    }

    /// Counts a step of the engine by its tokens.
    pub fn observe_step(&self, tokens: u64) {
        self.engine.iteration_tokens.observe(tokens as f64);
    }

    /// Counts a committed shard by the time since its message was received.
    pub fn observe_shard(&self, time: Duration) {
        self.work.shard_seconds.observe(time.as_secs_f64());
    }

    /// Adds the price of device time.
    pub fn add_dollars(&self, usd: f64) {
        self.work.cost_dollars.inc_by(usd.max(0.0));
    }

    /// The current values as text.
    pub fn render(&self) -> String {
        let _sampling = self.lock_sampling();
        if let Some(worker) = self.worker.get().and_then(Weak::upgrade) {
            self.sample(&worker);
        }
        // Only a family without a name or a value cannot be encoded, and `new` makes none.
        let families = self.registry.gather();
        TextEncoder::new().encode_to_string(&families).unwrap_or_default()
    }

    /// The response to a request for metrics.
    pub(super) fn response(&self) -> Response {
        text_response(self.render())
    }

    fn sample(&self, worker: &Worker) {
        self.work.sample(&worker.meter);
        self.work.shards_in_flight.set(worker.in_flight.count() as i64);
        raise(&self.work.shards_committed, worker.shards_done());
        self.trouble
            .sample(worker.retry_policy.errors(), worker.queue.is_attached());
        self.trouble.sample_device(&worker.watchdog);
    }

    fn set_ready(&self, precision: &str, device: &str) {
        let _sampling = self.lock_sampling();
        self.process.set_build(precision, device);
        self.process.ready.set(1);
    }

    fn lock_sampling(&self) -> MutexGuard<'_, ()> {
        // The mutex guards no data that a panic could leave half changed.
        self.sampling.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ProcessMetrics {
    fn new(registry: &Registry) -> Result<ProcessMetrics> {
        let up = IntGauge::new("up", "1 while this process answers.");
        registered(registry, up)?.set(1);
        let ready = IntGauge::new("ready", "1 once the model is loaded and the worker takes shards.");
        let build_info = IntGaugeVec::new(
            Opts::new(
                "build_info",
                "Always 1, with the program's version and, once the model is loaded, its precision and device.",
            ),
            &["version", "precision", "device"],
        );
        let process = ProcessMetrics {
            build_info: registered(registry, build_info)?,
            ready: registered(registry, ready)?,
        };
        process.set_build("", "");
        Ok(process)
    }

    fn set_build(&self, precision: &str, device: &str) {
        self.build_info.reset();
        let labels = [env!("CARGO_PKG_VERSION"), precision, device];
        self.build_info.with_label_values(&labels).set(1);
    }
}

impl EngineMetrics {
    fn new(registry: &Registry) -> Result<EngineMetrics> {
        let running = IntGauge::new("num_requests_running", "Number of sequences that run on the device.");
        let waiting = IntGauge::new(
            "num_requests_waiting",
            "Number of sequences that wait in the engine to be started or resumed.",
        );
        let kv_cache_usage = Gauge::new(
            "kv_cache_usage_ratio",
            "Share of the KV blocks that sequences hold, from 0 to 1.",
        );
        let preemptions = IntCounter::new(
            "num_preemptions_total",
            "Number of times that a sequence lost its KV blocks to others.",
        );
        let iteration_tokens = Histogram::with_opts(
            HistogramOpts::new("iteration_tokens", "Number of tokens that a step computes.")
                .buckets(STEP_TOKENS.to_vec()),
        );
        Ok(EngineMetrics {
            num_requests_running: registered(registry, running)?,
            num_requests_waiting: registered(registry, waiting)?,
            kv_cache_usage_ratio: registered(registry, kv_cache_usage)?,
            num_preemptions: registered(registry, preemptions)?,
            iteration_tokens: registered(registry, iteration_tokens)?,
        })
    }
}

impl WorkMetrics {
    fn new(registry: &Registry) -> Result<WorkMetrics> {
        let counter = |name: &str, help: &str| registered(registry, IntCounter::new(name, help));
        let decimal_counter = |name: &str, help: &str| registered(registry, Counter::new(name, help));
        let rows = Opts::new("rows_total", "Number of finished rows, by their status.");
        let in_flight = IntGauge::new(
            "shards_in_flight",
            "Number of shards that the worker has received and not yet ended.",
        );
        let shard_seconds = HistogramOpts::new(
            "shard_seconds",
            "Seconds from the receipt of a shard's message to the shard's commit.",
        );
        let work = WorkMetrics {
            prompt_tokens: counter("prompt_tokens_total", "Number of prompt tokens of finished rows.")?,
            generation_tokens: counter(
                "generation_tokens_total",
                "Number of tokens that the model generated for finished rows.",
            )?,
            prefix_cache_queries: counter(
                "prefix_cache_queries_total",
                "Number of prompt tokens of finished rows that were looked up in the prefix cache.",
            )?,
            prefix_cache_hits: counter(
                "prefix_cache_hits_total",
                "Number of prompt tokens of finished rows that the prefix cache held.",
            )?,
            rows: registered(registry, IntCounterVec::new(rows, &["status"]))?,
            truncated_rows: counter(
                "truncated_rows_total",
                "Number of finished rows of which an answer was cut off.",
            )?,
            shards_in_flight: registered(registry, in_flight)?,
            shards_committed: counter(
                "shards_committed_total",
                "Number of shards that the worker has committed.",
            )?,
            shard_seconds: registered(
                registry,
                Histogram::with_opts(shard_seconds.buckets(SHARD_SECONDS.to_vec())),
            )?,
            device_seconds: decimal_counter("device_seconds_total", "Seconds in which the device worked.")?,
            lost_seconds: decimal_counter(
                "lost_seconds_total",
                "Device seconds of rows that this process did not finish or did not log.",
            )?,
            cost_dollars: decimal_counter(
                "cost_dollars_total",
                "Dollars for the device seconds of jobs whose file names a price.",
            )?,
        };
        // A status has a value before its first row.
        for status in RowStatus::ALL {
            work.rows.with_label_values(&[status.as_str()]);
        }
        Ok(work)
    }

    fn sample(&self, meter: &Meter) {
        let reading = meter.read();
        raise(&self.prompt_tokens, reading.prompt_tokens);
        raise(&self.generation_tokens, reading.completion_tokens);
        raise(&self.prefix_cache_queries, reading.prompt_tokens);
        raise(&self.prefix_cache_hits, reading.cached_tokens);
        for (status, rows) in meter.rows_by_status() {
            raise(&self.rows.with_label_values(&[status.as_str()]), rows);
        }
        raise(&self.truncated_rows, reading.truncated_rows);
        raise_seconds(&self.device_seconds, reading.device_seconds);
        raise_seconds(&self.lost_seconds, reading.lost_seconds);
    }
}

impl TroubleMetrics {
    fn new(registry: &Registry) -> Result<TroubleMetrics> {
        let store_errors = Opts::new(
            "store_errors_total",
            "Number of errors of stores that the worker waited out or left to others, by kind.",
        );
        let queue_errors = Opts::new(
            "queue_errors_total",
            "Number of errors of the queue that the worker waited out, by kind.",
        );
        let outage = IntGauge::new(
            "queue_outage",
            "1 while messages in the queue would not reach this worker.",
        );
        let age = Gauge::new(
            "last_step_age_seconds",
            "Seconds since the device ended a step, or since the start before its first step.",
        );
        let hangs = IntGauge::new(
            "device_hangs",
            "1 while a step takes longer than a device that works may take.",
        );
        let trouble = TroubleMetrics {
            store_errors: registered(registry, IntCounterVec::new(store_errors, &["kind"]))?,
            queue_errors: registered(registry, IntCounterVec::new(queue_errors, &["kind"]))?,
            queue_outage: registered(registry, outage)?,
            last_step_age_seconds: registered(registry, age)?,
            device_hangs: registered(registry, hangs)?,
        };
        for kind in StoreErrorKind::ALL {
            trouble.store_errors.with_label_values(&[kind.as_str()]);
        }
        for kind in QueueErrorKind::ALL {
            trouble.queue_errors.with_label_values(&[kind.as_str()]);
        }
        Ok(trouble)
    }

    fn sample(&self, errors: &ErrorCounts, is_attached: bool) {
        for (kind, count) in errors.store_errors() {
            raise(&self.store_errors.with_label_values(&[kind.as_str()]), count);
        }
        for (kind, count) in errors.queue_errors() {
            raise(&self.queue_errors.with_label_values(&[kind.as_str()]), count);
        }
        self.queue_outage.set((!is_attached).into());
    }

    fn sample_device(&self, watchdog: &StepWatchdog) {
        self.last_step_age_seconds.set(watchdog.last_step_age().as_secs_f64());
        self.device_hangs.set((!watchdog.is_alive()).into());
    }
}

/// Registers a metric, and returns the handle of it.
fn registered<M: Collector + Clone + 'static>(registry: &Registry, metric: Result<M>) -> Result<M> {
    let metric = metric?;
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}

/// Raises a counter to a total that is counted elsewhere.
fn raise(counter: &IntCounter, total: u64) {
    counter.inc_by(total.saturating_sub(counter.get()));
}

/// As [`raise`], for a total of seconds.
fn raise_seconds(counter: &Counter, total: f64) {
    counter.inc_by((total - counter.get()).max(0.0));
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::dataset::row::RowResult;
    use crate::queue::QueueError;

    /// One metric of an exposition: its type, and the values of its series.
    #[derive(Debug)]
    struct Family {
        kind: String,
        series: BTreeMap<String, f64>,
    }

    /// Reads an exposition line by line. Panics where Prometheus or promtool would complain.
    fn families(text: &str) -> BTreeMap<String, Family> {
        let mut families: BTreeMap<String, Family> = BTreeMap::new();
        let mut lines = text.lines().peekable();
        assert!(text.ends_with('\n'));
        while let Some(help) = lines.next() {
            let (name, help) = help
                .strip_prefix("# HELP ")
                .and_then(|rest| rest.split_once(' '))
                .unwrap_or_else(|| panic!("a sample before its help: {help}"));
            assert!(
                help.ends_with('.') && !help.contains(". "),
                "{name}: one sentence: {help}"
            );
            let kind = lines.next().and_then(|line| line.strip_prefix("# TYPE "));
            let kind = kind.and_then(|rest| rest.strip_prefix(name)).map(str::trim).unwrap();
            let mut series = BTreeMap::new();
            while let Some(sample) = lines.next_if(|line| !line.starts_with('#')) {
                let (label, value) = sample.rsplit_once(' ').unwrap();
                let own = label.split('{').next().unwrap();
                let suffix = own
                    .strip_prefix(name)
                    .unwrap_or_else(|| panic!("{sample} is not of {name}"));
                let suffixes: &[&str] = match kind {
                    "histogram" => &["_bucket", "_sum", "_count"],
                    _ => &[""],
                };
                assert!(suffixes.contains(&suffix), "{sample}");
                let value: f64 = value.parse().unwrap();
                assert!(series.insert(label.to_string(), value).is_none(), "twice: {label}");
            }
            assert!(!series.is_empty(), "{name} has no value");
            let kind = kind.to_string();
            assert_eq!(kind == "counter", name.ends_with("_total"), "{name}: {kind}");
            assert!(name.starts_with("gristmill_") && ["counter", "gauge", "histogram"].contains(&&*kind));
            let earlier = families.insert(name.to_string(), Family { kind, series });
            assert!(earlier.is_none(), "two metrics are called {name}");
        }
        families
    }

    fn values(text: &str) -> BTreeMap<String, f64> {
        families(text).into_values().flat_map(|family| family.series).collect()
    }

    fn row(status: RowStatus) -> RowResult {
        RowResult {
            row: 3,
            status,
            samples: Vec::new(),
            error: None,
            prompt_tokens: 30,
            cached_tokens: 20,
        }
    }

    #[test]
    fn a_process_without_a_worker_says_what_it_knows() {
        let metrics = Metrics::new().unwrap();
        let build = |precision: &str, device: &str| {
            let version = env!("CARGO_PKG_VERSION");
            format!("gristmill_build_info{{device=\"{device}\",precision=\"{precision}\",version=\"{version}\"}}")
        };
        let before = values(&metrics.render());
        assert_eq!((before["gristmill_up"], before["gristmill_ready"]), (1.0, 0.0));
        assert_eq!(before[&build("", "")], 1.0);
        assert_eq!(before["gristmill_rows_total{status=\"errored\"}"], 0.0);
        assert_eq!(before["gristmill_store_errors_total{kind=\"unavailable\"}"], 0.0);
        metrics.set_ready("int8", "cuda:0");
        let after = values(&metrics.render());
        assert_eq!((after[&build("int8", "cuda:0")], after["gristmill_ready"]), (1.0, 1.0));
        assert!(!after.contains_key(&build("", "")), "one series says what runs");
    }

    #[test]
    fn totals_of_other_parts_are_counters() {
        let (metrics, meter, errors) = (Metrics::new().unwrap(), Meter::default(), ErrorCounts::default());
        meter.add_row(&row(RowStatus::Succeeded));
        meter.add_row(&row(RowStatus::Expired));
        meter.add_device_time(Duration::from_millis(1500));
        errors.add(&QueueError::Denied { why: "no".into() }.into());
        // A second reading of the same totals adds nothing.
        for _ in 0..2 {
            metrics.work.sample(&meter);
            metrics.trouble.sample(&errors, false);
        }
        meter.set_lost_seconds(0.5);
        metrics.work.sample(&meter);
        let read = values(&metrics.render());
        for (name, value) in [
            ("rows_total{status=\"succeeded\"}", 1.0),
            ("rows_total{status=\"expired\"}", 1.0),
            ("rows_total{status=\"errored\"}", 0.0),
            ("prompt_tokens_total", 60.0),
            ("prefix_cache_queries_total", 60.0),
            ("prefix_cache_hits_total", 40.0),
            ("generation_tokens_total", 0.0),
            ("device_seconds_total", 1.5),
            ("lost_seconds_total", 0.5),
            ("queue_errors_total{kind=\"denied\"}", 1.0),
            ("store_errors_total{kind=\"denied\"}", 0.0),
            ("queue_outage", 1.0),
        ] {
            assert_eq!(read[&format!("gristmill_{name}")], value, "{name}");
        }
    }

    #[test]
    fn steps_and_shards_fall_into_buckets() {
        let metrics = Metrics::new().unwrap();
        metrics.observe_step(64);
        metrics.observe_step(65);
        metrics.observe_shard(Duration::from_secs(90));
        metrics.add_dollars(0.25);
        metrics.set_load(&EngineLoad {
            running: 3,
            waiting: 5,
            kv_blocks_held: 1,
            kv_blocks: 4,
            preemptions: 2,
        });
        let read = values(&metrics.render());
        for (name, value) in [
            ("iteration_tokens_bucket{le=\"32\"}", 0.0),
            ("iteration_tokens_bucket{le=\"64\"}", 1.0),
            ("iteration_tokens_bucket{le=\"128\"}", 2.0),
            ("iteration_tokens_bucket{le=\"+Inf\"}", 2.0),
            ("iteration_tokens_sum", 129.0),
            ("iteration_tokens_count", 2.0),
            ("shard_seconds_bucket{le=\"60\"}", 0.0),
            ("shard_seconds_bucket{le=\"120\"}", 1.0),
            ("cost_dollars_total", 0.25),
            ("num_requests_running", 3.0),
            ("num_requests_waiting", 5.0),
            ("kv_cache_usage_ratio", 0.25),
            ("num_preemptions_total", 2.0),
        ] {
            assert_eq!(read[&format!("gristmill_{name}")], value, "{name}");
        }
    }

    #[test]
    fn a_hanging_device_shows() {
        let metrics = Metrics::new().unwrap();
        let watchdog = StepWatchdog::new(Duration::from_millis(20));
        watchdog.step(|| {
            std::thread::sleep(Duration::from_millis(40));
            metrics.trouble.sample_device(&watchdog);
        });
        let read = values(&metrics.render());
        assert_eq!(read["gristmill_device_hangs"], 1.0);
        assert!(read["gristmill_last_step_age_seconds"] >= 0.04);
        metrics.trouble.sample_device(&watchdog);
        assert_eq!(values(&metrics.render())["gristmill_device_hangs"], 0.0);
    }

    /// The dashboard and the alert rules ask only for what is rendered.
    #[test]
    fn dashboard_and_alerts_name_what_is_rendered() {
        let rendered = values(&Metrics::new().unwrap().render());
        let known: BTreeSet<&str> = rendered.keys().filter_map(|series| series.split('{').next()).collect();
        for text in [
            include_str!("../../deploy/metrics/gristmill-dashboard.json"),
            include_str!("../../deploy/metrics/alerts.yaml"),
        ] {
            let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            let named: BTreeSet<&str> = words.filter(|word| word.starts_with("gristmill_")).collect();
            assert!(!named.is_empty());
            let unknown: Vec<&&str> = named.difference(&known).collect();
            assert!(unknown.is_empty(), "{unknown:?}");
        }
    }

    /// The page lists each metric with its type and its labels.
    #[test]
    fn the_page_lists_what_is_rendered() {
        let page = include_str!("../../docs/metrics.md");
        let listed: BTreeSet<(String, String)> = page
            .lines()
            .filter_map(|line| line.strip_prefix("| `gristmill_"))
            .map(|line| {
                let (name, rest) = line.split_once('`').unwrap();
                let kind = rest.split('|').nth(1).unwrap().trim();
                (format!("gristmill_{name}"), kind.to_string())
            })
            .collect();
        let rendered = families(&Metrics::new().unwrap().render());
        let labels_of = |family: &Family| {
            let series = family.series.keys().next().unwrap();
            let pairs = series.split_once('{').map(|(_, pairs)| pairs.trim_end_matches('}'));
            let names = pairs.into_iter().flat_map(|pairs| pairs.split(','));
            let names: Vec<&str> = names.filter_map(|pair| pair.split('=').next()).collect();
            if names.is_empty() || family.kind == "histogram" {
                String::new()
            } else {
                format!("{{{}}}", names.join(","))
            }
        };
        let rendered: BTreeSet<(String, String)> = rendered
            .iter()
            .map(|(name, family)| (format!("{name}{}", labels_of(family)), family.kind.clone()))
            .collect();
        assert_eq!(listed, rendered);
    }
}
