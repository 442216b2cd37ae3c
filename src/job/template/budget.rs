//! The budget of one rendering: the text and values that it creates, and its time.
//!
//! minijinja counts instructions, but one instruction may double a text or a list. So every
//! operation that creates a value charges the value's size here ([`charge`], [`weigh`]). A size that
//! is a product of two numbers is checked before the value is created ([`check_fits`]).

use std::cell::{Cell, RefCell};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

/// Maximum bytes that one rendering creates, intermediate values and output together: many times the
/// longest context.
pub(super) const BYTES_MAX: usize = 128 << 20;
/// Maximum length of the rendered text, in bytes: several times the longest context.
pub(super) const OUTPUT_BYTES_MAX: usize = 64 << 20;
/// Maximum number of items of a list; for nested lists, of all values in them.
pub(super) const ITEMS_MAX: usize = 1_000_000;
/// Maximum nesting of values: rows have at most 128 levels, and templates may wrap them in lists of
/// their own.
const DEPTH_MAX: usize = 200;
/// Bytes charged for each list item.
const ITEM_BYTES: usize = 24;
/// A rendering that has created more bytes is large. Large renderings run one at a time, so that
/// memory does not grow with the number of threads.
const LARGE_BYTES: usize = 16 << 20;
/// Maximum compute time of a rendering.
const BUSY_MAX: Duration = Duration::from_secs(10);
/// Number of steps between two reads of the clock.
const STEPS_PER_CLOCK_READ: u32 = 64;
/// Number of charged bytes that count as one more step.
const STEP_BYTES: usize = 64 << 10;
/// Maximum time counted between two reads of the clock: a process that was suspended for an hour
/// has not computed for an hour.
const BUSY_PER_CLOCK_READ_MAX: Duration = Duration::from_secs(1);

/// The large rendering in progress holds this lock.
static LARGE_RENDERING: Mutex<()> = Mutex::new(());

thread_local! {
    static CREATED_BYTES: Cell<usize> = const { Cell::new(0) };
    static EMITTED_BYTES: Cell<usize> = const { Cell::new(0) };
    static REFUSED: Cell<bool> = const { Cell::new(false) };
    static STEPS: Cell<u32> = const { Cell::new(0) };
    static BUSY: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    static LAST_CLOCK_READ: Cell<Option<Instant>> = const { Cell::new(None) };
    static LARGE_RENDERING_GUARD: RefCell<Option<MutexGuard<'static, ()>>> = const { RefCell::new(None) };
}

/// A rendering in progress on this thread, whose budget is in the thread's variables.
pub(super) struct Rendering(());

impl Rendering {
    pub(super) fn begin() -> Rendering {
        CREATED_BYTES.set(0);
        EMITTED_BYTES.set(0);
        REFUSED.set(false);
        STEPS.set(0);
        BUSY.set(Duration::ZERO);
        LAST_CLOCK_READ.set(None);
        Rendering(())
    }

    /// Whether the rendering exceeded its budget.
    pub(super) fn was_refused(&self) -> bool {
        REFUSED.get()
    }
}

impl Drop for Rendering {
    fn drop(&mut self) {
        if CREATED_BYTES.get() > LARGE_BYTES {
            LARGE_RENDERING_GUARD.take();
        }
    }
}

/// The error that the rendering exceeds its budget.
pub(super) fn refuse(why: impl Into<String>) -> Error {
    REFUSED.set(true);
    Error::new(ErrorKind::InvalidOperation, why.into())
}

/// Charges `bytes` to the rendering's budget. A rendering that becomes large waits for its turn.
pub(super) fn charge(bytes: usize) -> Result<(), Error> {
    let created_bytes = CREATED_BYTES.get().saturating_add(bytes);
    CREATED_BYTES.set(created_bytes);
    if created_bytes > BYTES_MAX {
        return Err(too_much());
    }
    if created_bytes > LARGE_BYTES {
        LARGE_RENDERING_GUARD.with_borrow_mut(|guard| {
            guard.get_or_insert_with(|| LARGE_RENDERING.lock().unwrap_or_else(PoisonError::into_inner));
        });
    }
    add_steps(1 + (bytes / STEP_BYTES) as u32)
}

/// Charges the output of an expression to the budget, and adds it to the rendered text's length.
pub(super) fn charge_emitted(bytes: usize) -> Result<(), Error> {
    let emitted_bytes = EMITTED_BYTES.get().saturating_add(bytes);
    EMITTED_BYTES.set(emitted_bytes);
    if emitted_bytes > OUTPUT_BYTES_MAX {
        return Err(refuse(too_long_message()));
    }
    charge(bytes)
}

/// Whether `bytes` more fit into the budget.
pub(super) fn fits(bytes: usize) -> bool {
    CREATED_BYTES.get().saturating_add(bytes) <= BYTES_MAX
}

/// Refuses a value of `bytes` bytes, before it is created, if it does not fit into the budget.
pub(in crate::job) fn check_fits(bytes: usize) -> Result<(), Error> {
    if fits(bytes) { Ok(()) } else { Err(too_much()) }
}

/// Counts one step, and checks the time every [`STEPS_PER_CLOCK_READ`] steps.
pub(super) fn step() -> Result<(), Error> {
    add_steps(1)
}

