//! Products by NVIDIA's library: those that it computes faster than our kernels do, or all of them, which `gristmill doctor` holds ours
//! against. Which of its kernels it takes follows the number of rows, and with it the order of sums: deterministic steps take none.
//!
//! See docs/decisions/080-cublaslt-serves-and-is-a-yardstick.md.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::Cuda;
use super::cublaslt::{Algorithm, CublasLt, Matrices};
use super::driver::{Argument, Context, Memory};
use super::memory::want;
use super::plan::{self, Format, LinearShape};
use crate::device::DeviceError;

/// Who computes products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Products {
    /// Our kernels.
    Kernels,
    /// For each shape our kernel or cuBLASLt, whichever was measured to be faster; our kernels where there is no such library.
    Fastest,
    /// cuBLASLt.
    Library,
}

/// INT8's sums are memory that grows with rows and columns. Where both compute, the library is given so much of it before weights are
/// loaded, or as large a part of the card's: products with more are ours.
const SUMS_BYTES: usize = 256 << 20;
const SUMS_PART: u64 = 64;

/// The library, and what was found of it.
pub(super) struct ByLibrary {
    library: CublasLt,
    /// Are all products its?
    pub all: bool,
    /// Where they are: the fastest way for each shape, with a bias or without; `None`: it does not compute it.
    fastest: Mutex<HashMap<(LinearShape, bool), Option<Algorithm>>>,
    /// Of INT8, before they are scaled.
    sums: Mutex<Option<Memory>>,
}

impl ByLibrary {
    /// # Errors
    /// There is no such library, or it cannot be used, and all products are to be its.
    pub fn open(context: &Arc<Context>, format: Format, products: Products) -> Result<Option<ByLibrary>, DeviceError> {
        let mut sums = None;
        let mut both = || {
            let library = CublasLt::open(context)?;
            if format == Format::Int8 {
                let part = context.card().memory_bytes / SUMS_PART;
                let bytes = SUMS_BYTES.min(usize::try_from(part).unwrap_or(SUMS_BYTES));
                want(context, &mut sums, bytes, "sums of products")?;
            }
            Ok(library)
        };
        let library = match products {
            Products::Kernels => return Ok(None),
            Products::Library => CublasLt::open(context)?,
            Products::Fastest => match both() {
                Ok(library) => library,
                Err(why) => {
                    match &why {
                        // A card that is full of weights says so itself.
                        DeviceError::Missing(_) | DeviceError::OutOfMemory(_) => tracing::debug!("{why}"),
                        _ => tracing::warn!("products by gristmill's own kernels alone: {why}"),
                    }
                    return Ok(None);
                }
            },
        };
        Ok(Some(ByLibrary {
            library,
            all: products == Products::Library,
            fastest: Mutex::default(),
            sums: Mutex::new(sums),
        }))
    }

    pub fn version(&self) -> usize {
        self.library.version()
    }
}

impl Cuda {
    /// Where the library is that computes products here.
    pub fn library_path(&self) -> Option<String> {
        let by = self.by_library.as_ref()?;
        Some(by.library.path().display().to_string())
    }

    /// Ways in which the library computes a product, the most promising first.
    pub(super) fn ways(&self, by: &ByLibrary, of: &Matrices) -> Result<Vec<Algorithm>, DeviceError> {
        by.library.algorithms(&by_itself(of, 0))
    }

    /// A product in one of these ways.
    ///
    /// # Errors
    /// As `Unsupported`: it does not fit these rows.
    pub(super) fn multiply_in(&self, by: &ByLibrary, of: &Matrices, way: &Algorithm) -> Result<(), DeviceError> {
        let LinearShape {
            format, rows, columns, ..
        } = of.shape;
        let (Format::Int8, Some((row_scales, column_scales))) = (format, of.scales) else {
            return by.library.multiply(of, way);
        };
        let mut sums = by.sums.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = rows * columns * 4;
        if by.all {
            want(&self.context, &mut sums, bytes, "sums of products")?;
        }
        let Some(sums) = sums.as_ref().filter(|sums| sums.bytes() >= bytes) else {
            return Err(DeviceError::Unsupported("its sums are too large".into()));
        };
        by.library.multiply(&by_itself(of, sums.address()), way)?;
        self.launch(
            &plan::scale_sums(rows, columns),
            &[
                Argument::Address(sums.address()),
                Argument::Address(row_scales),
                Argument::Address(column_scales),
                Argument::Address(of.bias),
                Argument::Address(of.y),
                Argument::Int(columns as i32),
                Argument::Int(of.stride as i32),
            ],
        )
    }

    /// A product by the library that computes all, in the way that is fastest here.
    pub(super) fn multiply_by_library(&self, by: &ByLibrary, of: &Matrices) -> Result<(), DeviceError> {
        let mut fastest = by.fastest.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (of.shape, of.bias != 0);
        let way = match fastest.get(&key) {
            Some(way) => *way,
            None => {
                let way = match self.ways(by, of)?.as_slice() {
                    [one] => Some(*one),
                    several => self.fastest_of(several, |way| self.multiply_in(by, of, way))?,
                };
                fastest.insert(key, way);
                way
            }
        };
        match way {
            Some(way) => self.multiply_in(by, of, &way),
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

/// The product as the library computes it: INT8's sums are scaled, and take up the bias, in a step of their own.
fn by_itself(of: &Matrices, sums: u64) -> Matrices {
    match of.shape.format {
        Format::Int8 => Matrices {
            scales: None,
            bias: 0,
            y: sums,
            stride: of.shape.columns,
            ..*of
        },
        _ => *of,
    }
}
