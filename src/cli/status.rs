//! `gristmill status` and `watch`: how far a job is, from its output alone.

use std::time::Duration;

use crate::cli::args::{OutputArgs, WatchArgs};
use crate::cli::door::{ledger_at, summary};
use crate::cli::exit::{Exit, Failure};
use crate::ledger::status::{State, Status};
use crate::report::summary::number;

pub async fn status(args: OutputArgs) -> Result<Exit, Failure> {
    let ledger = ledger_at(&args.output).await?;
    let status = ledger.status().await?;
    let summary = summary(&ledger, &args.output).await?;
    if args.json {
        let mut json = serde_json::to_value(&summary)?;
        json["state"] = serde_json::to_value(status.state)?;
        json["shards"] = serde_json::to_value(status.shards)?;
        println!("{json}");
        return Ok(Exit::Done);
    }
    println!("job         {} ({})", status.name, word(status.state));
    println!("shards      {}", shards(&status));
    for line in summary.lines() {
        println!("{line}");
    }
    Ok(Exit::Done)
}

/// Shows the state until the job ends; the exit code says how it ended.
pub async fn watch(args: WatchArgs) -> Result<Exit, Failure> {
    let ledger = ledger_at(&args.output).await?;
    let mut last = String::new();
    loop {
        let status = ledger.status().await?;
        let line = format!(
            "{}: {} of {} rows, shards {}",
            word(status.state),
            number(status.tally.rows()),
            number(status.rows),
            shards(&status)
        );
        if line != last {
            println!("{line}");
            last = line;
        }
        match status.state {
            State::Running => tokio::time::sleep(Duration::from_secs_f64(args.every)).await,
            State::Finished => return Ok(Exit::of_rows(&summary(&ledger, &args.output).await?.rows)),
            State::BudgetReached | State::DeadlineReached => return Ok(Exit::Stopped),
            State::Cancelled => return Ok(Exit::Cancelled),
        }
    }
}

fn shards(status: &Status) -> String {
    let s = &status.shards;
    let mut text = format!("{} of {} done", number(s.done.into()), number(s.total.into()));
    for (count, word) in [(s.open, "begun"), (s.stuck, "stuck")] {
        if count > 0 {
            text.push_str(&format!(", {} {word}", number(count.into())));
        }
    }
    text
}

fn word(state: State) -> &'static str {
    match state {
        State::Running => "unfinished",
        State::Finished => "finished",
        State::BudgetReached => "stopped: budget reached",
        State::DeadlineReached => "stopped: deadline reached",
        State::Cancelled => "cancelled",
    }
}
