//! Errors of devices, split by the possible reaction.
//!
//! See docs/decisions/071-a-device-error-is-a-value.md.

/// Error of a device.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
pub enum DeviceError {
    /// This machine has no device of this kind: no driver is installed, or the driver finds no
    /// device.
    #[error("{0}")]
    NoDevice(String),
    /// The requested device cannot be used: none has this number, it is not ready, its driver is
    /// too old, or a library that it needs is missing.
    #[error("{0}")]
    Unavailable(String),
    /// The device cannot compute this model, in these formats.
    #[error("{0}")]
    Unsupported(String),
    /// The device's memory is full; the caller may go on with fewer tokens per step.
    #[error("the device is out of memory: {0}")]
    OutOfMemory(String),
    /// The device's contents are lost; only a new process can use it again.
    #[error("the device failed: {0}")]
    Lost(String),
}

/// Why the device rejected a tensor.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
pub enum TensorError {
    #[error("row {row} holds a value that is not finite in the computing precision")]
    NotFinite {
        /// Index into the tensors of the call.
        part: usize,
        /// Row within it.
        row: usize,
    },
    #[error(transparent)]
    Device(#[from] DeviceError),
}

pub(super) fn no_layer_inputs() -> DeviceError {
    DeviceError::Unsupported("this device computes no inputs of each layer".into())
}

pub(super) fn no_latents() -> DeviceError {
    DeviceError::Unsupported("this device keeps no latents".into())
}

pub(super) fn no_recurrent_layers() -> DeviceError {
    DeviceError::Unsupported("this device runs no recurrent layers".into())
}

pub(super) fn no_adapters() -> DeviceError {
    DeviceError::Unsupported("this device keeps no adapters beside a model".into())
}

pub(super) fn no_codes() -> DeviceError {
    DeviceError::Unsupported("this device keeps no weights in four bits".into())
}
