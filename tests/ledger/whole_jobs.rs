//! From the first record to `_SUCCESS`: blocks, status, control, verification, and what it costs.

use std::sync::Arc;

use gristmill::dataset::store::location::Location;
use gristmill::ledger::status::State;
use gristmill::ledger::{Extension, JobCommand, Ledger, PinOrder, RowSet, StopWhy};
use object_store::ObjectStoreExt;
use object_store::memory::InMemory;

use super::support::*;

async fn job(output: &Location, shards: u32, rows: u64) -> Ledger {
    Ledger::create_or_resume_in(eager(output), draft("whole", shards, rows))
        .await
        .unwrap()
        .0
}

#[tokio::test]
async fn blocks_close_and_the_last_commit_writes_success() {
    let output = memory();
    let ledger = job(&output, 205, 2).await;
    ledger.write_spend("a", 1800.0, false).await.unwrap();
    ledger.write_spend("b", 1800.0, false).await.unwrap();
    // The last shard first, so that blocks close out of order.
    for shard in (1..205).rev() {
        run_shard(&ledger, shard).await;
    }
    assert_eq!(
        ledger
            .store()
            .list(&ledger.keys().digests_prefix())
            .await
            .unwrap()
            .len(),
        2
    );
    assert!(ledger.success().await.unwrap().is_none());
    assert!(ledger.finish_check(None).await.unwrap().is_none());
    let status = ledger.status().await.unwrap();
    assert_eq!(
        (status.shards.done, status.shards.open, status.tally.rows()),
        (204, 0, 408)
    );
    run_shard(&ledger, 0).await;
    let success = ledger.success().await.unwrap().unwrap();
    assert_eq!(
        (success.rows, success.parts, success.seconds, success.usd),
        (410, 205, 3600.0, Some(2.0))
    );
    assert_eq!((success.tally.succeeded, success.tally.errored), (205, 205));
    assert_eq!(
        (
            success.tally.prompt_tokens,
            success.tally.cached_tokens,
            success.tally.completion_tokens
        ),
        (410 * 5, 410 * 2, 410 * 3)
    );
    assert_eq!(published_rows(&output).await, (0..410).collect::<Vec<_>>());
    assert!(ledger.verify(|_| ()).await.unwrap().guarantee_holds());
    let status = ledger.status().await.unwrap();
    assert_eq!(
        (status.state, status.shards.done, status.tally),
        (State::Finished, 205, success.tally)
    );
}

#[tokio::test]
async fn a_kill_before_success_is_made_good_by_whoever_comes_next() {
    let output = memory();
    let ledger = job(&output, 2, 3).await;
    run_shard(&ledger, 0).await;
    run_shard(&ledger, 1).await;
    let success = output.path.clone().join("_SUCCESS");
    let digest = ledger.keys().digest(0);
    let digest = digest
        .split('/')
        .fold(output.path.clone(), |path, part| path.join(part));
    // As a redelivered message finds it, and as a look at idle finds it; with and without the digest.
    for (redelivered, keep_digest) in [(true, false), (true, true), (false, false), (false, true)] {
        output.store.delete(&success).await.unwrap();
        if !keep_digest {
            output.store.delete(&digest).await.unwrap();
        }
        if redelivered {
            ledger.shard(1).await.unwrap();
        } else {
            ledger.finish_check(None).await.unwrap();
        }
        assert!(ledger.success().await.unwrap().is_some());
    }
}

#[tokio::test]
async fn a_job_without_rows_is_finished_at_once() {
    let output = memory();
    let ledger = job(&output, 0, 1).await;
    assert_eq!(ledger.finish_check(None).await.unwrap().unwrap().rows, 0);
    assert!(ledger.verify(|_| ()).await.unwrap().guarantee_holds());
}

#[tokio::test]
async fn status_names_the_worker_that_began_last() {
    let output = memory();
    let ledger = job(&output, 1, 10).await;
    for number in 0..8 {
        let mut log = open_shard(&ledger, 0).await;
        log.begin(format!("w{number}").as_str(), &log.uncovered(), false)
            .await
            .unwrap();
    }
    let open = &ledger.status().await.unwrap().open[0];
    assert_eq!((open.attempts, open.worker.as_deref()), (8, Some("w7")));
}

