//! The CPU device. Each operation has its own file. Matmuls run on three kernels in `gemm/`:
//! `tile.rs` (F32, with weights stored in F32, BF16 or F16), `bf16.rs` (dot products of BF16 pairs)
//! and `int8.rs`.
//!
//! Activations are F32 in memory. At BF16 precision they hold BF16 values; at INT8 precision,
//! normalised rows are stored in 8 bits. At F32 precision the results of a row are bit-identical
//! for any batch, any number of threads and any instruction set.
//!
//! Only `SharedMut`, `multiversion!`, the kernels and their callers contain `unsafe` code. The
//! files of kernels and callers begin with `#![expect(unsafe_code)]`.
//!
//! See docs/decisions/060-f32-does-not-depend-on-the-batch.md.

use std::sync::Arc;

use crate::device::batch::StepBatch;
use crate::device::draw::{Draw, DrawError, DrawnToken};
use crate::device::{
    Activation, AddNorm, Attention, AttentionInput, CodedMatrix, Device, DeviceError, ExpertInput, ExpertWeights,
    HeadShape, KvFormat, KvShape, KvSpec, LatentInput, LatentStore, LayerInputs, Linear, OutputHead, Placeholders,
    Precision, RecurrentShape, RecurrentWeights, RopeSpec, RopeStore, Tensor, TensorError,
};

mod adapters;
mod aligned;
mod attention;
mod embed;
mod experts;
mod gated;
mod gemm;
mod gram;
mod hadamard;
pub mod isa;
mod kv;
mod kv_int4;
mod latent;
mod layer_inputs;
mod math;
mod norm;
mod quantize;
mod quantize_groups;
mod recurrent;
mod reused;
mod rope;
pub mod sample;
mod soft_cap;
mod step;
#[cfg(test)]
pub(crate) mod testing;
mod threads;
pub mod vocabulary;

use crate::device::cpu::gemm::low_rank::Added;
use crate::device::cpu::gemm::matrix::Panels;
pub use crate::device::cpu::gemm::matrix::{Matrix, Vector};
use crate::device::cpu::gemm::{bf16, linear};
pub use adapters::LowRank;
pub use gram::add_gram;
pub use isa::Isa;
pub use kv::KvPool;
pub use math::exp;
use quantize::Quantized;
pub use recurrent::StatePool;
use reused::Reused;
pub use step::Step;
pub use threads::Threads;

/// Positions per KV block. F32 and BF16 attention processes one block at a time.
pub const BLOCK_TOKENS: usize = 16;
/// Positions per span, a multiple of [`BLOCK_TOKENS`]. INT8 attention processes one span at a time.
/// Attention over a common prefix is shared by sequences in whole spans.
const SPAN_TOKENS: usize = 64;

/// Bytes of a block of a pool with these shapes.
pub fn kv_block_bytes(shapes: &[KvShape], format: KvFormat) -> usize {
    KvPool::block_bytes(shapes, format)
}

/// A CPU with its threads, computing in one precision. (Weights are packed on rayon's global thread
/// pool instead.)
pub struct Cpu {
    isa: Isa,
    precision: Precision,
    kv_format: KvFormat,
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
    /// If `precision` or `kv_format` is FP8, which the CPU device does not support.
    pub fn new(precision: Precision, kv_format: KvFormat, threads: Arc<Threads>) -> Cpu {
        assert!(
            precision != Precision::Fp8 && kv_format != KvFormat::Fp8,
            "a CPU does not compute in FP8"
        );
        let isa = Isa::detect();
        Cpu {
            isa,
            precision,
            kv_format,
            threads,
        }
    }

    /// The same device with instruction set `isa`, one of [`Isa::available`].
    ///
    /// # Panics
    /// If this processor does not have `isa`.
    pub fn with_isa(self, isa: Isa) -> Cpu {
        assert!(Isa::available().contains(&isa), "this processor does not have {isa:?}");
        Cpu { isa, ..self }
    }

