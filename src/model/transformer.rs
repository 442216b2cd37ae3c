//! One transformer for all families. The differences are in [`Config`], the computation in
//! [`Device`].
//!
//! Per layer: norm → fused q, k, v → RoPE and KV store → attention (or a recurrent layer's input →
//! its states) → output projection → norm → gate, up and their product → down projection, or routed
//! experts. A layer may be one half of this alone, with its norm. Some families also normalise the
//! outputs of the output and down projections before the residual addition, some normalise only these.
//! Steps share all buffers.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::device::batch::StepBatch;
use crate::device::cpu::{self, Cpu, Isa};
use crate::device::draw::{Draw, DrawError, DrawnToken};
use crate::device::{
    AddNorm, AttentionInput, Delta, Device, DeviceError, Dtype, ExpertInput, KvFormat, KvSpec, OutputHead, Precision,
};
use crate::engine::{Forward, ForwardError};
use crate::model::adapters_apart::LowRanks;
use crate::model::balance::BalancedWeights;
use crate::model::build::{Builder, Mixer, MlpWeights, ModelWeights};
use crate::model::canonical::CanonicalWeights;
use crate::model::channels::{ActivationMaxima, Activations};
use crate::model::checkpoint::Checkpoint;
use crate::model::config::Config;
use crate::model::error::ModelError;
use crate::model::kv_layout::KvLayout;
use crate::model::pool::{self, KvBudget};
use crate::model::random_weights::RandomWeights;
use crate::model::size::ModelSize;
use crate::model::times::{Operation, Times};
use crate::model::weights::WeightSource;

mod beside;
mod check;
mod inputs;
mod latent;
mod picked;
mod trial;

use picked::{LastRows, PickedBuffers};

/// Why a device without them is given no adapters beside a model.
const NO_ADAPTERS_APART: &str = "a GPU keeps no adapters beside a model: give each adapter a worker of its own (`--adapter`), or let them share a CPU";

/// Options for loading a model.
#[derive(Clone)]
pub struct LoadOptions {
    pub precision: Precision,
    /// Format of keys and values in the pool.
    pub kv_format: KvFormat,
    /// Measured activation magnitudes, by which the weights are balanced in [`Precision::Int8`].
    /// `None`: the magnitudes are estimated from the weights.
    pub channels: Option<Arc<ActivationMaxima>>,
    /// Instruction set of the CPU's kernels, which the CPU must support. `None`: the best one.
    pub isa: Option<Isa>,
    pub kv: KvBudget,
    /// Threads of the CPU device.
    pub threads: Arc<cpu::Threads>,
    /// Maximum sequence length in tokens. `None`: the length that the checkpoint declares. Dynamic
    /// RoPE scaling is computed for this length.
    pub max_context: Option<u32>,
    /// Number of ids that the tokenizer knows. Higher ids are padding of the embedding table and
    /// never get logits. `None`: all ids of the model.
    pub vocabulary: Option<usize>,
}

/// Gets the activations that a layer's linear operations read.
type Observer<'a, D> = dyn FnMut(usize, Activations, &<D as Device>::Buffer) + 'a;

/// A model that is ready to run.
pub struct Transformer<D: Device = Cpu> {
    device: D,
    config: Config,
    weights: ModelWeights<D>,
    layout: KvLayout,
    pools: Vec<D::KvPool>,
    /// One pool per recurrent layer.
    state_pools: Vec<D::StatePool>,
    step: D::Step,
    last_rows: LastRows<D>,
    buffers: Buffers<D>,
    times: Times,
    /// Whether the host waits for each operation and times it.
    times_operations: bool,
    kv_blocks: u32,
    state_slots: u32,
    context_tokens: u32,
    vocab_size: usize,
    /// Maximum tokens per step for which the device has memory. `None`: no trial step ran.
    step_tokens_max: Option<u32>,
    /// Number of adapters beside the model.
    adapters: usize,
}

