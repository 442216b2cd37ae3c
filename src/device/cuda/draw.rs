//! Drawing tokens on the card from rows of logits: inputs and outputs of `kernels/sample.cu`.

use std::collections::HashMap;

use super::driver::{Argument, Busy, Memory, Pinned};
use super::memory::{Logits, address, pinned, staged, want};
use super::{Cuda, plan};
use crate::device::DeviceError;
use crate::device::draw::{Allowed, Draw, DrawError, Drawn};

/// No mask; the kernel's `NONE`.
const NO_MASK: u32 = u32::MAX;
/// Sizes of the kernel's `Draw` and `Drawn`, in words.
const DRAW_WORDS: usize = 14;
const DRAWN_WORDS: usize = 5;

/// The kernel's inputs, one draw per row of logits.
#[derive(Debug)]
struct DrawArguments<'a> {
    /// Token ids are below this number.
    ids: usize,
    draws: Vec<[u32; DRAW_WORDS]>,
    /// (token id, count in the completion, scratch word of the kernel).
    penalties: Vec<[u32; 3]>,
    /// Distinct masks. Rows under a grammar have one each, 16 KB in a vocabulary of 128,256 ids, so
    /// masks are written straight into pinned memory.
    masks: Vec<Allowed<'a>>,
    /// Ids whose logits are requested.
    wanted: Vec<u32>,
}

