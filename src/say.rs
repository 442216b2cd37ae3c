//! Writes lines to stdout and stderr. This crate defines its own `println!` and `eprintln!`, because
//! the standard macros panic once the reader has closed the pipe, as in
//! `gristmill status … | head -1`. Here unread output is dropped, the command finishes its work, and
//! then it reports how its output ended ([`closed`]). Rows, names and errors are escaped
//! ([`printable`]).
//!
//! See docs/decisions/031-a-closed-stdout-ends-quietly.md.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};
use std::sync::OnceLock;

use crate::printable::printable;

/// The error that closed stdout.
static STDOUT: OnceLock<ErrorKind> = OnceLock::new();

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
    // A failure is ignored, because stderr is the last place to report one.
    let _ = writeln!(std::io::stderr().lock(), "{}", printable(line));
}

/// The error that closed stdout, if any: `BrokenPipe` if its reader has left.
pub(crate) fn closed() -> Option<ErrorKind> {
    STDOUT.get().copied()
}
