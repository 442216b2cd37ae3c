//! How fast messages that are set for later go to the end of their queue: fast at first, to reach
//! the messages behind them.

use std::time::Duration;

/// Number of fast messages: the length of a long queue.
const FAST_MAX: u32 = 4096;
const FAST: Duration = Duration::from_millis(4);
/// No other message seems to be in the queue, so the broker is spared.
const SLOW: Duration = Duration::from_millis(250);

/// See the module's description. Create a new one when another kind of message has come.
#[derive(Debug, Default)]
pub struct Pace {
    messages: u32,
}

impl Pace {
    /// Sleeps after a message.
    pub async fn rest(&mut self) {
        self.messages = self.messages.saturating_add(1);
        tokio::time::sleep(if self.messages < FAST_MAX { FAST } else { SLOW }).await;
    }
}
