//! Numbers of parameters, and the memory that weights, keys and values take on a CPU and on a GPU.
//! They follow from the configuration, so no weights are needed.

use std::path::Path;

use crate::device::{Dtype, KvFormat, KvSpec, Precision, cpu, cuda};
use crate::model::canonical::CanonicalWeights;
use crate::model::config::{Config, ExpertForm};
use crate::model::error::ModelError;
use crate::model::kv_layout::KvLayout;
use crate::model::tensors::{ModelTensors, TensorSpec, code_group};
use crate::model::weights::WeightSource;

/// Bytes of a value of a norm or a bias, which are F32 at every precision.
const VECTOR_VALUE_BYTES: u64 = 4;
/// Bytes of a factor of a group of codes; its zero point has a byte more.
const FACTOR_BYTES: u64 = 4;

/// The kind of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Cpu,
    Gpu,
}

impl Place {
    pub const ALL: [Place; 2] = [Place::Cpu, Place::Gpu];

    /// The name in messages and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Place::Cpu => "cpu",
            Place::Gpu => "gpu",
        }
    }

    /// Tokens of a KV block.
    pub fn block_tokens(self) -> u32 {
        match self {
            Place::Cpu => cpu::BLOCK_TOKENS as u32,
            Place::Gpu => cuda::attention_plan::BLOCK_TOKENS,
        }
    }

    /// The precisions that such a device computes in.
    pub fn precisions(self) -> &'static [Precision] {
        match self {
            Place::Cpu => &Precision::ON_CPU,
            Place::Gpu => &Precision::ON_GPU,
        }
    }
}

/// Number of a model's values, by their use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelSize {
    /// Values of the embedding table, of that of layers' inputs and, if it is separate, of the output
    /// head.
    pub tables: u64,
    /// Values of the linear layers' matrices.
    pub linear: u64,
    /// Those among them that are matrices of single heads, in attention over latents.
    pub of_heads: u64,
    /// Values of norms and biases.
    pub vectors: u64,
    /// Values of the experts' matrices that a token does not use.
    pub unused_by_a_token: u64,
    /// None, unless it is [set](Self::with_codes).
    pub coded: CodedSize,
    /// Values of the matrices that adapters beside the model add.
    pub adapters: u64,
}

/// The part of the linear layers' matrices that is stored in codes of four bits which devices keep.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CodedSize {
    /// Values of these matrices.
    pub values: u64,
    /// Their bytes, without padding, and with factors and zero points.
    pub bytes: u64,
}

impl CodedSize {
    /// What a device keeps in codes of the model that `config` describes.
    ///
    /// # Errors
    /// A matrix is missing or has another shape.
    pub fn of(source: &dyn WeightSource, config: &Config) -> Result<CodedSize, ModelError> {
        let canonical = CanonicalWeights::new(source, config);
        let source: &dyn WeightSource = if source.is_canonical() { source } else { &canonical };
        let mut size = CodedSize::default();
        for product in ModelTensors::of(config).products() {
            let Some(group) = code_group(source, product.iter().copied())? else {
                continue;
            };
            for linear in product {
                // A matrix that is read twice in a row counts once, as in the number of all values.
                let mut parts: Vec<&TensorSpec> = linear.weights.iter().collect();
                parts.dedup();
                let values: usize = parts.iter().map(|part| part.rows.unwrap_or(1) * part.columns).sum();
                let values = values as u64;
                size.values += values;
                size.bytes += values / 2 + values / group as u64 * (FACTOR_BYTES + 1);
            }
        }
        Ok(size)
    }

    /// Why a model without such matrices is not run in four bits.
    pub fn refusal(model: &Path) -> String {
        format!(
            "`{}`: `precision` is w4a8, and no matrix of this model is stored in whole numbers of 4 bits with factors of groups, in the order of \
             its columns (not GPTQ's `desc_act`): choose `int8`, or a checkpoint that is quantized so (docs/models.md)",
            model.display()
        )
    }
}

