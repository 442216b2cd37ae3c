//! Rotary embedding's inverse frequencies and their scalings.
//!
//! Pair `d` of a head of `n` dimensions turns by `theta^(-2d/n)` radians per position. Scalings
//! stretch these frequencies for contexts longer than the pretrained one. Arithmetic is in F32
//! wherever the Hugging Face reference computes in F32.

use std::f64::consts::PI;

use crate::device::RopeSpec;

/// A model's rotary embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the wavelengths (`rope_theta`).
    pub theta: f64,
    pub scaling: Scaling,
}

/// How frequencies are stretched.
#[derive(Debug, Clone, PartialEq)]
pub enum Scaling {
    None,
    /// All frequencies divided by `factor`.
    Linear {
        factor: f64,
    },
    /// The base grows with the context (NTK-aware). The reference uses the length that a sequence
    /// has reached, so a token would depend on the progress of its batch. Here the length is the
    /// job's context, fixed for all rows. The base stays unchanged for a context within
    /// `pretrained_tokens`.
    Dynamic {
        factor: f64,
        pretrained_tokens: u32,
    },
    /// Frequencies of long wavelengths are divided by `factor`, those of short ones are kept, with
    /// a smooth transition between them (Llama 3.1).
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        pretrained_tokens: u32,
    },
    Yarn(Yarn),
    LongRope(LongRope),
    /// Only the fastest pairs turn, a share of all; the frequencies are those of a head in which all
    /// do, divided by `factor` (Gemma 4).
    Proportional {
        share: f64,
        factor: f64,
    },
}

/// LongRoPE (Ding et al. 2024): the frequency of each pair is divided by a factor of its own. There
/// are factors for contexts within the pretrained one and for longer ones. The reference chooses by
/// the length that a batch has reached; here the choice is the job's context, fixed for all rows.
/// Sine and cosine are scaled in either case.
#[derive(Debug, Clone, PartialEq)]
pub struct LongRope {
    pub short_factors: Vec<f32>,
    pub long_factors: Vec<f32>,
    pub attention_factor: f64,
    pub pretrained_tokens: u32,
}

impl LongRope {
    fn factors(&self, context: u32) -> &[f32] {
        if context > self.pretrained_tokens {
            &self.long_factors
        } else {
            &self.short_factors
        }
    }
}

/// LongRoPE's attention factor if the checkpoint gives none, for a context of `factor` times the
/// pretrained one: `sqrt(1 + ln(factor) / ln(pretrained_tokens))`.
pub fn longrope_attention_factor(factor: f64, pretrained_tokens: u32) -> f64 {
    if factor <= 1.0 {
        1.0
    } else {
        (1.0 + factor.ln() / f64::from(pretrained_tokens).ln()).sqrt()
    }
}

/// YaRN (Peng et al. 2023). How interpolated and original frequencies are mixed depends on the
/// number of turns of a pair in the pretrained context. Sine and cosine are scaled.
#[derive(Debug, Clone, PartialEq)]
pub struct Yarn {
    pub factor: f64,
    /// Scale of sine and cosine; computed from `factor` if the checkpoint gives none.
    pub attention_factor: f64,
    /// A pair with at least this many turns in the pretrained context keeps its frequency.
    pub beta_fast: f64,
    /// A pair with at most this many turns is fully interpolated.
    pub beta_slow: f64,
    pub pretrained_tokens: u32,
    /// Whether the range of mixed pairs is rounded outwards to whole pairs.
    pub truncate: bool,
}

/// YaRN's attention factor if the checkpoint gives none: `0.1 m ln(factor) + 1` with m = 1, or the
/// ratio of this term for m = `mscale` to the term for m = `mscale_all_dim`.
pub fn yarn_attention_factor(factor: f64, mscale: Option<f64>, mscale_all_dim: Option<f64>) -> f64 {
    let term = |m: f64| {
        if factor <= 1.0 {
            1.0
        } else {
            0.1 * m * factor.ln() + 1.0
        }
    };
    match (mscale, mscale_all_dim) {
        (Some(m), Some(all)) if m != 0.0 && all != 0.0 => term(m) / term(all),
        _ => term(1.0),
    }
}

impl Rope {
    /// Frequencies for heads of `head_dim` dimensions, of which the first `rotary_dims` rotate, and
    /// a maximum sequence length of `context` tokens.
    pub fn spec(&self, head_dim: usize, rotary_dims: usize, context: u32) -> RopeSpec {
        let plain = |theta: f64| -> Vec<f32> { periods(theta, rotary_dims).map(|period| 1.0 / period).collect() };
        let (mut inverse_frequencies, scale) = match &self.scaling {
            Scaling::None => (plain(self.theta), 1.0),
            Scaling::Linear { factor } => (plain(self.theta).into_iter().map(|f| f / *factor as f32).collect(), 1.0),
            Scaling::Dynamic {
                factor,
                pretrained_tokens,
            } => {
                let (n, pretrained) = (rotary_dims as f64, *pretrained_tokens as f64);
                let length = (context as f64).max(pretrained);
                let growth = factor * length / pretrained - (factor - 1.0);
                (plain(self.theta * growth.powf(n / (n - 2.0))), 1.0)
            }
            Scaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                pretrained_tokens,
            } => {
                let pretrained = *pretrained_tokens as f64;
                let stretch = |f: f32| {
                    let wavelength = 2.0 * PI / f as f64;
                    if wavelength > pretrained / low_freq_factor {
                        f / *factor as f32
                    } else if wavelength < pretrained / high_freq_factor {
                        f
                    } else {
                        let smooth = (pretrained / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                        ((1.0 - smooth) * f as f64 / factor + smooth * f as f64) as f32
                    }
                };
                (plain(self.theta).into_iter().map(stretch).collect(), 1.0)
            }
            Scaling::Yarn(yarn) => (yarn.frequencies(self.theta, rotary_dims), yarn.attention_factor as f32),
            Scaling::LongRope(long) => {
                let factors = long.factors(context);
                let scaled = factors.iter().zip(periods(self.theta, rotary_dims));
                (
                    scaled.map(|(factor, period)| 1.0 / (factor * period)).collect(),
                    long.attention_factor as f32,
                )
            }
            Scaling::Proportional { share, factor } => {
                let pairs = (share * rotary_dims as f64 / 2.0) as usize;
                let turning = plain(self.theta).into_iter().take(pairs);
                (turning.map(|f| f / *factor as f32).collect(), 1.0)
            }
        };
        inverse_frequencies.resize(head_dim / 2, 0.0);
        RopeSpec {
            inverse_frequencies,
            scale,
        }
    }
}

