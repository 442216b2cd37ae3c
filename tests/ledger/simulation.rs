//! Several workers of one job, stepped request by request in any order, killed and paused at any point, over a store
//! that fails in every way that leaves the truth unclear, and loses data: every row is published exactly once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::FutureExt;
use gristmill::ledger::log::{ShardLog, ShardState};
use gristmill::ledger::{JobDraft, Ledger, LedgerError, Result, RowSet, Store};
use object_store::memory::InMemory;
use proptest::prelude::*;

use super::support::*;

const SHARDS: u32 = 3;
const ROWS: u64 = 7;
const WORKERS: usize = 3;
/// A worker that sees this many errors in a row gives up; another comes.
const PATIENCE: u32 = 4;

/// Steps in which everything that goes wrong is spelled out.
#[derive(Debug, Clone)]
enum Action {
    /// Worker goes on to its next request.
    Step(usize),
    /// Worker dies where it stands; a new one starts.
    Kill(usize),
    /// Worker is put to sleep where it stands, to wake when all is over; a new one starts.
    Sleep(usize),
    /// A request that nobody waits for takes effect.
    Arrive,
    /// A data object is lost.
    Lose(u64),
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        60 => (0..WORKERS).prop_map(Action::Step),
        2 => (0..WORKERS).prop_map(Action::Kill),
        1 => (0..WORKERS).prop_map(Action::Sleep),
        3 => Just(Action::Arrive),
        1 => any::<u64>().prop_map(Action::Lose),
    ]
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        20 => Just(Fault::None),
        1 => Just(Fault::Before),
        1 => Just(Fault::After),
        1 => Just(Fault::Exists),
        1 => Just(Fault::Late),
    ]
}

/// How workers differ.
#[derive(Debug, Clone, Copy)]
struct Habits {
    /// Rows an append.
    chunk: u64,
    /// Parts differ between workers, as between two versions of a writer.
    own_parts: bool,
    /// After an error, go on with the log at hand rather than read it anew.
    keep_log: bool,
    /// The job's parts are lines.
    lines: bool,
}

impl Habits {
    fn draft(&self) -> JobDraft {
        let mut draft = draft("simulated", SHARDS, ROWS);
        if self.lines {
            draft.part_extension = "jsonl".into();
        }
        draft
    }
}

async fn work(store: Store, author: u64, habits: Habits) -> Result<()> {
    let mut patience = PATIENCE;
    let ledger = loop {
        match Ledger::create_or_resume_in(store.clone(), habits.draft()).await {
            Ok((ledger, _)) => break ledger,
            Err(error) => give_up_after(&mut patience, error)?,
        }
    };
    for shard in (0..SHARDS).map(|n| (n + author as u32) % SHARDS) {
        loop {
            match ledger.shard(shard).await {
                Ok(ShardState::Committed(_)) => break,
                Ok(ShardState::Open(log)) => match work_on(log, author, habits, &mut patience).await {
                    Ok(()) => break,
                    Err(error) => give_up_after(&mut patience, error)?,
                },
                Err(error) => give_up_after(&mut patience, error)?,
            }
        }
    }
    ledger.finish_check(None).await?;
    Ok(())
}

async fn work_on(mut log: Box<ShardLog>, author: u64, habits: Habits, patience: &mut u32) -> Result<()> {
    let name = format!("worker-{author}");
    while !log.is_complete() {
        let plan = log.plan_attempt();
        let rows = if plan.next_rows.is_empty() {
            plan.accused
        } else {
            plan.next_rows
        };
        let attempt = log.begin(name.as_str(), &rows, plan.rows_per_try.is_some()).await?;
        while !rows.difference(log.covered()).is_empty() {
            // Also offers rows that others may have covered since: they must be dropped.
            let left = rows.difference(log.covered()).first(habits.chunk);
            match log.append(&finished(&left, &name)).await {
                Ok(counted) => assert!(counted.difference(log.covered()).is_empty()),
                Err(error) if habits.keep_log => give_up_after(patience, error)?,
                Err(error) => return Err(error),
            }
        }
        log.end(&attempt).await?;
    }
    log.publish(|batches, metadata| {
        let mut metadata = metadata.to_vec();
        if habits.own_parts {
            metadata.push(("author".into(), name.clone()));
        }
        if habits.lines {
            lines(batches, &metadata)
        } else {
            part(batches, &metadata)
        }
    })
    .await?;
    Ok(())
}

