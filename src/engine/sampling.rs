//! From logits to one token.
//!
//! In this order:
//!
//! 1. the log probability of every token is that of the raw distribution: softmax over the model's whole vocabulary, before
//!    anything below;
//! 2. what the shape allows: other tokens are out;
//! 3. repetition penalty: the logit of each token that occurs in the *prompt or the completion* is divided by it where
//!    positive, multiplied where negative (once, however often it occurs; as transformers does);
//! 4. presence and frequency penalty: subtracted once, and once per occurrence, for tokens that occur in the *completion*
//!    (as OpenAI and vLLM do);
//! 5. temperature 0: the largest logit wins, of equal ones the lowest id. Else logits are divided by the temperature;
//! 6. top-k keeps the k largest, of equal ones those with the lowest ids;
//! 7. top-p keeps the smallest set of the largest whose probability, of what top-k left, reaches p;
//! 8. min-p keeps tokens at least that fraction as probable as the most probable;
//! 9. a token is drawn in proportion to probability, in order of ids, with the number that [`StreamKey::uniform`] gives for
//!    the token's position in its sequence.
//!
//! A token depends on its own row of logits and its own history alone.

use std::cmp::Ordering;

use toktrie::SimpleVob;

use crate::device::cpu::exp;
use crate::device::cpu::vocabulary::{self, STEPS, SUM_CHUNK, Weights};
use crate::engine::params::Params;
use crate::engine::philox::StreamKey;

/// Tokens that [`sample`] looks at first when it seeks the most probable ones.
const FIRST_SORTED: usize = 64;

/// Of a mask that allows no more tokens than this, only these are looked at.
const FEW: usize = 256;

/// Which tokens the shape allows.
#[derive(Clone, Copy)]
pub enum Allowed<'a> {
    All,
    Mask(&'a SimpleVob),
    /// These ids, without repetition.
    Ids(&'a [u32]),
}

/// What is known of the token to sample besides its logits.
#[derive(Clone, Copy)]
pub struct Draw<'a> {
    pub params: &'a Params,
    pub allowed: Allowed<'a>,
    /// The prompt's ids, ascending, each once; read only for the repetition penalty.
    pub prompt: &'a [u32],
    pub completion: &'a [u32],
    pub key: StreamKey,
    /// Position of the token in its sequence.
    pub position: u32,
    /// Ids that no token has, never sampled where all are allowed.
    pub holes: &'a [u32],
}

/// Why no token can be sampled; fails the row.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    #[error("the model's logits are not finite")]
    NotFinite,
    #[error("no token that the shape allows has a probability")]
    NothingAllowed,
}

/// A token that may be drawn.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    id: u32,
    logit: f32,
    /// Relative to the most probable one's, which is 1.
    weight: f32,
}

impl Candidate {
    /// The token, where it exists and has a probability at all.
    fn of(logits: &[f32], id: u32) -> Option<Candidate> {
        let logit = *logits.get(id as usize)?;
        (logit > f32::NEG_INFINITY).then_some(Candidate { id, logit, weight: 0.0 })
    }
}

/// Memory that one thread uses again and again.
#[derive(Default)]
pub struct Scratch {
    row: Vec<f32>,
    ids: Vec<u32>,
    /// The tokens that a mask allows, where they are few.
    few: Vec<u32>,
    all: Weights,
    candidates: Vec<Candidate>,
}

