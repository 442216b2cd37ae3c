//! Examples at the end of a command's help. Each text begins with the line `Examples:`, from which
//! `gristmill man` makes a heading. Three spaces separate a command from what it does.

pub(super) const RUN: &str = "\
Examples:
  gristmill run jobs/label-tickets.yaml   the whole job; again: go on after an interruption
  gristmill run job.yaml --limit 100   a trial of the first 100 rows
  gristmill run job.yaml --set date=2026-11-24 --json   the job of a day, with its result as JSON";

pub(super) const PLAN: &str = "\
Examples:
  gristmill plan job.yaml   rows, tokens, broken rows, three prompts
  gristmill plan job.yaml --tokens-per-second 21000   hours and dollars, too";

pub(super) const SUBMIT: &str = "\
Examples:
  gristmill submit job.yaml --queue kafka://broker:9092/labels
  gristmill submit job.yaml --queue amqp://user@broker/%2F/labels --preflight
  gristmill submit job.yaml --no-enqueue   the ledger alone";

pub(super) const WORKER: &str = "\
Examples:
  gristmill worker --queue kafka://broker:9092/labels
  gristmill worker --queue amqp://user@broker/%2F/labels --until-idle
  gristmill worker --queue kafka://broker:9092/labels --spot aws --liveness-port 0.0.0.0:8080";

pub(super) const SERVE: &str = "\
Examples:
  gristmill serve --store ./batches --models models.yaml --work
  gristmill serve --store s3://bucket/batches --models models.yaml --queue kafka://broker:9092/batches";

pub(super) const INSPECT: &str = "\
Examples:
  gristmill inspect models/qwen3-8b   family, parameters, memory at each precision, chat template, sampling
  gristmill inspect hf://Qwen/Qwen3-8B --json   of a model on the hub, for programs";

pub(super) const QUANTIZE: &str = "\
Examples:
  gristmill quantize models/qwen3-8b --to int8 --out models/qwen3-8b-w8a8   INT8 weights and activations
  gristmill quantize models/qwen3-8b --to w4a16 --out models/qwen3-8b-w4 --calibrate job.yaml   4 bits, by a job's prompts";

pub(super) const DASHBOARD: &str = "\
Examples:
  gristmill dashboard out/labels   one job, at http://127.0.0.1:8680
  gristmill dashboard s3://bucket/team/ --read-only   all jobs below a prefix, without buttons
  gristmill dashboard out/ --listen 0.0.0.0:8680 --keys keys.yaml   for other machines, too";

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::args::Arguments;

    #[test]
    fn examples_are_command_lines_of_the_program() {
        for text in [RUN, PLAN, SUBMIT, WORKER, SERVE, INSPECT, QUANTIZE, DASHBOARD] {
            let lines = text.strip_prefix("Examples:\n").expect("a heading").lines();
            for line in lines {
                let command = line.trim().split("   ").next().unwrap_or_default();
                if let Err(error) = Arguments::try_parse_from(command.split(' ')) {
                    panic!("`{command}`: {error}");
                }
            }
        }
    }
}
