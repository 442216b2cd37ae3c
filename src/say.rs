//! Writes lines to stdout and stderr. This crate defines its own `println!` and `eprintln!`, because
//! the standard macros panic once the reader has closed the pipe, as in
//! `gristmill status … | head -1`. Here unread output is dropped, the command finishes its work, and
//! then it reports how its output ended ([`closed`]). Rows, names and errors are escaped
//! ([`printable`]). Where the log is JSON, lines for stderr are events of the log.
//!
//! See docs/decisions/031-a-closed-stdout-ends-quietly.md.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::printable::printable;

/// The error that closed stdout.
static STDOUT: OnceLock<ErrorKind> = OnceLock::new();

/// Whether lines for stderr are events of the log.
static AS_EVENTS: AtomicBool = AtomicBool::new(false);

/// The target of such events.
pub(crate) const TARGET: &str = module_path!();

macro_rules! println {
    ($($arg:tt)*) => { $crate::say::to_stdout(format_args!($($arg)*)) };
}

macro_rules! eprintln {
    ($($arg:tt)*) => { $crate::say::to_stderr(format_args!($($arg)*)) };
}

pub(crate) fn to_stdout(line: Arguments<'_>) {
    if STDOUT.get().is_some() {
        return;
    }
    if let Err(error) = writeln!(std::io::stdout().lock(), "{}", printable(line)) {
        STDOUT.get_or_init(|| error.kind());
    }
}

pub(crate) fn to_stderr(line: Arguments<'_>) {
    if are_events() {
        return to_log(&line.to_string());
    }
    // A failure is ignored, because stderr is the last place to report one.
    let _ = writeln!(std::io::stderr().lock(), "{}", printable(line));
}

/// Prints the error that ends a command, or its work on one job.
pub(crate) fn error(line: Arguments<'_>) {
    if are_events() {
        tracing::error!("{line}");
    } else {
        to_stderr(format_args!("gristmill: {line}"));
    }
}

/// The prefixes of a line for people are what an event has as its target and level.
fn to_log(line: &str) {
    let line = line.strip_prefix("gristmill: ").unwrap_or(line);
    match line.strip_prefix("warning: ") {
        Some(warning) => tracing::warn!("{warning}"),
        None => tracing::info!("{line}"),
    }
}

/// From now on, lines for stderr are events of the log.
pub(crate) fn as_events() {
    AS_EVENTS.store(true, Relaxed);
}

/// Whether lines for stderr are events of the log.
pub(crate) fn are_events() -> bool {
    AS_EVENTS.load(Relaxed)
}

/// The error that closed stdout, if any: `BrokenPipe` if its reader has left.
pub(crate) fn closed() -> Option<ErrorKind> {
    STDOUT.get().copied()
}
