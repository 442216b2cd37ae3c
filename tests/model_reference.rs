//! The transformer against Hugging Face transformers, over tiny models of all families (`fixtures/make_models.py`).
//!
//! "Relative" difference of logits: the largest absolute difference over a prompt's rows, divided by the largest
//! absolute logit of those rows in the reference.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gristmill::device::batch::{StepBatch, StepSequence};
use gristmill::device::{Dtype, KvSpec, Precision, cpu};
use gristmill::engine::{Forward, ForwardError};
use gristmill::model::config::Config;
use gristmill::model::rope::Scaling;
use gristmill::model::weights::{StoredTensor, WeightSource, Weights, checkpoint_hash};
use gristmill::model::{KvBudget, LoadOptions, ModelError, Transformer};
use safetensors::SafeTensors;

/// Largest relative difference of logits in F32.
const RELATIVE_MAX: f64 = 1e-4;
/// Largest relative difference in BF16, whose numbers have 8 significant bits: roundings of about 0.2 % add up over
/// the layers, and these models' attention is made to react sharply.
const BF16_RELATIVE_MAX: f64 = 0.08;
const KV_BLOCKS: u32 = 64;

const MODELS: [&str; 14] = [
    "llama-plain",
    "llama-llama3-tied",
    "llama-linear-biases",
    "llama-yarn",
    "llama-yarn-mscale",
    "llama-dynamic",
    "llama-dynamic-long",
    "llama-padded",
    "mistral-window",
    "mistral-full",
    "qwen2-tied",
    "qwen2-window",
    "qwen3-tied",
    "qwen3-layers-sharded",
];

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/models")
        .join(name)
}

/// What transformers computed.
struct Reference {
    prompts: Vec<Prompt>,
    vocabulary: usize,
    context: u32,
}

struct Prompt {
    length: usize,
    /// The prompt, then greedy tokens.
    tokens: Vec<u32>,
    /// One row a prompt position, then the row before the last greedy token.
    logits: Vec<Vec<f32>>,
}

impl Reference {
    fn load(name: &str) -> Reference {
        let bytes = std::fs::read(folder(name).join("reference.safetensors")).unwrap();
        let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        let metadata = metadata.metadata().clone().unwrap();
        let lengths: Vec<usize> = serde_json::from_str(&metadata["prompt_lengths"]).unwrap();
        let vocabulary: usize = metadata["vocabulary"].parse().unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let words =
            |name: String| -> Vec<[u8; 4]> { tensors.tensor(&name).unwrap().data().as_chunks::<4>().0.to_vec() };
        let prompts = lengths
            .iter()
            .enumerate()
            .map(|(i, &length)| Prompt {
                length,
                tokens: words(format!("tokens.{i}"))
                    .into_iter()
                    .map(u32::from_le_bytes)
                    .collect(),
                logits: words(format!("logits.{i}"))
                    .chunks_exact(vocabulary)
                    .map(|row| row.iter().map(|x| f32::from_le_bytes(*x)).collect())
                    .collect(),
            })
            .collect();
        Reference {
            prompts,
            vocabulary,
            context: metadata["context"].parse().unwrap(),
        }
    }
}

fn options(reference: &Reference, precision: Precision) -> LoadOptions {
    LoadOptions {
        precision,
        kv: KvBudget::Blocks(KV_BLOCKS),
        threads: cpu::thread_pool(2).unwrap(),
        max_context: Some(reference.context),
        vocabulary: Some(reference.vocabulary),
    }
}

fn load(name: &str, reference: &Reference, precision: Precision) -> Transformer {
    Transformer::load(&folder(name), &options(reference, precision)).unwrap()
}

/// Blocks and stored tokens of one sequence.
#[derive(Debug, Clone, Default)]
struct Sequence {
    blocks: Vec<u32>,
    stored: usize,
}

/// Runs steps: what an engine would do, with blocks dealt out in an order of its own.
struct Runner<'a> {
    model: &'a mut Transformer,
    free: Vec<u32>,
}

