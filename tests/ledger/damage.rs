//! Data objects that are lost: their rows are computed again, and what is published is counted as it stands.

use std::sync::Arc;

use futures::FutureExt;
use gristmill::dataset::store::location::Location;
use gristmill::ledger::attempts::Fate;
use gristmill::ledger::log::{ShardLog, ShardState};
use gristmill::ledger::{Ledger, LedgerError, RowSet};
use object_store::ObjectStoreExt;
use object_store::memory::InMemory;
use object_store::path::Path;

use super::support::*;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Loss {
    Gone,
    Shorter,
    SameSize,
}

async fn job(output: &Location, extension: &str) -> Ledger {
    let mut draft = draft("damaged", 1, 6);
    draft.part_extension = extension.into();
    Ledger::create_or_resume_in(eager(output), draft).await.unwrap().0
}

fn at(output: &Location, key: &str) -> Path {
    key.split('/').fold(output.path.clone(), |path, part| path.join(part))
}

async fn bytes_at(output: &Location, key: &str) -> bytes::Bytes {
    output.store.get(&at(output, key)).await.unwrap().bytes().await.unwrap()
}

async fn text(output: &Location, key: &str) -> String {
    String::from_utf8_lossy(&bytes_at(output, key).await).into()
}

/// Loses the data object of the record at `index`.
async fn lose(output: &Location, ledger: &Ledger, index: u32, loss: Loss) {
    let record = text(output, &ledger.keys().log(0, index)).await;
    let record: serde_json::Value = serde_json::from_str(&record).unwrap();
    let key = ledger.keys().data(0, record["data"]["name"].as_str().unwrap());
    let size = record["data"]["size"].as_u64().unwrap() as usize;
    let bytes = match loss {
        Loss::Gone => return output.store.delete(&at(output, &key)).await.unwrap(),
        Loss::Shorter => vec![b'x'; size - 1],
        Loss::SameSize => vec![b'x'; size],
    };
    output.store.put(&at(output, &key), bytes.into()).await.unwrap();
}

fn rows(range: std::ops::Range<u64>) -> RowSet {
    RowSet::from_range(range)
}

type Maker = fn(&[arrow::array::RecordBatch], &[(String, String)]) -> Result<bytes::Bytes, String>;

fn maker(extension: &str) -> Maker {
    match extension {
        "jsonl" => lines,
        _ => part,
    }
}

/// The statuses of the rows that a job failed on, from its retry.
async fn failed(ledger: &Ledger) -> RowSet {
    ledger.retry().await.unwrap().unwrap().rows_to_do(0)
}

