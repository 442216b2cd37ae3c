//! Finds poison rows, which end the process that runs them, without losing their neighbours.
//!
//! An attempt is recorded before its rows are read; its end is recorded when it ends cleanly. A row
//! that stays uncovered after two attempts without an end is tried in a smaller group: 4,096 → 256
//! → 16 → 1 rows. Smaller groups lose no row, so they need no proof that the row ended the process.
//!
//! A row is accused only after three consecutive attempts in which it was alone on the device and
//! which are all known to be dead; each attempt names the dead attempts before it. A paused process
//! is not dead: its row is tried again, and a worker that wakes late publishes nothing twice. While
//! the worker of an attempt has written lately, the row waits. An accused row is read once more, in
//! an attempt of its own, for its carried columns; if that attempt dies too, the row is not read
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
/// Number of attempts without an end after which a row goes to the next level.
const STRIKES: usize = 2;
/// Number of consecutive dead attempts after which a row that was alone in them is accused.
const STRIKES_ALONE: usize = 3;

/// What is known of an attempt that has not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fate {
    /// The process exists and may be paused, or its fate was not checked: its rows may be tried
    /// again.
    #[default]
    Undecided,
    /// The worker has written something lately: its rows wait.
    RecentlyActive,
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
    pub is_alone: bool,
    /// Whether the attempt ended cleanly. If not, it is running, it is paused, or its process died.
    pub has_ended: bool,
    /// Identifies the worker's process to others on the same machine.
    pub process: Option<String>,
    /// Maximum time in seconds between two writes of the worker.
    pub heartbeat_seconds: Option<f64>,
    /// When the attempt was recorded, by the store's clock. `None`: this process has recorded it.
    pub begun_at: Option<DateTime<Utc>>,
    /// Attempts at the same rows that were dead when this one began.
    pub after: Vec<Id>,
    pub fate: Fate,
}

impl AttemptView {
    /// Whether one row was alone on the device, and no end was recorded.
    pub(super) fn is_suspect(&self) -> bool {
        !self.has_ended && narrowness(self) == TRY_ROWS.len()
    }
}

/// What to do next with a shard's uncovered rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttemptPlan {
    /// Rows that were each alone on the device in three attempts that died: logged as errored
    /// instead of tried again.
    pub accused: RowSet,
    /// The accused row whose carried columns this try reads, alone. Empty if no accused row is read
    /// any more.
    pub accused_to_read: RowSet,
    /// The rows of the next attempt; empty if only accused and waiting rows are left.
    pub next_rows: RowSet,
    /// Rows that another worker may be running, each alone on its device.
    pub waiting: RowSet,
    /// Maximum rows per try; `None`: the whole shard at once, beside other shards.
    pub rows_per_try: Option<u64>,
}

impl AttemptPlan {
    /// The rows that the next attempt reads.
    pub fn rows_to_read(&self) -> RowSet {
        self.next_rows.union(&self.accused_to_read)
    }

    /// Whether the next attempt must have the device to itself.
    pub fn is_alone(&self) -> bool {
        self.rows_per_try.is_some()
    }
}

/// How narrow an attempt was: 0 beside other shards or with more than 256 rows, up to 3 for one row
/// alone on the device.
fn narrowness(attempt: &AttemptView) -> usize {
    match attempt.rows.len() {
        // A small shard beside others proves nothing about its rows: a row of another shard may
        // have ended the process.
        _ if !attempt.is_alone => 0,
        0 | 1 => 3,
        2..=16 => 2,
        17..=256 => 1,
        _ => 0,
    }
}

