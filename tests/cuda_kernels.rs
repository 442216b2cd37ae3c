//! Kernels without a GPU: launch plans of real models, and what NVIDIA's compiler makes of each kernel for each card, as snapshots.
//!
//! `UPDATE_SNAPSHOTS=1 cargo test --profile checked --test all cuda_kernels` writes them anew.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

use gristmill::device::cuda::attention_plan::{self, AttentionShape, BlockSizes};
use gristmill::device::cuda::coded_plan::{CodeGroups, expert_tile_rows};
use gristmill::device::cuda::compile::{self, CompileTarget, Kernel, KernelCompiler};
use gristmill::device::cuda::expert_plan::{self, ExpertShape};
use gristmill::device::cuda::nvrtc::Nvrtc;
use gristmill::device::cuda::plan::{self, KernelFormat, Launch, LinearShape, NormKind, Tile};
use gristmill::device::cuda::recurrent_plan;
use gristmill::device::{Activation, HeadShape, LatentShape, Precision, RecurrentKind, RecurrentShape};
use gristmill::model::config::Config;
use gristmill::model::shapes;
use rayon::prelude::*;

use crate::skips::skip;
use crate::support::{Run, python, root};

const FORMATS: [KernelFormat; 3] = [KernelFormat::Int8, KernelFormat::E4m3, KernelFormat::Bf16];
/// Compute capabilities: A100; A10 and RTX 3090; L4, L40S and RTX 4090; H100 and H200; B200; RTX 5090.
const CARDS: [u32; 6] = [80, 86, 89, 90, 100, 120];
/// Of so many kernels that are those of the snapshot, one is compiled again.
const COMPILED_AGAIN: usize = 12;

/// Holds `found` against a snapshot.
fn check(name: &str, found: &str) {
    let path = root().join("tests/snapshots").join(name);
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, found).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    for (line, (found, kept)) in found.lines().zip(kept.lines()).enumerate() {
        assert_eq!(found, kept, "line {} of {}", line + 1, path.display());
    }
    assert_eq!(found.lines().count(), kept.lines().count(), "{}", path.display());
}

fn shape(name: &str) -> Config {
    shapes::named(name).unwrap().unwrap()
}

/// What a step of `rows` tokens launches in a layer and after the last one, `attended` items of attention aside.
fn launches(config: &Config, format: KernelFormat, capability: u32, rows: usize) -> Vec<Launch> {
    let (hidden, mlp) = (config.hidden_size, config.intermediate_size);
    let shape = attention_shape(config, format, capability);
    let linear = |columns: usize, width: usize, format: KernelFormat, f32_output: bool| {
        let shape = LinearShape {
            format,
            rows,
            columns,
            row_bytes: width * format.bytes(),
            f32_output,
        };
        match capability {
            90 => plan::linear_sm90(&shape, Tile::of(&shape, 132), 132),
            _ => plan::linear(&shape),
        }
    };
    let norms = NormKind {
        of_delta: config.post_norms,
        is_centered: config.layer_norms,
        is_scaled: false,
    };
    let attended = config.heads.heads * config.heads.head_dim;
    let mut all = vec![
        plan::embed(hidden, rows),
        plan::add_norm(hidden, format, norms, rows),
        linear(config.heads.qkv_width(), hidden, format, false),
        shape.rope_store(false, rows),
        plan::embed(config.heads.qkv_width(), rows),
    ];
    let windows: BTreeSet<u32> = config.layers.iter().copied().map(attention_plan::window).collect();
    for window in windows {
        let bounds = (window, config.attention_soft_cap, config.attention_sinks);
        let warps = shape.wide_block_warps();
        all.extend([
            shape.attention(warps, bounds, rows.div_ceil(shape.queries_max(warps) as usize)),
            shape.attention(shape.narrow_block_warps(), bounds, rows),
        ]);
    }
    all.push(shape.merge_partial_attention(rows));
    if format != KernelFormat::Bf16 {
        all.push(plan::quantize(attended, format, rows));
    }
    all.extend([
        linear(hidden, attended, format, false),
        linear(2 * mlp, hidden, format, false),
        plan::gated(mlp, format, config.activation, rows),
        linear(hidden, mlp, format, false),
        plan::add_norm(hidden, KernelFormat::Bf16, norms, rows),
        linear(config.vocab_size, hidden, KernelFormat::Bf16, true),
    ]);
    all.extend(config.logit_soft_cap.map(|_| plan::soft_cap(rows, config.vocab_size)));
    all
}

