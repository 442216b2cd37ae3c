//! The load that a job will put on the model: every row is read, rendered and tokenized once,
//! without running it.
//!
//! [`Preflight`] is a pure tally: rows go in, counts come out. Memory does not grow with the
//! dataset.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::device::cpu::BLOCK_TOKENS;
use crate::engine::philox::StreamKey;
use crate::engine::request::SampleId;

/// Maximum number of distinct prefix blocks in the tally (8 bytes each). Further blocks count as
/// not shared, so that the share is a lower bound.
const PREFIXES_MAX: usize = 4_000_000;
/// Maximum number of broken rows that are shown one by one.
const BROKEN_SHOWN: usize = 5;
/// A fixed seed, so that the same dataset shows the same prompts.
const PREVIEW_SEED: u64 = 0;
/// Maximum length of a shown prompt, in characters and in tokens.
const PREVIEW_CHARS: usize = 4_000;
const PREVIEW_TOKENS: usize = 4_000;

/// One row, rendered and tokenized.
#[derive(Debug)]
pub struct PreflightRow {
    pub row: u64,
    /// `Err`: the error with which the row would end `errored`.
    pub prompt: Result<PreflightPrompt, String>,
}

#[derive(Debug)]
pub struct PreflightPrompt {
    pub tokens: usize,
    /// Hash of each whole KV block and all blocks before it, since prefixes are shared in whole
    /// blocks.
    pub prefixes: Vec<u64>,
    pub shown: PromptPreview,
}

/// A prompt as the preview shows it; a long prompt is cut.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PromptPreview {
    pub text: String,
    pub token_ids: Vec<u32>,
    /// Tokens of the whole prompt.
    pub tokens: usize,
    /// Whether the text is cut.
    pub is_cut: bool,
}

impl PromptPreview {
    fn of(mut text: String, tokens: &[u32]) -> PromptPreview {
        let end = text.char_indices().nth(PREVIEW_CHARS).map(|(at, _)| at);
        text.truncate(end.unwrap_or(text.len()));
        text.shrink_to_fit();
        PromptPreview {
            text,
            token_ids: tokens[..tokens.len().min(PREVIEW_TOKENS)].to_vec(),
            tokens: tokens.len(),
            is_cut: end.is_some(),
        }
    }
}

impl PreflightPrompt {
    pub fn new(text: String, tokens: &[u32]) -> PreflightPrompt {
        let mut hasher = DefaultHasher::new();
        let prefixes = tokens
            .chunks_exact(BLOCK_TOKENS)
            .map(|block| {
                block.hash(&mut hasher);
                hasher.finish()
            })
            .collect();
        PreflightPrompt {
            tokens: tokens.len(),
            prefixes,
            shown: PromptPreview::of(text, tokens),
        }
    }
}

/// The tally.
#[derive(Debug)]
pub struct Preflight {
    pub rows: u64,
    pub broken_rows: u64,
    /// The first few broken rows and why.
    pub broken: Vec<(u64, String)>,
    pub prompt_tokens: u64,
    /// Prompt tokens in blocks that an earlier row shares.
    pub shared_tokens: u64,
    /// Rows by prompt length, index = tokens.
    lengths: Vec<u64>,
    prefixes: HashSet<u64>,
    preview: Vec<(u64, PromptPreview)>,
    preview_rows: usize,
}

impl Preflight {
    /// `preview_rows`: number of rendered prompts to keep, drawn uniformly from the unbroken rows.
    pub fn new(preview_rows: usize) -> Preflight {
        Preflight {
            rows: 0,
            broken_rows: 0,
            broken: Vec::new(),
            prompt_tokens: 0,
            shared_tokens: 0,
            lengths: Vec::new(),
            prefixes: HashSet::new(),
            preview: Vec::new(),
            preview_rows,
        }
    }

    /// Counts a row. Rows come in order, so that the same dataset gives the same tally.
    pub fn add(&mut self, seen: PreflightRow) {
        self.rows += 1;
        let prompt = match seen.prompt {
            Ok(prompt) => prompt,
            Err(why) => {
                self.broken_rows += 1;
                if self.broken.len() < BROKEN_SHOWN {
                    self.broken.push((seen.row, why));
                }
                return;
            }
        };
        self.prompt_tokens += prompt.tokens as u64;
        if self.lengths.len() <= prompt.tokens {
            self.lengths.resize(prompt.tokens + 1, 0);
        }
        self.lengths[prompt.tokens] += 1;
        for prefix in prompt.prefixes {
            if self.prefixes.contains(&prefix) {
                self.shared_tokens += BLOCK_TOKENS as u64;
            } else if self.prefixes.len() < PREFIXES_MAX {
                self.prefixes.insert(prefix);
            }
        }
        self.sample(seen.row, prompt.shown);
    }