#[tokio::test]
async fn status_follows_logs_orders_and_spendings() {
    let output = memory();
    let ledger = job(&output, 4, 10).await;
    let status = ledger.status().await.unwrap();
    assert_eq!(
        (status.state, status.rows, status.tally.rows(), status.usd),
        (State::Running, 40, 0, Some(0.0))
    );
    run_shard(&ledger, 2).await;
    let mut log = open_shard(&ledger, 0).await;
    log.append(&finished(&RowSet::from_range(0..4), "a")).await.unwrap();
    // Two attempts at shard 1 never ended, one at shard 0.
    log.begin("a", &log.uncovered(), false).await.unwrap();
    let mut stuck = open_shard(&ledger, 1).await;
    for _ in 0..2 {
        stuck.begin("a", &stuck.uncovered(), false).await.unwrap();
    }
    ledger.write_spend("a", 3600.0, false).await.unwrap();
    let status = ledger.status().await.unwrap();
    let shards = status.shards;
    assert_eq!((shards.total, shards.done, shards.open), (4, 1, 2));
    assert_eq!(shards.stuck, 0, "workers may be at it side by side");
    let later = chrono::Utc::now() + chrono::TimeDelta::seconds(61);
    assert_eq!(ledger.status_at(later).await.unwrap().shards.stuck, 1);
    assert_eq!(
        (status.tally.rows(), status.seconds, status.usd),
        (14, 3600.0, Some(2.0))
    );

    for (why, state) in [
        (StopWhy::Budget, State::BudgetReached),
        (StopWhy::Deadline, State::DeadlineReached),
        (StopWhy::Cancelled, State::Cancelled),
    ] {
        assert!(
            ledger
                .control()
                .await
                .unwrap()
                .try_append(JobCommand::stop(why, false))
                .await
                .unwrap()
        );
        assert_eq!(ledger.status().await.unwrap().state, state);
    }
    let extend = JobCommand::Extend(Extension {
        budget_usd: Some(5.0),
        ..Extension::default()
    });
    assert!(ledger.control().await.unwrap().try_append(extend).await.unwrap());
    assert_eq!(ledger.status().await.unwrap().state, State::Running);
    let spent = ledger.spendings().await.unwrap();
    assert_eq!((spent.by_worker.len(), spent.device_seconds()), (1, 3600.0));
    assert!(spent.by_worker[0].written_at >= ledger.created_at());
}

#[tokio::test]
async fn an_order_that_lost_the_race_is_for_its_giver_to_decide_again() {
    let output = memory();
    let ledger = job(&output, 1, 1).await;
    let (mut a, mut b) = (ledger.control().await.unwrap(), ledger.control().await.unwrap());
    assert!(
        a.try_append(JobCommand::Extend(Extension {
            deadline_seconds: Some(60),
            ..Extension::default()
        }))
        .await
        .unwrap()
    );
    assert!(!b.try_append(JobCommand::stop(StopWhy::Budget, false)).await.unwrap());
    assert_eq!((b.stop_reason(), b.commands().len()), (None, 1));
    assert!(b.try_append(JobCommand::stop(StopWhy::Deadline, false)).await.unwrap());
    assert_eq!(
        a.refresh().await.unwrap(),
        Some(&JobCommand::stop(StopWhy::Deadline, false))
    );
    assert_eq!(a.commands(), b.commands());
}

/// A pin says nothing of whether the job goes on.
#[tokio::test]
async fn a_pin_after_a_stop_does_not_hide_it() {
    let ledger = job(&memory(), 1, 1).await;
    let mut control = ledger.control().await.unwrap();
    assert!(
        control
            .try_append(JobCommand::stop(StopWhy::Cancelled, true))
            .await
            .unwrap()
    );
    let pin = PinOrder {
        input: 0,
        size: 1,
        etag: Some("other".into()),
        version: None,
    };
    control.record_pin(pin).await.unwrap();
    let control = ledger.control().await.unwrap();
    assert_eq!((control.commands().len(), control.pins().count()), (2, 1));
    assert_eq!(
        (control.stop_reason(), control.is_closing()),
        (Some(StopWhy::Cancelled), true)
    );
}