/// Only errors that pass by themselves are expected here, and lost data, which is computed again.
fn give_up_after(patience: &mut u32, error: LedgerError) -> Result<()> {
    if matches!(error, LedgerError::Lost { .. }) {
        return Ok(());
    }
    assert!(error.is_retryable(), "{}", chain(&error));
    *patience -= 1;
    if *patience == 0 { Err(error) } else { Ok(()) }
}

fn simulate(actions: Vec<Action>, faults: Vec<Fault>, habits: Vec<Habits>) -> std::result::Result<(), TestCaseError> {
    let memory = Arc::new(InMemory::new());
    let mut faults = faults.into_iter();
    let faulty = Arc::new(FaultStore::new(memory.clone(), true, move |_, _| {
        faults.next().unwrap_or(Fault::None)
    }));
    let output = place(faulty.clone());
    let authors = AtomicU64::new(0);
    let hire = || -> Actor {
        let author = authors.fetch_add(1, Ordering::Relaxed);
        Box::pin(work(eager(&output), author, habits[author as usize % habits.len()]))
    };
    let mut workers: Vec<Actor> = (0..WORKERS).map(|_| hire()).collect();
    let mut asleep = Vec::new();
    for action in actions {
        match action {
            Action::Step(n) => {
                if poll_once(&mut workers[n]).is_ready() {
                    // Done, or out of patience: either way the next one comes.
                    workers[n] = hire();
                }
            }
            Action::Kill(n) => workers[n] = hire(),
            Action::Sleep(n) => asleep.push(std::mem::replace(&mut workers[n], hire())),
            Action::Arrive => faulty.arrive().now_or_never().expect("memory answers at once"),
            Action::Lose(chance) => lose_data(&memory, chance)
                .now_or_never()
                .expect("memory answers at once"),
        }
    }
    faulty.heal();
    // One worker ends the job; then those that slept wake late, and the last requests arrive.
    finish(hire()).map_err(|error| TestCaseError::fail(chain(&error)))?;
    let ended = finish(Box::pin(published_rows(&place(memory.clone()))));
    for worker in workers.into_iter().chain(asleep) {
        finish(worker).map_err(|error| TestCaseError::fail(chain(&error)))?;
    }
    for _ in 0..200 {
        finish(Box::pin(faulty.arrive()));
    }
    let rows = finish(Box::pin(published_rows(&place(memory.clone()))));
    prop_assert_eq!(&rows, &(0..ROWS as i64 * i64::from(SHARDS)).collect::<Vec<_>>());
    prop_assert_eq!(rows, ended);
    let ledger = finish(Box::pin(Ledger::open_in(eager(&place(memory)))))
        .unwrap()
        .unwrap();
    let verified = finish(Box::pin(ledger.verify(|_| ()))).unwrap();
    prop_assert_eq!(verified.findings, Vec::<String>::new());
    let success = finish(Box::pin(ledger.success()))
        .unwrap()
        .expect("the job is finished");
    prop_assert_eq!(success.tally.rows(), ROWS * u64::from(SHARDS));
    // The rows that count, over all records of a shard, are its rows, each once; but a worker that slept may have opened some
    // again whose data was lost, while another published them.
    for shard in 0..SHARDS {
        let log = finish(Box::pin(ShardLog::load(&ledger, shard))).unwrap();
        if !log.voided_rows().is_empty() {
            continue;
        }
        prop_assert_eq!(log.covered(), &RowSet::from_range(log.rows()));
    }
    Ok(())
}

