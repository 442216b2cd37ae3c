//! One test's run: its seed, its folder, how much it is to do, and what it reports.

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value};

use super::job::Format;
use crate::support::{is_full, passed, root};

/// A small generator of its own (SplitMix64), so that a failing run can be repeated from the printed seed.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `range`, which is not empty.
    pub(super) fn within(&mut self, range: std::ops::Range<u64>) -> u64 {
        range.start + self.next() % (range.end - range.start)
    }

    /// A time in a range of milliseconds.
    pub(super) fn ms(&mut self, range: std::ops::Range<u64>) -> Duration {
        Duration::from_millis(self.within(range))
    }

    /// True as often as not.
    pub(super) fn coin(&mut self) -> bool {
        self.next() >> 63 == 0
    }

    pub(super) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.within(0..from.len() as u64) as usize]
    }
}

/// One test's run. Call [`Suite::end`] when everything held; a test that panics prints the seed and keeps its folder.
pub(super) struct Suite {
    pub name: &'static str,
    pub seed: u64,
    pub random: Random,
    /// Inputs and logs.
    pub dir: PathBuf,
    began: Instant,
    figures: Map<String, Value>,
    jobs: u64,
}

impl Suite {
    pub(super) fn begin(name: &'static str) -> Suite {
        let seed = match std::env::var("GRISTMILL_FAULTS_SEED") {
            Ok(text) => text.parse().expect("GRISTMILL_FAULTS_SEED is a number"),
            // Shorter than 2^53, so that every reader of the results takes it for the same number.
            Err(_) => SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as u64,
        };
        let dir = root().join("target/faults").join(format!("{name}-{seed}"));
        std::fs::create_dir_all(&dir).unwrap();
        println!("{name}: seed {seed}, logs in {}", dir.display());
        Suite {
            name,
            seed,
            random: Random::new(seed),
            dir,
            began: Instant::now(),
            figures: Map::new(),
            jobs: 0,
        }
    }

    /// Jobs publish Parquet and lines by turns; the seed says which is first.
    pub(super) fn next_format(&mut self) -> Format {
        self.jobs += 1;
        match (self.seed + self.jobs) % 2 {
            0 => Format::Parquet,
            _ => Format::Lines,
        }
    }

    /// How often to do a thing: `ci` times, or in a full run `full` times, divided among `GRISTMILL_FAULTS_SHARES` runs.
    pub(super) fn count(&self, ci: u64, full: u64) -> u64 {
        if !is_full() {
            return ci;
        }
        let shares =
            std::env::var("GRISTMILL_FAULTS_SHARES").map_or(1, |text| text.parse().expect("a number of shares"));
        full.div_ceil(shares)
    }

    /// Adds to a figure of the report.
    pub(super) fn add(&mut self, name: &str, value: u64) {
        let sum = self.figures.get(name).and_then(Value::as_u64).unwrap_or(0) + value;
        self.figures.insert(name.into(), sum.into());
    }

    /// Sets a figure of the report.
    pub(super) fn note(&mut self, name: &str, value: f64) {
        self.figures
            .insert(name.into(), ((value * 100.0).round() / 100.0).into());
    }

    /// Everything held: says so, writes the result where `GRISTMILL_FAULTS_RESULT` names a file, removes the folder.
    pub(super) fn end(self) {
        passed(self.name, Some(self.seed), self.began, self.figures.clone().into());
        if std::env::var_os("GRISTMILL_FAULTS_KEEP").is_none() {
            std::fs::remove_dir_all(&self.dir).unwrap();
        }
    }
}

impl Drop for Suite {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!(
                "{} failed: repeat with GRISTMILL_FAULTS_SEED={}; logs in {}",
                self.name,
                self.seed,
                self.dir.display()
            );
        }
    }
}
