//! Fault injection for the fault tests (feature `faults`): never for real work.
//!
//! [`points`] aborts, fails or pauses the process at marked places. [`switches`] break the
//! guarantee on purpose, so that tests prove that they would notice. [`known`] is a device that
//! computes a known function of each row. [`ids`] derives ids from a seed. Environment variables
//! arm the faults for one process, so that one of several workers can be faulty:
//!
//! | variable | holds |
//! |---|---|
//! | `GRISTMILL_FAILPOINTS` | `NAME=ACTION@N;…`: at the N-th pass of a point `abort`, `error` or `pause:MILLISECONDS` |
//! | `GRISTMILL_FAULT_SWITCHES` | switches, separated by commas (see [`switches::SWITCHES`]) |
//! | `GRISTMILL_KNOWN_DEVICE` | `1`: the worker computes the known function, not the model |
//! | `GRISTMILL_KNOWN_MS_PER_ROW` | milliseconds per row of the known device, by default 1; 0 answers at once |
//! | `GRISTMILL_KNOWN_COMPLETION_TOKENS` | completion tokens per row, by default 4 |
//! | `GRISTMILL_KNOWN_ERRORS_BELOW` | a token id: prompts whose first id is smaller fail, as on a broken device |
//! | `GRISTMILL_STEP_MAX_MS` | milliseconds after which a device step counts as hung, by default ten minutes |
//! | `GRISTMILL_ROOM_BYTES` | maximum bytes of carried columns that the worker holds |
//! | `GRISTMILL_ABORT_AT_READING` | a row: the process that has read it aborts |
//! | `GRISTMILL_KNOWN_TRACE` | a file to which each computed row is appended, as a line `JOB,ROW` |

pub mod ids;
pub mod known;
pub mod points;
pub mod switches;

pub use known::KnownDevice;
pub use points::{Injected, point, point_blocking};
pub use switches::is_switched_on;

/// The value of `GRISTMILL_STEP_MAX_MS`.
pub fn step_timeout() -> Option<std::time::Duration> {
    parse_variable("GRISTMILL_STEP_MAX_MS", "number of milliseconds").map(std::time::Duration::from_millis)
}

/// The value of `GRISTMILL_ROOM_BYTES`.
pub fn carried_bytes_max() -> Option<usize> {
    parse_variable("GRISTMILL_ROOM_BYTES", "number of bytes")
}

fn parse_variable<T: std::str::FromStr>(variable: &str, what: &str) -> Option<T> {
    let text = std::env::var(variable).ok()?;
    let value = text.parse();
    Some(value.unwrap_or_else(|_| refuse(variable, &format!("`{text}` is no {what}"))))
}

/// Aborts if `GRISTMILL_ABORT_AT_READING` names a row that was just read.
pub fn abort_at_reading(is_read: impl Fn(u64) -> bool) {
    if let Some(row) = parse_variable("GRISTMILL_ABORT_AT_READING", "row").filter(|row| is_read(*row)) {
        eprintln!("gristmill: row {row} was read: Abort");
        std::process::abort();
    }
}

/// Reports an invalid variable on stderr and ends the process: a fault test whose fault is not
/// armed would prove nothing.
fn refuse(variable: &str, why: &str) -> ! {
    eprintln!("gristmill: {variable}: {why}");
    std::process::exit(2);
}