    fn ctx(&self) -> ExecContext<'_> {
        ExecContext {
            isa: self.isa,
            threads: &self.threads,
        }
    }

    fn rounds_to_bf16(&self) -> bool {
        self.precision == Precision::Bf16
    }

    /// Whether linear layers use the processor's dot products of BF16 pairs.
    fn uses_bf16_pairs(&self) -> bool {
        self.precision == Precision::Bf16 && bf16::is_available(self.isa)
    }

    /// A linear operation, and what adapters add to it.
    fn multiply(
        &self,
        Linear { weight, bias }: &Linear<Matrix, Vector>,
        added: Option<&Added<'_>>,
        x: &Buffer,
        out: &mut Buffer,
        packed_rows: &mut linear::PackedRows,
    ) {
        let epilogue = linear::Epilogue {
            bias: bias.as_ref().map(|b| &b.0[..]),
            added,
            round_to_bf16: self.rounds_to_bf16(),
        };
        linear::linear(self.ctx(), weight, weight.rows, epilogue, x, out, packed_rows);
    }

    /// As [`multiply`](Self::multiply), with an activation.
    fn multiply_gated(
        &self,
        (linear, activation): (&Linear<Matrix, Vector>, Activation),
        added: Option<&Added<'_>>,
        x: &Buffer,
        out: &mut Buffer,
        (gate_up, packed_rows): (&mut Buffer, &mut linear::PackedRows),
    ) {
        if let (true, Panels::Int8(_) | Panels::Int4(_)) = (activation.has_gate(), &linear.weight.panels) {
            let segment = linear::Segment {
                rows: 0..x.rows,
                matrix: &linear.weight,
                bias: linear.bias.as_ref().map(|b| &b.0[..]),
                added,
            };
            let width = linear.weight.rows / 2;
            let rows = linear::Rows { x, picked: None };
            linear::gated_panels(self.ctx(), &[segment], (width, activation), rows, out, packed_rows);
        } else {
            self.multiply(linear, added, x, gate_up, packed_rows);
            gated::gated(self.ctx(), activation, self.rounds_to_bf16(), gate_up, out);
        }
    }

    fn norm_op<'a>(&'a self, op: &AddNorm<'a, Buffer, Vector>) -> norm::NormOp<'a> {
        norm::NormOp {
            ctx: self.ctx(),
            delta: op.delta.as_ref().map(|delta| delta.rows),
            delta_weight: op.delta.as_ref().and_then(|delta| delta.norm).map(|norm| &norm.0[..]),
            delta_scale: op.delta.as_ref().map_or(1.0, |delta| delta.scale),
            weight: &op.weight.0,
            eps: op.eps,
            centered: op.centered,
            round_to_bf16: self.rounds_to_bf16(),
            quantize: self.precision == Precision::Int8 && !op.in_f32,
        }
    }
}

/// Activations: `[rows][width]`, row-major.
#[derive(Debug, Clone, Default)]
pub struct Buffer {
    /// The rows in F32. Empty if they are quantized.
    data: Reused<f32>,
    rows: usize,
    width: usize,
    /// The rows in INT8, as INT8 linear operations read them, where `is_quantized`.
    int8: Quantized,
    is_quantized: bool,
}

impl Buffer {
    /// Sets the shape and drops quantized rows. The contents are undefined. The allocation is
    /// reused if it is large enough.
    fn reshape(&mut self, rows: usize, width: usize) {
        self.data.set_len(rows * width);
        (self.rows, self.width, self.is_quantized) = (rows, width, false);
    }

    /// Sets the shape for quantized rows and clears the F32 rows.
    fn reshape_quantized(&mut self, rows: usize, width: usize) -> &mut Quantized {
        self.data.set_len(0);
        (self.rows, self.width, self.is_quantized) = (rows, width, true);
        &mut self.int8
    }

    /// The rows in INT8, if they are quantized.
    fn quantized(&self) -> Option<&Quantized> {
        self.is_quantized.then_some(&self.int8)
    }

