//! Reads a header's numbers and texts, and never more than there is.

use super::Problem;

/// Maximum length of a text in bytes. Chat templates have some 20,000.
const TEXT_BYTES_MAX: u64 = 16 << 20;

/// A place in a file's bytes.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    pub at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Cursor<'a> {
        Cursor { bytes, at: 0 }
    }

    pub(super) fn take(&mut self, count: usize, what: &str) -> Result<&'a [u8], Problem> {
        let rest = &self.bytes[self.at..];
        let taken = rest.get(..count).ok_or_else(|| {
            Problem::Broken(format!(
                "it ends within {what} at byte {}: if its copy or download was cut off, fetch it again",
                self.at
            ))
        })?;
        self.at += count;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Problem> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N, what)?);
        Ok(array)
    }

    pub(super) fn u8(&mut self, what: &str) -> Result<u8, Problem> {
        Ok(self.array::<1>(what)?[0])
    }

    pub(super) fn u16(&mut self, what: &str) -> Result<u16, Problem> {
        self.array(what).map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, Problem> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, Problem> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A number of things of at least `size` bytes each, of which there are at most `max`.
    pub(super) fn count(&mut self, max: u64, size: usize, what: &str) -> Result<usize, Problem> {
        let count = self.u64(what)?;
        if count > max {
            return Err(Problem::Broken(format!("{what} is {count}, more than {max}")));
        }
        // It fits: the maximum is far below 2³².
        let count = count as usize;
        let left = self.bytes.len() - self.at;
        if count.saturating_mul(size) > left {
            return Err(Problem::Broken(format!(
                "{what} is {count}, more than the {left} bytes behind it can hold: if its copy or download was cut off, fetch it \
                 again"
            )));
        }
        Ok(count)
    }

    /// A text with its length before it.
    pub(super) fn text(&mut self, what: &str) -> Result<String, Problem> {
        let length = self.count(TEXT_BYTES_MAX, 1, &format!("the length of {what}"))?;
        let at = self.at;
        let bytes = self.take(length, what)?;
        let text = str::from_utf8(bytes);
        text.map(str::to_owned)
            .map_err(|_| Problem::Broken(format!("{what} at byte {at} is not UTF-8")))
    }
}
