//! The CPU device. Each operation has its own file. Matrix products run on three kernels in `gemm/`:
//! `tile.rs` (F32, and stored BF16 or F16 widened to F32), `bf16.rs` (BF16 pairs) and `int8.rs`.
//!
//! Activations are F32 in memory. At BF16 precision they hold BF16 values; at INT8 precision,
//! normalised rows are stored in 8 bits. At F32 precision the results of a row are bit-identical
//! for any batch, any number of threads and every instruction set.
//!
//! `unsafe` code is limited to the kernels and their callers, in files that begin with
//! `#![expect(unsafe_code)]`, and to `SharedMut` and `multiversion!`.
//!
//! See docs/decisions/060-f32-does-not-depend-on-the-batch.md.

use std::sync::Arc;

use crate::device::batch::StepBatch;
use crate::device::draw::{Draw, DrawError, Drawn};
use crate::device::{
    Activation, AddNorm, Attention, Device, DeviceError, Head, HeadShape, KvFormat, KvSpec, Linear, Precision,
    RopeSpec, RopeStore, Tensor, TensorError,
};

mod aligned;
mod attention;
mod embed;
mod gated;
mod gemm;
pub mod isa;
mod kv;
mod math;
mod norm;
mod quantize;
mod rope;
pub mod sample;
mod soft_cap;
mod step;
#[cfg(test)]
mod testing;
mod threads;
pub mod vocabulary;

use crate::device::cpu::gemm::matrix::Panels;
pub use crate::device::cpu::gemm::matrix::{Matrix, Vector};
use crate::device::cpu::gemm::{bf16, linear};
pub use isa::Isa;
pub use kv::KvPool;
pub use math::exp;
use quantize::Quantized;
pub use step::Step;
pub use threads::Threads;

/// Positions per KV block. F32 and BF16 attention reduces over one block at a time.
pub const BLOCK_TOKENS: usize = 16;
/// Positions per span, a multiple of [`BLOCK_TOKENS`]. INT8 attention reduces over one span at a
/// time. Sequences share the attention over a common prefix in whole spans.
const SPAN_TOKENS: usize = 64;

/// A CPU with its threads, computing in one precision. (Weights are packed on rayon's global thread
/// pool instead.)
pub struct Cpu {
    isa: Isa,
    precision: Precision,
    kv: KvFormat,
    threads: Arc<Threads>,
}

/// The instruction set and the threads that an operation runs on.
#[derive(Clone, Copy)]
struct ExecContext<'a> {
    isa: Isa,
    threads: &'a Threads,
}

impl Cpu {
    /// A device on `threads` with the fastest instruction set of this processor.
    ///
    /// # Panics
    /// If `precision` or `kv` is FP8, which the CPU device does not support.
    pub fn new(precision: Precision, kv: KvFormat, threads: Arc<Threads>) -> Cpu {
        assert!(
            precision != Precision::Fp8 && kv != KvFormat::Fp8,
            "a CPU does not compute in FP8"
        );
        let isa = Isa::detect();
        Cpu {
            isa,
            precision,
            kv,
            threads,
        }
    }

    /// The same device using `isa`, one of [`Isa::available`].
    ///
    /// # Panics
    /// If this processor does not have `isa`.
    pub fn with_isa(self, isa: Isa) -> Cpu {
        assert!(Isa::available().contains(&isa), "this processor does not have {isa:?}");
        Cpu { isa, ..self }
    }

    fn on(&self) -> ExecContext<'_> {
        ExecContext {
            isa: self.isa,
            threads: &self.threads,
        }
    }

    fn round(&self) -> bool {
        self.precision == Precision::Bf16
    }

    /// Whether linear layers use dot products of BF16 pairs.
    fn multiplies_pairs(&self) -> bool {
        self.precision == Precision::Bf16 && bf16::is_available(self.isa)
    }

    fn norm_op<'a>(&'a self, op: &AddNorm<'a, Buffer, Vector>) -> norm::NormOp<'a> {
        norm::NormOp {
            on: self.on(),
            delta: op.delta.as_ref().map(|delta| delta.rows),
            delta_weight: op.delta.as_ref().and_then(|delta| delta.norm).map(|norm| &norm.0[..]),
            weight: &op.weight.0,
            eps: op.eps,
            round: self.round(),
            quantize: self.precision == Precision::Int8,
        }
    }
}

