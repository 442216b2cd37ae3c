//! Kernels alone, at the shapes of real models: linear layers, output heads and attention.
//!
//! `cargo bench --bench kernels` measures all of them by Criterion; a word after `--bench kernels --` only what has it in its name,
//! as `int8`, `896x4864` or `attention`. `cargo bench --bench kernels -- --shares` and
//! `-- --threads` print the tables of benches/README.md.
//!
//! Each call takes the next of many equal matrices (or pools of keys and values), which are several times as large as the
//! last-level cache together: as in a model, weights come from memory.

use std::cell::LazyCell;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, SamplingMode, Throughput};
use gristmill::device::batch::{StepBatch, StepSequence};
use gristmill::device::cpu::{BLOCK_TOKENS, Buffer, Cpu, Isa, KvPool, Matrix, Step, Threads, Vector};
use gristmill::device::{
    Attention, AttentionInput, Device, Dtype, HeadShape, KvFormat, KvPlace, KvSpec, Linear, Precision, RopeSpec,
    RopeStore, Tensor,
};

#[cfg(target_arch = "x86_64")]
mod shares;
mod threads;

/// Bytes of all matrices or pools that calls take in turn: several times the last-level cache.
const SWEPT_BYTES: usize = 160 << 20;
/// Input and output features of linear layers.
const LAYERS: [(usize, usize); 3] = [(896, 4864), (4864, 896), (384, 1024)];
/// Input features and ids of output heads.
const HEADS: [(usize, usize); 2] = [(384, 32_000), (896, 151_936)];
/// Rows at which reading the weights is the limit.
const FEW_ROWS: [usize; 3] = [1, 4, 8];
/// Rows at which arithmetic is the limit.
const MANY_ROWS: [usize; 3] = [64, 256, 2048];
/// Rows whose logits are computed at once are never more.
const HEAD_ROWS_MAX: usize = 256;
/// Many short samples: on a machine that others use, too, some of them are left alone.
const SAMPLES: usize = 200;
/// Operations of a call from which on it is no short sample, and how many there are then.
const LONG_CALL: usize = 4 << 30;
const LONG_SAMPLES: usize = 10;

/// As many as there are cores.
fn threads() -> Arc<Threads> {
    static THREADS: LazyLock<Arc<Threads>> = LazyLock::new(|| {
        let count = std::thread::available_parallelism().map_or(1, |n| n.get());
        Arc::new(Threads::new(count).expect("the system gives threads"))
    });
    Arc::clone(&THREADS)
}

fn device(precision: Precision, isa: Isa) -> Cpu {
    Cpu::new(precision, precision.kv_format(), threads()).with_isa(isa)
}

/// `rows * columns` BF16 numbers between 1/4 and 1 in magnitude, the same for the same sizes.
fn random_bytes(rows: usize, columns: usize) -> Vec<u8> {
    let mut state = 1u32;
    let number = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let (sign, magnitude) = (state >> 31, 125 << 7 | state >> 20 & 0xff);
        ((sign << 15 | magnitude) as u16).to_le_bytes()
    };
    (0..rows * columns).flat_map(number).collect()
}

fn matrix(device: &Cpu, rows: usize, columns: usize) -> Matrix {
    let data = random_bytes(rows, columns);
    let tensor = Tensor {
        dtype: Dtype::Bf16,
        rows,
        columns,
        data: &data,
    };
    device.matrix(&[tensor]).expect("all numbers are finite")
}

fn new_step(device: &Cpu, heads: HeadShape) -> Step {
    let rope = RopeSpec {
        inverse_frequencies: vec![0.01; heads.head_dim / 2],
        scale: 1.0,
    };
    device
        .step(vec![rope], &[(KvSpec::Full, heads)])
        .expect("a CPU computes all heads")
}

/// Random rows of activations.
fn activations(device: &Cpu, rows: usize, width: usize) -> Buffer {
    let heads = HeadShape {
        heads: 1,
        kv_heads: 1,
        head_dim: 2,
        value_in_key: None,
    };
    let mut step = new_step(device, heads);
    step_of_rows(device, &mut step, rows);
    let mut out = device.buffer();
    device
        .embed(
            &matrix(device, rows, width),
            (1.0, None),
            &step,
            &mut out,
            &device.workspace(),
        )
        .unwrap();
    out
}