/// Samples one token from its logits (`[vocabulary]`, raw).
pub fn sample(logits: &[f32], draw: Draw, scratch: &mut Scratch) -> Result<u32, SampleError> {
    let Scratch {
        row,
        ids,
        few,
        all,
        candidates,
    } = scratch;
    let draw = match draw.allowed {
        Allowed::Mask(mask) if mask.num_set() <= FEW => {
            few.clear();
            few.extend(mask.iter());
            Draw {
                allowed: Allowed::Ids(few),
                ..draw
            }
        }
        _ => draw,
    };
    let params = draw.params;
    let penalised =
        params.repetition_penalty != 1.0 || params.presence_penalty != 0.0 || params.frequency_penalty != 0.0;
    let holes = match draw.allowed {
        Allowed::All => draw.holes,
        // A shape allows no ids that have no bytes.
        Allowed::Mask(_) | Allowed::Ids(_) => &[],
    };
    let mut max = match draw.allowed {
        Allowed::Mask(mask) => vocabulary::restrict(logits, mask.as_slice(), row),
        Allowed::All | Allowed::Ids(_) => vocabulary::largest(logits),
    }
    .ok_or(SampleError::NotFinite)?;
    // From here on `row` stands in for the logits where something is ruled out or penalised.
    let masked = matches!(draw.allowed, Allowed::Mask(_));
    let changed = penalised || !holes.is_empty();
    if changed {
        if !masked {
            row.clear();
            row.extend_from_slice(logits);
        }
        if penalised {
            penalise(row, draw, ids);
        }
        for id in holes {
            if let Some(logit) = row.get_mut(*id as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
        max = vocabulary::largest(row).ok_or(SampleError::NotFinite)?;
    }
    let logits = if masked || changed { &row[..] } else { logits };
    if let Allowed::Ids(allowed) = draw.allowed {
        candidates.clear();
        candidates.extend(allowed.iter().filter_map(|id| Candidate::of(logits, *id)));
        if params.temperature == 0.0 {
            let best = candidates.iter().copied().min_by(larger_first);
            return best.map(|c| c.id).ok_or(SampleError::NothingAllowed);
        }
    } else {
        if max == f32::NEG_INFINITY {
            return Err(SampleError::NothingAllowed);
        }
        if params.temperature == 0.0 {
            // Of equal ones the lowest id.
            let id = logits.iter().position(|l| *l == max);
            return id.map(|id| id as u32).ok_or(SampleError::NothingAllowed);
        }
        if params.top_k == 0 {
            vocabulary::weigh(logits, max, inverse(params.temperature), all);
            let total = total(all);
            let uniform = draw.key.uniform(draw.position);
            let Some(least) = least(all, params, total) else {
                return Ok(pick_of_all(all, total, uniform));
            };
            take_from(least, all, logits, ids, candidates);
            cut(candidates, params, total);
            return Ok(pick(candidates, uniform));
        }
        candidates.clear();
        candidates.extend((0..logits.len() as u32).filter_map(|id| Candidate::of(logits, id)));
    }
    filter(candidates, params)?;
    Ok(pick(candidates, draw.key.uniform(draw.position)))
}

/// A temperature as a factor; that of one near zero is finite, too.
fn inverse(temperature: f32) -> f32 {
    (1.0 / temperature).min(f32::MAX)
}

/// What all weigh together.
fn total(all: &Weights) -> f64 {
    all.sums.iter().map(|sum| f64::from(*sum)).sum()
}

/// Tokens of less weight are surely filtered out by top-p or min-p; `None`: nothing is filtered.
///
/// For top-p: where the tokens down to some weight reach p together, those below it are out. Sums are rounded, which a
/// thousandth more than p leaves room for. Else those below `(1 - p) * total / count` are: they weigh at most
/// `(1 - p) * total` together, so the others reach p; half of that leaves room for rounding.
fn least(all: &Weights, params: &Params, total: f64) -> Option<f32> {
    if params.top_p >= 1.0 && params.min_p <= 0.0 {
        return None;
    }
    let enough = f64::from(params.top_p) * total * 1.001;
    let step = STEPS.iter().zip(all.over).find(|(_, over)| f64::from(*over) >= enough);
    let tail = (1.0 - f64::from(params.top_p)).max(0.0) * total / (2.0 * all.each.len() as f64);
    let top_p = step.map_or(tail as f32, |(step, _)| *step);
    Some(top_p.max(params.min_p).max(f32::MIN_POSITIVE))
}

/// The tokens of at least this weight, by ascending id; `ids` is scratch.
fn take_from(least: f32, all: &Weights, logits: &[f32], ids: &mut Vec<u32>, candidates: &mut Vec<Candidate>) {
    vocabulary::not_below(&all.each, least, ids);
    candidates.clear();
    candidates.extend(ids.iter().map(|&id| Candidate {
        id,
        logit: logits[id as usize],
        weight: all.each[id as usize],
    }));
}

/// Step 9 of all tokens; `uniform` lies in [0, 1).
fn pick_of_all(all: &Weights, total: f64, uniform: f64) -> u32 {
    let target = uniform * total;
    let mut reached = 0.0;
    let chunks = all.each.chunks(SUM_CHUNK).zip(&all.sums);
    for (at, (weights, sum)) in chunks.enumerate() {
        let end = reached + f64::from(*sum);
        if end > target {
            for (i, weight) in weights.iter().enumerate() {
                reached += f64::from(*weight);
                if reached > target && *weight > 0.0 {
                    return (at * SUM_CHUNK + i) as u32;
                }
            }
        }
        // A sum was rounded: where it says more than its weights are together, the next token is as good.
        reached = end;
    }
    all.each.iter().rposition(|weight| *weight > 0.0).unwrap_or(0) as u32
}

/// What turns a row's logits into log probabilities of the raw distribution: one pass over the vocabulary.
pub struct LogSoftmax<'a> {
    logits: &'a [f32],
    max: f32,
    log_sum: f64,
}

impl LogSoftmax<'_> {
    pub fn new(logits: &[f32]) -> LogSoftmax<'_> {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|l| f64::from((l - max).exp())).sum();
        LogSoftmax {
            logits,
            max,
            log_sum: sum.ln(),
        }
    }

    /// Natural logarithm of a token's probability.
    pub fn of(&self, token: u32) -> f32 {
        (f64::from(self.logits[token as usize]) - f64::from(self.max) - self.log_sum) as f32
    }
}

