//! Drawing tokens on the card from rows of logits: inputs and outputs of `kernels/sample.cu`.

use std::collections::HashMap;

use super::driver::{Argument, Memory, Pinned, PinnedTransfer};
use super::memory::{Logits, address, ensure_capacity, reuse_pinned, reuse_staging};
use super::{Cuda, plan};
use crate::device::DeviceError;
use crate::device::draw::{Allowed, Draw, DrawError, DrawnToken};

/// Mask offset of a draw without a mask; the kernel's `NONE`.
const NO_MASK: u32 = u32::MAX;
/// Sizes of the kernel's `Draw` and `Drawn`, in 32-bit words.
const DRAW_WORDS: usize = 14;
const DRAWN_WORDS: usize = 5;

/// The kernel's inputs, one draw per row of logits.
#[derive(Debug)]
struct DrawArguments<'a> {
    /// Token ids are below this number.
    vocab_size: usize,
    /// In the layout of the kernel's `Draw`.
    draws: Vec<[u32; DRAW_WORDS]>,
    /// (token id, count in the completion, scratch word of the kernel).
    penalties: Vec<[u32; 3]>,
    /// Distinct masks. Each row with a grammar has its own, 16 KB for a vocabulary of 128,256 ids,
    /// so masks are written straight into pinned memory.
    masks: Vec<Allowed<'a>>,
    /// Ids whose logits are requested.
    requested_ids: Vec<u32>,
}

