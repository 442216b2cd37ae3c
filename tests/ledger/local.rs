//! The ledger in a local folder: hard links, stages, threads, and what the disk refuses.

use std::io::ErrorKind;
use std::path::Path as FsPath;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use gristmill::dataset::store::location::Location;
use gristmill::ledger::log::ShardState;
use gristmill::ledger::store::CreateOutcome;
use gristmill::ledger::{Ledger, LedgerError, Store};

use super::support::*;

fn folder() -> (tempfile::TempDir, Location) {
    let dir = tempfile::tempdir().unwrap();
    let output = Location::parse("out", dir.path()).unwrap();
    (dir, output)
}

/// The local folder behind a store that fails as `plan` says.
fn failing(output: &Location, plan: impl FnMut(Op, &object_store::path::Path) -> Fault + Send + 'static) -> Store {
    let store = FaultStore::new(Store::object_store(output), false, plan);
    Store::with_inner(output, Arc::new(store), EAGER).unwrap()
}

/// Every file below `folder`, relative to it.
fn files(folder: &FsPath) -> Vec<String> {
    let mut out = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                out.push(path.strip_prefix(folder).unwrap().display().to_string());
            }
        }
    }
    out.sort();
    out
}

#[tokio::test]
async fn a_whole_job_leaves_parts_and_nothing_beside_them() {
    let (dir, output) = folder();
    let (ledger, resumed) = Ledger::create_or_resume(&output, draft("local", 3, 5)).await.unwrap();
    assert!(!resumed);
    ledger.write_spend("w", 1.5, false).await.unwrap();
    ledger.write_spend("w", 2.5, false).await.unwrap();
    for shard in 0..3 {
        run_shard(&ledger, shard).await;
    }
    let all = files(&dir.path().join("out"));
    let visible: Vec<_> = all.iter().filter(|name| !name.starts_with("_gristmill")).collect();
    assert_eq!(
        visible,
        [
            "_SUCCESS",
            "part-00000.parquet",
            "part-00001.parquet",
            "part-00002.parquet"
        ]
    );
    assert!(
        !all.iter().any(|name| name.contains('#') || name.contains("tmp/")),
        "{all:?}"
    );
    assert_eq!(published_rows(&output).await, (0..15).collect::<Vec<_>>());
    let verified = ledger.verify(|_| ()).await.unwrap();
    assert_eq!(
        (verified.findings, verified.parts, verified.tally.rows()),
        (vec![], 3, 15)
    );
    assert_eq!(ledger.success().await.unwrap().unwrap().seconds, 2.5);
    // The same job again: nothing left to do.
    let (again, resumed) = Ledger::create_or_resume(&output, draft("local", 3, 5)).await.unwrap();
    assert!(resumed && again.job() == ledger.job());
    assert!(again.is_committed(2).await.unwrap());
    assert_eq!(files(&dir.path().join("out")), all);
}

