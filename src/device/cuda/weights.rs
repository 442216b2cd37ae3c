//! Loading of weights: the host's threads read, round to BF16 and check one piece while the piece
//! before it is copied. The card then quantizes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::{bf16, f16};
use rayon::prelude::*;

use super::driver::{Context, Memory, Pinned, StreamEvent};
use super::plan::KernelFormat;
use crate::device::random::RandomMatrix;
use crate::device::{DeviceError, Dtype, Tensor, TensorError};

/// Bytes per staging buffer; there are two.
const STAGING_BYTES: usize = 32 << 20;

/// A matrix on the card.
pub struct Matrix {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) format: KernelFormat,
    /// `[rows][columns]`.
    pub(super) data: Memory,
    /// `[rows]`; 8-bit formats only.
    pub(super) scales: Option<Memory>,
}

/// Copies rows to the card.
pub(super) struct Loader {
    context: Arc<Context>,
    stages: [Stage; 2],
    turn: usize,
}

struct Stage {
    host: Pinned,
    /// The same rows in BF16 on the card, the source of quantization.
    card: Memory,
    /// Event after which the stage may be filled again.
    free: Option<StreamEvent>,
}

/// Rows in BF16 in the card's staging memory.
pub(super) struct Staged<'a> {
    pub card: &'a Memory,
    pub rows: usize,
    /// First row, counted over the stacked matrix.
    pub first_row: usize,
}

impl Loader {
    pub(super) fn new(context: &Arc<Context>) -> Result<Loader, DeviceError> {
        let stage = || {
            Ok::<_, DeviceError>(Stage {
                host: context.pin(STAGING_BYTES)?,
                card: context.take(STAGING_BYTES, "the staging of weights")?,
                free: None,
            })
        };
        Ok(Loader {
            context: Arc::clone(context),
            stages: [stage()?, stage()?],
            turn: 0,
        })
    }

