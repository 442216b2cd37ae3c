//! What `run` and `worker` equip themselves with: the model on its device, threads, signals.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;

use crate::cli::args::EngineArgs;
use crate::cli::exit::{Exit, Failure};
use crate::device::cpu::Threads;
use crate::engine::scheduler::Policy;
use crate::engine::{Engine, EngineOptions, Generate};
use crate::model::transformer::{KvBudget, LoadOptions, Transformer};
use crate::worker::model::{Formats, Model, ModelFiles};
use crate::worker::stop::{Stop, Why};

/// A device that takes longer over one step hangs.
pub const STEP_MAX: Duration = Duration::from_secs(600);

/// A model and the engine that runs it.
pub struct LoadedModel {
    pub model: Model,
    pub engine: Box<dyn Generate>,
}

impl LoadedModel {
    /// Loads the weights. `context`: longest sequence in tokens; `None`: what the checkpoint declares. `hash`: the
    /// checkpoint's.
    pub fn load(
        files: ModelFiles,
        formats: Formats,
        context: Option<u32>,
        hash: String,
        args: &EngineArgs,
    ) -> Result<LoadedModel, Failure> {
        let context_tokens = context.unwrap_or(files.config.max_position_embeddings);
        let engine = engine(&files, formats, context, args)?;
        let model = Model::new(files, formats, context_tokens, hash);
        Ok(LoadedModel { model, engine })
    }
}

fn engine(
    files: &ModelFiles,
    formats: Formats,
    context: Option<u32>,
    args: &EngineArgs,
) -> Result<Box<dyn Generate>, Failure> {
    #[cfg(feature = "faults")]
    if crate::faults::KnownDevice::is_wanted() {
        return Ok(Box::new(crate::faults::KnownDevice::from_env()));
    }
    let mut options = load_options(formats, context, files.tokenizer.vocab_size(), args)?;
    options.channels = files
        .channels(formats.precision)
        .map_err(Failure::bad_job)?
        .map(Arc::new);
    let model = Transformer::load(&files.dir, &options).map_err(Failure::bad_job)?;
    let options = engine_options(formats, &options, args);
    Ok(Box::new(Engine::new(Box::new(model), files.tokenizer.clone(), options)))
}

/// How a model is loaded; `vocabulary`: ids that its tokenizer knows.
pub fn load_options(
    formats: Formats,
    context: Option<u32>,
    vocabulary: usize,
    args: &EngineArgs,
) -> Result<LoadOptions, Failure> {
    Ok(LoadOptions {
        precision: formats.precision,
        kv_format: formats.kv,
        channels: None,
        isa: args.instructions,
        kv: KvBudget::Bytes(args.kv_memory.map_or_else(default_kv_bytes, |mib| mib << 20)),
        threads: Arc::new(Threads::new(threads(args)).context("cannot start the threads")?),
        max_context: context,
        vocabulary: Some(vocabulary),
    })
}

/// How an engine runs a model loaded so.
pub fn engine_options(formats: Formats, loaded: &LoadOptions, args: &EngineArgs) -> EngineOptions {
    EngineOptions {
        max_step_tokens: args.step_tokens as usize,
        max_sequences: args.sequences as usize,
        prefix_root: formats.to_string(),
        policy: Policy::default(),
        threads: loaded.threads.clone(),
    }
}

/// Threads that render and tokenize.
pub fn render_threads(args: &EngineArgs) -> Result<rayon::ThreadPool, Failure> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads(args)).build();
    Ok(pool.context("cannot start the threads")?)
}

pub fn threads(args: &EngineArgs) -> usize {
    args.threads
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// An eighth of the memory this process may use; 1 GiB where that cannot be told.
fn default_kv_bytes() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = total.and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    let machine = kib.map(|kib| kib << 10);
    // A container's own limit, where there is one ("max" is none).
    let container = std::fs::read_to_string("/sys/fs/cgroup/memory.max")
        .ok()
        .and_then(|max| max.trim().parse().ok());
    machine.into_iter().chain(container).min().unwrap_or(8 << 30) / 8
}

/// SIGINT and SIGTERM end the work after what is finished was written.
pub fn stop_on_signals(stop: Stop) -> Result<(), Failure> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    tokio::spawn(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        stop.set(Why::Interrupted);
        // Who asks twice does not want to wait for the store.
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        std::process::exit(Exit::Interrupted as i32);
    });
    Ok(())
}
