//! What sharing out work costs, as a table: a region of eight equal parts, then work that the calling thread does alone, by turns on
//! rayon's threads and on the device's. Printed is how much longer a round took than its parts and the rest would have without any
//! cost.

use std::time::Instant;

use rayon::prelude::*;

/// Parts of a region.
const PARTS: usize = 8;
/// Microseconds a part takes, and what comes between regions.
const ROUNDS: [(u64, u64); 6] = [(2, 0), (2, 5), (2, 30), (10, 5), (10, 50), (10, 500)];
const REGIONS: usize = 400;
/// Samples of so many regions, of which the median counts.
const SAMPLES: usize = 9;

fn work(microseconds: u64) {
    let start = Instant::now();
    while (start.elapsed().as_nanos() as u64) < microseconds * 1000 {
        std::hint::spin_loop();
    }
}

/// Microseconds a round takes.
fn sample(between: u64, region: impl Fn()) -> f64 {
    let start = Instant::now();
    for _ in 0..REGIONS {
        region();
        work(between);
    }
    start.elapsed().as_secs_f64() * 1e6 / REGIONS as f64
}

pub(crate) fn print() {
    let threads = crate::threads();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.count()).build();
    let pool = pool.expect("the system gives threads");
    println!("| a part, µs | between, µs | rayon, µs over | threads, µs over |\n|---|---|---|---|");
    for (part, between) in ROUNDS {
        let ideal = (part * PARTS.div_ceil(threads.count()) as u64 + between) as f64;
        let [mut rayon, mut own] = [Vec::new(), Vec::new()];
        for _ in 0..SAMPLES {
            rayon.push(pool.install(|| sample(between, || (0..PARTS).into_par_iter().for_each(|_| work(part)))));
            own.push(sample(between, || {
                threads.parallel_for(PARTS, |_, parts| parts.for_each(|_| work(part)));
            }));
        }
        let over = |mut times: Vec<f64>| {
            times.sort_by(f64::total_cmp);
            times[SAMPLES / 2] - ideal
        };
        println!("| {part} | {between} | {:.1} | {:.1} |", over(rayon), over(own));
    }
}
