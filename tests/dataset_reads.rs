//! How many bytes workers read of an input whose row groups are far larger than a shard.

use std::fmt;
use std::path::Path as FsPath;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use async_trait::async_trait;
use futures::stream::BoxStream;
use gristmill::dataset::parquet::reader::ParquetFile;
use gristmill::dataset::store::location::Location;
use gristmill::dataset::store::pinned_file::PinnedFile;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt,
    PutMultipartOptions, PutOptions, PutPayload, PutResult,
};

use crate::support::{Run, arg, python};

/// Rows of a shard; the file has groups of 300,000, as pyarrow's default of 1,048,576 is to shards of 14,000.
const SHARD_ROWS: u64 = 4096;

/// Counts what is read.
#[derive(Debug)]
struct Counting {
    inner: Arc<dyn ObjectStore>,
    bytes: AtomicU64,
    requests: AtomicU64,
}

impl fmt::Display for Counting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "counting {}", self.inner)
    }
}

#[async_trait]
impl ObjectStore for Counting {
    async fn put_opts(&self, path: &Path, payload: PutPayload, options: PutOptions) -> object_store::Result<PutResult> {
        self.inner.put_opts(path, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(path, options).await
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> object_store::Result<GetResult> {
        let result = self.inner.get_opts(path, options).await?;
        self.bytes.fetch_add(result.range.end - result.range.start, Relaxed);
        self.requests.fetch_add(1, Relaxed);
        Ok(result)
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        self.inner.delete_stream(paths)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> object_store::Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

const WRITE: &str = r#"
import sys, random, pyarrow as pa, pyarrow.parquet as pq
random.seed(1)
group = int(sys.argv[2])
rows = 2 * group
text = [random.randbytes(random.randint(30, 90)).hex() for _ in range(rows)]
table = pa.table({"id": list(range(rows)), "label": [n % 7 for n in range(rows)], "text": text})
for index in (False, True):
    pq.write_table(table, f"{sys.argv[1]}/{index}.parquet", row_group_size=group, write_page_index=index)
"#;

/// Rows of each of the two row groups: pyarrow's own million by `GRISTMILL_READS_GROUP_ROWS=1000000`, less in every CI.
fn group_rows() -> u64 {
    std::env::var("GRISTMILL_READS_GROUP_ROWS").map_or(300_000, |rows| rows.parse().expect("a number of rows"))
}

/// Which shards each worker reads, in its order: runs of neighbours, `runs` of them for each worker, dealt in turn.
fn dealt(shards: u64, workers: u64, runs: u64) -> Vec<Vec<u64>> {
    let parts = workers * runs;
    let mut dealt = vec![Vec::new(); workers as usize];
    for shard in 0..shards {
        dealt[(shard * parts / shards % workers) as usize].push(shard);
    }
    dealt
}

/// Bytes read over bytes of the file, and requests for each shard.
async fn read(path: &FsPath, dealt: &[Vec<u64>]) -> (f64, f64) {
    let location = Location::parse(arg(path), FsPath::new("/")).unwrap();
    let meta = location.store.head(&location.path).await.unwrap();
    let counting = Arc::new(Counting {
        inner: location.store.clone(),
        bytes: AtomicU64::new(0),
        requests: AtomicU64::new(0),
    });
    let pinned = PinnedFile {
        location: Location {
            store: counting.clone(),
            ..location
        },
        size: meta.size,
        etag: meta.e_tag,
        version: None,
        name: path.display().to_string(),
    };
    let columns = ["id", "label", "text"].map(String::from);
    let mut shards = 0;
    for own in dealt {
        // A worker's own footer, indexes and pages at hand.
        let file = Arc::new(ParquetFile::open(pinned.clone()).await.unwrap());
        for shard in own {
            let first = shard * SHARD_ROWS;
            let rows = SHARD_ROWS.min(file.rows() - first);
            let batch = file.read(first, rows, &columns).await.unwrap();
            let ids = batch.column_by_name("id").unwrap();
            let ids = arrow::array::AsArray::as_primitive::<arrow::datatypes::Int64Type>(ids);
            assert_eq!((ids.value(0) as u64, ids.len() as u64), (first, rows));
            shards += 1;
        }
    }
    assert_eq!(shards, (2 * group_rows()).div_ceil(SHARD_ROWS));
    let (bytes, requests) = (counting.bytes.load(Relaxed), counting.requests.load(Relaxed));
    (bytes as f64 / meta.size as f64, requests as f64 / shards as f64)
}

#[tokio::test(flavor = "multi_thread")]
async fn large_row_groups_are_read_about_once() {
    let folder = tempfile::tempdir().unwrap();
    let group = group_rows();
    let mut write = Command::new(python());
    write.args(["-c", WRITE, arg(folder.path()), &group.to_string()]);
    Run::of(&mut write).expect(0);
    let shards = (2 * group).div_ceil(SHARD_ROWS);
    println!(
        "| rows a group | page index | workers | in runs | requests a shard | in turn |\n|---|---|---|---|---|---|"
    );
    for (file, index) in [("False.parquet", "no"), ("True.parquet", "yes")] {
        let path = folder.path().join(file);
        // Each worker reads the dictionaries of a group that it has rows of, up to 1 MB a column: in smaller groups that is more.
        for (workers, most) in [(1, 1.2), (4, 1.5), (16, if group < 1_000_000 { 2.2 } else { 1.5 })] {
            let (times, requests) = read(&path, &dealt(shards, workers, 1)).await;
            let (spread, _) = read(&path, &dealt(shards, workers, shards.div_ceil(workers))).await;
            println!("| {group} | {index} | {workers} | {times:.2} | {requests:.1} | {spread:.2} |");
            assert!(
                times <= most,
                "page index: {index}, {workers} workers: {times:.2} times the file"
            );
        }
    }
}
