//! Checks rotation, the storage of keys and values, and attention together, since the layout of KV
//! blocks differs between devices.

use super::inputs::{TestTensor, numbers};
use super::operations::to_device_error;
use super::tolerance::Tolerance;
use super::{Comparison, Extent, Finding, compare};
use crate::device::batch::{NO_BLOCK, StepBatch};
use crate::device::{
    Attention, AttentionInput, Device, DeviceError, HeadShape, KvPlace, KvShape, KvSpec, QkNorm, RopeSpec, RopeStore,
};

/// A test case: heads, kind of attention, and the sequences of two steps.
struct AttentionCase {
    heads: HeadShape,
    params: Attention,
    has_qk_norm: bool,
    /// Whether the layer shares its blocks with another one and with a layer of a larger shape, its values are normalised,
    /// and another layer reads what it has stored.
    shares_blocks: bool,
    /// Sequences as (tokens in the first step, tokens in the second step). One token in the second
    /// step is a decode.
    sequences: Vec<(u32, u32)>,
    /// Length of the first sequence's prefix that all other sequences share, in the same blocks; a
    /// multiple of the block size.
    prefix_len: u32,
}

/// What attention reads, without sinks.
fn input<B, V>(qkv: &B) -> AttentionInput<'_, B, V> {
    AttentionInput { qkv, sinks: None }
}

fn heads(heads: usize, kv_heads: usize, head_dim: usize) -> HeadShape {
    HeadShape {
        heads,
        kv_heads,
        head_dim,
        value_in_key: None,
    }
}

fn cases(extent: Extent) -> Vec<AttentionCase> {
    let case = |heads, spec, has_qk_norm, sequences: &[(u32, u32)], prefix_len| AttentionCase {
        heads,
        params: Attention::plain(heads, spec),
        has_qk_norm,
        shares_blocks: false,
        sequences: sequences.to_vec(),
        prefix_len,
    };
    // Some scores are far above the cap, others far below it.
    let capped = |case: AttentionCase| AttentionCase {
        params: Attention {
            scale: 0.5,
            soft_cap: Some(1.5),
            ..case.params
        },
        ..case
    };
    let sharing = |case: AttentionCase| {
        let place = KvPlace {
            part: 1,
            ..case.params.place
        };
        AttentionCase {
            params: Attention { place, ..case.params },
            shares_blocks: true,
            ..case
        }
    };
    let (full, some) = (KvSpec::Full, [(1, 1), (63, 1), (64, 1), (65, 2), (130, 40)]);
    let long = [(1, 1), (63, 1), (150, 2), (210, 40)];
    let mut cases = vec![
        case(heads(4, 2, 32), full, true, &some, 0),
        case(heads(5, 1, 96), full, false, &[(70, 2)], 0),
        case(heads(4, 2, 256), full, false, &[(70, 1)], 0),
        case(heads(4, 4, 64), full, false, &some, 0),
        case(heads(7, 1, 64), KvSpec::Window(70), false, &long, 0),
        case(heads(8, 2, 128), full, true, &[(100, 1), (3, 1)], 0),
        case(heads(6, 2, 32), full, false, &[(300, 1), (310, 1), (260, 2)], 256),
        capped(case(heads(4, 2, 32), KvSpec::Window(70), false, &long, 0)),
        capped(case(heads(4, 2, 256), full, false, &[(70, 2)], 0)),
        // Heads that two warps share.
        case(heads(8, 1, 512), full, true, &[(1, 1), (70, 2)], 0),
        case(heads(6, 2, 288), KvSpec::Window(70), false, &[(100, 1), (20, 3)], 0),
        sharing(case(heads(4, 1, 512), full, true, &[(70, 1), (30, 20)], 0)),
        sharing(case(heads(4, 2, 32), KvSpec::Window(70), true, &long, 0)),
    ];
    if extent == Extent::Full {
        let many: Vec<(u32, u32)> = (0..64).map(|i| (900 + 13 * i, 1)).collect();
        cases.push(case(heads(32, 8, 128), full, false, &many, 0));
        cases.push(case(heads(32, 8, 128), full, false, &many, 768));
        cases.push(case(heads(32, 8, 128), full, false, &[(2048, 1)], 0));
        cases.push(case(heads(32, 8, 128), KvSpec::Window(1000), false, &[(3000, 1)], 0));
        cases.push(case(heads(16, 16, 80), full, false, &some, 0));
        cases.push(case(heads(64, 1, 64), full, false, &some, 0));
        cases.push(capped(case(heads(16, 8, 256), full, false, &many, 0)));
        // Gemma 4 31B and E4B.
        cases.push(case(heads(32, 4, 512), full, true, &many, 0));
        cases.push(case(heads(32, 4, 512), full, true, &many, 768));
        cases.push(sharing(case(heads(8, 2, 512), full, true, &[(2048, 1)], 0)));
        cases.push(case(heads(32, 16, 256), KvSpec::Window(1024), true, &[(2048, 1)], 0));
        cases.push(capped(case(
            heads(32, 16, 128),
            KvSpec::Window(1000),
            false,
            &[(2048, 1)],
            0,
        )));
    }
    cases
}

