//! Matmuls by cuBLASLt: those that it computes faster than gristmill's kernels, or all of them,
//! which `gristmill doctor` uses as a reference. cuBLASLt chooses its kernel, and so the summation
//! order, by the number of rows; so deterministic steps use only gristmill's kernels.
//!
//! See docs/decisions/080-cublaslt-serves-and-is-a-yardstick.md.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::Cuda;
use super::cublaslt::{Algorithm, CublasLt, Matrices};
use super::driver::{Argument, Context, Memory};
use super::memory::ensure_capacity;
use super::plan::{self, KernelFormat, LinearShape};
use crate::device::DeviceError;

/// Which implementation computes matmuls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatmulBackend {
    /// gristmill's kernels.
    Kernels,
    /// For each shape the one that is measured to be faster, gristmill's kernel or cuBLASLt; only
    /// kernels if cuBLASLt is not available.
    Fastest,
    /// cuBLASLt.
    Library,
}

/// The INT32 accumulators of an INT8 matmul need rows x columns x 4 bytes. With
/// [`MatmulBackend::Fastest`] this memory is allocated before the weights: at most this size, and
/// at most 1 / `ACCUMULATOR_MEMORY_DIVISOR` of the card's memory. Matmuls that need more use
/// gristmill's kernels.
const ACCUMULATOR_BYTES_MAX: usize = 256 << 20;
const ACCUMULATOR_MEMORY_DIVISOR: u64 = 64;

/// cuBLASLt, with the algorithms and the memory of its matmuls.
pub(super) struct CublasLtMatmul {
    library: CublasLt,
    /// Whether cuBLASLt computes every matmul.
    pub library_only: bool,
    /// With `library_only`: the fastest algorithm for each shape, with or without a bias; `None`:
    /// unsupported.
    fastest: Mutex<HashMap<(LinearShape, bool), Option<Algorithm>>>,
    /// INT32 accumulators of an INT8 matmul, before they are scaled.
    accumulators: Mutex<Option<Memory>>,
}

impl CublasLtMatmul {
    /// `None`: only gristmill's kernels are used.
    ///
    /// # Errors
    /// The library is missing or unusable, and `backend` is [`MatmulBackend::Library`].
    pub(super) fn open(
        context: &Arc<Context>,
        format: KernelFormat,
        backend: MatmulBackend,
    ) -> Result<Option<CublasLtMatmul>, DeviceError> {
        let mut accumulators = None;
        let mut open_and_allocate = || {
            let library = CublasLt::open(context)?;
            if format == KernelFormat::Int8 {
                let share = context.card().memory_bytes / ACCUMULATOR_MEMORY_DIVISOR;
                let bytes = ACCUMULATOR_BYTES_MAX.min(usize::try_from(share).unwrap_or(ACCUMULATOR_BYTES_MAX));
                ensure_capacity(context, &mut accumulators, bytes, "accumulators of INT8 matmuls")?;
            }
            Ok(library)
        };
        let library = match backend {
            MatmulBackend::Kernels => return Ok(None),
            MatmulBackend::Library => CublasLt::open(context)?,
            MatmulBackend::Fastest => match open_and_allocate() {
                Ok(library) => library,
                Err(why) => {
                    match &why {
                        // No warning if the card's memory is full: loading the weights will report
                        // it.
                        DeviceError::Unavailable(_) | DeviceError::OutOfMemory(_) => tracing::debug!("{why}"),
                        _ => tracing::warn!("cuBLASLt is not used, gristmill's own kernels compute all matmuls: {why}"),
                    }
                    return Ok(None);
                }
            },
        };
        Ok(Some(CublasLtMatmul {
            library,
            library_only: backend == MatmulBackend::Library,
            fastest: Mutex::default(),
            accumulators: Mutex::new(accumulators),
        }))
    }

    pub(super) fn version(&self) -> usize {
        self.library.version()
    }
}

impl Cuda {
    /// Path of cuBLASLt, if it is in use.
    pub fn library_path(&self) -> Option<String> {
        let cublaslt = self.cublaslt.as_ref()?;
        Some(cublaslt.library.path().display().to_string())
    }