#[tokio::test]
async fn lost_rows_are_open_again_and_computed_again() {
    for extension in ["parquet", "jsonl"] {
        for loss in [Loss::Gone, Loss::Shorter, Loss::SameSize] {
            let output = memory();
            let ledger = job(&output, extension).await;
            let mut first = open_shard(&ledger, 0).await;
            first.append(&finished(&rows(0..2), "a")).await.unwrap();
            first.append(&finished(&rows(2..4), "a")).await.unwrap();
            first.append(&finished(&rows(4..6), "a")).await.unwrap();
            // The one in the middle: later indices exist.
            lose(&output, &ledger, 1, loss).await;
            let status = ledger.status().await.unwrap();
            let seen = if loss == Loss::SameSize { 0 } else { 2 };
            assert_eq!(status.tally.rows(), 6 - seen, "{loss:?}: what is lost is not done");
            assert_eq!(
                (status.open[0].rows_damaged, status.open[0].rows_done),
                (seen, 6 - seen)
            );

            let mut log = open_shard(&ledger, 0).await;
            if loss == Loss::SameSize {
                assert!(log.is_complete(), "a listing does not show it");
                let error = log.publish(maker(extension)).await.unwrap_err();
                assert!(matches!(error, LedgerError::Lost { .. }), "{error:?}");
                let said = error.to_string();
                assert!(
                    said.contains("is damaged") && said.contains("its 2 rows are computed again"),
                    "{said}"
                );
                log = open_shard(&ledger, 0).await;
            }
            assert_eq!(log.uncovered(), rows(2..4), "{loss:?}");
            assert_eq!(published_rows(&output).await, Vec::<i64>::new());
            let void: serde_json::Value = serde_json::from_str(&text(&output, &ledger.keys().log(0, 3)).await).unwrap();
            let found = if loss == Loss::Gone { "missing" } else { "differs" };
            // Version 2: who does not know of voids would publish without these rows.
            assert_eq!(
                (&void["v"], &void["voids"], &void["found"]),
                (&2.into(), &1.into(), &found.into())
            );
            let status = ledger.status().await.unwrap();
            assert_eq!((status.open[0].rows_damaged, status.open[0].rows_again), (0, 2));
            assert_eq!(status.tally.rows(), 4);

            log.append(&finished(&rows(0..6), "b")).await.unwrap();
            let commit = log.publish(maker(extension)).await.unwrap();
            assert_eq!(commit.tally.rows(), 6);
            assert_eq!(published_rows(&output).await, [0, 1, 2, 3, 4, 5]);
            let verified = ledger.verify(|_| ()).await.unwrap();
            assert!(verified.guarantee_holds(), "{:?}", verified.findings);
            // A retry takes the others' rows from the part.
            assert_eq!(failed(&ledger).await, RowSet::from_rows([1, 3, 5]));
            let retry = ledger.newest_generation().await.unwrap();
            let mut log = open_shard(&retry, 0).await;
            log.append(&finished_as(&log.uncovered(), "c", |_| "succeeded"))
                .await
                .unwrap();
            log.publish(maker(extension)).await.unwrap();
            assert_all_succeeded(&retry).await;
        }
    }
}

/// A listing may lack what is there: nothing is voided that was not missed twice.
#[tokio::test]
async fn what_was_missed_once_counts() {
    let store = Arc::new(InMemory::new());
    let output = place(store.clone());
    let ledger = job(&output, "parquet").await;
    let mut first = open_shard(&ledger, 0).await;
    first.append(&finished(&rows(0..2), "a")).await.unwrap();
    let record: serde_json::Value = serde_json::from_str(&text(&output, &ledger.keys().log(0, 0)).await).unwrap();
    let key = ledger.keys().data(0, record["data"]["name"].as_str().unwrap());
    let (data, bytes) = (at(&output, &key), bytes_at(&output, &key).await);
    store.delete(&data).await.unwrap();
    // It is there again when it is read.
    let comes_back = {
        let (store, data) = (store.clone(), data.clone());
        FaultStore::new(store.clone(), false, move |op, path| {
            if op == Op::Get && *path == data {
                store.put(&data, bytes.clone().into()).now_or_never().unwrap().unwrap();
            }
            Fault::None
        })
    };
    let output = place(Arc::new(comes_back));
    let ledger = Ledger::open_in(eager(&output)).await.unwrap().unwrap();
    assert_eq!(open_shard(&ledger, 0).await.uncovered(), rows(2..6));
    assert!(
        store.head(&at(&output, &ledger.keys().log(0, 1))).await.is_err(),
        "nothing was voided"
    );
}