fn add_steps(count: u32) -> Result<(), Error> {
    let steps = STEPS.get().saturating_add(count);
    if steps < STEPS_PER_CLOCK_READ {
        STEPS.set(steps);
        return Ok(());
    }
    STEPS.set(0);
    let now = Instant::now();
    // The first read of the clock only starts the measurement.
    let last_read = LAST_CLOCK_READ.replace(Some(now)).unwrap_or(now);
    BUSY.set(BUSY.get() + (now - last_read).min(BUSY_PER_CLOCK_READ_MAX));
    if BUSY.get() > BUSY_MAX {
        Err(refuse(format!("it takes more than {} s", BUSY_MAX.as_secs())))
    } else {
        Ok(())
    }
}

fn too_much() -> Error {
    refuse(format!("it makes more than {} MB of text and values", BYTES_MAX >> 20))
}

/// The message about a rendered text that is too long.
pub(super) fn too_long_message() -> String {
    format!("it renders to more than {} MB", OUTPUT_BYTES_MAX >> 20)
}

/// Checks that a list may have `items` items.
pub(super) fn check_items(items: usize) -> Result<(), Error> {
    if items > ITEMS_MAX {
        Err(refuse(format!("it makes a list of more than {ITEMS_MAX} items")))
    } else {
        Ok(())
    }
}

/// Whether the value is a list, a mapping or another iterable.
pub(super) fn is_container(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable)
}

/// The size of a value as if it were written out: a shared part counts once per occurrence.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Weight {
    pub values: usize,
    pub bytes: usize,
}

/// Determines the size of a value. Refuses values that are too large or too deep to be written,
/// compared or freed, and values that may contain themselves: a namespace in a list, a mapping or
/// another namespace.
pub(super) fn weigh(value: &Value) -> Result<Weight, Error> {
    let mut weight = Weight::default();
    weight.add(value, 0)?;
    Ok(weight)
}

/// Charges a value that a template has built with the number of all values in it.
pub(super) fn charge_built(value: &Value) -> Result<(), Error> {
    charge(weigh(value)?.values.saturating_mul(ITEM_BYTES))
}

/// Charges a list of `items` items, without the values in the items.
pub(super) fn charge_items(items: usize) -> Result<(), Error> {
    check_items(items)?;
    charge(items.saturating_mul(ITEM_BYTES))
}

impl Weight {
    fn add(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.values += 1;
        check_items(self.values)?;
        match value.kind() {
            ValueKind::String => return self.add_bytes(value.as_str().unwrap_or_default().len()),
            ValueKind::Bytes => return self.add_bytes(value.as_bytes().unwrap_or_default().len()),
            ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => {}
            _ => return Ok(()),
        }
        if depth > 0 && is_mutable(value) {
            return Err(refuse("it puts a namespace or a loop into another value"));
        }
        if depth == DEPTH_MAX {
            return Err(refuse(format!("it nests values more than {DEPTH_MAX} levels deep")));
        }
        let is_map = value.kind() == ValueKind::Map;
        for item in value.try_iter()?.checked() {
            let item = item?;
            if is_map {
                self.add_bytes(item.as_str().map_or(0, str::len))?;
                self.add(&value.get_item(&item)?, depth + 1)?;
            } else {
                self.add(&item, depth + 1)?;
            }
        }
        Ok(())
    }

    fn add_bytes(&mut self, bytes: usize) -> Result<(), Error> {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes > BYTES_MAX {
            Err(too_much())
        } else {
            Ok(())
        }
    }
}

/// Whether the value is mutable (a namespace or a loop), so that it may come to contain itself.
pub(super) fn is_mutable(value: &Value) -> bool {
    value.as_object().is_some_and(|object| {
        let name = object.type_name();
        name.ends_with("::Namespace") || name.ends_with("::Loop")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_parts_count_once_per_occurrence() {
        let text = Value::from("x".repeat(100));
        let list = Value::from(vec![text.clone(), text]);
        let lists = Value::from(vec![list.clone(), list]);
        assert_eq!(weigh(&lists).unwrap(), Weight { values: 7, bytes: 400 });
    }

    #[test]
    fn doubled_and_deep_values_are_refused() {
        let mut wide = Value::from(vec![Value::from(1)]);
        for _ in 0..60 {
            wide = Value::from(vec![wide.clone(), wide]);
        }
        assert!(weigh(&wide).unwrap_err().to_string().contains("1000000 items"));
        let mut deep = Value::from(1);
        for _ in 0..=DEPTH_MAX {
            deep = Value::from(vec![deep]);
        }
        assert!(weigh(&deep).unwrap_err().to_string().contains("levels deep"));
    }

    #[test]
    fn slow_renderings_are_refused() {
        let _rendering = Rendering::begin();
        for _ in 0..11 {
            // The hour since the last read counts as one second.
            LAST_CLOCK_READ.set(Instant::now().checked_sub(Duration::from_secs(3600)));
            let error = (0..STEPS_PER_CLOCK_READ).map(|_| step()).find_map(Result::err);
            if let Some(error) = error {
                assert!(error.to_string().contains("more than 10 s"));
                assert!(BUSY.get() > BUSY_MAX);
                return;
            }
        }
        panic!("eleven seconds were allowed");
    }
}
