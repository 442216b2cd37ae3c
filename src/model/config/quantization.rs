//! Reads how a checkpoint's weights are quantized.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::reader::{Reader, read_json, short};
use crate::model::error::ModelError;
use crate::model::quantized::{Blocks, Method, Quantization};

/// The key that describes quantized weights.
pub(super) const KEY: &str = "quantization_config";
/// Maximum rows or columns of a block.
const BLOCK_MAX: u64 = 1 << 16;

/// What to do where weights are quantized in a form that is not read.
pub(super) const TAKE_UNQUANTIZED: &str =
    "take the checkpoint in BF16, F16 or F32, which a job's `precision` quantizes";

/// Files of ModelOpt, GPTQ, AWQ and AutoRound that describe quantized weights where `config.json` is
/// silent about them.
const QUANTIZATION_FILES: [&str; 4] = [
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
];

/// Keys that say how weights were found, or how fast they shall be multiplied, and not what is stored.
/// Which matrices are stored plainly, and in how many bits others are, the files say themselves.
const AWQ_NOTES: [&str; 9] = [
    "backend",
    "bits",
    "do_fuse",
    "exllama_config",
    "fuse_max_seq_len",
    "group_size",
    "modules_to_fuse",
    "modules_to_not_convert",
    "sym",
];
const GPTQ_NOTES: [&str; 32] = [
    "act_group_aware",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "desc_act",
    "device",
    "dynamic",
    "exllama_config",
    "group_size",
    "hyb_act",
    "lm_head",
    "max_input_length",
    "meta",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "modules_to_not_convert",
    "mse",
    "offload_to_disk",
    "offload_to_disk_path",
    "pad_token_id",
    "static_groups",
    "sym",
    "tokenizer",
    "true_sequential",
    "use_exllama",
];

/// A key and its value.
type Field<'a> = (&'a str, &'a Value);

impl Reader<'_> {
    /// How weights are quantized. `None`: they are stored plainly, or in a form that is refused elsewhere.
    ///
    /// # Errors
    /// Something is said of them that is not known.
    pub(super) fn quantization(&self) -> Result<Option<Quantization>, ModelError> {
        let Some(Value::Object(map)) = self.get(KEY) else {
            return Ok(None);
        };
        let method = map.get("quant_method").and_then(Value::as_str);
        let (method, is_known): (Method, fn(Field<'_>) -> bool) = match method {
            Some("fp8") => (Method::Fp8, is_known_of_fp8),
            Some("fbgemm_fp8") => (Method::Fp8, is_known_of_fbgemm),
            Some("compressed-tensors") => (Method::CompressedTensors, is_known_of_compressed_tensors),
            Some("modelopt") => (Method::ModelOpt, is_known_of_modelopt),
            Some("awq") => (Method::Awq, is_known_of_awq),
            Some("gptq") => {
                let is_second = |name: &str| map.get(name).is_some_and(|value| value == "gptq_v2");
                let zeros_less_one = !is_second("checkpoint_format") && !is_second("format");
                (Method::Gptq { zeros_less_one }, is_known_of_gptq)
            }
            Some("bitsandbytes") => (Method::BitsAndBytes, is_known_of_bitsandbytes),
            _ => return Ok(None),
        };
        for (key, value) in map {
            // Without zero points AWQ has another form.
            let is_unset = value.is_null() || (value == &Value::Bool(false) && key != "zero_point");
            if key != "quant_method" && !is_unset && !is_known((key, value)) {
                return Err(self.option(&format!("{KEY}."), key, value));
            }
        }
        if let (Some(a), Some(b)) = (map.get("checkpoint_format"), map.get("format"))
            && matches!(method, Method::Gptq { .. })
            && a != b
        {
            return Err(self.broken(format!("`{KEY}` has {} and {} as formats", short(a), short(b))));
        }
        let weights = || groups_of_weights(map);
        // Where groups differ, a matrix' tensors tell to which it belongs.
        let has_zeros =
            weights().next().is_some() && weights().all(|of| of.get("symmetric") == Some(&Value::Bool(false)));
        let is_reordered = |of: &Value| {
            of.get("actorder")
                .is_some_and(|order| order == "group" || order == "dynamic")
        };
        Ok(Some(Quantization {
            blocks: self.factor_blocks(map)?,
            has_zeros,
            has_column_groups: match method {
                Method::Gptq { .. } => map.get("desc_act") == Some(&Value::Bool(true)),
                _ => weights().next().is_some() && weights().all(is_reordered),
            },
            ..method.into()
        }))
    }

    /// The size of blocks with one factor.
    fn factor_blocks(&self, map: &Map<String, Value>) -> Result<Option<Blocks>, ModelError> {
        let key = "config_groups.weights.block_structure";
        let of_groups = groups_of_weights(map).map(|weights| (key, weights.get("block_structure")));
        let of_all = [("weight_block_size", map.get("weight_block_size"))];
        let mut found: Option<Blocks> = None;
        for (key, value) in of_all.into_iter().chain(of_groups) {
            let Some(value) = value.filter(|value| !value.is_null()) else {
                continue;
            };
            let sides: Option<Vec<u64>> = match value {
                Value::String(text) => text.split('x').map(|side| side.parse().ok()).collect(),
                other => other
                    .as_array()
                    .and_then(|sides| sides.iter().map(Value::as_u64).collect()),
            };
            let blocks = match sides.as_deref() {
                Some(&[rows @ 1..=BLOCK_MAX, columns @ 1..=BLOCK_MAX]) => Blocks {
                    rows: rows as usize,
                    columns: columns as usize,
                },
                _ => {
                    return Err(self.broken(format!(
                        "`{KEY}.{key}` is {}, not two whole numbers from 1 to {BLOCK_MAX}",
                        short(value)
                    )));
                }
            };
            if found.is_some_and(|found| found != blocks) {
                return Err(self.unsupported(format!("`{KEY}` has blocks of several sizes; {TAKE_UNQUANTIZED}")));
            }
            found = Some(blocks);
        }
        Ok(found)
    }
}

