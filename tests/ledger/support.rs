//! A small job to run, and a store that fails on command.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use arrow::array::{Int64Array, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Schema};
use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{BoxStream, StreamExt};
use gristmill::dataset::part::line_id;
use gristmill::dataset::plan::{Format, InputFile, Segment, Shard};
use gristmill::dataset::store::location::Location;
use gristmill::ledger::log::{ShardLog, ShardState};
use gristmill::ledger::{JobDraft, JobIdentity, Ledger, LedgerError, Result, Retry, RowSet, Store};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions,
};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;

/// Three tries without a pause.
pub(crate) const EAGER: Retry = Retry {
    tries: 3,
    first_delay: std::time::Duration::ZERO,
    max_delay: std::time::Duration::ZERO,
};

/// A job of `shards` shards of `rows` rows each.
pub(crate) fn draft(name: &str, shards: u32, rows: u64) -> JobDraft {
    let shard = |n: u64| Shard {
        first_row: n * rows,
        rows,
        segments: vec![Segment {
            input: 0,
            first_row: n * rows,
            rows,
            bytes: None,
            line: None,
            picks: None,
        }],
    };
    JobDraft {
        name: name.into(),
        identity: JobIdentity {
            job_hash: format!("job-{name}"),
            model_hash: "model".into(),
            tokenizer_hash: "tokenizer".into(),
            template_hash: None,
            kv_cache: None,
            precision: "f32".into(),
        },
        resolved: serde_json::json!({"name": name}),
        inputs: vec![InputFile {
            url: "memory:///in.parquet".into(),
            format: Format::Parquet,
            size: 1,
            etag: None,
            version: None,
            sha256: None,
            compressed: None,
            partition: Vec::new(),
            rows: rows * u64::from(shards),
        }],
        layout: Default::default(),
        shards: (0..u64::from(shards)).map(shard).collect(),
        columns: serde_json::Value::Null,
        needs_newest_version: false,
        part_extension: "parquet".into(),
        limits: Default::default(),
        usd_per_hour: Some(2.0),
    }
}

/// A store in memory, as an output of its own.
pub(crate) fn memory() -> Location {
    place(Arc::new(InMemory::new()))
}

/// An output in any store, not a local folder.
pub(crate) fn place(store: Arc<dyn ObjectStore>) -> Location {
    Location {
        store,
        path: Path::from("out"),
        url: url::Url::parse("memory:///out").unwrap(),
    }
}

pub(crate) fn eager(output: &Location) -> Store {
    Store::with_retry(output, EAGER).unwrap()
}

/// Finished rows; every other one `errored`. `author` differs between workers, so that it shows whose rows count.
pub(crate) fn finished(rows: &RowSet, author: &str) -> RecordBatch {
    finished_as(rows, author, |row| if row % 2 == 0 { "succeeded" } else { "errored" })
}

/// Finished rows with the statuses that `status` gives.
pub(crate) fn finished_as(rows: &RowSet, author: &str, status: impl Fn(i64) -> &'static str) -> RecordBatch {
    // Not in order: rows finish as they like.
    let mut rows: Vec<i64> = rows.iter().map(|row| row as i64).collect();
    rows.reverse();
    let text = |f: &dyn Fn(i64) -> String| Arc::new(StringArray::from_iter_values(rows.iter().map(|&row| f(row))));
    let number = |n: i64| Arc::new(Int64Array::from(vec![n; rows.len()]));
    let schema = Schema::new(vec![
        Field::new("row", DataType::Int64, false),
        Field::new("status", DataType::Utf8, false),
        Field::new("completion", DataType::Utf8, true),
        Field::new("prompt_tokens", DataType::Int64, true),
        Field::new("cached_tokens", DataType::Int64, true),
        Field::new("completion_tokens", DataType::Int64, true),
    ]);
    let status = |row: i64| status(row).to_string();
    RecordBatch::try_new(
        Arc::new(schema),
        vec![
            Arc::new(Int64Array::from(rows.clone())),
            text(&status),
            text(&|row| format!("{row} by {author}")),
            number(5),
            number(2),
            number(3),
        ],
    )
    .unwrap()
}

