//! Replaces small files in one step: a reader finds the old file or the new one, after a loss of power, too.

use std::fs::{self, File};
use std::io::{Result, Write};
use std::path::Path;

/// Writes a file beside `path` and moves it there.
///
/// # Errors
/// It cannot be written, or not be moved.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    let written = File::create(&temporary).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    let result = written.and_then(|()| fs::rename(&temporary, path));
    if result.is_err() {
        // The original error is reported; a failed cleanup is ignored.
        let _ = fs::remove_file(&temporary);
    }
    result
}

/// Waits until the folder of the file `path` is on the disk, and with it that the file has this name.
///
/// # Errors
/// The folder cannot be opened, or the disk fails.
pub(crate) fn sync_folder_of(path: &Path) -> Result<()> {
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    File::open(folder)?.sync_all()
}