/// What is said of the weights of each group of matrices.
fn groups_of_weights(map: &Map<String, Value>) -> impl Iterator<Item = &Value> {
    let groups = map.get("config_groups").and_then(Value::as_object);
    groups
        .into_iter()
        .flat_map(Map::values)
        .filter_map(|group| group.get("weights"))
}

fn is_known_of_fp8((key, value): Field<'_>) -> bool {
    match key {
        "activation_scheme" => value == "dynamic" || value == "static",
        "fmt" => value == "e4m3" || value == "float8_e4m3fn",
        // Where they are `ue8m0`, factors are powers of 2, and stored as F32 nevertheless.
        "scale_fmt" => value == "ue8m0" || value == "float",
        // What transformers 5 writes besides.
        "expert_dtype" => value == "fp8",
        "weight_block_size" => true,
        // Which matrices are stored plainly. Their number format says so, too.
        "modules_to_not_convert" | "ignored_layers" | "ignore" => true,
        _ => false,
    }
}

fn is_known_of_fbgemm((key, _): Field<'_>) -> bool {
    matches!(key, "activation_scale_ub" | "modules_to_not_convert")
}

fn is_known_of_compressed_tensors((key, value): Field<'_>) -> bool {
    let is_empty = value.as_object().is_some_and(Map::is_empty);
    match key {
        "config_groups" => value
            .as_object()
            .is_some_and(|groups| groups.values().all(is_known_group)),
        "format" => is_known_format(value),
        "quantization_status" => value == "compressed" || value == "frozen",
        // Weights of which most are 0 are stored in forms of their own.
        "sparsity_config" => is_empty || value.get("format").is_some_and(|format| format == "dense"),
        // Rotations, some of which are computed with each token.
        "transform_config" => is_empty,
        "global_compression_ratio" | "ignore" | "kv_cache_scheme" | "run_compressed" | "version" => true,
        _ => false,
    }
}

