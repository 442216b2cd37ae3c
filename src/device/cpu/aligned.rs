//! Arrays of numbers that start on a cache line and lie on huge pages.
//!
//! The alignment keeps register-wide loads from straddling two cache lines. With small pages, reads
//! of weights wait for address translations, and hardware prefetching stops at each page boundary.
//! The matrices of a model are often smaller than a huge page, or end in the middle of one, so
//! small arrays are packed one after another into shared chunks.
//!
//! See docs/decisions/067-weights-and-kv-lie-on-huge-pages.md.

#![expect(unsafe_code, reason = "memory of its own allocation, zeroed and aligned")]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use super::gemm::tile::{Bf16, F16};

/// Bytes of a cache line.
const LINE: usize = 64;
/// Bytes of a huge page on most machines.
const HUGE_PAGE: usize = 2 << 20;
/// Maximum bytes of a normal page.
const PAGE: usize = 1 << 16;
/// Bytes of a chunk that small arrays share. An array of more than half of this gets its own chunk.
const CHUNK: usize = 32 << 20;

/// Number types for which all-zero bytes are the number 0.
///
/// # Safety
/// All-zero bytes must be a valid value of the type.
pub(crate) unsafe trait ZeroBits: Copy {}

// SAFETY: zero bits are the number 0.
unsafe impl ZeroBits for f32 {}
// SAFETY: as above.
unsafe impl ZeroBits for i8 {}
// SAFETY: as above.
unsafe impl ZeroBits for u8 {}
// SAFETY: as above; the type wraps its bits.
unsafe impl ZeroBits for Bf16 {}
// SAFETY: as above; the type wraps its bits.
unsafe impl ZeroBits for F16 {}

/// A fixed number of elements, of which the first is aligned to a cache line.
pub(crate) struct Aligned<E> {
    /// Keeps the memory of the elements allocated.
    _chunk: Arc<MemoryChunk>,
    /// First element. This array owns `len` elements from here on.
    start: *mut E,
    len: usize,
    owns: PhantomData<E>,
}

// SAFETY: the array owns its elements, as a vector does.
unsafe impl<E: Send> Send for Aligned<E> {}
// SAFETY: as above.
unsafe impl<E: Sync> Sync for Aligned<E> {}

impl<E: ZeroBits> Aligned<E> {
    /// `len` zeros, in memory that the operating system maps page by page on the first write.
    pub(super) fn new(len: usize) -> Aligned<E> {
        let bytes = Self::bytes(len);
        if bytes > CHUNK / 2 {
            Aligned::at(Arc::new(MemoryChunk::huge(bytes)), 0, len)
        } else {
            let (chunk, from) = share(bytes);
            Aligned::at(chunk, from, len)
        }
    }

    /// As [`new`](Self::new), on small pages: for arrays that are written in a few places only.
    pub(super) fn small_pages(len: usize) -> Aligned<E> {
        Aligned::at(Arc::new(MemoryChunk::new(Self::bytes(len))), 0, len)
    }

    /// An array that starts at byte `from` of the chunk. The chunk's bytes must not be in use by
    /// another array.
    fn at(chunk: Arc<MemoryChunk>, from: usize, len: usize) -> Aligned<E> {
        Aligned {
            start: chunk.start.wrapping_add(from).cast(),
            _chunk: chunk,
            len,
            owns: PhantomData,
        }
    }

    /// Bytes of `len` elements, rounded up to whole cache lines.
    fn bytes(len: usize) -> usize {
        let bytes = len
            .checked_mul(size_of::<E>())
            .and_then(|b| b.checked_next_multiple_of(LINE));
        bytes.unwrap_or_else(|| panic!("{len} elements of {} bytes cannot be allocated", size_of::<E>()))
    }
}

/// Zeroed memory from which arrays are allocated. Each byte is given out once.
struct MemoryChunk {
    memory: *mut u8,
    layout: Layout,
    /// Aligned to a huge page.
    start: *mut u8,
}

