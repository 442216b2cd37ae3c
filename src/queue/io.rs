//! A thread for requests to brokers. It has its own runtime, so that tasks which compute on every
//! core cannot delay it.

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

use super::QueueError;

/// Runs futures on its own thread until it is dropped.
pub(crate) struct IoThread {
    handle: Handle,
    /// Dropping it ends the thread.
    _stop: oneshot::Sender<()>,
}

impl IoThread {
    /// `name` is the thread's name, at most 15 bytes.
    pub(super) fn start(name: &str) -> Result<IoThread, QueueError> {
        let failed = |error: std::io::Error| QueueError::Unavailable {
            why: format!("cannot start a thread for the queue: {error}"),
        };
        let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                // Returns when the sender is dropped.
                let _ = runtime.block_on(stopped);
                runtime.shutdown_background();
            })
            .map_err(failed)?;
        Ok(IoThread { handle, _stop: stop })
    }

    pub(super) fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        self.handle.spawn(future);
    }

    /// Runs the future on the I/O thread and waits for its result.
    pub(super) async fn run<R: Send + 'static>(
        &self,
        future: impl Future<Output = Result<R, QueueError>> + Send + 'static,
    ) -> Result<R, QueueError> {
        self.handle
            .spawn(future)
            .await
            .map_err(|error| QueueError::Unavailable {
                why: format!("the queue's thread ended: {error}"),
            })?
    }
}