struct Buffers<D: Device> {
    residual: D::Buffer,
    /// Normalised rows, and, when projections have read these, what attention or a recurrence writes.
    normed: D::Buffer,
    /// What a layer's projections write: queries, keys and values, and, when these have been read, what is
    /// added to the stream.
    projected: D::Buffer,
    gates: D::Buffer,
    gated: D::Buffer,
    /// What a router reads, and outputs, of experts beside an MLP.
    router_rows: D::Buffer,
    experts: D::Buffer,
    /// Inputs of all layers.
    inputs: D::Buffer,
    picked: PickedBuffers<D>,
    /// Weighted sums of latents, in models that keep such.
    latents: D::Buffer,
    workspace: D::Workspace,
}

impl<D: Device> Buffers<D> {
    fn new(device: &D) -> Buffers<D> {
        Buffers {
            residual: device.buffer(),
            normed: device.buffer(),
            projected: device.buffer(),
            gates: device.buffer(),
            gated: device.buffer(),
            router_rows: device.buffer(),
            experts: device.buffer(),
            inputs: device.buffer(),
            picked: PickedBuffers::new(device),
            latents: device.buffer(),
            workspace: device.workspace(),
        }
    }
}

impl Transformer<Cpu> {
    /// Loads the checkpoint folder `dir` onto the CPU.
    ///
    /// # Errors
    /// A file is missing, broken or not supported; or the options do not fit the model.
    pub fn load(dir: &Path, options: &LoadOptions) -> Result<Transformer, ModelError> {
        let checkpoint = Checkpoint::open(dir, None, Config::load(dir)?)?;
        Transformer::from_weights(checkpoint.config, &checkpoint.weights, options)
    }

    /// Makes a model with random weights, stored as `dtype`, on the CPU.
    ///
    /// # Errors
    /// The options do not fit the model.
    pub fn random(config: Config, seed: u64, dtype: Dtype, options: &LoadOptions) -> Result<Transformer, ModelError> {
        Transformer::from_weights(config, &RandomWeights { seed, dtype }, options)
    }

    /// Loads a model from any source of weights onto the CPU.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn from_weights(
        config: Config,
        source: &dyn WeightSource,
        options: &LoadOptions,
    ) -> Result<Transformer, ModelError> {
        let mut device = Cpu::new(options.precision, options.kv_format, options.threads.clone());
        if let Some(isa) = options.isa {
            device = device.with_isa(isa);
        }
        Transformer::on_device(device, config, source, options)
    }

    /// Runs a step as [`forward`](Self::forward) does, but returns no logits. `observe` gets the
    /// activations that each layer's linear operations read.
    ///
    /// # Errors
    /// The batch does not fit the model.
    pub fn forward_with_observer(
        &mut self,
        batch: &StepBatch,
        mut observe: impl FnMut(usize, Activations, &cpu::Buffer),
    ) -> Result<(), ForwardError> {
        self.check(batch).map_err(ForwardError::Batch)?;
        self.run(batch, Some(&mut observe))?;
        Ok(())
    }
}