    /// cuBLASLt's algorithms for a matmul, the most promising first.
    pub(super) fn algorithms(
        &self,
        cublaslt: &CublasLtMatmul,
        matrices: &Matrices,
    ) -> Result<Vec<Algorithm>, DeviceError> {
        cublaslt.library.algorithms(&without_epilogue(matrices, 0))
    }

    /// Computes a matmul with one of these algorithms.
    ///
    /// # Errors
    /// `Unsupported`: the algorithm does not support this number of rows, or the accumulators need
    /// more memory than there is for them.
    pub(super) fn multiply_with(
        &self,
        cublaslt: &CublasLtMatmul,
        matrices: &Matrices,
        algorithm: &Algorithm,
    ) -> Result<(), DeviceError> {
        let LinearShape {
            format, rows, columns, ..
        } = matrices.shape;
        let (KernelFormat::Int8, Some((row_scales, column_scales))) = (format, matrices.scales) else {
            return cublaslt.library.multiply(matrices, algorithm);
        };
        let mut accumulators = cublaslt.accumulators.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = rows * columns * 4;
        if cublaslt.library_only {
            ensure_capacity(&self.context, &mut accumulators, bytes, "accumulators of INT8 matmuls")?;
        }
        let Some(accumulators) = accumulators.as_ref().filter(|memory| memory.bytes() >= bytes) else {
            return Err(DeviceError::Unsupported(
                "its INT32 accumulators need too much memory".into(),
            ));
        };
        let unscaled = without_epilogue(matrices, accumulators.address());
        cublaslt.library.multiply(&unscaled, algorithm)?;
        self.launch(
            &plan::scale_sums(rows, columns),
            &[
                Argument::Address(accumulators.address()),
                Argument::Address(row_scales),
                Argument::Address(column_scales),
                Argument::Address(matrices.bias),
                Argument::Address(matrices.y),
                Argument::Int(columns as i32),
                Argument::Int(matrices.stride as i32),
            ],
        )
    }

    /// For [`MatmulBackend::Library`]: computes a matmul with cuBLASLt's fastest algorithm on this
    /// card.
    pub(super) fn multiply_by_library(
        &self,
        cublaslt: &CublasLtMatmul,
        matrices: &Matrices,
    ) -> Result<(), DeviceError> {
        let mut fastest = cublaslt.fastest.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (matrices.shape, matrices.bias != 0);
        let algorithm = match fastest.get(&key) {
            Some(algorithm) => *algorithm,
            None => {
                let algorithm = match self.algorithms(cublaslt, matrices)?.as_slice() {
                    [one] => Some(*one),
                    several => {
                        self.fastest_of(several, |algorithm| self.multiply_with(cublaslt, matrices, algorithm))?
                    }
                };
                fastest.insert(key, algorithm);
                algorithm
            }
        };
        match algorithm {
            Some(algorithm) => self.multiply_with(cublaslt, matrices, &algorithm),
            None => Err(DeviceError::Unsupported(
                "cuBLASLt does not support a matmul of this shape".into(),
            )),
        }
    }

    /// The fastest algorithm; unsupported ones are skipped.
    fn fastest_of(
        &self,
        algorithms: &[Algorithm],
        run: impl Fn(&Algorithm) -> Result<(), DeviceError>,
    ) -> Result<Option<Algorithm>, DeviceError> {
        let mut best: Option<(f64, Algorithm)> = None;
        for algorithm in algorithms {
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

/// The matmul without its epilogue: for INT8, its output is the accumulators, and a later launch
/// scales them and adds the bias. Unchanged for other formats.
fn without_epilogue(matrices: &Matrices, accumulators: u64) -> Matrices {
    match matrices.shape.format {
        KernelFormat::Int8 => Matrices {
            scales: None,
            bias: 0,
            y: accumulators,
            stride: matrices.shape.columns,
            ..*matrices
        },
        _ => *matrices,
    }
}
