//! Retries: failed rows anew, parts replaced, late workers harmless; closing orders; cleaning.

use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, StringArray};
use gristmill::ledger::{JobCommand, Ledger, LedgerError, RowSet, StopWhy};
use object_store::ObjectStoreExt;
use object_store::memory::InMemory;

use super::support::*;

async fn job(output: &gristmill::dataset::store::location::Location, shards: u32, rows: u64) -> Ledger {
    let draft = draft("retried", shards, rows);
    Ledger::create_or_resume_in(eager(output), draft).await.unwrap().0
}

/// Runs one shard of any generation; odd rows fail as long as `fails`.
async fn run(ledger: &Ledger, shard: u32, fails: bool) {
    let mut log = open_shard(ledger, shard).await;
    let rows = log.uncovered();
    let status = move |row: i64| if fails && row % 2 == 1 { "errored" } else { "succeeded" };
    log.append(&finished_as(&rows, "r", status)).await.unwrap();
    log.publish(part).await.unwrap();
}

async fn check_retries(output: gristmill::dataset::store::location::Location, clean: bool) {
    let ledger = job(&output, 3, 4).await;
    assert!(matches!(ledger.retry().await, Err(LedgerError::Conflict { .. })));
    run(&ledger, 0, true).await;
    run(&ledger, 1, false).await;
    // Asleep before its publishing, until all is over.
    let mut asleep = open_shard(&ledger, 2).await;
    asleep.append(&finished(&asleep.uncovered(), "late")).await.unwrap();
    run_shard_again(&ledger, 2).await;
    if clean {
        assert!(ledger.clean(true).await.unwrap().objects > 0);
        let removed = ledger.clean(false).await.unwrap();
        assert!(removed.objects > 0 && removed.bytes > 0);
        assert_eq!(ledger.clean(true).await.unwrap().objects, 0);
    }
    let retry = ledger.retry().await.unwrap().unwrap();
    assert_eq!((retry.generation(), retry.shard_numbers()), (1, vec![0, 2]));
    assert_eq!(retry.rows_to_do(0), RowSet::from_rows([1, 3]));
    let status = retry.status().await.unwrap();
    assert_eq!(
        (status.tally.succeeded, status.tally.errored, status.shards.total),
        (8, 0, 2)
    );
    // Readers see the old result until the new one is whole.
    run(&retry, 0, false).await;
    assert_eq!(retry.success().await.unwrap(), None);
    assert_eq!(ledger.success().await.unwrap().unwrap().generation, 0);
    assert_eq!(retry.status().await.unwrap().tally.succeeded, 10);
    asleep.publish(part).await.unwrap();
    run(&retry, 2, true).await;
    let success = retry.success().await.unwrap().unwrap();
    assert_eq!(
        (success.generation, success.tally.succeeded, success.tally.errored),
        (1, 10, 2)
    );
    let before = published_parts(&output).await;
    asleep.publish(part).await.unwrap();
    assert_eq!(published_parts(&output).await, before, "a late worker changed a part");
    let newest = Ledger::open_in(eager(&output)).await.unwrap().unwrap();
    assert_eq!(newest.generation(), 1);
    let verified = newest.verify(|_| ()).await.unwrap();
    assert_eq!(verified.findings, Vec::<String>::new());
    assert_eq!(published_rows(&output).await, (0..12).collect::<Vec<_>>());
    // Once more: only what failed again.
    let second = newest.retry().await.unwrap().unwrap();
    assert_eq!((second.generation(), second.shard_numbers()), (2, vec![2]));
    run(&second, 2, false).await;
    assert!(second.verify(|_| ()).await.unwrap().guarantee_holds());
    assert_eq!(second.success().await.unwrap().unwrap().tally.succeeded, 12);
    assert!(second.retry().await.unwrap().is_none());
}

async fn run_shard_again(ledger: &Ledger, shard: u32) {
    open_shard(ledger, shard).await.publish(part).await.unwrap();
}

/// Names and bytes of all parts.
async fn published_parts(output: &gristmill::dataset::store::location::Location) -> Vec<(String, bytes::Bytes)> {
    let store = eager(output);
    let mut parts = Vec::new();
    for object in store.list_folder("").await.unwrap().0 {
        if object.key.starts_with("part-") {
            let bytes = store.get(&object.key, u64::MAX).await.unwrap().unwrap();
            parts.push((object.key, bytes));
        }
    }
    parts
}

#[tokio::test]
async fn failed_rows_are_done_anew() {
    check_retries(memory(), false).await;
}

