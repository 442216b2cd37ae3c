//! Recurrent layers, token by token: see [`RecurrentShape`] for what they compute.
//!
//! A task is some value heads of one sequence that share a query and a key. It walks the sequence's
//! tokens in order, so a sequence's numbers depend neither on how its tokens are divided among steps
//! nor on the other sequences of a step.
//!
//! See docs/decisions/101-recurrent-states-have-slots.md.

use super::aligned::AlignedArray;
use super::isa::multiversion;
use super::math::{exp, round_bf16, silu};
use super::norm::rms_norm;
use super::step::Step;
use super::{Buffer, ExecContext, Matrix, Vector};
use crate::device::batch::{BlockCopy, StepSequence};
use crate::device::{RecurrentKind, RecurrentShape, RecurrentWeights};

/// Added to the squared length of queries and keys.
const LENGTH_EPS: f32 = 1e-6;

/// States of one layer, one per slot.
pub struct StatePool {
    shape: RecurrentShape,
    /// `[slots][tasks]`, each with the convolution's last inputs, `[conv_width - 1][channels of the
    /// task]`, and then `[value heads of the task][key_dim][value_dim]`.
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

/// Some value heads of one sequence.
struct Task<'a> {
    sequence: StepSequence,
    /// The first of the value heads.
    head: usize,
    state: &'a mut [f32],
    /// `[tokens][value heads of the task][value_dim]`.
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
    let (heads, task_width) = (shape.task_heads(), shape.task_heads() * shape.value_dim);
    let mut slots: Vec<Option<&mut [f32]>> = pool.states.chunks_exact_mut(shape.state_len()).map(Some).collect();
    let mut tasks = Vec::with_capacity(step.batch.sequences.len() * (shape.value_heads / heads));
    for (sequence, slot) in step.batch.sequences.iter().zip(&step.batch.state_slots) {
        let state = slots[*slot as usize].take();
        let states = state
            .into_iter()
            .flat_map(|state| state.chunks_exact_mut(shape.task_len()));
        tasks.extend(states.enumerate().map(|(index, state)| Task {
            sequence: *sequence,
            head: index * heads,
            state,
            out: vec![0.0; sequence.q_len as usize * task_width],
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
        for (token, values) in task.out.chunks_exact(task_width).enumerate() {
            let row = out.row_mut(task.sequence.first_token as usize + token);
            row[task.head * shape.value_dim..][..task_width].copy_from_slice(values);
        }
    }
    if shape.kind == RecurrentKind::Mamba2 {
        normalize_groups(ctx, &op, out);
    }
}

/// Normalises the outputs of the heads that share a query and a key, which may be those of several
/// tasks.
fn normalize_groups(ctx: ExecContext<'_>, op: &Op<'_>, out: &mut Buffer) {
    let (work, width) = (out.data.len(), out.width);
    let parts = ctx.threads.parts(work);
    let mut parts: Vec<_> = out.parts_mut(parts).collect();
    ctx.threads.parallel_for_each(work, &mut parts, |_, parts| {
        for (_, part) in parts {
            for row in part.chunks_exact_mut(width) {
                normalize_row(ctx.isa, op, row);
            }
        }
    });
}

multiversion! {
    fn normalize_row(op: &Op<'_>, row: &mut [f32]) = normalize_row_body;
}

#[inline(always)]
fn normalize_row_body(op: &Op<'_>, row: &mut [f32]) {
    let width = row.len() / op.weights.shape.key_heads;
    let weights = op.weights.norm.0.chunks_exact(width);
    for (group, weights) in row.chunks_exact_mut(width).zip(weights) {
        rms_norm(group, weights, op.weights.norm_eps, op.round_to_bf16);
    }
}

multiversion! {
    fn run_task(op: &Op<'_>, task: &mut Task<'_>) = task_body;
}

#[inline(always)]
fn task_body(op: &Op<'_>, task: &mut Task<'_>) {
    let (weights, shape) = (op.weights, op.weights.shape);
    let (key_dim, value_dim, at) = (shape.key_dim, shape.value_dim, shape.row());
    let key_head = task.head / (shape.value_heads / shape.key_heads);
    let values = shape.task_heads() * value_dim;
    // Where the channels of this task begin in a row, and how many there are: queries, keys, values.
    let parts = [
        (at.q + key_head * key_dim, key_dim),
        (at.k + key_head * key_dim, key_dim),
        (at.v + task.head * value_dim, values),
    ];
    let channels = 2 * key_dim + values;
    let width = shape.conv_width;
    // `[conv_width][channels]`, and `[channels]`.
    let (mut conv, mut bias) = (vec![0.0; width * channels], vec![0.0; channels]);
    let of_task = parts.iter().flat_map(|(first, count)| *first..first + count);
    for (channel, index) in of_task.map(|index| index - at.conv()).enumerate() {
        for tap in 0..width {
            conv[tap * channels + channel] = weights.conv.0[index * width + tap];
        }
        bias[channel] = weights.conv_bias.as_ref().map_or(0.0, |bias| bias.0[index]);
    }
    if task.sequence.q_len == task.sequence.kv_len {
        task.state.fill(0.0);
    }
    let (window, matrices) = task.state.split_at_mut((width - 1) * channels);
    let mut mixed = vec![0.0; channels];
    let mut current = vec![0.0; channels];
    let mut change = vec![0.0; value_dim];
    for (token, out) in task.out.chunks_exact_mut(values).enumerate() {
        let row = op.input.row(task.sequence.first_token as usize + token);
        let mut filled = 0;
        for (first, count) in parts {
            current[filled..filled + count].copy_from_slice(&row[first..first + count]);
            filled += count;
        }
        convolve(window, &current, (&conv, &bias), &mut mixed);
        let (query, rest) = mixed.split_at_mut(key_dim);
        let (key, values) = rest.split_at_mut(key_dim);
        if shape.kind == RecurrentKind::DeltaNet {
            scale_to_length(query, 1.0 / (key_dim as f32).sqrt());
            scale_to_length(key, 1.0);
        }
        let heads = matrices.chunks_exact_mut(key_dim * value_dim);
        let heads = heads
            .zip(values.chunks_exact(value_dim))
            .zip(out.chunks_exact_mut(value_dim));
        for (index, ((matrix, value), out)) in heads.enumerate() {
            let head = task.head + index;
            let time = softplus(row[at.a + head] + weights.decay_bias.0[head]);
            let decay = decay(weights.decay.0[head], time);
            let z = &row[at.z + head * value_dim..][..value_dim];
            match shape.kind {
                RecurrentKind::DeltaNet => {
                    let beta = 1.0 / (1.0 + exp(-row[at.b + head]));
                    delta_rule(matrix, (&*query, &*key, value), (decay, beta), &mut change, out);
                    rms_norm(out, &weights.norm.0, weights.norm_eps, false);
                }
                RecurrentKind::Mamba2 => {
                    let skip = weights.skip.as_ref().map_or(0.0, |skip| skip.0[head]);
                    state_space(matrix, (&*query, &*key, value), (decay, time as f32), &mut change, out);
                    for (x, v) in out.iter_mut().zip(value) {
                        *x = v.mul_add(skip, *x);
                    }
                }
            }
            // Mamba-2 normalises afterwards.
            let rounds = op.round_to_bf16 && shape.kind == RecurrentKind::DeltaNet;
            for (x, z) in out.iter_mut().zip(z) {
                let gated = *x * silu(*z);
                *x = if rounds { round_bf16(gated) } else { gated };
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

/// As [`delta_rule`], in Mamba-2. `time` is how much of the value is written.
#[inline(always)]
fn state_space(
    matrix: &mut [f32],
    (query, key, value): (&[f32], &[f32], &[f32]),
    (decay, time): (f32, f32),
    change: &mut [f32],
    out: &mut [f32],
) {
    for (x, v) in change.iter_mut().zip(value) {
        *x = time * v;
    }
    out.fill(0.0);
    for ((row, k), q) in matrix.chunks_exact_mut(value.len()).zip(key).zip(query) {
        for ((x, v), sum) in row.iter_mut().zip(&*change).zip(&mut *out) {
            *x = v.mul_add(*k, *x * decay);
            *sum = x.mul_add(*q, *sum);
        }
    }
}

/// The convolution at one token, and SiLU. `window` holds the inputs of the tokens before, the oldest
/// first, and takes the token's own.
#[inline(always)]
fn convolve(window: &mut [f32], current: &[f32], (conv, bias): (&[f32], &[f32]), out: &mut [f32]) {
    let channels = current.len();
    let taps = window.chunks_exact(channels).chain([current]);
    out.copy_from_slice(bias);
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

/// `ln(1 + e^x)`, in F64: a state is multiplied by [`decay`] once per token.
#[inline(always)]
fn softplus(x: f32) -> f64 {
    let x = f64::from(x);
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// `e^-(e^log * time)`.
#[inline(always)]
fn decay(log: f32, time: f64) -> f32 {
    (-f64::from(log).exp() * time).exp() as f32
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

    const DELTA: RecurrentShape = RecurrentShape {
        kind: RecurrentKind::DeltaNet,
        key_heads: 2,
        value_heads: 6,
        key_dim: 9,
        value_dim: 7,
        conv_width: 4,
    };
    /// Two tasks of 5 heads share a query and a key.
    const MAMBA: RecurrentShape = RecurrentShape {
        kind: RecurrentKind::Mamba2,
        value_heads: 20,
        ..DELTA
    };

    type Weights = RecurrentWeights<Matrix, Vector>;

    fn weights(shape: RecurrentShape) -> Weights {
        let nothing = Tensor {
            dtype: crate::device::Dtype::F32,
            rows: 1,
            columns: 1,
            data: &[0; 4],
        };
        let is_mamba = shape.kind == RecurrentKind::Mamba2;
        let norm = if is_mamba { shape.value_width() } else { shape.value_dim };
        RecurrentWeights {
            shape,
            input: Linear {
                weight: Matrix::pack(&[nothing], Precision::F32).unwrap(),
                bias: None,
            },
            conv: Vector(numbers(2, shape.conv_channels() * shape.conv_width)),
            conv_bias: is_mamba.then(|| Vector(numbers(6, shape.conv_channels()))),
            decay: Vector(numbers(3, shape.value_heads)),
            decay_bias: Vector(numbers(4, shape.value_heads)),
            skip: is_mamba.then(|| Vector(numbers(7, shape.value_heads))),
            norm: Vector(numbers(5, norm)),
            norm_eps: 1e-3,
        }
    }

    fn sigmoid(x: f64) -> f64 {
        1.0 / (1.0 + (-x).exp())
    }

    /// The convolution of a channel, counted from the first of a row that is convolved, and SiLU.
    fn mixed(rows: &[f32], w: &Weights, token: usize, channel: usize) -> f64 {
        let (width, taps, first) = (w.shape.input_width(), w.shape.conv_width, w.shape.row().conv());
        let seen = (0..taps).filter(|tap| token + tap + 1 >= taps);
        let of_tap = |tap: usize| {
            let x = rows[(token + tap + 1 - taps) * width + first + channel];
            f64::from(x) * f64::from(w.conv.0[channel * taps + tap])
        };
        let bias = w.conv_bias.as_ref().map_or(0.0, |bias| f64::from(bias.0[channel]));
        let sum = bias + seen.map(of_tap).sum::<f64>();
        sum * sigmoid(sum)
    }

    /// Divides numbers by the root of their mean square.
    fn normalised(x: &[f64], eps: f32) -> Vec<f64> {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        x.iter().map(|x| x / (mean + f64::from(eps)).sqrt()).collect()
    }

    /// The module's formulas in F64, over a whole sequence.
    fn expected(rows: &[f32], w: &Weights) -> Vec<f64> {
        let shape = w.shape;
        let (kd, vd, group) = (shape.key_dim, shape.value_dim, shape.value_heads / shape.key_heads);
        let is_mamba = shape.kind == RecurrentKind::Mamba2;
        let keys = shape.key_width();
        // Where queries, keys and values stand among the convolved channels, and gates in a row.
        let [q_at, k_at, v_at, z_at, b_at, a_at] = if is_mamba {
            let values = shape.value_width();
            [values + keys, values, 0, 0, 0, 2 * (values + keys)]
        } else {
            let z = shape.conv_channels();
            let b = z + shape.value_width();
            [0, keys, 2 * keys, z, b, b + shape.value_heads]
        };
        let tokens = rows.len() / shape.input_width();
        let mut out = vec![0.0; tokens * shape.value_width()];
        for head in 0..shape.value_heads {
            let mut state = vec![vec![0.0; vd]; kd];
            for token in 0..tokens {
                let row = |index: usize| f64::from(rows[token * shape.input_width() + index]);
                let key_vector = |first: usize| {
                    let first = first + head / group * kd;
                    let x: Vec<f64> = (0..kd).map(|d| mixed(rows, w, token, first + d)).collect();
                    let length = (x.iter().map(|x| x * x).sum::<f64>() + f64::from(LENGTH_EPS)).sqrt();
                    let divisor = if is_mamba { 1.0 } else { length };
                    x.into_iter().map(|x| x / divisor).collect::<Vec<_>>()
                };
                let (q, k) = (key_vector(q_at), key_vector(k_at));
                let time = (1.0 + (row(a_at + head) + f64::from(w.decay_bias.0[head])).exp()).ln();
                let decay = (-f64::from(w.decay.0[head]).exp() * time).exp();
                state.iter_mut().flatten().for_each(|x| *x *= decay);
                let mut o = vec![0.0; vd];
                for d in 0..vd {
                    let v = mixed(rows, w, token, v_at + head * vd + d);
                    let seen: f64 = (0..kd).map(|i| state[i][d] * k[i]).sum();
                    let change = if is_mamba {
                        time * v
                    } else {
                        sigmoid(row(b_at + head)) * (v - seen)
                    };
                    for i in 0..kd {
                        state[i][d] += k[i] * change;
                        o[d] += state[i][d] * q[i];
                    }
                    match &w.skip {
                        Some(skip) => o[d] += v * f64::from(skip.0[head]),
                        None => o[d] /= (kd as f64).sqrt(),
                    }
                }
                if !is_mamba {
                    o = normalised(&o, w.norm_eps);
                    o.iter_mut()
                        .zip(&w.norm.0)
                        .for_each(|(o, weight)| *o *= f64::from(*weight));
                }
                for d in 0..vd {
                    let z = row(z_at + head * vd + d);
                    out[token * shape.value_width() + head * vd + d] = o[d] * z * sigmoid(z);
                }
            }
        }
        if is_mamba {
            for row in out.chunks_exact_mut(shape.value_width()) {
                let groups = row.chunks_exact(group * vd);
                let groups: Vec<f64> = groups.flat_map(|group| normalised(group, w.norm_eps)).collect();
                for ((x, group), weight) in row.iter_mut().zip(groups).zip(&w.norm.0) {
                    *x = group * f64::from(*weight);
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
            value_in_key: None,
        };
        let mut step = Step::new(vec![], &[(KvSpec::Full, heads)], false);
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
        let shape = pool.shape;
        let input = buffer(rows, batch.tokens.len(), shape.input_width());
        recurrent(ctx(isa), (&weights(shape), false), &input, &step, pool, &mut out);
        out.data.to_vec()
    }

    fn check_states(shape: RecurrentShape) {
        let width = shape.input_width();
        let rows =
            |seed, tokens: usize| -> Vec<f32> { numbers(seed, tokens * width).iter().map(|x| 3.0 * x).collect() };
        let (first, second) = (rows(11, 37), rows(12, 20));
        let want = expected(&first, &weights(shape));
        let largest = want.iter().fold(0.0f64, |max, x| max.max(x.abs()));
        let mut bits: Option<Vec<f32>> = None;
        for isa in Isa::available() {
            // Slots hold what earlier sequences left.
            let mut pool = StatePool::new(shape, 3);
            pool.states.fill(f32::NAN);
            let whole = run(isa, &mut pool, &first, [(1, 37, 0), (0, 0, 0)]);
            assert_eq!(whole.len(), want.len());
            for (got, want) in whole.iter().zip(&want) {
                assert!((f64::from(*got) - want).abs() < 1e-5 * largest, "{isa}: {got} {want}");
            }
            let both = [&first[..20 * width], &second].concat();
            let mut cut = run(isa, &mut pool, &both, [(2, 20, 0), (0, 20, 0)]);
            cut.truncate(20 * shape.value_width());
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
    fn states_of_delta_networks_are_those_of_the_formulas_however_tokens_are_cut() {
        check_states(DELTA);
    }

    #[test]
    fn states_of_mamba_are_those_of_the_formulas_however_tokens_are_cut() {
        assert_eq!(MAMBA.task_heads(), 5);
        check_states(MAMBA);
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