impl Runner<'_> {
    fn new(model: &mut Transformer) -> Runner<'_> {
        // 7 is coprime to the number of blocks: neighbours in a table are no neighbours in the pool.
        let free = (0..KV_BLOCKS).map(|i| i * 7 % KV_BLOCKS).collect();
        Runner { model, free }
    }

    /// Computes the given next tokens of each sequence in one step; all rows of logits.
    fn step(&mut self, work: &mut [(&mut Sequence, &[u32])]) -> Vec<Vec<f32>> {
        self.copying_step(work, vec![])
    }

    fn copying_step(&mut self, work: &mut [(&mut Sequence, &[u32])], copies: Vec<(u32, u32)>) -> Vec<Vec<f32>> {
        let batch = self.batch(work, copies);
        let vocabulary = self.model.vocab_size();
        self.model
            .forward(&batch)
            .unwrap()
            .chunks_exact(vocabulary)
            .map(<[f32]>::to_vec)
            .collect()
    }

    fn batch(&mut self, work: &mut [(&mut Sequence, &[u32])], block_copies: Vec<(u32, u32)>) -> StepBatch {
        let mut batch = StepBatch {
            block_copies,
            ..StepBatch::default()
        };
        for (sequence, tokens) in work {
            let kv_len = sequence.stored + tokens.len();
            while sequence.blocks.len() < kv_len.div_ceil(16) {
                sequence.blocks.push(self.free.pop().expect("a free block"));
            }
            batch.sequences.push(StepSequence {
                first_token: batch.tokens.len() as u32,
                q_len: tokens.len() as u32,
                kv_len: kv_len as u32,
                first_block: batch.block_tables.len() as u32,
            });
            batch.tokens.extend_from_slice(tokens);
            batch.positions.extend(sequence.stored as u32..kv_len as u32);
            batch.block_tables.extend_from_slice(&sequence.blocks);
            sequence.stored = kv_len;
        }
        batch.logits_at = (0..batch.tokens.len() as u32).collect();
        batch
    }

    fn release(&mut self, sequence: Sequence) {
        self.free.extend(sequence.blocks);
    }
}

fn best(row: &[f32]) -> u32 {
    (0..row.len())
        .max_by(|&a, &b| row[a].total_cmp(&row[b]).then(b.cmp(&a)))
        .unwrap() as u32
}

fn relative(got: &[Vec<f32>], want: &[Vec<f32>]) -> f64 {
    assert_eq!(got.len(), want.len());
    let mut difference = 0.0f64;
    let mut largest = 0.0f64;
    for (g, w) in got.iter().zip(want) {
        assert_eq!(g.len(), w.len());
        for (a, b) in g.iter().zip(w) {
            difference = difference.max((*a as f64 - *b as f64).abs());
            largest = largest.max(b.abs() as f64);
        }
    }
    difference / largest
}

/// Runs all prompts as one batch, then greedy steps as one batch: (worst relative difference of logits, prompts whose
/// greedy tokens differ).
fn compare(model: &mut Transformer, reference: &Reference) -> (f64, usize) {
    let mut runner = Runner::new(model);
    let mut sequences = vec![Sequence::default(); reference.prompts.len()];
    let mut work: Vec<(&mut Sequence, &[u32])> = sequences
        .iter_mut()
        .zip(&reference.prompts)
        .map(|(s, p)| (s, &p.tokens[..p.length]))
        .collect();
    let mut rows = runner.step(&mut work).into_iter();
    let mut logits: Vec<Vec<Vec<f32>>> = reference
        .prompts
        .iter()
        .map(|p| rows.by_ref().take(p.length).collect())
        .collect();
    let mut chosen: Vec<Vec<u32>> = logits.iter().map(|rows| vec![best(rows.last().unwrap())]).collect();
    let steps = reference.prompts[0].tokens.len() - reference.prompts[0].length;
    for step in 1..steps {
        // The reference's own tokens go in, so that one difference does not hide what comes after it.
        let next: Vec<[u32; 1]> = reference
            .prompts
            .iter()
            .map(|p| [p.tokens[p.length + step - 1]])
            .collect();
        let mut work: Vec<(&mut Sequence, &[u32])> =
            sequences.iter_mut().zip(&next).map(|(s, t)| (s, &t[..])).collect();
        for (i, row) in runner.step(&mut work).into_iter().enumerate() {
            chosen[i].push(best(&row));
            if step == steps - 1 {
                logits[i].push(row);
            }
        }
    }
    let mut worst = 0.0f64;
    let mut differ = 0;
    for ((p, rows), chosen) in reference.prompts.iter().zip(&logits).zip(&chosen) {
        worst = worst.max(relative(rows, &p.logits));
        differ += usize::from(chosen[..] != p.tokens[p.length..]);
    }
    (worst, differ)
}

