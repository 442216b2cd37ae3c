//! Lines on stdout and stderr. `println!` and `eprintln!` of this crate are these: the standard library's panic where nobody
//! reads any more, as in `gristmill status … | head -1`. Here what is not read is dropped, the command finishes its work, and
//! its end says what became of its output ([`closed`]). Rows, names and errors in them are escaped here ([`printable`]).
//!
//! See docs/decisions/031-a-closed-stdout-ends-quietly.md.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};
use std::sync::OnceLock;

use crate::printable::printable;

/// Why stdout took no more.
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
    // There is no place left to say that it failed.
    let _ = writeln!(std::io::stderr().lock(), "{}", printable(line));
}

/// Why stdout takes no more, if so: `BrokenPipe` where its reader has left.
pub(crate) fn closed() -> Option<ErrorKind> {
    STDOUT.get().copied()
}
