//! Outputs of others, stores that cannot keep the guarantee, and foreign bytes: each refused with one clear line.

use std::sync::Arc;

use bytes::Bytes;
use gristmill::dataset::store::location::Location;
use gristmill::ledger::{Ledger, LedgerError, RowSet};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

use super::support::*;

async fn put(output: &Location, key: &str, bytes: impl Into<Bytes>) {
    let path = key.split('/').fold(output.path.clone(), |path, part| path.join(part));
    output.store.put(&path, bytes.into().into()).await.unwrap();
}

async fn read(output: &Location, key: &str) -> String {
    let path = key.split('/').fold(output.path.clone(), |path, part| path.join(part));
    let bytes = output.store.get(&path).await.unwrap().bytes().await.unwrap();
    String::from_utf8(bytes.to_vec()).unwrap()
}

async fn create(output: &Location, name: &str) -> Result<(Ledger, bool), LedgerError> {
    Ledger::create_or_resume_in(eager(output), draft(name, 1, 4)).await
}

#[tokio::test]
async fn an_output_of_another_job_is_refused_naming_both() {
    let output = memory();
    create(&output, "first").await.unwrap();
    let error = create(&output, "second").await.unwrap_err();
    assert!(matches!(error, LedgerError::Conflict { .. }), "{error:?}");
    assert!(
        error.to_string().contains("`first`") && error.to_string().contains("`second`"),
        "{error}"
    );
}

#[tokio::test]
async fn the_same_job_resumes_with_the_id_and_seed_that_it_has() {
    let output = memory();
    let (first, resumed_first) = create(&output, "same").await.unwrap();
    let (second, resumed_second) = create(&output, "same").await.unwrap();
    assert_eq!((resumed_first, resumed_second), (false, true));
    assert_eq!(first.job(), second.job());
    let (other, _) = create(&memory(), "same").await.unwrap();
    assert_ne!(other.job().job, first.job().job);
}

#[tokio::test]
async fn another_model_tokenizer_template_or_precision_stops_the_resume() {
    let output = memory();
    create(&output, "pinned").await.unwrap();
    type Change = fn(&mut gristmill::ledger::JobIdentity);
    let changes: [(&str, Change); 5] = [
        ("model", |id| id.model_hash = "other".into()),
        ("tokenizer", |id| id.tokenizer_hash = "other".into()),
        ("chat template", |id| id.template_hash = Some("other".into())),
        ("precision", |id| id.precision = "bf16".into()),
        ("format of keys and values", |id| id.kv_cache = Some("int8".into())),
    ];
    for (what, change) in changes {
        let mut changed = draft("pinned", 1, 4);
        change(&mut changed.identity);
        let error = Ledger::create_or_resume_in(eager(&output), changed).await.unwrap_err();
        assert!(matches!(error, LedgerError::Stop { .. }), "{error:?}");
        assert!(error.to_string().contains(&format!("another {what} ")), "{error}");
    }
}

#[tokio::test]
async fn a_folder_with_files_of_others_is_refused_and_left_alone() {
    for key in [
        "data.parquet",
        "deep/down/data.parquet",
        "_SUCCESS",
        "part-00000.parquet",
    ] {
        let output = memory();
        put(&output, key, "theirs").await;
        let error = create(&output, "guest").await.unwrap_err();
        assert!(
            matches!(error, LedgerError::Conflict { .. }) && error.to_string().contains(key),
            "{error}"
        );
        let all = output
            .store
            .list_with_delimiter(Some(&Path::from("out/_gristmill")))
            .await
            .unwrap();
        assert!(all.objects.is_empty());
        assert_eq!(read(&output, key).await, "theirs");
    }
    // What readers do not see is no hindrance.
    let output = memory();
    put(&output, ".keep", "").await;
    put(&output, "_notes/a.txt", "x").await;
    create(&output, "guest").await.unwrap();
}

/// A store that overwrites where it should refuse.
#[derive(Debug)]
struct Careless(InMemory);

impl std::fmt::Display for Careless {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Careless")
    }
}

#[async_trait::async_trait]
impl ObjectStore for Careless {
    async fn put_opts(
        &self,
        path: &Path,
        payload: object_store::PutPayload,
        _: object_store::PutOptions,
    ) -> object_store::Result<object_store::PutResult> {
        self.0.put(path, payload).await
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: object_store::PutMultipartOptions,
    ) -> object_store::Result<Box<dyn object_store::MultipartUpload>> {
        self.0.put_multipart_opts(path, options).await
    }

