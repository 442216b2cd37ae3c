//! Arguments of `gristmill dashboard`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{ArgAction, Args};

#[derive(Debug, Args)]
pub(crate) struct DashboardArgs {
    /// Output folders or URLs of jobs, or prefixes below which outputs lie
    #[arg(required = true, value_name = "OUTPUT")]
    pub outputs: Vec<String>,
    /// Where to listen: a port of this machine alone, or at ADDRESS (0.0.0.0 for everybody, which needs --keys)
    #[arg(long, value_name = "[ADDRESS:]PORT", default_value = "8680", value_parser = crate::http::parse_address)]
    pub listen: SocketAddr,
    /// Who may look (YAML): the SHA-256 of each key, as for `gristmill serve`; each key sees all outputs
    #[arg(long, value_name = "FILE")]
    pub keys: Option<PathBuf>,
    /// Show jobs, and refuse to cancel, extend and retry them
    #[arg(long)]
    pub read_only: bool,
    /// Whether to show prompts and answers of rows
    #[arg(long, value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    pub prompts: bool,
    /// Where inputs may lie whose prompts are shown. Without it they are read as a worker reads them: those of an output in a bucket in
    /// the same bucket, and no web server is asked
    #[arg(long, value_name = "PREFIX", env = "GRISTMILL_ACCEPT_INPUTS", value_delimiter = ',')]
    pub accept_inputs: Vec<String>,
}
