//! Fixture models, what transformers computed with them, and steps as an engine would run them.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gristmill::device::batch::{BlockCopy, StepBatch};
use gristmill::device::{Dtype, Precision, cpu};
use gristmill::engine::Forward;
use gristmill::model::config::Config;
use gristmill::model::weights::{StoredTensor, WeightSource, Weights};
use gristmill::model::{KvBudget, LoadOptions, ModelError, Transformer};
use safetensors::SafeTensors;

pub(crate) const KV_BLOCKS: u32 = 64;

pub(crate) const MODELS: [&str; 77] = [
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
    "qwen3-fp8",
    "qwen3-layers-sharded",
    "mixtral-twins",
    "mixtral-all-window",
    "qwen3moe-tied",
    "qwen3moe-dense-layers-sharded",
    "olmoe-experts",
    "qwen2moe-weighted",
    "glm4moe-corrected",
    "granitemoe-shared",
    "granitemoe-tied",
    "ernie45-tied",
    "ernie45moe-corrected",
    "gptoss-transposed",
    "gptoss-mxfp4",
    "gemma2-capped",
    "gemma2-biases",
    "gemma3-types",
    "gemma3-images",
    "gemma4-keys",
    "gemma4-images",
    "gemma4-experts",
    "gemma4-shared",
    "gemma-tied",
    "smollm3-nope",
    "smollm3-interval",
    "granite-factors",
    "granite-tied",
    "seed-oss-biases",
    "phi3-longrope-long",
    "phi3-longrope-short",
    "phi3-window",
    "ministral-types",
    "mistral3-images",
    "glm-plain",
    "glm4-norms",
    "exaone4-windows",
    "exaone4-full",
    "ministral3-plain",
    "olmo2-biases",
    "olmo2-tied",
    "olmo3-windows",
    "cohere-tied",
    "cohere2-windows",
    "qwen35-recurrent",
    "qwen35-images",
    "qwen3next-experts",
    "qwen35moe-fused",
    "granite4-experts",
    "granite4-dense",
    "glm4moe-groups",
    "deepseek2-lite",
    "deepseek2-groups",
    "deepseek3-groups",
    "deepseek3-fp8",
    "kimi-heads",
    "glm4moelite-fused",
    "minimaxm2-corrected",
    "minimaxm2-fused",
    "nemotronh-dense",
    "nemotronh-experts",
    "nemotronh-fused",
    "llama4-images",
    "llama4-biases",
];

/// Quantized by the libraries whose formats they have (`fixtures/make_quantized.py`).
pub(crate) const QUANTIZED: [&str; 16] = [
    "llama-bnb-fp4",
    "llama-bnb-int8",
    "llama-ct-fp8",
    "llama-ct-mxfp4",
    "llama-ct-nvfp4",
    "llama-gptq-2bit",
    "llama-gptq-8bit-v2",
    "llama-modelopt-fp8",
    "mistral-ct-w4a16-zeros",
    "mixtral-awq",
    "phi3-bnb-nf4",
    "qwen2-ct-int8",
    "qwen2-gptq",
    "qwen3-ct-fp8-blocks",
    "qwen3-modelopt-nvfp4",
    "qwen3moe-ct-w4a16",
];

/// Adapters of small models (`fixtures/make_adapters.py`), each with its model.
pub(crate) const ADAPTERS: [(&str, &str); 7] = [
    ("llama-plain-all", "llama-plain"),
    ("llama-plain-attention", "llama-plain"),
    ("llama-plain-stabilized", "llama-plain"),
    ("llama-plain-head", "llama-plain"),
    ("phi3-window-fused", "phi3-window"),
    ("glm-plain-attention", "glm-plain"),
    ("qwen3moe-tied-attention", "qwen3moe-tied"),
];