    /// Reservoir sampling (Vitter's algorithm R), its randomness keyed by the row.
    fn sample(&mut self, row: u64, shown: PromptPreview) {
        let slot = if self.preview.len() < self.preview_rows {
            self.preview.push(Default::default());
            self.preview.len() - 1
        } else {
            let draw = StreamKey::of(
                PREVIEW_SEED,
                SampleId {
                    job: 0,
                    row,
                    sample: 0,
                    attempt: 0,
                },
            )
            .uniform(0);
            (draw * (self.rows - self.broken_rows) as f64) as usize
        };
        if slot < self.preview.len() {
            self.preview[slot] = (row, shown);
        }
    }

    /// Random rendered prompts, by row.
    pub fn preview(&self) -> Vec<&(u64, PromptPreview)> {
        let mut preview: Vec<_> = self.preview.iter().collect();
        preview.sort_by_key(|(row, _)| *row);
        preview
    }

    /// Longest prompt in tokens.
    pub fn longest(&self) -> usize {
        self.lengths.len().saturating_sub(1)
    }

    /// The prompt length, in tokens, that `share` (0 to 1) of the unbroken rows do not exceed.
    pub fn quantile(&self, share: f64) -> usize {
        let all: u64 = self.lengths.iter().sum();
        let mut below = 0;
        for (tokens, rows) in self.lengths.iter().enumerate() {
            below += rows;
            if below as f64 >= share * all as f64 {
                return tokens;
            }
        }
        self.longest()
    }

    /// Rows by prompt length in buckets whose upper bounds double: (maximum tokens, rows). Leading
    /// empty buckets are left out.
    pub fn histogram(&self) -> Vec<(usize, u64)> {
        let mut buckets: Vec<(usize, u64)> = Vec::new();
        let mut upper = 8;
        let mut from = 0;
        while from < self.lengths.len() {
            let to = (upper + 1).min(self.lengths.len());
            buckets.push((upper, self.lengths[from..to].iter().sum()));
            from = to;
            upper *= 2;
        }
        let first = buckets.iter().position(|b| b.1 > 0).unwrap_or(buckets.len());
        buckets.split_off(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(row: u64, tokens: &[u32]) -> PreflightRow {
        PreflightRow {
            row,
            prompt: Ok(PreflightPrompt::new(format!("prompt {row}"), tokens)),
        }
    }

    #[test]
    fn lengths_shared_prefixes_and_broken_rows_are_counted() {
        let mut preflight = Preflight::new(2);
        let shared: Vec<u32> = (0..40).collect();
        for i in 0..10 {
            preflight.add(row(i, &[shared.as_slice(), &[100 + i as u32]].concat()));
        }
        preflight.add(PreflightRow {
            row: 10,
            prompt: Err("broken".into()),
        });
        assert_eq!(
            (preflight.rows, preflight.broken_rows, preflight.prompt_tokens),
            (11, 1, 410)
        );
        // 41 tokens are two whole blocks and a rest; nine rows share both.
        assert_eq!(preflight.shared_tokens, 9 * 32);
        assert_eq!((preflight.quantile(0.5), preflight.longest()), (41, 41));
        assert_eq!(preflight.histogram(), [(64, 10)]);
        assert_eq!(preflight.broken, [(10, "broken".to_string())]);
        assert_eq!(preflight.preview().len(), 2);
    }

    #[test]
    fn the_same_tokens_after_another_prefix_are_not_shared() {
        let mut preflight = Preflight::new(0);
        let tail: Vec<u32> = (0..16).collect();
        preflight.add(row(0, &[[1; 16].as_slice(), &tail].concat()));
        preflight.add(row(1, &[[2; 16].as_slice(), &tail].concat()));
        assert_eq!(preflight.shared_tokens, 0);
    }

    #[test]
    fn every_row_has_the_same_chance_to_be_shown() {
        let mut shown = [0u32; 20];
        for shift in 0..2_000 {
            let mut preflight = Preflight::new(2);
            for i in 0..20 {
                // Each round uses other row numbers, because the randomness is keyed by them.
                preflight.add(row(shift * 20 + i, &[1]));
            }
            for (row, _) in preflight.preview() {
                shown[(row % 20) as usize] += 1;
            }
        }
        // 200 expected each, standard deviation about 13.
        assert!(shown.iter().all(|&n| (130..270).contains(&n)), "{shown:?}");
    }

    #[test]
    fn long_prompts_are_shown_cut() {
        let mut preflight = Preflight::new(1);
        preflight.add(PreflightRow {
            row: 7,
            prompt: Ok(PreflightPrompt::new("é".repeat(5_000), &[3; 6_000])),
        });
        let (row, shown) = preflight.preview()[0];
        assert_eq!((*row, shown.text.chars().count(), shown.is_cut), (7, 4_000, true));
        assert_eq!((shown.tokens, shown.token_ids.len()), (6_000, 4_000));
        assert!(!PreflightPrompt::new("é".repeat(4_000), &[3]).shown.is_cut);
    }

    #[test]
    fn an_empty_dataset_has_an_empty_plan() {
        let preflight = Preflight::new(3);
        assert_eq!((preflight.quantile(0.5), preflight.longest()), (0, 0));
        assert!(preflight.histogram().is_empty() && preflight.preview().is_empty());
    }
}
