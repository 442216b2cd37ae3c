//! Reads the bytes of a text file, decompressed if the file is compressed.
//!
//! A compressed file can only be decompressed from its start. So a decoder is kept after a read,
//! and the next read continues at its position; a read before that position begins at the file's
//! start. A worker reads its shards in order, and so decompresses a file about once.
//!
//! See docs/decisions/040-compressed-lines-are-read-forward.md.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt, stream};

use super::compression::{self, Codec, Decoder, STEP_BYTES};
use super::reader::StoredHash;
use crate::dataset::error::DatasetError;
use crate::dataset::store::pinned_file::PinnedFile;

/// Maximum number of kept decoders: one for each of the shards that are read concurrently. Each
/// holds its format's window, at most 128 MiB.
const DECODERS_MAX: usize = 4;

/// Stored bytes of the first request, which is small, since some readers need only the file's head.
const FIRST_REQUEST_BYTES: u64 = 128 << 10;

/// Maximum stored bytes of later requests.
const REQUEST_BYTES_MAX: u64 = 4 << 20;

/// A file, and its compression.
#[derive(Debug, Clone)]
pub struct TextFile {
    pub file: PinnedFile,
    pub codec: Option<Codec>,
    /// The pool of kept decoders; `None`: decoders are not kept.
    pub decoders: Option<DecoderPool>,
}

/// Decoders that reads have left at a position in their file, for reads that continue there.
#[derive(Clone, Default)]
pub struct DecoderPool {
    decoders: Arc<Mutex<VecDeque<FileDecoder>>>,
    decompressed_bytes: Arc<AtomicU64>,
}

impl std::fmt::Debug for DecoderPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DecoderPool")
    }
}

impl DecoderPool {
    /// Number of bytes decompressed so far by all decoders, including bytes before the ranges that
    /// were read.
    pub fn decompressed_bytes(&self) -> u64 {
        self.decompressed_bytes.load(Relaxed)
    }

    /// Takes the decoder of `file` with the nearest position at or before `offset`.
    fn take(&self, file: &PinnedFile, offset: u64) -> Option<FileDecoder> {
        let mut decoders = self.decoders.lock().unwrap_or_else(PoisonError::into_inner);
        let candidates = decoders
            .iter()
            .enumerate()
            .filter(|(_, decoder)| decoder.is_of(file) && decoder.offset <= offset);
        let nearest = candidates
            .max_by_key(|(_, decoder)| decoder.offset)
            .map(|(index, _)| index)?;
        decoders.remove(nearest)
    }

    fn put(&self, decoder: FileDecoder) {
        let mut decoders = self.decoders.lock().unwrap_or_else(PoisonError::into_inner);
        decoders.push_back(decoder);
        if decoders.len() > DECODERS_MAX {
            decoders.pop_front();
        }
    }
}

impl TextFile {
    /// A file whose decoders are not kept.
    pub fn new(file: PinnedFile, codec: Option<Codec>) -> TextFile {
        TextFile {
            file,
            codec,
            decoders: None,
        }
    }

    /// The compression extension of its name, if its content is not compressed.
    pub fn false_codec_extension(&self) -> Option<&str> {
        let name = self.file.location.path.filename().unwrap_or_default();
        let (_, last) = name.rsplit_once('.')?;
        let is_codec = compression::EXTENSIONS
            .iter()
            .any(|codec| last.eq_ignore_ascii_case(codec));
        (is_codec && self.codec.is_none()).then_some(last)
    }

    /// Whether its name has one of these extensions. A compression extension after it is ignored.
    pub fn has_extension(&self, extensions: &[&str]) -> bool {
        let name = self
            .file
            .location
            .path
            .filename()
            .unwrap_or_default()
            .to_ascii_lowercase();
        let inner = match name.rsplit_once('.') {
            Some((inner, last)) if compression::EXTENSIONS.contains(&last) => inner,
            _ => &name,
        };
        inner.rsplit_once('.').is_some_and(|(_, ext)| extensions.contains(&ext))
    }

    /// The first `bytes` bytes of the file.
    pub async fn read_head(&self, bytes: u64) -> Result<Bytes, DatasetError> {
        if self.codec.is_none() {
            return self.file.bytes(0..bytes.min(self.file.size)).await;
        }
        let mut head = Vec::new();
        let mut steps = self.read_range(0..bytes, None);
        while let Some(step) = steps.try_next().await? {
            head.extend_from_slice(&step);
        }
        Ok(head.into())
    }

    /// All bytes. `hash` is updated with the stored bytes.
    pub fn read_all(&self, hash: Option<StoredHash>) -> BoxStream<'static, Result<Bytes, DatasetError>> {
        let end = self.codec.map_or(self.file.size, |_| u64::MAX);
        self.read_range(0..end, hash)
    }

    /// The bytes of `range`, or fewer at the end of the file.
    pub fn read_range(
        &self,
        range: Range<u64>,
        hash: Option<StoredHash>,
    ) -> BoxStream<'static, Result<Bytes, DatasetError>> {
        let Some(codec) = self.codec else {
            return stored_range(self.file.clone(), range, hash);
        };
        let (file, pool) = (self.file.clone(), self.decoders.clone());
        let opened = async move {
            let decoder = match pool.as_ref().and_then(|pool| pool.take(&file, range.start)) {
                Some(decoder) => decoder,
                None => FileDecoder::open(file, codec, hash)?,
            };
            Ok::<_, DatasetError>(decoder.range(range, pool))
        };
        stream::once(opened).try_flatten().boxed()
    }
}