/// Who voids and who publishes the same rows, in any order: the part that stands is committed, and counted as it is.
#[tokio::test]
async fn the_part_that_stands_is_the_one_that_counts() {
    for extension in ["parquet", "jsonl"] {
        let output = memory();
        let ledger = job(&output, extension).await;
        // Has what it wrote in memory, so it can publish whatever is lost.
        let mut quick = open_shard(&ledger, 0).await;
        quick
            .append(&finished_as(&rows(0..6), "quick", |_| "succeeded"))
            .await
            .unwrap();
        lose(&output, &ledger, 0, Loss::Gone).await;
        let mut slow = open_shard(&ledger, 0).await;
        assert_eq!(slow.uncovered(), rows(0..6));
        slow.append(&finished_as(&rows(0..6), "slow", |_| "errored"))
            .await
            .unwrap();
        // The quick one dies between part and commit.
        let kept = std::sync::Mutex::new(None);
        let made = quick.publish(|batches, metadata| {
            *kept.lock().unwrap() = Some(maker(extension)(batches, metadata)?);
            Err::<bytes::Bytes, String>("killed".into())
        });
        assert!(made.await.is_err());
        let bytes = kept.into_inner().unwrap().unwrap();
        let name = ledger.keys().part(0);
        output
            .store
            .put(&at(&output, &name), bytes.clone().into())
            .await
            .unwrap();
        let commit = slow.publish(maker(extension)).await.unwrap();
        assert_eq!((commit.tally.succeeded, commit.tally.errored), (6, 0), "{extension}");
        assert_eq!(commit.part.size, bytes.len() as u64);
        let verified = ledger.verify(|_| ()).await.unwrap();
        assert!(verified.guarantee_holds(), "{:?}", verified.findings);
        // Of the log, every row failed; of the part, none: nothing is to be retried.
        assert!(ledger.retry().await.unwrap().is_none());
        // The quick one wakes: nothing changes.
        assert_eq!(quick.publish(maker(extension)).await.unwrap(), commit);
    }
}

/// What a committed shard's log has lost is nobody's loss: it voids nothing, and a retry takes the rows from the part.
#[tokio::test]
async fn a_committed_shard_needs_its_data_no_more() {
    for extension in ["parquet", "jsonl"] {
        let output = memory();
        let ledger = job(&output, extension).await;
        let mut log = open_shard(&ledger, 0).await;
        log.append(&finished(&rows(0..6), "a")).await.unwrap();
        let mut other = open_shard(&ledger, 0).await;
        log.publish(maker(extension)).await.unwrap();
        lose(&output, &ledger, 0, Loss::Gone).await;
        assert!(other.append(&finished(&rows(0..6), "b")).await.unwrap().is_empty());
        other.publish(maker(extension)).await.unwrap();
        assert!(ledger.void_lost(0).await.unwrap().is_empty());
        assert!(matches!(ledger.shard(0).await.unwrap(), ShardState::Committed(_)));
        assert_eq!(failed(&ledger).await, RowSet::from_rows([1, 3, 5]), "{extension}");
        let retry = ledger.newest_generation().await.unwrap();
        let mut log = open_shard(&retry, 0).await;
        log.append(&finished_as(&log.uncovered(), "c", |_| "succeeded"))
            .await
            .unwrap();
        // The retry's own data is lost, too: it is voided in its own log.
        lose(&output, &retry, 0, Loss::SameSize).await;
        let mut log = open_shard(&retry, 0).await;
        assert!(matches!(
            log.publish(maker(extension)).await,
            Err(LedgerError::Lost { .. })
        ));
        log = open_shard(&retry, 0).await;
        assert_eq!(log.uncovered(), RowSet::from_rows([1, 3, 5]));
        log.append(&finished_as(&log.uncovered(), "d", |_| "succeeded"))
            .await
            .unwrap();
        let commit = log.publish(maker(extension)).await.unwrap();
        assert_eq!(commit.retried.unwrap().succeeded, 3);
        assert_all_succeeded(&retry).await;
    }
}