fn attention_shape(config: &Config, kv_format: KernelFormat, capability: u32) -> AttentionShape {
    AttentionShape::of(config.heads, kv_format, capability == 90)
}

/// Layers without windows of Gemma 4 31B, two of which share a block, and those of E2B that read an earlier one's; and its layers
/// with windows.
fn gemma4_shapes(kv_format: KernelFormat, capability: u32) -> [(AttentionShape, u32); 4] {
    let shape = |[heads, kv_heads, head_dim]: [u32; 3], values_of_a_block: u32, scales: u32| AttentionShape {
        heads,
        kv_heads,
        head_dim,
        value_in_key: None,
        kv_format,
        is_hopper: capability == 90,
        queries_alone: false,
        block: Some(BlockSizes {
            bytes: values_of_a_block * attention_plan::BLOCK_TOKENS * kv_format.bytes() as u32,
            scales: if kv_format.is_scaled() {
                scales * attention_plan::BLOCK_TOKENS
            } else {
                0
            },
        }),
    };
    let small = shape([8, 1, 512], 512, 2);
    let alone = AttentionShape {
        queries_alone: true,
        ..small
    };
    [
        (shape([32, 16, 256], 4096, 16), 1024),
        (shape([32, 4, 512], 4096, 16), 0),
        (small, 0),
        (alone, 0),
    ]
}

/// What a step of `rows` tokens launches in attention over latents: of DeepSeek-V3, V2-Lite and GLM-4.7-Flash.
fn latent_launches(capability: u32, rows: usize) -> Vec<Launch> {
    let mut all = Vec::new();
    for (heads, plain_dim, value_dim) in [(128, 128, 128), (16, 128, 128), (20, 192, 256)] {
        let latents = LatentShape {
            rank: 512,
            rope_dim: 64,
            plain_dim,
            value_dim,
        };
        let of_heads = HeadShape {
            heads,
            kv_heads: 1,
            head_dim: latents.kept(),
            value_in_key: Some(latents.rank),
        };
        let bytes = attention_plan::BLOCK_TOKENS * latents.kept() as u32 * 2;
        let shape = AttentionShape {
            block: Some(BlockSizes { bytes, scales: 0 }),
            ..AttentionShape::of(of_heads, KernelFormat::Int8, capability == 90)
        };
        let [wide, narrow] = [shape.wide_block_warps(), shape.narrow_block_warps()];
        all.extend([
            plan::head_linear(rows, heads, latents.rank),
            plan::latent_store(heads, latents, bytes, rows),
            shape.attention(wide, (0, None, false), rows.div_ceil(shape.queries_max(wide) as usize)),
            shape.attention(narrow, (0, None, false), rows),
            shape.merge_partial_attention(rows),
            plan::head_linear(rows, heads, value_dim),
        ]);
    }
    all
}

/// What a step of `rows` tokens launches in the attention of Gemma 4, and besides in the layers of E2B.
fn gemma4_launches(format: KernelFormat, capability: u32, rows: usize) -> Vec<Launch> {
    let mut all = Vec::new();
    for (shape, window) in gemma4_shapes(format, capability) {
        let bounds = (window, None, false);
        let warps = shape.wide_block_warps();
        all.extend([
            shape.rope_store(true, rows),
            shape.attention(warps, bounds, rows.div_ceil(shape.queries_max(warps) as usize)),
            shape.attention(shape.narrow_block_warps(), bounds, rows),
            shape.merge_partial_attention(rows),
        ]);
    }
    let norm = NormKind {
        of_delta: true,
        is_scaled: true,
        ..NormKind::default()
    };
    all.extend([
        plan::add_norm(5376, format, norm, rows),
        plan::add_inputs(rows * 35),
        plan::gate_input(256, format, rows),
    ]);
    all
}

