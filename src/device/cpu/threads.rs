//! The CPU device's thread pool, which divides the operations of a step among threads.
//!
//! A step consists of a hundred or more parallel regions, many of which take about ten
//! microseconds. The threads of a general-purpose pool sleep as soon as they are idle, and waking a
//! thread takes longer than such a region. The threads of this pool spin for a while, then yield
//! their core, and sleep only after [`IDLE_TIMEOUT`] without a region. (Section "Threads" of
//! `benches/README.md` compares both.)
//!
//! See docs/decisions/068-cpu-steps-have-their-own-threads.md.

#![expect(unsafe_code, reason = "threads that outlive a region borrow its job and its parts")]

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, park, yield_now};
use std::time::{Duration, Instant};
use std::{hint, io};

/// Spin iterations before a thread yields its core: about 30 microseconds.
const SPINS: u32 = 1000;
/// Idle time after which a thread sleeps.
const IDLE_TIMEOUT: Duration = Duration::from_millis(2);
/// Element-wise operations over fewer elements run on the calling thread alone: more threads would
/// not be faster.
const PARALLEL_ELEMENTS_MIN: usize = 1 << 13;
/// Parts of an operation per thread. With several parts, a slow thread runs fewer of them.
const PARTS_PER_THREAD: usize = 4;

/// Flag of [`PoolState::state`]: helpers may enter the region.
const OPEN: u64 = 1;
/// What a helper adds to [`PoolState::state`] while it is in the region.
const HELPER_INCREMENT: u64 = 2;
const HELPER_MASK: u64 = REGION_INCREMENT - HELPER_INCREMENT;
/// Increment of the region's number, which is the upper half of [`PoolState::state`].
const REGION_INCREMENT: u64 = 1 << 32;

thread_local! {
    /// Whether this thread is running tasks of a region.
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

/// A thread pool: the calling thread and helper threads. It runs one parallel region at a time.
pub struct Threads {
    shared: Arc<PoolState>,
    helpers: Vec<JoinHandle<()>>,
    region_lock: Mutex<()>,
}

/// The body of a region, which each thread runs; called with the thread's number and the tasks.
type TaskFn<'a> = dyn Fn(usize, Tasks<'_>) + Sync + 'a;

/// A value that shares no cache line with others, to avoid false sharing.
#[repr(align(128))]
struct CachePadded<T>(T);

struct PoolState {
    /// The region's number, the number of helpers in the region, and [`OPEN`].
    state: CachePadded<AtomicU64>,
    /// The next task in the range of each thread.
    next: Vec<CachePadded<AtomicUsize>>,
    /// Written only while the region is closed and contains no helper. Read only by helpers in the
    /// region.
    region: UnsafeCell<Option<Region>>,
    asleep: Vec<AtomicBool>,
    shutdown: AtomicBool,
    /// Payload of a panic in a helper's task.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

#[derive(Clone, Copy)]
struct Region {
    /// Valid as long as a helper is in the region.
    body: *const TaskFn<'static>,
    tasks: usize,
}

// SAFETY: `state` synchronises access to `region`, as documented there; the region's body and all
// other fields are `Sync`.
unsafe impl Sync for PoolState {}
// SAFETY: as above.
unsafe impl Send for PoolState {}

/// Iterator over the tasks of a region. Each task is yielded to one thread only. A thread first
/// gets the tasks of its own range, for locality, then the remaining tasks of other threads'
/// ranges.
pub struct Tasks<'a> {
    next: &'a [CachePadded<AtomicUsize>],
    tasks: usize,
    thread: usize,
    /// Number of ranges found empty so far, counted from the thread's own range on.
    empty_ranges: usize,
}

/// First task of a thread's range.
fn range_start(tasks: usize, thread: usize, threads: usize) -> usize {
    tasks * thread / threads
}

impl Iterator for Tasks<'_> {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let threads = self.next.len();
        while self.empty_ranges < threads {
            let owner = (self.thread + self.empty_ranges) % threads;
            let end = range_start(self.tasks, owner + 1, threads);
            let next = &self.next[owner].0;
            // Loading before adding lets the cache line of an empty range stay shared among cores.
            if next.load(Ordering::Relaxed) < end {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task < end {
                    return Some(task);
                }
            }
            self.empty_ranges += 1;
        }
        None
    }
}

