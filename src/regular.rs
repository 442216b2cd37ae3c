//! Reads files that a stranger may have placed. A pipe in place of a file is rejected, because
//! opening it would wait for a writer. A file larger than its limit is not read.

use std::collections::BTreeSet;
use std::fs::{File, FileType};
use std::io::{Error, ErrorKind, Read, Result};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Maximum number of entries read from a folder.
const ENTRIES_MAX: usize = 10_000;
/// Number of bytes that [`first_bytes`] reads.
const FIRST_BYTES: u64 = 256;

/// Opens a regular file, or a link to one. Returns the file and its size.
///
/// # Errors
/// The path leads to something else, or cannot be opened.
pub(crate) fn open(path: &Path) -> Result<(File, u64)> {
    // Checked before opening, because opening a device may already have an effect.
    check_is_regular(std::fs::metadata(path)?.file_type())?;
    let file = File::options()
        .read(true)
        // Opening must not wait for a writer if a pipe has replaced the file since the check.
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    let meta = file.metadata()?;
    check_is_regular(meta.file_type())?;
    Ok((file, meta.len()))
}

/// Reads a regular file of at most `max` bytes. A file that this process got as an open descriptor
/// (`/dev/stdin`, and `/dev/fd/63` for `<(…)`) may be a pipe.
///
/// # Errors
/// As for [`open`], or the file is larger than `max`.
pub(crate) fn read(path: &Path, max: u64) -> Result<Vec<u8>> {
    let (file, size) = if is_inherited_descriptor(path) {
        (File::open(path)?, 0)
    } else {
        open(path)?
    };
    if size > max {
        return Err(too_large(format!("it has {size} bytes"), max));
    }
    read_at_most(file, max)
}

/// Reads at most `max` bytes, because a pipe has no size to check.
fn read_at_most(file: File, max: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max {
        Err(too_large("it is larger".into(), max))
    } else {
        Ok(bytes)
    }
}

/// Reads a file as [`read`] does, and returns text.
///
/// # Errors
/// As for [`read`], or the file is not UTF-8.
pub(crate) fn read_text(path: &Path, max: u64) -> Result<String> {
    String::from_utf8(read(path, max)?).map_err(|_| Error::new(ErrorKind::InvalidData, "it is not UTF-8 text"))
}

/// The first bytes of a file, from which its format is detected. Empty if the file cannot be read.
pub(crate) fn first_bytes(path: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Ok((file, _)) = open(path) {
        // After an error, the bytes read so far are used as they are.
        let _ = file.take(FIRST_BYTES).read_to_end(&mut bytes);
    }
    bytes
}

/// The names of a folder's entries, at most [`ENTRIES_MAX`].
///
/// # Errors
/// The folder cannot be listed.
pub(crate) fn entry_names(folder: &Path) -> Result<BTreeSet<String>> {
    let entries = std::fs::read_dir(folder)?.take(ENTRIES_MAX);
    entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect()
}

fn too_large(what: String, max: u64) -> Error {
    Error::new(
        ErrorKind::FileTooLarge,
        format!("{what}, and such a file may have at most {max} bytes"),
    )
}

fn is_inherited_descriptor(path: &Path) -> bool {
    ["/dev/stdin", "/dev/fd", "/proc/self/fd"]
        .iter()
        .any(|prefix| path.starts_with(prefix))
}

/// Refuses a file that is not regular, and names its type.
///
/// # Errors
/// The file is of another type.
pub(crate) fn check_is_regular(file_type: FileType) -> Result<()> {
    let what = match file_type {
        file_type if file_type.is_file() => return Ok(()),
        file_type if file_type.is_dir() => "a folder",
        file_type if file_type.is_fifo() => "a pipe",
        file_type if file_type.is_socket() => "a socket",
        _ => "a device",
    };
    Err(Error::new(
        ErrorKind::InvalidInput,
        format!("it is {what}, and must be a regular file"),
    ))
}

/// Creates a pipe without a writer: opening it for reading blocks.
#[cfg(test)]
pub(crate) fn make_pipe(path: &Path) {
    let status = std::process::Command::new("mkfifo").arg(path).status();
    assert!(status.is_ok_and(|status| status.success()), "{}", path.display());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_are_read_and_only_up_to_their_limit() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("file"), "12345").unwrap();
        std::os::unix::fs::symlink(at("file"), at("link")).unwrap();
        std::os::unix::fs::symlink(at("nothing"), at("dangling")).unwrap();
        std::fs::create_dir(at("folder")).unwrap();
        make_pipe(&at("pipe"));
        std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        File::create(at("sparse")).unwrap().set_len(1 << 40).unwrap();
        for name in ["file", "link"] {
            assert_eq!(read_text(&at(name), 5).unwrap(), "12345", "{name}");
            let error = read(&at(name), 4).unwrap_err().to_string();
            assert!(error.contains("5 bytes") && error.contains("at most 4"), "{error}");
        }
        for (name, why) in [
            ("folder", "a folder"),
            ("pipe", "a pipe"),
            ("socket", "a socket"),
            ("sparse", "1099511627776 bytes"),
        ] {
            let error = read(&at(name), 1 << 20).unwrap_err().to_string();
            assert!(error.contains(why), "{name}: {error}");
        }
        let error = read(Path::new("/dev/zero"), 10).unwrap_err().to_string();
        assert!(error.contains("a device"), "{error}");
        assert_eq!(read(&at("dangling"), 10).unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn files_without_a_size_are_read_up_to_the_limit() {
        let error = read_at_most(File::open("/dev/zero").unwrap(), 1000).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::FileTooLarge);
    }
}