    async fn get_opts(
        &self,
        path: &Path,
        options: object_store::GetOptions,
    ) -> object_store::Result<object_store::GetResult> {
        self.0.get_opts(path, options).await
    }

    fn delete_stream(
        &self,
        paths: futures::stream::BoxStream<'static, object_store::Result<Path>>,
    ) -> futures::stream::BoxStream<'static, object_store::Result<Path>> {
        self.0.delete_stream(paths)
    }

    fn list(
        &self,
        prefix: Option<&Path>,
    ) -> futures::stream::BoxStream<'static, object_store::Result<object_store::ObjectMeta>> {
        self.0.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<object_store::ListResult> {
        self.0.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: object_store::CopyOptions) -> object_store::Result<()> {
        self.0.copy_opts(from, to, options).await
    }
}

#[tokio::test]
async fn a_store_that_ignores_put_if_absent_is_refused_at_the_start() {
    let output = place(Arc::new(Careless(InMemory::new())));
    let error = create(&output, "careless").await.unwrap_err();
    assert!(matches!(error, LedgerError::Stop { .. }), "{error:?}");
    assert!(error.to_string().contains("put-if-absent"), "{error}");
}

#[tokio::test]
async fn foreign_bytes_in_job_json_are_errors_not_panics() {
    let output = memory();
    create(&output, "good").await.unwrap();
    let good = read(&output, "_gristmill/job.json").await;
    let with = |from: &str, to: &str| {
        let bad = good.replacen(from, to, 1);
        assert_ne!(bad, good, "`{from}` is not in the record");
        bad
    };
    let id = serde_json::from_str::<serde_json::Value>(&good).unwrap()["job"]
        .as_str()
        .unwrap()
        .to_string();
    for bad in [
        String::new(),
        good[..good.len() / 2].to_string(),
        "[1,2,3]".to_string(),
        "[".repeat(100_000),
        with("\"rows\":4", "\"rows\":3"),
        good.replace("\"rows\":4", "\"rows\":18446744073709551615"),
        with("\"rows\":4,\"segments\"", "\"rows\":0,\"segments\""),
        with("\"first_row\":0", "\"first_row\":1"),
        with("\"first_row\":0", "\"first_row\":-1"),
        with("\"input\":0", "\"input\":7"),
        with("\"part_extension\":\"parquet\"", "\"part_extension\":\"/../x\""),
        with(&id, "../../../../../etc/x"),
        with("\"usd_per_hour\":2.0", "\"usd_per_hour\":-2.0"),
        with(
            "\"shards\":",
            "\"csv\":{\"delimiter\":\"\\n\",\"columns\":[]},\"shards\":",
        ),
        with(
            "\"shards\":",
            "\"csv\":{\"delimiter\":\",\",\"columns\":[]},\"shards\":",
        ),
        // Drawn rows that no input has, or one twice.
        with("\"rows\":4}]}", "\"rows\":4,\"picks\":[0,1,2,4]}]}"),
        with("\"rows\":4}]}", "\"rows\":4,\"picks\":[0,1,1,3]}]}"),
        with("\"rows\":4}]}", "\"rows\":4,\"picks\":[0]}]}"),
        // Columns of folders without values, and values that are none of their column's type.
        with(
            "\"shards\":",
            "\"partitions\":[{\"name\":\"day\",\"type\":\"int32\"}],\"shards\":",
        ),
        with("\"rows\":4}],", "\"partition\":[\"1\"],\"rows\":4}],"),
        with(
            "\"rows\":4}],",
            "\"partition\":[\"x\"],\"rows\":4}],\"partitions\":[{\"name\":\"day\",\"type\":\"int32\"}],",
        ),
    ] {
        put(&output, "_gristmill/job.json", bad.clone()).await;
        let error = Ledger::open_in(eager(&output)).await.unwrap_err();
        let shown = &bad[..bad.len().min(60)];
        assert!(matches!(error, LedgerError::Damaged { .. }), "{shown}: {error:?}");
        assert!(
            error.to_string().contains("job.json") && error.to_string().lines().count() == 1,
            "{error}"
        );
    }
    put(&output, "_gristmill/job.json", with("\"v\":1", "\"v\":4")).await;
    let error = create(&output, "good").await.unwrap_err();
    assert!(
        matches!(error, LedgerError::Newer { found: 4, known: 3, .. }),
        "{error:?}"
    );
    // Left untouched.
    assert_eq!(read(&output, "_gristmill/job.json").await, with("\"v\":1", "\"v\":4"));
}

