//! `gristmill bench`: the engine's throughput on this machine, without a job, a ledger or a queue.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, anyhow};

use crate::bench::figures::{Batches, Figures, StepRecord};
use crate::bench::{picture, trace};
use crate::cli::args::{BatchingFeature, BenchArgs, LoadFormat, StepLimitArgs};
use crate::cli::device_choice::ResolvedDevice;
use crate::cli::exit::{Exit, Failure};
use crate::cli::model_source::{bring_model, open_adapters};
use crate::cli::prepare::print_warnings;
use crate::cli::setup::{engine_options, load_model, load_on_device, load_options};
use crate::device::Dtype;
use crate::device::cpu::Isa;
use crate::device::cuda::Cuda;
use crate::engine::plan::Policy;
use crate::engine::request::Request;
use crate::engine::{Engine, Forward, Generator};
use crate::model::config::Config;
use crate::model::folder;
use crate::model::random_weights::RandomWeights;
use crate::model::shapes;
use crate::model::{ActivationMaxima, Checkpoint};
use crate::tokenizer::Tokenizer;
use crate::worker::model::Formats;

pub(super) async fn bench(args: BenchArgs) -> Result<Exit, Failure> {
    // A name is that of a folder or of a shape.
    let dir = if args.model.contains("://") {
        bring_model(&args.model, Path::new("")).await?.dir
    } else {
        PathBuf::from(&args.model)
    };
    let apart = open_adapters(&args.mix_adapter).await?;
    tokio::task::spawn_blocking(move || run(&args, &dir, apart))
        .await
        .context("the benchmark panicked")?
}

/// A model to measure: a checkpoint, or a shape with random weights.
struct BenchModel {
    config: Config,
    tokenizer: Arc<Tokenizer>,
    /// The checkpoint's folder, if its weights are used; otherwise they are random.
    weights: Option<PathBuf>,
    /// The folders of adapters beside it.
    apart: Vec<PathBuf>,
}

impl BenchModel {
    /// `dir`: the folder of a checkpoint, or the name of a shape.
    fn open(dir: &Path, format: LoadFormat, apart: Vec<PathBuf>) -> Result<BenchModel, Failure> {
        if dir.exists() {
            folder::check(dir).map_err(Failure::bad_job)?;
            let config = Config::load(dir).map_err(Failure::bad_job)?;
            let tokenizer = match (Tokenizer::load(dir), format) {
                (Err(error), LoadFormat::Dummy) if error.is_missing() => Tokenizer::with_vocab_size(config.vocab_size)?,
                (tokenizer, _) => tokenizer.map_err(Failure::bad_job)?,
            };
            let config = match format {
                LoadFormat::Auto => Checkpoint::check(dir, config).map_err(Failure::bad_job)?,
                LoadFormat::Dummy => config,
            };
            return Ok(BenchModel {
                config,
                tokenizer: Arc::new(tokenizer),
                weights: (format == LoadFormat::Auto).then(|| dir.to_path_buf()),
                apart,
            });
        }
        let model = dir.to_string_lossy();
        let Some(config) = shapes::named(&model)? else {
            let known: Vec<&str> = shapes::names().collect();
            return Err(Failure::bad_job(anyhow!(
                "--model `{model}` is neither a folder nor a shape; shapes are {}",
                known.join(", ")
            )));
        };
        Ok(BenchModel {
            tokenizer: Arc::new(Tokenizer::with_vocab_size(config.vocab_size)?),
            config,
            weights: None,
            apart,
        })
    }
}

