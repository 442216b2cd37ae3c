//! Compares the tokens that a device draws with those that the CPU draws.

use super::inputs::{TestTensor, numbers};
use super::operations::to_device_error;
use super::tolerance::Tolerance;
use super::{Comparison, Extent, Finding};
use crate::device::draw::{Allowed, Draw, DrawError, DrawnToken, Sampling};
use crate::device::random::uniform;
use crate::device::{Device, DeviceError, OutputHead};

/// Width of the activations that logits are computed from. Each activation row is a unit vector, so
/// a row of logits is a column of the head.
const WIDTH: usize = 16;
/// Distance within which a draw is ambiguous: two tokens are right if the uniform number is this
/// near to the boundary between their cumulative probabilities, or if a probability is this near to
/// the bound of top-p or min-p. The order of additions changes a sum of a hundred thousand F32
/// numbers by less.
const AMBIGUITY: f64 = 1.0 / (1 << 18) as f64;
/// Maximum difference of log probabilities: three roundings of 2^-24 of numbers up to 20, and the
/// error of a sum of a hundred thousand numbers.
const LOG_PROBABILITY_MAX: f64 = 1e-4;

/// Parameters of a draw, and their name in the report.
type NamedDraw<'a> = (&'static str, Draw<'a>);

/// Masks, id lists and histories that the parameters of draws refer to.
struct DrawInputs {
    mask: Vec<u32>,
    /// Ids to choose among.
    choice_ids: Vec<u32>,
    /// Ids without a token.
    unused_ids: Vec<u32>,
    prompt: Vec<u32>,
    completion: Vec<u32>,
}

impl DrawInputs {
    fn new(ids: usize) -> DrawInputs {
        let ids = ids as u32;
        let mut mask = vec![0; ids.div_ceil(32) as usize];
        (0..ids)
            .filter(|id| id % 3 != 1)
            .for_each(|id| mask[id as usize / 32] |= 1 << (id % 32));
        DrawInputs {
            mask,
            choice_ids: vec![ids - 1, 3, 17],
            unused_ids: vec![0, 5, ids - 2],
            prompt: (0..10).map(|i| i * 3).collect(),
            completion: vec![1, 6, 6],
        }
    }

    fn named_draws(&self) -> Vec<NamedDraw<'_>> {
        let plain = Sampling {
            temperature: 0.8,
            ..Sampling::GREEDY
        };
        let with = |sampling| Draw {
            sampling,
            wants_log_sum_exp: true,
            ..Draw::GREEDY
        };
        let masked = |sampling| Draw {
            allowed: Allowed::Mask(&self.mask),
            ..with(sampling)
        };
        let all_filters = Sampling {
            top_k: 50,
            top_p: 0.95,
            min_p: 0.02,
            ..plain
        };
        let penalties = Sampling {
            repetition_penalty: 1.25,
            presence_penalty: 0.5,
            frequency_penalty: 0.125,
            ..plain
        };
        vec![
            ("greedy", with(Sampling::GREEDY)),
            ("temperature", with(plain)),
            ("top-k", with(Sampling { top_k: 20, ..plain })),
            ("top-p", with(Sampling { top_p: 0.9, ..plain })),
            ("min-p", with(Sampling { min_p: 0.1, ..plain })),
            ("all three", with(all_filters)),
            (
                "penalties",
                Draw {
                    prompt: &self.prompt,
                    completion: &self.completion,
                    ..with(penalties)
                },
            ),
            ("masked", masked(Sampling { top_p: 0.9, ..plain })),
            ("masked, greedy", masked(Sampling::GREEDY)),
            (
                "holes",
                Draw {
                    allowed: Allowed::AllBut(&self.unused_ids),
                    ..with(plain)
                },
            ),
            (
                "choice",
                Draw {
                    allowed: Allowed::Ids(&self.choice_ids),
                    wants_logits: true,
                    ..with(plain)
                },
            ),
        ]
    }
}

/// A device's draws, and seconds of one run if it is timed.
type DrawResults = (Vec<Result<DrawnToken, DrawError>>, Option<f64>);