fn is_known_format(value: &Value) -> bool {
    let formats = [
        "float-quantized",
        "int-quantized",
        "mixed-precision",
        "mxfp4-pack-quantized",
        "naive-quantized",
        "nvfp4-pack-quantized",
        "pack-quantized",
    ];
    value.as_str().is_some_and(|format| formats.contains(&format))
}

/// Whether it is known what a group of matrices is stored as. A list names matrices of a form that the
/// group's name says.
fn is_known_group(group: &Value) -> bool {
    let Value::Object(group) = group else {
        return group.is_array();
    };
    group.iter().all(|(key, value)| match key.as_str() {
        "weights" => value.as_object().is_none_or(is_known_of_weights),
        "format" => value.is_null() || is_known_format(value),
        "input_activations" | "output_activations" | "targets" => true,
        _ => value.is_null(),
    })
}

fn is_known_of_weights(weights: &Map<String, Value>) -> bool {
    weights.iter().all(|(key, value)| match key.as_str() {
        "type" => value == "int" || value == "float",
        "strategy" => {
            let strategies = ["tensor", "channel", "group", "block", "tensor_group"];
            value.is_null() || value.as_str().is_some_and(|strategy| strategies.contains(&strategy))
        }
        "dynamic" => value.is_null() || value == &Value::Bool(false),
        "actorder" | "block_structure" | "group_size" | "num_bits" | "observer" | "observer_kwargs" | "scale_dtype"
        | "symmetric" | "zp_dtype" => true,
        _ => value.is_null(),
    })
}

fn is_known_of_modelopt((key, value): Field<'_>) -> bool {
    match key {
        "quant_algo" => {
            let algorithms = ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MIXED_PRECISION"];
            value.as_str().is_some_and(|algorithm| algorithms.contains(&algorithm))
        }
        "config_groups"
        | "exclude_modules"
        | "group_size"
        | "ignore"
        | "kv_cache_quant_algo"
        | "kv_cache_scheme"
        | "producer"
        | "quantized_layers" => true,
        _ => false,
    }
}

fn is_known_of_awq((key, value): Field<'_>) -> bool {
    match key {
        "version" | "format" => value
            .as_str()
            .is_some_and(|version| version.eq_ignore_ascii_case("gemm")),
        "zero_point" => value == &Value::Bool(true),
        _ => AWQ_NOTES.contains(&key),
    }
}

fn is_known_of_gptq((key, value): Field<'_>) -> bool {
    match key {
        "bits" => [2, 4, 8].iter().any(|bits| value == bits),
        "checkpoint_format" | "format" => value == "gptq" || value == "gptq_v2",
        "method" => value == "gptq",
        "pack_dtype" => value == "int32",
        _ => GPTQ_NOTES.contains(&key),
    }
}

fn is_known_of_bitsandbytes((key, value): Field<'_>) -> bool {
    match key {
        "bnb_4bit_quant_type" => value == "nf4" || value == "fp4",
        "bnb_4bit_quant_storage" => value == "uint8",
        "load_in_4bit"
        | "load_in_8bit"
        | "_load_in_4bit"
        | "_load_in_8bit"
        | "bnb_4bit_compute_dtype"
        | "bnb_4bit_use_double_quant"
        | "llm_int8_enable_fp32_cpu_offload"
        | "llm_int8_skip_modules"
        | "llm_int8_threshold" => true,
        _ => false,
    }
}

/// The file of a checkpoint folder that describes quantized weights in `config.json`'s place. `None`:
/// `config.json` describes them, or there is no such file.
///
/// # Errors
/// The folder or `config.json` cannot be read.
pub fn quantization_file(dir: &Path) -> Result<Option<PathBuf>, ModelError> {
    file_beside(dir, &read_json(&dir.join("config.json"))?)
}

