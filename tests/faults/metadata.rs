//! The metadata service of a cloud, as spot machines see it: it refuses who does not ask as the cloud wants to be asked.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const TOKEN: &str = "token-of-this-machine";

/// Runs until the test's process ends.
pub(super) struct Metadata {
    /// `http://host:port`.
    pub url: String,
    noticed: Arc<AtomicBool>,
}

impl Metadata {
    pub(super) fn start() -> Metadata {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let url = format!(
            "http://{}",
            listener.local_addr().expect("a bound socket has an address")
        );
        let noticed = Arc::new(AtomicBool::new(false));
        let notice = noticed.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                // Whoever hangs up has no answer; the next one is served.
                let _ = stream.and_then(|stream| serve(stream, notice.load(Ordering::SeqCst)));
            }
        });
        Metadata { url, noticed }
    }

    /// From now on it says that the machine is taken away.
    pub(super) fn take_away(&self) {
        self.noticed.store(true, Ordering::SeqCst);
    }
}

fn serve(mut stream: TcpStream, notice: bool) -> std::io::Result<()> {
    let mut request = Vec::new();
    let mut bytes = [0; 1024];
    while !request.ends_with(b"\r\n\r\n") {
        match stream.read(&mut bytes)? {
            0 => return Ok(()),
            length => request.extend_from_slice(&bytes[..length]),
        }
    }
    let (status, body) = answer(&String::from_utf8_lossy(&request).to_ascii_lowercase(), notice);
    let length = body.len();
    stream.write_all(
        format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}").as_bytes(),
    )
}

/// To a request in small letters.
fn answer(request: &str, notice: bool) -> (&'static str, &'static str) {
    let asks = |line: &str| request.starts_with(&format!("{line} http/1.1\r\n"));
    let has = |header: &str| request.contains(&format!("\r\n{header}\r\n"));
    if asks("put /latest/api/token") {
        return if request.contains("\r\nx-aws-ec2-metadata-token-ttl-seconds: ") {
            ("200 OK", TOKEN)
        } else {
            ("400 Bad Request", "")
        };
    }
    if asks("get /latest/meta-data/spot/instance-action") {
        return match (has(&format!("x-aws-ec2-metadata-token: {TOKEN}")), notice) {
            (false, _) => ("401 Unauthorized", ""),
            (true, false) => ("404 Not Found", "404 - Not Found"),
            (true, true) => ("200 OK", r#"{"action": "terminate", "time": "2026-11-21T12:00:00Z"}"#),
        };
    }
    if asks("get /computemetadata/v1/instance/preempted") {
        return match (has("metadata-flavor: google"), notice) {
            (false, _) => ("403 Forbidden", ""),
            (true, false) => ("200 OK", "FALSE\n"),
            (true, true) => ("200 OK", "TRUE\n"),
        };
    }
    ("404 Not Found", "")
}