#[tokio::test]
async fn a_cleaned_job_is_retried_from_its_parts() {
    check_retries(memory(), true).await;
}

#[tokio::test]
async fn local_folders_replace_parts_under_a_lock() {
    let folder = tempfile::tempdir().unwrap();
    let output = gristmill::dataset::store::location::Location::parse("out", folder.path()).unwrap();
    check_retries(output, true).await;
}

#[tokio::test]
async fn a_stop_of_one_generation_does_not_stop_the_next() {
    let output = memory();
    let ledger = job(&output, 1, 2).await;
    let mut control = ledger.control().await.unwrap();
    let stop = |close| JobCommand::stop(StopWhy::Cancelled, close);
    assert!(control.try_append(stop(true)).await.unwrap());
    assert!(control.is_closing());
    let mut log = open_shard(&ledger, 0).await;
    log.append(&finished_as(&log.uncovered(), "c", |_| "cancelled"))
        .await
        .unwrap();
    log.publish(part).await.unwrap();
    assert_eq!(ledger.success().await.unwrap().unwrap().tally.cancelled, 2);
    let retry = ledger.retry().await.unwrap().unwrap();
    assert_eq!(retry.control().await.unwrap().stop_reason(), None);
    // A late stop of the old generation neither stops the new one nor hides its stop.
    assert!(retry.control().await.unwrap().try_append(stop(false)).await.unwrap());
    assert!(ledger.control().await.unwrap().try_append(stop(true)).await.unwrap());
    let control = retry.control().await.unwrap();
    assert_eq!(
        (control.stop_reason(), control.is_closing()),
        (Some(StopWhy::Cancelled), false)
    );
}

#[tokio::test]
async fn reconcile_finds_shards_that_stand_still() {
    let output = memory();
    let ledger = job(&output, 4, 2).await;
    run(&ledger, 0, false).await;
    let mut log = open_shard(&ledger, 2).await;
    let first = ledger.progress().await.unwrap();
    log.begin("w", &log.uncovered(), false).await.unwrap();
    let second = ledger.progress().await.unwrap();
    assert_eq!(
        (first.uncommitted(), second.stalled_since(&first)),
        (vec![1, 2, 3], vec![1, 3])
    );
    assert_eq!(ledger.progress().await.unwrap().stalled_since(&second), [1, 2, 3]);
}

/// DESIGN's bound: at most 10 requests a shard, all of the ledger's own included.
#[tokio::test]
async fn a_shard_costs_ten_requests_at_most() {
    const SHARDS: u32 = 300;
    let counting = Arc::new(FaultStore::new(Arc::new(InMemory::new()), false, |_, _| Fault::None));
    let output = place(counting.clone());
    let ledger = job(&output, SHARDS, 2).await;
    let requests = || counting.counts.lock().unwrap().values().sum::<u32>();
    let before = requests();
    for shard in 0..SHARDS {
        let mut log = open_shard(&ledger, shard).await;
        let rows = log.uncovered();
        log.begin("w", &rows, false).await.unwrap();
        log.append(&finished(&rows, "w")).await.unwrap();
        log.publish(part).await.unwrap();
    }
    let each = f64::from(requests() - before) / f64::from(SHARDS);
    assert!(each <= 10.0, "{each} requests a shard");
}

/// A retry of truncated rows that is under way is another's where its limit is another; the same again goes on with it.
#[tokio::test]
async fn a_retry_with_another_limit_is_a_conflict() {
    let output = memory();
    let ledger = job(&output, 1, 2).await;
    let mut log = open_shard(&ledger, 0).await;
    let batch = finished_as(&log.uncovered(), "r", |_| "succeeded");
    let cut: ArrayRef = Arc::new(StringArray::from(vec!["length"; 2]));
    let mut columns: Vec<(String, ArrayRef)> = Vec::new();
    for (field, column) in batch.schema().fields().iter().zip(batch.columns()) {
        columns.push((field.name().clone(), column.clone()));
    }
    columns.push(("finish_reason".into(), cut));
    log.append(&RecordBatch::try_from_iter(columns).unwrap()).await.unwrap();
    log.publish(part).await.unwrap();
    let retry = ledger.retry_truncated(60).await.unwrap().unwrap();
    assert_eq!((retry.generation(), retry.raised_max_tokens()), (1, Some(60)));
    assert!(matches!(
        ledger.retry_truncated(70).await,
        Err(LedgerError::Conflict { .. })
    ));
    let again = ledger.retry_truncated(60).await.unwrap().unwrap();
    assert_eq!((again.generation(), again.raised_max_tokens()), (1, Some(60)));
}

