//! What the kernels of the cheaper precisions gain over F32, as ratios of one run: the machine's own speed cancels out.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gristmill::device::cpu::{Buffer, Cpu, Isa, Matrix, Threads, Vector, Workspace};
use gristmill::device::{Device, Dtype, Linear, Precision, Tensor};

use crate::skips::{lacks, skip};

/// Rows, and features of input and output.
const ROWS: usize = 256;
const FEATURES: usize = 1024;
/// Each side in turn, so often.
const ROUNDS: usize = 31;

/// A linear layer of one precision, ready to run on one thread.
struct Side {
    device: Cpu,
    layer: Linear<Matrix, Vector>,
    x: Buffer,
    out: Buffer,
    workspace: Workspace,
    times: Vec<Duration>,
}

impl Side {
    fn new(precision: Precision) -> Side {
        let device = Cpu::new(precision, precision.kv_format(), Arc::new(Threads::new(1).unwrap()));
        let numbers: Vec<u8> = (0..FEATURES * FEATURES)
            .flat_map(|i| ((i * 7 % 1023) as f32 / 512.0 - 1.0).to_le_bytes())
            .collect();
        let tensor = Tensor {
            dtype: Dtype::F32,
            rows: FEATURES,
            columns: FEATURES,
            data: &numbers,
        };
        let mut x = device.buffer();
        let values: Vec<f32> = (0..ROWS * FEATURES).map(|i| (i % 255) as f32 / 127.0 - 1.0).collect();
        device.write(&values, FEATURES, &mut x).unwrap();
        let layer = Linear {
            weight: device.matrix(&[tensor]).unwrap(),
            bias: None,
        };
        let (out, workspace) = (device.buffer(), device.workspace());
        Side {
            device,
            layer,
            x,
            out,
            workspace,
            times: Vec::new(),
        }
    }

    fn run(&mut self) {
        let start = Instant::now();
        self.device
            .linear(&self.layer, &self.x, &mut self.out, &mut self.workspace)
            .unwrap();
        self.times.push(start.elapsed());
    }

    /// The fastest round: other programs delay the others.
    fn fastest(&self) -> f64 {
        self.times.iter().min().expect("rounds").as_secs_f64()
    }
}

/// How many times as fast as F32 `precision` is.
fn gain(precision: Precision) -> f64 {
    let (mut base, mut side) = (Side::new(Precision::F32), Side::new(precision));
    for _ in 0..ROUNDS {
        base.run();
        side.run();
    }
    let gain = base.fastest() / side.fastest();
    println!("{precision:?}: {gain:.2} times F32 at {ROWS} rows");
    gain
}

/// Does the best set this processor has include `name`? Else `test` is skipped.
fn has(name: &str, test: &str) -> bool {
    let test = format!("kernel_speed::{test}");
    if cfg!(debug_assertions) {
        skip(&test, "this build is not optimized");
        return false;
    }
    let has = name.parse::<Isa>().is_ok();
    if !has {
        lacks(&test, name);
    }
    has
}

/// About 3 on a processor with AVX-512 VNNI.
#[test]
fn eight_bits_are_faster_than_f32() {
    if has("avx512-vnni", "eight_bits_are_faster_than_f32") {
        assert!(gain(Precision::Int8) >= 1.5);
    }
}

/// About 2 on a processor with AVX-512 BF16. Where its dot products are slower than those of F32, they are not used, and there is no gain.
#[test]
fn bf16_is_faster_than_f32() {
    let test = "bf16_is_faster_than_f32";
    if !has("avx512-bf16", test) {
        return;
    }
    if Isa::detect().to_string() == "avx512-vnni" {
        lacks(&format!("kernel_speed::{test}"), "fast dot products of BF16");
        assert!(gain(Precision::Bf16) >= 0.75);
        return;
    }
    assert!(gain(Precision::Bf16) >= 1.2);
}
