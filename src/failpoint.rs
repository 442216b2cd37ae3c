//! Marks places where fault tests abort, fail or pause the process. Normal builds contain no marks.

/// Marks a place by its name in `faults::points::POINTS`. In builds with feature `faults` the
/// process may abort or pause there, or return an error through `?`. In other builds this expands
/// to nothing.
///
/// `failpoint!("keeper.before-log")` in async code, `failpoint!(blocking "device.before-step")`
/// elsewhere.
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

/// Expands to nothing, because this build lacks the feature `faults`.
#[cfg(not(feature = "faults"))]
#[doc(hidden)]
#[macro_export]
macro_rules! failpoint {
    ($($anything:tt)*) => {};
}
