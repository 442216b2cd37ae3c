//! The pause after each message that was put at the end of its queue: short at first, to reach the
//! messages behind it soon.

use std::time::Duration;

/// Number of messages with the short pause: the length of a long queue.
const FAST_MAX: u32 = 4096;
const FAST: Duration = Duration::from_millis(4);
/// Longer, to spare the broker, because the queue seems to hold no other messages.
const SLOW: Duration = Duration::from_millis(250);

/// See the module's description. Create a new one after a message that was not put back.
#[derive(Debug, Default)]
pub struct RequeuePace {
    messages: u32,
}

impl RequeuePace {
    /// Sleeps after a message.
    pub async fn pause(&mut self) {
        self.messages = self.messages.saturating_add(1);
        tokio::time::sleep(if self.messages < FAST_MAX { FAST } else { SLOW }).await;
    }
}
