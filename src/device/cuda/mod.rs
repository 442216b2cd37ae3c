//! The CUDA device: the operations of [`Device`] as kernels on one card.
//!
//! Activations are stored in BF16. Linear layers multiply in BF16, INT8 or E4M3, with one scale per
//! row for the 8-bit formats; weights may stay in codes of four bits. Accumulators are INT32 (INT8 matmuls, exact) or F32.
//!
//! [`driver`] is the only file that calls NVIDIA's driver, [`nvrtc`] the only one that calls the
//! run-time compiler, `cublaslt` the only one that calls cuBLASLt. [`plan`] and [`items`] describe
//! launches as plain values. The kernels are in `kernels/`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use half::bf16;

use crate::device::batch::StepBatch;
use crate::device::draw::{Draw, DrawError, DrawnToken};
use crate::device::random::RandomMatrix;
use crate::device::{
    Activation, AddNorm, Attention, AttentionInput, CodedMatrix, Device, DeviceError, ExpertInput, ExpertWeights,
    HeadShape, KvFormat, KvShape, KvSpec, LatentInput, LatentStore, LayerInputs, Linear, OutputHead, Placeholders,
    Precision, RecurrentShape, RecurrentWeights, RopeSpec, RopeStore, Tensor, TensorError,
};

mod attention;
pub mod attention_plan;
mod by_library;
mod cache;
mod ceilings;
mod coded;
pub mod coded_plan;
pub mod compile;
mod cublaslt;
mod draw;
pub mod driver;
mod embed;
pub mod expert_plan;
mod experts;
mod gated;
pub mod items;
mod latent;
mod layer_inputs;
pub mod libraries;
mod linear;
mod memory;
mod norm;
pub mod nvrtc;
pub mod plan;
mod recurrent;
pub mod recurrent_plan;
mod rope;
mod step;
mod tuning;
mod weights;

pub use attention::check_heads;
use attention_plan::{AttentionShape, BLOCK_TOKENS};
use by_library::CublasLtMatmul;
pub use by_library::MatmulBackend;
pub use ceilings::Ceilings;
use compile::{CompileTarget, Kernel, KernelCompiler};
use draw::Drawing;
use driver::{Argument, Card, Context, Function, Memory};
use experts::ExpertsScratch;
pub use memory::{Buffer, KvPool, Workspace, kv_block_bytes};
use memory::{Logits, block_pair_bytes};
use nvrtc::Nvrtc;
use plan::{KernelFormat, Launch, Tile};
pub use recurrent::StatePool;
pub use recurrent_plan::check_recurrent;
pub use step::Step;
use tuning::Tuning;
use weights::Loader;
pub use weights::Matrix;

/// First version of NVRTC with E4M3 in `mma.sync` (PTX ISA 8.4).
const FP8_NVRTC_MIN: (u32, u32) = (12, 4);

/// A card that computes in one precision.
pub struct Cuda {
    context: Arc<Context>,
    compiler: KernelCompiler,
    functions: Mutex<HashMap<Kernel, Function>>,
    loader: Mutex<Option<Loader>>,
    tuning: Tuning,
    /// Tile of all matmuls, if it is fixed and not chosen by measuring.
    fixed_tile: Option<Tile>,
    /// cuBLASLt, which computes all matmuls or those that it is faster at.
    cublaslt: Option<CublasLtMatmul>,
    /// Format of linear layers whose weights are not in codes.
    format: KernelFormat,
    /// Format in which norms and activations write what linear layers read.
    row_format: KernelFormat,
    /// Whether weights may be in codes of four bits.
    keeps_codes: bool,
    kv_format: KernelFormat,
}

/// Biases, in BF16; a router's correction, in F32.
pub struct Vector(Memory);

/// A norm's weights, in F32.
pub struct Norm(Memory);

impl Norm {
    /// Number of weights.
    fn values(&self) -> usize {
        self.0.bytes() / 4
    }
}

