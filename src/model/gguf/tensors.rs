//! The tensors of a GGUF file by the names that they have elsewhere.

use std::collections::BTreeMap;

use super::architecture::Architecture;
use crate::gguf::{Format, GgufFile, StoredTensor};
use crate::model::error::ModelError;
use crate::model::headers::{Header, TensorEntry};
use crate::printable::printable_name;

/// Maximum number of a layer's experts, as elsewhere.
const EXPERTS_MAX: usize = 1 << 12;
/// Maximum number of a file's tensors once experts are taken apart. The largest known models have 70,000.
const PARTS_MAX: usize = 1 << 19;
/// Factors of frequencies, which the configuration has.
const ROPE_FACTORS: [&str; 3] = [
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
];

const TOP: [(&str, &str); 3] = [
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
];

/// Parts of a layer.
const PARTS: [(&str, &str); 18] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_qkv", "self_attn.qkv_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
    ("post_attention_norm", "post_attention_layernorm"),
    // Of a layer that predicts further tokens.
    ("nextn", "nextn"),
];

/// Parts of all experts of a layer.
const EXPERT_PARTS: [(&str, &str); 3] = [
    ("ffn_gate_exps", "gate_proj"),
    ("ffn_up_exps", "up_proj"),
    ("ffn_down_exps", "down_proj"),
];

/// The header of a file as it would be if the file were another checkpoint's.
///
/// # Errors
/// A tensor of experts is none.
pub(in crate::model) fn header(file: &GgufFile, architecture: Architecture) -> Result<Header, ModelError> {
    let mut tensors = BTreeMap::new();
    for tensor in &file.header.tensors {
        for (name, entry) in entries(tensor, architecture).map_err(|why| ModelError::broken(&file.path, why))? {
            if tensors.insert(name.clone(), entry).is_some() {
                let why = format!("two tensors are `{}`", printable_name(&name));
                return Err(ModelError::broken(&file.path, why));
            }
        }
        if tensors.len() > PARTS_MAX {
            let why = format!("its layers have more than {PARTS_MAX} tensors of experts");
            return Err(ModelError::broken(&file.path, why));
        }
    }
    Ok(Header {
        path: file.path.clone(),
        tensors,
        split: BTreeMap::new(),
        described_by: "its metadata",
        gguf: Some(architecture),
    })
}

/// A stored tensor with its name, or those of all experts.
fn entries(tensor: &StoredTensor, architecture: Architecture) -> Result<Vec<(String, TensorEntry)>, String> {
    if ROPE_FACTORS.contains(&tensor.name.as_str()) {
        return Ok(Vec::new());
    }
    let entry = entry(tensor);
    if let Some((layer, part, kind)) = parts_of(&tensor.name)
        && let Some((_, part)) = EXPERT_PARTS.iter().find(|(stored, _)| *stored == part)
    {
        let name = |expert: usize| format!("model.layers.{layer}.mlp.experts.{expert}.{part}.{kind}");
        return by_expert(&tensor.name, &entry, name);
    }
    let name = canonical_name(&tensor.name, architecture);
    Ok(vec![(name.unwrap_or_else(|| tensor.name.clone()), entry)])
}

fn entry(tensor: &StoredTensor) -> TensorEntry {
    let (dtype, blocks) = match tensor.format {
        Format::F32 => (safetensors::Dtype::F32, None),
        Format::F16 => (safetensors::Dtype::F16, None),
        Format::Bf16 => (safetensors::Dtype::BF16, None),
        format => (safetensors::Dtype::U8, Some(format)),
    };
    // A matrix of one row is stored as a vector.
    let shape = match tensor.shape[..] {
        [columns] if tensor.name.ends_with(".ffn_gate_inp_shexp.weight") => vec![1, columns],
        _ => tensor.shape.clone(),
    };
    TensorEntry {
        dtype,
        blocks,
        shape,
        bytes: tensor.bytes.clone(),
    }
}

