//! Sampling on a card, held against the sampler that runs on the host.

use toktrie::SimpleVob;

use super::inputs::numbers;
use super::tolerance::Tolerance;
use super::{Extent, Finding};
use crate::device::DeviceError;
use crate::device::cuda::Cuda;
use crate::device::cuda::draw::{Asks, Draw, Drawn};
use crate::engine::params::Params;
use crate::engine::philox::StreamKey;
use crate::engine::request::UnitId;
use crate::engine::sampling::{self, Allowed, Scratch};

const ROWS: usize = 16;
/// Where a number falls within rounding of the end of one token's share, the next one is as good.
const DIFFER_MAX: f64 = 1.0 / 16.0;
/// Of log probabilities: three roundings of 2^-24 of numbers up to 20, and what adding up a hundred thousand makes of their sum.
const LOG_PROBABILITY_MAX: f64 = 1e-4;

/// How tokens are drawn, by name.
fn ways() -> Vec<(&'static str, Params)> {
    let with = |change: &dyn Fn(&mut Params)| {
        let mut params = Params {
            temperature: 0.8,
            ..Params::default()
        };
        change(&mut params);
        params
    };
    vec![
        ("greedy", with(&|p| p.temperature = 0.0)),
        ("temperature", with(&|_| ())),
        ("top-k", with(&|p| p.top_k = 20)),
        ("top-p", with(&|p| p.top_p = 0.9)),
        ("min-p", with(&|p| p.min_p = 0.1)),
        (
            "all three",
            with(&|p| {
                (p.top_k, p.top_p, p.min_p) = (50, 0.95, 0.02);
            }),
        ),
        (
            "penalties",
            with(&|p| {
                (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) = (1.25, 0.5, 0.125);
            }),
        ),
        ("masked", with(&|p| p.top_p = 0.9)),
        ("masked, greedy", with(&|p| p.temperature = 0.0)),
    ]
}

/// Tokens of the prompt, ascending, and of the completion.
fn history(ids: u32) -> (Vec<u32>, Vec<u32>) {
    (
        (0..10)
            .map(|i| i * 3 % ids)
            .collect::<std::collections::BTreeSet<_>>()
            .into_iter()
            .collect(),
        vec![1 % ids, 6 % ids, 6 % ids],
    )
}

/// Every way of drawing; `tell` is given each finding as it is made.
///
/// # Errors
/// The card failed.
pub fn sampling(cuda: &Cuda, extent: Extent, tell: &mut dyn FnMut(Finding)) -> Result<(), DeviceError> {
    let vocabularies: &[usize] = match extent {
        Extent::Quick => &[33, 1024, 5003],
        Extent::Full => &[33, 1024, 5003, 32_000, 151_936],
    };
    for &ids in vocabularies {
        for (name, params) in ways() {
            tell(one(cuda, ids, name, &params)?);
        }
    }
    Ok(())
}

fn one(cuda: &Cuda, ids: usize, name: &'static str, params: &Params) -> Result<Finding, DeviceError> {
    let logits: Vec<f32> = numbers(30, ROWS * ids).iter().map(|x| x * 8.0).collect();
    let (prompt, completion) = history(ids as u32);
    let masked = name.starts_with("masked");
    let mut mask = SimpleVob::alloc(ids);
    (0..ids as u32)
        .filter(|id| id % 3 != 1)
        .for_each(|id| mask.allow_token(id));
    let allowed = if masked { Allowed::Mask(&mask) } else { Allowed::All };
    let (mut asks, mut want, mut scratch) = (Asks::default(), Vec::new(), Scratch::default());
    for (row, logits) in logits.chunks_exact(ids).enumerate() {
        let key = StreamKey::of(
            31,
            UnitId {
                job: 0,
                row: row as u64,
                sample: 0,
                attempt: 0,
            },
        );
        let draw = Draw {
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            uniform: key.uniform(row as u32),
        };
        let mut seen: Vec<(u32, u32)> = prompt.iter().chain(&completion).map(|id| (*id, 0)).collect();
        seen.sort_unstable();
        seen.dedup();
        seen.iter_mut()
            .for_each(|(id, count)| *count = completion.iter().filter(|c| *c == id).count() as u32);
        let penalised = name == "penalties";
        asks.push(
            &draw,
            if penalised { seen } else { vec![] },
            masked.then_some(mask.as_slice()),
        );
        let draw = sampling::Draw {
            params,
            allowed,
            prompt: &prompt,
            completion: &completion,
            key,
            position: row as u32,
            holes: &[],
        };
        want.push(sampling::sample(logits, draw, &mut scratch));
    }
    let drawn = cuda.draw_from(&logits, ids, &asks)?;
    let (mut differ, mut worst, mut mismatch) = (0, 0.0f64, None);
    for (row, (want, drawn)) in want.iter().zip(&drawn).enumerate() {
        match (want, drawn) {
            (Ok(want), Drawn::Token { id, log_probability }) if want == id => {
                let right = sampling::log_probability(&logits[row * ids..][..ids], *id);
                worst = worst.max(f64::from((right - log_probability).abs()));
            }
            _ => {
                differ += 1;
                if mismatch.is_none() && params.temperature == 0.0 {
                    mismatch = Some(format!("row {row}: {drawn:?} instead of {want:?}"));
                }
            }
        }
    }
    Ok(Finding {
        operation: "sampling",
        format: "f32",
        shape: format!("{ROWS} x {ids}, {name}"),
        error: f64::from(differ) / ROWS as f64,
        worst,
        tolerance: Tolerance {
            error: DIFFER_MAX,
            worst: LOG_PROBABILITY_MAX,
        },
        seconds: None,
        bytes: 0.0,
        operations: 0.0,
        mismatch,
    })
}
