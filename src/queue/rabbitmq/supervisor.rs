//! Runs session after session: reopens connection, channel and queue with backoff until the queue
//! is closed.

use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::session::{Consumer, SessionEnd};
use crate::queue::QueueError;
use crate::queue::outage::Outage;

const BACKOFF_MIN: Duration = Duration::from_millis(200);
const BACKOFF_MAX: Duration = Duration::from_secs(10);
/// A session that lasted at least this long resets the backoff.
const GOOD_SESSION: Duration = Duration::from_secs(10);
const PROGRESS_POLL: Duration = Duration::from_millis(100);

/// Runs until the queue is closed. `opened` gets the result of the first attempt, once.
pub(super) async fn run(mut consumer: Consumer, opened: oneshot::Sender<Result<(), QueueError>>) {
    let mut opened = Some(opened);
    let mut outage = Outage::new(&consumer.url);
    let mut backoff = BACKOFF_MIN;
    for number in 0.. {
        let began = Instant::now();
        let end = match consumer.open_session(number).await {
            Ok(session) => {
                outage.report_up();
                consumer.tracker.set_denied(None);
                consumer.tracker.set_attached(true);
                // The send fails only if the caller has given up; the caller then closes the queue.
                let _ = opened.take().map(|opened| opened.send(Ok(())));
                consumer.run_session(session).await
            }
            Err(error) => {
                if let Some(opened) = opened.take() {
                    if !error.is_transient() {
                        let _ = opened.send(Err(error));
                        return;
                    }
                    let _ = opened.send(Ok(()));
                }
                SessionEnd::Broken(error)
            }
        };
        // A quiet channel is replaced at once, so the consumer stays attached.
        if !matches!(end, SessionEnd::Idle) {
            consumer.tracker.set_attached(false);
        }
        match end {
            SessionEnd::Closed => return,
            SessionEnd::Stuck { progress_count } => {
                wait_for_progress(&consumer, progress_count).await;
                continue;
            }
            SessionEnd::Idle => {
                tracing::debug!(queue = %consumer.url, "{}: nothing has come for long; opening another channel", consumer.url);
                continue;
            }
            SessionEnd::ChannelClosed { why } => {
                tracing::warn!(queue = %consumer.url, "{}: the channel was closed ({why}); opening another", consumer.url);
            }
            SessionEnd::Broken(QueueError::Unavailable { why } | QueueError::UnknownHost { why }) => {
                outage.report_down(&why);
            }
            SessionEnd::Broken(error) => {
                let why = match error {
                    QueueError::Denied { why } | QueueError::Settings { why } => why,
                    other => other.to_string(),
                };
                consumer.tracker.set_denied(Some(why));
            }
        }
        if began.elapsed() >= GOOD_SESSION {
            backoff = BACKOFF_MIN;
        }
        if consumer.tracker.is_closing() || closed_within(&consumer, backoff).await {
            return;
        }
        backoff = (backoff * 2).min(BACKOFF_MAX);
    }
}

async fn closed_within(consumer: &Consumer, time: Duration) -> bool {
    tokio::time::timeout(time, consumer.tracker.closed_notify.notified())
        .await
        .is_ok()
}

/// Waits until the worker makes progress. It gets no messages meanwhile.
async fn wait_for_progress(consumer: &Consumer, progress_count: u64) {
    while consumer.tracker.progress_count() == progress_count && !consumer.tracker.is_closing() {
        tokio::time::sleep(PROGRESS_POLL).await;
    }
    tracing::info!(queue = %consumer.url, "{}: the worker makes progress again; consuming again", consumer.url);
}
