//! The command line, parsed and checked by clap.

mod bench;
mod completions;
mod dashboard;
mod doctor;
mod examples;
mod formats;
mod inspect;
mod jobs;
mod quantize;
mod serve;
mod traces;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::cli::args::formats::{recheck_precision, requested_kv_format, requested_precision};
use crate::cli::device_choice::{DeviceChoice, ResolvedDevice};
use crate::cli::log::LogFormat;
use crate::cli::version::long_version;
use crate::device::Precision;
use crate::device::cpu::Isa;
use crate::job::generate::MAX_TOKENS_MAX;
use crate::job::precision::{RequestedKvFormat, RequestedPrecision};
use crate::job::spec::duration_seconds;
pub(super) use crate::report::shell_word;
pub(super) use bench::{BatchingFeature, BenchArgs, LoadFormat};
pub(super) use completions::{CompletionsArgs, ManArgs};
pub(super) use dashboard::DashboardArgs;
pub(super) use doctor::DoctorArgs;
pub(super) use inspect::InspectArgs;
pub(super) use jobs::JobsArgs;
pub(super) use quantize::QuantizeArgs;
pub(super) use serve::ServeArgs;
pub(super) use traces::TraceArgs;

#[derive(Debug, Parser)]
#[command(
    name = "gristmill",
    version,
    long_version = long_version(),
    about = "Grinds whole datasets through a language model",
    max_term_width = 100
)]
pub(super) struct Arguments {
    /// How lines on stderr are written: as text for people, or as one JSON object per line
    #[arg(long, global = true, value_name = "FORMAT", value_enum, default_value_t = LogFormat::Text, env = "GRISTMILL_LOG_FORMAT")]
    pub log_format: LogFormat,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Run a whole job on this machine; run it again to go on where it stopped
    #[command(after_help = examples::RUN)]
    Run(RunArgs),
    /// Read and tokenize every row without running the model: counts, lengths, cost
    #[command(after_help = examples::PLAN)]
    Plan(PlanArgs),
    /// Work on the shards that a queue names, of all jobs of one model
    #[command(after_help = examples::WORKER)]
    Worker(Box<WorkerArgs>),
    /// Serve OpenAI's batch API (/v1/files, /v1/batches): clients upload requests, workers answer them
    #[command(after_help = examples::SERVE)]
    Serve(Box<ServeArgs>),
    /// Write a job's ledger and enqueue its shards for workers; again: enqueue what is not done
    #[command(after_help = examples::SUBMIT)]
    Submit(SubmitArgs),
    /// Say how far a job is, from its output alone
    Status(OutputArgs),
    /// List the jobs below a folder or bucket: how far each is, from its output alone
    Jobs(JobsArgs),
    /// Show a job's progress until it ends
    Watch(WatchArgs),
    /// Show jobs on a page in the browser, from their outputs alone
    #[command(after_help = examples::DASHBOARD)]
    Dashboard(DashboardArgs),
    /// Prove that a finished job holds every row exactly once
    Verify(VerifyArgs),
    /// Run a sample of a finished job's rows again in a higher precision, and say how many answers are the same
    Recheck(RecheckArgs),
    /// Say what a checkpoint is, how much memory it needs, and what it is refused for, if anything; its weights need not be there
    #[command(after_help = examples::INSPECT)]
    Inspect(InspectArgs),
    /// Measure how large a model's channels get on a job's prompts, to balance its weights by for 8 bits
    Calibrate(CalibrateArgs),
    /// Write a checkpoint with weights of 8 or 4 bits, which vLLM, SGLang and transformers read, too
    #[command(after_help = examples::QUANTIZE)]
    Quantize(Box<QuantizeArgs>),
    /// Stop a job for good: workers write what is finished and start nothing more
    Cancel(CancelArgs),
    /// Run the failed (or the truncated) rows of a finished job again, as its next generation
    Retry(RetryArgs),
    /// Raise the budget or the deadline of a job, stopped or not
    Extend(ExtendArgs),
    /// Enqueue shards that nobody moves, and finish jobs whose last step was lost
    Reconcile(ReconcileArgs),
    /// Remove ledger data that a finished job no longer needs (shows it, unless --yes)
    Clean(CleanArgs),
    /// Measure the engine on this machine: throughput of a model over a trace or over prompts of one length
    Bench(BenchArgs),
    /// Hold a GPU's kernels against the CPU, before it is trusted with a night's job; or check a job's model, store and queue
    Doctor(DoctorArgs),
    /// Print a script that completes command lines in a shell
    Completions(CompletionsArgs),
    /// Print the man page, or write the pages of all commands into a folder
    Man(ManArgs),
}