#[tokio::test]
async fn attempts_that_ended_are_forgiven() {
    let output = memory();
    let ledger = job(&output, 1, 600).await;
    let rows = RowSet::from_range(0..600);
    let mut log = open_shard(&ledger, 0).await;
    for _ in 0..3 {
        let attempt = log.begin("a", &rows, false).await.unwrap();
        log.end(&attempt).await.unwrap();
    }
    assert_eq!(open_shard(&ledger, 0).await.plan_attempt().rows_per_try, None);
    for _ in 0..2 {
        log.begin("a", &rows, false).await.unwrap();
    }
    let attempts = ledger.shard_attempts(0).await.unwrap();
    assert_eq!(
        attempts
            .iter()
            .filter(|attempt| !attempt.has_ended && attempt.rows == rows)
            .count(),
        2
    );
    let narrowed = open_shard(&ledger, 0).await.plan_attempt();
    assert_eq!(
        (narrowed.rows_per_try, narrowed.next_rows),
        (Some(256), RowSet::from_range(0..256))
    );
    assert!(log.begin("../x", &rows, false).await.is_err());
}

/// The design allows ten requests a shard beside the reading of its input.
#[tokio::test]
async fn a_shard_costs_at_most_ten_requests() {
    let faulty = Arc::new(FaultStore::new(Arc::new(InMemory::new()), false, |_, _| Fault::None));
    let output = place(faulty.clone());
    let ledger = job(&output, 3, 8).await;
    faulty.counts.lock().unwrap().clear();
    run_shard(&ledger, 1).await;
    let counts = faulty.counts.lock().unwrap().clone();
    assert!(counts.values().sum::<u32>() <= 10, "{counts:?}");
    assert!(counts.contains_key(&Op::Put), "{counts:?}");
}