impl ModelSize {
    pub fn of(config: &Config) -> ModelSize {
        // Whatever form the checkpoint stores experts in, these are the matrices that are computed with.
        let mut config = config.clone();
        config
            .experts
            .iter_mut()
            .for_each(|experts| experts.form = ExpertForm::Matrices);
        let tensors = ModelTensors::of(&config);
        let inputs = tensors.inputs.as_ref().map(|inputs| &inputs.table);
        let tables = [Some(&tensors.embedding), tensors.head.as_ref(), inputs];
        let is_table = |tensor: &TensorSpec| tables.contains(&Some(tensor));
        let mut size = ModelSize {
            tables: 0,
            linear: 0,
            of_heads: config.latent.map_or(0, |latent| {
                let shape = latent.shape;
                let of_layer = config.heads.heads * (shape.plain_dim + shape.value_dim) * shape.rank;
                (config.layers.len() * of_layer) as u64
            }),
            vectors: 0,
            coded: CodedSize::default(),
            adapters: 0,
            unused_by_a_token: config.experts.as_ref().map_or(0, |experts| {
                let layers = experts.layers.iter().filter(|has_experts| **has_experts).count();
                let matrices = if config.activation.has_gate() { 3 } else { 2 };
                let unused = layers * (experts.count - experts.routing.per_token);
                (unused * matrices * config.hidden_size * experts.intermediate_size) as u64
            }),
        };
        for tensor in tensors.all() {
            let values = (tensor.rows.unwrap_or(1) * tensor.columns) as u64;
            match tensor.rows {
                None => size.vectors += values,
                Some(_) if is_table(tensor) => size.tables += values,
                Some(_) => size.linear += values,
            }
        }
        size
    }

    /// The size of a model at a precision: in four bits, with the weights that stay so.
    ///
    /// # Errors
    /// In four bits: no weights are stored so; a matrix is missing or has another shape.
    pub fn at(precision: Precision, source: &dyn WeightSource, config: &Config) -> Result<ModelSize, ModelError> {
        let size = ModelSize::of(config);
        if precision != Precision::W4a8 {
            return Ok(size);
        }
        let coded = CodedSize::of(source, config)?;
        if coded.values == 0 {
            return Err(ModelError::Options(CodedSize::refusal(source.path_of(""))));
        }
        Ok(size.with_codes(coded))
    }

    /// The model of which these weights are stored in codes of four bits.
    #[must_use]
    pub fn with_codes(self, coded: CodedSize) -> ModelSize {
        ModelSize { coded, ..self }
    }

    /// Number of parameters. A table that is also the output head counts once.
    pub fn parameters(&self) -> u64 {
        self.tables + self.linear + self.vectors
    }

    /// Number of parameters that a token uses, of experts only those that the router chooses.
    pub fn active_parameters(&self) -> u64 {
        self.parameters() - self.unused_by_a_token
    }

    /// Bytes of the linear layers' matrices at a precision, without scales and padding, but with the factors of codes.
    pub fn linear_bytes(&self, precision: Precision) -> u64 {
        let coded = match precision {
            Precision::W4a8 => self.coded,
            _ => CodedSize::default(),
        };
        self.linear.saturating_sub(coded.values) * u64::from(precision.bits()) / 8 + coded.bytes
    }

    /// Bytes of the weights on a device, without scales and padding. `stored` is the format of the
    /// checkpoint's files, in which a CPU keeps them at F32.
    pub fn weight_bytes(&self, place: Place, precision: Precision, stored: Dtype) -> u64 {
        let vectors = self.vectors * VECTOR_VALUE_BYTES;
        let matrices = match (place, precision) {
            (Place::Cpu, Precision::F32) => (self.linear + self.tables) * stored.bytes() as u64,
            (Place::Cpu, _) => self.linear_bytes(precision) + self.tables * u64::from(precision.bits()) / 8,
            (Place::Gpu, _) => {
                // A GPU keeps matrices of single heads in BF16, too.
                let more_bits = u64::from(16u32.saturating_sub(precision.bits()));
                self.linear_bytes(precision) + self.gpu_table_bytes() + self.of_heads * more_bits / 8
            }
        };
        let adapter_value_bytes = match precision {
            Precision::F32 => 4,
            Precision::Int8 => 1,
            Precision::Bf16 | Precision::Fp8 | Precision::W4a8 => 2,
        };
        matrices + vectors + self.adapters * adapter_value_bytes
    }

    /// Bytes of the embedding table and the output head on a GPU, which keeps them in BF16.
    pub fn gpu_table_bytes(&self) -> u64 {
        self.tables * 2
    }
}