impl Command {
    /// The argument for traces, if the command has any.
    pub(super) fn traces(&self) -> Option<&TraceArgs> {
        match self {
            Command::Run(args) => Some(&args.traces),
            Command::Worker(args) => Some(&args.traces),
            Command::Serve(args) => Some(&args.traces),
            _ => None,
        }
    }
}

/// A job file, and what its parameters stand for.
#[derive(Debug, Clone, Args)]
pub(super) struct JobArgs {
    /// The job file (YAML or JSON); `-` reads it from standard input
    #[arg(value_name = "JOB")]
    pub path: PathBuf,
    /// What `${NAME}` stands for in the job file's texts; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = parameter)]
    pub set: Vec<(String, String)>,
}

impl JobArgs {
    /// Shell arguments that name the same job again.
    pub(super) fn shell_arguments(&self) -> String {
        let path = std::iter::once(self.path.display().to_string());
        let set = self
            .set
            .iter()
            .flat_map(|(name, value)| ["--set".into(), format!("{name}={value}")]);
        let words = path.chain(set).map(|word| shell_word(&word));
        words.collect::<Vec<_>>().join(" ")
    }
}

fn parameter(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_string(), value.to_string())),
        _ => Err("give NAME=VALUE, such as `date=2026-11-24`".into()),
    }
}

#[derive(Debug, Args)]
pub(super) struct RunArgs {
    #[command(flatten)]
    pub job: JobArgs,
    #[command(flatten)]
    pub limit: LimitArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Print the result as one JSON object, last on stdout
    #[arg(long)]
    pub json: bool,
    /// No progress on stderr, only errors
    #[arg(long, short)]
    pub quiet: bool,
    /// Seconds between writes of finished rows to the job's log: the most work that a kill can cost
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = positive_seconds)]
    pub log_interval: f64,
    #[command(flatten)]
    pub traces: TraceArgs,
}

