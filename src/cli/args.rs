//! The command line: what can be asked for, checked by clap.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(
    name = "gristmill",
    version,
    about = "Grinds whole datasets through a language model",
    max_term_width = 100
)]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a whole job on this machine; run it again to go on where it stopped
    Run(RunArgs),
    /// Read and tokenize every row without running the model: counts, lengths, cost
    Plan(PlanArgs),
    /// Work on the shards that a queue names, of all jobs of one model
    Worker(WorkerArgs),
    /// Say how far a job is, from its output alone
    Status(OutputArgs),
    /// Show a job's progress until it ends
    Watch(WatchArgs),
    /// Prove that a finished job holds every row exactly once
    Verify(OutputArgs),
}

#[derive(Debug, Args)]
pub struct RunArgs {
    /// The job file (YAML or JSON)
    pub job: PathBuf,
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
}

#[derive(Debug, Args)]
pub struct WorkerArgs {
    /// The queue: kafka://host:port/topic, amqp://host/vhost/queue or amqps://…
    #[arg(long, value_name = "URL", env = "GRISTMILL_QUEUE")]
    pub queue: String,
    /// A librdkafka property, such as session.timeout.ms=10000 (repeat for more; secrets belong in the environment)
    #[arg(long, value_name = "KEY=VALUE")]
    pub kafka: Vec<String>,
    /// The checkpoint's folder (default: the model of the first shard that comes)
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Number format to compute in, where --model names the checkpoint
    #[arg(long, value_name = "FORMAT", default_value = "auto", value_parser = ["auto", "f32", "bf16"])]
    pub precision: String,
    /// Longest sequence in tokens (default: what the first job or the checkpoint says)
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..))]
    pub context: Option<u32>,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// End when the ledgers of all jobs that came say that they are done
    #[arg(long, conflicts_with = "once")]
    pub until_idle: bool,
    /// End when the queue has nothing more
    #[arg(long)]
    pub once: bool,
    /// End after so many shards
    #[arg(long, value_name = "N")]
    pub max_shards: Option<u64>,
    /// Seconds without a message before --once, or --until-idle that has heard of no job, ends
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0, value_parser = positive_seconds)]
    pub idle_after: f64,
    /// The output of a job that must be done, too, before --until-idle ends (repeat for more)
    #[arg(long, value_name = "OUTPUT")]
    pub job: Vec<String>,
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
    /// A port that answers HTTP 200 while the worker makes progress, 503 when it hangs
    #[arg(long, value_name = "PORT")]
    pub liveness_port: Option<u16>,
    /// Leave in good order when this cloud gives notice that it takes the spot machine away
    #[arg(long, value_name = "CLOUD", value_enum)]
    pub spot: Option<crate::worker::spot::Cloud>,
    /// Print the result as one JSON object, last on stdout
    #[arg(long)]
    pub json: bool,
    /// No progress on stderr, only warnings and errors
    #[arg(long, short)]
    pub quiet: bool,
}

#[derive(Debug, Args)]
pub struct PlanArgs {
    /// The job file (YAML or JSON)
    pub job: PathBuf,
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
pub struct LimitArgs {
    /// Only the first N rows, into a folder of their own below the job's output
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub limit: Option<u64>,
}

#[derive(Debug, Args)]
pub struct EngineArgs {
    /// Threads that compute (default: all cores)
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads: Option<usize>,
    /// Memory for keys and values of running sequences, in MiB (default: an eighth of what this machine or container has)
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pub kv_memory: Option<u64>,
    /// Most tokens computed in one step
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub step_tokens: u32,
    /// Most sequences that run at once
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    pub sequences: u32,
}

#[derive(Debug, Args)]
pub struct OutputArgs {
    /// The job's output folder or URL
    pub output: String,
    /// Print the result as one JSON object, last on stdout
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct WatchArgs {
    /// The job's output folder or URL
    pub output: String,
    /// Seconds between looks
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, value_parser = positive_seconds)]
    pub every: f64,
}

fn threads(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|n| (1..=4096).contains(n))
        .ok_or_else(|| "give a whole number from 1 to 4096".into())
}

fn positive_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(s) if s.is_finite() && s > 0.0 && s <= 86_400.0 => Ok(s),
        _ => Err("give a number of seconds above 0 and at most 86400".into()),
    }
}
