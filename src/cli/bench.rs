//! `gristmill bench`: the engine's throughput on this machine, without a job, a ledger or a queue.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, anyhow};

use crate::bench::figures::{Batches, Figures, StepRecord};
use crate::bench::{picture, trace};
use crate::cli::args::{BenchArgs, LoadFormat, Part};
use crate::cli::device_choice::ResolvedDevice;
use crate::cli::exit::{Exit, Failure};
use crate::cli::prepare::say_warnings;
use crate::cli::setup::{engine_options, load_model, load_options, on_device};
use crate::device::Dtype;
use crate::device::cpu::Isa;
use crate::device::cuda::Cuda;
use crate::engine::request::Request;
use crate::engine::scheduler::Policy;
use crate::engine::{Engine, Forward, Generator};
use crate::model::config::Config;
use crate::model::folder;
use crate::model::shapes;
use crate::model::weights::RandomWeights;
use crate::model::{ActivationMaxima, Checkpoint};
use crate::tokenizer::Tokenizer;
use crate::worker::model::Formats;

pub(super) async fn bench(args: BenchArgs) -> Result<Exit, Failure> {
    tokio::task::spawn_blocking(move || run(&args))
        .await
        .context("the benchmark panicked")?
}

/// A model to measure: a checkpoint, or a shape with random weights.
struct Subject {
    config: Config,
    tokenizer: Arc<Tokenizer>,
    /// Whether it has weights; otherwise they are random.
    checkpoint: bool,
}

impl Subject {
    fn open(model: &str, format: LoadFormat) -> Result<Subject, Failure> {
        let dir = Path::new(model);
        if dir.exists() {
            folder::check(dir).map_err(Failure::bad_job)?;
            let config = Config::load(dir).map_err(Failure::bad_job)?;
            let tokenizer = match (Tokenizer::load(dir), format) {
                (Err(error), LoadFormat::Dummy) if error.is_absence() => Tokenizer::numbered(config.vocab_size)?,
                (tokenizer, _) => tokenizer.map_err(Failure::bad_job)?,
            };
            let config = match format {
                LoadFormat::Auto => Checkpoint::check(dir, config).map_err(Failure::bad_job)?,
                LoadFormat::Dummy => config,
            };
            return Ok(Subject {
                config,
                tokenizer: Arc::new(tokenizer),
                checkpoint: format == LoadFormat::Auto,
            });
        }
        let Some(config) = shapes::named(model)? else {
            let known: Vec<&str> = shapes::names().collect();
            return Err(Failure::bad_job(anyhow!(
                "--model `{model}` is neither a folder nor a shape; shapes are {}",
                known.join(", ")
            )));
        };
        Ok(Subject {
            tokenizer: Arc::new(Tokenizer::numbered(config.vocab_size)?),
            config,
            checkpoint: false,
        })
    }
}

fn run(args: &BenchArgs) -> Result<Exit, Failure> {
    let subject = Subject::open(&args.model, args.load_format)?;
    say_warnings(&subject.config.warnings);
    let eos: Arc<[u32]> = subject.config.eos_token_ids.clone().into();
    let vocabulary = subject.config.vocab_size.min(subject.tokenizer.vocab_size());
    let requests = match &args.trace {
        Some(path) => trace::read(path, &subject.tokenizer, args.ignore_eos, &eos).map_err(Failure::bad_job)?,
        None => trace::random(
            args.requests,
            args.input_len,
            args.output_len,
            vocabulary as u32,
            args.seed,
            &eos,
        ),
    };
    let place = args.engine.device.resolve()?;
    let formats = Formats::of(args.precision, args.kv_cache, place.precision());
    let mut engine = engine(args, &subject, (place, formats), vocabulary, &requests)?;
    let first: Vec<Request> = requests.iter().take(args.warm_up).cloned().collect();
    serve(&mut engine, first)?;
    let (figures, steps) = measure(args, &mut engine, requests, (place, formats))?;
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
    subject: &Subject,
    (place, formats): (ResolvedDevice, Formats),
    vocabulary: usize,
    requests: &[Request],
) -> Result<Engine, Failure> {
    // RoPE tables are allocated for the whole context, so the context is cut to the longest
    // request.
    let longest = requests
        .iter()
        .map(|r| r.prompt.len() as u64 + u64::from(r.params.max_tokens))
        .max();
    let needed = longest.unwrap_or(0).min(u64::from(subject.config.context_limit())) as u32;
    let mut options = load_options(
        formats,
        Some(args.context.unwrap_or(needed.max(2))),
        vocabulary,
        place,
        &args.engine,
    )?;
    if subject.checkpoint {
        let channels = ActivationMaxima::of_model(Path::new(&args.model), &subject.config, formats.precision);
        options.channels = channels.map_err(Failure::bad_job)?.map(Arc::new);
    }
    let mut model: Box<dyn Forward + Send> = if subject.checkpoint {
        let dir = Path::new(&args.model);
        load_model(dir, subject.config.clone(), place, &options, &args.engine)?
    } else {
        let weights = RandomWeights {
            seed: args.seed,
            dtype: Dtype::Bf16,
        };
        on_device(subject.config.clone(), &weights, place, &options, &args.engine)?
    };
    if args.explain {
        model.time_operations();
    }
    let mut options = engine_options(formats, &options, args.engine.step_limits(place));
    options.policy = Policy {
        sort: !args.without.contains(&Part::Sorting),
        share: !args.without.contains(&Part::Sharing),
        mix: !args.without.contains(&Part::Mixing),
        refill: !args.without.contains(&Part::Refilling),
    };
    Ok(Engine::new(model, subject.tokenizer.clone(), options))
}