/// A part as the dataset writer makes it: the rows, and where they are from.
pub(crate) fn part(batches: &[RecordBatch], metadata: &[(String, String)]) -> Result<Bytes, String> {
    let pairs = metadata
        .iter()
        .map(|(key, value)| KeyValue::new(key.clone(), value.clone()))
        .collect();
    let properties = WriterProperties::builder().set_key_value_metadata(Some(pairs)).build();
    let mut writer = ArrowWriter::try_new(Vec::new(), batches[0].schema(), Some(properties)).unwrap();
    for batch in batches {
        writer.write(batch).unwrap();
    }
    Ok(writer.into_inner().unwrap().into())
}

/// A part of result lines, as the dataset writer makes it: each names job and row. An `author` in the metadata shows in it.
pub(crate) fn lines(batches: &[RecordBatch], metadata: &[(String, String)]) -> Result<Bytes, String> {
    let said = |key: &str| metadata.iter().find(|(k, _)| k == key).map(|(_, value)| value.clone());
    let (job, author) = (said("gristmill.job").unwrap(), said("author"));
    let mut out = Vec::new();
    for batch in batches {
        let number = |name: &str, i: usize| {
            let column = batch.column_by_name(name).unwrap().as_any();
            column.downcast_ref::<Int64Array>().unwrap().value(i)
        };
        let text = |name: &str, i: usize| {
            let column = batch.column_by_name(name).unwrap().as_any();
            column.downcast_ref::<StringArray>().unwrap().value(i)
        };
        for i in 0..batch.num_rows() {
            let error = match text("status", i) {
                "succeeded" => serde_json::Value::Null,
                code => serde_json::json!({"code": code, "message": null}),
            };
            let row = number("row", i);
            let line = serde_json::json!({
                "id": line_id(&job, row as u64), "custom_id": format!("row-{row}"), "error": error, "author": author,
                "response": {"body": {
                    "object": "chat.completion",
                    "choices": [{"message": {"content": text("completion", i)}, "finish_reason": "stop"}],
                    "usage": {"prompt_tokens": number("prompt_tokens", i), "completion_tokens": number("completion_tokens", i),
                        "prompt_tokens_details": {"cached_tokens": number("cached_tokens", i)}},
                }},
            });
            out.extend_from_slice(line.to_string().as_bytes());
            out.push(b'\n');
        }
    }
    Ok(out.into())
}

/// The rows of a part of lines: what follows the last `_` of each id.
fn rows_of_lines(bytes: &[u8]) -> Vec<i64> {
    let lines = bytes.split(|&b| b == b'\n').filter(|line| !line.is_empty());
    let row = |line| {
        let line: serde_json::Value = serde_json::from_slice(line).unwrap();
        line["id"]
            .as_str()
            .unwrap()
            .rsplit('_')
            .next()
            .unwrap()
            .parse()
            .unwrap()
    };
    lines.map(row).collect()
}

/// Loses a data object of the store, if it has any: takes it away, or leaves other bytes in its place.
pub(crate) async fn lose_data(store: &InMemory, chance: u64) {
    let listed: Vec<ObjectMeta> = store.list(None).map(|meta| meta.unwrap()).collect().await;
    let data: Vec<Path> = listed.into_iter().map(|meta| meta.location).collect();
    let data: Vec<Path> = data
        .into_iter()
        .filter(|path| path.as_ref().contains("/data/"))
        .collect();
    let Some(path) = data.get(chance as usize % data.len().max(1)) else {
        return;
    };
    match chance % 3 {
        0 => store.delete(path).await.unwrap(),
        1 => drop(store.put(path, "other bytes".into()).await.unwrap()),
        _ => {
            let was = store.get(path).await.unwrap().bytes().await.unwrap();
            let same_size = vec![b'x'; was.len()];
            store.put(path, same_size.into()).await.unwrap();
        }
    }
}

pub(crate) async fn open_shard(ledger: &Ledger, shard: u32) -> Box<ShardLog> {
    match ledger.shard(shard).await.unwrap() {
        ShardState::Open(log) => log,
        ShardState::Committed(_) => panic!("shard {shard} is committed"),
    }
}