impl<D: Device> Transformer<D> {
    /// Loads a model onto `device`, which must have been made with the threads and precision of
    /// `options`.
    ///
    /// # Errors
    /// As [`load`](Transformer::load).
    pub fn on_device(
        device: D,
        config: Config,
        source: &dyn WeightSource,
        options: &LoadOptions,
    ) -> Result<Transformer<D>, ModelError> {
        let context_tokens = config.context_tokens(options.max_context)?;
        if !device.runs_every_model() {
            config.refuse_on_gpu()?;
        }
        let size = ModelSize::at(options.precision, source, &config)?;
        pool::check_fits(&device, &size, options.precision)?;
        // A device without its own memory is synchronous: timing its operations costs no wait.
        let times_operations = device.free_bytes()?.is_none();
        let layout = KvLayout::of(&config);
        let state_slots = pool::state_slots(&device, &config, options.kv);
        let kv_blocks = pool::first_blocks(&device, &config, options.kv)?;
        let vocab_size = options
            .vocabulary
            .map_or(config.vocab_size, |n| n.min(config.vocab_size));
        let random = source.random().filter(|_| device.makes_random_weights());
        // Numbers that were quantized so are used as they are, unless channels were measured for them.
        let keeps_int8 = source.is_int8_by_row() && options.channels.is_none();
        let adapters = source.adapters_apart();
        if !adapters.is_empty() && !device.keeps_adapters() {
            return Err(ModelError::Options(NO_ADAPTERS_APART.into()));
        }
        let canonical = CanonicalWeights::new(source, &config);
        let source: &dyn WeightSource = if source.is_canonical() { source } else { &canonical };
        let balanced = match options.precision {
            // Channels of random weights have equal magnitudes and need no balancing.
            Precision::Int8 if random.is_none() && !keeps_int8 => {
                Some(BalancedWeights::new(source, &config, options.channels.as_deref())?)
            }
            _ => None,
        };
        let weights = Builder {
            device: &device,
            source: balanced.as_ref().map_or(source, |balanced| balanced),
            random,
            config: &config,
            layout: &layout,
            adapters: LowRanks {
                adapters,
                config: &config,
                factors: balanced.as_ref().map(BalancedWeights::factors),
            },
        }
        .weights()?;
        let pools = pool::allocate(&device, &config, kv_blocks)?;
        let state_pools = pool::allocate_states(&device, &config, state_slots)?;
        let step = device.step(config.rope_specs(context_tokens), &layout.kinds())?;
        let last_rows = LastRows::new(&device, &config, &layout, context_tokens)?;
        let buffers = Buffers::new(&device);
        let mut transformer = Transformer {
            device,
            config,
            weights,
            layout,
            pools,
            state_pools,
            step,
            last_rows,
            buffers,
            times: Times::default(),
            times_operations,
            kv_blocks,
            state_slots,
            context_tokens,
            vocab_size,
            step_tokens_max: None,
            adapters: adapters.len(),
        };
        transformer.fill_memory(options.kv)?;
        Ok(transformer)
    }

    /// Runs one step and returns the logits of `batch.logits_at`,
    /// `[logits_at.len()][vocab_size()]`, row-major, F32. The engine leaves logits on the device
    /// and does not call this.
    ///
    /// # Errors
    /// The batch does not fit the model, or the device failed.
    pub fn forward(&mut self, batch: &StepBatch) -> Result<&[f32], ForwardError> {
        self.begin(batch)?;
        Ok(self.device.read_logits(&mut self.buffers.workspace)?)
    }

