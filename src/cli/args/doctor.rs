//! Arguments of `gristmill doctor`, for a GPU or for a job.

use std::path::PathBuf;

use clap::Args;

use super::formats::gpu_precision;
use super::{QueueArgs, parameter};
use crate::cli::device_choice::DeviceChoice;
use crate::device::Precision;

/// Arguments for a GPU, which conflict with a job.
const GPU_ARGUMENTS: [&str; 5] = ["device", "quick", "model", "formats", "no_cublaslt"];

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// A job file: checks its model, its store and its queue, and examines no GPU
    #[arg(value_name = "JOB", conflicts_with_all = GPU_ARGUMENTS)]
    pub job: Option<PathBuf>,
    /// What `${NAME}` stands for in the job file's texts; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = parameter, requires = "job")]
    pub set: Vec<(String, String)>,
    #[command(flatten)]
    pub queue: QueueArgs,
    /// The GPU: `cuda:0` on
    #[arg(long, value_name = "DEVICE", default_value = "cuda:0")]
    pub device: DeviceChoice,
    /// Small sizes only, and no times
    #[arg(long)]
    pub quick: bool,
    /// A checkpoint (a folder, `hf://organisation/name`, or a folder in a bucket), to be held against the CPU besides the small models that are built in; may be given several times
    #[arg(long, value_name = "MODEL")]
    pub model: Vec<String>,
    /// A format to examine (default: all that the card computes in); may be given several times
    #[arg(long = "precision", value_name = "FORMAT", value_parser = gpu_precision())]
    pub formats: Vec<Precision>,
    /// Do not examine cuBLASLt's linear operations
    #[arg(long)]
    pub no_cublaslt: bool,
    /// Print the result as one JSON object on stdout; what is found goes to stderr as it is
    #[arg(long)]
    pub json: bool,
}
