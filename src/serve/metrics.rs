//! Metrics of the service in the text format of Prometheus: requests, batches, uploads, webhooks.
//! Labels hold no id and no tenant.

use std::sync::Arc;

use prometheus::{IntCounter, IntCounterVec, IntGauge, Opts, Registry, Result, TextEncoder};

use crate::worker::metrics::Metrics;

/// The counters of one process. Cheap to update.
pub struct ServeMetrics {
    registry: Registry,
    requests: IntCounterVec,
    ended: IntCounterVec,
    open: IntGauge,
    uploaded_bytes: IntCounter,
    driver_errors: IntCounter,
    webhooks: IntCounterVec,
    /// The worker in the same process, with `--work`.
    worker: Option<Arc<Metrics>>,
}

impl ServeMetrics {
    /// # Errors
    /// Never in practice: names and labels are constant.
    pub fn new(worker: Option<Arc<Metrics>>) -> Result<ServeMetrics> {
        let name = |name: &str, help: &str| Opts::new(name, help).namespace("gristmill").subsystem("serve");
        let metrics = ServeMetrics {
            registry: Registry::new(),
            requests: IntCounterVec::new(
                name("requests_total", "Requests, by endpoint and status code."),
                &["endpoint", "code"],
            )?,
            ended: IntCounterVec::new(
                name(
                    "batches_ended_total",
                    "Batches that this process saw to their end, by status.",
                ),
                &["status"],
            )?,
            open: IntGauge::with_opts(name("open_batches", "Batches of all tenants that have not ended."))?,
            uploaded_bytes: IntCounter::with_opts(name("uploaded_bytes_total", "Bytes of files that clients sent."))?,
            driver_errors: IntCounter::with_opts(name(
                "driver_errors_total",
                "Looks at unfinished batches that ended with an error; they are repeated.",
            ))?,
            webhooks: IntCounterVec::new(
                name("webhooks_total", "Tries to deliver an event to a webhook, by result."),
                &["result"],
            )?,
            worker,
        };
        let registry = &metrics.registry;
        registry.register(Box::new(metrics.requests.clone()))?;
        registry.register(Box::new(metrics.ended.clone()))?;
        registry.register(Box::new(metrics.open.clone()))?;
        registry.register(Box::new(metrics.uploaded_bytes.clone()))?;
        registry.register(Box::new(metrics.driver_errors.clone()))?;
        registry.register(Box::new(metrics.webhooks.clone()))?;
        Ok(metrics)
    }

    pub(super) fn count_request(&self, endpoint: &str, code: u16) {
        self.requests.with_label_values(&[endpoint, &code.to_string()]).inc();
    }

    pub(super) fn count_end(&self, status: &str) {
        self.ended.with_label_values(&[status]).inc();
    }

    pub(super) fn set_open(&self, batches: usize) {
        self.open.set(i64::try_from(batches).unwrap_or(i64::MAX));
    }

    pub(super) fn add_uploaded(&self, bytes: u64) {
        self.uploaded_bytes.inc_by(bytes);
    }

    pub(super) fn count_driver_error(&self) {
        self.driver_errors.inc();
    }

    pub(super) fn count_webhook(&self, result: &str) {
        self.webhooks.with_label_values(&[result]).inc();
    }

    /// The current values as text, followed by those of the worker in the same process.
    pub fn render(&self) -> String {
        // Only a family without a name or a value cannot be encoded, and `new` makes none.
        let mut text = TextEncoder::new()
            .encode_to_string(&self.registry.gather())
            .unwrap_or_default();
        if let Some(worker) = &self.worker {
            text.push_str(&worker.render());
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_rendered_and_documented() {
        let metrics = ServeMetrics::new(Some(Arc::new(Metrics::new().unwrap()))).unwrap();
        metrics.count_request("/v1/files/{id}", 404);
        metrics.count_end("completed");
        metrics.set_open(3);
        metrics.add_uploaded(7);
        metrics.count_driver_error();
        metrics.count_webhook("delivered");
        let text = metrics.render();
        let page = include_str!("../../docs/serve.md");
        for (line, name) in [
            (
                "gristmill_serve_requests_total{code=\"404\",endpoint=\"/v1/files/{id}\"} 1",
                "requests_total{code,endpoint}",
            ),
            (
                "gristmill_serve_batches_ended_total{status=\"completed\"} 1",
                "batches_ended_total{status}",
            ),
            ("gristmill_serve_open_batches 3", "open_batches"),
            ("gristmill_serve_uploaded_bytes_total 7", "uploaded_bytes_total"),
            ("gristmill_serve_driver_errors_total 1", "driver_errors_total"),
            (
                "gristmill_serve_webhooks_total{result=\"delivered\"} 1",
                "webhooks_total{result}",
            ),
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
            assert!(
                page.contains(&format!("`gristmill_serve_{name}`")),
                "{name} is not in docs/serve.md"
            );
        }
        assert!(text.contains("\ngristmill_up 1\n"), "{text}");
    }
}
