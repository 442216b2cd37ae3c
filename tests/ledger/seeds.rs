//! Whole lives of a job, each from one seed: workers, budgets, retries, reconciling, cleaning, cancelling and extending,
//! interleaved request by request over a store with every ambiguous and delayed outcome, which also loses data.
//!
//! `GRISTMILL_SEED=n` plays one seed again; `GRISTMILL_FAULTS=full` plays 100,000, or from `GRISTMILL_SEEDS=from..to`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use gristmill::dataset::store::location::Location;
use gristmill::ledger::log::{ShardLog, ShardState};
use gristmill::ledger::{Extension, JobCommand, JobDraft, JobLimits, Ledger, LedgerError, Result, StopWhy, Unfinished};
use gristmill::worker::WorkerLimits;
use object_store::memory::InMemory;
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::support::*;
use crate::support::{is_full, passed};

const SHARDS: u32 = 2;
const ROWS: u64 = 5;
const ACTORS: usize = 3;
const PATIENCE: u32 = 4;
/// Steps between two looks at what readers see, but for one seed in [`SEEDS_WATCHED`], where every change is looked at.
const LOOK_EVERY: u32 = 8;
const SEEDS_WATCHED: u64 = 4;
/// Of the jobs that have a budget; a record of rows takes a second.
const BUDGET_SECONDS: u64 = 6;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }
}

/// What an actor comes for.
#[derive(Clone, Copy)]
enum Role {
    Work,
    /// To work on what stood still between two looks.
    Reconcile,
    Retry,
    Clean,
    Stop {
        close: bool,
    },
    Extend,
}

/// Which rows somebody has asked to end unfinished.
#[derive(Default)]
struct Asked {
    cancelled: AtomicBool,
    expired: AtomicBool,
}

/// Every other job has a budget; every other one of these ends its unfinished rows with it.
fn draft_of(seed: u64) -> JobDraft {
    let mut draft = draft("seeded", SHARDS, ROWS);
    if has_lines(seed) {
        draft.part_extension = "jsonl".into();
    }
    if seed.is_multiple_of(2) {
        let usd_per_second = draft.usd_per_hour.expect("a price") / 3600.0;
        draft.limits = JobLimits {
            usd: Some(BUDGET_SECONDS as f64 * usd_per_second),
            unfinished: match seed % 4 {
                0 => Unfinished::Expire,
                _ => Unfinished::Keep,
            },
            ..JobLimits::default()
        };
    }
    draft
}

/// Whether the job's parts are lines.
fn has_lines(seed: u64) -> bool {
    seed % 5 >= 3
}

/// Whether data objects are lost.
fn loses_data(seed: u64) -> bool {
    seed % 7 >= 4
}

fn passing(patience: &mut u32, error: LedgerError) -> Result<()> {
    if matches!(error, LedgerError::Lost { .. }) {
        return Ok(());
    }
    *patience -= 1;
    if error.is_retryable() && *patience > 0 {
        Ok(())
    } else {
        Err(error)
    }
}

async fn act(output: Location, seed: u64, author: u64, role: Role, asked: Arc<Asked>) -> Result<()> {
    let (ledger, _) = Ledger::create_or_resume_in(eager(&output), draft_of(seed)).await?;
    let all = ledger.shard_numbers();
    match role {
        Role::Work => work(ledger, author, all, &asked).await,
        Role::Reconcile => {
            let earlier = ledger.progress().await?;
            let still = ledger.progress().await?.stalled_since(&earlier);
            work(ledger, author, still, &asked).await
        }
        Role::Retry if ledger.success().await?.is_some() => match ledger.retry().await? {
            Some(ledger) => {
                let all = ledger.shard_numbers();
                work(ledger, author, all, &asked).await
            }
            None => Ok(()),
        },
        Role::Clean if ledger.success().await?.is_some() => match ledger.clean(false).await {
            // A retry began in between.
            Err(LedgerError::Conflict { .. }) => Ok(()),
            other => other.map(|_| ()),
        },
        Role::Retry | Role::Clean => Ok(()),
        Role::Stop { close } => {
            asked.cancelled.fetch_or(close, Ordering::Relaxed);
            let order = JobCommand::stop(StopWhy::Cancelled, close);
            ledger.control().await?.try_append(order).await.map(|_| ())
        }
        Role::Extend => {
            let order = JobCommand::Extend(Extension::default());
            ledger.control().await?.try_append(order).await.map(|_| ())
        }
    }
}

