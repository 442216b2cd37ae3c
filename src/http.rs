//! An HTTP/1.1 server for an axum router: limits the connections, and the time that a client may
//! take to send a request's headers. What a refused request still sends is read and dropped.

use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, BodyDataStream, HttpBody};
use axum::extract::Request;
use axum::http::header::EXPECT;
use axum::middleware;
use bytes::Bytes;
use futures::{Stream, StreamExt};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

/// Pause after a failed accept, for example because no file descriptor is free.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);
/// Maximum size of a request's line and headers.
const HEADER_BYTES_MAX: usize = 64 << 10;
/// Maximum time for which the rest of a body is read that its handler left unread, and maximum time
/// between two of its pieces.
const REST_SECONDS_MAX: Duration = Duration::from_secs(30);
const REST_PAUSE_MAX: Duration = Duration::from_secs(2);

/// Limits of a server.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HttpLimits {
    /// Maximum number of open connections. Further ones wait until another one ends.
    pub connections: usize,
    /// Maximum time between two requests of a connection, and for the headers of a request.
    pub header_timeout: Duration,
    /// Maximum time that running requests may take after the server was told to stop.
    pub drain_timeout: Duration,
}

/// Parses an address to listen at: `PORT` on loopback, or `ADDRESS:PORT`.
///
/// # Errors
/// The text is neither.
pub(crate) fn parse_address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(port) = text.parse::<u16>() {
        return Ok((Ipv4Addr::LOCALHOST, port).into());
    }
    text.parse().map_err(|_| {
        "give a port (`8080`: for clients on this machine alone) or an address and a port (`0.0.0.0:8080`, `[::]:8080`)"
            .into()
    })
}

/// Serves `router` until `stop` completes and the running requests have ended.
pub(crate) async fn serve(listener: TcpListener, router: Router, limits: HttpLimits, stop: impl Future<Output = ()>) {
    let router = router.layer(middleware::map_request(read_whole));
    let slots = Arc::new(Semaphore::new(limits.connections));
    let graceful = GracefulShutdown::new();
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_timeout)
        .max_buf_size(HEADER_BYTES_MAX);
    let mut stop = std::pin::pin!(stop);
    loop {
        let accepted = async {
            // The semaphore is never closed.
            let slot = slots.clone().acquire_owned().await.ok();
            (listener.accept().await, slot)
        };
        let (accepted, slot) = tokio::select! {
            accepted = accepted => accepted,
            () = &mut stop => break,
        };
        let Ok((stream, _)) = accepted else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        // Small responses must not wait for the acknowledgement of earlier ones.
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(router.clone());
        let connection = graceful.watch(builder.serve_connection(TokioIo::new(stream), service));
        tokio::spawn(async move {
            // A client that disconnects early gets no response, and nobody else is concerned.
            let _ = connection.await;
            drop(slot);
        });
    }
    drop(listener);
    let _ = tokio::time::timeout(limits.drain_timeout, graceful.shutdown()).await;
}

/// A body whose rest is read and dropped where its handler ends before the body does. Otherwise the
/// server would close the connection while the client still sends, and the client's system would
/// answer that with an error before the client reads why its request was refused.
struct WholeBody {
    /// `None`: it has ended.
    pieces: Option<BodyDataStream>,
    /// Whether the client sends the body unasked, or has been asked for it.
    is_sent: bool,
}

async fn read_whole(request: Request) -> Request {
    let is_sent = !request.headers().contains_key(EXPECT);
    request.map(|body| {
        if body.is_end_stream() {
            return body;
        }
        let pieces = Some(body.into_data_stream());
        Body::from_stream(WholeBody { pieces, is_sent })
    })
}

impl Stream for WholeBody {
    type Item = Result<Bytes, axum::Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.is_sent = true;
        let Some(pieces) = &mut self.pieces else {
            return Poll::Ready(None);
        };
        let polled = pieces.poll_next_unpin(context);
        if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
            self.pieces = None;
        }
        polled
    }
}