/// Every way in which a finished output can be wrong is found, and named.
#[tokio::test]
async fn verification_finds_what_is_wrong() {
    let finished_job = async || {
        let output = memory();
        let ledger = job(&output, 3, 4).await;
        for shard in 0..3 {
            run_shard(&ledger, shard).await;
        }
        assert!(ledger.verify(|_| ()).await.unwrap().guarantee_holds());
        (output, ledger)
    };
    let expect = async |ledger: &Ledger, want: &str| {
        let findings = ledger.verify(|_| ()).await.unwrap().findings;
        assert!(
            findings.iter().any(|line| line.contains(want)),
            "`{want}` is not among {findings:#?}"
        );
    };
    let at = |output: &Location, key: &str| key.split('/').fold(output.path.clone(), |path, part| path.join(part));

    let (output, ledger) = finished_job().await;
    let first = output
        .store
        .get(&at(&output, "part-00000.parquet"))
        .await
        .unwrap()
        .bytes()
        .await
        .unwrap();
    output
        .store
        .put(&at(&output, "part-00001.parquet"), first.clone().into())
        .await
        .unwrap();
    expect(&ledger, "`part-00001.parquet` is not the part that was committed").await;
    expect(&ledger, "`part-00001.parquet` is foreign").await;
    expect(&ledger, "has row 0 in place of row 4").await;

    let (output, ledger) = finished_job().await;
    output.store.delete(&at(&output, "part-00002.parquet")).await.unwrap();
    expect(&ledger, "`part-00002.parquet` is missing").await;

    let (output, ledger) = finished_job().await;
    output
        .store
        .put(&at(&output, "part-00003.parquet"), first.clone().into())
        .await
        .unwrap();
    output
        .store
        .put(&at(&output, "more/rows.parquet"), first.clone().into())
        .await
        .unwrap();
    expect(&ledger, "`part-00003.parquet` is beside the parts").await;
    expect(&ledger, "`more/rows.parquet` is beside the parts").await;

    let (output, ledger) = finished_job().await;
    output
        .store
        .put(
            &at(&output, "part-00000.parquet"),
            first.slice(..first.len() / 2).into(),
        )
        .await
        .unwrap();
    expect(&ledger, "`part-00000.parquet` cannot be read").await;

    // The right rows, differently answered: only the hash can tell.
    let (output, ledger) = finished_job().await;
    let batch = finished(&RowSet::from_rows([0, 1, 2, 3]), "somebody else");
    let ordered =
        arrow::compute::take_record_batch(&batch, &arrow::array::UInt64Array::from(vec![3, 2, 1, 0])).unwrap();
    let forged = part(&[ordered], &ledger.provenance(0)).unwrap();
    output
        .store
        .put(&at(&output, "part-00000.parquet"), forged.into())
        .await
        .unwrap();
    let findings = ledger.verify(|_| ()).await.unwrap().findings;
    assert_eq!(
        findings,
        [
            "`part-00000.parquet` is not the part that was committed, its size or hash differs: move it away, then \
          `gristmill run` builds it again, or, after `clean`, restore it from a backup"
        ]
    );

    // Rows out of order, then one short.
    for rows in [vec![2, 3, 1, 0], vec![3, 2, 1]] {
        let wrong = arrow::compute::take_record_batch(&batch, &arrow::array::UInt64Array::from(rows)).unwrap();
        let wrong = part(&[wrong], &ledger.provenance(0)).unwrap();
        output
            .store
            .put(&at(&output, "part-00000.parquet"), wrong.into())
            .await
            .unwrap();
        let findings = ledger.verify(|_| ()).await.unwrap().findings;
        assert!(
            findings
                .iter()
                .any(|line| line.contains("in place of row") || line.contains("ends before")),
            "{findings:?}"
        );
    }

    let (output, ledger) = finished_job().await;
    output.store.delete(&at(&output, "_SUCCESS")).await.unwrap();
    expect(&ledger, "`_SUCCESS` is missing, though every shard is committed").await;
    output
        .store
        .delete(&at(&output, &ledger.keys().commit(1)))
        .await
        .unwrap();
    expect(
        &ledger,
        "the job is not finished: 1 of its 3 shards have no readable commit, and were not verified: 1",
    )
    .await;

    let (output, ledger) = finished_job().await;
    let success = output
        .store
        .get(&at(&output, "_SUCCESS"))
        .await
        .unwrap()
        .bytes()
        .await
        .unwrap();
    let forged = String::from_utf8(success.to_vec()).unwrap();
    let forged = forged
        .replace("\"succeeded\":6,", "\"succeeded\":5,")
        .replace("\"errored\":6,", "\"errored\":7,");
    output.store.put(&at(&output, "_SUCCESS"), forged.into()).await.unwrap();
    expect(&ledger, "the counts of `_SUCCESS` differ").await;

    // Records that are valid by themselves, and say something else than the others.
    let success = |_: &Ledger| "_SUCCESS".to_string();
    let commit = |ledger: &Ledger| ledger.keys().commit(1);
    let digest = |ledger: &Ledger| ledger.keys().digest(0);
    type KeyOf = fn(&Ledger) -> String;
    for (key, from, to, want) in [
        (
            success as KeyOf,
            "\"rows\":12,\"parts\":3,\"succeeded\":6,\"invalid_output\":0,\"errored\":6,",
            "\"rows\":16,\"parts\":3,\"succeeded\":6,\"invalid_output\":0,\"errored\":10,",
            "`_SUCCESS` counts 16 rows, the inputs have 12",
        ),
        (
            success,
            "\"parts\":3,",
            "\"parts\":2,",
            "the parts named by `_SUCCESS` are not",
        ),
        (
            success,
            "\"parts_sha256\":\"",
            "\"parts_sha256\":\"0",
            "the parts named by `_SUCCESS` are not",
        ),
        (digest, "\"size\":", "\"size\":1", "the digest of block 0 differs"),
        (
            commit,
            "\"shard\":1,",
            "\"shard\":0,",
            "is no commit of shard 1: it names job",
        ),
        (
            commit,
            "\"shard\":1,",
            "\"shard\":1,\"generation\":1,",
            "is no commit of shard 1: it names generation 1",
        ),
        (
            commit,
            "part-00001",
            "part-00002",
            "is no commit of shard 1: it names part `part-00002.parquet`",
        ),
        (
            commit,
            "\"succeeded\":2,",
            "\"succeeded\":3,",
            "is no commit of shard 1: it has 5 rows, the shard 4",
        ),
    ] {
        let (output, ledger) = finished_job().await;
        let path = at(&output, &key(&ledger));
        let bytes = output.store.get(&path).await.unwrap().bytes().await.unwrap();
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        assert!(text.contains(from), "`{from}` is not in {text}");
        output.store.put(&path, text.replace(from, to).into()).await.unwrap();
        expect(&ledger, want).await;
    }
}