    /// The rows, `[width]` each. Panics on quantized rows, which have no F32 data.
    pub fn rows(&self) -> impl Iterator<Item = &[f32]> {
        (0..self.rows).map(|i| self.row(i))
    }

    fn row(&self, i: usize) -> &[f32] {
        &self.data[i * self.width..(i + 1) * self.width]
    }

    /// Splits the buffer into at most `count` parts of whole rows. Yields the index of each part's
    /// first row, and the part.
    fn parts_mut(&mut self, count: usize) -> impl Iterator<Item = (usize, &mut [f32])> {
        let rows = self.rows.div_ceil(count).max(1);
        let parts = self.data.chunks_mut((rows * self.width).max(1));
        parts.enumerate().map(move |(i, part)| (i * rows, part))
    }

    /// Calls `run` with each row's index and its numbers, on all threads.
    fn each_row(&mut self, ctx: ExecContext<'_>, run: impl Fn(usize, &mut [f32]) + Sync) {
        let (elements, width) = (self.data.len(), self.width.max(1));
        let mut parts: Vec<_> = self.parts_mut(ctx.threads.parts(elements)).collect();
        ctx.threads.parallel_for_each(elements, &mut parts, |_, parts| {
            for (first, part) in parts {
                for (i, row) in part.chunks_exact_mut(width).enumerate() {
                    run(*first + i, row);
                }
            }
        });
    }

    fn row_mut(&mut self, i: usize) -> &mut [f32] {
        &mut self.data[i * self.width..(i + 1) * self.width]
    }
}

/// Scratch memory that operations reuse: packed rows, intermediate results, and one attention
/// scratch per thread.
#[derive(Default)]
pub struct Workspace {
    packed_rows: linear::PackedRows,
    /// Rows of `[gate][up]`, for all formats except INT8 and four bits, whose kernels apply the activation
    /// themselves.
    gate_up: Buffer,
    low: adapters::LowRows,
    experts: experts::Scratch,
    attention: attention::float::Scratches,
    latent: latent::Scratch,
    logits: Buffer,
    drawn: Vec<Result<DrawnToken, DrawError>>,
}

/// A buffer whose disjoint parts are written by concurrent tasks.
struct SharedMut<'a, E = f32> {
    start: *mut E,
    len: usize,
    owner: std::marker::PhantomData<&'a mut [E]>,
}

// SAFETY: parts are only reached through unsafe methods, whose callers keep them disjoint.
#[expect(unsafe_code, reason = "threads write parts of one buffer")]
unsafe impl<E: Send> Sync for SharedMut<'_, E> {}

#[expect(unsafe_code, reason = "threads write parts of one buffer")]
impl<'a, E> SharedMut<'a, E> {
    fn new(data: &'a mut [E]) -> SharedMut<'a, E> {
        SharedMut {
            start: data.as_mut_ptr(),
            len: data.len(),
            owner: std::marker::PhantomData,
        }
    }

    /// Address of element `index`, at most one past the last.
    fn ptr_at(&self, index: usize) -> *mut E {
        assert!(index <= self.len);
        // SAFETY: within the buffer, as asserted.
        unsafe { self.start.add(index) }
    }

    /// `len` elements from element `first` on.
    ///
    /// # Safety
    /// No other code reads or writes these elements while the slice lives.
    #[allow(clippy::mut_from_ref)]
    unsafe fn slice(&self, first: usize, len: usize) -> &mut [E] {
        assert!(first + len <= self.len);
        // SAFETY: within the buffer, as asserted, and not shared, as the caller guarantees.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(first), len) }
    }
}

impl Device for Cpu {
    type Matrix = Matrix;
    type Vector = Vector;
    type LowRank = LowRank;
    type Norm = Vector;
    type Buffer = Buffer;
    type KvPool = KvPool;
    type StatePool = StatePool;
    type Step = Step;
    type Workspace = Workspace;

