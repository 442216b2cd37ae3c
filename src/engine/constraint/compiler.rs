//! Compiles shapes, each on a thread of its own, and caches the results.
//!
//! Callers do not wait: [`Compiler::find`] starts the compilation of a shape, and
//! [`Compiler::collect`] returns the results since the last call. A thread cannot be killed, so
//! bounds that are checked beforehand keep a compilation to seconds. A compilation that still takes
//! longer than `TIME_MAX` is given up. Its thread runs to its end and counts as one of the
//! compiler's threads until then. A panic fails only its own shape. The stack is large enough for
//! any shape within the bounds.
//!
//! See docs/decisions/051-shapes-are-compiled-on-their-own-threads.md.

use std::collections::{HashMap, HashSet, VecDeque};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use llguidance::{ParserFactory, panic_utils};
use sha2::{Digest, Sha256};

use crate::engine::constraint::memory::{LiveBytes, ShapeMemory};
use crate::engine::constraint::text::{one_line, same_shape};
use crate::engine::constraint::{Constraint, ConstraintError, build, schema};
use crate::engine::params::OutputConstraint;
use crate::tokenizer::Tokenizer;

/// Maximum number of cached results, and maximum bytes of their shapes' texts. Each row of a batch
/// file may bring its own shape.
pub(super) const CACHED_MAX: usize = 256;
pub(super) const CACHED_BYTES_MAX: usize = 8 << 20;
/// Stack size of a thread. The largest schemas within the bounds were measured to use a quarter of
/// it. Only the used part becomes resident.
pub(super) const STACK_BYTES: usize = 64 << 20;
/// Maximum number of threads at once.
const THREADS_MAX: usize = 4;
/// Approximate bytes of all shapes, cached or in use, above which no further shape is compiled.
const LIVE_BYTES_MAX: u64 = 512 << 20;
/// Maximum time of a compilation; the worst shape within the bounds takes a tenth of it.
const TIME_MAX: Duration = Duration::from_secs(30);
/// Interval at which [`Compiler::compile`] checks for compilations that take too long.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Identifies a shape together with its end-of-sequence ids: a hash of both.
pub type ShapeKey = [u8; 32];

type CompileResult = Result<Constraint, ConstraintError>;

/// State of a shape.
#[derive(Debug, Clone)]
pub enum ShapeState {
    Ready(CompileResult),
    /// The shape is being compiled; [`Compiler::collect`] will return it under this key.
    Compiling(ShapeKey),
}

/// A shape to compile.
struct CompileTask {
    key: ShapeKey,
    /// Bytes of the shape's text.
    bytes: usize,
    shape: OutputConstraint,
    tokenizer: Arc<Tokenizer>,
    eos: Arc<[u32]>,
    factory: Arc<Factory>,
    memory: ShapeMemory,
}

/// llguidance's compiler, built when the first grammar is compiled, because the trie of a large
/// vocabulary takes time.
type Factory = OnceLock<Result<ParserFactory, ConstraintError>>;

/// A thread that compiles.
struct RunningCompile {
    key: ShapeKey,
    bytes: usize,
    /// The job file's field that holds the shape, for errors.
    job_field: &'static str,
    /// Time at which the thread began to compile its shape.
    began: Arc<OnceLock<Instant>>,
    is_given_up: bool,
}

/// See the module's description.
pub struct Compiler {
    /// Keyed by end-of-sequence ids: jobs of one model may differ in them.
    factories: HashMap<Arc<[u32]>, Arc<Factory>>,
    /// The last shape requested, with its end-of-sequence ids and key: rows of a job share their
    /// shape.
    last: Option<(OutputConstraint, Arc<[u32]>, ShapeKey)>,
    compiled: HashMap<ShapeKey, CompileResult>,
    /// Bytes of the texts of all shapes in `compiled`.
    pub(super) compiled_bytes: usize,
    compiling: HashSet<ShapeKey>,
    waiting: VecDeque<CompileTask>,
    running: Vec<RunningCompile>,
    /// Shapes whose compilation could not be started.
    refused: Vec<(ShapeKey, ConstraintError)>,
    pub(super) memory: ShapeMemory,
    pub(super) live_bytes_max: u64,
    threads: usize,
    time_max: Duration,
    sender: Sender<(ShapeKey, CompileResult)>,
    receiver: Receiver<(ShapeKey, CompileResult)>,
}

impl Default for Compiler {
    fn default() -> Self {
        Compiler::new()
    }
}

