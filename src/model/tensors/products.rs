//! The products of a model: what a device multiplies by one matrix, or by one of several alike.

use super::{GatedTensors, LayerTensors, LinearTensors, MixerTensors, MlpTensors, ModelTensors};
use crate::model::error::ModelError;
use crate::model::weights::WeightSource;

/// Columns of a group of a product's matrices. `None`: not all are stored in codes of four bits, or groups have several sizes;
/// then no device keeps the codes.
///
/// # Errors
/// A matrix is missing or has another shape.
pub(in crate::model) fn code_group<'t>(
    source: &dyn WeightSource,
    product: impl IntoIterator<Item = &'t LinearTensors>,
) -> Result<Option<usize>, ModelError> {
    let mut first = None;
    for part in product.into_iter().flat_map(|linear| &linear.weights) {
        let group = source.code_group(&part.name, part.rows.unwrap_or(1), part.columns)?;
        if group.is_none() || *first.get_or_insert(group) != group {
            return Ok(None);
        }
    }
    Ok(first.flatten())
}

impl ModelTensors {
    /// The linear operations of each product. Routers, which are F32 at every precision, and heads' projections of latents, which
    /// are stored as parts of one matrix, are none.
    pub(in crate::model) fn products(&self) -> Vec<Vec<&LinearTensors>> {
        let inputs = self.inputs.iter().map(|inputs| vec![&inputs.projection]);
        inputs
            .chain(self.layers.iter().flat_map(LayerTensors::products))
            .collect()
    }
}

impl LayerTensors {
    fn products(&self) -> Vec<Vec<&LinearTensors>> {
        let mixer = self.mixer.iter().flat_map(MixerTensors::linears).chain(&self.o);
        let input = self.input.iter().flat_map(|input| [&input.gate, &input.projection]);
        let alone = mixer.chain(input).map(|linear| vec![linear]);
        alone.chain(self.mlp.iter().flat_map(MlpTensors::products)).collect()
    }
}

impl MixerTensors {
    fn linears(&self) -> Vec<&LinearTensors> {
        match self {
            MixerTensors::Attention(attention) => {
                let gate = attention.gate.iter();
                gate.chain([&attention.qkv]).collect()
            }
            MixerTensors::Latent(latent) => {
                let of_queries = latent.query_latent.iter().map(|(linear, _)| linear);
                of_queries.chain([&latent.queries, &latent.latent]).collect()
            }
            MixerTensors::Recurrent(recurrent) => vec![&recurrent.input],
        }
    }
}

impl MlpTensors {
    fn products(&self) -> Vec<Vec<&LinearTensors>> {
        let (plain, experts) = match self {
            MlpTensors::Plain(mlp) => (Some(mlp), None),
            MlpTensors::Experts(experts) => (None, Some(&**experts)),
            MlpTensors::Both(both) => (Some(&both.plain), Some(&both.experts)),
        };
        let shared = experts.and_then(|experts| experts.shared.as_ref());
        let alone = plain.into_iter().chain(shared);
        let alone = alone.flat_map(|mlp| [vec![&mlp.gate_up], vec![&mlp.down]]);
        let of_experts = |linear: fn(&GatedTensors) -> &LinearTensors| -> Option<Vec<&LinearTensors>> {
            Some(experts?.experts.iter().map(linear).collect())
        };
        let of_experts = [of_experts(|mlp| &mlp.gate_up), of_experts(|mlp| &mlp.down)];
        alone.chain(of_experts.into_iter().flatten()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;
    use crate::device::cpu::Threads;
    use crate::device::{KvFormat, Precision};
    use crate::model::coded_weights::CodedWeights;
    use crate::model::config::Config;
    use crate::model::size::CodedSize;
    use crate::model::{KvBudget, LoadOptions, Transformer};

    /// A small model's configuration.
    fn config(architecture: &str, extra: &Value) -> Config {
        let mut text = json!({
            "architectures": [architecture], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 200
        });
        text.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        Config::parse(Path::new("config.json"), &text.to_string()).unwrap()
    }

    /// Loads the model in four bits.
    fn load(config: &Config, source: &CodedWeights) -> Result<(), ModelError> {
        let options = LoadOptions {
            precision: Precision::W4a8,
            kv_format: KvFormat::F32,
            channels: None,
            isa: None,
            kv: KvBudget::Blocks(1),
            threads: Arc::new(Threads::new(1).unwrap()),
            max_context: Some(16),
            vocabulary: None,
        };
        Transformer::from_weights(config.clone(), source, &options).map(|_| ())
    }

    /// If a product were counted that is not kept, the planned memory would be too low.
    #[test]
    fn what_is_kept_in_codes_is_what_is_counted() {
        for (architecture, extra) in [
            ("LlamaForCausalLM", json!({})),
            ("MixtralForCausalLM", json!({"num_local_experts": 3})),
            (
                "Qwen2MoeForCausalLM",
                json!({"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 24}),
            ),
            (
                "DeepseekV3ForCausalLM",
                json!({"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
                    "n_group": 2, "topk_group": 1, "moe_intermediate_size": 40, "first_k_dense_replace": 1}),
            ),
            (
                "Qwen3NextForCausalLM",
                json!({"num_experts": 3, "num_experts_per_tok": 2, "full_attention_interval": 2}),
            ),
            (
                "Gemma4ForCausalLM",
                json!({"hidden_size_per_layer_input": 0, "attention_k_eq_v": true, "num_global_key_value_heads": 1}),
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
        ] {
            let config = config(architecture, &extra);
            let source = CodedWeights::new(true, |_| Some(8));
            load(&config, &source).unwrap();
            let kept: usize = source.read.lock().unwrap().values().sum();
            let counted = CodedSize::of(&source, &config).unwrap();
            assert_eq!(counted.values, kept as u64, "{architecture} {extra}");
            assert_eq!(counted.bytes, counted.values / 2 + counted.values / 8 * 5);
        }
    }

    /// A kernel reads the groups of all matrices of a product alike.
    #[test]
    fn a_product_of_groups_of_two_sizes_is_not_kept() {
        let experts = json!({"num_local_experts": 3});
        let config = config("MixtralForCausalLM", &experts);
        let sizes = |name: &str| {
            Some(if name.contains("v_proj") || name.contains("experts.1.up_proj") {
                32
            } else {
                8
            })
        };
        let source = CodedWeights::new(true, sizes);
        load(&config, &source).unwrap();
        let read = source.read.lock().unwrap();
        let kept = |part: &str| read.keys().any(|name| name.contains(part));
        for (part, is_kept) in [
            ("q_proj", false),
            ("v_proj", false),
            ("o_proj", true),
            ("experts.0.gate_proj", false),
            ("experts.1.down_proj", true),
        ] {
            assert_eq!(kept(part), is_kept, "{part}");
        }
        let values: usize = read.values().sum();
        assert_eq!(CodedSize::of(&source, &config).unwrap().values, values as u64);
        // If no product is left, the model would run in eight bits.
        let mixed = |name: &str| {
            ["q_proj", "up_proj"]
                .iter()
                .any(|part| name.contains(part))
                .then_some(8)
        };
        let refused = load(&config, &CodedWeights::new(true, mixed)).unwrap_err();
        assert!(refused.to_string().contains("`precision` is w4a8"), "{refused}");
    }
}
