//! Cuts streamed bytes into whole lines with their offsets, in bounded memory.

use std::ops::Range;

use bytes::{Bytes, BytesMut};

/// Maximum line length in bytes, without its line end; a longer line becomes a row with an error.
pub const LINE_BYTES_MAX: usize = 16 << 20;

/// Approximate size of the blocks in which lines are emitted.
pub const BLOCK_BYTES: usize = 1 << 20;

/// A contiguous part of the input that ends with a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Whole lines from offset `start` on; only the input's last line may lack its line end.
    Lines { start: u64, bytes: Bytes },
    /// One line that is too long, including its line end. In CSV it is a record, which may hold
    /// several line ends.
    TooLong { start: u64, end: u64, lines: u64 },
}

impl Piece {
    /// End offset in the input.
    pub fn end(&self) -> u64 {
        match self {
            Piece::Lines { start, bytes } => start + bytes.len() as u64,
            Piece::TooLong { end, .. } => *end,
        }
    }

    /// The part of the piece up to offset `end`, which must be the end of a line.
    pub fn until(self, end: u64) -> Piece {
        match self {
            Piece::Lines { start, bytes } => {
                let length = usize::try_from(end.saturating_sub(start))
                    .unwrap_or(usize::MAX)
                    .min(bytes.len());
                Piece::Lines {
                    start,
                    bytes: bytes.slice(..length),
                }
            }
            long => long,
        }
    }
}

/// Cuts pushed bytes into [`Piece`]s. Holds at most one block, one line of the maximum length and
/// one push.
#[derive(Debug)]
pub struct LineCutter {
    pending: BytesMut,
    /// Offset of the first pending byte; while a long line is skipped, of the next byte to arrive.
    start: u64,
    /// Number of pending bytes that form complete lines.
    complete_bytes: usize,
    /// Start of the long line that is being skipped.
    skipping: Option<u64>,
    line_max: usize,
    block_bytes: usize,
}

impl LineCutter {
    /// Starts at byte `start` of the input, which begins a line.
    pub fn new(start: u64) -> LineCutter {
        LineCutter::with_limits(start, LINE_BYTES_MAX, BLOCK_BYTES)
    }

    /// `line_max`: maximum bytes of a line. `block_bytes`: a piece of at least this size is
    /// emitted.
    fn with_limits(start: u64, line_max: usize, block_bytes: usize) -> LineCutter {
        LineCutter {
            pending: BytesMut::new(),
            start,
            complete_bytes: 0,
            skipping: None,
            line_max,
            block_bytes,
        }
    }

    /// Processes the next bytes; finished pieces go to `out`.
    pub fn push(&mut self, mut bytes: &[u8], out: &mut Vec<Piece>) {
        if let Some(line_start) = self.skipping {
            let Some(newline) = find_newline(bytes) else {
                self.start += bytes.len() as u64;
                return;
            };
            self.start += newline as u64 + 1;
            self.skipping = None;
            out.push(Piece::TooLong {
                start: line_start,
                end: self.start,
                lines: 1,
            });
            bytes = &bytes[newline + 1..];
        }
        let pending_before = self.pending.len();
        self.pending.extend_from_slice(bytes);
        if let Some(newline) = bytes.iter().rposition(|&b| b == b'\n') {
            self.complete_bytes = pending_before + newline + 1;
        }
        let tail_too_long = self.pending.len() - self.complete_bytes > self.line_max;
        if self.complete_bytes > 0 && (self.complete_bytes >= self.block_bytes || tail_too_long) {
            self.emit(self.complete_bytes, out);
        }
        if tail_too_long {
            self.skipping = Some(self.start);
            self.start += self.pending.len() as u64;
            self.pending = BytesMut::new();
        }
    }

    /// Emits the remaining bytes at the end of the input.
    pub fn finish(mut self, out: &mut Vec<Piece>) {
        if let Some(start) = self.skipping {
            out.push(Piece::TooLong {
                start,
                end: self.start,
                lines: 1,
            });
        } else if !self.pending.is_empty() {
            self.emit(self.pending.len(), out);
        }
    }

    /// Bytes so far of the long line that is being skipped; 0 if none is.
    pub fn skipped_bytes(&self) -> u64 {
        self.skipping.map_or(0, |start| self.start - start)
    }