fn habits() -> impl Strategy<Value = Habits> {
    (1..=ROWS, any::<bool>(), any::<bool>()).prop_map(|(chunk, own_parts, keep_log)| Habits {
        chunk,
        own_parts,
        keep_log,
        lines: false,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_row_is_published_exactly_once(
        actions in proptest::collection::vec(action(), 0..1500),
        faults in proptest::collection::vec(fault(), 0..400),
        habits in proptest::collection::vec(habits(), 1..4),
        lines in any::<bool>(),
    ) {
        let of_job = |habits: Habits| Habits { lines, ..habits };
        simulate(actions, faults, habits.into_iter().map(of_job).collect())?;
    }
}

/// Killing one worker after each single request in turn, with another one taking over: no point is special.
#[test]
fn a_kill_after_any_request_loses_nothing() {
    let habits = Habits {
        chunk: 3,
        own_parts: true,
        keep_log: false,
        lines: false,
    };
    let mut steps = 0;
    loop {
        let output = place(Arc::new(FaultStore::new(Arc::new(InMemory::new()), true, |_, _| {
            Fault::None
        })));
        let mut killed: Actor = Box::pin(work(eager(&output), 0, habits));
        let ended = (0..steps).any(|_| poll_once(&mut killed).is_ready());
        drop(killed);
        finish(Box::pin(work(eager(&output), 1, habits))).unwrap();
        let rows = finish(Box::pin(published_rows(&output)));
        assert_eq!(
            rows,
            (0..ROWS as i64 * i64::from(SHARDS)).collect::<Vec<_>>(),
            "killed after {steps} steps"
        );
        let ledger = finish(Box::pin(Ledger::open_in(eager(&output)))).unwrap().unwrap();
        assert!(
            finish(Box::pin(ledger.verify(|_| ()))).unwrap().guarantee_holds(),
            "killed after {steps} steps"
        );
        if ended {
            break;
        }
        steps += 1;
    }
    assert!(
        steps > 60,
        "the worker ended after {steps} steps: too few to mean anything"
    );
}

/// A worker that is paused before each of its requests in turn while another does the whole job, then wakes.
#[test]
fn a_worker_that_wakes_late_changes_nothing() {
    let habits = Habits {
        chunk: 2,
        own_parts: true,
        keep_log: true,
        lines: true,
    };
    for steps in 0..400 {
        let output = place(Arc::new(FaultStore::new(Arc::new(InMemory::new()), true, |_, _| {
            Fault::None
        })));
        let mut paused: Actor = Box::pin(work(eager(&output), 0, habits));
        let ended = (0..steps).any(|_| poll_once(&mut paused).is_ready());
        finish(Box::pin(work(eager(&output), 1, habits))).unwrap();
        if ended {
            return;
        }
        finish(paused).unwrap();
        let rows = finish(Box::pin(published_rows(&output)));
        assert_eq!(
            rows,
            (0..ROWS as i64 * i64::from(SHARDS)).collect::<Vec<_>>(),
            "paused after {steps} steps"
        );
        let ledger = finish(Box::pin(Ledger::open_in(eager(&output)))).unwrap().unwrap();
        assert!(
            finish(Box::pin(ledger.verify(|_| ()))).unwrap().guarantee_holds(),
            "paused after {steps} steps"
        );
    }
    panic!("the worker never ended by itself");
}

/// Two workers that take turns write one log without a gap, and both see every row covered.
#[test]
fn turns_of_two_writers_interleave() {
    finish(Box::pin(async {
        let output = memory();
        let (ledger, _) = Ledger::create_or_resume_in(eager(&output), draft("turns", 1, 6))
            .await
            .unwrap();
        let (mut a, mut b) = (open_shard(&ledger, 0).await, open_shard(&ledger, 0).await);
        let rows = |rows: &[u64]| RowSet::from_rows(rows.iter().copied());
        assert_eq!(
            a.append(&finished(&rows(&[0, 1, 2]), "a")).await.unwrap(),
            rows(&[0, 1, 2])
        );
        // Loses index 0, keeps only what is new.
        assert_eq!(
            b.append(&finished(&rows(&[2, 3, 4]), "b")).await.unwrap(),
            rows(&[3, 4])
        );
        assert_eq!(a.append(&finished(&rows(&[3, 4]), "a")).await.unwrap(), RowSet::new());
        assert_eq!(a.append(&finished(&rows(&[4, 5]), "a")).await.unwrap(), rows(&[5]));
        assert!(a.is_complete() && !b.is_complete());
        assert_eq!(b.append(&finished(&rows(&[5]), "b")).await.unwrap(), RowSet::new());
        assert!(b.is_complete());
        assert_eq!((a.tally(), a.tally().rows()), (b.tally(), 6));
        let (first, second) = (a.publish(part).await.unwrap(), b.publish(part).await.unwrap());
        assert_eq!(first, second);
        assert_eq!(published_rows(&output).await, [0, 1, 2, 3, 4, 5]);
    }));
}