async fn work(ledger: Ledger, author: u64, mut shards: Vec<u32>, asked: &Asked) -> Result<()> {
    let mut patience = PATIENCE;
    let first = author as usize % shards.len().max(1);
    shards.rotate_left(first);
    let mut seconds = 0.0;
    for shard in shards {
        loop {
            let done = match ledger.shard(shard).await {
                Ok(ShardState::Committed(_)) => break,
                Ok(ShardState::Open(log)) => work_on(&ledger, log, author, &mut seconds, asked).await,
                Err(error) => Err(error),
            };
            match done {
                Ok(()) => break,
                Err(error) => passing(&mut patience, error)?,
            }
        }
    }
    ledger.finish_check(None).await.map(|_| ())
}

/// Why rows may not run any more, and whether they are to be closed; orders a stop where the budget is used up.
async fn stopped(ledger: &Ledger, name: &str, seconds: f64, asked: &Asked) -> Result<Option<(StopWhy, bool)>> {
    let mut control = ledger.control().await?;
    let terms = ledger.limits(&control);
    if control.stop_reason().is_none() && terms.usd.is_some() {
        ledger.write_spend(name, seconds, false).await?;
        let spent = ledger.spendings().await?.device_seconds();
        if let Some(why) = WorkerLimits::of(&terms).reached(spent, Duration::ZERO) {
            let close = terms.unfinished == Unfinished::Expire;
            asked.expired.fetch_or(close, Ordering::Relaxed);
            control.try_append(JobCommand::stop(why, close)).await?;
        }
    }
    Ok(control.stop_reason().map(|why| (why, control.is_closing())))
}

async fn work_on(ledger: &Ledger, mut log: Box<ShardLog>, author: u64, seconds: &mut f64, asked: &Asked) -> Result<()> {
    let (name, generation) = (format!("actor-{author}"), i64::from(ledger.generation()));
    let rows = log.uncovered();
    if !rows.is_empty() {
        if let Some((_, false)) = stopped(ledger, &name, *seconds, asked).await? {
            return Ok(());
        }
        log.begin(name.as_str(), &rows, false).await?;
    }
    while !log.is_complete() {
        let closing = match stopped(ledger, &name, *seconds, asked).await? {
            Some((_, false)) => return Ok(()),
            Some((StopWhy::Cancelled, true)) => Some("cancelled"),
            Some((_, true)) => Some("expired"),
            None => None,
        };
        let left = log.uncovered().first(1 + author % ROWS);
        let status = move |row: i64| match closing {
            Some(closed) => closed,
            None if row % 2 == 1 && (row + generation) % 3 != 0 => "errored",
            None => "succeeded",
        };
        *seconds += 1.0;
        log.append(&finished_as(&left, &name, status)).await?;
    }
    let (own, has_lines) = (author.is_multiple_of(3), ledger.job().part_extension == "jsonl");
    let make = |batches: &[arrow::array::RecordBatch], metadata: &[(String, String)]| {
        let mut metadata = metadata.to_vec();
        if own {
            metadata.push(("author".into(), name.clone()));
        }
        if has_lines {
            lines(batches, &metadata)
        } else {
            part(batches, &metadata)
        }
    };
    log.publish(make).await.map(|_| ())
}

/// An actor's end is harmless unless it reports damage.
fn harmless(ended: Result<()>) -> std::result::Result<(), String> {
    match ended {
        Ok(()) => Ok(()),
        Err(error) if error.is_retryable() => Ok(()),
        Err(error) => Err(chain(&error)),
    }
}

/// What readers of the folder have seen so far.
#[derive(Default)]
struct Seen {
    parts: BTreeMap<String, (u32, bytes::Bytes)>,
    success: u32,
}

