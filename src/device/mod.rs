//! A device runs fused operations over one flat packed batch.
//!
//! When a method of the trait returns, its operation has been issued, and later operations on the
//! same [`Step`](Device::Step) see its result. Devices keep no state per step: every operation
//! takes its step, its workspace and its buffers, so two micro-batches may be interleaved.

use crate::device::batch::StepBatch;
use crate::device::draw::{Draw, DrawError, DrawnToken};
use crate::device::random::RandomMatrix;

pub mod batch;
pub mod codes;
pub mod cpu;
pub mod cuda;
pub mod draw;
pub mod error;
mod experts;
pub mod format;
mod kv;
mod latent;
pub mod random;
pub mod recurrent;

pub use codes::CodedMatrix;
pub use error::{DeviceError, TensorError};
use error::{no_adapters, no_codes, no_latents, no_layer_inputs, no_recurrent_layers};
pub use experts::{ExpertGroups, ExpertInput, ExpertWeights, Routing, Score, SharedExpert};
pub use format::{Dtype, KvFormat, Precision, Tensor};
pub use kv::{HeadShape, KvPlace, KvShape, KvSpec};
pub use latent::{LatentInput, LatentShape, LatentStore};
pub use recurrent::{RecurrentKind, RecurrentRow, RecurrentShape, RecurrentWeights};

/// Rotary embedding: at `position`, pair `d` of a head is rotated by `position *
/// inverse_frequencies[d]`.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeSpec {
    /// `[head_dim / 2]`, radians per position. A pair with a frequency of 0 stays as it is.
    pub inverse_frequencies: Vec<f32>,
    /// Multiplies sine and cosine of pairs that rotate (the attention factor of YaRN and LongRoPE; 1
    /// elsewhere).
    pub scale: f32,
}

impl RopeSpec {
    /// Cosines of all pairs at `position`, then sines, in F32.
    pub fn rotation(&self, position: usize) -> impl Iterator<Item = f32> {
        // The angle is rounded to F32, as in the reference. Its sine and cosine are computed in F64,
        // so that they are exact to F32.
        let of_pair = move |function: fn(f64) -> f64, frequency: f32| {
            let scale = if frequency == 0.0 { 1.0 } else { self.scale };
            function(f64::from(frequency * position as f32)) as f32 * scale
        };
        let pairs = move |function| self.inverse_frequencies.iter().map(move |f| of_pair(function, *f));
        pairs(f64::cos as fn(f64) -> f64).chain(pairs(f64::sin))
    }
}

/// RMS normalisation of query and key heads before the rotation: of each head by itself, or, if the
/// weights are those of all heads, of all heads together.
pub struct QkNorm<'a, N> {
    pub q: &'a N,
    /// `None` in a layer that stores no keys.
    pub k: Option<&'a N>,
    pub eps: f32,
}

/// Parameters of [`Device::rope_store`].
pub struct RopeStore<'a, N> {
    pub place: KvPlace,
    pub qk_norm: Option<QkNorm<'a, N>>,
    /// Epsilon of an RMS norm of each value head, without weights. `None`: there is no such norm.
    pub value_norm: Option<f32>,
    /// Index into the step's `ropes`.
    pub rope: usize,
    /// Whether rows have keys and values, which are stored. Otherwise the layer reads those of an
    /// earlier one, and rows have queries alone.
    pub stores: bool,
}

/// Parameters of [`Device::attention`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    pub spec: KvSpec,
    /// Its block table is one of `spec`.
    pub place: KvPlace,
    /// Factor of the dot products of queries and keys.
    pub scale: f32,
    /// Bound of the scaled dot products before the softmax: `cap * tanh(x / cap)`.
    pub soft_cap: Option<f32>,
}

impl Attention {
    /// Attention of most models: scaled by one over the square root of the head dimension, without
    /// a cap.
    pub fn plain(heads: HeadShape, spec: KvSpec) -> Attention {
        Attention {
            spec,
            place: KvPlace::alone(heads),
            scale: 1.0 / (heads.head_dim as f32).sqrt(),
            soft_cap: None,
        }
    }
}

