//! Arguments of `gristmill quantize`.

use std::path::PathBuf;

use clap::Args;

use crate::cli::args::{EngineArgs, parameter};
use crate::model::quantize::Scheme;

#[derive(Debug, Args)]
pub(crate) struct QuantizeArgs {
    /// A folder, `hf://organisation/name@revision`, or a folder in a bucket, with weights in F32, F16 or BF16
    #[arg(value_name = "MODEL")]
    pub model: String,
    /// `int8` (weights and activations, W8A8), `fp8` (the same in E4M3), or `w4a16` (weights alone, in 4 bits with a factor per
    /// group)
    #[arg(long, value_name = "SCHEME", value_parser = scheme)]
    pub to: Scheme,
    /// The folder that is written; one that was interrupted is gone on with
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// A job of this model, by whose prompts weights are balanced (int8) or rounded (w4a16), and the result is compared with the
    /// model
    #[arg(long, value_name = "JOB")]
    pub calibrate: Option<PathBuf>,
    /// What `${NAME}` stands for in the job file's texts; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = parameter, requires = "calibrate")]
    pub set: Vec<(String, String)>,
    /// Rows of the job whose prompts are run, from all over the input
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    pub rows: u64,
    /// Memory for sums over activations, in MiB: if all layers need more, the prompts are run several times (w4a16)
    #[arg(long, value_name = "MIB", default_value_t = 4096, value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    pub sums_memory: u64,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Print the result as one JSON object, last on stdout
    #[arg(long)]
    pub json: bool,
}

fn scheme(text: &str) -> Result<Scheme, String> {
    let found = Scheme::ALL.into_iter().find(|scheme| scheme.name() == text);
    found.ok_or_else(|| format!("it is {}", Scheme::ALL.map(Scheme::name).join(", ")))
}
