//! Finds poison rows, which end the process that runs them, without losing their neighbours.
//!
//! An attempt is recorded before its rows are read; its end is recorded when it ends cleanly. A row
//! that stays uncovered after two attempts without an end is tried in a smaller group: 4,096 → 256
//! → 16 → 1 rows. This loses no row, so the cause of those attempts' end may stay unknown.
//!
//! A row is accused only after three consecutive attempts in which it was alone on the device and
//! which are all known to be dead; each attempt names the dead attempts before it. A paused process
//! is not dead: its row is tried again, and a worker that wakes late publishes nothing twice. While
//! it is unknown whether an attempt is dead, its row waits. An accused row is read once more, in an
//! attempt of its own, for its carried columns; if that attempt dies too, the row is not read
//! again.
//!
//! See docs/decisions/013-a-row-is-accused-after-three-deaths-alone.md and
//! docs/decisions/014-attempts-precede-their-rows.md.

use std::collections::HashMap;

use chrono::{DateTime, Utc};

use super::keys::Id;
use super::rowset::RowSet;

/// Rows per try at each level of narrowing below the shard itself.
pub const TRY_ROWS: [u64; 3] = [256, 16, 1];
/// Number of attempts without an end before the next level.
const STRIKES: usize = 2;
/// Number of consecutive dead attempts after which a row that was alone in them is accused.
const STRIKES_ALONE: usize = 3;

/// What is known of an attempt that has not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fate {
    /// The process exists and may be paused, or its fate was not checked: its rows may be tried
    /// again.
    #[default]
    Open,
    /// The worker has written something lately: its rows wait.
    Fresh,
    /// The process is gone, or has written nothing for so long that it counts as gone.
    Dead,
}

/// An attempt at rows of a shard, as the ledger shows it.
#[derive(Debug, Clone, PartialEq)]
pub struct AttemptView {
    pub attempt: Id,
    pub worker: String,
    /// The rows that the attempt set out to run.
    pub rows: RowSet,
    /// Whether no other row was on the device.
    pub alone: bool,
    /// Whether the attempt ended cleanly. If not, it is running, it is paused, or its process died.
    pub ended: bool,
    /// The worker's process, for others on the same machine.
    pub process: Option<String>,
    /// Maximum time in seconds between two writes of the worker.
    pub signs_every: Option<f64>,
    /// When the attempt was recorded, by the store's clock; `None`: just now, by this process.
    pub begun_at: Option<DateTime<Utc>>,
    /// Attempts at the same rows that were dead when this one began.
    pub after: Vec<Id>,
    pub fate: Fate,
}

impl AttemptView {
    /// Whether one row was alone on the device, and no end was recorded.
    pub(super) fn is_suspect(&self) -> bool {
        !self.ended && narrowness(self) == TRY_ROWS.len()
    }
}

/// What to do next with a shard's uncovered rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Narrowing {
    /// Rows that were each alone on the device in three attempts that died: logged as errored
    /// instead of tried again.
    pub accused: RowSet,
    /// The accused row whose carried columns this try reads, alone. Empty where no accused row is
    /// read any more.
    pub read: RowSet,
    /// The rows of the next attempt; empty where only accused and waiting rows are left.
    pub next: RowSet,
    /// Rows that may be running elsewhere, each alone on a device.
    pub waiting: RowSet,
    /// Maximum rows per try; `None`: the whole shard at once, beside other shards.
    pub rows_per_try: Option<u64>,
}

impl Narrowing {
    /// The rows that the next attempt reads.
    pub fn reads(&self) -> RowSet {
        self.next.union(&self.read)
    }

    /// Whether the next attempt must have the device to itself.
    pub fn alone(&self) -> bool {
        self.rows_per_try.is_some()
    }
}

/// How narrow an attempt was: 0 beside other shards or with more than 256 rows, up to 3 for one row
/// alone on the device.
fn narrowness(attempt: &AttemptView) -> usize {
    match attempt.rows.len() {
        // A small shard beside others proves nothing about its rows: a row of another shard may
        // have ended the process.
        _ if !attempt.alone => 0,
        0 | 1 => 3,
        2..=16 => 2,
        17..=256 => 1,
        _ => 0,
    }
}

