//! The list of a model's tensors, derived from its configuration. Models are built from this list,
//! and checkpoints are checked against it.
//!
//! See docs/decisions/087-tensors-stand-in-one-list.md.

use crate::device::Routing;
use crate::model::config::{Config, Experts, Family};
use crate::model::expert_forms;

mod beside;
mod inputs;
mod latent;
mod products;
mod recurrent;

pub(super) use beside::{BothTensors, EXPERT_NORM};
pub(super) use inputs::{AllInputsTensors, InputTensors};
pub(super) use latent::{LatentTensors, latent_input};
pub(super) use products::code_group;
pub(super) use recurrent::{RecurrentTensors, recurrent_input};
use recurrent::{recurrent_name, recurrent_parts};

/// Name of the output head, if it is separate from the embedding table.
pub(super) const OUTPUT_HEAD: &str = "lm_head.weight";

/// A tensor that the model reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TensorSpec {
    pub name: String,
    /// `None` for a vector.
    pub rows: Option<usize>,
    pub columns: usize,
    /// Whether it is stored as bytes, whose meaning its reader knows, and not as numbers.
    pub is_bytes: bool,
}

impl TensorSpec {
    pub(super) fn matrix(name: String, rows: usize, columns: usize) -> TensorSpec {
        TensorSpec {
            name,
            rows: Some(rows),
            columns,
            is_bytes: false,
        }
    }

    pub(super) fn vector(name: String, columns: usize) -> TensorSpec {
        TensorSpec {
            name,
            rows: None,
            columns,
            is_bytes: false,
        }
    }
}

/// Tensors of a linear operation. Several parts are concatenated by rows.
#[derive(Debug)]
pub(super) struct LinearTensors {
    pub weights: Vec<TensorSpec>,
    /// One bias per weight, or none.
    pub biases: Vec<TensorSpec>,
    /// The tensors that the checkpoint stores in place of the weights, unless it stores these.
    pub stored_instead: Option<Vec<TensorSpec>>,
}

impl LinearTensors {
    /// Projections of a layer, each with its number of rows.
    fn of(layer: usize, parts: &[(&str, usize)], columns: usize, has_biases: bool) -> LinearTensors {
        let name = |part: &str, kind: &str| format!("model.layers.{layer}.{part}.{kind}");
        let weight = |(part, rows): &(&str, usize)| TensorSpec::matrix(name(part, "weight"), *rows, columns);
        let bias = |(part, rows): &(&str, usize)| TensorSpec::vector(name(part, "bias"), *rows);
        LinearTensors {
            stored_instead: None,
            weights: parts.iter().map(weight).collect(),
            biases: parts.iter().filter(|_| has_biases).map(bias).collect(),
        }
    }

    /// The tensors that the checkpoint stores. One that is read twice in a row is stored once.
    pub(super) fn stored(&self) -> impl Iterator<Item = &TensorSpec> {
        fn once(list: &[TensorSpec]) -> impl Iterator<Item = &TensorSpec> {
            let firsts = list
                .iter()
                .enumerate()
                .filter(|(i, spec)| *i == 0 || list[i - 1] != **spec);
            firsts.map(|(_, spec)| spec)
        }
        once(self.stored_instead.as_ref().unwrap_or(&self.weights)).chain(once(&self.biases))
    }

    /// The same, of which the checkpoint stores the weights as `parts` of the layer, each with its
    /// number of rows.
    fn stored_as(mut self, layer: usize, parts: &[(&str, usize)], columns: usize) -> LinearTensors {
        let spec =
            |(name, rows): &(&str, usize)| TensorSpec::matrix(format!("model.layers.{layer}.{name}"), *rows, columns);
        self.stored_instead = Some(parts.iter().map(spec).collect());
        self
    }
}

/// A layer's tensor that the checkpoint stores as rows of a larger one. Names are without the
/// layer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FusedPart {
    pub name: &'static str,
    pub stored: &'static str,
    pub stored_rows: usize,
    pub first_row: usize,
    /// The tensor has `run` rows from `first_row` on, then as many `stride` rows further, and so on.
    pub run: usize,
    pub stride: usize,
}

