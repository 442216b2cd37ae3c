//! Reads one version of an object, usually the planned version of an input: every request carries
//! its ETag or version id, and every response is compared with them.

use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path as FsPath;

use bytes::Bytes;
use data_encoding::HEXLOWER;
use futures::future::try_join_all;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::{GetOptions, GetResult, GetResultPayload, ObjectMeta, ObjectStoreExt};
use sha2::{Digest, Sha256};
use url::{Position, Url};

use super::location::Location;
use crate::dataset::error::DatasetError;
use crate::dataset::plan::InputFile;

/// Bytes per step when a local file is streamed.
const LOCAL_STEP_BYTES: u64 = 1 << 20;

/// Ranges separated by smaller gaps are fetched with one request.
const GAP_BYTES: u64 = 1 << 20;

/// If more than [`REQUESTS_TARGET`] requests would remain, gaps up to this size are read as well.
const GAP_BYTES_MAX: u64 = 8 << 20;

/// Target for the number of requests of one read.
const REQUESTS_TARGET: usize = 2;

/// The ETag and version id by which the states of an object are told apart.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct FileVersion {
    pub etag: Option<String>,
    pub version: Option<String>,
}

impl FileVersion {
    /// The version that a store's response describes. If the store gives no ETag, a weak ETag made
    /// of `Last-Modified` replaces it.
    pub fn of(meta: &ObjectMeta) -> FileVersion {
        FileVersion {
            etag: meta.e_tag.clone().or_else(|| time_etag(meta)),
            version: meta.version.clone(),
        }
    }

    /// Whether there is neither an ETag nor a version id, so that a change goes unnoticed.
    pub fn is_blank(&self) -> bool {
        self.etag.is_none() && self.version.is_none()
    }
}

/// Prefix of an ETag made of `Last-Modified`.
const TIME_ETAG_PREFIX: &str = "W/\"modified-";

fn time_etag(meta: &ObjectMeta) -> Option<String> {
    let seconds = meta.last_modified.timestamp();
    (seconds != 0).then(|| format!("{TIME_ETAG_PREFIX}{seconds}\""))
}

/// The ETag of a response if it differs from the planned one. Servers may omit the ETag in some
/// responses.
fn differing_etag(planned: &str, meta: &ObjectMeta) -> Option<String> {
    let found = if planned.starts_with(TIME_ETAG_PREFIX) {
        time_etag(meta)
    } else {
        meta.e_tag.clone()
    };
    found.filter(|found| found != planned)
}

/// The hash in lower-case hex.
pub(crate) fn hex(hasher: Sha256) -> String {
    HEXLOWER.encode(&hasher.finalize())
}

/// One version of an object.
#[derive(Debug, Clone)]
pub struct PinnedFile {
    pub location: Location,
    pub size: u64,
    pub etag: Option<String>,
    pub version: Option<String>,
    /// The name used in messages: a local path, or the URL.
    pub name: String,
}

impl PinnedFile {
    /// The planned version of an input. Sends no request.
    pub fn open(file: &InputFile) -> Result<PinnedFile, DatasetError> {
        Ok(PinnedFile {
            location: Location::parse(&file.url, FsPath::new("/"))?,
            size: file.size,
            etag: file.etag.clone(),
            version: file.version.clone(),
            name: display_name(&file.url),
        })
    }

