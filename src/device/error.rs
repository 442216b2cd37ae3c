//! What goes wrong on a device, split by what can be done about it.
//!
//! See docs/decisions/071-a-device-error-is-a-value.md.

/// A device that could not do what it was asked for.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
pub enum DeviceError {
    /// There is no device of this kind here at all.
    #[error("{0}")]
    Absent(String),
    /// There is no such device here, or what it needs is not installed.
    #[error("{0}")]
    Missing(String),
    /// The device cannot compute this model, in these formats.
    #[error("{0}")]
    Unsupported(String),
    /// Its memory is full: with fewer tokens at once it may go on.
    #[error("the device is out of memory: {0}")]
    OutOfMemory(String),
    /// What it holds is lost; only a new process can use it again.
    #[error("the device failed: {0}")]
    Lost(String),
}

/// Why a tensor was not taken over by the device.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
pub enum TensorError {
    #[error("row {row} holds a value that is not finite in the computing precision")]
    NotFinite {
        /// Which of the given tensors.
        part: usize,
        /// Row within it.
        row: usize,
    },
    #[error(transparent)]
    Device(#[from] DeviceError),
}