/// `theta^(2d/n)` for each pair `d`: the reciprocal of its frequency, in positions per radian.
fn periods(theta: f64, rotary_dims: usize) -> impl Iterator<Item = f32> {
    // The exponent is rounded to F32 first, as in the reference. The power is then exact to F32.
    (0..rotary_dims / 2).map(move |d| (theta as f32 as f64).powf(((2 * d) as f32 / rotary_dims as f32) as f64) as f32)
}

impl Yarn {
    fn frequencies(&self, theta: f64, rotary_dims: usize) -> Vec<f32> {
        let n = rotary_dims as f64;
        // Index of the pair that turns `rotations` times in the pretrained context.
        let pair =
            |rotations: f64| n * (self.pretrained_tokens as f64 / (rotations * 2.0 * PI)).ln() / (2.0 * theta.ln());
        let (mut low, mut high) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(n - 1.0));
        if low == high {
            high += 0.001; // keeps the ramp's slope finite
        }
        let mix = |(d, period): (usize, f32)| {
            let ramp = ((d as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
            let keep = 1.0 - ramp;
            (1.0 / (self.factor as f32 * period)) * (1.0 - keep) + (1.0 / period) * keep
        };
        periods(theta, rotary_dims).enumerate().map(mix).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linear_divides_and_dynamic_keeps_short_contexts() {
        let spec = |scaling, context| {
            Rope {
                theta: 10_000.0,
                scaling,
            }
            .spec(8, 8, context)
            .inverse_frequencies
        };
        let plain = spec(Scaling::None, 64);
        assert_eq!(plain.len(), 4);
        assert_eq!(plain[0], 1.0);
        assert!((plain[2] - 0.01).abs() < 1e-8);
        let linear = spec(Scaling::Linear { factor: 4.0 }, 64);
        assert!(plain.iter().zip(&linear).all(|(a, b)| a / 4.0 == *b));
        let dynamic = Scaling::Dynamic {
            factor: 2.0,
            pretrained_tokens: 64,
        };
        assert_eq!(spec(dynamic.clone(), 64), plain);
        let long = spec(dynamic, 128);
        assert!(long[0] == 1.0 && long[3] < plain[3] / 2.0);
    }

    #[test]
    fn llama3_keeps_short_and_divides_long_wavelengths() {
        let scaling = Scaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            pretrained_tokens: 64,
        };
        let plain = Rope {
            theta: 10_000.0,
            scaling: Scaling::None,
        }
        .spec(32, 32, 64)
        .inverse_frequencies;
        let got = Rope {
            theta: 10_000.0,
            scaling,
        }
        .spec(32, 32, 64)
        .inverse_frequencies;
        assert_eq!(got[0], plain[0]);
        assert_eq!(got[15], plain[15] / 8.0);
        assert!(
            got.iter().zip(&plain).any(|(a, b)| *a < *b && *a > *b / 8.0),
            "some lie between"
        );
    }

    #[test]
    fn longrope_chooses_by_the_context_and_the_rest_of_a_head_stays() {
        let rope = Rope {
            theta: 10_000.0,
            scaling: Scaling::LongRope(LongRope {
                short_factors: vec![1.0, 2.0],
                long_factors: vec![4.0, 8.0],
                attention_factor: 1.5,
                pretrained_tokens: 64,
            }),
        };
        let (short, long) = (rope.spec(8, 4, 64), rope.spec(8, 4, 65));
        assert_eq!(short.inverse_frequencies, [1.0, 0.005, 0.0, 0.0]);
        assert_eq!(long.inverse_frequencies, [0.25, 0.00125, 0.0, 0.0]);
        assert_eq!((short.scale, long.scale), (1.5, 1.5));
        assert_eq!(longrope_attention_factor(1.0, 64), 1.0);
        assert!((longrope_attention_factor(32.0, 4096) - 1.190_238_f64).abs() < 1e-6);
    }

    #[test]
    fn yarn_attention_factors() {
        assert_eq!(yarn_attention_factor(1.0, None, None), 1.0);
        assert!((yarn_attention_factor(4.0, None, None) - 1.138_629_4).abs() < 1e-6);
        assert_eq!(yarn_attention_factor(40.0, Some(1.0), Some(1.0)), 1.0);
    }
}
