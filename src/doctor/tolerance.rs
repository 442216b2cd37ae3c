//! How far a format may be from F32. A tolerance belongs to the format, never to a test.
//!
//! Errors are measured against the root mean square of the right values. With values uniform in [-1, 1):
//!
//! - BF16 keeps 8 bits: a value is off by at most 2^-9 of itself, and every operation rounds its result.
//! - INT8 in steps of max / 127: off by step / sqrt(12) on average, 1 / (127 * 2) of the root mean square of values that fill
//!   [-max, max] evenly; what is multiplied is rounded on both sides: sqrt(2) / 254 = 0.0056. Inputs that are bell-shaped
//!   reach some four times their root mean square: sqrt(2) * 4 / (127 * sqrt(12)) = 0.013.
//! - E4M3 keeps 4 bits: steps of 2^-3 at the lower end of a power of two, 2^-4 at its upper end, of the value; off by
//!   step / sqrt(12), 0.026 on average; sqrt(2) * 0.026 = 0.037 where both sides are rounded.
//!
//! The allowed error is twice what is expected. Of single values, those are furthest off that are largest, some four times the root
//! mean square: by 4 * 2^-9 for each time that they are rounded to BF16; and of many sums of errors one lies some six standard
//! deviations out, of values in E4M3 by 4 * 2^-4: ten times what is expected of 8 bits.

use crate::device::{KvFormat, Precision};

/// What is allowed.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Tolerance {
    /// Of the root mean square.
    pub error: f64,
    /// Of the largest difference.
    pub worst: f64,
}

/// Of one rounding to BF16.
const BF16: f64 = 1.0 / 512.0;
/// Of one rounding of bell-shaped rows, as derived above.
const INT8: f64 = 4.0 / (127.0 * 3.4641);
const E4M3: f64 = 0.026;

impl Tolerance {
    /// Of what is rounded to BF16 so often, and to 8 bits, each of whose roundings is expected to cost `eight`, so often.
    fn of(roundings: f64, eight: f64, times: f64) -> Tolerance {
        let expected = BF16 * roundings.sqrt() + eight * times.sqrt();
        Tolerance {
            error: 2.0 * expected,
            worst: 4.0 * BF16 * roundings + 10.0 * eight * times.sqrt(),
        }
    }

    /// Of values that are copied: none.
    pub fn exact() -> Tolerance {
        Tolerance { error: 0.0, worst: 0.0 }
    }

    /// Of rows that are rounded to BF16 so often and then quantized.
    pub fn rows(precision: Precision, roundings: u32) -> Tolerance {
        Tolerance::of(f64::from(roundings), eight(precision), 1.0)
    }

    /// Of products of quantized rows, rounded to BF16 at the end.
    pub fn products(precision: Precision) -> Tolerance {
        Tolerance::of(1.0, eight(precision), 2.0)
    }

    /// Of silu(gate) * up of such products, quantized again: both factors are off, and silu's slope is at most 1.1.
    pub fn gated(precision: Precision) -> Tolerance {
        Tolerance::of(5.0, eight(precision), 5.0)
    }

    /// Of attention: queries (twice, with their rotation), keys, weights and values are rounded, and the result.
    pub fn attention(kv: KvFormat) -> Tolerance {
        let eight = match kv {
            KvFormat::F32 | KvFormat::Bf16 => 0.0,
            KvFormat::Int8 => INT8,
            KvFormat::Fp8 => E4M3,
        };
        Tolerance::of(6.0, eight, 4.0)
    }
}

fn eight(precision: Precision) -> f64 {
    match precision {
        Precision::F32 | Precision::Bf16 => 0.0,
        Precision::Int8 => INT8,
        Precision::Fp8 => E4M3,
    }
}