impl Drop for WholeBody {
    fn drop(&mut self) {
        if let Some(mut rest) = self.pieces.take()
            && self.is_sent
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(tokio::time::timeout(REST_SECONDS_MAX, async move {
                while let Ok(Some(Ok(_))) = tokio::time::timeout(REST_PAUSE_MAX, rest.next()).await {}
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use std::time::Instant;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio::sync::oneshot;

    async fn server(connections: usize) -> (SocketAddr, oneshot::Sender<()>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/", get(|| async { "here" }).post(|| async { "refused" }));
        let limits = HttpLimits {
            connections,
            header_timeout: Duration::from_millis(300),
            drain_timeout: Duration::from_secs(1),
        };
        let (stop, stopped) = oneshot::channel::<()>();
        tokio::spawn(serve(listener, router, limits, async move {
            let _ = stopped.await;
        }));
        (address, stop)
    }

    async fn ask(address: SocketAddr) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = b"GET / HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n";
        stream.write_all(request).await.unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        response
    }

    #[tokio::test]
    async fn silent_connections_are_closed_and_make_room() {
        let (address, _stop) = server(2).await;
        let mut silent = Vec::new();
        for _ in 0..6 {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        let asked = Instant::now();
        let response = tokio::time::timeout(Duration::from_secs(5), ask(address)).await;
        assert!(response.unwrap().starts_with("HTTP/1.1 200 OK"));
        // Two at a time are let go.
        assert!(asked.elapsed() >= Duration::from_millis(600), "{:?}", asked.elapsed());
        let mut first = silent.remove(0);
        let mut rest = Vec::new();
        first.read_to_end(&mut rest).await.unwrap();
    }

    /// Sends the head of a request whose handler does not read the body.
    async fn post(address: SocketAddr, fields: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let head = format!("POST / HTTP/1.1\r\nhost: h\r\nconnection: close\r\n{fields}\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        stream
    }

    #[tokio::test]
    async fn who_still_sends_learns_why_a_request_is_refused() {
        let (address, _stop) = server(2).await;
        let bytes = vec![b'x'; 64 << 20];
        let mut stream = post(address, &format!("content-length: {}\r\n", bytes.len())).await;
        stream.write_all(&bytes).await.unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        assert!(response.ends_with("refused"), "{response}");
    }

    #[tokio::test]
    async fn a_refused_body_that_stays_away_is_not_waited_for() {
        let (address, _stop) = server(2).await;
        for fields in ["content-length: 9\r\n", "content-length: 9\r\nexpect: 100-continue\r\n"] {
            let mut stream = post(address, fields).await;
            let mut response = String::new();
            let read = stream.read_to_string(&mut response);
            tokio::time::timeout(Duration::from_secs(20), read)
                .await
                .unwrap()
                .unwrap();
            assert!(response.starts_with("HTTP/1.1 200 OK"), "not asked for: {response}");
            assert!(response.ends_with("refused"), "{response}");
        }
    }

    #[tokio::test]
    async fn a_stopped_server_accepts_nothing_more() {
        let (address, stop) = server(8).await;
        assert!(ask(address).await.ends_with("here"));
        drop(stop);
        for _ in 0..100 {
            if TcpStream::connect(address).await.is_err() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("the port is still open");
    }

    #[test]
    fn a_port_alone_is_on_loopback() {
        let shown = |text: &str| parse_address(text).map(|address| address.to_string());
        assert_eq!(shown("8080").unwrap(), "127.0.0.1:8080");
        assert_eq!(shown("0.0.0.0:8080").unwrap(), "0.0.0.0:8080");
        assert_eq!(shown("[::]:8080").unwrap(), "[::]:8080");
        for text in ["", "x", ":8080", "70000", "host:8080", "0.0.0.0"] {
            assert!(shown(text).unwrap_err().contains("give a port"), "{text}");
        }
    }
}
