//! A reader of Thrift's compact protocol, for the checks before Parquet's decoder sees foreign
//! bytes.
//!
//! <https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md>

/// The reason why a struct could not be read.
#[derive(Debug, PartialEq, Eq)]
pub enum ThriftError {
    /// The bytes end within the struct.
    Truncated,
    /// The struct is invalid. The text follows "it has" in the message.
    Invalid(&'static str),
}

/// Maximum nesting of skipped values.
const DEPTH_MAX: u32 = 16;

pub const BOOL_TRUE: u8 = 1;
pub const BOOL_FALSE: u8 = 2;
pub const BYTE: u8 = 3;
pub const I16: u8 = 4;
pub const I32: u8 = 5;
pub const I64: u8 = 6;
pub const DOUBLE: u8 = 7;
pub const BINARY: u8 = 8;
pub const LIST: u8 = 9;
const SET: u8 = 10;
const MAP: u8 = 11;
pub const STRUCT: u8 = 12;

/// A reader of one struct at the start of foreign bytes.
pub struct CompactReader<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> CompactReader<'a> {
    pub fn new(bytes: &'a [u8]) -> CompactReader<'a> {
        CompactReader { bytes, offset: 0 }
    }

    /// Bytes read so far.
    pub fn position(&self) -> usize {
        self.offset
    }

    fn byte(&mut self) -> Result<u8, ThriftError> {
        let byte = *self.bytes.get(self.offset).ok_or(ThriftError::Truncated)?;
        self.offset += 1;
        Ok(byte)
    }

    fn varint(&mut self) -> Result<u64, ThriftError> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(ThriftError::Invalid("an endless number"))
    }

    fn zigzag(&mut self) -> Result<i64, ThriftError> {
        let value = self.varint()?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    /// A 32-bit integer field's value.
    pub fn int(&mut self) -> Result<i32, ThriftError> {
        i32::try_from(self.zigzag()?).map_err(|_| ThriftError::Invalid("a number out of range"))
    }

    /// A 64-bit integer field's value.
    pub fn long(&mut self) -> Result<i64, ThriftError> {
        self.zigzag()
    }

    /// The type of the next field; `None` at the end of the struct. `id` must be the last field's
    /// id (0 at first) and becomes that of this field.
    pub fn field(&mut self, id: &mut i64) -> Result<Option<u8>, ThriftError> {
        let byte = self.byte()?;
        if byte == 0 {
            return Ok(None);
        }
        *id = match byte >> 4 {
            0 => self.zigzag()?,
            delta => *id + i64::from(delta),
        };
        if i16::try_from(*id).is_err() {
            return Err(ThriftError::Invalid("a field's number out of range"));
        }
        Ok(Some(byte & 0x0f))
    }

    fn advance(&mut self, bytes: u64) -> Result<(), ThriftError> {
        let end = usize::try_from(bytes)
            .ok()
            .and_then(|n| self.offset.checked_add(n))
            .ok_or(ThriftError::Truncated)?;
        if end > self.bytes.len() {
            return Err(ThriftError::Truncated);
        }
        self.offset = end;
        Ok(())
    }

    /// Skips a value of type `kind`.
    pub fn skip(&mut self, kind: u8) -> Result<(), ThriftError> {
        self.skip_within(kind, DEPTH_MAX)
    }

    /// The element type and count of a list whose field was just read.
    pub fn list(&mut self) -> Result<(u8, u64), ThriftError> {
        let byte = self.byte()?;
        let count = if byte >> 4 == 15 {
            self.varint()?
        } else {
            u64::from(byte >> 4)
        };
        Ok((byte & 0x0f, count))
    }

    fn skip_within(&mut self, kind: u8, depth: u32) -> Result<(), ThriftError> {
        let depth = depth
            .checked_sub(1)
            .ok_or(ThriftError::Invalid("values nested too deep"))?;
        match kind {
            BOOL_TRUE | BOOL_FALSE => Ok(()),
            BYTE => self.advance(1),
            I16 | I32 | I64 => self.varint().map(|_| ()),
            DOUBLE => self.advance(8),
            BINARY => {
                let length = self.varint()?;
                self.advance(length)
            }
            LIST | SET => {
                let (kind, count) = self.list()?;
                self.skip_elements(count, &[kind], depth)
            }
            MAP => match self.varint()? {
                0 => Ok(()),
                count => {
                    let kinds = self.byte()?;
                    self.skip_elements(count, &[kinds >> 4, kinds & 0x0f], depth)
                }
            },
            STRUCT => {
                let mut id = 0;
                while let Some(kind) = self.field(&mut id)? {
                    self.skip_within(kind, depth)?;
                }
                Ok(())
            }
            _ => Err(ThriftError::Invalid("an unknown type")),
        }
    }

    fn skip_elements(&mut self, count: u64, kinds: &[u8], depth: u32) -> Result<(), ThriftError> {
        // An element takes at least one byte.
        if count > self.bytes.len() as u64 {
            return Err(ThriftError::Truncated);
        }
        for _ in 0..count {
            for &kind in kinds {
                // Parquet's decoder consumes no byte for a boolean that it skips in a collection.
                // The format has no such collections.
                if matches!(kind, BOOL_TRUE | BOOL_FALSE) {
                    return Err(ThriftError::Invalid("booleans in a list"));
                }
                self.skip_within(kind, depth)?;
            }
        }
        Ok(())
    }
}
