//! Shared setup of `run` and `worker`: loading the model onto its device, threads, signals.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow};

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::cli::args::{EngineArgs, StepLimitArgs};
use crate::cli::device_choice::ResolvedDevice;
use crate::cli::exit::{Exit, Failure};
use crate::cli::memory;
use crate::device::cpu::Threads;
use crate::device::cuda::{Cuda, MatmulBackend};
use crate::device::{Dtype, KvFormat, Precision};
use crate::engine::plan::Policy;
use crate::engine::{Engine, EngineOptions, Forward, Generator};
use crate::model::Checkpoint;
use crate::model::config::Config;
use crate::model::size::{ModelSize, read_as};
use crate::model::weights::WeightSource;
use crate::model::{KvBudget, LoadOptions, Transformer, kept_values};
use crate::say;
use crate::worker::model::{Formats, Model, ModelFiles, ModelHashes};
use crate::worker::step_watchdog::StepWatchdog;
use crate::worker::stop::{Stop, StopCause};

/// A step that takes longer means that the device hangs.
const STEP_TIMEOUT: Duration = Duration::from_secs(600);

/// A watchdog that detects a hung device.
pub(super) fn watchdog() -> Arc<StepWatchdog> {
    #[cfg(feature = "faults")]
    if let Some(step_timeout) = crate::faults::step_timeout() {
        return Arc::new(StepWatchdog::new(step_timeout));
    }
    Arc::new(StepWatchdog::new(STEP_TIMEOUT))
}

/// A model and the engine that runs it.
pub(super) struct LoadedModel {
    pub model: Model,
    pub engine: Box<dyn Generator>,
}

impl LoadedModel {
    /// Loads the weights. `context`: maximum sequence length in tokens; `None`: the checkpoint's.
    /// `hashes`: those of the checkpoint.
    pub(super) fn load(
        files: ModelFiles,
        formats: Formats,
        context: Option<u32>,
        hashes: impl Into<ModelHashes>,
        device: ResolvedDevice,
        args: &EngineArgs,
    ) -> Result<LoadedModel, Failure> {
        let context_tokens = context.unwrap_or(files.config.max_position_embeddings);
        let engine = engine(&files, formats, context, device, args)?;
        let model = Model::new(files, formats, context_tokens, hashes);
        Ok(LoadedModel { model, engine })
    }
}

fn engine(
    files: &ModelFiles,
    formats: Formats,
    context: Option<u32>,
    device: ResolvedDevice,
    args: &EngineArgs,
) -> Result<Box<dyn Generator>, Failure> {
    #[cfg(feature = "faults")]
    if crate::faults::KnownDevice::is_wanted() {
        return Ok(Box::new(crate::faults::KnownDevice::from_env()));
    }
    let mut options = load_options(formats, context, files.tokenizer.vocab_size(), device, args)?;
    options.channels = files
        .activation_maxima(formats.precision)
        .map_err(Failure::bad_job)?
        .map(Arc::new);
    let folders = (files.dir.as_path(), files.adapter.as_deref(), &files.apart[..]);
    let model = load_model(folders, files.config.clone(), device, &options, args)?;
    let step_limits = args.step_limits(device, files.config.experts.is_some());
    let options = engine_options(formats, &options, step_limits);
    Ok(Box::new(Engine::new(model, files.tokenizer.clone(), options)))
}

/// Loads the checkpoint in a folder, changed by the adapter in another one and with those in others beside it, with the
/// configuration `config` onto the device.
pub(super) fn load_model(
    (dir, adapter, apart): (&Path, Option<&Path>, &[PathBuf]),
    config: Config,
    device: ResolvedDevice,
    options: &LoadOptions,
    args: &EngineArgs,
) -> Result<Box<dyn Forward + Send>, Failure> {
    let checkpoint = Checkpoint::open(dir, adapter, config).and_then(|checkpoint| checkpoint.beside(apart));
    let checkpoint = checkpoint.map_err(Failure::bad_job)?;
    let stored = read_as(&checkpoint.config, checkpoint.weights.main_dtype());
    load_on_device(checkpoint.config, (&checkpoint.weights, stored), device, options, args)
}

