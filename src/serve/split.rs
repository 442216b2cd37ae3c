//! Splits the input of a batch that keeps its good lines: requests go to the input of its job, the
//! others become lines of its error file.

use bytes::{BufMut, BytesMut};
use data_encoding::HEXLOWER;
use object_store::ObjectStore;
use object_store::buffered::BufWriter;
use serde_json::json;
use sha2::{Digest, Sha256};
use std::sync::Arc;
use tokio::io::AsyncWriteExt;

use super::record::{BatchError, RefusedLines};
use crate::dataset::store::location::Location;

/// Bytes that are collected before they are written.
const BUFFER_BYTES: usize = 1 << 20;

/// The two files of a split. Nothing is visible before [`InputSplit::finish`]. Whoever checks the same
/// input again writes the same bytes.
pub(super) struct InputSplit {
    batch: String,
    good: SplitFile,
    refused: SplitFile,
    refused_lines: u64,
}

impl InputSplit {
    pub(super) fn new(batch: &str, good: &Location, refused: &Location) -> InputSplit {
        InputSplit {
            batch: batch.to_string(),
            good: SplitFile::new(good),
            refused: SplitFile::new(refused),
            refused_lines: 0,
        }
    }

    /// Adds a request, as the client wrote it.
    pub(super) fn keep(&mut self, line: &[u8]) {
        self.good.push(line);
    }

    /// Adds the error of a line that is no request. `custom_id`: what the line has, if it is a text.
    pub(super) fn refuse(&mut self, custom_id: Option<&str>, error: &BatchError) {
        self.refused_lines += 1;
        let line = error.line.unwrap_or_default();
        let id = &HEXLOWER.encode(&Sha256::digest(format!("{} {line}", self.batch)))[..32];
        let message = format!("line {line} of the input: {}", error.message);
        let body = json!({"error": {
            "message": message, "type": "invalid_request_error", "param": error.param, "code": error.code,
        }});
        let result = json!({
            "id": format!("batch_req_{id}"),
            "custom_id": custom_id,
            "response": {"status_code": 400, "request_id": format!("req_{id}"), "body": body},
            "error": null,
        });
        self.refused.push(result.to_string().as_bytes());
    }

    /// Writes what has been collected, once it is worth a write.
    pub(super) async fn flush(&mut self) -> anyhow::Result<()> {
        self.good.flush(BUFFER_BYTES).await?;
        self.refused.flush(BUFFER_BYTES).await
    }

    /// Makes both files; `None`: every line is a request, and there are no files.
    pub(super) async fn finish(mut self) -> anyhow::Result<Option<RefusedLines>> {
        if self.refused_lines == 0 {
            self.abort().await?;
            return Ok(None);
        }
        self.good.finish().await?;
        self.refused.finish().await?;
        Ok(Some(RefusedLines {
            lines: self.refused_lines,
            bytes: self.refused.bytes,
        }))
    }

    /// Gives both files up.
    pub(super) async fn abort(mut self) -> anyhow::Result<()> {
        self.good.writer.abort().await?;
        Ok(self.refused.writer.abort().await?)
    }
}

/// A file that is being written.
struct SplitFile {
    buffer: BytesMut,
    writer: BufWriter,
    /// Bytes so far, with those in the buffer.
    bytes: u64,
}

impl SplitFile {
    fn new(place: &Location) -> SplitFile {
        let store: Arc<dyn ObjectStore> = place.store.clone();
        SplitFile {
            buffer: BytesMut::new(),
            writer: BufWriter::new(store, place.path.clone()),
            bytes: 0,
        }
    }

    fn push(&mut self, line: &[u8]) {
        self.buffer.put_slice(line);
        self.buffer.put_u8(b'\n');
        self.bytes += line.len() as u64 + 1;
    }

    async fn flush(&mut self, bytes_min: usize) -> anyhow::Result<()> {
        if self.buffer.len() >= bytes_min {
            self.writer.write_all(&self.buffer).await?;
            self.buffer.clear();
        }
        Ok(())
    }

    async fn finish(&mut self) -> anyhow::Result<()> {
        self.flush(1).await?;
        Ok(self.writer.shutdown().await?)
    }
}
