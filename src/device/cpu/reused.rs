//! Memory that operations of one step after the other fill anew.

use std::fmt;
use std::ops::{Deref, DerefMut};

use super::aligned::{AlignedArray, ZeroBits};

/// Numbers whose count changes often. They start at a cache line, and their memory is kept: a vector that shrinks and grows by turns
/// would write zeros each time, on one thread, while the others wait.
pub(super) struct Reused<E: ZeroBits> {
    memory: Option<AlignedArray<E>>,
    len: usize,
}

impl<E: ZeroBits> Reused<E> {
    /// Sets their count. After that, all of them are undefined.
    pub(super) fn set_len(&mut self, len: usize) {
        let capacity = self.memory.as_ref().map_or(0, |memory| memory.len());
        if capacity < len {
            // Memory that is never written is never taken from the system.
            self.memory = Some(AlignedArray::alone(len.max(2 * capacity)));
        }
        self.len = len;
    }
}

impl<E: ZeroBits> Default for Reused<E> {
    fn default() -> Self {
        Reused { memory: None, len: 0 }
    }
}

impl<E: ZeroBits> Deref for Reused<E> {
    type Target = [E];
    fn deref(&self) -> &[E] {
        self.memory.as_ref().map_or(&[], |memory| &memory[..self.len])
    }
}

impl<E: ZeroBits> DerefMut for Reused<E> {
    fn deref_mut(&mut self) -> &mut [E] {
        self.memory.as_mut().map_or(&mut [], |memory| &mut memory[..self.len])
    }
}

impl<E: ZeroBits> From<&[E]> for Reused<E> {
    fn from(numbers: &[E]) -> Self {
        let mut reused = Reused::default();
        reused.set_len(numbers.len());
        reused.copy_from_slice(numbers);
        reused
    }
}

impl<E: ZeroBits> Clone for Reused<E> {
    fn clone(&self) -> Self {
        Reused::from(&**self)
    }
}

impl<E: ZeroBits + fmt::Debug> fmt::Debug for Reused<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl<E: ZeroBits + PartialEq> PartialEq for Reused<E> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests compare with numbers of any kind.
    impl<E: ZeroBits + PartialEq, S: AsRef<[E]> + ?Sized> PartialEq<S> for Reused<E> {
        fn eq(&self, other: &S) -> bool {
            **self == *other.as_ref()
        }
    }

    impl<E: ZeroBits + PartialEq> PartialEq<Reused<E>> for Vec<E> {
        fn eq(&self, other: &Reused<E>) -> bool {
            **self == **other
        }
    }

    #[test]
    fn memory_is_kept_and_grows() {
        let mut numbers = Reused::from(&[1.0f32, 2.0, 3.0][..]);
        let start = numbers.as_ptr();
        numbers.set_len(1);
        assert_eq!((&numbers[..], numbers.as_ptr()), (&[1.0][..], start));
        numbers.set_len(3);
        assert_eq!((numbers.len(), numbers.as_ptr()), (3, start));
        numbers.set_len(100_000);
        assert_eq!((numbers.len(), numbers.as_ptr() as usize % 64), (100_000, 0));
        numbers.fill(4.0);
        numbers.set_len(0);
        assert!(numbers.is_empty() && Reused::<u8>::default().is_empty());
    }
}