/// Runs one shard in one go.
pub(crate) async fn run_shard(ledger: &Ledger, shard: u32) {
    let mut log = open_shard(ledger, shard).await;
    let rows = log.uncovered();
    let attempt = log.begin("w", &rows, false).await.unwrap();
    log.append(&finished(&rows, "w")).await.unwrap();
    log.publish(part).await.unwrap();
    log.end(&attempt).await.unwrap();
}

/// The `row` column over all published parts, in the order of their names: what any reader of the folder sees.
pub(crate) async fn published_rows(output: &Location) -> Vec<i64> {
    let listed = output.store.list_with_delimiter(Some(&output.path)).await.unwrap();
    let mut parts: BTreeMap<String, Path> = BTreeMap::new();
    for meta in listed.objects {
        let name = meta.location.filename().unwrap().to_string();
        if !name.starts_with('_') {
            parts.insert(name, meta.location);
        }
    }
    let mut rows = Vec::new();
    for path in parts.values() {
        let bytes = output.store.get(path).await.unwrap().bytes().await.unwrap();
        if path.as_ref().ends_with(".jsonl") {
            rows.extend(rows_of_lines(&bytes));
            continue;
        }
        for batch in ParquetRecordBatchReaderBuilder::try_new(bytes)
            .unwrap()
            .build()
            .unwrap()
        {
            let batch = batch.unwrap();
            let column = batch.column_by_name("row").unwrap();
            rows.extend(column.as_any().downcast_ref::<Int64Array>().unwrap().values());
        }
    }
    rows
}

/// The text of an error with its causes.
pub(crate) fn chain(error: &LedgerError) -> String {
    let mut text = error.to_string();
    let mut next = std::error::Error::source(error);
    while let Some(source) = next {
        text = format!("{text}: {source}");
        next = source.source();
    }
    text
}

/// What happens to one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// An error, and nothing happened.
    Before,
    /// An error, though it happened.
    After,
    /// "Already exists", though it was our own success.
    Exists,
    /// An error, and it happens later: the request was still on its way.
    Late,
    /// The local file system says no.
    Io(std::io::ErrorKind),
}

/// Which request a fault is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Op {
    Put,
    Get,
    List,
    Copy,
    Delete,
}

type Plan = Box<dyn FnMut(Op, &Path) -> Fault + Send>;

/// A store that fails as its plan says. With `steps`, every request stops before and after it took effect until it is
/// polled again, so that a test can interleave and kill workers there.
pub(crate) struct FaultStore {
    pub inner: Arc<dyn ObjectStore>,
    plan: Mutex<Plan>,
    late: Mutex<VecDeque<(Path, PutPayload, PutOptions)>>,
    steps: bool,
    /// Requests by kind, put and conditional put counted alike.
    pub counts: Mutex<BTreeMap<Op, u32>>,
}

impl FaultStore {
    pub(crate) fn new(
        inner: Arc<dyn ObjectStore>,
        steps: bool,
        plan: impl FnMut(Op, &Path) -> Fault + Send + 'static,
    ) -> Self {
        let plan = Mutex::new(Box::new(plan) as Plan);
        FaultStore {
            inner,
            plan,
            late: Mutex::default(),
            steps,
            counts: Mutex::default(),
        }
    }

    /// From now on, everything works.
    pub(crate) fn heal(&self) {
        *self.plan.lock().unwrap() = Box::new(|_, _| Fault::None);
    }

    /// Lets the oldest late request take effect, if there is one.
    pub(crate) async fn arrive(&self) {
        let next = self.late.lock().unwrap().pop_front();
        if let Some((path, payload, options)) = next {
            *self.counts.lock().unwrap().entry(Op::Put).or_default() += 1;
            // Nobody waits for the answer any more.
            drop(self.inner.put_opts(&path, payload, options).await);
        }
    }

    /// Requests so far that may have changed something.
    pub(crate) fn changes(&self) -> u32 {
        let counts = self.counts.lock().unwrap();
        [Op::Put, Op::Copy, Op::Delete]
            .iter()
            .filter_map(|op| counts.get(op))
            .sum()
    }