/// Verifying in the middle of a retry says that it is one, and nothing that sounds like damage.
#[tokio::test]
async fn a_retry_that_is_under_way_is_not_taken_for_damage() {
    let output = memory();
    let ledger = job(&output, 3, 4).await;
    for shard in 0..3 {
        run_shard(&ledger, shard).await;
    }
    let retry = ledger.retry().await.unwrap().unwrap();
    let mut log = open_shard(&retry, 1).await;
    log.append(&finished_as(&log.uncovered(), "r", |_| "succeeded"))
        .await
        .unwrap();
    log.publish(part).await.unwrap();
    let verified = retry.verify(|_| ()).await.unwrap();
    assert_eq!(
        verified.findings,
        [
            "retry 1 is not finished: 2 of its 3 shards have no readable commit, and were not verified: 0, 2",
            "`_SUCCESS` is of generation 0, the newest is 1: the retry is not finished"
        ]
    );
}

/// More rows than one record should name lie in a record for each block of shards; fewer in one, as older gristmills read it.
#[tokio::test]
async fn a_retry_of_very_many_scattered_rows_lies_in_pieces() {
    const SHARDS: u32 = 160;
    let output = memory();
    let ledger = job(&output, SHARDS, 4096).await;
    for shard in 0..SHARDS {
        run_shard(&ledger, shard).await;
    }
    let retry = ledger.retry().await.unwrap().unwrap();
    let read = async |key: &str| -> serde_json::Value {
        let path = key.split('/').fold(output.path.clone(), |path, part| path.join(part));
        serde_json::from_slice(&output.store.get(&path).await.unwrap().bytes().await.unwrap()).unwrap()
    };
    let key = ledger.keys().generation(1);
    let record = read(&key).await;
    assert_eq!((&record["v"], &record["shards"]), (&3.into(), &serde_json::json!([])));
    assert_eq!(record["blocks"].as_array().unwrap().len(), 2);
    let rows = format!("{}/rows", key.strip_suffix(".json").unwrap());
    let pieces = ledger.store().list(&rows).await.unwrap();
    assert_eq!(pieces.len(), 2);
    // Whoever opens the job, or asks for the retry again, finds all of its rows.
    let opened = Ledger::open_in(eager(&output)).await.unwrap().unwrap();
    for found in [retry, opened, ledger.retry().await.unwrap().unwrap()] {
        assert_eq!((found.generation(), found.shard_numbers().len()), (1, SHARDS as usize));
        assert_eq!(found.retried_tally().errored, u64::from(SHARDS) * 2048);
        assert!(found.rows_to_do(SHARDS - 1).contains(u64::from(SHARDS) * 4096 - 1));
    }
    let newest = ledger.newest_generation().await.unwrap();
    for shard in 0..SHARDS {
        let mut log = open_shard(&newest, shard).await;
        log.append(&finished_as(&log.uncovered(), "r", |row| {
            if row == 1 { "errored" } else { "succeeded" }
        }))
        .await
        .unwrap();
        log.publish(part).await.unwrap();
    }
    assert!(newest.verify(|_| ()).await.unwrap().guarantee_holds());
    let small = newest.retry().await.unwrap().unwrap();
    assert_eq!((small.generation(), small.retried_tally().errored), (2, 1));
    let record = read(&ledger.keys().generation(2)).await;
    assert_eq!(
        (&record["v"], record["shards"].as_array().unwrap().len()),
        (&1.into(), 1)
    );
    assert!(record.get("blocks").is_none());
    // A piece that is gone, or another's, is damage.
    let path = pieces[0]
        .key
        .split('/')
        .fold(output.path.clone(), |path, part| path.join(part));
    let whole = output.store.get(&path).await.unwrap().bytes().await.unwrap();
    // Other rows, in a piece that reads as well.
    let other = String::from_utf8(whole.to_vec()).unwrap().replacen("[1,2]", "[0,1]", 1);
    for bad in [other, "{}".into()] {
        assert_ne!(bad.as_bytes(), whole);
        output.store.put(&path, bad.into()).await.unwrap();
        let error = Ledger::open_in(eager(&output)).await.unwrap_err();
        assert!(matches!(error, LedgerError::Damaged { .. }), "{error:?}");
    }
    output.store.delete(&path).await.unwrap();
    let error = Ledger::open_in(eager(&output)).await.unwrap_err();
    assert!(
        error.to_string().contains("is missing, though a retry names it"),
        "{error}"
    );
}
