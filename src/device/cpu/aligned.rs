//! Numbers that start on a cache line, so that no load of a register's width straddles two.

use std::ops::{Deref, DerefMut};

/// Bytes of a cache line.
const LINE: usize = 64;

/// A fixed number of elements, the first on a cache line.
pub struct Aligned<E> {
    /// Longer than needed by a line.
    data: Vec<E>,
    start: usize,
    len: usize,
}

impl<E: Copy + Default> Aligned<E> {
    /// `len` default elements (for F32 the zeroed memory comes page by page as it is first used).
    pub fn new(len: usize) -> Aligned<E> {
        let data = vec![E::default(); len + LINE / size_of::<E>()];
        // The heap block never moves again, since the vector is never resized.
        let start = data.as_ptr().align_offset(LINE).min(data.len() - len);
        Aligned { data, start, len }
    }
}

impl<E> Deref for Aligned<E> {
    type Target = [E];
    fn deref(&self) -> &[E] {
        &self.data[self.start..self.start + self.len]
    }
}

impl<E> DerefMut for Aligned<E> {
    fn deref_mut(&mut self) -> &mut [E] {
        &mut self.data[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_on_a_line_at_any_length() {
        for len in [0, 1, 15, 16, 17, 100_000] {
            let mut numbers = Aligned::<f32>::new(len);
            assert_eq!((numbers.len(), numbers.as_ptr() as usize % LINE), (len, 0));
            numbers.fill(1.0);
            let halves = Aligned::<u16>::new(len);
            assert_eq!((halves.len(), halves.as_ptr() as usize % LINE), (len, 0));
        }
    }
}