impl<'a> DrawArguments<'a> {
    /// Collects draws of ids below `ids`.
    fn new(draws: &[Draw<'a>], ids: usize) -> DrawArguments<'a> {
        let mut asked = DrawArguments {
            ids,
            draws: Vec::with_capacity(draws.len()),
            penalties: Vec::new(),
            masks: Vec::new(),
            wanted: Vec::new(),
        };
        // Rows of a job share their masks. A shared list has one address as long as `draws` borrows
        // it.
        let mut known = HashMap::new();
        let mut counts = Vec::new();
        for draw in draws {
            let mask = asked.mask(draw.allowed, &mut known);
            let first_penalty = asked.penalties.len();
            if draw.sampling.penalises() {
                counts.resize(ids, 0);
                asked.add_penalties(draw, &mut counts);
            }
            let first_wanted = asked.wanted.len();
            if let (true, Allowed::Ids(wanted)) = (draw.logits, draw.allowed) {
                asked.wanted.extend(wanted.iter().filter(|id| (**id as usize) < ids));
            }
            let uniform = draw.uniform.to_bits();
            let inverse = match draw.sampling.temperature {
                0.0 => 0.0,
                _ => draw.sampling.inverse_temperature(),
            };
            asked.draws.push([
                uniform as u32,
                (uniform >> 32) as u32,
                inverse.to_bits(),
                draw.sampling.top_k,
                draw.sampling.top_p.to_bits(),
                draw.sampling.min_p.to_bits(),
                draw.sampling.repetition_penalty.to_bits(),
                draw.sampling.presence_penalty.to_bits(),
                draw.sampling.frequency_penalty.to_bits(),
                first_penalty as u32,
                (asked.penalties.len() - first_penalty) as u32,
                mask,
                first_wanted as u32,
                (asked.wanted.len() - first_wanted) as u32,
            ]);
        }
        asked
    }

    /// Offset of the mask of `allowed`, in words.
    fn mask(&mut self, allowed: Allowed<'a>, known: &mut HashMap<(u8, *const u32, usize), u32>) -> u32 {
        let (kind, list) = match allowed {
            Allowed::AllBut([]) => return NO_MASK,
            Allowed::AllBut(banned) => (0, banned),
            Allowed::Mask(mask) => (1, mask),
            Allowed::Ids(allowed) => (2, allowed),
        };
        *known.entry((kind, list.as_ptr(), list.len())).or_insert_with(|| {
            self.masks.push(allowed);
            ((self.masks.len() - 1) * mask_words(self.ids)) as u32
        })
    }

    /// Adds the tokens of prompt or completion that a penalty applies to, each once. `counts` has a
    /// zero for each id, on entry and on return.
    fn add_penalties(&mut self, draw: &Draw<'_>, counts: &mut [u32]) {
        let first = self.penalties.len();
        for id in draw.completion {
            if let Some(count) = counts.get_mut(*id as usize) {
                if *count == 0 {
                    self.penalties.push([*id, 0, 0]);
                }
                *count += 1;
            }
        }
        let generated = self.penalties.len();
        if draw.sampling.repetition_penalty != 1.0 {
            let only_prompt = |id: &&u32| counts.get(**id as usize) == Some(&0);
            self.penalties
                .extend(draw.prompt.iter().filter(only_prompt).map(|id| [*id, 0, 0]));
        }
        for [id, count, _] in &mut self.penalties[first..generated] {
            *count = std::mem::take(&mut counts[*id as usize]);
        }
    }

    /// Offsets of draws, penalties, masks and wanted ids, and the total size, in bytes.
    fn places(&self) -> ([usize; 4], usize) {
        let words = [
            self.draws.as_flattened().len(),
            self.penalties.as_flattened().len(),
            self.masks.len() * mask_words(self.ids),
            self.wanted.len(),
        ];
        let mut end = 0;
        let places = words.map(|words| {
            // A draw begins with an 8-byte number.
            let place = end;
            end += (words * 4).next_multiple_of(16);
            place
        });
        (places, end)
    }

    /// Writes all arrays at their offsets.
    fn write(&self, to: &mut [u8]) {
        let ([draws, penalties, masks, wanted], _) = self.places();
        write_words(&mut to[draws..], self.draws.as_flattened());
        write_words(&mut to[penalties..], self.penalties.as_flattened());
        write_words(&mut to[wanted..], &self.wanted);
        let mask_bytes = mask_words(self.ids) * 4;
        for (to, allowed) in to[masks..].chunks_exact_mut(mask_bytes.max(4)).zip(&self.masks) {
            match allowed {
                Allowed::Mask(mask) if mask.len() * 4 >= mask_bytes => write_words(to, &mask[..mask_bytes / 4]),
                allowed => write_words(to, &mask_of(*allowed, self.ids)),
            }
        }
    }
}

/// Words of a mask of `ids` ids, one bit per id.
fn mask_words(ids: usize) -> usize {
    ids.div_ceil(32)
}

/// The mask of the allowed ids among `ids` ids.
fn mask_of(allowed: Allowed<'_>, ids: usize) -> Vec<u32> {
    let words = mask_words(ids);
    let below = |list: &[u32]| {
        list.iter()
            .map(|id| *id as usize)
            .filter(|id| *id < ids)
            .collect::<Vec<_>>()
    };
    match allowed {
        Allowed::Mask(mask) => mask.iter().copied().chain(std::iter::repeat(0)).take(words).collect(),
        Allowed::AllBut(banned) => {
            let mut mask = vec![u32::MAX; words];
            below(banned).iter().for_each(|id| mask[id / 32] &= !(1 << (id % 32)));
            mask
        }
        Allowed::Ids(list) => {
            let mut mask = vec![0; words];
            below(list).iter().for_each(|id| mask[id / 32] |= 1 << (id % 32));
            mask
        }
    }
}

fn write_words(to: &mut [u8], words: &[u32]) {
    for (to, word) in to.as_chunks_mut::<4>().0.iter_mut().zip(words) {
        *to = word.to_ne_bytes();
    }
}

/// Draws in progress on the card.
#[derive(Default)]
pub(super) struct Drawing {
    asked: Option<Memory>,
    staging: Option<Busy>,
    /// The kernel's `Drawn` of each row, then the requested logits.
    drawn: Option<Memory>,
    /// Their copy on its way to the host, and the pinned memory of the last copy.
    coming: Option<Busy>,
    host: Option<Pinned>,
    /// One entry per row that is on its way.
    rows: Vec<RequestedLogits>,
}

/// Requested results of a row besides its token.
#[derive(Debug, Clone)]
struct RequestedLogits {
    log_sum: bool,
    /// For each id whose logit is requested, in order: whether the model has this id.
    known: Vec<bool>,
}

impl Drawing {
    /// Address of the tokens drawn last, as the kernel's `Drawn`.
    pub(super) fn drawn(&self) -> Argument {
        address(&self.drawn)
    }

    /// Waits for the drawn tokens.
    pub(super) fn take(&mut self) -> Result<Vec<Result<Drawn, DrawError>>, DeviceError> {
        let rows = std::mem::take(&mut self.rows);
        let Some(coming) = self.coming.take() else {
            return Ok(Vec::new());
        };
        let host = self.host.insert(coming.wait()?);
        let words = host.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word));
        let logits = words.clone().skip(rows.len() * DRAWN_WORDS).map(f32::from_bits);
        Ok(read(&rows, words, logits))
    }
}