/// Two that find the same loss void it once, and a writer that has not heard of it loses its index and goes on.
#[tokio::test]
async fn a_loss_is_voided_once_and_seen_by_all_in_one_order() {
    let output = memory();
    let ledger = job(&output, "parquet").await;
    let mut writer = open_shard(&ledger, 0).await;
    writer.append(&finished(&rows(0..2), "a")).await.unwrap();
    lose(&output, &ledger, 0, Loss::Gone).await;
    let (one, two) = (ledger.void_lost(0).await.unwrap(), ledger.void_lost(0).await.unwrap());
    assert_eq!((one.len(), two.len()), (1, 0));
    assert_eq!(one[0].rows, 2);
    // It has the bytes still, but the rows are open to all.
    assert_eq!(writer.append(&finished(&rows(2..6), "a")).await.unwrap(), rows(2..6));
    assert_eq!(writer.uncovered(), rows(0..2));
    assert_eq!(writer.append(&finished(&rows(0..2), "a")).await.unwrap(), rows(0..2));
    writer.publish(part).await.unwrap();
    assert!(ledger.verify(|_| ()).await.unwrap().guarantee_holds());
    // Foreign bytes as voids are errors, not panics.
    let key = ledger.keys().log(0, 1);
    let good = text(&output, &key).await;
    for (from, to) in [
        ("\"voids\":0", "\"voids\":1"),
        ("\"voids\":0", "\"voids\":7"),
        ("\"v\":2", "\"v\":1"),
        ("\"missing\"", "\"eaten\""),
    ] {
        let bad = good.replace(from, to);
        assert_ne!(bad, good);
        output.store.put(&at(&output, &key), bad.clone().into()).await.unwrap();
        let error = gristmill::ledger::log::ShardLog::load(&ledger, 0).await.unwrap_err();
        assert!(matches!(error, LedgerError::Damaged { .. }), "{bad}: {error:?}");
    }
    output
        .store
        .put(&at(&output, &key), good.replace("\"v\":2", "\"v\":3").into())
        .await
        .unwrap();
    let error = gristmill::ledger::log::ShardLog::load(&ledger, 0).await.unwrap_err();
    assert!(
        matches!(error, LedgerError::Newer { found: 3, known: 2, .. }),
        "{error:?}"
    );
}

/// All six rows stand in the parts, and the guarantee holds.
async fn assert_all_succeeded(ledger: &Ledger) {
    let verified = ledger.verify(|_| ()).await.unwrap();
    assert!(
        verified.guarantee_holds() && verified.tally.succeeded == 6,
        "{:?}",
        verified.findings
    );
}

/// Shard 0, whose attempts that never ended are known to be dead.
async fn judged(ledger: &Ledger) -> Box<ShardLog> {
    let mut log = open_shard(ledger, 0).await;
    log.set_fates(|_| Fate::Dead);
    log
}

/// Rows that were finished once are not what ended an attempt.
#[tokio::test]
async fn lost_rows_are_not_suspected() {
    let output = memory();
    let ledger = job(&output, "parquet").await;
    for _ in 0..3 {
        let mut log = judged(&ledger).await;
        log.begin("w", &rows(0..1), true).await.unwrap();
    }
    let mut log = judged(&ledger).await;
    assert_eq!(log.plan_attempt().accused, rows(0..1));
    log.append(&finished(&rows(0..1), "w")).await.unwrap();
    lose(&output, &ledger, 0, Loss::Gone).await;
    let plan = judged(&ledger).await.plan_attempt();
    assert!(
        plan.accused.is_empty() && plan.next_rows == rows(0..6) && !plan.is_alone(),
        "{plan:?}"
    );
}

/// What its commit names is what readers may have seen: a part that is made again is the same, or is not put there.
#[tokio::test]
async fn a_lost_part_is_replaced_by_the_same_bytes_alone() {
    let output = memory();
    let ledger = job(&output, "parquet").await;
    run_shard(&ledger, 0).await;
    let name = ledger.keys().part(0);
    let bytes = bytes_at(&output, &name).await;
    output.store.delete(&at(&output, &name)).await.unwrap();
    let ShardState::Committed(commit) = ledger.shard(0).await.unwrap() else {
        panic!("it was committed");
    };
    assert_eq!(ledger.unfinished_shards().await.unwrap(), [0]);
    let other = |_: &[_], _: &[_]| Ok::<_, String>(bytes::Bytes::from_static(b"other rows"));
    let error = ledger.restore_part(&commit, other).await.unwrap_err();
    assert!(error.to_string().contains("differs from the committed one"), "{error}");
    assert!(
        output.store.head(&at(&output, &name)).await.is_err(),
        "nothing was put there"
    );
    assert!(ledger.restore_part(&commit, part).await.unwrap());
    assert!(!ledger.restore_part(&commit, part).await.unwrap(), "it is there");
    assert_eq!(bytes_at(&output, &name).await, bytes);
    assert!(ledger.unfinished_shards().await.unwrap().is_empty());
    assert!(ledger.finish_check(None).await.unwrap().is_some());
}
