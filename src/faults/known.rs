//! A device that computes a known function of each row's prompt, in steps that take time like those
//! of a real device.
//!
//! The function is the SHA-256 of the prompt's token ids, each as four little-endian bytes. The
//! text is `k-` and the first 8 bytes in hex. Completion token i is the little-endian number in
//! bytes 2i and 2i + 1 (modulo 32), modulo 2000. Two values of a prompt's first id have a special
//! meaning: [`ABORT_ID`] ends the process, like a row that crashes the device, and [`ERROR_ID`]
//! makes the row an error.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::time::Duration;

use data_encoding::HEXLOWER;
use sha2::{Digest, Sha256};

use crate::engine::request::{Completion, FinishReason, FinishedSample, Request};
use crate::engine::{EngineError, Generator, RequestError};

/// A prompt with this first id aborts the process in the step that computes it.
pub const ABORT_ID: u32 = 2047;
/// A prompt with this first id fails its row.
pub const ERROR_ID: u32 = 2046;
/// Exclusive upper bound of completion token ids.
const COMPLETION_IDS: u32 = 2000;
/// Rows per step, which vary within this range.
const STEP_ROWS: std::ops::RangeInclusive<usize> = 16..=64;
/// [`KnownDevice::wants_more`] is true until this many rows wait.
const WAITING_ROWS: usize = 256;

/// Settings of a known device: time and completion tokens per row, and which rows fail.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KnownDeviceConfig {
    /// Milliseconds per row; 0 answers at once.
    pub ms_per_row: f64,
    pub completion_tokens: usize,
    /// Simulates a broken device: prompts whose first id is below this fail their rows.
    pub errors_below: u32,
}

impl Default for KnownDeviceConfig {
    fn default() -> KnownDeviceConfig {
        KnownDeviceConfig {
            ms_per_row: 1.0,
            completion_tokens: 4,
            errors_below: 0,
        }
    }
}

impl KnownDeviceConfig {
    /// Tokens to count as computed for a row, even if it fails.
    fn tokens_of(&self, request: &Request) -> u64 {
        (request.prompt.len() + self.completion_tokens) as u64
    }
}

/// A known device (see the module's description).
#[derive(Debug)]
pub struct KnownDevice {
    config: KnownDeviceConfig,
    trace: Option<File>,
    waiting: VecDeque<Request>,
    steps: usize,
    step_tokens: Vec<(u32, u64)>,
}

impl KnownDevice {
    /// Whether the environment asks for this device.
    pub fn is_wanted() -> bool {
        std::env::var("GRISTMILL_KNOWN_DEVICE").is_ok_and(|value| value == "1")
    }

    /// Builds the device from the environment; an invalid value ends the process.
    pub fn from_env() -> KnownDevice {
        let default = KnownDeviceConfig::default();
        let config = KnownDeviceConfig {
            ms_per_row: number_variable("GRISTMILL_KNOWN_MS_PER_ROW", default.ms_per_row, |ms: &f64| {
                (0.0..=60_000.0).contains(ms)
            }),
            completion_tokens: number_variable(
                "GRISTMILL_KNOWN_COMPLETION_TOKENS",
                default.completion_tokens,
                |tokens: &usize| *tokens <= 1 << 16,
            ),
            errors_below: number_variable("GRISTMILL_KNOWN_ERRORS_BELOW", default.errors_below, |_| true),
        };
        let trace = std::env::var_os("GRISTMILL_KNOWN_TRACE").map(|path| {
            let opened = OpenOptions::new().create(true).append(true).open(&path);
            opened.unwrap_or_else(|error| {
                super::refuse(
                    "GRISTMILL_KNOWN_TRACE",
                    &format!("cannot open `{}`: {error}", path.display()),
                )
            })
        });
        KnownDevice::new(config, trace)
    }

    /// Creates a device that appends a line `JOB,ROW` to `trace` for each computed row.
    pub fn new(config: KnownDeviceConfig, trace: Option<File>) -> KnownDevice {
        KnownDevice {
            config,
            trace,
            waiting: VecDeque::new(),
            steps: 0,
            step_tokens: Vec::new(),
        }
    }