impl<'a> DrawArguments<'a> {
    /// Collects the inputs of draws from token ids below `vocab_size`.
    fn new(draws: &[Draw<'a>], vocab_size: usize) -> DrawArguments<'a> {
        let mut arguments = DrawArguments {
            vocab_size,
            draws: Vec::with_capacity(draws.len()),
            penalties: Vec::new(),
            masks: Vec::new(),
            requested_ids: Vec::new(),
        };
        // Rows of a job share their masks. Equal addresses mean equal lists, because `draws`
        // borrows the lists.
        let mut mask_offsets = HashMap::new();
        let mut counts = Vec::new();
        for draw in draws {
            let mask = arguments.mask_offset(draw.allowed, &mut mask_offsets);
            let first_penalty = arguments.penalties.len();
            if draw.sampling.penalises() {
                counts.resize(vocab_size, 0);
                arguments.add_penalties(draw, &mut counts);
            }
            let first_requested = arguments.requested_ids.len();
            if let (true, Allowed::Ids(ids)) = (draw.wants_logits, draw.allowed) {
                arguments
                    .requested_ids
                    .extend(ids.iter().filter(|id| (**id as usize) < vocab_size));
            }
            let uniform = draw.uniform.to_bits();
            let inverse_temperature = match draw.sampling.temperature {
                0.0 => 0.0,
                _ => draw.sampling.inverse_temperature(),
            };
            arguments.draws.push([
                uniform as u32,
                (uniform >> 32) as u32,
                inverse_temperature.to_bits(),
                draw.sampling.top_k,
                draw.sampling.top_p.to_bits(),
                draw.sampling.min_p.to_bits(),
                draw.sampling.repetition_penalty.to_bits(),
                draw.sampling.presence_penalty.to_bits(),
                draw.sampling.frequency_penalty.to_bits(),
                first_penalty as u32,
                (arguments.penalties.len() - first_penalty) as u32,
                mask,
                first_requested as u32,
                (arguments.requested_ids.len() - first_requested) as u32,
            ]);
        }
        arguments
    }

    /// Offset of the mask of `allowed` in 32-bit words, from `mask_offsets` if the mask is known.
    /// Its keys are kind, address and length of an id list or mask.
    fn mask_offset(&mut self, allowed: Allowed<'a>, mask_offsets: &mut HashMap<(u8, *const u32, usize), u32>) -> u32 {
        let (kind, list) = match allowed {
            Allowed::AllBut([]) => return NO_MASK,
            Allowed::AllBut(banned) => (0, banned),
            Allowed::Mask(mask) => (1, mask),
            Allowed::Ids(allowed) => (2, allowed),
        };
        *mask_offsets
            .entry((kind, list.as_ptr(), list.len()))
            .or_insert_with(|| {
                self.masks.push(allowed);
                ((self.masks.len() - 1) * mask_words(self.vocab_size)) as u32
            })
    }

    /// Adds the tokens of the completion and, for a repetition penalty, of the prompt, each once.
    /// `counts` has a zero for each id, on entry and on return.
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
        let completion_end = self.penalties.len();
        if draw.sampling.repetition_penalty != 1.0 {
            let only_prompt = |id: &&u32| counts.get(**id as usize) == Some(&0);
            self.penalties
                .extend(draw.prompt.iter().filter(only_prompt).map(|id| [*id, 0, 0]));
        }
        for [id, count, _] in &mut self.penalties[first..completion_end] {
            *count = std::mem::take(&mut counts[*id as usize]);
        }
    }

    /// Offsets of draws, penalties, masks and requested ids, and the total size, in bytes.
    fn offsets(&self) -> ([usize; 4], usize) {
        let words = [
            self.draws.as_flattened().len(),
            self.penalties.as_flattened().len(),
            self.masks.len() * mask_words(self.vocab_size),
            self.requested_ids.len(),
        ];
        let mut end = 0;
        let offsets = words.map(|words| {
            // Multiples of 16, because a draw begins with an 8-byte number.
            let offset = end;
            end += (words * 4).next_multiple_of(16);
            offset
        });
        (offsets, end)
    }

    /// Writes all arrays at their offsets.
    fn write(&self, to: &mut [u8]) {
        let ([draws, penalties, masks, requested], _) = self.offsets();
        write_words(&mut to[draws..], self.draws.as_flattened());
        write_words(&mut to[penalties..], self.penalties.as_flattened());
        write_words(&mut to[requested..], &self.requested_ids);
        let mask_bytes = mask_words(self.vocab_size) * 4;
        for (to, allowed) in to[masks..].chunks_exact_mut(mask_bytes.max(4)).zip(&self.masks) {
            match allowed {
                Allowed::Mask(mask) if mask.len() * 4 >= mask_bytes => write_words(to, &mask[..mask_bytes / 4]),
                allowed => write_words(to, &mask_of(*allowed, self.vocab_size)),
            }
        }
    }
}

/// 32-bit words of a mask with one bit per token id.
fn mask_words(vocab_size: usize) -> usize {
    vocab_size.div_ceil(32)
}

/// The mask of the allowed ids below `vocab_size`.
fn mask_of(allowed: Allowed<'_>, vocab_size: usize) -> Vec<u32> {
    let words = mask_words(vocab_size);
    let valid = |list: &[u32]| {
        list.iter()
            .map(|id| *id as usize)
            .filter(|id| *id < vocab_size)
            .collect::<Vec<_>>()
    };
    match allowed {
        Allowed::Mask(mask) => mask.iter().copied().chain(std::iter::repeat(0)).take(words).collect(),
        Allowed::AllBut(banned) => {
            let mut mask = vec![u32::MAX; words];
            valid(banned).iter().for_each(|id| mask[id / 32] &= !(1 << (id % 32)));
            mask
        }
        Allowed::Ids(list) => {
            let mut mask = vec![0; words];
            valid(list).iter().for_each(|id| mask[id / 32] |= 1 << (id % 32));
            mask
        }
    }
}

fn write_words(to: &mut [u8], words: &[u32]) {
    for (to, word) in to.as_chunks_mut::<4>().0.iter_mut().zip(words) {
        *to = word.to_ne_bytes();
    }
}

/// A batch of draws on the card, and its memory.
#[derive(Default)]
pub(super) struct Drawing {
    /// The arrays of [`DrawArguments`].
    arguments: Option<Memory>,
    staging: Option<PinnedTransfer>,
    /// The kernel's `Drawn` of each row, then the requested logits.
    drawn: Option<Memory>,
    /// The copy of `drawn` to the host, while it runs.
    download: Option<PinnedTransfer>,
    /// Pinned memory of the last copy.
    host: Option<Pinned>,
    /// One entry per row of the batch.
    rows: Vec<RequestedResults>,
}

/// Requested results of a row besides its token.
#[derive(Debug, Clone)]
struct RequestedResults {
    has_log_sum_exp: bool,
    /// For each id whose logit is requested, in order: whether the model has this id.
    in_vocab: Vec<bool>,
}

impl Drawing {
    /// Address of the last batch's results: the kernel's `Drawn` of each row.
    pub(super) fn drawn_address(&self) -> Argument {
        address(&self.drawn)
    }