/// What [`Device::attention`] reads besides the pool.
pub struct AttentionInput<'a, B, V> {
    /// `[tokens]` rows of `[q][k][v]`, of `[q]` in a layer that stores no keys and values, or of
    /// `[q][k]` where keys have their values in them.
    pub qkv: &'a B,
    /// A number per query head, which counts in its softmax as the score of a position whose value
    /// is zero (Xiao et al. 2023).
    pub sinks: Option<&'a V>,
}

/// Tokens that stand for images, videos and sounds. The model reads them as another one, in prompts
/// and in its own answers alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placeholders {
    pub ids: [u32; 3],
    pub read_as: u32,
}

impl Placeholders {
    /// The token as the model reads it.
    pub fn read(&self, token: u32) -> u32 {
        if self.ids.contains(&token) { self.read_as } else { token }
    }
}

/// How an MLP combines the values of its gate and of its up projection.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// `up * gate / (1 + e^-gate)`.
    Silu,
    /// Up times the Gaussian error linear unit of the gate by `tanh` (Hendrycks and Gimpel 2016):
    /// `x / (1 + e^-2u)`, `u = sqrt(2 / pi) (x + 0.044715 x^3)`.
    GeluTanh,
    /// `g / (1 + e^-(alpha g)) * (u + 1)`, `g` the gate bounded above and `u` up bounded on both
    /// sides by `limit`.
    ClampedSwiglu { alpha: f32, limit: f32 },
    /// The square of up where it is positive, otherwise 0. There is no gate.
    SquaredRelu,
}

impl Activation {
    /// Whether an MLP has a gate.
    pub fn has_gate(self) -> bool {
        self != Activation::SquaredRelu
    }
}

/// Weights of a linear operation: `y = x W^T + b`.
pub struct Linear<M, V> {
    /// `[out features][in features]` in the device's layout.
    pub weight: M,
    /// `[out features]`.
    pub bias: Option<V>,
}

/// The output head.
pub struct OutputHead<'a, M> {
    /// An embedding table.
    pub weight: &'a M,
    /// Logits are computed for the first `vocab_size` rows of the table.
    pub vocab_size: usize,
    /// Bound of the logits: `cap * tanh(x / cap)`.
    pub soft_cap: Option<f32>,
}

/// Rows to add to a residual stream.
pub struct Delta<'a, B, N> {
    pub rows: &'a B,
    /// Weights of a norm that is applied to the rows before the addition.
    pub norm: Option<&'a N>,
    /// Factor of the sum.
    pub scale: f32,
}

/// Parameters of [`Device::add_norm`]: adds `delta` to a residual stream, then normalises the
/// stream.
pub struct AddNorm<'a, B, N> {
    /// Added to the residual stream first; `None` for the first norm.
    pub delta: Option<Delta<'a, B, N>>,
    pub weight: &'a N,
    /// Epsilon of both norms.
    pub eps: f32,
    /// Whether the norm of the stream subtracts the row's mean first (layer normalisation).
    pub centered: bool,
    /// Whether the normalised rows are not quantized here, since [`Device::experts`] reads them, too.
    pub in_f32: bool,
}

/// Parameters of [`Device::add_layer_inputs`].
pub struct LayerInputs<'a, B, N> {
    /// `[tokens][layers * width]`.
    pub projected: &'a B,
    /// `[width]`: weights of an RMS norm of each layer's part of a row.
    pub norm: &'a N,
    pub eps: f32,
    /// Factor of the sum.
    pub scale: f32,
}

/// A device: its own memory and the fused operations of a transformer.
///
/// Shapes are `[rows][width]`, one row per token of the step unless stated otherwise. Buffers take
/// the shape of the values written to them and keep their memory from step to step.
pub trait Device: Send + Sync {
    /// Linear weights (or an embedding table) in the device's layout.
    type Matrix: Send + Sync;
    /// Biases.
    type Vector: Send + Sync;
    /// What an adapter adds to a linear operation.
    type LowRank: Send + Sync;
    /// A norm's weights, in F32 at every precision: some differ from 1 only slightly, and rounding
    /// would lose the difference.
    type Norm: Send + Sync;
    /// Activations.
    type Buffer: Send + Sync;
    /// Keys and values of one layer per block, paged.
    type KvPool: Send + Sync;
    /// States of one recurrent layer, in slots.
    type StatePool: Send + Sync;
    /// A [`StepBatch`] in device form, with the data that its operations share (rotations,
    /// attention plan).
    type Step: Send + Sync;
    /// Scratch memory of operations.
    type Workspace: Send + Sync;

