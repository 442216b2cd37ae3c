//! Number formats that weights are rounded to, and the factors of rows and groups.

use std::sync::LazyLock;

use half::bf16;

use crate::model::quantized::e4m3;

/// What codes stand for, before they are multiplied by a factor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Grid {
    /// Whole numbers from −127 to 127.
    Int8,
    /// E4M3, up to 448.
    Fp8,
    /// Whole numbers from −8 to 7.
    Int4,
}

/// Shares of the factor that fits a group's largest number which are tried as its factor: a smaller one
/// cuts the largest numbers off and rounds the others less.
const SHARES: [f32; 9] = [1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6];

impl Grid {
    /// The magnitude that a row's or group's largest number becomes. As compressed-tensors has it, that of
    /// 4 bits is the middle of both ends.
    fn largest(self) -> f32 {
        match self {
            Grid::Int8 => 127.0,
            Grid::Fp8 => 448.0,
            Grid::Int4 => 7.5,
        }
    }

    /// The nearest code of a number; ties go to the even one.
    pub(super) fn code(self, x: f32) -> u8 {
        match self {
            Grid::Int8 => x.round_ties_even().clamp(-127.0, 127.0) as i8 as u8,
            Grid::Fp8 => nearest_e4m3(x),
            Grid::Int4 => (x.round_ties_even().clamp(-8.0, 7.0) + 8.0) as u8,
        }
    }

    /// What a code stands for.
    pub(super) fn value(self, code: u8) -> f32 {
        match self {
            Grid::Int8 => f32::from(code as i8),
            Grid::Fp8 => e4m3(code),
            Grid::Int4 => f32::from(code) - 8.0,
        }
    }

    /// The factor of numbers that share one. With `weights` (one for each number), it is the one of
    /// [`SHARES`] whose squared errors, weighted so, are smallest. 0 if all numbers are.
    pub(super) fn factor(self, numbers: &[f32], weights: Option<&[f32]>, stored: FactorDtype) -> f32 {
        let largest = numbers.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        let fitting = largest / self.largest();
        if self != Grid::Int4 {
            // Below, so that the largest number keeps the largest code: whoever finds a factor by it finds this one.
            return stored.below(fitting);
        }
        let error = |factor: f32| -> f64 {
            let inverse = inverse(factor);
            let one = |(i, x): (usize, &f32)| {
                let difference = x - self.value(self.code(x * inverse)) * factor;
                f64::from(difference * difference) * f64::from(weights.map_or(1.0, |weights| weights[i]))
            };
            numbers.iter().enumerate().map(one).sum()
        };
        let factors = SHARES.map(|share| stored.round(fitting * share));
        let mut best = (error(factors[0]), factors[0]);
        for factor in &factors[1..] {
            let found = error(*factor);
            if found < best.0 {
                best = (found, *factor);
            }
        }
        best.1
    }
}

/// The inverse of a factor; 0 of 0, whose numbers are all 0.
pub(super) fn inverse(factor: f32) -> f32 {
    if factor > 0.0 { 1.0 / factor } else { 0.0 }
}

/// The number format in which factors are stored: codes are made for the factor that readers find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FactorDtype {
    F32,
    Bf16,
}

impl FactorDtype {
    fn round(self, factor: f32) -> f32 {
        match self {
            FactorDtype::F32 => factor,
            FactorDtype::Bf16 => bf16::from_f32(factor).to_f32(),
        }
    }

    /// The largest number of the format that is not above a positive `factor`.
    fn below(self, factor: f32) -> f32 {
        match self {
            FactorDtype::F32 => factor,
            // BF16 is the upper half of F32.
            FactorDtype::Bf16 => f32::from_bits(factor.to_bits() & 0xffff_0000),
        }
    }

    pub(super) fn bytes(self, factors: &[f32]) -> Vec<u8> {
        let factors = factors.iter();
        match self {
            FactorDtype::F32 => factors.flat_map(|x| x.to_le_bytes()).collect(),
            FactorDtype::Bf16 => factors.flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        }
    }
}

