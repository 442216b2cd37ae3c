//! What fault tests put into a build of their own (feature `faults`): never for real work.
//!
//! [`points`] ends, fails or holds up the process at marked places; [`switches`] break the guarantee on purpose, so that
//! tests can show that they would notice; [`known`] is a device that computes a known function of each row; [`ids`] makes
//! ids follow from a seed.
//! Everything is armed by the environment of one process, so that one worker of several can be the faulty one:
//!
//! | variable | holds |
//! |---|---|
//! | `GRISTMILL_FAILPOINTS` | `NAME=ACTION@N;…`: at the N-th pass of a point `abort`, `error` or `pause:MILLISECONDS` |
//! | `GRISTMILL_FAULT_SWITCHES` | switches, separated by commas (see [`switches::SWITCHES`]) |
//! | `GRISTMILL_KNOWN_DEVICE` | `1`: the worker computes the known function, not the model |
//! | `GRISTMILL_KNOWN_MS_PER_ROW` | milliseconds a row takes there, 1 unless given; 0 answers at once |
//! | `GRISTMILL_KNOWN_COMPLETION_TOKENS` | completion tokens a row, 4 unless given |
//! | `GRISTMILL_KNOWN_ERRORS_BELOW` | an id: prompts that begin with a smaller one fail, as on a device out of order |
//! | `GRISTMILL_STEP_MAX_MS` | milliseconds after which a step of the device hangs, in place of ten minutes |
//! | `GRISTMILL_ROOM_BYTES` | most bytes of carried columns in the worker's hands |
//! | `GRISTMILL_ABORT_AT_READING` | a row: whoever has read it aborts |
//! | `GRISTMILL_KNOWN_TRACE` | a file to which each computed row is appended, as a line `JOB,ROW` |

pub mod ids;
pub mod known;
pub mod points;
pub mod switches;

pub use known::KnownDevice;
pub use points::{Injected, point, point_blocking};
pub use switches::switch;

/// What `GRISTMILL_STEP_MAX_MS` says.
pub fn step_max() -> Option<std::time::Duration> {
    parsed("GRISTMILL_STEP_MAX_MS", "number of milliseconds").map(std::time::Duration::from_millis)
}

/// What `GRISTMILL_ROOM_BYTES` says.
pub fn room_bytes() -> Option<usize> {
    parsed("GRISTMILL_ROOM_BYTES", "number of bytes")
}

fn parsed<T: std::str::FromStr>(variable: &str, what: &str) -> Option<T> {
    let text = std::env::var(variable).ok()?;
    let value = text.parse();
    Some(value.unwrap_or_else(|_| refuse(variable, &format!("`{text}` is no {what}"))))
}

/// Aborts where `GRISTMILL_ABORT_AT_READING` names a row that was just read.
pub fn abort_at_reading(is_read: impl Fn(u64) -> bool) {
    if let Some(row) = parsed("GRISTMILL_ABORT_AT_READING", "row").filter(|row| is_read(*row)) {
        eprintln!("gristmill: row {row} was read: Abort");
        std::process::abort();
    }
}

/// Says on stderr what is wrong with the environment and ends the process: a fault run that is not armed as its author
/// believes would show nothing.
fn refuse(variable: &str, why: &str) -> ! {
    eprintln!("gristmill: {variable}: {why}");
    std::process::exit(2);
}
