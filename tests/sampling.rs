//! What a job file asks of sampling reaches the device, field by field: jobs through the built program, of which every drawn token and
//! every log probability is held against a plain computation from the model's logits.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use gristmill::device::{Precision, cpu};
use gristmill::engine::philox::StreamKey;
use gristmill::engine::request::SampleId;
use gristmill::model::{KvBudget, LoadOptions, Transformer};
use gristmill::tokenizer::Tokenizer;
use serde_json::{Value, json};

use crate::commands::run;
use crate::model_reference::harness::{KV_BLOCKS, Runner, in_chunks};
use crate::support::{Run, arg, python, root};

/// What a job asks for; every field has a number of its own in `generate`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Asked {
    temperature: f64,
    top_k: usize,
    top_p: f64,
    min_p: f64,
    repetition: f64,
    presence: f64,
    frequency: f64,
    seed: u64,
}

const PLAIN: Asked = Asked {
    temperature: 1.0,
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
    repetition: 1.0,
    presence: 0.0,
    frequency: 0.0,
    seed: 11,
};

/// Everything at once, each value such that it changes draws beside the others.
const ALL: Asked = Asked {
    temperature: 1.4,
    top_k: 40,
    top_p: 0.9,
    min_p: 0.02,
    repetition: 1.3,
    presence: 0.6,
    frequency: 0.4,
    seed: 12,
};

impl Asked {
    fn generate(&self) -> String {
        format!(
            "temperature: {}, top_k: {}, top_p: {}, min_p: {}, repetition_penalty: {}, presence_penalty: {}, frequency_penalty: {}, seed: {}",
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.repetition,
            self.presence,
            self.frequency,
            self.seed
        )
    }

    /// The same with one field as if the job had not given it, or given another: by the field's name.
    fn without(&self) -> [(&'static str, Asked); 8] {
        [
            (
                "temperature",
                Asked {
                    temperature: 1.0,
                    ..*self
                },
            ),
            ("top_k", Asked { top_k: 0, ..*self }),
            ("top_p", Asked { top_p: 1.0, ..*self }),
            ("min_p", Asked { min_p: 0.0, ..*self }),
            (
                "repetition_penalty",
                Asked {
                    repetition: 1.0,
                    ..*self
                },
            ),
            ("presence_penalty", Asked { presence: 0.0, ..*self }),
            (
                "frequency_penalty",
                Asked {
                    frequency: 0.0,
                    ..*self
                },
            ),
            ("seed", Asked { seed: 1, ..*self }),
        ]
    }

    /// The tokens that may be drawn in order of ids, with their probabilities, from raw logits, by the order of
    /// `src/device/draw.rs`, in doubles and without a thought for speed.
    fn distribution(
        &self,
        logits: &[f32],
        allowed: &dyn Fn(u32) -> bool,
        prompt: &[u32],
        completion: &[u32],
    ) -> Vec<(u32, f64)> {
        let mut tokens: Vec<(u32, f64)> = (0..logits.len() as u32)
            .filter(|id| allowed(*id))
            .map(|id| {
                let mut logit = f64::from(logits[id as usize]);
                let seen = completion.iter().filter(|other| **other == id).count();
                if seen > 0 || prompt.contains(&id) {
                    logit = if logit > 0.0 {
                        logit / self.repetition
                    } else {
                        logit * self.repetition
                    };
                }
                if seen > 0 {
                    logit -= self.presence + self.frequency * seen as f64;
                }
                (id, logit / self.temperature)
            })
            .collect();
        tokens.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if self.top_k > 0 {
            tokens.truncate(self.top_k);
        }
        let max = tokens[0].1;
        for (_, weight) in &mut tokens {
            *weight = (*weight - max).exp();
        }
        let total: f64 = tokens.iter().map(|(_, weight)| weight).sum();
        let mut sum = 0.0;
        let enough = tokens.iter().position(|(_, weight)| {
            sum += weight / total;
            sum >= self.top_p
        });
        if self.top_p < 1.0 {
            tokens.truncate(enough.map_or(tokens.len(), |at| at + 1));
        }
        tokens.retain(|(_, weight)| *weight >= self.min_p);
        let total: f64 = tokens.iter().map(|(_, weight)| weight).sum();
        tokens.sort_by_key(|(id, _)| *id);
        tokens.into_iter().map(|(id, weight)| (id, weight / total)).collect()
    }
}

/// One sample of a row, as a job published it.
struct Sample {
    row: u64,
    sample: u32,
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    logprobs: Vec<f64>,
}

const SAMPLES: u32 = 2;

const READ: &str = "import json, sys, pyarrow.dataset as ds\n\
    print(json.dumps(ds.dataset(sys.argv[1], format='parquet').to_table(columns=\
    ['row', 'status', 'prompt_tokens', 'token_ids', 'logprobs']).to_pylist()))";

/// The prompt of a row.
fn prompt(row: usize) -> String {
    format!("Ticket {row}: the tone, the tone and the parcel of")
}

fn published(output: &Path, tokenizer: &Tokenizer) -> Vec<Sample> {
    let rows = Run::of(Command::new(python()).args(["-c", READ, arg(output)]))
        .expect(0)
        .json();
    let samples = rows.as_array().unwrap().iter().flat_map(|row| {
        let prompt = tokenizer
            .encode(&prompt(row["row"].as_u64().unwrap() as usize), true)
            .unwrap();
        assert_eq!(row["prompt_tokens"], prompt.len(), "{row}");
        (0..SAMPLES).map(move |sample| Sample {
            row: row["row"].as_u64().unwrap(),
            sample,
            prompt: prompt.clone(),
            tokens: serde_json::from_value(row["token_ids"][sample as usize].clone()).unwrap(),
            logprobs: serde_json::from_value(row["logprobs"][sample as usize].clone()).unwrap(),
        })
    });
    samples.collect()
}

/// Runs a job over eight rows with `generate` in its file, twice each.
fn job(folder: &Path, name: &str, generate: &str) -> std::path::PathBuf {
    let rows = (0..8).map(|row| format!("{}\n", json!({"text": prompt(row)})));
    fs::write(folder.join("rows.jsonl"), rows.collect::<String>()).unwrap();
    let text = format!(
        "name: {name}\nmodel: {}\nprecision: f32\ninput: {{uri: rows.jsonl}}\nprompt: {{text: '{{{{ text }}}}'}}\n\
         generate: {{{generate}, n: {SAMPLES}, logprobs: true}}\noutput: {{uri: {name}, token_ids: true}}\n",
        root().join("jobs/demo/model").display()
    );
    let path = folder.join(format!("{name}.yaml"));
    fs::write(&path, text).unwrap();
    run(&["run", arg(&path), "--quiet"]);
    folder.join(name)
}

/// The demo model and its tokenizer, as the jobs have them.
struct Model {
    transformer: Transformer,
    tokenizer: Arc<Tokenizer>,
}

impl Model {
    fn load() -> Model {
        let folder = root().join("jobs/demo/model");
        let tokenizer = Arc::new(Tokenizer::load(&folder).unwrap());
        let options = LoadOptions {
            precision: Precision::F32,
            kv_format: Precision::F32.kv_format(),
            channels: None,
            isa: None,
            kv: KvBudget::Blocks(KV_BLOCKS),
            threads: Arc::new(cpu::Threads::new(2).unwrap()),
            max_context: None,
            vocabulary: Some(tokenizer.vocab_size()),
        };
        let transformer = Transformer::load(&folder, &options).unwrap();
        Model { transformer, tokenizer }
    }

