//! Which offset of a partition may be committed: pure, property-tested.
//!
//! Acknowledgements come in any order; a commit says "everything before". So the position is the first delivered offset
//! that nobody has acknowledged, or the one after the last delivered. Offsets need not be contiguous in the log.

use std::collections::BTreeSet;

/// One partition for as long as it is assigned to us.
#[derive(Debug, Default)]
pub(crate) struct Offsets {
    /// Delivered and not acknowledged.
    pending: BTreeSet<i64>,
    /// One past the last delivered; `None` before the first.
    next: Option<i64>,
    /// Where delivering began.
    begun: i64,
    /// The position that was last given out to be committed; at first, where delivering began.
    given: i64,
    /// The last commit failed.
    again: bool,
}

impl Offsets {
    /// A message came. False where it lies before others that came: then the log was made anew or read again from an
    /// earlier place, what was known of it is forgotten, and this is its first message.
    pub fn delivered(&mut self, offset: i64) -> bool {
        let forward = self.next.is_none_or(|next| offset >= next);
        if !forward {
            *self = Offsets::default();
        }
        if self.next.is_none() {
            (self.begun, self.given) = (offset, offset);
        }
        self.pending.insert(offset);
        self.next = Some(offset + 1);
        forward
    }

    /// A message is done with. Unknown offsets change nothing.
    pub fn acknowledged(&mut self, offset: i64) {
        self.pending.remove(&offset);
    }

    /// What may be committed: every message before it is done with.
    pub fn position(&self) -> Option<i64> {
        self.pending.first().copied().or(self.next)
    }

    /// The position, where it has moved since this gave it last, or the commit of that failed.
    pub fn take_due(&mut self) -> Option<i64> {
        let position = self.position()?;
        let due = self.again || position > self.given;
        self.again = false;
        self.given = position;
        due.then_some(position)
    }

    /// The position, where it has moved at all: for the last commit of a partition, since one before it may still be under way and
    /// fail when nobody listens any more.
    pub fn take_last(&mut self) -> Option<i64> {
        let position = self.position()?;
        self.given = position;
        (position > self.begun).then_some(position)
    }

    /// A commit failed: the position is to be given out again.
    pub fn commit_failed(&mut self) {
        self.again = true;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_the_finished_prefix_is_committed() {
        let mut offsets = Offsets::default();
        assert_eq!(offsets.position(), None);
        for offset in [3, 4, 7] {
            assert!(offsets.delivered(offset));
        }
        offsets.acknowledged(4);
        assert_eq!((offsets.take_due(), offsets.take_last()), (None, None));
        offsets.acknowledged(3);
        assert_eq!(offsets.take_due(), Some(7));
        assert_eq!(offsets.take_due(), None);
        assert_eq!(offsets.take_last(), Some(7));
        offsets.commit_failed();
        assert_eq!(offsets.take_due(), Some(7));
        offsets.acknowledged(7);
        offsets.acknowledged(7);
        assert_eq!(offsets.take_due(), Some(8));
        assert!(!offsets.delivered(0), "a log made anew");
        assert_eq!(offsets.position(), Some(0));
    }

    proptest! {
        /// Any gaps, any order of acknowledgements, any number of them lost.
        #[test]
        fn nothing_unacknowledged_is_ever_committed(
            gaps in prop::collection::vec(1i64..4, 1..40), order in prop::collection::vec(any::<prop::sample::Index>(), 0..80),
        ) {
            let mut offsets = Offsets::default();
            let mut log = Vec::new();
            for gap in gaps {
                log.push(log.last().unwrap_or(&0) + gap);
                offsets.delivered(*log.last().unwrap());
            }
            let mut done = BTreeSet::new();
            let mut committed = log[0];
            for index in order {
                let offset = log[index.index(log.len())];
                offsets.acknowledged(offset);
                done.insert(offset);
                if let Some(position) = offsets.take_due() {
                    prop_assert!(position > committed, "commits only move on");
                    committed = position;
                }
                prop_assert!(log.iter().all(|o| *o >= committed || done.contains(o)));
                let open = log.iter().find(|o| !done.contains(o));
                prop_assert_eq!(committed, open.copied().unwrap_or(log[log.len() - 1] + 1));
            }
        }
    }
}
