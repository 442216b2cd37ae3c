//! A GGUF file's metadata as the keys that `config.json` would have, and then as a [`Config`].

use serde_json::{Map, Value, json};

use super::architecture::Architecture;
use super::ends::end_ids;
use super::keys::Keys;
use crate::gguf::{Format, GgufSet};
use crate::model::config::{Config, ExpertForm};
use crate::model::error::ModelError;

/// The name of the tensor with a factor of each frequency, and those of factors for long and short contexts.
const ROPE_FREQS: &str = "rope_freqs.weight";
const LONG_FACTORS: &str = "rope_factors_long.weight";
const SHORT_FACTORS: &str = "rope_factors_short.weight";
/// Maximum number of layers: lists are made for each.
const LAYERS_MAX: u64 = 1 << 12;

/// The configuration of the model in these files.
///
/// # Errors
/// The architecture or an option is not supported, or the metadata are damaged.
pub fn config(set: &GgufSet) -> Result<Config, ModelError> {
    let architecture = Architecture::of(set)?;
    let keys = Keys::new(set, architecture.name());
    let mut map = common_keys(&keys, architecture)?;
    let more = own_keys(&keys, architecture)?;
    map.extend(more);
    if !matches!(architecture, Architecture::Gemma3 | Architecture::Olmo2) {
        let theta = keys.number("rope.freq_base")?.unwrap_or(10_000.0);
        map.insert("rope_theta".into(), json!(theta));
        if let Some(scaling) = rope_scaling(&keys, architecture)? {
            map.insert("rope_scaling".into(), scaling);
        }
    }
    let unknown = keys.check()?;
    let text = Value::Object(map).to_string();
    let mut config = Config::parse(set.path(), &text)?;
    // What the file has otherwise than the checkpoint that it was made of.
    config.unit_offset_norms = false;
    config.rotates_neighbours |= architecture.has_reordered_heads();
    if let Some(experts) = &mut config.experts {
        experts.form = ExpertForm::Matrices;
    }
    if !unknown.is_empty() {
        config.warnings.push(format!(
            "{}: not known, and without effect: {}",
            set.path().display(),
            unknown.join(", ")
        ));
    }
    Ok(config)
}

/// The keys that all architectures have.
fn common_keys(keys: &Keys<'_>, architecture: Architecture) -> Result<Map<String, Value>, ModelError> {
    let hidden = keys.required("embedding_length")?;
    let heads = keys.required("attention.head_count")?;
    let kv_heads = keys.whole("attention.head_count_kv")?.unwrap_or(heads);
    let by_heads = hidden.checked_div(heads).unwrap_or(0);
    let head_dim = keys.whole("attention.key_length")?.unwrap_or(by_heads);
    let values = keys.whole("attention.value_length")?.unwrap_or(by_heads);
    if values != head_dim {
        return Err(keys.unsupported(
            "attention.value_length",
            &format!("is {values}, and keys have {head_dim} numbers: heads of two sizes are not supported"),
        ));
    }
    if keys.flag("attention.causal")? == Some(false) {
        return Err(keys.unsupported(
            "attention.causal",
            "is false: a model that reads backwards, too, writes no text",
        ));
    }
    let Some((table, _)) = keys.tensor("token_embd.weight") else {
        return Err(ModelError::broken(keys.path(), "tensor `token_embd.weight` is missing"));
    };
    let ends = end_ids(keys.metadata()).map_err(|why| ModelError::broken(keys.path(), why))?;
    let map = json!({
        "hidden_size": hidden,
        "intermediate_size": keys.required("feed_forward_length")?,
        "num_hidden_layers": keys.required("block_count")?,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": keys.required("context_length")?,
        "vocab_size": table.shape[0],
        "tie_word_embeddings": !keys.has_tensor("output.weight"),
        "eos_token_id": ends,
    });
    let mut map = match map {
        Value::Object(map) => map,
        _ => Map::new(),
    };
    for (key, name) in [
        ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
        ("attention.layer_norm_epsilon", "layer_norm_eps"),
    ] {
        if let Some(epsilon) = keys.number(key)? {
            map.insert(name.into(), json!(epsilon));
        }
    }
    // As in llama.cpp: what a default would answer is not what the model does.
    let needed: &[&str] = match architecture {
        Architecture::CommandR | Architecture::Cohere2 => &["attention.layer_norm_epsilon", "logit_scale"],
        Architecture::Granite | Architecture::GraniteMoe => &["attention.layer_norm_rms_epsilon", "logit_scale"],
        _ => &["attention.layer_norm_rms_epsilon"],
    };
    for key in needed {
        if keys.number(key)?.is_none() {
            return Err(keys.broken(key, "is missing"));
        }
    }
    Ok(map)
}