/// As [`Tasks`], but yields the items of a slice.
pub struct Items<'a, T> {
    tasks: Tasks<'a>,
    first: *mut T,
    life: PhantomData<&'a mut T>,
}

impl<'a, T> Iterator for Items<'a, T> {
    type Item = &'a mut T;

    fn next(&mut self) -> Option<&'a mut T> {
        // SAFETY: the slice has an item for each task, and each task is yielded once.
        self.tasks.next().map(|task| unsafe { &mut *self.first.add(task) })
    }
}

impl Threads {
    /// A pool of the calling thread and `count - 1` helpers.
    ///
    /// # Errors
    /// If the operating system cannot start a thread.
    pub fn new(count: usize) -> io::Result<Threads> {
        let helpers = count.max(1) - 1;
        let shared = Arc::new(PoolState {
            state: CachePadded(AtomicU64::new(0)),
            next: (0..=helpers).map(|_| CachePadded(AtomicUsize::new(0))).collect(),
            region: UnsafeCell::new(None),
            asleep: (0..helpers).map(|_| AtomicBool::new(false)).collect(),
            shutdown: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        let mut threads = Threads {
            shared,
            helpers: Vec::new(),
            region_lock: Mutex::new(()),
        };
        for i in 0..helpers {
            let shared = Arc::clone(&threads.shared);
            let builder = std::thread::Builder::new().name(format!("cpu-{}", i + 1));
            // On an error, dropping `threads` ends the helpers started so far.
            threads.helpers.push(builder.spawn(move || shared.run_helper(i))?);
        }
        Ok(threads)
    }

    /// Number of threads, including the calling thread.
    pub fn count(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Number of parts into which to divide an operation over `elements` elements.
    pub fn parts(&self, elements: usize) -> usize {
        if elements < PARALLEL_ELEMENTS_MIN || self.helpers.is_empty() {
            1
        } else {
            self.count() * PARTS_PER_THREAD
        }
    }

    /// Runs the tasks `0..tasks`: calls `body` on each thread that takes part, with the thread's
    /// number (below [`count`](Self::count)) and an iterator over tasks. Returns when all tasks are
    /// done.
    ///
    /// # Panics
    /// If `body` panics on any thread, or if this is called from within a task.
    pub fn parallel_for(&self, tasks: usize, body: impl Fn(usize, Tasks<'_>) + Sync) {
        if tasks <= 1 || self.helpers.is_empty() {
            run_serial(tasks, body);
        } else {
            self.run_region(tasks, &body);
        }
    }

    /// As [`parallel_for`](Self::parallel_for), with one task per item. `elements` is the total
    /// work in elements, as for [`parts`](Self::parts); if it is small, the calling thread runs all
    /// tasks alone.
    ///
    /// # Panics
    /// As [`parallel_for`](Self::parallel_for).
    pub fn parallel_for_each<T: Send>(
        &self,
        elements: usize,
        items: &mut [T],
        body: impl Fn(usize, Items<'_, T>) + Sync,
    ) {
        /// A pointer that threads may share, because each accesses different items.
        struct FirstItem<T>(*mut T);
        // SAFETY: each item goes to one thread only, and `T` may be sent.
        unsafe impl<T: Send> Sync for FirstItem<T> {}
        impl<T> FirstItem<T> {
            fn get(&self) -> *mut T {
                self.0
            }
        }
        let first = FirstItem(items.as_mut_ptr());
        let body = |thread, tasks: Tasks<'_>| {
            let items = Items {
                tasks,
                first: first.get(),
                life: PhantomData,
            };
            body(thread, items);
        };
        if self.parts(elements) == 1 {
            run_serial(items.len(), body);
        } else {
            self.parallel_for(items.len(), body);
        }
    }

    fn run_region(&self, tasks: usize, body: &TaskFn<'_>) {
        assert!(
            !IN_TASK.get(),
            "a parallel region must not be started from within a task"
        );
        let _region = self.region_lock.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes, and no helper is in the region after this function
        // returns.
        let static_body: *const TaskFn<'static> = unsafe { std::mem::transmute(std::ptr::from_ref(body)) };
        // SAFETY: the previous region is closed and contains no helper, and this thread holds
        // `region_lock`.
        unsafe {
            *shared.region.get() = Some(Region {
                body: static_body,
                tasks,
            })
        };
        for (thread, next) in shared.next.iter().enumerate() {
            next.0
                .store(range_start(tasks, thread, shared.next.len()), Ordering::Relaxed);
        }
        let region_number =
            (shared.state.0.load(Ordering::Relaxed) & !(REGION_INCREMENT - 1)).wrapping_add(REGION_INCREMENT);
        // `SeqCst` here and for `asleep`: either the helper sees the region, or this thread sees
        // that the helper is asleep.
        shared.state.0.store(region_number | OPEN, Ordering::SeqCst);
        for (asleep, helper) in shared.asleep.iter().zip(&self.helpers).take(tasks - 1) {
            if asleep.load(Ordering::SeqCst) {
                helper.thread().unpark();
            }
        }
        let result = catch_unwind(AssertUnwindSafe(|| shared.run_tasks(0, body, tasks)));
        shared.state.0.fetch_and(!OPEN, Ordering::Relaxed);
        let mut spins = 0;
        while shared.state.0.load(Ordering::Acquire) & HELPER_MASK != 0 {
            spin_or_yield(&mut spins);
        }
        let helper_panic = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = result.err().or(helper_panic) {
            resume_unwind(panic);
        }
    }
}

/// Runs all tasks on the calling thread.
fn run_serial(tasks: usize, body: impl Fn(usize, Tasks<'_>)) {
    body(
        0,
        Tasks {
            next: &[CachePadded(AtomicUsize::new(0))],
            tasks,
            thread: 0,
            empty_ranges: 0,
        },
    );
}

/// Spins in the first [`SPINS`] calls, then yields the core.
fn spin_or_yield(spins: &mut u32) {
    if *spins < SPINS {
        *spins += 1;
        hint::spin_loop();
    } else {
        yield_now();
    }
}

impl PoolState {
    fn run_tasks(&self, thread: usize, body: &TaskFn<'_>, tasks: usize) {
        /// Resets the flag when dropped, also if the body panics.
        struct ResetInTask;
        impl Drop for ResetInTask {
            fn drop(&mut self) {
                IN_TASK.set(false);
            }
        }
        IN_TASK.set(true);
        let _reset = ResetInTask;
        body(
            thread,
            Tasks {
                next: &self.next,
                tasks,
                thread,
                empty_ranges: 0,
            },
        );
    }

    /// The main loop of a helper.
    fn run_helper(&self, helper: usize) {
        let mut last_region = 0;
        while let Some(region_number) = self.enter_region(helper, last_region) {
            last_region = region_number;
            // SAFETY: while this helper is in the region, `region` is not written and the body is
            // alive.
            let (body, tasks) = unsafe {
                let region = (*self.region.get()).expect("an open region");
                (&*region.body, region.tasks)
            };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.run_tasks(helper + 1, body, tasks))) {
                *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
            }
            self.state.0.fetch_sub(HELPER_INCREMENT, Ordering::Release);
        }
    }

    /// Waits for an open region other than the last one seen, and enters it. Returns its number, or
    /// `None` on shutdown.
    fn enter_region(&self, helper: usize, last_region: u64) -> Option<u64> {
        let (mut spins, mut sleep_at) = (0, None);
        loop {
            let state = self.state.0.load(Ordering::SeqCst);
            if is_new_region(state, last_region) {
                let order = (Ordering::Acquire, Ordering::Relaxed);
                if self
                    .state
                    .0
                    .compare_exchange(state, state + HELPER_INCREMENT, order.0, order.1)
                    .is_ok()
                {
                    return Some(state & !(REGION_INCREMENT - 1));
                }
                continue;
            }
            if self.shutdown.load(Ordering::Relaxed) {
                return None;
            }
            spin_or_yield(&mut spins);
            if spins == SPINS && *sleep_at.get_or_insert_with(|| Instant::now() + IDLE_TIMEOUT) < Instant::now() {
                self.sleep(helper, last_region);
                (spins, sleep_at) = (0, None);
            }
        }
    }

    fn sleep(&self, helper: usize, last_region: u64) {
        let asleep = &self.asleep[helper];
        asleep.store(true, Ordering::SeqCst);
        while !is_new_region(self.state.0.load(Ordering::SeqCst), last_region) && !self.shutdown.load(Ordering::SeqCst)
        {
            park();
            // If the region that woke this helper is already finished, more regions are likely to
            // follow, so the helper stays awake.
            if self.state.0.load(Ordering::Relaxed) & !(REGION_INCREMENT - 1) != last_region {
                break;
            }
        }
        asleep.store(false, Ordering::SeqCst);
    }
}

/// Whether the region of `state` is open and is not `last_region`.
fn is_new_region(state: u64, last_region: u64) -> bool {
    state & OPEN != 0 && state & !(REGION_INCREMENT - 1) != last_region
}

/// The calling thread alone.
impl Default for Threads {
    fn default() -> Threads {
        Threads::new(1).expect("a pool without helper threads cannot fail to start")
    }
}

impl std::fmt::Debug for Threads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Threads({})", self.count())
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.shutdown.store(true, Ordering::SeqCst);
        for helper in self.helpers.drain(..) {
            helper.thread().unpark();
            // Panics of tasks have already been passed on to the caller.
            let _ = helper.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANY: usize = PARALLEL_ELEMENTS_MIN;

    #[test]
    fn each_task_runs_once_with_any_number_of_threads() {
        for count in [1, 2, 3, 7] {
            let threads = Threads::new(count).unwrap();
            assert_eq!(threads.count(), count);
            for region in 0..2000usize {
                let mut done = vec![0usize; region % 19];
                threads.parallel_for_each(MANY, &mut done, |thread, items| {
                    assert!(thread < count);
                    items.for_each(|item| *item += region);
                });
                assert!(
                    done.iter().all(|d| *d == region),
                    "{count} threads, region {region}: {done:?}"
                );
            }
        }
    }

    #[test]
    fn both_threads_run_tasks_even_after_sleeping() {
        let threads = Threads::new(2).unwrap();
        for _ in 0..3 {
            std::thread::sleep(IDLE_TIMEOUT * 5);
            // Each task waits for the other: one thread alone would wait for ever.
            let met = AtomicUsize::new(0);
            threads.parallel_for(2, |_, tasks| {
                for _ in tasks {
                    met.fetch_add(1, Ordering::SeqCst);
                    while met.load(Ordering::SeqCst) < 2 {
                        yield_now();
                    }
                }
            });
        }
    }

    #[test]
    fn regions_of_several_callers_take_turns() {
        let threads = Threads::new(3).unwrap();
        std::thread::scope(|scope| {
            for caller in 0..4usize {
                let threads = &threads;
                scope.spawn(move || {
                    for _ in 0..500 {
                        let mut items = vec![0; 5];
                        threads.parallel_for_each(MANY, &mut items, |_, items| items.for_each(|item| *item = caller));
                        assert_eq!(items, [caller; 5]);
                    }
                });
            }
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_stays_usable() {
        let threads = Threads::new(2).unwrap();
        for bad in 0..8 {
            let share = || threads.parallel_for(8, |_, mut tasks| assert!(!tasks.any(|t| t == bad), "task {bad}"));
            let panic = catch_unwind(AssertUnwindSafe(share)).unwrap_err();
            assert_eq!(panic.downcast_ref::<String>(), Some(&format!("task {bad}")));
            let mut items = [0; 8];
            threads.parallel_for_each(MANY, &mut items, |_, items| items.for_each(|item| *item = 1));
            assert_eq!(items, [1; 8]);
        }
    }

    #[test]
    fn nested_regions_are_refused() {
        let threads = Threads::new(2).unwrap();
        let share = || {
            threads.parallel_for(2, |_, tasks| {
                tasks.for_each(|_| threads.parallel_for(2, |_, tasks| tasks.for_each(drop)))
            })
        };
        assert!(catch_unwind(AssertUnwindSafe(share)).is_err());
        threads.parallel_for(2, |_, tasks| tasks.for_each(drop));
    }
}