const FUSED_QKV: &str = "self_attn.qkv_proj.weight";
const FUSED_GATE_UP: &str = "mlp.gate_up_proj.weight";
/// In models whose attention has gates, the projection of queries and gates.
const QUERY: &str = "self_attn.q_proj.weight";

/// The parts of the model's fused tensors.
pub(super) fn fused_parts(c: &Config) -> Vec<FusedPart> {
    let (q, kv, mlp, dim) = (
        c.heads.heads * c.heads.head_dim,
        c.heads.kv_heads * c.heads.head_dim,
        c.intermediate_size,
        c.heads.head_dim,
    );
    let part = |(name, stored, first_row, stored_rows)| FusedPart {
        name,
        stored,
        stored_rows,
        first_row,
        run: stored_rows,
        stride: stored_rows,
    };
    let qkv = [
        (QUERY, FUSED_QKV, 0, q + 2 * kv),
        ("self_attn.k_proj.weight", FUSED_QKV, q, q + 2 * kv),
        ("self_attn.v_proj.weight", FUSED_QKV, q + kv, q + 2 * kv),
    ];
    let gate_up = [
        ("mlp.gate_proj.weight", FUSED_GATE_UP, 0, 2 * mlp),
        ("mlp.up_proj.weight", FUSED_GATE_UP, mlp, 2 * mlp),
    ];
    // The query of each head, then its gate.
    let gates = [
        (QUERY, QUERY, 0, 2 * q),
        ("self_attn.gate_proj.weight", QUERY, dim, 2 * q),
    ];
    let gates = gates.map(|gate| FusedPart {
        run: dim,
        stride: 2 * dim,
        ..part(gate)
    });
    let qkv = qkv.into_iter().filter(|_| c.fused_qkv);
    let gate_up = gate_up.into_iter().filter(|_| c.fused_gate_up);
    let gates = gates.into_iter().filter(|_| c.attention_gates);
    let by_key_head = c.recurrent.as_ref().filter(|recurrent| recurrent.by_key_head);
    let recurrent = by_key_head.map_or_else(Vec::new, |recurrent| recurrent_parts(recurrent.shape));
    qkv.chain(gate_up).map(part).chain(gates).chain(recurrent).collect()
}

/// One layer's tensors.
#[derive(Debug)]
pub(super) struct LayerTensors {
    pub attention_norm: Option<TensorSpec>,
    /// `None`: the layer is an MLP or experts alone.
    pub mixer: Option<MixerTensors>,
    pub o: Option<LinearTensors>,
    pub post_attention_norm: Option<TensorSpec>,
    pub mlp_norm: Option<TensorSpec>,
    /// `None`: the layer is attention or a recurrence alone.
    pub mlp: Option<MlpTensors>,
    pub post_mlp_norm: Option<TensorSpec>,
    pub input: Option<InputTensors>,
    /// The factor of the layer's output.
    pub scale: Option<TensorSpec>,
}

/// Tensors of what mixes a layer's tokens, without the projection of its output.
#[derive(Debug)]
pub(super) enum MixerTensors {
    Attention(AttentionTensors),
    Latent(Box<LatentTensors>),
    Recurrent(RecurrentTensors),
}

/// Tensors of attention.
#[derive(Debug)]
pub(super) struct AttentionTensors {
    pub qkv: LinearTensors,
    pub gate: Option<LinearTensors>,
    /// The norm of queries and, in a layer that has keys, that of keys.
    pub qk_norm: Option<(TensorSpec, Option<TensorSpec>)>,
    pub sinks: Option<TensorSpec>,
}

