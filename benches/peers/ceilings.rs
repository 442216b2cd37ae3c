//! What this machine can do at most: `rustc --edition 2024 -C opt-level=3 ceilings.rs && ./ceilings` prints one JSON object.
//!
//! Arithmetic with all operands in registers, and reading memory several times as large as the caches, each on all threads at
//! once; the best of five.

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    /// Independent sums: enough to hide the latency of an instruction.
    const SUMS: usize = 16;
    const ROUNDS: usize = 20_000_000;

    // Sums leave as one value: an array whose address is taken would lie in memory.

    #[target_feature(enable = "avx512f,avx512vnni")]
    fn dpbusd() {
        let mut sums = [_mm512_setzero_si512(); SUMS];
        let (a, b) = (_mm512_set1_epi8(1), _mm512_set1_epi8(2));
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, a, b);
            }
            black_box(&mut ());
        }
        black_box(sums.into_iter().fold(a, |x, y| _mm512_add_epi32(x, y)));
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    fn dpbf16() {
        let mut sums = [_mm512_setzero_ps(); SUMS];
        let a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(1.0), _mm512_set1_ps(1.0));
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, a, a);
            }
            black_box(&mut ());
        }
        black_box(sums.into_iter().fold(sums[0], |x, y| _mm512_add_ps(x, y)));
    }

    #[target_feature(enable = "avx512f")]
    fn fma_512() {
        let mut sums = [_mm512_setzero_ps(); SUMS];
        let a = _mm512_set1_ps(1.0);
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(a, a, *sum);
            }
            black_box(&mut ());
        }
        black_box(sums.into_iter().fold(a, |x, y| _mm512_add_ps(x, y)));
    }

    #[target_feature(enable = "avx2,fma")]
    fn fma_256() {
        // As many as there are registers for.
        let mut sums = [_mm256_setzero_ps(); 12];
        let a = _mm256_set1_ps(1.0);
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(a, a, *sum);
            }
            black_box(&mut ());
        }
        black_box(sums.into_iter().fold(a, |x, y| _mm256_add_ps(x, y)));
    }

    /// Name, operations of one thread's run, the run.
    pub fn arithmetic() -> Vec<(&'static str, f64, fn())> {
        let mut all: Vec<(&'static str, f64, fn())> = Vec::new();
        // SAFETY of each: asked for just before.
        if is_x86_feature_detected!("avx512vnni") {
            all.push(("int8_gops", (ROUNDS * SUMS * 128) as f64, || unsafe { dpbusd() }));
        }
        if is_x86_feature_detected!("avx512bf16") {
            all.push(("bf16_gflops", (ROUNDS * SUMS * 64) as f64, || unsafe { dpbf16() }));
        }
        if is_x86_feature_detected!("avx512f") {
            all.push(("f32_gflops", (ROUNDS * SUMS * 32) as f64, || unsafe { fma_512() }));
        } else if is_x86_feature_detected!("fma") {
            all.push(("f32_gflops", (ROUNDS * 12 * 16) as f64, || unsafe { fma_256() }));
        }
        all
    }
}

/// Seconds that all threads take for `run`, the best of five.
fn best(threads: usize, run: impl Fn(usize) + Sync) -> f64 {
    (0..5)
        .map(|_| {
            let start = std::time::Instant::now();
            std::thread::scope(|scope| {
                for thread in 0..threads {
                    let run = &run;
                    scope.spawn(move || run(thread));
                }
            });
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min)
}

fn main() {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let mut found = vec![("threads", threads as f64)];
    #[cfg(target_arch = "x86_64")]
    for (name, operations, run) in x86::arithmetic() {
        let seconds = best(threads, |_| run());
        found.push((name, operations * threads as f64 / seconds / 1e9));
    }
    let memory = vec![1u64; 1 << 27];
    let part = memory.len() / threads;
    let seconds = best(threads, |thread| {
        let sum = memory[thread * part..][..part].iter().fold(0u64, |sum, x| sum.wrapping_add(*x));
        std::hint::black_box(sum);
    });
    found.push(("read_gb_per_second", (part * threads * 8) as f64 / seconds / 1e9));
    let fields: Vec<String> = found.iter().map(|(name, value)| format!("\"{name}\": {value:.1}")).collect();
    println!("{{{}}}", fields.join(", "));
}
