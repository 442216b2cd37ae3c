//! Arguments of `gristmill inspect`.

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// A folder, `hf://organisation/name@revision`, or a folder in a bucket; of its files, `config.json` suffices
    #[arg(value_name = "MODEL")]
    pub model: String,
    /// Print what is found as one JSON object, last on stdout
    #[arg(long)]
    pub json: bool,
}
