//! Decompresses files that are compressed as a whole (gzip, Zstandard, bzip2), including files of
//! several concatenated members.

use bytes::{Buf, Bytes};
use flate2::{Decompress, FlushDecompress};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zstd::stream::raw::Operation;

/// Maximum decompressed bytes per step.
pub const STEP_BYTES: usize = 1 << 20;

/// File extensions of compressed files.
pub const EXTENSIONS: [&str; 4] = ["gz", "zst", "zstd", "bz2"];

/// What a file is compressed with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Codec {
    Gzip,
    Zstd,
    Bzip2,
}

/// How an input is compressed: places in it, as in its shards, are those of its decompressed bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Compressed {
    pub codec: Codec,
    /// Decompressed bytes that planning read: all, but in a trial.
    pub bytes: u64,
}

impl Codec {
    /// Detects the codec by a file's first bytes.
    pub fn of(head: &[u8]) -> Option<Codec> {
        match head {
            [0x1f, 0x8b, 8, ..] => Some(Codec::Gzip),
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Some(Codec::Zstd),
            // A skippable frame.
            [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Some(Codec::Zstd),
            // A block header, or the footer of an empty file.
            [b'B', b'Z', b'h', b'1'..=b'9', 0x31, 0x41, 0x59, 0x26, 0x53, 0x59, ..]
            | [b'B', b'Z', b'h', b'1'..=b'9', 0x17, 0x72, 0x45, 0x38, 0x50, 0x90, ..] => Some(Codec::Bzip2),
            _ => None,
        }
    }

    /// The name in messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Codec::Gzip => "gzip",
            Codec::Zstd => "zstd",
            Codec::Bzip2 => "bzip2",
        }
    }
}

/// Decompresses a file that arrives in chunks, a step at a time.
pub struct Decoder {
    codec: Codec,
    state: CodecState,
    /// Whether the input so far ends within a member (gzip), frame (zstd) or stream (bzip2).
    is_in_member: bool,
    /// Number of compressed bytes consumed so far.
    consumed_bytes: u64,
}

enum CodecState {
    Gzip(Decompress),
    Zstd(zstd::stream::raw::Decoder<'static>),
    Bzip2(bzip2::Decompress),
}

/// Progress of one call of a codec.
struct CodecProgress {
    consumed: usize,
    produced: usize,
    /// Whether a member ends after the consumed bytes.
    is_member_end: bool,
}

impl CodecState {
    fn new(codec: Codec) -> Result<CodecState, String> {
        Ok(match codec {
            Codec::Gzip => CodecState::Gzip(Decompress::new_gzip(15)),
            Codec::Zstd => CodecState::Zstd(zstd::stream::raw::Decoder::new().map_err(|e| e.to_string())?),
            Codec::Bzip2 => CodecState::Bzip2(bzip2::Decompress::new(false)),
        })
    }

    fn decompress(&mut self, input: &[u8], output: &mut [u8]) -> Result<CodecProgress, String> {
        match self {
            CodecState::Gzip(state) => {
                let (total_in, total_out) = (state.total_in(), state.total_out());
                let status = state.decompress(input, output, FlushDecompress::None);
                let is_member_end = status.map_err(|e| e.to_string())? == flate2::Status::StreamEnd;
                Ok(CodecProgress {
                    consumed: (state.total_in() - total_in) as usize,
                    produced: (state.total_out() - total_out) as usize,
                    is_member_end,
                })
            }
            CodecState::Zstd(state) => {
                let status = state.run_on_buffers(input, output).map_err(|e| e.to_string())?;
                Ok(CodecProgress {
                    consumed: status.bytes_read,
                    produced: status.bytes_written,
                    is_member_end: status.remaining == 0,
                })
            }
            CodecState::Bzip2(state) => {
                let (total_in, total_out) = (state.total_in(), state.total_out());
                let status = state.decompress(input, output).map_err(|e| e.to_string())?;
                Ok(CodecProgress {
                    consumed: (state.total_in() - total_in) as usize,
                    produced: (state.total_out() - total_out) as usize,
                    is_member_end: status == bzip2::Status::StreamEnd,
                })
            }
        }
    }
}

impl Decoder {
    pub fn new(codec: Codec) -> Result<Decoder, String> {
        Ok(Decoder {
            codec,
            state: CodecState::new(codec)?,
            is_in_member: false,
            consumed_bytes: 0,
        })
    }

