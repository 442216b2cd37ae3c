//! The commands: arguments → command → exit code. Each command has its own file. `prepare.rs` has
//! the shared preparation, and `enqueue.rs` the enqueuing of shards.

mod answers;
mod args;
mod bench;
mod calibrate;
mod cancel;
mod checkup;
mod clean;
mod completions;
mod dashboard;
mod device_choice;
mod doctor;
mod enqueue;
mod exit;
mod extend;
mod first_job;
mod inputs;
mod inspect;
mod jobs;
mod limits;
mod log;
mod man;
mod memory;
mod model_source;
mod on_finish;
mod output;
mod plan;
mod prepare;
mod quantize;
mod recheck;
mod reconcile;
mod retry;
mod run;
mod same_job;
mod sampling;
mod serve;
mod setup;
mod status;
mod submit;
mod summary;
mod trial;
mod verify;
mod version;
mod worker;

use std::io::ErrorKind;
use std::process::ExitCode;

use clap::error::ErrorKind as ArgumentError;
use clap::{CommandFactory, Parser};

use crate::cli::args::{Arguments, Command};
use crate::cli::exit::{Exit, Failure, one_line};
use crate::cli::log::LogFormat;
use crate::say;
use crate::signing::Signing;
use crate::traces;

/// Exit code if the reader closed stdout early: 128 plus the number of SIGPIPE.
const STDOUT_CLOSED: u8 = 141;

/// Parses the arguments, runs the command and maps its outcome to an exit code.
pub fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return bad_arguments(&error),
    };
    log::init(arguments.log_format, default_log_filter(&arguments.command));
    disable_core_dumps();
    let result = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(Failure::from)
        .and_then(|runtime| {
            let result = runtime.block_on(run_command(arguments.command));
            traces::end();
            // Background tasks that still run after a stop must not delay the exit.
            runtime.shutdown_background();
            result
        });
    match result {
        Ok(Exit::Done) => exit_of_stdout(),
        Ok(exit) => exit.into(),
        Err(failure) => {
            say::error(format_args!("{}", one_line(&failure.error)));
            failure.exit.into()
        }
    }
}

/// Prints help or the version where they were asked for, and otherwise what is wrong with the arguments, on one line.
fn bad_arguments(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() || error.kind() == ArgumentError::DisplayHelpOnMissingArgumentOrSubcommand {
        error.exit();
    }
    let given: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|argument| argument.to_string_lossy().into_owned())
        .collect();
    // Whoever reads the program's lines by machine reads this one, too.
    let is_json = std::env::var("GRISTMILL_LOG_FORMAT").is_ok_and(|format| format == "json")
        || given.iter().any(|argument| argument == "--log-format=json")
        || given
            .windows(2)
            .any(|pair| pair[0] == "--log-format" && pair[1] == "json");
    log::init(if is_json { LogFormat::Json } else { LogFormat::Text }, "warn");
    say::error(format_args!("{}", arguments_line(&error.render().to_string(), &given)));
    Exit::BadJob.into()
}

/// clap's message without usage, and with the command whose help has it. `given`: the command line.
fn arguments_line(message: &str, given: &[String]) -> String {
    let is_end = |line: &&str| line.starts_with("Usage:") || line.starts_with("For more information");
    let lines = message.lines().map(str::trim);
    let mut said = String::new();
    for line in lines.take_while(|line| !is_end(line)).filter(|line| !line.is_empty()) {
        if !said.is_empty() {
            said.push_str(if said.ends_with(':') || line.starts_with('[') {
                " "
            } else {
                "; "
            });
        }
        said.push_str(line.strip_prefix("error: ").unwrap_or(line));
    }
    let commands = Arguments::command();
    let command = given
        .iter()
        .find(|argument| commands.find_subcommand(argument).is_some());
    let command = command.map(|name| format!("{name} ")).unwrap_or_default();
    format!("{said}; see `gristmill {command}--help`")
}

/// What the log shows without `RUST_LOG`. A service says when a batch begins and ends; other
/// commands report their progress themselves.
fn default_log_filter(command: &Command) -> &'static str {
    match command {
        Command::Serve(_) => "warn,gristmill::serve=info,gristmill::cli::serve=info",
        _ => "warn",
    }
}

/// Disables core dumps, which would hold prompts and passwords, unless `GRISTMILL_CORE_DUMPS` is 1.
fn disable_core_dumps() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    if std::env::var_os("GRISTMILL_CORE_DUMPS").is_some_and(|value| value == "1") {
        return;
    }
    let maximum = getrlimit(Resource::Core).maximum;
    // A limit of one byte is too small for a dump. If dumps go to a program (`core_pattern` with
    // `|`), Linux ignores a limit of 0, and treats 1 as "none".
    let current = Some(maximum.map_or(1, |maximum| maximum.min(1)));
    if let Err(error) = setrlimit(Resource::Core, Rlimit { current, maximum }) {
        eprintln!("gristmill: core dumps stay possible, and would hold prompts: {error}");
    }
}

/// The exit code of a finished command, by the convention of filters: if the reader closed stdout
/// early, the code is that of SIGPIPE.
fn exit_of_stdout() -> ExitCode {
    match say::stdout_error() {
        None => Exit::Done.into(),
        Some(ErrorKind::BrokenPipe) => ExitCode::from(STDOUT_CLOSED),
        Some(error) => {
            say::error(format_args!("stdout could not be written: {error}"));
            Exit::Failure.into()
        }
    }
}

async fn run_command(command: Command) -> Result<Exit, Failure> {
    // Unusable keys are reported by every command before anything is read or written, since most
    // commands open a ledger.
    Signing::of_process().map_err(|why| Failure::bad_job(anyhow::anyhow!(why)))?;
    if let Some(args) = command.traces() {
        traces::start(args.otlp_endpoint.as_deref()).map_err(|why| Failure::bad_job(anyhow::anyhow!(why)))?;
    }
    match command {
        Command::Run(args) => run::run(args).await,
        Command::Plan(args) => plan::plan(args).await,
        Command::Worker(args) => worker::worker(*args).await,
        Command::Serve(args) => serve::serve(*args).await,
        Command::Status(args) => status::status(args).await,
        Command::Jobs(args) => jobs::jobs(args).await,
        Command::Watch(args) => status::watch(args).await,
        Command::Dashboard(args) => dashboard::dashboard(args).await,
        Command::Verify(args) => verify::verify(args).await,
        Command::Recheck(args) => recheck::recheck(args).await,
        Command::Inspect(args) => inspect::inspect(args).await,
        Command::Calibrate(args) => calibrate::calibrate(args).await,
        Command::Quantize(args) => quantize::quantize(*args).await,
        Command::Submit(args) => submit::submit(args).await,
        Command::Cancel(args) => cancel::cancel(args).await,
        Command::Retry(args) => retry::retry(args).await,
        Command::Extend(args) => extend::extend(args).await,
        Command::Reconcile(args) => reconcile::reconcile(args).await,
        Command::Clean(args) => clean::clean(args).await,
        Command::Bench(args) => bench::bench(args).await,
        Command::Doctor(args) => doctor::doctor(args).await,
        Command::Completions(args) => completions::completions(&args),
        Command::Man(args) => man::man(&args),
    }
}