    fn matrix(&self, parts: &[Tensor<'_>]) -> Result<Matrix, TensorError> {
        if self.uses_bf16_pairs() {
            Matrix::pack_bf16_pairs(parts)
        } else {
            Matrix::pack(parts, self.precision)
        }
    }

    fn gated_matrix(&self, parts: &[Tensor<'_>]) -> Result<Matrix, TensorError> {
        if matches!(self.precision, Precision::Int8 | Precision::W4a8) {
            Matrix::pack_gated(parts)
        } else {
            self.matrix(parts)
        }
    }

    fn keeps_codes(&self) -> bool {
        self.precision == Precision::W4a8
    }

    fn coded_matrix(&self, parts: &[CodedMatrix], is_gated: bool) -> Result<Matrix, TensorError> {
        if is_gated {
            Matrix::pack_gated_codes(parts)
        } else {
            Matrix::pack_codes(parts)
        }
    }

    fn router_matrix(&self, parts: &[Tensor<'_>]) -> Result<Matrix, TensorError> {
        Matrix::pack(parts, Precision::F32)
    }

    fn f32_vector(&self, part: Tensor<'_>) -> Result<Vector, TensorError> {
        Vector::pack(&[part], Precision::F32)
    }

    fn embedding_table(&self, part: Tensor<'_>) -> Result<Matrix, TensorError> {
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
            packed_rows: linear::PackedRows::default(),
            gate_up: Buffer::default(),
            low: adapters::LowRows::default(),
            experts: experts::Scratch::default(),
            logits: Buffer::default(),
            drawn: Vec::new(),
            attention: attention::float::Scratches::new(self.threads.count()),
            latent: latent::Scratch::default(),
        }
    }

    fn step(&self, ropes: Vec<RopeSpec>, tables: &[(KvSpec, HeadShape)]) -> Result<Step, DeviceError> {
        Ok(Step::new(ropes, tables, self.rounds_to_bf16()))
    }

    fn block_tokens(&self) -> u32 {
        BLOCK_TOKENS as u32
    }

    fn kv_pool(&self, shapes: &[KvShape], blocks: usize) -> Result<KvPool, DeviceError> {
        Ok(KvPool::new(shapes, blocks, self.kv_format))
    }

    fn kv_block_bytes(&self, shapes: &[KvShape]) -> usize {
        kv_block_bytes(shapes, self.kv_format)
    }

    fn state_pool(&self, shape: RecurrentShape, slots: usize) -> Result<StatePool, DeviceError> {
        Ok(StatePool::new(shape, slots))
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

    fn copy_states(&self, step: &Step, pool: &mut StatePool) -> Result<(), DeviceError> {
        pool.copy(&step.batch.state_copies);
        Ok(())
    }

    fn embed(
        &self,
        table: &Matrix,
        (scale, placeholders): (f32, Option<&Placeholders>),
        step: &Step,
        out: &mut Buffer,
        _: &Workspace,
    ) -> Result<(), DeviceError> {
        let read = |token: &u32| placeholders.map_or(*token, |placeholders| placeholders.read(*token));
        let tokens: Vec<u32> = step.batch.tokens.iter().map(read).collect();
        embed::embed(table, scale, self.rounds_to_bf16(), &tokens, out);
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

    fn pick_logits_rows(&self, step: &Step, rows: &Buffer, out: &mut Buffer) -> Result<(), DeviceError> {
        let picked = &step.batch.logits_at;
        out.reshape(picked.len(), rows.width);
        for (i, &from) in picked.iter().enumerate() {
            out.row_mut(i).copy_from_slice(rows.row(from as usize));
        }
        Ok(())
    }

    fn linear(
        &self,
        linear: &Linear<Matrix, Vector>,
        x: &Buffer,
        out: &mut Buffer,
        workspace: &mut Workspace,
    ) -> Result<(), DeviceError> {
        self.multiply(linear, None, x, out, &mut workspace.packed_rows);
        Ok(())
    }

    fn rope_store(
        &self,
        op: RopeStore<'_, Vector>,
        step: &Step,
        qkv: &mut Buffer,
        pool: &mut KvPool,
    ) -> Result<(), DeviceError> {
        rope::rotate(self.ctx(), self.rounds_to_bf16(), &op, step, qkv);
        if pool.turns_heads() {
            hadamard::turn_rows(self.ctx(), op.place, qkv);
        }
        if op.stores {
            pool.store(self.ctx(), step, op.place, qkv);
        }
        Ok(())
    }

    fn attention(
        &self,
        op: Attention,
        input: AttentionInput<'_, Buffer, Vector>,
        step: &Step,
        pool: &KvPool,
        out: &mut Buffer,
        workspace: &mut Workspace,
    ) -> Result<(), DeviceError> {
        let op = attention::float::AttentionOp {
            ctx: self.ctx(),
            round_to_bf16: self.rounds_to_bf16(),
            params: op,
            sinks: input.sinks.map(|sinks| &sinks.0[..]),
            step,
            qkv: input.qkv,
        };
        attention::float::attention(&op, pool, out, &workspace.attention);
        Ok(())
    }

    fn latent_store(
        &self,
        op: LatentStore<'_, Matrix, Vector, Vector>,
        input: LatentInput<'_, Buffer>,
        (step, pool): (&Step, &mut KvPool),
        qkv: &mut Buffer,
        workspace: &mut Workspace,
    ) -> Result<(), DeviceError> {
        let (place, scratch) = (op.place, (&mut workspace.latent, &mut workspace.packed_rows));
        latent::rows((self.ctx(), self.rounds_to_bf16()), &op, &input, step, qkv, scratch);
        pool.store(self.ctx(), step, place, qkv);
        Ok(())
    }

    fn latent_values(
        &self,
        heads: &[Linear<Matrix, Vector>],
        latents: &mut Buffer,
        out: &mut Buffer,
        workspace: &mut Workspace,
    ) -> Result<(), DeviceError> {
        let scratch = (&mut workspace.latent, &mut workspace.packed_rows);
        latent::values((self.ctx(), self.rounds_to_bf16()), heads, latents, out, scratch);
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
        let Workspace {
            packed_rows, gate_up, ..
        } = workspace;
        self.multiply_gated((linear, activation), None, x, out, (gate_up, packed_rows));
        Ok(())
    }

    fn keeps_adapters(&self) -> bool {
        true
    }

    fn low_rank(&self, down: Tensor<'_>, up: Tensor<'_>, is_gated: bool) -> Result<LowRank, TensorError> {
        let in_pairs = is_gated && matches!(self.precision, Precision::Int8 | Precision::W4a8);
        self.pack_low_rank(down, up, in_pairs)
    }

    fn adapted_linear(
        &self,
        linear: &Linear<Matrix, Vector>,
        adapters: &[Option<LowRank>],
        (step, x): (&Step, &Buffer),
        out: &mut Buffer,
        workspace: &mut Workspace,
    ) -> Result<(), DeviceError> {
        let Workspace { packed_rows, low, .. } = workspace;
        let op = (self.ctx(), self.rounds_to_bf16());
        let added = adapters::added(op, adapters, (step, x), low);
        self.multiply(linear, added.as_ref(), x, out, packed_rows);
        Ok(())
    }

    fn adapted_gated_linear(
        &self,
        linear: &Linear<Matrix, Vector>,
        adapters: &[Option<LowRank>],
        activation: Activation,
        (step, x): (&Step, &Buffer),
        out: &mut Buffer,
        workspace: &mut Workspace,
    ) -> Result<(), DeviceError> {
        let Workspace {
            packed_rows,
            gate_up,
            low,
            ..
        } = workspace;
        let op = (self.ctx(), self.rounds_to_bf16());
        let added = adapters::added(op, adapters, (step, x), low);
        self.multiply_gated((linear, activation), added.as_ref(), x, out, (gate_up, packed_rows));
        Ok(())
    }

    fn runs_every_model(&self) -> bool {
        true
    }

    fn recurrent(
        &self,
        weights: &RecurrentWeights<Matrix, Vector>,
        input: &Buffer,
        step: &Step,
        pool: &mut StatePool,
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        recurrent::recurrent(self.ctx(), (weights, self.rounds_to_bf16()), input, step, pool, out);
        Ok(())
    }

    fn gate(&self, gate: &Buffer, out: &mut Buffer) -> Result<(), DeviceError> {
        recurrent::gate(self.ctx(), self.rounds_to_bf16(), gate, out);
        Ok(())
    }

    fn add_layer_inputs(&self, op: LayerInputs<'_, Buffer, Vector>, inputs: &mut Buffer) -> Result<(), DeviceError> {
        layer_inputs::add(self.ctx(), self.rounds_to_bf16(), &op, inputs);
        Ok(())
    }

    fn gate_layer_input(
        &self,
        activation: Activation,
        gate: &Buffer,
        input: (&Buffer, usize),
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        layer_inputs::gate(self.ctx(), self.rounds_to_bf16(), activation, gate, input, out);
        Ok(())
    }

    fn experts(
        &self,
        experts: &ExpertWeights<Matrix, Vector>,
        activation: Activation,
        input: ExpertInput<'_, Buffer>,
        out: &mut Buffer,
        workspace: &mut Workspace,
    ) -> Result<(), DeviceError> {
        let op = experts::ExpertsOp {
            ctx: self.ctx(),
            weights: experts,
            activation,
            round_to_bf16: self.rounds_to_bf16(),
        };
        let Workspace {
            packed_rows, experts, ..
        } = workspace;
        experts::experts(&op, &input, out, experts, packed_rows);
        Ok(())
    }

    fn logits(&self, head: OutputHead<'_, Matrix>, x: &Buffer, workspace: &mut Workspace) -> Result<(), DeviceError> {
        // Logits stay in F32 even at BF16 precision: rounding would only create ties.
        let epilogue = linear::Epilogue::default();
        let Workspace {
            packed_rows, logits, ..
        } = workspace;
        linear::linear(
            self.ctx(),
            head.weight,
            head.vocab_size,
            epilogue,
            x,
            logits,
            packed_rows,
        );
        if let Some(cap) = head.soft_cap {
            soft_cap::soft_cap(self.ctx(), cap, logits);
        }
        Ok(())
    }

    fn read_logits<'w>(&self, workspace: &'w mut Workspace) -> Result<&'w [f32], DeviceError> {
        Ok(&workspace.logits.data)
    }

    fn draw(&self, vocab_size: usize, draws: &[Draw<'_>], workspace: &mut Workspace) -> Result<(), DeviceError> {
        let Workspace { logits, drawn, .. } = workspace;
        let vocab_size = vocab_size.min(logits.width);
        let rows = logits.data.chunks_exact(logits.width.max(1));
        let mut work: Vec<_> = rows
            .zip(draws)
            .map(|(row, draw)| (&row[..vocab_size], draw, None))
            .collect();
        self.threads.parallel_for_each(logits.data.len(), &mut work, |_, work| {
            let mut scratch = sample::Scratch::default();
            for (row, draw, drawn) in work {
                *drawn = Some(sample::sample(row, **draw, &mut scratch));
            }
        });
        *drawn = work.into_iter().filter_map(|(_, _, drawn)| drawn).collect();
        Ok(())
    }

    fn take_drawn(&self, workspace: &mut Workspace) -> Result<Vec<Result<DrawnToken, DrawError>>, DeviceError> {
        Ok(std::mem::take(&mut workspace.drawn))
    }

    fn runs_ahead(&self) -> bool {
        false
    }

    fn autotunes_matmuls(&self) -> bool {
        false
    }

    fn write(&self, values: &[f32], width: usize, out: &mut Buffer) -> Result<(), DeviceError> {
        out.reshape(values.len() / width, width);
        out.data.copy_from_slice(values);
        Ok(())
    }

    fn read(&self, buffer: &Buffer) -> Result<Vec<f32>, DeviceError> {
        if buffer.is_quantized {
            return Err(DeviceError::Unsupported(
                "the CPU device cannot copy 8-bit rows to the host".into(),
            ));
        }
        Ok(buffer.data.to_vec())
    }
}