#[test]
fn logits_and_greedy_tokens_are_those_of_the_reference() {
    for name in MODELS {
        let reference = Reference::load(name);
        let (worst, differ) = compare(&mut load(name, &reference, Precision::F32), &reference);
        println!("{name}: {worst:.1e}");
        assert!(worst <= RELATIVE_MAX, "{name}: logits differ by {worst:.1e} relative");
        assert_eq!(differ, 0, "{name}: greedy tokens of {differ} prompts differ");
    }
}

#[test]
fn bf16_stays_near_the_reference() {
    for name in MODELS {
        let reference = Reference::load(name);
        let (worst, _) = compare(&mut load(name, &reference, Precision::Bf16), &reference);
        println!("{name}: {worst:.1e}");
        assert!(
            worst <= BF16_RELATIVE_MAX,
            "{name}: logits differ by {worst:.1e} relative"
        );
        assert!(worst > RELATIVE_MAX, "{name}: BF16 cannot be that exact: is it used?");
    }
}

/// A mutant must fail the comparison that the true model passes, by a wide margin.
fn assert_mutant_fails(name: &str, what: &str, change: impl FnOnce(&mut Config)) {
    let reference = Reference::load(name);
    let mut config = Config::load(&folder(name)).unwrap();
    let before = config.clone();
    change(&mut config);
    assert_ne!(config, before, "{name}: {what} changes nothing");
    let weights = Weights::open(&folder(name)).unwrap();
    let mut mutant = Transformer::from_weights(config, &weights, &options(&reference, Precision::F32)).unwrap();
    let (worst, _) = compare(&mut mutant, &reference);
    println!("{name}: {what}: {worst:.1e}");
    assert!(worst > 3.0 * RELATIVE_MAX, "{name}: {what} passes with {worst:.1e}");
}

#[test]
fn mutants_fail_the_comparison() {
    let [mut windows, mut biases, mut epsilons] = [0; 3];
    for name in MODELS {
        let config = Config::load(&folder(name)).unwrap();
        assert_mutant_fails(name, "RoPE base", |c| c.rope.theta *= 1.05);
        if config.norm_eps > 5e-4 {
            epsilons += 1;
            assert_mutant_fails(name, "norm epsilon", |c| c.norm_eps = 1e-5);
        }
        if config.rope.scaling != Scaling::None && name != "llama-dynamic" {
            assert_mutant_fails(name, "no RoPE scaling", |c| {
                c.rope.scaling = Scaling::None;
                c.max_position_embeddings = 128;
            });
        }
        if config.layers.iter().any(|l| *l != KvSpec::Full) {
            windows += 1;
            for by in [-1i32, 1] {
                assert_mutant_fails(name, "window off by one", |c| {
                    for layer in &mut c.layers {
                        if let KvSpec::Window(w) = layer {
                            *w = w.wrapping_add_signed(by);
                        }
                    }
                });
            }
            assert_mutant_fails(name, "no window", |c| c.layers.fill(KvSpec::Full));
        }
        if config.qkv_bias {
            biases += 1;
            assert_mutant_fails(name, "no q, k, v bias", |c| c.qkv_bias = false);
        }
        if config.o_bias {
            assert_mutant_fails(name, "no o bias", |c| c.o_bias = false);
        }
        if config.mlp_bias {
            assert_mutant_fails(name, "no MLP bias", |c| c.mlp_bias = false);
        }
        if config.qk_norm {
            assert_mutant_fails(name, "no q, k norm", |c| c.qk_norm = false);
        }
    }
    assert!(
        windows >= 3 && biases >= 4 && epsilons >= 8,
        "{windows} {biases} {epsilons}"
    );
}

