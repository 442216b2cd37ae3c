//! A set of row numbers, stored as ranges. Used for the rows that a log covers and the rows of a
//! data object that count.

use std::fmt;
use std::ops::Range;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A set of rows as sorted, disjoint ranges that do not touch. In JSON: `[[start, end], …]`, `end` excluded.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "Vec<(u64, u64)>", into = "Vec<(u64, u64)>")]
pub struct RowSet {
    ranges: Vec<(u64, u64)>,
}

impl RowSet {
    /// The empty set.
    pub fn new() -> RowSet {
        RowSet::default()
    }

    /// The rows of one range.
    pub fn from_range(range: Range<u64>) -> RowSet {
        RowSet {
            ranges: if range.is_empty() {
                Vec::new()
            } else {
                vec![(range.start, range.end)]
            },
        }
    }

    /// The set of `rows`, which may be in any order and contain repetitions.
    pub fn from_rows(rows: impl IntoIterator<Item = u64>) -> RowSet {
        let mut rows: Vec<u64> = rows.into_iter().filter(|&row| row < u64::MAX).collect();
        rows.sort_unstable();
        let mut out = RowSet::new();
        for row in rows {
            out.push(row, row + 1);
        }
        out
    }

    /// Appends a range that starts at or after the start of every existing range. Joins it with the
    /// last range if they touch or overlap.
    fn push(&mut self, start: u64, end: u64) {
        match self.ranges.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => self.ranges.push((start, end)),
        }
    }

    /// Number of rows.
    pub fn len(&self) -> u64 {
        self.ranges.iter().map(|(start, end)| end - start).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The ranges, sorted, disjoint, not touching.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.ranges.iter().map(|&(start, end)| start..end)
    }

    /// Every row, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.ranges().flatten()
    }

    pub fn contains(&self, row: u64) -> bool {
        let next = self.ranges.partition_point(|&(start, _)| start <= row);
        next > 0 && row < self.ranges[next - 1].1
    }

    /// Whether every row of `range` is in the set.
    pub fn covers(&self, range: Range<u64>) -> bool {
        range.is_empty() || RowSet::from_range(range).difference(self).is_empty()
    }

    /// Rows in either set.
    pub fn union(&self, other: &RowSet) -> RowSet {
        let mut all: Vec<(u64, u64)> = self.ranges.iter().chain(&other.ranges).copied().collect();
        all.sort_unstable();
        let mut out = RowSet::new();
        for (start, end) in all {
            out.push(start, end);
        }
        out
    }

    /// Rows in this set and not in `other`.
    pub fn difference(&self, other: &RowSet) -> RowSet {
        let mut out = RowSet::new();
        let mut first_cut = 0;
        for &(mut start, end) in &self.ranges {
            while first_cut < other.ranges.len() && other.ranges[first_cut].1 <= start {
                first_cut += 1;
            }
            let mut cut = first_cut;
            while start < end && cut < other.ranges.len() && other.ranges[cut].0 < end {
                let (cut_start, cut_end) = other.ranges[cut];
                if start < cut_start {
                    out.push(start, cut_start);
                }
                start = start.max(cut_end);
                cut += 1;
            }
            if start < end {
                out.push(start, end);
            }
        }
        out
    }

    /// Rows in both sets.
    pub fn intersection(&self, other: &RowSet) -> RowSet {
        self.difference(&self.difference(other))
    }

    /// The first `count` rows.
    pub fn first(&self, count: u64) -> RowSet {
        let mut out = RowSet::new();
        let mut left = count;
        for &(start, end) in &self.ranges {
            if left == 0 {
                break;
            }
            let take = left.min(end - start);
            out.push(start, start + take);
            left -= take;
        }
        out
    }
}

impl TryFrom<Vec<(u64, u64)>> for RowSet {
    type Error = String;

    fn try_from(ranges: Vec<(u64, u64)>) -> Result<RowSet, String> {
        let mut previous_end = None;
        for &(start, end) in &ranges {
            if start >= end || previous_end.is_some_and(|previous| start <= previous) {
                return Err(format!(
                    "row ranges are not sorted, disjoint and non-empty at [{start}, {end}]"
                ));
            }
            previous_end = Some(end);
        }
        Ok(RowSet { ranges })
    }
}

impl From<RowSet> for Vec<(u64, u64)> {
    fn from(set: RowSet) -> Self {
        set.ranges
    }
}

/// Prints `0-4, 7` (both ends included) for messages, at most eight ranges.
impl fmt::Display for RowSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, &(start, end)) in self.ranges.iter().take(8).enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            if end - start == 1 {
                write!(f, "{comma}{start}")?;
            } else {
                write!(f, "{comma}{start}-{}", end - 1)?;
            }
        }
        if self.ranges.len() > 8 {
            write!(f, ", … ({} ranges more)", self.ranges.len() - 8)?;
        }
        Ok(())
    }
}

impl fmt::Debug for RowSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn rows() -> impl Strategy<Value = BTreeSet<u64>> {
        proptest::collection::btree_set(0u64..60, 0..40)
    }

    fn set(rows: &BTreeSet<u64>) -> RowSet {
        RowSet::from_rows(rows.iter().copied())
    }

    fn is_well_formed(set: &RowSet) -> bool {
        RowSet::try_from(set.ranges.clone()).is_ok()
    }

    proptest! {
        #[test]
        fn behaves_as_a_set(a in rows(), b in rows(), count in 0u64..70) {
            let (x, y) = (set(&a), set(&b));
            let check = |got: RowSet, want: BTreeSet<u64>| {
                prop_assert!(is_well_formed(&got));
                prop_assert_eq!(got.len(), want.len() as u64);
                prop_assert_eq!(got.iter().collect::<BTreeSet<_>>(), want);
                Ok(())
            };
            check(x.clone(), a.clone())?;
            check(x.union(&y), a.union(&b).copied().collect())?;
            check(x.difference(&y), a.difference(&b).copied().collect())?;
            check(x.intersection(&y), a.intersection(&b).copied().collect())?;
            check(x.first(count), a.iter().take(count as usize).copied().collect())?;
            for row in 0..62 {
                prop_assert_eq!(x.contains(row), a.contains(&row));
            }
            prop_assert_eq!(x.covers(3..9), (3..9).all(|row| a.contains(&row)));
            let json = serde_json::to_string(&x).unwrap();
            prop_assert_eq!(serde_json::from_str::<RowSet>(&json).unwrap(), x);
        }
    }

    #[test]
    fn foreign_ranges_are_checked() {
        for bad in [
            "[[3,3]]",
            "[[5,4]]",
            "[[0,2],[2,3]]",
            "[[4,6],[0,2]]",
            "[[0,5],[3,9]]",
            "[[-1,3]]",
        ] {
            assert!(serde_json::from_str::<RowSet>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn display_includes_both_ends() {
        assert_eq!(RowSet::from_rows([0, 1, 2, 7]).to_string(), "0-2, 7");
    }
}