/// Decodes the kernel's results.
fn read(
    rows: &[RequestedLogits],
    mut words: impl Iterator<Item = u32>,
    mut logits: impl Iterator<Item = f32>,
) -> Vec<Result<Drawn, DrawError>> {
    let mut next = || words.next().unwrap_or(u32::MAX);
    let row = |wanted: &RequestedLogits| {
        let [token, status] = [next(), next()];
        let [logit, largest, total] = [(); 3].map(|()| f32::from_bits(next()));
        let known = |known: &bool| match known {
            true => logits.next().unwrap_or(f32::NEG_INFINITY),
            false => f32::NEG_INFINITY,
        };
        let logits = wanted.known.iter().map(known).collect();
        match status {
            0 => Ok(Drawn {
                token,
                logit,
                log_sum: if wanted.log_sum {
                    f64::from(largest) + f64::from(total).ln()
                } else {
                    0.0
                },
                logits,
            }),
            1 => Err(DrawError::NotFinite),
            _ => Err(DrawError::NothingAllowed),
        }
    };
    rows.iter().map(row).collect()
}

impl Cuda {
    /// Begins to draw from rows of logits, which are overwritten.
    pub(super) fn draw_from(
        &self,
        ids: usize,
        draws: &[Draw<'_>],
        logits: &Logits,
        drawing: &mut Drawing,
    ) -> Result<(), DeviceError> {
        let ids = ids.min(logits.ids);
        assert_eq!(draws.len(), logits.rows, "a draw for each row of logits");
        let asked = DrawArguments::new(draws, ids);
        let (places, bytes) = asked.places();
        let on = &self.context;
        want(
            on,
            &mut drawing.asked,
            bytes.next_power_of_two(),
            "what tokens are drawn by",
        )?;
        let mut staging = staged(on, drawing.staging.take(), bytes)?;
        asked.write(&mut staging[..bytes]);
        let drawn_bytes = draws.len() * DRAWN_WORDS * 4;
        let results = drawn_bytes + asked.wanted.len() * 4;
        want(on, &mut drawing.drawn, results.next_power_of_two(), "drawn tokens")?;
        let (Some(memory), Some(drawn)) = (&drawing.asked, &drawing.drawn) else {
            return Ok(());
        };
        drawing.staging = Some(on.send(staging, bytes, memory)?);
        let [draws_at, penalties, masks, wanted] =
            places.map(|place| Argument::Address(memory.address() + place as u64));
        self.launch(
            &plan::sample(draws.len()),
            &[
                address(&logits.memory),
                Argument::Word(ids as u32),
                draws_at,
                penalties,
                masks,
                wanted,
                Argument::Address(drawn.address()),
                Argument::Address(drawn.address() + drawn_bytes as u64),
                Argument::Word(logits.stride as u32),
            ],
        )?;
        // Results that nobody took are waited for, so that their pinned memory can be used again.
        if let Some(coming) = drawing.coming.take() {
            drawing.host = Some(coming.wait()?);
        }
        let host = pinned(on, drawing.host.take(), results)?;
        drawing.coming = Some(on.fetch(drawn, results, host)?);
        drawing.rows.clear();
        drawing.rows.extend(draws.iter().map(|draw| RequestedLogits {
            log_sum: draw.log_sum,
            known: match draw.allowed {
                Allowed::Ids(wanted) if draw.logits => wanted.iter().map(|id| (*id as usize) < ids).collect(),
                _ => Vec::new(),
            },
        }));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::draw::Sampling;

    #[test]
    fn what_is_shared_is_sent_once() {
        let (mask, banned, few) = ([0x8000_0001, 5, 7], [3u32, 90], [1u32, 33, 90]);
        let allowed = [
            Allowed::Mask(&mask),
            Allowed::AllBut(&banned),
            Allowed::Mask(&mask),
            Allowed::AllBut(&[]),
            Allowed::Ids(&few),
        ];
        let logits = true;
        let draws = allowed.map(|allowed| Draw {
            allowed,
            logits,
            ..Draw::GREEDY
        });
        let asked = DrawArguments::new(&draws, 40);
        assert_eq!(
            asked.draws.iter().map(|draw| draw[11]).collect::<Vec<_>>(),
            [0, 2, 0, NO_MASK, 4]
        );
        let mut bytes = vec![0xee; asked.places().1];
        asked.write(&mut bytes);
        let words = |place: usize, count: usize| {
            let words = bytes[place..]
                .as_chunks::<4>()
                .0
                .iter()
                .map(|word| u32::from_ne_bytes(*word));
            words.take(count).collect::<Vec<_>>()
        };
        let ([at, _, masks, wanted], _) = asked.places();
        assert_eq!(words(masks, 6), [0x8000_0001, 5, !8, u32::MAX, 2, 2]);
        assert_eq!(words(at, DRAW_WORDS), asked.draws[0]);
        assert_eq!(words(wanted, 2), [1, 33]);
        assert_eq!(asked.wanted, [1, 33], "90 is none of the ids");
        assert_eq!(asked.draws[4][12..], [0, 2]);
    }

    #[test]
    fn penalties_name_each_token_once() {
        let draw = Draw {
            sampling: Sampling {
                repetition_penalty: 1.5,
                ..Sampling::GREEDY
            },
            prompt: &[2, 5, 70],
            completion: &[9, 5, 9, 71],
            ..Draw::GREEDY
        };
        let presence = Draw {
            sampling: Sampling {
                repetition_penalty: 1.0,
                presence_penalty: 0.5,
                ..draw.sampling
            },
            ..draw
        };
        let asked = DrawArguments::new(&[draw, presence], 64);
        assert_eq!(asked.penalties, [[9, 2, 0], [5, 1, 0], [2, 0, 0], [9, 2, 0], [5, 1, 0]]);
        assert_eq!(
            (&asked.draws[0][9..11], &asked.draws[1][9..11]),
            (&[0, 3][..], &[3, 2][..])
        );
        assert_eq!(asked.places(), ([0, 112, 176, 176], 176));
        let mut bytes = vec![0xee; 176];
        asked.write(&mut bytes);
        assert_eq!(bytes[112..116], 9u32.to_ne_bytes());
    }

    #[test]
    fn what_the_kernel_wrote_is_read() {
        let rows = [
            RequestedLogits {
                log_sum: true,
                known: vec![],
            },
            RequestedLogits {
                log_sum: false,
                known: vec![true, false],
            },
            RequestedLogits {
                log_sum: false,
                known: vec![],
            },
        ];
        let [two, four] = [2.0f32, 4.0].map(f32::to_bits);
        let words = [7, 0, two, four, two, 8, 0, two, four, two, 0, 1, 0, 0, 0];
        let drawn = read(&rows, words.into_iter(), [0.5f32].into_iter());
        let first = drawn[0].clone().unwrap();
        assert_eq!((first.token, first.logit, first.log_sum), (7, 2.0, 4.0 + 2f64.ln()));
        let second = drawn[1].clone().unwrap();
        assert_eq!(
            (second.log_sum, &second.logits[..]),
            (0.0, &[0.5, f32::NEG_INFINITY][..])
        );
        assert_eq!(drawn[2], Err(DrawError::NotFinite));
    }
}
