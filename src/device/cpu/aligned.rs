//! Numbers that start on a cache line, so that no load of a register's width straddles two, and lie on huge pages.
//!
//! With small pages, reading weights waits for address translations, and the processor's prefetching ends at each page. A model's
//! matrices are often smaller than a huge page, or end in the middle of one: so they lie one behind the other in chunks.
//!
//! See docs/decisions/067-weights-and-kv-lie-on-huge-pages.md.

#![expect(unsafe_code, reason = "memory of its own allocation, zeroed and aligned")]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use super::tile::{Bf16, F16};

/// Bytes of a cache line.
const LINE: usize = 64;
/// Bytes of a huge page on most machines.
const HUGE_PAGE: usize = 2 << 20;
/// Bytes of a page, at most.
const PAGE: usize = 1 << 16;
/// Bytes of a chunk that arrays share; larger ones have a chunk each.
const CHUNK: usize = 32 << 20;

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
    /// Keeps the elements' memory.
    _chunk: Arc<Chunk>,
    /// This array's own, of `len` elements.
    start: *mut E,
    len: usize,
    owns: PhantomData<E>,
}

// SAFETY: it owns its elements, as a vector does.
unsafe impl<E: Send> Send for Aligned<E> {}
// SAFETY: as above.
unsafe impl<E: Sync> Sync for Aligned<E> {}

impl<E: ZeroBits> Aligned<E> {
    /// `len` zeros, in memory that the operating system hands out page by page as it is first written to.
    pub fn new(len: usize) -> Aligned<E> {
        let bytes = Self::bytes(len);
        if bytes > CHUNK / 2 {
            Aligned::at(Arc::new(Chunk::huge(bytes)), 0, len)
        } else {
            let (chunk, from) = share(bytes);
            Aligned::at(chunk, from, len)
        }
    }

    /// As [`new`](Self::new), on small pages: for what is written in a few places.
    pub fn sparse(len: usize) -> Aligned<E> {
        Aligned::at(Arc::new(Chunk::new(Self::bytes(len))), 0, len)
    }

    /// From byte `from` of the chunk on, which nobody else has.
    fn at(chunk: Arc<Chunk>, from: usize, len: usize) -> Aligned<E> {
        Aligned {
            start: chunk.start.wrapping_add(from).cast(),
            _chunk: chunk,
            len,
            owns: PhantomData,
        }
    }

    /// Whole lines.
    fn bytes(len: usize) -> usize {
        let bytes = len
            .checked_mul(size_of::<E>())
            .and_then(|b| b.checked_next_multiple_of(LINE));
        bytes.unwrap_or_else(|| panic!("{len} elements of {} bytes cannot be allocated", size_of::<E>()))
    }
}

/// Zeroed memory that arrays are cut from; each byte is given out once.
struct Chunk {
    memory: *mut u8,
    layout: Layout,
    /// On a huge page.
    start: *mut u8,
}

// SAFETY: it only keeps the memory, and frees it.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and no array is left that lies in it.
        unsafe { dealloc(self.memory, self.layout) };
    }
}

impl Chunk {
    fn new(bytes: usize) -> Chunk {
        let layout = bytes
            .checked_add(HUGE_PAGE)
            .map(|size| Layout::from_size_align(size, 1));
        let Some(Ok(layout)) = layout else {
            panic!("{bytes} bytes cannot be allocated");
        };
        // An alignment asked of the allocator would make it write zeros to all of it.
        // SAFETY: the layout's size is not zero.
        let memory = unsafe { alloc_zeroed(layout) };
        if memory.is_null() {
            handle_alloc_error(layout);
        }
        let start = memory.wrapping_add(memory.align_offset(HUGE_PAGE));
        Chunk { memory, layout, start }
    }

    fn huge(bytes: usize) -> Chunk {
        let chunk = Chunk::new(bytes);
        want_huge_pages(chunk.start, bytes);
        chunk
    }
}

/// A chunk that others have parts of, and from which byte on so many, at most [`CHUNK`], are the caller's.
fn share(bytes: usize) -> (Arc<Chunk>, usize) {
    /// The chunk that small arrays are cut from, and how much of it is given out.
    static OPEN: Mutex<Option<(Arc<Chunk>, usize)>> = Mutex::new(None);
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let roomy = open.take().filter(|(_, used)| used + bytes <= CHUNK);
    let (chunk, used) = open.insert(roomy.unwrap_or_else(|| (Arc::new(Chunk::huge(CHUNK)), 0)));
    let from = *used;
    *used += bytes;
    (Arc::clone(chunk), from)
}

/// Asks the system to back memory by huge pages, before it is first written to.
pub fn want_huge_pages(start: *mut u8, bytes: usize) {
    #[cfg(target_os = "linux")]
    if bytes >= HUGE_PAGE {
        let from = (start as usize).next_multiple_of(PAGE);
        let to = (start as usize + bytes) / PAGE * PAGE;
        // SAFETY: whole pages; the advice changes nothing but how they are backed. Where there are no huge pages it is refused,
        // and nothing is lost.
        unsafe { libc::madvise(from as *mut libc::c_void, to - from, libc::MADV_HUGEPAGE) };
    }
}

impl<E> Deref for Aligned<E> {
    type Target = [E];
    fn deref(&self) -> &[E] {
        // SAFETY: this array's own elements, aligned and initialised to zero bits, which its maker knows to be values.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl<E> DerefMut for Aligned<E> {
    fn deref_mut(&mut self) -> &mut [E] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
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

    /// Small ones share chunks, large ones have their own; none overlaps another, whichever go first.
    #[test]
    fn arrays_of_all_sizes_keep_what_they_hold() {
        let mut kept = Vec::new();
        for round in 0..200usize {
            let len = [1, 100, 70_000, CHUNK / 3, CHUNK][round % 5];
            let make = [Aligned::<u8>::new, Aligned::sparse][round % 7 / 6];
            let mut numbers = make(len);
            let ends = [0, len - 1];
            assert!(ends.iter().all(|i| numbers[*i] == 0), "round {round}");
            ends.iter().for_each(|i| numbers[*i] = round as u8);
            kept.push((round, numbers));
            if round % 3 == 0 {
                kept.swap_remove(round % kept.len());
            }
            for (round, numbers) in &kept {
                assert!(
                    numbers.first() == numbers.last() && numbers[0] == *round as u8,
                    "round {round}"
                );
            }
        }
    }
}