    /// Logits before each token of each sample's completion.
    fn logits(&mut self, samples: &[Sample]) -> Vec<Vec<Vec<f32>>> {
        let mut runner = Runner::new(&mut self.transformer);
        samples
            .iter()
            .map(|sample| {
                let tokens = [&sample.prompt[..], &sample.tokens].concat();
                let mut rows = in_chunks(&mut runner, &tokens, &[tokens.len()]);
                rows.drain(..sample.prompt.len() - 1);
                rows
            })
            .collect()
    }
}

/// Which tokens a shape allows after those of a completion; `None`: what comes next is not drawn.
type Shape<'a> = &'a dyn Fn(&[u32]) -> Option<BTreeSet<u32>>;

/// Holds the samples against what `asked` gives with the random numbers of generation `attempt`: (draws, those that differ).
fn replay(
    asked: &Asked,
    attempt: u32,
    samples: &[Sample],
    logits: &[Vec<Vec<f32>>],
    shape: Shape,
    model: &Model,
) -> (usize, usize) {
    let unused_ids: BTreeSet<u32> = model.tokenizer.unused_ids().iter().copied().collect();
    let (mut draws, mut differ) = (0, 0);
    for (sample, logits) in samples.iter().zip(logits) {
        let id = SampleId {
            job: 0,
            row: sample.row,
            sample: sample.sample,
            attempt,
        };
        let key = StreamKey::of(asked.seed, id);
        for (at, &token) in sample.tokens.iter().enumerate() {
            let completion = &sample.tokens[..at];
            let Some(shaped) = shape(completion) else { continue };
            let allowed = |id: u32| !unused_ids.contains(&id) && (shaped.is_empty() || shaped.contains(&id));
            let uniform = key.uniform((sample.prompt.len() + at) as u32);
            let mut below = 0.0;
            let span = asked
                .distribution(&logits[at], &allowed, &sample.prompt, completion)
                .into_iter()
                .find_map(|(id, probability)| {
                    below += probability;
                    (id == token).then_some((below - probability, below))
                });
            draws += 1;
            // Sums in single precision end a little beside those in doubles.
            let is_drawn = |(from, to): (f64, f64)| (from - 1e-5..to + 1e-5).contains(&uniform);
            differ += usize::from(!span.is_some_and(is_drawn));
        }
    }
    (draws, differ)
}

/// Anything goes.
fn free(_: &[u32]) -> Option<BTreeSet<u32>> {
    Some(BTreeSet::new())
}

/// Log probabilities are those of the raw distribution, whatever else is asked; of tokens that a shape forces nobody computes them,
/// and they are 0.
fn assert_log_probabilities(samples: &[Sample], logits: &[Vec<Vec<f32>>], shape: Shape) {
    for (sample, logits) in samples.iter().zip(logits) {
        assert_eq!(sample.logprobs.len(), sample.tokens.len());
        for (at, (token, logprob)) in sample.tokens.iter().zip(&sample.logprobs).enumerate() {
            let sum: f64 = logits[at].iter().map(|logit| f64::from(*logit).exp()).sum();
            let expected = f64::from(logits[at][*token as usize]) - sum.ln();
            let is_forced = *logprob == 0.0 && shape(&sample.tokens[..at]).is_none();
            assert!(
                is_forced || (logprob - expected).abs() < 1e-4,
                "row {}, token {at}: {logprob}, not {expected}",
                sample.row
            );
        }
    }
}

/// One field at a time, with a value that changes draws by itself.
fn each_field() -> Vec<(&'static str, Asked)> {
    ALL.without()
        .into_iter()
        .map(|(name, _)| {
            let mut one = Asked { seed: 13, ..PLAIN };
            match name {
                "temperature" => one.temperature = ALL.temperature,
                "top_k" => one.top_k = 5,
                "top_p" => one.top_p = 0.6,
                "min_p" => one.min_p = 0.2,
                "repetition_penalty" => one.repetition = 1.5,
                "presence_penalty" => one.presence = 1.5,
                "frequency_penalty" => one.frequency = 1.0,
                "seed" => {}
                other => panic!("{other}"),
            }
            (name, one)
        })
        .collect()
}

#[test]
fn each_field_of_sampling_reaches_the_device() {
    let mut model = Model::load();
    let folder = tempfile::tempdir().unwrap();
    for (name, asked) in [&each_field()[..], &[("all", ALL)]].concat() {
        let output = job(
            folder.path(),
            name,
            &format!("{}, max_tokens: 24, ignore_eos: true", asked.generate()),
        );
        let samples = published(&output, &model.tokenizer);
        assert!(samples.iter().all(|sample| sample.tokens.len() == 24));
        let logits = model.logits(&samples);
        assert_log_probabilities(&samples, &logits, &free);
        let (draws, differ) = replay(&asked, 0, &samples, &logits, &free, &model);
        assert_eq!((draws, differ), (8 * 24 * SAMPLES as usize, 0), "{name}");
        // A field that had no say would go unnoticed, were it not seen in these very draws.
        for (field, other) in asked.without() {
            if other != asked && (field == name || name == "all" || field == "seed") {
                let (_, differ) = replay(&other, 0, &samples, &logits, &free, &model);
                assert!(differ > 0, "{name}: {field} changes no draw");
            }
        }
    }
}

/// What a line of an OpenAI batch asks for takes the place of what its job does.
#[test]
fn each_field_of_a_line_reaches_the_device() {
    let mut model = Model::load();
    let folder = tempfile::tempdir().unwrap();
    let asked = [&each_field()[..], &[("all", ALL)]].concat();
    let lines = asked.iter().enumerate().map(|(row, (_, asked))| {
        let body = json!({
            "model": "any", "prompt": prompt(row), "max_tokens": 24, "n": SAMPLES,
            "temperature": asked.temperature, "top_k": asked.top_k, "top_p": asked.top_p, "min_p": asked.min_p,
            "repetition_penalty": asked.repetition, "presence_penalty": asked.presence,
            "frequency_penalty": asked.frequency, "seed": asked.seed, "ignore_eos": true,
        });
        let line = json!({"custom_id": format!("{row}"), "method": "POST", "url": "/v1/completions", "body": body});
        format!("{line}\n")
    });
    fs::write(folder.path().join("rows.jsonl"), lines.collect::<String>()).unwrap();
    let job = format!(
        "name: lines\nmodel: {}\nprecision: f32\ninput: {{uri: rows.jsonl}}\n\
         generate: {{{}, max_tokens: 3, n: {SAMPLES}, logprobs: true}}\noutput: {{uri: out, token_ids: true}}\n",
        root().join("jobs/demo/model").display(),
        Asked { seed: 99, ..PLAIN }.generate()
    );
    let path = folder.path().join("lines.yaml");
    fs::write(&path, job).unwrap();
    run(&["run", arg(&path), "--quiet"]).expect(0);
    let samples = published(&folder.path().join("out"), &model.tokenizer);
    assert_eq!(samples.len(), asked.len() * SAMPLES as usize);
    let logits = model.logits(&samples);
    for (at, (sample, logits)) in samples.iter().zip(logits).enumerate() {
        let (name, asked) = &asked[sample.row as usize];
        let one = (std::slice::from_ref(sample), &[logits][..]);
        let (draws, differ) = replay(asked, 0, one.0, one.1, &free, &model);
        assert_eq!((draws, differ), (24, 0), "{name}, sample {at}");
        let job_seed = Asked { seed: 99, ..*asked };
        assert!(
            replay(&job_seed, 0, one.0, one.1, &free, &model).1 > 0,
            "{name}: the job's seed draws the same"
        );
    }
}

/// A retry draws with numbers of its own, and later samples of a row with others than the first.
#[test]
fn a_retry_draws_its_own_random_numbers() {
    let mut model = Model::load();
    let folder = tempfile::tempdir().unwrap();
    let asked = Asked {
        seed: 21,
        temperature: 1.2,
        ..PLAIN
    };
    let output = job(
        folder.path(),
        "again",
        &format!("{}, max_tokens: 6, ignore_eos: true", asked.generate()),
    );
    run(&["retry", arg(&output), "--truncated", "--max-tokens", "12"]).expect(0);
    let path = folder.path().join("again.yaml");
    run(&["run", arg(&path), "--quiet"]).expect(0);
    let samples = published(&output, &model.tokenizer);
    assert!(samples.iter().all(|sample| sample.tokens.len() == 12));
    let logits = model.logits(&samples);
    assert_log_probabilities(&samples, &logits, &free);
    let (draws, differ) = replay(&asked, 1, &samples, &logits, &free, &model);
    assert_eq!((draws, differ), (8 * 12 * SAMPLES as usize, 0));
    let (_, differ) = replay(&asked, 0, &samples, &logits, &free, &model);
    assert!(differ > draws / 2, "the first generation's numbers give other tokens");
}

/// Penalties count what a shape forces, and hold among what it allows.
#[test]
fn penalties_hold_under_a_shape() {
    const TAIL: &str = "\"}";
    const MOST: usize = 40;
    let mut model = Model::load();
    let tokenizer = model.tokenizer.clone();
    let folder = tempfile::tempdir().unwrap();
    let asked = Asked {
        repetition: 1.2,
        presence: 1.0,
        frequency: 0.5,
        top_k: 50,
        ..ALL
    };
    let schema = json!({
        "type": "object", "additionalProperties": false, "required": ["tone"],
        "properties": {"tone": {"type": "string", "pattern": format!("^[a-z ]{{1,{MOST}}}$")}},
    });
    let output = job(
        folder.path(),
        "shaped",
        &format!("{}, max_tokens: 60, json_schema: {schema}", asked.generate()),
    );
    let samples = published(&output, &tokenizer);
    let texts: Vec<String> = samples.iter().map(|sample| tokenizer.decode(&sample.tokens)).collect();
    for text in &texts {
        let value: Value =
            serde_json::from_str(text.trim_end_matches("<|im_end|>")).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert!(!value["tone"].as_str().unwrap().is_empty());
    }
    // Within the string: letters and spaces as far as there is room, or the end of it.
    let within = |completion: &[u32]| -> Option<BTreeSet<u32>> {
        let text = tokenizer.decode(completion);
        let (_, said) = text.split_once(":")?;
        let said = said.trim_start().strip_prefix('"')?;
        if said.is_empty() || said.len() >= MOST || said.contains('"') {
            return None;
        }
        let allowed = (0..tokenizer.vocab_size() as u32).filter(|id| {
            let bytes = tokenizer.token_bytes(*id);
            let letters = bytes
                .iter()
                .take_while(|b| b.is_ascii_lowercase() || **b == b' ')
                .count();
            let rest = &bytes[letters..];
            !bytes.is_empty()
                && !tokenizer.is_special(*id)
                && said.len() + letters <= MOST
                && TAIL.as_bytes().starts_with(rest)
        });
        Some(allowed.collect())
    };
    let logits = model.logits(&samples);
    assert_log_probabilities(&samples, &logits, &within);
    let (draws, differ) = replay(&asked, 0, &samples, &logits, &within, &model);
    assert!(draws > 50, "{draws} draws: {texts:?}");
    assert_eq!(differ, 0, "of {draws}: {texts:?}");
    for (field, other) in asked.without() {
        let (_, differ) = replay(&other, 0, &samples, &logits, &within, &model);
        let penalty = field.ends_with("penalty");
        assert!(differ > 0 || !penalty, "{field} changes no draw");
    }
}