impl Compiler {
    pub fn new() -> Compiler {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Compiler::with_limits(cores.min(THREADS_MAX), TIME_MAX)
    }

    /// A compiler with this number of threads and this time limit per shape.
    pub(super) fn with_limits(threads: usize, time_max: Duration) -> Compiler {
        let (sender, receiver) = channel();
        Compiler {
            factories: HashMap::new(),
            last: None,
            compiled: HashMap::new(),
            compiled_bytes: 0,
            compiling: HashSet::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            refused: Vec::new(),
            memory: ShapeMemory::default(),
            live_bytes_max: LIVE_BYTES_MAX,
            threads,
            time_max,
            sender,
            receiver,
        }
    }

    /// Returns a shape from the cache, or compiles it and waits. All calls must pass the same
    /// tokenizer.
    pub fn compile(&mut self, shape: &OutputConstraint, tokenizer: &Arc<Tokenizer>, eos: &Arc<[u32]>) -> CompileResult {
        let key = match self.find(shape, tokenizer, eos) {
            ShapeState::Ready(compiled) => return compiled,
            ShapeState::Compiling(key) => key,
        };
        loop {
            let mut done = self.collect(POLL_INTERVAL);
            if let Some(compiled) = done.remove(&key) {
                return compiled;
            }
        }
    }

    /// Returns a shape from the cache, or starts to compile it. `eos`: the model's end-of-sequence
    /// ids. All calls must pass the same tokenizer.
    pub fn find(&mut self, shape: &OutputConstraint, tokenizer: &Arc<Tokenizer>, eos: &Arc<[u32]>) -> ShapeState {
        if matches!(shape, OutputConstraint::Free) {
            return ShapeState::Ready(Ok(Constraint::Free));
        }
        if let Some((last, last_eos, key)) = &self.last
            && last_eos == eos
            && same_shape(last, shape)
        {
            if self.compiling.contains(key) {
                return ShapeState::Compiling(*key);
            }
            if let Some(known) = self.compiled.get(key) {
                return ShapeState::Ready(known.clone());
            }
        }
        let (key, bytes) = match shape_key(shape, eos) {
            Ok(found) => found,
            Err(refused) => return ShapeState::Ready(Err(refused)),
        };
        self.last = Some((shape.clone(), eos.clone(), key));
        if let Some(known) = self.compiled.get(&key) {
            return ShapeState::Ready(known.clone());
        }
        if self.compiling.insert(key) {
            self.waiting.push_back(CompileTask {
                key,
                bytes,
                shape: shape.clone(),
                tokenizer: tokenizer.clone(),
                eos: eos.clone(),
                factory: self.factories.entry(eos.clone()).or_default().clone(),
                memory: self.memory.clone(),
            });
            self.start();
        }
        ShapeState::Compiling(key)
    }

    /// The results since the last call: shapes compiled, given up or refused. Waits at most `wait`
    /// for the first compilation to finish.
    pub fn collect(&mut self, wait: Duration) -> HashMap<ShapeKey, CompileResult> {
        let mut done = HashMap::new();
        let first = if wait.is_zero() {
            self.receiver.try_recv().ok()
        } else {
            self.receiver.recv_timeout(wait).ok()
        };
        let mut next = first;
        while let Some((key, compiled)) = next {
            if let Some(at) = self.running.iter().position(|running| running.key == key) {
                let ended = self.running.swap_remove(at);
                if !ended.is_given_up {
                    self.cache_result(key, ended.bytes, compiled.clone());
                    done.insert(key, compiled);
                }
            }
            next = self.receiver.try_recv().ok();
        }
        done.extend(self.give_up_overdue());
        self.start();
        done.extend(self.refused.drain(..).map(|(key, refused)| (key, Err(refused))));
        for key in done.keys() {
            self.compiling.remove(key);
        }
        done
    }

    /// Gives up compilations that take too long.
    fn give_up_overdue(&mut self) -> Vec<(ShapeKey, CompileResult)> {
        let seconds = self.time_max.as_secs();
        let mut done = Vec::new();
        for running in self.running.iter_mut().filter(|running| !running.is_given_up) {
            if running.began.get().is_some_and(|began| began.elapsed() > self.time_max) {
                running.is_given_up = true;
                let field = running.job_field;
                done.push((
                    running.key,
                    running.bytes,
                    Err(ConstraintError::TooSlow { field, seconds }),
                ));
            }
        }
        for (key, bytes, compiled) in &done {
            self.cache_result(*key, *bytes, compiled.clone());
        }
        done.into_iter().map(|(key, _, compiled)| (key, compiled)).collect()
    }

