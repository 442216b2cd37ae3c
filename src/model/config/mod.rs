//! `config.json` and `generation_config.json` of a checkpoint, read into one value.
//!
//! Families differ only in the fields of [`Config`]. Unsupported options are refused by name.
//! Options that the reference (transformers) ignores are ignored, too.

use std::path::Path;

use serde_json::Value;

use crate::device::{Activation, HeadShape, KvSpec, LatentShape, Placeholders, RecurrentShape, Routing, cuda};
use crate::model::error::ModelError;
use crate::model::gguf;
use crate::model::quantized::Quantization;
use crate::model::rope::{Rope, Scaling};

mod adapter;
mod dtype;
mod experts;
mod family;
mod family_keys;
mod gemma4;
pub mod generation;
mod heads;
mod keys;
mod latent;
mod layers;
mod llama4;
mod minimax;
mod nemotron;
pub(super) mod quantization;
mod reader;
mod recurrent;
mod rope;
#[cfg(test)]
mod testing;

pub use adapter::{ADAPTER_CONFIG, AdapterConfig};
pub use dtype::declared_dtype;
pub use family::Family;
use keys::UnknownKeys;
pub use nemotron::LayerParts;
pub use quantization::quantization_file;
use reader::{Reader, read_json, short};

/// Routed experts: MLPs of which a router chooses some for each token.
#[derive(Debug, Clone, PartialEq)]
pub struct Experts {
    pub count: usize,
    pub routing: Routing,
    pub router_bias: bool,
    /// Whether scores have a correction where experts are chosen.
    pub has_correction: bool,
    pub form: ExpertForm,
    /// Width of one expert.
    pub intermediate_size: usize,
    /// The expert that every token uses besides.
    pub shared: Option<SharedExpert>,
    /// Whether a layer with experts has its plain MLP, too, which reads the same stream. Then both and
    /// the router have norms of their own, and each expert has a factor.
    pub beside_mlp: bool,
    /// Whether each layer has experts. The other layers have a plain MLP.
    pub layers: Vec<bool>,
}

/// An MLP that every token uses beside those that a router chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedExpert {
    pub intermediate_size: usize,
    /// Whether its output is multiplied by the sigmoid of a projection. Otherwise it counts as it is.
    pub is_weighted: bool,
}

/// How a checkpoint stores experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertForm {
    /// Matrices of each expert, or those of a layer one after the other.
    Matrices,
    /// Transposed matrices, in which columns of gate and up alternate.
    Transposed,
    /// Transposed matrices, the columns of gate before those of up.
    TransposedHalves,
    /// MXFP4, in which rows of gate and up alternate.
    Mxfp4,
}

/// Recurrent layers, which stand in place of attention in some layers.
#[derive(Debug, Clone, PartialEq)]
pub struct Recurrent {
    pub shape: RecurrentShape,
    /// Whether each layer is recurrent. The other layers have attention.
    pub layers: Vec<bool>,
    /// Whether the checkpoint stores the rows of the input projection as two tensors, and within them
    /// by key head.
    pub by_key_head: bool,
    /// Whether the convolution has biases.
    pub conv_bias: bool,
    /// Epsilon of the norm of the layers' outputs, which is not that of the residual stream's norms
    /// where these absorb a factor.
    pub norm_eps: f32,
}

/// Attention that keeps a latent of each token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentAttention {
    pub shape: LatentShape,
    /// Numbers of the latent that all heads' queries are projections of. `None`: they are projections
    /// of the stream.
    pub query_rank: Option<usize>,
}

/// Layers whose attention has other heads than that of the others.
#[derive(Debug, Clone, PartialEq)]
pub struct GlobalLayers {
    pub heads: HeadShape,
    /// Whether these layers have no projection of values: a value is its token's key, before norm and
    /// rotation.
    pub values_are_keys: bool,
    /// Whether each layer is one of these.
    pub layers: Vec<bool>,
}

/// Inputs that each layer has besides the stream: of each token, a row of a table of their own and a
/// projection of its embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerInputs {
    /// Rows of the table.
    pub vocab_size: usize,
    /// Width of one layer's part.
    pub width: usize,
}

