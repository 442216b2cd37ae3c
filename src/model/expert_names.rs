//! The ways in which checkpoints store experts, undone where weights are read.
//!
//! Models are built from tensors that are named as Qwen's are: `mlp.gate.weight` is the router, and
//! expert 3 has `mlp.experts.3.gate_proj.weight`, `.up_proj.weight` and `.down_proj.weight`.
//!
//! The expert that all tokens use is `mlp.shared_experts`.
//!
//! - Mixtral says `block_sparse_moe` for `mlp`, and `w1`, `w3` and `w2` for the three projections.
//! - Qwen says `mlp.shared_expert`.
//! - Granite says `block_sparse_moe.router.layer` for the router, and has the tensors of all experts as
//!   `block_sparse_moe.input_linear` and `.output_linear`, those of the shared one as `shared_mlp`.
//! - ERNIE says `mlp.moe_statics` and MiniMax `block_sparse_moe` for what holds the router's correction.
//! - transformers 5 may store all experts of a layer in two tensors: `mlp.experts.gate_up_proj`,
//!   `[experts][gate rows, then up rows][hidden]`, and `mlp.experts.down_proj`.
//! - Nemotron-H has them as `mixer.experts.up_proj` and `mixer.experts.down_proj`, without gates.
//! - Gemma 4 has them as `experts.gate_up_proj` and `experts.down_proj` beside an MLP, and says
//!   `router.proj` for the router.
//! - Llama 4 says `feed_forward` for `mlp`, `router` and `shared_expert`.
//! - gpt-oss says `router`, and stores experts in [other forms](super::expert_forms).
//!
//! See docs/decisions/088-family-differences-end-where-weights-are-read.md.

use super::config::ExpertForm;
use super::quantized;
use super::weights::TensorEntry;

/// Maximum number of experts in one tensor.
const EXPERTS_MAX: usize = 1 << 12;