/// What a step of `rows` tokens launches in a layer with gpt-oss-20b's experts.
fn expert_launches(format: KernelFormat, rows: usize) -> Vec<Launch> {
    let (experts, per_token, hidden, width) = (32, 4, 2880, 2880);
    let shape = ExpertShape {
        experts,
        rows: rows * per_token,
        tile_rows: 128,
    };
    let clamped = Activation::ClampedSwiglu {
        alpha: 1.702,
        limit: 7.0,
    };
    vec![
        expert_plan::router(rows, experts),
        expert_plan::choose_experts(rows, 1),
        shape.sort_rows(),
        shape.grouped_linear(format, 2 * width),
        plan::gated(width, format, clamped, shape.rows),
        shape.grouped_linear(format, hidden),
        expert_plan::combine_experts(rows),
    ]
}

/// What a step of `rows` tokens launches in a layer with Nemotron 3 Nano 30B-A3B's experts, which have no gates, and besides for
/// DeepSeek-V3's 8 groups of experts and Llama 4's rows times weights.
fn other_expert_launches(format: KernelFormat, rows: usize) -> Vec<Launch> {
    let (experts, per_token, hidden, width, shared) = (128, 6, 2688, 1856, 3712);
    let shape = ExpertShape {
        experts,
        rows: rows * per_token,
        tile_rows: 128,
    };
    vec![
        expert_plan::router(rows, experts),
        expert_plan::choose_experts(rows, 1),
        shape.sort_rows(),
        shape.grouped_linear(format, width),
        plan::gated(width, format, Activation::SquaredRelu, shape.rows),
        shape.grouped_linear(format, hidden),
        plan::gated(shared, format, Activation::SquaredRelu, rows),
        expert_plan::combine_experts(rows),
        expert_plan::choose_experts(rows, 8),
        expert_plan::scale_rows(rows),
    ]
}

/// What a step of `rows` tokens launches for the linear operations of a layer with weights in codes, of which a group has `group`
/// columns; and for those of Qwen3-30B-A3B's experts.
fn coded_launches(config: &Config, group: usize, rows: usize) -> Vec<Launch> {
    let groups = |columns: usize| CodeGroups {
        columns,
        group: group.min(columns),
    };
    let mut all: Vec<Launch> = linear_shapes(config)
        .into_iter()
        .flat_map(|[columns, width]| [groups(width).quantize(rows), groups(width).linear(rows, columns)])
        .collect();
    let (experts, per_token, hidden, width) = (128, 8, 2048, 768);
    let shape = ExpertShape {
        experts,
        rows: rows * per_token,
        tile_rows: expert_tile_rows(rows * per_token, experts),
    };
    let by_experts = groups(hidden);
    all.extend([
        by_experts.quantize(rows),
        shape.sort_rows(),
        by_experts.grouped_linear(&shape, 2 * width),
    ]);
    all
}

/// Output and input features of a layer's linear operations.
fn linear_shapes(config: &Config) -> [[usize; 2]; 4] {
    let (hidden, mlp) = (config.hidden_size, config.intermediate_size);
    let attended = config.heads.heads * config.heads.head_dim;
    [
        [config.heads.qkv_width(), hidden],
        [hidden, attended],
        [2 * mlp, hidden],
        [hidden, mlp],
    ]
}

