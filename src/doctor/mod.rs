//! Holds a device against the CPU in F32: every operation on seeded random inputs, then whole small models.
//!
//! The device is asked through [`Device`] alone, as a model asks it. Tolerances belong to formats; see [`tolerance`].

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

/// How much is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// Sizes around the kernels' tiles.
    Quick,
    /// And those of published models, timed.
    Full,
}

/// What came of one operation in one shape.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Finding {
    pub operation: &'static str,
    /// Of what is multiplied, or of keys and values.
    pub format: &'static str,
    pub shape: String,
    /// Root mean square of the differences over that of the right values.
    pub error: f64,
    /// The largest difference over the same.
    pub worst: f64,
    pub tolerance: Tolerance,
    /// Seconds of one run, where it was timed.
    pub seconds: Option<f64>,
    /// Of one run: bytes that must be moved, and operations that must be computed.
    pub bytes: f64,
    pub operations: f64,
    /// The first coordinate that is too far off, with both values.
    pub mismatch: Option<String>,
    /// The same by a library, where it computes it.
    pub by_library: Option<ByLibrary>,
}

/// What came of an operation by a library.
#[derive(Debug, Clone, serde::Serialize)]
pub struct ByLibrary {
    /// Of one run, where it was timed and is right.
    pub seconds: Option<f64>,
    pub error: f64,
    pub right: bool,
}

impl Finding {
    /// By the library, too, where it computes it.
    pub fn is_right(&self) -> bool {
        let ours = self.mismatch.is_none() && self.error <= self.tolerance.error && self.worst <= self.tolerance.worst;
        ours && self.by_library.as_ref().is_none_or(|theirs| theirs.right)
    }
}

/// A device and what it is held against.
pub struct Pair<'a, D: Device> {
    pub device: &'a D,
    /// The same device with linear operations by a library, which jobs use where it is faster.
    pub library: Option<&'a D>,
    pub reference: Cpu,
    pub precision: Precision,
    pub kv: KvFormat,
    pub extent: Extent,
}

impl<'a, D: Device> Pair<'a, D> {
    /// `device` computes in these formats; the reference on `threads`.
    pub fn new(
        device: &'a D,
        (precision, kv): (Precision, KvFormat),
        extent: Extent,
        threads: Arc<Threads>,
    ) -> Pair<'a, D> {
        Pair {
            device,
            library: None,
            reference: Cpu::new(Precision::F32, KvFormat::F32, threads),
            precision,
            kv,
            extent,
        }
    }

    /// Every operation; `tell` is given each finding as it is made.
    ///
    /// # Errors
    /// The device failed.
    pub fn operations(&self, tell: &mut dyn FnMut(Finding)) -> Result<(), DeviceError> {
        operations::embed(self, tell)?;
        operations::norms(self, tell)?;
        operations::linears(self, tell)?;
        operations::logits(self, tell)
    }

    /// A product on `device`, which is of the same kind, in `ways` that `set` has it compute in and that must not differ by a bit; `tell` as in
    /// [`operations`](Self::operations).
    ///
    /// # Errors
    /// The device failed.
    pub fn alike<W: Display>(
        &self,
        device: &mut D,
        ways: impl IntoIterator<Item = W>,
        set: impl Fn(&mut D, W),
        tell: &mut dyn FnMut(Finding),
    ) -> Result<(), DeviceError> {
        operations::alike(self, device, ways, set, tell)
    }

    /// Rotation, keys and values, and attention; `tell` as in [`operations`](Self::operations).
    ///
    /// # Errors
    /// The device failed.
    pub fn attention(&self, tell: &mut dyn FnMut(Finding)) -> Result<(), DeviceError> {
        attention::all(self, tell)?;
        attention::deterministic(self, tell)
    }

    /// Every way of drawing a token; `tell` as in [`operations`](Self::operations).
    ///
    /// # Errors
    /// The device failed.
    pub fn sampling(&self, tell: &mut dyn FnMut(Finding)) -> Result<(), DeviceError> {
        sampling::sampling(self, tell)
    }

    /// Seconds of one of `run`s in a row `on` a device, where times are asked for.
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
        // Not a number is no number that is near.
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
