//! `gristmill quantize` of small models of several kinds: what stays in a checkpoint's own formats, and schemes other than `int8`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use gristmill::device::{Dtype as Format, Precision};
use gristmill::model::quantize::compare::{self, distance};
use gristmill::model::{LoadOptions, Transformer};
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors, serialize};
use serde_json::{Value, json};

use crate::commands::run;
use crate::model_jobs;
use crate::model_reference::harness::{Reference, options};
use crate::support::arg;

/// A tensor's shape and numbers.
type Numbers = (Vec<usize>, Vec<f32>);

fn numbers(dtype: Dtype, data: &[u8]) -> Vec<f32> {
    let halves = || data.as_chunks::<2>().0.iter().copied();
    match dtype {
        Dtype::F32 => data.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect(),
        Dtype::F16 => halves().map(|x| f16::from_le_bytes(x).to_f32()).collect(),
        Dtype::BF16 => halves().map(|x| bf16::from_le_bytes(x).to_f32()).collect(),
        Dtype::I8 => data.iter().map(|x| f32::from(x.cast_signed())).collect(),
        other => panic!("{other:?}"),
    }
}

/// The tensors of all weight files of a folder.
fn tensors(folder: &Path) -> BTreeMap<String, Numbers> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if !(name.starts_with("model") && name.ends_with(".safetensors")) {
            continue;
        }
        let bytes = fs::read(&path).unwrap();
        for (name, tensor) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let shape = tensor.shape().to_vec();
            found.insert(name, (shape, numbers(tensor.dtype(), tensor.data())));
        }
    }
    found
}

/// Writes a folder's tensors again, in one file.
fn write(folder: &Path, tensors: &BTreeMap<String, Numbers>, format: Format) {
    let stored = tensors.iter().map(|(name, (shape, numbers))| {
        let mut bytes = Vec::new();
        assert!(numbers.iter().all(|x| format.append(*x, &mut bytes)), "{name}");
        (name, shape, bytes)
    });
    let stored: Vec<_> = stored.collect();
    let dtype = match format {
        Format::F32 => Dtype::F32,
        Format::F16 => Dtype::F16,
        Format::Bf16 => Dtype::BF16,
    };
    let views = stored.iter().map(|(name, shape, bytes)| {
        let view = safetensors::tensor::TensorView::new(dtype, shape.to_vec(), bytes);
        (name, view.unwrap())
    });
    fs::write(folder.join("model.safetensors"), serialize(views, None).unwrap()).unwrap();
}

/// Magnitudes of channels, of which each is eight times as large as the one before, and then again.
fn write_magnitudes(model: &Path, layers: usize, widths: [usize; 4]) {
    let kinds = ["attention_norm", "attended", "mlp_norm", "gated"];
    let bytes = |width: usize| -> Vec<u8> {
        let magnitudes = (0..width).map(|i| 8f32.powi((i * 5 % 8) as i32));
        magnitudes.flat_map(f32::to_le_bytes).collect()
    };
    let stored: Vec<(String, usize, Vec<u8>)> = (0..layers)
        .flat_map(|layer| {
            let of_kind = kinds.into_iter().zip(widths);
            of_kind.map(move |(kind, width)| (format!("layers.{layer}.{kind}"), width, bytes(width)))
        })
        .collect();
    let views = stored.iter().map(|(name, width, bytes)| {
        let view = safetensors::tensor::TensorView::new(Dtype::F32, vec![*width], bytes);
        (name, view.unwrap())
    });
    fs::write(model.join("channels.safetensors"), serialize(views, None).unwrap()).unwrap();
}

/// The power of two that is nearest to a number.
fn power_of_two(x: f32) -> f32 {
    x.log2().round().exp2()
}

/// By what a tensor's numbers were multiplied, as readers that add `offset` find it: powers of two, and not more than
/// `rounding` beside them. One for zeros.
#[track_caller]
fn powers(name: &str, before: &[f32], after: &[f32], offset: f32, rounding: f32) -> Vec<f32> {
    let power = |(before, after): (&f32, &f32)| {
        let (before, after) = (before + offset, after + offset);
        if before == 0.0 {
            assert_eq!(after, 0.0, "{name}");
            return 1.0;
        }
        let power = power_of_two(after / before);
        let change = after / before / power - 1.0;
        assert!(change.abs() <= rounding, "{name}: {before} became {after}");
        power
    };
    before.iter().zip(after).map(power).collect()
}

