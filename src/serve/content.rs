//! Writes the content of a file to the store while it arrives, in bounded memory.

use bytes::Bytes;
use object_store::{ObjectStoreExt, WriteMultipart};

use super::error::{ApiError, ApiResult};
use crate::dataset::store::location::Location;
use crate::error_line::one_line;

/// Maximum size of a file.
pub(super) const FILE_BYTES_MAX: u64 = 8 << 30;
/// Size of the pieces that are sent to the store.
const PIECE_BYTES: usize = 8 << 20;
/// Number of pieces in flight to the store. Bounds the memory of an upload.
const PIECES_AHEAD: usize = 2;

/// A file that is being written. There is no object until it is [finished](ContentWriter::finish).
pub(super) struct ContentWriter {
    writer: WriteMultipart,
    bytes: u64,
    bytes_max: u64,
}

impl ContentWriter {
    /// Begins to write `content`, which may have at most `bytes_max` bytes.
    pub(super) async fn begin(content: &Location, bytes_max: u64) -> ApiResult<ContentWriter> {
        let upload = content.store.put_multipart(&content.path).await.map_err(store_error)?;
        Ok(ContentWriter {
            writer: WriteMultipart::new_with_chunk_size(upload, PIECE_BYTES),
            bytes: 0,
            bytes_max,
        })
    }

    /// Adds bytes; waits while too many are in flight.
    pub(super) async fn write(&mut self, chunk: Bytes) -> ApiResult<()> {
        self.bytes += chunk.len() as u64;
        if self.bytes > self.bytes_max {
            return Err(ApiError::too_large(self.bytes_max));
        }
        self.writer.wait_for_capacity(PIECES_AHEAD).await.map_err(store_error)?;
        self.writer.put(chunk);
        Ok(())
    }

    /// Makes the object, and returns its size.
    pub(super) async fn finish(self) -> ApiResult<u64> {
        self.writer.finish().await.map_err(store_error)?;
        Ok(self.bytes)
    }

    /// Gives the file up. What the store could not remove is logged.
    pub(super) async fn abort(self) {
        if let Err(left) = self.writer.abort().await {
            tracing::warn!("parts of a refused upload are left: {}", one_line(&left.into()));
        }
    }
}

/// Removes the content of a refused upload. The client's error matters more than one of this.
pub(super) async fn discard(content: &Location) {
    match content.store.delete(&content.path).await {
        Ok(()) | Err(object_store::Error::NotFound { .. }) => {}
        Err(error) => tracing::warn!(
            "a refused upload is left at `{}`: {}",
            content.url,
            one_line(&error.into())
        ),
    }
}

/// The details of a store's error go to the log: they may name buckets and paths.
pub(super) fn store_error(error: object_store::Error) -> ApiError {
    tracing::warn!("a file could not be written or read: {}", one_line(&error.into()));
    ApiError::unavailable()
}