    /// Waits for the results of the last batch; empty if they have been taken already.
    pub(super) fn wait_for_results(&mut self) -> Result<Vec<Result<DrawnToken, DrawError>>, DeviceError> {
        let rows = std::mem::take(&mut self.rows);
        let Some(download) = self.download.take() else {
            return Ok(Vec::new());
        };
        let host = self.host.insert(download.wait()?);
        let words = host.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word));
        let logits = words.clone().skip(rows.len() * DRAWN_WORDS).map(f32::from_bits);
        Ok(decode_results(&rows, words, logits))
    }
}

/// Decodes the kernel's results.
fn decode_results(
    rows: &[RequestedResults],
    mut words: impl Iterator<Item = u32>,
    mut logits: impl Iterator<Item = f32>,
) -> Vec<Result<DrawnToken, DrawError>> {
    let mut next = || words.next().unwrap_or(u32::MAX);
    let decode_row = |requested: &RequestedResults| {
        let [token, status] = [next(), next()];
        let [logit, largest, total] = [(); 3].map(|()| f32::from_bits(next()));
        let logit_of = |in_vocab: &bool| match in_vocab {
            true => logits.next().unwrap_or(f32::NEG_INFINITY),
            false => f32::NEG_INFINITY,
        };
        let logits = requested.in_vocab.iter().map(logit_of).collect();
        match status {
            0 => Ok(DrawnToken {
                token,
                logit,
                log_sum_exp: if requested.has_log_sum_exp {
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
    rows.iter().map(decode_row).collect()
}

impl Cuda {
    /// Begins to draw tokens below `vocab_size` from rows of logits, which are overwritten.
    pub(super) fn draw_from(
        &self,
        vocab_size: usize,
        draws: &[Draw<'_>],
        logits: &Logits,
        drawing: &mut Drawing,
    ) -> Result<(), DeviceError> {
        let vocab_size = vocab_size.min(logits.vocab_size);
        assert_eq!(draws.len(), logits.rows, "a draw for each row of logits");
        let arguments = DrawArguments::new(draws, vocab_size);
        let (offsets, bytes) = arguments.offsets();
        let context = &self.context;
        ensure_capacity(
            context,
            &mut drawing.arguments,
            bytes.next_power_of_two(),
            "arguments of sampling",
        )?;
        let mut staging = reuse_staging(context, drawing.staging.take(), bytes)?;
        arguments.write(&mut staging[..bytes]);
        let drawn_bytes = draws.len() * DRAWN_WORDS * 4;
        let result_bytes = drawn_bytes + arguments.requested_ids.len() * 4;
        ensure_capacity(
            context,
            &mut drawing.drawn,
            result_bytes.next_power_of_two(),
            "drawn tokens",
        )?;
        let (Some(memory), Some(drawn)) = (&drawing.arguments, &drawing.drawn) else {
            return Ok(());
        };
        drawing.staging = Some(context.send(staging, bytes, memory)?);
        let [draw_array, penalties, masks, requested_ids] =
            offsets.map(|offset| Argument::Address(memory.address() + offset as u64));
        self.launch(
            &plan::sample(draws.len()),
            &[
                address(&logits.memory),
                Argument::Word(vocab_size as u32),
                draw_array,
                penalties,
                masks,
                requested_ids,
                Argument::Address(drawn.address()),
                Argument::Address(drawn.address() + drawn_bytes as u64),
                Argument::Word(logits.stride as u32),
            ],
        )?;
        // If the last results were never taken, their copy is waited for, so that its pinned memory
        // can be reused.
        if let Some(download) = drawing.download.take() {
            drawing.host = Some(download.wait()?);
        }
        let host = reuse_pinned(context, drawing.host.take(), result_bytes)?;
        drawing.download = Some(context.fetch(drawn, result_bytes, host)?);
        drawing.rows.clear();
        drawing.rows.extend(draws.iter().map(|draw| RequestedResults {
            has_log_sum_exp: draw.wants_log_sum_exp,
            in_vocab: match draw.allowed {
                Allowed::Ids(ids) if draw.wants_logits => ids.iter().map(|id| (*id as usize) < vocab_size).collect(),
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
    fn equal_masks_are_sent_once() {
        let (mask, banned, few) = ([0x8000_0001, 5, 7], [3u32, 90], [1u32, 33, 90]);
        let allowed = [
            Allowed::Mask(&mask),
            Allowed::AllBut(&banned),
            Allowed::Mask(&mask),
            Allowed::AllBut(&[]),
            Allowed::Ids(&few),
        ];
        let draws = allowed.map(|allowed| Draw {
            allowed,
            wants_logits: true,
            ..Draw::GREEDY
        });
        let arguments = DrawArguments::new(&draws, 40);
        assert_eq!(
            arguments.draws.iter().map(|draw| draw[11]).collect::<Vec<_>>(),
            [0, 2, 0, NO_MASK, 4]
        );
        let mut bytes = vec![0xee; arguments.offsets().1];
        arguments.write(&mut bytes);
        let words = |offset: usize, count: usize| {
            let words = bytes[offset..]
                .as_chunks::<4>()
                .0
                .iter()
                .map(|word| u32::from_ne_bytes(*word));
            words.take(count).collect::<Vec<_>>()
        };
        let ([draws, _, masks, requested], _) = arguments.offsets();
        assert_eq!(words(masks, 6), [0x8000_0001, 5, !8, u32::MAX, 2, 2]);
        assert_eq!(words(draws, DRAW_WORDS), arguments.draws[0]);
        assert_eq!(words(requested, 2), [1, 33]);
        assert_eq!(arguments.requested_ids, [1, 33], "90 is none of the ids");
        assert_eq!(arguments.draws[4][12..], [0, 2]);
    }

    #[test]
    fn penalties_list_each_token_once() {
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
        let arguments = DrawArguments::new(&[draw, presence], 64);
        assert_eq!(
            arguments.penalties,
            [[9, 2, 0], [5, 1, 0], [2, 0, 0], [9, 2, 0], [5, 1, 0]]
        );
        assert_eq!(
            (&arguments.draws[0][9..11], &arguments.draws[1][9..11]),
            (&[0, 3][..], &[3, 2][..])
        );
        assert_eq!(arguments.offsets(), ([0, 112, 176, 176], 176));
        let mut bytes = vec![0xee; 176];
        arguments.write(&mut bytes);
        assert_eq!(bytes[112..116], 9u32.to_ne_bytes());
    }

    #[test]
    fn kernel_results_are_decoded() {
        let rows = [
            RequestedResults {
                has_log_sum_exp: true,
                in_vocab: vec![],
            },
            RequestedResults {
                has_log_sum_exp: false,
                in_vocab: vec![true, false],
            },
            RequestedResults {
                has_log_sum_exp: false,
                in_vocab: vec![],
            },
        ];
        let [two, four] = [2.0f32, 4.0].map(f32::to_bits);
        let words = [7, 0, two, four, two, 8, 0, two, four, two, 0, 1, 0, 0, 0];
        let drawn = decode_results(&rows, words.into_iter(), [0.5f32].into_iter());
        let first = drawn[0].clone().unwrap();
        assert_eq!((first.token, first.logit, first.log_sum_exp), (7, 2.0, 4.0 + 2f64.ln()));
        let second = drawn[1].clone().unwrap();
        assert_eq!(
            (second.log_sum_exp, &second.logits[..]),
            (0.0, &[0.5, f32::NEG_INFINITY][..])
        );
        assert_eq!(drawn[2], Err(DrawError::NotFinite));
    }
}
