//! Calls of the tokenizers library, which panics at some foreign input: that is an error of the input, not the process's.

#![expect(unsafe_code, reason = "calls of Oniguruma, a C library")]

use std::cell::Cell;
use std::ffi::{c_uint, c_ulong};
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

use super::one_line;

thread_local! {
    static IS_GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Most steps back of a search that the library's regular expressions make, half a second of them; ordinary ones make a few for each
/// character. (One attempt of a search has a limit of its own.)
const STEPS_BACK_MAX: c_ulong = 50_000_000;
/// Most places that a search keeps to go back to, of 32 bytes each.
const PLACES_MAX: c_uint = 8 << 20;

/// A row's, where that is what the library may give up on.
pub(super) const THIS_TEXT: &str = "this text";

/// Runs the library on `what`: its regex engine gives up on some texts (a limit on backtracking), and parts of its files are unwrapped.
/// Nothing of such a panic is printed.
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
    // What the closure could leave half done are caches behind locks, which the library asks whether they are poisoned.
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

/// Sets the limits of all searches of the library's regular expressions.
pub(super) fn limit_searches() {
    static LIMITED: Once = Once::new();
    // SAFETY: plain numbers, of which any is right, are set once, before the first search.
    LIMITED.call_once(|| unsafe {
        onig_sys::onig_set_retry_limit_in_search(STEPS_BACK_MAX);
        onig_sys::onig_set_match_stack_limit_size(PLACES_MAX);
    });
}
