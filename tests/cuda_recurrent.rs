//! Models with recurrent layers, and others with layers of one part or with experts in groups or with scaled inputs, on an emulated card
//! (tests/emulator): however rows are scheduled, each gets the same tokens and log probabilities, bit for bit, and in BF16 they are
//! near those of the CPU in F32.

use std::borrow::Cow;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use gristmill::device::cpu::Threads;
use gristmill::device::cuda::{Cuda, MatmulBackend};
use gristmill::device::draw::Sampling;
use gristmill::device::random::uniform;
use gristmill::device::{Dtype, KvFormat, Precision};
use gristmill::engine::Forward;
use gristmill::engine::params::GenerationParams;
use gristmill::model::config::Config;
use gristmill::model::weights::{StoredTensor, WeightSource};
use gristmill::model::{KvBudget, LoadOptions, ModelError, Transformer};
use serde_json::{Value, json};

use crate::cuda_device::stand_ins;
use crate::model_reference::engine::{self, Answers};

/// Set in the process that has the emulated card.
const ON_CARD: &str = "GRISTMILL_TEST_ON_CARD";
const ROWS: u64 = 6;
const NEW_TOKENS: u32 = 6;
pub(crate) const VOCABULARY: u32 = 96;

/// Whether this process has the emulated card. If not, one that has it runs the test of this name.
pub(crate) fn is_on_card(test: &str, card: &str) -> bool {
    if std::env::var_os(ON_CARD).is_some() {
        return true;
    }
    let run = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(ON_CARD, "1")
        .env("GRISTMILL_CUDA_LIBRARIES", stand_ins())
        .env("GRISTMILL_CACHE", stand_ins().join("cache"))
        .env("LD_LIBRARY_PATH", stand_ins())
        .env("EMULATOR_CARD", card)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{text}\n{}", String::from_utf8_lossy(&run.stderr));
    assert!(text.contains("1 passed"), "{text}");
    false
}

/// Random weights, with states that fade over some tens of tokens, and scores of Gemma 4, which no factor makes smaller, of a few
/// units.
struct Weights {
    has_small_scores: bool,
}

impl Weights {
    fn of(config: &Config) -> Weights {
        Weights {
            has_small_scores: config.layer_scalars,
        }
    }
}

