//! `gristmill clean`: lists ledger data that a finished job no longer needs, and removes it with
//! `--yes`.

use anyhow::anyhow;
use serde_json::json;

use crate::cli::args::{CleanArgs, shell_word};
use crate::cli::exit::{Exit, Failure};
use crate::cli::output::ledger_at;
use crate::report::summary::{counted, show_size};

pub(super) async fn clean(args: CleanArgs) -> Result<Exit, Failure> {
    let ledger = ledger_at(&args.output).await?;
    let name = &ledger.job().name;
    if ledger.finish_check(None).await?.is_none() {
        return Err(Failure::bad_job(anyhow!(
            "job `{name}` is not finished: its ledger is needed until then"
        )));
    }
    let cleaned = ledger.clean(!args.yes).await?;
    if args.json {
        let json = json!({
            "job": name,
            "id": ledger.job().job,
            "output": ledger.store().url().as_str(),
            "removed": args.yes,
            "objects": cleaned.objects,
            "bytes": cleaned.bytes,
        });
        println!("{json}");
        return Ok(Exit::Done);
    }
    let amount = format!("{}, {}", counted(cleaned.objects, "object"), show_size(cleaned.bytes));
    if args.yes {
        println!("job `{name}`: removed {amount}; parts, commits and `_SUCCESS` stay")
    } else {
        println!(
            "job `{name}`: {amount} can be removed; `gristmill clean {} --yes` does it",
            shell_word(&args.output)
        )
    }
    Ok(Exit::Done)
}
