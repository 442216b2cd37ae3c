//! The bytes of a text file, decompressed if the file is compressed.
//!
//! A compressed file can only be read from its start. So the decoder is kept between reads and
//! continues from its position; a read before that position starts again. A worker reads its shards
//! in order, and so decompresses a file about once.
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
use super::reader::LinesHash;
use crate::dataset::error::DatasetError;
use crate::dataset::store::pinned::PinnedFile;

/// Maximum number of kept decoders, which is the number of shards read concurrently. Each holds its
/// format's window, at most 128 MiB.
const KEPT_MAX: usize = 4;

/// Stored bytes per request (first, maximum): the first is small, since some readers need only the
/// file's head.
const STORED_STEP_BYTES: (u64, u64) = (128 << 10, 4 << 20);

/// A file, and its compression.
#[derive(Debug, Clone)]
pub struct TextFile {
    pub file: PinnedFile,
    pub codec: Option<Codec>,
    /// The pool of kept decoders; `None`: decoders are not kept.
    pub kept: Option<Kept>,
}

/// Decoders at positions in their files, for reads that continue there.
#[derive(Clone, Default)]
pub struct Kept {
    decoders: Arc<Mutex<VecDeque<Unpacking>>>,
    /// Bytes decompressed so far by all decoders.
    made: Arc<AtomicU64>,
}

impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Kept")
    }
}

impl Kept {
    /// Bytes decompressed so far by all decoders, including skipped ones.
    pub fn made(&self) -> u64 {
        self.made.load(Relaxed)
    }

    /// Takes the decoder of `file` with the nearest position at or before `place`.
    fn take(&self, file: &PinnedFile, place: u64) -> Option<Unpacking> {
        let mut kept = self.decoders.lock().unwrap_or_else(PoisonError::into_inner);
        let fitting = kept
            .iter()
            .enumerate()
            .filter(|(_, one)| one.is_of(file) && one.at <= place);
        let nearest = fitting.max_by_key(|(_, one)| one.at).map(|(n, _)| n)?;
        kept.remove(nearest)
    }

    fn put(&self, one: Unpacking) {
        let mut kept = self.decoders.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push_back(one);
        if kept.len() > KEPT_MAX {
            kept.pop_front();
        }
    }
}

impl TextFile {
    /// A file that is read on its own, without kept decoders.
    pub fn new(file: PinnedFile, codec: Option<Codec>) -> TextFile {
        TextFile {
            file,
            codec,
            kept: None,
        }
    }

    /// The compression extension in its name, if it is not detected as compressed.
    pub fn named_codec(&self) -> Option<&str> {
        let name = self.file.location.path.filename().unwrap_or_default();
        let (_, last) = name.rsplit_once('.')?;
        let is_codec = compression::EXTENSIONS
            .iter()
            .any(|codec| last.eq_ignore_ascii_case(codec));
        (is_codec && self.codec.is_none()).then_some(last)
    }

    /// Whether its name has one of these extensions, before any compression extension.
    pub fn is_named(&self, extensions: &[&str]) -> bool {
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
    pub async fn head(&self, bytes: u64) -> Result<Bytes, DatasetError> {
        if self.codec.is_none() {
            return self.file.bytes(0..bytes.min(self.file.size)).await;
        }
        let mut head = Vec::new();
        let mut steps = self.range(0..bytes, None);
        while let Some(step) = steps.try_next().await? {
            head.extend_from_slice(&step);
        }
        Ok(head.into())
    }

    /// All bytes; `hash` receives the stored bytes.
    pub fn all(&self, hash: Option<LinesHash>) -> BoxStream<'static, Result<Bytes, DatasetError>> {
        let end = self.codec.map_or(self.file.size, |_| u64::MAX);
        self.range(0..end, hash)
    }

    /// The bytes of `range`, or fewer at the end of the file.
    pub fn range(&self, range: Range<u64>, hash: Option<LinesHash>) -> BoxStream<'static, Result<Bytes, DatasetError>> {
        let Some(codec) = self.codec else {
            return stored(self.file.clone(), range, hash);
        };
        let (file, kept) = (self.file.clone(), self.kept.clone());
        let opened = async move {
            let unpacking = match kept.as_ref().and_then(|kept| kept.take(&file, range.start)) {
                Some(unpacking) => unpacking,
                None => Unpacking::open(file, codec, hash)?,
            };
            Ok::<_, DatasetError>(unpacking.range(range, kept))
        };
        stream::once(opened).try_flatten().boxed()
    }
}