    /// Reads exactly `range`.
    pub async fn bytes(&self, range: Range<u64>) -> Result<Bytes, DatasetError> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let wanted = range.end - range.start;
        let result = self.get(range).await?;
        let bytes = result.bytes().await.map_err(|e| self.store_error(e))?;
        if bytes.len() as u64 != wanted {
            return Err(self.changed(format!("{} bytes came where {wanted} were asked for", bytes.len())));
        }
        Ok(bytes)
    }

    /// Reads several ranges, combining near ones into one request; returns them in the given order.
    pub async fn ranges(&self, ranges: &[Range<u64>]) -> Result<Vec<Bytes>, DatasetError> {
        let fetched = coalesce(ranges);
        let bodies = try_join_all(fetched.iter().map(|range| self.bytes(range.clone()))).await?;
        ranges
            .iter()
            .map(|range| {
                let index = fetched.partition_point(|f| f.start <= range.start).saturating_sub(1);
                match (fetched.get(index), bodies.get(index)) {
                    (Some(f), Some(body))
                        if f.start <= range.start && range.end <= f.end && range.start <= range.end =>
                    {
                        Ok(body.slice((range.start - f.start) as usize..(range.end - f.start) as usize))
                    }
                    _ => Err(DatasetError::unreadable(
                        &self.name,
                        format!("it refers to the invalid byte range {range:?}"),
                    )),
                }
            })
            .collect()
    }

    /// Streams `range` with one request.
    pub async fn stream(
        &self,
        range: Range<u64>,
    ) -> Result<BoxStream<'static, Result<Bytes, DatasetError>>, DatasetError> {
        if range.is_empty() {
            return Ok(stream::empty().boxed());
        }
        let result = self.get(range.clone()).await?;
        let this = self.clone();
        match result.payload {
            GetResultPayload::Stream(body) => Ok(body.map_err(move |e| this.store_error(e)).boxed()),
            GetResultPayload::File(file, _) => {
                let steps = stream::try_unfold((file, range.start), move |(file, offset)| {
                    let (this, end) = (this.clone(), range.end);
                    async move {
                        let step = LOCAL_STEP_BYTES.min(end - offset);
                        if step == 0 {
                            return Ok(None);
                        }
                        let read = tokio::task::spawn_blocking(move || read_at(file, offset, step)).await;
                        match read {
                            Ok(Ok((file, bytes))) => Ok(Some((bytes, (file, offset + step)))),
                            Ok(Err(e)) => Err(this.changed(e.to_string())),
                            Err(e) => Err(DatasetError::unreadable(&this.name, e)),
                        }
                    }
                });
                Ok(steps.boxed())
            }
        }
    }

    /// Another version of the same object.
    pub fn with_version(&self, version: FileVersion) -> PinnedFile {
        PinnedFile {
            etag: version.etag,
            version: version.version,
            ..self.clone()
        }
    }

    /// The current version of the object. Fails if the size alone shows that the object has
    /// changed.
    pub async fn current_version(&self) -> Result<FileVersion, DatasetError> {
        self.check_regular().await?;
        let meta = self.location.store.head(&self.location.path).await;
        let meta = meta.map_err(|e| self.store_error(e))?;
        if meta.size == self.size {
            Ok(FileVersion::of(&meta))
        } else {
            Err(self.changed(format!("it had {} bytes and has {}", self.size, meta.size)))
        }
    }

    /// SHA-256 of all bytes of this version, in lower-case hex.
    pub async fn sha256(&self) -> Result<String, DatasetError> {
        let mut hasher = Sha256::new();
        let mut bytes = self.stream(0..self.size).await?;
        let mut read = 0;
        while let Some(piece) = bytes.try_next().await? {
            hasher.update(&piece);
            read += piece.len() as u64;
        }
        if read == self.size {
            Ok(hex(hasher))
        } else {
            Err(self.changed(format!("{read} bytes came where it has {}", self.size)))
        }
    }

    async fn get(&self, range: Range<u64>) -> Result<GetResult, DatasetError> {
        // A weak ETag never matches an If-Match (RFC 9110, 13.1.1), so it is compared with the
        // response's ETag instead.
        let strong = self.etag.clone().filter(|tag| !tag.starts_with("W/"));
        let options = GetOptions {
            range: Some(range.into()),
            if_match: strong,
            version: self.version.clone(),
            ..GetOptions::default()
        };
        self.check_regular().await?;
        let result = self
            .location
            .store
            .get_opts(&self.location.path, options)
            .await
            .map_err(|e| self.store_error(e))?;
        if result.meta.size != self.size {
            return Err(self.changed(format!("it had {} bytes and has {}", self.size, result.meta.size)));
        }
        match &self.etag {
            Some(planned) if let Some(found) = differing_etag(planned, &result.meta) => {
                Err(self.changed(format!("its ETag was {planned} and is {found}")))
            }
            _ => Ok(result),
        }
    }

    /// Refuses a pipe that has replaced a local file: opening it would block.
    async fn check_regular(&self) -> Result<(), DatasetError> {
        let Some(path) = self.location.local_path() else {
            return Ok(());
        };
        // A missing file is reported by the store.
        match tokio::fs::metadata(path).await {
            Ok(meta) => crate::regular::check_is_regular(meta.file_type()).map_err(|why| self.changed(why.to_string())),
            Err(_) => Ok(()),
        }
    }

    pub(crate) fn changed(&self, why: String) -> DatasetError {
        DatasetError::InputChanged {
            file: self.name.clone(),
            why,
        }
    }

    fn store_error(&self, source: object_store::Error) -> DatasetError {
        match source {
            object_store::Error::NotFound { .. } => DatasetError::InputMissing {
                file: self.name.clone(),
            },
            object_store::Error::Precondition { .. } => self.changed("its ETag differs".into()),
            source => DatasetError::store(&self.name, source),
        }
    }
}

