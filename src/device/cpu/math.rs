//! Scalar functions that compile to vector code and give the same bits on every instruction set.

/// `1.5 * 2^23`: adding it rounds a small float to an integer, which is then in the low bits.
pub(super) const ROUND: f32 = 12_582_912.0;
/// ln 2 split so that `n * LN2_HIGH` is exact for |n| < 2^9 (its low 9 bits are zero).
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// For smaller arguments the result would be subnormal; it is 0 instead.
const EXP_MIN: f32 = -87.336_54;
/// For larger arguments the result is `exp(EXP_MAX)`, so that it cannot overflow.
const EXP_MAX: f32 = 88.0;

/// `e^x` with an error of at most 2 units in the last place; 0 below -87.33, `e^88` above 88, NaN
/// for NaN.
///
/// Splits `x = n ln 2 + r` with |r| <= ln 2 / 2, then multiplies the Taylor polynomial of degree 7
/// for `e^r` (its first missing term is below 6e-9) by `2^n`.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let clamped = x.clamp(EXP_MIN, EXP_MAX);
    let shifted = clamped.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, clamped));
    let mut p = 1.0 / 5040.0;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = r.mul_add(p, c);
    }
    // The low bits of `shifted` are n + 0x400000; the exponent field needs n + 127.
    let power = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    let y = p * power;
    if x < EXP_MIN { 0.0 } else { y }
}

/// ln 2.
const LN2: f32 = std::f32::consts::LN_2;
/// The Taylor polynomial of degree 5 for `2^r`, the highest power first. For |r| <= 1/2 its first
/// missing term is below 2.5e-6, and `2^r` is at least 0.7.
pub(super) const EXP2_TAYLOR: [f32; 6] = [
    LN2 * LN2 * LN2 * LN2 * LN2 / 120.0,
    LN2 * LN2 * LN2 * LN2 / 24.0,
    LN2 * LN2 * LN2 / 6.0,
    LN2 * LN2 / 2.0,
    LN2,
    1.0,
];

/// `2^x` for x <= 0, with a relative error of at most 4e-6; 2^-125 below -125, NaN for NaN.
///
/// Splits `x = n + r` with |r| <= 1/2, then multiplies [`EXP2_TAYLOR`] by `2^n`. This is half of
/// [`exp`]'s work, and exact enough for weights that are then rounded to 8 bits.
#[inline(always)]
pub(super) fn exp2(x: f32) -> f32 {
    let clamped = if -125.0 > x { -125.0 } else { x };
    let shifted = clamped + ROUND;
    let r = clamped - (shifted - ROUND);
    let mut p = EXP2_TAYLOR[0];
    for c in &EXP2_TAYLOR[1..] {
        p = r.mul_add(p, *c);
    }
    // The low bits of `shifted` are n + 0x400000. The shift leaves only n, which is added to the
    // exponent.
    f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// `x / (1 + e^-x)`.
#[inline(always)]
pub(super) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `x / (1 + e^-2u)` with `u = sqrt(2 / pi) (x + 0.044715 x^3)`, which is `x (1 + tanh u) / 2`.
#[inline(always)]
pub(super) fn gelu_tanh(x: f32) -> f32 {
    const TWICE: f32 = 2.0 * std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::FRAC_1_SQRT_2;
    let twice = TWICE * (0.044_715 * x * x).mul_add(x, x);
    x / (1.0 + exp(-twice))
}

/// `cap * tanh(x / cap)`, with an absolute error of about `3e-7 * cap`. NaN and infinities are
/// returned unchanged, so that they stay visible to later checks.
///
/// Near 0, `1 - 2 / (e^2y + 1)` loses its significant digits. There the Taylor polynomial of degree
/// 9 replaces it (its first missing term is below 2e-8 of the result for |y| <= 1/4).
#[inline(always)]
pub(super) fn soft_cap(x: f32, cap: f32) -> f32 {
    let y = x / cap;
    let far = 1.0 - 2.0 / (exp(2.0 * y) + 1.0);
    let square = y * y;
    let mut p = 62.0 / 2835.0;
    for c in [-17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0, 1.0] {
        p = square.mul_add(p, c);
    }
    let near = y * p;
    let capped = cap * if y.abs() < 0.25 { near } else { far };
    if x.is_finite() { capped } else { x }
}

/// Rounds to the nearest BF16 value, ties to even; NaN stays NaN.
#[inline(always)]
pub(super) fn round_bf16(x: f32) -> f32 {
    f32::from_bits((bf16_bits(x) as u32) << 16)
}

/// The bits of the nearest BF16 value, ties to even; NaN stays NaN.
#[inline(always)]
pub(super) fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    (if x.is_nan() { quiet } else { rounded }) as u16
}