fn run(args: &BenchArgs, dir: &Path, apart: Vec<PathBuf>) -> Result<Exit, Failure> {
    let bench_model = BenchModel::open(dir, args.load_format, apart)?;
    if bench_model.weights.is_none() && !bench_model.apart.is_empty() {
        return Err(Failure::bad_job(anyhow!(
            "--mix-adapter: adapters change a checkpoint, and these weights are random"
        )));
    }
    print_warnings(&bench_model.config.warnings);
    let eos: Arc<[u32]> = bench_model.config.eos_token_ids.clone().into();
    let vocab_size = bench_model.config.vocab_size.min(bench_model.tokenizer.vocab_size());
    let mut requests = match &args.trace {
        Some(path) => trace::read(path, &bench_model.tokenizer, args.ignore_eos, &eos).map_err(Failure::bad_job)?,
        None => trace::random_requests(
            args.requests,
            args.input_len,
            args.output_len,
            vocab_size as u32,
            args.seed,
            &eos,
        ),
    };
    // The model alone and each adapter in turn.
    let adapters = bench_model.apart.len() + 1;
    for (index, request) in requests.iter_mut().enumerate() {
        request.adapter = (index % adapters) as u32;
    }
    let device = args.engine.device.resolve()?;
    let formats = Formats::of(args.precision, args.kv_cache, device.precision());
    let limits = args.engine.step_limits(device, bench_model.config.experts.is_some());
    let mut engine = engine(args, &bench_model, (device, formats, limits), vocab_size, &requests)?;
    let warm_up_requests: Vec<Request> = requests.iter().take(args.warm_up).cloned().collect();
    run_requests(&mut engine, warm_up_requests)?;
    let (figures, steps) = measure(args, &mut engine, requests, (device, formats, limits))?;
    if figures.failed == figures.requests {
        return Err(Failure::from(anyhow!("all requests failed: no speed was measured")));
    }
    if let Some(path) = &args.svg {
        let title = format!(
            "{}, {}: {:.0} tokens/s",
            figures.model, figures.precision, figures.total_tokens_per_second
        );
        let svg = picture::picture(&steps, figures.seconds, &title);
        std::fs::write(path, svg).with_context(|| format!("cannot write `{}`", path.display()))?;
    }
    if args.json {
        println!("{}", serde_json::to_string(&figures)?);
    } else {
        println!("{}", figures.lines(args.explain).trim_end());
    }
    Ok(if figures.failed > 0 {
        Exit::FailedRows
    } else {
        Exit::Done
    })
}

fn engine(
    args: &BenchArgs,
    bench_model: &BenchModel,
    (device, formats, limits): (ResolvedDevice, Formats, StepLimitArgs),
    vocab_size: usize,
    requests: &[Request],
) -> Result<Engine, Failure> {
    // RoPE tables are allocated for the whole context, so the context is limited to the longest
    // request.
    let longest = requests
        .iter()
        .map(|r| r.prompt.len() as u64 + u64::from(r.params.max_tokens))
        .max();
    let needed = longest.unwrap_or(0).min(u64::from(bench_model.config.context_limit())) as u32;
    let mut options = load_options(
        formats,
        Some(args.context.unwrap_or(needed.max(2))),
        vocab_size,
        device,
        &args.engine,
    )?;
    if let Some(dir) = &bench_model.weights {
        let channels = ActivationMaxima::of_model(dir, &bench_model.config, formats.precision);
        options.channels = channels.map_err(Failure::bad_job)?.map(Arc::new);
    }
    let mut model: Box<dyn Forward + Send> = if let Some(dir) = &bench_model.weights {
        load_model(
            (dir, None, &bench_model.apart),
            bench_model.config.clone(),
            device,
            &options,
            &args.engine,
        )?
    } else {
        let weights = RandomWeights {
            seed: args.seed,
            dtype: Dtype::Bf16,
        };
        load_on_device(
            bench_model.config.clone(),
            (&weights, weights.dtype),
            device,
            &options,
            &args.engine,
        )?
    };
    if args.explain {
        model.time_operations();
    }
    let mut options = engine_options(formats, &options, limits);
    options.policy = Policy {
        sort_window: !args.without.contains(&BatchingFeature::Sorting),
        share_prefixes: !args.without.contains(&BatchingFeature::Sharing),
        mix_phases: !args.without.contains(&BatchingFeature::Mixing),
        refill: !args.without.contains(&BatchingFeature::Refilling),
    };
    Ok(Engine::new(model, bench_model.tokenizer.clone(), options))
}

/// The result of running requests.
#[derive(Default)]
struct BenchRun {
    seconds: f64,
    steps: Vec<StepRecord>,
    prompt_tokens: u64,
    cached_tokens: u64,
    generated_tokens: u64,
    /// Requests that were refused or ended with an error.
    failed: u64,
    /// Tokens that had to go through the model: uncached prompt tokens and generated tokens, except
    /// the last token of each sequence.
    needed_tokens: u64,
}

