//! The device that a command computes on: `--device`.

use std::fmt::{self, Display, Formatter};
use std::str::FromStr;

use crate::cli::exit::Failure;
use crate::device::cuda::Cuda;
use crate::device::{DeviceError, Precision};

/// The value of `--device`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum DeviceChoice {
    /// The first usable GPU, else the CPU.
    #[default]
    Auto,
    Cpu,
    /// A GPU by number.
    Cuda(u32),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceChoice, String> {
        match text.split_once(':') {
            None if text == "auto" => Ok(DeviceChoice::Auto),
            None if text == "cpu" => Ok(DeviceChoice::Cpu),
            None if text == "cuda" => Ok(DeviceChoice::Cuda(0)),
            Some(("cuda", number)) => {
                let number = number
                    .parse()
                    .map_err(|_| format!("`{number}` is no number of a GPU"))?;
                Ok(DeviceChoice::Cuda(number))
            }
            _ => Err("devices are `auto`, `cpu`, and `cuda:0` on".into()),
        }
    }
}

/// The device after resolving `auto`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ResolvedDevice {
    Cpu,
    Cuda(u32),
}

impl DeviceChoice {
    /// The device of workers on other machines: they are assumed to have a named GPU, and `auto` is
    /// resolved on this machine.
    pub(super) fn resolve_for_workers(self) -> Result<ResolvedDevice, Failure> {
        match self {
            DeviceChoice::Cuda(number) => Ok(ResolvedDevice::Cuda(number)),
            DeviceChoice::Cpu | DeviceChoice::Auto => self.resolve(),
        }
    }

    /// Checks that the named GPU is usable; for `auto`, logs why no GPU is used.
    pub(super) fn resolve(self) -> Result<ResolvedDevice, Failure> {
        match self {
            DeviceChoice::Cpu => Ok(ResolvedDevice::Cpu),
            DeviceChoice::Cuda(number) => {
                Cuda::probe(number).map_err(Failure::bad_job)?;
                Ok(ResolvedDevice::Cuda(number))
            }
            DeviceChoice::Auto => Ok(match Cuda::probe(0) {
                Ok(_) => ResolvedDevice::Cuda(0),
                // No driver or no card is a normal setup, so it is only logged as information.
                Err(DeviceError::NoDevice(why)) => {
                    tracing::info!("{why}");
                    ResolvedDevice::Cpu
                }
                Err(error) => {
                    tracing::warn!("computing on the CPU: {error}");
                    ResolvedDevice::Cpu
                }
            }),
        }
    }
}

impl Display for ResolvedDevice {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            ResolvedDevice::Cpu => f.write_str("cpu"),
            ResolvedDevice::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

impl ResolvedDevice {
    /// The precision that `precision: auto` selects on this device. On a CPU, F32 costs no more
    /// than BF16, and rows do not depend on their batch.
    pub(super) fn precision(self) -> Precision {
        match self {
            ResolvedDevice::Cpu => Precision::F32,
            ResolvedDevice::Cuda(_) => Precision::Bf16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names_are_parsed() {
        for (text, choice) in [
            ("auto", DeviceChoice::Auto),
            ("cpu", DeviceChoice::Cpu),
            ("cuda", DeviceChoice::Cuda(0)),
            ("cuda:3", DeviceChoice::Cuda(3)),
        ] {
            assert_eq!(text.parse(), Ok(choice));
        }
        for text in ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", ""] {
            assert!(text.parse::<DeviceChoice>().is_err(), "{text}");
        }
    }
}