/// Configuration of a decoder-only transformer with RMS norms before or behind attention and a gated
/// MLP.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    pub family: Family,
    /// Rows of the embedding table, padding included.
    pub vocab_size: usize,
    pub placeholders: Option<Placeholders>,
    pub hidden_size: usize,
    /// Width of the MLP, in layers without experts.
    pub intermediate_size: usize,
    pub experts: Option<Experts>,
    /// Each layer's attention: full, or a sliding window. What stands here for a recurrent layer has
    /// no effect.
    pub layers: Vec<KvSpec>,
    pub recurrent: Option<Recurrent>,
    /// What each layer consists of.
    pub parts: Vec<LayerParts>,
    /// For each layer that has no keys and values of its own, the earlier layer whose it reads.
    pub kv_sources: Vec<Option<usize>>,
    /// Whether the MLPs of such layers are twice as wide.
    pub wide_shared_mlp: bool,
    pub layer_inputs: Option<LayerInputs>,
    /// Number of layers behind the last that a checkpoint may have: they predict further tokens, and
    /// are not read.
    pub mtp_layers: usize,
    /// Heads of all layers but those of `global`. If attention keeps latents, they have one key of all
    /// that is kept.
    pub heads: HeadShape,
    pub latent: Option<LatentAttention>,
    pub global: Option<GlobalLayers>,
    /// Factor of the dot products of queries and keys.
    pub attention_scale: f32,
    /// Soft cap of the scaled dot products: `cap * tanh(x / cap)`.
    pub attention_soft_cap: Option<f32>,
    /// Whether each query head has a sink, a score without a value that counts in its softmax.
    pub attention_sinks: bool,
    /// Whether each query head has a gate, by whose sigmoid the head's output is multiplied. The
    /// checkpoint stores its projection behind the rows of the head's query.
    pub attention_gates: bool,
    /// Soft cap of the logits, by the same formula.
    pub logit_soft_cap: Option<f32>,
    /// Factor of the logits, before their soft cap.
    pub logit_scale: f32,
    /// Factor of embeddings.
    pub embedding_scale: f32,
    pub activation: Activation,
    /// Epsilon of all norms.
    pub norm_eps: f32,
    /// Whether the checkpoint stores norm weights as w − 1.
    pub unit_offset_norms: bool,
    /// Whether norms are layer norms, which subtract the mean first.
    pub layer_norms: bool,
    /// Whether the MLP reads what attention reads, and both outputs are added to the stream.
    pub parallel_mlp: bool,
    /// Whether the inputs of attention and MLP are normalised.
    pub pre_norms: bool,
    /// Whether the outputs of attention and MLP are normalised before the residual addition.
    pub post_norms: bool,
    pub qkv_bias: bool,
    pub o_bias: bool,
    pub mlp_bias: bool,
    /// Whether query and key heads have RMS norms.
    pub qk_norm: bool,
    /// Whether such a norm is one of all heads together.
    pub joint_qk_norm: bool,
    /// Whether queries and keys of layers that rotate have norms of each head without weights.
    pub unit_qk_norm: bool,
    /// Whether value heads have RMS norms, which have no weights.
    pub value_norm: bool,
    /// Whether each layer's output is multiplied by a number that the checkpoint stores.
    pub layer_scalars: bool,
    /// Whether the checkpoint stores the projections of queries, keys and values as one tensor.
    pub fused_qkv: bool,
    /// Whether the checkpoint stores the gate and up projections as one tensor.
    pub fused_gate_up: bool,
    /// How the checkpoint says that matrices are quantized. `None`: they are not.
    pub quantization: Option<Quantization>,
    /// Number of a head's first dimensions that rotate; even.
    pub rotary_dims: usize,
    /// Whether dimensions 2d and 2d + 1 rotate as a pair, not d and d + `rotary_dims / 2`.
    pub rotates_neighbours: bool,
    /// Whether each layer rotates queries and keys.
    pub rotates: Vec<bool>,
    pub rope: Rope,
    /// RoPE of sliding-window layers. `None`: the same as for the other layers.
    pub window_rope: Option<Rope>,
    /// Whether the output head is the embedding table.
    pub tied_embeddings: bool,
    /// Maximum sequence length that the checkpoint declares, in tokens.
    pub max_position_embeddings: u32,
    /// Length beyond which the model needs what is not implemented.
    pub context_max: Option<u32>,
    /// Ids that end a sequence, from `config.json` and `generation_config.json` together,
    /// ascending.
    pub eos_token_ids: Vec<u32>,
    /// Warnings for the user, for example about keys that have no effect.
    pub warnings: Vec<String>,
}