/// As [`quantization_file`], with what `config.json` holds.
///
/// # Errors
/// The folder cannot be read.
pub(super) fn file_beside(dir: &Path, config: &Map<String, Value>) -> Result<Option<PathBuf>, ModelError> {
    let text = config.get("text_config").and_then(Value::as_object);
    if [Some(config), text]
        .into_iter()
        .flatten()
        .any(|map| map.get(KEY).is_some_and(|value| !value.is_null()))
    {
        return Ok(None);
    }
    for name in QUANTIZATION_FILES {
        let path = dir.join(name);
        if path.try_exists().map_err(|e| ModelError::read(&path, e))? {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

/// What such a file says, as `config.json` would say it.
///
/// # Errors
/// The file cannot be read, or is in a form that is not known.
pub(super) fn described_by(path: &Path) -> Result<Value, ModelError> {
    let map = read_json(path)?;
    let method = map.get("quant_method").and_then(Value::as_str);
    let name = path.file_name().and_then(|name| name.to_str());
    let described = match (name, map.get("quantization"), method) {
        (Some("hf_quant_config.json"), Some(Value::Object(quantization)), None) => {
            Some((quantization.clone(), "modelopt"))
        }
        (Some("quantize_config.json"), None, None | Some("gptq")) => Some((map.clone(), "gptq")),
        (Some("quant_config.json"), None, None | Some("awq")) => {
            let named = map.iter().map(|(key, value)| {
                let key = match key.as_str() {
                    "w_bit" => "bits",
                    "q_group_size" => "group_size",
                    other => other,
                };
                (key.to_owned(), value.clone())
            });
            Some((named.collect(), "awq"))
        }
        _ => None,
    };
    let Some((mut described, method)) = described else {
        let says = short(&Value::Object(map));
        let why = format!(
            "the weights of this checkpoint are quantized ({says}) in a form that is not read; {TAKE_UNQUANTIZED}"
        );
        return Err(ModelError::unsupported(path, why));
    };
    described.insert("quant_method".to_owned(), Value::String(method.to_owned()));
    Ok(Value::Object(described))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::Config;

    fn parsed(quantization: &Value) -> Result<Option<Quantization>, String> {
        let text = serde_json::json!({"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100});
        let mut plain = text.clone();
        plain["architectures"] = serde_json::json!(["Qwen3ForCausalLM"]);
        plain["quantization_config"] = quantization.clone();
        let images = serde_json::json!({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text,
            "quantization_config": quantization});
        let [plain, images] = [plain, images].map(|config| {
            let config = Config::parse(Path::new("config.json"), &config.to_string());
            config.map(|config| config.quantization).map_err(|e| e.to_string())
        });
        assert_eq!(plain, images);
        plain
    }

    /// What published checkpoints say.
    fn published() -> Vec<(Value, Quantization)> {
        let of = Quantization::from;
        let block = |method, rows, columns| Quantization {
            blocks: Some(Blocks { rows, columns }),
            ..of(method)
        };
        let reordered = |method| Quantization {
            has_column_groups: true,
            ..of(method)
        };
        let fp8 = serde_json::json!({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
            "weight_block_size": [128, 64], "modules_to_not_convert": ["lm_head"], "dequantize": false});
        let whole =
            serde_json::json!({"activation_scheme": "static", "quant_method": "fp8", "ignored_layers": ["lm_head"]});
        let fbgemm = serde_json::json!({"activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"],
            "quant_method": "fbgemm_fp8"});
        let weights = serde_json::json!({"actorder": null, "block_structure": null, "dynamic": false, "group_size": null,
            "num_bits": 8, "observer": "minmax", "observer_kwargs": {}, "strategy": "channel", "symmetric": true,
            "type": "float"});
        let mut blocks = weights.clone();
        blocks["block_structure"] = serde_json::json!([128, 128]);
        blocks["strategy"] = "block".into();
        let [tensors, in_blocks] = [weights, blocks].map(|weights| {
            serde_json::json!({
                "config_groups": {"group_0": {"input_activations": {"dynamic": true}, "output_activations": null,
                    "targets": ["Linear"], "weights": weights}},
                "format": "float-quantized", "global_compression_ratio": 1.4, "ignore": ["lm_head"], "kv_cache_scheme": null,
                "quant_method": "compressed-tensors", "quantization_status": "compressed",
                "sparsity_config": {"format": "dense"}, "transform_config": {}, "version": "0.11"})
        });
        let modelopt = serde_json::json!({"config_groups": {"group_0": {"targets": ["Linear"]}}, "ignore": ["lm_head"],
            "quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 8}, "producer": {"name": "modelopt"},
            "quant_method": "modelopt"});
        let awq = serde_json::json!({"bits": 4, "group_size": 128, "modules_to_not_convert": null, "quant_method": "awq",
            "version": "gemm", "zero_point": true});
        let gptq = serde_json::json!({"bits": 4, "checkpoint_format": "gptq", "damp_percent": 0.01, "desc_act": true,
            "group_size": 128, "model_file_base_name": null, "model_name_or_path": null, "quant_method": "gptq",
            "static_groups": false, "sym": true, "true_sequential": true});
        let mut second = gptq.clone();
        second["checkpoint_format"] = "gptq_v2".into();
        second["desc_act"] = false.into();
        let bitsandbytes = serde_json::json!({"_load_in_4bit": true, "_load_in_8bit": false, "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": true,
            "llm_int8_enable_fp32_cpu_offload": false, "llm_int8_has_fp16_weight": false, "llm_int8_skip_modules": null,
            "llm_int8_threshold": 6.0, "load_in_4bit": true, "load_in_8bit": false, "quant_method": "bitsandbytes"});
        vec![
            (fp8, block(Method::Fp8, 128, 64)),
            (whole, of(Method::Fp8)),
            (fbgemm, of(Method::Fp8)),
            (tensors, of(Method::CompressedTensors)),
            (in_blocks, block(Method::CompressedTensors, 128, 128)),
            (modelopt, of(Method::ModelOpt)),
            (awq, of(Method::Awq)),
            (gptq, reordered(Method::Gptq { zeros_less_one: true })),
            (second, of(Method::Gptq { zeros_less_one: false })),
            (bitsandbytes, of(Method::BitsAndBytes)),
        ]
    }

    #[test]
    fn published_quantizations_are_read() {
        for (config, want) in published() {
            assert_eq!(parsed(&config), Ok(Some(want)), "{config}");
        }
        assert_eq!(parsed(&Value::Null), Ok(None));
    }

    #[test]
    fn what_is_not_known_of_a_quantization_is_refused_by_name() {
        for (config, _) in published() {
            let mut changed = config.clone();
            changed["something_new"] = 3.into();
            let error = parsed(&changed).unwrap_err();
            assert!(error.contains("`quantization_config.something_new` (3)"), "{error}");
            assert!(error.contains("take the checkpoint in BF16"), "{error}");
        }
        for (at, key, value) in [
            (0, "activation_scheme", serde_json::json!("mixed")),
            (0, "fmt", serde_json::json!("e5m2")),
            (0, "scale_fmt", serde_json::json!("e5m2")),
            (3, "format", serde_json::json!("marlin-24")),
            (3, "sparsity_config", serde_json::json!({"format": "sparse-24-bitmask"})),
            (3, "transform_config", serde_json::json!({"config_groups": {"u": {}}})),
            (3, "quantization_status", serde_json::json!("initialized")),
            (
                3,
                "config_groups",
                serde_json::json!({"group_0": {"targets": [], "weights": {"type": "complex"}}}),
            ),
            (
                3,
                "config_groups",
                serde_json::json!({"group_0": {"targets": [], "weights": {"dynamic": true}}}),
            ),
            (
                3,
                "config_groups",
                serde_json::json!({"group_0": {"targets": [], "weights": {"strategy": "token"}}}),
            ),
            (
                3,
                "config_groups",
                serde_json::json!({"group_0": {"targets": [], "format": "dense-ish"}}),
            ),
            (5, "quant_algo", serde_json::json!("W4A8_AWQ")),
            (6, "version", serde_json::json!("gemv")),
            (7, "bits", serde_json::json!(3)),
            (7, "checkpoint_format", serde_json::json!("marlin")),
            (7, "pack_dtype", serde_json::json!("int16")),
            (9, "bnb_4bit_quant_storage", serde_json::json!("bfloat16")),
            (9, "bnb_4bit_quant_type", serde_json::json!("af4")),
        ] {
            let mut changed = published()[at].0.clone();
            changed[key] = value;
            let error = parsed(&changed).unwrap_err();
            assert!(error.contains(&format!("`quantization_config.{key}`")), "{error}");
        }
        // Neutral in all other formats.
        let mut without_zeros = published()[6].0.clone();
        without_zeros["zero_point"] = false.into();
        let error = parsed(&without_zeros).unwrap_err();
        assert!(error.contains("`quantization_config.zero_point` (false)"), "{error}");
        let mut two = published()[7].0.clone();
        two["format"] = "gptq_v2".into();
        let error = parsed(&two).unwrap_err();
        assert!(error.contains("\"gptq\" and \"gptq_v2\" as formats"), "{error}");
    }

    #[test]
    fn blocks_have_one_size_that_can_be() {
        let of = |size: Value| parsed(&serde_json::json!({"quant_method": "fp8", "weight_block_size": size}));
        for size in [
            serde_json::json!([128]),
            serde_json::json!([128, 0]),
            serde_json::json!(128),
            serde_json::json!([128, 1 << 20]),
        ] {
            let error = of(size).unwrap_err();
            assert!(error.contains("not two whole numbers"), "{error}");
        }
        let groups = |sizes: [Value; 2]| {
            let [a, b] = sizes.map(|size| serde_json::json!({"targets": [], "weights": {"block_structure": size}}));
            parsed(&serde_json::json!({"quant_method": "compressed-tensors", "config_groups": {"a": a, "b": b}}))
        };
        let found = groups([serde_json::json!("2x4"), serde_json::json!([2, 4])])
            .unwrap()
            .unwrap();
        assert_eq!(found.blocks, Some(Blocks { rows: 2, columns: 4 }));
        let error = groups([serde_json::json!([2, 4]), serde_json::json!([4, 4])]).unwrap_err();
        assert!(error.contains("blocks of several sizes"), "{error}");
    }

    #[test]
    fn other_forms_are_refused() {
        for other in [
            serde_json::json!({"quant_method": "hqq"}),
            serde_json::json!({"bits": 4}),
        ] {
            let error = parsed(&other).unwrap_err();
            assert!(
                error.contains("`quantization_config` (") && error.contains("take the checkpoint in BF16"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_file_speaks_where_the_configuration_is_silent() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, value: Value| std::fs::write(dir.path().join(name), value.to_string()).unwrap();
        let described = || described_by(&quantization_file(dir.path()).unwrap().unwrap());
        write("config.json", serde_json::json!({"quantization_config": null}));
        assert_eq!(quantization_file(dir.path()).unwrap(), None);
        write(
            "quant_config.json",
            serde_json::json!({"w_bit": 4, "q_group_size": 128, "version": "GEMM", "zero_point": true}),
        );
        let want = serde_json::json!({"bits": 4, "group_size": 128, "version": "GEMM", "zero_point": true, "quant_method": "awq"});
        assert_eq!(described().unwrap(), want);
        write("quantize_config.json", serde_json::json!({"bits": 4}));
        assert_eq!(
            described().unwrap(),
            serde_json::json!({"bits": 4, "quant_method": "gptq"})
        );
        write(
            "hf_quant_config.json",
            serde_json::json!({"producer": {}, "quantization": {"quant_algo": "FP8"}}),
        );
        assert_eq!(
            described().unwrap(),
            serde_json::json!({"quant_algo": "FP8", "quant_method": "modelopt"})
        );
        write("hf_quant_config.json", serde_json::json!({"algorithm": "FP8"}));
        let error = described().unwrap_err().to_string();
        assert!(error.contains("in a form that is not read"), "{error}");
        for said in [
            serde_json::json!({"quantization_config": {}}),
            serde_json::json!({"text_config": {"quantization_config": {}}}),
        ] {
            write("config.json", said);
            assert_eq!(quantization_file(dir.path()).unwrap(), None);
        }
    }
}