impl AttentionTensors {
    fn of(c: &Config, layer: usize) -> AttentionTensors {
        let heads = c.heads_of(layer);
        let dim = heads.head_dim;
        let (q, kv, hidden) = (heads.q_width(), heads.kv_heads * dim, c.hidden_size);
        let values = if c.values_are_keys(layer) {
            "self_attn.k_proj"
        } else {
            "self_attn.v_proj"
        };
        let vector = |rest: &str, width: usize| TensorSpec::vector(format!("model.layers.{layer}.{rest}"), width);
        let parts = [("self_attn.q_proj", q), ("self_attn.k_proj", kv), (values, kv)];
        let has_kv = c.has_kv(layer);
        let parts = if has_kv { &parts[..] } else { &parts[..1] };
        let mut qkv = LinearTensors::of(layer, parts, hidden, c.qkv_bias);
        if c.fused_qkv {
            qkv = qkv.stored_as(layer, &[(FUSED_QKV, q + 2 * kv)], hidden);
        }
        let gate = c.attention_gates.then(|| {
            let gate = LinearTensors::of(layer, &[("self_attn.gate_proj", q)], hidden, false);
            gate.stored_as(layer, &[], hidden)
        });
        if gate.is_some() {
            let parts = [
                (QUERY, 2 * q),
                ("self_attn.k_proj.weight", kv),
                ("self_attn.v_proj.weight", kv),
            ];
            qkv = qkv.stored_as(layer, &parts, hidden);
        }
        AttentionTensors {
            qkv,
            gate,
            qk_norm: c.qk_norm.then(|| {
                let (q, kv) = if c.joint_qk_norm { (q, kv) } else { (dim, dim) };
                (
                    vector("self_attn.q_norm.weight", q),
                    has_kv.then(|| vector("self_attn.k_norm.weight", kv)),
                )
            }),
            sinks: c.attention_sinks.then(|| vector("self_attn.sinks", heads.heads)),
        }
    }

    fn stored(&self) -> impl Iterator<Item = &TensorSpec> {
        let linear = self.gate.iter().chain([&self.qkv]).flat_map(LinearTensors::stored);
        let qk_norms = self.qk_norm.iter().flat_map(|(q, k)| std::iter::once(q).chain(k));
        qk_norms.chain(&self.sinks).chain(linear)
    }
}

impl MixerTensors {
    fn of(c: &Config, layer: usize) -> MixerTensors {
        match (&c.recurrent, c.latent) {
            (Some(recurrent), _) if recurrent.layers[layer] => {
                MixerTensors::Recurrent(RecurrentTensors::of(c, layer, recurrent))
            }
            (_, Some(latent)) => MixerTensors::Latent(Box::new(LatentTensors::of(c, layer, latent))),
            _ => MixerTensors::Attention(AttentionTensors::of(c, layer)),
        }
    }

    /// The projection of the output.
    fn output(&self, c: &Config, layer: usize) -> LinearTensors {
        let of = |name: &str, width: usize, bias: bool| LinearTensors::of(layer, &[(name, c.hidden_size)], width, bias);
        match self {
            MixerTensors::Attention(_) => of("self_attn.o_proj", c.heads_of(layer).q_width(), c.o_bias),
            MixerTensors::Latent(latent) => of("self_attn.o_proj", c.heads.heads * latent.shape.value_dim, c.o_bias),
            MixerTensors::Recurrent(RecurrentTensors { shape, .. }) => of(
                &format!("{}.out_proj", recurrent_name(shape.kind)),
                shape.value_width(),
                false,
            ),
        }
    }

    fn stored(&self) -> impl Iterator<Item = &TensorSpec> {
        let (attention, latent, recurrent) = match self {
            MixerTensors::Attention(attention) => (Some(attention), None, None),
            MixerTensors::Latent(latent) => (None, Some(latent), None),
            MixerTensors::Recurrent(recurrent) => (None, None, Some(recurrent)),
        };
        let latent = latent.into_iter().flat_map(|latent| latent.stored());
        let recurrent = recurrent.into_iter().flat_map(RecurrentTensors::stored);
        attention
            .into_iter()
            .flat_map(AttentionTensors::stored)
            .chain(latent)
            .chain(recurrent)
    }
}

/// Tensors of an MLP.
#[derive(Debug)]
pub(super) struct GatedTensors {
    /// The gate projection, if there is a gate, then the up projection.
    pub gate_up: LinearTensors,
    pub down: LinearTensors,
}

