//! Signs of life for the supervisor that restarts hanging workers: a file that is touched, or a
//! port that answers. The port also answers with the worker's metrics.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use tokio::net::TcpListener;

use crate::http::{self, HttpLimits};
use crate::worker::metrics::Metrics;
use crate::worker::step_watchdog::StepWatchdog;

const TOUCH_EVERY: Duration = Duration::from_secs(1);
/// Probes come a few at a time. A supervisor takes one that waits for long for a failed one.
const LIMITS: HttpLimits = HttpLimits {
    connections: 64,
    header_timeout: Duration::from_secs(5),
    drain_timeout: Duration::ZERO,
};

/// Touches `path` each second while `watchdog` is alive.
///
/// # Errors
/// The file cannot be written at all.
pub fn touch(path: PathBuf, watchdog: Arc<StepWatchdog>) -> std::io::Result<()> {
    std::fs::write(&path, b"")?;
    tokio::spawn(async move {
        let mut ticks = tokio::time::interval(TOUCH_EVERY);
        loop {
            ticks.tick().await;
            if watchdog.is_alive()
                && let Err(error) = tokio::fs::write(&path, b"").await
            {
                tracing::warn!("cannot touch `{}`: {error}", path.display());
            }
        }
    });
    Ok(())
}

/// Answers HTTP requests at `address`: `GET /metrics` with `metrics`, every other request with 200
/// while `watchdog` is alive and 503 when it is not.
///
/// # Errors
/// The port cannot be bound.
pub async fn listen(address: SocketAddr, watchdog: Arc<StepWatchdog>, metrics: Arc<Metrics>) -> std::io::Result<()> {
    let listener = TcpListener::bind(address).await?;
    let alive = move || async move {
        if watchdog.is_alive() {
            (StatusCode::OK, "alive\n")
        } else {
            (StatusCode::SERVICE_UNAVAILABLE, "the device hangs\n")
        }
    };
    let router = Router::new()
        .route(
            "/metrics",
            get(move || async move { metrics.response() }).fallback(alive.clone()),
        )
        .fallback(alive);
    tokio::spawn(http::serve(listener, router, LIMITS, std::future::pending()));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::parse_address;
    use std::net::Ipv4Addr;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    /// The response to a request with this line.
    async fn ask(port: u16, line: &str) -> String {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
        let request = format!("{line} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    fn metrics() -> Arc<Metrics> {
        Arc::new(Metrics::new().unwrap())
    }

    async fn free_port() -> u16 {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        free.local_addr().unwrap().port()
    }

    #[tokio::test]
    async fn the_port_answers_with_metrics() {
        let (port, metrics) = (free_port().await, metrics());
        let watchdog = Arc::new(StepWatchdog::new(Duration::from_secs(60)));
        listen(parse_address(&port.to_string()).unwrap(), watchdog, metrics.clone())
            .await
            .unwrap();
        metrics.observe_step(7);
        let whole = ask(port, "GET /metrics").await;
        let (head, body) = whole.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        assert!(
            head.contains("content-type: text/plain; version=0.0.4; charset=utf-8\r\n"),
            "{head}"
        );
        assert_eq!(body, metrics.render());
        assert!(body.contains("\ngristmill_iteration_tokens_sum 7\n"), "{body}");
        for other in [
            "GET /",
            "GET /metricsx",
            "GET /x/metrics",
            "POST /metrics",
            "GET /metri",
        ] {
            let answer = ask(port, other).await;
            assert!(answer.ends_with("\r\n\r\nalive\n"), "{other}: {answer}");
        }
    }

    #[tokio::test]
    async fn the_port_tells_a_hang_from_life() {
        let port = free_port().await;
        let watchdog = Arc::new(StepWatchdog::new(Duration::from_millis(50)));
        listen(parse_address(&port.to_string()).unwrap(), watchdog.clone(), metrics())
            .await
            .unwrap();
        assert!(ask(port, "GET /healthz").await.starts_with("HTTP/1.1 200"));
        let hanging = std::thread::spawn(move || watchdog.step(|| std::thread::sleep(Duration::from_millis(800))));
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(ask(port, "GET /healthz").await.starts_with("HTTP/1.1 503"));
        hanging.join().unwrap();
        assert!(ask(port, "GET /healthz").await.starts_with("HTTP/1.1 200"));
    }

    #[tokio::test]
    async fn the_file_goes_stale_in_a_hang_and_at_no_other_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("alive");
        let watchdog = Arc::new(StepWatchdog::new(Duration::from_millis(50)));
        touch(path.clone(), watchdog.clone()).unwrap();
        let touched = || std::fs::metadata(&path).unwrap().modified().unwrap();
        let wait = || tokio::time::sleep(TOUCH_EVERY + TOUCH_EVERY / 2);
        let first = touched();
        wait().await;
        assert!(touched() > first, "a worker that waits is alive");
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let hanging = std::thread::spawn(move || watchdog.step(|| ended.recv()));
        wait().await;
        let last = touched();
        wait().await;
        assert_eq!(touched(), last, "it hangs");
        end.send(()).unwrap();
        hanging.join().unwrap().unwrap();
        wait().await;
        assert!(touched() > last, "it goes on");
    }

    #[tokio::test]
    async fn the_file_is_touched() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("alive");
        touch(path.clone(), Arc::new(StepWatchdog::new(Duration::from_secs(1)))).unwrap();
        assert!(path.exists());
        assert!(
            touch(
                dir.path().join("no/alive"),
                Arc::new(StepWatchdog::new(Duration::from_secs(1)))
            )
            .is_err()
        );
    }
}