/// The keys of an architecture.
#[expect(clippy::too_many_lines, reason = "architectures, one by one")]
fn own_keys(keys: &Keys<'_>, architecture: Architecture) -> Result<Map<String, Value>, ModelError> {
    let of_first_layer = |part: &str| keys.has_tensor(&format!("blk.0.{part}"));
    let attention_bias = of_first_layer("attn_q.bias");
    let output_bias = of_first_layer("attn_output.bias");
    let mlp_bias = of_first_layer("ffn_down.bias");
    let layers = keys.required("block_count")?;
    if layers > LAYERS_MAX {
        return Err(keys.broken("block_count", &format!("is {layers}, more than {LAYERS_MAX}")));
    }
    let head_dim = head_dim(keys)?;
    let rotary = keys.whole("rope.dimension_count")?.unwrap_or(head_dim);
    let is_partial = matches!(
        architecture,
        Architecture::Phi3 | Architecture::Glm4 | Architecture::Glm4Moe
    );
    if rotary != head_dim && !is_partial {
        return Err(keys.unsupported(
            "rope.dimension_count",
            &format!("is {rotary}: of heads of {head_dim} numbers, all must rotate"),
        ));
    }
    let rotary_share = rotary as f64 / head_dim.max(1) as f64;
    let value = match architecture {
        Architecture::Llama => match keys.whole("expert_count")?.unwrap_or(0) {
            0 => json!({"architectures": ["LlamaForCausalLM"], "attention_bias": attention_bias, "mlp_bias": mlp_bias}),
            count => json!({
                "architectures": ["MixtralForCausalLM"], "num_local_experts": count,
                "num_experts_per_tok": keys.required("expert_used_count")?, "sliding_window": null,
            }),
        },
        Architecture::Qwen2 => json!({"architectures": ["Qwen2ForCausalLM"]}),
        Architecture::Qwen2Moe => json!({
            "architectures": ["Qwen2MoeForCausalLM"], "num_experts": keys.required("expert_count")?,
            "num_experts_per_tok": keys.required("expert_used_count")?,
            "moe_intermediate_size": expert_width(keys, "ffn_down_exps")?,
            "shared_expert_intermediate_size": shared_width(keys)?,
            "norm_topk_prob": false, "qkv_bias": attention_bias, "decoder_sparse_step": 1,
        }),
        Architecture::Qwen3 => json!({"architectures": ["Qwen3ForCausalLM"], "attention_bias": attention_bias}),
        Architecture::Qwen3Moe => json!({
            "architectures": ["Qwen3MoeForCausalLM"], "num_experts": keys.required("expert_count")?,
            "num_experts_per_tok": keys.required("expert_used_count")?,
            "moe_intermediate_size": expert_width(keys, "ffn_down_exps")?,
            "norm_topk_prob": true, "attention_bias": attention_bias, "decoder_sparse_step": 1,
        }),
        Architecture::Gemma => json!({"architectures": ["GemmaForCausalLM"], "hidden_activation": GELU}),
        Architecture::Gemma2 => json!({
            "architectures": ["Gemma2ForCausalLM"], "hidden_activation": GELU,
            // The largest published model, of 46 layers, has another than that of its heads' size.
            "query_pre_attn_scalar": query_scalar(keys, layers == 46)?,
            "attn_logit_softcapping": soft_cap(keys, "attn_logit_softcapping", Some(50.0))?,
            "final_logit_softcapping": soft_cap(keys, "final_logit_softcapping", Some(30.0))?,
            "sliding_window": keys.whole("attention.sliding_window")?.unwrap_or(4096),
            "layer_types": layer_types(keys, layers)?,
        }),
        Architecture::Gemma3 => gemma3_keys(keys, layers)?,
        Architecture::Phi3 => {
            let window = keys.whole("attention.sliding_window")?.filter(|window| *window > 0);
            json!({
                "architectures": ["Phi3ForCausalLM"], "sliding_window": window, "partial_rotary_factor": rotary_share,
                "original_max_position_embeddings": keys.whole("rope.scaling.original_context_length")?,
            })
        }
        Architecture::Olmo2 => olmo_keys(keys, layers, attention_bias)?,
        Architecture::Olmoe => json!({
            "architectures": ["OlmoeForCausalLM"], "num_experts": keys.required("expert_count")?,
            "num_experts_per_tok": keys.required("expert_used_count")?, "norm_topk_prob": false,
            "attention_bias": attention_bias,
        }),
        Architecture::Granite | Architecture::GraniteMoe => granite_keys(keys, architecture, attention_bias)?,
        Architecture::SmolLm3 => json!({
            "architectures": ["SmolLM3ForCausalLM"], "attention_bias": attention_bias, "mlp_bias": mlp_bias,
            "no_rope_layer_interval": 4, "use_sliding_window": false,
        }),
        Architecture::CommandR => json!({
            "architectures": ["CohereForCausalLM"], "logit_scale": keys.number("logit_scale")?,
            "attention_bias": attention_bias,
        }),
        Architecture::Cohere2 => json!({
            "architectures": ["Cohere2ForCausalLM"], "logit_scale": keys.number("logit_scale")?,
            "sliding_window": keys.required("attention.sliding_window")?, "attention_bias": attention_bias,
            "layer_types": layer_types(keys, layers)?,
        }),
        Architecture::Glm4 => json!({
            "architectures": ["Glm4ForCausalLM"], "attention_bias": attention_bias, "partial_rotary_factor": rotary_share,
        }),
        Architecture::Glm4Moe => glm4_moe_keys(keys, layers, attention_bias, rotary_share)?,
        Architecture::Ernie4_5 => json!({"architectures": ["Ernie4_5ForCausalLM"]}),
        Architecture::GptOss => {
            let width = expert_width(keys, "ffn_down_exps")?;
            json!({
                "architectures": ["GptOssForCausalLM"], "num_local_experts": keys.required("expert_count")?,
                "num_experts_per_tok": keys.required("expert_used_count")?, "intermediate_size": width,
                "sliding_window": keys.required("attention.sliding_window")?, "attention_bias": attention_bias,
                "layer_types": layer_types(keys, layers)?,
            })
        }
        Architecture::SeedOss => json!({
            "architectures": ["SeedOssForCausalLM"], "attention_bias": attention_bias, "attention_out_bias": output_bias,
            "mlp_bias": mlp_bias,
        }),
        Architecture::Exaone4 => {
            let window = keys.whole("attention.sliding_window")?.filter(|window| *window > 0);
            json!({
                "architectures": ["Exaone4ForCausalLM"], "sliding_window": window,
                "layer_types": layer_types(keys, layers)?,
            })
        }
    };
    check_groups(keys)?;
    Ok(match value {
        // A key without a value is absent, where that is no value of its own.
        Value::Object(map) => map
            .into_iter()
            .filter(|(key, value)| !value.is_null() || key.starts_with("sliding") || key.ends_with("softcapping"))
            .collect(),
        _ => Map::new(),
    })
}