/// The number format in which most weights are read. `stored`: that of most bytes of the files, if it is known.
pub fn read_as(config: &Config, stored: Option<Dtype>) -> Dtype {
    match config.expert_form() {
        // MXFP4 is read as BF16, which holds its numbers exactly.
        ExpertForm::Mxfp4 => Dtype::Bf16,
        ExpertForm::Matrices | ExpertForm::Transposed | ExpertForm::TransposedHalves => stored.unwrap_or(Dtype::F32),
    }
}

/// Bytes of keys and values of a sequence of `tokens` tokens, in whole blocks, of which layers with
/// windows keep those of the last window, and of its states in recurrent layers. `None`: the device
/// keeps none in this format.
pub fn kv_bytes(config: &Config, place: Place, format: KvFormat, tokens: u32) -> Option<u64> {
    let layout = KvLayout::of(config);
    let block_bytes = match place {
        Place::Cpu if format == KvFormat::Fp8 => return None,
        Place::Cpu => cpu::kv_block_bytes(&layout.shapes, format),
        Place::Gpu => cuda::kv_block_bytes(&layout.shapes, format)?,
    };
    let block_tokens = place.block_tokens();
    let held = |kind: &KvSpec| {
        let first = kind.first_needed(tokens.saturating_sub(1)) / block_tokens;
        u64::from(tokens.div_ceil(block_tokens) - first)
    };
    let blocks: u64 = layout.tables.iter().map(held).sum();
    Some(blocks * (block_bytes * layout.pools) as u64 + config.state_bytes())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::model::shapes::named;

    #[test]
    fn parameters_are_those_of_the_published_model() {
        let size = ModelSize::of(&named("qwen3-8b").unwrap().unwrap());
        // The number that the hub shows for Qwen3-8B.
        assert_eq!(size.parameters(), 8_190_735_360);
        // The table is also the output head, and counts once.
        let size = ModelSize::of(&named("qwen3-0.6b").unwrap().unwrap());
        assert_eq!(size.parameters(), 596_049_920);
    }

    /// The keys of gpt-oss-20b.
    const GPT_OSS_20B: &str = r#"{"architectures": ["GptOssForCausalLM"], "head_dim": 64, "hidden_size": 2880,
        "intermediate_size": 2880, "num_attention_heads": 64, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088, "tie_word_embeddings": false,
        "quantization_config": {"quant_method": "mxfp4"}, "rope_scaling": {"rope_type": "yarn", "factor": 32.0}}"#;

    #[test]
    fn active_parameters_are_those_of_the_chosen_experts() {
        let size = ModelSize::of(&Config::parse(Path::new("config.json"), GPT_OSS_20B).unwrap());
        // Its model card says 20.91 B in all, and 3.61 B active without the embedding table.
        assert_eq!(size.parameters(), 20_914_757_184);
        let table = 201_088 * 2880;
        assert_eq!((size.active_parameters() - table) / 10_000_000, 361);
    }

    #[test]
    fn weights_take_the_bytes_of_their_format() {
        let size = ModelSize {
            tables: 100,
            linear: 1000,
            of_heads: 0,
            vectors: 10,
            unused_by_a_token: 0,
            coded: CodedSize {
                values: 800,
                bytes: 425,
            },
            adapters: 0,
        };
        for (place, precision, stored, bytes) in [
            (Place::Cpu, Precision::F32, Dtype::F32, 4440),
            (Place::Cpu, Precision::F32, Dtype::Bf16, 2240),
            (Place::Cpu, Precision::Bf16, Dtype::F32, 2240),
            (Place::Cpu, Precision::Int8, Dtype::Bf16, 1140),
            (Place::Cpu, Precision::W4a8, Dtype::F32, 765),
            (Place::Gpu, Precision::Bf16, Dtype::F32, 2240),
            (Place::Gpu, Precision::Int8, Dtype::Bf16, 1240),
            (Place::Gpu, Precision::Fp8, Dtype::Bf16, 1240),
            (Place::Gpu, Precision::W4a8, Dtype::Bf16, 865),
        ] {
            assert_eq!(
                size.weight_bytes(place, precision, stored),
                bytes,
                "{place:?} {precision:?} {stored:?}"
            );
        }
        let with_adapters = ModelSize { adapters: 5, ..size };
        for (precision, more) in [
            (Precision::Int8, 5),
            (Precision::W4a8, 10),
            (Precision::Bf16, 10),
            (Precision::F32, 20),
        ] {
            let bytes = |size: ModelSize| size.weight_bytes(Place::Cpu, precision, Dtype::Bf16);
            assert_eq!(bytes(with_adapters), bytes(size) + more);
        }
    }

    #[test]
    fn keys_and_values_take_whole_blocks() {
        let config = named("llama-3.1-8b").unwrap().unwrap();
        // 32 layers, 8 KV heads of 128 dimensions, keys and values, 2 bytes each.
        let token = 32 * 8 * 128 * 2 * 2;
        assert_eq!(kv_bytes(&config, Place::Cpu, KvFormat::Bf16, 16), Some(16 * token));
        assert_eq!(kv_bytes(&config, Place::Cpu, KvFormat::Bf16, 17), Some(32 * token));
        assert_eq!(kv_bytes(&config, Place::Gpu, KvFormat::Bf16, 1), Some(64 * token));
        // FP8 has a scale for each of the keys and values of a token and head.
        assert_eq!(
            kv_bytes(&config, Place::Gpu, KvFormat::Fp8, 64),
            Some(64 * (token / 2 + 32 * 8 * 2 * 4))
        );
        // With windows of 128 in half of the layers, 12 of 24: at most 8 whole blocks and one that moves.
        let windows = Config::parse(Path::new("config.json"), GPT_OSS_20B).unwrap();
        let layer_block = 16 * 8 * 64 * 2 * 2;
        let at = |tokens| kv_bytes(&windows, Place::Cpu, KvFormat::Bf16, tokens).unwrap() / layer_block;
        assert_eq!(
            (at(16), at(128), at(160), at(1 << 17)),
            (24, 12 * 16, 12 * (10 + 8), 12 * (8192 + 8))
        );
        // A latent of 512 numbers and a key of 64 in each of 61 layers, which are key and value.
        let latents = r#"{"architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "intermediate_size": 18432,
            "num_hidden_layers": 61, "num_attention_heads": 128, "vocab_size": 129280}"#;
        let latents = Config::parse(Path::new("config.json"), latents).unwrap();
        let token = 61 * (512 + 64);
        assert_eq!(kv_bytes(&latents, Place::Cpu, KvFormat::F32, 17), Some(32 * token * 4));
        for format in [KvFormat::Bf16, KvFormat::Int8, KvFormat::Int4] {
            assert_eq!(kv_bytes(&latents, Place::Cpu, format, 16), Some(16 * token * 2));
        }
        for format in [KvFormat::Bf16, KvFormat::Int8, KvFormat::Fp8] {
            assert_eq!(kv_bytes(&latents, Place::Gpu, format, 64), Some(64 * token * 2));
        }
        assert_eq!(kv_bytes(&latents, Place::Gpu, KvFormat::Int4, 64), None);
        // Matrices of heads in BF16, of which 8 bits would be half.
        let size = ModelSize::of(&latents);
        let in_8_bits = size.linear + size.tables * 2 + size.vectors * VECTOR_VALUE_BYTES;
        let more = 61 * 128 * (128 + 128) * 512;
        assert_eq!(
            size.weight_bytes(Place::Gpu, Precision::Int8, Dtype::Bf16),
            in_8_bits + more
        );
        // Nemotron 3 Nano, whose card gives 31.6 B parameters, of which a token uses 3.6 B: experts have no gates.
        let nano = r#"{"architectures": ["NemotronHForCausalLM"], "hidden_size": 2688, "intermediate_size": 1856,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "head_dim": 128,
            "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "n_routed_experts": 128,
            "num_attention_heads": 32, "num_key_value_heads": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712, "vocab_size": 131072}"#;
        let nano = ModelSize::of(&Config::parse(Path::new("config.json"), nano).unwrap());
        assert_eq!(
            (nano.parameters() / 100_000_000, nano.active_parameters() / 100_000_000),
            (315, 35)
        );
        // The number that its model card gives, with 671 B without the layer that predicts further tokens.
        assert_eq!(ModelSize::of(&latents).parameters() / 1_000_000_000, 671);
        assert_eq!(kv_bytes(&config, Place::Cpu, KvFormat::Fp8, 64), None);
        assert_eq!(kv_bytes(&config, Place::Gpu, KvFormat::F32, 64), None);
        assert_eq!(kv_bytes(&config, Place::Gpu, KvFormat::Int4, 64), None);
    }
}