/// Bits of all rows of a prompt computed in chunks of the given sizes (cycled).
fn in_chunks(runner: &mut Runner<'_>, tokens: &[u32], sizes: &[usize]) -> Vec<Vec<f32>> {
    let mut sequence = Sequence::default();
    let mut rows = Vec::new();
    for size in sizes.iter().cycle() {
        let next = &tokens[sequence.stored..tokens.len().min(sequence.stored + size)];
        if next.is_empty() {
            break;
        }
        rows.extend(runner.step(&mut [(&mut sequence, next)]));
    }
    runner.release(sequence);
    rows
}

fn assert_same_bits(got: &[Vec<f32>], want: &[Vec<f32>], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        for (j, (a, b)) in g.iter().zip(w).enumerate() {
            assert_eq!(a.to_bits(), b.to_bits(), "{what}: row {i} id {j}: {a} is not {b}");
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_in_a_batch_chunked_and_resumed() {
    for name in MODELS {
        let reference = Reference::load(name);
        let mut model = load(name, &reference, Precision::F32);
        let mut runner = Runner::new(&mut model);
        let all: Vec<&[u32]> = reference.prompts.iter().map(|p| &p.tokens[..]).collect();
        let alone: Vec<_> = all
            .iter()
            .map(|tokens| in_chunks(&mut runner, tokens, &[tokens.len()]))
            .collect();
        // Token by token (decode), and in chunks on both sides of a block.
        for sizes in [&[1][..], &[16], &[5, 1, 17], &[33, 2], &[15, 16, 17]] {
            for (tokens, want) in all.iter().zip(&alone) {
                let got = in_chunks(&mut runner, tokens, sizes);
                assert_same_bits(&got, want, &format!("{name}: chunks of {sizes:?}"));
            }
        }
        // A mixed batch: in each step some prefill whole or in part while others decode.
        let mut sequences = vec![Sequence::default(); all.len()];
        let mut got = vec![Vec::new(); all.len()];
        for ends in [[64, 1, 20, 40], [65, 50, 21, 41], [65, 51, 81, 42], [65, 71, 81, 104]] {
            let mut which = Vec::new();
            let mut work: Vec<(&mut Sequence, &[u32])> = Vec::new();
            for (i, s) in sequences.iter_mut().enumerate() {
                let next = &all[i][s.stored..ends[i]];
                if !next.is_empty() {
                    which.push((i, next.len()));
                    work.push((s, next));
                }
            }
            let mut rows = runner.step(&mut work).into_iter();
            for (i, count) in which {
                got[i].extend(rows.by_ref().take(count));
            }
        }
        for (i, rows) in got.iter().enumerate() {
            assert_same_bits(rows, &alone[i], &format!("{name}: prompt {i} in a mixed batch"));
        }
    }
}

#[test]
fn a_row_has_the_same_bits_behind_a_shared_prefix() {
    for name in MODELS {
        let reference = Reference::load(name);
        let mut model = load(name, &reference, Precision::F32);
        let mut runner = Runner::new(&mut model);
        let first = &reference.prompts[3].tokens[..60];
        // The same 32 tokens, then others.
        let second: Vec<u32> = first[..32]
            .iter()
            .chain(&reference.prompts[2].tokens[..30])
            .copied()
            .collect();
        let alone = in_chunks(&mut runner, &second, &[second.len()]);
        // Both in one step: the second attends to blocks that the first fills in that very step.
        let mut owner = Sequence::default();
        runner.step(&mut [(&mut owner, &first[..0x10])]);
        let (block, rest) = (owner.blocks[0], runner.free.pop().unwrap());
        owner.blocks.push(rest);
        let mut guest = Sequence {
            blocks: vec![block, rest],
            stored: 32,
        };
        let rows = runner.step(&mut [(&mut owner, &first[16..]), (&mut guest, &second[32..])]);
        assert_same_bits(&rows[44..], &alone[32..], &format!("{name}: in one step"));
        // Later, forking inside a block: its copy goes on differently.
        let fork: Vec<u32> = first[..41]
            .iter()
            .chain(&reference.prompts[2].tokens[..30])
            .copied()
            .collect();
        let alone = in_chunks(&mut runner, &fork, &[fork.len()]);
        let copy = runner.free.pop().unwrap();
        let mut guest = Sequence {
            blocks: vec![owner.blocks[0], owner.blocks[1], copy],
            stored: 41,
        };
        let rows = runner.copying_step(&mut [(&mut guest, &fork[41..])], vec![(owner.blocks[2], copy)]);
        assert_same_bits(&rows, &alone[41..], &format!("{name}: forked inside a block"));
    }
}

#[test]
fn bits_do_not_depend_on_instructions_or_threads() {
    for name in ["llama-padded", "mistral-window", "qwen3-tied"] {
        let reference = Reference::load(name);
        let mut first: Option<Vec<Vec<f32>>> = None;
        for isa in cpu::Isa::available() {
            for threads in [1, 2, 3] {
                let options = LoadOptions {
                    threads: cpu::thread_pool(threads).unwrap(),
                    ..options(&reference, Precision::F32)
                };
                let device = cpu::Cpu::with_isa(Precision::F32, Arc::clone(&options.threads), isa);
                let weights = Weights::open(&folder(name)).unwrap();
                let config = Config::load(&folder(name)).unwrap();
                let mut model = Transformer::on_device(device, config, &weights, &options).unwrap();
                let tokens = &reference.prompts[3].tokens;
                let rows = in_chunks(&mut Runner::new(&mut model), tokens, &[37, 2]);
                let want = first.get_or_insert_with(|| rows.clone());
                assert_same_bits(&rows, want, &format!("{name} on {isa:?} with {threads} threads"));
            }
        }
    }
}

/// Weights with some tensors changed.
struct Altered<F> {
    inner: Weights,
    change: F,
}

impl<F: Fn(&str, usize, &mut [f32])> WeightSource for Altered<F> {
    fn tensor(&self, name: &str, rows: Option<usize>, columns: usize) -> Result<StoredTensor<'_>, ModelError> {
        let tensor = self.inner.tensor(name, rows, columns)?;
        assert_eq!(tensor.dtype, Dtype::F32);
        let mut values: Vec<f32> = tensor
            .data
            .as_chunks::<4>()
            .0
            .iter()
            .map(|b| f32::from_le_bytes(*b))
            .collect();
        (self.change)(name, columns, &mut values);
        let data = Cow::Owned(values.iter().flat_map(|x| x.to_le_bytes()).collect());
        Ok(StoredTensor { data, ..tensor })
    }
    fn path_of(&self, name: &str) -> &Path {
        self.inner.path_of(name)
    }
}

#[test]
fn a_row_that_overflows_harms_no_other() {
    const POISON: u32 = 50;
    // Only `POISON` has something in dimension 0, no layer writes there, and the first layer's network overflows on
    // it: the token's later keys and values are not finite.
    let poisoned = |name: &str, columns: usize, values: &mut [f32]| {
        if name == "model.embed_tokens.weight" {
            for (token, row) in values.chunks_exact_mut(columns).enumerate() {
                row[0] = if token == POISON as usize { 1.0 } else { 0.0 };
            }
        } else if name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight") {
            values[..columns].fill(0.0);
        } else if name.contains("layers.0.mlp.gate_proj") || name.contains("layers.0.mlp.up_proj") {
            values[..columns].fill(0.0);
            values[0] = 1e25;
        }
    };
    let name = "llama-plain";
    let reference = Reference::load(name);
    let source = Altered {
        inner: Weights::open(&folder(name)).unwrap(),
        change: poisoned,
    };
    let config = Config::load(&folder(name)).unwrap();
    let mut model = Transformer::from_weights(config, &source, &options(&reference, Precision::F32)).unwrap();
    let vocabulary = model.vocab_size();
    let mut runner = Runner::new(&mut model);
    let sound: Vec<u32> = reference.prompts[3]
        .tokens
        .iter()
        .map(|&t| if t == POISON { 6 } else { t })
        .collect();
    let alone = in_chunks(&mut runner, &sound, &[sound.len()]);
    assert!(
        alone.iter().flatten().any(|x| x.abs() > 1.0),
        "the altered model still computes something"
    );

    let (mut good, mut bad) = (Sequence::default(), Sequence::default());
    let poison: Vec<u32> = std::iter::repeat_n(POISON, 30).collect();
    let batch = runner.batch(&mut [(&mut bad, &poison), (&mut good, &sound)], vec![]);
    match runner.model.forward(&batch) {
        Err(ForwardError::NotFinite(rows)) => assert_eq!(rows, (0..30).collect::<Vec<_>>()),
        other => panic!("{other:?}"),
    }
    let rows: Vec<Vec<f32>> = runner
        .model
        .logits()
        .chunks_exact(vocabulary)
        .map(<[f32]>::to_vec)
        .collect();
    assert_same_bits(&rows[30..], &alone, "beside a row that overflows");
    // Its blocks go to another sequence, which must not find anything of it there.
    runner.release(good);
    runner.release(bad);
    for sizes in [&[sound.len()][..], &[1], &[9, 30]] {
        let again = in_chunks(&mut runner, &sound, sizes);
        assert_same_bits(&again, &alone, "in blocks that held values that are not finite");
    }
}

