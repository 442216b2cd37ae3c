//! `gristmill verify`: proves the guarantee for a finished job.

use crate::cli::args::OutputArgs;
use crate::cli::door::ledger_at;
use crate::cli::exit::{Exit, Failure};
use crate::report::summary::number;

pub async fn verify(args: OutputArgs) -> Result<Exit, Failure> {
    let ledger = ledger_at(&args.output).await?;
    let verified = ledger.verify(|_| ()).await?;
    for finding in &verified.findings {
        eprintln!("{finding}");
    }
    if args.json {
        let json = serde_json::json!({
            "job": ledger.job().name,
            "id": ledger.job().job,
            "generation": ledger.generation(),
            "holds": verified.holds(),
            "parts": verified.parts,
            "rows": verified.tally.rows(),
            "truncated": verified.tally.truncated,
            "findings": verified.findings,
        });
        println!("{json}");
    } else if verified.holds() {
        let retries = match ledger.generation() {
            0 => String::new(),
            1 => ", after one retry".into(),
            n => format!(", after {n} retries"),
        };
        println!(
            "the guarantee holds: {} rows in {} parts, each exactly once{retries}; {} of them are truncated",
            number(verified.tally.rows()),
            number(verified.parts.into()),
            verified.tally.truncated.map_or("an unknown number".into(), number)
        );
    }
    Ok(if verified.holds() { Exit::Done } else { Exit::Failure })
}
