//! A device runs fused operations over one flat packed batch.
//!
//! The trait is synchronous: an operation has been issued when its method returns, and its result is there for the
//! next operation on the same [`Step`](Device::Step). Nothing is a singleton: every operation takes its step, its
//! workspace and its buffers, so two micro-batches may be interleaved.

use half::{bf16, f16};

use crate::device::batch::StepBatch;
use crate::device::draw::{Draw, DrawError, Drawn};
use crate::device::random::RandomMatrix;

pub mod batch;
pub mod cpu;
pub mod cuda;
pub mod draw;
pub mod error;
pub mod random;

pub use error::{DeviceError, TensorError};

/// What a device computes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// Activations, keys and values in F32; weights as stored (widening F16 and BF16 to F32 is exact).
    F32,
    /// Weights, activations, keys and values rounded to BF16 where an operation ends; sums in F32.
    Bf16,
    /// Linear weights and the activations that they multiply in 8 bits, scaled by output feature and by token; sums exact.
    /// On a CPU all else is in F32, on a GPU in BF16; keys and values as [`KvFormat`] says.
    Int8,
    /// As [`Int8`](Self::Int8), in E4M3 and with sums in F32; on a GPU alone.
    Fp8,
}

/// What keys and values are kept in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvFormat {
    F32,
    Bf16,
    /// 8 bits, scaled by token and head; attention multiplies queries and weights in 8 bits, too.
    Int8,
    /// As [`Int8`](Self::Int8), in E4M3; on a GPU alone.
    Fp8,
}

impl KvFormat {
    /// As job files and records write it.
    pub fn word(self) -> &'static str {
        match self {
            KvFormat::F32 => "f32",
            KvFormat::Bf16 => "bf16",
            KvFormat::Int8 => "int8",
            KvFormat::Fp8 => "fp8",
        }
    }

    /// Of a number: more are the higher precision.
    pub fn bits(self) -> u32 {
        match self {
            KvFormat::F32 => 32,
            KvFormat::Bf16 => 16,
            KvFormat::Int8 | KvFormat::Fp8 => 8,
        }
    }
}

impl Precision {
    /// As job files and records write it.
    pub fn word(self) -> &'static str {
        match self {
            Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
            Precision::Int8 => "int8",
            Precision::Fp8 => "fp8",
        }
    }

    /// Of the numbers that linear layers multiply: more are the higher precision.
    pub fn bits(self) -> u32 {
        match self {
            Precision::F32 => 32,
            Precision::Bf16 => 16,
            Precision::Int8 | Precision::Fp8 => 8,
        }
    }

    /// What keys and values are kept in where nothing else is asked for.
    pub fn kv_format(self) -> KvFormat {
        match self {
            Precision::F32 => KvFormat::F32,
            Precision::Bf16 => KvFormat::Bf16,
            Precision::Int8 => KvFormat::Int8,
            Precision::Fp8 => KvFormat::Fp8,
        }
    }
}

/// Number format of a stored tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    F32,
    F16,
    Bf16,
}

impl Dtype {
    /// Bytes an element takes.
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }
}

/// A matrix as a checkpoint stores it: `[rows][columns]`, row-major, little-endian, not necessarily aligned.
///
/// A vector is a matrix of one row.
#[derive(Debug, Clone, Copy)]
pub struct Tensor<'a> {
    pub dtype: Dtype,
    pub rows: usize,
    pub columns: usize,
    /// `rows * columns * dtype.bytes()` bytes.
    pub data: &'a [u8],
}

impl Tensor<'_> {
    /// Writes row `row` to `out`, widened, which is exact.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        let bytes = self.columns * self.dtype.bytes();
        let data = &self.data[row * bytes..(row + 1) * bytes];
        match self.dtype {
            Dtype::F32 => {
                for (x, b) in out.iter_mut().zip(data.as_chunks::<4>().0) {
                    *x = f32::from_le_bytes(*b);
                }
            }
            Dtype::F16 => {
                for (x, b) in out.iter_mut().zip(data.as_chunks::<2>().0) {
                    *x = f16::from_le_bytes(*b).to_f32();
                }
            }
            Dtype::Bf16 => {
                for (x, b) in out.iter_mut().zip(data.as_chunks::<2>().0) {
                    *x = bf16::from_le_bytes(*b).to_f32();
                }
            }
        }
    }
}