/// Bytes of weights, with their scales, that the linear operations of all layers read in a step of one token.
fn bytes_of_a_decode_step(config: &Config, precision: Precision) -> usize {
    let of_matrix = |[rows, columns]: [usize; 2]| match precision {
        Precision::W4a8 => {
            let (codes, factors) = CodeGroups { columns, group: 128 }.matrix_bytes(rows);
            codes + factors
        }
        _ => {
            let format = KernelFormat::of(precision).unwrap();
            rows * columns * format.bytes() + if format.is_scaled() { rows * 4 } else { 0 }
        }
    };
    config.layers.len() * linear_shapes(config).map(of_matrix).iter().sum::<usize>()
}

/// Recurrent layers of Qwen3-Next 80B, of Qwen3.5 27B, of Granite 4.0 H Small and of Nemotron-H 56B, Nano 9B v2 and 3 Nano.
fn recurrent_shapes() -> [(&'static str, RecurrentShape); 6] {
    let shape = |kind, key_heads, value_heads, key_dim, value_dim| RecurrentShape {
        kind,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        conv_width: 4,
    };
    let (delta, mamba) = (RecurrentKind::DeltaNet, RecurrentKind::Mamba2);
    [
        ("qwen3-next-80b", shape(delta, 16, 32, 128, 128)),
        ("qwen3.5-27b", shape(delta, 16, 48, 128, 128)),
        ("granite-4.0-h-small", shape(mamba, 1, 128, 128, 64)),
        ("nemotron-h-56b", shape(mamba, 8, 256, 256, 64)),
        ("nemotron-nano-9b-v2", shape(mamba, 8, 128, 128, 80)),
        ("nemotron-3-nano-30b-a3b", shape(mamba, 8, 64, 128, 64)),
    ]
}

/// What a step of `sequences` sequences with `rows` tokens launches in a recurrent layer, and for the gates of an attention.
fn recurrent_launches(shape: &RecurrentShape, (sequences, rows): (usize, usize)) -> Vec<Launch> {
    let mut all = vec![
        recurrent_plan::recurrent(shape, sequences),
        recurrent_plan::keep_inputs(shape, sequences),
    ];
    if shape.kind == RecurrentKind::Mamba2 {
        all.push(plan::norm_heads(shape.value_width() / shape.key_heads, rows));
    }
    all.push(recurrent_plan::gate(rows * 4096));
    all
}

#[test]
fn launch_plans_of_published_models() {
    let mut found = String::new();
    for name in [
        "llama-3.1-8b",
        "llama-3.1-70b",
        "qwen3-32b",
        "qwen2.5-0.5b",
        "gemma-2-9b",
    ] {
        for (format, capability) in [
            (KernelFormat::E4m3, 90),
            (KernelFormat::Int8, 80),
            (KernelFormat::Bf16, 90),
        ] {
            for rows in [1, 64, 65, 2048] {
                writeln!(
                    found,
                    "{name}, {format:?}, compute capability {capability}, {rows} rows"
                )
                .unwrap();
                for launch in launches(&shape(name), format, capability, rows) {
                    writeln!(found, "  {launch}").unwrap();
                    let most = if capability == 90 { 227 << 10 } else { 99 << 10 };
                    assert!(launch.shared_bytes <= most && launch.threads <= 1024, "{launch}");
                }
            }
        }
    }
    for rows in [1, 64, 2048] {
        writeln!(found, "experts of gpt-oss-20b, Int8, {rows} rows").unwrap();
        for launch in expert_launches(KernelFormat::Int8, rows) {
            writeln!(found, "  {launch}").unwrap();
        }
    }
    for rows in [1, 64, 2048] {
        writeln!(
            found,
            "experts of nemotron-3-nano-30b-a3b, in groups, with rows times weights, Int8, {rows} rows"
        )
        .unwrap();
        for launch in other_expert_launches(KernelFormat::Int8, rows) {
            writeln!(found, "  {launch}").unwrap();
            assert!(launch.shared_bytes <= 99 << 10 && launch.threads <= 1024, "{launch}");
        }
    }
    for rows in [1, 64, 2048] {
        writeln!(
            found,
            "linear operations in codes, groups of 128, llama-3.1-8b, {rows} rows"
        )
        .unwrap();
        for launch in coded_launches(&shape("llama-3.1-8b"), 128, rows) {
            writeln!(found, "  {launch}").unwrap();
            assert!(launch.shared_bytes <= 99 << 10 && launch.threads <= 1024, "{launch}");
        }
    }
    writeln!(
        found,
        "bytes of weights that the linear layers read in a step of one token"
    )
    .unwrap();
    for name in ["llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "qwen2.5-0.5b"] {
        for precision in [Precision::Bf16, Precision::Int8, Precision::W4a8] {
            let bytes = bytes_of_a_decode_step(&shape(name), precision);
            writeln!(found, "  {name}, {}: {bytes}", precision.name()).unwrap();
        }
    }
    for (name, shape) in recurrent_shapes() {
        for sizes in [(64, 64), (3, 2048)] {
            writeln!(
                found,
                "recurrent layer of {name}, {} sequences with {} rows",
                sizes.0, sizes.1
            )
            .unwrap();
            for launch in recurrent_launches(&shape, sizes) {
                writeln!(found, "  {launch}").unwrap();
                assert!(
                    launch.threads <= 1024 && recurrent_plan::check_recurrent(shape).is_ok(),
                    "{launch}"
                );
            }
        }
    }
    for (format, capability) in [
        (KernelFormat::Int8, 86),
        (KernelFormat::Bf16, 86),
        (KernelFormat::E4m3, 90),
    ] {
        for rows in [1, 2048] {
            writeln!(
                found,
                "attention and layers' inputs of Gemma 4, {format:?}, compute capability {capability}, {rows} rows"
            )
            .unwrap();
            for launch in gemma4_launches(format, capability, rows) {
                writeln!(found, "  {launch}").unwrap();
                assert!(launch.shared_bytes <= 99 << 10 && launch.threads <= 1024, "{launch}");
            }
        }
    }
    for (capability, rows) in [(86, 1), (86, 2048), (90, 64)] {
        writeln!(
            found,
            "attention over latents, compute capability {capability}, {rows} rows"
        )
        .unwrap();
        for launch in latent_launches(capability, rows) {
            writeln!(found, "  {launch}").unwrap();
            assert!(launch.shared_bytes <= 99 << 10 && launch.threads <= 1024, "{launch}");
        }
    }
    check("launch_plans.txt", &found);
}

#[test]
fn every_kernel_is_in_the_program() {
    let files = std::fs::read_dir(root().join("kernels"))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut stems: Vec<String> = files
        .filter(|path| path.extension().is_some_and(|e| e == "cu"))
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_string())
        .collect();
    stems.sort();
    let mut names: Vec<&str> = compile::names().collect();
    names.sort_unstable();
    assert_eq!(stems, names);
}

