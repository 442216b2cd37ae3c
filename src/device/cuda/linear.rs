//! Linear operations: by `mma.sync`, or on Hopper by products of warpgroups; and the logits.

use super::driver::{Argument, MapShape, Memory};
use super::memory::{Buffer, Workspace, address, want};
use super::plan::{self, Format, LinearShape};
use super::{Cuda, Matrix, Vector};
use crate::device::{DeviceError, Linear};

/// Logits that are computed at once.
const LOGITS_BYTES_MAX: usize = 256 << 20;

/// A product to be computed.
#[derive(Clone, Copy)]
pub(super) struct Product<'a> {
    x: &'a Buffer,
    first: usize,
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

    /// `y = x W^T + b` of rows `first..first + rows` of `x`; `columns` of W, rows of `y` being `stride` numbers apart.
    fn multiply(&self, product: &Product<'_>) -> Result<(), DeviceError> {
        let Product { x, weight, .. } = *product;
        let shape = LinearShape {
            format: weight.format,
            rows: product.rows,
            columns: product.columns,
            bytes: weight.columns * weight.format.bytes(),
            wide: product.wide,
        };
        let from = |memory: &Option<Memory>, row_bytes: usize| {
            memory
                .as_ref()
                .map_or(0, |m| m.address() + (product.first * row_bytes) as u64)
        };
        let (data, scales) = (from(&x.data, shape.bytes), from(&x.scales, 4));
        let rest = [
            Argument::Address(if weight.format.is_scaled() { scales } else { 0 }),
            address(&weight.scales),
            Argument::Address(product.bias.map_or(0, |bias| bias.0.address())),
            Argument::Address(product.y),
            Argument::Int(shape.rows as i32),
            Argument::Int(shape.columns as i32),
            Argument::Int(shape.bytes as i32),
            Argument::Int(product.stride as i32),
        ];
        let card = self.context.card();
        if card.capability != 90 {
            let mut all = vec![Argument::Address(data), Argument::Address(weight.data.address())];
            all.extend(rest);
            return self.launch(&plan::linear(&shape), &all);
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
        if shape.rows == 0 {
            return Ok(());
        }
        let mut all = vec![
            Argument::Map(map(data, shape.rows, plan::consumers(shape.rows) * 64)?),
            Argument::Map(map(weight.data.address(), weight.rows, plan::LINEAR_COLUMNS)?),
        ];
        all.extend(rest);
        self.launch(&plan::linear_sm90(&shape, card.multiprocessors), &all)
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
            first: 0,
            rows: x.rows,
            weight,
            columns: weight.rows,
            bias: linear.bias.as_ref(),
            y: out.data.as_ref().map_or(0, Memory::address),
            stride: weight.rows,
            wide: false,
        })
    }

    /// Logits of all rows of `x` over the first ids of `head`, to the host.
    pub(super) fn bring_logits<'w>(
        &self,
        (head, ids): (&Matrix, usize),
        x: &Buffer,
        workspace: &'w mut Workspace,
    ) -> Result<&'w [f32], DeviceError> {
        let stride = ids.next_multiple_of(16);
        // A step without logits ends here, too.
        if x.rows == 0 {
            self.context.wait()?;
            return Ok(&[]);
        }
        let most = (LOGITS_BYTES_MAX / (stride * 4)).clamp(1, x.rows);
        want(&self.context, &mut workspace.logits, most * stride * 4, "logits")?;
        let bytes = x.rows * stride * 4;
        if workspace.host_logits.as_ref().is_none_or(|host| host.len() < bytes) {
            workspace.host_logits = None;
            workspace.host_logits = Some(self.context.pin(bytes)?);
        }
        let (Some(logits), Some(host)) = (&workspace.logits, &mut workspace.host_logits) else {
            return Ok(&[]);
        };
        for first in (0..x.rows).step_by(most) {
            let rows = most.min(x.rows - first);
            self.multiply(&Product {
                x,
                first,
                rows,
                weight: head,
                columns: ids,
                bias: None,
                y: logits.address(),
                stride,
                wide: true,
            })?;
            let host = &mut host[first * stride * 4..][..rows * stride * 4];
            self.context.download(logits, 0, host)?;
        }
        let rows = host.as_floats_mut();
        // Rows are rarely padded: no published vocabulary of today is.
        if stride != ids {
            for row in 1..x.rows {
                rows.copy_within(row * stride..row * stride + ids, row * ids);
            }
        }
        Ok(&rows[..x.rows * ids])
    }
}
