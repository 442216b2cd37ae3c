//! Signs of life for whoever restarts workers that hang: a file that is touched, or a port that answers.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::worker::pulse::Pulse;

const TOUCH_EVERY: Duration = Duration::from_secs(1);
/// A probe that says nothing for so long is let go.
const PROBE_MAX: Duration = Duration::from_secs(5);

/// Touches `path` each second while `pulse` is alive.
///
/// # Errors
/// The file cannot be written at all.
pub fn touch(path: PathBuf, pulse: Arc<Pulse>) -> std::io::Result<()> {
    std::fs::write(&path, b"")?;
    tokio::spawn(async move {
        let mut ticks = tokio::time::interval(TOUCH_EVERY);
        loop {
            ticks.tick().await;
            if pulse.is_alive()
                && let Err(error) = tokio::fs::write(&path, b"").await
            {
                tracing::warn!("cannot touch `{}`: {error}", path.display());
            }
        }
    });
    Ok(())
}

/// Answers HTTP requests at `port` of every address: 200 while `pulse` is alive, 503 when it is not.
///
/// # Errors
/// The port cannot be had.
pub async fn listen(port: u16, pulse: Arc<Pulse>) -> std::io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).await?;
    tokio::spawn(async move {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let pulse = pulse.clone();
                    tokio::spawn(async move {
                        // A probe that goes away early has its answer all the same: none.
                        let _ = tokio::time::timeout(PROBE_MAX, answer(stream, &pulse)).await;
                    });
                }
                // Out of file descriptors, say: those in use come free.
                Err(_) => tokio::time::sleep(TOUCH_EVERY).await,
            }
        }
    });
    Ok(())
}

async fn answer(mut stream: TcpStream, pulse: &Pulse) -> std::io::Result<()> {
    // Whatever is asked: the answer is the same.
    let mut request = [0; 1024];
    let _length = stream.read(&mut request).await?;
    let (status, body) = match pulse.is_alive() {
        true => ("200 OK", "alive\n"),
        false => ("503 Service Unavailable", "the device hangs\n"),
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
        let pulse = Arc::new(Pulse::new(Duration::from_millis(50)));
        listen(port, pulse.clone()).await.unwrap();
        assert!(ask(port).await.starts_with("HTTP/1.1 200"));
        let hanging = std::thread::spawn(move || pulse.step(|| std::thread::sleep(Duration::from_millis(800))));
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(ask(port).await.starts_with("HTTP/1.1 503"));
        hanging.join().unwrap();
        assert!(ask(port).await.starts_with("HTTP/1.1 200"));
    }

    #[tokio::test]
    async fn the_file_goes_stale_in_a_hang_and_at_no_other_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("alive");
        let pulse = Arc::new(Pulse::new(Duration::from_millis(50)));
        touch(path.clone(), pulse.clone()).unwrap();
        let touched = || std::fs::metadata(&path).unwrap().modified().unwrap();
        let wait = || tokio::time::sleep(TOUCH_EVERY + TOUCH_EVERY / 2);
        let first = touched();
        wait().await;
        assert!(touched() > first, "a worker that waits is alive");
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let hanging = std::thread::spawn(move || pulse.step(|| ended.recv()));
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
        touch(path.clone(), Arc::new(Pulse::new(Duration::from_secs(1)))).unwrap();
        assert!(path.exists());
        assert!(
            touch(
                dir.path().join("no/alive"),
                Arc::new(Pulse::new(Duration::from_secs(1)))
            )
            .is_err()
        );
    }
}