    fn emit(&mut self, bytes: usize, out: &mut Vec<Piece>) {
        let block = self.pending.split_to(bytes).freeze();
        out.push(Piece::Lines {
            start: self.start,
            bytes: block,
        });
        self.start += bytes as u64;
        self.complete_bytes = 0;
    }
}

/// The lines of a block: each line's byte range (including the line end), and its text without `\n`
/// or `\r\n`.
pub fn lines_of(block: &[u8]) -> impl Iterator<Item = (Range<usize>, &[u8])> {
    let mut offset = 0;
    std::iter::from_fn(move || {
        let rest = block.get(offset..).filter(|rest| !rest.is_empty())?;
        let text = find_newline(rest).map_or(rest, |newline| &rest[..newline]);
        let start = offset;
        offset += (text.len() + 1).min(rest.len());
        Some((start..offset, text.strip_suffix(b"\r").unwrap_or(text)))
    })
}

fn find_newline(bytes: &[u8]) -> Option<usize> {
    // Within a chunk the comparison has no early exit, so it vectorizes.
    const CHUNK_BYTES: usize = 64;
    for (n, chunk) in bytes.chunks(CHUNK_BYTES).enumerate() {
        if chunk.iter().fold(false, |any, &b| any | (b == b'\n')) {
            return chunk.iter().position(|&b| b == b'\n').map(|at| n * CHUNK_BYTES + at);
        }
    }
    None
}

/// Whether the line holds only white space.
pub fn is_blank(line: &[u8]) -> bool {
    line.iter().all(|b| b.is_ascii_whitespace())
}

/// `line` without a byte order mark.
pub fn strip_bom(line: &[u8]) -> &[u8] {
    line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Every line's byte range and text; the text is `None` if the line is too long.
    fn split_naively(input: &[u8], line_max: usize) -> Vec<(u64, u64, Option<Vec<u8>>)> {
        let mut out = Vec::new();
        let mut at = 0;
        for line in input.split_inclusive(|&b| b == b'\n') {
            let text = line.strip_suffix(b"\n").unwrap_or(line);
            let text = (text.len() <= line_max).then(|| text.strip_suffix(b"\r").unwrap_or(text).to_vec());
            out.push((at, at + line.len() as u64, text));
            at += line.len() as u64;
        }
        out
    }

    /// The same by the cutter, whose input arrives in chunks of `sizes` bytes.
    fn cut(input: &[u8], sizes: &[usize], line_max: usize, block: usize) -> Vec<(u64, u64, Option<Vec<u8>>)> {
        let mut cutter = LineCutter::with_limits(0, line_max, block);
        let mut pieces = Vec::new();
        let mut at = 0;
        for &size in sizes.iter().cycle() {
            let end = (at + size).min(input.len());
            cutter.push(&input[at..end], &mut pieces);
            assert!(
                cutter.pending.len() <= line_max + block + size,
                "{} pending",
                cutter.pending.len()
            );
            at = end;
            if at == input.len() {
                break;
            }
        }
        cutter.finish(&mut pieces);
        let mut out = Vec::new();
        for piece in pieces {
            match piece {
                Piece::TooLong { start, end, .. } => out.push((start, end, None)),
                Piece::Lines { start, bytes } => out.extend(lines_of(&bytes).map(|(range, text)| {
                    let line = &bytes[range.clone()];
                    let length = line.strip_suffix(b"\n").unwrap_or(line).len();
                    let text = (length <= line_max).then(|| text.to_vec());
                    (start + range.start as u64, start + range.end as u64, text)
                })),
            }
        }
        out
    }

    proptest! {
        #[test]
        fn the_cutter_gives_the_lines_of_a_naive_split(
            input in prop::collection::vec(prop_oneof![4 => Just(b'x'), 1 => Just(b'\n'), 1 => Just(b'\r')], 0..400),
            sizes in prop::collection::vec(1usize..40, 1..5),
            line_max in 1usize..40,
            block in 1usize..60,
        ) {
            prop_assert_eq!(cut(&input, &sizes, line_max, block), split_naively(&input, line_max));
        }
    }

    #[test]
    fn a_long_line_is_skipped_in_bounded_memory() {
        let mut input = b"a\n".to_vec();
        input.extend(vec![b'x'; 100_000]);
        input.extend(b"\nb");
        let found = cut(&input, &[1000], 5000, 2000);
        assert_eq!(found, split_naively(&input, 5000));
        assert_eq!(found[1], (2, 100_003, None));
    }
}