/// The stored bytes of `range`.
fn stored(
    file: PinnedFile,
    range: Range<u64>,
    hash: Option<LinesHash>,
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
struct Unpacking {
    file: PinnedFile,
    /// Hash of the stored bytes.
    hash: Option<LinesHash>,
    /// Number of stored bytes read so far.
    read: u64,
    /// Stored bytes that are not decompressed yet.
    input: Bytes,
    /// `None` after a failed step.
    decoder: Option<Decoder>,
    /// Whether the decoder may hold more output.
    is_full: bool,
    /// Decompressed bytes that are not returned yet.
    rest: Bytes,
    /// Offset of `rest` in the decompressed file.
    at: u64,
}

impl Unpacking {
    fn open(file: PinnedFile, codec: Codec, hash: Option<LinesHash>) -> Result<Unpacking, DatasetError> {
        let decoder = Decoder::new(codec).map_err(|why| DatasetError::unreadable(&file.name, why))?;
        Ok(Unpacking {
            file,
            hash,
            read: 0,
            input: Bytes::new(),
            decoder: Some(decoder),
            is_full: false,
            rest: Bytes::new(),
            at: 0,
        })
    }

    fn is_of(&self, file: &PinnedFile) -> bool {
        let ours = &self.file;
        ours.location.url == file.location.url
            && (&ours.etag, &ours.version, ours.size) == (&file.etag, &file.version, file.size)
    }

    /// Returns the next bytes; empty at the end.
    async fn next(&mut self, kept: Option<&Kept>) -> Result<Bytes, DatasetError> {
        let name = self.file.name.clone();
        let unreadable = |why: String| DatasetError::unreadable(&name, why);
        while self.rest.is_empty() {
            let mut decoder = self
                .decoder
                .take()
                .ok_or_else(|| unreadable("a part of it could not be".into()))?;
            if self.input.is_empty() && !self.is_full {
                if self.read == self.file.size {
                    decoder.finish().map_err(unreadable)?;
                    self.decoder = Some(decoder);
                    return Ok(Bytes::new());
                }
                // Each step is a separate request, since a server would close a connection that
                // waits for the next shard.
                let length = self.read.clamp(STORED_STEP_BYTES.0, STORED_STEP_BYTES.1);
                let step = self.read..self.file.size.min(self.read + length);
                self.input = self.file.bytes(step.clone()).await?;
                self.read = step.end;
                if let Some(hash) = &self.hash {
                    hash.add(&self.input);
                }
            }
            // Decompression runs on a blocking thread; the decoder is moved there and back.
            let mut input = std::mem::take(&mut self.input);
            let step = tokio::task::spawn_blocking(move || {
                let made = decoder.step(&mut input);
                (decoder, input, made)
            });
            let (decoder, input, made) = step.await.map_err(|e| unreadable(e.to_string()))?;
            self.rest = made.map_err(unreadable)?;
            self.is_full = self.rest.len() == STEP_BYTES;
            if let Some(kept) = kept {
                kept.made.fetch_add(self.rest.len() as u64, Relaxed);
            }
            (self.decoder, self.input) = (Some(decoder), input);
        }
        let bytes = std::mem::take(&mut self.rest);
        self.at += bytes.len() as u64;
        Ok(bytes)
    }

    /// The bytes of `range`, which must not begin before the current position. Afterwards the
    /// decoder is kept for reads that continue there.
    fn range(self, range: Range<u64>, kept: Option<Kept>) -> BoxStream<'static, Result<Bytes, DatasetError>> {
        let steps = stream::try_unfold(Some(self), move |unpacking| {
            let (range, kept) = (range.clone(), kept.clone());
            async move {
                let Some(mut unpacking) = unpacking else {
                    return Ok(None);
                };
                loop {
                    if unpacking.at >= range.end {
                        if let Some(kept) = kept {
                            kept.put(unpacking);
                        }
                        return Ok(None);
                    }
                    let start = unpacking.at;
                    let mut bytes = unpacking.next(kept.as_ref()).await?;
                    if bytes.is_empty() {
                        return Ok(None);
                    }
                    if unpacking.at > range.end {
                        unpacking.rest = bytes.split_off((range.end - start) as usize);
                        unpacking.at = range.end;
                    }
                    let before = range.start.saturating_sub(start).min(bytes.len() as u64);
                    let bytes = bytes.split_off(before as usize);
                    if !bytes.is_empty() {
                        return Ok(Some((bytes, Some(unpacking))));
                    }
                }
            }
        });
        steps.boxed()
    }
}