/// Tensors of a layer's MLP.
#[derive(Debug)]
pub(super) enum MlpTensors {
    Plain(GatedTensors),
    Experts(Box<ExpertTensors>),
    Both(Box<BothTensors>),
}

/// Tensors of a layer's experts.
#[derive(Debug)]
pub(super) struct ExpertTensors {
    pub routing: Routing,
    /// The router's matrix, and the row that weighs the shared expert, if it has one.
    pub router: LinearTensors,
    /// Added to the router's scores.
    pub correction: Option<TensorSpec>,
    pub experts: Vec<GatedTensors>,
    /// The tensors that the checkpoint stores in place of those of `experts`.
    stored: Option<Vec<TensorSpec>>,
    pub shared: Option<GatedTensors>,
}

impl ExpertTensors {
    fn of(c: &Config, layer: usize, experts: &Experts) -> ExpertTensors {
        let of_expert = |expert| {
            let name = format!("mlp.experts.{expert}");
            GatedTensors::of(c, layer, &name, experts.intermediate_size)
        };
        let router = [("mlp.gate", experts.count), ("mlp.shared_expert_gate", 1)];
        let is_weighted = experts.shared.as_ref().is_some_and(|shared| shared.is_weighted);
        let router = &router[..1 + usize::from(is_weighted)];
        let shared = experts.shared.as_ref();
        ExpertTensors {
            routing: experts.routing,
            router: LinearTensors::of(layer, router, c.hidden_size, experts.router_bias),
            correction: experts.has_correction.then(|| {
                let name = format!("model.layers.{layer}.mlp.gate.e_score_correction_bias");
                if c.family == Family::Ernie4_5Moe {
                    TensorSpec::matrix(name, 1, experts.count)
                } else {
                    TensorSpec::vector(name, experts.count)
                }
            }),
            experts: (0..experts.count).map(of_expert).collect(),
            stored: expert_forms::stored(c, layer),
            shared: shared.map(|shared| GatedTensors::of(c, layer, "mlp.shared_experts", shared.intermediate_size)),
        }
    }

    fn stored(&self) -> impl Iterator<Item = &TensorSpec> {
        let (mlps, instead) = match &self.stored {
            Some(stored) => (&[][..], &stored[..]),
            None => (&self.experts[..], &[][..]),
        };
        let mlps = mlps.iter().chain(&self.shared).flat_map(GatedTensors::stored);
        self.router.stored().chain(&self.correction).chain(mlps).chain(instead)
    }
}

impl GatedTensors {
    /// A layer's MLP or expert `mlp`, `width` numbers wide.
    fn of(c: &Config, layer: usize, mlp: &str, width: usize) -> GatedTensors {
        let name = |part: &str| format!("{mlp}.{part}");
        let both = [(&*name("gate_proj"), width), (&*name("up_proj"), width)];
        GatedTensors {
            gate_up: LinearTensors::of(
                layer,
                &both[usize::from(!c.activation.has_gate())..],
                c.hidden_size,
                c.mlp_bias,
            ),
            down: LinearTensors::of(layer, &[(&name("down_proj"), c.hidden_size)], width, c.mlp_bias),
        }
    }

    fn stored(&self) -> impl Iterator<Item = &TensorSpec> {
        [&self.gate_up, &self.down].into_iter().flat_map(LinearTensors::stored)
    }
}

impl MlpTensors {
    fn of(c: &Config, layer: usize) -> MlpTensors {
        let Some(experts) = c.experts_of(layer) else {
            let width = c.mlp_width(layer);
            let mut mlp = GatedTensors::of(c, layer, c.mlp_name(), width);
            let rows = 2 * width;
            if c.fused_gate_up {
                mlp.gate_up = mlp.gate_up.stored_as(layer, &[(FUSED_GATE_UP, rows)], c.hidden_size);
            }
            return MlpTensors::Plain(mlp);
        };
        if experts.beside_mlp {
            return MlpTensors::Both(Box::new(BothTensors::of(c, layer, experts)));
        }
        MlpTensors::Experts(Box::new(ExpertTensors::of(c, layer, experts)))
    }

