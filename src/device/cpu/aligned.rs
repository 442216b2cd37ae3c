//! Arrays of numbers that start at a cache line and lie on huge pages.
//!
//! Because of the alignment, register-wide loads do not straddle two cache lines. With small pages,
//! reads of weights would wait for address translations, and hardware prefetching would stop at
//! each page boundary. A model's matrices are often smaller than a huge page, or end in the middle
//! of one, so small arrays share chunks, one array after the other.
//!
//! See docs/decisions/067-weights-and-kv-lie-on-huge-pages.md.

#![expect(unsafe_code, reason = "memory of its own allocation, zeroed and aligned")]

use std::alloc::{Layout, handle_alloc_error};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::gemm::tile::{Bf16, F16};

/// Bytes of a cache line.
const CACHE_LINE: usize = 64;
/// Bytes of a huge page on most machines.
const HUGE_PAGE: usize = 2 << 20;
/// Maximum bytes of a normal page on supported systems.
const NORMAL_PAGE_MAX: usize = 1 << 16;
/// An array of its own chunk begins up to 23 such steps after a huge page. A step is a normal page and some cache lines, so that
/// neighbouring arrays begin at different places of a page, too.
const OFFSET_STEP: usize = NORMAL_PAGE_MAX + 5 * CACHE_LINE;
const OFFSETS: usize = 24;
/// Bytes of a chunk that small arrays share. An array larger than half of this has its own chunk.
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
// SAFETY: as above.
unsafe impl ZeroBits for u16 {}
// SAFETY: as above.
unsafe impl ZeroBits for i32 {}
// SAFETY: as above; the type wraps its bits.
unsafe impl ZeroBits for Bf16 {}
// SAFETY: as above; the type wraps its bits.
unsafe impl ZeroBits for F16 {}

/// An array of fixed length whose first element is aligned to a cache line.
pub(crate) struct AlignedArray<E> {
    /// Keeps the memory of the elements allocated.
    _chunk: Arc<MemoryChunk>,
    /// First of the `len` elements that this array owns.
    start: *mut E,
    len: usize,
    owns: PhantomData<E>,
}

// SAFETY: the array owns its elements, as a vector does.
unsafe impl<E: Send> Send for AlignedArray<E> {}
// SAFETY: as above.
unsafe impl<E: Sync> Sync for AlignedArray<E> {}

impl<E: ZeroBits> AlignedArray<E> {
    /// An array of `len` zeros. The operating system maps each of its pages at the first write.
    pub(super) fn new(len: usize) -> AlignedArray<E> {
        let bytes = Self::bytes(len);
        if bytes > CHUNK / 2 {
            AlignedArray::in_chunk(Arc::new(MemoryChunk::on_huge_pages(bytes)), 0, len)
        } else {
            let (chunk, offset) = allocate_shared(bytes);
            AlignedArray::in_chunk(chunk, offset, len)
        }
    }

    /// As [`new`](Self::new), in memory that is given back as soon as the array is dropped. Arrays that are allocated one after the other
    /// begin at different sets of the caches, so that operations that read and write several of them need no more ways than there are.
    pub(super) fn alone(len: usize) -> AlignedArray<E> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let offset = COUNT.fetch_add(1, Ordering::Relaxed) % OFFSETS * OFFSET_STEP;
        let chunk = MemoryChunk::on_huge_pages(offset + Self::bytes(len));
        AlignedArray::in_chunk(Arc::new(chunk), offset, len)
    }

    /// As [`new`](Self::new), on small pages: for arrays of which only a few elements are written.
    pub(super) fn on_small_pages(len: usize) -> AlignedArray<E> {
        AlignedArray::in_chunk(Arc::new(MemoryChunk::new(Self::bytes(len))), 0, len)
    }

    /// An array that starts at byte `offset` of the chunk. No other array may use its bytes.
    fn in_chunk(chunk: Arc<MemoryChunk>, offset: usize, len: usize) -> AlignedArray<E> {
        AlignedArray {
            start: chunk.start.wrapping_add(offset).cast(),
            _chunk: chunk,
            len,
            owns: PhantomData,
        }
    }

    /// Bytes of `len` elements, rounded up to whole cache lines.
    fn bytes(len: usize) -> usize {
        let bytes = len
            .checked_mul(size_of::<E>())
            .and_then(|b| b.checked_next_multiple_of(CACHE_LINE));
        bytes.unwrap_or_else(|| panic!("{len} elements of {} bytes cannot be allocated", size_of::<E>()))
    }
}

/// Zeroed memory that arrays are allocated from. Each byte is allocated at most once. It comes from the
/// system, since an allocator may clear memory that it had before, and so take all of it.
struct MemoryChunk {
    memory: *mut u8,
    /// Bytes from `memory` on.
    size: usize,
    /// Aligned to a huge page.
    start: *mut u8,
}

// SAFETY: a chunk only keeps and frees its memory.
unsafe impl Send for MemoryChunk {}
// SAFETY: as above.
unsafe impl Sync for MemoryChunk {}