/// How heads lie in one token's `[q heads][k heads][v heads]` row of the fused projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShape {
    pub heads: usize,
    /// Divides `heads`: `heads / kv_heads` query heads share a key and value head.
    pub kv_heads: usize,
    /// Even.
    pub head_dim: usize,
}

impl HeadShape {
    /// Width of the fused projection's rows.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
}

/// Which keys a layer's queries see, and so which it must keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvSpec {
    /// Every key up to the query's own position.
    Full,
    /// Keys `j` of a query at `i` with `i - j < window`.
    Window(u32),
}

/// Rotary embedding as numbers: pair `d` of a head turns by `position * inverse_frequencies[d]`.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeSpec {
    /// `[head_dim / 2]`, radians per position.
    pub inverse_frequencies: Vec<f32>,
    /// Multiplies sine and cosine (YaRN's attention factor; 1 elsewhere).
    pub scale: f32,
}

/// RMS normalisation of each query and key head before the rotation.
pub struct QkNorm<'a, N> {
    pub q: &'a N,
    pub k: &'a N,
    pub eps: f32,
}

/// What [`Device::rope_store`] needs of a layer besides its buffers.
pub struct RopeStore<'a, N> {
    pub heads: HeadShape,
    pub qk_norm: Option<QkNorm<'a, N>>,
    /// Which of the step's rotations.
    pub rope: usize,
}

/// What [`Device::attention`] needs of a layer besides its buffers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    pub spec: KvSpec,
    /// What a product of query and key is multiplied by.
    pub scale: f32,
    /// What then bounds it, before the softmax: `cap * tanh(x / cap)`.
    pub soft_cap: Option<f32>,
}

impl Attention {
    /// As most models attend: by the square root of a head's size, without a cap.
    pub fn plain(heads: HeadShape, spec: KvSpec) -> Attention {
        Attention {
            spec,
            scale: 1.0 / (heads.head_dim as f32).sqrt(),
            soft_cap: None,
        }
    }
}

/// What a gate goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e^-x)`.
    Silu,
    /// The Gaussian error linear unit by `tanh` (Hendrycks and Gimpel 2016): `x / (1 + e^-2u)`, `u = sqrt(2 / pi) (x + 0.044715 x^3)`.
    GeluTanh,
}

/// Weights of a linear operation: `y = x W^T + b`.
pub struct Linear<M, V> {
    /// `[out features][in features]` in the device's layout.
    pub weight: M,
    /// `[out features]`.
    pub bias: Option<V>,
}

/// The output head.
pub struct Head<'a, M> {
    /// A table.
    pub weight: &'a M,
    /// How many of its first rows there are logits of.
    pub ids: usize,
    /// What bounds logits: `cap * tanh(x / cap)`.
    pub soft_cap: Option<f32>,
}

/// What a residual stream takes up.
pub struct Delta<'a, B, N> {
    pub rows: &'a B,
    /// Of a norm that the rows go through first.
    pub norm: Option<&'a N>,
}

/// A residual stream's normalisation: the stream takes up `delta`, then is normalised.
pub struct AddNorm<'a, B, N> {
    /// Added to the residual stream first; `None` for the first norm.
    pub delta: Option<Delta<'a, B, N>>,
    pub weight: &'a N,
    /// Of both norms.
    pub eps: f32,
}