    /// Uploads matrices of equal width, stacked by rows.
    ///
    /// # Errors
    /// A weight is NaN or infinite, or becomes so in the computing precision; the device is out of
    /// memory.
    fn matrix(&self, parts: &[Tensor<'_>]) -> Result<Self::Matrix, TensorError>;
    /// As [`matrix`](Self::matrix), for [`gated_linear`](Self::gated_linear): the rows of a gate
    /// projection, followed by as many rows of an up projection.
    fn gated_matrix(&self, parts: &[Tensor<'_>]) -> Result<Self::Matrix, TensorError>;
    /// Whether weights that a checkpoint has in four bits stay so: by [`coded_matrix`](Self::coded_matrix).
    fn keeps_codes(&self) -> bool {
        false
    }
    /// As [`matrix`](Self::matrix) or [`gated_matrix`](Self::gated_matrix), of codes in groups of one size.
    fn coded_matrix(&self, _parts: &[CodedMatrix], _is_gated: bool) -> Result<Self::Matrix, TensorError> {
        Err(no_codes().into())
    }
    /// The matrices of [`latent_store`](Self::latent_store) or [`latent_values`](Self::latent_values), one for each head: as many, or
    /// one with all of them below each other.
    fn head_matrices(&self, parts: &[Tensor<'_>]) -> Result<Vec<Self::Matrix>, TensorError> {
        let one = |part: &Tensor<'_>| self.matrix(std::slice::from_ref(part));
        parts.iter().map(one).collect()
    }
    /// As [`matrix`](Self::matrix), for the router of [`experts`](Self::experts): in F32, whatever
    /// the precision.
    fn router_matrix(&self, parts: &[Tensor<'_>]) -> Result<Self::Matrix, TensorError>;
    /// As [`vector`](Self::vector), in F32, whatever the precision: the router's
    /// [correction](ExpertWeights::correction) and [scales](ExpertWeights::scales), and the vectors of [`recurrent`](Self::recurrent).
    fn f32_vector(&self, part: Tensor<'_>) -> Result<Self::Vector, TensorError>;
    /// As [`matrix`](Self::matrix), for [`embed`](Self::embed) and [`logits`](Self::logits).
    fn embedding_table(&self, part: Tensor<'_>) -> Result<Self::Matrix, TensorError>;
    /// Whether the device makes random weights itself. Otherwise the host makes and uploads them.
    fn makes_random_weights(&self) -> bool {
        false
    }
    /// Makes random matrices of equal width on the device, stacked by rows: for linear operations,
    /// gated or not, or as an embedding table.
    ///
    /// # Errors
    /// The device is out of memory, or [makes no random weights](Self::makes_random_weights).
    fn random_matrix(&self, _parts: &[RandomMatrix], _is_table: bool) -> Result<Self::Matrix, DeviceError> {
        Err(DeviceError::Unsupported("this device makes no random weights".into()))
    }
    /// Uploads vectors, concatenated. Errors as in [`matrix`](Self::matrix).
    fn vector(&self, parts: &[Tensor<'_>]) -> Result<Self::Vector, TensorError>;
    /// Uploads a norm's weights. Errors as in [`matrix`](Self::matrix).
    fn norm(&self, part: Tensor<'_>) -> Result<Self::Norm, TensorError>;
    /// An empty buffer.
    fn buffer(&self) -> Self::Buffer;
    /// An empty workspace.
    fn workspace(&self) -> Self::Workspace;
    /// An empty step for a model with these rotations and these block tables, each of layers of one
    /// kind with heads of one shape.
    ///
    /// # Errors
    /// The device does not support these heads.
    fn step(&self, ropes: Vec<RopeSpec>, tables: &[(KvSpec, HeadShape)]) -> Result<Self::Step, DeviceError>;
    /// Positions per KV block.
    fn block_tokens(&self) -> u32;
    /// A pool of `blocks` blocks, each with the keys and values of layers of one of these shapes.
    /// Layers of different block tables may share it.
    ///
    /// # Errors
    /// The device is out of memory, or has no pools of latents.
    fn kv_pool(&self, shapes: &[KvShape], blocks: usize) -> Result<Self::KvPool, DeviceError>;
    /// Bytes per block of such a pool.
    fn kv_block_bytes(&self, shapes: &[KvShape]) -> usize;

    /// A pool of `slots` states of one recurrent layer.
    ///
    /// # Errors
    /// As in [`recurrent`](Self::recurrent).
    fn state_pool(&self, _shape: RecurrentShape, _slots: usize) -> Result<Self::StatePool, DeviceError> {
        Err(no_recurrent_layers())
    }

    /// Free bytes of the device's own memory; `None` for a device that uses the host's memory.
    ///
    /// # Errors
    /// The device failed.
    fn free_bytes(&self) -> Result<Option<u64>, DeviceError>;
    /// Waits until all issued work is done.
    ///
    /// # Errors
    /// The issued work failed.
    fn wait(&self) -> Result<(), DeviceError>;

    /// Uploads a batch that the caller has checked. The operations of this step must use this
    /// workspace.
    ///
    /// # Errors
    /// Here and in all methods below: the device is out of memory or failed. Results of the step
    /// are then invalid.
    fn upload(
        &self,
        batch: &StepBatch,
        step: &mut Self::Step,
        workspace: &mut Self::Workspace,
    ) -> Result<(), DeviceError>;
    /// Copies the step's `block_copies` within a pool. Runs once per pool and step, before the
    /// step's first [`rope_store`](Self::rope_store).
    fn copy_blocks(&self, step: &Self::Step, pool: &mut Self::KvPool) -> Result<(), DeviceError>;
    /// Copies the step's `state_copies` within a pool. Runs once per pool and step, before
    /// [`recurrent`](Self::recurrent).
    fn copy_states(&self, _step: &Self::Step, _pool: &mut Self::StatePool) -> Result<(), DeviceError> {
        Err(no_recurrent_layers())
    }
    /// Rows of `table` for the step's tokens, times a scale, where placeholders are read as another
    /// token. The ids of pending tokens ([`StepBatch::pending_tokens`]) are read from the workspace.
    fn embed(
        &self,
        table: &Self::Matrix,
        scale_and_placeholders: (f32, Option<&Placeholders>),
        step: &Self::Step,
        out: &mut Self::Buffer,
        workspace: &Self::Workspace,
    ) -> Result<(), DeviceError>;
    /// `residual = (residual + delta) * scale`, where `delta` may be normalised first, then `out =
    /// rms_norm(residual) * weight`.
    fn add_norm(
        &self,
        op: AddNorm<'_, Self::Buffer, Self::Norm>,
        residual: &mut Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;
    /// As [`add_norm`](Self::add_norm), but only for the rows in the step's `logits_at`, which
    /// become `out`'s rows; `residual` is left undefined.
    fn add_norm_logits_rows(
        &self,
        op: AddNorm<'_, Self::Buffer, Self::Norm>,
        step: &Self::Step,
        residual: &mut Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;
    /// Copies the rows in the step's `logits_at` to `out`. `rows` come from an operation that does not quantize what it writes.
    fn pick_logits_rows(
        &self,
        step: &Self::Step,
        rows: &Self::Buffer,
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
    /// Normalises (if `qk_norm` is set) and rotates the query and key heads of `qkv`, normalises its
    /// value heads (if `value_norm` is set), and stores keys and values in the pool.
    fn rope_store(
        &self,
        op: RopeStore<'_, Self::Norm>,
        step: &Self::Step,
        qkv: &mut Self::Buffer,
        pool: &mut Self::KvPool,
    ) -> Result<(), DeviceError>;
    /// Makes of queries and latents the rows that [`attention`](Self::attention) reads, and stores the
    /// latents in the pool: `qkv` has a query of `rank + rope_dim` numbers for each head, and then, if the device reads it there, the
    /// key that all of them share.
    fn latent_store(
        &self,
        _op: LatentStore<'_, Self::Matrix, Self::Vector, Self::Norm>,
        _input: LatentInput<'_, Self::Buffer>,
        (_step, _pool): (&Self::Step, &mut Self::KvPool),
        _qkv: &mut Self::Buffer,
        _workspace: &mut Self::Workspace,
    ) -> Result<(), DeviceError> {
        Err(no_latents())
    }
    /// The values that weighted sums of latents stand for: `latents` is `[tokens][heads * rank]`, and
    /// `out` `[tokens][heads * value_dim]`. Each head has a matrix `[value_dim][rank]`.
    fn latent_values(
        &self,
        _heads: &[Linear<Self::Matrix, Self::Vector>],
        _latents: &mut Self::Buffer,
        _out: &mut Self::Buffer,
        _workspace: &mut Self::Workspace,
    ) -> Result<(), DeviceError> {
        Err(no_latents())
    }
    /// Attention of the queries of `input` over the pool: `out` is `[tokens][heads * value_dim]`.
    fn attention(
        &self,
        op: Attention,
        input: AttentionInput<'_, Self::Buffer, Self::Vector>,
        step: &Self::Step,
        pool: &Self::KvPool,
        out: &mut Self::Buffer,
        workspace: &mut Self::Workspace,
    ) -> Result<(), DeviceError>;
    /// `out` combines gate and up by `activation`, where `[gate][up]`, or `[up]` without a gate, is the result of
    /// [`linear`](Self::linear).
    fn gated_linear(
        &self,
        linear: &Linear<Self::Matrix, Self::Vector>,
        activation: Activation,
        x: &Self::Buffer,
        out: &mut Self::Buffer,
        workspace: &mut Self::Workspace,
    ) -> Result<(), DeviceError>;
    /// Whether a step may have sequences of several adapters, by the methods below.
    fn keeps_adapters(&self) -> bool {
        false
    }
    /// Uploads what an adapter adds to a linear operation, whose matrix was made by [`gated_matrix`](Self::gated_matrix) if
    /// `is_gated`: `y += up (down x)`, where `down` is `[rank][in features]` and `up` `[out features][rank]`. All adapters of an
    /// operation have one rank there. Errors as in [`matrix`](Self::matrix).
    fn low_rank(&self, _down: Tensor<'_>, _up: Tensor<'_>, _is_gated: bool) -> Result<Self::LowRank, TensorError> {
        Err(no_adapters().into())
    }
    /// As [`linear`](Self::linear), with what the adapters of the step's sequences add. `adapters`: in their order; `None` leaves the
    /// operation as it is.
    fn adapted_linear(
        &self,
        _linear: &Linear<Self::Matrix, Self::Vector>,
        _adapters: &[Option<Self::LowRank>],
        (_step, _x): (&Self::Step, &Self::Buffer),
        _out: &mut Self::Buffer,
        _workspace: &mut Self::Workspace,
    ) -> Result<(), DeviceError> {
        Err(no_adapters())
    }
    /// As [`gated_linear`](Self::gated_linear), where the adapters of the step's sequences add to gate and up.
    fn adapted_gated_linear(
        &self,
        _linear: &Linear<Self::Matrix, Self::Vector>,
        _adapters: &[Option<Self::LowRank>],
        _activation: Activation,
        (_step, _x): (&Self::Step, &Self::Buffer),
        _out: &mut Self::Buffer,
        _workspace: &mut Self::Workspace,
    ) -> Result<(), DeviceError> {
        Err(no_adapters())
    }
    /// Whether the device runs every model. Otherwise it runs those that
    /// [`Config::refuse_on_gpu`](crate::model::config::Config::refuse_on_gpu) does not refuse.
    fn runs_every_model(&self) -> bool {
        false
    }
    /// Runs a recurrent layer on the rows that its [input](RecurrentWeights::input) projection made,
    /// and updates the states in the slots of the step's sequences. A sequence whose first tokens are
    /// in the step begins with a state of zeros.
    fn recurrent(
        &self,
        _weights: &RecurrentWeights<Self::Matrix, Self::Vector>,
        _input: &Self::Buffer,
        _step: &Self::Step,
        _pool: &mut Self::StatePool,
        _out: &mut Self::Buffer,
    ) -> Result<(), DeviceError> {
        Err(no_recurrent_layers())
    }
    /// Multiplies `out` by the sigmoid of `gate`.
    fn gate(&self, _gate: &Self::Buffer, _out: &mut Self::Buffer) -> Result<(), DeviceError> {
        Err(no_recurrent_layers())
    }
    /// `inputs = (inputs + rms_norm(projected) * weight) * scale`, where the norm is of each layer's
    /// part of a row by itself.
    fn add_layer_inputs(
        &self,
        _op: LayerInputs<'_, Self::Buffer, Self::Norm>,
        _inputs: &mut Self::Buffer,
    ) -> Result<(), DeviceError> {
        Err(no_layer_inputs())
    }
    /// `out = activation(gate) * inputs`, of which part `layer` of each row is read.
    fn gate_layer_input(
        &self,
        _activation: Activation,
        _gate: &Self::Buffer,
        (_inputs, _layer): (&Self::Buffer, usize),
        _out: &mut Self::Buffer,
    ) -> Result<(), DeviceError> {
        Err(no_layer_inputs())
    }
    /// Whether the matrices of a layer's experts are one matrix, in which they are stacked by rows, as
    /// are their biases: then they are in one allocation.
    fn stacks_experts(&self) -> bool {
        false
    }
    /// For each row of the input, the sum of the outputs of the experts that the router chooses and of
    /// the shared one, times their weights.
    fn experts(
        &self,
        experts: &ExpertWeights<Self::Matrix, Self::Vector>,
        activation: Activation,
        input: ExpertInput<'_, Self::Buffer>,
        out: &mut Self::Buffer,
        workspace: &mut Self::Workspace,
    ) -> Result<(), DeviceError>;
    /// Computes the logits of each row of `x` in F32. They stay in the workspace,
    /// `[rows][vocab_size]`.
    fn logits(
        &self,
        head: OutputHead<'_, Self::Matrix>,
        x: &Self::Buffer,
        workspace: &mut Self::Workspace,
    ) -> Result<(), DeviceError>;
    /// Copies the workspace's logits to the host, after all issued work.
    fn read_logits<'w>(&self, workspace: &'w mut Self::Workspace) -> Result<&'w [f32], DeviceError>;
    /// Draws a token from each row of the workspace's logits, one per entry of `draws`, among ids
    /// below `vocab_size`. The logits may be overwritten.
    fn draw(&self, vocab_size: usize, draws: &[Draw<'_>], workspace: &mut Self::Workspace) -> Result<(), DeviceError>;
    /// Takes the results of the last [`draw`](Self::draw). A second call finds none.
    fn take_drawn(&self, workspace: &mut Self::Workspace) -> Result<Vec<Result<DrawnToken, DrawError>>, DeviceError>;
    /// Whether the device computes asynchronously. If so, a step may contain tokens that the
    /// previous step draws ([`StepBatch::pending_tokens`]), and may be issued before the host has
    /// taken them.
    fn runs_ahead(&self) -> bool;
    /// Whether the device measures which matmul kernel is fastest, once for each power of two of
    /// rows. If so, the model runs trial steps of these sizes before the first job row, while there
    /// is memory for the measurement.
    fn autotunes_matmuls(&self) -> bool;
    /// Writes rows from the host to a buffer, `[values.len() / width][width]`; used by tests.
    fn write(&self, values: &[f32], width: usize, out: &mut Self::Buffer) -> Result<(), DeviceError>;
    /// Copies a buffer's contents, `[rows][width]`, to the host.
    fn read(&self, buffer: &Self::Buffer) -> Result<Vec<f32>, DeviceError>;
}
