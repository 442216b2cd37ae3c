//! Numbers that start on a cache line, so that no load of a register's width straddles two; large arrays on huge pages.

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::ops::{Deref, DerefMut};

use super::tile::{Bf16, F16};

/// Bytes of a cache line.
const LINE: usize = 64;

/// Numbers whose zero is all zero bits.
///
/// # Safety
/// All bytes zero is a value of the type.
pub unsafe trait ZeroBits: Copy {}

// SAFETY: zero bits are the number 0.
unsafe impl ZeroBits for f32 {}
// SAFETY: as above.
unsafe impl ZeroBits for i8 {}
// SAFETY: as above.
unsafe impl ZeroBits for u8 {}
// SAFETY: as above; it wraps the bits.
unsafe impl ZeroBits for Bf16 {}
// SAFETY: as above; it wraps the bits.
unsafe impl ZeroBits for F16 {}

/// A fixed number of elements, the first on a cache line.
pub struct Aligned<E> {
    /// Longer than needed by a line.
    data: Vec<E>,
    start: usize,
    len: usize,
}

impl<E: ZeroBits> Aligned<E> {
    /// `len` zeros, in memory that the operating system hands out page by page as it is first written to.
    pub fn new(len: usize) -> Aligned<E> {
        let data: Vec<E> = zeros(len + LINE / size_of::<E>());
        // The heap block never moves again, since the vector is never resized.
        let start = data.as_ptr().align_offset(LINE).min(data.len() - len);
        Aligned { data, start, len }
    }
}

/// Bytes from which on an array is worth huge pages: one of them, which is 2 MiB on most machines.
const HUGE_LEAST: usize = 2 << 20;
/// Bytes of a page, at most.
const PAGE: usize = 1 << 16;

/// Asks the system to back an array by huge pages, before it is first written to: with small ones, reading weights waits
/// for address translations, and the processor's prefetching ends at each page.
pub fn want_huge_pages<E>(data: &[E]) {
    #[cfg(target_os = "linux")]
    if size_of_val(data) >= HUGE_LEAST {
        let start = (data.as_ptr() as usize).next_multiple_of(PAGE);
        let end = (data.as_ptr() as usize + size_of_val(data)) / PAGE * PAGE;
        // SAFETY: whole pages within the array; the advice changes nothing but how they are backed. Where there are no huge
        // pages it is refused, and nothing is lost.
        unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_HUGEPAGE) };
    }
}

/// `len` zeros from the allocator's zeroed pages. `vec![zero; len]` would write to all of them for types that the standard
/// library does not know to be zero bits.
fn zeros<E: ZeroBits>(len: usize) -> Vec<E> {
    let layout = match Layout::array::<E>(len) {
        Ok(layout) if layout.size() > 0 => layout,
        _ => panic!("{len} elements of {} bytes cannot be allocated", size_of::<E>()),
    };
    // SAFETY: the layout's size is not zero.
    let start = unsafe { alloc_zeroed(layout) };
    if start.is_null() {
        handle_alloc_error(layout);
    }
    // SAFETY: the global allocator gave this memory with the layout of an array of `len` elements, and all are zero
    // bits, which is a value of the type.
    unsafe { Vec::from_raw_parts(start.cast(), len, len) }
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

    /// Memory that is never written to is never taken from the system.
    #[cfg(target_os = "linux")]
    #[test]
    fn zeros_take_no_memory() {
        let resident_pages = || -> usize {
            let text = std::fs::read_to_string("/proc/self/statm").unwrap();
            text.split(' ').nth(1).unwrap().parse().unwrap()
        };
        let before = resident_pages();
        let pool = Aligned::<Bf16>::new(1 << 30);
        // Other tests run meanwhile: 2 GiB are far more than they take.
        assert!(resident_pages() < before + (1 << 18), "the pool was written to");
        assert_eq!(pool[1 << 29].0, 0);
    }

    #[test]
    fn starts_on_a_line_at_any_length() {
        for len in [0, 1, 15, 16, 17, 100_000] {
            let mut numbers = Aligned::<f32>::new(len);
            assert_eq!((numbers.len(), numbers.as_ptr() as usize % LINE), (len, 0));
            numbers.fill(1.0);
            let halves = Aligned::<Bf16>::new(len);
            assert!(halves.iter().all(|x| x.0 == 0));
            assert_eq!((halves.len(), halves.as_ptr() as usize % LINE), (len, 0));
        }
    }
}
