//! Latent attention: what it makes of queries and latents before attention, and of sums of latents after it.
//!
//! See docs/decisions/104-latents-are-key-and-value.md.

use super::driver::Argument;
use super::memory::{Buffer, KvPool};
use super::plan::{self, KernelFormat};
use super::{Cuda, Matrix, Norm, Step, Vector};
use crate::device::{DeviceError, LatentInput, LatentStore, Linear};

/// Numbers of a row that each head has, and where they begin.
struct HeadRows<'a> {
    rows: &'a Buffer,
    /// Numbers from a head's first one to the next head's.
    stride: usize,
}

impl HeadRows<'_> {
    fn data(&self) -> Argument {
        assert_eq!(self.rows.format, KernelFormat::Bf16, "heads in another format");
        self.rows.data()
    }
}

impl Cuda {
    /// Multiplies each head's numbers in `x` by its matrix; the matrices of `heads` heads lie below each other.
    fn multiply_heads(
        &self,
        matrix: &Matrix,
        heads: usize,
        x: &HeadRows<'_>,
        out: &HeadRows<'_>,
    ) -> Result<(), DeviceError> {
        let columns = matrix.rows / heads;
        assert!(matrix.format == KernelFormat::Bf16 && matrix.rows == heads * columns && x.rows.rows == out.rows.rows);
        assert!(x.rows.width == heads * x.stride && out.rows.width == heads * out.stride);
        assert!(matrix.columns <= x.stride && columns <= out.stride);
        // Sixteen bytes are read at once.
        assert!(x.stride.is_multiple_of(8) && matrix.columns.is_multiple_of(8) && columns.is_multiple_of(2));
        self.launch(
            &plan::head_linear(x.rows.rows, heads, columns),
            &[
                x.data(),
                Argument::Address(matrix.data.address()),
                out.data(),
                Argument::Int(x.rows.rows as i32),
                Argument::Int(columns as i32),
                Argument::Int(matrix.columns as i32 * 2),
                Argument::Int(x.rows.width as i32 * 2),
                Argument::Int(x.stride as i32 * 2),
                Argument::Int(out.rows.width as i32),
                Argument::Int(out.stride as i32),
            ],
        )
    }

    /// Implements [`latent_store`](crate::device::Device::latent_store). `qkv` has queries alone.
    pub(super) fn store_latents(
        &self,
        op: &LatentStore<'_, Matrix, Vector, Norm>,
        input: &LatentInput<'_, Buffer>,
        (step, pool): (&Step, &KvPool),
        qkv: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let (heads, shape) = (op.place.heads, op.shape);
        let latents = input.latents;
        let [Linear { weight, .. }] = op.heads else {
            return Err(super::not_supported("heads with matrices by themselves"));
        };
        assert!(heads.head_dim == shape.kept() && heads.value_in_key == Some(shape.rank));
        assert!(op.norm.values() == shape.rank && latents.width == shape.kept() && latents.rows == step.tokens);
        assert_eq!(latents.format, KernelFormat::Bf16, "latents in another format");
        qkv.reshape(&self.context, step.tokens, heads.q_width(), KernelFormat::Bf16)?;
        let queries = HeadRows {
            rows: input.queries,
            stride: shape.query_dim(),
        };
        let absorbed = HeadRows {
            rows: qkv,
            stride: shape.kept(),
        };
        self.multiply_heads(weight, heads.heads, &queries, &absorbed)?;
        let [keys, ..] = pool.arguments(op.place);
        let block = self.layer_shape(heads, pool, true).block.map_or(0, |block| block.bytes);
        self.launch(
            &plan::latent_store(heads.heads, shape, block, step.tokens),
            &[
                queries.data(),
                latents.data(),
                absorbed.data(),
                Argument::Address(step.rotations(op.rope)),
                Argument::Address(step.positions()),
                Argument::Address(step.slots(op.place.table)),
                Argument::Address(op.norm.0.address()),
                Argument::Float(op.eps),
                keys,
            ],
        )
    }

    /// Implements [`latent_values`](crate::device::Device::latent_values).
    pub(super) fn values_of_latents(
        &self,
        heads: &[Linear<Matrix, Vector>],
        latents: &Buffer,
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let [Linear { weight, .. }] = heads else {
            return Err(super::not_supported("heads with matrices by themselves"));
        };
        let (rank, count) = (weight.columns, latents.width / weight.columns);
        out.reshape(&self.context, latents.rows, weight.rows, KernelFormat::Bf16)?;
        let sums = HeadRows {
            rows: latents,
            stride: rank,
        };
        let values = HeadRows {
            rows: out,
            stride: weight.rows / count,
        };
        self.multiply_heads(weight, count, &sums, &values)
    }
}
