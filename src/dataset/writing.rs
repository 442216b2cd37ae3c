//! How a part is written: compression, and rows per row group.

use parquet::basic::{Compression, GzipLevel, ZstdLevel};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Default maximum rows per row group: small enough for parallel reads, large enough to compress
/// well.
const GROUP_ROWS: u32 = 65_536;
/// Default level of zstd.
const ZSTD_LEVEL: u32 = 3;
/// Default level of gzip, as in other tools.
const GZIP_LEVEL: u32 = 6;

/// What pages are compressed with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Codec {
    #[default]
    Zstd,
    Snappy,
    Gzip,
    None,
}

/// How a part is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Writing {
    pub codec: Codec,
    /// `None`: the codec's default level.
    pub level: Option<u32>,
    /// Maximum rows per row group.
    pub group_rows: u32,
}

impl Default for Writing {
    fn default() -> Self {
        Writing {
            codec: Codec::default(),
            level: None,
            group_rows: GROUP_ROWS,
        }
    }
}

impl Writing {
    /// Whether this is how a gristmill without these settings writes.
    pub fn is_default(&self) -> bool {
        *self == Writing::default()
    }

    /// The levels of this codec; `None` if it has none.
    pub fn levels(codec: Codec) -> Option<(u32, u32)> {
        match codec {
            Codec::Zstd => Some((1, 22)),
            Codec::Gzip => Some((1, 9)),
            Codec::Snappy | Codec::None => None,
        }
    }

    pub(super) fn compression(&self) -> parquet::errors::Result<Compression> {
        Ok(match self.codec {
            Codec::Zstd => {
                let level = self.level.unwrap_or(ZSTD_LEVEL);
                Compression::ZSTD(ZstdLevel::try_new(level.cast_signed())?)
            }
            Codec::Gzip => Compression::GZIP(GzipLevel::try_new(self.level.unwrap_or(GZIP_LEVEL))?),
            Codec::Snappy => Compression::SNAPPY,
            Codec::None => Compression::UNCOMPRESSED,
        })
    }
}
