//! Matrix products by cuBLASLt: those that it computes faster than gristmill's kernels, or all of
//! them, which `gristmill doctor` uses as a reference. The library chooses a kernel, and thereby
//! the order of sums, by the number of rows, so deterministic steps use gristmill's kernels alone.
//!
//! See docs/decisions/080-cublaslt-serves-and-is-a-yardstick.md.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::Cuda;
use super::cublaslt::{Algorithm, CublasLt, Matrices};
use super::driver::{Argument, Context, Memory};
use super::memory::want;
use super::plan::{self, KernelFormat, LinearShape};
use crate::device::DeviceError;

/// Which implementation computes matrix products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Products {
    /// gristmill's kernels.
    Kernels,
    /// For each shape the one that was measured to be faster, gristmill's kernel or cuBLASLt; the
    /// kernels where there is no such library.
    Fastest,
    /// cuBLASLt.
    Library,
}

/// The INT32 accumulators of INT8 products need memory that grows with rows and columns. With [`Products::Fastest`] this memory
/// is allocated before the weights: at most `SUMS_BYTES`, and at most 1 / `SUMS_PART` of the card's
/// memory. Larger products go to gristmill's kernels.
const SUMS_BYTES: usize = 256 << 20;
const SUMS_PART: u64 = 64;

/// The library, and the algorithms that were found.
pub(super) struct ByLibrary {
    library: CublasLt,
    /// Whether every matrix product goes to cuBLASLt.
    pub all: bool,
    /// With `all`: the fastest algorithm for each shape, with or without a bias; `None`:
    /// unsupported.
    fastest: Mutex<HashMap<(LinearShape, bool), Option<Algorithm>>>,
    /// INT32 accumulators of an INT8 product before they are scaled.
    sums: Mutex<Option<Memory>>,
}

impl ByLibrary {
    /// # Errors
    /// The library is missing or unusable, and `products` is [`Products::Library`].
    pub(super) fn open(
        context: &Arc<Context>,
        format: KernelFormat,
        products: Products,
    ) -> Result<Option<ByLibrary>, DeviceError> {
        let mut sums = None;
        let mut both = || {
            let library = CublasLt::open(context)?;
            if format == KernelFormat::Int8 {
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
                        // If the card's memory is full, loading the weights reports it.
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

    pub(super) fn version(&self) -> usize {
        self.library.version()
    }
}

impl Cuda {
    /// Path of cuBLASLt, if it is in use.
    pub fn library_path(&self) -> Option<String> {
        let by = self.by_library.as_ref()?;
        Some(by.library.path().display().to_string())
    }

    /// The library's algorithms for a product, the most promising first.
    pub(super) fn ways(&self, by: &ByLibrary, of: &Matrices) -> Result<Vec<Algorithm>, DeviceError> {
        by.library.algorithms(&by_itself(of, 0))
    }

    /// Computes a product by one of these algorithms.
    ///
    /// # Errors
    /// `Unsupported`: the algorithm does not support these rows.
    pub(super) fn multiply_in(&self, by: &ByLibrary, of: &Matrices, way: &Algorithm) -> Result<(), DeviceError> {
        let LinearShape {
            format, rows, columns, ..
        } = of.shape;
        let (KernelFormat::Int8, Some((row_scales, column_scales))) = (format, of.scales) else {
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

    /// Computes a product by the library, where it computes all, with the fastest algorithm on this
    /// card.
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

    /// The fastest algorithm; those that are unsupported are skipped.
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

/// The matrices of a product without its epilogue: for INT8, a later launch scales the accumulators
/// and adds the bias.
fn by_itself(of: &Matrices, sums: u64) -> Matrices {
    match of.shape.format {
        KernelFormat::Int8 => Matrices {
            scales: None,
            bias: 0,
            y: sums,
            stride: of.shape.columns,
            ..*of
        },
        _ => *of,
    }
}
