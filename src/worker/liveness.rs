//! Signs of life for the supervisor that restarts hanging workers: a file that is touched, or a
//! port that answers.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use crate::worker::step_watchdog::StepWatchdog;

const TOUCH_EVERY: Duration = Duration::from_secs(1);
/// A probe that sends nothing for this long is disconnected.
const PROBE_MAX: Duration = Duration::from_secs(5);
/// Maximum number of concurrent probes.
const PROBES_MAX: usize = 64;

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

/// Parses an address to listen at: `PORT` on loopback, or `ADDRESS:PORT`.
///
/// # Errors
/// The text is neither.
pub fn parse_address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(port) = text.parse::<u16>() {
        return Ok((Ipv4Addr::LOCALHOST, port).into());
    }
    text.parse().map_err(|_| {
        "give a port (`8080`: probes of this machine alone) or an address and a port (`0.0.0.0:8080`, `[::]:8080`)"
            .into()
    })
}

/// Answers HTTP requests at `address`: 200 while `watchdog` is alive, 503 when it is not.
///
/// # Errors
/// The port cannot be bound.
pub async fn listen(address: SocketAddr, watchdog: Arc<StepWatchdog>) -> std::io::Result<()> {
    let listener = TcpListener::bind(address).await?;
    let slots = Arc::new(Semaphore::new(PROBES_MAX));
    tokio::spawn(async move {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    // If all slots are taken, further connections are dropped at once, so that none
                    // waits.
                    let Ok(slot) = slots.clone().try_acquire_owned() else {
                        continue;
                    };
                    let watchdog = watchdog.clone();
                    tokio::spawn(async move {
                        // A probe that disconnects early simply gets no answer.
                        let _ = tokio::time::timeout(PROBE_MAX, answer(stream, &watchdog)).await;
                        drop(slot);
                    });
                }
                // For example, no file descriptor is free; running probes will release theirs.
                Err(_) => tokio::time::sleep(TOUCH_EVERY).await,
            }
        }
    });
    Ok(())
}

async fn answer(mut stream: TcpStream, watchdog: &StepWatchdog) -> std::io::Result<()> {
    // The answer is the same for every request.
    let mut request = [0; 1024];
    let _length = stream.read(&mut request).await?;
    let (status, body) = if watchdog.is_alive() {
        ("200 OK", "alive\n")
    } else {
        ("503 Service Unavailable", "the device hangs\n")
    };
    let answer = format!(
        "HTTP/1.1 {status}\r\ncontent-type: text/plain\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn ask(port: u16) -> String {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
        stream.write_all(b"GET /healthz HTTP/1.1\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn the_port_tells_a_hang_from_life() {
        let port = {
            let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
            free.local_addr().unwrap().port()
        };
        let watchdog = Arc::new(StepWatchdog::new(Duration::from_millis(50)));
        listen(parse_address(&port.to_string()).unwrap(), watchdog.clone())
            .await
            .unwrap();
        assert!(ask(port).await.starts_with("HTTP/1.1 200"));
        let hanging = std::thread::spawn(move || watchdog.step(|| std::thread::sleep(Duration::from_millis(800))));
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(ask(port).await.starts_with("HTTP/1.1 503"));
        hanging.join().unwrap();
        assert!(ask(port).await.starts_with("HTTP/1.1 200"));
    }

    #[test]
    fn a_port_alone_is_of_this_machine() {
        let shown = |text: &str| parse_address(text).map(|address| address.to_string());
        assert_eq!(shown("8080").unwrap(), "127.0.0.1:8080");
        assert_eq!(shown("0.0.0.0:8080").unwrap(), "0.0.0.0:8080");
        assert_eq!(shown("[::]:8080").unwrap(), "[::]:8080");
        for text in ["", "x", ":8080", "70000", "host:8080", "0.0.0.0"] {
            assert!(shown(text).unwrap_err().contains("give a port"), "{text}");
        }
    }

    /// Silent connections keep their slots for a bounded time, and their number is bounded.
    #[tokio::test]
    async fn probes_that_say_nothing_are_bounded() {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let at = free.local_addr().unwrap();
        drop(free);
        listen(at, Arc::new(StepWatchdog::new(Duration::from_secs(1))))
            .await
            .unwrap();
        let mut silent = Vec::new();
        for _ in 0..PROBES_MAX {
            silent.push(TcpStream::connect(at).await.unwrap());
        }
        let mut more = TcpStream::connect(at).await.unwrap();
        let mut byte = [0];
        let read = tokio::time::timeout(PROBE_MAX / 2, more.read(&mut byte)).await;
        assert!(!matches!(read.expect("it is let go at once"), Ok(1)));
        tokio::time::sleep(PROBE_MAX + Duration::from_millis(500)).await;
        assert!(ask(at.port()).await.starts_with("HTTP/1.1 200"));
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