fn read_at(mut file: std::fs::File, offset: u64, bytes: u64) -> std::io::Result<(std::fs::File, Bytes)> {
    file.seek(SeekFrom::Start(offset))?;
    let mut buffer = vec![0; bytes as usize];
    file.read_exact(&mut buffer)?;
    Ok((file, buffer.into()))
}

/// The path of a `file://` URL; any other URL without credentials and query.
pub fn display_name(url: &str) -> String {
    let Ok(parsed) = Url::parse(url) else {
        return url.to_string();
    };
    if parsed.scheme() == "file" {
        return parsed
            .to_file_path()
            .map_or(url.to_string(), |path| path.display().to_string());
    }
    let host = &parsed[Position::BeforeHost..Position::AfterPort];
    format!("{}://{host}{}", parsed.scheme(), parsed.path())
}

/// A few sorted, disjoint ranges that cover `ranges`.
fn coalesce(ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut sorted: Vec<_> = ranges.iter().filter(|r| r.start < r.end).cloned().collect();
    sorted.sort_by_key(|r| (r.start, r.end));
    let merged = merge(sorted, GAP_BYTES);
    if merged.len() <= REQUESTS_TARGET {
        merged
    } else {
        merge(merged, GAP_BYTES_MAX)
    }
}

fn merge(sorted: Vec<Range<u64>>, gap_bytes: u64) -> Vec<Range<u64>> {
    let mut out: Vec<Range<u64>> = Vec::new();
    for range in sorted {
        match out.last_mut() {
            Some(last) if range.start <= last.end.saturating_add(gap_bytes) => last.end = last.end.max(range.end),
            _ => out.push(range),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_ranges_become_one_request() {
        let mib = 1 << 20;
        assert_eq!(coalesce(&[10..20, 0..5, 20..20]), vec![0..20]);
        assert_eq!(coalesce(&[0..1, 4 * mib..5 * mib]), vec![0..1, 4 * mib..5 * mib]);
        let three = [0..1, 4 * mib..5 * mib, 9 * mib..10 * mib];
        assert_eq!(
            coalesce(&three),
            vec![0..10 * mib],
            "gaps that cost less than a third request are read"
        );
        let far = [0..1, 100 * mib..101 * mib, 300 * mib..301 * mib];
        assert_eq!(coalesce(&far).len(), 3);
    }

    #[test]
    fn names_show_no_secrets() {
        assert_eq!(display_name("file:///a/b%20c.parquet"), "/a/b c.parquet");
        assert_eq!(display_name("https://u:p@h/x.jsonl?sig=1"), "https://h/x.jsonl");
        assert_eq!(display_name("s3://b/k"), "s3://b/k");
    }

    #[tokio::test]
    async fn a_changed_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("in put.jsonl");
        std::fs::write(&path, b"0123456789").unwrap();
        let location = Location::parse(path.to_str().unwrap(), FsPath::new("/")).unwrap();
        let meta = object_store::ObjectStoreExt::head(location.store.as_ref(), &location.path)
            .await
            .unwrap();
        let file = InputFile {
            url: location.url.to_string(),
            format: crate::dataset::plan::Format::Jsonl,
            size: 10,
            etag: meta.e_tag,
            version: None,
            sha256: None,
            compressed: None,
            partition: Vec::new(),
            rows: 1,
        };
        let pinned = PinnedFile::open(&file).unwrap();
        assert_eq!(&pinned.bytes(2..5).await.unwrap()[..], b"234");
        let parts = pinned.ranges(&[8..10, 0..1]).await.unwrap();
        assert_eq!((&parts[0][..], &parts[1][..]), (&b"89"[..], &b"0"[..]));
        let streamed: Vec<Bytes> = pinned.stream(1..9).await.unwrap().try_collect().await.unwrap();
        assert_eq!(streamed.concat(), b"12345678");
        std::fs::write(&path, b"0123456780").unwrap();
        let touched = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
        std::fs::File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_modified(touched)
            .unwrap();
        let error = pinned.bytes(0..1).await.unwrap_err();
        assert!(
            matches!(&error, DatasetError::InputChanged { file, .. } if file.ends_with("in put.jsonl")),
            "{error}"
        );
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(
            pinned.bytes(0..1).await,
            Err(DatasetError::InputMissing { .. })
        ));
        crate::regular::make_pipe(&path);
        for error in [
            pinned.bytes(0..1).await.unwrap_err(),
            pinned.current_version().await.unwrap_err(),
        ] {
            assert!(error.to_string().contains("a pipe"), "{error}");
        }
    }
}