/// A step of one sequence whose tokens are 0, 1, 2 and so on.
fn step_of_rows(device: &Cpu, step: &mut Step, rows: usize) {
    let batch = StepBatch {
        tokens: (0..rows as u32).collect(),
        ..batch(1, rows as u32, rows as u32)
    };
    device.upload(&batch, step, &mut device.workspace()).unwrap();
}

/// Equal sequences with blocks of their own.
fn batch(sequences: u32, q_len: u32, kv_len: u32) -> StepBatch {
    let blocks = kv_len.div_ceil(BLOCK_TOKENS as u32);
    StepBatch {
        tokens: vec![0; (sequences * q_len) as usize],
        positions: (0..sequences).flat_map(|_| kv_len - q_len..kv_len).collect(),
        sequences: (0..sequences)
            .map(|i| StepSequence {
                first_token: i * q_len,
                q_len,
                kv_len,
                first_block: i * blocks,
                adapter: 0,
            })
            .collect(),
        block_tables: vec![(0..sequences * blocks).collect()],
        logits_at: Vec::new(),
        ..StepBatch::default()
    }
}

/// How a checkpoint in BF16 is kept.
fn bytes_per_weight(precision: Precision) -> usize {
    (precision.bits() as usize / 8).min(2)
}

/// Equal layers of `bytes` each, to be taken in turn.
fn layers(device: &Cpu, bytes: usize, (inputs, outputs): (usize, usize)) -> Vec<Linear<Matrix, Vector>> {
    let layer = |_| Linear {
        weight: matrix(device, outputs, inputs),
        bias: None,
    };
    (0..SWEPT_BYTES.div_ceil(bytes)).map(layer).collect()
}

/// One shape at these numbers of rows.
fn linear(
    group: &mut BenchmarkGroup<'_, WallTime>,
    precision: Precision,
    isa: Isa,
    (inputs, outputs): (usize, usize),
    rows: &[usize],
) {
    let device = device(precision, isa);
    let bytes = inputs * outputs * bytes_per_weight(precision);
    // Made only where a name's filter lets a measurement through.
    let layers = LazyCell::new(|| layers(&device, bytes, (inputs, outputs)));
    for &rows in rows {
        group.throughput(if FEW_ROWS.contains(&rows) {
            Throughput::Bytes(bytes as u64)
        } else {
            Throughput::Elements(2 * (rows * inputs * outputs) as u64)
        });
        let is_long = 2 * rows * inputs * outputs >= LONG_CALL;
        group.sample_size(if is_long { LONG_SAMPLES } else { SAMPLES });
        let id = BenchmarkId::new(format!("{inputs}x{outputs}"), rows);
        group.bench_function(id, |bencher| {
            let x = activations(&device, rows, inputs);
            let (mut out, mut workspace) = (device.buffer(), device.workspace());
            let layers = &*layers;
            let mut next = layers.iter().cycle();
            bencher.iter(|| {
                device
                    .linear(next.next().unwrap(), &x, &mut out, &mut workspace)
                    .unwrap()
            });
        });
    }
}

fn new_group(criterion: &mut Criterion, name: String) -> BenchmarkGroup<'_, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group.sampling_mode(SamplingMode::Flat);
    group
}

fn linears(criterion: &mut Criterion) {
    for precision in [Precision::Int8, Precision::Bf16, Precision::F32] {
        let isa = Isa::detect();
        let mut group = new_group(criterion, format!("{}, {isa}", precision.name()));
        for shape in LAYERS {
            linear(&mut group, precision, isa, shape, &[FEW_ROWS, MANY_ROWS].concat());
        }
        for shape in HEADS {
            let rows = [FEW_ROWS, MANY_ROWS].concat();
            let rows: Vec<usize> = rows.into_iter().filter(|rows| *rows <= HEAD_ROWS_MAX).collect();
            linear(&mut group, precision, isa, shape, &rows);
        }
    }
}

/// The other instruction sets, at one shape.
fn instructions(criterion: &mut Criterion) {
    let sets = Isa::available().into_iter().rev().skip(1);
    for isa in sets.filter(|isa| *isa != Isa::Portable) {
        for precision in [Precision::Int8, Precision::Bf16] {
            let mut group = new_group(criterion, format!("{}, {isa}", precision.name()));
            linear(&mut group, precision, isa, LAYERS[0], &[1, 256]);
        }
    }
}