    /// Number of rows of the next step.
    fn step_rows(&self) -> usize {
        let (min_rows, max_rows) = (*STEP_ROWS.start(), *STEP_ROWS.end());
        // 29 has no common divisor with the number of sizes (49), so all sizes occur, and steps do
        // not align with shards.
        min_rows + self.steps * 29 % (max_rows - min_rows + 1)
    }

    /// Appends the step's rows in a single write, so that lines of several processes do not mix.
    fn write_trace(&mut self, rows: &[Request]) {
        let Some(trace) = &mut self.trace else { return };
        let lines: String = rows
            .iter()
            .map(|request| format!("{},{}\n", request.id.job, request.id.row))
            .collect();
        if let Err(error) = trace.write_all(lines.as_bytes()) {
            super::refuse("GRISTMILL_KNOWN_TRACE", &error.to_string());
        }
    }
}

impl Generator for KnownDevice {
    fn wants_more(&self) -> bool {
        self.waiting.len() < WAITING_ROWS
    }

    fn is_idle(&self) -> bool {
        self.waiting.is_empty()
    }

    fn submit(&mut self, request: Request) -> Result<(), RequestError> {
        if request.prompt.is_empty() {
            return Err(RequestError::EmptyPrompt);
        }
        self.waiting.push_back(request);
        Ok(())
    }

    fn step(&mut self) -> Result<Vec<FinishedSample>, EngineError> {
        let rows = self.step_rows().min(self.waiting.len());
        let step: Vec<Request> = self.waiting.drain(..rows).collect();
        self.steps += 1;
        self.step_tokens.clear();
        if step.iter().any(|request| request.prompt.first() == Some(&ABORT_ID)) {
            eprintln!("gristmill: a row that aborts the process is on the device");
            std::process::abort();
        }
        let time = Duration::from_secs_f64(self.config.ms_per_row * rows as f64 / 1000.0);
        if !time.is_zero() {
            std::thread::sleep(time);
        }
        for request in &step {
            let tokens = self.config.tokens_of(request);
            match self.step_tokens.iter_mut().find(|(job, _)| *job == request.id.job) {
                Some((_, sum)) => *sum += tokens,
                None => self.step_tokens.push((request.id.job, tokens)),
            }
        }
        self.write_trace(&step);
        let finished = step.iter().map(|request| FinishedSample {
            id: request.id,
            result: completion(request, &self.config),
            computed_tokens: self.config.tokens_of(request),
        });
        Ok(finished.collect())
    }

    fn step_tokens(&self) -> &[(u32, u64)] {
        &self.step_tokens
    }

    fn cancel(&mut self, job: u32, rows: &dyn Fn(u64) -> bool) {
        self.waiting
            .retain(|request| request.id.job != job || !rows(request.id.row));
    }
}

fn completion(request: &Request, config: &KnownDeviceConfig) -> Result<Completion, String> {
    if request.prompt.first().is_some_and(|first| *first < config.errors_below) {
        return Err("the known device is out of order for this prompt".into());
    }
    if request.prompt.first() == Some(&ERROR_ID) {
        return Err("the known function has no value for this prompt".into());
    }
    let mut hash = Sha256::new();
    for id in request.prompt.iter() {
        hash.update(id.to_le_bytes());
    }
    let hash: [u8; 32] = hash.finalize().into();
    let token = |i: usize| u32::from(u16::from_le_bytes([hash[2 * i % 32], hash[(2 * i + 1) % 32]])) % COMPLETION_IDS;
    let hex: String = HEXLOWER.encode(&hash[..8]);
    Ok(Completion {
        id: request.id,
        token_ids: (0..config.completion_tokens).map(token).collect(),
        text: format!("k-{hex}"),
        finish_reason: FinishReason::Stop,
        fits_shape: true,
        logprobs: None,
        choice_probabilities: None,
        thought: None,
        prompt_tokens: request.prompt.len() as u32,
        cached_tokens: 0,
    })
}

