//! Parquet's encodings of small integers, decoded value by value without allocation, however many
//! values a few bytes stand for.
//!
//! <https://github.com/apache/parquet-format/blob/master/Encodings.md>

/// Why values cannot be decoded.
pub(crate) type Broken = &'static str;

const CUT_OFF: Broken = "a page ends within its levels or lengths";

fn varint(bytes: &[u8], at: &mut usize) -> Result<u64, Broken> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let byte = *bytes.get(*at).ok_or(CUT_OFF)?;
        *at += 1;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(value);
        }
    }
    Err("a page has a number of more than 64 bits")
}

/// The `width` bits at bit offset `bit`, least significant first; bits beyond the end are 0.
fn bits(bytes: &[u8], bit: usize, width: u32) -> u64 {
    let mut window = [0u8; 16];
    let from = bit / 8;
    let rest = bytes.get(from..).unwrap_or_default();
    let length = rest.len().min(9);
    window[..length].copy_from_slice(&rest[..length]);
    let value = u128::from_le_bytes(window) >> (bit % 8);
    (value & ((1u128 << width) - 1)) as u64
}

/// The RLE/bit-packing hybrid: runs of one value alternate with bit-packed values.
#[derive(Debug, Clone)]
pub(crate) struct Hybrid<'a> {
    bytes: &'a [u8],
    at: usize,
    width: u32,
    /// Values left of the current run.
    left: u64,
    /// `Some`: the value of an RLE run; `None`: the values are bit-packed from bit `bit` on.
    same: Option<u32>,
    bit: usize,
}

impl<'a> Hybrid<'a> {
    /// A reader of values of `width` bits, at most 32.
    pub(crate) fn new(bytes: &'a [u8], width: u32) -> Result<Hybrid<'a>, Broken> {
        if width > 32 {
            return Err("a page has values of more than 32 bits");
        }
        Ok(Hybrid {
            bytes,
            at: 0,
            width,
            left: 0,
            same: None,
            bit: 0,
        })
    }

    pub(crate) fn next_value(&mut self) -> Result<u32, Broken> {
        if self.width == 0 {
            return Ok(0);
        }
        while self.left == 0 {
            self.next_run()?;
        }
        self.left -= 1;
        match self.same {
            Some(value) => Ok(value),
            None => {
                let value = bits(self.bytes, self.bit, self.width);
                self.bit += self.width as usize;
                Ok(value as u32)
            }
        }
    }

    fn next_run(&mut self) -> Result<(), Broken> {
        let header = varint(self.bytes, &mut self.at)?;
        if header & 1 == 0 {
            let length = self.width.div_ceil(8) as usize;
            let value = self.bytes.get(self.at..self.at + length).ok_or(CUT_OFF)?;
            let mut four = [0; 4];
            four[..length].copy_from_slice(value);
            self.at += length;
            self.same = Some(u32::from_le_bytes(four));
            self.left = header >> 1;
        } else {
            if self.at >= self.bytes.len() {
                return Err(CUT_OFF);
            }
            let groups = header >> 1;
            self.same = None;
            self.bit = self.at * 8;
            self.left = groups.saturating_mul(8);
            let length = groups.saturating_mul(self.width.into());
            self.at = self.at.saturating_add(usize::try_from(length).unwrap_or(usize::MAX));
        }
        Ok(())
    }
}

/// `DELTA_BINARY_PACKED`.
#[derive(Debug, Clone)]
pub(crate) struct Deltas<'a> {
    bytes: &'a [u8],
    /// Offset of the next block or miniblock header.
    at: usize,
    miniblocks: usize,
    miniblock_values: u64,
    /// Number of values still to come.
    left: u64,
    value: i64,
    is_first: bool,
    min_delta: i64,
    /// Offset of the block's miniblock widths, and the index of the next miniblock.
    widths: usize,
    next_miniblock: usize,
    width: u32,
    bit: usize,
    left_in_miniblock: u64,
}

/// Maximum values per block; writers use 128.
const BLOCK_VALUES_MAX: u64 = 1 << 20;