/// Natural logarithm of one token's probability in the raw distribution.
pub fn log_probability(logits: &[f32], token: u32) -> f32 {
    LogSoftmax::new(logits).of(token)
}

/// Steps 3 and 4.
fn penalise(row: &mut [f32], draw: Draw, ids: &mut Vec<u32>) {
    let params = draw.params;
    let repeated = |logit: f32| match logit < 0.0 {
        true => logit * params.repetition_penalty,
        // A tiny penalty must not make a logit infinite.
        false => (logit / params.repetition_penalty).min(f32::MAX),
    };
    let repetition = params.repetition_penalty != 1.0;
    if repetition {
        for id in draw.prompt {
            if let Some(logit) = row.get_mut(*id as usize) {
                *logit = repeated(*logit);
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
            *logit = repeated(*logit);
        }
        if params.presence_penalty != 0.0 || params.frequency_penalty != 0.0 {
            let penalty = params.presence_penalty + params.frequency_penalty * run.len() as f32;
            *logit = (*logit - penalty).min(f32::MAX);
        }
    }
}

/// Steps 5 to 8; leaves the candidates in order of ids, at least one.
fn filter(candidates: &mut Vec<Candidate>, params: &Params) -> Result<(), SampleError> {
    let top_k = params.top_k as usize;
    if top_k > 0 && top_k < candidates.len() {
        candidates.select_nth_unstable_by(top_k - 1, larger_first);
        candidates.truncate(top_k);
    }
    let max = candidates.iter().map(|c| c.logit).fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        return Err(SampleError::NothingAllowed);
    }
    for candidate in candidates.iter_mut() {
        candidate.weight = exp((candidate.logit - max) * inverse(params.temperature));
    }
    let total = candidates.iter().map(|c| f64::from(c.weight)).sum();
    cut(candidates, params, total);
    Ok(())
}

/// Steps 7 and 8, of candidates among which are all that stay; `total` is the weight of those that top-k left.
fn cut(candidates: &mut Vec<Candidate>, params: &Params, total: f64) {
    if params.top_p < 1.0 {
        keep_top_p(candidates, f64::from(params.top_p) * total);
    }
    if params.min_p > 0.0 {
        candidates.retain(|c| c.weight >= params.min_p);
    }
    if !candidates.is_sorted_by_key(|c| c.id) {
        candidates.sort_unstable_by_key(|c| c.id);
    }
}