/// A device: memory of its own and the fused operations a transformer is made of.
///
/// Shapes are `[rows][width]`, one row a token of the step unless said otherwise. Buffers take the shape of what is
/// written to them and keep their memory from step to step.
pub trait Device: Send + Sync {
    /// Linear weights (or an embedding table) in the layout that the device multiplies with.
    type Matrix: Send + Sync;
    /// Biases.
    type Vector: Send + Sync;
    /// A norm's weights, in F32 whatever the precision: some are near 1, and what they differ from it by is what was learned.
    type Norm: Send + Sync;
    /// Activations.
    type Buffer: Send + Sync;
    /// One layer's keys and values, paged.
    type KvPool: Send + Sync;
    /// A [`StepBatch`] in device form, with what its operations share (rotations, the attention plan).
    type Step: Send + Sync;
    /// Scratch memory of operations.
    type Workspace: Send + Sync;

    /// Takes over matrices of equal width, stacked by rows.
    ///
    /// # Errors
    /// A weight that is NaN or infinite, or becomes so in the computing precision; a device that has no room for it.
    fn matrix(&self, parts: &[Tensor<'_>]) -> Result<Self::Matrix, TensorError>;
    /// As [`matrix`](Self::matrix), of a gate's rows and as many of an up projection, for [`gated_linear`](Self::gated_linear).
    fn gated_matrix(&self, parts: &[Tensor<'_>]) -> Result<Self::Matrix, TensorError>;
    /// As [`matrix`](Self::matrix), of rows that [`embed`](Self::embed) and [`logits`](Self::logits) read.
    fn table(&self, part: Tensor<'_>) -> Result<Self::Matrix, TensorError>;
    /// Does it make random weights itself? Else they are taken over from the host as others are.
    fn makes_random(&self) -> bool {
        false
    }
    /// Random matrices of equal width, stacked, made on the device: for linear operations, gated or not, or as a table.
    ///
    /// # Errors
    /// No room for them, or it [makes none](Self::makes_random).
    fn random_matrix(&self, _parts: &[RandomMatrix], _is_table: bool) -> Result<Self::Matrix, DeviceError> {
        Err(DeviceError::Unsupported("this device makes no random weights".into()))
    }
    /// Takes over vectors, one after the other. Errors as in [`matrix`](Self::matrix).
    fn vector(&self, parts: &[Tensor<'_>]) -> Result<Self::Vector, TensorError>;
    /// Takes over a norm's weights. Errors as in [`matrix`](Self::matrix).
    fn norm(&self, part: Tensor<'_>) -> Result<Self::Norm, TensorError>;
    /// An empty buffer.
    fn buffer(&self) -> Self::Buffer;
    /// An empty workspace.
    fn workspace(&self) -> Self::Workspace;
    /// An empty step for a model with these heads, these rotations and layers of these kinds.
    ///
    /// # Errors
    /// Heads that this device does not compute.
    fn step(&self, heads: HeadShape, ropes: Vec<RopeSpec>, specs: &[KvSpec]) -> Result<Self::Step, DeviceError>;
    /// Positions that one KV block holds.
    fn block_tokens(&self) -> u32;
    /// One layer's pool of `blocks` blocks.
    ///
    /// # Errors
    /// No room for it.
    fn kv_pool(&self, heads: HeadShape, blocks: usize) -> Result<Self::KvPool, DeviceError>;
    /// Bytes one block of one layer takes in a pool.
    fn kv_block_bytes(&self, heads: HeadShape) -> usize;

    /// Memory of its own that nobody uses, in bytes; `None`: it computes in the host's.
    ///
    /// # Errors
    /// The device failed.
    fn free_bytes(&self) -> Result<Option<u64>, DeviceError>;
    /// Waits until all that was issued is done.
    ///
    /// # Errors
    /// It failed.
    fn wait(&self) -> Result<(), DeviceError>;

    /// Brings a checked batch to the device, for the operations that are given this step and this workspace.
    ///
    /// # Errors
    /// Here and in all that follow: the device is out of memory or failed. What was computed of the step is then worth nothing.
    fn upload(
        &self,
        batch: &StepBatch,
        step: &mut Self::Step,
        workspace: &mut Self::Workspace,
    ) -> Result<(), DeviceError>;
    /// Copies the step's `block_copies` within a pool. Runs before the step's first [`rope_store`](Self::rope_store).
    fn copy_blocks(&self, step: &Self::Step, pool: &mut Self::KvPool) -> Result<(), DeviceError>;
    /// Rows of `table` for the step's tokens, times `scale`; tokens that are drawn are in the workspace.
    fn embed(
        &self,
        table: &Self::Matrix,
        scale: f32,
        step: &Self::Step,
        out: &mut Self::Buffer,
        workspace: &Self::Workspace,
    ) -> Result<(), DeviceError>;
    /// `residual += delta`, which may be normalised first, then `out = rms_norm(residual) * weight`.
    fn add_norm(
        &self,
        op: AddNorm<'_, Self::Buffer, Self::Norm>,
        residual: &mut Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;
    /// As [`add_norm`](Self::add_norm), but only of the rows in the step's `logits_at`, which become `out`'s rows;
    /// `residual` is left undefined.
    fn add_norm_logits_rows(
        &self,
        op: AddNorm<'_, Self::Buffer, Self::Norm>,
        step: &Self::Step,
        residual: &mut Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;
    /// `out = x W^T + b`.
    fn linear(
        &self,
        linear: &Linear<Self::Matrix, Self::Vector>,
        x: &Self::Buffer,
        out: &mut Self::Buffer,
        workspace: &mut Self::Workspace,
    ) -> Result<(), DeviceError>;
    /// Normalises (where asked for) and rotates the query and key heads of `qkv`, and stores keys and values.
    fn rope_store(
        &self,
        op: RopeStore<'_, Self::Norm>,
        step: &Self::Step,
        qkv: &mut Self::Buffer,
        pool: &mut Self::KvPool,
    ) -> Result<(), DeviceError>;
    /// Attention of the queries in `qkv` over the pool: `out` is `[tokens][heads * head_dim]`.
    fn attention(
        &self,
        op: Attention,
        step: &Self::Step,
        qkv: &Self::Buffer,
        pool: &Self::KvPool,
        out: &mut Self::Buffer,
        workspace: &mut Self::Workspace,
    ) -> Result<(), DeviceError>;
    /// `out = activation(gate) * up`, where `[gate][up]` is what [`linear`](Self::linear) would give.
    fn gated_linear(
        &self,
        linear: &Linear<Self::Matrix, Self::Vector>,
        activation: Activation,
        x: &Self::Buffer,
        out: &mut Self::Buffer,
        workspace: &mut Self::Workspace,
    ) -> Result<(), DeviceError>;
    /// Logits in F32 of each row of `x` over the head's ids; they stay in the workspace, `[rows][ids]`.
    fn logits(
        &self,
        head: Head<'_, Self::Matrix>,
        x: &Self::Buffer,
        workspace: &mut Self::Workspace,
    ) -> Result<(), DeviceError>;
    /// The workspace's logits on the host. All that was issued is done then.
    fn read_logits<'w>(&self, workspace: &'w mut Self::Workspace) -> Result<&'w [f32], DeviceError>;
    /// Draws a token from each row of the workspace's logits, one for each of `draws`, of ids below `ids` alone. Logits are lost.
    fn draw(&self, ids: usize, draws: &[Draw<'_>], workspace: &mut Self::Workspace) -> Result<(), DeviceError>;
    /// What the last [`draw`](Self::draw) drew, once.
    fn drawn(&self, workspace: &mut Self::Workspace) -> Result<Vec<Result<Drawn, DrawError>>, DeviceError>;
    /// Does it compute while the host goes on? Then a step may hold tokens that the one before it draws
    /// ([`StepBatch::drawn`]), and be issued before they are taken.
    fn runs_ahead(&self) -> bool;
    /// Does it measure how products are computed best, once for each power of two of rows? Then all of them are computed once before the
    /// first row is, while there is memory for it.
    fn measures(&self) -> bool;
    /// Makes a buffer of rows from the host, `[values.len() / width][width]`: what tests compute with.
    fn write(&self, values: &[f32], width: usize, out: &mut Self::Buffer) -> Result<(), DeviceError>;
    /// What a buffer holds, `[rows][width]`.
    fn read(&self, buffer: &Self::Buffer) -> Result<Vec<f32>, DeviceError>;
}
