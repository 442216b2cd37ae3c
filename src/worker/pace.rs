//! How fast messages that are for later go to the end of their queue: fast at first, to reach what lies behind them.

use std::time::Duration;

/// As many as a long queue holds.
const FAST_MAX: u32 = 4096;
const FAST: Duration = Duration::from_millis(4);
/// Nothing else seems to lie there: the broker is left in peace.
const SLOW: Duration = Duration::from_millis(250);

/// See the module's description. To be made anew when something else has come.
#[derive(Debug, Default)]
pub struct Pace {
    messages: u32,
}

impl Pace {
    /// After each message.
    pub async fn rest(&mut self) {
        self.messages = self.messages.saturating_add(1);
        tokio::time::sleep(if self.messages < FAST_MAX { FAST } else { SLOW }).await;
    }
}