fn rope(heads: HeadShape) -> RopeSpec {
    RopeSpec {
        inverse_frequencies: (0..heads.head_dim / 2).map(|i| 0.7f32.powi(i as i32)).collect(),
        scale: 1.0,
    }
}

/// Describes the kind of attention, for the end of the case's name.
fn describe(params: Attention, prefix_len: u32) -> String {
    let capped = if params.soft_cap.is_some() { ", capped" } else { "" };
    match (params.spec, prefix_len) {
        (KvSpec::Window(window), _) => format!(", window {window}{capped}"),
        (_, 0) => capped.into(),
        (_, prefix_len) => format!(", {prefix_len} shared{capped}"),
    }
}

/// Output of attention for a step's tokens, and seconds of one run if it is timed.
type StepOutput = (Vec<f32>, Option<f64>);

impl AttentionCase {
    /// The two steps on a device with `block_tokens` positions per block, and the number of blocks.
    /// Blocks are assigned in a scattered order.
    fn steps(&self, block_tokens: u32) -> ([StepBatch; 2], u32) {
        let blocks_of = |tokens: u32| tokens.div_ceil(block_tokens);
        let block_count: u32 = self.sequences.iter().map(|(a, b)| blocks_of(a + b) + 1).sum();
        // A stride that is coprime to the number of blocks visits each block once.
        let stride = (3..)
            .find(|n| !block_count.is_multiple_of(*n) && (2..*n).all(|d| !n.is_multiple_of(d)))
            .unwrap_or(1);
        let mut block_ids =
            (0..block_count).map(|i| (u64::from(i) * u64::from(stride) % u64::from(block_count)) as u32);
        let mut tables: Vec<Vec<u32>> = Vec::new();
        for (first, second) in &self.sequences {
            let mut table = match tables.first() {
                Some(first) => first[..(self.prefix_len / block_tokens) as usize].to_vec(),
                None => vec![],
            };
            table.extend(
                block_ids
                    .by_ref()
                    .take(blocks_of(first + second) as usize - table.len()),
            );
            tables.push(table);
        }
        let mut steps = [StepBatch::default(), StepBatch::default()];
        for (number, step) in steps.iter_mut().enumerate() {
            for (i, ((first, second), table)) in self.sequences.iter().zip(&tables).enumerate() {
                // Only the first sequence stores the shared tokens.
                let stored = if i > 0 { self.prefix_len } else { 0 };
                let (from, to) = if number == 0 {
                    (stored, *first)
                } else {
                    (*first, first + second)
                };
                // Blocks behind a window are not the sequence's any more.
                let kept_from = self.params.spec.first_needed(from) / block_tokens;
                let held = |index: u32| {
                    if index < kept_from {
                        NO_BLOCK
                    } else {
                        table[index as usize]
                    }
                };
                step.push(from..to, to, (0..blocks_of(to)).map(held));
            }
        }
        (steps, block_count)
    }

    /// The shapes of layers in the pool: where blocks are shared, two layers take less of a block than another does in heads, and
    /// more of its scales.
    fn shapes(&self) -> Vec<KvShape> {
        let mut shapes = self.heads.alone().to_vec();
        if self.shares_blocks {
            shapes[0].layers = 2;
            let larger = heads(1, 1, 2 * (self.heads.kv_heads * self.heads.head_dim + 8));
            shapes.extend(larger.alone());
        }
        shapes
    }

