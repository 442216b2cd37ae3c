//! Runs a sample of a finished job's rows again with another engine.
//!
//! Prompts, parameters and random numbers are the job's own, so that only the engine makes a
//! difference. Shards are read one at a time, each with its input and its part. Meanwhile,
//! unfinished rows of earlier shards stay in the engine, so that its batch stays full.
//!
//! See docs/decisions/029-recheck-draws-rows-by-hash.md.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use rayon::prelude::*;

use crate::dataset::row::{InputRow, RowResult};
use crate::engine::Generator;
use crate::engine::params::GenerationParams;
use crate::ledger::Ledger;
use crate::report::answers::{RowAnswer, read_part};
use crate::report::meter::Meter;
use crate::report::recheck::{RecheckReport, RecheckTally};
use crate::report::sample::ShardSample;
use crate::tokenizer::Tokenizer;
use crate::worker::assemble::{Assembler, errored_row};
use crate::worker::in_flight::ShardKey;
use crate::worker::jobs::OpenJob;
use crate::worker::stop::Stop;

/// The parts of a recheck, built by the caller.
pub struct RecheckConfig {
    /// A finished job with its output in Parquet, opened for the model that `engine` runs.
    pub job: OpenJob,
    pub engine: Box<dyn Generator>,
    /// The engine's precision, for the report.
    pub precision: String,
    /// For counting the tokens of answers; `None`: the answers are choices.
    pub tokenizer: Option<Arc<Tokenizer>>,
    pub render_threads: rayon::ThreadPool,
    pub meter: Arc<Meter>,
}

/// Runs the rows of `sample` again and compares their answers with the job's. `None`: `stop` was
/// set before the end.
///
/// # Errors
/// An input has changed, a part cannot be read, or the device fails.
pub async fn run(config: RecheckConfig, sample: &[ShardSample], stop: &Stop) -> anyhow::Result<Option<RecheckReport>> {
    let mut tally = RecheckTally::new(config.tokenizer.clone());
    let mut answers = BTreeMap::new();
    let mut recheck_run = RecheckRun {
        config,
        assembler: Assembler::default(),
        backlog: VecDeque::new(),
        finished: Vec::new(),
    };
    for ShardSample { shard, rows } in sample {
        for (row, answer) in read_part(&recheck_run.config.job.ledger, *shard, rows).await? {
            match answer {
                Some(answer) => drop(answers.insert(row, answer)),
                None => tally.add_unanswered(),
            }
        }
        let wanted = |row: u64| rows.contains(&row) && answers.contains_key(&row);
        recheck_run.prepare(*shard, wanted).await?;
        tokio::task::block_in_place(|| recheck_run.run_engine(false, stop))?;
        recheck_run.compare_finished(&mut answers, &mut tally);
    }
    tokio::task::block_in_place(|| recheck_run.run_engine(true, stop))?;
    recheck_run.compare_finished(&mut answers, &mut tally);
    let RecheckConfig { precision, meter, .. } = recheck_run.config;
    Ok((!stop.is_set()).then(|| tally.finish(precision, meter.read().device_seconds)))
}

/// The state of a recheck: its engine, and the rows before, in and after the engine.
struct RecheckRun {
    config: RecheckConfig,
    assembler: Assembler,
    backlog: VecDeque<RecheckRow>,
    finished: Vec<RowResult>,
}

/// A rendered and tokenized row.
struct RecheckRow {
    key: ShardKey,
    row: u64,
    prompt: Arc<[u32]>,
    params: Arc<GenerationParams>,
    /// The generation that computed the row.
    generation: u32,
}

impl RecheckRun {
    /// Reads and renders rows of a shard, as the job did.
    async fn prepare(&mut self, shard: u32, wanted: impl Fn(u64) -> bool) -> anyhow::Result<()> {
        let job = &self.config.job;
        let mut rows: Vec<InputRow> = Vec::new();
        let mut pieces = job.reader.pieces(job.ledger.job().shard(shard)?, None)?;
        while let Some(piece) = pieces.next().await? {
            rows.extend(piece.rows.into_iter().filter(|row| wanted(row.row)));
        }
        let generations = generations_of_rows(&job.ledger, shard, rows.iter().map(|row| row.row)).await?;
        let rendered: Vec<_> = tokio::task::block_in_place(|| {
            let render = |row: &InputRow| (row.row, job.renderer.render(row));
            self.config
                .render_threads
                .install(|| rows.par_iter().map(render).collect())
        });
        for ((row, rendered), generation) in rendered.into_iter().zip(generations) {
            match rendered {
                Ok(rendered) => self.backlog.push_back(RecheckRow {
                    key: ShardKey { job: job.number, shard },
                    row,
                    prompt: rendered.tokens.into(),
                    params: rendered.params,
                    generation,
                }),
                Err(why) => self.finished.push(errored_row(row, why)),
            }
        }
        Ok(())
    }

    /// Steps until the engine has taken all rows; with `until_idle`, until it has finished them.
    fn run_engine(&mut self, until_idle: bool, stop: &Stop) -> anyhow::Result<()> {
        while !stop.is_set() {
            while self.config.engine.wants_more()
                && let Some(row) = self.backlog.pop_front()
            {
                self.submit(row);
            }
            if self.backlog.is_empty() && (!until_idle || self.config.engine.is_idle()) {
                return Ok(());
            }
            let began = Instant::now();
            let samples = self.config.engine.step().context("the device cannot go on")?;
            self.config.meter.add_device_time(began.elapsed());
            for sample in samples {
                let row = self.assembler.add(sample);
                self.finished.extend(row.map(|(_, row)| row));
            }
        }
        Ok(())
    }

    fn submit(&mut self, ready: RecheckRow) {
        let RecheckRow {
            key,
            row,
            prompt,
            params,
            generation,
        } = ready;
        let columns = &self.config.job.columns;
        self.assembler.expect(key, row, params.samples, &params.shape, columns);
        for request in self.config.job.requests(row, prompt, params, generation) {
            if let Err(refused) = self.config.engine.submit(request) {
                self.assembler.forget(key.job, row);
                return self.finished.push(errored_row(row, refused.to_string()));
            }
        }
    }

    /// Compares finished rows with the job's answers.
    fn compare_finished(&mut self, answers: &mut BTreeMap<u64, RowAnswer>, tally: &mut RecheckTally) {
        for row in self.finished.drain(..) {
            self.config.meter.add_row(&row);
            if let Some(answer) = answers.remove(&row.row) {
                tally.add(row.row, &answer, RowAnswer::of_result(row).as_ref());
            }
        }
    }
}

/// For each of these rows of a shard, the last generation that computed it, which keys the row's
/// random numbers.
async fn generations_of_rows(ledger: &Ledger, shard: u32, rows: impl Iterator<Item = u64>) -> anyhow::Result<Vec<u32>> {
    let mut retried = Vec::new();
    for generation in (1..=ledger.generation()).rev() {
        retried.push((generation, ledger.open_generation(generation).await?.rows_to_do(shard)));
    }
    let of_row = |row| {
        retried
            .iter()
            .find(|(_, rows)| rows.contains(row))
            .map_or(0, |(generation, _)| *generation)
    };
    Ok(rows.map(of_row).collect())
}