/// Activations: `[rows][width]`, row-major.
#[derive(Debug, Clone, Default)]
pub struct Buffer {
    /// The rows in F32. Empty if they are quantized.
    data: Vec<f32>,
    rows: usize,
    width: usize,
    /// The rows in INT8, as INT8 linear operations read them.
    quantized: Option<Quantized>,
}

impl Buffer {
    /// Sets the shape and drops quantized rows. The contents are undefined. The allocation is
    /// reused if it is large enough.
    fn reshape(&mut self, rows: usize, width: usize) {
        if self.data.capacity() < rows * width {
            self.data = Vec::with_capacity(rows * width);
            aligned::want_huge_pages(self.data.as_mut_ptr().cast(), rows * width * size_of::<f32>());
        }
        self.data.resize(rows * width, 0.0);
        (self.rows, self.width, self.quantized) = (rows, width, None);
    }

    /// Sets the shape for quantized rows and clears the F32 rows.
    fn reshape_quantized(&mut self, rows: usize, width: usize) -> &mut Quantized {
        self.data.clear();
        (self.rows, self.width) = (rows, width);
        self.quantized.get_or_insert_default()
    }

    /// The rows, `[width]` each. Panics on quantized rows, which have no F32 data.
    pub fn rows(&self) -> impl Iterator<Item = &[f32]> {
        (0..self.rows).map(|i| self.row(i))
    }

    fn row(&self, i: usize) -> &[f32] {
        &self.data[i * self.width..(i + 1) * self.width]
    }

    /// Splits the buffer into about `count` parts of whole rows. Each item is the index of the
    /// part's first row, and the part.
    fn parts_mut(&mut self, count: usize) -> impl Iterator<Item = (usize, &mut [f32])> {
        let rows = self.rows.div_ceil(count).max(1);
        let parts = self.data.chunks_mut((rows * self.width).max(1));
        parts.enumerate().map(move |(i, part)| (i * rows, part))
    }

    fn row_mut(&mut self, i: usize) -> &mut [f32] {
        &mut self.data[i * self.width..(i + 1) * self.width]
    }
}

/// Scratch memory that operations reuse: packed rows, intermediate results, and one attention
/// scratch per thread.
#[derive(Default)]
pub struct Workspace {
    rows: linear::PackedRows,
    /// Rows of `[gate][up]`, for the formats that compute both before the activation (all but
    /// INT8).
    gate_up: Buffer,
    attention: attention::float::Scratches,
    logits: Buffer,
    drawn: Vec<Result<Drawn, DrawError>>,
}

/// A buffer of which concurrent tasks write disjoint parts.
struct SharedMut<'a> {
    start: *mut f32,
    len: usize,
    owner: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: parts are only reached through unsafe methods, whose callers keep them disjoint.
#[expect(unsafe_code, reason = "threads write parts of one buffer")]
unsafe impl Sync for SharedMut<'_> {}

#[expect(unsafe_code, reason = "threads write parts of one buffer")]
impl<'a> SharedMut<'a> {
    fn new(data: &'a mut [f32]) -> SharedMut<'a> {
        SharedMut {
            start: data.as_mut_ptr(),
            len: data.len(),
            owner: std::marker::PhantomData,
        }
    }

    /// Address of element `at`, which must exist (or be one past the last).
    fn at(&self, at: usize) -> *mut f32 {
        assert!(at <= self.len);
        // SAFETY: within the buffer, as asserted.
        unsafe { self.start.add(at) }
    }

    /// `len` elements from `at`.
    ///
    /// # Safety
    /// Nobody else reads or writes these elements while the slice lives.
    #[allow(clippy::mut_from_ref)]
    unsafe fn slice(&self, at: usize, len: usize) -> &mut [f32] {
        assert!(at + len <= self.len);
        // SAFETY: within the buffer, as asserted, and not shared, as the caller vouches.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), len) }
    }
}

impl Device for Cpu {
    type Matrix = Matrix;
    type Vector = Vector;
    type Norm = Vector;
    type Buffer = Buffer;
    type KvPool = KvPool;
    type Step = Step;
    type Workspace = Workspace;

