//! Samples tokens on the host. The steps are numbered as in [`draw`](crate::device::draw).
//!
//! See docs/decisions/066-logits-are-checked-by-sampling.md.

use std::cmp::Ordering;

use super::exp;
use super::vocabulary::{self, SUM_CHUNK, TokenWeights, WEIGHT_THRESHOLDS};
use crate::device::draw::{Allowed, Draw, DrawError, DrawnToken};

/// Number of the most probable tokens that top-p sorts first.
const FIRST_SORTED: usize = 64;

/// A mask that allows at most this many tokens is replaced by the list of their ids.
const ID_LIST_MAX: usize = 256;

/// A token that may be drawn.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    id: u32,
    logit: f32,
    /// Probability relative to the most probable token, whose weight is 1.
    weight: f32,
}

impl Candidate {
    /// The token as a candidate with weight 0. `None` if the token does not exist or its
    /// probability is 0.
    fn of(logits: &[f32], id: u32) -> Option<Candidate> {
        let logit = *logits.get(id as usize)?;
        (logit > f32::NEG_INFINITY).then_some(Candidate { id, logit, weight: 0.0 })
    }
}

/// Scratch memory that a thread reuses from draw to draw.
#[derive(Default)]
pub struct Scratch {
    row: Vec<f32>,
    ids: Vec<u32>,
    /// The allowed ids of a mask that allows at most [`ID_LIST_MAX`].
    listed_ids: Vec<u32>,
    weights: TokenWeights,
    candidates: Vec<Candidate>,
}

/// Samples one token from its logits (`[vocabulary]`, raw).
///
/// # Errors
/// If a logit is NaN or plus infinity, or if no token is allowed.
pub fn sample(logits: &[f32], draw: Draw, scratch: &mut Scratch) -> Result<DrawnToken, DrawError> {
    let token = draw_token(logits, draw, scratch)?;
    let logit = |id: u32| logits.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
    Ok(DrawnToken {
        token,
        logit: logit(token),
        log_sum_exp: if draw.wants_log_sum_exp {
            log_sum_exp(logits)
        } else {
            0.0
        },
        logits: match draw.allowed {
            Allowed::Ids(ids) if draw.wants_logits => ids.iter().map(|id| logit(*id)).collect(),
            _ => Vec::new(),
        },
    })
}

