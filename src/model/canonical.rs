//! A checkpoint's tensors in the one form that the transformer reads, whatever form their family
//! stores.
//!
//! Four differences end here: norm weights stored as w − 1 (Gemma, Qwen 3.5), projections stored as
//! rows of one larger tensor (Phi-3, GLM, Qwen3-Next), [forms](expert_forms) of experts (gpt-oss),
//! and heads whose rotary pairs stand elsewhere. The transformer rotates dimension `d` of a head
//! together with `d + head_dim / 2`. A head that rotates only its first dimensions, or neighbours as
//! pairs, gets its dimensions reordered in queries and keys alike, so that their dot products stay
//! the same.
//!
//! See docs/decisions/088-family-differences-end-where-weights-are-read.md.

use std::borrow::Cow;
use std::path::Path;

use crate::device::{CodedMatrix, Dtype, LatentShape};
use crate::model::config::{Config, ExpertForm};
use crate::model::error::ModelError;
use crate::model::expert_forms;
use crate::model::tensors::{FusedPart, fused_parts};
use crate::model::weights::{StoredTensor, WeightSource};
use crate::printable::printable_name;

/// A checkpoint's weights in the transformer's form.
pub(super) struct CanonicalWeights<'a> {
    source: &'a dyn WeightSource,
    unit_offset_norms: bool,
    fused: Vec<FusedPart>,
    expert_form: ExpertForm,
    head_dim: usize,
    /// For each dimension of a query or key head, the dimension that the checkpoint stores there.
    /// `None`: the order is the checkpoint's.
    head_order: Option<Vec<usize>>,
    /// If attention keeps latents, only this part of a head is reordered.
    latent: Option<LatentShape>,
}

impl<'a> CanonicalWeights<'a> {
    /// The name of the stored tensor that holds `name`, or its expert's. `None`: it is stored by itself.
    fn name_in_files(&self, name: &str) -> Option<String> {
        let of_expert = || expert_forms::stored_name(self.expert_form, name);
        self.fused(name).map(|(stored, _)| stored).or_else(of_expert)
    }

    pub(super) fn new(source: &'a dyn WeightSource, config: &Config) -> CanonicalWeights<'a> {
        let latent = config.latent.map(|latent| latent.shape);
        let head_dim = latent.map_or(config.heads.head_dim, |latent| latent.rope_dim);
        let order = head_order(head_dim, config.rotary_dims, config.rotates_neighbours);
        CanonicalWeights {
            source,
            unit_offset_norms: config.unit_offset_norms,
            fused: fused_parts(config),
            expert_form: config.expert_form(),
            head_dim,
            head_order: (!order.is_sorted()).then_some(order),
            latent,
        }
    }

    /// The stored tensor that holds the tensor `name` among its rows, with its name.
    fn fused(&self, name: &str) -> Option<(String, &FusedPart)> {
        self.fused.iter().find_map(|part| {
            let layer = name.strip_suffix(part.name)?;
            Some((format!("{layer}{}", part.stored), part))
        })
    }

    /// The name of the stored tensor that holds the tensor `name`.
    pub(super) fn stored_name(&self, name: &str) -> String {
        self.fused(name).map_or_else(|| name.to_owned(), |(stored, _)| stored)
    }

    fn stored(&self, name: &str, rows: Option<usize>, columns: usize) -> Result<StoredTensor<'_>, ModelError> {
        if let Some(tensor) = expert_forms::read(self.expert_form, self.source, name, rows, columns)? {
            return Ok(tensor);
        }
        let (Some((stored, part)), Some(rows)) = (self.fused(name), rows) else {
            return self.source.tensor(name, rows, columns);
        };
        let whole = self.source.tensor(&stored, Some(part.stored_rows), columns)?;
        let row = columns * whole.dtype.bytes();
        let run = |first: usize, count: usize| first * row..(first + count) * row;
        let data = if rows <= part.run {
            let bytes = run(part.first_row, rows);
            match whole.data {
                Cow::Borrowed(data) => Cow::Borrowed(&data[bytes]),
                Cow::Owned(data) => Cow::Owned(data[bytes].to_vec()),
            }
        } else {
            let runs = (part.first_row..part.stored_rows).step_by(part.stride);
            let runs = runs.map(|first| &whole.data[run(first, part.run)]);
            Cow::Owned(runs.collect::<Vec<_>>().concat())
        };
        Ok(StoredTensor { rows, data, ..whole })
    }
}