// SAFETY: a chunk only keeps and frees its memory.
unsafe impl Send for MemoryChunk {}
// SAFETY: as above.
unsafe impl Sync for MemoryChunk {}

impl Drop for MemoryChunk {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and all arrays in it have been dropped.
        unsafe { dealloc(self.memory, self.layout) };
    }
}

impl MemoryChunk {
    fn new(bytes: usize) -> MemoryChunk {
        let layout = bytes
            .checked_add(HUGE_PAGE)
            .map(|size| Layout::from_size_align(size, 1));
        let Some(Ok(layout)) = layout else {
            panic!("{bytes} bytes cannot be allocated");
        };
        // The start is aligned by hand: for an aligned layout, the allocator would write zeros to
        // all of the memory.
        // SAFETY: the layout's size is not zero.
        let memory = unsafe { alloc_zeroed(layout) };
        if memory.is_null() {
            handle_alloc_error(layout);
        }
        let start = memory.wrapping_add(memory.align_offset(HUGE_PAGE));
        MemoryChunk { memory, layout, start }
    }

    fn huge(bytes: usize) -> MemoryChunk {
        let chunk = MemoryChunk::new(bytes);
        want_huge_pages(chunk.start, bytes);
        chunk
    }
}

/// Takes `bytes` bytes, at most [`CHUNK`], of the shared chunk. Returns the chunk and the offset of
/// the first of these bytes.
fn share(bytes: usize) -> (Arc<MemoryChunk>, usize) {
    /// The chunk that small arrays share, and the number of its bytes already given out.
    static OPEN: Mutex<Option<(Arc<MemoryChunk>, usize)>> = Mutex::new(None);
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let roomy = open.take().filter(|(_, used)| used + bytes <= CHUNK);
    let (chunk, used) = open.insert(roomy.unwrap_or_else(|| (Arc::new(MemoryChunk::huge(CHUNK)), 0)));
    let from = *used;
    *used += bytes;
    (Arc::clone(chunk), from)
}

/// Asks the system to back memory by huge pages. Must be called before the first write to it.
pub(super) fn want_huge_pages(start: *mut u8, bytes: usize) {
    #[cfg(target_os = "linux")]
    if bytes >= HUGE_PAGE {
        let from = (start as usize).next_multiple_of(PAGE);
        let to = (start as usize + bytes) / PAGE * PAGE;
        // SAFETY: the range is whole pages, and the advice only changes how they are backed. A
        // system without huge pages refuses it, which is harmless.
        unsafe { libc::madvise(from as *mut libc::c_void, to - from, libc::MADV_HUGEPAGE) };
    }
}

impl<E> Deref for Aligned<E> {
    type Target = [E];
    fn deref(&self) -> &[E] {
        // SAFETY: the array owns these elements; they are aligned and initialised to zero bits,
        // which are valid values (`ZeroBits`).
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

    /// The system commits memory only when it is written to.
    #[cfg(target_os = "linux")]
    #[test]
    fn zeros_take_no_memory() {
        let resident_pages = || -> usize {
            let text = std::fs::read_to_string("/proc/self/statm").unwrap();
            text.split(' ').nth(1).unwrap().parse().unwrap()
        };
        let before = resident_pages();
        let pool = Aligned::<Bf16>::new(1 << 30);
        // Other tests run meanwhile and use far less memory than these 2 GiB.
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

    /// Small arrays share chunks, large arrays have their own. Arrays never overlap, in whatever
    /// order they are dropped.
    #[test]
    fn arrays_of_all_sizes_keep_what_they_hold() {
        let mut kept = Vec::new();
        for round in 0..200usize {
            let len = [1, 100, 70_000, CHUNK / 3, CHUNK][round % 5];
            let make = [Aligned::<u8>::new, Aligned::small_pages][round % 7 / 6];
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
