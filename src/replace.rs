//! Replaces small files in one step: a reader finds the old file or the new one.

use std::fs;
use std::io::Result;
use std::path::Path;

/// Writes a file beside `path` and moves it there.
///
/// # Errors
/// It cannot be written, or not be moved.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    let result = fs::write(&temporary, bytes).and_then(|()| fs::rename(&temporary, path));
    if result.is_err() {
        // The original error is reported; a failed cleanup is ignored.
        let _ = fs::remove_file(&temporary);
    }
    result
}