    /// Consumes `input` until it is empty or [`STEP_BYTES`] bytes are produced. In the latter case,
    /// further calls may produce more without input.
    pub fn step(&mut self, input: &mut Bytes) -> Result<Bytes, String> {
        let mut output = vec![0; STEP_BYTES];
        let mut produced = 0;
        while produced < STEP_BYTES && (self.is_in_member || !input.is_empty()) {
            let progress = self.state.decompress(input, &mut output[produced..]);
            let progress = progress.map_err(|why| self.damaged(&why))?;
            input.advance(progress.consumed);
            self.consumed_bytes += progress.consumed as u64;
            produced += progress.produced;
            self.is_in_member = !progress.is_member_end;
            // A Zstandard decoder accepts the next frame without a new state.
            if progress.is_member_end && self.codec != Codec::Zstd {
                self.state = CodecState::new(self.codec)?;
            }
            if progress.consumed == 0 && progress.produced == 0 && !progress.is_member_end {
                if input.is_empty() {
                    break;
                }
                return Err(self.damaged("it does not go on"));
            }
        }
        output.truncate(produced);
        Ok(output.into())
    }

    /// Checks at the end of the input that its last member is complete.
    pub fn finish(&self) -> Result<(), String> {
        if self.is_in_member {
            Err(format!(
                "it ends in the middle of its {} data, behind byte {}; was it written or copied whole?",
                self.codec.as_str(),
                self.consumed_bytes
            ))
        } else {
            Ok(())
        }
    }

    fn damaged(&self, why: &str) -> String {
        format!(
            "its {} data is damaged near byte {}: {why}",
            self.codec.as_str(),
            self.consumed_bytes
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn compress(codec: Codec, text: &[u8]) -> Vec<u8> {
        match codec {
            Codec::Gzip => {
                let mut writer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                writer.write_all(text).unwrap();
                writer.finish().unwrap()
            }
            Codec::Zstd => {
                let mut writer = zstd::Encoder::new(Vec::new(), 1).unwrap();
                writer.include_checksum(true).unwrap();
                writer.write_all(text).unwrap();
                writer.finish().unwrap()
            }
            Codec::Bzip2 => {
                let mut writer = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
                writer.write_all(text).unwrap();
                writer.finish().unwrap()
            }
        }
    }

    /// The decompressed bytes, with the input split into chunks of `size` bytes.
    fn decompress(codec: Codec, bytes: &[u8], size: usize) -> Result<Vec<u8>, String> {
        let mut decoder = Decoder::new(codec)?;
        let mut out = Vec::new();
        for piece in bytes.chunks(size) {
            let mut piece = Bytes::copy_from_slice(piece);
            loop {
                let output = decoder.step(&mut piece)?;
                out.extend_from_slice(&output);
                if output.len() < STEP_BYTES {
                    break;
                }
            }
            assert!(piece.is_empty());
        }
        decoder.finish().map(|()| out)
    }

    #[test]
    fn concatenated_members_are_decompressed_in_chunks_of_any_size() {
        let text: Vec<u8> = (0..400_000u32)
            .flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes())
            .collect();
        for codec in [Codec::Gzip, Codec::Zstd, Codec::Bzip2] {
            let parts = [&text[..], b"", &text[..10], &[7; 3 * STEP_BYTES]];
            let bytes: Vec<u8> = parts.iter().flat_map(|part| compress(codec, part)).collect();
            assert_eq!(Codec::of(&bytes), Some(codec));
            assert_eq!(Codec::of(&compress(codec, b"")), Some(codec));
            for size in [1 << 20, 4099, 17] {
                assert!(
                    decompress(codec, &bytes, size).unwrap() == parts.concat(),
                    "{codec:?} {size}"
                );
            }
            let error = decompress(codec, &bytes[..bytes.len() - 1], 1000).unwrap_err();
            let name = codec.as_str();
            assert!(
                error.starts_with(&format!("it ends in the middle of its {name} data, behind byte ")),
                "{error}"
            );
            let mut broken = bytes.clone();
            broken[bytes.len() / 2] ^= 0x55;
            let error = decompress(codec, &broken, 1000).unwrap_err();
            assert!(
                error.starts_with(&format!("its {name} data is damaged near byte ")),
                "{error}"
            );
            let behind = [&bytes[..], b"more text"].concat();
            assert!(decompress(codec, &behind, 1000).is_err(), "{codec:?}");
        }
    }
}