#[test]
fn many_threads_create_one_key_and_one_wins() {
    let (_dir, output) = folder();
    for round in 0..20 {
        let key = format!("_gristmill/race-{round}");
        let outcomes: Vec<(Bytes, CreateOutcome)> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|n| {
                    let (key, output) = (key.clone(), output.clone());
                    scope.spawn(move || {
                        let runtime = tokio::runtime::Builder::new_current_thread()
                            .enable_all()
                            .build()
                            .unwrap();
                        let bytes = Bytes::from(format!("thread {n}"));
                        let store = Store::new(&output).unwrap();
                        (bytes.clone(), runtime.block_on(store.create(&key, bytes)).unwrap())
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let winners: Vec<_> = outcomes
            .iter()
            .filter(|(_, created)| *created == CreateOutcome::Ours)
            .collect();
        assert_eq!(winners.len(), 1);
        let winner = winners[0].0.clone();
        assert!(
            outcomes
                .iter()
                .all(|(bytes, created)| *bytes == winner || *created == CreateOutcome::Theirs(winner.clone()))
        );
    }
}

#[test]
fn two_runs_at_once_end_with_each_row_once() {
    let (dir, output) = folder();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let runtime = tokio::runtime::Builder::new_multi_thread()
                    .worker_threads(2)
                    .enable_all()
                    .build()
                    .unwrap();
                // Spawned: the ledger's futures can move between threads.
                let output = output.clone();
                let run = runtime.spawn(async move {
                    let (ledger, _) = Ledger::create_or_resume(&output, draft("twice", 4, 6)).await.unwrap();
                    for shard in 0..4 {
                        let ShardState::Open(mut log) = ledger.shard(shard).await.unwrap() else {
                            continue;
                        };
                        while !log.is_complete() {
                            let rows = log.uncovered().first(2);
                            let attempt = log.begin("x", &rows, false).await.unwrap();
                            log.append(&finished(&rows, "x")).await.unwrap();
                            log.end(&attempt).await.unwrap();
                        }
                        log.publish(part).await.unwrap();
                    }
                    ledger.control().await.unwrap().refresh().await.unwrap();
                    ledger.status().await.unwrap();
                    ledger.verify(|_| ()).await.unwrap();
                });
                runtime.block_on(run).unwrap();
            });
        }
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        assert_eq!(published_rows(&output).await, (0..24).collect::<Vec<_>>());
        let ledger = Ledger::open(&output).await.unwrap().unwrap();
        assert_eq!(ledger.verify(|_| ()).await.unwrap().findings, Vec::<String>::new());
        assert!(ledger.success().await.unwrap().is_some());
    });
    assert!(!files(&dir.path().join("out")).iter().any(|name| name.contains("tmp/")));
}

#[tokio::test]
async fn stages_of_dead_runs_are_removed_when_old_and_left_when_fresh() {
    let (dir, output) = folder();
    let (tmp, writer) = (dir.path().join("out/_gristmill/tmp"), "0123456789abcdef0123");
    std::fs::create_dir_all(tmp.join("folder")).unwrap();
    for (name, hours) in [("-1", 3), ("-1#1", 3), ("-2", 0), ("-2#1", 0)] {
        let file = std::fs::File::create(tmp.join(format!("{writer}{name}"))).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(hours * 3600))
            .unwrap();
    }
    Store::new(&output).unwrap().check().await.unwrap();
    assert_eq!(files(&tmp), [format!("{writer}-2"), format!("{writer}-2#1")]);
    assert!(tmp.join("folder").is_dir());
}

#[tokio::test]
async fn a_stage_that_vanishes_is_staged_again() {
    let (dir, output) = folder();
    let tmp = dir.path().join("out/_gristmill/tmp");
    let mut first = true;
    let vanishing = failing(&output, move |op, _| {
        if op == Op::Copy && std::mem::take(&mut first) {
            for name in files(&tmp) {
                std::fs::remove_file(tmp.join(name)).unwrap();
            }
        }
        Fault::None
    });
    assert_eq!(
        vanishing.create("_gristmill/x", Bytes::from("x")).await.unwrap(),
        CreateOutcome::Ours
    );
    assert_eq!(eager(&output).get("_gristmill/x", 10).await.unwrap().unwrap(), "x");
}

/// One line that names the path and what to do, and no retries of what will not pass.
#[tokio::test]
async fn what_the_disk_refuses_for_good_is_one_clear_line() {
    let (dir, output) = folder();
    for (kind, why) in [
        (ErrorKind::StorageFull, "the disk is full"),
        (ErrorKind::QuotaExceeded, "quota"),
        (ErrorKind::PermissionDenied, "no permission"),
        (ErrorKind::ReadOnlyFilesystem, "read-only"),
    ] {
        let refusing = failing(
            &output,
            move |op, _| if op == Op::Put { Fault::Io(kind) } else { Fault::None },
        );
        let error = refusing.create("_gristmill/x", Bytes::from("x")).await.unwrap_err();
        let denied = kind == ErrorKind::PermissionDenied;
        let fits = match error {
            LedgerError::Denied { .. } => denied,
            LedgerError::Stop { .. } => !denied,
            _ => false,
        };
        assert!(fits, "{error:?}");
        let line = chain(&error);
        let path = dir.path().join("out/_gristmill/x").display().to_string();
        assert!(
            line.contains(why) && line.contains(&path) && !line.contains('\n'),
            "{line}"
        );
    }
}