    fn matrix(&self, parts: &[Tensor<'_>]) -> Result<Matrix, TensorError> {
        if self.multiplies_pairs() {
            Matrix::pack_pairs(parts)
        } else {
            Matrix::pack(parts, self.precision)
        }
    }

    fn gated_matrix(&self, parts: &[Tensor<'_>]) -> Result<Matrix, TensorError> {
        if self.precision == Precision::Int8 {
            Matrix::pack_gated(parts)
        } else {
            self.matrix(parts)
        }
    }

    fn table(&self, part: Tensor<'_>) -> Result<Matrix, TensorError> {
        self.matrix(&[part])
    }

    fn vector(&self, parts: &[Tensor<'_>]) -> Result<Vector, TensorError> {
        Vector::pack(parts, self.precision)
    }

    fn norm(&self, part: Tensor<'_>) -> Result<Vector, TensorError> {
        Vector::pack(&[part], Precision::F32)
    }

    fn buffer(&self) -> Buffer {
        Buffer::default()
    }

    fn workspace(&self) -> Workspace {
        Workspace {
            rows: linear::PackedRows::default(),
            gate_up: Buffer::default(),
            logits: Buffer::default(),
            drawn: Vec::new(),
            attention: attention::float::Scratches::new(self.threads.count()),
        }
    }

    fn step(&self, heads: HeadShape, ropes: Vec<RopeSpec>, _: &[KvSpec]) -> Result<Step, DeviceError> {
        Ok(Step::new(heads, ropes, self.round()))
    }

    fn block_tokens(&self) -> u32 {
        BLOCK_TOKENS as u32
    }

    fn kv_pool(&self, heads: HeadShape, blocks: usize) -> Result<KvPool, DeviceError> {
        Ok(KvPool::new(heads, blocks, self.kv))
    }

    fn kv_block_bytes(&self, heads: HeadShape) -> usize {
        KvPool::block_bytes(heads, self.kv)
    }

    fn free_bytes(&self) -> Result<Option<u64>, DeviceError> {
        Ok(None)
    }

    fn wait(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn upload(&self, batch: &StepBatch, step: &mut Step, _: &mut Workspace) -> Result<(), DeviceError> {
        step.upload(batch);
        Ok(())
    }

    fn copy_blocks(&self, step: &Step, pool: &mut KvPool) -> Result<(), DeviceError> {
        pool.copy_blocks(&step.batch.block_copies);
        Ok(())
    }

    fn embed(
        &self,
        table: &Matrix,
        scale: f32,
        step: &Step,
        out: &mut Buffer,
        _: &Workspace,
    ) -> Result<(), DeviceError> {
        embed::embed(table, scale, self.round(), &step.batch.tokens, out);
        Ok(())
    }

    fn add_norm(
        &self,
        op: AddNorm<'_, Buffer, Vector>,
        residual: &mut Buffer,
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        norm::add_norm(&self.norm_op(&op), residual, out);
        Ok(())
    }

    fn add_norm_logits_rows(
        &self,
        op: AddNorm<'_, Buffer, Vector>,
        step: &Step,
        residual: &mut Buffer,
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        norm::add_norm_rows(&self.norm_op(&op), &step.batch.logits_at, residual, out);
        Ok(())
    }

    fn linear(
        &self,
        linear: &Linear<Matrix, Vector>,
        x: &Buffer,
        out: &mut Buffer,
        workspace: &mut Workspace,
    ) -> Result<(), DeviceError> {
        let epilogue = linear::Epilogue {
            bias: linear.bias.as_ref().map(|b| &b.0[..]),
            round: self.round(),
        };
        let weight = &linear.weight;
        linear::linear(self.on(), weight, weight.rows, epilogue, x, out, &mut workspace.rows);
        Ok(())
    }

    fn rope_store(
        &self,
        op: RopeStore<'_, Vector>,
        step: &Step,
        qkv: &mut Buffer,
        pool: &mut KvPool,
    ) -> Result<(), DeviceError> {
        rope::rotate(self.on(), self.round(), &op, step, qkv);
        pool.store(self.on(), step, qkv);
        Ok(())
    }

    fn attention(
        &self,
        op: Attention,
        step: &Step,
        qkv: &Buffer,
        pool: &KvPool,
        out: &mut Buffer,
        workspace: &mut Workspace,
    ) -> Result<(), DeviceError> {
        let op = attention::float::AttentionOp {
            on: self.on(),
            round: self.round(),
            of: op,
            step,
            qkv,
        };
        attention::float::attention(&op, pool, out, &workspace.attention);
        Ok(())
    }

    fn gated_linear(
        &self,
        linear: &Linear<Matrix, Vector>,
        activation: Activation,
        x: &Buffer,
        out: &mut Buffer,
        workspace: &mut Workspace,
    ) -> Result<(), DeviceError> {
        let bias = linear.bias.as_ref().map(|b| &b.0[..]);
        let Workspace { rows, gate_up, .. } = workspace;
        if let Panels::Int8(panels) = &linear.weight.panels {
            let width = linear.weight.rows / 2;
            linear::gated_int8(self.on(), panels, (width, activation), bias, x, out, rows);
        } else {
            let epilogue = linear::Epilogue {
                bias,
                round: self.round(),
            };
            linear::linear(
                self.on(),
                &linear.weight,
                linear.weight.rows,
                epilogue,
                x,
                gate_up,
                rows,
            );
            gated::gated(self.on(), activation, self.round(), gate_up, out);
        }
        Ok(())
    }

    fn logits(&self, head: Head<'_, Matrix>, x: &Buffer, workspace: &mut Workspace) -> Result<(), DeviceError> {
        // Logits stay in F32 even at BF16 precision: rounding would only create ties.
        let epilogue = linear::Epilogue {
            bias: None,
            round: false,
        };
        let Workspace { rows, logits, .. } = workspace;
        linear::linear(self.on(), head.weight, head.ids, epilogue, x, logits, rows);
        if let Some(cap) = head.soft_cap {
            soft_cap::soft_cap(self.on(), cap, logits);
        }
        Ok(())
    }

    fn read_logits<'w>(&self, workspace: &'w mut Workspace) -> Result<&'w [f32], DeviceError> {
        Ok(&workspace.logits.data)
    }

    fn draw(&self, ids: usize, draws: &[Draw<'_>], workspace: &mut Workspace) -> Result<(), DeviceError> {
        let Workspace { logits, drawn, .. } = workspace;
        let ids = ids.min(logits.width);
        let rows = logits.data.chunks_exact(logits.width.max(1));
        let mut work: Vec<_> = rows.zip(draws).map(|(row, draw)| (&row[..ids], draw, None)).collect();
        self.threads.share_mut(logits.data.len(), &mut work, |_, work| {
            let mut scratch = sample::Scratch::default();
            for (row, draw, drawn) in work {
                *drawn = Some(sample::sample(row, **draw, &mut scratch));
            }
        });
        *drawn = work.into_iter().filter_map(|(_, _, drawn)| drawn).collect();
        Ok(())
    }

    fn drawn(&self, workspace: &mut Workspace) -> Result<Vec<Result<Drawn, DrawError>>, DeviceError> {
        Ok(std::mem::take(&mut workspace.drawn))
    }

    fn runs_ahead(&self) -> bool {
        false
    }

    fn measures(&self) -> bool {
        false
    }

    fn write(&self, values: &[f32], width: usize, out: &mut Buffer) -> Result<(), DeviceError> {
        out.reshape(values.len() / width, width);
        out.data.copy_from_slice(values);
        Ok(())
    }

    fn read(&self, buffer: &Buffer) -> Result<Vec<f32>, DeviceError> {
        if buffer.quantized.is_some() {
            return Err(DeviceError::Unsupported("the CPU does not read 8-bit rows back".into()));
        }
        Ok(buffer.data.clone())
    }
}