impl Cuda {
    /// Checks that card `ordinal` can compute (driver, NVRTC) and returns its description.
    ///
    /// # Errors
    /// Something is missing, or the card is too old.
    pub fn probe(ordinal: u32) -> Result<Card, DeviceError> {
        let cuda = Cuda::open(ordinal, Precision::Bf16, KvFormat::Bf16, MatmulBackend::Kernels)?;
        Ok(cuda.card().clone())
    }

    /// Opens card `ordinal`: linear layers in `precision`, keys and values in `kv`, matmuls by
    /// `backend`. FP8 needs compute capability 8.9 (Ada).
    ///
    /// # Errors
    /// There is no such card, a library that it needs is missing, or it does not support these
    /// formats.
    pub fn open(ordinal: u32, precision: Precision, kv: KvFormat, backend: MatmulBackend) -> Result<Cuda, DeviceError> {
        let unsupported = |what: &str, name: &str| {
            DeviceError::Unsupported(format!(
                "a GPU does not {what} {name}: ask for `bf16`, `int8`, `fp8` or, for a checkpoint in four bits, `w4a8`, or compute with `--device cpu`"
            ))
        };
        let format = KernelFormat::of(precision).ok_or_else(|| unsupported("compute in", precision.name()))?;
        let kv_format = KernelFormat::of_kv(kv).ok_or_else(|| unsupported("keep keys and values in", kv.name()))?;
        let needs_fp8 = format == KernelFormat::E4m3 || kv_format == KernelFormat::E4m3;
        let context = Context::open(ordinal)?;
        let card = context.card();
        if card.capability < 89 && needs_fp8 {
            return Err(DeviceError::Unsupported(format!(
                "`{}` has compute capability {}.{}, and FP8 needs 8.9 or later (Ada, Hopper): ask for `int8`",
                card.name,
                card.capability / 10,
                card.capability % 10
            )));
        }
        let nvrtc = Nvrtc::find((card.driver_version / 1000, card.driver_version % 1000 / 10))?;
        if nvrtc.version() < FP8_NVRTC_MIN && needs_fp8 {
            let (major, minor) = nvrtc.version();
            return Err(DeviceError::Unavailable(format!(
                "NVRTC here is of CUDA {major}.{minor}, and FP8 needs 12.4 or later: install a newer one, or ask for `int8`"
            )));
        }
        let target = CompileTarget::of(card.capability, &nvrtc.architectures()?)?;
        let compiler = KernelCompiler::new(nvrtc, target);
        let context = Arc::new(context);
        let cublaslt = CublasLtMatmul::open(&context, format, backend)?;
        let keeps_codes = precision == Precision::W4a8;
        let version = cublaslt.as_ref().map(CublasLtMatmul::version);
        Ok(Cuda {
            tuning: Tuning::open(&compiler, context.card(), version),
            context,
            compiler,
            functions: Mutex::default(),
            loader: Mutex::default(),
            fixed_tile: None,
            cublaslt,
            format,
            // Each matrix of codes quantizes rows in its own groups.
            row_format: if keeps_codes { KernelFormat::Bf16 } else { format },
            keeps_codes,
            kv_format,
        })
    }

    pub fn card(&self) -> &Card {
        self.context.card()
    }

    /// On Hopper: computes all matmuls with this tile from now on; results stay bit-identical.
    pub fn fix_tile(&mut self, tile: Tile) {
        self.fixed_tile = Some(tile);
    }

    /// NVRTC's version.
    pub fn compiler_version(&self) -> (u32, u32) {
        self.compiler.version()
    }

    /// Frees the staging memory, after all weights have been loaded.
    fn end_loading(&self) {
        *self.loader.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn function(&self, launch: &Launch) -> Result<Function, DeviceError> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(&launch.kernel) {
            return Ok(*function);
        }
        let load = |image: &[u8]| self.context.function(image, launch.kernel.name, launch.shared_bytes);
        // A cached image that cannot be loaded, such as a damaged file, is compiled again.
        let cached = self.compiler.cached(&launch.kernel);
        let cached = cached.and_then(|cached| Some((load(&cached.image).ok()?, cached.log)));
        let (function, log) = match cached {
            Some(loaded) => loaded,
            None => {
                let compiled = self.compiler.compile_and_cache(&launch.kernel)?;
                (load(&compiled.image)?, compiled.log)
            }
        };
        self.compiler.warn_if_slow(&launch.kernel, &log);
        functions.insert(launch.kernel, function);
        Ok(function)
    }

