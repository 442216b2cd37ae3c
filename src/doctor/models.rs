//! Compares small models, with random weights, with the CPU in F32.

use std::path::Path;
use std::sync::Arc;

use serde::Serialize;

use crate::device::batch::StepBatch;
use crate::device::cpu::Threads;
use crate::device::{Device, DeviceError, Dtype, KvFormat, Precision};
use crate::engine::Forward;
use crate::model::coded_weights::CodedWeights;
use crate::model::config::Config;
use crate::model::folder;
use crate::model::random_weights::RandomWeights;
use crate::model::size::CodedSize;
use crate::model::weights::WeightSource;
use crate::model::{Checkpoint, KvBudget, LoadOptions, ModelError, Transformer};

/// Result of one small model.
#[derive(Debug, Clone, Serialize)]
pub struct ModelFinding {
    pub model: String,
    /// Mean Kullback-Leibler divergence from F32, in nats.
    pub divergence: f64,
    pub divergence_max: f64,
    /// Number of rows of logits whose largest logit belongs to the same token as in F32.
    pub same: usize,
    /// Number of rows whose largest logit belongs to a token other than in F32, although the F32
    /// logits of these two tokens differ by more than eight times the RMS error of all logits.
    pub wrong: usize,
    pub rows: usize,
    /// Whether a sequence's logits are bit-identical when it is alone in the batch.
    pub alone_alike: bool,
}

impl ModelFinding {
    pub fn is_right(&self) -> bool {
        self.divergence <= self.divergence_max && self.wrong == 0
    }
}

/// Maximum divergence of these formats on the small models. For BF16 and INT8 it is twice the
/// maximum that the CPU shows in these formats. For E4M3 it is larger: its steps are about three
/// times those of INT8, and divergence grows with the square of the step.
fn divergence_max(precision: Precision, kv: KvFormat) -> f64 {
    let of_precision: f64 = match precision {
        Precision::F32 | Precision::Bf16 => 0.002,
        Precision::Int8 | Precision::W4a8 => 0.008,
        Precision::Fp8 => 0.03,
    };
    of_precision.max(match kv {
        KvFormat::F32 | KvFormat::Bf16 => 0.002,
        KvFormat::Int8 => 0.008,
        KvFormat::Fp8 => 0.03,
        // Only GPUs are compared, and none keeps keys and values so: nothing is allowed.
        KvFormat::Int4 => 0.0,
    })
}

/// A model to check.
pub struct TestModel {
    name: String,
    config: Config,
    weights: Box<dyn WeightSource>,
}

impl TestModel {
    /// The checkpoint in `dir`.
    ///
    /// # Errors
    /// The checkpoint cannot be read.
    pub fn open(dir: &Path) -> Result<TestModel, ModelError> {
        folder::check(dir)?;
        folder::check_weights(dir)?;
        let checkpoint = Checkpoint::open(dir, None, Config::load(dir)?)?;
        Ok(TestModel {
            name: dir.display().to_string(),
            config: checkpoint.config,
            weights: Box::new(checkpoint.weights),
        })
    }

    /// Whether the model is run at a precision: in four bits only if it has weights in codes.
    fn runs_in(&self, precision: Precision) -> Result<bool, ModelError> {
        Ok(precision != Precision::W4a8 || CodedSize::of(&*self.weights, &self.config)?.values > 0)
    }

    /// Warnings about the model's files.
    pub fn warnings(&self) -> &[String] {
        &self.config.warnings
    }
}