/// Converted and quantized by llama.cpp (`fixtures/make_gguf.py`).
pub(crate) const GGUF: [&str; 27] = [
    "command-r-q8_0",
    "cohere2-q8_0",
    "ernie45-bf16",
    "exaone4-q8_0",
    "gemma-q8_0",
    "gemma2-q8_0",
    "gemma3-q8_0",
    "glm4-q8_0",
    "glm4moe-q8_0",
    "gpt-oss-mxfp4",
    "granite-q8_0",
    "granitemoe-q8_0",
    "llama-every-format",
    "llama-linear-f16",
    "llama-q4_0",
    "llama-q8_0",
    "mixtral-q8_0",
    "olmo2-q8_0",
    "olmo3-q8_0",
    "olmoe-q8_0",
    "phi3-q8_0",
    "qwen2-q4_0-tied",
    "qwen2moe-q8_0",
    "qwen3-q4_k_m-split",
    "qwen3moe-iq4_nl",
    "seed-oss-q8_0",
    "smollm3-q8_0",
];

/// Models of all families, and of all formats.
pub(crate) fn all_models() -> impl Iterator<Item = &'static str> {
    MODELS.into_iter().chain(QUANTIZED).chain(GGUF)
}

#[test]
fn every_model_of_the_fixtures_is_tried() {
    let adapters = ADAPTERS.map(|(adapter, _)| adapter);
    for (kind, tried) in [
        ("models", &MODELS[..]),
        ("quantized", &QUANTIZED[..]),
        ("adapters", &adapters[..]),
        ("gguf", &GGUF[..]),
    ] {
        let entries = std::fs::read_dir(fixtures().join(kind)).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        let mut tried = tried.to_vec();
        names.sort();
        tried.sort_unstable();
        assert_eq!(names, tried);
    }
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// The folder of a model's files.
pub(crate) fn directory(name: &str) -> PathBuf {
    let kind = if QUANTIZED.contains(&name) {
        "quantized"
    } else if ADAPTERS.iter().any(|(adapter, _)| *adapter == name) {
        "adapters"
    } else if GGUF.contains(&name) {
        "gguf"
    } else {
        "models"
    };
    fixtures().join(kind).join(name)
}

/// What a user gives as the model: a folder, or a GGUF file.
pub(crate) fn folder(name: &str) -> PathBuf {
    let directory = directory(name);
    if !GGUF.contains(&name) {
        return directory;
    }
    let entries = std::fs::read_dir(&directory).unwrap();
    let files = entries.map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|end| end == "gguf"));
    files.min().unwrap()
}

/// Whether a token uses some of the experts, so that a rounding may choose another one.
pub(crate) fn chooses_experts(config: &Config) -> bool {
    let experts = config.experts.as_ref();
    experts.is_some_and(|experts| experts.routing.per_token < experts.count)
}

/// What transformers computed.
pub(crate) struct Reference {
    pub prompts: Vec<Prompt>,
    pub vocabulary: usize,
    pub context: u32,
}

pub(crate) struct Prompt {
    pub length: usize,
    /// The prompt, then greedy tokens.
    pub tokens: Vec<u32>,
    /// One row a prompt position, then the row before the last greedy token.
    pub logits: Vec<Vec<f32>>,
}

impl Reference {
    pub(crate) fn load(name: &str) -> Reference {
        let bytes = std::fs::read(directory(name).join("reference.safetensors")).unwrap();
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

pub(crate) fn options(reference: &Reference, precision: Precision) -> LoadOptions {
    LoadOptions {
        precision,
        kv_format: precision.kv_format(),
        channels: None,
        isa: None,
        kv: KvBudget::Blocks(KV_BLOCKS),
        threads: Arc::new(cpu::Threads::new(2).unwrap()),
        max_context: Some(reference.context),
        vocabulary: Some(reference.vocabulary),
    }
}

pub(crate) fn load(name: &str, reference: &Reference, precision: Precision) -> Transformer {
    Transformer::load(&folder(name), &options(reference, precision)).unwrap()
}

/// Blocks, state and stored tokens of one sequence.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sequence {
    pub blocks: Vec<u32>,
    /// The slot of its recurrent state, in a model that has such.
    pub slot: Option<u32>,
    pub stored: usize,
    /// The number of the adapter that changes the model for it; 0: none does.
    pub adapter: u32,
}

/// Runs steps: what an engine would do, with blocks dealt out in an order of its own.
pub(crate) struct Runner<'a> {
    pub model: &'a mut Transformer,
    pub free: Vec<u32>,
    pub free_slots: Vec<u32>,
    /// Slots that the next step copies.
    pub state_copies: Vec<BlockCopy>,
}

