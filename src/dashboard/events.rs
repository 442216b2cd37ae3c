//! Server-sent events: a job, or the first page of a list, at once and at each change.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::error::ApiError;
use super::hub::Hub;
use super::source::Viewer;

/// A line that says nothing is sent this often, so that both sides see whether the other is there.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Time after which a stream ends, and its client begins another one. A client that takes nothing
/// any more occupies a place for no longer than that.
const LIFETIME: Duration = Duration::from_secs(3_600);
/// Time that a client may leave an event unread.
const SEND_WITHIN: Duration = Duration::from_secs(60);
/// Time after which a failed reading is repeated.
const AFTER_ERROR: Duration = Duration::from_secs(5);

/// What a listener listens to.
#[derive(Debug, Clone)]
enum Topic {
    Job(String),
    Jobs,
}

/// What a look at a topic has found.
struct Look {
    data: String,
    has_ended: bool,
}

impl Hub {
    /// The events of a job. Its first look decides the response's status.
    pub(super) async fn job_events(self: Arc<Hub>, viewer: Viewer, id: String) -> Result<Response, ApiError> {
        self.events(viewer, Topic::Job(id)).await
    }

    /// The events of the first page of the viewer's list.
    pub(super) async fn list_events(self: Arc<Hub>, viewer: Viewer) -> Result<Response, ApiError> {
        self.events(viewer, Topic::Jobs).await
    }

    async fn events(self: Arc<Hub>, viewer: Viewer, topic: Topic) -> Result<Response, ApiError> {
        let place = self
            .listeners
            .clone()
            .try_acquire_owned()
            .map_err(|_| ApiError::busy())?;
        let first = self.look(&viewer, &topic).await?;
        let (events, mut received) = mpsc::channel::<Bytes>(1);
        tokio::spawn(async move {
            let _place = place;
            tokio::select! {
                () = self.send_events(&viewer, &topic, first, &events) => {}
                () = events.closed() => {}
                () = self.wait_for_close() => {}
                () = tokio::time::sleep(LIFETIME) => {}
            }
        });
        let stream = futures::stream::poll_fn(move |context| received.poll_recv(context));
        let mut response = Response::new(Body::from_stream(futures::StreamExt::map(
            stream,
            Ok::<_, std::io::Error>,
        )));
        for (name, value) in [
            (header::CONTENT_TYPE, "text/event-stream"),
            (header::CACHE_CONTROL, "no-store"),
            // Proxies would hold events back.
            (HeaderName::from_static("x-accel-buffering"), "no"),
        ] {
            response.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        Ok(response)
    }

    /// Sends events until the job has ended or the client is gone.
    async fn send_events(&self, viewer: &Viewer, topic: &Topic, first: Look, events: &mpsc::Sender<Bytes>) {
        let mut look = first;
        let mut sent = String::new();
        let mut last_sent = Instant::now();
        loop {
            if look.data != sent {
                if !send(events, event(topic.event_name(), &look.data)).await {
                    return;
                }
                (sent, last_sent) = (look.data, Instant::now());
            }
            if look.has_ended {
                send(events, event("end", "{}")).await;
                return;
            }
            let mut pause = self.due_in(viewer, topic).await;
            look = loop {
                let next_sign = last_sent + KEEP_ALIVE;
                let due = Instant::now() + pause;
                tokio::time::sleep_until(due.min(next_sign)).await;
                if Instant::now() >= next_sign {
                    if !send(events, Bytes::from_static(b":\n\n")).await {
                        return;
                    }
                    last_sent = Instant::now();
                    pause = due.saturating_duration_since(last_sent);
                    continue;
                }
                match self.look(viewer, topic).await {
                    Ok(look) => break look,
                    // The store may be away for a while.
                    Err(error) if error.is_passing() => pause = AFTER_ERROR,
                    // The client's next request gets the reason.
                    Err(_) => return,
                }
            };
        }
    }

    async fn look(&self, viewer: &Viewer, topic: &Topic) -> Result<Look, ApiError> {
        let (value, has_ended) = match topic {
            Topic::Job(id) => {
                let job = self.job(viewer, id).await?;
                (serde_json::to_value(&job), job.has_ended())
            }
            Topic::Jobs => {
                let list = self.first_page(viewer).await?;
                (
                    serde_json::to_value(list.jobs()).map(|jobs| json!({"data": jobs})),
                    false,
                )
            }
        };
        let data = value.map_err(|error| ApiError::internal(format!("a job cannot be written: {error}")))?;
        Ok(Look {
            data: data.to_string(),
            has_ended,
        })
    }

    async fn due_in(&self, viewer: &Viewer, topic: &Topic) -> Duration {
        let due = match topic {
            Topic::Job(id) => self.job_due_in(viewer, id).await,
            Topic::Jobs => self.list_due_in(viewer).await,
        };
        // Never at once: what is known may just have become too old.
        due.max(Duration::from_millis(50))
    }
}

impl Topic {
    fn event_name(&self) -> &'static str {
        match self {
            Topic::Job(_) => "job",
            Topic::Jobs => "jobs",
        }
    }
}

/// Whether the client took it.
async fn send(events: &mpsc::Sender<Bytes>, bytes: Bytes) -> bool {
    matches!(tokio::time::timeout(SEND_WITHIN, events.send(bytes)).await, Ok(Ok(())))
}

/// An event. JSON has no line breaks.
fn event(name: &str, data: &str) -> Bytes {
    format!("event: {name}\ndata: {data}\n\n").into()
}
