//! A gpt-oss through the built program: the demo model with sinks and with experts, in both forms in which they are stored.

use std::fs;
use std::path::{Path, PathBuf};

use half::bf16;
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::commands::run;
use crate::support::arg;
use crate::tensors::{Stored, answers, demo, job, model, ones, refused};

const EXPERTS: usize = 3;
const HIDDEN: usize = 192;
const WIDTH: usize = 64;
const FP4: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Numbers that look random.
fn noise(seed: usize, count: usize) -> impl Iterator<Item = u32> {
    let mut state = seed as u32 * 2_654_435_769 + 1;
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 16
    })
    .take(count)
}

fn stored(name: &str, dtype: Dtype, shape: &[usize], data: Vec<u8>) -> Stored {
    Stored {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
        data,
    }
}

/// Numbers from -`most` to `most` in BF16.
fn small(name: &str, seed: usize, shape: &[usize], most: f32) -> Stored {
    let numbers = noise(seed, shape.iter().product()).map(|x| (x as f32 / 32768.0 - 1.0) * most);
    let data = numbers.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect();
    stored(name, Dtype::BF16, shape, data)
}

/// A layer's matrices of all experts, `[experts][rows][columns]`: in MXFP4, or the same numbers transposed.
fn matrices(name: &str, seed: usize, rows: usize, columns: usize, is_mxfp4: bool) -> Vec<Stored> {
    let groups = EXPERTS * rows * columns / 32;
    let blocks: Vec<u8> = noise(seed, groups * 16).map(|x| x as u8).collect();
    let scales: Vec<u8> = noise(seed + 1, groups).map(|x| 119 + (x % 4) as u8).collect();
    if is_mxfp4 {
        let shape = [EXPERTS, rows, columns / 32];
        return vec![
            stored(
                &format!("{name}_blocks"),
                Dtype::U8,
                &[&shape[..], &[16]].concat(),
                blocks,
            ),
            stored(&format!("{name}_scales"), Dtype::U8, &shape, scales),
        ];
    }
    let number = |at: usize| {
        let code = blocks[at / 2] >> (at % 2 * 4) & 15;
        let size = FP4[usize::from(code & 7)] * (f32::from(scales[at / 32]) - 127.0).exp2();
        if code < 8 { size } else { -size }
    };
    let mut data = Vec::new();
    for expert in 0..EXPERTS {
        for column in 0..columns {
            for row in 0..rows {
                let number = number((expert * rows + row) * columns + column);
                data.extend(bf16::from_f32(number).to_le_bytes());
            }
        }
    }
    vec![stored(name, Dtype::BF16, &[EXPERTS, columns, rows], data)]
}

fn tensors(is_mxfp4: bool) -> Vec<Stored> {
    let mut all = demo();
    all.retain(|tensor| !tensor.name.contains(".mlp."));
    for layer in 0..6 {
        let name = |rest: &str| format!("model.layers.{layer}.{rest}");
        let seed = 100 * layer;
        all.push(small(&name("self_attn.sinks"), seed, &[6], 2.0));
        all.push(small(&name("mlp.router.weight"), seed + 1, &[EXPERTS, HIDDEN], 0.2));
        all.push(small(&name("mlp.router.bias"), seed + 2, &[EXPERTS], 0.2));
        let (both, down) = (name("mlp.experts.gate_up_proj"), name("mlp.experts.down_proj"));
        all.extend(matrices(&both, seed + 3, 2 * WIDTH, HIDDEN, is_mxfp4));
        all.extend(matrices(&down, seed + 5, HIDDEN, WIDTH, is_mxfp4));
        all.push(small(&format!("{both}_bias"), seed + 7, &[EXPERTS, 2 * WIDTH], 0.1));
        all.push(small(&format!("{down}_bias"), seed + 8, &[EXPERTS, HIDDEN], 0.1));
    }
    all
}

fn gpt_oss(folder: &Path, tensors: &[Stored], is_mxfp4: bool) -> PathBuf {
    let model = model(folder, tensors, true);
    let path = model.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let changes = json!({
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": false, "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2, "experts_per_token": 2, "intermediate_size": WIDTH, "sliding_window": 16,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "truncate": false},
    });
    let map = config.as_object_mut().unwrap();
    map.extend(changes.as_object().unwrap().clone());
    map.retain(|key, _| !["mlp_bias", "rope_parameters"].contains(&key.as_str()));
    if is_mxfp4 {
        map.insert("quantization_config".into(), json!({"quant_method": "mxfp4"}));
    }
    fs::write(path, config.to_string()).unwrap();
    model
}

#[test]
fn mxfp4_and_transposed_matrices_give_the_same_answers() {
    let folder = tempfile::tempdir().unwrap();
    gpt_oss(folder.path(), &tensors(false), false);
    let want = answers(folder.path());
    let folder = tempfile::tempdir().unwrap();
    gpt_oss(folder.path(), &tensors(true), true);
    assert_eq!(answers(folder.path()), want);
}

#[test]
fn what_a_gpt_oss_lacks_or_has_too_much_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let change = |change: &dyn Fn(&mut Vec<Stored>)| {
        let mut all = tensors(true);
        change(&mut all);
        gpt_oss(folder, &all, true);
    };
    let scales = "model.layers.2.mlp.experts.down_proj_scales";
    change(&|all| all.retain(|tensor| tensor.name != scales));
    refused(folder, &["model.layers.2.mlp.experts.0.down_proj_scales", "is missing"]);

    let sinks = "model.layers.3.self_attn.sinks";
    change(&|all| all.retain(|tensor| tensor.name != sinks));
    refused(folder, &[sinks, "is missing"]);

    change(&|all| {
        all.iter_mut().for_each(|tensor| {
            if tensor.name == scales {
                tensor.dtype = Dtype::F8_E4M3;
            }
        })
    });
    refused(folder, &["down_proj_scales", "is stored as F8_E4M3", "U8"]);

    // One expert more than the router knows.
    change(&|all| {
        all.iter_mut().for_each(|tensor| {
            if tensor.name == scales {
                tensor.data.extend(vec![127; HIDDEN * WIDTH / 32]);
                tensor.shape[0] += 1;
            }
        })
    });
    refused(folder, &["model.layers.2.mlp.experts.3.down_proj_scales"]);

    // Quantized weights of which `config.json` says nothing.
    gpt_oss(folder, &tensors(true), false);
    refused(folder, &["_scales", "quantized"]);

    let extra = ones("model.layers.1.mlp.experts.gate_up_proj_zeros", EXPERTS);
    gpt_oss(folder, &[tensors(false), vec![extra]].concat(), false);
    refused(folder, &["gate_up_proj_zeros", "read by no part"]);
}

#[test]
fn an_exponent_that_stands_for_no_number_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let mut all = tensors(true);
    let scales = "model.layers.2.mlp.experts.down_proj_scales";
    let scales = all.iter_mut().find(|tensor| tensor.name == scales).unwrap();
    scales.data[3] = 255;
    gpt_oss(folder.path(), &all, true);
    let (job, _) = job(folder.path());
    run(&["run", arg(&job)])
        .expect(2)
        .one_line(&["model.layers.2.mlp.experts.0.down_proj.weight", "not finite"]);
}
