//! How near linear layers come to what the machine can do, as a table.
//!
//! By turns: a layer, reading as many bytes as its weights have, and as many operations with all operands in registers, each shared
//! out to the same threads in eight parts. The limit is the slower of the latter two. Others on the machine slow all three down
//! alike, so that the share, the median of each turn's own, holds even there; what is done a second does not.

#![expect(unsafe_code, reason = "loops of AVX-512 intrinsics over addresses")]

use std::arch::x86_64::*;
use std::hint::black_box;
use std::time::Instant;

use gristmill::device::cpu::{Cpu, Isa, Threads};
use gristmill::device::{Device, Precision};

use crate::{FEW_ROWS, HEAD_ROWS_MAX, HEADS, LAYERS, MANY_ROWS, SWEPT_BYTES};

/// Parts that work is shared out in.
const PARTS: usize = 8;
/// Independent sums: enough to hide the latency of an instruction.
const SUMS: usize = 16;
/// Bytes, or operations, of a sample at least: about a millisecond.
const SAMPLE_BYTES: usize = 24 << 20;
const SAMPLE_OPERATIONS: usize = 1 << 28;
/// Seconds a cell of the table takes.
const SECONDS: f64 = 1.5;

#[target_feature(enable = "avx512f,avx512vnni")]
fn products_int8(rounds: usize) {
    let mut sums = [_mm512_setzero_si512(); SUMS];
    let (a, b) = (_mm512_set1_epi8(1), _mm512_set1_epi8(2));
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbusd_epi32(*sum, a, b);
        }
        black_box(&mut ());
    }
    black_box(sums.into_iter().fold(a, |x, y| _mm512_add_epi32(x, y)));
}

#[target_feature(enable = "avx512f,avx512bf16")]
fn products_bf16(rounds: usize) {
    let mut sums = [_mm512_setzero_ps(); SUMS];
    let a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(1.0), _mm512_set1_ps(1.0));
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, a, a);
        }
        black_box(&mut ());
    }
    black_box(sums.into_iter().fold(sums[0], |x, y| _mm512_add_ps(x, y)));
}

#[target_feature(enable = "avx512f")]
fn products_f32(rounds: usize) {
    let mut sums = [_mm512_setzero_ps(); SUMS];
    let a = _mm512_set1_ps(1.0);
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(a, a, *sum);
        }
        black_box(&mut ());
    }
    black_box(sums.into_iter().fold(a, |x, y| _mm512_add_ps(x, y)));
}

#[target_feature(enable = "avx512f")]
fn read(data: &[u64]) {
    let mut sums = [_mm512_setzero_si512(); 4];
    for part in data.as_chunks::<32>().0 {
        for (i, sum) in sums.iter_mut().enumerate() {
            // SAFETY: four registers of eight numbers are the part.
            *sum = _mm512_add_epi64(*sum, unsafe { _mm512_loadu_si512(part.as_ptr().add(i * 8).cast()) });
        }
    }
    black_box(sums.into_iter().fold(sums[0], |x, y| _mm512_add_epi64(x, y)));
}

/// As many operations as a layer, in registers.
fn compute(threads: &Threads, precision: Precision, operations: usize) {
    let per_round = SUMS
        * match precision {
            Precision::Int8 | Precision::Fp8 | Precision::W4a8 => 128,
            Precision::Bf16 => 64,
            Precision::F32 => 32,
        };
    let rounds = operations / PARTS / per_round;
    threads.parallel_for(PARTS, |_, parts| {
        for _ in parts {
            // SAFETY: `print` has asked for these instructions.
            unsafe {
                match precision {
                    // (No CPU computes in FP8; four bits are expanded.)
                    Precision::Int8 | Precision::Fp8 | Precision::W4a8 => products_int8(rounds),
                    Precision::Bf16 => products_bf16(rounds),
                    Precision::F32 => products_f32(rounds),
                }
            }
        }
    });
}