impl WeightSource for Weights {
    fn tensor(&self, name: &str, rows: Option<usize>, columns: usize) -> Result<StoredTensor<'_>, ModelError> {
        let seed = name
            .bytes()
            .fold(7u64, |s, b| (s ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
        let value = |index: usize| {
            let x = uniform(seed, index as u64);
            match rows {
                _ if name.ends_with("A_log") => -3.0 + x,
                _ if name.ends_with("conv1d.weight") => x,
                _ if name.ends_with("layer_scalar") => 1.0 + 0.3 * x,
                None if self.has_small_scores && (name.contains("q_norm") || name.contains("k_norm")) => 0.5 + 0.2 * x,
                // Some norms are stored less one; then weights are from 1.5 to 2.5.
                None if name.contains("norm") => 1.0 + 0.5 * x,
                None => 0.5 * x,
                Some(_) => x * (6.0 / columns as f32).sqrt(),
            }
        };
        let count = rows.unwrap_or(1) * columns;
        Ok(StoredTensor {
            dtype: Dtype::F32,
            rows: rows.unwrap_or(1),
            columns,
            data: Cow::Owned((0..count).flat_map(|index| value(index).to_le_bytes()).collect()),
        })
    }

    fn path_of(&self, _name: &str) -> &Path {
        Path::new("random")
    }
}

pub(crate) fn config(architecture: &str, own: Value) -> Config {
    let mut map = json!({
        "architectures": [architecture], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": VOCABULARY, "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "hidden_act": "silu",
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 10, "linear_value_head_dim": 12,
    });
    map.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    if !architecture.starts_with("Qwen") {
        map.as_object_mut()
            .unwrap()
            .retain(|key, _| !key.starts_with("linear_"));
    }
    Config::parse(Path::new("config.json"), &map.to_string()).unwrap()
}

/// Models whose last layer is recurrent, and one whose last layer has attention.
fn qwen35() -> Config {
    let types = json!(["linear_attention", "full_attention", "linear_attention"]);
    config("Qwen3_5ForCausalLM", json!({"layer_types": types}))
}

fn qwen3_next() -> Config {
    let types = json!(["linear_attention", "linear_attention", "full_attention"]);
    config(
        "Qwen3NextForCausalLM",
        json!({"layer_types": types, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 32, "partial_rotary_factor": 0.5}),
    )
}

fn granite4() -> Config {
    config(
        "GraniteMoeHybridForCausalLM",
        json!({"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0, "shared_intermediate_size": 48,
            "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 10, "mamba_n_groups": 2, "mamba_d_conv": 3,
            "position_embedding_type": "nope", "residual_multiplier": 0.5}),
    )
}

/// Layers of one part, among them two of one kind, with MLPs and experts without gates; the last layer that keeps something has
/// two behind it.
fn nemotron(own: Value) -> Config {
    let mut keys = json!({"hybrid_override_pattern": "MEE*M-E", "num_hidden_layers": 7, "n_routed_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 32,
        "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 10, "n_groups": 2, "conv_kernel": 3,
        "routed_scaling_factor": 2.5});
    keys.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    config("NemotronHForCausalLM", keys)
}

fn glm_with_groups() -> Config {
    config(
        "Glm4MoeForCausalLM",
        json!({"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 16}),
    )
}

/// A plain MLP beside experts, layers that rotate and normalise queries and keys, and one that does neither.
fn llama4(per_token: usize) -> Config {
    config(
        "Llama4ForCausalLM",
        json!({"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": per_token, "intermediate_size": 16,
            "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 1, 1, 0],
            "attn_temperature_tuning": false}),
    )
}

/// Four of six rows begin with the same 70 tokens, more than a block; the others end shortly before a block is full.
fn prompt(row: u64) -> Arc<[u32]> {
    let token = |seed: u64, i: u64| ((uniform(seed, i) + 1.0) * 40.0) as u32 + 3;
    let (shared, own) = if row % 3 == 2 {
        (0, 59 + row % 4)
    } else {
        (70, 1 + row * 5)
    };
    let prefix = (0..shared).map(|i| token(99, i));
    prefix.chain((0..own).map(|i| token(row, i))).collect()
}

struct Schedule {
    name: &'static str,
    step_tokens: usize,
    sequences: usize,
    blocks: u32,
    together: bool,
}

const SCHEDULES: [Schedule; 4] = [
    Schedule {
        name: "alone",
        step_tokens: 2048,
        sequences: 1,
        blocks: 16,
        together: false,
    },
    Schedule {
        name: "in a batch, behind shared prefixes",
        step_tokens: 2048,
        sequences: 8,
        blocks: 32,
        together: true,
    },
    Schedule {
        name: "in chunks",
        step_tokens: 23,
        sequences: 3,
        blocks: 32,
        together: true,
    },
    Schedule {
        name: "in few blocks and slots",
        step_tokens: 150,
        sequences: 6,
        blocks: 4,
        together: true,
    },
];

fn options(precision: Precision, kv_format: KvFormat, blocks: u32) -> LoadOptions {
    LoadOptions {
        precision,
        kv_format,
        channels: None,
        isa: None,
        kv: KvBudget::Blocks(blocks),
        threads: Arc::new(Threads::new(2).unwrap()),
        max_context: None,
        vocabulary: None,
    }
}

fn answers(model: Box<dyn Forward + Send>, schedule: &Schedule, (rows, new_tokens): (&[u64], u32)) -> Answers {
    let params = GenerationParams {
        sampling: Sampling {
            temperature: 0.0,
            ..Sampling::default()
        },
        max_tokens: new_tokens,
        logprobs: true,
        deterministic: true,
        ..GenerationParams::default()
    };
    let prompts = rows.iter().map(|row| (*row, prompt(*row)));
    let engine = engine::engine(model, schedule.step_tokens, schedule.sequences);
    engine::answers(engine, params, prompts)
}

/// Answers of a model on the card.
fn on_card(config: &Config, formats: (Precision, KvFormat), schedule: &Schedule, rows: (&[u64], u32)) -> Answers {
    let (precision, kv_format) = formats;
    let card = Cuda::open(0, precision, kv_format, MatmulBackend::Kernels).unwrap();
    let load = options(precision, kv_format, schedule.blocks);
    let model = Transformer::on_device(card, config.clone(), &Weights::of(config), &load).unwrap();
    answers(Box::new(model), schedule, rows)
}

pub(crate) fn check(name: &str, config: &Config, precision: Precision, kv_format: KvFormat) {
    let all: Vec<u64> = (0..ROWS).collect();
    let on_card =
        |schedule: &Schedule, rows: &[u64]| on_card(config, (precision, kv_format), schedule, (rows, NEW_TOKENS));
    let mut alone = Vec::new();
    for schedule in &SCHEDULES {
        let what = format!("{name}, {precision:?}, {}", schedule.name);
        if !schedule.together {
            alone = all.iter().flat_map(|row| on_card(schedule, &[*row]).rows).collect();
            continue;
        }
        let found = on_card(schedule, &all);
        assert_eq!(found.rows, alone, "{what}");
        assert!(found.cached_tokens > 0, "{what}: nothing was shared");
    }
    let different = alone.windows(2).filter(|pair| pair[0].1.0 != pair[1].1.0).count();
    assert!(
        different >= 4,
        "the rows' answers differ, or the test shows nothing: {alone:?}"
    );
    // How far eight bits may be from F32 is for the doctor, whose models they are compared on row by row.
    if precision != Precision::Bf16 {
        return;
    }
    let reference = options(Precision::F32, KvFormat::F32, 64);
    let reference = Transformer::from_weights(config.clone(), &Weights::of(config), &reference).unwrap();
    let reference = answers(Box::new(reference), &SCHEDULES[1], (&all, NEW_TOKENS)).rows;
    // Rounding may decide between tokens that are nearly as likely; what follows then is another text.
    let (mut same, mut worst) = (0, 0.0f32);
    for ((_, (tokens, bits)), (_, (want_tokens, want_bits))) in alone.iter().zip(&reference) {
        let equal = tokens.iter().zip(want_tokens).take_while(|(a, b)| a == b).count();
        same += equal;
        for (got, want) in bits.iter().zip(want_bits).take(equal) {
            worst = worst.max((f32::from_bits(*got) - f32::from_bits(*want)).abs());
        }
    }
    println!("{name}, {precision:?}: {same} tokens are those of the CPU in F32, logprobs differ by up to {worst}");
    assert!(
        same >= ROWS as usize * NEW_TOKENS as usize / 2 && worst < 0.5,
        "{name}, {precision:?}: {same}, {worst}"
    );
}

#[test]
fn schedules_change_no_bit_of_delta_networks() {
    if is_on_card("cuda_recurrent::schedules_change_no_bit_of_delta_networks", "9.0") {
        check("Qwen 3.5", &qwen35(), Precision::Bf16, KvFormat::Bf16);
        check("Qwen 3.5", &qwen35(), Precision::Int8, KvFormat::Int8);
        check("Qwen3-Next", &qwen3_next(), Precision::Fp8, KvFormat::Fp8);
    }
}

#[test]
fn schedules_change_no_bit_of_mamba() {
    if is_on_card("cuda_recurrent::schedules_change_no_bit_of_mamba", "8.0") {
        check("Granite 4", &granite4(), Precision::Bf16, KvFormat::Bf16);
        check("Granite 4", &granite4(), Precision::Int8, KvFormat::Int8);
    }
}

#[test]
fn schedules_change_no_bit_of_layers_of_one_part() {
    if is_on_card("cuda_recurrent::schedules_change_no_bit_of_layers_of_one_part", "9.0") {
        let (one, groups) = (nemotron(json!({})), nemotron(json!({"n_group": 4, "topk_group": 2})));
        check("Nemotron-H", &one, Precision::Bf16, KvFormat::Bf16);
        check("Nemotron-H", &one, Precision::Int8, KvFormat::Int8);
        check("Nemotron-H, groups", &groups, Precision::Fp8, KvFormat::Fp8);
    }
}

#[test]
fn schedules_change_no_bit_of_groups_of_experts() {
    if is_on_card("cuda_recurrent::schedules_change_no_bit_of_groups_of_experts", "8.0") {
        check("GLM-4.5", &glm_with_groups(), Precision::Bf16, KvFormat::Bf16);
        check("GLM-4.5", &glm_with_groups(), Precision::Int8, KvFormat::Int8);
    }
}

#[test]
fn schedules_change_no_bit_of_scaled_inputs_of_experts() {
    if is_on_card(
        "cuda_recurrent::schedules_change_no_bit_of_scaled_inputs_of_experts",
        "9.0",
    ) {
        check("Llama 4", &llama4(1), Precision::Bf16, KvFormat::Bf16);
        check("Llama 4", &llama4(2), Precision::Int8, KvFormat::Int8);
        check("Llama 4", &llama4(2), Precision::Fp8, KvFormat::Fp8);
    }
}

/// Two rows grow beyond two blocks where there are four in all: one of them loses its slot, and begins anew in another.
#[test]
fn a_preempted_row_begins_anew() {
    if is_on_card("cuda_recurrent::a_preempted_row_begins_anew", "8.0") {
        let formats = (Precision::Bf16, KvFormat::Bf16);
        let alone = |row| on_card(&qwen35(), formats, &SCHEDULES[0], (&[row], 72)).rows;
        let together = on_card(&qwen35(), formats, &SCHEDULES[3], (&[2, 5], 72));
        assert!(together.preemptions > 0, "nothing was preempted");
        assert_eq!(together.rows, [alone(2), alone(5)].concat());
    }
}

/// Where the pool takes what is left of the card's memory, slots take their part of it: those of as many sequences as may run.
#[test]
fn states_share_the_memory_that_is_left() {
    if !is_on_card("cuda_recurrent::states_share_the_memory_that_is_left", "9.0") {
        return;
    }
    let config = qwen35();
    let load = |bytes: Option<u64>, sequences: u32| {
        let card = Cuda::open(0, Precision::Bf16, KvFormat::Bf16, MatmulBackend::Kernels).unwrap();
        let mut options = options(Precision::Bf16, KvFormat::Bf16, 0);
        options.kv = KvBudget::Profiled {
            step_tokens: 300,
            sequences,
            bytes,
        };
        Transformer::on_device(card, config.clone(), &Weights::of(&config), &options)
    };
    let state = config.state_bytes();
    // A block has keys and values of 64 tokens of one head of 16 numbers, in BF16.
    let block = 2 * 64 * 16 * 2;
    let model = load(Some(1 << 20), 100).unwrap();
    let slots = (1 << 20) / (state + 16 * block);
    assert_eq!(model.state_slots(), Some(slots as u32));
    assert_eq!(u64::from(model.kv_blocks()), ((1 << 20) - slots * state) / block);
    // No more than six running sequences use, and a third as many that are kept.
    let model = load(Some(1 << 20), 6).unwrap();
    assert_eq!(model.state_slots(), Some(9));
    assert_eq!(u64::from(model.kv_blocks()), ((1 << 20) - 9 * state) / block);
    let answers = answers(
        Box::new(load(None, 6).unwrap()),
        &SCHEDULES[1],
        (&[0, 1, 2], NEW_TOKENS),
    );
    assert_eq!(answers.rows.len(), 3);
    let refused = load(Some(state), 6).map(|_| ()).unwrap_err().to_string();
    assert!(
        refused.contains("2 recurrent layers") && refused.contains("--step-tokens"),
        "{refused}"
    );
}
