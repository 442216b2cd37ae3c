//! `gristmill completions`: prints a script that completes command lines in a shell.

use clap::CommandFactory;

use crate::cli::args::{Arguments, CompletionsArgs};
use crate::cli::exit::{Exit, Failure};

pub(super) fn completions(args: &CompletionsArgs) -> Result<Exit, Failure> {
    let mut script = Vec::new();
    clap_complete::aot::generate(args.shell, &mut Arguments::command(), "gristmill", &mut script);
    println!("{}", String::from_utf8(script)?.trim_end());
    Ok(Exit::Done)
}