    /// Output of attention for each step's tokens, and the seconds that `time` returns. Where blocks are shared, those of the layer
    /// that reads what the first one has stored follow.
    fn run<D: Device>(
        &self,
        device: &D,
        time: impl Fn(&mut dyn FnMut() -> Result<(), DeviceError>) -> Result<Option<f64>, DeviceError>,
    ) -> Result<Vec<StepOutput>, DeviceError> {
        let (steps, blocks) = self.steps(device.block_tokens());
        let mut pool = device.kv_pool(&self.shapes(), blocks as usize)?;
        // The first rotation must not be used: the operation below selects the second one.
        let unused_rope = RopeSpec {
            inverse_frequencies: vec![0.0; self.heads.head_dim / 2],
            scale: 1.0,
        };
        let mut step = device.step(vec![unused_rope, rope(self.heads)], &[(self.params.spec, self.heads)])?;
        let norm = |seed| to_device_error(device.norm(TestTensor::new(seed, 1, self.heads.head_dim, 2.0).tensor()));
        let (q, k) = (norm(10)?, norm(11)?);
        let (mut qkv, mut out, mut workspace) = (device.buffer(), device.buffer(), device.workspace());
        let width = self.heads.qkv_width();
        let mut outputs = Vec::new();
        for (number, batch) in steps.iter().enumerate() {
            device.upload(batch, &mut step, &mut workspace)?;
            // Shared tokens occur once in the batch, as rows of the first sequence.
            device.write(
                &numbers(12 + number as u64, batch.tokens.len() * width),
                width,
                &mut qkv,
            )?;
            let op = |stores: bool| RopeStore {
                place: self.params.place,
                qk_norm: self.has_qk_norm.then_some(QkNorm {
                    q: &q,
                    k: stores.then_some(&k),
                    eps: 1e-6,
                }),
                value_norm: self.shares_blocks.then_some(1e-2),
                rope: 1,
                stores,
            };
            device.rope_store(op(true), &step, &mut qkv, &mut pool)?;
            if self.shares_blocks {
                // What the blocks' other layer stores is in nobody's way.
                let other = RopeStore {
                    place: KvPlace::alone(self.heads),
                    ..op(true)
                };
                let seed = 16 + number as u64;
                device.write(&numbers(seed, batch.tokens.len() * width), width, &mut out)?;
                device.rope_store(other, &step, &mut out, &mut pool)?;
            }
            device.attention(self.params, input(&qkv), &step, &pool, &mut out, &mut workspace)?;
            let mut rows = device.read(&out)?;
            if self.shares_blocks {
                let width = self.heads.q_width();
                let queries = numbers(14 + number as u64, batch.tokens.len() * width);
                device.write(&queries, width, &mut qkv)?;
                device.rope_store(op(false), &step, &mut qkv, &mut pool)?;
                device.attention(self.params, input(&qkv), &step, &pool, &mut out, &mut workspace)?;
                rows.extend(device.read(&out)?);
            }
            let seconds =
                time(&mut || device.attention(self.params, input(&qkv), &step, &pool, &mut out, &mut workspace))?;
            outputs.push((rows, seconds));
        }
        Ok(outputs)
    }

    /// The number of keys that the queries of a step see, summed over the queries, and the number
    /// of keys that must be read from memory.
    fn count_keys(&self, step: &StepBatch) -> (f64, f64) {
        let window = match self.params.spec {
            KvSpec::Full => u32::MAX,
            KvSpec::Window(window) => window,
        };
        let (mut seen, mut read) = (0.0, 0.0);
        for (i, s) in step.sequences.iter().enumerate() {
            let positions = s.kv_len - s.q_len..s.kv_len;
            seen += positions
                .map(|position| f64::from((position + 1).min(window)))
                .sum::<f64>();
            let prefix_len = if i > 0 { self.prefix_len } else { 0 };
            read += f64::from((s.kv_len - prefix_len).min(window.saturating_add(s.q_len)));
        }
        (seen, read)
    }
}

/// Reports each step of a case as a finding. The first step is a prefill; the second has one token
/// or a few tokens per sequence.
pub(super) fn check_all<D: Device>(
    comparison: &Comparison<'_, D>,
    report: &mut dyn FnMut(Finding),
) -> Result<(), DeviceError> {
    for case in cases(comparison.extent) {
        let want = case.run(&comparison.reference, |_| Ok(None))?;
        let got = case.run(comparison.device, |run| comparison.time(comparison.device, run))?;
        let HeadShape {
            heads,
            kv_heads,
            head_dim,
            ..
        } = case.heads;
        let kind = describe(case.params, case.prefix_len) + if case.shares_blocks { ", in shared blocks" } else { "" };
        let (steps, _) = case.steps(comparison.device.block_tokens());
        for ((step, (want, _)), (got, seconds)) in steps.iter().zip(&want).zip(got) {
            let stored: u32 = step.sequences.iter().map(|s| s.kv_len).sum();
            let shape = format!(
                "{} of {stored} x {heads}/{kv_heads} x {head_dim}{kind}",
                step.tokens.len()
            );
            let name = ("rope_store, attention", comparison.kv_format.name(), shape);
            let mut finding = compare(
                name,
                Tolerance::attention(comparison.kv_format),
                heads * head_dim,
                want,
                &got,
            );
            // Seconds, operations and bytes are those of attention alone.
            let (seen, read) = case.count_keys(step);
            finding.seconds = seconds;
            finding.operations = 4.0 * seen * (heads * head_dim) as f64;
            finding.bytes = 2.0 * read * (kv_heads * head_dim) as f64 * f64::from(comparison.kv_format.bits()) / 8.0
                + 4.0 * (step.tokens.len() * heads * head_dim) as f64;
            report(finding);
        }
    }
    Ok(())
}

