//! The commands: arguments → command → exit code. A file a command; `prepare.rs` is what they share on the way in, and
//! `enqueue.rs` where they put shards.

mod answers;
mod args;
mod bench;
mod calibrate;
mod cancel;
mod checkup;
mod clean;
mod device_choice;
mod doctor;
mod enqueue;
mod exit;
mod extend;
mod first_job;
mod inputs;
mod jobs;
mod limits;
mod log;
mod on_finish;
mod plan;
mod prepare;
mod recheck;
mod reconcile;
mod retry;
mod run;
mod sampling;
mod setup;
mod status;
mod submit;
mod summary;
mod trial;
mod verify;
mod worker;

use std::io::ErrorKind;
use std::process::ExitCode;

use clap::Parser;

use crate::cli::args::{Arguments, Command};
use crate::cli::exit::{Exit, Failure, one_line};
use crate::say;
use crate::signing::Signing;

/// 128 and the number of SIGPIPE.
const OUTPUT_CLOSED: u8 = 141;

/// Parses the arguments, runs the command and maps its outcome to an exit code.
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    no_core_dumps();
    log::init();
    let result = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(Failure::from)
        .and_then(|runtime| {
            let result = runtime.block_on(command(arguments.command));
            // What still runs in the background after a stop must not hold up the end.
            runtime.shutdown_background();
            result
        });
    match result {
        Ok(Exit::Done) => end_of_output(),
        Ok(exit) => exit.into(),
        Err(failure) => {
            eprintln!("gristmill: {}", one_line(&failure.error));
            failure.exit.into()
        }
    }
}

/// Keeps this process's memory, which holds prompts and passwords, out of core dumps, unless `GRISTMILL_CORE_DUMPS` is 1.
fn no_core_dumps() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    if std::env::var_os("GRISTMILL_CORE_DUMPS").is_some_and(|value| value == "1") {
        return;
    }
    let maximum = getrlimit(Resource::Core).maximum;
    // Too small for any file. Where dumps go to a program (`core_pattern` with `|`), Linux ignores 0, and takes 1 for "none".
    let current = Some(maximum.map_or(1, |maximum| maximum.min(1)));
    if let Err(error) = setrlimit(Resource::Core, Rlimit { current, maximum }) {
        eprintln!("gristmill: core dumps stay possible, and would hold prompts: {error}");
    }
}

/// A command whose work is done, as a filter ends: where nobody read its output to the end, as if SIGPIPE had ended it.
fn end_of_output() -> ExitCode {
    match say::closed() {
        None => Exit::Done.into(),
        Some(ErrorKind::BrokenPipe) => ExitCode::from(OUTPUT_CLOSED),
        Some(error) => {
            eprintln!("gristmill: stdout could not be written: {error}");
            Exit::Failure.into()
        }
    }
}

async fn command(command: Command) -> Result<Exit, Failure> {
    // Keys that cannot be used are said before anything is read or written: by every command, since most of them open a ledger.
    Signing::of_process().map_err(|why| Failure::bad_job(anyhow::anyhow!(why)))?;
    match command {
        Command::Run(args) => run::run(args).await,
        Command::Plan(args) => plan::plan(args).await,
        Command::Worker(args) => worker::worker(args).await,
        Command::Status(args) => status::status(args).await,
        Command::Jobs(args) => jobs::jobs(args).await,
        Command::Watch(args) => status::watch(args).await,
        Command::Verify(args) => verify::verify(args).await,
        Command::Recheck(args) => recheck::recheck(args).await,
        Command::Calibrate(args) => calibrate::calibrate(args).await,
        Command::Submit(args) => submit::submit(args).await,
        Command::Cancel(args) => cancel::cancel(args).await,
        Command::Retry(args) => retry::retry(args).await,
        Command::Extend(args) => extend::extend(args).await,
        Command::Reconcile(args) => reconcile::reconcile(args).await,
        Command::Clean(args) => clean::clean(args).await,
        Command::Bench(args) => bench::bench(args).await,
        Command::Doctor(args) => doctor::doctor(args).await,
    }
}
