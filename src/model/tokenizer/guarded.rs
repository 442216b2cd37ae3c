//! Calls of the tokenizers library, which panics at some foreign input: that is an error of the input, not the process's.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

use super::one_line;

thread_local! {
    static IS_GUARDED: Cell<bool> = const { Cell::new(false) };
}

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
