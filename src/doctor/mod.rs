//! Compares a device with the CPU in F32: every operation on seeded random inputs, then whole small
//! models.
//!
//! The checks use the device only through [`Device`], as a model does. Tolerances are set per
//! number format: see [`tolerance`].

mod attention;
mod coded;
mod experts;
mod inputs;
mod layer_inputs;
pub mod models;
mod operations;
mod recurrent;
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
    /// Sizes just below and above those of the kernels' tiles.
    Quick,
    /// The sizes of `Quick` and of published models; runs are timed.
    Full,
}

/// Result of one operation in one shape.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Finding {
    pub operation: &'static str,
    /// Format of the operands, or of keys and values.
    pub format: &'static str,
    pub shape: String,
    /// Root mean square of the differences, relative to that of the correct values.
    pub error: f64,
    /// Largest difference, relative to the same root mean square.
    pub worst: f64,
    pub tolerance: Tolerance,
    /// Seconds of one run, if it was timed.
    pub seconds: Option<f64>,
    /// Bytes that one run must move.
    pub bytes: f64,
    /// Arithmetic operations that one run must compute.
    pub operations: f64,
    /// The first value that is too far off: its row and column, and both values.
    pub mismatch: Option<String>,
    /// The same operation computed by a library, if the library supports it.
    pub by_library: Option<LibraryResult>,
}

/// Result of an operation computed by a library.
#[derive(Debug, Clone, serde::Serialize)]
pub struct LibraryResult {
    /// Seconds of one run, if the operation was timed and the result is right.
    pub seconds: Option<f64>,
    pub error: f64,
    pub right: bool,
}

impl Finding {
    /// Whether the result, and the library's result if any, are within the tolerance.
    pub fn is_right(&self) -> bool {
        let ours = self.mismatch.is_none() && self.error <= self.tolerance.error && self.worst <= self.tolerance.worst;
        ours && self.by_library.as_ref().is_none_or(|theirs| theirs.right)
    }
}

/// A device and the reference that it is compared with.
pub struct Comparison<'a, D: Device> {
    pub device: &'a D,
    /// The same device with a library for linear operations. Jobs use the library where it is
    /// faster.
    pub library: Option<&'a D>,
    pub reference: Cpu,
    pub precision: Precision,
    pub kv_format: KvFormat,
    pub extent: Extent,
}

impl<'a, D: Device> Comparison<'a, D> {
    /// `device` computes in these formats, the reference in F32 on `threads`.
    pub fn new(
        device: &'a D,
        (precision, kv_format): (Precision, KvFormat),
        extent: Extent,
        threads: Arc<Threads>,
    ) -> Comparison<'a, D> {
        Comparison {
            device,
            library: None,
            reference: Cpu::new(Precision::F32, KvFormat::F32, threads),
            precision,
            kv_format,
            extent,
        }
    }

    /// Checks every operation but attention and sampling; `report` receives each finding as it is
    /// made.
    ///
    /// # Errors
    /// The device failed.
    pub fn operations(&self, report: &mut dyn FnMut(Finding)) -> Result<(), DeviceError> {
        operations::check_embed(self, report)?;
        operations::check_norms(self, report)?;
        operations::check_picked_rows(self, report)?;
        layer_inputs::check_layer_inputs(self, report)?;
        operations::check_linears(self, report)?;
        if self.device.keeps_codes() {
            coded::check_linears(self, report)?;
            coded::check_experts(self, report)?;
        }
        experts::check_experts(self, report)?;
        recurrent::check_recurrent(self, report)?;
        operations::check_logits(self, report)
    }

    /// Checks that a matmul on `device` gives the same bits with each of `variants`. `select`
    /// selects a variant on `device`, which is of the same kind as the comparison's; `report` as in
    /// [`operations`](Self::operations).
    ///
    /// # Errors
    /// The device failed.
    pub fn bitwise_equal<W: Display>(
        &self,
        device: &mut D,
        variants: impl IntoIterator<Item = W>,
        select: impl Fn(&mut D, W),
        report: &mut dyn FnMut(Finding),
    ) -> Result<(), DeviceError> {
        operations::check_bitwise_equal(self, device, variants, select, report)
    }

    /// Checks rotation, the storage of keys and values, and attention; `report` as in
    /// [`operations`](Self::operations).
    ///
    /// # Errors
    /// The device failed.
    pub fn attention(&self, report: &mut dyn FnMut(Finding)) -> Result<(), DeviceError> {
        attention::check_all(self, report)?;
        attention::check_deterministic(self, report)
    }

    /// Checks drawing tokens with all kinds of sampling parameters; `report` as in
    /// [`operations`](Self::operations).
    ///
    /// # Errors
    /// The device failed.
    pub fn sampling(&self, report: &mut dyn FnMut(Finding)) -> Result<(), DeviceError> {
        sampling::check_sampling(self, report)
    }

    /// Seconds of one `run`, averaged over consecutive runs on `device`; `None` for
    /// [`Extent::Quick`].
    fn time(&self, device: &D, mut run: impl FnMut() -> Result<(), DeviceError>) -> Result<Option<f64>, DeviceError> {
        if self.extent == Extent::Quick {
            return Ok(None);
        }
        run()?;
        device.wait()?;
        let mut runs = 1;
        loop {
            let began = Instant::now();
            for _ in 0..runs {
                run()?;
            }
            device.wait()?;
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
    let rms = (want.iter().map(|x| square(*x)).sum::<f64>() / want.len().max(1) as f64).sqrt();
    let unit = if rms > 0.0 { rms } else { 1.0 };
    let mut mismatch = None;
    if want.len() != got.len() {
        mismatch = Some(format!("{} values instead of {}", got.len(), want.len()));
    }
    let (mut sum, mut worst) = (0.0, 0.0f64);
    for (i, (want, got)) in want.iter().zip(got).enumerate() {
        let difference = f64::from((want - got).abs());
        sum += difference * difference;
        worst = worst.max(difference / unit);
        // False for NaN.
        let is_near = difference / unit <= tolerance.worst;
        if mismatch.is_none() && !is_near {
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