/// The layer, the part and the kind (`weight` or `bias`) of a layer's tensor.
fn parts_of(name: &str) -> Option<(usize, &str, &str)> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let (part, kind) = rest.split_once('.')?;
    Some((layer.parse().ok()?, part, kind))
}

/// The name of a tensor elsewhere. `None`: it has none.
fn canonical_name(name: &str, architecture: Architecture) -> Option<String> {
    let Some((layer, part, kind)) = parts_of(name) else {
        let (stem, kind) = name.rsplit_once('.')?;
        let (_, top) = TOP.iter().find(|(stored, _)| *stored == stem)?;
        return Some(format!("{top}.{kind}"));
    };
    let is_glm4 = architecture == Architecture::Glm4;
    let part = match part {
        "ffn_norm" if architecture.has_norms_around_mlp() => "pre_feedforward_layernorm",
        "ffn_norm" => "post_attention_layernorm",
        "post_attention_norm" if is_glm4 => "post_self_attn_layernorm",
        "post_ffw_norm" if is_glm4 => "post_mlp_layernorm",
        "post_ffw_norm" => "post_feedforward_layernorm",
        "ffn_up" if architecture.fuses_gate() => "mlp.gate_up_proj",
        "exp_probs_b" => return Some(format!("model.layers.{layer}.mlp.gate.e_score_correction_bias")),
        "attn_sinks" => return Some(format!("model.layers.{layer}.self_attn.sinks")),
        _ => PARTS.iter().find(|(stored, _)| *stored == part)?.1,
    };
    Some(format!("model.layers.{layer}.{part}.{kind}"))
}

/// The name in a GGUF file of the tensor that is called `name` elsewhere. `None`: it has none there.
pub(in crate::model) fn stored_name(name: &str, architecture: Architecture) -> Option<String> {
    let (stem, kind) = name.rsplit_once('.')?;
    if let Some((stored, _)) = TOP.iter().find(|(_, top)| *top == stem) {
        return Some(format!("{stored}.{kind}"));
    }
    let (layer, part) = stem.strip_prefix("model.layers.")?.split_once('.')?;
    if let Some((_, part)) = part.strip_prefix("mlp.experts.").and_then(|rest| rest.split_once('.')) {
        let (stored, _) = EXPERT_PARTS.iter().find(|(_, expert)| *expert == part)?;
        return Some(format!("blk.{layer}.{stored}.{kind}"));
    }
    let others = ["ffn_norm", "post_ffw_norm", "attn_sinks"];
    let parts = PARTS.iter().map(|(stored, _)| *stored).chain(others);
    let mut names = parts.map(|stored| format!("blk.{layer}.{stored}.{kind}"));
    names.find(|stored| canonical_name(stored, architecture).is_some_and(|found| found == name))
}

