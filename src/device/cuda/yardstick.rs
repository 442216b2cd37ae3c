//! Products by NVIDIA's library, which `gristmill doctor` holds ours against. Nothing else computes by it: which of its kernels it takes
//! follows the number of rows, and with it the order of sums.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use super::Cuda;
use super::cublaslt::{Algorithm, CublasLt, Matrices};
use super::driver::{Argument, Memory};
use super::memory::{address, want};
use super::plan::{self, Format, LinearShape};
use crate::device::{DeviceError, KvFormat, Precision};

/// The library, and what was found of it.
pub(super) struct Yardstick {
    library: CublasLt,
    /// The fastest way for each shape; `None`: it does not compute it.
    fastest: Mutex<HashMap<(LinearShape, bool), Option<Algorithm>>>,
    /// Of INT8, before they are scaled.
    sums: Mutex<Option<Memory>>,
}

impl Cuda {
    /// As [`open`](Cuda::open), with linear operations computed by cuBLASLt.
    ///
    /// # Errors
    /// As there; or there is no such library.
    pub fn yardstick(ordinal: u32, precision: Precision, kv: KvFormat) -> Result<Cuda, DeviceError> {
        let mut cuda = Cuda::open(ordinal, precision, kv)?;
        cuda.yardstick = Some(Yardstick {
            library: CublasLt::open(&cuda.context)?,
            fastest: Mutex::default(),
            sums: Mutex::default(),
        });
        Ok(cuda)
    }

    /// Where that library is.
    pub fn yardstick_path(&self) -> Option<String> {
        let yardstick = self.yardstick.as_ref()?;
        Some(yardstick.library.path().display().to_string())
    }

    /// A product by the library, in the way that is fastest here.
    pub(super) fn multiply_by_library(&self, yardstick: &Yardstick, of: Matrices) -> Result<(), DeviceError> {
        let Yardstick { library, fastest, sums } = yardstick;
        let LinearShape {
            format, rows, columns, ..
        } = of.shape;
        let mut sums = sums.lock().unwrap_or_else(PoisonError::into_inner);
        let by_itself = match format {
            // Its sums are scaled, and take up the bias, in a step of their own.
            Format::Int8 => {
                want(&self.context, &mut sums, rows * columns * 4, "sums of products")?;
                Matrices {
                    scales: None,
                    bias: 0,
                    y: sums.as_ref().map_or(0, Memory::address),
                    stride: columns,
                    ..of
                }
            }
            _ => of,
        };
        let run = |algorithm: &Algorithm| {
            library.multiply(&by_itself, algorithm)?;
            let (Format::Int8, Some((row_scales, column_scales))) = (format, of.scales) else {
                return Ok(());
            };
            self.launch(
                &plan::scale_sums(rows, columns),
                &[
                    address(&sums),
                    Argument::Address(row_scales),
                    Argument::Address(column_scales),
                    Argument::Address(of.bias),
                    Argument::Address(of.y),
                    Argument::Int(columns as i32),
                    Argument::Int(of.stride as i32),
                ],
            )
        };
        let mut fastest = fastest.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (of.shape, of.bias != 0);
        let way = match fastest.get(&key) {
            Some(way) => *way,
            None => {
                let way = match library.algorithms(&by_itself)?.as_slice() {
                    [one] => Some(*one),
                    several => self.fastest_of(several, run)?,
                };
                fastest.insert(key, way);
                way
            }
        };
        match way {
            Some(algorithm) => run(&algorithm),
            None => Err(DeviceError::Unsupported(
                "cuBLASLt does not compute this product".into(),
            )),
        }
    }

    /// The way that takes least time; one that fails is none.
    fn fastest_of(
        &self,
        ways: &[Algorithm],
        run: impl Fn(&Algorithm) -> Result<(), DeviceError>,
    ) -> Result<Option<Algorithm>, DeviceError> {
        let mut best: Option<(f64, Algorithm)> = None;
        for algorithm in ways {
            let seconds = match self.seconds_uncached(|| run(algorithm)) {
                Err(DeviceError::Unsupported(_)) => continue,
                other => other?.unwrap_or(f64::INFINITY),
            };
            if best.is_none_or(|(least, _)| seconds < least) {
                best = Some((seconds, *algorithm));
            }
        }
        Ok(best.map(|(_, algorithm)| algorithm))
    }
}