/// Results of serving the requests.
#[derive(Default)]
struct Served {
    seconds: f64,
    steps: Vec<StepRecord>,
    prompt: u64,
    cached: u64,
    generated: u64,
    failed: u64,
    /// Tokens that had to be computed: the last token of each sequence is sampled, but never
    /// computed.
    needed: u64,
}

/// Runs all requests, feeding the engine like a worker.
fn serve(engine: &mut Engine, requests: Vec<Request>) -> Result<Served, Failure> {
    let mut served = Served::default();
    let mut waiting = requests.into_iter().peekable();
    let start = Instant::now();
    while waiting.peek().is_some() || !engine.is_idle() {
        while engine.wants_more() {
            let Some(request) = waiting.next() else { break };
            let row = request.id.row;
            if let Err(refused) = engine.submit(request) {
                eprintln!("gristmill: request {row}: {refused}");
                served.failed += 1;
            }
        }
        let began = start.elapsed();
        let finished = engine.step()?;
        let (took, shape) = (start.elapsed() - began, engine.totals().last);
        match served.steps.last_mut() {
            // A model that runs ahead returns its last tokens after its last step.
            Some(last) if shape.tokens() == 0 => last.took += took,
            _ => served.steps.push(StepRecord { began, took, shape }),
        }
        for unit in finished {
            match unit.result {
                Ok(completion) => {
                    let tokens = completion.token_ids.len() as u64;
                    served.prompt += u64::from(completion.prompt_tokens);
                    served.cached += u64::from(completion.cached_tokens);
                    served.generated += tokens;
                    served.needed += u64::from(completion.prompt_tokens.saturating_sub(completion.cached_tokens));
                    served.needed += tokens.saturating_sub(1);
                }
                Err(error) => {
                    eprintln!("gristmill: request {}: {error}", unit.id.row);
                    served.failed += 1;
                }
            }
        }
    }
    served.seconds = start.elapsed().as_secs_f64();
    Ok(served)
}

fn measure(
    args: &BenchArgs,
    engine: &mut Engine,
    requests: Vec<Request>,
    (place, formats): (ResolvedDevice, Formats),
) -> Result<(Figures, Vec<StepRecord>), Failure> {
    let count = requests.len() as u64;
    let before = operations(engine);
    let served = serve(engine, requests)?;
    let seconds = served.seconds;
    let most = args.engine.step_limits(place);
    let batches = Batches::of(
        &served.steps,
        seconds,
        served.needed,
        most.step_tokens as usize,
        most.sequences as usize,
    );
    let figures = Figures {
        model: args.model.clone(),
        precision: formats.precision_word().into(),
        kv_cache: formats.kv_word().into(),
        isa: match place {
            ResolvedDevice::Cpu => args.engine.instructions.unwrap_or_else(Isa::detect).to_string(),
            ResolvedDevice::Cuda(ordinal) => Cuda::probe(ordinal)?.name,
        },
        threads: crate::cli::setup::threads(&args.engine),
        requests: count,
        failed: served.failed,
        prompt_tokens: served.prompt,
        cached_tokens: served.cached,
        generated_tokens: served.generated,
        computed_tokens: batches.prefill_tokens + batches.decode_tokens,
        seconds,
        requests_per_second: count as f64 / seconds,
        prompt_tokens_per_second: served.prompt as f64 / seconds,
        generated_tokens_per_second: served.generated as f64 / seconds,
        total_tokens_per_second: (served.prompt + served.generated) as f64 / seconds,
        peak_memory_bytes: peak_memory()?,
        seconds_by_operation: by_operation(&before, operations(engine), seconds),
        batches,
    };
    Ok((figures, served.steps))
}

/// Seconds spent so far, by operation.
fn operations(engine: &Engine) -> Vec<(String, f64)> {
    let totals = engine.totals();
    let mut all = vec![("plan".to_string(), totals.planning.as_secs_f64())];
    for (name, time) in engine.operation_times() {
        all.push((name.to_string(), time.as_secs_f64()));
    }
    all.push(("advance".to_string(), totals.advance.as_secs_f64()));
    all
}

fn by_operation(before: &[(String, f64)], after: Vec<(String, f64)>, seconds: f64) -> Vec<(String, f64)> {
    let mut all = after;
    for ((_, after), (_, before)) in all.iter_mut().zip(before) {
        *after -= before;
    }
    let known: f64 = all.iter().map(|(_, seconds)| seconds).sum();
    all.push(("other".to_string(), (seconds - known).max(0.0)));
    all
}

/// Peak resident set size of this process, in bytes.
fn peak_memory() -> anyhow::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("cannot read this process's memory use")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    Ok(kib.context("the system does not say this process's peak memory")? << 10)
}