#[test]
fn unfit_batches_and_options_are_refused() {
    let reference = Reference::load("llama-padded");
    let mut model = load("llama-padded", &reference, Precision::F32);
    assert_eq!(model.vocab_size(), 101);
    let mut refused = |change: &dyn Fn(&mut StepBatch), words: &str| {
        let mut runner = Runner::new(&mut model);
        let mut sequence = Sequence::default();
        let mut batch = runner.batch(&mut [(&mut sequence, &[7, 8, 9])], vec![]);
        change(&mut batch);
        match runner.model.forward(&batch) {
            Err(ForwardError::Device(message)) => assert!(message.contains(words), "{message}"),
            other => panic!("{words}: {other:?}"),
        }
    };
    refused(&|b| b.tokens[1] = 112, "token id 112");
    refused(&|b| b.positions[2] = 5, "positions");
    refused(&|b| b.block_tables[0] = KV_BLOCKS, "KV block 64");
    refused(&|b| b.block_tables.clear(), "block table is too short");
    refused(&|b| b.logits_at = vec![3], "no token 3");
    refused(&|b| b.logits_at = vec![1, 1], "ascend");
    refused(&|b| b.sequences.clear(), "belong to no sequence");
    refused(&|b| b.sequences[0].kv_len = 129, "more than 128");
    assert_eq!(model.forward(&StepBatch::default()).unwrap(), &[] as &[f32]);

    let with = |change: &dyn Fn(&mut LoadOptions)| {
        let mut options = options(&reference, Precision::F32);
        change(&mut options);
        Transformer::load(&folder("llama-padded"), &options)
            .map(|_| ())
            .unwrap_err()
            .to_string()
    };
    assert!(with(&|o| o.max_context = Some(129)).contains("129 tokens is more than the model's 128"));
    assert!(with(&|o| o.kv = KvBudget::Bytes(100)).contains("holds no block"));
}

