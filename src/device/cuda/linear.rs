//! Linear operations: by `mma.sync`, on Hopper by warpgroup products, or by cuBLASLt where it is
//! faster. Also the logits.
//!
//! See docs/decisions/081-embedding-and-head-stay-bf16.md.

use std::sync::Arc;

use super::cublaslt::Matrices;
use super::driver::{Argument, Context, MapShape, Memory};
use super::memory::{Buffer, Logits, Workspace, address, pinned, want};
use super::plan::{self, KernelFormat, LinearShape, Tile};
use super::tuning::GemmChoice;
use super::{Cuda, Matrix, Vector};
use crate::device::{DeviceError, Head, Linear};

/// A matrix product to compute.
#[derive(Clone, Copy)]
pub(super) struct LinearCall<'a> {
    x: &'a Buffer,
    rows: usize,
    weight: &'a Matrix,
    columns: usize,
    bias: Option<&'a Vector>,
    y: u64,
    stride: usize,
    wide: bool,
    deterministic: bool,
}

impl Cuda {
    /// `x` in `format`: `x` itself, or its copy quantized into `quantized`.
    fn in_format<'a>(
        &self,
        x: &'a Buffer,
        format: KernelFormat,
        quantized: &'a mut Buffer,
    ) -> Result<&'a Buffer, DeviceError> {
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

    /// `y = x W^T + b` over the first `rows` rows of `x` and the first `columns` rows of W. Rows of
    /// `y` are `stride` values apart.
    #[expect(clippy::too_many_lines, reason = "closures share its arguments")]
    fn multiply(&self, product: &LinearCall<'_>) -> Result<(), DeviceError> {
        let LinearCall { x, weight, .. } = *product;
        let shape = LinearShape {
            format: weight.format,
            rows: product.rows,
            columns: product.columns,
            bytes: weight.columns * weight.format.bytes(),
            wide: product.wide,
        };
        let data = x.data.as_ref().map_or(0, Memory::address);
        let bias = product.bias.map_or(0, |bias| bias.0.address());
        if shape.rows == 0 {
            return Ok(());
        }
        let scales = (x.scales.as_ref()).zip(weight.scales.as_ref());
        let matrices = Matrices {
            shape,
            x: data,
            weight: weight.data.address(),
            scales: scales.map(|(rows, columns)| (rows.address(), columns.address())),
            bias,
            y: product.y,
            stride: product.stride,
        };
        let library = self.by_library.as_ref();
        if let Some(library) = library.filter(|library| library.all) {
            return self.multiply_by_library(library, &matrices);
        }
        let card = self.context.card();
        let rest = [
            x.scales(),
            address(&weight.scales),
            Argument::Address(bias),
            Argument::Address(product.y),
            Argument::Int(shape.rows as i32),
            Argument::Int(shape.columns as i32),
            Argument::Int(shape.bytes as i32),
            Argument::Int(product.stride as i32),
        ];
        let map = |address, rows, box_rows| {
            let of = MapShape {
                address,
                rows,
                columns: weight.columns,
                element_bytes: weight.format.bytes(),
                box_rows,
            };
            Ok::<_, DeviceError>(Argument::Map(self.context.tensor_map(&of)?))
        };
        let by_kernel = |tile: Tile| {
            let (launch, operands) = if card.is_hopper() {
                (
                    plan::linear_sm90(&shape, tile, card.multiprocessors),
                    [
                        map(data, shape.rows, tile.rows())?,
                        map(weight.data.address(), weight.rows, tile.columns)?,
                    ],
                )
            } else {
                (
                    plan::linear(&shape),
                    [data, weight.data.address()].map(Argument::Address),
                )
            };
            self.launch(&launch, &[operands.as_slice(), &rest].concat())
        };
        if let Some(tile) = self.tile {
            return by_kernel(tile);
        }
        // Errors of the library are only logged: the kernel can compute every product.
        let offered = || {
            let ways = library.map_or(Ok(vec![]), |library| self.ways(library, &matrices));
            ways.unwrap_or_else(|why| {
                tracing::debug!("{why}");
                vec![]
            })
        };
        let measure = |way| match (way, library) {
            (GemmChoice::Library(algorithm), Some(library)) => {
                match self.seconds_uncached(|| self.multiply_in(library, &matrices, &algorithm)) {
                    Err(DeviceError::Unsupported(_)) => Ok(Some(f64::INFINITY)),
                    Err(DeviceError::OutOfMemory(_)) => Ok(None),
                    other => other,
                }
            }
            (GemmChoice::Library(_), None) => Ok(Some(f64::INFINITY)),
            (GemmChoice::Tile(tile), _) => self.seconds_uncached(|| by_kernel(tile)),
        };
        let best = self.tuning.best(&shape, bias != 0, offered, measure)?;
        if let (Some(library), Some(algorithm), false) = (library, &best.library, product.deterministic) {
            match self.multiply_in(library, &matrices, algorithm) {
                // The algorithm was measured with other rows, or more memory was free then.
                Err(why @ (DeviceError::Unsupported(_) | DeviceError::OutOfMemory(_))) => {
                    tracing::debug!("{why}");
                    self.tuning.without_library(&shape, bias != 0);
                }
                other => return other,
            }
        }
        by_kernel(best.tile)
    }

    pub(super) fn linear_into(
        &self,
        linear: &Linear<Matrix, Vector>,
        x: &Buffer,
        out: &mut Buffer,
        (quantized, deterministic): (&mut Buffer, bool),
    ) -> Result<(), DeviceError> {
        let weight = &linear.weight;
        let x = self.in_format(x, weight.format, quantized)?;
        out.reshape(&self.context, x.rows, weight.rows, KernelFormat::Bf16)?;
        self.multiply(&LinearCall {
            x,
            rows: x.rows,
            weight,
            columns: weight.rows,
            bias: linear.bias.as_ref(),
            y: out.data.as_ref().map_or(0, Memory::address),
            stride: weight.rows,
            wide: false,
            deterministic,
        })
    }

    /// Computes the logits of all rows of `x`.
    pub(super) fn logits_into(
        &self,
        head: &Head<'_, Matrix>,
        x: &Buffer,
        workspace: &mut Workspace,
    ) -> Result<(), DeviceError> {
        let Workspace {
            logits, deterministic, ..
        } = workspace;
        let ids = head.ids;
        let stride = ids.next_multiple_of(16);
        (logits.rows, logits.ids, logits.stride) = (x.rows, ids, stride);
        want(&self.context, &mut logits.memory, x.rows * stride * 4, "logits")?;
        self.multiply(&LinearCall {
            x,
            rows: x.rows,
            weight: head.weight,
            columns: ids,
            bias: None,
            y: logits.memory.as_ref().map_or(0, Memory::address),
            stride,
            wide: true,
            deterministic: *deterministic,
        })?;
        let Some(cap) = head.soft_cap else {
            return Ok(());
        };
        self.launch(
            &plan::soft_cap(x.rows, ids),
            &[
                address(&logits.memory),
                Argument::Float(cap),
                Argument::Int(ids as i32),
                Argument::Int(stride as i32),
            ],
        )
    }
}

impl Logits {
    /// The logits on the host, without the padding of rows.
    pub(super) fn read(&mut self, on: &Arc<Context>) -> Result<&[f32], DeviceError> {
        let Logits { rows, ids, stride, .. } = *self;
        let bytes = rows * stride * 4;
        let Some(memory) = &self.memory else {
            return Ok(&[]);
        };
        let host = pinned(on, self.host.take(), bytes)?;
        let host = self.host.insert(host);
        on.download(memory, 0, &mut host[..bytes])?;
        let numbers = host.as_floats_mut();
        if stride != ids {
            for row in 1..rows {
                numbers.copy_within(row * stride..row * stride + ids, row * ids);
            }
        }
        Ok(&numbers[..rows * ids])
    }
}
