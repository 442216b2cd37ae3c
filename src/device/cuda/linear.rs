//! Linear layers and logits, by gristmill's matmul kernels (with `mma.sync`; on Hopper, `wgmma`),
//! or by cuBLASLt where it is faster.
//!
//! See docs/decisions/081-embedding-and-head-stay-bf16.md.

use std::sync::Arc;

use super::cublaslt::Matrices;
use super::driver::{Argument, Context, MapShape, Memory};
use super::memory::{Buffer, Logits, Workspace, address, ensure_capacity, reuse_pinned};
use super::plan::{self, KernelFormat, LinearShape, Tile};
use super::tuning::GemmChoice;
use super::{Cuda, Matrix, Vector};
use crate::device::{DeviceError, Linear, OutputHead};

/// Arguments of [`Cuda::multiply`].
#[derive(Clone, Copy)]
pub(super) struct LinearCall<'a> {
    x: &'a Buffer,
    rows: usize,
    weight: &'a Matrix,
    columns: usize,
    bias: Option<&'a Vector>,
    y: u64,
    stride: usize,
    f32_output: bool,
    deterministic: bool,
}

impl Cuda {
    /// `x` as `weight` multiplies it: `x` itself, or a copy that is quantized into `quantized`.
    pub(super) fn rows_for<'a>(
        &self,
        weight: &Matrix,
        x: &'a Buffer,
        quantized: &'a mut Buffer,
    ) -> Result<&'a Buffer, DeviceError> {
        if let Some(codes) = &weight.codes {
            return self.in_groups(x, codes.groups, quantized);
        }
        let format = weight.format;
        if x.format == format {
            return Ok(x);
        }
        quantized.reshape(&self.context, x.rows, x.width, format)?;
        self.launch(
            &plan::quantize(x.width, format, x.rows),
            &[x.data(), quantized.data(), quantized.scales()],
        )?;
        Ok(quantized)
    }

    /// Computes `y = x W^T + b` with the first `rows` rows of `x` and the first `columns` rows of
    /// W. Rows of `y` begin `stride` values apart.
    #[expect(clippy::too_many_lines, reason = "closures share its arguments")]
    fn multiply(&self, call: &LinearCall<'_>) -> Result<(), DeviceError> {
        let LinearCall { x, weight, .. } = *call;
        assert!(weight.codes.is_none() && x.format == weight.format);
        let shape = LinearShape {
            format: weight.format,
            rows: call.rows,
            columns: call.columns,
            row_bytes: weight.columns * weight.format.bytes(),
            f32_output: call.f32_output,
        };
        let x_address = x.data.as_ref().map_or(0, Memory::address);
        let bias = call.bias.map_or(0, |bias| bias.0.address());
        if shape.rows == 0 {
            return Ok(());
        }
        let scales = (x.scales.as_ref()).zip(weight.scales.as_ref());
        let matrices = Matrices {
            shape,
            x: x_address,
            weight: weight.data.address(),
            scales: scales.map(|(rows, columns)| (rows.address(), columns.address())),
            bias,
            y: call.y,
            stride: call.stride,
        };
        let cublaslt = self.cublaslt.as_ref();
        if let Some(cublaslt) = cublaslt.filter(|cublaslt| cublaslt.library_only) {
            return self.multiply_by_library(cublaslt, &matrices);
        }
        let card = self.context.card();
        let other_arguments = [
            x.scales(),
            address(&weight.scales),
            Argument::Address(bias),
            Argument::Address(call.y),
            Argument::Int(shape.rows as i32),
            Argument::Int(shape.columns as i32),
            Argument::Int(shape.row_bytes as i32),
            Argument::Int(call.stride as i32),
        ];
        let tensor_map = |address, rows, box_rows| {
            let map_shape = MapShape {
                address,
                rows,
                columns: weight.columns,
                element_bytes: weight.format.bytes(),
                box_rows,
            };
            Ok::<_, DeviceError>(Argument::Map(self.context.tensor_map(&map_shape)?))
        };
        let by_kernel = |tile: Tile| {
            let (launch, operands) = if card.is_hopper() {
                (
                    plan::linear_sm90(&shape, tile, card.multiprocessors),
                    [
                        tensor_map(x_address, shape.rows, tile.rows())?,
                        tensor_map(weight.data.address(), weight.rows, tile.columns)?,
                    ],
                )
            } else {
                (
                    plan::linear(&shape),
                    [x_address, weight.data.address()].map(Argument::Address),
                )
            };
            self.launch(&launch, &[operands.as_slice(), &other_arguments].concat())
        };
        if let Some(tile) = self.fixed_tile {
            return by_kernel(tile);
        }
        // Errors of the library are only logged: the kernel supports every shape.
        let algorithms = || {
            let found = cublaslt.map_or(Ok(vec![]), |cublaslt| self.algorithms(cublaslt, &matrices));
            found.unwrap_or_else(|why| {
                tracing::debug!("{why}");
                vec![]
            })
        };
        let measure = |choice| match (choice, cublaslt) {
            (GemmChoice::Library(algorithm), Some(cublaslt)) => {
                match self.seconds_uncached(|| self.multiply_with(cublaslt, &matrices, &algorithm)) {
                    Err(DeviceError::Unsupported(_)) => Ok(Some(f64::INFINITY)),
                    Err(DeviceError::OutOfMemory(_)) => Ok(None),
                    other => other,
                }
            }
            (GemmChoice::Library(_), None) => Ok(Some(f64::INFINITY)),
            (GemmChoice::Tile(tile), _) => self.seconds_uncached(|| by_kernel(tile)),
        };
        let best = self.tuning.best(&shape, bias != 0, algorithms, measure)?;
        if let (Some(cublaslt), Some(algorithm), false) = (cublaslt, &best.library, call.deterministic) {
            match self.multiply_with(cublaslt, &matrices, algorithm) {
                // The algorithm was measured with another number of rows, or with more free memory.
                Err(why @ (DeviceError::Unsupported(_) | DeviceError::OutOfMemory(_))) => {
                    tracing::debug!("{why}");
                    self.tuning.exclude_library(&shape, bias != 0);
                }
                other => return other,
            }
        }
        by_kernel(best.tile)
    }

    /// Computes a linear layer over all rows of `x`, which is quantized first if the weights are.
    pub(super) fn linear_into(
        &self,
        linear: &Linear<Matrix, Vector>,
        x: &Buffer,
        out: &mut Buffer,
        (quantized, deterministic): (&mut Buffer, bool),
    ) -> Result<(), DeviceError> {
        let weight = &linear.weight;
        let x = self.rows_for(weight, x, quantized)?;
        if let Some(codes) = &weight.codes {
            return self.multiply_codes((linear, codes), x, out);
        }
        out.reshape(&self.context, x.rows, weight.rows, KernelFormat::Bf16)?;
        self.multiply(&LinearCall {
            x,
            rows: x.rows,
            weight,
            columns: weight.rows,
            bias: linear.bias.as_ref(),
            y: out.data.as_ref().map_or(0, Memory::address),
            stride: weight.rows,
            f32_output: false,
            deterministic,
        })
    }

    /// Computes the logits of all rows of `x`.
    pub(super) fn logits_into(
        &self,
        head: &OutputHead<'_, Matrix>,
        x: &Buffer,
        workspace: &mut Workspace,
    ) -> Result<(), DeviceError> {
        let Workspace {
            logits, deterministic, ..
        } = workspace;
        let vocab_size = head.vocab_size;
        let stride = vocab_size.next_multiple_of(16);
        (logits.rows, logits.vocab_size, logits.stride) = (x.rows, vocab_size, stride);
        ensure_capacity(&self.context, &mut logits.memory, x.rows * stride * 4, "logits")?;
        self.multiply(&LinearCall {
            x,
            rows: x.rows,
            weight: head.weight,
            columns: vocab_size,
            bias: None,
            y: logits.memory.as_ref().map_or(0, Memory::address),
            stride,
            f32_output: true,
            deterministic: *deterministic,
        })?;
        let Some(cap) = head.soft_cap else {
            return Ok(());
        };
        self.launch(
            &plan::soft_cap(x.rows, vocab_size),
            &[
                address(&logits.memory),
                Argument::Float(cap),
                Argument::Int(vocab_size as i32),
                Argument::Int(stride as i32),
            ],
        )
    }
}

impl Logits {
    /// Copies the logits to the host, without the padding of rows.
    pub(super) fn read(&mut self, context: &Arc<Context>) -> Result<&[f32], DeviceError> {
        let Logits {
            rows,
            vocab_size,
            stride,
            ..
        } = *self;
        let bytes = rows * stride * 4;
        let Some(memory) = &self.memory else {
            return Ok(&[]);
        };
        let host = reuse_pinned(context, self.host.take(), bytes)?;
        let host = self.host.insert(host);
        context.download(memory, 0, &mut host[..bytes])?;
        let values = host.as_floats_mut();
        if stride != vocab_size {
            for row in 1..rows {
                values.copy_within(row * stride..row * stride + vocab_size, row * vocab_size);
            }
        }
        Ok(&values[..rows * vocab_size])
    }
}