    /// The model's configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Runs a checked batch. `observe` gets the activations that each layer's linear operations
    /// read: of all rows, so none are dropped.
    #[expect(clippy::too_many_lines, reason = "a model's operations, in order")]
    fn run(&mut self, batch: &StepBatch, mut observer: Option<&mut Observer<'_, D>>) -> Result<(), DeviceError> {
        let Transformer {
            device,
            config,
            weights,
            pools,
            state_pools,
            step,
            last_rows,
            buffers: b,
            vocab_size,
            times,
            times_operations,
            ..
        } = self;
        let drops_rows = observer.is_none() && last_rows.upload(device, batch, &mut b.workspace)?;
        let mut observe = |layer, activations, buffer: &D::Buffer| {
            if let Some(observe) = &mut observer {
                observe(layer, activations, buffer);
            }
        };
        let mut record = times.stopwatch();
        let mut lap = |operation| -> Result<(), DeviceError> {
            if *times_operations {
                device.wait()?;
                record(operation);
            }
            Ok(())
        };
        device.upload(batch, step, &mut b.workspace)?;
        device.embed(
            &weights.embedding,
            (config.embedding_scale, config.placeholders.as_ref()),
            step,
            &mut b.residual,
            &b.workspace,
        )?;
        if let Some(inputs) = &weights.inputs {
            inputs.run(device, config, step, b)?;
        }
        lap(Operation::Embed)?;
        let all_rows = &*step;
        let mut step = all_rows;
        let mut delta = None;
        for pool in &mut *pools {
            device.copy_blocks(step, pool)?;
        }
        for pool in &mut *state_pools {
            device.copy_states(step, pool)?;
        }
        for (index, layer) in weights.layers.iter().enumerate() {
            if let (Some(mixer), Some(o)) = (&layer.mixer, &layer.o) {
                // Without a norm of its own, the block reads the residual stream. Then only the addition
                // counts, and any norm will do.
                let own = layer.attention_norm.as_ref();
                let weight = own.unwrap_or(&weights.norm);
                let norm = stream_norm::<D>(config, delta, weight);
                device.add_norm(norm, &mut b.residual, &mut b.normed)?;
                delta = None;
                lap(Operation::Norm)?;
                let input = if own.is_some() { &b.normed } else { &b.residual };
                observe(index, Activations::AttentionNorm, input);
                match mixer {
                    Mixer::Recurrent { weights, pool } => {
                        device.linear(&weights.input, input, &mut b.projected, &mut b.workspace)?;
                        lap(Operation::Linear)?;
                        device.recurrent(weights, &b.projected, step, &mut state_pools[*pool], &mut b.normed)?;
                        lap(Operation::Recurrent)?;
                    }
                    Mixer::Latent(layer) => {
                        let pool = &mut pools[layer.kv.pool];
                        layer.store(device, (config, index), (step, pool), b, &mut lap)?;
                    }
                    Mixer::Attention(layer) => {
                        let input = (step, input);
                        layer.qkv.run(device, input, &mut b.projected, &mut b.workspace)?;
                        if let Some(gate) = &layer.gate {
                            gate.run(device, input, &mut b.gates, &mut b.workspace)?;
                        }
                        lap(Operation::Linear)?;
                        let pool = &mut pools[layer.kv.pool];
                        device.rope_store(layer.store(config, index), step, &mut b.projected, pool)?;
                        lap(Operation::RopeStore)?;
                    }
                }
                if drops_rows && index == last_rows.layer {
                    if batch.logits_at.is_empty() {
                        break;
                    }
                    b.pick_logits_rows(device, step, layer, weights.inputs.is_some())?;
                    step = &last_rows.step;
                    if config.parallel_mlp {
                        let norm = stream_norm::<D>(config, None, weight);
                        device.add_norm(norm, &mut b.residual, &mut b.normed)?;
                    }
                }
                if let (true, Some(MlpWeights::Plain { gate_up, .. })) = (config.parallel_mlp, &layer.mlp) {
                    observe(index, Activations::MlpNorm, &b.normed);
                    gate_up.run_gated(
                        device,
                        config.activation,
                        (step, &b.normed),
                        &mut b.gated,
                        &mut b.workspace,
                    )?;
                    lap(Operation::GatedLinear)?;
                }
                match mixer {
                    Mixer::Recurrent { .. } => {}
                    Mixer::Latent(layer) => {
                        layer.attend(device, config, (step, &pools[layer.kv.pool]), b)?;
                        lap(Operation::Attention)?;
                    }
                    Mixer::Attention(layer) => {
                        let input = AttentionInput {
                            qkv: &b.projected,
                            sinks: layer.sinks.as_ref(),
                        };
                        let pool = &pools[layer.kv.pool];
                        device.attention(
                            layer.attention(config),
                            input,
                            step,
                            pool,
                            &mut b.normed,
                            &mut b.workspace,
                        )?;
                        if layer.gate.is_some() {
                            device.gate(&b.gates, &mut b.normed)?;
                        }
                        lap(Operation::Attention)?;
                    }
                }
                observe(index, Activations::Attended, &b.normed);
                o.run(device, (step, &b.normed), &mut b.projected, &mut b.workspace)?;
                lap(Operation::Linear)?;
                delta = Some(Delta {
                    rows: &b.projected,
                    norm: layer.post_attention_norm.as_ref(),
                    scale: 1.0,
                });
            }
            let Some(mlp) = &layer.mlp else { continue };
            let own = layer.mlp_norm.as_ref();
            let norm = AddNorm {
                in_f32: matches!(mlp, MlpWeights::Experts(_)),
                ..stream_norm::<D>(config, delta, own.unwrap_or(&weights.norm))
            };
            device.add_norm(norm, &mut b.residual, &mut b.normed)?;
            lap(Operation::Norm)?;
            let input = if own.is_some() { &b.normed } else { &b.residual };
            match mlp {
                MlpWeights::Plain { gate_up, down } => {
                    if !config.parallel_mlp {
                        observe(index, Activations::MlpNorm, input);
                        gate_up.run_gated(device, config.activation, (step, input), &mut b.gated, &mut b.workspace)?;
                        lap(Operation::GatedLinear)?;
                    }
                    observe(index, Activations::Gated, &b.gated);
                    down.run(device, (step, &b.gated), &mut b.projected, &mut b.workspace)?;
                    lap(Operation::Linear)?;
                }
                MlpWeights::Experts(weights) => {
                    observe(index, Activations::MlpNorm, input);
                    let input = ExpertInput::same(input);
                    device.experts(weights, config.activation, input, &mut b.projected, &mut b.workspace)?;
                    lap(Operation::Experts)?;
                }
                MlpWeights::Both(both) => {
                    both.run(device, config, b, &mut lap)?;
                }
            }
            delta = Some(Delta {
                rows: &b.projected,
                norm: layer.post_mlp_norm.as_ref(),
                scale: layer.scale,
            });
            if let Some(input) = &layer.input {
                // The layer's factor is that of all that it adds.
                delta.iter_mut().for_each(|delta| delta.scale = 1.0);
                let norm = AddNorm {
                    in_f32: true,
                    ..stream_norm::<D>(config, delta, &weights.norm)
                };
                device.add_norm(norm, &mut b.residual, &mut b.normed)?;
                lap(Operation::Norm)?;
                input.run(device, config, index, b)?;
                lap(Operation::Linear)?;
                delta = Some(Delta {
                    rows: &b.projected,
                    norm: Some(&input.post_norm),
                    scale: layer.scale,
                });
            }
        }
        let norm = stream_norm::<D>(config, delta, &weights.norm);
        device.add_norm_logits_rows(norm, step, &mut b.residual, &mut b.normed)?;
        lap(Operation::Norm)?;
        let head = OutputHead {
            weight: weights.head.as_ref().unwrap_or(&weights.embedding),
            vocab_size: *vocab_size,
            soft_cap: config.logit_soft_cap,
        };
        device.logits(head, &b.normed, &mut b.workspace)?;
        if drops_rows && !batch.logits_at.is_empty() {
            b.swap_picked(&weights.layers[last_rows.layer]);
        }
        lap(Operation::Logits)
    }
}