/// Decides from the recorded attempts which of the `uncovered` rows are accused and which to try
/// next.
///
/// A row's level is the number of narrownesses n for which enough attempts with the row, of
/// narrowness n or more, never ended. Rows of the lowest level go first, so that innocent rows
/// finish before a dangerous row is tried again.
pub fn plan_attempt(attempts: &[AttemptView], uncovered: &RowSet) -> AttemptPlan {
    let failed: Vec<&AttemptView> = attempts.iter().filter(|attempt| !attempt.has_ended).collect();
    // struck[n]: rows in at least `STRIKES` failed attempts of narrowness n or more.
    let struck: Vec<RowSet> = (0..TRY_ROWS.len())
        .map(|at_least| {
            // seen[k]: rows in more than k of these attempts.
            let mut seen = vec![RowSet::new(); STRIKES];
            for attempt in failed.iter().filter(|attempt| narrowness(attempt) >= at_least) {
                let mut rows = attempt.rows.intersection(uncovered);
                for rows_seen in &mut seen {
                    let again = rows_seen.intersection(&rows);
                    *rows_seen = rows_seen.union(&rows);
                    rows = again;
                }
            }
            seen.pop().unwrap_or_default()
        })
        .collect();
    let accused_after = |strikes| accused_rows(&failed, strikes).intersection(uncovered);
    let accused = accused_after(STRIKES_ALONE);
    let active = failed
        .iter()
        .filter(|a| a.is_suspect() && a.fate == Fate::RecentlyActive);
    let active = active.fold(RowSet::new(), |rows, attempt| rows.union(&attempt.rows));
    let plan = AttemptPlan {
        waiting: active.intersection(uncovered).difference(&accused),
        accused,
        accused_to_read: RowSet::new(),
        next_rows: RowSet::new(),
        rows_per_try: None,
    };
    // Reading the row may have ended those attempts. So its carried columns are read only once
    // more, in an attempt of its own.
    let accused_to_read = plan.accused.difference(&accused_after(STRIKES_ALONE + 1)).first(1);
    if !accused_to_read.is_empty() {
        return AttemptPlan {
            accused: accused_to_read.clone(),
            accused_to_read,
            rows_per_try: Some(1),
            ..plan
        };
    }
    let unsuspected = uncovered.difference(&struck[0]);
    if !unsuspected.is_empty() {
        return AttemptPlan {
            next_rows: unsuspected,
            ..plan
        };
    }
    for (level, &limit) in TRY_ROWS.iter().enumerate() {
        let mut rows = uncovered.intersection(&struck[level]);
        rows = match struck.get(level + 1) {
            Some(narrower) => rows.difference(narrower),
            None => rows.difference(&plan.accused).difference(&plan.waiting),
        };
        if !rows.is_empty() {
            return AttemptPlan {
                next_rows: rows.first(limit),
                rows_per_try: Some(limit),
                ..plan
            };
        }
    }
    plan
}

