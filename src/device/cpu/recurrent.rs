//! Recurrent layers, token by token: see [`RecurrentShape`] for what they compute.
//!
//! A task is one key head of one sequence, with the value heads that share it. It walks the
//! sequence's tokens in order, so a sequence's numbers depend neither on how its tokens are divided
//! among steps nor on the other sequences of a step.
//!
//! See docs/decisions/101-recurrent-states-have-slots.md.

use super::aligned::AlignedArray;
use super::isa::multiversion;
use super::math::{exp, round_bf16, silu};
use super::norm::rms_norm;
use super::step::Step;
use super::{Buffer, ExecContext, Matrix, Vector};
use crate::device::batch::{BlockCopy, StepSequence};
use crate::device::{RecurrentShape, RecurrentWeights};

/// Added to the squared length of queries and keys.
const LENGTH_EPS: f32 = 1e-6;

/// States of one layer, one per slot.
pub struct StatePool {
    shape: RecurrentShape,
    /// `[slots][key heads]`, each with the convolution's last inputs, `[conv_width - 1][channels of
    /// the head]`, and then `[value heads of the key head][key_dim][value_dim]`.
    states: AlignedArray<f32>,
}

impl StatePool {
    pub(super) fn new(shape: RecurrentShape, slots: usize) -> StatePool {
        StatePool {
            shape,
            states: AlignedArray::new(slots * shape.state_len()),
        }
    }

    /// Copies the states of slots, in order.
    pub(super) fn copy(&mut self, copies: &[BlockCopy]) {
        let len = self.shape.state_len();
        for copy in copies {
            let from = copy.from as usize * len;
            self.states.copy_within(from..from + len, copy.to as usize * len);
        }
    }
}

/// A key head of one sequence.
struct Task<'a> {
    sequence: StepSequence,
    head: usize,
    state: &'a mut [f32],
    /// `[tokens][value heads of the key head][value_dim]`.
    out: Vec<f32>,
}

/// A layer's weights and the rows of its input.
struct Op<'a> {
    weights: &'a RecurrentWeights<Matrix, Vector>,
    input: &'a Buffer,
    round_to_bf16: bool,
}

/// Runs the layer on all tokens of the step and updates the states of their sequences.
pub(super) fn recurrent(
    ctx: ExecContext<'_>,
    (weights, round_to_bf16): (&RecurrentWeights<Matrix, Vector>, bool),
    input: &Buffer,
    step: &Step,
    pool: &mut StatePool,
    out: &mut Buffer,
) {
    let shape = weights.shape;
    assert_eq!((shape, shape.input_width()), (pool.shape, input.width));
    let head_len = shape.state_len() / shape.key_heads;
    let mut slots: Vec<Option<&mut [f32]>> = pool.states.chunks_exact_mut(shape.state_len()).map(Some).collect();
    let group_width = shape.value_width() / shape.key_heads;
    let mut tasks = Vec::with_capacity(step.batch.sequences.len() * shape.key_heads);
    for (sequence, slot) in step.batch.sequences.iter().zip(&step.batch.state_slots) {
        let state = slots[*slot as usize].take();
        let heads = state.into_iter().flat_map(|state| state.chunks_exact_mut(head_len));
        tasks.extend(heads.enumerate().map(|(head, state)| Task {
            sequence: *sequence,
            head,
            state,
            out: vec![0.0; sequence.q_len as usize * group_width],
        }));
    }
    let op = Op {
        weights,
        input,
        round_to_bf16,
    };
    let work = input.rows * shape.value_width() * shape.key_dim;
    ctx.threads.parallel_for_each(work, &mut tasks, |_, tasks| {
        for task in tasks {
            run_task(ctx.isa, &op, task);
        }
    });
    out.reshape(input.rows, shape.value_width());
    for task in &tasks {
        for (token, values) in task.out.chunks_exact(group_width).enumerate() {
            let row = out.row_mut(task.sequence.first_token as usize + token);
            row[task.head * group_width..][..group_width].copy_from_slice(values);
        }
    }
}

multiversion! {
    fn run_task(op: &Op<'_>, task: &mut Task<'_>) = task_body;
}