impl Seen {
    /// Each part holds its shard's rows once, and only ever gives way to one of a newer generation.
    async fn look(&mut self, output: &Location) -> std::result::Result<(), String> {
        let store = eager(output);
        let (objects, _) = store.list_folder("").await.map_err(|e| chain(&e))?;
        let found: Vec<String> = objects.into_iter().map(|object| object.key).collect();
        if let Some(gone) = self.parts.keys().find(|name| !found.contains(name)) {
            return Err(format!("`{gone}` has gone"));
        }
        for name in found.iter().filter(|name| name.starts_with("part-")) {
            let bytes = store.get(name, u64::MAX).await.map_err(|e| chain(&e))?.ok_or("gone")?;
            let was = self.parts.get(name);
            if was.is_some_and(|(_, was)| *was == bytes) {
                continue;
            }
            let generation = if name.ends_with(".jsonl") {
                lines_generation(&bytes)
            } else {
                part_generation(&bytes)?
            };
            if let Some((older, _)) = was.filter(|(older, _)| *older >= generation) {
                return Err(format!(
                    "`{name}` of generation {older} gave way to generation {generation}"
                ));
            }
            self.parts.insert(name.clone(), (generation, bytes));
        }
        if found.iter().any(|name| name == "_SUCCESS") {
            let bytes = store
                .get("_SUCCESS", u64::MAX)
                .await
                .map_err(|e| chain(&e))?
                .ok_or("gone")?;
            let json: serde_json::Value = serde_json::from_slice(&bytes).map_err(|e| e.to_string())?;
            let generation = json["generation"].as_u64().unwrap_or(0) as u32;
            if generation < self.success || self.parts.len() < SHARDS as usize {
                return Err(format!(
                    "`_SUCCESS` of generation {generation} stands too early or too late"
                ));
            }
            self.success = generation;
        }
        let ledger = Ledger::open_in(store.clone()).await.map_err(|e| chain(&e))?;
        let Some(ledger) = ledger.filter(|ledger| ledger.generation() == 0) else {
            return Ok(());
        };
        for shard in 0..SHARDS {
            let committed = ledger.is_committed(shard).await.map_err(|e| chain(&e))?;
            if committed && !self.parts.contains_key(&ledger.keys().part(shard)) {
                return Err(format!("shard {shard} is committed, and its part is not there"));
            }
        }
        Ok(())
    }
}

fn part_generation(bytes: &bytes::Bytes) -> std::result::Result<u32, String> {
    let reader = SerializedFileReader::new(bytes.clone()).map_err(|e| e.to_string())?;
    let pairs = reader
        .metadata()
        .file_metadata()
        .key_value_metadata()
        .cloned()
        .unwrap_or_default();
    let found = pairs.into_iter().find(|pair| pair.key == "gristmill.generation");
    Ok(found
        .and_then(|pair| pair.value)
        .map_or(0, |text| text.parse().unwrap()))
}

/// Lines tell their generation by spaces before the last line end.
fn lines_generation(bytes: &[u8]) -> u32 {
    let text = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    text.iter().rev().take_while(|&&b| b == b' ').count() as u32
}

fn play(seed: u64) -> std::result::Result<(), String> {
    #[cfg(feature = "faults")]
    gristmill::faults::ids::seed_thread(seed);
    let mut random = Random(seed);
    let memory = Arc::new(InMemory::new());
    let clear = place(memory.clone());
    let (mut chance, rate) = (Random(seed ^ 0xfa17), [0, 2, 6, 12][random.below(4) as usize]);
    let faulty = Arc::new(FaultStore::new(memory.clone(), true, move |_, _| {
        if chance.below(100) < rate {
            [Fault::Before, Fault::After, Fault::Exists, Fault::Late][chance.below(4) as usize]
        } else {
            Fault::None
        }
    }));
    let output = place(faulty.clone());
    let (authors, asked) = (AtomicU64::new(0), Arc::new(Asked::default()));
    let hire_as = |role: Role| -> Actor {
        let author = authors.fetch_add(1, Ordering::Relaxed);
        Box::pin(act(output.clone(), seed, author, role, asked.clone()))
    };
    let hire = |random: &mut Random| {
        hire_as(match random.below(20) {
            0..=2 => Role::Retry,
            3 => Role::Clean,
            4 => Role::Stop { close: false },
            5 if seed.is_multiple_of(3) => Role::Stop { close: true },
            6..=8 => Role::Extend,
            9..=10 => Role::Reconcile,
            _ => Role::Work,
        })
    };
    // One worker more ends the job, also one that only hears of what stands still: the ledger misses nothing.
    let last = match seed % 2 {
        0 => Role::Work,
        _ => Role::Reconcile,
    };
    let finale = || {
        finish(hire_as(Role::Extend)).and_then(|()| finish(hire_as(last)))?;
        Ok::<_, LedgerError>(())
    };
    let mut actors: Vec<Actor> = (0..ACTORS).map(|_| hire(&mut random)).collect();
    let (mut asleep, mut seen, mut changes) = (Vec::new(), Seen::default(), 0);
    for step in 0..random.below(900) as u32 {
        let n = random.below(ACTORS as u64) as usize;
        match random.below(100) {
            0..=1 => actors[n] = hire(&mut random),
            2..=3 => asleep.push(std::mem::replace(&mut actors[n], hire(&mut random))),
            4..=7 => finish(Box::pin(faulty.arrive())),
            8 if loses_data(seed) => finish(Box::pin(lose_data(&memory, random.below(1 << 20)))),
            _ => {
                if let Poll::Ready(ended) = poll_once(&mut actors[n]) {
                    harmless(ended)?;
                    actors[n] = hire(&mut random);
                }
            }
        }
        let changed = std::mem::replace(&mut changes, faulty.changes()) != changes;
        if step % LOOK_EVERY == 0 || changed && seed.is_multiple_of(SEEDS_WATCHED) {
            finish(Box::pin(seen.look(&clear)))?;
        }
    }
    faulty.heal();
    finale().map_err(|error| chain(&error))?;
    for actor in actors.into_iter().chain(asleep) {
        harmless(finish(actor))?;
        finish(Box::pin(seen.look(&clear)))?;
    }
    for _ in 0..200 {
        finish(Box::pin(faulty.arrive()));
    }
    // Those that woke may have begun a retry.
    finale().map_err(|error| chain(&error))?;
    finish(Box::pin(seen.look(&clear)))?;
    finish(Box::pin(end(&clear, &asked)))
}

