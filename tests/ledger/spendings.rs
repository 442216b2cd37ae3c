//! What knowing the others' spendings costs in requests, and that it never knows less than was spent.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gristmill::ledger::{JobLimits, Ledger};
use gristmill::worker::budget::Budget;
use object_store::memory::InMemory;

use super::support::*;

/// As in [`draft`]; a device hour costs a dollar.
fn terms(usd: Option<f64>, deadline_seconds: Option<u64>) -> JobLimits {
    JobLimits {
        usd,
        usd_per_hour: Some(1.0),
        deadline_seconds,
        ..JobLimits::default()
    }
}

const MINUTE: Duration = Duration::from_secs(60);

/// Requests of each of `workers` in an interval in which all of them have spent something, the second that they look.
async fn requests_a_worker(workers: usize, terms: JobLimits, spent_each: f64) -> BTreeMap<Op, u32> {
    let faulty = Arc::new(FaultStore::new(Arc::new(InMemory::new()), false, |_, _| Fault::None));
    let (ledger, _) = Ledger::create_or_resume(&place(faulty.clone()), draft("spent", 1, 8))
        .await
        .unwrap();
    let names: Vec<String> = (0..workers).map(|n| format!("w{n}")).collect();
    let mut budget = Budget::new("w0", MINUTE);
    budget.set_limits(terms);
    for round in [0.0, spent_each] {
        for name in &names {
            ledger.write_spend(name, round, false).await.unwrap();
        }
        faulty.counts.lock().unwrap().clear();
        ledger.write_spend("w0", round, false).await.unwrap();
        ledger.control().await.unwrap();
        budget.update(&ledger).await.unwrap();
        // As the worker's account does each second.
        if budget.reached(round).is_some() && !budget.is_exact() {
            budget.read_changed(&ledger).await.unwrap();
        }
    }
    let counts = faulty.counts.lock().unwrap().clone();
    println!("{workers} workers, {:?} dollars: {counts:?}", budget.limits().usd);
    counts
}

/// Before, each read each of the others', with and without a limit: 7 requests with 4 workers, 1,003 with 1,000.
#[tokio::test]
async fn an_interval_costs_three_requests_however_many_workers() {
    for workers in [4, 1_000] {
        let count = async |usd, deadline, spent| requests_a_worker(workers, terms(usd, deadline), spent).await;
        let is = |list: u32, gets: u32| {
            let lists = (list > 0).then_some((Op::List, list));
            let all = [(Op::Put, 1), (Op::Get, gets)].into_iter().chain(lists);
            all.collect::<BTreeMap<Op, u32>>()
        };
        assert_eq!(
            count(None, None, 0.5).await,
            is(0, 1),
            "no limit: nobody else is looked at"
        );
        assert_eq!(
            count(None, Some(3_600), 0.5).await,
            is(0, 2),
            "a deadline: what time is it"
        );
        assert_eq!(
            count(Some(1e6), None, 0.5).await,
            is(1, 1),
            "far from the budget nothing is read"
        );
        // Close to it, each that has changed is read.
        let near = workers as f64 * 0.1 / 3600.0;
        assert_eq!(count(Some(near), None, 0.5).await, is(1, workers as u32));
    }
}

#[tokio::test]
async fn ended_workers_hold_nothing_and_others_an_interval() {
    let (ledger, _) = Ledger::create_or_resume(&memory(), draft("ended", 1, 8)).await.unwrap();
    // 36 seconds of it.
    let limits = terms(Some(0.01), None);
    let look = async || {
        let mut budget = Budget::new("me", MINUTE);
        budget.set_limits(limits);
        ledger.write_spend("me", 0.0, false).await.unwrap();
        budget.update(&ledger).await.unwrap();
        budget.read_changed(&ledger).await.unwrap();
        budget
    };
    ledger.write_spend("other", 18.0, false).await.unwrap();
    let budget = look().await;
    assert!(budget.reached(0.0).is_some(), "it may spend 60 seconds more");
    let bill = budget.explain(0.0);
    assert!(
        bill.starts_with("$0.0050 of $0.0100 are spent, and $0.01") && bill.contains("for 1 other worker"),
        "{bill}"
    );
    ledger.write_spend("other", 18.0, true).await.unwrap();
    let budget = look().await;
    assert_eq!(budget.reached(0.0), None);
    assert!(budget.reached(18.0).is_some(), "its 18 seconds count all the same");
    assert_eq!(budget.explain(18.0), "$0.0100 of $0.0100 are spent");
}

/// What was read once is not read again until it changes; until then, what may have come since counts.
#[tokio::test]
async fn what_is_not_read_counts_as_if_its_worker_had_never_rested() {
    let (ledger, _) = Ledger::create_or_resume(&memory(), draft("vague", 1, 8)).await.unwrap();
    let mut budget = Budget::new("me", Duration::from_millis(200));
    // A second of it.
    budget.set_limits(terms(Some(1.0 / 3600.0), None));
    ledger.write_spend("other", 0.1, false).await.unwrap();
    ledger.write_spend("me", 0.0, false).await.unwrap();
    budget.update(&ledger).await.unwrap();
    budget.read_changed(&ledger).await.unwrap();
    assert!(budget.is_exact());
    assert_eq!(budget.reached(0.0), None);
    tokio::time::sleep(Duration::from_millis(800)).await;
    assert!(
        budget.is_stale() && budget.reached(0.0).is_some(),
        "it may have computed all the time"
    );
    // It has not, as its silence shows.
    ledger.write_spend("me", 0.0, false).await.unwrap();
    budget.update(&ledger).await.unwrap();
    assert!(budget.is_exact() && !budget.is_stale());
    assert_eq!(budget.reached(0.0), None);
}