impl Drop for MemoryChunk {
    fn drop(&mut self) {
        // SAFETY: this memory was mapped with this size, and all arrays in it have been dropped.
        unsafe { libc::munmap(self.memory.cast(), self.size) };
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
        let size = layout.size();
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANON);
        // SAFETY: memory of no file, at an address that the system chooses.
        let memory = unsafe { libc::mmap(null_mut(), size, access, kind, -1, 0) };
        if memory == libc::MAP_FAILED {
            handle_alloc_error(layout);
        }
        let memory: *mut u8 = memory.cast();
        let start = memory.wrapping_add(memory.align_offset(HUGE_PAGE));
        MemoryChunk { memory, size, start }
    }

    fn on_huge_pages(bytes: usize) -> MemoryChunk {
        let chunk = MemoryChunk::new(bytes);
        advise_huge_pages(chunk.start, bytes);
        chunk
    }
}

/// Allocates `bytes` bytes, at most [`CHUNK`], in a shared chunk. Returns the chunk and the offset
/// of the first byte.
fn allocate_shared(bytes: usize) -> (Arc<MemoryChunk>, usize) {
    /// The chunk that small arrays are allocated in, and the number of its allocated bytes.
    static CURRENT: Mutex<Option<(Arc<MemoryChunk>, usize)>> = Mutex::new(None);
    let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
    let chunk_with_space = current.take().filter(|(_, used)| used + bytes <= CHUNK);
    let new_chunk = || (Arc::new(MemoryChunk::on_huge_pages(CHUNK)), 0);
    let (chunk, used) = current.insert(chunk_with_space.unwrap_or_else(new_chunk));
    let offset = *used;
    *used += bytes;
    (Arc::clone(chunk), offset)
}

/// Asks the system to back memory by huge pages. Must be called before the memory is first written.
fn advise_huge_pages(start: *mut u8, bytes: usize) {
    #[cfg(target_os = "linux")]
    if bytes >= HUGE_PAGE {
        let from = (start as usize).next_multiple_of(NORMAL_PAGE_MAX);
        let to = (start as usize + bytes) / NORMAL_PAGE_MAX * NORMAL_PAGE_MAX;
        // SAFETY: the range consists of whole pages, and the call only changes how they are backed.
        // A system without huge pages returns an error, which is harmless.
        unsafe { libc::madvise(from as *mut libc::c_void, to - from, libc::MADV_HUGEPAGE) };
    }
}

impl<E> Deref for AlignedArray<E> {
    type Target = [E];
    fn deref(&self) -> &[E] {
        // SAFETY: the array owns these elements; they are aligned and initialised to zero bits,
        // which are valid values (`ZeroBits`).
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl<E> DerefMut for AlignedArray<E> {
    fn deref_mut(&mut self) -> &mut [E] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    fn resident_bytes() -> usize {
        let text = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: usize = text.split(' ').nth(1).unwrap().parse().unwrap();
        pages << 12
    }

    /// The system commits memory only when it is written to.
    #[cfg(target_os = "linux")]
    #[test]
    fn unwritten_arrays_use_no_memory() {
        let before = resident_bytes();
        let pool = AlignedArray::<Bf16>::new(1 << 30);
        // Other tests run meanwhile and use far less memory than these 2 GiB.
        assert!(resident_bytes() < before + (1 << 30), "the pool was written to");
        assert_eq!(pool[1 << 29].0, 0);
    }

    /// Once so much was freed, glibc's allocator keeps arrays of this size in memory that it clears itself.
    #[cfg(target_os = "linux")]
    #[test]
    fn unwritten_arrays_of_some_megabytes_use_no_memory() {
        drop(std::hint::black_box(vec![1u8; 31 << 20]));
        let before = resident_bytes();
        let arrays: Vec<_> = (0..64).map(|_| AlignedArray::<u8>::on_small_pages(28 << 20)).collect();
        assert!(resident_bytes() < before + (1 << 30), "the arrays were written to");
        assert!(arrays.iter().all(|array| array[14 << 20] == 0));
    }

    #[test]
    fn arrays_of_any_length_start_at_a_cache_line() {
        for len in [0, 1, 15, 16, 17, 100_000] {
            let mut numbers = AlignedArray::<f32>::new(len);
            assert_eq!((numbers.len(), numbers.as_ptr() as usize % CACHE_LINE), (len, 0));
            numbers.fill(1.0);
            let halves = AlignedArray::<Bf16>::new(len);
            assert!(halves.iter().all(|x| x.0 == 0));
            assert_eq!((halves.len(), halves.as_ptr() as usize % CACHE_LINE), (len, 0));
        }
    }

    /// Small arrays share chunks, large arrays have their own. Arrays never overlap, in whatever
    /// order they are dropped.
    #[test]
    fn arrays_of_all_sizes_keep_their_contents() {
        let mut kept = Vec::new();
        for round in 0..200usize {
            let len = [1, 100, 70_000, CHUNK / 3, CHUNK][round % 5];
            let make = [AlignedArray::<u8>::new, AlignedArray::on_small_pages][round % 7 / 6];
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