/// A norm, and a projection that reads it.
const ATTENTION: (&str, &str) = ("input_layernorm", "self_attn.q_proj");

#[test]
fn what_stays_in_16_bits_is_balanced_as_far_as_these_hold_it() {
    let mlp = ("post_attention_layernorm", "mlp.gate_proj");
    let gemma3 = ("pre_feedforward_layernorm", "mlp.gate_proj");
    let expert = ("post_attention_layernorm", "mlp.experts.0.gate_proj");
    // Norms that are stored less 1 have a rounding of BF16; all else is exact.
    for (fixture, format, offset, norms, widths) in [
        (
            "gemma-tied",
            Format::Bf16,
            1.0,
            [ATTENTION, mlp],
            Some([32, 64, 32, 48]),
        ),
        (
            "gemma3-types",
            Format::Bf16,
            1.0,
            [ATTENTION, gemma3],
            Some([32, 64, 32, 48]),
        ),
        (
            "llama-linear-biases",
            Format::F16,
            0.0,
            [ATTENTION, mlp],
            Some([32, 32, 32, 48]),
        ),
        // Magnitudes of experts are not measured.
        ("qwen3moe-tied", Format::F16, 0.0, [ATTENTION, expert], None),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let (model, out) = (folder.path().join("model"), folder.path().join("out"));
        model_jobs::job(folder.path(), fixture, None, &Reference::load(fixture));
        let mut stored = tensors(&model);
        for (name, (_, numbers)) in &mut stored {
            if name.ends_with("norm.weight") && offset == 0.0 {
                numbers
                    .iter_mut()
                    .enumerate()
                    .for_each(|(i, x)| *x *= 8f32.powi((i % 5) as i32 - 2));
            }
            // Divided by more than a few, these would lose bits in F16.
            if name.ends_with(".bias") || name.ends_with("mlp.gate.weight") {
                numbers.iter_mut().for_each(|x| *x *= 2f32.powi(-9));
            }
        }
        write(&model, &stored, format);
        let before = tensors(&model);
        let config: Value = serde_json::from_slice(&fs::read(model.join("config.json")).unwrap()).unwrap();
        let layers = config["num_hidden_layers"].as_u64().unwrap() as usize;
        if let Some(widths) = widths {
            write_magnitudes(&model, layers, widths);
        }
        run(&["quantize", arg(&model), "--to", "int8", "--out", arg(&out)]).expect(0);
        let after = tensors(&out);
        let mut exponents = Vec::new();
        for layer in 0..layers {
            let of_layer = |part: &str| format!("model.layers.{layer}.{part}");
            for (norm, reader) in norms {
                let name = of_layer(&format!("{norm}.weight"));
                let rounding = if offset == 0.0 { 0.0 } else { 1.0 / 256.0 };
                let of_norm = powers(&name, &before[&name].1, &after[&name].1, offset, rounding);
                exponents.extend(of_norm.iter().map(|power| power.log2()));
                // What the norm is divided by, its readers are multiplied by.
                let router = of_layer("mlp.gate.weight");
                if norm != ATTENTION.0 && before.contains_key(&router) {
                    let of_router = powers(&router, &before[&router].1, &after[&router].1, 0.0, 0.0);
                    let rows = of_router.chunks(of_norm.len());
                    for (router, norm) in rows.flat_map(|row| row.iter().zip(&of_norm)) {
                        assert_eq!(router * norm, 1.0, "{fixture}: {name}");
                    }
                }
                let name = of_layer(&format!("{reader}.weight"));
                let factors = &after[&format!("{name}_scale")].1;
                let columns = of_norm.len();
                for (i, (code, x)) in after[&name].1.iter().zip(&before[&name].1).enumerate() {
                    let (factor, x) = (factors[i / columns], x / of_norm[i % columns]);
                    assert!(
                        (code * factor - x).abs() <= 0.51 * factor,
                        "{fixture}: {name} {code} {x}"
                    );
                }
            }
            for bias in ["self_attn.v_proj.bias", "mlp.up_proj.bias"].map(of_layer) {
                if let Some((_, before)) = before.get(&bias) {
                    let of_bias = powers(&bias, before, &after[&bias].1, 0.0, 0.0);
                    let [is_divided, is_multiplied] = [|power: &f32| *power < 0.2, |power: &f32| *power > 4.0];
                    assert!(
                        of_bias.iter().any(is_divided) && of_bias.iter().any(is_multiplied),
                        "{of_bias:?}"
                    );
                }
            }
        }
        // Channels are still balanced where the format holds it.
        let [least, most] = [f32::min, f32::max].map(|of: fn(f32, f32) -> f32| exponents.iter().copied().fold(0.0, of));
        println!("{fixture}: norms times 2^{least} to 2^{most}");
        assert!(least <= -1.0 && most >= 2.0, "{fixture}: {least} {most}");
    }
}