/// Rows that were alone on the device in `strikes` consecutive dead attempts. Attempts that ran
/// side by side count once: the same cause (the machine, an operator) may have ended all of them.
fn accused_rows(failed: &[&AttemptView], strikes: usize) -> RowSet {
    // The last attempts of chains of dead attempts, at first of length 1.
    let mut chain_ends: Vec<&AttemptView> = failed.iter().copied().filter(|attempt| attempt.is_suspect()).collect();
    chain_ends.retain(|attempt| attempt.fate == Fate::Dead);
    for _ in 1..strikes {
        let earlier: HashMap<&Id, &RowSet> = chain_ends.iter().map(|a| (&a.attempt, &a.rows)).collect();
        let follows = |a: &AttemptView, id: &Id| *id != a.attempt && earlier.get(id) == Some(&&a.rows);
        chain_ends.retain(|a| a.after.iter().any(|id| follows(a, id)));
    }
    chain_ends
        .iter()
        .fold(RowSet::new(), |rows, attempt| rows.union(&attempt.rows))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn attempt(rows: RowSet, is_alone: bool, has_ended: bool) -> AttemptView {
        AttemptView {
            attempt: Id::random().unwrap(),
            worker: "w".into(),
            rows,
            is_alone,
            has_ended,
            process: None,
            heartbeat_seconds: None,
            begun_at: None,
            after: Vec::new(),
            fate: Fate::Dead,
        }
    }

    /// An attempt that begins when all of `before` that did not end are known to be dead.
    fn next_attempt(before: &[AttemptView], rows: RowSet, is_alone: bool, has_ended: bool) -> AttemptView {
        let dead = before.iter().filter(|a| a.is_suspect() && a.fate == Fate::Dead);
        AttemptView {
            after: dead.map(|a| a.attempt.clone()).collect(),
            ..attempt(rows, is_alone, has_ended)
        }
    }

    #[test]
    fn narrows_in_four_levels_and_accuses_last() {
        let mut uncovered = RowSet::from_range(0..4096);
        let mut attempts = Vec::new();
        let mut sizes = Vec::new();
        // Row 0 ends every attempt with it; all other attempts finish their rows.
        loop {
            let plan = plan_attempt(&attempts, &uncovered);
            if !plan.accused.is_empty() {
                assert_eq!(
                    (plan.accused, uncovered),
                    (RowSet::from_range(0..1), RowSet::from_range(0..16))
                );
                break;
            }
            let dies = plan.next_rows.contains(0);
            if dies {
                sizes.push(plan.next_rows.len());
            } else {
                uncovered = uncovered.difference(&plan.next_rows);
            }
            attempts.push(next_attempt(&attempts, plan.next_rows.clone(), plan.is_alone(), !dies));
        }
        assert_eq!(sizes, [4096, 4096, 256, 256, 16, 16, 1, 1, 1]);
    }

    #[test]
    fn rows_beside_others_or_in_ended_attempts_are_not_accused() {
        let row = RowSet::from_range(5..6);
        let in_company = vec![attempt(row.clone(), false, false); 5];
        assert!(plan_attempt(&in_company, &row).accused.is_empty());
        assert_eq!(plan_attempt(&in_company, &row).rows_per_try, Some(256));
        let ended = vec![attempt(row.clone(), true, true); 5];
        assert_eq!(
            plan_attempt(&ended, &row),
            AttemptPlan {
                accused: RowSet::new(),
                accused_to_read: RowSet::new(),
                next_rows: row,
                waiting: RowSet::new(),
                rows_per_try: None
            }
        );
    }

    #[test]
    fn concurrent_or_possibly_live_attempts_accuse_no_row() {
        let row = RowSet::from_range(5..6);
        let accused = |attempts: &[AttemptView]| !plan_attempt(attempts, &row).accused.is_empty();
        // No attempt names a dead attempt before it: all may have ended at once.
        let side_by_side: Vec<AttemptView> = (0..9).map(|_| attempt(row.clone(), true, false)).collect();
        assert!(!accused(&side_by_side));
        let mut in_turn = Vec::new();
        for _ in 0..3 {
            assert!(!accused(&in_turn));
            in_turn.push(next_attempt(&in_turn, row.clone(), true, false));
        }
        assert!(accused(&in_turn));
        // One attempt is or may be paused: the row is tried again, or waits.
        for (fate, next, waiting) in [
            (Fate::Undecided, &row, &RowSet::new()),
            (Fate::RecentlyActive, &RowSet::new(), &row),
        ] {
            let mut attempts = in_turn.clone();
            attempts[1].fate = fate;
            let plan = plan_attempt(&attempts, &row);
            assert_eq!(
                (&plan.accused, &plan.next_rows, &plan.waiting),
                (&RowSet::new(), next, waiting)
            );
        }
        // An attempt that was not alone, or had another row, breaks the chain.
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
    fn waiting_rows_do_not_delay_others() {
        let rows = RowSet::from_range(0..2);
        let mut attempts: Vec<AttemptView> = (0..2).map(|_| attempt(rows.clone(), true, false)).collect();
        attempts.push(attempt(RowSet::from_range(0..1), true, false));
        attempts[2].fate = Fate::RecentlyActive;
        let plan = plan_attempt(&attempts, &rows);
        assert_eq!(
            (plan.next_rows, plan.waiting),
            (RowSet::from_range(1..2), RowSet::from_range(0..1))
        );
    }

    /// A row that ends every process that reads it: its neighbours are read, and the row is given
    /// up.
    #[test]
    fn a_row_that_cannot_be_read_is_given_up() {
        let mut uncovered = RowSet::from_range(0..300);
        let (mut attempts, mut sizes) = (Vec::new(), Vec::new());
        loop {
            let plan = plan_attempt(&attempts, &uncovered);
            let reads = plan.rows_to_read();
            let dies = reads.contains(7);
            if dies {
                sizes.push(reads.len());
                assert!(plan.is_alone() || reads.len() == 300);
            } else {
                uncovered = uncovered.difference(&reads).difference(&plan.accused);
                if plan.accused.contains(7) {
                    assert!(plan.accused_to_read.is_empty());
                    break;
                }
            }
            attempts.push(next_attempt(&attempts, reads, plan.is_alone(), !dies));
        }
        assert_eq!(sizes, [300, 300, 256, 256, 16, 16, 1, 1, 1, 1]);
    }

    proptest! {
        /// Whatever the poison rows, and even if the process also dies for other reasons: all other
        /// rows finish, within a bounded number of deaths.
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
                let plan = plan_attempt(&attempts, &uncovered);
                prop_assert!(plan.next_rows.difference(&uncovered).is_empty());
                prop_assert!(plan.next_rows.intersection(&plan.accused).is_empty());
                prop_assert!(plan.rows_per_try.is_none_or(|max| plan.next_rows.len() <= max));
                accused_all = accused_all.union(&plan.accused);
                uncovered = uncovered.difference(&plan.accused);
                if plan.next_rows.is_empty() {
                    prop_assert!(uncovered.is_empty() || !plan.accused.is_empty());
                    if uncovered.is_empty() {
                        break;
                    }
                    continue;
                }
                let dies = poison.iter().any(|&row| plan.next_rows.contains(row)) || other_deaths.pop() == Some(true);
                deaths += u32::from(dies);
                attempts.push(next_attempt(&attempts, plan.next_rows.clone(), plan.is_alone(), !dies));
                if !dies {
                    uncovered = uncovered.difference(&plan.next_rows);
                }
            }
            prop_assert!(uncovered.is_empty());
            prop_assert_eq!(accused_all, RowSet::from_rows(poison.iter().copied()));
            prop_assert!(deaths <= 9 * poison.len() as u32 + 1);
        }
    }
}