/// The number in `variable`, or `default` if it is unset.
fn number_variable<T: std::str::FromStr>(variable: &str, default: T, is_valid: impl Fn(&T) -> bool) -> T {
    let Ok(text) = std::env::var(variable) else {
        return default;
    };
    match text.parse().ok().filter(is_valid) {
        Some(number) => number,
        None => super::refuse(variable, &format!("`{text}` is not a number, or is out of range")),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::sync::Arc;

    use super::*;
    use crate::engine::params::GenerationParams;
    use crate::engine::request::SampleId;

    const WITHOUT_DELAY: KnownDeviceConfig = KnownDeviceConfig {
        ms_per_row: 0.0,
        completion_tokens: 4,
        errors_below: 0,
    };

    fn request(job: u32, row: u64, prompt: &[u32]) -> Request {
        Request {
            id: SampleId {
                job,
                row,
                sample: 0,
                attempt: 0,
            },
            prompt: prompt.into(),
            params: Arc::new(GenerationParams::default()),
            eos: Arc::default(),
            cache_salt: Arc::default(),
            adapter: 0,
        }
    }

    fn drain(device: &mut KnownDevice) -> Vec<FinishedSample> {
        let mut all = Vec::new();
        while !device.is_idle() {
            all.extend(device.step().unwrap());
        }
        all
    }

    /// `tests/faults/known.py` has the same function in Python, for the checks of the fault suite.
    #[test]
    fn the_function_equals_that_of_known_py() {
        let mut device = KnownDevice::new(WITHOUT_DELAY, None);
        device.submit(request(0, 0, &[1, 2, 300])).unwrap();
        let done = drain(&mut device).remove(0).result.unwrap();
        // python3: hashlib.sha256(struct.pack("<3I", 1, 2, 300)).hexdigest()
        assert_eq!(done.text, "k-ec23a88fb0aa4b38");
        assert_eq!(done.token_ids, [1196, 776, 1696, 411]);
        assert_eq!(done.prompt_tokens, 3);
    }

    #[test]
    fn each_row_is_completed_once_in_steps_of_many_sizes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace");
        let mut device = KnownDevice::new(WITHOUT_DELAY, Some(File::create(&path).unwrap()));
        for row in 0..500 {
            device.submit(request((row % 2) as u32, row, &[row as u32])).unwrap();
        }
        assert!(!device.wants_more());
        let first = device.step().unwrap();
        assert!(STEP_ROWS.contains(&first.len()));
        let tokens: u64 = device.step_tokens().iter().map(|(_, tokens)| tokens).sum();
        assert_eq!(tokens, 5 * first.len() as u64);
        let mut rows: Vec<u64> = first.iter().chain(&drain(&mut device)).map(|f| f.id.row).collect();
        rows.sort_unstable();
        assert_eq!(rows, (0..500).collect::<Vec<_>>());
        let mut trace = String::new();
        File::open(&path).unwrap().read_to_string(&mut trace).unwrap();
        assert_eq!(trace.lines().count(), 500);
        assert!(trace.lines().any(|line| line == "1,499"));
    }

    #[test]
    fn cancelled_rows_are_not_completed_and_bad_rows_are_errors() {
        let mut device = KnownDevice::new(WITHOUT_DELAY, None);
        for row in 0..10 {
            device.submit(request(0, row, &[row as u32])).unwrap();
            device.submit(request(1, row, &[ERROR_ID, row as u32])).unwrap();
        }
        assert!(matches!(
            device.submit(request(0, 99, &[])),
            Err(RequestError::EmptyPrompt)
        ));
        device.cancel(0, &|row| row >= 4);
        let done = drain(&mut device);
        assert_eq!(done.iter().filter(|f| f.id.job == 0).count(), 4);
        let errors: Vec<u32> = done.iter().filter(|f| f.result.is_err()).map(|f| f.id.job).collect();
        assert_eq!(errors, [1; 10]);
    }
}