/// Decides from the recorded attempts which of the `uncovered` rows are accused and which to try
/// next.
///
/// A row's level is the number of narrownesses at which (or narrower) enough attempts that held it never ended. Rows of
/// the lowest level go first, so that innocent rows finish before anything dangerous is tried again.
pub fn narrowing(attempts: &[AttemptView], uncovered: &RowSet) -> Narrowing {
    let failed: Vec<&AttemptView> = attempts.iter().filter(|attempt| !attempt.ended).collect();
    // struck[n]: rows in enough failed attempts of narrowness n or more.
    let struck: Vec<RowSet> = (0..TRY_ROWS.len())
        .map(|at_least| {
            let mut in_attempts = vec![RowSet::new(); STRIKES];
            for attempt in failed.iter().filter(|attempt| narrowness(attempt) >= at_least) {
                let mut rows = attempt.rows.intersection(uncovered);
                for held in &mut in_attempts {
                    let again = held.intersection(&rows);
                    *held = held.union(&rows);
                    rows = again;
                }
            }
            in_attempts.pop().unwrap_or_default()
        })
        .collect();
    let accused_after = |strikes| accused(&failed, strikes).intersection(uncovered);
    let accused = accused_after(STRIKES_ALONE);
    let fresh = failed.iter().filter(|a| a.is_suspect() && a.fate == Fate::Fresh);
    let fresh = fresh.fold(RowSet::new(), |rows, attempt| rows.union(&attempt.rows));
    let plan = Narrowing {
        waiting: fresh.intersection(uncovered).difference(&accused),
        accused,
        read: RowSet::new(),
        next: RowSet::new(),
        rows_per_try: None,
    };
    // Reading may have been the end of them: what is copied from its input is read once more, by an attempt of its own, and then no more.
    let read = plan.accused.difference(&accused_after(STRIKES_ALONE + 1)).first(1);
    if !read.is_empty() {
        return Narrowing {
            accused: read.clone(),
            read,
            rows_per_try: Some(1),
            ..plan
        };
    }
    let free = uncovered.difference(&struck[0]);
    if !free.is_empty() {
        return Narrowing { next: free, ..plan };
    }
    for (level, &limit) in TRY_ROWS.iter().enumerate() {
        let mut rows = uncovered.intersection(&struck[level]);
        rows = match struck.get(level + 1) {
            Some(narrower) => rows.difference(narrower),
            None => rows.difference(&plan.accused).difference(&plan.waiting),
        };
        if !rows.is_empty() {
            return Narrowing {
                next: rows.first(limit),
                rows_per_try: Some(limit),
                ..plan
            };
        }
    }
    plan
}