    fn stored(&self) -> impl Iterator<Item = &TensorSpec> {
        let (plain, experts, both) = match self {
            MlpTensors::Plain(mlp) => (Some(mlp), None, None),
            MlpTensors::Experts(experts) => (None, Some(experts), None),
            MlpTensors::Both(both) => (None, None, Some(both)),
        };
        let experts = experts.into_iter().flat_map(|experts| experts.stored());
        let both = both.into_iter().flat_map(|both| both.stored());
        plain
            .into_iter()
            .flat_map(GatedTensors::stored)
            .chain(experts)
            .chain(both)
    }
}

/// A model's tensors by purpose.
#[derive(Debug)]
pub(super) struct ModelTensors {
    pub embedding: TensorSpec,
    pub inputs: Option<AllInputsTensors>,
    pub layers: Vec<LayerTensors>,
    pub norm: TensorSpec,
    /// `None`: the embedding table is the output head.
    pub head: Option<TensorSpec>,
}

/// Names of a layer's norms, by family.
#[derive(Debug, Clone, Copy)]
pub(super) struct NormNames {
    pub mlp: &'static str,
    /// The norms of the outputs of attention and MLP, in models that have them.
    post_attention: &'static str,
    post_mlp: &'static str,
}

impl NormNames {
    pub(super) fn of(config: &Config) -> NormNames {
        if config.has_lone_parts() {
            // Each layer has one norm, whatever it is.
            return NormNames {
                mlp: "input_layernorm",
                post_attention: "",
                post_mlp: "",
            };
        }
        match (config.family, config.post_norms) {
            (Family::Glm4, _) => NormNames {
                mlp: "post_attention_layernorm",
                post_attention: "post_self_attn_layernorm",
                post_mlp: "post_mlp_layernorm",
            },
            (_, true) => NormNames {
                mlp: "pre_feedforward_layernorm",
                post_attention: "post_attention_layernorm",
                post_mlp: "post_feedforward_layernorm",
            },
            (_, false) => NormNames {
                mlp: "post_attention_layernorm",
                post_attention: "",
                post_mlp: "",
            },
        }
    }
}

impl ModelTensors {
    /// The tensors of the model that `config` describes.
    pub(super) fn of(config: &Config) -> ModelTensors {
        let c = config;
        let table = |name: &str| TensorSpec::matrix(name.to_owned(), c.vocab_size, c.hidden_size);
        ModelTensors {
            embedding: table("model.embed_tokens.weight"),
            inputs: c.layer_inputs.map(|inputs| AllInputsTensors::of(c, inputs)),
            layers: (0..c.layers.len()).map(|layer| LayerTensors::of(c, layer)).collect(),
            norm: TensorSpec::vector("model.norm.weight".to_owned(), c.hidden_size),
            head: if c.tied_embeddings {
                None
            } else {
                Some(table(OUTPUT_HEAD))
            },
        }
    }

    /// All tensors of the model, as the checkpoint stores them.
    pub(super) fn all(&self) -> impl Iterator<Item = &TensorSpec> {
        let layers = self.layers.iter().flat_map(LayerTensors::all);
        [&self.embedding, &self.norm]
            .into_iter()
            .chain(layers)
            .chain(self.inputs.iter().flat_map(AllInputsTensors::stored))
            .chain(&self.head)
    }
}

impl LayerTensors {
    fn of(c: &Config, layer: usize) -> LayerTensors {
        let hidden = c.hidden_size;
        let norm = |rest: &str| TensorSpec::vector(format!("model.layers.{layer}.{rest}.weight"), hidden);
        let norms = NormNames::of(c);
        let mixer = c.has_mixer(layer).then(|| MixerTensors::of(c, layer));
        let has_mlp = c.has_mlp(layer);
        LayerTensors {
            attention_norm: (c.pre_norms && mixer.is_some()).then(|| norm("input_layernorm")),
            o: mixer.as_ref().map(|mixer| mixer.output(c, layer)),
            mixer,
            post_attention_norm: c.post_norms.then(|| norm(norms.post_attention)),
            mlp_norm: (c.pre_norms && !c.parallel_mlp && has_mlp).then(|| norm(norms.mlp)),
            mlp: has_mlp.then(|| MlpTensors::of(c, layer)),
            post_mlp_norm: c.post_norms.then(|| norm(norms.post_mlp)),
            input: c.layer_inputs.map(|inputs| InputTensors::of(c, layer, inputs)),
            scale: c
                .layer_scalars
                .then(|| TensorSpec::vector(format!("model.layers.{layer}.layer_scalar"), 1)),
        }
    }