#[tokio::test]
async fn foreign_bytes_in_a_log_are_errors_not_panics() {
    let output = memory();
    let (ledger, _) = create(&output, "log").await.unwrap();
    let mut log = open_shard(&ledger, 0).await;
    log.append(&finished(&RowSet::from_range(0..2), "a")).await.unwrap();
    let key = ledger.keys().log(0, 0);
    let good = read(&output, &key).await;
    let name = good
        .split("\"name\":\"")
        .nth(1)
        .unwrap()
        .split('"')
        .next()
        .unwrap()
        .to_string();
    let with = |from: &str, to: &str| {
        let bad = good.replacen(from, to, 1);
        assert_ne!(bad, good, "`{from}` is not in the record");
        bad
    };
    for bad in [
        good[..good.len() - 10].to_string(),
        with("[[0,2]]", "[[0,18446744073709551615]]"),
        with("[[0,2]]", "[[3,5]]"),
        with("[[0,2]]", "[[2,0]]"),
        with("[[0,2]]", "[]"),
        with(&name, "../../../../secret.parquet"),
        with("\"shard\":0", "\"shard\":1"),
        with("\"index\":0", "\"index\":1"),
        with(ledger.job().job.as_str(), "00000000000000000000"),
    ] {
        put(&output, &key, bad.clone()).await;
        let error = ledger.shard(0).await.unwrap_err();
        assert!(matches!(error, LedgerError::Damaged { .. }), "{bad}: {error:?}");
        assert!(error.to_string().contains("000000.json"), "{error}");
    }
    put(&output, &key, vec![b' '; (16 << 20) + 1]).await;
    let error = ledger.shard(0).await.unwrap_err();
    assert!(error.to_string().contains("16777217 bytes, more than"), "{error}");
    put(&output, &key, with("\"v\":1", "\"v\":9")).await;
    assert!(matches!(
        ledger.shard(0).await.unwrap_err(),
        LedgerError::Newer { found: 9, .. }
    ));
}

/// Rows that another worker has logged meanwhile are passed over, and a record that counts them once more is none.
#[tokio::test]
async fn a_row_counts_once() {
    let output = memory();
    let (ledger, _) = create(&output, "once").await.unwrap();
    let mut first = open_shard(&ledger, 0).await;
    let mut second = open_shard(&ledger, 0).await;
    let rows = |range| finished(&RowSet::from_range(range), "a");
    first.append(&rows(0..2)).await.unwrap();
    assert!(second.append(&rows(1..2)).await.unwrap().is_empty());
    assert_eq!(second.append(&rows(0..3)).await.unwrap(), RowSet::from_range(2..3));
    assert!(second.append(&rows(0..3)).await.unwrap().is_empty());
    let log = |index| ledger.keys().log(0, index);
    let again = read(&output, &log(0)).await.replacen("\"index\":0", "\"index\":2", 1);
    put(&output, &log(2), again).await;
    let error = ledger.shard(0).await.unwrap_err();
    assert!(error.to_string().contains("are not open"), "{error}");
}

#[tokio::test]
async fn batches_that_cannot_be_logged_are_refused_before_anything_is_uploaded() {
    let output = memory();
    let (ledger, _) = create(&output, "batches").await.unwrap();
    let mut log = open_shard(&ledger, 0).await;
    let good = finished(&RowSet::from_range(0..2), "a");
    let twice = arrow::compute::concat_batches(&good.schema(), [&good, &good]).unwrap();
    let outside = finished(&RowSet::from_range(3..5), "a");
    let no_status = good.project(&[0, 2, 3, 4, 5]).unwrap();
    for bad in [twice, outside, no_status] {
        let error = log.append(&bad).await.unwrap_err();
        assert!(matches!(error, LedgerError::Damaged { .. }), "{error:?}");
    }
    assert_eq!(
        ledger.store().list(&ledger.keys().shard_prefix(0)).await.unwrap(),
        vec![]
    );
    assert!(
        ledger
            .shard(7)
            .await
            .unwrap_err()
            .to_string()
            .contains("none is number 7")
    );
}

