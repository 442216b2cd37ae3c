//! Writes lines to stdout and stderr. This crate defines its own `println!` and `eprintln!`,
//! because the standard macros panic once the reader has closed the pipe, as in `gristmill status …
//! | head -1`. Here unread output is dropped, the command finishes its work, and then it reports
//! how its output ended ([`stdout_error`]). Rows, names and errors are escaped ([`printable`]). If
//! the log is JSON, lines for stderr become events of the log.
//!
//! See docs/decisions/031-a-closed-stdout-ends-quietly.md.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::printable::printable;

/// The error that closed stdout.
static STDOUT_ERROR: OnceLock<ErrorKind> = OnceLock::new();

/// Whether lines for stderr become events of the log.
static STDERR_IS_LOGGED: AtomicBool = AtomicBool::new(false);

/// The target of these events.
pub(crate) const LOG_TARGET: &str = module_path!();

macro_rules! println {
    ($($arg:tt)*) => { $crate::say::to_stdout(format_args!($($arg)*)) };
}

macro_rules! eprintln {
    ($($arg:tt)*) => { $crate::say::to_stderr(format_args!($($arg)*)) };
}

pub(crate) fn to_stdout(line: Arguments<'_>) {
    if STDOUT_ERROR.get().is_some() {
        return;
    }
    if let Err(error) = writeln!(std::io::stdout().lock(), "{}", printable(line)) {
        STDOUT_ERROR.get_or_init(|| error.kind());
    }
}

pub(crate) fn to_stderr(line: Arguments<'_>) {
    if stderr_is_logged() {
        return log_line(&line.to_string());
    }
    // A failure is ignored, because stderr is the last place to report one.
    let _ = writeln!(std::io::stderr().lock(), "{}", printable(line));
}

/// Prints the error that ends a command, or its work on one job.
pub(crate) fn error(line: Arguments<'_>) {
    if stderr_is_logged() {
        tracing::error!("{line}");
    } else {
        to_stderr(format_args!("gristmill: {line}"));
    }
}

/// Logs a line for stderr without its prefixes `gristmill: ` and `warning: `, because an event has
/// a target and a level.
fn log_line(line: &str) {
    let line = line.strip_prefix("gristmill: ").unwrap_or(line);
    match line.strip_prefix("warning: ") {
        Some(warning) => tracing::warn!("{warning}"),
        None => tracing::info!("{line}"),
    }
}

/// From now on, lines for stderr become events of the log.
pub(crate) fn log_stderr() {
    STDERR_IS_LOGGED.store(true, Relaxed);
}

/// Whether lines for stderr become events of the log.
pub(crate) fn stderr_is_logged() -> bool {
    STDERR_IS_LOGGED.load(Relaxed)
}

/// The error that closed stdout, if any: `BrokenPipe` if its reader has left.
pub(crate) fn stdout_error() -> Option<ErrorKind> {
    STDOUT_ERROR.get().copied()
}