/// The nearest number of E4M3; larger ones become the largest.
fn nearest_e4m3(x: f32) -> u8 {
    // Codes of one sign ascend with their numbers.
    static MAGNITUDES: LazyLock<[f32; 127]> = LazyLock::new(|| std::array::from_fn(|code| e4m3(code as u8)));
    let magnitudes = &*MAGNITUDES;
    let magnitude = x.abs().min(448.0);
    let above = magnitudes.partition_point(|number| *number < magnitude) as u8;
    let below = above.saturating_sub(1);
    let (to_above, to_below) = (
        magnitudes[above as usize] - magnitude,
        magnitude - magnitudes[below as usize],
    );
    let is_below = to_below < to_above || (to_below == to_above && below.is_multiple_of(2));
    let code = if is_below { below } else { above };
    if x.is_sign_negative() { code | 0x80 } else { code }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_of_a_grid_is_its_own_code() {
        for code in 0..=255u8 {
            let back = |grid: Grid| grid.value(grid.code(grid.value(code)));
            if code != 0x80 {
                assert_eq!(back(Grid::Int8), f32::from(code as i8));
            }
            if code & 0x7f != 0x7f {
                assert_eq!(back(Grid::Fp8), e4m3(code), "{code:#x}");
                assert_eq!(Grid::Fp8.code(e4m3(code)), code, "{code:#x}");
            }
            if code < 16 {
                assert_eq!(back(Grid::Int4), f32::from(code) - 8.0);
            }
        }
    }

    #[test]
    fn numbers_go_to_the_nearest_and_ends_hold() {
        for (grid, x, value) in [
            (Grid::Int8, 200.0, 127.0),
            (Grid::Int8, -200.0, -127.0),
            (Grid::Int8, 2.5, 2.0),
            (Grid::Int8, 3.5, 4.0),
            (Grid::Int4, 9.0, 7.0),
            (Grid::Int4, -9.0, -8.0),
            (Grid::Int4, -2.6, -3.0),
            (Grid::Fp8, 1000.0, 448.0),
            (Grid::Fp8, -1000.0, -448.0),
            // Between 1 and 1.125, and between 1.125 and 1.25.
            (Grid::Fp8, 1.0625, 1.0),
            (Grid::Fp8, 1.1875, 1.25),
            (Grid::Fp8, 1.07, 1.125),
            (Grid::Fp8, -1.06, -1.0),
            // Half of the smallest number, and more.
            (Grid::Fp8, 0.000_976_562_5, 0.0),
            (Grid::Fp8, 0.001, 0.001_953_125),
        ] {
            assert_eq!(grid.value(grid.code(x)), value, "{grid:?} {x}");
        }
    }

    #[test]
    fn factors_fit_the_largest_number_or_cut_it_off() {
        let numbers = [0.5, -2.0, 1.0];
        assert_eq!(Grid::Int8.factor(&numbers, None, FactorDtype::F32), 2.0 / 127.0);
        assert_eq!(Grid::Fp8.factor(&numbers, None, FactorDtype::F32), 2.0 / 448.0);
        assert_eq!(Grid::Int8.factor(&[0.0; 3], None, FactorDtype::F32), 0.0);
        for largest in [2.0, 2.01, 2.02, 2.03] {
            let factor = Grid::Int8.factor(&[0.5, -largest], None, FactorDtype::Bf16);
            assert_eq!(factor, bf16::from_f32(factor).to_f32());
            assert!(factor <= largest / 127.0 && factor > largest / 128.5, "{factor}");
            assert_eq!(Grid::Int8.value(Grid::Int8.code(-largest * inverse(factor))), -127.0);
        }
        // One number far from the others: cutting it off rounds them less, unless it counts more.
        let mut numbers: Vec<f32> = (0..32).map(|i| (i as f32 * 0.7).sin() * 0.3).collect();
        numbers[7] = 0.4;
        let mut weights = vec![1.0; 32];
        let equal = Grid::Int4.factor(&numbers, Some(&weights), FactorDtype::F32);
        assert_eq!(equal, Grid::Int4.factor(&numbers, None, FactorDtype::F32));
        assert!(equal < 0.96 * 0.4 / 7.5, "{equal}");
        weights[7] = 1e6;
        let counted = Grid::Int4.factor(&numbers, Some(&weights), FactorDtype::F32);
        assert!(counted > equal, "{counted} {equal}");
    }
}
