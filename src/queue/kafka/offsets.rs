//! Computes which offset of a partition may be committed. No I/O; tested by property.
//!
//! Acknowledgements come in any order, but a commit covers every earlier offset. So the position to
//! commit is the first delivered offset without an acknowledgement, or else one past the last
//! delivered offset. Offsets in the log may have gaps.

use std::collections::BTreeSet;

/// Offsets of one partition while it is assigned to us.
#[derive(Debug, Default)]
pub(crate) struct Offsets {
    /// Delivered offsets without an acknowledgement.
    pending: BTreeSet<i64>,
    /// One past the last delivered offset; `None` before the first delivery.
    next_offset: Option<i64>,
    /// The first delivered offset.
    first_offset: i64,
    /// The position that was last returned for a commit; `first_offset` until then.
    last_taken_position: i64,
    /// Whether the last commit failed.
    last_commit_failed: bool,
}

impl Offsets {
    /// Records a delivered message. Returns false if its offset lies before earlier deliveries: the
    /// log was recreated or is read again, so all older state is dropped and this message is the
    /// first.
    pub(super) fn record_delivery(&mut self, offset: i64) -> bool {
        let is_forward = self.next_offset.is_none_or(|next_offset| offset >= next_offset);
        if !is_forward {
            *self = Offsets::default();
        }
        if self.next_offset.is_none() {
            (self.first_offset, self.last_taken_position) = (offset, offset);
        }
        self.pending.insert(offset);
        self.next_offset = Some(offset + 1);
        is_forward
    }

    /// Records an acknowledgement. Unknown offsets change nothing.
    pub(super) fn acknowledge(&mut self, offset: i64) {
        self.pending.remove(&offset);
    }

    /// The offset that may be committed: every message before it is acknowledged.
    pub(super) fn position(&self) -> Option<i64> {
        self.pending.first().copied().or(self.next_offset)
    }

    /// Returns the position if it has moved since the last call, or if the last commit failed.
    pub(super) fn take_changed_position(&mut self) -> Option<i64> {
        let position = self.position()?;
        let is_due = self.last_commit_failed || position > self.last_taken_position;
        self.last_commit_failed = false;
        self.last_taken_position = position;
        is_due.then_some(position)
    }

    /// Returns the position if it has moved since the first delivery. For the last commit of a
    /// partition: an earlier commit of the same position may still be in flight, and its failure
    /// would go unnoticed.
    pub(super) fn take_final_position(&mut self) -> Option<i64> {
        let position = self.position()?;
        self.last_taken_position = position;
        (position > self.first_offset).then_some(position)
    }

    /// Records that a commit failed: the next `take_changed_position` returns the position again.
    pub(super) fn mark_commit_failed(&mut self) {
        self.last_commit_failed = true;
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
            assert!(offsets.record_delivery(offset));
        }
        offsets.acknowledge(4);
        assert_eq!(
            (offsets.take_changed_position(), offsets.take_final_position()),
            (None, None)
        );
        offsets.acknowledge(3);
        assert_eq!(offsets.take_changed_position(), Some(7));
        assert_eq!(offsets.take_changed_position(), None);
        assert_eq!(offsets.take_final_position(), Some(7));
        offsets.mark_commit_failed();
        assert_eq!(offsets.take_changed_position(), Some(7));
        offsets.acknowledge(7);
        offsets.acknowledge(7);
        assert_eq!(offsets.take_changed_position(), Some(8));
        assert!(!offsets.record_delivery(0), "a log made anew");
        assert_eq!(offsets.position(), Some(0));
    }

    proptest! {
        /// Covers gaps in the offsets, any order of acknowledgements, and missing acknowledgements.
        #[test]
        fn nothing_unacknowledged_is_ever_committed(
            gaps in prop::collection::vec(1i64..4, 1..40), order in prop::collection::vec(any::<prop::sample::Index>(), 0..80),
        ) {
            let mut offsets = Offsets::default();
            let mut log = Vec::new();
            for gap in gaps {
                log.push(log.last().unwrap_or(&0) + gap);
                offsets.record_delivery(*log.last().unwrap());
            }
            let mut done = BTreeSet::new();
            let mut committed = log[0];
            for index in order {
                let offset = log[index.index(log.len())];
                offsets.acknowledge(offset);
                done.insert(offset);
                if let Some(position) = offsets.take_changed_position() {
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