/// NVRTC as pip brought it.
fn nvrtc() -> Option<Nvrtc> {
    let python = root().join(".venv/lib");
    let folders = std::fs::read_dir(python).ok()?.map(|entry| entry.unwrap().path());
    let packages: Vec<PathBuf> = folders
        .map(|python| python.join("site-packages/nvidia/cu13/lib"))
        .collect();
    let library = packages
        .iter()
        .map(|lib| lib.join("libnvrtc.so.13"))
        .find(|path| path.exists())?;
    Nvrtc::open(library)
}

/// Numbers in the assembler's line about a kernel, by the word after them.
fn figure(log: &str, word: &str) -> u32 {
    let at = log.find(word).unwrap_or_else(|| panic!("no `{word}` in {log}"));
    let number = log[..at].trim_end().rsplit(|c: char| !c.is_ascii_digit()).next();
    number.unwrap().parse().unwrap()
}

#[test]
fn every_kernel_compiles_for_every_card_without_spills() {
    let Some(first) = nvrtc() else {
        return skip(
            "cuda_kernels::every_kernel_compiles_for_every_card_without_spills",
            "no NVRTC in .venv/",
        );
    };
    let known = first.architectures().unwrap();
    let mut kernels: Vec<(u32, Kernel)> = CARDS
        .into_iter()
        .flat_map(|card| {
            let mut all = BTreeSet::new();
            for name in ["llama-3.1-8b", "llama-3.1-70b", "qwen2.5-0.5b", "gemma-2-9b"] {
                for format in FORMATS {
                    if format == KernelFormat::E4m3 && card < 89 {
                        continue;
                    }
                    for rows in [64, 2048] {
                        all.extend(launches(&shape(name), format, card, rows).into_iter().map(|l| l.kernel));
                    }
                    if name == "llama-3.1-8b" {
                        let attention = attention_shape(&shape(name), format, card);
                        let warps = [attention.wide_block_warps(), attention.narrow_block_warps()];
                        all.extend(warps.map(|warps| attention.attention(warps, (4096, None, false), 1).kernel));
                        // Hopper runs these, too, where it is asked to.
                        all.insert(Kernel::new("linear", &[("FORMAT", format as u32), ("WIDE", 0)]));
                        all.extend(expert_launches(format, 1).into_iter().map(|launch| launch.kernel));
                        all.extend(other_expert_launches(format, 1).into_iter().map(|launch| launch.kernel));
                        // The plain MLP of Nemotron Nano 9B v2.
                        all.insert(plan::gated(15_680, format, Activation::SquaredRelu, 1).kernel);
                        // gpt-oss-20b's attention, Command R+'s norm, OLMo 2 7B's norm of all heads.
                        let sinks = AttentionShape {
                            heads: 64,
                            head_dim: 64,
                            ..attention
                        };
                        let warps = [sinks.wide_block_warps(), sinks.narrow_block_warps()];
                        let layer_norm = NormKind {
                            is_centered: true,
                            ..NormKind::default()
                        };
                        all.extend(warps.map(|warps| sinks.attention(warps, (128, None, true), 1).kernel));
                        all.insert(plan::add_norm(12_288, format, layer_norm, 1).kernel);
                        all.insert(plan::norm_heads(4096, 1).kernel);
                        all.extend(gemma4_launches(format, card, 1).into_iter().map(|launch| launch.kernel));
                    }
                }
            }
            for format in FORMATS
                .into_iter()
                .filter(|format| *format != KernelFormat::E4m3 || card >= 89)
            {
                all.extend([false, card == 90].map(|is_hopper| plan::peak(format, is_hopper, 132, 1).0.kernel));
                // Which tile is best is measured.
                for tile in Tile::ALL.into_iter().filter(|_| card == 90) {
                    let shape = |f32_output| LinearShape {
                        format,
                        rows: 1,
                        columns: 1,
                        row_bytes: 16,
                        f32_output,
                    };
                    let f32_outputs = [false, format == KernelFormat::Bf16];
                    all.extend(f32_outputs.map(|f32_output| plan::linear_sm90(&shape(f32_output), tile, 132).kernel));
                }
            }
            for group in [32, 64, 128, usize::MAX] {
                for rows in [1, 64, 2048] {
                    all.extend(
                        coded_launches(&shape("llama-3.1-8b"), group, rows)
                            .into_iter()
                            .map(|launch| launch.kernel),
                    );
                }
            }
            all.extend(latent_launches(card, 1).into_iter().map(|launch| launch.kernel));
            all.extend([plan::sample(1), plan::random_weights(8), plan::scale_sums(1, 8)].map(|launch| launch.kernel));
            for (_, shape) in recurrent_shapes() {
                all.extend(
                    recurrent_launches(&shape, (1, 1))
                        .into_iter()
                        .map(|launch| launch.kernel),
                );
            }
            all.into_iter().map(move |kernel| (card, kernel))
        })
        .collect();
    kernels.sort_by_key(|(card, kernel)| (kernel.name, *card, *kernel));
    // Where sources and compiler are those of the snapshot, a part of it is compiled again.
    let fingerprint = KernelCompiler::new(first, CompileTarget::Card(80)).fingerprint();
    let sources = format!("sources and compiler: {fingerprint}");
    let kept = std::fs::read_to_string(root().join("tests/snapshots/kernels.txt")).unwrap_or_default();
    let is_current = kept.lines().next() == Some(&sources) && std::env::var_os("GRISTMILL_ALL_KERNELS").is_none();
    let kept: BTreeMap<&str, &str> = kept
        .lines()
        .filter(|_| is_current)
        .filter_map(|line| Some((line.split_once(": ")?.0, line)))
        .collect();
    let lines: Vec<String> = kernels
        .into_par_iter()
        .enumerate()
        .map(|(index, (card, kernel))| {
            if let Some(line) = kept.get(&*format!("{kernel}, {card}"))
                && !index.is_multiple_of(COMPILED_AGAIN)
            {
                return (*line).to_owned();
            }
            let target = CompileTarget::of(card, &known).unwrap();
            let compiled = KernelCompiler::new(nvrtc().unwrap(), target).compile(&kernel).unwrap_or_else(|e| panic!("{e}"));
            let log = &compiled.log;
            let [stack, stores, loads] = ["bytes stack frame", "bytes spill stores", "bytes spill loads"].map(|w| figure(log, w));
            let registers = figure(log, "registers");
            let shared = if log.contains("bytes smem") { figure(log, "bytes smem") } else { 0 };
            assert!(compiled.image.starts_with(b"\x7fELF"), "{kernel}: no machine code");
            assert_eq!((stack, stores, loads), (0, 0, 0), "{kernel} for {card}: {log}");
            // What the assembler says of a warpgroup's products whose registers it had to wait for.
            assert!(!log.contains("(C75"), "{kernel} for {card}: {log}");
            format!("{kernel}, {card}: {registers} registers, {stack} B stack, {stores} + {loads} B spilled, {shared} B shared")
        })
        .collect();
    check("kernels.txt", &(sources + "\n" + &lines.join("\n") + "\n"));
}