/// Each expert's part of a tensor whose first dimension is that of experts.
fn by_expert(
    stored: &str,
    entry: &TensorEntry,
    name: impl Fn(usize) -> String,
) -> Result<Vec<(String, TensorEntry)>, String> {
    let (count, rest) = entry.shape.split_first().unwrap_or((&0, &[]));
    if rest.is_empty() || !(1..=EXPERTS_MAX).contains(count) || !entry.bytes.len().is_multiple_of(*count) {
        return Err(format!(
            "tensor `{}` of experts has the shape {:?}",
            printable_name(stored),
            entry.shape
        ));
    }
    let bytes = entry.bytes.len() / count;
    let part = |expert: usize| {
        let start = entry.bytes.start + expert * bytes;
        let part = TensorEntry {
            dtype: entry.dtype,
            blocks: entry.blocks,
            shape: rest.to_vec(),
            bytes: start..start + bytes,
        };
        (name(expert), part)
    };
    Ok((0..*count).map(part).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_get_the_names_that_they_have_elsewhere() {
        use Architecture::{Gemma2, Glm4, GptOss, Llama, Phi3};
        let layer = |part: &str| Some(format!("model.layers.12.{part}"));
        for (architecture, stored, name) in [
            (Llama, "token_embd.weight", Some("model.embed_tokens.weight".to_owned())),
            (Llama, "output.weight", Some("lm_head.weight".to_owned())),
            (Llama, "output_norm.weight", Some("model.norm.weight".to_owned())),
            (Llama, "blk.12.attn_q.bias", layer("self_attn.q_proj.bias")),
            (
                Llama,
                "blk.12.ffn_norm.weight",
                layer("post_attention_layernorm.weight"),
            ),
            (
                Gemma2,
                "blk.12.ffn_norm.weight",
                layer("pre_feedforward_layernorm.weight"),
            ),
            (
                Gemma2,
                "blk.12.post_ffw_norm.weight",
                layer("post_feedforward_layernorm.weight"),
            ),
            (
                Gemma2,
                "blk.12.post_attention_norm.weight",
                layer("post_attention_layernorm.weight"),
            ),
            (
                Glm4,
                "blk.12.post_attention_norm.weight",
                layer("post_self_attn_layernorm.weight"),
            ),
            (Glm4, "blk.12.post_ffw_norm.weight", layer("post_mlp_layernorm.weight")),
            (Glm4, "blk.12.ffn_norm.weight", layer("post_attention_layernorm.weight")),
            (Phi3, "blk.12.ffn_up.weight", layer("mlp.gate_up_proj.weight")),
            (GptOss, "blk.12.attn_sinks.weight", layer("self_attn.sinks")),
            (
                Llama,
                "blk.12.exp_probs_b.bias",
                layer("mlp.gate.e_score_correction_bias"),
            ),
            (Llama, "blk.12.nextn.eh_proj.weight", layer("nextn.eh_proj.weight")),
            (Llama, "blk.12.ssm_a.weight", None),
            (Llama, "blk.x.attn_q.weight", None),
            (Llama, "blk.1.attn_q", None),
            (Llama, "v.patch_embd.weight", None),
        ] {
            assert_eq!(canonical_name(stored, architecture), name, "{stored}");
        }
    }

    #[test]
    fn experts_are_taken_apart() {
        let tensor = |name: &str, shape: &[usize], bytes| StoredTensor {
            name: name.to_owned(),
            shape: shape.to_vec(),
            format: Format::Q8_0,
            bytes,
        };
        let of = |tensor: &StoredTensor| entries(tensor, Architecture::Qwen3Moe);
        let down = of(&tensor("blk.3.ffn_down_exps.weight", &[2, 4, 32], 100..372)).unwrap();
        let [(first, _), (second, entry)] = &down[..] else {
            panic!("two")
        };
        assert_eq!(first, "model.layers.3.mlp.experts.0.down_proj.weight");
        assert_eq!(second, "model.layers.3.mlp.experts.1.down_proj.weight");
        assert_eq!((&entry.shape[..], entry.bytes.clone()), (&[4, 32][..], 236..372));
        assert_eq!(entry.blocks, Some(Format::Q8_0));
        let bias = of(&tensor("blk.3.ffn_up_exps.bias", &[2, 32], 0..68)).unwrap();
        assert_eq!(
            (&*bias[1].0, &bias[1].1.shape[..]),
            ("model.layers.3.mlp.experts.1.up_proj.bias", &[32][..])
        );
        assert!(of(&tensor("blk.3.ffn_up_exps.weight", &[32], 0..34)).is_err());
        assert!(of(&tensor("blk.3.ffn_up_exps.weight", &[1 << 20, 32], 0..34 << 20)).is_err());
        assert!(of(&tensor("rope_freqs.weight", &[32], 0..34)).unwrap().is_empty());
        let gate = of(&tensor("blk.3.ffn_gate_inp_shexp.weight", &[32], 0..34)).unwrap();
        assert_eq!(
            (&*gate[0].0, &gate[0].1.shape[..]),
            ("model.layers.3.mlp.shared_expert_gate.weight", &[1, 32][..])
        );
    }
}