/// The job is whole: each row once, and all counts right.
async fn end(output: &Location, asked: &Asked) -> std::result::Result<(), String> {
    let ledger = Ledger::open_in(eager(output))
        .await
        .map_err(|e| chain(&e))?
        .ok_or("no job")?;
    let verified = ledger.verify(|_| ()).await.map_err(|e| chain(&e))?;
    let rows = published_rows(output).await;
    if !rows.iter().copied().eq(0..i64::from(SHARDS) * ROWS as i64) {
        return Err(format!("the rows are {rows:?}"));
    }
    let tally = &verified.tally;
    for (closed, asked) in [(tally.cancelled, &asked.cancelled), (tally.expired, &asked.expired)] {
        if closed > 0 && !asked.load(Ordering::Relaxed) {
            return Err("rows were cancelled or have expired, and nobody asked".into());
        }
    }
    if verified.findings.is_empty() {
        Ok(())
    } else {
        Err(verified.findings.join("; "))
    }
}

/// The seeds to play.
fn seeds() -> std::ops::Range<u64> {
    let number = |text: &str| text.parse::<u64>().expect("a seed is a number");
    if let Ok(one) = std::env::var("GRISTMILL_SEED") {
        return number(&one)..number(&one) + 1;
    }
    if let Ok(range) = std::env::var("GRISTMILL_SEEDS") {
        let (from, to) = range.split_once("..").expect("GRISTMILL_SEEDS is from..to");
        return number(from)..number(to);
    }
    if is_full() { 0..100_000 } else { 0..2_000 }
}

#[test]
fn no_seed_breaks_the_guarantee() {
    let began = Instant::now();
    let seeds = seeds();
    let (next, end) = (AtomicU64::new(seeds.start), seeds.end);
    let found = std::sync::Mutex::new(None);
    let play_some = || {
        while found.lock().unwrap().is_none() {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= end {
                return;
            }
            let played = std::panic::catch_unwind(|| play(seed));
            if let Err(why) = played.unwrap_or_else(|_| Err("a panic".into())) {
                found.lock().unwrap().get_or_insert((seed, why));
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(play_some);
        }
    });
    if let Some((seed, why)) = found.into_inner().unwrap() {
        panic!("GRISTMILL_SEED={seed}: {why}");
    }
    let figures = serde_json::json!({"first_seed": seeds.start, "seeds": seeds.end - seeds.start});
    passed("no_seed_breaks_the_guarantee", None, began, figures);
}

/// Each switch that breaks the protocol is noticed. In a process of its own, so that no other test has it on.
#[cfg(feature = "faults")]
#[test]
fn every_negative_control_is_noticed() {
    for switch in ["put-unconditional", "exists-is-success", "part-after-commit"] {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "ledger::seeds::no_seed_breaks_the_guarantee", "--nocapture"])
            .env("GRISTMILL_FAULT_SWITCHES", switch)
            .env_remove("GRISTMILL_SEED")
            .output()
            .unwrap();
        let said = [output.stderr.as_slice(), &output.stdout].concat();
        let said = String::from_utf8_lossy(&said);
        assert!(!output.status.success(), "`{switch}` was not noticed");
        let violation = said
            .lines()
            .any(|line| line.starts_with("GRISTMILL_SEED=") && !line.contains("put-if-absent"));
        assert!(violation, "`{switch}`: no seed and violation are named:\n{said}");
    }
}
