//! `gristmill cancel`: tells all workers of a job to start no more work.

use serde_json::json;

use crate::cli::args::CancelArgs;
use crate::cli::exit::{Exit, Failure};
use crate::cli::output::ledger_at;
use crate::ledger::{JobCommand, Ledger, StopWhy};

/// Result of a cancel.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Cancelled,
    AlreadyCancelled,
    AlreadyFinished,
}

pub(super) async fn cancel(args: CancelArgs) -> Result<Exit, Failure> {
    let ledger = ledger_at(&args.output).await?;
    let outcome = cancel_job(&ledger, args.finish).await?;
    let name = &ledger.job().name;
    if args.json {
        let json = json!({
            "job": name,
            "id": ledger.job().job,
            "output": ledger.store().url().as_str(),
            "cancelled": outcome != Outcome::AlreadyFinished,
            "already": outcome != Outcome::Cancelled,
            "finish": args.finish,
        });
        println!("{json}");
        return Ok(Exit::Done);
    }
    let line = match outcome {
        Outcome::AlreadyFinished => "is already finished: nothing to cancel",
        Outcome::AlreadyCancelled => "was cancelled before: nothing to do",
        Outcome::Cancelled if args.finish => {
            "is cancelled: its workers write what is finished, then publish the rows that are left as `cancelled`"
        }
        Outcome::Cancelled => {
            "is cancelled: its workers write what is finished and start nothing more; `cancel --finish` publishes the rows \
             that are left as `cancelled`"
        }
    };
    println!("job `{name}` {line}");
    Ok(Exit::Done)
}

/// Writes the command to stop, unless it is already in force. `close`: publish the unfinished rows
/// as `cancelled`.
async fn cancel_job(ledger: &Ledger, close: bool) -> Result<Outcome, Failure> {
    if ledger.finish_check(None).await?.is_some() {
        return Ok(Outcome::AlreadyFinished);
    }
    let mut control = ledger.control().await?;
    loop {
        if let Some(JobCommand::Stop {
            why: StopWhy::Cancelled,
            close: already_closes,
            ..
        }) = control.current_command()
            && (*already_closes || !close)
        {
            return Ok(Outcome::AlreadyCancelled);
        }
        // If another process has written a command in the meantime, that command is read first.
        if control.try_append(JobCommand::stop(StopWhy::Cancelled, close)).await? {
            return Ok(Outcome::Cancelled);
        }
    }
}