    fn all(&self) -> impl Iterator<Item = &TensorSpec> {
        self.attention_norm
            .iter()
            .chain(&self.mlp_norm)
            .chain(&self.post_attention_norm)
            .chain(&self.post_mlp_norm)
            .chain(&self.scale)
            .chain(self.input.iter().flat_map(InputTensors::stored))
            .chain(self.mixer.iter().flat_map(MixerTensors::stored))
            .chain(self.o.iter().flat_map(LinearTensors::stored))
            .chain(self.mlp.iter().flat_map(MlpTensors::stored))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;
    use std::sync::{Arc, Mutex};

    use serde_json::json;

    use super::*;
    use crate::device::cpu::Threads;
    use crate::device::{Dtype, KvFormat, Precision};
    use crate::model::error::ModelError;
    use crate::model::random_weights::RandomWeights;
    use crate::model::weights::{StoredTensor, WeightSource};
    use crate::model::{KvBudget, LoadOptions, Transformer};

    /// Random weights that record which tensors are requested.
    struct RecordingWeights {
        inner: RandomWeights,
        requested: Mutex<BTreeMap<String, (Option<usize>, usize)>>,
    }

    impl WeightSource for RecordingWeights {
        fn tensor(&self, name: &str, rows: Option<usize>, columns: usize) -> Result<StoredTensor<'_>, ModelError> {
            self.requested.lock().unwrap().insert(name.to_owned(), (rows, columns));
            self.inner.tensor(name, rows, columns)
        }

        fn path_of(&self, name: &str) -> &Path {
            self.inner.path_of(name)
        }
    }