fn seconds(run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    start.elapsed().as_secs_f64()
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// What a layer does a second, and its share of the limit.
fn cell(device: &Cpu, precision: Precision, (inputs, outputs): (usize, usize), rows: usize, memory: &[u64]) -> String {
    let bytes = inputs * outputs * crate::bytes_per_weight(precision);
    let operations = 2 * rows * inputs * outputs;
    let layers = crate::layers(device, bytes, (inputs, outputs));
    let x = crate::activations(device, rows, inputs);
    let (mut out, mut workspace) = (device.buffer(), device.workspace());
    let calls = (SAMPLE_BYTES / bytes).min(SAMPLE_OPERATIONS / operations).max(1);
    let words = (calls * bytes / size_of::<u64>()).min(memory.len());
    let (mut next, mut from) = (layers.iter().cycle(), 0);
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    let threads = crate::threads();
    let start = Instant::now();
    while start.elapsed().as_secs_f64() < SECONDS {
        times[0].push(seconds(|| {
            for _ in 0..calls {
                device
                    .linear(next.next().unwrap(), &x, &mut out, &mut workspace)
                    .unwrap();
            }
        }));
        let parts: Vec<_> = memory[from..][..words].chunks(words.div_ceil(PARTS)).collect();
        times[1].push(seconds(|| {
            threads.parallel_for(parts.len(), |_, mine| {
                // SAFETY: `print` has asked for the instructions.
                mine.for_each(|i| unsafe { read(parts[i]) });
            });
        }));
        from = (from + words) % (memory.len() - words + 1);
        times[2].push(seconds(|| compute(&threads, precision, calls * operations)));
    }
    let shares = (0..times[0].len()).map(|i| times[1][i].max(times[2][i]) / times[0][i] * 100.0);
    let share = median(shares.collect());
    let [layer, reading, computing] = times.map(median);
    if reading > computing {
        format!("{:.1} GB/s, {share:.0} %", (calls * bytes) as f64 / layer / 1e9)
    } else {
        format!("{:.0} G/s, {share:.0} %", (calls * operations) as f64 / layer / 1e9)
    }
}

/// Prints the table: bytes of weights or operations a second, whichever is the limit, and the share of it.
pub(crate) fn print() {
    let has = |name: &str| name.parse::<Isa>().is_ok();
    if !has("avx512-bf16") {
        println!("the ceilings are written for AVX-512 VNNI and BF16, which this processor lacks");
        return;
    }
    let mut memory: Vec<u64> = Vec::with_capacity(SWEPT_BYTES / size_of::<u64>());
    #[cfg(target_os = "linux")]
    // SAFETY: the vector's own memory, whole pages; the advice changes nothing but how they are backed.
    unsafe {
        const PAGE: usize = 1 << 16;
        let start = (memory.as_ptr() as usize).next_multiple_of(PAGE);
        libc::madvise(start as *mut libc::c_void, SWEPT_BYTES - 2 * PAGE, libc::MADV_HUGEPAGE);
    }
    memory.resize(SWEPT_BYTES / size_of::<u64>(), 1);
    let sizes = [FEW_ROWS, MANY_ROWS].concat();
    let titles: String = sizes.iter().map(|rows| format!(" {rows} |")).collect();
    println!(
        "Rows at once, on {}:\n\n| precision | shape |{titles}\n|---|---|---|---|---|---|---|---|",
        Isa::detect()
    );
    for precision in [Precision::Int8, Precision::Bf16, Precision::F32] {
        let device = crate::device(precision, Isa::detect());
        // The largest head takes half a minute a cell to prepare.
        for shape in [&LAYERS[..], &HEADS[..1]].concat() {
            let is_head = HEADS.contains(&shape);
            let cells: String = sizes
                .iter()
                .map(|rows| {
                    if is_head && *rows > HEAD_ROWS_MAX {
                        " |".to_string()
                    } else {
                        format!(" {} |", cell(&device, precision, shape, *rows, &memory))
                    }
                })
                .collect();
            println!("| {} | {}x{} |{cells}", precision.name(), shape.0, shape.1);
        }
    }
}