/// A copy of a model's folder to break.
fn copy_of(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(folder(name)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    dir
}

fn load_error(dir: &Path) -> String {
    let options = options(&Reference::load("llama-plain"), Precision::F32);
    let error = Transformer::load(
        dir,
        &LoadOptions {
            max_context: None,
            ..options
        },
    )
    .map(|_| ())
    .unwrap_err();
    let line = error.to_string();
    assert!(!line.contains('\n') && line.len() < 500, "not one clear line: {line}");
    line
}

/// Changes the header of a safetensors file.
fn change_header(path: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let bytes = std::fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    change(&mut header);
    let header = serde_json::to_vec(&header).unwrap();
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(&header);
    out.extend_from_slice(&bytes[8 + length..]);
    std::fs::write(path, out).unwrap();
}

fn assert_broken(model: &str, file: &str, words: &[&str], break_it: impl FnOnce(&Path)) {
    let dir = copy_of(model);
    break_it(dir.path());
    let line = load_error(dir.path());
    for word in words.iter().chain([&file]) {
        assert!(line.contains(word), "{line:?} does not say {word:?}");
    }
}

#[test]
fn broken_safetensors_are_refused_in_one_line() {
    let file = "model.safetensors";
    let lie = |bytes: &'static [u8]| {
        move |dir: &Path| {
            let path = dir.join(file);
            let mut all = std::fs::read(&path).unwrap();
            all[..8].copy_from_slice(bytes);
            std::fs::write(path, all).unwrap();
        }
    };
    assert_broken("llama-plain", file, &["not a sound safetensors file"], lie(&[0xff; 8]));
    assert_broken(
        "llama-plain",
        file,
        &["not a sound safetensors file"],
        lie(&[0, 0, 0, 4, 0, 0, 0, 0]),
    );
    assert_broken(
        "llama-plain",
        file,
        &["not a sound safetensors file"],
        lie(&[1, 0, 0, 0, 0, 0, 0, 0]),
    );
    assert_broken("llama-plain", file, &["not a sound safetensors file"], |dir| {
        let bytes = std::fs::read(dir.join(file)).unwrap();
        std::fs::write(dir.join(file), &bytes[..bytes.len() - 4]).unwrap();
    });
    assert_broken("llama-plain", file, &["not a sound safetensors file"], |dir| {
        std::fs::write(dir.join(file), b"").unwrap();
    });
    assert_broken("llama-plain", file, &["not a sound safetensors file"], |dir| {
        change_header(&dir.join(file), |h| {
            h["model.norm.weight"]["data_offsets"] = serde_json::json!([0, 1u64 << 60])
        });
    });
    assert_broken("llama-plain", file, &["not a sound safetensors file"], |dir| {
        change_header(&dir.join(file), |h| {
            h["model.norm.weight"]["shape"] = serde_json::json!([u64::MAX, 4])
        });
    });
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    let file = "model.safetensors";
    let tensor = "model.layers.1.mlp.up_proj.weight";
    let rename = |dir: &Path| {
        change_header(&dir.join(file), |h| {
            let entry = h.as_object_mut().unwrap().remove(tensor).unwrap();
            h["model.layers.1.other"] = entry;
        });
    };
    assert_broken("llama-plain", file, &[tensor, "is missing"], rename);
    assert_broken("llama-plain", file, &[tensor, "shape [32, 48]", "[48, 32]"], |dir| {
        change_header(&dir.join(file), |h| h[tensor]["shape"] = serde_json::json!([32, 48]));
    });
    assert_broken("llama-plain", file, &[tensor, "I32"], |dir| {
        change_header(&dir.join(file), |h| h[tensor]["dtype"] = serde_json::json!("I32"));
    });
    for (model, element) in [
        ("llama-plain", f32::NAN.to_le_bytes().to_vec()),
        ("llama-llama3-tied", half::bf16::INFINITY.to_le_bytes().to_vec()),
        ("llama-yarn", half::f16::NEG_INFINITY.to_le_bytes().to_vec()),
    ] {
        assert_broken(model, file, &[tensor, "row 0", "not finite"], |dir| {
            let mut bytes = std::fs::read(dir.join(file)).unwrap();
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
            let at = 8 + length + header[tensor]["data_offsets"][0].as_u64().unwrap() as usize + 3 * element.len();
            bytes[at..at + element.len()].copy_from_slice(&element);
            std::fs::write(dir.join(file), bytes).unwrap();
        });
    }
}

