//! Linear operations: by `mma.sync`, or on Hopper by products of warpgroups; and the logits.

use std::sync::Arc;

use super::cublaslt::Matrices;
use super::driver::{Argument, Context, MapShape, Memory};
use super::memory::{Buffer, Logits, address, pinned, want};
use super::plan::{self, Format, LinearShape, Tile};
use super::{Cuda, Matrix, Vector};
use crate::device::{DeviceError, Linear};

/// A product to be computed.
#[derive(Clone, Copy)]
pub(super) struct Product<'a> {
    x: &'a Buffer,
    rows: usize,
    weight: &'a Matrix,
    columns: usize,
    bias: Option<&'a Vector>,
    y: u64,
    stride: usize,
    wide: bool,
}

impl Cuda {
    /// `x` in `format`: as it is, or quantized into `quantized`.
    fn in_format<'a>(
        &self,
        x: &'a Buffer,
        format: Format,
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

    /// `y = x W^T + b` of the first `rows` rows of `x`; `columns` of W, rows of `y` being `stride` numbers apart.
    fn multiply(&self, product: &Product<'_>) -> Result<(), DeviceError> {
        let Product { x, weight, .. } = *product;
        let shape = LinearShape {
            format: weight.format,
            rows: product.rows,
            columns: product.columns,
            bytes: weight.columns * weight.format.bytes(),
            wide: product.wide,
        };
        let data = x.data.as_ref().map_or(0, Memory::address);
        let bias = product.bias.map_or(0, |bias| bias.0.address());
        if let Some(yardstick) = &self.yardstick {
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
            return self.multiply_by_library(yardstick, matrices);
        }
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
        let card = self.context.card();
        if !card.is_hopper() {
            let mut all = vec![Argument::Address(data), Argument::Address(weight.data.address())];
            all.extend(rest);
            return self.launch(&plan::linear(&shape), &all);
        }
        if shape.rows == 0 {
            return Ok(());
        }
        let map = |address, rows, box_rows| {
            self.context.tensor_map(&MapShape {
                address,
                rows,
                columns: weight.columns,
                element_bytes: weight.format.bytes(),
                box_rows,
            })
        };
        let run = |tile: Tile| {
            let mut all = vec![
                Argument::Map(map(data, shape.rows, tile.rows())?),
                Argument::Map(map(weight.data.address(), weight.rows, tile.columns)?),
            ];
            all.extend(rest);
            self.launch(&plan::linear_sm90(&shape, tile, card.multiprocessors), &all)
        };
        let measure = |tile| self.seconds_uncached(|| run(tile));
        run(self.tuning.tile(&shape, card.multiprocessors, measure)?)
    }

    pub(super) fn linear_into(
        &self,
        linear: &Linear<Matrix, Vector>,
        x: &Buffer,
        out: &mut Buffer,
        quantized: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let weight = &linear.weight;
        let x = self.in_format(x, weight.format, quantized)?;
        out.reshape(&self.context, x.rows, weight.rows, Format::Bf16)?;
        self.multiply(&Product {
            x,
            rows: x.rows,
            weight,
            columns: weight.rows,
            bias: linear.bias.as_ref(),
            y: out.data.as_ref().map_or(0, Memory::address),
            stride: weight.rows,
            wide: false,
        })
    }

    /// Logits of all rows of `x` over the first ids of `head`.
    pub(super) fn logits_into(
        &self,
        (head, ids): (&Matrix, usize),
        x: &Buffer,
        logits: &mut Logits,
    ) -> Result<(), DeviceError> {
        let stride = ids.next_multiple_of(16);
        (logits.rows, logits.ids, logits.stride) = (x.rows, ids, stride);
        want(&self.context, &mut logits.memory, x.rows * stride * 4, "logits")?;
        self.multiply(&Product {
            x,
            rows: x.rows,
            weight: head,
            columns: ids,
            bias: None,
            y: logits.memory.as_ref().map_or(0, Memory::address),
            stride,
            wide: true,
        })
    }
}

impl Logits {
    /// On the host, without what pads rows.
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
