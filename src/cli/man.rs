//! `gristmill man`: prints the program's man page, or writes the pages of all commands.

use std::fs;

use anyhow::Context;
use clap::CommandFactory;
use clap_mangen::Man;

use crate::cli::args::{Arguments, ManArgs};
use crate::cli::exit::{Exit, Failure};

pub(super) fn man(args: &ManArgs) -> Result<Exit, Failure> {
    let mut program = Arguments::command()
        .disable_help_subcommand(true)
        // The long version names this machine's processor, and a page is read on others.
        .long_version(env!("CARGO_PKG_VERSION"));
    program.build();
    let Some(folder) = &args.folder else {
        println!("{}", page(&program)?.1.trim_end());
        return Ok(Exit::Done);
    };
    fs::create_dir_all(folder).with_context(|| format!("`{}`", folder.display()))?;
    let commands = program.get_subcommands().filter(|command| !command.is_hide_set());
    for command in std::iter::once(&program).chain(commands) {
        let (name, text) = page(command)?;
        let path = folder.join(name);
        fs::write(&path, text).with_context(|| format!("`{}`", path.display()))?;
    }
    Ok(Exit::Done)
}

/// File name and text of a command's page.
fn page(command: &clap::Command) -> Result<(String, String), Failure> {
    let man = Man::new(command.clone()).source(concat!("gristmill ", env!("CARGO_PKG_VERSION")));
    let mut text = Vec::new();
    man.render(&mut text)?;
    // Text behind the options stands under a heading of its own, and here it is always examples.
    let text = String::from_utf8(text)?.replace(".SH EXTRA\nExamples:\n", ".SH EXAMPLES\n");
    Ok((man.get_filename(), text))
}
