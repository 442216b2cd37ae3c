//! Tokens drawn on the card from rows of logits: what `kernels/sample.cu` does, and is asked for.

use super::driver::{Argument, Memory};
use super::{Cuda, plan};
use crate::device::DeviceError;

/// No mask; what the kernel calls `NONE`.
const NO_MASK: u32 = u32::MAX;

/// How a row's token is to be drawn.
#[derive(Debug, Clone, Copy)]
pub struct Draw {
    /// 0: the largest logit wins, of equal ones the lowest id.
    pub temperature: f32,
    /// 0: all.
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    pub repetition_penalty: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    /// In [0, 1).
    pub uniform: f64,
}

/// What is asked of each row of logits.
#[derive(Debug, Clone, Default)]
pub struct Asks {
    /// As the kernel's `Draw`, `Penalty` and masks.
    draws: Vec<[u32; 12]>,
    penalties: Vec<[u32; 3]>,
    masks: Vec<u32>,
}

/// What became of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Drawn {
    Token {
        id: u32,
        /// Natural logarithm of its probability in the raw distribution.
        log_probability: f32,
    },
    /// The logits are not finite.
    NotFinite,
    /// No token that is allowed has a probability.
    NothingAllowed,
}

impl Asks {
    /// Asks for the next row's token. `seen`: tokens of the prompt or the completion, each once, with how often they occur in the
    /// completion. `mask`: a bit an id, those that may be drawn.
    pub fn push(&mut self, draw: &Draw, seen: impl IntoIterator<Item = (u32, u32)>, mask: Option<&[u32]>) {
        let first = self.penalties.len();
        self.penalties
            .extend(seen.into_iter().map(|(id, count)| [id, count, 0]));
        let mask = mask.map_or(NO_MASK, |mask| {
            let at = self.masks.len() as u32;
            self.masks.extend(mask);
            at
        });
        let uniform = draw.uniform.to_bits();
        // That of a temperature near zero is finite, too.
        let inverse = match draw.temperature {
            0.0 => 0.0,
            temperature => (1.0 / temperature).min(f32::MAX),
        };
        self.draws.push([
            uniform as u32,
            (uniform >> 32) as u32,
            inverse.to_bits(),
            draw.top_k,
            draw.top_p.to_bits(),
            draw.min_p.to_bits(),
            draw.repetition_penalty.to_bits(),
            draw.presence_penalty.to_bits(),
            draw.frequency_penalty.to_bits(),
            first as u32,
            (self.penalties.len() - first) as u32,
            mask,
        ]);
    }

    /// Rows that are asked of.
    pub fn rows(&self) -> usize {
        self.draws.len()
    }
}

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

impl Cuda {
    /// Draws from rows of logits on the host, `[asks.rows()][ids]`.
    ///
    /// # Errors
    /// The card failed.
    pub fn draw_from(&self, logits: &[f32], ids: usize, asks: &Asks) -> Result<Vec<Drawn>, DeviceError> {
        assert_eq!(logits.len(), ids * asks.rows());
        let words: Vec<u8> = logits.iter().flat_map(|x| x.to_ne_bytes()).collect();
        let logits = self.context.take_copy(&words, "logits")?;
        self.draw(&logits, (ids, ids), asks)
    }

    /// Draws from rows of `ids` logits, `stride` numbers apart, which are changed.
    fn draw(&self, logits: &Memory, (ids, stride): (usize, usize), asks: &Asks) -> Result<Vec<Drawn>, DeviceError> {
        let take = |words: &[u32]| self.context.take_copy(&bytes(words), "what tokens are drawn by");
        let (draws, penalties) = (take(asks.draws.as_flattened())?, take(asks.penalties.as_flattened())?);
        let masks = take(&asks.masks)?;
        let drawn = self.context.take(asks.rows() * 12, "drawn tokens")?;
        self.launch(
            &plan::sample(asks.rows()),
            &[
                Argument::Address(logits.address()),
                Argument::Word(ids as u32),
                Argument::Address(draws.address()),
                Argument::Address(penalties.address()),
                Argument::Address(masks.address()),
                Argument::Address(drawn.address()),
                Argument::Word(stride as u32),
            ],
        )?;
        let mut out = vec![0u8; asks.rows() * 12];
        self.context.download(&drawn, 0, &mut out)?;
        let words = out.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word));
        let words: Vec<u32> = words.collect();
        Ok(words
            .as_chunks::<3>()
            .0
            .iter()
            .map(|[id, status, log_probability]| match status {
                0 => Drawn::Token {
                    id: *id,
                    log_probability: f32::from_bits(*log_probability),
                },
                1 => Drawn::NotFinite,
                _ => Drawn::NothingAllowed,
            })
            .collect())
    }
}