/// The sequences of a step as (sequence, first token, end of its tokens).
type StepSplit = Vec<(u32, u32, u32)>;

/// Output of attention for the tokens of sequence 0, concatenated over deterministic steps. The two
/// sequences share their first `prefix_len` tokens and the blocks of these tokens. A token's input
/// depends only on its position.
fn first_sequence_outputs<D: Device>(
    device: &D,
    (heads, spec): (HeadShape, KvSpec),
    steps: &[StepSplit],
    prefix_len: u32,
) -> Result<Vec<f32>, DeviceError> {
    let longest = steps.iter().flatten().map(|(_, _, to)| *to).max().unwrap_or(0);
    let blocks = longest.div_ceil(device.block_tokens());
    let block = |sequence, index| {
        if index < prefix_len / device.block_tokens() {
            index
        } else {
            sequence * blocks + index
        }
    };
    let mut pool = device.kv_pool(&heads.alone(), 2 * blocks as usize)?;
    let params = Attention::plain(heads, spec);
    let mut on_device = device.step(vec![rope(heads)], &[(spec, heads)])?;
    let (mut qkv, mut out, mut workspace) = (device.buffer(), device.buffer(), device.workspace());
    let mut results = Vec::new();
    for step in steps {
        let mut batch = StepBatch {
            deterministic: true,
            ..StepBatch::default()
        };
        let mut rows = Vec::new();
        for &(sequence, from, to) in step {
            let table = (0..to.div_ceil(device.block_tokens())).map(|index| block(sequence, index));
            batch.push(from..to, to, table);
            rows.extend((from..to).flat_map(|position| numbers(u64::from(position) << 8, heads.qkv_width())));
        }
        device.upload(&batch, &mut on_device, &mut workspace)?;
        device.write(&rows, heads.qkv_width(), &mut qkv)?;
        let op = RopeStore {
            place: KvPlace::alone(heads),
            qk_norm: None,
            value_norm: None,
            rope: 0,
            stores: true,
        };
        device.rope_store(op, &on_device, &mut qkv, &mut pool)?;
        device.attention(params, input(&qkv), &on_device, &pool, &mut out, &mut workspace)?;
        let first: u32 = step
            .iter()
            .filter(|(s, ..)| *s == 0)
            .map(|(_, from, to)| to - from)
            .sum();
        results.extend_from_slice(&device.read(&out)?[..first as usize * heads.heads * heads.head_dim]);
    }
    Ok(results)
}

/// Checks that deterministic steps give the same bits for a sequence, however its tokens are split
/// into steps and whatever else is in the batch.
pub(super) fn check_deterministic<D: Device>(
    comparison: &Comparison<'_, D>,
    report: &mut dyn FnMut(Finding),
) -> Result<(), DeviceError> {
    let (heads, end) = match comparison.extent {
        Extent::Quick => (heads(4, 2, 32), 1200),
        Extent::Full => (heads(32, 8, 128), 4200),
    };
    // `split_in_block` splits the sequence inside a block and inside a piece (see
    // docs/decisions/075). Its last step has few tokens, and its batches contain another sequence.
    // `same_prefix` computes the last tokens in a batch with a sequence that has the same prefix.
    let split_in_block = vec![
        vec![(0, 0, 1000), (1, 0, 300)],
        vec![(0, 1000, end - 3)],
        vec![(0, end - 3, end), (1, 300, 301)],
    ];
    let same_prefix = vec![
        vec![(0, 0, end - 2), (1, 1024, end - 40)],
        vec![(0, end - 2, end - 1), (1, end - 40, end - 39)],
        vec![(0, end - 1, end)],
    ];
    let cases = [
        (KvSpec::Full, vec![(&split_in_block, 0), (&same_prefix, 1024)]),
        (KvSpec::Window(700), vec![(&split_in_block, 0)]),
    ];
    for (spec, splits) in cases {
        let whole = first_sequence_outputs(comparison.device, (heads, spec), &[vec![(0, 0, end)]], 0)?;
        for (split, prefix_len) in splits {
            let got = first_sequence_outputs(comparison.device, (heads, spec), split, prefix_len)?;
            let shape = format!(
                "{end} x {}/{} x {}{}",
                heads.heads,
                heads.kv_heads,
                heads.head_dim,
                describe(Attention::plain(heads, spec), prefix_len)
            );
            let name = ("attention, deterministic", comparison.kv_format.name(), shape);
            let width = heads.heads * heads.head_dim;
            report(compare(name, Tolerance::exact(), width, &whole, &got));
        }
    }
    Ok(())
}