    /// Drops cached shapes if memory is short. Returns whether there is memory for more shapes.
    /// Shapes in use are freed as their rows end.
    fn make_room(&mut self) -> bool {
        let is_full = |live: &LiveBytes| live.load(Ordering::Relaxed) > self.live_bytes_max;
        if is_full(&self.memory.live_bytes) {
            self.compiled.clear();
            self.compiled_bytes = 0;
        }
        !is_full(&self.memory.live_bytes)
    }

    /// Starts waiting compilations, as far as threads and memory allow.
    fn start(&mut self) {
        while self.running.len() < self.threads
            && !self.waiting.is_empty()
            && self.make_room()
            && let Some(task) = self.waiting.pop_front()
        {
            let began = Arc::new(OnceLock::new());
            let running = RunningCompile {
                key: task.key,
                bytes: task.bytes,
                job_field: build::job_field(&task.shape),
                began: began.clone(),
                is_given_up: false,
            };
            let (key, field, sender) = (task.key, running.job_field, self.sender.clone());
            let thread = std::thread::Builder::new()
                .name("grammar".into())
                .stack_size(STACK_BYTES)
                .spawn(move || {
                    let compiled = compile_task(&task, &began);
                    // The send fails only after the compiler, and so every caller, is gone.
                    let _ = sender.send((key, compiled));
                });
            match thread {
                Ok(_) => self.running.push(running),
                Err(e) => {
                    let why = format!("no thread can be started for it: {e}");
                    self.refused.push((key, ConstraintError::Invalid { field, why }));
                }
            }
        }
        let threads = self.running.len();
        if threads > 0 && self.running.iter().all(|running| running.is_given_up) && threads == self.threads {
            self.refused.extend(self.waiting.drain(..).map(|task| {
                let field = build::job_field(&task.shape);
                (task.key, ConstraintError::ThreadsBusy { field, threads })
            }));
        }
    }

    fn cache_result(&mut self, key: ShapeKey, bytes: usize, compiled: CompileResult) {
        self.compiled_bytes += bytes;
        if self.compiled.len() >= CACHED_MAX || self.compiled_bytes > CACHED_BYTES_MAX {
            self.compiled.clear();
            self.compiled_bytes = bytes;
        }
        self.compiled.insert(key, compiled);
    }

    /// Number of cached results.
    #[cfg(test)]
    pub(super) fn cached_results(&self) -> usize {
        self.compiled.len()
    }
}

/// A shape's key, and the bytes of the shape's text.
fn shape_key(shape: &OutputConstraint, eos: &[u32]) -> Result<(ShapeKey, usize), ConstraintError> {
    let name = match shape {
        OutputConstraint::Free => String::new(),
        OutputConstraint::Choice { choices, probabilities } => format!("choice {probabilities} {choices:?}"),
        OutputConstraint::JsonSchema(schema) => format!("json {}", schema::check_text(schema)?),
        OutputConstraint::Regex(regex) => format!("regex {regex}"),
    };
    let mut hash = Sha256::new();
    hash.update(name.as_bytes());
    hash.update(format!(" ends {eos:?}"));
    Ok((hash.finalize().into(), name.len()))
}

/// Compiles a shape on this thread.
fn compile_task(task: &CompileTask, began: &OnceLock<Instant>) -> CompileResult {
    catch_panic(build::job_field(&task.shape), || {
        let is_grammar = matches!(task.shape, OutputConstraint::JsonSchema(_) | OutputConstraint::Regex(_));
        // Building the vocabulary's trie must not count against the shape's time.
        let factory = is_grammar.then(|| {
            task.factory
                .get_or_init(|| build::parser_factory(&task.tokenizer, &task.eos))
        });
        began.get_or_init(Instant::now);
        let factory = || match factory {
            Some(Ok(factory)) => Ok(factory),
            Some(Err(refused)) => Err(refused.clone()),
            None => Err(ConstraintError::Vocabulary {
                why: "no parser factory was built for this shape".into(),
            }),
        };
        build::compile(&task.shape, &task.tokenizer, &task.eos, &task.memory, factory)
    })
}

/// Compiles a shape, and turns a panic into its error.
pub(super) fn catch_panic(field: &'static str, compile: impl FnOnce() -> CompileResult) -> CompileResult {
    let result = panic_utils::catch_unwind(AssertUnwindSafe(|| Ok(compile())));
    result.unwrap_or_else(|panic| {
        Err(ConstraintError::Invalid {
            field,
            why: one_line(&panic.to_string()),
        })
    })
}
