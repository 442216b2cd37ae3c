//! Maps files into memory.

#![expect(unsafe_code, reason = "maps files into memory")]

use std::io::Result;
use std::path::Path;

use memmap2::Mmap;

/// A regular file's bytes.
///
/// # Errors
/// The file is none that can be opened and mapped.
pub(crate) fn map(path: &Path) -> Result<Mmap> {
    let (file, _) = crate::regular::open(path)?;
    // SAFETY: the mapping is read-only. It lives only while a model's files are checked against each
    // other or copied to the device. Truncating the file in that time ends this process with SIGBUS, as
    // with any program that maps it. Any other change to the file can only change what is read, since
    // all offsets are checked against the mapping's length.
    unsafe { Mmap::map(&file) }
}