#[derive(Debug, Args)]
pub(super) struct WorkerArgs {
    /// The queue: kafka://host:port/topic, amqp://host/vhost/queue or amqps://…
    #[arg(long, value_name = "URL", env = "GRISTMILL_QUEUE", hide_env_values = true)]
    pub queue: String,
    /// A property of librdkafka, such as session.timeout.ms=10000; may be given several times
    #[arg(long, value_name = "PROPERTY=VALUE", value_parser = property)]
    pub kafka: Vec<(String, String)>,
    /// The checkpoint: a folder, `hf://organisation/name@revision`, or a folder in a bucket (default: the model of the first shard
    /// that comes)
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// A LoRA adapter of --model, in PEFT's layout: an address as that of --model
    #[arg(long, value_name = "ADAPTER", requires = "model")]
    pub adapter: Option<String>,
    /// A LoRA adapter beside --model, which jobs with it and jobs without one share; may be repeated
    #[arg(long, value_name = "ADAPTER", requires = "model", conflicts_with = "adapter")]
    pub mix_adapter: Vec<String>,
    /// Number format to compute in, where --model names the checkpoint
    #[arg(long, value_name = "FORMAT", default_value = "auto", value_parser = requested_precision())]
    pub precision: RequestedPrecision,
    /// Number format of keys and values, where --model names the checkpoint (auto: the precision's own)
    #[arg(long, visible_alias = "kv-dtype", value_name = "FORMAT", default_value = "auto", value_parser = requested_kv_format())]
    pub kv_cache: RequestedKvFormat,
    /// Longest sequence in tokens (default: what the first job or the checkpoint says)
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..))]
    pub context: Option<u32>,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// End when all jobs whose messages came are done, by their ledgers
    #[arg(long, conflicts_with = "once")]
    pub until_idle: bool,
    /// End when the queue has nothing more
    #[arg(long)]
    pub once: bool,
    /// End after so many shards
    #[arg(long, value_name = "N")]
    pub max_shards: Option<u64>,
    /// Seconds without a message from an available broker before --once ends, or --until-idle if no job came
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0, value_parser = positive_seconds)]
    pub idle_after: f64,
    /// The output of a job that must be done, too, before --until-idle ends (repeat for more)
    #[arg(long, value_name = "OUTPUT")]
    pub job: Vec<String>,
    /// Where outputs and inputs of queued jobs may lie, and models that they name: nowhere but below such a prefix, as
    /// `s3://bucket/team/` or `/data/team/`; may be given several times. Without it: outputs in any bucket with inputs in the same
    /// one, and local outputs whose record belongs to this user
    #[arg(long, value_name = "PREFIX", env = "GRISTMILL_ACCEPT", value_delimiter = ',')]
    pub accept: Vec<String>,
    /// Where inputs may lie besides; web servers are read only where they are listed
    #[arg(long, value_name = "PREFIX", env = "GRISTMILL_ACCEPT_INPUTS", value_delimiter = ',')]
    pub accept_inputs: Vec<String>,
    /// Where a model may lie that a job names, without --model; models on the hub (`hf://organisation/`) and in buckets are fetched
    /// only where they are listed
    #[arg(long, value_name = "PREFIX", env = "GRISTMILL_ACCEPT_MODELS", value_delimiter = ',')]
    pub accept_models: Vec<String>,
    #[command(flatten)]
    pub on_finish: OnFinishArgs,
    /// Shards in memory at once: read ahead, running, being published
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub shards_in_flight: u32,
    /// Seconds between writes of finished rows to the jobs' logs: the most work that a kill can cost
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = positive_seconds)]
    pub log_interval: f64,
    /// Name in attempts and spendings (default: the host's); made unique by a random suffix
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// A file that is touched each second while the worker makes progress
    #[arg(long, value_name = "PATH")]
    pub liveness_file: Option<PathBuf>,
    /// A port that answers HTTP 200 while the worker makes progress, 503 when it hangs: of this machine alone, or at ADDRESS
    /// (0.0.0.0 for probes from elsewhere, such as the kubelet's)
    #[arg(long, value_name = "[ADDRESS:]PORT", value_parser = crate::http::parse_address)]
    pub liveness_port: Option<std::net::SocketAddr>,
    /// Leave in good order when this cloud gives notice that it takes the spot machine away
    #[arg(long, value_name = "CLOUD", value_enum)]
    pub spot: Option<crate::worker::spot::Cloud>,
    /// Print the result as one JSON object, last on stdout
    #[arg(long)]
    pub json: bool,
    /// No progress on stderr, only warnings and errors
    #[arg(long, short)]
    pub quiet: bool,
    #[command(flatten)]
    pub traces: TraceArgs,
}

