//! Arguments of `gristmill jobs`.

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct JobsArgs {
    /// A folder or URL below which outputs lie: `out/`, `s3://bucket/`, `s3://bucket/team/`
    pub prefix: String,
    /// The trials of `--limit`, too
    #[arg(long)]
    pub trials: bool,
    /// Print the list as one JSON object, last on stdout
    #[arg(long)]
    pub json: bool,
}
