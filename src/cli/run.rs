//! `gristmill run`: the whole job on this machine. Plans, works, publishes; run again, it goes on where it stopped.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;

use crate::cli::args::RunArgs;
use crate::cli::door::{self, Opened, Stream};
use crate::cli::exit::{Exit, Failure, one_line};
use crate::dataset::DatasetError;
use crate::dataset::output::OutputSchema;
use crate::dataset::part::OpenaiMeta;
use crate::dataset::shard::ShardReader;
use crate::device::cpu::thread_pool;
use crate::engine::{Engine, EngineOptions};
use crate::job::Renderer;
use crate::job::file::OutputFormat;
use crate::ledger::{Ledger, LedgerError, Order, StopWhy};
use crate::model::transformer::{KvBudget, LoadOptions, Transformer};
use crate::queue::{LocalQueue, Message};
use crate::report::agreement;
use crate::report::meter::Meter;
use crate::report::progress::{self, Goal};
use crate::report::summary::Summary;
use crate::worker::stop::{Stop, Why};
use crate::worker::{self, Limits, PartFormat, Worker};

pub async fn run(args: RunArgs) -> Result<Exit, Failure> {
    let opened = Opened::open(&args.job, args.limit.limit)?;
    opened.check_shape()?;
    let identity = opened.identity()?;
    let (ledger, resumed) = match Ledger::open(&opened.output).await.map_err(refusal)? {
        Some(ledger) => {
            ledger
                .check_same(&opened.job.name, &identity)
                .map_err(Failure::bad_job)?;
            ledger.store().clean_stages().await?;
            (ledger, true)
        }
        None => {
            let plan = opened.plan().await?;
            let draft = opened.draft(plan, identity)?;
            Ledger::create_or_resume(&opened.output, draft).await.map_err(refusal)?
        }
    };
    if ledger.finish_check(None).await?.is_some() {
        if !args.quiet {
            eprintln!("job `{}` is already done: nothing to do", opened.job.name);
        }
        return report(&opened, &ledger, &args).await;
    }
    let stopped = resume_if_extended(&opened, &ledger).await?.map(Why::from);
    let why = match stopped {
        Some(why) => Some(why),
        None => {
            let stop = Stop::default();
            stop_on_signals(stop.clone())?;
            work(&opened, &ledger, &args, resumed, stop).await?
        }
    };
    // The last part may have been published while the stop was on its way.
    if why.is_none() || ledger.success().await?.is_some() {
        return report(&opened, &ledger, &args).await;
    }
    if let Err(failure) = report(&opened, &ledger, &args).await {
        eprintln!("gristmill: no report: {}", one_line(&failure.error));
    }
    let (exit, said) = match why {
        Some(Why::Budget) => (
            Exit::Stopped,
            "the budget is reached; raise `budget.usd` and run again to go on",
        ),
        Some(Why::Deadline) => (
            Exit::Stopped,
            "the deadline is reached; raise `budget.deadline` and run again to go on",
        ),
        Some(Why::Cancelled) => (Exit::Cancelled, "the job was cancelled"),
        Some(Why::Interrupted) => (Exit::Interrupted, "interrupted; run the same command again to go on"),
        Some(Why::Failed) | None => (
            Exit::Failure,
            "the worker stopped without finishing; run the same command again",
        ),
    };
    eprintln!("gristmill: {said}");
    Ok(exit)
}

/// A ledger's refusal is the job file's fault where the output belongs to something else.
fn refusal(error: LedgerError) -> Failure {
    match error {
        LedgerError::Conflict { .. } => Failure::bad_job(error),
        _ => Failure::from(error),
    }
}

/// A job that stopped at its budget or deadline goes on once the job file allows more; else returns why it is stopped.
async fn resume_if_extended(opened: &Opened, ledger: &Ledger) -> Result<Option<StopWhy>, Failure> {
    let mut control = ledger.control().await?;
    let Some(stopped) = control.stopped() else {
        return Ok(None);
    };
    if stopped == StopWhy::Cancelled {
        return Ok(Some(stopped));
    }
    let seconds = ledger.spent().await?.device_seconds();
    let age = (chrono::Utc::now() - ledger.created_at()).to_std().unwrap_or_default();
    let reached = limits(opened, ledger).reached(seconds, age);
    if reached.is_none() {
        let budget = &opened.job.budget;
        control
            .give(Order::Extend {
                budget_usd: budget.usd,
                deadline_seconds: budget.deadline_seconds,
            })
            .await?;
    }
    Ok(reached)
}

/// The job file says how much; the price is the one the job was created with, since all its figures rest on it.
fn limits(opened: &Opened, ledger: &Ledger) -> Limits {
    Limits {
        usd: opened.job.budget.usd,
        usd_per_hour: ledger.job().usd_per_hour,
        deadline: opened.job.budget.deadline_seconds.map(Duration::from_secs),
    }
}