#[tokio::test]
async fn a_part_of_somebody_else_is_never_overwritten_nor_committed() {
    let elsewhere = memory();
    let (other, _) = create(&elsewhere, "other").await.unwrap();
    run_shard(&other, 0).await;
    let path = elsewhere.path.clone().join("part-00000.parquet");
    let foreign = elsewhere.store.get(&path).await.unwrap().bytes().await.unwrap();

    for standing in [foreign, Bytes::from("no parquet")] {
        let output = memory();
        let (ledger, _) = create(&output, "mine").await.unwrap();
        let mut log = open_shard(&ledger, 0).await;
        log.append(&finished(&log.uncovered(), "a")).await.unwrap();
        put(&output, "part-00000.parquet", standing.clone()).await;
        let error = log.publish(part).await.unwrap_err();
        assert!(matches!(error, LedgerError::Conflict { .. }), "{error:?}");
        assert!(error.to_string().contains("part-00000.parquet"), "{error}");
        assert!(!ledger.is_committed(0).await.unwrap());
        let still = output
            .store
            .get(&output.path.clone().join("part-00000.parquet"))
            .await
            .unwrap();
        assert_eq!(still.bytes().await.unwrap(), standing);
    }
}

/// Lines are held to the same: whatever lies where a part should be must name this job and the shard's rows.
#[tokio::test]
async fn lines_of_somebody_else_are_never_overwritten_nor_committed() {
    let lines_job = async |name: &str, rows: u64| {
        let output = memory();
        let mut draft = draft(name, 2, rows);
        draft.part_extension = "jsonl".into();
        let (ledger, _) = Ledger::create_or_resume_in(eager(&output), draft).await.unwrap();
        (output, ledger)
    };
    let made = async |ledger: &Ledger, shard: u32| {
        let mut log = open_shard(ledger, shard).await;
        log.append(&finished(&log.uncovered(), "a")).await.unwrap();
        log.publish(lines).await
    };
    let (elsewhere, other) = lines_job("same", 4).await;
    made(&other, 1).await.unwrap();
    let foreign = read(&elsewhere, "part-00001.jsonl").await;
    for (standing, why) in [
        (foreign, "where `batch_req_"),
        ("x\n".repeat(4), "line 1 is no result of a batch"),
        (String::new(), "ends before row 4; its shard ends before row 8"),
    ] {
        let (output, ledger) = lines_job("same", 4).await;
        put(&output, "part-00001.jsonl", standing.clone()).await;
        let error = made(&ledger, 1).await.unwrap_err();
        assert!(matches!(error, LedgerError::Conflict { .. }), "{error:?}");
        let said = error.to_string();
        assert!(
            said.contains("part-00001.jsonl") && said.contains(why) && said.lines().count() == 1,
            "{said}"
        );
        assert!(!ledger.is_committed(1).await.unwrap());
        assert_eq!(read(&output, "part-00001.jsonl").await, standing);
    }
    // Its own shard's rows in another shard's place are no less foreign.
    let (output, ledger) = lines_job("same", 4).await;
    made(&ledger, 0).await.unwrap();
    let first = read(&output, "part-00000.jsonl").await;
    put(&output, "part-00001.jsonl", first).await;
    assert!(matches!(
        made(&ledger, 1).await.unwrap_err(),
        LedgerError::Conflict { .. }
    ));
}