#[expect(clippy::too_many_lines, reason = "one draw's steps, in order")]
fn draw_token(logits: &[f32], draw: Draw, scratch: &mut Scratch) -> Result<u32, DrawError> {
    let Scratch {
        row,
        ids,
        listed_ids,
        weights,
        candidates,
    } = scratch;
    let draw = match draw.allowed {
        Allowed::Mask(mask) if count_allowed(mask) <= ID_LIST_MAX => {
            listed_ids.clear();
            listed_ids.extend(mask_ids(mask));
            Draw {
                allowed: Allowed::Ids(listed_ids),
                ..draw
            }
        }
        _ => draw,
    };
    let penalised = draw.sampling.penalises();
    let banned = match draw.allowed {
        Allowed::AllBut(banned) => banned,
        Allowed::Mask(_) | Allowed::Ids(_) => &[],
    };
    let mut max = match draw.allowed {
        Allowed::Mask(mask) => vocabulary::apply_mask(logits, mask, row),
        Allowed::AllBut(_) | Allowed::Ids(_) => vocabulary::max_logit(logits),
    }
    .ok_or(DrawError::NotFinite)?;
    // From here on `row` replaces the logits if some of them are masked, banned or penalised.
    let masked = matches!(draw.allowed, Allowed::Mask(_));
    let changed = penalised || !banned.is_empty();
    if changed {
        if !masked {
            row.clear();
            row.extend_from_slice(logits);
        }
        if penalised {
            penalise(row, draw, ids);
        }
        for id in banned {
            if let Some(logit) = row.get_mut(*id as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
        max = vocabulary::max_logit(row).ok_or(DrawError::NotFinite)?;
    }
    let logits = if masked || changed { &row[..] } else { logits };
    if let Allowed::Ids(allowed) = draw.allowed {
        candidates.clear();
        candidates.extend(allowed.iter().filter_map(|id| Candidate::of(logits, *id)));
        if draw.sampling.temperature == 0.0 {
            let best = candidates.iter().copied().min_by(larger_first);
            return best.map(|c| c.id).ok_or(DrawError::NothingAllowed);
        }
    } else {
        if max == f32::NEG_INFINITY {
            return Err(DrawError::NothingAllowed);
        }
        if draw.sampling.temperature == 0.0 {
            // `position` finds the lowest id among equal logits.
            let id = logits.iter().position(|l| *l == max);
            return id.map(|id| id as u32).ok_or(DrawError::NothingAllowed);
        }
        if draw.sampling.top_k == 0 {
            vocabulary::compute_weights(logits, max, draw.sampling.inverse_temperature(), weights);
            let total = total_weight(weights);
            let Some(weight_min) = min_candidate_weight(weights, &draw, total) else {
                return Ok(draw_from_all(weights, total, draw.uniform));
            };
            collect_candidates(weight_min, weights, logits, ids, candidates);
            apply_top_p_and_min_p(candidates, &draw, total);
            return Ok(draw_candidate(candidates, draw.uniform));
        }
        candidates.clear();
        candidates.extend((0..logits.len() as u32).filter_map(|id| Candidate::of(logits, id)));
    }
    apply_filters(candidates, &draw)?;
    Ok(draw_candidate(candidates, draw.uniform))
}

/// Number of ids that a mask allows.
fn count_allowed(mask: &[u32]) -> usize {
    mask.iter().map(|word| word.count_ones() as usize).sum()
}

/// Ids that a mask allows, ascending.
fn mask_ids(mask: &[u32]) -> impl Iterator<Item = u32> {
    let words = mask.iter().enumerate().filter(|(_, word)| **word != 0);
    words.flat_map(|(index, word)| {
        (0..32)
            .filter(move |bit| word >> bit & 1 == 1)
            .map(move |bit| index as u32 * 32 + bit)
    })
}

/// Sum of all weights.
fn total_weight(weights: &TokenWeights) -> f64 {
    weights.chunk_sums.iter().map(|sum| f64::from(*sum)).sum()
}

/// A lower bound of the weights that can pass top-p and min-p. `None` if neither filters tokens.
///
/// For top-p, the bound is the first of [`WEIGHT_THRESHOLDS`] such that the tokens of at least this
/// weight together reach p: top-p then removes all lighter tokens. Their sum must exceed p by a
/// thousandth, because sums are rounded. If no threshold reaches p, the bound is half of
/// `(1 - p) * total / count`: the tokens below `(1 - p) * total / count` weigh at most
/// `(1 - p) * total` together, so the other tokens reach p. The factor of one half allows for
/// rounding.
fn min_candidate_weight(weights: &TokenWeights, draw: &Draw, total: f64) -> Option<f32> {
    if draw.sampling.top_p >= 1.0 && draw.sampling.min_p <= 0.0 {
        return None;
    }
    let target = f64::from(draw.sampling.top_p) * total * 1.001;
    let step = WEIGHT_THRESHOLDS
        .iter()
        .zip(weights.threshold_sums)
        .find(|(_, over)| f64::from(*over) >= target);
    let tail = (1.0 - f64::from(draw.sampling.top_p)).max(0.0) * total / (2.0 * weights.values.len() as f64);
    let top_p = step.map_or(tail as f32, |(step, _)| *step);
    Some(top_p.max(draw.sampling.min_p).max(f32::MIN_POSITIVE))
}

/// Sets `candidates` to the tokens whose weight is at least `weight_min`, by ascending id. `ids` is
/// scratch.
fn collect_candidates(
    weight_min: f32,
    weights: &TokenWeights,
    logits: &[f32],
    ids: &mut Vec<u32>,
    candidates: &mut Vec<Candidate>,
) {
    vocabulary::indices_at_least(&weights.values, weight_min, ids);
    candidates.clear();
    candidates.extend(ids.iter().map(|&id| Candidate {
        id,
        logit: logits[id as usize],
        weight: weights.values[id as usize],
    }));
}

/// Step 9 over all tokens. `uniform` lies in [0, 1).
fn draw_from_all(weights: &TokenWeights, total: f64, uniform: f64) -> u32 {
    let target = uniform * total;
    let mut reached = 0.0;
    let chunks = weights.values.chunks(SUM_CHUNK).zip(&weights.chunk_sums);
    for (chunk, (chunk_weights, sum)) in chunks.enumerate() {
        let end = reached + f64::from(*sum);
        if end > target {
            for (i, weight) in chunk_weights.iter().enumerate() {
                reached += f64::from(*weight);
                if reached > target && *weight > 0.0 {
                    return (chunk * SUM_CHUNK + i) as u32;
                }
            }
        }
        // The chunk's sum is rounded, so it may exceed the sum of its weights. If the target lies
        // between these two, the next token of nonzero weight is drawn.
        reached = end;
    }
    weights.values.iter().rposition(|weight| *weight > 0.0).unwrap_or(0) as u32
}

/// Natural logarithm of the sum of the logits' exponentials, in two passes over the vocabulary.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|l| f64::from((l - max).exp())).sum();
    f64::from(max) + sum.ln()
}

/// Steps 3 and 4: penalties.
fn penalise(row: &mut [f32], draw: Draw, ids: &mut Vec<u32>) {
    let penalise_repetition = |logit: f32| {
        if logit < 0.0 {
            logit * draw.sampling.repetition_penalty
        } else {
            // A tiny penalty must not make a logit infinite.
            (logit / draw.sampling.repetition_penalty).min(f32::MAX)
        }
    };
    let repetition = draw.sampling.repetition_penalty != 1.0;
    if repetition {
        for id in draw.prompt {
            if let Some(logit) = row.get_mut(*id as usize) {
                *logit = penalise_repetition(*logit);
            }
        }
    }
    ids.clear();
    ids.extend(draw.completion);
    ids.sort_unstable();
    for run in ids.chunk_by(|a, b| a == b) {
        let Some(logit) = row.get_mut(run[0] as usize) else {
            continue;
        };
        if repetition && draw.prompt.binary_search(&run[0]).is_err() {
            *logit = penalise_repetition(*logit);
        }
        if draw.sampling.presence_penalty != 0.0 || draw.sampling.frequency_penalty != 0.0 {
            let penalty = draw.sampling.presence_penalty + draw.sampling.frequency_penalty * run.len() as f32;
            *logit = (*logit - penalty).min(f32::MAX);
        }
    }
}

/// Steps 5 to 8. Leaves at least one candidate, in order of ids.
fn apply_filters(candidates: &mut Vec<Candidate>, draw: &Draw) -> Result<(), DrawError> {
    let top_k = draw.sampling.top_k as usize;
    if top_k > 0 && top_k < candidates.len() {
        candidates.select_nth_unstable_by(top_k - 1, larger_first);
        candidates.truncate(top_k);
    }
    let max = candidates.iter().map(|c| c.logit).fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        return Err(DrawError::NothingAllowed);
    }
    for candidate in candidates.iter_mut() {
        candidate.weight = exp((candidate.logit - max) * draw.sampling.inverse_temperature());
    }
    let total = candidates.iter().map(|c| f64::from(c.weight)).sum();
    apply_top_p_and_min_p(candidates, draw, total);
    Ok(())
}