/// Loads a model from any source of weights, with their number format, onto the device.
pub(super) fn load_on_device(
    config: Config,
    (weights, stored): (&dyn WeightSource, Dtype),
    device: ResolvedDevice,
    options: &LoadOptions,
    args: &EngineArgs,
) -> Result<Box<dyn Forward + Send>, Failure> {
    if let ResolvedDevice::Cuda(ordinal) = device {
        let backend = if args.no_cublaslt {
            MatmulBackend::Kernels
        } else {
            MatmulBackend::Fastest
        };
        let cuda = Cuda::open(ordinal, options.precision, options.kv_format, backend).map_err(Failure::bad_job)?;
        let model = Transformer::on_device(cuda, config, weights, options).map_err(Failure::bad_job)?;
        return Ok(Box::new(model));
    }
    check_cpu(options.precision, options.kv_format).map_err(Failure::bad_job)?;
    let mut size = ModelSize::at(options.precision, weights, &config).map_err(Failure::bad_job)?;
    size.adapters = kept_values(weights.adapters_apart(), &config);
    memory::check(size, stored, options.precision, args.kv_memory).map_err(Failure::bad_job)?;
    let model = Transformer::from_weights(config, weights, options).map_err(Failure::bad_job)?;
    Ok(Box::new(model))
}

fn check_cpu(precision: Precision, kv: KvFormat) -> anyhow::Result<()> {
    if precision == Precision::Fp8 || kv == KvFormat::Fp8 {
        Err(anyhow!(
            "a CPU does not compute in fp8: ask for `int8`, or for a GPU of compute capability 8.9 or later"
        ))
    } else {
        Ok(())
    }
}

/// Checks that `device` supports these formats, so that the error comes before the model is loaded.
pub(super) fn check_formats(formats: Formats, device: ResolvedDevice) -> anyhow::Result<()> {
    #[cfg(feature = "faults")]
    if crate::faults::KnownDevice::is_wanted() {
        return Ok(());
    }
    match device {
        ResolvedDevice::Cpu => check_cpu(formats.precision, formats.kv),
        ResolvedDevice::Cuda(ordinal) => {
            Cuda::open(ordinal, formats.precision, formats.kv, MatmulBackend::Kernels)?;
            Ok(())
        }
    }
}

/// Options for loading a model; `vocab_size`: the number of ids that its tokenizer knows.
pub(super) fn load_options(
    formats: Formats,
    context: Option<u32>,
    vocab_size: usize,
    device: ResolvedDevice,
    args: &EngineArgs,
) -> Result<LoadOptions, Failure> {
    // For a GPU, whose limits are the same with experts and without.
    let StepLimitArgs { step_tokens, sequences } = args.step_limits(device, false);
    Ok(LoadOptions {
        precision: formats.precision,
        kv_format: formats.kv,
        channels: None,
        isa: args.instructions,
        kv: match device {
            ResolvedDevice::Cpu => KvBudget::Bytes(memory::kv_bytes(args.kv_memory)),
            ResolvedDevice::Cuda(_) => KvBudget::Profiled {
                step_tokens,
                sequences,
                bytes: args.kv_memory.map(|mib| mib << 20),
            },
        },
        threads: Arc::new(Threads::new(threads(args)).context("cannot start the threads")?),
        max_context: context,
        vocabulary: Some(vocab_size),
    })
}

/// Engine options for a model that was loaded with `loaded`.
pub(super) fn engine_options(formats: Formats, loaded: &LoadOptions, step_limits: StepLimitArgs) -> EngineOptions {
    EngineOptions {
        max_step_tokens: step_limits.step_tokens as usize,
        max_sequences: step_limits.sequences as usize,
        prefix_root: formats.to_string(),
        policy: Policy::default(),
        threads: loaded.threads.clone(),
    }
}

/// The thread pool for rendering and tokenizing.
pub(super) fn render_threads(args: &EngineArgs) -> Result<rayon::ThreadPool, Failure> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads(args)).build();
    Ok(pool.context("cannot start the threads")?)
}

pub(super) fn threads(args: &EngineArgs) -> usize {
    args.threads
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// SIGINT and SIGTERM, which end nothing by themselves from here on.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Signals> {
        Ok(Signals {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    /// Waits for one of them.
    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// SIGINT and SIGTERM end the process at once with the line `said`: for work whose files are whole or not there.
pub(super) fn exit_on_signals(said: &'static str) -> Result<(), Failure> {
    let mut signals = Signals::new()?;
    tokio::spawn(async move {
        signals.next().await;
        if std::io::stderr().is_terminal() {
            // Behind a progress bar.
            eprintln!("");
        }
        say::error(format_args!("{said}"));
        std::process::exit(Exit::Interrupted as i32);
    });
    Ok(())
}

/// SIGINT and SIGTERM end the work once finished rows are written.
pub(super) fn stop_on_signals(stop: Stop) -> Result<(), Failure> {
    let mut signals = Signals::new()?;
    tokio::spawn(async move {
        signals.next().await;
        stop.set(StopCause::Interrupted);
        // A second signal exits at once, without waiting for the store.
        signals.next().await;
        std::process::exit(Exit::Interrupted as i32);
    });
    Ok(())
}