const GELU: &str = "gelu_pytorch_tanh";

fn head_dim(keys: &Keys<'_>) -> Result<u64, ModelError> {
    let by_heads = keys
        .required("embedding_length")?
        .checked_div(keys.required("attention.head_count")?);
    Ok(keys.whole("attention.key_length")?.or(by_heads).unwrap_or(0))
}

/// Routers that choose among groups first, or score otherwise than their family, are not those of an
/// architecture that is read.
fn check_groups(keys: &Keys<'_>) -> Result<(), ModelError> {
    for key in ["expert_group_count", "expert_group_used_count"] {
        if keys.whole(key)?.is_some_and(|groups| groups > 1) {
            return Err(keys.unsupported(key, "is above 1, which is not supported for this architecture"));
        }
    }
    Ok(())
}

/// Numbers of an expert's inner vector, as its tensors have them: the key may be absent.
fn expert_width(keys: &Keys<'_>, part: &str) -> Result<u64, ModelError> {
    let declared = keys.whole("expert_feed_forward_length")?;
    let stored = keys.tensor(&format!("blk.0.{part}.weight"));
    let stored = stored.and_then(|(tensor, _)| tensor.shape.last().map(|width| *width as u64));
    declared
        .or(stored)
        .ok_or_else(|| keys.broken("expert_feed_forward_length", "is missing"))
}

fn shared_width(keys: &Keys<'_>) -> Result<u64, ModelError> {
    let declared = keys.whole("expert_shared_feed_forward_length")?;
    let stored = keys.tensor("blk.0.ffn_down_shexp.weight");
    let stored = stored.and_then(|(tensor, _)| tensor.shape.last().map(|width| *width as u64));
    declared
        .or(stored)
        .ok_or_else(|| keys.broken("expert_shared_feed_forward_length", "is missing"))
}

/// The number whose root queries are divided by, which is not stored.
fn query_scalar(keys: &Keys<'_>, is_largest: bool) -> Result<u64, ModelError> {
    if !is_largest {
        return head_dim(keys);
    }
    let by_heads = keys
        .required("embedding_length")?
        .checked_div(keys.required("attention.head_count")?);
    Ok(by_heads.unwrap_or(0))
}

/// A soft cap; a stored 0 is none. `absent`: the cap of the architecture's files that store none.
fn soft_cap(keys: &Keys<'_>, key: &str, absent: Option<f64>) -> Result<Option<f64>, ModelError> {
    Ok(keys.number(key)?.or(absent).filter(|cap| *cap != 0.0))
}

fn layer_types(keys: &Keys<'_>, layers: u64) -> Result<Option<Value>, ModelError> {
    let pattern = keys.pattern("attention.sliding_window_pattern", layers)?;
    Ok(pattern.map(|windows| {
        let name = |window: &bool| {
            if *window { "sliding_attention" } else { "full_attention" }
        };
        windows.iter().map(name).collect::<Vec<_>>().into()
    }))
}

fn gemma3_keys(keys: &Keys<'_>, layers: u64) -> Result<Value, ModelError> {
    let theta = keys.number("rope.freq_base")?.unwrap_or(1e6);
    let window_theta = keys.number("rope.freq_base_swa")?.unwrap_or(10_000.0);
    let full = rope_scaling(keys, Architecture::Gemma3)?.unwrap_or(json!({"rope_type": "default"}));
    let mut full = match full {
        Value::Object(map) => map,
        _ => Map::new(),
    };
    full.insert("rope_theta".into(), json!(theta));
    let window = keys.whole("attention.sliding_window")?.filter(|window| *window > 0);
    let types = match (window, layer_types(keys, layers)?) {
        // Without windows, all layers are alike.
        (None, _) => Some(json!(vec!["full_attention"; layers as usize])),
        (_, types) => types,
    };
    Ok(json!({
        "architectures": ["Gemma3ForCausalLM"], "hidden_activation": GELU,
        // The largest published model, of 62 layers, has another than that of its heads' size.
        "query_pre_attn_scalar": query_scalar(keys, layers == 62)?,
        "final_logit_softcapping": soft_cap(keys, "final_logit_softcapping", None)?,
        "sliding_window": window.unwrap_or(4096), "layer_types": types,
        "rope_parameters": {
            "full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": window_theta},
        },
    }))
}