impl Config {
    /// Reads `config.json` and, if it exists, `generation_config.json` of a checkpoint folder, or the
    /// metadata of a GGUF model.
    ///
    /// # Errors
    /// A file cannot be read or parsed, a size is out of bounds, or an architecture or option is
    /// not supported.
    pub fn load(dir: &Path) -> Result<Config, ModelError> {
        if let Some(set) = gguf::open(dir)? {
            return gguf::config(&set);
        }
        let path = dir.join("config.json");
        let mut map = read_json(&path)?;
        if let Some(file) = quantization::file_beside(dir, &map)? {
            map.insert(quantization::KEY.to_owned(), quantization::described_by(&file)?);
        }
        let config = Reader { path: &path, map: &map }.config()?;
        let path = dir.join("generation_config.json");
        if !path.try_exists().map_err(|e| ModelError::read(&path, e))? {
            return Ok(config);
        }
        let generation = read_json(&path)?;
        let generation_ids = Reader {
            path: &path,
            map: &generation,
        }
        .eos_token_ids()?;
        Ok(config.with_eos_token_ids(generation_ids))
    }

    /// Parses the text of a `config.json`. Errors name `path`.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn parse(path: &Path, text: &str) -> Result<Config, ModelError> {
        let map = reader::parse(path, text.as_bytes())?;
        Reader { path, map: &map }.config()
    }

    /// Maximum context of a job that asks for `max_context` tokens. `None`: the declared length.
    ///
    /// # Errors
    /// The job asks for no tokens, or for more than [`context_limit`](Self::context_limit).
    pub(super) fn context_tokens(&self, max_context: Option<u32>) -> Result<u32, ModelError> {
        let limit = self.context_limit();
        match max_context {
            None => Ok(self.max_position_embeddings),
            Some(0) => Err(ModelError::Options("a context of 0 tokens holds nothing".to_owned())),
            Some(n) if n > limit => Err(ModelError::Options(format!(
                "a context of {n} tokens is more than the model's {limit}"
            ))),
            Some(n) => Ok(n),
        }
    }

    fn with_eos_token_ids(mut self, ids: Vec<u32>) -> Config {
        self.eos_token_ids.extend(ids);
        self.eos_token_ids.sort_unstable();
        self.eos_token_ids.dedup();
        self
    }

    /// Maximum context of a job: the declared length, or the length that RoPE scaling allows if it
    /// is larger.
    pub fn context_limit(&self) -> u32 {
        let scaled_length = |factor: f64, tokens: u32| (tokens as f64 * factor).min(u32::MAX as f64) as u32;
        let scaled = match &self.rope.scaling {
            Scaling::Dynamic {
                factor,
                pretrained_tokens,
            } => scaled_length(*factor, *pretrained_tokens),
            Scaling::Llama3 {
                factor,
                pretrained_tokens,
                ..
            } => scaled_length(*factor, *pretrained_tokens),
            Scaling::Yarn(yarn) => scaled_length(yarn.factor, yarn.pretrained_tokens),
            Scaling::None | Scaling::Linear { .. } | Scaling::LongRope(_) | Scaling::Proportional { .. } => 0,
        };
        let limit = scaled.max(self.max_position_embeddings);
        self.context_max.map_or(limit, |max| limit.min(max))
    }

    /// Refuses a model that GPUs do not compute.
    ///
    /// # Errors
    /// The model has what GPUs do not compute, or their kernels do not take its heads.
    pub fn refuse_on_gpu(&self) -> Result<(), ModelError> {
        if let Some(recurrent) = &self.recurrent {
            cuda::check_recurrent(recurrent.shape)?;
        }
        Ok(self.head_shapes().into_iter().try_for_each(cuda::check_heads)?)
    }

    /// How the checkpoint stores experts.
    pub fn expert_form(&self) -> ExpertForm {
        self.experts
            .as_ref()
            .map_or(ExpertForm::Matrices, |experts| experts.form)
    }

    /// The experts of a layer. `None`: it has a plain MLP.
    pub fn experts_of(&self, layer: usize) -> Option<&Experts> {
        self.experts.as_ref().filter(|experts| experts.layers[layer])
    }

    /// The name of a layer's plain MLP.
    pub(super) fn mlp_name(&self) -> &'static str {
        match self.family {
            Family::GraniteMoeHybrid => "mlp.shared_experts",
            _ => "mlp",
        }
    }

    /// Whether a layer is recurrent. Otherwise it has attention.
    pub fn is_recurrent(&self, layer: usize) -> bool {
        self.recurrent.as_ref().is_some_and(|recurrent| recurrent.layers[layer])
    }

    fn is_global(&self, layer: usize) -> bool {
        self.global.as_ref().is_some_and(|global| global.layers[layer])
    }

    /// The heads of a layer's attention.
    pub fn heads_of(&self, layer: usize) -> HeadShape {
        let global = self.global.as_ref().filter(|global| global.layers[layer]);
        global.map_or(self.heads, |global| global.heads)
    }

    /// The shapes of all layers' heads.
    pub fn head_shapes(&self) -> Vec<HeadShape> {
        let global = self.global.as_ref().map(|global| global.heads);
        [Some(self.heads), global].into_iter().flatten().collect()
    }

    /// Whether a layer has no projection of values, since its keys serve as such.
    pub fn values_are_keys(&self, layer: usize) -> bool {
        let global = self.global.as_ref();
        global.is_some_and(|global| global.values_are_keys && global.layers[layer])
    }

    /// Whether a layer has keys and values of its own.
    pub fn has_kv(&self, layer: usize) -> bool {
        self.has_mixer(layer) && !self.is_recurrent(layer) && self.kv_sources[layer].is_none()
    }

    /// Width of a layer's plain MLP.
    pub fn mlp_width(&self, layer: usize) -> usize {
        let is_wide = self.wide_shared_mlp && self.kv_sources[layer].is_some();
        self.intermediate_size * if is_wide { 2 } else { 1 }
    }

    /// The attention of each layer that has keys and values of its own, with its heads.
    pub fn attention_layers(&self) -> Vec<(KvSpec, HeadShape)> {
        let layers = self.layers.iter().enumerate();
        let layers = layers.filter(|(layer, _)| self.has_kv(*layer));
        layers.map(|(layer, spec)| (*spec, self.heads_of(layer))).collect()
    }

    /// Bytes of a sequence's states in all recurrent layers.
    pub fn state_bytes(&self) -> u64 {
        self.recurrent.as_ref().map_or(0, |recurrent| {
            let layers = recurrent.layers.iter().filter(|is_recurrent| **is_recurrent).count();
            (layers * recurrent.shape.state_bytes()) as u64
        })
    }
}