/// A norm of the residual stream after the addition of `delta`.
fn stream_norm<'a, D: Device>(
    config: &Config,
    delta: Option<Delta<'a, D::Buffer, D::Norm>>,
    weight: &'a D::Norm,
) -> AddNorm<'a, D::Buffer, D::Norm> {
    AddNorm {
        delta,
        weight,
        eps: config.norm_eps,
        centered: config.layer_norms,
        in_f32: false,
    }
}

impl<D: Device> Forward for Transformer<D> {
    fn begin(&mut self, batch: &StepBatch) -> Result<(), ForwardError> {
        self.check(batch).map_err(ForwardError::Batch)?;
        Ok(self.run(batch, None)?)
    }

    fn free_step_memory(&mut self) {
        self.buffers = Buffers::new(&self.device);
    }

    fn draw(&mut self, vocab_size: usize, draws: &[Draw<'_>]) -> Result<(), ForwardError> {
        let Transformer { device, buffers, .. } = self;
        let mut record = self.times.stopwatch();
        device.draw(vocab_size, draws, &mut buffers.workspace)?;
        if self.times_operations {
            device.wait()?;
            record(Operation::Draw);
        }
        Ok(())
    }

    fn take_drawn(&mut self) -> Result<Vec<Result<DrawnToken, DrawError>>, ForwardError> {
        Ok(self.device.take_drawn(&mut self.buffers.workspace)?)
    }

    fn runs_ahead(&self) -> bool {
        self.device.runs_ahead()
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn context_tokens(&self) -> u32 {
        self.context_tokens
    }

    fn kv_blocks(&self) -> u32 {
        self.kv_blocks
    }

    fn kv_tables(&self) -> &[KvSpec] {
        &self.layout.tables
    }

    fn state_slots(&self) -> Option<u32> {
        self.config.recurrent.as_ref().map(|_| self.state_slots)
    }

    fn block_tokens(&self) -> u32 {
        self.device.block_tokens()
    }

    fn step_tokens_max(&self) -> Option<u32> {
        self.step_tokens_max
    }

    fn time_operations(&mut self) {
        self.times_operations = true;
    }

    fn operation_times(&self) -> Vec<(&'static str, Duration)> {
        if self.times_operations {
            self.times.totals()
        } else {
            Vec::new()
        }
    }
}