/// What layers of one part have, with experts of which every token uses every one.
fn lone_parts() -> serde_json::Value {
    serde_json::json!({"hybrid_override_pattern": "ME*-", "num_hidden_layers": 4, "n_routed_experts": 2,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48,
        "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 10, "n_groups": 2, "conv_kernel": 3})
}

/// Experts beside plain MLPs, whose inputs are scaled, and a layer without rotation.
fn llama4() -> serde_json::Value {
    serde_json::json!({"num_local_experts": 2, "num_experts_per_tok": 2, "intermediate_size": 64,
        "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0],
        "attn_temperature_tuning": false})
}

/// Small models that together have all that families differ in: name, architecture, and what differs from the common keys.
fn shapes() -> [(&'static str, &'static str, serde_json::Value); 19] {
    use serde_json::json;
    let capped = json!({"sliding_window": 40, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 4.0});
    let two_rotations = json!({"sliding_window": 40, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24,
        "rope_local_base_freq": 50.0});
    let factors = json!({"attention_multiplier": 0.1, "embedding_multiplier": 6.0, "residual_multiplier": 0.4,
        "logits_scaling": 0.5});
    let longrope = json!({"partial_rotary_factor": 0.5, "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
            "long_factor": [1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0]}});
    // Every token uses every expert: rounding may choose another one where logits are almost equal.
    let experts = json!({"num_experts": 2, "num_experts_per_tok": 2});
    let gpt_oss = json!({"num_local_experts": 4, "intermediate_size": 64,
        "layer_types": ["full_attention", "full_attention"], "rope_scaling": {"rope_type": "yarn", "factor": 2.0,
        "original_max_position_embeddings": 256, "truncate": false}});
    let layer_types = json!({"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]});
    [
        ("llama", "LlamaForCausalLM", json!({})),
        ("mistral, window", "MistralForCausalLM", json!({"sliding_window": 40})),
        (
            "qwen2, biases",
            "Qwen2ForCausalLM",
            json!({"tie_word_embeddings": true}),
        ),
        ("qwen3, q/k norms", "Qwen3ForCausalLM", json!({})),
        ("gemma2, soft caps", "Gemma2ForCausalLM", capped),
        ("gemma3, two rotations", "Gemma3ForCausalLM", two_rotations),
        (
            "gemma, one KV head",
            "GemmaForCausalLM",
            json!({"hidden_act": "gelu", "num_key_value_heads": 1}),
        ),
        (
            "smollm3, a layer without rotation",
            "SmolLM3ForCausalLM",
            json!({"no_rope_layers": [1, 0]}),
        ),
        ("granite, factors", "GraniteForCausalLM", factors),
        ("seed-oss, biases", "SeedOssForCausalLM", json!({})),
        ("phi3, longrope of half a head", "Phi3ForCausalLM", longrope),
        ("ministral, layer types", "MinistralForCausalLM", layer_types),
        ("glm4, four norms", "Glm4ForCausalLM", json!({})),
        (
            "exaone4, norms behind",
            "Exaone4ForCausalLM",
            json!({"sliding_window": 40, "sliding_window_pattern": 2}),
        ),
        ("olmoe, experts, norms of all heads", "OlmoeForCausalLM", experts),
        ("gpt-oss, sinks, bounded experts", "GptOssForCausalLM", gpt_oss),
        ("command-r, layer norms", "CohereForCausalLM", json!({})),
        (
            "nemotron-h, layers of one part, squared ReLU",
            "NemotronHForCausalLM",
            lone_parts(),
        ),
        ("llama 4, inputs of experts scaled", "Llama4ForCausalLM", llama4()),
    ]
}

/// As [`shapes`], of models with recurrent layers.
fn recurrent_shapes() -> [(&'static str, &'static str, serde_json::Value); 3] {
    use serde_json::json;
    let delta = json!({"layer_types": ["full_attention", "linear_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24, "linear_value_head_dim": 16,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}});
    let delta_experts = json!({"layer_types": ["linear_attention", "full_attention"], "num_experts": 2,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24, "linear_value_head_dim": 16,
        "partial_rotary_factor": 0.5});
    let mamba = json!({"layer_types": ["attention", "mamba"], "num_local_experts": 0,
        "shared_intermediate_size": 96, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 10, "mamba_n_groups": 2,
        "mamba_d_conv": 3, "position_embedding_type": "nope", "residual_multiplier": 0.5, "head_dim": 16});
    [
        ("qwen3.5, delta networks", "Qwen3_5ForCausalLM", delta),
        (
            "qwen3-next, delta networks, experts",
            "Qwen3NextForCausalLM",
            delta_experts,
        ),
        ("granite 4, mamba-2", "GraniteMoeHybridForCausalLM", mamba),
    ]
}

/// As [`shapes`], of models that keep latents: small ones, and those whose rows take two warps, read by groups of heads. Every token
/// uses every expert, so that no rounding chooses another.
fn latent_shapes() -> [(&'static str, &'static str, serde_json::Value); 2] {
    use serde_json::json;
    let small = json!({"num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
        "v_head_dim": 32, "q_lora_rank": null, "head_dim": null, "n_routed_experts": 2, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1});
    let large = json!({"num_attention_heads": 20, "num_key_value_heads": 20, "kv_lora_rank": 288, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 32, "v_head_dim": 16, "q_lora_rank": 48, "head_dim": null, "n_routed_experts": 2,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1});
    [
        ("deepseek-v2, latents", "DeepseekV2ForCausalLM", small),
        ("deepseek-v3, latents of queries, too", "DeepseekV3ForCausalLM", large),
    ]
}

/// As [`shapes`], of Gemma 4.
fn gemma4_shapes() -> [(&'static str, &'static str, serde_json::Value); 3] {
    use serde_json::json;
    let gemma4 = |own: serde_json::Value| {
        let mut keys = json!({"rope_theta": null, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 40,
            "head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "hidden_activation": "gelu_pytorch_tanh"});
        if let (Some(keys), Some(own)) = (keys.as_object_mut(), own.as_object()) {
            keys.extend(own.clone());
        }
        keys
    };
    // Two layers without windows in a block of one with.
    let gemma4_keys = gemma4(
        json!({"attention_k_eq_v": true, "num_global_key_value_heads": 1, "global_head_dim": 16,
        "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}),
    );
    let gemma4_experts = gemma4(json!({"enable_moe_block": true, "num_experts": 2, "top_k_experts": 2,
        "moe_intermediate_size": 32}));
    // Errors of eight bits grow with each layer.
    let gemma4_inputs = gemma4(json!({"num_kv_shared_layers": 1, "use_double_wide_mlp": true,
        "layer_types": ["full_attention", "full_attention"], "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 200, "num_key_value_heads": 1, "global_head_dim": 16}));
    [
        ("gemma 4, keys that are values", "Gemma4ForCausalLM", gemma4_keys),
        ("gemma 4, experts beside MLPs", "Gemma4ForCausalLM", gemma4_experts),
        (
            "gemma 4, inputs of layers, shared keys",
            "Gemma4ForCausalLM",
            gemma4_inputs,
        ),
    ]
}

/// Small models, which together have all that families differ in, with random weights.
///
/// # Errors
/// None with the sizes given here.
pub fn families() -> Result<Vec<TestModel>, ModelError> {
    let test_model = |(name, architecture, overrides): (&str, &str, serde_json::Value)| {
        let weights = RandomWeights {
            seed: 20,
            dtype: Dtype::Bf16,
        };
        small_model(name.into(), architecture, &overrides, Box::new(weights))
    };
    let all = shapes().into_iter().chain(recurrent_shapes());
    let all = all.chain(latent_shapes()).chain(gemma4_shapes());
    all.map(test_model).collect()
}

/// As [`families`], models with weights in codes of four bits: in several groups of a row, in one, in neither, and of experts.
///
/// # Errors
/// As [`families`].
pub fn families_in_codes() -> Result<Vec<TestModel>, ModelError> {
    // Rows of 64, 96 and 128 columns.
    let groups: [fn(&str) -> Option<usize>; 2] = [
        |name| is_product(name).then_some(32),
        |name| is_product(name).then_some(64),
    ];
    let coded = |(name, architecture, overrides): (&str, &str, serde_json::Value)| {
        let with_groups = |(group, size): (fn(&str) -> Option<usize>, u32)| {
            let name = format!("{name}, groups of {size}");
            small_model(name, architecture, &overrides, Box::new(CodedWeights::new(true, group)))
        };
        groups.into_iter().zip([32, 64]).map(with_groups).collect::<Vec<_>>()
    };
    let chosen = [
        "llama",
        "qwen2, biases",
        "olmoe, experts, norms of all heads",
        "nemotron-h, layers of one part, squared ReLU",
    ];
    let chosen = shapes().into_iter().filter(|(name, ..)| chosen.contains(name));
    chosen.flat_map(coded).collect()
}

/// Whether a matrix is none of a table's.
fn is_product(name: &str) -> bool {
    !name.contains("embed") && !name.contains("head")
}

/// A model of two layers or more of this architecture, with what differs from the common keys.
fn small_model(
    name: String,
    architecture: &str,
    overrides: &serde_json::Value,
    weights: Box<dyn WeightSource>,
) -> Result<TestModel, ModelError> {
    let mut map = serde_json::json!({
        "architectures": [architecture], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 200, "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "hidden_act": "silu",
    });
    if let (Some(map), Some(overrides)) = (map.as_object_mut(), overrides.as_object()) {
        map.extend(overrides.clone());
    }
    Ok(TestModel {
        name,
        config: Config::parse(Path::new(architecture), &map.to_string())?,
        weights,
    })
}

/// Checks each model in these formats, on a device that `new_device` creates for the model.
///
/// # Errors
/// The device failed.
pub fn models<D: Device + 'static>(
    test_models: &[TestModel],
    new_device: impl Fn() -> Result<D, DeviceError>,
    (precision, kv_format): (Precision, KvFormat),
    threads: &Arc<Threads>,
    report: &mut dyn FnMut(ModelFinding),
) -> Result<(), ModelError> {
    for test_model in test_models {
        if !test_model.runs_in(precision)? {
            continue;
        }
        let TestModel { name, config, weights } = test_model;
        let options = |precision, kv_format, blocks| LoadOptions {
            precision,
            kv_format,
            channels: None,
            isa: None,
            kv: KvBudget::Blocks(blocks),
            threads: Arc::clone(threads),
            max_context: None,
            vocabulary: None,
        };
        let weights = &**weights;
        let reference = options(Precision::F32, KvFormat::F32, 128);
        let mut reference = Transformer::from_weights(config.clone(), weights, &reference)?;
        let loaded = options(precision, kv_format, 32);
        let mut model = Transformer::on_device(new_device()?, config.clone(), weights, &loaded)?;
        let (want, got) = (logits(&mut reference, None)?, logits(&mut model, None)?);
        let alone = logits(&mut model, Some(1))?;
        let rows = want.len();
        report(ModelFinding {
            model: name.clone(),
            divergence: want.iter().zip(&got).map(|(p, q)| divergence(p, q)).sum::<f64>() / rows as f64,
            divergence_max: divergence_max(precision, kv_format),
            same: want.iter().zip(&got).filter(|(p, q)| largest(p) == largest(q)).count(),
            wrong: count_wrong(&want, &got),
            rows,
            alone_alike: alone == got[LENGTHS[0] as usize..][..alone.len()],
        });
    }
    Ok(())
}

/// Number of tokens of each sequence in the batch.
const LENGTHS: [u32; 3] = [70, 33, 5];

/// Logits of all tokens of all sequences, or only of sequence `only_sequence`. The first step
/// computes all tokens of each sequence except the last, the second step computes the last tokens.
fn logits<D: Device>(model: &mut Transformer<D>, only_sequence: Option<usize>) -> Result<Vec<Vec<f32>>, ModelError> {
    let sequences: Vec<usize> = (0..LENGTHS.len())
        .filter(|i| only_sequence.is_none_or(|only_sequence| only_sequence == *i))
        .collect();
    let mut rows: Vec<Vec<Vec<f32>>> = vec![vec![]; LENGTHS.len()];
    for last in [false, true] {
        let mut batch = StepBatch::default();
        for &i in &sequences {
            let length = LENGTHS[i];
            let (from, to) = if last { (length - 1, length) } else { (0, length - 1) };
            // Each sequence has eight blocks of its own.
            let table = (0..to.div_ceil(model.block_tokens())).map(|b| i as u32 * 8 + b);
            batch.push((from..to).map(|p| (p * 37 + i as u32 * 11) % 200), to, table);
            batch.state_slots.extend(model.state_slots().map(|_| i as u32));
        }
        batch.logits_at = (0..batch.tokens.len() as u32).collect();
        let vocabulary = model.vocab_size();
        let batch = batch.with_tables(model.kv_tables().len());
        let logits = model.forward(&batch).map_err(|error| match error {
            crate::engine::ForwardError::Device(error) => ModelError::Device(error),
            crate::engine::ForwardError::Batch(why) => ModelError::Options(why),
        })?;
        let mut logits = logits.chunks_exact(vocabulary).map(<[f32]>::to_vec);
        for (s, &i) in batch.sequences.iter().zip(&sequences) {
            rows[i].extend(logits.by_ref().take(s.q_len as usize));
        }
    }
    Ok(rows.into_iter().flatten().collect())
}

fn largest(row: &[f32]) -> Option<usize> {
    (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b]))
}

/// Counts [`ModelFinding::wrong`].
fn count_wrong(want: &[Vec<f32>], got: &[Vec<f32>]) -> usize {
    let pairs = || want.iter().flatten().zip(got.iter().flatten());
    let error = (pairs().map(|(p, q)| f64::from(p - q).powi(2)).sum::<f64>() / pairs().count().max(1) as f64).sqrt();
    let is_wrong = |(p, q): &(&Vec<f32>, &Vec<f32>)| {
        let (Some(best), Some(chosen)) = (largest(p), largest(q)) else {
            return false;
        };
        f64::from(p[best] - p[chosen]) > 8.0 * error
    };
    want.iter().zip(got).filter(is_wrong).count()
}

/// Kullback-Leibler divergence of `q` from `p`, in nats; NaN if a logit is NaN.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let log_softmax = |row: &[f32]| -> Vec<f64> {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|x| f64::from(x - max).exp()).sum();
        row.iter().map(|x| f64::from(x - max) - sum.ln()).collect()
    };
    let (p, q) = (log_softmax(p), log_softmax(q));
    p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum()
}
