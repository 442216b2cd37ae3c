//! Arguments of `gristmill completions` and `gristmill man`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub shell: clap_complete::aot::Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// A folder to write the page of each command into; without it, the main page is printed
    #[arg(value_name = "DIR")]
    pub folder: Option<PathBuf>,
}
