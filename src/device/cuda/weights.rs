//! Loading of weights: the host's threads read, round to BF16 and check one piece while the
//! previous piece is copied to the card, which then quantizes it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};

use half::{bf16, f16};
use rayon::prelude::*;

use super::Cuda;
use super::coded::Codes;
use super::driver::{Argument, Context, Memory, Pinned, StreamEvent};
use super::plan::{self, KernelFormat};
use crate::device::random::RandomMatrix;
use crate::device::{DeviceError, Dtype, Tensor, TensorError};

/// Bytes of each of the two staging buffers.
const STAGING_BYTES: usize = 32 << 20;

/// A matrix on the card.
pub struct Matrix {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) format: KernelFormat,
    /// `[rows][columns]`, or codes of four bits.
    pub(super) data: Memory,
    /// `[rows]`; 8-bit formats only.
    pub(super) scales: Option<Memory>,
    /// Of a matrix in codes of four bits, which multiplies rows in INT8.
    pub(super) codes: Option<Codes>,
}

impl Cuda {
    /// Loads a matrix in `format`. `stage` has the loader bring the stacked parts to the card in
    /// BF16, and calls its second argument with each piece.
    fn load_matrix<E: From<DeviceError>>(
        &self,
        (rows, columns): (usize, usize),
        format: KernelFormat,
        stage: impl FnOnce(&mut Loader, &mut dyn FnMut(StagedPiece<'_>) -> Result<(), DeviceError>) -> Result<(), E>,
    ) -> Result<Matrix, E> {
        check_width(columns)?;
        let data = self.context.allocate(rows * columns * format.bytes(), "weights")?;
        let scales = format
            .is_scaled()
            .then(|| self.context.allocate(rows * 4, "scales of weights"));
        let scales = scales.transpose()?;
        let mut loader = self.loader.lock().unwrap_or_else(PoisonError::into_inner);
        let loader = match &mut *loader {
            Some(loader) => loader,
            none => none.insert(Loader::new(&self.context)?),
        };
        stage(loader, &mut |piece| {
            let offset = (piece.first_row * columns * format.bytes()) as u64;
            match &scales {
                None => self
                    .context
                    .copy(piece.card, &data, offset as usize, piece.rows * columns * 2),
                Some(scales) => self.launch(
                    &plan::quantize(columns, format, piece.rows),
                    &[
                        Argument::Address(piece.card.address()),
                        Argument::Address(data.address() + offset),
                        Argument::Address(scales.address() + piece.first_row as u64 * 4),
                    ],
                ),
            }
        })?;
        Ok(Matrix {
            rows,
            columns,
            format,
            data,
            scales,
            codes: None,
        })
    }

    /// Loads a matrix, or a vector, in F32.
    pub(super) fn load_f32(&self, parts: &[Tensor<'_>], what: &str) -> Result<Memory, TensorError> {
        let mut bytes = Vec::new();
        for (part, tensor) in parts.iter().enumerate() {
            let mut values = vec![0.0f32; tensor.columns];
            for row in 0..tensor.rows {
                tensor.read_row(row, &mut values);
                if !values.iter().all(|x| x.is_finite()) {
                    return Err(TensorError::NotFinite { part, row });
                }
                bytes.extend(values.iter().flat_map(|x| x.to_ne_bytes()));
            }
        }
        Ok(self.context.allocate_copy(&bytes, what)?)
    }

    /// Loads a router's matrix, in F32.
    pub(super) fn load_router(&self, parts: &[Tensor<'_>]) -> Result<Matrix, TensorError> {
        let columns = parts.first().map_or(0, |part| part.columns);
        check_width(columns)?;
        Ok(Matrix {
            rows: parts.iter().map(|part| part.rows).sum(),
            columns,
            format: KernelFormat::F32,
            data: self.load_f32(parts, "a router's weights")?,
            scales: None,
            codes: None,
        })
    }

    pub(super) fn load_tensors(&self, parts: &[Tensor<'_>], format: KernelFormat) -> Result<Matrix, TensorError> {
        let columns = parts.first().map_or(0, |part| part.columns);
        let rows = parts.iter().map(|part| part.rows).sum();
        self.load_matrix((rows, columns), format, |loader, consume| loader.load(parts, consume))
    }

    pub(super) fn load_random(&self, parts: &[RandomMatrix], format: KernelFormat) -> Result<Matrix, DeviceError> {
        let columns = parts.first().map_or(0, |part| part.columns);
        let shape = (parts.iter().map(|part| part.rows).sum(), columns);
        let fill = |to: &Memory, matrix: &RandomMatrix, first: usize, count: usize| {
            self.launch(
                &plan::random_weights(count),
                &[
                    Argument::Address(to.address()),
                    Argument::Long(matrix.seed),
                    Argument::Long(first as u64),
                    Argument::Long(count as u64),
                    Argument::Float(matrix.scale),
                ],
            )
        };
        self.load_matrix(shape, format, |loader, consume| loader.generate(parts, fill, consume))
    }
}

/// Refuses matrices whose rows the kernels do not read.
pub(super) fn check_width(columns: usize) -> Result<(), DeviceError> {
    if !columns.is_multiple_of(16) || columns == 0 || columns > 65536 {
        return Err(DeviceError::Unsupported(format!(
            "a matrix has rows of {columns} numbers; the GPU's kernels take multiples of 16 up to 65,536"
        )));
    }
    Ok(())
}

/// Copies weights to the card through two staging buffers in turn.
pub(super) struct Loader {
    context: Arc<Context>,
    stages: [Stage; 2],
    next_stage: usize,
}

struct Stage {
    host: Pinned,
    /// The same rows in BF16 on the card, from which the card quantizes.
    card: Memory,
    /// After this event the stage may be filled again.
    consumed: Option<StreamEvent>,
}

/// Some rows in BF16, in the card's staging memory.
pub(super) struct StagedPiece<'a> {
    pub card: &'a Memory,
    pub rows: usize,
    /// First row, counted over all stacked matrices.
    pub first_row: usize,
}

impl Loader {
    pub(super) fn new(context: &Arc<Context>) -> Result<Loader, DeviceError> {
        let stage = || {
            Ok::<_, DeviceError>(Stage {
                host: context.allocate_pinned(STAGING_BYTES)?,
                card: context.allocate(STAGING_BYTES, "the staging of weights")?,
                consumed: None,
            })
        };
        Ok(Loader {
            context: Arc::clone(context),
            stages: [stage()?, stage()?],
            next_stage: 0,
        })
    }

    /// Copies matrices of equal width to the card in BF16, piece by piece; `consume` issues the
    /// work on each piece.
    ///
    /// # Errors
    /// A value is not finite in BF16; `consume` failed; a row is wider than a stage.
    pub(super) fn load(
        &mut self,
        parts: &[Tensor<'_>],
        mut consume: impl FnMut(StagedPiece<'_>) -> Result<(), DeviceError>,
    ) -> Result<(), TensorError> {
        for piece in pieces(parts.iter().map(|tensor| (tensor.rows, tensor.columns)))? {
            let tensor = &parts[piece.part];
            let stage = &mut self.stages[self.next_stage];
            self.next_stage = 1 - self.next_stage;
            if let Some(consumed) = stage.consumed.take() {
                consumed.wait()?;
            }
            let bytes = &mut stage.host[..piece.rows * tensor.columns * 2];
            if let Some(row) = to_bf16(tensor, piece.part_row, bytes) {
                return Err(TensorError::NotFinite { part: piece.part, row });
            }
            self.context.upload(bytes, &stage.card, 0)?;
            consume(piece.staged(&stage.card))?;
            stage.consumed = Some(self.context.record_event()?);
        }
        Ok(())
    }

    /// As [`load`](Self::load), with values that `generate` writes on the card. Its arguments are
    /// the destination, the matrix, the index of the first value and the number of values.
    pub(super) fn generate(
        &mut self,
        parts: &[RandomMatrix],
        generate: impl Fn(&Memory, &RandomMatrix, usize, usize) -> Result<(), DeviceError>,
        mut consume: impl FnMut(StagedPiece<'_>) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        // One stage suffices, because the stream runs all work in order.
        let card = &self.stages[0].card;
        for piece in pieces(parts.iter().map(|matrix| (matrix.rows, matrix.columns)))? {
            let matrix = &parts[piece.part];
            generate(
                card,
                matrix,
                piece.part_row * matrix.columns,
                piece.rows * matrix.columns,
            )?;
            consume(piece.staged(card))?;
        }
        Ok(())
    }
}

/// Rows of one of several stacked matrices, at most as many as fit in a stage.
struct PieceRows {
    /// Index of the matrix.
    part: usize,
    /// First row, counted in this matrix.
    part_row: usize,
    rows: usize,
    /// First row, counted over all stacked matrices.
    first_row: usize,
}

impl PieceRows {
    fn staged(self, card: &Memory) -> StagedPiece<'_> {
        StagedPiece {
            card,
            rows: self.rows,
            first_row: self.first_row,
        }
    }
}

/// Cuts matrices of these shapes into pieces, in order.
fn pieces(shapes: impl Iterator<Item = (usize, usize)>) -> Result<Vec<PieceRows>, DeviceError> {
    let (mut pieces, mut preceding_rows) = (Vec::new(), 0);
    for (part, (rows, columns)) in shapes.enumerate() {
        let rows_max = STAGING_BYTES / (columns * 2).max(1);
        if rows_max == 0 {
            return Err(too_wide(columns));
        }
        pieces.extend((0..rows).step_by(rows_max).map(|part_row| PieceRows {
            part,
            part_row,
            rows: rows_max.min(rows - part_row),
            first_row: preceding_rows + part_row,
        }));
        preceding_rows += rows;
    }
    Ok(pieces)
}

fn too_wide(columns: usize) -> DeviceError {
    DeviceError::Unsupported(format!("a matrix has {columns} columns, more than the kernels take"))
}

/// Rounds a tensor's rows from `first_row` on to BF16. Returns the first row that is not finite in
/// BF16.
pub(super) fn to_bf16(tensor: &Tensor<'_>, first_row: usize, out: &mut [u8]) -> Option<usize> {
    let columns = tensor.columns;
    let first_bad_row = AtomicUsize::new(usize::MAX);
    let value_bytes = tensor.dtype.bytes();
    // Tasks of some 64 KiB.
    let task_rows = (32768 / columns.max(1)).max(1);
    out.par_chunks_mut(task_rows * columns * 2)
        .enumerate()
        .for_each(|(task, out)| {
            for (i, out) in out.chunks_exact_mut(columns * 2).enumerate() {
                let row = first_row + task * task_rows + i;
                let data = &tensor.data[row * columns * value_bytes..][..columns * value_bytes];
                let out = out.as_chunks_mut::<2>().0;
                let is_finite = match tensor.dtype {
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
                if !is_finite {
                    first_bad_row.fetch_min(row, Ordering::Relaxed);
                }
            }
        });
    let row = first_bad_row.into_inner();
    (row != usize::MAX).then_some(row)
}

/// Rounds a row to BF16; returns whether all its values are finite.
fn round_row(values: impl Iterator<Item = f32>, out: &mut [[u8; 2]]) -> bool {
    let mut is_finite = true;
    for (out, value) in out.iter_mut().zip(values) {
        let rounded = bf16::from_f32(value);
        is_finite &= rounded.is_finite();
        *out = rounded.to_le_bytes();
    }
    is_finite
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
