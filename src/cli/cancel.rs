//! `gristmill cancel`: tells all workers of a job to start no more work.

use serde_json::json;

use crate::cli::args::CancelArgs;
use crate::cli::exit::{Exit, Failure};
use crate::cli::output::ledger_at;
use crate::ledger::StopWhy;
use crate::ledger::control::StopOutcome;

pub(super) async fn cancel(args: CancelArgs) -> Result<Exit, Failure> {
    let ledger = ledger_at(&args.output).await?;
    let outcome = ledger.stop(StopWhy::Cancelled, args.finish).await?;
    let name = &ledger.job().name;
    if args.json {
        let json = json!({
            "job": name,
            "id": ledger.job().job,
            "output": ledger.store().url().as_str(),
            "cancelled": outcome != StopOutcome::AlreadyFinished,
            "already": outcome != StopOutcome::Stopped,
            "finish": args.finish,
        });
        println!("{json}");
        return Ok(Exit::Done);
    }
    let line = match outcome {
        StopOutcome::AlreadyFinished => "is already finished: nothing to cancel",
        StopOutcome::AlreadyStopped => "was cancelled before: nothing to do",
        StopOutcome::Stopped if args.finish => {
            "is cancelled: its workers write what is finished, then publish the rows that are left as `cancelled`"
        }
        StopOutcome::Stopped => {
            "is cancelled: its workers write what is finished and start nothing more; `cancel --finish` publishes the rows \
             that are left as `cancelled`"
        }
    };
    println!("job `{name}` {line}");
    Ok(Exit::Done)
}
