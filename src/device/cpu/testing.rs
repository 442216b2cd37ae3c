//! Helpers that the tests of the operations share.

use std::sync::OnceLock;

use half::{bf16, f16};

pub(super) use skips::lacks;

use super::{Buffer, ExecContext, Isa, Threads};
use crate::device::{Dtype, Tensor};

#[path = "../../../tests/skips.rs"]
mod skips;

/// `n` numbers in (-1, 1), the same for the same seed.
pub(crate) fn numbers(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1u64 << 23) as f32) - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Numbers as a checkpoint stores them.
pub(super) fn bytes_of(values: &[f32], dtype: Dtype) -> Vec<u8> {
    values
        .iter()
        .flat_map(|&x| match dtype {
            Dtype::F32 => x.to_le_bytes().to_vec(),
            Dtype::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
            Dtype::Bf16 => bf16::from_f32(x).to_le_bytes().to_vec(),
        })
        .collect()
}

/// A matrix of numbers in F32, whose bytes are `data`.
pub(super) fn tensor(data: &[u8], rows: usize, columns: usize) -> Tensor<'_> {
    Tensor {
        dtype: Dtype::F32,
        rows,
        columns,
        data,
    }
}

/// A matrix of two parts below each other: the first one's rows have numbers in their first 3 columns only, those of the second one in
/// the others.
pub(super) fn two_parts(seed: u64, [first_rows, rows]: [usize; 2], columns: usize) -> Vec<f32> {
    let mut values = numbers(seed, rows * columns);
    for (i, x) in values.iter_mut().enumerate() {
        if (i / columns < first_rows) != (i % columns < 3) {
            *x = 0.0;
        }
    }
    values
}

/// A buffer that contains `values`.
pub(super) fn buffer(values: &[f32], rows: usize, width: usize) -> Buffer {
    assert_eq!(values.len(), rows * width);
    Buffer {
        data: values.into(),
        rows,
        width,
        ..Buffer::default()
    }
}

/// A context with `count` threads (fewer than 10), which all tests share.
pub(super) fn ctx_with_threads(isa: Isa, count: usize) -> ExecContext<'static> {
    static THREADS: [OnceLock<Threads>; 10] = [const { OnceLock::new() }; 10];
    let threads = THREADS[count].get_or_init(|| Threads::new(count).expect("the system gives threads"));
    ExecContext { isa, threads }
}

/// A context with two threads.
pub(super) fn ctx(isa: Isa) -> ExecContext<'static> {
    ctx_with_threads(isa, 2)
}