/// A worker that slept while the folder was given to another job writes nothing there, wherever it slept; what its job left
/// there as a result gives way.
#[tokio::test]
async fn a_job_whose_folder_is_anothers_by_now_writes_no_part_commit_or_success() {
    let home = memory();
    let (before, _) = create(&home, "before").await.unwrap();
    let mut log = open_shard(&before, 0).await;
    log.append(&finished(&log.uncovered(), "a")).await.unwrap();
    let elsewhere = memory();
    create(&elsewhere, "after").await.unwrap();
    let other = read(&elsewhere, "_gristmill/job.json").await;
    let own = read(&home, "_gristmill/job.json").await;
    // Between part and commit, and between commit and `_SUCCESS`.
    put(&home, "_gristmill/job.json", other.clone()).await;
    assert!(matches!(
        log.publish(part).await.unwrap_err(),
        LedgerError::Conflict { .. }
    ));
    assert_eq!(published_rows(&home).await, Vec::<i64>::new());
    put(&home, "_gristmill/job.json", own.clone()).await;
    log.publish(part).await.unwrap();
    let success = read(&home, "_SUCCESS").await;
    home.store.delete(&home.path.clone().join("_SUCCESS")).await.unwrap();
    put(&home, "_gristmill/job.json", other.clone()).await;
    assert!(matches!(
        before.finish_check(None).await.unwrap_err(),
        LedgerError::Conflict { .. }
    ));
    assert!(home.store.head(&home.path.clone().join("_SUCCESS")).await.is_err());
    let commit = before
        .keys()
        .commit(0)
        .split('/')
        .fold(home.path.clone(), |path, part| path.join(part));
    home.store.delete(&commit).await.unwrap();
    assert!(matches!(
        log.publish(part).await.unwrap_err(),
        LedgerError::Conflict { .. }
    ));
    assert!(home.store.head(&commit).await.is_err());

    // The other job finds a result that is not its own.
    let (after, resumed) = create(&elsewhere, "after").await.unwrap();
    assert!(resumed);
    put(&elsewhere, "_SUCCESS", success).await;
    assert!(after.success().await.unwrap().is_none());
    let findings = after.verify(|_| ()).await.unwrap().findings;
    let foreign = format!("`_SUCCESS` is of job {}", before.job().job);
    assert!(findings.iter().any(|line| line.starts_with(&foreign)), "{findings:?}");
    run_shard(&after, 0).await;
    assert_eq!(after.success().await.unwrap().unwrap().job, after.job().job);
    assert!(after.verify(|_| ()).await.unwrap().guarantee_holds());
}

/// `job.json` is looked at before each try of a put, not only before the first.
#[tokio::test]
async fn a_put_that_is_tried_again_looks_again() {
    let inner = Arc::new(InMemory::new());
    let elsewhere = memory();
    create(&elsewhere, "after").await.unwrap();
    let other = read(&elsewhere, "_gristmill/job.json").await;
    for key in ["part-00000.parquet", "000000.json", "_SUCCESS"] {
        let changes = Arc::new(std::sync::Mutex::new(Some(other.clone())));
        let folder = inner.clone();
        let (under, name) = (inner.clone(), format!("out-{key}"));
        let job = Path::from(format!("{name}/_gristmill/job.json"));
        let faulty = FaultStore::new(under, false, move |op, path| {
            let is_it = path.filename() == Some(key) && (key != "000000.json" || path.as_ref().contains("/commits/"));
            if op != Op::Put || !is_it {
                return Fault::None;
            }
            // The first try fails, and by the second the folder is another job's.
            let Some(other) = changes.lock().unwrap().take() else {
                return Fault::None;
            };
            let put = folder.put(&job, other.into());
            futures::FutureExt::now_or_never(put)
                .expect("memory answers at once")
                .unwrap();
            Fault::Before
        });
        let output = Location {
            path: Path::from(name.as_str()),
            ..place(Arc::new(faulty))
        };
        let (ledger, _) = create(&output, "before").await.unwrap();
        let mut log = open_shard(&ledger, 0).await;
        log.append(&finished(&log.uncovered(), "a")).await.unwrap();
        let error = log.publish(part).await.unwrap_err();
        assert!(matches!(error, LedgerError::Conflict { .. }), "{key}: {error:?}");
        assert!(error.to_string().contains("job.json"), "{key}: {error}");
    }
}

#[tokio::test]
async fn an_output_that_became_another_jobs_gets_no_part() {
    let output = memory();
    let (ledger, _) = create(&output, "before").await.unwrap();
    let mut log = open_shard(&ledger, 0).await;
    log.append(&finished(&log.uncovered(), "a")).await.unwrap();
    let elsewhere = memory();
    create(&elsewhere, "after").await.unwrap();
    put(
        &output,
        "_gristmill/job.json",
        read(&elsewhere, "_gristmill/job.json").await,
    )
    .await;
    let error = log.publish(part).await.unwrap_err();
    assert!(matches!(error, LedgerError::Conflict { .. }), "{error:?}");
    assert_eq!(published_rows(&output).await, Vec::<i64>::new());
}

#[tokio::test]
async fn a_plan_that_does_not_add_up_is_refused() {
    let mut gap = draft("gap", 2, 4);
    gap.shards[1].first_row = 5;
    let error = Ledger::create_or_resume_in(eager(&memory()), gap).await.unwrap_err();
    assert!(error.to_string().contains("shard 1 does not continue"), "{error}");
    // A shard without rows stands alone or not at all.
    let empty = Ledger::create_or_resume_in(eager(&memory()), draft("empty", 2, 0)).await;
    assert!(empty.unwrap_err().to_string().contains("shard 0 does not continue"));
}