/// The stored bytes of `range`.
fn stored_range(
    file: PinnedFile,
    range: Range<u64>,
    hash: Option<StoredHash>,
) -> BoxStream<'static, Result<Bytes, DatasetError>> {
    stream::once(async move { file.stream(range).await })
        .try_flatten()
        .inspect_ok(move |bytes| {
            if let Some(hash) = &hash {
                hash.add(bytes);
            }
        })
        .boxed()
}

/// A file during decompression.
struct FileDecoder {
    file: PinnedFile,
    /// Hash of the stored bytes.
    hash: Option<StoredHash>,
    /// Number of stored bytes read so far.
    stored_offset: u64,
    /// Stored bytes that are not decompressed yet.
    input: Bytes,
    /// `None` after a failed step.
    decoder: Option<Decoder>,
    /// Whether the decoder may have more output without more input.
    may_have_output: bool,
    /// Decompressed bytes that are not returned yet.
    output: Bytes,
    /// Offset of `output` in the decompressed file.
    offset: u64,
}

impl FileDecoder {
    fn open(file: PinnedFile, codec: Codec, hash: Option<StoredHash>) -> Result<FileDecoder, DatasetError> {
        let decoder = Decoder::new(codec).map_err(|why| DatasetError::unreadable(&file.name, why))?;
        Ok(FileDecoder {
            file,
            hash,
            stored_offset: 0,
            input: Bytes::new(),
            decoder: Some(decoder),
            may_have_output: false,
            output: Bytes::new(),
            offset: 0,
        })
    }

    /// Whether it decompresses this file in this state.
    fn is_of(&self, file: &PinnedFile) -> bool {
        let own = &self.file;
        own.location.url == file.location.url
            && (&own.etag, &own.version, own.size) == (&file.etag, &file.version, file.size)
    }

    /// Returns the next decompressed bytes; empty at the end of the file. Their number is added to
    /// the pool's count.
    async fn next(&mut self, pool: Option<&DecoderPool>) -> Result<Bytes, DatasetError> {
        let name = self.file.name.clone();
        let unreadable = |why: String| DatasetError::unreadable(&name, why);
        while self.output.is_empty() {
            let mut decoder = self
                .decoder
                .take()
                .ok_or_else(|| unreadable("an earlier part of it could not be decompressed".into()))?;
            if self.input.is_empty() && !self.may_have_output {
                if self.stored_offset == self.file.size {
                    decoder.finish().map_err(unreadable)?;
                    self.decoder = Some(decoder);
                    return Ok(Bytes::new());
                }
                // The file is read by separate requests, since a server would close a connection
                // that waits for the next shard.
                let length = self.stored_offset.clamp(FIRST_REQUEST_BYTES, REQUEST_BYTES_MAX);
                let end = self.file.size.min(self.stored_offset + length);
                self.input = self.file.bytes(self.stored_offset..end).await?;
                self.stored_offset = end;
                if let Some(hash) = &self.hash {
                    hash.add(&self.input);
                }
            }
            // Decompression runs on a blocking thread; the decoder is moved there and back.
            let mut input = std::mem::take(&mut self.input);
            let step = tokio::task::spawn_blocking(move || {
                let output = decoder.step(&mut input);
                (decoder, input, output)
            });
            let (decoder, input, output) = step.await.map_err(|e| unreadable(e.to_string()))?;
            self.output = output.map_err(unreadable)?;
            self.may_have_output = self.output.len() == STEP_BYTES;
            if let Some(pool) = pool {
                pool.decompressed_bytes.fetch_add(self.output.len() as u64, Relaxed);
            }
            (self.decoder, self.input) = (Some(decoder), input);
        }
        let bytes = std::mem::take(&mut self.output);
        self.offset += bytes.len() as u64;
        Ok(bytes)
    }

    /// The bytes of `range`, which must not begin before the current position. After the last byte,
    /// the decoder goes to the pool, for reads that continue there.
    fn range(self, range: Range<u64>, pool: Option<DecoderPool>) -> BoxStream<'static, Result<Bytes, DatasetError>> {
        let steps = stream::try_unfold(self, move |mut decoder| {
            let (range, pool) = (range.clone(), pool.clone());
            async move {
                loop {
                    if decoder.offset >= range.end {
                        if let Some(pool) = pool {
                            pool.put(decoder);
                        }
                        return Ok(None);
                    }
                    let start = decoder.offset;
                    let mut bytes = decoder.next(pool.as_ref()).await?;
                    if bytes.is_empty() {
                        return Ok(None);
                    }
                    if decoder.offset > range.end {
                        decoder.output = bytes.split_off((range.end - start) as usize);
                        decoder.offset = range.end;
                    }
                    let skipped = range.start.saturating_sub(start).min(bytes.len() as u64);
                    let bytes = bytes.split_off(skipped as usize);
                    if !bytes.is_empty() {
                        return Ok(Some((bytes, decoder)));
                    }
                }
            }
        });
        steps.boxed()
    }
}
