//! `gristmill run`: the whole job on this machine. Plans, works, publishes; run again, it goes on where it stopped.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;

use crate::cli::args::RunArgs;
use crate::cli::door::{self, Columns, Opened, Stream};
use crate::cli::exit::{Exit, Failure};
use crate::dataset::DatasetError;
use crate::dataset::part::OpenaiMeta;
use crate::dataset::shard::ShardReader;
use crate::device::cpu::thread_pool;
use crate::engine::{Engine, EngineOptions};
use crate::job::Renderer;
use crate::job::file::OutputFormat;
use crate::ledger::{Ledger, LedgerError, Order, StopWhy};
use crate::model::transformer::{KvBudget, LoadOptions, Transformer};
use crate::queue::{LocalQueue, Message};
use crate::report::meter::Meter;
use crate::report::progress::{self, Goal};
use crate::report::summary::Summary;
use crate::worker::stop::{Stop, Why};
use crate::worker::{self, PartFormat, Worker};

pub async fn run(args: RunArgs) -> Result<Exit, Failure> {
    let opened = Opened::open(&args.job, args.limit.limit)?;
    opened.check_shape()?;
    let identity = opened.identity()?;
    let ledger = match Ledger::open(&opened.output).await.map_err(refusal)? {
        Some(ledger) => {
            ledger.check_same(&opened.job.name, &identity).map_err(refusal)?;
            ledger
        }
        None => {
            let plan = opened.plan().await?;
            let draft = opened.draft(plan, identity)?;
            Ledger::create_or_resume(&opened.output, draft)
                .await
                .map_err(refusal)?
                .0
        }
    };
    if ledger.finish_check(None).await?.is_some() {
        if !args.quiet {
            eprintln!("job `{}` is already done: nothing to do", opened.job.name);
        }
        return report(&opened, &ledger, &args).await;
    }
    resume_if_extended(&opened, &ledger).await?;

    let stop = Stop::default();
    stop_on_signals(stop.clone())?;
    let why = work(&opened, &ledger, &args, stop).await?;
    let rows = report(&opened, &ledger, &args).await?;
    let (exit, said) = match why {
        None => return Ok(rows),
        Some(Why::Interrupted) => (Exit::Interrupted, "interrupted; run the same command again to go on"),
        Some(Why::Budget) => (
            Exit::Stopped,
            "the budget is reached; raise `budget.usd` and run again to go on",
        ),
        Some(Why::Deadline) => (
            Exit::Stopped,
            "the deadline is reached; raise `budget.deadline` and run again to go on",
        ),
        Some(Why::Cancelled) => (Exit::Cancelled, "the job was cancelled"),
        Some(Why::Failed) => (Exit::Failure, "a stage failed"),
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

/// A job that stopped at its budget or deadline goes on once the job file allows more.
async fn resume_if_extended(opened: &Opened, ledger: &Ledger) -> Result<(), Failure> {
    let mut control = ledger.control().await?;
    let budget = &opened.job.budget;
    let goes_on = match control.stopped() {
        None => return Ok(()),
        Some(StopWhy::Cancelled) => false,
        Some(StopWhy::Budget) => {
            let spent = ledger.spent().await?.device_seconds;
            let usd = budget.usd_per_hour.map_or(0.0, |price| spent / 3600.0 * price);
            budget.usd.is_none_or(|most| usd < most)
        }
        Some(StopWhy::Deadline) => {
            let passed = chrono::Utc::now() - ledger.created_at();
            budget
                .deadline_seconds
                .is_none_or(|most| passed.num_seconds() < most as i64)
        }
    };
    if goes_on {
        control
            .give(Order::Extend {
                budget_usd: budget.usd,
                deadline_seconds: budget.deadline_seconds,
            })
            .await?;
    }
    Ok(())
}

/// Builds the worker and runs it.
async fn work(opened: &Opened, ledger: &Ledger, args: &RunArgs, stop: Stop) -> Result<Option<Why>, Failure> {
    let job = ledger.job();
    let renderer = opened.renderer(&Stream::of(&opened.job, ledger))?;
    let columns: Columns = serde_json::from_value(job.columns.clone())?;
    let reader = ShardReader::new(job.inputs.clone(), columns.carry_schema, renderer.columns());
    let engine = load_engine(opened, &renderer, args)?;
    let before = ledger.status().await?;
    let meter = Arc::new(Meter::default());
    let worker = Worker {
        name: format!("run-{}", crate::ledger::Id::random()?),
        ledger: ledger.clone(),
        queue: Arc::new(LocalQueue::new(messages(ledger).await?)),
        reader,
        renderer: Arc::new(renderer),
        output: columns.output,
        format: part_format(opened, ledger),
        meter: meter.clone(),
        options: worker::Options {
            log_interval: Duration::from_secs_f64(args.log_interval),
            usd_per_hour: opened.job.budget.usd_per_hour,
            usd_max: opened.job.budget.usd,
            deadline: opened.job.budget.deadline_seconds.map(Duration::from_secs),
        },
    };
    let goal = Goal {
        rows: before.rows,
        rows_before: before.tally.rows(),
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
async fn messages(ledger: &Ledger) -> Result<Vec<Message>, Failure> {
    let job = ledger.job();
    let mut messages = Vec::new();
    for shard in 0..job.shards.len() as u32 {
        if !ledger.is_committed(shard).await? {
            messages.push(Message::new(job.job.to_string(), shard));
        }
    }
    Ok(messages)
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
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let precision = opened.precision();
    let options = LoadOptions {
        precision,
        kv: KvBudget::Bytes(args.engine.kv_memory.map_or_else(default_kv_bytes, |mib| mib << 20)),
        threads: thread_pool(args.engine.threads.unwrap_or(cores)).context("cannot start the threads")?,
        max_context: None,
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

/// An eighth of the machine's memory; 1 GiB where that cannot be told.
fn default_kv_bytes() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = total.and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kib.map_or(1 << 30, |kib| (kib << 10) / 8)
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
    });
    Ok(())
}

/// Prints the report; the exit code that the rows alone would give.
async fn report(opened: &Opened, ledger: &Ledger, args: &RunArgs) -> Result<Exit, Failure> {
    let mut summary: Summary = door::summary(ledger, opened.output.url.as_str()).await?;
    if let Some(gold) = &opened.job.gold
        && ledger.success().await?.is_some()
    {
        summary.agreement = Some(crate::report::agreement::of_parts(ledger, gold).await?);
    }
    if args.json {
        println!("{}", serde_json::to_string(&summary)?);
    } else if !args.quiet {
        for line in summary.lines() {
            println!("{line}");
        }
    }
    Ok(Exit::of_rows(&summary.rows))
}