    /// Issues a launch; a launch with an empty grid is skipped.
    #[expect(unsafe_code, reason = "kernels take addresses")]
    fn launch(&self, launch: &Launch, arguments: &[Argument]) -> Result<(), DeviceError> {
        if launch.grid.contains(&0) {
            return Ok(());
        }
        let function = self.function(launch)?;
        // SAFETY: each caller passes its kernel's arguments, with memory of the planned shapes.
        unsafe { self.context.launch(&function, launch, arguments) }
    }

    fn attention_shape(&self, shape: HeadShape) -> AttentionShape {
        AttentionShape::of(shape, self.kv_format, self.card().is_hopper())
    }
}

/// An error for what models need that [`Config::refuse_on_gpu`](crate::model::config::Config::refuse_on_gpu)
/// refuses.
fn not_supported(what: &str) -> DeviceError {
    DeviceError::Unsupported(format!("GPUs do not compute {what} yet: compute with `--device cpu`"))
}

impl Device for Cuda {
    type Matrix = Matrix;
    type Vector = Vector;
    type LowRank = ();
    type Norm = Norm;
    type Buffer = Buffer;
    type KvPool = KvPool;
    type StatePool = StatePool;
    type Step = Step;
    type Workspace = Workspace;

    fn matrix(&self, parts: &[Tensor<'_>]) -> Result<Matrix, TensorError> {
        self.load_tensors(parts, self.format)
    }

    fn gated_matrix(&self, parts: &[Tensor<'_>]) -> Result<Matrix, TensorError> {
        self.load_tensors(parts, self.format)
    }

    fn keeps_codes(&self) -> bool {
        self.keeps_codes
    }

    fn coded_matrix(&self, parts: &[CodedMatrix], _is_gated: bool) -> Result<Matrix, TensorError> {
        self.load_codes(parts)
    }

    fn stacks_experts(&self) -> bool {
        true
    }

    /// In BF16 at every precision: they are small, and what they make of queries is compared with all keys.
    fn head_matrices(&self, parts: &[Tensor<'_>]) -> Result<Vec<Matrix>, TensorError> {
        if let Some(part) = parts.iter().find(|part| !part.rows.is_multiple_of(2)) {
            let why = format!("matrices of single heads with {} rows, an odd number,", part.rows);
            return Err(not_supported(&why).into());
        }
        Ok(vec![self.load_tensors(parts, KernelFormat::Bf16)?])
    }

    fn router_matrix(&self, parts: &[Tensor<'_>]) -> Result<Matrix, TensorError> {
        self.load_router(parts)
    }

    fn f32_vector(&self, part: Tensor<'_>) -> Result<Vector, TensorError> {
        self.load_f32(&[part], "a vector in F32").map(Vector)
    }

    /// BF16 at every precision: rounding the logits' weights costs the most accuracy, and embedding
    /// reads the table by rows.
    fn embedding_table(&self, part: Tensor<'_>) -> Result<Matrix, TensorError> {
        self.load_tensors(&[part], KernelFormat::Bf16)
    }

    fn makes_random_weights(&self) -> bool {
        true
    }

    fn random_matrix(&self, parts: &[RandomMatrix], is_table: bool) -> Result<Matrix, DeviceError> {
        self.load_random(parts, if is_table { KernelFormat::Bf16 } else { self.format })
    }

    fn vector(&self, parts: &[Tensor<'_>]) -> Result<Vector, TensorError> {
        let mut bytes = Vec::new();
        for (part, tensor) in parts.iter().enumerate() {
            let start = bytes.len();
            bytes.resize(start + tensor.rows * tensor.columns * 2, 0);
            if let Some(row) = weights::to_bf16(tensor, 0, &mut bytes[start..]) {
                return Err(TensorError::NotFinite { part, row });
            }
        }
        Ok(Vector(self.context.allocate_copy(&bytes, "a vector of weights")?))
    }

    fn norm(&self, part: Tensor<'_>) -> Result<Norm, TensorError> {
        self.load_f32(&[part], "a norm's weights").map(Norm)
    }

    fn buffer(&self) -> Buffer {
        Buffer::new()
    }

    fn workspace(&self) -> Workspace {
        Workspace {
            quantized: Buffer::new(),
            gate_up: Buffer::new(),
            experts: ExpertsScratch::new(),
            part_sums: None,
            part_states: None,
            logits: Logits::default(),
            drawing: Drawing::default(),
            deterministic: false,
        }
    }

    fn step(&self, ropes: Vec<RopeSpec>, tables: &[(KvSpec, HeadShape)]) -> Result<Step, DeviceError> {
        tables.iter().try_for_each(|(_, heads)| check_heads(*heads))?;
        Ok(Step::new(ropes, tables))
    }

    fn block_tokens(&self) -> u32 {
        BLOCK_TOKENS
    }

    fn kv_pool(&self, shapes: &[KvShape], blocks: usize) -> Result<KvPool, DeviceError> {
        KvPool::new(&self.context, shapes, self.kv_format, blocks)
    }

    fn kv_block_bytes(&self, shapes: &[KvShape]) -> usize {
        block_pair_bytes(shapes, self.kv_format)
    }

    fn state_pool(&self, shape: RecurrentShape, slots: usize) -> Result<StatePool, DeviceError> {
        self.allocate_states(shape, slots)
    }

    fn free_bytes(&self) -> Result<Option<u64>, DeviceError> {
        self.end_loading();
        self.context.free_bytes().map(Some)
    }

    fn wait(&self) -> Result<(), DeviceError> {
        self.context.wait()
    }

    fn upload(&self, batch: &StepBatch, step: &mut Step, workspace: &mut Workspace) -> Result<(), DeviceError> {
        workspace.deterministic = batch.deterministic;
        step.upload(&self.context, |heads| self.attention_shape(heads), batch)
    }

    fn copy_blocks(&self, step: &Step, pool: &mut KvPool) -> Result<(), DeviceError> {
        pool.copy_blocks(&self.context, &step.block_copies)
    }

    fn copy_states(&self, step: &Step, pool: &mut StatePool) -> Result<(), DeviceError> {
        self.copy_slots(&step.state_copies, pool)
    }

    fn embed(
        &self,
        table: &Matrix,
        how: (f32, Option<&Placeholders>),
        step: &Step,
        out: &mut Buffer,
        workspace: &Workspace,
    ) -> Result<(), DeviceError> {
        let table = (Argument::Address(table.data.address()), table.columns);
        let ids = (step.token_ids(), workspace.drawing.drawn_address());
        self.take_rows(table, ids, step.tokens, how, out)
    }

    fn pick_logits_rows(&self, step: &Step, rows: &Buffer, out: &mut Buffer) -> Result<(), DeviceError> {
        if rows.format != KernelFormat::Bf16 {
            return Err(not_supported("picking quantized rows"));
        }
        let ids = (step.logits_at(), Argument::Address(0));
        self.take_rows((rows.data(), rows.width), ids, step.logits_rows, (1.0, None), out)
    }

    fn add_norm(
        &self,
        op: AddNorm<'_, Buffer, Norm>,
        residual: &mut Buffer,
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let format = if op.in_f32 { KernelFormat::Bf16 } else { self.row_format };
        self.launch_add_norm(&op, residual, (0, residual.rows), format, out)
    }

    fn add_norm_logits_rows(
        &self,
        op: AddNorm<'_, Buffer, Norm>,
        step: &Step,
        residual: &mut Buffer,
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let logits_rows = (step.logits_at(), step.logits_rows);
        self.launch_add_norm(&op, residual, logits_rows, KernelFormat::Bf16, out)
    }

    fn linear(
        &self,
        linear: &Linear<Matrix, Vector>,
        x: &Buffer,
        out: &mut Buffer,
        workspace: &mut Workspace,
    ) -> Result<(), DeviceError> {
        let Workspace {
            quantized,
            deterministic,
            ..
        } = workspace;
        self.linear_into(linear, x, out, (quantized, *deterministic))
    }

    fn rope_store(
        &self,
        op: RopeStore<'_, Norm>,
        step: &Step,
        qkv: &mut Buffer,
        pool: &mut KvPool,
    ) -> Result<(), DeviceError> {
        self.rotate_and_store(op, step, qkv, pool)
    }

    fn latent_store(
        &self,
        op: LatentStore<'_, Matrix, Vector, Norm>,
        input: LatentInput<'_, Buffer>,
        (step, pool): (&Step, &mut KvPool),
        qkv: &mut Buffer,
        _workspace: &mut Workspace,
    ) -> Result<(), DeviceError> {
        self.store_latents(&op, &input, (step, pool), qkv)
    }

    fn latent_values(
        &self,
        heads: &[Linear<Matrix, Vector>],
        latents: &mut Buffer,
        out: &mut Buffer,
        _workspace: &mut Workspace,
    ) -> Result<(), DeviceError> {
        self.values_of_latents(heads, latents, out)
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
        self.attend(op, &input, (step, pool), out, workspace)
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
            quantized,
            gate_up,
            deterministic,
            ..
        } = workspace;
        self.linear_into(linear, x, gate_up, (quantized, *deterministic))?;
        self.activate(activation, gate_up, out)
    }

    fn recurrent(
        &self,
        weights: &RecurrentWeights<Matrix, Vector>,
        input: &Buffer,
        step: &Step,
        pool: &mut StatePool,
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        self.run_recurrent(weights, input, step, pool, out)
    }

    fn gate(&self, gate: &Buffer, out: &mut Buffer) -> Result<(), DeviceError> {
        self.gate_rows(gate, out)
    }

    fn add_layer_inputs(&self, op: LayerInputs<'_, Buffer, Norm>, inputs: &mut Buffer) -> Result<(), DeviceError> {
        self.add_inputs(&op, inputs)
    }

    fn gate_layer_input(
        &self,
        activation: Activation,
        gate: &Buffer,
        inputs: (&Buffer, usize),
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        self.gate_input(activation, gate, inputs, out)
    }

    fn experts(
        &self,
        experts: &ExpertWeights<Matrix, Vector>,
        activation: Activation,
        input: ExpertInput<'_, Buffer>,
        out: &mut Buffer,
        workspace: &mut Workspace,
    ) -> Result<(), DeviceError> {
        self.run_experts(experts, activation, &input, out, workspace)
    }

    fn logits(&self, head: OutputHead<'_, Matrix>, x: &Buffer, workspace: &mut Workspace) -> Result<(), DeviceError> {
        self.logits_into(&head, x, workspace)
    }

    fn read_logits<'w>(&self, workspace: &'w mut Workspace) -> Result<&'w [f32], DeviceError> {
        workspace.logits.read(&self.context)
    }

    fn draw(&self, vocab_size: usize, draws: &[Draw<'_>], workspace: &mut Workspace) -> Result<(), DeviceError> {
        let Workspace { logits, drawing, .. } = workspace;
        self.draw_from(vocab_size, draws, logits, drawing)
    }

    fn take_drawn(&self, workspace: &mut Workspace) -> Result<Vec<Result<DrawnToken, DrawError>>, DeviceError> {
        workspace.drawing.wait_for_results()
    }

    fn runs_ahead(&self) -> bool {
        true
    }

    fn autotunes_matmuls(&self) -> bool {
        true
    }

    fn write(&self, values: &[f32], width: usize, out: &mut Buffer) -> Result<(), DeviceError> {
        out.reshape(&self.context, values.len() / width, width, KernelFormat::Bf16)?;
        let bytes: Vec<u8> = values.iter().flat_map(|x| bf16::from_f32(*x).to_ne_bytes()).collect();
        match &out.data {
            Some(data) => {
                self.context.upload(&bytes, data, 0)?;
                self.context.wait()
            }
            None => Ok(()),
        }
    }

    fn read(&self, buffer: &Buffer) -> Result<Vec<f32>, DeviceError> {
        memory::download_f32(&self.context, buffer)
    }
}