/// The name of a tensor of experts or of a router in the models that are [built](self). `None`: it is
/// that name, or of another tensor.
pub(super) fn general_name(name: &str) -> Option<String> {
    for (theirs, ours) in [
        (".mlp.router.", ".mlp.gate."),
        (".mlp.shared_expert.", ".mlp.shared_experts."),
        (".mlp.moe_statics.", ".mlp.gate."),
        (".mlp.gate.moe_statics.", ".mlp.gate."),
        (".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
        (
            ".block_sparse_moe.e_score_correction_bias",
            ".mlp.gate.e_score_correction_bias",
        ),
        (".router.proj.", ".mlp.gate."),
    ] {
        if let Some((layer, part)) = name.split_once(theirs) {
            return Some(format!("{layer}{ours}{part}"));
        }
    }
    if let Some((layer, part)) = name.split_once(".feed_forward.") {
        let part = match part.split_once('.') {
            Some(("router", part)) => format!("gate.{part}"),
            Some(("shared_expert", part)) => format!("shared_experts.{part}"),
            _ => part.to_owned(),
        };
        return Some(format!("{layer}.mlp.{part}"));
    }
    if let Some(layer) = name.strip_suffix(SHARED_DOWN) {
        return Some(format!("{layer}.mlp.shared_experts.down_proj.weight"));
    }
    let (layer, rest) = name.split_once(".block_sparse_moe.")?;
    if matches!(rest, "gate.weight" | "router.weight" | "router.layer.weight") {
        return Some(format!("{layer}.mlp.gate.weight"));
    }
    let (expert, part) = rest.strip_prefix("experts.")?.split_once('.')?;
    let (part, kind) = part.split_once('.')?;
    let part = match part {
        "w1" => "gate_proj",
        "w2" => "down_proj",
        "w3" => "up_proj",
        _ => return None,
    };
    quantized::is_part_of_matrix(kind).then(|| format!("{layer}.mlp.experts.{expert}.{part}.{kind}"))
}

const GATE_UP: &[&str] = &["gate_proj", "up_proj"];
const DOWN: &[&str] = &["down_proj"];

/// Names of tensors that hold several matrices, one below the other, and the names of these.
const STACKED: [(&str, &[&str]); 9] = [
    (".mlp.experts.gate_up_proj", GATE_UP),
    (".mlp.experts.down_proj", DOWN),
    (".block_sparse_moe.experts.gate_up_proj", GATE_UP),
    (".block_sparse_moe.experts.down_proj", DOWN),
    (".block_sparse_moe.input_linear.weight", GATE_UP),
    (".block_sparse_moe.output_linear.weight", DOWN),
    (".experts.up_proj", &["up_proj"]),
    // Behind the others, whose names end so, too.
    (".experts.gate_up_proj", GATE_UP),
    (".experts.down_proj", DOWN),
];
const SHARED_GATE_UP: &str = ".shared_mlp.input_linear.weight";
const SHARED_DOWN: &str = ".shared_mlp.output_linear.weight";

/// The tensors of single experts that lie in one tensor, each with its name. `None`: `name` is not
/// such a tensor.
pub(super) fn split(form: ExpertForm, name: &str, entry: &TensorEntry) -> Option<Vec<(String, TensorEntry)>> {
    if form != ExpertForm::Matrices {
        let both = [".mlp.experts.", ".feed_forward.experts."];
        let (layer, part) = both.iter().find_map(|experts| name.rsplit_once(experts))?;
        return split_by_expert(layer, part, entry);
    }
    if let Some(layer) = name.strip_suffix(SHARED_GATE_UP) {
        let [rows, columns] = entry.shape[..] else {
            return None;
        };
        let name = |_: usize, part: &str| format!("{layer}.mlp.shared_experts.{part}.weight");
        return split_stacked(GATE_UP, (1, rows, columns), entry, name);
    }
    let (layer, parts) = STACKED
        .iter()
        .find_map(|(stacked, parts)| Some((name.strip_suffix(stacked)?, *parts)))?;
    // Nemotron-H's layers are `mixer`, whatever they are.
    let layer = layer.strip_suffix(".mixer").unwrap_or(layer);
    let [experts, rows, columns] = entry.shape[..] else {
        return None;
    };
    let name = |expert: usize, part: &str| format!("{layer}.mlp.experts.{expert}.{part}.weight");
    split_stacked(parts, (experts, rows, columns), entry, name)
}

/// The `parts` of each expert in a tensor of shape `[experts][rows][columns]`, named by the number of
/// their expert.
fn split_stacked(
    parts: &[&str],
    (experts, rows, columns): (usize, usize, usize),
    entry: &TensorEntry,
    name: impl Fn(usize, &str) -> String,
) -> Option<Vec<(String, TensorEntry)>> {
    if !(1..=EXPERTS_MAX).contains(&experts) || !rows.is_multiple_of(parts.len()) {
        return None;
    }
    let count = experts * parts.len();
    if entry.bytes.is_empty() || !entry.bytes.len().is_multiple_of(count) {
        return None;
    }
    let bytes = entry.bytes.len() / count;
    let tensor = |i: usize| {
        let (expert, part) = (i / parts.len(), parts[i % parts.len()]);
        let start = entry.bytes.start + i * bytes;
        let entry = TensorEntry {
            dtype: entry.dtype,
            blocks: entry.blocks,
            shape: vec![rows / parts.len(), columns],
            bytes: start..start + bytes,
        };
        (name(expert, part), entry)
    };
    Some((0..count).map(tensor).collect())
}

/// As [`split`], for the forms of gpt-oss: one tensor for each expert, with the same name and without
/// the dimension of experts. The last two dimensions of blocks, groups and their bytes, become one.
fn split_by_expert(layer: &str, part: &str, entry: &TensorEntry) -> Option<Vec<(String, TensorEntry)>> {
    let (experts, rest) = entry.shape.split_first()?;
    let shape = match *rest {
        [rows, groups, bytes] if part.ends_with("_blocks") => vec![rows, groups.checked_mul(bytes)?],
        _ => rest.to_vec(),
    };
    let whole = !entry.bytes.is_empty() && (1..=EXPERTS_MAX).contains(experts);
    if part.contains('.') || !whole || !entry.bytes.len().is_multiple_of(*experts) {
        return None;
    }
    let bytes = entry.bytes.len() / experts;
    let tensor = |expert: usize| {
        let start = entry.bytes.start + expert * bytes;
        let entry = TensorEntry {
            dtype: entry.dtype,
            blocks: entry.blocks,
            shape: shape.clone(),
            bytes: start..start + bytes,
        };
        (format!("{layer}.mlp.experts.{expert}.{part}"), entry)
    };
    Some((0..*experts).map(tensor).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mixtrals_names_become_those_of_other_models() {
        for (name, want) in [
            (
                "model.layers.3.block_sparse_moe.gate.weight",
                Some("model.layers.3.mlp.gate.weight"),
            ),
            (
                "model.layers.3.block_sparse_moe.experts.7.w1.weight",
                Some("model.layers.3.mlp.experts.7.gate_proj.weight"),
            ),
            (
                "model.layers.3.block_sparse_moe.experts.7.w3.weight",
                Some("model.layers.3.mlp.experts.7.up_proj.weight"),
            ),
            (
                "model.layers.3.block_sparse_moe.experts.7.w2.weight",
                Some("model.layers.3.mlp.experts.7.down_proj.weight"),
            ),
            ("model.layers.3.block_sparse_moe.experts.7.w4.weight", None),
            ("model.layers.3.block_sparse_moe.experts.7.w1.bias", None),
            ("model.layers.3.mlp.gate.weight", None),
            (
                "model.layers.3.router.proj.weight",
                Some("model.layers.3.mlp.gate.weight"),
            ),
            ("model.layers.3.router.scale", None),
            ("model.layers.3.mlp.router.bias", Some("model.layers.3.mlp.gate.bias")),
            (
                "model.layers.3.block_sparse_moe.router.layer.weight",
                Some("model.layers.3.mlp.gate.weight"),
            ),
            (
                "model.layers.3.mlp.shared_expert.up_proj.weight",
                Some("model.layers.3.mlp.shared_experts.up_proj.weight"),
            ),
            ("model.layers.3.mlp.shared_expert_gate.weight", None),
            (
                "model.layers.3.shared_mlp.output_linear.weight",
                Some("model.layers.3.mlp.shared_experts.down_proj.weight"),
            ),
            (
                "model.layers.3.mlp.moe_statics.e_score_correction_bias",
                Some("model.layers.3.mlp.gate.e_score_correction_bias"),
            ),
            (
                "model.layers.3.block_sparse_moe.e_score_correction_bias",
                Some("model.layers.3.mlp.gate.e_score_correction_bias"),
            ),
            (
                "model.layers.3.mlp.e_score_correction_bias",
                Some("model.layers.3.mlp.gate.e_score_correction_bias"),
            ),
            ("model.layers.3.mlp.gate.e_score_correction_bias", None),
            (
                "model.layers.3.feed_forward.router.weight",
                Some("model.layers.3.mlp.gate.weight"),
            ),
            (
                "model.layers.3.feed_forward.shared_expert.up_proj.weight",
                Some("model.layers.3.mlp.shared_experts.up_proj.weight"),
            ),
            (
                "model.layers.3.feed_forward.up_proj.weight",
                Some("model.layers.3.mlp.up_proj.weight"),
            ),
        ] {
            assert_eq!(general_name(name).as_deref(), want, "{name}");
        }
    }

    fn entry(shape: &[usize], bytes: std::ops::Range<usize>) -> TensorEntry {
        TensorEntry {
            dtype: safetensors::Dtype::BF16,
            blocks: None,
            shape: shape.to_vec(),
            bytes,
        }
    }

    #[test]
    fn granites_tensors_are_split() {
        let (form, layer) = (ExpertForm::Matrices, "model.layers.0");
        let names = |name: &str, shape: &[usize]| -> Option<Vec<String>> {
            let found = split(form, &format!("{layer}.{name}"), &entry(shape, 0..240))?;
            Some(found.into_iter().map(|(name, _)| name[15..].to_owned()).collect())
        };
        for name in [
            "block_sparse_moe.input_linear.weight",
            "block_sparse_moe.experts.gate_up_proj",
        ] {
            let found = names(name, &[2, 6, 5]).unwrap();
            assert_eq!(found.len(), 4);
            assert_eq!(found[3], "mlp.experts.1.up_proj.weight");
        }
        let found = names("block_sparse_moe.output_linear.weight", &[2, 5, 3]).unwrap();
        assert_eq!(
            found,
            ["mlp.experts.0.down_proj.weight", "mlp.experts.1.down_proj.weight"]
        );
        let shared = split(
            form,
            &format!("{layer}.shared_mlp.input_linear.weight"),
            &entry(&[6, 5], 0..60),
        )
        .unwrap();
        let (name, up) = &shared[1];
        assert_eq!(&name[15..], "mlp.shared_experts.up_proj.weight");
        assert_eq!((&up.shape[..], up.bytes.clone()), (&[3, 5][..], 30..60));
        assert_eq!(names("shared_mlp.input_linear.weight", &[7, 5]), None);
        assert_eq!(names("shared_mlp.input_linear.weight", &[6]), None);
    }

    #[test]
    fn tensors_of_all_experts_are_split() {
        let found = split(
            ExpertForm::Matrices,
            "model.layers.0.mlp.experts.gate_up_proj",
            &entry(&[2, 6, 5], 100..220),
        )
        .unwrap();
        let found: Vec<_> = found
            .iter()
            .map(|(name, e)| (&name[27..], &e.shape[..], e.bytes.clone()))
            .collect();
        assert_eq!(
            found,
            [
                ("0.gate_proj.weight", &[3, 5][..], 100..130),
                ("0.up_proj.weight", &[3, 5][..], 130..160),
                ("1.gate_proj.weight", &[3, 5][..], 160..190),
                ("1.up_proj.weight", &[3, 5][..], 190..220),
            ]
        );
        let found = split(
            ExpertForm::Matrices,
            "model.layers.0.mlp.experts.down_proj",
            &entry(&[2, 5, 3], 0..60),
        )
        .unwrap();
        assert_eq!(found[1].0, "model.layers.0.mlp.experts.1.down_proj.weight");
        assert_eq!((&found[1].1.shape[..], found[1].1.bytes.clone()), (&[5, 3][..], 30..60));
    }

    #[test]
    fn other_tensors_are_not_split() {
        for (name, shape, bytes) in [
            ("model.layers.0.mlp.experts.gate_up_proj", &[2, 5, 5][..], 100),
            ("model.layers.0.mlp.experts.gate_up_proj", &[6, 5], 60),
            ("model.layers.0.mlp.experts.down_proj", &[1 << 13, 1, 1], 1 << 14),
            ("model.layers.0.mlp.experts.down_proj", &[1 << 12, 0, 5], 0),
            ("model.layers.0.mlp.experts.gate_up_proj_bias", &[2, 6, 5], 120),
            ("model.layers.0.mlp.down_proj.weight", &[2, 6, 5], 120),
        ] {
            assert!(
                split(ExpertForm::Matrices, name, &entry(shape, 0..bytes)).is_none(),
                "{name} {shape:?}"
            );
        }
    }

    #[test]
    fn tensors_of_all_experts_keep_their_parts_in_other_forms() {
        let of = |part: &str, shape: &[usize], bytes: usize| {
            let name = format!("model.layers.0.mlp.experts.{part}");
            split(ExpertForm::Mxfp4, &name, &entry(shape, 8..8 + bytes))
        };
        let blocks = of("gate_up_proj_blocks", &[2, 6, 3, 16], 576).unwrap();
        assert_eq!(blocks[1].0, "model.layers.0.mlp.experts.1.gate_up_proj_blocks");
        assert_eq!(
            (&blocks[1].1.shape[..], blocks[1].1.bytes.clone()),
            (&[6, 48][..], 296..584)
        );
        let bias = of("down_proj_bias", &[2, 5], 20).unwrap();
        assert_eq!((&bias[0].1.shape[..], bias[0].1.bytes.clone()), (&[5][..], 8..18));
        assert!(of("down_proj_bias", &[3, 5], 20).is_none() && of("down_proj_bias", &[2, 0], 0).is_none());
        assert!(of("0.down_proj", &[2, 5], 20).is_none() && of("down_proj", &[], 2).is_none());
    }
}
