//! The names of Nemotron-H's tensors, whose layers are one part each: all that a layer has is
//! `mixer`, whatever it is, with `norm` in front.
//!
//! See docs/decisions/088-family-differences-end-where-weights-are-read.md.

/// The name of such a tensor in the models that are built. `None`: it is that name, or of another
/// family.
pub(super) fn general_name(name: &str) -> Option<String> {
    let published = name.strip_prefix("backbone.").map(|rest| format!("model.{rest}"));
    let inner = published.as_deref().unwrap_or(name);
    let renamed = match inner {
        "model.embeddings.weight" => Some("model.embed_tokens.weight".to_owned()),
        "model.norm_f.weight" => Some("model.norm.weight".to_owned()),
        _ => of_layer(inner),
    };
    renamed.or(published)
}

fn of_layer(name: &str) -> Option<String> {
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    if rest == "norm.weight" {
        return Some(format!("model.layers.{layer}.input_layernorm.weight"));
    }
    let rest = rest.strip_prefix("mixer.")?;
    let owner = match rest.split('.').next()? {
        "q_proj" | "k_proj" | "v_proj" | "o_proj" => "self_attn",
        "up_proj" | "down_proj" | "gate" | "experts" | "shared_experts" => "mlp",
        _ => "mamba",
    };
    Some(format!("model.layers.{layer}.{owner}.{rest}"))
}

#[cfg(test)]
mod tests {
    use super::general_name;

    #[test]
    fn a_mixer_is_what_its_tensors_say() {
        for (name, want) in [
            ("backbone.embeddings.weight", Some("model.embed_tokens.weight")),
            ("model.norm_f.weight", Some("model.norm.weight")),
            (
                "backbone.layers.3.norm.weight",
                Some("model.layers.3.input_layernorm.weight"),
            ),
            (
                "backbone.layers.3.mixer.norm.weight",
                Some("model.layers.3.mamba.norm.weight"),
            ),
            ("backbone.layers.3.mixer.A_log", Some("model.layers.3.mamba.A_log")),
            (
                "model.layers.3.mixer.q_proj.weight",
                Some("model.layers.3.self_attn.q_proj.weight"),
            ),
            (
                "backbone.layers.3.mixer.up_proj.weight",
                Some("model.layers.3.mlp.up_proj.weight"),
            ),
            (
                "backbone.layers.3.mixer.experts.7.down_proj.weight",
                Some("model.layers.3.mlp.experts.7.down_proj.weight"),
            ),
            (
                "backbone.layers.3.mixer.gate.e_score_correction_bias",
                Some("model.layers.3.mlp.gate.e_score_correction_bias"),
            ),
            (
                "backbone.layers.3.mlp.experts.7.up_proj.weight",
                Some("model.layers.3.mlp.experts.7.up_proj.weight"),
            ),
            ("model.layers.3.self_attn.q_proj.weight", None),
            ("model.norm.weight", None),
            ("lm_head.weight", None),
        ] {
            assert_eq!(general_name(name).as_deref(), want, "{name}");
        }
    }
}
