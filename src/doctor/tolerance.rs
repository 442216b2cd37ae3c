//! Maximum errors of each format, compared with F32. Tolerances are set per format, so a test
//! cannot choose its own.
//!
//! Errors are relative to the root mean square (RMS) of the correct values. If values are uniform
//! in [-1, 1):
//!
//! - BF16 keeps 8 significant bits. A value's error is at most 2^-8 of the value, and below 2^-9 on
//!   average. Every operation rounds its result.
//! - INT8 rounds to steps of max / 127, with an RMS error of step / sqrt(12). Values that fill
//!   [-max, max] evenly have an RMS of max / sqrt(3), so the relative error is 1 / (127 * 2) =
//!   0.004. Bell-shaped rows reach about four times their RMS: 4 / (127 * sqrt(12)) = 0.009.
//! - E4M3 keeps 4 significant bits. Its step is 2^-3 of a value at the lower end of a power of two,
//!   and 2^-4 at the upper end. The error is step / sqrt(12), which is 0.026 of the value on
//!   average.
//!
//! The inputs of linear operations are rows that the format represents exactly, so results differ
//! only by their rounding. Among millions of such sums, the largest is almost six times their RMS.
//!
//! The allowed RMS error is twice the expected error. The largest single differences occur at the
//! largest values, which reach about four times the RMS (products of two such values: sixteen
//! times). At these values, each rounding to BF16 adds at most 2^-8 of the value. A rounding to
//! E4M3 adds at most 2^-4 of the value, two and a half times the expected error. Among many sums of
//! errors, the largest is about six standard deviations.

use crate::device::{KvFormat, Precision, RecurrentKind};

/// Maximum errors of a result, relative to the RMS of the correct values.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Tolerance {
    /// Maximum RMS of the differences.
    pub error: f64,
    /// Maximum of a single difference.
    pub worst: f64,
}

/// Expected error of one rounding to BF16.
const BF16_ERROR: f64 = 1.0 / 512.0;
/// Expected error of one rounding of bell-shaped rows to INT8, as derived above.
const INT8_ERROR: f64 = 4.0 / (127.0 * 3.4641);
const E4M3_ERROR: f64 = 0.026;

impl Tolerance {
    /// Tolerance of values that are rounded `roundings` times to BF16 and quantized `quantizations`
    /// times to 8 bits. `eight_bit_error` is the expected error of one quantization.
    fn for_roundings(roundings: f64, eight_bit_error: f64, quantizations: f64) -> Tolerance {
        Tolerance::with_peak(4.0, roundings, eight_bit_error, quantizations)
    }

    /// As [`for_roundings`](Self::for_roundings), if the largest values are `peak` times their RMS.
    fn with_peak(peak: f64, roundings: f64, eight_bit_error: f64, quantizations: f64) -> Tolerance {
        Tolerance {
            error: 2.0 * (BF16_ERROR * roundings.sqrt() + eight_bit_error * quantizations.sqrt()),
            worst: peak * (2.0 * BF16_ERROR * roundings + 2.5 * eight_bit_error * quantizations.sqrt()),
        }
    }

    /// For values that are copied: no error is allowed.
    pub fn exact() -> Tolerance {
        Tolerance { error: 0.0, worst: 0.0 }
    }

    /// For rows that are rounded `roundings` times to BF16 and then quantized.
    pub fn rounded_rows(precision: Precision, roundings: u32) -> Tolerance {
        Tolerance::for_roundings(f64::from(roundings), written_error(precision), 1.0)
    }

    /// For matmuls of operands that the format represents exactly. The result is rounded to BF16.
    pub fn matmul() -> Tolerance {
        Tolerance::with_peak(6.0, 1.0, 0.0, 0.0)
    }

    /// For `activation(gate) * up` after such matmuls. The two matmuls, the activation and the
    /// result are rounded to BF16, and the result is quantized.
    pub fn gated(precision: Precision) -> Tolerance {
        Tolerance::with_peak(16.0, 5.0, written_error(precision), 1.0)
    }

    /// For experts: their gated rows are as in [`gated`](Self::gated), and are then multiplied and
    /// added up, with a rounding to BF16 after each.
    pub fn experts(precision: Precision) -> Tolerance {
        Tolerance::with_peak(6.0, 7.0, eight_bit_error(precision), 1.0)
    }

    /// For recurrent layers, whose rows are exact in BF16: states are F32, and outputs are rounded, in Mamba-2
    /// before their norm as well. They are normalised values times `SiLU`: products of two.
    pub fn recurrent(kind: RecurrentKind) -> Tolerance {
        let roundings = match kind {
            RecurrentKind::DeltaNet => 1.0,
            RecurrentKind::Mamba2 => 2.0,
        };
        Tolerance::with_peak(16.0, roundings, 0.0, 0.0)
    }

    /// For inputs of layers: a norm, a sum and its factor, each rounded.
    pub fn layer_inputs() -> Tolerance {
        Tolerance::for_roundings(3.0, 0.0, 0.0)
    }

    /// For values times the sigmoid of a gate, which are rounded once.
    pub fn gate() -> Tolerance {
        Tolerance::for_roundings(1.0, 0.0, 0.0)
    }

    /// For attention: queries (twice, because of their rotation), keys, weights, values and the
    /// result are rounded.
    pub fn attention(kv: KvFormat) -> Tolerance {
        let eight_bit_error = match kv {
            // Only GPUs are compared, and none has keys and values in 4 bits.
            KvFormat::F32 | KvFormat::Bf16 | KvFormat::Int4 => 0.0,
            KvFormat::Int8 => INT8_ERROR,
            KvFormat::Fp8 => E4M3_ERROR,
        };
        Tolerance::for_roundings(6.0, eight_bit_error, 4.0)
    }
}

/// Error of the quantization of rows that an operation writes. In four bits rows are quantized where they are read, so these are
/// not.
fn written_error(precision: Precision) -> f64 {
    match precision {
        Precision::W4a8 => 0.0,
        others => eight_bit_error(others),
    }
}

fn eight_bit_error(precision: Precision) -> f64 {
    match precision {
        Precision::F32 | Precision::Bf16 => 0.0,
        Precision::Int8 | Precision::W4a8 => INT8_ERROR,
        Precision::Fp8 => E4M3_ERROR,
    }
}