    /// If a tensor were read but not listed, valid checkpoints would be refused. If it were listed
    /// but not read, it would be ignored silently.
    #[test]
    fn exactly_the_listed_tensors_are_read() {
        for (architecture, extra) in [
            ("LlamaForCausalLM", json!({})),
            ("LlamaForCausalLM", json!({"attention_bias": true, "mlp_bias": true})),
            ("MistralForCausalLM", json!({"tie_word_embeddings": true})),
            ("Qwen2ForCausalLM", json!({})),
            ("Qwen3ForCausalLM", json!({"attention_bias": true})),
            ("MixtralForCausalLM", json!({"num_local_experts": 3})),
            (
                "Qwen3MoeForCausalLM",
                json!({"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "mlp_only_layers": [1]}),
            ),
            ("OlmoeForCausalLM", json!({"num_experts": 3, "num_experts_per_tok": 2})),
            (
                "Llama4ForCausalLM",
                json!({"num_local_experts": 3, "intermediate_size_mlp": 40, "interleave_moe_layer_step": 2}),
            ),
            (
                "NemotronHForCausalLM",
                json!({"hybrid_override_pattern": "M*-E", "num_hidden_layers": 4, "n_routed_experts": 3, "moe_intermediate_size": 20,
                    "moe_shared_expert_intermediate_size": 24, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2,
                    "ssm_state_size": 6}),
            ),
            (
                "Qwen2MoeForCausalLM",
                json!({"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 24}),
            ),
            (
                "Glm4MoeForCausalLM",
                json!({"n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "use_qk_norm": true}),
            ),
            (
                "DeepseekV2ForCausalLM",
                json!({"num_key_value_heads": 4, "q_lora_rank": null, "kv_lora_rank": 18, "n_routed_experts": 3, "num_experts_per_tok": 2,
                    "moe_intermediate_size": 40, "attention_bias": true}),
            ),
            (
                "DeepseekV3ForCausalLM",
                json!({"num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 18, "n_routed_experts": 4, "num_experts_per_tok": 2,
                    "n_group": 2, "topk_group": 1, "moe_intermediate_size": 40, "first_k_dense_replace": 1, "attention_bias": true}),
            ),
            (
                "GraniteMoeSharedForCausalLM",
                json!({"num_local_experts": 3, "shared_intermediate_size": 24}),
            ),
            (
                "GraniteMoeHybridForCausalLM",
                json!({"num_local_experts": 3, "layer_types": ["mamba", "attention"], "mamba_n_heads": 4}),
            ),
            (
                "GraniteMoeHybridForCausalLM",
                json!({"num_local_experts": 0, "layer_types": ["attention", "mamba"], "mamba_n_heads": 4, "mamba_conv_bias": false}),
            ),
            (
                "Ernie4_5_MoeForCausalLM",
                json!({"moe_num_experts": 3, "moe_k": 2, "moe_intermediate_size": 40}),
            ),
            (
                "Qwen3NextForCausalLM",
                json!({"num_experts": 3, "num_experts_per_tok": 2, "full_attention_interval": 2}),
            ),
            (
                "Qwen3_5ForCausalLM",
                json!({"layer_types": ["full_attention", "linear_attention"]}),
            ),
            ("Gemma2ForCausalLM", json!({"tie_word_embeddings": false})),
            ("Gemma3ForCausalLM", json!({})),
            (
                "Gemma4ForCausalLM",
                json!({"hidden_size_per_layer_input": 0, "attention_k_eq_v": true, "num_global_key_value_heads": 1,
                    "attention_bias": true}),
            ),
            (
                "Gemma4ForCausalLM",
                json!({"hidden_size_per_layer_input": 0, "enable_moe_block": true, "num_experts": 3, "top_k_experts": 2,
                    "moe_intermediate_size": 40}),
            ),
            (
                "Gemma4ForCausalLM",
                json!({"hidden_size_per_layer_input": 8, "num_hidden_layers": 3, "num_kv_shared_layers": 1,
                    "layer_types": ["sliding_attention", "full_attention", "full_attention"], "use_double_wide_mlp": true}),
            ),
            ("GemmaForCausalLM", json!({})),
            ("SmolLM3ForCausalLM", json!({"mlp_bias": true})),
            ("GraniteForCausalLM", json!({"logits_scaling": 8.0})),
            ("SeedOssForCausalLM", json!({})),
            ("Phi3ForCausalLM", json!({"partial_rotary_factor": 0.5})),
            ("MinistralForCausalLM", json!({})),
            ("GlmForCausalLM", json!({})),
            ("Glm4ForCausalLM", json!({})),
            ("Exaone4ForCausalLM", json!({})),
            ("Olmo2ForCausalLM", json!({})),
            ("Olmo3ForCausalLM", json!({})),
            ("CohereForCausalLM", json!({})),
        ] {
            let mut text = json!({
                "architectures": [architecture], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 200
            });
            text.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            let config = Config::parse(Path::new("config.json"), &text.to_string()).unwrap();
            for precision in [Precision::F32, Precision::Int8] {
                let source = RecordingWeights {
                    inner: RandomWeights {
                        seed: 1,
                        dtype: Dtype::Bf16,
                    },
                    requested: Mutex::default(),
                };
                let options = LoadOptions {
                    precision,
                    kv_format: KvFormat::F32,
                    channels: None,
                    isa: None,
                    kv: KvBudget::Blocks(1),
                    threads: Arc::new(Threads::new(1).unwrap()),
                    max_context: Some(16),
                    vocabulary: None,
                };
                Transformer::from_weights(config.clone(), &source, &options).unwrap();
                let tensors = ModelTensors::of(&config);
                let listed: BTreeMap<_, _> = tensors
                    .all()
                    .map(|spec| (spec.name.clone(), (spec.rows, spec.columns)))
                    .collect();
                assert_eq!(*source.requested.lock().unwrap(), listed, "{architecture} {extra}");
            }
        }
    }
}