#[test]
fn an_index_reads_what_it_lists_and_nothing_else() {
    let model = "qwen3-layers-sharded";
    let index = "model.safetensors.index.json";
    let change_index = |dir: &Path, file: &str| {
        let mut value: serde_json::Value = serde_json::from_slice(&std::fs::read(dir.join(index)).unwrap()).unwrap();
        value["weight_map"]["model.norm.weight"] = serde_json::json!(file);
        std::fs::write(dir.join(index), value.to_string()).unwrap();
    };
    // The unlisted file beside the shards holds NaN; that the model loads shows that it is not read.
    assert!(folder(model).join("unlisted.safetensors").exists());
    for file in [
        "../model.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "pytorch_model.bin",
        ".safetensors",
        "",
    ] {
        assert_broken(
            model,
            index,
            &["model.norm.weight", "not a safetensors file of this folder"],
            |dir| {
                change_index(dir, file);
            },
        );
    }
    assert_broken(model, "gone.safetensors", &["cannot read"], |dir| {
        change_index(dir, "gone.safetensors")
    });
    assert_broken(
        model,
        "unlisted.safetensors",
        &["model.norm.weight", "is missing"],
        |dir| {
            change_index(dir, "unlisted.safetensors");
        },
    );
    assert_broken(model, index, &["not valid JSON"], |dir| {
        std::fs::write(dir.join(index), "{").unwrap()
    });
    assert_broken(model, index, &["no `weight_map`"], |dir| {
        std::fs::write(dir.join(index), "{}").unwrap()
    });
}