/// Makes MLPs and experts as wide as the next multiple of 32, which groups of four bits need.
fn widen(model: &Path, format: Format) {
    let repeated = |numbers: &[f32], rows: usize, columns: usize, [new_rows, new_columns]: [usize; 2]| -> Vec<f32> {
        let places = (0..new_rows).flat_map(|row| (0..new_columns).map(move |column| (row % rows, column % columns)));
        places.map(|(row, column)| numbers[row * columns + column]).collect()
    };
    let up = |width: usize| width.next_multiple_of(32);
    let mut stored = tensors(model);
    for (name, (shape, numbers)) in &mut stored {
        let is = |parts: &[&str]| parts.iter().any(|part| name.ends_with(&format!(".{part}.weight")));
        let (new, joined) = match shape[..] {
            [rows, columns] if is(&["gate_proj", "up_proj", "w1", "w3"]) => ([up(rows), columns], 1),
            [rows, columns] if is(&["gate_up_proj"]) => ([up(rows / 2), columns], 2),
            [rows, columns] if is(&["down_proj", "w2"]) => ([rows, up(columns)], 1),
            _ => continue,
        };
        let (rows, columns) = (shape[0] / joined, shape[1]);
        let parts = numbers.chunks(rows * columns);
        *numbers = parts.flat_map(|part| repeated(part, rows, columns, new)).collect();
        *shape = vec![new[0] * joined, new[1]];
    }
    write(model, &stored, format);
    let path = model.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (key, value) in config.as_object_mut().unwrap() {
        if key.ends_with("intermediate_size") {
            *value = json!(up(value.as_u64().unwrap() as usize));
        }
    }
    fs::write(path, config.to_string()).unwrap();
}

#[test]
fn models_of_all_kinds_are_quantized_by_their_prompts() {
    for (fixture, format) in [
        ("llama-plain", Format::F32),
        ("gemma3-types", Format::Bf16),
        ("cohere-tied", Format::F32),
        ("phi3-window", Format::F16),
        ("mixtral-twins", Format::Bf16),
        ("qwen2moe-weighted", Format::F16),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("model");
        let reference = Reference::load(fixture);
        let job = model_jobs::job(folder.path(), fixture, None, &reference);
        widen(&model, format);
        let prompts: Vec<Vec<u32>> = reference.prompts.iter().map(|prompt| prompt.tokens.clone()).collect();
        let logits = |folder: &Path| {
            let options = LoadOptions {
                max_context: None,
                ..options(&reference, Precision::F32)
            };
            compare::logits(&mut Transformer::load(folder, &options).unwrap(), &prompts).unwrap()
        };
        let own = logits(&model);
        for (scheme, kl, most) in [("fp8", 0.1, 0.05), ("w4a16", 0.8, 0.2)] {
            let out = folder.path().join(scheme);
            let arguments = [
                "quantize",
                arg(&model),
                "--to",
                scheme,
                "--out",
                arg(&out),
                "--calibrate",
                arg(&job),
                "--json",
            ];
            let done = run(&arguments).expect(0).json();
            let found = distance(&own, &logits(&out));
            println!("{fixture} in {scheme}: {:.1e} nats", found.kl);
            assert!(found.kl > 0.0 && found.kl < kl, "{fixture} in {scheme}: {found:?}");
            let layers = done["layers"].as_array().unwrap().iter();
            for matrix in layers.flat_map(|layer| layer["matrices"].as_array().unwrap()) {
                let name = matrix["name"].as_str().unwrap();
                let error = matrix["relative_error"].as_f64().unwrap();
                assert!(error > 1e-3 && error < most, "{fixture} in {scheme}: {matrix}");
                // What the down projections of experts read is not observed.
                let is_observed = !(name.contains("expert") && name.contains("down_proj"));
                assert_eq!(
                    matrix["by_outputs"],
                    json!(scheme == "w4a16" && is_observed),
                    "{fixture}: {matrix}"
                );
            }
        }
    }
}
