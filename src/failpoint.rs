//! Marks of places where fault tests stop, fail or hold up the process; in normal builds they are nothing.

/// Marks a place by its name in `faults::points::POINTS`. In builds with feature `faults` the process may abort there,
/// wait, or return an error through `?`; in others this expands to nothing.
///
/// `failpoint!("keeper.before-log")` in async code, `failpoint!(blocking "device.before-step")` elsewhere.
#[cfg(feature = "faults")]
#[doc(hidden)]
#[macro_export]
macro_rules! failpoint {
    (blocking $name:literal) => {
        $crate::faults::point_blocking($name)?
    };
    ($name:literal) => {
        $crate::faults::point($name).await?
    };
}

/// Nothing: this build has no feature `faults`.
#[cfg(not(feature = "faults"))]
#[doc(hidden)]
#[macro_export]
macro_rules! failpoint {
    ($($anything:tt)*) => {};
}