    async fn step(&self) {
        if self.steps {
            Yield(false).await;
        }
    }

    fn fault(&self, op: Op, path: &Path) -> Fault {
        *self.counts.lock().unwrap().entry(op).or_default() += 1;
        (self.plan.lock().unwrap())(op, path)
    }

    async fn faulty<T>(
        &self,
        op: Op,
        path: &Path,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> object_store::Result<T> {
        self.faulty_or_late(op, path, request, None).await
    }

    async fn faulty_or_late<T>(
        &self,
        op: Op,
        path: &Path,
        request: impl Future<Output = object_store::Result<T>>,
        late: Option<(Path, PutPayload, PutOptions)>,
    ) -> object_store::Result<T> {
        self.step().await;
        match self.fault(op, path) {
            Fault::None => {
                let done = request.await;
                self.step().await;
                done
            }
            Fault::Before => Err(broken()),
            Fault::Late => {
                self.late.lock().unwrap().extend(late);
                Err(broken())
            }
            Fault::After => {
                request.await?;
                self.step().await;
                Err(broken())
            }
            Fault::Exists => {
                request.await?;
                let path = path.to_string();
                Err(object_store::Error::AlreadyExists {
                    path,
                    source: "retried by the client".into(),
                })
            }
            Fault::Io(kind) => {
                let source = Box::new(std::io::Error::from(kind));
                Err(object_store::Error::Generic {
                    store: "LocalFileSystem",
                    source,
                })
            }
        }
    }
}

fn broken() -> object_store::Error {
    object_store::Error::Generic {
        store: "fault",
        source: "connection reset".into(),
    }
}

impl fmt::Debug for FaultStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FaultStore")
    }
}

impl fmt::Display for FaultStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FaultStore")
    }
}

#[async_trait]
impl ObjectStore for FaultStore {
    async fn put_opts(&self, path: &Path, payload: PutPayload, options: PutOptions) -> object_store::Result<PutResult> {
        let late = (path.clone(), payload.clone(), options.clone());
        let conditional = options.mode != PutMode::Overwrite;
        let request = self.inner.put_opts(path, payload, options);
        self.faulty_or_late(Op::Put, path, request, conditional.then_some(late))
            .await
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(path, options).await
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> object_store::Result<GetResult> {
        self.faulty(Op::Get, path, self.inner.get_opts(path, options)).await
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        *self.counts.lock().unwrap().entry(Op::Delete).or_default() += 1;
        self.inner.delete_stream(paths)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        match self.fault(Op::List, prefix.unwrap_or(&Path::default())) {
            Fault::None => self.inner.list(prefix),
            _ => futures::stream::iter([Err(broken())]).boxed(),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        let path = prefix.cloned().unwrap_or_default();
        self.faulty(Op::List, &path, self.inner.list_with_delimiter(prefix))
            .await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> object_store::Result<()> {
        self.faulty(Op::Copy, to, self.inner.copy_opts(from, to, options)).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> object_store::Result<()> {
        self.faulty(Op::Copy, to, self.inner.rename_opts(from, to, options))
            .await
    }
}

/// Pending once.
struct Yield(bool);

impl Future for Yield {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.0 {
            return Poll::Ready(());
        }
        self.0 = true;
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

/// What plays a part in a simulation.
pub(crate) type Actor = Pin<Box<dyn Future<Output = Result<()>>>>;

pub(crate) fn poll_once(actor: &mut Actor) -> Poll<Result<()>> {
    actor
        .as_mut()
        .poll(&mut Context::from_waker(futures::task::noop_waker_ref()))
}

/// Polls to the end; everything that is awaited here is ready when it is polled again.
pub(crate) fn finish<T>(mut future: Pin<Box<dyn Future<Output = T> + '_>>) -> T {
    let mut context = Context::from_waker(futures::task::noop_waker_ref());
    for _ in 0..1_000_000 {
        if let Poll::Ready(done) = future.as_mut().poll(&mut context) {
            return done;
        }
    }
    panic!("an actor does not end");
}