#[inline(always)]
fn task_body(op: &Op<'_>, task: &mut Task<'_>) {
    let shape = op.weights.shape;
    let (key_dim, value_dim) = (shape.key_dim, shape.value_dim);
    let group = shape.value_heads / shape.key_heads;
    let group_width = group * value_dim;
    // Where the channels of this head begin in a row, and how many there are: queries, keys, values.
    let parts = [
        (task.head * key_dim, key_dim),
        (shape.key_width() + task.head * key_dim, key_dim),
        (2 * shape.key_width() + task.head * group_width, group_width),
    ];
    let channels = 2 * key_dim + group_width;
    let width = shape.conv_width;
    // `[conv_width][channels]`.
    let mut conv = vec![0.0; width * channels];
    let of_head = parts.iter().flat_map(|(first, count)| *first..first + count);
    for (channel, index) in of_head.enumerate() {
        for tap in 0..width {
            conv[tap * channels + channel] = op.weights.conv.0[index * width + tap];
        }
    }
    if task.sequence.q_len == task.sequence.kv_len {
        task.state.fill(0.0);
    }
    let (window, matrices) = task.state.split_at_mut((width - 1) * channels);
    let mut mixed = vec![0.0; channels];
    let mut current = vec![0.0; channels];
    let mut delta = vec![0.0; value_dim];
    for (token, out) in task.out.chunks_exact_mut(group_width).enumerate() {
        let row = op.input.row(task.sequence.first_token as usize + token);
        let mut at = 0;
        for (first, count) in parts {
            current[at..at + count].copy_from_slice(&row[first..first + count]);
            at += count;
        }
        convolve(window, &current, &conv, &mut mixed);
        let (query, rest) = mixed.split_at_mut(key_dim);
        let (key, values) = rest.split_at_mut(key_dim);
        scale_to_length(query, 1.0 / (key_dim as f32).sqrt());
        scale_to_length(key, 1.0);
        let heads = matrices.chunks_exact_mut(key_dim * value_dim);
        let heads = heads
            .zip(values.chunks_exact(value_dim))
            .zip(out.chunks_exact_mut(value_dim));
        let gates = &row[shape.conv_channels()..];
        let (z, gates) = gates.split_at(shape.value_width());
        for (index, ((matrix, value), out)) in heads.enumerate() {
            let head = task.head * group + index;
            let (b, a) = (gates[head], gates[shape.value_heads + head]);
            let decay = decay(op.weights.decay.0[head], a + op.weights.decay_bias.0[head]);
            delta_rule(
                matrix,
                (&*query, &*key, value),
                (decay, 1.0 / (1.0 + exp(-b))),
                &mut delta,
                out,
            );
            rms_norm(out, &op.weights.norm.0, op.weights.norm_eps, false);
            for (x, z) in out.iter_mut().zip(&z[head * value_dim..]) {
                let gated = *x * silu(*z);
                *x = if op.round_to_bf16 { round_bf16(gated) } else { gated };
            }
        }
    }
}

/// Reads and writes a head's state at one token. `delta` is scratch memory for a value.
#[inline(always)]
fn delta_rule(
    matrix: &mut [f32],
    (query, key, value): (&[f32], &[f32], &[f32]),
    (decay, beta): (f32, f32),
    delta: &mut [f32],
    out: &mut [f32],
) {
    delta.fill(0.0);
    for (row, k) in matrix.chunks_exact_mut(value.len()).zip(key) {
        for (x, sum) in row.iter_mut().zip(&mut *delta) {
            *x *= decay;
            *sum = x.mul_add(*k, *sum);
        }
    }
    for (sum, v) in delta.iter_mut().zip(value) {
        *sum = (v - *sum) * beta;
    }
    out.fill(0.0);
    for ((row, k), q) in matrix.chunks_exact_mut(value.len()).zip(key).zip(query) {
        for ((x, d), sum) in row.iter_mut().zip(&*delta).zip(&mut *out) {
            *x = d.mul_add(*k, *x);
            *sum = x.mul_add(*q, *sum);
        }
    }
}

/// The convolution at one token, and SiLU. `window` holds the inputs of the tokens before, the oldest
/// first, and takes the token's own.
#[inline(always)]
fn convolve(window: &mut [f32], current: &[f32], conv: &[f32], out: &mut [f32]) {
    let channels = current.len();
    let taps = window.chunks_exact(channels).chain([current]);
    out.fill(0.0);
    for (inputs, factors) in taps.zip(conv.chunks_exact(channels)) {
        for ((sum, x), factor) in out.iter_mut().zip(inputs).zip(factors) {
            *sum = x.mul_add(*factor, *sum);
        }
    }
    out.iter_mut().for_each(|x| *x = silu(*x));
    if let Some(kept) = window.len().checked_sub(channels) {
        window.copy_within(channels.., 0);
        window[kept..].copy_from_slice(current);
    }
}

/// Divides `x` by its length and multiplies it by `scale`.
#[inline(always)]
fn scale_to_length(x: &mut [f32], scale: f32) {
    let mut squares = 0.0f32;
    for v in &*x {
        squares = v.mul_add(*v, squares);
    }
    let factor = scale / (squares + LENGTH_EPS).sqrt();
    x.iter_mut().for_each(|v| *v *= factor);
}

