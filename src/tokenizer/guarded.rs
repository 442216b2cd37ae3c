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

/// Maximum backtracking steps per regex search, about half a second of them. Ordinary searches need
/// a few per character. (One match attempt has its own limit.)
const STEPS_BACK_MAX: c_ulong = 50_000_000;
/// Maximum entries of 32 bytes on the backtracking stack of a search.
const PLACES_MAX: c_uint = 8 << 20;

/// The value of `what` for an error about the text of a row.
pub(super) const THIS_TEXT: &str = "this text";

/// Runs the library on `what` and turns a panic into an error. The library's regex engine gives up
/// on some texts (a limit on backtracking), and the library unwraps some parts of its files. The
/// panic's message is not printed.
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
    // The closure can leave only caches half done. They are behind locks, and the library checks
    // whether these are poisoned.
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
    // SAFETY: both calls set plain numbers, of which any is valid, once and before the first
    // search.
    LIMITED.call_once(|| unsafe {
        onig_sys::onig_set_retry_limit_in_search(STEPS_BACK_MAX);
        onig_sys::onig_set_match_stack_limit_size(PLACES_MAX);
    });
}
