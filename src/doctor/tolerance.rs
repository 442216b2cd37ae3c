//! How far a format may be from F32. A tolerance belongs to the format, never to a test.
//!
//! Errors are measured against the root mean square of the right values. With values uniform in [-1, 1):
//!
//! - BF16 keeps 8 bits: a value is off by at most 2^-8 of itself, on average by less than 2^-9, and every operation rounds its result.
//! - INT8 in steps of max / 127: off by step / sqrt(12) on average, 1 / (127 * 2) of the root mean square of values that fill
//!   [-max, max] evenly, 0.004. Rows that are bell-shaped
//!   reach some four times their root mean square: 4 / (127 * sqrt(12)) = 0.009.
//! - E4M3 keeps 4 bits: steps of 2^-3 at the lower end of a power of two, 2^-4 at its upper end, of the value; off by
//!   step / sqrt(12), 0.026 on average.
//!
//! Linear operations are given rows that their format holds exactly, so that their products may be off by the result's rounding alone. Of
//! millions of such sums the largest lies almost six times the root mean square out.
//!
//! The allowed error is twice what is expected. Of single values, those are furthest off that are largest, some four times the root
//! mean square (products of two such values: sixteen times): by 2^-8 of themselves for each time that they are rounded to BF16, in
//! E4M3 by 2^-4, two and a half times what is expected; and of many sums of errors, one lies some six standard deviations out.

use crate::device::{KvFormat, Precision};

/// What is allowed.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Tolerance {
    /// Of the root mean square.
    pub error: f64,
    /// Of the largest difference.
    pub worst: f64,
}

/// Of one rounding to BF16, on average.
const BF16: f64 = 1.0 / 512.0;
/// Of one rounding of bell-shaped rows, as derived above.
const INT8: f64 = 4.0 / (127.0 * 3.4641);
const E4M3: f64 = 0.026;

impl Tolerance {
    /// Of what is rounded to BF16 so often, and to 8 bits, each of whose roundings is expected to cost `eight`, so often.
    fn of(roundings: f64, eight: f64, times: f64) -> Tolerance {
        Tolerance::reaching(4.0, roundings, eight, times)
    }

    /// As [`of`](Self::of), where the largest values are `reach` times their root mean square.
    fn reaching(reach: f64, roundings: f64, eight: f64, times: f64) -> Tolerance {
        Tolerance {
            error: 2.0 * (BF16 * roundings.sqrt() + eight * times.sqrt()),
            worst: reach * (2.0 * BF16 * roundings + 2.5 * eight * times.sqrt()),
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

    /// Of products of what the format holds exactly, rounded to BF16 at the end.
    pub fn products() -> Tolerance {
        Tolerance::reaching(6.0, 1.0, 0.0, 0.0)
    }

    /// Of activation(gate) * up of such products: each is rounded, the activation too, and the product, which is quantized.
    pub fn gated(precision: Precision) -> Tolerance {
        Tolerance::reaching(16.0, 5.0, eight(precision), 1.0)
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