#[test]
fn folders_that_are_no_checkpoint_are_refused() {
    let weights = "model.safetensors";
    assert_broken(
        "llama-plain",
        "pytorch_model.bin",
        &["only as pickle", "convert"],
        |dir| {
            std::fs::rename(dir.join(weights), dir.join("pytorch_model.bin")).unwrap();
        },
    );
    assert_broken("llama-plain", "neither `model.safetensors`", &[], |dir| {
        std::fs::remove_file(dir.join(weights)).unwrap();
    });
    assert_broken("llama-plain", "tokenizer.model", &["no `tokenizer.json`"], |dir| {
        std::fs::write(dir.join("tokenizer.model"), b"x").unwrap();
    });
    assert_broken(
        "llama-plain",
        "config.json",
        &["`FalconForCausalLM` is not supported"],
        |dir| {
            let text = std::fs::read_to_string(dir.join("config.json")).unwrap();
            std::fs::write(
                dir.join("config.json"),
                text.replace("LlamaForCausalLM", "FalconForCausalLM"),
            )
            .unwrap();
        },
    );
    assert_broken("llama-plain", "config.json", &["cannot read"], |dir| {
        std::fs::remove_file(dir.join("config.json")).unwrap();
    });
    assert_broken("llama-plain", "generation_config.json", &["not valid JSON"], |dir| {
        std::fs::write(dir.join("generation_config.json"), "nope").unwrap();
    });
}

#[test]
fn end_of_sequence_ids_are_united_and_hashes_tell_checkpoints_apart() {
    assert_eq!(Config::load(&folder("llama-plain")).unwrap().eos_token_ids, [2, 5]);
    let dir = copy_of("qwen3-layers-sharded");
    let before = checkpoint_hash(dir.path()).unwrap();
    assert_eq!(before.len(), 64);
    assert_eq!(before, checkpoint_hash(&folder("qwen3-layers-sharded")).unwrap());
    std::fs::write(dir.path().join("unlisted.safetensors"), b"anything").unwrap();
    assert_eq!(
        before,
        checkpoint_hash(dir.path()).unwrap(),
        "an unlisted file does not count"
    );
    let shard = dir.path().join("model-00002-of-00005.safetensors");
    let mut bytes = std::fs::read(&shard).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&shard, bytes).unwrap();
    assert_ne!(before, checkpoint_hash(dir.path()).unwrap());
}
