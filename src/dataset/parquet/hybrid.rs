//! Decoders for Parquet's encodings of small integers. They return value after value without
//! allocating, even if a few bytes encode billions of values.
//!
//! <https://github.com/apache/parquet-format/blob/master/Encodings.md>

/// The reason why values cannot be decoded.
pub(crate) type DecodeError = &'static str;

const CUT_OFF: DecodeError = "a page ends within its levels or lengths";

fn varint(bytes: &[u8], offset: &mut usize) -> Result<u64, DecodeError> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let byte = *bytes.get(*offset).ok_or(CUT_OFF)?;
        *offset += 1;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(value);
        }
    }
    Err("a page has a number of more than 64 bits")
}

/// The `width` bits at bit offset `bit`, least significant first; bits beyond the end are 0.
fn bits(bytes: &[u8], bit_offset: usize, width: u32) -> u64 {
    let mut window = [0u8; 16];
    let from = bit_offset / 8;
    let rest = bytes.get(from..).unwrap_or_default();
    let length = rest.len().min(9);
    window[..length].copy_from_slice(&rest[..length]);
    let value = u128::from_le_bytes(window) >> (bit_offset % 8);
    (value & ((1u128 << width) - 1)) as u64
}

/// Decodes the RLE/bit-packing hybrid: runs of a repeated value, and runs of bit-packed values.
#[derive(Debug, Clone)]
pub(crate) struct HybridDecoder<'a> {
    bytes: &'a [u8],
    offset: usize,
    width: u32,
    /// Number of values still to come in the current run.
    remaining: u64,
    /// `Some`: the value of an RLE run; `None`: the values are bit-packed from `bit_offset` on.
    repeated: Option<u32>,
    bit_offset: usize,
}

impl<'a> HybridDecoder<'a> {
    /// A reader of values of `width` bits, at most 32.
    pub(crate) fn new(bytes: &'a [u8], width: u32) -> Result<HybridDecoder<'a>, DecodeError> {
        if width > 32 {
            return Err("a page has values of more than 32 bits");
        }
        Ok(HybridDecoder {
            bytes,
            offset: 0,
            width,
            remaining: 0,
            repeated: None,
            bit_offset: 0,
        })
    }

    pub(crate) fn next_value(&mut self) -> Result<u32, DecodeError> {
        if self.width == 0 {
            return Ok(0);
        }
        while self.remaining == 0 {
            self.next_run()?;
        }
        self.remaining -= 1;
        match self.repeated {
            Some(value) => Ok(value),
            None => {
                let value = bits(self.bytes, self.bit_offset, self.width);
                self.bit_offset += self.width as usize;
                Ok(value as u32)
            }
        }
    }

    fn next_run(&mut self) -> Result<(), DecodeError> {
        let header = varint(self.bytes, &mut self.offset)?;
        if header & 1 == 0 {
            let length = self.width.div_ceil(8) as usize;
            let value = self.bytes.get(self.offset..self.offset + length).ok_or(CUT_OFF)?;
            let mut four = [0; 4];
            four[..length].copy_from_slice(value);
            self.offset += length;
            self.repeated = Some(u32::from_le_bytes(four));
            self.remaining = header >> 1;
        } else {
            if self.offset >= self.bytes.len() {
                return Err(CUT_OFF);
            }
            let groups = header >> 1;
            self.repeated = None;
            self.bit_offset = self.offset * 8;
            self.remaining = groups.saturating_mul(8);
            let length = groups.saturating_mul(self.width.into());
            self.offset = self
                .offset
                .saturating_add(usize::try_from(length).unwrap_or(usize::MAX));
        }
        Ok(())
    }
}

/// Decodes `DELTA_BINARY_PACKED`.
#[derive(Debug, Clone)]
pub(crate) struct DeltaDecoder<'a> {
    bytes: &'a [u8],
    /// Offset of the next block or miniblock header.
    offset: usize,
    miniblocks: usize,
    miniblock_values: u64,
    /// Number of values still to come.
    remaining: u64,
    value: i64,
    is_first: bool,
    min_delta: i64,
    /// Offset of the bit widths of the block's miniblocks.
    widths_offset: usize,
    /// Index of the next miniblock in its block.
    next_miniblock: usize,
    width: u32,
    bit_offset: usize,
    miniblock_remaining: u64,
}

/// Maximum values per block; writers use 128.
const BLOCK_VALUES_MAX: u64 = 1 << 20;