impl Runner<'_> {
    pub(crate) fn new(model: &mut Transformer) -> Runner<'_> {
        // 7 is coprime to the number of blocks: neighbours in a table are no neighbours in the pool.
        let blocks = model.kv_blocks() / model.kv_tables().len() as u32;
        let free = (0..blocks).map(|i| i * 7 % blocks).collect();
        let free_slots = (0..model.state_slots().unwrap_or(0)).collect();
        Runner {
            model,
            free,
            free_slots,
            state_copies: Vec::new(),
        }
    }

    /// Computes the given next tokens of each sequence in one step; all rows of logits.
    pub(crate) fn step(&mut self, work: &mut [(&mut Sequence, &[u32])]) -> Vec<Vec<f32>> {
        self.copying_step(work, vec![])
    }

    pub(crate) fn copying_step(
        &mut self,
        work: &mut [(&mut Sequence, &[u32])],
        copies: Vec<BlockCopy>,
    ) -> Vec<Vec<f32>> {
        let batch = self.batch(work, copies);
        let vocabulary = self.model.vocab_size();
        self.model
            .forward(&batch)
            .unwrap()
            .chunks_exact(vocabulary)
            .map(<[f32]>::to_vec)
            .collect()
    }

    pub(crate) fn batch(&mut self, work: &mut [(&mut Sequence, &[u32])], block_copies: Vec<BlockCopy>) -> StepBatch {
        let mut batch = StepBatch {
            block_copies,
            state_copies: std::mem::take(&mut self.state_copies),
            ..StepBatch::default()
        };
        for (sequence, tokens) in work {
            let kv_len = sequence.stored + tokens.len();
            while sequence.blocks.len() < kv_len.div_ceil(16) {
                sequence.blocks.push(self.free.pop().expect("a free block"));
            }
            sequence.slot = sequence.slot.or_else(|| self.free_slots.pop());
            batch.state_slots.extend(sequence.slot);
            batch.push(tokens.iter().copied(), kv_len as u32, sequence.blocks.iter().copied());
            batch.sequences.last_mut().unwrap().adapter = sequence.adapter;
            sequence.stored = kv_len;
        }
        batch.logits_at = (0..batch.tokens.len() as u32).collect();
        batch.with_tables(self.model.kv_tables().len())
    }

    pub(crate) fn release(&mut self, sequence: Sequence) {
        self.free.extend(sequence.blocks);
        self.free_slots.extend(sequence.slot);
    }
}

/// Logits of all of a sequence's tokens, computed in steps of these sizes, over and over.
pub(crate) fn in_chunks(runner: &mut Runner<'_>, tokens: &[u32], sizes: &[usize]) -> Vec<Vec<f32>> {
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

/// Weights with some tensors changed.
pub(crate) struct Altered<F> {
    pub inner: Weights,
    pub change: F,
}

impl<F: Fn(&str, usize, &mut [f32]) + Sync> WeightSource for Altered<F> {
    fn tensor(&self, name: &str, rows: Option<usize>, columns: usize) -> Result<StoredTensor<'_>, ModelError> {
        let tensor = self.inner.tensor(name, rows, columns)?;
        let mut values = vec![0.0; tensor.rows * columns];
        let rows = values.chunks_exact_mut(columns).enumerate();
        rows.for_each(|(row, values)| tensor.view().read_row(row, values));
        (self.change)(name, columns, &mut values);
        let data = Cow::Owned(values.iter().flat_map(|x| x.to_le_bytes()).collect());
        let dtype = Dtype::F32;
        Ok(StoredTensor { data, dtype, ..tensor })
    }
    fn path_of(&self, name: &str) -> &Path {
        self.inner.path_of(name)
    }
}
