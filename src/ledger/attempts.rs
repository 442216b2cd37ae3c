//! Poison: rows that take the process down with them, found without losing their neighbours.
//!
//! An attempt is written down before its rows go to the device, and its end when it ends cleanly. A row that stays
//! uncovered after two attempts that never ended is tried in a smaller company: 4,096 → 256 → 16 → 1 rows. A row is
//! accused only when it was alone on the device in three such attempts; rows that were covered since are out of it.

use super::keys::Id;
use super::rowset::RowSet;

/// Rows a try at each level of narrowing below the shard itself.
pub const TRY_ROWS: [u64; 3] = [256, 16, 1];
/// Attempts that never ended, until the next level.
const STRIKES: usize = 2;
/// Attempts that never ended until a row that was alone is accused: one more, since one may still be running elsewhere.
const STRIKES_ALONE: usize = 3;

/// An attempt at rows of a shard, as the ledger shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttemptView {
    pub attempt: Id,
    pub worker: String,
    /// The rows that it set out to run.
    pub rows: RowSet,
    /// Nothing else was on the device.
    pub alone: bool,
    /// It ended cleanly. If not, it is running still or its process died.
    pub ended: bool,
}

/// What to do next with a shard's uncovered rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Narrowing {
    /// Each was alone on the device in three attempts that never ended: to be logged as errored, not tried again.
    pub accused: RowSet,
    /// The rows of the next attempt; empty where only accused rows are left.
    pub next: RowSet,
    /// At most this many rows a try; `None`: the whole shard at once, in company.
    pub rows_per_try: Option<u64>,
}

impl Narrowing {
    /// Whether the next attempt must have the device to itself.
    pub fn alone(&self) -> bool {
        self.rows_per_try.is_some()
    }
}

/// How narrow an attempt was: 0 in company or with more than 256 rows, up to 3 for one row alone on the device.
fn narrowness(attempt: &AttemptView) -> usize {
    match attempt.rows.len() {
        // A small shard in company says nothing about its rows: any of the others may have been the end.
        _ if !attempt.alone => 0,
        0 | 1 => 3,
        2..=16 => 2,
        17..=256 => 1,
        _ => 0,
    }
}

/// Decides from what stands in the ledger which of the `uncovered` rows are accused and which to try next.
///
/// A row's level is the number of narrownesses at which (or narrower) enough attempts that held it never ended. Rows of
/// the lowest level go first, so that innocent rows finish before anything dangerous is tried again.
pub fn narrowing(attempts: &[AttemptView], uncovered: &RowSet) -> Narrowing {
    let failed: Vec<&AttemptView> = attempts.iter().filter(|attempt| !attempt.ended).collect();
    // struck[n]: rows in enough failed attempts of narrowness n or more.
    let struck: Vec<RowSet> = (0..=TRY_ROWS.len())
        .map(|at_least| {
            let strikes = if at_least == TRY_ROWS.len() {
                STRIKES_ALONE
            } else {
                STRIKES
            };
            let mut in_attempts = vec![RowSet::new(); strikes];
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
    let accused = struck[TRY_ROWS.len()].clone();
    let free = uncovered.difference(&struck[0]);
    if !free.is_empty() {
        return Narrowing {
            accused,
            next: free,
            rows_per_try: None,
        };
    }
    for (level, &limit) in TRY_ROWS.iter().enumerate() {
        let rows = uncovered.intersection(&struck[level]).difference(&struck[level + 1]);
        if !rows.is_empty() {
            return Narrowing {
                accused,
                next: rows.first(limit),
                rows_per_try: Some(limit),
            };
        }
    }
    Narrowing {
        accused,
        next: RowSet::new(),
        rows_per_try: None,
    }
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
            attempts.push(attempt(plan.next.clone(), plan.alone(), !dies));
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
                next: row,
                rows_per_try: None
            }
        );
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
                    prop_assert!(uncovered.is_empty());
                    break;
                }
                let dies = poison.iter().any(|&row| plan.next.contains(row)) || other_deaths.pop() == Some(true);
                deaths += u32::from(dies);
                attempts.push(attempt(plan.next.clone(), plan.alone(), !dies));
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