impl Reader<'_> {
    fn config(&self) -> Result<Config, ModelError> {
        let (family, is_text_part) = self.family()?;
        let mut unknown = UnknownKeys::default();
        if !is_text_part {
            self.check_keys(family, "", &mut unknown)?;
            let config = self.text_config(family)?;
            let warnings = self.warnings(&config, unknown);
            return Ok(Config { warnings, ..config });
        }
        let Some(Value::Object(map)) = self.get("text_config") else {
            return Err(self.broken("there is no `text_config`".to_owned()));
        };
        self.check_multimodal_keys(&mut unknown)?;
        let text = Reader { path: self.path, map };
        text.check_keys(family, "text_config.", &mut unknown)?;
        let config = text.text_config(family)?;
        // Some versions of the reference read this flag, others the one in `text_config`. If the
        // two differ, the intent is unknown. (A Mistral's files alone tell whether it has a head.)
        let tied = self.flag("tie_word_embeddings")?.unwrap_or(family.ties_embeddings());
        if family.is_gemma() && tied != config.tied_embeddings {
            return Err(self.unsupported(format!(
                "`tie_word_embeddings` is {tied}, and {} in `text_config`",
                config.tied_embeddings
            )));
        }
        if config.logit_soft_cap.is_some() && family == Family::Gemma3 {
            // Some versions of the reference apply this cap, others do not.
            return Err(self.unsupported("`final_logit_softcapping` in `text_config` is not supported".to_owned()));
        }
        let config = Config {
            warnings: self.warnings(&config, unknown),
            placeholders: self.placeholders(family, &text, config.vocab_size)?,
            quantization: self.quantization()?.or(config.quantization),
            ..config
        };
        Ok(config.with_eos_token_ids(self.eos_token_ids()?))
    }

    fn warnings(&self, config: &Config, unknown: UnknownKeys) -> Vec<String> {
        let mut warnings = self.key_warnings(config.family, unknown);
        warnings.extend(self.context_warning(config));
        warnings
    }

    /// The configuration of a text-only model, or of the text part of a multimodal model.
    #[expect(clippy::too_many_lines, reason = "fields, one by one")]
    fn text_config(&self, family: Family) -> Result<Config, ModelError> {
        self.check_gemma4(family)?;
        self.check_minimax(family)?;
        self.check_nemotron(family)?;
        self.check_llama4(family)?;
        let layer_inputs = self.layer_inputs(family)?;
        let activation = self.activation(family)?;
        let hidden_size = self.required_size("hidden_size", 1 << 17)?;
        let num_layers = self.layer_count(family)?;
        let latent = self.latent(family)?;
        let heads = self.heads(family, latent.as_ref(), hidden_size)?;
        let max_position_embeddings = self.max_position_embeddings(family)?;
        let context_max = self.query_scaling_from(family)?;
        let biases = self.biases(family)?;
        let layers = self.layers(family, num_layers)?;
        // Of a head, what rotates if it is a part that stands by itself, and what scores are of.
        let (rotating, scored) = latent.map_or((heads.head_dim, heads.head_dim), |latent| {
            (latent.shape.rope_dim, latent.shape.query_dim())
        });
        let rotary_dims = self.rotary_dims(family, rotating)?;
        let (rope, window_rope) = self.ropes(family, rotary_dims, max_position_embeddings)?;
        let scales = self.scales(family, hidden_size, scored)?;
        let vocab_size = self.size_or("vocab_size", 1 << 24, family.vocab_size())?;
        if let Some(inputs) = layer_inputs.filter(|inputs| inputs.vocab_size < vocab_size) {
            return Err(self.broken(format!(
                "`vocab_size_per_layer_input` is {}, less than `vocab_size` {vocab_size}",
                inputs.vocab_size
            )));
        }
        Ok(Config {
            family,
            vocab_size,
            placeholders: None,
            hidden_size,
            intermediate_size: self.intermediate_size(family)?,
            experts: self.experts(family, num_layers, hidden_size)?,
            rotates: self.rotates(family, &layers)?,
            global: self.global_layers(family, heads, &layers)?,
            kv_sources: self.kv_sources(family, &layers)?,
            wide_shared_mlp: family == Family::Gemma4 && self.flag("use_double_wide_mlp")?.unwrap_or(false),
            layer_inputs,
            layers,
            recurrent: self.recurrent(family, num_layers, scales.stored_norm_eps)?,
            parts: self.parts(family, num_layers)?,
            mtp_layers: self.mtp_layers(family)?,
            heads,
            latent,
            attention_scale: scales.attention,
            // Gemma 3's attention has no soft cap, even if its configuration sets one.
            attention_soft_cap: match family {
                Family::Gemma2 => self.soft_cap("attn_logit_softcapping", Some(50.0))?,
                _ => None,
            },
            attention_sinks: family == Family::GptOss,
            attention_gates: family.has_delta_layers(),
            logit_soft_cap: match family {
                Family::Gemma2 => self.soft_cap("final_logit_softcapping", Some(30.0))?,
                Family::Gemma3 | Family::Gemma4 => self.soft_cap("final_logit_softcapping", None)?,
                _ => None,
            },
            logit_scale: scales.logits,
            embedding_scale: scales.embedding,
            activation,
            norm_eps: scales.norm_eps,
            unit_offset_norms: (family.is_gemma() && family != Family::Gemma4) || family.has_delta_layers(),
            layer_norms: family.is_cohere(),
            parallel_mlp: family.is_cohere(),
            pre_norms: !family.has_norms_behind_alone(),
            post_norms: family.has_norms_behind_alone()
                || matches!(family, Family::Gemma2 | Family::Gemma3 | Family::Gemma4 | Family::Glm4),
            qkv_bias: biases.qkv,
            o_bias: biases.o,
            mlp_bias: biases.mlp,
            qk_norm: self.qk_norm(family)?,
            joint_qk_norm: matches!(
                family,
                Family::Olmo2 | Family::Olmo3 | Family::Olmoe | Family::MiniMaxM2
            ),
            unit_qk_norm: self.unit_qk_norm(family)?,
            value_norm: family == Family::Gemma4,
            layer_scalars: family == Family::Gemma4,
            fused_qkv: family == Family::Phi3,
            fused_gate_up: matches!(family, Family::Phi3 | Family::Glm | Family::Glm4),
            quantization: self.quantization()?,
            rotary_dims,
            rotates_neighbours: self.rotates_neighbours(family)?,
            rope,
            window_rope,
            tied_embeddings: self.flag("tie_word_embeddings")?.unwrap_or(family.ties_embeddings()),
            max_position_embeddings: context_max
                .map_or(max_position_embeddings, |max| max_position_embeddings.min(max)),
            context_max,
            eos_token_ids: self.eos_token_ids()?,
            warnings: Vec::new(),
        })
    }

    fn intermediate_size(&self, family: Family) -> Result<usize, ModelError> {
        match family {
            // A model without experts has the MLP that is beside them in other models.
            Family::GraniteMoeHybrid if self.is_zero("num_local_experts") => {
                self.size_or("shared_intermediate_size", 1 << 20, Some(1024))
            }
            // There is no plain MLP, and no such key.
            Family::Qwen3_5Moe => self.size_or("intermediate_size", 1 << 20, Some(1)),
            Family::NemotronH => self.size_or("intermediate_size", 1 << 20, Some(21_504)),
            Family::Llama4 => self.size_or("intermediate_size_mlp", 1 << 20, Some(16_384)),
            _ => self.size_or("intermediate_size", 1 << 20, None),
        }
    }

    fn eos_token_ids(&self) -> Result<Vec<u32>, ModelError> {
        let Some(value) = self.get("eos_token_id") else {
            return Ok(Vec::new());
        };
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        let ids: Option<Vec<u32>> = match value {
            Value::Array(list) => list.iter().map(id).collect(),
            one => id(one).map(|id| vec![id]),
        };
        let mut ids = ids.ok_or_else(|| self.broken(format!("`eos_token_id` is {}, not token ids", short(value))))?;
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn llama() -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100, "hidden_size": 64,
            "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
            "eos_token_id": [7, 3], "head_dim": null, "rope_scaling": null, "quantization_config": null
        })
    }

    fn parse(changes: Value) -> Result<Config, String> {
        let mut value = llama();
        let (Value::Object(map), Value::Object(changes)) = (&mut value, changes) else {
            panic!("objects")
        };
        map.extend(changes);
        Config::parse(Path::new("config.json"), &value.to_string()).map_err(|e| e.to_string())
    }

    fn refused(changes: Value, words: &str) {
        let error = parse(changes.clone()).expect_err(&format!("{changes} is accepted"));
        assert!(error.contains(words), "{changes}: {error}");
        assert!(error.contains("config.json") && !error.contains('\n'), "{error}");
    }

    #[test]
    fn a_llama_is_read() {
        let config = parse(json!({})).unwrap();
        assert_eq!(
            config.heads,
            HeadShape {
                heads: 4,
                kv_heads: 2,
                head_dim: 16,
                value_in_key: None,
            }
        );
        assert_eq!(config.eos_token_ids, [3, 7]);
        assert_eq!(
            config.rope,
            Rope {
                theta: 500_000.0,
                scaling: Scaling::None
            }
        );
        assert_eq!(config.layers, [KvSpec::Full; 3]);
        assert!(!config.qkv_bias && !config.qk_norm && !config.tied_embeddings);
        assert_eq!(config.context_limit(), 256);
    }

    #[test]
    fn families_differ_in_biases_norms_and_windows() {
        let of = |name: &str, more: Value| {
            let mut changes = json!({"architectures": [name], "model_type": null});
            changes
                .as_object_mut()
                .unwrap()
                .extend(more.as_object().unwrap().clone());
            parse(changes).unwrap()
        };
        let mistral = of("MistralForCausalLM", json!({"sliding_window": 9}));
        assert_eq!(mistral.layers, [KvSpec::Window(9); 3]);
        assert_eq!(
            of("MistralForCausalLM", json!({"sliding_window": null})).layers,
            [KvSpec::Full; 3]
        );
        assert_eq!(of("MistralForCausalLM", json!({})).layers, [KvSpec::Window(4096); 3]);
        let qwen2 = of("Qwen2ForCausalLM", json!({"sliding_window": 9, "max_window_layers": 1}));
        assert!(qwen2.qkv_bias && !qwen2.o_bias);
        assert_eq!(qwen2.layers, [KvSpec::Full; 3]);
        let slides = json!({"sliding_window": 9, "max_window_layers": 1, "use_sliding_window": true});
        let windows = [KvSpec::Full, KvSpec::Window(9), KvSpec::Window(9)];
        assert_eq!(of("Qwen2ForCausalLM", slides).layers, windows);
        let types = json!({"sliding_window": 9, "use_sliding_window": true,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]});
        assert_eq!(of("Qwen3ForCausalLM", types).layers, windows);
        let mut qwen3 = llama();
        qwen3["architectures"] = json!(["Qwen3ForCausalLM"]);
        qwen3["model_type"] = json!("qwen3");
        qwen3.as_object_mut().unwrap().remove("head_dim");
        let qwen3 = Config::parse(Path::new("c"), &qwen3.to_string()).unwrap();
        assert!(qwen3.qk_norm && !qwen3.qkv_bias);
        assert_eq!(qwen3.heads.head_dim, 128);
    }

    /// Parses a published Gemma configuration. These have few fields, and a multimodal model's text
    /// part has the fewest.
    fn gemma(text: Value) -> Result<Config, String> {
        Config::parse(Path::new("config.json"), &text.to_string()).map_err(|e| e.to_string())
    }

    #[test]
    fn gemmas_are_read() {
        let gemma2 = gemma(json!({
            "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336,
            "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
            "vocab_size": 256000, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 144, "attn_logit_softcapping": 50.0, "final_logit_softcapping": null,
            "sliding_window": 4096, "rope_theta": 10000.0, "eos_token_id": 1
        }))
        .unwrap();
        let (window, full) = (KvSpec::Window(4096), KvSpec::Full);
        assert_eq!(gemma2.layers, [window, full, window, full]);
        assert_eq!((gemma2.attention_soft_cap, gemma2.logit_soft_cap), (Some(50.0), None));
        assert_eq!(
            (gemma2.attention_scale, gemma2.embedding_scale),
            (1.0 / 12.0, 59.866_52)
        );
        assert!(gemma2.unit_offset_norms && gemma2.post_norms && gemma2.tied_embeddings && !gemma2.qk_norm);
        assert_eq!((gemma2.activation, gemma2.window_rope), (Activation::GeluTanh, None));
        assert_eq!(gemma2.max_position_embeddings, 8192);

        let images = json!({
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106],
            "text_config": {
                "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 7,
                "sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}
            },
            "vision_config": {"model_type": "siglip_vision_model"}
        });
        let gemma3 = gemma(images.clone()).unwrap();
        assert_eq!(gemma3.family, Family::Gemma3);
        let heads = HeadShape {
            heads: 8,
            kv_heads: 4,
            head_dim: 256,
            value_in_key: None,
        };
        assert_eq!((gemma3.heads, gemma3.vocab_size), (heads, 262_208));
        let window = KvSpec::Window(1024);
        assert_eq!(gemma3.layers, [window, window, window, window, window, full, window]);
        let scaled = Rope {
            theta: 1e6,
            scaling: Scaling::Linear { factor: 8.0 },
        };
        let plain = Rope {
            theta: 10_000.0,
            scaling: Scaling::None,
        };
        assert_eq!((&gemma3.rope, &gemma3.window_rope), (&scaled, &Some(plain.clone())));
        assert!(gemma3.qk_norm && gemma3.tied_embeddings);
        assert_eq!((gemma3.attention_soft_cap, gemma3.logit_soft_cap), (None, None));
        assert_eq!(
            (gemma3.attention_scale, gemma3.eos_token_ids.clone()),
            (1.0 / 16.0, vec![1, 106])
        );

        let mut by_type = images;
        by_type["text_config"]["rope_scaling"] = Value::Null;
        by_type["text_config"]["rope_parameters"] = json!({
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}
        });
        let by_type = gemma(by_type).unwrap();
        assert_eq!((by_type.rope, by_type.window_rope), (scaled, Some(plain)));
    }

    #[test]
    fn tied_tables_must_be_tied_in_both_places() {
        let text = json!({"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2});
        for (outer, inner, tied) in [
            (None, None, Some(true)),
            (Some(false), Some(false), Some(false)),
            (Some(false), None, None),
            (None, Some(false), None),
        ] {
            let mut whole = json!({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text,
                "tie_word_embeddings": outer});
            whole["text_config"]["tie_word_embeddings"] = json!(inner);
            match (gemma(whole), tied) {
                (Ok(config), Some(tied)) => assert_eq!(config.tied_embeddings, tied),
                (Err(error), None) => assert!(error.contains("`tie_word_embeddings` is"), "{error}"),
                (found, _) => panic!("{outer:?} {inner:?}: {found:?}"),
            }
        }
    }

    #[test]
    fn what_a_gemma_must_not_have_is_refused() {
        let with = |changes: Value| {
            let mut text = json!({
                "architectures": ["Gemma3ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2
            });
            text.as_object_mut()
                .unwrap()
                .extend(changes.as_object().unwrap().clone());
            gemma(text).unwrap_err()
        };
        for (changes, words) in [
            (
                json!({"hidden_activation": "gelu"}),
                "`hidden_activation` `gelu` is not supported",
            ),
            (
                json!({"use_bidirectional_attention": true}),
                "`use_bidirectional_attention` (true)",
            ),
            (json!({"sliding_window": null}), "`sliding_window` is not set"),
            (json!({"final_logit_softcapping": 0}), "`final_logit_softcapping` is 0"),
            (json!({"query_pre_attn_scalar": -1}), "`query_pre_attn_scalar` is -1"),
            (
                json!({"rope_parameters": {"full_attention": 3}}),
                "`rope_parameters` holds 3",
            ),
            (json!({"rope_local_base_freq": "x"}), "`rope_local_base_freq`"),
            (
                json!({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": []}),
                "no `text_config`",
            ),
            (
                json!({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {}, "quantization_config": {"bits": 4}}),
                "`quantization_config`",
            ),
            (
                json!({"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_parameters": {"sliding_attention": {}}}),
                "`rope_scaling` and `rope_parameters`",
            ),
            (
                json!({"rope_parameters": {"rope_type": "default"}}),
                "`rope_parameters` without layer types",
            ),
            (
                json!({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"final_logit_softcapping": 3,
                    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}}),
                "`final_logit_softcapping` in `text_config`",
            ),
        ] {
            let error = with(changes.clone());
            assert!(error.contains(words), "{changes}: {error}");
        }
    }

    #[test]
    fn both_spellings_of_rope_are_read() {
        let linear = parse(json!({"rope_scaling": {"type": "linear", "factor": 2.0}})).unwrap();
        assert_eq!(
            linear.rope,
            Rope {
                theta: 500_000.0,
                scaling: Scaling::Linear { factor: 2.0 }
            }
        );
        let new = json!({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}});
        let dynamic = parse(new).unwrap();
        let scaling = Scaling::Dynamic {
            factor: 2.0,
            pretrained_tokens: 256,
        };
        assert_eq!(dynamic.rope, Rope { theta: 100.0, scaling });
        assert_eq!(dynamic.context_limit(), 512);
        let empty =
            json!({"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}});
        assert_eq!(parse(empty).unwrap().rope.scaling, Scaling::Linear { factor: 2.0 });
        assert_eq!(parse(json!({"rope_scaling": {}})).unwrap().rope.scaling, Scaling::None);
        let yarn = json!({"rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}});
        let Scaling::Yarn(yarn) = parse(yarn).unwrap().rope.scaling else {
            panic!("yarn")
        };
        assert_eq!(
            (yarn.beta_fast, yarn.beta_slow, yarn.pretrained_tokens),
            (32.0, 1.0, 64)
        );
        assert!((yarn.attention_factor - 1.138_629_4).abs() < 1e-6);
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        refused(
            json!({"architectures": ["FalconForCausalLM"]}),
            "`FalconForCausalLM` is not supported",
        );
        refused(json!({"model_type": "mistral"}), "different models");
        refused(json!({"hidden_act": "gelu"}), "`gelu` is not supported");
        refused(
            json!({"quantization_config": {"quant_method": "hqq"}}),
            "`quantization_config`",
        );
        refused(
            json!({"quantization": {"group_size": 64, "bits": 4}}),
            "`quantization` (",
        );
        refused(json!({"partial_rotary_factor": 0.5}), "`partial_rotary_factor` 0.5");
        refused(
            json!({"rope_parameters": {"partial_rotary_factor": 0.5}}),
            "`partial_rotary_factor` 0.5",
        );
        refused(json!({"num_local_experts": 8}), "`num_local_experts` (8)");
        refused(json!({"final_logit_softcapping": 30.0}), "`final_logit_softcapping`");
        refused(
            json!({"rope_scaling": {"type": "proportional"}}),
            "`proportional` is not supported",
        );
        refused(
            json!({"rope_parameters": {"full_attention": {}}}),
            "differs by layer type",
        );
        refused(
            json!({"layer_types": ["full_attention", "linear_attention", "full_attention"]}),
            "linear_attention",
        );
    }

    #[test]
    fn broken_values_are_refused_by_name() {
        refused(json!({"hidden_size": null}), "`hidden_size` is missing");
        refused(json!({"hidden_size": 1u64 << 40}), "`hidden_size` is 1099511627776");
        refused(json!({"vocab_size": -1}), "`vocab_size` is -1");
        refused(json!({"num_hidden_layers": 1e9}), "`num_hidden_layers`");
        refused(json!({"num_key_value_heads": 3}), "not a multiple");
        refused(json!({"hidden_size": 66}), "not a multiple");
        refused(json!({"head_dim": 15}), "15 dimensions");
        refused(json!({"rms_norm_eps": "small"}), "`rms_norm_eps`");
        refused(json!({"rope_theta": 0}), "`rope_theta` is 0");
        refused(json!({"rope_scaling": {"type": "linear"}}), "no `factor`");
        refused(
            json!({"rope_scaling": {"factor": 2.0}}),
            "no `rope_type` that would use it",
        );
        refused(
            json!({"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}}),
            "`rope_type` `linear` and `type` `dynamic`",
        );
        refused(json!({"rope_scaling": "linear"}), "not an object");
        refused(
            json!({"rope_scaling": {"type": "llama3", "factor": 8.0}}),
            "no `low_freq_factor`",
        );
        refused(json!({"eos_token_id": "</s>"}), "`eos_token_id`");
        refused(json!({"architectures": null, "model_type": null}), "names a model");
        let error = Config::parse(Path::new("config.json"), "[1").unwrap_err().to_string();
        assert!(error.contains("not valid JSON"), "{error}");
    }
}