/// Step 7, without sorting more than it must: the largest are sorted in ever larger runs until they weigh `enough`.
fn keep_top_p(candidates: &mut Vec<Candidate>, enough: f64) {
    let (mut sorted, mut run, mut reached) = (0, FIRST_SORTED, 0.0);
    while sorted < candidates.len() {
        let end = (sorted + run).min(candidates.len());
        if end < candidates.len() {
            candidates[sorted..].select_nth_unstable_by(end - sorted - 1, larger_first);
        }
        candidates[sorted..end].sort_unstable_by(larger_first);
        for i in sorted..end {
            reached += f64::from(candidates[i].weight);
            if reached >= enough {
                candidates.truncate(i + 1);
                return;
            }
        }
        sorted = end;
        run *= 4;
    }
}

/// Step 9. `uniform` lies in [0, 1).
fn pick(candidates: &[Candidate], uniform: f64) -> u32 {
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

/// Larger logits first, of equal ones the lower id: a total order, since no logit is NaN.
fn larger_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit
        .partial_cmp(&a.logit)
        .unwrap_or(Ordering::Equal)
        .then(a.id.cmp(&b.id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::request::UnitId;
    use proptest::prelude::*;

    fn draw(params: &Params) -> Draw<'_> {
        let key = StreamKey::of(
            11,
            UnitId {
                job: 0,
                row: 3,
                sample: 0,
                attempt: 0,
            },
        );
        Draw {
            params,
            allowed: Allowed::All,
            prompt: &[],
            completion: &[],
            key,
            position: 0,
            holes: &[],
        }
    }

    #[test]
    fn ids_without_a_token_are_never_sampled() {
        let logits = [0.0, 9.0, 1.0, 9.0];
        for (temperature, repetition_penalty) in [(0.0, 1.0), (1.0, 1.0), (0.0, 1.5), (1.0, 1.5)] {
            let params = Params {
                temperature,
                repetition_penalty,
                ..Params::default()
            };
            for position in 0..50 {
                let draw = Draw {
                    holes: &[1, 3, 900],
                    prompt: &[1],
                    position,
                    ..draw(&params)
                };
                let token = sampled(&logits, draw).unwrap();
                assert!(token == 0 || token == 2, "{token}");
            }
        }
        let params = Params::default();
        let draw = Draw {
            holes: &[0, 1],
            ..draw(&params)
        };
        assert_eq!(sampled(&[1.0, 2.0], draw), Err(SampleError::NothingAllowed));
    }

    fn sampled(logits: &[f32], draw: Draw) -> Result<u32, SampleError> {
        sample(logits, draw, &mut Scratch::default())
    }

    /// What steps 3 to 8 should leave, computed the slow and plain way.
    fn expected(logits: &[f32], draw: Draw) -> Vec<f64> {
        let p = draw.params;
        let mut l: Vec<f64> = logits.iter().map(|l| f64::from(*l)).collect();
        for (id, logit) in l.iter_mut().enumerate() {
            let count = draw.completion.iter().filter(|t| **t == id as u32).count();
            if count > 0 || draw.prompt.contains(&(id as u32)) {
                let penalty = f64::from(p.repetition_penalty);
                *logit = if *logit < 0.0 {
                    *logit * penalty
                } else {
                    *logit / penalty
                };
            }
            if count > 0 {
                *logit -= f64::from(p.presence_penalty) + f64::from(p.frequency_penalty) * count as f64;
            }
        }
        let mut order: Vec<usize> = (0..l.len()).collect();
        order.sort_by(|a, b| l[*b].total_cmp(&l[*a]).then(a.cmp(b)));
        if p.top_k > 0 {
            order.truncate(p.top_k as usize);
        }
        let weight = |i: usize| ((l[i] - l[order[0]]) / f64::from(p.temperature)).exp();
        let total: f64 = order.iter().map(|i| weight(*i)).sum();
        let mut kept = vec![0.0; l.len()];
        let mut reached = 0.0;
        for i in &order {
            if reached < f64::from(p.top_p) * total && weight(*i) >= f64::from(p.min_p) {
                kept[*i] = weight(*i);
            }
            reached += weight(*i);
        }
        let sum: f64 = kept.iter().sum();
        kept.iter().map(|w| w / sum).collect()
    }

    fn check_distribution(params: &Params, prompt: &[u32], completion: &[u32]) {
        let logits: Vec<f32> = (0..40).map(|i| ((i * 7919 % 23) as f32 - 11.0) / 4.0).collect();
        let draw = Draw {
            prompt,
            completion,
            ..draw(params)
        };
        let expected = expected(&logits, draw);
        let draws = 40_000u32;
        let mut counts = vec![0f64; logits.len()];
        let mut scratch = Scratch::default();
        for position in 0..draws {
            counts[sample(&logits, Draw { position, ..draw }, &mut scratch).unwrap() as usize] += 1.0;
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
            "chi-square {chi} of {bins} bins, {params:?}"
        );
    }

    #[test]
    fn draws_follow_the_softmax() {
        let free = Params {
            temperature: 1.0,
            ..Params::default()
        };
        check_distribution(&free, &[], &[]);
        check_distribution(
            &Params {
                temperature: 0.6,
                ..free.clone()
            },
            &[],
            &[],
        );
        check_distribution(
            &Params {
                top_k: 7,
                ..free.clone()
            },
            &[],
            &[],
        );
        check_distribution(
            &Params {
                top_p: 0.8,
                ..free.clone()
            },
            &[],
            &[],
        );
        check_distribution(
            &Params {
                min_p: 0.2,
                temperature: 1.7,
                ..free.clone()
            },
            &[],
            &[],
        );
        check_distribution(
            &Params {
                top_k: 12,
                top_p: 0.9,
                min_p: 0.05,
                ..free.clone()
            },
            &[],
            &[],
        );
        let penalties = Params {
            repetition_penalty: 1.3,
            presence_penalty: 0.4,
            frequency_penalty: 0.3,
            ..free
        };
        check_distribution(&penalties, &[1, 2, 3], &[3, 4, 4, 4, 30]);
    }

    #[test]
    fn greedy_takes_the_lowest_id_of_equals() {
        let params = Params {
            temperature: 0.0,
            ..Params::default()
        };
        assert_eq!(sampled(&[1.0, 5.0, 5.0, 2.0], draw(&params)), Ok(1));
        assert_eq!(
            sampled(
                &[1.0, 5.0, 5.0],
                Draw {
                    allowed: Allowed::Ids(&[2, 0]),
                    ..draw(&params)
                }
            ),
            Ok(2)
        );
        let k = Params {
            top_k: 1,
            temperature: 1.0,
            ..Params::default()
        };
        assert_eq!(sampled(&[1.0, 5.0, 5.0, 2.0], draw(&k)), Ok(1));
    }

    #[test]
    fn penalties_count_what_they_say() {
        let greedy = Params {
            temperature: 0.0,
            ..Params::default()
        };
        let history = |params| Draw {
            prompt: &[0],
            completion: &[1, 1],
            ..draw(params)
        };
        let repetition = Params {
            repetition_penalty: 2.0,
            ..greedy.clone()
        };
        assert_eq!(
            sampled(&[4.0, 4.0, 2.5], history(&repetition)),
            Ok(2),
            "prompt and completion count, once"
        );
        assert_eq!(
            sampled(&[-1.0, -1.0, -1.5], history(&repetition)),
            Ok(2),
            "negative logits grow"
        );
        let presence = Params {
            presence_penalty: 1.0,
            ..greedy.clone()
        };
        assert_eq!(
            sampled(&[3.9, 4.0, 0.0], history(&presence)),
            Ok(0),
            "the prompt does not count"
        );
        assert_eq!(sampled(&[2.9, 4.0, 0.0], history(&presence)), Ok(1), "once");
        let frequency = Params {
            frequency_penalty: 1.0,
            ..greedy
        };
        assert_eq!(sampled(&[2.1, 4.0, 0.0], history(&frequency)), Ok(0), "twice");
    }

    #[test]
    fn the_mask_comes_first() {
        let params = Params {
            temperature: 1.0,
            top_k: 1,
            ..Params::default()
        };
        let mut mask = SimpleVob::alloc(70);
        mask.allow_token(1);
        mask.allow_token(66);
        let mut logits = vec![9.0; 68];
        logits[66] = 3.0;
        logits[1] = 2.0;
        let masked = Draw {
            allowed: Allowed::Mask(&mask),
            ..draw(&params)
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
        let params = Params {
            temperature: 0.0,
            ..Params::default()
        };
        assert_eq!(sampled(&[0.0, f32::NAN], draw(&params)), Err(SampleError::NotFinite));
        assert_eq!(
            sampled(&[0.0, f32::INFINITY], draw(&params)),
            Err(SampleError::NotFinite)
        );
        let out = [f32::NEG_INFINITY, f32::NEG_INFINITY];
        assert_eq!(sampled(&out, draw(&params)), Err(SampleError::NothingAllowed));
        let warm = Params {
            temperature: 1.0,
            ..Params::default()
        };
        assert_eq!(sampled(&out, draw(&warm)), Err(SampleError::NothingAllowed));
        assert_eq!(sampled(&[f32::NEG_INFINITY, -3.0], draw(&warm)), Ok(1));
        assert_eq!(
            sampled(
                &[1.0],
                Draw {
                    allowed: Allowed::Ids(&[]),
                    ..draw(&warm)
                }
            ),
            Err(SampleError::NothingAllowed)
        );
    }

    #[test]
    fn log_probabilities_are_those_of_the_softmax() {
        let logits = [1.0f32, 2.0, 3.0, -200.0];
        let sum: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
        for (token, logit) in logits.iter().enumerate() {
            let expected = (f64::from(*logit) - sum.ln()) as f32;
            assert!((log_probability(&logits, token as u32) - expected).abs() < 1e-5);
        }
    }

    proptest! {
        /// Large vocabularies go through partial selection; what it keeps is what sorting all keeps.
        #[test]
        fn filters_keep_what_full_sorting_keeps(
            seed in 0u64..1000, top_k in 0u32..300, top_p in 0.05f32..1.0, min_p in 0.0f32..0.3,
        ) {
            let logits: Vec<f32> = (0..700u32)
                .map(|i| StreamKey::of(seed, UnitId { job: 0, row: 0, sample: 0, attempt: 0 }).uniform(i) as f32 * 4.0)
                .collect();
            let params = Params { top_k, top_p, min_p, temperature: 0.8, ..Params::default() };
            let mut kept = Vec::new();
            if top_k > 0 {
                kept.extend((0..logits.len() as u32).filter_map(|id| Candidate::of(&logits, id)));
                filter(&mut kept, &params).unwrap();
            } else {
                let mut all = Weights::default();
                let max = vocabulary::largest(&logits).unwrap();
                vocabulary::weigh(&logits, max, inverse(params.temperature), &mut all);
                let least = least(&all, &params, total(&all)).unwrap();
                take_from(least, &all, &logits, &mut Vec::new(), &mut kept);
                cut(&mut kept, &params, total(&all));
            }
            let expected = expected(&logits, draw(&params));
            let support = expected.iter().filter(|p| **p > 0.0).count();
            // A token at the very edge may fall on either side by rounding.
            prop_assert!(kept.len().abs_diff(support) <= 1, "kept {} of {}", kept.len(), support);
            prop_assert!(kept.is_sorted_by_key(|c| c.id));
            let kept_mass: f64 = kept.iter().map(|c| expected[c.id as usize]).sum();
            prop_assert!(kept_mass > 0.98);
        }

        #[test]
        fn an_extreme_temperature_breaks_nothing(temperature in prop::sample::select(vec![1e-30f32, 1e-6, 1e6, 1e30])) {
            let params = Params { temperature, top_p: 0.9, ..Params::default() };
            let token = sampled(&[-1e30, 0.0, 3.0, 1e30], draw(&params)).unwrap();
            prop_assert!(temperature > 1.0 || token == 3);
        }
    }
}