#[tokio::test]
async fn lines_are_published_and_verified_too() {
    let output = memory();
    let mut job = draft("lines", 1, 3);
    job.part_extension = "jsonl".into();
    let (ledger, _) = Ledger::create_or_resume_in(eager(&output), job).await.unwrap();
    let mut log = open_shard(&ledger, 0).await;
    log.append(&finished(&log.uncovered(), "a")).await.unwrap();
    log.publish(lines).await.unwrap();
    let verified = ledger.verify(|_| ()).await.unwrap();
    assert!(verified.guarantee_holds(), "{:?}", verified.findings);
    assert!(
        verified
            .tally
            .agrees_with(&ledger.success().await.unwrap().unwrap().tally)
    );
    let path = output.path.clone().join("part-00000.jsonl");
    let good = output.store.get(&path).await.unwrap().bytes().await.unwrap();
    let good = String::from_utf8(good.to_vec()).unwrap();
    let all: Vec<&str> = good.lines().collect();
    let id = ledger.job().job.as_str();
    for (bad, want) in [
        ("x\nx\nx\n".to_string(), "line 1 is no result of a batch"),
        (
            format!("{}\n{}\n", all[0], all[1]),
            "ends before row 2; its shard ends before row 3",
        ),
        (
            format!("{good}{}\n", all[2]),
            "goes on after row 2, the last of its shard",
        ),
        (format!("{}\n{}\n{}\n", all[0], all[2], all[1]), "where `batch_req_"),
        (
            good.replace(id, "00000000000000000000"),
            "line 1 has id `batch_req_00000000000000000000_0` where",
        ),
        (
            good.replace("errored", "succeeded"),
            "its rows by status, or their tokens, are not as committed",
        ),
        (
            good.replacen("\"prompt_tokens\":5", "\"prompt_tokens\":6", 1),
            "are not as committed",
        ),
    ] {
        output.store.put(&path, bad.into()).await.unwrap();
        let findings = ledger.verify(|_| ()).await.unwrap().findings;
        assert!(
            findings.iter().any(|line| line.contains(want)),
            "`{want}`: {findings:?}"
        );
    }
}

#[tokio::test]
async fn a_part_that_cannot_be_made_fails_the_shard_alone() {
    let output = memory();
    let ledger = job(&output, 2, 2).await;
    let mut log = open_shard(&ledger, 0).await;
    assert!(
        log.publish(part)
            .await
            .unwrap_err()
            .to_string()
            .contains("rows 0-1 are not logged yet")
    );
    log.append(&finished(&log.uncovered(), "a")).await.unwrap();
    let error = log
        .publish(|_, _| Err::<bytes::Bytes, _>("no such column"))
        .await
        .unwrap_err();
    assert_eq!(error.to_string(), "shard 0: no such column");
    run_shard(&ledger, 1).await;
    log.publish(part).await.unwrap();
    assert!(ledger.success().await.unwrap().is_some());
}

/// Log records name their data objects: those of an older gristmill ended in `.parquet`, and count as they did.
#[tokio::test]
async fn data_objects_of_the_older_name_count() {
    let output = memory();
    let ledger = job(&output, 1, 6).await;
    let at = |key: &str| key.split('/').fold(output.path.clone(), |path, part| path.join(part));
    let mut log = open_shard(&ledger, 0).await;
    log.append(&finished(&RowSet::from_range(0..4), "before"))
        .await
        .unwrap();
    let listed = ledger.store().list(&ledger.keys().shard_prefix(0)).await.unwrap();
    let data = listed.iter().find(|object| object.key.contains("/data/")).unwrap();
    assert!(data.key.ends_with(".rows"), "{data:?}");
    let older = data.key.replace(".rows", ".parquet");
    output.store.rename(&at(&data.key), &at(&older)).await.unwrap();
    let record = at(&ledger.keys().log(0, 0));
    let bytes = output.store.get(&record).await.unwrap().bytes().await.unwrap();
    let text = String::from_utf8(bytes.to_vec())
        .unwrap()
        .replace(".rows\"", ".parquet\"");
    output.store.put(&record, text.into()).await.unwrap();

    let mut log = open_shard(&ledger, 0).await;
    assert_eq!(log.uncovered(), RowSet::from_range(4..6));
    log.append(&finished(&log.uncovered(), "after")).await.unwrap();
    log.publish(part).await.unwrap();
    assert_eq!(published_rows(&output).await, [0, 1, 2, 3, 4, 5]);
    assert!(ledger.verify(|_| {}).await.unwrap().guarantee_holds());
}