/// Sum of 16 lanes. Halves are folded onto each other, in the same order on every instruction set.
#[inline(always)]
pub(super) fn sum16(lanes: [f32; 16]) -> f32 {
    let mut l = lanes;
    let mut width = 8;
    while width > 0 {
        for i in 0..width {
            l[i] += l[i + width];
        }
        width /= 2;
    }
    l[0]
}

/// Largest of 16 lanes, which must not be NaN.
#[inline(always)]
pub(super) fn max16(lanes: [f32; 16]) -> f32 {
    let mut l = lanes;
    let mut width = 8;
    while width > 0 {
        for i in 0..width {
            l[i] = if l[i + width] > l[i] { l[i + width] } else { l[i] };
        }
        width /= 2;
    }
    l[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_everywhere() {
        let mut worst = 0.0f64;
        for i in -87_000..88_000 {
            let x = i as f32 * 1e-3 + 3e-4;
            let want = (x as f64).exp();
            worst = worst.max(((exp(x) as f64 - want) / want).abs());
        }
        assert!(worst < 2.0 * 2f64.powi(-23), "relative error {worst:e}");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-200.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(f32::INFINITY).is_finite());
    }

    #[test]
    fn exp2_is_close_below_zero() {
        let mut worst = 0.0f64;
        for i in 0..124_000 {
            let x = i as f32 * -1e-3 - 3e-4;
            let want = (x as f64).exp2();
            worst = worst.max(((exp2(x) as f64 - want) / want).abs());
        }
        assert!(worst < 4e-6, "relative error {worst:e}");
        assert_eq!(exp2(0.0), 1.0);
        assert_eq!(exp2(f32::NEG_INFINITY), 2f32.powi(-125));
        assert!(exp2(f32::NAN).is_nan());
    }

    #[test]
    fn gelu_and_soft_caps_are_close_everywhere() {
        for i in -40_000..40_000 {
            let x = i as f32 * 1e-3 + 3e-4;
            let y = x as f64;
            let u = (2.0 / std::f64::consts::PI).sqrt() * (y + 0.044715 * y.powi(3));
            let want = 0.5 * y * (1.0 + u.tanh());
            assert!(
                (gelu_tanh(x) as f64 - want).abs() <= 1e-6 * want.abs() + 1e-9,
                "{x}: {}",
                gelu_tanh(x)
            );
            for cap in [2.0f32, 30.0, 50.0] {
                let (want, got) = (cap as f64 * (y / cap as f64).tanh(), soft_cap(x, cap) as f64);
                assert!(
                    (got - want).abs() <= 4e-7 * want.abs() + 3e-7 * cap as f64,
                    "{x} {cap}: {got}"
                );
                // Small results keep their relative precision.
                assert!((got - want).abs() <= 2e-6 * want.abs(), "{x} {cap}: {got}");
            }
        }
        assert!(gelu_tanh(-1e30).abs() < 1e-7 && gelu_tanh(1e30) == 1e30);
        assert!(gelu_tanh(f32::NAN).is_nan() && soft_cap(f32::NAN, 3.0).is_nan());
        assert_eq!(
            (soft_cap(f32::NEG_INFINITY, 3.0), soft_cap(1e30, 3.0)),
            (f32::NEG_INFINITY, 3.0)
        );
    }

    #[test]
    fn bf16_rounds_like_half() {
        let mut state = 1u32;
        for _ in 0..100_000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = f32::from_bits(state);
            let want = half::bf16::from_f32(x);
            if x.is_nan() {
                assert!(round_bf16(x).is_nan());
            } else {
                assert_eq!(bf16_bits(x), want.to_bits(), "{x:e}");
            }
        }
    }
}