/// OLMo 2, and OLMo 3, which has windows.
fn olmo_keys(keys: &Keys<'_>, layers: u64, attention_bias: bool) -> Result<Value, ModelError> {
    let theta = keys.number("rope.freq_base")?.unwrap_or(10_000.0);
    let scaling = rope_scaling(keys, Architecture::Olmo2)?;
    let Some(window) = keys.whole("attention.sliding_window")?.filter(|window| *window > 0) else {
        return Ok(json!({
            "architectures": ["Olmo2ForCausalLM"], "attention_bias": attention_bias, "rope_theta": theta,
            "rope_scaling": scaling,
        }));
    };
    let window_theta = keys.number("rope.freq_base_swa")?.unwrap_or(theta);
    let mut full = match scaling {
        Some(Value::Object(map)) => map,
        _ => Map::from_iter([("rope_type".to_owned(), json!("default"))]),
    };
    full.insert("rope_theta".into(), json!(theta));
    Ok(json!({
        "architectures": ["Olmo3ForCausalLM"], "attention_bias": attention_bias, "sliding_window": window,
        "layer_types": layer_types(keys, layers)?,
        "rope_parameters": {
            "full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": window_theta},
        },
    }))
}

fn granite_keys(keys: &Keys<'_>, architecture: Architecture, attention_bias: bool) -> Result<Value, ModelError> {
    // The key says of these models whether they rotate at all.
    if keys.flag("rope.scaling.finetuned")? == Some(false) {
        return Err(keys.unsupported(
            "rope.scaling.finetuned",
            "is false: a Granite without positions is not supported",
        ));
    }
    let mut map = Map::new();
    for (key, name) in [
        ("attention.scale", "attention_multiplier"),
        ("embedding_scale", "embedding_multiplier"),
        ("residual_scale", "residual_multiplier"),
        ("logit_scale", "logits_scaling"),
    ] {
        if let Some(factor) = keys.number(key)? {
            map.insert(name.into(), json!(factor));
        }
    }
    map.insert("attention_bias".into(), json!(attention_bias));
    if architecture == Architecture::Granite {
        let mlp_bias = keys.has_tensor("blk.0.ffn_down.bias");
        map.insert("architectures".into(), json!(["GraniteForCausalLM"]));
        map.insert("mlp_bias".into(), json!(mlp_bias));
        return Ok(Value::Object(map));
    }
    map.insert("num_local_experts".into(), json!(keys.required("expert_count")?));
    map.insert("num_experts_per_tok".into(), json!(keys.required("expert_used_count")?));
    let shared = keys
        .whole("expert_shared_feed_forward_length")?
        .filter(|width| *width > 0);
    let class = match shared {
        Some(width) => {
            map.insert("shared_intermediate_size".into(), json!(width));
            "GraniteMoeSharedForCausalLM"
        }
        None => "GraniteMoeForCausalLM",
    };
    map.insert("architectures".into(), json!([class]));
    Ok(Value::Object(map))
}

/// GLM-4.5. Layers that predict further tokens count among the file's.
fn glm4_moe_keys(keys: &Keys<'_>, layers: u64, attention_bias: bool, rotary_share: f64) -> Result<Value, ModelError> {
    let further = keys.whole("nextn_predict_layers")?.unwrap_or(0);
    /// The number of a router that scores by sigmoids.
    const SIGMOID: u64 = 2;
    if keys
        .whole("expert_gating_func")?
        .is_some_and(|score| score != SIGMOID && score != 0)
    {
        return Err(keys.unsupported("expert_gating_func", "other than 2, a sigmoid, is not supported"));
    }
    Ok(json!({
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": attention_bias, "partial_rotary_factor": rotary_share,
        "num_hidden_layers": layers.saturating_sub(further), "num_nextn_predict_layers": further,
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"), "n_routed_experts": keys.required("expert_count")?,
        "num_experts_per_tok": keys.required("expert_used_count")?,
        "moe_intermediate_size": keys.required("expert_feed_forward_length")?,
        "n_shared_experts": keys.whole("expert_shared_count")?.unwrap_or(0),
        "first_k_dense_replace": keys.whole("leading_dense_block_count")?.unwrap_or(0),
        "routed_scaling_factor": keys.number("expert_weights_scale")?.unwrap_or(1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm")?.unwrap_or(true), "n_group": 1, "topk_group": 1,
    }))
}

/// The RoPE object that `config.json` would have. `None`: frequencies are those of the base.
fn rope_scaling(keys: &Keys<'_>, architecture: Architecture) -> Result<Option<Value>, ModelError> {
    let kind = keys.text("rope.scaling.type")?.unwrap_or("linear");
    if !["none", "linear", "yarn", "longrope"].contains(&kind) {
        let kind = crate::printable::printable_name(kind);
        let why = format!("is `{kind}`, which is not supported; none, linear, yarn and longrope are");
        return Err(keys.unsupported("rope.scaling.type", &why));
    }
    let factor = match keys.number("rope.scaling.factor")? {
        None => keys.number("rope.scale_linear")?,
        factor => factor,
    };
    let factor = factor.filter(|factor| *factor != 0.0 && *factor != 1.0);
    let pretrained = keys.whole("rope.scaling.original_context_length")?;
    let attention_factor = keys.number("rope.scaling.attn_factor")?;
    let factors = Factors::of(keys)?;
    if let (Some(tensor), Some(_)) = (factors.tensor(), factor) {
        let why = format!("beside the tensor `{tensor}` is not supported");
        return Err(keys.unsupported("rope.scaling.factor", &why));
    }
    if let Factors::ByContext { long, short } = factors {
        return Ok(Some(json!({
            "rope_type": "longrope", "long_factor": long, "short_factor": short, "attention_factor": attention_factor,
            "original_max_position_embeddings": pretrained,
        })));
    }
    if kind == "longrope" {
        let why = format!("is longrope, and there is no tensor `{LONG_FACTORS}`: convert the model again");
        return Err(keys.unsupported("rope.scaling.type", &why));
    }
    if attention_factor.is_some_and(|factor| factor != 1.0) {
        return Err(keys.unsupported(
            "rope.scaling.attn_factor",
            &format!("is not supported without the tensor `{LONG_FACTORS}`"),
        ));
    }
    match (factors, kind, factor) {
        // Whatever the context, each frequency has one factor.
        (Factors::Same(freqs), _, _) => Ok(Some(json!({
            "rope_type": "longrope", "long_factor": freqs, "short_factor": freqs, "attention_factor": 1.0,
        }))),
        (_, "linear", Some(factor)) => Ok(Some(json!({"rope_type": "linear", "factor": factor}))),
        (_, "yarn", Some(factor)) => yarn(keys, architecture, factor, pretrained).map(Some),
        _ => Ok(None),
    }
}

/// The factors of frequencies that a file has as tensors.
enum Factors {
    None,
    /// In any context.
    Same(Vec<f32>),
    ByContext {
        long: Vec<f32>,
        short: Vec<f32>,
    },
}

impl Factors {
    fn of(keys: &Keys<'_>) -> Result<Factors, ModelError> {
        let [freqs, long, short] = [ROPE_FREQS, LONG_FACTORS, SHORT_FACTORS].map(|name| factors(keys, name));
        let alone = |there: &str, missing: &str| {
            let why = format!("there is a tensor `{there}`, and none `{missing}`: convert the model again");
            ModelError::broken(keys.path(), why)
        };
        match (freqs?, long?, short?) {
            (None, None, None) => Ok(Factors::None),
            (Some(freqs), None, None) => Ok(Factors::Same(freqs)),
            (None, Some(long), Some(short)) => Ok(Factors::ByContext { long, short }),
            (_, Some(_), None) => Err(alone(LONG_FACTORS, SHORT_FACTORS)),
            (_, None, Some(_)) => Err(alone(SHORT_FACTORS, LONG_FACTORS)),
            (Some(_), Some(_), Some(_)) => {
                let why = format!("the tensor `{ROPE_FREQS}` beside `{LONG_FACTORS}` is not supported");
                Err(ModelError::unsupported(keys.path(), why))
            }
        }
    }

    /// The name of one of these tensors.
    fn tensor(&self) -> Option<&'static str> {
        match self {
            Factors::None => None,
            Factors::Same(_) => Some(ROPE_FREQS),
            Factors::ByContext { .. } => Some(LONG_FACTORS),
        }
    }
}

