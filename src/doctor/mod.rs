//! Compares a device with the CPU in F32: every operation on seeded random inputs, then whole small
//! models.
//!
//! The checks use the device through [`Device`] only, as a model does. Tolerances belong to
//! formats; see [`tolerance`].

mod attention;
mod inputs;
pub mod models;
mod operations;
mod sampling;
pub mod tolerance;

use std::fmt::Display;
use std::sync::Arc;
use std::time::Instant;

use crate::device::cpu::{Cpu, Threads};
use crate::device::{Device, DeviceError, KvFormat, Precision};
use tolerance::Tolerance;

/// Extent of the checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// Sizes around the kernels' tiles.
    Quick,
    /// The sizes of `Quick` and those of published models, timed.
    Full,
}

/// Result of one operation in one shape.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Finding {
    pub operation: &'static str,
    /// Format of the operands, or of keys and values.
    pub format: &'static str,
    pub shape: String,
    /// Root mean square of the differences over that of the right values.
    pub error: f64,
    /// Largest difference, relative to the same root mean square.
    pub worst: f64,
    pub tolerance: Tolerance,
    /// Seconds of one run, where it was timed.
    pub seconds: Option<f64>,
    /// Bytes that one run must move, and arithmetic operations that it must compute.
    pub bytes: f64,
    pub operations: f64,
    /// The first value that is too far off: its row and column, and both values.
    pub mismatch: Option<String>,
    /// The same operation by a library, if the library supports it.
    pub by_library: Option<LibraryResult>,
}

/// Result of an operation computed by a library.
#[derive(Debug, Clone, serde::Serialize)]
pub struct LibraryResult {
    /// Seconds of one run, where the operation was timed and the result is right.
    pub seconds: Option<f64>,
    pub error: f64,
    pub right: bool,
}

impl Finding {
    /// Whether the result is within the tolerance, the library's result included.
    pub fn is_right(&self) -> bool {
        let ours = self.mismatch.is_none() && self.error <= self.tolerance.error && self.worst <= self.tolerance.worst;
        ours && self.by_library.as_ref().is_none_or(|theirs| theirs.right)
    }
}

/// A device and the reference that it is compared with.
pub struct Comparison<'a, D: Device> {
    pub device: &'a D,
    /// The same device with a library for linear operations, which jobs use where the library is
    /// faster.
    pub library: Option<&'a D>,
    pub reference: Cpu,
    pub precision: Precision,
    pub kv: KvFormat,
    pub extent: Extent,
}

impl<'a, D: Device> Comparison<'a, D> {
    /// `device` computes in these formats, the reference in F32 on `threads`.
    pub fn new(
        device: &'a D,
        (precision, kv): (Precision, KvFormat),
        extent: Extent,
        threads: Arc<Threads>,
    ) -> Comparison<'a, D> {
        Comparison {
            device,
            library: None,
            reference: Cpu::new(Precision::F32, KvFormat::F32, threads),
            precision,
            kv,
            extent,
        }
    }

    /// Checks every operation but attention and sampling; `report` receives each finding as it is
    /// made.
    ///
    /// # Errors
    /// The device failed.
    pub fn operations(&self, report: &mut dyn FnMut(Finding)) -> Result<(), DeviceError> {
        operations::embed(self, report)?;
        operations::norms(self, report)?;
        operations::linears(self, report)?;
        operations::logits(self, report)
    }

    /// Checks that a product on `device` gives the same bits in each of `ways`. `set` selects a way
    /// on `device`, which is of the same kind as the comparison's; `report` as in
    /// [`operations`](Self::operations).
    ///
    /// # Errors
    /// The device failed.
    pub fn bitwise_equal<W: Display>(
        &self,
        device: &mut D,
        ways: impl IntoIterator<Item = W>,
        set: impl Fn(&mut D, W),
        report: &mut dyn FnMut(Finding),
    ) -> Result<(), DeviceError> {
        operations::bitwise_equal(self, device, ways, set, report)
    }

    /// Checks rotation, the storage of keys and values, and attention; `report` as in
    /// [`operations`](Self::operations).
    ///
    /// # Errors
    /// The device failed.
    pub fn attention(&self, report: &mut dyn FnMut(Finding)) -> Result<(), DeviceError> {
        attention::all(self, report)?;
        attention::deterministic(self, report)
    }

    /// Checks every way of drawing a token; `report` as in [`operations`](Self::operations).
    ///
    /// # Errors
    /// The device failed.
    pub fn sampling(&self, report: &mut dyn FnMut(Finding)) -> Result<(), DeviceError> {
        sampling::sampling(self, report)
    }

    /// Seconds of one `run`, averaged over consecutive runs `on` a device; `None` for
    /// [`Extent::Quick`].
    fn time(&self, on: &D, mut run: impl FnMut() -> Result<(), DeviceError>) -> Result<Option<f64>, DeviceError> {
        if self.extent == Extent::Quick {
            return Ok(None);
        }
        run()?;
        on.wait()?;
        let mut runs = 1;
        loop {
            let began = Instant::now();
            for _ in 0..runs {
                run()?;
            }
            on.wait()?;
            let seconds = began.elapsed().as_secs_f64();
            if seconds > 0.02 || runs >= 4096 {
                return Ok(Some(seconds / f64::from(runs)));
            }
            runs *= 4;
        }
    }
}

pub use models::models;

/// Compares rows, `[rows][width]`.
fn compare(
    (operation, format, shape): (&'static str, &'static str, String),
    tolerance: Tolerance,
    width: usize,
    want: &[f32],
    got: &[f32],
) -> Finding {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let size = (want.iter().map(|x| square(*x)).sum::<f64>() / want.len().max(1) as f64).sqrt();
    let unit = if size > 0.0 { size } else { 1.0 };
    let mut mismatch = None;
    if want.len() != got.len() {
        mismatch = Some(format!("{} values instead of {}", got.len(), want.len()));
    }
    let (mut sum, mut worst) = (0.0, 0.0f64);
    for (i, (want, got)) in want.iter().zip(got).enumerate() {
        let difference = f64::from((want - got).abs());
        sum += difference * difference;
        worst = worst.max(difference / unit);
        // A NaN is never near, since its comparison is false.
        let near = difference / unit <= tolerance.worst;
        if mismatch.is_none() && !near {
            let (row, column) = (i / width.max(1), i % width.max(1));
            mismatch = Some(format!("row {row}, column {column}: {got} instead of {want}"));
        }
    }
    Finding {
        operation,
        format,
        shape,
        error: (sum / want.len().max(1) as f64).sqrt() / unit,
        worst,
        tolerance,
        seconds: None,
        bytes: 0.0,
        operations: 0.0,
        mismatch,
        by_library: None,
    }
}