impl WeightSource for CanonicalWeights<'_> {
    fn tensor(&self, name: &str, rows: Option<usize>, columns: usize) -> Result<StoredTensor<'_>, ModelError> {
        let mut tensor = self.stored(name, rows, columns)?;
        // The norm of a recurrent layer's output is stored as it is.
        if self.unit_offset_norms && name.ends_with("norm.weight") && !name.ends_with("linear_attn.norm.weight") {
            tensor = with_unit_added(tensor);
        }
        match (&self.head_order, self.latent) {
            (Some(order), Some(latent)) => Ok(match plain_rows(latent, name) {
                Some(plain) => reordered(tensor, rows.is_none(), plain + self.head_dim, &behind(plain, order)),
                None => tensor,
            }),
            (Some(order), None) if is_by_head(name) => Ok(reordered(tensor, rows.is_none(), self.head_dim, order)),
            _ => Ok(tensor),
        }
    }

    fn code_group(&self, name: &str, rows: usize, columns: usize) -> Result<Option<usize>, ModelError> {
        if expert_forms::stored_name(self.expert_form, name).is_some() {
            return Ok(None);
        }
        match self.fused(name) {
            Some((stored, part)) => self.source.code_group(&stored, part.stored_rows, columns),
            None => self.source.code_group(name, rows, columns),
        }
    }

    fn codes(&self, name: &str, rows: usize, columns: usize) -> Result<CodedMatrix, ModelError> {
        let (matrix, stored): (_, Vec<usize>) = match self.fused(name) {
            Some((stored, part)) => {
                let matrix = self.source.codes(&stored, part.stored_rows, columns)?;
                let runs = (part.first_row..part.stored_rows).step_by(part.stride.max(1));
                let all = runs.flat_map(|first| first..first + part.run);
                (matrix, all.take(rows).collect())
            }
            None => (self.source.codes(name, rows, columns)?, (0..rows).collect()),
        };
        let reordered = match (&self.head_order, self.latent) {
            (Some(order), Some(latent)) => plain_rows(latent, name).map(|plain| behind(plain, order)),
            (Some(order), None) if is_by_head(name) => Some(order.clone()),
            _ => None,
        };
        let picked = match &reordered {
            Some(order) => {
                let heads = stored.chunks_exact(order.len());
                heads.flat_map(|head| order.iter().map(|row| head[*row])).collect()
            }
            None => stored,
        };
        Ok(if picked.iter().copied().eq(0..matrix.rows) {
            matrix
        } else {
            matrix.with_rows(&picked)
        })
    }

    fn shown(&self, name: &str) -> String {
        // An error counts the rows of a part, so it has the part's name.
        match self.name_in_files(name) {
            Some(_) => printable_name(name),
            None => self.source.shown(name),
        }
    }

    fn path_of(&self, name: &str) -> &Path {
        self.source.path_of(self.name_in_files(name).as_deref().unwrap_or(name))
    }
}

