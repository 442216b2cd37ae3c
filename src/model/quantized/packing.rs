//! Where the code of each number of a matrix lies.

/// Codes of a word of AWQ, by row: the row `r` of eight is the `AWQ_PLACES[r]`-th code, counted from the
/// lowest bits.
const AWQ_PLACES: [u32; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Where the codes of a matrix `[rows][columns]` lie. Words have 32 bits, and hold codes from their
/// lowest bits on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Packing {
    /// `[rows][columns]`, a byte each.
    Bytes,
    /// One behind the other, two in a byte.
    Halves { first_is_high: bool },
    /// `[rows][words]`: a word holds neighbours of a row.
    Along { bits: u32 },
    /// `[words][columns]`: a word holds neighbours of a column.
    Down { bits: u32 },
    /// `[columns][words]`: a word holds neighbours of a column, as in GPTQ's zero points.
    Across { bits: u32 },
    /// `[words][rows]`: a word holds neighbours of a row, as in GPTQ.
    Transposed { bits: u32 },
    /// `[columns][words]`: a word holds eight neighbours of a column, in an order of their own.
    Awq,
}

use Packing::{Across, Along, Awq, Bytes, Down, Halves, Transposed};

impl Packing {
    /// The shape of a matrix' codes, in words where they are packed in such. [`Halves`] may have several.
    pub(super) fn shape(self, rows: usize, columns: usize) -> [usize; 2] {
        let words = |count: usize, bits: u32| count.div_ceil((32 / bits) as usize);
        match self {
            Bytes => [rows, columns],
            Halves { .. } => [rows, columns.div_ceil(2)],
            Along { bits } => [rows, words(columns, bits)],
            Down { bits } => [words(rows, bits), columns],
            Across { bits } => [columns, words(rows, bits)],
            Transposed { bits } => [words(columns, bits), rows],
            Awq => [columns, rows.div_ceil(8)],
        }
    }

    /// Bits of a code.
    pub(super) fn bits(self) -> u32 {
        match self {
            Bytes => 8,
            Halves { .. } | Awq => 4,
            Along { bits } | Down { bits } | Across { bits } | Transposed { bits } => bits,
        }
    }

    /// Calls `take` with each column of a row and its code.
    pub(super) fn for_row(
        self,
        bytes: &[u8],
        (rows, columns): (usize, usize),
        row: usize,
        mut take: impl FnMut(usize, u8),
    ) {
        let [_, width] = self.shape(rows, columns);
        let code = |word: usize, place: u32, bits: u32| {
            let word = bytes.as_chunks().0[word];
            (u32::from_le_bytes(word) >> (place * bits)) as u8 & (0xff >> (8 - bits))
        };
        let place = |index: usize, bits: u32| {
            let count = (32 / bits) as usize;
            (index / count, (index % count) as u32)
        };
        match self {
            Bytes => (0..columns).for_each(|column| take(column, bytes[row * columns + column])),
            Halves { first_is_high } => (0..columns).for_each(|column| {
                let index = row * columns + column;
                let is_high = index.is_multiple_of(2) == first_is_high;
                take(
                    column,
                    if is_high {
                        bytes[index / 2] >> 4
                    } else {
                        bytes[index / 2] & 15
                    },
                );
            }),
            Along { bits } => (0..columns).for_each(|column| {
                let (word, place) = place(column, bits);
                take(column, code(row * width + word, place, bits));
            }),
            Down { bits } => {
                let (word, place) = place(row, bits);
                (0..columns).for_each(|column| take(column, code(word * width + column, place, bits)));
            }
            Across { bits } => {
                let (word, place) = place(row, bits);
                (0..columns).for_each(|column| take(column, code(column * width + word, place, bits)));
            }
            Transposed { bits } => (0..columns).for_each(|column| {
                let (word, place) = place(column, bits);
                take(column, code(word * width + row, place, bits));
            }),
            Awq => {
                let place = AWQ_PLACES[row % 8];
                (0..columns).for_each(|column| take(column, code(column * width + row / 8, place, 4)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All codes of a matrix, row by row.
    fn codes(packing: Packing, bytes: &[u8], rows: usize, columns: usize) -> Vec<u8> {
        let mut codes = Vec::new();
        for row in 0..rows {
            packing.for_row(bytes, (rows, columns), row, |column, code| {
                assert_eq!(column, codes.len() % columns);
                codes.push(code);
            });
        }
        codes
    }

    fn bytes(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn each_packing_finds_its_codes() {
        assert_eq!(codes(Bytes, &[1, 2, 3, 4, 5, 6], 2, 3), [1, 2, 3, 4, 5, 6]);
        let halves = |first_is_high| codes(Halves { first_is_high }, &[0x21, 0x43, 0x65], 2, 3);
        assert_eq!(halves(false), [1, 2, 3, 4, 5, 6]);
        assert_eq!(halves(true), [2, 1, 4, 3, 6, 5]);
        // A row of nine numbers takes two words of four bits, three of eight.
        let along = bytes(&[0x8765_4321, 0x9, 0x1234_5678, 0xa]);
        let want = [1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 6, 5, 4, 3, 2, 1, 10];
        assert_eq!(codes(Along { bits: 4 }, &along, 2, 9), want);
        let along = bytes(&[0x0403_0201, 0x0807_0605, 0xf9]);
        assert_eq!(codes(Along { bits: 8 }, &along, 1, 9), [1, 2, 3, 4, 5, 6, 7, 8, 0xf9]);
        assert_eq!(codes(Along { bits: 2 }, &bytes(&[0b11_10_01_00]), 1, 4), [0, 1, 2, 3]);
        // Nine rows of two columns.
        let pairs = [1, 8, 2, 7, 3, 6, 4, 5, 5, 4, 6, 3, 7, 2, 8, 1, 9, 10];
        let down = bytes(&[0x8765_4321, 0x1234_5678, 0x9, 0xa]);
        assert_eq!(codes(Down { bits: 4 }, &down, 9, 2), pairs);
        let across = bytes(&[0x8765_4321, 0x9, 0x1234_5678, 0xa]);
        assert_eq!(codes(Across { bits: 4 }, &across, 9, 2), pairs);
        // Two rows of nine columns.
        let transposed = bytes(&[0x8765_4321, 0x1234_5678, 0x9, 0xa]);
        assert_eq!(codes(Transposed { bits: 4 }, &transposed, 2, 9), want);
        // Eight rows of two columns.
        let awq = bytes(&[0x8765_4321, 0x1234_5678]);
        assert_eq!(codes(Awq, &awq, 8, 2), [1, 8, 5, 4, 2, 7, 6, 3, 3, 6, 7, 2, 4, 5, 8, 1]);
    }

    #[test]
    fn shapes_are_those_of_the_formats() {
        let shapes = [
            Bytes,
            Along { bits: 4 },
            Down { bits: 4 },
            Across { bits: 4 },
            Transposed { bits: 8 },
            Awq,
        ];
        let shapes = shapes.map(|packing| packing.shape(24, 33));
        assert_eq!(shapes, [[24, 33], [24, 5], [3, 33], [33, 3], [9, 24], [33, 3]]);
        assert_eq!(Halves { first_is_high: true }.shape(24, 33), [24, 17]);
    }
}