#[derive(Debug, Args)]
pub(super) struct PlanArgs {
    #[command(flatten)]
    pub job: JobArgs,
    #[command(flatten)]
    pub limit: LimitArgs,
    /// Rendered prompts to show, picked at random
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub preview: usize,
    /// Tokens per second to reckon hours and dollars with, from a run of the same job (`run --limit`)
    #[arg(long, value_name = "TOKENS")]
    pub tokens_per_second: Option<f64>,
    /// Threads for reading and tokenizing
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads: Option<usize>,
    /// Print the plan as one JSON object, last on stdout
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(super) struct RecheckArgs {
    /// Of a finished job, whoever ran it
    #[command(flatten)]
    pub job: JobArgs,
    /// The job is the trial of the first N rows that `run --limit N` made
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub limit: Option<u64>,
    /// Rows to run again, from all over the job (default: the job file's `report.recheck.rows`, or 200)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub rows: Option<u64>,
    /// Number format to compute in, higher than the job's own (default: the job file's `report.recheck.precision`, or f32)
    #[arg(long, value_name = "FORMAT", value_parser = recheck_precision())]
    pub precision: Option<Precision>,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Print the result as one JSON object, last on stdout
    #[arg(long)]
    pub json: bool,
    /// No progress on stderr, only errors
    #[arg(long, short)]
    pub quiet: bool,
}

#[derive(Debug, Args)]
pub(super) struct CalibrateArgs {
    /// What is measured is written into its model's folder
    #[command(flatten)]
    pub job: JobArgs,
    /// Rows whose prompts are run, from all over the input
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    pub rows: u64,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Print the result as one JSON object, last on stdout
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(super) struct SubmitArgs {
    #[command(flatten)]
    pub job: JobArgs,
    #[command(flatten)]
    pub limit: LimitArgs,
    /// Where its workers compute, which says what `precision: auto` is: `cpu`, `cuda:0`, or `auto`, as this machine would
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: DeviceChoice,
    #[command(flatten)]
    pub queue: QueueArgs,
    /// Write the ledger only; `reconcile` enqueues, or `run` works it off
    #[arg(long, conflicts_with_all = ["queue", "kafka"])]
    pub no_enqueue: bool,
    /// Read, render and tokenize every row first, and refuse the job where none of them can be used
    #[arg(long)]
    pub preflight: bool,
    /// Print the result as one JSON object, last on stdout
    #[arg(long)]
    pub json: bool,
}

/// The queue that a command enqueues to.
#[derive(Debug, Clone, Args)]
pub(super) struct QueueArgs {
    /// `kafka://host:port,…/topic`, `amqp://user@host:port/vhost/queue` or `amqps://…`; passwords come from the
    /// environment (see docs/commands.md)
    #[arg(long, value_name = "URL")]
    pub queue: Option<String>,
    /// A property of librdkafka; may be given several times
    #[arg(long, value_name = "PROPERTY=VALUE", value_parser = property)]
    pub kafka: Vec<(String, String)>,
}

#[derive(Debug, Args)]
pub(super) struct CancelArgs {
    /// The job's output folder or URL
    pub output: String,
    /// End the job: workers publish the rows that are left as `cancelled`
    #[arg(long)]
    pub finish: bool,
    /// Print the result as one JSON object, last on stdout
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(super) struct RetryArgs {
    /// The job's output folder or URL
    pub output: String,
    #[command(flatten)]
    pub queue: QueueArgs,
    /// The rows with an answer that was cut off (finish_reason length), whatever their status, in place of the failed ones
    #[arg(long)]
    pub truncated: bool,
    /// Most tokens to generate for each answer of these rows, more than they had
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=i64::from(MAX_TOKENS_MAX)))]
    pub max_tokens: Option<u32>,
    /// Print the result as one JSON object, last on stdout
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
#[group(id = "limits", args = ["usd", "deadline"], required = true, multiple = true)]
#[command(
    override_usage = "gristmill extend OUTPUT [--usd DOLLARS] [--deadline TIME] [--json]\n       One of `--usd` and `--deadline`, or both"
)]
pub(super) struct ExtendArgs {
    /// The job's output folder or URL
    pub output: String,
    /// Dollars that the whole job may cost from now on, those already spent among them
    #[arg(long, value_name = "DOLLARS", value_parser = positive_dollars)]
    pub usd: Option<f64>,
    /// Time that the job may take from now on, counted from its start: `6h`, `90m`, `1h30m`
    #[arg(long, value_name = "TIME", value_parser = duration_seconds)]
    pub deadline: Option<u64>,
    /// Print the result as one JSON object, last on stdout
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(super) struct ReconcileArgs {
    /// Output folders or URLs of jobs
    #[arg(required = true, value_name = "OUTPUT")]
    pub outputs: Vec<String>,
    #[command(flatten)]
    pub queue: QueueArgs,
    /// Seconds between the two looks: a shard that nobody moved in between is enqueued. Longer than two log intervals of
    /// the workers
    #[arg(long, value_name = "SECONDS", default_value_t = 150.0, value_parser = positive_seconds, conflicts_with = "every")]
    pub interval: f64,
    /// Go on looking, every so many seconds
    #[arg(long, value_name = "SECONDS", value_parser = positive_seconds)]
    pub every: Option<f64>,
    /// Go on looking until every job has ended
    #[arg(long)]
    pub until_finished: bool,
    #[command(flatten)]
    pub on_finish: OnFinishArgs,
}

/// Who hears of a job's end from a process that reads jobs' records.
#[derive(Debug, Args)]
pub(super) struct OnFinishArgs {
    /// Web addresses that may be told when a job is done whose record names one (`on_finish.url`); without it, nothing is posted anywhere
    #[arg(
        long,
        value_name = "PREFIX",
        env = "GRISTMILL_ACCEPT_ON_FINISH",
        value_delimiter = ','
    )]
    pub accept_on_finish: Vec<String>,
}