fn yarn(
    keys: &Keys<'_>,
    architecture: Architecture,
    factor: f64,
    pretrained: Option<u64>,
) -> Result<Value, ModelError> {
    if keys
        .number("rope.scaling.yarn_ext_factor")?
        .is_some_and(|ext| ext != 1.0)
    {
        return Err(keys.unsupported("rope.scaling.yarn_ext_factor", "other than 1 is not supported"));
    }
    // Programs differ in whether it is the whole factor or one beside that of the context.
    if keys.number("rope.scaling.yarn_attn_factor")?.is_some() {
        return Err(keys.unsupported("rope.scaling.yarn_attn_factor", "is not supported"));
    }
    let mut map = Map::from_iter([
        ("rope_type".to_owned(), json!("yarn")),
        ("factor".to_owned(), json!(factor)),
        // gpt-oss' range of mixed pairs is not rounded to whole ones.
        ("truncate".to_owned(), json!(architecture != Architecture::GptOss)),
    ]);
    for (key, name) in [
        ("rope.scaling.yarn_beta_fast", "beta_fast"),
        ("rope.scaling.yarn_beta_slow", "beta_slow"),
    ] {
        if let Some(beta) = keys.number(key)? {
            map.insert(name.into(), json!(beta));
        }
    }
    if let Some(pretrained) = pretrained {
        map.insert("original_max_position_embeddings".into(), json!(pretrained));
    }
    Ok(Value::Object(map))
}