/// Widths of loads and stores, products and registers, by three versions of NVRTC.
#[test]
fn machine_code_is_as_it_was_counted() {
    let name = "cuda_kernels::machine_code_is_as_it_was_counted";
    if !root().join(".venv/nvrtc/nvdisasm").exists() {
        return skip(
            name,
            "no NVRTC of other versions in .venv/: run tests/machine_code.py --install",
        );
    }
    Run::of(Command::new(python()).arg(root().join("tests/machine_code.py"))).expect(0);
}

#[test]
fn a_kernel_that_does_not_compile_names_its_line() {
    let Some(nvrtc) = nvrtc() else {
        return skip(
            "cuda_kernels::a_kernel_that_does_not_compile_names_its_line",
            "no NVRTC in .venv/",
        );
    };
    let compiler = KernelCompiler::new(nvrtc, CompileTarget::Card(80));
    let kernel = Kernel::new("linear", &[("FORMAT", 1), ("WIDE", 0)]);
    let error = compiler.compile(&kernel).map(|_| ()).unwrap_err().to_string();
    assert!(
        error.contains("linear_tile.cuh(") && error.contains("FORMAT=1"),
        "{error}"
    );
}

/// Every kernel's own check: its source, run on a CPU, against sums in doubles; and the libraries that stand in for NVIDIA's.
#[test]
fn kernels_agree_with_sums_in_doubles() {
    let run = std::process::Command::new("bash")
        .arg(root().join("tests/emulator/run.sh"))
        .arg("--quick")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{text}\n{}", String::from_utf8_lossy(&run.stderr));
}