/// Runs all requests, and submits them as a worker does: whenever the engine wants more.
fn run_requests(engine: &mut Engine, requests: Vec<Request>) -> Result<BenchRun, Failure> {
    let mut run_result = BenchRun::default();
    let mut waiting = requests.into_iter().peekable();
    let start = Instant::now();
    while waiting.peek().is_some() || !engine.is_idle() {
        while engine.wants_more() {
            let Some(request) = waiting.next() else { break };
            let row = request.id.row;
            if let Err(refused) = engine.submit(request) {
                eprintln!("gristmill: request {row}: {refused}");
                run_result.failed += 1;
            }
        }
        let step_start = start.elapsed();
        let finished = engine.step()?;
        let (duration, size) = (start.elapsed() - step_start, engine.totals().last_step);
        match run_result.steps.last_mut() {
            // A model that runs ahead returns its last tokens after its last step.
            Some(last) if size.tokens() == 0 => last.duration += duration,
            _ => run_result.steps.push(StepRecord {
                start: step_start,
                duration,
                size,
            }),
        }
        for request in finished {
            match request.result {
                Ok(completion) => {
                    let tokens = completion.token_ids.len() as u64;
                    run_result.prompt_tokens += u64::from(completion.prompt_tokens);
                    run_result.cached_tokens += u64::from(completion.cached_tokens);
                    run_result.generated_tokens += tokens;
                    run_result.needed_tokens +=
                        u64::from(completion.prompt_tokens.saturating_sub(completion.cached_tokens));
                    run_result.needed_tokens += tokens.saturating_sub(1);
                }
                Err(error) => {
                    eprintln!("gristmill: request {}: {error}", request.id.row);
                    run_result.failed += 1;
                }
            }
        }
    }
    run_result.seconds = start.elapsed().as_secs_f64();
    Ok(run_result)
}

fn measure(
    args: &BenchArgs,
    engine: &mut Engine,
    requests: Vec<Request>,
    (device, formats, limits): (ResolvedDevice, Formats, StepLimitArgs),
) -> Result<(Figures, Vec<StepRecord>), Failure> {
    let count = requests.len() as u64;
    let before = seconds_by_operation(engine);
    let run_result = run_requests(engine, requests)?;
    let seconds = run_result.seconds;
    let batches = Batches::of(
        &run_result.steps,
        seconds,
        run_result.needed_tokens,
        limits.step_tokens as usize,
        limits.sequences as usize,
    );
    let figures = Figures {
        model: args.model.clone(),
        precision: formats.precision_name().into(),
        kv_cache: formats.kv_name().into(),
        isa: match device {
            ResolvedDevice::Cpu => args.engine.instructions.unwrap_or_else(Isa::detect).to_string(),
            ResolvedDevice::Cuda(ordinal) => Cuda::probe(ordinal)?.name,
        },
        threads: crate::cli::setup::threads(&args.engine),
        requests: count,
        failed: run_result.failed,
        prompt_tokens: run_result.prompt_tokens,
        cached_tokens: run_result.cached_tokens,
        generated_tokens: run_result.generated_tokens,
        computed_tokens: batches.prefill_tokens + batches.decode_tokens,
        seconds,
        requests_per_second: count as f64 / seconds,
        prompt_tokens_per_second: run_result.prompt_tokens as f64 / seconds,
        generated_tokens_per_second: run_result.generated_tokens as f64 / seconds,
        total_tokens_per_second: (run_result.prompt_tokens + run_result.generated_tokens) as f64 / seconds,
        peak_memory_bytes: peak_memory()?,
        seconds_by_operation: seconds_since(&before, seconds_by_operation(engine), seconds),
        batches,
    };
    Ok((figures, run_result.steps))
}

/// Seconds spent so far, by operation.
fn seconds_by_operation(engine: &Engine) -> Vec<(String, f64)> {
    let totals = engine.totals();
    let mut all = vec![("plan".to_string(), totals.planning.as_secs_f64())];
    for (name, time) in engine.operation_times() {
        all.push((name.to_string(), time.as_secs_f64()));
    }
    all.push(("advance".to_string(), totals.advance.as_secs_f64()));
    all
}

/// Seconds by operation between `before` and `after`, which are `seconds` apart; `other` is the
/// rest.
fn seconds_since(before: &[(String, f64)], after: Vec<(String, f64)>, seconds: f64) -> Vec<(String, f64)> {
    let mut all = after;
    for ((_, after), (_, before)) in all.iter_mut().zip(before) {
        *after -= before;
    }
    let accounted: f64 = all.iter().map(|(_, seconds)| seconds).sum();
    all.push(("other".to_string(), (seconds - accounted).max(0.0)));
    all
}

/// Peak resident set size of this process, in bytes.
fn peak_memory() -> anyhow::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("cannot read this process's memory use")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    Ok(kib.context("the system does not say this process's peak memory")? << 10)
}
