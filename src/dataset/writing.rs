//! Options of writing a Parquet part: compression, and rows per row group.

use parquet::basic::{Compression, GzipLevel, ZstdLevel};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Default maximum rows per row group: small enough for parallel reads, large enough to compress
/// well.
const DEFAULT_GROUP_ROWS: u32 = 65_536;
/// Default level of zstd.
const DEFAULT_ZSTD_LEVEL: u32 = 3;
/// Default level of gzip, as in other tools.
const DEFAULT_GZIP_LEVEL: u32 = 6;

/// What pages are compressed with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "Codec")]
pub enum PartCodec {
    #[default]
    Zstd,
    Snappy,
    Gzip,
    None,
}

/// Options of writing a Parquet part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteOptions {
    pub codec: PartCodec,
    /// `None`: the codec's default level.
    pub level: Option<u32>,
    /// Maximum rows per row group.
    pub group_rows: u32,
}

impl Default for WriteOptions {
    fn default() -> Self {
        WriteOptions {
            codec: PartCodec::default(),
            level: None,
            group_rows: DEFAULT_GROUP_ROWS,
        }
    }
}

impl WriteOptions {
    /// Whether these are the options of versions that had no such settings.
    pub fn is_default(&self) -> bool {
        *self == WriteOptions::default()
    }

    /// The lowest and the highest level of this codec; `None` if it has no levels.
    pub fn level_range(codec: PartCodec) -> Option<(u32, u32)> {
        match codec {
            PartCodec::Zstd => Some((1, 22)),
            PartCodec::Gzip => Some((1, 9)),
            PartCodec::Snappy | PartCodec::None => None,
        }
    }

    pub(super) fn compression(&self) -> parquet::errors::Result<Compression> {
        Ok(match self.codec {
            PartCodec::Zstd => {
                let level = self.level.unwrap_or(DEFAULT_ZSTD_LEVEL);
                Compression::ZSTD(ZstdLevel::try_new(level.cast_signed())?)
            }
            PartCodec::Gzip => Compression::GZIP(GzipLevel::try_new(self.level.unwrap_or(DEFAULT_GZIP_LEVEL))?),
            PartCodec::Snappy => Compression::SNAPPY,
            PartCodec::None => Compression::UNCOMPRESSED,
        })
    }
}