/// Heads of the two models of benches/peers.
const ATTENTION: [(&str, HeadShape); 2] = [
    (
        "l30m",
        HeadShape {
            heads: 6,
            kv_heads: 2,
            head_dim: 64,
            value_in_key: None,
        },
    ),
    (
        "q05b",
        HeadShape {
            heads: 14,
            kv_heads: 2,
            head_dim: 64,
            value_in_key: None,
        },
    ),
];
/// Sequences that attend at once.
const SEQUENCES: u32 = 64;

/// Attention of the last `q_len` of `kv_len` tokens of 64 sequences.
fn attention_of(group: &mut BenchmarkGroup<'_, WallTime>, (name, heads): (&str, HeadShape), q_len: u32, kv_len: u32) {
    let device = device(Precision::Int8, Isa::detect());
    let blocks = (SEQUENCES * kv_len) as usize / BLOCK_TOKENS;
    let bytes = blocks * device.kv_block_bytes(&heads.alone());
    // Queries times the keys that each sees, multiplied with keys and with values.
    let pairs: u64 = (kv_len - q_len..kv_len).map(|position| u64::from(position) + 1).sum();
    let operations = 4 * pairs * u64::from(SEQUENCES) * (heads.heads * heads.head_dim) as u64;
    let is_decoding = q_len == 1;
    group.sample_size(if is_decoding { SAMPLES } else { 2 * LONG_SAMPLES });
    group.throughput(if is_decoding {
        Throughput::Bytes(bytes as u64)
    } else {
        Throughput::Elements(operations)
    });
    let what = if is_decoding { "decode" } else { "prefill" };
    group.bench_function(BenchmarkId::new(format!("{what} {name}"), kv_len), |bencher| {
        let width = heads.qkv_width();
        let mut step = new_step(&device, heads);
        let mut workspace = device.workspace();
        let whole = batch(SEQUENCES, kv_len, kv_len);
        device.upload(&whole, &mut step, &mut workspace).unwrap();
        let mut qkv = device.buffer();
        device
            .embed(&matrix(&device, 1, width), (1.0, None), &step, &mut qkv, &workspace)
            .unwrap();
        let pools: Vec<KvPool> = (0..SWEPT_BYTES.div_ceil(bytes))
            .map(|_| {
                let mut pool = device.kv_pool(&heads.alone(), blocks).unwrap();
                let op = RopeStore {
                    place: KvPlace::alone(heads),
                    qk_norm: None,
                    value_norm: None,
                    rope: 0,
                    stores: true,
                };
                device.rope_store(op, &step, &mut qkv, &mut pool).unwrap();
                pool
            })
            .collect();
        let last = batch(SEQUENCES, q_len, kv_len);
        device.upload(&last, &mut step, &mut workspace).unwrap();
        device
            .embed(&matrix(&device, 1, width), (1.0, None), &step, &mut qkv, &workspace)
            .unwrap();
        let mut out = device.buffer();
        let mut next = pools.iter().cycle();
        let whole = Attention::plain(heads, KvSpec::Full);
        bencher.iter(|| {
            let pool = next.next().unwrap();
            let input = AttentionInput { qkv: &qkv, sinks: None };
            device
                .attention(whole, input, &step, pool, &mut out, &mut workspace)
                .unwrap();
        });
    });
}

fn attention(criterion: &mut Criterion) {
    let mut group = new_group(
        criterion,
        format!("attention {:?}, {}", KvFormat::Int8, Isa::detect()).to_lowercase(),
    );
    for shape in ATTENTION {
        attention_of(&mut group, shape, 1, 1024);
        attention_of(&mut group, shape, 256, 256);
    }
}

fn settings() -> Criterion {
    Criterion::default()
        .sample_size(SAMPLES)
        .nresamples(2_000)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
}

fn main() {
    #[cfg(target_arch = "x86_64")]
    if std::env::args().any(|word| word == "--shares") {
        return shares::print();
    }
    if std::env::args().any(|word| word == "--threads") {
        return threads::print();
    }
    let mut criterion = settings().configure_from_args();
    linears(&mut criterion);
    instructions(&mut criterion);
    attention(&mut criterion);
    criterion.final_summary();
}