/// A norm's weights plus 1, in F32.
fn with_unit_added(tensor: StoredTensor<'_>) -> StoredTensor<'static> {
    let mut values = vec![0.0; tensor.columns];
    tensor.view().read_row(0, &mut values);
    StoredTensor {
        dtype: Dtype::F32,
        data: values.iter().flat_map(|x| (1.0 + x).to_le_bytes()).collect(),
        rows: tensor.rows,
        columns: tensor.columns,
    }
}

/// For each dimension of a head as the transformer rotates it, the checkpoint's dimension, where
/// the first `rotary_dims` dimensions rotate: neighbours as pairs, or each with the one
/// `rotary_dims / 2` above it. The other dimensions fill the pairs that do not rotate.
fn head_order(head_dim: usize, rotary_dims: usize, rotates_neighbours: bool) -> Vec<usize> {
    let (pairs, rotating) = (head_dim / 2, rotary_dims / 2);
    let pair = |d: usize| match (d < rotating, rotates_neighbours) {
        (true, false) => (d, rotating + d),
        _ => (2 * d, 2 * d + 1),
    };
    let pairs = (0..pairs).map(pair);
    pairs
        .clone()
        .map(|(low, _)| low)
        .chain(pairs.map(|(_, high)| high))
        .collect()
}

/// Of the heads that make up a tensor's rows in attention over latents, the dimensions that stand before
/// those that rotate. `None`: the tensor has no such rows.
fn plain_rows(latent: LatentShape, name: &str) -> Option<usize> {
    match name.rsplit('.').nth(1)? {
        "q_proj" | "q_b_proj" => Some(latent.plain_dim),
        "kv_a_proj_with_mqa" => Some(latent.rank),
        _ => None,
    }
}

/// The order of `plain` dimensions that stay, and then of others in the order `order`.
fn behind(plain: usize, order: &[usize]) -> Vec<usize> {
    (0..plain).chain(order.iter().map(|d| plain + d)).collect()
}

/// Whether a tensor's rows, or a vector's elements, are dimensions of query or key heads.
fn is_by_head(name: &str) -> bool {
    let mut words = name.rsplit('.').skip(1);
    matches!(words.next(), Some("q_proj" | "k_proj" | "q_norm" | "k_norm"))
}

/// The tensor with the rows of each head in the order `order`; of a vector, with its elements.
fn reordered(tensor: StoredTensor<'_>, is_vector: bool, head_dim: usize, order: &[usize]) -> StoredTensor<'static> {
    let unit = tensor.dtype.bytes() * if is_vector { 1 } else { tensor.columns };
    let mut data = Vec::with_capacity(tensor.data.len());
    for head in tensor.data.chunks_exact(head_dim * unit) {
        order
            .iter()
            .for_each(|d| data.extend_from_slice(&head[d * unit..][..unit]));
    }
    StoredTensor {
        dtype: tensor.dtype,
        rows: tensor.rows,
        columns: tensor.columns,
        data: Cow::Owned(data),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model::coded_weights::{CodedWeights, numbers_of};
    use crate::model::tensors::ModelTensors;

    /// The rows of a matrix of codes are picked and ordered as those of its numbers.
    #[test]
    fn codes_stand_for_the_numbers_of_the_same_rows() {
        for (architecture, neighbours, extra) in [
            // A GGUF file's order of heads.
            ("LlamaForCausalLM", true, json!({})),
            ("Phi3ForCausalLM", false, json!({"partial_rotary_factor": 0.5})),
            ("Glm4ForCausalLM", true, json!({"partial_rotary_factor": 0.5})),
            // A gate beside each query, and parts of recurrence by key heads.
            (
                "Qwen3NextForCausalLM",
                false,
                json!({"num_experts": 2, "num_experts_per_tok": 1, "full_attention_interval": 2}),
            ),
            // Heads of which a part rotates, behind another.
            (
                "DeepseekV2ForCausalLM",
                true,
                json!({"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "n_routed_experts": 2, "num_experts_per_tok": 1,
                    "moe_intermediate_size": 40}),
            ),
        ] {
            let mut text = json!({
                "architectures": [architecture], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 200
            });
            text.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            let mut config = Config::parse(Path::new("config.json"), &text.to_string()).unwrap();
            config.rotates_neighbours = neighbours;
            let source = CodedWeights::new(false, |_| Some(8));
            let canonical = CanonicalWeights::new(&source, &config);
            let tensors = ModelTensors::of(&config);
            let linears = tensors.products().into_iter().flatten();
            for part in linears.flat_map(|linear| &linear.weights) {
                let (name, rows) = (&part.name, part.rows.unwrap());
                assert_eq!(
                    canonical.code_group(name, rows, part.columns).unwrap(),
                    Some(8),
                    "{name}"
                );
                let codes = canonical.codes(name, rows, part.columns).unwrap();
                assert_eq!((codes.rows, codes.columns), (rows, part.columns), "{name}");
                let numbers = canonical.tensor(name, part.rows, part.columns).unwrap();
                let numbers = numbers.data.as_chunks::<4>().0.iter();
                let numbers: Vec<f32> = numbers.map(|bytes| f32::from_le_bytes(*bytes)).collect();
                assert!(numbers_of(&codes) == numbers, "{architecture}: {name} has other rows");
            }
        }
    }

    #[test]
    fn rotating_pairs_come_first_and_the_rest_behind() {
        assert!(head_order(8, 8, false).is_sorted());
        assert_eq!(head_order(8, 8, true), [0, 2, 4, 6, 1, 3, 5, 7]);
        assert_eq!(head_order(8, 4, false), [0, 1, 4, 6, 2, 3, 5, 7]);
        assert_eq!(head_order(8, 4, true), [0, 2, 4, 6, 1, 3, 5, 7]);
    }

    #[test]
    fn only_queries_and_keys_are_reordered() {
        for (name, is) in [
            ("model.layers.0.self_attn.q_proj.weight", true),
            ("model.layers.0.self_attn.k_proj.bias", true),
            ("model.layers.0.self_attn.k_norm.weight", true),
            ("model.layers.0.self_attn.v_proj.weight", false),
            ("model.layers.0.self_attn.o_proj.weight", false),
            ("model.norm.weight", false),
        ] {
            assert_eq!(is_by_head(name), is, "{name}");
        }
    }

    #[test]
    fn rows_and_elements_move_within_their_head() {
        let data: Vec<u8> = (0..16u16).flat_map(u16::to_le_bytes).collect();
        let tensor = |rows, columns| StoredTensor {
            dtype: Dtype::F16,
            rows,
            columns,
            data: Cow::Borrowed(&data[..rows * columns * 2]),
        };
        let numbers = |tensor: StoredTensor<'_>| -> Vec<u16> {
            let words = tensor.data.as_chunks::<2>().0.iter();
            words.map(|bytes| u16::from_le_bytes(*bytes)).collect()
        };
        let order = head_order(4, 4, true);
        let matrix = reordered(tensor(8, 2), false, 4, &order);
        assert_eq!(numbers(matrix), [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]);
        assert_eq!(
            numbers(reordered(tensor(1, 8), true, 4, &order)),
            [0, 2, 1, 3, 4, 6, 5, 7]
        );
    }
}