/// Rows that were alone on the device in consecutive dead attempts. Attempts that ran side by side
/// count once: the same cause (the machine, an operator) may have ended all of them.
fn accused(failed: &[&AttemptView], strikes: usize) -> RowSet {
    let mut last: Vec<&AttemptView> = failed.iter().copied().filter(|attempt| attempt.is_suspect()).collect();
    last.retain(|attempt| attempt.fate == Fate::Dead);
    for _ in 1..strikes {
        let before: HashMap<&Id, &RowSet> = last.iter().map(|a| (&a.attempt, &a.rows)).collect();
        let follows = |a: &AttemptView, id: &Id| *id != a.attempt && before.get(id) == Some(&&a.rows);
        last.retain(|a| a.after.iter().any(|id| follows(a, id)));
    }
    last.iter()
        .fold(RowSet::new(), |rows, attempt| rows.union(&attempt.rows))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn attempt(rows: RowSet, alone: bool, ended: bool) -> AttemptView {
        AttemptView {
            attempt: Id::random().unwrap(),
            worker: "w".into(),
            rows,
            alone,
            ended,
            process: None,
            signs_every: None,
            begun_at: None,
            after: Vec::new(),
            fate: Fate::Dead,
        }
    }

    /// An attempt that begins when all of `before` that did not end are known to be dead.
    fn next_attempt(before: &[AttemptView], rows: RowSet, alone: bool, ended: bool) -> AttemptView {
        let dead = before.iter().filter(|a| a.is_suspect() && a.fate == Fate::Dead);
        AttemptView {
            after: dead.map(|a| a.attempt.clone()).collect(),
            ..attempt(rows, alone, ended)
        }
    }

    #[test]
    fn narrows_in_four_levels_and_accuses_last() {
        let mut uncovered = RowSet::from_range(0..4096);
        let mut attempts = Vec::new();
        let mut sizes = Vec::new();
        // Row 0 kills whatever holds it; all other attempts finish their rows.
        loop {
            let plan = narrowing(&attempts, &uncovered);
            if !plan.accused.is_empty() {
                assert_eq!(
                    (plan.accused, uncovered),
                    (RowSet::from_range(0..1), RowSet::from_range(0..16))
                );
                break;
            }
            let dies = plan.next.contains(0);
            if dies {
                sizes.push(plan.next.len());
            } else {
                uncovered = uncovered.difference(&plan.next);
            }
            attempts.push(next_attempt(&attempts, plan.next.clone(), plan.alone(), !dies));
        }
        assert_eq!(sizes, [4096, 4096, 256, 256, 16, 16, 1, 1, 1]);
    }

    #[test]
    fn company_and_clean_ends_accuse_nobody() {
        let row = RowSet::from_range(5..6);
        let in_company = vec![attempt(row.clone(), false, false); 5];
        assert!(narrowing(&in_company, &row).accused.is_empty());
        assert_eq!(narrowing(&in_company, &row).rows_per_try, Some(256));
        let ended = vec![attempt(row.clone(), true, true); 5];
        assert_eq!(
            narrowing(&ended, &row),
            Narrowing {
                accused: RowSet::new(),
                read: RowSet::new(),
                next: row,
                waiting: RowSet::new(),
                rows_per_try: None
            }
        );
    }

    #[test]
    fn attempts_that_overlap_or_may_live_accuse_nobody() {
        let row = RowSet::from_range(5..6);
        let accused = |attempts: &[AttemptView]| !narrowing(attempts, &row).accused.is_empty();
        // None of them knew that another had died before it: they may all have ended at once.
        let side_by_side: Vec<AttemptView> = (0..9).map(|_| attempt(row.clone(), true, false)).collect();
        assert!(!accused(&side_by_side));
        let mut in_turn = Vec::new();
        for _ in 0..3 {
            assert!(!accused(&in_turn));
            in_turn.push(next_attempt(&in_turn, row.clone(), true, false));
        }
        assert!(accused(&in_turn));
        // One of them is paused, or may be: the row is tried again, or waits.
        for (fate, next, waiting) in [(Fate::Open, &row, &RowSet::new()), (Fate::Fresh, &RowSet::new(), &row)] {
            let mut attempts = in_turn.clone();
            attempts[1].fate = fate;
            let plan = narrowing(&attempts, &row);
            assert_eq!(
                (&plan.accused, &plan.next, &plan.waiting),
                (&RowSet::new(), next, waiting)
            );
        }
        // One that was not alone, or had another row, is no link of the chain.
        for other in [
            attempt(row.clone(), false, false),
            attempt(RowSet::from_range(6..7), true, false),
        ] {
            let mut attempts = in_turn.clone();
            attempts[0] = AttemptView {
                attempt: attempts[0].attempt.clone(),
                ..other
            };
            assert!(!accused(&attempts));
        }
    }

    #[test]
    fn rows_that_wait_hold_up_no_others() {
        let rows = RowSet::from_range(0..2);
        let mut attempts: Vec<AttemptView> = (0..2).map(|_| attempt(rows.clone(), true, false)).collect();
        attempts.push(attempt(RowSet::from_range(0..1), true, false));
        attempts[2].fate = Fate::Fresh;
        let plan = narrowing(&attempts, &rows);
        assert_eq!(
            (plan.next, plan.waiting),
            (RowSet::from_range(1..2), RowSet::from_range(0..1))
        );
    }

    /// A row that ends whoever reads it: its neighbours are read, and it is not read for ever.
    #[test]
    fn a_row_that_cannot_be_read_is_left_unread() {
        let mut uncovered = RowSet::from_range(0..300);
        let (mut attempts, mut sizes) = (Vec::new(), Vec::new());
        loop {
            let plan = narrowing(&attempts, &uncovered);
            let reads = plan.reads();
            let dies = reads.contains(7);
            if dies {
                sizes.push(reads.len());
                assert!(plan.alone() || reads.len() == 300);
            } else {
                uncovered = uncovered.difference(&reads).difference(&plan.accused);
                if plan.accused.contains(7) {
                    assert!(plan.read.is_empty());
                    break;
                }
            }
            attempts.push(next_attempt(&attempts, reads, plan.alone(), !dies));
        }
        assert_eq!(sizes, [300, 300, 256, 256, 16, 16, 1, 1, 1, 1]);
    }

    proptest! {
        /// Whatever the poisonous rows, and however often the process dies for other reasons: all others finish,
        /// within a bounded number of deaths.
        #[test]
        fn neighbours_of_poison_finish(
            rows in 1u64..600,
            poison in proptest::collection::btree_set(0u64..600, 0..4),
            mut other_deaths in proptest::collection::vec(any::<bool>(), 0..2),
        ) {
            let poison: Vec<u64> = poison.into_iter().filter(|&row| row < rows).collect();
            let mut uncovered = RowSet::from_range(0..rows);
            let mut attempts = Vec::new();
            let mut accused_all = RowSet::new();
            let mut deaths = 0;
            for _ in 0..2000 {
                let plan = narrowing(&attempts, &uncovered);
                prop_assert!(plan.next.difference(&uncovered).is_empty());
                prop_assert!(plan.next.intersection(&plan.accused).is_empty());
                prop_assert!(plan.rows_per_try.is_none_or(|most| plan.next.len() <= most));
                accused_all = accused_all.union(&plan.accused);
                uncovered = uncovered.difference(&plan.accused);
                if plan.next.is_empty() {
                    prop_assert!(uncovered.is_empty() || !plan.accused.is_empty());
                    if uncovered.is_empty() {
                        break;
                    }
                    continue;
                }
                let dies = poison.iter().any(|&row| plan.next.contains(row)) || other_deaths.pop() == Some(true);
                deaths += u32::from(dies);
                attempts.push(next_attempt(&attempts, plan.next.clone(), plan.alone(), !dies));
                if !dies {
                    uncovered = uncovered.difference(&plan.next);
                }
            }
            prop_assert!(uncovered.is_empty());
            prop_assert_eq!(accused_all, RowSet::from_rows(poison.iter().copied()));
            prop_assert!(deaths <= 9 * poison.len() as u32 + 1);
        }
    }
}