/// `e^-(e^log * softplus(x))`, in F64: a state is multiplied by it once per token.
#[inline(always)]
fn decay(log: f32, x: f32) -> f32 {
    let x = f64::from(x);
    let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
    (-f64::from(log).exp() * softplus).exp() as f32
}

/// Multiplies `out` by the sigmoid of `gate`.
pub(super) fn gate(ctx: ExecContext<'_>, round_to_bf16: bool, gate: &Buffer, out: &mut Buffer) {
    assert_eq!((gate.rows, gate.width), (out.rows, out.width));
    let parts = ctx.threads.parts(out.data.len());
    let mut parts: Vec<_> = out.parts_mut(parts).collect();
    ctx.threads.parallel_for_each(gate.data.len(), &mut parts, |_, parts| {
        for (first, part) in parts {
            let gates = &gate.data[*first * gate.width..][..part.len()];
            gate_part(ctx.isa, gates, part, round_to_bf16);
        }
    });
}

multiversion! {
    fn gate_part(gates: &[f32], out: &mut [f32], round_to_bf16: bool) = gate_part_body;
}

#[inline(always)]
fn gate_part_body(gates: &[f32], out: &mut [f32], round_to_bf16: bool) {
    for (x, g) in out.iter_mut().zip(gates) {
        let gated = *x / (1.0 + exp(-g));
        *x = if round_to_bf16 { round_bf16(gated) } else { gated };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::batch::StepBatch;
    use crate::device::cpu::gemm::matrix::Matrix;
    use crate::device::cpu::testing::{buffer, ctx, numbers};
    use crate::device::cpu::{Isa, Precision};
    use crate::device::{HeadShape, KvSpec, Linear, Tensor};

    const SHAPE: RecurrentShape = RecurrentShape {
        key_heads: 2,
        value_heads: 6,
        key_dim: 9,
        value_dim: 7,
        conv_width: 4,
    };

    fn weights() -> RecurrentWeights<Matrix, Vector> {
        let nothing = Tensor {
            dtype: crate::device::Dtype::F32,
            rows: 1,
            columns: 1,
            data: &[0; 4],
        };
        RecurrentWeights {
            shape: SHAPE,
            input: Linear {
                weight: Matrix::pack(&[nothing], Precision::F32).unwrap(),
                bias: None,
            },
            conv: Vector(numbers(2, SHAPE.conv_channels() * SHAPE.conv_width)),
            decay: Vector(numbers(3, SHAPE.value_heads)),
            decay_bias: Vector(numbers(4, SHAPE.value_heads)),
            norm: Vector(numbers(5, SHAPE.value_dim)),
            norm_eps: 1e-3,
        }
    }

    /// The module's formulas in F64, over a whole sequence.
    fn expected(rows: &[f32], w: &RecurrentWeights<Matrix, Vector>) -> Vec<f64> {
        let (kd, vd, group) = (SHAPE.key_dim, SHAPE.value_dim, SHAPE.value_heads / SHAPE.key_heads);
        let row = |token: usize| &rows[token * SHAPE.input_width()..][..SHAPE.input_width()];
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let mixed = |token: usize, channel: usize| {
            let taps = (0..SHAPE.conv_width).filter(|tap| token + tap + 1 >= SHAPE.conv_width);
            let sum: f64 = taps
                .map(|tap| {
                    let x = row(token + tap + 1 - SHAPE.conv_width)[channel];
                    f64::from(x) * f64::from(w.conv.0[channel * SHAPE.conv_width + tap])
                })
                .sum();
            sum * sigmoid(sum)
        };
        let unit = |token: usize, first: usize| {
            let x: Vec<f64> = (0..kd).map(|d| mixed(token, first + d)).collect();
            let length = (x.iter().map(|x| x * x).sum::<f64>() + f64::from(LENGTH_EPS)).sqrt();
            x.into_iter().map(|x| x / length).collect::<Vec<_>>()
        };
        let tokens = rows.len() / SHAPE.input_width();
        let mut out = vec![0.0; tokens * SHAPE.value_width()];
        for head in 0..SHAPE.value_heads {
            let mut state = vec![vec![0.0; vd]; kd];
            for token in 0..tokens {
                let q = unit(token, head / group * kd);
                let k = unit(token, SHAPE.key_width() + head / group * kd);
                let gates = &row(token)[SHAPE.conv_channels()..];
                let at = |index: usize| f64::from(gates[SHAPE.value_width() + index]);
                let (b, a) = (at(head), at(SHAPE.value_heads + head));
                let softplus = (1.0 + (a + f64::from(w.decay_bias.0[head])).exp()).ln();
                let decay = (-f64::from(w.decay.0[head]).exp() * softplus).exp();
                state.iter_mut().flatten().for_each(|x| *x *= decay);
                let mut o = vec![0.0; vd];
                for d in 0..vd {
                    let seen: f64 = (0..kd).map(|i| state[i][d] * k[i]).sum();
                    let v = mixed(token, 2 * SHAPE.key_width() + head * vd + d);
                    let change = sigmoid(b) * (v - seen);
                    for i in 0..kd {
                        state[i][d] += k[i] * change;
                        o[d] += state[i][d] * q[i] / (kd as f64).sqrt();
                    }
                }
                let mean = o.iter().map(|x| x * x).sum::<f64>() / vd as f64;
                for d in 0..vd {
                    let z = f64::from(gates[head * vd + d]);
                    let norm = o[d] / (mean + f64::from(w.norm_eps)).sqrt() * f64::from(w.norm.0[d]);
                    out[token * SHAPE.value_width() + head * vd + d] = norm * z * sigmoid(z);
                }
            }
        }
        out
    }

    /// Runs parts of two sequences, each with its slot, number of tokens and length before.
    fn run(isa: Isa, pool: &mut StatePool, rows: &[f32], parts: [(u32, u32, u32); 2]) -> Vec<f32> {
        let heads = HeadShape {
            heads: 1,
            kv_heads: 1,
            head_dim: 2,
        };
        let mut step = Step::new(&[heads], vec![], &[KvSpec::Full], false);
        let mut batch = StepBatch::default();
        for (slot, tokens, before) in parts.into_iter().filter(|(_, tokens, _)| *tokens > 0) {
            batch.push(
                (0..tokens).map(|_| 0),
                before + tokens,
                0..(before + tokens).div_ceil(16),
            );
            batch.state_slots.push(slot);
        }
        step.upload(&batch);
        let mut out = Buffer::default();
        let input = buffer(rows, batch.tokens.len(), SHAPE.input_width());
        recurrent(ctx(isa), (&weights(), false), &input, &step, pool, &mut out);
        out.data
    }

    #[test]
    fn states_are_those_of_the_formulas_however_tokens_are_cut() {
        let width = SHAPE.input_width();
        let rows =
            |seed, tokens: usize| -> Vec<f32> { numbers(seed, tokens * width).iter().map(|x| 3.0 * x).collect() };
        let (first, second) = (rows(11, 37), rows(12, 20));
        let want = expected(&first, &weights());
        let largest = want.iter().fold(0.0f64, |max, x| max.max(x.abs()));
        let mut bits: Option<Vec<f32>> = None;
        for isa in Isa::available() {
            // Slots hold what earlier sequences left.
            let mut pool = StatePool::new(SHAPE, 3);
            pool.states.fill(f32::NAN);
            let whole = run(isa, &mut pool, &first, [(1, 37, 0), (0, 0, 0)]);
            for (got, want) in whole.iter().zip(&want) {
                assert!((f64::from(*got) - want).abs() < 1e-5 * largest, "{isa}: {got} {want}");
            }
            let both = [&first[..20 * width], &second].concat();
            let mut cut = run(isa, &mut pool, &both, [(2, 20, 0), (0, 20, 0)]);
            cut.truncate(20 * SHAPE.value_width());
            pool.copy(&[BlockCopy { from: 2, to: 1 }]);
            cut.extend(run(
                isa,
                &mut pool,
                &first[20 * width..21 * width],
                [(1, 1, 20), (0, 0, 0)],
            ));
            cut.extend(run(isa, &mut pool, &first[21 * width..], [(1, 16, 21), (0, 0, 0)]));
            assert_eq!(cut, whole, "{isa}");
            assert_eq!(*bits.get_or_insert_with(|| whole.clone()), whole, "{isa}");
        }
    }

    #[test]
    fn outputs_are_multiplied_by_the_sigmoid_of_their_gates() {
        for isa in Isa::available() {
            let gates = buffer(&[0.0, 3.0, -200.0], 1, 3);
            let mut out = buffer(&[2.0, -1.0, 5.0], 1, 3);
            gate(ctx(isa), false, &gates, &mut out);
            let close = |x: f32, want: f32| (x - want).abs() < 1e-6;
            let [a, b, c] = out.data[..] else { panic!("three") };
            assert!(
                close(a, 1.0) && close(b, -0.952_574_13) && close(c, 0.0),
                "{isa}: {:?}",
                out.data
            );
        }
    }
}