impl<'a> Deltas<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Result<Deltas<'a>, Broken> {
        let mut at = 0;
        let block = varint(bytes, &mut at)?;
        let miniblocks = varint(bytes, &mut at)?;
        let left = varint(bytes, &mut at)?;
        let value = zigzag(varint(bytes, &mut at)?);
        if block == 0 || block > BLOCK_VALUES_MAX || miniblocks == 0 || !block.is_multiple_of(miniblocks) {
            return Err("a page has blocks of another size than the format allows");
        }
        Ok(Deltas {
            bytes,
            at,
            miniblocks: miniblocks as usize,
            miniblock_values: block / miniblocks,
            left,
            value,
            is_first: true,
            min_delta: 0,
            widths: 0,
            next_miniblock: miniblocks as usize,
            width: 0,
            bit: 0,
            left_in_miniblock: 0,
        })
    }

    /// Number of values still to come, as the page claims.
    pub(crate) fn left(&self) -> u64 {
        self.left
    }

    pub(crate) fn next_value(&mut self) -> Result<i64, Broken> {
        if self.left == 0 {
            return Err("a page has fewer lengths than values");
        }
        self.left -= 1;
        if std::mem::take(&mut self.is_first) {
            return Ok(self.value);
        }
        if self.left_in_miniblock == 0 {
            self.next_miniblock()?;
        }
        self.left_in_miniblock -= 1;
        let delta = bits(self.bytes, self.bit, self.width) as i64;
        self.bit += self.width as usize;
        self.value = self.value.wrapping_add(self.min_delta).wrapping_add(delta);
        Ok(self.value)
    }

    /// Skips all values, and returns the offset of the bytes behind them.
    pub(crate) fn end(mut self) -> Result<usize, Broken> {
        while self.left > 0 {
            self.next_value()?;
        }
        Ok(self.at.min(self.bytes.len()))
    }

    fn next_miniblock(&mut self) -> Result<(), Broken> {
        if self.next_miniblock == self.miniblocks {
            self.min_delta = zigzag(varint(self.bytes, &mut self.at)?);
            self.widths = self.at;
            self.at += self.miniblocks;
            self.next_miniblock = 0;
        }
        let width = *self.bytes.get(self.widths + self.next_miniblock).ok_or(CUT_OFF)?;
        if width > 64 {
            return Err("a page has values of more than 64 bits");
        }
        self.next_miniblock += 1;
        self.width = width.into();
        self.bit = self.at * 8;
        self.left_in_miniblock = self.miniblock_values;
        self.at += (self.miniblock_values * u64::from(width)).div_ceil(8) as usize;
        Ok(())
    }
}

fn zigzag(value: u64) -> i64 {
    (value >> 1) as i64 ^ -((value & 1) as i64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn runs_and_packed_values_come_in_turn() {
        // Three times 5, then 0 to 7 in three bits each (the example of the format's documents).
        let bytes = [3 << 1, 5, 3, 0b1000_1000, 0b1100_0110, 0b1111_1010];
        let mut hybrid = Hybrid::new(&bytes, 3).unwrap();
        let values: Vec<u32> = (0..11).map(|_| hybrid.next_value().unwrap()).collect();
        assert_eq!(values, [5, 5, 5, 0, 1, 2, 3, 4, 5, 6, 7]);
        assert!(hybrid.next_value().is_err());
        // A thousand million values in six bytes.
        let bytes = [0x80, 0xa8, 0xd6, 0xb9, 0x07, 1];
        let mut hybrid = Hybrid::new(&bytes, 1).unwrap();
        assert!((0..1000).all(|_| hybrid.next_value() == Ok(1)));
    }

    #[test]
    fn deltas_are_added_up() {
        // Blocks of 128 values in 4 miniblocks: 7, then 100 deltas of 2. All deltas equal the
        // minimum, so they take no bits.
        let mut bytes = vec![0x80, 1, 4, 101, 14];
        bytes.extend([4, 0, 0, 0, 0, 0xaa]);
        let mut deltas = Deltas::new(&bytes).unwrap();
        let values: Vec<i64> = (0..101).map(|_| deltas.next_value().unwrap()).collect();
        assert_eq!((values[0], values[1], values[100]), (7, 9, 207));
        assert!(deltas.next_value().is_err());
        assert_eq!(Deltas::new(&bytes).unwrap().end(), Ok(10));
    }

    proptest! {
        #[test]
        fn foreign_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..80), width in 0u32..40) {
            if let Ok(mut hybrid) = Hybrid::new(&bytes, width) {
                for _ in 0..100 {
                    let _ = hybrid.next_value();
                }
            }
            if let Ok(mut deltas) = Deltas::new(&bytes) {
                for _ in 0..1000 {
                    let _ = deltas.next_value();
                }
            }
        }
    }
}