/// Builds the worker and runs it.
async fn work(
    opened: &Opened,
    ledger: &Ledger,
    args: &RunArgs,
    resumed: bool,
    stop: Stop,
) -> Result<Option<Why>, Failure> {
    let job = ledger.job();
    let renderer = opened.renderer(&Stream::of(&opened.job, ledger))?;
    let output: OutputSchema = serde_json::from_value(job.columns.clone())?;
    let reader = ShardReader::new(job.inputs.clone(), output.carry(), renderer.columns());
    let engine = load_engine(opened, &renderer, args)?;
    let before = ledger.status().await?;
    let meter = Arc::new(Meter::default());
    let worker = Worker {
        name: format!("run-{}", crate::ledger::Id::random()?),
        ledger: ledger.clone(),
        queue: Arc::new(LocalQueue::new(messages(ledger, resumed).await?)),
        reader,
        renderer: Arc::new(renderer),
        output,
        format: part_format(opened, ledger),
        meter: meter.clone(),
        render_threads: rayon::ThreadPoolBuilder::new()
            .num_threads(threads(args))
            .build()
            .context("cannot start the threads")?,
        options: worker::Options {
            log_interval: Duration::from_secs_f64(args.log_interval),
            limits: limits(opened, ledger),
            shards_in_flight: shards_in_flight(opened.job.shard_rows, args.engine.sequences),
        },
    };
    let goal = Goal {
        rows: before.rows,
        rows_before: before.tally.rows(),
        seconds_before: before.seconds,
        usd_per_hour: job.usd_per_hour,
    };
    let shown = progress::show(meter, goal, args.quiet);
    let ended = worker::run(Arc::new(worker), engine, stop).await;
    shown.abort();
    ended.map_err(|error| match error.downcast_ref::<DatasetError>() {
        // The inputs are not what was planned: the job's side, not ours.
        Some(DatasetError::InputChanged { .. }) => Failure::bad_job(error),
        _ => Failure::from(error),
    })
}

/// The shards that are not done: the embedded queue is that list in memory.
async fn messages(ledger: &Ledger, resumed: bool) -> Result<Vec<Message>, Failure> {
    let mut shards = ledger.uncommitted().await?;
    if resumed && !shards.is_empty() {
        // Another run may be at work on the same job: starting elsewhere, the two meet late.
        let mut bytes = [0; 8];
        getrandom::fill(&mut bytes).map_err(|e| anyhow::anyhow!("no random numbers: {e}"))?;
        let start = u64::from_le_bytes(bytes) % shards.len() as u64;
        shards.rotate_left(start as usize);
    }
    let job = ledger.job().job.to_string();
    let output = ledger.store().url().to_string();
    Ok(shards
        .into_iter()
        .map(|shard| Message::new(job.clone(), output.clone(), 0, shard))
        .collect())
}

/// At least four, and enough that small shards fill the batch twice.
fn shards_in_flight(shard_rows: u64, sequences: u32) -> u32 {
    let to_fill = (2 * u64::from(sequences)).div_ceil(shard_rows.max(1));
    to_fill.saturating_add(2).clamp(4, 64) as u32
}

fn threads(args: &RunArgs) -> usize {
    args.engine
        .threads
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

fn part_format(opened: &Opened, ledger: &Ledger) -> PartFormat {
    match opened.job.output.format {
        OutputFormat::Parquet => PartFormat::Parquet,
        OutputFormat::Openai => PartFormat::Openai(OpenaiMeta {
            job: ledger.job().job.to_string(),
            model: opened.job.model.clone(),
            created: ledger.created_at().timestamp(),
        }),
    }
}

fn load_engine(opened: &Opened, renderer: &Renderer, args: &RunArgs) -> Result<Engine, Failure> {
    let precision = opened.precision();
    let options = LoadOptions {
        precision,
        kv: KvBudget::Bytes(args.engine.kv_memory.map_or_else(default_kv_bytes, |mib| mib << 20)),
        threads: thread_pool(threads(args)).context("cannot start the threads")?,
        max_context: opened.job.context,
        vocabulary: Some(opened.tokenizer.vocab_size()),
    };
    let model = Transformer::load(&opened.model_dir, &options).map_err(Failure::bad_job)?;
    let options = EngineOptions {
        max_step_tokens: args.engine.step_tokens as usize,
        max_sequences: args.engine.sequences as usize,
        eos_token_ids: opened.eos_token_ids(renderer),
        prefix_root: format!("{precision:?}"),
    };
    Ok(Engine::new(Box::new(model), opened.tokenizer.clone(), options))
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
fn stop_on_signals(stop: Stop) -> Result<(), Failure> {
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

/// Prints the report; the exit code that the rows alone would give.
async fn report(opened: &Opened, ledger: &Ledger, args: &RunArgs) -> Result<Exit, Failure> {
    let mut summary: Summary = door::summary(ledger, opened.output.url.as_str()).await?;
    if let Some(gold) = &opened.job.gold
        && ledger.success().await?.is_some()
    {
        match agreement::of_parts(ledger, gold).await {
            Ok(agreement) => summary.agreement = Some(agreement),
            Err(error) => eprintln!("gristmill: no agreement: {}", one_line(&error.into())),
        }
    }
    if args.json {
        println!("{}", serde_json::to_string(&summary)?);
    } else {
        for line in summary.lines() {
            println!("{line}");
        }
    }
    Ok(Exit::of_rows(&summary.rows))
}