/// Steps 7 and 8. `candidates` must include all tokens that these steps keep; `total` is the sum of
/// the weights of the tokens that top-k kept.
fn apply_top_p_and_min_p(candidates: &mut Vec<Candidate>, draw: &Draw, total: f64) {
    if draw.sampling.top_p < 1.0 {
        keep_top_p(candidates, f64::from(draw.sampling.top_p) * total);
    }
    if draw.sampling.min_p > 0.0 {
        candidates.retain(|c| c.weight >= draw.sampling.min_p);
    }
    if !candidates.is_sorted_by_key(|c| c.id) {
        candidates.sort_unstable_by_key(|c| c.id);
    }
}

/// Step 7 with as little sorting as possible: sorts the largest weights, in runs of increasing
/// length, until they sum to at least `target`.
fn keep_top_p(candidates: &mut Vec<Candidate>, target: f64) {
    let (mut sorted, mut run, mut reached) = (0, FIRST_SORTED, 0.0);
    while sorted < candidates.len() {
        let end = (sorted + run).min(candidates.len());
        if end < candidates.len() {
            candidates[sorted..].select_nth_unstable_by(end - sorted - 1, larger_first);
        }
        candidates[sorted..end].sort_unstable_by(larger_first);
        for i in sorted..end {
            reached += f64::from(candidates[i].weight);
            if reached >= target {
                candidates.truncate(i + 1);
                return;
            }
        }
        sorted = end;
        run *= 4;
    }
}