/// A tensor of factors of frequencies, which is one of F32.
fn factors(keys: &Keys<'_>, name: &str) -> Result<Option<Vec<f32>>, ModelError> {
    let Some((tensor, data)) = keys.tensor(name) else {
        return Ok(None);
    };
    if tensor.format != Format::F32 || tensor.shape.len() != 1 {
        let why = format!("tensor `{name}` is no vector of F32");
        return Err(ModelError::broken(keys.path(), why));
    }
    let numbers = data.as_chunks::<4>().0.iter();
    Ok(Some(numbers.map(|bytes| f32::from_le_bytes(*bytes)).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::testing::{Writer, text, texts};
    use crate::model::config::Family;
    use crate::model::rope::Scaling;

    /// A key with the number of its kind, and its value.
    type Key = (&'static str, u32, Vec<u8>);

    fn whole(key: &'static str, number: u32) -> Key {
        (key, 4, number.to_le_bytes().to_vec())
    }

    fn float(key: &'static str, number: f32) -> Key {
        (key, 6, number.to_le_bytes().to_vec())
    }

    fn flag(key: &'static str, flag: bool) -> Key {
        (key, 7, vec![flag.into()])
    }

    fn list(key: &'static str, numbers: &[u32]) -> Key {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let head = [&4u32.to_le_bytes()[..], &(numbers.len() as u64).to_le_bytes()].concat();
        (key, 9, [head, bytes].concat())
    }

    /// The keys of a small model. `~` stands for the name of its architecture.
    fn keys() -> Vec<Key> {
        vec![
            whole("~.block_count", 4),
            whole("~.context_length", 64),
            whole("~.embedding_length", 32),
            whole("~.feed_forward_length", 48),
            whole("~.attention.head_count", 4),
            whole("~.attention.head_count_kv", 2),
            float("~.attention.layer_norm_rms_epsilon", 1e-5),
        ]
    }

    /// The configuration of a model with these keys besides; one without a value is left out.
    fn of(architecture: &str, changes: &[Key], tensors: &[(&str, &[f32])]) -> Result<Config, String> {
        let mut writer = Writer::new(3);
        if !architecture.is_empty() {
            writer.key("general.architecture", 8, &text(architecture));
        }
        let kept = keys();
        let kept = kept
            .iter()
            .filter(|key| !changes.iter().any(|change| change.0 == key.0));
        for (key, kind, value) in kept.chain(changes.iter().filter(|key| !key.2.is_empty())) {
            writer.key(&key.replace('~', architecture), *kind, value);
        }
        writer.tensor("token_embd.weight", &[32, 10], 0, &[0; 32 * 10 * 4]);
        for (name, numbers) in tensors {
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            writer.tensor(name, &[numbers.len() as u64], 0, &bytes);
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        std::fs::write(&path, writer.bytes()).unwrap();
        Config::load(&path).map_err(|error| error.to_string())
    }

    fn refused(architecture: &str, changes: &[Key], words: &str) {
        let error = of(architecture, changes, &[]).expect_err(words);
        assert!(
            error.contains(words) && error.contains("m.gguf") && !error.contains('\n'),
            "{error}"
        );
    }

    #[test]
    fn a_llama_is_read() {
        let config = of("llama", &[], &[]).unwrap();
        assert_eq!(config.family, Family::Llama);
        assert_eq!(
            (config.heads.heads, config.heads.kv_heads, config.heads.head_dim),
            (4, 2, 8)
        );
        assert_eq!(
            (config.vocab_size, config.hidden_size, config.intermediate_size),
            (10, 32, 48)
        );
        assert_eq!((config.norm_eps, config.rope.theta), (1e-5, 10_000.0));
        assert!(config.tied_embeddings && config.rotates_neighbours && !config.qkv_bias);
        let biases = [("output.weight", &[0.0; 8][..]), ("blk.0.attn_q.bias", &[0.0; 8])];
        let config = of("llama", &[float("~.rope.freq_base", 500_000.0)], &biases).unwrap();
        assert!(!config.tied_embeddings && config.qkv_bias && config.o_bias);
        assert_eq!(config.rope.theta, 500_000.0);
        let linear = of("llama", &[float("~.rope.scale_linear", 4.0)], &[]).unwrap();
        assert_eq!(linear.rope.scaling, Scaling::Linear { factor: 4.0 });
        let heads = of("llama", &[list("~.attention.head_count_kv", &[2; 4])], &[]).unwrap();
        assert_eq!(heads.heads.kv_heads, 2);
    }

    #[test]
    fn what_a_file_has_otherwise_is_known() {
        let gemma = of("gemma2", &[], &[]).unwrap();
        assert!(!gemma.unit_offset_norms && !gemma.rotates_neighbours);
        assert_eq!(gemma.attention_scale, 1.0 / 8f32.sqrt());
        let largest = of(
            "gemma2",
            &[
                whole("~.block_count", 46),
                whole("~.attention.key_length", 16),
                whole("~.attention.value_length", 16),
            ],
            &[],
        );
        assert_eq!(
            largest.unwrap().attention_scale,
            1.0 / 8f32.sqrt(),
            "not of the heads' 16"
        );
        let qwen = of("qwen2", &[], &[]).unwrap();
        assert!(!qwen.rotates_neighbours && qwen.qkv_bias);
        let freqs = [("rope_freqs.weight", &[1.0, 2.0, 3.0, 4.0][..])];
        let Scaling::LongRope(rope) = of("llama", &[], &freqs).unwrap().rope.scaling else {
            panic!("factors")
        };
        assert_eq!(
            (&rope.short_factors[..], &rope.long_factors[..]),
            (&[1.0, 2.0, 3.0, 4.0][..], &[1.0, 2.0, 3.0, 4.0][..])
        );
        assert_eq!(rope.attention_factor, 1.0);
        let experts = [whole("~.expert_count", 4), whole("~.expert_used_count", 2)];
        let mixtral = of("llama", &experts, &[]).unwrap();
        assert_eq!(
            (mixtral.family, mixtral.expert_form()),
            (Family::Mixtral, ExpertForm::Matrices)
        );
        assert!(mixtral.rotates_neighbours);
    }

    /// What llama.cpp takes for a Gemma 2 that does not say.
    #[test]
    fn soft_caps_are_the_architectures_unless_a_file_says_otherwise() {
        let caps = |architecture: &str, changes: &[Key]| {
            let config = of(architecture, changes, &[]).unwrap();
            (config.attention_soft_cap, config.logit_soft_cap)
        };
        let stored = |attention, logits| {
            [
                float("~.attn_logit_softcapping", attention),
                float("~.final_logit_softcapping", logits),
            ]
        };
        assert_eq!(caps("gemma2", &[]), (Some(50.0), Some(30.0)));
        assert_eq!(caps("gemma2", &stored(40.0, 20.0)), (Some(40.0), Some(20.0)));
        assert_eq!(caps("gemma2", &stored(0.0, 0.0)), (None, None));
        assert_eq!(caps("gemma3", &[]), (None, None));
    }

    #[test]
    fn factors_of_frequencies_are_used_or_refused() {
        let tensors = |names: &[&'static str]| -> Vec<(&'static str, &'static [f32])> {
            names.iter().map(|name| (*name, &[1.0, 2.0, 3.0, 4.0][..])).collect()
        };
        let kind = |kind: &str| ("~.rope.scaling.type", 8, text(kind));
        let (freqs, long, short) = (ROPE_FREQS, LONG_FACTORS, SHORT_FACTORS);
        // What llama.cpp's converter writes of Phi-3 since it writes a type, and what it wrote before.
        let context = whole("~.rope.scaling.original_context_length", 32);
        let attention = float("~.rope.scaling.attn_factor", 1.25);
        let phi = [context, attention, kind("longrope")];
        for keys in [&phi[..], &phi[..2]] {
            let phi = of("phi3", keys, &tensors(&[long, short])).unwrap();
            let Scaling::LongRope(rope) = phi.rope.scaling else {
                panic!("{:?}", phi.rope)
            };
            assert_eq!((rope.attention_factor, rope.pretrained_tokens), (1.25, 32));
        }
        let alone = |there: &str, missing: &str| format!("there is a tensor `{there}`, and none `{missing}`");
        let factor = float("~.rope.scaling.factor", 4.0);
        let beside = |tensor: &str| format!("`llama.rope.scaling.factor` beside the tensor `{tensor}`");
        let no_tensors = "`llama.rope.scaling.type` is longrope, and there is no tensor".to_owned();
        for (keys, names, words) in [
            (vec![], vec![long], alone(long, short)),
            (vec![], vec![short], alone(short, long)),
            (vec![], vec![freqs, long], alone(long, short)),
            (
                vec![],
                vec![freqs, long, short],
                format!("the tensor `{freqs}` beside `{long}`"),
            ),
            (vec![factor.clone()], vec![long, short], beside(long)),
            (vec![factor.clone()], vec![freqs], beside(freqs)),
            (vec![factor, kind("yarn")], vec![long, short], beside(long)),
            (vec![kind("longrope")], vec![], no_tensors.clone()),
            (vec![kind("longrope")], vec![freqs], no_tensors),
            (
                vec![kind("dynamic")],
                vec![],
                "`llama.rope.scaling.type` is `dynamic`".to_owned(),
            ),
            (
                vec![float("~.rope.scaling.attn_factor", 1.25)],
                vec![freqs],
                "`llama.rope.scaling.attn_factor` is not supported".to_owned(),
            ),
        ] {
            let error = of("llama", &keys, &tensors(&names)).expect_err(&words);
            assert!(error.contains(&words) && !error.contains('\n'), "{words}: {error}");
        }
    }

    #[test]
    fn ends_are_named_or_known_by_their_texts() {
        let kinds = |kinds: &[u32]| list("tokenizer.ggml.token_type", kinds);
        let tokens = (
            "tokenizer.ggml.tokens",
            9,
            texts(&["a", "</s>", "<|im_end|>", "<|eot_id|>", "<|x|>"]),
        );
        let eos = whole("tokenizer.ggml.eos_token_id", 1);
        let config = of("llama", &[tokens, kinds(&[1, 3, 3, 1, 3]), eos], &[]).unwrap();
        assert_eq!(config.eos_token_ids, [1, 2], "a normal token of such a text is none");
        // Phi-3's answers end there; gpt-oss has messages behind it.
        for (others, kind, ends) in [
            (["<|user|>", "<|assistant|>"], 3, vec![1]),
            (["<|return|>", "<|assistant|>"], 3, vec![1, 2]),
            (["<|return|>", "<|call|>"], 3, vec![2, 3]),
            (["<|return|>", "<|call|>"], 1, vec![1]),
        ] {
            let tokens = (
                "tokenizer.ggml.tokens",
                9,
                texts(&["a", "<|end|>", others[0], others[1]]),
            );
            let config = of("phi3", &[tokens, kinds(&[1, 3, kind, kind])], &[]).unwrap();
            assert_eq!(config.eos_token_ids, ends, "{others:?}");
        }
        let eot = [
            whole("tokenizer.ggml.eos_token_id", 5),
            whole("tokenizer.ggml.eot_token_id", 7),
        ];
        assert_eq!(of("llama", &eot, &[]).unwrap().eos_token_ids, [5, 7]);
        refused(
            "llama",
            &[("tokenizer.ggml.eos_token_id", 5, vec![255; 4])],
            "`tokenizer.ggml.eos_token_id` is no token id",
        );
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        refused("", &[], "no `general.architecture`");
        refused("deepseek2", &[], "architecture `deepseek2` are not read; llama, qwen2");
        refused(
            "llama",
            &[("general.type", 8, text("adapter"))],
            "`general.type` calls `adapter`",
        );
        refused(
            "llama",
            &[whole("~.rope.scaling.new_kind", 3)],
            "`llama.rope.scaling.new_kind` (3) is not supported",
        );
        refused(
            "llama",
            &[whole("~.attention.sliding_window", 9)],
            "`llama.attention.sliding_window` (9)",
        );
        refused(
            "llama",
            &[flag("~.use_parallel_residual", true)],
            "`llama.use_parallel_residual` (true)",
        );
        refused(
            "llama",
            &[flag("~.attention.causal", false)],
            "`llama.attention.causal` is false",
        );
        refused(
            "llama",
            &[whole("~.rope.dimension_count", 4)],
            "of heads of 8 numbers, all must rotate",
        );
        refused("llama", &[whole("~.attention.value_length", 4)], "heads of two sizes");
        refused(
            "llama",
            &[list("~.attention.head_count_kv", &[2, 2, 1, 2])],
            "`llama.attention.head_count_kv` differs by layer",
        );
        refused(
            "llama",
            &[("~.attention.head_count", 8, text("4"))],
            "`llama.attention.head_count` is no whole number",
        );
        refused(
            "llama",
            &[("~.block_count", 4, vec![])],
            "`llama.block_count` is missing",
        );
        refused(
            "llama",
            &[float("~.rope.freq_base", f32::NAN)],
            "`llama.rope.freq_base` is no number",
        );
        let scaled = |kind: &str, more: &[Key]| {
            let kind = ("~.rope.scaling.type", 8, text(kind));
            [&[kind, float("~.rope.scaling.factor", 4.0)], more].concat()
        };
        refused(
            "llama",
            &scaled("dynamic", &[]),
            "`llama.rope.scaling.type` is `dynamic`",
        );
        refused(
            "llama",
            &scaled("yarn", &[float("~.rope.scaling.yarn_attn_factor", 1.5)]),
            "yarn_attn_factor",
        );
        refused(
            "llama",
            &scaled("yarn", &[float("~.rope.scaling.yarn_ext_factor", 0.5)]),
            "yarn_ext_factor",
        );
        refused("llama", &[float("~.rope.scaling.attn_factor", 1.5)], "attn_factor");
        refused(
            "qwen3moe",
            &[whole("~.expert_count", 4)],
            "`qwen3moe.expert_used_count` is missing",
        );
        let groups = [
            whole("~.expert_count", 4),
            whole("~.expert_used_count", 2),
            whole("~.expert_group_count", 2),
        ];
        refused("llama", &groups, "`llama.expert_group_count` is above 1");
        refused(
            "granite",
            &[float("~.logit_scale", 8.0), flag("~.rope.scaling.finetuned", false)],
            "a Granite without positions",
        );
        // What llama.cpp does not run without.
        refused("granite", &[], "`granite.logit_scale` is missing");
        refused("cohere2", &[], "`cohere2.attention.layer_norm_epsilon` is missing");
        let of_cohere = [
            float("~.attention.layer_norm_epsilon", 1e-5),
            float("~.logit_scale", 0.25),
        ];
        refused("cohere2", &of_cohere, "`cohere2.attention.sliding_window` is missing");
        refused(
            "cohere2",
            &[
                &of_cohere[..],
                &[
                    whole("~.attention.sliding_window", 9),
                    list("~.attention.sliding_window_pattern", &[1]),
                ],
            ]
            .concat(),
            "says of no layer",
        );
        // What is not set, and what other programs note.
        let neutral = [
            flag("~.use_parallel_residual", false),
            whole("~.nextn_predict_layers", 0),
            whole("~.vocab_size", 10),
        ];
        assert!(of("llama", &neutral, &[]).unwrap().warnings.is_empty());
        let config = of(
            "llama",
            &[whole("mradermacher.runs", 1), whole("general.file_type", 7)],
            &[],
        )
        .unwrap();
        assert!(
            config.warnings.len() == 1 && config.warnings[0].contains("without effect: `mradermacher.runs`"),
            "{:?}",
            config.warnings
        );
    }

    #[test]
    fn yarn_and_windows_are_read() {
        let yarn = [
            ("~.rope.scaling.type", 8, text("yarn")),
            float("~.rope.scaling.factor", 4.0),
            whole("~.rope.scaling.original_context_length", 16),
            float("~.rope.scaling.yarn_beta_fast", 8.0),
        ];
        let Scaling::Yarn(rope) = of("qwen3", &yarn, &[]).unwrap().rope.scaling else {
            panic!("YaRN")
        };
        assert_eq!(
            (rope.factor, rope.pretrained_tokens, rope.beta_fast, rope.beta_slow),
            (4.0, 16, 8.0, 1.0)
        );
        assert!(rope.truncate);
        use crate::device::KvSpec::{Full, Window};
        let window = whole("~.attention.sliding_window", 9);
        let of_pattern = |pattern: Key| of("gemma3", &[window.clone(), pattern], &[]).unwrap().layers;
        assert_eq!(
            of_pattern(list("~.attention.sliding_window_pattern", &[0, 1, 0, 1])),
            [Full, Window(9), Full, Window(9)]
        );
        assert_eq!(
            of_pattern(whole("~.attention.sliding_window_pattern", 2)),
            [Window(9), Full, Window(9), Full]
        );
        let flags = [&7u32.to_le_bytes()[..], &4u64.to_le_bytes(), &[1, 0, 1, 1]].concat();
        assert_eq!(
            of_pattern(("~.attention.sliding_window_pattern", 9, flags)),
            [Window(9), Full, Window(9), Window(9)]
        );
        assert_eq!(
            of("gemma3", std::slice::from_ref(&window), &[]).unwrap().layers,
            [Window(9); 4]
        );
        assert_eq!(of("gemma3", &[], &[]).unwrap().layers, [Full; 4]);
        let olmo = of("olmo2", &[window], &[]).unwrap();
        assert_eq!(
            (olmo.family, olmo.layers),
            (Family::Olmo3, vec![Window(9), Window(9), Window(9), Full])
        );
        assert_eq!(of("olmo2", &[], &[]).unwrap().family, Family::Olmo2);
    }
}