#[derive(Debug, Args)]
pub(super) struct CleanArgs {
    /// The job's output folder or URL
    pub output: String,
    /// Remove it; without this, only say what would be removed
    #[arg(long)]
    pub yes: bool,
    /// Print the result as one JSON object, last on stdout
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(super) struct LimitArgs {
    /// Only the first N rows, into a folder of their own in `_limit/` beside the job's output
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub limit: Option<u64>,
}

#[derive(Debug, Clone, Args)]
pub(super) struct EngineArgs {
    /// Where to compute: `cpu`, `cuda:0` on, or `auto`, the first GPU where there is one
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: DeviceChoice,
    /// Threads that compute (default: all cores)
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads: Option<usize>,
    /// Memory for keys and values of running sequences, in MiB (default: what is left of a GPU's; an eighth of this machine's or
    /// container's)
    #[arg(long, value_name = "MIB", value_parser = mebibytes)]
    pub kv_memory: Option<u64>,
    /// Instructions that the CPU's kernels use: `avx512-bf16`, `avx512-vnni`, `avx2`, `portable`... (default: the best there are)
    #[arg(long, value_name = "SET")]
    pub instructions: Option<Isa>,
    /// Linear operations by gristmill's own kernels alone, and never by cuBLASLt where that is faster
    #[arg(long)]
    pub no_cublaslt: bool,
    /// Most tokens computed in one step (default: 512, with experts 1024; 8192 on a GPU)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub step_tokens: Option<u32>,
    /// Most sequences that run at once (default: 256; 512 on a GPU)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    pub sequences: Option<u32>,
}

impl EngineArgs {
    /// Maximum tokens and sequences per step, of a model with or without experts. A GPU needs larger steps before compute, instead
    /// of memory bandwidth, becomes the bottleneck, and so do experts, each of which gets a few of the tokens. Otherwise, what a CPU's
    /// step writes should stay in its caches: see docs/decisions/120-steps-fit-the-caches.md.
    pub(super) fn step_limits(&self, device: ResolvedDevice, has_experts: bool) -> StepLimitArgs {
        let step_tokens = match (device, has_experts) {
            (ResolvedDevice::Cpu, false) => 512,
            (ResolvedDevice::Cpu, true) => 1024,
            (ResolvedDevice::Cuda(_), _) => 8192,
        };
        StepLimitArgs {
            step_tokens: self.step_tokens.unwrap_or(step_tokens),
            sequences: self.max_sequences(device),
        }
    }

    pub(super) fn max_sequences(&self, device: ResolvedDevice) -> u32 {
        let default = match device {
            ResolvedDevice::Cpu => 256,
            ResolvedDevice::Cuda(_) => 512,
        };
        self.sequences.unwrap_or(default)
    }
}

/// Limits of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StepLimitArgs {
    pub step_tokens: u32,
    pub sequences: u32,
}

#[derive(Debug, Args)]
pub(super) struct OutputArgs {
    /// The job's output folder or URL
    pub output: String,
    /// Print the result as one JSON object, last on stdout
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(super) struct VerifyArgs {
    /// The job's output folder or URL
    pub output: String,
    /// Read the inputs, too, and compare the carried columns of every row with them
    #[arg(long)]
    pub inputs: bool,
    /// With --inputs: where these may lie besides. Without it they are read as a worker reads them: those of an output in a bucket in
    /// the same bucket, and no web server is asked
    #[arg(long, value_name = "PREFIX", env = "GRISTMILL_ACCEPT_INPUTS", value_delimiter = ',')]
    pub accept_inputs: Vec<String>,
    /// Print the result as one JSON object, last on stdout
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(super) struct WatchArgs {
    /// The job's output folder or URL
    pub output: String,
    /// Seconds between looks
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, value_parser = positive_seconds)]
    pub every: f64,
    /// A JSON object a line, with the keys of `status --json`, whenever something has changed; the last one tells the end
    #[arg(long)]
    pub json: bool,
}

fn threads(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|n| (1..=4096).contains(n))
        .ok_or_else(|| "give a whole number from 1 to 4096".into())
}

fn mebibytes(text: &str) -> Result<u64, String> {
    text.parse()
        .ok()
        .filter(|mib| (1..=1 << 30).contains(mib))
        .ok_or_else(|| "give a whole number of MiB, such as 2048".into())
}

fn positive_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(s) if s.is_finite() && s > 0.0 && s <= 86_400.0 => Ok(s),
        _ => Err("give a number of seconds above 0 and at most 86400".into()),
    }
}

fn property(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.trim().is_empty() => Ok((name.trim().to_string(), value.to_string())),
        _ => Err("give PROPERTY=VALUE, such as `compression.type=zstd`".into()),
    }
}

fn positive_dollars(text: &str) -> Result<f64, String> {
    match text.trim_start_matches('$').parse::<f64>() {
        Ok(usd) if usd.is_finite() && usd > 0.0 => Ok(usd),
        _ => Err("give a number of dollars above 0".into()),
    }
}