/// Step 9. `uniform` lies in [0, 1).
fn draw_candidate(candidates: &[Candidate], uniform: f64) -> u32 {
    let total: f64 = candidates.iter().map(|c| f64::from(c.weight)).sum();
    let target = uniform * total;
    let mut reached = 0.0;
    let mut last = 0;
    for candidate in candidates.iter().filter(|c| c.weight > 0.0) {
        reached += f64::from(candidate.weight);
        last = candidate.id;
        if reached > target {
            break;
        }
    }
    last
}

/// Larger logits first, and lower ids first among equal logits: a total order, since no logit is
/// NaN.
fn larger_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit
        .partial_cmp(&a.logit)
        .unwrap_or(Ordering::Equal)
        .then(a.id.cmp(&b.id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::draw::Sampling;
    use proptest::prelude::*;

    const GREEDY: Draw = Draw {
        wants_log_sum_exp: true,
        ..Draw::GREEDY
    };
    const WARM: Draw = Draw {
        sampling: Sampling {
            temperature: 1.0,
            ..GREEDY.sampling
        },
        ..GREEDY
    };

    /// The finalizer of SplitMix64 as a number in [0, 1).
    fn uniform(seed: u64, position: u32) -> f64 {
        let mut x =
            seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (u64::from(position) + 1).wrapping_mul(0xd6e8_feb8_6659_fd93);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    #[test]
    fn ids_without_a_token_are_never_sampled() {
        let logits = [0.0, 9.0, 1.0, 9.0];
        for (temperature, repetition_penalty) in [(0.0, 1.0), (1.0, 1.0), (0.0, 1.5), (1.0, 1.5)] {
            for position in 0..50 {
                let draw = Draw {
                    sampling: Sampling {
                        temperature,
                        repetition_penalty,
                        ..GREEDY.sampling
                    },
                    allowed: Allowed::AllBut(&[1, 3, 900]),
                    prompt: &[1],
                    uniform: uniform(11, position),
                    ..GREEDY
                };
                let token = sampled(&logits, draw).unwrap();
                assert!(token == 0 || token == 2, "{token}");
            }
        }
        let draw = Draw {
            allowed: Allowed::AllBut(&[0, 1]),
            ..WARM
        };
        assert_eq!(sampled(&[1.0, 2.0], draw), Err(DrawError::NothingAllowed));
    }

    fn sampled(logits: &[f32], draw: Draw) -> Result<u32, DrawError> {
        sample(logits, draw, &mut Scratch::default()).map(|drawn| drawn.token)
    }

    /// The distribution after steps 3 to 8, computed by a simple, slow implementation.
    fn expected(logits: &[f32], draw: Draw) -> Vec<f64> {
        let p = draw;
        let mut l: Vec<f64> = logits.iter().map(|l| f64::from(*l)).collect();
        for (id, logit) in l.iter_mut().enumerate() {
            let count = draw.completion.iter().filter(|t| **t == id as u32).count();
            if count > 0 || draw.prompt.contains(&(id as u32)) {
                let penalty = f64::from(p.sampling.repetition_penalty);
                *logit = if *logit < 0.0 {
                    *logit * penalty
                } else {
                    *logit / penalty
                };
            }
            if count > 0 {
                *logit -=
                    f64::from(p.sampling.presence_penalty) + f64::from(p.sampling.frequency_penalty) * count as f64;
            }
        }
        let mut order: Vec<usize> = (0..l.len()).collect();
        order.sort_by(|a, b| l[*b].total_cmp(&l[*a]).then(a.cmp(b)));
        if p.sampling.top_k > 0 {
            order.truncate(p.sampling.top_k as usize);
        }
        let weight = |i: usize| ((l[i] - l[order[0]]) / f64::from(p.sampling.temperature)).exp();
        let total: f64 = order.iter().map(|i| weight(*i)).sum();
        let mut kept = vec![0.0; l.len()];
        let mut reached = 0.0;
        for i in &order {
            if reached < f64::from(p.sampling.top_p) * total && weight(*i) >= f64::from(p.sampling.min_p) {
                kept[*i] = weight(*i);
            }
            reached += weight(*i);
        }
        let sum: f64 = kept.iter().sum();
        kept.iter().map(|w| w / sum).collect()
    }

    fn check_distribution(draw: Draw) {
        let logits: Vec<f32> = (0..40).map(|i| ((i * 7919 % 23) as f32 - 11.0) / 4.0).collect();
        let expected = expected(&logits, draw);
        let draws = 40_000u32;
        let mut counts = vec![0f64; logits.len()];
        let mut scratch = Scratch::default();
        for position in 0..draws {
            let uniform = uniform(11, position);
            counts[sample(&logits, Draw { uniform, ..draw }, &mut scratch).unwrap().token as usize] += 1.0;
        }
        let (mut chi, mut bins) = (0.0, 0.0);
        for (count, probability) in counts.iter().zip(&expected) {
            if *probability == 0.0 {
                assert_eq!(*count, 0.0, "a token that is out was drawn");
            } else if probability * f64::from(draws) >= 5.0 {
                chi += (count - probability * f64::from(draws)).powi(2) / (probability * f64::from(draws));
                bins += 1.0;
            }
        }
        // Mean and deviation of chi-square: k and √2k. Five deviations, for a fixed seed.
        assert!(
            chi < bins + 5.0 * (2.0f64 * bins).sqrt(),
            "chi-square {chi} of {bins} bins, {draw:?}"
        );
    }

    #[test]
    fn draws_follow_the_softmax() {
        check_distribution(WARM);
        check_distribution(Draw {
            sampling: Sampling {
                temperature: 0.6,
                ..WARM.sampling
            },
            ..WARM
        });
        check_distribution(Draw {
            sampling: Sampling {
                top_k: 7,
                ..WARM.sampling
            },
            ..WARM
        });
        check_distribution(Draw {
            sampling: Sampling {
                top_p: 0.8,
                ..WARM.sampling
            },
            ..WARM
        });
        check_distribution(Draw {
            sampling: Sampling {
                min_p: 0.2,
                temperature: 1.7,
                ..WARM.sampling
            },
            ..WARM
        });
        check_distribution(Draw {
            sampling: Sampling {
                top_k: 12,
                top_p: 0.9,
                min_p: 0.05,
                ..WARM.sampling
            },
            ..WARM
        });
        check_distribution(Draw {
            sampling: Sampling {
                repetition_penalty: 1.3,
                presence_penalty: 0.4,
                frequency_penalty: 0.3,
                ..WARM.sampling
            },
            prompt: &[1, 2, 3],
            completion: &[3, 4, 4, 4, 30],
            ..WARM
        });
    }

    #[test]
    fn greedy_takes_the_lowest_id_of_equals() {
        assert_eq!(sampled(&[1.0, 5.0, 5.0, 2.0], GREEDY), Ok(1));
        let allowed = Allowed::Ids(&[2, 0]);
        assert_eq!(sampled(&[1.0, 5.0, 5.0], Draw { allowed, ..GREEDY }), Ok(2));
        assert_eq!(
            sampled(
                &[1.0, 5.0, 5.0, 2.0],
                Draw {
                    sampling: Sampling {
                        top_k: 1,
                        ..WARM.sampling
                    },
                    ..WARM
                }
            ),
            Ok(1)
        );
    }

    #[test]
    fn penalties_follow_their_definitions() {
        let history = Draw {
            prompt: &[0],
            completion: &[1, 1],
            ..GREEDY
        };
        let repetition = Draw {
            sampling: Sampling {
                repetition_penalty: 2.0,
                ..history.sampling
            },
            ..history
        };
        assert_eq!(
            sampled(&[4.0, 4.0, 2.5], repetition),
            Ok(2),
            "prompt and completion count, once"
        );
        assert_eq!(sampled(&[-1.0, -1.0, -1.5], repetition), Ok(2), "negative logits grow");
        let presence = Draw {
            sampling: Sampling {
                presence_penalty: 1.0,
                ..history.sampling
            },
            ..history
        };
        assert_eq!(sampled(&[3.9, 4.0, 0.0], presence), Ok(0), "the prompt does not count");
        assert_eq!(sampled(&[2.9, 4.0, 0.0], presence), Ok(1), "once");
        let frequency = Draw {
            sampling: Sampling {
                frequency_penalty: 1.0,
                ..history.sampling
            },
            ..history
        };
        assert_eq!(sampled(&[2.1, 4.0, 0.0], frequency), Ok(0), "twice");
    }

    #[test]
    fn the_mask_comes_first() {
        let mask = [1 << 1, 0, 1 << 2];
        let mut logits = vec![9.0; 68];
        logits[66] = 3.0;
        logits[1] = 2.0;
        let masked = Draw {
            sampling: Sampling {
                top_k: 1,
                ..WARM.sampling
            },
            allowed: Allowed::Mask(&mask),
            ..WARM
        };
        assert_eq!(sampled(&logits, masked), Ok(66));
        assert_eq!(
            sampled(&logits[..40], masked),
            Ok(1),
            "ids beyond the vocabulary are never sampled"
        );
    }

    #[test]
    fn broken_logits_fail_the_row() {
        assert_eq!(sampled(&[0.0, f32::NAN], GREEDY), Err(DrawError::NotFinite));
        assert_eq!(sampled(&[0.0, f32::INFINITY], GREEDY), Err(DrawError::NotFinite));
        let out = [f32::NEG_INFINITY, f32::NEG_INFINITY];
        assert_eq!(sampled(&out, GREEDY), Err(DrawError::NothingAllowed));
        assert_eq!(sampled(&out, WARM), Err(DrawError::NothingAllowed));
        assert_eq!(sampled(&[f32::NEG_INFINITY, -3.0], WARM), Ok(1));
        let allowed = Allowed::Ids(&[]);
        assert_eq!(
            sampled(&[1.0], Draw { allowed, ..WARM }),
            Err(DrawError::NothingAllowed)
        );
    }

    #[test]
    fn log_probabilities_are_those_of_the_softmax() {
        let logits = [1.0f32, 2.0, 3.0, -200.0];
        let sum: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
        let draw = Draw {
            allowed: Allowed::Ids(&[0, 1, 3, 900]),
            wants_logits: true,
            ..GREEDY
        };
        let drawn = sample(&logits, draw, &mut Scratch::default()).unwrap();
        assert_eq!((drawn.token, drawn.logit), (1, 2.0));
        assert_eq!(drawn.logits, [1.0, 2.0, -200.0, f32::NEG_INFINITY]);
        for logit in logits {
            let expected = (f64::from(logit) - sum.ln()) as f32;
            assert!((drawn.log_probability_of(logit) - expected).abs() < 1e-5);
        }
    }

    proptest! {
            /// Partial selection, used for large vocabularies, keeps the same tokens as a full
            /// sort.
            #[test]
            fn filters_keep_what_full_sorting_keeps(
                seed in 0u64..1000, top_k in 0u32..300, top_p in 0.05f32..1.0, min_p in 0.0f32..0.3,
            ) {
                let logits: Vec<f32> = (0..700u32)
                    .map(|i| uniform(seed, i) as f32 * 4.0)
                    .collect();
                let draw = Draw {
    sampling: Sampling {
    top_k,
    top_p,
    min_p,
    temperature: 0.8,
    ..WARM.sampling
    },
    ..WARM
    };
                let mut kept = Vec::new();
                if top_k > 0 {
                    kept.extend((0..logits.len() as u32).filter_map(|id| Candidate::of(&logits, id)));
                    apply_filters(&mut kept, &draw).unwrap();
                } else {
                    let mut weights = TokenWeights::default();
                    let max = vocabulary::max_logit(&logits).unwrap();
                    vocabulary::compute_weights(&logits, max, draw.sampling.inverse_temperature(), &mut weights);
                    let weight_min = min_candidate_weight(&weights, &draw, total_weight(&weights)).unwrap();
                    collect_candidates(weight_min, &weights, &logits, &mut Vec::new(), &mut kept);
                    apply_top_p_and_min_p(&mut kept, &draw, total_weight(&weights));
                }
                let expected = expected(&logits, draw);
                let support = expected.iter().filter(|p| **p > 0.0).count();
                // A token at the very edge may fall on either side by rounding.
                prop_assert!(kept.len().abs_diff(support) <= 1, "kept {} of {}", kept.len(), support);
                prop_assert!(kept.is_sorted_by_key(|c| c.id));
                let kept_mass: f64 = kept.iter().map(|c| expected[c.id as usize]).sum();
                prop_assert!(kept_mass > 0.98);
            }

            #[test]
            fn extreme_temperatures_are_handled(temperature in prop::sample::select(vec![1e-30f32, 1e-6, 1e6, 1e30])) {
                let draw = Draw {
    sampling: Sampling {
    temperature,
    top_p: 0.9,
    ..WARM.sampling
    },
    ..WARM
    };
                let token = sampled(&[-1e30, 0.0, 3.0, 1e30], draw).unwrap();
                prop_assert!(temperature > 1.0 || token == 3);
            }
        }
}
