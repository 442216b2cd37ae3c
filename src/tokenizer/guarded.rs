//! Guards calls of the tokenizers library, which panics on some foreign input. Such a panic becomes
//! an error of the input.

#![expect(unsafe_code, reason = "calls of Oniguruma, a C library")]

use std::cell::Cell;
use std::ffi::{c_uint, c_ulong};
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

use super::one_line;

thread_local! {
    static IS_GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Maximum backtracking steps per regex search; they take about half a second. Ordinary searches
/// need a few steps per character. (Oniguruma has another limit for one match attempt.)
const BACKTRACK_STEPS_MAX: c_ulong = 50_000_000;
/// Maximum entries on the backtracking stack of a search, 32 bytes each.
const BACKTRACK_STACK_MAX: c_uint = 8 << 20;

/// The argument `what` of [`guarded`] for the text of a row.
pub(super) const THIS_TEXT: &str = "this text";

/// Runs the library on `what` and turns a panic into an error. The library panics where its regex
/// engine reaches the limit on backtracking, and at some invalid parts of its files. The panic's
/// message is not printed.
pub(super) fn guarded<T>(what: &str, run: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    static HOOKED: Once = Once::new();
    HOOKED.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |panic| {
            if !IS_GUARDED.get() {
                before(panic);
            }
        }));
    });
    limit_searches();
    IS_GUARDED.set(true);
    // A panic can leave only caches in an inconsistent state. They are behind locks, and the
    // library checks whether these are poisoned.
    let result = catch_unwind(AssertUnwindSafe(run));
    IS_GUARDED.set(false);
    match result {
        Ok(result) => result.map_err(|e| one_line(&e.to_string())),
        Err(panic) => {
            let message = panic.downcast_ref::<String>().map(String::as_str);
            let message = message.or_else(|| panic.downcast_ref::<&str>().copied());
            Err(format!(
                "the tokenizers library gives up on {what}: {}",
                one_line(message.unwrap_or("it does not say why"))
            ))
        }
    }
}

/// Sets the limits of all searches by the library's regular expressions.
pub(super) fn limit_searches() {
    static LIMITED: Once = Once::new();
    // SAFETY: both calls set plain numbers, any value of which is valid, once and before the first
    // search.
    LIMITED.call_once(|| unsafe {
        onig_sys::onig_set_retry_limit_in_search(BACKTRACK_STEPS_MAX);
        onig_sys::onig_set_match_stack_limit_size(BACKTRACK_STACK_MAX);
    });
}