/// Draws from rows of logits that are the head's columns, repeated cyclically.
fn run_draws<D: Device>(
    device: &D,
    (head, ids): (&TestTensor, usize),
    draws: &[Draw<'_>],
    time: impl Fn(&mut dyn FnMut() -> Result<(), DeviceError>) -> Result<Option<f64>, DeviceError>,
) -> Result<DrawResults, DeviceError> {
    let head = to_device_error(device.embedding_table(head.tensor()))?;
    let (mut x, mut workspace) = (device.buffer(), device.workspace());
    let rows: Vec<f32> = (0..draws.len() * WIDTH)
        .map(|i| if i % WIDTH == i / WIDTH % WIDTH { 1.0 } else { 0.0 })
        .collect();
    device.write(&rows, WIDTH, &mut x)?;
    let head = OutputHead {
        weight: &head,
        vocab_size: ids,
        soft_cap: None,
    };
    device.logits(head, &x, &mut workspace)?;
    device.draw(ids, draws, &mut workspace)?;
    let drawn = device.take_drawn(&mut workspace)?;
    let seconds = time(&mut || device.draw(ids, draws, &mut workspace))?;
    Ok((drawn, seconds))
}

/// Checks draws with all named parameters; `report` receives each finding as it is made.
pub(super) fn check_sampling<D: Device>(
    comparison: &Comparison<'_, D>,
    report: &mut dyn FnMut(Finding),
) -> Result<(), DeviceError> {
    let vocabularies: &[usize] = match comparison.extent {
        Extent::Quick => &[33, 1024, 5003],
        Extent::Full => &[33, 1024, 5003, 32_000, 151_936, 262_144],
    };
    for &ids in vocabularies {
        let head = TestTensor::from_values(&numbers(30, ids * WIDTH), ids, WIDTH, 8.0);
        for named_draw in DrawInputs::new(ids).named_draws() {
            report(check_draw(comparison, (&head, ids), named_draw)?);
        }
    }
    Ok(())
}

fn check_draw<D: Device>(
    comparison: &Comparison<'_, D>,
    (head, ids): (&TestTensor, usize),
    (name, draw): NamedDraw<'_>,
) -> Result<Finding, DeviceError> {
    let rows = if ids < 32_000 { WIDTH } else { 16 * WIDTH };
    let draws: Vec<Draw<'_>> = (0..rows as u64)
        .map(|row| Draw {
            // Maps the random number from [-1, 1) to [0, 1).
            uniform: f64::from(uniform(31, row)) / 2.0 + 0.5,
            ..draw
        })
        .collect();
    let (want, _) = run_draws(&comparison.reference, (head, ids), &draws, |_| Ok(None))?;
    let (got, seconds) = run_draws(comparison.device, (head, ids), &draws, |run| {
        comparison.time(comparison.device, run)
    })?;
    let (mut differ, mut worst, mut mismatch) = (0, 0.0f64, None);
    for (row, (want, got)) in want.iter().zip(&got).enumerate() {
        let want = match equally_good(comparison, (head, ids), (row, &draws[row]), (want, got))? {
            Some(equally_good) => equally_good,
            None => want.clone(),
        };
        let want = &want;
        match (want, got) {
            (Ok(want), Ok(got)) if want.token == got.token && want.logits == got.logits => {
                let difference = want.log_probability() - got.log_probability();
                worst = worst.max(f64::from(difference.abs()));
            }
            _ => {
                differ += 1;
                if mismatch.is_none() {
                    mismatch = Some(format!("row {row}: {got:?} instead of {want:?}"));
                }
            }
        }
    }
    Ok(Finding {
        operation: "sampling",
        format: "f32",
        shape: format!("{rows} x {ids}, {name}"),
        error: f64::from(differ) / rows as f64,
        worst,
        tolerance: Tolerance {
            error: 0.0,
            worst: LOG_PROBABILITY_MAX,
        },
        seconds,
        bytes: (rows * ids * 4) as f64,
        operations: 0.0,
        mismatch,
        by_library: None,
    })
}

/// The reference's result with the device's token, if a change of the uniform number, top-p or
/// min-p by `AMBIGUITY` makes the reference draw that token. `None` otherwise, or if both drew the
/// same token, or for greedy draws.
fn equally_good<D: Device>(
    comparison: &Comparison<'_, D>,
    (head, ids): (&TestTensor, usize),
    (row, draw): (usize, &Draw<'_>),
    (want, got): (&Result<DrawnToken, DrawError>, &Result<DrawnToken, DrawError>),
) -> Result<Option<Result<DrawnToken, DrawError>>, DeviceError> {
    let (Ok(want), Ok(got)) = (want, got) else {
        return Ok(None);
    };
    if want.token == got.token || draw.sampling.temperature == 0.0 {
        return Ok(None);
    }
    let sides = [0.0, -AMBIGUITY, AMBIGUITY];
    let offsets = sides
        .into_iter()
        .flat_map(|uniform| sides.map(|bound| (uniform, bound)));
    let draws: Vec<Draw<'_>> = offsets
        .map(|(uniform, bound)| Draw {
            sampling: Sampling {
                top_p: if draw.sampling.top_p < 1.0 {
                    draw.sampling.top_p + bound as f32
                } else {
                    draw.sampling.top_p
                },
                min_p: if draw.sampling.min_p > 0.0 {
                    draw.sampling.min_p + bound as f32
                } else {
                    draw.sampling.min_p
                },
                ..draw.sampling
            },
            uniform: (draw.uniform + uniform).clamp(0.0, 1.0 - f64::EPSILON),
            ..*draw
        })
        .collect();
    // Draws from all columns of the head, but only the results of the row's own column are used.
    let all: Vec<Draw<'_>> = draws.iter().flat_map(|draw| [*draw; WIDTH]).collect();
    let (drawn, _) = run_draws(&comparison.reference, (head, ids), &all, |_| Ok(None))?;
    let of_row = drawn.into_iter().skip(row % WIDTH).step_by(WIDTH);
    Ok(of_row
        .into_iter()
        .find(|drawn| drawn.as_ref().is_ok_and(|drawn| drawn.token == got.token)))
}