    /// Copies matrices of equal width to the card in BF16, piece by piece; `take` issues the work
    /// on each piece.
    ///
    /// # Errors
    /// A value that is not finite in BF16; an error of `take`; a row that is wider than a stage.
    pub(super) fn load(
        &mut self,
        parts: &[Tensor<'_>],
        mut take: impl FnMut(Staged<'_>) -> Result<(), DeviceError>,
    ) -> Result<(), TensorError> {
        for piece in pieces(parts.iter().map(|tensor| (tensor.rows, tensor.columns)))? {
            let tensor = &parts[piece.part];
            let stage = &mut self.stages[self.turn % 2];
            self.turn += 1;
            if let Some(free) = stage.free.take() {
                free.wait()?;
            }
            let bytes = &mut stage.host[..piece.rows * tensor.columns * 2];
            if let Some(row) = to_bf16(tensor, piece.from, bytes) {
                return Err(TensorError::NotFinite { part: piece.part, row });
            }
            self.context.upload(bytes, &stage.card, 0)?;
            take(piece.staged(&stage.card))?;
            stage.free = Some(self.context.mark()?);
        }
        Ok(())
    }

    /// As [`load`](Self::load), with values that `make` makes on the card. Its arguments are the
    /// destination, the matrix, the first value and the number of values.
    pub(super) fn make(
        &mut self,
        parts: &[RandomMatrix],
        make: impl Fn(&Memory, &RandomMatrix, usize, usize) -> Result<(), DeviceError>,
        mut take: impl FnMut(Staged<'_>) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        // All work follows the stream's order, so one stage is enough.
        let card = &self.stages[0].card;
        for piece in pieces(parts.iter().map(|matrix| (matrix.rows, matrix.columns)))? {
            let matrix = &parts[piece.part];
            make(card, matrix, piece.from * matrix.columns, piece.rows * matrix.columns)?;
            take(piece.staged(card))?;
        }
        Ok(())
    }
}

/// Rows of one of several matrices, as many as a stage holds.
struct StagedRows {
    part: usize,
    from: usize,
    rows: usize,
    /// First row, counted over all matrices, stacked.
    first_row: usize,
}

impl StagedRows {
    fn staged(self, card: &Memory) -> Staged<'_> {
        Staged {
            card,
            rows: self.rows,
            first_row: self.first_row,
        }
    }
}

/// Cuts matrices of these shapes into pieces, in order.
fn pieces(shapes: impl Iterator<Item = (usize, usize)>) -> Result<Vec<StagedRows>, DeviceError> {
    let (mut pieces, mut before) = (Vec::new(), 0);
    for (part, (rows, columns)) in shapes.enumerate() {
        let most = STAGING_BYTES / (columns * 2).max(1);
        if most == 0 {
            return Err(too_wide(columns));
        }
        pieces.extend((0..rows).step_by(most).map(|from| StagedRows {
            part,
            from,
            rows: most.min(rows - from),
            first_row: before + from,
        }));
        before += rows;
    }
    Ok(pieces)
}

fn too_wide(columns: usize) -> DeviceError {
    DeviceError::Unsupported(format!("a matrix has {columns} columns, more than the kernels take"))
}

/// Rounds a tensor's rows from `first` on to BF16. Returns the first row that is not finite in
/// BF16.
pub(super) fn to_bf16(tensor: &Tensor<'_>, first: usize, out: &mut [u8]) -> Option<usize> {
    let columns = tensor.columns;
    let bad = AtomicUsize::new(usize::MAX);
    let size = tensor.dtype.bytes();
    // Tasks of some 64 KiB.
    let rows = (32768 / columns.max(1)).max(1);
    out.par_chunks_mut(rows * columns * 2)
        .enumerate()
        .for_each(|(task, out)| {
            for (i, out) in out.chunks_exact_mut(columns * 2).enumerate() {
                let row = first + task * rows + i;
                let data = &tensor.data[row * columns * size..][..columns * size];
                let out = out.as_chunks_mut::<2>().0;
                let finite = match tensor.dtype {
                    Dtype::Bf16 => {
                        out.as_flattened_mut().copy_from_slice(data);
                        // All exponent bits set: infinite or NaN.
                        data.as_chunks::<2>()
                            .0
                            .iter()
                            .all(|b| u16::from_le_bytes(*b) & 0x7f80 != 0x7f80)
                    }
                    Dtype::F16 => {
                        let values = data.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32());
                        round_row(values, out)
                    }
                    Dtype::F32 => {
                        let values = data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
                        round_row(values, out)
                    }
                };
                if !finite {
                    bad.fetch_min(row, Ordering::Relaxed);
                }
            }
        });
    let bad = bad.into_inner();
    (bad != usize::MAX).then_some(bad)
}

/// Rounds a row; returns whether all of it is finite.
fn round_row(values: impl Iterator<Item = f32>, out: &mut [[u8; 2]]) -> bool {
    let mut finite = true;
    for (out, value) in out.iter_mut().zip(values) {
        let rounded = bf16::from_f32(value);
        finite &= rounded.is_finite();
        *out = rounded.to_le_bytes();
    }
    finite
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_rounded_and_checked() {
        let mut values: Vec<f32> = (0..40).map(|i| i as f32 * 1.01 - 7.0).collect();
        let bytes = |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|x| x.to_le_bytes()).collect() };
        let data = bytes(&values);
        let tensor = |data| Tensor {
            dtype: Dtype::F32,
            rows: 5,
            columns: 8,
            data,
        };
        let mut out = vec![0u8; 3 * 8 * 2];
        assert_eq!(to_bf16(&tensor(&data), 2, &mut out), None);
        let got: Vec<f32> = out
            .as_chunks::<2>()
            .0
            .iter()
            .map(|b| bf16::from_le_bytes(*b).to_f32())
            .collect();
        let want: Vec<f32> = values[16..].iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
        assert_eq!(got, want);
        values[27] = f32::MAX; // Infinite in BF16.
        assert_eq!(to_bf16(&tensor(&bytes(&values)), 2, &mut out), Some(3));
    }
}