#[tokio::test]
async fn a_full_disk_in_the_middle_of_a_shard_loses_nothing() {
    let (_dir, output) = folder();
    let (ledger, _) = Ledger::create_or_resume(&output, draft("full", 1, 4)).await.unwrap();
    let mut puts = 0;
    let full = failing(&output, move |op, _| {
        puts += u32::from(op == Op::Put);
        if op == Op::Put && puts > 2 {
            Fault::Io(ErrorKind::StorageFull)
        } else {
            Fault::None
        }
    });
    let cramped = Ledger::open_in(full).await.unwrap().unwrap();
    let mut log = open_shard(&cramped, 0).await;
    let rows = log.uncovered();
    log.append(&finished(&rows.first(2), "a")).await.unwrap();
    let error = log.append(&finished(&rows, "a")).await.unwrap_err();
    assert!(error.to_string().contains("the disk is full"), "{error}");
    // With space again, a new run goes on where it stopped.
    let log = open_shard(&ledger, 0).await;
    assert_eq!(log.covered(), &rows.first(2));
    run_shard(&ledger, 0).await;
    assert_eq!(published_rows(&output).await, [0, 1, 2, 3]);
}

#[tokio::test]
async fn errors_that_may_pass_are_retried_and_then_say_so() {
    let (_dir, output) = folder();
    let mut left = 2;
    let flaky = failing(&output, move |op, _| {
        let fails = op == Op::Put && left > 0;
        left -= i32::from(fails);
        if fails {
            Fault::Io(ErrorKind::Interrupted)
        } else {
            Fault::None
        }
    });
    assert_eq!(
        flaky.create("_gristmill/x", Bytes::from("x")).await.unwrap(),
        CreateOutcome::Ours
    );
    let broken = failing(&output, |op, _| {
        if op == Op::Put {
            Fault::Io(ErrorKind::TimedOut)
        } else {
            Fault::None
        }
    });
    let error = broken.create("_gristmill/y", Bytes::from("y")).await.unwrap_err();
    assert!(
        error.is_retryable() && error.to_string().contains("failed 3 times"),
        "{error}"
    );
}

#[tokio::test]
async fn a_file_system_without_hard_links_is_refused_at_the_start() {
    let (dir, output) = folder();
    for kind in [ErrorKind::Unsupported, ErrorKind::PermissionDenied] {
        let plain = failing(
            &output,
            move |op, _| if op == Op::Copy { Fault::Io(kind) } else { Fault::None },
        );
        let error = Ledger::create_or_resume_in(plain, draft("links", 1, 1))
            .await
            .unwrap_err();
        assert!(matches!(error, LedgerError::Stop { .. }), "{error:?}");
        assert!(error.to_string().contains("cannot make hard links"), "{error}");
    }
    assert_eq!(files(&dir.path().join("out")), Vec::<String>::new());
}

#[tokio::test]
async fn an_output_below_a_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), "x").unwrap();
    let output = Location::parse("file/out", dir.path()).unwrap();
    let error = Ledger::create_or_resume_in(eager(&output), draft("below", 1, 1))
        .await
        .unwrap_err();
    assert!(matches!(error, LedgerError::Stop { .. }), "{error:?}");
    assert!(error.to_string().contains("file"), "{error}");
}

#[cfg(unix)]
#[tokio::test]
async fn an_output_folder_without_permission_is_refused_or_really_works() {
    use std::os::unix::fs::PermissionsExt;
    let (dir, output) = folder();
    let out = dir.path().join("out");
    std::fs::create_dir(&out).unwrap();
    std::fs::set_permissions(&out, std::fs::Permissions::from_mode(0o555)).unwrap();
    // The superuser may write all the same; then the job must be there afterwards.
    let allowed = std::fs::write(out.join("_try"), "").is_ok();
    let made = Ledger::create_or_resume(&output, draft("closed", 1, 1)).await;
    std::fs::set_permissions(&out, std::fs::Permissions::from_mode(0o755)).unwrap();
    match made {
        Ok(_) => assert!(allowed && out.join("_gristmill/job.json").is_file()),
        Err(error) => {
            assert!(!allowed && matches!(error, LedgerError::Denied { .. }), "{error:?}");
            assert!(error.to_string().contains("no permission"), "{error}");
            assert!(error.to_string().contains(&out.display().to_string()), "{error}");
        }
    }
}