impl<'a> DeltaDecoder<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Result<DeltaDecoder<'a>, DecodeError> {
        let mut offset = 0;
        let block = varint(bytes, &mut offset)?;
        let miniblocks = varint(bytes, &mut offset)?;
        let remaining = varint(bytes, &mut offset)?;
        let value = zigzag(varint(bytes, &mut offset)?);
        if block == 0 || block > BLOCK_VALUES_MAX || miniblocks == 0 || !block.is_multiple_of(miniblocks) {
            return Err("a page has blocks of another size than the format allows");
        }
        Ok(DeltaDecoder {
            bytes,
            offset,
            miniblocks: miniblocks as usize,
            miniblock_values: block / miniblocks,
            remaining,
            value,
            is_first: true,
            min_delta: 0,
            widths_offset: 0,
            next_miniblock: miniblocks as usize,
            width: 0,
            bit_offset: 0,
            miniblock_remaining: 0,
        })
    }

    /// Number of values still to come, as the page claims.
    pub(crate) fn remaining(&self) -> u64 {
        self.remaining
    }

    pub(crate) fn next_value(&mut self) -> Result<i64, DecodeError> {
        if self.remaining == 0 {
            return Err("a page has fewer lengths than values");
        }
        self.remaining -= 1;
        if std::mem::take(&mut self.is_first) {
            return Ok(self.value);
        }
        if self.miniblock_remaining == 0 {
            self.next_miniblock()?;
        }
        self.miniblock_remaining -= 1;
        let delta = bits(self.bytes, self.bit_offset, self.width) as i64;
        self.bit_offset += self.width as usize;
        self.value = self.value.wrapping_add(self.min_delta).wrapping_add(delta);
        Ok(self.value)
    }

    /// Skips all values, and returns the offset of the byte after them.
    pub(crate) fn skip_to_end(mut self) -> Result<usize, DecodeError> {
        while self.remaining > 0 {
            self.next_value()?;
        }
        Ok(self.offset.min(self.bytes.len()))
    }

    fn next_miniblock(&mut self) -> Result<(), DecodeError> {
        if self.next_miniblock == self.miniblocks {
            self.min_delta = zigzag(varint(self.bytes, &mut self.offset)?);
            self.widths_offset = self.offset;
            self.offset += self.miniblocks;
            self.next_miniblock = 0;
        }
        let width = *self
            .bytes
            .get(self.widths_offset + self.next_miniblock)
            .ok_or(CUT_OFF)?;
        if width > 64 {
            return Err("a page has values of more than 64 bits");
        }
        self.next_miniblock += 1;
        self.width = width.into();
        self.bit_offset = self.offset * 8;
        self.miniblock_remaining = self.miniblock_values;
        self.offset += (self.miniblock_values * u64::from(width)).div_ceil(8) as usize;
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
    fn repeated_and_bit_packed_runs_are_decoded() {
        // Three times 5, then 0 to 7 in three bits each (the example of the format's documents).
        let bytes = [3 << 1, 5, 3, 0b1000_1000, 0b1100_0110, 0b1111_1010];
        let mut hybrid = HybridDecoder::new(&bytes, 3).unwrap();
        let values: Vec<u32> = (0..11).map(|_| hybrid.next_value().unwrap()).collect();
        assert_eq!(values, [5, 5, 5, 0, 1, 2, 3, 4, 5, 6, 7]);
        assert!(hybrid.next_value().is_err());
        // A thousand million values in six bytes.
        let bytes = [0x80, 0xa8, 0xd6, 0xb9, 0x07, 1];
        let mut hybrid = HybridDecoder::new(&bytes, 1).unwrap();
        assert!((0..1000).all(|_| hybrid.next_value() == Ok(1)));
    }

    #[test]
    fn deltas_are_summed() {
        // Blocks of 128 values in 4 miniblocks: 7, then 100 deltas of 2. All deltas equal the
        // minimum, so they take no bits.
        let mut bytes = vec![0x80, 1, 4, 101, 14];
        bytes.extend([4, 0, 0, 0, 0, 0xaa]);
        let mut deltas = DeltaDecoder::new(&bytes).unwrap();
        let values: Vec<i64> = (0..101).map(|_| deltas.next_value().unwrap()).collect();
        assert_eq!((values[0], values[1], values[100]), (7, 9, 207));
        assert!(deltas.next_value().is_err());
        assert_eq!(DeltaDecoder::new(&bytes).unwrap().skip_to_end(), Ok(10));
    }

    proptest! {
        #[test]
        fn foreign_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..80), width in 0u32..40) {
            if let Ok(mut hybrid) = HybridDecoder::new(&bytes, width) {
                for _ in 0..100 {
                    let _ = hybrid.next_value();
                }
            }
            if let Ok(mut deltas) = DeltaDecoder::new(&bytes) {
                for _ in 0..1000 {
                    let _ = deltas.next_value();
                }
            }
        }
    }
}
