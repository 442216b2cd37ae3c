//! Arguments of `gristmill bench`.

use std::path::PathBuf;

use clap::Args;

use super::EngineArgs;
use super::formats::{requested_kv_format, requested_precision};
use crate::job::precision::{RequestedKvFormat, RequestedPrecision};

/// Parts of batching that a measurement can go without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum BatchingFeature {
    /// Order waiting prompts by prefix and length
    Sorting,
    /// Compute equal beginnings of prompts once
    Sharing,
    /// Compute prompts and the next tokens of others in the same steps
    Mixing,
    /// Start requests as others end (continuous batches), not when all have ended (static ones)
    Refilling,
}

/// Where a benchmark's weights come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LoadFormat {
    /// The folder; random numbers for the name of a shape
    Auto,
    /// Random numbers: of the folder, `config.json` is enough
    Dummy,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// A checkpoint's folder, or the name of a published shape to be filled with random weights
    #[arg(long, value_name = "DIR|SHAPE")]
    pub model: String,
    /// Where the weights come from
    #[arg(long, value_enum, value_name = "FROM", default_value_t = LoadFormat::Auto)]
    pub load_format: LoadFormat,
    /// A LoRA adapter beside the model; may be repeated. Requests are of the model alone and of each adapter in turn
    #[arg(long, value_name = "ADAPTER")]
    pub mix_adapter: Vec<String>,
    /// Requests, a JSON object a line: `prompt` or `prompt_token_ids`, `max_tokens`, and what else docs/bench.md lists
    #[arg(long, value_name = "FILE", conflicts_with_all = ["input_len", "output_len", "requests"])]
    pub trace: Option<PathBuf>,
    /// Prompt tokens of each request, drawn at random
    #[arg(long, value_name = "TOKENS", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub input_len: u32,
    /// Tokens that each request generates
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub output_len: u32,
    /// How many requests
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub requests: u32,
    /// Generate `max_tokens` whatever the model says (always so without --trace)
    #[arg(long)]
    pub ignore_eos: bool,
    /// Number format to compute in
    #[arg(long, value_name = "FORMAT", default_value = "auto", value_parser = requested_precision())]
    pub precision: RequestedPrecision,
    /// Longest sequence in tokens (default: what the longest request needs)
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..))]
    pub context: Option<u32>,
    /// What random prompts and random weights are drawn from
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Number format of keys and values (auto: the precision's own)
    #[arg(long, visible_alias = "kv-dtype", value_name = "FORMAT", default_value = "auto", value_parser = requested_kv_format())]
    pub kv_cache: RequestedKvFormat,
    /// Run so many of the requests before the clock starts, and then again
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub warm_up: usize,
    /// Go without parts of batching, to see what they are worth
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    pub without: Vec<BatchingFeature>,
    /// Say how the requests were batched: steps, their tokens, what was computed twice
    #[arg(long)]
    pub explain: bool,
    /// Draw the steps' tokens over time to this SVG file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Print the result as one JSON object, last on stdout
    #[arg(long)]
    pub json: bool,
}
