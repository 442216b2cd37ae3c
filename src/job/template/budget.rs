//! The budget of one rendering: text and values that it creates, and its time.
//!
//! minijinja counts instructions, but one instruction may double a text or a list. So every
//! operation that creates a value reports its size here ([`charge`], [`weigh`]). If the size
//! follows from a product, it is reported before the value is created.

use std::cell::{Cell, RefCell};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

/// Maximum bytes that one rendering creates, as intermediate values and as output: many times the
/// longest context.
pub(super) const BYTES_MAX: usize = 128 << 20;
/// Maximum length of the rendered text, in bytes: several times the longest context.
pub(super) const OUTPUT_BYTES_MAX: usize = 64 << 20;
/// Maximum number of items of a list, and of values in a nested list.
pub(super) const ITEMS_MAX: usize = 1_000_000;
/// Maximum nesting of values: rows have at most 128 levels, and templates may wrap them in lists of
/// their own.
const DEPTH_MAX: usize = 200;
/// Bytes charged per list item.
const ITEM_BYTES: usize = 24;
/// A rendering that has created this many bytes waits until no other such rendering is in progress,
/// so that memory does not grow with the number of threads.
const LARGE_BYTES: usize = 16 << 20;
/// Maximum compute time of a rendering.
const BUSY_MAX: Duration = Duration::from_secs(10);
/// Steps between two reads of the clock.
const STEPS_A_LOOK: u32 = 64;
/// Number of bytes that counts as a step.
const STEP_BYTES: usize = 64 << 10;
/// Maximum time counted between two reads of the clock: a process that was suspended for an hour
/// has not computed for an hour.
const BUSY_A_LOOK: Duration = Duration::from_secs(1);

static LARGE_ONE: Mutex<()> = Mutex::new(());

thread_local! {
    static MADE: Cell<usize> = const { Cell::new(0) };
    static EMITTED: Cell<usize> = const { Cell::new(0) };
    static REFUSED: Cell<bool> = const { Cell::new(false) };
    static STEPS: Cell<u32> = const { Cell::new(0) };
    static BUSY: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    static LOOKED: Cell<Option<Instant>> = const { Cell::new(None) };
    static ALONE: RefCell<Option<MutexGuard<'static, ()>>> = const { RefCell::new(None) };
}

/// Scope of a rendering on this thread.
pub(super) struct Rendering(());

impl Rendering {
    pub(super) fn begin() -> Rendering {
        MADE.set(0);
        EMITTED.set(0);
        REFUSED.set(false);
        STEPS.set(0);
        BUSY.set(Duration::ZERO);
        LOOKED.set(None);
        Rendering(())
    }

    /// Whether a value was refused for its size or time.
    pub(super) fn was_refused(&self) -> bool {
        REFUSED.get()
    }
}

impl Drop for Rendering {
    fn drop(&mut self) {
        if MADE.get() > LARGE_BYTES {
            ALONE.take();
        }
    }
}

/// An error of this budget.
pub(super) fn refuse(why: impl Into<String>) -> Error {
    REFUSED.set(true);
    Error::new(ErrorKind::InvalidOperation, why.into())
}

/// Charges `bytes` to the rendering's budget.
pub(super) fn charge(bytes: usize) -> Result<(), Error> {
    let made = MADE.get().saturating_add(bytes);
    MADE.set(made);
    if made > BYTES_MAX {
        return Err(too_much());
    }
    if made > LARGE_BYTES {
        ALONE.with_borrow_mut(|alone| {
            alone.get_or_insert_with(|| LARGE_ONE.lock().unwrap_or_else(PoisonError::into_inner));
        });
    }
    steps(1 + (bytes / STEP_BYTES) as u32)
}

/// Charges an expression's output to the budget and to the length of the rendered text.
pub(super) fn charge_emitted(bytes: usize) -> Result<(), Error> {
    let emitted = EMITTED.get().saturating_add(bytes);
    EMITTED.set(emitted);
    if emitted > OUTPUT_BYTES_MAX {
        return Err(refuse(too_long()));
    }
    charge(bytes)
}

/// Whether the budget has room for `bytes` more.
pub(super) fn fits(bytes: usize) -> bool {
    MADE.get().saturating_add(bytes) <= BYTES_MAX
}

/// Refuses `bytes` more if the budget has no room: for products, before they are created.
pub(in crate::job) fn foresee(bytes: usize) -> Result<(), Error> {
    if fits(bytes) { Ok(()) } else { Err(too_much()) }
}

/// Counts one step; reads the clock now and then.
pub(super) fn step() -> Result<(), Error> {
    steps(1)
}

fn steps(taken: u32) -> Result<(), Error> {
    let steps = STEPS.get().saturating_add(taken);
    if steps < STEPS_A_LOOK {
        STEPS.set(steps);
        return Ok(());
    }
    STEPS.set(0);
    let now = Instant::now();
    // A short rendering never reads the clock.
    let looked = LOOKED.replace(Some(now)).unwrap_or(now);
    BUSY.set(BUSY.get() + (now - looked).min(BUSY_A_LOOK));
    if BUSY.get() > BUSY_MAX {
        Err(refuse(format!("it takes more than {} s", BUSY_MAX.as_secs())))
    } else {
        Ok(())
    }
}

fn too_much() -> Error {
    refuse(format!("it makes more than {} MB of text and values", BYTES_MAX >> 20))
}

/// The error for a text that is too long to be a prompt.
pub(super) fn too_long() -> String {
    format!("it renders to more than {} MB", OUTPUT_BYTES_MAX >> 20)
}

/// Checks `items` against the maximum list length.
pub(super) fn check_items(items: usize) -> Result<(), Error> {
    if items > ITEMS_MAX {
        Err(refuse(format!("it makes a list of more than {ITEMS_MAX} items")))
    } else {
        Ok(())
    }
}

/// Whether it is a list, a mapping or another iterable.
pub(super) fn holds_values(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable)
}

/// The size of a value with everything in it written out; shared parts count once per occurrence.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Weight {
    pub values: usize,
    pub bytes: usize,
}

/// Weighs a value. Refuses values that are too large or too deep to be written, compared or freed.
/// Also refuses values that may contain themselves: a namespace in a list, a mapping or another
/// namespace.
pub(super) fn weigh(value: &Value) -> Result<Weight, Error> {
    let mut weight = Weight::default();
    weight.add(value, 0)?;
    Ok(weight)
}

/// Weighs and charges a value that a template has built.
pub(super) fn charge_built(value: &Value) -> Result<(), Error> {
    charge(weigh(value)?.values.saturating_mul(ITEM_BYTES))
}

/// Charges a list by its number of items only.
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
        if depth > 0 && changes(value) {
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

/// Whether the value is mutable, so that it may come to contain itself.
pub(super) fn changes(value: &Value) -> bool {
    value.as_object().is_some_and(|object| {
        let name = object.type_name();
        name.ends_with("::Namespace") || name.ends_with("::Loop")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_parts_weigh_as_often_as_they_stand() {
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
    fn a_rendering_ends_where_it_takes_too_long() {
        let _rendering = Rendering::begin();
        for _ in 0..11 {
            // Time in which the process slept is capped.
            LOOKED.set(Instant::now().checked_sub(Duration::from_secs(3600)));
            let ended = (0..STEPS_A_LOOK).map(|_| step()).find_map(Result::err);
            if let Some(error) = ended {
                assert!(error.to_string().contains("more than 10 s"));
                assert!(BUSY.get() > BUSY_MAX);
                return;
            }
        }
        panic!("eleven seconds were allowed");
    }
}
